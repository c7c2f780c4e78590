"""The scripts that `make` uses."""

import os
import platform
import subprocess
from pathlib import Path

import pytest

FIND = Path(__file__).parents[1] / "tools" / "find-python312"

pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="ttnn has wheels for x86-64 Linux only"
)


def put_python(path, says="cpython 3 12 ok", status=0):
    """A Python that says of itself what it is told to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {says}\nexit {status}\n")
    path.chmod(0o755)
    return path


def find(path, home):
    result = subprocess.run(
        [FIND], capture_output=True, text=True, check=True, env={"PATH": f"{path}:{os.defpath}", "HOME": str(home)}
    )
    return result.stdout.strip()


def test_python312_is_found_on_the_path(tmp_path):
    python = put_python(tmp_path / "bin" / "python3.12")
    assert find(tmp_path / "bin", tmp_path) == str(python)


@pytest.mark.parametrize("says", ["cpython 3 11", "pypy 3 12", ""])
def test_a_python_of_that_name_that_is_another_or_does_not_run_is_not_chosen(tmp_path, says):
    put_python(tmp_path / "bin" / "python3.12", says, status=0 if says else 127)
    python = put_python(tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin" / "python")
    assert find(tmp_path / "bin", tmp_path) == str(python)


def test_a_shim_does_not_hide_a_python_further_down_the_path(tmp_path):
    put_python(tmp_path / "shims" / "python3.12", "", status=127)
    python = put_python(tmp_path / "bin" / "python3.12")
    assert find(f"{tmp_path / 'shims'}:{tmp_path / 'bin'}", tmp_path) == str(python)
