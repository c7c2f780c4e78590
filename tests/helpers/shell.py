"""Commands as pages show them. Our commands and Python programs run in this process, where
frameworks are imported; programs of this folder run in separate processes.
"""

import json
import os
import runpy
import shlex
import subprocess
import sys
import traceback
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax

from helpers import PYTHONPATH, ROOT
from parity.use.cli.main import main

NO_HYPOTHESIS = "-p no:hypothesispytest"
"""For processes of pytest: importing the plugin takes as long as importing torch."""

PYTEST_OPTIONS = f"-p no:cacheprovider {NO_HYPOTHESIS}"


def environment(pytest_options: str = PYTEST_OPTIONS) -> dict[str, str]:
    """Return the environment of a user's shell: the project's commands, no colors, nothing of the
    running pytest.
    """
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    paths = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    return variables | paths | {"NO_COLOR": "1", "COLUMNS": "80", "PYTEST_ADDOPTS": pytest_options}


def results_of_program(program: str, *arguments: str) -> Any:
    """Return what a program of helpers/programs prints as JSON. In its own process, JAX has other
    devices.
    """
    command = [sys.executable, "-m", f"helpers.programs.{program}", *arguments]
    env = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run(command: str, folder: Path, env: dict[str, str]) -> tuple[int, str, str]:
    """Return the exit status of a command, its standard output and its standard error."""
    words = shlex.split(command)
    if words[0] in ("mha-parity", "python"):
        return _run_here(words, folder, env)
    result = subprocess.run(
        command, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    return result.returncode, result.stdout, result.stderr


def _run_here(words: list[str], folder: Path, env: dict[str, str]) -> tuple[int, str, str]:
    printed, errors, status = StringIO(), StringIO(), 0
    names = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/*.py")
    }

    def take_out() -> dict[str, ModuleType]:
        return {
            name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] in names
        }

    others = take_out()  # modules of the same names, imported by other tests from elsewhere
    # A new process searches for modules next to a program, and in the folder only for `python`.
    folders = (
        [str(folder), *sys.path]
        if words[0] == "python"
        else [path for path in sys.path if path != str(folder)]
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, env, clear=True))
        stack.enter_context(mock.patch.object(sys, "path", folders))
        stack.enter_context(mock.patch.object(sys, "argv", words[1:]))
        for context in (chdir(folder), redirect_stdout(printed), redirect_stderr(errors)):
            stack.enter_context(context)
        for context in (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):  # user defaults
            stack.enter_context(context)
        try:
            if words[0] == "mha-parity":
                status = main(words[1:])
            else:
                runpy.run_path(words[1], run_name="__main__")
        except AssertionError as error:  # shown as Python shows an error that ends a program
            status = 1
            print("".join(traceback.format_exception_only(error)), end="", file=errors)
        finally:
            take_out()
            sys.modules.update(others)
    return status, printed.getvalue(), errors.getvalue()
