"""Patterns of queries and keys before RoPE: the rotation is undone, and the features of the
projections are compared.

There a missing bias is an offset by feature, a norm's weight a factor by feature, and wrongly split
heads a different order. Undoing RoPE leaves the size of rounding errors unchanged, pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.fits.locations import find_location, wrong_elements
from parity.explain.diagnosis.fits.orders import orders, transposes
from parity.explain.diagnosis.fits.record import Difference
from parity.explain.diagnosis.fits.rotation import positions_families
from parity.explain.diagnosis.fits.values import factors, offsets, rows_and_features
from parity.explain.diagnosis.fits.words import listed, noun
from parity.explain.fitting.rotation import complex_pairs, with_pairs
from parity.measure.core.compare import errors_of
from parity.measure.core.reference import Arithmetic, Layer
from parity.measure.core.reference.rope import frequencies

GROUPS: tuple[Callable[[Difference], Iterator[Edit]], ...] = (
    factors,
    orders,
    transposes,
    offsets,
    rows_and_features,
)
"""Patterns of the projection and the norm before RoPE."""

MOST = 2**24
"""The largest number of values in memory during the search for positions."""

BEYOND = 8
"""The number of positions after the last one that are tried."""


def before_rope(difference: Difference) -> Iterator[Edit]:
    """Yield patterns before RoPE, and rotations with the positions of other tokens."""
    problem = difference.problem
    if problem is None or difference.stage.path:
        return
    if difference.stage.quantity not in ("q", "k") or difference.actual.ndim != 4:
        return
    spec = problem.spec
    norm = spec.qk_norm
    if spec.rope is None or spec.latent is not None or not np.isfinite(difference.actual).all():
        return
    layer = Layer(problem, Arithmetic(np.dtype(np.float64)))
    positions = problem.case.positions(difference.stage.step)
    rotated = np.zeros(difference.actual.shape[3], bool)
    rotated[spec.rope.rotated_features(len(rotated))] = True
    shrunk = np.where(rotated, layer.attention_factor() ** -2, 1.0)

    def back(x: np.ndarray) -> np.ndarray:
        return layer.rotate(x, positions, -1) * shrunk

    if norm is None or not norm.after_rope:
        for edit in _patterns_of(difference, back(difference.actual), back(difference.expected)):
            yield replace(edit, about=f"before RoPE: {edit.about}")
    if positions.ndim == 2 and spec.rope.sections is None:
        yield from _positions(difference, positions)


def _patterns_of(
    difference: Difference, actual: np.ndarray, expected: np.ndarray
) -> Iterator[Edit]:
    """Yield patterns of the values before RoPE."""
    # One feature of a pair may have the errors of both.
    allowed = {**difference.allowed, "max": np.sqrt(2.0) * difference.allowed["max"]}
    errors = errors_of(actual, expected)
    bad, box = wrong_elements(errors, allowed)
    if not bad.any():
        return
    location, part = find_location(difference.stage, difference.letters, bad, box, None)
    before = replace(
        difference,
        actual=actual,
        expected=expected,
        allowed=allowed,
        errors=errors,
        bad=bad,
        box=box,
        part=part,
        location=location,
    )
    for group in GROUPS:
        yield from group(before)


def _positions(difference: Difference, positions: np.ndarray) -> Iterator[Edit]:
    """Yield rotations of every token of every head by an integer position, the nearest for each."""
    problem, (tokens, features) = difference.problem, difference.expected.shape[2:]
    if problem is None or problem.spec.rope is None or problem.spec.rope.depends_on_length:
        return
    rope = problem.spec.rope
    right = np.array(frequencies(rope, features, int(positions.max()) + 1))
    begin = max(int(positions.min()) - tokens - BEYOND, 0)
    candidates = np.arange(begin, int(positions.max()) + tokens + BEYOND)
    wrong = math.prod(len(which) for which in difference.box[:3])
    if difference.expected.size * len(candidates) > MOST or not difference.is_enough(wrong):
        return
    x = complex_pairs(difference.expected, rope)  # (B, N, T, pairs)
    away = candidates[:, None, None] - positions  # (positions, B or 1, T)
    turns = np.exp(1j * away[:, :, None, :, None] * right)
    actual = complex_pairs(difference.actual, rope)
    distances = (np.abs(turns * x - actual) ** 2).sum(axis=-1)  # (positions, B, N, T)
    own = np.broadcast_to(positions[:, None] - begin, distances.shape[1:])
    own_distances = np.take_along_axis(distances, own[None], axis=0)[0]
    slack = features * difference.allowed["max"] ** 2
    # A token has its own position if no other is nearer.
    is_own = own_distances <= distances.min(axis=0) + slack
    nearest = np.where(is_own, own, distances.argmin(axis=0))
    rotated = np.take_along_axis(turns * x, nearest[None, ..., None], axis=0)[0]
    if difference.is_explained_by(with_pairs(difference.expected, rotated, rope)):
        yield _of_positions(difference, candidates[nearest])


def _of_positions(difference: Difference, positions: np.ndarray) -> Edit:
    """Return the pattern of positions (B, N, T), with its description."""
    if (positions == positions[:1, :1]).all():
        used, by = positions[0, 0], "tokens are rotated as at the positions"
    elif (positions == positions[:1, :, :1]).all():
        _, heads = noun(difference.letters, 1)
        used, by = (
            positions[0, :, 0],
            f"{heads} are rotated by one position each, instead of tokens:",
        )
    else:
        used, by = positions.ravel(), "tokens are rotated by other positions:"
    return difference.pattern(
        "rope positions",
        f"{by} {listed(used.tolist())}",
        {"positions": positions.tolist()},
        len(used),
        families=positions_families(difference.stage.step),
    )
