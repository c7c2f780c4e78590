"""Live attention modules of other libraries: canonical weights into them, and out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mha_spec import AttentionSpec
from parity.conversion.layouts import LAYOUTS, from_canonical, to_canonical
from parity.core.arrays import to_jax, to_numpy_by_name, to_torch
from parity.core.weights import Weights


@dataclass(frozen=True)
class Adapter:
    """How a library's module gives and takes its weights.

    Attributes:
        layout: of its weights by name.
        spec_of: the layer that a module is.
        read: its weights by name.
        write: puts weights, which fit, in the place of its own.
    """

    layout: str
    spec_of: Callable[[Any], AttentionSpec]
    read: Callable[[Any], Weights]
    write: Callable[[Any, Weights], None]

    def load_into(self, module: Any, weights: Mapping[str, Any]) -> Any:
        """Fill a module from canonical weights, or leave it as it was."""
        tensors = from_canonical(weights, self.spec_of(module), LAYOUTS[self.layout])
        own = self.read(module)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
        if shapes != wanted:
            name = min(name for name in {*shapes, *wanted} if shapes.get(name) != wanted.get(name))
            got, expected = (
                f"{found[name][1]}{list(found[name][0])}" if name in found else "none" for found in (shapes, wanted)
            )
            raise TypeError(f"{name} must have the shape and dtype of the module's, {expected}, got {got}")
        self.write(module, tensors)
        return module

    def weights_of(self, module: Any) -> Weights:
        """The canonical weights of a module."""
        spec = self.spec_of(module)
        heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
        weights, _ = to_canonical(self.read(module), LAYOUTS[self.layout], **heads)
        return weights


def adapter_of(module: Any) -> Adapter | None:
    """How to reach the weights of a module; None if it is of no kind known here."""
    for kind in type(module).__mro__:
        if adapter := ADAPTERS.get(f"{kind.__module__.split('.')[0]}.{kind.__qualname__}"):
            return adapter
    return None


# ---- torch.nn.MultiheadAttention -------------------------------------------------------------------------------------


def _torch_spec(module: Any) -> AttentionSpec:
    if module.kdim != module.vdim:
        raise ValueError(f"module must have kdim equal to vdim, got kdim={module.kdim} and vdim={module.vdim}")
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            f"module must have neither add_bias_kv nor add_zero_attn, "
            f"got add_bias_kv={module.bias_k is not None} and add_zero_attn={module.add_zero_attn}"
        )
    return AttentionSpec(
        module.embed_dim,
        module.num_heads,
        d_kv=module.kdim,
        qkv_bias=module.in_proj_bias is not None,
        out_bias=module.out_proj.bias is not None,
    )


def _torch_read(module: Any) -> Weights:
    return to_numpy_by_name(module.state_dict())


def _torch_write(module: Any, tensors: Weights) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in module.state_dict().items():
            parameter.copy_(to_torch(tensors[name]))


# ---- flax.nnx.MultiHeadAttention -------------------------------------------------------------------------------------


def _nnx_spec(module: Any) -> AttentionSpec:
    biases = _nnx_read(module)
    return AttentionSpec(
        module.out_features,
        module.num_heads,
        head_dim=module.head_dim,
        d_in=module.in_features,
        d_kv=module.in_kv_features,
        qkv_bias="query.bias" in biases,
        out_bias="out.bias" in biases,
    )


def _nnx_read(module: Any) -> Weights:
    from flax import nnx

    return to_numpy_by_name(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def _nnx_write(module: Any, tensors: Weights) -> None:
    for name, tensor in tensors.items():
        layer, _, leaf = name.partition(".")
        getattr(getattr(module, layer), leaf)[...] = to_jax(tensor)


ADAPTERS = {
    "torch.MultiheadAttention": Adapter("torch.nn.MultiheadAttention", _torch_spec, _torch_read, _torch_write),
    "flax.MultiHeadAttention": Adapter("flax.nnx", _nnx_spec, _nnx_read, _nnx_write),
}
"""By the library and the name of the class."""
