"""The order of rows in a packed tensor that was read in a wrong order: rows move between q, k and
v.

If a file packs q, k and v in one tensor, and a reader assumes another order, then the three tensors
together have the same rows, but none of them has its own. Each row is matched exactly, in time that
is linear in the size of the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
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
"""Columns that identify rows, if they differ there; the match is then checked on all columns."""

CHUNK = 1024
"""Rows that are compared at a time, so that memory holds few of them twice."""

MOST_RUNS = 6
"""Runs of rows in a message."""


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
        return [
            name
            for name, layout in LAYOUTS.items()
            if self._is_of(layout) and not broken_rules(spec, layout)[0]
        ]

    def _is_of(self, layout: Layout) -> bool:
        holds = {
            tensor.holds
            for tensor in layout.tensors
            if tensor.kind == "weight" and not tensor.is_shared
        }
        if (
            self.kind == "feature"
            or self.letters not in holds
            or layout.rope != "half"
            or layout.padded
        ):
            return False
        if self.kind == "grouped":
            return layout.grouped
        return not layout.grouped and layout.blocks == self.blocks


def find_packing_error(one: Weights, two: Weights, spec: AttentionSpec) -> PackingError | None:
    """Find the order in which the rows of q, k and v are exchanged across the tensors; None if they
    are not.

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
    order = _order_of_rows([one[name] for name in names], [two[name] for name in names])
    if order is None:
        return None
    biases = [f"{part}.bias" for part in parts]
    if all(name in one for name in biases):
        joined, others = (np.concatenate([held[name] for name in biases]) for held in (one, two))
        if np.array_equal(joined[order], others):
            names += biases
    sizes = {LETTERS[part]: len(one[f"{part}.weight"]) for part in parts}
    rows_of = and_listed(part for part in parts)
    together = f"{rows_of} together have the same rows in both files"
    found = _misread(order, sizes, spec)
    if found is None:
        words, fix = f"{together}, in another order: {_runs(order, sizes)}", ""
    else:
        packed, read = found
        words = (
            f"{together}: those of the first, packed as {packed.words}, were read as {read.words}"
        )
        fix = _fix(packed, read, spec)
    return PackingError(tuple(names), words, fix, _is_mixed(order, sizes))


def _is_mixed(order: np.ndarray, sizes: dict[str, int]) -> bool:
    """Return whether a tensor of the second file has rows of several tensors of the first."""
    ends = np.cumsum(list(sizes.values()))
    sources = np.split(np.searchsorted(ends, order, side="right"), ends[:-1])
    return any(len(set(each.tolist())) > 1 for each in sources)


def _fix(packed: _Packing, read: _Packing, spec: AttentionSpec) -> str:
    """Return how to read the tensor, if the first file is right, and if the second is."""
    first, second = (some_of(each.layouts(spec), 3) for each in (packed, read))
    fixes = [f"if the first is right, read the second as {first}" if first else ""]
    fixes.append(f"if the second is right, read the first as {second}" if second else "")
    return "; ".join(filter(None, fixes))


def _order_of_rows(one: Sequence[np.ndarray], two: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the order with rows_of_two[i] == rows_of_one[order[i]], of all tensors together; None
    if there is none.
    """
    dtype = coarser(one[0].dtype, two[0].dtype)
    before, after = (
        np.concatenate([x.astype(dtype, copy=False) for x in held]) for held in (one, two)
    )
    if before.shape != after.shape:
        return None
    for columns in (FEWEST_COLUMNS, before.shape[1]):
        keys, other_keys = (list(digests(rows[:, :columns])) for rows in (before, after))
        if len(set(keys)) < len(keys):
            continue  # rows that are equal in some columns may differ in all
        order = matched(keys, other_keys)
        if order is None:
            return None
        chunks = (slice(start, start + CHUNK) for start in range(0, len(order), CHUNK))
        if all(np.array_equal(before[order[chunk]], after[chunk]) for chunk in chunks):
            return order
        return None
    return None


# ---- Known orders --------------------------------------------------------------------------------


def _misread(
    order: np.ndarray, sizes: dict[str, int], spec: AttentionSpec
) -> tuple[_Packing, _Packing] | None:
    """Return the order in which rows are packed, and the order in which they were read, that
    explain another order.
    """
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
    """Yield orders of packed rows, usual ones first: each row's number in the order q, gate, k,
    v.
    """
    groups = spec.num_kv_heads
    ends = np.cumsum(list(sizes.values()))
    rows = {
        letter: np.arange(end - size, end)
        for (letter, size), end in zip(sizes.items(), ends, strict=True)
    }
    usual = "".join(letter for letter in "qgkv" if letter in rows)
    orders = ["".join(letters) for letters in itertools.permutations(usual)]
    counts = {letter: spec.num_heads // groups if letter in "qg" else 1 for letter in rows}
    for letters in orders:
        words = ", then all ".join(WORDS[letter] for letter in letters)
        yield (
            _Packing("whole", letters, 1, f"all {words}"),
            np.concatenate([rows[letter] for letter in letters]),
        )
    for letters in orders:
        each_group = " ".join(letter for letter in letters for _ in range(counts[letter]))
        words = (
            f"[{each_group}] for each {'head' if groups == spec.num_heads else 'key/value head'}"
        )
        yield _Packing("grouped", letters, 1, words), _in_blocks(rows, letters, groups)
    for blocks, letters in itertools.product(BLOCKS, orders):
        if groups % blocks == 0 and blocks < groups:
            words = (
                f"{blocks} blocks, each with its {', '.join(WORDS[letter] for letter in letters)}"
            )
            yield _Packing("blocks", letters, blocks, words), _in_blocks(rows, letters, blocks)
    if len(set(sizes.values())) == 1:
        for letters in orders:
            words = f"[{' '.join(letters)}] for each feature of a head"
            yield _Packing("feature", letters, 1, words), _in_blocks(rows, letters, sizes["q"])


def _in_blocks(rows: dict[str, np.ndarray], letters: str, blocks: int) -> np.ndarray:
    """Return the rows of all projections, divided into blocks, each with its share of every
    projection.
    """
    return np.concatenate([rows[letter].reshape(blocks, -1) for letter in letters], axis=1).reshape(
        -1
    )


def _runs(order: np.ndarray, sizes: dict[str, int]) -> str:
    """Describe an order by its runs: which rows of the second are which rows of the first."""
    ends = np.cumsum(list(sizes.values()))
    letters = list(sizes)
    starts = [0, *(index for index in range(1, len(order)) if _begins_run(index, order, ends))]

    def place(row: int) -> tuple[str, int]:
        index = int(np.searchsorted(ends, row, side="right"))
        return letters[index], row - (int(ends[index]) - sizes[letters[index]])

    runs: list[str] = []
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        letter, first = place(start)
        source, begin = place(int(order[start]))
        count = end - start
        runs.append(
            f"{_rows(letter, first, count)} of the second: {_rows(source, begin, count)} of the "
            f"first"
        )
    return some_of(runs, MOST_RUNS)


def _rows(letter: str, first: int, count: int) -> str:
    return (
        f"{letter} row {first}" if count == 1 else f"{letter} rows {first} to {first + count - 1}"
    )


def _begins_run(index: int, order: np.ndarray, ends: np.ndarray) -> bool:
    """Return whether a row does not continue the row before it, or begins a projection in either
    file.
    """
    return order[index] != order[index - 1] + 1 or index in ends or int(order[index]) in ends
