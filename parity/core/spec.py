"""What is computed, written once: the cases, and the stages of the data flow."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mha_spec import AttentionSpec, Rope

DTYPES = ("float32", "bfloat16", "float16", "float64")


def unheld(spec: AttentionSpec) -> AttentionSpec:
    """The layer without what its weights do not tell and its results in evaluation do not depend on."""
    return replace(spec, fused_qkv=False, dropout=0.0, output_dropout=0.0)


@dataclass(frozen=True)
class Case:
    """One situation in which implementations must agree: a layer and what it is applied to.

    The arrays are drawn from the name (see `parity.core.problem`), so that every environment makes the same ones.

    Attributes:
        name: what the command line and the reports call it.
        spec: the layer.
        about: what goes wrong when this case fails.
        batch: number of sequences, B.
        seq_len: number of query tokens, T; of all steps together where there is a cache.
        seq_len_k: number of key tokens, S; None for self-attention.
        is_causal: hide every key after the query's own position.
        key_padding_lengths: number of real keys of each sequence.
        window_size: hide all but this many last keys.
        random_mask: hide keys at random, other ones for each head, and one row of each sequence entirely.
        bias: add a random bias to the scores.
        gain: factor on the query and key projections; large ones make large logits.
        strided: inputs that are not contiguous in memory.
        not_finite: tokens that are NaN: `visible`, one in the middle of the last sequence, which every row that may see
            it must show; or `hidden`, all padding, which no other row may show.
        chunks: with a cache: how many tokens each call appends.
        new_lengths: with a cache: how many of them are real, for each call and sequence.
        capacity: with a cache: its number of slots.
        trained: name of the trained layer that gives weights and inputs.
        dtype: the only dtype that the case runs in, where it is about one.
    """

    name: str
    spec: AttentionSpec
    about: str
    batch: int = 2
    seq_len: int = 5
    seq_len_k: int | None = None
    is_causal: bool = False
    key_padding_lengths: tuple[int, ...] | None = None
    window_size: int | None = None
    random_mask: bool = False
    bias: bool = False
    gain: float = 1.0
    strided: bool = False
    not_finite: Literal["visible", "hidden"] | None = None
    chunks: tuple[int, ...] = ()
    new_lengths: tuple[tuple[int, ...], ...] = ()
    capacity: int = 0
    trained: str | None = None
    dtype: str | None = None

    @property
    def is_cached(self) -> bool:
        """Whether tokens come in steps, with a cache."""
        return bool(self.chunks)

    @property
    def has_mask(self) -> bool:
        """Whether anything is hidden."""
        return self.is_causal or self.random_mask or bool(self.key_padding_lengths or self.window_size)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients are compared: without a cache, and where no query is NaN, which makes all of them NaN."""
        return not self.is_cached and (self.not_finite is None or self.seq_len_k is not None)

    @property
    def key_len(self) -> int:
        """Number of keys, S."""
        return self.seq_len if self.seq_len_k is None else self.seq_len_k

    def lengths_before(self, step: int) -> tuple[int, ...]:
        """Number of tokens each sequence has cached before the call of that index."""
        return tuple(sum(self.added(i)[b] for i in range(step)) for b in range(self.batch))

    def added(self, step: int) -> tuple[int, ...]:
        """Number of real tokens that the call of that index appends to each sequence."""
        return self.new_lengths[step] if self.new_lengths else (self.chunks[step],) * self.batch


