"""Patterns of rows: scores, attention weights, masks, and the context of rows without a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.families import BugFamily, Families
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.fits.record import Difference
from parity.explain.diagnosis.fits.values import sizes_of
from parity.explain.diagnosis.fits.words import indices, known_as, listed, number_words, readable
from parity.explain.diagnosis.sample import sample_of
from parity.explain.fitting.distances import Band, band_of, key_distances, slopes_of
from parity.measure.core.problem import Problem
from parity.measure.core.reference import Arithmetic, Layer
from parity.measure.text import and_listed

SUMS = {0: "the batch", 1: "the heads", 2: "the queries"}
"""The other axes over which a softmax may wrongly be applied."""


# ---- Attention weights ---------------------------------------------------------------------------


def attn_weights(difference: Difference) -> Iterator[Edit]:
    """Yield rows of a different softmax: scores times a number, uniform rows, each row times a
    number.
    """
    if not difference.stage.is_attn_weights or difference.actual.ndim != 4:
        return
    yield from _power(difference)
    yield from _uniform(difference)
    yield from _unmasked(difference)
    yield from _row_factors(difference)


def _row_factors(difference: Difference) -> Iterator[Edit]:
    """Yield rows that are each multiplied by a number."""
    a, e = difference.usable_values
    is_wrong_row = difference.part.any(axis=-1, keepdims=True)
    rows = int(np.count_nonzero(is_wrong_row))
    factor = _factor_of_rows(a, e, 1.0)
    if not difference.is_enough(rows):
        return
    if not difference.is_explained_by(
        difference.within(factor * difference.expected), np.abs(factor)
    ):
        return
    sums = (factor * e.sum(axis=-1, keepdims=True))[is_wrong_row]
    words = f"each row there is multiplied by a different number, so that it sums to {_range(sums)}"
    yield difference.pattern("rows", words, {"sums": [float(sums.min()), float(sums.max())]}, rows)


def _factor_of_rows(actual: np.ndarray, expected: np.ndarray, of_empty: float) -> np.ndarray:
    """Return the factor of each row that brings the expected values closest to the actual ones;
    `of_empty` where all expected values are 0.
    """
    size = (expected * expected).sum(axis=-1, keepdims=True)
    products = (actual * expected).sum(axis=-1, keepdims=True)
    return np.divide(products, size, out=np.full_like(size, of_empty), where=size > 0)


def _power(difference: Difference) -> Iterator[Edit]:
    """Yield weights of multiplied scores: softmax(c s) is proportional to softmax(s) to the power
    of c.
    """
    a, e = difference.actual, difference.expected
    shown = difference.usable & (a > 1e-12) & (e > 1e-12)
    counts = shown.sum(axis=-1, keepdims=True)
    if np.count_nonzero(shown) - np.count_nonzero(counts) < 3:
        return
    actual_log = np.log(a, out=np.zeros_like(a), where=shown)
    expected_log = np.log(e, out=np.zeros_like(e), where=shown)
    weight = np.where(shown, np.minimum(a, e), 0.0)  # logarithms of small weights are inexact
    y = np.where(shown, actual_log - _mean_of_rows(actual_log, weight), 0.0)
    x = np.where(shown, expected_log - _mean_of_rows(expected_log, weight), 0.0)
    size = float((weight * x * x).sum())
    if not size:
        return
    power = float((weight * y * x).sum()) / size
    if not power or abs(power) > 1e4:
        return
    candidate = _raised(e, power)
    # Errors of small weights move the fit of their logarithms: a Gauss-Newton step fits the weights
    # themselves.
    mean_log = (candidate * expected_log).sum(axis=-1, keepdims=True)
    slope = np.where(shown, candidate * (expected_log - mean_log), 0.0)
    size = float((slope * slope).sum())
    if size:
        power += float((slope * np.where(shown, a - candidate, 0.0)).sum()) / size
        candidate = _raised(e, power)
    if difference.is_explained_by(difference.within(candidate), max(1.0, abs(power))):
        names = known_as(power, 1e-4, sizes_of(difference), difference.problem)
        words = f"rows result from scores times {number_words(power, names)}"
        families: Families = ()
        if difference.problem is not None:
            families = (of.scale_family(difference.problem.spec),)
        yield difference.pattern("power", words, {"factor": power}, 1, families=families)


def _mean_of_rows(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the weighted mean of each row."""
    total = np.maximum(weight.sum(axis=-1, keepdims=True), 1e-300)
    return (weight * x).sum(axis=-1, keepdims=True) / total


