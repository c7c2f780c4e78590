"""Numbers of the specification that would explain a stage: the reference is computed again with
each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, LinearScaling, RelativeBias, Rope
from mha_spec.features.scaling import Scaling
from parity.explain.diagnosis.bugs.families import DIVIDED, THETA
from parity.explain.diagnosis.bugs.record import Edit, pattern, with_spec
from parity.explain.diagnosis.bugs.specs import spec_edit
from parity.explain.diagnosis.laws.record import Seen
from parity.explain.diagnosis.laws.rotation import as_exponent
from parity.explain.diagnosis.laws.words import readable, readable_apart
from parity.explain.fitting.thetas import THETAS

Recompute = Callable[[Edit], np.ndarray]
"""Computes the stage with an edit of the reference, from the same stages before it; TimeoutError
at the limit.
"""

STEPS = 8
"""Steps of Gauss-Newton, from the best number of a grid."""

LARGEST = 64
"""The number of integers that are tried."""


class Tried:
    """A stage with changes of the reference."""

    def __init__(self, seen: Seen, recompute: Recompute) -> None:
        self.seen, self._recompute = seen, recompute

    def stage(self, change: Edit) -> np.ndarray | None:
        """Return the stage; None if there is no such layer."""
        try:
            with np.errstate(all="ignore"):
                x = np.asarray(self._recompute(change), np.float64)
        except (
            ValueError,
            IndexError,
            OverflowError,
        ):  # shapes that do not fit, or an invalid specification
            return None
        return x if x.shape == self.seen.expected.shape else None

    def is_enough(self, x: np.ndarray | None) -> bool:
        """Return True if a stage with a change leaves only rounding."""
        if x is None or np.array_equal(x, self.seen.expected):
            return False
        size = _size(self.seen.expected)
        return self.seen.holds(x, max(1.0, _size(x) / size if size else 1.0))

    def explains(self, change: Edit) -> bool:
        """Return True if a change leaves only rounding."""
        return self.is_enough(self.stage(change))

    def explains_in_part(self, change: Edit) -> bool:
        """Return True if a change leaves only rounding in the wrong heads, sequences or tokens, and
        the others are right.
        """
        x, seen = self.stage(change), self.seen
        if x is None or not np.isfinite(x[seen.part]).all():
            return False
        return self.is_enough(seen.in_slices(x))


def _size(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


@dataclass(frozen=True)
class Number:
    """A number of a layer that may be wrong.

    Attributes:
        name: of the pattern.
        words: its name in reports.
        right: the right number; None if there should be none.
        grid: the first guesses.
        made: returns a change of the reference, or a specification, with another number.
        is_whole: True if only the guesses are tried, as for integers.
    """

    name: str
    words: str
    right: float | None
    grid: tuple[float | None, ...]
    made: Callable[[Any], Any]
    is_whole: bool = False


class Fitted:
    """A number that is fitted to a stage: the best guess, refined by Gauss-Newton in its
    logarithm.
    """

    def __init__(self, tried: Tried, number: Number) -> None:
        self.tried, self.number, self.actual = tried, number, tried.seen.actual
        self._compared = tried.seen.compared
        self._found: dict[float | None, np.ndarray | None] = {}

    def stage(self, value: float | None) -> np.ndarray | None:
        """Return the stage with a value of the number; None if there is no such layer."""
        if value not in self._found:
            try:
                self._found[value] = self.tried.stage(self.number.made(value))
            except (ValueError, OverflowError):  # an invalid specification
                self._found[value] = None
        return self._found[value]

    def error(self, value: float | None) -> float:
        """Return the root mean square of the remaining error."""
        if (x := self.stage(value)) is None:
            return math.inf
        with np.errstate(all="ignore"):
            found = _size(np.where(self._compared, x - self.actual, 0.0))
        return found if math.isfinite(found) else math.inf

    def has_effect(self) -> bool:
        """Return True if the stage depends on the number, by two of the guesses."""
        guesses = [value for value in self.number.grid if value != self.number.right]
        some = (
            [x for x in map(self.stage, {guesses[0]: 0, guesses[-1]: 0}) if x is not None]
            if guesses
            else []
        )
        return any(not np.array_equal(x, self.tried.seen.expected, equal_nan=True) for x in some)

    def values(self) -> Iterator[float | None]:
        """Yield the roundest value that explains the stage; none if no value does."""
        value = self._best()
        whole = value is None or self.number.is_whole or value in self.number.grid
        candidates = (
            [value]
            if whole
            else [*(float(f"{value:.{digits}g}") for digits in (1, 2, 3, 6)), value]
        )
        yield from islice(
            (each for each in candidates if self.tried.is_enough(self.stage(each))), 1
        )

    def _best(self) -> float | None:
        values = dict.fromkeys((self.number.right, *self.number.grid))
        value = min(values, key=self.error)
        if not value and not self.tried.is_enough(
            self.stage(value)
        ):  # 0 and none have no logarithm
            value = min(filter(None, values), key=self.error, default=value)
        if self.number.is_whole or not value or not self.error(value) < math.inf:
            return value
        for _ in range(STEPS):
            move = self._move(value)
            some = (value * math.exp(move * 0.5**halved) for halved in range(4 if move else 0))
            better = next((x for x in some if self.error(x) < self.error(value)), None)
            if better is None:
                break
            is_near = self.error(better) < 0.9 * self.error(value)
            value = better
            if not is_near:  # this number explains nothing
                break
        return value

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


def fits(seen: Seen, recompute: Recompute) -> Iterator[Edit]:
    """Yield the numbers of the specification that would each explain the stage."""
    if seen.problem is None or not np.isfinite(seen.expected).all():
        return
    tried = Tried(seen, recompute)
    for number in _numbers(seen.problem.spec, seen.actual.shape):
        made = number.made
        fitted = Fitted(tried, replace(number, made=lambda x, made=made: with_spec(made(x))))
        try:
            values = list(fitted.values()) if fitted.has_effect() else []
        except TimeoutError:
            return
        for value in values:
            numbers = {"value": value, "expected": number.right}
            edit = spec_edit(seen.problem.spec, made(value))
            yield pattern(
                number.name,
                _words(number, value, seen.problem.spec),
                numbers,
                0 if value is None else 1,
                injected=edit,
            )


def _words(number: Number, value: float | None, spec: AttentionSpec) -> str:
    right, words = number.right, number.words
    if value is None or right is None:
        return f"{words} is {_number(value)} instead of {_number(right)}"
    wrong_text, right_text = readable_apart(value, right)
    if number.name == "scale":
        return DIVIDED.about.format(found=f"is {wrong_text}", right=right_text)
    if number.name == "theta":
        return THETA.about.format(found=wrong_text, right=right_text) + as_exponent(value, spec)
    return f"{words} is {wrong_text} instead of {right_text}"


def _number(value: float | None) -> str:
    return "none" if value is None else readable(value)


# ---- The numbers ---------------------------------------------------------------------------------

CAPS = (None, 1.0, 5.0, 15.0, 30.0, 50.0, 100.0)
EPSILONS = tuple(10.0**-power for power in range(12, 0, -1))
FACTORS = (0.5, 2.0, 4.0, 8.0, 16.0, 32.0)
LENGTHS = tuple(2**power for power in range(3, 21))
DISTANCES = (
    128,
    256,
    64,
    512,
    32,
    20,
    40,
    50,
    100,
    16,
    24,
    48,
    80,
    96,
    160,
    200,
    8,
    10,
    12,
    400,
    500,
    800,
    1000,
    1024,
)
"""Return maximum distances of relative biases, usual ones first, because short inputs do not
distinguish long ones.
"""

TIMES = (0.25, 0.5, 2.0, 4.0)


def _numbers(spec: AttentionSpec, shape: tuple[int, ...]) -> Iterator[Number]:
    scale = spec.score_scale
    yield Number(
        "scale",
        "the scale of the scores",
        scale,
        tuple(scale * 4.0**power for power in (-2, -1, 1, 2)),
        lambda x: replace(spec, scale=x),
    )
    yield Number(
        "soft cap", "the soft cap", spec.soft_cap, CAPS, lambda x: replace(spec, soft_cap=x)
    )
    if spec.rope is not None:
        yield from _of_rope(spec, spec.rope)
    yield from _of_reach(spec, shape)
    yield from _of_records(spec)


def _of_reach(spec: AttentionSpec, shape: tuple[int, ...]) -> Iterator[Number]:
    """Yield the window or the chunk, and each instead of the other."""
    largest = {
        "window_size": max(shape[-1], shape[-2] if len(shape) > 1 else 1),
        "chunk_size": LARGEST,
    }

    def number(name: str, words: str) -> Number:
        right, none = getattr(spec, name), {"window_size": None, "chunk_size": None}
        # The other one has a number: that this one is missing is reported there.
        is_instead = right is None and (spec.window_size or spec.chunk_size) is not None
        return Number(
            name.removesuffix("_size") + (" instead" if is_instead else ""),
            words,
            right,
            (None, *range(1, min(largest[name], LARGEST) + 1)),
            lambda x: spec if x is None and is_instead else replace(spec, **none | {name: x}),
            is_whole=True,
        )

    if spec.chunk_size is None:
        yield number("window_size", "the window")
    else:
        yield number("chunk_size", "the chunk size")
        yield number("window_size", "the window, with no chunks,")
    if spec.window_size is not None:
        yield number("chunk_size", "the chunk size, with no window,")


def _of_rope(spec: AttentionSpec, rope: Rope) -> Iterator[Number]:
    def with_rope(**fields: Any) -> AttentionSpec:
        return replace(spec, rope=replace(rope, **fields))

    yield Number("theta", "RoPE's theta", rope.theta, THETAS, lambda x: with_rope(theta=x))
    if rope.scaling is None or isinstance(rope.scaling, LinearScaling):
        right = 1.0 if rope.scaling is None else rope.scaling.factor
        yield Number(
            "rope factor",
            "the factor that RoPE's positions are divided by",
            right,
            (1.0, *FACTORS),
            lambda x: with_rope(scaling=None if x == 1.0 else LinearScaling(x)),
        )
    else:
        yield from _of_scaling(rope.scaling, lambda x: with_rope(scaling=x))
    if hasattr(rope.scaling, "attention_factor"):
        scaling: Any = rope.scaling
        others = {"mscale": None, "mscale_all_dim": None} if hasattr(scaling, "mscale") else {}
        yield Number(
            "attention factor",
            "RoPE's attention factor",
            rope.attention_factor,
            (0.5, 1.0, 1.5, 2.0),
            lambda x: with_rope(scaling=replace(scaling, attention_factor=x, **others)),
        )
    if spec.latent is None and rope.sections is None:
        counts = tuple(range(2, spec.head_dim + 1, 2)) if spec.head_dim <= LARGEST else ()
        counts = counts or tuple(spec.head_dim * n // 8 // 2 * 2 for n in range(1, 9))
        yield Number(
            "rotary_dim",
            "the number of features that RoPE rotates",
            rope.rotary_dim or spec.head_dim,
            counts,
            lambda x: with_rope(rotary_dim=x),
            is_whole=True,
        )


def _of_scaling(scaling: Scaling, made: Callable[[Scaling], AttentionSpec]) -> Iterator[Number]:
    """Yield the numbers of a RoPE scaling, except its attention factor."""
    guesses: dict[str, Callable[[float], tuple[float, ...]]] = {
        "factor": lambda right: (1.0, *FACTORS),
        "original_length": lambda right: (*_taken_for(int(right), scaling), *LENGTHS),
        "fraction": lambda right: tuple(n / 8 for n in range(1, 9)),
    }
    guesses |= dict.fromkeys(
        ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
        lambda right: tuple(right * times for times in TIMES),
    )
    for name in (each.name for each in fields(scaling) if each.name in guesses):
        right = getattr(scaling, name)
        yield Number(
            f"rope {name}",
            f"the {name} of RoPE's {scaling.kind} scaling",
            right,
            guesses[name](right),
            lambda x, name=name: made(replace(scaling, **{name: x})),
            is_whole=name == "original_length",
        )


def _taken_for(length: int, scaling: Scaling) -> tuple[int, int]:
    """Return the lengths before and after scaling if one is used as the other."""
    factor = getattr(scaling, "factor", 1.0)
    return round(length * factor), max(1, round(length / factor))


def _of_records(spec: AttentionSpec) -> Iterator[Number]:
    """Yield numbers of norms, the temperature and ALiBi."""
    words_of = {"qk_norm": "the eps of q_norm and k_norm"}
    words_of |= {name: f"the eps of {name}" for name in ("v_norm", "context_norm")}
    for name, words in words_of.items():
        norm = getattr(spec, name)
        if norm is not None:
            yield Number("eps", words, norm.eps, EPSILONS, _with(spec, name, norm, "eps"))
    if spec.latent is not None:
        made = _with(spec, "latent", spec.latent, "eps")
        yield Number("eps", "the eps of the norms of latents", spec.latent.eps, EPSILONS, made)
    if spec.temperature is not None:
        right = spec.temperature.scale
        made = _with(spec, "temperature", spec.temperature, "scale")
        yield Number("temperature", "the scale of the temperature", right, (0.01, 0.1, 1.0), made)
        length, made = (
            spec.temperature.length,
            _with(spec, "temperature", spec.temperature, "length"),
        )
        yield Number(
            "temperature length",
            "the length of the temperature",
            length,
            LENGTHS,
            made,
            is_whole=True,
        )
    if isinstance(spec.relative_bias, RelativeBias):
        right, made = (
            spec.relative_bias.max_distance,
            _with(spec, "relative_bias", spec.relative_bias, "max_distance"),
        )
        yield Number(
            "max_distance",
            "the max_distance of the relative bias",
            right,
            DISTANCES,
            made,
            is_whole=True,
        )
    if spec.alibi is not None:
        made = _with(spec, "alibi", spec.alibi, "max_bias")
        yield Number(
            "max_bias",
            "ALiBi's max_bias",
            spec.alibi.max_bias,
            (1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
            made,
        )


def _with(
    spec: AttentionSpec, name: str, record: Any, field: str
) -> Callable[[Any], AttentionSpec]:
    """Return a function that replaces a number in a record of the specification."""
    return lambda x: replace(spec, **{name: replace(record, **{field: x})})
