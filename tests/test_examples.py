"""The example in torch and JAX: what its page prints is what the commands print, and its story is true."""

import os
import re
import shutil
from pathlib import Path

import pytest
from shell import PYTEST_OPTIONS, environment, run

EXAMPLES = Path(__file__).parents[1] / "examples"
PAGE = (EXAMPLES / "README.md").read_text("utf-8").partition("\n## Bring up")[0]  # the rest is in tests/tt
STATUS = {"python": 0, "mha-parity": 1, "diff": 1, "pytest -q test_port.py": 0, "pytest": 1}
"""The exit status of the last command of a block: mistakes, a difference and tests of the draft, which fail, give 1."""

HUNT = "python find_bugs.py"
MISTAKES = ("rope-interleaved", "kv-heads-tiled", "out_proj-transposed")


def sessions():
    """The commands of each block of the page, and what it shows them to print."""
    for block in re.findall(r"^```\n(\$ .*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        lines = block.splitlines()
        commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        marks = [pytest.mark.thorough] if commands[-1].startswith("pytest") else []  # test_pytest_plugin runs them, too
        yield pytest.param(commands, "\n".join(lines[len(commands) :]), id=commands[-1], marks=marks)


@pytest.fixture
def port(tmp_path):
    """A copy of examples/port, in which a command runs as it would there, warnings being errors."""
    folder = shutil.copytree(EXAMPLES / "port", tmp_path / "port", ignore=shutil.ignore_patterns("__pycache__"))
    env = environment(f"{PYTEST_OPTIONS} -W error") | {"PYTHONWARNINGS": "error"}

    def port(command):
        status, printed, errors = run(command, folder, env)
        assert errors == ""
        return status, printed

    return port


def without_numbers(text):
    """The lines of a text, with a mark for every number: they may differ from machine to machine."""
    return [re.sub(r"-?\d[\d.]*(e[-+]\d+)?", "#", line).rstrip() for line in text.splitlines()]


@pytest.mark.skipif(os.name == "nt", reason="the commands are those of a POSIX shell")
@pytest.mark.parametrize(("commands", "shown"), list(sessions()))
def test_the_page_shows_what_the_commands_print(port, commands, shown):
    results = [port(command) for command in commands]
    assert results[-1][0] == STATUS.get(commands[-1], STATUS[commands[-1].split()[0]])
    assert not any(status for status, _ in results[:-1])
    printed = without_numbers("".join(printed for _, printed in results))
    pattern = "\n".join(".*" if line == "…" else re.escape(line) for line in without_numbers(shown))
    assert re.fullmatch(pattern, "\n".join(printed), re.DOTALL), "\n".join(printed)


def test_the_page_shows_every_step():
    programs = [command.split()[0] for session in sessions() for command in session.values[0]]
    assert programs == ["python", "python", "mha-parity", "diff", "pytest", "sed", "pytest"]


def test_all_three_mistakes_are_named_and_mended_in_turn():
    (shown,) = [shown for commands, shown in (session.values for session in sessions()) if commands == [HUNT]]
    story = [paragraph.splitlines() for paragraph in shown.split("\n\n")]
    before, *mended = story
    clean = "nothing differs by more than rounding"
    assert before[0] == f"the original, its output alone: {clean}"
    assert f"the draft, stage by stage: {', '.join(MISTAKES)}" in before
    left = [paragraph[-1].removeprefix("stage by stage: ") for paragraph in mended]
    assert left == [", ".join(MISTAKES[1:]), MISTAKES[2], clean]
    assert mended[-1][-2] == f"its output alone: {clean}"
