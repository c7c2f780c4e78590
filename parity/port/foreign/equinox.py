"""`equinox.nn.MultiheadAttention`, which accepts one sequence; a batch is mapped over.

Equinox modules are immutable, so loading weights returns a new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox
import jax
import jax.numpy as jnp

from mha_spec import AttentionSpec, InputError
from parity.measure.core.arrays import to_jax
from parity.measure.core.weights import Weights
from parity.port.foreign.adapter import Adapter


class EquinoxMultiheadAttention(Adapter):
    """`equinox.nn.MultiheadAttention`."""

    name = "equinox.nn.MultiheadAttention"
    layout = "equinox.nn.MultiheadAttention"
    mask_true = "shows"

    def make(self, spec: AttentionSpec, dtype: str = "float32", **options: Any) -> Any:
        self.check_can_be(spec)
        arguments = {
            "key_size": spec.d_kv,
            "value_size": spec.d_kv,
            "output_size": spec.d_model,
            "qk_size": spec.head_dim,
            "vo_size": spec.head_dim,
            "use_query_bias": spec.qkv_bias,
            "use_key_bias": spec.qkv_bias,
            "use_value_bias": spec.qkv_bias,
            "use_output_bias": spec.out_bias,
            "dropout_p": spec.dropout,
            "dtype": jnp.dtype(dtype),
            "key": jax.random.key(0),
        }
        return equinox.nn.MultiheadAttention(spec.num_heads, spec.d_in, **(arguments | options))

    def tensors(self, module: Any) -> Mapping[str, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(equinox.filter(module, equinox.is_array))
        return {_name(path): leaf for path, leaf in leaves}

    def write(self, module: Any, tensors: Weights) -> Any:
        def replaced(path: Any, leaf: Any) -> Any:
            if not equinox.is_array(leaf):
                return leaf
            return to_jax(tensors[_name(path)])

        return jax.tree_util.tree_map_with_path(replaced, module)

    def open_fields(self, module: Any) -> dict[str, Any]:
        for one, other in (("qk_size", "vo_size"), ("key_size", "value_size")):
            sizes = {one: getattr(module, one), other: getattr(module, other)}
            if sizes[one] != sizes[other]:
                raise InputError("module", f"have {one} equal to {other}", sizes)
        return {
            "num_heads": module.num_heads,
            "head_dim": module.qk_size,
            "dropout": module.dropout.p,
        }

    def call(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        *,
        mask: Any = None,
        train: bool = False,
    ) -> tuple[Any, Any]:
        if mask is not None:
            mask = jnp.broadcast_to(mask, (query.shape[0], *mask.shape[1:]))
            if mask.shape[1] == 1:
                mask = mask[:, 0]

        def call_one(query: Any, key: Any, value: Any, mask: Any, rng: Any) -> Any:
            return module(query, key, value, mask, key=rng, inference=not train)

        # An Equinox layer attends in one sequence; the keys are for dropout.
        rngs = jax.random.split(jax.random.key(0), query.shape[0])
        mask_axis = 0
        if mask is None:
            mask_axis = None
        call_each = jax.vmap(call_one, in_axes=(0, 0, 0, mask_axis, 0))
        return call_each(query, key, value, mask, rngs), None


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


ADAPTERS = [EquinoxMultiheadAttention()]
