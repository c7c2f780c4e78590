"""Records of results, as JSON takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, ClassVar


class JsonRecord:
    """A dataclass that JSON takes: the attributes that `IN_JSON` names; `*` are the fields that `repr` shows."""

    IN_JSON: ClassVar[tuple[str, ...]] = ("*",)

    def to_dict(self) -> dict[str, Any]:
        """The attributes as JSON takes them: an infinity or NaN becomes null."""
        return _attributes(self, self.IN_JSON)


def as_json(value: Any) -> Any:
    """The value as JSON takes it, and all that is in it: an infinity or NaN becomes null, a tuple a list."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return _attributes(value, ("*",))
    if isinstance(value, Mapping):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_json(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _attributes(record: Any, names: tuple[str, ...]) -> dict[str, Any]:
    shown = [each.name for each in fields(record) if each.repr]
    return {each: as_json(getattr(record, each)) for name in names for each in (shown if name == "*" else [name])}
