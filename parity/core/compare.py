"""The verdict: how far an implementation is from float64, how far it may be, and where it is worst.

Two correct implementations differ by their rounding, and how much that is depends on the case: 1e-7 with small random
weights, 1e-2 with trained ones whose logits are large. So no fixed tolerance decides, but the case's own noise: a stage
passes if its error against the float64 reference is at most `FACTOR` times the error of the same-precision reference,
plus one unit of rounding. The idea is that of FlashAttention's tests, which allow a kernel twice the error of a plain
implementation of the same precision (Dao-AILab/flash-attention#446).

Where the reference is NaN, because the case has a NaN that the row may see, so must the implementation be; everywhere
else it must be finite. The error is that of the elements where both are.

The error is measured in three norms, and the worst ratio decides: the root mean square sees a small error everywhere,
which the largest element would hide; the maximum sees one wrong element, which the mean would hide; the slope sees what
is wrong in the same way everywhere, as a gain is, which the noise of single elements would hide. Where these pass, the
zeros of attention weights are compared, too: a hidden key weighs exactly 0 in every dtype, and no other does.

Tenstorrent's hardware does not compute as IEEE 754 says ("tensix" in `reference.ARITHMETICS`). What it is allowed
follows from documented facts: float32 enters the matrix engine as TF32, cut off and not rounded, sums are in float32,
exponentials and reciprocals are approximations; and from what the real kernels give in a simulator. It has not been
measured on a card yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import NamedTuple

import ml_dtypes
import numpy as np

from parity.core.records import JsonRecord
from parity.core.stages import stage_named
from parity.core.weights import dtype_named
from parity.core.zeros import WRONG_ZEROS, largest_zero, with_wrong_zeros, zero_on_one_side

FACTOR = 4.0
"""How many times the error of the same-precision reference is allowed (for a stage of few elements, see `factor`).

Two correct implementations are not equally lucky. Over the case list and 60 random layers torch and JAX on a CPU need
the part of it that `docs/parity.md` shows; `tests/test_compare.py` shows what it still sees.
"""

TENSIX_FLOOR = {"float32": 2.0**-9, "bfloat16": 2.0**-8}
"""What one value may lose on Tenstorrent's hardware: bfloat16 rounds by up to 2^-8; a product of float32 values loses
what TF32 cuts off both of them, 2^-10 each.

