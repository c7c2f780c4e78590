"""Layers of other libraries: made from a specification, filled, read, and compared with the float64
reference.
"""

import subprocess
import sys
import tempfile
from dataclasses import replace

import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import ROOT
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample
from helpers.tensors import bits_of

import mha_torch
import parity
from mha_spec import Rope
from parity import AttentionSpec, Case, random_weights
from parity.measure.core.arrays import to_jax, to_torch
from parity.measure.core.weights import dtype_named
from parity.port.foreign import LAYERS, load_adapter

with pytest.MonkeyPatch.context() as _environment, tempfile.TemporaryDirectory() as _home:
    _environment.setenv(
        "KERAS_BACKEND", "torch"
    )  # on JAX it would not run under conftest's strict promotion
    _environment.setenv("KERAS_HOME", _home)  # where it writes its settings
    import keras

SQUARE = AttentionSpec(24, 4)
CROSS = AttentionSpec(10, 4, head_dim=3, d_in=18, d_kv=15)  # all sizes differ
GROUPED = AttentionSpec(18, 6, num_kv_heads=2, head_dim=4, d_kv=15)
NO_BIASES = {"qkv_bias": False, "out_bias": False}

SPECS = {
    "torch.nn.MultiheadAttention": [SQUARE, replace(SQUARE, d_kv=15)],
    "flax.nnx.MultiHeadAttention": [CROSS, GROUPED],
    "flax.linen.MultiHeadDotProductAttention": [CROSS],
    "keras.layers.MultiHeadAttention": [CROSS],
    "keras.layers.GroupQueryAttention": [replace(CROSS, d_model=18), GROUPED],
    "equinox.nn.MultiheadAttention": [CROSS, replace(CROSS, qkv_bias=False)],
}
LAYERS_OF = [(name, spec) for name, specs in SPECS.items() for spec in specs]
LAYERS_OF += [(name, replace(specs[0], **NO_BIASES)) for name, specs in SPECS.items()]
every_layer = pytest.mark.parametrize(
    ("name", "spec"),
    LAYERS_OF,
    ids=[f"{name}-{spec.num_kv_heads}-{spec.d_kv}-{spec.qkv_bias}" for name, spec in LAYERS_OF],
)
every_library = pytest.mark.parametrize(
    ("name", "spec"), [(name, specs[0]) for name, specs in SPECS.items()], ids=list(SPECS)
)


def made(name, spec, dtype="float32", **options):
    """Return a layer of the library, with its own weights."""
    return load_adapter(name).make(spec, dtype, **options)


def as_given(name, x):
    """Return an array of the library's framework; Keras runs on torch here."""
    return (to_torch if name.startswith(("torch", "keras")) else to_jax)(x)


def output_of(name, layer, problem, hidden=None, **options):
    """Return the output of a layer for the inputs of a problem; `hidden` is (B or 1, 1, T, S), True
    = masked.
    """
    adapter = load_adapter(name)
    if hidden is not None:
        options["mask"] = as_given(name, hidden if adapter.mask_true == "hides" else ~hidden)
    query = problem.inputs["query"]
    key = as_given(name, problem.inputs.get("key", query))
    output, _ = adapter.call(layer, as_given(name, query), key, key, **options)
    return output


def problem_of(spec, **case):
    return parity.make_problem(
        Case("foreign", spec, "another library's layer", seq_len=7, **case), "float32"
    )


# ---- Weights in, output out ----------------------------------------------------------------------


def test_every_layer_is_tested():
    """SPECS has an entry for each layer that has an adapter, in the same order."""
    assert list(SPECS) == list(LAYERS)


@sample(8)
@every_layer
def test_filled_layer_matches_reference(name, spec):
    """A layer of another library, filled with our weights, has the output of the reference."""
    problem = problem_of(spec, seq_len_k=9)
    layer = parity.load_into(made(name, spec), problem.weights, problem.spec)
    parity.assert_parity(output_of(name, layer, problem), problem=problem, stage="module.output")


@sample(8)
@every_layer
def test_masked_layer_matches_reference(name, spec):
    """With a mask of padding, a filled layer has the output
    of the reference; without it, it does not.
    """
    problem = problem_of(spec, seq_len_k=9, key_padding_lengths=(9, 4))
    layer = parity.load_into(made(name, spec), problem.weights, problem.spec)
    hidden = np.broadcast_to((np.arange(9) >= np.array([[9], [4]]))[:, None, None], (2, 1, 7, 9))
    parity.assert_parity(
        output_of(name, layer, problem, hidden), problem=problem, stage="module.output"
    )
    with pytest.raises(AssertionError):  # the control
        parity.assert_parity(
            output_of(name, layer, problem), problem=problem, stage="module.output"
        )


