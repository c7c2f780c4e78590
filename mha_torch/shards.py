"""What a process has of a layer whose heads, or whose weights, are divided over several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mha_spec import AttentionSpec, Refusal

PLACES = "_places"
"""Marks a hook that only brings tensors to where a weight is: to multiply by that part of the weight is the same."""


_PLAIN = (Tensor, nn.Parameter)


def is_distributed(x: object) -> bool:
    """Whether x is a DTensor, of which each process has a part."""
    return type(x) not in _PLAIN and hasattr(type(x), "to_local")  # of the type, which a compiler asks, too


def own_part(x: Tensor) -> Tensor:
    """What this process has of a distributed tensor; any other as it is."""
    if type(x) is Tensor:
        return x
    distributed: Any = x
    return distributed.to_local() if is_distributed(x) else x


def own_weight(weight: Tensor) -> Tensor:
    """What this process has of a distributed weight; any other as it is.

    Of one that all have each uses it for its own heads, and its gradient is the sum of theirs.
    """
    if not is_distributed(weight):
        return weight
    from torch.distributed.tensor import Partial  # not imported where nothing is distributed

    distributed: Any = weight
    placements = [Partial() if placement.is_replicate() else placement for placement in distributed.placements]
    return distributed.to_local(grad_placements=placements)


@dataclass(frozen=True)
class Width:
    """What a process has of the width of all heads that a norm is over.

    Attributes:
        mesh: the processes.
        heads: the heads of this one, by their numbers in the whole layer; one may be there twice.
        counted: of these, by their places, those that no process before it has, each once.
        num_heads: how many there are in the whole layer.
    """

    mesh: Any
    heads: list[int]
    counted: list[int]
    num_heads: int

    def own(self, weight: Tensor) -> Tensor:
        """The features of the process's heads of a distributed weight (width,)."""
        if not is_distributed(weight):
            raise Refusal("a norm over the width", "be divided with its layer by mha_torch.parallel.plan", "not")
        own = own_weight(weight)
        if self.num_heads % self.mesh.size() == 0:
            return own
        return own.unflatten(0, (self.num_heads, -1))[self.heads].flatten()  # whole, so that it can be trained

    def mean(self, x: Tensor) -> Tensor:
        """The mean of features (…, own width) over the width of all heads, (…, 1)."""
        features = x.shape[-1] // len(self.heads)
        if len(self.counted) < len(self.heads):
            x = x.unflatten(-1, (len(self.heads), features))[..., self.counted, :].flatten(-2)
        return _Summed.apply(x.sum(dim=-1, keepdim=True), self.mesh) / (self.num_heads * features)

    def raised_by_any(self, flags: Tensor) -> Tensor:
        """Flags of tokens, raised where any process raises them."""
        from torch.distributed.tensor import Partial

        return _raised(flags, self.mesh, [Partial("max")])


class _Summed(torch.autograd.Function):
    """The sum of what processes have, on each of them; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Any) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial

        ctx.mesh = mesh
        return DTensor.from_local(x, mesh, [Partial()]).full_tensor()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Summed.apply(grads[0], ctx.mesh), None


def width_of(project: Callable[[str, Tensor], Tensor], name: str) -> Width | None:
    """How the width of a norm is divided, of a layer that projects; None of all else."""
    return getattr(getattr(getattr(project, "__self__", None), name, None), "width", None)


def out_weight_of(project: Callable[[str, Tensor], Tensor]) -> Tensor | None:
    """The weight of the `out_proj` of a layer that projects; None of a function, whose weights are not distributed."""
    return getattr(getattr(getattr(project, "__self__", None), "out_proj", None), "weight", None)


def raised_by_any(flags: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    """Flags of tokens, where a process has some features of x and columns of a distributed weight, of all of these.

    Args:
        flags: those of this process.
        x: what the weight is applied to, (…, features).
        weight: (out, in), or None.
    """
    if weight is None or not is_distributed(weight) or x.shape[-1] == weight.shape[1]:
        return flags
    from torch.distributed.tensor import Partial, Replicate

    distributed: Any = weight
    placements = [Partial("max") if held.is_shard(1) else Replicate() for held in distributed.placements]
    return _raised(flags, distributed.device_mesh, placements)


def _raised(flags: Tensor, mesh: Any, placements: list[Any]) -> Tensor:
    """Flags, joined over the dimensions of a mesh that are `Partial`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(flags.to(torch.uint8), mesh, placements).full_tensor() > 0


