"""Find out why gradients differ from the reference's.

The forward stages are diagnosed first. If one of them is wrong, the gradients follow from it.
Otherwise the gradients are searched in the order of the backward data flow, by the same search as
stages, for bugs of the backward pass; and for bugs of the forward pass if no stage shows that it is
right. All gradients are computed from the inputs: no observed gradient replaces one of the
reference, because a right one may be rounded differently in each implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from mha_spec import InputError
from parity.explain.diagnosis.bugs import GRADIENTS, bugs_for, known_bugs
from parity.explain.diagnosis.bugs.backward import (
    bias_sums_in,
    dropout_of,
    gradients_of_sequences,
    multiplied,
    of_dropout,
    of_sequences,
)
from parity.explain.diagnosis.bugs.record import Edit, Edits
from parity.explain.diagnosis.changed_backward import edited_backward
from parity.explain.diagnosis.choices import HALF
from parity.explain.diagnosis.dropout import dropout_factors, redrawn_dropout
from parity.explain.diagnosis.findings import Diagnosis
from parity.explain.diagnosis.flow import Flow
from parity.explain.diagnosis.readings import in_axes
from parity.explain.diagnosis.search import SearchResult, search
from parity.explain.diagnosis.trial import WIDE_ENOUGH, Form, LayerKey, Scope, Trial, remembering
from parity.explain.diagnosis.work import Work
from parity.measure.core.blas import single_threaded
from parity.measure.core.compare import SAME_PRECISION, Deviation, budget
from parity.measure.core.problem import Problem
from parity.measure.core.reference import STAGES_BETWEEN
from parity.measure.core.stages import (
    FUSED_PATHS,
    STAGES,
    Step,
    Values,
    did_you_mean_stage,
    stage_named,
)
from parity.measure.core.trace import Reference
from parity.measure.core.weights import is_floating
from parity.measure.text import some_of

BIAS_SUMS = "gradients of biases are summed in {dtype}"
"""A description of an allowed way to compute in 16 bits."""

LEAST_FACTOR = 1e-3
"""The least distance of a common factor of all gradients from 0 and 1."""

LEAST_ELEMENTS = 4
"""The least number of elements of a gradient in which sequences are recognized."""

MOST_SEQUENCES = 16
"""The largest batch of which the sequences in a gradient are fitted."""

LEAST_SHARE = 0.05
"""The share of a gradient that rounding to 16 bits does not change, and a missing sequence does.
What is fitted with it is tried like any other bug, within the budget.
"""

ONE_BY_ONE = Scope(is_one_by_one=True)
"""Two bugs at once explain too much if no gradient is computed from an observed one."""


# ---- Names ---------------------------------------------------------------------------------------


def unknown_names(names: Sequence[str], problem: Problem) -> list[str]:
    """Return the names that are neither stages nor gradients of a problem."""
    return [name for name in names if not _is_of_problem(name, problem)]


def _is_of_problem(name: str, problem: Problem) -> bool:
    stage, case = stage_named(name), problem.case
    if stage.is_gradient:
        return _is_gradient_of(name, problem)
    if stage.kind not in STAGES or (stage.step is not None) != case.is_cached:
        return False
    if stage.step is not None and stage.step >= len(case.chunks):
        return False
    if stage.quantity == "gate":
        return case.spec.gate is not None
    if stage.quantity.endswith("latents"):
        return case.spec.latent is not None
    return case.is_cached or not stage.quantity.startswith("cache.")


def _is_gradient_of(name: str, problem: Problem) -> bool:
    stage = stage_named(name)
    if stage.step is not None or stage.path not in ("", *FUSED_PATHS):
        return False
    if not problem.case.has_gradients:
        return False
    if stage.quantity in problem.weights:
        return True
    if stage.quantity in problem.inputs:
        return stage.quantity not in ("mask", "cotangent")
    if stage.quantity == "gate":
        return problem.spec.gate is not None
    return f"grad.{stage.quantity}" in STAGES_BETWEEN


def check_names(what: str, names: Sequence[str], problem: Problem) -> None:
    """Reject names that are neither stages nor gradients of a problem.

    Args:
        what: what has the names, for the message.
        names: the names.
        problem: the problem.

    Raises:
        ValueError: if there are any, or no names at all.
    """
    unknown = sorted(unknown_names(names, problem))
    if unknown or not names:
        rule = "have stages of the problem, or gradients: grad. and a stage, an input or a weight"
        raise InputError(what, rule, str(unknown), hint=_hint_for(unknown, problem))


def _hint_for(unknown: Sequence[str], problem: Problem) -> str:
    """Return the names that unknown ones may mean; all stages if none is near."""
    known_names = _names_of(problem)
    hints: list[str] = []
    for name in unknown:
        hint = did_you_mean_stage(name, known_names)
        if hint and len(unknown) > 1:
            hint = f"{name}: {hint}"
        if hint:
            hints.append(hint)
    if not hints:
        stages = [name for name in known_names if "." not in name]
        return f"its stages are {some_of(stages or known_names, len(STAGES))}"
    return " ".join(hints)


def _names_of(problem: Problem) -> list[str]:
    """Return the names of the stages and gradients of a problem."""
    candidates = [*STAGES]
    for step in range(len(problem.case.chunks)):
        candidates += [f"step{step}.{name}" for name in STAGES]
    candidates += [f"grad.{name}" for name in (*problem.inputs, *problem.weights)]
    return [name for name in dict.fromkeys(candidates) if _is_of_problem(name, problem)]


# ---- The trial -----------------------------------------------------------------------------------


class GradientTrial(Trial):
    """Gradients of a problem with edits.

    Its steps are the backward passes of the paths of which gradients were observed.

    Args:
        problem: the case, weights and inputs.
        observed: observed gradients, in the reference's shapes.
        arithmetic: arithmetic of the hardware.
        reference: reference of the problem; its gradients are not computed again.
        bugs: the bugs to try, usual ones first.
        inner: edits that the layer has anyway.
        noise: edits of the same-precision layer alone: an allowed way to compute.
    """

    def __init__(
        self,
        problem: Problem,
        observed: Mapping[str, np.ndarray],
        arithmetic: str,
        reference: Reference,
        bugs: Sequence[Edit] = (),
        inner: Edits = (),
        noise: Edits = (),
    ) -> None:
        paths = {stage_named(name).path for name in observed}
        self._paths = [path for path in ("", *FUSED_PATHS) if path in paths]
        self._bugs = bugs
        self._inner = inner
        self._noise = noise
        self._names: dict[str, list[str]] = {}
        for path in self._paths:
            of_path = [name for name in reference.accumulated if _is_gradient_in(name, path)]
            prefix = f"{path}." if path else ""
            self._names[path] = [name.removeprefix(prefix) for name in of_path]
        super().__init__(
            problem,
            observed,
            arithmetic,
            base=remembering(),
            scope=ONE_BY_ONE,
            reference=reference,
        )

    @cached_property
    def by_step(self) -> list[dict[str, np.ndarray]]:
        """The gradients of the right layer in float64, path by path."""
        right = self.right
        return [
            right.computed(index, (), "float64", right.arithmetic)
            for index in range(len(self._paths))
        ]

    def computed(
        self,
        index: int,
        edits: Edits,
        dtype: str = "float64",
        arithmetic: str = "",
        stage: str = "",
    ) -> dict[str, np.ndarray]:
        """Return the gradients of a path with edits."""
        arithmetic = arithmetic or self.arithmetic
        if not edits:
            known = self._of_reference(dtype, arithmetic)
            if known:
                return known[index]
        # All gradients of a path are computed together.
        return super().computed(index, edits, dtype, arithmetic)

    @cached_property
    def _unobserved_before(self) -> list[list[int]]:
        return [[] for _ in self._paths]

    @cached_property
    def _flow(self) -> list[Flow]:
        return []

    @cached_property
    def _recounts(self) -> list[Trial]:
        """None: as in a comparison, gradients are no part of the samples of the noise."""
        return []

    def _structural(self, steps: frozenset[str]) -> list[Edit]:
        return [bug for bug in self._bugs if not bug.is_loss]

    def _losses(self, steps: frozenset[str]) -> list[Edit]:
        losses = [bug for bug in self._bugs if bug.is_loss]
        if self.problem.dtype in WIDE_ENOUGH:
            return losses
        return [bug for bug in losses if bug.shows_in_narrow]

    def _steps(self, key: LayerKey) -> list[Step]:
        return [partial(self._gradients, path, key) for path in self._paths]

    def _gradients(self, path: str, key: LayerKey, _: Values) -> dict[str, np.ndarray]:
        edits = (*key.edits, *self._inner, self._base)
        if key.dtype != "float64":
            edits = (*self._noise, *edits)
        backward = edited_backward(
            self.problem, key.dtype, edits, key.arithmetic, fused=path in FUSED_PATHS
        )
        try:
            gradients = backward.gradients(with_stages=True)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            # An edit of the forward pass may make arrays that its backward pass does not fit.
            raise ValueError("edits do not fit together") from error
        # A layer with an edit may lack a weight, such as the weight of a norm.
        gradients = {name: gradients.get(name, np.empty(0)) for name in self._names[path]}
        return _named_by_path(gradients, path)

    def _of_reference(self, dtype: str, arithmetic: str) -> list[dict[str, np.ndarray]]:
        reference = self._reference
        if reference is None or self._inner:
            return []
        if dtype == "float64":
            values = reference.accumulated
        elif dtype == SAME_PRECISION[self.problem.dtype] and not self._noise:
            values = reference.same_precision(local=False, arithmetic=arithmetic)
        else:
            return []
        of_paths: dict[str, dict[str, np.ndarray]] = {path: {} for path in self._paths}
        for name, x in values.items():
            stage = stage_named(name)
            if stage.is_gradient and stage.path in of_paths:
                of_paths[stage.path][name] = x
        return list(of_paths.values())

    def allowed(
        self,
        stage: str,
        edits: Edits,
        arithmetic: str = "",
        dtype: str = "",
        form: Form = np.asarray,
    ) -> dict[str, float]:
        """Return the budget of a gradient with edits: its terms may cancel."""
        key = (stage, edits, arithmetic, dtype, form)
        if key not in self._budgets:
            dtype = dtype or self.problem.dtype
            expected = self.stage(stage, edits).astype(np.float64)
            same_precision = self.stage(stage, edits, SAME_PRECISION[dtype], arithmetic)
            terms = np.abs(expected)
            of_right = None if self._reference is None else self._reference.magnitudes.get(stage)
            if of_right is not None and of_right.shape == terms.shape:
                terms = np.maximum(terms, of_right)
            with np.errstate(all="ignore"):
                self._budgets[key] = budget(
                    expected,
                    same_precision,
                    dtype,
                    terms,
                    self.arithmetic,
                    has_slope=False,
                    stage=stage,
                )
        return self._budgets[key]


def _is_gradient_in(name: str, path: str) -> bool:
    stage = stage_named(name)
    return stage.is_gradient and stage.path == path


def _named_by_path(gradients: Mapping[str, np.ndarray], path: str) -> dict[str, np.ndarray]:
    prefix = f"{path}." if path else ""
    return {f"{prefix}{name}": x for name, x in gradients.items()}


# ---- The diagnosis -------------------------------------------------------------------------------


def diagnose_gradients(
    forward: Diagnosis,
    stages: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    reference: Reference,
    arithmetic: str,
    seconds: float,
) -> Diagnosis:
    """Return the diagnosis of stages and gradients.

    Args:
        forward: the diagnosis of the stages.
        stages: observed stages of the forward pass.
        gradients: observed gradients.
        reference: reference of the problem, with gradients.
        arithmetic: arithmetic of the hardware.
        seconds: work of the search.
    """
    problem = reference.problem
    with single_threaded():
        values, malformed, conventions = _shaped(gradients, reference)
        inner: Edits = ()
        bugs: list[Edit] = []
        factors = dropout_factors(stages, reference)
        if factors is not None:
            inner = (dropout_of(factors),)
            bugs += of_dropout(factors)
            bugs += redrawn_dropout(values, factors, reference)
        bugs += _bugs_of(stages, problem)
        bugs += fitted_factor(values, reference)
        bugs += fitted_sequences(values, reference, inner)
        trial = GradientTrial(problem, values, arithmetic, reference, bugs, inner)
        wrong = trial.wrong(trial.stages, ())
        choice = forward.choice
        if wrong and problem.dtype in HALF:
            # Automatic differentiation sums in the dtype of a bias: JAX's does on a CPU.
            noise = (bias_sums_in(problem.dtype),)
            narrow = GradientTrial(problem, values, arithmetic, reference, bugs, inner, noise)
            if not narrow.wrong(wrong, ()):
                trial, wrong, choice = narrow, [], BIAS_SUMS.format(dtype=problem.dtype)
        conventions = {**forward.conventions, **conventions}
        malformed = {**forward.malformed, **malformed}
        diagnosis = replace(
            forward,
            malformed=malformed,
            conventions=conventions,
            choice=choice,
            has_stages=len(stages) + len(gradients) > 1,
            taken={**forward.taken, **{name: values[name] for name in values.keys() & conventions}},
        )
        if not wrong:
            return _with_first(diagnosis, trial, next(iter(malformed), ""))
        if forward.is_wrong and factors is None:
            return _followed(diagnosis, wrong)
        work = Work(seconds)
        with work.counted():
            result = search(trial, work)
        if not _is_consistent(result):
            of_backward = [bug for bug in bugs if bug.backward]
            trial = GradientTrial(problem, values, arithmetic, reference, of_backward, inner)
            work = Work(seconds)
            with work.counted():
                result = search(trial, work)
    findings = [*forward.findings, *result.findings]
    untried = forward.untried
    if not result.is_complete:
        untried = untried or work.untried
    diagnosis = replace(
        diagnosis,
        findings=findings,
        untried=untried,
    )
    return _with_first(diagnosis, trial, wrong[0])


def fitted_factor(values: Mapping[str, np.ndarray], reference: Reference) -> list[Edit]:
    """Return the bug that all gradients are multiplied by a number, fitted to the largest one."""
    sizes = {
        name: float(np.abs(x.astype(np.float64)).max(initial=0.0)) for name, x in values.items()
    }
    if not sizes or not np.isfinite([*sizes.values()]).all():
        return []
    name = max(sizes, key=sizes.__getitem__)
    actual, expected = values[name].astype(np.float64), reference.accumulated[name]
    square = float((expected * expected).sum())
    if square == 0.0:
        return []
    factor = float((actual * expected).sum()) / square
    if abs(factor) < LEAST_FACTOR or abs(factor - 1.0) < LEAST_FACTOR:
        return []
    return [multiplied(factor)]


def fitted_sequences(
    values: Mapping[str, np.ndarray], reference: Reference, inner: Edits
) -> list[Edit]:
    """Return bugs by which gradients of parameters are sums over some sequences alone.

    The sequences are fitted to each gradient. Gradients of the same sequences are one bug.
    """
    problem = reference.problem
    observed = _wrong_parameters(values, reference)
    if not observed or not 1 < problem.case.batch <= MOST_SEQUENCES:
        return []
    backward = edited_backward(problem, "float64", inner, "ieee", fused=False)
    of_each = [
        gradients_of_sequences(backward, [sequence]) for sequence in range(problem.case.batch)
    ]
    names_by_sequences: dict[tuple[int, ...], list[str]] = {}
    for name, gradient in observed.items():
        terms = np.stack([gradients[f"grad.{name}"].ravel() for gradients in of_each], axis=1)
        sequences = _sequences_in(gradient.astype(np.float64).ravel(), terms)
        if sequences:
            names_by_sequences.setdefault(sequences, []).append(name)
    return [of_sequences(sequences, names) for sequences, names in names_by_sequences.items()]


def _wrong_parameters(
    values: Mapping[str, np.ndarray], reference: Reference
) -> dict[str, np.ndarray]:
    """Return the observed gradients of parameters that clearly differ, by their parameters."""
    observed: dict[str, np.ndarray] = {}
    for name, gradient in values.items():
        stage = stage_named(name)
        if stage.path or stage.quantity not in reference.problem.weights:
            continue
        x, expected = gradient.astype(np.float64), reference.accumulated[name]
        size = np.linalg.norm(expected)
        if np.isfinite(x).all() and np.linalg.norm(x - expected) > LEAST_SHARE * size:
            observed[stage.quantity] = gradient
    return observed


def _sequences_in(gradient: np.ndarray, terms: np.ndarray) -> tuple[int, ...]:
    """Return the sequences of which a gradient is the sum; empty if it is not such a sum.

    They are one sequence, a micro-batch of neighbors, or all but one.

    Args:
        gradient: a gradient, (elements,).
        terms: the gradients of all sequences, (elements, B).
    """
    num_elements, num_sequences = terms.shape
    if num_elements < LEAST_ELEMENTS:
        return ()
    choices: list[list[int]] = []
    for first in range(num_sequences):
        for end in range(first + 1, num_sequences + 1):
            choices.append([*range(first, end)])
    for left_out in range(1, num_sequences - 1):
        choices.append([sequence for sequence in range(num_sequences) if sequence != left_out])
    errors = []
    for sequences in choices:
        errors.append(np.linalg.norm(terms[:, sequences].sum(axis=1) - gradient))
    best = int(np.argmin(errors))
    is_whole = len(choices[best]) == num_sequences
    if is_whole or errors[best] > LEAST_SHARE * np.linalg.norm(gradient):
        return ()
    return tuple(choices[best])


def _bugs_of(stages: Mapping[str, np.ndarray], problem: Problem) -> list[Edit]:
    """Return the bugs to try: of the backward pass, and of the forward pass if it is not known."""
    bugs = known_bugs(problem.case, {GRADIENTS})
    if not stages:
        return [*bugs, *(bug for bug in bugs_for(problem.case) if not bug.backward)]
    return bugs


def _is_consistent(result: SearchResult) -> bool:
    """Return whether bugs of the forward pass explain everything alone, if there are any.

    A wrong forward pass has consequences in most gradients. If it explains only some, these are
    right by chance.
    """
    is_of_forward = [any(not edit.backward for edit in f.edits) for f in result.findings if f.edits]
    return not any(is_of_forward) or (result.is_complete and len(result.findings) == 1)


def _followed(diagnosis: Diagnosis, wrong: Sequence[str]) -> Diagnosis:
    """Return the diagnosis of wrong stages with gradients that follow from the first finding."""
    if not diagnosis.findings:
        return diagnosis
    first, *others = diagnosis.findings
    first = replace(first, follows=(*first.follows, *wrong))
    return replace(diagnosis, findings=[first, *others])


def _with_first(diagnosis: Diagnosis, trial: GradientTrial, stage: str) -> Diagnosis:
    """Return a diagnosis with its first wrong gradient, unless an earlier stage is wrong."""
    if diagnosis.stage or not stage:
        return diagnosis
    deviation = Deviation(0.0, 0.0)
    if stage in trial.observed:
        deviation = trial.deviation(stage, ())
    return replace(diagnosis, stage=stage, error=deviation.error, ratio=deviation.ratio)


def _shaped(
    gradients: Mapping[str, np.ndarray], reference: Reference
) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, str]]:
    """Return gradients in the reference's shapes; those without one, and why; and conventions."""
    values: dict[str, np.ndarray] = {}
    malformed: dict[str, str] = {}
    conventions: dict[str, str] = {}
    for name, x in gradients.items():
        expected = reference.accumulated[name]
        if not is_floating(x.dtype):
            malformed[name] = f"has dtype {x.dtype} instead of a floating-point dtype"
        elif x.shape == expected.shape:
            values[name] = x
        else:
            stage = stage_named(name)
            reading = None
            if len(stage.axes) == expected.ndim:
                readings = in_axes(x, expected.shape, stage.axes, may_broadcast=False)
                reading = next(iter(readings), None)
            if reading is None:
                malformed[name] = f"has shape {x.shape} instead of {expected.shape}"
            else:
                axes, values[name] = reading
                conventions[name] = f"has axes {axes}"
    return values, malformed, conventions
