"""Families of bugs: what a law fits is reported with the page and the fix that known bugs have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import parity
from mha_spec import AttentionSpec, LinearScaling, Norm, Rope
from parity.core.case import Case
from parity.core.problem import make_problem
from parity.core.reference import steps
from parity.core.stages import run_steps
from parity.diagnosis.bugs import families
from parity.diagnosis.bugs.families import BugFamily

SPEC = AttentionSpec(
    32, 4, num_kv_heads=2, rope=Rope(scaling=LinearScaling(2.0)), window_size=5, scale=0.3, soft_cap=4.0, qk_norm=Norm()
)
PLAIN = AttentionSpec(32, 4, num_kv_heads=2, rope=Rope())
EVERY = [family for family in vars(families).values() if isinstance(family, BugFamily)]


def diagnosed(right, wrong, *stages, **applied):
    """What is said of a layer of one specification that should have another."""
    case = Case("layer", right, "", seq_len=12, is_causal=True, **applied)
    problem = make_problem(case, "float32")
    other = replace(problem, case=replace(case, spec=wrong))
    values = run_steps(steps(other, "float32"))
    return parity.diagnose({stage: values[stage] for stage in stages}, problem)


def test_a_family_has_a_page_and_its_fix_suits_a_layer():
    assert len(EVERY) > 30
    for family in EVERY:
        assert (Path(parity.__file__).parent / "bugs" / f"{family.page}.md").is_file(), family
        assert "{" not in family.fix_for(SPEC), family


@pytest.mark.parametrize(
    ("wrong", "page", "about", "fix"),
    [
        (
            {"rope": Rope(120000.0)},
            "rope-theta",
            "RoPE's theta is 120000 instead of 10000",
            "set RoPE's theta to 10000",
        ),
        ({"scale": 0.3}, "scale", "the scale of the scores is 0.3 instead of 0.3536", "divide the scores by sqrt"),
        ({"window_size": 4}, "sliding-window", "the window is 4 instead of none", "hide no keys"),
        ({"soft_cap": 2.5}, "soft-cap", "the soft cap is 2.5 instead of none", "do not cap"),
        (
            {"rope": Rope(scaling=LinearScaling(3.0))},
            "rope-scaling",
            "divided by is 3 instead of 1",
            "scale RoPE's frequencies as specified",
        ),
    ],
)
def test_a_number_that_nobody_listed_has_a_page_and_a_fix(wrong, page, about, fix):
    diagnosis = diagnosed(PLAIN, replace(PLAIN, **wrong), "output")
    (found,) = diagnosis.explanations
    assert (diagnosis.kind, found.bugs, found.docs, diagnosis.unknowns) == ("structure", (page,), (page,), [])
    assert about in found.about
    assert found.fixes[0].startswith(fix)
    assert diagnosis.cause == f"{page}: {found.about}"
    assert (diagnosis.likely_bug, diagnosis.fix) == (page, found.fixes[0])
    assert diagnosis.more == f"mha-parity bugs {page}"
    plain = diagnosis.to_dict()["explanations"][0]
    assert plain["docs"] == [page]
    assert plain["findings"]["found"][0]["pages"] == [page]


def test_a_law_without_a_family_keeps_no_name():
    problem = make_problem(Case("layer", PLAIN, "", seq_len=12, is_causal=True), "float32")
    values = run_steps(steps(problem, "float32"))
    diagnosis = parity.diagnose({"output": values["output"] * np.float32(0.9)}, problem)
    assert (diagnosis.kind, diagnosis.explanations) == ("law", [])


def test_a_factor_that_two_families_explain_has_both_pages():
    spec = replace(PLAIN, qk_norm=Norm())
    diagnosis = diagnosed(spec, replace(spec, scale=0.123), "output")
    assert diagnosis.explanations[0].docs == ("scale", "qk-norm")


def test_assert_parity_shows_the_page_of_a_law():
    problem = make_problem(Case("layer", PLAIN, "", seq_len=12, is_causal=True), "float32")
    other = replace(problem, case=replace(problem.case, spec=replace(PLAIN, rope=Rope(123456.0))))
    values = run_steps(steps(other, "float32"))
    with pytest.raises(AssertionError, match="mha-parity bugs rope-theta"):
        parity.assert_parity({"output": values["output"]}, problem=problem)