Measured on a simulator: with 2^-10, k of `trained-anarcii-cross` is 1.07 times its budget, with 2^-9 it takes 0.56 of
it.
"""

DEVIATIONS = 2.0
"""How many standard deviations are added to the slope of the same-precision reference, which may be small by luck."""

SAME_PRECISION = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "float64": "float32"}
"""The dtype of the same-precision reference. For float64 that is float32, its error scaled by the units of rounding."""

NOTHING = {"rms": 0.0, "max": 0.0}
"""What masks and lengths may be off by."""

MOST_OVER = 4.0
"""How far a stage may be over its budget for its noise to be measured again: a poor estimate of it is seldom further
off."""

POSITIONS = 64
"""How many places along the tokens a comparison tells apart."""


@dataclass(frozen=True)
class Judgement:
    """Distance of an array from the expected one, and its tolerance.

    Attributes:
        error: root mean square of the error, of masks and lengths its mean; infinite where one side alone is finite.
        ratio: error / budget in the norm that decides; at most 1 passes.
        norm: that norm.
        measured, allowed: the error and its budget by norm.
    """

    error: float
    ratio: float
    norm: str = "max"
    measured: Mapping[str, float] = field(default_factory=dict)
    allowed: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_wrong_zeros(self) -> bool:
        """Return whether attention weights are 0 where a key is seen, or not 0 where it is hidden."""
        return share(self.measured.get("zeros", 0.0), self.allowed.get("zeros", 1.0)) > 1.0


class Label(NamedTuple):
    """Name and dtype of what is compared; the dtype is that of the inputs."""

    case: str
    backend: str
    dtype: str
    stage: str


NOT_MEASURED = Judgement(math.inf, math.inf)


@dataclass(frozen=True)
class Comparison(JsonRecord):
    """One stage of one case, as an implementation computed it, against the float64 reference.

    Attributes:
        case, backend, dtype, stage: what was compared.
        status: `passed` or `failed`.
        error: distance from float64, in the norm that decides.
        budget: what that distance may be.
        ratio: error / budget; at most 1 passes. Infinite where nothing is allowed or nothing can be measured.
        norm: the norm that decides, `rms`, `max` or `slope`.
        max_abs: largest absolute error.
        max_ulp: largest error in units in the last place of the expected value, in the stage's dtype.
        pcc: Pearson correlation. Shown because it is customary; it cannot see a wrong scale and decides nothing.
        worst_index: place of the largest error, by axis letter.
        worst_values: actual and expected value there.
        mismatched, size: number of elements beyond the budget, and of all.
        shape: of the expected array.
        local_ratio: error / budget of the stage computed from the reference's own values of the stages before it: the
            first stage where this exceeds 1 is the culprit. None where there is nothing before it.
        reason: why it failed, in words.
        by_position: largest error at each place along the tokens, as a share of what the maximum norm allows: of query
            tokens where the stage has them, else of key tokens or slots; no more than `POSITIONS` runs of neighbours.
            For pictures.
        library: name of the backend, without the folder of traces that `backend` may tell; empty if none computed it.
        by_reference: whether it was compared with the reference, and not with what somebody expected.
        test: class and name of the test that compared, as JUnit has them; None outside of tests.
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
        """What it was compared with, in words."""
        return "the reference" if self.by_reference else "expected"

    @property
    def passed(self) -> bool:
        """Whether the stage is within its budget, and its own step is too."""
        return self.status == "passed"

    @property
    def is_culprit(self) -> bool:
        """Whether this stage's own computation is wrong, whatever came before it."""
        return not self.passed and (self.local_ratio is None or self.local_ratio > 1.0)

    @property
    def worse_ratio(self) -> float:
        """The larger of error / budget as it really ran and of its own step alone."""
        return max(self.ratio, self.local_ratio or 0.0)

    def with_step(self, ratio: float, reason: str) -> Comparison:
        """The same stage, its own step judged, too.

        Args:
            ratio: error / budget of that step alone.
            reason: why it failed if that exceeds 1 and nothing else is to be said, in words.
        """
        failed = not self.passed or ratio > 1.0
        reason = self.reason or (reason if ratio > 1.0 else "")
        status = "failed" if failed else "passed"
        return replace(self, status=status, local_ratio=ratio, reason=reason if failed else "")

    def __str__(self) -> str:
        axes = " ".join(axis_names(self.stage, len(self.shape)))
        verb = "agrees with" if self.passed else "differs from"
        lines = [f"{self.case}/{self.stage}: {self.backend} {verb} {self.against} ({self.dtype})"]
        if self.passed:
            return f"{lines[0]}, {self.worse_ratio:.2g} of its budget"
        lines.append(f"  shape       ({axes}) = {self.shape}")
        if self.size:
            lines.append(f"  mismatched  {self.mismatched} / {self.size} ({self.mismatched / self.size:.1%})")
        if self.worst_values is not None:
            place = ", ".join(f"{axis.lower()}={index}" for axis, index in self.worst_index.items())
            actual, expected = self.worst_values
            lines.append(f"  worst       {self.max_abs:.2e} at ({place}): {actual:.6g}, expected {expected:.6g}")
        lines.append(f"  allowed     {self.budget:.1e} ({self.norm}); the error is {self.error:.1e}")
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
    """Judge one stage.

    Args:
        actual: what the implementation gives.
        expected: the float64 reference.
        same_precision: the reference in the dtype that `SAME_PRECISION` names, and in the arithmetic.
        label: of the comparison.
        terms: size of the terms that the stage is a sum of, where they may cancel; the expected value when absent.
        arithmetic: of the hardware, one of `reference.ARITHMETICS`.
    """
    kept, stage = kept_dtype(label.stage, label.dtype), stage_named(label.stage)
    if reason := why_incomparable(actual, expected, kept):
        return failure(expected, reason, label)
    expected = expected.astype(np.float64)
    if stage.is_exact:
        return measure(actual, expected, NOTHING, label, ulps_of="float32")
    if arithmetic.startswith("tensix"):  # to its matrix engine NaN is a number: what it gives is unknown
        actual = np.where(np.isnan(expected), np.asarray(np.nan, actual.dtype), actual)
    has_slope = terms is None and not stage.is_gradient
    allowed = budget(expected, same_precision, label.dtype, terms, arithmetic, has_slope=has_slope, stage=label.stage)
    return measure(actual, expected, allowed, label, ulps_of=kept.name)


