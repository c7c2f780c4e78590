"""Different weights of the same function: permuted heads or features, or factors that cancel.

Attention does not change if whole heads are permuted, if features of queries and keys are permuted
alike (except those that RoPE rotates), or if features of values and columns of out_proj are. Nor
does it change if one of two weights is multiplied by a factor that divides the other. Each finding
is verified on all weights. An orthogonal change of basis is not detected, nor is a factor combined
with a permutation. With keys and values of another layer only query heads that share a key/value
head may be permuted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.diagnosis.weights.roles import Role, digests, matched, roles
from parity.explain.diagnosis.weights.ulps import agree, coarser
from parity.measure.core.compare import unit_of_rounding
from parity.measure.core.weights import Weights

MOST_SHOWN = 16
"""Entries of a permutation in a message: a line of a terminal holds about as many."""


def in_other_words(one: Weights, other: Weights, spec: AttentionSpec) -> str | None:
    """Describe how two different sets of weights are the same function; None if no relation is
    found.
    """
    roles_by_name = roles(spec)
    for name, weight in one.items():
        if name not in roles_by_name and not agree(weight, other[name]):
            return None
    views = {}
    for name, role in roles_by_name.items():
        views[name] = role.view(one[name], spec), role.view(other[name], spec)
    return _reordered(views, roles_by_name, spec) or _rescaled(views, roles_by_name, spec)


def listed(order: np.ndarray) -> str:
    """Return a permutation as text, truncated if long."""
    shown = " ".join(map(str, order[:MOST_SHOWN]))
    if len(order) > MOST_SHOWN:
        shown += " …"
    return shown


# ---- Permutations --------------------------------------------------------------------------------

Views = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Each weight of both files by its heads, as `Role.view` returns it: (K, heads, features, rest)."""


@dataclass(frozen=True)
class _Order:
    """A permutation of heads and features.

    other[g, n, f] = one[groups[g], heads[g, n], features[g, f]]

    Attributes:
        groups: the order of key/value heads, (K,).
        heads: the order of the query heads of each group, (K, N / K).
        features: the order of features in each group by their kind, (K, features).
    """

    groups: np.ndarray
    heads: np.ndarray
    features: dict[str, np.ndarray]

    def applied(self, x: np.ndarray, role: Role) -> np.ndarray:
        """Return a view of the first weights in this order; shared weights are repeated for each
        group.
        """
        num_groups, num_features = len(self.groups), x.shape[2]
        features = self.features.get(role.features)
        if features is None:
            features = np.broadcast_to(np.arange(num_features), (num_groups, num_features))
        if role.heads == "shared":
            return x[0, 0][features][:, None]
        heads = self.heads
        if role.heads != "q":
            heads = np.zeros((num_groups, 1), np.int64)
        return x[self.groups[:, None, None], heads[:, :, None], features[:, None, :]]

    def __str__(self) -> str:
        changes = []
        heads_per_group = self.heads.shape[1]
        if _moves(self.heads):
            order = (self.groups[:, None] * heads_per_group + self.heads).reshape(-1)
            with_theirs = ", with their key/value heads," if _moves(self.groups) else ""
            changes.append(f"query heads{with_theirs} are in the order {listed(order)}")
        elif _moves(self.groups):
            what = "heads"
            if heads_per_group > 1:
                what = "key/value heads, each with its query heads,"
            changes.append(f"{what} are in the order {listed(self.groups)}")
        words = {"qk": "features of q and k", "v": "features of v, and columns of out_proj,"}
        for kind, order in self.features.items():
            if _moves(order):
                changes.append(f"{words[kind]} are in a different order")
        return "; ".join(changes)


def _moves(order: np.ndarray) -> bool:
    """Return whether a permutation, or any of several, is not the identity."""
    return not np.array_equal(order, np.broadcast_to(np.arange(order.shape[-1]), order.shape))


def _reordered(views: Views, roles_by_name: Mapping[str, Role], spec: AttentionSpec) -> str | None:
    """Describe the permutation of heads and features between two sets of weights, if any."""
    rows_before, rows_after = {}, {}
    for name, (one, other) in views.items():
        dtype = coarser(one.dtype, other.dtype)
        rows_before[name] = digests(one.astype(dtype))
        rows_after[name] = digests(other.astype(dtype))
    free = _free_features(spec)
    before = _Rows(rows_before, roles_by_name, free)
    after = _Rows(rows_after, roles_by_name, free)
    order = _find_order(before, after, spec)
    if order is None:
        return None
    for name, (one, other) in views.items():
        expected = order.applied(one, roles_by_name[name])
        if not agree(expected, np.broadcast_to(other, expected.shape)):
            return None
    return str(order) or None


