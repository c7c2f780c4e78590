"""Bugs in queries, keys and values, and in values derived from them: exchanged, reordered, scaled,
rounded.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from parity.explain.mutating.calls import BuggyCall, Call, Injection, OutputChanged
from parity.explain.mutating.compare import dtype_name
from parity.measure.core.divisors import WRONG_DIVISORS, wrong_divisors
from parity.measure.core.orders import HEAD_ORDERS, WrongHeadOrder, reordered, tiled_heads

# ---- Exchanged -----------------------------------------------------------------------------------


def _exchanged(call: Call, *, first: str, second: str) -> Call | None:
    """Pass two arguments for each other."""
    first_input = call.get(first)
    second_input = call.get(second)
    if first_input is None or second_input is None or first_input is second_input:
        return None
    return call.but(**{first: second_input, second: first_input})


def _batch_as_tokens(call: Call) -> BuggyCall | None:
    """Exchange the first two axes of a layer's inputs and output."""
    turned = {}
    for role, x in call.inputs().items():
        if getattr(x, "ndim", 0) != 3 or x.shape[0] == 1:
            return None
        turned[role] = _batch_and_tokens_exchanged(x)
    return OutputChanged(call.but(**turned), _batch_and_tokens_exchanged)


def _batch_and_tokens_exchanged(x: Any) -> Any:
    return x.swapaxes(0, 1)


# ---- Heads ---------------------------------------------------------------------------------------


def _with_heads_reordered(call: Call, *, role: str, wrong: WrongHeadOrder) -> Call | None:
    x = call.get(role)
    num_heads = x.shape[call.head_axis]
    if num_heads < wrong.fewest:
        return None
    return call.but(**{role: reordered(x, wrong.order(num_heads), call.head_axis)})


def _tiled(call: Call) -> BuggyCall | None:
    """Make query head n use key/value head n % K, by exchanging it with a head that uses that
    one.
    """
    query = call.get("query")
    num_heads = query.shape[call.head_axis]
    num_kv_heads = call.get("key").shape[call.head_axis]
    if not 1 < num_kv_heads < num_heads:
        return None
    order = tiled_heads(num_heads, num_kv_heads)
    tiled = call.but(query=reordered(query, order, call.head_axis))
    back = partial(reordered, order=np.argsort(order), axis=call.head_axis)
    return OutputChanged(tiled, back)


def _misread(x: Any, *, has_heads_first: bool) -> Any:
    """Return heads after a reshape without the transpose of heads and tokens.

    Args:
        x: heads (…, N, T, H) or (…, T, N, H).
        has_heads_first: whether x is (…, N, T, H), that is, transposed after the reshape.
    """
    if has_heads_first:
        return x.swapaxes(-3, -2).reshape(x.shape)
    *batch, num_tokens, num_heads, size = x.shape
    return x.reshape(*batch, num_heads, num_tokens, size).swapaxes(-3, -2)


def _heads_not_moved(call: Call) -> Call | None:
    if call.get("query").shape[call.head_axis] == 1:
        return None
    has_heads_first = call.view.axes == "BNTH"
    misread = {}
    for role in ("query", "key", "value"):
        misread[role] = _misread(call.get(role), has_heads_first=has_heads_first)
    return call.but(**misread)


def _heads_not_moved_back(call: Call) -> BuggyCall | None:
    if call.get("query").shape[call.head_axis] == 1:
        return None
    return OutputChanged(call, partial(_misread, has_heads_first=call.view.axes == "BTNH"))


# ---- Scale ---------------------------------------------------------------------------------------


def _own_scale(call: Call) -> float | None:
    """Return the scale that a call specifies, if any."""
    scale = call.get("scale")
    if isinstance(scale, (int, float)) and scale:
        return float(scale)
    return None


def _right_divisor(call: Call) -> float:
    """Return the divisor of the scores: sqrt(H), or the one that the call specifies."""
    scale = _own_scale(call)
    if scale is None:
        return math.sqrt(call.get("query").shape[-1])
    return 1.0 / scale


def _scaled(call: Call, *, bug: str) -> Call | None:
    """Divide scores by the wrong number of a bug, by scaling the queries."""
    query = call.get("query")
    head_dim = query.shape[-1]
    width = head_dim * query.shape[call.head_axis]
    wrong = wrong_divisors(head_dim, width, _own_scale(call))[bug]
    right = _right_divisor(call)
    if math.isclose(wrong, right):
        return None
    return call.but(query=query * (right / wrong))


def _scaled_after_softmax(call: Call) -> BuggyCall | None:
    """Divide the output instead of the scores."""
    divisor = _right_divisor(call)
    if divisor == 1.0:
        return None
    unscaled = call.but(query=call.get("query") * divisor)
    return OutputChanged(unscaled, partial(_divided, by=divisor))


def _divided(x: Any, *, by: float) -> Any:
    return x / by


# ---- Precision -----------------------------------------------------------------------------------


def _rounded(call: Call) -> Call | None:
    """Round the inputs to bfloat16, in their own dtype."""
    rounded = {}
    for role, x in call.inputs().items():
        if dtype_name(x) not in ("float32", "float64"):
            continue
        if call.view.framework == "torch":
            rounded[role] = x.bfloat16().to(x.dtype)
        else:
            rounded[role] = x.astype("bfloat16").astype(x.dtype)
    if not rounded:
        return None
    return call.but(**rounded)


# ---- All -----------------------------------------------------------------------------------------

NEEDS_HEADS = ("heads", "key", "value")


def _all_injections() -> tuple[Injection, ...]:
    injections = [
        Injection("q-k-swapped", ("key",), partial(_exchanged, first="query", second="key")),
        Injection(
            "k-v-swapped", ("key", "value"), partial(_exchanged, first="key", second="value")
        ),
        Injection("q-v-swapped", ("value",), partial(_exchanged, first="query", second="value")),
    ]
    for role in ("query", "key", "value"):
        for wrong_order in HEAD_ORDERS:
            name = f"{role[0]}-heads-{wrong_order.word}"
            make = partial(_with_heads_reordered, role=role, wrong=wrong_order)
            injections.append(Injection(name, NEEDS_HEADS, make))
    injections += [
        Injection("kv-heads-tiled", (*NEEDS_HEADS, "groups"), _tiled),
        Injection("heads-not-moved", NEEDS_HEADS, _heads_not_moved),
        Injection("heads-not-moved-back", NEEDS_HEADS, _heads_not_moved_back),
    ]
    for bug in WRONG_DIVISORS:
        injections.append(Injection(bug, NEEDS_HEADS, partial(_scaled, bug=bug)))
    injections += [
        Injection("scale-ignored", (*NEEDS_HEADS, "scale"), partial(_scaled, bug="scale-ignored")),
        Injection("scale-after-softmax", NEEDS_HEADS, _scaled_after_softmax),
        Injection("batch-as-tokens", ("layer",), _batch_as_tokens),
        Injection("precision-bfloat16", (), _rounded),
    ]
    return tuple(injections)


INPUTS = _all_injections()
"""Bugs in queries, keys and values."""
