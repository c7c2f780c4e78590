"""Comparison: the distance of an implementation from float64, its tolerance, and where it is worst.

Two correct implementations differ by their rounding, which depends on the case: 1e-7 with small
random weights, 1e-2 with trained ones and large logits. The tolerance therefore follows from the
noise of the case: a stage passes if its error against the float64 reference is at most `FACTOR`
times the error of the same-precision reference, plus one unit of rounding. FlashAttention's tests
have the same idea: they allow a kernel twice the error of a plain implementation of the same
precision (Dao-AILab/flash-attention#446).

If the reference is NaN, because a row attends to a NaN of the case, the implementation must be NaN;
everywhere else it must be finite. The error is computed from elements that are finite in both.

The error is measured in three norms, and the worst ratio decides. The root mean square detects a
small error everywhere, which the maximum would miss. The maximum detects one wrong element, which
the mean would miss. The slope detects a consistent error, such as a gain, which the noise of single
elements would hide. If these pass, the zeros of attention weights are also compared: the weight of
a hidden key is exactly 0 in every dtype, and no other weight is.

Tenstorrent's hardware does not follow IEEE 754 ("tensix" in `reference.ARITHMETICS`). Its tolerance
follows from documented facts and from results of the real kernels in a simulator: float32 enters
the matrix engine as TF32, truncated instead of rounded; sums are float32; exponentials and
reciprocals are approximations. It has not been measured on a card yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import NamedTuple

import ml_dtypes
import numpy as np

from parity.measure.core.records import JsonRecord
from parity.measure.core.stages import stage_named
from parity.measure.core.weights import dtype_named
from parity.measure.core.zeros import WRONG_ZEROS, largest_zero, with_wrong_zeros, zero_on_one_side

FACTOR = 4.0
"""Tolerance as a multiple of the same-precision reference's error (for stages with few elements see
`factor`).

Rounding errors of correct implementations vary by chance. `docs/explanation/error-budget.md`
reports the share that torch and JAX on a CPU need. `tests/parity/measure/core/test_compare.py`
tests the errors that it still detects.
"""

TENSIX_FLOOR = {"float32": 2.0**-9, "bfloat16": 2.0**-8}
"""Relative error of one value on Tenstorrent's hardware: bfloat16 rounds by up to 2^-8; a product
of float32 values loses up to 2^-10 for each factor, truncated to TF32.

