"""Basic kernels on the available device; `make sim SIMULATOR=wolfpine` runs them in a minute or two
each.
"""

import numpy as np
import pytest
import ttnn
from helpers.tt.formulas import assert_close, rounded

import mha_tt
from mha_tt.device import accurate_config

pytestmark = pytest.mark.board


@pytest.fixture
def x(device):
    return drawn(0)


@pytest.fixture
def y(device):
    return drawn(1)


def drawn(seed):
    """Return random values that bfloat16 represents exactly; requires an open device."""
    return rounded(np.random.default_rng(seed).standard_normal((32, 64)), ttnn.bfloat16)


def run(device, operation, *arrays, **options):
    tensors = (mha_tt.upload(x, device=device) for x in arrays)
    return mha_tt.download(operation(*tensors, **options))


def test_addition_matches_numpy(device, x, y):
    """ttnn.add of two bfloat16 arrays equals NumPy's sum within the tolerance of bfloat16."""
    assert_close(run(device, ttnn.add, x, y), x + y, ttnn.bfloat16)


def test_matmul_matches_numpy(device, x, y):
    """ttnn.matmul with accurate arithmetic equals NumPy's product within the tolerance of
    bfloat16.
    """
    config = {"compute_kernel_config": accurate_config(device)}
    assert_close(run(device, ttnn.matmul, x, y.T, **config), x @ y.T, ttnn.bfloat16)


def test_softmax_matches_formula(device, x):
    """ttnn.softmax with accurate arithmetic equals the formula within the tolerance of bfloat16."""
    exponentials = np.exp(x - x.max(axis=1, keepdims=True))
    expected = exponentials / exponentials.sum(axis=1, keepdims=True)
    config = {"compute_kernel_config": accurate_config(device), "numeric_stable": True}
    assert_close(run(device, ttnn.softmax, x, dim=-1, **config), expected, ttnn.bfloat16)
