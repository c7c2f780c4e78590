"""Bugs in scores that depend on distances: ALiBi, relative biases and relative products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import numpy as np

from mha_spec import GridBias, RelativeBias, RelativeProducts, SinusoidProducts
from parity.explain.diagnosis.bugs.families import ALIBI, RELATIVE_BIAS, RELATIVE_PRODUCTS
from parity.explain.diagnosis.bugs.record import Bug, Override, instead
from parity.explain.diagnosis.bugs.sites import Overrides, after, before
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer

RESTARTED = (
    "the distance is counted from the first key in each call with a cache",
    {"scores": lambda _, original, values, *places: original(values)},
)
"""The description and overrides of a bug that all of them can have."""

SINUSOID_PRODUCTS = replace(
    RELATIVE_PRODUCTS,
    fix="add scaled products of q + position_bias with the projected sinusoids of query - key, "
    "sine and cosine in turn, and of content_bias with keys",
)


# ---- ALiBi ---------------------------------------------------------------------------------------


def alibi(case: Case) -> Iterator[Bug]:
    spec, right = case.spec, case.spec.alibi
    if right is None:
        return
    bug = ALIBI.seen_in("scores")
    factors = {
        "missing": (0.0, "nothing is subtracted from scores for the distance of their keys"),
        "added": (-1.0, "the distance of a key is added to its score instead of subtracted"),
    }
    if spec.score_scale != 1.0 and right.scaled:
        factors["not-scaled"] = 1.0 / spec.score_scale, "slopes are not scaled like the scores"
    elif spec.score_scale != 1.0:
        factors["scaled"] = spec.score_scale, "slopes are scaled like the scores"
    for name, (factor, about) in factors.items():
        yield bug(
            f"alibi-{name}", about, {"slopes": after(lambda slopes, factor=factor: factor * slopes)}
        )

    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    n, largest = np.arange(1, num_heads + 1), 1 << (num_heads.bit_length() - 1)
    exponents = {}  # relative to the largest
    if largest != num_heads:
        exponents["evenly"] = (
            n / num_heads,
            "slopes are 2 ** (-8 n / N) although N is not a power of two",
        )
        about = "slopes are the first ones for the next power of two"
        exponents["of-next-power"] = n / (2 * largest), about
    if num_kv_heads < num_heads:
        of_group = 1 + (n - 1) // (num_heads // num_kv_heads)
        about = "slopes are computed for the number of key/value heads"
        exponents["of-kv-heads"] = of_group / num_kv_heads, about
    for name, (shares, about) in exponents.items():
        slopes = 2.0 ** (-right.max_bias * shares) * (spec.score_scale if right.scaled else 1.0)
        yield bug(f"alibi-slopes-{name}", about, {"slopes": instead(lambda slopes=slopes: slopes)})
    if case.is_cached:
        yield bug("alibi-restarted", *RESTARTED)


# ---- Relative bias -------------------------------------------------------------------------------


def relative_bias(case: Case) -> Iterator[Bug]:
    spec = case.spec
    right, num_heads = spec.relative_bias, spec.num_heads
    if right is None:
        return
    bug = RELATIVE_BIAS.seen_in("scores")
    yield bug(
        "relative-bias-ignored",
        "no bias for the distance of keys is added to the scores",
        _times(0.0),
    )
    yield from _of_grid(right) if isinstance(right, GridBias) else _of_distances(right)
    if spec.score_scale != 1.0:
        yield bug(
            "relative-bias-scaled",
            "the bias is added before the scores are scaled",
            _times(spec.score_scale),
        )
    transposed = after(lambda table: table.reshape(num_heads, -1).T)
    yield bug(
        "relative-bias-transposed",
        "the table is read as (N, num_buckets)",
        {"relative_table": transposed},
    )
    if case.is_cached:
        yield bug("relative-bias-restarted", *RESTARTED)


def _of_distances(right: RelativeBias) -> Iterator[Bug]:
    bug = RELATIVE_BIAS.seen_in("scores")
    if right.bidirectional and right.max_distance > right.num_buckets // 2:
        about = "later keys share the query's own bucket, as in a decoder"
        yield bug("relative-bias-one-directional", about, _with(bidirectional=False))
    if not right.bidirectional and right.num_buckets >= 4 and right.num_buckets % 2 == 0:
        about = "half of the buckets are for later keys, as in an encoder"
        yield bug("relative-bias-bidirectional", about, _with(bidirectional=True))
    yield bug(
        "relative-bias-flipped",
        "distances are counted as query - key instead of key - query",
        {"bucket": before(lambda distance: (-distance,))},
    )
    about = "queries are counted from 1, keys from 0"
    yield bug(
        "relative-bias-off-by-one", about, {"bucket": before(lambda distance: (distance - 1,))}
    )
    if not np.array_equal(_Linear(**asdict(right)).buckets(), right.buckets()):
        about = "all buckets of more than one distance have equal width"
        yield bug("relative-bias-linear", about, {"share_of_logarithm": _share_of_distance})


def _of_grid(right: GridBias) -> Iterator[Bug]:
    bug = RELATIVE_BIAS.seen_in("scores")
    first = int(right.class_token)
    about = "differences of rows and columns are counted as key - query instead of query - key"
    yield bug(
        "grid-bias-flipped",
        about,
        {"bucket_on": before(lambda grid, query, key: (grid, key, query))},
    )
    if right.height > 1 and right.width > 1:

        def by_column(place: np.ndarray) -> np.ndarray:
            column, row = np.divmod(place - first, right.height)
            return np.where(place < first, place, row * right.width + column + first)

        columns = before(lambda grid, query, key: (grid, by_column(query), by_column(key)))
        yield bug(
            "grid-bias-by-columns", "tokens are counted column by column", {"bucket_on": columns}
        )
    if right.class_token:
        about = "the buckets of the class token as query and as key are exchanged"
        as_query, as_key = right.num_buckets - 3, right.num_buckets - 2
        swap = {as_query: as_key, as_key: as_query}
        swapped = after(
            lambda buckets: np.vectorize(lambda bucket: swap.get(bucket, bucket))(buckets)
        )
        yield bug("grid-bias-class-token", about, {"bucket_on": swapped})


# ---- Relative products ---------------------------------------------------------------------------


def relative_products(case: Case) -> Iterator[Bug]:
    spec, right = case.spec, case.spec.relative_products
    if right is None:
        return
    family = RELATIVE_PRODUCTS
    if isinstance(right, SinusoidProducts):
        family = SINUSOID_PRODUCTS
    bug = family.seen_in("scores")
    none = after(lambda products: [0.0 * each for each in products])
    about = "scores gain no products with vectors of distances"
    yield bug("relative-products-ignored", about, {"relative_products": none})
    if spec.score_scale != 1.0:
        unscaled, twice = instead(lambda: 1.0), after(lambda scale: scale * scale)
        about = "products with vectors of distances are not scaled"
        yield bug("relative-products-unscaled", about, {"scale_of_distances": unscaled})
        about = "products with vectors of distances are scaled twice"
        yield bug("relative-products-scaled-twice", about, {"scale_of_distances": twice})
    if isinstance(right, SinusoidProducts):
        yield from _sinusoid_products(bug)
    else:
        yield from _products_with_tables(right, bug)
    if case.is_cached:
        yield bug("relative-products-restarted", *RESTARTED)


def _products_with_tables(right: RelativeProducts, bug: Callable[..., Bug]) -> Iterator[Bug]:
    """Yield bugs in products with tables of vectors."""
    about = "distances are query - key"
    flipped = {"distance_bucket": before(lambda distance: (-distance,))}
    yield bug("relative-products-flipped", about, flipped)
    about = "queries are counted from 1, keys from 0"
    yield bug(
        "relative-products-off-by-one",
        about,
        {"distance_bucket": before(lambda distance: (distance - 1,))},
    )
    if right.num_buckets > 3:
        inner = after(lambda buckets: np.clip(buckets, 1, right.num_buckets - 2))
        about = "distances are clipped one token too early on either side"
        yield bug("relative-products-clipped-early", about, {"distance_bucket": inner})
    if right.num_exact is not None:
        about = "every distance has a vector of its own, without steps of the logarithm"
        yield bug(
            "relative-products-linear", about, {"logarithmic_step": instead(lambda away: away)}
        )
    if right.of_queries and right.of_keys:
        other = {"relative_keys": "relative_queries", "relative_queries": "relative_keys"}
        swapped = {"distance_vectors": before(lambda name: (other[name],))}
        yield bug(
            "relative-products-swapped",
            "queries have the vectors of keys, and keys those of queries",
            swapped,
        )
        for place, name in enumerate(("queries", "keys")):
            alone = after(lambda products, place=place: products[place : place + 1])
            about = f"products of {name} with vectors of distances are the only ones"
            yield bug(f"relative-products-of-{name}-alone", about, {"relative_products": alone})


def _sinusoid_products(bug: Callable[..., Bug]) -> Iterator[Bug]:
    """Yield bugs in products with projected sinusoids."""
    flipped = {"sinusoid_distance": before(lambda distance: (-distance,))}
    yield bug("sinusoid-products-flipped", "sinusoids are those of key - query", flipped)
    about = "queries are counted from 1, keys from 0"
    later = {"sinusoid_distance": before(lambda distance: (distance + 1,))}
    yield bug("sinusoid-products-off-by-one", about, later)
    halves = {"in_sinusoid_order": instead(_in_halves)}
    about = "all sines come before all cosines, instead of in turn"
    yield bug("sinusoid-products-in-halves", about, halves)
    about = "the content bias and the position bias are exchanged"
    other = {"content_bias": "position_bias", "position_bias": "content_bias"}
    swapped = {"bias_of_heads": before(lambda name: (other[name],))}
    yield bug("sinusoid-products-biases-swapped", about, swapped)
    for name in other:
        about = f"the {name.replace('_', ' ')} is not added to queries"
        yield bug(
            f"sinusoid-products-without-{name.replace('_', '-')}",
            about,
            {"bias_of_heads": _without(name)},
        )


def _in_halves(sines: np.ndarray, cosines: np.ndarray) -> np.ndarray:
    return np.concatenate([sines, cosines], axis=1)


def _without(name: str) -> Override:
    """Return an override of `bias_of_heads` in which one bias is 0."""

    def without(_: Layer, original: Override, requested: str) -> np.ndarray:
        bias = original(requested)
        return np.zeros_like(bias) if requested == name else bias

    return without


def _times(factor: float) -> Overrides:
    return {"gained_by_distance": after(lambda gained: gained.dtype.type(factor) * gained)}


def _with(*, bidirectional: bool) -> Overrides:
    return {"relative_bias": after(lambda right: replace(right, bidirectional=bidirectional))}


class _Linear(RelativeBias):
    """Use buckets of equal width for more than one distance."""

    def buckets(self) -> np.ndarray:
        distances = np.arange(-self.max_distance, self.max_distance + 1)
        count = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        away = np.abs(distances) if self.bidirectional else np.maximum(-distances, 0)
        first, width = count // 2, (self.max_distance - count // 2) / (count - count // 2)
        shared = np.minimum(first + np.floor((away - first) / width).astype(np.int64), count - 1)
        return np.where(away < first, away, shared) + (
            count * (distances > 0) if self.bidirectional else 0
        )


def _share_of_distance(layer: Layer, _: Override, away: np.ndarray, exact: int) -> np.ndarray:
    return (away - exact) / (layer.relative_bias().max_distance - exact)
