"""A call of a user's attention with a mistake in it: what it is given is changed before, what it gives after."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.mutating.compare import copied
from parity.mutating.view import View

Function = Callable[["Call"], Any]
"""A user's attention, to be called in whichever way a `Call` says."""

Run = Callable[[Function], Any]
"""Calls it with a mistake."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call, by what they are for.

    Attributes:
        view: what is known of the callable.
        args, kwargs: as they were given; `self` left out.
        owner: the module whose method is called, if it is one.
    """

    view: View
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    owner: Any = None

    def get(self, role: str) -> Any:
        """What was given for a role; None if nothing was."""
        return self.named(self.view.roles.get(role, ""))

    def named(self, name: str) -> Any:
        """What was given for a parameter; None if nothing was."""
        if name in self.kwargs:
            return self.kwargs[name]
        place = self.view.order.index(name) if name in self.view.order else len(self.args)
        return self.args[place] if place < len(self.args) else None

    def but(self, **by_role: Any) -> Call:
        """The same call with other arguments, by role."""
        return self.but_named({self.view.roles[role]: value for role, value in by_role.items()})

    def but_named(self, values: Mapping[str, Any]) -> Call:
        """The same call with other arguments, by the names of parameters."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in values.items():
            place = self.view.order.index(name) if name in self.view.order else len(args)
            if name not in kwargs and place < len(args):
                args[place] = value
            else:
                kwargs[name] = value
        return Call(self.view, tuple(args), kwargs, self.owner)

    def copied(self) -> Call:
        """Copy everything in the call, so that it leaves nothing behind.

        Raises:
            Exception: whatever something raises that cannot be copied.
        """
        return Call(self.view, copied(self.args), copied(dict(self.kwargs)), copied(self.owner))

    @property
    def xp(self) -> Any:
        """Array functions of its framework."""
        return importlib.import_module("torch" if self.view.framework == "torch" else "jax.numpy")

    @property
    def head_axis(self) -> int:
        """Of inputs that are split into heads, counted from the end."""
        return -3 if self.view.axes == "BNTH" else -2

    @property
    def token_axis(self) -> int:
        """Of all inputs, counted from the end."""
        return -3 if self.view.axes == "BTNH" else -2

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S."""
        query, key = self.get("query"), self.get("key")
        return query.shape[self.token_axis], (query if key is None else key).shape[self.token_axis]

    def array(self, values: np.ndarray, like: Any = None) -> Any:
        """A NumPy array in the framework, where another array of the call lies."""
        like = self.get("query") if like is None else like
        made = self.xp.asarray(values)
        return made.to(like.device) if self.view.framework == "torch" else made


def taken(x: Any, places: np.ndarray, axis: int) -> Any:
    """An array of any framework with its entries along an axis in another order."""
    return x.swapaxes(0, axis)[np.ascontiguousarray(places)].swapaxes(0, axis)


def on_output(result: Any, change: Callable[[Any], Any]) -> Any:
    """What a call gave, its output changed: the whole, or the first of several."""
    if isinstance(result, tuple):
        first = change(result[0])
        return type(result)(first, *result[1:]) if hasattr(result, "_fields") else (first, *result[1:])
    return change(result)


def with_call(change: Callable[[Call], Call | None]) -> Callable[[Call], Run | None]:
    """A mistake that lies in what a call is given alone; None where it cannot be made in this call."""

    def make(call: Call) -> Run | None:
        other = change(call)
        return None if other is None else lambda function: function(other)

    return make


@dataclass(frozen=True)
class Planted:
    """A known mistake, as it is made in a user's attention.

    Attributes:
        name: that of `mha-parity bugs`.
        needs: what the callable must have, see `View.lacks`.
        make: what runs a call with it; None where the call does not allow it, `Unfit` where that has a reason.
    """

    name: str
    needs: tuple[str, ...]
    make: Callable[[Call], Run | None]

    def why_not(self, view: View) -> str:
        """Why it cannot be planted in a callable; empty if it can."""
        return next((why for need in self.needs if (why := view.lacks(need))), "")
