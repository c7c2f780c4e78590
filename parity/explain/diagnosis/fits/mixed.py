"""Patterns of weighted sums: active dropout, and heads that are mixed in the output.

Dropout of attention weights also shows in later stages: the weights of a context are solved for if
a row attends to no more keys than values have features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.families import Families
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.fits.record import Difference
from parity.explain.diagnosis.fits.words import NEAR, readable
from parity.measure.core.compare import size_of
from parity.measure.core.problem import Problem
from parity.measure.core.stages import Stage
from parity.measure.text import and_listed

LEAST_FACTOR = 1.01
"""The least factor of dropout."""

FEWEST = 8
"""The least number of dropped and of remaining values that distinguishes dropout from a few lost
values.
"""

DEVIATIONS = 5.0
"""The largest difference between the dropped share and the share that follows from the factor."""

MOST_ROWS = 4096
"""Rows whose weights are solved for."""

MOST_WIDE = 512
"""The largest width of an out_proj that is inverted; wider ones take seconds."""

MOST_HEADS = 16
"""The largest number of heads whose parts of an output are distinguished."""

OVERDETERMINED = 16
"""The values of a few tokens, for each number of a mixture, that reject most mixtures."""

LEAST = 1e-3
"""The least error of a number in a mixture of heads; smaller ones are reported for the whole
output.
"""

UNPREDICTED = 0.1
"""The share of the error, root mean square, that free numbers of a mixture may leave in tokens from
which they were not fitted.
"""

WORST = 1e4
"""The largest condition number of an out_proj that is inverted."""


# ---- Dropout -------------------------------------------------------------------------------------


def dropouts(difference: Difference) -> Iterator[Edit]:
    """Yield dropout in the stage, or in the weights before it."""
    if difference.stage.is_exact:
        return
    if not np.isfinite(difference.actual).all() or not np.isfinite(difference.expected).all():
        return
    edit = _dropped(difference)
    if edit is None and difference.stage.quantity in ("context", "output"):
        edit = _dropped_behind(difference)
    if edit is not None:
        yield edit


def _dropped(difference: Difference) -> Edit | None:
    """Return dropout of the values of the stage itself."""
    is_large = difference.compared & (np.abs(difference.expected) > 2.0 * difference.allowed["max"])
    dropped = is_large & (difference.actual == 0.0)
    remaining = is_large & (difference.actual != 0.0)
    a, e = difference.actual[remaining], difference.expected[remaining]
    factor = 0.0
    if e.size:
        factor = float((a * e).sum() / (e * e).sum())
    if not _is_dropout(dropped, remaining, factor):
        return None
    # A dropped value may also be too small to tell.
    candidate = np.where(difference.actual == 0.0, 0.0, factor * difference.expected)
    if not difference.is_explained_by(candidate, factor):
        return None
    return _dropout(difference, difference.stage.kind, dropped, remaining, factor)


def _is_dropout(dropped: np.ndarray, remaining: np.ndarray, factor: float) -> bool:
    """Return True if the dropped share fits the factor of the remaining values."""
    num_dropped, num_remaining = np.count_nonzero(dropped), np.count_nonzero(remaining)
    if factor < LEAST_FACTOR or num_dropped < FEWEST or num_remaining < FEWEST:
        return False
    p, n = 1.0 - 1.0 / factor, num_dropped + num_remaining
    return bool(abs(num_dropped / n - p) <= DEVIATIONS * np.sqrt(p * (1.0 - p) / n))


def _dropout(
    difference: Difference, whose: str, dropped: np.ndarray, remaining: np.ndarray, factor: float
) -> Edit:
    """Return the pattern of dropped values, and of a factor of those that remain."""
    num_dropped, p = np.count_nonzero(dropped), 1.0 - 1.0 / factor
    zeros = f"{num_dropped} of {num_dropped + np.count_nonzero(remaining)} {whose} are 0"
    others = f"the others {readable(factor)} times what they should be"
    return difference.pattern(
        "dropout",
        f"{zeros}, and {others}: dropout is active, with p = {p:.2g}",
        {"factor": factor, "p": p},
        1,
        families=(of.DROPOUT,),
    )


def _dropped_behind(difference: Difference) -> Edit | None:
    """Return dropout of the attention weights before a context, or an output."""
    weights, v = (
        difference.other_stages.get(str(Stage("attn_weights"))),
        difference.other_stages.get(str(Stage("v"))),
    )
    if weights is None or v is None or difference.problem is None:
        return None
    if difference.stage.step is not None or difference.stage.path:
        return None
    v = np.repeat(v.astype(np.float64), weights.shape[1] // v.shape[1], axis=1)
    context = difference.actual
    if difference.stage.quantity == "output":
        context = _context_of_output(difference, difference.problem)
    if context is None or np.prod(weights.shape[:3]) > MOST_ROWS or not np.isfinite(weights).all():
        return None
    weights = weights.astype(np.float64)
    solved = _solved_weights(weights, v, context)
    if solved is None:
        return None
    ratio = np.divide(solved, weights, out=np.ones_like(solved), where=weights > 0.0)
    remaining = (ratio > 0.5) & (weights > 0.0)
    dropped = (ratio <= 0.5) & (weights > 0.0)
    # Ratios of small values are inexact.
    is_exact = remaining & (weights > 0.05 * weights.max(axis=-1, keepdims=True))
    factor = 0.0
    if is_exact.any():
        factor = float(np.median(ratio[is_exact]))
    if not _is_dropout(dropped, remaining, factor):
        return None
    candidate = np.where(dropped, 0.0, factor * weights) @ v
    if difference.stage.quantity == "output":
        candidate = _output_of(difference, difference.problem, candidate)
    if not difference.is_explained_by(candidate, factor):
        return None
    return _dropout(difference, "attention weights", dropped, remaining, factor)


def _solved_weights(weights: np.ndarray, v: np.ndarray, context: np.ndarray) -> np.ndarray | None:
    """Return the weights (B, N, T, S) of a context; None if a row attends to more keys than values
    have features.
    """
    solved = np.zeros(weights.shape)
    for b, n, t in np.ndindex(*weights.shape[:3]):
        keys = np.flatnonzero(weights[b, n, t])
        if len(keys) > v.shape[3]:
            return None
        solved[b, n, t, keys] = np.linalg.lstsq(v[b, n, keys].T, context[b, n, t], rcond=None)[0]
    return solved


def _context_of_output(difference: Difference, problem: Problem) -> np.ndarray | None:
    """Return the context of an output; None if it cannot be computed."""
    projection = _out_proj(problem)
    if projection is None:
        return None
    weight, bias = projection
    if weight.shape[0] != weight.shape[1] or len(weight) > MOST_WIDE:
        return None
    if np.linalg.cond(weight) > WORST:
        return None
    combined = np.linalg.solve(weight, (difference.actual - bias).reshape(-1, weight.shape[0]).T).T
    heads = combined.reshape(*difference.actual.shape[:2], problem.spec.num_heads, -1)
    return heads.swapaxes(1, 2)


def _output_of(difference: Difference, problem: Problem, context: np.ndarray) -> np.ndarray:
    """Return the output of a context, which was computed from one with the same projection."""
    combined = context.swapaxes(1, 2).reshape(*difference.actual.shape[:2], -1)
    projection = _out_proj(problem)
    if projection is None:
        return combined
    weight, bias = projection
    return combined @ weight.T + bias


def _out_proj(problem: Problem) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the weight and bias of out_proj, if nothing lies between it and the context."""
    if problem.spec.gate is not None or not problem.spec.out_proj:
        return None
    weight = problem.weights["out_proj.weight"].astype(np.float64)
    bias = problem.weights.get("out_proj.bias")
    if bias is None:
        return weight, np.zeros(len(weight))
    return weight, bias.astype(np.float64)


