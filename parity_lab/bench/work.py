"""Pieces of work, their inputs, and their least arithmetic or bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mha_spec import Alibi, AttentionSpec, InputError
from parity.measure.core.weights import Weights, dtype_named, random_weights

GROUPS = (
    "cores",
    "scores",
    "varlen",
    "layers",
    "decode",
    "memory",
    "import",
    "convert",
    "growth",
    "growth-long",
)
NAMED = ("memory", "scores", "varlen", "growth", "growth-long")
"""Groups with work that other groups also have: a description begins with these names."""

DTYPES = ("float32", "bfloat16", "float16")

CORES = ((2, 8, 256), (2, 12, 512), (1, 12, 1024), (1, 16, 2048), (1, 8, 4096))
"""Batch, heads and tokens of cores."""

LONG_CORES = ((1, 16, 8192), (1, 16, 16384))
"""The same for a GPU."""

MOST_SCORES = 2**29
"""Elements of the scores, or of a mask for each head, that other libraries may store: 2 GiB in
float32.
"""


@dataclass(frozen=True)
class Work:
    """A piece of work in one shape and dtype.

    Attributes:
        group: the part of the benchmark that it belongs to, one of `GROUPS`.
        kind: attention of split heads; a whole layer; a prompt into an empty cache; or one more
            token with a cache.
        batch: number of sequences, B.
        seq_len: tokens of each, S; in `decode`, tokens cached before the new one.
        num_heads, head_dim: sizes of the heads; a layer is as wide as all heads together.
        is_causal: tokens attend to no later token.
        window_size: tokens attend to none that is this many positions away, or more.
        soft_cap: soft cap of the scores.
        has_sinks: each head has a sink logit.
        has_alibi: scores have ALiBi.
        is_padded: the sequences have different lengths, see `lengths`.
        num_segments: sequences packed into each row, of different lengths; tokens attend to their
            own one only.
        need_weights: the attention weights are also a result.
        backward: the gradients of all inputs and weights are also results.
        is_timed: measure the time; otherwise only the memory.
        layer: layer of a model, instead of a plain one of these sizes.
        label: names of the layers of the model.
    """

    group: str
    kind: Literal["core", "layer", "prefill", "decode"]
    batch: int
    seq_len: int
    num_heads: int = 16
    head_dim: int = 64
    dtype: str = "float32"
    is_causal: bool = False
    window_size: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    is_padded: bool = False
    num_segments: int = 1
    need_weights: bool = False
    backward: bool = False
    is_timed: bool = True
    layer: AttentionSpec | None = None
    label: str = ""

    @property
    def what(self) -> str:
        """Description of the work; with shape, dtype and framework it identifies a row."""
        words = [self.label, self.kind]
        if self.group in NAMED:
            words.insert(0, self.group)
        if self.kind in ("core", "layer"):
            words.append("+".join(self._features()) or "full")
            if self.need_weights:
                words.append("with weights")
            words.append("forward+backward" if self.backward else "forward")
        return " ".join(word for word in words if word)

    def _features(self) -> list[str]:
        """Return the names of what changes the scores or hides keys."""
        names = []
        if self.is_causal:
            names.append("causal")
        if self.is_padded:
            names.append("padded")
        if self.soft_cap is not None:
            names.append("capped")
        if self.has_sinks:
            names.append("sinks")
        if self.has_alibi:
            names.append("ALiBi")
        if self.num_segments > 1:
            names.append("packed")
        if self.window_size is not None:
            names.append(f"window {self.window_size}")
        return names

    @property
    def axes(self) -> str:
        """Letters of `shape`."""
        return "B N S H" if self.kind == "core" else "B S E"

    @property
    def shape(self) -> list[int]:
        """Shape of the query, key and value of a core, or of a layer's input, or of the cached
        tokens in `decode`.
        """
        if self.kind == "core":
            return [self.batch, self.num_heads, self.seq_len, self.head_dim]
        return [self.batch, self.seq_len, self.d_model]

    @property
    def d_model(self) -> int:
        """Width of the layer, E."""
        if self.layer is not None:
            return self.layer.d_in
        return self.num_heads * self.head_dim

    @property
    def spec(self) -> AttentionSpec:
        """The layer."""
        if self.layer is not None:
            return self.layer
        return AttentionSpec(
            self.d_model,
            self.num_heads,
            window_size=self.window_size,
            soft_cap=self.soft_cap,
            sinks=self.has_sinks,
            alibi=Alibi() if self.has_alibi else None,
        )

    @property
    def capacity(self) -> int:
        """Slots of a cache: twice the number of filled ones, because a cache is seldom full."""
        return 2 * self.seq_len

    @property
    def lengths(self) -> list[int]:
        """Number of real tokens of each sequence; with padding it decreases in equal steps."""
        if not self.is_padded:
            return [self.seq_len] * self.batch
        steps = range(self.batch, 0, -1)
        return [max(1, self.seq_len * step // self.batch) for step in steps]

    def check_scores(self) -> None:
        """Reject work for a contender that stores its scores or a mask.

        Raises:
            ValueError: if they are too many.
        """
        num_scores = self.batch * self.num_heads * self.seq_len**2
        if num_scores > MOST_SCORES:
            expected = f"have at most {MOST_SCORES:.1e} elements to be stored"
            raise InputError("scores", expected, f"{num_scores:.1e}")

    @property
    def segment_lengths(self) -> list[int]:
        """Number of tokens of each packed sequence; it decreases in equal steps."""
        # The last sequence has one part of the row, the one before it two, and so on.
        num_parts = _triangle(self.num_segments)
        parts_before = [
            num_parts - _triangle(num_left) for num_left in range(self.num_segments, -1, -1)
        ]
        ends = [self.seq_len * parts // num_parts for parts in parts_before]
        return np.diff(ends).tolist()

    @property
    def flops(self) -> float | None:
        """Operations of matrix products, without hidden keys; None in `decode`, because reading
        dominates.
        """
        if self.kind == "decode":
            return None
        if self.num_segments > 1:
            return self._flops_of_segments()
        # Queries are multiplied with keys, and weights with values.
        width = self.spec.q_width + self.spec.context_width
        num_pairs = sum(self._num_pairs(length) for length in self.lengths)
        core = 2.0 * num_pairs * width
        layer = 0
        if self.kind != "core":
            layer = 2 * self.batch * self.seq_len * self._num_weights(2)
        if self.backward:
            # The scores once more, and four products for the gradients; of a projection, two.
            return 3.5 * core + 3 * layer
        return core + layer

    def _flops_of_segments(self) -> float:
        """Return the operations of packed sequences: the sum of each one alone."""
        total = 0.0
        for length in self.segment_lengths:
            alone = replace(self, seq_len=length, num_segments=1)
            total += alone.flops or 0.0
        return total

    def _num_pairs(self, length: int) -> int:
        """Return the number of pairs of a query and a key that it attends to, for a sequence with
        this number of real tokens; queries of padding also attend.
        """
        num_pairs = self.seq_len * length
        if self.is_causal:
            num_pairs = _triangle(length) + (self.seq_len - length) * length
        if self.spec.window_size is None or self.spec.window_size >= length:
            return num_pairs
        return num_pairs - _triangle(length - self.spec.window_size)  # keys before the windows

    @property
    def nbytes(self) -> int | None:
        """Bytes to read for one more token: the weights, and the filled part of the cache; None for
        other kinds.
        """
        if self.kind != "decode":
            return None
        dtype = dtype_named(self.dtype)
        num_weights = self._num_weights(1) + self._num_weights(2)
        return num_weights * dtype.itemsize + self.spec.cache_nbytes(
            self.batch, self.seq_len, dtype
        )

    def _num_weights(self, num_axes: int) -> int:
        """Return the number of weights in arrays with this number of axes: 2 for matrices, 1 for
        biases.
        """
        shapes = self.spec.weight_shapes.values()
        return sum(math.prod(shape) for shape in shapes if len(shape) == num_axes)


def _triangle(n: int) -> int:
    """Return 1 + 2 + … + n."""
    return n * (n + 1) // 2


@dataclass(frozen=True)
class Inputs:
    """The arrays of a piece of work, the same for every contender.

    Attributes:
        arrays: for a core query, key, value (B, N, S, H) and perhaps sinks (N,); for a layer x (B,
            S, E); for decode x (B, 1, E) and the cached keys, values (B, N, S, H) or, for a layer
            of a model, the prompt (B, S, E) that fills its cache; and the cotangent of the output.
        weights: canonical weights of a layer.
    """

    arrays: dict[str, np.ndarray]
    weights: Weights


def draw_inputs(work: Work, weights: Weights | None = None) -> Inputs:
    """Return seeded inputs for a piece of work, and weights of the layer, which are drawn by
    default.
    """
    rng = np.random.default_rng(0)
    dtype = dtype_named(work.dtype)
    arrays = {}
    for name, shape in _input_shapes(work).items():
        arrays[name] = rng.standard_normal(shape, np.float32).astype(dtype)
    if weights is None:
        weights = {} if work.kind == "core" else random_weights(work.spec, 0)
    return Inputs(arrays, {name: weight.astype(dtype) for name, weight in weights.items()})


def _input_shapes(work: Work) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the input arrays, in the order in which they are drawn."""
    heads = (work.batch, work.num_heads, work.seq_len, work.head_dim)
    tokens = (work.batch, work.seq_len, work.d_model)
    shapes: dict[str, tuple[int, ...]]
    if work.kind == "core":
        shapes = dict.fromkeys(("query", "key", "value", "cotangent"), heads)
    elif work.kind == "layer":
        shapes = {"x": tokens, "cotangent": tokens}
    elif work.kind == "prefill":
        shapes = {"x": tokens}
    elif work.layer is None:
        shapes = {"x": (work.batch, 1, work.d_model), "keys": heads, "values": heads}
    else:
        # Only the layer itself knows what its cache holds.
        shapes = {"x": (work.batch, 1, work.d_model), "prompt": tokens}
    if work.has_sinks:
        shapes["sinks"] = (work.num_heads,)
    return shapes


