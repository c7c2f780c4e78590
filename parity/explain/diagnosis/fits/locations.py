"""Locations: the heads, sequences, positions, features and cells that exceed the budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.diagnosis.fits.record import Location
from parity.explain.diagnosis.fits.words import indices, noun
from parity.measure.core.stages import Stage

FIELDS = {"sequences": "B", "heads": "NK", "positions": "TS", "keys": "S"}
"""The axes of a stage in a location, by their letters; features are the last one."""

IMPLIED_AXES = {
    "diagonal": "TS",
    "after": "TS",
    "before": "TS",
    "hidden": "TS",
    "empty rows": "BTS",
}
"""The axes that are omitted if the wrong cells have a property in common."""

SPARSE = 0.5
"""The largest share of the rows in the wrong slices at which single rows are reported instead of
slices.
"""

Box = tuple[np.ndarray, ...]


def wrong_elements(errors: np.ndarray, allowed: Mapping[str, float]) -> tuple[np.ndarray, Box]:
    """Return the elements that exceed the budget, and the indices of each axis with such elements.

    If single elements are within it and all together are not, slices are compared by their root
    mean square, and all elements of the common part of wrong slices count as wrong.
    """
    bad = errors > allowed["max"]
    if bad.any():
        return bad, _indices(bad)
    squares = errors**2
    if not errors.size or float(np.sqrt(squares.mean())) <= allowed["rms"]:
        return bad, _indices(bad)
    box = []
    for axis, size in enumerate(errors.shape):
        mean_squares = squares.mean(axis=_other_axes(errors, axis))
        wrong = np.flatnonzero(mean_squares > allowed["rms"] ** 2)
        if not len(wrong):
            wrong = np.arange(size)
        box.append(wrong)
    bad[np.ix_(*box)] = True
    return bad, tuple(box)


def _indices(bad: np.ndarray) -> Box:
    """Return the indices of each axis with wrong elements."""
    box = []
    for axis in range(bad.ndim):
        box.append(np.flatnonzero(bad.any(axis=_other_axes(bad, axis))))
    return tuple(box)


def _other_axes(x: np.ndarray, axis: int) -> tuple[int, ...]:
    return (*range(axis), *range(axis + 1, x.ndim))


def find_location(
    stage: Stage,
    letters: tuple[str, ...],
    bad: np.ndarray,
    box: Box,
    hidden: np.ndarray | None,
    spec: Any = None,
) -> tuple[Location, np.ndarray]:
    """Return the location of wrong elements, and all elements of that location.

    Args:
        stage: the stage.
        letters: letters of its axes.
        bad: wrong elements, at least one.
        box: indices of each axis with wrong elements.
        hidden: cells that the mask hides, (B, N, T, S), if known.
        spec: the `AttentionSpec`, if known.
    """
    in_box = np.zeros(bad.shape, bool)
    in_box[np.ix_(*box)] = True
    count = int(np.count_nonzero(bad))
    if count == 1:
        part, name, words = bad, "", _one_element(letters, box)
    else:
        name, cells, part = next(_cells(stage, letters, bad, in_box, hidden), ("", "", in_box))
        descriptions = []
        for axis in range(bad.ndim):
            is_implied = letters[axis] in IMPLIED_AXES.get(name, "")
            # Scattered rows are described by their common indices alone.
            is_scattered = name == "rows" and len(box[axis]) > 1
            if not is_implied and not is_scattered:
                descriptions.append(_of_axis(stage, letters, bad, box, axis, spec))
        descriptions.append(cells)
        words = ", ".join(filter(None, descriptions)) or "everywhere"
    return Location(words, **_fields(letters, box), cells=name, wrong=count, size=bad.size), part


def _one_element(letters: tuple[str, ...], box: Box) -> str:
    indices_of_axes = []
    for axis in range(len(letters)):
        one, _ = noun(letters, axis)
        indices_of_axes.append(f"{one} {box[axis][0]}")
    return f"one element: {', '.join(indices_of_axes)}"


def _fields(letters: tuple[str, ...], box: Box) -> dict[str, tuple[int, ...]]:
    """Return the indices of the axes by their names."""
    wrong: dict[str, tuple[int, ...]] = {}
    for name, letters_of_field in FIELDS.items():
        if name == "keys" and "T" not in letters:
            continue
        axis = _first_axis(letters, letters_of_field)
        if axis is not None:
            wrong[name] = tuple(box[axis].tolist())
    if len(letters) > 1 and letters[-1] != "S":
        wrong["features"] = tuple(box[-1].tolist())
    return wrong


def _first_axis(letters: tuple[str, ...], among: str) -> int | None:
    """Return the first axis with one of some letters."""
    for axis, letter in enumerate(letters):
        if letter in among:
            return axis
    return None


def _of_axis(
    stage: Stage,
    letters: tuple[str, ...],
    bad: np.ndarray,
    box: Box,
    axis: int,
    spec: AttentionSpec | None,
) -> str:
    """Describe the wrong indices of one axis; empty if all are wrong."""
    names, letter = noun(letters, axis), letters[axis]
    if letter == "S" and stage.quantity.startswith("cache."):
        names = ("slot", "slots")
    of = ""
    if letter == "H":
        of = " of each head"
    words = indices(box[axis], bad.shape[axis], names, in_time=letter in "TS", of=of)
    if not words or spec is None:
        return words
    return words + _what_they_are(stage, letter, box[axis], bad.shape[axis], spec)


def _what_they_are(
    stage: Stage, letter: str, which: np.ndarray, size: int, spec: AttentionSpec
) -> str:
    """Describe the role of some features or heads in the layer; empty if they have none."""
    group = spec.num_heads // spec.num_kv_heads
    if letter == "N" and 1 < group == len(which):
        is_run = which[-1] - which[0] == group - 1
        if is_run and which[0] % group == 0:
            return f", which share key/value head {which[0] // group}"
    if letter != "H" or stage.quantity not in ("q", "k"):
        return ""
    if spec.rope is not None and spec.rope.rotary_dim is not None:
        rotated = np.arange(size)[spec.rope.rotated_features(size)]
        if np.array_equal(which, rotated):
            return ", which are those that RoPE rotates"
        if np.array_equal(which, np.setdiff1d(np.arange(size), rotated)):
            return ", which are those that RoPE does not rotate"
    return ""


def _cells(
    stage: Stage,
    letters: tuple[str, ...],
    bad: np.ndarray,
    in_box: np.ndarray,
    hidden: np.ndarray | None,
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield common properties of wrong cells besides their slices: a name, a description, and all
    such cells.
    """
    if hidden is not None and not stage.is_exact:
        yield from _by_mask(letters, bad, in_box, hidden)
    if letters[-2:] == ("T", "S"):
        yield from _by_distance(bad, np.asarray(in_box.any(axis=(-2, -1), keepdims=True)))
    if bad.ndim < 2:
        return
    rows: np.ndarray = np.asarray(bad.any(axis=-1))
    in_rows: np.ndarray = np.asarray(in_box.any(axis=-1))
    wrong, possible = int(np.count_nonzero(rows)), int(np.count_nonzero(in_rows))
    if wrong <= SPARSE * possible:
        part = np.broadcast_to(rows[..., None], bad.shape) & in_box
        yield "rows", f"in {wrong} of {rows.size} rows", part
    if hidden is None or hidden.shape != bad.shape:
        return
    if (bad & ~hidden).any() and not (bad & hidden).any():
        yield "", "", in_box & ~hidden  # hidden cells are right, and may have any value