def _raised(weights: np.ndarray, power: float) -> np.ndarray:
    """Return rows of weights to a power, which sum to 1 again."""
    raised = np.power(weights, power, out=np.zeros_like(weights), where=weights > 0.0)
    sums = raised.sum(axis=-1, keepdims=True)
    return raised / np.where(sums > 0.0, sums, 1.0)


def _uniform(difference: Difference) -> Iterator[Edit]:
    shown = difference.expected > 0.0
    count = shown.sum(axis=-1, keepdims=True)
    if count.max(initial=0) > 1 and difference.is_explained_by(
        difference.within(shown / np.maximum(count, 1))
    ):
        yield difference.pattern("uniform", "rows are uniform over the keys that they attend to")


def _unmasked(difference: Difference) -> Iterator[Edit]:
    """Yield weights of hidden keys, if shown keys are in the right proportion."""
    if difference.hidden is None or difference.hidden.shape != difference.actual.shape:
        return
    shown = ~difference.hidden
    a = np.where(np.isfinite(difference.actual), difference.actual, 0.0)
    e = np.where(shown, difference.expected, 0.0)
    rows = (difference.hidden & (a > difference.allowed["max"])).any(axis=-1)
    if not np.allclose(a.sum(axis=-1)[rows], 1.0, atol=1e-3):
        return
    count = int(np.count_nonzero(shown.sum(axis=-1)[rows] > 1))  # one key has no proportion
    factor = _factor_of_rows(a, e, 0.0)
    candidate = np.where(shown, factor * difference.expected, a)
    if (
        count > 2
        and difference.is_enough(int(np.count_nonzero(rows)))
        and difference.is_explained_by(candidate, np.maximum(factor, 1.0))
    ):
        most = {"most": float(a[difference.hidden].max())}
        compared = difference.hidden
        if difference.unused is not None:
            compared = compared & ~difference.unused
        columns = _shown_columns(compared, a, difference.allowed["max"])
        if columns is not None:
            yield _with_shown_keys(difference, difference.hidden, columns, most, count)
            return
        words = (
            "hidden cells have weight, and shown ones are in the right proportion: the softmax "
            "includes hidden keys"
        )
        families = _families_of_leak(difference)
        yield difference.pattern("unmasked", words, most, count, families=families)


def _shown_columns(hidden: np.ndarray, weights: np.ndarray, slack: float) -> np.ndarray | None:
    """Return the keys of each sequence of which every hidden cell has weight, (B, S), if all other
    hidden cells have the weight 0, and there are some: then a mask hides them, but not these keys.
    """
    has_weight = hidden & (weights > slack)
    columns = np.any(has_weight, axis=(1, 2))
    in_columns = hidden & columns[:, None, None, :]
    others = hidden & ~in_columns
    if not others.any() or weights[others].any():
        return None
    # A weight may be too small for its dtype, but it is not exactly 0 everywhere.
    if np.count_nonzero(weights[in_columns]) < MOST_CELLS * np.count_nonzero(in_columns):
        return None
    return columns


MOST_CELLS = 0.9
"""The share of the hidden cells of shown keys that have weight: in 16 bits, some round to 0."""