Measured on a simulator: with 2^-10, k of `trained-anarcii-cross` uses 1.07 of its budget, with 2^-9
0.56.
"""

DEVIATIONS = 2.0
"""Standard deviations added to the slope of the same-precision reference, which may be small by
chance.
"""

SAME_PRECISION = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float64": "float32",
}
"""Dtype of the same-precision reference. For float64 it is float32, with its error scaled by the
units of rounding.
"""

NOTHING = {"rms": 0.0, "max": 0.0}
"""Tolerance of masks and lengths."""

MOST_OVER = 4.0
"""Maximum excess over the budget for the noise to be measured again: a poor estimate is rarely
further off.
"""

POSITIONS = 64
"""Number of bins along the tokens in a comparison: enough for a line of a plot."""


@dataclass(frozen=True)
class Deviation:
    """Distance of an array from the expected one, and its tolerance.

    Attributes:
        error: root mean square of the error (for masks and lengths, the mean); infinite if only one
            side is finite.
        ratio: error / budget in the deciding norm; at most 1 passes.
        norm: the deciding norm.
        measured, allowed: error and budget by norm.
    """

    error: float
    ratio: float
    norm: str = "max"
    measured: Mapping[str, float] = field(default_factory=dict)
    allowed: Mapping[str, float] = field(default_factory=dict)

    def error_in(self, norm: str) -> float:
        """Return the error in a norm, or the root mean square if this norm was not measured."""
        return self.measured.get(norm, self.error)

    @property
    def has_wrong_zeros(self) -> bool:
        """Return whether attention weights are 0 for visible keys, or not 0 for hidden ones."""
        largest_wrong = self.measured.get("zeros", 0.0)
        return share(largest_wrong, self.allowed.get("zeros", 1.0)) > 1.0


class Label(NamedTuple):
    """Names of a comparison, and the dtype of the inputs."""

    case: str
    backend: str
    dtype: str
    stage: str


NOT_MEASURED = Deviation(math.inf, math.inf)


@dataclass(frozen=True)
class Comparison(JsonRecord):
    """Comparison of one stage of a case, computed by an implementation, with the float64 reference.

    Attributes:
        case, backend, dtype, stage: names of the compared stage.
        status: `passed` or `failed`.
        error: distance from float64, in the deciding norm.
        budget: tolerance of this distance.
        ratio: error / budget; at most 1 passes. Infinite if the budget is 0 or nothing can be
            measured.
        norm: deciding norm, `rms`, `max` or `slope`.
        max_abs: largest absolute error.
        max_ulp: largest error in units in the last place of the expected value, in the stage's
            dtype.
        pcc: Pearson correlation, for information only: it cannot detect a wrong scale.
        worst_index: index of the largest error, by axis letter.
        worst_values: actual and expected value at this index.
        mismatched, size: number of elements beyond the budget, and in total.
        shape: shape of the expected array.
        local_ratio: error / budget of the stage computed from the reference's values of earlier
            stages; the first stage above 1 is the culprit. None without earlier stages.
        reason: reason of a failure, as text.
        by_position: largest error at each token as a fraction of the maximum norm's budget, for
            plots: of query tokens if the stage has them, otherwise of key tokens or slots; at most
            `POSITIONS` bins.
        library: name of the backend, without the trace folder that `backend` may include; empty
            without a backend.
        by_reference: the expected values come from the reference, not from a caller.
        test: class and name of the test in JUnit's form; None outside tests.
    """

    case: str
    backend: str
    dtype: str
    stage: str
    status: str = "failed"
    error: float = math.inf
    budget: float = 0.0
    ratio: float = math.inf
    norm: str = "max"
    max_abs: float = math.inf
    max_ulp: float = math.inf
    pcc: float | None = None
    worst_index: dict[str, int] = field(default_factory=dict)
    worst_values: tuple[float, float] | None = None
    mismatched: int = 0
    size: int = 0
    shape: tuple[int, ...] = ()
    local_ratio: float | None = None
    reason: str = ""
    by_position: tuple[float, ...] = field(default=(), repr=False)
    library: str = field(default="", repr=False)
    by_reference: bool = field(default=True, repr=False)
    test: tuple[str, str] | None = field(default=None, repr=False)

    IN_JSON = ("*", "against")

    @property
    def against(self) -> str:
        """Description of the expected values."""
        if self.by_reference:
            return "the reference"
        return "expected"

    @property
    def passed(self) -> bool:
        """Return whether the stage and its own step are within their budgets."""
        return self.status == "passed"

    @property
    def is_culprit(self) -> bool:
        """Return whether this stage's own computation is wrong, regardless of earlier stages."""
        return not self.passed and (self.local_ratio is None or self.local_ratio > 1.0)

    @property
    def worse_ratio(self) -> float:
        """Larger error / budget of the actual run and of the stage's own step."""
        return max(self.ratio, self.local_ratio or 0.0)

    def with_step(self, ratio: float, reason: str) -> Comparison:
        """Return the comparison with the ratio of its own step.

        Args:
            ratio: error / budget of this step alone.
            reason: reason if it exceeds 1 and the comparison has no other, as text.
        """
        if self.passed and ratio <= 1.0:
            return replace(self, status="passed", local_ratio=ratio, reason="")
        own_reason = self.reason
        if not own_reason and ratio > 1.0:
            own_reason = reason
        return replace(self, status="failed", local_ratio=ratio, reason=own_reason)

    @property
    def key(self) -> tuple[str, str, str]:
        """The case, dtype and backend, by which reports have diagnoses and commands."""
        return self.case, self.dtype, self.backend

    def __str__(self) -> str:
        return self.as_text()

    def as_text(self, *, with_budget: bool = True) -> str:
        """Return the comparison as text.

        Args:
            with_budget: include the error and its budget; a diagnosis next to it has its own.
        """
        subject = f"{self.case}/{self.stage}: {self.backend}"
        if self.passed:
            used = f"{self.worse_ratio:.2g} of its budget"
            return f"{subject} agrees with {self.against} ({self.dtype}), {used}"
        axes = " ".join(axis_names(self.stage, len(self.shape)))
        lines = [f"{subject} differs from {self.against} ({self.dtype})"]
        lines.append(f"  shape       ({axes}) = {self.shape}")
        # An array that cannot be compared has neither wrong elements nor an error.
        if self.worst_values is not None:
            mismatched = f"{self.mismatched} / {self.size} ({self.mismatched / self.size:.1%})"
            lines.append(f"  mismatched  {mismatched}")
            index = ", ".join(f"{axis.lower()}={i}" for axis, i in self.worst_index.items())
            actual, expected = self.worst_values
            lines.append(
                f"  worst       {self.max_abs:.2e} at ({index}): {actual:.6g}, expected "
                f"{expected:.6g}"
            )
        if with_budget and self.worst_values is not None:
            lines.append(
                f"  allowed     {self.budget:.1e} ({self.norm}); the error is {self.error:.1e}"
            )
        if self.reason:
            lines.append(f"  reason      {self.reason}")
        return "\n".join(lines)


