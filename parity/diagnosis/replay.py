"""The reference again, with mistakes in it, from what was observed: each stage from the observed stages before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.core.compare import (
    NOT_MEASURED,
    NOTHING,
    SAME_PRECISION,
    Judgement,
    budget,
    is_close,
    judged,
    norms_of,
    unit_of_rounding,
)
from parity.core.problem import Problem
from parity.core.stages import Stage, Step, stage_named
from parity.core.trace import RECOUNTS, nudged, nudged_values
from parity.core.work import run, spend_on
from parity.diagnosis.choices import AS_THE_REFERENCE, Choice
from parity.diagnosis.flow import Flow, flow_of
from parity.diagnosis.laws import Findings, describe
from parity.diagnosis.mistakes import Mistake, low_products, mistakes_for, permuted_heads, wrong_layer
from parity.diagnosis.mistakes.record import Change
from parity.diagnosis.readings import Right
from parity.diagnosis.remembered import remembering

Mistakes = tuple[Mistake, ...]

ALL = "qkv"
"""What a step that projects makes, where no more is said."""

MOST_KEPT = 256  # results of wrong layers
MOST_BYTES = 2**29  # of all of them


class Replay:
    """Stages of a problem, computed from the observed ones with mistakes in them.

    Attributes:
        steps: the names of the stages that each step of the reference gives.
        step_of: the step of each stage.
        observed: the stages, in their shapes; `stages` are their names, in the order of the data flow.
        known: the mistakes that could be in them.

    Args:
        problem: what was computed.
        observed: stages of the reference's, in its shapes.
        arithmetic: of the hardware.
        choice: what is allowed in the same precision.
        right: what the reference gives; computed by default.
        masked: the cells of observed stages that are not judged.
    """

    def __init__(
        self,
        problem: Problem,
        observed: Mapping[str, np.ndarray],
        arithmetic: str,
        choice: Choice = AS_THE_REFERENCE,
        right: Right | None = None,
        masked: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.problem, self.arithmetic, self.choice = problem, arithmetic, choice
        right = right or Right(problem, arithmetic, choice, remembering())
        self._base, self._right, values = right.base, right.by_step, right.values
        self.scope = scope = right.scope
        self.steps = [list(found) for found in right.by_step]
        self.step_of = {name: index for index, names in enumerate(self.steps) for name in names}
        self.observed = {name: x for name, x in observed.items() if name in values}  # gradients are not explained
        self._masked = masked or {}
        is_judged = (lambda name: True) if scope.judged is None else scope.judged.__contains__
        self.stages = [name for name in values if name in self.observed and is_judged(name)]
        known = [*mistakes_for(problem.case), *permuted_heads(values, self.observed)]
        known += low_products() if len(self.stages) == 1 else []  # of more the size of the noise tells
        if scope.only is not None:
            known = [each for each in known if each.name in scope.only or each.about in scope.only]
        may_lose = problem.dtype in ("float32", "float64")  # what is narrow may be rounded to itself
        self.known = [each for each in known if may_lose or not each.is_loss or each.shows_in_narrow]
        self._forget()

    _is_nudged = False

    def with_choice(self, choice: Choice) -> Replay:
        """The same where something else is allowed: what was computed in float64 it has, too."""
        other = copy(self)
        other.choice = choice
        vars(other).pop("_recounts", None)
        other._forget()
        other._found = {key: found for key, found in self._found.items() if key[2] == "float64"}
        return other

    def _forget(self) -> None:
        """Begin with nothing that was computed."""
        self._layers: dict[tuple[Any, ...], Sequence[Step]] = {}
        self._found: dict[tuple[Any, ...], dict[str, np.ndarray]] = {}
        self._bytes = 0
        self._budgets: dict[tuple[Any, ...], dict[str, float]] = {}
        self._judgements: dict[tuple[Any, ...], Judgement] = {}

    def computed(
        self, index: int, mistakes: Mistakes, dtype: str = "float64", kind: str = "", stage: str = ""
    ) -> dict[str, np.ndarray]:
        """What a step gives, with mistakes in it; or a stage of it at least, if one is all that is asked for."""
        whole = (index, mistakes, dtype, kind, ALL)
        if whole in self._found:
            return self._found[whole]
        quantity = stage_named(stage).quantity if stage else ALL
        key = (*whole[:-1], quantity if quantity in ("q", "k", "v") else ALL)
        if key in self._found:
            return self._found[key]
        try:
            found = self._run(*key)
        except KeyError:  # a mistake takes one of them for another
            key = whole
            found = self._run(*key)
        self._keep(key, found)
        return found

    def _keep(self, key: tuple[Any, ...], found: dict[str, np.ndarray]) -> None:
        """Remember a result, and forget those of wrong layers where they become too many."""
        self._bytes += sum(x.nbytes for x in found.values())
        if len(self._found) > MOST_KEPT or self._bytes > MOST_BYTES:
            self._found = {key: kept for key, kept in self._found.items() if not key[1]}
            self._layers.clear()
            self._bytes = sum(x.nbytes for kept in (found, *self._found.values()) for x in kept.values())
        self._found[key] = found

    def _run(self, index: int, mistakes: Mistakes, dtype: str, kind: str, asked: str) -> dict[str, np.ndarray]:
        """A step, with mistakes in it, that makes q, k and v or one of these."""
        layer = (mistakes, dtype, kind, asked)
        if layer not in self._layers:
            self._layers[layer] = self._steps(self.problem, *layer)
        steps = self._layers[layer]
        try:
            with np.errstate(all="ignore"):
                if dtype == "float64" and not kind:
                    return self._again(index, steps, mistakes)
                return run(steps[index], self._values_before(index, steps))
        except ValueError:  # two mistakes that do not fit together
            return {name: np.empty(0) for name in self.steps[index]}

    def _steps(
        self, problem: Problem, changes: tuple[Change, ...], dtype: str = "float64", kind: str = "", asked: str = ALL
    ) -> Sequence[Step]:
        """The stages of the reference with mistakes in it, as functions."""
        if dtype != "float64":
            changes, kind = (*changes, self.choice), kind or self.choice.arithmetic
        return wrong_layer(problem, dtype, (*changes, self._base), kind or self.arithmetic, asked).steps()

    def _values_before(self, index: int, steps: Sequence[Step]) -> dict[str, np.ndarray]:
        """What was observed, and what was not of all that others are made of, up to one of the steps."""
        values = dict(self.observed)
        for before in self._unseen_before[index]:
            values |= {name: x for name, x in run(steps[before], values).items() if name not in self.observed}
        return values

    def _again(self, index: int, steps: Sequence[Step], mistakes: Mistakes) -> dict[str, np.ndarray]:
        """A step with mistakes in it; of it, and of those before it, what no mistake touches is the right layer's."""
        if not self._flow:
            return run(steps[index], self._values_before(index, steps))
        overridden = {method for mistake in mistakes for method in mistake.in_reference}
        values, other, found = dict(self.observed), set(self.observed), dict[str, np.ndarray]()
        for before in (*self._unseen_before[index], index):
            flow = self._flow[before]
            if flow.methods & overridden or flow.reads & other:
                found = run(steps[before], values)
                other |= found.keys()
            else:
                found = self._right[before]
            values |= {name: x for name, x in found.items() if name not in self.observed}
        return found

    def cost(self, index: int, mistake: Mistake) -> int:
        """How much of a layer is computed again with a mistake in it: the fewer steps, the less."""
        touched = (not flow.methods.isdisjoint(mistake.in_reference) for flow in self._flow[: index + 1])
        return next((index - step for step, is_touched in enumerate(touched) if is_touched and step > 0), 0)

    @cached_property
    def _flow(self) -> list[Flow]:
        """What each step of the right layer depends on; nothing where numbers are nudged."""
        return [] if self._is_nudged else flow_of(self.problem)

    @cached_property
    def _unseen_before(self) -> list[list[int]]:
        """For each step those before it that others are made of, and that were not observed.

        What a module gives in one call only the module itself takes up in the next, and it takes up nothing else.
        """
        unseen = [
            any(name not in self.observed and not stage_named(name).is_end for name in names) for names in self.steps
        ]
        is_module = [stage_named(names[0]).path != "" for names in self.steps]
        return [
            [before for before in range(index) if unseen[before] and is_module[before] == is_module[index]]
            for index in range(len(self.steps))
        ]

    def judgement(self, stage: str, mistakes: Mistakes, *, quick: bool = False, kind: str = "") -> Judgement:
        """Judge a stage by the one with mistakes in it.

        Args:
            stage: the stage.
            mistakes: in what it is compared with.
            quick: take about the budget of the layer without mistakes.
            kind: of the arithmetic that gives the budget.
        """
        key = (stage, mistakes, quick, kind)
        if key not in self._judgements:
            self._judgements[key] = self._judged(*key)
        return self._judgements[key]

    def _actual(self, stage: str, expected: np.ndarray) -> np.ndarray:
        """An observed stage, with what is expected in the cells that are not judged."""
        actual, masked = self.observed[stage], self._masked.get(stage)
        if masked is None or expected.shape != actual.shape:
            return actual
        return np.where(masked, expected, actual).astype(actual.dtype)

    def _judged(self, stage: str, mistakes: Mistakes, quick: bool, kind: str) -> Judgement:
        expected = self.computed(self.step_of[stage], mistakes, stage=stage)[stage]
        actual = self._actual(stage, expected)
        if actual.shape != expected.shape:
            return NOT_MEASURED
        spend_on(expected)
        allowed = self._about_allowed(stage, expected) if quick else self.allowed(stage, mistakes, kind)
        found = judged(actual, expected, allowed, stage)
        if is_close(found.ratio) and not quick and not any(each.is_loss for each in mistakes):
            budgets = [allowed, *(other.allowed(stage, mistakes, kind) for other in self._recounts)]
            allowed = {norm: max(each[norm] for each in budgets) for norm in allowed}
            return judged(actual, expected, allowed, stage)
        return found

    def _about_allowed(self, stage: str, expected: np.ndarray) -> dict[str, float]:
        """The budget of the layer without mistakes, for values of another size: noise grows with them."""
        if stage_named(stage).is_exact:
            return NOTHING
        right = self.computed(self.step_of[stage], (), stage=stage)[stage]
        sizes = [norms_of(x, np.isfinite(x))["rms"] for x in (expected, right)]
        growth = max(sizes[0] / sizes[1], 1.0) if sizes[1] > 0.0 else 1.0
        return {norm: growth * limit for norm, limit in self.allowed(stage, ()).items()}

    def has_wrong_zeros(self, stage: str) -> bool:
        """Whether attention weights are 0 where a key is seen, or not 0 where it is hidden."""
        expected, actual = self.computed(self.step_of[stage], (), stage=stage)[stage], self.observed[stage]
        if not stage_named(stage).is_attn_weights or expected.shape != actual.shape:
            return False
        return judged(actual, expected, self.allowed(stage, ()), stage).has_wrong_zeros

    @cached_property
    def _recounts(self) -> list[Replay]:
        """The same of numbers that are off by a unit of rounding, at random: one run is one sample of the noise.

        They decide where a mistake explains all but a little: see `parity.core.trace.Reference.recounted`.
        """
        dtype, rng, found = SAME_PRECISION[self.problem.dtype], np.random.default_rng(0), []
        for _ in range(RECOUNTS if dtype == "float32" else 0):
            other = copy(self)
            other.problem = nudged(self.problem, rng)
            other.observed = nudged_values(self.observed, unit_of_rounding(dtype), rng)
            other._base, other._is_nudged = remembering(), True
            vars(other).pop("_flow", None)
            other._forget()
            found.append(other)
        return found

    def wrong(self, stages: Iterable[str], mistakes: Mistakes) -> list[str]:
        """Those of the stages that mistakes do not explain."""
        return [stage for stage in stages if self.judgement(stage, mistakes).ratio > 1.0]

    def explained(self, stages: Sequence[str], mistakes: Mistakes, added: Mistakes) -> list[str]:
        """Those of the stages that are wrong with some mistakes, and right with more."""
        wrong = self.wrong(stages, mistakes) if added else []
        still = self.wrong(wrong, (*mistakes, *added))
        return [stage for stage in wrong if stage not in still]

    def allowed(self, stage: str, mistakes: Mistakes, kind: str = "") -> dict[str, float]:
        """The budget of a stage of the layer with mistakes in it."""
        if stage_named(stage).is_exact:
            return NOTHING
        key = (stage, mistakes, kind)
        if key not in self._budgets:
            index, dtype = self.step_of[stage], self.problem.dtype
            expected = self.computed(index, mistakes, stage=stage)[stage].astype(np.float64)
            same = self.computed(index, mistakes, SAME_PRECISION[dtype], kind, stage)[stage]
            spend_on(expected)
            with np.errstate(all="ignore"):
                self._budgets[key] = budget(expected, same, dtype, arithmetic=self.arithmetic, stage=stage)
        return self._budgets[key]

    def findings(
        self, stage: str, mistakes: Mistakes, limited: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Findings | None:
        """Where a stage differs from the one with mistakes in it, and by what law; None if it has another shape.

        Args:
            stage: the stage.
            mistakes: in what it is compared with.
            limited: a context that raises a TimeoutError where numbers of the specification, or parts of the layer,
                take too much work.
        """
        index = self.step_of[stage]
        with np.errstate(all="ignore"):
            values = self._values_before(index, self._steps(self.problem, mistakes))
        expected = self.computed(index, mistakes)[stage]
        actual = self._actual(stage, expected)
        if actual.shape != expected.shape:
            return None

        def again(problem: Problem, changes: tuple[Change, ...]) -> np.ndarray:
            steps = self._steps(problem, changes)
            with limited(), np.errstate(all="ignore"):
                return run(steps[index], self._values_before(index, steps))[stage]

        def recompute(spec: AttentionSpec) -> np.ndarray:
            return again(replace(self.problem, case=replace(self.problem.case, spec=spec)), mistakes)

        known = stage_named(stage)
        return describe(
            stage,
            actual,
            expected,
            self.allowed(stage, mistakes),
            hidden=None if known.is_exact else values.get(str(Stage("mask", step=known.step))),
            problem=self.problem,
            recompute=recompute,
            recomputed=lambda change: again(self.problem, (*mistakes, change)),
            others={name: x for name, x in values.items() if self.step_of[name] <= index and name != stage},
        )
