"""`assert_parity`: arrays, or stages by name, must agree up to rounding."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_spec import InputError, InputTypeError
from parity.measure.core.arrays import arithmetic_of, stages_of
from parity.measure.core.case import DTYPES
from parity.measure.core.compare import (
    NOTHING,
    TENSIX_FLOOR,
    Comparison,
    Label,
    budget,
    factor,
    failure,
    first_difference,
    measure,
    why_incomparable,
)
from parity.measure.core.compare import unit_of_rounding as unit
from parity.measure.core.problem import Problem
from parity.measure.core.reference import ARITHMETICS
from parity.measure.core.stages import STAGES, stage_named
from parity.measure.core.trace import Reference
from parity.measure.text import some_of

if TYPE_CHECKING:
    from parity.explain.diagnosis.diagnose import Diagnosis

Stages = Mapping[str, np.ndarray]

UNITS = {"float64": 16, "float32": 16, "bfloat16": 4, "float16": 4}
"""Tolerance in units of rounding, relative to the scale of the expected values, if the noise is
unknown.

Measured on all forward stages of all `CASES` but the trained ones. Between torch and JAX 5.3 are
needed in float32 and float64, and 1.3 in bfloat16 and float16, which round results but not sums;
from either to the float64 reference 10.8 and 1.9. This is without random-1, whose logits reach 51:
it needs 71 in float32, 4.3 in float16.
"""


class ConventionWarning(UserWarning):
    """A stage is right and recorded in another convention, or computed in a legitimate other
    way.
    """


NEXT = "pass problem=parity.make_problem(case, dtype) instead of expected, to search for the bug"

LARGEST_INTEGER = 2**53  # up to which float64 represents integers exactly


def assert_parity(
    actual: Any,
    expected: Any = None,
    *,
    same_precision: Any = None,
    problem: Problem | None = None,
    dtype: str | None = None,
    name: str = "parity",
    stage: str = "output",
    diagnose: bool = True,
    arithmetic: str | None = None,
) -> None:
    """Raise an AssertionError that describes the first difference, unless actual agrees with
    expected.

    The tolerance is not an argument, because it follows from rounding. Booleans and integers must
    be equal. NaN or infinity, another shape or kind of dtype, an empty array, a missing or
    additional stage always differ.

    Args:
        actual: an array of NumPy, torch, JAX or TTNN, or a mapping of such arrays by stage: `q`,
            `scores`, `output` and others, see `STAGES`. The message begins with the first stage
            that differs, in the order of the data flow, or for other names in the order of
            `expected`.
        expected: the expected values, likewise, best in float64; omit it with `problem`.
        same_precision: the same computation by another correct implementation in the precision of
            `actual`, likewise. Then the tolerance is that of `compare`: 4 times the error of
            `same_precision`, and one unit of rounding. The best choice without a `problem`.
        problem: the case, weights and inputs. Then the expected values and their noise come from
            the float64 reference, for the stages of `actual`.
        dtype: name of the dtype of the computation, if no array shows it; by default the narrowest
            floating-point dtype of all arrays.
        name: a title for the message.
        stage: the stage of the arrays, if they are not mappings.
        diagnose: with `problem`, search for the bug that explains a difference, for up to 5
            seconds. If nothing is wrong, because a stage is only recorded in another convention or
            scores are kept in 16 bits, a `ConventionWarning` is issued instead of an error.
        arithmetic: of the hardware, one of `reference.ARITHMETICS`: `ieee`, or `tensix`,
            Tenstorrent's. The default is `tensix` if an array of `actual` is TTNN's on a card or a
            simulator.

    Without `same_precision` and `problem` a coarse rule applies: the root mean square of the error
        may be 16 units of
    rounding (4 in bfloat16 and float16, see `UNITS`) of the root mean square of `expected`, and its
    maximum the same of the maximum. That is 2e-6 in float32 and 3% in bfloat16. Forward stages of
    correct implementations stay within it
    while logits are small. Large logits and gradients may exceed it: pass `same_precision` or
        `problem` for those, and
    to detect smaller bugs.

    Raises:
        AssertionError: if they differ.
        TypeError: if the arguments cannot be combined, or something is not an array.
        ValueError: if the dtype is unknown.
    """
    __tracebackhide__ = True
    comparisons, diagnosis = judge(
        actual,
        expected,
        same_precision=same_precision,
        problem=problem,
        dtype=dtype,
        name=name,
        stage=stage,
        diagnose=diagnose,
        arithmetic=arithmetic,
    )
    if text := message(comparisons, diagnosis, next_step="" if problem else NEXT):
        raise AssertionError(text)


def judge(
    actual: Any,
    expected: Any = None,
    *,
    problem: Problem | None = None,
    stage: str = "output",
    diagnose: bool = True,
    arithmetic: str | None = None,
    **options: Any,
) -> tuple[list[Comparison], Diagnosis | None]:
    """Compare arrays as `assert_parity` does, and diagnose differences from the reference of a
    problem.

    Returns:
        The comparisons, of which those that a convention explains pass, with a warning if nothing
        is wrong; and the diagnosis, or None if nothing differs.
    """
    reference = _reference_for(actual, problem, stage)  # once for both
    about: dict[str, Any] = {
        "problem": problem,
        "stage": stage,
        "arithmetic": arithmetic,
        "reference": reference,
    }
    comparisons = compare_arrays(actual, expected, **about, **options)
    difference = first_difference(comparisons)
    stages = stages_of("actual", actual, stage) if diagnose and difference is not None else {}
    if reference is None or not any(stage_named(name).kind in STAGES for name in stages):
        return comparisons, None
    from parity.explain.diagnosis.diagnose import diagnose_stages

    arithmetic = arithmetic or arithmetic_of(actual)
    diagnosis = diagnose_stages(stages, reference, arithmetic, comparisons=comparisons)
    judged = _as_recorded(comparisons, diagnosis, reference, arithmetic)
    if not diagnosis.is_wrong and judged != comparisons:
        warnings.warn(f"{comparisons[0].case}: {diagnosis}", ConventionWarning, stacklevel=3)
    return judged, diagnosis


def _reference_for(actual: Any, problem: Problem | None, stage: str) -> Reference | None:
    """Return the reference of a problem for the stages of some arrays."""
    if not isinstance(problem, Problem):
        return None
    stages = [stage_named(name) for name in (actual if isinstance(actual, Mapping) else [stage])]
    with_gradients = any(each.is_gradient for each in stages) and problem.case.has_gradients
    is_known = all(each.kind in STAGES for each in stages)  # otherwise all are listed
    return Reference(problem, with_gradients, frozenset(map(str, stages)) if is_known else None)


def compare_arrays(
    actual: Any,
    expected: Any = None,
    *,
    same_precision: Any = None,
    problem: Problem | None = None,
    dtype: str | None = None,
    name: str = "parity",
    stage: str = "output",
    arithmetic: str | None = None,
    reference: Reference | None = None,
) -> list[Comparison]:
    """Return the comparisons of `assert_parity`, one for each stage, in the order of the data
    flow.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError("dtype", f"be one of {list(DTYPES)}", dtype=dtype)
    if arithmetic not in (None, *ARITHMETICS):
        raise InputError("arithmetic", f"be one of {list(ARITHMETICS)}", arithmetic=arithmetic)
    if (expected is None) == (problem is None):
        raise InputTypeError(
            "one of expected and problem", "be given", str("neither" if problem is None else "both")
        )
    if problem is not None and not (same_precision is None and dtype is None):
        raise InputTypeError(
            "problem", "not be combined with same_precision or dtype, because it determines both"
        )
    if problem is not None and not isinstance(problem, Problem):
        raise InputTypeError(
            "problem", "be a Problem, see parity.make_problem", type(problem).__name__
        )
    if actual is None:
        raise InputTypeError(
            "actual",
            "be an array or a mapping of arrays by stage",
            "None: is there a return missing?",
        )
    given = {"actual": actual, "expected": expected, "same_precision": same_precision}
    given = {role: value for role, value in given.items() if value is not None}
    if len({isinstance(value, Mapping) for value in given.values()}) > 1:
        kinds = ", ".join(f"{role}={type(value).__name__}" for role, value in given.items())
        raise InputTypeError(
            ", ".join(given), "all be arrays or all be mappings of arrays by stage", str(kinds)
        )
    if same_precision is not None and _share_an_array(
        actual, same_precision
    ):  # which would allow any error
        raise InputTypeError(
            "same_precision", "come from another implementation", "the arrays of actual"
        )
    arrays = {role: stages_of(role, value, stage) for role, value in given.items()}
    if not any(arrays.values()):
        nowhere = Label(name, "actual", dtype or "no dtype", stage)
        return [failure(np.empty(0), "there are no stages to compare", nowhere)]
    arithmetic = arithmetic or arithmetic_of(actual)
    with np.errstate(over="ignore", invalid="ignore"):  # infinite errors are reported
        if problem is not None:
            reference = reference or _reference_for(actual, problem, stage) or Reference(problem)
            return _compare_with_reference(arrays["actual"], reference, name, arithmetic)
        return _compare_with_expected(arrays, dtype, name, arithmetic)


