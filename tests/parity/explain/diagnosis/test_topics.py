"""The steps of a topic of bugs are those that its bugs change."""

import pytest
from helpers.samples import sample

from parity import CASES, make_problem
from parity.explain.diagnosis.bugs import GRADIENTS, bugs_for, known_bugs
from parity.explain.diagnosis.trial import Trial
from parity.measure.core.stages import STEPS, STEPS_OF_A_CALL

NAMES = [name for name, case in CASES.items() if case.dtype is None and case.trained is None]


@sample(8)
@pytest.mark.parametrize("name", NAMES)
def test_bugs_change_steps_of_their_topic(name):
    """A bug changes no step except of its topic, if all stages before a step are right.

    Otherwise the search would not try it where it shows.
    """
    problem = make_problem(CASES[name], "float32")
    trial = Trial(problem, Trial(problem, {}, "ieee").values, "ieee")
    kinds = STEPS_OF_A_CALL if problem.case.is_cached else STEPS
    every_bug = known_bugs(problem.case)
    outside = []
    for index in range(len(trial.steps)):
        kind = kinds[index % len(kinds)]
        abouts = {bug.about for bug in known_bugs(problem.case, {kind})}
        others = [bug for bug in every_bug if bug.about not in abouts]
        outside += [(bug.name, kind) for bug in others if not trial.leaves(index, (), (bug,))]
    assert outside == []


def test_bugs_of_some_steps_are_a_part():
    """With steps, only the bugs of topics that change one of them are candidates."""
    case = CASES["gqa-causal"]
    every_name = [bug.name for bug in bugs_for(case)]
    of_scores = [bug.name for bug in bugs_for(case, {"scores"})]
    assert "scale-missing" in of_scores
    assert "q_proj-transposed" not in of_scores
    assert of_scores == [name for name in every_name if name in of_scores]
    of_backward = [bug.name for bug in bugs_for(case, {GRADIENTS})]
    of_module = [bug.name for bug in bugs_for(case, {"whole"})]
    assert sorted([*of_module, *of_backward]) == sorted(every_name)
    assert not {*of_module} & {*of_backward}


def test_restarted_temperature_needs_a_cache():
    """Only the temperature of a cached layer may count positions from the first token of a call."""
    for name, is_possible in (("temperature", False), ("decode-temperature", True)):
        names = {bug.name for bug in known_bugs(CASES[name])}
        assert ("temperature-restarted" in names) == is_possible
