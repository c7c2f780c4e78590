"""RoPE of the reference: pairs, frequencies and factors directly from the formulas, pair by pair.

`mha_spec` computes the tables of the implementations; here only the numbers of a `Rope` are used.
Frequencies are float32 and round each step, in the order of Hugging Face's transformers: these are
the tables of the released models.
"""

from __future__ import annotations

import math

import numpy as np

from mha_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)

ONE = np.float32(1)


def count_rotated(rope: Rope, head_dim: int) -> int:
    """Return the number of rotated features of a head, R."""
    return rope.rotary_dim or head_dim


def pairs(rope: Rope, head_dim: int) -> tuple[list[int], list[int]]:
    """Return the first and the second feature of each pair."""
    first, second = pair_slices(rope, head_dim)
    return list(range(head_dim)[first]), list(range(head_dim)[second])


def pair_slices(rope: Rope, head_dim: int) -> tuple[slice, slice]:
    """Return the first and the second features of all pairs, as slices."""
    count = count_rotated(rope, head_dim)
    start = head_dim - count if rope.rotated == "last" else 0
    if rope.pairs == "interleaved":
        return slice(start, start + count, 2), slice(start + 1, start + count, 2)
    middle = start + count // 2
    return slice(start, middle), slice(middle, start + count)


def axes(rope: Rope, head_dim: int) -> list[int]:
    """Return the position axis of each pair."""
    count = count_rotated(rope, head_dim) // 2
    if rope.sections is None:
        return [0] * count
    if rope.section_order == "contiguous":
        return [axis for axis, size in enumerate(rope.sections) for _ in range(size)]
    found = [0] * count
    for axis, size in enumerate(rope.sections):
        for pair in range(axis, min(size * len(rope.sections), count), len(rope.sections)):
            found[pair] = axis
    return found


def amplitude(rope: Rope) -> float:
    """Factor of cosines and sines."""
    scaling = rope.scaling
    if not isinstance(scaling, (YarnScaling, LongRopeScaling)):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    stretch = math.log(max(scaling.factor, 1.0))
    if isinstance(scaling, LongRopeScaling):
        return math.sqrt(1 + stretch / math.log(scaling.original_length))
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return 1 + stretch / 10
    return (1 + scaling.mscale * stretch / 10) / (1 + scaling.mscale_all_dim * stretch / 10)


def frequencies(
    rope: Rope, head_dim: int, length: int, wide: type[np.floating] = np.float64
) -> list[float]:
    """Return the angle per token of each pair in a call whose last position is length - 1.

    Frequencies that implementations compute during the call are in `wide`, the others float32.
    """
    count = count_rotated(rope, head_dim)
    divisors = [_power(rope.theta, *place) for place in _places_in_series(rope, head_dim)]
    plain = [ONE / divisor for divisor in divisors]
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        found = [frequency / np.float32(scaling.factor) for frequency in plain]
    elif isinstance(scaling, DynamicScaling):
        found = (
            plain
            if length <= scaling.original_length
            else _dynamic(rope.theta, scaling, count, length, wide)
        )
    elif isinstance(scaling, Llama3Scaling):
        found = [_llama3(frequency, scaling) for frequency in plain]
    elif isinstance(scaling, YarnScaling):
        found = _yarn(rope.theta, scaling, divisors)
    elif isinstance(scaling, LongRopeScaling):
        factors = (
            scaling.long_factors if length > scaling.original_length else scaling.short_factors
        )
        found = [
            ONE / (np.float32(factor) * divisor)
            for divisor, factor in zip(divisors, factors, strict=True)
        ]
    elif isinstance(scaling, ProportionalScaling):
        rotated = int(scaling.fraction * count // 2)
        found = [frequency / np.float32(scaling.factor) for frequency in plain[:rotated]]
        found += [np.float32(0)] * (count // 2 - rotated)
    else:
        found = plain
    return [float(frequency) for frequency in found]


def _places_in_series(rope: Rope, head_dim: int) -> list[tuple[int, int]]:
    """Return the place of each pair in the series of its frequency, and the number of features of
    that series.
    """
    count, sections = count_rotated(rope, head_dim), rope.sections or ()
    if rope.section_frequencies == "shared":
        return [(pair, count) for pair in range(count // 2)]
    found, held = list[tuple[int, int]](), [0] * len(sections)
    for axis in axes(rope, head_dim):
        place, size = held[axis], 2 * sections[axis]
        found.append(
            (place, size)
            if rope.section_frequencies == "own"
            else (len(sections) * place + axis, count)
        )
        held[axis] += 1
    return found


def _power(theta: float, pair: int, count: int) -> np.float32:
    """Return theta ** (2 pair / count) with the exponent rounded to float32."""
    return np.float32(float(np.float32(theta)) ** float(_exponent(pair, count)))


def _exponent(pair: int, count: int) -> np.float32:
    return np.float32(2 * pair) / np.float32(count)


def _dynamic(
    theta: float, scaling: DynamicScaling, count: int, length: int, wide: type[np.floating]
) -> list[np.floating]:
    growth = wide(scaling.factor) * wide(length) / wide(scaling.original_length) - wide(
        scaling.factor - 1
    )
    base = wide(theta) * growth ** wide(count / (count - 2))
    return [wide(1) / base ** wide(_exponent(pair, count)) for pair in range(count // 2)]


def _llama3(frequency: np.float32, scaling: Llama3Scaling) -> np.float32:
    wavelength, original = (
        ONE / frequency * np.float32(2 * math.pi),
        np.float32(scaling.original_length),
    )
    low, high, factor = (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        np.float32(scaling.factor),
    )
    if wavelength < np.float32(scaling.original_length / high):
        return frequency
    if wavelength > np.float32(scaling.original_length / low):
        return frequency / factor
    smooth = (ONE / wavelength * original - np.float32(low)) / np.float32(high - low)
    return (ONE - smooth) * frequency / factor + smooth * frequency


def _yarn(theta: float, scaling: YarnScaling, divisors: list[np.float32]) -> list[np.float32]:
    count = 2 * len(divisors)

    def pair_with(turns: float) -> float:
        """Return the pair with this many turns in the original length, 2 pi turns theta ** (2 pair
        / count).
        """
        return (
            count
            * math.log(scaling.original_length / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    begin, end = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, count - 1)
    if begin == end:
        end += 0.001
    found = []
    for pair, divisor in enumerate(divisors):
        ramp = (np.float32(pair) - np.float32(begin)) / np.float32(end - begin)
        kept = ONE - np.clip(ramp, np.float32(0), ONE)
        found.append(
            ONE / (np.float32(scaling.factor) * divisor) * (ONE - kept) + ONE / divisor * kept
        )
    return found
