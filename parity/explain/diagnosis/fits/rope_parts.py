"""Parts of RoPE: pairs and tables of different layouts, the order of rotated features, frequencies
that follow a different rule, and the positions of single heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np

from mha_spec import Rope
from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.families import BugFamily
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.bugs.sites import turned
from parity.explain.diagnosis.fits.changes import MOST_HEADS, part
from parity.measure.core.problem import Problem
from parity.measure.core.reference import Layer
from parity.measure.core.reference.rope import frequencies, pair_slices

Turn = Callable[[Layer, np.ndarray, np.ndarray], np.ndarray]

USUAL_LAYOUTS = 4
"""Layouts of pairs that are combined with each other: the layer's own, then usual ones."""

WHOSE = {"qk": "queries and keys", "q": "queries", "k": "keys"}


def rope_parts(problem: Problem) -> Iterator[Edit]:
    """Yield other rotations of queries, of keys, and of both."""
    spec, rope = problem.spec, problem.spec.rope
    if rope is None or spec.latent is not None or rope.sections is not None:
        return
    for names, whose in WHOSE.items():
        yield from _of_layouts(problem, rope, names, whose)
        yield from _of_order(problem, rope, names, whose)
        words = f"{whose} are rotated by the position of the token before"
        yield _rotation(problem, names, words, _by_rolled_positions, of.POSITIONS)
    yield from _of_mixed_layouts(problem, rope)
    if rope.scaling is None:
        yield from _of_frequencies(problem)
    if not rope.depends_on_length:
        yield from _of_heads(problem, "q", spec.num_heads)
        yield from _of_heads(problem, "k", spec.num_kv_heads)


def _rotation(problem: Problem, names: str, words: str, turn: Turn, family: BugFamily) -> Edit:
    """Return the edit that rotates queries, keys or both differently."""
    return part(problem, "rotation", words, Edit(overrides=turned(names, turn)), family)