def _find_order(before: _Rows, after: _Rows, spec: AttentionSpec) -> _Order | None:
    """Return the only possible permutation of heads and features, by digests, unverified."""
    num_groups, count = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    groups = np.arange(num_groups)
    heads = np.tile(np.arange(count), (num_groups, 1))
    # ALiBi has a slope for each head, and without out_proj their order is the order of the output.
    if spec.alibi is None and spec.out_proj:
        # Keys and values of another layer stay, and their query heads move within a group.
        if not spec.shared_kv:
            moved_groups = matched(
                [before.group(group, count) for group in range(num_groups)],
                [after.group(group, count) for group in range(num_groups)],
            )
            if moved_groups is None:
                return None
            groups = moved_groups
        for group, origin in enumerate(map(int, groups)):
            moved_heads = matched(
                [before.head(origin, n) for n in range(count)],
                [after.head(group, n) for n in range(count)],
            )
            if moved_heads is None:
                return None
            heads[group] = moved_heads
    features = {}
    for kind, free in before.free.items():
        features[kind] = np.tile(np.arange(len(free)), (num_groups, 1))
        for group, origin in enumerate(map(int, groups)):
            moved_features = matched(
                before.features(kind, origin, heads[group]),
                after.features(kind, group, range(count)),
            )
            if moved_features is None:
                return None
            features[kind][group] = moved_features
    return _Order(groups, heads, features)


@dataclass(frozen=True)
class _Rows:
    """Digests of all rows of one side, which identify its heads and features.

    Attributes:
        digests: digests by weight, (K, heads of the group, features).
        roles: roles of the weights.
        free: which features may be permuted, by kind.
    """

    digests: Mapping[str, np.ndarray]
    roles: Mapping[str, Role]
    free: Mapping[str, np.ndarray]

    def head(self, group: int, head: int, heads: str = "q") -> tuple[object, ...]:
        """Return a key of a head that ignores the order of its permutable features."""
        key: list[object] = []
        for name, role in self.roles.items():
            if role.heads != heads:
                continue
            rows = self.digests[name][group, head]
            free = self.free.get(role.features)
            if free is None:
                free = np.zeros(len(rows), bool)
            key += [*rows[~free], *sorted(rows[free])]
        return tuple(key)

    def group(self, group: int, count: int) -> tuple[object, ...]:
        """Return a key of a key/value head with its query heads that ignores their order."""
        return self.head(group, 0, "kv"), *sorted(self.head(group, n) for n in range(count))

    def features(self, kind: str, group: int, heads: Iterable[int]) -> list[object]:
        """Return a key for each feature of a group: its rows in all weights.

        A feature that cannot be permuted has its position as its key.
        """
        head_indices = {"q": [(group, n) for n in heads], "kv": [(group, 0)], "shared": [(0, 0)]}
        rows_of_heads = []
        for name, role in self.roles.items():
            if role.features == kind:
                rows_of_heads += [self.digests[name][index] for index in head_indices[role.heads]]
        keys: list[object] = list(zip(*rows_of_heads, strict=True))
        for i in np.flatnonzero(~self.free[kind]):
            keys[i] = int(i)
        return keys


def _free_features(spec: AttentionSpec) -> dict[str, np.ndarray]:
    """Return which features of a head may be permuted, for queries and keys and for values."""
    if spec.latent is not None or spec.shared_kv:  # keys of another layer keep their features
        return {}
    of_queries = np.ones(spec.head_dim, bool)
    if spec.rope is not None:
        of_queries[spec.rope.rotated_features(spec.head_dim)] = False
    return {"qk": of_queries, "v": np.full(spec.value_head_dim, spec.out_proj)}


# ---- Factors -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sides:
    """Two sides of a product that a factor may move between.

    Attributes:
        times, over: the beginnings of the names of weights on either side.
        is_free: whether nothing between the weights, such as a norm, would change by a factor.
        tied: a number for each feature; features with one number have one factor.
        words: description of both sides.
    """

    times: str
    over: str
    is_free: bool
    tied: np.ndarray
    words: tuple[str, str]


