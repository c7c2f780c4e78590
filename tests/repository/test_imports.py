"""Each package works where the other frameworks are not installed, and `parity` imports none before it is asked to."""

import ast
import platform
import subprocess
import sys

import pytest
from helpers import ROOT

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

# `mha_tt` asks importlib for ttnn, which then answers as where there is none. (The blocker would answer by raising.)
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
@pytest.mark.parametrize(
    ("program", "blocked"),
    [
        (USE_JAX, {"torch", "ttnn", "mha_torch", "mha_tt", "parity"}),
        (USE_TORCH, {"jax", "jaxlib", "flax", "ttnn", "mha_jax", "mha_tt", "parity"}),
    ],
    ids=["mha_jax", "mha_torch"],  # mha_tt's is in tests/siblings/mha_tt, where ttnn is
)
def test_sibling_works_without_the_other_frameworks(program, blocked):
    result = run(BLOCKER.format(blocked=blocked), program)
    assert result.returncode == 0, result.stderr


@pytest.mark.costly("modules that a new process imports")
def test_a_blocked_package_cannot_be_imported():  # the control of the tests above
    result = run(BLOCKER.format(blocked={"torch"}), USE_TORCH)
    assert "No module named 'torch' (blocked by the test)" in result.stderr


@pytest.mark.costly("modules that a new process imports")
def test_mha_tt_says_which_pythons_have_ttnn():
    result = run(WITHOUT_TTNN, "import mha_tt")
    *_, message = result.stderr.splitlines()
    assert message.startswith("ImportError: mha_tt needs ttnn")
    assert "CPython 3.10 and 3.12" in message
    assert f"this is {platform.python_implementation()} {platform.python_version()}" in message
    assert result.stderr.count("Traceback") == 1  # no other error before it


@pytest.mark.costly("modules that a new process imports")
@pytest.mark.parametrize("module", ["parity", "parity.cli.main"])
def test_parity_imports_no_framework_and_no_sibling(module):
    packages = FRAMEWORKS | {"mha_jax", "mha_torch", "mha_tt"}
    result = run(f"import sys, {module}", NOTHING_OF.format(packages=packages))
    assert result.returncode == 0, result.stderr


@pytest.mark.costly("modules that a new process imports")
@pytest.mark.parametrize("module", ["parity", "parity.cli.main"])
def test_parity_is_imported_where_no_framework_is(module):
    result = run(BLOCKER.format(blocked=FRAMEWORKS), f"import {module}")
    assert result.returncode == 0, result.stderr


@pytest.mark.costly("modules that a new process imports")
@pytest.mark.parametrize("module", ["compare", "trace", "problem"])
def test_a_comparison_makes_no_cases(module):
    result = run(f"import sys, parity.core.{module}", "assert 'parity.core.cases' not in sys.modules")
    assert result.returncode == 0, result.stderr


def test_torch_sibling_imports_what_divides_layers_only_when_it_is_asked_for():
    folder = ROOT / "mha_torch"
    found = []
    for path in sorted({*folder.rglob("*.py")} - {*(folder / "parallel").rglob("*.py")}):
        for node in ast.parse(path.read_text()).body:  # what is imported at once
            names = [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [
                (path.name, name) for name in names if name.startswith(("torch.distributed", "mha_torch.parallel"))
            ]
    assert found == []
