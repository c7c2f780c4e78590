"""Bugs in masks, the causal flag and padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from parity.explain.mutating.calls import BuggyCall, Call, Function, Injection
from parity.explain.mutating.compare import Unfit, dtype_name
from parity.explain.mutating.view import OTHER_NEEDS
from parity.measure.core.orders import reordered

FORBIDDEN = -1e4  # smaller values hide keys in an additive mask


# ---- Masks of any kind ---------------------------------------------------------------------------


def is_added(mask: Any) -> bool:
    """Return whether a mask is added to scores."""
    return "float" in dtype_name(mask)


def _is_boolean(mask: Any) -> bool:
    return dtype_name(mask).startswith("bool")


def _hidden_by(call: Call, mask: Any) -> Any:
    """Return where a mask hides, for any kind: booleans, 0 and 1, or values added to scores.

    Raises:
        Unfit: if the meaning of True in it is unknown.
    """
    if is_added(mask):
        return mask <= FORBIDDEN
    _check_polarity(call)
    if call.view.mask_true == "hides":
        return mask != 0
    return mask == 0


def _check_polarity(call: Call) -> None:
    """Raise `Unfit` if the meaning of True in a mask is unknown."""
    if not call.view.mask_true:
        raise Unfit(OTHER_NEEDS["polarity"])


def _with_hidden(call: Call, mask: Any, hidden: Any) -> Any:
    """Return a mask of the same kind that hides other keys."""
    xp = call.xp
    if is_added(mask):
        shown = xp.where(mask <= FORBIDDEN, xp.zeros_like(mask), mask)
        return xp.where(hidden, xp.full_like(shown, float("-inf")), shown)
    is_true = hidden
    if call.view.mask_true != "hides":
        is_true = ~hidden
    if _is_boolean(mask):
        return is_true
    return xp.where(is_true, xp.ones_like(mask), xp.zeros_like(mask))


def _is_square(call: Call, mask: Any) -> bool:
    """Return whether a mask has a row for each query and a column for each key."""
    return mask is not None and mask.ndim >= 2 and tuple(mask.shape[-2:]) == call.lengths


def _flipped(call: Call) -> Call | None:
    mask = call.get("mask")
    if mask is None:
        return None
    if _is_boolean(mask):
        return call.but(mask=~mask)
    if is_added(mask):
        return call.but(mask=_with_hidden(call, mask, ~_hidden_by(call, mask)))
    return call.but(mask=1 - mask)


def _ignored(call: Call) -> Call | None:
    mask = call.get("mask")
    if mask is None:
        return None
    if call.view.mask_true or is_added(mask):
        nothing_hidden = _hidden_by(call, mask) & False
        return call.but(mask=_with_hidden(call, mask, nothing_hidden))
    if call.view.roles["mask"] in call.view.optional:
        return call.but(mask=None)
    return None


# ---- The causal mask -----------------------------------------------------------------------------


def _causal_flag_ignored(call: Call) -> Call | None:
    if not call.get("is_causal"):
        return None
    return call.but(is_causal=False)


def _causal_flag_unasked(call: Call) -> Call | None:
    if call.get("is_causal") or call.lengths[0] <= 1:
        return None
    return call.but(is_causal=True)


Hides = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Returns which keys a wrong causal mask hides, from positions t (T, 1) and s (S,)."""


def _beyond_next(t: np.ndarray, s: np.ndarray) -> np.ndarray:
    return s > t + 1


def _from_itself(t: np.ndarray, s: np.ndarray) -> np.ndarray:
    return s >= t


def _with_causal_mask(call: Call, *, hides: Hides) -> BuggyCall | None:
    """Hide other keys than a causal mask does: the mask of the flag, or a mask that is causal."""
    num_queries, num_keys = call.lengths
    first_query = 0
    if call.view.causal == "bottom-right":
        first_query = num_keys - num_queries
    t = np.arange(num_queries)[:, None] + first_query
    s = np.arange(num_keys)
    is_later = np.broadcast_to(s > t, (num_queries, num_keys))
    wrongly_hidden = np.broadcast_to(hides(t, s), (num_queries, num_keys))
    mask = call.get("mask")
    if call.get("is_causal"):
        return _with_mask_for_flag(call, mask, wrongly_hidden)
    if not _is_square(call, mask) or num_queries == 1:
        return None
    later = call.array(is_later.copy())
    wrong = call.array(wrongly_hidden.copy())
    hidden = _hidden_by(call, mask)
    # Traced masks have no values yet, so whether one is causal is decided in the call.
    is_causal = (hidden | ~later).all()
    changed = call.xp.where(is_causal, (hidden & ~later) | wrong, hidden)
    return call.but(mask=_with_hidden(call, mask, changed))


def _with_mask_for_flag(call: Call, mask: Any, wrongly_hidden: np.ndarray) -> BuggyCall | None:
    """Hide keys by a mask instead of by the causal flag, together with the keys that the call's
    mask hides.
    """
    unflagged = call.but(is_causal=False)
    if mask is None:
        return MaskOfAnyShape(unflagged, wrongly_hidden)
    if not _is_square(call, mask):
        return None
    hidden = _hidden_by(call, mask) | call.array(wrongly_hidden.copy())
    return unflagged.but(mask=_with_hidden(call, mask, hidden))


