"""Cases with recordings of a computing board replay them, and each recording is current.

Other boards have nothing to replay: conftest.py collects these tests only on the board of the
recordings.
"""

import re

import pytest
from helpers.tt.formulas import IS_MOCK

from parity import random_weights
from parity.measure.backends import tt
from parity.measure.backends.record import record
from parity.measure.core.cases import CASES
from parity.measure.core.problem import make_problem
from parity.measure.core.trace import Reference, compare_trace
from parity.use.running.run import run_cases

pytestmark = [
    pytest.mark.board,
    pytest.mark.skipif(not IS_MOCK, reason="recordings are given back on a mock board only"),
]

EVERY = sorted(tt.RECORDINGS.rglob("*.npz"))


@pytest.mark.parametrize("path", EVERY, ids=[path.stem for path in EVERY])
def test_recording_is_current_and_accurate(path):
    """Each recording is replayed by its case without a difference, and all its stages are within
    tolerance.
    """
    name, _, dtype = path.stem.rpartition("-")
    assert tt.recording_path(name, dtype) == path, "no case replays it"
    reference = Reference(make_problem(CASES[name], dtype))
    trace = record("tt", reference)
    assert trace.numerics["values"].startswith("a recording made on"), (
        f"tools/record-tt --cases {name} again: {trace.numerics['not_as_recorded']}"
    )
    assert trace.arithmetic == "tensix"
    assert not [
        str(comparison) for comparison in compare_trace(trace, reference) if not comparison.passed
    ]


def test_run_reports_source_of_its_values():
    """A run warns whether values come from a recording or, for a different program, from golden
    functions.
    """
    case, weights = CASES["full"], random_weights(CASES["full"].spec, seed=9)
    values = "tt ran without its hardware: in 1 case its values come from"
    (warning,) = run_cases([case], ["tt"]).warnings
    assert warning.startswith(f"{values} a recording made on a simulated Blackhole")
    report = run_cases([case], ["tt"], weights=weights)
    assert report.warnings[0] == f"{values} golden functions"
    assert re.match(
        r"tt ran a different program .* full in float32: step \d+ uploads other values",
        report.warnings[1],
    )
