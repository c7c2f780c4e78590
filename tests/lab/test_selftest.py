"""Tests of the self-test: at least one bug of each page is injected, detected and named."""

import json
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
from helpers.input_errors import rejects
from helpers.samples import sample

import mha_torch
from parity import CASES, make_problem, random_weights
from parity.explain.diagnosis.bugs import edited_layer, page_by_bug, ranks
from parity.explain.diagnosis.trial import Trial
from parity.measure.backends import driver, load_backend
from parity.measure.core.stages import run_steps, stage_named
from parity.use.cli.main import main
from parity_lab.injections import INJECTIONS, bug_to_inject, plan_of
from parity_lab.selftest import SELFTEST_CASES, Outcome, inject, run_with_bug, selftest_bugs

CASE_OF = {case.name: case for case in SELFTEST_CASES}
TRAINED = "trained-anarcii-causal", "trained-smollm2-causal"
PRODUCTS = "precision-bfloat16"
"""A bug in which all products lose too much precision."""

EVERY = [(case, name) for case in CASE_OF for name in ("", *selftest_bugs(CASE_OF[case]))]


def lies_in_weights(case, name):
    """Return whether a bug is injected into the weights alone."""
    return (
        bool(name) and not plan_of(name, make_problem(CASE_OF[case], "float32"), "torch").functions
    )


def once(pairs, *richest):
    """Keep each bug in one case, of the richest if possible, and no bug in every case."""
    richest_first = sorted(
        pairs, key=lambda pair: richest.index(pair[0]) if pair[0] in richest else len(richest)
    )
    richest_by_name = {name: (case, name) for case, name in reversed(richest_first) if name}
    return [
        (case, name) for case, name in pairs if not name or richest_by_name[name] == (case, name)
    ]


# On torch, each bug is injected in its richest case, lost precision in trained (wide) layers.
# `mha-parity selftest` injects them in all of their cases.
RICH = "gqa-rope-causal"
IN_TORCH = [
    pair for pair in EVERY if pair in {*once(EVERY, RICH), *((case, PRODUCTS) for case in TRAINED)}
]
# JAX compiles a function again for each bug in it: most bugs are therefore compared with those
# in the reference, and few are diagnosed. Bugs in the weights alone are tested on torch only,
# because NumPy changes the weights before either framework receives them.
IN_JAX = [
    pair
    for pair in once(EVERY, RICH)
    if pair[1] not in ("", PRODUCTS) and not lies_in_weights(*pair)
]
WHOLE_IN_JAX = [(RICH, name) for name in ("", "kv-heads-tiled", "causal-off-by-one")]
WHOLE_IN_JAX += [
    pair for pair in IN_JAX if pair[1] in ("nan-leaks", "batch-as-tokens")
]  # only in its paths
WHOLE_IN_JAX += [pair for pair in IN_JAX if pair[1].startswith("grad-")]  # only in gradients
INJECTED = [("torch", *pair) for pair in IN_TORCH] + [("jax", *pair) for pair in WHOLE_IN_JAX]
# A bug replaces a function of torch, or weights: these are one for each function. test_diagnose
# covers every bug in the reference, and test_precision covers lost precision, whose search takes
# half a minute here.
A_FUNCTION_EACH = (
    *(
        "q_proj-transposed",
        "qk-norm-missing",
        "latent-kv-factor-missing",
        "heads-not-moved",
        "rope-interleaved",
    ),
    *(
        "kv-heads-tiled",
        "cache-keys-as-values",
        "cache-scale-missing",
        "scale-missing",
        "alibi-missing",
        "relative-bias-ignored",
    ),
    *(
        "relative-products-ignored",
        "temperature-ignored",
        "soft-cap-ignored",
        "causal-off-by-one",
        "padding-ignored",
    ),
    *("mask-flipped", "nan-leaks", "value-padding-combined", "gate-missing", "residual-added"),
    "blocks-sum-not-rescaled",
)
FIRST = {
    injected
    for injected in INJECTED
    if injected[0] == "torch" and injected[2] in A_FUNCTION_EACH and injected[1] not in TRAINED
}
FIRST |= {
    ("torch", RICH, ""),
    ("jax", RICH, "kv-heads-tiled"),
    ("torch", "trained-anarcii-causal", "batch-as-tokens"),
}
PRECISIONS_CONFUSED = {
    # Scores of trained layers are so large that coarse and finer products are confused.
    ("trained-smollm2-causal", "precision-bfloat16"),
}


@sample(where=lambda backend, case, name: (backend, case, name) in FIRST)
@pytest.mark.parametrize(("backend", "case", "name"), INJECTED)
def test_injected_bug_is_detected_and_named(backend, case, name):
    """An injected bug is detected at one of its stages, and the diagnosis names it and its
    kind; without a bug, nothing is detected.
    """
    outcome = run_with_bug(name, CASE_OF[case], backend)
    assert outcome.is_caught, (
        f"seen at {outcome.stage or 'no stage'}, and not at one of {outcome.expected}"
    )
    if (case, name) in PRECISIONS_CONFUSED:
        assert outcome.kind == "precision"
    else:
        assert outcome.is_named, f"named {outcome.named}"
        if name == PRODUCTS:
            assert outcome.kind == "precision"
        elif case != "nan":  # NaN may spread further in the paths of a module
            assert outcome.kind == ("structure" if name else "none")


@cache
def problem_of(case):
    """Return the problem of a case for JAX, with random weights except for trained layers."""
    spec = CASE_OF[case].spec
    weights = None if case in TRAINED else random_weights(spec)
    return make_problem(CASE_OF[case], "float32", weights)


