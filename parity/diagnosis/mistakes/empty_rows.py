"""Mistakes in rows of the attention weights that see no key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parity.core.cases import Case
from parity.core.reference import Layer
from parity.diagnosis.mistakes.record import Mistake, Plan, breaking

FIX = "give 0 for a row whose every key is hidden, by the mask and not by its scores"


def empty_rows(case: Case) -> Iterator[Mistake]:
    """Whoever masks may empty rows, by a wrong mask at least; a sink fills them."""
    if (case.has_mask or case.is_cached) and not case.spec.sinks:
        yield _mistake(
            case,
            "nan",
            "rows without a key are NaN",
            lambda scores: np.full_like(scores, np.nan),
            lambda plan, scores: plan.xp.zeros_like(scores) + np.nan,
        )
        yield _mistake(
            case,
            "mean",
            "rows without a key weigh all keys alike",
            lambda scores: np.full_like(scores, 1.0 / scores.shape[-1]),
            lambda plan, scores: plan.xp.ones_like(scores) / scores.shape[-1],
        )
        yield _mistake(
            case,
            "unmasked",
            "rows without a key see every key",
            _softmax,
            lambda plan, scores: plan.sibling.masked_softmax(scores),
        )


def _mistake(case: Case, name: str, about: str, of_scores: Callable[[np.ndarray], np.ndarray], planted: Any) -> Mistake:
    """Another row for one without a key, made of its scores as they are before anything is hidden."""

    def of_empty_rows(layer: Layer, _: Any, attn_weights: np.ndarray, scores: np.ndarray, is_empty: Any) -> np.ndarray:
        wrong = layer.arithmetic.keep(of_scores(layer.arithmetic.widen(scores)))
        return np.where(is_empty, wrong, attn_weights)

    def softmax(plan: Plan, original: Any, scores: Any, mask: Any = None, *sinks: Any) -> Any:
        found = original(scores, mask, *sinks)
        return found if mask is None else plan.xp.where(mask.all(-1)[..., None], planted(plan, scores), found)

    has_some = case.random_mask or 0 in (case.key_padding_lengths or ())
    return Mistake(
        f"empty-row-{name}",
        about,
        FIX,
        "empty-rows",
        ("attn_weights",),
        {"of_empty_rows": of_empty_rows},
        breaking(masked_softmax=softmax) if has_some else None,
        shows_alone=has_some,
    )


def _softmax(scores: np.ndarray) -> np.ndarray:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
