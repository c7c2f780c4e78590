"""Scores of one call: scale, soft cap and biases before the softmax, and dropout after it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
from jaxtyping import Bool, Float

from mha_jax.arrays import Array
from mha_jax.checks import check_bias, check_score_weights
from mha_spec import AttentionSpec
from mha_spec.features.relative_bias import check_grid
from mha_spec.heads import BareHeads
from mha_spec.rules import as_rate, check_broadcasts


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # comparing arrays yields no single truth value
class Scores:
    """Changes to the logits of one call, and dropout of its attention weights.

    Attributes:
        spec: layer whose scale, soft cap, biases and products by distance apply; or `BareHeads` for
            heads without a layer.
        bias: added to the scores; broadcasts to (B, N, T, S). -inf masks a key.
        learned: weights of the layer that change scores, by name: `sinks` (N,), one logit per head,
            without a value; `relative_bias` (num_buckets, N); `relative_keys` and
            `relative_queries`, vectors of distances for queries and for keys, (num_buckets, H), or
            (num_buckets, N, H) for each head. Exactly those that the spec has.
        dropout: probability of dropping an attention weight.
        dropout_keep: True for attention weights to keep, instead of a random draw; broadcasts to
            (B, N, T, S).
        dropout_rng: random key for the draw.
    """

    spec: AttentionSpec | BareHeads = field(metadata={"static": True})
    bias: Float[Array, "*#scores"] | None = None
    learned: Mapping[str, Float[Array, "..."]] = field(default_factory=dict)
    dropout: float = field(default=0.0, metadata={"static": True})
    dropout_keep: Bool[Array, "*#scores"] | None = None
    dropout_rng: jax.Array | None = None

    def check_arguments(self, scores_shape: tuple[int, ...], query: Array) -> None:
        """Reject arguments of a call that do not fit the scores (B, N, T, S) or their queries."""
        if self.bias is not None:
            check_bias(self.bias, scores_shape, query)
        if self.dropout_keep is not None:
            check_broadcasts("dropout_keep", self.dropout_keep.shape, scores_shape)
        if self.spec.relative_bias is not None:
            check_grid(self.spec.relative_bias, scores_shape)

    def check(self, scores_shape: tuple[int, ...], query: Array) -> None:
        """Reject settings that do not fit the scores (B, N, T, S), their queries or the layer."""
        check_score_weights(self.learned, self.spec.score_shapes)
        self.check_arguments(scores_shape, query)
        as_rate("dropout", self.dropout)

    @property
    def has_dropout(self) -> bool:
        """True if attention weights are dropped, at random or by `dropout_keep`."""
        return self.dropout > 0.0 or self.dropout_keep is not None
