"""The arguments of a call, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def arguments_of(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by the names of parameters, or by number if those are unknown.

    Those that `**keywords` receives have their own names, and the ones of `*args` are `args0`, ….
    Keyword-only ones come last: a function around another one has those that it changes.
    """
    try:
        signature = inspect.signature(function)
        bound = signature.bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        # No signature, or one that does not accept the call, as the call itself will say.
        numbered = {str(index): x for index, x in enumerate(args)}
        return {**numbered, **kwargs}
    arguments: dict[str, Any] = {}
    keyword_only: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            for index, x in enumerate(value):
                arguments[f"{name}{index}"] = x
        elif kind is inspect.Parameter.KEYWORD_ONLY:
            keyword_only[name] = value
        else:
            arguments[name] = value
    return arguments | keyword_only
