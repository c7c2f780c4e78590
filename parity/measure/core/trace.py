"""Traces: the stages that a backend computed for a problem, and their comparison with the
reference.
"""

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
    failure,
    is_close,
    kept_dtype,
    unit_of_rounding,
)
from parity.measure.core.problem import Problem
from parity.measure.core.sample import of_paths
from parity.measure.core.stages import FUSED_PATHS, PATHS, run_steps, stage_named
from parity.measure.core.unused import unused_cells, without_unused
from parity.measure.core.weights import dtype_named, is_floating
from parity.measure.core.work import uncounted


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
        folder: source folder; empty if computed here.
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
    folder: str = ""
    is_named_by_folder: bool = False

    @property
    def title(self) -> str:
        """Name of the backend in reports: `torch`, or `torch (folder)`."""
        return f"{self.backend} ({self.folder})" if self.is_named_by_folder else self.backend

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
    """Stages of the reference for a problem, in float64 and in the same precision, each computed
    once.

    Attributes:
        problem: problem.
        with_gradients: also compute gradients.
        stages: names of the required stages; default: all. Slow ones among the others are omitted.
    """

    problem: Problem
    with_gradients: bool = False
    stages: frozenset[str] | None = None

    @cached_property
    def remembered(self) -> reference.Remembered:
        """Projections of the inputs, also for other layers of the problem."""
        return reference.Remembered()

    @cached_property
    def accumulated(self) -> dict[str, np.ndarray]:
        """All stages in float64."""
        return self._stages("float64")

    @cached_property
    def given(self) -> dict[str, np.ndarray]:
        """The float64 stages, rounded as in the backend: inputs of its local stages."""
        return {
            name: value.astype(kept_dtype(name, self.problem.dtype))
            for name, value in self.accumulated.items()
        }

    def expected(self, *, local: bool) -> dict[str, np.ndarray]:
        """All stages in float64, from their own earlier stages or from the given ones."""
        return self._stages("float64", local=local)

    def same_precision(self, *, local: bool, arithmetic: str = "ieee") -> dict[str, np.ndarray]:
        """All stages in the same precision and arithmetic, from their own earlier stages or from
        the given ones.
        """
        return self._stages(SAME_PRECISION[self.problem.dtype], local=local, arithmetic=arithmetic)

    def compare(
        self, actual: np.ndarray, label: Label, arithmetic: str, *, local: bool = False
    ) -> Comparison:
        """Compare a stage that was computed from its own earlier stages or from the given ones."""
        expected = self.expected(local=local)[label.stage]
        same = self.same_precision(local=local, arithmetic=arithmetic)[label.stage]
        return self._compare(actual, expected, same, label, arithmetic)

    def compare_used(self, actual: np.ndarray, label: Label, arithmetic: str) -> Comparison:
        """Compare a stage of someone else's implementation, without padding and unfilled slots of a
        cache.
        """
        expected = self.accumulated[label.stage]
        same = self.same_precision(local=False, arithmetic=arithmetic)[label.stage]
        unused = unused_cells(self.problem, label.stage, expected.shape)
        if unused is None or actual.shape != expected.shape:
            return self._compare(actual, expected, same, label, arithmetic)
        if stage_named(label.stage).is_exact:
            return self._compare(
                np.where(unused, expected, actual), expected, same, label, arithmetic
            )
        if not is_floating(actual.dtype):
            return self._compare(actual, expected, same, label, arithmetic)
        actual, expected = without_unused(actual, unused), without_unused(expected, unused)
        return self._compare(actual, expected, same, label, arithmetic)

    def _compare(
        self,
        actual: np.ndarray,
        expected: np.ndarray,
        same: np.ndarray,
        label: Label,
        arithmetic: str,
    ) -> Comparison:
        return compare(
            actual,
            expected,
            same,
            label,
            terms=self.magnitudes.get(label.stage),
            arithmetic=arithmetic,
        )

    def compare_noise(
        self,
        found: Comparison,
        actual: np.ndarray,
        label: Label,
        arithmetic: str,
        *,
        local: bool = False,
    ) -> Comparison:
        """Compare a stage that is just over its budget again, with the noise of perturbed inputs
        and weights.
        """
        if not is_close(found.ratio):
            return found
        expected, again = self.expected(local=local)[label.stage], self.recounted(arithmetic)
        noisy = (
            compare(actual, expected, each[label.stage], label, arithmetic=arithmetic)
            for each in again
        )
        return min((found, *noisy), key=lambda each: each.ratio)

    def recounted(self, arithmetic: str = "ieee") -> list[dict[str, np.ndarray]]:
        """All stages in the same precision, with inputs and weights randomly perturbed by a unit of
        rounding.

        One run is one sample of the noise. If the softmax is almost saturated, a few elements
        determine its size.
        """
        if arithmetic not in self._again:
            rng = np.random.default_rng(int(self.problem.digest[:8], 16))
            dtype = SAME_PRECISION[self.problem.dtype]
            self._again[arithmetic] = [
                Reference(nudged(self.problem, rng, arithmetic)).same_precision(
                    local=False, arithmetic=arithmetic
                )
                for _ in range(RECOUNTS if dtype == "float32" else 0)
            ]
        return self._again[arithmetic]

    @cached_property
    def magnitudes(self) -> dict[str, np.ndarray]:
        """Magnitude of the terms of each gradient."""
        if not self.with_gradients:
            return {}
        magnitudes = reference.gradient_magnitudes(self.problem)
        return magnitudes | {
            f"{path}.{name}": of for path in FUSED_PATHS for name, of in magnitudes.items()
        }

    @cached_property
    def _again(self) -> dict[str, list[dict[str, np.ndarray]]]:
        return {}

    @cached_property
    def _known(self) -> dict[tuple[str, bool, str], dict[str, np.ndarray]]:
        return {}

    def _stages(
        self, dtype: str, *, local: bool = False, arithmetic: str = "ieee"
    ) -> dict[str, np.ndarray]:
        """All stages in a dtype and an arithmetic, computed on demand."""
        if (dtype, local, arithmetic) not in self._known:
            self._known[dtype, local, arithmetic] = self._computed(
                dtype, self.given if local else None, arithmetic
            )
        return self._known[dtype, local, arithmetic]

    def _computed(
        self, dtype: str, given: Mapping[str, np.ndarray] | None, arithmetic: str
    ) -> dict[str, np.ndarray]:
        arithmetic_in = reference.Arithmetic(dtype_named(dtype), arithmetic)
        layer = self.remembered.serve(reference.Layer(self.problem, arithmetic_in))
        # float16 may overflow, which the comparison then reports
        with uncounted(), np.errstate(over="ignore", invalid="ignore"):
            if given is not None or self.problem.case.is_cached or self.problem.sample is not None:
                values = run_steps(layer.steps(), given)
            elif self._has_scores:
                values = layer.forward()
                values |= of_paths(values)
            elif self._is_before_scores:
                values = {**layer.mask({}), **layer.qkv({})}
            else:
                values = reference.without_scores(layer)
                values |= of_paths(values)
            if self.with_gradients and given is None:
                values |= reference.gradients(self.problem, dtype)
                fused = reference.gradients(self.problem, dtype, fused=True)
                values |= {
                    f"{path}.{name}": of for path in FUSED_PATHS for name, of in fused.items()
                }
        return values

    def by_step(self, dtype: str, arithmetic: str = "ieee") -> list[dict[str, np.ndarray]]:
        """Return the results of each step, in float64 or in the same precision; empty if some
        stages are not stored.
        """
        if not self._has_scores or self.problem.sample is not None:
            return []
        values = (
            self.accumulated
            if dtype == "float64"
            else self.same_precision(local=False, arithmetic=arithmetic)
        )
        kept = {name: x for name, x in values.items() if not stage_named(name).is_gradient}
        return [{name: kept[name] for name in names} for _, names in groupby(kept, step_of)]

    @property
    def _has_scores(self) -> bool:
        """Return whether scores or attention weights are required, or fast."""
        case, of_scores = self.problem.case, ("scores", "attn_weights")
        is_small = case.batch * case.spec.num_heads * case.seq_len * case.key_len <= reference.BLOCK
        return (
            is_small
            or self.stages is None
            or any(stage_named(name).quantity in of_scores for name in self.stages)
        )

    @property
    def _is_before_scores(self) -> bool:
        """Return whether only stages before the scores are required."""
        if self.stages is None or self.with_gradients:
            return False
        return all(step_of(name)[1] in BEFORE_SCORES for name in self.stages)


