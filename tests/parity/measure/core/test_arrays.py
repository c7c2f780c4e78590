"""Conversion of arrays between NumPy and the other frameworks."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample
from helpers.tensors import same_array

import parity
from parity.measure.core.arrays import FOREIGN, to_numpy_by_name
from parity.measure.files.tensor_file import DTYPES

TORCH_ONLY = [name for name in FOREIGN if name in DTYPES and hasattr(torch, name)]


def any_bits(dtype, shape=(3, 5)):
    """Return an array of random bits, including NaN."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return np.arange(15).reshape(shape) % 2 == 0
    return (
        np.random.default_rng(0)
        .integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        .view(dtype)[..., 0]
    )


@sample(12)
@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int32", "int64", "float16", "float32", "float64", *TORCH_ONLY]
)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 2)])
def test_torch_round_trip_is_exact(dtype, shape):
    """An array becomes a torch tensor of its dtype and shape, and comes back bit for bit."""
    array = any_bits(DTYPES[dtype])
    array = (
        array[:0, :2] if shape == (0, 2) else array[1, 2:3].reshape(()) if shape == () else array
    )
    for layout in (array, array.T):
        tensor = parity.to_torch(layout)
        assert isinstance(tensor, torch.Tensor)
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", layout.shape)
        assert same_array(
            parity.to_numpy(tensor), np.ascontiguousarray(layout).reshape(layout.shape)
        )


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int32", "float16", "float32", "bfloat16", "float8_e4m3fn"]
)
def test_jax_round_trip_is_exact(dtype):
    """An array becomes a JAX array and comes back bit for bit."""
    array = any_bits(DTYPES[dtype])
    converted = parity.to_jax(array)
    assert isinstance(converted, jax.Array)
    assert same_array(parity.to_numpy(converted), array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_and_jax_convert_directly(dtype):
    """Arrays convert between torch and JAX in both directions, bit for bit."""
    array = any_bits(DTYPES[dtype])
    assert same_array(parity.to_numpy(parity.to_jax(parity.to_torch(array))), array)
    assert same_array(parity.to_numpy(parity.to_torch(parity.to_jax(array))), array)


def test_native_array_is_not_copied():
    """An array of the requested framework is returned itself."""
    for array, of_framework in (
        (np.ones(3), parity.to_numpy),
        (torch.ones(3), parity.to_torch),
        (jnp.ones(3), parity.to_jax),
    ):
        assert of_framework(array) is array


def test_to_numpy_copies_a_parameter():
    """The array of a transposed parameter keeps its values if the parameter changes."""
    tensor = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    converted = parity.to_numpy(tensor.T)
    with torch.no_grad():
        tensor.zero_()
    assert converted.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_flax_variable_is_an_array():
    """A bfloat16 variable of Flax becomes a bfloat16 NumPy array."""
    assert parity.to_numpy(nnx.Param(jnp.arange(3, dtype=jnp.bfloat16))).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    "wrong",
    [None, 1.0, [1.0], "text", torch.ones(2, device="meta"), torch.eye(2).to_sparse()],
    ids=["none", "number", "list", "text", "meta", "sparse"],
)
def test_values_of_other_types_raise(wrong):
    """Values that are not arrays, and meta or sparse tensors, raise an error about the type."""
    with rejects_type("a…"):
        parity.to_numpy(wrong)


def test_jax_tracer_raises():
    """A tracer of jax.jit raises an error about the type."""
    with rejects_type("an array", "DynamicJaxprTracer"):
        jax.jit(parity.to_numpy)(jnp.ones(2))


def test_nested_names_are_joined_by_dots():
    """Nested mappings have names with dots; duplicate names and other values raise errors."""
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    for tree in (nnx.state(layer), nnx.to_pure_dict(nnx.state(layer))):
        flat = to_numpy_by_name({"q_proj": tree, "v_proj.bias": np.ones(2)})
        assert {name: x.shape for name, x in flat.items()} == {
            "q_proj.bias": (3,),
            "q_proj.kernel": (2, 3),
            "v_proj.bias": (2,),
        }
    with rejects("names", "a.b twice"):
        to_numpy_by_name({"a": {"b": np.ones(1)}, "a.b": np.ones(1)})
    with rejects_type("a.b", "list"):
        to_numpy_by_name({"a": {"b": [1.0]}})
    with rejects_type("weights", "list"):
        to_numpy_by_name([np.ones(1)])


@pytest.mark.costly("modules that a new process imports")
@pytest.mark.thorough
def test_conversion_imports_are_lazy():
    """NumPy arrays import no framework, and torch tensors do not import JAX."""
    code = """
import sys
import numpy as np
from parity.measure.core.arrays import to_jax, to_numpy, to_torch
to_numpy(np.ones(1))
assert not {"jax", "torch", "ttnn"} & set(sys.modules)
to_numpy(to_torch(np.ones(1)))
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
