"""Patterns of order: heads, features, sequences or tokens exchanged, shifted, reversed; the values
of other stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import permutations

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.families import Families
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.fits.record import Difference
from parity.explain.diagnosis.fits.words import MOST_LISTED, noun
from parity.measure.core.stages import Stage, stage_named

LARGEST = 1024
"""The longest axis whose order is searched."""

TOKENWISE = ("q", "k", "v", "context", "output")
"""Quantities with values of their own for each token of each sequence."""

IN_HALVES = "in halves, 0 2 4 … 1 3 5 …, instead of interleaved"
INTERLEAVED = "interleaved, instead of in halves, 0 2 4 … 1 3 5 …"
"""Orders of features that RoPE's pairs have."""


def orders(difference: Difference) -> Iterator[Edit]:
    """Yield slices of one axis that have the values of others."""
    for axis in _axes(difference):
        box, size = difference.box[axis], difference.expected.shape[axis]
        order = _order(difference, axis)
        if order is None or np.array_equal(order, box):
            continue
        source = np.arange(size)
        source[box] = order
        if difference.is_explained_by(
            difference.in_slices(np.take(difference.expected, source, axis=axis))
        ):
            words, parameters = _order_words(difference, axis, box, order)
            fitted = {"axis": difference.letters[axis], "of": box.tolist(), "from": order.tolist()}
            families = _families_of_order(
                difference, axis, words, is_permutation=_is_permutation(box, order)
            )
            yield difference.pattern("order", words, fitted, parameters, families=families)


def _is_permutation(box: np.ndarray, order: np.ndarray) -> bool:
    return np.array_equal(np.sort(box), np.sort(order))


def _families_of_order(
    difference: Difference, axis: int, words: str, *, is_permutation: bool
) -> Families:
    """Return the families of slices of an axis that have the values of others."""
    letter, quantity = difference.letters[axis], difference.stage.quantity
    if "cache" in difference.stage.kind:
        if letter in ("B", "S", "T"):
            return (of.CACHE_SLOTS,)
        return ()
    if quantity == "mask":
        return _families_of_masks(difference, letter)
    if letter == "B":
        if quantity in TOKENWISE:
            return (of.SEQUENCES,)
        return ()
    if letter in ("S", "T") and quantity in TOKENWISE:
        return (of.TOKENS,)
    if difference.problem is None:
        return ()
    spec = difference.problem.spec
    if letter in ("N", "K") and is_permutation:
        if quantity == "context" and spec.num_kv_heads < spec.num_heads:
            return of.GROUPED, of.HEAD_ORDER
        if quantity in ("q", "k", "v", "context"):
            return (of.HEAD_ORDER,)
    is_of_pairs = letter == "H" and (IN_HALVES in words or INTERLEAVED in words)
    if is_of_pairs and quantity in ("q", "k") and spec.rope is not None:
        return (of.PAIRS,)
    return ()


def _families_of_masks(difference: Difference, letter: str) -> Families:
    if letter == "N":
        return (of.MASK_HEADS,)
    if letter != "B" or difference.problem is None:
        return ()
    if difference.problem.case.key_padding_lengths is None:
        return ()
    return (of.PADDING,)


def shifts(difference: Difference) -> Iterator[Edit]:
    """Yield tokens one position too late or too early, with any values at the end."""
    for axis in _axes(difference):
        # A few tokens prove nothing.
        if difference.letters[axis] not in ("T", "S") or len(difference.box[axis]) < 3:
            continue
        one, _ = noun(difference.letters, axis)
        for by, words, end in ((1, "before", slice(0, 1)), (-1, "after", slice(-1, None))):
            candidate = difference.in_slices(np.roll(difference.expected, by, axis=axis))
            edge = [slice(None)] * candidate.ndim
            edge[axis] = end
            came_in = difference.actual[tuple(edge)]
            if not np.isfinite(came_in).all():
                continue
            candidate[tuple(edge)] = came_in
            if difference.is_explained_by(candidate):
                text = f"shifted by one: each {one} has the values of the one {words}"
                if not came_in.any():
                    text += ", and the one at the end is 0"
                fitted = {"axis": difference.letters[axis], "by": by}
                yield difference.pattern(
                    "shift", text, fitted, 1, families=_families_of_shift(difference.stage)
                )
                return


