"""How commands end if a reader stops early, or a signal arrives while they are imported."""

import os
import signal
import subprocess
import sys

import pytest
from helpers.llama_folder import make_model

from parity.core.packages import OPTIONAL

# What argparse prints, a list, a table, JSON and a source: each is printed by another module.
COMMANDS = ("--help", "bugs --all", "inspect model", "inspect model --json -", "write model --to torch --layers 0")


@pytest.mark.costly("the exit status of a process whose pipe is closed")
@pytest.mark.parametrize("words", COMMANDS)
def test_a_reader_may_stop_early(tmp_path, words):
    make_model(tmp_path / "model")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "parity", *words.split()]
    with os.fdopen(writer, "wb") as out:
        done = subprocess.run(command, cwd=tmp_path, stdout=out, stderr=subprocess.PIPE, timeout=120, check=False)
    assert b"Broken pipe" not in done.stderr
    assert done.returncode == 0


INTERRUPTED = """
import importlib.abc, os, signal, sys

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Interrupts())
sys.argv = ["mha-parity", "doctor"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from parity.__main__ import main
sys.exit(main())
"""


@pytest.mark.costly("a signal to a new process")
@pytest.mark.parametrize("module", ["parity.cli.main", "argparse", "parity.cli.run"])
def test_interrupt_of_an_import_is_status_130(module):
    program = INTERRUPTED.format(module=module, number=int(signal.SIGINT))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=False)
    assert done.returncode == 130
    assert done.stderr == b"mha-parity: interrupted\n"


def test_transformers_is_needed_by_more_than_tests():
    assert "--against transformers" in OPTIONAL["transformers"][1]
