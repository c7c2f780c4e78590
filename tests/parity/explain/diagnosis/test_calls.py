"""Bugs that only some calls of a cache have: two bugs of one stage, one in the prompt and one in
the steps after it, are two findings.
"""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from helpers.samples import sample

from mha_spec import AttentionSpec, Rope
from parity import Case, make_problem
from parity.explain.diagnosis.bugs import bugs_for, edited_layer
from parity.explain.diagnosis.diagnose import diagnose
from parity.explain.diagnosis.search import named_calls
from parity.explain.diagnosis.trial import Trial
from parity.measure.core.reference import Arithmetic
from parity.measure.core.stages import STEPS_OF_A_CALL, run_steps, steps_of

SPEC = AttentionSpec(32, 4, num_kv_heads=2, rope=Rope(), window_size=4)
CASE = Case(
    "prompt, steps", SPEC, "calls", seq_len=9, is_causal=True, chunks=(6, 1, 2), capacity=12
)
PROBLEM = make_problem(CASE, "float32")


def bug(name):
    return next(known for known in bugs_for(CASE) if known.name == name)


def stages_with(in_prompt, in_steps):
    """Return the stages of a layer with one bug in its first call, and a different one in the later
    calls.
    """
    of_prompt = edited_layer(PROBLEM, "float32", [bug(in_prompt)]).steps()
    of_steps = edited_layer(PROBLEM, "float32", [bug(in_steps)]).steps()
    size = len(of_prompt) // len(CASE.chunks)
    return run_steps([*of_prompt[:size], *of_steps[size:]])


def outputs_of(stages):
    return {f"step{call}.output": stages[f"step{call}.output"] for call in range(3)}


PAIRS = [
    ("scale-missing", "scale-by-d-model"),
    ("causal-off-by-one", "window-one-too-wide"),
    ("q-heads-reversed", "q-heads-rolled"),
    ("window-ignored", "causal-off-by-one"),
]


@sample(2)
@pytest.mark.costly("searches for two bugs, each in some calls")
@pytest.mark.parametrize("has_stages", [True, False])
@pytest.mark.parametrize(("in_prompt", "in_steps"), PAIRS)
def test_two_bugs_of_a_stage_by_calls(in_prompt, in_steps, has_stages):
    """Each of two bugs is named for the calls that it explains, and for no others, from all stages
    and from the outputs alone.
    """
    check_two_bugs(in_prompt, in_steps, has_stages)


@pytest.mark.nightly  # the longest search
@pytest.mark.parametrize("has_stages", [True, False])
def test_two_bugs_of_rope_by_calls(has_stages):
    """Two bugs of RoPE are named for the calls that each explains."""
    check_two_bugs("rope-missing", "rope-reversed", has_stages)


def check_two_bugs(in_prompt, in_steps, has_stages):
    """The bug of the prompt is named for the first call, and the bug of the steps for the rest."""
    stages = stages_with(in_prompt, in_steps)
    if not has_stages:
        stages = outputs_of(stages)
    first, second = diagnose(stages, PROBLEM).findings
    assert (first.bugs, first.edits[0].when) == ((in_prompt,), "in the first call")
    assert (second.bugs, second.edits[0].when) == ((in_steps,), "in calls after the first")
    assert {stage[:5] for stage in first.stages} == {"step0"}
    assert {stage[:5] for stage in second.stages} == {"step1", "step2"}


@pytest.mark.parametrize("has_stages", [True, False])
@pytest.mark.parametrize("name", ["scale-missing", "k-v-swapped"])
def test_bug_of_a_single_call_is_named(name, has_stages):
    """A bug of one later call of several tokens, alone, is named with that call."""
    known = [known for known in bugs_for(CASE) if known.name == name]
    wrong = replace(known[-1], calls=frozenset([2]))
    trial = Trial(PROBLEM, {}, "ieee")
    stages = {}
    for index in range(len(trial.steps)):
        stages |= trial.computed(index, (wrong,))
    stages = {name: x for name, x in stages.items() if not name.startswith("step2.module")}
    if not has_stages:
        stages = outputs_of(stages)
    (finding,) = diagnose(stages, PROBLEM).findings
    assert (finding.bugs, finding.edits[0].when) == ((name,), "in call 2 alone")


def test_bug_after_the_prompt_is_named():
    """A bug that would change what the prompt caches is named for the later calls alone, from the
    outputs.
    """
    wrong = replace(bug("v-heads-reversed"), calls=frozenset([1, 2]))
    trial = Trial(PROBLEM, {}, "ieee")
    stages = {}
    for index in range(len(trial.steps)):
        stages |= trial.computed(index, (wrong,))
    (finding,) = diagnose(outputs_of(stages), PROBLEM).findings
    assert finding.bugs == ("v-heads-reversed",)
    assert finding.edits[0].when == "in calls after the first"


