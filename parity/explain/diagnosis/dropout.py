"""The dropout of observed attention weights, and the dropout of a backward pass that draws it
again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from parity.explain.diagnosis.bugs.backward import redrawn
from parity.explain.diagnosis.bugs.record import Edit
from parity.measure.core.compare import unit_of_rounding
from parity.measure.core.trace import Reference

SMALL = 1e-3
"""Attention weights, relative to the largest of a row, that are too small to tell if they were
dropped."""

UNITS = 64.0
"""Rounding of a factor, in units of the dtype."""

LEAST = 8
"""The least number of weights that have to be dropped, and as many kept: fewer are chance."""


def dropout_factors(stages: Mapping[str, np.ndarray], reference: Reference) -> np.ndarray | None:
    """Return the factors by which observed attention weights differ from right ones.

    They are 0 for dropped weights and one other number for all others, (B, N, T, S); None if the
    weights do not differ in this way.
    """
    observed = stages.get("attn_weights")
    if observed is None or "attn_weights" not in reference.accumulated:
        return None
    return factors_between(observed, reference.accumulated["attn_weights"], reference.problem.dtype)


def factors_between(observed: np.ndarray, expected: np.ndarray, dtype: str) -> np.ndarray | None:
    """Return the factors of weights with dropout, in relation to those without; None if there are
    none.
    """
    if observed.shape != expected.shape or not np.isfinite(expected).all():
        return None
    observed = observed.astype(np.float64)
    largest = expected.max(axis=-1, keepdims=True)
    is_large = expected > SMALL * largest
    ratios = observed[is_large] / expected[is_large]
    is_kept = np.abs(ratios) > 0.5
    num_kept = int(is_kept.sum())
    if min(num_kept, ratios.size - num_kept) < LEAST:
        return None
    factor = float(np.median(ratios[is_kept]))
    tolerance = UNITS * unit_of_rounding(dtype)
    is_one_factor = np.abs(ratios[is_kept] - factor).max() <= tolerance * factor
    are_zeros = np.abs(ratios[~is_kept]).max() <= tolerance
    if not (is_one_factor and are_zeros and factor >= 1.0):
        return None
    factors = np.zeros(expected.shape)
    factors[is_large] = np.where(is_kept, factor, 0.0)
    # Too small to tell, and to matter.
    factors[~is_large] = factor
    return factors


def redrawn_dropout(
    gradients: Mapping[str, np.ndarray], factors: np.ndarray, reference: Reference
) -> list[Edit]:
    """Return the bug that the backward pass has a different dropout, if the gradient of the values
    determines it.

    The gradient of a value is a sum over queries, weighted by dropped weights: with as many
    features as queries, these weights are its solution.
    """
    spec = reference.problem.spec
    d_v = gradients.get("grad.v")
    d_context = reference.accumulated.get("grad.context")
    if d_v is None or d_context is None or spec.num_heads != spec.num_kv_heads:
        return []
    num_queries, num_features = d_context.shape[2:]
    if num_queries > num_features:
        return []
    # d_v = weights^T d_context, for each head.
    inverse = np.linalg.pinv(d_context)
    weights = (d_v.astype(np.float64) @ inverse).swapaxes(2, 3)
    expected = reference.accumulated["attn_weights"]
    again = factors_between(weights, expected, "bfloat16")
    if again is None or np.array_equal(again > 0.0, factors > 0.0):
        return []
    return [*redrawn(np.where(again > 0.0, factors.max(), 0.0))]
