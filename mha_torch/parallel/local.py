"""Local parts of a layer whose heads are divided over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from mha_spec import InputError
from mha_torch.arrays import is_distributed
from mha_torch.features.norms import NormLayer, apply_norm, apply_norm_by_mean

PLACES = "_places"
"""Marks a hook that only moves tensors to a weight: multiplying by the local weight directly is
equivalent.
"""


def local_weight(weight: Tensor) -> Tensor:
    """Return the local part of a distributed weight; other weights are returned unchanged.

    A replicated weight gets a `Partial` gradient: each rank contributes the share of its heads.
    """
    if not is_distributed(weight):
        return weight
    distributed: Any = weight
    placements = []
    for placement in distributed.placements:
        if placement.is_replicate():
            placement = Partial()
        placements.append(placement)
    return distributed.to_local(grad_placements=placements)


def copy_from_full(x: Tensor, full: Tensor) -> None:
    """Distribute the first rank's copy of a whole tensor."""
    mesh = x.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    x.copy_(DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=not full.is_meta))


@dataclass(frozen=True)
class WidthShard:
    """Local part of the width of all heads, for a norm.

    Attributes:
        mesh: device mesh.
        heads: local heads, by their indices in the whole layer; may repeat.
        counted: positions among these of the heads that no earlier rank has, each once.
        num_heads: number of heads of the whole layer.
    """

    mesh: DeviceMesh
    heads: list[int]
    counted: list[int]
    num_heads: int

    def local(self, weight: Float[Tensor, " width"]) -> Float[Tensor, " width"]:
        """Return the features of local heads of a distributed weight."""
        if not is_distributed(weight):
            raise InputError(
                "a norm over the width",
                "be divided with its layer by mha_torch.parallel.plan",
                "not",
            )
        own = local_weight(weight)
        if self.num_heads % self.mesh.size() == 0:
            return own
        # Whole, so that it can be trained.
        return own.unflatten(0, (self.num_heads, -1))[self.heads].flatten()

    def mean(self, x: Float[Tensor, "*tokens width"]) -> Float[Tensor, "*tokens 1"]:
        """Return the mean over the width of all heads."""
        features = x.shape[-1] // len(self.heads)
        if len(self.counted) < len(self.heads):
            x = x.unflatten(-1, (len(self.heads), features))[..., self.counted, :].flatten(-2)
        return _Sum.apply(x.sum(dim=-1, keepdim=True), self.mesh) / (self.num_heads * features)


class _Sum(torch.autograd.Function):
    """All-reduce whose gradient is also all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return DTensor.from_local(x, mesh, [Partial()]).full_tensor()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Sum.apply(grads[0], ctx.mesh), None


class ShardedNorm(NormLayer):
    """Norm of local heads.

    Attributes:
        width: local part of the width, or None for a norm over each head.
    """

    width: WidthShard | None = None

    def forward(self, x: Float[Tensor, "*tokens H"]) -> Float[Tensor, "*tokens H"]:
        """Return x, normalized."""
        if self.width is None:
            local = local_weight
        else:
            local = self.width.local
        weight = bias = None
        if self.weight is not None:
            weight = local(self.weight)
        if self.bias is not None:
            bias = local(self.bias)
        if self.width is None:
            return apply_norm(x, self.norm, weight, bias)
        return apply_norm_by_mean(x, self.norm, weight, bias, self.width.mean)
