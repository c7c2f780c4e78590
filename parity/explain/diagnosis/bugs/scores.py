"""Bugs from the scores to the attention weights: scale, bias, softmax, and NaN."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, YarnScaling
from parity.explain.diagnosis.bugs.families import SCORE_BIAS, SOFT_CAP, scale_family
from parity.explain.diagnosis.bugs.record import Edit, Override, instead, known_bug
from parity.explain.diagnosis.bugs.sites import attn_weights
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values

of_scores = partial(known_bug, stages=("scores",))

# ---- Scale ---------------------------------------------------------------------------------------


def scale(case: Case) -> Iterator[Edit]:
    """Scores are divided by another number than sqrt(H), or than 1 / scale if the layer has its own
    scale.

    YaRN's factor is kept.
    """
    spec = case.spec
    root, kept = float(np.sqrt(spec.head_dim)), yarn_factor(spec)
    right, meant, squared, inverse = root, "1 / sqrt(H)", "1 / H", "sqrt(H)"
    family = scale_family(spec)
    fix = family.fix_for(spec)
    if spec.scale is not None:
        right, meant, squared = 1.0 / spec.scale, f"{spec.scale:g}", f"the square of {spec.scale:g}"
        inverse = f"1 / {spec.scale:g}"
    named: dict[float, tuple[str, str]] = {}
    for name, words, divisor in (
        ("missing", "is 1 (missing)", 1.0),
        ("ignored", "is 1 / sqrt(H)", root),
        ("squared", f"is {squared}", right**2 if spec.scale else float(spec.head_dim)),
        ("by-d-model", "is 1 / sqrt(d_model)", float(np.sqrt(spec.d_model))),
        ("by-value-head-dim", "is 1 / sqrt(value_head_dim)", float(np.sqrt(spec.value_head_dim))),
        ("by-num-heads", "is 1 / sqrt(N)", float(np.sqrt(spec.num_heads))),
        ("fourth-root", "is the fourth root of 1 / H", float(spec.head_dim**0.25)),
        ("inverted", f"is {inverse}", 1.0 / right),
    ):
        first, before = named.get(divisor, (name, ""))
        named[divisor] = first, f"{before} or {words.removeprefix('is ')}" if before else words
    times = "" if kept == 1.0 else f" times {kept:.4g}"
    for divisor, (name, words) in named.items():
        if divisor != right:
            about = family.about.format(found=words + times, right=meant + times)
            wrong = {"scale": instead(lambda divisor=divisor: divisor / kept)}
            yield of_scores(f"scale-{name}", about, wrong, fix=fix, page=family.page)
    if right != 1.0:
        divided = attn_weights(lambda layer, x: x / layer.arithmetic.wide.type(right / kept))
        yield of_scores(
            "scale-after-softmax",
            "the scale is applied after the softmax instead of to the scores",
            {"scale": instead(lambda: 1.0), **divided},
            fix=f"{fix}, before the softmax",
            page=family.page,
        )


def yarn_factor(spec: AttentionSpec) -> float:
    """Return mscale², which scales layers with latents and YaRN; 1 otherwise."""
    scaling = (
        None
        if spec.rope is None or spec.latent is None or spec.scale is not None
        else spec.rope.scaling
    )
    return scaling.score_factor if isinstance(scaling, YarnScaling) else 1.0


# ---- Soft cap ------------------------------------------------------------------------------------


def soft_cap(case: Case) -> Iterator[Edit]:
    """Scores are softly capped after the scale, before the bias and the mask."""
    cap, scale = case.spec.soft_cap, case.spec.score_scale
    if cap is None:
        return
    bug = partial(of_scores, fix=SOFT_CAP.fix_for(case.spec), page=SOFT_CAP.page)
    not_capped = instead(lambda x: x)

    def capped(scores: np.ndarray, by: float | np.floating = cap) -> np.ndarray:
        return by * np.tanh(scores / by)

    def capped_before_scale(x: np.ndarray) -> np.ndarray:
        number = x.dtype.type
        return capped(x / number(scale), number(cap)) * number(scale)

    def capped_after_bias(
        layer: Layer, _: Override, values: Values, *places: Any
    ) -> dict[str, np.ndarray]:
        biased = layer.products(values) + layer.arithmetic.widen(np.asarray(layer.problem.bias))
        return {"scores": capped(biased, biased.dtype.type(cap))}

    def capped_after_mask(_: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        """Set hidden scores to the lowest possible one, -cap."""
        shown = capped(np.where(values["mask"], -np.inf, values["scores"]))
        return original({**values, "scores": shown, "mask": np.zeros_like(values["mask"])})

    yield bug("soft-cap-ignored", "scores are not capped", {"capped": not_capped})
    yield bug(
        "soft-cap-not-multiplied",
        "scores are capped by tanh(s / cap), not multiplied by the cap",
        {"capped": instead(lambda x: np.tanh(x / x.dtype.type(cap)))},
    )
    yield bug(
        "soft-cap-before-scale",
        "scores are capped before they are scaled",
        {"capped": instead(capped_before_scale)},
    )
    if case.bias:
        yield bug(
            "soft-cap-after-bias",
            "scores are capped after the bias is added",
            {"scores": capped_after_bias},
        )
    if case.has_mask or case.is_cached:
        yield bug(
            "soft-cap-after-mask",
            "scores are capped after the mask, so hidden keys become visible",
            {"capped": not_capped, "attn_weights": capped_after_mask},
        )


# ---- Bias ----------------------------------------------------------------------------------------


def bias(case: Case) -> Iterator[Edit]:
    if not case.bias:
        return
    bug = SCORE_BIAS.seen_in("scores")
    missing = {"score_bias": instead(lambda: None)}

    def scaled(layer: Layer, original: Override) -> np.ndarray | None:
        added, a = original(), layer.arithmetic
        return (
            None if added is None else a.widen(added) / a.wide.type(layer.scale())
        )  # a pair may omit it

    def with_bias(layer: Layer, x: np.ndarray) -> np.ndarray:
        return x + layer.arithmetic.widen(np.asarray(layer.problem.bias))

    yield bug("score-bias-missing", "the bias of the scores is missing", missing)
    yield bug(
        "score-bias-scaled",
        "the bias is added before the scores are scaled, and scaled with them",
        {"score_bias": scaled},
        fix="scale the scores, then add the bias",
    )
    added = {**missing, **attn_weights(with_bias)}
    yield bug("score-bias-after-softmax", "the bias is added after the softmax", added)


# ---- NaN -----------------------------------------------------------------------------------------


def not_finite(case: Case) -> Iterator[Edit]:
    if case.not_finite == "visible" or (
        case.not_finite and not case.is_cached and case.seq_len_k is None
    ):
        yield known_bug(
            "nan-swallowed",
            "a row whose scores are NaN is 0, as if every key were hidden",
            {stage: _without_nan(stage) for stage in ("attn_weights", "context")},
            fix="treat a row as empty only if every key is masked, never because of its scores",
            page="not-finite",
            stages=("attn_weights",),
        )
    if case.not_finite and case.has_mask:
        yield known_bug(
            "nan-leaks",
            "a NaN in a hidden value reaches rows that do not attend to it: 0 * NaN is NaN",
            {"context": lambda layer, original, values: layer.weighed(values)},
            fix="replace hidden values by 0 before the weighted sum",
            page="not-finite",
            stages=("context", "module.output"),
        )


def _without_nan(stage: str) -> Override:
    def override(_: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        x = original(values)[stage]
        return {stage: np.where(np.isnan(x), np.zeros_like(x), x)}

    return override
