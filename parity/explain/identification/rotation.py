"""Fit RoPE to heads before and after it: find the pairs of features, and the angle of each at each
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from mha_spec import InputError, Rope
from parity.port.models.config import Config
from parity.port.models.rope import read_rope

CLOSE = 2e-5
"""Largest error of a pair that is rotated again, relative to the largest feature, in float32."""

ANGLE = 3e-4
"""Largest error of an angle, in radians, at the last token."""

MOST_POSITIONS = 8192
"""Number of candidate positions on an axis."""

BASES = (100.0, 10000.0)
"""Usual bases of frequencies on several axes."""


class Turns(NamedTuple):
    """Observed rotation of pairs.

    Attributes:
        layout: fields of `Rope` that define the pairs of features.
        frequencies: radians of each pair per token, (R/2,).
        amplitude: factor of the length of each pair.
    """

    layout: dict[str, Any]
    frequencies: np.ndarray
    amplitude: float


def fit_rope(before: np.ndarray, after: np.ndarray, candidates: list[Rope]) -> Rope | None:
    """Return the RoPE that turns heads (B, heads, T, H) before it into those after it; None if they
    are equal.

    Args:
        before, after: heads of tokens at positions 0, 1, …, or at integers on several axes, which
            the angles show.
        candidates: RoPE of the configuration; a fitting candidate is preferred to rounded plain
            bases.

    Raises:
        ValueError: if no RoPE explains the difference.
    """
    if np.array_equal(before, after):
        return None
    layouts = list(_layouts_of(before, after))
    num_tokens, head_dim = before.shape[2:]
    seen = [turns for layout in layouts if (turns := _turns_of(before, after, layout)) is not None]
    for turns in seen:
        for base in (*candidates, *_plain(turns, num_tokens)):
            with suppress(ValueError):  # a scaling may not fit this number of features
                rope = base.replace(sections=None, **turns.layout)
                if _fits(rope, turns, head_dim, num_tokens):
                    return rope
    if seen:
        known = f"frequencies {np.round(seen[0].frequencies[:4], 6).tolist()} …"
        raise InputError("rope", "have frequencies of a plain base, or of the configuration", known)
    return _fit_axes(before, after, candidates, layouts)


def _layouts_of(before: np.ndarray, after: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield fields of `Rope` for each way to pair the features that change."""
    head_dim = before.shape[-1]
    changed = int((before != after).any(axis=(0, 1, 2)).sum())
    for count in dict.fromkeys((changed + changed % 2, head_dim)):
        for rotated in ("first", "last") if count < head_dim else ("first",):
            for pairs in ("half", "interleaved"):
                yield {
                    "pairs": pairs,
                    "rotary_dim": None if count == head_dim else count,
                    "rotated": rotated,
                }


def _pairs_of(heads: np.ndarray, rope: Rope) -> np.ndarray:
    """Return pairs of features as complex numbers, (B, heads, T, R/2)."""
    rotated = heads[..., rope.rotated_features(heads.shape[-1])].astype(np.float64)
    if rope.pairs == "interleaved":
        return rotated[..., 0::2] + 1j * rotated[..., 1::2]
    first, second = np.split(rotated, 2, axis=-1)
    return first + 1j * second


def _factors_of(
    before: np.ndarray, after: np.ndarray, rope: Rope, over: tuple[int, ...]
) -> np.ndarray | None:
    """Return the factor of each pair, equal over some axes; None if they differ, or other features
    change.
    """
    rotated = rope.rotated_features(before.shape[-1])
    x, y = _pairs_of(before, rope), _pairs_of(after, rope)
    with np.errstate(invalid="ignore"):
        factors = (y * x.conj()).sum(axis=over, keepdims=True) / (np.abs(x) ** 2).sum(
            axis=over, keepdims=True
        )
    is_turned = (
        np.abs(y - factors * x).max() <= CLOSE * np.abs(y).max()
    )  # NaN factors of zero pairs don't count
    if not (
        is_turned
        and np.array_equal(np.delete(before, rotated, axis=-1), np.delete(after, rotated, axis=-1))
    ):
        return None
    return factors.squeeze(over)


def _turns_of(before: np.ndarray, after: np.ndarray, layout: dict[str, Any]) -> Turns | None:
    """Return the rotation of pairs by angles proportional to the position; None if there is
    none.
    """
    factors = _factors_of(before, after, Rope(**layout), over=(0, 1))  # (T, pairs)
    if factors is None:
        return None
    amplitudes, phases = np.abs(factors), np.angle(factors)
    frequencies = phases[1].copy()
    for place in range(2, len(phases)):
        turns = np.round((place * frequencies - phases[place]) / (2 * np.pi))
        frequencies = (phases[place] + 2 * np.pi * turns) / place
    places = np.arange(len(phases))[:, None]
    errors = np.abs(np.exp(1j * (places * frequencies - phases)) - 1.0)
    if errors.max() > ANGLE or np.ptp(amplitudes) > ANGLE or frequencies.min() < -ANGLE:
        return None
    return Turns(layout, frequencies, float(amplitudes.mean()))


# ---- Several axes --------------------------------------------------------------------------------


