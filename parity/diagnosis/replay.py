"""The reference again, with mistakes in it, from what was observed: each stage from the observed stages before it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.core.compare import SAME_PRECISION, budget, errors_of, norms_of, share, whole_rows
from parity.core.problem import Problem
from parity.core.stages import stage_named
from parity.core.weights import is_floating
from parity.diagnosis.mistakes import Mistake, mistakes_for, permuted_heads, wrong_layer

Mistakes = tuple[Mistake, ...]

MOST_KEPT = 256  # results of wrong layers, which may be large


@dataclass(frozen=True)
class Verdict:
    """How far a stage is from the one with mistakes in it (root mean square), and error / budget."""

    error: float
    ratio: float


class Replay:
    """Stages of a problem, computed from the observed ones with mistakes in them.

    Attributes:
        steps: the names of the stages that each step of the reference gives.
        step_of: the step of each stage.
        observed: the stages that can be compared; `stages` are their names, in the order of the data flow.
        malformed: those that cannot, and why.
        known: the mistakes that could be in them.
    """

    def __init__(self, problem: Problem, observed: Mapping[str, np.ndarray], arithmetic: str) -> None:
        self.problem = problem
        self.arithmetic = arithmetic
        with np.errstate(all="ignore"):
            names: list[list[str]] = []
            values: dict[str, np.ndarray] = {}
            for step in wrong_layer(problem, "float64", ()).steps():
                found = step(values)
                values |= found
                names.append(list(found))
        self.steps = names
        self.step_of = {name: index for index, found in enumerate(names) for name in found}
        known = {name: x for name, x in observed.items() if name in values}  # gradients are not explained
        may_be_nan = problem.case.not_finite is not None
        reasons = {
            name: _why_malformed(name, x, values[name].shape, may_be_nan=may_be_nan) for name, x in known.items()
        }
        self.malformed = {name: reason for name, reason in reasons.items() if reason}
        self.observed = {name: x for name, x in known.items() if name not in self.malformed}
        self.stages = [name for found in names for name in found if name in self.observed]
        self.known = [*mistakes_for(problem.case), *permuted_heads(values, self.observed)]
        self._found: dict[tuple[Any, ...], dict[str, np.ndarray]] = {}
        self._budgets: dict[tuple[Any, ...], dict[str, float]] = {}

    def computed(self, index: int, mistakes: Mistakes, dtype: str = "float64", kind: str = "") -> dict[str, np.ndarray]:
        """What a step gives, with mistakes in it."""
        key = (index, tuple(map(self.known.index, mistakes)), dtype, kind)
        if key not in self._found:
            if len(self._found) > MOST_KEPT:
                self._found.clear()
            steps = wrong_layer(self.problem, dtype, mistakes, kind or self.arithmetic).steps()
            values = dict(self.observed)
            try:
                with np.errstate(all="ignore"):
                    for step, names in zip(steps[:index], self.steps, strict=False):
                        if not all(name in self.observed for name in names):
                            values |= {name: x for name, x in step(values).items() if name not in self.observed}
                    self._found[key] = steps[index](values)
            except ValueError:  # two mistakes that do not fit together
                self._found[key] = {name: np.empty(0) for name in self.steps[index]}
        return self._found[key]

    def verdict(self, stage: str, mistakes: Mistakes, *, quick: bool = False, kind: str = "") -> Verdict:
        """How far a stage is from the one with mistakes in it.

        Args:
            stage: the stage.
            mistakes: in what it is compared with.
            quick: take the budget of the layer without mistakes.
            kind: of the arithmetic that gives the budget.
        """
        index = self.step_of[stage]
        expected, actual = self.computed(index, mistakes)[stage], self.observed[stage]
        if actual.shape != expected.shape:
            return Verdict(math.inf, math.inf)
        errors = errors_of(whole_rows(actual, stage), whole_rows(expected, stage))
        if stage_named(stage).is_exact:
            return Verdict(float(errors.mean()), math.inf if errors.any() else 0.0)
        allowed = self._allowed(stage, () if quick else mistakes, kind)
        error = norms_of(errors, ~np.isnan(expected) | np.isinf(errors))
        if not math.isfinite(error["rms"]):
            return Verdict(math.inf, math.inf)
        return Verdict(error["rms"], max(share(error[norm], allowed[norm]) for norm in error))

    def wrong(self, stages: Iterable[str], mistakes: Mistakes) -> list[str]:
        """Those of the stages that mistakes do not explain."""
        return [stage for stage in stages if self.verdict(stage, mistakes).ratio > 1.0]

    def _allowed(self, stage: str, mistakes: Mistakes, kind: str) -> dict[str, float]:
        key = (stage, tuple(map(self.known.index, mistakes)), kind)
        if key not in self._budgets:
            index, dtype = self.step_of[stage], self.problem.dtype
            expected = self.computed(index, mistakes)[stage].astype(np.float64)
            same = self.computed(index, mistakes, SAME_PRECISION[dtype], kind)[stage]
            with np.errstate(all="ignore"):
                self._budgets[key] = budget(expected, same, dtype, arithmetic=self.arithmetic)
        return self._budgets[key]


def _why_malformed(stage: str, x: np.ndarray, shape: tuple[int, ...], *, may_be_nan: bool) -> str:
    """Why an array cannot be what the stage is, in words, or nothing."""
    known = stage_named(stage)
    if known.kind == "mask" and x.dtype != np.bool_:
        return f"has dtype {x.dtype}, and should be boolean, True where a key is hidden"
    if not known.is_exact and not is_floating(x.dtype):
        return f"has dtype {x.dtype}, and should be floating-point"
    if x.shape != shape:
        return f"has shape {x.shape}, and should have {shape}"
    lost = 0 if known.is_exact or may_be_nan else np.count_nonzero(~np.isfinite(x.astype(np.float64)))
    return f"has {lost} elements that are NaN or infinite" if lost else ""
