"""The module of a norm that PyTorch lacks: of queries and keys, of values or of the context."""

import torch
from torch import Tensor, nn

from parity.explain.writing.subject import EPS, norm


class OwnNorm(nn.Module):
    """Norm of the last axis."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        if norm.weight == "1+w":
            self.weight = nn.Parameter(torch.zeros(shape))
        else:
            self.weight = nn.Parameter(torch.ones(shape))
        if norm.bias:
            self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, features: Tensor) -> Tensor:
        """Normalize the last axis."""
        wide = features.float()
        if norm.kind == "layer":
            wide = wide - wide.mean(dim=-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
        weight = self.weight.float()
        if norm.per_head:
            weight = weight[:, None]  # (heads, 1, H)
        if norm.weight == "1+w":
            weight = 1.0 + weight
        wide = wide * weight
        if norm.bias:
            bias = self.bias.float()
            if norm.per_head:
                bias = bias[:, None]
            wide = wide + bias
        return wide.to(features.dtype)
