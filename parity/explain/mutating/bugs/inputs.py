"""Bugs in queries, keys and values, and in values derived from them: exchanged, reordered, scaled,
rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from parity.explain.mutating.calls import Call, Injection, Run, on_output, taken, with_call

HEADS = ("heads", "key", "value")

# ---- Exchanged -----------------------------------------------------------------------------------


def _exchanged(one: str, other: str) -> Callable[[Call], Run | None]:
    def change(call: Call) -> Call | None:
        first, second = call.get(one), call.get(other)
        if first is None or second is None or first is second:
            return None
        return call.but(**{one: second, other: first})

    return with_call(change)


def _batch_as_tokens(call: Call) -> Run | None:
    """Exchange the first two axes of a layer's inputs and output."""
    given = {role: x for role in ("query", "key", "value") if (x := call.get(role)) is not None}
    if any(getattr(x, "ndim", 0) != 3 or x.shape[0] == 1 for x in given.values()):
        return None
    other = call.but(**{role: x.swapaxes(0, 1) for role, x in given.items()})
    return lambda function: on_output(function(other), lambda output: output.swapaxes(0, 1))


# ---- Heads ---------------------------------------------------------------------------------------


def _reordered(
    role: str, order: Callable[[np.ndarray], np.ndarray], fewest: int
) -> Callable[[Call], Run | None]:
    def change(call: Call) -> Call | None:
        x = call.get(role)
        count = x.shape[call.head_axis]
        return (
            call.but(**{role: taken(x, order(np.arange(count)), call.head_axis)})
            if count >= fewest
            else None
        )

    return with_call(change)


def _tiled(call: Call) -> Run | None:
    """Make query head n use key/value head n % K, by exchanging it with a head that uses that
    one.
    """
    num_heads, num_kv_heads = (call.get(role).shape[call.head_axis] for role in ("query", "key"))
    if not 1 < num_kv_heads < num_heads:
        return None
    order = (
        np.arange(num_heads).reshape(-1, num_kv_heads).T.ravel()
    )  # heads that share a key/value head, side by side
    other = call.but(query=taken(call.get("query"), order, call.head_axis))
    back = np.argsort(order)
    return lambda function: on_output(
        function(other), lambda output: taken(output, back, call.head_axis)
    )


def _misread(x: Any, *, is_moved: bool) -> Any:
    """Return heads after a reshape without the transpose of heads and tokens; `is_moved` if x is
    already transposed.
    """
    if is_moved:
        return x.swapaxes(-3, -2).reshape(x.shape)
    *batch, first, second, size = x.shape
    return x.reshape(*batch, second, first, size).swapaxes(-3, -2)


def _heads_not_moved(call: Call) -> Call | None:
    if call.get("query").shape[call.head_axis] == 1:
        return None
    is_moved = call.view.axes == "BNTH"
    return call.but(
        **{role: _misread(call.get(role), is_moved=is_moved) for role in ("query", "key", "value")}
    )


def _heads_not_moved_back(call: Call) -> Run | None:
    if call.get("query").shape[call.head_axis] == 1:
        return None
    is_moved = call.view.axes == "BTNH"
    return lambda function: on_output(
        function(call), lambda output: _misread(output, is_moved=is_moved)
    )


# ---- Scale ---------------------------------------------------------------------------------------


def _divisor(call: Call) -> float:
    """Return the divisor of the scores: sqrt(H), or the one that the call specifies."""
    scale = call.get("scale")
    return (
        1.0 / float(scale)
        if isinstance(scale, (int, float)) and scale
        else math.sqrt(call.get("query").shape[-1])
    )


Divisor = Callable[[float, int, int], float]
"""Maps the divisor of scores, H and the width of q to a wrong divisor."""

SCALES: dict[str, Divisor] = {
    "scale-missing": lambda right, size, width: 1.0,
    "scale-squared": lambda right, size, width: right**2,
    "scale-by-d-model": lambda right, size, width: math.sqrt(width),
}


def _scaled(divisor: Divisor) -> Callable[[Call], Run | None]:
    def change(call: Call) -> Call | None:
        query, right = call.get("query"), _divisor(call)
        size = query.shape[-1]
        wrong = divisor(right, size, size * query.shape[call.head_axis])
        return None if math.isclose(wrong, right) else call.but(query=query * (right / wrong))

    return with_call(change)


def _after_softmax(call: Call) -> Run | None:
    right = _divisor(call)
    if right == 1.0:
        return None
    other = call.but(query=call.get("query") * right)
    return lambda function: on_output(function(other), lambda output: output / right)


# ---- Precision -----------------------------------------------------------------------------------


def _rounded(call: Call) -> Call | None:
    given = {role: x for role in ("query", "key", "value") if (x := call.get(role)) is not None}
    wide = {
        role: x
        for role, x in given.items()
        if str(x.dtype).split(".")[-1] in ("float32", "float64")
    }
    if not wide:
        return None
    if call.view.framework == "torch":
        return call.but(**{role: x.to(call.xp.bfloat16).to(x.dtype) for role, x in wide.items()})
    return call.but(**{role: x.astype("bfloat16").astype(x.dtype) for role, x in wide.items()})


ORDERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], int]] = {
    "reversed": (lambda heads: heads[::-1], 2),
    "rolled": (lambda heads: np.roll(heads, 1, axis=0), 3),
}
"""Wrong orders of heads along the first axis, and the fewest heads: for two heads both orders are
the same.
"""

INPUTS = (
    Injection("q-k-swapped", ("key",), _exchanged("query", "key")),
    Injection("k-v-swapped", ("key", "value"), _exchanged("key", "value")),
    Injection("q-v-swapped", ("value",), _exchanged("query", "value")),
    *(
        Injection(f"{role[0]}-heads-{word}", HEADS, _reordered(role, order, fewest))
        for role in ("query", "key", "value")
        for word, (order, fewest) in ORDERS.items()
    ),
    Injection("kv-heads-tiled", (*HEADS, "groups"), _tiled),
    Injection("heads-not-moved", HEADS, with_call(_heads_not_moved)),
    Injection("heads-not-moved-back", HEADS, _heads_not_moved_back),
    *(Injection(name, HEADS, _scaled(divisor)) for name, divisor in SCALES.items()),
    Injection(
        "scale-ignored", (*HEADS, "scale"), _scaled(lambda right, size, width: math.sqrt(size))
    ),
    Injection("scale-after-softmax", HEADS, _after_softmax),
    Injection("batch-as-tokens", ("layer",), _batch_as_tokens),
    Injection("precision-bfloat16", (), with_call(_rounded)),
)
"""Bugs in queries, keys and values."""