def message(
    comparisons: Iterable[Comparison],
    diagnosis: Diagnosis | None = None,
    next_step: str = "",
    *,
    verbose: bool = False,
) -> str:
    """Return the message of a failure: the diagnosis, the first difference, and the other stages
    that differ.

    Args:
        comparisons: of all stages.
        diagnosis: of the difference, if there is one.
        next_step: a way to learn more.
        verbose: also include all of the diagnosis.

    Returns:
        The message; empty if no stage differs.
    """
    comparisons = list(comparisons)
    difference = first_difference(comparisons)
    if difference is None:
        return ""
    is_diagnosed = diagnosis is not None and diagnosis.is_wrong
    lines = (
        [diagnosis.as_text(verbose=verbose), ""] if diagnosis is not None and is_diagnosed else []
    )
    lines.append(str(difference))
    if agreed := [comparison.stage for comparison in comparisons if comparison.passed]:
        lines.append(f"  agree       {some_of(agreed)}")
    if later := [each.stage for each in comparisons if not each.passed and each is not difference]:
        lines.append(f"  also differ {some_of(later)}")
    lines += [f"  next        {next_step}"] if next_step else []
    return "\n".join(lines)


def _as_recorded(
    comparisons: list[Comparison], diagnosis: Diagnosis, reference: Reference, arithmetic: str
) -> list[Comparison]:
    """Compare stages again after undoing the conventions of a diagnosis.

    Stages outside of the diagnosis, such as gradients, are unchanged. If nothing is wrong, all
    other stages pass.
    """
    shapes = {each.stage: each.shape for each in comparisons if not each.passed}
    taken = {name: x for name, x in diagnosis.taken.items() if shapes.get(name) == x.shape}
    with np.errstate(over="ignore", invalid="ignore"):
        found = (
            _compare_with_reference(taken, reference, comparisons[0].case, arithmetic)
            if taken
            else []
        )
    again = {each.stage: each for each in found}
    return [
        _passed_as_recorded(again.get(each.stage, each), diagnosis, each.stage in again)
        for each in comparisons
    ]


