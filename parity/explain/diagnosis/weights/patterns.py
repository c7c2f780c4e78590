"""Relations between a tensor and its counterpart in another file, verified on every element."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from mha_spec import AttentionSpec, Rope
from parity.explain.diagnosis.bugs.families import (
    BIAS,
    HEAD_ORDER,
    PAIRS,
    QK_NORM,
    ROUNDED_WEIGHTS,
    SWAPPED,
    TRANSPOSED,
    BugFamily,
    scale_family,
)
from parity.explain.diagnosis.weights.roles import Role, digests, matched
from parity.explain.diagnosis.weights.same_function import listed
from parity.explain.diagnosis.weights.ulps import agree, coarser, quantized_as, ways_to_fewer_bits
from parity.measure.core.orders import heads_innermost, of_whole_heads, within_heads
from parity.measure.core.weights import Weights

FEWEST = 2
"""Nonzero elements that show a factor: a single number is a multiple of any other."""


@dataclass(frozen=True)
class TensorPattern:
    """The relation of a tensor to its counterpart in another file.

    Attributes:
        name: name of the relation: `zeros`, `one-plus`, `exchanged`, `copied`, `transposed`,
            `permuted`, `fewer-bits`, `quantized`, `factor`, `factors` or `shift`; `bias` for a bias
            that only one file has; `packed` for rows that are in other tensors.
        words: description of the second file's tensor in terms of the first.
        page: page of parity/bugs about it; empty if there is none.
        fix: how to fix it; empty if it is unknown.
        heads, rows, columns: the only parts that differ, if not all do; otherwise empty.
    """

    name: str
    words: str
    page: str = ""
    fix: str = ""
    heads: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A tensor of both files, or a part of it.

    Attributes:
        name: its canonical name.
        one, other: its values in each file.
        role: position of its heads, if it has heads and is whole.
        indices: indices of the heads, as (heads, features, the rest), of the rows or of the columns
            in the part.
    """

    name: str
    one: np.ndarray
    other: np.ndarray
    role: Role | None = None
    indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class Layers(NamedTuple):
    """All weights of both files, because one tensor may have been stored as another; the layer."""

    weights: Weights
    others: Weights
    spec: AttentionSpec


def of_family(
    name: str, words: str, family: BugFamily | None, spec: AttentionSpec
) -> TensorPattern:
    """Return a relation with the page and fix of a family of bugs, if it is one of them."""
    if family is None:
        return TensorPattern(name, words)
    return TensorPattern(name, words, family.page, family.fix_for(spec))


def pattern_of(pair: Pair, heads: Collection[int], layers: Layers) -> TensorPattern | None:
    """Return a relation that explains every element of a differing tensor; None if none does.

    Relations of whole tensors are tried first, then relations of values on the differing `heads`,
    then on the differing rows or columns. One factor per row can explain almost anything, so it
    comes last.
    """
    of_heads = _differing_heads(pair, heads, layers.spec)
    attempts: list[tuple[Pair, tuple[Relation, ...]]] = [(pair, OF_TENSORS), (of_heads, OF_VALUES)]
    for lines in _differing_lines(pair):
        attempts.append((lines, (*OF_VALUES, _factors)))
    attempts.append((of_heads, (_factors,)))
    for part, relations in attempts:
        for relation in relations:
            pattern = relation(part, layers)
            if pattern is not None:
                return replace(pattern, **part.indices)
    return None


def _differing_heads(pair: Pair, heads: Collection[int], spec: AttentionSpec) -> Pair:
    """Return the heads of a tensor that differ; the tensor itself if all do, or it has none."""
    if pair.role is None or pair.role.heads == "shared":
        return pair
    one, other = pair.role.view(pair.one, spec), pair.role.view(pair.other, spec)
    one, other = one.reshape(-1, *one.shape[2:]), other.reshape(-1, *other.shape[2:])
    if len(heads) == len(one):
        return pair
    return Pair(pair.name, one[[*heads]], other[[*heads]], indices={"heads": tuple(heads)})


