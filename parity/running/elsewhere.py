"""A backend in another Python: two frameworks that no one environment holds, in one report."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mha_spec import Refusal
from parity.core.blas import share_of_cores
from parity.core.safe_path import SAFE_PATH

MAX_ERRORS = 1 << 16  # bytes, the last that a program printed


class Elsewhere:
    """`mha-parity run` by another interpreter, from now on, beside what goes on here."""

    def __init__(self, python: str, options: Sequence[str], num_processes: int = 2) -> None:
        """Begin. Python files of the current folder are not imported.

        Args:
            python: the interpreter, of an environment with this version of the harness and the framework.
            options: of `mha-parity run`, without those about reports and traces.
            num_processes: how many processes compute at once, this one among them.

        Raises:
            ValueError: if there is no such program.
        """
        self.python, program = python, shutil.which(python)
        if program is None:
            raise Refusal("--python", "name an interpreter that can be run", {"--python": python})
        self.folder = tempfile.TemporaryDirectory(prefix="mha-parity-")
        # A pipe would stay open for as long as any process lives that the program started.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [program, "-P", "-m", "parity", "run", *options, "--save-traces", self.folder.name, "--quiet"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env={**os.environ, **SAFE_PATH, **share_of_cores(num_processes)},
        )

    def wait(self) -> str:
        """Wait until it has ended, and return the folder of the traces that it made.

        Raises:
            OSError: if it failed, or made none.
        """
        status = self.process.wait()
        if status not in (0, 1):  # 1 is a mismatch, which the report of all shows
            raise OSError(f"{self.python} must run its cases, got exit status {status}: {self._reason()}")
        if next(Path(self.folder.name).rglob("*.safetensors"), None) is None:
            raise OSError(f"{self.python} must save traces, got none and exit status {status}: {self._reason()}")
        return self.folder.name

    def _reason(self) -> str:
        """The last line that the program printed on standard error, its own if there is one."""
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - MAX_ERRORS))
        lines = self.errors.read().decode(errors="replace").splitlines()
        own = [line.removeprefix("mha-parity: ") for line in lines if line.startswith("mha-parity: ")]
        return (own or [line for line in lines if line.strip()] or ["nothing on standard error"])[-1]

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # waits for it
            self.process.kill()
        self.errors.close()
        self.folder.cleanup()
