"""Parts of the norm of queries and keys: what they are divided by, over which axis, and eps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mha_spec import Norm
from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.fits.changes import part
from parity.explain.diagnosis.fits.numbers import EPSILONS, Fitted, Number, StageTrial
from parity.explain.diagnosis.fits.words import instead_of
from parity.measure.core.problem import Problem

Standardise = Callable[[np.ndarray, Norm], np.ndarray]
"""Returns normalized values, before they are multiplied by a weight."""

WHOSE = {"qk": "queries and keys", "q": "queries", "k": "keys"}


def _centered(x: np.ndarray, norm: Norm, axis: int = -1) -> np.ndarray:
    """Subtract the mean, if the norm does."""
    if norm.kind != "layer":
        return x
    return x - x.mean(axis=axis, keepdims=True)


def by_mean_square(x: np.ndarray, norm: Norm) -> np.ndarray:
    x = _centered(x, norm)
    return x / ((x * x).mean(axis=-1, keepdims=True) + norm.eps)


def by_sum(x: np.ndarray, norm: Norm) -> np.ndarray:
    x = _centered(x, norm)
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + norm.eps)


def over_tokens(x: np.ndarray, norm: Norm) -> np.ndarray:
    """Normalize (B, N, T, H), or (B, T, width), over the tokens of a sequence."""
    x = _centered(x, norm, axis=-2)
    return x / np.sqrt((x * x).mean(axis=-2, keepdims=True) + norm.eps)


def over_heads(x: np.ndarray, norm: Norm) -> np.ndarray:
    """Normalize (B, N, T, H) over the heads."""
    x = _centered(x, norm, axis=1)
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + norm.eps)


def by_largest(x: np.ndarray, norm: Norm) -> np.ndarray:
    return x / (np.abs(x).max(axis=-1, keepdims=True) + norm.eps)


def by_unbiased_deviation(x: np.ndarray, norm: Norm) -> np.ndarray:
    """Divide by an unbiased standard deviation, as `std` of torch and pandas."""
    x = _centered(x, norm)
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) / (x.shape[-1] - 1) + norm.eps)


FORMS: dict[str, Standardise] = {
    "are divided by their mean square instead of its root": by_mean_square,
    "are divided by the root of their sum of squares instead of the mean": by_sum,
    "are normalized over the tokens": over_tokens,
    "are normalized over the heads": over_heads,
    "are divided by their largest feature": by_largest,
    "are divided by the root of their sum of squares over one feature less": by_unbiased_deviation,
}


def norm_parts(problem: Problem) -> Iterator[Edit]:
    """Yield other norms of queries, of keys, and of both."""
    if problem.spec.qk_norm is None:
        return
    for names, whose in WHOSE.items():
        for words, form in FORMS.items():
            change = _standardised(names, form)
            yield part(problem, "norm", f"{whose} {words}", change, of.QK_NORM)


def _standardised(names: str, form: Standardise) -> Edit:
    def standardised(
        _: Any, original: Override, name: str, x: np.ndarray, norm: Norm
    ) -> np.ndarray:
        if name not in names:
            return original(name, x, norm)
        return form(x, norm).astype(x.dtype)

    return Edit(overrides={"standardised": standardised})


def norm_numbers(trial: StageTrial, problem: Problem) -> Iterator[Edit]:
    """Yield a different eps of queries alone, or of keys alone."""
    norm = problem.spec.qk_norm
    if norm is None:
        return
    for name, whose in (("q", "queries"), ("k", "keys")):
        number = Number("eps", name, norm.eps, EPSILONS, partial(_with_eps, name))
        for value in Fitted(trial, number).numbers():
            wrong, right = instead_of(value, norm.eps)
            words = f"the eps of the norm of {whose} is {wrong} instead of {right}"
            fitted = {"value": value, "expected": norm.eps}
            yield trial.difference.pattern(
                "eps", words, fitted, 1, families=(of.QK_NORM,), injected=number.edit(value)
            )


def _with_eps(name: str, eps: float) -> Edit:
    """Return the edit of the eps of the norm of queries, or of keys."""

    def norm(_: Any, original: Override, which: str) -> Norm | None:
        right = original(which)
        if which != name or right is None:
            return right
        return replace(right, eps=eps)

    return Edit(overrides={"norm": norm})
