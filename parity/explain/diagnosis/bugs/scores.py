"""Bugs from the scores to the attention weights: scale, bias, softmax, and NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, YarnScaling
from parity.explain.diagnosis.bugs.families import SCORE_BIAS, SOFT_CAP, scale_family
from parity.explain.diagnosis.bugs.record import (
    Edit,
    Override,
    OverridesOfSpec,
    WrongField,
    instead,
    known_bug,
)
from parity.explain.diagnosis.bugs.sites import (
    Overrides,
    always,
    attn_weights,
    in_sixteen_bits,
)
from parity.explain.diagnosis.bugs.specs import of_spec, without_default_scale
from parity.measure.core.case import Case
from parity.measure.core.divisors import wrong_divisors
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values

of_scores = partial(known_bug, stages=("scores",))

# ---- Scale ---------------------------------------------------------------------------------------


def scale(case: Case) -> Iterator[Edit]:
    """Scores are divided by a number other than sqrt(H), or than 1 / scale if the layer has its own
    scale.

    YaRN's factor is kept.
    """
    spec = without_default_scale(case.spec)
    mscale_squared = yarn_factor(spec)
    family = scale_family(spec)
    fix = family.fix_for(spec)
    if spec.scale is None:
        right, right_words = math.sqrt(spec.head_dim), "1 / sqrt(H)"
    else:
        right, right_words = 1.0 / spec.scale, f"{spec.scale:g}"
    times = ""
    if mscale_squared != 1.0:
        times = f" times {mscale_squared:.4g}"
    for divisor, (name, words) in _divisors(spec, right).items():
        # A scale that is written out may differ from a root of the sizes by rounding alone.
        if not math.isclose(divisor, right, rel_tol=1e-6):
            yield of_scores(
                name,
                family.about.format(found=words + times, right=right_words + times),
                _scale_instead(spec, mscale_squared / divisor),
                fix=fix,
                page=family.page,
            )
    if mscale_squared != 1.0:
        # The forms above keep mscale², once.
        for name, words, scale in (
            ("missing", "1 (missing), without mscale", 1.0),
            ("squared", f"the square of {spec.score_scale:g}", spec.score_scale**2),
        ):
            yield of_scores(
                f"scale-{name}",
                family.about.format(found=f"is {words}", right=f"{spec.score_scale:g}"),
                of_spec(spec, scale=scale),
                fix=fix,
                page=family.page,
            )
    if right != 1.0:
        weights_divided = attn_weights(partial(_divided, right / mscale_squared))
        yield of_scores(
            "scale-after-softmax",
            "the scale is applied after the softmax instead of to the scores",
            {"scale": always(1.0), **weights_divided},
            fix=f"{fix}, before the softmax",
            page=family.page,
        )


def _scale_instead(spec: AttentionSpec, scale: float) -> Overrides:
    """Return the overrides of a layer with a wrong scale."""
    wrong_field = WrongField("scale", scale, spec.score_scale)
    return OverridesOfSpec({"scale": always(1.0 / scale)}, (wrong_field,))


def _divisors(spec: AttentionSpec, right: float) -> dict[float, tuple[str, str]]:
    """Return usual divisors of scores, each with the first of its names and all descriptions."""
    squared_words, inverse_words = "1 / H", "sqrt(H)"
    if spec.scale is not None:
        squared_words = f"the square of {spec.scale:g}"
        inverse_words = f"1 / {spec.scale:g}"
    wrong = {
        **wrong_divisors(spec.head_dim, spec.d_model, spec.scale),
        "scale-by-value-head-dim": math.sqrt(spec.value_head_dim),
        "scale-by-num-heads": math.sqrt(spec.num_heads),
        "scale-fourth-root": float(spec.head_dim**0.25),
        "scale-inverted": 1.0 / right,
    }
    words_of = {
        "scale-missing": "1 (missing)",
        "scale-ignored": "1 / sqrt(H)",
        "scale-squared": squared_words,
        "scale-by-d-model": "1 / sqrt(d_model)",
        "scale-by-value-head-dim": "1 / sqrt(value_head_dim)",
        "scale-by-num-heads": "1 / sqrt(N)",
        "scale-fourth-root": "the fourth root of 1 / H",
        "scale-inverted": inverse_words,
    }
    divisors: dict[float, tuple[str, str]] = {}
    for name, divisor in wrong.items():
        words = words_of[name]
        if divisor in divisors:
            first_name, earlier_words = divisors[divisor]
            divisors[divisor] = first_name, f"{earlier_words} or {words}"
        else:
            divisors[divisor] = name, f"is {words}"
    return divisors


def _divided(divisor: float, layer: Layer, x: np.ndarray) -> np.ndarray:
    return x / layer.arithmetic.wide.type(divisor)


def yarn_factor(spec: AttentionSpec) -> float:
    """Return mscale², which scales layers with latents and YaRN; 1 otherwise."""
    if spec.rope is None or spec.latent is None or without_default_scale(spec).scale is not None:
        return 1.0
    if not isinstance(spec.rope.scaling, YarnScaling):
        return 1.0
    return spec.rope.scaling.score_factor


# ---- Soft cap ------------------------------------------------------------------------------------


def soft_cap(case: Case) -> Iterator[Edit]:
    """Scores are softly capped after the scale, before the bias and the mask."""
    cap = case.spec.soft_cap
    if cap is None:
        return
    bug = partial(of_scores, fix=SOFT_CAP.fix_for(case.spec), page=SOFT_CAP.page)
    yield bug("soft-cap-ignored", "scores are not capped", of_spec(case.spec, soft_cap=None))
    yield bug(
        "soft-cap-not-multiplied",
        "scores are capped by tanh(s / cap), not multiplied by the cap",
        {"capped": instead(partial(_not_multiplied, cap))},
    )
    yield bug(
        "soft-cap-before-scale",
        "scores are capped before they are scaled",
        {"capped": instead(partial(_capped_before_scale, cap, case.spec.score_scale))},
    )
    if case.bias:
        yield bug(
            "soft-cap-after-bias",
            "scores are capped after the bias is added",
            {"scores": partial(_capped_after_bias, cap)},
        )
    if case.has_mask or case.is_cached:
        yield bug(
            "soft-cap-after-mask",
            "scores are capped after the mask, so hidden keys become visible",
            {
                **of_spec(case.spec, soft_cap=None),
                "attn_weights": partial(_capped_after_mask, cap),
            },
        )


def _capped(scores: np.ndarray, cap: float | np.floating) -> np.ndarray:
    return cap * np.tanh(scores / cap)


def _not_multiplied(cap: float, scores: np.ndarray) -> np.ndarray:
    return np.tanh(scores / scores.dtype.type(cap))


def _capped_before_scale(cap: float, scale: float, scores: np.ndarray) -> np.ndarray:
    number = scores.dtype.type
    return _capped(scores / number(scale), number(cap)) * number(scale)


def _capped_after_bias(
    cap: float, layer: Layer, _: Override, values: Values, *positions: Any
) -> dict[str, np.ndarray]:
    bias = layer.arithmetic.widen(np.asarray(layer.problem.bias))
    biased = layer.products(values) + bias
    return {"scores": _capped(biased, biased.dtype.type(cap))}


def _capped_after_mask(
    cap: float, _: Layer, original: Override, values: Values
) -> dict[str, np.ndarray]:
    """Set hidden scores to the lowest possible one, -cap."""
    masked = np.where(values["mask"], -np.inf, values["scores"])
    nothing_hidden = np.zeros_like(values["mask"])
    return original({**values, "scores": _capped(masked, cap), "mask": nothing_hidden})


# ---- Bias ----------------------------------------------------------------------------------------


def bias(case: Case) -> Iterator[Edit]:
    if not case.bias:
        return
    bug = SCORE_BIAS.shown_in("scores")
    missing: Overrides = {"score_bias": always(None)}
    yield bug("score-bias-missing", "the bias of the scores is missing", missing)
    yield bug(
        "score-bias-scaled",
        "the bias is added before the scores are scaled, and scaled with them",
        {"score_bias": _scaled_bias},
        fix="scale the scores, then add the bias",
    )
    yield bug(
        "score-bias-after-softmax",
        "the bias is added after the softmax",
        {**missing, **attn_weights(_with_bias)},
    )


def _scaled_bias(layer: Layer, original: Override) -> np.ndarray | None:
    added = original()
    if added is None:  # omitted by the other bug of a pair
        return None
    a = layer.arithmetic
    return a.widen(added) / a.wide.type(layer.scale())


def _with_bias(layer: Layer, weights: np.ndarray) -> np.ndarray:
    return weights + layer.arithmetic.widen(np.asarray(layer.problem.bias))


# ---- NaN -----------------------------------------------------------------------------------------


def not_finite(case: Case) -> Iterator[Edit]:
    is_in_input = case.not_finite and not case.is_cached and case.seq_len_k is None
    if case.not_finite == "visible" or is_in_input:
        yield known_bug(
            "nan-swallowed",
            "a row whose scores are NaN is 0, as if every key were hidden",
            {
                "attn_weights": partial(_without_nan, "attn_weights"),
                "context": partial(_without_nan, "context"),
            },
            fix="treat a row as empty only if every key is masked, never because of its scores",
            page="not-finite",
            stages=("attn_weights",),
        )
    if case.not_finite and case.has_mask:
        yield known_bug(
            "nan-leaks",
            "a NaN in a hidden value reaches rows that do not attend to it: 0 * NaN is NaN",
            {"context": _with_hidden_values},
            fix="replace hidden values by 0 before the weighted sum",
            page="not-finite",
            stages=("context", "module.output"),
        )


def _without_nan(stage: str, _: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
    x = original(values)[stage]
    return {stage: np.where(np.isnan(x), np.zeros_like(x), x)}


def _with_hidden_values(layer: Layer, _: Override, values: Values) -> dict[str, np.ndarray]:
    return layer.weighed(values)


# ---- Overflow ------------------------------------------------------------------------------------

OVERFLOW = "float16-overflow"
"""The name of bugs that exceed the largest float16."""


def overflow(case: Case) -> Iterator[Edit]:
    """Yield stages that exceed the largest float16 and become infinite.

    They are searched for only if a stage is not finite: see `Trial`.
    """
    bug = partial(
        known_bug,
        OVERFLOW,
        fix=(
            "compute scores and softmax in float32, or scale the queries before their products "
            "with the keys"
        ),
        page="not-finite",
    )
    beyond = "exceed 65504, the largest float16, and become infinite"
    of_scores = (
        (f"the products of queries and keys {beyond} before they are scaled", _products_overflow),
        (f"the scores {beyond}", _scaled_products_overflow),
    )
    for about, products in of_scores:
        yield bug(about, {"products": products}, stages=("scores",))
        if case.has_mask or case.is_cached:
            yield bug(
                f"{about}; the mask is added, so the products of hidden keys also make a row NaN",
                {"products": products, "attn_weights": _rows_nan_by_hidden_scores},
                stages=("scores",),
            )
    for name, words in (("q", "queries"), ("k", "keys"), ("v", "values")):
        yield bug(
            f"the {words} {beyond}",
            {"project": partial(_stage_overflows, name)},
            fix=f"compute the {words} in float32 or bfloat16, or scale the weights",
            stages=(name,),
        )
    for name, words in (("context", "contexts"), ("output", "outputs")):
        yield bug(
            f"the {words} {beyond}",
            {name: partial(_stage_overflows, name)},
            fix=f"compute the {words} in float32 or bfloat16",
            stages=(name,),
        )


def _overflowing(layer: Layer, x: np.ndarray) -> np.ndarray:
    """Return values as float16 has them; in a layer of float16, the finite ones unchanged, since
    its budget covers their rounding.
    """
    narrow = in_sixteen_bits(x, "float16")
    if layer.problem.dtype == "float16":
        return np.where(np.isinf(narrow), narrow, x)
    return narrow


def _products_overflow(layer: Layer, original: Override, values: Values) -> np.ndarray:
    scale = layer.arithmetic.wide.type(layer.scale())
    unscaled = _overflowing(layer, original(values) * scale)
    return _overflowing(layer, unscaled / scale)


def _scaled_products_overflow(layer: Layer, original: Override, values: Values) -> np.ndarray:
    return _overflowing(layer, original(values))


def _rows_nan_by_hidden_scores(
    _: Layer, original: Override, values: Values
) -> dict[str, np.ndarray]:
    """Return rows of NaN where the score of any key is infinite, also of a hidden one."""
    attn_weights = original(values)["attn_weights"]
    has_infinity = np.isposinf(values["scores"]).any(axis=-1, keepdims=True)
    nan = np.full_like(attn_weights, np.nan)
    return {"attn_weights": np.where(has_infinity, nan, attn_weights)}


def _stage_overflows(name: str, layer: Layer, original: Override, *inputs: Any) -> Any:
    stages = original(*inputs)
    if name not in stages:  # only some projections are computed
        return stages
    return {**stages, name: _overflowing(layer, stages[name])}
