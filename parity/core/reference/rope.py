"""RoPE in the reference: pairs, frequencies and factors straight from the formulas, pair by pair.

`mha_spec` makes the tables of the siblings; of it only the numbers of a `Rope` are read here.
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


def count_rotated(rope: Rope, head_dim: int) -> int:
    """Features of a head that are rotated, R."""
    return rope.rotary_dim or head_dim


def pairs(rope: Rope, head_dim: int) -> tuple[list[int], list[int]]:
    """The first and the second feature of each pair."""
    count = count_rotated(rope, head_dim)
    start = head_dim - count if rope.rotated == "last" else 0
    if rope.pairs == "interleaved":
        return list(range(start, start + count, 2)), list(range(start + 1, start + count, 2))
    middle = start + count // 2
    return list(range(start, middle)), list(range(middle, start + count))


def axes(rope: Rope, head_dim: int) -> list[int]:
    """The axis of the positions that each pair is rotated by."""
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
    """What cosines and sines are multiplied by."""
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


def frequencies(rope: Rope, head_dim: int, length: int, wide: type[np.floating] = np.float64) -> list[float]:
    """The angle per token of each pair in a call whose last position is length - 1.

    All but those that siblings compute in the call itself, in `wide`, are exact.
    """
    count = count_rotated(rope, head_dim)
    plain = [rope.theta ** (-2 * pair / count) for pair in range(count // 2)]
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        return [frequency / scaling.factor for frequency in plain]
    if isinstance(scaling, DynamicScaling):
        return plain if length <= scaling.original_length else _dynamic(rope.theta, scaling, count, length, wide)
    if isinstance(scaling, Llama3Scaling):
        return [_llama3(frequency, scaling) for frequency in plain]
    if isinstance(scaling, YarnScaling):
        return _yarn(rope.theta, scaling, count)
    if isinstance(scaling, LongRopeScaling):
        factors = scaling.long_factors if length > scaling.original_length else scaling.short_factors
        return [frequency / factor for frequency, factor in zip(plain, factors, strict=True)]
    if isinstance(scaling, ProportionalScaling):
        rotated = int(scaling.fraction * count // 2)
        return [frequency / scaling.factor if pair < rotated else 0.0 for pair, frequency in enumerate(plain)]
    return plain


def _dynamic(theta: float, scaling: DynamicScaling, count: int, length: int, wide: type[np.floating]) -> list[float]:
    growth = wide(scaling.factor) * wide(length) / wide(scaling.original_length) - wide(scaling.factor - 1)
    base = wide(theta) * growth ** wide(count / (count - 2))
    return [float(base ** wide(-2 * pair / count)) for pair in range(count // 2)]


def _llama3(frequency: float, scaling: Llama3Scaling) -> float:
    wavelength, original = 2 * math.pi / frequency, scaling.original_length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / scaling.factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _yarn(theta: float, scaling: YarnScaling, count: int) -> list[float]:
    def pair_with(turns: float) -> float:
        """The pair that turns so often in the original length, 2 pi turns theta ** (2 pair / count)."""
        return count * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    begin, end = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, count - 1)
    if begin == end:
        end += 0.001
    found = []
    for pair in range(count // 2):
        frequency = 1 / theta ** (2 * pair / count)
        interpolated = min(max((pair - begin) / (end - begin), 0.0), 1.0)
        found.append(interpolated * frequency / scaling.factor + (1 - interpolated) * frequency)
    return found
