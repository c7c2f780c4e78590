"""Compare two sets of weights tensor by tensor: where they differ, how they are related, and
whether it matters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.measure.core.records import JsonRecord
from parity.measure.core.weights import Weights, check_weights
from parity.measure.text import and_listed
from parity.port.conversion.laws import Layers, Pair, TensorLaw, law_of
from parity.port.conversion.packings import LETTERS, PackingError, find_packing_error
from parity.port.conversion.roles import Role, roles
from parity.port.conversion.same_function import in_other_words
from parity.port.conversion.ulps import MOST_ULPS, coarser, is_copy, ulps
from parity.port.conversion.verify import check_alike, same_bits, with_biases

MOST_NAMED = 8  # heads, rows or columns
MOST_COUNTED = 1e6  # units in the last place; larger counts are not informative


def _heads_in_words(heads: tuple[int, ...], num_heads: int) -> str:
    if len(heads) == num_heads:
        return "all heads"
    return _places_in_words(heads, num_heads, "head")


def _places_in_words(places: tuple[int, ...], size: int, what: str) -> str:
    if len(places) > MOST_NAMED:
        return f"{len(places)} of {size} {what}s"
    return f"{what}{'s' * (len(places) > 1)} {' '.join(map(str, places))}"


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between two files.

    Attributes:
        name: its canonical name.
        shape: of the canonical tensor, (out, in) or (out,).
        differing: number of elements that differ; 0 if only the dtypes differ.
        rows, columns: number of rows and columns that differ; columns is None for a tensor of one
            axis.
        heads: heads that differ, if the tensor has heads.
        num_heads: number of its heads; 0 if it has none.
        worst_index: index of the largest difference.
        worst_values: values of the first and of the second file at that index.
        max_abs: largest absolute difference.
        max_ulp: largest difference in units in the last place of the coarser dtype.
        law: relation of the two tensors, verified on all elements; None if no known relation
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
    law: TensorLaw | None = None

    def __str__(self) -> str:
        where = [
            f"{count} of {size} {what}"
            for count, size, what in zip(
                (self.rows, self.columns), self.shape, ("rows", "columns"), strict=False
            )
            if len(self.shape) > 1
        ]
        if self.num_heads > 1:
            where.append(_heads_in_words(self.heads, self.num_heads))
        place, (one, other) = ", ".join(map(str, self.worst_index)), self.worst_values
        ulps_apart = (
            f", {self.max_ulp:.3g} units in the last place at most"
            if self.max_ulp < MOST_COUNTED
            else ""
        )
        lines = [
            f"{self.name} differs in {self.differing} of {math.prod(self.shape)} "
            f"elements{': ' * bool(where)}" + ", ".join(where),
            f"  worst     at ({place}): {one:.9g}, and {other:.9g} in the second{ulps_apart}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class WeightsComparison(JsonRecord):
    """Comparison of two sets of weights by their tensors: do they represent the same attention?

    Attributes:
        kind: `bits`, equal bit for bit; `values`, equal values in other bits: another dtype that
            represents them, or zeros of another sign; `copy`, one is the other rounded to its
            dtype; `rounding`, at most 4 units in the last place of the coarser dtype apart;
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
        return [each.name for each in self.differences if each.law is None] if not self.same else []

    def __str__(self) -> str:
        if self.how:
            return self.how
        lines = []
        for law, of_law in groupby(self.differences, key=lambda difference: difference.law):
            found = list(of_law)
            lines += [*map(str, found), *_law_in_words(law, found[0], len(found))]
        return "\n".join(lines)


def _law_in_words(law: TensorLaw | None, first: TensorDifference, count: int) -> list[str]:
    """Format a relation as lines below the `count` tensors that it explains."""
    if law is None:
        # A bug that changes several tensors may explain them: the diagnosis searches for those.
        which = "it does not follow" if count == 1 else "none of these follows"
        return [f"  law       {which} from the first's by a pattern within one tensor"]
    if law.name == "packed":
        lines = [f"  law       {law.words}", *([f"  fix       {law.fix}"] if law.fix else [])]
        return [*lines, f"  see       mha-parity bugs {law.page}"]
    inside = f"in {_heads_in_words(law.heads, first.num_heads)} " if law.heads else ""
    for places, size, what in zip(
        (law.rows, law.columns), first.shape, ("row", "column"), strict=False
    ):
        inside += f"in {_places_in_words(places, size, what)} " if places else ""
    each = "in each, " if count > 1 else ""
    lines = [f"  law       {each}the second's is {inside}{law.words}"]
    return lines + [f"  see       mha-parity bugs {law.page}"] * bool(law.page)