def _passed_as_recorded(comparison: Comparison, diagnosis: Diagnosis, is_again: bool) -> Comparison:
    stage, words = stage_named(comparison.stage), diagnosis.conventions.get(comparison.stage, "")
    if comparison.passed:
        return replace(comparison, reason=words)
    if (
        stage.is_gradient
        or stage.kind not in STAGES
        or (diagnosis.is_wrong and (is_again or not words))
    ):
        return comparison
    passed = replace(comparison, status="passed", reason=words or diagnosis.choice)
    # A stage that cannot be converted to the reference's convention agrees with the reference in
    # its own.
    if is_again or (not words and math.isfinite(comparison.ratio)):
        return passed
    no_distance = {
        "error": 0.0,
        "ratio": 0.0,
        "max_abs": 0.0,
        "max_ulp": 0.0,
        "mismatched": 0,
        "pcc": None,
    }
    return replace(passed, **no_distance, worst_index={}, worst_values=None, by_position=())


def _compare_with_reference(
    actual: Stages, reference: Reference, name: str, arithmetic: str
) -> list[Comparison]:
    _check_has(arithmetic, reference.problem.dtype)
    expected, dtype = reference.accumulated, reference.problem.dtype
    unknown = f"the reference has no such stage, only {', '.join(expected)}"
    known = [Label(name, "actual", dtype, stage) for stage in expected if stage in actual]
    lacking = [Label(name, "actual", dtype, stage) for stage in actual if stage not in expected]
    found = [reference.compare_used(actual[label.stage], label, arithmetic) for label in known]
    return [
        *(_explained(comparison, "the same-precision reference") for comparison in found),
        *(failure(actual[label.stage], unknown, label) for label in lacking),
    ]


def _compare_with_expected(
    arrays: Mapping[str, Stages], dtype: str | None, name: str, arithmetic: str
) -> list[Comparison]:
    dtypes = {array.dtype.name: None for stages in arrays.values() for array in stages.values()}
    floating = [each for each in dtypes if each in DTYPES]
    dtype = dtype or max(floating, key=unit, default=next(iter(dtypes)))
    if floating:
        _check_has(arithmetic, dtype)
    return [
        replace(_compare_stage(arrays, stage, dtype, name, arithmetic), by_reference=False)
        for stage in _in_order({**arrays["expected"], **arrays["actual"]})
    ]


