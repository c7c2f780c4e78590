"""Scalings of RoPE's frequencies for contexts longer than in pre-training.

They compute in float32, in the order of operations of Hugging Face's transformers, to reproduce
released models. Results in float64 would differ by up to 35 units in the last place if terms
cancel. Powers are rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from mha_spec.errors import InputError, InputTypeError
from mha_spec.record import Record
from mha_spec.rules import LARGEST_FACTOR, LEAST_FACTOR, as_boolean, as_count, as_factor

MOST_TOKENS = 2**31
"""Length of the longest call: positions are integers of 32 bits."""


def exponents(count: int, features: int) -> np.ndarray:
    """Return 2 i / features of the first `count` pairs: float32, (count,)."""
    return 2.0 * np.arange(count, dtype=np.float32) / np.float32(features)


def powers(theta: float, to: np.ndarray) -> np.ndarray:
    """Return theta to the power of each exponent, rounded to the nearest float32."""
    return (np.float64(np.float32(theta)) ** to.astype(np.float64)).astype(np.float32)


def unscaled_frequencies(theta: float, count: int, features: int) -> np.ndarray:
    """Return the first `count` frequencies theta ** (-2 i / features): float32, (count,)."""
    return 1.0 / powers(theta, exponents(count, features))


@dataclass(frozen=True, repr=False)
class Scaling(Record):
    """Base class of RoPE scalings; numeric fields only, so that it is hashable and serializable."""

    kind: str = field(default="", init=False)

    def frequencies(self, theta: float, features: int, length: int) -> np.ndarray:
        """Return the frequencies of `features` features if the last position is length - 1:
        float32, (features/2,).
        """
        raise NotImplementedError

    def amplitude(self) -> float:
        """Return the factor of cosines and sines."""
        return 1.0

    def divisors(self) -> tuple[float, ...]:
        """Return the divisor of each frequency."""
        return ()

    def check(self, theta: float, features: int) -> None:
        """Reject a base or a number of rotated features for which the scaling is undefined.

        Raises:
            ValueError: if the scaling is undefined, or frequencies or their factors are beyond the
                range of float32.
        """
        if not LEAST_FACTOR <= self.amplitude() <= LARGEST_FACTOR:
            raise InputError(
                "scaling", "keep the factor of cosines within the range of float32", scaling=self
            )
        largest = max(self.divisors(), default=1.0)
        least = min(self.divisors(), default=1.0)
        if (
            max(theta, 1.0) * largest > LARGEST_FACTOR
            or max(1.0 / theta, 1.0) / least > LARGEST_FACTOR
        ):
            self._reject_range(theta)

    def _reject_range(self, theta: float) -> NoReturn:
        raise InputError(
            "scaling", "keep frequencies within the range of float32", scaling=self, theta=theta
        )

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, repr=False)
class LinearScaling(Scaling):
    """Position interpolation: divide every frequency by the factor.

    Attributes:
        factor: extension of the context, new length / old length.

    Raises:
        TypeError: if the factor is not a number.
        ValueError: if it is not positive and finite.

    Source: arXiv:2306.15595; Gemma 3's global layers.
    """

    factor: float
    kind: str = field(default="linear", init=False)

    def __post_init__(self) -> None:
        self._set(factor=as_factor("factor", self.factor))

    def divisors(self) -> tuple[float, ...]:
        return (self.factor,)

    def frequencies(self, theta: float, features: int, length: int) -> np.ndarray:
        return unscaled_frequencies(theta, features // 2, features) / self.factor


@dataclass(frozen=True, repr=False)
class DynamicScaling(Scaling):
    """Dynamic NTK: the base grows with the length of the call beyond the original length.

    The base is theta * growth ** (d / (d - 2)), where d is the number of rotated features.

    Attributes:
        factor: extension of the context, new length / old length.
        original_length: length up to which nothing is scaled.

    Raises:
        TypeError: if factor is not a number, or original_length not an integer.
        ValueError: if one is not positive and finite.

    Source: the dynamic form of NTK-aware scaling, arXiv:2309.00071, appendix B.
    """

    factor: float
    original_length: int
    kind: str = field(default="dynamic", init=False)

    def __post_init__(self) -> None:
        self._set(
            factor=as_factor("factor", self.factor),
            original_length=as_count("original_length", self.original_length),
        )

    def base(self, theta: float, features: int, length: Any) -> Any:
        """Return the base for calls of a length above the original: a number, or an array of any
        framework.
        """
        growth = self.factor * (length - self.original_length) / self.original_length + 1.0
        return theta * growth ** (features / (features - 2))

    def frequencies(self, theta: float, features: int, length: int) -> np.ndarray:
        base = self.base(theta, features, max(length, self.original_length))
        return unscaled_frequencies(base, features // 2, features)

    def check(self, theta: float, features: int) -> None:
        if features < 4:
            raise InputError("rotated features", "be at least 4 with DynamicScaling", str(features))
        super().check(theta, features)
        if self.base(theta, features, max(MOST_TOKENS, self.original_length)) > LARGEST_FACTOR:
            self._reject_range(theta)


@dataclass(frozen=True, repr=False)
class Llama3Scaling(Scaling):
    """Llama 3: divide low frequencies by the factor, keep high ones, and interpolate in between by
    wavelength.

    Attributes:
        factor: extension of the context: 8 in Llama 3.1, 32 in Llama 3.2.
        original_length: context length of pre-training, 8192 in Llama 3.
        low_freq_factor: wavelengths above original_length / low_freq_factor are fully scaled.
        high_freq_factor: wavelengths below original_length / high_freq_factor are not scaled.

    Raises:
        TypeError: if a factor is not a number, or original_length not an integer.
        ValueError: if one is not positive and finite, or high_freq_factor not above
            low_freq_factor.

    Source: arXiv:2407.21783 and the code of Llama 3.1.
    """

    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    kind: str = field(default="llama3", init=False)

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            self._set(**{name: as_factor(name, getattr(self, name))})
        self._set(original_length=as_count("original_length", self.original_length))
        if self.high_freq_factor <= self.low_freq_factor:
            raise InputError(
                "high_freq_factor",
                "be above low_freq_factor",
                high_freq_factor=self.high_freq_factor,
                low_freq_factor=self.low_freq_factor,
            )

    def divisors(self) -> tuple[float, ...]:
        return (self.factor,)

    def frequencies(self, theta: float, features: int, length: int) -> np.ndarray:
        unscaled = unscaled_frequencies(theta, features // 2, features)
        wavelengths = 1.0 / unscaled * (2 * math.pi)
        turns = 1.0 / wavelengths * self.original_length  # in the original context
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        between = (1.0 - share) * unscaled / self.factor + share * unscaled
        often = wavelengths < self.original_length / self.high_freq_factor
        seldom = wavelengths > self.original_length / self.low_freq_factor
        return np.where(seldom, unscaled / self.factor, np.where(often, unscaled, between))

    def check(self, theta: float, features: int) -> None:
        super().check(theta, features)
        fastest = max(1.0 / theta, 1.0)  # at least the largest frequency
        width = self.high_freq_factor - self.low_freq_factor
        # Each intermediate result of `frequencies` is at most one of these. It multiplies a share
        # of the ramp by a frequency.
        largest_share = max(self.original_length, self.high_freq_factor) * fastest / min(width, 1.0)
        largest = largest_share * fastest / min(self.factor, 1.0)
        longest = max(2 * math.pi * theta, self.original_length / self.low_freq_factor)
        if width < LEAST_FACTOR or max(largest, longest) > LARGEST_FACTOR:
            self._reject_range(theta)


@dataclass(frozen=True, repr=False)
class YarnScaling(Scaling):
    """YaRN: divide frequencies with few turns in the original context by the factor, with a ramp in
    between.

    Attributes:
        factor: extension of the context, new length / old length.
        original_length: context length of pre-training.
        beta_fast: pairs with more turns than this in the original context are not scaled.
        beta_slow: pairs with fewer turns than this are fully scaled.
        truncate: round the ends of the ramp outwards to whole pairs; False in gpt-oss.
        attention_factor: factor of cosines and sines; default: derived from `factor`.
        mscale, mscale_all_dim: replace 0.1 * ln(factor) + 1 by the ratio of 0.1 * mscale *
            ln(factor) + 1 to 0.1 * mscale_all_dim * ln(factor) + 1 (DeepSeek).

    Raises:
        TypeError: if a number has a wrong type, original_length is not an integer, or truncate not
            a boolean.
        ValueError: if a number is not positive and finite, beta_fast not above beta_slow, only one
            of mscale and mscale_all_dim is set, or both and attention_factor.

    Source: arXiv:2309.00071.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    kind: str = field(default="yarn", init=False)

    def __post_init__(self) -> None:
        for name in (
            "factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        ):
            if getattr(self, name) is not None or name in ("factor", "beta_fast", "beta_slow"):
                self._set(**{name: as_factor(name, getattr(self, name))})
        self._set(original_length=as_count("original_length", self.original_length))
        self._set(truncate=as_boolean("truncate", self.truncate))
        if self.beta_fast <= self.beta_slow:
            raise InputError(
                "beta_fast",
                "be above beta_slow",
                beta_fast=self.beta_fast,
                beta_slow=self.beta_slow,
            )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise InputError(
                "mscale and mscale_all_dim",
                "be set together",
                mscale=self.mscale,
                mscale_all_dim=self.mscale_all_dim,
            )
        if self.mscale is not None and self.attention_factor is not None:
            raise InputError(
                "attention_factor",
                "be left out with mscale",
                attention_factor=self.attention_factor,
                mscale=self.mscale,
            )

    def divisors(self) -> tuple[float, ...]:
        return (self.factor,)

    def frequencies(self, theta: float, features: int, length: int) -> np.ndarray:
        low, high = self.ramp(theta, features)
        unscaled_share = 1.0 - np.clip(
            (np.arange(features // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0
        )
        divisors = powers(theta, exponents(features // 2, features))
        return (
            1.0 / (self.factor * divisors) * (1.0 - unscaled_share)
            + 1.0 / divisors * unscaled_share
        )

    def ramp(self, theta: float, features: int) -> tuple[float, float]:
        """Return the last pair that is not scaled and the first that is fully scaled."""
        low = self._pair_of(self.beta_fast, theta, features)
        high = self._pair_of(self.beta_slow, theta, features)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, features - 1)  # features, not pairs, as in transformers
        if low == high:  # `frequencies` divides by the difference
            high += 0.001
        return low, high

    def _pair_of(self, turns: float, theta: float, features: int) -> float:
        """Return the fractional index of the pair with this many turns in the original context."""
        return (
            features
            * math.log(self.original_length / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._amplitude_by(1.0)
        return self._amplitude_by(self.mscale) / self._amplitude_by(self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """Factor of the scores if mscale_all_dim is part of the layer's scale, as in DeepSeek."""
        if self.mscale_all_dim is None:
            return 1.0
        return self._amplitude_by(self.mscale_all_dim) ** 2

    def _amplitude_by(self, mscale: float) -> float:
        if self.factor <= 1.0:
            return 1.0
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def check(self, theta: float, features: int) -> None:
        if theta <= 1.0:
            raise InputError("theta", "be above 1 with YarnScaling", theta=theta)
        super().check(theta, features)


@dataclass(frozen=True, repr=False)
class LongRopeScaling(Scaling):
    """LongRoPE: divide each frequency by its own factor, from one list for short calls and another
    for long ones.

    Attributes:
        factor: extension of the context: new length / original_length.
        original_length: longest call that uses the short list.
        short_factors, long_factors: one number per pair.
        attention_factor: factor of cosines and sines; default: sqrt(1 + ln(factor) /
            ln(original_length)), or 1 if factor is at most 1.

    Raises:
        TypeError: if a factor is not a number, or original_length not an integer.
        ValueError: if one is not positive and finite, the two lists differ in length, or
            original_length is 1.

    Source: arXiv:2402.13753; Phi-3 and Phi-4.
    """

    factor: float
    original_length: int
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float | None = None
    kind: str = field(default="longrope", init=False)

    def __post_init__(self) -> None:
        self._set(factor=as_factor("factor", self.factor))
        self._set(original_length=as_count("original_length", self.original_length, 2))
        for name in ("short_factors", "long_factors"):
            if isinstance(getattr(self, name), (str, bytes)) or not np.iterable(
                getattr(self, name)
            ):
                raise InputTypeError(
                    name, "be numbers, one for each pair", {name: getattr(self, name)}
                )
            self._set(**{name: tuple(as_factor(name, factor) for factor in getattr(self, name))})
        if len(self.short_factors) != len(self.long_factors):
            raise InputError(
                "short_factors",
                "be as many as long_factors",
                f"{len(self.short_factors)} and {len(self.long_factors)}",
            )
        if self.attention_factor is not None:
            self._set(attention_factor=as_factor("attention_factor", self.attention_factor))

    def divisors(self) -> tuple[float, ...]:
        return (*self.short_factors, *self.long_factors)

    def frequencies(self, theta: float, features: int, length: int) -> np.ndarray:
        if length > self.original_length:
            factors = self.long_factors
        else:
            factors = self.short_factors
        return 1.0 / (
            np.array(factors, np.float32) * powers(theta, exponents(features // 2, features))
        )

    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_length))

    def check(self, theta: float, features: int) -> None:
        if len(self.short_factors) != features // 2:
            raise InputError(
                "short_factors and long_factors",
                f"be one for each of {features // 2} rotated pairs",
                str(len(self.short_factors)),
            )
        super().check(theta, features)


@dataclass(frozen=True, repr=False)
class ProportionalScaling(Scaling):
    """Rotate only the first pairs of a head, with their frequencies in the whole head.

    Partial RoPE (`Rope.rotary_dim`) differs: it has the pairs and exponents of a smaller head.

    Attributes:
        fraction: int(fraction * H / 2) pairs are rotated; the other frequencies are 0.
        factor: divisor of the frequencies.

    Raises:
        TypeError: if one is not a number.
        ValueError: if the fraction lies outside (0, 1], or the factor is not positive and finite.

    Source: Gemma 4's global layers.
    """

    fraction: float
    factor: float = 1.0
    kind: str = field(default="proportional", init=False)

    def __post_init__(self) -> None:
        self._set(
            fraction=as_factor("fraction", self.fraction), factor=as_factor("factor", self.factor)
        )
        if self.fraction > 1.0:
            raise InputError("fraction", "be at most 1", fraction=self.fraction)

    def divisors(self) -> tuple[float, ...]:
        return (self.factor,)

    def frequencies(self, theta: float, features: int, length: int) -> np.ndarray:
        rotated = int(self.fraction * features // 2)
        frequencies = np.zeros(features // 2, np.float32)
        frequencies[:rotated] = unscaled_frequencies(theta, rotated, features) / self.factor
        return frequencies


SCALINGS: dict[str, type[Scaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
    "proportional": ProportionalScaling,
}
"""Scalings by their names in JSON, as in Hugging Face's configurations."""