STAGES: dict[str, tuple[str, ...]] = {
    "mask": ("B", "N", "T", "S"),
    "q": ("B", "N", "T", "H"),
    "k": ("B", "K", "S", "H"),
    "v": ("B", "K", "S", "H"),
    "cache.keys": ("B", "K", "S", "H"),
    "cache.values": ("B", "K", "S", "H"),
    "cache.lengths": ("B",),
    "scores": ("B", "N", "T", "S"),
    "attn_weights": ("B", "N", "T", "S"),
    "context": ("B", "N", "T", "H"),
    "output": ("B", "T", "E"),
    "module.attn_weights": ("B", "N", "T", "S"),
    "module.output": ("B", "T", "E"),
    "module.cache.keys": ("B", "K", "S", "H"),
    "module.cache.values": ("B", "K", "S", "H"),
    "module.cache.lengths": ("B",),
    "fused.output": ("B", "T", "E"),
    "blocks.output": ("B", "T", "E"),
    "grad.query": ("B", "T", "d_in"),
    "grad.key": ("B", "S", "d_kv"),
    "grad.bias": ("B", "N", "T", "S"),
}
"""The stages in the order of the data flow, with the axes of each.

`mask` … `output` are computed by the stage functions, one from the other; `module.*` by the module as users call it,
with its attention weights; `fused.output` by the module without them, as users get it; `blocks.output` by the same
where even small cases go block by block. `grad.*` are gradients for a fixed cotangent of the output: of the inputs, and
of each weight by its name; `fused.grad.*` and `blocks.grad.*` the same on those paths. With a cache a stage's name
begins with its step, `step3.scores`.
"""

BACKENDS_OF = {"blocks": ("jax",)}
"""The backends of the paths that not all have."""

EXACT_STAGES = ("mask", "cache.lengths", "module.cache.lengths")


def stage_kind(stage: str) -> str:
    """The name of a stage without its step: `scores` of `step3.scores`."""
    return stage.split(".", 1)[1] if stage.startswith("step") else stage


def stage_path(stage: str) -> str:
    """The path that a stage is on: `module`, `fused`, `blocks`, or nothing for the stage functions."""
    path = stage_kind(stage).split(".")[0]
    return path if path in ("module", "fused", "blocks") else ""


def stage_axes(stage: str) -> tuple[str, ...]:
    """The letters of a stage's axes."""
    kind = stage_kind(stage)
    kind = kind.removeprefix("fused.").removeprefix("blocks.") if "grad." in stage else kind
    if kind in STAGES:
        return STAGES[kind]
    return ("out", "in") if kind.endswith("weight") else ("out",)


