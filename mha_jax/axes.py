"""Batch axes: layers accept any number of them and merge them into one.

Arguments have the batch axes of the query or broadcast to them; results have the batch axes of the
query.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.arrays import Array
from mha_jax.masks import Mask
from mha_spec import AttentionSpec, InputError
from mha_spec.rules import merged_shapes

Attend = Callable[..., tuple[Array, Array | None]]


def with_one_batch_axis(attend: Attend) -> Attend:
    """Wrap `attention_layer` so that inputs may have any number of batch axes."""

    @wraps(attend)
    def attend_any(
        layer: Any, query: Array, key: Any, value: Any, mask: Mask, **options: Any
    ) -> Any:
        if query.ndim == 3:
            return attend(layer, query, key, value, mask, **options)
        axes = tuple(query.shape)[:-2]
        # Only functions have it: modules draw at random.
        keep = getattr(layer, "dropout_keep", None)
        if keep is not None:
            layer = replace(layer, dropout_keep=_merge("dropout_keep", keep, axes))
        lengths = mask.key_padding_lengths
        if lengths is not None:
            if not isinstance(lengths, jax.Array):
                # On the host, where a list is checked without waiting for a device.
                lengths = np.asarray(lengths)
            lengths = _merge("key_padding_lengths", lengths, axes, "", is_exact=True)
        segments = mask.segments
        if segments is not None:
            ids, ids_of_keys = segments
            merged_ids = _merge("segment_ids", ids, axes, "T", is_exact=True)
            if ids_of_keys is ids:
                # Not a pair: kernels are faster if queries and keys share their ids.
                segments = merged_ids
            else:
                merged_ids_of_keys = _merge("segment_ids", ids_of_keys, axes, "S", is_exact=True)
                segments = (merged_ids, merged_ids_of_keys)
        hidden = _merge("mask", mask.mask, axes)
        mask = replace(mask, mask=hidden, key_padding_lengths=lengths, segment_ids=segments)
        options["bias"] = _merge("bias", options["bias"], axes)
        options["positions"] = _merge_positions(options["positions"], axes, layer.spec)
        x = _merge("query", query, axes, "T d_in", is_exact=True)
        if layer.spec.shared_kv:
            of_keys = "K S H"
            of_values = "K S Hv"
        else:
            of_keys = "S d_kv"
            of_values = "S d_kv"
        # One array stays one, so that a fused projection is applied once.
        if key is query:
            x_k = x
        else:
            x_k = _merge("key", key, axes, of_keys, is_exact=True)
        if value is key:
            x_v = x_k
        else:
            x_v = _merge("value", value, axes, of_values, is_exact=True)
        results = []
        for result in attend(layer, x, x_k, x_v, mask, **options):
            if result is not None:
                result = result.reshape(*axes, *result.shape[1:])
            results.append(result)
        return tuple(results)

    return attend_any


def _merge(
    name: str, x: Any, axes: tuple[int, ...], other_axes: str = "N T S", *, is_exact: bool = False
) -> Any:
    """Return x with one batch axis, of size 1 if all sequences share it."""
    if not isinstance(x, Array):
        return x  # None, or the layer will reject it
    whole, merged = merged_shapes(name, tuple(x.shape), axes, other_axes, is_exact=is_exact)
    if x.shape != whole:
        if isinstance(x, np.ndarray):
            x = np.broadcast_to(x, whole)  # jnp would narrow NumPy's float64
        else:
            x = jnp.broadcast_to(x, whole)
    return x.reshape(merged)


def _merge_positions(positions: Any, axes: tuple[int, ...], spec: AttentionSpec) -> Any:
    """Return positions (…, T), or with sections (axes, …, T), with one batch axis."""
    rank = getattr(positions, "ndim", 0)
    if spec.rope is None or spec.rope.sections is None or rank < 2:
        return _merge("positions", positions, axes, "T")
    if rank != len(axes) + 2:
        raise InputError(
            "positions",
            f"have the axes of sections, {len(axes)} batch axes and T",
            {"positions.ndim": rank},
        )
    sections_last = jnp.moveaxis(positions, 0, -2)  # (…, axes, T)
    merged = _merge("positions", sections_last, axes, "axes T")
    return jnp.moveaxis(merged, 1, 0)