def beside(x: Tensor, other: Tensor) -> Tensor:
    """x, which all processes have, as one that goes together with another tensor, distributed or not."""
    if not is_distributed(other):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    distributed: Any = other
    return DTensor.from_local(x, distributed.device_mesh, [Replicate()] * distributed.device_mesh.ndim)


def set_whole(x: Tensor, whole: Tensor) -> None:
    """Give each process its part of a distributed tensor, as the first process has the whole of it."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = x.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    x.copy_(DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=not whole.is_meta))


def spec_of_heads(spec: AttentionSpec, num_heads: int) -> AttentionSpec:
    """What is computed of a layer with so many of its query heads, and the key/value heads that these see."""
    return spec if num_heads == spec.num_heads else _spec_of_heads(spec, num_heads)


@cache
def _spec_of_heads(spec: AttentionSpec, num_heads: int) -> AttentionSpec:
    num_kv_heads = max(spec.num_kv_heads * num_heads // spec.num_heads, 1)
    return replace(spec, num_heads=num_heads, num_kv_heads=num_kv_heads)


# ---- What is refused -------------------------------------------------------------------------------------------------


def check_features(name: str, x: Tensor, of_head: int, num_heads: int) -> None:
    """Refuse what a projection gives if it is not of as many heads as the queries."""
    if x.shape[-1] != of_head * num_heads:
        raise Refusal(
            name, f"give the {num_heads} heads of the queries, {of_head} features each", f"{x.shape[-1]} features"
        )


def check_whole_heads(spec: AttentionSpec, q: Tensor) -> None:
    """Refuse queries (B, T, N * H) that are neither all heads of a layer nor some that can be computed alone."""
    if q.shape[-1] == spec.q_width:
        return
    if q.shape[-1] % spec.head_dim or q.shape[-1] > spec.q_width:
        raise Refusal(
            "q_proj",
            f"give whole heads of {spec.head_dim} features",
            f"{q.shape[-1]} features and num_heads={spec.num_heads}",
        )
    got = f"got {q.shape[-1] // spec.head_dim} of {spec.num_heads} heads"
    if spec.alibi is not None:
        raise Refusal("alibi", f"be divided by mha_torch.parallel.plan, for each head has its slope, {got}")
    for name in spec.wide_norms:
        raise Refusal(name, f"be divided by mha_torch.parallel.plan, for its mean square is that of all heads, {got}")


def check_heads_together(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse projections (B, T, features) of query heads and of other key/value heads than these see."""
    if (q.shape[-1], k.shape[-1], v.shape[-1]) == (spec.q_width, spec.k_width, spec.v_width):
        return
    check_whole_heads(spec, q)
    num_heads = q.shape[-1] // spec.head_dim
    own = spec_of_heads(spec, num_heads)
    are_whole = spec.num_kv_heads == 1 or spec.num_kv_heads * num_heads % spec.num_heads == 0
    if not are_whole or (k.shape[-1], v.shape[-1]) != (own.k_width, own.v_width):
        raise Refusal(
            "k_proj and v_proj",
            f"give the heads that those of q_proj see, of {spec.num_kv_heads} for {spec.num_heads}",
            f"widths {k.shape[-1]} and {v.shape[-1]} with {num_heads} query heads",
        )
    if spec.num_kv_heads == 1:
        check_shared(spec, q, k)


def check_shared(spec: AttentionSpec, q: Tensor, shared: Tensor) -> None:
    """Refuse some of the heads (B, T, N * H) and keys that all share, whose gradient would be of these heads alone."""
    if q.shape[-1] != spec.q_width and shared.requires_grad:
        raise Refusal(
            "keys that heads share",
            "be distributed by mha_torch.parallel.plan to have a gradient",
            f"{q.shape[-1] // spec.head_dim} of {spec.num_heads} heads",
        )


def check_normed_heads(name: str, norm: nn.Module, x: Tensor, spec: AttentionSpec) -> None:
    """Refuse a norm that a process would train by some heads (B, heads, T, H) alone, and share with other processes."""
    num_heads = spec.num_heads if name == "q_norm" else spec.num_kv_heads
    if x.shape[1] == num_heads or not torch.is_grad_enabled():
        return
    if any(held.requires_grad and not is_distributed(held) for held in norm.parameters()):
        raise Refusal(
            name, "be distributed by mha_torch.parallel.plan to have a gradient", f"{x.shape[1]} of {num_heads} heads"
        )
