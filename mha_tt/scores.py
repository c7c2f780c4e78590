"""Scores of one call: scale, soft cap and biases before the softmax, and dropout after it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import ttnn
from jaxtyping import Bool, Float
from ttnn import Tensor

from mha_spec import AttentionSpec, GridBias, Refusal, RelativeBias, RelativeProducts
from mha_spec.rules import as_rate
from mha_tt.arrays import as_dtype
from mha_tt.checks import (
    check_bias,
    check_grid,
    check_keep,
    check_relative_bias,
    check_relative_products,
    check_sinks,
)
from mha_tt.device import upload
from mha_tt.masks import block_of

LOWEST_BIAS = -5e8
"""Lower bound of biases, so that keys with a bias of finfo.min still weigh more than masked ones."""

LEARNED = ("sinks", "relative_bias", "relative_keys", "relative_queries")
"""Weights of a layer for its scores."""


@dataclass(frozen=True, eq=False)  # comparing arrays yields no single truth value
class Scores:
    """Changes to the logits of one call, and dropout of its attention weights.

    Attributes:
        spec: layer whose scale, soft cap, biases and products by distance apply; default: only the scale 1 / sqrt(H).
        bias: added to the scores; broadcasts to (B, N, T, S). -inf masks a key; on the device it is not read.
        sinks: attention sinks, one logit without a value per head, (1, N, 1, 1).
        relative_bias: table of the relative bias, (1, N, 1, num_buckets).
        dropout: probability of dropping an attention weight.
        dropout_keep: True for attention weights to keep, instead of a random draw; broadcasts to (B, N, T, S).
        seed: seed of the draw.
        relative_keys, relative_queries: learned vectors of distances for queries and for keys, (1, 1 or N, num_buckets,
            H).
    """

    spec: AttentionSpec | None = None
    bias: Float[np.ndarray, "..."] | Tensor | None = None
    sinks: Float[Tensor, "1 N 1 1"] | None = None
    relative_bias: Float[Tensor, "1 N 1 buckets"] | None = None
    dropout: float = 0.0
    dropout_keep: Bool[np.ndarray, "..."] | None = None
    seed: int = 0
    relative_keys: Float[Tensor, "..."] | None = None
    relative_queries: Float[Tensor, "..."] | None = None

    def check_arguments(self, scores_shape: tuple[int, ...], query: Tensor) -> None:
        """Refuse what a call of a layer brings and does not fit the scores (B, N, T, S) or their queries."""
        if self.bias is not None:
            check_bias(self.bias, scores_shape, query)
        if self.dropout_keep is not None:
            check_keep(self.dropout_keep, scores_shape)
        if isinstance(self.buckets, GridBias):
            check_grid(self.buckets, scores_shape)

    def check(self, scores_shape: tuple[int, ...], query: Tensor) -> None:
        """Refuse settings that do not fit the scores (B, N, T, S), their queries or the layer."""
        if self.spec is not None and self.spec.sinks != (self.sinks is not None):
            raise Refusal("sinks", "be given where the spec has them", {"spec.sinks": self.spec.sinks})
        check_relative_bias(self.relative_bias, self.buckets, scores_shape)
        check_bias(self.bias, scores_shape, query)
        check_relative_products(self.relative_keys, self.relative_queries, self.products, query)
        check_sinks(self.sinks, scores_shape[1])
        as_rate("dropout", self.dropout)
        check_keep(self.dropout_keep, scores_shape)

    @property
    def scale(self) -> float | None:
        """Factor of the dot products of queries and keys; None for 1 / sqrt(H)."""
        return None if self.spec is None else self.spec.score_scale

    @property
    def soft_cap(self) -> float | None:
        """Bound of the scores, or None."""
        return None if self.spec is None else self.spec.soft_cap

    @property
    def slopes(self) -> tuple[float, ...] | None:
        """ALiBi's slope of each head, or None."""
        return None if self.spec is None else self.spec.alibi_slopes

    @property
    def buckets(self) -> RelativeBias | GridBias | None:
        """Buckets of the relative bias, or None."""
        return None if self.spec is None else self.spec.relative_bias

    @property
    def products(self) -> RelativeProducts | None:
        """Products with vectors of distances that scores gain, or None."""
        return None if self.spec is None else self.spec.relative_products

    @property
    def has_distances(self) -> bool:
        """True if scores depend on the distance of query and key."""
        return self.spec is not None and self.spec.has_distance_bias

    def block(self, rows: slice, keys: slice) -> Scores:
        """Return the scores of a block of queries and keys."""
        return self if self.bias is None else replace(self, bias=block_of(self.bias, rows, keys))


def bias_on_device(bias: np.ndarray | Tensor, device: ttnn.MeshDevice, dtype: ttnn.DataType) -> Tensor:
    """Return the bias with four axes, in a dtype, bounded by `LOWEST_BIAS`; the mask represents -inf."""
    shape = (1,) * (4 - len(bias.shape)) + tuple(bias.shape)
    if isinstance(bias, np.ndarray):
        return upload(np.maximum(bias.astype(np.float64), LOWEST_BIAS).reshape(shape), device=device, dtype=dtype)
    bias = bias if len(bias.shape) == 4 else ttnn.reshape(bias, shape)
    return ttnn.maximum(as_dtype(bias, dtype), LOWEST_BIAS)
