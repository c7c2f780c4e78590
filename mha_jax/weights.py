"""Functional weights, and projections that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mha_jax.arrays import Array, at_least_float32, lies_on_mesh
from mha_jax.checks import check_projected
from mha_jax.features.norms import apply_norm
from mha_jax.sharding import is_explicit, sharding_on_mesh_of, spec_of
from mha_spec import AttentionSpec

Project = Callable[[str, Array], Array]
"""Applies a projection or a norm by its name in `AttentionSpec.projections` or
`AttentionSpec.norms`, such as `q_proj` or `k_norm`, to its input.
"""


def project_with(weights: Mapping[str, Any], spec: AttentionSpec | None = None) -> Project:
    """Return a function that applies projections and norms, with weights as in
    `multi_head_attention`.
    """
    if spec is None:
        norms = {}
    else:
        norms = spec.norms

    def project(name: str, x: Array) -> Array:
        if name in norms:
            leaves = weights.get(name, {})  # norms may have no parameters
            return apply_norm(x, norms[name], leaves.get("weight"), leaves.get("bias"))
        leaves = weights[name]
        check_projected(name, x, leaves["kernel"])
        return linear(x, leaves["kernel"], leaves.get("bias"))

    return project


def linear(x: Array, kernel: Array, bias: Array | None) -> Array:
    """Return x @ kernel + bias, in the dtype of x."""
    # The sum stays in float32 until the bias is added, so that the gradient is also accumulated in
    # float32.
    placement = None
    if lies_on_mesh(x):
        kernel, placement = _placed(x, kernel)
    projected = jnp.einsum(
        "bti,io->bto",
        x,
        kernel,
        preferred_element_type=at_least_float32(x).dtype,
        out_sharding=placement,
    )
    if bias is not None:
        projected = projected + at_least_float32(bias)[None, None]
    return projected.astype(x.dtype)


def _placed(x: Array, kernel: Array) -> tuple[Array, NamedSharding | None]:
    """Return the kernel and the sharding of its product with x, if types contain their
    shardings.
    """
    if not is_explicit(x) or not is_explicit(kernel):
        return kernel, None
    (*of_tokens, features), (rows, columns) = spec_of(x), spec_of(kernel)
    if rows is not None and rows != features:  # divided to save memory, not work
        gathered = sharding_on_mesh_of(kernel, PartitionSpec(None, columns))
        kernel = jax.sharding.reshard(kernel, gathered)
    if columns in of_tokens:
        columns = None
    return kernel, sharding_on_mesh_of(x, PartitionSpec(*of_tokens, columns))
