"""Invalid input raises an error in every public function before any work, with the argument's name
and the rule.

ttnn itself crashes the process for some of it. test_rope.py checks the errors of RoPE.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import numpy as np
import pytest
import ttnn
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample

import mha_tt
import parity
from mha_spec import Alibi, Latent, Norm, RelativeBias, RelativeProducts

SPEC = parity.AttentionSpec(8, 2)
ROPE_SPEC = parity.AttentionSpec(8, 2, rope=parity.Rope(100.0))
LATENT_SPEC = parity.AttentionSpec(
    8, 2, head_dim=6, latent=Latent(5, 2)
)  # (32 + 64) wide; heads 32 + 64, 32


@dataclass(frozen=True)
class Tensor:
    """A tensor of ones, created once a device is open."""

    shape: tuple[int, ...]
    dtype: ttnn.DataType = ttnn.bfloat16

    def __call__(self, device):
        return mha_tt.upload(np.ones(self.shape), device=device, dtype=self.dtype)


def ones(*shape):
    return Tensor(shape)


def wide(*shape):
    return Tensor(shape, ttnn.float32)


def booleans(*shape):
    return np.ones(shape, bool)


def lengths(*values):
    return np.array(values, np.int32)


def module(kind, spec):
    """Return a function that creates a module on a device."""
    return lambda device: getattr(mha_tt, kind)(spec, device=device)


def cache(*sizes, dtype=ttnn.bfloat16):
    """Return a function that creates a cache on a device."""
    return lambda device: mha_tt.init_cache(*sizes, dtype, device=device)


def latent_cache(*sizes, dtype=ttnn.bfloat16):
    """Return a function that creates a cache of latents on a device."""
    return lambda device: mha_tt.init_latent_cache(*sizes, dtype, device=device)


def weights(spec):
    """Return a function that uploads the weights of a layer to a device."""
    return lambda device: mha_tt.upload_weights(parity.random_weights(spec), spec, device=device)


def made(x, device):
    """Return a value, created on the device if it is a function, also within a dict."""
    if isinstance(x, dict):
        return {name: made(value, device) for name, value in x.items()}
    return x(device) if callable(x) else x


def rejected(device, function, keywords, input_error):
    """Call a function of the package, given by its name, or a module, and check its error."""
    function = attrgetter(function)(mha_tt) if isinstance(function, str) else function(device)
    keywords = made(keywords, device)
    with input_error:
        function(**keywords)


# ---- Operands that are not tensors on the device -------------------------------------------------

# Other types, ranks and kinds are tested in `test_annotations.py`.
KERNELS = {"": None, " with a kernel": lambda device: mha_tt.fused.attend}
CALLS = {
    # name: (function, valid keywords)
    "split_heads": ("split_heads", {"x": ones(2, 3, 64), "num_heads": 2}),
    "combine_heads": ("combine_heads", {"x": ones(2, 2, 3, 32)}),
    "repeat_kv_heads": ("repeat_kv_heads", {"x": ones(2, 2, 3, 32), "num_heads": 4}),
    "attention_scores": (
        "attention_scores",
        {"query": ones(2, 2, 3, 32), "key": ones(2, 2, 4, 32), "bias": ones(1, 1, 3, 4)},
    ),
    "masked_softmax": ("masked_softmax", {"scores": ones(2, 2, 3, 4)}),
    "attention_context": (
        "attention_context",
        {"attn_weights": ones(2, 2, 3, 4), "value": ones(2, 2, 4, 32)},
    ),
    "apply_rope": (
        "apply_rope",
        {"x": ones(2, 2, 3, 64), "positions": lengths(0, 1, 2)[None], "rope": parity.Rope()},
    ),
    **{
        f"scaled_dot_product_attention{suffix}": (
            "scaled_dot_product_attention",
            {
                "query": ones(2, 2, 3, 32),
                "key": ones(2, 2, 4, 32),
                "value": ones(2, 2, 4, 32),
                "bias": ones(1, 1, 3, 4),
                "kernel": kernel,
            },
        )
        for suffix, kernel in KERNELS.items()
    },
    "fused.attend_to_cache": (
        "fused.attend_to_cache",
        {
            "query": ones(1, 2, 2, 32),
            "keys": ones(2, 2, 32, 32),
            "values": ones(2, 2, 32, 32),
            "last_positions": lengths(3, 4),
        },
    ),
    "multi_head_attention": (
        "multi_head_attention",
        {
            "query": ones(2, 3, 8),
            "key": ones(2, 4, 8),
            "value": ones(2, 4, 8),
            "bias": ones(1, 1, 3, 4),
            "weights": weights(SPEC),
            "spec": SPEC,
        },
    ),
    "multi_head_attention_with_cache": (
        "multi_head_attention_with_cache",
        {"x": ones(2, 3, 8), "cache": cache(2, 2, 4, 4), "weights": weights(SPEC), "spec": SPEC},
    ),
    "append_to_cache": (
        "append_to_cache",
        {"cache": cache(2, 2, 4, 4), "key": ones(2, 2, 3, 32), "value": ones(2, 2, 3, 32)},
    ),
    "append_to_latent_cache": (
        "append_to_latent_cache",
        {"cache": latent_cache(2, 4, 5, 2), "latents": ones(2, 1, 3, 96)},
    ),
    "absorb_keys": (
        "absorb_keys",
        {"q": ones(2, 2, 3, 96), "kv_b": ones(32, 128), "spec": LATENT_SPEC},
    ),
    "absorb_values": (
        "absorb_values",
        {"context": ones(2, 2, 3, 32), "kv_b": ones(32, 128), "spec": LATENT_SPEC},
    ),
    "multi_head_latent_attention": (
        "multi_head_latent_attention",
        {
            "x": ones(2, 3, 8),
            "cache": latent_cache(2, 4, 5, 2),
            "weights": weights(LATENT_SPEC),
            "spec": LATENT_SPEC,
        },
    ),
    "MultiHeadAttention": (
        module("MultiHeadAttention", SPEC),
        {
            "query": ones(2, 3, 8),
            "key": ones(2, 4, 8),
            "value": ones(2, 4, 8),
            "bias": ones(1, 1, 3, 4),
        },
    ),
    "MultiHeadSelfAttention": (module("MultiHeadSelfAttention", SPEC), {"x": ones(2, 3, 8)}),
    "MultiHeadAttentionWithCache": (
        module("MultiHeadAttentionWithCache", SPEC),
        {"x": ones(2, 3, 8), "cache": cache(2, 2, 4, 4)},
    ),
    "MultiHeadLatentAttention": (
        module("MultiHeadLatentAttention", LATENT_SPEC),
        {"x": ones(2, 3, 8), "cache": latent_cache(2, 4, 5, 2)},
    ),
}
OPERANDS = [
    (call, name)
    for call, (_, keywords) in CALLS.items()
    for name, x in keywords.items()
    if isinstance(x, Tensor)
]
NOT_TENSORS = {
    # name: (replacement of a tensor of that shape, its error by argument name)
    "list": (
        lambda shape, device: np.ones(shape).tolist(),
        lambda name: rejects_type(name, "list"),
    ),
    "array": (
        lambda shape, device: np.ones(shape, np.float32),
        lambda name: rejects_type(name, "ndarray"),
    ),
    "host": (
        lambda shape, device: ttnn.Tensor(
            np.ones(shape, np.float32), ttnn.bfloat16, None, ttnn.TILE_LAYOUT
        ),
        lambda name: rejects_type(name, {f"{name}.storage_type()": ...}),
    ),
    "rows": (
        lambda shape, device: ttnn.to_device(
            ttnn.Tensor(np.ones(shape, np.float32), ttnn.bfloat16, None, ttnn.ROW_MAJOR_LAYOUT),
            device,
        ),
        lambda name: rejects_type(name, {f"{name}.layout": ...}),
    ),
    "integers": (
        lambda shape, device: ttnn.to_device(
            ttnn.Tensor(np.ones(shape, np.int32), ttnn.int32, None, ttnn.TILE_LAYOUT), device
        ),
        lambda name: rejects_type(f"{name}.dtype", {f"{name}.dtype": ...}),
    ),
}
IN_TILES = ("host", "rows")
"""Kinds of tensors that no annotation excludes."""
STEP_CALL = "fused.attend_to_cache"
"""Checked by hand: annotations have no names for the axes of pages."""


@pytest.mark.parametrize("call", CALLS)
def test_valid_calls_are_accepted(device, call):  # the control of all tests in this file
    """Control: the unmodified call of every function and module runs."""
    function, keywords = CALLS[call]
    function = attrgetter(function)(mha_tt) if isinstance(function, str) else function(device)
    function(**made(keywords, device))


BAD_OPERANDS = [
    (call, name, kind)
    for call, name in OPERANDS
    for kind in (NOT_TENSORS if call == STEP_CALL else IN_TILES)
]


@sample(30)
@pytest.mark.parametrize(("call", "name", "kind"), BAD_OPERANDS, ids=map(" ".join, BAD_OPERANDS))
def test_non_device_tensors_raise(device, call, name, kind):
    """Tensors on the host or in rows, and in a step also lists, arrays and integers, raise an
    error with the argument's name.
    """
    function, keywords = CALLS[call]
    make, input_error = NOT_TENSORS[kind]
    bad = make(keywords[name].shape, device)
    rejected(device, function, {**keywords, name: bad}, input_error(name))


@pytest.mark.parametrize("axes", ["fewer", "more", "one"])
@pytest.mark.parametrize("name", ["query", "keys", "values"])
def test_wrong_rank_in_a_step_raises(device, name, axes):
    """A tensor of a step with one axis more, one fewer or only one raises an error with its
    shape.
    """
    function, keywords = CALLS[STEP_CALL]
    shape = keywords[name].shape
    bad = {"fewer": shape[1:], "more": (1, *shape), "one": (8,)}[axes]
    rejected(
        device, function, {**keywords, name: ones(*bad)}, rejects(name, {f"{name}.shape": bad})
    )


# ---- Arrays --------------------------------------------------------------------------------------

ARRAYS = {
    "integers": (np.ones(3, np.int32), {}, rejects_type("array", dtype=...)),
    "list of integers": ([1, 2], {}, rejects_type("array", dtype=...)),
    "complex": (np.ones(3, complex), {}, rejects_type("array", dtype=...)),
    "text": (np.array(["a"]), {}, rejects_type("array", dtype=...)),
    "objects": (np.array([None]), {}, rejects_type("array", dtype=...)),
    "number": (1.0, {}, rejects("array", shape=())),
    "no dtype": (np.ones(3), {"dtype": None}, rejects_type("dtype", dtype=None)),
    "NumPy dtype": (np.ones(3), {"dtype": np.float32}, rejects_type("dtype", dtype=...)),
    "integer dtype": (np.ones(3), {"dtype": ttnn.int32}, rejects_type("dtype", dtype=...)),
    "narrower dtype": (np.ones(3), {"dtype": ttnn.bfloat4_b}, rejects_type("dtype", dtype=...)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_invalid_upload_raises(device, name):
    """Integers, complex numbers, text, scalars and unsupported dtypes raise an error in upload."""
    array, options, input_error = ARRAYS[name]
    with input_error:
        mha_tt.upload(array, device=device, **options)


@pytest.mark.parametrize("kind", ["list", "array", "host"])
def test_invalid_download_raises(device, kind):
    """Lists, arrays and tensors on the host raise an error in download."""
    make, input_error = NOT_TENSORS[kind]
    with input_error("tensor"):
        mha_tt.download(make((3, 5), device))


# ---- Weights -------------------------------------------------------------------------------------

LAYER_SPEC = parity.AttentionSpec(8, 2, d_in=6)
WEIGHTS = parity.random_weights(LAYER_SPEC)
UPLOADS = {
    "no spec": ({"spec": 2}, rejects_type("spec", spec=2)),
    "heads": (
        {"spec": parity.AttentionSpec(9, 3, d_in=6)},
        rejects("weights", "'q_proj.weight': (8, 6)"),
    ),
    "groups": (
        {"spec": parity.AttentionSpec(8, 2, num_kv_heads=1, d_in=6)},
        rejects("weights", "'k_proj.weight': (8, 6)"),
    ),
    "dtype": ({"dtype": np.float32}, rejects_type("dtype", dtype=...)),
    "NaN": (
        {"weights": {**WEIGHTS, "q_proj.bias": np.array([math.nan] * 8)}},
        rejects("weights", "NaN or infinities in ['q_proj.bias']"),
    ),
    "beyond float32": (
        {"weights": {**WEIGHTS, "out_proj.weight": np.full((8, 8), 1e300)}},
        rejects("weights", "NaN or infinities in ['out_proj.weight']"),
    ),
    "infinity": (
        {"weights": {**WEIGHTS, "out_proj.bias": np.array([math.inf] * 8)}},
        rejects("weights", "NaN or infinities in ['out_proj.bias']"),
    ),
    "no axis": (
        {"weights": {**WEIGHTS, "k_proj.bias": np.float32(1.0)}},
        rejects("weights", "'k_proj.bias': ()"),
    ),
}


@pytest.mark.parametrize("name", UPLOADS)
def test_invalid_weights_in_upload_raise(device, name):
    """Weights that do not fit the spec, or are NaN or infinite in float32, raise an error in
    upload_weights.
    """
    keywords, input_error = UPLOADS[name]
    with input_error:
        mha_tt.upload_weights(
            **{"weights": WEIGHTS, "spec": LAYER_SPEC, "device": device, **keywords}
        )


OTHER_SPECS = {
    # name: (wrong specification of the layer, its error)
    "number": (2, rejects_type("spec", spec=2)),
    "heads": (
        parity.AttentionSpec(9, 3, d_in=6),
        rejects("q_proj.weight", {"q_proj.weight.shape": (6, 64)}),
    ),
    "groups": (
        parity.AttentionSpec(8, 2, num_kv_heads=1, d_in=6),
        rejects("k_proj.weight", {"k_proj.weight.shape": (6, 64)}),
    ),
    "head_dim": (
        parity.AttentionSpec(8, 2, head_dim=33, d_in=6),
        rejects("q_proj.weight", {"q_proj.weight.shape": (6, 64)}),
    ),
    # With RoPE, each half of a head begins at a tile, so a head of 4 features takes 64 slots
    # instead of 32.
    "rope": (
        parity.AttentionSpec(8, 2, d_in=6, rope=parity.Rope()),
        rejects("q_proj.weight", {"q_proj.weight.shape": (6, 64)}),
    ),
    "no out_proj": (
        parity.AttentionSpec(8, 2, d_in=6, out_proj=False),
        rejects("weights", missing=[], unexpected=["out_proj.bias", "out_proj.weight"]),
    ),
    "no bias": (
        parity.AttentionSpec(8, 2, d_in=6, qkv_bias=False),
        rejects("weights", missing=[], unexpected=["k_proj.bias", "q_proj.bias", "v_proj.bias"]),
    ),
    "packed": (
        parity.AttentionSpec(8, 2, d_in=6, fused_qkv=True),
        rejects("weights", missing=["qkv_proj.bias", "qkv_proj.weight"], unexpected=...),
    ),
}
every_other_spec = pytest.mark.parametrize("name", OTHER_SPECS)


@every_other_spec
def test_download_with_other_spec_raises(device, name):
    """Downloading weights with the spec of a different layer raises an error."""
    spec, input_error = OTHER_SPECS[name]
    with input_error:
        mha_tt.download_weights(weights(LAYER_SPEC)(device), spec)


@pytest.mark.parametrize(
    ("changed", "input_error"),
    [
        ({"q_proj.weight": np.ones((6, 8))}, rejects("weights", "'q_proj.weight': (6, 8)")),
        ({"o_proj.weight": np.ones((8, 8))}, rejects("weights", "'o_proj.weight': (8, 8)")),
        ({"q_proj.bias": np.ones(7)}, rejects("weights", "'q_proj.bias': (7,)")),
        (
            {"k_proj.weight": np.full((8, 6), math.nan)},
            rejects("weights", "NaN or infinities in ['k_proj.weight']"),
        ),
    ],
    ids=["transposed", "other name", "bias", "NaN"],
)
def test_rejected_weights_change_no_module(device, changed, input_error):
    """Weights that do not fit a module raise an error, and the module keeps its weights."""
    layer = mha_tt.MultiHeadAttention(LAYER_SPEC, device=device)
    before = layer.weights
    with input_error:
        layer.load_weights({**WEIGHTS, **changed})
    assert layer.weights is before


@pytest.mark.parametrize("missing", list(WEIGHTS))
def test_missing_weight_raises(device, missing):
    """Loading weights without one of them raises an error that lists all shapes."""
    layer = mha_tt.MultiHeadAttention(LAYER_SPEC, device=device)
    shapes = {name: weight.shape for name, weight in WEIGHTS.items() if name != missing}
    with rejects("weights", str(shapes)):
        layer.load_weights({name: weight for name, weight in WEIGHTS.items() if name != missing})


HELD = {f"{name}_proj.weight": ones(6, 64) for name in "qkv"} | {
    f"{name}_proj.bias": ones(1, 64) for name in "qkv"
}
HELD |= {"out_proj.weight": ones(64, 8), "out_proj.bias": ones(1, 8)}


BAD_WEIGHTS = {
    "array": (
        {**HELD, "q_proj.weight": np.ones((6, 64))},
        rejects_type("q_proj.weight", "ndarray"),
    ),
    "wider": (
        {**HELD, "k_proj.weight": wide(6, 64)},
        rejects_type("k_proj.weight", "DataType.FLOAT32 and DataType.BFLOAT16"),
    ),
    "wider bias": (
        {**HELD, "v_proj.bias": wide(1, 64)},
        rejects_type("v_proj.bias", "DataType.FLOAT32 and DataType.BFLOAT16"),
    ),
}
X = ones(2, 3, 6)
FUNCTIONS = {
    "plain": ("multi_head_attention", {"query": X, "need_weights": True}),
    "fused": ("multi_head_attention", {"query": X}),
    "cached": ("multi_head_attention_with_cache", {"x": X, "cache": cache(2, 2, 4, 4)}),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS)


@every_function
@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_function_rejects_other_weights(device, name, function):
    """An array among the weights, or a weight of the wrong dtype, raises an error in every
    function.
    """
    weights, input_error = BAD_WEIGHTS[name]
    function, keywords = FUNCTIONS[function]
    rejected(device, function, {**keywords, "weights": weights, "spec": LAYER_SPEC}, input_error)


@every_function
@pytest.mark.parametrize("name", ["head_dim", "rope", "packed"])
def test_function_rejects_tiles_of_others(device, name, function):
    """A spec raises an error in every function if its heads take other tiles than the weights
    have.
    """
    spec, input_error = OTHER_SPECS[name]
    function, keywords = FUNCTIONS[function]
    rejected(device, function, {**keywords, "weights": HELD, "spec": spec}, input_error)


# ---- Configurations ------------------------------------------------------------------------------

# Invalid specifications are tested in `jax_and_torch/test_bad_input.py`.
CONFIGS = {
    "number": ({"spec": 8}, rejects_type("spec", spec=8)),
    "keywords": ({"spec": {"d_model": 8, "num_heads": 2}}, rejects_type("spec", spec=...)),
    "dtype": ({"dtype": np.float32}, rejects_type("dtype", dtype=...)),
    "dtype None": ({"dtype": None}, rejects_type("dtype", dtype=None)),
    "weight_dtype": ({"weight_dtype": ttnn.int32}, rejects_type("weight_dtype", weight_dtype=...)),
    "device": ({"device": 0}, rejects_type("device", "int", hint="open_device")),
    "rng": ({"rng": 0}, rejects_type("rng", "int", hint="default_rng")),
}


@pytest.mark.parametrize(
    "kind", ["MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache"]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_invalid_module_configuration_raises(device, kind, name):
    """Specs other than an AttentionSpec, unsupported dtypes, and a number instead of a device or a
    random generator raise an error in modules.
    """
    keywords, input_error = CONFIGS[name]
    with input_error:
        getattr(mha_tt, kind)(**{"spec": SPEC, "device": device, **keywords})


# ---- Stages --------------------------------------------------------------------------------------

HEADS = ones(2, 2, 3, 32)
RELATIVE = parity.AttentionSpec(8, 2, relative_bias=RelativeBias(8, 8))
PRODUCTS = parity.AttentionSpec(8, 2, relative_products=RelativeProducts(1, 2))
STAGES = {
    "scores head_dim": (
        "attention_scores",
        {"query": HEADS, "key": HEADS, "spec": parity.AttentionSpec(66, 2)},
        rejects("query", {"query.shape": (2, 2, 3, 32)}),
    ),
    "scores relative bias heads": (
        "attention_scores",
        {
            "query": HEADS,
            "key": HEADS,
            "spec": RELATIVE,
            "learned": {"relative_bias": ones(1, 8, 1, 2)},
        },
        rejects("relative_bias", {"relative_bias.shape": (1, 8, 1, 2)}),
    ),
    "scores learned": (
        "attention_scores",
        {"query": HEADS, "key": HEADS, "learned": "x"},
        rejects_type("learned", "str"),
    ),
    "softmax tensor mask": (
        "masked_softmax",
        {"scores": HEADS, "mask": ones(3, 32)},
        rejects_type("mask", "Tensor"),
    ),
    "context groups": (
        "attention_context",
        {"attn_weights": ones(2, 3, 3, 3), "value": HEADS},
        rejects("num_heads", num_heads=3, num_kv_heads=2),
    ),
    "norm of rows": (
        "apply_norm",
        {
            "x": lambda device: NOT_TENSORS["rows"][0]((2, 2, 3, 32), device),
            "norm": Norm(weight=None),
        },
        rejects_type("x", {"x.layout": ...}),
    ),
    "dropout of float32": (
        "apply_dropout",
        {"attn_weights": wide(2, 2, 3, 32), "rate": 0.5},
        rejects_type("attn_weights", dtype=...),
    ),
    "dropout of bfloat8_b": (
        "apply_dropout",
        {"attn_weights": replace(HEADS, dtype=ttnn.bfloat8_b), "rate": 0.5},
        rejects_type("attn_weights", dtype=...),
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_stage_rejects_what_tiles_lack(device, name):
    """Each stage raises an error for dtypes and shapes that only tiles have."""
    rejected(device, *STAGES[name])


def test_scores_need_no_sinks(device):
    """Scores are those before the softmax, which has the sinks: a spec with sinks needs none in
    `learned`.
    """
    query = HEADS(device)
    scores = mha_tt.attention_scores(query, query, spec=parity.AttentionSpec(64, 2, sinks=True))
    assert tuple(scores.shape) == (2, 2, 3, 3)


# ---- Attention of split heads --------------------------------------------------------------------

DOT_PRODUCTS = {
    "head_dim beyond": (
        {"spec": parity.AttentionSpec(66, 2)},
        rejects("query", {"query.shape": (2, 2, 3, 32)}),
    ),
    "mask tensor": ({"mask": ones(3, 3)}, rejects_type("mask", "Tensor")),
    "DeviceMask keys": (
        {"mask": lambda device: mha_tt.DeviceMask(booleans(3, 4), device=device)},
        rejects("mask", {"mask.shape": (1, 1, 3, 4)}),
    ),
    "bias on the device": ({"bias": ones(3, 4)}, rejects("bias", {"bias.shape": (3, 4)})),
    "wider bias": (
        {"bias": wide(3, 3)},
        rejects_type("bias", {"bias.dtype": ..., "query.dtype": ...}),
    ),
    "bias of blocks": (
        {"bias": Tensor((3, 3), ttnn.bfloat8_b)},
        rejects_type("bias", {"bias.dtype": ..., "query.dtype": ...}),
    ),
}
SPLIT = {"query": HEADS, "key": HEADS, "value": HEADS}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=["plain", "fused"])
@pytest.mark.parametrize("name", DOT_PRODUCTS)
def test_dot_products_reject_bad_tiles(device, name, kernel):
    """Attention of split heads raises an error for masks, biases and widths of tiles that do not
    fit.
    """
    keywords, input_error = DOT_PRODUCTS[name]
    rejected(
        device, "scaled_dot_product_attention", {**SPLIT, "kernel": kernel, **keywords}, input_error
    )


def test_kernels_have_their_own_arithmetic(device):
    """Attention of split heads raises an error for an arithmetic in addition to a kernel."""
    keywords = {
        **SPLIT,
        "kernel": KERNELS[" with a kernel"],
        "compute_kernel_config": mha_tt.fast_config,
    }
    rejected(
        device,
        "scaled_dot_product_attention",
        keywords,
        rejects("compute_kernel_config", "a configuration"),
    )


STEP = {
    "query": ones(1, 2, 2, 32),
    "keys": ones(2, 2, 32, 32),
    "values": ones(2, 2, 32, 32),
    "last_positions": lengths(3, 4),
}
SINKS_SPEC = parity.AttentionSpec(64, 2, sinks=True)
STEPS = {
    "float32": ({"query": wide(1, 2, 2, 32)}, rejects_type("query", "query.dtype=float32")),
    "float32 cache": ({"keys": wide(2, 2, 32, 32)}, rejects_type("keys", "keys.dtype=float32")),
    "features": ({"query": ones(1, 2, 2, 16)}, rejects("heads", {"query.shape": (1, 2, 2, 16)})),
    "width": (
        {
            "query": ones(1, 2, 2, 160),
            "keys": ones(2, 2, 32, 160),
            "values": ones(2, 2, 32, 160),
        },
        rejects("heads", {"query.shape": (1, 2, 2, 160), "keys.shape": (2, 2, 32, 160)}),
    ),
    "head_dim": (
        {"spec": parity.AttentionSpec(80, 2)},
        rejects("query", {"query.shape": (1, 2, 2, 32)}),
    ),
    "soft cap": ({"spec": parity.AttentionSpec(64, 2, soft_cap=1.0)}, rejects("spec", spec=...)),
    "alibi": (
        {"spec": parity.AttentionSpec(64, 2, alibi=Alibi())},
        rejects("spec", spec=...),
    ),
    "batch": (
        {"query": ones(1, 3, 2, 32)},
        rejects("query", {"query.shape": (1, 3, 2, 32), "keys.shape": (2, 2, 32, 32)}),
    ),
    "value slots": (
        {"values": ones(2, 2, 64, 32)},
        rejects("values", {"values.shape": (2, 2, 64, 32), "keys.shape": (2, 2, 32, 32)}),
    ),
    "groups": ({"query": ones(1, 2, 3, 32)}, rejects("num_heads", num_heads=3, num_kv_heads=2)),
    "slots": (
        {"keys": ones(2, 2, 40, 32), "values": ones(2, 2, 40, 32)},
        rejects("keys", {"keys.shape": (2, 2, 40, 32)}),
    ),
    "too few positions": (
        {"last_positions": lengths(3)},
        rejects("last_positions", {"last_positions.shape": (1,)}),
    ),
    "position beyond": (
        {"last_positions": lengths(3, 32)},
        rejects("last_positions", last_positions=[3, 32]),
    ),
    "float positions": (
        {"last_positions": np.array([3.0, 4.0])},
        rejects_type("last_positions", {"last_positions.dtype": ...}),
    ),
    "sinks": (
        {"spec": SINKS_SPEC, "learned": {"sinks": ones(1, 3, 1, 1)}},
        rejects("sinks", {"sinks.shape": (1, 3, 1, 1)}),
    ),
    "array of sinks": (
        {"spec": SINKS_SPEC, "learned": {"sinks": np.ones((1, 2, 1, 1))}},
        rejects_type("sinks", "ndarray"),
    ),
    "no sinks": ({"spec": SINKS_SPEC}, rejects("learned", missing=["sinks"], unexpected=[])),
}


@pytest.mark.parametrize("name", STEPS)
def test_invalid_step_arguments_raise(device, name):
    """Wrong shapes, dtypes, slots, positions and sinks raise an error in attend_to_cache."""
    keywords, input_error = STEPS[name]
    rejected(device, "fused.attend_to_cache", {**STEP, **keywords}, input_error)


# ---- Layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [{"dropout": 0.5}, {"output_dropout": 0.5}], ids=str)
@pytest.mark.parametrize(
    "kind", ["MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache"]
)
def test_float32_training_raises_before_work(device, calls, kind, rates):
    """Dropout in float32 raises an error before any operation runs."""
    layer = getattr(mha_tt, kind)(replace(SPEC, **rates), device=device, dtype=ttnn.float32)
    inputs = [wide(2, 3, 8)(device)]
    inputs += [layer.init_cache(2, 4)] if kind.endswith("Cache") else []
    calls.clear()
    with rejects_type("the module", dtype=...):
        layer(*inputs)
    assert calls == []


OTHER_DTYPES = {
    "wider": (ttnn.bfloat16, ttnn.float32),
    "narrower": (ttnn.float32, ttnn.bfloat16),
    "blocks": (ttnn.bfloat16, ttnn.bfloat8_b),
}


@pytest.mark.parametrize("name", OTHER_DTYPES)
@pytest.mark.parametrize(
    "kind", ["MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache"]
)
def test_input_of_other_dtype_raises(device, kind, name):
    """An input in a different dtype than the module's raises an error."""
    dtype, other = OTHER_DTYPES[name]
    layer = getattr(mha_tt, kind)(SPEC, device=device, dtype=dtype)
    inputs = [Tensor((2, 3, 8), other)(device)]
    inputs += [layer.init_cache(2, 4)] if kind.endswith("Cache") else []
    with rejects_type("…", dtype=dtype):
        layer(*inputs)


