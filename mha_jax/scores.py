"""Scores of one call: scale, soft cap and biases before the softmax, and dropout after it."""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Bool, Float

from mha_jax.checks import (
    check_bias,
    check_grid,
    check_keep,
    check_relative_bias,
    check_relative_products,
    check_sinks,
)
from mha_spec import AttentionSpec, GridBias, Refusal, RelativeBias, RelativeProducts
from mha_spec.rules import as_rate

LEARNED = ("sinks", "relative_bias", "relative_keys", "relative_queries")
"""Weights of a layer for its scores."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # comparing arrays yields no single truth value
class Scores:
    """Changes to the logits of one call, and dropout of its attention weights.

    Attributes:
        spec: layer whose scale, soft cap, biases and products by distance apply; default: only the scale 1 / sqrt(H).
        bias: added to the scores; broadcasts to (B, N, T, S). -inf masks a key.
        sinks: attention sinks, one logit without a value per head, (N,).
        relative_bias: table of the relative bias, (num_buckets, N).
        dropout: probability of dropping an attention weight.
        dropout_keep: True for attention weights to keep, instead of a random draw; broadcasts to (B, N, T, S).
        dropout_rng: random key for the draw.
        relative_keys, relative_queries: learned vectors of distances for queries and for keys, (num_buckets, H), or
            (num_buckets, N, H) for each head.
    """

    spec: AttentionSpec | None = field(default=None, metadata={"static": True})
    bias: Float[Array, "..."] | None = None
    sinks: Float[Array, " N"] | None = None
    relative_bias: Float[Array, "buckets N"] | None = None
    dropout: float = field(default=0.0, metadata={"static": True})
    dropout_keep: Bool[Array, "..."] | None = None
    dropout_rng: jax.Array | None = None
    relative_keys: Float[Array, "..."] | None = None
    relative_queries: Float[Array, "..."] | None = None

    def check_arguments(self, scores_shape: tuple[int, ...], query: Array) -> None:
        """Refuse what a call of a layer brings and does not fit the scores (B, N, T, S) or their queries."""
        if self.bias is not None:
            check_bias(self.bias, scores_shape, query)
        if self.dropout_keep is not None:
            check_keep(self.dropout_keep, scores_shape)
        if isinstance(self.buckets, GridBias):
            check_grid(self.buckets, scores_shape)

    def check(self, scores_shape: tuple[int, ...], query: Array) -> None:
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
        return self.slopes is not None or self.buckets is not None or self.products is not None

    @property
    def has_dropout(self) -> bool:
        """True if attention weights are dropped, at random or by `dropout_keep`."""
        return self.dropout > 0.0 or self.dropout_keep is not None
