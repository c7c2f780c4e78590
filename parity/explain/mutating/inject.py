"""Inject a bug in a test process: replace the user's attention by a buggy one that records its
calls.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from parity.explain.conformance.signatures import library_of
from parity.explain.mutating.bugs import injections_for
from parity.explain.mutating.calls import Call, Function, Injection
from parity.explain.mutating.compare import Unfit, is_traced, outputs_in, same
from parity.explain.mutating.record import note, order
from parity.explain.mutating.view import View, injected_attribute
from parity.measure.core.user_code import user_code


def inject(module: Any) -> None:
    """Replace the callable in the order, in its module or in the class that defines the method."""
    view = View(**order()["view"])
    holder, name, is_method = injected_attribute(module, order()["attribute"])
    injections, _ = injections_for(view)
    bug = order()["bug"]
    attention: Replacement = WithoutBug(injections)
    if bug:
        attention = WithBug(injections[bug])
    setattr(holder, name, _wrapped(getattr(holder, name), view, is_method, attention))
    atexit.register(_wait_for_callbacks)
    note("injected")


def _wait_for_callbacks() -> None:
    """Wait for the callbacks of compiled functions."""
    if "jax" in sys.modules:
        sys.modules["jax"].effects_barrier()


class Replacement(Protocol):
    """A replacement for a user's attention."""

    def attend(self, call: Call, function: Function) -> Any:
        """Return the result of a call of the attention, `function`."""
        ...


def _wrapped(original: Any, view: View, is_method: bool, attention: Replacement) -> Any:
    """Return a function with the name and the parameters of the original, which it replaces."""
    thread = threading.local()
    function = functools.partial(_call, original, is_method)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        owner: Any = args[0] if is_method else None
        makes_weights = library_of(owner) == "linen" and owner.is_initializing()
        # Calls by a bug or by the attention itself get no bug.
        is_inside = getattr(thread, "is_attending", False)
        if is_inside or makes_weights:
            return original(*args, **kwargs)
        thread.is_attending = True
        try:
            note("called")
            return attention.attend(Call(view, args[is_method:], kwargs, owner), function)
        finally:
            thread.is_attending = False

    return wrapper


def _call(original: Any, is_method: bool, call: Call) -> Any:
    """Call the original with the arguments of a call."""
    if is_method:
        return original(call.owner, *call.args, **call.kwargs)
    return original(*call.args, **call.kwargs)


class WithoutBug:
    """The user's attention, which records the bugs that its calls allow."""

    def __init__(self, injections: Mapping[str, Injection]) -> None:
        self.not_yet_allowed = dict(injections)

    def attend(self, call: Call, function: Function) -> Any:
        """Return the right result."""
        for name, bug in list(self.not_yet_allowed.items()):
            try:
                is_allowed = bug.make(call) is not None
            except Unfit as error:
                note("unfit", f"{name}: {error}")
                continue
            except Exception:  # unusual arguments may raise anything; the injection then reports it
                is_allowed = True
            if is_allowed:
                note("fits", name)
                del self.not_yet_allowed[name]
        return function(call)


class WithBug:
    """The user's attention with a bug, which records what the bug changes."""

    def __init__(self, bug: Injection) -> None:
        self.bug = bug
        self.has_changed = threading.Event()

    def attend(self, call: Call, function: Function) -> Any:
        """Return the result with the bug; the right one if the call does not allow it."""
        buggy_call = None
        try:
            buggy_call = self.bug.make(call)
        except Unfit as error:
            note("unfit", str(error))
        except Exception as error:  # unusual arguments may raise anything
            reason = f"{type(error).__name__}: {error}"
            note("unfit", f"it cannot be injected into such a call: {reason}")
        if buggy_call is None:
            return function(call)
        # One change is enough: later calls are not compared.
        before = None
        if not self.has_changed.is_set():
            before = _outputs_without_bug(call, function)
        try:
            result = buggy_call.run(function)
        except Unfit as error:
            note("unfit", str(error))
            return function(call)
        # Not `Exception` alone: sys.exit(0) in it would look like tests that pass.
        except BaseException as error:
            note("reached")
            note("raised", f"{type(error).__name__}: {error}".split("\n")[0])
            raise
        note("reached")
        if before is not None:
            self._compare_with_values(before, outputs_in(result))
        return result

    def _compare_with_values(self, before: list[Any], after: list[Any]) -> None:
        """Compare now or, for traced values, when the compiled function runs."""
        if not any(map(is_traced, [*before, *after])):
            self._compare(before, after)
            return
        import jax

        before, after = jax.tree.map(jax.lax.stop_gradient, (before, after))
        jax.debug.callback(self._compare, before, after)

    def _compare(self, before: list[Any], after: list[Any]) -> None:
        if len(before) != len(after) or not all(map(same, before, after)):
            self.has_changed.set()
            note("changed")


def _outputs_without_bug(call: Call, function: Function) -> list[Any] | None:
    """Return the outputs of the call without the bug; None if they cannot be computed without side
    effects.
    """
    try:
        if call.view.framework != "torch":
            with user_code(order()["attribute"]):
                return outputs_in(function(call.copied()))
        import torch

        with torch.no_grad(), torch.random.fork_rng(), user_code(order()["attribute"]):
            return outputs_in(function(call.copied()))
    except Exception as error:  # copies may raise anything
        note("uncompared", f"{type(error).__name__}: {error}".split("\n")[0])
        return None
