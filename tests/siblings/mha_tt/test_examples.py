"""The ttnn example: its page shows the output of its commands; its tests pass, and fail for the
draft.
"""

import re
import runpy
import shlex
import sys

import pytest
from helpers import ROOT

import mha_tt
import parity
from parity.use.cli.main import main

FOLDER = ROOT / "examples" / "ttnn"
PAGE = (FOLDER.parent / "README.md").read_text("utf-8").partition("\n## Bring up")[2]
SESSIONS = [
    block.splitlines()
    for block in re.findall(r"^```\n(\$ .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Make the modules of the example importable in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    for name in (path.stem for path in FOLDER.glob("*.py")):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def tests(example):
    import test_layer

    return test_layer


def without_numbers(lines):
    return [re.sub(r"-?\d[\d.]*(e[-+]\d+)?", "#", line).rstrip() for line in lines]


@pytest.mark.board
@pytest.mark.usefixtures("example", "device")
def test_page_shows_output_of_commands(capsys, monkeypatch):
    """The output of each command in examples/README.md matches the page, except for numbers."""
    assert len(SESSIONS) == 2
    for session in SESSIONS:
        commands = [
            shlex.split(line.removeprefix("$ ")) for line in session if line.startswith("$ ")
        ]
        for program, *arguments in commands:
            if program == "python":
                monkeypatch.setattr("sys.argv", arguments)
                runpy.run_path(str(FOLDER / arguments[0]), run_name="__main__")
            else:
                assert program == "mha-parity"
                assert main(arguments) == ("layer:draft" in arguments)
        printed = capsys.readouterr().out.splitlines()
        assert without_numbers(printed) == without_numbers(session[len(commands) :])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["test_a_prompt", "test_steps_behind_a_prompt"])
def test_example_tests_fail_only_for_draft(tests, device, name):
    """The tests of the example pass for the fixed layer; for the draft they fail and name rope-
    interleaved.
    """
    import attention_tt

    getattr(tests, name)(parity.assert_parity, device)
    tests.attention_tt_fixed = attention_tt
    with pytest.raises(AssertionError, match="Likely bug: rope-interleaved"):
        getattr(tests, name)(parity.assert_parity, device)


def test_pcc_hardly_detects_the_bug(tests, device):
    """The bug of the draft lowers the PCC only to 0.97, above a threshold of 0.9."""
    import attention_tt

    x = mha_tt.upload(tests.X, device=device)
    right, wrong = (
        tests.made(module, x).prefill(x) for module in (tests.attention_tt_fixed, attention_tt)
    )
    with pytest.raises(AssertionError, match=r"^PCC 0\.97\d+ and wrong"):
        parity.assert_with_pcc(right, wrong, 0.9)
