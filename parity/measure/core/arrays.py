"""Conversion between NumPy, torch, JAX and TTNN arrays: same values, dtype and shape, bit for bit.

Frameworks are imported only for their own arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from mha_spec import InputError, InputTypeError
from parity.measure.core.libraries import LIBRARIES

if TYPE_CHECKING:
    import jax
    import torch

FOREIGN = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
"""Dtypes of torch that NumPy lacks; ml_dtypes has them under the same names."""


def to_numpy(x: Any) -> np.ndarray:
    """Return a NumPy array of the same values and dtype; bfloat16 is ml_dtypes' dtype.

    Args:
        x: an array of NumPy, torch (on any device, with or without a gradient), JAX or TTNN, a Flax
            or Keras variable, or anything else that NumPy converts to an array.

    Returns:
        `x` itself if it is a NumPy array; otherwise an array that does not share memory with a
        torch tensor.

    Raises:
        TypeError: if it is not an array, or has no values: a tracer, or a tensor on torch's meta
            device.

    Example:
        >>> parity.to_numpy(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
        array([1, 2], dtype=bfloat16)
    """
    if isinstance(x, np.ndarray):
        return x
    packages = _packages_of(x)
    if "torch" in packages and hasattr(x, "detach"):
        return _from_torch(x)
    for package in packages & LIBRARIES.keys():
        return LIBRARIES[package]().to_numpy(x)
    # A tracer of JAX has the method, but raises an error of its own when it is called.
    is_tracer = any(kind.__name__ == "Tracer" for kind in type(x).__mro__)
    if is_tracer or not hasattr(x, "__array__"):
        rule = "be a NumPy, torch or JAX array with values"
        raise InputTypeError("an array", rule, type(x).__name__)
    return np.asarray(x)


def to_torch(x: Any) -> torch.Tensor:
    """Return a torch tensor of the same values, dtype and shape, on the CPU.

    A torch tensor is returned unchanged.

    Raises:
        TypeError: if it is not an array, or torch lacks its dtype.

    Example:
        >>> parity.to_torch(jnp.arange(3.0))
        tensor([0., 1., 2.])
    """
    import torch

    if isinstance(x, torch.Tensor):
        return x
    array = to_numpy(x)
    if array.dtype.name in FOREIGN:
        # torch cannot read NumPy's dtype of this name; the bits are equal.
        bits = np.array(array).view(f"u{array.itemsize}")
        return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(np.array(array))


def to_jax(x: Any) -> jax.Array:
    """Return a JAX array of the same values, dtype and shape; `x` itself if it is one.

    JAX has 64-bit dtypes only if `jax_enable_x64` is set; otherwise they become 32-bit.

    Raises:
        TypeError: if it is not an array, or JAX lacks its dtype.

    Example:
        >>> parity.to_jax(torch.arange(3.0))
        Array([0., 1., 2.], dtype=float32)
    """
    import jax

    if isinstance(x, jax.Array):
        return x
    return jax.numpy.asarray(to_numpy(x))


def to_numpy_by_name(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return arrays by name as NumPy arrays.

    Names of nested mappings, such as Flax's, are joined with dots.

    Raises:
        TypeError: if an entry is not an array, or `arrays` is not a mapping.
        ValueError: if two arrays get the same name.
    """
    if not isinstance(arrays, Mapping):
        raise InputTypeError("weights", "be a mapping of arrays by name", type(arrays).__name__)
    by_name: dict[str, np.ndarray] = {}
    _add_arrays(by_name, "", arrays)
    return by_name


def _add_arrays(by_name: dict[str, np.ndarray], name: str, node: Any) -> None:
    """Add an array, or all in a nested mapping, under a name."""
    if isinstance(node, Mapping):
        prefix = f"{name}." if name else ""
        for key, child in node.items():
            _add_arrays(by_name, f"{prefix}{key}", child)
        return
    if name in by_name:
        rule = "differ after their levels are joined with dots"
        raise InputError("names", rule, f"{name} twice")
    by_name[name] = _array(name, node)


def arithmetic_of(*values: Any) -> str:
    """Return the arithmetic of the device of arrays, or of mappings of them.

    It is `ieee`, or the arithmetic of their library.
    """
    arrays: list[Any] = []
    for value in values:
        if isinstance(value, Mapping):
            arrays += value.values()
        else:
            arrays.append(value)
    for array in arrays:
        for package in _packages_of(array) & LIBRARIES.keys():
            return LIBRARIES[package]().arithmetic()
    return "ieee"


def _packages_of(x: Any) -> set[str]:
    """Return the packages of an array's classes."""
    return {kind.__module__.partition(".")[0] for kind in type(x).__mro__}


def names_of(value: Any, stage: str) -> list[str]:
    """Return the names of the stages of arrays by stage, or of a single array."""
    if isinstance(value, Mapping):
        return [str(name) for name in value]
    return [stage]


def stages_of(role: str, value: Any, stage: str) -> dict[str, np.ndarray]:
    """Return the arrays by stage, as NumPy arrays."""
    if isinstance(value, Mapping):
        return {str(name): _array(f"{role}[{name!r}]", array) for name, array in value.items()}
    return {stage: _array(role, value)}


def _array(what: str, value: Any) -> np.ndarray:
    """Return a value as a NumPy array; an error calls the value `what`."""
    try:
        return to_numpy(value)
    except InputTypeError as error:
        raise error.renamed(lambda _, got: (what, got)) from None
    except TypeError:
        rule = "be an array of NumPy, torch, JAX or TTNN"
        raise InputTypeError(what, rule, type(value).__name__) from None


def _check_dense(x: torch.Tensor) -> None:
    """Reject a tensor that NumPy cannot hold."""
    import torch

    kind = ""
    if x.is_meta:
        kind = "a tensor on the meta device, which has no values"
    elif x.is_quantized:
        kind = "a quantized tensor; x.dequantize() has its values"
    elif x.is_nested:
        kind = "a nested tensor; torch.nested.to_padded_tensor pads it"
    elif x.layout != torch.strided:
        kind = f"a sparse tensor ({x.layout}); x.to_dense() has its values"
    if kind:
        raise InputTypeError("an array", "be dense and have values", kind)


def _from_torch(x: torch.Tensor) -> np.ndarray:
    import torch

    _check_dense(x)
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    x = x.clone()  # the tensor may be modified in place later
    name = str(x.dtype).removeprefix("torch.")
    if name in FOREIGN:
        bits = {1: torch.uint8, 2: torch.uint16}[x.element_size()]
        return x.view(bits).numpy().view(getattr(ml_dtypes, name))
    return x.numpy()