def _differing_lines(pair: Pair) -> Iterator[Pair]:
    """Yield the rows and the columns that differ, unless all do."""
    differs = pair.one != pair.other
    for axis, what in enumerate(("rows", "columns")[: differs.ndim]):
        size = differs.shape[axis]
        differs_on_line = np.moveaxis(differs, axis, 0).reshape(size, -1).any(axis=1)
        lines = np.flatnonzero(differs_on_line)
        if len(lines) < size:
            one, other = pair.one.take(lines, axis), pair.other.take(lines, axis)
            yield Pair(pair.name, one, other, indices={what: tuple(map(int, lines))})


# ---- Values --------------------------------------------------------------------------------------


def _zeros(pair: Pair, layers: Layers) -> TensorPattern | None:
    """Find a tensor that is all zeros in one file."""
    family = None
    # With one axis they are, as a rule, the values of a bias that was not loaded.
    if pair.one.ndim == 1:
        family = BIAS
    if not pair.other.any():
        return of_family("zeros", "zeros", family, layers.spec)
    if not pair.one.any():
        words = "nonzero, while the first's is all zeros"
        return of_family("zeros", words, family, layers.spec)
    return None


def _fewer_bits(pair: Pair, layers: Layers) -> TensorPattern | None:
    """Find a conversion to fewer bits, of either file's tensor."""
    pairs = (
        (pair.one, pair.other, "the first's, {}"),
        (pair.other, pair.one, "the original of the first's, which is {}"),
    )
    for before, after, words in pairs:
        ways = ways_to_fewer_bits(before, after)
        if ways:
            in_words = words.format(" or ".join(ways))
            return of_family("fewer-bits", in_words, ROUNDED_WEIGHTS, layers.spec)
        kind = quantized_as(before, after)
        if kind:
            return TensorPattern("quantized", words.format(f"quantized as {kind}"))
    return None


def _one_plus(pair: Pair, layers: Layers) -> TensorPattern | None:
    """Relate norms that multiply by w and by 1 + w: their weights differ by 1."""
    if not pair.name.endswith("_norm.weight"):
        return None
    for sign, words in ((1, "1 + w, where the first has w"), (-1, "w, where the first has 1 + w")):
        if _is_shifted(pair.one, pair.other, float(sign)):
            return of_family("one-plus", words, QK_NORM, layers.spec)
    return None


def _is_shifted(one: np.ndarray, other: np.ndarray, by: float) -> bool:
    """Return whether arrays differ by a constant.

    Cancellation loses bits in one of the directions, so either may reproduce the other array.
    """
    before, after = one.astype(np.float64), other.astype(np.float64)
    dtype = coarser(one.dtype, other.dtype)
    return agree(before + by, after, dtype) or agree(before, after - by, dtype)


def _shift(pair: Pair, layers: Layers) -> TensorPattern | None:
    by = float(np.mean(pair.other.astype(np.float64) - pair.one.astype(np.float64)))
    if pair.one.size >= FEWEST and by and _is_shifted(pair.one, pair.other, by):
        return TensorPattern("shift", f"the first's, {by:+.6g} everywhere")
    return None


def _factor(pair: Pair, layers: Layers) -> TensorPattern | None:
    """Find one factor, and explain its meaning in the layer."""
    factors = _times(pair.one, pair.other, None)
    if factors is None:
        return None
    factor = float(factors.reshape(-1)[0])
    if factor == -1.0:
        return TensorPattern("factor", "the first's, negated")
    words = f"the first's, times {factor:.6g}"
    meaning = _meaning_of(factor, layers.spec.head_dim)
    if not meaning:
        return TensorPattern("factor", words)
    words += f", {meaning}"
    if not pair.name.startswith(("q_", "k_")):
        return TensorPattern("factor", words)
    words += ": a scale of the scores, folded in or left out"
    return of_family("factor", words, scale_family(layers.spec), layers.spec)


