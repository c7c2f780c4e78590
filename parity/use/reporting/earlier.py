"""Files that a report may replace: earlier reports, and nothing that it could not have written
itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mha_spec import InputError
from parity.measure.files.reading import SUFFIXES

REPORTS = (
    re.compile(rb'\{\s*"schema": "mha-parity/'),
    re.compile(rb"<\?xml [^>]*\?>\s*<testsuites name=\"mha-parity\""),
    re.compile(
        rb'<!DOCTYPE html>\s*<html lang="en">\s*<head>\s*<meta name="generator" '
        rb'content="mha-parity">'
    ),
)
"""Beginnings of reports: JSON, JUnit XML and HTML."""

MOST_OF_A_BEGINNING = 512  # bytes


def check_report(path: str | os.PathLike[str], name: str) -> None:
    """Reject a report that would replace a different file, such as one of a model, or be read as
    tensors of one.

    Args:
        path: file to write.
        name: name of the argument, such as a flag.

    Raises:
        OSError: if the existing file cannot be read.
        ValueError: if the file exists and is neither a report nor empty, or has the suffix of a
            file of tensors.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a device or a pipe is not replaced
        return
    if path.suffix.lower() in SUFFIXES:
        raise InputError(
            name, f"not end in {path.suffix}, because files of tensors do", {name: str(path)}
        )
    if not path.exists():
        return
    with path.open("rb") as file:
        begin = file.read(MOST_OF_A_BEGINNING)
    if begin and not any(report.match(begin) for report in REPORTS):
        raise InputError(
            name, "be a new file or an earlier report, which it replaces", {name: str(path)}
        )
