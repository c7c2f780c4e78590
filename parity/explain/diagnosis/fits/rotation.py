"""Patterns of RoPE: the frequencies and offsets by which queries and keys were rotated, from the
angles.

A pair of features that should be rotated by position * f, and was rotated by (position + offset) *
g, is the expected one, rotated by position * (g - f) + offset * g. The growth of that angle from
token to token determines every g, and its start the offset. Then the simplest rule with these
frequencies is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, Rope
from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.families import THETA, Families
from parity.explain.diagnosis.bugs.record import Edit, Override, WrongField
from parity.explain.diagnosis.fits.record import Difference
from parity.explain.diagnosis.fits.words import (
    NEAR,
    instead_of,
    is_round,
    listed,
    readable,
)
from parity.explain.fitting.numbers import round_numbers
from parity.explain.fitting.rotation import complex_pairs, fit_rotation, with_pairs
from parity.explain.fitting.thetas import fit_theta, plain_exponents
from parity.measure.core.reference.rope import frequencies

OFFSETS = np.arange(-4096, 4097)
"""Offsets of positions that are tried."""


@dataclass(frozen=True)
class _Turning:
    """The rotated features, and their rotation.

    Attributes:
        rope: the expected RoPE, which defines the pairs.
        positions: positions of the tokens, (B or 1, T).
        right: expected frequencies, (pairs,).
        used: observed frequencies.
        begin: the angle at position 0, (pairs,).
        amplitude: the factor of rotated features.
        step: the call of a cache; None without one.
    """

    rope: Rope
    positions: np.ndarray
    right: np.ndarray
    used: np.ndarray
    begin: np.ndarray
    amplitude: float
    step: int | None

    def turned(self, difference: Difference, rule: _Rule) -> np.ndarray:
        """Return the expected values, rotated by other frequencies and multiplied by a number."""
        angles = (
            self.positions[..., None] * (rule.used - self.right) + rule.offset * rule.used
        )  # (B or 1, T, pairs)
        turns = rule.amplitude * np.exp(1j * angles)[:, None]
        pairs = complex_pairs(difference.expected, self.rope)
        rotated = with_pairs(difference.expected, pairs * turns, self.rope)
        wrong = np.zeros((*rotated.shape[:2], 1, 1), bool)
        wrong[np.ix_(difference.box[0], difference.box[1])] = True
        return np.where(wrong, rotated, difference.expected)

    def edit(self, rule: _Rule) -> Edit:
        """Return the rotation as a change of the reference, for queries and keys in every call."""
        other_frequencies = rule.used - self.right

        def angles(_: Any, original: Any, positions: np.ndarray) -> np.ndarray:
            right = original(positions)
            moved = positions[:, None, :, None] * other_frequencies + rule.offset * rule.used
            return (right + moved).astype(right.dtype)

        def attention_factor(_: Any, original: Any) -> float:
            return original() * rule.amplitude

        overrides: dict[str, Override] = {"angles": angles}
        if rule.amplitude != 1.0:
            overrides["attention_factor"] = attention_factor
        return Edit(overrides=overrides)


@dataclass(frozen=True)
class _Rule:
    """Possible frequencies, an offset of positions, and a factor of the features, with the families
    of their pattern.
    """

    name: str
    words: str
    used: np.ndarray
    fitted: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    offset: float = 0.0
    amplitude: float = 1.0
    families: Families = ()
    wrong_fields: tuple[WrongField, ...] = ()


def rotations(difference: Difference) -> Iterator[Edit]:
    """Yield other frequencies, or other positions, of queries or keys."""
    turning = _turning(difference)
    if turning is None or difference.problem is None or difference.problem.spec.rope is None:
        return
    rules = [_offset, _forms, _scaled, _theta]
    if difference.is_enough(len(turning.right) + 1):
        rules.append(_any_frequencies)
    for rules_of_kind in rules:
        for rule in rules_of_kind(turning, difference.problem.spec.rope, difference.problem.spec):
            if difference.is_explained_by(turning.turned(difference, rule), rule.amplitude):
                yield difference.pattern(
                    rule.name,
                    rule.words,
                    rule.fitted,
                    rule.parameters,
                    families=rule.families,
                    injected=replace(turning.edit(rule), wrong_fields=rule.wrong_fields),
                )
                return


def _turning(difference: Difference) -> _Turning | None:
    """Return the rotation of the queries or keys; None if it cannot be determined."""
    if (
        difference.problem is None
        or difference.stage.path
        or difference.stage.quantity not in ("q", "latents", "k")
        or difference.actual.ndim != 4
    ):
        return None
    rope, head_dim = difference.problem.spec.rope, difference.actual.shape[3]
    if rope is None or rope.sections is not None or not np.isfinite(difference.actual).all():
        return None
    positions = difference.problem.case.positions(difference.stage.step).astype(np.float64)
    if (
        positions.ndim != 2
        or positions.shape[1] != difference.actual.shape[2]
        or positions.shape[1] < 2
    ):
        return None
    right = np.array(frequencies(rope, head_dim, int(positions.max()) + 1))
    box = np.ix_(difference.box[0], difference.box[1])
    before = complex_pairs(difference.expected[box], rope)
    after = complex_pairs(difference.actual[box], rope)
    of_box = positions
    if len(positions) > 1:
        of_box = positions[difference.box[0]]
    # The expected values are rotated already: the rotation between both has the rest.
    remaining = fit_rotation(before, after, of_box)
    if remaining is None:
        return None
    used = right + remaining.frequencies
    return _Turning(
        rope,
        positions,
        right,
        used,
        remaining.begin,
        remaining.amplitude,
        difference.stage.step,
    )


# ---- Rules, the plainest first -------------------------------------------------------------------


def _offset(turning: _Turning, rope: Rope, spec: AttentionSpec) -> Iterator[_Rule]:
    misfit = np.abs(np.exp(1j * (OFFSETS[:, None] * turning.right - turning.begin)) - 1.0).sum(
        axis=1
    )
    nearest = misfit <= misfit.min() + 1e-3  # slow pairs alone do not distinguish some offsets
    offset = int(min(OFFSETS[nearest], key=abs))
    words = f"RoPE's positions are {-offset} too low"
    if offset > 0:
        words = f"RoPE's positions are {offset} too high"
    families = positions_families(turning.step)
    yield _Rule(
        "rope offset", words, turning.right, {"offset": offset}, 1, offset, families=families
    )


def positions_families(step: int | None) -> Families:
    """Return the families of rotations by other positions, without a cache or in one of its
    calls.
    """
    if step is None:
        return (of.POSITIONS,)
    return of.CACHE_POSITIONS, of.POSITIONS


def _forms(turning: _Turning, rope: Rope, spec: AttentionSpec) -> Iterator[_Rule]:
    """Yield the right base with an exponent of a different form, and no rotation."""
    theta, d = rope.theta, 2 * len(turning.right)
    i = np.arange(d // 2)
    plain = 1.0 / rope.attention_factor  # which belongs to the scaling
    yield _Rule(
        "rope missing",
        "RoPE is missing",
        0.0 * turning.right,
        amplitude=plain,
        families=(of.MISSING_ROPE,),
    )
    yield _Rule(
        "rope reversed",
        "RoPE rotates in the opposite direction",
        -turning.right,
        families=(of.REVERSED_ROPE,),
    )
    if rope.scaling is not None:
        words = "RoPE's frequencies are not scaled"
        unscaled = theta ** (-2 * i / d)
        families = (of.SCALING,)
        yield _Rule("rope unscaled", words, unscaled, amplitude=plain, families=families)
        if plain != 1.0:
            words += ", although cosines and sines are multiplied by the attention factor"
            yield _Rule("rope unscaled", words, unscaled, families=families)
    forms = {
        "i / d": i / d,
        "2 (i + 1) / d": 2 * (i + 1) / d,
        "2 i / (d - 2)": 2 * i / max(d - 2, 1),
        "4 i / d": 4 * i / d,
    }
    for name, size in _divisors(spec, d).items():
        forms[f"2 i / {name}"] = 2 * i / size
    powers = _powers_of_theta(spec, d)
    for form, exponent in forms.items():
        words = f"RoPE's frequencies are theta ** -({form}) instead of theta ** -(2 i / d)"
        if form in powers:
            other = theta ** powers[form]
            words += f", or theta is {readable(other)} instead of {readable(theta)}"
        family = of.EXPONENTS
        if form == "2 i / head_dim":
            family = of.ROTARY_DIM
        fitted = {"theta": theta, "exponent": form}
        yield _Rule("rope exponent", words, theta**-exponent, fitted, families=(family,))


def _scaled(turning: _Turning, rope: Rope, spec: AttentionSpec) -> Iterator[_Rule]:
    factor = float((turning.used * turning.right).sum() / (turning.right**2).sum())
    if abs(factor) > 1.0:
        for value in _rounded(factor):
            yield _scaling(turning, spec, f"multiplied by {readable(value)}", value)
    elif factor:
        for value in _rounded(1.0 / factor):
            yield _scaling(turning, spec, f"divided by {readable(value)}", 1.0 / value)


def _scaling(turning: _Turning, spec: AttentionSpec, words: str, times: float) -> _Rule:
    """Return positions that are multiplied by a number."""
    factor = 1.0 / times
    return _Rule(
        "rope scaling",
        f"RoPE's positions are {words}",
        times * turning.right,
        {"factor": factor},
        1,
        families=scaling_families(factor, spec),
    )


def scaling_families(factor: float, spec: AttentionSpec) -> Families:
    """Return the families of positions that are divided by a number: usually a scaling does it."""
    is_scaled = spec.rope is not None and spec.rope.scaling is not None
    if factor > 1.0 or is_scaled:
        return (of.SCALING,)
    return of.SCALING, of.POSITIONS


def _theta(turning: _Turning, rope: Rope, spec: AttentionSpec) -> Iterator[_Rule]:
    theta = fit_theta(turning.used)
    if theta is None:
        return
    exponents = plain_exponents(len(turning.right))
    for value in _rounded(theta):
        if value == rope.theta:
            continue  # this theta without a scaling is a rule of its own
        frequencies = value**-exponents
        fitted = {"theta": value, "expected": rope.theta}
        wrong_text, right_text = instead_of(value, rope.theta)
        wrong_theta = WrongField("rope.theta", value, rope.theta)
        if rope.scaling is None:
            yield _Rule(
                "rope theta",
                THETA.about.format(found=wrong_text, right=right_text),
                frequencies,
                fitted,
                1,
                families=theta_families(value, spec),
                wrong_fields=(wrong_theta,),
            )
            continue
        words = (
            f"RoPE's frequencies are the ones of theta {wrong_text} without a scaling, instead of "
            f"theta {right_text} with {rope.scaling.kind} scaling"
        )
        yield _Rule(
            "rope theta",
            words,
            frequencies,
            fitted,
            1,
            families=(of.SCALING,),
            wrong_fields=(wrong_theta, WrongField("rope.scaling", None, rope.scaling)),
        )


def theta_families(theta: float, spec: AttentionSpec) -> Families:
    """Return the family of thetas, unless it is the right one, rounded.

    A theta that is not round is probably a different bug in the frequencies, which setting the
    theta does not fix.
    """
    if spec.rope is None or abs(theta - spec.rope.theta) <= NEAR * spec.rope.theta:
        return ()
    if as_exponent(theta, spec):
        return (of.EXPONENTS,)
    if is_round(theta):
        return (of.THETA,)
    return (of.FREQUENCIES,)


def as_exponent(theta: float, spec: AttentionSpec) -> str:
    """Return the form of the exponent that, with the right base, is equivalent to a different base;
    empty if none is.
    """
    if spec.rope is None:
        return ""
    rotated = spec.rope.rotated_features(spec.head_dim)
    count = len(range(*rotated.indices(spec.head_dim)))
    for form, power in _powers_of_theta(spec, count).items():
        if abs(theta - spec.rope.theta**power) <= 1e-3 * theta:
            return f", or the exponent {form} instead of 2 i / d"
    return ""


def _powers_of_theta(spec: AttentionSpec, count: int) -> dict[str, float]:
    """Return the power of the base that is equivalent to an exponent of a different form, by
    form.
    """
    powers = {"i / d": 0.5, "4 i / d": 2.0}
    for name, size in _divisors(spec, count).items():
        powers[f"2 i / {name}"] = count / size
    return powers


def _divisors(spec: AttentionSpec, count: int) -> dict[str, int]:
    """Return sizes that exponents may be divided by instead of the number of rotated features."""
    sizes = {
        "head_dim": spec.head_dim,
        "d_model": spec.d_model,
        "(num_heads * head_dim)": spec.num_heads * spec.head_dim,
        "(num_kv_heads * head_dim)": spec.num_kv_heads * spec.head_dim,
    }
    distinct: dict[str, int] = {}
    for name, size in sizes.items():
        if size != count and size not in distinct.values():
            distinct[name] = size
    return distinct


def _any_frequencies(turning: _Turning, rope: Rope, spec: AttentionSpec) -> Iterator[_Rule]:
    used, right = turning.used.tolist(), turning.right.tolist()
    words = f"RoPE's frequencies are {listed(used)} instead of {listed(right)}"
    is_aliased = _may_be_aliased(turning)
    if is_aliased:
        words += ", or these plus multiples of 2 pi: integer positions do not distinguish them"
    times = 1.0
    if abs(turning.amplitude - 1.0) > 1e-4:
        times = turning.amplitude
        words += f", and cosines and sines {readable(times)} times what they should be"
    fitted = {"used": used, "right": right, "amplitude": times, "is_aliased": is_aliased}
    families = _frequencies_families(turning, rope, times)
    yield _Rule(
        "rope frequencies",
        words,
        turning.used,
        fitted,
        len(used),
        amplitude=times,
        families=families,
    )


def _may_be_aliased(turning: _Turning) -> bool:
    """Return True if fitted frequencies are not between 0 and the largest right one.

    Frequencies that differ by a multiple of 2 pi rotate alike at integer positions, and the fit
    returns the smallest. Slow frequencies are probably that one, others may be any.
    """
    largest = (1.0 + NEAR) * np.abs(turning.right).max()
    slack = NEAR * largest
    return bool((turning.used < -slack).any() or (turning.used > largest).any())


def _frequencies_families(turning: _Turning, rope: Rope, amplitude: float) -> Families:
    """Return the family of frequencies that follow no rule, if every number of RoPE is known.

    A frequency of 0 is a pair that is not rotated, and nearly right ones are rounded.
    """
    if rope.scaling is not None or amplitude != 1.0:
        return ()
    largest_error = np.abs(turning.used - turning.right).max()
    is_wrong = largest_error > NEAR * np.abs(turning.right).max()
    if not is_wrong or not turning.used.all():
        return ()
    return (of.FREQUENCIES,)


def _rounded(x: float) -> Iterator[float]:
    """Yield a round number near a number, then the number itself."""
    yield from round_numbers(x, (1, 2, 3, 6))
    yield x
