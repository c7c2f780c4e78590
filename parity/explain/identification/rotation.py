"""Fit RoPE to heads before and after it: find the pairs of features, and the angle of each at each
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mha_spec import InputError, Rope
from parity.explain.fitting.numbers import round_numbers
from parity.explain.fitting.rotation import complex_pairs, fit_rotation, nearest_positions
from parity.explain.fitting.thetas import fit_theta
from parity.port.models.config import Config
from parity.port.models.rope import read_rope

CLOSE = 2e-5
"""Largest error of a pair that is rotated again, relative to the largest feature, in float32."""

ANGLE = 3e-4
"""Largest error of an angle, in radians, at the last token."""

CLOSE_ANGLE = 0.1 * ANGLE
"""Largest error of an angle of a fitted RoPE: of its own rounding alone."""

MOST_POSITIONS = 8192
"""Number of candidate positions on an axis."""

BASES_OF_AXES = (100.0, 10000.0)
"""Usual bases of frequencies on several axes."""


@dataclass(frozen=True)
class PairLayout:
    """The features of a head that are rotated, and how they form pairs, as in `Rope`."""

    pairs: Literal["half", "interleaved"]
    rotary_dim: int | None
    rotated: Literal["first", "last"]

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of `Rope`."""
        return {"pairs": self.pairs, "rotary_dim": self.rotary_dim, "rotated": self.rotated}

    @property
    def rope(self) -> Rope:
        """Return a RoPE with these pairs."""
        return Rope(**self.fields)

    def num_pairs(self, head_dim: int) -> int:
        """Return the number of pairs of a head."""
        if self.rotary_dim is None:
            return head_dim // 2
        return self.rotary_dim // 2


@dataclass(frozen=True)
class ObservedTurns:
    """Observed rotation of pairs, by angles proportional to the position.

    Attributes:
        layout: the pairs of features.
        frequencies: radians of each pair per token, (R/2,).
        amplitude: factor of the length of each pair.
        num_tokens: number of tokens, at positions 0, 1, …
    """

    layout: PairLayout
    frequencies: np.ndarray = field(repr=False)
    amplitude: float
    num_tokens: int


def fit_rope(before: np.ndarray, after: np.ndarray, candidates: list[Rope]) -> Rope | None:
    """Return the RoPE that rotated heads; None if none did.

    Args:
        before, after: the heads before and after it, (B, heads, T, H), of tokens at positions 0, 1,
            …, or at integers on several axes, which the angles show.
        candidates: RoPE of the configuration; a fitting candidate is preferred to rounded plain
            bases.

    Raises:
        ValueError: if no RoPE explains the difference.
    """
    if np.array_equal(before, after):
        return None
    layouts = list(_possible_layouts(before, after))
    first_turns: ObservedTurns | None = None
    for layout in layouts:
        turns = _turns_by_position(before, after, layout)
        if turns is None:
            continue
        rope = _rope_with_turns(turns, candidates, before.shape[3])
        if rope is not None:
            return rope
        first_turns = first_turns or turns
    if first_turns is not None:
        rule = "have frequencies of a plain base, or of the configuration"
        listed = np.round(first_turns.frequencies[:4], 6).tolist()
        raise InputError("rope", rule, f"frequencies {listed} …")
    return _fit_axes(before, after, candidates, layouts)


def _possible_layouts(before: np.ndarray, after: np.ndarray) -> Iterator[PairLayout]:
    """Yield each way to pair the features that change."""
    head_dim = before.shape[-1]
    num_changed = int((before != after).any(axis=(0, 1, 2)).sum())
    # One feature of a pair may stay the same by chance.
    num_rotated = num_changed + num_changed % 2
    if num_rotated < head_dim:
        yield PairLayout("half", num_rotated, "first")
        yield PairLayout("interleaved", num_rotated, "first")
        yield PairLayout("half", num_rotated, "last")
        yield PairLayout("interleaved", num_rotated, "last")
    yield PairLayout("half", None, "first")
    yield PairLayout("interleaved", None, "first")


def _factors_of_pairs(
    before: np.ndarray, after: np.ndarray, rope: Rope, over: tuple[int, ...]
) -> np.ndarray | None:
    """Return the complex factor of each pair, equal over some axes of (B, heads, T, pairs); None if
    the factors differ, or other features change.
    """
    unrotated = np.delete(np.arange(before.shape[-1]), rope.rotated_features(before.shape[-1]))
    if not np.array_equal(before[..., unrotated], after[..., unrotated]):
        return None
    x, y = complex_pairs(before, rope), complex_pairs(after, rope)
    with np.errstate(invalid="ignore"):
        products = (y * x.conj()).sum(axis=over, keepdims=True)
        factors = products / (np.abs(x) ** 2).sum(axis=over, keepdims=True)
    error = np.abs(y - factors * x).max()
    # The error is NaN if a pair is zero everywhere: its factor is unknown.
    if not error <= CLOSE * np.abs(y).max():
        return None
    return factors.squeeze(over)


