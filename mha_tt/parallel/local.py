"""Local part of a layer whose heads are divided over the chips of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import ttnn
from ttnn import Tensor

from mha_spec import AttentionSpec, InputError
from mha_spec.shares import OF_KEYS, OUT_BIAS, axis_of_heads, local_heads


def local_spec(spec: AttentionSpec, size: int) -> AttentionSpec:
    """Return the specification of each of `size` chips: its query heads, and their key/value heads.

    With fewer key/value heads than chips, several chips share one.
    """
    queries, keys = local_heads(spec, size, 0)
    return replace(spec, num_heads=len(queries), num_kv_heads=len(keys))


def lines_of(mesh: Sequence[int], axis: int) -> list[list[int]]:
    """Return the groups of chips along an axis of a mesh, one for each index of the other."""
    chips = np.arange(np.prod(mesh)).reshape(mesh)
    return np.moveaxis(chips, axis, -1).reshape(-1, mesh[axis]).tolist()


def local_weights(
    weights: Mapping[str, np.ndarray], spec: AttentionSpec, size: int, chip: int
) -> dict[str, np.ndarray]:
    """Return the canonical weights of a chip. The bias of out_proj is zero on all but the first: it
    is added once.
    """
    local = {}
    for name, weight in weights.items():
        axis, count, heads = _place_of(name, spec, size, chip)
        if name == OUT_BIAS:
            if chip == 0:
                local[name] = weight
            else:
                local[name] = np.zeros_like(weight)
        elif axis is None:
            local[name] = weight
        else:
            by_heads = np.reshape(
                weight, (*weight.shape[:axis], count, -1, *weight.shape[axis + 1 :])
            )
            local_part = by_heads.take(heads, axis)
            local[name] = local_part.reshape(*weight.shape[:axis], -1, *weight.shape[axis + 1 :])
    return local


def whole_weights(
    parts: Sequence[Mapping[str, np.ndarray]], spec: AttentionSpec
) -> dict[str, np.ndarray]:
    """Return the canonical weights of a layer from the weights of all chips: the inverse of
    `local_weights`.
    """
    whole = {}
    for name, shape in spec.weight_shapes.items():
        chip_weights = [part[name] for part in parts]
        axis, count, _ = _place_of(name, spec, len(parts), 0)
        # The bias of out_proj is whole on the first chip.
        if axis is None:
            whole[name] = chip_weights[0]
            continue
        by_heads = np.empty(
            (*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :]), chip_weights[0].dtype
        )
        for chip, weight in enumerate(chip_weights):
            _, _, heads = _place_of(name, spec, len(parts), chip)
            # Chips that share a head have equal weights of it.
            index = (slice(None),) * axis + (heads,)
            by_heads[index] = weight.reshape(*shape[:axis], len(heads), -1, *shape[axis + 1 :])
        whole[name] = by_heads.reshape(shape)
    return whole


def all_reduce(x: Tensor, axis: int) -> Tensor:
    """Return the sum over chips along an axis of a mesh, on each of them."""
    if x.device().shape[axis] == 1 or 0 in tuple(x.shape):
        return x
    return ttnn.all_reduce(x, cluster_axis=axis)


def _place_of(
    name: str, spec: AttentionSpec, size: int, chip: int
) -> tuple[int | None, int, list[int]]:
    """Return the axis of heads in a canonical weight, their number, and the local heads of a
    chip.
    """
    (queries, keys), axis = local_heads(spec, size, chip), axis_of_heads(name, spec)
    is_of_keys = name.partition(".")[0] in OF_KEYS
    if is_of_keys:
        return (axis, spec.num_kv_heads, keys)
    return (axis, spec.num_heads, list(queries))


# ---- Validation ----------------------------------------------------------------------------------


def check_divides(spec: AttentionSpec, size: int) -> None:
    """Reject a layer whose heads cannot be divided over `size` chips."""
    if size == 1:
        return
    if spec.num_heads % size:
        raise InputError(
            "num_heads",
            "be a multiple of the chips",
            f"num_heads={spec.num_heads} and {size} chips",
        )
    if spec.shared_kv:
        raise InputError(
            "shared_kv",
            "be False to be divided, since the keys come from another layer",
            shared_kv=True,
        )
    for name, norm in spec.wide_norms.items():
        raise InputError(
            name,
            "be over='head' to be divided, "
            "since a norm over the width of all heads needs a sum over chips",
            {name: norm},
        )
    if spec.alibi is not None:
        raise InputError(
            "alibi",
            "be None to be divided, "
            "since all chips run one program, and the slopes of their heads differ",
            alibi=spec.alibi,
        )
