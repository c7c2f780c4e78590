"""Bad input is refused before any work, by every public function, with the argument's name and the rule."""

import math

import numpy as np
import pytest
from flax import nnx

import parity
from mha_spec import Alibi, AttentionSpec, RelativeBias, Rope

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
    """NumPy arrays as the framework's; dicts of them, by canonical name, as its weights; and what a function makes."""
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
        tree.setdefault(projection, {})["kernel" if leaf == "weight" else "bias"] = sibling.array(array.T)
    return tree


def refused(sibling, function, args, keywords, error, message):
    """Call a function of the package and expect the error."""
    for part in function.split("."):
        function = getattr(sibling.package if isinstance(function, str) else function, part)
    args = [converted(sibling, x) for x in args]
    keywords = {name: converted(sibling, x) for name, x in keywords.items()}
    with pytest.raises(error, match=message):
        function(*args, **keywords)


# ---- Configurations --------------------------------------------------------------------------------------------------

CONFIGS = {
    "d_model 0": ({"d_model": 0}, ValueError, "d_model must be at least 1, got d_model=0"),
    "d_model negative": ({"d_model": -8}, ValueError, "d_model must be at least 1, got d_model=-8"),
    "d_model float": ({"d_model": 8.0}, TypeError, "d_model must be an integer, got d_model=8.0"),
    "d_model text": ({"d_model": "8"}, TypeError, "d_model must be an integer, got d_model='8'"),
    "num_heads 0": ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got num_heads=0"),
    "num_heads True": ({"num_heads": True}, TypeError, "num_heads must be an integer, got num_heads=True"),
    "num_heads None": ({"num_heads": None}, TypeError, "num_heads must be an integer, got num_heads=None"),
    "num_heads not dividing": (
        {"num_heads": 3},
        ValueError,
        "d_model must be a multiple of num_heads, got d_model=8 and num_heads=3",
    ),
    "num_kv_heads 0": ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be at least 1, got num_kv_heads=0"),
    "num_kv_heads not dividing": (
        {"num_heads": 4, "num_kv_heads": 3},
        ValueError,
        "num_heads must be a multiple of num_kv_heads, got num_heads=4 and num_kv_heads=3",
    ),
    "num_kv_heads above num_heads": (
        {"num_kv_heads": 4},
        ValueError,
        "num_heads must be a multiple of num_kv_heads, got num_heads=2 and num_kv_heads=4",
    ),
    "head_dim 0": ({"head_dim": 0}, ValueError, "head_dim must be at least 1, got head_dim=0"),
    "head_dim float": ({"head_dim": 4.0}, TypeError, "head_dim must be an integer, got head_dim=4.0"),
    "d_in negative": ({"d_in": -1}, ValueError, "d_in must be at least 1, got d_in=-1"),
    "d_kv 0": ({"d_kv": 0}, ValueError, "d_kv must be at least 1, got d_kv=0"),
    "fused_qkv with another d_kv": (
        {"fused_qkv": True, "d_kv": 6},
        ValueError,
        "d_kv must equal d_in with fused_qkv, got d_kv=6 and d_in=8",
    ),
    "fused_qkv with another d_in": (
        {"fused_qkv": True, "d_in": 6, "d_kv": 8},
        ValueError,
        "d_kv must equal d_in with fused_qkv, got d_kv=8 and d_in=6",
    ),
    "rope on odd heads": (
        {"rope": Rope(1e4), "head_dim": 3},
        ValueError,
        "head_dim must be even for RoPE, got head_dim=3",
    ),
    "rope with another d_kv": (
        {"rope": Rope(1e4), "d_kv": 6},
        ValueError,
        "d_kv must equal d_in with RoPE, got d_kv=6 and d_in=8",
    ),
    "rope of a number": ({"rope": 1e4}, TypeError, "rope must be a Rope or None, got rope=10000.0"),
    "dropout 1": ({"dropout": 1.0}, ValueError, "dropout must be at least 0 and below 1, got dropout=1.0"),
    "dropout negative": ({"dropout": -0.1}, ValueError, "dropout must be at least 0 and below 1, got dropout=-0.1"),
    "dropout NaN": ({"dropout": math.nan}, ValueError, "dropout must be at least 0 and below 1, got dropout=nan"),
    "dropout text": ({"dropout": "0.5"}, TypeError, "dropout must be a number, got dropout='0.5'"),
    "dropout False": ({"dropout": False}, TypeError, "dropout must be a number, got dropout=False"),
    "dropout None": ({"dropout": None}, TypeError, "dropout must be a number, got dropout=None"),
    "output_dropout 1": (
        {"output_dropout": 1.0},
        ValueError,
        "output_dropout must be at least 0 and below 1, got output_dropout=1.0",
    ),
    "output_dropout text": (
        {"output_dropout": "0"},
        TypeError,
        "output_dropout must be a number, got output_dropout='0'",
    ),
    "output_dropout False": (
        {"output_dropout": np.False_},
        TypeError,
        "output_dropout must be a number, got output_dropout=",
    ),
    "scale 0": ({"scale": 0.0}, ValueError, "scale must be positive and finite, got scale=0.0"),
    "scale negative": ({"scale": -0.5}, ValueError, "scale must be positive and finite, got scale=-0.5"),
    "scale NaN": ({"scale": math.nan}, ValueError, "scale must be positive and finite, got scale=nan"),
    "scale infinite": ({"scale": math.inf}, ValueError, "scale must be positive and finite, got scale=inf"),
    "scale text": ({"scale": "1"}, TypeError, "scale must be a number, got scale='1'"),
    "soft_cap 0": ({"soft_cap": 0.0}, ValueError, "soft_cap must be positive and finite, got soft_cap=0.0"),
    "soft_cap text": ({"soft_cap": "50"}, TypeError, "soft_cap must be a number, got soft_cap='50'"),
    "window_size 0": ({"window_size": 0}, ValueError, "window_size must be at least 1, got window_size=0"),
    "window_size 1.5": ({"window_size": 1.5}, TypeError, "window_size must be an integer, got window_size=1.5"),
    "chunk_size True": ({"chunk_size": True}, TypeError, "chunk_size must be an integer, got chunk_size=True"),
    "window and chunks": (
        {"window_size": 4, "chunk_size": 8},
        ValueError,
        "window_size must be None with chunk_size, got window_size=4 and chunk_size=8",
    ),
    "qkv_bias text": ({"qkv_bias": "no"}, TypeError, "qkv_bias must be a boolean, got qkv_bias='no'"),
    "qkv_bias None": ({"qkv_bias": None}, TypeError, "qkv_bias must be a boolean, got qkv_bias=None"),
    "out_bias 0": ({"out_bias": 0}, TypeError, "out_bias must be a boolean, got out_bias=0"),
    "out_proj 1": ({"out_proj": 1}, TypeError, "out_proj must be a boolean, got out_proj=1"),
    "fused_qkv text": ({"fused_qkv": "x"}, TypeError, "fused_qkv must be a boolean, got fused_qkv='x'"),
}
KINDS = ("MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache")