def _with_shown_keys(
    difference: Difference,
    hidden: np.ndarray,
    columns: np.ndarray,
    most: Mapping[str, float],
    count: int,
) -> Edit:
    """Return the pattern of a mask that shows some keys of some sequences to every query."""
    keys_of_sequences = []
    for sequence in np.flatnonzero(columns.any(axis=1)):
        keys = indices(
            np.flatnonzero(columns[sequence]), columns.shape[1], ("key", "keys"), in_time=False
        )
        keys_of_sequences.append(f"{keys} of sequence {sequence}")
    words = (
        f"the mask shows hidden keys to every query, and hides all others: "
        f"{and_listed(keys_of_sequences)}"
    )
    families: Families = ()
    is_hidden_from_all = np.all(hidden, axis=(1, 2))
    # A key that no query attends to is padding.
    if is_hidden_from_all[columns].all():
        families = (of.SHOWN_PADDING,)
    return difference.pattern("shown keys", words, most, count, families=families)


def _families_of_leak(difference: Difference) -> Families:
    """Return the family of hidden keys with weight, if the mask is right: otherwise it is wrong
    itself, or the wrong one is used.
    """
    problem = difference.problem
    if problem is None or difference.hidden is None:
        return ()
    if difference.stage.step is not None or sample_of(problem) is not None:
        return ()
    right_mask = Layer(problem, Arithmetic(np.dtype(np.float64))).mask({})["mask"]
    if not np.array_equal(right_mask, difference.hidden):
        return ()
    return (of.LEAKING,)


def weights_signs(difference: Difference) -> Iterator[str]:
    """Yield unexpected properties of attention weights: rows that do not sum to 1, hidden cells
    with weight.
    """
    if not difference.stage.is_attn_weights or difference.actual.ndim != 4:
        return
    slack = difference.allowed["max"] * np.sqrt(difference.actual.shape[-1]) + 1e-12
    a = np.where(np.isfinite(difference.actual), difference.actual, 0.0)
    if np.isfinite(difference.actual).all() and np.isfinite(difference.expected).all():
        yield from _signs_of_sums(difference, slack)
    if difference.hidden is not None and difference.hidden.shape == a.shape:
        weighing = difference.hidden & (a > slack) & (difference.expected <= slack)
        if weighing.any():
            yield (
                f"{np.count_nonzero(weighing)} hidden cells have weight, at most "
                f"{readable(float(a[weighing].max()))}"
            )
        lost = ~difference.hidden & (difference.actual == 0.0) & (difference.expected > slack)
        if lost.any():
            yield f"{np.count_nonzero(lost)} visible cells have weight 0"


def _signs_of_sums(difference: Difference, slack: float) -> Iterator[str]:
    """Yield rows with wrong sums, and other axes over which the weights sum to 1."""
    sums, right_sums = difference.actual.sum(axis=-1), difference.expected.sum(axis=-1)
    is_wrong = np.abs(sums - right_sums) > slack
    if not is_wrong.any():
        return
    right = ""
    if np.allclose(right_sums[is_wrong], 1.0, atol=1e-3):
        right = ", and should to 1"
    elif not right_sums[is_wrong].any():
        right = ", and should to 0"
    yield (
        f"rows sum to {_range(sums[is_wrong])}{right} ({np.count_nonzero(is_wrong)} of "
        f"{is_wrong.size} rows)"
    )
    axes = []
    for axis, words in SUMS.items():
        if difference.actual.shape[axis] > 1 and _sums_to_1(difference.actual, axis, slack):
            axes.append(words)
    if axes:
        yield f"the weights sum to 1 over {and_listed(axes)}"


def _sums_to_1(a: np.ndarray, axis: int, slack: float) -> bool:
    sums = a.sum(axis=axis)
    is_one = np.isclose(sums, 1.0, atol=max(10.0 * slack, 1e-5))
    return bool((is_one | (sums == 0.0)).all() and sums.any())


def _range(numbers: np.ndarray) -> str:
    low, high = readable(float(numbers.min())), readable(float(numbers.max()))
    if low == high:
        return low
    return f"{low} … {high}"


# ---- Scores --------------------------------------------------------------------------------------


