"""Work counted instead of timed: a search limited by a clock has other results on a busy machine.

Each product, step and comparison adds the seconds that it takes on one core of a typical machine,
estimated from the sizes of its arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from parity.measure.core.stages import Step, Values

_current: ContextVar[Work | None] = ContextVar("_current", default=None)


class Work:
    """Work limit of a search, and the work done.

    Attributes:
        seconds: limit, in seconds of one core of a typical machine.
        spent: work done.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.spent = seconds, 0.0
        self._outer: Work | None = None
        self._limits: list[tuple[str, float]] = []
        self._untried: dict[str, None] = {}

    @property
    def untried(self) -> str:
        """Comma-separated names of the parts of the search that were cut short; empty if none
        was.
        """
        return ", ".join(self._untried)

    @property
    def left(self) -> float:
        """Remaining work."""
        return max(self.seconds - self.spent, 0.0)

    def is_over(self, what: str, share: float = 1.0) -> bool:
        """Return whether a part of the search has used up its share of the seconds; record it as
        cut short.
        """
        if self.spent < share * self.seconds:
            return False
        self._untried[what] = None
        return True

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the computations within the block, also for an enclosing count, whose limits also
        apply.
        """
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
        """Raise a TimeoutError if a part of the search is over, and before each product that would
        exceed it.

        Args:
            what: name of the part.
            share: its share of the seconds, including earlier work.
            most: limit of this part alone, in seconds; the part can be resumed later.
        """
        if self.is_over(what, share):
            raise TimeoutError
        self._limits += [(what, share * self.seconds), ("", self.spent + most)]
        try:
            yield
        finally:
            del self._limits[-2:]

    def ask(self, seconds: float, *, of_part: bool = False) -> None:
        """Raise a TimeoutError if this many more seconds exceed a limit, or the limit of a part
        alone.
        """
        for what, limit in self._limits:
            if self.spent + seconds > limit and not (of_part and what):
                self._untried |= {what: None} if what else {}
                raise TimeoutError
        if self._outer is not None:
            self._outer.ask(seconds, of_part=of_part)

    def add(self, seconds: float) -> None:
        """Count spent seconds."""
        self.spent += seconds
        if self._outer is not None:
            self._outer.add(seconds)


def ask(seconds: float, *, of_part: bool = False) -> None:
    """Raise a TimeoutError if this many more seconds exceed a limit of the active count, if any.

    For uncounted work, `of_part` checks only the limit of the running part alone.
    """
    if (work := _current.get()) is not None:
        work.ask(seconds, of_part=of_part)


def begin(seconds: float) -> None:
    """Request seconds and add them in advance to the active count, if any."""
    ask(seconds)
    spend(seconds)


def spend(seconds: float) -> None:
    """Add spent seconds to the active count, if any."""
    if (work := _current.get()) is not None:
        work.add(seconds)


@contextmanager
def uncounted() -> Iterator[None]:
    """Disable counting within the block: the reference's own computations are not limited."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


# ---- Seconds, measured on one core of a server of 2023, OpenBLAS with AVX-512
# ----------------------------------------

PER_MULTIPLICATION = 5e-11
"""Seconds per multiplication of a float64 product by BLAS; float32 takes half."""

PER_FACTOR = 6e-10
"""Seconds per number of a product's factors, which are read from memory."""

PER_TERM, PER_SUM = 4e-10, 2e-6
"""Seconds per multiplication, and per term of a sum, of a float32 product in the simplest order."""

PER_NOISE = 1.2e-8
"""Seconds per number of a product to which noise is added."""

PER_STEP, PER_NUMBER = 5e-5, 5e-9
"""Seconds per step of a layer or comparison, and per number in it."""


PER_ROUNDED = 2e-8
"""Seconds per number that is rounded to a narrower dtype."""


def spend_on(*arrays: np.ndarray) -> None:
    """Add the work of a comparison of arrays."""
    spend(PER_STEP + PER_NUMBER * sum([x.size for x in arrays]))


def run(step: Step, values: Values) -> dict[str, np.ndarray]:
    """Run a step of a layer, and add its work to that of its products."""
    found = step(values)
    spend_on(
        *[x for x in found.values() if isinstance(x, np.ndarray) and x.flags.writeable]
    )  # others are cached
    return found