@pytest.mark.parametrize("name", CONFIGS)
def test_spec_refuses_the_configuration(name):
    keywords, error, message = CONFIGS[name]
    with pytest.raises(error, match=f"^{message}"):
        AttentionSpec(**{"d_model": 8, "num_heads": 2, **keywords})


THETAS = {
    "0": (0.0, ValueError, "theta must be positive and finite, got theta=0.0"),
    "NaN": (math.nan, ValueError, "theta must be positive and finite, got theta=nan"),
    "infinite": (math.inf, ValueError, "theta must be positive and finite, got theta=inf"),
    "text": ("1e4", TypeError, "theta must be a number, got theta='1e4'"),
    "True": (True, TypeError, "theta must be a number, got theta=True"),
    "None": (None, TypeError, "theta must be a number, got theta=None"),
}


@pytest.mark.parametrize("name", THETAS)
def test_rope_refuses_theta(name):
    theta, error, message = THETAS[name]
    with pytest.raises(error, match=f"^{message}"):
        Rope(theta)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [8, None, {"d_model": 8, "num_heads": 2}], ids=repr)
def test_module_refuses_what_is_not_a_spec(sibling, kind, spec):
    keywords = {"rngs": nnx.Rngs(0)} if sibling.name == "jax" else {}
    with pytest.raises(TypeError, match=r"^spec must be an AttentionSpec, got spec="):
        getattr(sibling.package, kind)(spec, **keywords)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_self_attention_refuses_another_width_of_keys(sibling, kind):
    with pytest.raises(ValueError, match=r"^d_kv must equal d_in in self-attention, got d_kv=6 and d_in=8"):
        sibling.module(kind, AttentionSpec(8, 2, d_kv=6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.bool_, np.complex64], ids=lambda dtype: dtype.__name__)
def test_module_refuses_weights_that_are_not_floating_point(sibling, kind, dtype):
    keyword = {"jax": "param_dtype", "torch": "dtype"}[sibling.name]
    with pytest.raises(TypeError, match=f"^{keyword} must be floating point, got {keyword}="):
        sibling.module(kind, AttentionSpec(8, 2), **{keyword: sibling.array(np.zeros(1, dtype)).dtype})


# ---- Stages ----------------------------------------------------------------------------------------------------------

HEADS = ones(2, 2, 3, 4)
RELATIVE = AttentionSpec(8, 2, relative_bias=RelativeBias(8, 8))
SLOPES = AttentionSpec(16, 4, alibi=Alibi())

STAGES = {
    "split_heads rank": ("split_heads", (ones(3, 8), 2), {}, ValueError, "x must have 3 axes"),
    "split_heads integers": ("split_heads", (integers(2, 3, 8), 2), {}, TypeError, "x must be floating point.*int32"),
    "split_heads list": ("split_heads", ([[[1.0, 2.0]]], 2), {}, TypeError, "x must be"),
    "split_heads width": ("split_heads", (ones(2, 3, 8), 3), {}, ValueError, "width=8 and num_heads=3"),
    "split_heads 0": ("split_heads", (ones(2, 3, 8), 0), {}, ValueError, "num_heads must be at least 1"),
    "split_heads float": ("split_heads", (ones(2, 3, 8), 2.0), {}, TypeError, "num_heads must be an integer"),
    "combine_heads rank": ("combine_heads", (ones(2, 3, 8),), {}, ValueError, "x must have 4 axes"),
    "combine_heads integers": ("combine_heads", (integers(2, 2, 3, 4),), {}, TypeError, "x must be floating point"),
    "repeat_kv_heads rank": ("repeat_kv_heads", (ones(2, 3, 4), 2), {}, ValueError, "x must have 4 axes"),
    "repeat_kv_heads groups": ("repeat_kv_heads", (HEADS, 3), {}, ValueError, "num_heads=3 and num_kv_heads=2"),
    "repeat_kv_heads 0": ("repeat_kv_heads", (HEADS, 0), {}, ValueError, "num_heads must be at least 1"),
    "scores query rank": ("attention_scores", (ones(2, 3, 4), HEADS), {}, ValueError, "query must have 4 axes"),
    "scores key rank": ("attention_scores", (HEADS, ones(2, 3, 4)), {}, ValueError, "key must have 4 axes"),
    "scores integers": ("attention_scores", (integers(2, 2, 3, 4), HEADS), {}, TypeError, "query must be floating"),
    "scores head_dim": ("attention_scores", (HEADS, ones(2, 2, 3, 6)), {}, ValueError, "key must have .*head_dim"),
    "scores batch": ("attention_scores", (HEADS, ones(3, 2, 3, 4)), {}, ValueError, "key must have the batch size"),
    "scores groups": ("attention_scores", (ones(2, 3, 3, 4), HEADS), {}, ValueError, "num_heads=3 and num_kv_heads=2"),
    "scores bias": ("attention_scores", (HEADS, HEADS, ones(5)), {}, ValueError, "bias must broadcast"),
    "softmax sinks": (
        "masked_softmax",
        (HEADS, None, ones(4)),
        {},
        ValueError,
        r"sinks must have shape \(N,\) = \(2,\)",
    ),
    "softmax integer sinks": (
        "masked_softmax",
        (HEADS, None, integers(2)),
        {},
        TypeError,
        "sinks must be floating point",
    ),
    "attention without its sinks": (
        "scaled_dot_product_attention",
        (HEADS, HEADS, HEADS, AttentionSpec(8, 2, sinks=True)),
        {},
        ValueError,
        "sinks must be given where the spec has them, got spec.sinks=True",
    ),
    "scores relative bias": (
        "attention_scores",
        (HEADS, HEADS, None, RELATIVE, None, ones(2, 8)),
        {},
        ValueError,
        r"relative_bias must have shape \(num_buckets, N\) = \(8, 2\), got relative_bias.shape=\(2, 8\)",
    ),
    "scores integer relative bias": (
        "attention_scores",
        (HEADS, HEADS, None, RELATIVE, None, integers(8, 2)),
        {},
        TypeError,
        "relative_bias must be floating point",
    ),
    "scores with a relative bias of no spec": (
        "attention_scores",
        (HEADS, HEADS, None, None, None, ones(8, 2)),
        {},
        ValueError,
        "relative_bias must be given where the spec has one, got spec.relative_bias=None",
    ),
    "attention without its relative bias": (
        "scaled_dot_product_attention",
        (HEADS, HEADS, HEADS, RELATIVE),
        {},
        ValueError,
        r"relative_bias must be given where the spec has one, got spec.relative_bias=RelativeBias\(",
    ),
    "scores of some heads with slopes": (
        "attention_scores",
        (HEADS, HEADS, None, SLOPES),
        {},
        ValueError,
        "query must have the heads of a spec with alibi, whose slopes are theirs, got 2 heads and num_heads=4",
    ),
    "attention of a head with slopes": (
        "scaled_dot_product_attention",
        (HEADS[:, :1], HEADS[:, :1], HEADS[:, :1], SLOPES),
        {},
        ValueError,
        "got 1 heads and num_heads=4",
    ),
    "softmax rank": ("masked_softmax", (ones(3, 4),), {}, ValueError, "scores must have 4 axes"),
    "softmax integers": ("masked_softmax", (integers(2, 2, 3, 4),), {}, TypeError, "scores must be floating point"),
    "softmax float mask": ("masked_softmax", (HEADS, ones(3, 4)), {}, TypeError, "mask must be boolean"),
    "softmax mask": ("masked_softmax", (HEADS, booleans(5)), {}, ValueError, "mask must broadcast"),
    "context rank": ("attention_context", (ones(2, 3, 3), HEADS), {}, ValueError, "attn_weights must have 4 axes"),
    "context value rank": ("attention_context", (ones(2, 2, 3, 3), ones(2, 3, 4)), {}, ValueError, "value must have 4"),
    "context integers": (
        "attention_context",
        (ones(2, 2, 3, 3), integers(2, 2, 3, 4)),
        {},
        TypeError,
        "value must be floating",
    ),
    "context keys": ("attention_context", (ones(2, 2, 3, 5), HEADS), {}, ValueError, "value must have"),
    "dropout rate 1": ("apply_dropout", (HEADS, 1.0), {}, ValueError, "dropout=1.0"),
    "dropout rate negative": ("apply_dropout", (HEADS, -0.5), {}, ValueError, "dropout=-0.5"),
    "dropout float keep": ("apply_dropout", (HEADS, 0.5, HEADS), {}, TypeError, "keep must be boolean"),
    "dropout keep": ("apply_dropout", (HEADS, 0.5, booleans(5)), {}, ValueError, "keep must"),
    "dropout rate text": (
        "apply_dropout",
        (HEADS, "0.5"),
        {},
        TypeError,
        "dropout must be a number, got dropout='0.5'",
    ),
    "project_qkv heads": (
        "project_qkv",
        (lambda sibling: lambda name, x: x, ones(2, 3, 8), ones(2, 3, 8), ones(2, 3, 8)),
        {"spec": AttentionSpec(9, 3)},
        ValueError,
        "num_heads=3",
    ),
    "project_qkv spec": (
        "project_qkv",
        (lambda sibling: lambda name, x: x, ones(2, 3, 8), ones(2, 3, 8), ones(2, 3, 8), 2),
        {},
        TypeError,
        "spec must be an AttentionSpec, got spec=2",
    ),
    "scores spec": ("attention_scores", (HEADS, HEADS, None, 2), {}, TypeError, "spec must be an AttentionSpec, got"),
}  # RoPE refuses in test_rope.py


