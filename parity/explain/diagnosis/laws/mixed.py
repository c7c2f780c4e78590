"""Patterns of weighted sums: active dropout, and heads that are mixed in the output.

Dropout of attention weights also shows in later stages: the weights of a context are solved for if
a row attends to no more keys than values have features.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.explain.diagnosis.bugs.record import Edit, pattern
from parity.explain.diagnosis.laws.record import Seen
from parity.explain.diagnosis.laws.words import readable
from parity.measure.core.stages import Stage
from parity.measure.text import and_listed

LEAST_FACTOR = 1.01
"""The least factor of dropout."""

KEPT = 8
"""The least number of dropped and of kept values that distinguishes dropout from a few lost
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

LEAST = 1e-3
"""The least error of a number in a mixture of heads; smaller ones are reported for the whole
output.
"""

WORST = 1e4
"""The largest condition number of an out_proj that is inverted."""


# ---- Dropout -------------------------------------------------------------------------------------


def dropouts(seen: Seen) -> Iterator[Edit]:
    """Yield dropout in the stage, or in the weights before it."""
    if (
        seen.stage.is_exact
        or not np.isfinite(seen.actual).all()
        or not np.isfinite(seen.expected).all()
    ):
        return
    law = _dropped(seen)
    if law is None and seen.stage.quantity in ("context", "output"):
        law = _dropped_behind(seen)
    if law is not None:
        yield law


def _dropped(seen: Seen) -> Edit | None:
    telling = seen.compared & (np.abs(seen.expected) > 2.0 * seen.allowed["max"])
    lost, kept = telling & (seen.actual == 0.0), telling & (seen.actual != 0.0)
    a, e = seen.actual[kept], seen.expected[kept]
    factor = float((a * e).sum() / (e * e).sum()) if e.size else 0.0
    if not _is_dropout(lost, kept, factor):
        return None
    # A dropped value may also be too small to tell.
    candidate = np.where(seen.actual == 0.0, 0.0, factor * seen.expected)
    return _law(seen.stage.kind, lost, kept, factor) if seen.holds(candidate, factor) else None


def _is_dropout(lost: np.ndarray, kept: np.ndarray, factor: float) -> bool:
    """Return True if the dropped share fits the factor of the kept values."""
    some, others = np.count_nonzero(lost), np.count_nonzero(kept)
    if factor < LEAST_FACTOR or some < KEPT or others < KEPT:
        return False
    p, n = 1.0 - 1.0 / factor, some + others
    return bool(abs(some / n - p) <= DEVIATIONS * np.sqrt(p * (1.0 - p) / n))


def _law(of: str, lost: np.ndarray, kept: np.ndarray, factor: float) -> Edit:
    some, p = np.count_nonzero(lost), 1.0 - 1.0 / factor
    zeros = f"{some} of {some + np.count_nonzero(kept)} {of} are 0"
    others = f"the others {readable(factor)} times what they should be"
    return pattern(
        "dropout",
        f"{zeros}, and {others}: dropout is active, with p = {p:.2g}",
        {"factor": factor, "p": p},
        1,
    )


