"""Features that `mha_tt` lacks: each raises the error that its documentation promises, before any
work.
"""

import numpy as np
import pytest
import ttnn
from helpers.input_errors import rejects_type
from helpers.tt.sibling import UNSUPPORTED

import mha_tt
from mha_spec import AttentionSpec
from parity.measure.backends import tt as backend


def float16(device):
    with rejects_type("dtype", dtype=...):
        mha_tt.upload(np.ones(3), device=device, dtype=np.float16)
    assert not hasattr(ttnn, "float16")


def float32_in_the_kernel(device):
    query, slots = (
        mha_tt.upload(np.ones((1, 1, n, 32)), device=device, dtype=ttnn.float32) for n in (2, 32)
    )
    with rejects_type("query", "query.dtype=float32"):
        mha_tt.fused.attend_to_cache(query, slots, slots, np.array([3]))


def dropout_in_float32(device):
    x = mha_tt.upload(np.ones((2, 3, 8)), device=device, dtype=ttnn.float32)
    module = mha_tt.MultiHeadAttention(
        AttentionSpec(8, 2, dropout=0.5), device=device, dtype=ttnn.float32
    )
    with rejects_type("the module", dtype=...):
        module(x)


def gradients(device):
    assert backend.GRADIENT_PATHS == ()


ERRORS = {
    case.__name__.replace("_", " "): case
    for case in (float16, float32_in_the_kernel, dropout_in_float32, gradients)
}


@pytest.mark.parametrize("feature", sorted(UNSUPPORTED.keys() | ERRORS.keys()))
def test_missing_feature_raises_its_error(device, feature):
    """Every row of the table is missing indeed, and no feature is missing without a row."""
    assert UNSUPPORTED[feature]
    ERRORS[feature](device)
