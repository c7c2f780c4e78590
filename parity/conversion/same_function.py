"""Weights of one function: heads or features in another order, or a factor here that is divided out there.

Attention does not change where heads move together with all that is theirs, where features of queries and keys move
alike, those that RoPE rotates excepted, or those of values and the columns of out_proj; nor where one of two is
multiplied by what the other is divided by. Whatever is found is verified on all weights. An orthogonal change of basis
is not looked for, nor a factor together with another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mha_spec import AttentionSpec
from parity.conversion.roles import Role, digests, matched, roles
from parity.conversion.ulps import agree, coarser
from parity.core.compare import unit_of_rounding
from parity.core.weights import Weights

MOST_SHOWN = 16  # places of an order


def in_other_words(one: Weights, other: Weights, spec: AttentionSpec) -> str | None:
    """Say how two sets of weights that differ are the same function; None if that is not found."""
    held = roles(spec)
    with_heads = {name: (held[name].view(one[name], spec), held[name].view(other[name], spec)) for name in held}
    if not all(agree(one[name], other[name]) for name in one if name not in held):
        return None
    return _reordered(with_heads, held, spec) or _rescaled(with_heads, held, spec)


def listed(order: np.ndarray) -> str:
    """An order, its beginning where it is long."""
    shown = " ".join(map(str, order[:MOST_SHOWN]))
    return shown if len(order) <= MOST_SHOWN else f"{shown} …"


# ---- In another order ------------------------------------------------------------------------------------------------

Views = Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class _Order:
    """The origin of heads and features: other[g, n, f] = one[groups[g], heads[g, n], features[g, f]]."""

    groups: np.ndarray
    heads: np.ndarray
    features: dict[str, np.ndarray]

    def applied(self, x: np.ndarray, role: Role) -> np.ndarray:
        """A view of the first weights, as the second should be; what heads share, once for each group."""
        count = x.shape[2]
        features = self.features.get(role.features, np.broadcast_to(np.arange(count), (len(self.groups), count)))
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
        found += [f"{words[kind]} are in another order" for kind, each in self.features.items() if _moves(each)]
        return "; ".join(found)


def _moves(order: np.ndarray) -> bool:
    return not np.array_equal(order, np.broadcast_to(np.arange(order.shape[-1]), order.shape))


def _reordered(views: Views, held: Mapping[str, Role], spec: AttentionSpec) -> str | None:
    """The order of heads and features that makes one of the other, if there is one."""
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
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], held: Mapping[str, Role], spec: AttentionSpec
) -> _Order | None:
    """The only order that heads and features can have come in, by the digests of their rows; to be verified."""
    free, count = _free_features(spec), spec.num_heads // spec.num_kv_heads
    rows = _Rows(before, held, free), _Rows(after, held, free)
    groups, heads = np.arange(spec.num_kv_heads), np.tile(np.arange(count), (spec.num_kv_heads, 1))
    if spec.alibi is None and spec.out_proj:  # else a head is told by its place
        found = matched(*([side.group(group, count) for group in range(len(groups))] for side in rows))
        if found is None:
            return None
        groups = found
        for group, origin in enumerate(map(int, groups)):
            each = matched(
                [rows[0].head(origin, n) for n in range(count)], [rows[1].head(group, n) for n in range(count)]
            )
            if each is None:
                return None
            heads[group] = each
    features = {kind: np.tile(np.arange(len(which)), (len(groups), 1)) for kind, which in free.items()}
    for kind, orders in features.items():
        for group, origin in enumerate(map(int, groups)):
            each = matched(rows[0].features(kind, origin, heads[group]), rows[1].features(kind, group, range(count)))
            if each is None:
                return None
            orders[group] = each
    return _Order(groups, heads, features)


@dataclass(frozen=True)
class _Rows:
    """The digests of all rows of one side, by which its heads and features are known.

    Attributes:
        digests: by name, (K, heads of the group, features).
        held: the roles.
        free: which features may change places, by what they are of.
    """

    digests: Mapping[str, np.ndarray]
    held: Mapping[str, Role]
    free: Mapping[str, np.ndarray]

    def head(self, group: int, head: int, heads: str = "q") -> tuple[object, ...]:
        """A head, in whatever order those of its features are that may change places."""
        found: list[object] = []
        for name in (name for name, role in self.held.items() if role.heads == heads):
            rows, free = self.digests[name][group, head], self.free.get(self.held[name].features)
            free = np.zeros(len(rows), bool) if free is None else free
            found += [*rows[~free], *sorted(rows[free])]
        return tuple(found)

    def group(self, group: int, count: int) -> tuple[object, ...]:
        """A key/value head with its query heads, in whatever order these are."""
        return self.head(group, 0, "kv"), *sorted(self.head(group, n) for n in range(count))

    def features(self, kind: str, group: int, heads: Iterable[int]) -> list[object]:
        """Each feature of a group, by its rows in all weights; one that may not change places by its place."""
        places = {"q": [(group, n) for n in heads], "kv": [(group, 0)], "shared": [(0, 0)]}
        of_kind = [
            self.digests[name][place]
            for name, role in self.held.items()
            if role.features == kind
            for place in places[role.heads]
        ]
        rows = zip(*of_kind, strict=True)
        return [row if free else i for i, (row, free) in enumerate(zip(rows, self.free[kind], strict=True))]


def _free_features(spec: AttentionSpec) -> dict[str, np.ndarray]:
    """Which features of a head may change places, those of queries and keys and those of values."""
    if spec.latent is not None:
        return {}
    of_queries = np.ones(spec.head_dim, bool)
    if spec.rope is not None:
        of_queries[spec.rope.rotated_features(spec.head_dim)] = False
    return {"qk": of_queries, "v": np.full(spec.value_head_dim, spec.out_proj)}


# ---- Multiplied here, divided there ----------------------------------------------------------------------------------


def _rescaled(views: Views, held: Mapping[str, Role], spec: AttentionSpec) -> str | None:
    """The factors that one of two is multiplied by and the other divided by, in words, if there are such."""
    if spec.latent is not None or spec.clip_qkv is not None:
        return None
    pairs = {"qk": ("q_proj.", "k_proj."), "v": ("v_proj.", "out_proj.")}
    allowed = {
        "qk": spec.qk_norm is spec.relative_products is None,
        "v": spec.v_norm is spec.context_norm is None and spec.out_proj,
    }
    tied = {"qk": _tied(spec), "v": np.arange(spec.value_head_dim)}
    said, involved = [], set()
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
        if not all(agree(expected[name], views[name][1], coarser(*(x.dtype for x in views[name]))) for name in names):
            return None
        involved.update(names)
        said.append(_said(factors, kind, views[names[0]]))
    if not said or not all(agree(*views[name]) for name in views if name not in involved):
        return None
    return "; ".join(said)


def _said(factors: np.ndarray, kind: str, views: tuple[np.ndarray, np.ndarray]) -> str:
    """Factors in words: one, or from the smallest to the largest."""
    times, over = {"qk": ("q", "k"), "v": ("v", "columns of out_proj")}[kind]
    low, high = float(factors.min()), float(factors.max())
    if high - low <= 8.0 * unit_of_rounding(coarser(*(view.dtype for view in views)).name) * abs(high):
        return f"{times} is multiplied by {high:.6g}, and {over} divided by that"
    return f"features of {times} are multiplied by {low:.3g} to {high:.3g}, and {over} divided by the same"


def _factors(views: list[tuple[np.ndarray, np.ndarray]], tied: np.ndarray) -> np.ndarray:
    """The factor of each feature of each group, with those that it is tied to: (K, features), or NaN."""
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
    """A number for each feature of a query, the same for both of a RoPE pair, which a factor must not tear apart."""
    found = np.arange(spec.head_dim)
    if spec.rope is not None:
        rotated = spec.rope.rotated_features(spec.head_dim)
        pairs = found[rotated].reshape((2, -1) if spec.rope.pairs == "half" else (-1, 2))
        axis = 0 if spec.rope.pairs == "half" else 1
        found[rotated] = np.broadcast_to(pairs.min(axis=axis, keepdims=True), pairs.shape).reshape(-1)
    return found
