"""Code of users that ends the program, with sys.exit(0) or otherwise: a failure of that code, never a success."""

import asyncio
import json
import sys

import numpy as np
import pytest
import torch
from flax import nnx
from helpers.refusals import refuses

import parity
from parity import AttentionSpec, random_weights, save
from parity.cli.main import main
from parity.conformance.calls import Failed
from parity.conformance.discover import subject_of
from parity.conformance.examine import examine
from parity.core.user_code import EndedProgramError, user_code

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
    "diagnose MODULE:with_weights --framework torch --params MODULE:weights --weights layer.safetensors": "weights",
    "spec --live MODULE:factory": "factory",
    "spec --live MODULE:live": "LateAttention",
    "mutate MODULE:attention --framework torch -- true": "attention",
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that writes the module into the current folder, under a name of its own, and returns the name."""
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
    assert main([*words_of(command, module())]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert COMMANDS[command] in line
    assert "SystemExit(0)" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_exit_at_import_is_status_2(module, capsys, command):
    name = module(at_import="sys.exit(0)")
    assert main([*words_of(command, name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
    assert "SystemExit(0)" in line


def test_exit_of_tests_in_mutate_is_not_caught(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    name = "ends_without_torch"  # which its processes would import
    (tmp_path / f"{name}.py").write_text("import sys\n\ndef attention(query, key, value):\n    sys.exit(0)\n")
    (tmp_path / "tests.py").write_text(f"import numpy, {name}\n{name}.attention(*[numpy.zeros((1, 2, 3, 4))] * 3)")
    words = f"mutate {name}:attention --framework torch --axes BNTH --only scale-missing -- {sys.executable} tests.py"
    assert main(words.split()) == 1
    assert "SystemExit(0)" in capsys.readouterr().out


def test_exit_with_json_is_status_2(module, capsys):
    assert main(["conformance", f"{module()}:attention", "--framework", "torch", "--json", "-"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "SystemExit(0)" in printed.err


def test_exit_on_one_path_breaks_a_rule(tmp_path, capsys):
    def attention(query, key, value, mask=None):
        if mask is not None:
            sys.exit(0)
        return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1) @ value

    found = examine(attention, ["mask"], ["float32"])
    assert found.answers[0].is_broken
    assert "SystemExit(0)" in json.dumps(found.to_dict())


@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit(), pytest.fail.Exception("x")]
)
def test_what_ends_programs_becomes_an_error(error):
    with pytest.raises(EndedProgramError, match="the function raised") as raised, user_code("the function"):
        raise error
    assert raised.value.__cause__ is error
    assert "test_user_code.py" in str(raised.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), StopIteration()])
def test_other_errors_of_user_code_are_unchanged(error):
    with pytest.raises(type(error)) as raised, user_code("the function"):
        raise error
    assert raised.value is error


def test_an_ending_function_is_named_in_python():
    def ends(*arrays):
        raise SystemExit

    with refuses("the function"):
        parity.observe(ends, parity.make_problem(next(iter(parity.CASES.values())), "float32"), "torch")
    with pytest.raises((ValueError, Failed), match="SystemExit"):
        subject_of(ends, framework="torch")


def test_an_ending_model_is_not_identified():
    class Ends(torch.nn.Module):
        def forward(self, x):
            raise SystemExit

    with pytest.raises(RuntimeError, match="Sequential raised SystemExit"):
        parity.identify(torch.nn.Sequential(Ends()).eval(), {"input": torch.zeros(2, 8, 8)}, "0")
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0  # nothing still records


def test_an_ending_flax_model_is_not_identified():
    class Ends(nnx.Module):
        def __call__(self, x):
            raise SystemExit

    with pytest.raises(RuntimeError, match="Ends raised SystemExit"):
        parity.identify(Ends(), {"x": np.zeros((2, 8, 8), np.float32)})


def test_exit_in_code_of_a_command_is_never_a_success(monkeypatch, capsys):
    monkeypatch.setattr("parity.cli.doctor.run", lambda options: sys.exit(0))
    assert main(["doctor"]) == 2
    assert "SystemExit(0)" in capsys.readouterr().err
