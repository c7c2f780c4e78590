"""Lost precision: weights, inputs and stages rounded to a narrower dtype, and imprecise products.

Rounding can be computed again, so only float32's own rounding remains. A number close to the middle
between two narrower ones may be rounded either way; there the same-precision reference stays in the
middle, and the budget allows both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs.record import Edit, Override, known_bug
from parity.explain.diagnosis.bugs.sites import (
    SIXTEEN_BITS,
    NewTokens,
    Overrides,
    after,
    before,
    for_names,
    in_sixteen_bits,
    weights,
)
from parity.explain.diagnosis.work import PER_MULTIPLICATION, PER_ROUNDED, ask, begin
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.core.reference.arithmetic import MANTISSA, multiplications
from parity.measure.core.reference.rope import axes, frequencies
from parity.measure.core.stages import Values
from parity.measure.core.weights import dtype_named, is_floating
from parity.measure.text import and_listed

STAGES = {"q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "out_proj": ("output",)}
"""Stages that show a projection first."""

OF_INPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "q_a_proj", "kv_a_proj")
"""The projections of the layer's inputs."""

NEAR = 2.0**-20
"""Relative distance from the middle of two narrower values at which a float32 may be rounded
either way.
"""

LAST = np.uint32(63)
"""The last bits of a float32's mantissa."""

Cut = Callable[[np.ndarray], np.ndarray]
"""Removes bits."""

of_precision = partial(known_bug, page="low-precision", is_loss=True)


def rounded_parts(case: Case) -> Iterator[Edit]:
    """Lost precision in one part after the other, in each dtype; usual ones first."""
    projections = list(STAGES)
    if not case.spec.out_proj:
        projections.remove("out_proj")
    for dtype in SIXTEEN_BITS:
        cut = _to(dtype)
        yield from _weights(case, dtype)
        yield of_precision(
            f"inputs-{dtype}",
            f"the inputs are rounded to {dtype}",
            {"project": before(partial(_with_rounded_inputs, cut))},
            fix="pass the inputs in the layer's own dtype",
            stages=("q", "latents"),
        )
        if case.spec.latent is None:
            for name in projections:
                yield from _weights(case, dtype, name)
            for name in projections:
                yield of_precision(
                    f"{name}-in-{dtype}",
                    f"{name} is computed in {dtype}",
                    _projection(name, cut),
                    fix=f"compute {name} in the dtype of the layer, outside of autocast",
                    stages=STAGES[name],
                )
        yield from _stages(case, dtype, cut)
    yield known_bug(
        "exponentials-approximated",
        "exponentials are approximated by straight lines between powers of two",
        {"attn_weights": _by_lines},
        fix="request exact exponentials: math_approx_mode=False on Tenstorrent, "
        "exp_approx_mode=False for fused "
        "attention",
        page="low-precision",
        stages=("attn_weights",),
        is_loss=True,
        shows_in_narrow=True,
    )


def _with_rounded_inputs(cut: Cut, inputs: Values, positions: np.ndarray) -> tuple[Any, Any]:
    return {name: cut(x) for name, x in inputs.items()}, positions


LINE = 0.043
"""Distance of the straight lines below the powers of two that they approximate, in the exponent: so
that the largest errors above and below are equal.
"""