def _sides(spec: AttentionSpec) -> list[_Sides]:
    of_scores = spec.qk_norm is None and spec.relative_products is None
    of_values = spec.v_norm is None and spec.context_norm is None and spec.out_proj
    of_heads = np.arange(spec.value_head_dim)
    return [
        _Sides("q_proj.", "k_proj.", of_scores, _tied(spec), ("q", "k")),
        _Sides("v_proj.", "out_proj.", of_values, of_heads, ("v", "columns of out_proj")),
    ]


def _rescaled(views: Views, roles_by_name: Mapping[str, Role], spec: AttentionSpec) -> str | None:
    """Describe the factors that multiply one weight and divide another, if there are any."""
    if spec.latent is not None or spec.shared_kv or spec.clip_qkv is not None:
        return None
    words: list[str] = []
    explained: set[str] = set()
    for sides in _sides(spec):
        times: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        over: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name in roles_by_name:
            if name.startswith(sides.times):
                times[name] = views[name]
            elif name.startswith(sides.over):
                over[name] = views[name]
        both = times | over
        if not sides.is_free or _all_agree(both):
            continue
        factors = _factors(times, sides.tied)
        inverses = _factors(over, sides.tied)
        # Features of zeros on one side show their factor on the other, or need none.
        factors = np.where(np.isnan(factors), 1.0 / inverses, factors)
        is_known = np.isfinite(factors) & (factors != 0.0)
        known_factors = factors[is_known]
        factors = np.where(is_known, factors, 1.0)[:, None, :, None]
        if not _are_rescaled(times, np.multiply, factors):
            return None
        if not _are_rescaled(over, np.divide, factors):
            return None
        explained |= both.keys()
        # Features of zeros on both sides have no factor to describe.
        words.append(_describe(known_factors, sides, next(iter(both.values()))))
    others = {name: pair for name, pair in views.items() if name not in explained}
    if not words or not _all_agree(others):
        return None
    return "; ".join(words)


def _all_agree(views: Views) -> bool:
    """Return whether all weights agree in both files."""
    return all(agree(one, other) for one, other in views.values())


def _are_rescaled(views: Views, operation: np.ufunc, factors: np.ndarray) -> bool:
    """Return whether the second file has all weights of the first, multiplied or divided."""
    for one, other in views.values():
        expected = operation(one.astype(np.float64), factors)
        if not agree(expected, other, coarser(one.dtype, other.dtype)):
            return False
    return True


def _describe(factors: np.ndarray, sides: _Sides, views: tuple[np.ndarray, np.ndarray]) -> str:
    """Format factors: a single one, or the smallest and the largest."""
    times, over = sides.words
    low, high = float(factors.min()), float(factors.max())
    dtype = coarser(views[0].dtype, views[1].dtype)
    # Fits of one factor differ by roundings of the weights: the 8 is chosen, not derived.
    if high - low <= 8.0 * unit_of_rounding(dtype.name) * abs(high):
        return f"{times} is multiplied by {high:.6g}, and {over} divided by that"
    return (
        f"features of {times} are multiplied by {low:.6g} to {high:.6g}, and {over} divided by "
        f"the same"
    )


def _factors(views: Views, tied: np.ndarray) -> np.ndarray:
    """Return the factor of each feature of each group, or NaN: (K, features).

    It is the least-squares fit over tied features.
    """
    one, _ = next(iter(views.values()))
    shape = (len(one), len(tied))
    products, squares = np.zeros(shape), np.zeros(shape)
    for one, other in views.values():
        wide = one.astype(np.float64)
        products += np.einsum("gnfr,gnfr->gf", wide, other.astype(np.float64))
        squares += np.einsum("gnfr,gnfr->gf", wide, wide)
    sum_of_products, sum_of_squares = np.zeros((2, shape[0], tied.max() + 1))
    np.add.at(sum_of_products.T, tied, products.T)
    np.add.at(sum_of_squares.T, tied, squares.T)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sum_of_products / sum_of_squares)[:, tied]


def _tied(spec: AttentionSpec) -> np.ndarray:
    """Return a number for each query feature; the two of a RoPE pair share one, as their factor."""
    tied = np.arange(spec.head_dim)
    if spec.rope is None:
        return tied
    first, second = spec.rope.pair_features(spec.head_dim)
    tied[second] = first
    return tied
