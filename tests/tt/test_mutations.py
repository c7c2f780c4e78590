"""The control: what is broken on purpose in `mha_tt` is seen by `parity`, at the stage where it is broken.

A mutation changes the text of a function. In float32 nothing takes the fused path, so what is broken there shows in
bfloat16 only. Where the padding of a head is not 0, or a trap of `mha_tt.mock` is sprung, the case fails as a whole.
"""

import __future__

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from mha_tt import cache, cache_mha, device, fused, masks, mha, rope, stages
from parity import CASES, AttentionSpec, Case, run_cases

from .formulas import IS_MOCK

BOTH, FUSED = ("float32", "bfloat16"), ("bfloat16",)
TRAP = "run" if IS_MOCK else "fused.output"

GQA_ROPE = AttentionSpec(48, 6, num_kv_heads=2, head_dim=16, rope_theta=10000.0)
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


@dataclass(frozen=True)
class Mutation:
    """What is broken, and what must show it.

    Attributes:
        case: name of a case that must fail.
        stage: the stage to start looking at.
        edits: of each function, texts that occur once in it, and what is put in their place.
        dtypes: in which it must fail.
    """

    case: str
    stage: str
    edits: dict[Callable[..., Any], dict[str, str]]
    dtypes: tuple[str, ...] = BOTH


def one(case: str, stage: str, function: Any, old: str, new: str, dtypes: tuple[str, ...] = BOTH) -> Mutation:
    return Mutation(case, stage, {function: {old: new}}, dtypes)


def without_bias(name: str, stage: str) -> Mutation:
    new = f'None if name == "{name}" else weights.get'
    return one("causal", stage, mha.project_with, "bias=weights.get", f"bias={new}")


