"""Traces: stages that a backend computed for a problem, compared with the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from parity.measure.core import reference
from parity.measure.core.compare import (
    SAME_PRECISION,
    Comparison,
    Label,
    compare,
    dtype_of_stage,
    failure,
    is_close,
    unit_of_rounding,
)
from parity.measure.core.problem import Problem
from parity.measure.core.stages import FUSED_PATHS, PATHS, STEPS, of_paths, run_steps, stage_named
from parity.measure.core.unused import unused_cells, without_unused
from parity.measure.core.weights import dtype_named, is_floating


@dataclass(frozen=True)
class Trace:
    """Stages that a backend computed for a problem.

    Attributes:
        problem: input of the backend.
        backend: name of the backend.
        accumulated: all stages by name, computed from the backend's own earlier stages.
        local: all stages by name that have a local value, computed from the reference's earlier
            stages.
        paths: paths of the module that the backend supports.
        environment: environment of the computation, including the numerics lock.
        with_gradients: includes gradients.
        skipped: reason why the backend cannot run this case in this dtype; the trace then has no
            stages.
        error: error of the backend; the trace then has no stages either.
        path: file of the trace; empty if computed here.
        folder: its folder; empty if computed here.
        is_named_by_folder: reports add the folder to the backend's name, because another trace has
            the same name.
    """

    problem: Problem
    backend: str
    accumulated: dict[str, np.ndarray] = field(repr=False)
    local: dict[str, np.ndarray] = field(repr=False)
    paths: tuple[str, ...] = PATHS
    environment: dict[str, Any] = field(default_factory=dict, repr=False)
    with_gradients: bool = False
    skipped: str = ""
    error: str = ""
    path: str = ""
    folder: str = ""
    is_named_by_folder: bool = False

    @property
    def title(self) -> str:
        """Name of the backend in reports: `torch`, or `torch (folder)`."""
        if self.is_named_by_folder:
            return f"{self.backend} ({self.folder})"
        return self.backend

    @property
    def numerics(self) -> dict[str, Any]:
        """Numerics lock of the computation."""
        return self.environment.get("backends", {}).get(self.backend, {}).get("numerics", {})

    @property
    def arithmetic(self) -> str:
        """Arithmetic of the hardware, one of `reference.ARITHMETICS`."""
        return self.numerics.get("arithmetic", "ieee")


@dataclass(frozen=True)
class Reference:
    """Stages of the reference for a problem, in float64 and in the same precision.

    Each is computed once.

    Attributes:
        problem: problem.
        with_gradients: also compute gradients.
        stages: names of the required stages; default: all. Slow ones among the others are omitted.
    """

    problem: Problem
    with_gradients: bool = False
    stages: frozenset[str] | None = None
    _computed_stages: dict[tuple[str, bool, str], dict[str, np.ndarray]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _steps: dict[tuple[str, str], list[dict[str, np.ndarray]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _recounts: dict[str, list[dict[str, np.ndarray]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    # ---- Stages ----------------------------------------------------------------------------------

    @cached_property
    def accumulated(self) -> dict[str, np.ndarray]:
        """All stages in float64."""
        return self._stages("float64")

    @cached_property
    def rounded(self) -> dict[str, np.ndarray]:
        """The float64 stages, rounded as in the backend: inputs of its local stages."""
        dtype = self.problem.dtype
        return {name: x.astype(dtype_of_stage(name, dtype)) for name, x in self.accumulated.items()}

    def expected(self, *, local: bool) -> dict[str, np.ndarray]:
        """All stages in float64, from their own earlier stages or from the rounded ones."""
        return self._stages("float64", local=local)

    def same_precision(self, *, local: bool, arithmetic: str = "ieee") -> dict[str, np.ndarray]:
        """All stages in the same precision and arithmetic.

        They are computed from their own earlier stages or, if local, from the rounded ones.
        """
        return self._stages(SAME_PRECISION[self.problem.dtype], local=local, arithmetic=arithmetic)

    def by_step(self, dtype: str, arithmetic: str = "ieee") -> list[dict[str, np.ndarray]]:
        """Return the results of each step, in float64 or in the same precision.

        Empty if some stages are not stored.
        """
        if not self._has_scores:
            return []
        key = (dtype, arithmetic)
        if key not in self._steps:
            values = self.accumulated
            if dtype != "float64":
                values = self._stages(dtype, arithmetic=arithmetic)
            names = [name for name in values if not stage_named(name).is_gradient]
            steps = []
            for _, names_of_step in groupby(names, step_of):
                steps.append({name: values[name] for name in names_of_step})
            self._steps[key] = steps
        return self._steps[key]

    def layer(self, arithmetic: reference.Arithmetic) -> reference.Layer:
        """Return the layer of the problem in an arithmetic."""
        return reference.Layer(self.problem, arithmetic)

    def _stages(
        self, dtype: str, *, local: bool = False, arithmetic: str = "ieee"
    ) -> dict[str, np.ndarray]:
        """All stages in a dtype and an arithmetic, computed on demand."""
        key = (dtype, local, arithmetic)
        if key not in self._computed_stages:
            compute = self._compute_local if local else self._compute
            # float16 may overflow, which the comparison then reports
            with np.errstate(over="ignore", invalid="ignore"):
                self._computed_stages[key] = compute(dtype, arithmetic)
        return self._computed_stages[key]

    def _compute(self, dtype: str, arithmetic: str) -> dict[str, np.ndarray]:
        """Return all required stages, each from its own earlier stages."""
        layer = self.layer(reference.Arithmetic(dtype_named(dtype), arithmetic))
        if self.problem.case.is_cached:
            values = run_steps(layer.steps())
        elif self._has_scores:
            values = layer.forward()
            values |= of_paths(values)
        elif self._is_before_scores:
            values = {**layer.mask({}), **layer.qkv({})}
        else:
            values = reference.without_scores(layer)
            values |= of_paths(values)
        if self.with_gradients:
            between = self._has_stages_between
            values |= reference.gradients(self.problem, dtype, with_stages=between)
            fused: dict[str, np.ndarray] = {}
            if self._fused_paths:
                fused = reference.gradients(self.problem, dtype, fused=True, with_stages=between)
            for path in self._fused_paths:
                for name, gradient in fused.items():
                    values[f"{path}.{name}"] = gradient
        return values

    def _compute_local(self, dtype: str, arithmetic: str) -> dict[str, np.ndarray]:
        """Return all stages but gradients, each from the rounded float64 stages before it."""
        steps = self.layer(reference.Arithmetic(dtype_named(dtype), arithmetic)).steps()
        if self.problem.case.is_cached:
            return run_steps(steps, self.rounded)
        # These steps start from the inputs, so they are the same with and without other stages.
        values = {}
        for name, x in self._stages(dtype, arithmetic=arithmetic).items():
            stage = stage_named(name)
            if not stage.is_gradient and step_of(name)[1] in FROM_INPUTS:
                values[name] = x
        for name, step in zip(STEPS, steps, strict=True):
            if name not in FROM_INPUTS:
                values |= step(self.rounded)
        return values

    @property
    def _has_scores(self) -> bool:
        """Return whether scores or attention weights are required, or fast."""
        case = self.problem.case
        if case.is_cached:
            return True  # calls with a cache are always computed stage by stage
        num_scores = case.batch * case.spec.num_heads * case.seq_len * case.key_len
        if num_scores <= reference.BLOCK or self.stages is None:
            return True
        quantities = {stage_named(name).quantity for name in self.stages}
        return not quantities.isdisjoint(("scores", "attn_weights"))

    @property
    def _fused_paths(self) -> list[str]:
        """Return the fused paths whose gradients are required."""
        if self.stages is None:
            return [*FUSED_PATHS]
        required = set()
        for name in self.stages:
            stage = stage_named(name)
            if stage.is_gradient:
                required.add(stage.path)
        return [path for path in FUSED_PATHS if path in required]

    @property
    def _has_stages_between(self) -> bool:
        """Return whether gradients of stages are required, and not only of inputs and weights."""
        for name in self.stages or ():
            stage = stage_named(name)
            if stage.is_gradient and f"grad.{stage.quantity}" in reference.STAGES_BETWEEN:
                return True
        return False

    @property
    def _is_before_scores(self) -> bool:
        """Return whether only stages before the scores are required."""
        if self.stages is None or self.with_gradients:
            return False
        return all(step_of(name)[1] in BEFORE_SCORES for name in self.stages)

    # ---- Comparisons -----------------------------------------------------------------------------

    def compare(
        self, actual: np.ndarray, label: Label, arithmetic: str, *, local: bool = False
    ) -> Comparison:
        """Compare a stage, computed from its own earlier stages or, if local, the rounded ones."""
        expected = self.expected(local=local)[label.stage]
        same = self.same_precision(local=local, arithmetic=arithmetic)[label.stage]
        return self._compare(actual, expected, same, label, arithmetic)

    def compare_used(self, actual: np.ndarray, label: Label, arithmetic: str) -> Comparison:
        """Compare a stage of someone else's implementation, without its unused cells.

        These are padding, and unfilled slots of a cache.
        """
        expected = self.accumulated[label.stage]
        same = self.same_precision(local=False, arithmetic=arithmetic)[label.stage]
        unused = unused_cells(self.problem.case, label.stage, expected.shape)
        if unused is not None and actual.shape == expected.shape:
            if stage_named(label.stage).is_exact:
                actual = np.where(unused, expected, actual)
            elif is_floating(actual.dtype):
                actual = without_unused(actual, unused)
                expected = without_unused(expected, unused)
        return self._compare(actual, expected, same, label, arithmetic)

    def _compare(
        self,
        actual: np.ndarray,
        expected: np.ndarray,
        same: np.ndarray,
        label: Label,
        arithmetic: str,
    ) -> Comparison:
        terms = self.magnitudes.get(label.stage)
        return compare(actual, expected, same, label, terms=terms, arithmetic=arithmetic)

    def compare_noise(
        self,
        comparison: Comparison,
        actual: np.ndarray,
        label: Label,
        arithmetic: str,
        *,
        local: bool = False,
    ) -> Comparison:
        """Compare a stage that is just over its budget again, with more samples of the noise.

        Each sample is the error for perturbed inputs and weights.

        Args:
            comparison: the comparison of the stage so far.
            actual: the array of the stage.
            label: label of the stage.
            arithmetic: arithmetic of the samples, as in `recounted`.
            local: whether the stage was computed from the implementation's own previous stage.

        Returns:
            The comparison in which the error uses the smallest share of its budget.
        """
        if not is_close(comparison.ratio):
            return comparison
        expected = self.expected(local=local)[label.stage]
        best = comparison
        for stages in self.recounted(arithmetic):
            noisy = compare(actual, expected, stages[label.stage], label, arithmetic=arithmetic)
            if noisy.ratio < best.ratio:
                best = noisy
        return best

    def recounted(self, arithmetic: str = "ieee") -> list[dict[str, np.ndarray]]:
        """All stages in the same precision, of randomly perturbed inputs and weights.

        They are perturbed by a unit of rounding. One run is one sample of the noise. If the softmax
        is almost saturated, a few elements determine its size.
        """
        if arithmetic not in self._recounts:
            # A seed of 32 bits that depends on the problem alone, so that each run has this noise.
            rng = np.random.default_rng(int(self.problem.digest[:8], 16))
            # Only float32 and float64 stages: see "Saturated softmax" in error-budget.md of docs.
            num_recounts = 0
            if SAME_PRECISION[self.problem.dtype] == "float32":
                num_recounts = RECOUNTS
            recounts = []
            for _ in range(num_recounts):
                perturbed = Reference(nudged(self.problem, rng, arithmetic))
                recounts.append(perturbed.same_precision(local=False, arithmetic=arithmetic))
            self._recounts[arithmetic] = recounts
        return self._recounts[arithmetic]

    @cached_property
    def magnitudes(self) -> dict[str, np.ndarray]:
        """Magnitude of the terms of each gradient."""
        if not self.with_gradients:
            return {}
        between = self._has_stages_between
        magnitudes = reference.gradient_magnitudes(self.problem, with_stages=between)
        of_fused_paths = {}
        for path in self._fused_paths:
            for name, magnitude in magnitudes.items():
                of_fused_paths[f"{path}.{name}"] = magnitude
        return magnitudes | of_fused_paths


def with_absent_gradients(observed: Any, reference: Reference) -> Any:
    """Return stages in which a gradient that is None, as in torch, is 0.

    Torch has None for inputs, weights and stages that are detached from the output.
    """
    if not isinstance(observed, Mapping):
        return observed
    stages = dict(observed)
    for name, x in observed.items():
        if x is not None or not stage_named(str(name)).is_gradient:
            continue
        expected = reference.accumulated.get(str(name))
        if expected is not None:
            dtype = dtype_of_stage(str(name), reference.problem.dtype)
            stages[name] = np.zeros(expected.shape, dtype)
    return stages


BEFORE_SCORES = ("mask", "qkv")
"""The steps of a layer that need no scores."""

FROM_INPUTS = (*BEFORE_SCORES, "whole")
"""The steps of a layer without a cache that read no earlier stage."""

OF_A_STEP = {"q": "qkv", "latents": "qkv", "k": "qkv", "v": "qkv", "gate": "qkv"} | {
    f"cache.{name}": "cache" for name in ("latents", "keys", "values", "lengths")
}
"""Stages that a step returns together with others."""


def step_of(name: str) -> tuple[int | None, str]:
    """Return the call that computes a stage, None without a cache, and the stage's step.

    The step is one of `parity.measure.core.stages.STEPS`.
    """
    stage = stage_named(name)
    if stage.path:
        return stage.step, "whole"
    return stage.step, OF_A_STEP.get(stage.quantity, stage.quantity)


RECOUNTS = 4
"""Number of further measurements of the noise if a stage is over its budget by a
factor of at most `MOST_OVER`.

