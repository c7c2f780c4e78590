"""`assert_parity`: arrays, or stages by name, must agree up to rounding."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_spec import InputError, InputTypeError
from parity.measure.core.arrays import arithmetic_of, names_of, stages_of
from parity.measure.core.case import DTYPES
from parity.measure.core.compare import (
    NOTHING,
    TENSIX_FLOOR,
    Comparison,
    Label,
    budget,
    elements_are,
    factor,
    failure,
    first_difference,
    measure,
    why_incomparable,
)
from parity.measure.core.compare import unit_of_rounding as unit
from parity.measure.core.problem import Problem
from parity.measure.core.reference import ARITHMETICS
from parity.measure.core.stages import STAGES, did_you_mean_stage, stage_named
from parity.measure.core.trace import Reference, with_absent_gradients
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
    """A stage is right, but is recorded in a different convention or computed differently.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", parity.ConventionWarning)
        ...     parity.assert_parity(np.ones(3), np.ones(3))
    """


NEXT = (
    "to find the bug, describe the layer as a parity.Case, and pass "
    "problem=parity.make_problem(case, dtype, weights) instead of expected: see "
    "docs/how-to/own-layer.md, or help(parity.make_problem)"
)
"""The next step if arrays differ from expected ones."""

LARGEST_INTEGER = 2**53
"""Integers are compared in float64, which represents them exactly up to this one."""


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
    be equal. NaN and infinity always fail, as do a different shape or kind of dtype, an empty
    array, and a missing or additional stage.

    Args:
        actual: an array of NumPy, torch, JAX or TTNN, or a mapping of such arrays by stage: `q`,
            `scores`, `output` and others, see `STAGES`. The message begins with the first stage
            that differs, in the order of the data flow, or for other names in the order of
            `expected`.
        expected: the expected values in the same form, best in float64; omit it with `problem`.
        same_precision: the result of a second, correct implementation in the precision of `actual`,
            in the same form. The tolerance is then 4 times the error of `same_precision` plus one
            unit of rounding, as in `mha-parity compare`. This is the best choice without a
            `problem`.
        problem: the case, weights and inputs. Then the expected values and their noise come from
            the float64 reference, for the stages of `actual`.
        dtype: name of the dtype of the computation, if no array shows it; by default the narrowest
            floating-point dtype of all arrays.
        name: a title for the message.
        stage: the stage of the arrays, if they are not mappings.
        diagnose: with `problem`, search for the bug that explains a difference, for up to 5
            seconds. If nothing is wrong, because a stage is only recorded in a different convention
            or scores are kept in 16 bits, a `ConventionWarning` is issued instead of an error.
        arithmetic: arithmetic of the hardware, one of `reference.ARITHMETICS`: `ieee`, or `tensix`,
            Tenstorrent's. The default is `tensix` if `actual` contains a TTNN array on a card or a
            simulator.

    Without `same_precision` and `problem` a coarse rule applies: the root mean square of the error
    may be 16 units of rounding (4 in bfloat16 and float16, see `UNITS`) of the root mean square of
    `expected`, and its maximum the same of the maximum. That is 2e-6 in float32 and 3% in bfloat16.
    Forward stages of correct implementations stay within it while logits are small. Large logits
    and gradients may exceed it: pass `same_precision` or `problem` for those, and to detect smaller
    bugs.

    Raises:
        AssertionError: if they differ.
        TypeError: if the arguments cannot be combined, or something is not an array.
        ValueError: if the dtype is unknown, or with `problem` the name of a stage.

    Example:
        >>> expected = np.linspace(0.0, 1.0, 6)
        >>> parity.assert_parity(expected.astype(np.float32), expected)
        >>> parity.assert_parity(1.01 * expected.astype(np.float32), expected)
        Traceback (most recent call last):
        ...
        AssertionError: parity/output: actual differs from expected (float32)
        ...
    """
    __tracebackhide__ = True
    comparisons, diagnosis = compare_and_diagnose(
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
    next_step = "" if problem else NEXT
    text = message(comparisons, diagnosis, next_step)
    if text:
        raise AssertionError(text)


def compare_and_diagnose(
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
    # The comparison and the diagnosis share a reference, which computes each stage once.
    reference = None
    if isinstance(problem, Problem):
        _check_stages(actual, stage)
        reference = _reference_for(actual, problem, stage)
        actual = with_absent_gradients(actual, reference)
    comparisons = compare_arrays(
        actual,
        expected,
        problem=problem,
        stage=stage,
        arithmetic=arithmetic,
        reference=reference,
        **options,
    )
    if reference is None or not diagnose or first_difference(comparisons) is None:
        return comparisons, None
    # Only a difference needs the diagnosis, which is most of the package.
    from parity.explain.diagnosis.diagnose import diagnose_stages, stages_to_diagnose

    stages = stages_to_diagnose(stages_of("actual", actual, stage), reference.problem)
    if not stages:
        return comparisons, None

    if arithmetic is None:
        arithmetic = arithmetic_of(actual)
    diagnosis = diagnose_stages(stages, reference, arithmetic, comparisons=comparisons)
    as_recorded = _as_recorded(comparisons, diagnosis, reference, arithmetic)
    if not diagnosis.is_wrong and as_recorded != comparisons:
        # The warning belongs to the caller of `assert_parity`, or of the fixture.
        warnings.warn(f"{comparisons[0].case}: {diagnosis}", ConventionWarning, stacklevel=3)
    return as_recorded, diagnosis


def _reference_for(actual: Any, problem: Problem, stage: str) -> Reference:
    """Return the reference of a problem for the stages of some arrays."""
    stages = [stage_named(name) for name in names_of(actual, stage)]
    with_gradients = problem.case.has_gradients and any(each.is_gradient for each in stages)
    return Reference(problem, with_gradients, frozenset(map(str, stages)))


def _check_stages(actual: Any, stage: str) -> None:
    """Reject a name that is not the name of a stage, with the nearest one."""
    for name in names_of(actual, stage):
        if _is_known(name):
            continue
        known_names = [known for known in STAGES if "." not in known]
        hint = did_you_mean_stage(name, STAGES)
        raise InputError(
            "each stage", f"be one of {', '.join(known_names)}, …", repr(name), hint=hint
        )


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
    _check_arguments(actual, expected, same_precision, problem, dtype, arithmetic)
    arguments = {"actual": actual, "expected": expected, "same_precision": same_precision}
    arguments = {role: value for role, value in arguments.items() if value is not None}
    _check_roles(arguments)
    arrays = {role: stages_of(role, value, stage) for role, value in arguments.items()}
    if not any(arrays.values()):
        label = Label(name, "actual", dtype or "no dtype", stage)
        return [failure(np.empty(0), "there are no stages to compare", label)]
    if arithmetic is None:
        arithmetic = arithmetic_of(actual)
    with np.errstate(over="ignore", invalid="ignore"):  # infinite errors are reported
        if problem is None:
            return _compare_with_expected(arrays, dtype, name, arithmetic)
        if reference is None:
            _check_stages(actual, stage)
            reference = _reference_for(actual, problem, stage)
        return _compare_with_reference(arrays["actual"], reference, name, arithmetic)


def _check_arguments(
    actual: Any,
    expected: Any,
    same_precision: Any,
    problem: Problem | None,
    dtype: str | None,
    arithmetic: str | None,
) -> None:
    """Reject arguments of `assert_parity` that are unknown, missing or contradict each other."""
    if dtype is not None and dtype not in DTYPES:
        raise InputError("dtype", f"be one of {list(DTYPES)}", dtype=dtype)
    if arithmetic not in (None, *ARITHMETICS):
        raise InputError("arithmetic", f"be one of {list(ARITHMETICS)}", arithmetic=arithmetic)
    if expected is None and problem is None:
        raise InputTypeError("one of expected and problem", "be passed", "neither")
    if expected is not None and problem is not None:
        raise InputTypeError("one of expected and problem", "be passed", "both")
    if problem is not None:
        if same_precision is not None or dtype is not None:
            raise InputTypeError(
                "problem",
                "not be combined with same_precision or dtype, because it determines both",
            )
        if not isinstance(problem, Problem):
            raise InputTypeError(
                "problem", "be a Problem, see parity.make_problem", type(problem).__name__
            )
    if actual is None:
        raise InputTypeError(
            "actual",
            "be an array or a mapping of arrays by stage",
            "None: is there a return missing?",
        )


def _check_roles(arguments: Mapping[str, Any]) -> None:
    """Reject a mixture of arrays and mappings, and actual arrays as `same_precision`."""
    are_mappings = {isinstance(value, Mapping) for value in arguments.values()}
    if len(are_mappings) > 1:
        kinds = [f"{role}={type(value).__name__}" for role, value in arguments.items()]
        raise InputTypeError(
            ", ".join(arguments),
            "all be arrays or all be mappings of arrays by stage",
            ", ".join(kinds),
        )
    same_precision = arguments.get("same_precision")
    if same_precision is not None and _share_an_array(arguments["actual"], same_precision):
        # Any error would be allowed: it would be its own noise.
        raise InputTypeError(
            "same_precision", "come from a second implementation", "the arrays of actual"
        )


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
        comparisons: comparisons of all stages.
        diagnosis: diagnosis of the difference, if there is one.
        next_step: a way to learn more.
        verbose: include the whole diagnosis, not only its summary.

    Returns:
        The message; empty if no stage differs.
    """
    comparisons = list(comparisons)
    difference = first_difference(comparisons)
    if difference is None:
        return ""
    lines = []
    has_diagnosis = diagnosis is not None and diagnosis.is_wrong
    if diagnosis is not None and diagnosis.is_wrong:
        lines += [diagnosis.as_text(verbose=verbose), ""]
    # The diagnosis has the size of the error: computed from the observed stages before it.
    lines.append(difference.as_text(with_budget=not has_diagnosis))
    agreeing = []
    differing = []
    for comparison in comparisons:
        if comparison.passed:
            agreeing.append(comparison.stage)
        elif comparison is not difference:
            differing.append(comparison.stage)
    if agreeing:
        lines.append(f"  agree       {some_of(agreeing)}")
    if differing:
        lines.append(f"  also differ {some_of(differing)}")
    if next_step:
        lines.append(f"  next        {next_step}")
    return "\n".join(lines)


def _as_recorded(
    comparisons: list[Comparison], diagnosis: Diagnosis, reference: Reference, arithmetic: str
) -> list[Comparison]:
    """Compare stages again after undoing the conventions of a diagnosis.

    Names that are no stages are unchanged. If nothing is wrong, all others pass.
    """
    converted = {}
    for comparison in comparisons:
        array = diagnosis.taken.get(comparison.stage)
        # A convention that changes the shape cannot be shown at the positions of the recorded
        # array.
        if not comparison.passed and array is not None and array.shape == comparison.shape:
            converted[comparison.stage] = array
    repeated = {}
    if converted:
        with np.errstate(over="ignore", invalid="ignore"):
            for comparison in _compare_with_reference(
                converted, reference, comparisons[0].case, arithmetic
            ):
                repeated[comparison.stage] = comparison
    results = []
    for comparison in comparisons:
        is_repeated = comparison.stage in repeated
        latest = repeated[comparison.stage] if is_repeated else comparison
        results.append(_passed_as_recorded(latest, diagnosis, is_repeated))
    return results


def _passed_as_recorded(
    comparison: Comparison, diagnosis: Diagnosis, is_repeated: bool
) -> Comparison:
    """Return a comparison that passes if a convention, or a choice, explains it.

    Args:
        comparison: comparison of a stage, after undoing its convention if `is_repeated`.
        diagnosis: diagnosis of all stages.
        is_repeated: the stage was compared again.
    """
    stage = stage_named(comparison.stage)
    convention = diagnosis.conventions.get(comparison.stage, "")
    if comparison.passed:
        return replace(comparison, reason=convention)
    if not stage.is_gradient and stage.kind not in STAGES:
        return comparison
    if diagnosis.is_wrong and (is_repeated or not convention):
        return comparison
    passed = replace(comparison, status="passed", reason=convention or diagnosis.choice)
    # A stage that cannot be converted to the reference's convention agrees with the reference in
    # its own.
    has_distance = is_repeated or (not convention and math.isfinite(comparison.ratio))
    if has_distance:
        return passed
    return replace(
        passed,
        error=0.0,
        ratio=0.0,
        max_abs=0.0,
        max_ulp=0.0,
        mismatched=0,
        pcc=None,
        worst_index={},
        worst_values=None,
        by_position=(),
    )


def _compare_with_reference(
    actual: Stages, reference: Reference, name: str, arithmetic: str
) -> list[Comparison]:
    dtype = reference.problem.dtype
    _check_has(arithmetic, dtype)
    expected = reference.accumulated
    comparisons = []
    for stage in expected:
        if stage in actual:
            label = Label(name, "actual", dtype, stage)
            comparison = reference.compare_used(actual[stage], label, arithmetic)
            comparisons.append(_explained(comparison, "the same-precision reference"))
    for stage, array in actual.items():
        if stage not in expected:
            reason = f"the layer of case {reference.problem.case.name} has no such stage"
            comparisons.append(failure(array, reason, Label(name, "actual", dtype, stage)))
    return comparisons


def _compare_with_expected(
    arrays: Mapping[str, Stages], dtype: str | None, name: str, arithmetic: str
) -> list[Comparison]:
    names_of_dtypes = []
    for stages in arrays.values():
        names_of_dtypes += [array.dtype.name for array in stages.values()]
    floating_names = [name_of_dtype for name_of_dtype in names_of_dtypes if name_of_dtype in DTYPES]
    if dtype is None:
        # The coarsest unit of rounding belongs to the narrowest dtype.
        dtype = max(floating_names, key=unit) if floating_names else names_of_dtypes[0]
    if floating_names:
        _check_has(arithmetic, dtype)
    comparisons = []
    for stage in _in_order({**arrays["expected"], **arrays["actual"]}):
        comparison = _compare_stage(arrays, stage, dtype, name, arithmetic)
        comparisons.append(replace(comparison, by_reference=False))
    return comparisons


def _compare_stage(
    arrays: Mapping[str, Stages], stage: str, dtype: str, name: str, arithmetic: str
) -> Comparison:
    label = Label(name, "actual", dtype, stage)
    of_stage = {role: stages[stage] for role, stages in arrays.items() if stage in stages}
    missing = [role for role in arrays if role not in of_stage]
    if missing:
        shown = of_stage.get("expected", next(iter(of_stage.values())))
        return failure(shown, f"{' and '.join(missing)} must also have this stage", label)
    actual = of_stage["actual"]
    expected = of_stage["expected"]
    same_precision = of_stage.get("same_precision")
    reason = _why_not_comparable(actual, expected, same_precision)
    if reason:
        return failure(expected, reason, label)
    if actual.dtype.name not in DTYPES:
        return _explained(measure(actual, expected, NOTHING, label, ulps_of="float32"))
    wide = expected.astype(np.float64)
    if same_precision is None:
        noise, allowed = "", _coarse_budget(wide, dtype, arithmetic)
    else:
        noise = "same_precision"
        allowed = budget(wide, same_precision, dtype, None, arithmetic, dtype, has_slope=False)
    return _explained(measure(actual, wide, allowed, label, ulps_of=actual.dtype.name), noise)


def _coarse_budget(expected: np.ndarray, dtype: str, arithmetic: str) -> dict[str, float]:
    """Return the error that is allowed without knowledge of the noise, by norm: see `UNITS`."""
    rounding = unit(dtype)
    if arithmetic != "ieee":
        rounding = max(rounding, TENSIX_FLOOR[dtype])
    rms = float(np.sqrt(np.mean(expected**2)))
    largest = float(np.abs(expected).max())
    relative = UNITS[dtype] * rounding
    return {"rms": relative * rms, "max": relative * largest}


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


def _why_not_comparable(
    actual: np.ndarray, expected: np.ndarray, same_precision: np.ndarray | None
) -> str:
    """Return the reason why arrays cannot be compared; empty if they can."""
    reason = why_incomparable(actual, expected)
    if reason:
        return reason
    for array in (actual, expected):
        if not _kind(array):
            return f"dtype {array.dtype}, must be bool, an integer or one of {', '.join(DTYPES)}"
    if _kind(actual) != _kind(expected):
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    not_finite = int(np.count_nonzero(~np.isfinite(expected)))
    if not_finite:
        return f"{elements_are(not_finite, 'expected')} NaN or infinite"
    if _kind(actual) == "integer" and max(_largest(actual), _largest(expected)) > LARGEST_INTEGER:
        return f"integers beyond {LARGEST_INTEGER} cannot be compared"
    if same_precision is None:
        return ""
    if same_precision.shape != expected.shape:
        return f"same_precision has shape {same_precision.shape}, expected {expected.shape}"
    if same_precision.dtype != actual.dtype:
        return f"dtype {actual.dtype}, and the dtype of same_precision is {same_precision.dtype}"
    not_finite = int(np.count_nonzero(~np.isfinite(same_precision)))
    if not_finite:
        return f"{elements_are(not_finite, 'same_precision')} NaN or infinite"
    return ""


def _kind(array: np.ndarray) -> str:
    """Return the kind of values of an array; empty if it cannot be compared."""
    if array.dtype.kind == "b":
        return "bool"
    if array.dtype.kind in "iu":
        return "integer"
    if array.dtype.name in DTYPES:
        return "floating"
    return ""


def _largest(array: np.ndarray) -> int:
    # Python's integers have no bounds: an int64 has no magnitude of the least int64.
    return max(abs(int(array.min())), abs(int(array.max())))


def _share_an_array(actual: Any, other: Any) -> bool:
    if isinstance(actual, Mapping):
        return any(array is other.get(stage) for stage, array in actual.items())
    return actual is other


def _are_known(names: Iterable[str]) -> bool:
    """Return whether all names are names of stages."""
    return all(_is_known(name) for name in names)


def _is_known(name: str) -> bool:
    stage = stage_named(name)
    return stage.is_gradient or stage.kind in STAGES


def _in_order(names: Iterable[str]) -> list[str]:
    """Return stages in the order of the data flow (`jax.jit` sorts mappings by name).

    If one is unknown, all stay in place.
    """
    names = list(names)
    if not _are_known(names):
        return names
    kinds = list(STAGES)

    def position_in_flow(name: str) -> tuple[int, int]:
        stage = stage_named(name)
        step = -1 if stage.step is None else stage.step
        if stage.kind not in kinds:  # the gradient of a weight
            return step, len(kinds)
        return step, kinds.index(stage.kind)

    return sorted(names, key=position_in_flow)