MUTATIONS = {
    # ---- The scale
    "scale of the padded head": one(
        "full", "scores", stages.attention_scores, "(head_dim or query.shape[3]) ** -0.5", "query.shape[3] ** -0.5"
    ),
    "no scale": one("full", "scores", stages.attention_scores, "(head_dim or query.shape[3]) ** -0.5", "1.0"),
    "scale of the padded head, fused": one(
        "full",
        "fused.output",
        fused.scaled_dot_product_attention,
        "(head_dim or padded) ** -0.5",
        "padded**-0.5",
        FUSED,
    ),
    "scale of the padded head, step": one(
        "decode",
        "step1.module.output",
        fused.attend_to_cache,
        "(head_dim or query.shape[3]) ** -0.5",
        "query.shape[3] ** -0.5",
        FUSED,
    ),
    # ---- Projections and heads
    "no bias of q": without_bias("q_proj", "q"),
    "no bias of k": without_bias("k_proj", "k"),
    "no bias of v": without_bias("v_proj", "v"),
    "no bias of the output": without_bias("out_proj", "output"),
    "heads padded with ones": one("causal", "run", device._pad_heads, "np.zeros(", "np.ones("),
    "heads padded at their beginning": one(
        "causal", "run", device._pad_heads, "padded[:, head_slots(head_dim, rope=rope)]", "padded[:, -head_dim:]"
    ),
    "output projection of the heads in another order": one(
        "causal",
        "output",
        device.upload_weights,
        "_pad_heads(name, weight.T, num_heads, rope=rope).T",
        "np.roll(_pad_heads(name, weight.T, num_heads, rope=rope), padded_head_dim(8), axis=0).T",
    ),
    "heads combined in another order": one(
        "causal",
        "output",
        stages.combine_heads,
        "concatenate_heads(x)",
        "concatenate_heads(ttnn.concat([x[:, 1:], x[:, :1]], dim=1))",
    ),
    "packed keys and values exchanged": one(
        "fused-qkv", "k", stages.project_qkv, "q, k, v = _unpack_qkv(", "q, v, k = _unpack_qkv("
    ),
    "key heads tiled, not repeated": one(
        "gqa",
        "scores",
        stages.repeat_kv_heads,
        "ttnn.repeat_interleave(x, repeats, dim=1)",
        "ttnn.concat([x] * repeats, 1)",
    ),
    # ---- Masks and biases
    "mask shows what it hides": one(
        "padding", "attn_weights", stages.masked_softmax, "mask.hidden, MASKED, scores", "mask.hidden, scores, MASKED"
    ),
    "mask shows what it hides, fused": one(
        "padding",
        "fused.output",
        masks.DeviceMask.additive,
        "np.where(hidden, np.float32(MASKED), 0)",
        "np.where(hidden, 0, np.float32(MASKED))",
        FUSED,
    ),
    "mask forgotten": one("causal", "attn_weights", stages.masked_softmax, "if mask is not None:", "if False:"),
    "causal mask forgotten, fused": one(
        "causal",
        "fused.output",
        fused.scaled_dot_product_attention,
        "is_causal=only_causal,",
        "is_causal=False,",
        FUSED,
    ),
    "last tile of the mask hides nothing": one(
        "padding", TRAP, masks.DeviceMask.additive, "pad_value=MASKED", "pad_value=0.0", FUSED
    ),
    "last tile of the bias hides nothing": one(
        "bias", TRAP, fused._attn_mask, "ttnn.fill_implicit_tile_padding(attn_mask, MASKED)", "attn_mask", FUSED
    ),
    "empty rows are not emptied": one(
        "causal-padding-empty",
        "attn_weights",
        stages.masked_softmax,
        "emptied(spoilt(attn_weights, lowest), mask)",
        "spoilt(attn_weights, lowest)",
    ),
    "empty rows are not emptied, fused": one(
        "causal-padding-empty",
        "fused.output",
        fused.scaled_dot_product_attention,
        "emptied(spoilt(context, spoilt_rows), mask), None",
        "spoilt(context, spoilt_rows), None",
        FUSED,
    ),
    "bias forgotten": one(
        "bias", "scores", stages.attention_scores, "return scores if bias is None else", "return scores if True else"
    ),
    "bias forgotten, fused": one(
        "bias",
        "fused.output",
        fused._attn_mask,
        "if bias is None:",
        "if True:",
        FUSED,
    ),
    # ---- RoPE
    "RoPE turns the other way": one(
        "rope",
        "q",
        rope.Rotation.__init__,
        "[-np.sin(angles), np.sin(angles)]",
        "[np.sin(angles), -np.sin(angles)]",
    ),
    "RoPE one position late": one(
        "rope", "q", rope.Rotation.__init__, "positions[:, None, :, None]", "(positions[:, None, :, None] + 1)"
    ),
    "RoPE of interleaved pairs": Mutation(
        "rope",
        "q",
        {
            device.head_slots: {
                "np.concatenate(": "np.column_stack(",
                "second + np.arange(half)])": "second + np.arange(half)]).ravel()",
            },
            rope.Rotation.__init__: {
                "np.concatenate([np.cos(angles)] * 2, axis=-1)": "np.kron(np.cos(angles), [1, 1])",
                "np.concatenate([-np.sin(angles), np.sin(angles)], axis=-1)": "np.kron(np.sin(angles), [-1, 1])",
            },
        },
    ),
    "RoPE turns the first half only": one(
        "rope", "q", rope.Rotation.__init__, "[-np.sin(angles), np.sin(angles)]", "[-np.sin(angles), 0 * angles]"
    ),
    "RoPE counts from 0 in every call": one(
        "chunked-prefill",
        "step1.module.output",
        cache_mha._cached_layer,
        "positions = cache.lengths[:, None] + np.arange(seq_len)",
        "positions = 0 * cache.lengths[:, None] + np.arange(seq_len)",
    ),
    "RoPE of a step one position late": one(
        "decode-gqa-rope",
        "step1.module.output",
        cache_mha._cached_layer,
        "np.broadcast_to(positions, (batch_size, 1)).T",
        "np.broadcast_to(positions, (batch_size, 1)).T + 1",
    ),
    # ---- The cache
    "cache mask shows the next slot": one(
        "decode",
        "step0.mask",
        cache.create_cache_mask,
        "query_positions[:, None, :, None]",
        "query_positions[:, None, :, None] + 1",
    ),
    "cache mask hides the own slot": one(
        "decode",
        "step0.mask",
        cache.create_cache_mask,
        "query_positions[:, None, :, None]",
        "query_positions[:, None, :, None] - 1",
    ),
    "step sees the next slot": one(
        "decode",
        "step1.module.output",
        fused.attend_to_cache,
        "upload_integers(last_positions,",
        "upload_integers(last_positions + 1,",
        FUSED,
    ),
    "step does not see its own slot": one(
        "decode",
        "step1.module.output",
        fused.attend_to_cache,
        "upload_integers(last_positions,",
        "upload_integers(last_positions - 1,",
        FUSED,
    ),
    "step of one sequence sees what another does": one(
        "ragged",
        "step1.module.output",
        fused.attend_to_cache,
        "upload_integers(last_positions,",
        "upload_integers(0 * last_positions + last_positions.max(),",
        FUSED,
    ),
    "keys in the cache of values, tiles": one(
        "decode",
        "step0.cache.values",
        cache.append_to_cache,
        "((cache.keys, key), (cache.values, value))",
        "((cache.keys, key), (cache.values, key))",
    ),
    "keys in the cache of values, rows": one(
        "decode",
        "step1.cache.values",
        cache._write_rows,
        "((cache.keys, keys), (cache.values, values))",
        "((cache.keys, keys), (cache.values, keys))",
    ),
    "keys in the cache of values, step": one(
        "decode",
        "step1.module.output",
        cache_mha._attend_in_step,
        "ttnn.transpose(k, 1, 2), ttnn.transpose(v, 1, 2)",
        "ttnn.transpose(k, 1, 2), ttnn.transpose(k, 1, 2)",
    ),
    "rows one slot late": one(
        "decode",
        "step1.cache.keys",
        cache._write_rows,
        "upload_integers(slots,",
        "upload_integers(np.where(slots < 0, slots, slots + 1),",
    ),
    "rows up to the next tile skipped": one(
        "tiles", "step1.cache.keys", cache.append_to_cache, "range(single.max(initial=0))", "range(0)"
    ),
    "rows up to the next tile written again in tiles": one(
        "tiles",
        "step1.cache.keys",
        cache.append_to_cache,
        "x[sequence : sequence + 1, :, first:last]",
        "x[sequence : sequence + 1, :, : last - first]",
    ),
    "tiles one tile late": one(
        "tiles",
        "step0.cache.keys",
        cache.append_to_cache,
        "update_idx=int(cache.lengths[sequence]) + first",
        "update_idx=int(cache.lengths[sequence]) + first + TILE",
    ),
    "tiles at the beginning of the cache": one(
        "tiles",
        "step1.cache.keys",
        cache.append_to_cache,
        "update_idx=int(cache.lengths[sequence]) + first",
        "update_idx=0",
    ),
    "tiles of another sequence": one(
        "ragged-tiles",
        "step0.cache.keys",
        cache.append_to_cache,
        "tokens, sequence, update_idx",
        "tokens, 1 - sequence, update_idx",
    ),
    "chunk attends to itself only": one(
        "chunked-prefill", "step1.module.output", cache_mha._attend_in_prefill, "if before.any():", "if False:"
    ),
    "chunk attends to the first tile only": one(
        "tiles",
        "step1.module.output",
        cache_mha._attend_to_slots,
        "round_up(int(before.max(initial=0)) + seq_len)",
        "round_up(int(before.max(initial=0)))",
    ),
    "padding cached": one(
        "ragged",
        "step0.cache.keys",
        cache._added,
        "if new_lengths is None else np.asarray(new_lengths)",
        "if True else np.asarray(new_lengths)",
    ),
    "padding cached, tiles": one(
        "ragged-tiles",
        "step0.cache.keys",
        cache.append_to_cache,
        "int(single[sequence]), int(added[sequence])",
        "int(single[sequence]), key.shape[2]",
    ),
    "output of padding is not zero": one(
        "ragged",
        "step0.module.output",
        cache_mha._cached_layer,
        "if new_lengths is not None and (np.asarray(new_lengths) < seq_len).any():",
        "if False:",
    ),
    "every sequence as long as the longest": one(
        "ragged",
        "step1.cache.keys",
        cache.append_to_cache,
        "np.where(token < single, cache.lengths + token, -1)",
        "np.where(token < single, cache.lengths.max() + token, -1)",
    ),
}
RUNS = [(name, dtype) for name, mutation in MUTATIONS.items() for dtype in mutation.dtypes]
# Those of CASES pass in test_parity.
CONTROLS = [(case.name, dtype) for case in MORE_CASES for dtype in BOTH]


