"""The reference, computed again with edits, from the observed stages before each stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from parity.explain.diagnosis.absorbed import DeferredHeads
from parity.explain.diagnosis.bugs import (
    bugs_from_call,
    bugs_of_overflow,
    edited_layer,
    low_products,
    own_bugs,
    permuted_heads,
    precision_bugs,
    structural_bugs,
)
from parity.explain.diagnosis.bugs.record import Edit, Edits
from parity.explain.diagnosis.choices import AS_THE_REFERENCE, Choice
from parity.explain.diagnosis.fits import Description, describe
from parity.explain.diagnosis.flow import Flow, flow_of
from parity.explain.diagnosis.remembered import Remembered
from parity.explain.diagnosis.work import run, spend_on
from parity.measure.core.compare import (
    NOT_MEASURED,
    NOTHING,
    SAME_PRECISION,
    Deviation,
    budget,
    deviation_of,
    errors_in_norms,
    is_close,
    norms_of,
    size_of,
    unit_of_rounding,
)
from parity.measure.core.problem import Problem
from parity.measure.core.stages import STEPS, STEPS_OF_A_CALL, Stage, Step, stage_named
from parity.measure.core.trace import RECOUNTS, Reference, nudged, nudged_values, step_of
from parity.measure.core.unused import without_unused
from parity.measure.core.weights import is_floating

Form = Callable[[np.ndarray], np.ndarray]
"""Turns a stage of the reference into the form in which it was recorded."""

ALL = "qkv"
"""Stages of a step that projects, by default."""

SOME_VALUES = 4096
"""The number of values that decide whether a stage is far off."""

FAR_OFF_IN_SEQUENCE = 0.1
"""The error of a sequence, as a share of its values, that is not rounding in any dtype."""

FAR_OFF_SHARE = 0.5
"""The error of a stage, as a share of its size, that no rounding explains."""

WIDE_ENOUGH = ("float32", "float64")
"""Dtypes in which every loss of precision shows. Narrow values may round to themselves."""

MOST_KEPT = 1024
"""Layers that are kept with their computed steps."""

MOST_BYTES = 2**29
"""Bytes of their steps."""


class LayerKey(NamedTuple):
    """The settings on which the steps of a layer depend.

    Attributes:
        edits: its edits.
        dtype: the dtype that it is computed in.
        arithmetic: its arithmetic; empty for the hardware's.
        requested: the projections that are computed, some of `ALL`.
    """

    edits: Edits
    dtype: str
    arithmetic: str
    requested: str


@dataclass(eq=False)
class _EditedLayer:
    """A layer with edits, and the steps of it that were computed.

    Attributes:
        key: the settings on which its steps depend.
        overridden: the methods that its edits override.
        is_replaced: True if all of the layer is replaced, so that no step is a step of the right
            one.
        is_registered: True if code of a user or another package may run.
        is_in_some_calls: True if some calls of a cache lack some of its edits.
        steps: its steps as functions; None until the first of them runs.
        computed: the stages of each computed step.
    """

    key: LayerKey
    overridden: set[str] = field(default_factory=set)
    is_replaced: bool = False
    is_registered: bool = False
    is_in_some_calls: bool = False
    steps: Sequence[Step] | None = None
    computed: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)


def remembering(remembered: Remembered | None = None) -> Edit:
    """Return an edit that changes nothing, and computes each projection, table and wide weight once
    for each arithmetic.

    It must be the innermost edit, and serve layers with the same weights and inputs.
    """
    if remembered is None:
        remembered = Remembered()
    return Edit(
        overrides={
            "linear": remembered.linear,
            "tables": remembered.tables,
            "wide_weight": remembered.wide_weight,
        }
    )


@dataclass(frozen=True)
class Scope:
    """Limits of a search.

    Attributes:
        compared_stages: names of the stages to compare; all observed stages by default.
        only: names or descriptions of the bugs to try; all known bugs by default.
        is_quick: True to try single bugs only, and to leave unexplained stages without a
            description.
        is_one_by_one: True to try single bugs only, and to let every wrong stage after an
            unexplained one follow from it.
    """

    compared_stages: frozenset[str] | None = None
    only: frozenset[str] | None = None
    is_quick: bool = False
    is_one_by_one: bool = False


EVERYTHING = Scope()


class Trial:
    """Stages of a problem with edits, each computed from the observed stages before it.

    It answers every question of the diagnosis: the values of a stage with an edit, their tolerance,
    and whether only rounding remains. Results are cached, and work is counted. Without observed
    stages, every stage is computed from its own stages before it.

    Attributes:
        observed: the stages, in the reference's shapes.

    Args:
        problem: the case, weights and inputs.
        observed: observed stages, in the reference's shapes.
        arithmetic: arithmetic of the hardware.
        choice: an allowed way to compute in the same precision.
        base: the innermost edit of every layer, see `remembering`.
        scope: the stages to compare, and the bugs to try.
        reference: reference of the problem; its stages are not computed again.
        candidates: edits to try after the known bugs, of one who knows more than the stages.
    """

    def __init__(
        self,
        problem: Problem,
        observed: Mapping[str, np.ndarray],
        arithmetic: str,
        choice: Choice = AS_THE_REFERENCE,
        *,
        base: Edit | None = None,
        scope: Scope = EVERYTHING,
        reference: Reference | None = None,
        candidates: Edits = (),
    ) -> None:
        self.problem = problem
        self.arithmetic = arithmetic
        self.choice = choice
        self.scope = scope
        self._base = remembering() if base is None else base
        self._reference = reference
        self._candidates = candidates
        self._is_nudged = False
        # A trial without observed stages is its own right layer.
        self._right: Trial | None = None
        self._observe({}, {})
        if observed:
            self._right = copy(self)
            self._observe(observed, {})

    def _observe(
        self, observed: Mapping[str, np.ndarray], masked: Mapping[str, np.ndarray]
    ) -> None:
        """Start with other stages, and cells of them that are not compared."""
        # Gradients are not explained: the reference's steps do not have them.
        self.observed = {name: x for name, x in observed.items() if name in self.right.values}
        self._masked = masked
        self._forget()

    def observing(
        self, observed: Mapping[str, np.ndarray], masked: Mapping[str, np.ndarray]
    ) -> Trial:
        """Return the trial of other stages, and cells of them that are not compared."""
        other = copy(self)
        other._right = self.right
        other._observe(observed, masked)
        return other

    def with_choice(self, choice: Choice) -> Trial:
        """Return the trial with a different choice; it shares the results in float64."""
        other = copy(self)
        other.choice = choice
        other._forget()
        for key, layer in self._layers.items():
            if key.dtype == "float64":
                other._layers[key] = layer
        return other

    def computed_otherwise(self, edit: Edit) -> Trial:
        """Return the trial of the same stages and of a layer that is right as well, but differs
        from the reference in cells that are not compared.

        Args:
            edit: what it computes otherwise. It becomes the innermost edit of every layer.
        """
        base = replace(self._base, overrides={**self._base.overrides, **edit.overrides})
        right = copy(self.right)
        other = copy(self)
        for trial in (right, other):
            trial._base = base
            trial._reference = None
            vars(trial).pop("by_step", None)
            vars(trial).pop("values", None)
        right._forget()
        other._right = right
        other._observe(self.observed, self._masked)
        return other

    def _forget(self) -> None:
        """Start without cached results."""
        for name in ("stages", "_unobserved_before", "_recounts", "_is_not_finite_alone"):
            vars(self).pop(name, None)
        self._structural_by_steps: dict[frozenset[str], list[Edit]] = {}
        self._losses_by_steps: dict[frozenset[str], list[Edit]] = {}
        self._known_from_call: dict[int, list[Edit]] = {}
        self._layers: dict[LayerKey, _EditedLayer] = {}
        self._bytes = 0
        self._budgets: dict[tuple[Any, ...], dict[str, float]] = {}
        self._deviations: dict[tuple[Any, ...], Deviation] = {}
        self._errors: dict[tuple[str, Edits], dict[str, float]] = {}

    # ---- The right layer -------------------------------------------------------------------------

    @property
    def right(self) -> Trial:
        """The trial without observed stages."""
        return self if self._right is None else self._right

    @cached_property
    def by_step(self) -> list[dict[str, np.ndarray]]:
        """Every stage of the right layer in float64, from its own stages before it, step by
        step.
        """
        if self._right is not None:
            return self._right.by_step
        if self._reference is not None:
            return self._reference.by_step("float64", self.arithmetic)
        steps: list[dict[str, np.ndarray]] = []
        values: dict[str, np.ndarray] = {}
        for step in self._steps(LayerKey((), "float64", "", ALL)):
            with np.errstate(all="ignore"):
                steps.append(run(step, values))
            values |= steps[-1]
        return steps

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """The stages of the right layer by name."""
        return {name: x for step in self.by_step for name, x in step.items()}

    @cached_property
    def steps(self) -> list[list[str]]:
        """The names of the stages of each step."""
        return [list(step) for step in self.by_step]

    @cached_property
    def step_of(self) -> dict[str, int]:
        """The step of each stage."""
        return {name: index for index, names in enumerate(self.steps) for name in names}

    # ---- The compared stages, and the bugs that could change them --------------------------------

    @cached_property
    def stages(self) -> list[str]:
        """The names of the compared stages, in the order of the data flow."""
        stages = [name for name in self.values if name in self.observed]
        compared_stages = self.scope.compared_stages
        if compared_stages is None:
            return stages
        return [name for name in stages if name in compared_stages]

    def of_path(self, path: str) -> list[str]:
        """Return the compared stages of a path of a module; for an empty path, of the stage
        functions.
        """
        return [name for name in self.stages if stage_named(name).path == path]

    def known_at(self, index: int, *, with_losses: bool) -> list[Edit]:
        """Return the known bugs that could change a step, or an earlier one that it depends on and
        that was not observed; usual ones first.

        Args:
            index: index of the step.
            with_losses: include bugs that only lose precision, last. They are many.
        """
        steps = STEPS_OF_A_CALL if self.problem.case.is_cached else STEPS
        kinds = {steps[number % len(steps)] for number in (*self._unobserved_before[index], index)}
        known = [*self._structural(frozenset(kinds))]
        known += self._from_call_of(index, kinds)
        if with_losses:
            known += self._losses(frozenset(kinds))
        return known

    def _from_call_of(self, index: int, kinds: Collection[str]) -> list[Edit]:
        """Return the bugs of a cache that begin in the call of a step.

        Args:
            index: index of the step.
            kinds: kinds of the steps that these bugs may change.
        """
        call = stage_named(self.steps[index][0]).step
        changed = {"mask", "cache"}
        if call == 0:
            changed.add("qkv")
        if call is None or changed.isdisjoint(kinds):
            return []
        if call not in self._known_from_call:
            known = bugs_from_call(self.problem.case, call, self.observed)
            self._known_from_call[call] = self._in_scope(known)
        return self._known_from_call[call]

    @property
    def known(self) -> list[Edit]:
        """The known bugs that could affect the compared stages, in every call of a cache."""
        steps = frozenset(STEPS_OF_A_CALL)
        return [*self._structural(steps), *self._losses(steps)]

    def _structural(self, steps: frozenset[str]) -> list[Edit]:
        """Return the known bugs that could change one of some steps, without lost precision."""
        if steps not in self._structural_by_steps:
            case = self.problem.case
            known = [*structural_bugs(case, steps), *own_bugs(case)]
            if "qkv" in steps:
                known += permuted_heads(self.values, self.observed)
            if self._is_not_finite_alone:
                known += bugs_of_overflow(case, steps)
            known += self._candidates
            self._structural_by_steps[steps] = self._in_scope(known)
        return self._structural_by_steps[steps]

    @cached_property
    def _is_not_finite_alone(self) -> bool:
        """True if an observed stage is NaN or infinite where the right layer is finite."""
        for name, actual in self.observed.items():
            expected = self.values[name]
            if stage_named(name).is_exact or actual.shape != expected.shape:
                continue
            if (np.isfinite(expected) & ~np.isfinite(actual)).any():
                return True
        return False

    def _losses(self, steps: frozenset[str]) -> list[Edit]:
        """Return the bugs that lose precision in one of some steps, and show in the dtype."""
        if steps not in self._losses_by_steps:
            losses = precision_bugs(self.problem.case, steps)
            # Tensix rounds the factors of products itself.
            if not self.arithmetic.startswith("tensix"):
                losses += low_products(self.problem.case)
            if self.problem.dtype not in WIDE_ENOUGH:
                losses = [bug for bug in losses if bug.shows_in_narrow]
            self._losses_by_steps[steps] = self._in_scope(losses)
        return self._losses_by_steps[steps]

    def _in_scope(self, known: list[Edit]) -> list[Edit]:
        """Return the bugs among these that the search tries."""
        only = self.scope.only
        if only is None:
            return known
        return [bug for bug in known if bug.name in only or bug.about in only]

    # ---- Stages with edits -----------------------------------------------------------------------

    def stage(
        self, name: str, edits: Edits = (), dtype: str = "float64", arithmetic: str = ""
    ) -> np.ndarray:
        """Return a stage with edits, in a dtype and an arithmetic, by default the hardware's."""
        return self.computed(self.step_of[name], edits, dtype, arithmetic, name)[name]

    def computed(
        self,
        index: int,
        edits: Edits,
        dtype: str = "float64",
        arithmetic: str = "",
        stage: str = "",
    ) -> dict[str, np.ndarray]:
        """Return a step with edits, or at least one stage of it if only that is requested."""
        if not (edits or self.observed):
            known = self._of_reference(dtype, arithmetic)
            if known:
                return known[index]
        whole = self._layer(LayerKey(edits, dtype, arithmetic, ALL))
        if index in whole.computed:
            return whole.computed[index]
        quantity = stage_named(stage).quantity if stage and self.observed else ""
        if quantity not in ("q", "k", "v"):
            return self._until(index, whole)[1]
        # One of three projections costs a third.
        part = self._layer(whole.key._replace(requested=quantity))
        if index in part.computed:
            return part.computed[index]
        try:
            return self._until(index, part)[1]
        except KeyError:  # a bug confuses two of them
            return self._until(index, whole)[1]

    def _layer(self, key: LayerKey) -> _EditedLayer:
        """Return a layer with edits, and what was computed of it."""
        if key in self._layers:
            return self._layers[key]
        layer = _EditedLayer(key)
        layer.is_replaced = key.dtype != "float64" or key.arithmetic != "" or not self._flow
        for edit in key.edits:
            layer.overridden.update(edit.overrides)
            layer.is_replaced |= edit.spec is not None
            layer.is_registered |= edit.is_registered
            layer.is_in_some_calls |= edit.calls is not None
        self._layers[key] = layer
        return layer

    def _until(
        self, index: int, layer: _EditedLayer
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the values before a step of a layer, and the step; empty arrays if edits do not
        fit together.

        It runs the earlier steps that later ones depend on and that were not observed. Steps
        without an edit are the right layer's.
        """
        values = dict(self.observed)
        changed = set(self.observed)
        step: dict[str, np.ndarray] = {}
        try:
            for number in (*self._unobserved_before[index], index):
                for name, x in step.items():
                    if name not in self.observed:
                        values[name] = x
                of_call = self._in_call_of(number, layer)
                if self._is_right(number, of_call, changed):
                    step = self.by_step[number]
                else:
                    step = self._run(number, layer, of_call, values)
                    changed.update(step)
        except ValueError:
            step = {name: np.empty(0) for name in self.steps[index]}
            self._keep(index, layer, step)
        return values, step

    def _in_call_of(self, index: int, layer: _EditedLayer) -> _EditedLayer:
        """Return a layer with only the edits that the call of a step has."""
        if not layer.is_in_some_calls:
            return layer
        call = stage_named(self.steps[index][0]).step
        edits = layer.key.edits
        of_call = tuple(edit for edit in edits if edit.calls is None or call in edit.calls)
        return self._layer(layer.key._replace(edits=of_call))

    def _is_right(self, index: int, layer: _EditedLayer, changed: set[str]) -> bool:
        """Return True if a step calls no overridden method, and reads no changed stage."""
        if layer.is_replaced:
            return False
        flow = self._flow[index]
        return flow.methods.isdisjoint(layer.overridden) and flow.reads.isdisjoint(changed)

    def _run(
        self,
        index: int,
        layer: _EditedLayer,
        of_call: _EditedLayer,
        values: Mapping[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Return a step of a layer, after the steps before it.

        Args:
            index: number of the step.
            layer: the layer. It keeps the step, since an edit of one call reaches later ones.
            of_call: the layer with the edits of this call alone.
            values: the stages before.

        Raises:
            ValueError: if edits do not fit together, or a registered bug fails.
        """
        if index in layer.computed:
            step = layer.computed[index]
            # `_until` leaves empty arrays where edits did not fit together.
            if next(iter(step.values())).shape == (0,):
                raise ValueError("edits do not fit together")
            return step
        try:
            if of_call.steps is None:
                of_call.steps = self._steps(of_call.key)
            with np.errstate(all="ignore"):
                step = run(of_call.steps[index], values)
        except (KeyboardInterrupt, TimeoutError, ValueError):
            raise
        except BaseException as error:  # code of another package may raise anything
            if not of_call.is_registered:
                raise
            raise ValueError("a registered bug fails") from error
        if of_call.is_registered:
            step = self._with_every_stage(index, of_call.key.requested, step)
        self._keep(index, layer, step)
        return step

    def _with_every_stage(
        self, index: int, requested: str, step: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return a step of a layer that has a registered bug, with empty arrays for stages that it
        lacks, such as the gate.

        Raises:
            ValueError: if the bug returned something else than stages.
        """
        names = self.steps[index]
        if not _are_stages(step, names):
            raise ValueError("a registered bug returns something else than stages")
        if requested != ALL:
            names = [name for name in names if stage_named(name).quantity == requested]
        missing = {name: np.empty(0) for name in names if name not in step}
        return step | missing

    def _of_reference(self, dtype: str, arithmetic: str) -> Sequence[dict[str, np.ndarray]]:
        """Return the stages of the right layer that are already computed, step by step; none if the
        steps of the dtype and the arithmetic are not.
        """
        if arithmetic:
            return ()
        if dtype == "float64":
            return self.by_step
        if self._reference is None or self.choice.overrides or self.choice.arithmetic:
            return ()
        if dtype != SAME_PRECISION[self.problem.dtype]:
            return ()
        return self._reference.by_step(dtype, self.arithmetic)

    def _steps(self, key: LayerKey) -> Sequence[Step]:
        """Return the steps of the reference with edits, as functions."""
        edits = key.edits
        arithmetic = key.arithmetic
        # A choice of precision concerns the noise, not the expected values.
        if key.dtype != "float64":
            edits = (*edits, Edit(overrides=self.choice.overrides))
            arithmetic = arithmetic or self.choice.arithmetic
        return edited_layer(
            self.problem,
            key.dtype,
            (*edits, self._base),
            arithmetic or self.arithmetic,
            key.requested,
        ).steps()

    def _keep(self, index: int, layer: _EditedLayer, step: dict[str, np.ndarray]) -> None:
        """Keep a step, and forget all edited layers but its own if there are too many."""
        layer.computed[index] = step
        self._layers[layer.key] = layer
        self._bytes += _num_bytes(step)
        if len(self._layers) <= MOST_KEPT and self._bytes <= MOST_BYTES:
            return
        self._layers = {
            key: other for key, other in self._layers.items() if not key.edits or other is layer
        }
        self._bytes = 0
        for other in self._layers.values():
            for values in other.computed.values():
                self._bytes += _num_bytes(values)

    def cost(self, index: int, edit: Edit) -> int:
        """Return the number of steps from the first that an edit changes to a different one: these
        are computed again.
        """
        for step, flow in enumerate(self._flow[1 : index + 1], 1):
            if not flow.methods.isdisjoint(edit.overrides):
                return index - step
        return 0

    @cached_property
    def _flow(self) -> list[Flow]:
        """Return the dependencies of each step of the right layer; empty for nudged values."""
        if self._is_nudged:
            return []
        return flow_of(self.problem) if self._right is None else self._right._flow

    @cached_property
    def _unobserved_before(self) -> list[list[int]]:
        """Return for each step the earlier steps that it depends on and that were not observed.

        The results of a module in one call affect only the module itself in the next, and nothing
        else does.
        """
        unobserved: dict[bool, list[int]] = {False: [], True: []}
        before: list[list[int]] = []
        for index, names in enumerate(self.steps):
            # A step has either stages of the stage functions, or of paths of the module.
            is_module = any(stage_named(name).path for name in names)
            before.append([*unobserved[is_module]])
            for name in names:
                if name not in self.observed and not stage_named(name).is_end:
                    unobserved[is_module].append(index)
                    break
        return before

    def is_unobserved(self, index: int) -> bool:
        """Return True if a step depends on an earlier one that was not observed."""
        return bool(self._unobserved_before[index])

    # ---- Tolerances ------------------------------------------------------------------------------

    def deviation(
        self, stage: str, edits: Edits, *, quick: bool = False, arithmetic: str = ""
    ) -> Deviation:
        """Compare an observed stage with the one that has edits.

        Args:
            stage: the stage.
            edits: edits of the expected values.
            quick: use approximately the budget of the right layer.
            arithmetic: the one that determines the budget; by default the hardware's.
        """
        key = (stage, edits, quick, arithmetic)
        if key not in self._deviations:
            self._deviations[key] = self._compute_deviation(*key)
        return self._deviations[key]

    def _compute_deviation(
        self, stage: str, edits: Edits, quick: bool, arithmetic: str
    ) -> Deviation:
        expected = self.stage(stage, edits)
        if self.observed[stage].shape != expected.shape:
            return NOT_MEASURED
        spend_on(expected)
        compared = self.compared(stage, expected)
        if quick and self._is_noise_known(stage):
            return deviation_of(*compared, self._about_allowed(stage, expected), stage)
        allowed = self.allowed(stage, edits, arithmetic)
        deviation = deviation_of(*compared, allowed, stage)
        if not is_close(deviation.ratio) or any(edit.is_loss for edit in edits):
            return deviation
        for recount in self._recounts:
            again = recount.allowed(stage, edits, arithmetic)
            allowed = {norm: max(limit, again[norm]) for norm, limit in allowed.items()}
        return deviation_of(*compared, allowed, stage)

    def errors(self, stage: str, edits: Edits) -> dict[str, float]:
        """Return the error of an observed stage with edits in each norm that needs no budget, which
        costs as much as the stage itself; an empty dict for a different shape.
        """
        key = (stage, edits)
        if key not in self._errors:
            expected = self.stage(stage, edits)
            if self.observed[stage].shape != expected.shape:
                return {}
            spend_on(expected)
            self._errors[key] = errors_in_norms(*self.compared(stage, expected), stage)
        return self._errors[key]

    def compared(self, stage: str, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return an observed stage and its expected values without the cells that are not
        compared.
        """
        return _compared_cells(self.observed[stage], expected, self._masked.get(stage), stage)

    def sequences_far_off(self, stage: str, edits: Edits) -> frozenset[int]:
        """Return the sequences of a batch in which an observed stage differs from the one that has
        edits by more than any rounding.
        """
        actual, expected = self.compared(stage, self.stage(stage, edits))
        if actual.shape != expected.shape or len(actual) != self.problem.case.batch:
            return frozenset()
        far_off: set[int] = set()
        for sequence, values in enumerate(expected.astype(np.float64)):
            with np.errstate(invalid="ignore"):
                error = size_of(actual[sequence].astype(np.float64) - values)
            if error > FAR_OFF_IN_SEQUENCE * size_of(values):
                far_off.add(sequence)
        return frozenset(far_off)

    def distance(self, stage: str, expected: np.ndarray) -> float:
        """Return the mean absolute difference of an observed stage, without the cells that are not
        compared.

        A number in the middle between two narrower ones may be rounded either way. A few such
        values decide the largest difference, but not the mean.

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
        actual = self.observed[stage]
        masked = self._masked.get(stage)
        if masked is None or expected.shape != actual.shape:
            return actual
        return np.where(masked, expected, actual).astype(actual.dtype)

    def agrees(
        self,
        stage: str,
        actual: np.ndarray,
        edits: Edits = (),
        unused: np.ndarray | None = None,
        form: Form = np.asarray,
    ) -> bool:
        """Return True if an array is a stage with edits, in a form, up to rounding, except in
        unused cells.
        """
        expected = form(self.stage(stage, edits))
        if actual.shape != expected.shape:
            return False
        spend_on(expected)
        actual, expected = _compared_cells(actual, expected, unused, stage)
        return (
            deviation_of(actual, expected, self.allowed(stage, edits, form=form), stage).ratio
            <= 1.0
        )

    def allowed(
        self,
        stage: str,
        edits: Edits,
        arithmetic: str = "",
        dtype: str = "",
        form: Form = np.asarray,
    ) -> dict[str, float]:
        """Return the budget of a stage with edits, in a form; in a dtype, by default the
        problem's.
        """
        if stage_named(stage).is_exact:
            return NOTHING
        key = (stage, edits, arithmetic, dtype, form)
        if key not in self._budgets:
            dtype = dtype or self.problem.dtype
            expected = form(self.stage(stage, edits)).astype(np.float64)
            same_precision = form(self.stage(stage, edits, SAME_PRECISION[dtype], arithmetic))
            # An infinite value has no error to allow: it must be the same one.
            expected = np.where(np.isinf(expected), np.nan, expected)
            spend_on(expected)
            with np.errstate(all="ignore"):
                self._budgets[key] = budget(
                    expected, same_precision, dtype, arithmetic=self.arithmetic, stage=stage
                )
        return self._budgets[key]

    def _is_noise_known(self, stage: str) -> bool:
        """Return True if the noise of a stage with an edit is about the noise of the right one."""
        # What a quantized cache may round either way depends on the edit.
        if self.problem.case.cache_quantization is not None:
            return False
        # A cache has copies, which are exact, and values that an edit computes are not.
        if stage_named(stage).quantity.startswith("cache."):
            return False
        # In 16 bits the right layer may overflow where one with an edit does not.
        return all(math.isfinite(limit) for limit in self.allowed(stage, ()).values())

    def _about_allowed(self, stage: str, expected: np.ndarray) -> dict[str, float]:
        """Return the budget of the right layer for values of a different size: noise grows with
        them.
        """
        if stage_named(stage).is_exact:
            return NOTHING
        size = size_of(expected)
        right_size = size_of(self.stage(stage))
        growth = 1.0
        if right_size > 0.0:
            growth = max(size / right_size, 1.0)
        return {norm: growth * limit for norm, limit in self.allowed(stage, ()).items()}

    @cached_property
    def _recounts(self) -> list[Trial]:
        """The trial with inputs and stages that are off by a random unit of rounding, several
        times: one run is one sample of the noise.

        They decide if a bug explains nearly everything, see
        `parity.measure.core.trace.Reference.recounted`.
        """
        dtype = SAME_PRECISION[self.problem.dtype]
        if dtype != "float32":
            return []
        rng = np.random.default_rng(0)
        recounts: list[Trial] = []
        for _ in range(RECOUNTS):
            other = copy(self)
            other.problem = nudged(self.problem, rng)
            other.observed = nudged_values(self.observed, unit_of_rounding(dtype), rng)
            other._base = replace(
                self._base, overrides={**self._base.overrides, **remembering().overrides}
            )
            other._is_nudged = True
            vars(other).pop("_flow", None)
            other._forget()
            recounts.append(other)
        return recounts

    # ---- Explanations ----------------------------------------------------------------------------

    def wrong(self, stages: Iterable[str], edits: Edits) -> list[str]:
        """Return the stages that edits do not explain."""
        wrong: list[str] = []
        for stage in stages:
            if self.deviation(stage, edits).ratio > 1.0:
                wrong.append(stage)
        return wrong

    def is_right_as_a_whole(self, stage: str, edits: Edits) -> bool:
        """Return True if a stage equals the one of the layer with edits, whatever was observed
        before.
        """
        return self.right.agrees(stage, self.observed[stage], edits, self._masked.get(stage))

    def is_computed_from(self, stage: str, names: Collection[str], edits: Edits) -> bool:
        """Return True if the expected values of a stage depend on some of the observed stages."""
        if not names:
            return False
        others = {name: x for name, x in self.observed.items() if name not in names}
        without = self.observing(others, self._masked).stage(stage, edits)
        return not np.array_equal(without, self.stage(stage, edits), equal_nan=True)

    def explained(self, stages: Iterable[str], edits: Edits, added: Edits) -> list[str]:
        """Return the stages that are wrong with some edits, and right with more."""
        if not added:
            return []
        wrong = self.wrong(stages, edits)
        still_wrong = self.wrong(wrong, (*edits, *added))
        return [stage for stage in wrong if stage not in still_wrong]

    def leaves(self, index: int, edits: Edits, added: Edits, names: Iterable[str] = ()) -> bool:
        """Return True if more edits leave stages of a step, or the whole step, unchanged."""
        before = self.computed(index, edits)
        after = self.computed(index, (*edits, *added))
        return all(
            np.array_equal(before[name], after[name], equal_nan=True)
            for name in names or self.steps[index]
        )

    def describe(
        self,
        stage: str,
        edits: Edits,
        limited: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Description | None:
        """Describe where and by which pattern a stage differs from the one with edits; None if its
        shape differs.

        Args:
            stage: the stage.
            edits: edits of the expected values.
            limited: a context that raises a TimeoutError if parameters of the specification, or
                parts of the layer, exceed the limit of work.
        """
        expected = self.stage(stage, edits)
        actual = self._actual(stage, expected)
        if actual.shape != expected.shape:
            return None
        index = self.step_of[stage]
        before = self._until(index, self._layer(LayerKey(edits, "float64", "", ALL)))[0]
        others = {
            name: x for name, x in before.items() if self.step_of[name] <= index and name != stage
        }
        hidden = None
        if not stage_named(stage).is_exact:
            hidden = before.get(str(Stage("mask", step=stage_named(stage).step)))

        again = copy(self)  # so that results of known bugs stay cached
        again._layers, again._bytes = {}, 0

        def recompute(edit: Edit) -> np.ndarray:
            with limited():
                return again.stage(stage, (*edits, edit))

        return describe(
            stage,
            actual,
            expected,
            self.allowed(stage, edits),
            hidden=hidden,
            problem=self.problem,
            recompute=recompute,
            others=others,
            unused=self._masked.get(stage),
        )


class WholeTrial(Trial):
    """The trial of a large layer as a whole: its right stages are the reference's, which may
    lack scores.

    It answers whether a stage agrees. Stages after the scores cannot be computed with edits.
    """

    @cached_property
    def by_step(self) -> list[dict[str, np.ndarray]]:
        """Every stage of the right layer that the reference stores, step by step."""
        return [] if self._reference is None else _by_step(self._reference.accumulated)

    def agrees(
        self,
        stage: str,
        actual: np.ndarray,
        edits: Edits = (),
        unused: np.ndarray | None = None,
        form: Form = np.asarray,
    ) -> bool:
        """Return True if an array is a stage with edits. Some values reject an array that is far
        off.
        """
        expected = form(self.stage(stage, edits))
        if actual.shape == expected.shape and not stage_named(stage).is_exact and unused is None:
            # An odd step, so that every row has other features.
            step = max(1, expected.size // SOME_VALUES) | 1
            some = expected.ravel()[::step]
            error = norms_of(actual.ravel()[::step] - some, np.isfinite(some))["rms"]
            if error > FAR_OFF_SHARE * size_of(some):
                return False
        return super().agrees(stage, actual, edits, unused, form)

    def _of_reference(self, dtype: str, arithmetic: str) -> Sequence[dict[str, np.ndarray]]:
        if dtype == "float64":
            return () if arithmetic else self.by_step
        if self._reference is None or self.choice.overrides:
            return ()
        arithmetic = arithmetic or self.choice.arithmetic or self.arithmetic
        return _by_step(self._reference.same_precision(local=False, arithmetic=arithmetic))


def _are_stages(step: Any, names: Iterable[str]) -> bool:
    """Return True for stages by name, of some names: arrays of real numbers or truth values, or
    deferred heads.
    """
    if not isinstance(step, dict) or not step or not step.keys() <= set(names):
        return False
    for x in step.values():
        is_array = isinstance(x, np.ndarray) and (is_floating(x.dtype) or x.dtype.kind in "biu")
        if not is_array and not isinstance(x, DeferredHeads):
            return False
    return True


def _num_bytes(step: Mapping[str, np.ndarray]) -> int:
    """Return the size of the stages of a step."""
    return sum(x.nbytes for x in step.values())


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
    """Return a stage and its expected values such that a comparison leaves out masked cells, and
    equal infinite values.
    """
    if stage_named(stage).is_exact:
        if masked is None:
            return actual, expected
        return np.where(masked, expected, actual), expected
    if masked is not None:
        actual, expected = without_unused(actual, masked), without_unused(expected, masked)
    if not np.isinf(expected).any():
        return actual, expected
    # NaN equals NaN in a comparison, and infinity does not equal infinity.
    is_same = np.isinf(expected) & (actual == expected)
    nan = np.full((), np.nan, actual.dtype)
    return np.where(is_same, nan, actual), np.where(is_same, nan.astype(expected.dtype), expected)
