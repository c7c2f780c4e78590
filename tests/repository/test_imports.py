"""Tests that each package works without other frameworks, which `parity` imports lazily, and that
commands import only what they use.
"""

import ast
import platform
import subprocess
import sys

import pytest
from helpers import ROOT
from helpers.samples import sample

# A finder that comes first and says that these packages are not installed, as Python itself would.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by the test)", name=name)

sys.meta_path.insert(0, Blocker())
"""

USE_JAX = """
import mha_jax
from mha_spec import AttentionSpec
from flax import nnx
import jax.numpy as jnp

module = mha_jax.MultiHeadAttentionWithCache(AttentionSpec(8, 2), rngs=nnx.Rngs(0))
output, cache = module(jnp.ones((1, 3, 8)), module.init_cache(1, 4))
assert output.shape == (1, 3, 8)
"""

USE_TORCH = """
import mha_torch
import torch
from mha_spec import AttentionSpec

module = mha_torch.MultiHeadAttentionWithCache(AttentionSpec(8, 2))
output, cache = module(torch.ones(1, 3, 8), module.init_cache(1, 4))
assert output.shape == (1, 3, 8)
"""

# `mha_tt` searches with importlib, which then finds no ttnn. (The blocker would raise an error.)
WITHOUT_TTNN = """
import sys

sys.modules["ttnn"] = None
"""

NOTHING_OF = """
imported = {{module.partition(".")[0] for module in sys.modules}} & {packages}
assert not imported, imported
"""

FRAMEWORKS = {"jax", "jaxlib", "flax", "torch", "ttnn"}


def run(*pieces):
    """Run the pieces as one program in a fresh interpreter, in the root of the repository."""
    program = [sys.executable, "-c", "\n".join(pieces)]
    return subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.costly("modules that a new process imports")
@sample(1)
@pytest.mark.parametrize(
    ("program", "blocked"),
    [
        (USE_JAX, {"torch", "ttnn", "mha_torch", "mha_tt", "parity"}),
        (USE_TORCH, {"jax", "jaxlib", "flax", "ttnn", "mha_jax", "mha_tt", "parity"}),
    ],
    ids=["mha_jax", "mha_torch"],  # mha_tt: `tests/siblings/mha_tt`
)
def test_package_works_without_others(program, blocked):
    """mha_jax and mha_torch run a layer with a cache without the other frameworks, packages
    or parity.
    """
    result = run(BLOCKER.format(blocked=blocked), program)
    assert result.returncode == 0, result.stderr


@pytest.mark.costly("modules that a new process imports")
def test_blocked_package_cannot_be_imported():
    """The control of these tests: importing torch fails if the blocker has it."""
    result = run(BLOCKER.format(blocked={"torch"}), USE_TORCH)
    assert "No module named 'torch' (blocked by the test)" in result.stderr


@pytest.mark.costly("modules that a new process imports")
def test_mha_tt_names_pythons_with_ttnn():
    """Without ttnn, importing mha_tt raises one ImportError with the Python versions that
    have it, and this one.
    """
    result = run(WITHOUT_TTNN, "import mha_tt")
    *_, message = result.stderr.splitlines()
    assert message.startswith("ImportError: mha_tt needs ttnn")
    assert "CPython 3.10 and 3.12" in message
    assert f"this is {platform.python_implementation()} {platform.python_version()}" in message
    assert result.stderr.count("Traceback") == 1  # no other error before it


@pytest.mark.costly("modules that a new process imports")
@pytest.mark.parametrize("module", ["parity", "parity.use.cli.main"])
def test_parity_imports_no_framework(module):
    """Importing parity or its command line imports no framework, nor mha_jax, mha_torch, mha_tt
    or ttnn_mock.
    """
    packages = FRAMEWORKS | {"mha_jax", "mha_torch", "mha_tt", "ttnn_mock"}
    result = run(f"import sys, {module}", NOTHING_OF.format(packages=packages))
    assert result.returncode == 0, result.stderr


@pytest.mark.costly("modules that a new process imports")
@pytest.mark.parametrize("module", ["parity", "parity.use.cli.main"])
def test_parity_imports_without_frameworks(module):
    """parity and its command line can be imported if no framework is installed."""
    result = run(BLOCKER.format(blocked=FRAMEWORKS), f"import {module}")
    assert result.returncode == 0, result.stderr


@pytest.mark.costly("modules that a new process imports")
def test_comparing_does_not_import_cases():
    """Importing compare, trace and problem of parity.measure.core does not import the cases."""
    result = run(
        "import sys",
        "from parity.measure.core import compare, problem, trace",
        "assert 'parity.measure.core.cases' not in sys.modules",
    )
    assert result.returncode == 0, result.stderr


COUNT = """
import sys

