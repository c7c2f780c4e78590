"""Work that is counted instead of timed: a search that a clock ends finds other things on a busy machine.

Each product, step and comparison adds the seconds that it takes on one core of a usual machine, by the sizes of its
arrays alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from parity.core.stages import Step, Values

_current: ContextVar[Work | None] = ContextVar("_current", default=None)


class Work:
    """Work that a search may do, and has done.

    Attributes:
        seconds: how much it may do, in seconds of one core of a usual machine.
        spent: how much it has done.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.spent = seconds, 0.0
        self._outer: Work | None = None
        self._limits: list[tuple[str, float]] = []
        self._untried: dict[str, None] = {}

    @property
    def untried(self) -> str:
        """Names of the parts of the search that were cut short, with commas; empty if none was."""
        return ", ".join(self._untried)

    @property
    def left(self) -> float:
        """How much it may still do."""
        return max(self.seconds - self.spent, 0.0)

    def is_over(self, what: str, share: float = 1.0) -> bool:
        """Return whether a part of the search may do no more, by its share of the seconds; remember that it was cut."""
        if self.spent < share * self.seconds:
            return False
        self._untried[what] = None
        return True

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is computed inside, also for the work that is counting outside, whose limits hold, too."""
        if (outer := _current.get()) is self:
            yield
            return
        token, self._outer = _current.set(self), outer
        try:
            yield
        finally:
            _current.reset(token)
            self._outer = None

    @contextmanager
    def inside(self, what: str, share: float = 1.0, most: float = math.inf) -> Iterator[None]:
        """Raise a TimeoutError where a part of the search is over, and before each product that would go beyond it.

        Args:
            what: the part.
            share: its share of the seconds, together with what was done before.
            most: seconds that it may do by itself; whoever sets it can come back to the part.
        """
        if self.is_over(what, share):
            raise TimeoutError
        self._limits += [(what, share * self.seconds), ("", self.spent + most)]
        try:
            yield
        finally:
            del self._limits[-2:]

    def ask(self, seconds: float, *, of_part: bool = False) -> None:
        """Raise a TimeoutError if so many seconds more go beyond a limit, or beyond what a part may do by itself."""
        for what, limit in self._limits:
            if self.spent + seconds > limit and not (of_part and what):
                self._untried |= {what: None} if what else {}
                raise TimeoutError
        if self._outer is not None:
            self._outer.ask(seconds, of_part=of_part)

    def add(self, seconds: float) -> None:
        """Count seconds that are spent."""
        self.spent += seconds
        if self._outer is not None:
            self._outer.add(seconds)


def ask(seconds: float, *, of_part: bool = False) -> None:
    """Raise a TimeoutError if so many seconds more go beyond a limit of the work that is counting, if there is one.

    For work that is not counted, `of_part` looks at what the part that is running may do by itself alone.
    """
    if (work := _current.get()) is not None:
        work.ask(seconds, of_part=of_part)


def begin(seconds: float) -> None:
    """Ask for seconds, and add them before they are spent to the work that is counting, if there is one."""
    ask(seconds)
    spend(seconds)


def spend(seconds: float) -> None:
    """Add seconds that are spent to the work that is counting, if there is one."""
    if (work := _current.get()) is not None:
        work.add(seconds)


@contextmanager
def uncounted() -> Iterator[None]:
    """Count nothing inside: what the reference computes for itself takes its own time."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


# ---- Seconds, measured on one core of a server of 2023, OpenBLAS with AVX-512 --------------------------------------

PER_MULTIPLICATION = 5e-11
"""Of a float64 product by BLAS; a float32 one takes half of it."""

PER_FACTOR = 6e-10
"""For each number of the factors of a product, which are read from memory."""

PER_TERM, PER_SUM = 4e-10, 2e-6
"""Of a float32 product in the plainest order: for each multiplication, and for each term of a sum."""

PER_NOISE = 1.2e-8
"""For each number of a product to which noise is added."""

PER_STEP, PER_NUMBER = 5e-5, 5e-9
"""Of a step of a layer, or a comparison: for each, and for each number in it."""


PER_ROUNDED = 2e-8
"""For each number that is rounded to a narrower dtype."""


def spend_on(*arrays: np.ndarray) -> None:
    """Add the work of a comparison of arrays."""
    spend(PER_STEP + PER_NUMBER * sum([x.size for x in arrays]))


def run(step: Step, values: Values) -> dict[str, np.ndarray]:
    """Run a step of a layer, and add its work to that of the products in it."""
    found = step(values)
    spend_on(*[x for x in found.values() if isinstance(x, np.ndarray) and x.flags.writeable])  # others were remembered
    return found
