"""RoPE of the reference: pairs, frequencies and factors directly from the formulas, pair by pair.

`mha_spec` computes the tables of the implementations; here only the fields of a `Rope` are used.
Frequencies are float32 and round each step, in the order of Hugging Face's transformers: these are
the tables of the released models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    axis_of_pairs = [0] * count
    if rope.section_order == "contiguous":
        start = 0
        for axis, size in enumerate(rope.sections):
            axis_of_pairs[start : start + size] = [axis] * size
            start += size
        return axis_of_pairs
    # Axes take turns until a section is used up; remaining pairs belong to the first axis.
    num_axes = len(rope.sections)
    for axis, size in enumerate(rope.sections):
        for pair in range(axis, min(size * num_axes, count), num_axes):
            axis_of_pairs[pair] = axis
    return axis_of_pairs


def amplitude(rope: Rope) -> float:
    """Return the factor of cosines and sines."""
    scaling = rope.scaling
    if not isinstance(scaling, (YarnScaling, LongRopeScaling)):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    stretch = math.log(max(scaling.factor, 1.0))
    if isinstance(scaling, LongRopeScaling):
        return math.sqrt(1 + stretch / math.log(scaling.original_length))
    # YaRN: 0.1 ln(s) + 1 (arXiv:2309.00071). DeepSeek divides it by another such factor, by whose
    # square it multiplies the logits.
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return 1 + stretch / 10
    return (1 + scaling.mscale * stretch / 10) / (1 + scaling.mscale_all_dim * stretch / 10)


def frequencies(
    rope: Rope, head_dim: int, length: int, wide: type[np.floating] = np.float64
) -> list[float]:
    """Return the angle per token of each pair in a call whose last position is length - 1.

    Frequencies that implementations compute during the call are in `wide`, the others float32.
    """
    divisors = [_power(rope.theta, *index) for index in _indices_in_series(rope, head_dim)]
    scaled = _scaled(rope, count_rotated(rope, head_dim), divisors, length, wide)
    return [float(frequency) for frequency in scaled]


def _scaled(
    rope: Rope, count: int, divisors: list[np.float32], length: int, wide: type[np.floating]
) -> Sequence[np.floating]:
    """Return the frequencies of pairs, by their divisors, after the scaling of a RoPE."""
    plain, scaling = [ONE / divisor for divisor in divisors], rope.scaling
    if isinstance(scaling, LinearScaling):
        return [frequency / np.float32(scaling.factor) for frequency in plain]
    if isinstance(scaling, DynamicScaling) and length > scaling.original_length:
        return _dynamic(rope.theta, scaling, count, length, wide)
    if isinstance(scaling, Llama3Scaling):
        return [_llama3(frequency, scaling) for frequency in plain]
    if isinstance(scaling, YarnScaling):
        return _yarn(rope.theta, scaling, divisors)
    if isinstance(scaling, LongRopeScaling):
        factors = scaling.short_factors
        if length > scaling.original_length:
            factors = scaling.long_factors
        pairs_of_factors = zip(factors, divisors, strict=True)
        return [ONE / (np.float32(factor) * divisor) for factor, divisor in pairs_of_factors]
    if isinstance(scaling, ProportionalScaling):
        num_rotated = int(scaling.fraction * count // 2)
        rotated = [frequency / np.float32(scaling.factor) for frequency in plain[:num_rotated]]
        return rotated + [np.float32(0)] * (count // 2 - num_rotated)
    return plain


def _indices_in_series(rope: Rope, head_dim: int) -> list[tuple[int, int]]:
    """Return the index p of each pair in a series of frequencies, theta ** (-2 p / H), with H, the
    number of features of that series.
    """
    count = count_rotated(rope, head_dim)
    sections = rope.sections or ()
    if rope.section_frequencies == "shared":
        return [(pair, count) for pair in range(count // 2)]
    indices: list[tuple[int, int]] = []
    num_earlier = [0] * len(sections)
    for axis in axes(rope, head_dim):
        index_in_section = num_earlier[axis]
        if rope.section_frequencies == "own":
            # Each section has a series of its own, over its pairs alone.
            indices.append((index_in_section, 2 * sections[axis]))
        else:
            # The sections take the frequencies of one series in turn.
            indices.append((len(sections) * index_in_section + axis, count))
        num_earlier[axis] += 1
    return indices


def _power(theta: float, pair: int, count: int) -> np.float32:
    """Return theta ** (2 pair / count) with the exponent rounded to float32."""
    return np.float32(float(np.float32(theta)) ** float(_exponent(pair, count)))


def _exponent(pair: int, count: int) -> np.float32:
    return np.float32(2 * pair) / np.float32(count)


def _dynamic(
    theta: float, scaling: DynamicScaling, count: int, length: int, wide: type[np.floating]
) -> list[np.floating]:
    stretch = wide(scaling.factor) * wide(length) / wide(scaling.original_length)
    growth = stretch - wide(scaling.factor - 1)
    base = wide(theta) * growth ** wide(count / (count - 2))
    return [wide(1) / base ** wide(_exponent(pair, count)) for pair in range(count // 2)]


def _llama3(frequency: np.float32, scaling: Llama3Scaling) -> np.float32:
    wavelength = ONE / frequency * np.float32(2 * math.pi)
    original, factor = np.float32(scaling.original_length), np.float32(scaling.factor)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if wavelength < np.float32(scaling.original_length / high):
        return frequency
    if wavelength > np.float32(scaling.original_length / low):
        return frequency / factor
    smooth = (ONE / wavelength * original - np.float32(low)) / np.float32(high - low)
    return (ONE - smooth) * frequency / factor + smooth * frequency


def _yarn(theta: float, scaling: YarnScaling, divisors: list[np.float32]) -> list[np.float32]:
    count = 2 * len(divisors)

    def pair_with(turns: float) -> float:
        """Return the pair with this many turns in the original length.

        The length of its turn is 2 pi theta ** (2 pair / count).
        """
        divisor = scaling.original_length / (turns * 2 * math.pi)
        return count * math.log(divisor) / (2 * math.log(theta))

    begin, end = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, count - 1)
    if begin == end:
        end += 0.001  # as in YaRN's code, so that the ramp is not divided by 0
    scaled = []
    for pair, divisor in enumerate(divisors):
        ramp = (np.float32(pair) - np.float32(begin)) / np.float32(end - begin)
        unscaled_share = ONE - np.clip(ramp, np.float32(0), ONE)
        stretched = ONE / (np.float32(scaling.factor) * divisor) * (ONE - unscaled_share)
        scaled.append(stretched + ONE / divisor * unscaled_share)
    return scaled
