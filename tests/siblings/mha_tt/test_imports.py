"""`mha_tt` works without torch and the other frameworks installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

# Make importlib treat these packages as missing. (ttnn looks for torch through importlib and
# imports it if found.)
WITHOUT_THE_OTHERS = """
import sys

for name in ("torch", "jax", "jaxlib", "flax", "parity", "mha_jax", "mha_torch"):
    sys.modules[name] = None
"""

USE = """
import mha_tt
import numpy as np
import ttnn_mock
from mha_spec import AttentionSpec

with ttnn_mock.board(values=False) as device:
    module = mha_tt.MultiHeadAttentionWithCache(AttentionSpec(8, 2), device=device)
    x = mha_tt.upload(np.zeros((1, 3, 8)), device=device)
    output, cache = module(x, module.init_cache(1, 4))
    assert tuple(output.shape) == (1, 3, 8)
"""

USE_VALUES = """
import ttnn_mock

with ttnn_mock.board() as device:
    pass
"""


def run(folder, *pieces):
    """Run the pieces as one program in a fresh interpreter, with an empty working folder and its
    own cache folder.
    """
    (folder / "work").mkdir()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TT_METAL_")
    }
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", "\n".join(pieces)]
    return subprocess.run(
        program, capture_output=True, text=True, check=False, cwd=folder / "work", env=environment
    )


@pytest.mark.costly("modules that a new process imports")
def test_mha_tt_needs_no_other_framework(tmp_path):
    """A layer runs on a mock board if torch, jax, flax and the other packages are missing."""
    result = run(tmp_path, WITHOUT_THE_OTHERS, USE)
    assert result.returncode == 0, result.stderr


@pytest.mark.costly("what a process prints as it ends")
@pytest.mark.thorough
# nanobind reports ttnn objects that outlive the interpreter
def test_test_process_reports_no_leaks():
    """A pytest process prints no message of nanobind about leaked ttnn objects."""
    here = Path(__file__).parent
    test = here / "test_norms.py::test_new_norms_are_exact_in_each_dtype"
    command = [sys.executable, "-m", "pytest", "-q", test]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stdout
    assert "nanobind" not in result.stdout + result.stderr


@pytest.mark.costly("modules that a new process imports")
def test_mock_values_without_torch_raise(tmp_path):  # shows that torch really is hidden
    """A mock board with values raises ModuleNotFoundError that names torch if it is missing."""
    result = run(tmp_path, WITHOUT_THE_OTHERS, USE_VALUES)
    assert "ModuleNotFoundError: ttnn_mock needs torch for values" in result.stderr