@pytest.mark.parametrize("name", STAGES)
def test_stage_refuses(sibling, name):
    refused(sibling, *STAGES[name])


# ---- Attention of split heads ----------------------------------------------------------------------------------------

PADDING_LENGTHS = {  # of two sequences of three keys
    "too long": ({"key_padding_lengths": [3, 4]}, ValueError, r"key_padding_lengths must lie in 0..3, got .*\[3, 4\]"),
    "negative": ({"key_padding_lengths": [-1, 3]}, ValueError, "key_padding_lengths must lie in 0..3"),
    "array too long": ({"key_padding_lengths": lengths(3, 4)}, ValueError, "key_padding_lengths must lie in 0..3"),
    "too few": ({"key_padding_lengths": [3]}, ValueError, "key_padding_lengths must have shape"),
    "too many": ({"key_padding_lengths": [1, 2, 3]}, ValueError, "key_padding_lengths must have shape"),
    "floats": ({"key_padding_lengths": [1.0, 2.0]}, TypeError, "key_padding_lengths must be integers"),
    "booleans": ({"key_padding_lengths": [True, False]}, TypeError, "key_padding_lengths must be integers"),
    "number": ({"key_padding_lengths": 3}, ValueError, "key_padding_lengths must have shape"),
    "2 axes": ({"key_padding_lengths": lengths(1, 2)[None]}, ValueError, "key_padding_lengths must have shape"),
}
DOT_PRODUCTS = {
    **{f"lengths {name}": refusal for name, refusal in PADDING_LENGTHS.items()},
    "query rank": ({"query": ones(2, 3, 4)}, ValueError, "query must have 4 axes"),
    "key rank": ({"key": ones(2, 3, 4)}, ValueError, "key must have 4 axes"),
    "value rank": ({"value": ones(3, 4)}, ValueError, "value must have 4 axes"),
    "integer query": ({"query": integers(2, 2, 3, 4)}, TypeError, "query must be floating point"),
    "integer value": ({"value": integers(2, 2, 3, 4)}, TypeError, "value must be floating point"),
    "key list": ({"key": [[[[1.0]]]]}, TypeError, "key must be"),
    "key dtype": ({"key": halves(2, 2, 3, 4)}, TypeError, "key must have the dtype of query"),
    "value dtype": ({"value": halves(2, 2, 3, 4)}, TypeError, "value must have the dtype of query"),
    "value shape": ({"value": ones(2, 2, 5, 4)}, ValueError, "value must have the shape of key"),
    "batch": ({"query": ones(3, 2, 3, 4)}, ValueError, "key must have the batch size and head_dim of query"),
    "batch of 1": ({"query": ones(1, 2, 3, 4)}, ValueError, "key must have the batch size and head_dim of query"),
    "head_dim": ({"query": ones(2, 2, 3, 8)}, ValueError, "key must have the batch size and head_dim of query"),
    "groups": ({"query": ones(2, 3, 3, 4)}, ValueError, "num_heads=3 and num_kv_heads=2"),
    "float mask": ({"mask": ones(3, 3)}, TypeError, "mask must be boolean .*passed as bias"),
    "integer mask": ({"mask": integers(3, 3)}, TypeError, "mask must be boolean"),
    "mask list": ({"mask": [[True]]}, TypeError, "mask must be"),
    "mask keys": ({"mask": booleans(3, 4)}, ValueError, r"mask must broadcast.*mask.shape=\(3, 4\)"),
    "mask of a batch": ({"mask": booleans(3, 3, 3)}, ValueError, "mask must broadcast"),
    "mask that stretches": ({"mask": booleans(4, 1, 3, 3)}, ValueError, "mask must broadcast"),
    "mask of 5 axes": ({"mask": booleans(1, 1, 1, 3, 3)}, ValueError, "mask must broadcast"),
    "boolean bias": ({"bias": booleans(3, 3)}, TypeError, "bias must have the dtype of query"),
    "bias dtype": ({"bias": halves(3, 3)}, TypeError, "bias must have the dtype of query"),
    "bias keys": ({"bias": ones(3, 4)}, ValueError, "bias must broadcast"),
    "bias of 5 axes": ({"bias": ones(1, 1, 1, 3, 3)}, ValueError, "bias must broadcast"),
    "dropout 1": ({"dropout": 1.0}, ValueError, "dropout must be at least 0 and below 1"),
    "dropout negative": ({"dropout": -0.5}, ValueError, "dropout must be at least 0 and below 1"),
    "dropout text": ({"dropout": "0.5"}, TypeError, "dropout must be a number, got dropout='0.5'"),
    "dropout False": ({"dropout": False}, TypeError, "dropout must be a number, got dropout=False"),
    "spec": ({"spec": 2}, TypeError, "spec must be an AttentionSpec, got spec=2"),
}
KEEPS = {
    "float keep": ({"dropout": 0.5, "dropout_keep": HEADS}, TypeError, "keep must be boolean"),
    "keep shape": ({"dropout": 0.5, "dropout_keep": booleans(5)}, ValueError, "keep must"),
}
FUSED = {
    "need_weights": ({"need_weights": True}, ValueError, "need_weights"),
    "dropout_keep": ({"dropout_keep": booleans(2, 2, 3, 3)}, ValueError, "dropout_keep"),
}
SPLIT = {"query": HEADS, "key": HEADS, "value": HEADS}


