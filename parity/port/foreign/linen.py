"""`flax.linen.MultiHeadDotProductAttention`, and its alias `MultiHeadAttention`.

A linen module holds no weights, so the modules here are bound to theirs: `module.bind({"params":
params})`. Loading weights returns a new module, bound to them: `bound.variables["params"]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen
import flax.traverse_util
import jax
import jax.numpy as jnp

from mha_spec import AttentionSpec, InputError
from parity.measure.core.arrays import to_jax
from parity.measure.core.weights import Weights
from parity.measure.files.tensor_file import flatten
from parity.port.foreign.adapter import Adapter, reject_options


class LinenMultiHeadDotProductAttention(Adapter):
    """`flax.linen.MultiHeadDotProductAttention`, bound to its variables."""

    name = "flax.linen.MultiHeadDotProductAttention"
    layout = "flax.linen"
    mask_true = "shows"

    def make(self, spec: AttentionSpec, dtype: str = "float32", **options: Any) -> Any:
        self.check_can_be(spec)
        arguments = {
            "qkv_features": spec.q_width,
            "out_features": spec.d_model,
            "use_bias": spec.qkv_bias,
            "dtype": jnp.dtype(dtype),
            "param_dtype": jnp.dtype(dtype),
            "dropout_rate": spec.dropout,
        }
        module = flax.linen.MultiHeadDotProductAttention(spec.num_heads, **(arguments | options))
        query = jnp.zeros((1, 1, spec.d_in), jnp.dtype(dtype))
        key = jnp.zeros((1, 1, spec.d_kv), jnp.dtype(dtype))
        rngs = {"params": jax.random.key(0)}
        return module.bind(module.init(rngs, query, key, **_mode(module, train=False)))

    def tensors(self, module: Any) -> Mapping[str, Any]:
        if module.scope is None:
            raise InputError(
                "a module of flax.linen",
                "be bound to its variables, as by module.bind({'params': params})",
                f"an unbound {type(module).__name__}",
            )
        return flatten(module.variables["params"])

    def write(self, module: Any, tensors: Weights) -> Any:
        module, variables = module.unbind()
        arrays = {name: to_jax(x) for name, x in tensors.items()}
        params = flax.traverse_util.unflatten_dict(arrays, sep=".")
        return module.bind({**variables, "params": params})

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
        need_weights: bool = False,
        train: bool = False,
    ) -> tuple[Any, Any]:
        module, variables = module.unbind()
        if mask is not None:
            mask = jnp.broadcast_to(mask, (query.shape[0], *mask.shape[1:]))
        output, changed = module.apply(
            variables,
            query,
            key,
            value,
            mask=mask,
            sow_weights=need_weights,
            rngs={"dropout": jax.random.key(0)},
            mutable=["intermediates"],
            **_mode(module, train),
        )
        attn_weights = jax.tree.leaves(changed)[0] if need_weights else None
        return output, attn_weights


def _mode(module: Any, train: bool) -> dict[str, Any]:
    """Return the keyword argument that enables dropout, unless the module was made with it."""
    if module.deterministic is not None:
        return {}
    return {"deterministic": not train}


ADAPTERS = [LinenMultiHeadDotProductAttention()]
