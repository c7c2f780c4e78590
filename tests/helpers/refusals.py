"""Checks that bad input is refused, by the fields of the refusal: its words may change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import EllipsisType, TracebackType
from typing import Any

import pytest

from mha_spec import Refusal, WrongType
from mha_spec.refusal import _each, _setting


class Refuses:
    """A `with` block that must end in a refusal of an argument; it can be entered again.

    Args:
        kind: ValueError, or TypeError for a `WrongType`.
        argument: its name; "…" in it stands for any text.
        got: text that what was passed has in it, or values by name; the value `...` may be any.
        where: text that the place has in it.
        remedy: settings that one of the alternatives has.
        hint: text that the hint has in it, such as a name that is near.
    """

    def __init__(
        self,
        kind: type[Exception],
        argument: str,
        got: dict[str, Any] | str,
        where: str = "",
        remedy: Mapping[str, Any] | None = None,
        hint: str = "",
    ) -> None:
        self.kind, self.argument, self.got, self.where = kind, argument, got, where
        self.remedy, self.hint = remedy or {}, hint
        self.value: Refusal | None = None

    def __repr__(self) -> str:
        return f"{self.argument} {self.got}"

    def of(self, kind: type[Exception]) -> Refuses:
        """The same check, for the kind of error that a table has."""
        return Refuses(kind, self.argument, self.got, self.where, self.remedy, self.hint)

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
        self.value = error.with_traceback(None)  # whose frames hold tensors, as long as a table lasts
        return True

    def check(self, refusal: Refusal) -> None:
        """Compare the fields of a refusal with what is expected.

        Raises:
            AssertionError: if one differs.
        """
        assert re.fullmatch(self._pattern(), refusal.argument), str(refusal)
        assert self.where in refusal.where, str(refusal)
        assert self.hint in refusal.hint, str(refusal)
        assert not self.remedy or any(self.remedy.items() <= each.items() for each in _each(refusal.remedy)), str(
            refusal
        )
        if isinstance(self.got, str):
            shown = refusal.got if isinstance(refusal.got, str) else str(refusal.got)
            assert self.got in shown, str(refusal)
            return
        held = {} if isinstance(refusal.got, str) else refusal.got
        for name, value in self.got.items():
            assert name in held, str(refusal)
            assert isinstance(value, EllipsisType) or _is_same(held[name], value), str(refusal)

    def is_printed_in(self, text: str) -> bool:
        """A line of the text is the message of such a refusal, whatever its rule."""
        return any(map(self._is_printed_as, text.splitlines()))

    def _is_printed_as(self, line: str) -> bool:
        head, _, said = line.partition(" must ")
        found = re.fullmatch(rf"(?:(?P<where>.*): )?{self._pattern()}", head)
        got, _, advice = said.partition(", got ")[2].partition("; ")
        return (
            said != ""
            and found is not None
            and self.where in (found["where"] or "")
            and (self.got in got if isinstance(self.got, str) else _are_listed(self.got, got))
            and _are_listed(self.remedy, advice or said.partition("; ")[2])
            and self.hint in said
        )

    def _pattern(self) -> str:
        return ".*".join(map(re.escape, self.argument.split("…")))


def refuses(
    argument: str,
    got: dict[str, Any] | str = "",
    /,
    *,
    where: str = "",
    remedy: Mapping[str, Any] | None = None,
    hint: str = "",
    **values: Any,
) -> Refuses:
    """Check that a block refuses an argument, for its value."""
    return Refuses(ValueError, argument, values or got, where, remedy, hint)


def refuses_type(argument: str, got: dict[str, Any] | str = "", /, *, where: str = "", **values: Any) -> Refuses:
    """Check that a block refuses an argument, for its type."""
    return Refuses(TypeError, argument, values or got, where)


def _are_listed(settings: Mapping[str, Any], text: str) -> bool:
    """Each setting is an item of a printed list, such as `a=1, b=2 and c=3`; the value `...` may be any."""
    shown = (
        f"{re.escape(name)}[= ]" if value is ... else rf"{re.escape(_setting(name, value))}(?![^\s,])"
        for name, value in settings.items()
    )
    return all(re.search(rf"(?<!\S){each}", text) for each in shown)


def _is_same(value: Any, expected: Any) -> bool:
    """Equality; NaN is equal to NaN, and 1 not to True or 1.0."""
    return type(value) is type(expected) and (repr(value) == repr(expected) or value == expected)
