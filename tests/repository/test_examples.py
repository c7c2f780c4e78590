"""Tests of the example in PyTorch and JAX: the commands of its page run, and its story holds."""

import os
import re
import shutil

import pytest
from helpers import ROOT
from helpers.shell import PYTEST_OPTIONS, environment, run
from helpers.shown import commands_of

EXAMPLES = ROOT / "examples"
PAGE = (
    (EXAMPLES / "README.md").read_text("utf-8").partition("\n## Bring up")[0]
)  # `tests/siblings/mha_tt` covers the rest
COMMANDS = [
    command
    for block in re.findall(r"^```\n(\$ .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for command in commands_of(block)[0]
]
SEARCH, WRITE, DIAGNOSE, TEST = COMMANDS
BUGS = ("rope-interleaved", "kv-heads-tiled", "out_proj-transposed")


@pytest.fixture
def port(tmp_path):
    """Copy examples/port and return a function that runs a command there, with warnings as
    errors.
    """
    folder = shutil.copytree(
        EXAMPLES / "port", tmp_path / "port", ignore=shutil.ignore_patterns("__pycache__")
    )
    env = environment(f"{PYTEST_OPTIONS} -W error") | {"PYTHONWARNINGS": "error"}

    def run_in_port(command):
        status, printed, errors = run(command, folder, env)
        assert errors == ""
        return status, printed

    return run_in_port


only_posix = pytest.mark.skipif(os.name == "nt", reason="the commands need a POSIX shell")


@pytest.mark.thorough
@only_posix
@pytest.mark.costly("commands of the page, as users type them")
def test_search_names_and_fixes_bugs(port):
    """`find_bugs.py` names the three bugs of the draft; each fix leaves the remaining ones, and the
    last one leaves none.
    """
    status, printed = port(SEARCH)
    assert status == 0
    before, *fixed = [part.splitlines() for part in re.split(r"\n\n(?===)", printed.strip())]
    clean = "nothing differs by more than rounding"
    assert before[0] == f"the original, its output alone: {clean}"
    assert f"the draft, stage by stage: {', '.join(BUGS)}" in before
    remaining = [paragraph[-1].removeprefix("stage by stage: ") for paragraph in fixed]
    assert remaining == [", ".join(BUGS[1:]), BUGS[2], clean]
    assert fixed[-1][-2] == f"its output alone: {clean}"


@only_posix
@pytest.mark.costly("commands of the page, as users type them")
def test_command_line_names_three_bugs(port):
    """The command on the page names the three bugs of the draft, in order."""
    assert port(WRITE) == (0, "")
    status, printed = port(DIAGNOSE)
    assert status == 1
    assert re.findall(r"^Likely bug \d of 3: (\S+)$", printed, re.MULTILINE) == [*BUGS]


@only_posix
@pytest.mark.thorough  # test_pytest_plugin also runs them
@pytest.mark.costly("commands of the page, as users type them")
def test_kept_tests_fail_for_draft(port):
    """The tests of the page pass for the correct port, and both fail for the draft."""
    status, printed = port(TEST)
    assert status == 0
    assert "2 passed" in printed
    port("sed s/attention_jax_fixed/attention_jax/ test_port.py > test_draft.py")
    status, printed = port("pytest -q --tb=short test_draft.py")
    assert status == 1
    assert "2 failed" in printed
    assert f"Likely bug 1 of 3: {BUGS[0]}" in printed
