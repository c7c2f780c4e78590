"""Bugs in the softmax: its mask, its function, its axis, dropout, sinks, and rows without a visible
key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from parity.explain.diagnosis.bugs.families import (
    DROPOUT,
    EMPTY_ROWS,
    LEAKING,
    SINKS,
    SOFTMAX,
)
from parity.explain.diagnosis.bugs.record import Edit, Override, known_bug
from parity.explain.diagnosis.bugs.sites import after, always, attn_weights
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values

PENALTY = -10.0

of_softmax = partial(known_bug, stages=("attn_weights",))

# ---- The mask ------------------------------------------------------------------------------------


def mask_as_number(case: Case) -> Iterator[Edit]:
    """Hidden keys have other scores, and are visible."""
    if not (case.has_mask or case.is_cached):
        return
    for name, about, wrong in (
        (
            "added",
            "the mask is added to the scores as 0 and 1, so hidden keys get more weight",
            np.add,
        ),
        (
            "added-inverted",
            "the mask, True for visible keys, is added to the scores as 0 and 1 and hides nothing",
            lambda scores, mask: scores + ~mask,
        ),
        (
            "multiplied",
            "the scores of hidden keys are 0 (multiplied by the mask, or filled with 1e-9) "
            "instead of -inf",
            lambda scores, mask: np.where(mask, np.zeros((), scores.dtype), scores),
        ),
        (
            "penalty-added",
            f"{PENALTY:g} is added to the scores of hidden keys instead of -inf",
            lambda scores, mask: scores + scores.dtype.type(PENALTY) * mask,
        ),
        (
            "penalty-filled",
            f"the scores of hidden keys are {PENALTY:g} instead of -inf",
            lambda scores, mask: np.where(mask, scores.dtype.type(PENALTY), scores),
        ),
    ):
        yield LEAKING.shown_in("attn_weights")(
            f"mask-{name}", about, {"attn_weights": _numbered(wrong)}
        )


def _numbered(wrong: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Override:
    """Apply the softmax to `wrong(scores, mask)`, without hiding anything."""

    def attn_weights(layer: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        scores, mask = layer.arithmetic.widen(values["scores"]), values["mask"]
        return original({**values, "scores": wrong(scores, mask), "mask": np.zeros_like(mask)})

    return attn_weights


def after_softmax(case: Case) -> Iterator[Edit]:
    def masked(_: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        weights = original({**values, "mask": np.zeros_like(values["mask"])})["attn_weights"]
        return {"attn_weights": np.where(values["mask"], np.zeros((), weights.dtype), weights)}

    if case.has_mask or case.is_cached:
        yield of_softmax(
            "mask-after-softmax",
            "the mask is applied after the softmax, so rows do not sum to 1",
            {"attn_weights": masked},
            fix="hide keys before the softmax",
            page="mask-ignored",
        )


# ---- A different function ------------------------------------------------------------------------


def other_functions(case: Case) -> Iterator[Edit]:
    """Functions that are used instead of a softmax."""
    bug = SOFTMAX.shown_in("attn_weights")

    def twice(_: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        return original(
            {"scores": original(values)["attn_weights"], "mask": np.zeros_like(values["mask"])}
        )

    def base_2(layer: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        a = layer.arithmetic
        return original({**values, "scores": a.widen(values["scores"]) * a.wide.type(np.log(2.0))})

    def sigmoid(layer: Layer, _: Override, values: Values) -> dict[str, np.ndarray]:
        a = layer.arithmetic
        with np.errstate(over="ignore"):
            weights = 1.0 / (1.0 + np.exp(-a.widen(values["scores"])))
        return {"attn_weights": a.keep(np.where(values["mask"], np.zeros((), a.wide), weights))}

    yield bug(
        "softmax-twice",
        "the softmax is applied twice, the second time to the weights",
        {"attn_weights": twice},
    )
    yield bug(
        "softmax-base-2", "the softmax uses powers of 2 instead of e", {"attn_weights": base_2}
    )
    if case.spec.sinks:
        return
    yield bug(
        "softmax-sigmoid", "each weight is the sigmoid of its score", {"attn_weights": sigmoid}
    )
    if not (case.has_mask or case.is_cached):  # hidden keys would have weight -inf
        logarithm = attn_weights(lambda _, x: np.log(x))
        yield bug("softmax-log", "the weights are the logarithms of a softmax", logarithm)


# ---- A different axis ----------------------------------------------------------------------------


def softmax_axis(case: Case) -> Iterator[Edit]:
    for axis, words, length in (
        (2, "queries", case.seq_len),
        (1, "heads", 1 if case.spec.sinks else case.spec.num_heads),  # sinks belong to heads
        (0, "batch", case.batch),
    ):
        if length > 1:
            yield of_softmax(
                f"softmax-over-{words}",
                f"the softmax is over the {words} instead of the keys",
                {"attn_weights": _over(axis)},
                fix="apply the softmax over the last axis of (B, N, T, S)",
                page="softmax-axis",
            )


def _over(axis: int) -> Override:
    def attn_weights(_: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        turned = {name: values[name].swapaxes(axis, 3) for name in ("scores", "mask")}
        return {"attn_weights": original(turned)["attn_weights"].swapaxes(axis, 3)}

    return attn_weights


# ---- Dropout -------------------------------------------------------------------------------------


def dropout(_: Case) -> Iterator[Edit]:
    """The factor of a dropout that drops nothing. Dropped values are random and cannot be computed
    again.
    """
    for percent in (10, 20, 50):
        share = 1.0 - percent / 100.0
        yield DROPOUT.shown_in("attn_weights")(
            f"dropout-factor-{percent}",
            f"the attention weights are divided by {share:g}, as by a dropout of {percent}% that "
            f"drops nothing",
            attn_weights(lambda layer, x, share=share: x / layer.arithmetic.wide.type(share)),
        )


# ---- Sinks ---------------------------------------------------------------------------------------


def sinks(case: Case) -> Iterator[Edit]:
    spec = case.spec
    if not spec.sinks:
        return
    bug = SINKS.shown_in("attn_weights")
    none = {"sinks": always(None)}
    yield bug("sinks-ignored", "the sinks are missing", none)
    yield bug(
        "sinks-zero",
        "every sink is 0, as before training",
        {"sinks": after(lambda sinks: sinks * 0.0)},
    )
    if spec.score_scale != 1.0:
        scaled = after(lambda sinks: sinks * spec.score_scale)
        yield bug("sinks-scaled", "sinks are scaled like the scores", {"sinks": scaled})
    if 1 < spec.num_kv_heads < spec.num_heads:
        order = np.arange(spec.num_heads).reshape(-1, spec.num_kv_heads).T.ravel()
        tiled = after(lambda sinks: sinks[:, order])
        yield bug(
            "sinks-of-other-heads", "sinks belong to other heads: they are tiled", {"sinks": tiled}
        )
    yield bug(
        "sinks-share-kept",
        "weights are multiplied by the share of the sink instead of the rest",
        attn_weights(_with_opposite_share),
    )
    if case.has_mask or case.is_cached:
        yield bug(
            "sinks-mask-not-shifted",
            "the sink is prepended to the keys, but the mask is not shifted",
            {**none, "attn_weights": _mask_not_shifted},
        )


def _with_opposite_share(_: Layer, weights: np.ndarray) -> np.ndarray:
    left = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(left == 0.0, 1.0, left) * (1.0 - left)


def _mask_not_shifted(layer: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
    scores, mask = values["scores"], values["mask"]
    sinks = layer.arithmetic.widen(layer.parameter("sinks")).reshape(1, -1, 1, 1)
    first, last = (
        np.broadcast_to(sinks, (*scores.shape[:3], 1)),
        np.zeros((*mask.shape[:3], 1), bool),
    )
    joined = {
        "scores": np.concatenate([first, scores], axis=3),
        "mask": np.concatenate([mask, last], axis=3),
    }
    return {"attn_weights": original({**values, **joined})["attn_weights"][..., 1:]}


# ---- Rows that see no key ------------------------------------------------------------------------


def empty_rows(case: Case) -> Iterator[Edit]:
    """Masks may empty rows, at least wrong ones; a sink fills them."""
    if not (case.has_mask or case.is_cached) or case.spec.sinks:
        return
    for name, about, of_scores in (
        ("nan", "rows without a key are NaN", lambda scores: np.full_like(scores, np.nan)),
        (
            "mean",
            "rows without a key have equal weights for all keys",
            lambda scores: np.full_like(scores, 1.0 / scores.shape[-1]),
        ),
        ("unmasked", "rows without a key attend to all keys", _softmax),
    ):
        yield EMPTY_ROWS.shown_in("attn_weights")(
            f"empty-row-{name}",
            about,
            {"of_empty_rows": _made(of_scores)},
            shows_alone=case.has_own_mask or 0 in (case.key_padding_lengths or ()),
        )


def _made(of_scores: Callable[[np.ndarray], np.ndarray]) -> Override:
    """Replace rows without a key, from their scores before the mask."""

    def of_empty_rows(
        layer: Layer,
        _: Override,
        attn_weights: np.ndarray,
        scores: np.ndarray,
        is_empty: np.ndarray,
    ) -> np.ndarray:
        wrong = layer.arithmetic.keep(of_scores(layer.arithmetic.widen(scores)))
        return np.where(is_empty, wrong, attn_weights)

    return of_empty_rows


def _softmax(scores: np.ndarray) -> np.ndarray:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