def _cases() -> dict[str, Case]:
    mha = AttentionSpec(32, 4)
    gqa = AttentionSpec(32, 8, num_kv_heads=2)
    rope = AttentionSpec(32, 4, rope=Rope(10000.0))
    gqa_rope = AttentionSpec(48, 6, num_kv_heads=2, head_dim=16, rope=Rope(10000.0), qkv_bias=False, out_bias=False)
    tiny = AttentionSpec(4, 2, d_in=3)
    textbook = AttentionSpec(4, 2, d_in=3, qkv_bias=False, out_proj=False)
    cross = AttentionSpec(32, 4, d_in=24, d_kv=40)
    anarcii = AttentionSpec(128, 4)
    smollm2 = AttentionSpec(576, 9, num_kv_heads=3, qkv_bias=False, out_bias=False, rope=Rope(100000.0))
    ragged = ((4, 2, 0), (1, 1, 1), (0, 3, 2), (1, 1, 1))
    cases = [
        Case("textbook", textbook, "a published example with known numbers", seq_len=6, is_causal=True),
        Case("full", mha, "every token sees every token"),
        Case("causal", mha, "no token sees a later one", is_causal=True),
        Case("causal-cross", mha, "causal, more keys than queries: aligned top-left", seq_len_k=8, is_causal=True),
        Case("causal-tall", mha, "causal, fewer keys than queries", seq_len=8, seq_len_k=5, is_causal=True),
        Case("padding", mha, "right padding is hidden", key_padding_lengths=(3, 5)),
        Case("causal-padding-empty", mha, "an empty sequence gives 0", is_causal=True, key_padding_lengths=(0, 4)),
        Case("random-mask", mha, "any mask, with empty rows", seq_len=7, random_mask=True),
        Case("sliding-window", mha, "the last three keys only", seq_len=9, window_size=3),
        Case("window-cross", mha, "a window over more keys than queries", seq_len_k=9, window_size=3),
        Case("bias", mha, "an additive term on the scores", bias=True),
        Case("bias-causal", mha, "an additive term beside a mask", bias=True, is_causal=True),
        Case("cross", cross, "keys of another width and length", seq_len=4, seq_len_k=7),
        Case("cross-padding", cross, "keys of another width, padded", seq_len_k=7, key_padding_lengths=(2, 7)),
        Case("gqa", gqa, "eight query heads share two key/value heads"),
        Case("gqa-causal", gqa, "shared key/value heads under a mask", is_causal=True),
        Case("mqa", AttentionSpec(32, 4, num_kv_heads=1), "all query heads share one", is_causal=True),
        Case("head-dim", AttentionSpec(32, 4, head_dim=12), "heads wider than d_model / num_heads"),
        Case("no-bias", AttentionSpec(32, 4, qkv_bias=False, out_bias=False), "projections without biases"),
        Case("no-out-proj", AttentionSpec(32, 4, out_proj=False), "the heads side by side are the output"),
        Case("fused-qkv", AttentionSpec(32, 4, fused_qkv=True), "one projection for q, k and v", is_causal=True),
        Case(
            "fused-qkv-gqa",
            AttentionSpec(32, 8, num_kv_heads=2, fused_qkv=True, qkv_bias=False),
            "one projection whose parts differ in width",
        ),
        Case("fused-qkv-cross", AttentionSpec(32, 4, fused_qkv=True), "its parts from different inputs", seq_len_k=7),
        Case("rope", rope, "rotary positions", seq_len=11, is_causal=True),
        Case("rope-gqa", gqa_rope, "rotary positions, shared heads, a free head_dim", seq_len=9, is_causal=True),
        Case("rope-far", rope, "positions that bfloat16 cannot tell apart", batch=1, seq_len=300, is_causal=True),
        Case("one-query", cross, "a single query", seq_len=1, seq_len_k=6),
        Case("one-key", mha, "a single key", seq_len=4, seq_len_k=1),
        Case("one-token", mha, "a single token", seq_len=1, batch=1),
        Case("odd-sizes", tiny, "nothing is a multiple of anything", batch=3, seq_len=6, is_causal=True),
        Case("strided", mha, "inputs that are not contiguous in memory", strided=True, is_causal=True),
        Case("large-logits", mha, "logits beyond 65504, the end of float16", seq_len=6, gain=2.0**18, is_causal=True),
        Case(
            "large-logits-float16",
            mha,
            "the same in float16, whatever dtypes are asked for",
            seq_len=6,
            gain=2.0**18,
            is_causal=True,
            dtype="float16",
        ),
        Case(
            "nan-visible-causal",
            gqa,
            "a NaN reaches every row that sees it, and no other",
            is_causal=True,
            not_finite="visible",
        ),
        Case(
            "nan-hidden-padding",
            rope,
            "padding that is NaN changes nothing",
            key_padding_lengths=(3, 5),
            not_finite="hidden",
        ),
        Case(
            "nan-hidden-cross",
            cross,
            "hidden keys that are NaN change nothing",
            seq_len_k=7,
            key_padding_lengths=(2, 6),
            not_finite="hidden",
        ),
        Case("wide", AttentionSpec(256, 4), "64 features a head, 48 tokens", seq_len=48, is_causal=True),
        Case("decode", mha, "a prompt, then token by token", seq_len=8, chunks=(5, 1, 1, 1), capacity=10),
        Case("chunked-prefill", rope, "a prompt in pieces", seq_len=9, chunks=(4, 3, 2), capacity=9),
        Case(
            "decode-fused-qkv",
            AttentionSpec(32, 4, fused_qkv=True, out_proj=False),
            "decode, one projection in and none out",
            seq_len=6,
            chunks=(4, 1, 1),
            capacity=6,
        ),
        Case("decode-gqa-rope", gqa_rope, "decode, rotary, shared", seq_len=7, chunks=(4, 1, 1, 1), capacity=8),
        Case(
            "ragged",
            AttentionSpec(32, 4, num_kv_heads=2, rope=Rope(10000.0)),
            "sequences of different lengths",
            batch=3,
            seq_len=sum(map(max, ragged)),
            chunks=tuple(map(max, ragged)),
            new_lengths=ragged,
            capacity=9,
        ),
        Case(
            "nan-visible-decode",
            gqa,
            "a NaN in the prompt reaches every later token of its sequence",
            seq_len=6,
            chunks=(4, 1, 1),
            capacity=8,
            not_finite="visible",
        ),
        Case(
            "nan-hidden-decode",
            rope,
            "a prompt padded with NaN, then token by token",
            seq_len=6,
            chunks=(4, 1, 1),
            new_lengths=((2, 3), (1, 1), (1, 1)),
            capacity=6,
            not_finite="hidden",
        ),
        *(random_case(seed) for seed in range(6)),
        Case(
            "trained-anarcii-self",
            anarcii,
            "trained encoder, padded",
            seq_len=122,
            key_padding_lengths=(109, 122),
            trained="anarcii-self",
        ),
        Case(
            "trained-anarcii-causal",
            anarcii,
            "trained decoder, logits in the thousands",
            seq_len=24,
            is_causal=True,
            trained="anarcii-causal",
        ),
        Case(
            "trained-anarcii-cross",
            anarcii,
            "trained decoder over encoder, logits up to 76174",
            seq_len=24,
            seq_len_k=122,
            key_padding_lengths=(109, 122),
            trained="anarcii-cross",
        ),
        Case(
            "trained-rxnmapper-self",
            AttentionSpec(256, 8),
            "trained ALBERT block",
            batch=1,
            seq_len=53,
            trained="rxnmapper-self",
        ),
        Case(
            "trained-smollm2-causal",
            smollm2,
            "trained LLaMA layer: GQA 9/3, RoPE",
            batch=1,
            seq_len=19,
            is_causal=True,
            trained="smollm2-causal",
        ),
        Case(
            "trained-smollm2-decode",
            smollm2,
            "the same layer, prompt in two pieces, then token by token",
            batch=1,
            seq_len=19,
            chunks=(8, 7, 1, 1, 1, 1),
            capacity=24,
            trained="smollm2-causal",
        ),
    ]
    return {case.name: case for case in cases}