# ---- The list ------------------------------------------------------------------------------------


def plan(
    groups: Sequence[str], dtypes: Sequence[str], *, quick: bool = False, long: bool = False
) -> list[Work]:
    """Return the pieces of work of these groups, in each dtype.

    Args:
        groups: some of `GROUPS`; `import` and `convert` have none.
        dtypes: some of `DTYPES`.
        quick: fewer and smaller pieces.
        long: also cores of up to 16384 tokens.
    """
    makers = {
        "cores": _cores,
        "scores": _scores,
        "varlen": _varlen,
        "layers": _layers,
        "decode": _decode,
        "memory": _memory,
        "growth": _growth,
        "growth-long": _growth_long,
    }
    works: list[Work] = []
    for group in groups:
        if group not in makers:
            continue
        for dtype in dtypes:
            # Along the tokens and along the batch, growth has a shape in common.
            works += dict.fromkeys(makers[group](dtype, quick, long))
    return works


def _core(group: str, shape: tuple[int, int, int], dtype: str, **options: Any) -> Work:
    batch, num_heads, seq_len = shape
    return Work(group, "core", batch, seq_len, num_heads, dtype=dtype, **options)


def _cores(dtype: str, quick: bool, long: bool) -> list[Work]:
    shapes = CORES
    backward_shapes = CORES[2:4]
    if quick:
        shapes = (CORES[0], CORES[2])
        backward_shapes = (CORES[2],)
    elif long:
        shapes = (*CORES, *LONG_CORES)
        backward_shapes = (*CORES[2:4], *LONG_CORES)

    works = []
    for shape in shapes:
        for is_causal in (False, True):
            works.append(_core("cores", shape, dtype, is_causal=is_causal))
    for shape in backward_shapes:
        if not quick:
            works.append(_core("cores", shape, dtype, backward=True))
        works.append(_core("cores", shape, dtype, is_causal=True, backward=True))
    return works


