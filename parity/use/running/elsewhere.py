"""A backend in another Python: one report of two frameworks that cannot share an environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mha_spec import InputError
from parity.measure.core.blas import share_of_cores
from parity.measure.core.safe_path import SAFE_PATH

MAX_ERRORS = 1 << 16
"""Largest part of a program's standard error that is read, in bytes, from its end. The number is a
choice: enough for the line that is shown, and little for a program that prints without end.
"""


class Elsewhere:
    """`mha-parity run` by another interpreter, in parallel with this process."""

    def __init__(self, python: str, options: Sequence[str], num_processes: int = 2) -> None:
        """Start the program. Python files of the current folder are not imported.

        Args:
            python: interpreter of an environment with this version of the harness and the
                framework.
            options: options of `mha-parity run`, without those for reports and traces.
            num_processes: number of processes that compute at once, including this one.

        Raises:
            ValueError: if there is no such program.
        """
        program = shutil.which(python)
        if program is None:
            rule = "be BACKEND=PATH with an interpreter that can be run"
            raise InputError("--python", rule, {"--python": python})
        self.python = python
        self.folder = tempfile.TemporaryDirectory(prefix="mha-parity-")
        # A pipe would stay open until every process that the program started has ended.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = [program, "-P", "-m", "parity", "run", *options]
        command += ["--save-traces", self.folder.name, "--quiet"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env={**os.environ, **SAFE_PATH, **share_of_cores(num_processes)},
        )

    def wait(self) -> str:
        """Wait for the end of the program, and return the folder of its traces.

        Raises:
            OSError: if it failed, or saved no trace.
        """
        status = self.process.wait()
        if status not in (0, 1):  # 1 is a mismatch, which the report of all shows
            raise OSError(
                f"{self.python} must run its cases, got exit status {status}: {self._reason()}"
            )
        if not any(Path(self.folder.name).rglob("*.safetensors")):
            raise OSError(
                f"{self.python} must save traces, got none and exit status {status}: "
                f"{self._reason()}"
            )
        return self.folder.name

    def _reason(self) -> str:
        """Return the last error of mha-parity on standard error, or else the last line there."""
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - MAX_ERRORS))
        lines = self.errors.read().decode(errors="replace").splitlines()
        last = "nothing on standard error"
        last_of_ours = ""
        for line in lines:
            # An earlier warning would hide the last line of a native crash.
            is_warning = line.startswith("mha-parity: warning: ")
            if line.startswith("mha-parity: ") and not is_warning:
                last_of_ours = line.removeprefix("mha-parity: ")
            if line.strip():
                last = line
        return last_of_ours or last

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # waits for it
            self.process.kill()
        self.errors.close()
        self.folder.cleanup()
