"""Bad input is refused before any work, by every public function, with the argument's name and the rule."""

import math

import numpy as np
import pytest
from flax import nnx
from helpers.refusals import refuses, refuses_type

import parity
from mha_spec import Alibi, AttentionSpec, GridBias, RelativeBias, RelativeProducts, Rope

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


def refused(sibling, function, args, keywords, refusal):
    """Call a function of the package and expect the error."""
    for part in function.split("."):
        function = getattr(sibling.package if isinstance(function, str) else function, part)
    args = [converted(sibling, x) for x in args]
    keywords = {name: converted(sibling, x) for name, x in keywords.items()}
    with refusal:
        function(*args, **keywords)


# ---- Configurations --------------------------------------------------------------------------------------------------

CONFIGS = {
    "d_model 0": ({"d_model": 0}, refuses("d_model", d_model=0)),
    "d_model negative": ({"d_model": -8}, refuses("d_model", d_model=-8)),
    "d_model float": ({"d_model": 8.0}, refuses_type("d_model", d_model=8.0)),
    "d_model text": ({"d_model": "8"}, refuses_type("d_model", d_model="8")),
    "num_heads 0": ({"num_heads": 0}, refuses("num_heads", num_heads=0)),
    "num_heads True": ({"num_heads": True}, refuses_type("num_heads", num_heads=True)),
    "num_heads None": ({"num_heads": None}, refuses_type("num_heads", num_heads=None)),
    "num_heads not dividing": (
        {"num_heads": 3},
        refuses("d_model", "d_model=8 and num_heads=3 without head_dim"),
    ),
    "num_kv_heads 0": ({"num_kv_heads": 0}, refuses("num_kv_heads", num_kv_heads=0)),
    "num_kv_heads not dividing": (
        {"num_heads": 4, "num_kv_heads": 3},
        refuses("num_heads", num_heads=4, num_kv_heads=3),
    ),
    "num_kv_heads above num_heads": (
        {"num_kv_heads": 4},
        refuses("num_heads", num_heads=2, num_kv_heads=4),
    ),
    "head_dim 0": ({"head_dim": 0}, refuses("head_dim", head_dim=0)),
    "head_dim float": ({"head_dim": 4.0}, refuses_type("head_dim", head_dim=4.0)),
    "d_in negative": ({"d_in": -1}, refuses("d_in", d_in=-1)),
    "d_kv 0": ({"d_kv": 0}, refuses("d_kv", d_kv=0)),
    "fused_qkv with another d_kv": (
        {"fused_qkv": True, "d_kv": 6},
        refuses("d_kv", d_kv=6, d_in=8),
    ),
    "fused_qkv with another d_in": (
        {"fused_qkv": True, "d_in": 6, "d_kv": 8},
        refuses("d_kv", d_kv=8, d_in=6),
    ),
    "rope on odd heads": (
        {"rope": Rope(1e4), "head_dim": 3},
        refuses("head_dim", head_dim=3),
    ),
    "rope with another d_kv": (
        {"rope": Rope(1e4), "d_kv": 6},
        refuses("d_kv", d_kv=6, d_in=8),
    ),
    "rope of a number": ({"rope": 1e4}, refuses_type("rope", rope=10000.0)),
    "dropout 1": ({"dropout": 1.0}, refuses("dropout", dropout=1.0)),
    "dropout negative": ({"dropout": -0.1}, refuses("dropout", dropout=-0.1)),
    "dropout NaN": ({"dropout": math.nan}, refuses("dropout", dropout=math.nan)),
    "dropout text": ({"dropout": "0.5"}, refuses_type("dropout", dropout="0.5")),
    "dropout False": ({"dropout": False}, refuses_type("dropout", dropout=False)),
    "dropout None": ({"dropout": None}, refuses_type("dropout", dropout=None)),
    "output_dropout 1": (
        {"output_dropout": 1.0},
        refuses("output_dropout", output_dropout=1.0),
    ),
    "output_dropout text": (
        {"output_dropout": "0"},
        refuses_type("output_dropout", output_dropout="0"),
    ),
    "output_dropout False": (
        {"output_dropout": np.False_},
        refuses_type("output_dropout", output_dropout=...),
    ),
    "scale 0": ({"scale": 0.0}, refuses("scale", scale=0.0)),
    "scale negative": ({"scale": -0.5}, refuses("scale", scale=-0.5)),
    "scale NaN": ({"scale": math.nan}, refuses("scale", scale=math.nan)),
    "scale infinite": ({"scale": math.inf}, refuses("scale", scale=math.inf)),
    "scale text": ({"scale": "1"}, refuses_type("scale", scale="1")),
    "soft_cap 0": ({"soft_cap": 0.0}, refuses("soft_cap", soft_cap=0.0)),
    "soft_cap text": ({"soft_cap": "50"}, refuses_type("soft_cap", soft_cap="50")),
    "window_size 0": ({"window_size": 0}, refuses("window_size", window_size=0)),
    "window_size 1.5": ({"window_size": 1.5}, refuses_type("window_size", window_size=1.5)),
    "chunk_size True": ({"chunk_size": True}, refuses_type("chunk_size", chunk_size=True)),
    "window and chunks": (
        {"window_size": 4, "chunk_size": 8},
        refuses("window_size", window_size=4, chunk_size=8),
    ),
    "qkv_bias text": ({"qkv_bias": "no"}, refuses_type("qkv_bias", qkv_bias="no")),
    "qkv_bias None": ({"qkv_bias": None}, refuses_type("qkv_bias", qkv_bias=None)),
    "out_bias 0": ({"out_bias": 0}, refuses_type("out_bias", out_bias=0)),
    "out_proj 1": ({"out_proj": 1}, refuses_type("out_proj", out_proj=1)),
    "fused_qkv text": ({"fused_qkv": "x"}, refuses_type("fused_qkv", fused_qkv="x")),
}
KINDS = ("MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache")


@pytest.mark.parametrize("name", CONFIGS)
def test_spec_refuses_the_configuration(name):
    keywords, refusal = CONFIGS[name]
    with refusal:
        AttentionSpec(**{"d_model": 8, "num_heads": 2, **keywords})


THETAS = {
    "0": (0.0, refuses("theta", theta=0.0)),
    "NaN": (math.nan, refuses("theta", theta=math.nan)),
    "infinite": (math.inf, refuses("theta", theta=math.inf)),
    "text": ("1e4", refuses_type("theta", theta="1e4")),
    "True": (True, refuses_type("theta", theta=True)),
    "None": (None, refuses_type("theta", theta=None)),
}


@pytest.mark.parametrize("name", THETAS)
def test_rope_refuses_theta(name):
    theta, refusal = THETAS[name]
    with refusal:
        Rope(theta)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [8, None, {"d_model": 8, "num_heads": 2}], ids=repr)
