"""Mistakes in the sinks: what takes part in the softmax beside the scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from parity.core.cases import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.diagnosis.mistakes.record import Mistake, Override, Plan, breaking, instead

FIX = "put each head's sink beside its scaled and masked scores, take the softmax, leave out the sink's weight"


def sinks(case: Case) -> Iterator[Mistake]:
    spec = case.spec
    if not spec.sinks:
        return
    group_size = spec.num_heads // spec.num_kv_heads
    yield _mistake("ignored", "there are no sinks", {"sinks": instead(lambda: None)}, _without_sinks)
    yield _changed("zero", "every sink is 0, as before training", lambda sinks: sinks * 0.0)
    if spec.score_scale != 1.0:
        yield _changed("scaled", "sinks are scaled as the scores are", lambda sinks: sinks * spec.score_scale)
    if group_size > 1 and spec.num_kv_heads > 1:
        tiled = np.arange(spec.num_heads).reshape(group_size, -1).T.reshape(-1)
        of_others = _changed("of-other-heads", "sinks are those of other heads, tiled", lambda sinks: sinks[tiled])
        yield of_others
    yield _mistake(
        "share-kept",
        "weights are multiplied by the share of the sink, and not by what it leaves",
        {"attn_weights": _share_kept},
        _share_kept_in_sibling,
    )
    if case.has_mask or case.is_cached:
        yield _mistake(
            "mask-not-shifted",
            "the sink is the first of the keys, and the mask is that of the keys alone",
            {"sinks": instead(lambda: None), "attn_weights": _mask_not_shifted},
            _mask_not_shifted_in_sibling,
        )


def _mistake(name: str, about: str, in_reference: dict[str, Override], in_sibling: Override) -> Mistake:
    stages = ("attn_weights",)
    return Mistake(f"sinks-{name}", about, FIX, "sinks", stages, in_reference, breaking(masked_softmax=in_sibling))


def _changed(name: str, about: str, change: Any) -> Mistake:
    """Other numbers for the sinks."""

    def in_reference(layer: Layer, _: Any) -> np.ndarray:
        return change(layer.arithmetic.widen(layer.parameter("sinks"))).reshape(1, -1, 1, 1)

    def in_sibling(_: Plan, masked_softmax: Any, scores: Any, mask: Any = None, sinks: Any = None) -> Any:
        return masked_softmax(scores, mask, None if sinks is None else change(sinks))

    return _mistake(name, about, {"sinks": in_reference}, in_sibling)


def _without_sinks(_: Plan, masked_softmax: Any, scores: Any, mask: Any = None, sinks: Any = None) -> Any:
    return masked_softmax(scores, mask)


def _share_kept(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
    found = layer.arithmetic.widen(original(values)["attn_weights"])
    left = found.sum(axis=-1, keepdims=True)
    return {"attn_weights": layer.arithmetic.keep(found / np.where(left == 0.0, 1.0, left) * (1.0 - left))}


def _share_kept_in_sibling(_: Plan, masked_softmax: Any, scores: Any, mask: Any = None, sinks: Any = None) -> Any:
    left = masked_softmax(scores, mask, sinks).sum(axis=-1, keepdims=True)
    return masked_softmax(scores, mask) * (1.0 - left)


def _mask_not_shifted(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
    scores, mask = values["scores"], values["mask"]
    sinks = layer.arithmetic.widen(layer.parameter("sinks")).reshape(1, -1, 1, 1)
    first, last = np.broadcast_to(sinks, (*scores.shape[:3], 1)), np.zeros((*mask.shape[:3], 1), bool)
    joined = {"scores": np.concatenate([first, scores], axis=3), "mask": np.concatenate([mask, last], axis=3)}
    return {"attn_weights": original({**values, **joined})["attn_weights"][..., 1:]}


def _mask_not_shifted_in_sibling(
    plan: Plan, masked_softmax: Any, scores: Any, mask: Any = None, sinks: Any = None
) -> Any:
    xp = plan.xp
    if sinks is None or mask is None:
        return masked_softmax(scores, mask, sinks)
    column = xp.broadcast_to(sinks.reshape(1, -1, 1, 1), (*scores.shape[:3], 1))
    mask = xp.broadcast_to(mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)), tuple(scores.shape))
    joined = xp.concatenate([mask, xp.zeros_like(mask[..., :1])], axis=3)
    return masked_softmax(xp.concatenate([column, scores], axis=3), joined)[..., 1:]
