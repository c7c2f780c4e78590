"""A few kernels on whatever device is there: what `make sim SIMULATOR=wolfpine` runs, a minute or two for each."""

import numpy as np
import pytest
import ttnn

import mha_tt
from mha_tt.device import accurate_config

from .formulas import assert_close, rounded

pytestmark = pytest.mark.board

X, Y = (rounded(np.random.default_rng(seed).standard_normal((32, 64)), ttnn.bfloat16) for seed in (0, 1))


def run(device, operation, *arrays, **options):
    tensors = (mha_tt.upload(x, device=device) for x in arrays)
    return mha_tt.download(operation(*tensors, **options))


def test_add(device):
    assert_close(run(device, ttnn.add, X, Y), X + Y, ttnn.bfloat16)


def test_matmul(device):
    config = {"compute_kernel_config": accurate_config(device)}
    assert_close(run(device, ttnn.matmul, X, Y.T, **config), X @ Y.T, ttnn.bfloat16)


def test_softmax(device):
    exponentials = np.exp(X - X.max(axis=1, keepdims=True))
    expected = exponentials / exponentials.sum(axis=1, keepdims=True)
    config = {"compute_kernel_config": accurate_config(device), "numeric_stable": True}
    assert_close(run(device, ttnn.softmax, X, dim=-1, **config), expected, ttnn.bfloat16)
