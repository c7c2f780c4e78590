"""Scores of one call: scale, soft cap and biases before the softmax, and dropout after it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxtyping import Bool, Float
from torch import Tensor

from mha_spec import AttentionSpec
from mha_spec.features.relative_bias import check_grid
from mha_spec.heads import BareHeads
from mha_spec.rules import as_rate, check_broadcasts
from mha_torch.checks import check_bias, check_score_weights
from mha_torch.masks import block_of


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
    """

    spec: AttentionSpec | BareHeads
    bias: Float[Tensor, "*#scores"] | None = None
    learned: Mapping[str, Float[Tensor, "..."]] = field(default_factory=dict)
    dropout: float = 0.0
    dropout_keep: Bool[Tensor, "*#scores"] | None = None

    def check_arguments(self, scores_shape: tuple[int, ...], query: Tensor) -> None:
        """Reject arguments of a call that do not fit the scores (B, N, T, S) or their queries."""
        if self.bias is not None:
            check_bias(self.bias, scores_shape, query)
        if self.dropout_keep is not None:
            check_broadcasts("dropout_keep", tuple(self.dropout_keep.shape), scores_shape)
        if self.spec.relative_bias is not None:
            check_grid(self.spec.relative_bias, scores_shape)

    def check(self, scores_shape: tuple[int, ...], query: Tensor) -> None:
        """Reject settings that do not fit the scores (B, N, T, S), their queries or the layer."""
        check_score_weights(self.learned, self.spec.score_shapes, query)
        self.check_arguments(scores_shape, query)
        as_rate("dropout", self.dropout)

    def block(self, rows: slice, keys: slice) -> "Scores":
        """Return the scores of a block of queries and keys."""
        if self.bias is None and self.dropout_keep is None:
            return self
        bias, keep = (block_of(x, rows, keys) for x in (self.bias, self.dropout_keep))
        return replace(self, bias=bias, dropout_keep=keep)
