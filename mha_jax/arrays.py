"""Array helpers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from mha_spec import InputTypeError

if TYPE_CHECKING:
    from jax import Array
else:

    class _ArrayTypes(type):
        def __instancecheck__(cls, x: object) -> bool:
            return isinstance(x, (jax.Array, np.ndarray))

    class Array(metaclass=_ArrayTypes):
        """Type of arrays in annotations: of JAX, also in transformations, or of NumPy."""

        __module__ = "jax"  # in errors it is a jax.Array


_Tree = TypeVar("_Tree")


def platform_of(*arrays: Array) -> str:
    """Return the platform of arrays ("cpu", "gpu", "tpu"), or the default one if they are
    traced.
    """
    platform = None
    for x in arrays:
        # Known even under `jax.grad`.
        value: Any = x.to_concrete_value() if isinstance(x, Tracer) else x
        if not isinstance(value, jax.Array):
            return _default_platform()
        if platform is None:
            platform = next(iter(value.devices())).platform
    return _default_platform() if platform is None else platform


def _default_platform() -> str:
    # Under `jax.jit` arrays have no device yet, and `lax.platform_dependent` would trace all
    # kernels in each call.
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is None:
        return jax.default_backend()
    return getattr(default, "platform", default)


def lies_on_mesh(x: Array) -> bool:
    """Return whether the type of an array has a mesh of devices. Only then can it contain a
    sharding.
    """
    return not jax.typeof(x).sharding.mesh.empty


def is_on_accelerator(x: object) -> bool:
    """Return whether x is an array on a device other than a CPU, where reading values waits for the
    device.
    """
    return isinstance(x, jax.Array) and next(iter(x.devices())).platform != "cpu"


def cast(arrays: _Tree, dtype: DTypeLike | None) -> _Tree:
    """Return a container with its floating-point arrays in a dtype; None leaves them unchanged."""
    if dtype is None:
        return arrays
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise InputTypeError("dtype", "be floating point", dtype=jnp.dtype(dtype))

    cast_arrays: dict[int, Any] = {}  # an array passed twice stays one

    def cast_one(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: cast_one(leaf) for name, leaf in x.items()}
        if isinstance(x, (tuple, list)):
            return tuple(map(cast_one, x))
        is_floating = isinstance(x, Array) and jnp.issubdtype(x.dtype, jnp.floating)
        # Other types are checked elsewhere.
        if is_floating:
            return cast_arrays.setdefault(id(x), x.astype(dtype))
        return x

    return cast_one(arrays)


def array_of(weight: Any) -> Any:
    """Return the array of a parameter, as an `nnx.State` has them; anything else is returned
    unchanged.
    """
    if isinstance(weight, nnx.Variable):
        return weight[...]
    return weight


def at_least_float32(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x in at least float32."""
    if x.dtype == jnp.float64:
        return x
    return x.astype(jnp.float32)


def zero_where(x: Float[Array, "..."], where: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Return x with 0 at `where`, which blocks the gradient."""
    return jnp.where(where, 0.0, x)


def nan_where(x: Float[Array, "..."], where: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Return x with NaN at `where`; the gradient passes unchanged, NaN only if the incoming
    one is NaN.
    """
    return x + jnp.where(where, jnp.nan, 0.0)