SAME = [pair for pair in IN_JAX if pair not in WHOLE_IN_JAX]


@sample(where=lambda case, name: (case, name) in SAME[::6])
@pytest.mark.parametrize(("case", "name"), SAME)
def test_injected_bug_matches_reference_bug(case, name):
    """A bug injected into JAX is detected first at one of its stages, and no stage differs
    from the reference with the same bug.

    Steps that the bug does not change come from the reference, so that JAX does not
    compile them again; paths of the module are left out, since they take longest and have the
    same stages.
    """
    problem, port = problem_of(case), load_backend("jax")
    made = bug_to_inject(name, problem.case)
    values, num_run = {}, 0
    with inject(name, problem, "jax") as injected, port.lock("float32"), np.errstate(all="ignore"):
        for step_with_bug, right_step, is_changed in zip(
            driver.steps(port, injected), *in_reference_with(made, problem), strict=True
        ):
            values |= (step_with_bug if is_changed else right_step)(values)
            num_run += is_changed
    trial = Trial(problem, values, "ieee")
    assert num_run >= 1
    wrong = trial.wrong(trial.stages, ())
    assert stage_named(wrong[0]).kind in made.stages
    same = next(known for known in trial.known if (known.name, known.about) == (name, made.about))
    assert trial.wrong(trial.stages, (same,)) == []


def in_reference_with(made, problem):
    """Return the steps of the reference with a bug, and whether each changes outside of paths."""
    wrong, right = (edited_layer(problem, "float32", some).steps() for some in ([made], []))
    with np.errstate(all="ignore"):
        values = run_steps(wrong)
        pairs = [(one(values), other(values)) for one, other in zip(wrong, right, strict=True)]
    return wrong, [
        not any(stage_named(name).path for name in one)
        and not all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)
        for one, other in pairs
    ]


def functions_replaced(injected):
    plans = [
        plan_of(name, make_problem(CASE_OF[case], "float32"), backend)
        for backend, case, name in injected
    ]
    return {function for plan in plans for function in plan.functions}


def test_first_bugs_replace_every_function():
    """Bugs that `make test` injects replace all functions that any known bug replaces."""
    assert functions_replaced(FIRST) == functions_replaced(
        [("torch", *pair) for pair in IN_TORCH if pair[1] not in ("", PRODUCTS)]
    )


def test_each_page_has_an_injected_bug():
    """Every page of bugs, except the page of ranks, has a bug in INJECTIONS, and each of these is
    in a case.
    """
    pages = page_by_bug()
    assert {pages[name] for name in INJECTIONS} == {*pages.values()} - {ranks.PAGE}
    assert {name for _, name in once(EVERY) if name} == {*INJECTIONS}


def test_surviving_bug_is_not_caught():
    """An outcome is not caught without a stage, at a wrong stage or after a false alarm, and
    not named by a different bug.
    """
    assert not Outcome(
        "scale-missing", "mha", "torch", 0, ("scores",), "", (), (), "none"
    ).is_caught
    assert not Outcome(
        "scale-missing", "mha", "torch", 0, ("scores",), "output", (), (), "unknown"
    ).is_caught
    assert not Outcome("", "mha", "torch", 0, (), "scores", (), (), "unknown").is_caught
    assert not Outcome(
        "scale-missing", "mha", "torch", 0, ("scores",), "scores", ("scale-twice",), (), "structure"
    ).is_named


def test_injected_bug_is_removed():
    """`inject` replaces a function of mha_torch and restores it afterwards, also after an
    exception.
    """
    original, public = mha_torch.stages.attention_scores, mha_torch.attention_scores
    problem = make_problem(CASES["full"], "float32")
    with inject("scale-missing", problem, "torch"):
        assert mha_torch.stages.attention_scores is not original
    assert mha_torch.stages.attention_scores is original
    with pytest.raises(RuntimeError, match="stop"), inject("scale-missing", problem, "torch"):
        raise RuntimeError("stop")
    assert mha_torch.attention_scores is public


def test_unknown_bug_is_rejected():
    """Running with an unknown bug raises an error with its name."""
    with rejects("bug", bug="no-such"):
        run_with_bug("no-such", CASES["full"], "torch")


@pytest.mark.thorough
def test_selftest_prints_and_writes_results(capsys, tmp_path):
    """`selftest` reports all bugs of a case as detected and named, and its JSON has each
    outcome.
    """
    path = tmp_path / "out.json"
    assert main(["selftest", "--backends", "torch", "--cases", "window", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    count = 1 + len(selftest_bugs(CASE_OF["window"]))
    assert f"{count} injected, {count} detected at their stage, {count} named" in out
    outcomes = json.loads(path.read_text())["outcomes"]
    assert len(outcomes) == count
    assert all(outcome["is_caught"] and outcome["is_named"] for outcome in outcomes)


def test_selftest_fails_if_bug_survives(capsys, monkeypatch):
    """If a bug has no effect, `selftest` exits with status 1 and prints it as not detected."""
    monkeypatch.setattr(
        "parity_lab.selftest.inject", lambda name, problem, backend: nullcontext(problem)
    )
    assert main(["selftest", "--backends", "torch", "--cases", "window"]) == 1
    assert (
        "NOT DETECTED: q_proj-transposed in window on torch: all stages passed"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--cases", "nothing"), ("--backends", "tt")],
)
def test_bad_usage_of_selftest_exits_2(capsys, flag, value):
    """An unknown case or backend exits with status 2 and an error with the option and its value."""
    assert main(["selftest", flag, value]) == 2
    assert rejects(flag, {flag: value}).is_printed_in(capsys.readouterr().err)