def _scores(dtype: str, quick: bool, long: bool) -> list[Work]:
    seq_len, window_size = 4096, 512
    if quick:
        seq_len, window_size = 1024, 128
    core = _core("scores", (1, 8, seq_len), dtype, is_causal=True)
    forward = [
        core,
        replace(core, window_size=window_size),
        replace(core, soft_cap=50.0),
        replace(core, has_sinks=True),
        replace(core, has_alibi=True),
    ]
    return forward + [replace(work, backward=True) for work in forward]


def _varlen(dtype: str, quick: bool, long: bool) -> list[Work]:
    seq_len = 1024 if quick else 4096
    core = _core("varlen", (2, 8, seq_len), dtype, is_causal=True)
    forward = [replace(core, is_padded=True), replace(core, batch=1, num_segments=4)]
    return forward + [replace(work, backward=True) for work in forward]


def _layers(dtype: str, quick: bool, long: bool) -> list[Work]:
    lengths = (256,) if quick else (128, 256, 1024, 2048)
    works = []
    for seq_len in lengths:
        full = Work("layers", "layer", 1, seq_len, dtype=dtype)
        causal = replace(full, is_causal=True)
        # Padding needs a longer sequence in the batch.
        padded = replace(full, batch=2, is_padded=True)
        works += [
            full,
            causal,
            replace(padded, is_causal=True),
            replace(full, need_weights=True),
        ]
        if not quick:
            works += [padded, replace(causal, need_weights=True)]
        if seq_len > 128:
            if not quick:
                works.append(replace(full, backward=True))
            works.append(replace(causal, backward=True))
    return works