def _families_of_shift(stage: Stage) -> Families:
    if "cache" in stage.kind:
        return (of.CACHE_SLOTS,)
    if stage.quantity in TOKENWISE:
        return (of.TOKENS,)
    return ()


def transposes(difference: Difference) -> Iterator[Edit]:
    """Yield exchanges of two axes of one length, and heads split or combined by a reshape alone."""
    e = difference.expected
    if len(difference.letters) < 3 and e.ndim != 2:
        return
    for order in sorted(permutations(range(e.ndim)), key=_num_moved):
        transposed = e.transpose(order)
        if not _num_moved(order) or transposed.shape != e.shape:
            continue
        if difference.is_explained_by(difference.in_slices(transposed)):
            yield _transposed(difference, order)
    if e.ndim == 4 and "H" in difference.letters and e.shape[1] > 1:
        yield from _reshapes(difference)


def _transposed(difference: Difference, order: tuple[int, ...]) -> Edit:
    """Return the exchange of axes whose sources are in an order."""
    if _num_moved(order) == 2:
        one, other = _moved(order)
        _, ones = noun(difference.letters, one)
        _, others = noun(difference.letters, other)
        letters = [difference.letters[one], difference.letters[other]]
        words = f"{ones} and {others} are exchanged: transposed"
    else:
        letters = [difference.letters[axis] for axis in order]
        words = (
            f"axes are exchanged: instead of ({', '.join(difference.letters)}) they are "
            f"({', '.join(letters)})"
        )
    families = _families_of_axes(difference, is_of_rows=letters == ["T", "S"])
    return difference.pattern("transposed", words, {"axes": letters}, families=families)


def _families_of_axes(difference: Difference, *, is_of_rows: bool = False) -> Families:
    """Return the families of exchanged axes: queries and keys, or others."""
    if "cache" in difference.stage.kind or difference.problem is None:
        return ()
    if difference.stage.kind == "scores":
        if is_of_rows:
            return (of.SWAPPED,)
        return ()
    if difference.stage.kind == "mask":
        if difference.stage.step:
            return ()
        if difference.problem.case.has_own_mask:
            return of.CAUSAL, of.POLARITY
        return (of.CAUSAL,)
    if difference.stage.quantity in TOKENWISE:
        return (of.HEAD_ORDER,)
    return ()


def _reshapes(difference: Difference) -> Iterator[Edit]:
    """Yield heads that were split or combined by a reshape alone."""
    batch, heads, tokens, features = difference.expected.shape
    width = difference.expected.swapaxes(1, 2).reshape(batch, tokens, heads * features)
    not_moved = width.reshape(difference.expected.shape)
    if difference.is_explained_by(difference.in_slices(not_moved)):
        words = "heads and tokens are mixed up: reshaped without moving them"
        yield difference.pattern("reshaped", words, families=_families_of_axes(difference))
    innermost = np.moveaxis(width.reshape(batch, tokens, features, heads), 3, 1)
    if difference.is_explained_by(difference.in_slices(innermost)):
        words = "heads and features are mixed up: the width is split into (H, N)"
        yield difference.pattern("reshaped", words, families=_families_of_axes(difference))


def _moved(order: tuple[int, ...]) -> list[int]:
    """Return the moved axes."""
    return [axis for axis, source in enumerate(order) if axis != source]


def _num_moved(order: tuple[int, ...]) -> int:
    return len(_moved(order))