@pytest.mark.parametrize("function", ["scaled_dot_product_attention", "fused.scaled_dot_product_attention"])
@pytest.mark.parametrize("name", DOT_PRODUCTS)
def test_dot_product_attention_refuses(sibling, name, function):
    keywords, error, message = DOT_PRODUCTS[name]
    refused(sibling, function, (), {**SPLIT, **keywords}, error, message)


@pytest.mark.parametrize("name", KEEPS)
def test_dot_product_attention_refuses_to_keep(sibling, name):
    keywords, error, message = KEEPS[name]
    refused(sibling, "scaled_dot_product_attention", (), {**SPLIT, **keywords}, error, message)


@pytest.mark.parametrize("name", FUSED)
def test_fused_path_refuses_what_it_does_not_store(sibling, name):
    keywords, error, message = FUSED[name]
    refused(sibling, "fused.scaled_dot_product_attention", (), {**SPLIT, **keywords}, error, message)


CORES = {
    "rank": ((ones(3, 8), ones(2, 3, 8), ones(2, 3, 8), 2), ValueError, "must have 3 axes"),
    "integers": ((integers(2, 3, 8), ones(2, 3, 8), ones(2, 3, 8), 2), TypeError, "must be floating point"),
    "heads": ((ones(2, 3, 8), ones(2, 3, 8), ones(2, 3, 8), 3), ValueError, "num_heads=3"),
    "key width": (
        (ones(2, 3, 8), ones(2, 3, 6), ones(2, 3, 6), 2),
        ValueError,
        "key must have the batch size and head",
    ),
    "value length": ((ones(2, 3, 8), ones(2, 3, 8), ones(2, 4, 8), 2), ValueError, "value must have the shape of key"),
    "float mask": ((ones(2, 3, 8), ones(2, 3, 8), ones(2, 3, 8), 2, ones(3, 3)), TypeError, "mask must be boolean"),
}


@pytest.mark.parametrize("name", CORES)
def test_core_refuses(sibling, name):
    args, error, message = CORES[name]
    refused(sibling, "multi_head_attention_core", args, {}, error, message)


# ---- Layers ----------------------------------------------------------------------------------------------------------

SPEC = parity.AttentionSpec(8, 2, d_in=6, d_kv=5)
LAYERS = {
    "query rank": ({"query": ones(3, 6)}, ValueError, "query must have 3 axes"),
    "integer query": ({"query": integers(2, 3, 6)}, TypeError, "query must be floating point"),
    "query list": ({"query": [[[1.0] * 6]]}, TypeError, "query must be"),
    "query width": ({"query": ones(2, 3, 7)}, ValueError, "q_proj must have 6 features"),
    "query dtype": ({"query": halves(2, 3, 6), "key": halves(2, 4, 5)}, TypeError, "q_proj must have the dtype"),
    "no key of that width": ({"key": None}, ValueError, "k_proj must have 5 features"),
    "key rank": ({"key": ones(4, 5)}, ValueError, "key must have 3 axes"),
    "integer key": ({"key": integers(2, 4, 5)}, TypeError, "key must be floating point"),
    "key width": ({"key": ones(2, 4, 6)}, ValueError, "k_proj must have 5 features"),
    "key dtype": ({"key": halves(2, 4, 5)}, TypeError, "key must have the dtype of query"),
    "key batch": ({"key": ones(3, 4, 5)}, ValueError, "key must have the batch size of query"),
    "key batch of 1": ({"key": ones(1, 4, 5)}, ValueError, "key must have the batch size of query"),
    "value without key": ({"key": None, "value": ones(2, 4, 5)}, ValueError, "value must come with a key"),
    "value rank": ({"value": ones(4, 5)}, ValueError, "value must have 3 axes"),
    "value width": ({"value": ones(2, 4, 6)}, ValueError, "v_proj must have 5 features"),
    "value length": ({"value": ones(2, 3, 5)}, ValueError, "value must have as many tokens as key"),
    "value batch": ({"value": ones(1, 4, 5)}, ValueError, "value must have the batch size"),
    "float mask": ({"mask": ones(3, 4)}, TypeError, "mask must be boolean"),
    "mask that stretches": ({"mask": booleans(4, 1, 3, 4)}, ValueError, "mask must broadcast"),
    "mask of S, T": ({"mask": booleans(4, 3)}, ValueError, "mask must broadcast"),
    "bias keys": ({"bias": ones(3, 3)}, ValueError, "bias must broadcast"),
    "bias dtype": ({"bias": halves(3, 4)}, TypeError, "bias must have the dtype of query"),
    "positions without RoPE": ({"positions": lengths(0, 1, 2)[None]}, ValueError, "positions must come with RoPE"),
}
ROPE_SPEC = parity.AttentionSpec(8, 2, rope=Rope(100.0))
ROPE_LAYERS = {
    "key": ({"key": ones(2, 3, 8)}, ValueError, "key must be None .*RoPE"),
    "float positions": ({"positions": ones(1, 3)}, TypeError, "positions must be integers"),
    "flat positions": ({"positions": lengths(0, 1, 2)}, ValueError, "positions must have shape"),
    "too few positions": ({"positions": lengths(0, 1)[None]}, ValueError, "positions must have shape"),
    "positions list": ({"positions": [[0, 1, 2]]}, TypeError, "positions must be"),
}
every_need = pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])


