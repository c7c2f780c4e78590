"""Invalid input raises an error with the argument's name and the rule, before any work, in every
function.
"""

import math

import numpy as np
import pytest
from flax import nnx
from helpers.input_errors import rejects, rejects_type

import parity
from mha_spec import AttentionSpec, Rope

ONLY_TORCH = pytest.mark.parametrize("sibling", ["torch"], indirect=True)


def ones(*shape):
    return np.ones(shape, np.float32)


def booleans(*shape):
    return np.ones(shape, np.bool_)


def integers(*shape):
    return np.ones(shape, np.int32)


def halves(*shape):
    return np.ones(shape, np.float16)


def lengths(*values):
    return np.array(values, np.int32)


def converted(sibling, x):
    """Return arrays of the framework, weights of it for a dict by canonical name, and the result of
    a function.
    """
    if isinstance(x, np.ndarray):
        return sibling.array(x)
    if callable(x):
        return x(sibling)
    if not isinstance(x, dict):
        return x
    if sibling.name == "torch":
        return {name: sibling.array(array) for name, array in x.items()}
    tree = {}
    for name, array in x.items():
        projection, leaf = name.split(".")
        tree.setdefault(projection, {})["kernel" if leaf == "weight" else "bias"] = sibling.array(
            array.T
        )
    return tree


def rejected(sibling, function, args, keywords, input_error):
    """Call a function of the package and expect the error."""
    for part in function.split("."):
        function = getattr(sibling.package if isinstance(function, str) else function, part)
    args = [converted(sibling, x) for x in args]
    keywords = {name: converted(sibling, x) for name, x in keywords.items()}
    with input_error:
        function(*args, **keywords)


# ---- Configurations ------------------------------------------------------------------------------

CONFIGS = {
    "d_model 0": ({"d_model": 0}, rejects("d_model", d_model=0)),
    "d_model negative": ({"d_model": -8}, rejects("d_model", d_model=-8)),
    "d_model float": ({"d_model": 8.0}, rejects_type("d_model", d_model=8.0)),
    "d_model text": ({"d_model": "8"}, rejects_type("d_model", d_model="8")),
    "num_heads 0": ({"num_heads": 0}, rejects("num_heads", num_heads=0)),
    "num_heads True": ({"num_heads": True}, rejects_type("num_heads", num_heads=True)),
    "num_heads None": ({"num_heads": None}, rejects_type("num_heads", num_heads=None)),
    "num_heads not dividing": (
        {"num_heads": 3},
        rejects("d_model", "d_model=8 and num_heads=3 without head_dim"),
    ),
    "num_kv_heads 0": ({"num_kv_heads": 0}, rejects("num_kv_heads", num_kv_heads=0)),
    "num_kv_heads not dividing": (
        {"num_heads": 4, "num_kv_heads": 3},
        rejects("num_heads", num_heads=4, num_kv_heads=3),
    ),
    "num_kv_heads above num_heads": (
        {"num_kv_heads": 4},
        rejects("num_heads", num_heads=2, num_kv_heads=4),
    ),
    "head_dim 0": ({"head_dim": 0}, rejects("head_dim", head_dim=0)),
    "head_dim float": ({"head_dim": 4.0}, rejects_type("head_dim", head_dim=4.0)),
    "d_in negative": ({"d_in": -1}, rejects("d_in", d_in=-1)),
    "d_kv 0": ({"d_kv": 0}, rejects("d_kv", d_kv=0)),
    "fused_qkv with a different d_kv": (
        {"fused_qkv": True, "d_kv": 6},
        rejects("d_kv", d_kv=6, d_in=8),
    ),
    "fused_qkv with a different d_in": (
        {"fused_qkv": True, "d_in": 6, "d_kv": 8},
        rejects("d_kv", d_kv=8, d_in=6),
    ),
    "rope on odd heads": (
        {"rope": Rope(1e4), "head_dim": 3},
        rejects("head_dim", head_dim=3),
    ),
    "rope with a different d_kv": (
        {"rope": Rope(1e4), "d_kv": 6},
        rejects("d_kv", d_kv=6, d_in=8),
    ),
    "rope of a number": ({"rope": 1e4}, rejects_type("rope", rope=10000.0)),
    "dropout 1": ({"dropout": 1.0}, rejects("dropout", dropout=1.0)),
    "dropout negative": ({"dropout": -0.1}, rejects("dropout", dropout=-0.1)),
    "dropout NaN": ({"dropout": math.nan}, rejects("dropout", dropout=math.nan)),
    "dropout text": ({"dropout": "0.5"}, rejects_type("dropout", dropout="0.5")),
    "dropout False": ({"dropout": False}, rejects_type("dropout", dropout=False)),
    "dropout None": ({"dropout": None}, rejects_type("dropout", dropout=None)),
    "output_dropout 1": (
        {"output_dropout": 1.0},
        rejects("output_dropout", output_dropout=1.0),
    ),
    "output_dropout text": (
        {"output_dropout": "0"},
        rejects_type("output_dropout", output_dropout="0"),
    ),
    "output_dropout False": (
        {"output_dropout": np.False_},
        rejects_type("output_dropout", output_dropout=...),
    ),
    "scale 0": ({"scale": 0.0}, rejects("scale", scale=0.0)),
    "scale negative": ({"scale": -0.5}, rejects("scale", scale=-0.5)),
    "scale NaN": ({"scale": math.nan}, rejects("scale", scale=math.nan)),
    "scale infinite": ({"scale": math.inf}, rejects("scale", scale=math.inf)),
    "scale text": ({"scale": "1"}, rejects_type("scale", scale="1")),
    "soft_cap 0": ({"soft_cap": 0.0}, rejects("soft_cap", soft_cap=0.0)),
    "soft_cap text": ({"soft_cap": "50"}, rejects_type("soft_cap", soft_cap="50")),
    "window_size 0": ({"window_size": 0}, rejects("window_size", window_size=0)),
    "window_size 1.5": ({"window_size": 1.5}, rejects_type("window_size", window_size=1.5)),
    "chunk_size True": ({"chunk_size": True}, rejects_type("chunk_size", chunk_size=True)),
    "window and chunks": (
        {"window_size": 4, "chunk_size": 8},
        rejects("window_size", window_size=4, chunk_size=8),
    ),
    "qkv_bias text": ({"qkv_bias": "no"}, rejects_type("qkv_bias", qkv_bias="no")),
    "qkv_bias None": ({"qkv_bias": None}, rejects_type("qkv_bias", qkv_bias=None)),
    "out_bias 0": ({"out_bias": 0}, rejects_type("out_bias", out_bias=0)),
    "out_proj 1": ({"out_proj": 1}, rejects_type("out_proj", out_proj=1)),
    "fused_qkv text": ({"fused_qkv": "x"}, rejects_type("fused_qkv", fused_qkv="x")),
}
KINDS = ("MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache")