# ---- Heads in the output -------------------------------------------------------------------------


def lost_rows(difference: Difference) -> Iterator[Edit]:
    """Yield an output in which the context of some heads is 0 in some rows, as if a kernel lost
    them.
    """
    heads_of_output = _heads_of_output(difference)
    if heads_of_output is None or not difference.is_enough(1):
        return
    context, columns, bias = heads_of_output
    parts = np.stack(_parts_of_output(context, columns))  # (N, B, T, E)
    candidate = difference.expected.copy()
    lost = []
    for b, t in np.argwhere(difference.bad.any(axis=-1)):
        shares, *_ = np.linalg.lstsq(parts[:, b, t].T, difference.actual[b, t] - bias, rcond=None)
        for n in np.flatnonzero(shares < 0.5):
            lost.append((int(n), int(b), int(t)))
        candidate[b, t] = bias + parts[shares >= 0.5, b, t].sum(axis=0)
    if lost and difference.is_explained_by(candidate):
        count, size = len(lost), len(columns) * context.shape[0] * context.shape[2]
        words = (
            f"the context of {count} of {size} rows of heads is 0 there, as if a kernel lost rows"
        )
        fitted = {"head, sequence, position": lost}
        yield difference.pattern("lost rows", words, fitted, 1, families=(of.LOST,))