def _decode(dtype: str, quick: bool, long: bool) -> list[Work]:
    prompt_lengths, cached_lengths, batches = (256, 1024, 2048), (1024, 4096), (1, 8)
    if quick:
        prompt_lengths, cached_lengths, batches = (256,), (1024,), (1,)
    works = []
    for seq_len in prompt_lengths:
        works.append(Work("decode", "prefill", 1, seq_len, dtype=dtype, is_causal=True))
    for seq_len in cached_lengths:
        for batch in batches:
            works.append(Work("decode", "decode", batch, seq_len, dtype=dtype))
    return works


def _memory(dtype: str, quick: bool, long: bool) -> list[Work]:
    if quick:
        core = _core("memory", (1, 8, 1024), dtype, is_causal=True, is_timed=False)
        return [replace(core, backward=True)]
    cores = [
        _core("memory", shape, dtype, is_causal=True, is_timed=False)
        for shape in ((1, 12, 1024), (1, 16, 2048), (1, 8, 4096))
    ]
    layer = Work("memory", "layer", 1, 2048, dtype=dtype, is_causal=True, is_timed=False)
    return [
        *cores,
        *[replace(core, backward=True) for core in cores],
        layer,
        replace(layer, backward=True),
    ]


def _growth(dtype: str, quick: bool, long: bool) -> list[Work]:
    longest = 4096
    seq_len_of_batches, batches = 1024, (1, 2, 4, 8)
    if quick:
        longest = 1024
        seq_len_of_batches, batches = 256, (1, 2, 4)
    elif long:
        longest = 16384
    shapes = [(1, 8, length) for length in _doubled(128, longest)]
    shapes += [(batch, 8, seq_len_of_batches) for batch in batches]
    return [_core("growth", shape, dtype, is_causal=True) for shape in shapes]


def _growth_long(dtype: str, quick: bool, long: bool) -> list[Work]:
    lengths = _doubled(1024, 4096 if quick else 131072)
    works = []
    for length in lengths:
        shape = (1, 8, length)
        works.append(_core("growth-long", shape, dtype, is_causal=True, window_size=512))
    for length in lengths:
        works.append(Work("growth-long", "decode", 1, length, 8, dtype=dtype))
    return works


def _doubled(smallest: int, largest: int) -> list[int]:
    """Return the smallest length, its double, and so on to the largest."""
    lengths = [smallest]
    while lengths[-1] < largest:
        lengths.append(2 * lengths[-1])
    return lengths
