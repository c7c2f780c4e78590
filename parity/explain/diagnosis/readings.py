"""Conventions of recorded stages: other axes, before RoPE, a mask with True for visible keys; and
their conversion.

A stage that differs may be right in another convention. The stages after it decide: if they agree
with the reference, nothing is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from parity.explain.diagnosis.bugs.record import Changed, instead
from parity.explain.diagnosis.replay import Replay
from parity.explain.diagnosis.sample import sample_of
from parity.measure.core.stages import STAGES, Stage, stage_named
from parity.measure.core.unused import unused_cells
from parity.measure.core.weights import is_floating

PENALTY = -100.0
"""The least penalty of an additive mask."""

MASKED = -9e3
"""The largest score that may be a mask's number: masks fill with, or add, -1e4, -1e9 or -inf."""

FAR_BELOW = 20.0
"""The least distance of such a cell below every expected score."""

AFTER_MASK = "is recorded after the mask"


@dataclass(frozen=True)
class Reading:
    """A reading of a recorded array.

    Attributes:
        words: a description that follows the name of the stage; empty for the reference's
            convention.
        values: the stage in the reference's convention; None if it cannot be computed from the
            recorded array.
        is_certain: True if no later stage has to confirm it, because it concerns only axes.
        masked: cells that are not compared: unused ones, and cells of scores that hold a mask's
            number, in which the values are the reference's; None if there are none.
    """

    words: str
    values: np.ndarray | None
    is_certain: bool = False
    masked: np.ndarray | None = None


@dataclass(frozen=True)
class Read:
    """The readings of a recorded stage.

    Attributes:
        plain: by its shape alone; None if no order of axes fits.
        agreed: the reading that agrees with the reference, if there is one.
        reason: a description of why there is no plain one.
    """

    plain: Reading | None
    agreed: Reading | None
    reason: str = ""


BEFORE_ROPE = Changed({"turned": lambda layer, original, name, x, positions: x})
BEFORE_NORM = Changed(
    {**BEFORE_ROPE.in_reference, "normed": lambda layer, original, name, x, norm: x}
)
BEFORE_SCALE = Changed({"scale": instead(lambda: 1.0)})
BEFORE_CAP = Changed({"capped": instead(lambda x: x)})
BEFORE_BIAS = Changed(
    {"score_bias": instead(lambda: None)}
    | dict.fromkeys(
        ("lost_by_distance", "gained_by_distance"), instead(lambda places: np.zeros(()))
    )
)
PRODUCTS = Changed(
    {**BEFORE_SCALE.in_reference, **BEFORE_CAP.in_reference, **BEFORE_BIAS.in_reference}
)


def read(observed: Mapping[str, np.ndarray], right: Replay) -> dict[str, Read]:
    """Return the readings of each recorded stage that the reference has."""
    return {
        name: _Reader(name, right).read(x) for name, x in observed.items() if name in right.values
    }


def _over_heads(attn_weights: np.ndarray) -> np.ndarray:
    return attn_weights.astype(np.float64).mean(axis=1)