def stages_of_unknown_steps():
    """Return stages whose prompt has a known bug, and whose steps have an unknown one."""
    stages = stages_with("scale-missing", "softmax-over-heads")
    noise = np.random.default_rng(0).standard_normal((2, 1, 32)).astype(np.float32)
    for call in range(1, 3):
        stages[f"step{call}.output"] = stages[f"step{call}.output"] * noise
    return stages


def check_limit(stages):
    """The bug of the prompt is named for the first call alone."""
    first, *others = diagnose(stages, PROBLEM).findings
    assert (first.bugs, first.edits[0].when) == (("scale-missing",), "in the first call")
    assert others


def test_unknown_steps_limit_a_bug():
    """If no known bug explains the steps, the bug of the prompt is named for the first call."""
    check_limit(stages_of_unknown_steps())


@pytest.mark.nightly  # outputs alone have the longest search
def test_unknown_steps_limit_output_bug():
    """The same from the outputs alone."""
    check_limit(outputs_of(stages_of_unknown_steps()))


@pytest.mark.parametrize("has_stages", [True, False])
@pytest.mark.parametrize("name", ["scale-missing", "rope-missing", "kv-heads-tiled"])
def test_bug_of_all_calls_has_no_limit(name, has_stages):
    """A bug of every call is one finding for all of them."""
    stages = run_steps(edited_layer(PROBLEM, "float32", [bug(name)]).steps())
    if not has_stages:
        stages = outputs_of(stages)
    (finding,) = diagnose(stages, PROBLEM).findings
    assert finding.bugs == (name,)
    assert not finding.edits[0].when
    assert not finding.others


def test_stage_depends_on_earlier_calls():
    """A stage of a later call is computed again if edits of an earlier call change what that one
    caches.
    """
    calls = dict(named_calls(CASE))
    later = replace(bug("rope-reversed"), calls=calls["in calls after the first"])
    first = replace(bug("rope-missing"), calls=calls["in the first call"])
    trial = Trial(PROBLEM, {}, "ieee")
    alone = trial.stage("step1.output", (later,))
    both = trial.stage("step1.output", (first, later))
    expected = stages_with("rope-missing", "rope-reversed")["step1.output"]
    assert np.abs(both - expected).max() < 1e-5
    assert np.abs(alone - expected).max() > 0.1


def test_unknown_cause_is_described_once(monkeypatch):
    """A stage that nothing explains is described in its first call: in later calls it follows."""
    described = []
    describe = Trial.describe

    def counted(trial, stage, *arguments):
        described.append(stage)
        return describe(trial, stage, *arguments)

    monkeypatch.setattr(Trial, "describe", counted)
    rng = np.random.default_rng(0)
    stages = {name: x + rng.normal(size=x.shape) for name, x in outputs_of(right_stages()).items()}
    (finding,) = diagnose(stages, PROBLEM, seconds=0.5).findings
    assert not finding.is_explained
    assert finding.follows == ("step1.output", "step2.output")
    assert described == ["step0.output"]


def right_stages():
    return run_steps(edited_layer(PROBLEM, "float32", []).steps())


def test_steps_are_made_on_request():
    """A layer of many calls makes only the requested steps: a search makes thousands of layers."""
    made = []

    class Calls:
        def call(self, index):
            made.append(index)
            return self

        def mask(self, _):
            return {"mask": np.zeros(1)}

    steps = steps_of(cast(Any, Calls()), CASE)
    assert len(steps) == len(CASE.chunks) * len(STEPS_OF_A_CALL)
    assert steps[len(STEPS_OF_A_CALL)]({}).keys() == {"step1.mask"}
    assert made == [1]
    with pytest.raises(IndexError):
        steps[len(steps)]


def test_weights_are_widened_once(monkeypatch):
    """A search converts each weight once: a conversion takes longer than a product with a token."""
    converted = []
    widen = Arithmetic.widen

    def counted(arithmetic, x):
        converted.extend(name for name, weight in PROBLEM.weights.items() if x is weight)
        return widen(arithmetic, x)

    monkeypatch.setattr(Arithmetic, "widen", counted)
    trial = Trial(PROBLEM, {}, "ieee")
    for name in ("scale-missing", "scale-by-d-model", "window-ignored"):
        assert trial.stage("step2.output", (bug(name),)).any()
    assert converted.count("out_proj.weight") == 1
