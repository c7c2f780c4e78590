"""Layers of mha_jax, and layers stacked on a leading axis, as `scan` and `vmap` keep them."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from helpers.checkpoints import open_layers
from helpers.input_errors import rejects
from helpers.layouts import layout_fits
from helpers.samples import sample
from helpers.tensors import bits_of, read_tensors, write_tensor_file

import mha_jax
import parity
from parity import AttentionSpec, random_weights
from parity.port.conversion.bits import same_bits
from parity.port.conversion.checkpoint import Checkpoint
from parity.port.conversion.convert import convert_file, load
from parity.port.conversion.inspect import find_layers
from parity.port.conversion.layouts import LAYOUTS, find_layout, from_canonical

SPEC = AttentionSpec(16, 4)
GQA = AttentionSpec(16, 4, num_kv_heads=2, head_dim=6, qkv_bias=False, out_bias=False)
PREFIX = "layers.{i}.self_attn"
HEADS = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 4}


def numbered(count=3, layout="canonical", spec=SPEC):
    """A checkpoint of numbered layers among other tensors."""
    tensors = {"embed.weight": np.ones((3, 16), np.float32)}
    for i in range(count):
        laid_out = from_canonical(random_weights(spec, seed=i), spec, LAYOUTS[layout])
        tensors |= {f"layers.{i}.self_attn.{name}": x for name, x in laid_out.items()}
    return tensors


# ---- mha_jax -------------------------------------------------------------------------------------


class Model(nnx.Module):
    """Two layers, whose dropout has a state of its own."""

    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            [
                mha_jax.MultiHeadSelfAttention(
                    AttentionSpec(16, 4, dropout=0.1, **options), rngs=rngs
                )
                for _ in "ab"
            ]
        )


@pytest.mark.parametrize("fused_qkv", [False, True])
@pytest.mark.parametrize("kind", ["orbax", "msgpack"])
def test_mha_jax_checkpoint_is_converted(tmp_path, kind, fused_qkv):
    """Layers of mha_jax in Orbax and msgpack files are found and convert bit for bit."""
    model, path = Model(fused_qkv=fused_qkv), tmp_path / f"model.{kind}"
    if kind == "orbax":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, nnx.state(model))
    else:
        path.write_bytes(serialization.to_bytes(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    layout = "mha_jax.qkv_proj" if fused_qkv else "mha_jax"
    with Checkpoint.open(path) as checkpoint:
        layers = [
            (layer.prefix, layer.layers, layer.layout)
            for layer in find_layers(checkpoint, num_heads=4)
        ]
    assert layers == [("layers.{i}", 2, layout)]
    convert_file(
        path,
        tmp_path / "b.safetensors",
        source=layout,
        target="mha_torch",
        prefix="layers.{i}",
        num_heads=4,
    )
    for i, layer in enumerate(model.layers):
        weights, spec = load(tmp_path / "b.safetensors", prefix=f"layers.{i}")
        assert same_bits(weights, parity.weights_of(layer))
        assert spec == SPEC


def test_torch_checkpoint_converts_to_orbax(tmp_path):
    """PyTorch layers, converted to an Orbax checkpoint, restore into mha_jax bit for bit."""
    source = write_tensor_file(
        tmp_path / "a.safetensors", numbered(2, "torch.nn.MultiheadAttention")
    )
    options = {
        "source": "torch.nn.MultiheadAttention",
        "target": "mha_jax",
        "prefix": PREFIX,
        "num_heads": 4,
    }
    convert_file(source, tmp_path / "b.orbax", keep_rest=False, to_prefix="layers.{i}", **options)
    model = Model()
    state = nnx.state(model, nnx.Param)
    with ocp.PyTreeCheckpointer() as checkpointer:
        nnx.replace_by_pure_dict(
            state,
            {
                "layers": {
                    int(i): x
                    for i, x in checkpointer.restore(tmp_path / "b.orbax")["layers"].items()
                }
            },
        )
    nnx.update(model, state)
    for i, layer in enumerate(model.layers):
        assert same_bits(parity.weights_of(layer), random_weights(SPEC, seed=i))


def test_mha_torch_is_canonical_layout():
    """The layout `mha_torch` is the canonical one."""
    assert find_layout("mha_torch") is LAYOUTS["canonical"]


def test_nnx_state_converts_in_memory():
    """An NNX state and its nested dictionary convert to the layer's weights bit for bit."""
    layer = mha_jax.MultiHeadAttention(AttentionSpec(16, 4), rngs=nnx.Rngs(0))
    state = nnx.state(layer, nnx.Param)
    for tree in (state, nnx.to_pure_dict(state)):
        converted = parity.convert(tree, source="mha_jax", target="canonical", num_heads=4)
        assert same_bits(converted, parity.weights_of(layer))


