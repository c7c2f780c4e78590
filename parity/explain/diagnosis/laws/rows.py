"""Patterns of rows: scores, attention weights, masks, and the context of rows without a key."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.explain.diagnosis.laws.record import Law, Seen
from parity.explain.diagnosis.laws.values import sizes_of
from parity.explain.diagnosis.laws.words import known_as, listed, number_words, readable
from parity.explain.fitting.distances import Band, band_of, key_distances, slopes_of
from parity.measure.text import and_listed

SUMS = {0: "the batch", 1: "the heads", 2: "the queries"}
"""The other axes over which a softmax may wrongly be applied."""


# ---- Attention weights ---------------------------------------------------------------------------


def attn_weights(seen: Seen) -> Iterator[Law]:
    """Yield rows of another softmax: scores times a number, uniform rows, each row times a
    number.
    """
    if not seen.stage.is_attn_weights or seen.actual.ndim != 4:
        return
    yield from _power(seen)
    yield from _uniform(seen)
    yield from _unmasked(seen)
    a, e = seen.known
    rows = int(np.count_nonzero(seen.part.any(axis=-1)))
    size = (e * e).sum(axis=-1, keepdims=True)
    factor = np.divide(
        (a * e).sum(axis=-1, keepdims=True), size, out=np.ones_like(size), where=size > 0
    )
    if seen.is_enough(rows) and seen.holds(seen.within(factor * seen.expected), np.abs(factor)):
        sums = (factor * e.sum(axis=-1, keepdims=True))[seen.part.any(axis=-1, keepdims=True)]
        words = (
            f"each row there is multiplied by a different number, so that it sums to {_range(sums)}"
        )
        yield Law("rows", words, {"sums": [float(sums.min()), float(sums.max())]}, rows)


def _power(seen: Seen) -> Iterator[Law]:
    """Yield weights of multiplied scores: softmax(c s) is proportional to softmax(s) to the power
    of c.
    """
    a, e = seen.actual, seen.expected
    shown = seen.usable & (a > 1e-12) & (e > 1e-12)
    counts = shown.sum(axis=-1, keepdims=True)
    if np.count_nonzero(shown) - np.count_nonzero(counts) < 3:
        return
    logs = [np.log(x, out=np.zeros_like(x), where=shown) for x in (a, e)]
    weight = np.where(shown, np.minimum(a, e), 0.0)  # logarithms of small weights are inexact
    total = np.maximum(weight.sum(axis=-1, keepdims=True), 1e-300)
    y, x = (
        np.where(shown, each - (weight * each).sum(axis=-1, keepdims=True) / total, 0.0)
        for each in logs
    )
    size = float((weight * x * x).sum())
    power = float((weight * y * x).sum()) / size if size else 0.0
    if not power or abs(power) > 1e4:
        return
    candidate = _raised(e, power)
    # Errors of small weights move the fit of their logarithms: a Gauss-Newton step fits the weights
    # themselves.
    slope = np.where(
        shown, candidate * (logs[1] - (candidate * logs[1]).sum(axis=-1, keepdims=True)), 0.0
    )
    if size := float((slope * slope).sum()):
        power += float((slope * np.where(shown, a - candidate, 0.0)).sum()) / size
        candidate = _raised(e, power)
    if seen.holds(seen.within(candidate), max(1.0, abs(power))):
        names = known_as(power, 1e-4, sizes_of(seen), seen.problem)
        words = f"rows result from scores times {number_words(power, names)}"
        yield Law("power", words, {"factor": power}, 1)


def _raised(weights: np.ndarray, power: float) -> np.ndarray:
    """Return rows of weights to a power, which sum to 1 again."""
    raised = np.power(weights, power, out=np.zeros_like(weights), where=weights > 0.0)
    sums = raised.sum(axis=-1, keepdims=True)
    return raised / np.where(sums > 0.0, sums, 1.0)


def _uniform(seen: Seen) -> Iterator[Law]:
    shown = seen.expected > 0.0
    count = shown.sum(axis=-1, keepdims=True)
    if count.max(initial=0) > 1 and seen.holds(seen.within(shown / np.maximum(count, 1))):
        yield Law("uniform", "rows are uniform over the keys that they attend to")


def _unmasked(seen: Seen) -> Iterator[Law]:
    """Yield weights of hidden keys, if shown keys are in the right proportion."""
    if seen.hidden is None or seen.hidden.shape != seen.actual.shape:
        return
    shown, a = ~seen.hidden, np.where(np.isfinite(seen.actual), seen.actual, 0.0)
    e = np.where(shown, seen.expected, 0.0)
    rows = (seen.hidden & (a > seen.allowed["max"])).any(axis=-1)
    if not np.allclose(a.sum(axis=-1)[rows], 1.0, atol=1e-3):
        return
    count = int(np.count_nonzero(shown.sum(axis=-1)[rows] > 1))  # one key has no proportion
    size = (e * e).sum(axis=-1, keepdims=True)
    factor = np.divide(
        (a * e).sum(axis=-1, keepdims=True), size, out=np.zeros_like(size), where=size > 0.0
    )
    candidate = np.where(shown, factor * seen.expected, a)
    if count > 2 and seen.is_enough(rows.size) and seen.holds(candidate, np.maximum(factor, 1.0)):
        words = (
            "hidden cells have weight, and shown ones are in the right proportion: the softmax "
            "includes hidden keys"
        )
        yield Law("unmasked", words, {"most": float(a[seen.hidden].max())}, count)


def weights_signs(seen: Seen) -> Iterator[str]:
    """Yield unexpected properties of attention weights: rows that do not sum to 1, hidden cells
    with weight.
    """
    if not seen.stage.is_attn_weights or seen.actual.ndim != 4:
        return
    slack = seen.allowed["max"] * np.sqrt(seen.actual.shape[-1]) + 1e-12
    a = np.where(np.isfinite(seen.actual), seen.actual, 0.0)
    if np.isfinite(seen.actual).all() and np.isfinite(seen.expected).all():
        sums, right = a.sum(axis=-1), seen.expected.sum(axis=-1)
        wrong = np.abs(sums - right) > slack
        if wrong.any():
            should = ", and should to 1" if np.allclose(right[wrong], 1.0, atol=1e-3) else ""
            should = should or (", and should to 0" if not right[wrong].any() else "")
            yield (
                f"rows sum to {_range(sums[wrong])}{should} ({np.count_nonzero(wrong)} of "
                f"{wrong.size} rows)"
            )
            others = [
                words
                for axis, words in SUMS.items()
                if a.shape[axis] > 1 and _sums_to_1(a, axis, slack)
            ]
            if others:
                yield f"the weights sum to 1 over {and_listed(others)}"
    if seen.hidden is not None and seen.hidden.shape == a.shape:
        weighing = seen.hidden & (a > slack) & (seen.expected <= slack)
        if weighing.any():
            yield (
                f"{np.count_nonzero(weighing)} hidden cells have weight, at most "
                f"{readable(float(a[weighing].max()))}"
            )
        lost = ~seen.hidden & (seen.actual == 0.0) & (seen.expected > slack)
        if lost.any():
            yield f"{np.count_nonzero(lost)} visible cells have weight 0"


def _sums_to_1(a: np.ndarray, axis: int, slack: float) -> bool:
    sums = a.sum(axis=axis)
    return bool(
        (np.isclose(sums, 1.0, atol=max(10.0 * slack, 1e-5)) | (sums == 0.0)).all() and sums.any()
    )


def _range(numbers: np.ndarray) -> str:
    low, high = readable(float(numbers.min())), readable(float(numbers.max()))
    return low if low == high else f"{low} … {high}"


# ---- Scores --------------------------------------------------------------------------------------


def scores(seen: Seen) -> Iterator[Law]:
    """Yield differences of scores that grow with the distance of a key, or depend on it alone."""
    if seen.stage.quantity != "scores" or seen.actual.ndim != 4 or not seen.usable.any():
        return
    a, e = seen.known
    difference, queries, keys = a - e, a.shape[2], a.shape[3]
    distance = np.broadcast_to(key_distances(queries, keys), a.shape)
    yield from _by_distance(seen, difference, distance)


def _by_distance(seen: Seen, difference: np.ndarray, distance: np.ndarray) -> Iterator[Law]:
    """Yield a bias that depends on the distance between query and key: linearly, as in ALiBi, or in
    any way.
    """
    heads = len(seen.box[1])
    for words, x in (("key - query", distance), ("|key - query|", np.abs(distance))):
        x = np.where(seen.usable, x, 0).astype(np.float64)
        slope = slopes_of(difference, x)[None, :, None, None]
        gain = 1.0 + np.abs(slope) * distance.max() / max(seen.scale, 1e-300)
        if (
            slope.any()
            and seen.is_enough(heads)
            and seen.holds(seen.within(seen.expected + slope * x), gain)
        ):
            slopes = slope[0, seen.box[1], 0, 0].tolist()
            text = (
                f"slope * ({words}) is added there, as in ALiBi; the slopes of the heads: "
                f"{listed(slopes)}"
            )
            yield Law("slope", text, {"slopes": slopes}, heads)
            return
    queries, keys = difference.shape[2:]
    parameters = heads * (queries + keys - 1)
    if not seen.is_enough(parameters) or queries < 3 or keys < 3:
        return
    index = (distance[0, 0] + queries - 1).ravel()
    total = np.zeros((difference.shape[1], queries + keys - 1))
    counted = np.zeros_like(total)
    for head in seen.box[1]:
        total[head] = np.bincount(
            index, difference[:, head].sum(axis=0).ravel(), queries + keys - 1
        )
        counted[head] = np.bincount(
            index, seen.usable[:, head].sum(axis=0).ravel(), queries + keys - 1
        )
    mean = total / np.maximum(counted, 1.0)
    if seen.holds(seen.within(seen.expected + mean[:, index].reshape(-1, queries, keys))):
        numbers = mean[seen.box[1]].ravel().tolist()
        text = (
            f"a bias that depends only on the distance of query and key is added there: "
            f"{listed(numbers)}"
        )
        yield Law(
            "by distance",
            text,
            {"heads": list(map(int, seen.box[1])), "offsets": numbers},
            parameters,
        )


# ---- The mask ------------------------------------------------------------------------------------


def masks(seen: Seen) -> Iterator[Law]:
    """Yield a mask that is inverted, or shows other distances."""
    if seen.stage.kind != "mask" or seen.actual.ndim != 4:
        return
    is_mixed = (
        len(np.unique(seen.expected[seen.part])) > 1
    )  # equal cells say nothing about the mask
    if is_mixed and seen.holds(seen.within(1.0 - seen.expected)):
        yield Law("inverted", "hidden cells are shown, and shown cells hidden")
    sequences = seen.box[0]
    positions = _query_positions(seen)[sequences]
    shows, should = (_band(mask[sequences], positions) for mask in (seen.actual, seen.expected))
    if shows is None or shows == should:
        return
    keys = seen.actual.shape[3]
    right = "" if should is None else f" instead of {_band_words(should, positions, keys)}"
    words = f"a query attends to {_band_words(shows, positions, keys)}{right}"
    yield Law("band", words, {"first": shows[0], "last": shows[1]}, 2)


def _query_positions(seen: Seen) -> np.ndarray:
    """Return the positions of queries among the keys, or among the slots of a cache, (B, T)."""
    batch, _, queries, _ = seen.actual.shape
    positions = np.broadcast_to(np.arange(queries), (batch, queries))
    if seen.problem is None or seen.stage.step is None:
        return positions
    return positions + np.array(seen.problem.case.lengths_before(seen.stage.step))[:, None]


def _band(mask: np.ndarray, positions: np.ndarray) -> Band | None:
    """Return the band of distances, key - query, that a mask of numbers shows, if it is one."""
    if not np.isin(mask, (0, 1)).all():
        return None
    distances = (np.arange(mask.shape[3]) - positions[..., None])[:, None]  # (B, 1, T, S)
    return band_of(mask != 0, distances)


def _band_words(band: Band, positions: np.ndarray, keys: int) -> str:
    first, last = band
    begin = "from the first key" if first <= -positions.max() else f"from {_away(first)}"
    end = "to the last key" if last >= keys - 1 - positions.min() else f"to {_away(last)}"
    return f"the keys {begin} {end}"


def _away(distance: int) -> str:
    if not distance:
        return "its own"
    return f"{abs(distance)} {'before' if distance < 0 else 'after'} its own"


# ---- The context ---------------------------------------------------------------------------------


def contexts(seen: Seen) -> Iterator[Law]:
    """Yield rows without a key that have the mean of all values."""
    if seen.stage.quantity != "context" or seen.place.cells != "empty rows":
        return
    prefix = "" if seen.stage.step is None else f"step{seen.stage.step}."
    v = next(
        (
            seen.others[name]
            for name in (f"{prefix}cache.values", f"{prefix}v")
            if name in seen.others
        ),
        None,
    )
    if v is None or v.ndim != 4 or seen.expected.shape[1] % v.shape[1]:
        return
    mean = np.repeat(
        v.astype(np.float64).mean(axis=2, keepdims=True),
        seen.expected.shape[1] // v.shape[1],
        axis=1,
    )
    if mean.shape[3] != seen.expected.shape[3]:
        return
    # The tolerance of expected zeros is 0 in the part itself: the remainder is compared with the
    # size of the values.
    if seen.holds(seen.within(np.broadcast_to(mean, seen.expected.shape))):
        yield Law(
            "mean of v", "rows without a key are the mean of all values: their weights are uniform"
        )
