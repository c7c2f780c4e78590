"""Results for other programs: JSON, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from parity.measure.core.records import as_json
from parity.measure.files.target import write_whole
from parity.use.reporting.schemas import headed


def write_json(path: str | os.PathLike[str], command: str, content: Mapping[str, Any]) -> None:
    """Write the JSON of a command to a file, records of results as their `to_dict`, whole or not at
    all.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if a number is NaN or infinite, which JSON does not have.
    """
    text = json.dumps(headed(command, content), indent=1, allow_nan=False, default=as_json)
    write_whole(path, f"{text}\n".encode())
