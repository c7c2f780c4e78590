"""Parameters of a softmax that should have none: a finite score of hidden keys, a limit of scores,
and a number that is added to the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.fits.numbers import Fitted, Number, StageTrial, always_of
from parity.explain.diagnosis.fits.words import readable
from parity.measure.core.problem import Problem
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values

PENALTIES = (-1.0, -3.0, -10.0, -30.0, 1.0, 3.0)
"""Scores of hidden keys that are tried before one is fitted."""

LIMITS = (1.0, 3.0, 10.0, 30.0)
SUMMANDS = (1.0, 1e-1, 1e-2, 1e-4, 1e-6)


def softmax_numbers(trial: StageTrial, problem: Problem) -> Iterator[Edit]:
    """Yield each number that would explain the stage."""
    if trial.difference.stage.quantity not in ("attn_weights", "context", "output"):
        return
    for number in _numbers(problem):
        for value in Fitted(trial, number).numbers():
            yield trial.difference.pattern(
                number.name,
                number.words.format(readable(value)),
                {"value": value},
                1,
                families=number.families(trial.difference, value),
                injected=number.edit(value),
            )


def _numbers(problem: Problem) -> Iterator[Number]:
    """Yield the numbers; their words have a placeholder for the number."""
    case = problem.case
    of_leaking, of_softmax = always_of(of.LEAKING), always_of(of.SOFTMAX)
    if case.has_mask or case.is_cached:
        words = "the scores of hidden keys are {}"
        yield Number("hidden score", words, math.nan, PENALTIES, _filled, of_leaking)
        words = "{} is added to the scores of hidden keys"
        yield Number("penalty", words, math.nan, PENALTIES, _added, of_leaking)
        words = "scores below {0}, also of hidden keys, are raised to {0}"
        yield Number("lowest score", words, math.nan, PENALTIES, _raised_after_mask, of_leaking)
    words = "scores are limited to {0} and -{0}"
    yield Number("score limit", words, math.nan, LIMITS, _limited, of_softmax)
    words = "{} is added to the sum of the softmax, after the highest score is subtracted"
    yield Number("summand", words, math.nan, SUMMANDS, _with_summand, of_softmax)
    # In a cache, the same number is the score of a visible empty slot.
    if not (problem.spec.sinks or case.is_cached):
        words = "{} is added to the sum of the exponentials of the softmax"
        yield Number("exponential", words, math.nan, SUMMANDS, _with_exponential, of_softmax)


def _of_scores(change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Edit:
    """Return the edit that passes other scores to the softmax, which hides no keys."""

    def attn_weights(layer: Layer, original: Override, values: Values) -> Any:
        scores, mask = layer.arithmetic.widen(values["scores"]), values["mask"]
        wrong = change(scores, mask).astype(scores.dtype)
        return original({**values, "scores": wrong, "mask": np.zeros_like(mask)})

    return Edit(overrides={"attn_weights": attn_weights})


def _filled(score: float) -> Edit:
    def filled(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.where(mask, score, scores)

    return _of_scores(filled)


def _added(penalty: float) -> Edit:
    def added(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return scores + penalty * mask

    return _of_scores(added)


def _raised_after_mask(lowest: float) -> Edit:
    def raised(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.maximum(np.where(mask, -np.inf, scores), lowest)

    return _of_scores(raised)


def _limited(largest: float) -> Edit:
    def attn_weights(layer: Layer, original: Override, values: Values) -> Any:
        scores = layer.arithmetic.widen(values["scores"])
        return original({**values, "scores": np.clip(scores, -abs(largest), abs(largest))})

    return Edit(overrides={"attn_weights": attn_weights})


def _with_summand(summand: float) -> Edit:
    """Return the edit that adds a number to sums of exponentials relative to the highest."""

    def added(highest: np.ndarray) -> np.ndarray:
        return np.full_like(highest, summand)

    return _with_larger_sum(added)


def _with_exponential(summand: float) -> Edit:
    """Return the edit that adds a number to sums of exponentials, as a sink does."""

    def added(highest: np.ndarray) -> np.ndarray:
        return summand * np.exp(-highest)

    return _with_larger_sum(added)


def _with_larger_sum(summand: Callable[[np.ndarray], np.ndarray]) -> Edit:
    def attn_weights(layer: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        a = layer.arithmetic
        weights = a.widen(original(values)["attn_weights"])
        visible = np.where(values["mask"], -np.inf, a.widen(values["scores"]))
        highest = visible.max(axis=-1, keepdims=True, initial=-np.inf)
        highest = np.where(np.isfinite(highest), highest, 0.0).astype(weights.dtype)
        total = np.exp(visible - highest).sum(axis=-1, keepdims=True)
        share = np.divide(total, total + summand(highest), where=total > 0.0, out=0.0 * total)
        return {"attn_weights": a.keep(weights * share)}

    return Edit(overrides={"attn_weights": attn_weights})
