"""Inject a bug in a test process: replace the user's attention by a buggy one that records its
calls.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from parity.explain.conformance.signatures import library_of
from parity.explain.mutating.bugs import injections_for
from parity.explain.mutating.calls import Call, Function, Injection
from parity.explain.mutating.compare import Unfit, is_traced, outputs_in, same
from parity.explain.mutating.record import note, order
from parity.explain.mutating.view import View, place_of
from parity.measure.core.user_code import user_code


def inject(module: Any) -> None:
    """Replace the callable in the order, in its module or in the class that defines the method."""
    view = View(**order()["view"])
    holder, name, is_method = place_of(module, order()["attribute"])
    fit, _ = injections_for(view)
    bug = order()["bug"]
    attend = _record_fitting(fit) if not bug else _inject(fit[bug])
    setattr(holder, name, _wrapped(getattr(holder, name), view, is_method, attend))
    atexit.register(_wait)
    note("injected")


def _wait() -> None:
    """Wait for the callbacks of compiled functions."""
    if "jax" in sys.modules:
        sys.modules["jax"].effects_barrier()


Attend = Callable[[Call, Function], Any]
"""A replacement for a user's attention, called with the call and the attention itself."""


def _wrapped(original: Any, view: View, is_method: bool, attend: Attend) -> Any:
    busy = threading.local()

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        owner: Any = args[0] if is_method else None
        makes_weights = library_of(owner) == "linen" and owner.is_initializing()
        if getattr(busy, "on", False) or makes_weights:  # also for recursive calls
            return original(*args, **kwargs)
        call = Call(view, args[is_method:], kwargs, owner)

        def function(call: Call) -> Any:
            return original(*([call.owner] if is_method else []), *call.args, **call.kwargs)

        busy.on = True
        try:
            note("called")
            return attend(call, function)
        finally:
            busy.on = False

    return wrapper


def _record_fitting(fit: dict[str, Injection]) -> Attend:
    """Inject nothing, but record which bugs apply."""
    left = dict(fit)

    def attend(call: Call, function: Function) -> Any:
        for name, bug in list(left.items()):
            try:
                fits = bug.make(call) is not None
            except Unfit as error:
                note("unfit", f"{name}: {error}")
                continue
            except Exception:  # unusual arguments may raise anything; the injection then reports it
                fits = True
            if fits:
                note("fits", name)
                del left[name]
        return function(call)

    return attend


def _inject(bug: Injection) -> Attend:
    is_changed = threading.Event()

    def compare(before: list[Any], after: list[Any]) -> None:
        if len(before) != len(after) or not all(map(same, before, after)):
            is_changed.set()
            note("changed")

    def attend(call: Call, function: Function) -> Any:
        run = None
        try:
            run = bug.make(call)
        except Unfit as error:
            note("unfit", str(error))
        except Exception as error:  # unusual arguments may raise anything
            note(
                "unfit", f"it cannot be injected into such a call: {type(error).__name__}: {error}"
            )
        if run is None:
            return function(call)
        before = None if is_changed.is_set() else _before(call, function)
        try:
            result = run(function)
        except Unfit as error:
            note("unfit", str(error))
            return function(call)
        except (
            BaseException
        ) as error:  # sys.exit(0) in it would otherwise look like tests that pass
            note("reached")
            note("raised", f"{type(error).__name__}: {error}".split("\n")[0])
            raise
        note("reached")
        if before is not None:
            _compare(compare, before, outputs_in(result))
        return result

    return attend


def _before(call: Call, function: Function) -> list[Any] | None:
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


def _compare(
    compare: Callable[[list[Any], list[Any]], None], before: list[Any], after: list[Any]
) -> None:
    """Compare now or, for traced values, when the compiled function runs."""
    if not any(map(is_traced, [*before, *after])):
        return compare(before, after)
    import jax

    held = jax.tree.map(jax.lax.stop_gradient, (before, after))
    return jax.debug.callback(lambda pair: compare(*pair), held)
