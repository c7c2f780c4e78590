"""Bugs that users and packages register are found, listed and rejected like the project's."""

from dataclasses import replace
from importlib import metadata

import numpy as np
import pytest
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample

import parity
from parity.explain.diagnosis.bugs import bugs_for, edited_layer, registry
from parity.measure.core.stages import run_steps
from parity.use.cli.main import main

PROBLEM = parity.make_problem("gqa-causal", "float32")

SCALE = {
    "about": "the scale is 1 / N instead of 1 / sqrt(H)",
    "edit": lambda spec: replace(spec, scale=1.0 / spec.num_heads),
    "fix": "divide the scores by sqrt(head_dim)",
    "page": "# The scale is 1 / N\n\nSeen in kernels.",
    "stages": ["scores"],
}


def squared(layer, original, values):
    return {"attn_weights": original(values)["attn_weights"] ** 2}


@pytest.fixture(autouse=True)
def no_own_bugs(own_registrations):
    """Start without registered bugs, and leave none."""
    registry.OWN_BUGS.clear()
    registry.load_entry_points.cache_clear()
    yield
    registry.load_entry_points.cache_clear()


def register(name="scale-by-heads", **changed):
    values = {**SCALE, **changed}
    parity.register_bug(name, values.pop("about"), **values)


def stages_with(name):
    """Return the stages of the reference with a registered bug, in float32."""
    (bug,) = (bug for bug in bugs_for(PROBLEM.case) if bug.name == name)
    return run_steps(edited_layer(PROBLEM, "float32", [bug]).steps())


@pytest.mark.parametrize(
    ("name", "edit", "stage"),
    [
        ("scale-by-heads", SCALE["edit"], "scores"),
        ("weights-squared", lambda spec: {"attn_weights": squared}, "attn_weights"),
    ],
)
@pytest.mark.parametrize("is_output", [False, True])
def test_registered_bug_is_found(name, edit, stage, is_output):
    """A specification or an override is named from all stages and from the output, with its fix and
    page; before it is registered, it is not.
    """
    register(name, edit=edit, stages=[stage])
    stages = stages_with(name)
    if is_output:
        stages = {"output": stages["output"]}
    (finding,) = parity.diagnose(stages, PROBLEM).findings
    assert finding.bugs == (name,)
    assert finding.fixes == (SCALE["fix"],)
    assert finding.more == f"mha-parity bugs {name}"
    registry.OWN_BUGS.clear()
    assert name not in [
        bug for finding in parity.diagnose(stages, PROBLEM).findings for bug in finding.bugs
    ]


def test_right_layer_has_no_registered_bug():
    """A registered bug is not reported for right stages."""
    register()
    right = run_steps(edited_layer(PROBLEM, "float32", []).steps())
    assert not parity.diagnose(right, PROBLEM).is_wrong


def test_edit_may_not_apply():
    """A bug whose edit returns None, or the layer itself, is not a candidate."""
    register("never", edit=lambda spec: None)
    register("the-same", edit=lambda spec: spec)
    assert not {"never", "the-same"} & {bug.name for bug in bugs_for(PROBLEM.case)}


def test_page_is_printed(capsys):
    """`mha-parity bugs` lists a registered bug, and prints its page."""
    register(page="# The scale\n\x1b[2J of heads")
    assert main(["bugs"]) == 0
    assert "scale-by-heads" in capsys.readouterr().out
    assert main(["bugs", "scale-by-heads"]) == 0
    printed = capsys.readouterr().out
    assert "# The scale" in printed
    assert "\x1b[2J" not in printed


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"name": "Scale By Heads"}, "name"),
        ({"name": "scale-missing"}, "name"),
        ({"name": "rope-theta"}, "name"),
        ({"about": " "}, "about"),
        ({"fix": ""}, "fix"),
        ({"page": ""}, "page"),
        ({"stages": []}, "stages"),
        ({"stages": ["score"]}, "stages"),
    ],
)
def test_invalid_bug_is_rejected(changed, argument):
    """Invalid names, texts and stages raise an error that names them, and register nothing."""
    with rejects(argument, str(changed[argument])):
        register(**changed)
    assert not registry.OWN_BUGS


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"stages": "scores"}, "stages"),
        ({"edit": 1}, "edit"),
        ({"page": None}, "page"),
        ({"about": 2}, "about"),
    ],
)
def test_wrong_types_are_rejected(changed, argument):
    """Arguments of the wrong type raise a TypeError, and register nothing."""
    with rejects_type(argument):
        register(**changed)
    assert not registry.OWN_BUGS


def fails(*_):
    raise RuntimeError("out of luck")


@pytest.mark.parametrize(
    "edit",
    [
        fails,
        lambda spec: 3,
        lambda spec: {"no_method": squared},
        lambda spec: {"_private": squared},
        lambda spec: {"scores": 1},
    ],
)
def test_bug_with_invalid_edit_is_left_out(edit):
    """A bug whose edit fails, or returns nothing that the reference has, is left out with a
    warning, and the diagnosis names the others.
    """
    register("broken", edit=edit)
    register()
    stages = stages_with_warning("scale-by-heads")
    with pytest.warns(UserWarning, match="a registered bug is left out: broken"):
        assert parity.diagnose(stages, PROBLEM).likely_bug == "scale-by-heads"


