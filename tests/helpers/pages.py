"""Reports for HTML pages: a failed one, and one whose texts are all attacks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

import parity.use.running.run
from parity import CASES, run_cases
from parity.measure.core.compare import Label, failure
from parity.use.reporting.html import AttentionMaps, html_page
from parity.use.running.report import Report, SkippedCase

HOSTILE = "<script>alert(1)</script>\"'&\x00\x1b\ud800</td>"


def page_of(
    names, backends=("torch",), dtypes=("float32",), **keywords
) -> tuple[Report, AttentionMaps, bytes]:
    """Return the report of a run, its attention maps and its page."""
    maps = AttentionMaps()
    report = run_cases(
        [CASES[name] for name in names], backends, dtypes, on_compared=maps, **keywords
    )
    return report, maps, html_page(report, maps)


class Diagnosis:
    """A diagnosis with any text."""

    def __init__(self, text):
        self.text = self.cause = self.headline = text
        self.findings = []


@contextmanager
def broken_softmax() -> Iterator[None]:
    """Make torch's attention weights wrong in one sequence, head and position of the case
    "causal".
    """
    original = parity.use.running.run.record

    def record(backend: str, reference: Any) -> Any:
        trace = original(backend, reference)
        if backend == "torch" and reference.problem.case.name == "causal":
            for values in (trace.accumulated, trace.local):
                values["attn_weights"][1, 2, 3, 0] += 0.25
            trace.accumulated["context"] += 1
        return trace

    with mock.patch("parity.use.running.run.record", record):
        yield


def hostile_report() -> Report:
    """Return a report in which every text from outside is an attack."""
    good = run_cases([CASES["textbook"]], ["torch"])
    renamed = [replace(comparison, backend=f"torch ({HOSTILE})") for comparison in good.comparisons]
    lost = failure(np.ones(2), HOSTILE, Label(HOSTILE, f"torch ({HOSTILE})", "float32", "q"))
    report = Report(
        [*renamed, lost],
        {"tt": HOSTILE},
        {
            HOSTILE: {HOSTILE: [HOSTILE], "backends": {HOSTILE: {HOSTILE: {HOSTILE: HOSTILE}}}},
            "b": 3,
        },
        [HOSTILE],
        [SkippedCase("textbook", "float16", HOSTILE, HOSTILE)],
    )
    object.__setattr__(
        report, "diagnoses", {(HOSTILE, "float32", f"torch ({HOSTILE})"): Diagnosis(HOSTILE)}
    )
    return report
