"""Bugs of attention block by block, as in FlashAttention: the running maximum and sum, the blocks
that are visited, and their masks.

A kernel visits blocks of keys for each block of queries. It keeps the highest score so far, and
rescales its sums whenever that rises. Each bug here is one wrong line of that loop. It is
described by the weights with which the kernel adds up values, which need not sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs.families import BLOCKS
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values

SIZES = (2, 3, 4, 5, 6, 8, 16, 32, 64, 128, 256)
"""Block sizes that are tried: the sizes of kernels, and of small tests."""

NAMED_SIZE = 4
"""The block size of bugs that have names of their own."""

SAME = 1e-5
"""The largest difference of attention weights that are equal up to rounding."""

Indices = np.ndarray


def same(factor: np.ndarray) -> np.ndarray:
    """Return the factor unchanged."""
    return factor


def one(factor: np.ndarray) -> np.ndarray:
    """Return 1: nothing is rescaled."""
    return np.ones_like(factor)


def zero(factor: np.ndarray) -> np.ndarray:
    """Return 0: earlier blocks are forgotten."""
    return np.zeros_like(factor)


def inverse(factor: np.ndarray) -> np.ndarray:
    """Return the inverse of a factor; 1 if it is 0, as before the first visible key."""
    return np.where(factor > 0.0, 1.0 / np.where(factor > 0.0, factor, 1.0), 1.0)


def every_block(length: int, size: int) -> Iterator[Indices]:
    """Yield the indices of each block, the last of which may be shorter."""
    for begin in range(0, length, size):
        yield np.arange(begin, min(begin + size, length))


def whole_blocks(length: int, size: int) -> Iterator[Indices]:
    """Yield the blocks without a shorter one at the end."""
    for begin in range(0, length - size + 1, size):
        yield np.arange(begin, begin + size)


def all_but_last(length: int, size: int) -> Iterator[Indices]:
    """Yield the blocks without the last."""
    yield from list(every_block(length, size))[:-1]


def all_but_first(length: int, size: int) -> Iterator[Indices]:
    """Yield the blocks without the first."""
    yield from list(every_block(length, size))[1:]


def overlapping(length: int, size: int) -> Iterator[Indices]:
    """Yield blocks that begin with the last key of the block before."""
    for begin in range(0, length, size):
        yield np.arange(max(begin - 1, 0), min(begin + size, length))


def with_gaps(length: int, size: int) -> Iterator[Indices]:
    """Yield blocks without their last key, unless that is the last of all."""
    for block in every_block(length, size):
        is_last = block[-1] == length - 1
        yield block if is_last else block[:-1]


@dataclass(frozen=True)
class CausalBlock:
    """The causal mask of a block, as the rest of the mask is combined with it.

    Attributes:
        rows, keys: indices of queries and keys.
    """

    rows: Indices
    keys: Indices

    def right(self) -> np.ndarray:
        return self.keys > self.rows[:, None]

    def by_whole_blocks(self) -> np.ndarray:
        """Hide only blocks in which every key is later than every query."""
        return np.broadcast_to(self.keys[0] > self.rows[-1], (len(self.rows), len(self.keys)))

    def without_diagonal(self) -> np.ndarray:
        """Hide every block that is not wholly before its queries."""
        is_past = self.keys[-1] <= self.rows[0]
        return np.broadcast_to(not is_past, (len(self.rows), len(self.keys)))

    def by_local_indices(self) -> np.ndarray:
        """Mask each visited block as if it were on the diagonal."""
        local = (self.keys - self.keys[0]) > (self.rows - self.rows[0])[:, None]
        return local | self.by_whole_blocks()

    def by_local_keys(self) -> np.ndarray:
        """Count keys from the beginning of their block."""
        return (self.keys - self.keys[0] > self.rows[:, None]) | self.by_whole_blocks()

    def by_local_rows(self) -> np.ndarray:
        """Count queries from the beginning of their block."""
        return self.keys > (self.rows - self.rows[0])[:, None]


@dataclass(frozen=True)
class BlockBug:
    """A wrong line in the loop over blocks.

    Attributes:
        words: a description, with placeholders for the numbers of `rows` and `keys` of a block.
        of_sum: changes the factor by which the running sum is rescaled.
        of_values: changes the factor by which the weighted values are rescaled.
        key_blocks: the visited blocks of keys.
        causal: the causal mask of a block; None if it is right.
        has_local_padding: True if lengths are compared with indices within a block.
    """

    words: str
    of_sum: Callable[[np.ndarray], np.ndarray] = same
    of_values: Callable[[np.ndarray], np.ndarray] = same
    key_blocks: Callable[[int, int], Iterator[Indices]] = every_block
    causal: Callable[[CausalBlock], np.ndarray] | None = None
    has_local_padding: bool = False


SUM_NOT_RESCALED = BlockBug(
    "the sum is not rescaled when a later block has a higher score", of_sum=one
)
VALUES_NOT_RESCALED = BlockBug(
    "the values are not rescaled when a later block has a higher score", of_values=one
)
LAST_LEFT_OUT = BlockBug("the last block of keys is left out", key_blocks=all_but_last)
OVERLAPPING = BlockBug(
    "blocks of keys overlap by one key, which counts twice", key_blocks=overlapping
)

OF_KEYS = (
    SUM_NOT_RESCALED,
    VALUES_NOT_RESCALED,
    BlockBug(
        "nothing is rescaled when a later block has a higher score", of_sum=one, of_values=one
    ),
    BlockBug(
        "earlier blocks are rescaled by the inverse factor", of_sum=inverse, of_values=inverse
    ),
    BlockBug(
        "the highest score is not kept, so only the last block counts", of_sum=zero, of_values=zero
    ),
    BlockBug("the shorter last block of keys is left out", key_blocks=whole_blocks),
    LAST_LEFT_OUT,
    BlockBug("the first block of keys is left out", key_blocks=all_but_first),
    OVERLAPPING,
    BlockBug("the last key of each block is left out", key_blocks=with_gaps),
)
"""Mistakes for which the blocks of queries do not matter."""

OF_CAUSAL = (
    BlockBug(
        "blocks on the diagonal are not masked: only whole later blocks are hidden",
        causal=CausalBlock.by_whole_blocks,
    ),
    BlockBug("blocks on the diagonal are left out", causal=CausalBlock.without_diagonal),
    BlockBug(
        "every block is masked as if it were on the diagonal", causal=CausalBlock.by_local_indices
    ),
    BlockBug(
        "the causal mask counts keys from the beginning of their block",
        causal=CausalBlock.by_local_keys,
    ),
    BlockBug(
        "the causal mask counts queries from the beginning of their block",
        causal=CausalBlock.by_local_rows,
    ),
)

OF_PADDING = (
    BlockBug("lengths are counted from the beginning of each block", has_local_padding=True),
)


def blocks(case: Case) -> Iterator[Edit]:
    """Yield the bugs of a kernel with blocks of `NAMED_SIZE` keys."""
    if case.is_cached or case.not_finite or case.spec.sinks or _visible_keys(case) <= NAMED_SIZE:
        return
    bug = BLOCKS.shown_in("context", "module.output")
    for name, block_bug in (
        ("sum-not-rescaled", SUM_NOT_RESCALED),
        ("values-not-rescaled", VALUES_NOT_RESCALED),
        ("last-left-out", LAST_LEFT_OUT),
        ("overlapping", OVERLAPPING),
    ):
        change = in_blocks(block_bug, NAMED_SIZE, NAMED_SIZE)
        about = f"in blocks of {NAMED_SIZE} keys, {block_bug.words}"
        yield bug(f"blocks-{name}", about, change.overrides)


def _visible_keys(case: Case) -> int:
    """Return the number of keys up to the last that any query attends to."""
    count = case.key_len
    if case.is_causal or case.window_size is not None:
        count = min(count, case.seq_len)
    if case.key_padding_lengths is not None:
        count = min(count, max(case.key_padding_lengths))
    return count


def in_blocks(block_bug: BlockBug, rows: int, keys: int) -> Edit:
    """Return the edit that computes the context in blocks, with a bug."""

    def weighed(layer: Layer, original: Override, values: Values) -> Any:
        return original(
            {**values, "attn_weights": kernel_weights(layer, values, block_bug, rows, keys)}
        )

    return Edit(overrides={"weighed": weighed})


def weights_in_blocks(block_bug: BlockBug, rows: int, keys: int) -> Edit:
    """Return the edit that computes attention weights in blocks, with a bug."""

    def attn_weights(layer: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        return {"attn_weights": kernel_weights(layer, values, block_bug, rows, keys)}

    return Edit(overrides={"attn_weights": attn_weights})


def kernel_weights(
    layer: Layer, values: Values, block_bug: BlockBug, row_size: int, key_size: int
) -> np.ndarray:
    """Return the weights with which a kernel adds up values, (B, N, T, S).

    Raises:
        ValueError: if the bug changes nothing, because no block is cut or rescaled.
    """
    a, case = layer.arithmetic, layer.problem.case
    scores = a.widen(values["scores"])
    hidden = np.broadcast_to(values["mask"], scores.shape)
    if block_bug.causal is not None:
        hidden = np.broadcast_to(_without_causality(layer), scores.shape)
    if block_bug.has_local_padding:
        hidden = np.broadcast_to(_without_padding(layer), scores.shape)
    weights = np.zeros_like(scores)
    for rows in every_block(scores.shape[2], row_size):
        highest, total = _beginning(layer, scores, len(rows))
        of_rows = np.zeros_like(scores[:, :, rows])
        for keys in block_bug.key_blocks(scores.shape[3], key_size):
            is_hidden = hidden[:, :, rows][..., keys]
            if block_bug.causal is not None:
                is_hidden = is_hidden | block_bug.causal(CausalBlock(rows, keys))
            if block_bug.has_local_padding and case.key_padding_lengths is not None:
                lengths = np.array(case.key_padding_lengths)[:, None, None, None]
                is_hidden = is_hidden | layer.is_padding(keys - keys[0], lengths)
            visible = np.where(is_hidden, -np.inf, scores[:, :, rows][..., keys])
            higher = np.maximum(highest, visible.max(axis=-1, keepdims=True, initial=-np.inf))
            finite = np.where(np.isfinite(higher), higher, 0.0).astype(scores.dtype)
            exponentials = np.exp(visible - finite)
            factor = np.exp(highest - finite)
            total = block_bug.of_sum(factor) * total + exponentials.sum(axis=-1, keepdims=True)
            of_rows = block_bug.of_values(factor) * of_rows
            of_rows[..., keys] += exponentials
            highest = higher
        weights[:, :, rows] = of_rows / np.where(total == 0.0, 1.0, total)
    right = Layer.attn_weights(layer, values)["attn_weights"]
    if np.allclose(weights, a.widen(right), rtol=0.0, atol=SAME, equal_nan=True):
        raise ValueError("the bug does not show in these blocks")
    return a.keep(weights)


def _beginning(layer: Layer, scores: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the highest score and the sum before the first block: the sink's, if any."""
    shape = (*scores.shape[:2], rows, 1)
    sinks = layer.sinks()
    if sinks is None:
        return np.full(shape, -np.inf, scores.dtype), np.zeros(shape, scores.dtype)
    return np.broadcast_to(sinks, shape).astype(scores.dtype), np.ones(shape, scores.dtype)


def _without_causality(layer: Any) -> np.ndarray:
    """Return the mask of everything but causality."""
    with layer.overriding(is_later=_hides_nothing):
        return layer.mask({})["mask"]


def _without_padding(layer: Any) -> np.ndarray:
    """Return the mask of everything but padding."""
    with layer.overriding(is_padding=_hides_nothing):
        return layer.mask({})["mask"]


def _hides_nothing(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.zeros(np.broadcast_shapes(first.shape, second.shape), bool)
