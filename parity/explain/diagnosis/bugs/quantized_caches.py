"""Bugs in the scales and the rounding of a quantized cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import numpy as np

from parity.explain.diagnosis.bugs.families import CACHE_QUANTIZATION
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.bugs.sites import after, always, for_names, in_sixteen_bits
from parity.measure.core.case import Case
from parity.measure.core.quantization import (
    FIXED,
    LARGEST,
    NUM_STEPS,
    SCALE_AXES,
    CacheQuantization,
    ScaleDtype,
)
from parity.measure.core.reference import Layer

NAMES = {
    "keys and values": ("keys", "values"),
    "keys": ("keys",),
    "values": ("values",),
}
"""Cached arrays with a bug, by their description: usual ones first."""

OTHER = {"keys": "values", "values": "keys"}

GROUPS = {
    "tensor": "all values",
    "head": "each head",
    "channel": "each feature of each head",
    "token": "each token",
    "token_head": "each head of each token",
}
"""Descriptions of the groups that share a scale."""


def quantized_caches(case: Case) -> Iterator[Edit]:
    quantization = case.cache_quantization
    if quantization is None:
        return
    bug = CACHE_QUANTIZATION.shown_in("cache.keys", "cache.values")
    rounding = partial(bug, is_rounding=True)
    # Zeros of values hide the keys from the output, so keys and values together come last.
    for words in ("values", "keys", "keys and values"):
        yield _zero(bug, words, NAMES[words])
    for words, names in NAMES.items():
        yield from _of_scales(bug, words, names)
        if quantization.has_zero_point:
            yield from _of_zero_points(bug, words, names, quantization)
        yield rounding(
            "cache-not-quantized",
            f"cached {words} are not quantized",
            {"quantized": for_names(names, _as_they_are)},
            fix="round keys and values to stored values before they enter the cache",
        )
        yield from _of_groups(rounding, words, names, quantization)
        if quantization.dtype.startswith("int"):
            # A right port may also lose a step at the largest number of each group.
            yield bug(
                "cache-rounded-toward-zero",
                f"cached {words} are rounded toward zero instead of to the nearest number",
                {"quantized": for_names(names, _truncated)},
                fix="round before the conversion: a conversion to integers truncates",
            )
    for dtype in LARGEST:
        has_such_numbers = dtype in NUM_STEPS or not quantization.has_zero_point
        if dtype != quantization.dtype and has_such_numbers:
            other = quantization.replace(dtype=dtype)
            yield rounding(
                "cache-other-dtype",
                f"the cache stores {dtype} instead of {quantization.dtype}",
                {"cache_quantization": always(other)},
                fix="allocate the cache in the specified dtype, and scale to its largest number",
            )
    for dtype in get_args(ScaleDtype):
        if dtype != quantization.scale_dtype:
            yield from _scales_in_dtype(rounding, quantization, dtype)
    yield from _exchanged(bug, case)
    yield from _before_or_after_rope(rounding, case)


def _zero(bug: Callable[..., Edit], words: str, names: tuple[str, ...]) -> Edit:
    return bug(
        "cache-scale-zero",
        f"the scales of cached {words} are 0 when they are read",
        {"scales_when_read": for_names(names, always(np.zeros((1, 1, 1, 1))))},
        fix="write the scales before the cache is read: their memory was not filled",
    )


def _of_scales(bug: Callable[..., Edit], words: str, names: tuple[str, ...]) -> Iterator[Edit]:
    rounding = partial(bug, is_rounding=True)
    one = always(np.ones((1, 1, 1, 1)))
    yield rounding(
        "cache-scale-one",
        f"the scales of cached {words} are 1",
        {"cache_scales": for_names(names, one)},
        fix="load the calibrated scales, or compute them from the keys and values",
    )
    yield bug(
        "cache-scale-missing",
        f"cached {words} are read without their scales",
        {"scales_when_read": for_names(names, one)},
        fix="multiply what is read from the cache by its scales",
    )
    yield bug(
        "cache-scale-missing",
        f"cached {words} are stored without their scales, and read with them",
        {"before_rounding": for_names(names, _not_divided)},
        fix="divide by the scales before rounding",
    )
    yield bug(
        "cache-scale-twice",
        f"cached {words} are multiplied by their scales twice",
        {"scales_when_read": for_names(names, after(np.square))},
        fix="multiply by the scales once, either in the kernel or before it",
    )


def _of_zero_points(
    bug: Callable[..., Edit],
    words: str,
    names: tuple[str, ...],
    quantization: CacheQuantization,
) -> Iterator[Edit]:
    yield bug(
        "cache-zero-point-missing",
        f"cached {words} are read without their zero points",
        {"zeros_when_read": for_names(names, _no_zeros)},
        fix="add the zero point when the cache is read, as it is subtracted when it is written",
    )
    yield bug(
        "cache-zero-point-missing",
        f"cached {words} are stored without their zero points, and read with them",
        {"before_rounding": for_names(names, _not_shifted)},
        fix="subtract the zero point before rounding: stored values have no sign",
    )
    yield bug(
        "cache-zero-point-sign",
        f"zero points of cached {words} have the wrong sign when they are read",
        {"zeros_when_read": for_names(names, after(np.negative))},
        fix="an integer zero point is subtracted from stored values; a minimum is added",
    )
    if quantization.zero_point == "integer":
        yield bug(
            "cache-zero-point-unscaled",
            f"zero points of cached {words} are subtracted after the scale instead of before",
            {"zeros_when_read": for_names(names, _unscaled_zeros)},
            fix="read (number - zero point) * scale",
        )


def _of_groups(
    bug: Callable[..., Edit],
    words: str,
    names: tuple[str, ...],
    quantization: CacheQuantization,
) -> Iterator[Edit]:
    """Yield scales along other axes."""
    is_calibrated = quantization.key_scales is not None
    computed = {}
    if is_calibrated:
        computed = {"calibrated_scales": for_names(names, always(None))}
    groups = {quantization.scale_per_of(name) for name in names}
    for group in SCALE_AXES:
        about = f"cached {words} have a scale for {GROUPS[group]}"
        if groups == {group} and is_calibrated:
            about = f"the scales of cached {words} are computed instead of the calibrated ones"
        elif groups == {group}:
            continue
        elif len(groups) == 1:
            about += f" instead of {GROUPS[min(groups)]}"
        other = {"scale_group": for_names(names, always(group)), **computed}
        yield bug("cache-scale-axis", about, other)
    if not is_calibrated and groups <= {*FIXED}:
        yield bug(
            "cache-scale-axis",
            f"the scales of cached {words} come from each call, not from the first",
            {"cached_range": for_names(names, _range_of_the_call)},
            fix="keep the scales of the first call: stored values belong to them",
        )
    if groups <= {"head", "token_head", "channel"}:
        yield bug(
            "cache-scale-axis",
            f"cached {words} of all heads have the scales of the first head",
            {"cache_scales": for_names(names, after(_of_first_head))},
        )
    if groups == {"channel"}:
        yield bug(
            "cache-scale-axis",
            f"the scales of cached {words} are read feature by feature instead of head by head",
            {"cache_scales": for_names(names, after(_by_feature))},
        )


def _scales_in_dtype(
    bug: Callable[..., Edit], quantization: CacheQuantization, dtype: ScaleDtype
) -> Iterator[Edit]:
    """Yield scales, and minima, that are stored in a different dtype."""
    right = quantization.scale_dtype
    scales = "scales"
    if quantization.zero_point == "minimum":
        scales = "scales and minima"
    yield bug(
        "cache-scale-dtype",
        f"the cache stores its {scales} in {dtype} instead of {right}",
        {"cache_quantization": always(quantization.replace(scale_dtype=dtype))},
        fix=f"allocate the {scales} of the cache in {right}",
    )
    if quantization.zero_point == "minimum" and right == "float32":
        yield bug(
            "cache-scale-dtype",
            f"the cache stores its scales, but not its minima, in {dtype} instead of {right}",
            {"cache_scales": after(partial(in_sixteen_bits, dtype=dtype))},
            fix=f"allocate the scales of the cache in {right}",
        )


def _exchanged(bug: Callable[..., Edit], case: Case) -> Iterator[Edit]:
    quantization, spec = case.cache_quantization, case.spec
    if quantization is None or quantization.value_scale_per not in (None, quantization.scale_per):
        return
    if quantization.scale_per == "channel" and spec.head_dim != spec.value_head_dim:
        return
    stored, when_read = ["cache_scales"], ["scales_when_read"]
    if quantization.has_zero_point:
        # A zero point is kept next to its scale.
        stored.append("cache_zeros")
        when_read.append("zeros_when_read")
    for where, methods in (("", stored), ("when they are read, ", when_read)):
        for words, names in NAMES.items():
            about = f"{where}cached {words} have the scales of {_others(words)}"
            yield bug(
                "cache-scales-exchanged",
                about,
                {method: for_names(names, _of_other) for method in methods},
                fix="use the scales of keys for keys, and the scales of values for values",
                is_rounding=methods is stored,
            )


def _others(words: str) -> str:
    return OTHER.get(words, "each other")


def _before_or_after_rope(bug: Callable[..., Edit], case: Case) -> Iterator[Edit]:
    quantization, spec = case.cache_quantization, case.spec
    if quantization is None or spec.rope is None or spec.shared_kv:
        return
    is_normed_after = spec.qk_norm is not None and spec.qk_norm.after_rope
    if quantization.before_rope:
        yield bug(
            "cache-rope-order",
            "keys are quantized after RoPE instead of before",
            {"caches_before_rope": always(False)},
            fix="quantize keys before RoPE, and rotate what is read from the cache",
            stages=("cache.keys",),
        )
    elif not is_normed_after:
        yield bug(
            "cache-rope-order",
            "keys are quantized before RoPE instead of after",
            {"caches_before_rope": always(True)},
            fix="quantize rotated keys, as they enter attention",
            stages=("cache.keys",),
        )


# ---- Overrides -----------------------------------------------------------------------------------

Tokens = dict[str, np.ndarray]
"""Keys and values of a call, (B, K, T, H), by `keys` and `values`."""


def _as_they_are(_: Layer, __: Override, name: str, tokens: Tokens, first: Tokens) -> np.ndarray:
    return tokens[name]


def _truncated(layer: Layer, _: Override, name: str, tokens: Tokens, first: Tokens) -> np.ndarray:
    numbers = layer.before_rounding(name, tokens, first)
    limits = layer.cache_quantization().limits
    # The largest number is stored exactly, unless a rounding error makes it a little smaller.
    rounded = np.trunc(np.clip(numbers * (1.0 + CLOSE), *limits))
    if layer.arithmetic.wide != np.float64:
        # An implementation may return the number before it: the middle allows both.
        rounded = (rounded + np.trunc(np.clip(numbers * (1.0 - CLOSE), *limits))) / 2
    return layer.read(name, rounded, tokens, first)


CLOSE = 2.0**-18
"""Relative distance at which a number counts as the stored one."""


def _not_divided(layer: Layer, _: Override, name: str, tokens: Tokens, first: Tokens) -> np.ndarray:
    if layer.cache_quantization().has_zero_point:
        return tokens[name] - layer.cache_zeros(name, tokens, first)
    return tokens[name]


def _not_shifted(layer: Layer, _: Override, name: str, tokens: Tokens, first: Tokens) -> np.ndarray:
    return tokens[name] / layer.cache_scales(name, tokens, first)


def _no_zeros(_: Layer, original: Override, name: str, tokens: Tokens, first: Tokens) -> np.ndarray:
    return np.zeros_like(original(name, tokens, first))


def _unscaled_zeros(
    layer: Layer, original: Override, name: str, tokens: Tokens, first: Tokens
) -> np.ndarray:
    zeros = original(name, tokens, first)
    return np.rint(zeros / layer.cache_scales(name, tokens, first))


def _range_of_the_call(
    _: Layer, original: Override, name: str, tokens: Tokens, first: Tokens
) -> tuple[np.ndarray, np.ndarray]:
    return original(name, tokens, tokens)


def _of_other(_: Layer, original: Override, name: str, tokens: Tokens, first: Tokens) -> np.ndarray:
    return original(OTHER[name], tokens, first)


def _of_first_head(scales: np.ndarray) -> np.ndarray:
    return np.broadcast_to(scales[:, :1], scales.shape)


def _by_feature(scales: np.ndarray) -> np.ndarray:
    """Read scales (1, K, 1, H) in the order (H, K)."""
    num_heads, width = scales.shape[1], scales.shape[3]
    return scales.reshape(width, num_heads).T.reshape(1, num_heads, 1, width)


# ---- Fitted scales -------------------------------------------------------------------------------


def with_scales(name: str, scales: np.ndarray) -> Edit:
    """Return the edit that stores and reads keys or values with other scales."""
    return Edit(overrides={"cache_scales": for_names((name,), always(scales))})


def with_scales_when_read(name: str, factors: np.ndarray) -> Edit:
    """Return the edit that reads keys or values with multiples of their scales."""
    multiplied = after(partial(np.multiply, factors))
    return Edit(overrides={"scales_when_read": for_names((name,), multiplied)})
