"""Norms of queries, keys, values and context, over the features of a head or the width of all
heads.
"""

from __future__ import annotations

import numpy as np
import ttnn
from jaxtyping import Float
from ttnn import Tensor

from mha_spec import Norm
from mha_tt.arrays import as_dtype, at_least_float32
from mha_tt.checks import check_normed
from mha_tt.device import accurate_config, upload, zeros


def apply_norm(
    x: Float[Tensor, "*tokens H"],
    norm: Norm,
    weight: Float[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    *,
    feature_indices: np.ndarray | None = None,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "*tokens H"]:
    """Return x / sqrt(mean(x²) + eps) * weight + bias; a layer norm first subtracts the mean.

    Args:
        x: heads (B, heads, T, H), or projected tokens (B, T, width); normalized over the last axis
            in at least float32.
        norm: kind and options; the factor may be 1 + weight.
        weight, bias: only if the norm has them: (1, H), (1, heads, 1, H) if each head has its own,
            or (1, width).
        feature_indices: indices of the features on the last axis, if it is padded: see
            `mha_tt.feature_indices`.
        compute_kernel_config: arithmetic of the sums; default: `accurate_config`.

    Returns:
        Normalized features, in the shape and dtype of x.

    Raises:
        TypeError: if x is not floating point, or norm is not a `Norm`.
        ValueError: if a weight or bias is missing, unexpected or has the wrong shape.

    Source: RMSNorm, arXiv:1910.07467, equation 4; LayerNorm, arXiv:1607.06450, equation 4.
    """
    check_normed(x, norm, weight, bias)
    if 0 in tuple(x.shape):
        return zeros(tuple(x.shape), x.dtype, x.device())
    config = compute_kernel_config or accurate_config(x.device())
    width = x.shape[-1]
    if feature_indices is None:
        count = width
    else:
        count = len(feature_indices)

    def mean(wide: Tensor) -> Tensor:
        total = ttnn.sum(wide, dim=-1, keepdim=True, compute_kernel_config=config)
        return ttnn.multiply(total, 1.0 / count)

    wide = at_least_float32(x)
    if norm.kind == "layer":
        wide = ttnn.subtract(wide, mean(wide))
        # The mean was also subtracted from the padding, which must be 0 again.
        if feature_indices is not None and count < width:
            is_feature = np.isin(np.arange(width), feature_indices)[(None,) * (len(x.shape) - 1)]
            wide = ttnn.multiply(wide, upload(is_feature, device=x.device(), dtype=ttnn.float32))
    normed = ttnn.multiply(wide, ttnn.rsqrt(ttnn.add(mean(ttnn.square(wide)), norm.eps)))
    if weight is not None:
        weight = at_least_float32(weight)
        if norm.weight == "1+w":
            weight = ttnn.add(weight, 1.0)
        normed = ttnn.multiply(normed, weight)
    if bias is not None:
        normed = ttnn.add(normed, at_least_float32(bias))
    return as_dtype(normed, x.dtype)
