"""Places: the heads, sequences, positions, features and cells that exceed the budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.diagnosis.laws.record import Place
from parity.explain.diagnosis.laws.words import indices, noun
from parity.measure.core.stages import Stage

FIELDS = {"sequences": "B", "heads": "NK", "positions": "TS", "keys": "S"}
"""The axes of a stage in a place, by their letters; features are the last one."""

SAID_BY = {"diagonal": "TS", "after": "TS", "before": "TS", "hidden": "TS", "empty rows": "BTS"}
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
    axes = range(errors.ndim)
    if bad.any():
        return bad, tuple(np.flatnonzero(bad.any(axis=_but(axes, axis))) for axis in axes)
    squares = errors**2
    if not errors.size or float(np.sqrt(squares.mean())) <= allowed["rms"]:
        return bad, tuple(np.arange(0) for _ in axes)
    over = [
        np.flatnonzero(squares.mean(axis=_but(axes, axis)) > allowed["rms"] ** 2) for axis in axes
    ]
    box = tuple(
        which if len(which) else np.arange(size)
        for which, size in zip(over, errors.shape, strict=True)
    )
    bad[np.ix_(*box)] = True
    return bad, box


def _but(axes: range, axis: int) -> tuple[int, ...]:
    return tuple(each for each in axes if each != axis)


def find_place(
    stage: Stage,
    letters: tuple[str, ...],
    bad: np.ndarray,
    box: Box,
    hidden: np.ndarray | None,
    spec: Any = None,
) -> tuple[Place, np.ndarray]:
    """Return the place of wrong elements, and all elements of that place.

    Args:
        stage: the stage.
        letters: of its axes.
        bad: wrong elements, at least one.
        box: indices of each axis with wrong elements.
        hidden: cells that the mask hides, (B, N, T, S), if known.
        spec: the `AttentionSpec`, if known.
    """
    in_box = np.zeros(bad.shape, bool)
    in_box[np.ix_(*box)] = True
    count = int(np.count_nonzero(bad))
    if count == 1:
        part, name, words = bad, "", "one element: " + ", ".join(_one(letters, box))
    else:
        name, cells, part = next(_cells(stage, letters, bad, in_box, hidden), ("", "", in_box))
        axes = [axis for axis in range(bad.ndim) if letters[axis] not in SAID_BY.get(name, "")]
        if name == "rows":  # for scattered rows, only common properties are reported
            axes = [axis for axis in axes if len(box[axis]) == 1]
        slices = [_of_axis(stage, letters, bad, box, axis, spec) for axis in axes]
        words = ", ".join(filter(None, [*slices, cells])) or "everywhere"
    return Place(words, **_fields(letters, box), cells=name, wrong=count, size=bad.size), part


def _one(letters: tuple[str, ...], box: Box) -> Iterator[str]:
    for axis in range(len(letters)):
        yield f"{noun(letters, axis)[0]} {box[axis][0]}"


def _fields(letters: tuple[str, ...], box: Box) -> dict[str, tuple[int, ...]]:
    """Return the indices of the axes by their names."""
    found: dict[str, tuple[int, ...]] = {}
    for name, which in FIELDS.items():
        axis = next((axis for axis, letter in enumerate(letters) if letter in which), None)
        if axis is not None and not (name == "keys" and "T" not in letters):
            found[name] = tuple(map(int, box[axis]))
    if len(letters) > 1 and letters[-1] != "S":
        found["features"] = tuple(map(int, box[-1]))
    return found


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
    words = indices(
        box[axis],
        bad.shape[axis],
        names,
        in_time=letter in "TS",
        of=" of each head" if letter == "H" else "",
    )
    if not words or spec is None:
        return words
    return words + _what_they_are(stage, letter, box[axis], bad.shape[axis], spec)


def _what_they_are(
    stage: Stage, letter: str, which: np.ndarray, size: int, spec: AttentionSpec
) -> str:
    """Describe the role of some features or heads in the layer; empty if they have none."""
    group = spec.num_heads // spec.num_kv_heads
    if (
        letter == "N"
        and 1 < group == len(which)
        and which[0] % group == 0
        and which[-1] - which[0] == group - 1
    ):
        return f", which are those of key/value head {which[0] // group}"
    if (
        letter == "H"
        and stage.quantity in ("q", "k")
        and spec.rope is not None
        and spec.rope.rotary_dim is not None
    ):
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
    if (
        hidden is not None
        and hidden.shape == bad.shape
        and (bad & ~hidden).any()
        and not (bad & hidden).any()
    ):
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
        words = (
            "only the diagonal"
            if away == 0
            else f"only the keys {abs(away)} {'after' if away > 0 else 'before'}"
        )
        yield "diagonal", words if away == 0 else f"{words} the query", (distance == away) & heads
    elif distances[0] > 0:
        yield "after", "only keys after the query", (distance > 0) & heads
    elif distances[-1] < 0:
        yield "before", "only keys before the query", (distance < 0) & heads
