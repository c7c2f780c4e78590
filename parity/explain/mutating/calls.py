"""A call of a user's attention, whose arguments or result can be changed to inject a bug."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from parity.explain.mutating.compare import copied
from parity.explain.mutating.view import View

Function = Callable[["Call"], Any]
"""A user's attention as a function of a `Call`."""


class BuggyCall(Protocol):
    """A call with a bug, made ready before the attention is called."""

    def run(self, function: Function) -> Any:
        """Return the result of the attention with the bug.

        Raises:
            Unfit: if the bug cannot be injected, for a reason that only the result shows.
        """
        ...


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

    def run(self, function: Function) -> Any:
        """Call the attention: a call with changed arguments is a `BuggyCall`."""
        return function(self)

    def get(self, role: str) -> Any:
        """Return the argument with a role; None if it was not passed."""
        return self.named(self.view.roles.get(role, ""))

    def named(self, name: str) -> Any:
        """Return the argument of a parameter; None if it was not passed."""
        if name in self.kwargs:
            return self.kwargs[name]
        index = self._index_of(name)
        if index is None:
            return None
        return self.args[index]

    def _index_of(self, name: str) -> int | None:
        """Return the index of a positional argument; None if it was not passed by position."""
        if name not in self.view.order:
            return None
        index = self.view.order.index(name)
        if index >= len(self.args):
            return None
        return index

    def inputs(self) -> dict[str, Any]:
        """Return the queries, keys and values that were passed, by role."""
        passed = {}
        for role in ("query", "key", "value"):
            x = self.get(role)
            if x is not None:
                passed[role] = x
        return passed

    def but(self, **by_role: Any) -> Call:
        """Return the call with other arguments, by role."""
        return self.but_named({self.view.roles[role]: value for role, value in by_role.items()})

    def but_named(self, values: Mapping[str, Any]) -> Call:
        """Return the call with other arguments, by parameter name."""
        args = list(self.args)
        kwargs = dict(self.kwargs)
        for name, value in values.items():
            index = self._index_of(name)
            if name in kwargs or index is None:
                kwargs[name] = value
            else:
                args[index] = value
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
        if self.view.framework == "torch":
            return importlib.import_module("torch")
        return importlib.import_module("jax.numpy")

    @property
    def head_axis(self) -> int:
        """Return the axis of heads in split inputs, counted from the end."""
        if self.view.axes == "BNTH":
            return -3
        return -2

    @property
    def token_axis(self) -> int:
        """Return the axis of tokens in all inputs, counted from the end."""
        if self.view.axes == "BTNH":
            return -3
        return -2

    @property
    def lengths(self) -> tuple[int, int]:
        """Return T and S."""
        query = self.get("query")
        key = self.get("key")
        if key is None:
            key = query
        return query.shape[self.token_axis], key.shape[self.token_axis]

    def array(self, values: np.ndarray, like: Any = None) -> Any:
        """Return a NumPy array in the framework, on the device of another array of the call."""
        array = self.xp.asarray(values)
        if self.view.framework != "torch":
            return array
        if like is None:
            like = self.get("query")
        return array.to(like.device)

    def with_dtype_of(self, x: Any, like: Any) -> Any:
        """Return an array of the framework in the dtype of another one."""
        if self.view.framework == "torch":
            return x.to(like.dtype)
        return x.astype(like.dtype)


@dataclass(frozen=True)
class OutputChanged:
    """A call whose output is changed.

    Attributes:
        call: its arguments, which may have been changed.
        change: returns the wrong output for the output.
    """

    call: Call
    change: Callable[[Any], Any]

    def run(self, function: Function) -> Any:
        """Call the attention, and return its result with the output changed: the whole result, or
        the first of several.
        """
        result = function(self.call)
        if not isinstance(result, tuple):
            return self.change(result)
        outputs = (self.change(result[0]), *result[1:])
        if hasattr(result, "_fields"):
            return type(result)(*outputs)
        return outputs


@dataclass(frozen=True)
class Injection:
    """A known bug, in a form that can be injected into a user's attention.

    Attributes:
        name: its name in `mha-parity bugs`.
        needs: properties that the callable must have, see `View.lacks`.
        make: returns a call with the bug. It returns None if the call does not allow the bug, and
            raises `Unfit` if there is a reason to report.
    """

    name: str
    needs: tuple[str, ...]
    make: Callable[[Call], BuggyCall | None]

    def why_not(self, view: View) -> str:
        """Return why it cannot be injected into a callable; empty if it can."""
        for need in self.needs:
            reason = view.lacks(need)
            if reason:
                return reason
        return ""