def test_module_refuses_what_is_not_a_spec(sibling, kind, spec):
    keywords = {"rngs": nnx.Rngs(0)} if sibling.name == "jax" else {}
    with refuses_type("spec", spec=spec):
        getattr(sibling.package, kind)(spec, **keywords)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_self_attention_refuses_another_width_of_keys(sibling, kind):
    with refuses("d_kv", d_kv=6, d_in=8):
        sibling.module(kind, AttentionSpec(8, 2, d_kv=6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.bool_, np.complex64], ids=lambda dtype: dtype.__name__)
def test_module_refuses_weights_that_are_not_floating_point(sibling, kind, dtype):
    keyword = {"jax": "param_dtype", "torch": "dtype"}[sibling.name]
    with refuses_type(keyword, {keyword: ...}):
        sibling.module(kind, AttentionSpec(8, 2), **{keyword: sibling.array(np.zeros(1, dtype)).dtype})


# ---- Stages ----------------------------------------------------------------------------------------------------------

HEADS = ones(2, 2, 3, 4)
RELATIVE = AttentionSpec(8, 2, relative_bias=RelativeBias(8, 8))
PRODUCTS = AttentionSpec(8, 2, relative_products=RelativeProducts(1, 2))
SLOPES = AttentionSpec(16, 4, alibi=Alibi())

STAGES = {
    "split_heads rank": ("split_heads", (ones(3, 8), 2), {}, refuses("x", {"x.shape": (3, 8)})),
    "split_heads integers": ("split_heads", (integers(2, 3, 8), 2), {}, refuses_type("x", {"x.dtype": ...})),
    "split_heads list": ("split_heads", ([[[1.0, 2.0]]], 2), {}, refuses_type("x", "list")),
    "split_heads width": ("split_heads", (ones(2, 3, 8), 3), {}, refuses("the width", width=8, num_heads=3)),
    "split_heads 0": ("split_heads", (ones(2, 3, 8), 0), {}, refuses("num_heads", num_heads=0)),
    "split_heads float": ("split_heads", (ones(2, 3, 8), 2.0), {}, refuses_type("num_heads", num_heads=2.0)),
    "combine_heads rank": ("combine_heads", (ones(2, 3, 8),), {}, refuses("x", {"x.shape": (2, 3, 8)})),
    "combine_heads integers": ("combine_heads", (integers(2, 2, 3, 4),), {}, refuses_type("x", {"x.dtype": ...})),
    "repeat_kv_heads rank": ("repeat_kv_heads", (ones(2, 3, 4), 2), {}, refuses("x", {"x.shape": (2, 3, 4)})),
    "repeat_kv_heads groups": ("repeat_kv_heads", (HEADS, 3), {}, refuses("num_heads", num_heads=3, num_kv_heads=2)),
    "repeat_kv_heads 0": ("repeat_kv_heads", (HEADS, 0), {}, refuses("num_heads", num_heads=0)),
    "scores query rank": ("attention_scores", (ones(2, 3, 4), HEADS), {}, refuses("query", {"query.shape": (2, 3, 4)})),
    "scores key rank": ("attention_scores", (HEADS, ones(2, 3, 4)), {}, refuses("key", {"key.shape": (2, 3, 4)})),
    "scores integers": (
        "attention_scores",
        (integers(2, 2, 3, 4), HEADS),
        {},
        refuses_type("query", {"query.dtype": ...}),
    ),
    "scores head_dim": (
        "attention_scores",
        (HEADS, ones(2, 2, 3, 6)),
        {},
        refuses("key", {"key.shape": (2, 2, 3, 6), "query.shape": (2, 2, 3, 4)}),
    ),
    "scores batch": (
        "attention_scores",
        (HEADS, ones(3, 2, 3, 4)),
        {},
        refuses("key", {"key.shape": (3, 2, 3, 4), "query.shape": (2, 2, 3, 4)}),
    ),
    "scores groups": (
        "attention_scores",
        (ones(2, 3, 3, 4), HEADS),
        {},
        refuses("num_heads", num_heads=3, num_kv_heads=2),
    ),
    "scores bias": ("attention_scores", (HEADS, HEADS, ones(5)), {}, refuses("bias", {"bias.shape": (5,)})),
    "softmax sinks": (
        "masked_softmax",
        (HEADS, None, ones(4)),
        {},
        refuses("sinks", {"sinks.shape": (4,)}),
    ),
    "softmax integer sinks": (
        "masked_softmax",
        (HEADS, None, integers(2)),
        {},
        refuses_type("sinks", {"sinks.dtype": ...}),
    ),
    "attention without its sinks": (
        "scaled_dot_product_attention",
        (HEADS, HEADS, HEADS, AttentionSpec(8, 2, sinks=True)),
        {},
        refuses("sinks", {"spec.sinks": True}),
    ),
    "scores relative bias": (
        "attention_scores",
        (HEADS, HEADS, None, RELATIVE, None, ones(2, 8)),
        {},
        refuses("relative_bias", {"relative_bias.shape": (2, 8)}),
    ),
    "scores integer relative bias": (
        "attention_scores",
        (HEADS, HEADS, None, RELATIVE, None, integers(8, 2)),
        {},
        refuses_type("relative_bias", {"relative_bias.dtype": ...}),
    ),
    "scores of more tokens than a grid has": (
        "attention_scores",
        (HEADS, HEADS, None, AttentionSpec(8, 2, relative_bias=GridBias(1, 2)), None, ones(3, 2)),
        {},
        refuses("tokens", {"(T, S)": (3, 3)}),
    ),
    "scores with a relative bias of no spec": (
        "attention_scores",
        (HEADS, HEADS, None, None, None, ones(8, 2)),
        {},
        refuses("relative_bias", {"spec.relative_bias": None}),
    ),
    "attention without its relative bias": (
        "scaled_dot_product_attention",
        (HEADS, HEADS, HEADS, RELATIVE),
        {},
        refuses("relative_bias", {"spec.relative_bias": ...}),
    ),
    "scores relative keys": (
        "attention_scores",
        (HEADS, HEADS, None, PRODUCTS, None, None, ones(3, 3)),
        {},
        refuses("relative_keys", {"relative_keys.shape": (3, 3)}),
    ),
    "scores integer relative keys": (
        "attention_scores",
        (HEADS, HEADS, None, PRODUCTS, None, None, integers(4, 4)),
        {},
        refuses_type("relative_keys", {"relative_keys.dtype": ...}),
    ),
    "scores with relative queries of no side": (
        "attention_scores",
        (HEADS, HEADS, None, PRODUCTS, None, None, ones(4, 4), ones(4, 4)),
        {},
        refuses("relative_queries", {"spec.relative_products": ...}),
    ),
    "attention without its relative keys": (
        "scaled_dot_product_attention",
        (HEADS, HEADS, HEADS, PRODUCTS),
        {},
        refuses("relative_keys", {"spec.relative_products": ...}),
    ),
    "scores of some heads with slopes": (
        "attention_scores",
        (HEADS, HEADS, None, SLOPES),
        {},
        refuses("query", "2 heads and num_heads=4"),
    ),
    "attention of a head with slopes": (
        "scaled_dot_product_attention",
        (HEADS[:, :1], HEADS[:, :1], HEADS[:, :1], SLOPES),
        {},
        refuses("query", "1 heads and num_heads=4"),
    ),
    "softmax rank": ("masked_softmax", (ones(3, 4),), {}, refuses("scores", {"scores.shape": (3, 4)})),
    "softmax integers": ("masked_softmax", (integers(2, 2, 3, 4),), {}, refuses_type("scores", {"scores.dtype": ...})),
    "softmax float mask": ("masked_softmax", (HEADS, ones(3, 4)), {}, refuses_type("mask", {"mask.dtype": ...})),
    "softmax mask": ("masked_softmax", (HEADS, booleans(5)), {}, refuses("mask", {"mask.shape": (5,)})),
    "context rank": (
        "attention_context",
        (ones(2, 3, 3), HEADS),
        {},
        refuses("attn_weights", {"attn_weights.shape": (2, 3, 3)}),
    ),
    "context value rank": (
        "attention_context",
        (ones(2, 2, 3, 3), ones(2, 3, 4)),
        {},
        refuses("value", {"value.shape": (2, 3, 4)}),
    ),
    "context integers": (
        "attention_context",
        (ones(2, 2, 3, 3), integers(2, 2, 3, 4)),
        {},
        refuses_type("value", {"value.dtype": ...}),
    ),
    "context keys": (
        "attention_context",
        (ones(2, 2, 3, 5), HEADS),
        {},
        refuses("value", {"value.shape": (2, 2, 3, 4), "attn_weights.shape": (2, 2, 3, 5)}),
    ),
    "dropout rate 1": ("apply_dropout", (HEADS, 1.0), {}, refuses("dropout", dropout=1.0)),
    "dropout rate negative": ("apply_dropout", (HEADS, -0.5), {}, refuses("dropout", dropout=-0.5)),
    "dropout float keep": ("apply_dropout", (HEADS, 0.5, HEADS), {}, refuses_type("keep", {"keep.dtype": ...})),
    "dropout keep": ("apply_dropout", (HEADS, 0.5, booleans(5)), {}, refuses("keep", {"keep.shape": (5,)})),
    "dropout rate text": (
        "apply_dropout",
        (HEADS, "0.5"),
        {},
        refuses_type("dropout", dropout="0.5"),
    ),
    "project_qkv spec": (
        "project_qkv",
        (lambda sibling: lambda name, x: x, ones(2, 3, 8), ones(2, 3, 8), ones(2, 3, 8), 2),
        {},
        refuses_type("spec", spec=2),
    ),
    "scores spec": ("attention_scores", (HEADS, HEADS, None, 2), {}, refuses_type("spec", spec=2)),
}  # RoPE refuses in test_rope.py


