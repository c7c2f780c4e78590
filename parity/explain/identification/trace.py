"""Trace features of heads, bit for bit, to the outputs of submodules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from parity.explain.identification.observe import Submodule

CLOSE = 3e-5
"""Largest error of a recomputed value, relative to its largest output, in float32."""


@dataclass(frozen=True)
class Traced:
    """Heads, each feature with the submodule that returned it.

    Attributes:
        heads: (B, heads, T, H).
        sources: submodule of each feature, heads outermost.
        indices: index of each feature in the output of its submodule.
        factor: factor of all features since.
    """

    heads: np.ndarray
    sources: list[Submodule] = field(repr=False)
    indices: np.ndarray = field(repr=False)
    factor: float = 1.0

    @property
    def modules(self) -> list[Submodule]:
        """Return each submodule once, ordered by its first feature."""
        by_call = {}
        for source in self.sources:
            by_call.setdefault((source.name, source.call), source)
        return list(by_call.values())

    @property
    def indices_by_head(self) -> np.ndarray:
        """Return the index of each feature in the output of its submodule, (heads, H)."""
        return self.indices.reshape(self.heads.shape[1], self.heads.shape[3])

    def of_head(self, features: slice) -> Traced:
        """Return some features of each head."""
        num_heads, head_dim = self.heads.shape[1], self.heads.shape[3]
        of_features = np.arange(num_heads * head_dim).reshape(num_heads, head_dim)
        of_features = of_features[:, features].reshape(-1)
        sources = [self.sources[index] for index in of_features]
        return Traced(self.heads[..., features], sources, self.indices[of_features], self.factor)


def trace(
    heads: np.ndarray,
    pool: Sequence[Submodule],
    factors: Sequence[float] = (1.0,),
    limit: float | None = None,
) -> Traced | None:
    """Trace heads (B, heads, T, H) to submodules; None if a feature has no source.

    RoPE leaves a token at position 0 unchanged, bit for bit, so this token identifies the features.
    If RoPE rotates all tokens, the lengths of heads, which it preserves, identify them.

    Args:
        heads: input of the attention function.
        pool: submodules that may have returned the features.
        factors: candidates for the factor of each feature.
        limit: limit of the features, if they were clipped.
    """
    batch_size, num_heads, num_tokens, head_dim = heads.shape
    submodules: list[Submodule] = []
    outputs: list[np.ndarray] = []
    for submodule in pool:
        output = tokens_of(submodule.output, batch_size, num_tokens)
        if output is not None:
            submodules.append(submodule)
            outputs.append(output)
    if not submodules:
        return None
    features = np.concatenate(outputs, axis=-1)
    if limit is not None:
        features = np.clip(features, -np.float32(limit), np.float32(limit))
    widths = [output.shape[-1] for output in outputs]
    begins = np.cumsum([0, *widths])

    order = _order_at_zero(heads, features, factors)
    if order is None:
        parts = pairwise(begins.tolist())
        order = _order_by_length(heads, features, factors, parts)
    if order is None:
        return None
    picked = features[..., order].reshape(batch_size, num_tokens, num_heads, head_dim)
    owners = np.repeat(np.arange(len(submodules)), widths)[order]
    sources = [submodules[owner] for owner in owners]
    indices = np.array(order) - begins[owners]
    return Traced(picked.transpose(0, 2, 1, 3), sources, indices)


def _order_at_zero(
    heads: np.ndarray, features: np.ndarray, factors: Sequence[float]
) -> list[int] | None:
    """Return the index of each feature of heads in features (B, T, width), by bits of an unrotated
    token.
    """
    num_tokens = heads.shape[2]
    # The first token usually has position 0, and the last one if the order is reversed.
    for token in (0, *range(num_tokens - 1, 0, -1)):
        indices_by_bits: dict[bytes, list[int]] = {}
        for factor in factors:
            scaled = features[:, token] * np.float32(factor)
            for index, bits in enumerate(columns_of(scaled)):
                indices_by_bits.setdefault(bits, []).append(index)
        columns = columns_of(features_of(heads[:, :, [token]]))
        order = _order_of_columns(columns, indices_by_bits)
        if order is not None:
            return order
    return None


def _order_of_columns(
    columns: Iterable[bytes], indices_by_bits: Mapping[bytes, list[int]]
) -> list[int] | None:
    """Return the index of each column; None if one has none.

    Among indices with the same bits, the one that follows the index of the previous column is
    preferred.
    """
    order: list[int] = []
    following = 0
    for bits in columns:
        candidates = indices_by_bits.get(bits)
        if candidates is None:
            return None
        index = candidates[0]
        if following in candidates:
            index = following
        order.append(index)
        following = index + 1
    return order


def _order_by_length(
    heads: np.ndarray,
    features: np.ndarray,
    factors: Sequence[float],
    parts: Iterable[tuple[int, int]],
) -> list[int] | None:
    """Return the index of each feature of heads in features (B, T, width), if they are contiguous
    in a part.

    Args:
        heads: (B, heads, T, H).
        features: (B, T, width).
        factors: candidates for the factor of heads.
        parts: first feature of each part, and the one after its last.
    """
    batch_size, num_heads, num_tokens, head_dim = heads.shape
    width = num_heads * head_dim
    lengths = np.linalg.norm(heads, axis=-1)
    for begin, end in parts:
        for first in range(begin, end - width + 1, width):
            block = features[..., first : first + width]
            split = block.reshape(batch_size, num_tokens, num_heads, head_dim)
            lengths_before = np.linalg.norm(split, axis=-1).transpose(0, 2, 1)
            if any(is_close(factor * lengths_before, lengths) for factor in factors):
                return list(range(first, first + width))
    return None


# ---- Arrays --------------------------------------------------------------------------------------


def tokens_of(x: np.ndarray, batch_size: int, num_tokens: int) -> np.ndarray | None:
    """Return tokens or heads of a submodule's input or output as (B, T, features); None if they are
    neither.
    """
    if x.ndim == 4 and x.shape[0] == batch_size and num_tokens in x.shape[1:3]:
        if x.shape[1] != num_tokens:
            x = x.transpose(0, 2, 1, 3)
        return x.reshape(batch_size, num_tokens, -1)
    num_rows = batch_size * num_tokens
    if x.ndim == 3 and x.shape[:2] != (batch_size, num_tokens) and len(x) == num_rows:
        return x.reshape(batch_size, num_tokens, -1)
    if x.ndim > 1 and x.size == num_rows * x.shape[-1]:
        return x.reshape(batch_size, num_tokens, -1)
    return None


def features_of(heads: np.ndarray) -> np.ndarray:
    """Return heads (B, heads, T, H) as tokens (B * T, heads * H)."""
    return heads.transpose(0, 2, 1, 3).reshape(heads.shape[0] * heads.shape[2], -1)


def as_tokens(x: np.ndarray) -> np.ndarray:
    """Return tokens (B, T, features) as (B * T, features)."""
    return x.reshape(-1, x.shape[-1])


def columns_of(features: np.ndarray) -> Iterator[bytes]:
    """Yield the bits of each feature over all tokens, which identify it."""
    for column in np.ascontiguousarray(features.T):
        yield column.tobytes()


def is_close(recomputed: np.ndarray, observed: np.ndarray) -> bool:
    """Return whether recomputed and observed values agree up to rounding."""
    if recomputed.shape != observed.shape:
        return False
    return bool(np.abs(recomputed - observed).max() <= CLOSE * np.abs(observed).max())