def _dropped_behind(seen: Seen) -> Edit | None:
    """Return dropout of the attention weights before a context, or an output."""
    weights, v = (seen.others.get(str(Stage(name))) for name in ("attn_weights", "v"))
    problem = seen.problem
    if (
        problem is None
        or seen.stage.step is not None
        or seen.stage.path
        or weights is None
        or v is None
    ):
        return None
    v = np.repeat(v.astype(np.float64), weights.shape[1] // v.shape[1], axis=1)
    context = seen.actual if seen.stage.quantity == "context" else _undone(seen)
    if context is None or np.prod(weights.shape[:3]) > MOST_ROWS or not np.isfinite(weights).all():
        return None
    weights = weights.astype(np.float64)
    solved = np.zeros(weights.shape)
    for b, n, t in np.ndindex(*weights.shape[:3]):
        shown = np.flatnonzero(weights[b, n, t])
        if len(shown) > v.shape[3]:
            return None
        solved[b, n, t, shown] = np.linalg.lstsq(v[b, n, shown].T, context[b, n, t], rcond=None)[0]
    size = weights.max(axis=-1, keepdims=True)
    ratio = np.divide(solved, weights, out=np.ones_like(solved), where=weights > 0.0)
    large = weights > 0.05 * size  # ratios of small values are inexact
    kept = (ratio > 0.5) & (weights > 0.0)
    factor = float(np.median(ratio[kept & large])) if (kept & large).any() else 0.0
    lost = (ratio <= 0.5) & (weights > 0.0)
    if not _is_dropout(lost, kept, factor):
        return None
    made = np.where(lost, 0.0, factor * weights) @ v
    candidate = made if seen.stage.quantity == "context" else _combined(seen, made)
    return _law("attention weights", lost, kept, factor) if seen.holds(candidate, factor) else None


def _undone(seen: Seen) -> np.ndarray | None:
    """Return the context of an output; None if it cannot be computed."""
    if (projection := _out_proj(seen)) is None:
        return None
    weight, bias = projection
    if (
        weight.shape[0] != weight.shape[1]
        or len(weight) > MOST_WIDE
        or np.linalg.cond(weight) > WORST
    ):
        return None
    combined = np.linalg.solve(weight, (seen.actual - bias).reshape(-1, weight.shape[0]).T).T
    heads = seen.problem.spec.num_heads if seen.problem is not None else 1
    return combined.reshape(*seen.actual.shape[:2], heads, -1).swapaxes(1, 2)


def _combined(seen: Seen, context: np.ndarray) -> np.ndarray:
    weight, bias = _out_proj(seen) or (np.eye(1), np.zeros(1))
    return context.swapaxes(1, 2).reshape(*seen.actual.shape[:2], -1) @ weight.T + bias


def _out_proj(seen: Seen) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the weight and bias of out_proj, if nothing lies between it and the context."""
    problem = seen.problem
    if problem is None or problem.spec.gate is not None or not problem.spec.out_proj:
        return None
    weight = problem.weights["out_proj.weight"].astype(np.float64)
    bias = problem.weights.get("out_proj.bias")
    return weight, np.zeros(len(weight)) if bias is None else bias.astype(np.float64)


# ---- Heads in the output -------------------------------------------------------------------------


def lost_rows(seen: Seen) -> Iterator[Edit]:
    """Yield an output in which the context of some heads is 0 in some rows, as if a kernel lost
    them.
    """
    found = _heads_of_output(seen)
    if found is None or not seen.is_enough(1):
        return
    context, columns, bias = found
    parts = np.stack(
        [one @ column.T for column, one in zip(columns, context.swapaxes(0, 1), strict=True)]
    )
    candidate = seen.expected.copy()
    lost = []
    for b, t in np.argwhere(seen.bad.any(axis=-1)):
        shares, *_ = np.linalg.lstsq(parts[:, b, t].T, seen.actual[b, t] - bias, rcond=None)
        lost += [(int(n), int(b), int(t)) for n in np.flatnonzero(shares < 0.5)]
        candidate[b, t] = bias + parts[shares >= 0.5, b, t].sum(axis=0)
    if lost and seen.holds(candidate):
        count, size = len(lost), len(columns) * context.shape[0] * context.shape[2]
        words = (
            f"the context of {count} of {size} rows of heads is 0 there, as if a kernel lost rows"
        )
        yield pattern("lost rows", words, {"head, sequence, position": lost}, 1)


def mixtures(seen: Seen) -> Iterator[Edit]:
    """Yield an output whose heads are multiplied, exchanged or mixed: one number for each pair of
    heads.
    """
    found = _heads_of_output(seen)
    if found is None:
        return
    context, columns, bias = found
    heads = len(columns)
    if heads < 2 or heads > MOST_HEADS or not seen.is_enough(heads**2):
        return
    parts = [one @ column.T for column in columns for one in context.swapaxes(0, 1)]
    terms = np.stack([part.ravel() for part in parts], axis=1)
    numbers, _, rank, _ = np.linalg.lstsq(terms, (seen.actual - bias).ravel(), rcond=None)
    mixture = numbers.reshape(heads, heads)
    wrong = [n for n in range(heads) if np.abs(mixture[n] - np.eye(heads)[n]).max() > LEAST]
    if (
        wrong
        and rank == heads**2
        and seen.holds((terms @ numbers).reshape(seen.expected.shape) + bias)
    ):
        yield pattern(
            "heads in output", _mixture_words(mixture, wrong), {"heads": mixture.tolist()}, heads**2
        )


def _heads_of_output(seen: Seen) -> tuple[np.ndarray, list[np.ndarray], np.ndarray] | None:
    """Return the context (B, N, T, Hv) of an output (B, T, E), the columns of out_proj by head, and
    its bias.
    """
    context = seen.others.get(str(Stage("context", step=seen.stage.step)))
    projection = _out_proj(seen)
    if (
        seen.stage.quantity != "output"
        or context is None
        or projection is None
        or seen.expected.ndim != 3
    ):
        return None
    if not (np.isfinite(context).all() and np.isfinite(seen.actual).all()):
        return None
    weight, bias = projection
    return context.astype(np.float64), np.split(weight, context.shape[1], axis=1), bias


def _mixture_words(mixture: np.ndarray, wrong: list[int]) -> str:
    """Describe the wrong heads of a mixture."""

    def made_of(n: int) -> str:
        some = [m for m in range(len(mixture)) if abs(mixture[n, m]) > LEAST]
        return " + ".join(f"{readable(float(mixture[n, m]))} * head {m}" for m in some) or "0"

    return (
        f"the output uses other heads: {and_listed([f'head {n} is {made_of(n)}' for n in wrong])}"
    )
