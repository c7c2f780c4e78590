"""Mistakes in the sinks: what takes part in the softmax beside the scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from parity.core.case import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.diagnosis.mistakes.record import Mistake, Override, instead

FIX = "put each head's sink beside its scaled and masked scores, take the softmax, leave out the sink's weight"


def sinks(case: Case) -> Iterator[Mistake]:
    spec = case.spec
    if not spec.sinks:
        return
    group_size = spec.num_heads // spec.num_kv_heads
    yield _mistake("ignored", "there are no sinks", {"sinks": instead(lambda: None)})
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
    )
    if case.has_mask or case.is_cached:
        yield _mistake(
            "mask-not-shifted",
            "the sink is the first of the keys, and the mask is that of the keys alone",
            {"sinks": instead(lambda: None), "attn_weights": _mask_not_shifted},
        )


def _mistake(name: str, about: str, in_reference: dict[str, Override]) -> Mistake:
    stages = ("attn_weights",)
    return Mistake(f"sinks-{name}", about, FIX, "sinks", stages, in_reference)


def _changed(name: str, about: str, change: Any) -> Mistake:
    """Other numbers for the sinks."""

    def in_reference(layer: Layer, _: Any) -> np.ndarray:
        return change(layer.arithmetic.widen(layer.parameter("sinks"))).reshape(1, -1, 1, 1)

    return _mistake(name, about, {"sinks": in_reference})


def _share_kept(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
    found = layer.arithmetic.widen(original(values)["attn_weights"])
    left = found.sum(axis=-1, keepdims=True)
    return {"attn_weights": layer.arithmetic.keep(found / np.where(left == 0.0, 1.0, left) * (1.0 - left))}


def _mask_not_shifted(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
    scores, mask = values["scores"], values["mask"]
    sinks = layer.arithmetic.widen(layer.parameter("sinks")).reshape(1, -1, 1, 1)
    first, last = np.broadcast_to(sinks, (*scores.shape[:3], 1)), np.zeros((*mask.shape[:3], 1), bool)
    joined = {"scores": np.concatenate([first, scores], axis=3), "mask": np.concatenate([mask, last], axis=3)}
    return {"attn_weights": original({**values, **joined})["attn_weights"][..., 1:]}