@every_need
@pytest.mark.parametrize("name", LAYERS)
def test_layer_function_refuses(sibling, name, need_weights):
    keywords, error, message = LAYERS[name]
    keywords = {"query": ones(2, 3, 6), "key": ones(2, 4, 5), **keywords, "weights": parity.random_weights(SPEC)}
    options = {"spec": SPEC, "need_weights": need_weights}
    refused(sibling, "multi_head_attention", (), {**keywords, **options}, error, message)


@every_need
@pytest.mark.parametrize("name", LAYERS)
def test_module_refuses(sibling, name, need_weights):
    keywords, error, message = LAYERS[name]
    module = sibling.module("MultiHeadAttention", AttentionSpec(8, 2, d_in=6, d_kv=5))
    keywords = {"query": ones(2, 3, 6), "key": ones(2, 4, 5), **keywords}
    keywords = {name: converted(sibling, x) for name, x in keywords.items()}
    with pytest.raises(error, match=message):
        module(**keywords, need_weights=need_weights)


@pytest.mark.parametrize("name", ROPE_LAYERS)
def test_layer_function_with_rope_refuses(sibling, name):
    keywords, error, message = ROPE_LAYERS[name]
    keywords = {"query": ones(2, 3, 8), **keywords, "weights": parity.random_weights(ROPE_SPEC)}
    refused(sibling, "multi_head_attention", (), {**keywords, "spec": ROPE_SPEC}, error, message)


@pytest.mark.parametrize("name", ROPE_LAYERS)
def test_module_with_rope_refuses(sibling, name):
    keywords, error, message = ROPE_LAYERS[name]
    module = sibling.module("MultiHeadAttention", AttentionSpec(8, 2, rope=Rope(1e2)))
    keywords = {name: converted(sibling, x) for name, x in {"query": ones(2, 3, 8), **keywords}.items()}
    with pytest.raises(error, match=message):
        module(**keywords)


SELF_ATTENTIONS = {
    **PADDING_LENGTHS,
    "rank": ({"x": ones(3, 8)}, ValueError, "x must have 3 axes"),
    "integers": ({"x": integers(2, 3, 8)}, TypeError, "x must be floating point"),
    "list": ({"x": [[[1.0] * 8]]}, TypeError, "x must be"),
    "width": ({"x": ones(2, 3, 6)}, ValueError, "q_proj must have 8 features"),
    "mask": ({"mask": booleans(3, 4)}, ValueError, "mask must broadcast"),
    "float mask": ({"mask": ones(3, 3)}, TypeError, "mask must be boolean"),
    "bias": ({"bias": ones(3, 4)}, ValueError, "bias must broadcast"),
    "positions without RoPE": ({"positions": lengths(0, 1, 2)[None]}, ValueError, "positions must come with RoPE"),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SELF_ATTENTIONS)
def test_self_attention_refuses(sibling, name, is_causal):
    keywords, error, message = SELF_ATTENTIONS[name]
    module = sibling.module("MultiHeadSelfAttention", AttentionSpec(8, 2))
    keywords = {name: converted(sibling, x) for name, x in {"x": ones(2, 3, 8), **keywords}.items()}
    with pytest.raises(error, match=message):
        module(**keywords, is_causal=is_causal)


@ONLY_TORCH
@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "bias"])
def test_torch_module_refuses_numpy(sibling, name):
    inputs = {"query": ones(2, 3, 8), "key": ones(2, 3, 8), "value": ones(2, 3, 8), "mask": booleans(3, 3)}
    given = {**{other: sibling.array(x) for other, x in inputs.items()}, name: inputs.get(name, ones(3, 3))}
    with pytest.raises(TypeError, match=f"{name} must be"):
        sibling.module("MultiHeadAttention", AttentionSpec(8, 2))(**given)


# ---- Weights of the functional forms ---------------------------------------------------------------------------------

LAYER_SPEC = AttentionSpec(8, 2, d_in=6)
PACKED_SPEC = AttentionSpec(8, 2, d_in=6, fused_qkv=True)
WEIGHTS = parity.random_weights(LAYER_SPEC)
PACKED = {"qkv_proj.weight": ones(24, 6), "qkv_proj.bias": ones(24)}


def without(*names):
    return {name: x for name, x in WEIGHTS.items() if name not in names}