@sample(8)
@every_layer
def test_causal_layer_matches_reference(name, spec):
    """A filled layer has the causal output of the reference, by
    a mask, and in Keras and nnx by its flag.
    """
    problem = problem_of(replace(spec, d_kv=spec.d_in), is_causal=True)
    layer = parity.load_into(made(name, problem.case.spec), problem.weights, problem.spec)
    causal = ~np.tri(7, dtype=bool)[None, None]
    parity.assert_parity(
        output_of(name, layer, problem, causal), problem=problem, stage="module.output"
    )
    if name.startswith(("keras", "flax.nnx")):
        output = output_of(name, layer, problem, is_causal=True)
        parity.assert_parity(output, problem=problem, stage="module.output")


def test_torch_layer_with_batch_second():
    """A layer of torch with the batch as its second axis has the output of the reference."""
    problem = problem_of(SQUARE, seq_len_k=9)
    name = "torch.nn.MultiheadAttention"
    layer = parity.load_into(torch.nn.MultiheadAttention(24, 4), problem.weights, problem.spec)
    parity.assert_parity(output_of(name, layer, problem), problem=problem, stage="module.output")


@sample(8)
@every_layer
def test_weights_come_back_bit_for_bit(name, spec):
    """Weights that fill a layer are read from it bit for bit."""
    weights = random_weights(spec, seed=1)
    assert bits_of(parity.weights_of(parity.load_into(made(name, spec), weights, spec))) == bits_of(
        weights
    )