# ---- Stacks --------------------------------------------------------------------------------------


@sample(12, suffix=["safetensors"])
@pytest.mark.parametrize(
    "layout",
    [
        name
        for name, layout in LAYOUTS.items()
        if layout_fits(layout, SPEC) or layout_fits(layout, GQA)
    ],
)
@pytest.mark.parametrize("suffix", ["safetensors", "npz"])  # safetensors are read in parts
def test_stack_round_trip_is_exact(tmp_path, layout, suffix):
    """In each layout, numbered layers become a stack and numbered layers again, bit for bit."""
    spec = SPEC if layout_fits(LAYOUTS[layout], SPEC) else GQA
    source = write_tensor_file(tmp_path / f"a.{suffix}", numbered(spec=spec, layout="canonical"))
    stack, again, back = (tmp_path / f"{name}.{suffix}" for name in "bcd")
    heads = {name: getattr(spec, name) for name in HEADS}
    convert_file(
        source,
        stack,
        source="canonical",
        target=layout,
        prefix=PREFIX,
        to_prefix="layers.self_attn",
        **heads,
    )
    alone = [from_canonical(random_weights(spec, seed=i), spec, LAYOUTS[layout]) for i in range(3)]
    expected = {
        f"layers.self_attn.{name}": np.stack([layer[name] for layer in alone]) for name in alone[0]
    }
    tensors = read_tensors(stack)
    assert bits_of(tensors) == bits_of(expected | {"embed.weight": np.ones((3, 16), np.float32)})
    convert_file(stack, again, target="mha_jax")  # a stack remains a stack
    assert read_tensors(again)["layers.self_attn.q_proj.kernel"].shape == (3, 16, spec.q_width)
    done = convert_file(stack, back, target="canonical", to_prefix=PREFIX)
    assert done.layers == [f"layers.self_attn[{i}]" for i in range(3)]
    assert bits_of(read_tensors(back)) == bits_of(read_tensors(source))


def test_stacked_layers_load_by_index(tmp_path):
    """`a[11]` loads the last of 12 stacked layers, all load in order, and wrong indices raise."""
    source = write_tensor_file(tmp_path / "a.npz", numbered(12))
    convert_file(
        source,
        tmp_path / "b.npz",
        source="canonical",
        target="qkv_proj",
        prefix=PREFIX,
        to_prefix="a",
        num_heads=4,
    )
    assert same_bits(load(tmp_path / "b.npz", prefix="a[11]")[0], random_weights(SPEC, seed=11))
    for path, layout, prefix in ((tmp_path / "b.npz", None, None), (source, "canonical", PREFIX)):
        with open_layers(path, layout, prefix=prefix, num_heads=4) as layers:
            assert len(layers) == 12
            assert all(
                same_bits(layer.load()[0], random_weights(SPEC, seed=i))
                for i, layer in enumerate(layers)
            )
    with rejects("prefix"):
        load(tmp_path / "b.npz")
    with rejects("prefix", "prefix='a[12]' of a stack of 12"):
        load(tmp_path / "b.npz", prefix="a[12]")
    with rejects("prefix", "prefix='layers.0.self_attn[0]' of no stack"):
        load(source, "canonical", prefix="layers.0.self_attn[0]", num_heads=4)


def test_stack_slice_requires_dropping_rest(tmp_path):
    """Converting one layer of a stack raises an error unless all other tensors are dropped."""
    source = write_tensor_file(tmp_path / "a.npz", numbered())
    convert_file(
        source,
        tmp_path / "b.npz",
        source="canonical",
        target="mha_jax",
        prefix=PREFIX,
        to_prefix="a",
        num_heads=4,
    )
    with rejects("prefix", prefix="a[1]"):
        convert_file(tmp_path / "b.npz", tmp_path / "c.npz", target="canonical", prefix="a[1]")
    convert_file(
        tmp_path / "b.npz", tmp_path / "c.npz", target="canonical", prefix="a[1]", keep_rest=False
    )
    assert same_bits(load(tmp_path / "c.npz")[0], random_weights(SPEC, seed=1))


@pytest.mark.parametrize(
    ("change", "input_error"),
    [
        (
            lambda tensors: (
                tensors.update(numbered(6)) or [tensors.pop(n) for n in list(tensors) if ".4." in n]
            ),
            rejects("layers", layers=[0, 1, 2, 3, 5]),
        ),
        (
            lambda tensors: tensors.update(
                {n: x.astype(np.float16) for n, x in tensors.items() if ".1." in n}
            ),
            rejects("layers"),
        ),
    ],
)
def test_unstackable_layers_raise(tmp_path, change, input_error):
    """Stacking layers with a gap in their numbers or with different dtypes raises an error."""
    tensors = numbered()
    change(tensors)
    with input_error:
        convert_file(
            write_tensor_file(tmp_path / "a.npz", tensors),
            tmp_path / "b.npz",
            source="canonical",
            target="W_q",
            prefix=PREFIX,
            to_prefix="layers",
            num_heads=4,
        )


