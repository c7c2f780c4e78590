"""Mistakes in the softmax: what is put in its place, what its mask becomes, what its weights are multiplied by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parity.core.case import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.diagnosis.mistakes.record import Mistake, Override

# ---- The mask, as a number -------------------------------------------------------------------------------------------

PENALTY = -10.0


def mask_as_number(case: Case) -> Iterator[Mistake]:
    """Hidden keys have other scores, and are seen."""
    if not (case.has_mask or case.is_cached):
        return
    yield _numbered(
        "mask-added",
        "the mask is added to the scores as 0 and 1, so that what it should hide weighs more",
        lambda scores, mask: scores + mask,
    )
    yield _numbered(
        "mask-added-inverted",
        "the mask of what is seen is added to the scores as 0 and 1, and hides nothing",
        lambda scores, mask: scores + ~mask,
    )
    yield _numbered(
        "mask-multiplied",
        "the scores of hidden keys are 0 (multiplied by the mask, or filled with 1e-9), and not -inf",
        lambda scores, mask: np.where(mask, np.zeros((), scores.dtype), scores),
    )
    yield _numbered(
        "mask-penalty-added",
        f"{PENALTY:g} is added to the scores of hidden keys, and not -inf",
        lambda scores, mask: scores + scores.dtype.type(PENALTY) * mask,
    )
    yield _numbered(
        "mask-penalty-filled",
        f"the scores of hidden keys are {PENALTY:g}, and not -inf",
        lambda scores, mask: np.where(mask, scores.dtype.type(PENALTY), scores),
    )


def _numbered(name: str, about: str, wrong: Callable[..., np.ndarray]) -> Mistake:
    """`wrong(scores, mask)`: the scores that the softmax is taken of."""

    def attn_weights(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        scores, mask = layer.arithmetic.widen(values["scores"]), values["mask"]
        return original({**values, "scores": wrong(scores, mask), "mask": np.zeros_like(mask)})

    return Mistake(
        name,
        about,
        "hide keys with -inf before the softmax: a boolean mask is not a number to be added",
        "mask-as-number",
        ("attn_weights",),
        {"attn_weights": attn_weights},
    )


def after_softmax(case: Case) -> Iterator[Mistake]:
    def attn_weights(_: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        found = original({**values, "mask": np.zeros_like(values["mask"])})["attn_weights"]
        return {"attn_weights": np.where(values["mask"], np.zeros((), found.dtype), found)}

    if case.has_mask or case.is_cached:
        yield Mistake(
            "mask-after-softmax",
            "the mask is applied after the softmax, so that rows do not sum to 1",
            "hide keys before the softmax",
            "mask-ignored",
            ("attn_weights",),
            {"attn_weights": attn_weights},
        )


# ---- Another function ------------------------------------------------------------------------------------------------


def other_functions(case: Case) -> Iterator[Mistake]:
    """What is taken for a softmax."""
    is_masked = case.has_mask or case.is_cached
    yield _other(
        "softmax-twice",
        "the softmax is taken twice, the second time of the weights",
        _again,
    )
    yield _other(
        "softmax-base-2",
        "the softmax takes powers of 2, and not of e",
        lambda layer, original, values: original(
            {**values, "scores": layer.arithmetic.widen(values["scores"]) * np.log(2.0).astype(layer.arithmetic.wide)}
        ),
    )
    if case.spec.sinks:
        return
    yield _other("softmax-sigmoid", "each weight is the sigmoid of its score", _sigmoid)
    if not is_masked:  # what is hidden would weigh -inf
        yield _other(
            "softmax-log",
            "the weights are the logarithms of a softmax",
            lambda layer, original, values: {"attn_weights": np.log(original(values)["attn_weights"])},
        )


def _other(name: str, about: str, in_reference: Override) -> Mistake:
    return Mistake(
        name,
        about,
        "take softmax(scores) over the keys, once, with powers of e",
        "softmax-function",
        ("attn_weights",),
        {"attn_weights": in_reference},
    )


def _again(_: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
    return original({"scores": original(values)["attn_weights"], "mask": np.zeros_like(values["mask"])})


def _sigmoid(layer: Layer, _: Any, values: Values) -> dict[str, np.ndarray]:
    a, scores = layer.arithmetic, layer.arithmetic.widen(values["scores"])
    with np.errstate(over="ignore"):
        weights = 1.0 / (1.0 + np.exp(-scores))
    return {"attn_weights": a.keep(np.where(values["mask"], np.zeros((), a.wide), weights))}


# ---- Dropout ---------------------------------------------------------------------------------------------------------


def dropout(case: Case) -> Iterator[Mistake]:
    """The factor of a dropout that drops nothing. What is dropped is drawn, and cannot be computed again."""
    for percent in (10, 20, 50):
        yield _kept(percent)


def _kept(percent: int) -> Mistake:
    share = 1.0 - percent / 100.0

    def attn_weights(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        found, a = original(values)["attn_weights"], layer.arithmetic
        return {"attn_weights": a.keep(a.widen(found) / a.wide.type(share))}

    return Mistake(
        f"dropout-factor-{percent}",
        f"the weights are divided by {share:g}, as a dropout of {percent} % does that drops nothing",
        "leave out dropout in evaluation, with its factor 1 / (1 - p)",
        "dropout",
        ("attn_weights",),
        {"attn_weights": attn_weights},
    )
