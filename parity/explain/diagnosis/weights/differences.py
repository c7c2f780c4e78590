"""Compare two sets of weights by their tensors: where they differ, how, and if it matters."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.diagnosis.bugs.families import BIAS, FUSED_QKV
from parity.explain.diagnosis.weights.packings import LETTERS, PackingError, find_packing_error
from parity.explain.diagnosis.weights.patterns import (
    Layers,
    Pair,
    TensorPattern,
    of_family,
    pattern_of,
)
from parity.explain.diagnosis.weights.roles import Role, roles
from parity.explain.diagnosis.weights.same_function import in_other_words
from parity.explain.diagnosis.weights.ulps import MOST_ULPS, coarser, is_copy, ulps
from parity.explain.diagnosis.weights.verify import check_alike, with_biases
from parity.measure.core.records import JsonRecord
from parity.measure.core.weights import Weights, check_weights
from parity.measure.text import and_listed
from parity.port.conversion.bits import same_bits

MOST_NAMED = 8
"""Heads, rows or columns that a message names one by one; more are counted."""

MOST_COUNTED = 1e6
"""Units in the last place that a message counts; larger numbers are not informative."""


def _heads_in_words(heads: tuple[int, ...], num_heads: int) -> str:
    if len(heads) == num_heads:
        return "all heads"
    return _indices_in_words(heads, num_heads, "head")


def _indices_in_words(indices: tuple[int, ...], size: int, what: str) -> str:
    if len(indices) > MOST_NAMED:
        return f"{len(indices)} of {size} {what}s"
    plural = "s" if len(indices) > 1 else ""
    return f"{what}{plural} {' '.join(map(str, indices))}"


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between two files.

    Attributes:
        name: its canonical name.
        shape: shape of the canonical tensor, (out, in) or (out,).
        differing: number of elements that differ; 0 if only the dtypes differ.
        rows, columns: number of rows and columns that differ; columns is None for a tensor of one
            axis.
        heads: heads that differ, if the tensor has heads.
        num_heads: number of its heads; 0 if it has none.
        worst_index: index of the largest difference.
        worst_values: values of the first and of the second file at that index.
        max_abs: largest absolute difference.
        max_ulp: largest difference in units in the last place of the coarser dtype.
        pattern: relation of the two tensors, verified on all elements; None if no known relation
            explains them.
    """

    name: str
    shape: tuple[int, ...]
    differing: int
    rows: int
    columns: int | None
    heads: tuple[int, ...]
    num_heads: int
    worst_index: tuple[int, ...]
    worst_values: tuple[float, float]
    max_abs: float
    max_ulp: float
    pattern: TensorPattern | None = None

    def __str__(self) -> str:
        where = []
        if self.columns is not None:
            num_rows, num_columns = self.shape[:2]
            where.append(f"{self.rows} of {num_rows} rows")
            where.append(f"{self.columns} of {num_columns} columns")
        if self.num_heads > 1:
            where.append(_heads_in_words(self.heads, self.num_heads))
        summary = f"{self.name} differs in {self.differing} of {math.prod(self.shape)} elements"
        if where:
            summary += f": {', '.join(where)}"
        index = ", ".join(map(str, self.worst_index))
        one, other = self.worst_values
        worst = f"  worst     at ({index}): {one:.9g}, and {other:.9g} in the second"
        if self.max_ulp < MOST_COUNTED:
            worst += f", {self.max_ulp:.3g} units in the last place at most"
        return f"{summary}\n{worst}"


@dataclass(frozen=True)
class WeightsComparison(JsonRecord):
    """Comparison of two sets of weights by their tensors: do they represent the same attention?

    Attributes:
        kind: `bits`, equal bit for bit; `values`, equal values in other bits: a different dtype
            that represents them, or zeros of the opposite sign; `copy`, one is the other rounded to
            its dtype; `rounding`, at most 4 units in the last place of the coarser dtype apart;
            `function`, other tensors of the same function; `different`.
        dtypes: dtypes of the first and the second set.
        max_ulp: largest difference, in units in the last place of the coarser dtype.
        differences: tensors that differ, in the order of the canonical names.
        how: description of the relation; empty if they are different.
    """

    kind: str
    dtypes: tuple[str, str]
    max_ulp: float
    differences: tuple[TensorDifference, ...]
    how: str = ""

    IN_JSON = ("*", "same")

    @property
    def same(self) -> bool:
        """Return whether both represent the same attention."""
        return self.kind != "different"

    @property
    def unexplained(self) -> list[str]:
        """Return the tensors that no known relation explains."""
        if self.same:
            return []
        return [difference.name for difference in self.differences if difference.pattern is None]

    def __str__(self) -> str:
        if self.how:
            return self.how
        lines = []
        for pattern, of_pattern in groupby(
            self.differences, key=lambda difference: difference.pattern
        ):
            differences = list(of_pattern)
            lines += map(str, differences)
            lines += _pattern_in_words(pattern, differences[0], len(differences))
        return "\n".join(lines)


