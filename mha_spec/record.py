"""Base class of all records of a specification."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class Record:
    """Frozen dataclass whose repr is the shortest call that returns an equal record.

    Decorate subclasses with `repr=False`: otherwise `dataclass` would generate a repr.
    """

    _positional: ClassVar[tuple[str, ...]] = ()  # fields that the repr prints without names

    def values(self) -> dict[str, Any]:
        """Return all fields by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def given(self) -> dict[str, Any]:
        """Return keyword arguments of an equal record: the fields that differ from their
        defaults.
        """
        values = {
            each.name: (getattr(self, each.name), each.default)
            for each in fields(self)
            if each.init
        }
        return {name: value for name, (value, default) in values.items() if value != default}

    def replace(self, **changes: Any) -> Self:
        """Return a record with new values of some fields and the `given` ones of the others.

        Raises:
            TypeError: if a field is unknown, or a value of the wrong type.
            ValueError: if the fields do not fit.
        """
        return type(self)(**self.given() | changes)

    def __repr__(self) -> str:
        """Return the call that returns an equal record."""
        given = self.given().items()
        arguments = (
            repr(value) if name in self._positional else f"{name}={value!r}"
            for name, value in given
        )
        return f"{type(self).__name__}({', '.join(arguments)})"
