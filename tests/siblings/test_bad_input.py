"""Bad input raises an error before any work, in every function of every implementation, with values
by name.

Heads are 32 wide, a whole tile of ttnn, so that shapes are the same everywhere.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample

import parity
from mha_spec import (
    Alibi,
    AttentionSpec,
    GridBias,
    Latent,
    RelativeBias,
    RelativeProducts,
    Rope,
)


@dataclass(frozen=True)
class Ones:
    """A tensor of ones, made for an implementation in its usual dtype, a different floating dtype
    or integers.
    """

    shape: tuple[int, ...]
    kind: str = "usual"

    def of(self, sibling):
        dtypes = {"usual": sibling.kernel_dtype, "other": sibling.other_dtype, "integers": np.int32}
        return sibling.array(np.ones(self.shape, dtypes[self.kind]))

    def as_weight(self, sibling, name):
        return Ones(sibling.weight_shape(name, self.shape), self.kind).of(sibling)


def ones(*shape):
    return Ones(shape)


def others(*shape):
    return Ones(shape, "other")


def integers(*shape):
    return Ones(shape, "integers")


def booleans(*shape):
    return np.ones(shape, np.bool_)


def floats(*shape):
    """An option such as a bias, in float32."""
    return np.ones(shape, np.float32)


def lengths(*values):
    return np.array(values, np.int32)


def of_layer(spec):
    """The weights of a layer, made for an implementation."""
    return lambda sibling: sibling.weights(
        {name: x.astype(sibling.kernel_dtype) for name, x in parity.random_weights(spec).items()},
        spec,
    )


def usual(sibling, kind, spec):
    """A module in the usual dtype."""
    options = {} if sibling.kernel_dtype is np.float32 else sibling.in_dtype(sibling.kernel_dtype)
    return sibling.module(kind, spec, **options)


def converted(sibling, x):
    """Return an argument for the implementation: tensors, weights by name, options, and results of
    functions.
    """
    if isinstance(x, Ones):
        return x.of(sibling)
    if isinstance(x, dict):
        return sibling.container(
            {name: tensor.as_weight(sibling, name) for name, tensor in x.items()}
        )
    if callable(x):
        return x(sibling)
    return sibling.option(x)


def assert_error(sibling, function, args, keywords, input_error):
    """Call a function of the package, or a module, and expect the error."""
    if isinstance(function, str):
        path, function = function.split("."), sibling.package
        for part in path:
            function = getattr(function, part)
    args = [converted(sibling, x) for x in args]
    keywords = {name: converted(sibling, x) for name, x in keywords.items()}
    with input_error:
        function(*args, **keywords)


# ---- Stages --------------------------------------------------------------------------------------

HEADS = ones(2, 2, 3, 32)
RELATIVE = AttentionSpec(64, 2, relative_bias=RelativeBias(8, 8))
PRODUCTS = AttentionSpec(64, 2, relative_products=RelativeProducts(1, 2))
SLOPES = AttentionSpec(128, 4, alibi=Alibi())


def table(name, *shape, dtype=None):
    """Return sinks, or a table of positions, as the stages accept it, in the usual dtype or a
    different one.
    """
    return lambda sibling: sibling.stage_weight(name, np.ones(shape, dtype or sibling.kernel_dtype))


GRID = table("relative_bias", 3, 2)
VECTORS = table("relative_keys", 4, 32)


def learned(**weights):
    """Return weights that change scores, by name."""
    return lambda sibling: {name: converted(sibling, x) for name, x in weights.items()}


def fused_kernel(sibling):
    """Return the default kernel of layers."""
    return sibling.package.fused.attend


STAGES = {
    "split_heads rank": ("split_heads", (ones(3, 64), 2), {}, rejects("x", {"x.shape": (3, 64)})),
    "split_heads integers": (
        "split_heads",
        (integers(2, 3, 64), 2),
        {},
        rejects_type("x…", {"x.dtype": ...}),
    ),
    "split_heads list": ("split_heads", ([[[1.0, 2.0]]], 2), {}, rejects_type("x", "list")),
    "split_heads width": (
        "split_heads",
        (ones(2, 3, 64), 3),
        {},
        rejects("the width", width=64, num_heads=3),
    ),
    "split_heads 0": ("split_heads", (ones(2, 3, 64), 0), {}, rejects("num_heads", num_heads=0)),
    "split_heads float": (
        "split_heads",
        (ones(2, 3, 64), 2.0),
        {},
        rejects_type("num_heads", num_heads=2.0),
    ),
    "combine_heads rank": (
        "combine_heads",
        (ones(2, 3, 64),),
        {},
        rejects("x", {"x.shape": (2, 3, 64)}),
    ),
    "combine_heads integers": (
        "combine_heads",
        (integers(2, 2, 3, 32),),
        {},
        rejects_type("x…", {"x.dtype": ...}),
    ),
    "repeat_kv_heads rank": (
        "repeat_kv_heads",
        (ones(2, 3, 4), 2),
        {},
        rejects("x", {"x.shape": (2, 3, 4)}),
    ),
    "repeat_kv_heads groups": (
        "repeat_kv_heads",
        (HEADS, 3),
        {},
        rejects("num_heads", num_heads=3, num_kv_heads=2),
    ),
    "repeat_kv_heads 0": ("repeat_kv_heads", (HEADS, 0), {}, rejects("num_heads", num_heads=0)),
    "scores query rank": (
        "attention_scores",
        (ones(2, 3, 4), HEADS),
        {},
        rejects("query", {"query.shape": (2, 3, 4)}),
    ),
    "scores key rank": (
        "attention_scores",
        (HEADS, ones(2, 3, 4)),
        {},
        rejects("key", {"key.shape": (2, 3, 4)}),
    ),
    "scores integers": (
        "attention_scores",
        (integers(2, 2, 3, 32), HEADS),
        {},
        rejects_type("query…", {"query.dtype": ...}),
    ),
    "scores head_dim": (
        "attention_scores",
        (HEADS, ones(2, 2, 3, 64)),
        {},
        rejects("key", {"key.shape": (2, 2, 3, 64), "query.shape": (2, 2, 3, 32)}),
    ),
    "scores batch": (
        "attention_scores",
        (HEADS, ones(3, 2, 3, 32)),
        {},
        rejects("key", {"key.shape": (3, 2, 3, 32), "query.shape": (2, 2, 3, 32)}),
    ),
    "scores groups": (
        "attention_scores",
        (ones(2, 3, 3, 32), HEADS),
        {},
        rejects("num_heads", num_heads=3, num_kv_heads=2),
    ),
    "scores bias": (
        "attention_scores",
        (HEADS, HEADS, floats(5)),
        {},
        rejects("bias", {"bias.shape": (5,)}),
    ),
    "softmax sinks": (
        "masked_softmax",
        (HEADS, None, HEADS),
        {},
        rejects("sinks", {"sinks.shape": (2, 2, 3, 32)}),
    ),
    "softmax integer sinks": (
        "masked_softmax",
        (HEADS, None, table("sinks", 2, dtype=np.int32)),
        {},
        rejects_type("sinks…"),
    ),
    "attention without its sinks": (
        "scaled_dot_product_attention",
        (HEADS, HEADS, HEADS, AttentionSpec(64, 2, sinks=True)),
        {},
        rejects("learned", missing=["sinks"], unexpected=[]),
    ),
    "scores relative bias": (
        "attention_scores",
        (HEADS, HEADS, None, RELATIVE),
        {"learned": learned(relative_bias=ones(2, 8))},
        rejects("relative_bias", {"relative_bias.shape": (2, 8)}),
    ),
    "scores integer relative bias": (
        "attention_scores",
        (HEADS, HEADS, None, RELATIVE),
        {"learned": learned(relative_bias=table("relative_bias", 8, 2, dtype=np.int32))},
        rejects_type("relative_bias…"),
    ),
    "scores of more tokens than a grid has": (
        "attention_scores",
        (HEADS, HEADS, None, AttentionSpec(64, 2, relative_bias=GridBias(1, 2))),
        {"learned": learned(relative_bias=GRID)},
        rejects("tokens", {"(T, S)": (3, 3)}),
    ),
    "scores with a relative bias of no spec": (
        "attention_scores",
        (HEADS, HEADS),
        {"learned": learned(relative_bias=ones(8, 2))},
        rejects("learned", missing=[], unexpected=["relative_bias"]),
    ),
    "attention without its relative bias": (
        "scaled_dot_product_attention",
        (HEADS, HEADS, HEADS, RELATIVE),
        {},
        rejects("learned", missing=["relative_bias"], unexpected=[]),
    ),
    "scores relative keys": (
        "attention_scores",
        (HEADS, HEADS, None, PRODUCTS),
        {"learned": learned(relative_keys=ones(3, 3))},
        rejects("relative_keys", {"relative_keys.shape": (3, 3)}),
    ),
    "scores integer relative keys": (
        "attention_scores",
        (HEADS, HEADS, None, PRODUCTS),
        {"learned": learned(relative_keys=table("relative_keys", 4, 32, dtype=np.int32))},
        rejects_type("relative_keys…"),
    ),
    "scores with relative queries of no side": (
        "attention_scores",
        (HEADS, HEADS, None, PRODUCTS),
        {"learned": learned(relative_keys=VECTORS, relative_queries=VECTORS)},
        rejects("learned", missing=[], unexpected=["relative_queries"]),
    ),
    "attention without its relative keys": (
        "scaled_dot_product_attention",
        (HEADS, HEADS, HEADS, PRODUCTS),
        {},
        rejects("learned", missing=["relative_keys"], unexpected=[]),
    ),
    "scores of some heads of a spec": (
        "attention_scores",
        (HEADS, HEADS, None, SLOPES),
        {},
        rejects("query", {"query.shape": (2, 2, 3, 32)}),
    ),
    "attention of wider heads than a spec's": (
        "scaled_dot_product_attention",
        (ones(2, 4, 3, 64), ones(2, 4, 3, 64), ones(2, 4, 3, 64), SLOPES),
        {},
        rejects("query", {"query.shape": (2, 4, 3, 64)}),
    ),
    "softmax rank": (
        "masked_softmax",
        (ones(3, 4),),
        {},
        rejects("scores", {"scores.shape": (3, 4)}),
    ),
    "softmax integers": (
        "masked_softmax",
        (integers(2, 2, 3, 32),),
        {},
        rejects_type("scores…", {"scores.dtype": ...}),
    ),
    "softmax float mask": (
        "masked_softmax",
        (HEADS, floats(3, 32)),
        {},
        rejects_type("mask", {"mask.dtype": ...}),
    ),
    "softmax mask": (
        "masked_softmax",
        (HEADS, booleans(5)),
        {},
        rejects("mask", {"mask.shape": (5,)}),
    ),
    "context rank": (
        "attention_context",
        (ones(2, 3, 3), HEADS),
        {},
        rejects("attn_weights", {"attn_weights.shape": (2, 3, 3)}),
    ),
    "context value rank": (
        "attention_context",
        (ones(2, 2, 3, 3), ones(2, 3, 4)),
        {},
        rejects("value", {"value.shape": (2, 3, 4)}),
    ),
    "context integers": (
        "attention_context",
        (ones(2, 2, 3, 3), integers(2, 2, 3, 32)),
        {},
        rejects_type("value…", {"value.dtype": ...}),
    ),
    "context keys": (
        "attention_context",
        (ones(2, 2, 3, 5), HEADS),
        {},
        rejects("value", {"value.shape": (2, 2, 3, 32), "attn_weights.shape": (2, 2, 3, 5)}),
    ),
    "dropout rate 1": ("apply_dropout", (HEADS, 1.0), {}, rejects("dropout", dropout=1.0)),
    "dropout rate negative": ("apply_dropout", (HEADS, -0.5), {}, rejects("dropout", dropout=-0.5)),
    "dropout float keep": (
        "apply_dropout",
        (HEADS, 0.5, floats(3, 32)),
        {},
        rejects_type("keep", {"keep.dtype": ...}),
    ),
    "dropout keep": (
        "apply_dropout",
        (HEADS, 0.5, booleans(5)),
        {},
        rejects("keep", {"keep.shape": (5,)}),
    ),
    "dropout rate text": (
        "apply_dropout",
        (HEADS, "0.5"),
        {},
        rejects_type("dropout", dropout="0.5"),
    ),
    "project_qkv spec": (
        "project_qkv",
        (lambda sibling: lambda name, x: x, ones(2, 3, 64), ones(2, 3, 64), ones(2, 3, 64), 2),
        {},
        rejects_type("spec", spec=2),
    ),
    "scores spec": ("attention_scores", (HEADS, HEADS, None, 2), {}, rejects_type("spec", spec=2)),
}


@pytest.mark.parametrize("name", STAGES)
def test_stage_rejects_bad_input(sibling, name):
    """Each stage of attention raises an error for bad input."""
    assert_error(sibling, *STAGES[name])


OTHER_INPUT = AttentionSpec(64, 2, d_in=160)
"""A layer whose input is as wide as the output of none of its projections."""

PROJECTED = [
    OTHER_INPUT,
    OTHER_INPUT.replace(fused_qkv=True),
    OTHER_INPUT.replace(head_dim=64, latent=Latent(32, 32, q_rank=32)),
]


def echoing(project, replaced):
    """Return projections of which one returns its input."""
    return lambda name, x: x if name == replaced else project(name, x)


def test_width_of_each_projection_is_checked(sibling):
    """Each projection that returns its input raises an error with its name."""
    x = ones(2, 3, 160).of(sibling)
    for spec in PROJECTED:
        project = sibling.package.project_with(of_layer(spec)(sibling), spec)
        for name in spec.qkv_projections if not spec.fused_qkv else ["qkv_proj"]:
            with rejects(name, "features"):
                sibling.package.project_qkv(echoing(project, name), x, x, x, spec)


# ---- Attention of split heads --------------------------------------------------------------------

PADDING_LENGTHS = {  # of two sequences of three keys
    "too long": (
        {"key_padding_lengths": [3, 4]},
        rejects("key_padding_lengths", key_padding_lengths=[3, 4]),
    ),
    "negative": (
        {"key_padding_lengths": [-1, 3]},
        rejects("key_padding_lengths", key_padding_lengths=[-1, 3]),
    ),
    "array too long": (
        {"key_padding_lengths": lengths(3, 4)},
        rejects("key_padding_lengths", key_padding_lengths=[3, 4]),
    ),
    "too few": (
        {"key_padding_lengths": [3]},
        rejects("key_padding_lengths", {"key_padding_lengths.shape": (1,)}),
    ),
    "too many": (
        {"key_padding_lengths": [1, 2, 3]},
        rejects("key_padding_lengths", {"key_padding_lengths.shape": (3,)}),
    ),
    "floats": (
        {"key_padding_lengths": [1.0, 2.0]},
        rejects_type("key_padding_lengths", {"key_padding_lengths.dtype": ...}),
    ),
    "booleans": (
        {"key_padding_lengths": [True, False]},
        rejects_type("key_padding_lengths", {"key_padding_lengths.dtype": ...}),
    ),
    "number": (
        {"key_padding_lengths": 3},
        rejects("key_padding_lengths", {"key_padding_lengths.shape": ()}),
    ),
    "2 axes": (
        {"key_padding_lengths": lengths(1, 2)[None]},
        rejects("key_padding_lengths", {"key_padding_lengths.shape": (1, 2)}),
    ),
}
DOT_PRODUCTS = {
    **{f"lengths {name}": input_error for name, input_error in PADDING_LENGTHS.items()},
    "query rank": ({"query": ones(2, 3, 4)}, rejects("query", {"query.shape": (2, 3, 4)})),
    "key rank": ({"key": ones(2, 3, 4)}, rejects("key", {"key.shape": (2, 3, 4)})),
    "value rank": ({"value": ones(3, 4)}, rejects("value", {"value.shape": (3, 4)})),
    "integer query": (
        {"query": integers(2, 2, 3, 32)},
        rejects_type("query…", {"query.dtype": ...}),
    ),
    "integer value": (
        {"value": integers(2, 2, 3, 32)},
        rejects_type("value…", {"value.dtype": ...}),
    ),
    "key list": ({"key": [[[[1.0]]]]}, rejects_type("key", "list")),
    "key dtype": (
        {"key": others(2, 2, 3, 32)},
        rejects_type("key", {"key.dtype": ..., "query.dtype": ...}),
    ),
    "value dtype": (
        {"value": others(2, 2, 3, 32)},
        rejects_type("value", {"value.dtype": ..., "query.dtype": ...}),
    ),
    "value shape": (
        {"value": ones(2, 2, 5, 32)},
        rejects("value", {"value.shape": (2, 2, 5, 32), "key.shape": (2, 2, 3, 32)}),
    ),
    "batch": (
        {"query": ones(3, 2, 3, 32)},
        rejects("key", {"key.shape": (2, 2, 3, 32), "query.shape": (3, 2, 3, 32)}),
    ),
    "batch of 1": (
        {"query": ones(1, 2, 3, 32)},
        rejects("key", {"key.shape": (2, 2, 3, 32), "query.shape": (1, 2, 3, 32)}),
    ),
    "head_dim": (
        {"query": ones(2, 2, 3, 64)},
        rejects("key", {"key.shape": (2, 2, 3, 32), "query.shape": (2, 2, 3, 64)}),
    ),
    "groups": ({"query": ones(2, 3, 3, 32)}, rejects("num_heads", num_heads=3, num_kv_heads=2)),
    "float mask": (
        {"mask": floats(3, 3)},
        rejects_type("mask", {"mask.dtype": ...}, hint="mask == 0"),
    ),
    "integer mask": (
        {"mask": np.ones((3, 3), np.int32)},
        rejects_type("mask", {"mask.dtype": ...}, hint="mask == 0"),
    ),
    "mask list": ({"mask": [[True]]}, rejects_type("mask", "list")),
    "mask keys": ({"mask": booleans(3, 4)}, rejects("mask", {"mask.shape": (3, 4)})),
    "mask of a batch": ({"mask": booleans(3, 3, 3)}, rejects("mask", {"mask.shape": (3, 3, 3)})),
    "mask that stretches": (
        {"mask": booleans(4, 1, 3, 3)},
        rejects("mask", {"mask.shape": (4, 1, 3, 3)}),
    ),
    "mask of 5 axes": (
        {"mask": booleans(1, 1, 1, 3, 3)},
        rejects("mask", {"mask.shape": (1, 1, 1, 3, 3)}),
    ),
    "boolean bias": ({"bias": booleans(3, 3)}, rejects_type("bias", {"bias.dtype": ...})),
    "bias keys": ({"bias": floats(3, 4)}, rejects("bias", {"bias.shape": (3, 4)})),
    "bias of 5 axes": (
        {"bias": floats(1, 1, 1, 3, 3)},
        rejects("bias", {"bias.shape": (1, 1, 1, 3, 3)}),
    ),
    "dropout 1": ({"dropout": 1.0}, rejects("dropout", dropout=1.0)),
    "dropout negative": ({"dropout": -0.5}, rejects("dropout", dropout=-0.5)),
    "dropout text": ({"dropout": "0.5"}, rejects_type("dropout", dropout="0.5")),
    "dropout False": ({"dropout": False}, rejects_type("dropout", dropout=False)),
    "spec": ({"spec": 2}, rejects_type("spec", spec=2)),
}
KEEPS = {
    "float keep": (
        {"dropout": 0.5, "dropout_keep": floats(3, 3)},
        rejects_type("dropout_keep", {"dropout_keep.dtype": ...}),
    ),
    "keep shape": (
        {"dropout": 0.5, "dropout_keep": booleans(5)},
        rejects("dropout_keep", {"dropout_keep.shape": (5,)}),
    ),
}
SPLIT = {"query": HEADS, "key": HEADS, "value": HEADS}


@pytest.mark.parametrize("kernel", [None, fused_kernel], ids=["plain", "fused"])
@pytest.mark.parametrize("name", DOT_PRODUCTS)
def test_dot_products_reject_bad_input(sibling, name, kernel):
    """Attention of split heads raises an error for bad input, with and without a kernel."""
    keywords, input_error = DOT_PRODUCTS[name]
    assert_error(
        sibling,
        "scaled_dot_product_attention",
        (),
        {**SPLIT, "kernel": kernel, **keywords},
        input_error,
    )


@pytest.mark.parametrize("name", KEEPS)
def test_dot_products_reject_bad_keeps(sibling, name):
    """A given dropout of the wrong dtype or shape raises an error."""
    keywords, input_error = KEEPS[name]
    assert_error(sibling, "scaled_dot_product_attention", (), {**SPLIT, **keywords}, input_error)


def test_kernels_return_no_weights(sibling):
    """Attention of split heads raises an error if a kernel must return attention weights."""
    keywords = {**SPLIT, "kernel": fused_kernel, "need_weights": True}
    assert_error(
        sibling,
        "scaled_dot_product_attention",
        (),
        keywords,
        rejects("need_weights", need_weights=True),
    )


def test_kernels_are_functions(sibling):
    """A kernel that cannot be called raises an error wherever one is accepted, when the layer is
    called.
    """
    spec, input_error = AttentionSpec(64, 2), lambda: rejects_type("kernel", "str")
    assert_error(
        sibling, "scaled_dot_product_attention", (), {**SPLIT, "kernel": "flash"}, input_error()
    )
    assert_error(sibling, "contained", ("flash",), {}, input_error())
    call = {"x": ones(2, 3, 64), "weights": of_layer(spec), "spec": spec, "kernel": "flash"}
    cached = {**call, "cache": lambda sibling: sibling.init_cache(2, 2, 32, 32)}
    assert_error(sibling, "multi_head_attention_with_cache", (), cached, input_error())
    call["query"] = call.pop("x")
    assert_error(sibling, "multi_head_attention", (), call, input_error())
    for kind in ("MultiHeadAttention", "MultiHeadAttentionWithCache"):
        module = usual(sibling, kind, spec)
        module.kernel = "flash"
        caches = (module.init_cache(2, 32),) if hasattr(module, "init_cache") else ()
        with input_error():
            module(ones(2, 3, 64).of(sibling), *caches)


# ---- Layers --------------------------------------------------------------------------------------

SPEC = AttentionSpec(64, 2, d_in=6, d_kv=5)
LAYERS = {
    "query rank": ({"query": ones(6)}, rejects("query", {"query.shape": (6,)})),
    "integer query": ({"query": integers(2, 3, 6)}, rejects_type("query…", {"query.dtype": ...})),
    "query list": ({"query": [[[1.0] * 6]]}, rejects_type("query", "list")),
    "query width": ({"query": ones(2, 3, 7)}, rejects("query", {"query.shape": (2, 3, 7)})),
    "no key of that width": ({"key": None}, rejects("key", key=None)),
    "key rank": ({"key": ones(4, 5)}, rejects("key", {"key.shape": (4, 5)})),
    "integer key": ({"key": integers(2, 4, 5)}, rejects_type("key…", {"key.dtype": ...})),
    "key width": ({"key": ones(2, 4, 6)}, rejects("key", {"key.shape": (2, 4, 6)})),
    "key dtype": (
        {"key": others(2, 4, 5)},
        rejects_type("key", {"key.dtype": ..., "query.dtype": ...}),
    ),
    "key batch": (
        {"key": ones(3, 4, 5)},
        rejects("key", {"key.shape": (3, 4, 5), "query.shape": ...}),
    ),
    "key batch of 1": (
        {"key": ones(1, 4, 5)},
        rejects("key", {"key.shape": (1, 4, 5), "query.shape": ...}),
    ),
    "value without key": (
        {"key": None, "value": ones(2, 4, 5)},
        rejects("value", "key=None and a value"),
    ),
    "value rank": ({"value": ones(4, 5)}, rejects("value", {"value.shape": (4, 5)})),
    "key of four axes": ({"key": ones(2, 3, 4, 5)}, rejects("key", {"key.shape": (2, 3, 4, 5)})),
    "value width": ({"value": ones(2, 4, 6)}, rejects("value", {"value.shape": (2, 4, 6)})),
    "value length": (
        {"value": ones(2, 3, 5)},
        rejects("value", {"value.shape": (2, 3, 5), "key.shape": (2, 4, 5)}),
    ),
    "value batch": (
        {"value": ones(1, 4, 5)},
        rejects("value", {"value.shape": (1, 4, 5), "query.shape": ...}),
    ),
    "float mask": ({"mask": floats(3, 4)}, rejects_type("mask", {"mask.dtype": ...})),
    "mask that stretches": (
        {"mask": booleans(4, 1, 3, 32)},
        rejects("mask", {"mask.shape": (4, 1, 3, 32)}),
    ),
    "mask of S, T": ({"mask": booleans(4, 3)}, rejects("mask", {"mask.shape": (4, 3)})),
    "bias keys": ({"bias": floats(3, 3)}, rejects("bias", {"bias.shape": (3, 3)})),
    "too few positions without RoPE": (
        {"positions": lengths(0, 1)[None]},
        rejects("positions", {"positions.shape": (1, 2)}),
    ),
    "lengths too long": (
        {"key_padding_lengths": [3, 5]},
        rejects("key_padding_lengths", key_padding_lengths=[3, 5]),
    ),
    "lengths too few": (
        {"key_padding_lengths": [3]},
        rejects("key_padding_lengths", {"key_padding_lengths.shape": (1,)}),
    ),
    "lengths of floats": (
        {"key_padding_lengths": [1.0, 2.0]},
        rejects_type("key_padding_lengths", {"key_padding_lengths.dtype": ...}),
    ),
}
ROPE_SPEC = AttentionSpec(64, 2, rope=Rope(100.0))
ROPE_LAYERS = {
    "key": ({"key": ones(2, 3, 64)}, rejects("key", "a key and rope=Rope(theta=100.0)")),
    "float positions": (
        {"positions": floats(1, 3)},
        rejects_type("positions", {"positions.dtype": ...}),
    ),
    "flat positions": (
        {"positions": lengths(0, 1, 2)},
        rejects("positions", {"positions.shape": (3,)}),
    ),
    "too few positions": (
        {"positions": lengths(0, 1)[None]},
        rejects("positions", {"positions.shape": (1, 2)}),
    ),
    "positions of another batch": (
        {"positions": np.zeros((3, 3), np.int32)},
        rejects("positions", {"positions.shape": (3, 3)}),
    ),
    "positions list": ({"positions": [[0, 1, 2]]}, rejects_type("positions", "list")),
}
every_need = pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])


@every_need
@pytest.mark.parametrize("name", LAYERS)
def test_function_rejects_bad_input(sibling, name, need_weights):
    """The function of a layer raises an error for bad input."""
    keywords, input_error = LAYERS[name]
    keywords = {"query": ones(2, 3, 6), "key": ones(2, 4, 5), **keywords, "weights": of_layer(SPEC)}
    options = {"spec": SPEC, "need_weights": need_weights}
    assert_error(sibling, "multi_head_attention", (), {**keywords, **options}, input_error)


@every_need
@pytest.mark.parametrize("name", LAYERS)
def test_module_rejects_bad_input(sibling, name, need_weights):
    """A module raises an error for bad input."""
    keywords, input_error = LAYERS[name]
    module = usual(sibling, "MultiHeadAttention", AttentionSpec(64, 2, d_in=6, d_kv=5))
    keywords = {"query": ones(2, 3, 6), "key": ones(2, 4, 5), **keywords}
    assert_error(sibling, module, (), {**keywords, "need_weights": need_weights}, input_error)


@pytest.mark.parametrize("name", ROPE_LAYERS)
def test_function_with_rope_rejects(sibling, name):
    """The function of a layer with RoPE raises an error for a key and for bad positions."""
    keywords, input_error = ROPE_LAYERS[name]
    keywords = {"query": ones(2, 3, 64), **keywords, "weights": of_layer(ROPE_SPEC)}
    assert_error(sibling, "multi_head_attention", (), {**keywords, "spec": ROPE_SPEC}, input_error)


@pytest.mark.parametrize("name", ROPE_LAYERS)
def test_module_with_rope_rejects(sibling, name):
    """A module with RoPE raises an error for a key and for bad positions."""
    keywords, input_error = ROPE_LAYERS[name]
    module = usual(sibling, "MultiHeadAttention", AttentionSpec(64, 2, rope=Rope(1e2)))
    assert_error(sibling, module, (), {"query": ones(2, 3, 64), **keywords}, input_error)


ADVICE = {
    "is_causal of 1": ({"is_causal": 1}, rejects_type("is_causal", is_causal=1)),
    "mask of B, T, S": ({"mask": booleans(3, 4, 5)}, rejects("mask", hint="mask[:, None]")),
    "mask of B, S": ({"mask": booleans(3, 5)}, rejects("mask", hint="key_padding_lengths")),
    "bias of B, T, S": ({"bias": floats(3, 4, 5)}, rejects("bias", hint="bias[:, None]")),
    "a different dtype": (
        {"query": others(3, 4, 6), "key": others(3, 5, 5)},
        rejects_type("…", hint="dtype"),
    ),
    "torch's mask": (
        {"attn_mask": booleans(4, 5)},
        rejects_type("attn_mask", hint="True means masked"),
    ),
    "torch's padding": (
        {"key_padding_mask": booleans(3, 5)},
        rejects_type("key_padding_mask", hint="[:, None, None]"),
    ),
    "flax's dropout": ({"deterministic": True}, rejects_type("deterministic", hint="eval()")),
    "torch's scale": ({"scale": 1.0}, rejects_type("scale", hint="a field of the module")),
    "another name": ({"causal": True}, rejects_type("causal", hint="is_causal")),
    "a near miss": (
        {"key_padding_length": [5]},
        rejects_type("key_padding_length", hint="key_padding_lengths"),
    ),
}


def test_errors_of_a_call_say_what_to_pass(sibling):
    """Arguments of other libraries, and masks of other axes, raise errors that name the argument to
    use.
    """
    module = usual(sibling, "MultiHeadAttention", SPEC)
    for keywords, input_error in ADVICE.values():
        assert_error(
            sibling,
            module,
            (),
            {"query": ones(3, 4, 6), "key": ones(3, 5, 5), **keywords},
            input_error,
        )
    output, _ = module(ones(3, 4, 6).of(sibling), ones(3, 5, 5).of(sibling), is_causal=np.True_)
    assert output.shape[1] == 4


def test_docstrings_name_the_next_thing(sibling):
    """The docstring of a class has the class, the field or the method that its users look for."""
    package = sibling.package
    assert "`MultiHeadSelfAttention`" in package.MultiHeadAttention.__doc__
    assert "layer.spec.num_heads" in package.MultiHeadAttention.__doc__
    assert "layer.init_cache(batch_size, capacity)" in package.MultiHeadAttentionWithCache.__doc__


@pytest.mark.parametrize("kind", ["MultiHeadSelfAttention", "MultiHeadAttentionWithCache"])
def test_self_attention_has_one_width(sibling, kind):
    """Self-attention raises an error for keys that are not as wide as queries."""
    with rejects("d_kv", d_kv=6, d_in=8):
        sibling.module(kind, AttentionSpec(8, 2, d_kv=6))


SELF_ATTENTIONS = {
    **PADDING_LENGTHS,
    "rank": ({"x": ones(64)}, rejects("x", {"x.shape": (64,)})),
    "integers": ({"x": integers(2, 3, 64)}, rejects_type("x…", {"x.dtype": ...})),
    "list": ({"x": [[[1.0] * 64]]}, rejects_type("x", "list")),
    "width": ({"x": ones(2, 3, 6)}, rejects("query", {"query.shape": (2, 3, 6)})),
    "mask": ({"mask": booleans(3, 4)}, rejects("mask", {"mask.shape": (3, 4)})),
    "float mask": ({"mask": floats(3, 3)}, rejects_type("mask", {"mask.dtype": ...})),
    "bias": ({"bias": floats(3, 4)}, rejects("bias", {"bias.shape": (3, 4)})),
    "too few positions without RoPE": (
        {"positions": lengths(0, 1)[None]},
        rejects("positions", {"positions.shape": (1, 2)}),
    ),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SELF_ATTENTIONS)
def test_self_attention_rejects_bad_input(sibling, name, is_causal):
    """Self-attention raises an error for bad input, causal or not."""
    keywords, input_error = SELF_ATTENTIONS[name]
    module = usual(sibling, "MultiHeadSelfAttention", AttentionSpec(64, 2))
    assert_error(
        sibling, module, (), {"x": ones(2, 3, 64), **keywords, "is_causal": is_causal}, input_error
    )


# ---- Weights of the functional forms -------------------------------------------------------------

LAYER_SPEC = AttentionSpec(64, 2, d_in=6)
PACKED_SPEC = AttentionSpec(64, 2, d_in=6, fused_qkv=True)
WEIGHTS = {f"{name}_proj.weight": ones(64, 6) for name in "qkv"} | {
    f"{name}_proj.bias": ones(64) for name in "qkv"
}
WEIGHTS |= {"out_proj.weight": ones(64, 64), "out_proj.bias": ones(64)}
PACKED = {"qkv_proj.weight": ones(192, 6), "qkv_proj.bias": ones(192)}


def without(*names):
    return {name: x for name, x in WEIGHTS.items() if name not in names}


BAD_WEIGHTS = {
    "nothing": ({}, rejects("weights", missing=..., unexpected=[])),
    "no q_proj": (
        without("q_proj.weight", "q_proj.bias"),
        rejects("weights", missing=..., unexpected=[]),
    ),
    "bias without weight": (
        without("v_proj.weight"),
        rejects("weights", missing=..., unexpected=[]),
    ),
    "out_proj bias alone": (
        without("out_proj.weight"),
        rejects("weights", missing=..., unexpected=[]),
    ),
    "other name": (
        {**WEIGHTS, "o_proj.weight": ones(64, 64)},
        rejects("weights", missing=[], unexpected=...),
    ),
    "packed and separate": ({**WEIGHTS, **PACKED}, rejects("weights", missing=[], unexpected=...)),
    "packed": (PACKED, rejects("weights", missing=..., unexpected=...)),
    "no bias": (without("k_proj.bias"), rejects("weights", missing=["k_proj.bias"], unexpected=[])),
    "transposed q_proj": (
        {**WEIGHTS, "q_proj.weight": ones(6, 64)},
        rejects("q_proj.…"),
    ),
    "all transposed": (
        {name: Ones(x.shape[::-1]) for name, x in WEIGHTS.items()},
        rejects("q_proj.…"),
    ),
    "transposed out_proj": ({**WEIGHTS, "out_proj.weight": ones(64, 70)}, rejects("out_proj.…")),
    "flat weight": ({**WEIGHTS, "k_proj.weight": ones(64)}, rejects("k_proj.…")),
    "flat out_proj": ({**WEIGHTS, "out_proj.weight": ones(64)}, rejects("out_proj.…")),
    "bias of the wrong width": ({**WEIGHTS, "k_proj.bias": ones(6)}, rejects("k_proj.bias")),
    "bias of 2 axes": ({**WEIGHTS, "q_proj.bias": ones(1, 64)}, rejects("q_proj.bias")),
    "other head_dim": ({**WEIGHTS, "k_proj.weight": ones(60, 6)}, rejects("k_proj.…")),
    "integer weight": ({**WEIGHTS, "q_proj.weight": integers(64, 6)}, rejects_type("q_proj.…")),
    "integer bias": ({**WEIGHTS, "q_proj.bias": integers(64)}, rejects_type("q_proj.bias…")),
}
X = ones(2, 3, 6)
FUNCTIONS = {
    "plain": ("multi_head_attention", {"query": X, "need_weights": True}),
    "fused": ("multi_head_attention", {"query": X}),
    "cached": (
        "multi_head_attention_with_cache",
        {"x": X, "cache": lambda sibling: sibling.init_cache(2, 2, 32, 32)},
    ),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS)


@sample(45)
@every_function
@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_function_rejects_bad_weights(sibling, name, function):
    """Weights that lack one, have an extra one or have the wrong shape raise an error in every
    function.
    """
    weights, input_error = BAD_WEIGHTS[name]
    function, keywords = FUNCTIONS[function]
    assert_error(
        sibling, function, (), {**keywords, "weights": weights, "spec": LAYER_SPEC}, input_error
    )


PACKED |= {"out_proj.weight": ones(64, 64), "out_proj.bias": ones(64)}
BAD_PACKED = {
    "separate": (WEIGHTS, rejects("weights", missing=..., unexpected=...)),
    "rows": (
        {**PACKED, "qkv_proj.weight": ones(193, 6)},
        rejects("qkv_proj.…"),
    ),
    "bias": ({**PACKED, "qkv_proj.bias": ones(64)}, rejects("qkv_proj.…")),
}


@every_function
@pytest.mark.parametrize("name", BAD_PACKED)
def test_function_rejects_packed_weights(sibling, name, function):
    """Packed weights of a different layer raise an error in every function."""
    weights, input_error = BAD_PACKED[name]
    function, keywords = FUNCTIONS[function]
    assert_error(
        sibling, function, (), {**keywords, "weights": weights, "spec": PACKED_SPEC}, input_error
    )


@every_function
@pytest.mark.parametrize(
    ("spec", "input_error"),
    [
        (2, rejects_type("spec", spec=2)),
        (AttentionSpec(96, 3, d_in=6), rejects("q_proj.…")),
        (AttentionSpec(64, 2, num_kv_heads=1, d_in=6), rejects("k_proj.…")),
        (
            AttentionSpec(64, 2, d_in=6, out_proj=False),
            rejects("weights", missing=[], unexpected=...),
        ),
        (
            AttentionSpec(64, 2, d_in=6, qkv_bias=False),
            rejects(
                "weights", missing=[], unexpected=["k_proj.bias", "q_proj.bias", "v_proj.bias"]
            ),
        ),
    ],
    ids=["number", "heads", "groups", "no out_proj", "no bias"],
)
def test_function_rejects_other_spec(sibling, function, spec, input_error):
    """The spec of a different layer raises an error in every function."""
    function, keywords = FUNCTIONS[function]
    assert_error(sibling, function, (), {**keywords, "weights": WEIGHTS, "spec": spec}, input_error)


def test_cached_function_has_one_width(sibling):
    """The function with a cache raises an error for keys that are not as wide as queries."""
    function, keywords = FUNCTIONS["cached"]
    spec = AttentionSpec(64, 2, d_in=6, d_kv=5)
    keywords = {**keywords, "weights": of_layer(spec), "spec": spec}
    assert_error(sibling, function, (), keywords, rejects("d_kv", d_kv=5, d_in=6))


@pytest.mark.parametrize("weights", [None, [1]], ids=["None", "list"])
@every_function
def test_function_requires_a_mapping(sibling, function, weights):
    """Weights other than a mapping, and in a mapping anything but arrays, raise an error in every
    function.
    """
    function, keywords = FUNCTIONS[function]
    keywords = {**keywords, "spec": LAYER_SPEC}
    assert_error(sibling, function, (), {**keywords, "weights": weights}, rejects_type("weights"))

    def with_list(sibling):
        weights = {name: x.as_weight(sibling, name) for name, x in WEIGHTS.items()}
        return sibling.container({**weights, "k_proj.bias": [1.0]})

    assert_error(
        sibling,
        function,
        (),
        {**keywords, "weights": with_list},
        rejects_type("k_proj.bias", "list"),
    )


# ---- Masks ---------------------------------------------------------------------------------------

# A length of 0 is an error only in JAX and PyTorch: see jax_and_torch/test_bad_input.py.
MASKS = {
    "causal keys negative": ("create_causal_mask", (2, -1), {}, rejects("seq_len_k", seq_len_k=-1)),
    "padding keys negative": (
        "create_padding_mask",
        ([0], -1),
        {},
        rejects("seq_len_k", seq_len_k=-1),
    ),
    "attention negative": ("create_attention_mask", (-1,), {}, rejects("seq_len_q", seq_len_q=-1)),
    "slots negative queries": (
        "create_cache_mask",
        (lengths(1), -1, 4),
        {},
        rejects("seq_len_q", seq_len_q=-1),
    ),
    "causal negative": ("create_causal_mask", (-1,), {}, rejects("seq_len_q", seq_len_q=-1)),
    "causal float": ("create_causal_mask", (2.0,), {}, rejects_type("seq_len_q", seq_len_q=2.0)),
    "causal boolean": (
        "create_causal_mask",
        (True,),
        {},
        rejects_type("seq_len_q", seq_len_q=True),
    ),
    "padding too long": (
        "create_padding_mask",
        ([1, 4], 3),
        {},
        rejects("lengths", lengths=[1, 4]),
    ),
    "padding negative": ("create_padding_mask", ([-1], 3), {}, rejects("lengths", lengths=[-1])),
    "padding array": (
        "create_padding_mask",
        (lengths(1, 4), 3),
        {},
        rejects("lengths", lengths=[1, 4]),
    ),
    "padding floats": (
        "create_padding_mask",
        ([1.0], 3),
        {},
        rejects_type("lengths", {"lengths.dtype": ...}),
    ),
    "padding mask": (
        "create_padding_mask",
        ([True, False], 2),
        {},
        rejects_type("lengths", {"lengths.dtype": ...}),
    ),
    "padding number": (
        "create_padding_mask",
        (2, 3),
        {},
        rejects("lengths", {"lengths.shape": ()}),
    ),
    "padding 2 axes": (
        "create_padding_mask",
        ([[1, 2]], 3),
        {},
        rejects("lengths", {"lengths.shape": (1, 2)}),
    ),
    "attention keys": ("create_attention_mask", (2, -1), {}, rejects("seq_len_k", seq_len_k=-1)),
    "attention too long": (
        "create_attention_mask",
        (2, 3),
        {"key_padding_lengths": [4]},
        rejects("key_padding_lengths", key_padding_lengths=[4]),
    ),
    "attention floats": (
        "create_attention_mask",
        (2, 3),
        {"key_padding_lengths": [1.5]},
        rejects_type("key_padding_lengths", {"key_padding_lengths.dtype": ...}),
    ),
    "cached keys": (
        "create_causal_mask_with_cache",
        (2, 4, 1),
        {},
        rejects("seq_len_k", seq_len_k=4, cache_len=1, seq_len_q=2),
    ),
    "cached negative": (
        "create_causal_mask_with_cache",
        (3, 2, -1),
        {},
        rejects("cache_len", cache_len=-1),
    ),
    "cached less": (
        "create_causal_mask_with_cache",
        (-1, 1, 2),
        {},
        rejects("seq_len_q", seq_len_q=-1),
    ),
    "cached float": (
        "create_causal_mask_with_cache",
        (1, 2, 1.0),
        {},
        rejects_type("cache_len", cache_len=1.0),
    ),
    "window 0": (
        "create_sliding_window_mask",
        (3,),
        {"window_size": 0},
        rejects("window_size", window_size=0),
    ),
    "window float": (
        "create_sliding_window_mask",
        (3,),
        {"window_size": 1.5},
        rejects_type("window_size", window_size=1.5),
    ),
    "slots too long": (
        "create_cache_mask",
        (lengths(5), 1, 4),
        {},
        rejects("lengths", lengths=[5]),
    ),
    "slots negative": (
        "create_cache_mask",
        (lengths(-1), 1, 4),
        {},
        rejects("lengths", lengths=[-1]),
    ),
    "slots floats": (
        "create_cache_mask",
        (floats(1), 1, 4),
        {},
        rejects_type("lengths", {"lengths.dtype": ...}),
    ),
    "slots capacity": (
        "create_cache_mask",
        (lengths(0), 1, 0),
        {},
        rejects("capacity", capacity=0),
    ),
}


def test_mask_rejects_bad_sizes(sibling, subtests):
    """Each function that makes a mask raises an error for bad sizes and lengths."""
    for name, call in MASKS.items():
        with subtests.test(name):
            assert_error(sibling, *call)


# ---- Caches --------------------------------------------------------------------------------------


def cache(sibling):
    """Two sequences of up to 32 tokens, two heads of 32 features."""
    return sibling.init_cache(2, 2, 32, 32)


TOKENS = ones(2, 2, 3, 32)
SIZES = {"batch_size": 2, "num_kv_heads": 2, "capacity": 4, "head_dim": 4}
NBYTES = {"batch_size": 1, "num_kv_heads": 2, "capacity": 3, "head_dim": 4, "num_layers": 5}


REJECTED_SIZES = [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)]


@pytest.mark.parametrize("size", SIZES)
def test_cache_rejects_bad_sizes(sibling, size, subtests):
    """A cache raises an error for a size that is not a positive integer."""
    for value, error in REJECTED_SIZES:
        if size == "batch_size" and value == 0:
            continue  # a batch may be empty
        with subtests.test(value=value):
            assert_error(
                sibling,
                "init_cache",
                (),
                {**SIZES, size: value, **sibling.on_device},
                rejects(size, {size: value}).of(error),
            )


@pytest.mark.parametrize("size", NBYTES)
def test_cache_nbytes_rejects_bad_sizes(sibling, size, subtests):
    """The number of bytes of a cache raises an error for a size that is not a positive integer."""
    dtype = sibling.dtype(sibling.kernel_dtype)
    for value, error in REJECTED_SIZES:
        with subtests.test(value=value):
            assert_error(
                sibling,
                "kv_cache_nbytes",
                (),
                {**NBYTES, size: value, "dtype": dtype},
                rejects(size, {size: value}).of(error),
            )


@pytest.mark.parametrize(
    ("rule", "args"),
    [(rejects("batch_size", batch_size=-1), (-1, 4)), (rejects("capacity", capacity=0), (2, 0))],
)
def test_module_rejects_a_bad_cache_size(sibling, rule, args):
    """A module raises an error for a cache of a bad size."""
    module = usual(sibling, "MultiHeadAttentionWithCache", AttentionSpec(64, 2))
    with rule:
        module.init_cache(*args)


def test_cache_rejects_integers(sibling):
    """A cache of integers raises an error."""
    dtype = integers(1).of(sibling).dtype
    keywords = {**SIZES, "dtype": dtype, **sibling.on_device}
    with rejects_type("dtype", dtype=...):
        sibling.package.init_cache(**keywords)


APPENDS = {
    "no cache": (
        {"cache": None},
        rejects_type("cache", "NoneType", hint="init_cache(batch_size, capacity)"),
    ),
    "tuple": (
        {"cache": (1, 2)},
        rejects_type("cache", "tuple", hint="init_cache(batch_size, capacity)"),
    ),
    "new_lengths 2 axes": (
        {"new_lengths": [[1, 2]]},
        rejects("new_lengths", {"new_lengths.shape": (1, 2)}),
    ),
    "key rank": ({"key": ones(2, 3, 4)}, rejects("key", {"key.shape": (2, 3, 4)})),
    "integer key": ({"key": integers(2, 2, 3, 32)}, rejects_type("key…", {"key.dtype": ...})),
    "key heads": (
        {"key": ones(2, 1, 3, 32), "value": ones(2, 1, 3, 32)},
        rejects("cache…", "(2, 2, 32, 32)"),
    ),
    "key batch": (
        {"key": ones(1, 2, 3, 32), "value": ones(1, 2, 3, 32)},
        rejects("cache…", "(2, 2, 32, 32)"),
    ),
    "key head_dim": (
        {"key": ones(2, 2, 3, 64), "value": ones(2, 2, 3, 64)},
        rejects("cache…", "(2, 2, 32, 32)"),
    ),
    "dtypes": (
        {"key": others(2, 2, 3, 32), "value": others(2, 2, 3, 32)},
        rejects_type("cache…", {"key.dtype": ...}),
    ),
    "value shape": (
        {"value": ones(2, 2, 2, 32)},
        rejects("value", {"value.shape": (2, 2, 2, 32), "key.shape": (2, 2, 3, 32)}),
    ),
    "value dtype": (
        {"value": others(2, 2, 3, 32)},
        rejects_type("value", {"value.dtype": ..., "key.dtype": ...}),
    ),
    "too many tokens": (
        {"key": ones(2, 2, 33, 32), "value": ones(2, 2, 33, 32)},
        rejects("lengths + new tokens", lengths=[0, 0], new_lengths=...),
    ),
    "new_lengths too long": ({"new_lengths": [3, 4]}, rejects("new_lengths", new_lengths=[3, 4])),
    "new_lengths negative": ({"new_lengths": [-1, 1]}, rejects("new_lengths", new_lengths=[-1, 1])),
    "new_lengths array": (
        {"new_lengths": lengths(3, 4)},
        rejects("new_lengths", new_lengths=[3, 4]),
    ),
    "new_lengths too few": (
        {"new_lengths": [3]},
        rejects("new_lengths", {"new_lengths.shape": (1,)}),
    ),
    "new_lengths floats": (
        {"new_lengths": [1.0, 2.0]},
        rejects_type("new_lengths", {"new_lengths.dtype": ...}),
    ),
    "new_lengths booleans": (
        {"new_lengths": [True, False]},
        rejects_type("new_lengths", {"new_lengths.dtype": ...}),
    ),
}


@pytest.mark.parametrize("name", APPENDS)
def test_appending_rejects_bad_input(sibling, name):
    """Appending to a cache raises an error for tokens that do not fit it."""
    keywords, input_error = APPENDS[name]
    keywords = {"cache": cache, "key": TOKENS, "value": TOKENS, **keywords}
    assert_error(sibling, "append_to_cache", (), keywords, input_error)


CACHED = {
    "float mask": ({"mask": floats(3, 32)}, rejects_type("mask", {"mask.dtype": ...})),
    "mask of the tokens only": ({"mask": booleans(3, 3)}, rejects("mask", {"mask.shape": (3, 3)})),
    "bias of the tokens only": ({"bias": floats(3, 3)}, rejects("bias", {"bias.shape": (3, 3)})),
    "too few positions without RoPE": (
        {"positions": lengths(0, 1)[None]},
        rejects("positions", {"positions.shape": (1, 2)}),
    ),
    "rank": ({"x": ones(3, 64)}, rejects("x", {"x.shape": (3, 64)})),
    "integers": ({"x": integers(2, 3, 64)}, rejects_type("x…", {"x.dtype": ...})),
    "list": ({"x": [[[1.0] * 64]]}, rejects_type("x", "list")),
    "width": ({"x": ones(2, 3, 6)}, rejects("x", {"x.shape": (2, 3, 6)})),
    "batch": (
        {"x": ones(3, 3, 64)},
        rejects("x", {"x.shape": (3, 3, 64), "cache.lengths.shape": (2,)}),
    ),
    "too many tokens": (
        {"x": ones(2, 33, 64)},
        rejects("lengths + new tokens", lengths=[0, 0], new_lengths=...),
    ),
    "no cache": (
        {"cache": None},
        rejects_type("cache", "NoneType", hint="init_cache(batch_size, capacity)"),
    ),
    "cache heads": (
        {"cache": lambda sibling: sibling.init_cache(2, 1, 32, 32)},
        rejects("cache.keys", "(2, 1, 32, 32)"),
    ),
    "cache head_dim": (
        {"cache": lambda sibling: sibling.init_cache(2, 2, 32, 64)},
        rejects("cache.keys", "(2, 2, 32, 64)"),
    ),
    "cache value_head_dim": (
        {"cache": lambda sibling: sibling.init_cache(2, 2, 32, 32, value_head_dim=64)},
        rejects("cache.values", "(2, 2, 32, 64)"),
    ),
    "new_lengths too long": ({"new_lengths": [4, 1]}, rejects("new_lengths", new_lengths=[4, 1])),
    "new_lengths negative": ({"new_lengths": [-1, 1]}, rejects("new_lengths", new_lengths=[-1, 1])),
    "new_lengths too few": (
        {"new_lengths": [1]},
        rejects("new_lengths", {"new_lengths.shape": (1,)}),
    ),
    "new_lengths floats": (
        {"new_lengths": [1.0, 2.0]},
        rejects_type("new_lengths", {"new_lengths.dtype": ...}),
    ),
}


@pytest.mark.parametrize("name", CACHED)
def test_cached_function_rejects_bad_input(sibling, name):
    """The function with a cache raises an error for bad input."""
    keywords, input_error = CACHED[name]
    weights = of_layer(AttentionSpec(64, 2))
    keywords = {
        "x": ones(2, 3, 64),
        "cache": cache,
        **keywords,
        "weights": weights,
        "spec": AttentionSpec(64, 2),
    }
    assert_error(sibling, "multi_head_attention_with_cache", (), keywords, input_error)


@pytest.mark.parametrize("name", CACHED)
def test_cached_module_rejects_bad_input(sibling, name):
    """A module with a cache raises an error for bad input."""
    keywords, input_error = CACHED[name]
    module = usual(sibling, "MultiHeadAttentionWithCache", AttentionSpec(64, 2))
    assert_error(
        sibling, module, (), {"x": ones(2, 3, 64), "cache": cache, **keywords}, input_error
    )
