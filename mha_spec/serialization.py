"""Conversion of specifications to and from JSON."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

from mha_spec.errors import InputError
from mha_spec.features.rope import Rope
from mha_spec.features.scaling import SCALINGS
from mha_spec.record import Record

RecordT = TypeVar("RecordT", bound=Record)


def to_json(spec: Record) -> str:
    """Return all fields of a specification as a JSON object, including derived sizes."""
    return json.dumps(asdict(spec), sort_keys=True, allow_nan=False)


def from_json(kind: type[RecordT], text: str) -> RecordT:
    """Return a specification of class `kind` from the text of `to_json`.

    Raises:
        ValueError: if the text is not a JSON object of its fields.
    """
    values: Any = json.loads(text)
    if not isinstance(values, dict):
        raise InputError("a specification", "be a JSON object", repr(text[:80]))
    if "rope_theta" in values and "rope" not in values:  # older files
        theta = values.pop("rope_theta")
        if theta is None:
            values["rope"] = None
        else:
            values["rope"] = {"theta": theta}
    if values.get("rope") is not None:
        values["rope"] = _rope_from(values["rope"])
    for name, kinds in _kinds_of_records(kind).items():
        if values.get(name) is not None and not isinstance(values[name], Record):
            values[name] = _from_fields(name, _kind_with_fields(kinds, values[name]), values[name])
    return _from_fields("a specification", kind, values)


@cache
def _kinds_of_records(kind: type[Record]) -> dict[str, list[type[Record]]]:
    """Return the kinds of record that each field may have, by its annotation."""
    kinds_by_field = {}
    for name, annotation in get_type_hints(kind).items():
        members = [*get_args(annotation), annotation]
        kinds = [each for each in members if isinstance(each, type) and issubclass(each, Record)]
        if kinds:
            kinds_by_field[name] = kinds
    return kinds_by_field


def _kind_with_fields(kinds: list[type[Record]], values: object) -> type[Record]:
    """Return the kind with the most fields of a JSON object; of several, the first."""
    names = set(values) if isinstance(values, dict) else set()
    closest, most = kinds[0], 0
    for kind in kinds:
        num_shared = len(names & {field.name for field in fields(kind)})
        if num_shared > most:
            closest, most = kind, num_shared
    return closest


def _rope_from(values: object) -> Rope:
    if isinstance(values, dict):
        scaling = values.get("scaling")
    else:
        scaling = None
    if isinstance(values, dict) and scaling is not None:
        if isinstance(scaling, dict):
            kind = scaling.get("kind")
        else:
            kind = None
        if kind not in SCALINGS:
            raise InputError(
                "scaling",
                f"be a JSON object whose kind is one of {list(SCALINGS)}",
                scaling=scaling,
            )
        own = {name: value for name, value in scaling.items() if name != "kind"}
        values = {**values, "scaling": _from_fields("scaling", SCALINGS[kind], own)}
    return _from_fields("rope", Rope, values)


def _from_fields(what: str, kind: type[RecordT], values: object) -> RecordT:
    """Return a record from a JSON object that has exactly its fields."""
    if not isinstance(values, dict):
        raise InputError(what, "be a JSON object", {what: values})
    known = {field.name for field in fields(kind) if field.init}
    required = {field.name for field in fields(kind) if field.default is MISSING}
    if unexpected := sorted(values.keys() - known):
        raise InputError(what, f"have the fields of {kind.__name__}", unexpected=unexpected)
    if missing := sorted(required - values.keys()):
        raise InputError(what, f"have the fields of {kind.__name__}", missing=missing)
    return kind(**values)
