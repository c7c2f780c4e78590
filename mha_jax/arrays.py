"""Checks of arrays, made before any work: `<what> must <rule>, got <name>=<value>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array

from mha_spec import Refusal, WrongType
from mha_spec.rules import as_count

_Tree = TypeVar("_Tree")


def platform_of(*arrays: Array) -> str:
    """Return the platform that arrays lie on ("cpu", "gpu", "tpu"), or the default one where they are traced."""
    known: list[Any] = [x.to_concrete_value() if isinstance(x, Tracer) else x for x in arrays]  # under a gradient, too
    if all(isinstance(x, jax.Array) for x in known):
        return next(iter(known[0].devices())).platform
    # Under `jax.jit` arrays have no devices yet. `lax.platform_dependent` would trace every kernel for each call.
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return jax.default_backend() if default is None else getattr(default, "platform", default)


def cast(arrays: _Tree, dtype: DTypeLike | None) -> _Tree:
    """Return the floating-point arrays of a container in that dtype; in their own if it is None."""
    if dtype is None:
        return arrays
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise WrongType("dtype", "be floating point", dtype=jnp.dtype(dtype))

    def cast_one(x: Any) -> Any:
        is_floating = isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if is_floating else x  # what it is not, is refused elsewhere

    return jax.tree.map(cast_one, arrays)


def check_count(name: str, value: object, minimum: int = 1) -> None:
    """Refuse what is not an integer of at least `minimum`."""
    as_count(name, value, minimum)


def check_array(name: str, x: object) -> None:
    """Refuse what is not an array of the framework."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise WrongType(name, "be an array", type(x).__name__)


def check_floating(name: str, x: Array, rank: int) -> None:
    """Refuse an array of another rank, or one that does not hold floating-point numbers."""
    check_array(name, x)
    if x.ndim != rank:
        raise Refusal(name, f"have {rank} axes", {f"{name}.shape": x.shape})
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise WrongType(name, "be floating point", {f"{name}.dtype": x.dtype})


def check_broadcasts(name: str, shape: tuple[int, ...], scores_shape: tuple[int, ...]) -> None:
    """Refuse a shape that does not broadcast to the scores, or that would stretch them."""
    fits = len(shape) <= 4 and all(a in (1, b) for a, b in zip(reversed(shape), reversed(scores_shape), strict=False))
    if not fits:
        raise Refusal(name, f"broadcast to the scores (B, N, T, S) = {scores_shape}", {f"{name}.shape": shape})


def check_lengths(name: str, lengths: Array | Sequence[int], batch_size: int | None, maximum: int) -> None:
    """Refuse lengths that are not one integer in 0..maximum for each sequence."""
    array = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
    if isinstance(array, np.ndarray) and not array.size:  # NumPy takes [] for floats
        array = array.astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise WrongType(name, "be integers", {f"{name}.dtype": array.dtype})
    if array.ndim != 1 or (batch_size is not None and len(array) != batch_size):
        expected = "(B,)" if batch_size is None else f"(B,) = ({batch_size},)"
        raise Refusal(name, f"have shape {expected}", {f"{name}.shape": array.shape})
    if isinstance(array, Tracer):  # values are not known under jit
        return
    array = np.asarray(array).astype(np.int64)  # a narrow dtype cannot hold every maximum
    if bool(((array < 0) | (array > maximum)).any()):
        raise Refusal(name, f"lie in 0..{maximum}", {name: array.tolist()})
