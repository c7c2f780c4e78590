"""A backend in another Python: two frameworks that no one environment holds, in one report."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cached_property

from mha_spec import Refusal


class Elsewhere(os.PathLike[str]):
    """`mha-parity run` by another interpreter, from now on, beside what goes on here.

    As a path it is the folder of the traces that it makes, and whoever asks for that waits until they are there.
    """

    def __init__(self, python: str, options: Sequence[str]) -> None:
        """Begin.

        Args:
            python: the interpreter, of an environment with this version of the harness and the framework.
            options: of `mha-parity run`, without those about reports and traces.

        Raises:
            ValueError: if there is no such program.
        """
        self.python, program = python, shutil.which(python)
        if program is None:
            raise Refusal("--python", "name an interpreter that can be run", {"--python": python})
        self.folder = tempfile.TemporaryDirectory(prefix="mha-parity-")
        command = [program, "-m", "parity", "run", *options, "--save-traces", self.folder.name, "--quiet"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def __fspath__(self) -> str:
        return self._filled

    @cached_property
    def _filled(self) -> str:
        _, printed = self.process.communicate()
        if self.process.returncode not in (0, 1):  # 1 is a mismatch, which the report of all shows
            said = [
                line.removeprefix("mha-parity: ") for line in printed.splitlines() if line.startswith("mha-parity: ")
            ]
            why = (said or printed.splitlines() or ["nothing"])[-1]
            raise OSError(f"{self.python} must run its cases, got exit status {self.process.returncode}: {why}")
        return self.folder.name

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # waits for it
            self.process.kill()
        self.folder.cleanup()