def _pattern_in_words(
    pattern: TensorPattern | None, first: TensorDifference, count: int
) -> list[str]:
    """Format a relation as lines below the `count` tensors that it explains."""
    if pattern is None:
        # A bug that changes several tensors may explain them: the diagnosis searches for those.
        which = "it does not follow" if count == 1 else "none of these follows"
        return [f"  pattern   {which} from the first's by a pattern within one tensor"]
    lines = [f"  pattern   {_relation(pattern, first, count)}"]
    if pattern.fix:
        lines.append(f"  fix       {pattern.fix}")
    if pattern.page:
        lines.append(f"  more      mha-parity bugs {pattern.page}")
    return lines


def _relation(pattern: TensorPattern, first: TensorDifference, count: int) -> str:
    """Return a relation as a sentence about the `count` tensors that it explains."""
    if pattern.name == "packed":
        return pattern.words
    relation = f"the second's is {_parts_of(pattern, first)}{pattern.words}"
    if count > 1:
        return f"in each, {relation}"
    return relation


def _parts_of(pattern: TensorPattern, difference: TensorDifference) -> str:
    """Describe the parts of a tensor that a relation is about, before its words."""
    words = ""
    if pattern.heads:
        words += f"in {_heads_in_words(pattern.heads, difference.num_heads)} "
    if pattern.rows:
        words += f"in {_indices_in_words(pattern.rows, difference.shape[0], 'row')} "
    if pattern.columns:
        words += f"in {_indices_in_words(pattern.columns, difference.shape[1], 'column')} "
    return words


@np.errstate(over="ignore", invalid="ignore")  # overflow in a narrower dtype, infinite differences
def compare_weights(
    weights: Mapping[str, Any],
    spec: AttentionSpec,
    other: Mapping[str, Any],
    other_spec: AttentionSpec,
) -> WeightsComparison:
    """Compare two layers tensor by tensor: which tensors differ, where, and how they are related.

    No attention is computed; `verify` does that.

    Args:
        weights, spec: canonical weights, as arrays of any framework, and the layer.
        other, other_spec: weights and layer to compare.

    Raises:
        TypeError: if an entry is not a floating-point array, or the dtypes of one layer differ.
        ValueError: if the layers differ in more than their weights, or the weights do not match
            their layer.

    Example:
        >>> spec = parity.AttentionSpec(64, 8)
        >>> weights = parity.random_weights(spec)
        >>> wrong = weights | {"out_proj.weight": weights["out_proj.weight"].T}
        >>> compared = parity.compare_weights(weights, spec, wrong, spec)
        >>> [difference.name for difference in compared.differences]
        ['out_proj.weight']
    """
    one, with_all = with_biases(check_weights(weights, spec), spec, other_spec)
    two, other_with_all = with_biases(check_weights(other, other_spec), other_spec, spec)
    biases_of_first = with_all.weight_shapes.keys() - other_spec.weight_shapes.keys()
    biases_of_second = with_all.weight_shapes.keys() - spec.weight_shapes.keys()
    spec = check_alike(with_all, other_with_all)
    dtypes = _dtype_of(one).name, _dtype_of(two).name
    if same_bits(one, two) and not biases_of_first and not biases_of_second:
        return WeightsComparison("bits", dtypes, 0.0, (), "weights the same, bit for bit")
    roles_by_name = roles(spec)
    differences = []
    for name in one:
        difference = _difference(name, one[name], two[name], roles_by_name.get(name), spec)
        if difference is not None:
            differences.append(difference)
    max_ulp = max((difference.max_ulp for difference in differences), default=0.0)
    kind, how = _same_values(one, two, differences, max_ulp)
    if kind != "different":
        return WeightsComparison(kind, dtypes, max_ulp, tuple(differences), how)
    layers = Layers(one, two, spec)
    packing = _packing_of(differences, layers)
    # If rows moved between q, k and v, the two are not the same function.
    if packing is None or not packing.is_mixed:
        words = in_other_words(one, two, spec)
        if words:
            verb = "differs" if len(differences) == 1 else "differ"
            names = and_listed(difference.name for difference in differences)
            how = f"{names} {verb}, and it is the same function: {words}"
            return WeightsComparison("function", dtypes, max_ulp, tuple(differences), how)
    explained = []
    for difference in differences:
        name = difference.name
        if packing is not None and packing.is_mixed and name in packing.names:
            pattern = _pattern_of_packing(packing)
        else:
            pattern = _bias_of_one(name, biases_of_first, biases_of_second, spec)
            if pattern is None:
                pair = Pair(name, one[name], two[name], roles_by_name.get(name))
                pattern = pattern_of(pair, difference.heads, layers)
        explained.append(replace(difference, pattern=pattern))
    # Rows that stayed within their tensors have a relation each, unless one of these was not found.
    if packing is not None:
        of_packing = [each for each in explained if each.name in packing.names]
        if any(difference.pattern is None for difference in of_packing):
            explained = _with_packing(explained, packing)
    return WeightsComparison(kind, dtypes, max_ulp, tuple(explained), how)