def test_nan_in_a_stack_raises(tmp_path):
    """A NaN in one layer of a stack raises an error with the tensor's name."""
    tensors = {name: np.stack([x, x]) for name, x in random_weights(SPEC).items()}
    tensors["v_proj.weight"][1, 2, 3] = np.nan
    for suffix in ("safetensors", "npz"):
        source = write_tensor_file(tmp_path / f"a.{suffix}", tensors)
        with rejects("v_proj.weight", "NaN or infinities"):
            convert_file(
                source, tmp_path / "b.npz", source="canonical", target="mha_jax", num_heads=4
            )


def test_stacks_of_unequal_length_raise(tmp_path):
    """Tensors that stack two and three layers raise an error with both numbers."""
    tensors = {name: np.stack([x, x]) for name, x in random_weights(SPEC).items()}
    tensors["q_proj.bias"] = np.zeros((3, 16), np.float32)
    with rejects("stacked tensors", "[2, 3]"):
        convert_file(
            write_tensor_file(tmp_path / "a.npz", tensors),
            tmp_path / "b.npz",
            source="canonical",
            target="W_q",
            num_heads=4,
        )


# ---- Stacks of real models -----------------------------------------------------------------------


class Block(flax.linen.Module):
    """The scanned block."""

    @flax.linen.compact
    def __call__(self, x, _):
        return flax.linen.MultiHeadDotProductAttention(num_heads=4, name="self_attn")(x, x), None


@pytest.mark.thorough
def test_linen_scan_converts_exactly(tmp_path):
    """Layers scanned by Flax Linen convert to mha_jax with equal output, and back exactly."""
    stack = flax.linen.scan(
        Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )

    class Scanned(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            return stack(name="layers")(x, None)[0]

    x = jax.random.normal(jax.random.key(1), (2, 5, 16))
    variables = Scanned().init(jax.random.key(0), x)
    (tmp_path / "a.msgpack").write_bytes(serialization.to_bytes(variables))
    with Checkpoint.open(tmp_path / "a.msgpack") as checkpoint:
        linen = {layer.layout: layer for layer in find_layers(checkpoint, num_heads=4)}[
            "flax.linen"
        ]
    assert (linen.prefix, linen.layers, linen.is_stacked) == ("params.layers.self_attn", 3, True)
    options = {"prefix": "params.layers.self_attn", "to_prefix": "layers.{i}"}
    convert_file(
        tmp_path / "a.msgpack", tmp_path / "b.npz", source="flax.linen", target="mha_jax", **options
    )
    output = x
    for i in range(3):
        weights, spec = load(tmp_path / "b.npz", prefix=f"layers.{i}")
        layer = parity.load_into(
            mha_jax.MultiHeadSelfAttention(spec, rngs=nnx.Rngs(0)), weights, spec
        )
        output = layer(output)
    parity.assert_parity(np.asarray(output), np.asarray(Scanned().apply(variables, x), np.float64))
    options = {"prefix": "layers.{i}", "to_prefix": "params.layers.self_attn"}
    convert_file(
        tmp_path / "b.npz", tmp_path / "c.msgpack", source="mha_jax", target="flax.linen", **options
    )
    back = serialization.msgpack_restore((tmp_path / "c.msgpack").read_bytes())
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), variables["params"], back["params"])
    )


def test_nnx_scan_runs_converted_layers(tmp_path):
    """Numbered layers fill a vmapped NNX stack, whose scan matches the layers run in turn."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return mha_jax.MultiHeadSelfAttention(AttentionSpec(16, 4), rngs=nnx.Rngs(key))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return layer(x)

    source = write_tensor_file(tmp_path / "a.npz", numbered(3))
    options = {
        "source": "canonical",
        "target": "mha_jax",
        "prefix": PREFIX,
        "to_prefix": "layers",
        "num_heads": 4,
    }
    convert_file(source, tmp_path / "b.msgpack", keep_rest=False, **options)
    layers = make(jax.random.split(jax.random.key(0), 3))
    state = nnx.state(layers, nnx.Param)
    nnx.replace_by_pure_dict(
        state, serialization.msgpack_restore((tmp_path / "b.msgpack").read_bytes())["layers"]
    )
    nnx.update(layers, state)
    x = expected = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 16)), jnp.float32)
    for i in range(3):
        layer = mha_jax.MultiHeadSelfAttention(AttentionSpec(16, 4), rngs=nnx.Rngs(9))
        expected = parity.load_into(layer, random_weights(SPEC, seed=i), SPEC)(expected)
    parity.assert_parity(np.asarray(run(x, layers)), np.asarray(expected, np.float64))