def _by_lines(_: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
    """Compute like fast vector units: 2^n (1 + f) for 2^(n + f), up to 6% off."""
    attn_weights = original(values)["attn_weights"]
    if not attn_weights.shape[-1]:
        return {"attn_weights": attn_weights}
    weights = attn_weights.astype(np.promote_types(attn_weights.dtype, np.float32))
    highest = np.amax(weights, axis=-1, keepdims=True)
    share = np.where(weights > 0.0, weights, 1.0) / np.where(highest > 0.0, highest, 1.0)
    exponent = np.log2(share) - LINE
    whole = np.floor(exponent)
    lines = np.where(weights > 0.0, np.exp2(whole) * (1.0 + exponent - whole), 0.0)
    total = np.sum(lines, axis=-1, keepdims=True)
    scaled = lines * np.sum(weights, axis=-1, keepdims=True) / np.where(total > 0.0, total, 1.0)
    return {
        "attn_weights": np.where(np.isfinite(weights), scaled, weights).astype(attn_weights.dtype)
    }


# ---- Rounding ------------------------------------------------------------------------------------


def _to(dtype: str) -> Cut:
    """Return a function that rounds to a dtype, and back to the array's own."""
    return partial(_rounded_to, dtype_named(dtype))


def _rounded_to(dtype: np.dtype, x: np.ndarray) -> np.ndarray:
    begin(PER_ROUNDED * x.size)
    if not is_floating(x.dtype):
        return x
    return x.astype(dtype).astype(x.dtype)


def _rounded(layer: Layer, x: np.ndarray, cut: Cut) -> np.ndarray:
    """Round computed values; the same-precision reference stays in the middle if either way is
    possible.

    A number whose last bits are 0 is probably exact: an input, or a sum of short ones. All round
    it alike.
    """
    if layer.arithmetic.dtype != np.float32 or not x.size:
        return cut(x)
    x = x.astype(np.float32)
    finite = np.abs(x[np.isfinite(x)], dtype=np.float32)
    size = np.float32(0.0)
    if finite.size:
        size = np.sqrt(np.mean(finite**2))
    room = np.float32(NEAR) * np.maximum(np.abs(x), size)
    room = np.where(x.view(np.uint32) & LAST == 0, np.float32(0.0), room)
    return (cut(x - room) + cut(x + room)) / 2


def _entering(layer: Layer, projection: str, x: np.ndarray, cut: Cut) -> np.ndarray:
    """Round the input of a projection: inputs of the layer are exact."""
    wide = layer.arithmetic.widen(x)
    if projection in OF_INPUTS:
        return cut(wide)
    return _rounded(layer, wide, cut)


# ---- Weights and projections ---------------------------------------------------------------------


def _weights(case: Case, dtype: str, projection: str = "") -> Iterator[Edit]:
    """Weights of the layer, or of one projection, with or without the biases."""
    names = [name for name in case.spec.weight_shapes if name.startswith(projection)]
    without_biases = [name for name in names if not name.endswith(".bias")]
    bug_name = f"weights-{dtype}"
    whose, biases = "", "the biases"
    if projection:
        bug_name = f"{projection}-weights-{dtype}"
        whose, biases = f" of {projection}", "its bias"
    about = f"the weights{whose} are rounded to {dtype}"
    rounded = {about: names}
    if without_biases != names:
        rounded[f"{about}, but not {biases}"] = without_biases
    for words, rounded_names in rounded.items():
        yield of_precision(
            bug_name,
            words,
            weights(_to(dtype), rounded_names),
            fix=(
                "load the weights in the dtype of the computation, or compare with the rounded "
                "weights"
            ),
            stages=STAGES.get(projection, ("q",)),
        )


def layer_in(case: Case, dtype: str) -> Edit:
    """Return the edit that rounds the weights and inputs of a layer to a narrower dtype."""
    cut = _to(dtype)
    rounded_weights = weights(cut, list(case.spec.weight_shapes))
    rounded_inputs = before(partial(_with_rounded_inputs, cut))
    return Edit(overrides={**rounded_weights, "project": rounded_inputs})


def _projection(projection: str, cut: Cut) -> Overrides:
    """Round input, weights and result to the narrower dtype; sums are in float32, as on all
    hardware.
    """
    return {"linear": for_names([projection], partial(_projected_narrowly, cut))}


def _projected_narrowly(
    cut: Cut, layer: Layer, _: Override, name: str, x: np.ndarray
) -> np.ndarray:
    a = layer.arithmetic
    weight = a.widen(cut(layer.parameter(f"{name}.weight")))
    bias = 0.0
    if layer.has_bias(name):
        bias = a.widen(cut(layer.parameter(f"{name}.bias")))
    product = a.matmul(_entering(layer, name, x, cut), weight.T, bias)
    return a.keep(_rounded(layer, product, cut))


# ---- Stages --------------------------------------------------------------------------------------


def _tables_rounded(
    cut: Cut, layer: Layer, original: Override, positions: np.ndarray
) -> tuple[np.ndarray, ...]:
    return tuple(_rounded(layer, table, cut) for table in original(positions))


def _appended_rounded(
    cut: Cut, names: Collection[str], layer: Layer, original: Override, *inputs: Any
) -> Any:
    """Round some of the new keys, values or latents."""
    tokens = NewTokens(*inputs)
    rounded = dict(tokens.new)
    for name, x in tokens.new.items():
        if name in names:
            rounded[name] = _rounded(layer, x, cut)
    return original(*tokens._replace(new=rounded))


def _result_rounded(
    cut: Cut, stage: str, layer: Layer, original: Override, values: Values, *rest: Any
) -> dict[str, np.ndarray]:
    """Round the result of the method of a stage."""
    return {stage: _rounded(layer, original(values, *rest)[stage], cut)}


def _softmax_rounded(
    cut: Cut, layer: Layer, original: Override, values: Values
) -> dict[str, np.ndarray]:
    """Round the scores and the attention weights."""
    scores = _rounded(layer, layer.arithmetic.widen(values["scores"]), cut)
    return _result_rounded(cut, "attn_weights", layer, original, {**values, "scores": scores})


def _stages(case: Case, dtype: str, cut: Cut) -> Iterator[Edit]:
    if case.spec.rope is not None:
        yield of_precision(
            f"rope-tables-{dtype}",
            f"RoPE's cosines and sines are rounded to {dtype}",
            {"tables": partial(_tables_rounded, cut)},
            fix="compute cosines and sines, and rotate queries and keys, in float32",
            stages=("q", "latents", "k"),
        )
    caches: dict[str, tuple[str, ...]] = {}
    if case.is_cached:
        caches["the cache is"] = ("keys", "values", "latents")
    if case.is_cached and case.spec.latent is None:
        caches["cached keys are"] = ("keys",)
        caches["cached values are"] = ("values",)
    for words, names in caches.items():
        yield of_precision(
            f"cache-{dtype}",
            f"{words} rounded to {dtype}",
            {"appended": partial(_appended_rounded, cut, names)},
            fix="allocate the cache in the dtype of the layer",
            stages=("cache.latents", "cache.keys", "cache.values"),
        )
    yield of_precision(
        f"scores-{dtype}",
        f"scores are rounded to {dtype}",
        {"scores": partial(_result_rounded, cut, "scores")},
        fix="keep scores in float32 until the softmax",
        stages=("scores",),
    )
    yield from _of_scores(case, dtype, cut)
    if not case.spec.sinks:
        yield of_precision(
            f"softmax-{dtype}",
            f"every step of the softmax is computed in {dtype}",
            {"attn_weights": partial(_softmax_by_steps, cut)},
            fix="compute the softmax in float32",
            stages=("attn_weights",),
        )
    yield of_precision(
        f"softmax-{dtype}",
        f"the softmax takes its scores, and gives attention weights, in {dtype}",
        {"attn_weights": partial(_softmax_rounded, cut)},
        fix="compute the softmax in float32",
        stages=("attn_weights",),
    )
    yield of_precision(
        f"attn-weights-{dtype}",
        f"attention weights are rounded to {dtype}",
        {"attn_weights": partial(_result_rounded, cut, "attn_weights")},
        fix="keep attention weights in the layer's dtype",
        stages=("attn_weights",),
    )


def _softmax_by_steps(
    cut: Cut, layer: Layer, original: Override, values: Values
) -> dict[str, np.ndarray]:
    """Round scores, their differences, exponentials, sums and quotients, of a layer without
    sinks.
    """
    a = layer.arithmetic
    scores = _rounded(layer, a.widen(values["scores"]), cut)
    visible = np.where(values["mask"], -np.inf, scores)
    highest = visible.max(axis=-1, keepdims=True, initial=-np.inf)
    highest = np.where(np.isfinite(highest), highest, 0.0).astype(a.wide)
    differences = cut((visible - highest).astype(a.wide))
    exponentials = cut(np.exp(differences))
    total = cut(exponentials.sum(axis=-1, keepdims=True))
    is_empty = np.all(layer.hidden_keys(values["mask"]), axis=-1, keepdims=True)
    quotients = cut(exponentials / np.where(is_empty, a.wide.type(1.0), total))
    attn_weights = layer.of_empty_rows(a.keep(quotients), values["scores"], is_empty)
    return {"attn_weights": attn_weights}


def _of_scores(case: Case, dtype: str, cut: Cut) -> Iterator[Edit]:
    """Yield scores whose queries and keys are rounded as well."""
    for words, rounds_queries, rounds_keys, scales_first, rounds_result in (
        ("queries are", True, False, False, False),
        ("keys are", False, True, False, False),
        ("queries and keys are", True, True, False, False),
        ("queries, after their scale, and keys are", True, True, True, False),
        ("queries, keys and their products are", True, True, False, True),
        ("queries, after their scale, keys and their products are", True, True, True, True),
    ):
        rounding = _ProductRounding(cut, rounds_queries, rounds_keys, scales_first, rounds_result)
        yield of_precision(
            f"scores-{dtype}",
            f"{words} rounded to {dtype} in the scores",
            {"products": partial(_rounded_products, rounding)},
            fix="compute the products of queries and keys in the layer's dtype",
            stages=("scores",),
        )
    if case.spec.alibi is not None:
        yield of_precision(
            f"scores-{dtype}",
            f"scores, their bias for distance, and their sum are rounded to {dtype}",
            _scores_with_alibi(cut),
            fix="keep scores in float32 until the softmax",
            stages=("scores",),
        )


@dataclass(frozen=True)
class _ProductRounding:
    """The rounded parts of products of queries and keys.

    Attributes:
        cut: rounds.
        queries, keys, result: True if these are rounded.
        scales_first: True if queries are scaled before they are rounded.
    """

    cut: Cut
    queries: bool
    keys: bool
    scales_first: bool
    result: bool


def _rounded_products(
    rounding: _ProductRounding, layer: Layer, _: Override, values: Values
) -> np.ndarray:
    a = layer.arithmetic
    queries, keys = a.widen(values["q"]), a.widen(values["k"])
    if rounding.scales_first:
        queries = queries / a.wide.type(layer.scale())
    if rounding.queries:
        queries = _rounded(layer, queries, rounding.cut)
    if rounding.keys:
        keys = _rounded(layer, keys, rounding.cut)
    result = layer.by_group(queries, keys.swapaxes(2, 3))
    if rounding.result:
        result = _rounded(layer, result, rounding.cut)
    if not rounding.scales_first:
        result = result / a.wide.type(layer.scale())
    return a.between_scores(result)


def _scores_with_alibi(cut: Cut) -> Overrides:
    """Round the products, the bias for distance, and their sum."""
    return {
        "products": partial(_product_rounded, cut),
        "lost_by_distance": after(cut),
        "scores": partial(_result_rounded, cut, "scores"),
    }


def _product_rounded(cut: Cut, layer: Layer, original: Override, values: Values) -> np.ndarray:
    return _rounded(layer, original(values), cut)


# ---- RoPE ----------------------------------------------------------------------------------------

POWERS, FREQUENCIES, POSITIONS, ANGLES, TABLES = (
    "powers of theta",
    "frequencies",
    "positions",
    "angles",
    "tables of cosines and sines",
)
"""Quantities of RoPE, each computed from those before it."""

ROUNDED_TOGETHER = (
    (FREQUENCIES,),
    (POSITIONS,),
    (ANGLES,),
    (FREQUENCIES, POSITIONS, ANGLES),
    (FREQUENCIES, POSITIONS, ANGLES, TABLES),
    (FREQUENCIES, TABLES),
    (POSITIONS, TABLES),
    (ANGLES, TABLES),
    (FREQUENCIES, ANGLES),
    (FREQUENCIES, ANGLES, TABLES),
    (FREQUENCIES, POSITIONS),
    (POSITIONS, ANGLES),
    (POSITIONS, ANGLES, TABLES),
    (POWERS,),
    (POWERS, FREQUENCIES),
    (POWERS, FREQUENCIES, TABLES),
    (POWERS, FREQUENCIES, POSITIONS, ANGLES),
    (POWERS, FREQUENCIES, POSITIONS, ANGLES, TABLES),
)
"""Quantities that are rounded in one layer, usual ones first. A layer in 16 bits, or autocast,
rounds all of them; a call of `float` in between leaves out those after it.
"""

EXACT_INTEGERS = {"bfloat16": 2**8, "float16": 2**11}
"""The largest integer up to which all are numbers of a dtype."""


def rope_numbers(case: Case) -> Iterator[Edit]:
    """Positions, frequencies and angles of RoPE that are rounded to 16 bits.

    They lose whole radians at far positions, so they are no small loss of precision: they are
    tried like all other bugs, also in a layer of 16 bits.
    """
    rope = case.spec.rope
    if rope is None:
        return
    longest = int(case.positions().max()) + 1
    exact = np.array(frequencies(rope, case.spec.head_dim, longest), np.float32)
    with np.errstate(divide="ignore"):
        powers = np.float32(1) / exact
    angles = np.multiply.outer(np.unique(case.positions()).astype(np.float32), exact)
    for dtype in SIXTEEN_BITS:
        inexact = {TABLES}
        if not np.array_equal(in_sixteen_bits(angles, dtype), angles):
            inexact.add(ANGLES)
        if not np.array_equal(in_sixteen_bits(exact, dtype), exact):
            inexact.add(FREQUENCIES)
        if longest - 1 > EXACT_INTEGERS[dtype]:
            inexact.add(POSITIONS)
        has_powers = rope.scaling is None and rope.sections is None
        # Powers such as 1000 are exact in 16 bits, although 1 / 0.001 is not in float32.
        with np.errstate(divide="ignore"):
            of_rounded_powers = np.float32(1) / in_sixteen_bits(powers, dtype)
        if has_powers and not np.array_equal(of_rounded_powers, exact):
            inexact.add(POWERS)
        for numbers in ROUNDED_TOGETHER:
            if inexact.issuperset(numbers):
                yield _rope_in(dtype, numbers)


def _rope_in(dtype: str, numbers: tuple[str, ...]) -> Edit:
    """Return the bug that some quantities of RoPE are rounded to a dtype."""
    about = f"RoPE's {and_listed(numbers)} are rounded to {dtype}"
    page = "rope-positions"
    if ANGLES in numbers:
        name = "angles"
        fix = "compute positions, frequencies and angles in float32, outside of autocast"
    elif POSITIONS in numbers and FREQUENCIES not in numbers:
        name = "positions"
        fix = "keep positions as integers, and compute the angles in float32"
        if numbers == (POSITIONS,):
            about = (
                f"RoPE positions are {dtype} numbers, which are inexact above "
                f"{EXACT_INTEGERS[dtype]}"
            )
    else:
        name, page = "frequencies", "rope-theta"
        fix = "keep the frequencies (inv_freq) in float32, also if the model is cast to 16 bits"
        if numbers == (FREQUENCIES,):
            about += " before they are multiplied by positions"
    overrides: Overrides = {"angles": partial(_angles_rounded, _to(dtype), frozenset(numbers))}
    if TABLES in numbers:
        overrides["tables"] = partial(_tables_rounded, _to(dtype))
    return known_bug(
        f"rope-{name}-{dtype}", about, overrides, fix, page, stages=("q", "latents", "k")
    )


def _angles_rounded(
    cut: Cut, numbers: Collection[str], layer: Layer, original: Override, positions: np.ndarray
) -> np.ndarray:
    """Return angles, which are positions times frequencies, with some of the quantities rounded."""
    right = original(positions)
    if positions.ndim == 3:
        of_pairs = positions[axes(layer.rope(), layer.problem.spec.head_dim)]
    else:
        of_pairs = np.broadcast_to(positions, (right.shape[-1], *positions.shape))
    positions_of_pairs = np.moveaxis(of_pairs, 0, -1)[:, None].astype(np.float64)
    # Frequencies may depend on the longest position, so they are taken from the angles themselves.
    of_tokens = np.divide(
        right, positions_of_pairs, out=np.zeros(right.shape), where=positions_of_pairs != 0.0
    )
    of_tokens = of_tokens.astype(np.float32)
    if POWERS in numbers:
        powers = np.divide(
            np.float32(1), of_tokens, out=np.zeros_like(of_tokens), where=of_tokens != 0.0
        )
        powers = cut(powers)
        of_tokens = np.divide(np.float32(1), powers, out=np.zeros_like(powers), where=powers != 0.0)
    if FREQUENCIES in numbers:
        of_tokens = cut(of_tokens)
    if POSITIONS in numbers:
        positions_of_pairs = cut(positions_of_pairs)
    angles = (of_tokens.astype(np.float64) * positions_of_pairs).astype(right.dtype)
    if ANGLES in numbers:
        return _rounded(layer, angles, cut)
    return angles


# ---- Products ------------------------------------------------------------------------------------


def low_products(case: Case) -> Iterator[Edit]:
    """Compute every product with fewer bits of its inputs: it explains an output alone.

    Scores may be scaled after the product or queries before it. Other bits are lost then, unless
    the scale is a power of two.
    """
    is_power_of_two = math.frexp(case.spec.score_scale)[0] == 0.5
    for kind, bug in PRECISIONS.items():
        for is_rounded in (True, False):  # like a conversion, or a matrix unit with float32 inputs
            cut = partial(_with_bits, bits=MANTISSA[kind], is_rounded=is_rounded)
            yield replace(bug, overrides=_of_products(cut), is_loss=True)
            if not is_power_of_two:
                yield replace(bug, overrides=_of_products(cut, scales_queries=True), is_loss=True)


def _scaled_queries(layer: Layer, values: Values) -> np.ndarray:
    return layer.arithmetic.widen(values["q"]) / layer.arithmetic.wide.type(layer.scale())


def _products_of_scaled(layer: Layer, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return layer.arithmetic.between_scores(layer.by_group(queries, keys.swapaxes(2, 3)))


def _scales_queries(layer: Layer, _: Override, values: Values) -> np.ndarray:
    return _products_of_scaled(
        layer, _scaled_queries(layer, values), layer.arithmetic.widen(values["k"])
    )


SCALED_QUERIES = Edit(overrides={"products": _scales_queries})
"""Scales queries before their product with the keys, as many implementations do."""


def _of_products(cut: Cut, *, scales_queries: bool = False) -> Overrides:
    products = partial(_factors_rounded, cut, ("q", "k"))
    if scales_queries:
        products = partial(_scaled_factors_rounded, cut)
    return {
        "linear": partial(_linear_factors_rounded, cut),
        "products": products,
        "weighed": partial(_factors_rounded, cut, ("attn_weights", "v")),
    }


def _linear_factors_rounded(
    cut: Cut, layer: Layer, _: Override, name: str, x: np.ndarray
) -> np.ndarray:
    a = layer.arithmetic
    weight = layer.parameter(f"{name}.weight")
    ask(PER_MULTIPLICATION * multiplications(x, weight.T))  # before anything is rounded for it
    weight = cut(a.widen(weight))
    bias = 0.0
    if layer.has_bias(name):
        bias = a.widen(layer.parameter(f"{name}.bias"))
    return a.keep(a.matmul(_entering(layer, name, x, cut), weight.T, bias))


def _factors_rounded(
    cut: Cut, names: tuple[str, ...], layer: Layer, original: Override, values: Values
) -> Any:
    """Round the stages that a product multiplies."""
    rounded = dict(values)
    for name in names:
        rounded[name] = _rounded(layer, layer.arithmetic.widen(values[name]), cut)
    return original(rounded)


def _scaled_factors_rounded(cut: Cut, layer: Layer, _: Override, values: Values) -> np.ndarray:
    queries = _rounded(layer, _scaled_queries(layer, values), cut)
    keys = _rounded(layer, layer.arithmetic.widen(values["k"]), cut)
    return _products_of_scaled(layer, queries, keys)


def _with_bits(x: np.ndarray, bits: int, *, is_rounded: bool) -> np.ndarray:
    """Return float32 or float64 values with fewer explicit mantissa bits; NaN and infinity are
    unchanged.

    Args:
        x: the values.
        bits: number of remaining bits.
        is_rounded: True to round to nearest, half to even; False to truncate.
    """
    integer, explicit = np.uint32, 23
    if x.dtype == np.float64:
        integer, explicit = np.uint64, 52
    number, lost = x.view(integer), integer(explicit - bits)
    if is_rounded:
        number = number + (number >> lost & integer(1)) + integer(2 ** (explicit - bits - 1) - 1)
    return (number >> lost << lost).view(x.dtype)


def _products_of(kind: str, about: str, fix: str = "raise the math fidelity to HiFi4") -> Edit:
    """Return the bug that every matrix product rounds its inputs.

    In the reference it is a different arithmetic (`reference.MANTISSA`) instead of an override. The
    lost bits depend on the order of a sum, so only the size of the error can be predicted, not its
    value.
    """
    return known_bug(
        f"precision-{kind}", f"matrix products use {about}", {}, fix, "low-precision", ("q",)
    )


PRECISIONS = {
    "tf32": _products_of(
        "tf32", "TF32 inputs, with 10 bits", "set the float32 matmul precision to highest"
    ),
    "bfloat16": _products_of(
        "bfloat16", "bfloat16 inputs", "compute products of float32 in float32"
    ),
    "lofi": _products_of("lofi", "4 bits of each input (LoFi)"),
}
"""Arithmetics that explain a small difference everywhere, the finest first."""

FIDELITIES = {
    "tensix-hifi2": _products_of(
        "hifi2", "6 explicit bits of their first operand and 9 of their second (HiFi2)"
    ),
    "tensix-lofi": _products_of(
        "lofi", "6 explicit bits of their first operand and 4 of their second (LoFi)"
    ),
}
"""Arithmetics of Tenstorrent's hardware, in which float32 and bfloat16 lose bits. ttnn uses LoFi
for a product with a `program_config` or a `core_grid` and no arithmetic.
"""