def _dtype_of(weights: Weights) -> np.dtype:
    """Return the dtype that all weights of a layer have."""
    return next(iter(weights.values())).dtype


def _packing_of(differences: list[TensorDifference], layers: Layers) -> PackingError | None:
    """Return the order of rows across q, k and v, if at least two of these tensors differ."""
    projections = [difference.name.removesuffix(".weight") for difference in differences]
    if sum(projection in LETTERS for projection in projections) < 2:
        return None
    return find_packing_error(*layers)


def _pattern_of_packing(packing: PackingError) -> TensorPattern:
    return TensorPattern("packed", packing.words, FUSED_QKV.page, packing.fix or FUSED_QKV.fix)


def _with_packing(
    differences: list[TensorDifference], packing: PackingError
) -> list[TensorDifference]:
    """Return the differences, the differences of q, k and v explained by the order of their
    rows.
    """
    pattern = _pattern_of_packing(packing)
    explained = []
    for difference in differences:
        if difference.name in packing.names:
            difference = replace(difference, pattern=pattern)
        explained.append(difference)
    return explained


def _bias_of_one(
    name: str, of_first: Collection[str], of_second: Collection[str], spec: AttentionSpec
) -> TensorPattern | None:
    """Return the relation of a bias that only one file has, and that is 0 in the other."""
    if name in of_first:
        return of_family("bias", "missing, and nonzero in the first", BIAS, spec)
    if name in of_second:
        return of_family("bias", "a bias that the first does not have", BIAS, spec)
    return None


def _same_values(
    one: Weights, two: Weights, differences: list[TensorDifference], max_ulp: float
) -> tuple[str, str]:
    """Return the kind of a comparison and its description; "different" and no description if the
    values are not nearly equal.
    """
    dtype, other_dtype = _dtype_of(one).name, _dtype_of(two).name
    if not differences:
        how = f"in {dtype} and in {other_dtype}"
        if dtype == other_dtype:
            how = "except for signs of zeros, or zero biases of one"
        return "values", f"weights the same values, {how}"
    if max_ulp > MOST_ULPS:
        return "different", ""
    for difference in differences:
        # A tensor whose tiny values all became zeros is lost, even within a few units in the last
        # place.
        if one[difference.name].any() != two[difference.name].any():
            return "different", ""
    coarse = coarser(_dtype_of(one), _dtype_of(two)).name
    rounded = f"weights the same up to rounding in {coarse}: "
    apart = f"at most {max_ulp:.3g} units in the last place apart"
    are_copies = all(is_copy(one[name], two[name]) for name in one)
    if dtype != other_dtype and are_copies:
        claim, fine = "second is the first", dtype
        if coarse == dtype:
            claim, fine = "first is the second", other_dtype
        num_gone = 0
        for name in one:
            num_gone += np.count_nonzero((one[name] == 0) != (two[name] == 0))
        zeros = f", {num_gone} elements to 0" if num_gone else ""
        words = f"{rounded}the {claim}, {fine} rounded to {coarse}, {apart}{zeros}"
        return "copy", words
    num_differing = sum(difference.differing for difference in differences)
    size = sum(x.size for x in one.values())
    return "rounding", f"{rounded}{apart}, in {num_differing} of {size} elements"


def _difference(
    name: str, one: np.ndarray, two: np.ndarray, role: Role | None, spec: AttentionSpec
) -> TensorDifference | None:
    """Return where and by how much a tensor differs; None if its values are equal."""
    if np.array_equal(one, two):
        return None
    wide, other_wide = one.astype(np.float64), two.astype(np.float64)
    errors, differs = np.abs(wide - other_wide), wide != other_wide
    heads, num_heads = (), 0
    if role is not None and role.heads != "shared":
        in_heads = role.view(differs, spec)
        num_heads = in_heads.shape[0] * in_heads.shape[1]
        heads = tuple(map(int, np.flatnonzero(in_heads.reshape(num_heads, -1).any(axis=1))))
    columns = None
    if differs.ndim > 1:
        columns = int(np.count_nonzero(differs.any(axis=0)))
    worst = np.unravel_index(int(errors.argmax()), errors.shape)
    return TensorDifference(
        name=name,
        shape=one.shape,
        differing=int(np.count_nonzero(differs)),
        rows=int(np.count_nonzero(differs.reshape(one.shape[0], -1).any(axis=1))),
        columns=columns,
        heads=heads,
        num_heads=num_heads,
        worst_index=tuple(map(int, worst)),
        worst_values=(float(wide[worst]), float(other_wide[worst])),
        max_abs=float(errors[worst]),
        max_ulp=float(ulps(one, two).max()),
    )
