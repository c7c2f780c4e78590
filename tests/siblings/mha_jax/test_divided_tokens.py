"""Tokens of mha_jax divided over devices, for `make test`; test_sharded_tokens has more layers and
meshes.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers.input_errors import rejects
from helpers.shell import results_of_program
from jax.sharding import AbstractMesh, PartitionSpec

import mha_jax
from mha_jax.parallel.tokens import ContextParallel
from mha_spec import AttentionSpec


@pytest.mark.costly("a process in which JAX has more devices")
def test_divided_tokens_match_one_device():
    """Outputs and gradients of divided tokens match one device, and exchanging tokens of two
    devices is detected.
    """
    name = "ring, two"
    ((wrong, _, _, exchanged),) = results_of_program("sharded_tokens", name)["attended"].values()
    assert wrong is None
    assert "output" in exchanged


def test_lengths_are_of_whole_sequences():
    """In a user's own shard_map, where each of two devices has four tokens, a length of seven is
    valid and one of nine raises an error.
    """
    layer = mha_jax.MultiHeadAttention(AttentionSpec(16, 2), rngs=nnx.Rngs(0))
    layer.kernel = ContextParallel("tokens", layer.kernel)
    divided = PartitionSpec(None, "tokens")

    def traced_with(lengths):
        def attend(x):
            return layer(x, key_padding_lengths=lengths)[0]

        mesh = AbstractMesh((2,), ("tokens",))
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=divided, out_specs=divided)
        return jax.eval_shape(mapped, jax.ShapeDtypeStruct((2, 8, 16), jnp.float32))

    assert traced_with([7, 3]).shape == (2, 8, 16)
    with rejects("key_padding_lengths", key_padding_lengths=[8, 9]):
        traced_with([8, 9])
