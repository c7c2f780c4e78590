"""Precision that is lost: weights, inputs and stages rounded to a narrower dtype, and products that lose too much.

What is rounded can be computed again, so that nothing but float32's own rounding is left where it was. Which way a
number goes that lies about in the middle between two narrower ones the rounding before it decides; there the
same-precision reference stays in the middle, and the budget allows both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parity.core.case import Case
from parity.core.reference import Layer
from parity.core.reference.arithmetic import MANTISSA, multiplications
from parity.core.stages import Values
from parity.core.weights import dtype_named, is_floating
from parity.core.work import PER_MULTIPLICATION, PER_ROUNDED, ask, begin
from parity.diagnosis.mistakes.record import Mistake, Override

PAGE = "low-precision"

DTYPES = ("bfloat16", "float16")
"""Those that float32 is rounded to."""

STAGES = {"q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "out_proj": ("output",)}
"""Where a projection is seen first."""

OF_INPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "q_a_proj", "kv_a_proj")
"""The projections of what the layer is given."""

NEAR = 2.0**-20
"""How near to the middle between two narrower numbers, by its size, a float32 may be rounded either way."""

LAST = np.uint32(63)
"""The last bits of a float32's mantissa."""

Cut = Callable[[np.ndarray], np.ndarray]
"""Takes bits away."""


def rounded_parts(case: Case) -> Iterator[Mistake]:
    """One part after the other, in each dtype; those that are the more usual first."""
    for dtype in DTYPES:
        yield from _weights(case, dtype)
        yield _inputs(dtype)
        for name in _projections(case) if case.spec.latent is None else ():
            yield from _weights(case, dtype, name)
        yield from (_projection(dtype, name) for name in _projections(case) if case.spec.latent is None)
        if case.spec.rope is not None:
            yield _tables(dtype)
        if case.is_cached:
            yield _cache(dtype)
        yield _scores(dtype)
        yield _softmax(dtype)
        yield _attn_weights(dtype)
    yield _exponentials()


def _projections(case: Case) -> list[str]:
    return [name for name in STAGES if name != "out_proj" or case.spec.out_proj]


def _mistake(name: str, about: str, fix: str, stages: tuple[str, ...], in_reference: Any) -> Mistake:
    return Mistake(name, about, fix, PAGE, stages, in_reference, is_loss=True)


LINE = 0.043
"""How far the straight lines lie below the powers of two that they stand for, in the exponent: so that both are as far
from them above as below."""


