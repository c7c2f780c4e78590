"""Mistakes in the sinks: what takes part in the softmax beside the scores."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from parity.core.case import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.diagnosis.mistakes.record import Mistake, Override, instead
from parity.diagnosis.mistakes.sites import after, attn_weights


def sinks(case: Case) -> Iterator[Mistake]:
    spec = case.spec
    if not spec.sinks:
        return
    mistake = partial(
        Mistake,
        fix="put each head's sink beside its scaled and masked scores, take the softmax, leave out the sink's weight",
        page="sinks",
        stages=("attn_weights",),
    )
    none = {"sinks": instead(lambda: None)}
    yield mistake("sinks-ignored", "there are no sinks", none)
    yield mistake("sinks-zero", "every sink is 0, as before training", {"sinks": after(lambda sinks: sinks * 0.0)})
    if spec.score_scale != 1.0:
        scaled = after(lambda sinks: sinks * spec.score_scale)
        yield mistake("sinks-scaled", "sinks are scaled as the scores are", {"sinks": scaled})
    if 1 < spec.num_kv_heads < spec.num_heads:
        order = np.arange(spec.num_heads).reshape(-1, spec.num_kv_heads).T.ravel()
        tiled = after(lambda sinks: sinks[:, order])
        yield mistake("sinks-of-other-heads", "sinks are those of other heads, tiled", {"sinks": tiled})
    yield mistake(
        "sinks-share-kept",
        "weights are multiplied by the share of the sink, and not by what it leaves",
        attn_weights(_share_kept),
    )
    if case.has_mask or case.is_cached:
        yield mistake(
            "sinks-mask-not-shifted",
            "the sink is the first of the keys, and the mask is that of the keys alone",
            {**none, "attn_weights": _mask_not_shifted},
        )


def _share_kept(_: Layer, found: np.ndarray) -> np.ndarray:
    left = found.sum(axis=-1, keepdims=True)
    return found / np.where(left == 0.0, 1.0, left) * (1.0 - left)


def _mask_not_shifted(layer: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
    scores, mask = values["scores"], values["mask"]
    sinks = layer.arithmetic.widen(layer.parameter("sinks")).reshape(1, -1, 1, 1)
    first, last = np.broadcast_to(sinks, (*scores.shape[:3], 1)), np.zeros((*mask.shape[:3], 1), bool)
    joined = {"scores": np.concatenate([first, scores], axis=3), "mask": np.concatenate([mask, last], axis=3)}
    return {"attn_weights": original({**values, **joined})["attn_weights"][..., 1:]}
