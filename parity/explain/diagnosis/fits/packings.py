"""Packed weights of q, k and v that are read in a different order than they are packed in: rows
move between the three.
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
from parity.explain.diagnosis.packed_rows import RowOrder, row_orders
from parity.measure.core.problem import Problem
from parity.measure.core.weights import QKV

USUAL_ORDERS = 3
"""Orders that are combined with all others."""

PACKED = tuple(f"{projection}.{leaf}" for projection in QKV for leaf in ("weight", "bias"))
"""Weights and biases that are packed alike."""


def packings(problem: Problem) -> Iterator[Edit]:
    """Yield orders in which the rows of q, k and v may be packed, and others in which they are
    read.
    """
    spec = problem.spec
    if not _has_rows_of_one_width(spec):
        return
    sizes = {"q": spec.q_width, "k": spec.k_width, "v": spec.v_width}
    orders = [order for order in row_orders(sizes, spec) if _is_tried(order)]
    tried = {np.arange(sum(sizes.values())).tobytes()}
    pairs = sorted(permutations(range(len(orders)), 2), key=sum)
    for first, second in pairs:
        # Every program reads or writes one of the usual orders.
        if min(first, second) >= USUAL_ORDERS:
            continue
        packed = orders[first]
        read = orders[second]
        rows = np.empty_like(packed.rows)
        rows[read.rows] = packed.rows
        if rows.tobytes() in tried:
            continue
        tried.add(rows.tobytes())
        about = f"a packed weight of {packed.words} is read as one of {read.words}"
        change = Edit(overrides=rows_in_order(rows, PACKED))
        yield part(problem, "packing", about, change, of.FUSED_QKV)


def _is_tried(order: RowOrder) -> bool:
    """Return True if an order is tried. There are many orders of blocks and of features, and each
    pair needs a layer, so only those with q, k and v in this order are.
    """
    return order.kind not in ("blocks", "feature") or order.letters == "qkv"


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
