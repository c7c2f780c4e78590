"""A call of a user's attention, whose arguments or result can be changed to inject a bug."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.explain.mutating.compare import copied
from parity.explain.mutating.view import View

Function = Callable[["Call"], Any]
"""A user's attention as a function of a `Call`."""

Run = Callable[[Function], Any]
"""Calls it with a bug."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call, by role.

    Attributes:
        view: known properties of the callable.
        args, kwargs: the arguments, without `self`.
        owner: the module whose method is called, if any.
    """

    view: View
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    owner: Any = None

    def get(self, role: str) -> Any:
        """Return the argument with a role; None if it was not passed."""
        return self.named(self.view.roles.get(role, ""))

    def named(self, name: str) -> Any:
        """Return the argument of a parameter; None if it was not passed."""
        if name in self.kwargs:
            return self.kwargs[name]
        place = self.view.order.index(name) if name in self.view.order else len(self.args)
        return self.args[place] if place < len(self.args) else None

    def but(self, **by_role: Any) -> Call:
        """Return the call with other arguments, by role."""
        return self.but_named({self.view.roles[role]: value for role, value in by_role.items()})

    def but_named(self, values: Mapping[str, Any]) -> Call:
        """Return the call with other arguments, by parameter name."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in values.items():
            place = self.view.order.index(name) if name in self.view.order else len(args)
            if name not in kwargs and place < len(args):
                args[place] = value
            else:
                kwargs[name] = value
        return Call(self.view, tuple(args), kwargs, self.owner)

    def copied(self) -> Call:
        """Copy everything in the call, so that calling it has no side effects.

        Raises:
            Exception: any error of an object that cannot be copied.
        """
        return Call(self.view, copied(self.args), copied(dict(self.kwargs)), copied(self.owner))

    @property
    def xp(self) -> Any:
        """Return the array module of its framework."""
        return importlib.import_module("torch" if self.view.framework == "torch" else "jax.numpy")

    @property
    def head_axis(self) -> int:
        """Return the axis of heads in split inputs, counted from the end."""
        return -3 if self.view.axes == "BNTH" else -2

    @property
    def token_axis(self) -> int:
        """Return the axis of tokens in all inputs, counted from the end."""
        return -3 if self.view.axes == "BTNH" else -2

    @property
    def lengths(self) -> tuple[int, int]:
        """Return T and S."""
        query, key = self.get("query"), self.get("key")
        return query.shape[self.token_axis], (query if key is None else key).shape[self.token_axis]

    def array(self, values: np.ndarray, like: Any = None) -> Any:
        """Return a NumPy array in the framework, on the device of another array of the call."""
        like = self.get("query") if like is None else like
        made = self.xp.asarray(values)
        return made.to(like.device) if self.view.framework == "torch" else made


def taken(x: Any, places: np.ndarray, axis: int) -> Any:
    """Return an array of any framework with the entries of an axis reordered."""
    return x.swapaxes(0, axis)[np.ascontiguousarray(places)].swapaxes(0, axis)


def on_output(result: Any, change: Callable[[Any], Any]) -> Any:
    """Return the result of a call with its output changed: the whole result, or the first of
    several.
    """
    if isinstance(result, tuple):
        first = change(result[0])
        return (
            type(result)(first, *result[1:]) if hasattr(result, "_fields") else (first, *result[1:])
        )
    return change(result)


def with_call(change: Callable[[Call], Call | None]) -> Callable[[Call], Run | None]:
    """Return a bug that changes only the arguments of a call; `change` returns None if it does not
    apply.
    """

    def make(call: Call) -> Run | None:
        other = change(call)
        return None if other is None else lambda function: function(other)

    return make


@dataclass(frozen=True)
class Injection:
    """A known bug, in a form that can be injected into a user's attention.

    Attributes:
        name: its name in `mha-parity bugs`.
        needs: properties that the callable must have, see `View.lacks`.
        make: returns a function that runs a call with the bug. It returns None if the call does not
            allow the bug, and raises `Unfit` if there is a reason to report.
    """

    name: str
    needs: tuple[str, ...]
    make: Callable[[Call], Run | None]

    def why_not(self, view: View) -> str:
        """Return why it cannot be injected into a callable; empty if it can."""
        return next((why for need in self.needs if (why := view.lacks(need))), "")
