"""Mistakes that cannot be made from outside: our own attention with the mistake in it takes the place of the user's.

It does so only for calls for which ours gives what theirs gives, so that nothing but the mistake is different.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.mutating.calls import Call, Function, Planted, Run, on_output
from parity.mutating.compare import Unfit, is_traced, same
from parity.mutating.mistakes.masks import FORBIDDEN

if TYPE_CHECKING:
    from parity.diagnosis.mistakes import Plan

UNKNOWN = ("padding", "lengths", "bias", "sinks", "soft_cap", "window", "cos", "positions", "cache")
"""What ours is not given: a call with one of them stays the user's."""


@cache
def _plan(name: str, backend: str) -> Plan:
    """A known mistake in the functions of a sibling; the mistakes here do not depend on the case."""
    from mha_spec import AttentionSpec
    from parity.core.cases import Case  # these take longer to import than most tests run
    from parity.core.problem import make_problem
    from parity.diagnosis.planting import plan_of

    case = Case("ours", AttentionSpec(32, 4), "any that has a mask", seq_len=5, is_causal=True)
    return plan_of(name, make_problem(case, "float32"), backend)


def _four_axes(call: Call, x: Any) -> Any:
    x = x if call.view.axes == "BNTH" else x.swapaxes(-3, -2)
    return x if x.ndim == 4 else x[None]


def _masks(call: Call) -> tuple[Any, Any]:
    """Where the call hides, and what it adds to the scores: each broadcastable to (B, N, T, S), or None."""
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
        later = call.array(~np.tri(t, s, s - t if call.view.causal == "bottom-right" else 0, dtype=bool))[None, None]
        hidden = later if hidden is None else hidden | later
    return hidden, bias


def _attention(call: Call, softmax: Callable[..., Any]) -> Any:
    """Ours for a call, with a softmax, in the axes of the call."""
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


def _planted(name: str) -> Callable[[Call], Run | None]:
    def make(call: Call) -> Run | None:
        if any(call.get(role) is not None for role in UNKNOWN):
            return None
        plan = _plan(name, call.view.framework)
        right = plan.sibling.masked_softmax
        wrong = partial(plan.functions["masked_softmax"], plan, right)

        def run(function: Function) -> Any:
            def instead(theirs: Any) -> Any:
                try:
                    ours, other = _attention(call, right), _attention(call, wrong)
                except (ValueError, TypeError, RuntimeError, IndexError) as error:
                    raise Unfit(f"ours does not take such a call: {error}") from error
                if tuple(ours.shape) != tuple(theirs.shape):
                    raise Unfit("ours gives another shape than yours")
                if is_traced(theirs):
                    close = call.xp.allclose(ours, theirs, rtol=1e-3, atol=1e-3, equal_nan=True)
                    return call.xp.where(close, other.astype(theirs.dtype), theirs)
                if not same(ours, theirs):
                    raise Unfit("ours gives something else than yours for such a call")
                return other.to(theirs.dtype) if call.view.framework == "torch" else other.astype(theirs.dtype)

            return on_output(function(call), instead)

        return run

    return make


OURS = (
    *(
        Planted(
            f"softmax-over-{axis}",
            f"the softmax is over the {axis}",
            ("heads", "ours"),
            _planted(f"softmax-over-{axis}"),
        )
        for axis in ("queries", "heads", "batch")
    ),
    Planted(
        "mask-after-softmax",
        "the mask is applied after the softmax",
        ("heads", "mask", "ours"),
        _planted("mask-after-softmax"),
    ),
)
"""What is planted in ours, which then stands in for the user's."""