@pytest.mark.parametrize("name", STAGES)
def test_stage_refuses(sibling, name):
    refused(sibling, *STAGES[name])


def test_width_must_divide_into_heads(sibling):
    """PyTorch looks at what each projection returns, JAX at what is split into heads."""
    refusals = {"torch": refuses("q_proj", "8 features"), "jax": refuses("the width", width=8, num_heads=3)}
    inputs = [sibling.array(np.ones((2, 3, 8), np.float32))] * 3
    with refusals[sibling.name]:
        sibling.package.project_qkv(lambda name, x: x, *inputs, spec=AttentionSpec(9, 3))


# ---- Attention of split heads ----------------------------------------------------------------------------------------

PADDING_LENGTHS = {  # of two sequences of three keys
    "too long": (
        {"key_padding_lengths": [3, 4]},
        refuses("key_padding_lengths", key_padding_lengths=[3, 4]),
    ),
    "negative": ({"key_padding_lengths": [-1, 3]}, refuses("key_padding_lengths", key_padding_lengths=[-1, 3])),
    "array too long": (
        {"key_padding_lengths": lengths(3, 4)},
        refuses("key_padding_lengths", key_padding_lengths=[3, 4]),
    ),
    "too few": (
        {"key_padding_lengths": [3]},
        refuses("key_padding_lengths", {"key_padding_lengths.shape": (1,)}),
    ),
    "too many": (
        {"key_padding_lengths": [1, 2, 3]},
        refuses("key_padding_lengths", {"key_padding_lengths.shape": (3,)}),
    ),
    "floats": (
        {"key_padding_lengths": [1.0, 2.0]},
        refuses_type("key_padding_lengths", {"key_padding_lengths.dtype": ...}),
    ),
    "booleans": (
        {"key_padding_lengths": [True, False]},
        refuses_type("key_padding_lengths", {"key_padding_lengths.dtype": ...}),
    ),
    "number": (
        {"key_padding_lengths": 3},
        refuses("key_padding_lengths", {"key_padding_lengths.shape": ()}),
    ),
    "2 axes": (
        {"key_padding_lengths": lengths(1, 2)[None]},
        refuses("key_padding_lengths", {"key_padding_lengths.shape": (1, 2)}),
    ),
}
DOT_PRODUCTS = {
    **{f"lengths {name}": refusal for name, refusal in PADDING_LENGTHS.items()},
    "query rank": ({"query": ones(2, 3, 4)}, refuses("query", {"query.shape": (2, 3, 4)})),
    "key rank": ({"key": ones(2, 3, 4)}, refuses("key", {"key.shape": (2, 3, 4)})),
    "value rank": ({"value": ones(3, 4)}, refuses("value", {"value.shape": (3, 4)})),
    "integer query": ({"query": integers(2, 2, 3, 4)}, refuses_type("query", {"query.dtype": ...})),
    "integer value": ({"value": integers(2, 2, 3, 4)}, refuses_type("value", {"value.dtype": ...})),
    "key list": ({"key": [[[[1.0]]]]}, refuses_type("key", "list")),
    "key dtype": ({"key": halves(2, 2, 3, 4)}, refuses_type("key", {"key.dtype": ..., "query.dtype": ...})),
    "value dtype": ({"value": halves(2, 2, 3, 4)}, refuses_type("value", {"value.dtype": ..., "query.dtype": ...})),
    "value shape": (
        {"value": ones(2, 2, 5, 4)},
        refuses("value", {"value.shape": (2, 2, 5, 4), "key.shape": (2, 2, 3, 4)}),
    ),
    "batch": ({"query": ones(3, 2, 3, 4)}, refuses("key", {"key.shape": (2, 2, 3, 4), "query.shape": (3, 2, 3, 4)})),
    "batch of 1": (
        {"query": ones(1, 2, 3, 4)},
        refuses("key", {"key.shape": (2, 2, 3, 4), "query.shape": (1, 2, 3, 4)}),
    ),
    "head_dim": ({"query": ones(2, 2, 3, 8)}, refuses("key", {"key.shape": (2, 2, 3, 4), "query.shape": (2, 2, 3, 8)})),
    "groups": ({"query": ones(2, 3, 3, 4)}, refuses("num_heads", num_heads=3, num_kv_heads=2)),
    "float mask": ({"mask": ones(3, 3)}, refuses_type("mask", {"mask.dtype": ...})),
    "integer mask": ({"mask": integers(3, 3)}, refuses_type("mask", {"mask.dtype": ...})),
    "mask list": ({"mask": [[True]]}, refuses_type("mask", "list")),
    "mask keys": ({"mask": booleans(3, 4)}, refuses("mask", {"mask.shape": (3, 4)})),
    "mask of a batch": ({"mask": booleans(3, 3, 3)}, refuses("mask", {"mask.shape": (3, 3, 3)})),
    "mask that stretches": ({"mask": booleans(4, 1, 3, 3)}, refuses("mask", {"mask.shape": (4, 1, 3, 3)})),
    "mask of 5 axes": ({"mask": booleans(1, 1, 1, 3, 3)}, refuses("mask", {"mask.shape": (1, 1, 1, 3, 3)})),
    "boolean bias": ({"bias": booleans(3, 3)}, refuses_type("bias", {"bias.dtype": ..., "query.dtype": ...})),
    "bias dtype": ({"bias": halves(3, 3)}, refuses_type("bias", {"bias.dtype": ..., "query.dtype": ...})),
    "bias keys": ({"bias": ones(3, 4)}, refuses("bias", {"bias.shape": (3, 4)})),
    "bias of 5 axes": ({"bias": ones(1, 1, 1, 3, 3)}, refuses("bias", {"bias.shape": (1, 1, 1, 3, 3)})),
    "dropout 1": ({"dropout": 1.0}, refuses("dropout", dropout=1.0)),
    "dropout negative": ({"dropout": -0.5}, refuses("dropout", dropout=-0.5)),
    "dropout text": ({"dropout": "0.5"}, refuses_type("dropout", dropout="0.5")),
    "dropout False": ({"dropout": False}, refuses_type("dropout", dropout=False)),
    "spec": ({"spec": 2}, refuses_type("spec", spec=2)),
}
KEEPS = {
    "float keep": ({"dropout": 0.5, "dropout_keep": HEADS}, refuses_type("keep", {"keep.dtype": ...})),
    "keep shape": ({"dropout": 0.5, "dropout_keep": booleans(5)}, refuses("keep", {"keep.shape": (5,)})),
}
FUSED = {
    "need_weights": ({"need_weights": True}, refuses("need_weights and dropout_keep")),
    "dropout_keep": ({"dropout_keep": booleans(2, 2, 3, 3)}, refuses("need_weights and dropout_keep")),
}
SPLIT = {"query": HEADS, "key": HEADS, "value": HEADS}


