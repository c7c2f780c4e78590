"""The gate of a layer's output: what the context is multiplied by before it is projected."""

from __future__ import annotations

from dataclasses import dataclass

from mha_spec.record import Record
from mha_spec.rules import as_boolean


@dataclass(frozen=True, repr=False)
class Gate(Record):
    """context * sigmoid(g), where gate_proj gives g from the input of the queries.

    Checkpoints that pack it with the queries, head by head, hold the same two projections.

    Attributes:
        per_head: one number for each head; else one for each of its features.
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
