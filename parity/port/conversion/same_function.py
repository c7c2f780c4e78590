"""Different weights of the same function: permuted heads or features, or a factor that another
weight divides out.

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
from parity.measure.core.compare import unit_of_rounding
from parity.measure.core.weights import Weights
from parity.port.conversion.roles import Role, digests, matched, roles
from parity.port.conversion.ulps import agree, coarser

MOST_SHOWN = 16  # entries of a permutation


def in_other_words(one: Weights, other: Weights, spec: AttentionSpec) -> str | None:
    """Describe how two different sets of weights are the same function; None if no relation is
    found.
    """
    held = roles(spec)
    with_heads = {
        name: (held[name].view(one[name], spec), held[name].view(other[name], spec))
        for name in held
    }
    if not all(agree(one[name], other[name]) for name in one if name not in held):
        return None
    return _reordered(with_heads, held, spec) or _rescaled(with_heads, held, spec)


def listed(order: np.ndarray) -> str:
    """Return a permutation as text, truncated if long."""
    shown = " ".join(map(str, order[:MOST_SHOWN]))
    return shown if len(order) <= MOST_SHOWN else f"{shown} …"


# ---- Permutations --------------------------------------------------------------------------------

Views = Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class _Order:
    """A permutation of heads and features: other[g, n, f] = one[groups[g], heads[g, n], features[g,
    f]].
    """

    groups: np.ndarray
    heads: np.ndarray
    features: dict[str, np.ndarray]

    def applied(self, x: np.ndarray, role: Role) -> np.ndarray:
        """Return a view of the first weights in this order; shared weights are repeated for each
        group.
        """
        count = x.shape[2]
        features = self.features.get(
            role.features, np.broadcast_to(np.arange(count), (len(self.groups), count))
        )
        if role.heads == "shared":
            return x[0, 0][features][:, None]
        heads = self.heads if role.heads == "q" else np.zeros((len(self.groups), 1), np.int64)
        return x[self.groups[:, None, None], heads[:, :, None], features[:, None, :]]

    def __str__(self) -> str:
        found, per_group = [], self.heads.shape[1]
        if not np.array_equal(self.heads, np.broadcast_to(np.arange(per_group), self.heads.shape)):
            order = (self.groups[:, None] * per_group + self.heads).reshape(-1)
            with_theirs = ", with their key/value heads," if _moves(self.groups) else ""
            found.append(f"query heads{with_theirs} are in the order {listed(order)}")
        elif _moves(self.groups):
            what = "heads" if per_group == 1 else "key/value heads, each with its query heads,"
            found.append(f"{what} are in the order {listed(self.groups)}")
        words = {"qk": "features of q and k", "v": "features of v, and columns of out_proj,"}
        found += [
            f"{words[kind]} are in another order"
            for kind, each in self.features.items()
            if _moves(each)
        ]
        return "; ".join(found)


def _moves(order: np.ndarray) -> bool:
    return not np.array_equal(order, np.broadcast_to(np.arange(order.shape[-1]), order.shape))


def _reordered(views: Views, held: Mapping[str, Role], spec: AttentionSpec) -> str | None:
    """Describe the permutation of heads and features between two sets of weights, if there is
    one.
    """
    before, after = {}, {}
    for name, (one, other) in views.items():
        dtype = coarser(one.dtype, other.dtype)
        before[name], after[name] = digests(one.astype(dtype)), digests(other.astype(dtype))
    order = _order(before, after, held, spec)
    if order is None:
        return None
    for name, (one, other) in views.items():
        expected = order.applied(one, held[name])
        if not agree(expected, np.broadcast_to(other, expected.shape)):
            return None
    return str(order) or None


def _order(
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
    held: Mapping[str, Role],
    spec: AttentionSpec,
) -> _Order | None:
    """Return the only possible permutation of heads and features, by the digests of their rows,
    unverified.
    """
    free, count = _free_features(spec), spec.num_heads // spec.num_kv_heads
    rows = _Rows(before, held, free), _Rows(after, held, free)
    groups, heads = np.arange(spec.num_kv_heads), np.tile(np.arange(count), (spec.num_kv_heads, 1))
    if spec.alibi is None and spec.out_proj:  # otherwise heads cannot be permuted
        sides = [[side.group(group, count) for group in range(len(groups))] for side in rows]
        found = groups if spec.shared_kv else matched(*sides)
        if found is None:
            return None
        groups = found
        for group, origin in enumerate(map(int, groups)):
            each = matched(
                [rows[0].head(origin, n) for n in range(count)],
                [rows[1].head(group, n) for n in range(count)],
            )
            if each is None:
                return None
            heads[group] = each
    features = {
        kind: np.tile(np.arange(len(which)), (len(groups), 1)) for kind, which in free.items()
    }
    for kind, orders in features.items():
        for group, origin in enumerate(map(int, groups)):
            each = matched(
                rows[0].features(kind, origin, heads[group]),
                rows[1].features(kind, group, range(count)),
            )
            if each is None:
                return None
            orders[group] = each
    return _Order(groups, heads, features)


@dataclass(frozen=True)
class _Rows:
    """Digests of all rows of one side, which identify its heads and features.

    Attributes:
        digests: digests by weight, (K, heads of the group, features).
        held: roles of the weights.
        free: which features may be permuted, by kind.
    """

    digests: Mapping[str, np.ndarray]
    held: Mapping[str, Role]
    free: Mapping[str, np.ndarray]

    def head(self, group: int, head: int, heads: str = "q") -> tuple[object, ...]:
        """Return a key of a head that ignores the order of its permutable features."""
        found: list[object] = []
        for name in (name for name, role in self.held.items() if role.heads == heads):
            rows, free = self.digests[name][group, head], self.free.get(self.held[name].features)
            free = np.zeros(len(rows), bool) if free is None else free
            found += [*rows[~free], *sorted(rows[free])]
        return tuple(found)

    def group(self, group: int, count: int) -> tuple[object, ...]:
        """Return a key of a key/value head with its query heads that ignores their order."""
        return self.head(group, 0, "kv"), *sorted(self.head(group, n) for n in range(count))

    def features(self, kind: str, group: int, heads: Iterable[int]) -> list[object]:
        """Return a key for each feature of a group: its rows in all weights, or its place if it
        cannot be permuted.
        """
        places = {"q": [(group, n) for n in heads], "kv": [(group, 0)], "shared": [(0, 0)]}
        of_kind = [
            self.digests[name][place]
            for name, role in self.held.items()
            if role.features == kind
            for place in places[role.heads]
        ]
        rows = zip(*of_kind, strict=True)
        return [
            row if free else i
            for i, (row, free) in enumerate(zip(rows, self.free[kind], strict=True))
        ]


def _free_features(spec: AttentionSpec) -> dict[str, np.ndarray]:
    """Return which features of a head may be permuted, for queries and keys and for values."""
    if spec.latent is not None or spec.shared_kv:  # keys of another layer keep their features
        return {}
    of_queries = np.ones(spec.head_dim, bool)
    if spec.rope is not None:
        of_queries[spec.rope.rotated_features(spec.head_dim)] = False
    return {"qk": of_queries, "v": np.full(spec.value_head_dim, spec.out_proj)}


# ---- Factors -------------------------------------------------------------------------------------


def _rescaled(views: Views, held: Mapping[str, Role], spec: AttentionSpec) -> str | None:
    """Describe the factors that multiply one weight and divide another, if there are any."""
    if spec.latent is not None or spec.shared_kv or spec.clip_qkv is not None:
        return None
    pairs = {"qk": ("q_proj.", "k_proj."), "v": ("v_proj.", "out_proj.")}
    allowed = {
        "qk": spec.qk_norm is spec.relative_products is None,
        "v": spec.v_norm is spec.context_norm is None and spec.out_proj,
    }
    tied = {"qk": _tied(spec), "v": np.arange(spec.value_head_dim)}
    words, involved = [], set()
    for kind, sides in pairs.items():
        times, over = ([name for name in held if name.startswith(side)] for side in sides)
        names = [*times, *over]
        if not allowed[kind] or all(agree(*views[name]) for name in names):
            continue
        factors = _factors([views[name] for name in times], tied[kind])
        back = _factors([views[name] for name in over], tied[kind])
        factors = np.where(np.isnan(factors), 1.0 / back, factors)
        factors = np.where(np.isfinite(factors) & (factors != 0.0), factors, 1.0)[:, None, :, None]
        expected = {name: views[name][0].astype(np.float64) * factors for name in times}
        expected |= {name: views[name][0].astype(np.float64) / factors for name in over}
        if not all(
            agree(expected[name], views[name][1], coarser(*(x.dtype for x in views[name])))
            for name in names
        ):
            return None
        involved.update(names)
        words.append(_describe(factors, kind, views[names[0]]))
    if not words or not all(agree(*views[name]) for name in views if name not in involved):
        return None
    return "; ".join(words)


def _describe(factors: np.ndarray, kind: str, views: tuple[np.ndarray, np.ndarray]) -> str:
    """Format factors: a single one, or the smallest and the largest."""
    times, over = {"qk": ("q", "k"), "v": ("v", "columns of out_proj")}[kind]
    low, high = float(factors.min()), float(factors.max())
    if high - low <= 8.0 * unit_of_rounding(coarser(*(view.dtype for view in views)).name) * abs(
        high
    ):
        return f"{times} is multiplied by {high:.6g}, and {over} divided by that"
    return (
        f"features of {times} are multiplied by {low:.3g} to {high:.3g}, and {over} divided by "
        f"the same"
    )


def _factors(views: list[tuple[np.ndarray, np.ndarray]], tied: np.ndarray) -> np.ndarray:
    """Return the factor of each feature of each group, equal among tied features: (K, features), or
    NaN.
    """
    shape = (views[0][0].shape[0], len(tied))
    products, squares = np.zeros(shape), np.zeros(shape)
    for one, other in views:
        wide = one.astype(np.float64)
        products += np.einsum("gnfr,gnfr->gf", wide, other.astype(np.float64))
        squares += np.einsum("gnfr,gnfr->gf", wide, wide)
    sums = np.zeros((2, shape[0], tied.max() + 1))
    for place, each in zip(sums, (products, squares), strict=True):
        np.add.at(place.T, tied, each.T)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums[0] / sums[1])[:, tied]


def _tied(spec: AttentionSpec) -> np.ndarray:
    """Return a number for each query feature; features of a RoPE pair share one, because they share
    a factor.
    """
    found = np.arange(spec.head_dim)
    if spec.rope is not None:
        rotated = spec.rope.rotated_features(spec.head_dim)
        pairs = found[rotated].reshape((2, -1) if spec.rope.pairs == "half" else (-1, 2))
        axis = 0 if spec.rope.pairs == "half" else 1
        found[rotated] = np.broadcast_to(pairs.min(axis=axis, keepdims=True), pairs.shape).reshape(
            -1
        )
    return found
