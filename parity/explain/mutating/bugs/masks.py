"""Bugs in masks, the causal flag and padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parity.explain.mutating.calls import Call, Injection, Run, taken, with_call
from parity.explain.mutating.compare import Unfit
from parity.explain.mutating.view import OTHER_NEEDS

FORBIDDEN = -1e4  # smaller numbers hide keys in an additive mask


# ---- Masks of any kind ---------------------------------------------------------------------------


def _is_added(mask: Any) -> bool:
    return "float" in str(mask.dtype)


def _hidden(call: Call, mask: Any) -> Any:
    """Return where a mask hides, for any kind: booleans, numbers 0 and 1, or numbers added to
    scores.
    """
    if _is_added(mask):
        return mask <= FORBIDDEN
    if not call.view.mask_true:
        raise Unfit(OTHER_NEEDS["polarity"])
    true = mask != 0
    return true if call.view.mask_true == "hides" else ~true


def _with_hidden(call: Call, mask: Any, hidden: Any) -> Any:
    """Return a mask of the same kind that hides other keys."""
    xp = call.xp
    if _is_added(mask):
        shown = xp.where(mask <= FORBIDDEN, xp.zeros_like(mask), mask)
        return xp.where(hidden, xp.full_like(shown, float("-inf")), shown)
    true = hidden if call.view.mask_true == "hides" else ~hidden
    return (
        true
        if "bool" in str(mask.dtype)
        else xp.where(true, xp.ones_like(mask), xp.zeros_like(mask))
    )


def _is_square(call: Call, mask: Any) -> bool:
    """Return whether a mask has a row for each query and a column for each key."""
    return mask is not None and mask.ndim >= 2 and tuple(mask.shape[-2:]) == call.lengths


def _flipped(call: Call) -> Call | None:
    mask = call.get("mask")
    if mask is None:
        return None
    if "bool" in str(mask.dtype):
        return call.but(mask=~mask)
    return call.but(
        mask=_with_hidden(call, mask, ~_hidden(call, mask)) if _is_added(mask) else 1 - mask
    )


def _ignored(call: Call) -> Call | None:
    mask = call.get("mask")
    if mask is None:
        return None
    if call.view.mask_true or _is_added(mask):
        return call.but(mask=_with_hidden(call, mask, _hidden(call, mask) & False))
    return call.but(mask=None) if call.view.roles["mask"] in call.view.optional else None


# ---- The causal mask -----------------------------------------------------------------------------


def _with_own_mask(call: Call, hidden: np.ndarray) -> Run:
    """Make a run with its own mask (T, S), in the first shape that works."""
    if not call.view.mask_true:
        raise Unfit(OTHER_NEEDS["polarity"])
    query = call.get("query")
    batch = query.shape[0]
    shapes = [(batch, 1, *hidden.shape), hidden.shape, (batch, *hidden.shape)]

    def run(function: Callable[[Call], Any]) -> Any:
        errors = []
        for shape in shapes if query.ndim > 2 else shapes[1:2]:
            true = np.broadcast_to(hidden if call.view.mask_true == "hides" else ~hidden, shape)
            try:
                return function(call.but(mask=call.array(true.copy())))
            except Exception as error:  # the next shape may work
                errors.append(error)
        raise errors[0]

    return run


def _causal(wrong: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Call], Run | None]:
    """Make a bug in the causal mask: keys where `wrong(t, s)` is true are hidden, instead of those
    of the flag.

    A mask that is passed is changed if it is causal.
    """

    def make(call: Call) -> Run | None:
        (num_queries, num_keys), mask = call.lengths, call.get("mask")
        offset = num_keys - num_queries if call.view.causal == "bottom-right" else 0
        t, s = np.arange(num_queries)[:, None] + offset, np.arange(num_keys)
        others = np.broadcast_to(wrong(t, s), (num_queries, num_keys))
        if call.get("is_causal"):
            plain = call.but(is_causal=False)
            if mask is None:
                return _with_own_mask(plain, others)
            if not _is_square(call, mask):
                return None
            changed = _hidden(call, mask) | call.array(others.copy())
            return lambda function: function(plain.but(mask=_with_hidden(call, mask, changed)))
        if not _is_square(call, mask) or num_queries == 1:
            return None
        later, hidden = call.array(np.broadcast_to(s > t, others.shape).copy()), _hidden(call, mask)
        is_causal = (hidden | ~later).all()
        changed = call.xp.where(is_causal, (hidden & ~later) | call.array(others.copy()), hidden)
        return lambda function: function(call.but(mask=_with_hidden(call, mask, changed)))

    return make


def _other_alignment(call: Call) -> Run | None:
    num_queries, num_keys = call.lengths
    if not call.get("is_causal") or num_queries == num_keys or call.get("mask") is not None:
        return None
    offset = 0 if call.view.causal == "bottom-right" else num_keys - num_queries
    return _with_own_mask(
        call.but(is_causal=False), ~np.tri(num_queries, num_keys, offset, dtype=bool)
    )


def _unasked(call: Call) -> Call | None:
    return call.but(is_causal=True) if not call.get("is_causal") and call.lengths[0] > 1 else None


# ---- Padding -------------------------------------------------------------------------------------


def _padding(
    of_mask: Callable[[Call, Any], Any], of_lengths: Callable[[Any, int], Any]
) -> Callable[[Call], Run | None]:
    """Make a bug in padding: `of_mask` receives the padding (B, S), `of_lengths` the lengths (B,)
    and S.

    Lengths have no side; `of_lengths` returns None for bugs that they cannot express.
    """

    def change(call: Call) -> Call | None:
        padding, lengths = call.get("padding"), call.get("lengths")
        if padding is not None:
            true = padding != 0
            hidden = true if call.view.padding_true == "hides" else ~true
            other = of_mask(call, hidden)
            other = other if call.view.padding_true == "hides" else ~other
            return call.but(
                padding=other if "bool" in str(padding.dtype) else call.xp.where(other, 1, 0)
            )
        if lengths is not None:
            shifted = of_lengths(lengths, call.lengths[1])
            return None if shifted is None else call.but(lengths=shifted)
        return None

    return with_call(change)


def _shifted(by: int) -> Callable[[Call, Any], Any]:
    def change(call: Call, hidden: Any) -> Any:
        ends = hidden[..., :1] & False if by > 0 else hidden[..., -1:] | True
        parts = [ends, hidden[..., :-1]] if by > 0 else [hidden[..., 1:], ends]
        return call.xp.concatenate(parts, -1)

    return change


def _reversed(call: Call, hidden: Any) -> Any:
    return taken(hidden, np.arange(hidden.shape[-1])[::-1], -1)


OF_PADDING = ("padding", "padding polarity")

MASKS = (
    Injection("mask-flipped", ("mask",), with_call(_flipped)),
    Injection("mask-ignored", ("mask",), with_call(_ignored)),
    Injection(
        "causal-ignored",
        ("is_causal",),
        with_call(lambda call: call.but(is_causal=False) if call.get("is_causal") else None),
    ),
    Injection("causal-unasked", ("is_causal",), with_call(_unasked)),
    Injection("causal-off-by-one", ("mask",), _causal(lambda t, s: s > t + 1)),
    Injection("causal-excludes-self", ("mask",), _causal(lambda t, s: s >= t)),
    Injection(
        "causal-bottom-right", ("is_causal", "mask", "polarity", "top-left"), _other_alignment
    ),
    Injection(
        "causal-top-left", ("is_causal", "mask", "polarity", "bottom-right"), _other_alignment
    ),
    Injection(
        "padding-ignored",
        OF_PADDING,
        _padding(lambda _, hidden: hidden & False, lambda lengths, s: lengths * 0 + s),
    ),
    Injection("padding-on-the-left", OF_PADDING, _padding(_reversed, lambda lengths, s: None)),
    Injection(
        "padding-off-by-one",
        OF_PADDING,
        _padding(_shifted(1), lambda lengths, s: lengths + (lengths < s)),
    ),
    Injection(
        "padding-off-by-minus-one",
        OF_PADDING,
        _padding(_shifted(-1), lambda lengths, s: lengths + -1 * (lengths > 0)),
    ),
)
"""Bugs in masks. A causal mask has one of the two alignments, and the other one is injected."""