def _by_mask(
    letters: tuple[str, ...], bad: np.ndarray, in_box: np.ndarray, hidden: np.ndarray
) -> Iterator[tuple[str, str, np.ndarray]]:
    empty: np.ndarray = np.asarray(hidden.all(axis=-1))  # (B, N, T)
    if letters == ("B", "T", "E"):
        empty = np.asarray(empty.all(axis=1))
    if "T" in letters and empty.shape == bad.shape[:-1] and empty.any() and not empty.all():
        cells = np.broadcast_to(empty[..., None], bad.shape)
        if not (bad & ~cells).any():
            yield "empty rows", "only rows without a key", cells & in_box
    if hidden.shape == bad.shape and not hidden.all() and not (bad & ~hidden).any():
        yield "hidden", "only hidden cells", hidden & in_box


def _by_distance(bad: np.ndarray, heads: np.ndarray) -> Iterator[tuple[str, str, np.ndarray]]:
    queries, keys = bad.shape[-2:]
    distance = np.arange(keys) - np.arange(queries)[:, None]
    rows, columns = bad.nonzero()[-2:]
    distances = np.unique(columns - rows)
    if len(np.unique(rows)) < min(3, queries):  # with so few rows it may be chance
        return
    if len(distances) == 1:
        away = int(distances[0])
        words = "only the diagonal"
        if away > 0:
            words = f"only the keys {away} after the query"
        elif away < 0:
            words = f"only the keys {-away} before the query"
        yield "diagonal", words, (distance == away) & heads
    elif distances[0] > 0:
        yield "after", "only keys after the query", (distance > 0) & heads
    elif distances[-1] < 0:
        yield "before", "only keys before the query", (distance < 0) & heads
