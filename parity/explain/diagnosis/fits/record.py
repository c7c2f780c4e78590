"""Records: a location, a description, and the values of a stage that differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs.families import Families, in_families
from parity.explain.diagnosis.bugs.record import Edit, pattern
from parity.measure.core.problem import Problem
from parity.measure.core.records import JsonRecord
from parity.measure.core.stages import Stage

LEAST_GAIN = 0.5
"""The share of the error, root mean square, that a pattern may leave. A pattern with half as many
parameters as elements removes all but 0.29 of any error just above the budget, so it must not be
reported for that.
"""


@dataclass(frozen=True)
class Location:
    """The part of a stage that exceeds its budget.

    Attributes:
        words: its description.
        sequences, heads, positions, keys, features: wrong indices; None if the stage has no such
            axis. Positions are positions of query tokens if the stage has them, else of key tokens
            or slots.
        cells: the common property of wrong cells of scores, attention weights or a mask: `hidden`,
            `empty rows`, `diagonal`, `after`, `before`, `rows`; empty if they have none.
        wrong, size: number of elements above the budget, and of all.
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
class Description(JsonRecord):
    """The description of a wrong stage.

    Attributes:
        location: where it is wrong.
        patterns: the edits that each explain it, the simplest first.
        signs: unexpected properties of the actual values, which explain nothing by themselves.
    """

    location: Location
    patterns: tuple[Edit, ...] = ()
    signs: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The description of the location."""
        return self.location.words

    @property
    def abouts(self) -> tuple[str, ...]:
        """The descriptions of the patterns, the simplest first."""
        return tuple(edit.about for edit in self.patterns)


@dataclass(frozen=True)
class Difference:
    """A stage that differs: its actual and its expected values, and where they differ.

    Attributes:
        stage: the stage.
        letters: letters of its axes.
        actual, expected: float64.
        allowed: errors by norm, `rms` and `max`.
        errors: absolute; infinite if one is NaN and the other is not.
        bad: wrong elements.
        box: indices of each axis with wrong elements.
        part: elements of the reported location: the elements of the box, or its wrong cells.
        location: that location.
        hidden: cells that the mask hides, (B, N, T, S), if known.
        problem: the case, weights and inputs, if known.
        other_stages: other known stages by name.
        mantissa_bits: mantissa bits of the dtype of the actual values, without the leading 1.
        unused: cells that are not compared, in which the actual values are the expected ones; None
            if there are none.
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
    location: Location
    hidden: np.ndarray | None = None
    problem: Problem | None = None
    other_stages: Mapping[str, np.ndarray] = field(default_factory=dict)
    mantissa_bits: int = 23
    unused: np.ndarray | None = None

    @cached_property
    def compared(self) -> np.ndarray:
        """The finite actual values that are compared."""
        is_finite = np.isfinite(self.actual)
        if self.unused is None:
            return is_finite
        return is_finite & ~self.unused

    @cached_property
    def count(self) -> int:
        """Number of elements in the part."""
        return int(np.count_nonzero(self.part))

    @cached_property
    def scale(self) -> float:
        """The largest absolute expected value."""
        return float(np.abs(self.expected).max(initial=0.0, where=np.isfinite(self.expected)))

    @cached_property
    def precision(self) -> float:
        """The tolerance, relative to the largest expected value."""
        if not self.scale:
            return 0.0
        return self.allowed["max"] / self.scale

    @cached_property
    def usable(self) -> np.ndarray:
        """The finite elements of the part, from which parameters can be fitted."""
        return self.part & np.isfinite(self.actual) & np.isfinite(self.expected)

    @cached_property
    def usable_values(self) -> tuple[np.ndarray, np.ndarray]:
        """The actual and the expected values of usable elements, 0 elsewhere."""
        return np.where(self.usable, self.actual, 0.0), np.where(self.usable, self.expected, 0.0)

    @property
    def has_several_positions(self) -> bool:
        """True if there are several positions: one does not distinguish frequencies from an
        offset.
        """
        if self.problem is None:
            return False
        return self.problem.case.positions(self.stage.step).shape[-1] > 1

    def pattern(
        self,
        name: str,
        about: str,
        fitted: Mapping[str, Any] | None = None,
        parameters: int = 0,
        *,
        families: Families = (),
        injected: Edit | None = None,
    ) -> Edit:
        """Return an edit that explains the stage.

        Args:
            name: name of its kind, such as `factor`.
            about: a description, with the values.
            fitted: the fitted values by name.
            parameters: how many they are.
            families: whose pages and fixes it has, if the problem is known.
            injected: the same change of the reference, in every call; None if the pattern concerns
                this stage alone.
        """
        edit = pattern(name, about, fitted, parameters, injected=injected)
        if self.problem is None:
            return edit
        return in_families(edit, self.problem.spec, families)

    def within(self, values: np.ndarray | float) -> np.ndarray:
        """Return the expected values, with others in the part."""
        return np.where(self.part, values, self.expected)

    def in_slices(self, values: np.ndarray) -> np.ndarray:
        """Return the expected values, with others in all wrong slices."""
        box = np.ix_(*self.box)
        mixed = self.expected.copy()
        mixed[box] = values[box]
        return mixed

    def is_enough(self, parameters: int) -> bool:
        """Return True if the part has enough elements to verify a pattern with some fitted
        parameters.
        """
        spare = 3
        if self.stage.is_exact:
            spare = 1
        return self.count >= 2 * parameters and self.count - parameters >= spare

    def is_explained_by(self, candidate: np.ndarray, gain: np.ndarray | float = 1.0) -> bool:
        """Return True if a pattern explains everything, also outside of its part.

        Args:
            candidate: the expected values after the pattern.
            gain: the factor by which the pattern multiplies rounding errors, broadcast to them.
        """
        if self.unused is not None:
            candidate = np.where(self.unused, self.actual, candidate)
        gain = np.broadcast_to(np.maximum(gain, 1.0), candidate.shape)
        # Few elements reject most patterns. An odd step takes other features of every row.
        step = max(1, self.expected.size // 512) | 1
        if step > 1:
            some = slice(None, None, step)
            some_gain = gain.reshape(-1)[some]
            if not self._fits(self.actual.ravel()[some], candidate.ravel()[some], some_gain):
                return False
        return self._fits(self.actual, candidate, gain, whole=True)

    def _fits(
        self, actual: np.ndarray, candidate: np.ndarray, gain: np.ndarray, *, whole: bool = False
    ) -> bool:
        with np.errstate(invalid="ignore"):
            left = np.abs(actual - candidate)
            left[(actual == candidate) | (np.isnan(actual) & np.isnan(candidate))] = 0.0
        if not np.isfinite(left).all():
            return False
        if not self.allowed["max"]:
            return not left.any()
        # A result has the rounding errors of its inputs, and one of its own size.
        if self.scale:
            size = np.where(np.isfinite(candidate), np.abs(candidate), 0.0)
            gain = np.maximum(gain, size / self.scale)
        scaled = left / gain
        if scaled.max(initial=0.0) > self.allowed["max"]:
            return False
        if not whole:
            return True
        if _rms(scaled) > self.allowed["rms"]:
            return False
        return _rms(left) <= LEAST_GAIN * _rms(self.errors)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))
