"""Checks that invalid input raises an `InputError`, by its fields, because its words may change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import EllipsisType, TracebackType
from typing import Any

import pytest

from mha_spec import InputError, InputTypeError
from mha_spec.errors import _as_alternatives, _setting, _value


class Rejects:
    """A `with` block that must raise an `InputError` of an argument; it can be entered again.

    Args:
        kind: ValueError, or TypeError for an `InputTypeError`.
        argument: its name; "…" in it stands for any text.
        got: text contained in the passed value, or values by name; `...` stands for any value.
        where: text contained in the location.
        remedy: settings of one of the alternatives.
        hint: text contained in the hint, such as a similar name.
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
        self.value: InputError | None = None

    def __repr__(self) -> str:
        return f"{self.argument} {self.got}"

    def of(self, kind: type[Exception]) -> Rejects:
        """Return the same check for a different kind of error."""
        return Rejects(kind, self.argument, self.got, self.where, self.remedy, self.hint)

    def __enter__(self) -> Rejects:
        self.value = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None:
            pytest.fail(f"{self.argument} was not rejected")
        if not isinstance(error, InputError):
            return False
        assert isinstance(error, InputTypeError) == (self.kind is TypeError), (
            f"{type(error).__name__}: {error}"
        )
        self.check(error)
        self.value = error.with_traceback(
            None
        )  # its frames would keep tensors alive as long as the table
        return True

    def check(self, input_error: InputError) -> None:
        """Compare the fields of an error with the expected ones.

        Raises:
            AssertionError: if a field differs.
        """
        assert re.fullmatch(self._pattern(), input_error.argument), str(input_error)
        assert self.where in input_error.where, str(input_error)
        assert self.hint in input_error.hint, str(input_error)
        assert not self.remedy or any(
            self.remedy.items() <= remedy.items() for remedy in _as_alternatives(input_error.remedy)
        ), str(input_error)
        if isinstance(self.got, str):
            shown = input_error.got if isinstance(input_error.got, str) else str(input_error.got)
            assert self.got in shown, str(input_error)
            return
        values = {} if isinstance(input_error.got, str) else input_error.got
        for name, value in self.got.items():
            assert name in values, str(input_error)
            assert isinstance(value, EllipsisType) or _is_same(values[name], value), str(
                input_error
            )

    def is_printed_in(self, text: str) -> bool:
        """Return whether a line of the text is the message of such an error, with any rule."""
        return any(map(self._is_printed_as, text.splitlines()))

    def _is_printed_as(self, line: str) -> bool:
        head, _, rule = line.partition(" must ")
        match = re.fullmatch(rf"(?:(?P<where>.*): )?{self._pattern()}", head)
        got, _, advice = rule.partition(", got ")[2].partition("; ")
        return (
            rule != ""
            and match is not None
            and self.where in (match["where"] or "")
            and self._is_passed_in(got)
            and _are_listed(self.remedy, advice or rule.partition("; ")[2])
            and self.hint in rule
        )

    def _is_passed_in(self, got: str) -> bool:
        """Return whether the values are in the part of a message after "got"."""
        if isinstance(self.got, str):
            return self.got in got
        if len(self.got) == 1:
            # The only value has no name if it is the argument's.
            (name, value), *_ = self.got.items()
            is_any = value is ... and name == self.argument
            if is_any or got == _value(name, value):
                return True
        return _are_listed(self.got, got)

    def _pattern(self) -> str:
        return ".*".join(map(re.escape, self.argument.split("…")))


def rejects(
    argument: str,
    got: dict[str, Any] | str = "",
    /,
    *,
    where: str = "",
    remedy: Mapping[str, Any] | None = None,
    hint: str = "",
    **values: Any,
) -> Rejects:
    """Check that a block raises an `InputError` of the value of an argument."""
    return Rejects(ValueError, argument, values or got, where, remedy, hint)


def rejects_type(
    argument: str,
    got: dict[str, Any] | str = "",
    /,
    *,
    where: str = "",
    hint: str = "",
    **values: Any,
) -> Rejects:
    """Check that a block raises an `InputError` of the type of an argument."""
    return Rejects(TypeError, argument, values or got, where, hint=hint)


class Misuse:
    """An error about options of a command line that require or exclude each other.

    Args:
        words: the beginning of its text.
    """

    def __init__(self, words: str) -> None:
        self.words = words

    def __repr__(self) -> str:
        return self.words

    def is_printed_in(self, text: str) -> bool:
        """Return whether a line of the text is this error."""
        beginning = f"mha-parity: error: {self.words}; "
        return any(line.startswith(beginning) for line in text.splitlines())


def _are_listed(settings: Mapping[str, Any], text: str) -> bool:
    """Return whether each setting is an item of a printed list, such as `a=1, b=2 and c=3`; `...`
    stands for any value.
    """
    shown = (
        f"{re.escape(name)}[= ]"
        if value is ...
        else rf"{re.escape(_setting(name, value))}(?![^\s,])"
        for name, value in settings.items()
    )
    return all(re.search(rf"(?<!\S){pattern}", text) for pattern in shown)


def _is_same(value: Any, expected: Any) -> bool:
    """Return whether two values are equal; NaN equals NaN, but 1 equals neither True nor 1.0."""
    return type(value) is type(expected) and (repr(value) == repr(expected) or value == expected)