def _turns_by_position(
    before: np.ndarray, after: np.ndarray, layout: PairLayout
) -> ObservedTurns | None:
    """Return the rotation of pairs by angles proportional to the position; None if there is
    none.
    """
    rope = layout.rope
    factors = _factors_of_pairs(before, after, rope, over=(0, 1))  # (T, pairs)
    if factors is None:
        return None
    positions = np.arange(len(factors), dtype=np.float64)
    rotation = fit_rotation(
        complex_pairs(before, rope), complex_pairs(after, rope), positions[None]
    )
    if rotation is None:
        return None
    amplitudes = np.abs(factors)
    directions = np.exp(1j * np.angle(factors))
    expected = np.exp(1j * positions[:, None] * rotation.frequencies)
    is_proportional = np.abs(expected - directions).max() <= ANGLE
    has_one_amplitude = np.ptp(amplitudes) <= ANGLE
    is_forward = rotation.frequencies.min() >= -ANGLE
    if not (is_proportional and has_one_amplitude and is_forward):
        return None
    return ObservedTurns(layout, rotation.frequencies, float(amplitudes.mean()), len(positions))


def _rope_with_turns(turns: ObservedTurns, candidates: list[Rope], head_dim: int) -> Rope | None:
    """Return the first RoPE with observed frequencies: a candidate, or one with a round base."""
    for base in (*candidates, *_plain_ropes(turns)):
        # A scaling may not fit this number of features.
        with suppress(ValueError):
            rope = base.replace(sections=None, **turns.layout.fields)
            if _has_turns(rope, turns, head_dim):
                return rope
    return None


def _plain_ropes(turns: ObservedTurns) -> Iterator[Rope]:
    """Yield RoPE with plain bases close to the observed one, the roundest first."""
    theta = fit_theta(turns.frequencies)
    if theta is not None:
        for value in round_numbers(theta):
            yield Rope(value)


def _has_turns(rope: Rope, turns: ObservedTurns, head_dim: int) -> bool:
    """Return whether a RoPE has observed frequencies."""
    expected = rope.frequencies(head_dim, turns.num_tokens).astype(np.float64)
    if expected.shape != turns.frequencies.shape:
        return False
    if abs(rope.attention_factor - turns.amplitude) > ANGLE:
        return False
    errors = np.abs(expected - turns.frequencies) * (turns.num_tokens - 1)
    return bool((errors <= CLOSE_ANGLE).all())


# ---- Several axes --------------------------------------------------------------------------------


def _fit_axes(
    before: np.ndarray, after: np.ndarray, candidates: list[Rope], layouts: list[PairLayout]
) -> Rope:
    """Return the RoPE on several axes that explains the heads, with the smallest positions among
    those that fit.

    Frequencies of one series may fit a different series at other integers, such as positions a
    hundred times as large.
    """
    turning = []
    for layout in layouts:
        if _factors_of_pairs(before, after, layout.rope, over=(1,)) is not None:
            turning.append(layout)
    largest_position: dict[Rope, int] = {}
    for layout in turning:
        for rope in _ropes_on_axes(candidates, layout, before.shape[-1]):
            # Some sections do not fit this width.
            with suppress(ValueError):
                positions = positions_of(before, after, rope, CLOSE_ANGLE)
                if _are_several_axes(positions):
                    largest_position[rope] = int(positions.max())
    if not largest_position:
        got = "no pairs that turn"
        if turning:
            got = "pairs that turn by other angles"
        rule = "turn pairs by the position, or by integers on two or three axes"
        raise InputError("rope", rule, got)
    return min(largest_position, key=largest_position.__getitem__)


def _are_several_axes(positions: np.ndarray) -> bool:
    """Return whether positions (axes, B, T) vary on each axis, and differ between axes."""
    num_axes = len(positions)
    num_distinct = len(np.unique(positions.reshape(num_axes, -1), axis=0))
    return num_distinct == num_axes and bool(np.ptp(positions, axis=(1, 2)).all())