BAD_WEIGHTS = {
    "nothing": ({}, ValueError, r"weights must .*missing \['k_proj.*q_proj.*v_proj"),
    "no q_proj": (without("q_proj.weight", "q_proj.bias"), ValueError, r"weights must .*missing \['q_proj"),
    "bias without weight": (without("v_proj.weight"), ValueError, r"weights must .*missing \['v_proj"),
    "out_proj bias alone": (without("out_proj.weight"), ValueError, "weights must .*out_proj"),
    "other name": ({**WEIGHTS, "o_proj.weight": ones(8, 8)}, ValueError, r"weights must .*unexpected \['o_proj"),
    "packed and separate": ({**WEIGHTS, **PACKED}, ValueError, r"weights must .*unexpected \['qkv_proj"),
    "packed": (PACKED, ValueError, r"weights must .*missing \['k_proj.*unexpected \['qkv_proj"),
    "no bias": (without("k_proj.bias"), ValueError, r"weights must .*missing \['k_proj.bias'\], unexpected \[\]"),
    "transposed q_proj": (
        {**WEIGHTS, "q_proj.weight": WEIGHTS["q_proj.weight"].T},
        ValueError,
        "q_proj",
    ),
    "all transposed": (
        {name: x.T for name, x in WEIGHTS.items()},
        ValueError,
        "_proj",
    ),
    "transposed out_proj": ({**WEIGHTS, "out_proj.weight": ones(8, 10)}, ValueError, "out_proj.* must have shape"),
    "flat weight": ({**WEIGHTS, "k_proj.weight": ones(8)}, ValueError, "k_proj.* must have shape"),
    "flat out_proj": ({**WEIGHTS, "out_proj.weight": ones(8)}, ValueError, "out_proj.* must have"),
    "bias of another width": ({**WEIGHTS, "k_proj.bias": ones(6)}, ValueError, "k_proj.bias must have shape"),
    "bias of 2 axes": ({**WEIGHTS, "q_proj.bias": ones(1, 8)}, ValueError, "q_proj.bias must have shape"),
    "other head_dim": ({**WEIGHTS, "k_proj.weight": ones(6, 6)}, ValueError, "k_proj.* must have shape"),
    "integer weight": ({**WEIGHTS, "q_proj.weight": integers(8, 6)}, TypeError, "q_proj"),
    "integer bias": ({**WEIGHTS, "q_proj.bias": integers(8)}, TypeError, "q_proj.bias must"),
    "mixed weight": ({**WEIGHTS, "k_proj.weight": halves(8, 6)}, TypeError, "k_proj"),
    "mixed bias": ({**WEIGHTS, "v_proj.bias": halves(8)}, TypeError, "v_proj.bias must"),
}
X = ones(2, 3, 6)
FUNCTIONS = {
    "plain": ("multi_head_attention", {"query": X, "need_weights": True}),
    "fused": ("multi_head_attention", {"query": X}),
    "growing": ("multi_head_attention_with_cache", {"x": X}),
    "static": (
        "multi_head_attention_with_static_cache",
        {"x": X, "cache": lambda sibling: sibling.package.init_cache(2, 2, 4, 4)},
    ),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS)


@every_function
@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_function_refuses_weights(sibling, name, function):
    weights, error, message = BAD_WEIGHTS[name]
    function, keywords = FUNCTIONS[function]
    refused(sibling, function, (), {**keywords, "weights": weights, "spec": LAYER_SPEC}, error, message)


PACKED |= {"out_proj.weight": ones(8, 8), "out_proj.bias": ones(8)}
BAD_PACKED = {
    "separate": (WEIGHTS, r"weights must .*missing \['qkv_proj.*unexpected \['k_proj"),
    "rows": (
        {**PACKED, "qkv_proj.weight": ones(25, 6)},
        "qkv",
    ),
    "bias": ({**PACKED, "qkv_proj.bias": ones(8)}, "qkv"),
}


@every_function
@pytest.mark.parametrize("name", BAD_PACKED)
def test_function_refuses_packed_weights(sibling, name, function):
    weights, message = BAD_PACKED[name]
    function, keywords = FUNCTIONS[function]
    refused(sibling, function, (), {**keywords, "weights": weights, "spec": PACKED_SPEC}, ValueError, message)


@every_function
@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (2, TypeError, "spec must be an AttentionSpec, got spec=2"),
        (AttentionSpec(9, 3, d_in=6), ValueError, "must have shape"),
        (AttentionSpec(8, 2, num_kv_heads=1, d_in=6), ValueError, "k_proj.* must have shape"),
        (AttentionSpec(8, 2, d_in=6, out_proj=False), ValueError, r"unexpected \['out_proj"),
        (AttentionSpec(8, 2, d_in=6, qkv_bias=False), ValueError, r"unexpected \['k_proj.bias"),
    ],
    ids=["number", "heads", "groups", "no out_proj", "no bias"],
)
def test_function_refuses_the_spec_of_another_layer(sibling, function, spec, error, message):
    function, keywords = FUNCTIONS[function]
    refused(sibling, function, (), {**keywords, "weights": WEIGHTS, "spec": spec}, error, message)


@pytest.mark.parametrize("function", ["growing", "static"])
def test_cached_function_refuses_another_width_of_keys(sibling, function):
    function, keywords = FUNCTIONS[function]
    spec = AttentionSpec(8, 2, d_in=6, d_kv=5)
    keywords = {**keywords, "weights": parity.random_weights(spec), "spec": spec}
    refused(sibling, function, (), keywords, ValueError, "d_kv must equal d_in in self-attention")


@pytest.mark.parametrize("weights", [None, [ones(8, 6)]], ids=["None", "list"])
@every_function
def test_function_refuses_weights_that_are_no_mapping(sibling, function, weights):
    function, keywords = FUNCTIONS[function]
    refused(sibling, function, (), {**keywords, "weights": weights, "spec": LAYER_SPEC}, TypeError, "weights must be")


@every_function
def test_function_refuses_the_weights_of_the_other_framework_in_one_line(sibling, function):
    function, keywords = FUNCTIONS[function]
    flat = {"jax": {name: sibling.array(x) for name, x in WEIGHTS.items()}}
    tree = {"torch": {"q_proj": {"kernel": sibling.array(ones(6, 8))}}}
    weights = {**flat, **tree}[sibling.name]
    keywords = {name: converted(sibling, x) for name, x in keywords.items()}

    with pytest.raises((TypeError, ValueError), match=r"^weights must .*q_proj[^\n]{0,400}$"):
        getattr(sibling.package, function)(**keywords, weights=weights, spec=LAYER_SPEC)


# ---- Masks -----------------------------------------------------------------------------------------------------------