@np.errstate(over="ignore", invalid="ignore")  # overflow in a narrower dtype, infinite differences
def compare_weights(
    weights: Mapping[str, Any],
    spec: AttentionSpec,
    other: Mapping[str, Any],
    other_spec: AttentionSpec,
) -> WeightsComparison:
    """Compare two layers tensor by tensor: which tensors differ, where, and how they are related.

    No attention is computed: `verify` does that.

    Args:
        weights, spec: canonical weights, as arrays of any framework, and the layer.
        other, other_spec: weights and layer to compare.

    Raises:
        TypeError: if an entry is not a floating-point array, or the dtypes of one layer differ.
        ValueError: if the layers differ in more than their weights, or the weights do not match
            their layer.
    """
    one, with_all = with_biases(check_weights(weights, spec), spec, other_spec)
    two, other_with_all = with_biases(check_weights(other, other_spec), other_spec, spec)
    biases = [{*with_all.weight_shapes} - {*each.weight_shapes} for each in (other_spec, spec)]
    spec = check_alike(with_all, other_with_all)
    dtypes = [next(iter(held.values())).dtype for held in (one, two)]
    dtype_names = (dtypes[0].name, dtypes[1].name)
    if same_bits(one, two) and not any(biases):
        return WeightsComparison("bits", dtype_names, 0.0, (), "weights the same, bit for bit")
    held = roles(spec)
    found = [
        each
        for name in one
        if (each := _difference(name, one[name], two[name], held.get(name), spec))
    ]
    max_ulp = max((each.max_ulp for each in found), default=0.0)
    kind, how = _same_values(one, two, found, max_ulp)
    if kind != "different":
        return WeightsComparison(kind, dtype_names, max_ulp, tuple(found), how)
    layers = Layers(one, two, spec)
    packing = _packing_of(found, layers)
    if packing is not None and packing.is_mixed:  # then it is not the same function
        found = _with_packing(found, packing)
    elif words := in_other_words(one, two, spec):
        verb = "differs" if len(found) == 1 else "differ"
        names = and_listed(each.name for each in found)
        how = f"{names} {verb}, and it is the same function: {words}"
        return WeightsComparison("function", dtype_names, max_ulp, tuple(found), how)
    for index, each in enumerate(found):
        if each.law is None:
            pair = Pair(each.name, one[each.name], two[each.name], held.get(each.name))
            found[index] = replace(
                each, law=_bias_of_one(each.name, *biases) or law_of(pair, each.heads, layers)
            )
    if packing is not None and any(
        each.law is None for each in found if each.name in packing.names
    ):
        found = _with_packing(found, packing)
    return WeightsComparison(kind, dtype_names, max_ulp, tuple(found), how)


def _packing_of(differences: list[TensorDifference], layers: Layers) -> PackingError | None:
    """Return the order of rows across q, k and v, if at least two of these tensors differ."""
    of_rows = [each for each in differences if each.name.removesuffix(".weight") in LETTERS]
    return find_packing_error(*layers) if len(of_rows) > 1 else None


def _with_packing(
    differences: list[TensorDifference], packing: PackingError
) -> list[TensorDifference]:
    """Return the differences, those of q, k and v explained by the order of their rows."""
    law = TensorLaw("packed", packing.words, "fused-qkv", fix=packing.fix)
    return [replace(each, law=law) if each.name in packing.names else each for each in differences]


def _bias_of_one(
    name: str, of_first: Collection[str], of_second: Collection[str]
) -> TensorLaw | None:
    """Return the relation of a bias that only one file has; in the other it was filled with
    zeros.
    """
    if name in of_first:
        return TensorLaw("bias", "missing, and nonzero in the first", "missing-bias")
    return (
        TensorLaw("bias", "a bias that the first does not have", "missing-bias")
        if name in of_second
        else None
    )


def _same_values(
    one: Weights, two: Weights, found: list[TensorDifference], max_ulp: float
) -> tuple[str, str]:
    """Return the kind of a comparison of equal or nearly equal weights, and its description."""
    dtypes = [next(iter(held.values())).dtype for held in (one, two)]
    names, coarse = [dtype.name for dtype in dtypes], coarser(*dtypes).name
    lost = any(
        bool(one[each.name].any()) != bool(two[each.name].any()) for each in found
    )  # a tensor became all zeros
    if not found:
        in_dtypes = f"in {' and in '.join(names)}"
        if names[0] == names[1]:
            in_dtypes = "except for signs of zeros, or zero biases of one"
        return "values", f"weights the same values, {in_dtypes}"
    if lost or max_ulp > MOST_ULPS:
        return "different", ""
    rounded = f"weights the same up to rounding in {coarse}: "
    apart = f"at most {max_ulp:.3g} units in the last place apart"
    if names[0] != names[1] and all(is_copy(one[name], two[name]) for name in one):
        which, fine = (
            ("first is the second", names[1])
            if coarse == names[0]
            else ("second is the first", names[0])
        )
        gone = sum(np.count_nonzero((one[name] == 0) != (two[name] == 0)) for name in one)
        zeros = f", {gone} elements to 0" if gone else ""
        return "copy", f"{rounded}the {which}, {fine} rounded to {coarse}, {apart}{zeros}"
    count, size = sum(each.differing for each in found), sum(x.size for x in one.values())
    return "rounding", f"{rounded}{apart}, in {count} of {size} elements"


def _difference(
    name: str, one: np.ndarray, two: np.ndarray, role: Role | None, spec: AttentionSpec
) -> TensorDifference | None:
    """Return where and by how much a tensor differs; None if its values are equal."""
    if np.array_equal(one, two):
        return None
    wide = [x.astype(np.float64) for x in (one, two)]
    errors, differs = np.abs(wide[0] - wide[1]), np.not_equal(*wide)
    heads, num_heads = (), 0
    if role is not None and role.heads != "shared":
        in_heads = role.view(differs, spec)
        num_heads = in_heads.shape[0] * in_heads.shape[1]
        heads = tuple(map(int, np.flatnonzero(in_heads.reshape(num_heads, -1).any(axis=1))))
    worst = np.unravel_index(int(errors.argmax()), errors.shape)
    return TensorDifference(
        name=name,
        shape=one.shape,
        differing=int(np.count_nonzero(differs)),
        rows=int(np.count_nonzero(differs.reshape(one.shape[0], -1).any(axis=1))),
        columns=int(np.count_nonzero(differs.any(axis=0))) if differs.ndim > 1 else None,
        heads=heads,
        num_heads=num_heads,
        worst_index=tuple(map(int, worst)),
        worst_values=(float(wide[0][worst]), float(wide[1][worst])),
        max_abs=float(errors[worst]),
        max_ulp=float(ulps(one, two).max()),
    )