def _aligned_otherwise(call: Call) -> BuggyCall | None:
    """Align the causal flag's mask to the first key instead of the last, or vice versa."""
    num_queries, num_keys = call.lengths
    if not call.get("is_causal") or num_queries == num_keys or call.get("mask") is not None:
        return None
    first_query = num_keys - num_queries
    if call.view.causal == "bottom-right":
        first_query = 0
    shown = np.tri(num_queries, num_keys, first_query, dtype=bool)
    return MaskOfAnyShape(call.but(is_causal=False), ~shown)


class MaskOfAnyShape:
    """A call without a mask that gets one, in the first shape that works.

    Args:
        call: the call.
        hidden: the keys that the mask hides, (T, S).

    Raises:
        Unfit: if the meaning of True in it is unknown.
    """

    def __init__(self, call: Call, hidden: np.ndarray) -> None:
        _check_polarity(call)
        self.call = call
        self.is_true = hidden
        if call.view.mask_true != "hides":
            self.is_true = ~hidden

    def run(self, function: Function) -> Any:
        """Return the result with the mask in the first shape that raises no error."""
        query = self.call.get("query")
        num_queries, num_keys = self.is_true.shape
        shapes: list[tuple[int, ...]] = [(num_queries, num_keys)]
        if query.ndim > 2:
            batch = query.shape[0]
            shapes = [
                (batch, 1, num_queries, num_keys),
                (num_queries, num_keys),
                (batch, num_queries, num_keys),
            ]
        errors = []
        for shape in shapes:
            mask = np.broadcast_to(self.is_true, shape).copy()
            try:
                return function(self.call.but(mask=self.call.array(mask)))
            except Exception as error:  # the next shape may work
                errors.append(error)
        raise errors[0]


# ---- Padding -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrongPadding:
    """A bug in padding, however it is passed.

    Attributes:
        of_hidden: returns wrongly hidden tokens for hidden ones, (B, S) each, with the array module
            before them.
        of_lengths: returns wrong lengths (B,) for right ones and S; None if lengths cannot express
            the bug, because they have no side.
    """

    of_hidden: Callable[[Any, Any], Any]
    of_lengths: Callable[[Any, int], Any] | None

    def __call__(self, call: Call) -> Call | None:
        """Return the call with other padding or lengths; None if it has neither."""
        padding = call.get("padding")
        if padding is not None:
            return call.but(padding=self._of_mask(call, padding))
        lengths = call.get("lengths")
        if lengths is None or self.of_lengths is None:
            return None
        return call.but(lengths=self.of_lengths(lengths, call.lengths[1]))

    def _of_mask(self, call: Call, padding: Any) -> Any:
        true_hides = call.view.padding_true == "hides"
        hidden = padding != 0
        if not true_hides:
            hidden = ~hidden
        is_true = self.of_hidden(call.xp, hidden)
        if not true_hides:
            is_true = ~is_true
        if _is_boolean(padding):
            return is_true
        return call.xp.where(is_true, 1, 0)


def _nothing(_: Any, hidden: Any) -> Any:
    # An operation of any framework that keeps the shape, dtype and device.
    return hidden & False


def _full_lengths(lengths: Any, num_keys: int) -> Any:
    return lengths * 0 + num_keys


def _on_the_left(_: Any, hidden: Any) -> Any:
    return reordered(hidden, np.arange(hidden.shape[-1])[::-1], -1)


def _one_later(xp: Any, hidden: Any) -> Any:
    first_is_visible = hidden[..., :1] & False
    return xp.concatenate([first_is_visible, hidden[..., :-1]], -1)


def _longer_by_one(lengths: Any, num_keys: int) -> Any:
    return lengths + (lengths < num_keys)


def _one_earlier(xp: Any, hidden: Any) -> Any:
    last_is_hidden = hidden[..., -1:] | True
    return xp.concatenate([hidden[..., 1:], last_is_hidden], -1)


def _shorter_by_one(lengths: Any, _: int) -> Any:
    # torch adds booleans to floats, but does not subtract them.
    return lengths + -1 * (lengths > 0)


# ---- All -----------------------------------------------------------------------------------------

FLAG = ("is_causal",)
TOP_LEFT = ("is_causal", "mask", "polarity", "top-left")
BOTTOM_RIGHT = ("is_causal", "mask", "polarity", "bottom-right")
PADDING = ("padding", "padding polarity")

MASKS = (
    Injection("mask-flipped", ("mask",), _flipped),
    Injection("mask-ignored", ("mask",), _ignored),
    Injection("causal-ignored", FLAG, _causal_flag_ignored),
    Injection("causal-unasked", FLAG, _causal_flag_unasked),
    Injection("causal-off-by-one", ("mask",), partial(_with_causal_mask, hides=_beyond_next)),
    Injection("causal-excludes-self", ("mask",), partial(_with_causal_mask, hides=_from_itself)),
    Injection("causal-bottom-right", TOP_LEFT, _aligned_otherwise),
    Injection("causal-top-left", BOTTOM_RIGHT, _aligned_otherwise),
    Injection("padding-ignored", PADDING, WrongPadding(_nothing, _full_lengths)),
    Injection("padding-on-the-left", PADDING, WrongPadding(_on_the_left, None)),
    Injection("padding-off-by-one", PADDING, WrongPadding(_one_later, _longer_by_one)),
    Injection("padding-off-by-minus-one", PADDING, WrongPadding(_one_earlier, _shorter_by_one)),
)
"""Bugs in masks. A causal mask has one of the two alignments, and the other one is injected."""