def other_stages(difference: Difference) -> Iterator[Edit]:
    """Yield the values of another stage, or of the step before."""
    for name, values in difference.other_stages.items():
        other = stage_named(name)
        is_same_quantity = other.quantity == difference.stage.quantity
        # On another path it is the same stage.
        is_same = is_same_quantity and other.step == difference.stage.step
        is_on_another_path = other.path not in ("", difference.stage.path)
        if (
            is_same
            or is_on_another_path
            or other.is_exact
            or values.ndim != difference.expected.ndim
        ):
            continue
        whose = name
        if is_same_quantity:
            whose = f"{name}, of another step"
        for x, how in _as_they_fit(values.astype(np.float64), difference.expected.shape):
            if not _shows_its_source(x[difference.part]):
                continue
            if difference.is_explained_by(difference.within(x)):
                words = f"the values there are taken from {whose}{how}"
                families = _families_of_stages(difference, other)
                if of.SWAPPED in families and not how and _are_made_alike(difference, other):
                    words = (
                        f"the values there are computed with {other.quantity}_proj, or copied from "
                        f"{name}"
                    )
                yield difference.pattern("other stage", words, {"stage": name}, families=families)


def _shows_its_source(values: np.ndarray) -> bool:
    """Return True if values show where they come from: NaN is the same everywhere."""
    return bool(np.isfinite(values).any() and not np.isnan(values).any())


def _families_of_stages(difference: Difference, other: Stage) -> Families:
    """Return the families of a stage that has the values of another one."""
    stage = difference.stage
    if "cache" in stage.kind and "cache" in other.kind:
        # Slots that are stale in some sequences alone may follow from their lengths.
        is_of_sequences = len(difference.box[0]) < difference.expected.shape[0]
        if other.step != stage.step and is_of_sequences:
            return of.CACHE_SLOTS, of.CACHE_LENGTHS
        return (of.CACHE_SLOTS,)
    if {stage.kind, other.kind} <= {"q", "k", "v"} and other.step == stage.step:
        return (of.SWAPPED,)
    return ()


def _are_made_alike(difference: Difference, other: Stage) -> bool:
    """Return True if one of q, k and v differs from another one by its projection alone."""
    if difference.problem is None:
        return False
    spec = difference.problem.spec
    is_changed_otherwise = (spec.latent, spec.qk_norm, spec.temperature) != (None, None, None)
    if is_changed_otherwise or spec.shared_kv:
        return False
    if "v" not in (difference.stage.quantity, other.quantity):
        return True
    return spec.rope is None and spec.v_norm is None