def why_incomparable(actual: np.ndarray, expected: np.ndarray, dtype: np.dtype | None = None) -> str:
    """Say why an array cannot be judged by another: the shape, no elements, or not the dtype that is asked for."""
    if actual.shape != expected.shape:  # NumPy would broadcast, and compare nonsense
        return f"shape {actual.shape}, expected {expected.shape}"
    if actual.size == 0:
        return "there are no elements to compare"
    return "" if dtype in (None, actual.dtype) else f"dtype {actual.dtype}, expected {dtype}"


def judged(actual: np.ndarray, expected: np.ndarray, allowed: Mapping[str, float], stage: str) -> Judgement:
    """Judge an array by the expected one, of the same shape, and by what is allowed in each norm."""
    return _judged(whole_rows(actual, stage), whole_rows(expected, stage), allowed, stage)[0]


def _judged(
    actual: np.ndarray, expected: np.ndarray, allowed: Mapping[str, float], stage: str
) -> tuple[Judgement, np.ndarray]:
    """Judge whole rows, and return the absolute errors, too."""
    errors = errors_of(actual, expected)
    measured = norms_of(errors, ~np.isnan(expected) | np.isinf(errors))
    if "slope" in allowed:
        is_finite = math.isfinite(measured["max"])
        measured["slope"] = slope(actual, expected, np.isfinite(expected)) if is_finite else math.inf
    ratios = {norm: share(size, allowed[norm]) for norm, size in measured.items()}
    norm = max(ratios, key=ratios.__getitem__)
    if "zeros" in allowed:
        measured["zeros"] = float(zero_on_one_side(actual, expected).max(initial=0.0))
        ratios["zeros"] = share(measured["zeros"], allowed["zeros"])
        norm = "zeros" if ratios[norm] <= 1.0 < ratios["zeros"] else norm
    error = float(errors.mean()) if stage_named(stage).is_exact else measured["rms"]
    return Judgement(error, ratios[norm], norm, measured, allowed), errors


def measure(
    actual: np.ndarray,
    expected: np.ndarray,
    allowed: Mapping[str, float],
    label: Label,
    *,
    ulps_of: str,
) -> Comparison:
    """Judge an array by another of its shape, and say where it is worst.

    Args:
        actual, expected: at least one element. Where one is NaN and the other is not, the error is infinite.
        allowed: by norm, `rms`, `max` and, where it is to be judged, `slope`.
        label: of the comparison.
        ulps_of: name of the dtype whose units in the last place are counted.
    """
    stage = label.stage
    actual, expected = whole_rows(actual, stage).astype(np.float64), expected.astype(np.float64)
    found, errors = _judged(actual, expected, allowed, stage)
    errors = with_wrong_zeros(errors, actual, expected, allowed) if found.norm == "zeros" else errors
    worst = np.unravel_index(int(errors.argmax()), errors.shape)
    with np.errstate(over="ignore"):  # an error beside an expected 0 may be beyond counting
        ulps = errors / _spacing(np.nan_to_num(expected), ulps_of)
    return Comparison(
        *label,
        status="passed" if found.ratio <= 1.0 else "failed",
        error=found.measured[found.norm],
        budget=allowed[found.norm],
        ratio=found.ratio,
        norm=found.norm,
        max_abs=found.measured["max"],
        max_ulp=float(ulps.max()),
        pcc=_correlation(actual, expected),
        worst_index=dict(zip(axis_names(stage, errors.ndim), map(int, worst), strict=True)),
        worst_values=(float(actual[worst]), float(expected[worst])),
        mismatched=int(np.count_nonzero(errors > allowed["max"])),
        size=actual.size,
        shape=actual.shape,
        reason=_what_is_not_finite(actual, expected) or (WRONG_ZEROS if found.has_wrong_zeros else ""),
        by_position=_by_position(errors, allowed["max"], stage),
    )


def slope(actual: np.ndarray, expected: np.ndarray, counted: np.ndarray) -> float:
    """How much of an error is a gain: the slope of the line through 0 of errors on expected values, times their size.

    Least squares, over the elements that count. Of n of them that err each in its own way it is sqrt(n) times smaller
    than the root mean square of their errors.
    """
    x = expected[counted].astype(np.float64)
    size = math.sqrt(_mean(x**2)) if x.size else 0.0
    return abs(_mean((actual[counted].astype(np.float64) - x) * x)) / size if size > 0.0 else 0.0