@pytest.mark.parametrize("function", ["scaled_dot_product_attention", "fused.scaled_dot_product_attention"])
@pytest.mark.parametrize("name", DOT_PRODUCTS)
def test_dot_product_attention_refuses(sibling, name, function):
    keywords, refusal = DOT_PRODUCTS[name]
    refused(sibling, function, (), {**SPLIT, **keywords}, refusal)


@pytest.mark.parametrize("name", KEEPS)
def test_dot_product_attention_refuses_to_keep(sibling, name):
    keywords, refusal = KEEPS[name]
    refused(sibling, "scaled_dot_product_attention", (), {**SPLIT, **keywords}, refusal)


@pytest.mark.parametrize("name", FUSED)
def test_fused_path_refuses_what_it_does_not_store(sibling, name):
    keywords, refusal = FUSED[name]
    refused(sibling, "fused.scaled_dot_product_attention", (), {**SPLIT, **keywords}, refusal)


CORES = {
    "rank": ((ones(3, 8), ones(2, 3, 8), ones(2, 3, 8), 2), refuses("x", {"x.shape": (3, 8)})),
    "integers": ((integers(2, 3, 8), ones(2, 3, 8), ones(2, 3, 8), 2), refuses_type("x", {"x.dtype": ...})),
    "heads": ((ones(2, 3, 8), ones(2, 3, 8), ones(2, 3, 8), 3), refuses("the width", width=8, num_heads=3)),
    "key width": (
        (ones(2, 3, 8), ones(2, 3, 6), ones(2, 3, 6), 2),
        refuses("key", {"key.shape": (2, 2, 3, 3), "query.shape": (2, 2, 3, 4)}),
    ),
    "value length": (
        (ones(2, 3, 8), ones(2, 3, 8), ones(2, 4, 8), 2),
        refuses("value", {"value.shape": (2, 2, 4, 4), "key.shape": (2, 2, 3, 4)}),
    ),
    "float mask": (
        (ones(2, 3, 8), ones(2, 3, 8), ones(2, 3, 8), 2, ones(3, 3)),
        refuses_type("mask", {"mask.dtype": ...}),
    ),
}


@pytest.mark.parametrize("name", CORES)
def test_core_refuses(sibling, name):
    args, refusal = CORES[name]
    refused(sibling, "multi_head_attention_core", args, {}, refusal)


# ---- Layers ----------------------------------------------------------------------------------------------------------

