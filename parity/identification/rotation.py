"""Fit RoPE to heads before and after it: which features are pairs, and by what angle each turns a token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from mha_spec import Refusal, Rope
from parity.models.config import Config
from parity.models.rope import read_rope

CLOSE = 2e-5
"""Largest error of a pair that is turned again, of the largest feature, in float32."""

ANGLE = 3e-4
"""Largest error of an angle, in radians, at the last token."""


class Turns(NamedTuple):
    """Rotation of pairs, as it was seen.

    Attributes:
        layout: fields of `Rope` that say which features are pairs.
        frequencies: radians of each pair per token, (R/2,).
        amplitude: factor of the length of each pair.
    """

    layout: dict[str, Any]
    frequencies: np.ndarray
    amplitude: float


def fit_rope(before: np.ndarray, after: np.ndarray, candidates: list[Rope]) -> Rope | None:
    """Return the RoPE that makes heads (B, heads, T, H) of those before it; None if they are the same.

    Args:
        before, after: heads of tokens at places 0, 1, …
        candidates: what a configuration says; those that fit come before plain bases, which are rounded.

    Raises:
        ValueError: if nothing explains how they differ.
    """
    if np.array_equal(before, after):
        return None
    seen = list(_turns_of(before, after))
    num_tokens, head_dim = before.shape[2:]
    for turns in seen:
        for base in (*candidates, *_plain(turns, num_tokens)):
            with suppress(ValueError):  # a scaling may not fit so many features
                rope = base.replace(**turns.layout)
                if _fits(rope, turns, head_dim, num_tokens):
                    return rope
    known = f"frequencies {np.round(seen[0].frequencies[:4], 6).tolist()} …" if seen else "no pairs that turn"
    raise Refusal("rope", "have frequencies of a plain base, or of the configuration", known)


def _turns_of(before: np.ndarray, after: np.ndarray) -> Iterator[Turns]:
    """Yield each way to see the features as pairs that turn by an angle in proportion to the place."""
    head_dim = before.shape[-1]
    changed = int((before != after).any(axis=(0, 1, 2)).sum())
    for count in dict.fromkeys((changed + changed % 2, head_dim)):
        for rotated in ("first", "last"):
            begin = 0 if rotated == "first" else head_dim - count
            features = np.arange(begin, begin + count)
            for pairs in ("half", "interleaved"):
                split = (features[: count // 2], features[count // 2 :])
                first, second = split if pairs == "half" else (features[0::2], features[1::2])
                found = _turn(before[..., first], before[..., second], after[..., first], after[..., second])
                if found is not None and _rest_is_same(before, after, features):
                    layout = {"pairs": pairs, "rotary_dim": None if count == head_dim else count}
                    yield Turns({**layout, "rotated": rotated if count < head_dim else "first"}, *found)


def _rest_is_same(before: np.ndarray, after: np.ndarray, features: np.ndarray) -> bool:
    rest = np.setdiff1d(np.arange(before.shape[-1]), features)
    return np.array_equal(before[..., rest], after[..., rest])


def _turn(*parts: np.ndarray) -> tuple[np.ndarray, float] | None:
    """Return frequencies and amplitude of pairs, or None if they do not turn so."""
    x0, y0, x1, y1 = (each.astype(np.float64) for each in parts)
    before, after = x0 + 1j * y0, x1 + 1j * y1
    factors = (after * before.conj()).sum(axis=(0, 1)) / (np.abs(before) ** 2).sum(axis=(0, 1))  # (T, pairs)
    if np.abs(after - factors * before).max() > CLOSE * np.abs(after).max():
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
    return frequencies, float(amplitudes.mean())


def _plain(turns: Turns, num_tokens: int) -> Iterator[Rope]:
    """Yield RoPE of plain bases that are near, the roundest first."""
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
    if expected.shape != turns.frequencies.shape or abs(rope.attention_factor - turns.amplitude) > ANGLE:
        return False
    return bool((np.abs(expected - turns.frequencies) * (num_tokens - 1) <= 0.1 * ANGLE).all())


def ropes_of(config: Mapping[str, Any], head_dim: int, layer_type: str) -> list[Rope]:
    """Return the RoPE that a configuration may mean, without its family's rules."""
    found = []
    for values in (config, *(part for part in config.values() if isinstance(part, Mapping))):
        for kind in dict.fromkeys((layer_type, "full_attention", "sliding_attention")):
            for local_theta in (None, 10000.0):
                with suppress(Exception):  # it is a candidate alone, and what fits decides
                    value = read_rope(
                        Config(values), head_dim, layer_type=kind, theta=10000.0, fraction=1.0, local_theta=local_theta
                    ).value
                    if isinstance(value, Rope):
                        found.append(value.replace(rotary_dim=None))
    return list(dict.fromkeys(found))
