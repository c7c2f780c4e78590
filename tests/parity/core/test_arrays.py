"""Arrays of any framework as NumPy's, and back."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.refusals import refuses, refuses_type
from helpers.samples import sample
from helpers.tensors import same_array

import parity
from parity.core.arrays import FOREIGN, to_numpy_by_name
from parity.files.tensor_file import DTYPES

TORCH_ONLY = [name for name in FOREIGN if name in DTYPES and hasattr(torch, name)]


def any_bits(dtype, shape=(3, 5)):
    """Bits of all kinds, NaN among them."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return np.arange(15).reshape(shape) % 2 == 0
    return np.random.default_rng(0).integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


@sample(12)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16", "float32", "float64", *TORCH_ONLY])
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 2)])
def test_an_array_comes_back_from_torch_bit_for_bit(dtype, shape):
    array = any_bits(DTYPES[dtype])
    array = array[:0, :2] if shape == (0, 2) else array[1, 2:3].reshape(()) if shape == () else array
    for each in (array, array.T):
        tensor = parity.to_torch(each)
        assert isinstance(tensor, torch.Tensor)
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", each.shape)
        assert same_array(parity.to_numpy(tensor), np.ascontiguousarray(each).reshape(each.shape))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "float16", "float32", "bfloat16", "float8_e4m3fn"])
def test_an_array_comes_back_from_jax_bit_for_bit(dtype):
    array = any_bits(DTYPES[dtype])
    found = parity.to_jax(array)
    assert isinstance(found, jax.Array)
    assert same_array(parity.to_numpy(found), array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_and_jax_take_each_others_arrays(dtype):
    array = any_bits(DTYPES[dtype])
    assert same_array(parity.to_numpy(parity.to_jax(parity.to_torch(array))), array)
    assert same_array(parity.to_numpy(parity.to_torch(parity.to_jax(array))), array)


def test_an_array_of_the_framework_itself_is_not_copied():
    for array, of_framework in (
        (np.ones(3), parity.to_numpy),
        (torch.ones(3), parity.to_torch),
        (jnp.ones(3), parity.to_jax),
    ):
        assert of_framework(array) is array


def test_a_tensor_with_a_gradient_or_a_transposed_one_is_read_and_not_shared():
    tensor = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    found = parity.to_numpy(tensor.T)
    with torch.no_grad():
        tensor.zero_()
    assert found.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_a_variable_of_flax_is_an_array():
    assert parity.to_numpy(nnx.Param(jnp.arange(3, dtype=jnp.bfloat16))).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    "wrong",
    [None, 1.0, [1.0], "text", torch.ones(2, device="meta"), torch.eye(2).to_sparse()],
    ids=["none", "number", "list", "text", "meta", "sparse"],
)
def test_what_is_no_array_with_values_is_refused(wrong):
    with refuses_type("a…"):
        parity.to_numpy(wrong)


def test_a_tracer_is_refused():
    with refuses_type("an array", "DynamicJaxprTracer"):
        jax.jit(parity.to_numpy)(jnp.ones(2))


def test_nested_mappings_are_read_by_names_with_dots():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    for tree in (nnx.state(layer), nnx.to_pure_dict(nnx.state(layer))):
        found = to_numpy_by_name({"q_proj": tree, "v_proj.bias": np.ones(2)})
        assert {name: x.shape for name, x in found.items()} == {
            "q_proj.bias": (3,),
            "q_proj.kernel": (2, 3),
            "v_proj.bias": (2,),
        }
    with refuses("names", "a.b twice"):
        to_numpy_by_name({"a": {"b": np.ones(1)}, "a.b": np.ones(1)})
    with refuses_type("a.b", "list"):
        to_numpy_by_name({"a": {"b": [1.0]}})
    with refuses_type("weights", "list"):
        to_numpy_by_name([np.ones(1)])


@pytest.mark.costly("modules that a new process imports")
@pytest.mark.thorough
def test_no_framework_is_imported_for_an_array_of_another_one():
    code = """
import sys
import numpy as np
from parity.core.arrays import to_jax, to_numpy, to_torch
to_numpy(np.ones(1))
assert not {"jax", "torch", "ttnn"} & set(sys.modules)
to_numpy(to_torch(np.ones(1)))
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
