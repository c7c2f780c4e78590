"""Relations between a tensor and its counterpart in another file; each is verified on every
element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from mha_spec import AttentionSpec
from parity.measure.core.weights import Weights
from parity.port.conversion.roles import Role, digests, matched
from parity.port.conversion.same_function import listed
from parity.port.conversion.ulps import agree, coarser, quantized_as, ways_to_fewer_bits

FEWEST = 2  # nonzero elements: a single number is a multiple of any other


@dataclass(frozen=True)
class TensorLaw:
    """The relation of a tensor to its counterpart in another file.

    Attributes:
        name: name of the relation: `zeros`, `one-plus`, `exchanged`, `copied`, `transposed`,
            `permuted`, `fewer-bits`, `quantised`, `factor`, `factors` or `shift`; `bias` for a bias
            that only one file has; `packed` for rows that are in other tensors.
        words: description of the second file's tensor in terms of the first.
        page: page of parity/bugs about it; empty if there is none.
        heads, rows, columns: the only parts that differ, if not all do; otherwise empty.
        fix: how to mend it; empty if the words say so already.
    """

    name: str
    words: str
    page: str = ""
    heads: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    fix: str = ""


@dataclass(frozen=True)
class Pair:
    """A tensor of both files, or a part of it.

    Attributes:
        name: its canonical name.
        one, other: its values in each file.
        role: place of its heads, if it has heads and is whole.
        places: indices of the heads, as (heads, features, the rest), of the rows or of the columns
            in the part.
    """

    name: str
    one: np.ndarray
    other: np.ndarray
    role: Role | None = None
    places: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class Layers(NamedTuple):
    """All weights of both files, because one tensor may have been stored as another, and the
    specification.
    """

    weights: Weights
    others: Weights
    spec: AttentionSpec


def law_of(pair: Pair, heads: Collection[int], layers: Layers) -> TensorLaw | None:
    """Return a relation that explains every element of a differing tensor; None if no known one
    does.

    Relations of values are tried on the differing `heads`, then on the differing rows or columns.
    One factor per row can explain almost anything, so it comes last.
    """
    differing = pair
    if pair.role is not None and pair.role.heads != "shared":
        one, other = (pair.role.view(x, layers.spec) for x in (pair.one, pair.other))
        one, other = (view.reshape(-1, *view.shape[2:]) for view in (one, other))
        if len(heads) < len(one):
            differing = Pair(
                pair.name, one[[*heads]], other[[*heads]], places={"heads": tuple(heads)}
            )
    tries = [(pair, OF_TENSORS), (differing, OF_VALUES)]
    tries += [(lines, (*OF_VALUES, _factors)) for lines in _differing_lines(pair)]
    for part, relations in [*tries, (differing, (_factors,))]:
        for relation in relations:
            if (law := relation(part, layers)) is not None:
                return replace(law, **part.places)
    return None


def _differing_lines(pair: Pair) -> Iterator[Pair]:
    """Yield the rows and the columns that differ, unless all do."""
    differs = pair.one != pair.other
    for axis, what in zip(range(differs.ndim), ("rows", "columns"), strict=False):
        lines = np.flatnonzero(
            np.moveaxis(differs, axis, 0).reshape(differs.shape[axis], -1).any(axis=1)
        )
        if len(lines) < differs.shape[axis]:
            one, other = pair.one.take(lines, axis), pair.other.take(lines, axis)
            yield Pair(pair.name, one, other, places={what: tuple(map(int, lines))})


# ---- Values --------------------------------------------------------------------------------------


def _zeros(pair: Pair, layers: Layers) -> TensorLaw | None:
    page = "missing-bias" if pair.one.ndim == 1 else ""
    if not pair.other.any():
        return TensorLaw("zeros", "zeros", page)
    return (
        None
        if pair.one.any()
        else TensorLaw("zeros", "nonzero, while the first's is all zeros", page)
    )


def _fewer_bits(pair: Pair, layers: Layers) -> TensorLaw | None:
    pairs = (
        (pair.one, pair.other, "the first's, {}"),
        (pair.other, pair.one, "the original of the first's, which is {}"),
    )
    for before, after, words in pairs:
        if ways := ways_to_fewer_bits(before, after):
            return TensorLaw("fewer-bits", words.format(" or ".join(ways)), "low-precision")
        if kind := quantized_as(before, after):
            return TensorLaw("quantised", words.format(f"quantized as {kind}"))
    return None


def _one_plus(pair: Pair, layers: Layers) -> TensorLaw | None:
    """Relate norms that multiply by w and by 1 + w."""
    if not pair.name.endswith("_norm.weight"):
        return None
    for sign, words in ((1, "1 + w, where the first has w"), (-1, "w, where the first has 1 + w")):
        if _is_shifted(pair.one, pair.other, float(sign)):
            return TensorLaw("one-plus", words, "qk-norm")
    return None


def _is_shifted(one: np.ndarray, other: np.ndarray, by: float) -> bool:
    """Return whether arrays differ by a constant; after cancellation only one direction reproduces
    the bits.
    """
    before, after, dtype = (
        one.astype(np.float64),
        other.astype(np.float64),
        coarser(one.dtype, other.dtype),
    )
    return agree(before + by, after, dtype) or agree(before, after - by, dtype)


def _shift(pair: Pair, layers: Layers) -> TensorLaw | None:
    by = float(np.mean(pair.other.astype(np.float64) - pair.one.astype(np.float64)))
    if pair.one.size >= FEWEST and by and _is_shifted(pair.one, pair.other, by):
        return TensorLaw("shift", f"the first's, {by:+.6g} everywhere")
    return None


def _factor(pair: Pair, layers: Layers) -> TensorLaw | None:
    """Find one factor, and explain its meaning in the layer."""
    factors = _times(pair.one, pair.other, None)
    if factors is None:
        return None
    factor, head_dim = float(factors.reshape(-1)[0]), layers.spec.head_dim
    root = math.sqrt(head_dim)
    known = {"sqrt(H)": root, "1 / sqrt(H)": 1.0 / root, "H": head_dim, "1 / H": 1.0 / head_dim}
    meant = next(
        (words for words, value in known.items() if math.isclose(factor, value, rel_tol=1e-6)), ""
    )
    if factor == -1.0:
        return TensorLaw("factor", "the first's, negated")
    is_scale = bool(meant) and pair.name.startswith(("q_", "k_"))
    why = ": a scale of the scores, folded in or left out" if is_scale else ""
    words = f"the first's, times {factor:.6g}{', ' * bool(meant)}{meant}{why}"
    return TensorLaw("factor", words, "scale" if is_scale else "")


def _factors(pair: Pair, layers: Layers) -> TensorLaw | None:
    """Find one factor per head, row or column."""
    one, other = pair.one, pair.other
    parts: list[tuple[str, np.ndarray, np.ndarray, tuple[int, ...]]] = []
    if "heads" in pair.places:
        parts.append(("head", one, other, (1, 2)))
    elif pair.role is not None:
        parts.append(
            ("head", pair.role.view(one, layers.spec), pair.role.view(other, layers.spec), (2, 3))
        )
    if one.ndim == 2:
        parts += [("row", one, other, (1,)), ("column", one, other, (0,))]
    for part, before, after, axes in parts:
        found = _times(before, after, axes)
        if found is not None:
            low, high = float(found.min()), float(found.max())
            hint = ": possibly a norm before it, folded in" if part == "column" else ""
            return TensorLaw(
                "factors", f"the first's, each {part} times a number, {low:.3g} to {high:.3g}{hint}"
            )
    return None


def _times(one: np.ndarray, other: np.ndarray, axes: tuple[int, ...] | None) -> np.ndarray | None:
    """Return the factors between two arrays along axes; None if there are none, or too few numbers
    to verify them.
    """
    wide, after = one.astype(np.float64), other.astype(np.float64)
    if (np.count_nonzero(one, axis=axes, keepdims=True) < FEWEST).any():
        return None
    factors = (wide * after).sum(axis=axes, keepdims=True) / (wide * wide).sum(
        axis=axes, keepdims=True
    )
    return factors if agree(wide * factors, after, coarser(one.dtype, other.dtype)) else None


# ---- Places --------------------------------------------------------------------------------------


def _in_place_of(pair: Pair, layers: Layers) -> TensorLaw | None:
    """Find another tensor of the first file with these values."""
    for name, x in layers.weights.items():
        if (
            name == pair.name
            or x.shape != pair.other.shape
            or not x.any()
            or not agree(x, pair.other)
        ):
            continue
        page = "swapped-projections" if name[0] in "qkv" and "_proj." in name else ""
        if agree(pair.one, layers.others[name]):
            return TensorLaw("exchanged", f"{name} of the first: the two are exchanged", page)
        return TensorLaw("copied", f"{name} of the first", page)
    return None


def _transposed(pair: Pair, layers: Layers) -> TensorLaw | None:
    one = pair.one
    if one.ndim == 2 and one.shape[0] == one.shape[1] and agree(one.T, pair.other):
        return TensorLaw("transposed", "the first's, transposed", "transposed-kernel")
    return None


def _permuted(pair: Pair, layers: Layers) -> TensorLaw | None:
    """Find a permutation of rows or columns, and identify it."""
    one, other = pair.one, pair.other
    if pair.name.endswith(
        ".bias"
    ):  # a bias may have equal numbers: try the order of its weight first
        weight = f"{pair.name.removesuffix('bias')}weight"
        order = (
            _order(layers.weights[weight], layers.others[weight], 0)
            if weight in layers.weights
            else None
        )
        if order is not None and order.shape == one.shape and agree(one[order], other):
            return _of_order(order, 0, pair, layers.spec)
    for axis in range(one.ndim):
        order = _order(one, other, axis)
        if order is None or np.array_equal(
            order, np.arange(len(order))
        ):  # a rounded copy is in its own order
            continue
        if agree(np.take(one, order, axis=axis), other):
            return _of_order(order, axis, pair, layers.spec)
    return None


def _order(one: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray | None:
    """Return the permutation of rows or columns between two tensors, unverified; None if there is
    none.
    """
    dtype = coarser(one.dtype, other.dtype)
    rows = [np.moveaxis(x.astype(dtype), axis, 0).reshape(x.shape[axis], -1) for x in (one, other)]
    before, after = (list(digests(each)) for each in rows)
    return matched(before, after)


def _of_order(order: np.ndarray, axis: int, pair: Pair, spec: AttentionSpec) -> TensorLaw:
    """Describe a permutation of rows or columns: of heads, of RoPE pairs, or any other."""
    rows, places = ("rows", "columns", "features")[axis], np.arange(len(order))
    if pair.role is not None and pair.role.axis == axis:
        view = pair.role.view(places.reshape(-1, *[1] * axis).swapaxes(0, axis), spec)
        heads, features = view.shape[0] * view.shape[1], view.shape[2]
        of_heads = order.reshape(heads, features) if heads * features == len(order) else None
        if heads > 1 and of_heads is not None:
            moved, inside = of_heads[:, 0] // features, places.reshape(heads, features)
            if np.array_equal(of_heads, inside[moved]):
                return TensorLaw(
                    "permuted", f"the first's, its heads in the order {listed(moved)}", "head-order"
                )
            innermost = inside.T.reshape(-1)
            if np.array_equal(order, innermost) or np.array_equal(order, np.argsort(innermost)):
                return TensorLaw(
                    "permuted", "the first's, with heads innermost in one of the two", "head-order"
                )
        if axis == 0 and pair.name[0] in "qk" and (found := _of_pairs(order, features, spec)):
            return found
        if of_heads is not None and np.array_equal(
            np.sort(of_heads, axis=1), places.reshape(heads, -1)
        ):
            return TensorLaw(
                "permuted", f"the first's, its {rows} in another order within their heads"
            )
    which = f"the order {listed(order)}" if len(order) <= 2 * spec.head_dim else "another order"
    return TensorLaw("permuted", f"the first's, its {rows} in {which}")


def _of_pairs(order: np.ndarray, features: int, spec: AttentionSpec) -> TensorLaw | None:
    """Recognize RoPE pairs stored as halves in one file and interleaved in the other, for any head
    width.
    """
    whole = np.arange(len(order))
    sizes = [
        features,
        *(
            size
            for size in range(4, len(order) + 1, 2)
            if len(order) % size == 0 and size != features
        ),
    ]
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
            return TensorLaw(
                "permuted",
                f"the first's, its RoPE pairs interleaved instead of halves{as_if}",
                "rope-pairs",
            )
        if np.array_equal(order, np.argsort(interleaved)):
            return TensorLaw(
                "permuted",
                f"the first's, its RoPE pairs halves instead of interleaved{as_if}",
                "rope-pairs",
            )
    return None


Relation = Callable[[Pair, Layers], TensorLaw | None]

OF_TENSORS: tuple[Relation, ...] = (_one_plus, _zeros, _in_place_of, _transposed, _permuted)
"""Relations of whole tensors, in the order in which they are tried."""

OF_VALUES: tuple[Relation, ...] = (_zeros, _fewer_bits, _factor, _shift)
"""Relations that change values but not their places, for a tensor or a part of it."""