MASKS = {
    "causal 0": ("create_causal_mask", (0,), {}, ValueError, "seq_len_q must be at least 1, got seq_len_q=0"),
    "causal negative": ("create_causal_mask", (-1,), {}, ValueError, "seq_len_q must be at least 1"),
    "causal keys 0": ("create_causal_mask", (2, 0), {}, ValueError, "seq_len_k must be at least 1"),
    "causal float": ("create_causal_mask", (2.0,), {}, TypeError, "seq_len_q must be an integer"),
    "causal boolean": ("create_causal_mask", (True,), {}, TypeError, "seq_len_q must be an integer"),
    "padding keys 0": ("create_padding_mask", ([0], 0), {}, ValueError, "seq_len_k must be at least 1"),
    "padding too long": ("create_padding_mask", ([1, 4], 3), {}, ValueError, r"lengths must lie in 0..3.*\[1, 4\]"),
    "padding negative": ("create_padding_mask", ([-1], 3), {}, ValueError, "lengths must lie in 0..3"),
    "padding array": ("create_padding_mask", (lengths(1, 4), 3), {}, ValueError, "lengths must lie in 0..3"),
    "padding floats": ("create_padding_mask", ([1.0], 3), {}, TypeError, "lengths must be integers"),
    "padding mask": ("create_padding_mask", ([True, False], 2), {}, TypeError, "lengths must be integers"),
    "padding number": ("create_padding_mask", (2, 3), {}, ValueError, "lengths must have shape"),
    "padding 2 axes": ("create_padding_mask", ([[1, 2]], 3), {}, ValueError, "lengths must have shape"),
    "attention 0": ("create_attention_mask", (0,), {}, ValueError, "seq_len_q must be at least 1"),
    "attention keys": ("create_attention_mask", (2, -1), {}, ValueError, "seq_len_k must be at least 1"),
    "attention too long": (
        "create_attention_mask",
        (2, 3),
        {"key_padding_lengths": [4]},
        ValueError,
        "lengths must lie in 0..3",
    ),
    "attention floats": (
        "create_attention_mask",
        (2, 3),
        {"key_padding_lengths": [1.5]},
        TypeError,
        "lengths must be integers",
    ),
    "cached keys": (
        "create_causal_mask_with_cache",
        (2, 4, 1),
        {},
        ValueError,
        "seq_len_k must be cache_len .*seq_len_k=4, cache_len=1 and seq_len_q=2",
    ),
    "cached negative": ("create_causal_mask_with_cache", (3, 2, -1), {}, ValueError, "cache_len must be at least 0"),
    "cached nothing new": ("create_causal_mask_with_cache", (0, 2, 2), {}, ValueError, "seq_len_q must be at least 1"),
    "cached float": ("create_causal_mask_with_cache", (1, 2, 1.0), {}, TypeError, "cache_len must be an integer"),
    "window 0": ("create_sliding_window_mask", (3,), {"window_size": 0}, ValueError, "window_size must be at least 1"),
    "window float": (
        "create_sliding_window_mask",
        (3,),
        {"window_size": 1.5},
        TypeError,
        "window_size must be an integer",
    ),
    "window queries": (
        "create_sliding_window_mask",
        (0,),
        {"window_size": 1},
        ValueError,
        "seq_len_q must be at least",
    ),
    "slots too long": ("create_cache_mask", (lengths(5), 1, 4), {}, ValueError, "lengths must lie in 0..4"),
    "slots negative": ("create_cache_mask", (lengths(-1), 1, 4), {}, ValueError, "lengths must lie in 0..4"),
    "slots floats": ("create_cache_mask", (ones(1), 1, 4), {}, TypeError, "lengths must be integers"),
    "slots nothing new": ("create_cache_mask", (lengths(1), 0, 4), {}, ValueError, "seq_len_q must be at least 1"),
    "slots capacity": ("create_cache_mask", (lengths(0), 1, 0), {}, ValueError, "capacity must be at least 1"),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_refuses(sibling, name):
    refused(sibling, *MASKS[name])


# ---- Caches ----------------------------------------------------------------------------------------------------------


def cache(sibling):
    """Two sequences of up to four tokens, two heads of four features."""
    return sibling.package.init_cache(2, 2, 4, 4)


TOKENS = ones(2, 2, 3, 4)
SIZES = {"batch_size": 2, "num_kv_heads": 2, "capacity": 4, "head_dim": 4}
NBYTES = {"batch_size": 1, "num_kv_heads": 2, "capacity": 3, "head_dim": 4, "num_layers": 5}


REFUSED_SIZES = [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)]


@pytest.mark.parametrize(
    ("size", "value", "error"),
    [
        (size, value, error)
        for size in SIZES
        for value, error in REFUSED_SIZES
        if (size, value) != ("batch_size", 0)  # a batch may be empty
    ],
)
def test_init_cache_refuses_size(sibling, size, value, error):
    refused(sibling, "init_cache", (), {**SIZES, size: value}, error, f"{size} must be .*{size}={value}")


@pytest.mark.parametrize(("value", "error"), REFUSED_SIZES)
@pytest.mark.parametrize("size", NBYTES)
def test_kv_cache_nbytes_refuses_size(sibling, size, value, error):
    dtype = sibling.array(ones(1)).dtype
    refused(
        sibling, "kv_cache_nbytes", (), {**NBYTES, size: value, "dtype": dtype}, error, f"{size} must be .*={value}"
    )


@pytest.mark.parametrize(("rule", "args"), [("batch_size must be at least 0", (-1, 4)), ("capacity must be", (2, 0))])
def test_module_refuses_cache_of_size(sibling, rule, args):
    module = sibling.module("MultiHeadAttentionWithCache", AttentionSpec(8, 2))
    with pytest.raises(ValueError, match=rule):
        module.init_cache(*args)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_], ids=["int32", "bool"])
def test_init_cache_refuses_dtype(sibling, dtype):
    dtype = sibling.array(np.zeros(1, dtype)).dtype
    refused(sibling, "init_cache", (), {**SIZES, "dtype": dtype}, TypeError, "dtype must be floating point")


APPENDS = {
    "no cache": ({"cache": None}, TypeError, "cache must be a KVCache"),
    "key rank": ({"key": ones(2, 3, 4)}, ValueError, "key must have 4 axes"),
    "integer key": ({"key": integers(2, 2, 3, 4)}, TypeError, "key must be floating point"),
    "key heads": ({"key": ones(2, 1, 3, 4), "value": ones(2, 1, 3, 4)}, ValueError, "must have shape"),
    "key batch": ({"key": ones(1, 2, 3, 4), "value": ones(1, 2, 3, 4)}, ValueError, "must have shape"),
    "key head_dim": ({"key": ones(2, 2, 3, 5), "value": ones(2, 2, 3, 5)}, ValueError, "must have shape"),
    "dtypes": ({"key": halves(2, 2, 3, 4), "value": halves(2, 2, 3, 4)}, TypeError, "must have the dtype"),
    "value shape": ({"value": ones(2, 2, 2, 4)}, ValueError, "value must have the shape of key"),
    "value dtype": ({"value": halves(2, 2, 3, 4)}, TypeError, "value must have the dtype"),
    "too many tokens": (
        {"key": ones(2, 2, 5, 4), "value": ones(2, 2, 5, 4)},
        ValueError,
        r"must not exceed the 4 slots of the cache, got lengths=\[0, 0\]",
    ),
    "new_lengths too long": ({"new_lengths": [3, 4]}, ValueError, r"new_lengths must lie in 0..3, got .*\[3, 4\]"),
    "new_lengths negative": ({"new_lengths": [-1, 1]}, ValueError, "new_lengths must lie in 0..3"),
    "new_lengths array": ({"new_lengths": lengths(3, 4)}, ValueError, "new_lengths must lie in 0..3"),
    "new_lengths too few": ({"new_lengths": [3]}, ValueError, "new_lengths must have shape"),
    "new_lengths floats": ({"new_lengths": [1.0, 2.0]}, TypeError, "new_lengths must be integers"),
    "new_lengths booleans": ({"new_lengths": [True, False]}, TypeError, "new_lengths must be integers"),
}


