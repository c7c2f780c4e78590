"""By what law one tensor of weights was made of another: each is tried, and verified on every element."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mha_spec import AttentionSpec
from parity.conversion.roles import Role, digests, matched
from parity.conversion.same_function import listed
from parity.conversion.ulps import agree, coarser, quantised_as, ways_to_fewer_bits
from parity.core.weights import Weights

FEWEST = 2  # elements that are not 0: one number alone is always a multiple of another


@dataclass(frozen=True)
class TensorLaw:
    """What was done to a tensor.

    Attributes:
        name: of the law: `zeros`, `one-plus`, `exchanged`, `copied`, `transposed`, `permuted`, `fewer-bits`,
            `quantised`, `factor`, `factors` or `shift`; `bias`, for a bias that only one file has.
        words: what the second file has, said of the first one's.
        page: of parity/bugs that says more, or nothing.
        heads, rows, columns: where it holds for these alone, and all else is the same; else empty.
    """

    name: str
    words: str
    page: str = ""
    heads: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A tensor of both files, with what is known of it.

    Attributes:
        name: its canonical name.
        one, other: as each file has it.
        role: where its heads are, if it has some.
        heads: those that differ, if not all do.
    """

    name: str
    one: np.ndarray
    other: np.ndarray
    role: Role | None
    heads: tuple[int, ...]


def law_of(pair: Pair, weights: Weights, others: Weights, spec: AttentionSpec) -> TensorLaw | None:
    """The law that explains every element of a tensor, if one is known here.

    Args:
        pair: a tensor that differs.
        weights, others: all of both files, for a tensor may be in the place of another one.
        spec: the layer.
    """
    one, other = pair.one, pair.other
    whole = [_one_plus(pair), _zeros(one, other), _in_place_of(pair, weights, others), _transposed(one, other)]
    found = next(filter(None, whole), None) or _permuted(pair, weights, others, spec)
    if found is not None:
        return found
    if pair.role is not None and pair.heads:
        heads = list(pair.heads)
        views = [pair.role.view(x, spec) for x in (one, other)]
        before, after = (view.reshape(-1, *view.shape[2:])[heads] for view in views)
        found = next(_by_value(pair, before, after, spec), None)
        return replace(found, heads=pair.heads) if found else _of_some(pair, spec)
    found = next(_by_value(pair, one, other, spec), None)
    return _of_some(pair, spec) or found if found is None or found.name == "factors" else found


def _of_some(pair: Pair, spec: AttentionSpec) -> TensorLaw | None:
    """A law of those rows alone that differ, or of those columns."""
    differs, whole = pair.one != pair.other, Pair(pair.name, pair.one, pair.other, None, ())
    for axis, what in zip(range(differs.ndim), ("rows", "columns"), strict=False):
        places = np.flatnonzero(np.moveaxis(differs, axis, 0).reshape(differs.shape[axis], -1).any(axis=1))
        if len(places) < differs.shape[axis]:
            found = next(_by_value(whole, pair.one.take(places, axis), pair.other.take(places, axis), spec), None)
            if found is not None:
                return replace(found, **{what: tuple(map(int, places))})
    return None


# ---- Values ----------------------------------------------------------------------------------------------------------


def _by_value(pair: Pair, one: np.ndarray, other: np.ndarray, spec: AttentionSpec) -> Iterator[TensorLaw]:
    """The laws that change values and not their places, of a tensor or of some of its heads."""
    zeros = _zeros(one, other)
    if zeros is not None:
        yield zeros
    if ways := ways_to_fewer_bits(one, other):
        yield TensorLaw("fewer-bits", f"the first's, {' or '.join(ways)}", "low-precision")
    if ways := ways_to_fewer_bits(other, one):
        yield TensorLaw("fewer-bits", f"what the first's is {' or '.join(ways)} of", "low-precision")
    if kind := quantised_as(one, other):
        yield TensorLaw("quantised", f"the first's, quantised as {kind}")
    if kind := quantised_as(other, one):
        yield TensorLaw("quantised", f"what the first's is quantised as {kind} of")
    yield from _factors(pair, one, other, spec)
    yield from _shift(one, other)


def _zeros(one: np.ndarray, other: np.ndarray) -> TensorLaw | None:
    page = "missing-bias" if one.ndim == 1 else ""
    if not other.any():
        return TensorLaw("zeros", "zeros", page)
    return None if one.any() else TensorLaw("zeros", "no zeros, as all the first's are", page)


