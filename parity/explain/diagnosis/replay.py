"""The reference with bugs injected, recomputed from the observed stages before each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs import Bug, bugs_for, low_products, permuted_heads, wrong_layer
from parity.explain.diagnosis.bugs.record import Change, Changed
from parity.explain.diagnosis.choices import AS_THE_REFERENCE, Choice
from parity.explain.diagnosis.flow import Flow, flow_of
from parity.explain.diagnosis.laws import Findings, describe
from parity.explain.diagnosis.laws.record import OtherSpec
from parity.explain.diagnosis.remembered import Remembered
from parity.explain.diagnosis.work import run, spend_on
from parity.measure.core.compare import (
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
from parity.measure.core.problem import Problem
from parity.measure.core.stages import STEPS, Stage, Step, stage_named
from parity.measure.core.trace import RECOUNTS, Reference, nudged, nudged_values, step_of
from parity.measure.core.unused import without_unused

Bugs = tuple[Bug, ...]
Changes = tuple[Change, ...]
Form = Callable[[np.ndarray], np.ndarray]

ALL = "qkv"
"""Stages of a step that projects, by default."""

SOME_VALUES = 4096
"""The number of values that decide if a stage is far off."""

FAR_OFF = 0.5
"""The relative error of a stage that no rounding explains."""

MOST_KEPT = 256  # wrong layers
MOST_BYTES = 2**29  # of all of them

_Layer = tuple[Changes, str, str, str]
"""The changes of a layer, its dtype, its arithmetic if it is not the hardware's, and its
projections.
"""


def remembering(found: Remembered | None = None) -> Changed:
    """Return a reference that computes each projection and table once for each arithmetic, as a
    change.

    It must be the innermost change, and serve layers with the same weights and inputs.
    """
    found = found or Remembered()
    return Changed({"linear": found.linear, "tables": found.tables})


@dataclass(frozen=True)
class Scope:
    """Limits of a search.

    Attributes:
        judged: names of the stages to compare; all observed stages by default.
        only: names or descriptions of the bugs to try; all known bugs by default.
        is_quick: True to try single bugs only, and to leave unexplained stages without a
            description.
    """

    judged: frozenset[str] | None = None
    only: frozenset[str] | None = None
    is_quick: bool = False


EVERYTHING = Scope()


class Replay:
    """Stages of a problem with changes of the reference, each computed from the observed stages
    before it.

    It answers every question of the diagnosis: the values of a stage with a change, their
    tolerance, and if only
        rounding remains. Results are cached, and work is counted. Without observed stages, every
        stage is computed from its own stages before it.

    Attributes:
        observed: the stages, in the reference's shapes.

    Args:
        problem: the case, weights and inputs.
        observed: observed stages, in the reference's shapes.
        arithmetic: of the hardware.
        choice: an allowed way to compute in the same precision.
        base: the innermost change of every layer, see `remembering`.
        scope: the stages to compare, and the bugs to try.
        reference: of the problem; its stages are not computed again.
    """

    def __init__(
        self,
        problem: Problem,
        observed: Mapping[str, np.ndarray],
        arithmetic: str,
        choice: Choice = AS_THE_REFERENCE,
        *,
        base: Changed | None = None,
        scope: Scope = EVERYTHING,
        reference: Reference | None = None,
    ) -> None:
        self.problem, self.arithmetic, self.choice, self.scope = problem, arithmetic, choice, scope
        self._base, self._reference = base or remembering(), reference
        self._right: Replay | None = None
        self._observe({}, {})
        if observed:
            self._right = copy(self)
            self._observe(observed, {})

    _is_nudged = False

    def _observe(
        self, observed: Mapping[str, np.ndarray], masked: Mapping[str, np.ndarray]
    ) -> None:
        """Start with other stages, and cells of them that are not compared."""
        known = self.right.values if observed else {}
        self.observed = {
            name: x for name, x in observed.items() if name in known
        }  # gradients are not explained
        self._masked = masked
        self._forget()

    def observing(
        self, observed: Mapping[str, np.ndarray], masked: Mapping[str, np.ndarray]
    ) -> Replay:
        """Return the replay of other stages, and cells of them that are not compared."""
        other = copy(self)
        other._right = self.right
        other._observe(observed, masked)
        return other

    def with_choice(self, choice: Choice) -> Replay:
        """Return the replay with another choice; it shares the results in float64."""
        other = copy(self)
        other.choice = choice
        other._forget()
        other._found = {key: found for key, found in self._found.items() if key[1] == "float64"}
        return other

    def _forget(self) -> None:
        """Start without cached results."""
        for name in ("stages", "known", "_unseen_before", "_recounts"):
            vars(self).pop(name, None)
        self._layers: dict[_Layer, Sequence[Step]] = {}
        self._found: dict[_Layer, dict[int, dict[str, np.ndarray]]] = {}
        self._bytes = 0
        self._budgets: dict[tuple[Any, ...], dict[str, float]] = {}
        self._judgements: dict[tuple[Any, ...], Judgement] = {}

    # ---- The right layer -------------------------------------------------------------------------

    @property
    def right(self) -> Replay:
        """The replay without observed stages."""
        return self if self._right is None else self._right

    @cached_property
    def by_step(self) -> list[dict[str, np.ndarray]]:
        """Every stage of the right layer in float64, from its own stages before it, step by
        step.
        """
        if self._right is not None:
            return self._right.by_step
        found = (
            [] if self._reference is None else self._reference.by_step("float64", self.arithmetic)
        )
        values: dict[str, np.ndarray] = {}
        for step in () if found else self._steps(((), "float64", "", ALL)):
            with np.errstate(all="ignore"):
                found.append(run(step, values))
            values |= found[-1]
        return found

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """The stages of the right layer by name."""
        return {name: x for found in self.by_step for name, x in found.items()}

    @cached_property
    def steps(self) -> list[list[str]]:
        """The names of the stages of each step."""
        return [list(found) for found in self.by_step]

    @cached_property
    def step_of(self) -> dict[str, int]:
        """The step of each stage."""
        return {name: index for index, names in enumerate(self.steps) for name in names}

    # ---- Candidates ------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> list[str]:
        """The names of the compared stages, in the order of the data flow."""
        judged = self.scope.judged
        return [
            name
            for name in self.values
            if name in self.observed and (judged is None or name in judged)
        ]

    @cached_property
    def known(self) -> list[Bug]:
        """The bugs that could affect them."""
        known = [*bugs_for(self.problem.case), *permuted_heads(self.values, self.observed)]
        known += low_products(self.problem.case) if not self.arithmetic.startswith("tensix") else []
        if (only := self.scope.only) is not None:
            known = [each for each in known if each.name in only or each.about in only]
        may_lose = self.problem.dtype in (
            "float32",
            "float64",
        )  # narrow values may round to themselves
        return [each for each in known if may_lose or not each.is_loss or each.shows_in_narrow]

    # ---- Stages with changes ---------------------------------------------------------------------

    def stage(
        self, name: str, changes: Changes = (), dtype: str = "float64", kind: str = ""
    ) -> np.ndarray:
        """Return a stage with changes."""
        return self.computed(self.step_of[name], changes, dtype, kind, name)[name]

    def computed(
        self, index: int, changes: Changes, dtype: str = "float64", kind: str = "", stage: str = ""
    ) -> dict[str, np.ndarray]:
        """Return a step with changes, or at least one stage of it if only that is requested."""
        if dtype == "float64" and not (changes or kind or self.observed):
            return self.by_step[index]
        whole = (changes, dtype, kind, ALL)
        quantity = stage_named(stage).quantity if stage and self.observed else ALL
        layer = whole if quantity not in ("q", "k", "v") else (*whole[:-1], quantity)
        for each in (whole, layer):
            if index in self._found.get(each, ()):
                return self._found[each][index]
        try:
            return self._until(index, layer)[1]
        except KeyError:  # a bug confuses two of them
            return self._until(index, whole)[1]

    def _until(
        self, index: int, layer: _Layer
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the values before a step of a layer, and the step; empty arrays if changes do not
        fit together.

        It runs the earlier steps that later ones depend on and that were not observed. Steps
        without a change are those of the right layer.
        """
        values, changed, step = dict(self.observed), set(self.observed), dict[str, np.ndarray]()
        overridden = self._overridden(layer)
        try:
            for each in (*self._unseen_before[index], index):
                values |= {name: x for name, x in step.items() if name not in self.observed}
                flow = None if overridden is None else self._flow[each]
                if (
                    flow
                    and flow.methods.isdisjoint(overridden or ())
                    and flow.reads.isdisjoint(changed)
                ):
                    step = self.by_step[each]
                else:
                    step = self._run(each, layer, values)
                    changed.update(step)
        except ValueError:
            step = {name: np.empty(0) for name in self.steps[index]}
            self._keep(index, layer, step)
        return values, step

    def _overridden(self, layer: _Layer) -> set[str] | None:
        """Return the methods that changes of a layer override; None if the whole layer is
        replaced.
        """
        changes, dtype, kind, _ = layer
        if (
            dtype != "float64"
            or kind
            or not self._flow
            or any(isinstance(each, OtherSpec) for each in changes)
        ):
            return None
        return {method for each in changes for method in each.in_reference}

    def _run(
        self, index: int, layer: _Layer, values: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return a step of a layer, after the steps before it."""
        if (kept := self._found.get(layer, {}).get(index)) is not None:
            if next(iter(kept.values())).shape == (0,):
                raise ValueError("changes do not fit together")
            return kept
        if known := self._known(layer):
            return known[index]
        if layer not in self._layers:
            self._layers[layer] = self._steps(layer)
        with np.errstate(all="ignore"):
            found = run(self._layers[layer][index], values)
        self._keep(index, layer, found)
        return found

    def _known(self, layer: _Layer) -> Sequence[dict[str, np.ndarray]]:
        """Return the stages that the reference already computed for a right layer of lower
        precision, step by step.
        """
        changes, dtype, kind, _ = layer
        is_other = (
            changes or kind or self.observed or self.choice.in_reference or self.choice.arithmetic
        )
        is_computed = dtype in ("float64", SAME_PRECISION[self.problem.dtype])
        if self._reference is None or is_other or not is_computed:
            return ()
        return self._reference.by_step(dtype, self.arithmetic)

    def _steps(self, layer: _Layer) -> Sequence[Step]:
        """Return the steps of the reference with changes, as functions."""
        changes, dtype, kind, asked = layer
        problem = self.problem
        for change in changes:
            if isinstance(change, OtherSpec):
                problem = replace(problem, case=replace(problem.case, spec=change.spec))
        if dtype != "float64":
            changes, kind = (*changes, self.choice), kind or self.choice.arithmetic
        return wrong_layer(
            problem, dtype, (*changes, self._base), kind or self.arithmetic, asked
        ).steps()

    def _keep(self, index: int, layer: _Layer, found: dict[str, np.ndarray]) -> None:
        """Cache a step, and drop the oldest steps of wrong layers if there are too many."""
        self._bytes += sum(x.nbytes for x in found.values())
        if len(self._found) > MOST_KEPT or self._bytes > MOST_BYTES:
            kept = {
                each: steps for each, steps in self._found.items() if not each[0] or each == layer
            }
            self._found = kept
            self._layers = {each: steps for each, steps in self._layers.items() if each == layer}
            self._bytes = sum(
                x.nbytes
                for steps in kept.values()
                for step in steps.values()
                for x in step.values()
            )
        self._found.setdefault(layer, {})[index] = found

    def cost(self, index: int, bug: Bug) -> int:
        """Return the share of a layer that a bug makes necessary to compute again: fewer steps are
        cheaper.
        """
        touched = (
            not flow.methods.isdisjoint(bug.in_reference) for flow in self._flow[: index + 1]
        )
        return next(
            (index - step for step, is_touched in enumerate(touched) if is_touched and step > 0), 0
        )

    @cached_property
    def _flow(self) -> list[Flow]:
        """Return the dependencies of each step of the right layer; empty for nudged numbers."""
        if self._is_nudged:
            return []
        return flow_of(self.problem) if self._right is None else self._right._flow

    @cached_property
    def _unseen_before(self) -> list[list[int]]:
        """Return for each step the earlier steps that it depends on and that were not observed.

        The results of a module in one call affect only the module itself in the next, and nothing
        else does.
        """
        unseen = [
            any(name not in self.observed and not stage_named(name).is_end for name in names)
            for names in self.steps
        ]
        is_module = [any(stage_named(name).path for name in names) for names in self.steps]
        return [
            [
                before
                for before in range(index)
                if unseen[before] and is_module[before] == is_module[index]
            ]
            for index in range(len(self.steps))
        ]

    # ---- Tolerances ------------------------------------------------------------------------------

    def judgement(
        self, stage: str, changes: Changes, *, quick: bool = False, kind: str = ""
    ) -> Judgement:
        """Compare an observed stage with the one that has changes.

        Args:
            stage: the stage.
            changes: of the expected values.
            quick: use approximately the budget of the right layer.
            kind: the arithmetic that determines the budget.
        """
        key = (stage, changes, quick, kind)
        if key not in self._judgements:
            self._judgements[key] = self._judged(*key)
        return self._judgements[key]

    def _judged(self, stage: str, changes: Changes, quick: bool, kind: str) -> Judgement:
        expected = self.stage(stage, changes)
        if self.observed[stage].shape != expected.shape:
            return NOT_MEASURED
        spend_on(expected)
        allowed = (
            self._about_allowed(stage, expected) if quick else self.allowed(stage, changes, kind)
        )
        compared = self.compared(stage, expected)
        found = judged(*compared, allowed, stage)
        if (
            is_close(found.ratio)
            and not quick
            and not any(getattr(each, "is_loss", False) for each in changes)
        ):
            budgets = [allowed, *(other.allowed(stage, changes, kind) for other in self._recounts)]
            allowed = {norm: max(each[norm] for each in budgets) for norm in allowed}
            return judged(*compared, allowed, stage)
        return found

    def compared(self, stage: str, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return an observed stage and its expected values without the cells that are not
        compared.
        """
        return _compared_cells(self.observed[stage], expected, self._masked.get(stage), stage)

    def distance(self, stage: str, expected: np.ndarray) -> float:
        """Return the mean absolute difference of an observed stage, without the cells that are not
        compared.

        A number in the middle between two narrower ones may be rounded either way. A few such
        numbers decide the largest difference, but not the mean.

        Args:
            stage: the stage.
            expected: values of its shape.
        """
        actual, expected = self.compared(stage, expected)
        difference = np.abs(actual.astype(np.float64) - expected)
        difference = difference[np.isfinite(difference)]
        return float(np.mean(difference)) if difference.size else 0.0

    def _actual(self, stage: str, expected: np.ndarray) -> np.ndarray:
        """Return an observed stage, with the expected values in cells that are not compared."""
        actual, masked = self.observed[stage], self._masked.get(stage)
        if masked is None or expected.shape != actual.shape:
            return actual
        return np.where(masked, expected, actual).astype(actual.dtype)

    def agrees(
        self,
        stage: str,
        actual: np.ndarray,
        changes: Changes = (),
        unused: np.ndarray | None = None,
        form: Form = np.asarray,
    ) -> bool:
        """Return True if an array is a stage with changes, in a form, up to rounding, except in
        unused cells.
        """
        expected = form(self.stage(stage, changes))
        if actual.shape != expected.shape:
            return False
        spend_on(expected)
        actual, expected = _compared_cells(actual, expected, unused, stage)
        return judged(actual, expected, self.allowed(stage, changes, form=form), stage).ratio <= 1.0

    def allowed(
        self, stage: str, changes: Changes, kind: str = "", dtype: str = "", form: Form = np.asarray
    ) -> dict[str, float]:
        """Return the budget of a stage with changes, in a form; in a dtype, by default that of the
        problem.
        """
        if stage_named(stage).is_exact:
            return NOTHING
        key = (stage, changes, kind, dtype, form)
        if key not in self._budgets:
            dtype = dtype or self.problem.dtype
            expected = form(self.stage(stage, changes)).astype(np.float64)
            same = form(self.stage(stage, changes, SAME_PRECISION[dtype], kind))
            spend_on(expected)
            with np.errstate(all="ignore"):
                self._budgets[key] = budget(
                    expected, same, dtype, arithmetic=self.arithmetic, stage=stage
                )
        return self._budgets[key]

    def _about_allowed(self, stage: str, expected: np.ndarray) -> dict[str, float]:
        """Return the budget of the right layer for values of another size: noise grows with
        them.
        """
        if stage_named(stage).is_exact:
            return NOTHING
        sizes = [norms_of(x, np.isfinite(x))["rms"] for x in (expected, self.stage(stage))]
        growth = max(sizes[0] / sizes[1], 1.0) if sizes[1] > 0.0 else 1.0
        return {norm: growth * limit for norm, limit in self.allowed(stage, ()).items()}

    def has_wrong_zeros(self, stage: str) -> bool:
        """Return True if attention weights are 0 for a visible key, or not 0 for a hidden key."""
        expected = self.stage(stage)
        if not stage_named(stage).is_attn_weights or expected.shape != self.observed[stage].shape:
            return False
        return judged(
            *self.compared(stage, expected), self.allowed(stage, ()), stage
        ).has_wrong_zeros

    @cached_property
    def _recounts(self) -> list[Replay]:
        """Return the stage with inputs that are off by a random unit of rounding: one run is one
        sample of the noise.

        It decides if a bug explains nearly everything, see
        `parity.measure.core.trace.Reference.recounted`.
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

    # ---- Explanations ----------------------------------------------------------------------------

    def wrong(self, stages: Iterable[str], changes: Changes) -> list[str]:
        """Return the stages that changes do not explain."""
        return [stage for stage in stages if self.judgement(stage, changes).ratio > 1.0]

    def explained(self, stages: Iterable[str], changes: Changes, added: Changes) -> list[str]:
        """Return the stages that are wrong with some changes, and right with more."""
        wrong = self.wrong(stages, changes) if added else []
        still = self.wrong(wrong, (*changes, *added))
        return [stage for stage in wrong if stage not in still]

    def is_same(
        self, index: int, changes: Changes, added: Changes, names: Iterable[str] = ()
    ) -> bool:
        """Return True if more changes leave stages of a step, or the whole step, unchanged."""
        before, after = self.computed(index, changes), self.computed(index, (*changes, *added))
        return all(
            np.array_equal(before[name], after[name], equal_nan=True)
            for name in names or self.steps[index]
        )

    def findings(
        self,
        stage: str,
        changes: Changes,
        limited: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Findings | None:
        """Describe where and by which pattern a stage differs from the one with changes; None if it
        has another shape.

        Args:
            stage: the stage.
            changes: of the expected values.
            limited: a context that raises a TimeoutError if numbers of the specification, or parts
                of the layer, exceed the limit of work.
        """
        index, known = self.step_of[stage], stage_named(stage)
        values = self._until(index, (changes, "float64", "", ALL))[0]
        expected = self.stage(stage, changes)
        actual = self._actual(stage, expected)
        if actual.shape != expected.shape:
            return None

        again = copy(self)  # so that results of known bugs stay cached
        again._layers, again._found, again._bytes = {}, {}, 0

        def recompute(change: Change) -> np.ndarray:
            with limited():
                return again.stage(stage, (*changes, change))

        return describe(
            stage,
            actual,
            expected,
            self.allowed(stage, changes),
            hidden=None if known.is_exact else values.get(str(Stage("mask", step=known.step))),
            problem=self.problem,
            recompute=recompute,
            others={
                name: x
                for name, x in values.items()
                if self.step_of[name] <= index and name != stage
            },
            unused=self._masked.get(stage),
        )


class WholeReplay(Replay):
    """The replay of a large layer as a whole: its right stages are those of the reference, which
    may lack scores.

    It answers if a stage agrees. Stages after the scores cannot be computed with changes.
    """

    @cached_property
    def by_step(self) -> list[dict[str, np.ndarray]]:
        """Every stage of the right layer that the reference stores, step by step."""
        return [] if self._reference is None else _by_step(self._reference.accumulated)

    def agrees(
        self,
        stage: str,
        actual: np.ndarray,
        changes: Changes = (),
        unused: np.ndarray | None = None,
        form: Form = np.asarray,
    ) -> bool:
        """Return True if an array is a stage with changes. Some values reject an array that is far
        off.
        """
        expected = form(self.stage(stage, changes))
        if actual.shape == expected.shape and not stage_named(stage).is_exact and unused is None:
            step = (
                max(1, expected.size // SOME_VALUES) | 1
            )  # odd, so that every row has other features
            some = expected.ravel()[::step]
            size, error = (
                norms_of(some, np.isfinite(some)),
                norms_of(actual.ravel()[::step] - some, np.isfinite(some)),
            )
            if error["rms"] > FAR_OFF * size["rms"]:
                return False
        return super().agrees(stage, actual, changes, unused, form)

    def _known(self, layer: _Layer) -> Sequence[dict[str, np.ndarray]]:
        changes, dtype, kind, _ = layer
        if self._reference is None or changes or self.choice.in_reference or dtype == "float64":
            return ()
        arithmetic = kind or self.choice.arithmetic or self.arithmetic
        return _by_step(self._reference.same_precision(local=False, arithmetic=arithmetic))


def _by_step(values: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return stages by the steps of a layer without a cache; a step whose stages are not stored is
    empty.
    """
    steps: dict[str, dict[str, np.ndarray]] = {name: {} for name in STEPS}
    for name, x in values.items():
        if not stage_named(name).is_gradient:
            _, step = step_of(name)
            steps[step][name] = x
    return list(steps.values())


def _compared_cells(
    actual: np.ndarray, expected: np.ndarray, masked: np.ndarray | None, stage: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return a stage and its expected values such that a comparison leaves out masked cells."""
    if masked is None:
        return actual, expected
    if stage_named(stage).is_exact:
        return np.where(masked, expected, actual), expected
    return without_unused(actual, masked), without_unused(expected, masked)