def mixtures(difference: Difference) -> Iterator[Edit]:
    """Yield an output whose heads are multiplied, exchanged or mixed: one number for each pair of
    heads.
    """
    heads_of_output = _heads_of_output(difference)
    if heads_of_output is None:
        return
    context, columns, bias = heads_of_output
    heads = len(columns)
    if heads < 2 or heads > MOST_HEADS or not difference.is_enough(heads**2):
        return
    by_token = context.swapaxes(1, 2).reshape(-1, heads, context.shape[3])  # (B T, N, Hv)
    wanted = (difference.actual - bias).reshape(len(by_token), -1)
    if not _may_be_a_mixture(difference, by_token, wanted, columns):
        return
    terms = _terms_of_mixture(by_token, columns)
    coefficients, _, rank, _ = np.linalg.lstsq(terms, wanted.ravel(), rcond=None)
    mixture = coefficients.reshape(heads, heads)
    is_wrong = np.abs(mixture - np.eye(heads)).max(axis=1) > LEAST
    if not is_wrong.any() or rank != heads**2:
        return
    mixed = (terms @ coefficients).reshape(difference.expected.shape) + bias
    if not difference.is_explained_by(mixed):
        return
    families = _families_of_mixture(mixture)
    if not families and not _predicts_other_tokens(difference, by_token, wanted, columns):
        return
    yield difference.pattern(
        "heads in output",
        _mixture_words(mixture, np.flatnonzero(is_wrong)),
        {"heads": mixture.tolist()},
        heads**2,
        families=families,
    )


