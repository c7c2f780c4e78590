"""Split heads that belong to no layer: what scores need to know of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from mha_spec.features.relative_bias import GridBias, RelativeBias
    from mha_spec.features.relative_products import RelativeProducts, SinusoidProducts
    from mha_spec.span import Span


@dataclass(frozen=True)
class BareHeads:
    """Heads without an `AttentionSpec`: the formula of the paper, of which only the width is
    unknown.

    It has the attributes of an `AttentionSpec` that scores depend on. It isn't one, because a
    compiled graph may have symbolic widths, of which it cannot build a specification.

    Attributes:
        head_dim: width of queries and keys, H.
    """

    head_dim: int

    soft_cap: ClassVar[None] = None
    alibi_slopes: ClassVar[tuple[float, ...] | None] = None
    relative_bias: ClassVar[RelativeBias | GridBias | None] = None
    relative_products: ClassVar[RelativeProducts | SinusoidProducts | None] = None
    span: ClassVar[Span | None] = None
    latent: ClassVar[None] = None
    has_distance_bias: ClassVar[bool] = False
    has_positions: ClassVar[bool] = False
    score_shapes: ClassVar[dict[str, tuple[int, ...]]] = {}

    @property
    def score_scale(self) -> float:
        """Factor of the dot products of queries and keys."""
        return self.head_dim**-0.5