BEFORE_SCORES = ("mask", "qkv")
"""The steps of a layer that need no scores."""

OF_A_STEP = {"q": "qkv", "latents": "qkv", "k": "qkv", "v": "qkv", "gate": "qkv"} | {
    f"cache.{name}": "cache" for name in ("latents", "keys", "values", "lengths")
}
"""Stages that a step returns together with others."""


def step_of(name: str) -> tuple[int | None, str]:
    """Return the call that computes a stage, None without a cache, and the step of
    `parity.measure.core.stages.STEPS`.
    """
    stage = stage_named(name)
    return stage.step, "whole" if stage.path else OF_A_STEP.get(stage.quantity, stage.quantity)


RECOUNTS = 4
"""Number of further measurements of the noise if a stage is over its budget."""


def nudged(problem: Problem, rng: np.random.Generator, arithmetic: str = "ieee") -> Problem:
    """Return a problem whose weights and inputs are randomly perturbed by at most a unit of
    rounding.
    """
    unit = max(
        unit_of_rounding(SAME_PRECISION[problem.dtype]), 2.0 ** -reference.MANTISSA[arithmetic]
    )
    weights = nudged_values(problem.weights, unit, rng)
    return replace(problem, weights=weights, inputs=nudged_values(problem.inputs, unit, rng))


