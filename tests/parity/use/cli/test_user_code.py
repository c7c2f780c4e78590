"""Tests of user code that ends the program, such as by sys.exit(0): never a success."""

import asyncio
import json
import sys

import numpy as np
import pytest
import torch
from flax import nnx
from helpers.input_errors import rejects

import parity
from parity import AttentionSpec, random_weights, save
from parity.explain.conformance.calls import Failed
from parity.explain.conformance.discover import subject_of
from parity.explain.conformance.examine import examine
from parity.measure.core.user_code import EndedProgramError, user_code
from parity.use.cli.main import main

MODULE = """
import sys
import torch

{at_import}

def attention(query, key, value, mask=None):
    sys.exit(0)

def layer(x):
    sys.exit(0)

def factory():
    sys.exit(0)

class Layer(torch.nn.Module):
    def __init__(self):
        sys.exit(0)

class LateAttention(torch.nn.Module):
    def forward(self, x):
        sys.exit(0)

def live():
    return LateAttention().eval(), {{"x": torch.zeros(2, 8, 8)}}

def weights():
    sys.exit(0)

def with_weights(params, x):
    sys.exit(0)
"""

COMMANDS = {
    "conformance MODULE:attention --framework torch": "attention",
    "conformance MODULE:layer --framework torch": "layer",
    "conformance MODULE:factory": "factory",
    "conformance MODULE:Layer": "Layer",
    "conformance MODULE:LateAttention --d-model 8": "LateAttention",
    "conformance MODULE:with_weights --framework torch --params MODULE:weights": "weights",
    "diagnose MODULE:layer --framework torch --weights layer.safetensors": "layer",
    "diagnose MODULE:factory --framework torch --weights layer.safetensors": "factory",
    "diagnose MODULE:with_weights --framework torch --params MODULE:weights --weights "
    "layer.safetensors": "weights",
    "spec --live MODULE:factory": "factory",
    "spec --live MODULE:live": "LateAttention",
    "mutate MODULE:attention --framework torch -- true": "attention",
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a function that writes the module under a new name, which it returns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    spec = AttentionSpec(8, 2)
    save("layer.safetensors", random_weights(spec), spec, "canonical")
    names = []

    def write(at_import=""):
        names.append(f"ends_{tmp_path.name}_{len(names)}".replace("-", "_"))
        (tmp_path / f"{names[-1]}.py").write_text(MODULE.format(at_import=at_import))
        return names[-1]

    yield write
    for name in names:
        sys.modules.pop(name, None)


def words_of(command, module):
    return command.replace("MODULE", module).split()


@pytest.mark.parametrize("command", COMMANDS)
def test_exit_in_user_code_is_status_2(module, capsys, command):
    """sys.exit(0) in a user's function or class exits with status 2, and one error line has
    its name and SystemExit(0).
    """
    assert main([*words_of(command, module())]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert COMMANDS[command] in line
    assert "SystemExit(0)" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_exit_at_import_is_status_2(module, capsys, command):
    """sys.exit(0) while a user's module is imported exits with status 2, and one error line
    has its name and SystemExit(0).
    """
    name = module(at_import="sys.exit(0)")
    assert main([*words_of(command, name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
    assert "SystemExit(0)" in line


@pytest.mark.thorough
@pytest.mark.costly("starts pytest, as the command does")
def test_mutate_reports_exit_in_tests(tmp_path, monkeypatch, capsys):
    """If tests of `mutate` end with sys.exit(0) in the tested function, the status is 1, and
    the output has SystemExit(0).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    name = "ends_without_torch"  # which its processes would import
    (tmp_path / f"{name}.py").write_text(
        "import sys\n\ndef attention(query, key, value):\n    sys.exit(0)\n"
    )
    (tmp_path / "tests.py").write_text(
        f"import numpy, {name}\n{name}.attention(*[numpy.zeros((1, 2, 3, 4))] * 3)"
    )
    words = (
        f"mutate {name}:attention --framework torch --axes BNTH --only scale-missing -- "
        f"{sys.executable} tests.py"
    )
    assert main(words.split()) == 1
    assert "SystemExit(0)" in capsys.readouterr().out


def test_exit_with_json_is_status_2(module, capsys):
    """With --json -, sys.exit(0) in a user's function exits with status 2 and an error, and
    no JSON is written.
    """
    assert (
        main(["conformance", f"{module()}:attention", "--framework", "torch", "--json", "-"]) == 2
    )
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "SystemExit(0)" in printed.err


def test_exit_with_mask_breaks_mask_rule(tmp_path, capsys):
    """A function that calls sys.exit(0) only with a mask breaks the rule `mask` of `examine`,
    whose result has SystemExit(0).
    """

    def attention(query, key, value, mask=None):
        if mask is not None:
            sys.exit(0)
        return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1) @ value

    examination = examine(attention, ["mask"], ["float32"])
    assert examination.answers[0].is_broken
    assert "SystemExit(0)" in json.dumps(examination.to_dict())


@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit(), pytest.fail.Exception("x")]
)
def test_ending_exceptions_become_errors(error):
    """SystemExit, CancelledError, GeneratorExit and a failure of pytest in user code become
    an EndedProgramError with this cause and the file.
    """
    with (
        pytest.raises(EndedProgramError, match="the function raised") as raised,
        user_code("the function"),
    ):
        raise error
    assert raised.value.__cause__ is error
    assert "test_user_code.py" in str(raised.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), StopIteration()])
def test_other_exceptions_are_unchanged(error):
    """KeyboardInterrupt, ValueError and StopIteration in user code are raised unchanged."""
    with pytest.raises(type(error)) as raised, user_code("the function"):
        raise error
    assert raised.value is error


def test_observe_rejects_exiting_function():
    """`observe` and `subject_of` raise an error for a function that raises SystemExit."""

    def ends(*arrays):
        raise SystemExit

    with rejects("the function"):
        parity.observe(
            ends, parity.make_problem(next(iter(parity.CASES.values())), "float32"), "torch"
        )
    with pytest.raises((ValueError, Failed), match="SystemExit"):
        subject_of(ends, framework="torch")


def test_identify_rejects_exiting_model():
    """`identify` raises a RuntimeError for a torch model that raises SystemExit, and leaves
    no torch mode active.
    """

    class Ends(torch.nn.Module):
        def forward(self, x):
            raise SystemExit

    with pytest.raises(RuntimeError, match="Sequential raised SystemExit"):
        parity.identify(torch.nn.Sequential(Ends()).eval(), {"input": torch.zeros(2, 8, 8)}, "0")
    assert (
        torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
    )  # nothing still records


def test_identify_rejects_exiting_flax_model():
    """`identify` raises a RuntimeError for a Flax module that raises SystemExit."""

    class Ends(nnx.Module):
        def __call__(self, x):
            raise SystemExit

    with pytest.raises(RuntimeError, match="Ends raised SystemExit"):
        parity.identify(Ends(), {"x": np.zeros((2, 8, 8), np.float32)})


def test_exit_in_command_is_status_2(monkeypatch, capsys):
    """sys.exit(0) in the code of a command itself exits with status 2 and an error with
    SystemExit(0).
    """
    monkeypatch.setattr("parity.use.cli.doctor.run.callback", lambda options: sys.exit(0))
    assert main(["doctor"]) == 2
    assert "SystemExit(0)" in capsys.readouterr().err