def compare(
    actual: np.ndarray,
    expected: np.ndarray,
    same_precision: np.ndarray,
    label: Label,
    *,
    terms: np.ndarray | None = None,
    arithmetic: str = "ieee",
) -> Comparison:
    """Compare one stage.

    Args:
        actual: values of the implementation.
        expected: float64 reference.
        same_precision: reference in the dtype of `SAME_PRECISION` and in the arithmetic.
        label: label of the comparison.
        terms: magnitude of the terms of the stage's sums, if they may cancel; default: the expected
            value.
        arithmetic: arithmetic of the hardware, one of `reference.ARITHMETICS`.
    """
    dtype, stage = dtype_of_stage(label.stage, label.dtype), stage_named(label.stage)
    reason = why_incomparable(actual, expected, dtype)
    if reason:
        return failure(expected, reason, label)
    expected = expected.astype(np.float64)
    if stage.is_exact:
        return measure(actual, expected, NOTHING, label, ulps_of="float32")
    if arithmetic.startswith("tensix"):
        # Its matrix engine treats NaN as a number, with unknown results.
        actual = np.where(np.isnan(expected), np.asarray(np.nan, actual.dtype), actual)
    # The slope is relative to the expected values, but the terms of a gradient may cancel.
    has_slope = terms is None and not stage.is_gradient
    allowed = budget(
        expected,
        same_precision,
        label.dtype,
        terms,
        arithmetic,
        has_slope=has_slope,
        stage=label.stage,
    )
    return measure(actual, expected, allowed, label, ulps_of=dtype.name)


def why_incomparable(
    actual: np.ndarray, expected: np.ndarray, dtype: np.dtype | None = None
) -> str:
    """Return why an array cannot be compared with another: its shape, size or dtype."""
    if actual.shape != expected.shape:  # NumPy would broadcast
        return f"shape {actual.shape}, expected {expected.shape}"
    if actual.size == 0:
        return "there are no elements to compare"
    if dtype is not None and actual.dtype != dtype:
        return f"dtype {actual.dtype}, expected {dtype}"
    return ""


def deviation_of(
    actual: np.ndarray, expected: np.ndarray, allowed: Mapping[str, float], stage: str
) -> Deviation:
    """Compare an array with the expected one, of the same shape, by the tolerance in each norm."""
    actual, expected = whole_rows(actual, stage), whole_rows(expected, stage)
    errors = errors_of(actual, expected)
    measured = _norms_of_errors(errors, expected)
    if "slope" in allowed:
        measured["slope"] = math.inf
        if math.isfinite(measured["max"]):
            measured["slope"] = slope(actual, expected, np.isfinite(expected))
    ratios = {norm: share(size, allowed[norm]) for norm, size in measured.items()}
    norm = max(ratios, key=ratios.__getitem__)
    if "zeros" in allowed:
        measured["zeros"] = float(zero_on_one_side(actual, expected).max(initial=0.0))
        ratios["zeros"] = share(measured["zeros"], allowed["zeros"])
        # Zeros decide only if all norms pass, which say more about an error.
        if ratios[norm] <= 1.0 < ratios["zeros"]:
            norm = "zeros"
    error = measured["rms"]
    if stage_named(stage).is_exact:
        error = float(errors.mean())
    return Deviation(error, ratios[norm], norm, measured, allowed)


def errors_in_norms(actual: np.ndarray, expected: np.ndarray, stage: str) -> dict[str, float]:
    """Return the root mean square and the largest error of an array, as `deviation_of` does."""
    actual, expected = whole_rows(actual, stage), whole_rows(expected, stage)
    return _norms_of_errors(errors_of(actual, expected), expected)