def _exponentials() -> Mistake:
    """What vector units do that are asked to be fast: of 2^(n + f) it is 2^n (1 + f), up to 6 % off."""

    def attn_weights(_: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        weights = original(values)["attn_weights"]
        wide = weights.astype(np.promote_types(weights.dtype, np.float32))
        return {"attn_weights": _by_lines(np, wide).astype(weights.dtype)}

    return Mistake(
        "exponentials-approximated",
        "exponentials are approximated by straight lines between powers of two",
        "ask the softmax for exact exponentials: on Tenstorrent's hardware math_approx_mode=False, and of fused "
        "attention exp_approx_mode=False",
        PAGE,
        ("attn_weights",),
        {"attn_weights": attn_weights},
        is_loss=True,
        shows_in_narrow=True,
    )


def _by_lines(xp: Any, weights: Any) -> Any:
    """Attention weights of exponentials that are made so."""
    if not weights.shape[-1]:
        return weights
    highest = xp.amax(weights, axis=-1, keepdims=True)
    share = xp.where(weights > 0.0, weights, 1.0) / xp.where(highest > 0.0, highest, 1.0)
    exponent = xp.log2(share) - LINE
    whole = xp.floor(exponent)
    lines = xp.where(weights > 0.0, xp.exp2(whole) * (1.0 + exponent - whole), 0.0)
    total = xp.sum(lines, axis=-1, keepdims=True)
    found = lines * xp.sum(weights, axis=-1, keepdims=True) / xp.where(total > 0.0, total, 1.0)
    return xp.where(xp.isfinite(weights), found, weights)


# ---- Rounding --------------------------------------------------------------------------------------------------------


def _to(dtype: str) -> Cut:
    """Rounds to a dtype, and back to the array's own."""

    def cut(x: np.ndarray) -> np.ndarray:
        begin(PER_ROUNDED * x.size)
        return x.astype(dtype_named(dtype)).astype(x.dtype) if is_floating(x.dtype) else x

    return cut


def _rounded(layer: Layer, x: np.ndarray, cut: Cut) -> np.ndarray:
    """What was computed, cut; in the same-precision reference in the middle where it may be cut either way.

    A number whose last bits are 0 is exact, most likely: an input, or a sum of short numbers; all cut it alike.
    """
    if layer.arithmetic.dtype != np.float32 or not x.size:
        return cut(x)
    x = x.astype(np.float32)
    known = np.abs(x[np.isfinite(x)], dtype=np.float32)
    room = np.float32(NEAR) * np.maximum(np.abs(x), np.sqrt(np.mean(known**2)) if known.size else np.float32(0.0))
    room = np.where(x.view(np.uint32) & LAST == 0, np.float32(0.0), room)
    return (cut(x - room) + cut(x + room)) / 2


def _entering(layer: Layer, projection: str, x: np.ndarray, cut: Cut) -> np.ndarray:
    """What a projection is given, cut: inputs are what they are."""
    wide = layer.arithmetic.widen(x)
    return cut(wide) if projection in OF_INPUTS else _rounded(layer, wide, cut)


# ---- Weights and inputs ----------------------------------------------------------------------------------------------


def _weights(case: Case, dtype: str, projection: str = "") -> Iterator[Mistake]:
    """Of all of the layer, or of one projection; with the biases, or without."""
    yield _rounded_weights(dtype, projection, with_biases=True)
    if any(name.startswith(projection) and name.endswith(".bias") for name in case.spec.weight_shapes):
        yield _rounded_weights(dtype, projection, with_biases=False)


def _rounded_weights(dtype: str, projection: str, *, with_biases: bool) -> Mistake:
    but = "" if with_biases else f", and not {'its bias' if projection else 'the biases'}"

    def is_rounded(name: str) -> bool:
        return name.startswith(projection) and (with_biases or not name.endswith(".bias"))

    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        return _to(dtype)(original(name)) if is_rounded(name) else original(name)

    return _mistake(
        f"{projection}-weights-{dtype}" if projection else f"weights-{dtype}",
        f"the weights{' of ' + projection if projection else ''} are rounded to {dtype}{but}",
        "load the weights in the dtype that they are computed in, or compare with the rounded ones",
        STAGES.get(projection, ("q",)),
        {"parameter": parameter},
    )


def _inputs(dtype: str) -> Mistake:
    def project(_: Layer, original: Any, query: np.ndarray, key: np.ndarray, *rest: Any) -> dict[str, np.ndarray]:
        return original(_to(dtype)(query), _to(dtype)(key), *rest)

    return _mistake(
        f"inputs-{dtype}",
        f"the inputs are rounded to {dtype}",
        "give the layer its inputs in its own dtype",
        ("q", "latents"),
        {"project": project},
    )


def _projection(dtype: str, projection: str) -> Mistake:
    """Input, weights and what comes out are of the narrower dtype; it is summed in float32, as all hardware does."""

    def linear(layer: Layer, original: Any, name: str, x: np.ndarray) -> np.ndarray:
        if name != projection:
            return original(name, x)
        a, cut = layer.arithmetic, _to(dtype)
        weight = a.widen(cut(layer.parameter(f"{name}.weight")))
        bias = a.widen(cut(layer.parameter(f"{name}.bias"))) if layer.has_bias(name) else 0.0
        return a.keep(_rounded(layer, a.matmul(_entering(layer, name, x, cut), weight.T, bias), cut))

    return _mistake(
        f"{projection}-in-{dtype}",
        f"{projection} is computed in {dtype}",
        f"compute {projection} in the dtype of the layer, outside of autocast",
        STAGES[projection],
        {"linear": linear},
    )


# ---- Stages ----------------------------------------------------------------------------------------------------------


def _tables(dtype: str) -> Mistake:
    def tables(layer: Layer, original: Any, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(_rounded(layer, table, _to(dtype)) for table in original(positions))

    return _mistake(
        f"rope-tables-{dtype}",
        f"RoPE's cosines and sines are rounded to {dtype}",
        "make cosines and sines in float32, and turn queries and keys by them in float32",
        ("q", "latents", "k"),
        {"tables": tables},
    )


def _cache(dtype: str) -> Mistake:
    def appended(layer: Layer, original: Any, cache: str, values: Values, new: Any, *rest: Any) -> Any:
        return original(cache, values, {name: _rounded(layer, x, _to(dtype)) for name, x in new.items()}, *rest)

    return _mistake(
        f"cache-{dtype}",
        f"what is cached is rounded to {dtype}",
        "make the cache in the dtype of the layer",
        ("cache.latents", "cache.keys"),
        {"appended": appended},
    )


def _of_stage(stage: str, dtype: str, *, begins: str = "") -> Override:
    """Rounds what a method gives, and perhaps one of the stages that it begins with."""

    def override(layer: Layer, original: Any, values: Values, *rest: Any) -> dict[str, np.ndarray]:
        cut = _to(dtype)
        given = {**values, begins: _rounded(layer, layer.arithmetic.widen(values[begins]), cut)} if begins else values
        return {stage: _rounded(layer, original(given, *rest)[stage], cut)}

    return override


def _scores(dtype: str) -> Mistake:
    return _mistake(
        f"scores-{dtype}",
        f"scores are rounded to {dtype}",
        "keep scores in float32 until the softmax",
        ("scores",),
        {"scores": _of_stage("scores", dtype)},
    )


def _softmax(dtype: str) -> Mistake:
    return _mistake(
        f"softmax-{dtype}",
        f"the softmax takes its scores, and gives attention weights, in {dtype}",
        "take the softmax of scores in float32",
        ("attn_weights",),
        {"attn_weights": _of_stage("attn_weights", dtype, begins="scores")},
    )


def _attn_weights(dtype: str) -> Mistake:
    return _mistake(
        f"attn-weights-{dtype}",
        f"attention weights are rounded to {dtype}",
        "weigh the values by attention weights of the layer's dtype",
        ("attn_weights",),
        {"attn_weights": _of_stage("attn_weights", dtype)},
    )


# ---- Products --------------------------------------------------------------------------------------------------------


def low_products() -> Iterator[Mistake]:
    """Every product of inputs with fewer bits, bit by bit: what explains an output alone."""
    for kind, mistake in PRECISIONS.items():
        for cut in (_nearest(MANTISSA[kind]), _cut_off(MANTISSA[kind])):
            yield _mistake(mistake.name, mistake.about, mistake.fix, mistake.stages, _of_products(cut))


def _of_products(cut: Cut) -> dict[str, Override]:
    def linear(layer: Layer, _: Any, name: str, x: np.ndarray) -> np.ndarray:
        a, weight = layer.arithmetic, layer.parameter(f"{name}.weight")
        ask(PER_MULTIPLICATION * multiplications(x, weight.T))  # before anything is cut for it
        weight = cut(a.widen(weight))
        bias = a.widen(layer.parameter(f"{name}.bias")) if layer.has_bias(name) else 0.0
        return a.keep(a.matmul(_entering(layer, name, x, cut), weight.T, bias))

    def of(*names: str) -> Override:
        def override(layer: Layer, original: Any, values: Values) -> Any:
            wide = {name: layer.arithmetic.widen(values[name]) for name in names}
            return original({**values, **{name: _rounded(layer, x, cut) for name, x in wide.items()}})

        return override

    return {"linear": linear, "products": of("q", "k"), "weighed": of("attn_weights", "v")}


def _nearest(bits: int) -> Cut:
    """To the nearest number of so many explicit bits, as a conversion does."""
    return lambda x: _with_bits(x, bits, is_rounded=True)


def _cut_off(bits: int) -> Cut:
    """Towards 0, as a matrix unit does that is given float32."""
    return lambda x: _with_bits(x, bits, is_rounded=False)


def _with_bits(x: np.ndarray, bits: int, *, is_rounded: bool) -> np.ndarray:
    """Return float32 or float64 numbers with so many explicit bits of their mantissa; NaN and infinity stay."""
    integer, explicit = (np.uint64, 52) if x.dtype == np.float64 else (np.uint32, 23)
    number, lost = x.view(integer), integer(explicit - bits)
    if is_rounded:  # half to even
        number = number + (number >> lost & integer(1)) + integer(2 ** (explicit - bits - 1) - 1)
    return (number >> lost << lost).view(x.dtype)


def _products_of(kind: str, about: str, fix: str) -> Mistake:
    """Every matrix product takes inputs of so many explicit mantissa bits.

    In the reference that is an arithmetic of its own (`reference.MANTISSA`) and no override: which bits are lost
    depends on the order of a sum, so that only the size of the error can be told, and no value.
    """
    return Mistake(f"precision-{kind}", about, fix, "low-precision", ("q",), {})


PRECISIONS = {
    "tf32": _products_of(
        "tf32",
        "matrix products take their inputs as TF32, with 10 bits",
        "set the float32 matmul precision to highest",
    ),
    "bfloat16": _products_of(
        "bfloat16",
        "matrix products take their inputs as bfloat16",
        "compute products of float32 in float32",
    ),
    "lofi": _products_of(
        "lofi",
        "matrix products take 4 bits of each input (LoFi)",
        "raise the math fidelity to HiFi4",
    ),
}
"""Arithmetics that explain a difference that is everywhere and small, the finest first."""

FIDELITIES = {
    f"tensix-{kind}": Mistake(f"precision-{kind}", about, "raise the math fidelity to HiFi4", PAGE, ("q",), {})
    for kind, about in {
        "hifi2": "matrix products take 6 explicit bits of their first operand and 9 of their second (HiFi2)",
        "lofi": "matrix products take 6 explicit bits of their first operand and 4 of their second (LoFi)",
    }.items()
}
"""The same on Tenstorrent's hardware, where float32 and bfloat16 lose them. ttnn takes LoFi where a product is given a
`program_config` or a `core_grid` and no arithmetic."""