def _one_plus(pair: Pair) -> TensorLaw | None:
    """A norm that multiplies by 1 + w, and one that multiplies by w."""
    if not pair.name.endswith("_norm.weight"):
        return None
    for sign, words in ((1, "1 + w, where the first has w"), (-1, "w, where the first has 1 + w")):
        if _is_shifted(pair.one, pair.other, float(sign)):
            return TensorLaw("one-plus", words, "qk-norm")
    return None


def _is_shifted(one: np.ndarray, other: np.ndarray, by: float) -> bool:
    """Whether a number was added to one, or taken from the other: where it cancels, only one way gives the bits."""
    before, after, dtype = one.astype(np.float64), other.astype(np.float64), coarser(one.dtype, other.dtype)
    return agree(before + by, after, dtype) or agree(before, after - by, dtype)


def _shift(one: np.ndarray, other: np.ndarray) -> Iterator[TensorLaw]:
    by = float(np.mean(other.astype(np.float64) - one.astype(np.float64)))
    if one.size >= FEWEST and by and _is_shifted(one, other, by):
        yield TensorLaw("shift", f"the first's, {by:+.6g} everywhere")


def _factors(pair: Pair, one: np.ndarray, other: np.ndarray, spec: AttentionSpec) -> Iterator[TensorLaw]:
    """One factor, or one for each head, row or column."""
    factor = _times(one, other, None)
    if factor is not None:
        words, page = _factor_in_words(float(factor.reshape(-1)[0]), pair, spec)
        yield TensorLaw("factor", f"the first's, {words}", page)
        return
    parts: list[tuple[str, np.ndarray, np.ndarray, tuple[int, ...]]] = []
    if pair.heads:  # some of them, and each as (features, the rest)
        parts.append(("head", one, other, (1, 2)))
    elif pair.role is not None:
        parts.append(("head", pair.role.view(one, spec), pair.role.view(other, spec), (2, 3)))
    if one.ndim == 2:
        parts += [("row", one, other, (1,)), ("column", one, other, (0,))]
    for part, before, after, axes in parts:
        found = _times(before, after, axes)
        if found is not None:
            low, high = float(found.min()), float(found.max())
            hint = ": a norm before it is folded in, it may be" if part == "column" else ""
            yield TensorLaw("factors", f"the first's, each {part} times a number, {low:.3g} to {high:.3g}{hint}")


def _times(one: np.ndarray, other: np.ndarray, axes: tuple[int, ...] | None) -> np.ndarray | None:
    """What one must be multiplied by to give the other, along axes; None if nothing does, or one number would tell."""
    wide, after = one.astype(np.float64), other.astype(np.float64)
    if (np.count_nonzero(one, axis=axes, keepdims=True) < FEWEST).any():
        return None
    factors = (wide * after).sum(axis=axes, keepdims=True) / (wide * wide).sum(axis=axes, keepdims=True)
    return factors if agree(wide * factors, after, coarser(one.dtype, other.dtype)) else None


def _factor_in_words(factor: float, pair: Pair, spec: AttentionSpec) -> tuple[str, str]:
    """A factor, what it is of the layer, and the page that it belongs on."""
    root = math.sqrt(spec.head_dim)
    known = {"sqrt(H)": root, "1 / sqrt(H)": 1.0 / root, "H": spec.head_dim, "1 / H": 1.0 / spec.head_dim}
    meant = next((words for words, value in known.items() if math.isclose(factor, value, rel_tol=1e-6)), None)
    if factor == -1.0:
        return "negated", ""
    if meant is None:
        return f"times {factor:.6g}", ""
    of_scores = pair.name.startswith(("q_", "k_"))
    why = ": a scale of the scores, folded in or left out" if of_scores else ""
    return f"times {factor:.6g}, {meant}{why}", "scale" if of_scores else ""


# ---- Places ----------------------------------------------------------------------------------------------------------


