"""Placement of the weights and caches of mha_jax on a mesh, checked without devices."""

import jax
import pytest
from flax import nnx
from helpers.input_errors import rejects, rejects_type

import mha_jax
import parity
from mha_jax import parallel
from mha_spec import Alibi, AttentionSpec, Gate, Latent, Norm, RelativeBias, Rope


def mesh_of(size):
    return jax.sharding.AbstractMesh((2, size), ("data", "heads"))


def abstract(spec, kind=mha_jax.MultiHeadAttention):
    return nnx.eval_shape(lambda: kind(spec, rngs=nnx.Rngs(0)))


def partitions(spec, size=4):
    """Return how weights are divided according to their metadata, without undivided ones."""
    layer = parallel.shard(abstract(spec), mesh_of(size), heads="heads")
    by_path = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(layer, nnx.Param)))
    sharded = {
        path: x.get_value().sharding.spec
        for path, x in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }
    by_path = {path: x.get_value() for path, x in by_path}
    assert by_path == sharded
    return {
        ".".join(path): tuple(partition) for path, partition in by_path.items() if any(partition)
    }


COLUMNS, HEADS, ROWS = (None, "heads"), ("heads",), ("heads", None)

TEXTBOOK = {
    "q_proj.kernel": COLUMNS,
    "q_proj.bias": HEADS,
    "k_proj.kernel": COLUMNS,
    "k_proj.bias": HEADS,
}
TEXTBOOK |= {"v_proj.kernel": COLUMNS, "v_proj.bias": HEADS, "out_proj.kernel": ROWS}
OF_KEYS = {"k_proj.kernel", "k_proj.bias", "v_proj.kernel", "v_proj.bias"}


def test_projections_are_divided_by_heads():
    """Kernels and biases of q, k and v are divided by columns, and the output kernel by rows."""
    assert partitions(AttentionSpec(64, 8)) == TEXTBOOK


def test_indivisible_key_heads_stay_whole():
    """If the mesh does not divide the key heads, their projections are whole, and norms per query
    head are divided.
    """
    whole = {name: axes for name, axes in TEXTBOOK.items() if name not in OF_KEYS}
    assert partitions(AttentionSpec(64, 8, num_kv_heads=2)) == whole
    norms = partitions(AttentionSpec(64, 8, num_kv_heads=2, qk_norm=Norm(per_head=True)))
    assert norms == {**whole, "q_norm.weight": HEADS}


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"sinks": True}, {"sinks": HEADS}),
        ({"relative_bias": RelativeBias(8, 16)}, {"relative_bias": COLUMNS}),
        ({"alibi": Alibi()}, {}),
        ({"gate": Gate(bias=True)}, {"gate_proj.kernel": COLUMNS, "gate_proj.bias": HEADS}),
        ({"gate": Gate(per_head=True)}, {"gate_proj.kernel": COLUMNS}),
        ({"qk_norm": Norm()}, {}),
        ({"qk_norm": Norm(per_head=True)}, {"q_norm.weight": HEADS, "k_norm.weight": HEADS}),
        ({"qk_norm": Norm(over="width")}, {"q_norm.weight": HEADS, "k_norm.weight": HEADS}),
    ],
)
def test_features_of_heads_are_divided(fields, more):
    """Sinks, biases, gates and norms with an entry per head are divided by heads, and others are
    whole.
    """
    assert partitions(AttentionSpec(64, 8, **fields)) == {**TEXTBOOK, **more}


def test_latent_layer_divides_only_heads():
    """Projections to latents are whole; those from latents to heads, the output kernel and sinks
    are divided.
    """
    rope = Rope(10000.0, rotary_dim=8, rotated="last")
    spec = AttentionSpec(64, 8, head_dim=24, latent=Latent(16, 8, q_rank=32), rope=rope, sinks=True)
    divided = {
        "q_b_proj.kernel": COLUMNS,
        "kv_b_proj.kernel": COLUMNS,
        "out_proj.kernel": ROWS,
        "sinks": HEADS,
    }
    assert partitions(spec) == divided


def test_cache_is_divided_by_batch_and_heads():
    """Caches are divided by sequences, and by heads if the mesh divides the key heads."""

    def specs_of_cache(num_kv_heads, **axes):
        cache = jax.eval_shape(lambda: mha_jax.init_cache(4, num_kv_heads, 16, 8))
        cache = parallel.shard_cache(cache, mesh_of(4), **axes)
        return [tuple(x.sharding.spec) for x in (cache.keys, cache.values, cache.lengths)]

    assert specs_of_cache(8, batch="data", heads="heads") == [
        ("data", "heads"),
        ("data", "heads"),
        ("data",),
    ]
    assert specs_of_cache(2, batch="data", heads="heads") == [
        ("data", None),
        ("data", None),
        ("data",),
    ]
    assert specs_of_cache(8, heads="heads") == [(None, "heads"), (None, "heads"), (None,)]


def test_cache_can_be_divided_by_slots():
    """With `slots`, keys and values are divided by sequences and slots."""
    cache = jax.eval_shape(lambda: mha_jax.init_cache(4, 8, 16, 8))
    cache = parallel.shard_cache(cache, mesh_of(4), batch="data", slots="heads")
    sharded = [tuple(x.sharding.spec) for x in (cache.keys, cache.values, cache.lengths)]
    assert sharded == [("data", None, "heads"), ("data", None, "heads"), ("data",)]


