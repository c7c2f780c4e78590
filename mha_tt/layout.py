"""Layout on the device: order and padding of the features of heads, and the resulting shapes."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import ttnn

from mha_spec import AttentionSpec, InputTypeError, Rope
from mha_spec.score_weights import score_axes

TILE = 32
"""Rows and columns of a tile, the unit of storage and computation."""

TILE_NBYTES = {ttnn.float32: 4096, ttnn.bfloat16: 2048, ttnn.bfloat8_b: 1088}
"""Bytes per tile: bfloat8_b has one byte per element, and one per 16 elements that share an
exponent.
"""

PADDED_INPUTS = {"out_proj": "out_proj", "kv_b_proj": "kv_a_norm"}
"""Projections with padded input, and the name whose features this input has."""


def round_up(count: int, multiple: int = TILE) -> int:
    """Return the smallest multiple that is at least `count`."""
    return -(-count // multiple) * multiple


def largest_divisor(count: int, most: int) -> int:
    """Return the largest divisor of `count` up to `most`."""
    return next(divisor for divisor in range(min(count, most), 0, -1) if count % divisor == 0)


def padded_head_dim(head_dim: int, *, rope: bool = False) -> int:
    """Return the features of a head on the device: whole tiles, and with RoPE two halves of whole
    tiles.
    """
    if rope:
        return 2 * round_up(-(-head_dim // 2))
    return round_up(head_dim)


def feature_indices(head_dim: int, *, rope: Rope | None = None) -> np.ndarray:
    """Return the indices of the features of a head within the padded head, (H,); the others are
    zeros.

    With RoPE the first features of all pairs start at a tile and the second ones, in the same
    order, at another, so that pairs are split between tiles, whichever features form them.
    Unrotated features follow. Queries and keys have the same order, so scores do not change.

    Raises:
        TypeError: if rope is not a `Rope`: the order depends on its pairs.
        ValueError: if heads of this width cannot be rotated.
    """
    if rope is None:
        return np.arange(head_dim)
    if not isinstance(rope, Rope):
        raise InputTypeError("rope", "be a Rope or None", rope=rope)
    first, second = rope.pair_features(head_dim)
    unrotated = np.delete(np.arange(head_dim), rope.rotated_features(head_dim))
    left, right = np.array_split(unrotated, 2)
    second_half = padded_head_dim(head_dim, rope=True) // 2
    indices = np.empty(head_dim, np.int64)
    indices[np.concatenate([first, left])] = np.arange(len(first) + len(left))
    indices[np.concatenate([second, right])] = second_half + np.arange(len(second) + len(right))
    return indices


def feature_indices_of(part: str, spec: AttentionSpec) -> np.ndarray:
    """Return the indices of the features of a head in a projection or norm of that name: see
    `feature_indices`.

    Values and the context have the layout of queries and keys if they have equally many features,
    because operations of the framework need heads of one width, and their own otherwise. With
    latents a head consists of blocks, each of whole tiles, and a latent is a separate head.
    """
    blocks = _blocks(part, spec)
    begins = np.cumsum([0, *(block.padded for block in blocks[:-1])])
    return np.concatenate(
        [begin + block.indices for begin, block in zip(begins, blocks, strict=True)]
    )


def feature_indices_in(part: str, width: int, spec: AttentionSpec) -> np.ndarray:
    """Return the indices of features in one padded head, or in several concatenated ones."""
    padded = padded_features(part, spec)
    begins = padded * np.arange(width // padded)[:, None]
    return (begins + feature_indices_of(part, spec)).reshape(-1)


@cache
def padded_features(part: str, spec: AttentionSpec) -> int:
    """Return the features of a head on the device in a projection or norm of that name."""
    return sum(block.padded for block in _blocks(part, spec))


@cache
def padded_width(part: str, spec: AttentionSpec) -> int:
    """Return the width of all padded heads in the output of a projection, or in its input if that
    is padded.
    """
    if part.startswith(("q_a_", "kv_a_")):
        num_heads = 1  # a latent, which all heads share
    elif part.startswith(("k_", "v_")):
        num_heads = spec.num_kv_heads
    else:
        num_heads = spec.num_heads
    return num_heads * padded_features(part, spec)


class _Block(NamedTuple):
    """Features of a head that are padded together: their indices in the block, and its width."""

    indices: np.ndarray
    padded: int


def _blocks(part: str, spec: AttentionSpec) -> list[_Block]:
    """Return the blocks of a head in a projection or norm of that name."""
    latent = spec.latent
    values = _block(spec.value_head_dim)
    is_of_q_or_k = part.startswith(("q_", "k_"))
    if latent is None:
        if is_of_q_or_k or spec.value_head_dim == spec.head_dim:
            return [_block(spec.head_dim, spec.rope)]
        return [values]
    # Not features of heads: ttnn supports any width.
    if part.startswith("q_a_") and latent.q_rank is not None:
        return [_Block(np.arange(latent.q_rank), latent.q_rank)]
    unshared = _block(spec.head_dim - latent.rope_dim)
    compressed = _block(latent.kv_rank)
    # Equally wide without RoPE, so that the width of cached vectors depends on kv_rank and rope_dim
    # only.
    shared = _Block(
        feature_indices(latent.rope_dim, rope=spec.rope),
        padded_head_dim(latent.rope_dim, rope=True),
    )
    blocks = {
        "kv_a_proj": [compressed, shared],
        "kv_a_norm": [compressed],
        "kv_b_proj": [unshared, values],
    }
    if is_of_q_or_k:
        return [unshared, shared]
    return blocks.get(part, [values])


def _block(features: int, rope: Rope | None = None) -> _Block:
    return _Block(
        feature_indices(features, rope=rope), padded_head_dim(features, rope=rope is not None)
    )


def has_heads(projection: str, spec: AttentionSpec) -> bool:
    """Return whether the output of a projection consists of heads."""
    is_one_a_head = projection == "gate_proj" and spec.gate is not None and spec.gate.per_head
    return projection != "out_proj" and not is_one_a_head


def pad_heads(rows: np.ndarray, part: str, spec: AttentionSpec) -> np.ndarray:
    """Pad heads with zeros: (heads * H, …) -> (heads * P, …)."""
    indices = feature_indices_of(part, spec)
    heads = rows.reshape(-1, len(indices), *rows.shape[1:])
    padded = np.zeros((len(heads), padded_features(part, spec), *rows.shape[1:]), rows.dtype)
    padded[:, indices] = heads
    return padded.reshape(-1, *rows.shape[1:])


def real_heads(rows: np.ndarray, part: str, spec: AttentionSpec) -> np.ndarray:
    """Invert `pad_heads`: (heads * P, …) -> (heads * H, …)."""
    padded = rows.reshape(-1, padded_features(part, spec), *rows.shape[1:])
    heads = padded[:, feature_indices_of(part, spec)]
    return heads.reshape(-1, *rows.shape[1:])


def parameter_shape(name: str, spec: AttentionSpec) -> tuple[int, ...]:
    """Return the shape on the device of a parameter of a norm or of scores."""
    part = name.partition(".")[0]
    shape = spec.parameters[name]
    if name in spec.score_shapes:
        return score_weight_shape(name, shape, padded_features("q_proj", spec))
    num_heads = shape[-1] // len(feature_indices_of(part, spec))
    return norm_parameter_shape((*shape[:-1], num_heads * padded_features(part, spec)))


def score_weight_shape(name: str, shape: tuple[int, ...], num_features: int) -> tuple[int, ...]:
    """Return the shape on the device of a weight that changes scores, for heads of this width
    there.

    It is (1, heads, 1, C or E), or (1, heads, C or E, features) for vectors of features; see
    `mha_spec.score_weights` for the letters. The size of an axis that the weight lacks is 1.
    """
    sizes = dict(zip(score_axes(name, shape), shape, strict=True))
    num_heads = sizes.get("N", 1)
    num_others = sizes.get("C", sizes.get("E", 1))
    if "H" in sizes:
        return (1, num_heads, num_others, num_features)
    return (1, num_heads, 1, num_others)


def weight_dtype(name: str, dtype: ttnn.DataType, spec: AttentionSpec) -> ttnn.DataType:
    """Return the dtype of a weight on the device in a layer with weights of this dtype.

    A block format rounds a row by its largest element: only matrices have it.
    """
    is_matrix = name.endswith(".weight") and name not in spec.parameters
    if dtype == ttnn.bfloat8_b and not is_matrix:
        return ttnn.bfloat16
    return dtype


def norm_parameter_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape on the device of a norm's parameter (H,), (heads, H) or (width,), ready to
    broadcast.
    """
    if len(shape) == 2:
        return (1, shape[0], 1, shape[1])
    return (1, *shape)