def _compare_stage(
    arrays: Mapping[str, Stages], stage: str, dtype: str, name: str, arithmetic: str
) -> Comparison:
    label = Label(name, "actual", dtype, stage)
    there = {role: stages[stage] for role, stages in arrays.items() if stage in stages}
    if lacking := [role for role in arrays if role not in there]:
        shown = there.get("expected", next(iter(there.values())))
        return failure(shown, f"{' and '.join(lacking)} must also have this stage", label)
    actual, expected, same_precision = (
        there["actual"],
        there["expected"],
        there.get("same_precision"),
    )
    if reason := _why_incomparable(actual, expected, same_precision):
        return failure(expected, reason, label)
    if actual.dtype.name not in DTYPES:
        return _explained(measure(actual, expected, NOTHING, label, ulps_of="float32"))
    wide = expected.astype(np.float64)
    if same_precision is not None:
        allowed = budget(wide, same_precision, dtype, None, arithmetic, dtype, has_slope=False)
        return _explained(
            measure(actual, wide, allowed, label, ulps_of=actual.dtype.name), "same_precision"
        )
    scale = {"rms": float(np.sqrt(np.mean(wide**2))), "max": float(np.abs(wide).max())}
    one = unit(dtype) if arithmetic == "ieee" else max(unit(dtype), TENSIX_FLOOR[dtype])
    allowed = {norm: UNITS[dtype] * one * size for norm, size in scale.items()}
    return _explained(measure(actual, wide, allowed, label, ulps_of=actual.dtype.name))


def _check_has(arithmetic: str, dtype: str) -> None:
    """Reject a dtype that the hardware does not have."""
    if arithmetic.startswith("tensix") and dtype not in TENSIX_FLOOR:
        raise InputError(
            "dtype", f"be one of {list(TENSIX_FLOOR)} with arithmetic='tensix'", dtype=dtype
        )


def _explained(comparison: Comparison, noise: str = "") -> Comparison:
    """Return a comparison with the violated rule as its reason, if it failed."""
    if comparison.passed or comparison.reason:
        return comparison
    if noise:
        reason = f"beyond {factor(comparison.size):.3g} times the error of {noise}"
    elif comparison.budget:
        reason = (
            f"beyond {UNITS[comparison.dtype]} units of rounding, all that is allowed without "
            f"same_precision or problem"
        )
    else:
        reason = "these must be equal"
    return replace(comparison, reason=reason)


def _why_incomparable(
    actual: np.ndarray, expected: np.ndarray, same_precision: np.ndarray | None
) -> str:
    """Return the reason why arrays cannot be compared; empty if they can."""
    if reason := why_incomparable(actual, expected):
        return reason
    for array in (actual, expected):
        if not _kind(array):
            return f"dtype {array.dtype}, must be bool, an integer or one of {', '.join(DTYPES)}"
    if _kind(actual) != _kind(expected):
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    if not_finite := np.count_nonzero(~np.isfinite(expected)):
        return f"{not_finite} elements of expected are NaN or infinite"
    if _kind(actual) == "integer" and max(_largest(actual), _largest(expected)) > LARGEST_INTEGER:
        return f"integers beyond {LARGEST_INTEGER} cannot be compared"
    if same_precision is not None:
        if same_precision.shape != expected.shape:
            return f"same_precision has shape {same_precision.shape}, expected {expected.shape}"
        if same_precision.dtype != actual.dtype:
            return f"dtype {actual.dtype}, that of same_precision is {same_precision.dtype}"
        if not_finite := np.count_nonzero(~np.isfinite(same_precision)):
            return f"{not_finite} elements of same_precision are NaN or infinite"
    return ""


def _kind(array: np.ndarray) -> str:
    """Return the kind of values of an array; empty if it cannot be compared."""
    if array.dtype.kind in "biu":
        return "bool" if array.dtype.kind == "b" else "integer"
    return "floating" if array.dtype.name in DTYPES else ""


def _largest(array: np.ndarray) -> int:
    return max(abs(int(array.min())), abs(int(array.max())))


def _share_an_array(actual: Any, other: Any) -> bool:
    if isinstance(actual, Mapping):
        return any(array is other.get(stage) for stage, array in actual.items())
    return actual is other


def _in_order(stages: Iterable[str]) -> list[str]:
    """Return stages in the order of the data flow (`jax.jit` sorts mappings by name); unknown ones
    stay in place.
    """
    stages, order = list(stages), list(STAGES)
    known = {stage: stage_named(stage) for stage in stages}
    if not all(stage.kind in STAGES for stage in known.values()):
        return stages

    def place(name: str) -> tuple[int, int]:
        stage = known[name]
        return -1 if stage.step is None else stage.step, order.index(stage.kind)

    return sorted(stages, key=place)
