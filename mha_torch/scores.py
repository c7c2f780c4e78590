"""Scores of one call: scale, soft cap and biases before the softmax, and dropout after it."""

from dataclasses import dataclass, replace

from jaxtyping import Bool, Float
from torch import Tensor

from mha_spec import AttentionSpec, GridBias, Refusal, RelativeBias, RelativeProducts
from mha_spec.rules import as_rate
from mha_torch.checks import (
    check_bias,
    check_device,
    check_grid,
    check_keep,
    check_relative_bias,
    check_relative_products,
    check_sinks,
)
from mha_torch.masks import block_of

LEARNED = ("sinks", "relative_bias", "relative_keys", "relative_queries")
"""Weights of a layer for its scores."""


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
        relative_keys, relative_queries: learned vectors of distances for queries and for keys, (num_buckets, H), or
            (num_buckets, N, H) for each head.
    """

    spec: AttentionSpec | None = None
    bias: Float[Tensor, "..."] | None = None
    sinks: Float[Tensor, " N"] | None = None
    relative_bias: Float[Tensor, "buckets N"] | None = None
    dropout: float = 0.0
    dropout_keep: Bool[Tensor, "..."] | None = None
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
        for name in LEARNED:
            if (learned := getattr(self, name)) is not None:
                check_device(name, learned, query.device, "query")
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

    def block(self, rows: slice, keys: slice) -> "Scores":
        """Return the scores of a block of queries and keys."""
        if self.bias is None and self.dropout_keep is None:
            return self
        bias, keep = (block_of(x, rows, keys) for x in (self.bias, self.dropout_keep))
        return replace(self, bias=bias, dropout_keep=keep)
