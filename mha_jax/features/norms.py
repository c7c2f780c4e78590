"""Norms of queries, keys, values and context, over the features of a head or the width of all
heads.
"""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Float

from mha_jax.arrays import Array, at_least_float32, cast
from mha_jax.checks import check_normed
from mha_jax.compiled import compiled
from mha_spec import Norm


def apply_norm(
    x: Float[Array, "*tokens H"],
    norm: Norm,
    weight: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
) -> Float[Array, "*tokens H"]:
    """Return x / sqrt(mean(x²) + eps) * weight + bias; a layer norm first subtracts the mean.

    Args:
        x: heads (B, heads, T, H), or projected tokens (B, T, width); normalized over the last axis
            in at least float32.
        norm: kind and options; the factor may be 1 + weight.
        weight, bias: only if the norm has them: (H,), (heads, H) if each head has its own, or
            (width,).

    Returns:
        Normalized features, in the shape and dtype of x.

    Raises:
        TypeError: if x is not floating point, or norm is not a `Norm`.
        ValueError: if a weight or bias is missing, unexpected or has the wrong shape.

    Source: RMSNorm, arXiv:1910.07467, equation 4; LayerNorm, arXiv:1607.06450, equation 4.
    """
    check_normed(x, norm, weight, bias)
    return _apply_norm(x, weight, bias, norm)


@compiled("norm")
def _apply_norm(x: Array, weight: Array | None, bias: Array | None, norm: Norm) -> Array:
    wide = at_least_float32(x)
    if norm.kind == "layer":
        wide = wide - wide.mean(axis=-1, keepdims=True)
    normed = wide * lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + norm.eps)
    if weight is not None:
        weight = _along(weight, norm, x.ndim)
        if norm.weight == "1+w":
            weight = 1.0 + weight
        normed = normed * weight
    if bias is not None:
        normed = normed + _along(bias, norm, x.ndim)
    return normed.astype(x.dtype)


def _along(parameter: Array, norm: Norm, rank: int) -> Array:
    """Return a parameter in at least float32, reshaped to broadcast."""
    parameter = at_least_float32(parameter)
    if norm.per_head:
        parameter = parameter[:, None]
    return jnp.expand_dims(parameter, tuple(range(rank - parameter.ndim)))


class NormLayer(nnx.Module):
    """Parameters of a norm. Initially the factor is 1 and the bias 0."""

    def __init__(
        self,
        norm: Norm,
        shapes: dict[str, tuple[int, ...]],
        *,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype,
    ) -> None:
        self.norm = norm
        self.dtype = dtype
        initial = {"weight": norm.initial_weight, "bias": 0.0}
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.full(shape, initial[name], param_dtype)))

    def __call__(self, x: Float[Array, "*tokens H"]) -> Float[Array, "*tokens H"]:
        """Return x, normalized."""
        parameters = (getattr(self, name, None) for name in ("weight", "bias"))
        arrays = [None if parameter is None else parameter[...] for parameter in parameters]
        return apply_norm(x, self.norm, *cast(arrays, self.dtype))
