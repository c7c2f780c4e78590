"""Records: a place, a law, what was found; and the arrays that are looked at, with what may be known beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.core.problem import Problem
from parity.core.records import JsonRecord
from parity.core.stages import Stage
from parity.diagnosis.mistakes.record import Change, Override

LEAST_GAIN = 0.5
"""The share of the error, root mean square, that a law may leave. A law with half as many numbers as there are elements
takes 0.29 of any error that is just beyond the budget, and so must not be told for that."""


@dataclass(frozen=True)
class Place:
    """The part of a stage that is beyond its budget.

    Attributes:
        words: the same, as a person would say it.
        sequences, heads, positions, keys, features: which of each are wrong; None where the stage has no such axis. The
            positions are those of query tokens where the stage has them, else of key tokens or slots.
        cells: what the wrong cells of scores, attention weights or a mask have in common: `hidden`, `empty rows`,
            `diagonal`, `after`, `before`, `rows`; nothing where they are in no other than those above.
        wrong, size: number of elements beyond the budget, and of all.
    """

    words: str
    sequences: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    positions: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    features: tuple[int, ...] | None = None
    cells: str = ""
    wrong: int = 0
    size: int = 0


@dataclass(frozen=True)
class Law:
    """What was done to the expected values in a place: applied to them, it leaves nothing but rounding.

    Attributes:
        name: of its kind, such as `factor`.
        words: the same for a person, with the numbers.
        numbers: what was found, by name, as JSON takes it.
        parameters: how many numbers were fitted: the fewer, the simpler.
        pages: of parity/bugs that say more: those of its families; none of a law that has no family.
        fixes: what to do about it.
        change: makes it in the reference, in every call; None if it is a law of this stage alone. JSON leaves it out.
    """

    name: str
    words: str
    numbers: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    pages: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    change: Change | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, eq=False)
class OtherSpec:
    """The layer of another specification, as a change of the reference."""

    spec: AttentionSpec

    @property
    def in_reference(self) -> Mapping[str, Override]:
        """No overrides."""
        return {}


@dataclass(frozen=True)
class Findings(JsonRecord):
    """What is wrong with a stage.

    Attributes:
        place: where.
        found: the laws that hold there, each by itself, the simplest first.
        signs: what is true of the actual values and should not be. It explains nothing by itself.
    """

    place: Place
    found: tuple[Law, ...] = ()
    signs: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The place in words."""
        return self.place.words

    @property
    def laws(self) -> tuple[str, ...]:
        """The laws in words, the simplest first."""
        return tuple(law.words for law in self.found)

    def plain(self) -> Findings:
        """The same as plain data, without what makes the laws in the reference."""
        return replace(self, found=tuple(replace(law, change=None) for law in self.found))


@dataclass(frozen=True)
class Seen:
    """A stage as it is and as it should be.

    Attributes:
        stage: which.
        letters: of its axes.
        actual, expected: float64.
        allowed: errors by norm, `rms` and `max`.
        errors: absolute; infinite where one is NaN and the other is not.
        bad: which elements are wrong.
        box: which indices of each axis have wrong elements.
        part: the elements of the place that was told: those of the box, or the cells in it that are wrong.
        place: that place.
        hidden: which cells the mask hides, (B, N, T, S), where that is known.
        problem: what was computed, where that is known.
        others: other stages by name, where some are known.
        kept: mantissa bits of the dtype that the actual values were given in, without the leading 1.
    """

    stage: Stage
    letters: tuple[str, ...]
    actual: np.ndarray
    expected: np.ndarray
    allowed: Mapping[str, float]
    errors: np.ndarray
    bad: np.ndarray
    box: tuple[np.ndarray, ...]
    part: np.ndarray
    place: Place
    hidden: np.ndarray | None = None
    problem: Problem | None = None
    others: Mapping[str, np.ndarray] = field(default_factory=dict)
    kept: int = 23

    @cached_property
    def count(self) -> int:
        """Number of elements in the part."""
        return int(np.count_nonzero(self.part))

    @cached_property
    def scale(self) -> float:
        """The largest expected value, in size."""
        return float(np.abs(self.expected).max(initial=0.0, where=np.isfinite(self.expected)))

    @cached_property
    def precision(self) -> float:
        """What is allowed, as a share of the largest expected value."""
        return self.allowed["max"] / self.scale if self.scale else 0.0

    @cached_property
    def usable(self) -> np.ndarray:
        """The elements of the part from which numbers can be taken: both values are finite."""
        return self.part & np.isfinite(self.actual) & np.isfinite(self.expected)

    @cached_property
    def known(self) -> tuple[np.ndarray, np.ndarray]:
        """The actual and the expected values of what is usable, 0 elsewhere."""
        return np.where(self.usable, self.actual, 0.0), np.where(self.usable, self.expected, 0.0)

    def axis(self, letters: str) -> int | None:
        """The first axis with one of these letters."""
        return next((axis for axis, letter in enumerate(self.letters) if letter in letters), None)

    def within(self, values: np.ndarray | float) -> np.ndarray:
        """The expected values, others in the part."""
        return np.where(self.part, values, self.expected)

    def in_slices(self, values: np.ndarray) -> np.ndarray:
        """The expected values, others in all of the wrong slices."""
        box = np.ix_(*self.box)
        found = self.expected.copy()
        found[box] = values[box]
        return found

    def is_enough(self, parameters: int) -> bool:
        """Whether the part has so many elements that a law with some fitted numbers says something about the rest."""
        spare = 1 if self.stage.is_exact else 3
        return self.count >= 2 * parameters and self.count - parameters >= spare

    def holds(self, candidate: np.ndarray, gain: np.ndarray | float = 1.0) -> bool:
        """Whether a law explains everything, what is not in its part, too.

        Args:
            candidate: the expected values, the law applied to them.
            gain: by how much the law multiplies rounding errors, broadcast to them.
        """
        step = max(1, self.expected.size // 512) | 1  # odd, so that it meets other features in every row
        some = slice(None, None, step)
        gain = np.broadcast_to(np.maximum(gain, 1.0), candidate.shape)
        if step > 1 and not self._fits(self.actual.ravel()[some], candidate.ravel()[some], gain.reshape(-1)[some]):
            return False
        return self._fits(self.actual, candidate, gain, whole=True)

    def _fits(self, actual: np.ndarray, candidate: np.ndarray, gain: np.ndarray, *, whole: bool = False) -> bool:
        with np.errstate(invalid="ignore"):
            left = np.abs(actual - candidate)
            left[(actual == candidate) | (np.isnan(actual) & np.isnan(candidate))] = 0.0
        if not np.isfinite(left).all():
            return False
        if not self.allowed["max"]:
            return not left.any()
        # A result has the rounding errors of what it was made of, and one of its own size.
        size = np.where(np.isfinite(candidate), np.abs(candidate), 0.0) / self.scale if self.scale else 0.0
        scaled = left / np.maximum(gain, size)
        if scaled.max(initial=0.0) > self.allowed["max"]:
            return False
        if not whole:
            return True
        rms = float(np.sqrt(np.mean(scaled**2)))
        before = float(np.sqrt(np.mean(self.errors**2)))
        return rms <= self.allowed["rms"] and float(np.sqrt(np.mean(left**2))) <= LEAST_GAIN * before
