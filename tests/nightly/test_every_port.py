"""Ports of tests/wild: all are audited by plain arithmetic; right ones are diagnosed, and some of
the wrong ones.

tests/parity/explain/diagnosis/test_wild.py has twenty of them in `make test`.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers import ROOT
from wild.accepted import ACCEPTED
from wild.audit import is_right, measured
from wild.how import How
from wild.rates import Job, first_stage, grade_of, is_caught, is_clean, is_located, jobs, verdict_on
from wild.records import STYLES, WITH_THE_CATALOGUE, Right, half, port_of
from wild.sets import BUGS, CASES, RIGHTS

from parity.explain.diagnosis.bugs import bugs_for, page_by_bug

SOME = slice(None, None, 24)
"""One in 24 wrong ports of each set; `tools/diagnosis-rates` diagnoses all."""


@pytest.fixture(scope="module", params=STYLES)
def style(request):
    """Return each style; its tests run one after the other, because results of one are kept for the
    next.
    """
    return request.param


def test_sets_of_ports_are_large_enough():
    """There are at least 500 right and 280 wrong ports, in 9 styles, and about half of those are
    known that were written without looking at the known bugs.
    """
    assert len(RIGHTS) >= 500
    assert len(BUGS) >= 280
    by_style = Counter(bug.style for bug in BUGS.values())
    assert len(STYLES) >= 9
    assert sum(number >= 25 for number in by_style.values()) >= 6
    for ids in (RIGHTS, BUGS):
        split = [port_id for port_id in ids if not port_id.startswith(WITH_THE_CATALOGUE)]
        known = sum(half(port_id) == "known" for port_id in split)
        assert 0.4 < known / len(split) < 0.6


def test_bugs_are_where_records_say(style):
    """Each unedited port is right, and each bug is at the
    stage and the indices that its record states.
    """
    differ = {}
    for bug in BUGS.values():
        if bug.style != style:
            continue
        assert is_right(Right(style, bug.case, 0, bug.dtype, How(), "plain")), bug.case
        measurement = measured(bug)
        recorded = (bug.stage, dict(bug.limited), bug.in_output)
        shown = (
            measurement.stage,
            {axis: measurement.limited.get(axis) for axis in bug.limited},
            measurement.in_output,
        )
        if recorded != shown:
            differ[bug.id] = (recorded, shown)
    assert not differ


def test_right_ports_raise_no_alarm(style):
    """No right port of a style, `known` or `held-out`, raises an alarm. Each is shown to be right
    first; for the half `held-out` only the number is reported.
    """
    chosen = [
        job
        for job in jobs(["known", "held-out"], [style])
        if job.id in RIGHTS and job.record.how.mode != "compile"
    ]
    verdicts = list(map(verdict_on, chosen))
    alarms = [verdict for verdict in verdicts if not is_clean(verdict)]
    assert [verdict["id"] for verdict in alarms if verdict["half"] == "known"] == []
    assert len(alarms) == 0


@pytest.mark.parametrize("which", ["known", "held-out"])
def test_bugs_are_caught_and_mostly_located(which):
    """With stages, every sampled bug is caught, at least 90% are located, and no name is wrong or
    unclassified; for the half `held-out` only the numbers are reported.
    """
    of_stages = [job for job in jobs([which]) if job.id in BUGS and not job.output_only]
    verdicts = list(map(verdict_on, of_stages[SOME]))
    missed, num_located = (
        [verdict for verdict in verdicts if not is_caught(verdict)],
        sum(map(is_located, verdicts)),
    )
    assert [verdict["id"] for verdict in missed if which == "known"] == []
    assert len(missed) == 0
    assert num_located >= 0.9 * len(verdicts)
    grades = Counter(map(grade_of, verdicts))
    assert grades["wrong"] == 0
    assert grades["to be classified"] == 0


def test_edit_without_effect_raises():
    """An edit that does not change results raises an error when measured."""
    same = ("att = att * (1.0 / math.sqrt(hs))", "att = att / math.sqrt(hs)")
    bug = replace(BUGS["nanogpt-no-scale"], edit=same)
    with pytest.raises(AssertionError, match="nanogpt-no-scale"):
        measured(bug)


def test_edit_of_missing_text_raises():
    """An edit of text that the port does not contain raises an error."""
    with pytest.raises(ValueError, match="got count=0"):
        port_of("nanogpt", ("what is not there", ""))


def test_wrong_output_is_not_right(monkeypatch):
    """A right port with an output 1% too large no longer counts as right."""
    right = RIGHTS["nanogpt/gpt-0/float32/eager-wide-inf/plain"]
    assert is_right(right)
    noted = right.recorded()
    monkeypatch.setattr(
        Right, "recorded", lambda _: noted | {"output": noted["output"] * np.float32(1.01)}
    )
    assert not is_right(right)


def test_verdict_of_bug_and_of_right_port():
    """A verdict on a bug names its first stage; one on a right port is clean."""
    caught = verdict_on(Job("nanogpt-no-scale"))
    assert is_caught(caught)
    assert caught["first"] == caught["stage"] == "scores"
    clean = verdict_on(Job("nanogpt/gpt-0/float32/eager-wide-inf/plain"))
    assert is_clean(clean)
    assert not is_caught(clean)
    assert first_stage("output", ["attn_weights"]) == "attn_weights"
    assert first_stage("step1.q", ["step0.output"]) == "step0.output"


def test_every_bug_has_its_accepted_names():
    """Each bug has accepted names, all of them in the catalog."""
    assert list(ACCEPTED) == list(BUGS)
    assert set().union(*ACCEPTED.values()) <= page_by_bug().keys()


def named(which, *findings):
    """Classify the names of a verdict, each with the bugs from which it cannot be distinguished."""
    explanation = {"findings": [{"bugs": names, "others": others} for names, others in findings]}
    return grade_of(
        {
            "id": which,
            "names": [name for names, _ in findings for name in names],
            "said": explanation,
        }
    )


def test_names_of_verdict_are_classified():
    """Names of a verdict are classified, such as `right`, `wrong`, `one of several` or none."""
    abouts = {bug.name: bug.about for bug in bugs_for(BUGS["nanogpt-no-scale"].problem.case)}
    scale, squared = abouts["scale-missing"], abouts["scale-squared"]
    assert named("nanogpt-no-scale") == "none given"
    assert named("nanogpt-no-scale", (["scale-missing"], [])) == "right"
    assert named("nanogpt-no-scale", (["scale-squared"], [])) == "wrong"
    assert named("nanogpt-no-scale", (["scale-squared"], [squared])) == "wrong"
    assert named("nanogpt-no-scale", (["scale-squared"], [scale])) == "one of several"
    assert (
        named("nanogpt-no-scale", (["scale-squared"], [scale]), (["mask-ignored"], [])) == "wrong"
    )
    assert named("nanogpt-head-3-louder", (["scale-missing"], [scale])) == "wrong"
    assert named("a bug of tomorrow", (["scale-missing"], [])) == "to be classified"


def test_pairs_of_names_are_classified():
    """Two names of a verdict are classified together, also
    among names that cannot be distinguished.
    """
    which = "nanogpt-strict-causal"
    abouts = {bug.name: bug.about for bug in bugs_for(BUGS[which].problem.case)}
    strict, empty, scale = (
        abouts[name] for name in ("causal-excludes-self", "empty-row-nan", "scale-missing")
    )
    assert named(which, (["empty-row-nan"], []), (["causal-excludes-self"], [])) == "right"
    assert named(which, (["scale-missing"], [f"{empty}, and {strict}"])) == "one of several"
    assert named(which, (["scale-missing"], [f"{empty}, and {scale}"])) == "wrong"


def test_jobs_are_selected_by_half_and_style():
    """Jobs of both halves of a style are disjoint and add up to all of its jobs."""
    known, held_out_jobs = jobs(["known"], ["mpt"]), jobs(["held-out"], ["mpt"])
    assert not set(known) & set(held_out_jobs)
    assert {job.record.style for job in known + held_out_jobs} == {"mpt"}
    assert len(known + held_out_jobs) == len(jobs(["known", "held-out"], ["mpt"]))


def test_tool_prints_rates_and_verdicts(tmp_path):
    """The tool prints rates and writes a verdict for each selected
    port, with and without stages.
    """
    only = ["nanogpt-no-scale", "nanogpt/gpt-0/float32/eager-wide-inf/plain"]
    arguments = [word for port_id in only for word in ("--only", port_id)]
    command = [
        sys.executable,
        ROOT / "tools" / "diagnosis-rates",
        *arguments,
        "--json",
        tmp_path / "verdicts.json",
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert run.returncode == 0, run.stderr
    assert "bugs by style" in run.stdout
    assert "right ports by recording" in run.stdout
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    kinds = {(verdict["id"], verdict["output_only"]): verdict["verdict"] for verdict in verdicts}
    assert set(kinds) == {(only[1], False), (only[0], False), (only[0], True)}
    assert kinds[only[1], False] == "none"
    assert kinds[only[0], False] != "none"


def test_every_style_has_its_layers():
    """The styles with cases are exactly STYLES."""
    assert tuple(sorted(CASES)) == STYLES