def test_kernels_can_be_divided_by_features():
    """With `features`, the axis of each kernel that heads do not divide is divided; without axes
    all are whole.
    """
    layer = parallel.shard(
        abstract(AttentionSpec(64, 8, num_kv_heads=2)), mesh_of(4), heads="heads", features="data"
    )
    kernels = {
        name: tuple(getattr(layer, f"{name}_proj").kernel.get_metadata("out_sharding"))
        for name in "qkv"
    }
    assert kernels == {"q": ("data", "heads"), "k": ("data", None), "v": ("data", None)}
    assert tuple(layer.out_proj.kernel.get_metadata("out_sharding")) == ("heads", "data")
    whole = parallel.shard(abstract(AttentionSpec(64, 8)), mesh_of(4))
    assert not any(
        x.get_metadata("out_sharding") != (None, None)
        for x in (whole.q_proj.kernel, whole.out_proj.kernel)
    )


def test_token_axis_is_kept_if_types_omit_it():
    """The kernel keeps the mesh axis of tokens if axes are automatic, and not if array types
    contain it.
    """
    for kind, axis in (
        (jax.sharding.AxisType.Auto, "data"),
        (jax.sharding.AxisType.Explicit, None),
    ):
        mesh = jax.sharding.AbstractMesh((2, 4), ("data", "heads"), axis_types=(kind,) * 2)
        layer = parallel.shard(abstract(AttentionSpec(64, 8)), mesh, heads="heads", tokens="data")
        assert getattr(layer.kernel, "axis", None) == axis


def test_loading_weights_keeps_placement():
    """After load_into, a divided layer has the new weights in its former placement."""
    mesh = jax.make_mesh((1,), ("heads",))
    layer, other = (
        mha_jax.MultiHeadAttention(AttentionSpec(64, 8), rngs=nnx.Rngs(seed)) for seed in (0, 1)
    )
    parallel.shard(layer, mesh, heads="heads")
    weights = parity.weights_of(other)
    parity.load_into(layer, weights, parity.spec_of(other))
    assert layer.q_proj.kernel.get_value().sharding == jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(None, "heads")
    )
    assert all((parity.weights_of(layer)[name] == weight).all() for name, weight in weights.items())


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "size", "input_error"),
    [
        (AttentionSpec(64, 8), 3, rejects("num_heads", num_heads=8, size=3)),
        (AttentionSpec(64, 8, fused_qkv=True), 4, rejects("fused_qkv", fused_qkv=True)),
        (AttentionSpec(64, 8, shared_kv=True), 4, rejects("shared_kv", shared_kv=True)),
    ],
)
def test_unsupported_divisions_raise(spec, size, input_error):
    """Heads that the mesh does not divide, fused_qkv and shared_kv raise an error and leave the
    layer undivided.
    """
    layer = abstract(spec)
    with input_error:
        parallel.shard(layer, mesh_of(size), heads="heads")
    assert not any(
        x.get_metadata("out_sharding", None)
        for x in jax.tree.leaves(nnx.state(layer), is_leaf=is_held)
    )


def is_held(x):
    return isinstance(x, nnx.Variable)


def test_replaced_projection_raises_first():
    """A layer with a projection of a different class raises an error before any weight is
    divided.
    """
    layer = mha_jax.MultiHeadAttention(AttentionSpec(64, 8), rngs=nnx.Rngs(0))
    layer.out_proj = nnx.Dropout(0.5)
    with rejects("layer", "NoneType"):
        parallel.shard(layer, mesh_of(4), heads="heads")
    assert layer.q_proj.kernel.get_metadata("out_sharding", None) is None


def test_invalid_sharding_arguments_raise():
    """Unknown axes, wrong types and sizes that the mesh does not divide raise an error by name."""
    layer, cache = abstract(AttentionSpec(64, 8)), mha_jax.init_cache(3, 4, 8, 8)
    with rejects("heads", {"heads": "tensor", "mesh.axis_names": ("data", "heads")}):
        parallel.shard(layer, mesh_of(4), heads="tensor")
    with rejects_type("layer", "dict"):
        parallel.shard({}, mesh_of(4), heads="heads")
    with rejects("batch", {"batch": "x", "mesh.axis_names": ("data", "heads")}):
        parallel.shard_cache(cache, mesh_of(4), batch="x")
    with rejects("the batch size", "3 and 2"):
        parallel.shard_cache(cache, mesh_of(4), batch="data")
    with rejects("capacity", "8 and 3"):
        parallel.shard_cache(cache, mesh_of(3), slots="heads")
    with rejects("features", {"features": "x", "mesh.axis_names": ("data", "heads")}):
        parallel.shard(layer, mesh_of(4), features="x")
    with rejects("the features of q_proj.weight", "64 and 3"):
        parallel.shard(layer, mesh_of(3), features="heads")
    with rejects_type("cache", "tuple"):
        parallel.shard_cache((), mesh_of(4))
