"""Mistakes in rows of the attention weights that see no key."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from parity.core.case import Case
from parity.core.reference import Layer
from parity.diagnosis.mistakes.record import Mistake, Override


def empty_rows(case: Case) -> Iterator[Mistake]:
    """Whoever masks may empty rows, by a wrong mask at least; a sink fills them."""
    if not (case.has_mask or case.is_cached) or case.spec.sinks:
        return
    for name, about, of_scores in (
        ("nan", "rows without a key are NaN", lambda scores: np.full_like(scores, np.nan)),
        (
            "mean",
            "rows without a key weigh all keys alike",
            lambda scores: np.full_like(scores, 1.0 / scores.shape[-1]),
        ),
        ("unmasked", "rows without a key see every key", _softmax),
    ):
        yield Mistake(
            f"empty-row-{name}",
            about,
            {"of_empty_rows": _made(of_scores)},
            fix="give 0 for a row whose every key is hidden, by the mask and not by its scores",
            page="empty-rows",
            stages=("attn_weights",),
            shows_alone=case.random_mask or 0 in (case.key_padding_lengths or ()),
        )


def _made(of_scores: Callable[[np.ndarray], np.ndarray]) -> Override:
    """Make another row for one without a key, of its scores as they are before anything is hidden."""

    def of_empty_rows(
        layer: Layer, _: Override, attn_weights: np.ndarray, scores: np.ndarray, is_empty: np.ndarray
    ) -> np.ndarray:
        wrong = layer.arithmetic.keep(of_scores(layer.arithmetic.widen(scores)))
        return np.where(is_empty, wrong, attn_weights)

    return of_empty_rows


def _softmax(scores: np.ndarray) -> np.ndarray:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