parts = {package: [name for name in sys.modules if name.partition(".")[0] == package]
         for package in ("parity", "mha_spec")}
explaining = [name for name in parts["parity"] if name.startswith("parity.explain")]
"""

PASSES = """
import numpy as np
import parity
from mha_spec import AttentionSpec
from parity.measure.core.trace import Reference

problem = parity.make_problem(parity.Case("mine", AttentionSpec(8, 2), "any"), "float32")
exact = Reference(problem).accumulated["output"]
parity.assert_parity({actual}, problem=problem)
"""

CONVERTS = """
import os
from tempfile import TemporaryDirectory
import numpy as np
from safetensors.numpy import save_file
from parity.use.cli.main import main

with TemporaryDirectory() as folder:
    os.chdir(folder)
    names = [f"model.layers.{i}.self_attn.{name}_proj.weight" for i in "01" for name in "qkvo"]
    save_file({name: np.eye(8, dtype=np.float32) for name in names}, "a.safetensors")
    words = "convert a.safetensors b.safetensors --from transformers.LLaMA --to canonical"
    prefix = "model.layers.{i}.self_attn"
    assert main([*words.split(), "--num-heads", "2", "--prefix", prefix]) == 0
    os.chdir("/")
"""


@pytest.mark.costly("modules that a new process imports")
def test_passing_assert_explains_nothing():
    """A passing assert_parity loads nothing of parity.explain, and at most 60 modules of parity
    and mha_spec. Control: one that fails afterwards loads parity.explain.
    """
    passing = PASSES.format(actual="exact.astype(np.float32)")
    count = "print(len(explaining), len(sum(parts.values(), [])))"
    failing = """
try:
    parity.assert_parity(2 * exact.astype(np.float32), problem=problem)
except AssertionError:
    pass
"""
    result = run(passing, COUNT, count, failing, COUNT, count)
    assert result.returncode == 0, result.stderr
    counts = [[int(word) for word in line.split()] for line in result.stdout.splitlines()]
    (explaining, modules), (explaining_failure, _) = counts
    assert explaining == 0
    assert 40 < modules <= 60
    assert explaining_failure > 20


@pytest.mark.costly("modules that a new process imports")
def test_conversion_observes_no_models():
    """`convert` of a file with a known layout loads nothing of parity.explain, and at most 110
    modules of parity.
    """
    result = run(CONVERTS, COUNT, "print(explaining, len(parts['parity']))")
    assert result.returncode == 0, result.stderr
    explaining, count = result.stdout.splitlines()[-1].rsplit(maxsplit=1)
    assert explaining == "[]"
    assert 60 < int(count) <= 110


@pytest.mark.parametrize("package", ["mha_jax", "mha_torch", "mha_tt"])
def test_packages_import_parallel_lazily(package):
    """No module outside of `parallel` imports it or torch.distributed at import time: who divides
    no layer needs neither.
    """
    folder = ROOT / package
    imports = []
    for path in sorted({*folder.rglob("*.py")} - {*(folder / "parallel").rglob("*.py")}):
        for node in ast.parse(path.read_text()).body:  # statements at import time
            names = (
                [alias.name for alias in getattr(node, "names", [])]
                if isinstance(node, ast.Import)
                else []
            )
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imports += [
                (path.name, name)
                for name in names
                if name.startswith(("torch.distributed", f"{package}.parallel"))
            ]
    assert imports == []
