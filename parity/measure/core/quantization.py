"""Quantized key/value caches: the values that they store, and the scales of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.record import Record
from mha_spec.rules import as_boolean, as_count

StoredDtype = Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2"]
ScalePer = Literal["tensor", "head", "channel", "token", "token_head"]
ScaleDtype = Literal["float32", "bfloat16", "float16"]
ZeroPoint = Literal["none", "minimum", "integer"]
ExactTokens = Literal["none", "first_call", "new"]

LARGEST: dict[str, float] = {
    "int8": 127.0,
    "int4": 7.0,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}
"""Largest number of each stored dtype. Integers are symmetric: -128 and -8 are not used."""

NUM_STEPS: dict[str, int] = {"int8": 255, "int4": 15}
"""Largest number of each stored dtype with a zero point, in which 0 is the smallest."""

SCALE_AXES: dict[str, str] = {
    "tensor": "",
    "head": "K",
    "channel": "KH",
    "token": "BS",
    "token_head": "BKS",
}
"""Axes of keys and values, (B, K, S, H), along which scales differ."""

NAMES = ("keys", "values")
"""The parts of a cache."""

FIXED = ("tensor", "head", "channel")
"""Scales that all tokens share. Scales of a token are computed when it is written."""


@dataclass(frozen=True, repr=False)
class CacheQuantization(Record):
    """Quantization of a key/value cache: x is stored as round(x / scale), and read as that times
    the scale.

    Values are rounded to the nearest one of the dtype, half to even, and saturate at the largest.
    Without a zero point, a scale is the largest absolute value of its group, divided by the largest
    number of the dtype (127 for int8). With one, x is stored as round((x - zero) / scale), from 0
    to 255 or 15, and the scale is the range of the group divided by that. A scale that all tokens
    share is computed from the real tokens of the first call, and later tokens saturate. A group of
    equal values has the scale 1.

    Attributes:
        dtype: dtype of the stored values: `int8`, `int4`, `float8_e4m3fn` or `float8_e5m2`.
        scale_per: the group of values that share a scale: the whole `tensor`; a key/value `head`;
            a `channel`, which is a feature of a head; a `token` of a sequence, over all heads; or
            `token_head`, a head of a token.
        value_scale_per: the group of values, if it differs from the group of keys.
        before_rope: keys are stored before RoPE, and rotated when they are read.
        scale_dtype: dtype of the scales, and of minima.
        key_scales, value_scales: calibrated scales, instead of computed ones: 1 number for
            `tensor`, K for `head`, K * H for `channel`, head by head. Not of tokens.
        zero_point: zero point of integers: `none`; `minimum`, the smallest number of the group, as
            in KIVI; or `integer`, a multiple of the scale, so that 0 is stored exactly, as in ONNX.
        exact: tokens that a call attends to as they were computed, before they are rounded: `none`;
            the tokens of the first call during that call, `first_call`; or `new` ones of every
            call.
        residual_length: with `new`: tokens after the first call stay exact until there are this
            many.

    Raises:
        TypeError: if an attribute has a wrong type.
        ValueError: if a name is unknown, or scales do not fit.

    Example:
        >>> parity.CacheQuantization("float8_e4m3fn", key_scales=[0.02], value_scales=[0.01])
        CacheQuantization('float8_e4m3fn', key_scales=(0.02,), value_scales=(0.01,))
    """

    _positional = ("dtype",)

    dtype: StoredDtype
    scale_per: ScalePer = "tensor"
    before_rope: bool = False
    scale_dtype: ScaleDtype = "float32"
    key_scales: Sequence[float] | np.ndarray | None = None
    value_scales: Sequence[float] | np.ndarray | None = None
    value_scale_per: ScalePer | None = None
    zero_point: ZeroPoint = "none"
    exact: ExactTokens = "none"
    residual_length: int = 1

    def __post_init__(self) -> None:
        _check_name("dtype", self.dtype, tuple(LARGEST))
        _check_name("scale_per", self.scale_per, tuple(SCALE_AXES))
        _check_name("scale_dtype", self.scale_dtype, get_args(ScaleDtype))
        _check_name("zero_point", self.zero_point, get_args(ZeroPoint))
        _check_name("exact", self.exact, get_args(ExactTokens))
        if self.value_scale_per is not None:
            _check_name("value_scale_per", self.value_scale_per, tuple(SCALE_AXES))
        object.__setattr__(self, "before_rope", as_boolean("before_rope", self.before_rope))
        object.__setattr__(
            self, "residual_length", as_count("residual_length", self.residual_length)
        )
        if self.residual_length > 1 and self.exact != "new":
            raise InputError(
                "residual_length", "be 1 unless new tokens are exact", exact=self.exact
            )
        if self.has_zero_point and self.dtype not in NUM_STEPS:
            raise InputError("zero_point", "be none for stored floats", dtype=self.dtype)
        for name in NAMES:
            argument = f"{name[:-1]}_scales"
            scales = getattr(self, argument)
            if scales is None:
                continue
            object.__setattr__(self, argument, _as_scales(argument, scales))
            if self.scale_per_of(name) not in FIXED:
                rule = "be None for scales of tokens"
                raise InputError(argument, rule, scale_per=self.scale_per_of(name))
            if self.has_zero_point:
                rule = "be None with a zero point, which is computed"
                raise InputError(argument, rule, zero_point=self.zero_point)
        if (self.key_scales is None) != (self.value_scales is None):
            rule = "be given together with the other, or not at all"
            raise InputError(
                "key_scales",
                rule,
                key_scales=self.key_scales,
                value_scales=self.value_scales,
            )

    @property
    def has_zero_point(self) -> bool:
        """True if stored values begin at the zero point, instead of lying around 0."""
        return self.zero_point != "none"

    @property
    def limits(self) -> tuple[float, float]:
        """Smallest and largest stored number."""
        if self.has_zero_point:
            return 0.0, float(NUM_STEPS[self.dtype])
        return -LARGEST[self.dtype], LARGEST[self.dtype]

    def scale_per_of(self, name: str) -> ScalePer:
        """Return the group of `keys` or `values` that shares a scale."""
        if name == "values" and self.value_scale_per is not None:
            return self.value_scale_per
        return self.scale_per

    def exact_calls(self, chunks: Sequence[int], index: int) -> tuple[int, ...]:
        """Return the calls whose tokens one call attends to before they are rounded.

        Args:
            chunks: number of tokens that each call appends.
            index: number of the call.
        """
        if self.exact == "none" or index < 0:
            return ()
        if index == 0:
            return (0,)
        if self.exact == "first_call":
            return ()
        residual: list[int] = []
        for call in range(1, index):
            residual.append(call)
            if sum(chunks[each] for each in residual) >= self.residual_length:
                residual = []
        return (*residual, index)

    def scales_of(self, name: str) -> tuple[float, ...] | None:
        """Return the calibrated scales of `keys` or `values`; None if they are computed."""
        scales = self.key_scales if name == "keys" else self.value_scales
        if scales is None:
            return None
        return tuple(scales)

    def check_layer(self, spec: AttentionSpec) -> None:
        """Check that a layer can have this cache.

        Raises:
            ValueError: if it has latents, cannot cache keys before RoPE, or has the wrong number of
                scales.
        """
        if spec.latent is not None:
            raise InputError("cache_quantization", "be None for a layer with latents")
        if self.before_rope:
            norm = spec.qk_norm
            is_normed_after = norm is not None and norm.after_rope
            if spec.rope is None or is_normed_after or spec.shared_kv:
                rule = "be False unless keys are rotated last, by the layer's own RoPE"
                raise InputError("before_rope", rule, before_rope=True)
        num_heads = spec.num_kv_heads
        for name, width in (("keys", spec.head_dim), ("values", spec.value_head_dim)):
            scales = self.scales_of(name)
            if scales is None:
                continue
            group = self.scale_per_of(name)
            count = {"tensor": 1, "head": num_heads, "channel": num_heads * width}[group]
            if len(scales) != count:
                argument = f"{name[:-1]}_scales"
                raise InputError(
                    argument, f"have {count} numbers, one for each {group}", len=len(scales)
                )


def _check_name(argument: str, value: object, names: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise InputTypeError(argument, "be a string", type(value).__name__)
    if value not in names:
        raise InputError(argument, f"be one of {', '.join(names)}", {argument: value})


def _as_scales(argument: str, scales: Any) -> tuple[float, ...]:
    """Return scales as a tuple of numbers.

    Raises:
        TypeError: if they are not numbers.
        ValueError: if one is not positive and finite.
    """
    try:
        array = np.atleast_1d(np.asarray(scales, np.float64)).ravel()
    except (TypeError, ValueError) as error:
        raise InputTypeError(argument, "be numbers", type(scales).__name__) from error
    if not (np.isfinite(array).all() and (array > 0.0).all()):
        raise InputError(argument, "be positive and finite", {argument: scales})
    return tuple(array.tolist())
