"""`flax.nnx.MultiHeadAttention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mha_spec import AttentionSpec
from parity.measure.core.arrays import to_jax
from parity.measure.core.weights import Weights
from parity.measure.files.tensor_file import flatten
from parity.port.foreign.adapter import Adapter, reject_options


class NnxMultiHeadAttention(Adapter):
    """`flax.nnx.MultiHeadAttention`, with grouped heads."""

    name = "flax.nnx.MultiHeadAttention"
    layout = "flax.nnx"
    mask_true = "shows"

    def make(self, spec: AttentionSpec, dtype: str = "float32", **options: Any) -> Any:
        self.check_can_be(spec)
        arguments = {
            "num_kv_heads": None if spec.num_kv_heads == spec.num_heads else spec.num_kv_heads,
            "in_kv_features": spec.d_kv,
            "use_bias": spec.qkv_bias,
            "dropout_rate": spec.dropout,
            "dtype": jnp.dtype(dtype),
            "param_dtype": jnp.dtype(dtype),
            "decode": False,
            "rngs": nnx.Rngs(0),
        }
        return nnx.MultiHeadAttention(
            spec.num_heads, spec.d_in, spec.q_width, spec.d_model, **(arguments | options)
        )

    def tensors(self, module: Any) -> Mapping[str, Any]:
        return flatten(nnx.to_pure_dict(nnx.state(module, nnx.Param)))

    def write(self, module: Any, tensors: Weights) -> Any:
        for name, tensor in tensors.items():
            layer, _, leaf = name.partition(".")
            getattr(getattr(module, layer), leaf)[...] = to_jax(tensor)
        return module

    def open_fields(self, module: Any) -> dict[str, Any]:
        reject_options({"normalize_qk": module.normalize_qk}, self.name)
        return {"num_heads": module.num_heads, "dropout": module.dropout_rate}

    def call(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        *,
        mask: Any = None,
        is_causal: bool = False,
        need_weights: bool = False,
        train: bool = False,
    ) -> tuple[Any, Any]:
        """Call the layer as `Adapter.call` does; the module's state does not change."""
        module = nnx.clone(module)
        if mask is not None:
            mask = jnp.broadcast_to(mask, (query.shape[0], module.num_heads, *mask.shape[-2:]))
        output = module(
            query,
            key,
            value,
            mask=mask,
            is_causal=is_causal,
            sow_weights=need_weights,
            deterministic=not train,
            rngs=nnx.Rngs(dropout=0),
        )
        if not need_weights:
            return output, None
        return output, jax.tree.leaves(nnx.pop(module, nnx.Intermediate))[0]


ADAPTERS = [NnxMultiHeadAttention()]