def nudged_values(
    values: Mapping[str, np.ndarray], unit: float, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return floating-point arrays randomly perturbed by at most one unit; others unchanged."""
    return {
        name: (value * (1.0 + unit * rng.integers(-1, 2, value.shape))).astype(value.dtype)
        if is_floating(value.dtype)
        else value
        for name, value in values.items()
    }


def judge(trace: Trace, reference: Reference) -> list[Comparison]:
    """Compare all stages of a trace with the reference; a stage that only one of them has is a
    failure.
    """
    run, arithmetic = (
        Label(trace.problem.case.name, trace.title, trace.problem.dtype, "run"),
        trace.arithmetic,
    )
    if trace.error:
        return [replace(failure(np.empty(0), trace.error, run), library=trace.backend)]

    def verdict(stage: str, values: Mapping[str, np.ndarray], *, local: bool) -> Comparison:
        label = run._replace(stage=stage)
        if stage not in values:
            return failure(
                reference.expected(local=local)[stage], "the trace lacks this stage", label
            )
        actual = values[stage]
        found = reference.compare(actual, label, arithmetic, local=local)
        is_whole = not local or stage_named(stage).path  # paths start from the inputs in both
        if is_whole and stage not in reference.magnitudes:
            return reference.compare_noise(found, actual, label, arithmetic, local=local)
        return found

    comparisons = []
    for name in reference.accumulated:
        stage = stage_named(name)
        if (stage.is_gradient and not trace.with_gradients) or stage.path not in ("", *trace.paths):
            continue
        comparison = verdict(name, trace.accumulated, local=False)
        if stage.has_local_value:
            local = verdict(name, trace.local, local=True)
            comparison = comparison.with_step(
                local.ratio, local.reason or "wrong on the reference's own inputs"
            )
        comparisons.append(replace(comparison, library=trace.backend))
    judged = {comparison.stage for comparison in comparisons}
    for name, value in {**trace.local, **trace.accumulated}.items():
        is_judged = name in judged or (
            stage_named(name).is_gradient and not reference.with_gradients
        )
        if not is_judged:
            found = failure(value, "the reference has no such stage", run._replace(stage=name))
            comparisons.append(replace(found, library=trace.backend))
    return comparisons
