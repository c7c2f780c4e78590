"""Attention layers of transformers, as released, with the weights of a specification."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mha_spec import AttentionSpec


def parameters_of(attention: torch.nn.Module, spec: AttentionSpec) -> dict[str, torch.Tensor]:
    """Its parameters by canonical names, (out, in) and (out,), as views to read and to fill."""
    modules, widths = dict(attention.named_children()), (spec.q_width, spec.kv_width, spec.kv_width)
    found = {}
    for leaf in ("weight", "bias"):
        if (packed := modules.get("query_key_value")) is not None:  # q, k, v of each head in turn
            parts = getattr(packed, leaf).unflatten(0, (spec.num_heads, 3, spec.head_dim)).unbind(1)
            found |= {f"{name}_proj.{leaf}": part for name, part in zip("qkv", parts, strict=True)}
        elif (packed := modules.get("qkv_proj")) is not None and getattr(packed, leaf) is not None:
            parts = getattr(packed, leaf).split(widths)
            found |= {f"{name}_proj.{leaf}": part for name, part in zip("qkv", parts, strict=True)}
        else:
            names = [f"{name}_proj" for name in "qkv" if f"{name}_proj" in modules]
            found |= {f"{name}.{leaf}": getattr(modules[name], leaf) for name in names}
        out = modules.get("o_proj", modules.get("dense"))
        found[f"out_proj.{leaf}"] = getattr(out, leaf)
    return {name: parameter for name, parameter in found.items() if parameter is not None}


def fill(attention: torch.nn.Module, spec: AttentionSpec, weights: dict[str, Any]) -> None:
    """Give it canonical weights."""
    found = parameters_of(attention, spec)
    assert found.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(torch.as_tensor(weights[name]).reshape(parameter.shape))


def gradients_of(attention: torch.nn.Module, spec: AttentionSpec) -> dict[str, torch.Tensor]:
    """The gradients of its parameters by canonical names."""
    values = {name: parameter.grad for name, parameter in attention.named_parameters() if parameter.grad is not None}
    copy = torch.nn.Module()
    for name, _ in attention.named_children():
        grads = {leaf: values.get(f"{name}.{leaf}") for leaf in ("weight", "bias")}
        holder = torch.nn.Module()
        for leaf, grad in grads.items():
            holder.register_buffer(leaf, grad)
        copy.add_module(name, holder)
    shapes = spec.weight_shapes
    return {name: grad.reshape(shapes[name]) for name, grad in parameters_of(copy, spec).items() if name in shapes}


def causal(length: int, past: int = 0) -> torch.Tensor:
    """The additive mask that released layers take, (1, 1, length, past + length)."""
    hidden = torch.ones(length, past + length, dtype=torch.bool).triu(past + 1)
    return torch.zeros(1, 1, length, past + length, dtype=torch.float64).masked_fill(hidden, -1e300)


def assert_near(found: Any, expected: Any, what: str, relative: float) -> None:
    """Nowhere further apart than a part of the largest number."""
    found, expected = torch.tensor(np.asarray(found)).double(), torch.as_tensor(expected).double()
    apart = (found.reshape(expected.shape) - expected).abs().max().item()
    assert apart <= relative * expected.abs().max().item(), f"{what}: {apart:.1e}"


Embed = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Cosines and sines of released layers, from an input and the positions of its tokens."""
