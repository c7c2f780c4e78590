"""Patterns of order: heads, features, sequences or tokens exchanged, shifted, reversed; the values
of other stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import numpy as np

from parity.explain.diagnosis.bugs.record import Edit, pattern
from parity.explain.diagnosis.laws.record import Seen
from parity.explain.diagnosis.laws.words import MOST_LISTED, noun
from parity.measure.core.stages import stage_named

LARGEST = 1024
"""The longest axis whose order is searched."""


def orders(seen: Seen) -> Iterator[Edit]:
    """Yield slices of one axis that have the values of others."""
    for axis in _axes(seen):
        box, size = seen.box[axis], seen.expected.shape[axis]
        order = _order(seen, axis)
        if order is None or np.array_equal(order, box):
            continue
        source = np.arange(size)
        source[box] = order
        if seen.holds(seen.in_slices(np.take(seen.expected, source, axis=axis))):
            words, parameters = _order_words(seen, axis, box, order)
            numbers = {"axis": seen.letters[axis], "of": box.tolist(), "from": order.tolist()}
            yield pattern("order", words, numbers, parameters)


def shifts(seen: Seen) -> Iterator[Edit]:
    """Yield tokens one place too late or too early, with any values at the end."""
    for axis in _axes(seen):
        if (
            seen.letters[axis] not in ("T", "S") or len(seen.box[axis]) < 3
        ):  # a single one proves nothing
            continue
        one = noun(seen.letters, axis)[0]
        for by, words in ((1, "before"), (-1, "after")):
            candidate = seen.in_slices(np.roll(seen.expected, by, axis=axis))
            edge = [slice(None)] * candidate.ndim
            edge[axis] = slice(0, 1) if by > 0 else slice(-1, None)
            came_in = seen.actual[tuple(edge)]
            if not np.isfinite(came_in).all():
                continue
            candidate[tuple(edge)] = came_in
            if seen.holds(candidate):
                zeros = ", and the one at the end is 0" if not came_in.any() else ""
                text = f"shifted by one: each {one} has the values of the one {words}{zeros}"
                yield pattern("shift", text, {"axis": seen.letters[axis], "by": by}, 1)
                return


def transposes(seen: Seen) -> Iterator[Edit]:
    """Yield exchanges of two axes of one length, and heads split or combined by a reshape alone."""
    e = seen.expected
    if len(seen.letters) < 3 and e.ndim != 2:
        return
    for order in sorted(permutations(range(e.ndim)), key=_moved):
        if (
            _moved(order)
            and e.transpose(order).shape == e.shape
            and seen.holds(seen.in_slices(e.transpose(order)))
        ):
            if _moved(order) == 2:
                axes = [axis for axis, other in enumerate(order) if axis != other]
                names = [noun(seen.letters, axis)[1] for axis in axes]
                words = f"{names[0]} and {names[1]} are exchanged: transposed"
            else:
                axes = list(order)
                words = f"axes are exchanged: instead of ({', '.join(seen.letters)}) they are "
                words += f"({', '.join(seen.letters[axis] for axis in axes)})"
            yield pattern("transposed", words, {"axes": [seen.letters[axis] for axis in axes]})
    if e.ndim != 4 or "H" not in seen.letters:
        return
    batch, heads, tokens, features = e.shape
    width = e.swapaxes(1, 2).reshape(batch, tokens, heads * features)
    ways = {
        "heads and tokens are mixed up: reshaped without moving them": width.reshape(e.shape),
        "heads and features are mixed up: the width is split into (H, N)": np.moveaxis(
            width.reshape(batch, tokens, features, heads), 3, 1
        ),
    }
    for words, values in ways.items():
        if heads > 1 and seen.holds(seen.in_slices(values)):
            yield pattern("reshaped", words)


def _moved(order: tuple[int, ...]) -> int:
    """Return the number of displaced axes."""
    return sum(axis != other for axis, other in enumerate(order))


def other_stages(seen: Seen) -> Iterator[Edit]:
    """Yield the values of another stage, or of the step before."""
    for name, values in seen.others.items():
        other = stage_named(name)
        same = (other.quantity, other.step) == (
            seen.stage.quantity,
            seen.stage.step,
        )  # on another path
        of_another_path = other.path not in ("", seen.stage.path)
        if same or of_another_path or other.is_exact or values.ndim != seen.expected.ndim:
            continue
        for x, how in _as_they_fit(values.astype(np.float64), seen.expected.shape):
            if seen.holds(seen.within(x)):
                before = other.quantity == seen.stage.quantity and other.step != seen.stage.step
                whose = f"{name}, of another step" if before else name
                yield pattern(
                    "other stage", f"the values there are those of {whose}{how}", {"stage": name}
                )


def _as_they_fit(x: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[np.ndarray, str]]:
    if x.shape == shape:
        yield x, ""
    if x.ndim >= 2 and x.swapaxes(-1, -2).shape == shape:
        yield x.swapaxes(-1, -2), ", transposed"
    if x.ndim == 4 and shape[1] % x.shape[1] == 0 and x.shape[1] < shape[1]:
        repeated = np.repeat(x, shape[1] // x.shape[1], axis=1)
        if repeated.shape == shape:
            yield repeated, ", its heads repeated"


def _axes(seen: Seen) -> Iterator[int]:
    """Return the axes: heads and features first, then sequences and tokens."""
    priority = "NKHEWGBTS"
    axes = [axis for axis in range(seen.expected.ndim) if 1 < seen.expected.shape[axis] <= LARGEST]
    yield from sorted(axes, key=lambda axis: f"{priority}".find(seen.letters[axis][:1]))


def _order(seen: Seen, axis: int) -> np.ndarray | None:
    """Return the source of each wrong slice by the nearest expected values; the simplest order if
    several tie.
    """
    box, size = seen.box[axis], seen.expected.shape[axis]
    if seen.place.cells or seen.place.wrong < 2 * len(box):  # a single number proves nothing
        return None
    whole = [which if each != axis else np.arange(size) for each, which in enumerate(seen.box)]
    e = np.moveaxis(seen.expected[np.ix_(*whole)], axis, 0).reshape(size, -1)
    a = np.moveaxis(seen.actual[np.ix_(*seen.box)], axis, 0).reshape(len(box), -1)
    if not (np.isfinite(a).all() and np.isfinite(e).all()):
        return None
    distances = (a**2).sum(1)[:, None] + (e**2).sum(1)[None] - 2.0 * a @ e.T
    nearest = distances.min(axis=1)
    slack = a.shape[1] * seen.allowed["max"] ** 2 + 1e-9 * np.abs(distances).max(initial=0.0)
    for order, _ in _plain_orders(box, size, in_time=seen.letters[axis] in "TS"):
        if (distances[np.arange(len(box)), order] <= nearest + slack).all():
            return order
    return distances.argmin(axis=1)


def _plain_orders(box: np.ndarray, size: int, *, in_time: bool) -> Iterator[tuple[np.ndarray, str]]:
    """Yield named orders of the wrong indices, the simplest first: the source of each, and a
    description.
    """
    begin, end = int(box[0]), int(box[-1])
    # Some orders leave their ends in place.
    runs = [
        np.arange(*ends)
        for ends in ((0, size), (begin - 1, end + 2), (begin - 1, end + 1), (begin, end + 2))
    ]
    blocks = [box, *(run for run in runs if run[0] >= 0 and run[-1] < size)]
    for block in blocks:
        for order, words in _block_orders(len(block)):
            moved = order != np.arange(len(block))
            if np.array_equal(block[moved], box):
                yield block[order][moved], words
    for by in (1, -1) if in_time else ():
        source = box - by
        if source[0] >= 0 and source[-1] < size:
            yield source, f"those of the one {'before' if by > 0 else 'after'}"
    for index in range(min(size, 2)):
        yield np.full(len(box), index), f"all those of {index}"


def _block_orders(count: int) -> Iterator[tuple[np.ndarray, str]]:
    """Yield named orders of 0 … count - 1."""
    all_of_them = np.arange(count)
    yield all_of_them[::-1], "in reverse order"
    if count % 2 == 0 and count > 2:
        yield np.roll(all_of_them, count // 2), "exchanged by halves"
        side_by_side = all_of_them.reshape(2, -1).T.ravel()
        yield np.argsort(side_by_side), "in halves, 0 2 4 … 1 3 5 …, instead of interleaved"
        yield side_by_side, "interleaved, instead of in halves, 0 2 4 … 1 3 5 …"
        yield all_of_them ^ 1, "exchanged with their neighbors"
    for by in (1, -1, 2, -2):
        if count > 2:
            yield np.roll(all_of_them, by), f"rolled by {by}"


def _order_words(seen: Seen, axis: int, box: np.ndarray, order: np.ndarray) -> tuple[str, int]:
    """Return the description of an order, and the number of indices in it."""
    one, several = noun(seen.letters, axis)
    if len(box) == 1:
        return f"{one} {box[0]} has the values of {one} {order[0]}", 1
    if len(box) == 2 and np.array_equal(order, box[::-1]):
        return f"{several} {box[0]} and {box[1]} are exchanged", 0
    for plain, words in _plain_orders(
        box, seen.expected.shape[axis], in_time=seen.letters[axis] in "TS"
    ):
        if np.array_equal(plain, order):
            return f"{several} are {words}", 0
    whose = ", each that of another" if len(set(order.tolist())) == len(order) else ""
    if len(box) <= MOST_LISTED:
        named = "" if len(box) == seen.expected.shape[axis] else f"{' '.join(map(str, box))} "
        return f"{several} {named}are those of {' '.join(map(str, order))}{whose}", len(order)
    return f"{several} are in another order{whose}", len(order)
