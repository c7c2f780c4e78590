"""Bugs in further arguments: positions, cosines and sines, a bias, a window, a soft cap, sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parity.explain.mutating.calls import Call, Injection, Run, with_call


def _dropped(role: str) -> Callable[[Call], Run | None]:
    def change(call: Call) -> Call | None:
        given = call.get(role)
        if given is None:
            return None
        if call.view.roles[role] in call.view.optional:
            return call.but(**{role: None})
        return call.but(**{role: given * 0}) if hasattr(given, "shape") else None

    return with_call(change)


def _changed(role: str, change: Callable[[Call, Any], Any]) -> Callable[[Call], Run | None]:
    """Make a bug that changes one argument if it is passed; `change` returns None if it does not
    apply.
    """

    def make(call: Call) -> Call | None:
        given = call.get(role)
        other = None if given is None else change(call, given)
        return None if other is None else call.but(**{role: other})

    return with_call(make)


def _window(step: int) -> Callable[[Call, Any], Any]:
    """Make a window one token wider or narrower; for two sides, the left one; -1 means
    unlimited.
    """

    def change(call: Call, size: Any) -> Any:
        if isinstance(size, tuple) and size and size[0] > 0:
            return (size[0] + step, *size[1:])
        return size + step if isinstance(size, int) and size + step > 0 else None

    return change


def _scaled_bias(call: Call, bias: Any) -> Any:
    return bias / call.get("query").shape[-1] ** 0.5


def _turned(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Call], Run | None]:
    """Make a bug that changes cosines and sines, passed separately or as a pair."""

    def make(call: Call) -> Call | None:
        pair = call.get("position_embeddings")
        if isinstance(pair, (tuple, list)) and len(pair) == 2:
            return call.but(position_embeddings=change(pair[0], pair[1]))
        cos, sin = call.get("cos"), call.get("sin")
        if cos is None or sin is None:
            return None
        cos, sin = change(cos, sin)
        return call.but(cos=cos, sin=sin)

    return with_call(make)


def _at_positions(change: Callable[[Any], Any]) -> Callable[[Call], Run | None]:
    return _changed("positions", lambda _, positions: change(positions))


EXTRAS = (
    Injection("score-bias-missing", ("bias",), _dropped("bias")),
    Injection("score-bias-scaled", ("bias", "heads"), _changed("bias", _scaled_bias)),
    Injection("rope-missing", ("positions",), _at_positions(lambda p: p * 0)),
    Injection("rope-reversed", ("positions",), _at_positions(lambda p: -p)),
    Injection("cache-position-off-by-one", ("positions", "cache"), _at_positions(lambda p: p + 1)),
    Injection(
        "cache-position-restarted", ("positions", "cache"), _at_positions(lambda p: p - p[..., :1])
    ),
    Injection("rope-missing", ("cos",), _turned(lambda cos, sin: (cos * 0 + 1, sin * 0))),
    Injection("rope-reversed", ("cos",), _turned(lambda cos, sin: (cos, -sin))),
    Injection("rope-sin-cos-exchanged", ("cos",), _turned(lambda cos, sin: (sin, cos))),
    Injection("window-ignored", ("window",), _dropped("window")),
    Injection("window-one-too-wide", ("window",), _changed("window", _window(1))),
    Injection("window-one-too-narrow", ("window",), _changed("window", _window(-1))),
    Injection("soft-cap-ignored", ("soft_cap",), _dropped("soft_cap")),
    Injection("sinks-ignored", ("sinks",), _dropped("sinks")),
)
"""Bugs in the remaining arguments. Positions that are shifted equally for queries and keys have an
effect only with a cache.
"""