def stages_with_warning(name):
    with pytest.warns(UserWarning, match="broken"):
        return stages_with(name)


def exits(*_):
    raise SystemExit(3)


@sample(4)
@pytest.mark.parametrize("method", ["attn_weights", "steps"])
@pytest.mark.parametrize(
    "wrong",
    [
        fails,
        exits,
        lambda *_: 3,
        lambda *_: {},
        lambda *_: {"attn_weights": "none"},
        lambda *_: {"attn_weights": np.ones(2)},
    ],
)
def test_failing_override_explains_nothing(method, wrong):
    """An override that fails, or returns something else than the stage, does not end a diagnosis,
    also if no bug explains the stages.
    """
    register("broken", edit=lambda spec: {method: wrong}, stages=["attn_weights"])
    register()
    stages = stages_with("scale-by-heads")
    assert parity.diagnose(stages, PROBLEM).likely_bug == "scale-by-heads"
    assert parity.diagnose({"output": stages["output"]}, PROBLEM).likely_bug == "scale-by-heads"
    noise = np.random.default_rng(0).standard_normal(stages["output"].shape, np.float32)
    assert parity.diagnose({"output": noise}, PROBLEM, seconds=1.0).kind == "unknown"


def doubled(layer, original, *inputs):
    """Double what a method returns, in place, and then its inputs."""
    result = original(*inputs)
    values = result.values() if isinstance(result, dict) else [result]
    for x in (*values, *(x for x in inputs if isinstance(x, np.ndarray))):
        x *= 2
    return result


@pytest.mark.parametrize("method", ["parameter", "split_heads", "attn_weights"])
def test_override_changes_copies(method):
    """An override that changes arrays in place changes neither the problem, nor observed stages,
    nor the reference of other bugs.
    """
    problem = parity.make_problem("gqa-causal", "float64")
    layer = edited_layer(problem, "float64", [])
    right = {name: x.copy() for name, x in run_steps(layer.steps()).items()}
    register(edit=lambda spec: {method: doubled}, stages=["q", "attn_weights"])
    register("never", edit=lambda spec: {"scale": lambda *_: 3.0})
    (bug,) = (bug for bug in bugs_for(problem.case) if bug.name == "scale-by-heads")
    stages = run_steps(edited_layer(problem, "float64", [bug]).steps())
    observed = {name: x.copy() for name, x in stages.items()}
    assert parity.diagnose(observed, problem).is_wrong
    for name, x in run_steps(edited_layer(problem, "float64", []).steps()).items():
        np.testing.assert_array_equal(x, right[name])
        np.testing.assert_array_equal(observed[name], stages[name])


def test_layer_with_a_bug_may_lack_a_stage():
    """A specification without the gate explains a layer whose gate was recorded but not used."""
    problem = parity.make_problem("gate", "float32")
    register("gate-dropped", edit=lambda spec: replace(spec, gate=None), stages=["context"])
    (bug,) = (bug for bug in bugs_for(problem.case) if bug.name == "gate-dropped")
    stages = run_steps(edited_layer(problem, "float32", [bug]).steps())
    assert "gate" not in stages
    (finding,) = parity.diagnose(stages, problem).findings
    assert "the scale is 1 / N instead of 1 / sqrt(H)" in finding.others
    right = run_steps(edited_layer(problem, "float32", []).steps())
    (finding,) = parity.diagnose({**stages, "gate": right["gate"]}, problem).findings
    assert finding.bugs == ("gate-missing",)


def test_edit_may_register_a_bug():
    """An edit that registers another bug does not end a diagnosis."""

    def registering(spec):
        register("another")

    register("first", edit=registering)
    register()
    stages = stages_with("scale-by-heads")
    registry.OWN_BUGS.pop("another")
    assert parity.diagnose(stages, PROBLEM).likely_bug == "scale-by-heads"


class EntryPoint:
    """An entry point of a package that is not installed."""

    name, value = "nebula", "nebula.bugs:register"

    def __init__(self, register):
        self.load = lambda: register


@pytest.mark.parametrize("breaks", [False, True])
def test_package_registers_bugs(monkeypatch, breaks):
    """A function of an entry point registers bugs; if it fails, none of its bugs is known, and a
    warning names the package.
    """

    def register_two():
        register("first")
        if breaks:
            raise RuntimeError("no second")
        register("second")

    monkeypatch.setattr(metadata, "entry_points", lambda group: [EntryPoint(register_two)])
    if breaks:
        with pytest.warns(UserWarning, match="bugs of a package are left out: nebula"):
            bugs = bugs_for(PROBLEM.case)
    else:
        bugs = bugs_for(PROBLEM.case)
    names = {bug.name for bug in bugs} & {"first", "second"}
    assert names == (set() if breaks else {"first", "second"})
