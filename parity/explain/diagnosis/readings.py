"""Conventions of recorded stages: other axes, before RoPE, a mask with True for visible keys; and
their conversion.

A stage that differs may be right in a different convention. The stages after it decide: if they
agree with the reference, nothing is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from mha_spec import Rope
from parity.explain.diagnosis.bugs.record import Edit, Edits
from parity.explain.diagnosis.bugs.sites import always, features_unchanged
from parity.explain.diagnosis.sample import sample_of
from parity.explain.diagnosis.trial import Trial
from parity.measure.core.stages import Stage, stage_named
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
class StageReadings:
    """The readings of a recorded stage.

    Attributes:
        plain: by its shape alone; None if no order of axes fits.
        agreed: the reading that agrees with the reference, if there is one.
        reason: a description of why there is no plain one.
    """

    plain: Reading | None
    agreed: Reading | None
    reason: str = ""


# ---- The reference in other conventions ----------------------------------------------------------


_NO_SCALE = {"scale": always(1.0)}
_NO_CAP = {"soft_cap": always(None)}
_NO_BIAS = {
    "score_bias": always(None),
    "lost_by_distance": always(np.zeros(())),
    "gained_by_distance": always(np.zeros(())),
}

BEFORE_ROPE = Edit(overrides={"turned": features_unchanged})
BEFORE_NORM = Edit(overrides={"turned": features_unchanged, "normed": features_unchanged})
BEFORE_SCALE = Edit(overrides=_NO_SCALE)
BEFORE_CAP = Edit(overrides=_NO_CAP)
BEFORE_BIAS = Edit(overrides=_NO_BIAS)
PRODUCTS = Edit(overrides={**_NO_SCALE, **_NO_CAP, **_NO_BIAS})


def read(observed: Mapping[str, np.ndarray], right: Trial) -> dict[str, StageReadings]:
    """Return the readings of each recorded stage that the reference has."""
    readings = {}
    for name, x in observed.items():
        if name in right.values:
            readings[name] = _Reader(name, right).read(x)
    return readings


def _over_heads(attn_weights: np.ndarray) -> np.ndarray:
    return attn_weights.astype(np.float64).mean(axis=1)


@dataclass(frozen=True)
class _RecordedForm:
    """A form in which a stage may be recorded, with more or fewer elements than the reference.

    Attributes:
        words: a description that follows the name of the stage; empty for the reference's form.
        shape: its shape, with the reference's order of axes.
        undo: returns the stage in the reference's shape; None if the values contradict the form.
    """

    words: str
    shape: tuple[int, ...]
    undo: Callable[[np.ndarray], np.ndarray | None]


@dataclass(frozen=True)
class _Reader:
    """The reader of one stage."""

    name: str
    right: Trial

    @cached_property
    def stage(self) -> Stage:
        return stage_named(self.name)

    @cached_property
    def expected(self) -> np.ndarray:
        return self.right.values[self.name]

    @cached_property
    def unused(self) -> np.ndarray | None:
        """The cells whose values do not matter: tokens of padding, unfilled slots."""
        problem = self.right.problem
        sample = sample_of(problem)
        tokens = None
        if sample is not None:
            tokens = sample.tokens_of(self.stage.quantity)
        return unused_cells(problem.case, self.name, self.expected.shape, tokens)

    def read(self, x: np.ndarray) -> StageReadings:
        """Return the readings, up to the first that agrees."""
        typed = self._typed(x)
        if isinstance(typed, str):
            return StageReadings(None, None, typed)
        if typed.shape == self.expected.shape and self._agrees(typed):
            words = ""
            if self.stage.quantity == "mask" and x.dtype != np.bool_:
                words = f"has dtype {x.dtype}"
            as_ours = Reading(words, typed, is_certain=True, masked=self.unused)
            return StageReadings(as_ours, as_ours)
        # As recorded it differs. It may agree in other axes, or in a different convention.
        shaped = list(self._shaped(typed))
        agreed = next(self._agreeing(typed, shaped), None)
        if not shaped:
            return StageReadings(
                None, agreed, f"has shape {x.shape} instead of {self.expected.shape}"
            )
        after_mask = self._after_mask(shaped[0])
        if after_mask is None:
            return StageReadings(replace(shaped[0], masked=self.unused), agreed)
        if after_mask.values is not None and self._agrees(after_mask.values):
            agreed = after_mask
        return StageReadings(after_mask, agreed)

    def _agrees(self, x: np.ndarray, edits: Edits = ()) -> bool:
        """Return True if an array is the stage with edits, up to rounding, except in unused
        cells.
        """
        return self.right.agrees(self.name, x, edits, self.unused)

    # ---- Dtypes ----------------------------------------------------------------------------------

    def _typed(self, x: np.ndarray) -> np.ndarray | str:
        """Return the array with the stage's dtype, or the reason why it cannot have it."""
        if self.stage.quantity == "mask":
            return self._as_mask(x)
        if self.stage.is_exact:
            return self._as_integers(x)
        if is_floating(x.dtype):
            return x
        return f"has dtype {x.dtype} instead of a floating-point dtype"

    def _as_mask(self, x: np.ndarray) -> np.ndarray | str:
        """Return a mask that may be recorded as 0 and 1, or as penalties that are added to the
        scores.
        """
        if x.dtype == np.bool_:
            return x
        wide = x.astype(np.float64)
        if np.isin(wide, (0.0, 1.0)).all():
            return wide > 0.0
        may_be_added = (wide == 0.0) | (wide <= PENALTY)
        if may_be_added.all():
            return wide < 0.0
        return f"has dtype {x.dtype} instead of bool, True for a hidden key"

    def _as_integers(self, x: np.ndarray) -> np.ndarray | str:
        if x.dtype == np.int32:
            return x
        wide = x.astype(np.float64)
        if x.dtype.kind in "iuf" and (wide == np.floor(wide)).all():
            return wide.astype(np.int32)
        return f"has dtype {x.dtype} instead of an integer dtype"

    # ---- Axes ------------------------------------------------------------------------------------

    def _shaped(self, x: np.ndarray) -> Iterator[Reading]:
        """Yield the array with the axes of the stage, in every way that its shape allows; unchanged
        first.
        """
        if x.shape == self.expected.shape:
            yield Reading("", x, is_certain=True)
        words_so_far = set()
        for form in self._recorded_forms():
            for axes, ordered in in_axes(
                x, form.shape, self.stage.axes, may_broadcast=self.stage.is_exact
            ):
                values = form.undo(ordered)
                if values is None:
                    continue
                is_unchanged = values.shape == x.shape and np.array_equal(values, x)
                if is_unchanged and not form.words:
                    continue  # it came first
                words_of_axes = ""
                if axes:
                    words_of_axes = f"has axes {axes}"
                words = _joined(words_of_axes, form.words)
                if words not in words_so_far:
                    words_so_far.add(words)
                    yield Reading(words, values, is_certain=True)

    def _recorded_forms(self) -> Iterator[_RecordedForm]:
        """Yield the forms in which the stage may be recorded, the reference's own first."""
        shape, spec = self.expected.shape, self.right.problem.spec
        yield _RecordedForm("", shape, np.asarray)
        filled = self._filled()
        if "K" in self.stage.axes and spec.num_kv_heads < spec.num_heads:
            words = "is recorded after the repeat for the query heads"
            repeated = self._resized("K", spec.num_heads, shape)
            yield _RecordedForm(words, repeated, self._shared)
            if filled:
                growing = self._resized("S", filled, repeated)
                yield _RecordedForm(
                    f"{words}, in a growing cache", growing, self._shared_and_padded
                )
        if filled:
            growing = self._resized("S", filled, shape)
            yield _RecordedForm("has the size of a growing cache", growing, self._padded)
        if spec.sinks and self.stage.quantity in ("scores", "attn_weights"):
            wider = (*shape[:-1], shape[-1] + 1)
            yield _RecordedForm("has the sinks as a last column", wider, _without_last_column)
            yield _RecordedForm("has the sinks as a first column", wider, _without_first_column)

    def _resized(self, axis: str, size: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape with a different size of one axis."""
        if axis not in self.stage.axes:
            return shape
        index = self.stage.axes.index(axis)
        return (*shape[:index], size, *shape[index + 1 :])

    def _shared(self, x: np.ndarray) -> np.ndarray | None:
        """Return one head of each group, if the heads are equal within their groups."""
        groups = x.reshape(x.shape[0], self.right.problem.spec.num_kv_heads, -1, *x.shape[2:])
        if not (groups == groups[:, :, :1]).all():
            return None
        return groups[:, :, 0]

    def _shared_and_padded(self, x: np.ndarray) -> np.ndarray | None:
        shared = self._shared(x)
        if shared is None:
            return None
        return self._padded(shared)

    def _filled(self) -> int:
        """Return the number of filled slots of the longest sequence after the stage's step; 0
        without a cache, or if all slots are filled.
        """
        case, step, quantity = self.right.problem.case, self.stage.step, self.stage.quantity
        is_of_slots = quantity in ("mask", "scores", "attn_weights") or "cache" in quantity
        if step is None or "S" not in self.stage.axes or not is_of_slots:
            return 0
        filled = int(max(np.add(case.lengths_before(step), case.added(step))))
        if filled >= case.capacity:
            return 0
        return filled

    def _padded(self, x: np.ndarray) -> np.ndarray:
        """Return the array with unfilled slots, as in the reference."""
        axis = self.stage.axes.index("S")
        values = np.array(self.expected).astype(x.dtype)
        values[(slice(None),) * axis + (slice(x.shape[axis]),)] = x
        return values

    # ---- Values ----------------------------------------------------------------------------------

    def _agreeing(self, x: np.ndarray, shaped: Sequence[Reading]) -> Iterator[Reading]:
        """Yield the readings in which the array agrees with the reference."""
        for reading in shaped:
            if reading.values is None:
                continue
            if reading.words and self._agrees(reading.values):
                yield Reading(reading.words, reading.values, is_certain=True, masked=self.unused)
            for words, values in self._restored(reading.values):
                if self._agrees(values):
                    yield Reading(_joined(reading.words, words), values, masked=self.unused)
            for words, edit in self._computable_conventions():
                if self._agrees(reading.values, (edit,)):
                    yield Reading(_joined(reading.words, words), None)
        # An average over the heads has no shape of the stage.
        if (
            self.stage.is_attn_weights
            and x.ndim == 3
            and self.right.agrees(self.name, x, form=_over_heads)
        ):
            yield Reading("is averaged over the heads", None)

    def _restored(self, x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the array in the reference's convention, for conventions that can be undone."""
        spec, quantity = self.right.problem.spec, self.stage.quantity
        if quantity == "mask":
            yield "is True for visible keys", ~x
        if self.stage.is_exact:
            return
        if quantity in ("q", "k", "cache.keys"):
            if spec.rope is not None:
                for values in _in_other_pairs(x, spec.rope):
                    yield "has its RoPE pairs in a different order", values
            wide, scale = x.astype(np.float64), spec.score_scale
            if quantity == "q":
                yield "is recorded after the scale", (wide / scale).astype(x.dtype)
            # A scale of 0 has no root to divide by.
            root = math.sqrt(abs(scale) or 1.0)
            yield "is recorded after the root of the scale", (wide / root).astype(x.dtype)
        if quantity == "scores":
            yield from self._equal_in_softmax(x)
        after_mask = self._after_mask(Reading("", x))
        if after_mask is None or after_mask.values is None or after_mask.masked is None:
            return
        with np.errstate(over="ignore"):  # the lowest number of a dtype may be recorded
            unscaled = after_mask.values / spec.score_scale
        values = np.where(after_mask.masked, self.expected, unscaled)
        yield f"{AFTER_MASK} and before the scale", values

    def _equal_in_softmax(self, x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield scores without what cannot change attention weights: the scores of hidden keys, and
        a number that is added to a whole row, such as the position of the query in ALiBi.
        """
        is_visible = ~self._hidden(x) & np.isfinite(self.expected)
        yield "differs only where keys are hidden", np.where(is_visible, x, self.expected)
        # A sink is in no row.
        if self.right.problem.spec.sinks:
            return
        num_visible = np.maximum(is_visible.sum(axis=-1, keepdims=True), 1)
        with np.errstate(invalid="ignore", over="ignore"):
            difference = np.where(is_visible, x.astype(np.float64) - self.expected, 0.0)
            shift = difference.sum(axis=-1, keepdims=True) / num_visible
            values = np.where(is_visible, x - shift, self.expected).astype(x.dtype)
        yield "differs by a number for each row, which a softmax ignores", values

    def _computable_conventions(self) -> Iterator[tuple[str, Edit]]:
        """Yield the conventions that the reference itself can compute."""
        spec, quantity = self.right.problem.spec, self.stage.quantity
        if quantity in ("q", "k", "cache.keys", "latents", "cache.latents"):
            if spec.rope is not None:
                yield "is recorded before RoPE", BEFORE_ROPE
            if spec.norms:
                yield "is recorded before its norm", BEFORE_NORM
        if quantity == "scores":
            has_cap = spec.soft_cap is not None
            has_bias = self.right.problem.case.bias or spec.has_distance_bias
            yield "is recorded before the scale", BEFORE_SCALE
            if has_cap:
                yield "is recorded before the soft cap", BEFORE_CAP
            if has_bias:
                yield "is recorded before the bias", BEFORE_BIAS
            if has_cap or has_bias:
                yield "is recorded before the scale, the soft cap and the bias", PRODUCTS

    # ---- Scores after a mask ---------------------------------------------------------------------

    def _after_mask(self, reading: Reading) -> Reading | None:
        """Return scores after a mask, which are compared in the other cells only; None for other
        stages and scores.
        """
        if self.stage.quantity != "scores" or reading.values is None:
            return None
        cells = self._masked_cells(reading.values)
        if not cells.any():
            return None
        with np.errstate(over="ignore"):  # scores may exceed the dtype in which they are recorded
            values = np.where(cells, self.expected, reading.values).astype(reading.values.dtype)
        if self.unused is not None:
            cells = cells | self.unused
        return Reading(_joined(reading.words, AFTER_MASK), values, is_certain=True, masked=cells)

    def _masked_cells(self, x: np.ndarray) -> np.ndarray:
        """Return the cells of recorded scores, (B, N, T, S), that hold a mask's number."""
        hidden = self._hidden(x)
        wide = x.astype(np.float64)
        cells = self._far_below(wide, hidden)
        if cells.any():
            return cells
        if self._have_mask_number(wide, hidden):
            return hidden
        return np.zeros(x.shape, bool)

    def _hidden(self, x: np.ndarray) -> np.ndarray:
        """Return the cells of scores, (B, N, T, S), whose keys are hidden."""
        mask = str(Stage("mask", self.stage.path, step=self.stage.step))
        return np.broadcast_to(self.right.values[mask], x.shape)

    def _far_below(self, x: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """Return cells with a large negative number. Their values alone decide, because the mask
        itself may be wrong.
        """
        lowest = self.expected.min(initial=0.0, where=np.isfinite(self.expected))
        cells = x <= min(MASKED, lowest - FAR_BELOW)
        # Scores that overflow are -inf as well, where no mask hides a key.
        if np.isposinf(x).any():
            cells &= hidden
        others = x[~cells & ~np.isnan(x)]
        # Scores that are too large everywhere leave no such gap.
        is_apart = others.size > 0 and others.min() > 0.5 * x[cells].max(initial=-np.inf)
        return cells & (is_apart or bool(hidden.all()))

    def _have_mask_number(self, x: np.ndarray, hidden: np.ndarray) -> bool:
        """Return whether one number fills all hidden cells, or is added to them while all other
        scores are right.
        """
        recorded, expected = x[hidden], self.expected[hidden]
        if recorded.size < 2 or not np.isfinite(recorded).all():
            return False
        if not np.isfinite(self.expected).all():
            return False
        if np.ptp(recorded) == 0.0 and np.ptp(expected) > 0.0:
            return True
        added = recorded - expected
        is_one_number = np.ptp(added) <= 1e-3 * abs(added.mean())
        return bool(is_one_number) and self._agrees(np.where(hidden, self.expected, x))


def _joined(*words: str) -> str:
    return " and ".join([part for part in words if part])


def _without_last_column(x: np.ndarray) -> np.ndarray:
    return x[..., :-1]


def _without_first_column(x: np.ndarray) -> np.ndarray:
    return x[..., 1:]


def _in_other_pairs(x: np.ndarray, rope: Rope) -> Iterator[np.ndarray]:
    """Yield queries or keys whose rotated features come from pairs side by side, and from two
    halves.
    """
    order = replace(rope, pairs="half").pair_order(x.shape[-1])
    yield x[..., order]
    yield x[..., np.argsort(order)]


# ---- Orders of axes ------------------------------------------------------------------------------


def in_axes(
    x: np.ndarray, target: tuple[int, ...], letters: tuple[str, ...], *, may_broadcast: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield an array with the axes of `letters` in order, in every way that its shape allows, and
    its own axes.

    Args:
        x: the array.
        target: the sizes of the axes.
        letters: their names.
        may_broadcast: True if the array may have axes of size 1, or lack them.
    """
    for order in _orders(letters):
        shape = tuple([target[axis] for axis in order])
        names = [letters[axis] for axis in order]
        back = np.argsort(order)
        if x.shape == shape:
            words = ""
            if names != [*letters]:
                words = f"({', '.join(names)})"
            yield words, x.transpose(back)
        for first in range(len(target) - 1):
            # Two neighbors may be one axis.
            rest = first + 2
            joined = (*shape[:first], shape[first] * shape[first + 1], *shape[rest:])
            if x.shape == joined and joined != target:
                pair = f"{names[first]} * {names[first + 1]}"
                words = ", ".join([*names[:first], pair, *names[rest:]])
                yield f"({words})", x.reshape(shape).transpose(back)
        if target[0] == 1 and order[0] == 0 and x.shape == shape[1:]:
            yield f"({', '.join(names[1:])})", x[None].transpose(back)
    if may_broadcast and x.shape != target:
        yield from _broadcast(x, target, letters)


def _broadcast(
    x: np.ndarray, target: tuple[int, ...], letters: tuple[str, ...]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield an array of some axes only, the others being equal, with all axes."""
    for subset in _subsets(len(target)):
        sizes = tuple([target[axis] for axis in subset])
        shape = [1] * len(target)
        for axis in subset:
            shape[axis] = target[axis]
        if x.shape in (tuple(shape), sizes):
            names = [letters[axis] for axis in subset]
            yield f"({', '.join(names)})", np.broadcast_to(x.reshape(shape), target)


@cache
def _orders(letters: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Return the orders of axes, usual ones first."""
    count = len(letters)
    usual = [
        tuple(range(count)),
        (0, 2, 1, 3)[:count],  # (B, T, N, H)
        (2, 0, 1, 3),
        (1, 0, 2),
        (0, 1, 3, 2),
    ]
    usual_orders = []
    with_own_last_axis = []
    others = []
    for order in itertools.permutations(range(count)):
        if order in usual:
            usual_orders.append(order)
        elif order[-1] == count - 1:
            with_own_last_axis.append(order)
        else:
            others.append(order)
    usual_orders.sort(key=usual.index)
    return [*usual_orders, *with_own_last_axis, *others]


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    """Yield the subsets of a number of axes, those with the last axes first."""
    for size in range(count - 1, -1, -1):
        yield from sorted(itertools.combinations(range(count), size), reverse=True)
