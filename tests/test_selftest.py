"""The mutation score: every mistake that the harness knows, made in a sibling on purpose, is seen and named."""

import json
from contextlib import nullcontext

import pytest

import mha_torch
from parity import CASES, make_problem
from parity.cli.main import main
from parity.diagnosis.mistakes import mistakes_for
from parity.diagnosis.selftest import SELFTEST_CASES, Outcome, mistakes_in, plan_of, plant, planted

CASE_OF = {case.name: case for case in SELFTEST_CASES}
SPECS = ("mha", "gqa-rope-causal")
IN_SPECS = {name for case in SPECS for name in mistakes_in(CASE_OF[case])}
KINDS = {name for name in CASE_OF if name.startswith("rope-")}  # in which the rest is as elsewhere
ELSEWHERE = {name for case in CASE_OF if case not in KINDS for name in mistakes_in(CASE_OF[case])}
EVERY = [
    (case, name)
    for case in CASE_OF
    for name in ("", *mistakes_in(CASE_OF[case]))
    if case not in KINDS or name not in ELSEWHERE
]


def lies_in_weights(case, name):
    """Whether a mistake is planted in the weights alone."""
    return bool(name) and not plan_of(name, make_problem(CASE_OF[case], "float32"), "torch").functions


# JAX compiles each function anew for each mistake: there the other cases have only what is theirs alone, and no case
# has what lies in the weights alone, changed in NumPy before either sibling is given them: torch stands for both.
PLANTED = {
    "torch": EVERY,
    "jax": [
        (case, name)
        for case, name in EVERY
        if (case in SPECS or not name or name not in IN_SPECS) and not lies_in_weights(case, name)
    ],
}
UNNAMED = {
    # The scores of trained layers are so large that what products lose is not told from what a finer product loses.
    ("trained-anarcii-causal", "precision-lofi"),
    ("trained-smollm2-causal", "precision-bfloat16"),
}


@pytest.mark.parametrize(
    ("backend", "case", "name"),
    [
        pytest.param(backend, *each, id=f"{backend}-{each[0]}-{each[1]}")
        for backend in PLANTED
        for each in PLANTED[backend]
    ],
)
def test_a_planted_mistake_is_seen_at_its_stage_and_named(backend, case, name):
    outcome = plant(name, CASE_OF[case], backend)
    assert outcome.is_caught, f"seen at {outcome.stage or 'no stage'}, and not at one of {outcome.expected}"
    if (case, name) in UNNAMED:
        assert outcome.kind == "precision"
    else:
        assert outcome.is_named, f"named {outcome.named}"


def test_every_mistake_is_planted_somewhere():
    cases = [*CASES.values(), *SELFTEST_CASES]
    known = {mistake.name for case in cases for mistake in mistakes_for(case)}
    in_torch, in_jax = ({name for _, name in PLANTED[backend]} for backend in ("torch", "jax"))
    assert known - in_torch == set()
    assert known - in_jax == {name for case, name in EVERY if lies_in_weights(case, name)} - in_jax


def test_a_mistake_that_survives_is_not_called_caught():
    assert not Outcome("scale-missing", "mha", "torch", 0, ("scores",), "", (), (), "none").is_caught
    assert not Outcome("scale-missing", "mha", "torch", 0, ("scores",), "output", (), (), "unknown").is_caught
    assert not Outcome("", "mha", "torch", 0, (), "scores", (), (), "unknown").is_caught
    assert not Outcome(
        "scale-missing", "mha", "torch", 0, ("scores",), "scores", ("scale-twice",), (), "structure"
    ).is_named


def test_what_was_planted_is_taken_out_again():
    original = mha_torch.stages.attention_scores
    problem = make_problem(CASES["full"], "float32")
    with planted("scale-missing", problem, "torch"):
        assert mha_torch.stages.attention_scores is not original
    assert mha_torch.stages.attention_scores is original
    with pytest.raises(RuntimeError, match="stop"), planted("scale-missing", problem, "torch"):
        raise RuntimeError("stop")
    assert mha_torch.attention_scores is original


def test_what_cannot_be_planted_is_refused():
    with pytest.raises(ValueError, match="hypothesis must be one that can be planted in full, got 'no-such'"):
        plant("no-such", CASES["full"], "torch")


def test_the_command_prints_a_table_and_writes_the_outcomes(capsys, tmp_path):
    path = tmp_path / "out.json"
    assert main(["selftest", "--backends", "torch", "--cases", "window", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    count = 1 + len(mistakes_in(CASE_OF["window"]))
    assert f"{count} planted, {count} seen at their stage, {count} named" in out
    outcomes = json.loads(path.read_text())["outcomes"]
    assert len(outcomes) == count
    assert all(outcome["is_caught"] and outcome["is_named"] for outcome in outcomes)


def test_the_command_fails_where_a_mistake_survives(capsys, monkeypatch):
    monkeypatch.setattr("parity.diagnosis.selftest.planted", lambda name, problem, backend: nullcontext(problem))
    assert main(["selftest", "--backends", "torch", "--cases", "window"]) == 1
    assert "NOT SEEN: out_proj-transposed in window on torch: all stages passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "nothing"], "--cases must match one of"),
        (["--backends", "tt"], "--backends must be of jax, torch, got tt"),
    ],
)
def test_bad_usage_of_the_command_is_told_in_a_line(capsys, arguments, message):
    assert main(["selftest", *arguments]) == 2
    assert message in capsys.readouterr().err