BAD_CALLS = {
    "width": ({"query": ones(2, 3, 7)}, rejects("query", {"query.shape": (2, 3, 7)})),
    "mask": ({"mask": booleans(3, 4)}, rejects("mask", {"mask.shape": (3, 4)})),
    "segments": (
        {"segment_ids": np.zeros((2, 4), int)},
        rejects("segment_ids", {"segment_ids.shape": (2, 4)}),
    ),
    "bias": ({"bias": ones(3, 4)}, rejects("bias", {"bias.shape": (3, 4)})),
    "wider bias": (
        {"bias": wide(3, 3)},
        rejects_type("bias", {"bias.dtype": ..., "query.dtype": ...}),
    ),
    "lengths": (
        {"key_padding_lengths": [3, 4]},
        rejects("key_padding_lengths", key_padding_lengths=[3, 4]),
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_raise_before_work(device, calls, name):
    """Inputs that do not fit a layer raise an error before any operation runs."""
    keywords, input_error = BAD_CALLS[name]
    layer = mha_tt.MultiHeadAttention(SPEC, device=device)
    keywords = made({"query": ones(2, 3, 8), **keywords}, device)
    calls.clear()
    with input_error:
        layer(**keywords)
    assert calls == []


BAD_STEPS = {
    "width": ({"x": ones(2, 3, 7)}, rejects("x", {"x.shape": (2, 3, 7)})),
    "mask": ({"mask": booleans(3, 3)}, rejects("mask", {"mask.shape": (3, 3)})),
    "bias": ({"bias": ones(3, 3)}, rejects("bias", {"bias.shape": (3, 3)})),
    "room": ({"x": ones(2, 33, 8)}, rejects("lengths + new tokens")),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_bad_steps_raise_before_work(device, calls, name):
    """Inputs that do not fit a layer with a cache raise an error before any operation runs."""
    keywords, input_error = BAD_STEPS[name]
    layer = mha_tt.MultiHeadAttentionWithCache(SPEC, device=device)
    keywords = made({"x": ones(2, 3, 8), **keywords}, device) | {"cache": layer.init_cache(2, 32)}
    calls.clear()
    with input_error:
        layer(**keywords)
    assert calls == []


SHARED_SPEC = parity.AttentionSpec(8, 2, shared_kv=True)


@pytest.mark.parametrize("name", ["key", "value"])
def test_shared_kv_has_dtype_of_query(device, name):
    """Keys or values of another layer in float32 raise an error for bfloat16 queries."""
    keywords = {
        "query": ones(2, 3, 8),
        "key": ones(2, 2, 4, 32),
        "value": ones(2, 2, 4, 32),
        name: wide(2, 2, 4, 32),
    }
    input_error = rejects_type(name, {f"{name}.dtype": ..., "query.dtype": ...})
    rejected(device, module("MultiHeadAttention", SHARED_SPEC), keywords, input_error)


def test_input_of_projection_names_it(device):
    """A projection raises an error with its name for an input that does not fit its weight."""
    project = mha_tt.project_with(weights(SPEC)(device), SPEC)
    with rejects("the input of k_proj", shape=(2, 3, 7)):
        project("k_proj", ones(2, 3, 7)(device))


# ---- Masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "input_error"),
    [
        (None, rejects_type("mask", "NoneType")),
        ([[True]], rejects_type("mask", "list")),
        (np.ones((3, 3)), rejects_type("mask", {"mask.dtype": ...})),
        (np.ones((3, 3), int), rejects_type("mask", {"mask.dtype": ...})),
        (booleans(1, 1, 1, 3, 3), rejects("mask", {"mask.shape": (1, 1, 1, 3, 3)})),
    ],
    ids=["None", "list", "float", "integers", "5 axes"],
)
def test_invalid_device_mask_raises(device, mask, input_error):
    """None, lists, numbers and five axes raise an error in DeviceMask."""
    with input_error:
        mha_tt.DeviceMask(mask, device=device)


EMPTY_MASKS = {
    "causal": ("create_causal_mask", (0,), {}, rejects("seq_len_q", seq_len_q=0)),
    "causal keys": ("create_causal_mask", (2, 0), {}, rejects("seq_len_k", seq_len_k=0)),
    "padding": ("create_padding_mask", ([0], 0), {}, rejects("seq_len_k", seq_len_k=0)),
    "attention": ("create_attention_mask", (0,), {}, rejects("seq_len_q", seq_len_q=0)),
    "cached": ("create_causal_mask_with_cache", (0, 2, 2), {}, rejects("seq_len_q", seq_len_q=0)),
    "window": (
        "create_sliding_window_mask",
        (0,),
        {"window_size": 1},
        rejects("seq_len_q", seq_len_q=0),
    ),
    "slots": ("create_cache_mask", (lengths(1), 0, 4), {}, rejects("seq_len_q", seq_len_q=0)),
}


@pytest.mark.parametrize("name", EMPTY_MASKS)
def test_empty_masks_raise(name):
    """A mask without queries or keys raises an error."""
    function, args, keywords, input_error = EMPTY_MASKS[name]
    with input_error:
        getattr(mha_tt, function)(*args, **keywords)


def test_device_mask_of_device_mask_raises(device):
    """A DeviceMask cannot be created from another one."""
    mask = mha_tt.DeviceMask(booleans(3, 3), device=device)
    with rejects_type("mask", "DeviceMask"):
        mha_tt.DeviceMask(mask, device=device)


# ---- Caches --------------------------------------------------------------------------------------

SIZES = {"batch_size": 2, "num_kv_heads": 2, "capacity": 4, "head_dim": 4}
NBYTES = {"batch_size": 1, "num_kv_heads": 2, "capacity": 3, "head_dim": 4, "num_layers": 5}


@pytest.mark.parametrize("dtype", [np.float32, ttnn.int32, ttnn.bfloat4_b, None], ids=str)
def test_invalid_cache_dtype_raises(device, dtype):
    """Dtypes that caches do not support raise an error in init_cache."""
    with rejects_type("dtype", dtype=dtype):
        mha_tt.init_cache(**SIZES, dtype=dtype, device=device)


def test_invalid_cache_device_raises():
    """A number instead of a device raises an error in init_cache."""
    with rejects_type("device", "int", hint="open_device"):
        mha_tt.init_cache(**SIZES, device=0)


@pytest.mark.parametrize("dtype", [np.float32, ttnn.int32], ids=str)
def test_invalid_dtype_for_nbytes_raises(dtype):
    """Dtypes that caches do not support raise an error in kv_cache_nbytes."""
    with rejects_type("dtype", dtype=dtype):
        mha_tt.kv_cache_nbytes(**NBYTES, dtype=dtype)


CHANGES = {
    "reorder beyond": ("reorder", ([0, 2],), rejects("indices", indices=[0, 2])),
    "reorder negative": ("reorder", ([-1],), rejects("indices", indices=[-1])),
    "reorder floats": ("reorder", ([0.0],), rejects_type("indices", {"indices.dtype": ...})),
    "reorder a number": ("reorder", (0,), rejects("indices", {"indices.shape": ()})),
    "repeat 0": ("repeat", (0,), rejects("repeats", repeats=0)),
    "repeat float": ("repeat", (2.0,), rejects_type("repeats", repeats=2.0)),
    "grow less": ("grow", (3,), rejects("capacity", capacity=3)),
    "grow float": ("grow", (5.0,), rejects_type("capacity", capacity=5.0)),
    "crop to more": ("crop", (1,), rejects("lengths", "lengths=[1, 1] and [0, 0]")),
    "crop beyond": ("crop", ([5, 0],), rejects("lengths", lengths=[5, 0])),
    "crop negative": ("crop", ([-1, 0],), rejects("lengths", lengths=[-1, 0])),
    "crop too few": ("crop", ([0],), rejects("lengths", {"lengths.shape": (1,)})),
    "crop floats": ("crop", ([0.0, 0.0],), rejects_type("lengths", {"lengths.dtype": ...})),
    "crop a boolean": ("crop", (True,), rejects_type("lengths", {"lengths.dtype": ...})),
}


@pytest.mark.parametrize("name", CHANGES)
def test_invalid_cache_changes_raise(device, name):
    """Invalid indices, repeats, capacities and lengths raise an error in the methods of a cache."""
    method, args, input_error = CHANGES[name]
    cache = mha_tt.init_cache(2, 2, 4, 4, device=device)
    with input_error:
        getattr(cache, method)(*args)


CACHED = {
    "batch": (
        {"x": ones(3, 3, 8)},
        rejects("x", {"x.shape": ..., "cache.lengths.shape": (2,)}),
    ),
    "too many tokens": (
        {"x": ones(2, 5, 8)},
        rejects("lengths + new tokens", lengths=[0, 0], new_lengths=[5, 5]),
    ),
    "no cache": ({"cache": None}, rejects_type("cache", "NoneType")),
    "cache heads": (
        {"cache": cache(2, 1, 4, 4)},
        rejects("cache.keys", {"cache.keys.shape": (2, 1, 32, 32)}),
    ),
    "cache head_dim": (
        {"cache": cache(2, 2, 4, 40)},
        rejects("cache.keys", {"cache.keys.shape": (2, 2, 32, 64)}),
    ),
    "cache dtype": (
        {"cache": cache(2, 2, 4, 4, dtype=ttnn.float32)},
        rejects_type("x", {"x.dtype": ..., "cache.keys.dtype": ...}),
    ),
    "new_lengths too long": ({"new_lengths": [4, 1]}, rejects("new_lengths", new_lengths=[4, 1])),
}
# The same with one token instead of 3, because single tokens are written differently.
CACHED_STEPS = {
    "cache heads": CACHED["cache heads"],
    "cache head_dim": CACHED["cache head_dim"],
    "cache dtype": CACHED["cache dtype"],
    "batch": ({"x": ones(3, 1, 8)}, *CACHED["batch"][1:]),
    "mask of too many": ({"mask": booleans(2, 4)}, rejects("mask", {"mask.shape": (2, 4)})),
    "new_lengths too long": ({"new_lengths": [2, 1]}, rejects("new_lengths", new_lengths=[2, 1])),
}
CACHED_CALLS = {f"{name}-1": (1, *row) for name, row in CACHED_STEPS.items()}
CACHED_CALLS["cache dtype-3"] = (3, *CACHED["cache dtype"])
every_cached_call = pytest.mark.parametrize("name", CACHED_CALLS)


@every_cached_call
def test_static_step_rejects_bad_input(device, name):
    """The function with a cache of fixed size raises an error for a step that does not fit."""
    seq_len, keywords, input_error = CACHED_CALLS[name]
    options = {"weights": weights(SPEC), "spec": SPEC}
    keywords = {"x": ones(2, seq_len, 8), "cache": cache(2, 2, 4, 4), **keywords, **options}
    rejected(device, "multi_head_attention_with_cache", keywords, input_error)


@every_cached_call
def test_module_step_rejects_bad_input(device, name):
    """A module with a cache raises an error for a step that does not fit."""
    seq_len, keywords, input_error = CACHED_CALLS[name]
    keywords = {"x": ones(2, seq_len, 8), "cache": cache(2, 2, 4, 4), **keywords}
    rejected(device, module("MultiHeadAttentionWithCache", SPEC), keywords, input_error)


# ---- Latents -------------------------------------------------------------------------------------

LATENTS = {
    "keys and values": ({"cache": cache(2, 2, 4, 4)}, rejects_type("cache", "KVCache")),
    "no cache": ({"cache": None}, rejects_type("cache", "NoneType")),
    "kv_rank": (
        {"cache": latent_cache(2, 4, 33, 2)},
        rejects("cache.latents", {"cache.latents.shape": (2, 1, 32, 128)}),
    ),
    "batch": (
        {"x": ones(3, 3, 8)},
        rejects("x", {"x.shape": ..., "cache.lengths.shape": (2,)}),
    ),
    "too many tokens": (
        {"x": ones(2, 5, 8)},
        rejects("lengths + new tokens", lengths=[0, 0], new_lengths=[5, 5]),
    ),
    "dtype": (
        {"cache": latent_cache(2, 4, 5, 2, dtype=ttnn.float32)},
        rejects_type("x", {"x.dtype": ..., "cache.latents.dtype": ...}),
    ),
    "mask of the tokens only": ({"mask": booleans(3, 3)}, rejects("mask", {"mask.shape": (3, 3)})),
    "too few positions without RoPE": (
        {"positions": lengths(0, 1)[None]},
        rejects("positions", {"positions.shape": (1, 2)}),
    ),
}
BESIDE_LATENTS = {
    # name: (function, keywords, error)
    "spec without latents": (
        "multi_head_latent_attention",
        {
            "x": ones(2, 3, 8),
            "cache": latent_cache(2, 4, 5, 2),
            "weights": weights(SPEC),
            "spec": SPEC,
        },
        rejects("spec", spec=...),
    ),
    "latents for keys and values": (
        module("MultiHeadAttentionWithCache", SPEC),
        {"x": ones(2, 3, 8), "cache": latent_cache(2, 4, 5, 2)},
        rejects_type("cache", "LatentCache"),
    ),
    "a key": (
        module("MultiHeadAttention", LATENT_SPEC),
        {"query": ones(2, 3, 8), "key": ones(2, 4, 8)},
        rejects("key"),
    ),
    "appended width": (
        "append_to_latent_cache",
        {"cache": latent_cache(2, 4, 5, 2), "latents": ones(2, 1, 3, 64)},
        rejects("cache.latents", {"cache.latents.shape": (2, 1, 32, 96)}),
    ),
    "expanded width": (
        "expand_latents",
        {"project": None, "latents": ones(2, 1, 3, 64), "spec": LATENT_SPEC},
        rejects("latents", {"latents.shape": (2, 1, 3, 64)}),
    ),
    "absorbed weight": (
        "absorb_keys",
        {"q": ones(2, 2, 3, 96), "kv_b": ones(32, 96), "spec": LATENT_SPEC},
        rejects("kv_b", {"kv_b.shape": (32, 96)}),
    ),
    "absorbed heads": (
        "absorb_values",
        {"context": ones(2, 3, 3, 32), "kv_b": ones(32, 128), "spec": LATENT_SPEC},
        rejects("context", {"context.shape": (2, 3, 3, 32)}),
    ),
    **{
        f"{name} of 0": (
            lambda device: partial(mha_tt.init_latent_cache, device=device),
            {"batch_size": 2, "capacity": 4, "kv_rank": 5, "rope_dim": 2, name: 0},
            rejects(name),
        )
        for name in ("capacity", "kv_rank", "rope_dim")
    },
}


@pytest.mark.parametrize("name", LATENTS)
@pytest.mark.parametrize("is_module", [False, True], ids=["function", "module"])
def test_invalid_latent_arguments_raise(device, is_module, name):
    """Caches, inputs, masks and positions that do not fit raise an error in latent attention."""
    keywords, input_error = LATENTS[name]
    function = (
        module("MultiHeadLatentAttention", LATENT_SPEC)
        if is_module
        else "multi_head_latent_attention"
    )
    options = {} if is_module else {"weights": weights(LATENT_SPEC), "spec": LATENT_SPEC}
    keywords = {"x": ones(2, 3, 8), "cache": latent_cache(2, 4, 5, 2), **keywords, **options}
    rejected(device, function, keywords, input_error)


@pytest.mark.parametrize("name", BESIDE_LATENTS)
def test_invalid_latent_helpers_raise(device, name):
    """Widths, weights, heads and caches that do not fit latents raise an error in functions and
    modules.
    """
    function, keywords, input_error = BESIDE_LATENTS[name]
    rejected(device, function, keywords, input_error)


# ---- Before any work -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["too many tokens", "no cache", "new_lengths too long", "batch"])
def test_failed_call_runs_nothing(device, calls, name):
    """A rejected call of a module with a cache runs no operation on the device."""
    keywords, input_error = CACHED[name]
    layer = mha_tt.MultiHeadAttentionWithCache(SPEC, device=device)
    keywords = made({"x": ones(2, 3, 8), "cache": cache(2, 2, 4, 4), **keywords}, device)
    calls.clear()
    with input_error:
        layer(**keywords)
    assert calls == []


@pytest.mark.parametrize("name", ["too many tokens", "no cache", "kv_rank", "batch"])
def test_failed_latent_call_runs_nothing(device, calls, name):
    """A rejected call over latents runs no operation on the device."""
    keywords, input_error = LATENTS[name]
    layer = mha_tt.MultiHeadLatentAttention(LATENT_SPEC, device=device)
    keywords = made({"x": ones(2, 3, 8), "cache": latent_cache(2, 4, 5, 2), **keywords}, device)
    calls.clear()
    with input_error:
        layer(**keywords)
    assert calls == []