SPEC = parity.AttentionSpec(8, 2, d_in=6, d_kv=5)
LAYERS = {
    "query rank": ({"query": ones(6)}, refuses("query", {"query.shape": (6,)})),
    "integer query": ({"query": integers(2, 3, 6)}, refuses_type("query", {"query.dtype": ...})),
    "query list": ({"query": [[[1.0] * 6]]}, refuses_type("query", "list")),
    "query width": ({"query": ones(2, 3, 7)}, refuses("the input of q_proj", shape=(2, 3, 7))),
    "query dtype": (
        {"query": halves(2, 3, 6), "key": halves(2, 4, 5)},
        refuses_type("the input of q_proj", {"x.dtype": ...}),
    ),
    "no key of that width": ({"key": None}, refuses("the input of k_proj", shape=(2, 3, 6))),
    "key rank": ({"key": ones(4, 5)}, refuses("key", {"key.shape": (4, 5)})),
    "integer key": ({"key": integers(2, 4, 5)}, refuses_type("key", {"key.dtype": ...})),
    "key width": ({"key": ones(2, 4, 6)}, refuses("the input of k_proj", shape=(2, 4, 6))),
    "key dtype": ({"key": halves(2, 4, 5)}, refuses_type("key", {"key.dtype": ..., "query.dtype": ...})),
    "key batch": ({"key": ones(3, 4, 5)}, refuses("key", {"key.shape[0]": 3, "query.shape[0]": 2})),
    "key batch of 1": ({"key": ones(1, 4, 5)}, refuses("key", {"key.shape[0]": 1, "query.shape[0]": 2})),
    "value without key": ({"key": None, "value": ones(2, 4, 5)}, refuses("value", "key=None and a value")),
    "value rank": ({"value": ones(4, 5)}, refuses("value", {"value.shape": (4, 5)})),
    "value width": ({"value": ones(2, 4, 6)}, refuses("the input of v_proj", shape=(2, 4, 6))),
    "value length": ({"value": ones(2, 3, 5)}, refuses("value", {"value.shape[1]": 3, "key.shape[1]": 4})),
    "value batch": ({"value": ones(1, 4, 5)}, refuses("value", {"value.shape[0]": 1, "query.shape[0]": 2})),
    "float mask": ({"mask": ones(3, 4)}, refuses_type("mask", {"mask.dtype": ...})),
    "mask that stretches": ({"mask": booleans(4, 1, 3, 4)}, refuses("mask", {"mask.shape": (4, 1, 3, 4)})),
    "mask of S, T": ({"mask": booleans(4, 3)}, refuses("mask", {"mask.shape": (4, 3)})),
    "bias keys": ({"bias": ones(3, 3)}, refuses("bias", {"bias.shape": (3, 3)})),
    "bias dtype": ({"bias": halves(3, 4)}, refuses_type("bias", {"bias.dtype": ..., "query.dtype": ...})),
    "too few positions without RoPE": (
        {"positions": lengths(0, 1)[None]},
        refuses("positions", {"positions.shape": (1, 2)}),
    ),
}
ROPE_SPEC = parity.AttentionSpec(8, 2, rope=Rope(100.0))
ROPE_LAYERS = {
    "key": ({"key": ones(2, 3, 8)}, refuses("key", "a key and rope=Rope(theta=100.0)")),
    "float positions": ({"positions": ones(1, 3)}, refuses_type("positions", {"positions.dtype": ...})),
    "flat positions": ({"positions": lengths(0, 1, 2)}, refuses("positions", {"positions.shape": (3,)})),
    "too few positions": (
        {"positions": lengths(0, 1)[None]},
        refuses("positions", {"positions.shape": (1, 2)}),
    ),
    "positions list": ({"positions": [[0, 1, 2]]}, refuses_type("positions", "list")),
}
every_need = pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])


@every_need
@pytest.mark.parametrize("name", LAYERS)
def test_layer_function_refuses(sibling, name, need_weights):
    keywords, refusal = LAYERS[name]
    keywords = {"query": ones(2, 3, 6), "key": ones(2, 4, 5), **keywords, "weights": parity.random_weights(SPEC)}
    options = {"spec": SPEC, "need_weights": need_weights}
    refused(sibling, "multi_head_attention", (), {**keywords, **options}, refusal)


@every_need
@pytest.mark.parametrize("name", LAYERS)
def test_module_refuses(sibling, name, need_weights):
    keywords, refusal = LAYERS[name]
    module = sibling.module("MultiHeadAttention", AttentionSpec(8, 2, d_in=6, d_kv=5))
    keywords = {"query": ones(2, 3, 6), "key": ones(2, 4, 5), **keywords}
    keywords = {name: converted(sibling, x) for name, x in keywords.items()}
    with refusal:
        module(**keywords, need_weights=need_weights)


@pytest.mark.parametrize("name", ROPE_LAYERS)
def test_layer_function_with_rope_refuses(sibling, name):
    keywords, refusal = ROPE_LAYERS[name]
    keywords = {"query": ones(2, 3, 8), **keywords, "weights": parity.random_weights(ROPE_SPEC)}
    refused(sibling, "multi_head_attention", (), {**keywords, "spec": ROPE_SPEC}, refusal)


@pytest.mark.parametrize("name", ROPE_LAYERS)
def test_module_with_rope_refuses(sibling, name):
    keywords, refusal = ROPE_LAYERS[name]
    module = sibling.module("MultiHeadAttention", AttentionSpec(8, 2, rope=Rope(1e2)))
    keywords = {name: converted(sibling, x) for name, x in {"query": ones(2, 3, 8), **keywords}.items()}
    with refusal:
        module(**keywords)


SELF_ATTENTIONS = {
    **PADDING_LENGTHS,
    "rank": ({"x": ones(8)}, refuses("x", {"x.shape": (8,)})),
    "integers": ({"x": integers(2, 3, 8)}, refuses_type("x", {"x.dtype": ...})),
    "list": ({"x": [[[1.0] * 8]]}, refuses_type("x", "list")),
    "width": ({"x": ones(2, 3, 6)}, refuses("the input of q_proj", shape=(2, 3, 6))),
    "mask": ({"mask": booleans(3, 4)}, refuses("mask", {"mask.shape": (3, 4)})),
    "float mask": ({"mask": ones(3, 3)}, refuses_type("mask", {"mask.dtype": ...})),
    "bias": ({"bias": ones(3, 4)}, refuses("bias", {"bias.shape": (3, 4)})),
    "too few positions without RoPE": (
        {"positions": lengths(0, 1)[None]},
        refuses("positions", {"positions.shape": (1, 2)}),
    ),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SELF_ATTENTIONS)
def test_self_attention_refuses(sibling, name, is_causal):
    keywords, refusal = SELF_ATTENTIONS[name]
    module = sibling.module("MultiHeadSelfAttention", AttentionSpec(8, 2))
    keywords = {name: converted(sibling, x) for name, x in {"x": ones(2, 3, 8), **keywords}.items()}
    with refusal:
        module(**keywords, is_causal=is_causal)


@ONLY_TORCH
@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "bias"])
def test_torch_module_refuses_numpy(sibling, name):
    inputs = {"query": ones(2, 3, 8), "key": ones(2, 3, 8), "value": ones(2, 3, 8), "mask": booleans(3, 3)}
    given = {**{other: sibling.array(x) for other, x in inputs.items()}, name: inputs.get(name, ones(3, 3))}
    with refuses_type(name, "ndarray"):
        sibling.module("MultiHeadAttention", AttentionSpec(8, 2))(**given)


# ---- Weights of the functional forms ---------------------------------------------------------------------------------

