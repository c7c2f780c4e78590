"""Weights from outside, in the container that the functions take: the projections made of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from mha_jax.norms import apply_norm
from mha_jax.parallel.sharding import is_explicit, placed, spec_of
from mha_jax.rope import at_least_float32
from mha_spec import AttentionSpec, Refusal, WrongType
from mha_spec.attention import check_spec

Project = Callable[[str, Array], Array]
"""Applies the projection of that name (`q_proj`, `k_proj`, `v_proj` or `qkv_proj`, `out_proj`, `gate_proj`) to an
input, or the norm (`q_norm`, `k_norm`, `v_norm`) to what was projected."""


def project_with(weights: Mapping[str, Any], spec: AttentionSpec | None = None) -> Project:
    """Projections whose weights lie in the container that `multi_head_attention` takes, and the norms of a spec."""
    norms = {} if spec is None else spec.norms

    def project(name: str, x: Array) -> Array:
        if name in norms:
            leaves = weights.get(name, {})  # a norm may have no parameters
            return apply_norm(x, norms[name], leaves.get("weight"), leaves.get("bias"))
        leaves = weights[name]
        check_projected(name, x, leaves["kernel"])
        return linear(x, leaves["kernel"], leaves.get("bias"))

    return project


def linear(x: Array, kernel: Array, bias: Array | None) -> Array:
    """x @ kernel + bias, in the dtype of x."""
    # The sum stays in float32 until the bias is added: its gradient is then summed in float32 too.
    kernel, placement = _placed(x, kernel)
    projected = jnp.einsum(
        "bti,io->bto", x, kernel, preferred_element_type=at_least_float32(x).dtype, out_sharding=placement
    )
    projected = projected if bias is None else projected + at_least_float32(bias)[None, None]
    return projected.astype(x.dtype)


def _placed(x: Array, kernel: Array) -> tuple[Array, NamedSharding | None]:
    """The kernel, and where its product with x is to lie, if types say how the two are divided."""
    if not is_explicit(x) or not is_explicit(kernel):
        return kernel, None
    (*of_tokens, features), (rows, columns) = spec_of(x), spec_of(kernel)
    if rows is not None and rows != features:  # divided so that less is kept, not so that less is done
        kernel = jax.sharding.reshard(kernel, placed(kernel, PartitionSpec(None, columns)))
    is_taken = columns in of_tokens
    return kernel, placed(x, PartitionSpec(*of_tokens, None if is_taken else columns))


# ---- What is refused -------------------------------------------------------------------------------------------------


def check_weights(weights: Mapping[str, Any], spec: AttentionSpec) -> None:
    """Refuse weights that are not exactly those of the layer, by name and shape."""
    check_spec(spec)
    if not isinstance(weights, Mapping):
        raise WrongType("weights", "be a mapping of projections to their arrays", type(weights).__name__)
    whole = {name for name in spec.parameters if "." not in name}
    flat = sorted(name for name, leaves in weights.items() if name not in whole and not isinstance(leaves, Mapping))
    if flat:
        raise WrongType("weights", "map each projection to its kernel and bias", f"arrays for {flat}")
    held = {name: array for name, array in weights.items() if name in whole}
    held |= {f"{name}.{leaf}": weights[name][leaf] for name in weights if name not in whole for leaf in weights[name]}
    shapes = {
        name.replace("proj.weight", "proj.kernel"): shape if name in spec.parameters else shape[::-1]
        for name, shape in spec.held_shapes.items()
    }
    missing, unexpected = sorted(shapes.keys() - held.keys()), sorted(held.keys() - shapes.keys())
    if missing or unexpected:
        raise Refusal("weights", "have exactly the names of the spec", missing=missing, unexpected=unexpected)
    first = next(iter(shapes))
    for name, shape in shapes.items():
        array = held[name]
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise WrongType(name, "be floating point", {f"{name}.dtype": array.dtype})
        if array.dtype != held[first].dtype:
            raise WrongType(name, f"have the dtype of {first}", f"{array.dtype} and {held[first].dtype}")
        if array.shape != shape:
            raise Refusal(name, f"have shape {shape}", {f"{name}.shape": array.shape})
    check_finite(held)


def check_finite(weights: Mapping[str, Array]) -> None:
    """Refuse weights with a NaN or an infinity, wherever their values are known."""
    known = {name: array for name, array in weights.items() if not isinstance(array, Tracer)}
    with jax.ensure_compile_time_eval():  # weights may be known where inputs are not: closed over under jit
        wrong = [name for name, is_finite in _are_finite(known).items() if not is_finite]
    if wrong:
        raise Refusal("weights", "be finite", f"NaN or infinities in {wrong}")


@jax.jit
def _are_finite(arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: jnp.isfinite(array).all() for name, array in arrays.items()}


def check_projected(name: str, x: Array, kernel: Array) -> None:
    """Refuse an input whose width or dtype is not that of the projection it goes into."""
    if x.shape[-1] != kernel.shape[0]:
        raise Refusal(f"the input of {name}", f"have {kernel.shape[0]} features", shape=x.shape)
    if x.dtype != kernel.dtype:
        raise WrongType(
            f"the input of {name}", "have the dtype of its kernel", {"x.dtype": x.dtype, "kernel.dtype": kernel.dtype}
        )
