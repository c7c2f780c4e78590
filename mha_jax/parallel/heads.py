"""Sharding of a layer and its cache over the devices of a mesh.

Only the placement of arrays changes; XLA partitions the work accordingly, for automatic and
explicit axes alike. Each device computes some of the query heads, and an all-reduce sums the
outputs.
"""

from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mha_jax.cache import Cache, CacheT
from mha_jax.mha import AttentionLayer
from mha_jax.parallel.tokens import ContextParallel
from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.score_weights import SCORE_WEIGHTS
from mha_spec.shares import OF_KEYS, OF_QUERIES, axis_of_heads

__all__ = ["shard", "shard_cache"]

# ---- Functions -----------------------------------------------------------------------------------


def shard(
    layer: AttentionLayer,
    mesh: Mesh,
    *,
    heads: str | None = None,
    features: str | None = None,
    tokens: str | None = None,
) -> AttentionLayer:
    """Shard a layer on a mesh: its heads over one dimension, the rest of its weights over another.

    `heads` is tensor parallelism, `features` alone fully sharded data parallelism, and `tokens`
    context parallelism, for inputs whose tokens are divided along that dimension. Without any of
    them the layer is replicated.

    Query heads divide the columns of q_proj, gate_proj and, with latents, q_b_proj and kv_b_proj,
    with their biases; rows of out_proj; sinks and a relative bias. Key/value heads divide k_proj
    and v_proj, which are replicated if `heads` does not divide these. Norms are divided if each
    head has its own weights, and replicated otherwise, as are projections to latents. `features`
    divides the other axis of each kernel to save memory: XLA gathers a kernel where it is used.

    The metadata of each weight contain its partition, for `nnx.get_partition_spec`. In an abstract
    layer, from `nnx.eval_shape`, the shapes get their sharding.

    Args:
        layer: any attention module of this package; changed in place.
        mesh: device mesh.
        heads: name of the mesh dimension that heads are divided over.
        features: name of the mesh dimension for the other axis of each kernel; usually the
            dimension of the data.
        tokens: name of the mesh dimension that tokens are divided over. An explicit dimension
            follows from the types of arrays and can be omitted; for an automatic one a
            `ContextParallel` wraps `layer.kernel`.

    Returns:
        The layer.

    Raises:
        TypeError: if the layer is not one of this package.
        ValueError: if the mesh has no such dimension, the query heads or the other axis of a kernel
            do not divide evenly, q, k and v are one projection, or a weight was replaced. The layer
            is then unchanged.

    Source: Megatron-LM, arXiv:1909.08053, section 3; ZeRO, arXiv:1910.02054, section 5.
    """
    if not isinstance(layer, AttentionLayer):
        raise InputTypeError("layer", "be an attention module of mha_jax", type(layer).__name__)
    for name, axis in (("heads", heads), ("features", features), ("tokens", tokens)):
        if axis is not None:
            check_axis(name, axis, mesh)
    check_divides(layer.spec, 1 if heads is None else mesh.shape[heads])
    placements = []
    for name, shape in layer.spec.stored_shapes.items():
        partition = _partition(name, layer.spec, mesh, heads, features)
        check_sharded_features(name, shape[::-1], partition, mesh, features)
        placements.append((_parameter(layer, name), partition))
    for parameter, spec in placements:
        parameter.set_value(_placed(parameter.get_value(), NamedSharding(mesh, spec)))
        parameter.set_metadata("out_sharding", tuple(spec))
    if tokens is not None and mesh.axis_types[mesh.axis_names.index(tokens)] != AxisType.Explicit:
        count = layer.spec.num_kv_heads
        if heads is None:
            num_parts = 1
        else:
            num_parts = mesh.shape[heads]
        if count % num_parts:
            num_local = count
        else:
            num_local = count // num_parts
        if isinstance(layer.kernel, ContextParallel):
            kernel = layer.kernel
        else:
            kernel = ContextParallel(None, layer.kernel)
        # Too few heads for all-to-all.
        passes_keys = kernel.passes_keys or num_local % mesh.shape[tokens] != 0
        layer.kernel = replace(kernel, axis=tokens, passes_keys=passes_keys)
    return layer