def _fit_axes(
    before: np.ndarray, after: np.ndarray, candidates: list[Rope], layouts: list[dict[str, Any]]
) -> Rope:
    """Return the RoPE on several axes that explains the heads, with the smallest positions among
    those that fit.

    Frequencies of one series may fit another series at other integers, such as positions a hundred
    times as large.
    """
    turning = [
        layout
        for layout in layouts
        if _factors_of(before, after, Rope(**layout), over=(1,)) is not None
    ]
    found = dict[Rope, int]()
    for rope in (
        rope for layout in turning for rope in _on_axes(candidates, layout, before.shape[-1])
    ):
        with suppress(ValueError):  # some sections don't fit this width
            positions = positions_of(before, after, rope, 0.1 * ANGLE)
            differ = len(np.unique(positions.reshape(len(positions), -1), axis=0)) == len(positions)
            if differ and np.ptp(positions, axis=(1, 2)).all():  # the positions vary on each axis
                found[rope] = int(positions.max())
    if not found:
        known = "pairs that turn by other angles" if turning else "no pairs that turn"
        raise InputError(
            "rope", "turn pairs by the place, or by integers on two or three axes", known
        )
    return min(found, key=lambda rope: found[rope])


def _on_axes(candidates: list[Rope], layout: dict[str, Any], head_dim: int) -> Iterator[Rope]:
    """Yield RoPE on two and three axes, and on those of a configuration, with its bases and with
    usual ones.
    """
    pairs = (layout["rotary_dim"] or head_dim) // 2
    told = [rope.sections for rope in candidates if rope.sections is not None]
    equal = [(pairs // count,) * count for count in (2, 3) if pairs % count == 0]
    orders = ("contiguous", "interleaved")
    forms = [("shared", order, sections) for order in orders for sections in told]
    forms += [("own", order, sections) for order in orders for sections in equal]
    forms += [
        ("strided", "contiguous", sections) for sections in equal
    ]  # strided ones have one series
    for base in dict.fromkeys(
        (*(rope.replace(sections=None) for rope in candidates), *map(Rope, BASES))
    ):
        for series, order, sections in dict.fromkeys(forms):
            own = {"sections": sections, "section_order": order, "section_frequencies": series}
            with suppress(ValueError):  # a scaling has a single series
                yield base.replace(**layout, **own)


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
        tolerance: of each angle, in radians.

    Raises:
        ValueError: if there are no such positions.
    """
    factors = _factors_of(before, after, rope, over=(1,))  # (B, T, pairs)
    head_dim, sections = before.shape[-1], rope.sections or ()
    if factors is None or min(sections, default=0) < 2:
        raise InputError("rope", "turn two pairs or more on each axis", str(rope))
    frequencies, axes = rope.frequencies(head_dim).astype(np.float64), rope.axes(head_dim)
    angles = np.arange(MOST_POSITIONS)[:, None] * frequencies
    cos, sin = rope.attention_factor * np.cos(angles), rope.attention_factor * np.sin(angles)
    of_axes = [axes == axis for axis in range(len(sections))]
    agreement = [
        np.real(factors)[..., own] @ cos[:, own].T + np.imag(factors)[..., own] @ sin[:, own].T
        for own in of_axes
    ]
    positions = np.stack([each.argmax(-1) for each in agreement])
    chosen = positions[axes], np.arange(len(axes))[:, None, None]
    made = np.moveaxis(cos[chosen] + 1j * sin[chosen], 0, -1)
    if not (error := np.abs(made - factors).max()) <= tolerance:
        raise InputError(
            "rope",
            f"turn pairs by integers on {len(sections)} axes",
            f"{error:.2g} from those of {rope}",
        )
    return positions


# ---- Candidates ----------------------------------------------------------------------------------


def _plain(turns: Turns, num_tokens: int) -> Iterator[Rope]:
    """Yield RoPE with plain bases close to the observed one, the roundest first."""
    frequencies = turns.frequencies
    exponents = 2.0 * np.arange(len(frequencies)) / (2 * len(frequencies))
    shown = (exponents > 0) & (frequencies * (num_tokens - 1) > 0.01)
    if not shown.any():
        return
    weights = (frequencies * exponents)[shown]
    theta = np.exp(np.average(-np.log(frequencies[shown]) / exponents[shown], weights=weights))
    for digits in range(1, 8):
        yield Rope(float(f"{theta:.{digits - 1}e}"))


def _fits(rope: Rope, turns: Turns, head_dim: int, num_tokens: int) -> bool:
    expected = rope.frequencies(head_dim, num_tokens).astype(np.float64)
    if (
        expected.shape != turns.frequencies.shape
        or abs(rope.attention_factor - turns.amplitude) > ANGLE
    ):
        return False
    return bool((np.abs(expected - turns.frequencies) * (num_tokens - 1) <= 0.1 * ANGLE).all())


def ropes_of(config: Mapping[str, Any], head_dim: int, layer_type: str) -> list[Rope]:
    """Return the RoPE that a configuration may specify, without its family's rules."""
    found = []
    for values in (config, *(part for part in config.values() if isinstance(part, Mapping))):
        for kind in dict.fromkeys((layer_type, "full_attention", "sliding_attention")):
            for local_theta in (None, 10000.0):
                with suppress(Exception):  # only a candidate: the fit decides
                    value = read_rope(
                        Config(values),
                        head_dim,
                        layer_type=kind,
                        theta=10000.0,
                        fraction=1.0,
                        local_theta=local_theta,
                        sections=None,
                    ).value
                    if isinstance(value, Rope):
                        found.append(value.replace(rotary_dim=None))
    return list(dict.fromkeys((*found, *map(Rope, _bases_in(config)))))


def _bases_in(config: Mapping[str, Any]) -> Iterator[float]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _bases_in(value)
        elif name == "rope_theta" and isinstance(value, (int, float)) and value > 0:
            yield value
