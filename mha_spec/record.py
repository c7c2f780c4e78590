"""The base of all records of a specification, which print as they are written."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class Record:
    """A frozen dataclass whose repr is the shortest call that makes an equal record.

    A subclass is decorated with `repr=False`: otherwise `dataclass` would write a repr of its own.
    """

    _positional: ClassVar[tuple[str, ...]] = ()  # fields that the repr writes without their names

    def values(self) -> dict[str, Any]:
        """All fields by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def given(self) -> dict[str, Any]:
        """Arguments by name that make an equal record: the fields that differ from their defaults."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self) if each.init}
        return {name: value for name, (value, default) in values.items() if value != default}

    def replace(self, **changes: Any) -> Self:
        """A record with other values of some fields, and with the given ones of the rest.

        Raises:
            TypeError: if a field is unknown, or a value of the wrong type.
            ValueError: if the fields do not fit.
        """
        return type(self)(**self.given() | changes)

    def __repr__(self) -> str:
        """The type and the given fields, as a call."""
        given = self.given().items()
        arguments = (repr(value) if name in self._positional else f"{name}={value!r}" for name, value in given)
        return f"{type(self).__name__}({', '.join(arguments)})"
