"""The examples in the docstrings of `ttnn_mock`, which show how other TTNN code uses it."""

import re
import textwrap

import numpy as np
import pytest
import ttnn

import ttnn_mock
from ttnn_mock import hooks

pytestmark = pytest.mark.usefixtures("only_mock")


def example_of(module):
    """Return the code in the docstring of a module."""
    lines = re.findall(r"^(?: {4}.*)?\n", module.__doc__, re.M)
    return textwrap.dedent("".join(lines))


@pytest.mark.costly("a process has one board for good")
def test_example_imports_no_other_package(run_python):
    """The example of the package prints 80 sums of softmax, and imports no other package of this
    project.
    """
    ours = ("mha_spec", "mha_tt", "mha_torch", "mha_jax", "parity")
    listing = f"import sys\nprint([name for name in {ours} if name in sys.modules])"
    result = run_python(example_of(ttnn_mock) + listing)
    assert result.stdout.count("1.0") + result.stdout.count("0.9") == 80, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


def test_library_with_hooks_gets_values(device):
    """The transfers in the example of the hooks give the values of an operation."""
    library = {"hooks": hooks, "ttnn": ttnn}
    exec(example_of(hooks), library)
    tensor = library["upload"](np.ones((2, 3), np.float32), device)
    assert library["download"](ttnn.add(tensor, 1.0)).tolist() == [[2.0] * 3] * 2
