"""The cases: situations in which implementations must agree, written once."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mha_spec import AttentionSpec, Rope

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""The dtypes that cases run in."""


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


# ---- The cases -------------------------------------------------------------------------------------------------------

_MHA = AttentionSpec(32, 4)
_GQA = AttentionSpec(32, 8, num_kv_heads=2)
_ROPE = AttentionSpec(32, 4, rope=Rope(10000.0))
_GQA_ROPE = AttentionSpec(48, 6, num_kv_heads=2, head_dim=16, rope=Rope(10000.0), qkv_bias=False, out_bias=False)
_SCALE = AttentionSpec(32, 4, num_kv_heads=2, scale=0.0625)
_TINY = AttentionSpec(4, 2, d_in=3)
_TEXTBOOK = AttentionSpec(4, 2, d_in=3, qkv_bias=False, out_proj=False)
_CROSS = AttentionSpec(32, 4, d_in=24, d_kv=40)
_ANARCII = AttentionSpec(128, 4)
_SMOLLM2 = AttentionSpec(576, 9, num_kv_heads=3, qkv_bias=False, out_bias=False, rope=Rope(100000.0))
_RAGGED = ((4, 2, 0), (1, 1, 1), (0, 3, 2), (1, 1, 1))

_MASKS = [
    Case("textbook", _TEXTBOOK, "a published example with known numbers", seq_len=6, is_causal=True),
    Case("full", _MHA, "every token sees every token"),
    Case("causal", _MHA, "no token sees a later one", is_causal=True),
    Case("causal-cross", _MHA, "causal, more keys than queries: aligned top-left", seq_len_k=8, is_causal=True),
    Case("causal-tall", _MHA, "causal, fewer keys than queries", seq_len=8, seq_len_k=5, is_causal=True),
    Case("padding", _MHA, "right padding is hidden", key_padding_lengths=(3, 5)),
    Case("causal-padding-empty", _MHA, "an empty sequence gives 0", is_causal=True, key_padding_lengths=(0, 4)),
    Case("random-mask", _MHA, "any mask, with empty rows", seq_len=7, random_mask=True),
    Case("sliding-window", _MHA, "the last three keys only", seq_len=9, window_size=3),
    Case("window-cross", _MHA, "a window over more keys than queries", seq_len_k=9, window_size=3),
    Case("bias", _MHA, "an additive term on the scores", bias=True),
    Case("bias-causal", _MHA, "an additive term beside a mask", bias=True, is_causal=True),
]
"""What is hidden, and what is added to the scores."""

_LAYERS = [
    Case("cross", _CROSS, "keys of another width and length", seq_len=4, seq_len_k=7),
    Case("cross-padding", _CROSS, "keys of another width, padded", seq_len_k=7, key_padding_lengths=(2, 7)),
    Case("gqa", _GQA, "eight query heads share two key/value heads"),
    Case("gqa-causal", _GQA, "shared key/value heads under a mask", is_causal=True),
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
    Case("scale", _SCALE, "scores of another scale", seq_len=9, is_causal=True, gain=3.0),
    Case("rope", _ROPE, "rotary positions", seq_len=11, is_causal=True),
    Case("rope-gqa", _GQA_ROPE, "rotary positions, shared heads, a free head_dim", seq_len=9, is_causal=True),
    Case("rope-far", _ROPE, "positions that bfloat16 cannot tell apart", batch=1, seq_len=300, is_causal=True),
]
"""Other widths, heads, projections; another scale; rotary positions."""

_SIZES = [
    Case("one-query", _CROSS, "a single query", seq_len=1, seq_len_k=6),
    Case("one-key", _MHA, "a single key", seq_len=4, seq_len_k=1),
    Case("one-token", _MHA, "a single token", seq_len=1, batch=1),
    Case("odd-sizes", _TINY, "nothing is a multiple of anything", batch=3, seq_len=6, is_causal=True),
    Case("strided", _MHA, "inputs that are not contiguous in memory", strided=True, is_causal=True),
]
"""Few tokens, odd numbers, other strides."""