LAYER_SPEC = AttentionSpec(8, 2, d_in=6)
PACKED_SPEC = AttentionSpec(8, 2, d_in=6, fused_qkv=True)
WEIGHTS = parity.random_weights(LAYER_SPEC)
PACKED = {"qkv_proj.weight": ones(24, 6), "qkv_proj.bias": ones(24)}


def without(*names):
    return {name: x for name, x in WEIGHTS.items() if name not in names}


BAD_WEIGHTS = {
    "nothing": ({}, refuses("weights", missing=..., unexpected=[])),
    "no q_proj": (without("q_proj.weight", "q_proj.bias"), refuses("weights", missing=..., unexpected=[])),
    "bias without weight": (without("v_proj.weight"), refuses("weights", missing=..., unexpected=[])),
    "out_proj bias alone": (without("out_proj.weight"), refuses("weights", missing=..., unexpected=[])),
    "other name": ({**WEIGHTS, "o_proj.weight": ones(8, 8)}, refuses("weights", missing=[], unexpected=...)),
    "packed and separate": ({**WEIGHTS, **PACKED}, refuses("weights", missing=[], unexpected=...)),
    "packed": (PACKED, refuses("weights", missing=..., unexpected=...)),
    "no bias": (without("k_proj.bias"), refuses("weights", missing=["k_proj.bias"], unexpected=[])),
    "transposed q_proj": (
        {**WEIGHTS, "q_proj.weight": WEIGHTS["q_proj.weight"].T},
        refuses("q_proj.…"),
    ),
    "all transposed": (
        {name: x.T for name, x in WEIGHTS.items()},
        refuses("q_proj.…"),
    ),
    "transposed out_proj": ({**WEIGHTS, "out_proj.weight": ones(8, 10)}, refuses("out_proj.…")),
    "flat weight": ({**WEIGHTS, "k_proj.weight": ones(8)}, refuses("k_proj.…")),
    "flat out_proj": ({**WEIGHTS, "out_proj.weight": ones(8)}, refuses("out_proj.…")),
    "bias of another width": ({**WEIGHTS, "k_proj.bias": ones(6)}, refuses("k_proj.bias", {"k_proj.bias.shape": (6,)})),
    "bias of 2 axes": ({**WEIGHTS, "q_proj.bias": ones(1, 8)}, refuses("q_proj.bias", {"q_proj.bias.shape": ...})),
    "other head_dim": ({**WEIGHTS, "k_proj.weight": ones(6, 6)}, refuses("k_proj.…")),
    "integer weight": ({**WEIGHTS, "q_proj.weight": integers(8, 6)}, refuses_type("q_proj.…")),
    "integer bias": ({**WEIGHTS, "q_proj.bias": integers(8)}, refuses_type("q_proj.bias", {"q_proj.bias.dtype": ...})),
    "mixed weight": ({**WEIGHTS, "k_proj.weight": halves(8, 6)}, refuses_type("k_proj.…")),
    "mixed bias": ({**WEIGHTS, "v_proj.bias": halves(8)}, refuses_type("v_proj.bias")),
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
    weights, refusal = BAD_WEIGHTS[name]
    function, keywords = FUNCTIONS[function]
    refused(sibling, function, (), {**keywords, "weights": weights, "spec": LAYER_SPEC}, refusal)


PACKED |= {"out_proj.weight": ones(8, 8), "out_proj.bias": ones(8)}
BAD_PACKED = {
    "separate": (WEIGHTS, refuses("weights", missing=..., unexpected=...)),
    "rows": (
        {**PACKED, "qkv_proj.weight": ones(25, 6)},
        refuses("qkv_proj.…"),
    ),
    "bias": ({**PACKED, "qkv_proj.bias": ones(8)}, refuses("qkv_proj.…")),
}


@every_function
@pytest.mark.parametrize("name", BAD_PACKED)
def test_function_refuses_packed_weights(sibling, name, function):
    weights, refusal = BAD_PACKED[name]
    function, keywords = FUNCTIONS[function]
    refused(sibling, function, (), {**keywords, "weights": weights, "spec": PACKED_SPEC}, refusal)


@every_function
@pytest.mark.parametrize(
    ("spec", "refusal"),
    [
        (2, refuses_type("spec", spec=2)),
        (AttentionSpec(9, 3, d_in=6), refuses("q_proj.…")),
        (AttentionSpec(8, 2, num_kv_heads=1, d_in=6), refuses("k_proj.…")),
        (AttentionSpec(8, 2, d_in=6, out_proj=False), refuses("weights", missing=[], unexpected=...)),
        (
            AttentionSpec(8, 2, d_in=6, qkv_bias=False),
            refuses("weights", missing=[], unexpected=["k_proj.bias", "q_proj.bias", "v_proj.bias"]),
        ),
    ],
    ids=["number", "heads", "groups", "no out_proj", "no bias"],
)
def test_function_refuses_the_spec_of_another_layer(sibling, function, spec, refusal):
    function, keywords = FUNCTIONS[function]
    refused(sibling, function, (), {**keywords, "weights": WEIGHTS, "spec": spec}, refusal)


@pytest.mark.parametrize("function", ["growing", "static"])
def test_cached_function_refuses_another_width_of_keys(sibling, function):
    function, keywords = FUNCTIONS[function]
    spec = AttentionSpec(8, 2, d_in=6, d_kv=5)
    keywords = {**keywords, "weights": parity.random_weights(spec), "spec": spec}
    refused(sibling, function, (), keywords, refuses("d_kv", d_kv=5, d_in=6))


@pytest.mark.parametrize("weights", [None, [ones(8, 6)]], ids=["None", "list"])
@every_function
def test_function_refuses_weights_that_are_no_mapping(sibling, function, weights):
    function, keywords = FUNCTIONS[function]
    refused(sibling, function, (), {**keywords, "weights": weights, "spec": LAYER_SPEC}, refuses_type("weights"))


@every_function
def test_function_refuses_the_weights_of_the_other_framework_in_one_line(sibling, function):
    function, keywords = FUNCTIONS[function]
    flat = {"jax": {name: sibling.array(x) for name, x in WEIGHTS.items()}}
    tree = {"torch": {"q_proj": {"kernel": sibling.array(ones(6, 8))}}}
    weights = {**flat, **tree}[sibling.name]
    keywords = {name: converted(sibling, x) for name, x in keywords.items()}

    with (refuses_type if sibling.name == "jax" else refuses)("weights"):
        getattr(sibling.package, function)(**keywords, weights=weights, spec=LAYER_SPEC)


# ---- Masks -----------------------------------------------------------------------------------------------------------

MASKS = {
    "causal 0": ("create_causal_mask", (0,), {}, refuses("seq_len_q", seq_len_q=0)),
    "causal negative": ("create_causal_mask", (-1,), {}, refuses("seq_len_q", seq_len_q=-1)),
    "causal keys 0": ("create_causal_mask", (2, 0), {}, refuses("seq_len_k", seq_len_k=0)),
    "causal float": ("create_causal_mask", (2.0,), {}, refuses_type("seq_len_q", seq_len_q=2.0)),
    "causal boolean": ("create_causal_mask", (True,), {}, refuses_type("seq_len_q", seq_len_q=True)),
    "padding keys 0": ("create_padding_mask", ([0], 0), {}, refuses("seq_len_k", seq_len_k=0)),
    "padding too long": ("create_padding_mask", ([1, 4], 3), {}, refuses("lengths", lengths=[1, 4])),
    "padding negative": ("create_padding_mask", ([-1], 3), {}, refuses("lengths", lengths=[-1])),
    "padding array": ("create_padding_mask", (lengths(1, 4), 3), {}, refuses("lengths", lengths=[1, 4])),
    "padding floats": ("create_padding_mask", ([1.0], 3), {}, refuses_type("lengths", {"lengths.dtype": ...})),
    "padding mask": ("create_padding_mask", ([True, False], 2), {}, refuses_type("lengths", {"lengths.dtype": ...})),
    "padding number": ("create_padding_mask", (2, 3), {}, refuses("lengths", {"lengths.shape": ()})),
    "padding 2 axes": ("create_padding_mask", ([[1, 2]], 3), {}, refuses("lengths", {"lengths.shape": (1, 2)})),
    "attention 0": ("create_attention_mask", (0,), {}, refuses("seq_len_q", seq_len_q=0)),
    "attention keys": ("create_attention_mask", (2, -1), {}, refuses("seq_len_k", seq_len_k=-1)),
    "attention too long": (
        "create_attention_mask",
        (2, 3),
        {"key_padding_lengths": [4]},
        refuses("key_padding_lengths", key_padding_lengths=[4]),
    ),
    "attention floats": (
        "create_attention_mask",
        (2, 3),
        {"key_padding_lengths": [1.5]},
        refuses_type("key_padding_lengths", {"key_padding_lengths.dtype": ...}),
    ),
    "cached keys": (
        "create_causal_mask_with_cache",
        (2, 4, 1),
        {},
        refuses("seq_len_k", seq_len_k=4, cache_len=1, seq_len_q=2),
    ),
    "cached negative": ("create_causal_mask_with_cache", (3, 2, -1), {}, refuses("cache_len", cache_len=-1)),
    "cached nothing new": ("create_causal_mask_with_cache", (0, 2, 2), {}, refuses("seq_len_q", seq_len_q=0)),
    "cached float": ("create_causal_mask_with_cache", (1, 2, 1.0), {}, refuses_type("cache_len", cache_len=1.0)),
    "window 0": ("create_sliding_window_mask", (3,), {"window_size": 0}, refuses("window_size", window_size=0)),
    "window float": (
        "create_sliding_window_mask",
        (3,),
        {"window_size": 1.5},
        refuses_type("window_size", window_size=1.5),
    ),
    "window queries": (
        "create_sliding_window_mask",
        (0,),
        {"window_size": 1},
        refuses("seq_len_q", seq_len_q=0),
    ),
    "slots too long": ("create_cache_mask", (lengths(5), 1, 4), {}, refuses("lengths", lengths=[5])),
    "slots negative": ("create_cache_mask", (lengths(-1), 1, 4), {}, refuses("lengths", lengths=[-1])),
    "slots floats": ("create_cache_mask", (ones(1), 1, 4), {}, refuses_type("lengths", {"lengths.dtype": ...})),
    "slots nothing new": ("create_cache_mask", (lengths(1), 0, 4), {}, refuses("seq_len_q", seq_len_q=0)),
    "slots capacity": ("create_cache_mask", (lengths(0), 1, 0), {}, refuses("capacity", capacity=0)),
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
    refused(sibling, "init_cache", (), {**SIZES, size: value}, refuses(size).of(error))


@pytest.mark.parametrize(("value", "error"), REFUSED_SIZES)
@pytest.mark.parametrize("size", NBYTES)
def test_kv_cache_nbytes_refuses_size(sibling, size, value, error):
    dtype = sibling.array(ones(1)).dtype
    refused(sibling, "kv_cache_nbytes", (), {**NBYTES, size: value, "dtype": dtype}, refuses(size).of(error))


@pytest.mark.parametrize(
    ("rule", "args"), [(refuses("batch_size", batch_size=-1), (-1, 4)), (refuses("capacity", capacity=0), (2, 0))]
)
def test_module_refuses_cache_of_size(sibling, rule, args):
    module = sibling.module("MultiHeadAttentionWithCache", AttentionSpec(8, 2))
    with rule:
        module.init_cache(*args)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_], ids=["int32", "bool"])