def scores(difference: Difference) -> Iterator[Edit]:
    """Yield differences of scores that grow with the distance of a key, or depend on it alone."""
    if (
        difference.stage.quantity != "scores"
        or difference.actual.ndim != 4
        or not difference.usable.any()
    ):
        return
    a, e = difference.usable_values
    error, queries, keys = a - e, a.shape[2], a.shape[3]
    distance = np.broadcast_to(key_distances(queries, keys), a.shape)
    slopes = next(_slopes(difference, error, distance), None)
    if slopes is not None:
        yield slopes
        return
    yield from _by_distance(difference, error, distance)


def _slopes(difference: Difference, error: np.ndarray, distance: np.ndarray) -> Iterator[Edit]:
    """Yield biases that are proportional to the distance between query and key, as in ALiBi."""
    heads = len(difference.box[1])
    if not difference.is_enough(heads):
        return
    for words, x in (("key - query", distance), ("|key - query|", np.abs(distance))):
        x = np.where(difference.usable, x, 0).astype(np.float64)
        slope = slopes_of(error, x)[None, :, None, None]
        gain = 1.0 + np.abs(slope) * distance.max() / max(difference.scale, 1e-300)
        if slope.any() and difference.is_explained_by(
            difference.within(difference.expected + slope * x), gain
        ):
            slopes = slope[0, difference.box[1], 0, 0].tolist()
            text = (
                f"slope * ({words}) is added there, as in ALiBi; the slopes of the heads: "
                f"{listed(slopes)}"
            )
            families = _families_of_distances(difference)
            yield difference.pattern("slope", text, {"slopes": slopes}, heads, families=families)


def _by_distance(difference: Difference, error: np.ndarray, distance: np.ndarray) -> Iterator[Edit]:
    """Yield a bias that depends in any way on the distance between query and key."""
    heads = len(difference.box[1])
    queries, keys = error.shape[2:]
    num_distances = queries + keys - 1
    parameters = heads * num_distances
    if not difference.is_enough(parameters) or queries < 3 or keys < 3:
        return
    index = (distance[0, 0] + queries - 1).ravel()
    total = np.zeros((error.shape[1], num_distances))
    counted = np.zeros_like(total)
    for head in difference.box[1]:
        sums = error[:, head].sum(axis=0).ravel()
        counts = difference.usable[:, head].sum(axis=0).ravel()
        total[head] = np.bincount(index, sums, num_distances)
        counted[head] = np.bincount(index, counts, num_distances)
    mean = total / np.maximum(counted, 1.0)
    if difference.is_explained_by(
        difference.within(difference.expected + mean[:, index].reshape(-1, queries, keys))
    ):
        offsets_by_distance = mean[difference.box[1]].ravel().tolist()
        text = (
            f"a bias that depends only on the distance of query and key is added there: "
            f"{listed(offsets_by_distance)}"
        )
        fitted = {"heads": difference.box[1].tolist(), "offsets": offsets_by_distance}
        families = _families_of_distances(difference)
        yield difference.pattern("by distance", text, fitted, parameters, families=families)


def _families_of_distances(difference: Difference) -> Families:
    """Return the family of the biases or products of the layer that depend on distances."""
    if difference.problem is None:
        return ()
    spec = difference.problem.spec
    if spec.alibi is not None:
        return (of.ALIBI,)
    if spec.relative_bias is not None:
        return (of.RELATIVE_BIAS,)
    if spec.relative_products is not None:
        return (of.RELATIVE_PRODUCTS,)
    return ()


# ---- The mask ------------------------------------------------------------------------------------