def _may_be_a_mixture(
    difference: Difference, by_token: np.ndarray, wanted: np.ndarray, columns: list[np.ndarray]
) -> bool:
    """Return False if the output of a few tokens is not a mixture of their heads: all tokens of a
    wide layer take seconds.
    """
    heads = len(columns)
    num_tokens = math.ceil(OVERDETERMINED * heads**2 / wanted.shape[1])
    step = max(1, len(by_token) // num_tokens) | 1
    if step == 1:
        return True
    # From the last token on: the first ones of a causal layer have equal heads.
    terms = _terms_of_mixture(by_token[::-step], columns)
    some = wanted[::-step].ravel()
    coefficients, _, rank, _ = np.linalg.lstsq(terms, some, rcond=None)
    if rank != heads**2:
        return True  # these tokens do not tell
    # Least squares leaves no more than the right coefficients do, in the root mean square.
    left = float(np.sqrt(np.mean((terms @ coefficients - some) ** 2)))
    growth = 1.0
    if difference.scale:
        growth = max(growth, float(np.abs(difference.actual).max()) / difference.scale)
    return left <= growth * difference.allowed["max"]


def _predicts_other_tokens(
    difference: Difference, by_token: np.ndarray, wanted: np.ndarray, columns: list[np.ndarray]
) -> bool:
    """Return True if the mixture of half of the tokens explains the other half.

    A free number for each pair of heads resembles many bugs within a wide budget, but only at the
    tokens from which the numbers were fitted.
    """
    predicted = np.empty_like(wanted)
    for half in (0, 1):
        own = _terms_of_mixture(by_token[half::2], columns)
        coefficients, _, rank, _ = np.linalg.lstsq(own, wanted[half::2].ravel(), rcond=None)
        if rank != len(columns) ** 2:
            return False
        others = _terms_of_mixture(by_token[1 - half :: 2], columns) @ coefficients
        predicted[1 - half :: 2] = others.reshape(-1, wanted.shape[1])
    return size_of(predicted - wanted) <= UNPREDICTED * size_of(difference.errors)


def _terms_of_mixture(by_token: np.ndarray, columns: list[np.ndarray]) -> np.ndarray:
    """Return what each head of a context (tokens, N, Hv) adds to the output by the columns of each
    head, (tokens E, N²).
    """
    terms = []
    for column in columns:
        for head in range(len(columns)):
            terms.append((by_token[:, head] @ column.T).ravel())
    return np.stack(terms, axis=1)


def _families_of_mixture(mixture: np.ndarray) -> Families:
    """Return the family of heads that are lost, multiplied or exchanged; none of mixed heads."""
    factors = np.diag(mixture)
    if np.abs(mixture - np.diag(factors)).max() < NEAR:
        distance = np.minimum(np.abs(factors), np.abs(factors - 1.0))
        if (distance < NEAR).all():
            return (of.LOST,)
        return (of.FACTOR,)
    is_source = np.abs(mixture) > 0.5
    is_order = (is_source.sum(axis=0) == 1).all() and (is_source.sum(axis=1) == 1).all()
    if is_order and np.abs(mixture - is_source).max() < NEAR:
        return (of.HEAD_ORDER,)
    return ()


def _heads_of_output(
    difference: Difference,
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray] | None:
    """Return the context (B, N, T, Hv) of an output (B, T, E), the columns of out_proj by head, and
    its bias.
    """
    if (
        difference.problem is None
        or difference.stage.quantity != "output"
        or difference.expected.ndim != 3
    ):
        return None
    context = difference.other_stages.get(str(Stage("context", step=difference.stage.step)))
    projection = _out_proj(difference.problem)
    if context is None or projection is None:
        return None
    if not (np.isfinite(context).all() and np.isfinite(difference.actual).all()):
        return None
    weight, bias = projection
    return context.astype(np.float64), np.split(weight, context.shape[1], axis=1), bias


def _parts_of_output(context: np.ndarray, columns: list[np.ndarray]) -> list[np.ndarray]:
    """Return what each head adds to an output, (B, T, E) each."""
    by_head = zip(context.swapaxes(0, 1), columns, strict=True)
    return [values @ column.T for values, column in by_head]


def _mixture_words(mixture: np.ndarray, wrong: np.ndarray) -> str:
    """Describe the wrong heads of a mixture."""
    heads = [f"head {n} is {_made_of(mixture[n])}" for n in wrong]
    return f"the output uses other heads: {and_listed(heads)}"


def _made_of(coefficients: np.ndarray) -> str:
    """Describe the heads of which one is made."""
    terms = []
    for head, number in enumerate(coefficients):
        if abs(number) > LEAST:
            terms.append(f"{readable(float(number))} * head {head}")
    return " + ".join(terms) or "0"