def _mean(x: np.ndarray) -> float:
    """That of some numbers, in a row: `x.mean()` in a third of its time, which is most of what little arrays take."""
    return float(np.add.reduce(x)) / x.size


def errors_of(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Absolute errors in float64: 0 where both are NaN, infinity where one is NaN or infinite and the other is not."""
    actual, expected = actual.astype(np.float64, copy=False), expected.astype(np.float64, copy=False)
    with np.errstate(invalid="ignore"):
        errors = np.abs(actual - expected)
    if not np.isnan(errors).any():
        return errors
    return np.where(np.isnan(errors), np.where(np.isnan(actual) & np.isnan(expected), 0.0, np.inf), errors)


def whole_rows(x: np.ndarray, stage: str) -> np.ndarray:
    """Attention weights with NaN in all of a row that has one: beside it a masked key may weigh 0 or NaN."""
    if not stage_named(stage).is_attn_weights or x.ndim == 0:
        return x
    return np.where((x == 0) & np.isnan(x).any(axis=-1, keepdims=True), np.full_like(x, np.nan), x)


def norms_of(x: np.ndarray, counted: np.ndarray) -> dict[str, float]:
    """Root mean square and largest absolute value of the elements that count; 0 of none."""
    values = np.abs(x[counted], dtype=np.float64)
    return {"rms": math.sqrt(_mean(values**2)) if values.size else 0.0, "max": float(values.max(initial=0.0))}


def _what_is_not_finite(actual: np.ndarray, expected: np.ndarray) -> str:
    """What is NaN or infinite where it should not be, or finite where it should be NaN, in words; nothing if all is."""
    lost = np.isnan(expected)
    swallowed, leaked = np.count_nonzero(lost & ~np.isnan(actual)), np.count_nonzero(~lost & ~np.isfinite(actual))
    reasons = [f"{swallowed} elements are not NaN where the reference is"] if swallowed else []
    where = " where the reference is finite" if lost.any() else ""
    reasons += [f"{leaked} elements are NaN or infinite{where}"] if leaked else []
    return ", ".join(reasons)


@lru_cache(maxsize=4096)
def axis_names(stage: str, ndim: int) -> tuple[str, ...]:
    """The letters of a stage's axes; `axis0`, `axis1`, … of a stage that is not known here or has other axes."""
    known = stage_named(stage)
    letters = known.axes if known.is_known else ()
    return letters if len(letters) == ndim else tuple(f"axis{axis}" for axis in range(ndim))


@lru_cache(maxsize=4096)
def kept_dtype(stage: str, dtype: str) -> np.dtype:
    """The dtype in which implementations keep a stage: that of the inputs, but scores in at least float32."""
    known = stage_named(stage)
    if known.is_exact:
        return np.dtype(bool if known.kind == "mask" else np.int32)
    return dtype_named("float32" if known.kind == "scores" and dtype != "float64" else dtype)


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
    """How far a stage may be from float64, by norm: some multiple of the same-precision reference's error, and a floor.

    The floor is one unit of rounding of the stage's scale, for a reference that happens to be exact. `same_dtype` is
    what the same-precision reference was computed in; what `SAME_PRECISION` names when absent. The slope is judged if
    `has_slope` says so, and the arithmetic does not cut numbers off, which is a slope by itself. For attention weights,
    which `stage` names, `zeros` is the largest one that may be 0 on one side alone: noise may make it so.
    """
    shrink = unit_of_rounding(dtype) / unit_of_rounding(same_dtype or SAME_PRECISION[dtype])
    known = ~np.isnan(expected)  # what must be NaN has no budget
    terms = expected if terms is None else terms
    scale, noise = norms_of(terms, known), norms_of(same_precision.astype(np.float64) - expected, known)
    if has_slope and arithmetic == "ieee":
        scale["slope"], noise["slope"] = scale["rms"], _slope_noise(expected, same_precision, noise["rms"])
    times, least = factor(int(known.sum()) or 1), floor(dtype, arithmetic)
    allowed = {norm: times * shrink * noise[norm] + least * scale[norm] for norm in noise}
    if stage_named(stage).is_attn_weights and not stage_named(stage).is_gradient and arithmetic == "ieee":
        allowed["zeros"] = largest_zero(expected, same_precision.astype(np.float64), dtype)
    return allowed


def _slope_noise(expected: np.ndarray, same_precision: np.ndarray, noise: float) -> float:
    """The slope of the same-precision reference's own error, and `DEVIATIONS` of what it would be by chance.

    Errors in proportion to their values weigh as those do: then the fourth moment of the values counts.
    """
    known = np.isfinite(expected) & np.isfinite(same_precision.astype(np.float64))
    squares = expected[known].astype(np.float64) ** 2
    if not squares.any():
        return 0.0
    by_chance = noise * math.sqrt(_mean(squares**2) / squares.size) / _mean(squares)
    return slope(same_precision, expected, known) + DEVIATIONS * by_chance


def factor(size: int) -> float:
    """How many times the noise is allowed: `FACTOR`, and more where few elements make a poor estimate of the noise."""
    return FACTOR * (1.0 + 4.0 / size)


def floor(dtype: str, arithmetic: str = "ieee") -> float:
    """The part of a budget that does not depend on the noise, relative to the stage's scale.

    Of Tenstorrent's hardware it is the most that one value loses on its way. The softmax needs it too: its reciprocal
    is an approximation, whose bfloat16 rows are said to sum to 0.994 (tenstorrent/tt-metal#52045).
    """
    if arithmetic.startswith("tensix"):
        return TENSIX_FLOOR[dtype]
    return unit_of_rounding("float64" if dtype == "float64" else "float32")


@cache
def unit_of_rounding(dtype: str) -> float:
    """Distance from 1 to the next number of a dtype."""
    return float(ml_dtypes.finfo(dtype_named(dtype)).eps)


def first_difference(comparisons: Iterable[Comparison]) -> Comparison | None:
    """The place to start looking: the first stage whose own computation is wrong, else the first that differs."""
    failed = [comparison for comparison in comparisons if not comparison.passed]
    return next((comparison for comparison in failed if comparison.is_culprit), failed[0] if failed else None)


def failure(expected: np.ndarray, reason: str, label: Label) -> Comparison:
    """A stage that cannot be measured, and so fails."""
    size = expected.size
    return Comparison(*label, mismatched=size, size=size, shape=expected.shape, reason=reason)


def is_close(ratio: float) -> bool:
    """Return whether an error is over its budget by so little that the noise is worth measuring again."""
    return 1.0 < ratio <= MOST_OVER


def share(error: float, allowed: float) -> float:
    """The part of what is allowed that an error takes: 0 for none, infinity where nothing is allowed."""
    if error == 0.0:
        return 0.0
    return error / allowed if allowed > 0.0 and math.isfinite(allowed) else math.inf


def _by_position(errors: np.ndarray, allowed: float, stage: str) -> tuple[float, ...]:
    """The largest error at each token, or in each run of neighbouring tokens, as a share of what is allowed."""
    axes = axis_names(stage, errors.ndim)
    along = next((axes.index(letter) for letter in "TS" if letter in axes), None)
    if along is None:
        return ()
    largest = np.moveaxis(errors, along, 0).reshape(errors.shape[along], -1).max(axis=1)
    if largest.size > POSITIONS:
        largest = np.maximum.reduceat(largest, np.arange(POSITIONS) * largest.size // POSITIONS)
    with np.errstate(divide="ignore", invalid="ignore"):
        return tuple(np.where(largest == 0.0, 0.0, largest / (allowed if math.isfinite(allowed) else 0.0)).tolist())


def _spacing(expected: np.ndarray, dtype: str) -> np.ndarray:
    """Distance between neighbouring numbers of a dtype at the expected values."""
    info = ml_dtypes.finfo(dtype_named(dtype))
    exponents = np.floor(np.log2(np.maximum(np.abs(expected), float(info.smallest_normal))))
    return np.exp2(exponents) * float(info.eps)


def _correlation(actual: np.ndarray, expected: np.ndarray) -> float | None:
    known = ~np.isnan(expected)
    actual, expected = actual[known], expected[known]
    if not (actual.size and np.isfinite(actual).all()):
        return None
    x, y = actual - actual.mean(), expected - expected.mean()
    norms = math.sqrt((x**2).sum() * (y**2).sum())
    return float((x * y).sum() / norms) if norms > 0.0 else None
