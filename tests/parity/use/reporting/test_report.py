"""Tests of tables on a terminal, however narrow: names of failures are never cut off."""

import io

import numpy as np
import pytest
from rich.console import Console

from parity.measure.core.compare import Label, compare
from parity.port.conversion.layouts import LAYOUTS
from parity.port.conversion.layouts.layout import RULES
from parity.port.conversion.plan import Converted
from parity.use.reporting.console import short_ratio
from parity.use.reporting.conversion import print_conversion, print_layout
from parity.use.reporting.diagnosis import print_divergence
from parity.use.reporting.run import print_case_table, print_comparison_table, print_stage_table
from parity.use.reporting.summary import summary_line
from parity.use.running.report import Report
from parity_lab.selftest import Outcome, print_selftest

CASE = "trained-smollm2-causal"
WRONG = "step0.module.attn_weights"
STAGES = ("step0.q", WRONG, "step0.module.output")


def compared(backend, wrong=()):
    """Yield the comparisons of one case on a backend, with the given stages wrong."""
    x = np.linspace(0.0, 1.0, 120).reshape(2, 3, 4, 5)
    for stage in STAGES:
        values = x if stage != "step0.module.output" else x[0]
        actual = (values + (stage in wrong)).astype(np.float32)
        yield compare(
            actual, values, values.astype(np.float32), Label(CASE, backend, "float32", stage)
        )


def test_one_stage_is_one():
    """The last line of a run counts one stage in the singular."""
    report = Report([*compared("torch")][:1], {}, {})
    assert "1 stage passed, 0 failed" in summary_line(report).plain


@pytest.fixture(params=[40, 80])
def terminal(request, monkeypatch):
    """A terminal with the number of columns in the environment."""
    monkeypatch.setenv("COLUMNS", str(request.param))
    out = Console(file=io.StringIO(), force_terminal=True, color_system=None, highlight=False)
    assert out.width == request.param
    return out


def words(out):
    """Return the lines on a terminal, and its text without spaces and borders."""
    lines = out.file.getvalue().splitlines()
    assert all(len(line) <= out.width for line in lines if "│" in line)
    return lines, "".join("".join(lines).replace("│", " ").split())


def test_failed_stage_is_never_cut_off(terminal):
    """With three backends, the case table has the whole name of the failed stage, at 40 and
    80 columns.
    """
    comparisons = [
        *compared("jax"),
        *compared("torch", wrong=[WRONG]),
        *compared("tt", wrong=[WRONG]),
    ]
    print_case_table(Report(comparisons, {}, {}), terminal)
    lines, text = words(terminal)
    assert any(CASE in line for line in lines)
    cells = [line for line in lines if "FAIL" in line]
    assert cells
    # In a table the words of one cell stand below each other.
    columns = "".join(line.split("│")[4] for line in lines if line.count("│") == 6).replace(" ", "")
    assert WRONG in (columns if "│" in cells[0] else text)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_stages_and_ratios_are_never_cut_off(terminal, number):
    """With up to four backends, the stage table has whole names of stages and all ratios, at
    40 and 80 columns.
    """
    comparisons = [
        comparison
        for i in range(number)
        for comparison in compared(f"torch (/tmp/{i})", wrong=[WRONG])
    ]
    print_stage_table(Report(comparisons, {}, {}), terminal)
    lines, text = words(terminal)
    ratio = short_ratio(comparisons[1].worse_ratio)
    if any("│" in line for line in lines):
        row = next(line for line in lines if "module.attn_weights" in line)
        assert row.count(ratio) == number
    else:
        assert f"module.attn_weights:torch(/tmp/0){ratio}" in text
        assert text.count(ratio) == number


def test_comparisons_are_never_cut_off(terminal):
    """The comparison table has the whole case, stage, dtype and backend, at 40 and 80 columns."""
    comparisons = list(compared("torch", wrong=[WRONG]))
    print_comparison_table(Report(comparisons, {}, {}), terminal)
    _, text = words(terminal)
    assert f"{CASE}:stage{WRONG},dtypefloat32,backendtorch" in text


def test_bug_names_are_never_cut_off(terminal):
    """The table of the self-test has whole names of bugs and its headings, at 40 and 80 columns."""
    outcome = Outcome(
        "rope-weights-deinterleaved",
        CASE,
        "torch",
        0,
        ("q",),
        "q",
        ("rope-missing",),
        (),
        "structure",
    )
    print_selftest([outcome] * 12, terminal)
    lines, text = words(terminal)
    folded = "".join(line.split("│")[1].strip() for line in lines if line.count("│") == 6)
    assert "rope-weights-deinterleaved" in (folded or text)
    assert "injected" in text
    assert "named" in text


def test_two_traces_are_shown_side_by_side(terminal):
    """The table of two traces has the first wrong stage of the second trace, and its row, at
    40 and 80 columns.
    """
    sides = [list(compared("jax")), list(compared("torch", wrong=[WRONG]))]
    print_divergence(sides, dict.fromkeys(STAGES, 0.5), terminal)
    lines, text = words(terminal)
    assert f"torchiswrongfrom{WRONG}" in text
    assert (
        f"{WRONG}:jax" in text
        if terminal.width == 40
        else any(WRONG in line for line in lines if "│" in line)
    )


def test_lines_below_tables_are_whole(terminal):
    """At 40 and 80 columns, the properties of a layout and the sentence about a conversion are
    lines that are not folded; layers that differ have no heads in the sentence.
    """
    layout = LAYOUTS["transformers.LongCat"]
    print_layout(layout, terminal)
    print_conversion(Converted("canonical", ["a", "b"], None, [], ["c"]), "ttnn", terminal)
    lines, _ = words(terminal)
    rules = [f"rule: {RULES[name].words}" for name in layout.rules]
    assert max(map(len, rules)) > terminal.width
    assert set(rules) <= set(lines)
    assert lines[-1] == (
        "converted 2 attention layers from canonical to ttnn; copied 0 other tensors and dropped "
        "1; wrote "
    )