@dataclass(frozen=True)
class _Reader:
    """The reader of one stage."""

    name: str
    right: Replay

    @cached_property
    def stage(self) -> Stage:
        return stage_named(self.name)

    @cached_property
    def expected(self) -> np.ndarray:
        return self.right.values[self.name]

    @property
    def letters(self) -> tuple[str, ...]:
        return STAGES[self.stage.kind]

    @cached_property
    def unused(self) -> np.ndarray | None:
        """The cells whose values do not matter: tokens of padding, unfilled slots."""
        problem = self.right.problem
        sample = sample_of(problem)
        tokens = None if sample is None else sample.tokens_of(self.stage.quantity)
        return unused_cells(problem.case, self.name, self.expected.shape, tokens)

    def read(self, x: np.ndarray) -> Read:
        """Return the readings, up to the first that agrees."""
        typed = self._typed(x)
        if isinstance(typed, str):
            return Read(None, None, typed)
        if typed.shape == self.expected.shape and self.right.agrees(
            self.name, typed, unused=self.unused
        ):
            as_ours = Reading(self._as_typed(x, typed), typed, is_certain=True, masked=self.unused)
            return Read(as_ours, as_ours)
        shaped = list(self._shaped(typed))
        agreed = next(self._agreeing(typed, shaped), None)
        if not shaped:
            return Read(None, agreed, f"has shape {x.shape} instead of {self.expected.shape}")
        after_mask = self._after_mask(shaped[0])
        if after_mask is None:
            return Read(replace(shaped[0], masked=self.unused), agreed)
        is_right = after_mask.values is not None and self._agrees(after_mask.values)
        return Read(after_mask, after_mask if is_right else agreed)

    def _agrees(self, x: np.ndarray, changes: tuple[Changed, ...] = ()) -> bool:
        """Return True if an array is the stage with changes, up to rounding, except in unused
        cells.
        """
        return self.right.agrees(self.name, x, changes, self.unused)

    def _as_typed(self, x: np.ndarray, typed: np.ndarray) -> str:
        """Return a description of a mask that is not boolean."""
        return (
            ""
            if x.dtype == typed.dtype or self.stage.quantity != "mask"
            else f"has dtype {x.dtype}"
        )

    def _typed(self, x: np.ndarray) -> np.ndarray | str:
        """Return the array with the stage's dtype, or the reason why it cannot have it."""
        if self.stage.quantity == "mask":
            if x.dtype == np.bool_:
                return x
            wide = x.astype(np.float64)
            if np.isin(wide, (0.0, 1.0)).all():
                return wide > 0.0
            if not np.isnan(wide).any() and ((wide == 0.0) | (wide <= PENALTY)).all():
                return wide < 0.0
            return f"has dtype {x.dtype} instead of bool, True for a hidden key"
        if self.stage.is_exact:
            whole = x.astype(np.float64)
            is_whole = x.dtype.kind in "iuf" and bool((whole == np.floor(whole)).all())
            if is_whole:
                return x if x.dtype == np.int32 else whole.astype(np.int32)
            return f"has dtype {x.dtype} instead of an integer dtype"
        return (
            x if is_floating(x.dtype) else f"has dtype {x.dtype} instead of a floating-point dtype"
        )

    # ---- Axes ------------------------------------------------------------------------------------

    def _shaped(self, x: np.ndarray) -> Iterator[Reading]:
        """Yield the array with the axes of the stage, in every way that its shape allows; unchanged
        first.
        """
        target = self.expected.shape
        if x.shape == target:
            yield Reading("", x, is_certain=True)
        found = []
        for words, larger, undo in self._targets():
            for axes, y in _in_axes(x, larger, self.letters, may_broadcast=self.stage.is_exact):
                values = undo(y)
                if values is None or (
                    values.shape == x.shape and not words and np.array_equal(values, x)
                ):
                    continue
                words_of_form = _joined(f"has axes {axes}" if axes else "", words)
                if words_of_form not in found:
                    found.append(words_of_form)
                    yield Reading(words_of_form, values, is_certain=True)

    def _targets(
        self,
    ) -> Iterator[tuple[str, tuple[int, ...], Callable[[np.ndarray], np.ndarray | None]]]:
        """Yield expected shapes that are larger or smaller than the reference's, and functions that
        undo it.
        """
        shape, spec = self.expected.shape, self.right.problem.spec
        yield "", shape, lambda y: y
        if "K" in self.letters and spec.num_kv_heads < spec.num_heads:
            repeated = self._resized("K", spec.num_heads, shape)
            yield "is recorded after the repeat for the query heads", repeated, self._shared
            if filled := self._filled():
                grown = self._resized("S", filled, repeated)
                yield (
                    "is recorded after the repeat for the query heads, in a growing cache",
                    grown,
                    lambda y: None if (z := self._shared(y)) is None else self._padded(z),
                )
        if filled := self._filled():
            yield "has the size of a growing cache", self._resized("S", filled, shape), self._padded
        if spec.sinks and self.stage.quantity in ("scores", "attn_weights"):
            wider = (*shape[:-1], shape[-1] + 1)
            yield "has the sinks as a last column", wider, lambda y: y[..., :-1]
            yield "has the sinks as a first column", wider, lambda y: y[..., 1:]

    def _resized(self, axis: str, size: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape with another size of one axis."""
        return tuple(
            size if letter == axis else old for letter, old in zip(self.letters, shape, strict=True)
        )

    def _shared(self, y: np.ndarray) -> np.ndarray | None:
        """Return one head of each group, if the heads are equal within their groups."""
        groups = y.reshape(y.shape[0], self.right.problem.spec.num_kv_heads, -1, *y.shape[2:])
        return (
            groups[:, :, 0]
            if np.array_equal(groups, np.broadcast_to(groups[:, :, :1], groups.shape))
            else None
        )

    def _filled(self) -> int:
        """Return the number of filled slots of the longest sequence after the stage's step; 0
        without a cache.
        """
        case, step = self.right.problem.case, self.stage.step
        is_of_slots = (
            self.stage.quantity in ("mask", "scores", "attn_weights")
            or "cache" in self.stage.quantity
        )
        if step is None or "S" not in self.letters or not is_of_slots:
            return 0
        filled = max(np.add(case.lengths_before(step), case.added(step)))
        return int(filled) if filled < case.capacity else 0

    def _padded(self, y: np.ndarray) -> np.ndarray:
        """Return the array with unfilled slots, as in the reference."""
        axis = self.letters.index("S")
        values = np.array(self.expected).astype(y.dtype)
        values[(slice(None),) * axis + (slice(y.shape[axis]),)] = y
        return values

    # ---- Values ----------------------------------------------------------------------------------

    def _agreeing(self, x: np.ndarray, shaped: Sequence[Reading]) -> Iterator[Reading]:
        """Yield the readings in which the array agrees with the reference."""
        for form in shaped:
            if form.values is None:
                continue
            for words, values in (("", form.values), *self._restored(form.values)):
                if (form.words or words) and self._agrees(values):
                    yield Reading(_joined(form.words, words), values, not words, self.unused)
            for words, shown in self._shown():
                if self._agrees(form.values, (shown,)):
                    yield Reading(_joined(form.words, words), None)
        yield from self._averaged(x)

    def _restored(self, x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the array in the reference's convention, for conventions that can be undone."""
        spec, quantity = self.right.problem.spec, self.stage.quantity
        if quantity == "mask":
            yield "is True for visible keys", ~x
        if self.stage.is_exact:
            return
        if quantity in ("q", "k", "cache.keys") and spec.rope is not None:
            order = spec.rope.replace(pairs="half").pair_order(x.shape[-1])
            yield "has its RoPE pairs in another order", x[..., order]
            yield "has its RoPE pairs in another order", x[..., np.argsort(order)]
        if quantity in ("q", "k", "cache.keys"):
            wide, scale = x.astype(np.float64), spec.score_scale
            if quantity == "q":
                yield "is recorded after the scale", (wide / scale).astype(x.dtype)
            yield (
                "is recorded after the root of the scale",
                (wide / math.sqrt(abs(scale) or 1.0)).astype(x.dtype),
            )
        after_mask = self._after_mask(Reading("", x))
        if (
            after_mask is not None
            and after_mask.values is not None
            and after_mask.masked is not None
        ):
            values = np.where(
                after_mask.masked, self.expected, after_mask.values / spec.score_scale
            )
            yield f"{AFTER_MASK} and before the scale", values

    def _after_mask(self, form: Reading) -> Reading | None:
        """Return scores after a mask, which are compared in the other cells only; None for other
        stages and scores.
        """
        if self.stage.quantity != "scores" or form.values is None:
            return None
        hidden = self.right.values[str(Stage("mask", self.stage.path, step=self.stage.step))]
        cells = _masked_cells(form.values, self.expected, hidden, self._agrees)
        if cells is None:
            return None
        values = np.where(cells, self.expected, form.values).astype(form.values.dtype)
        not_compared = cells if self.unused is None else cells | self.unused
        return Reading(
            _joined(form.words, AFTER_MASK), values, is_certain=True, masked=not_compared
        )

    def _shown(self) -> Iterator[tuple[str, Changed]]:
        """Yield the conventions that the reference itself can compute."""
        spec, quantity = self.right.problem.spec, self.stage.quantity
        if quantity in ("q", "k", "cache.keys", "latents", "cache.latents"):
            if spec.rope is not None:
                yield "is recorded before RoPE", BEFORE_ROPE
            if spec.norms:
                yield "is recorded before its norm", BEFORE_NORM
        if quantity == "scores":
            yield "is recorded before the scale", BEFORE_SCALE
            if spec.soft_cap is not None:
                yield "is recorded before the soft cap", BEFORE_CAP
            if self.right.problem.case.bias or spec.has_distance_bias:
                yield "is recorded before the bias", BEFORE_BIAS
            if spec.soft_cap is not None or self.right.problem.case.bias or spec.has_distance_bias:
                yield "is recorded before the scale, the soft cap and the bias", PRODUCTS

    def _averaged(self, x: np.ndarray) -> Iterator[Reading]:
        """Yield attention weights, averaged over heads."""
        if not self.stage.is_attn_weights or x.ndim != 3:
            return
        if self.right.agrees(self.name, x, form=_over_heads):
            yield Reading("is averaged over the heads", None)


def _joined(*words: str) -> str:
    return " and ".join(filter(None, words))


def _in_axes(
    x: np.ndarray, target: tuple[int, ...], letters: tuple[str, ...], *, may_broadcast: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield an array with the axes of `letters` in order, in every way that its shape allows, and
    its own axes.
    """
    count = len(target)
    for order in orders(letters):
        shape, names = [target[axis] for axis in order], [letters[axis] for axis in order]
        back = np.argsort(order)
        if x.shape == tuple(shape):
            yield (
                ("" if order == tuple(range(count)) else f"({', '.join(names)})"),
                x.transpose(back),
            )
        for first in range(count - 1):  # two neighbors joined
            joined = (*shape[:first], shape[first] * shape[first + 1], *shape[first + 2 :])
            if x.shape == joined and joined != target:
                words = [
                    *names[:first],
                    f"{names[first]} * {names[first + 1]}",
                    *names[first + 2 :],
                ]
                yield f"({', '.join(words)})", x.reshape(shape).transpose(back)
        if target[0] == 1 and order[0] == 0 and x.shape == tuple(shape[1:]):
            yield f"({', '.join(names[1:])})", x[None].transpose(back)
    if may_broadcast and x.shape != target:
        for kept in _subsets(count):
            shape = tuple(size if axis in kept else 1 for axis, size in enumerate(target))
            if x.shape in (shape, tuple(target[axis] for axis in kept)):
                yield (
                    f"({', '.join(letters[axis] for axis in kept)})",
                    np.broadcast_to(x.reshape(shape), target),
                )


@cache
def orders(letters: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Return the orders of axes, usual ones first."""
    return sorted(
        itertools.permutations(range(len(letters))), key=lambda order: _unusual(order, letters)
    )


def _unusual(order: Sequence[int], letters: tuple[str, ...]) -> int:
    """Return how unusual an order of axes is: ours, then (B, T, N, H), then those that keep the
    last axis, then all.
    """
    usual = [
        tuple(range(len(letters))),
        (0, 2, 1, 3)[: len(letters)],
        (2, 0, 1, 3),
        (1, 0, 2),
        (0, 1, 3, 2),
    ]
    return (
        usual.index(tuple(order))
        if tuple(order) in usual
        else len(usual) + (order[-1] != len(letters) - 1)
    )


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    """Yield the subsets of a number of axes, those with the last axes first."""
    for size in range(count - 1, -1, -1):
        yield from sorted(itertools.combinations(range(count), size), reverse=True)


# ---- Scores after a mask -------------------------------------------------------------------------


def _masked_cells(
    x: np.ndarray, expected: np.ndarray, hidden: np.ndarray, agrees: Callable[[np.ndarray], bool]
) -> np.ndarray | None:
    """Find the cells of recorded scores that hold a mask's number.

    Args:
        x: recorded scores, (B, N, T, S), floating-point.
        expected: the scores before the mask, float64.
        hidden: the cells that the mask should hide.
        agrees: returns True if scores are the expected ones, up to rounding.

    Returns:
        The cells, boolean; None if there are none.
    """
    x = x.astype(np.float64)
    cells = _far_below(x, expected, hidden)
    cells = cells if cells.any() else _alike(x, expected, hidden, agrees)
    return cells if cells.any() else None


def _far_below(x: np.ndarray, expected: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Return cells with a large negative number. Their values alone decide, because the mask itself
    may be wrong.
    """
    lowest = expected.min(initial=0.0, where=np.isfinite(expected))
    cells = x <= min(MASKED, lowest - FAR_BELOW)
    others = x[~cells & ~np.isnan(x)]
    # Scores that are too large everywhere leave no such gap.
    is_apart = others.size > 0 and others.min() > 0.5 * x[cells].max(initial=-np.inf)
    return cells & (is_apart or bool(hidden.all()))


def _alike(
    x: np.ndarray, expected: np.ndarray, hidden: np.ndarray, agrees: Callable[[np.ndarray], bool]
) -> np.ndarray:
    """Return all hidden cells, if one number fills them, or is added to them while all other scores
    are right.
    """
    none = np.zeros(x.shape, bool)
    if (
        np.count_nonzero(hidden) < 2
        or not np.isfinite(x[hidden]).all()
        or not np.isfinite(expected).all()
    ):
        return none
    if np.ptp(x[hidden]) == 0.0 and np.ptp(expected[hidden]) > 0.0:
        return hidden
    added = x[hidden] - expected[hidden]
    is_added = np.ptp(added) <= 1e-3 * abs(added.mean())
    return hidden if is_added and agrees(np.where(hidden, expected, x)) else none
