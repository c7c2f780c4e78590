"""Control: `parity` detects code that is deliberately broken in `mha_tt`, at the stage where it is
broken.

A mutation wraps a function of `mha_tt` or ttnn, or is a known bug, injected as in `mha_jax` and
`mha_torch`. Mutations run in bfloat16, because no call in float32 uses the fused path. If the
padding of a head is not 0, or a call is one of the traps of `ttnn_mock`, the case fails as a whole.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import ttnn
from helpers.samples import sample
from helpers.tt.formulas import IS_MOCK

import mha_tt
from mha_spec.heads import BareHeads
from mha_tt import cache as caches
from mha_tt import (
    cache_mha,
    device,
    functional,
    heads,
    layout,
    mask_arrays,
    masks,
    mha,
    projections,
    stages,
    weights,
)
from mha_tt.decode import positions, step
from mha_tt.decode.slots import as_cached
from mha_tt.device import upload
from mha_tt.features import latent, norms, rope, temperature
from mha_tt.kernels import fused
from mha_tt.layout import TILE, feature_indices, padded_head_dim, round_up
from mha_tt.masks import MASKED, on_host
from parity import CASES, AttentionSpec, Case, Rope, make_problem, run_cases
from parity_lab.selftest import inject

TRAP = "run" if IS_MOCK else "fused.output"

GQA_ROPE = AttentionSpec(48, 6, num_kv_heads=2, head_dim=16, rope=Rope(10000.0))
MORE_CASES = [
    Case("tiles", GQA_ROPE, "chunks across tiles", seq_len=67, chunks=(30, 36, 1), capacity=128),
    Case(
        "ragged-tiles",
        GQA_ROPE,
        "sequences that end in different tiles",
        seq_len=68,
        chunks=(30, 37, 1),
        new_lengths=((30, 29), (36, 37), (1, 1)),
        capacity=70,
    ),
]
EVERY_CASE = {**CASES, **{case.name: case for case in MORE_CASES}}


Override = Callable[..., Any]
"""Replacement of a function: called with the original function and its inputs."""


@dataclass(frozen=True)
class Mutation:
    """A mutation, and the case and stage that must detect it.

    Attributes:
        case: name of a case that must fail.
        stage: the stage that must be reported as the first difference.
        broken: the override, or the name of a known bug.
        holders: modules or classes that hold the overridden function, and its name there.
        dtype: dtype in which the case must fail: bfloat16, which has the wider budget and both
            paths, unless only float32 is broken.
    """

    case: str
    stage: str
    broken: Override | str
    holders: tuple[tuple[Any, str], ...] = ()
    dtype: str = "bfloat16"


def one(
    case: str, stage: str, function: Callable[..., Any], broken: Override, dtype: str = "bfloat16"
) -> Mutation:
    """Return a mutation of a function in all modules that hold it, and of its checked form in the
    package.
    """
    name = function.__name__
    modules = (
        caches,
        cache_mha,
        device,
        fused,
        heads,
        latent,
        layout,
        masks,
        mha,
        norms,
        projections,
        stages,
    )
    modules += (functional, mask_arrays, step, temperature, weights, mha_tt)
    body = inspect.unwrap(function)
    holders = tuple(
        (module, name) for module in modules if inspect.unwrap(vars(module).get(name)) is body
    )
    return Mutation(case, stage, broken, holders, dtype)


def at(
    case: str, stage: str, holder: Any, name: str, broken: Override, dtype: str = "bfloat16"
) -> Mutation:
    """Return a mutation of a function in one module."""
    return Mutation(case, stage, broken, ((holder, name),), dtype)


# ---- Overrides of more than a line ---------------------------------------------------------------


def without_spec(original, kernel, q, k, v, visible, scores):
    """Count the padding of a head as features."""
    return original(kernel, q, k, v, visible, replace(scores, spec=BareHeads(q.shape[3])))


def step_without_spec(original, q, keys, values, last_positions, spec=None, **options):
    """Count the padding of a head as features in a step."""
    return original(q, keys, values, last_positions, BareHeads(q.shape[3]), **options)


def without_bias(name: str, stage: str) -> Mutation:
    def project_with(original, weights, spec, **options):
        return original(
            {key: x for key, x in weights.items() if key != f"{name}.bias"}, spec, **options
        )

    return one("causal", stage, weights.project_with, project_with)


def padded_with_ones(pad_heads, rows, part, spec):
    is_real = pad_heads(np.ones_like(rows), part, spec) == 1
    return np.where(is_real, pad_heads(rows, part, spec), np.ones((), rows.dtype))


def padded_at_the_beginning(pad_heads, rows, part, spec):
    padded, width = (
        pad_heads(rows, part, spec),
        padded_head_dim(spec.head_dim, rope=spec.rope is not None),
    )
    by_head = padded.reshape(-1, width, *rows.shape[1:])
    return np.roll(by_head, width - spec.head_dim, axis=1).reshape(padded.shape)


def out_proj_rolled(upload_weights, canonical, spec, **options):
    rolled = np.roll(canonical["out_proj.weight"], spec.head_dim, axis=1)
    return upload_weights({**canonical, "out_proj.weight": rolled}, spec, **options)


def tiled(repeat_kv_heads, x, num_heads):
    repeats = num_heads // x.shape[1]
    return x if repeats == 1 else ttnn.concat([x] * repeats, dim=1)


def keys_left_alone():
    """Return an override that rotates queries but not keys, which are rotated in turns."""
    turns = cycle([True, False])
    return lambda original, rotation, x: original(rotation, x) if next(turns) else x


def of_first_only(function):
    """Return an override that changes queries and leaves keys, which follow them, unchanged."""
    turns = cycle([True, False])

    def override(original, x, *inputs, **options):
        return function(original, x, *inputs, **options) if next(turns) else x

    return override


def of_interleaved_pairs(rotate, rotation, x):
    """Rotate features reordered so that half-split pairs are interleaved, and restore their
    order.
    """
    size, padded = CASES["rope"].spec.head_dim, x.shape[3]
    indices, order = feature_indices(size, rope=Rope()), np.zeros((1, 1, padded, padded))
    order[..., indices[[*range(0, size, 2), *range(1, size, 2)]], indices] = 1
    order = upload(order, device=x.device(), dtype=x.dtype)
    return ttnn.matmul(rotate(rotation, ttnn.matmul(x, order)), order, transpose_b=True)


def first_half_only(init, rotation, *inputs, padded, device, **options):
    init(rotation, *inputs, padded=padded, device=device, **options)
    is_first = upload(
        (np.arange(padded) < padded // 2)[None, None, None], device=device, dtype=ttnn.float32
    )
    object.__setattr__(rotation, "sin", ttnn.multiply(rotation.sin, is_first))


def counted_from_0(cached_layer, layer, x, *rest, **options):
    return cached_layer(layer, x, *rest, **{**options, "positions": np.arange(x.shape[1])[None]})


def steps_one_late(cached_layer, layer, x, cache, *rest, **options):
    positions = cache.lengths[:, None] + 1 if x.shape[1] == 1 else None
    return cached_layer(layer, x, cache, *rest, **{**options, "positions": positions})


def padding_of_ones(cached_layer, layer, x, *rest, new_lengths, **options):
    output, cache = cached_layer(layer, x, *rest, new_lengths=new_lengths, **options)
    is_real = np.arange(x.shape[1]) < np.asarray(new_lengths)[:, None]
    return ttnn.where(
        upload(is_real[:, :, None], device=x.device(), dtype=output.dtype), output, 1.0
    ), cache


def refilled(tokens: Callable[[Any, int, int], Any]) -> Override:
    """Return an override that rewrites tiles of new tokens: `tokens(x, first, last)` for x[:, :,
    first:last].
    """

    def append_unchecked(original, cache, new, added):
        before, after = cache.lengths, original(cache, new, added)
        to_next_tile = -before % TILE
        for b in np.flatnonzero(added > to_next_tile) if new[0].shape[2] > 1 else ():
            first, last = int(to_next_tile[b]), int(added[b])
            for slots, x in zip(after.slots.values(), new, strict=True):
                again = as_cached(tokens(x[b : b + 1], first, last), slots)
                ttnn.fill_cache(slots, again, int(b), update_idx=int(before[b]) + first)
        return after

    return append_unchecked


def attending_to(hides: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Override:
    """Return an override that hides some slots from new tokens: `hides(slots, before)`."""

    def attend_to_slots(original, layer, q, cache, before, mask, scores):
        hidden = hides(np.arange(cache.capacity), before[:, None, None, None])
        hidden = hidden if mask.mask is None else hidden | on_host(mask.mask)
        return original(layer, q, cache, before, replace(mask, mask=hidden), scores)

    return attend_to_slots


def integers(x: np.ndarray | ttnn.Tensor) -> np.ndarray:
    """Return the integers of an array or of a tensor on the device."""
    return x if isinstance(x, np.ndarray) else mha_tt.download(x).astype(np.int32)


def written_to(change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Override:
    """Return an override that writes rows to other slots, `change(slots, lengths)`, if it writes
    them at all.
    """

    def write_rows(original, cache, new, slots):
        slots = integers(slots)
        return original(cache, new, np.where(slots < 0, slots, change(slots, cache.lengths)))

    return write_rows


def seeing_up_to(change: Callable[[np.ndarray], np.ndarray]) -> Override:
    """Return an override of last positions on the host or the device: `change(last_positions)`."""

    def attend_to_cache(original, query, keys, values, last, *rest, **options):
        return original(query, keys, values, change(integers(last)), *rest, **options)

    return attend_to_cache


def with_next_vectors(learned):
    """Return weights in which each distance has the vectors of the next one."""
    keys = learned["relative_keys"]
    return {**learned, "relative_keys": ttnn.concat([keys[:, :, 1:], keys[:, :, :1]], dim=2)}


MUTATIONS = {
    # ---- The scale
    "scale of the padded head": one(
        "full",
        "scores",
        stages.attention_scores,
        lambda f, q, k, bias, spec, *rest, **o: f(q, k, bias, None, *rest, **o),
    ),
    "no scale": one(
        "full",
        "scores",
        stages.attention_scores,
        lambda f, q, k, bias, spec, *rest, **o: f(
            q, k, bias, replace(spec, head_dim=1), *rest, **o
        ),
    ),
    "scale of the padded head, fused": at(
        "full", "fused.output", fused.FusedAttention, "__call__", without_spec
    ),
    "scale of the padded head, step": one(
        "decode", "step1.module.output", fused.attend_to_cache_unchecked, step_without_spec
    ),
    # ---- Projections and heads
    "no bias of q": without_bias("q_proj", "q"),
    "no bias of k": without_bias("k_proj", "k"),
    "no bias of v": without_bias("v_proj", "v"),
    "no bias of the output": without_bias("out_proj", "output"),
    "heads padded with ones": one("causal", "run", layout.pad_heads, padded_with_ones),
    "heads padded at their beginning": one(
        "causal", "run", layout.pad_heads, padded_at_the_beginning
    ),
    "output projection of the heads in a different order": one(
        "causal", "output", weights.upload_weights, out_proj_rolled
    ),
    "heads combined in a different order": one(
        "causal",
        "output",
        heads.combine_heads,
        lambda f, x: f(ttnn.concat([x[:, 1:], x[:, :1]], dim=1)),
    ),
    "packed keys and values exchanged": one(
        "fused-qkv", "k", projections._unpack_qkv, lambda f, *x: (lambda q, k, v: (q, v, k))(*f(*x))
    ),
    "key heads tiled, not repeated": one("gqa", "scores", stages.repeat_kv_heads, tiled),
    # ---- Masks and biases
    "mask shows what it hides": one(
        "padding",
        "attn_weights",
        stages.masked_softmax,
        lambda f, scores, mask=None, *sinks, **o: f(
            scores, None if mask is None else ~on_host(mask), *sinks, **o
        ),
    ),
    "mask shows what it hides, fused": at(
        "padding",
        "fused.output",
        masks.DeviceMask,
        "additive",
        lambda f, mask, *sizes: f(masks.DeviceMask(~mask.mask, device=mask.device), *sizes),
    ),
    "mask forgotten": Mutation("causal", "attn_weights", "mask-ignored"),
    "causal mask forgotten, fused": at(
        "causal",
        "fused.output",
        fused.FusedAttention,
        "__call__",
        lambda f, kernel, q, k, v, visible, scores: f(kernel, q, k, v, masks.Mask(), scores),
    ),
    "last tile of the mask hides nothing": at(
        "padding", TRAP, masks, "upload", lambda f, x, **o: f(x, **{**o, "pad_value": 0.0})
    ),
    "last tile of the bias hides nothing": at(
        "bias",
        TRAP,
        ttnn,
        "fill_implicit_tile_padding",
        lambda f, x, value: x if value == MASKED else f(x, value),
    ),
    "empty rows are not emptied": at(
        "causal-padding-empty", "attn_weights", stages, "zero_masked_rows", lambda f, x, mask: x
    ),
    "rows that the kernel loses": at(
        "large-logits", "fused.output", fused, "may_zero_rows", lambda f, config: False
    ),
    "empty rows are not emptied, fused": at(
        "causal-padding-empty", "fused.output", fused, "zero_masked_rows", lambda f, x, mask: x
    ),
    "bias forgotten": Mutation("bias", "scores", "score-bias-missing"),
    "bias forgotten, fused": one(
        "bias", "fused.output", fused._attn_mask, lambda f, mask, bias, *rest: f(mask, None, *rest)
    ),
    # ---- RoPE
    "RoPE rotates the other way": at(
        "rope",
        "q",
        rope.Rotation,
        "__init__",
        lambda f, self, positions, *x, **o: f(self, -positions, *x, **o),
    ),
    "RoPE one position late": at(
        "rope",
        "q",
        rope.Rotation,
        "__init__",
        lambda f, self, positions, *x, **o: f(self, positions + 1, *x, **o),
    ),
    "norm of keys missing": one(
        "norm-after-rope",
        "k",
        norms.apply_norm,
        of_first_only(lambda f, x, *inputs, **o: f(x, *inputs, **o)),
    ),
    "features that pad a head are counted": one(
        "qk-norm",
        "q",
        norms.apply_norm,
        lambda f, *inputs, feature_indices, **o: f(*inputs, feature_indices=None, **o),
    ),
    "norm over the width ignores its weight": one(
        "norm-width",
        "q",
        norms.apply_norm,
        lambda f, x, norm, *_, **o: f(x, replace(norm, weight=None), **o),
    ),
    "RoPE of interleaved pairs": at("rope", "q", rope.Rotation, "rotate", of_interleaved_pairs),
    "RoPE rotates the first half only": at("rope", "q", rope.Rotation, "__init__", first_half_only),
    "RoPE counts from 0 in every call": one(
        "chunked-prefill", "step1.module.output", cache_mha.cached_layer, counted_from_0
    ),
    "RoPE of a step one position late": one(
        "decode-gqa-rope", "step1.module.output", cache_mha.cached_layer, steps_one_late
    ),
    # ---- Features of current layers
    "temperature one position late": one(
        "temperature",
        "q",
        temperature.apply_temperature,
        lambda f, x, positions, *rest: f(x, positions + 1, *rest),
    ),
    "features that pad a value are counted": one(
        "value-head-dim",
        "v",
        norms.apply_norm,
        lambda f, *inputs, feature_indices, **o: f(*inputs, feature_indices=None, **o),
    ),
    "ALiBi from the next key": at(
        "alibi",
        "scores",
        stages,
        "alibi_bias",
        lambda f, slopes, t, s, _, **o: f(slopes, t, s, np.array([1]), **o),
    ),
    "relative bias of heads in a different order": at(
        "relative-bias",
        "scores",
        stages,
        "relative_position_bias",
        lambda f, table, *rest, **o: f(
            ttnn.concat([table[:, 1:], table[:, :1]], dim=1), *rest, **o
        ),
    ),
    "vectors of the next distance": at(
        "relative-products",
        "scores",
        stages,
        "relative_position_products",
        lambda f, q, k, record, learned, *rest, **o: f(
            q, k, record, with_next_vectors(learned), *rest, **o
        ),
    ),
    "latents not normalised": one(
        "latent",
        "latents",
        latent.project_latents,
        lambda f, project, *rest: f(
            lambda name, x: x if name == "kv_a_norm" else project(name, x), *rest
        ),
    ),
    "latents without their factor": Mutation(
        "latent-factors", "latents", "latent-kv-factor-missing"
    ),
    "queries' latents without their factor": one(
        "latent-factors",
        "q",
        latent.project_latents,
        lambda f, project, x, spec, *rest: f(
            project, x, replace(spec, latent=replace(spec.latent, q_factor=1.0)), *rest
        ),
    ),
    "keys of other heads taken into queries": one(
        "decode-latent",
        "step0.module.output",
        latent.absorb_keys,
        lambda f, q, *rest, **o: f(ttnn.concat([q[:, 1:], q[:, :1]], dim=1), *rest, **o),
    ),
    "values of other heads made of latents": one(
        "decode-latent",
        "step0.module.output",
        latent.absorb_values,
        lambda f, x, *rest, **o: f(ttnn.concat([x[:, 1:], x[:, :1]], dim=1), *rest, **o),
    ),
    # ---- The cache
    "cache mask shows the next slot": Mutation("decode", "step0.mask", "causal-off-by-one"),
    "cache mask hides the own slot": one(
        "decode",
        "step0.mask",
        caches.create_cache_mask,
        lambda f, *x, **o: f(*x, **o) | np.roll(f(*x, **o), -1, axis=-1),
    ),
    "step sees the next slot": one(
        "decode",
        "step1.module.output",
        fused.attend_to_cache_unchecked,
        seeing_up_to(lambda last: last + 1),
    ),
    "step does not see its own slot": one(
        "decode",
        "step1.module.output",
        fused.attend_to_cache_unchecked,
        seeing_up_to(lambda last: last - 1),
    ),
    "step of one sequence sees what another does": one(
        "ragged",
        "step1.module.output",
        fused.attend_to_cache_unchecked,
        seeing_up_to(lambda last: 0 * last + last.max()),
    ),
    "table of RoPE one position late": at(
        "decode-gqa-rope",
        "step1.module.output",
        positions,
        "cos_and_sin",
        lambda f, positions, *x, **o: f(positions + 1, *x, **o),
    ),
    "keys in the cache of values, tiles": Mutation(
        "decode", "step0.cache.values", "cache-keys-as-values"
    ),
    "keys in the cache of values, rows": one(
        "decode",
        "step1.cache.values",
        caches.write_rows,
        lambda f, cache, new, slots: f(cache, [new[0]] * 2, slots),
    ),
    "keys in the cache of values, plain step": one(
        "decode",
        "step1.module.output",
        cache_mha._attend_in_step,
        lambda f, layer, q, new, *rest: f(layer, q, (new[0],) * 2, *rest),
        "float32",
    ),
    "keys in the cache of values, step": at(
        "decode",
        "step1.module.output",
        step,
        "_write",
        lambda f, cache, new, *rest: f(cache, new[::-1], *rest),
    ),
    "keys of a step not rotated": at(
        "decode-gqa-rope",
        "step1.module.output",
        positions._MatrixRotation,
        "rotate",
        keys_left_alone(),
    ),
    "rows one slot late": one(
        "decode",
        "step1.cache.keys",
        caches.write_rows,
        written_to(lambda slots, lengths: slots + 1),
    ),
    "rows up to the next tile skipped": one(
        "tiles", "step1.cache.keys", caches.write_rows, lambda f, *inputs: None
    ),
    "rows up to the next tile written again in tiles": one(
        "tiles",
        "step1.cache.keys",
        caches.append_unchecked,
        refilled(lambda x, first, last: x[:, :, : last - first]),
    ),
    "tiles one tile late": at(
        "tiles",
        "step0.cache.keys",
        ttnn,
        "fill_cache",
        lambda f, *x, update_idx: f(*x, update_idx=update_idx + TILE),
    ),
    "tiles at the beginning of the cache": at(
        "tiles",
        "step1.cache.keys",
        ttnn,
        "fill_cache",
        lambda f, *x, update_idx: f(*x, update_idx=0),
    ),
    "tiles of another sequence": at(
        "ragged-tiles",
        "step0.cache.keys",
        ttnn,
        "fill_cache",
        lambda f, slots, tokens, sequence, **o: f(slots, tokens, 1 - sequence, **o),
    ),
    "chunk attends to itself only": one(
        "chunked-prefill",
        "step1.module.output",
        cache_mha._attend_to_slots,
        attending_to(lambda slots, before: slots < before),
    ),
    "chunk attends to the first tile only": one(
        "tiles",
        "step1.module.output",
        cache_mha._attend_to_slots,
        attending_to(lambda slots, before: slots >= round_up(int(before.max()))),
    ),
    "padding cached": one(
        "ragged",
        "step0.cache.keys",
        caches.num_added,
        lambda f, cache, seq_len, _: f(cache, seq_len, None),
    ),
    "padding cached, tiles": one(
        "ragged-tiles",
        "step0.cache.keys",
        caches.append_unchecked,
        refilled(lambda x, first, last: x[:, :, first:]),
    ),
    "output of padding is not zero": one(
        "ragged", "step0.module.output", cache_mha.cached_layer, padding_of_ones
    ),
    "every sequence as long as the longest": one(
        "ragged",
        "step1.cache.keys",
        caches.write_rows,
        written_to(lambda slots, lengths: slots + lengths.max() - lengths),
    ),
}


@pytest.fixture(autouse=True)
def undiagnosed(monkeypatch):
    """Skip the search for a cause: it takes longer than the case, and has its own tests."""
    monkeypatch.setattr("parity.use.running.run.DIAGNOSED", 0)


def override(monkeypatch: pytest.MonkeyPatch, mutation: Mutation) -> None:
    """Replace the held functions by the override of a mutation."""
    broken, original = mutation.broken, getattr(*mutation.holders[0])

    def replacement(
        *inputs: Any, **options: Any
    ) -> Any:  # a function, so that a class makes a method of it
        return broken(original, *inputs, **options)

    for holder, name in mutation.holders:
        monkeypatch.setattr(holder, name, replacement)


def first_difference(case: str, dtype: str) -> Any:
    """Return the first difference of a case, or None."""
    return next(iter(run_cases([EVERY_CASE[case]], ["tt"], [dtype]).first_differences()), None)


@pytest.mark.parametrize(
    "case", [case.name for case in MORE_CASES]
)  # cases of CASES pass in test_parity
def test_additional_cases_pass_unmutated(opened_device, case):
    """Additional cases pass in bfloat16 as long as no mutation is active."""
    assert first_difference(case, "bfloat16") is None


@sample(name=list(MUTATIONS)[::4])
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_reported_at_its_stage(opened_device, monkeypatch, name):
    """Each mutation makes its case fail, and the first difference is at the expected stage."""
    mutation, dtype = MUTATIONS[name], MUTATIONS[name].dtype
    if isinstance(mutation.broken, str):
        with inject(mutation.broken, make_problem(CASES[mutation.case], dtype), "tt"):
            difference = first_difference(mutation.case, dtype)
    else:
        override(monkeypatch, mutation)
        difference = first_difference(mutation.case, dtype)
    assert difference is not None, "nothing was seen"
    assert difference.stage == mutation.stage, str(difference)
