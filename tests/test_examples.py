"""The example in torch and JAX: what its page prints is what the commands print, and its story is true.

If the output changed, `python tests/test_examples.py` updates the page.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from shell import PYTEST_OPTIONS, environment, run
from shown import commands_of, shows, updated

EXAMPLES = Path(__file__).parents[1] / "examples"
PAGE = (EXAMPLES / "README.md").read_text("utf-8").partition("\n## Bring up")[0]  # the rest is in tests/tt
BLOCKS = re.findall(r"^```\n(\$ .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
STATUS = {"python": 0, "mha-parity": 1, "diff": 1, "pytest -q test_port.py": 0, "pytest": 1}
"""The exit status of the last command of a block: mistakes, a difference and tests of the draft, which fail, give 1."""

HUNT = "python find_bugs.py"
MISTAKES = ("rope-interleaved", "kv-heads-tiled", "out_proj-transposed")


def sessions():
    """The commands of each block of the page, and what it shows them to print."""
    for block in BLOCKS:
        commands, shown = commands_of(block)
        marks = [pytest.mark.thorough] if commands[-1].startswith("pytest") else []  # test_pytest_plugin runs them, too
        yield pytest.param(commands, shown, id=commands[-1], marks=marks)


def copy_port(folder):
    """Copy examples/port, and return a function that runs a command there, warnings being errors."""
    folder = shutil.copytree(EXAMPLES / "port", folder / "port", ignore=shutil.ignore_patterns("__pycache__"))
    env = environment(f"{PYTEST_OPTIONS} -W error") | {"PYTHONWARNINGS": "error"}

    def port(command):
        status, printed, errors = run(command, folder, env)
        assert errors == ""
        return status, printed

    return port


@pytest.fixture
def port(tmp_path):
    return copy_port(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="the commands are those of a POSIX shell")
@pytest.mark.parametrize(("commands", "shown"), list(sessions()))
def test_the_page_shows_what_the_commands_print(port, commands, shown):
    results = [port(command) for command in commands]
    assert results[-1][0] == STATUS.get(commands[-1], STATUS[commands[-1].split()[0]])
    assert not any(status for status, _ in results[:-1])
    printed = "".join(printed for _, printed in results)
    assert shows(shown, printed), f"run `python tests/test_examples.py` to update the page:\n{printed}"


def test_the_page_shows_every_step():
    programs = [command.split()[0] for session in sessions() for command in session.values[0]]
    assert programs == ["python", "python", "mha-parity", "diff", "pytest", "sed", "pytest"]


def test_all_three_mistakes_are_named_and_mended_in_turn():
    (shown,) = [shown for commands, shown in (session.values for session in sessions()) if commands == [HUNT]]
    story = [part.splitlines() for part in re.split(r"\n\n(?===)", "\n".join(shown))]
    before, *mended = story
    clean = "nothing differs by more than rounding"
    assert before[0] == f"the original, its output alone: {clean}"
    assert f"the draft, stage by stage: {', '.join(MISTAKES)}" in before
    left = [paragraph[-1].removeprefix("stage by stage: ") for paragraph in mended]
    assert left == [", ".join(MISTAKES[1:]), MISTAKES[2], clean]
    assert mended[-1][-2] == f"its output alone: {clean}"


if __name__ == "__main__":
    page = (EXAMPLES / "README.md").read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        in_port = copy_port(Path(folder))
        for block in BLOCKS:
            commands, lines = commands_of(block)
            printed = "".join(in_port(command)[1] for command in commands)
            if not shows(lines, printed) and "…" in lines[1:]:
                print(f"update by hand:\n{printed}")
            elif not shows(lines, printed):
                page = page.replace(block, updated(block, printed))
    (EXAMPLES / "README.md").write_text(page, "utf-8")
