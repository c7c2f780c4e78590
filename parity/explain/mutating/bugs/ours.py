"""Bugs that cannot be injected from outside: our own attention with the bug replaces the user's.

It does so only for calls for which ours and theirs agree, so that the bug is the only difference.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from parity.explain.mutating.bugs.masks import FORBIDDEN, is_added
from parity.explain.mutating.calls import BuggyCall, Call, Injection, OutputChanged
from parity.explain.mutating.compare import Unfit, is_traced, same

UNKNOWN = ("padding", "lengths", "bias", "sinks", "soft_cap", "window", "cos", "positions", "cache")
"""Roles that our attention does not receive: a call with one of them is left unchanged."""

# ---- Our attention -------------------------------------------------------------------------------

Softmax = Callable[[Any, Any], Any]
"""Accepts scores (B, N, T, S), and which of them are hidden."""


def _our_attention(call: Call, softmax: Softmax) -> Any:
    """Compute a call with our attention and a softmax, in the axes of the call."""
    sibling = _sibling_of(call)
    query = _four_axes(call, call.get("query"))
    key = _four_axes(call, call.get("key"))
    value = _four_axes(call, call.get("value"))
    scale = call.get("scale")
    if isinstance(scale, (int, float)):
        # attention_scores divides by sqrt(H).
        query = query * (scale * query.shape[-1] ** 0.5)
    hidden, bias = _masks(call)
    scores = sibling.attention_scores(query, key, bias)
    context = sibling.attention_context(softmax(scores, hidden), value)
    if call.get("query").ndim != 4:
        context = context[0]
    if call.view.axes == "BTNH":
        context = context.swapaxes(-3, -2)
    return context


def _sibling_of(call: Call) -> Any:
    """Return our package for the framework of a call."""
    return importlib.import_module(f"mha_{call.view.framework}")


def _four_axes(call: Call, x: Any) -> Any:
    """Return heads of a call as (B, N, T, H)."""
    if call.view.axes == "BTNH":
        x = x.swapaxes(-3, -2)
    if x.ndim != 4:
        x = x[None]
    return x


def _masks(call: Call) -> tuple[Any, Any]:
    """Return which keys the call hides, and what it adds to the scores: broadcastable to (B, N, T,
    S), or None.
    """
    hidden = None
    bias = None
    mask = call.get("mask")
    if mask is not None:
        if mask.ndim == 3:
            mask = mask[:, None]
        else:
            mask = mask[(None,) * (4 - mask.ndim)]
        if is_added(mask):
            hidden = mask <= FORBIDDEN
            bias = call.xp.where(hidden, call.xp.zeros_like(mask), mask)
        elif call.view.mask_true == "hides":
            hidden = mask != 0
        else:  # where the meaning of True is unknown, the comparison with theirs shows it
            hidden = mask == 0
    if call.get("is_causal"):
        later = _later_keys(call)
        if hidden is None:
            hidden = later
        else:
            hidden = hidden | later
    return hidden, bias


def _later_keys(call: Call) -> Any:
    """Return which keys the causal flag hides, (1, 1, T, S)."""
    num_queries, num_keys = call.lengths
    first_query = 0
    if call.view.causal == "bottom-right":
        first_query = num_keys - num_queries
    is_later = ~np.tri(num_queries, num_keys, first_query, dtype=bool)
    return call.array(is_later[None, None])


# ---- With a bug ----------------------------------------------------------------------------------

WrongSoftmax = Callable[[Any, Softmax, Any, Any], Any]
"""Adds a bug to a softmax: `wrong(xp, right, scores, hidden)`."""


def _softmax_over(_: Any, right: Softmax, scores: Any, hidden: Any, *, axis: int) -> Any:
    """Take the softmax over the wrong axis of the scores."""
    if hidden is not None:
        # In the full shape of the scores.
        hidden = hidden | (scores != scores) & False
        hidden = hidden.swapaxes(axis, 3)
    return right(scores.swapaxes(axis, 3), hidden).swapaxes(axis, 3)


def _mask_after_softmax(xp: Any, right: Softmax, scores: Any, hidden: Any) -> Any:
    attn_weights = right(scores, None)
    if hidden is None:
        return attn_weights
    return xp.where(hidden, 0.0, attn_weights)


def _replaced_by_ours(call: Call, *, wrong: WrongSoftmax) -> BuggyCall | None:
    """Return our result with a wrong softmax instead of the user's."""
    if any(call.get(role) is not None for role in UNKNOWN):
        return None
    return OutputChanged(call, OurOutput(call, wrong).instead_of)


@dataclass(frozen=True)
class OurOutput:
    """The output of our attention for a call.

    Attributes:
        call: the call.
        wrong: the bug.
    """

    call: Call
    wrong: WrongSoftmax

    def instead_of(self, theirs: Any) -> Any:
        """Return our output with the bug, in the dtype of the user's; if JAX traces, theirs where
        ours without the bug differs.

        Raises:
            Unfit: if ours without the bug differs from the user's.
        """
        right_softmax = _sibling_of(self.call).masked_softmax
        wrong_softmax = partial(self.wrong, self.call.xp, right_softmax)
        try:
            ours = _our_attention(self.call, right_softmax)
            wrong = _our_attention(self.call, wrong_softmax)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise Unfit(f"ours does not support such a call: {error}") from error
        if tuple(ours.shape) != tuple(theirs.shape):
            raise Unfit("ours returns a different shape than yours")
        wrong = self.call.with_dtype_of(wrong, theirs)
        if is_traced(theirs):
            xp = self.call.xp
            are_close = xp.allclose(ours, theirs, rtol=1e-3, atol=1e-3, equal_nan=True)
            return xp.where(are_close, wrong, theirs)
        if not same(ours, theirs):
            raise Unfit("ours returns a different result than yours for such a call")
        return wrong


OURS = (
    Injection(
        "softmax-over-queries",
        ("heads", "ours"),
        partial(_replaced_by_ours, wrong=partial(_softmax_over, axis=2)),
    ),
    Injection(
        "softmax-over-heads",
        ("heads", "ours"),
        partial(_replaced_by_ours, wrong=partial(_softmax_over, axis=1)),
    ),
    Injection(
        "softmax-over-batch",
        ("heads", "ours"),
        partial(_replaced_by_ours, wrong=partial(_softmax_over, axis=0)),
    ),
    Injection(
        "mask-after-softmax",
        ("heads", "mask", "ours"),
        partial(_replaced_by_ours, wrong=_mask_after_softmax),
    ),
)
"""Bugs in our attention, which then replaces the user's."""
