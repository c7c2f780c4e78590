"""A layer, and its cache, divided over the devices of a mesh: where their arrays lie, and nothing else.

What is computed stays what it was; XLA divides the work as the arrays are divided, with automatic and with explicit
axes alike. Each device computes some of the query heads, and the outputs are added up: one all-reduce.
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
from mha_spec import AttentionSpec, Refusal, WrongType

__all__ = ["shard", "shard_cache"]

OF_QUERIES = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "q_norm", "context_norm", "sinks", "relative_bias")
OF_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")
"""What has something for each query head, or each key/value head."""

# ---- Functions -------------------------------------------------------------------------------------------------------


def shard(
    layer: AttentionLayer,
    mesh: Mesh,
    *,
    heads: str | None = None,
    features: str | None = None,
    tokens: str | None = None,
) -> AttentionLayer:
    """Put a layer on a mesh: its heads divided over a dimension, what is left of its weights over another.

    `heads` is tensor parallelism, `features` alone fully sharded data parallelism, `tokens` context parallelism: with
    it the layer takes inputs whose tokens are divided along that dimension. Without any of them each device has all.

    Columns of q_proj, gate_proj and, with latents, q_b_proj and kv_b_proj are divided by query heads, with their
    biases; rows of out_proj, sinks and a relative bias, too; k_proj and v_proj by key/value heads, or whole on each
    device where it does not divide these. Norms are divided where their weights are those of heads, and copied
    otherwise, as what makes latents is. The other axis of each kernel, and the features of a layer without heads on
    several devices, are divided by `features`, to keep less on each device: XLA gathers a kernel where it is used.

    Each weight has its partition in its metadata, for `nnx.get_partition_spec`. Of an abstract layer, one of
    `nnx.eval_shape`, the shapes are given their placement.

    Args:
        layer: any attention module of this package; it is changed.
        mesh: the devices.
        heads: the name of the dimension that heads are divided over.
        features: of that for the other axis of each kernel; that of the data, as a rule.
        tokens: of that for the tokens of the inputs. Where it is explicit, their types say it, and it need not be said;
            where it is automatic, a `ContextParallel` is put around `layer.kernel`.

    Returns:
        The layer.

    Raises:
        TypeError: if the layer is not one of this package.
        ValueError: if the mesh has no such dimension, or the layer cannot be divided so: the query heads, or the other
            axis of a kernel, not evenly, or q, k and v in one projection; or if something else has taken the place of a
            weight. Then nothing is changed.

    Source: Megatron-LM, arXiv:1909.08053, section 3; ZeRO, arXiv:1910.02054, section 5.
    """
    if not isinstance(layer, AttentionLayer):
        raise WrongType("layer", "be an attention module of mha_jax", type(layer).__name__)
    for name, axis in (("heads", heads), ("features", features), ("tokens", tokens)):
        if axis is not None:
            check_axis(name, axis, mesh)
    check_divides(layer.spec, 1 if heads is None else mesh.shape[heads])
    held = []
    for name, shape in layer.spec.held_shapes.items():
        partition = _partition(name, layer.spec, mesh, heads, features)
        check_features(name, shape[::-1], partition, mesh, features)
        held.append((_held(layer, name), partition))
    for parameter, spec in held:
        parameter.set_value(_placed(parameter.get_value(), NamedSharding(mesh, spec)))
        parameter.set_metadata("out_sharding", tuple(spec))
    if tokens is not None and mesh.axis_types[mesh.axis_names.index(tokens)] != AxisType.Explicit:
        count, others = layer.spec.num_kv_heads, 1 if heads is None else mesh.shape[heads]
        own = count if count % others else count // others
        held = layer.kernel if isinstance(layer.kernel, ContextParallel) else ContextParallel(None, layer.kernel)
        passes_keys = held.passes_keys or own % mesh.shape[tokens] != 0  # too few heads to share
        layer.kernel = replace(held, axis=tokens, passes_keys=passes_keys)
    return layer


def shard_cache(
    cache: CacheT, mesh: Mesh, *, batch: str | None = None, heads: str | None = None, slots: str | None = None
) -> CacheT:
    """Divide the sequences, the heads and the slots of a cache over dimensions of a mesh.

    Args:
        cache: of keys and values, whose heads are whole on each device where it does not divide them; or of latents,
            which have none.
        mesh: the devices.
        batch: the name of the dimension that sequences are divided over, evenly.
        heads: the name of that for heads, as `shard` takes it.
        slots: the name of that for slots, evenly; as the `tokens` of `shard` where it is automatic. Inputs, and what
            comes of them, are then whole along it.

    Returns:
        A cache of the same tokens.

    Raises:
        TypeError: if it is not a cache.
        ValueError: if the mesh has no such dimension, or does not divide the sequences or the slots evenly.
    """
    if not isinstance(cache, Cache):
        raise WrongType("cache", "be one of mha_jax", type(cache).__name__)
    for name, axis in (("batch", batch), ("heads", heads), ("slots", slots)):
        if axis is not None:
            check_axis(name, axis, mesh)
    batch_size, num_heads = next(iter(cache.slots.values())).shape[:2]
    if batch is not None and batch_size % mesh.shape[batch]:
        raise Refusal(
            "the batch size", f"be a multiple of the devices along {batch}", f"{batch_size} and {mesh.shape[batch]}"
        )
    if slots is not None and cache.capacity % mesh.shape[slots]:
        raise Refusal(
            "capacity", f"be a multiple of the devices along {slots}", f"{cache.capacity} and {mesh.shape[slots]}"
        )
    heads = None if heads is None or num_heads % mesh.shape[heads] else heads
    held = (_placed(x, NamedSharding(mesh, _of_slots(batch, heads, slots))) for x in cache.slots.values())
    return cache.with_slots(held, _placed(cache.lengths, NamedSharding(mesh, PartitionSpec(batch))))


def _of_slots(batch: str | None, heads: str | None, slots: str | None) -> PartitionSpec:
    return PartitionSpec(batch, heads) if slots is None else PartitionSpec(batch, heads, slots)


# ---- Weights ---------------------------------------------------------------------------------------------------------


def _held(layer: AttentionLayer, name: str) -> nnx.Param[Any]:
    """The parameter of a canonical name."""
    held: Any = layer
    for part in name.replace("_proj.weight", "_proj.kernel").split("."):
        held = getattr(held, part, None)
    if not isinstance(held, nnx.Param):
        raise Refusal("layer", f"hold {name} itself to be divided", type(held).__name__)
    return held


def _partition(
    name: str, spec: AttentionSpec, mesh: Mesh, heads: str | None, features: str | None = None
) -> PartitionSpec:
    """How a weight of a canonical name is divided, a kernel as it lies, (in, out)."""
    part, _, leaf = name.partition(".")
    if part == "out_proj":
        return PartitionSpec(heads, features) if leaf == "weight" else PartitionSpec()
    if part in OF_KEYS:
        axis = None if heads is None or spec.num_kv_heads % mesh.shape[heads] else heads
    else:
        axis = heads if part in OF_QUERIES else None
    if part in spec.norms:
        norm = spec.norms[part]
        return PartitionSpec(axis if norm.per_head or norm.over == "width" else None)
    if leaf == "weight":
        return PartitionSpec(features, axis)
    return PartitionSpec(None, axis) if part == "relative_bias" else PartitionSpec(axis)


def _placed(x: Any, placement: NamedSharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=placement)
    if isinstance(x, Tracer) and AxisType.Explicit not in placement.mesh.axis_types:
        return jax.lax.with_sharding_constraint(x, placement)  # XLA need not keep where anything else was put
    return jax.device_put(x, placement)


# ---- Validation ------------------------------------------------------------------------------------------------------


def check_axis(name: str, axis: object, mesh: Mesh) -> None:
    """Refuse what is not the name of a dimension of a mesh."""
    if axis not in mesh.axis_names:
        raise Refusal(name, "name a dimension of the mesh", {name: axis, "mesh.axis_names": mesh.axis_names})


def check_features(
    name: str, shape: tuple[int, ...], partition: PartitionSpec, mesh: Mesh, features: str | None
) -> None:
    """Refuse a kernel of a shape, (in, out), whose axis of features a dimension of a mesh does not divide evenly."""
    for axis, count in zip(partition, shape, strict=False):
        if axis is not None and axis == features and count % mesh.shape[features]:
            raise Refusal(
                f"the features of {name}",
                f"be a multiple of the devices along {features}",
                f"{count} and {mesh.shape[features]}",
            )


def check_divides(spec: AttentionSpec, size: int) -> None:
    """Refuse a layer whose heads cannot be divided over so many devices."""
    if spec.num_heads % size:
        raise Refusal("num_heads", "be a multiple of the devices", num_heads=spec.num_heads, size=size)
    if spec.shared_kv and size > 1:
        raise Refusal("shared_kv", "be False to be divided, since the keys are those of another layer", shared_kv=True)
    if spec.fused_qkv and size > 1:
        raise Refusal(
            "fused_qkv",
            "be False to be divided, since columns of qkv_proj are those of all q, then k, then v",
            fused_qkv=True,
            hint="a layer with three projections takes the same weights (parity.load_into)",
        )
