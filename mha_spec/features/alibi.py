"""Attention with linear biases (ALiBi)."""

from __future__ import annotations

from dataclasses import dataclass

from mha_spec.record import Record
from mha_spec.rules import as_boolean, as_factor


@dataclass(frozen=True, repr=False)
class Alibi(Record):
    """Attention with linear biases: subtract slope * distance from each score, with one slope per
    query head.

    If the number of heads N is a power of two, head n (from 1) has the slope 2 ** (-max_bias * n /
    N). Otherwise, with P the largest power of two below N, the first P heads have the slopes for P
    heads. The rest have every other slope for 2 P heads.

    Attributes:
        max_bias: the exponent of the smallest slope.
        scaled: multiply slopes by the scale of the scores, as in Falcon.

    Raises:
        TypeError: if max_bias is not a number, or scaled not a boolean.
        ValueError: if max_bias is not positive and finite.

    Source: Train Short, Test Long, arXiv:2108.12409, section 3.
    """

    max_bias: float = 8.0
    scaled: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_bias", as_factor("max_bias", self.max_bias))
        object.__setattr__(self, "scaled", as_boolean("scaled", self.scaled))

    def slopes(self, num_heads: int) -> tuple[float, ...]:
        """Return the slope of each head, before `scaled` applies."""
        power = 1 << (num_heads.bit_length() - 1)
        exponents = [n / power for n in range(1, power + 1)]
        exponents += [n / (2 * power) for n in range(1, 2 * power, 2)]
        return tuple(2.0 ** (-self.max_bias * exponent) for exponent in exponents[:num_heads])
