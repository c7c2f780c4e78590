"""`torch.nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mha_spec import AttentionSpec, InputError
from parity.measure.core.arrays import to_torch
from parity.measure.core.weights import Weights
from parity.port.foreign.adapter import Adapter


class TorchMultiheadAttention(Adapter):
    """`torch.nn.MultiheadAttention`, in either axis order; new modules have the batch first."""

    name = "torch.nn.MultiheadAttention"
    layout = "torch.nn.MultiheadAttention"
    mask_true = "hides"

    def make(self, spec: AttentionSpec, dtype: str = "float32", **options: Any) -> Any:
        self.check_can_be(spec)
        arguments: dict[str, Any] = {
            "kdim": spec.d_kv,
            "vdim": spec.d_kv,
            "bias": spec.qkv_bias,
            "dropout": spec.dropout,
            "batch_first": True,
            "dtype": getattr(torch, dtype),
        }
        return torch.nn.MultiheadAttention(spec.d_model, spec.num_heads, **(arguments | options))

    def tensors(self, module: Any) -> Mapping[str, Any]:
        return module.state_dict()

    def write(self, module: Any, tensors: Weights) -> Any:
        with torch.no_grad():
            for name, parameter in module.state_dict().items():
                parameter.copy_(to_torch(tensors[name]))
        return module

    def open_fields(self, module: Any) -> dict[str, Any]:
        if module.kdim != module.vdim:
            raise InputError(
                "module", "have kdim equal to vdim", kdim=module.kdim, vdim=module.vdim
            )
        if module.bias_k is not None or module.add_zero_attn:
            raise InputError(
                "module",
                "have neither add_bias_kv nor add_zero_attn",
                add_bias_kv=module.bias_k is not None,
                add_zero_attn=module.add_zero_attn,
            )
        return {"num_heads": module.num_heads, "dropout": module.dropout}

    def call(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        *,
        mask: Any = None,
        padding: Any = None,
        is_causal: bool = False,
        need_weights: bool = False,
        train: bool = False,
    ) -> tuple[Any, Any]:
        """Call the layer as `Adapter.call` does.

        `padding` is (B, S), and `is_causal` requires the mask, of which it is only a hint. The
        module stays in the mode of the call.
        """
        if not module.batch_first:
            query, key, value = (x.swapaxes(0, 1) for x in (query, key, value))
        if mask is not None:
            batch = key.shape[0] if module.batch_first else key.shape[1]
            mask = mask.expand(batch, module.num_heads, *mask.shape[-2:]).flatten(0, 1)
        output, attn_weights = module.train(train)(
            query,
            key,
            value,
            attn_mask=mask,
            key_padding_mask=padding,
            is_causal=is_causal,
            need_weights=need_weights,
            average_attn_weights=False,
        )
        if not module.batch_first:
            output = output.swapaxes(0, 1)
        return output, attn_weights


ADAPTERS = [TorchMultiheadAttention()]