def _as_they_fit(x: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[np.ndarray, str]]:
    if x.shape == shape:
        yield x, ""
    if x.ndim >= 2 and x.swapaxes(-1, -2).shape == shape:
        yield x.swapaxes(-1, -2), ", transposed"
    if x.ndim == 4 and shape[1] % x.shape[1] == 0 and x.shape[1] < shape[1]:
        repeated = np.repeat(x, shape[1] // x.shape[1], axis=1)
        if repeated.shape == shape:
            yield repeated, ", its heads repeated"


PRIORITY = "NKHEWGBTS"
"""The letters of axes in the order in which they are tried; others come first."""


def _axes(difference: Difference) -> list[int]:
    """Return the axes whose order is searched: heads and features first, then sequences and
    tokens.
    """
    axes = [axis for axis, size in enumerate(difference.expected.shape) if 1 < size <= LARGEST]
    return sorted(axes, key=partial(_priority, difference))


def _priority(difference: Difference, axis: int) -> int:
    first_letter = difference.letters[axis][:1]
    return PRIORITY.find(first_letter)


def _order(difference: Difference, axis: int) -> np.ndarray | None:
    """Return the source of each wrong slice by the nearest expected values; the simplest order if
    several tie.
    """
    box, size = difference.box[axis], difference.expected.shape[axis]
    if difference.location.cells or difference.location.wrong < 2 * len(
        box
    ):  # a single number proves nothing
        return None
    sources = list(difference.box)
    sources[axis] = np.arange(size)
    e = np.moveaxis(difference.expected[np.ix_(*sources)], axis, 0).reshape(size, -1)
    a = np.moveaxis(difference.actual[np.ix_(*difference.box)], axis, 0).reshape(len(box), -1)
    if not (np.isfinite(a).all() and np.isfinite(e).all()):
        return None
    distances = (a**2).sum(1)[:, None] + (e**2).sum(1)[None] - 2.0 * a @ e.T
    nearest = distances.min(axis=1)
    slack = a.shape[1] * difference.allowed["max"] ** 2 + 1e-9 * np.abs(distances).max(initial=0.0)
    for order, _, _ in _plain_orders(box, size, in_time=difference.letters[axis] in "TS"):
        if (distances[np.arange(len(box)), order] <= nearest + slack).all():
            return order
    return distances.argmin(axis=1)


def _plain_orders(
    box: np.ndarray, size: int, *, in_time: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
    """Yield named orders of the wrong indices, the simplest first.

    Each has the source of every wrong index, the block of indices that is reordered, and a
    description.
    """
    begin, end = int(box[0]), int(box[-1])
    blocks = [box]
    # Some orders leave the ends of a block in place, so it may be longer than the wrong indices.
    for first, stop in ((0, size), (begin - 1, end + 2), (begin - 1, end + 1), (begin, end + 2)):
        if first >= 0 and stop <= size:
            blocks.append(np.arange(first, stop))
    for block in blocks:
        for order, words in _block_orders(len(block)):
            moved = order != np.arange(len(block))
            if np.array_equal(block[moved], box):
                yield block[order][moved], block, words
    if in_time:
        if begin > 0:
            yield box - 1, box, "taken from the one before"
        if end + 1 < size:
            yield box + 1, box, "taken from the one after"
    for index in range(min(size, 2)):
        yield np.full(len(box), index), np.union1d(box, [index]), f"all taken from {index}"


def _block_orders(count: int) -> Iterator[tuple[np.ndarray, str]]:
    """Yield named orders of 0 … count - 1."""
    all_of_them = np.arange(count)
    yield all_of_them[::-1], "in reverse order"
    if count % 2 == 0 and count > 2:
        yield np.roll(all_of_them, count // 2), "exchanged by halves"
        side_by_side = all_of_them.reshape(2, -1).T.ravel()
        yield np.argsort(side_by_side), IN_HALVES
        yield side_by_side, INTERLEAVED
        yield all_of_them ^ 1, "exchanged with their neighbors"
    for by in (1, -1, 2, -2):
        if count > 2:
            yield np.roll(all_of_them, by), f"rolled by {by}"


def _order_words(
    difference: Difference, axis: int, box: np.ndarray, order: np.ndarray
) -> tuple[str, int]:
    """Return the description of an order, and the number of indices in it."""
    one, several = noun(difference.letters, axis)
    if len(box) == 1:
        return f"{one} {box[0]} has the values of {one} {order[0]}", 1
    if len(box) == 2 and np.array_equal(order, box[::-1]):
        return f"{several} {box[0]} and {box[1]} are exchanged", 0
    size = difference.expected.shape[axis]
    is_time = difference.letters[axis] in "TS"
    for plain_order, block, words in _plain_orders(box, size, in_time=is_time):
        if not np.array_equal(plain_order, order):
            continue
        # In time, the findings say where.
        if len(block) == size or is_time or len(block) > MOST_LISTED:
            return f"{several} are {words}", 0
        return f"{several} {_spaced(block)} are {words}", 0
    if len(box) > MOST_LISTED:
        words = f"{several} are in a different order"
    elif len(box) == size:
        words = f"{several} are taken from {_spaced(order)}"
    else:
        words = f"{several} {_spaced(box)} are taken from {_spaced(order)}"
    if len(set(order.tolist())) == len(order):
        words += ", each from a different one"
    return words, len(order)


def _spaced(numbers: np.ndarray) -> str:
    return " ".join(str(number) for number in numbers)