def test_invalid_spec_raises(subtests):
    """An invalid field of a specification, or a combination of fields,
    raises an error with its name.
    """
    for name, (keywords, input_error) in CONFIGS.items():
        with subtests.test(name), input_error:
            AttentionSpec(**{"d_model": 8, "num_heads": 2, **keywords})


THETAS = {
    "0": (0.0, rejects("theta", theta=0.0)),
    "NaN": (math.nan, rejects("theta", theta=math.nan)),
    "infinite": (math.inf, rejects("theta", theta=math.inf)),
    "text": ("1e4", rejects_type("theta", theta="1e4")),
    "True": (True, rejects_type("theta", theta=True)),
    "None": (None, rejects_type("theta", theta=None)),
}


@pytest.mark.parametrize("name", THETAS)
def test_invalid_theta_raises(name):
    """A theta that is not a positive finite number raises an error."""
    theta, input_error = THETAS[name]
    with input_error:
        Rope(theta)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [8, None, {"d_model": 8, "num_heads": 2}], ids=repr)
def test_module_requires_a_spec(sibling, kind, spec):
    """A module raises an error for a number, None or a dict as its specification."""
    keywords = {"rngs": nnx.Rngs(0)} if sibling.name == "jax" else {}
    with rejects_type("spec", spec=spec):
        getattr(sibling.package, kind)(spec, **keywords)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtype", [np.int8, np.int32, np.bool_, np.complex64], ids=lambda dtype: dtype.__name__
)
def test_module_requires_float_weights(sibling, kind, dtype):
    """A module raises an error for a dtype of integers, booleans or complex numbers."""
    keyword = {"jax": "param_dtype", "torch": "dtype"}[sibling.name]
    with rejects_type(keyword, {keyword: ...}):
        sibling.module(
            kind, AttentionSpec(8, 2), **{keyword: sibling.array(np.zeros(1, dtype)).dtype}
        )


