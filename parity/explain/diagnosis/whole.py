"""The stages of a large layer, each compared as a whole: the verdict, and the tokens that show an
error most.

A search in samples finds the bug. The stage that differs, the size of its error and its location
are from the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from parity.explain.diagnosis.fits import Description, location_of
from parity.measure.core.compare import FACTOR, Comparison, Label, dtype_of_stage, floor
from parity.measure.core.stages import stage_named
from parity.measure.core.trace import Reference
from parity.measure.core.unused import unused_cells
from parity.measure.core.weights import is_floating

ROOM = 1e-300
"""A budget that is not 0, for rows of zeros."""


class WholeStages(Mapping[str, Comparison]):
    """The comparisons of the recorded stages of a problem that have the reference's shape, in the
    order of the data flow.

    Args:
        observed: stages in the reference's order of axes.
        reference: reference of their problem.
        arithmetic: arithmetic of the hardware.
        comparisons: known comparisons with the reference, by stage.
        prefix: prefix of the stages' names in the reference, such as `step0.`.
        passed: stages that are known to agree, such as scores in 16 bits.
    """

    def __init__(
        self,
        observed: Mapping[str, np.ndarray],
        reference: Reference,
        arithmetic: str,
        comparisons: Mapping[str, Comparison] | None = None,
        prefix: str = "",
        passed: frozenset[str] = frozenset(),
    ) -> None:
        self._reference, self._arithmetic, self._prefix = reference, arithmetic, prefix
        expected = reference.accumulated
        self._observed: dict[str, np.ndarray] = {}
        for full_name, x in expected.items():
            name = full_name.removeprefix(prefix)
            is_recorded = full_name.startswith(prefix) and name in observed
            if is_recorded and observed[name].shape == x.shape:
                self._observed[name] = observed[name]
        self._known = comparisons or {}
        self._compared: dict[str, Comparison] = {}
        self._by_token: dict[str, np.ndarray] = {}
        self._passed = passed

    def __iter__(self) -> Iterator[str]:
        return iter(self._observed)

    def __len__(self) -> int:
        return len(self._observed)

    def __contains__(self, name: object) -> bool:
        # Without this method, a mapping looks the name up, which compares the whole stage.
        return name in self._observed

    def __getitem__(self, name: str) -> Comparison:
        if name not in self._compared:
            self._compared[name] = self._comparison(name)
        return self._compared[name]

    def by_token(self, name: str) -> np.ndarray:
        """Return the error / budget of each token alone, (T,) or (S,); empty for a stage that
        passed, or without tokens.
        """
        if name in self._passed or self[name].passed:
            return np.zeros(0)
        if name not in self._by_token:
            self._by_token[name] = self._measured_by_token(name)
        return self._by_token[name]

    def _comparison(self, name: str) -> Comparison:
        """Return the comparison of a stage with the reference, unless it is known."""
        full_name, dtype = self._prefix + name, self._reference.problem.dtype
        known = self._known.get(full_name)
        # A recorded stage with other axes was not measured; here it has the axes of the reference.
        if known is not None and (known.passed or known.worst_values is not None):
            return known
        x = self._observed[name]
        if is_floating(x.dtype):
            # Scores in 16 bits have the same values in 32.
            x = x.astype(dtype_of_stage(full_name, dtype), copy=False)
        label = Label("", "", dtype, full_name)
        with np.errstate(over="ignore", invalid="ignore"):
            return self._reference.compare_used(x, label, self._arithmetic)

    def first_wrong(self, besides: Iterable[str] = ()) -> str:
        """Return the first stage that is over its budget, other than some; empty if there is
        none.
        """
        ignored = {*besides} | self._passed
        for name in self:
            if name not in ignored and not self[name].passed:
                return name
        return ""

    def description(self, name: str) -> Description | None:
        """Describe where a stage differs, without a search for patterns; None if its shape is
        unknown.
        """
        if name not in self._observed:
            return None
        reference, full_name = self._reference, self._prefix + name
        expected = reference.accumulated[full_name]
        same = reference.same_precision(local=False, arithmetic=self._arithmetic)[full_name]
        return location_of(
            full_name,
            self._observed[name],
            expected,
            same,
            problem=reference.problem,
            arithmetic=self._arithmetic,
            unused=unused_cells(reference.problem.case, full_name, expected.shape),
        )

    def _measured_by_token(self, name: str) -> np.ndarray:
        """Return the error of each token, compared with its own noise."""
        stage, full_name = stage_named(name), self._prefix + name
        if "T" in stage.axes:
            axis = stage.axes.index("T")
        elif "S" in stage.axes:
            axis = stage.axes.index("S")
        else:
            return np.zeros(0)
        reference = self._reference
        expected = reference.accumulated[full_name]
        error = self._error(name, expected)
        if stage.is_exact:
            return _size_by_token(error, axis)
        same = reference.same_precision(local=False, arithmetic=self._arithmetic)[full_name]
        noise = _size_by_token(np.nan_to_num(same.astype(np.float64) - expected), axis)
        scale = _size_by_token(np.nan_to_num(expected), axis)
        allowed = FACTOR * noise + floor(reference.problem.dtype, self._arithmetic) * scale
        return _size_by_token(error, axis) / (allowed + ROOM)

    def _error(self, name: str, expected: np.ndarray) -> np.ndarray:
        """Return the absolute error of each used number; for a wrong NaN it is infinite."""
        with np.errstate(over="ignore", invalid="ignore"):
            error = np.abs(self._observed[name].astype(np.float64) - expected)
        is_nan = np.isnan(error)
        error[is_nan] = np.inf
        error[is_nan & np.isnan(expected)] = 0.0
        unused = unused_cells(self._reference.problem.case, self._prefix + name, expected.shape)
        if unused is not None:
            error[unused] = 0.0
        return error


def _size_by_token(x: np.ndarray, axis: int) -> np.ndarray:
    """Return the root mean square of each token's values, in the sequence in which it is
    largest.
    """
    of_tokens = np.moveaxis(x, axis, 1).reshape(x.shape[0], x.shape[axis], -1)
    with np.errstate(over="ignore"):
        return np.sqrt(np.mean(of_tokens**2, axis=-1)).max(axis=0)
