"""The tutorial, `plain.py`, in JAX and PyTorch: its gradients, and devices of masks. TTNN has
neither.
"""

import jax
import numpy as np
import pytest
import torch

import mha_jax.plain
import mha_torch.plain

# Query 1 of the first sequence attends to no key, and no query attends to key 3.
MASK = np.array(
    [
        [[[0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1]]],
        [[[0, 0, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1]]],
    ],
    bool,
)


def gradients_in_jax(inputs, mask):
    def total(query, key, value):
        return mha_jax.plain.multi_head_attention_core(query, key, value, 2, mask)[0].sum()

    return [np.asarray(grad) for grad in jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*inputs)]


def gradients_in_torch(inputs, mask):
    leaves = [torch.from_numpy(x).requires_grad_() for x in inputs]
    output, _ = mha_torch.plain.multi_head_attention_core(*leaves, 2, torch.from_numpy(mask))
    return [grad.numpy() for grad in torch.autograd.grad(output.sum(), leaves)]


@pytest.mark.parametrize(
    "gradients_of", [gradients_in_jax, gradients_in_torch], ids=["jax", "torch"]
)
def test_tutorial_gradients_are_finite(gradients_of, rng):
    """Gradients are finite, and the gradients of masked keys and of a query without keys are
    exactly 0.
    """
    inputs = [rng.standard_normal((2, seq_len, 8)).astype(np.float32) for seq_len in (3, 4, 4)]
    query, key, value = gradients_of(inputs, MASK)
    assert np.isfinite(query).all()
    assert np.isfinite(key).all()
    assert np.isfinite(value).all()
    assert np.array_equal(np.all(query == 0.0, axis=-1), MASK.all(axis=-1)[:, 0])
    assert np.array_equal(np.all(value == 0.0, axis=-1), MASK.all(axis=-2)[:, 0])
    assert np.all(key[:, 3] == 0.0)


def test_tutorial_mask_is_where_lengths_are():
    """Without a device, the mask of PyTorch lies on the device of the lengths."""
    lengths = torch.tensor([1, 2], device="meta")
    mask = mha_torch.plain.create_attention_mask(2, is_causal=True, key_padding_lengths=lengths)
    assert mask.device == lengths.device