# ---- Input that is invalid only in JAX and PyTorch -----------------------------------------------

SPEC = AttentionSpec(8, 2)
HEADS = {name: ones(2, 2, 3, 4) for name in ("query", "key", "value")}
TOKENS = {"x": ones(2, 3, 8), "weights": parity.random_weights(SPEC), "spec": SPEC}
CROSS = AttentionSpec(8, 2, d_in=6, d_kv=5)
INPUTS = {"query": ones(2, 3, 6), "key": ones(2, 4, 5)}
KERNELS = {"plain": None, "fused": lambda sibling: sibling.package.fused.attend}
every_need = pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])


@pytest.mark.parametrize("form", KERNELS)
def test_mixed_bias_dtype_raises(sibling, form):
    """A bias in a different dtype than the heads raises an error."""
    input_error = rejects_type("bias", {"bias.dtype": ..., "query.dtype": ...})
    keywords = {**HEADS, "bias": halves(3, 3), "kernel": KERNELS[form]}
    rejected(sibling, "scaled_dot_product_attention", (), keywords, input_error)


MIXED_LAYERS = {
    "bias": ({"bias": halves(3, 4)}, rejects_type("bias", {"bias.dtype": ..., "query.dtype": ...})),
    "inputs": (
        {"query": halves(2, 3, 6), "key": halves(2, 4, 5)},
        rejects_type("the input of q_proj", {"x.dtype": ...}),
    ),
}


@every_need
@pytest.mark.parametrize("name", MIXED_LAYERS)
def test_function_requires_one_dtype(sibling, name, need_weights):
    """Inputs or a bias in a different dtype than the weights raise an error in the function of a
    layer.
    """
    keywords, input_error = MIXED_LAYERS[name]
    options = {"weights": parity.random_weights(CROSS), "spec": CROSS, "need_weights": need_weights}
    rejected(sibling, "multi_head_attention", (), {**INPUTS, **keywords, **options}, input_error)


@every_need
@pytest.mark.parametrize("name", MIXED_LAYERS)
def test_module_requires_one_dtype(sibling, name, need_weights):
    """Inputs or a bias in a different dtype than the weights raise an error in a module."""
    keywords, input_error = MIXED_LAYERS[name]
    module = sibling.module("MultiHeadAttention", CROSS)
    keywords = {name: converted(sibling, x) for name, x in {**INPUTS, **keywords}.items()}
    with input_error:
        module(**keywords, need_weights=need_weights)


def half_cache(sibling):
    return sibling.package.init_cache(2, 2, 4, 4, sibling.dtype(np.float16))


MIXED_CACHES = {
    "tokens": ({"x": halves(2, 3, 8)}, rejects_type("the input of q_proj", {"x.dtype": ...})),
    "cache": (
        {"cache": half_cache},
        rejects_type("cache.keys", {"cache.keys.dtype": ..., "key.dtype": ...}),
    ),
}


@pytest.mark.parametrize("name", MIXED_CACHES)
def test_cached_function_requires_one_dtype(sibling, name):
    """Tokens or a cache in a different dtype than the weights raise an error in the function."""
    keywords, input_error = MIXED_CACHES[name]
    rejected(
        sibling,
        "multi_head_attention_with_cache",
        (),
        {**TOKENS, "cache": cache, **keywords},
        input_error,
    )


@pytest.mark.parametrize("name", MIXED_CACHES)
def test_cached_module_requires_one_dtype(sibling, name):
    """Tokens or a cache in a different dtype than the weights raise an error in a module."""
    keywords, input_error = MIXED_CACHES[name]
    module = sibling.module("MultiHeadAttentionWithCache", SPEC)
    keywords = {
        name: converted(sibling, x)
        for name, x in {"x": ones(2, 3, 8), "cache": cache, **keywords}.items()
    }
    with input_error:
        module(**keywords)


def cache(sibling):
    """Return a cache for two sequences of up to four tokens, with two heads of four features."""
    return sibling.package.init_cache(2, 2, 4, 4)


def test_boolean_cache_raises(sibling):
    """A cache of booleans raises an error."""
    keywords = {
        "batch_size": 2,
        "num_kv_heads": 2,
        "capacity": 4,
        "head_dim": 4,
        "dtype": sibling.dtype(np.bool_),
    }
    rejected(sibling, "init_cache", (), keywords, rejects_type("dtype", dtype=...))


