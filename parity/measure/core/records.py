"""Records of results, for JSON and notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, ClassVar

from parity.measure.text import printable


class JsonRecord:
    """Dataclass that converts to JSON: the attributes in `IN_JSON`.

    `*` stands for the fields in `repr`.
    """

    IN_JSON: ClassVar[tuple[str, ...]] = ("*",)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON values; infinity and NaN become null."""
        return _attributes(self, self.IN_JSON)

    def _repr_html_(self) -> str:
        return as_html(self)


def as_html(value: object) -> str:
    """Return the text of a value for a notebook."""
    return f"<pre style='white-space: pre-wrap'>{html.escape(printable(str(value)))}</pre>"


def as_json(value: Any) -> Any:
    """Return a value for JSON, recursively: infinity and NaN become null, tuples lists."""
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
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _attributes(record: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return attributes of a record as JSON values; `*` stands for the fields in its `repr`."""
    attribute_names: list[str] = []
    for name in names:
        if name == "*":
            attribute_names += [field.name for field in fields(record) if field.repr]
        else:
            attribute_names.append(name)
    return {name: as_json(getattr(record, name)) for name in attribute_names}
