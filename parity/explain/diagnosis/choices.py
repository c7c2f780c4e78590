"""Legitimate choices of implementations: the precision of scores, and the form of the softmax. None
is a bug.

Each has its own noise, which the budgets of the stages include: a layer that keeps its scores in
bfloat16 is less exact in the scores and everything after them than one that keeps them in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs.record import Override
from parity.measure.core.compare import unit_of_rounding
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values, stage_named
from parity.measure.core.trace import nudged_values

HALF = ("bfloat16", "float16")


@dataclass(frozen=True, eq=False)
class Choice:
    """Another valid way to compute a stage.

    Attributes:
        about: a description, with `{dtype}` for the problem's dtype.
        arithmetic: arithmetic of the same-precision reference; by default the hardware's.
        overrides: overrides of the same-precision reference.
    """

    about: str
    arithmetic: str = ""
    overrides: Mapping[str, Override] = field(default_factory=dict)


def _rounded_softmax(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
    """Round every step of the softmax."""
    a = layer.arithmetic
    shown = np.where(values["mask"], -np.inf, a.widen(values["scores"]))
    highest = shown.max(axis=-1, keepdims=True, initial=-np.inf)
    highest = _finite(highest).astype(a.wide)
    exponentials = a.widen(np.exp(a.widen(shown - highest)))
    total = a.widen(exponentials.sum(axis=-1, keepdims=True))
    sinks = layer.sinks()
    if sinks is not None:
        total = a.widen(total + np.exp(a.widen(a.widen(sinks) - highest)))
    is_empty = total == 0.0
    attn_weights = a.keep(exponentials / np.where(is_empty, a.wide.type(1.0), total))
    return {"attn_weights": layer.of_empty_rows(attn_weights, values["scores"], is_empty)}


def _log_sum_exp(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
    """Return exp(s - log sum exp): the logarithm is as large as the scores, and rounded like them.

    It belongs to the kernel's own scores, which differ from the recorded ones by their rounding.
    """
    a = layer.arithmetic
    own_scores = nudged_values(
        {"scores": values["scores"]}, unit_of_rounding(a.wide.name), np.random.default_rng(0)
    )
    shown = np.where(values["mask"], -np.inf, values["scores"].astype(a.wide))
    of_kernel = np.where(values["mask"], -np.inf, own_scores["scores"].astype(a.wide))
    sinks = layer.sinks()
    highest = of_kernel.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        highest = np.maximum(highest, sinks)
    highest = _finite(highest).astype(a.wide)
    total = np.exp(of_kernel - highest).sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - highest)
    with np.errstate(divide="ignore"):
        logarithm = _finite((highest + np.log(total)).astype(a.wide))
    attn_weights = a.keep(np.exp(shown - logarithm.astype(a.wide)))
    return {"attn_weights": layer.of_empty_rows(attn_weights, values["scores"], total == 0.0)}


def _finite(x: np.ndarray) -> np.ndarray:
    """Return an array with 0 for infinities and NaN: rows without a key have no largest score."""
    return np.where(np.isfinite(x), x, 0.0)


def _of_exact_sums(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
    """Return the context of a kernel that divides by its sums, and whose recorded weights are
    computed afterwards.
    """
    stages = original(values)
    if layer.sinks() is not None:  # which are part of the sums
        return stages
    a = layer.arithmetic
    total = a.widen(values["attn_weights"]).sum(axis=-1, keepdims=True)
    scores = values["scores"][:, :, : total.shape[2]]  # a sample has scores of more rows
    shown = np.where(values["mask"], 0.0, np.abs(scores))
    # The logarithm and the scores of the kernel are each off by a unit of rounding of the largest
    # score at most.
    largest = np.maximum(shown.max(axis=-1, keepdims=True, initial=0.0), 1.0)
    is_rounded = np.abs(total - 1.0) <= 2.0 * unit_of_rounding(a.wide.name) * largest
    context = a.widen(stages["context"]) / np.where(is_rounded, total, 1.0)
    return {"context": a.keep(context.astype(a.wide))}


AS_THE_REFERENCE = Choice("")
UNFUSED = Choice("every operation of RoPE and of norms rounds to {dtype}", "unfused")
SCORES = Choice("scores are kept in {dtype}", "unfused-scores")
SOFTMAX = Choice(
    "scores, and every step of the softmax, are kept in {dtype}",
    "unfused-scores",
    {"attn_weights": _rounded_softmax},
)
LOG_SUM_EXP = Choice(
    "attention weights are exp(s - log sum exp)",
    "",
    {"attn_weights": _log_sum_exp, "context": _of_exact_sums},
)


def choices_for(dtype: str, observed: Mapping[str, np.ndarray]) -> Iterator[Choice]:
    """Yield the allowed choices, first the reference's own, unless recorded scores have a 16-bit
    dtype.
    """
    if dtype not in HALF:
        yield AS_THE_REFERENCE
        if dtype == "float32":
            yield LOG_SUM_EXP
        return
    dtypes = {x.dtype.name for name, x in observed.items() if stage_named(name).kind == "scores"}
    # Recorded scores in 16 bits exclude choices that keep them in float32.
    if dtypes != {dtype}:
        yield AS_THE_REFERENCE
        yield UNFUSED
    yield SCORES
    yield SOFTMAX
