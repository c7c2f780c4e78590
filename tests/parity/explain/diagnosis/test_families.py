"""Families of bugs: a pattern of a family is reported with a page and a fix, like a known bug."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import parity
from mha_spec import AttentionSpec, LinearScaling, LongRopeScaling, Norm, Rope, YarnScaling
from parity.explain.diagnosis.bugs import families
from parity.explain.diagnosis.bugs.families import BugFamily
from parity.explain.diagnosis.bugs.record import WrongField
from parity.explain.diagnosis.fits.words import instead_of
from parity.measure.core.case import Case
from parity.measure.core.problem import make_problem
from parity.measure.core.reference import steps
from parity.measure.core.stages import run_steps

SPEC = AttentionSpec(
    32,
    4,
    num_kv_heads=2,
    rope=Rope(scaling=LinearScaling(2.0)),
    window_size=5,
    scale=0.3,
    soft_cap=4.0,
    qk_norm=Norm(),
)
PLAIN = AttentionSpec(32, 4, num_kv_heads=2, rope=Rope())
EVERY = [family for family in vars(families).values() if isinstance(family, BugFamily)]


def diagnosed(right, wrong, *stages, **applied):
    """Diagnose stages of a layer with a wrong specification, in a problem with the right one."""
    case = Case("layer", right, "", seq_len=12, is_causal=True, **applied)
    problem = make_problem(case, "float32")
    other = replace(problem, case=replace(case, spec=wrong))
    values = run_steps(steps(other, "float32"))
    return parity.diagnose({stage: values[stage] for stage in stages}, problem)


def test_family_has_a_page_and_a_fix():
    """Each family has a page, and its fix for a layer has no placeholders."""
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
        (
            {"scale": 0.3},
            "scale",
            "the scale of the scores is 0.3 instead of 0.3536",
            "divide the scores by sqrt",
        ),
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
def test_fitted_number_has_page_and_fix(wrong, page, about, fix):
    """A fitted number is reported with a page, its words and a fix, like a known bug."""
    diagnosis = diagnosed(PLAIN, replace(PLAIN, **wrong), "output")
    (finding,) = diagnosis.named
    assert (diagnosis.kind, finding.bugs, finding.pages, diagnosis.unnamed) == (
        "structure",
        (page,),
        (page,),
        [],
    )
    assert about in finding.about
    assert finding.fixes[0].startswith(fix)
    assert diagnosis.cause == f"{page}: {finding.about}"
    assert (diagnosis.likely_bug, diagnosis.fix) == (page, finding.fixes[0])
    assert diagnosis.more == f"mha-parity bugs {page}"
    plain = diagnosis.to_dict()["findings"][0]
    assert plain["pages"] == [page]
    assert plain["description"]["patterns"][0]["pages"] == [page]


def test_pattern_without_family_has_no_name():
    """A bias of each key on the scores is a pattern without an explanation by a bug."""
    problem = make_problem(Case("layer", PLAIN, "", seq_len=12, is_causal=True), "float32")
    values = run_steps(steps(problem, "float32"))
    wrong = values["scores"] + np.linspace(0.5, 1.5, 12, dtype=np.float32) ** 2
    diagnosis = parity.diagnose({"scores": wrong}, problem)
    assert (diagnosis.kind, diagnosis.named) == ("pattern", [])


def test_factor_of_the_output_has_a_page():
    """A factor of 0.9 on the output has the page of stray factors."""
    problem = make_problem(Case("layer", PLAIN, "", seq_len=12, is_causal=True), "float32")
    values = run_steps(steps(problem, "float32"))
    diagnosis = parity.diagnose({"output": values["output"] * np.float32(0.9)}, problem)
    (finding,) = diagnosis.named
    assert (diagnosis.kind, finding.pages) == ("structure", ("stray-factor",))


def test_keep_rate_on_the_context_is_dropout():
    """A context divided by a usual keep rate has the page of dropout."""
    problem = make_problem(Case("layer", PLAIN, "", seq_len=12, is_causal=True), "float32")
    values = run_steps(steps(problem, "float32"))
    diagnosis = parity.diagnose({"context": values["context"] / np.float32(0.9)}, problem)
    assert [finding.pages for finding in diagnosis.findings] == [("dropout",)]


SCALINGS = {
    "yarn": YarnScaling(4.0, 64),
    "longrope": LongRopeScaling(4.0, 8, (1.0, 1.1, 1.3, 1.7), (1.0, 1.9, 3.1, 4.0)),
}


@pytest.mark.parametrize("stage", ["q", "output"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_unscaled_frequencies_are_named(kind, stage):
    """Frequencies that are not scaled are named if cosines and sines have the scaling's factor, and
    no theta is called wrong.
    """
    scaling = SCALINGS[kind]
    right = replace(PLAIN, rope=Rope(scaling=scaling))
    plain = replace(
        right, rope=Rope(scaling=YarnScaling(1.0, 64, attention_factor=scaling.amplitude()))
    )
    diagnosis = diagnosed(right, plain, stage)
    (finding,) = diagnosis.named
    assert finding.bugs == ("rope-scaling-missing",)
    assert finding.about == (
        f"RoPE's frequencies are not scaled ({kind}), although cosines and sines are multiplied by "
        f"its attention factor"
    )


def test_theta_without_scaling_says_both():
    """A different theta instead of a scaling is reported as a scaling that is missing."""
    right = replace(PLAIN, rope=Rope(scaling=LinearScaling(4.0)))
    (finding,) = diagnosed(right, replace(PLAIN, rope=Rope(40000.0)), "q", "k").named
    assert finding.pages == ("rope-scaling",)
    assert finding.about == (
        "RoPE's frequencies are the ones of theta 40000 without a scaling, instead of theta 10000 "
        "with linear scaling"
    )
    assert [wrong.field for wrong in finding.wrong_fields] == ["rope.theta", "rope.scaling"]


def test_right_number_is_not_called_wrong():
    """No words and no field can say that a number is wrong because it is what it should be."""
    for number in (10000, 10000.0):
        with pytest.raises(ValueError, match="10000 instead of the same number"):
            instead_of(10000.0, number)
        with pytest.raises(ValueError, match="instead of the same value"):
            WrongField("rope.theta", 10000.0, number)
    assert instead_of(10000.0, 10000.01) == ("10000", "10000.01")


def test_pattern_of_two_families_has_pages():
    """With a norm of q and k, a wrong scale has the pages of both families."""
    spec = replace(PLAIN, qk_norm=Norm())
    diagnosis = diagnosed(spec, replace(spec, scale=0.123), "output")
    assert diagnosis.named[0].pages == ("scale", "qk-norm")


def test_assert_parity_shows_page_of_pattern():
    """The message of `assert_parity` for a wrong theta has the page of its family."""
    problem = make_problem(Case("layer", PLAIN, "", seq_len=12, is_causal=True), "float32")
    other = replace(problem, case=replace(problem.case, spec=replace(PLAIN, rope=Rope(123456.0))))
    values = run_steps(steps(other, "float32"))
    with pytest.raises(AssertionError, match="mha-parity bugs rope-theta"):
        parity.assert_parity({"output": values["output"]}, problem=problem)
