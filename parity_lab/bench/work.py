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
NAMED = (
    "memory",
    "scores",
    "varlen",
    "growth",
    "growth-long",
)  # groups with work that others also have
DTYPES = ("float32", "bfloat16", "float16")

CORES = (
    (2, 8, 256),
    (2, 12, 512),
    (1, 12, 1024),
    (1, 16, 2048),
    (1, 8, 4096),
)  # batch, heads, tokens
LONG_CORES = ((1, 16, 8192), (1, 16, 16384))  # for a GPU
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
        if self.kind in ("prefill", "decode"):
            return " ".join(
                filter(None, (self.group if self.group in NAMED else "", self.label, self.kind))
            )
        told = [
            "causal" * self.is_causal,
            "padded" * self.is_padded,
            "capped" * (self.soft_cap is not None),
        ]
        told += [
            "sinks" * self.has_sinks,
            "ALiBi" * self.has_alibi,
            "packed" * (self.num_segments > 1),
        ]
        window = "" if self.window_size is None else f"window {self.window_size}"
        hidden = "+".join(filter(None, (*told, window))) or "full"
        words = [self.group if self.group in NAMED else "", self.label, self.kind, hidden]
        words += [
            "with weights" * self.need_weights,
            "forward+backward" if self.backward else "forward",
        ]
        return " ".join(filter(None, words))

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
        return self.num_heads * self.head_dim if self.layer is None else self.layer.d_in

    @property
    def spec(self) -> AttentionSpec:
        """The layer."""
        return self.layer or AttentionSpec(
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
        return [
            max(1, self.seq_len * (self.batch - b * self.is_padded) // self.batch)
            for b in range(self.batch)
        ]

    def check_scores(self) -> None:
        """Reject work for a contender that stores its scores or a mask.

        Raises:
            ValueError: if they are too many.
        """
        if (num_scores := self.batch * self.num_heads * self.seq_len**2) > MOST_SCORES:
            raise InputError(
                "scores",
                f"have at most {MOST_SCORES:.1e} elements to be stored",
                f"{num_scores:.1e}",
            )

    @property
    def segment_lengths(self) -> list[int]:
        """Number of tokens of each packed sequence; it decreases in equal steps."""
        parts = self.num_segments * (self.num_segments + 1) // 2
        ends = [
            self.seq_len * (parts - n * (n + 1) // 2) // parts
            for n in range(self.num_segments, -1, -1)
        ]
        return np.diff(ends).tolist()

    @property
    def flops(self) -> float | None:
        """Operations of matrix products, without hidden keys; None in `decode`, because reading
        dominates.
        """
        if self.kind == "decode":
            return None
        spec = self.spec
        width = spec.q_width + spec.context_width  # queries with keys, weights with values
        if self.num_segments > 1:
            alone = [
                replace(self, seq_len=length, num_segments=1) for length in self.segment_lengths
            ]
            return sum(each.flops or 0.0 for each in alone)
        core = 2 * sum(map(self._num_seen, self.lengths)) * width
        layer = 0 if self.kind == "core" else 2 * self.batch * self.seq_len * self._num_weights(2)
        # Backward: the scores once more, and four products for the gradients; of a projection, two.
        return 3.5 * core + 3 * layer if self.backward else core + layer

    def _num_seen(self, length: int) -> float:
        """Return the number of pairs of a query and a key that it attends to, for a sequence of
        this length.
        """
        seen = (
            length * (length + 1) / 2 + (self.seq_len - length) * length
            if self.is_causal
            else self.seq_len * length
        )
        window_size = self.spec.window_size
        width = length if window_size is None else min(window_size, length)
        return seen - (length - width) * (length - width + 1) / 2  # keys before the windows

    @property
    def nbytes(self) -> int | None:
        """Bytes to read for one more token: the weights, and the filled part of the cache; None for
        other kinds.
        """
        if self.kind != "decode":
            return None
        dtype = dtype_named(self.dtype)
        weights = self._num_weights(1) + self._num_weights(2)
        return weights * dtype.itemsize + self.spec.cache_nbytes(self.batch, self.seq_len, dtype)

    def _num_weights(self, axes: int) -> int:
        """Return the number of weights in arrays with this number of axes: 2 for matrices, 1 for
        biases.
        """
        return sum(
            math.prod(shape) for shape in self.spec.weight_shapes.values() if len(shape) == axes
        )


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
    rng, dtype = np.random.default_rng(0), dtype_named(work.dtype)
    heads, layer = (
        (work.batch, work.num_heads, work.seq_len, work.head_dim),
        (work.batch, work.seq_len, work.d_model),
    )
    shapes = {
        "core": dict.fromkeys(("query", "key", "value", "cotangent"), heads),
        "layer": dict.fromkeys(("x", "cotangent"), layer),
        "prefill": {"x": layer},
        "decode": {"x": (work.batch, 1, work.d_model)}
        | ({"keys": heads, "values": heads} if work.layer is None else {"prompt": layer}),
    }[work.kind]
    shapes |= {"sinks": (work.num_heads,)} if work.has_sinks else {}
    arrays = {
        name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()
    }
    if weights is None:
        weights = {} if work.kind == "core" else random_weights(work.spec, 0)
    return Inputs(arrays, {name: weight.astype(dtype) for name, weight in weights.items()})


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
    return [
        work
        for group in groups
        if group in makers
        for dtype in dtypes
        for work in dict.fromkeys(makers[group](dtype, quick, long))
    ]


def _core(group: str, shape: tuple[int, int, int], dtype: str, **options: Any) -> Work:
    batch, num_heads, seq_len = shape
    return Work(group, "core", batch, seq_len, num_heads, dtype=dtype, **options)


def _cores(dtype: str, quick: bool, long: bool) -> list[Work]:
    shapes = (CORES[0], CORES[2]) if quick else (*CORES, *LONG_CORES) if long else CORES
    backward = shapes[1:] if quick else (*shapes[2:4], *shapes[5:])
    forward = [
        _core("cores", shape, dtype, is_causal=is_causal)
        for shape in shapes
        for is_causal in (False, True)
    ]
    both = [True] if quick else [False, True]
    return forward + [
        _core("cores", shape, dtype, is_causal=is_causal, backward=True)
        for shape in backward
        for is_causal in both
    ]


def _scores(dtype: str, quick: bool, long: bool) -> list[Work]:
    shape, window_size = ((1, 8, 1024), 128) if quick else ((1, 8, 4096), 512)
    batch, num_heads, seq_len = shape
    core = Work("scores", "core", batch, seq_len, num_heads, dtype=dtype, is_causal=True)
    forward = [core, replace(core, window_size=window_size), replace(core, soft_cap=50.0)]
    forward += [replace(core, has_sinks=True), replace(core, has_alibi=True)]
    return forward + [replace(work, backward=True) for work in forward]


def _varlen(dtype: str, quick: bool, long: bool) -> list[Work]:
    core = Work("varlen", "core", 2, 1024 if quick else 4096, 8, dtype=dtype, is_causal=True)
    forward = [replace(core, is_padded=True), replace(core, batch=1, num_segments=4)]
    return forward + [replace(work, backward=True) for work in forward]


def _layers(dtype: str, quick: bool, long: bool) -> list[Work]:
    causal: dict[str, Any] = {"is_causal": True}
    padded, weights = {"is_padded": True}, {"need_weights": True}
    kinds: list[dict[str, Any]] = [{}, causal, causal | padded, weights]
    kinds += [] if quick else [padded, causal | weights]
    found = []
    for seq_len in (256,) if quick else (128, 256, 1024, 2048):
        # Padding needs a longer sequence in the batch.
        found += [
            Work(
                "layers",
                "layer",
                2 if "is_padded" in options else 1,
                seq_len,
                dtype=dtype,
                **options,
            )
            for options in kinds
        ]
        if seq_len > 128:
            trained = [causal] if quick else [{}, causal]
            found += [
                Work("layers", "layer", 1, seq_len, dtype=dtype, backward=True, **options)
                for options in trained
            ]
    return found


def _decode(dtype: str, quick: bool, long: bool) -> list[Work]:
    prompts, cached, batches = (
        ((256,), (1024,), (1,)) if quick else ((256, 1024, 2048), (1024, 4096), (1, 8))
    )
    return [
        *(
            Work("decode", "prefill", 1, seq_len, dtype=dtype, is_causal=True)
            for seq_len in prompts
        ),
        *(
            Work("decode", "decode", batch, seq_len, dtype=dtype)
            for seq_len in cached
            for batch in batches
        ),
    ]


def _memory(dtype: str, quick: bool, long: bool) -> list[Work]:
    options: dict[str, Any] = {"is_causal": True, "is_timed": False}
    if quick:
        return [_core("memory", (1, 8, 1024), dtype, backward=True, **options)]
    shapes = [(1, 12, 1024), (1, 16, 2048), (1, 8, 4096)]
    return [
        *(
            _core("memory", shape, dtype, backward=backward, **options)
            for backward in (False, True)
            for shape in shapes
        ),
        *(
            Work("memory", "layer", 1, 2048, dtype=dtype, backward=backward, **options)
            for backward in (False, True)
        ),
    ]


def _growth(dtype: str, quick: bool, long: bool) -> list[Work]:
    lengths = [2**power for power in range(7, 11 if quick else 15 if long else 13)]  # from 128
    batches, seq_len = ((1, 2, 4), 256) if quick else ((1, 2, 4, 8), 1024)
    shapes = [*((1, 8, length) for length in lengths), *((batch, 8, seq_len) for batch in batches)]
    return [_core("growth", shape, dtype, is_causal=True) for shape in shapes]


def _growth_long(dtype: str, quick: bool, long: bool) -> list[Work]:
    lengths = [2**power for power in range(10, 13 if quick else 18)]  # from 1024 to 131072
    windows = [
        _core("growth-long", (1, 8, length), dtype, is_causal=True, window_size=512)
        for length in lengths
    ]
    return windows + [
        Work("growth-long", "decode", 1, length, 8, dtype=dtype) for length in lengths
    ]
