"""Scores of one call: scale, soft cap and biases before the softmax, and dropout after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import ttnn
from jaxtyping import Bool, Float
from ttnn import Tensor

from mha_spec import AttentionSpec
from mha_spec.features.relative_bias import check_grid
from mha_spec.heads import BareHeads
from mha_spec.rules import as_rate, check_broadcasts
from mha_tt.arrays import as_dtype
from mha_tt.checks import check_bias, check_score_weights
from mha_tt.device import upload
from mha_tt.masks import MASKED, block_of

LOWEST_BIAS = MASKED / 2
"""Lower bound of biases: a key with a bias of finfo.min must still weigh more than a masked key."""


@dataclass(frozen=True, eq=False)  # comparing arrays yields no single truth value
class Scores:
    """Changes to the logits of one call, and dropout of its attention weights.

    Attributes:
        spec: layer whose scale, soft cap, biases and products by distance apply; or `BareHeads` for
            heads without a layer.
        bias: added to the scores; broadcasts to (B, N, T, S). In a NumPy array -inf masks a key; a
            tensor on the device is not read: its -inf counts as `LOWEST_BIAS`.
        learned: weights of the layer that change scores, by name: `sinks` (1, N, 1, 1), one logit
            without a value per head; `relative_bias` (1, N, 1, num_buckets); `relative_keys` and
            `relative_queries`, vectors of distances for queries and for keys, (1, 1, num_buckets,
            H), or (1, N, num_buckets, H) for each head. Exactly those that the spec has.
        dropout: probability of dropping an attention weight.
        dropout_keep: True for attention weights to keep, instead of a random draw; broadcasts to
            (B, N, T, S).
        seed: seed of the draw.
    """

    spec: AttentionSpec | BareHeads
    bias: Float[np.ndarray | Tensor, "*#scores"] | None = None
    learned: Mapping[str, Float[Tensor, "..."]] = field(default_factory=dict)
    dropout: float = 0.0
    dropout_keep: Bool[np.ndarray, "*#scores"] | None = None
    seed: int = 0

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

    def block(self, rows: slice, keys: slice) -> Scores:
        """Return the scores of a block of queries and keys. Cached calls have no `dropout_keep`."""
        if self.bias is None:
            return self
        return replace(self, bias=block_of(self.bias, rows, keys))


def bias_on_device(
    bias: np.ndarray | Tensor, device: ttnn.MeshDevice, dtype: ttnn.DataType
) -> Tensor:
    """Return the bias with four axes, in a dtype, bounded by `LOWEST_BIAS`; the mask represents
    -inf.
    """
    shape = (1,) * (4 - len(bias.shape)) + tuple(bias.shape)
    if isinstance(bias, np.ndarray):
        return upload(
            np.maximum(bias.astype(np.float64), LOWEST_BIAS).reshape(shape),
            device=device,
            dtype=dtype,
        )
    if len(bias.shape) != 4:
        bias = ttnn.reshape(bias, shape)
    return ttnn.maximum(as_dtype(bias, dtype), LOWEST_BIAS)