_VALUES = [
    Case("large-logits", _MHA, "logits beyond 65504, the end of float16", seq_len=6, gain=2.0**18, is_causal=True),
    Case(
        "large-logits-float16",
        _MHA,
        "the same in float16, whatever dtypes are asked for",
        seq_len=6,
        gain=2.0**18,
        is_causal=True,
        dtype="float16",
    ),
    Case(
        "nan-visible-causal",
        _GQA,
        "a NaN reaches every row that sees it, and no other",
        is_causal=True,
        not_finite="visible",
    ),
    Case(
        "nan-hidden-padding",
        _ROPE,
        "padding that is NaN changes nothing",
        key_padding_lengths=(3, 5),
        not_finite="hidden",
    ),
    Case(
        "nan-hidden-cross",
        _CROSS,
        "hidden keys that are NaN change nothing",
        seq_len_k=7,
        key_padding_lengths=(2, 6),
        not_finite="hidden",
    ),
    Case("wide", AttentionSpec(256, 4), "64 features a head, 48 tokens", seq_len=48, is_causal=True),
]
"""Large logits, NaN, many features."""

_CACHED = [
    Case("decode", _MHA, "a prompt, then token by token", seq_len=8, chunks=(5, 1, 1, 1), capacity=10),
    Case("chunked-prefill", _ROPE, "a prompt in pieces", seq_len=9, chunks=(4, 3, 2), capacity=9),
    Case(
        "decode-fused-qkv",
        AttentionSpec(32, 4, fused_qkv=True, out_proj=False),
        "decode, one projection in and none out",
        seq_len=6,
        chunks=(4, 1, 1),
        capacity=6,
    ),
    Case("decode-scale", _SCALE, "decode, another scale", seq_len=7, chunks=(4, 1, 1, 1), capacity=8, gain=3.0),
    Case("decode-gqa-rope", _GQA_ROPE, "decode, rotary, shared", seq_len=7, chunks=(4, 1, 1, 1), capacity=8),
    Case(
        "ragged",
        AttentionSpec(32, 4, num_kv_heads=2, rope=Rope(10000.0)),
        "sequences of different lengths",
        batch=3,
        seq_len=sum(map(max, _RAGGED)),
        chunks=tuple(map(max, _RAGGED)),
        new_lengths=_RAGGED,
        capacity=9,
    ),
    Case(
        "nan-visible-decode",
        _GQA,
        "a NaN in the prompt reaches every later token of its sequence",
        seq_len=6,
        chunks=(4, 1, 1),
        capacity=8,
        not_finite="visible",
    ),
    Case(
        "nan-hidden-decode",
        _ROPE,
        "a prompt padded with NaN, then token by token",
        seq_len=6,
        chunks=(4, 1, 1),
        new_lengths=((2, 3), (1, 1), (1, 1)),
        capacity=6,
        not_finite="hidden",
    ),
]
"""Tokens that come in steps."""

_TRAINED = [
    Case(
        "trained-anarcii-self",
        _ANARCII,
        "trained encoder, padded",
        seq_len=122,
        key_padding_lengths=(109, 122),
        trained="anarcii-self",
    ),
    Case(
        "trained-anarcii-causal",
        _ANARCII,
        "trained decoder, logits in the thousands",
        seq_len=24,
        is_causal=True,
        trained="anarcii-causal",
    ),
    Case(
        "trained-anarcii-cross",
        _ANARCII,
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
        _SMOLLM2,
        "trained LLaMA layer: GQA 9/3, RoPE",
        batch=1,
        seq_len=19,
        is_causal=True,
        trained="smollm2-causal",
    ),
    Case(
        "trained-smollm2-decode",
        _SMOLLM2,
        "the same layer, prompt in two pieces, then token by token",
        batch=1,
        seq_len=19,
        chunks=(8, 7, 1, 1, 1, 1),
        capacity=24,
        trained="smollm2-causal",
    ),
]
"""Layers that were trained, with inputs that they met."""


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


_TABLES = (_MASKS, _LAYERS, _SIZES, _VALUES, _CACHED, [random_case(seed) for seed in range(6)], _TRAINED)

CASES: dict[str, Case] = {case.name: case for table in _TABLES for case in table}
"""The cases by name, simple ones first, trained layers last."""


# ---- By their names --------------------------------------------------------------------------------------------------


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
