"""Attention block by block as a part of a layer: every bug, with blocks of every size."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.blocks import (
    OF_CAUSAL,
    OF_KEYS,
    OF_PADDING,
    SIZES,
    BlockBug,
    in_blocks,
    weights_in_blocks,
)
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.fits.changes import part
from parity.measure.core.problem import Problem

EditOf = Callable[[BlockBug, int, int], Edit]
"""Returns the edit of a bug, for a number of queries and of keys in a block."""


def blocks(problem: Problem, quantity: str) -> Iterator[Edit]:
    """Yield the bugs of a kernel that attends block by block.

    Args:
        problem: with the case.
        quantity: quantity of the stage; attention weights are those that the kernel returns.
    """
    case = problem.case
    if case.is_cached or quantity not in ("attn_weights", "context", "output"):
        return
    edit_of = in_blocks
    if quantity == "attn_weights":
        edit_of = weights_in_blocks
    key_sizes = [size for size in SIZES if size < case.key_len]
    row_sizes = [size for size in SIZES if size < case.seq_len]
    of_keys = list(OF_KEYS)
    if case.key_padding_lengths is not None:
        of_keys += OF_PADDING
    for block_bug in of_keys:
        for size in key_sizes:
            yield _part(problem, edit_of, block_bug, case.seq_len, size)
    if not case.is_causal:
        return
    for block_bug in OF_CAUSAL:
        for key_size in key_sizes:
            for row_size in row_sizes:
                yield _part(problem, edit_of, block_bug, row_size, key_size)


def _part(problem: Problem, edit_of: EditOf, block_bug: BlockBug, rows: int, keys: int) -> Edit:
    sizes = f"in blocks of {keys} keys"
    if block_bug.causal is not None:
        sizes = f"in blocks of {rows} queries and {keys} keys"
    words = f"{sizes}, {block_bug.words}"
    return part(problem, "blocks", words, edit_of(block_bug, rows, keys), of.BLOCKS)
