"""JSON Schemas of the commands' output, made of the typed records in `parity.use.reporting.schemas`.

`PYTHONPATH=.:tests python -m helpers.json_schemas` writes the schemas of new versions.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from helpers import ROOT
from parity.use.reporting import schemas
from parity.use.reporting.schemas import SCHEMAS, meanings_of

FOLDER = ROOT / "docs" / "data" / "schemas"
"""A JSON Schema for each version of each command. Files are added, never changed."""


def path_of(command: str) -> Path:
    """Return the path of the schema of the present version of a command."""
    return FOLDER / f"{command}-{SCHEMAS[command].version}.json"


def json_schema(command: str) -> dict[str, Any]:
    """Return the JSON Schema of a command: one of its forms, without additional keys."""
    schema = SCHEMAS[command]
    forms = list(schema.forms.values())
    references, definitions = msgspec.json.schema_components(forms, ref_template="#/$defs/{name}")
    for name, definition in definitions.items():
        for key, meaning in meanings_of(getattr(schemas, name)).items():
            definition["properties"][key]["description"] = meaning
        definition["additionalProperties"] = False
    head = {
        "schema": {"const": f"mha-parity/{command}"},
        "version": {"const": schema.version},
    }
    for form in forms:
        definition = definitions[form.__name__]
        definition["properties"] = {**head, **definition["properties"]}
        definition["required"] = [*head, *definition["required"]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"mha-parity/{command}, version {schema.version}",
        "anyOf": list(references),
        "$defs": definitions,
    }


def write_new() -> None:
    """Write the schemas of versions that have none."""
    FOLDER.mkdir(exist_ok=True)
    for command in SCHEMAS:
        if not path_of(command).exists():
            text = json.dumps(json_schema(command), indent=1)
            path_of(command).write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    write_new()