def random_case(seed: int) -> Case:
    """A case whose layer, sizes and mask are drawn at random: `random-0`, `random-1`, …"""
    rng = np.random.default_rng([0x9A817, seed])

    def choose(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    num_kv_heads = choose(1, 2, 3)
    head_dim = choose(2, 4, 8, 16, 32, 64)
    is_cross = bool(choose(False, False, True))
    batch, seq_len, seq_len_k = choose(1, 2, 3), int(rng.integers(1, 65)), int(rng.integers(1, 65))
    key_len = seq_len_k if is_cross else seq_len
    spec = AttentionSpec(
        d_model=int(rng.integers(3, 65)),
        num_heads=num_kv_heads * choose(1, 2, 4),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_in=int(rng.integers(3, 65)),
        d_kv=int(rng.integers(3, 65)) if is_cross else None,  # pyright: ignore[reportArgumentType]
        qkv_bias=bool(choose(True, False)),
        out_bias=bool(choose(True, False)),
        out_proj=bool(choose(True, True, False)),
        fused_qkv=bool(choose(True, False)) and not is_cross,
        rope=None if is_cross else choose(None, Rope(10000.0), Rope(500000.0)),
    )
    return Case(
        f"random-{seed}",
        spec,
        "a layer, sizes and a mask drawn at random",
        batch=batch,
        seq_len=seq_len,
        seq_len_k=seq_len_k if is_cross else None,
        is_causal=bool(choose(True, False)),
        key_padding_lengths=choose(None, tuple(int(n) for n in rng.integers(0, key_len + 1, batch))),
        random_mask=bool(choose(True, False, False)),
        bias=bool(choose(True, False, False)),
        gain=choose(1.0, 3.0, 12.0),
    )


def find_case(name: str) -> Case | None:
    """The case of that name: one of `CASES`, or `random-N` for any N."""
    drawn = re.fullmatch(r"random-(\d{1,6})", name)
    return CASES.get(name) or (random_case(int(drawn[1])) if drawn else None)


def case_named(name: str) -> Case:
    """The case of that name: one of `CASES`, or `random-N` for any N.

    Raises:
        ValueError: if there is none.
    """
    case = find_case(name)
    if case is None:
        nearest = ", ".join(difflib.get_close_matches(name, CASES, n=3, cutoff=0.0))
        raise ValueError(f"case must be one of parity.CASES or random-N, got case={name!r}; the nearest are {nearest}")
    return case


CASES: dict[str, Case] = _cases()
"""The cases by name, simple ones first, trained layers last."""
