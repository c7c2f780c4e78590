"""Bugs in a causal mask that a torch module holds as a buffer, made once for the longest input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parity.explain.conformance.signatures import library_of
from parity.explain.mutating.calls import Call, Injection, Run
from parity.explain.mutating.carriers import replaced_in_torch
from parity.explain.mutating.compare import Unfit


def _values(x: Any) -> tuple[Any, Any] | None:
    """Return the values of a causal mask for visible and hidden keys; None if it is not a causal
    mask.
    """
    if x.ndim < 2 or x.shape[-1] != x.shape[-2] or x.shape[-1] < 2:
        return None
    later = _later(x, 0).expand_as(x)
    seen, hidden = x[~later], x[later]
    if bool((seen == seen[0]).all() and (hidden == hidden[0]).all() and seen[0] != hidden[0]):
        return seen[0], hidden[0]
    return None


def _later(x: Any, offset: int) -> Any:
    """Return where key s > t + offset, in the shape (T, S) of a mask."""
    return x.new_ones(x.shape[-2:]).bool().triu(1 + offset)


def _buffer(hidden: Callable[[Any], Any]) -> Callable[[Call], Run | None]:
    """Make a bug of a module whose causal mask hides other keys; `hidden` maps the mask to those
    keys, (T, S).
    """

    def make(call: Call) -> Run | None:
        if call.owner is None or library_of(call.owner) != "torch":
            raise Unfit("it has no mask among its parameters")
        found = {
            name: (x, values)
            for name, x in call.owner.named_buffers()
            if (values := _values(x)) is not None
        }
        if not found:
            raise Unfit("it has no mask among its parameters, and no causal one among its buffers")
        if call.lengths[0] == 1:
            return None
        changed = {
            name: values[0].where(~hidden(x).expand_as(x), values[1])
            for name, (x, values) in found.items()
        }
        return lambda function: replaced_in_torch(call, changed, function)

    return make


BUFFERS = tuple(
    Injection(name, ("layer", "module"), _buffer(hidden))
    for name, hidden in (
        ("mask-flipped", lambda x: ~_later(x, 0)),
        ("mask-ignored", lambda x: _later(x, 0) & False),
        ("causal-off-by-one", lambda x: _later(x, 1)),
        ("causal-excludes-self", lambda x: _later(x, -1)),
    )
)
"""Bugs in masks that modules hold themselves."""