def test_init_cache_refuses_dtype(sibling, dtype):
    dtype = sibling.array(np.zeros(1, dtype)).dtype
    refused(sibling, "init_cache", (), {**SIZES, "dtype": dtype}, refuses_type("dtype", dtype=...))


APPENDS = {
    "no cache": ({"cache": None}, refuses_type("cache", "NoneType")),
    "key rank": ({"key": ones(2, 3, 4)}, refuses("key", {"key.shape": (2, 3, 4)})),
    "integer key": ({"key": integers(2, 2, 3, 4)}, refuses_type("key", {"key.dtype": ...})),
    "key heads": (
        {"key": ones(2, 1, 3, 4), "value": ones(2, 1, 3, 4)},
        refuses("cache.keys", {"cache.keys.shape": (2, 2, 4, 4)}),
    ),
    "key batch": (
        {"key": ones(1, 2, 3, 4), "value": ones(1, 2, 3, 4)},
        refuses("cache.keys", {"cache.keys.shape": (2, 2, 4, 4)}),
    ),
    "key head_dim": (
        {"key": ones(2, 2, 3, 5), "value": ones(2, 2, 3, 5)},
        refuses("cache.keys", {"cache.keys.shape": (2, 2, 4, 4)}),
    ),
    "dtypes": (
        {"key": halves(2, 2, 3, 4), "value": halves(2, 2, 3, 4)},
        refuses_type("cache.keys", {"cache.keys.dtype": ..., "key.dtype": ...}),
    ),
    "value shape": (
        {"value": ones(2, 2, 2, 4)},
        refuses("value", {"value.shape": (2, 2, 2, 4), "key.shape": (2, 2, 3, 4)}),
    ),
    "value dtype": ({"value": halves(2, 2, 3, 4)}, refuses_type("value", {"value.dtype": ..., "key.dtype": ...})),
    "too many tokens": (
        {"key": ones(2, 2, 5, 4), "value": ones(2, 2, 5, 4)},
        refuses("lengths + new tokens", lengths=[0, 0], new_lengths=...),
    ),
    "new_lengths too long": ({"new_lengths": [3, 4]}, refuses("new_lengths", new_lengths=[3, 4])),
    "new_lengths negative": ({"new_lengths": [-1, 1]}, refuses("new_lengths", new_lengths=[-1, 1])),
    "new_lengths array": ({"new_lengths": lengths(3, 4)}, refuses("new_lengths", new_lengths=[3, 4])),
    "new_lengths too few": ({"new_lengths": [3]}, refuses("new_lengths", {"new_lengths.shape": (1,)})),
    "new_lengths floats": ({"new_lengths": [1.0, 2.0]}, refuses_type("new_lengths", {"new_lengths.dtype": ...})),
    "new_lengths booleans": (
        {"new_lengths": [True, False]},
        refuses_type("new_lengths", {"new_lengths.dtype": ...}),
    ),
}


