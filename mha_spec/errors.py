"""Errors about bad input, as structured records that programs can read."""

from __future__ import annotations

import os
import pickle
import shlex
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import is_dataclass
from typing import Any, Self

import numpy as np

MAX_LENGTH = 800
"""Maximum length of a message in characters. Long parts are shortened in the middle."""

MAX_REMEDIES = 3
"""Maximum number of alternatives in a message."""

Remedy = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Settings by name, or alternatives of them."""


class InputError(ValueError):
    """Bad input: an argument, the rule that it breaks, and what was passed.

        raise InputError("num_heads", "be a multiple of num_kv_heads", num_heads=4, num_kv_heads=3)

    prints "num_heads must be a multiple of num_kv_heads, got num_heads=4 and num_kv_heads=3". The
    text is built on demand.

    Attributes:
        argument: name of the argument that breaks the rule, as callers know it; or a path.
        rule: requirement; follows "must".
        got: values by name, or text if no name fits.
        remedy: settings by name that together fix the problem; a list has alternatives.
        hint: advice; follows the remedy.
        where: location of the bad input, such as a path; precedes the argument.
        statement: what is wrong, where no rule reads well; the message has it and the values
            instead of the argument and the rule.
    """

    def __init__(
        self,
        argument: str | os.PathLike[str],
        rule: str,
        got: Mapping[str, Any] | str = "",
        /,
        *,
        remedy: Remedy = (),
        hint: str = "",
        where: str = "",
        statement: str = "",
        **values: Any,
    ) -> None:
        """Initialize the record.

        Args:
            argument: as the attribute.
            rule: as the attribute.
            got: as the attribute; a mapping allows names that are not identifiers, such as
                `{"mask.dtype": dtype}`.
            remedy: as the attribute.
            hint: as the attribute.
            where: as the attribute.
            statement: as the attribute.
            values: more values by name.
        """
        self.args = (str(argument), rule)
        self.argument = str(argument)
        self.rule = rule
        self.got: dict[str, Any] | str = (
            values or got if isinstance(got, str) else {**got, **values}
        )
        self.remedy = remedy
        self.hint = hint
        self.where = where
        self.statement = statement

    def __str__(self) -> str:
        if isinstance(self.got, str):
            got = [self.got]
        elif not self.statement and _is_only_of(self.argument, self.got):
            # The message begins with its name.
            got = [_value(self.argument, self.got[self.argument])]
        else:
            got = [_setting(*item) for item in self.got.items()]
        problem = [self.where, self.argument, self.rule, self.statement]
        advice = [_text_of_remedy(self.remedy), self.hint]
        parts = [_escape(part) for part in (*problem, *advice, *got)]
        text = ""
        # Cut the longest parts, 20 characters shorter each time, until the message fits.
        for length in range(MAX_LENGTH, 0, -20):
            text = _message(*(_cut(part, length) for part in parts))
            if len(text) <= MAX_LENGTH:
                break
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        fields = dict(vars(self))
        if isinstance(self.got, dict):
            fields["got"] = {name: _pickled(value) for name, value in self.got.items()}
        return type(self), (self.argument, self.rule), fields

    def renamed(self, rename: Callable[[str, Any], tuple[str, Any]]) -> Self:
        """Return a copy with other names, such as the options of a command line.

        Names that start with "-" are printed as flags: `--num-heads 4`, and `--fill-bias` for True.

        Args:
            rename: maps a name and its value to the ones to print; the value of the argument is
                None if unknown.
        """
        other = copy(self)
        if isinstance(self.got, dict):
            got = self.got
        else:
            got = {}
        other.argument, _ = rename(self.argument, got.get(self.argument))
        if got:
            other.got = dict(rename(*item) for item in got.items())
        other.remedy = []
        for settings in _as_alternatives(self.remedy):
            other.remedy.append(dict(rename(*item) for item in settings.items()))
        return other

    def within(self, where: str) -> Self:
        """Return a copy with a location before its own, if any."""
        other = copy(self)
        if self.where:
            other.where = f"{where}: {self.where}"
        else:
            other.where = where
        return other


class InputTypeError(InputError, TypeError):
    """Bad input of the wrong type, also a `TypeError`."""


class _Text(str):
    """Value from another process, of which only the text is available."""

    __slots__ = ()
    __repr__ = str.__str__


def _pickled(value: object) -> object:
    """Return a value, or its text if it cannot be pickled."""
    try:
        pickle.dumps(value)
    except Exception:  # a device, a traced array, a function of a function
        return _Text(_shown(value))
    return value


def _shown(value: object) -> str:
    """Return the text of a value on one line: strings are quoted, and arrays have no elements."""
    try:
        if isinstance(value, str):
            return repr(value)
        if _has_array(value):
            return _shown_with_arrays(value)
        return " ".join(str(value).split())
    except Exception:  # an integer with too many digits, or an object that cannot be printed
        return f"a {type(value).__name__}"


def _is_array(value: object) -> bool:
    """Return whether a value is an array of any framework. Numbers of NumPy also have a shape and a
    dtype.
    """
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic)


def _has_array(value: object) -> bool:
    """Return whether a value is an array, or contains one that its text would print."""
    if isinstance(value, Mapping):
        return any(_has_array(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_array(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return any(_has_array(item) for item in vars(value).values())
    return _is_array(value)


def _shown_with_arrays(value: Any) -> str:
    """Return a value with the type, shape and dtype of its arrays: their elements would fill the
    message.
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_shown(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {', '.join(map(_shown, value))}"
    if is_dataclass(value):
        return f"a {type(value).__name__}"
    # torch.float32, dtype('float32') and DataType.FLOAT32 are float32.
    dtype = str(value.dtype).rpartition(".")[2].lower()
    name = type(value).__name__.removesuffix("Impl")  # jax.Array is an ArrayImpl
    return f"{name}(shape={tuple(value.shape)}, dtype={dtype})"


def _message(
    where: str, argument: str, rule: str, statement: str, remedy: str, hint: str, *got: str
) -> str:
    """Return a message from its parts, any of which may be empty."""
    values = _listed(got)
    text = statement
    if not statement:
        text = f"{argument} must {rule}"
        if values:
            text = f"{text}, got {values}"
    elif values:
        text = f"{values}: {statement}"
    if where:
        text = f"{where}: {text}"
    advice = " ".join(filter(None, (remedy, hint)))
    if advice:
        text = f"{text}; {advice}"
    return text


def _is_only_of(argument: str, got: Mapping[str, Any]) -> bool:
    """Return whether an argument has the only value. A flag that is set has none."""
    return list(got) == [argument] and got[argument] is not True


def _setting(name: str, value: object) -> str:
    """Return a value with its name, as a caller writes it: `name=value` or `--name value`."""
    if not name.startswith("-"):
        return f"{name}={_value(name, value)}"
    if value is True:
        return name
    return f"{name} {_value(name, value)}"


def _value(name: str, value: object) -> str:
    """Return a value as a caller writes it; text is quoted for Python or, after a flag, a shell."""
    if name.startswith("-") and isinstance(value, str):
        return shlex.quote(value)
    return _shown(value)


def _as_alternatives(remedy: Remedy) -> Sequence[Mapping[str, Any]]:
    """Return the alternatives of a remedy, which may be one."""
    if isinstance(remedy, Mapping):
        return [remedy]
    return remedy


def _text_of_remedy(remedy: Remedy) -> str:
    """Return a remedy in words: the settings of each alternative, but only of a few."""
    alternatives = _as_alternatives(remedy)
    shown = []
    for settings in alternatives[:MAX_REMEDIES]:
        shown.append(" with ".join(_setting(*item) for item in settings.items()))
    text = " or ".join(shown)
    if len(alternatives) > len(shown):
        text = f"{text} (or {len(alternatives) - len(shown)} more)"
    return text


def _listed(values: Sequence[str]) -> str:
    """Return values as in "a, b and c"; "" without any."""
    if len(values) < 2:
        return "".join(values)
    return f"{', '.join(values[:-1])} and {values[-1]}"


def _escape(text: str) -> str:
    """Return text on one line, with control characters escaped."""
    if text.isprintable():
        return text
    escaped = []
    for character in text:
        if character.isprintable():
            escaped.append(character)
        else:
            escaped.append(character.encode("unicode_escape", "surrogatepass").decode())
    return "".join(escaped)


def _cut(text: str, length: int) -> str:
    """Return text without its middle, if it is longer than this."""
    if len(text) <= length:
        return text
    return f"{text[: length // 2]}…{text[-(length // 2) :]}"
