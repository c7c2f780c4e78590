"""Packed weights of q, k and v that are read in another order than they are packed: rows move
between the three.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.bugs.weights import rows_in_order
from parity.explain.diagnosis.fits.changes import part
from parity.measure.core.problem import Problem
from parity.measure.core.weights import QKV

RANKS = (2, 4, 8)
"""Numbers of ranks whose shares of q, k and v may be packed one after the other."""

USUAL_ORDERS = 3
"""Orders that are combined with all others."""

PACKED = tuple(f"{projection}.{leaf}" for projection in QKV for leaf in ("weight", "bias"))
"""Weights and biases that are packed alike."""

WORDS = {"q": "queries", "k": "keys", "v": "values"}


def packings(problem: Problem) -> Iterator[Edit]:
    """Yield orders in which the rows of q, k and v may be packed, and others in which they are
    read.
    """
    spec = problem.spec
    if not _has_rows_of_one_width(spec):
        return
    orders = list(_orders(spec))
    tried = {np.arange(_num_rows(spec)).tobytes()}
    pairs = sorted(permutations(range(len(orders)), 2), key=sum)
    for first, second in pairs:
        # Every program reads or writes one of the usual orders.
        if min(first, second) >= USUAL_ORDERS:
            continue
        packed, packed_rows = orders[first]
        read, read_rows = orders[second]
        rows = np.empty_like(packed_rows)
        rows[read_rows] = packed_rows
        if rows.tobytes() in tried:
            continue
        tried.add(rows.tobytes())
        about = f"a packed weight of {packed} is read as one of {read}"
        change = Edit(overrides=rows_in_order(rows, PACKED))
        yield part(problem, "packing", about, change, of.FUSED_QKV)


def _has_rows_of_one_width(spec: AttentionSpec) -> bool:
    """Return True if q, k and v may be one weight of equal heads."""
    return (
        spec.latent is None
        and not spec.shared_kv
        and spec.gate is None
        and spec.d_in == spec.d_kv
        and spec.value_head_dim == spec.head_dim
        and len(set(spec.qkv_biases)) == 1
    )


def _num_rows(spec: AttentionSpec) -> int:
    return spec.q_width + spec.k_width + spec.v_width


def _orders(spec: AttentionSpec) -> Iterator[tuple[str, np.ndarray]]:
    """Yield orders of packed rows by a description, usual ones first; row i of the packed weight is
    row order[i] of q, k and v.
    """
    num_heads, num_groups, size = spec.num_heads, spec.num_kv_heads, spec.head_dim
    counts = {"q": num_heads, "k": num_groups, "v": num_groups}
    rows: dict[str, np.ndarray] = {}
    end = 0
    for letter, count in counts.items():
        rows[letter] = end + np.arange(count * size).reshape(count, size)
        end += count * size
    owner = "key/value head"
    if num_heads == num_groups:
        owner = "head"
    letter_orders = ["".join(letters) for letters in permutations("qkv")]
    yield _whole("qkv"), _joined(rows, "qkv")
    yield _grouped("qkv", owner), _in_groups(rows, "qkv", num_groups)
    keys_and_values = _in_groups(rows, "kv", num_groups)
    queries = rows["q"].ravel()
    yield (
        f"all queries, then key and value for each {owner}",
        np.concatenate([queries, keys_and_values]),
    )
    yield (
        f"key and value for each {owner}, then all queries",
        np.concatenate([keys_and_values, queries]),
    )
    values_and_keys = _in_groups(rows, "vk", num_groups)
    yield (
        f"all queries, then value and key for each {owner}",
        np.concatenate([queries, values_and_keys]),
    )
    for letters in letter_orders[1:]:
        yield _whole(letters), _joined(rows, letters)
        yield _grouped(letters, owner), _in_groups(rows, letters, num_groups)
    for ranks in RANKS:
        if num_groups % ranks == 0 and ranks < num_groups:
            words = f"queries, keys and values for each of {ranks} ranks"
            yield words, _in_groups(rows, "qkv", ranks)
    if num_heads == num_groups:
        stacked = np.stack([rows["q"], rows["k"], rows["v"]])  # (3, N, H)
        for words, axes in (
            ("rows (N, H, 3)", (1, 2, 0)),
            ("rows (H, N, 3)", (2, 1, 0)),
            ("rows (H, 3, N)", (2, 0, 1)),
            ("rows (3, H, N)", (0, 2, 1)),
        ):
            yield words, stacked.transpose(axes).ravel()


def _whole(letters: str) -> str:
    return "all " + ", then all ".join([WORDS[letter] for letter in letters])


def _grouped(letters: str, owner: str) -> str:
    singular = {"q": "queries", "k": "key", "v": "value"}
    if owner == "head":
        singular["q"] = "query"
    words = [singular[letter] for letter in letters]
    return f"{words[0]}, {words[1]} and {words[2]} for each {owner}"


def _joined(rows: dict[str, np.ndarray], letters: str) -> np.ndarray:
    return np.concatenate([rows[letter].ravel() for letter in letters])


def _in_groups(rows: dict[str, np.ndarray], letters: str, count: int) -> np.ndarray:
    """Return the rows of some projections in groups, each with its share of every one."""
    shares = [rows[letter].reshape(count, -1) for letter in letters]
    return np.concatenate(shares, axis=1).ravel()