# ---- Layouts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """The features of each rotated pair of a head.

    Attributes:
        words: a description.
        first, second: the features of the pairs, in the order of their frequencies, (pairs,).
    """

    words: str
    first: np.ndarray
    second: np.ndarray

    def is_same(self, other: _Layout) -> bool:
        """Return True if the pairs are in a different layout."""
        return np.array_equal(self.first, other.first) and np.array_equal(self.second, other.second)


def _layouts(rope: Rope, size: int) -> list[_Layout]:
    """Return the layout of the layer, then others of as many pairs, usual ones first."""
    first, second = pair_slices(rope, size)
    features = np.arange(size)
    # Proportional RoPE has pairs that do not turn.
    count = int(np.count_nonzero(frequencies(rope, size, 1)))
    own = _Layout("the layer's own", features[first][:count], features[second][:count])
    i = np.arange(count)
    block = 2 * count
    halves = "in halves, (i, i + R/2)"
    if block < size:
        halves = f"in halves of {block} features, (i, i + {count})"
    layouts = [
        _Layout(halves, i, i + count),
        _Layout("side by side, (2 i, 2 i + 1)", 2 * i, 2 * i + 1),
        _Layout(f"in halves of the head, (i, i + {size // 2})", i, i + size // 2),
        _Layout(f"in halves of the last {block} features", i + size - block, i + size - count),
        _Layout(f"the first and the last, (i, {block - 1} - i)", i, block - 1 - i),
        _Layout(f"the first and the last, (i, {size - 1} - i)", i, size - 1 - i),
        _Layout(
            f"side by side in the last {block} features",
            2 * i + size - block,
            2 * i + 1 + size - block,
        ),
        _Layout("the layer's own, with their features exchanged", own.second, own.first),
    ]
    distinct = [own]
    for layout in layouts:
        # An odd head has no second half for the last pair.
        if layout.second.max(initial=0) >= size:
            continue
        if not any(layout.is_same(other) for other in distinct):
            distinct.append(layout)
        elif layout.is_same(own):
            distinct[0] = layout
    return distinct


def _of_layouts(problem: Problem, rope: Rope, names: str, whose: str) -> Iterator[Edit]:
    """Yield other pairs with the right frequencies, and pairs that are rotated by tables of
    others.
    """
    own, *others = _layouts(rope, problem.spec.head_dim)
    for layout in others:
        words = f"the pairs of {whose} are {layout.words}, instead of {own.words}"
        yield _rotation(problem, names, words, _turn_by_tables(layout, layout), of.PAIRS)
    usual = [own, *others][:USUAL_LAYOUTS]
    for pairs, tables in permutations(usual, 2):
        words = (
            f"the pairs of {whose} are {pairs.words}, but RoPE's tables are for pairs "
            f"{tables.words}"
        )
        yield _rotation(problem, names, words, _turn_by_tables(pairs, tables), of.PAIRS)


def _of_mixed_layouts(problem: Problem, rope: Rope) -> Iterator[Edit]:
    """Yield queries and keys with different pairs, both with the right frequencies."""
    _, *others = _layouts(rope, problem.spec.head_dim)
    for of_queries, of_keys in permutations(others[: USUAL_LAYOUTS - 1], 2):
        words = (
            f"the pairs of queries are {of_queries.words}, and the pairs of keys {of_keys.words}"
        )
        turns = {
            "q": _turn_by_tables(of_queries, of_queries),
            "k": _turn_by_tables(of_keys, of_keys),
        }
        change = Edit(overrides={"turned": partial(_turned_by_name, turns)})
        yield part(problem, "rotation", words, change, of.PAIRS)


def _turned_by_name(
    turns: Mapping[str, Turn],
    layer: Layer,
    original: Override,
    name: str,
    x: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:
    if name not in turns:
        return original(name, x, positions)
    return turns[name](layer, x, positions)


def _turn_by_tables(pairs: _Layout, tables: _Layout) -> Turn:
    """Return a rotation whose tables have an entry for each feature, maybe in a different
    layout.
    """

    def turn(layer: Layer, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        size = x.shape[-1]
        cos, sin = layer.tables(positions)
        wide = layer.arithmetic.widen(x)
        shape = (*cos.shape[:-1], size)
        all_cos, all_sin = np.ones(shape, cos.dtype), np.zeros(shape, sin.dtype)
        count = len(tables.first)
        for features in (tables.first, tables.second):
            all_cos[..., features] = cos[..., :count]
            all_sin[..., features] = sin[..., :count]
        partner = np.zeros_like(wide)
        partner[..., pairs.first] = -wide[..., pairs.second]
        partner[..., pairs.second] = wide[..., pairs.first]
        return layer.arithmetic.keep(wide * all_cos + partner * all_sin)

    return turn


def _of_order(problem: Problem, rope: Rope, names: str, whose: str) -> Iterator[Edit]:
    """Yield rotated features that are put together in a different order."""
    size = problem.spec.head_dim
    rotated = np.arange(size)[rope.rotated_features(size)]
    halves = np.arange(len(rotated)).reshape(2, -1)
    if rope.pairs == "interleaved":
        order, words = halves.ravel(order="F").argsort(), "in halves instead of side by side"
    else:
        order, words = halves.ravel(order="F"), "side by side instead of in halves"
    moved = np.arange(size)
    moved[rotated] = rotated[order]
    about = f"the rotated features of {whose} are put together {words}"
    yield _rotation(problem, names, about, _turn_in_order(moved), of.PAIRS)
    if len(rotated) == size:
        return
    rest = np.setdiff1d(np.arange(size), rotated)
    if rotated[0] == 0:
        joined, side = np.concatenate([rest, rotated]), "after"
    else:
        joined, side = np.concatenate([rotated, rest]), "before"
    about = f"the rotated features of {whose} are put {side} the others"
    yield _rotation(problem, names, about, _turn_in_order(joined), of.ROTARY_DIM)


def _turn_in_order(order: np.ndarray) -> Turn:
    def turn(layer: Layer, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return layer.rotate(x, positions)[..., order]

    return turn


# ---- Frequencies and positions -------------------------------------------------------------------


def in_reverse(right: np.ndarray) -> np.ndarray:
    return right[::-1]


def evenly(right: np.ndarray) -> np.ndarray:
    return np.linspace(right[0], right[-1], len(right))


def evenly_to_next(right: np.ndarray) -> np.ndarray:
    """End where the exponent would be 1, as 1 / theta."""
    if len(right) < 2:
        return right
    return np.linspace(right[0], right[-1] * right[1] / right[0], len(right))


FREQUENCIES = {
    "in reverse order": in_reverse,
    "spaced evenly, from the first to the last": evenly,
    "spaced evenly, from 1 to 1 / theta": evenly_to_next,
}


def _of_frequencies(problem: Problem) -> Iterator[Edit]:
    for words, form in FREQUENCIES.items():
        about = f"RoPE's frequencies are {words}"
        yield part(problem, "rotation", about, _with_frequencies(form), of.FREQUENCIES)


def _with_frequencies(form: Callable[[np.ndarray], np.ndarray]) -> Edit:
    def angles(layer: Any, original: Override, positions: np.ndarray) -> np.ndarray:
        one = original(np.ones((1, 1), positions.dtype))[0, 0, 0].astype(np.float64)
        return (positions[:, None, :, None] * form(one)).astype(layer.arithmetic.wide)

    return Edit(overrides={"angles": angles})


def _by_rolled_positions(layer: Layer, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return layer.rotate(x, np.roll(positions, 1, axis=-1))


def _of_heads(problem: Problem, name: str, count: int) -> Iterator[Edit]:
    """Yield single heads that are rotated by the wrong position."""
    if not 1 < count <= MOST_HEADS:
        return
    for head in range(count):
        for by, words in ((1, "one position further"), (-1, "one position less")):
            about = f"head {head} of {name} is rotated by {words}"
            yield _rotation(problem, name, about, _turn_of_head(head, by), of.POSITIONS)


def _turn_of_head(head: int, by: int) -> Turn:
    def turn(layer: Layer, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        rotated = layer.rotate(x, positions)
        rotated[:, head] = layer.rotate(x, positions + by)[:, head]
        return rotated

    return turn
