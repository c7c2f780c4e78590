"""Tests of the example in PyTorch and JAX: its page shows the actual output, and its story holds.

If the output changed, `PYTHONPATH=.:tests python tests/repository/test_examples.py` updates the page.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.shell import PYTEST_OPTIONS, environment, run
from helpers.shown import commands_of, shows, updated

EXAMPLES = ROOT / "examples"
PAGE = (
    (EXAMPLES / "README.md").read_text("utf-8").partition("\n## Bring up")[0]
)  # `tests/siblings/mha_tt` covers the rest
BLOCKS = re.findall(r"^```\n(\$ .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
STATUS = {"python": 0, "mha-parity": 1, "diff": 1, "pytest -q test_port.py": 0, "pytest": 1}
"""Exit status of the last command of a block; it is 1 if bugs or a difference are found or the
draft's tests fail.
"""

HUNT = "python find_bugs.py"
BUGS = ("rope-interleaved", "kv-heads-tiled", "out_proj-transposed")


def sessions():
    """Yield the commands of each block of the page and the output it shows."""
    for block in BLOCKS:
        commands, shown = commands_of(block)
        marks = (
            [pytest.mark.thorough] if commands[-1].startswith("pytest") else []
        )  # test_pytest_plugin also runs them
        yield pytest.param(commands, shown, id=commands[-1], marks=marks)


def copy_port(folder):
    """Copy examples/port and return a function that runs a command there, with warnings as
    errors.
    """
    folder = shutil.copytree(
        EXAMPLES / "port", folder / "port", ignore=shutil.ignore_patterns("__pycache__")
    )
    env = environment(f"{PYTEST_OPTIONS} -W error") | {"PYTHONWARNINGS": "error"}

    def port(command):
        status, printed, errors = run(command, folder, env)
        assert errors == ""
        return status, printed

    return port


@pytest.fixture
def port(tmp_path):
    return copy_port(tmp_path)


@pytest.mark.costly("commands of the page, as users type them")
@pytest.mark.skipif(os.name == "nt", reason="the commands are those of a POSIX shell")
@pytest.mark.parametrize(("commands", "shown"), list(sessions()))
def test_page_shows_actual_command_output(port, commands, shown):
    """The commands of each block print the shown output, and exit with the expected status."""
    results = [port(command) for command in commands]
    assert results[-1][0] == STATUS.get(commands[-1], STATUS[commands[-1].split()[0]])
    assert not any(status for status, _ in results[:-1])
    printed = "".join(printed for _, printed in results)
    assert shows(shown, printed), (
        f"run `PYTHONPATH=.:tests python {Path(__file__).relative_to(ROOT)}` to update the "
        f"page:\n{printed}"
    )


def test_page_shows_every_step():
    """The blocks of the page run the programs of the seven steps in order."""
    programs = [command.split()[0] for session in sessions() for command in session.values[0]]
    assert programs == ["python", "python", "mha-parity", "diff", "pytest", "sed", "pytest"]


def test_three_bugs_are_named_and_fixed():
    """`find_bugs.py` names the three bugs of the draft; each fix leaves the remaining ones,
    and the last one leaves none.
    """
    (shown,) = [
        shown
        for commands, shown in (session.values for session in sessions())
        if commands == [HUNT]
    ]
    story = [part.splitlines() for part in re.split(r"\n\n(?===)", "\n".join(shown))]
    before, *mended = story
    clean = "nothing differs by more than rounding"
    assert before[0] == f"the original, its output alone: {clean}"
    assert f"the draft, stage by stage: {', '.join(BUGS)}" in before
    left = [paragraph[-1].removeprefix("stage by stage: ") for paragraph in mended]
    assert left == [", ".join(BUGS[1:]), BUGS[2], clean]
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
