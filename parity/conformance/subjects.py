"""What is asked: an attention of any library behind one call, and the paths on which it can be called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DTYPES = ("float32", "bfloat16", "float16")
AXES = ("BNTH", "BTNH", "BTE")
FRAMEWORKS = ("torch", "jax", "ttnn")
TTNN_DTYPES = ("bfloat16", "float32")
DROPOUT = 0.5
BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 2, 8  # of what is examined, where nothing fixes its sizes
TTNN_HEAD_DIM = 32  # whose kernels take heads of whole tiles only
SEED = 0
TOKENS, FEW_TOKENS = 5, 3

Call = Callable[..., tuple[Any, Any]]
"""`(query, key, value, *, mask, is_causal, need_weights, padding) -> (output, attention weights or None)`, in the
framework's arrays. What is None or False was not asked for. The mask is (1, 1, T, S), and means what its values mean to
the subject: nothing here knows which of them hides. To ttnn, which has no booleans, it is a NumPy array on the host."""

Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""query, key and value; one array given twice is one array to the subject too: self-attention has fast paths."""


@dataclass(frozen=True)
class Path:
    """How a subject is called: what ought to change nothing but rounding, and sends libraries down other code."""

    dtype: str = "float32"
    need_weights: bool = False
    train: bool = False
    grad: bool = False
    dropout: float = 0.0

    def __str__(self) -> str:
        words = [self.dtype, "train" if self.train else "eval", "with grad" if self.grad else "no grad"]
        words.append("with weights" if self.need_weights else "without weights")
        return ", ".join(words + ([f"dropout {self.dropout}"] if self.dropout else []))

    @property
    def drops(self) -> bool:
        """Whether attention weights are dropped on it, so that its outputs are random."""
        return self.train and self.dropout > 0.0


@dataclass(frozen=True)
class Subject:
    """An attention function or layer, and what is known or claimed of it.

    Attributes:
        name: what the reports call it.
        framework: `torch`, `jax` or `ttnn`, whose arrays it takes.
        axes: of its inputs: split heads, `BNTH` or `BTNH`, or the width of a layer, `BTE`.
        make: makes the callable for a path; a layer whose weights can be set also takes a spec and canonical weights.
        version: of its library.
        takes: what it can be asked: `mask`, `is_causal`, `need_weights`, `train` (a mode that is not only dropout),
            `dropout`, `key` (keys that are not the queries), `value` (values that are not the keys).
        padding: how it takes padding: a boolean `mask` (B, S), or `lengths` (B,).
        width: of a layer's inputs, E.
        num_heads: query heads, N; None if unknown.
        head_dim: of split heads, H.
        has_settable_weights: whether `make` takes a spec and weights.
        has_groups: whether a layer takes fewer key/value heads in its spec; of split heads it is tried.
        decode: `(x, capacity, is_causal) -> output`: one token after the other through its cache.
        mask_true, causal, num_kv_heads: what it claims: a mask's True `hides` or `shows`; aligned `top-left` or
            `bottom-right`; that it takes fewer key/value than query heads.
        documented: by question, the warning in its documentation that covers what it does.
        promises: questions whose `note` is a broken promise, since it promises more than everybody expects.
    """

    name: str
    framework: str
    axes: str
    make: Callable[..., Call]
    version: str = ""
    takes: frozenset[str] = frozenset()
    padding: str | None = None
    width: int = NUM_HEADS * HEAD_DIM
    num_heads: int | None = NUM_HEADS
    head_dim: int = HEAD_DIM
    has_settable_weights: bool = False
    has_groups: bool = False
    decode: Callable[[np.ndarray, int, bool], np.ndarray] | None = None
    mask_true: str | None = None
    causal: str | None = None
    num_kv_heads: int | None = None
    documented: Mapping[str, str] = field(default_factory=dict)
    promises: frozenset[str] = frozenset()

    @property
    def is_layer(self) -> bool:
        """Whether it projects, so that its inputs have no heads."""
        return self.axes == "BTE"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What it is asked in where nobody says: of ttnn the dtype that its fused kernels take."""
        return TTNN_DTYPES[:1] if self.framework == "ttnn" else DTYPES

    def paths(self, dtypes: Sequence[str]) -> Iterator[Path]:
        """Every way to call it; dropout in the first dtype only, and no gradients of ttnn, which has none."""
        grads = (False,) if self.framework == "ttnn" else (False, True)
        for dtype in dtypes:
            modes = [(False, 0.0)]
            if "train" in self.takes:
                modes.append((True, 0.0))
            if "dropout" in self.takes and dtype == dtypes[0]:
                modes += [(False, DROPOUT), (True, DROPOUT)]
            for need_weights in (False, True) if "need_weights" in self.takes else (False,):
                for train, dropout in modes:
                    for grad in grads:
                        yield Path(dtype, need_weights, train, grad, dropout)
