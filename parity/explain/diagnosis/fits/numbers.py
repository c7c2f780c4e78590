"""Parameters of the specification that would explain a stage: the reference is computed again with
each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, LinearScaling, RelativeBias, Rope
from mha_spec.features.scaling import Scaling
from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.families import BugFamily, Families
from parity.explain.diagnosis.bugs.record import Edit, with_spec, wrong_fields_of
from parity.explain.diagnosis.bugs.specs import spec_edit, with_rope
from parity.explain.diagnosis.fits.record import Difference
from parity.explain.diagnosis.fits.rotation import as_exponent, scaling_families, theta_families
from parity.explain.diagnosis.fits.words import NEAR, instead_of, readable
from parity.explain.fitting.numbers import round_numbers
from parity.explain.fitting.thetas import THETAS
from parity.measure.core.problem import Problem

Recompute = Callable[[Edit], np.ndarray]
"""Computes the stage with an edit of the reference, from the same stages before it; TimeoutError
at the limit.
"""

FamiliesOf = Callable[[Difference, float | None], Families]
"""Returns the families of a fitted number, by the stage and the number."""

STEPS = 8
"""Steps of Gauss-Newton, from the best number of a grid."""

HALVED = 4
"""The number of lengths of one step that are tried, each half of the one before."""

LARGEST = 64
"""The number of integers that are tried."""

CONVINCING = 1000.0
"""The error, in multiples of the tolerance, that one fitted number does not remove by chance."""


class StageTrial:
    """A stage with changes of the reference."""

    def __init__(self, difference: Difference, recompute: Recompute) -> None:
        self.difference, self._recompute = difference, recompute

    def stage(self, change: Edit) -> np.ndarray | None:
        """Return the stage; None if there is no such layer."""
        try:
            with np.errstate(all="ignore"):
                x = np.asarray(self._recompute(change), np.float64)
        except (ValueError, IndexError, KeyError, OverflowError):
            # Shapes do not fit, the specification is invalid, or the step of a whole module has no
            # stage that the edit reads.
            return None
        if x.shape != self.difference.expected.shape:
            return None
        return x

    def is_enough(self, x: np.ndarray | None) -> bool:
        """Return True if a stage with a change leaves only rounding."""
        if x is None or np.array_equal(x, self.difference.expected):
            return False
        size = _size(self.difference.expected)
        gain = 1.0
        if size:
            gain = max(gain, _size(x) / size)
        return self.difference.is_explained_by(x, gain)

    def explains(self, change: Edit) -> bool:
        """Return True if a change leaves only rounding."""
        return self.is_enough(self.stage(change))

    def is_enough_in_part(self, x: np.ndarray | None) -> bool:
        """Return True if a stage with a change leaves only rounding in the wrong heads, sequences
        or tokens, and the others are right.
        """
        difference = self.difference
        if x is None or not np.isfinite(x[difference.part]).all():
            return False
        return self.is_enough(difference.in_slices(x))


def _size(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


def no_family(_: Difference, __: float | None) -> Families:
    """Return no family, whatever the number."""
    return ()


def always_of(family: BugFamily) -> FamiliesOf:
    """Return one family, whatever the number."""

    def families(_: Difference, __: float | None) -> Families:
        return (family,)

    return families


@dataclass(frozen=True)
class Number:
    """A number of a layer that may be wrong.

    Attributes:
        name: name of the pattern.
        words: its name in reports.
        right: the right number; None if there should be none.
        grid: the first guesses.
        edit: returns the edit of the reference with a different number.
        families: returns the families of a wrong number.
        is_whole: True if only the guesses are tried, as for integers.
    """

    name: str
    words: str
    right: float | None
    grid: tuple[float | None, ...]
    edit: Callable[[Any], Edit]
    families: FamiliesOf = no_family
    is_whole: bool = False


class Fitted:
    """A number that is fitted to a stage: the best guess, refined by Gauss-Newton in its
    logarithm.
    """

    def __init__(self, trial: StageTrial, number: Number) -> None:
        self.trial, self.number, self.actual = trial, number, trial.difference.actual
        self._compared = trial.difference.compared
        self._stages: dict[float | None, np.ndarray | None] = {}

    def stage(self, value: float | None) -> np.ndarray | None:
        """Return the stage with a value of the number; None if there is no such layer."""
        if value not in self._stages:
            try:
                self._stages[value] = self.trial.stage(self.number.edit(value))
            except (ValueError, OverflowError):  # an invalid specification
                self._stages[value] = None
        return self._stages[value]

    def error(self, value: float | None) -> float:
        """Return the root mean square of the remaining error."""
        x = self.stage(value)
        if x is None:
            return math.inf
        with np.errstate(all="ignore"):
            error = _size(np.where(self._compared, x - self.actual, 0.0))
        if not math.isfinite(error):
            return math.inf
        return error

    def values(self) -> Iterator[float | None]:
        """Yield the roundest value that explains the stage; none if no value does, or if the stage
        does not depend on it.
        """
        if not self._has_effect():
            return
        for value in self._candidates(self._best()):
            if self._is_enough(value):
                yield value
                return

    def numbers(self) -> Iterator[float]:
        """Yield the value that explains the stage, if it is a finite number."""
        for value in self.values():
            if value is not None and math.isfinite(value):
                yield value

    def _has_effect(self) -> bool:
        """Return True if the stage depends on the number, by two of the guesses."""
        guesses = [value for value in self.number.grid if value != self.number.right]
        for value in guesses[:1] + guesses[-1:]:
            x = self.stage(value)
            if x is not None and not np.array_equal(
                x, self.trial.difference.expected, equal_nan=True
            ):
                return True
        return False

    def _is_enough(self, value: float | None) -> bool:
        return self.trial.is_enough(self.stage(value))

    def _candidates(self, value: float | None) -> Iterator[float | None]:
        """Yield a value with few digits, then with more."""
        if value is not None and not self.number.is_whole and value not in self.number.grid:
            yield from round_numbers(value, (1, 2, 3, 8))
        yield value

    def _best(self) -> float | None:
        values = dict.fromkeys((self.number.right, *self.number.grid))
        value = min(values, key=self.error)
        if not value and not self._is_enough(value):
            # 0 and none have no logarithm.
            value = min(filter(None, values), key=self.error, default=value)
        if self.number.is_whole or not value or not self.error(value) < math.inf:
            return value
        for _ in range(STEPS):
            better = self._better(value)
            if better is None:
                break
            is_near = self.error(better) < 0.9 * self.error(value)
            value = better
            if not is_near:  # this number explains nothing
                break
        return value

    def _better(self, value: float) -> float | None:
        """Return a value with a smaller error, one step further; None if there is none."""
        move = self._move(value)
        if not move:
            return None
        for halved in range(HALVED):
            moved = value * math.exp(move * 0.5**halved)
            if self.error(moved) < self.error(value):
                return moved
        return None

    def _move(self, value: float) -> float:
        """Return a step in the logarithm of the number; 0 if there is none."""
        step = 1e-5
        here, there = self.stage(value), self.stage(value * math.exp(step))
        if here is None or there is None:
            return 0.0
        slope = np.where(self._compared, there - here, 0.0) / step
        size = float((slope**2).sum())
        if not size > 0.0 or not math.isfinite(size):
            return 0.0
        move = float((slope * np.where(self._compared, self.actual - here, 0.0)).sum()) / size
        return min(max(move, -2.0), 2.0)


def spec_numbers(difference: Difference, recompute: Recompute) -> Iterator[Edit]:
    """Yield the parameters of the specification that would each explain the stage."""
    problem = difference.problem
    if problem is None or not np.isfinite(difference.expected).all():
        return
    trial = StageTrial(difference, recompute)
    for number in _numbers(problem, difference.actual.shape):
        try:
            values = list(Fitted(trial, number).values())
        except TimeoutError:
            return
        for value in values:
            yield _fitted(difference, problem.spec, number, value)


def _fitted(
    difference: Difference, spec: AttentionSpec, number: Number, value: float | None
) -> Edit:
    """Return the pattern of a number that explains the stage."""
    edit = number.edit(value)
    if edit.spec is not None:
        edit = spec_edit(spec, edit.spec)
    return difference.pattern(
        number.name,
        _words(number, value, spec),
        {"value": value, "expected": number.right},
        int(value is not None),
        families=number.families(difference, value),
        injected=edit,
    )


def _words(number: Number, value: float | None, spec: AttentionSpec) -> str:
    right, words = number.right, number.words
    if value is None or right is None:
        return f"{words} is {_number(value)} instead of {_number(right)}"
    wrong_text, right_text = instead_of(value, right)
    if number.name == "scale":
        return of.DIVIDED.about.format(found=f"is {wrong_text}", right=right_text)
    if number.name == "theta":
        words = of.THETA.about.format(found=wrong_text, right=right_text)
        return words + as_exponent(value, spec)
    return f"{words} is {wrong_text} instead of {right_text}"


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    return readable(value)


# ---- The parameters ------------------------------------------------------------------------------

CAPS = (None, 1.0, 5.0, 15.0, 30.0, 50.0, 100.0)
EPSILONS = tuple(10.0**-power for power in range(12, 0, -1))
FACTORS = (0.5, 2.0, 4.0, 8.0, 16.0, 32.0)
LENGTHS = tuple(2**power for power in range(3, 21))
# fmt: off
DISTANCES = (
    128, 256, 64, 512, 32, 20, 40, 50, 100, 16, 24, 48, 80, 96, 160, 200, 8, 10, 12, 400, 500, 800,
    1000, 1024,
)
# fmt: on
"""Maximum distances of relative biases, usual ones first, because short inputs do not distinguish
long ones.
"""

MAX_BIASES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
TIMES = (0.25, 0.5, 2.0, 4.0)
EIGHTHS = tuple(n / 8 for n in range(1, 9))

OF_EACH_NORM = {
    "qk_norm": "the eps of q_norm and k_norm",
    "v_norm": "the eps of v_norm",
    "context_norm": "the eps of context_norm",
}


def _with_field(spec: AttentionSpec, name: str, value: Any) -> Edit:
    return with_spec(replace(spec, **{name: value}))


def _with_number(spec: AttentionSpec, record: str, name: str, value: Any) -> Edit:
    """Return the edit of a number in a record of the specification, such as `rope`."""
    return _with_field(spec, record, replace(getattr(spec, record), **{name: value}))


def _numbers(problem: Problem, shape: tuple[int, ...]) -> Iterator[Number]:
    spec = problem.spec
    scale = spec.score_scale
    yield Number(
        "scale",
        "the scale of the scores",
        scale,
        tuple(scale * 4.0**power for power in (-2, -1, 1, 2)),
        partial(_with_field, spec, "scale"),
        _scale_families,
    )
    family_of_cap = of.SOFT_CAP
    if spec.soft_cap is None:
        family_of_cap = of.NO_CAP
    yield Number(
        "soft cap",
        "the soft cap",
        spec.soft_cap,
        CAPS,
        partial(_with_field, spec, "soft_cap"),
        always_of(family_of_cap),
    )
    if spec.rope is not None:
        yield from _of_rope(spec, spec.rope)
    yield from _of_reach(problem, shape)
    yield from _of_norms(spec)
    yield from _of_temperature(spec)
    yield from _of_biases(spec)


def _scale_families(difference: Difference, scale: float | None) -> Families:
    """Return the family of scales; after the scores also the family of norms, which multiply
    queries and keys as well.

    A scale that is almost right is not a wrong scale if the error is small: any bug that changes
    scores a little resembles one.
    """
    if difference.problem is None or scale is None:
        return ()
    spec = difference.problem.spec
    is_near = abs(scale - spec.score_scale) <= NEAR * spec.score_scale
    is_convincing = float(difference.errors.max()) > CONVINCING * difference.allowed["max"]
    if is_near and not is_convincing:
        return ()
    is_behind = difference.stage.quantity in ("context", "output")
    if is_behind and spec.qk_norm is not None:
        return of.scale_family(spec), of.QK_NORM
    return (of.scale_family(spec),)


# ---- Window and chunk ----------------------------------------------------------------------------


def _of_reach(problem: Problem, shape: tuple[int, ...]) -> Iterator[Number]:
    """Yield the window or the chunk, and each instead of the other."""
    spec = problem.spec
    largest_window = min(max(shape[-2:]), LARGEST)
    if spec.chunk_size is None:
        yield _span(problem, "window_size", "the window", largest_window)
    else:
        yield _span(problem, "chunk_size", "the chunk size", LARGEST)
        yield _span(problem, "window_size", "the window, with no chunks,", largest_window)
    if spec.window_size is not None:
        yield _span(problem, "chunk_size", "the chunk size, with no window,", LARGEST)


def _span(problem: Problem, field: str, words: str, largest: int) -> Number:
    """Return the window, or the chunk; if the layer has the other one, instead of that."""
    spec = problem.spec
    right = getattr(spec, field)
    name = field.removesuffix("_size")
    # The other one has a number: that this one is missing is reported there.
    is_instead = right is None and (spec.window_size or spec.chunk_size) is not None
    edit = partial(_with_span, spec, field)
    if is_instead:
        name += " instead"
        edit = partial(_with_span_instead, spec, field)
    return Number(
        name,
        words,
        right,
        (None, *range(1, largest + 1)),
        edit,
        always_of(of.span_family(problem)),
        is_whole=True,
    )


def _with_span(spec: AttentionSpec, field: str, size: int | None) -> Edit:
    spans: dict[str, Any] = {"window_size": None, "chunk_size": None, field: size}
    return with_spec(replace(spec, **spans))


def _with_span_instead(spec: AttentionSpec, field: str, size: int | None) -> Edit:
    if size is None:
        return with_spec(spec)
    return _with_span(spec, field, size)


# ---- RoPE ----------------------------------------------------------------------------------------


def _of_rope(spec: AttentionSpec, rope: Rope) -> Iterator[Number]:
    edit = partial(_with_number, spec, "rope", "theta")
    yield Number("theta", "RoPE's theta", rope.theta, THETAS, edit, _theta_families)
    if rope.scaling is None:
        yield _rope_factor(spec, 1.0)
    elif isinstance(rope.scaling, LinearScaling):
        yield _rope_factor(spec, rope.scaling.factor)
    else:
        yield from _of_scaling(spec, rope.scaling)
    if hasattr(rope.scaling, "attention_factor"):
        yield Number(
            "attention factor",
            "RoPE's attention factor",
            rope.attention_factor,
            (0.5, 1.0, 1.5, 2.0),
            partial(_with_attention_factor, spec, rope.scaling),
            always_of(of.AMPLITUDE),
        )
    if spec.latent is None and rope.sections is None:
        yield Number(
            "rotary_dim",
            "the number of features that RoPE rotates",
            rope.rotary_dim or spec.head_dim,
            _rotary_dims(spec.head_dim),
            partial(_with_number, spec, "rope", "rotary_dim"),
            always_of(of.ROTARY_DIM),
            is_whole=True,
        )


def _rotary_dims(head_dim: int) -> tuple[int, ...]:
    """Return even numbers of rotated features: all, or eighths of a large head."""
    if 2 <= head_dim <= LARGEST:
        return tuple(range(2, head_dim + 1, 2))
    return tuple(head_dim * n // 8 // 2 * 2 for n in range(1, 9))


def _theta_families(difference: Difference, theta: float | None) -> Families:
    if difference.problem is None or theta is None:
        return ()
    return theta_families(theta, difference.problem.spec)


def _rope_factor(spec: AttentionSpec, right: float) -> Number:
    return Number(
        "rope factor",
        "the factor that RoPE's positions are divided by",
        right,
        (1.0, *FACTORS),
        partial(_with_rope_factor, spec),
        _rope_factor_families,
    )


def _with_rope_factor(spec: AttentionSpec, factor: float) -> Edit:
    scaling = None
    if factor != 1.0:
        scaling = LinearScaling(factor)
    return _with_number(spec, "rope", "scaling", scaling)


def _rope_factor_families(difference: Difference, factor: float | None) -> Families:
    if factor is None or difference.problem is None or not difference.has_several_positions:
        return ()
    return scaling_families(factor, difference.problem.spec)


def _with_attention_factor(spec: AttentionSpec, scaling: Any, factor: float) -> Edit:
    changes: dict[str, Any] = {"attention_factor": factor}
    # Otherwise these determine the factor.
    if hasattr(scaling, "mscale"):
        changes |= {"mscale": None, "mscale_all_dim": None}
    rope = replace(_rope_of(spec), scaling=replace(scaling, **changes))
    # In a layer with latents, the scale of the scores depends on mscale, and remains.
    overrides = with_rope(spec, rope)
    return Edit(overrides=overrides, wrong_fields=wrong_fields_of(overrides))


def _rope_of(spec: AttentionSpec) -> Rope:
    if spec.rope is None:
        raise ValueError("the layer must have RoPE")
    return spec.rope


def _of_scaling(spec: AttentionSpec, scaling: Scaling) -> Iterator[Number]:
    """Yield the parameters of a RoPE scaling, except its attention factor."""
    for field in fields(scaling):
        right = getattr(scaling, field.name)
        grid = _guesses(field.name, right, scaling)
        if not grid:
            continue
        families = _frequencies_of_scaling
        if field.name == "factor":
            families = _rope_factor_families
        yield Number(
            f"rope {field.name}",
            f"the {field.name} of RoPE's {scaling.kind} scaling",
            right,
            grid,
            partial(_with_scaling, spec, scaling, field.name),
            families,
            is_whole=field.name == "original_length",
        )


def _guesses(name: str, right: Any, scaling: Scaling) -> tuple[float, ...]:
    """Return the first guesses of a number of a RoPE scaling; none if it is not fitted."""
    if name == "factor":
        return (1.0, *FACTORS)
    if name == "original_length":
        # The lengths before and after scaling, if one is used as the other.
        factor = getattr(scaling, "factor", 1.0)
        return (round(right * factor), max(1, round(right / factor)), *LENGTHS)
    if name == "fraction":
        return EIGHTHS
    if name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        return tuple(right * times for times in TIMES)
    return ()


def _with_scaling(spec: AttentionSpec, scaling: Scaling, name: str, value: Any) -> Edit:
    return _with_number(spec, "rope", "scaling", replace(scaling, **{name: value}))


def _frequencies_of_scaling(difference: Difference, _: float | None) -> Families:
    if not difference.has_several_positions:
        return ()
    return (of.SCALING,)


# ---- Norms, temperature and biases ---------------------------------------------------------------


def _of_norms(spec: AttentionSpec) -> Iterator[Number]:
    for field, words in OF_EACH_NORM.items():
        norm = getattr(spec, field)
        if norm is not None:
            edit = partial(_with_number, spec, field, "eps")
            yield Number("eps", words, norm.eps, EPSILONS, edit, always_of(of.QK_NORM))
    if spec.latent is not None:
        edit = partial(_with_number, spec, "latent", "eps")
        words, right = "the eps of the norms of latents", spec.latent.eps
        yield Number("eps", words, right, EPSILONS, edit, always_of(of.LATENTS))


def _of_temperature(spec: AttentionSpec) -> Iterator[Number]:
    if spec.temperature is None:
        return
    yield Number(
        "temperature",
        "the scale of the temperature",
        spec.temperature.scale,
        (0.01, 0.1, 1.0),
        partial(_with_number, spec, "temperature", "scale"),
        always_of(of.TEMPERATURE),
    )
    yield Number(
        "temperature length",
        "the length of the temperature",
        spec.temperature.length,
        LENGTHS,
        partial(_with_number, spec, "temperature", "length"),
        always_of(of.TEMPERATURE),
        is_whole=True,
    )


def _of_biases(spec: AttentionSpec) -> Iterator[Number]:
    if isinstance(spec.relative_bias, RelativeBias):
        yield Number(
            "max_distance",
            "the max_distance of the relative bias",
            spec.relative_bias.max_distance,
            DISTANCES,
            partial(_with_number, spec, "relative_bias", "max_distance"),
            always_of(of.RELATIVE_BIAS),
            is_whole=True,
        )
    if spec.alibi is not None:
        yield Number(
            "max_bias",
            "ALiBi's max_bias",
            spec.alibi.max_bias,
            MAX_BIASES,
            partial(_with_number, spec, "alibi", "max_bias"),
            always_of(of.ALIBI),
        )
