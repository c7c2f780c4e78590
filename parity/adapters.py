"""Live attention modules of other libraries: canonical weights into them, and out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.layouts import LAYOUTS, from_canonical, to_canonical
from parity.spec import AttentionSpec
from parity.weights import Weights


@dataclass(frozen=True)
class Adapter:
    """How a library's module gives and takes its weights.

    Attributes:
        layout: of its weights by name.
        spec: the layer that a module is.
        read: its weights by name.
        write: puts weights, which fit, in the place of its own.
    """

    layout: str
    spec: Callable[[Any], AttentionSpec]
    read: Callable[[Any], Weights]
    write: Callable[[Any, Weights], None]

    def load_into(self, module: Any, weights: Mapping[str, np.ndarray]) -> Any:
        """Fill a module from canonical weights, or leave it as it was."""
        tensors = from_canonical(weights, self.spec(module), LAYOUTS[self.layout])
        own = self.read(module)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
        if shapes != wanted:
            different = sorted(name for name in {*shapes, *wanted} if shapes.get(name) != wanted.get(name))
            raise TypeError(f"weights must have the names, shapes and dtypes of the module, others are {different}")
        self.write(module, tensors)
        return module

    def weights_of(self, module: Any) -> Weights:
        """The canonical weights of a module."""
        spec = self.spec(module)
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
    if module.kdim != module.vdim or module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            f"module must have kdim equal to vdim and neither add_bias_kv nor add_zero_attn, "
            f"got kdim={module.kdim}, vdim={module.vdim}"
        )
    return AttentionSpec(
        module.embed_dim,
        module.num_heads,
        d_kv=module.kdim,
        qkv_bias=module.in_proj_bias is not None,
        out_bias=module.out_proj.bias is not None,
    )


def _torch_read(module: Any) -> Weights:
    from parity.backends.torch import to_numpy

    return {name: to_numpy(tensor) for name, tensor in module.state_dict().items()}


def _torch_write(module: Any, tensors: Weights) -> None:
    import torch

    from parity.backends.torch import from_numpy

    with torch.no_grad():
        for name, parameter in module.state_dict().items():
            parameter.copy_(from_numpy(tensors[name]))


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

    state = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    return {f"{layer}.{leaf}": np.asarray(array) for layer, leaves in state.items() for leaf, array in leaves.items()}


def _nnx_write(module: Any, tensors: Weights) -> None:
    import jax.numpy as jnp

    for name, tensor in tensors.items():
        layer, _, leaf = name.partition(".")
        getattr(getattr(module, layer), leaf)[...] = jnp.asarray(tensor)


ADAPTERS = {
    "torch.MultiheadAttention": Adapter("torch.nn.MultiheadAttention", _torch_spec, _torch_read, _torch_write),
    "flax.MultiHeadAttention": Adapter("flax.nnx", _nnx_spec, _nnx_read, _nnx_write),
}
"""By the library and the name of the class."""
