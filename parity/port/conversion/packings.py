"""Rows of q, k and v that a packed tensor was read in another order: they move between the three.

If a file packs q, k and v in one tensor, and a reader assumes another order, then the three tensors
together have the same rows, but none of them has its own. Each row is matched exactly, in time that
is linear in the size of the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from mha_spec import AttentionSpec
from parity.measure.core.weights import Weights
from parity.measure.text import and_listed, some_of
from parity.port.conversion.layouts import LAYOUTS, Layout
from parity.port.conversion.layouts.layout import broken_rules
from parity.port.conversion.roles import digests, matched
from parity.port.conversion.ulps import coarser

LETTERS = {"q_proj": "q", "gate_proj": "g", "k_proj": "k", "v_proj": "v"}
WORDS = {"q": "queries", "g": "gates", "k": "keys", "v": "values"}

BLOCKS = (2, 4, 8)
"""Numbers of blocks in which known programs divide packed rows."""

FEWEST_COLUMNS = 64
"""Columns that are hashed first, because all take longer; a match is then checked on all columns.
The number is chosen: rows of trained weights differ in far fewer columns.
"""

CHUNK = 1024
"""Rows that are compared at a time, so that memory holds few of them twice."""

MOST_RUNS = 6
"""Runs of rows in a message, which has a limited length."""


@dataclass(frozen=True)
class PackingError:
    """Rows of q, k and v that are in another order, across the tensors.

    Attributes:
        names: canonical names of the weights, and of their biases if these follow the same order.
        words: what happened: the order in which the rows are packed, and that in which they were
            read.
        fix: the layouts with these orders; empty if none is known.
        is_mixed: whether a tensor has rows of several tensors, so that no relation of two tensors
            explains it.
    """

    names: tuple[str, ...]
    words: str
    fix: str = ""
    is_mixed: bool = True


@dataclass(frozen=True)
class _Packing:
    """An order of the rows of q, k and v (and a gate) in one tensor.

    Attributes:
        kind: `whole`, all heads of one projection, then of the next; `grouped`, all projections of
            a group, then of the next group; `blocks`; or `feature`, all projections of one feature,
            then of the next feature.
        letters: the order of the projections.
        blocks: number of blocks.
        words: description.
    """

    kind: str
    letters: str
    blocks: int
    words: str

    def layouts(self, spec: AttentionSpec) -> list[str]:
        """Return the layouts that pack the rows of a layer in this order."""
        names = []
        for name, layout in LAYOUTS.items():
            if self._is_of(layout) and not broken_rules(spec, layout)[0]:
                names.append(name)
        return names

    def _is_of(self, layout: Layout) -> bool:
        # Other pairs of RoPE or padding would change the rows in addition to their order.
        if self.kind == "feature" or layout.rope != "half" or layout.padded:
            return False
        weights = [tensor for tensor in layout.tensors if tensor.kind == "weight"]
        packed = [tensor for tensor in weights if not tensor.is_shared]
        if self.letters not in [tensor.holds for tensor in packed]:
            return False
        if self.kind == "grouped":
            return layout.grouped
        return not layout.grouped and layout.blocks == self.blocks


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
    if misread is None:
        words += f", in another order: {_runs(order, sizes)}"
    else:
        packed, read = misread
        words += f": those of the first, packed as {packed.words}, were read as {read.words}"
        fix = _fix(packed, read, spec)
    return PackingError(tuple(names), words, fix, _is_mixed(order, sizes))


def _is_mixed(order: np.ndarray, sizes: dict[str, int]) -> bool:
    """Return whether a tensor of the second file has rows of several tensors of the first."""
    ends = np.cumsum(list(sizes.values()))
    # The tensor of the first file, by its place, that each row of the second comes from.
    sources = np.searchsorted(ends, order, side="right")
    for sources_of_tensor in np.split(sources, ends[:-1]):
        if len(np.unique(sources_of_tensor)) > 1:
            return True
    return False


def _fix(packed: _Packing, read: _Packing, spec: AttentionSpec) -> str:
    """Return how to read the tensor, if the first file is right, and if the second is."""
    # Three names suffice: the layouts pack rows in the same order.
    first = some_of(packed.layouts(spec), most=3)
    second = some_of(read.layouts(spec), most=3)
    fixes = []
    if first:
        fixes.append(f"if the first is right, read the second as {first}")
    if second:
        fixes.append(f"if the second is right, read the first as {second}")
    return "; ".join(fixes)


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
) -> tuple[_Packing, _Packing] | None:
    """Return the order in which rows are packed, and that in which they were read, if known."""
    known = [*_packings(sizes, spec)]
    by_rows: dict[bytes, _Packing] = {}
    for packing, rows in known:
        by_rows.setdefault(rows.tobytes(), packing)
    # A reader takes row rows[i] of a projection from place i; so the packed rows are those of the
    # first in that order.
    for read, rows in known:
        packed = by_rows.get(order[rows].tobytes())
        if packed is not None:
            return packed, read
    return None


def _packings(sizes: dict[str, int], spec: AttentionSpec) -> Iterator[tuple[_Packing, np.ndarray]]:
    """Yield orders of packed rows, usual ones first.

    Each has the number of every packed row in the order q, gate, k, v.
    """
    rows: dict[str, np.ndarray] = {}
    end = 0
    for letter, size in sizes.items():
        rows[letter] = np.arange(end, end + size)
        end += size
    usual = [letter for letter in "qgkv" if letter in rows]
    orders = ["".join(letters) for letters in itertools.permutations(usual)]
    for letters in orders:
        words = ", then all ".join(WORDS[letter] for letter in letters)
        whole = np.concatenate([rows[letter] for letter in letters])
        yield _Packing("whole", letters, 1, f"all {words}"), whole
    num_groups = spec.num_kv_heads
    owner = "head" if num_groups == spec.num_heads else "key/value head"
    for letters in orders:
        heads = []
        for letter in letters:
            count = spec.num_heads // num_groups if letter in "qg" else 1
            heads += [letter] * count
        words = f"[{' '.join(heads)}] for each {owner}"
        yield _Packing("grouped", letters, 1, words), _in_blocks(rows, letters, num_groups)
    for blocks, letters in itertools.product(BLOCKS, orders):
        # Blocks of one key/value head each are groups.
        if num_groups % blocks == 0 and blocks < num_groups:
            shares = ", ".join(WORDS[letter] for letter in letters)
            words = f"{blocks} blocks, each with its {shares}"
            yield _Packing("blocks", letters, blocks, words), _in_blocks(rows, letters, blocks)
    if len(set(sizes.values())) == 1:
        for letters in orders:
            words = f"[{' '.join(letters)}] for each feature of a head"
            yield _Packing("feature", letters, 1, words), _in_blocks(rows, letters, sizes["q"])


def _in_blocks(rows: dict[str, np.ndarray], letters: str, blocks: int) -> np.ndarray:
    """Return the rows of all projections in blocks, each with its share of every projection."""
    shares = [rows[letter].reshape(blocks, -1) for letter in letters]
    return np.concatenate(shares, axis=1).reshape(-1)


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
