"""Position-dependent temperature of queries, which keeps attention sharp in long contexts."""

from __future__ import annotations

from dataclasses import dataclass

from mha_spec.errors import InputTypeError
from mha_spec.record import Record
from mha_spec.rules import as_count, as_factor


@dataclass(frozen=True, repr=False)
class Temperature(Record):
    """Factor of queries, after RoPE: 1 + scale * ln(1 + floor((position + first_position) /
    length)).

    Attributes:
        length: number of tokens after which the factor grows each time: the context length of
            training.
        scale: factor of the logarithm.
        first_position: position of the first token: 1 in Llama 4, 0 in Ministral 3.

    Raises:
        TypeError: if length or first_position is not an integer, or scale not a number.
        ValueError: if length is below 1, first_position below 0, or scale not positive and finite.

    Source: Scalable-Softmax, arXiv:2501.19399, in the form of Llama 4.
    """

    length: int
    scale: float = 0.1
    first_position: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", as_count("length", self.length))
        object.__setattr__(self, "scale", as_factor("scale", self.scale))
        object.__setattr__(
            self, "first_position", as_count("first_position", self.first_position, 0)
        )


def check_temperature(temperature: object) -> None:
    """Reject anything but a `Temperature`.

    Raises:
        TypeError: if it is anything else.
    """
    if not isinstance(temperature, Temperature):
        raise InputTypeError("temperature", "be a Temperature", temperature=temperature)
