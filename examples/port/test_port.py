"""The tests of the finished port, which keep the bugs from coming back."""

import copy

import attention_jax_fixed as port
import jax.numpy as jnp
import torch
from layer import ORIGINAL, PROBLEM, STATE

PARAMS = port.from_torch(STATE)
X = PROBLEM.inputs["query"]


@torch.no_grad()
def test_the_port_equals_the_original(assert_parity):
    in_float64 = copy.deepcopy(ORIGINAL).double()(torch.tensor(X).double())
    assert_parity(
        port.attention(PARAMS, jnp.asarray(X)), in_float64, same_precision=ORIGINAL(torch.tensor(X))
    )


def test_every_stage_is_right(assert_parity):
    assert_parity(port.stages(PARAMS, jnp.asarray(X)), problem=PROBLEM)
