"""Bugs in scores that depend on distances: ALiBi, relative biases and relative products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from mha_spec import (
    Alibi,
    AttentionSpec,
    GridBias,
    RelativeBias,
    RelativeProducts,
    SinusoidProducts,
)
from parity.explain.diagnosis.bugs.families import ALIBI, RELATIVE_BIAS, RELATIVE_PRODUCTS
from parity.explain.diagnosis.bugs.record import Edit, Override, instead
from parity.explain.diagnosis.bugs.sites import (
    Overrides,
    after,
    always,
    before,
    for_names,
    named_as,
)
from parity.explain.diagnosis.bugs.specs import of_spec
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values


def _scores_without_positions(
    _: Layer, original: Override, values: Values, *positions: np.ndarray
) -> dict[str, np.ndarray]:
    return original(values)


RESTARTED = (
    "the distance is counted from the first key in each call with a cache",
    {"scores": _scores_without_positions},
)
"""The description and overrides of a bug that all of them can have."""

USUAL_TIMES = (2.0, 0.5, 4.0, 0.25)
"""Factors of a max_distance that is wrong."""

USUAL_DISTANCES = (128, 256, 64, 512, 32, 16, 20, 8)
"""Values of max_distance in use."""

SINUSOID_PRODUCTS = replace(
    RELATIVE_PRODUCTS,
    fix="add scaled products of q + position_bias with the projected sinusoids of query - key, "
    "sine and cosine in turn, and of content_bias with keys",
)


# ---- ALiBi ---------------------------------------------------------------------------------------


def alibi(case: Case) -> Iterator[Edit]:
    spec, right = case.spec, case.spec.alibi
    if right is None:
        return
    bug = ALIBI.shown_in("scores")
    factors = {
        "missing": (0.0, "nothing is subtracted from scores for the distance of their keys"),
        "added": (-1.0, "the distance of a key is added to its score instead of subtracted"),
    }
    if spec.score_scale != 1.0 and right.scaled:
        factors["not-scaled"] = 1.0 / spec.score_scale, "slopes are not scaled like the scores"
    elif spec.score_scale != 1.0:
        factors["scaled"] = spec.score_scale, "slopes are scaled like the scores"
    for name, (factor, about) in factors.items():
        yield bug(f"alibi-{name}", about, {"slopes": after(partial(np.multiply, factor))})
    yield from _other_slopes(spec, right)
    if case.is_cached:
        yield bug("alibi-restarted", *RESTARTED)


def _other_slopes(spec: AttentionSpec, right: Alibi) -> Iterator[Edit]:
    """Slopes of a different formula: each is 2 to the power of a share of the largest exponent."""
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    n = np.arange(1, num_heads + 1)
    power_of_two = 1 << (num_heads.bit_length() - 1)
    shares = {}
    if power_of_two != num_heads:
        about = "slopes are 2 ** (-8 n / N) although N is not a power of two"
        shares["evenly"] = n / num_heads, about
        about = "slopes are the first ones for the next power of two"
        shares["of-next-power"] = n / (2 * power_of_two), about
    if num_kv_heads < num_heads:
        group = 1 + (n - 1) // (num_heads // num_kv_heads)
        about = "slopes are computed for the number of key/value heads"
        shares["of-kv-heads"] = group / num_kv_heads, about
    for name, (share, about) in shares.items():
        slopes = 2.0 ** (-right.max_bias * share)
        if right.scaled:
            slopes = slopes * spec.score_scale
        yield ALIBI.shown_in("scores")(f"alibi-slopes-{name}", about, {"slopes": always(slopes)})


# ---- Relative bias -------------------------------------------------------------------------------


def relative_bias(case: Case) -> Iterator[Edit]:
    spec = case.spec
    right, num_heads = spec.relative_bias, spec.num_heads
    if right is None:
        return
    bug = RELATIVE_BIAS.shown_in("scores")
    yield bug(
        "relative-bias-ignored",
        "no bias for the distance of keys is added to the scores",
        _times(0.0),
    )
    if isinstance(right, GridBias):
        yield from _of_grid(right)
    else:
        yield from _of_distances(case, right)
    if spec.score_scale != 1.0:
        yield bug(
            "relative-bias-scaled",
            "the bias is added before the scores are scaled",
            _times(spec.score_scale),
        )
    yield bug(
        "relative-bias-transposed",
        "the table is read as (N, num_buckets)",
        {"relative_table": after(partial(_read_by_heads, num_heads))},
    )
    if case.is_cached:
        yield bug("relative-bias-restarted", *RESTARTED)


def _read_by_heads(num_heads: int, table: np.ndarray) -> np.ndarray:
    """Return the elements of a table (num_buckets, N) as if they were stored as (N,
    num_buckets).
    """
    return table.reshape(num_heads, -1).T


def _times(factor: float) -> Overrides:
    return {"gained_by_distance": after(partial(_scaled, factor))}


def _scaled(factor: float, x: np.ndarray) -> np.ndarray:
    return x.dtype.type(factor) * x


def _of_distances(case: Case, right: RelativeBias) -> Iterator[Edit]:
    spec = case.spec
    bug = RELATIVE_BIAS.shown_in("scores")
    if right.bidirectional and right.max_distance > right.num_buckets // 2:
        about = "later keys share the query's own bucket, as in a decoder"
        one_directional = replace(right, bidirectional=False)
        yield bug(
            "relative-bias-one-directional", about, of_spec(spec, relative_bias=one_directional)
        )
    if not right.bidirectional and right.num_buckets >= 4 and right.num_buckets % 2 == 0:
        about = "half of the buckets are for later keys, as in an encoder"
        bidirectional = replace(right, bidirectional=True)
        yield bug("relative-bias-bidirectional", about, of_spec(spec, relative_bias=bidirectional))
    yield bug(
        "relative-bias-flipped",
        "distances are counted as query - key instead of key - query",
        {"bucket": before(_negative)},
    )
    about = "queries are counted from 1, keys from 0"
    yield bug("relative-bias-off-by-one", about, {"bucket": before(_one_less)})
    if not np.array_equal(_Linear(**asdict(right)).buckets(), right.buckets()):
        about = "all buckets of more than one distance have equal width"
        alike = _max_distance_like_linear(right, case)
        if alike is not None:
            about += f", or max_distance is {alike} instead of {right.max_distance}"
        yield bug("relative-bias-linear", about, {"share_of_logarithm": _share_of_distance})


def _max_distance_like_linear(right: RelativeBias, case: Case) -> int | None:
    """Return a max_distance whose buckets are the buckets of equal width for all distances of a
    case; None if no usual one has them.
    """
    num_tokens = max(case.seq_len, case.key_len)
    distances = np.arange(-num_tokens + 1, num_tokens)
    if case.is_causal:
        distances = distances[distances <= 0]
    linear = _buckets_of(_Linear(**asdict(right)), distances)
    multiples = [round(times * right.max_distance) for times in USUAL_TIMES]
    for max_distance in (*multiples, *USUAL_DISTANCES):
        if max_distance == right.max_distance:
            continue
        try:
            other = replace(right, max_distance=max_distance)
        except ValueError:  # no more than the distances with a bucket each
            continue
        if np.array_equal(_buckets_of(other, distances), linear):
            return max_distance
    return None


def _buckets_of(bias: RelativeBias, distances: np.ndarray) -> np.ndarray:
    """Return the bucket of each distance, key - query."""
    within = np.clip(distances, -bias.max_distance, bias.max_distance)
    return bias.buckets()[within + bias.max_distance]


def _negative(distance: np.ndarray) -> tuple[np.ndarray]:
    return (-distance,)


def _one_less(distance: np.ndarray) -> tuple[np.ndarray]:
    return (distance - 1,)


def _of_grid(right: GridBias) -> Iterator[Edit]:
    bug = RELATIVE_BIAS.shown_in("scores")
    about = "differences of rows and columns are counted as key - query instead of query - key"
    yield bug("grid-bias-flipped", about, {"bucket_on": before(_query_and_key_exchanged)})
    if right.height > 1 and right.width > 1:
        about = "tokens are counted column by column"
        yield bug("grid-bias-by-columns", about, {"bucket_on": before(_counted_by_columns)})
    if right.class_token:
        about = "the buckets of the class token as query and as key are exchanged"
        # The last bucket is for the class token with itself.
        as_query, as_key = right.num_buckets - 3, right.num_buckets - 2
        exchanged = partial(_buckets_exchanged, as_query, as_key)
        yield bug("grid-bias-class-token", about, {"bucket_on": after(exchanged)})


GridPositions = tuple[GridBias, np.ndarray, np.ndarray]
"""A grid, and the positions of queries and keys among its tokens."""


def _query_and_key_exchanged(grid: GridBias, query: np.ndarray, key: np.ndarray) -> GridPositions:
    return grid, key, query


def _counted_by_columns(grid: GridBias, query: np.ndarray, key: np.ndarray) -> GridPositions:
    return grid, _by_columns(grid, query), _by_columns(grid, key)


def _by_columns(grid: GridBias, position: np.ndarray) -> np.ndarray:
    """Return the positions, row by row, of tokens that are counted column by column."""
    first = int(grid.class_token)
    column, row = np.divmod(position - first, grid.height)
    return np.where(position < first, position, row * grid.width + column + first)


def _buckets_exchanged(one: int, other: int, buckets: np.ndarray) -> np.ndarray:
    return np.where(buckets == one, other, np.where(buckets == other, one, buckets))


# ---- Relative products ---------------------------------------------------------------------------


def relative_products(case: Case) -> Iterator[Edit]:
    spec, right = case.spec, case.spec.relative_products
    if right is None:
        return
    family = RELATIVE_PRODUCTS
    if isinstance(right, SinusoidProducts):
        family = SINUSOID_PRODUCTS
    bug = family.shown_in("scores")
    about = "scores gain no products with vectors of distances"
    yield bug("relative-products-ignored", about, {"relative_products": after(_all_zero)})
    if spec.score_scale != 1.0:
        about = "products with vectors of distances are not scaled"
        yield bug("relative-products-unscaled", about, {"scale_of_distances": always(1.0)})
        about = "products with vectors of distances are scaled twice"
        yield bug("relative-products-scaled-twice", about, {"scale_of_distances": after(np.square)})
    if isinstance(right, SinusoidProducts):
        yield from _sinusoid_products(bug)
    else:
        yield from _products_with_tables(right, bug)
    if case.is_cached:
        yield bug("relative-products-restarted", *RESTARTED)


def _products_with_tables(right: RelativeProducts, bug: Callable[..., Edit]) -> Iterator[Edit]:
    """Yield bugs in products with tables of vectors."""
    about = "distances are query - key"
    yield bug("relative-products-flipped", about, {"distance_bucket": before(_negative)})
    about = "queries are counted from 1, keys from 0"
    yield bug("relative-products-off-by-one", about, {"distance_bucket": before(_one_less)})
    if right.num_buckets > 3:
        about = "distances are clipped one token too early on either side"
        clipped = partial(np.clip, a_min=1, a_max=right.num_buckets - 2)
        yield bug("relative-products-clipped-early", about, {"distance_bucket": after(clipped)})
    if right.num_exact is not None:
        about = "every distance has a vector of its own, without steps of the logarithm"
        yield bug("relative-products-linear", about, {"logarithmic_step": instead(np.asarray)})
    if right.of_queries and right.of_keys:
        exchanged = {"relative_keys": "relative_queries", "relative_queries": "relative_keys"}
        yield bug(
            "relative-products-swapped",
            "queries have the vectors of keys, and keys the vectors of queries",
            {"distance_vectors": named_as(exchanged)},
        )
        for index, name in enumerate(("queries", "keys")):
            about = f"products of {name} with vectors of distances are the only ones"
            alone = {"relative_products": after(partial(_alone, index))}
            yield bug(f"relative-products-of-{name}-alone", about, alone)


def _sinusoid_products(bug: Callable[..., Edit]) -> Iterator[Edit]:
    """Yield bugs in products with projected sinusoids."""
    about = "sinusoids are of key - query"
    yield bug("sinusoid-products-flipped", about, {"sinusoid_distance": before(_negative)})
    about = "queries are counted from 1, keys from 0"
    yield bug("sinusoid-products-off-by-one", about, {"sinusoid_distance": before(_one_more)})
    about = "all sines come before all cosines, instead of in turn"
    yield bug("sinusoid-products-in-halves", about, {"in_sinusoid_order": instead(_in_halves)})
    about = "the content bias and the position bias are exchanged"
    exchanged = {"content_bias": "position_bias", "position_bias": "content_bias"}
    yield bug("sinusoid-products-biases-swapped", about, {"bias_of_heads": named_as(exchanged)})
    about = "the content bias is not added to queries"
    without_content_bias = for_names(("content_bias",), after(np.zeros_like))
    yield bug(
        "sinusoid-products-without-content-bias", about, {"bias_of_heads": without_content_bias}
    )
    about = "the position bias is not added to queries"
    without_position_bias = for_names(("position_bias",), after(np.zeros_like))
    yield bug(
        "sinusoid-products-without-position-bias", about, {"bias_of_heads": without_position_bias}
    )


def _one_more(distance: np.ndarray) -> tuple[np.ndarray]:
    return (distance + 1,)


def _in_halves(sines: np.ndarray, cosines: np.ndarray) -> np.ndarray:
    return np.concatenate([sines, cosines], axis=1)


def _all_zero(products: list[np.ndarray]) -> list[np.ndarray]:
    return [0.0 * x for x in products]


def _alone(index: int, products: list[np.ndarray]) -> list[np.ndarray]:
    return products[index : index + 1]


class _Linear(RelativeBias):
    """Use buckets of equal width for more than one distance."""

    def buckets(self) -> np.ndarray:
        distances = np.arange(-self.max_distance, self.max_distance + 1)
        if not self.bidirectional:
            return self._of_direction(np.maximum(-distances, 0), self.num_buckets)
        half = self.num_buckets // 2
        return self._of_direction(np.abs(distances), half) + half * (distances > 0)

    def _of_direction(self, away: np.ndarray, count: int) -> np.ndarray:
        """Return one of `count` buckets; the buckets of the second half have equal width."""
        exact = count // 2
        width = (self.max_distance - exact) / (count - exact)
        widening = exact + np.floor((away - exact) / width).astype(np.int64)
        return np.where(away < exact, away, np.minimum(widening, count - 1))


def _share_of_distance(layer: Layer, _: Override, away: np.ndarray, exact: int) -> np.ndarray:
    return (away - exact) / (layer.relative_bias().max_distance - exact)
