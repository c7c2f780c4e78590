"""Rows of q, k and v that a packed tensor was read in a different order: they move between the
three.

If a file packs q, k and v in one tensor, and a reader assumes a different order, then the three
tensors together have the same rows, but none of them has its own. Each row is matched exactly, in
time that is linear in the size of the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.diagnosis.bugs.weights import MISREAD
from parity.explain.diagnosis.packed_rows import RowOrder, row_orders
from parity.explain.diagnosis.weights.roles import digests, matched
from parity.explain.diagnosis.weights.ulps import coarser
from parity.measure.core.weights import Weights
from parity.measure.text import and_listed, some_of
from parity.port.conversion.layouts import LAYOUTS, Layout
from parity.port.conversion.layouts.layout import broken_rules

LETTERS = {"q_proj": "q", "gate_proj": "g", "k_proj": "k", "v_proj": "v"}

FEWEST_COLUMNS = 64
"""Columns that are hashed first, because all take longer; a match is then checked on all columns.
The number is chosen: rows of trained weights differ in far fewer columns.
"""

CHUNK = 1024
"""Rows that are compared at a time, so that memory holds few of them twice."""

NAMED = {
    ("whole", "grouped"): "fused-qkv-read-per-head",
    ("grouped", "whole"): "fused-qkv-read-as-thirds",
}
"""Names of known bugs, by the kinds in which q, k and v are packed and read in this order."""

MOST_RUNS = 6
"""Runs of rows in a message, which has a limited length."""


@dataclass(frozen=True)
class PackingError:
    """Rows of q, k and v that are in a different order, across the tensors.

    Attributes:
        names: canonical names of the weights, and of their biases if these follow the same order.
        words: what happened: the order in which the rows are packed, and that in which they were
            read.
        order: for each row of the second file's tensors, one after the other, the row of the
            first's.
        fix: how to read either file in the order of the other one; empty if an order is unknown.
        bug: the name of the bug.
        is_mixed: whether a tensor has rows of several tensors, so that no relation of two tensors
            explains it.
    """

    names: tuple[str, ...]
    words: str
    order: np.ndarray = field(repr=False)
    fix: str = ""
    bug: str = MISREAD
    is_mixed: bool = True


def find_packing_error(one: Weights, two: Weights, spec: AttentionSpec) -> PackingError | None:
    """Find the order in which rows are exchanged across q, k and v; None if they are not.

    Every row must be matched, and no two rows may be equal.

    Args:
        one, two: canonical weights of both files.
        spec: the layer.
    """
    parts = [part for part in LETTERS if f"{part}.weight" in one]
    names = [f"{part}.weight" for part in parts]
    widths = {one[name].shape[1] for name in names}
    if len(parts) < 2 or len(widths) > 1:
        return None
    order = _order_of_rows(_joined(one, names), _joined(two, names))
    if order is None:
        return None
    biases = [f"{part}.bias" for part in parts]
    has_biases = {*biases} <= one.keys()
    if has_biases and np.array_equal(_joined(one, biases)[order], _joined(two, biases)):
        names += biases
    sizes = {LETTERS[part]: len(one[f"{part}.weight"]) for part in parts}
    words = f"{and_listed(parts)} together have the same rows in both files"
    misread = _misread(order, sizes, spec)
    fix = ""
    bug = MISREAD
    if misread is None:
        words += f", in a different order: {_runs(order, sizes)}"
    else:
        packed, read = misread
        words += f": the first file's, packed as {packed.words}, were read as {read.words}"
        fix = _fix(packed, read, spec)
        if packed.letters == read.letters == "qkv":
            bug = NAMED.get((packed.kind, read.kind), MISREAD)
    return PackingError(tuple(names), words, order, fix, bug, _is_mixed(order, sizes))


def _is_mixed(order: np.ndarray, sizes: dict[str, int]) -> bool:
    """Return whether a tensor of the second file has rows of several tensors of the first."""
    ends = np.cumsum(list(sizes.values()))
    # The tensor of the first file, by its position, that each row of the second comes from.
    sources = np.searchsorted(ends, order, side="right")
    for sources_of_tensor in np.split(sources, ends[:-1]):
        if len(np.unique(sources_of_tensor)) > 1:
            return True
    return False


def _fix(packed: RowOrder, read: RowOrder, spec: AttentionSpec) -> str:
    """Return how to read the tensor, if the first file is right, and if the second is."""
    fix_of_second = f"if the first is right, {_instruction('second', packed, spec)}"
    fix_of_first = f"if the second is right, {_instruction('first', read, spec)}"
    return f"{fix_of_second}; {fix_of_first}"


def _instruction(file: str, order: RowOrder, spec: AttentionSpec) -> str:
    """Return how to read a file that packs rows in an order: as a layout, if one has it."""
    layouts = _layouts_with(order, spec)
    if layouts:
        return f"read the {file} as {some_of(layouts, 3)}"
    return f"split the rows of the {file} as {order.words}"


def _layouts_with(order: RowOrder, spec: AttentionSpec) -> list[str]:
    """Return the layouts that pack the rows of a layer in an order."""
    names = []
    for name, layout in LAYOUTS.items():
        if _packs_in(layout, order) and not broken_rules(spec, layout)[0]:
            names.append(name)
    return names


def _packs_in(layout: Layout, order: RowOrder) -> bool:
    # Other pairs of RoPE or padding would change the rows in addition to their order.
    if layout.rope != "half" or layout.padded:
        return False
    weights = [tensor for tensor in layout.tensors if tensor.kind == "weight"]
    packed = [tensor for tensor in weights if not tensor.is_shared]
    if order.letters not in [tensor.holds for tensor in packed]:
        return False
    if order.kind == "grouped":
        return layout.grouped
    is_in_blocks = order.kind in ("whole", "blocks")
    return is_in_blocks and not layout.grouped and layout.blocks == order.blocks


def _joined(weights: Weights, names: Iterable[str]) -> np.ndarray:
    """Return the rows of several weights."""
    return np.concatenate([weights[name] for name in names])


def _order_of_rows(one: np.ndarray, two: np.ndarray) -> np.ndarray | None:
    """Return the order with two[i] == one[order[i]], in the coarser of their dtypes.

    None means that there is none, or more than one because rows are equal.
    """
    dtype = coarser(one.dtype, two.dtype)
    before, after = one.astype(dtype, copy=False), two.astype(dtype, copy=False)
    if before.shape != after.shape:
        return None
    for columns in (FEWEST_COLUMNS, before.shape[1]):
        keys = list(digests(before[:, :columns]))
        if len(set(keys)) < len(keys):
            continue  # rows that are equal in some columns may differ in all
        order = matched(keys, list(digests(after[:, :columns])))
        if order is None or not _is_order(order, before, after):
            return None
        return order
    return None


def _is_order(order: np.ndarray, before: np.ndarray, after: np.ndarray) -> bool:
    """Return whether the rows after are those before in an order, on all columns."""
    for start in range(0, len(order), CHUNK):
        chunk = slice(start, start + CHUNK)
        if not np.array_equal(before[order[chunk]], after[chunk]):
            return False
    return True


# ---- Known orders --------------------------------------------------------------------------------


def _misread(
    order: np.ndarray, sizes: dict[str, int], spec: AttentionSpec
) -> tuple[RowOrder, RowOrder] | None:
    """Return the order in which rows are packed, and that in which they were read, if known."""
    known = [*row_orders(sizes, spec)]
    by_rows: dict[bytes, RowOrder] = {}
    for packed in known:
        by_rows.setdefault(packed.rows.tobytes(), packed)
    # A reader takes row rows[i] of a projection from position i; so the packed rows are the rows of
    # the first in that order.
    for read in known:
        packed = by_rows.get(order[read.rows].tobytes())
        if packed is not None:
            return packed, read
    return None


def _runs(order: np.ndarray, sizes: dict[str, int]) -> str:
    """Describe an order by its runs: which rows of the second are which rows of the first."""
    ends = np.cumsum(list(sizes.values()))
    starts = [0]
    for index in range(1, len(order)):
        if _begins_run(index, order, ends):
            starts.append(index)
    runs: list[str] = []
    for start, end in itertools.pairwise([*starts, len(order)]):
        of_second = _rows(start, end - start, sizes)
        of_first = _rows(int(order[start]), end - start, sizes)
        runs.append(f"{of_second} of the second: {of_first} of the first")
    return some_of(runs, MOST_RUNS)


def _rows(row: int, count: int, sizes: dict[str, int]) -> str:
    """Describe rows of one projection, of which the first has a number among all projections."""
    for letter, size in sizes.items():
        if row < size:
            if count == 1:
                return f"{letter} row {row}"
            return f"{letter} rows {row} to {row + count - 1}"
        row -= size
    raise IndexError(row)


def _begins_run(index: int, order: np.ndarray, ends: np.ndarray) -> bool:
    """Return whether a row does not continue the row before it, or begins a projection in either
    file.
    """
    return order[index] != order[index - 1] + 1 or index in ends or int(order[index]) in ends
