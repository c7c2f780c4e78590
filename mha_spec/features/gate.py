"""Output gates."""

from __future__ import annotations

from dataclasses import dataclass

from mha_spec.record import Record
from mha_spec.rules import as_boolean


@dataclass(frozen=True, repr=False)
class Gate(Record):
    """Gate of the context: context * sigmoid(g), where g is gate_proj of the query input.

    Checkpoints that pack it with the queries, head by head, contain the same two projections.

    Attributes:
        per_head: g has one number per head instead of one per feature.
        bias: gate_proj has a bias.

    Raises:
        TypeError: if a field is not a boolean.

    Source: Gated Attention for Large Language Models, arXiv:2505.06708.
    """

    per_head: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        for name in ("per_head", "bias"):
            object.__setattr__(self, name, as_boolean(name, getattr(self, name)))