@pytest.mark.parametrize("name", APPENDS)
def test_append_to_cache_refuses(sibling, name):
    keywords, refusal = APPENDS[name]
    keywords = {"cache": cache, "key": TOKENS, "value": TOKENS, **keywords}
    refused(sibling, "append_to_cache", (), keywords, refusal)


CACHED = {
    "rank": ({"x": ones(3, 8)}, refuses("x", {"x.shape": (3, 8)})),
    "integers": ({"x": integers(2, 3, 8)}, refuses_type("x", {"x.dtype": ...})),
    "list": ({"x": [[[1.0] * 8]]}, refuses_type("x", "list")),
    "width": ({"x": ones(2, 3, 6)}, refuses("the input of q_proj", shape=(2, 3, 6))),
    "dtype": ({"x": halves(2, 3, 8)}, refuses_type("the input of q_proj", {"x.dtype": ...})),
    "batch": ({"x": ones(3, 3, 8)}, refuses("x", {"x.shape[0]": 3, "cached": 2})),
    "too many tokens": (
        {"x": ones(2, 5, 8)},
        refuses("lengths + new tokens", lengths=[0, 0], new_lengths=...),
    ),
    "no cache": ({"cache": None}, refuses_type("cache", "NoneType")),
    "cache heads": (
        {"cache": lambda s: s.package.init_cache(2, 1, 4, 4)},
        refuses("cache.keys", {"cache.keys.shape": (2, 1, 4, 4)}),
    ),
    "cache head_dim": (
        {"cache": lambda s: s.package.init_cache(2, 2, 4, 8)},
        refuses("cache.keys", {"cache.keys.shape": (2, 2, 4, 8)}),
    ),
    "cache dtype": (
        {"cache": lambda s: s.package.init_cache(2, 2, 4, 4, s.array(halves(1)).dtype)},
        refuses_type("cache.keys", {"cache.keys.dtype": ..., "key.dtype": ...}),
    ),
    "new_lengths too long": ({"new_lengths": [4, 1]}, refuses("new_lengths", new_lengths=[4, 1])),
    "new_lengths negative": ({"new_lengths": [-1, 1]}, refuses("new_lengths", new_lengths=[-1, 1])),
    "new_lengths too few": ({"new_lengths": [1]}, refuses("new_lengths", {"new_lengths.shape": (1,)})),
    "new_lengths floats": ({"new_lengths": [1.0, 2.0]}, refuses_type("new_lengths", {"new_lengths.dtype": ...})),
}


@pytest.mark.parametrize("name", CACHED)
def test_static_cache_function_refuses(sibling, name):
    keywords, refusal = CACHED[name]
    weights = parity.random_weights(parity.AttentionSpec(8, 2))
    keywords = {"x": ones(2, 3, 8), "cache": cache, **keywords, "weights": weights, "spec": parity.AttentionSpec(8, 2)}
    refused(sibling, "multi_head_attention_with_static_cache", (), keywords, refusal)


@pytest.mark.parametrize("name", CACHED)
def test_cached_module_refuses(sibling, name):
    keywords, refusal = CACHED[name]
    module = sibling.module("MultiHeadAttentionWithCache", AttentionSpec(8, 2))
    keywords = {name: converted(sibling, x) for name, x in {"x": ones(2, 3, 8), "cache": cache, **keywords}.items()}
    with refusal:
        module(**keywords)


GROWING = {
    "rank": ({"x": ones(3, 8)}, refuses("x", {"x.shape": (3, 8)})),
    "integers": ({"x": integers(2, 3, 8)}, refuses_type("x", {"x.dtype": ...})),
    "width": ({"x": ones(2, 3, 6)}, refuses("the input of q_proj", shape=(2, 3, 6))),
    "only keys": ({"cache_v": None}, refuses("cache_k and cache_v", "only one of them")),
    "only values": ({"cache_k": None}, refuses("cache_k and cache_v", "only one of them")),
    "cache_k rank": ({"cache_k": ones(2, 3, 4)}, refuses("cache_k", {"cache_k.shape": (2, 3, 4)})),
    "cache_k integers": ({"cache_k": integers(2, 2, 5, 4)}, refuses_type("cache_k", {"cache_k.dtype": ...})),
    "cache_k batch": ({"cache_k": ones(1, 2, 5, 4)}, refuses("cache_k", {"cache_k.shape": (1, 2, 5, 4)})),
    "cache_k heads": ({"cache_k": ones(2, 1, 5, 4)}, refuses("cache_k", {"cache_k.shape": (2, 1, 5, 4)})),
    "cache_k dtype": (
        {"cache_k": halves(2, 2, 5, 4)},
        refuses_type("cache_k", {"cache_k.dtype": ..., "key.dtype": ...}),
    ),
    "cache_v length": ({"cache_v": ones(2, 2, 4, 4)}, refuses("cache_v", {"cache_v.shape": (2, 2, 4, 4)})),
    "cache_v head_dim": ({"cache_v": ones(2, 2, 5, 6)}, refuses("cache_v", {"cache_v.shape": (2, 2, 5, 6)})),
    "cache_v dtype": (
        {"cache_v": halves(2, 2, 5, 4)},
        refuses_type("cache_v", {"cache_v.dtype": ..., "key.dtype": ...}),
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_growing_cache_function_refuses(sibling, name):
    keywords, refusal = GROWING[name]
    weights = parity.random_weights(parity.AttentionSpec(8, 2))
    cached = {"cache_k": ones(2, 2, 5, 4), "cache_v": ones(2, 2, 5, 4)}
    keywords = {"x": ones(2, 3, 8), **cached, **keywords, "weights": weights, "spec": parity.AttentionSpec(8, 2)}
    refused(sibling, "multi_head_attention_with_cache", (), keywords, refusal)


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
    with refuses("weights", "NaN or infinities in ['k_proj."):
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
