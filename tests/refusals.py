"""Checks that bad input is refused, by the fields of the refusal: its words may change."""

from __future__ import annotations

import re
from types import EllipsisType, TracebackType
from typing import Any

import pytest

from mha_spec import Refusal, WrongType


class Refuses:
    """A `with` block that must end in a refusal of an argument; it can be entered again.

    Args:
        kind: ValueError, or TypeError for a `WrongType`.
        argument: its name; "…" in it stands for any text.
        got: text that what was passed has in it, or values by name; the value `...` may be any.
        where: text that the place has in it.
    """

    def __init__(self, kind: type[Exception], argument: str, got: dict[str, Any] | str, where: str = "") -> None:
        self.kind, self.argument, self.got, self.where = kind, argument, got, where
        self.value: Refusal | None = None

    def of(self, kind: type[Exception]) -> Refuses:
        """The same check, for the kind of error that a table has."""
        return Refuses(kind, self.argument, self.got, self.where)

    def __enter__(self) -> Refuses:
        self.value = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            pytest.fail(f"{self.argument} was not refused")
        if not isinstance(error, Refusal):
            return False
        assert isinstance(error, WrongType) == (self.kind is TypeError), f"{type(error).__name__}: {error}"
        self.check(error)
        self.value = error
        return True

    def check(self, refusal: Refusal) -> None:
        """Compare the fields of a refusal with what is expected.

        Raises:
            AssertionError: if one differs.
        """
        pattern = ".*".join(map(re.escape, self.argument.split("…")))
        assert re.fullmatch(pattern, refusal.argument), str(refusal)
        assert self.where in refusal.where, str(refusal)
        if isinstance(self.got, str):
            shown = refusal.got if isinstance(refusal.got, str) else str(refusal.got)
            assert self.got in shown, str(refusal)
            return
        held = {} if isinstance(refusal.got, str) else refusal.got
        for name, value in self.got.items():
            assert name in held, str(refusal)
            assert isinstance(value, EllipsisType) or _is_same(held[name], value), str(refusal)


def refuses(argument: str, got: dict[str, Any] | str = "", /, *, where: str = "", **values: Any) -> Refuses:
    """Check that a block refuses an argument, for its value."""
    return Refuses(ValueError, argument, values or got, where)


def refuses_type(argument: str, got: dict[str, Any] | str = "", /, *, where: str = "", **values: Any) -> Refuses:
    """Check that a block refuses an argument, for its type."""
    return Refuses(TypeError, argument, values or got, where)


def _is_same(value: Any, expected: Any) -> bool:
    """Equality; NaN is equal to NaN, and 1 not to True or 1.0."""
    return type(value) is type(expected) and (repr(value) == repr(expected) or value == expected)