def shard_cache(
    cache: CacheT,
    mesh: Mesh,
    *,
    batch: str | None = None,
    heads: str | None = None,
    slots: str | None = None,
) -> CacheT:
    """Shard the sequences, heads and slots of a cache over dimensions of a mesh.

    Args:
        cache: cache of keys and values, whose heads are replicated if `heads` does not divide them;
            or of latents, which have no heads.
        mesh: device mesh.
        batch: name of the mesh dimension that sequences are divided over, evenly.
        heads: name of the mesh dimension for heads, as in `shard`.
        slots: name of the mesh dimension for slots, evenly; if automatic, the `tokens` of `shard`.
            Inputs and results are then replicated along it.

    Returns:
        Cache of the same tokens.

    Raises:
        TypeError: if `cache` is not a cache.
        ValueError: if the mesh has no such dimension, or does not divide the sequences or the slots
            evenly.
    """
    if not isinstance(cache, Cache):
        raise InputTypeError("cache", "be one of mha_jax", type(cache).__name__)
    for name, axis in (("batch", batch), ("heads", heads), ("slots", slots)):
        if axis is not None:
            check_axis(name, axis, mesh)
    batch_size, num_heads = next(iter(cache.slots.values())).shape[:2]
    if batch is not None and batch_size % mesh.shape[batch]:
        raise InputError(
            "the batch size",
            f"be a multiple of the devices along {batch}",
            f"{batch_size} and {mesh.shape[batch]}",
        )
    if slots is not None and cache.capacity % mesh.shape[slots]:
        raise InputError(
            "capacity",
            f"be a multiple of the devices along {slots}",
            f"{cache.capacity} and {mesh.shape[slots]}",
        )
    if heads is None or num_heads % mesh.shape[heads]:
        heads = None
    slots_on_mesh = (
        _placed(x, NamedSharding(mesh, _of_slots(batch, heads, slots)))
        for x in cache.slots.values()
    )
    return cache.with_slots(
        slots_on_mesh, _placed(cache.lengths, NamedSharding(mesh, PartitionSpec(batch)))
    )


def _of_slots(batch: str | None, heads: str | None, slots: str | None) -> PartitionSpec:
    if slots is None:
        return PartitionSpec(batch, heads)
    return PartitionSpec(batch, heads, slots)


# ---- Weights -------------------------------------------------------------------------------------


def _parameter(layer: AttentionLayer, name: str) -> nnx.Param[Any]:
    """Return the parameter with a canonical name."""
    leaf: Any = layer
    for part in name.replace("_proj.weight", "_proj.kernel").split("."):
        leaf = getattr(leaf, part, None)
    if not isinstance(leaf, nnx.Param):
        raise InputError("layer", f"hold {name} itself to be divided", type(leaf).__name__)
    return leaf


def _partition(
    name: str, spec: AttentionSpec, mesh: Mesh, heads: str | None, features: str | None = None
) -> PartitionSpec:
    """Return the partition of a weight with a canonical name; kernels are (in, out)."""
    part, _, leaf = name.partition(".")
    if part == "out_proj":
        if leaf == "weight":
            return PartitionSpec(heads, features)
        return PartitionSpec()
    if part in OF_KEYS:
        if heads is None or spec.num_kv_heads % mesh.shape[heads]:
            axis = None
        else:
            axis = heads
    else:
        if part in OF_QUERIES and axis_of_heads(name, spec) is not None:
            axis = heads
        else:
            axis = None
    if part in spec.norms:
        norm = spec.norms[part]
        return PartitionSpec(axis if norm.per_head or norm.over == "width" else None)
    if leaf == "weight":
        return PartitionSpec(features, axis)
    if part in SCORE_WEIGHTS:
        others = [None] * SCORE_WEIGHTS[part].index("N")
        return PartitionSpec(*others, axis)
    return PartitionSpec(axis)


def _placed(x: Any, placement: NamedSharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=placement)
    if isinstance(x, Tracer) and AxisType.Explicit not in placement.mesh.axis_types:
        # XLA may move arrays without a constraint.
        return jax.lax.with_sharding_constraint(x, placement)
    return jax.device_put(x, placement)


# ---- Validation ----------------------------------------------------------------------------------


def check_axis(name: str, axis: object, mesh: Mesh) -> None:
    """Reject anything but the name of a mesh dimension."""
    if axis not in mesh.axis_names:
        raise InputError(
            name, "name a dimension of the mesh", {name: axis, "mesh.axis_names": mesh.axis_names}
        )


def check_sharded_features(
    name: str, shape: tuple[int, ...], partition: PartitionSpec, mesh: Mesh, features: str | None
) -> None:
    """Reject a kernel shape, (in, out), whose axis of features does not divide evenly over a mesh
    dimension.
    """
    for axis, count in zip(partition, shape, strict=False):
        if axis is not None and axis == features and count % mesh.shape[features]:
            raise InputError(
                f"the features of {name}",
                f"be a multiple of the devices along {features}",
                f"{count} and {mesh.shape[features]}",
            )


def check_divides(spec: AttentionSpec, size: int) -> None:
    """Reject a layer whose heads cannot be divided over `size` devices."""
    if spec.num_heads % size:
        raise InputError(
            "num_heads", "be a multiple of the devices", num_heads=spec.num_heads, size=size
        )
    if spec.shared_kv and size > 1:
        raise InputError(
            "shared_kv",
            "be False to be divided, since the keys come from another layer",
            shared_kv=True,
        )
    if spec.fused_qkv and size > 1:
        raise InputError(
            "fused_qkv",
            "be False to be divided, since the columns of qkv_proj hold all of q, then k, then v",
            fused_qkv=True,
            hint="a layer with three projections takes the same weights (parity.load_into)",
        )
