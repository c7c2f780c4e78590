"""Orders in which the rows of queries, keys and values (and a gate) may be packed in one weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product

import numpy as np

from mha_spec import AttentionSpec

WORDS = {"q": "queries", "g": "gates", "k": "keys", "v": "values"}

BLOCKS = (2, 4, 8)
"""Numbers of blocks, such as ranks, in which known programs divide packed rows."""


@dataclass(frozen=True)
class RowOrder:
    """An order of the rows of q, k and v (and a gate) in one weight.

    Attributes:
        kind: `whole`, all heads of one projection, then of the next; `grouped`, all projections of
            a group, then of the next group; `partly`, keys and values by group, and queries whole;
            `blocks`; `feature`, all projections of one feature, then of the next feature; or
            `axes`, a different order of the axes of heads, features and projections.
        letters: the order of the projections.
        words: a description.
        rows: for each packed row its number among the rows of the projections, one after the other.
        blocks: the number of blocks.
    """

    kind: str
    letters: str
    words: str
    rows: np.ndarray = field(repr=False)
    blocks: int = 1


def row_orders(sizes: Mapping[str, int], spec: AttentionSpec) -> Iterator[RowOrder]:
    """Yield orders of packed rows, usual ones first.

    Args:
        sizes: the numbers of rows of q, a gate (g), k and v by letter, in the order in which the
            rows are numbered.
        spec: specification of the layer.
    """
    rows: dict[str, np.ndarray] = {}
    end = 0
    for letter, size in sizes.items():
        rows[letter] = np.arange(end, end + size)
        end += size
    usual, *others = _orders_of_letters(rows)
    yield _whole(rows, usual)
    yield _grouped(rows, usual, spec)
    if usual in ("qkv", "qgkv"):
        yield from _partly_grouped(rows, usual.removesuffix("kv"), spec)
    for letters in others:
        yield _whole(rows, letters)
        yield _grouped(rows, letters, spec)
    for blocks, letters in product(BLOCKS, [usual, *others]):
        # Blocks of one key/value head each are groups.
        if spec.num_kv_heads % blocks == 0 and blocks < spec.num_kv_heads:
            shares = ", ".join([WORDS[letter] for letter in letters])
            words = f"{blocks} blocks, each with its {shares}"
            yield RowOrder("blocks", letters, words, _in_blocks(rows, letters, blocks), blocks)
    if len(set(sizes.values())) > 1:
        return
    for letters in [usual, *others]:
        words = f"[{' '.join(letters)}] for each feature of a head"
        yield RowOrder("feature", letters, words, _in_blocks(rows, letters, sizes["q"]))
    if usual == "qkv":
        stacked = np.stack([rows[letter].reshape(spec.num_heads, -1) for letter in usual])
        for words, axes in (
            ("rows (H, N, 3)", (2, 1, 0)),
            ("rows (H, 3, N)", (2, 0, 1)),
            ("rows (3, H, N)", (0, 2, 1)),
        ):
            yield RowOrder("axes", usual, words, stacked.transpose(axes).ravel())


def _orders_of_letters(rows: Mapping[str, np.ndarray]) -> list[str]:
    """Return the orders of the projections, the usual one first."""
    usual = [letter for letter in "qgkv" if letter in rows]
    return ["".join(letters) for letters in permutations(usual)]


def _whole(rows: Mapping[str, np.ndarray], letters: str) -> RowOrder:
    in_order = np.concatenate([rows[letter] for letter in letters])
    return RowOrder("whole", letters, _words_of_whole(letters), in_order)


def _words_of_whole(letters: Sequence[str]) -> str:
    return "all " + ", then all ".join([WORDS[letter] for letter in letters])


def _grouped(rows: Mapping[str, np.ndarray], letters: str, spec: AttentionSpec) -> RowOrder:
    in_order = _in_blocks(rows, letters, spec.num_kv_heads)
    return RowOrder("grouped", letters, _words_of_groups(letters, spec), in_order)


def _words_of_groups(letters: str, spec: AttentionSpec) -> str:
    """Return the heads of a group: `[q q k v] for each key/value head`."""
    owner = "key/value head"
    if spec.num_kv_heads == spec.num_heads:
        owner = "head"
    heads: list[str] = []
    for letter in letters:
        count = 1
        if letter in "qg":
            count = spec.num_heads // spec.num_kv_heads
        heads += [letter] * count
    return f"[{' '.join(heads)}] for each {owner}"


def _partly_grouped(
    rows: Mapping[str, np.ndarray], whole: str, spec: AttentionSpec
) -> Iterator[RowOrder]:
    """Yield orders with keys and values by group, after other projections or before them."""
    others = np.concatenate([rows[letter] for letter in whole])
    words = _words_of_whole(whole)
    keys_and_values = _in_blocks(rows, "kv", spec.num_kv_heads)
    of_groups = _words_of_groups("kv", spec)
    after = np.concatenate([others, keys_and_values])
    yield RowOrder("partly", f"{whole}kv", f"{words}, then {of_groups}", after)
    before = np.concatenate([keys_and_values, others])
    yield RowOrder("partly", f"kv{whole}", f"{of_groups}, then {words}", before)
    values_and_keys = np.concatenate([others, _in_blocks(rows, "vk", spec.num_kv_heads)])
    of_groups = _words_of_groups("vk", spec)
    yield RowOrder("partly", f"{whole}vk", f"{words}, then {of_groups}", values_and_keys)


def _in_blocks(rows: Mapping[str, np.ndarray], letters: str, blocks: int) -> np.ndarray:
    """Return the rows of projections in blocks, each with its share of every projection."""
    shares = [rows[letter].reshape(blocks, -1) for letter in letters]
    return np.concatenate(shares, axis=1).ravel()
