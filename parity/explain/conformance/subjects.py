"""Subjects: an attention of any library behind a common call, and the paths on which it can be
called.
"""

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
BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 2, 8  # default sizes of a subject
TTNN_HEAD_DIM = 32  # its kernels accept only whole tiles
SEED = 0
TOKENS, FEW_TOKENS = 5, 3

Call = Callable[..., tuple[Any, Any]]
"""`(query, key, value, *, mask, is_causal, need_weights, padding) -> (output, attention weights or
None)`, in the framework's arrays. Arguments that are None or False are not requested. The mask is
(1, 1, T, S), with the subject's own polarity, which the caller does not know. For ttnn, which has
no booleans, it is a NumPy array on the host.
"""

Decode = Callable[[np.ndarray, int, bool], np.ndarray]
"""`(x, capacity, is_causal) -> output`: (B, T, E), one token at a time through a cache."""

Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""query, key and value. Equal inputs are one array for the subject too, because self-attention has
fast paths.
"""


LETTERS = ("q", "k", "v")


def by_letters(inputs: Inputs) -> dict[str, np.ndarray]:
    """Return the distinct arrays of the inputs, by the letters of query, key and value: the keys
    are `q` and `kv`, for example, or `qkv` for self-attention.
    """
    letters_by_id: dict[int, str] = {}
    for letter, x in zip(LETTERS, inputs, strict=True):
        letters_by_id[id(x)] = letters_by_id.get(id(x), "") + letter
    return {letters: inputs[LETTERS.index(letters[0])] for letters in letters_by_id.values()}


def from_letters(arrays: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return query, key and value of distinct arrays, the inverse of `by_letters`."""
    by_letter: dict[str, Any] = {}
    for letters, x in arrays.items():
        for letter in letters:
            by_letter[letter] = x
    return by_letter["q"], by_letter["k"], by_letter["v"]


@dataclass(frozen=True)
class Path:
    """A way to call a subject: it should change only rounding, but makes libraries run different
    code.
    """

    dtype: str = "float32"
    need_weights: bool = False
    train: bool = False
    grad: bool = False
    dropout: float = 0.0

    def __str__(self) -> str:
        words = [self.dtype]
        words.append("train" if self.train else "eval")
        words.append("with grad" if self.grad else "no grad")
        words.append("with weights" if self.need_weights else "without weights")
        if self.dropout:
            words.append(f"dropout {self.dropout}")
        return ", ".join(words)

    @property
    def drops(self) -> bool:
        """Return whether attention weights are dropped, so that outputs are random."""
        return self.train and self.dropout > 0.0


@dataclass(frozen=True)
class Subject:
    """An attention function or layer, with its known and claimed properties.

    Attributes:
        name: name for reports.
        framework: `torch`, `jax` or `ttnn`, whose arrays it accepts.
        axes: axes of its inputs: split heads, `BNTH` or `BTNH`, or inputs of a layer, `BTE`.
        make: returns the callable for a path; if weights are settable, it also accepts a spec and
            canonical weights.
        version: version of its library.
        takes: supported arguments: `mask`, `is_causal`, `need_weights`, `train` (a mode apart from
            dropout), `dropout`, `key` (keys that differ from the queries), `value` (values that
            differ from the keys).
        padding: form of padding: a boolean `mask` (B, S), or `lengths` (B,).
        width: width of a layer's inputs, E.
        num_heads: number of query heads, N; None if unknown.
        head_dim: features of split heads, H.
        has_settable_weights: whether `make` accepts a spec and weights.
        has_groups: whether a layer supports fewer key/value heads in its spec; for split heads this
            is determined by a test.
        decode: decodes one token at a time through its cache, see `Decode`.
        mask_true, causal, num_kv_heads: its claims: True in a mask `hides` or `shows`; causal
            alignment `top-left` or `bottom-right`; support for fewer key/value heads than query
            heads.
        documented: by question, the warning in its documentation that covers its behavior.
        promises: questions for which a `note` is a broken promise, because it promises more than
            usual.

    Example:
        >>> def attention(path):
        ...     return lambda q, k, v, **_: (torch.softmax(q @ k.mT, -1) @ v, None)
        >>> subject = parity.Subject("mine", "torch", "BNTH", attention)
        >>> parity.examine(subject, ["scale"], ["float32"])["scale"].words
        '1 (none)'
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
    decode: Decode | None = None
    mask_true: str | None = None
    causal: str | None = None
    num_kv_heads: int | None = None
    documented: Mapping[str, str] = field(default_factory=dict)
    promises: frozenset[str] = frozenset()

    @property
    def is_layer(self) -> bool:
        """Return whether it projects, so that its inputs have no heads."""
        return self.axes == "BTE"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Return the default dtypes: for ttnn, the one that its fused kernels support."""
        if self.framework == "ttnn":
            return TTNN_DTYPES[:1]
        return DTYPES

    def paths(self, dtypes: Sequence[str]) -> Iterator[Path]:
        """Yield every path; dropout only in the first dtype, and no gradients for ttnn, which has
        none.
        """
        for dtype in dtypes:
            for need_weights in self._flags("need_weights"):
                for train, dropout in self._modes(has_dropout=dtype == dtypes[0]):
                    yield Path(dtype, need_weights, train, False, dropout)
                    if self.framework != "ttnn":
                        yield Path(dtype, need_weights, train, True, dropout)

    def _flags(self, argument: str) -> tuple[bool, ...]:
        """Return the values of a flag: only False if the subject does not support it."""
        if argument in self.takes:
            return (False, True)
        return (False,)

    def _modes(self, has_dropout: bool) -> list[tuple[bool, float]]:
        """Return the modes of a call: whether in training, and the dropout rate."""
        modes = [(train, 0.0) for train in self._flags("train")]
        if has_dropout and "dropout" in self.takes:
            modes += [(False, DROPOUT), (True, DROPOUT)]
        return modes