def masks(difference: Difference) -> Iterator[Edit]:
    """Yield a mask that is inverted, or shows other distances."""
    if difference.stage.kind != "mask" or difference.actual.ndim != 4:
        return
    # Equal cells say nothing about the mask.
    is_mixed = len(np.unique(difference.expected[difference.part])) > 1
    if is_mixed and difference.is_explained_by(difference.within(1.0 - difference.expected)):
        words = "hidden cells are shown, and shown cells hidden"
        yield difference.pattern(
            "inverted", words, families=_families_of_mask(difference, of.POLARITY)
        )
    sequences = difference.box[0]
    positions = _query_positions(difference)[sequences]
    actual_band = _band(difference.actual[sequences], positions)
    expected_band = _band(difference.expected[sequences], positions)
    if actual_band is None or actual_band == expected_band:
        return
    keys = difference.actual.shape[3]
    words = f"a query attends to {_band_words(actual_band, positions, keys)}"
    if expected_band is not None:
        words += f" instead of {_band_words(expected_band, positions, keys)}"
    first, last = actual_band
    families = _families_of_mask(difference, of.CAUSAL)
    yield difference.pattern("band", words, {"first": first, "last": last}, 2, families=families)


def _families_of_mask(difference: Difference, family: BugFamily) -> Families:
    """Return a family of masks, after the mask of the layer's window or chunk, if it has one."""
    problem = difference.problem
    if problem is None or problem.case.is_cached:
        return ()
    if not _has_span(problem):
        return (family,)
    return of.span_family(problem), family


def _has_span(problem: Problem) -> bool:
    """Return True if keys are hidden by their distance."""
    spec = problem.spec
    spans = (spec.window_size, spec.chunk_size, problem.case.window_size)
    return any(span is not None for span in spans)


def _query_positions(difference: Difference) -> np.ndarray:
    """Return the positions of queries among the keys, or among the slots of a cache, (B, T)."""
    batch, _, queries, _ = difference.actual.shape
    positions = np.broadcast_to(np.arange(queries), (batch, queries))
    if difference.problem is None or difference.stage.step is None:
        return positions
    return (
        positions + np.array(difference.problem.case.lengths_before(difference.stage.step))[:, None]
    )


def _band(mask: np.ndarray, positions: np.ndarray) -> Band | None:
    """Return the band of distances, key - query, that a mask of floats shows, if it is one."""
    if not np.isin(mask, (0, 1)).all():
        return None
    distances = (np.arange(mask.shape[3]) - positions[..., None])[:, None]  # (B, 1, T, S)
    return band_of(mask != 0, distances)


def _band_words(band: Band, positions: np.ndarray, keys: int) -> str:
    first, last = band
    first_key = _away(first)
    if first <= -positions.max():
        first_key = "the first key"
    last_key = _away(last)
    if last >= keys - 1 - positions.min():
        last_key = "the last key"
    return f"the keys from {first_key} to {last_key}"


def _away(distance: int) -> str:
    if distance < 0:
        return f"{-distance} before its own"
    if distance > 0:
        return f"{distance} after its own"
    return "its own"


# ---- The context ---------------------------------------------------------------------------------


def contexts(difference: Difference) -> Iterator[Edit]:
    """Yield rows without a key that have the mean of all values."""
    if difference.stage.quantity != "context" or difference.location.cells != "empty rows":
        return
    v = _values_of_call(difference)
    num_heads = difference.expected.shape[1]
    if v is None or v.ndim != 4 or num_heads % v.shape[1]:
        return
    mean = v.astype(np.float64).mean(axis=2, keepdims=True)
    mean = np.repeat(mean, num_heads // v.shape[1], axis=1)
    if mean.shape[3] != difference.expected.shape[3]:
        return
    # The tolerance of expected zeros is 0 in the part itself: the remainder is compared with the
    # size of the values.
    if difference.is_explained_by(
        difference.within(np.broadcast_to(mean, difference.expected.shape))
    ):
        words = "rows without a key are the mean of all values: their weights are uniform"
        yield difference.pattern("mean of v", words, families=(of.EMPTY_ROWS,))


def _values_of_call(difference: Difference) -> np.ndarray | None:
    """Return the values to which the queries of a stage attend, if they are known."""
    prefix = ""
    if difference.stage.step is not None:
        prefix = f"step{difference.stage.step}."
    cached_values = difference.other_stages.get(f"{prefix}cache.values")
    if cached_values is not None:
        return cached_values
    return difference.other_stages.get(f"{prefix}v")
