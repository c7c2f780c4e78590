"""Bugs in a causal mask that a torch module holds as a buffer, made once for the longest input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from parity.explain.conformance.signatures import library_of
from parity.explain.mutating.calls import BuggyCall, Call, Injection
from parity.explain.mutating.carriers import ReplacedTensors
from parity.explain.mutating.compare import Unfit


def _with_other_mask(call: Call, *, hides: Callable[[Any], Any]) -> BuggyCall | None:
    """Let a module's causal mask hide other keys.

    Args:
        call: the call.
        hides: returns the keys that the wrong mask hides, (T, S), for the mask.

    Raises:
        Unfit: if it has no module of torch, or none of its buffers is a causal mask.
    """
    if call.owner is None or library_of(call.owner) != "torch":
        raise Unfit("it has no mask among its parameters")
    changed = {}
    for name, mask in call.owner.named_buffers():
        values = _values_in_causal_mask(mask)
        if values is not None:
            shown, hidden = values
            changed[name] = shown.where(~hides(mask).expand_as(mask), hidden)
    if not changed:
        raise Unfit("it has no mask among its parameters, and no causal one among its buffers")
    if call.lengths[0] == 1:
        return None
    return ReplacedTensors(call, changed)


def _values_in_causal_mask(mask: Any) -> tuple[Any, Any] | None:
    """Return the values of a causal mask for shown and hidden keys; None if it is not a causal
    mask.
    """
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2:
        return None
    is_later = _later_keys(mask).expand_as(mask)
    shown = mask[~is_later]
    hidden = mask[is_later]
    has_two_values = (shown == shown[0]).all() and (hidden == hidden[0]).all()
    if not has_two_values or shown[0] == hidden[0]:
        return None
    return shown[0], hidden[0]


# ---- Keys that a mask (…, T, S) hides, (T, S) ----------------------------------------------------


def _later_keys(mask: Any, *, by_more_than: int = 0) -> Any:
    """Return where key s is later than query t by more than a number of tokens."""
    return mask.new_ones(mask.shape[-2:]).bool().triu(1 + by_more_than)


def _keys_until_query(mask: Any) -> Any:
    return ~_later_keys(mask)


def _no_keys(mask: Any) -> Any:
    return mask.new_zeros(mask.shape[-2:]).bool()


NEEDS = ("layer", "module")

BUFFERS = (
    Injection("mask-flipped", NEEDS, partial(_with_other_mask, hides=_keys_until_query)),
    Injection("mask-ignored", NEEDS, partial(_with_other_mask, hides=_no_keys)),
    Injection(
        "causal-off-by-one",
        NEEDS,
        partial(_with_other_mask, hides=partial(_later_keys, by_more_than=1)),
    ),
    Injection(
        "causal-excludes-self",
        NEEDS,
        partial(_with_other_mask, hides=partial(_later_keys, by_more_than=-1)),
    ),
)
"""Bugs in masks that modules hold themselves."""
