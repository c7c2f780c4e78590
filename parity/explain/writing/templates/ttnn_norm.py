"""The function that normalizes queries and keys, values, the context or latents: one for each."""

from collections.abc import Mapping

import ttnn

from parity.explain.writing.subject import EPS, norm


def normalize(
    weights: Mapping[str, ttnn.Tensor],
    name: str,
    features: ttnn.Tensor,
    config: ttnn.DeviceComputeKernelConfig,
) -> ttnn.Tensor:
    """Normalize the last axis."""
    wide = ttnn.typecast(features, ttnn.float32)
    if norm.kind == "layer":
        mean = ttnn.mean(wide, dim=-1, keepdim=True, compute_kernel_config=config)
        wide = ttnn.subtract(wide, mean)
    square = ttnn.mean(ttnn.square(wide), dim=-1, keepdim=True, compute_kernel_config=config)
    wide = ttnn.multiply(wide, ttnn.rsqrt(ttnn.add(square, EPS)))
    if norm.weight is not None:
        weight = ttnn.typecast(weights[f"{name}.weight"], ttnn.float32)
        if norm.weight == "1+w":
            weight = ttnn.add(weight, 1.0)
        if norm.per_head:
            weight = ttnn.reshape(weight, (1, features.shape[1], 1, features.shape[3]))
        wide = ttnn.multiply(wide, weight)
    if norm.bias:
        bias = ttnn.typecast(weights[f"{name}.bias"], ttnn.float32)
        if norm.per_head:
            bias = ttnn.reshape(bias, (1, features.shape[1], 1, features.shape[3]))
        wide = ttnn.add(wide, bias)
    return ttnn.typecast(wide, features.dtype)
