"""The temperature of queries: what they are multiplied by, by their positions, so that long contexts stay sharp."""

from __future__ import annotations

from dataclasses import dataclass

from mha_spec.record import Record
from mha_spec.refusal import WrongType
from mha_spec.rules import as_count, as_factor


@dataclass(frozen=True, repr=False)
class Temperature(Record):
    """Queries, rotated where there is RoPE, times 1 + scale * ln(1 + floor((position + first_position) / length)).

    Attributes:
        length: tokens after which the factor grows, and so on: that of the contexts of training.
        scale: of the logarithm.
        first_position: what the first token counts as: 1 in Llama 4, 0 in Ministral 3.

    Raises:
        TypeError: if length or first_position is not an integer, or scale not a number.
        ValueError: if length is below 1, first_position below 0, or scale not positive and finite.

    Source: Scalable-Softmax, arXiv:2501.19399, as Llama 4 has it.
    """

    length: int
    scale: float = 0.1
    first_position: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", as_count("length", self.length))
        object.__setattr__(self, "scale", as_factor("scale", self.scale))
        object.__setattr__(self, "first_position", as_count("first_position", self.first_position, 0))


def check_temperature(temperature: object) -> None:
    """Refuse what is not a `Temperature`.

    Raises:
        TypeError: if it is not one.
    """
    if not isinstance(temperature, Temperature):
        raise WrongType("temperature", "be a Temperature", temperature=temperature)