def _meaning_of(factor: float, head_dim: int) -> str:
    """Return the formula in H of a usual scale of scores; empty if the factor is any other
    number.
    """
    root = math.sqrt(head_dim)
    formulas = {"sqrt(H)": root, "1 / sqrt(H)": 1.0 / root, "H": head_dim, "1 / H": 1.0 / head_dim}
    for formula, value in formulas.items():
        if math.isclose(factor, value, rel_tol=1e-6):  # the factor is fitted to rounded weights
            return formula
    return ""


def _factors(pair: Pair, layers: Layers) -> TensorPattern | None:
    """Find one factor per head, row or column."""
    one, other = pair.one, pair.other
    parts: list[tuple[str, np.ndarray, np.ndarray, tuple[int, ...]]] = []
    if "heads" in pair.indices:
        parts.append(("head", one, other, (1, 2)))
    elif pair.role is not None:
        views = pair.role.view(one, layers.spec), pair.role.view(other, layers.spec)
        parts.append(("head", *views, (2, 3)))
    if one.ndim == 2:
        parts += [("row", one, other, (1,)), ("column", one, other, (0,))]
    for part, before, after, axes in parts:
        factors = _times(before, after, axes)
        if factors is None:
            continue
        low, high = float(factors.min()), float(factors.max())
        words = f"the first's, each {part} times a number, {low:.3g} to {high:.3g}"
        if part == "column":
            words += ": possibly a norm before it, folded in"
        return TensorPattern("factors", words)
    return None


def _times(one: np.ndarray, other: np.ndarray, axes: tuple[int, ...] | None) -> np.ndarray | None:
    """Return the factors between two arrays along axes, by least squares; None if there are none.

    Too few elements to verify a factor count as none.
    """
    if (np.count_nonzero(one, axis=axes, keepdims=True) < FEWEST).any():
        return None
    wide, after = one.astype(np.float64), other.astype(np.float64)
    products = (wide * after).sum(axis=axes, keepdims=True)
    factors = products / (wide * wide).sum(axis=axes, keepdims=True)
    if not agree(wide * factors, after, coarser(one.dtype, other.dtype)):
        return None
    return factors


# ---- Positions -----------------------------------------------------------------------------------


def _from_another_tensor(pair: Pair, layers: Layers) -> TensorPattern | None:
    """Find another tensor of the first file with these values."""
    for name, x in layers.weights.items():
        # Zeros, such as fresh biases, agree with one another by chance.
        if name == pair.name or not x.any() or not agree(x, pair.other):
            continue
        family = None
        if name.startswith(("q_proj.", "k_proj.", "v_proj.")):
            family = SWAPPED
        if agree(pair.one, layers.others[name]):
            words = f"{name} of the first: the two are exchanged"
            return of_family("exchanged", words, family, layers.spec)
        return of_family("copied", f"{name} of the first", family, layers.spec)
    return None


def _transposed(pair: Pair, layers: Layers) -> TensorPattern | None:
    one = pair.one
    if one.ndim == 2 and one.shape[0] == one.shape[1] and agree(one.T, pair.other):
        return of_family("transposed", "the first's, transposed", TRANSPOSED, layers.spec)
    return None


def _permuted(pair: Pair, layers: Layers) -> TensorPattern | None:
    """Find a permutation of rows or columns, and identify it."""
    one, other = pair.one, pair.other
    # A bias may have equal elements, which leave its order open: the order of its weight is tried
    # first.
    weight = f"{pair.name.removesuffix('bias')}weight"
    if pair.name.endswith(".bias") and weight in layers.weights:
        order = _order(layers.weights[weight], layers.others[weight], 0)
        if order is not None and order.shape == one.shape and agree(one[order], other):
            return _of_order(order, 0, pair, layers.spec)
    for axis in range(one.ndim):
        order = _order(one, other, axis)
        if order is None or _is_identity(order):  # a rounded copy is in its own order
            continue
        if agree(np.take(one, order, axis=axis), other):
            return _of_order(order, axis, pair, layers.spec)
    return None


def _is_identity(order: np.ndarray) -> bool:
    return np.array_equal(order, np.arange(len(order)))


