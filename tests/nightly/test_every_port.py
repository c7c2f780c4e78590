"""Ports of tests/wild: all are audited by plain arithmetic; right ones are diagnosed, and some of the wrong ones.

tests/parity/diagnosis/test_wild.py has twenty of them in `make test`.
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
from wild.rates import Job, first_said, is_caught, is_clean, is_placed, jobs, judge, judged_names
from wild.records import STYLES, Right, half, port_of
from wild.sets import BUGS, CASES, RIGHTS

from parity.diagnosis.bugs import bugs_for, page_by_bug

SOME = slice(None, None, 24)
"""Of each set of wrong ports; `tools/diagnosis-rates` diagnoses all."""


@pytest.fixture(scope="module", params=STYLES)
def style(request):
    """Each style in turn; its tests come one after the other, for what ran in one of them is kept for the next."""
    return request.param


def test_there_are_enough_of_them():
    assert len(RIGHTS) >= 500
    assert len(BUGS) >= 280
    by_style = Counter(bug.style for bug in BUGS.values())
    assert len(STYLES) >= 9
    assert sum(number >= 25 for number in by_style.values()) >= 6
    for ids in (RIGHTS, BUGS):
        known = sum(half(each) == "known" for each in ids)
        assert 0.4 < known / len(ids) < 0.6


def test_every_bug_is_where_its_record_says(style):
    differ = {}
    for bug in BUGS.values():
        if bug.style != style:
            continue
        assert is_right(Right(style, bug.case, 0, bug.dtype, How(), "plain")), bug.case
        found = measured(bug)
        said = (bug.stage, dict(bug.limited), bug.in_output)
        shown = (found.stage, {axis: found.limited.get(axis) for axis in bug.limited}, found.in_output)
        if said != shown:
            differ[bug.id] = (said, shown)
    assert not differ


def test_right_ports_raise_no_alarm(style):
    """Each is shown to be right first. Of the half `apart` only the number is reported."""
    asked = [job for job in jobs(["known", "apart"], [style]) if job.id in RIGHTS and job.record.how.mode != "compile"]
    verdicts = list(map(judge, asked))
    alarms = [verdict for verdict in verdicts if not is_clean(verdict)]
    assert [verdict["id"] for verdict in alarms if verdict["half"] == "known"] == []
    assert len(alarms) == 0


@pytest.mark.parametrize("which", ["known", "apart"])
def test_bugs_are_caught_by_their_stages_and_most_of_them_named_or_placed(which):
    """Of the half `apart` only the numbers are reported."""
    of_stages = [job for job in jobs([which]) if job.id in BUGS and not job.output_only]
    verdicts = list(map(judge, of_stages[SOME]))
    missed, placed = [verdict for verdict in verdicts if not is_caught(verdict)], sum(map(is_placed, verdicts))
    assert [verdict["id"] for verdict in missed if which == "known"] == []
    assert len(missed) == 0
    assert placed >= 0.9 * len(verdicts)
    judgements = Counter(map(judged_names, verdicts))
    assert judgements["wrong"] == 0
    assert judgements["to be judged"] == 0


def test_an_edit_that_changes_nothing_is_no_bug():
    same = ("att = att * (1.0 / math.sqrt(hs))", "att = att / math.sqrt(hs)")
    bug = replace(BUGS["nanogpt-no-scale"], edit=same)
    with pytest.raises(AssertionError, match="nanogpt-no-scale"):
        measured(bug)


def test_an_edit_must_find_its_place():
    with pytest.raises(ValueError, match="got count=0"):
        port_of("nanogpt", ("what is not there", ""))


def test_a_wrong_output_is_not_right(monkeypatch):
    right = RIGHTS["nanogpt/gpt-0/float32/eager-wide-inf/plain"]
    assert is_right(right)
    noted = right.recorded()
    monkeypatch.setattr(Right, "recorded", lambda _: noted | {"output": noted["output"] * np.float32(1.01)})
    assert not is_right(right)


def test_a_verdict_says_what_was_caught():
    caught = judge(Job("nanogpt-no-scale"))
    assert is_caught(caught)
    assert caught["first"] == caught["stage"] == "scores"
    clean = judge(Job("nanogpt/gpt-0/float32/eager-wide-inf/plain"))
    assert is_clean(clean)
    assert not is_caught(clean)
    assert first_said("output", ["attn_weights"]) == "attn_weights"
    assert first_said("step1.q", ["step0.output"]) == "step0.output"


def test_every_bug_has_its_accepted_names():
    assert list(ACCEPTED) == list(BUGS)
    assert set().union(*ACCEPTED.values()) <= page_by_bug().keys()


def named(which, *explanations):
    """What is judged of a verdict: names, and what they cannot be told from."""
    said = {"explanations": [{"bugs": names, "others": others} for names, others in explanations]}
    return judged_names({"id": which, "names": [name for names, _ in explanations for name in names], "said": said})


def test_names_of_a_verdict_are_judged():
    abouts = {each.name: each.about for each in bugs_for(BUGS["nanogpt-no-scale"].problem.case)}
    scale, squared = abouts["scale-missing"], abouts["scale-squared"]
    assert named("nanogpt-no-scale") == "none given"
    assert named("nanogpt-no-scale", (["scale-missing"], [])) == "right"
    assert named("nanogpt-no-scale", (["scale-squared"], [])) == "wrong"
    assert named("nanogpt-no-scale", (["scale-squared"], [squared])) == "wrong"
    assert named("nanogpt-no-scale", (["scale-squared"], [scale])) == "one of several"
    assert named("nanogpt-no-scale", (["scale-squared"], [scale]), (["mask-ignored"], [])) == "wrong"
    assert named("nanogpt-head-3-louder", (["scale-missing"], [scale])) == "wrong"
    assert named("a bug of tomorrow", (["scale-missing"], [])) == "to be judged"


def test_two_names_of_a_verdict_are_judged_together():
    which = "nanogpt-strict-causal"
    abouts = {each.name: each.about for each in bugs_for(BUGS[which].problem.case)}
    strict, empty, scale = (abouts[name] for name in ("causal-excludes-self", "empty-row-nan", "scale-missing"))
    assert named(which, (["empty-row-nan"], []), (["causal-excludes-self"], [])) == "right"
    assert named(which, (["scale-missing"], [f"{empty} and {strict}"])) == "one of several"
    assert named(which, (["scale-missing"], [f"{empty} and {scale}"])) == "wrong"


def test_jobs_are_of_a_half_and_a_style():
    known, apart = jobs(["known"], ["mpt"]), jobs(["apart"], ["mpt"])
    assert not set(known) & set(apart)
    assert {job.record.style for job in known + apart} == {"mpt"}
    assert len(known + apart) == len(jobs(["known", "apart"], ["mpt"]))


def test_the_tool_prints_rates_and_writes_verdicts(tmp_path):
    only = ["nanogpt-no-scale", "nanogpt/gpt-0/float32/eager-wide-inf/plain"]
    given = [word for each in only for word in ("--only", each)]
    command = [sys.executable, ROOT / "tools" / "diagnosis-rates", *given, "--json", tmp_path / "verdicts.json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert run.returncode == 0, run.stderr
    assert "bugs by style" in run.stdout
    assert "right ports by recording" in run.stdout
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    found = {(each["id"], each["output_only"]): each["verdict"] for each in verdicts}
    assert set(found) == {(only[1], False), (only[0], False), (only[0], True)}
    assert found[only[1], False] == "none"
    assert found[only[0], False] != "none"


def test_every_style_has_its_layers():
    assert tuple(sorted(CASES)) == STYLES
