"""Work counted instead of timed: a search limited by a clock has other results on a busy machine.

Each product, step and comparison adds the seconds that it takes on one core of a typical machine,
estimated from the sizes of its arrays. `CountedArithmetic` counts products; nothing in
`parity.measure` does, so the reference's own computations are neither counted nor limited.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from parity.measure.core.reference import Arithmetic
from parity.measure.core.reference.arithmetic import multiplications
from parity.measure.core.stages import Step, Values

_current: ContextVar[Work | None] = ContextVar("_current", default=None)


@dataclass(frozen=True)
class _Limit:
    """Limit of a part of a search, in seconds spent by the whole search.

    Attributes:
        part: name of the part; empty if the part can be resumed later, so that it is postponed
            instead of cut short.
        seconds: the limit.
    """

    part: str
    seconds: float


class Work:
    """Work limit of a search, and the work done.

    Attributes:
        seconds: limit, in seconds of one core of a typical machine.
        spent: work done.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.spent = seconds, 0.0
        self._outer: Work | None = None
        self._limits: list[_Limit] = []
        self._untried: dict[str, None] = {}

    @property
    def untried(self) -> str:
        """Comma-separated names of the parts of the search that were cut short, if any."""
        return ", ".join(self._untried)

    @property
    def left(self) -> float:
        """Remaining work."""
        return max(self.seconds - self.spent, 0.0)

    def is_over(self, what: str, share: float = 1.0) -> bool:
        """Return whether a part of the search has used up its share of the seconds.

        If so, the part is recorded as cut short.
        """
        if self.spent < share * self.seconds:
            return False
        self.cut_short(what)
        return True

    def cut_short(self, what: str) -> None:
        """Record that a part of the search was cut short."""
        self._untried[what] = None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the computations within the block.

        They also count for an enclosing count, whose limits also apply.
        """
        outer = _current.get()
        if outer is self:
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
        """Raise a TimeoutError if a part of the search is over.

        Within the block, each product that would exceed it also raises one.

        Args:
            what: name of the part.
            share: its share of the seconds, including earlier work.
            most: limit of this part alone, in seconds; the part can be resumed later.
        """
        if self.is_over(what, share):
            raise TimeoutError
        self._limits += [_Limit(what, share * self.seconds), _Limit("", self.spent + most)]
        try:
            yield
        finally:
            del self._limits[-2:]


# Each product and comparison of a search comes here. So enclosing counts are a loop: recursion
# doubled the calls.


def ask(seconds: float, *, of_part: bool = False) -> None:
    """Raise a TimeoutError if this many more seconds exceed a limit of the active count, or of one
    that encloses it.

    For uncounted work, `of_part` checks only the limit of the running part alone.
    """
    work = _current.get()
    while work is not None:
        for limit in work._limits:
            if of_part and limit.part:
                continue
            if work.spent + seconds > limit.seconds:
                if limit.part:
                    work.cut_short(limit.part)
                raise TimeoutError
        work = work._outer


def spend(seconds: float) -> None:
    """Add spent seconds to the active count, if any, and to those that enclose it."""
    work = _current.get()
    while work is not None:
        work.spent += seconds
        work = work._outer


def begin(seconds: float) -> None:
    """Request seconds, and add them in advance."""
    ask(seconds)
    spend(seconds)


@contextmanager
def uncounted() -> Iterator[None]:
    """Disable counting within the block, for results that right layers need as well."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


# ---- Seconds -------------------------------------------------------------------------------------
# Measured on one core of a server of 2023, OpenBLAS with AVX-512.

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
    numbers = 0
    for x in arrays:
        numbers += x.size
    spend(PER_STEP + PER_NUMBER * numbers)


def run(step: Step, values: Values) -> dict[str, np.ndarray]:
    """Run a step of a layer, and add its work to the work of its products."""
    stages = step(values)
    computed = []
    for x in stages.values():
        # Cached arrays are read-only. Deferred heads are not arrays.
        if isinstance(x, np.ndarray) and x.flags.writeable:
            computed.append(x)
    spend_on(*computed)
    return stages


class CountedArithmetic(Arithmetic):
    """Arithmetic whose products count as work, and are not begun if a limit forbids."""

    def blas_product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the product in BLAS's order."""
        seconds = PER_MULTIPLICATION * multiplications(a, b) * a.itemsize / 8
        begin(seconds + PER_FACTOR * (a.size + b.size))
        return super().blas_product(a, b)

    def simplest_product(
        self, a: np.ndarray, b: np.ndarray, start: np.ndarray | float
    ) -> np.ndarray:
        """Return the float32 product, summed term by term."""
        begin(PER_TERM * multiplications(a, b) + PER_SUM * a.shape[-1])
        return super().simplest_product(a, b, start)

    def excess_noise(self, a: np.ndarray, b: np.ndarray, product: np.ndarray) -> np.ndarray:
        """Return random rounding errors of the simplest order in excess of the errors of a
        product.
        """
        spend(PER_NOISE * product.size + PER_FACTOR * (a.size + b.size))
        return super().excess_noise(a, b, product)
