"""Weights from outside, in the container that the functions take: the projections made of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mha_spec import AttentionSpec, Refusal, WrongType
from mha_spec.attention import check_spec
from mha_torch.arrays import check_array, check_device, is_autocast_on, is_distributed, values_of
from mha_torch.norms import apply_norm

Project = Callable[[str, Tensor], Tensor]
"""Applies the projection of that name (`q_proj`, `k_proj`, `v_proj` or `qkv_proj`, `out_proj`, `gate_proj`) to an
input, or the norm (`q_norm`, `k_norm`, `v_norm`) to what was projected."""


def project_with(weights: Mapping[str, Tensor], spec: AttentionSpec | None = None) -> Project:
    """Projections whose weights lie in the container that `multi_head_attention` takes, and the norms of a spec."""
    norms = {} if spec is None else spec.norms

    def project(name: str, x: Tensor) -> Tensor:
        if name in norms:
            return apply_norm(x, norms[name], weights.get(f"{name}.weight"), weights.get(f"{name}.bias"))
        weight = weights[f"{name}.weight"]
        check_projected(name, x, weight)
        return F.linear(x, weight, weights.get(f"{name}.bias"))

    return project


# ---- What is refused -------------------------------------------------------------------------------------------------


def check_weights(weights: Mapping[str, Tensor], spec: AttentionSpec) -> None:
    """Refuse weights that are not exactly those of the layer, by name and shape."""
    check_spec(spec)
    if not isinstance(weights, Mapping):
        raise WrongType("weights", "be a mapping of names to tensors", type(weights).__name__)
    shapes = spec.held_shapes
    missing, unexpected = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    if missing or unexpected:
        raise Refusal("weights", "have exactly the names of the spec", missing=missing, unexpected=unexpected)
    first = next(iter(shapes))
    for name, shape in shapes.items():
        weight = weights[name]
        check_array(name, weight)
        if is_distributed(weight):
            raise WrongType(
                name,
                "be a tensor of this process, with the specification of what it has (parity.shard)",
                type(weight).__name__,
                hint="the modules take distributed weights",
            )
        if not weight.is_floating_point():
            raise WrongType(name, "be floating point", {f"{name}.dtype": weight.dtype})
        if weight.dtype != weights[first].dtype:
            raise WrongType(name, f"have the dtype of {first}", f"{weight.dtype} and {weights[first].dtype}")
        check_device(name, weight, weights[first].device, first)
        if tuple(weight.shape) != shape:
            raise Refusal(name, f"have shape {shape}", {f"{name}.shape": tuple(weight.shape)})
    check_finite(weights)


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Refuse weights with a NaN or an infinity, wherever their values are known."""
    if torch.compiler.is_compiling():  # the question itself would be a part of the graph
        return
    are_finite = values_of(torch.stack([torch.isfinite(weight).all() for weight in weights.values()]))
    if are_finite is None:
        return
    wrong = [name for name, is_finite in zip(weights, are_finite, strict=True) if not is_finite]
    if wrong:
        raise Refusal("weights", "be finite", f"NaN or infinities in {wrong}")


def check_projected(name: str, x: Tensor, weight: Tensor) -> None:
    """Refuse an input whose width or dtype is not that of the projection it goes into.

    What a distributed weight is when it is used its engine knows: of which part, in which dtype, on which device.
    """
    if (x.shape[-1], x.dtype, x.device) == (weight.shape[1], weight.dtype, weight.device) or is_distributed(weight):
        return
    if x.shape[-1] != weight.shape[1]:
        raise Refusal(f"the input of {name}", f"have {weight.shape[1]} features", shape=tuple(x.shape))
    mixed = x.dtype != weight.dtype and weight.is_floating_point()
    if mixed and not is_autocast_on(x.device):
        raise WrongType(
            f"the input of {name}", "have the dtype of its weight", {"x.dtype": x.dtype, "weight.dtype": weight.dtype}
        )
    check_device(f"the input of {name}", x, weight.device, "its weight")
