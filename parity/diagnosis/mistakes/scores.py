"""Mistakes from the scores to the attention weights: scale, bias, softmax, and NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, YarnScaling
from parity.core.case import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.diagnosis.mistakes.families import SOFT_CAP, scale_family
from parity.diagnosis.mistakes.record import Mistake, Override, instead

# ---- Scale -----------------------------------------------------------------------------------------------------------


def scale(case: Case) -> Iterator[Mistake]:
    """Scores are divided by sqrt(H), or by 1 / scale where a layer has a scale of its own: not by anything else.

    What YaRN multiplies them by is kept.
    """
    spec = case.spec
    root, kept = float(np.sqrt(spec.head_dim)), yarn_factor(spec)
    right, meant, squared, inverse = root, "1 / sqrt(H)", "1 / H", "sqrt(H)"
    family = scale_family(spec)
    fix = family.fix_for(spec)
    if spec.scale is not None:
        right, meant, squared = 1.0 / spec.scale, f"{spec.scale:g}", f"the square of {spec.scale:g}"
        inverse = f"1 / {spec.scale:g}"
    told: dict[float, tuple[str, str]] = {}
    for name, words, divisor in (
        ("missing", "is missing", 1.0),
        ("ignored", "is 1 / sqrt(H)", root),
        ("squared", f"is {squared}", right**2 if spec.scale else float(spec.head_dim)),
        ("by-d-model", "is 1 / sqrt(d_model)", float(np.sqrt(spec.d_model))),
        ("by-value-head-dim", "is 1 / sqrt(value_head_dim)", float(np.sqrt(spec.value_head_dim))),
        ("by-num-heads", "is 1 / sqrt(N)", float(np.sqrt(spec.num_heads))),
        ("fourth-root", "is the fourth root of 1 / H", float(spec.head_dim**0.25)),
        ("inverted", f"is {inverse}", 1.0 / right),
    ):
        first, said = told.get(divisor, (name, ""))
        told[divisor] = first, f"{said}, or {words}" if said else words
    for divisor, (name, words) in told.items():
        if divisor != right:
            about = family.about.format(found=words, right=meant)
            yield other_scale(f"scale-{name}", about, fix, family.page, divisor / kept, right / divisor)
    if right != 1.0:
        yield _scale_after_softmax(f"{fix}, before the softmax", right / kept)


def yarn_factor(spec: AttentionSpec) -> float:
    """mscale², which is in the scale of layers with latents and YaRN; 1 elsewhere."""
    scaling = None if spec.rope is None or spec.latent is None or spec.scale is not None else spec.rope.scaling
    return scaling.score_factor if isinstance(scaling, YarnScaling) else 1.0


def other_scale(name: str, about: str, fix: str, page: str, divisor: float, factor: float) -> Mistake:
    """Products of queries and keys are divided by `divisor`, and so multiplied by `factor`."""
    return Mistake(
        name,
        about,
        fix,
        page,
        ("scores",),
        {"scale": instead(lambda: divisor)},
    )


def _scale_after_softmax(fix: str, right: float) -> Mistake:
    def attn_weights(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        found, a = original(values)["attn_weights"], layer.arithmetic
        return {"attn_weights": a.keep(a.widen(found) / a.wide.type(right))}

    return Mistake(
        "scale-after-softmax",
        "the scale is applied after the softmax, and not to the scores",
        fix,
        "scale",
        ("scores",),
        {"scale": instead(lambda: 1.0), "attn_weights": attn_weights},
    )


# ---- Soft cap --------------------------------------------------------------------------------------------------------


def soft_cap(case: Case) -> Iterator[Mistake]:
    """Scores are capped softly after they are scaled, before the bias is added and the mask hides."""
    cap = case.spec.soft_cap
    if cap is None:
        return
    fix = SOFT_CAP.fix_for(case.spec)
    scale = case.spec.score_scale

    def capped(scores: Any, xp: Any, by: float = cap) -> Any:
        return by * xp.tanh(scores / by)

    def other(name: str, about: str, in_reference: Any) -> Mistake:
        overrides = {"capped": instead(in_reference)}
        return Mistake(name, about, fix, "soft-cap", ("scores",), overrides)

    yield other("soft-cap-ignored", "scores are not capped", lambda x: x)
    yield other(
        "soft-cap-not-multiplied",
        "scores are capped by tanh(s / cap), which is not multiplied by the cap",
        lambda x: np.tanh(x / x.dtype.type(cap)),
    )
    yield other(
        "soft-cap-before-scale",
        "scores are capped before they are scaled",
        lambda x: capped(x / x.dtype.type(scale), np, x.dtype.type(cap)) * x.dtype.type(scale),
    )
    if case.bias:
        yield _capped_after_bias(fix, capped)
    if case.has_mask or case.is_cached:
        yield _capped_after_mask(fix, capped)


def _capped_after_bias(fix: str, capped: Any) -> Mistake:
    def scores(layer: Layer, original: Any, values: Values, *places: Any) -> dict[str, np.ndarray]:
        a = layer.arithmetic
        biased = layer.products(values) + a.widen(np.asarray(layer.problem.bias))
        return {"scores": capped(biased, np, layer.soft_cap())}

    return Mistake(
        "soft-cap-after-bias",
        "scores are capped after the bias is added",
        fix,
        "soft-cap",
        ("scores",),
        {"scores": scores},
    )


def _capped_after_mask(fix: str, capped: Any) -> Mistake:
    """What is hidden has the lowest score that there is, -cap, and is seen."""

    def attn_weights(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        mask = values["mask"]
        shown = capped(np.where(mask, -np.inf, values["scores"]), np, layer.problem.spec.soft_cap)
        return original({**values, "scores": shown, "mask": np.zeros_like(mask)})

    return Mistake(
        "soft-cap-after-mask",
        "scores are capped after they are masked, so that what is hidden is seen",
        fix,
        "soft-cap",
        ("scores",),
        {"capped": instead(lambda x: x), "attn_weights": attn_weights},
    )


# ---- Bias ------------------------------------------------------------------------------------------------------------


def bias(case: Case) -> Iterator[Mistake]:
    if not case.bias:
        return
    yield Mistake(
        "score-bias-missing",
        "the bias of the scores is missing",
        "add the bias to the scores, before the softmax",
        "score-bias",
        ("scores",),
        {"score_bias": instead(lambda: None)},
    )
    yield _bias_scaled()
    yield _bias_after_softmax()


def _bias_scaled() -> Mistake:
    def score_bias(layer: Layer, original: Any) -> np.ndarray | None:
        bias, a = original(), layer.arithmetic
        return None if bias is None else a.widen(bias) / a.wide.type(layer.scale())

    return Mistake(
        "score-bias-scaled",
        "the bias is added before the scores are scaled, and scaled with them",
        "scale the scores, then add the bias",
        "score-bias",
        ("scores",),
        {"score_bias": score_bias},
    )


def _bias_after_softmax() -> Mistake:
    def attn_weights(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        found, a = original(values)["attn_weights"], layer.arithmetic
        return {"attn_weights": a.keep(a.widen(found) + a.widen(np.asarray(layer.problem.bias)))}

    return Mistake(
        "score-bias-after-softmax",
        "the bias is added after the softmax",
        "add the bias to the scores, before the softmax",
        "score-bias",
        ("scores",),
        {"score_bias": instead(lambda: None), "attn_weights": attn_weights},
    )


# ---- Softmax ---------------------------------------------------------------------------------------------------------


def softmax_axis(case: Case) -> Iterator[Mistake]:
    axes = {2: ("queries", case.seq_len), 1: ("heads", case.spec.num_heads), 0: ("batch", case.batch)}
    if case.spec.sinks:  # those of heads that are no heads
        del axes[1]
    return (_softmax_over(axis, words) for axis, (words, length) in axes.items() if length > 1)


def _softmax_over(axis: int, words: str) -> Mistake:
    def attn_weights(_: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        turned = {name: values[name].swapaxes(axis, 3) for name in ("scores", "mask")}
        return {"attn_weights": original(turned)["attn_weights"].swapaxes(axis, 3)}

    return Mistake(
        f"softmax-over-{words}",
        f"the softmax is over the {words}, and not over the keys",
        "take the softmax over the last axis of (B, N, T, S)",
        "softmax-axis",
        ("attn_weights",),
        {"attn_weights": attn_weights},
    )


# ---- NaN -------------------------------------------------------------------------------------------------------------


def not_finite(case: Case) -> Iterator[Mistake]:
    if case.not_finite == "visible" or (case.not_finite and not case.is_cached and case.seq_len_k is None):
        yield _swallowed()
    if case.not_finite and case.has_mask:
        yield _leaking()


def _swallowed() -> Mistake:
    def without_nan_of(stage: str) -> Override:
        def override(_: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
            x = original(values)[stage]
            return {stage: np.where(np.isnan(x), np.zeros_like(x), x)}

        return override

    return Mistake(
        "nan-swallowed",
        "a row whose scores are NaN is 0, as if every key were hidden",
        "let a row be empty because every key is masked, never because of its scores",
        "not-finite",
        ("attn_weights",),
        {stage: without_nan_of(stage) for stage in ("attn_weights", "context")},
    )


def _leaking() -> Mistake:
    return Mistake(
        "nan-leaks",
        "a NaN in a value that is hidden reaches the rows that may not see it: 0 * NaN is NaN",
        "put 0 in the place of hidden values before they are weighed",
        "not-finite",
        ("context", "module.output"),
        {"context": lambda layer, original, values: layer.weighed(values)},
    )