@pytest.mark.parametrize("name", APPENDS)
def test_append_to_cache_refuses(sibling, name):
    keywords, error, message = APPENDS[name]
    keywords = {"cache": cache, "key": TOKENS, "value": TOKENS, **keywords}
    refused(sibling, "append_to_cache", (), keywords, error, message)


CACHED = {
    "rank": ({"x": ones(3, 8)}, ValueError, "x must have 3 axes"),
    "integers": ({"x": integers(2, 3, 8)}, TypeError, "x must be floating point"),
    "list": ({"x": [[[1.0] * 8]]}, TypeError, "x must be"),
    "width": ({"x": ones(2, 3, 6)}, ValueError, "q_proj must have 8 features"),
    "dtype": ({"x": halves(2, 3, 8)}, TypeError, "q_proj must have the dtype"),
    "batch": ({"x": ones(3, 3, 8)}, ValueError, "x must have the batch size of the cache"),
    "too many tokens": ({"x": ones(2, 5, 8)}, ValueError, "must not exceed the 4 slots of the cache"),
    "no cache": ({"cache": None}, TypeError, "cache must be a KVCache"),
    "cache heads": ({"cache": lambda s: s.package.init_cache(2, 1, 4, 4)}, ValueError, "must have shape"),
    "cache head_dim": ({"cache": lambda s: s.package.init_cache(2, 2, 4, 8)}, ValueError, "must have shape"),
    "cache dtype": (
        {"cache": lambda s: s.package.init_cache(2, 2, 4, 4, s.array(halves(1)).dtype)},
        TypeError,
        "must have the dtype",
    ),
    "new_lengths too long": ({"new_lengths": [4, 1]}, ValueError, "new_lengths must lie in 0..3"),
    "new_lengths negative": ({"new_lengths": [-1, 1]}, ValueError, "new_lengths must lie in 0..3"),
    "new_lengths too few": ({"new_lengths": [1]}, ValueError, "new_lengths must have shape"),
    "new_lengths floats": ({"new_lengths": [1.0, 2.0]}, TypeError, "new_lengths must be integers"),
}


@pytest.mark.parametrize("name", CACHED)
def test_static_cache_function_refuses(sibling, name):
    keywords, error, message = CACHED[name]
    weights = parity.random_weights(parity.AttentionSpec(8, 2))
    keywords = {"x": ones(2, 3, 8), "cache": cache, **keywords, "weights": weights, "spec": parity.AttentionSpec(8, 2)}
    refused(sibling, "multi_head_attention_with_static_cache", (), keywords, error, message)


@pytest.mark.parametrize("name", CACHED)
def test_cached_module_refuses(sibling, name):
    keywords, error, message = CACHED[name]
    module = sibling.module("MultiHeadAttentionWithCache", AttentionSpec(8, 2))
    keywords = {name: converted(sibling, x) for name, x in {"x": ones(2, 3, 8), "cache": cache, **keywords}.items()}
    with pytest.raises(error, match=message):
        module(**keywords)


GROWING = {
    "rank": ({"x": ones(3, 8)}, ValueError, "x must have 3 axes"),
    "integers": ({"x": integers(2, 3, 8)}, TypeError, "x must be floating point"),
    "width": ({"x": ones(2, 3, 6)}, ValueError, "q_proj must have 8 features"),
    "only keys": ({"cache_v": None}, ValueError, "cache_k and cache_v must be given together"),
    "only values": ({"cache_k": None}, ValueError, "cache_k and cache_v must be given together"),
    "cache_k rank": ({"cache_k": ones(2, 3, 4)}, ValueError, "cache_k must have 4 axes"),
    "cache_k integers": ({"cache_k": integers(2, 2, 5, 4)}, TypeError, "cache_k must be floating point"),
    "cache_k batch": ({"cache_k": ones(1, 2, 5, 4)}, ValueError, "cache_k must have shape"),
    "cache_k heads": ({"cache_k": ones(2, 1, 5, 4)}, ValueError, "cache_k must have shape"),
    "cache_k dtype": ({"cache_k": halves(2, 2, 5, 4)}, TypeError, "cache_k must have the dtype"),
    "cache_v length": ({"cache_v": ones(2, 2, 4, 4)}, ValueError, "cache_v must have shape"),
    "cache_v head_dim": ({"cache_v": ones(2, 2, 5, 6)}, ValueError, "cache_v must have shape"),
    "cache_v dtype": ({"cache_v": halves(2, 2, 5, 4)}, TypeError, "cache_v must have the dtype"),
}


@pytest.mark.parametrize("name", GROWING)
def test_growing_cache_function_refuses(sibling, name):
    keywords, error, message = GROWING[name]
    weights = parity.random_weights(parity.AttentionSpec(8, 2))
    cached = {"cache_k": ones(2, 2, 5, 4), "cache_v": ones(2, 2, 5, 4)}
    keywords = {"x": ones(2, 3, 8), **cached, **keywords, "weights": weights, "spec": parity.AttentionSpec(8, 2)}
    refused(sibling, "multi_head_attention_with_cache", (), keywords, error, message)


# ---- Weights that are not finite -------------------------------------------------------------------------------------

FINITE_SPEC = parity.AttentionSpec(8, 2)


def spoilt(value):
    weights = parity.random_weights(FINITE_SPEC)
    weights["k_proj.weight"][1, 2] = value
    return weights


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("function", ["multi_head_attention", "multi_head_attention_with_cache"])
def test_weights_that_are_not_finite_are_refused(sibling, function, value):
    weights = converted(sibling, spoilt(value))
    with pytest.raises(ValueError, match=r"weights must be finite, got NaN or infinities in \['k_proj\."):
        getattr(sibling.package, function)(sibling.array(ones(1, 3, 8)), weights, FINITE_SPEC)


def test_weights_may_be_mapped_over_in_torch():
    import torch

    import mha_torch

    weights = {name: torch.from_numpy(w)[None].repeat(2, *[1] * w.ndim) for name, w in spoilt(0.0).items()}
    x = torch.ones(1, 3, 8)
    outputs = torch.func.vmap(lambda w: mha_torch.multi_head_attention(x, w, FINITE_SPEC, need_weights=True)[0])(
        weights
    )
    assert outputs.shape == (2, 1, 3, 8)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
