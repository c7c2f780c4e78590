"""Bugs that cannot be injected from outside: our own attention with the bug replaces the user's.

It does so only for calls for which ours and theirs agree, so that the bug is the only difference.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from parity.explain.mutating.bugs.masks import FORBIDDEN
from parity.explain.mutating.calls import Call, Function, Injection, Run, on_output
from parity.explain.mutating.compare import Unfit, is_traced, same

UNKNOWN = ("padding", "lengths", "bias", "sinks", "soft_cap", "window", "cos", "positions", "cache")
"""Roles that our attention does not receive: a call with one of them is left unchanged."""

Softmax = Callable[[Any, Any], Any]
"""Accepts scores (B, N, T, S), and which of them are hidden."""

Wrong = Callable[[Any, Softmax, Any, Any], Any]
"""Adds a bug to a softmax: `wrong(xp, right, scores, mask)`."""


def _four_axes(call: Call, x: Any) -> Any:
    x = x if call.view.axes == "BNTH" else x.swapaxes(-3, -2)
    return x if x.ndim == 4 else x[None]


def _masks(call: Call) -> tuple[Any, Any]:
    """Return which keys the call hides, and what it adds to the scores: broadcastable to (B, N, T,
    S), or None.
    """
    mask, hidden, bias = call.get("mask"), None, None
    if mask is not None:
        mask = mask[:, None] if mask.ndim == 3 else mask[(None,) * (4 - mask.ndim)]
        if "float" in str(mask.dtype):
            hidden = mask <= FORBIDDEN
            bias = call.xp.where(hidden, call.xp.zeros_like(mask), mask)
        else:
            hidden = (mask != 0) if call.view.mask_true == "hides" else (mask == 0)
    if call.get("is_causal"):
        t, s = call.lengths
        later = call.array(
            ~np.tri(t, s, s - t if call.view.causal == "bottom-right" else 0, dtype=bool)
        )[None, None]
        hidden = later if hidden is None else hidden | later
    return hidden, bias


def _attention(call: Call, softmax: Softmax) -> Any:
    """Compute a call with our attention and a given softmax, in the axes of the call."""
    sibling = importlib.import_module(f"mha_{call.view.framework}")
    query, key, value = (_four_axes(call, call.get(role)) for role in ("query", "key", "value"))
    scale = call.get("scale")
    if isinstance(scale, (int, float)):
        query = query * (scale * query.shape[-1] ** 0.5)
    hidden, bias = _masks(call)
    scores = sibling.attention_scores(query, key, bias)
    context = sibling.attention_context(softmax(scores, hidden), value)
    context = context if call.get("query").ndim == 4 else context[0]
    return context if call.view.axes == "BNTH" else context.swapaxes(-3, -2)


def _softmax_over(axis: int) -> Wrong:
    """Take the softmax over another axis of the scores."""

    def softmax(_: Any, right: Softmax, scores: Any, mask: Any) -> Any:
        if mask is not None:
            mask = (mask | (scores != scores) & False).swapaxes(
                axis, 3
            )  # in the full shape of the scores
        return right(scores.swapaxes(axis, 3), mask).swapaxes(axis, 3)

    return softmax


def _mask_after_softmax(xp: Any, right: Softmax, scores: Any, mask: Any) -> Any:
    found = right(scores, None)
    return found if mask is None else xp.where(mask, 0.0, found)


def _injection(change: Wrong) -> Callable[[Call], Run | None]:
    def make(call: Call) -> Run | None:
        if any(call.get(role) is not None for role in UNKNOWN):
            return None
        right = importlib.import_module(f"mha_{call.view.framework}").masked_softmax
        wrong = partial(change, call.xp, right)

        def run(function: Function) -> Any:
            def instead(theirs: Any) -> Any:
                try:
                    ours, other = _attention(call, right), _attention(call, wrong)
                except (ValueError, TypeError, RuntimeError, IndexError) as error:
                    raise Unfit(f"ours does not support such a call: {error}") from error
                if tuple(ours.shape) != tuple(theirs.shape):
                    raise Unfit("ours returns another shape than yours")
                if is_traced(theirs):
                    close = call.xp.allclose(ours, theirs, rtol=1e-3, atol=1e-3, equal_nan=True)
                    return call.xp.where(close, other.astype(theirs.dtype), theirs)
                if not same(ours, theirs):
                    raise Unfit("ours returns another result than yours for such a call")
                return (
                    other.to(theirs.dtype)
                    if call.view.framework == "torch"
                    else other.astype(theirs.dtype)
                )

            return on_output(function(call), instead)

        return run

    return make


OURS = (
    *(
        Injection(f"softmax-over-{words}", ("heads", "ours"), _injection(_softmax_over(axis)))
        for words, axis in (("queries", 2), ("heads", 1), ("batch", 0))
    ),
    Injection("mask-after-softmax", ("heads", "mask", "ours"), _injection(_mask_after_softmax)),
)
"""Bugs in our attention, which then replaces the user's."""