LAYER_SPEC = AttentionSpec(8, 2, d_in=6)
WEIGHTS = parity.random_weights(LAYER_SPEC)
MIXED_WEIGHTS = {
    "weight": ({**WEIGHTS, "k_proj.weight": halves(8, 6)}, rejects_type("k_proj.…")),
    "bias": ({**WEIGHTS, "v_proj.bias": halves(8)}, rejects_type("v_proj.bias")),
}
X = ones(2, 3, 6)
FUNCTIONS = {
    "plain": ("multi_head_attention", {"query": X, "need_weights": True}),
    "fused": ("multi_head_attention", {"query": X}),
    "cached": ("multi_head_attention_with_cache", {"x": X, "cache": cache}),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS)


@every_function
@pytest.mark.parametrize("name", MIXED_WEIGHTS)
def test_mixed_weight_dtypes_raise(sibling, name, function):
    """Weights of several dtypes raise an error in every function; ttnn has a dtype for each."""
    weights, input_error = MIXED_WEIGHTS[name]
    function, keywords = FUNCTIONS[function]
    rejected(
        sibling, function, (), {**keywords, "weights": weights, "spec": LAYER_SPEC}, input_error
    )


# An empty mask is invalid in JAX and PyTorch, but not in ttnn.
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
def test_empty_masks_raise(sibling, name):
    """A mask without queries or keys raises an error."""
    rejected(sibling, *EMPTY_MASKS[name])


@ONLY_TORCH
@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "bias"])
def test_torch_module_rejects_numpy(sibling, name):
    """A module in PyTorch raises an error for a NumPy array as any one of its inputs."""
    inputs = {
        "query": ones(2, 3, 8),
        "key": ones(2, 3, 8),
        "value": ones(2, 3, 8),
        "mask": booleans(3, 3),
    }
    tensors = {
        **{other: sibling.array(x) for other, x in inputs.items()},
        name: inputs.get(name, ones(3, 3)),
    }
    with rejects_type(name, "ndarray"):
        sibling.module("MultiHeadAttention", AttentionSpec(8, 2))(**tensors)


def test_jax_module_names_missing_streams():
    """In JAX, random streams without the one that a layer draws from raise an error that names it.
    So does anything but random streams.
    """
    import jax
    from flax import nnx

    import mha_jax

    with rejects("rngs", streams=["params"], hint="dropout=1"):
        mha_jax.MultiHeadAttention(8, 2, dropout=0.1, rngs=nnx.Rngs(params=0))
    with rejects("rngs", streams=["dropout"], hint="params=0"):
        mha_jax.MultiHeadAttention(8, 2, rngs=nnx.Rngs(dropout=0))
    assert mha_jax.MultiHeadAttention(8, 2, dropout=0.1, rngs=nnx.Rngs(0)).dropout_rngs is not None
    for wrong in (0, None, jax.random.key(0)):
        with rejects_type("rngs", type(wrong).__name__, hint="nnx.Rngs(0)"):
            mha_jax.MultiHeadAttention(8, 2, rngs=wrong)


@every_function
def test_weights_of_other_framework_raise(sibling, function):
    """Functions raise an error for weights of the other framework: in JAX for a flat dict, in
    PyTorch for a nested one.
    """
    function, keywords = FUNCTIONS[function]
    flat = {"jax": {name: sibling.array(x) for name, x in WEIGHTS.items()}}
    tree = {"torch": {"q_proj": {"kernel": sibling.array(ones(6, 8))}}}
    weights = {**flat, **tree}[sibling.name]
    keywords = {name: converted(sibling, x) for name, x in keywords.items()}

    with (rejects_type if sibling.name == "jax" else rejects)("weights"):
        getattr(sibling.package, function)(**keywords, weights=weights, spec=LAYER_SPEC)


# ---- Mapped weights ------------------------------------------------------------------------------


def test_torch_vmap_over_weights():
    """In PyTorch, `torch.func.vmap` over two equal sets of weights returns two equal outputs."""
    import torch

    import mha_torch

    spec = parity.AttentionSpec(8, 2)
    weights = {
        name: torch.from_numpy(w)[None].repeat(2, *[1] * w.ndim)
        for name, w in parity.random_weights(spec).items()
    }
    x = torch.ones(1, 3, 8)
    outputs = torch.func.vmap(
        lambda w: mha_torch.multi_head_attention(x, w, spec, need_weights=True)[0]
    )(weights)
    assert outputs.shape == (2, 1, 3, 8)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
