"""Bugs in further arguments: positions, cosines and sines, a bias, a window, a soft cap, sinks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from parity.explain.mutating.bugs.rope import tables_of, with_tables
from parity.explain.mutating.calls import Call, Injection


def _without(call: Call, *, role: str) -> Call | None:
    """Leave out an argument, or pass zeros if it must be passed."""
    argument = call.get(role)
    if argument is None:
        return None
    if call.view.roles[role] in call.view.optional:
        return call.but(**{role: None})
    if hasattr(argument, "shape"):
        return call.but(**{role: argument * 0})
    return None


def _with_scaled_bias(call: Call) -> Call | None:
    """Scale the bias as the scores are."""
    bias = call.get("bias")
    if bias is None:
        return None
    return call.but(bias=bias / call.get("query").shape[-1] ** 0.5)


def _with_wider_window(call: Call, *, by: int) -> Call | None:
    """Make a window some tokens wider; of two sides, the left one; -1 means unlimited."""
    window = call.get("window")
    if isinstance(window, tuple) and window and window[0] > 0:
        return call.but(window=(window[0] + by, *window[1:]))
    if isinstance(window, int) and window + by > 0:
        return call.but(window=window + by)
    return None


# ---- Positions -----------------------------------------------------------------------------------


def _with_positions(call: Call, *, wrong: Callable[[Any], Any]) -> Call | None:
    """Pass other positions."""
    positions = call.get("positions")
    if positions is None:
        return None
    return call.but(positions=wrong(positions))


def _all_zero(positions: Any) -> Any:
    return positions * 0


def _negated(positions: Any) -> Any:
    return -positions


def _one_later(positions: Any) -> Any:
    return positions + 1


def _restarted(positions: Any) -> Any:
    return positions - positions[..., :1]


# ---- Cosines and sines ---------------------------------------------------------------------------


def _with_tables(call: Call, *, wrong: Callable[[Any, Any], tuple[Any, Any]]) -> Call | None:
    """Pass other cosines and sines."""
    tables = tables_of(call)
    if tables is None:
        return None
    cos, sin = tables
    wrong_cos, wrong_sin = wrong(cos, sin)
    return with_tables(call, wrong_cos, wrong_sin)


def _of_no_angle(cos: Any, sin: Any) -> tuple[Any, Any]:
    return cos * 0 + 1, sin * 0


def _of_opposite_angles(cos: Any, sin: Any) -> tuple[Any, Any]:
    return cos, -sin


def _exchanged(cos: Any, sin: Any) -> tuple[Any, Any]:
    return sin, cos


# ---- All -----------------------------------------------------------------------------------------

POSITIONS = ("positions",)
CACHED_POSITIONS = ("positions", "cache")
TABLES = ("cos",)

EXTRAS = (
    Injection("score-bias-missing", ("bias",), partial(_without, role="bias")),
    Injection("score-bias-scaled", ("bias", "heads"), _with_scaled_bias),
    Injection("rope-missing", POSITIONS, partial(_with_positions, wrong=_all_zero)),
    Injection("rope-reversed", POSITIONS, partial(_with_positions, wrong=_negated)),
    Injection(
        "cache-position-off-by-one", CACHED_POSITIONS, partial(_with_positions, wrong=_one_later)
    ),
    Injection(
        "cache-position-restarted", CACHED_POSITIONS, partial(_with_positions, wrong=_restarted)
    ),
    Injection("rope-missing", TABLES, partial(_with_tables, wrong=_of_no_angle)),
    Injection("rope-reversed", TABLES, partial(_with_tables, wrong=_of_opposite_angles)),
    Injection("rope-sin-cos-exchanged", TABLES, partial(_with_tables, wrong=_exchanged)),
    Injection("window-ignored", ("window",), partial(_without, role="window")),
    Injection("window-one-too-wide", ("window",), partial(_with_wider_window, by=1)),
    Injection("window-one-too-narrow", ("window",), partial(_with_wider_window, by=-1)),
    Injection("soft-cap-ignored", ("soft_cap",), partial(_without, role="soft_cap")),
    Injection("sinks-ignored", ("sinks",), partial(_without, role="sinks")),
)
"""Bugs in the remaining arguments. Positions that are shifted equally for queries and keys have an
effect only with a cache.
"""
