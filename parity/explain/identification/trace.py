"""Trace features of heads, bit for bit, to the outputs of submodules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from parity.explain.identification.observe import Submodule


@dataclass(frozen=True)
class Traced:
    """Heads, each feature with the submodule that returned it.

    Attributes:
        heads: (B, heads, T, H).
        sources: submodule of each feature, heads outermost.
        places: index of each feature in the output of its submodule.
        factor: factor of all features since.
    """

    heads: np.ndarray
    sources: list[Submodule] = field(repr=False)
    places: np.ndarray = field(repr=False)
    factor: float = 1.0

    @property
    def modules(self) -> list[Submodule]:
        """Return each submodule once, ordered by its first feature."""
        return list({(each.name, each.call): each for each in self.sources}.values())

    def of_head(self, features: slice) -> Traced:
        """Return some features of each head."""
        num_heads, head_dim = self.heads.shape[1], self.heads.shape[3]
        order = (
            np.arange(num_heads * head_dim).reshape(num_heads, head_dim)[:, features].reshape(-1)
        )
        return Traced(
            self.heads[..., features],
            [self.sources[i] for i in order],
            self.places[order],
            self.factor,
        )


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
    results = [(each, tokens_of(each.result, batch_size, num_tokens)) for each in pool]
    known = [(each, x) for each, x in results if x is not None]
    if not known:
        return None
    features = np.concatenate([x for _, x in known], axis=-1)
    features = (
        features if limit is None else np.clip(features, -np.float32(limit), np.float32(limit))
    )
    widths = [x.shape[-1] for _, x in known]
    begin = np.cumsum([0, *widths])
    order = _order_at_zero(heads, features, factors)
    if order is None:
        parts = ((first, first + width) for first, width in zip(begin, widths, strict=False))
        order = _order_by_length(heads, features, factors, parts)
    if order is None:
        return None
    picked = (
        features[..., order]
        .reshape(batch_size, num_tokens, num_heads, head_dim)
        .transpose(0, 2, 1, 3)
    )
    owner = np.repeat(np.arange(len(known)), widths)
    sources = [known[owner[place]][0] for place in order]
    return Traced(picked, sources, np.array([place - begin[owner[place]] for place in order]))


def _order_at_zero(
    heads: np.ndarray, features: np.ndarray, factors: Sequence[float]
) -> list[int] | None:
    """Return the index of each feature of heads in features (B, T, width), by bits of an unrotated
    token.
    """
    num_tokens = heads.shape[2]
    for token in (0, *range(num_tokens - 1, 0, -1)):
        places: dict[bytes, list[int]] = {}
        for factor in factors:
            for place, bits in enumerate(columns_of(features[:, token] * np.float32(factor))):
                places.setdefault(bits, []).append(place)
        order: list[int] = []
        for bits in columns_of(features_of(heads[:, :, [token]])):
            found = places.get(bits)
            if found is None:
                break
            following = order[-1] + 1 if order else 0  # preferred among features with the same bits
            order.append(following if following in found else found[0])
        else:
            return order
    return None


def _order_by_length(
    heads: np.ndarray,
    features: np.ndarray,
    factors: Sequence[float],
    parts: Iterable[tuple[int, int]],
) -> list[int] | None:
    """Return the index of each feature of heads in features (B, T, width), if they are contiguous
    in a part.
    """
    batch_size, num_heads, num_tokens, head_dim = heads.shape
    width, lengths = num_heads * head_dim, np.linalg.norm(heads, axis=-1)
    for first in (first for begin, end in parts for first in range(begin, end - width + 1, width)):
        split = features[..., first : first + width].reshape(
            batch_size, num_tokens, num_heads, head_dim
        )
        before = np.linalg.norm(split, axis=-1).transpose(0, 2, 1)
        if any(is_close(factor * before, lengths) for factor in factors):
            return list(range(first, first + width))
    return None


def tokens_of(x: np.ndarray, batch_size: int, num_tokens: int) -> np.ndarray | None:
    """Return tokens or heads of a submodule's input or output as (B, T, features); None if they are
    neither.
    """
    if x.ndim == 4 and x.shape[0] == batch_size and num_tokens in x.shape[1:3]:
        x = x if x.shape[1] == num_tokens else x.transpose(0, 2, 1, 3)
        return x.reshape(batch_size, num_tokens, -1)
    if (
        x.ndim == 3
        and x.shape[:2] != (batch_size, num_tokens)
        and len(x) == batch_size * num_tokens
    ):
        return x.reshape(batch_size, num_tokens, -1)
    is_flat = x.ndim > 1 and x.size == batch_size * num_tokens * x.shape[-1]
    return x.reshape(batch_size, num_tokens, -1) if is_flat else None


def features_of(heads: np.ndarray) -> np.ndarray:
    """Return heads (B, heads, T, H) as tokens (B * T, heads * H)."""
    return heads.transpose(0, 2, 1, 3).reshape(heads.shape[0] * heads.shape[2], -1)


def flat(x: np.ndarray) -> np.ndarray:
    """Return tokens (B, T, features) as (B * T, features)."""
    return x.reshape(-1, x.shape[-1])


def columns_of(features: np.ndarray) -> Iterator[bytes]:
    """Yield the bits of each feature over all tokens, which identify it."""
    return (column.tobytes() for column in np.ascontiguousarray(features.T))


CLOSE = 3e-5
"""Largest error of a recomputed value, relative to its largest output, in float32."""


def is_close(made: np.ndarray, seen: np.ndarray) -> bool:
    """Return whether recomputed and observed values agree up to rounding."""
    return made.shape == seen.shape and bool(
        np.abs(made - seen).max() <= CLOSE * np.abs(seen).max()
    )
