"""Mistakes in rows of the attention weights that see no key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parity.core.case import Case
from parity.core.reference import Layer
from parity.diagnosis.mistakes.record import Mistake

FIX = "give 0 for a row whose every key is hidden, by the mask and not by its scores"


def empty_rows(case: Case) -> Iterator[Mistake]:
    """Whoever masks may empty rows, by a wrong mask at least; a sink fills them."""
    if (case.has_mask or case.is_cached) and not case.spec.sinks:
        yield _mistake(
            case,
            "nan",
            "rows without a key are NaN",
            lambda scores: np.full_like(scores, np.nan),
        )
        yield _mistake(
            case,
            "mean",
            "rows without a key weigh all keys alike",
            lambda scores: np.full_like(scores, 1.0 / scores.shape[-1]),
        )
        yield _mistake(
            case,
            "unmasked",
            "rows without a key see every key",
            _softmax,
        )


def _mistake(case: Case, name: str, about: str, of_scores: Callable[[np.ndarray], np.ndarray]) -> Mistake:
    """Another row for one without a key, made of its scores as they are before anything is hidden."""

    def of_empty_rows(layer: Layer, _: Any, attn_weights: np.ndarray, scores: np.ndarray, is_empty: Any) -> np.ndarray:
        wrong = layer.arithmetic.keep(of_scores(layer.arithmetic.widen(scores)))
        return np.where(is_empty, wrong, attn_weights)

    has_some = case.random_mask or 0 in (case.key_padding_lengths or ())
    return Mistake(
        f"empty-row-{name}",
        about,
        FIX,
        "empty-rows",
        ("attn_weights",),
        {"of_empty_rows": of_empty_rows},
        shows_alone=has_some,
    )


def _softmax(scores: np.ndarray) -> np.ndarray:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