def _ropes_on_axes(candidates: list[Rope], layout: PairLayout, head_dim: int) -> Iterator[Rope]:
    """Yield RoPE on two and three axes, and on the axes of a configuration, with its bases and with
    usual ones.
    """
    num_pairs = layout.num_pairs(head_dim)
    equal_sections = []
    for num_axes in (2, 3):
        if num_pairs % num_axes == 0:
            equal_sections.append((num_pairs // num_axes,) * num_axes)
    forms: list[dict[str, Any]] = []
    for order in ("contiguous", "interleaved"):
        for rope in candidates:
            if rope.sections is not None:
                forms.append(_form(rope.sections, order, "shared"))
    for order in ("contiguous", "interleaved"):
        forms += [_form(sections, order, "own") for sections in equal_sections]
    forms += [_form(sections, "contiguous", "strided") for sections in equal_sections]

    bases = [rope.replace(sections=None) for rope in candidates]
    bases += [Rope(theta) for theta in BASES_OF_AXES]
    for base in dict.fromkeys(bases):
        for form in forms:
            # A scaling has a single series.
            with suppress(ValueError):
                yield base.replace(**layout.fields, **form)


def _form(sections: tuple[int, ...], order: str, series: str) -> dict[str, Any]:
    """Return the fields of `Rope` for sections."""
    return {"sections": sections, "section_order": order, "section_frequencies": series}


def positions_of(
    before: np.ndarray, after: np.ndarray, rope: Rope, tolerance: float = ANGLE
) -> np.ndarray:
    """Return the positions (axes, B, T) at which a RoPE turns heads before it into those after it.

    Each position is the integer at which the pairs of its axis agree best, and all of them must
    agree. An axis has at least two pairs, so that one determines the position and the others verify
    it.

    Args:
        before, after: heads (B, heads, T, H).
        rope: RoPE on several axes.
        tolerance: tolerance of each angle, in radians.

    Raises:
        ValueError: if there are no such positions.
    """
    factors = _factors_of_pairs(before, after, rope, over=(1,))  # (B, T, pairs)
    head_dim, sections = before.shape[-1], rope.sections or ()
    if factors is None or min(sections, default=0) < 2:
        raise InputError("rope", "turn two pairs or more on each axis", str(rope))
    frequencies, axis_of_pair = rope.frequencies(head_dim).astype(np.float64), rope.axes(head_dim)
    positions = []
    for axis in range(len(sections)):
        pairs = axis_of_pair == axis
        positions.append(nearest_positions(factors[..., pairs], frequencies[pairs], MOST_POSITIONS))
    positions = np.stack(positions)
    positions_of_pairs = np.moveaxis(positions[axis_of_pair], 0, -1)  # (B, T, pairs)
    expected = rope.attention_factor * np.exp(1j * positions_of_pairs * frequencies)
    error = np.abs(expected - factors).max()
    if not error <= tolerance:
        rule = f"turn pairs by integers on {len(sections)} axes"
        raise InputError("rope", rule, f"{error:.2g} from the angles of {rope}")
    return positions


# ---- Candidates ----------------------------------------------------------------------------------


def ropes_of(config: Mapping[str, Any], head_dim: int, layer_type: str) -> list[Rope]:
    """Return the RoPE that a configuration may specify, without its family's rules."""
    parts = [config]
    parts += [part for part in config.values() if isinstance(part, Mapping)]
    ropes = []
    for part in parts:
        for kind in dict.fromkeys((layer_type, "full_attention", "sliding_attention")):
            for local_theta in (None, 10000.0):
                rope = _read(part, head_dim, kind, local_theta)
                if rope is not None:
                    ropes.append(rope.replace(rotary_dim=None))
    ropes += [Rope(theta) for theta in _thetas_in(config)]
    return list(dict.fromkeys(ropes))


def _read(
    config: Mapping[str, Any], head_dim: int, layer_type: str, local_theta: float | None
) -> Rope | None:
    """Return the RoPE of a configuration; None if it has none, or cannot be read."""
    with suppress(Exception):  # only a candidate: the fit decides
        value = read_rope(
            Config(config),
            head_dim,
            layer_type=layer_type,
            theta=10000.0,
            fraction=1.0,
            local_theta=local_theta,
            sections=None,
        ).value
        if isinstance(value, Rope):
            return value
    return None


def _thetas_in(config: Mapping[str, Any]) -> Iterator[float]:
    """Yield the values of rope_theta in a configuration and its nested parts."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _thetas_in(value)
        elif name == "rope_theta" and isinstance(value, (int, float)) and value > 0:
            yield value
