"""Cells of a stage on which no real token depends.

They are tokens of padding, and unfilled slots of a cache. Implementations may leave anything there.
Right padding, for example, is often written to the cache and overwritten by the next tokens. So
these cells are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from parity.measure.core.case import EMPTY, Case
from parity.measure.core.stages import STAGES, Stage, stage_named

OF_ROWS = frozenset({"attn_weights", "context", "output"})
"""Stages whose rows are queries after the softmax."""

HIDES_KEYS = frozenset({"mask", "attn_weights"})
"""Stages in which unused keys have a defined value: they must be hidden, and their weights must be
0.
"""


def unused_cells(
    case: Case,
    name: str,
    shape: tuple[int, ...],
    tokens: Mapping[str, np.ndarray] | None = None,
) -> np.ndarray | None:
    """Return the unused cells of a stage, boolean; None if there are none.

    Args:
        case: the case.
        name: name of the stage.
        shape: its shape in the reference. Other shapes have no known cells.
        tokens: indices of the tokens along axis "T" or "S", if these are only some of them.
    """
    stage = stage_named(name)
    if stage.kind not in STAGES or stage.is_gradient or len(stage.axes) != len(shape):
        return None
    unused = np.zeros(shape, bool)
    for letter, lengths in _used_lengths(case, stage).items():
        if letter not in stage.axes:
            continue
        axis = stage.axes.index(letter)
        indices = np.arange(shape[axis])
        if tokens is not None and letter in tokens:
            indices = tokens[letter]
        is_unused = np.zeros((len(lengths), shape[axis]), bool)
        is_unused[:, : len(indices)] = indices >= np.array(lengths)[:, None]
        size_of_axes = [1] * len(shape)
        size_of_axes[0], size_of_axes[axis] = is_unused.shape
        unused |= is_unused.reshape(size_of_axes)
    if case.cache_slots is not None and stage.step is not None and "S" in stage.axes:
        unused |= _empty_slots(case, stage, stage.step)
    if case.mask is not None and stage.quantity in OF_ROWS:
        unused |= _rows_without_keys(case, case.mask, stage, shape, tokens)
    if not unused.any():
        return None
    return unused


def _empty_slots(case: Case, stage: Stage, step: int) -> np.ndarray:
    """Return the slots that no token has, for a cache whose slots are not in order; broadcast to
    the stage.
    """
    is_of_slots = "cache" in stage.quantity or stage.quantity == "scores"
    if not is_of_slots:
        return np.zeros((), bool)
    is_empty = case.tokens_in_slots(step) == EMPTY
    shape = [1] * len(stage.axes)
    shape[0], shape[stage.axes.index("S")] = is_empty.shape
    return is_empty.reshape(shape)


def _rows_without_keys(
    case: Case,
    mask: np.ndarray,
    stage: Stage,
    shape: tuple[int, ...],
    tokens: Mapping[str, np.ndarray] | None,
) -> np.ndarray:
    """Return the rows in which the case's own mask, with a causal one, hides every key.

    They belong to padding, which a model computes in any way. The shape is the shape of the stage,
    or broadcasts to it.
    """
    num_keys = case.capacity if case.is_cached else case.key_len
    shape_of_mask = (case.batch, case.spec.num_heads, case.seq_len, num_keys)
    hidden = np.broadcast_to(mask, shape_of_mask).copy()
    rows = np.arange(case.seq_len)
    if case.is_causal:
        hidden |= np.arange(num_keys) > rows[:, None]
    if stage.step is not None:
        start = sum(case.chunks[: stage.step])
        rows = np.arange(start, start + case.chunks[stage.step])
        hidden = hidden[:, :, rows]
        slots = np.array(case.lengths_before(stage.step))[:, None] + np.arange(len(rows))
        hidden |= np.arange(num_keys) > slots[:, None, :, None]
    elif tokens is not None and "T" in tokens:
        hidden = hidden[:, :, tokens["T"]]
    is_empty: np.ndarray = np.all(hidden, axis=-1)  # (B, N, T)
    if stage.quantity == "output":
        is_empty = np.all(is_empty, axis=1)
    return np.broadcast_to(np.expand_dims(is_empty, -1), shape)


def without_unused(x: np.ndarray, unused: np.ndarray | None) -> np.ndarray:
    """Return a floating-point stage with NaN in unused cells, which comparisons leave out."""
    if unused is None or unused.shape != x.shape:
        return x
    return np.where(unused, np.asarray(np.nan, x.dtype), x)


def _used_lengths(case: Case, stage: Stage) -> dict[str, tuple[int, ...]]:
    """Return the number of used tokens of each sequence, where they are limited.

    It counts query tokens for "T", and of keys or slots for "S".
    """
    lengths: dict[str, tuple[int, ...]] = {}
    if stage.step is not None:
        added = case.added(stage.step)
        lengths["T"] = added
        lengths["S"] = added
        if "cache" in stage.quantity or stage.quantity == "scores":
            before = case.lengths_before(stage.step)
            lengths["S"] = tuple(np.add(before, added).tolist())
            if case.cache_slots is not None:
                lengths.pop("S")
    elif case.key_padding_lengths is not None:
        lengths["S"] = case.key_padding_lengths
        if case.seq_len_k is None:
            # The rows of an empty sequence have no key, so their result is defined: 0.
            lengths["T"] = tuple(length or case.seq_len for length in case.key_padding_lengths)
    if stage.quantity in HIDES_KEYS:
        lengths.pop("S", None)
    return lengths