def _order(one: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray | None:
    """Return the permutation of rows or columns between two tensors, unverified, if any."""
    dtype = coarser(one.dtype, other.dtype)
    before = np.moveaxis(one.astype(dtype), axis, 0).reshape(one.shape[axis], -1)
    after = np.moveaxis(other.astype(dtype), axis, 0).reshape(other.shape[axis], -1)
    return matched(list(digests(before)), list(digests(after)))


def _of_order(order: np.ndarray, axis: int, pair: Pair, spec: AttentionSpec) -> TensorPattern:
    """Describe a permutation of rows or columns: of heads, of RoPE pairs, or any other."""
    lines = ("rows", "columns", "features")[axis]
    if pair.role is not None and pair.role.axis == axis:
        positions = np.arange(len(order)).reshape(-1, *[1] * axis).swapaxes(0, axis)
        num_groups, heads_per_group, num_features, _ = pair.role.view(positions, spec).shape
        num_heads = num_groups * heads_per_group
        words, family = _of_heads(order, num_heads, num_features), HEAD_ORDER
        if not words and axis == 0 and pair.name[0] in "qk":
            words, family = _of_pairs(order, num_features, spec), PAIRS
        if words:
            return of_family("permuted", f"the first's, {words}", family, spec)
        if _is_within_heads(order, num_heads, num_features):
            words = f"the first's, its {lines} in a different order within their heads"
            return TensorPattern("permuted", words)
    which = "a different order"
    if len(order) <= 2 * spec.head_dim:  # short enough to be looked at
        which = f"the order {listed(order)}"
    return TensorPattern("permuted", f"the first's, its {lines} in {which}")


def _of_heads(order: np.ndarray, num_heads: int, num_features: int) -> str:
    """Describe a permutation of whole heads; return an empty text for any other order."""
    if num_heads < 2 or num_heads * num_features != len(order):
        return ""
    head_order = order.reshape(num_heads, num_features)[:, 0] // num_features
    if np.array_equal(order, of_whole_heads(head_order, num_features)):
        return f"its heads in the order {listed(head_order)}"
    innermost = heads_innermost(num_heads, num_features)
    if np.array_equal(order, innermost) or np.array_equal(order, np.argsort(innermost)):
        return "with heads innermost in one of the two"
    return ""


def _is_within_heads(order: np.ndarray, num_heads: int, num_features: int) -> bool:
    """Return whether a permutation moves features within their heads."""
    if num_heads * num_features != len(order):
        return False
    heads = np.sort(order.reshape(num_heads, num_features), axis=1)
    return _is_identity(heads.reshape(-1))


def _of_pairs(order: np.ndarray, num_features: int, spec: AttentionSpec) -> str:
    """Describe RoPE pairs that are halves in one file and interleaved in the other, if they are.

    All widths of heads are tried, because a converter may have assumed the wrong number of heads.
    """
    widths = []
    # Without RoPE, features of an odd number form no pairs.
    if spec.rope is not None or num_features % 2 == 0:
        widths.append(num_features)
    for width in range(4, len(order) + 1, 2):  # with two features both orders are equal
        if len(order) % width == 0 and width != num_features:
            widths.append(width)
    for width in widths:
        halves = Rope()
        as_if = f", as if heads had {width} features"
        if width == num_features:
            as_if = ""
            if spec.rope is not None:
                halves = Rope(rotary_dim=spec.rope.rotary_dim, rotated=spec.rope.rotated)
        interleaved = within_heads(halves.pair_order(width), len(order) // width)
        if np.array_equal(order, interleaved):
            return f"its RoPE pairs interleaved instead of halves{as_if}"
        if np.array_equal(order, np.argsort(interleaved)):
            return f"its RoPE pairs halves instead of interleaved{as_if}"
    return ""


Relation = Callable[[Pair, Layers], TensorPattern | None]

OF_TENSORS: tuple[Relation, ...] = (_one_plus, _zeros, _from_another_tensor, _transposed, _permuted)
"""Relations of whole tensors, in the order in which they are tried."""

OF_VALUES: tuple[Relation, ...] = (_zeros, _fewer_bits, _factor, _shift)
"""Relations that change values but not their positions, for a tensor or a part of it."""
