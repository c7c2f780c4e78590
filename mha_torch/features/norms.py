"""Norms of queries, keys, values and context, over the features of a head or the width of all
heads.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mha_spec import Norm
from mha_torch.arrays import at_least_float32
from mha_torch.checks import check_normed


def apply_norm(
    x: Float[Tensor, "*tokens H"],
    norm: Norm,
    weight: Float[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "*tokens H"]:
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
    return apply_norm_by_mean(x, norm, weight, bias, _mean)


def _mean(x: Tensor) -> Tensor:
    return x.mean(dim=-1, keepdim=True)


def apply_norm_by_mean(
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Callable[[Tensor], Tensor],
) -> Tensor:
    """Apply a norm with the caller's mean (…, 1), which may be over more features than x has."""
    check_normed(x, norm, weight, bias)
    wide = at_least_float32(x)
    if norm.kind == "layer":
        wide = wide - mean(wide)
    normed = wide * torch.rsqrt(mean(wide.square()) + norm.eps)
    if weight is not None:
        weight = _along(weight, norm)
        if norm.weight == "1+w":
            weight = 1.0 + weight
        normed = normed * weight
    if bias is not None:
        normed = normed + _along(bias, norm)
    return normed.to(x.dtype)


def _along(parameter: Tensor, norm: Norm) -> Tensor:
    """Return a parameter in at least float32, reshaped to broadcast."""
    if norm.per_head:
        return at_least_float32(parameter).unsqueeze(-2)
    return at_least_float32(parameter)


class NormLayer(nn.Module):
    """Parameters of a norm. Initially the factor is 1 and the bias 0."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        norm: Norm,
        shapes: dict[str, tuple[int, ...]],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = norm
        for name in ("weight", "bias"):
            parameter = None
            if name in shapes:
                parameter = nn.Parameter(torch.empty(shapes[name], device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the factor to 1 and the bias to 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, self.norm.initial_weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*tokens H"]) -> Float[Tensor, "*tokens H"]:
        """Return x, normalized."""
        return apply_norm(x, self.norm, self.weight, self.bias)