def _norms_of_errors(errors: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Return norms of errors, without those where NaN is expected and observed."""
    return norms_of(errors, ~np.isnan(expected) | np.isinf(errors))


def measure(
    actual: np.ndarray,
    expected: np.ndarray,
    allowed: Mapping[str, float],
    label: Label,
    *,
    ulps_of: str,
) -> Comparison:
    """Compare an array with another of its shape, and return where it is worst.

    Args:
        actual, expected: at least one element. If only one of two values is NaN, the error is
            infinite.
        allowed: tolerance by norm: `rms`, `max` and, if it is to be compared, `slope`.
        label: label of the comparison.
        ulps_of: name of the dtype whose units in the last place are counted.
    """
    stage = label.stage
    actual = whole_rows(actual, stage).astype(np.float64)
    expected = whole_rows(expected, stage).astype(np.float64)
    deviation = deviation_of(actual, expected, allowed, stage)
    errors = errors_of(actual, expected)
    if deviation.norm == "zeros":
        errors = with_wrong_zeros(errors, actual, expected, allowed)
    worst = np.unravel_index(int(errors.argmax()), errors.shape)
    with np.errstate(over="ignore"):  # the error of an expected 0 may overflow
        ulps = errors / _spacing(np.nan_to_num(expected), ulps_of)
    reason = _what_is_not_finite(actual, expected)
    if not reason and deviation.has_wrong_zeros:
        reason = WRONG_ZEROS
    status = "passed" if deviation.ratio <= 1.0 else "failed"
    return Comparison(
        *label,
        status=status,
        error=deviation.measured[deviation.norm],
        budget=allowed[deviation.norm],
        ratio=deviation.ratio,
        norm=deviation.norm,
        max_abs=deviation.measured["max"],
        max_ulp=float(ulps.max()),
        pcc=_correlation(actual, expected),
        worst_index=dict(zip(axis_names(stage, errors.ndim), map(int, worst), strict=True)),
        worst_values=(float(actual[worst]), float(expected[worst])),
        mismatched=int(np.count_nonzero(errors > allowed["max"])),
        size=actual.size,
        shape=actual.shape,
        reason=reason,
        by_position=_by_position(errors, allowed["max"], stage),
    )


def slope(actual: np.ndarray, expected: np.ndarray, counted: np.ndarray) -> float:
    """Return the gain in an error: its slope on expected values, times the size of these.

    The line passes through 0. Least squares over the finite elements. For n independent errors it
    is sqrt(n) times smaller than their root mean square.
    """
    x = _elements(expected, counted).astype(np.float64, copy=False)
    if not x.size:
        return 0.0
    size = math.sqrt(_mean(x**2))
    if size == 0.0:  # zeros, or values whose squares are too small for float64
        return 0.0
    errors = _elements(actual, counted).astype(np.float64, copy=False) - x
    return abs(_mean(errors * x)) / size


def _elements(x: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return some elements of an array, in one dimension; not a copy if it is all of them."""
    if counted.all():
        return x.reshape(-1)
    return x[counted]


def _mean(x: np.ndarray) -> float:
    """Return the mean of contiguous values, faster than `x.mean()`.

    It takes a third of the time, which dominates for small arrays.
    """
    return float(np.add.reduce(x)) / x.size


def errors_of(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return absolute errors in float64.

    They are 0 if both are NaN, infinity if only one is NaN, or if one is infinite.
    """
    actual = actual.astype(np.float64, copy=False)
    expected = expected.astype(np.float64, copy=False)
    with np.errstate(invalid="ignore"):
        errors = np.abs(actual - expected)
    is_undefined = np.isnan(errors)
    if not is_undefined.any():
        return errors
    both_nan = np.isnan(actual) & np.isnan(expected)
    return np.where(is_undefined, np.where(both_nan, 0.0, np.inf), errors)


def whole_rows(x: np.ndarray, stage: str) -> np.ndarray:
    """Return attention weights with rows of NaN if any element is.

    In such rows a masked key may be 0 or NaN.
    """
    if not stage_named(stage).is_attn_weights or x.ndim == 0:
        return x
    has_nan = np.isnan(x).any(axis=-1, keepdims=True)
    if not has_nan.any():
        return x
    return np.where((x == 0) & has_nan, np.full_like(x, np.nan), x)


def norms_of(x: np.ndarray, counted: np.ndarray) -> dict[str, float]:
    """Return root mean square and largest absolute value of some elements; 0 if there are none."""
    values = np.abs(_elements(x, counted), dtype=np.float64)
    if not values.size:
        return {"rms": 0.0, "max": 0.0}
    return {"rms": math.sqrt(_mean(values**2)), "max": float(values.max())}


def size_of(x: np.ndarray) -> float:
    """Return the root mean square of the finite elements of an array; 0 if there are none."""
    return norms_of(x, np.isfinite(x))["rms"]


def _what_is_not_finite(actual: np.ndarray, expected: np.ndarray) -> str:
    """Describe values that are wrongly finite, NaN or infinite; empty if there are none."""
    must_be_nan = np.isnan(expected)
    num_not_nan = int(np.count_nonzero(must_be_nan & ~np.isnan(actual)))
    num_wrongly_not_finite = int(np.count_nonzero(~must_be_nan & ~np.isfinite(actual)))
    reasons = []
    if num_not_nan:
        reasons.append(f"{elements_are(num_not_nan)} not NaN where the reference is")
    if num_wrongly_not_finite:
        where = " where the reference is finite" if must_be_nan.any() else ""
        reasons.append(f"{elements_are(num_wrongly_not_finite)} NaN or infinite{where}")
    return ", ".join(reasons)


def elements_are(number: int, array: str = "") -> str:
    """Return a number of elements, of an array if it has a name, as a subject with its verb."""
    of_array = f" of {array}" if array else ""
    if number == 1:
        return f"1 element{of_array} is"
    return f"{number} elements{of_array} are"


# Names of stages may come from files, so that their number is not bounded. Most runs have fewer
# than 4096.
@lru_cache(maxsize=4096)
def axis_names(stage: str, ndim: int) -> tuple[str, ...]:
    """Return the letters of a stage's axes.

    They are `axis0`, `axis1`, … for an unknown stage or number of axes.
    """
    of_stage = stage_named(stage)
    if of_stage.is_known and len(of_stage.axes) == ndim:
        return of_stage.axes
    return tuple(f"axis{axis}" for axis in range(ndim))


@lru_cache(maxsize=4096)
def dtype_of_stage(stage: str, dtype: str) -> np.dtype:
    """Return the dtype in which implementations store a stage.

    It is the dtype of the inputs; scores have at least float32.
    """
    of_stage = stage_named(stage)
    if of_stage.kind == "mask":
        return np.dtype(bool)
    if of_stage.is_exact:  # lengths
        return np.dtype(np.int32)
    if of_stage.kind == "scores" and dtype != "float64":
        return dtype_named("float32")
    return dtype_named(dtype)


def budget(
    expected: np.ndarray,
    same_precision: np.ndarray,
    dtype: str,
    terms: np.ndarray | None = None,
    arithmetic: str = "ieee",
    same_dtype: str | None = None,
    *,
    has_slope: bool = True,
    stage: str = "",
) -> dict[str, float]:
    """Return the tolerance of a stage by norm.

    It is a multiple of the same-precision reference's error, plus a floor. The floor is one unit of
    rounding at the stage's scale, in case the reference happens to be exact. `same_dtype` is the
    dtype of the same-precision reference; default: the dtype in `SAME_PRECISION`. The slope is
    included if `has_slope` is set and the arithmetic does not truncate, which is itself a slope. If
    `stage` is attention weights, `zeros` is the largest weight that noise may turn into 0 on one
    side.
    """
    # A float64 stage is compared with a float32 reference, whose error is so much larger.
    shrink = unit_of_rounding(dtype) / unit_of_rounding(same_dtype or SAME_PRECISION[dtype])
    counted = ~np.isnan(expected)  # values that must be NaN have no budget
    wide_same_precision = same_precision.astype(np.float64)
    terms = expected if terms is None else terms
    scale = norms_of(terms, counted)
    noise = norms_of(wide_same_precision - expected, counted)
    if has_slope and arithmetic == "ieee":
        scale["slope"] = scale["rms"]
        noise["slope"] = _slope_noise(expected, same_precision, noise["rms"])
    # A stage of NaN alone has no element to count, and no noise.
    times = factor(max(int(counted.sum()), 1))
    least = floor(dtype, arithmetic)
    allowed = {norm: times * shrink * noise[norm] + least * scale[norm] for norm in noise}
    of_stage = stage_named(stage)
    if of_stage.is_attn_weights and not of_stage.is_gradient and arithmetic == "ieee":
        allowed["zeros"] = largest_zero(expected, wide_same_precision, dtype)
    return allowed


def _slope_noise(expected: np.ndarray, same_precision: np.ndarray, noise: float) -> float:
    """Return the slope of the same-precision reference's error.

    `DEVIATIONS` standard deviations of a random slope are added. Errors proportional to their
    values are weighted like these, so the fourth moment of the values matters.
    """
    counted = np.isfinite(expected) & np.isfinite(same_precision.astype(np.float64))
    squares = _elements(expected, counted).astype(np.float64, copy=False) ** 2
    if not squares.any():
        return 0.0
    by_chance = noise * math.sqrt(_mean(squares**2) / squares.size) / _mean(squares)
    return slope(same_precision, expected, counted) + DEVIATIONS * by_chance


def factor(size: int) -> float:
    """Return the multiple of the noise that is allowed for a number of elements.

    It is `FACTOR`, or more if few elements estimate the noise poorly.
    """
    return FACTOR * (1.0 + 4.0 / size)


def floor(dtype: str, arithmetic: str = "ieee") -> float:
    """Return the part of a budget that is independent of the noise, relative to the stage's scale.

    For Tenstorrent's hardware it is the maximum error of one value. The softmax also needs it: its
    reciprocal is an approximation, and bfloat16 rows reportedly sum to 0.994
    (tenstorrent/tt-metal#52045).
    """
    if arithmetic.startswith("tensix"):
        return TENSIX_FLOOR[dtype]
    # Also in 16 bits, whose sums are float32.
    if dtype != "float64":
        dtype = "float32"
    return unit_of_rounding(dtype)


@cache
def unit_of_rounding(dtype: str) -> float:
    """Return the distance from 1 to the next number of a dtype."""
    return float(ml_dtypes.finfo(dtype_named(dtype)).eps)


def first_difference(comparisons: Iterable[Comparison]) -> Comparison | None:
    """Return the stage to inspect first.

    It is the first whose own computation is wrong, else the first that differs.
    """
    first_failed = None
    for comparison in comparisons:
        if comparison.is_culprit:
            return comparison
        if first_failed is None and not comparison.passed:
            first_failed = comparison
    return first_failed


def failure(expected: np.ndarray, reason: str, label: Label) -> Comparison:
    """Return a failed comparison of a stage that cannot be measured."""
    size = expected.size
    return Comparison(*label, mismatched=size, size=size, shape=expected.shape, reason=reason)


def is_close(ratio: float) -> bool:
    """Return whether an error is so near its budget that the noise is worth measuring again."""
    return 1.0 < ratio <= MOST_OVER


def share(error: float, allowed: float) -> float:
    """Return the fraction of the budget that an error uses.

    It is 0 for no error, and infinity for a budget of 0.
    """
    if error == 0.0:
        return 0.0
    # An infinite or NaN budget, of a reference that overflowed, allows nothing.
    if not (allowed > 0.0 and math.isfinite(allowed)):
        return math.inf
    return error / allowed


def _by_position(errors: np.ndarray, allowed: float, stage: str) -> tuple[float, ...]:
    """Return the largest error at each token as a fraction of the budget.

    If there are many tokens, they are in bins.
    """
    axes = axis_names(stage, errors.ndim)
    if "T" in axes:
        token_axis = axes.index("T")
    elif "S" in axes:
        token_axis = axes.index("S")
    else:
        return ()
    by_token = np.moveaxis(errors, token_axis, 0).reshape(errors.shape[token_axis], -1)
    largest = by_token.max(axis=1)
    if largest.size > POSITIONS:
        largest = np.maximum.reduceat(largest, np.arange(POSITIONS) * largest.size // POSITIONS)
    return tuple(share(error, allowed) for error in largest.tolist())


def _spacing(expected: np.ndarray, dtype: str) -> np.ndarray:
    """Return the distance between neighboring values of a dtype at the expected values."""
    info = ml_dtypes.finfo(dtype_named(dtype))
    exponents = np.floor(np.log2(np.maximum(np.abs(expected), float(info.smallest_normal))))
    return np.exp2(exponents) * float(info.eps)


def _correlation(actual: np.ndarray, expected: np.ndarray) -> float | None:
    """Return the Pearson correlation; None if it is not defined."""
    has_expected = ~np.isnan(expected)
    actual, expected = _elements(actual, has_expected), _elements(expected, has_expected)
    if not (actual.size and np.isfinite(actual).all()):
        return None
    # The mean of equal floats may differ from them by rounding, which would correlate.
    if actual.min() == actual.max() or expected.min() == expected.max():
        return None
    x, y = actual - actual.mean(), expected - expected.mean()
    product_of_norms = math.sqrt((x**2).sum() * (y**2).sum())
    if not product_of_norms > 0.0:  # the squares are too small, or NaN
        return None
    return float((x * y).sum() / product_of_norms)