def _in_place_of(pair: Pair, weights: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> TensorLaw | None:
    """Whether the tensor is another one of the first file."""
    for name, x in weights.items():
        if name == pair.name or x.shape != pair.other.shape or not x.any() or not agree(x, pair.other):
            continue
        page = "swapped-projections" if name[0] in "qkv" and "_proj." in name else ""
        if agree(pair.one, others[name]):
            return TensorLaw("exchanged", f"{name} of the first: the two are exchanged", page)
        return TensorLaw("copied", f"{name} of the first", page)
    return None


def _transposed(one: np.ndarray, other: np.ndarray) -> TensorLaw | None:
    if one.ndim == 2 and one.shape[0] == one.shape[1] and agree(one.T, other):
        return TensorLaw("transposed", "the first's, transposed", "transposed-kernel")
    return None


def _permuted(pair: Pair, weights: Weights, others: Weights, spec: AttentionSpec) -> TensorLaw | None:
    """Whether rows, or columns, are in another order, and which order that is."""
    one, other = pair.one, pair.other
    if pair.name.endswith(".bias"):  # many numbers of a bias may be equal: the order of its weight comes first
        weight = f"{pair.name.removesuffix('bias')}weight"
        order = _order(weights[weight], others[weight], 0) if weight in weights else None
        if order is not None and order.shape == one.shape and agree(one[order], other):
            return _of_order(order, 0, pair, spec)
    for axis in range(one.ndim):
        order = _order(one, other, axis)
        if order is not None and agree(np.take(one, order, axis=axis), other):
            return _of_order(order, axis, pair, spec)
    return None


def _order(one: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray | None:
    """The order of rows, or columns, that makes one of the other, to be verified; None if there is none."""
    dtype = coarser(one.dtype, other.dtype)
    rows = [np.moveaxis(x.astype(dtype), axis, 0).reshape(x.shape[axis], -1) for x in (one, other)]
    before, after = (list(digests(each)) for each in rows)
    return matched(before, after)


def _of_order(order: np.ndarray, axis: int, pair: Pair, spec: AttentionSpec) -> TensorLaw:
    """An order of rows or columns in words: of heads, of RoPE pairs, or any other."""
    rows = ("rows", "columns")[axis]
    if pair.role is not None and pair.role.axis == axis:
        view = pair.role.view(np.arange(len(order)).reshape(-1, *[1] * axis).swapaxes(0, axis), spec)
        heads, features = view.shape[0] * view.shape[1], view.shape[2]
        of_heads = order.reshape(heads, features) if heads * features == len(order) else None
        if heads > 1 and of_heads is not None:
            moved, inside = of_heads[:, 0] // features, np.arange(len(order)).reshape(heads, features)
            if np.array_equal(of_heads, inside[moved]):
                return TensorLaw("permuted", f"the first's, its heads in the order {listed(moved)}", "head-order")
            innermost = inside.T.reshape(-1)
            if np.array_equal(order, innermost) or np.array_equal(order, np.argsort(innermost)):
                return TensorLaw("permuted", "the first's, with heads innermost in one of the two", "head-order")
        found = _of_pairs(order, features, spec) if axis == 0 and pair.name[0] in "qk" else None
        if found is not None:
            return found
        if of_heads is not None and np.array_equal(np.sort(of_heads, axis=1), np.arange(len(order)).reshape(heads, -1)):
            return TensorLaw("permuted", f"the first's, its {rows} in another order within their heads")
    if len(order) <= 2 * spec.head_dim:
        return TensorLaw("permuted", f"the first's, its {rows} in the order {listed(order)}")
    return TensorLaw("permuted", f"the first's, its {rows} in another order")


def _of_pairs(order: np.ndarray, features: int, spec: AttentionSpec) -> TensorLaw | None:
    """The rows of RoPE pairs as halves in one, and interleaved in the other; also by heads of another width."""
    whole = np.arange(len(order))
    sizes = [features, *(size for size in range(4, len(order) + 1, 2) if len(order) % size == 0 and size != features)]
    for size in sizes:
        rotated = slice(0, size)
        if size == features and spec.rope is not None:
            rotated = spec.rope.rotated_features(size)
        interleaved = whole.reshape(-1, size).copy()
        part = interleaved[:, rotated]
        interleaved[:, rotated] = part.reshape(len(part), 2, -1).swapaxes(1, 2).reshape(part.shape)
        interleaved = interleaved.reshape(-1)
        as_if = "" if size == features else f", as if heads had {size} features"
        if np.array_equal(order, interleaved):
            return TensorLaw("permuted", f"the first's, its RoPE pairs interleaved and not halves{as_if}", "rope-pairs")
        if np.array_equal(order, np.argsort(interleaved)):
            return TensorLaw("permuted", f"the first's, its RoPE pairs halves and not interleaved{as_if}", "rope-pairs")
    return None