def mutate(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], edits: dict[str, str]) -> None:
    """Change the text of a function, for everyone who holds it."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in edits.items():
        assert source.count(old) == 1, f"{old} must occur once in {function.__qualname__}"
        source = source.replace(old, new)
    scope = dict(function.__globals__)
    exec(compile(source, inspect.getfile(function), "exec", __future__.annotations.compiler_flag), scope)
    monkeypatch.setattr(function, "__code__", scope[function.__name__].__code__)


def first_difference(case: str, dtype: str) -> Any:
    """The stage to start looking at, or None."""
    return next(iter(run_cases([EVERY_CASE[case]], ["tt"], [dtype]).first_differences()), None)


@pytest.mark.board
@pytest.mark.parametrize(("case", "dtype"), CONTROLS, ids=map("-".join, CONTROLS))
def test_case_passes_while_nothing_is_broken(opened_device, case, dtype):
    assert first_difference(case, dtype) is None


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=map("-".join, RUNS))
def test_what_is_broken_is_reported_at_its_stage(opened_device, monkeypatch, name, dtype):
    mutation = MUTATIONS[name]
    for function, edits in mutation.edits.items():
        mutate(monkeypatch, function, edits)
    difference = first_difference(mutation.case, dtype)
    assert difference is not None, "nothing was seen"
    assert difference.stage == mutation.stage, str(difference)
