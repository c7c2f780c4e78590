"""Mistakes in the softmax: what is put in its place, what its mask becomes, what its weights are multiplied by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from parity.core.case import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.diagnosis.mistakes.record import Mistake, Override
from parity.diagnosis.mistakes.sites import attn_weights

PENALTY = -10.0

of_softmax = partial(Mistake, stages=("attn_weights",))

# ---- The mask --------------------------------------------------------------------------------------------------------


def mask_as_number(case: Case) -> Iterator[Mistake]:
    """Hidden keys have other scores, and are seen."""
    if not (case.has_mask or case.is_cached):
        return
    for name, about, wrong in (
        (
            "added",
            "the mask is added to the scores as 0 and 1, so that what it should hide weighs more",
            lambda scores, mask: scores + mask,
        ),
        (
            "added-inverted",
            "the mask of what is seen is added to the scores as 0 and 1, and hides nothing",
            lambda scores, mask: scores + ~mask,
        ),
        (
            "multiplied",
            "the scores of hidden keys are 0 (multiplied by the mask, or filled with 1e-9), and not -inf",
            lambda scores, mask: np.where(mask, np.zeros((), scores.dtype), scores),
        ),
        (
            "penalty-added",
            f"{PENALTY:g} is added to the scores of hidden keys, and not -inf",
            lambda scores, mask: scores + scores.dtype.type(PENALTY) * mask,
        ),
        (
            "penalty-filled",
            f"the scores of hidden keys are {PENALTY:g}, and not -inf",
            lambda scores, mask: np.where(mask, scores.dtype.type(PENALTY), scores),
        ),
    ):
        yield of_softmax(
            f"mask-{name}",
            about,
            {"attn_weights": _numbered(wrong)},
            fix="hide keys with -inf before the softmax: a boolean mask is not a number to be added",
            page="mask-as-number",
        )


def _numbered(wrong: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Override:
    """Take the softmax of `wrong(scores, mask)`, of which nothing is hidden."""

    def attn_weights(layer: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        scores, mask = layer.arithmetic.widen(values["scores"]), values["mask"]
        return original({**values, "scores": wrong(scores, mask), "mask": np.zeros_like(mask)})

    return attn_weights


def after_softmax(case: Case) -> Iterator[Mistake]:
    def masked(_: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        found = original({**values, "mask": np.zeros_like(values["mask"])})["attn_weights"]
        return {"attn_weights": np.where(values["mask"], np.zeros((), found.dtype), found)}

    if case.has_mask or case.is_cached:
        yield of_softmax(
            "mask-after-softmax",
            "the mask is applied after the softmax, so that rows do not sum to 1",
            {"attn_weights": masked},
            fix="hide keys before the softmax",
            page="mask-ignored",
        )


# ---- Another function ------------------------------------------------------------------------------------------------


def other_functions(case: Case) -> Iterator[Mistake]:
    """Functions that are taken for a softmax."""
    mistake = partial(
        of_softmax, fix="take softmax(scores) over the keys, once, with powers of e", page="softmax-function"
    )

    def twice(_: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        return original({"scores": original(values)["attn_weights"], "mask": np.zeros_like(values["mask"])})

    def base_2(layer: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        a = layer.arithmetic
        return original({**values, "scores": a.widen(values["scores"]) * a.wide.type(np.log(2.0))})

    def sigmoid(layer: Layer, _: Override, values: Values) -> dict[str, np.ndarray]:
        a = layer.arithmetic
        with np.errstate(over="ignore"):
            weights = 1.0 / (1.0 + np.exp(-a.widen(values["scores"])))
        return {"attn_weights": a.keep(np.where(values["mask"], np.zeros((), a.wide), weights))}

    yield mistake(
        "softmax-twice", "the softmax is taken twice, the second time of the weights", {"attn_weights": twice}
    )
    yield mistake("softmax-base-2", "the softmax takes powers of 2, and not of e", {"attn_weights": base_2})
    if case.spec.sinks:
        return
    yield mistake("softmax-sigmoid", "each weight is the sigmoid of its score", {"attn_weights": sigmoid})
    if not (case.has_mask or case.is_cached):  # what is hidden would weigh -inf
        logarithm = attn_weights(lambda _, x: np.log(x))
        yield mistake("softmax-log", "the weights are the logarithms of a softmax", logarithm)


# ---- Dropout ---------------------------------------------------------------------------------------------------------


def dropout(_: Case) -> Iterator[Mistake]:
    """The factor of a dropout that drops nothing. What is dropped is drawn, and cannot be computed again."""
    for percent in (10, 20, 50):
        share = 1.0 - percent / 100.0
        yield of_softmax(
            f"dropout-factor-{percent}",
            f"the weights are divided by {share:g}, as a dropout of {percent} % does that drops nothing",
            attn_weights(lambda layer, x, share=share: x / layer.arithmetic.wide.type(share)),
            fix="leave out dropout in evaluation, with its factor 1 / (1 - p)",
            page="dropout",
        )
