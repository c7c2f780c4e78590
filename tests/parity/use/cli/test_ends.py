"""Tests of how commands end if their reader stops early, or a signal arrives during imports."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.llama_folder import make_model
from helpers.samples import sample

from parity.measure.core.packages import OPTIONAL
from parity.use.cli.main import _SignalHandlers

# Help by click, a list, a table, JSON and source code: a different module prints each of them.
COMMANDS = (
    "--help",
    "bugs --all",
    "inspect model",
    "inspect model --json -",
    "write model --to torch --layer 0",
)


@pytest.mark.costly("the exit status of a process whose pipe is closed")
@sample(3)
@pytest.mark.parametrize("words", COMMANDS)
def test_closed_pipe_is_not_an_error(tmp_path, words):
    """A command whose output pipe is closed exits with status 0, without a message about a
    broken pipe.
    """
    make_model(tmp_path / "model")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "parity", *words.split()]
    with os.fdopen(writer, "wb") as out:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=out, stderr=subprocess.PIPE, timeout=120, check=False
        )
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
@sample(module=["parity.use.cli.main", "click"])
@pytest.mark.parametrize("module", ["parity.use.cli.main", "click", "parity.use.cli.doctor"])
def test_interrupted_import_exits_130(module):
    """SIGINT during an import exits with status 130, and standard error has only the line
    about it.
    """
    program = INTERRUPTED.format(module=module, number=int(signal.SIGINT))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 130
    assert done.stderr == b"mha-parity: interrupted\n"


def test_interrupt_in_a_finalizer_counts():
    """SIGINT while a finalizer runs, whose exceptions Python drops, interrupts the code after
    it.
    """

    class Interrupts:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)

    def run_finalizer():
        with _SignalHandlers(for_good=False) as signals:
            Interrupts()
            assert signals.received == signal.SIGINT
            time.sleep(60)  # until the interrupt

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_finalizer()
    finally:
        signal.signal(signal.SIGINT, former)


def test_deferred_interrupt_is_raised_once():
    """A signal during an import interrupts the command after it, once."""
    signals = _SignalHandlers(for_good=False)
    signals.raise_deferred()
    signals.received = signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        signals.raise_deferred()
    signals.raise_deferred()


def test_use_of_transformers_is_listed():
    """The uses of transformers in OPTIONAL include `--against transformers`, which is not a
    test.
    """
    assert "--against transformers" in OPTIONAL["transformers"][1]