In 60 problems with a saturated softmax, correct weights pass with 4 (`test_compare.py`).
"""


def nudged(problem: Problem, rng: np.random.Generator, arithmetic: str = "ieee") -> Problem:
    """Return a problem whose weights and inputs are perturbed by at most a unit of rounding."""
    unit_of_dtype = unit_of_rounding(SAME_PRECISION[problem.dtype])
    # A matrix product may take fewer bits than the dtype has.
    unit = max(unit_of_dtype, 2.0 ** -reference.MANTISSA[arithmetic])
    weights = nudged_values(problem.weights, unit, rng)
    return replace(problem, weights=weights, inputs=nudged_values(problem.inputs, unit, rng))


def nudged_values(
    values: Mapping[str, np.ndarray], unit: float, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return floating-point arrays, each element perturbed by a relative -`unit`, 0 or +`unit` at
    random; others unchanged.
    """
    nudged_by_name = {}
    for name, x in values.items():
        if is_floating(x.dtype):
            x = (x * (1.0 + unit * rng.integers(-1, 2, x.shape))).astype(x.dtype)
        nudged_by_name[name] = x
    return nudged_by_name


def compare_trace(trace: Trace, reference: Reference) -> list[Comparison]:
    """Compare all stages of a trace with the reference.

    A stage that only one of them has is a failure.
    """
    run = Label(trace.problem.case.name, trace.title, trace.problem.dtype, "run")
    if trace.error:
        return [replace(failure(np.empty(0), trace.error, run), library=trace.backend)]
    comparisons = []
    for name in reference.accumulated:
        stage = stage_named(name)
        if (stage.is_gradient and not trace.with_gradients) or stage.path not in ("", *trace.paths):
            continue
        comparison = _compare_stage(trace, reference, run._replace(stage=name), local=False)
        if stage.has_local_value:
            local = _compare_stage(trace, reference, run._replace(stage=name), local=True)
            reason = local.reason or "wrong on the reference's own inputs"
            comparison = comparison.with_step(local.ratio, reason)
        comparisons.append(replace(comparison, library=trace.backend))
    compared_names = {comparison.stage for comparison in comparisons}
    for name, value in {**trace.local, **trace.accumulated}.items():
        is_left_out = stage_named(name).is_gradient and not reference.with_gradients
        if name not in compared_names and not is_left_out:
            reason = "the reference has no such stage"
            unexpected = failure(value, reason, run._replace(stage=name))
            comparisons.append(replace(unexpected, library=trace.backend))
    return comparisons


def _compare_stage(trace: Trace, reference: Reference, label: Label, *, local: bool) -> Comparison:
    """Compare one stage of a trace.

    It was computed from the trace's earlier stages or, if local, from the reference's.
    """
    values = trace.local if local else trace.accumulated
    if label.stage not in values:
        expected = reference.expected(local=local)[label.stage]
        return failure(expected, "the trace lacks this stage", label)
    actual = values[label.stage]
    comparison = reference.compare(actual, label, trace.arithmetic, local=local)
    # A path other than the module's starts from the inputs, whether or not the comparison is local.
    is_whole = not local or stage_named(label.stage).path != ""
    # Gradients, which have magnitudes, are no part of the samples of the noise.
    if is_whole and label.stage not in reference.magnitudes:
        return reference.compare_noise(comparison, actual, label, trace.arithmetic, local=local)
    return comparison