@sample(dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@every_library
def test_half_precision_weights_come_back(name, spec, dtype):
    """Weights in bfloat16 and float16 that fill a layer are read from it bit for bit."""
    weights = {key: x.astype(dtype_named(dtype)) for key, x in random_weights(spec, seed=1).items()}
    layer = parity.load_into(made(name, spec, dtype), weights, spec)
    assert bits_of(parity.weights_of(layer)) == bits_of(weights)


@sample(8)
@every_layer
def test_specification_comes_back(name, spec):
    """The specification read from a layer is the one it was made from, including dropout."""
    spec = replace(spec, dropout=0.25)
    assert parity.spec_of(made(name, spec)) == spec


@every_library
def test_layer_exchanges_weights_with_module(name, spec):
    """Weights go from a module of ours to another library's layer and back, bit for bit."""
    source = mha_torch.MultiHeadAttention(spec)
    layer = parity.load_into(made(name, spec), source)
    target = parity.load_into(mha_torch.MultiHeadAttention(spec), layer)
    assert bits_of(parity.weights_of(target)) == bits_of(parity.weights_of(source))


@pytest.mark.parametrize(
    "name", ["flax.linen.MultiHeadDotProductAttention", "equinox.nn.MultiheadAttention"]
)
def test_immutable_layer_is_copied(name):
    """Filling a linen or Equinox layer returns a new layer of
    its type and leaves the original unchanged.
    """
    layer = made(name, CROSS)
    before = bits_of(parity.weights_of(layer))
    filled = parity.load_into(layer, random_weights(CROSS, seed=1), CROSS)
    assert filled is not layer
    assert type(filled) is type(layer)
    assert bits_of(parity.weights_of(layer)) == before
    assert bits_of(parity.weights_of(filled)) == bits_of(random_weights(CROSS, seed=1))


def test_filled_linen_module_has_params():
    """Parameters of a filled linen module have the original structure and produce its output."""
    weights = random_weights(CROSS)
    module = flax.linen.MultiHeadAttention(4, qkv_features=12, out_features=10)  # by its other name
    x, key = jnp.ones((1, 2, 18)), jnp.ones((1, 3, 15))
    variables = module.init(jax.random.key(0), x, key)
    filled = parity.load_into(module.bind(variables), weights, CROSS)
    params = filled.variables["params"]
    assert jax.tree.structure(params) == jax.tree.structure(variables["params"])
    assert (module.apply({"params": params}, x, key) == filled(x, key)).all()
    assert (module.apply({"params": params}, x, key) != module.apply(variables, x, key)).any()


def test_layer_in_keras_model_is_filled():
    """A layer inside a Keras model is filled."""
    x = keras.Input((7, 24))
    layer = keras.layers.MultiHeadAttention(4, 6)
    keras.Sequential([x, keras.layers.Dense(24)]).name = "outer"
    model = keras.Model(x, layer(x, x))
    parity.load_into(model.layers[-1], random_weights(SQUARE), SQUARE)
    assert bits_of(parity.weights_of(layer)) == bits_of(random_weights(SQUARE))


def test_layer_is_saved_with_its_spec(tmp_path):
    """A saved layer is loaded with its specification and its weights, bit for bit."""
    layer = parity.load_into(
        made("equinox.nn.MultiheadAttention", CROSS), random_weights(CROSS), CROSS
    )
    parity.save(tmp_path / "a.npz", layer)
    weights, spec = parity.load(tmp_path / "a.npz")
    assert spec == CROSS
    assert bits_of(weights) == bits_of(random_weights(CROSS))


# ---- Unsupported layers and weights --------------------------------------------------------------


@pytest.mark.parametrize(
    "changed", [{"rope": Rope(10000.0)}, {"output_dropout": 0.1}], ids=["rope", "output_dropout"]
)
@pytest.mark.parametrize("name", LAYERS)
def test_fields_without_support_raise(name, changed):
    """RoPE and output dropout raise an error for the layers of all libraries."""
    with rejects("the spec of a …Attention", changed):
        made(name, replace(SQUARE, **changed))


@pytest.mark.parametrize(
    ("name", "spec", "input_error"),
    [
        ("torch.nn.MultiheadAttention", GROUPED, rejects("the layer")),
        ("torch.nn.MultiheadAttention", CROSS, rejects("the layer")),
        ("torch.nn.MultiheadAttention", replace(SQUARE, out_bias=False), rejects("the layer")),
        ("flax.nnx.MultiHeadAttention", replace(SQUARE, out_proj=False), rejects("the layer")),
        ("flax.linen.MultiHeadDotProductAttention", GROUPED, rejects("the layer")),
        ("keras.layers.MultiHeadAttention", GROUPED, rejects("the layer")),
        (
            "keras.layers.GroupQueryAttention",
            CROSS,
            rejects("a keras.layers.GroupQueryAttention", {"spec.d_model": 10, "spec.d_in": 18}),
        ),
        ("equinox.nn.MultiheadAttention", GROUPED, rejects("the layer")),
    ],
)
def test_unsupported_spec_raises(name, spec, input_error):
    """A specification that a library does not support raises an error."""
    with input_error:
        made(name, spec)


def doubled(weights):
    return {
        name: np.concatenate([x, x]) if name == "k_proj.weight" else x
        for name, x in weights.items()
    }


def halved(weights):
    return {name: x.astype(np.float16) for name, x in weights.items()}


def lacking(weights):
    return {name: x for name, x in weights.items() if name != "v_proj.bias"}


@every_library
def test_weights_of_other_heads_raise(name, spec):
    """Weights of other heads with the same shapes, in which heads do not show, raise an error with
    and without their specification, and the layer does not change.
    """
    layer = made(name, spec)
    before = bits_of(parity.weights_of(layer))
    heads, size = spec.num_heads // 2, 2 * spec.head_dim
    other = replace(spec, num_heads=heads, num_kv_heads=heads, head_dim=size, value_head_dim=size)
    weights = random_weights(other, seed=1)
    assert {key: x.shape for key, x in weights.items()} == {key: x[1] for key, x in before.items()}
    with rejects_type("spec", spec=None):
        parity.load_into(layer, weights)
    with rejects("the module"):
        parity.load_into(layer, weights, other)
    assert bits_of(parity.weights_of(layer)) == before


def spoiled(weights):
    return {
        name: np.full_like(x, np.nan) if name == "q_proj.bias" else x for name, x in weights.items()
    }


@sample(12)
@pytest.mark.parametrize(
    ("change", "input_error"),
    [
        (doubled, rejects("k_proj.weight")),
        (halved, rejects_type("…bias")),
        (lacking, rejects("weights", missing=..., unexpected=[])),
        (spoiled, rejects("q_proj.bias")),
    ],
)
@every_library
def test_invalid_weights_change_nothing(name, spec, change, input_error):
    """Weights of a wrong shape or dtype, missing ones and NaN raise
    an error, and the layer does not change.
    """
    layer = made(name, spec)
    before = bits_of(parity.weights_of(layer))
    with input_error:
        parity.load_into(layer, change(random_weights(spec, seed=1)), spec)
    assert bits_of(parity.weights_of(layer)) == before


@every_library
def test_wrong_heads_change_nothing(name, spec):
    """A specification with other heads raises an error, and the layer does not change."""
    layer, other = (
        made(name, spec),
        replace(spec, num_heads=2, num_kv_heads=2, head_dim=2 * spec.head_dim),
    )
    before = bits_of(parity.weights_of(layer))
    with rejects("the module", "num_heads=4"):
        parity.load_into(layer, random_weights(other), other)
    assert bits_of(parity.weights_of(layer)) == before


def built(layer):
    layer.build((None, 7, 24), (None, 7, 24))
    return layer


@pytest.mark.parametrize(
    ("make", "input_error"),
    [
        (
            lambda: torch.nn.MultiheadAttention(24, 4, add_bias_kv=True),
            rejects("module", add_bias_kv=True, add_zero_attn=False),
        ),
        (
            lambda: torch.nn.MultiheadAttention(24, 4, kdim=8, vdim=9),
            rejects("module", kdim=8, vdim=9),
        ),
        (
            lambda: made("flax.nnx.MultiHeadAttention", SQUARE, normalize_qk=True),
            rejects("…Attention", normalize_qk=True),
        ),
        (
            lambda: made("flax.linen.MultiHeadDotProductAttention", SQUARE, normalize_qk=True),
            rejects("…Attention", normalize_qk=True),
        ),
        (
            lambda: flax.linen.MultiHeadDotProductAttention(4),
            rejects("a module of flax.linen", "an unbound MultiHeadDotProductAttention"),
        ),
        (
            lambda: keras.layers.MultiHeadAttention(4, 6),
            rejects("a keras.layers.MultiHeadAttention"),
        ),
        (
            lambda: built(keras.layers.MultiHeadAttention(4, 6, sliding_window=3)),
            rejects("a keras.layers.MultiHeadAttention", sliding_window=3),
        ),
        (
            lambda: built(keras.layers.MultiHeadAttention(4, 6, value_dim=5)),
            rejects("a keras.layers.MultiHeadAttention", value_dim=5),
        ),
        (
            lambda: built(keras.layers.GroupQueryAttention(6, 4, 2, use_gate=True)),
            rejects("a keras.layers.GroupQueryAttention", use_gate=True),
        ),
        (
            lambda: made("equinox.nn.MultiheadAttention", SQUARE, vo_size=5),
            rejects("module", qk_size=6, vo_size=5),
        ),
        (
            lambda: made("equinox.nn.MultiheadAttention", SQUARE, use_key_bias=False),
            rejects("q_proj, k_proj and v_proj", "['q_proj.bias', 'v_proj.bias']"),
        ),
    ],
)
def test_undescribed_layer_raises(make, input_error):
    """A layer that no specification describes raises an error in
    `spec_of`, `weights_of` and `load_into`.
    """
    layer = make()
    for function in (
        parity.spec_of,
        parity.weights_of,
        lambda layer: parity.load_into(layer, random_weights(SQUARE), SQUARE),
    ):
        with input_error:
            function(layer)


def test_wrapped_flax_projection_raises():
    """A projection of nnx inside LoRA raises an error that names its kernel."""
    module = made("flax.nnx.MultiHeadAttention", SQUARE)
    module.query = nnx.LoRA(24, 2, 24, base_module=module.query, rngs=nnx.Rngs(0))
    with rejects("tensors", "query.kernel"):
        parity.load_into(module, random_weights(SQUARE), SQUARE)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(3, 3),
        lambda: equinox.nn.Linear(3, 3, key=jax.random.key(0)),
        lambda: 3,
    ],
)
def test_unknown_module_raises_type_error(make):
    """A module that is not attention, or a number, raises a `TypeError`."""
    with rejects_type("module"):
        parity.weights_of(make())


def test_an_unknown_layer_has_no_adapter():
    """The adapter of an unknown layer raises an error that names the layer."""
    with rejects("a layer", "'nope'"):
        load_adapter("nope")


@pytest.mark.costly("modules that a new process imports")
@pytest.mark.thorough
def test_only_own_library_is_imported():
    """Reading and filling a layer of torch imports neither JAX, Flax, Keras nor Equinox."""
    program = """
import sys
import torch
import parity

layer = torch.nn.MultiheadAttention(8, 2)
parity.load_into(layer, parity.weights_of(layer), parity.spec_of(layer))
imported = {"jax", "flax", "keras", "equinox"} & set(sys.modules)
assert not imported, imported
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
