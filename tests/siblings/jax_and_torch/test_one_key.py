"""One key, one query, or one of each: with each way to hide keys, on every path, forward and
backward.

Compilers treat a reduction over one element, or a broadcast axis of one, as a special case: XLA,
for example, omits the initial value of a reduction over one element. The expected values follow the
formulas in float64.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.frameworks import SIBLINGS
from helpers.heads import fused_attention, plain_attention
from helpers.samples import sample
from torch.nn.attention import flex_attention

import mha_jax
import mha_torch
import parity
from mha_jax.kernels.cpu import blockwise
from mha_jax.kernels.fused import FusedAttention
from mha_jax.masks import Mask
from mha_jax.scores import Scores
from mha_spec import Alibi, AttentionSpec, Latent, RelativeBias, RelativeProducts, Rope
from mha_torch.kernels import flex
from parity.measure.backends import torch as torch_backend
from parity.measure.core.compare import unit_of_rounding
from parity.use.testing.assertion import UNITS

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # which the kernel checks
]

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 2, 8
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

SIZES = {
    "one-key": (3, 1),
    "one-query": (1, 3),
    "one-of-each": (1, 1),
    "one-key-of-many-queries": (131, 1),  # more than one block of the kernels for windows
}
"""Numbers of queries and of keys."""


# ---- Ways to hide keys ---------------------------------------------------------------------------


class Hiding(NamedTuple):
    """Masks, lengths and fields that hide keys in a call, and tables that change its scores.

    Attributes:
        fields: fields of the layer's specification.
        masks: keywords that hide keys, as NumPy arrays.
        tables: arrays of a layer, by the name of their keyword.
    """

    fields: dict[str, Any]
    masks: dict[str, Any]
    tables: dict[str, np.ndarray]


def hidings(num_queries, num_keys):
    """Return every way to hide keys: the second of two sequences, or some rows, attend to no
    key.
    """
    rng = np.random.default_rng(1)
    of_second = np.array([False, True]).reshape(2, 1, 1, 1)
    of_some_heads = np.array([False, True, True, False]).reshape(1, NUM_HEADS, 1, 1)
    bias = rng.standard_normal((BATCH, 1, num_queries, num_keys))
    lengths = {"key_padding_lengths": np.array([num_keys, 0], np.int32)}
    segments = (
        np.zeros((BATCH, num_queries), np.int32),
        np.array([[0], [1]], np.int32).repeat(num_keys, axis=1),
    )
    buckets = RelativeBias(4, 4)
    products = RelativeProducts(2, 1, of_queries=True, of_keys=True)
    vectors = {
        name: rng.standard_normal((4, HEAD_DIM)) for name in ("relative_keys", "relative_queries")
    }
    return {
        "nothing": Hiding({}, {}, {}),
        "mask": Hiding(
            {}, {"mask": np.broadcast_to(of_second, (BATCH, 1, num_queries, num_keys))}, {}
        ),
        "mask of keys": Hiding({}, {"mask": of_second}, {}),
        "mask of heads": Hiding({}, {"mask": of_some_heads}, {}),
        "lengths": Hiding({}, lengths, {}),
        "causal lengths": Hiding({}, {"is_causal": True, **lengths}, {}),
        "segments": Hiding({}, {"segment_ids": segments}, {}),
        "bias": Hiding({}, {}, {"bias": np.where(of_second, -np.inf, bias)}),
        "bias and mask": Hiding(
            {}, {"mask": of_some_heads}, {"bias": np.where(of_second, -np.inf, bias)}
        ),
        "window": Hiding({"window_size": 1}, {}, {}),
        "causal window": Hiding({"window_size": 2}, {"is_causal": True}, {}),
        "window and mask": Hiding({"window_size": 2}, {"mask": of_second}, {}),
        "chunks": Hiding({"chunk_size": 1}, {"is_causal": True}, {}),
        "chunks and lengths": Hiding({"chunk_size": 2}, lengths, {}),
        "sinks": Hiding({"sinks": True}, lengths, {"sinks": rng.standard_normal(NUM_HEADS)}),
        "soft cap": Hiding({"soft_cap": 2.0}, lengths, {}),
        "alibi": Hiding({"alibi": Alibi()}, lengths, {}),
        "relative bias": Hiding(
            {"relative_bias": buckets},
            lengths,
            {"relative_bias": rng.standard_normal((4, NUM_HEADS))},
        ),
        "relative products": Hiding({"relative_products": products}, lengths, vectors),
    }


def is_hidden(hiding, num_queries, num_keys):
    """Return which keys are hidden, (B, N, T, S), by the definitions."""
    fields, masks = hiding.fields, hiding.masks
    queries, keys = np.arange(num_queries)[:, None], np.arange(num_keys)
    hidden = np.zeros((BATCH, NUM_HEADS, num_queries, num_keys), bool)
    hidden |= masks.get("mask", False)
    hidden |= np.isneginf(hiding.tables.get("bias", np.zeros(1)))
    if masks.get("is_causal"):
        hidden |= keys > queries
    if "key_padding_lengths" in masks:
        hidden |= keys >= masks["key_padding_lengths"].reshape(-1, 1, 1, 1)
    if "segment_ids" in masks:
        of_queries, of_keys = masks["segment_ids"]
        hidden |= of_queries[:, None, :, None] != of_keys[:, None, None]
    if "window_size" in fields:
        hidden |= abs(queries - keys) >= fields["window_size"]
    if "chunk_size" in fields:
        hidden |= queries // fields["chunk_size"] != keys // fields["chunk_size"]
    return hidden


# ---- Formulas ------------------------------------------------------------------------------------


def spec_of(hiding):
    return AttentionSpec(
        NUM_HEADS * HEAD_DIM, NUM_HEADS, num_kv_heads=NUM_KV_HEADS, **hiding.fields
    )


def drawn(hiding, num_queries, num_keys, dtype):
    """Return the arrays of a call, with the cotangent of its context."""
    rng = np.random.default_rng(2)
    shapes = {
        "query": (BATCH, NUM_HEADS, num_queries, HEAD_DIM),
        "key": (BATCH, NUM_KV_HEADS, num_keys, HEAD_DIM),
        "value": (BATCH, NUM_KV_HEADS, num_keys, HEAD_DIM),
        "cotangent": (BATCH, NUM_HEADS, num_queries, HEAD_DIM),
    }
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return arrays | {name: table.astype(dtype) for name, table in hiding.tables.items()}


def formula(
    spec,
    hidden,
    query,
    key,
    value,
    bias=None,
    sinks=None,
    relative_bias=None,
    relative_keys=None,
    relative_queries=None,
):
    """Return the context and the attention weights. Scores are small: no maximum needs to be
    subtracted.
    """
    key, value = (x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for x in (key, value))
    products = query @ key.mT
    distances = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
    if spec.relative_products is not None:
        farthest = spec.relative_products.farthest
        buckets = torch.as_tensor(spec.relative_products.buckets())[
            distances.clamp(-farthest, farthest) + farthest
        ]
        products = products + torch.einsum("bnth,tsh->bnts", query, relative_keys[buckets])
        products = products + torch.einsum("bnsh,tsh->bnts", key, relative_queries[buckets])
    scores = products * spec.score_scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    if spec.alibi_slopes is not None:
        scores = (
            scores
            - torch.tensor(spec.alibi_slopes, dtype=scores.dtype)[:, None, None] * distances.abs()
        )
    if spec.relative_bias is not None:
        farthest = spec.relative_bias.max_distance
        buckets = torch.as_tensor(spec.relative_bias.buckets())[
            distances.clamp(-farthest, farthest) + farthest
        ]
        scores = scores + relative_bias[buckets].permute(2, 0, 1)
    if bias is not None:
        scores = scores + torch.where(hidden, 0.0, bias)
    exponentials = scores.exp() * ~hidden
    total = exponentials.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    attn_weights = exponentials / torch.where(total == 0.0, 1.0, total)
    return attn_weights @ value, attn_weights


def with_gradients_in_torch(function, arrays):
    """Return the context, the attention weights (if any) and the gradient of each other array."""
    leaves = {name: x.requires_grad_() for name, x in arrays.items() if name != "cotangent"}
    context, attn_weights = function(**leaves)
    gradients = torch.autograd.grad(
        context, list(leaves.values()), arrays["cotangent"], materialize_grads=True
    )
    results = {
        "context": context,
        **{f"grad.{name}": x for name, x in zip(leaves, gradients, strict=True)},
    }
    if attn_weights is not None:
        results["attn_weights"] = attn_weights
    return {name: torch_backend.to_numpy(x.detach()) for name, x in results.items()}


@functools.cache
def expected_values(size, dtype):
    """Return the results of every hiding in float64."""
    lengths, expected = SIZES[size], {}
    for name, hiding in hidings(*lengths).items():
        arrays = drawn(hiding, *lengths, DTYPES[dtype])
        wide = {key: torch.from_numpy(x.astype(np.float64)) for key, x in arrays.items()}
        hidden = torch.from_numpy(is_hidden(hiding, *lengths))
        expected[name] = with_gradients_in_torch(
            functools.partial(formula, spec_of(hiding), hidden), wide
        )
    return expected


def wrong_in(results, size, dtype):
    """Return the results that differ from the expected values by more than rounding, and rows that
    are not 0.

    The allowed error is the coarse one of `assert_parity`, relative to at least the noise of a sum
    over queries, because the terms of gradients of the scores of one key cancel.
    """
    wrong, lengths, every = [], SIZES[size], hidings(*SIZES[size])
    for name in results:
        hiding = every[name]
        empty = is_hidden(hiding, *lengths).all(axis=-1)
        for key, array in results[name].items():
            actual, expected = array.astype(np.float64), expected_values(size, dtype)[name][key]
            allowed = (
                UNITS[dtype]
                * unit_of_rounding(dtype)
                * max(lengths[0] ** 0.5, np.abs(expected).max())
            )
            if not np.abs(actual - expected).max() <= allowed:  # nor if it is NaN
                wrong.append(f"{name}: {key}")
            if key == "grad.query" and actual[empty].any():
                wrong.append(f"{name}: gradient of rows without a key")
            if key == "context" and actual[empty].any() and not hiding.fields.get("sinks"):
                wrong.append(f"{name}: rows without a key")
    return wrong


def test_masking_leaves_rows_without_keys():
    """Every way to hide keys leaves some row without a key, unless nothing is hidden or one query
    has a window or chunks, and attends to the first key.
    """
    for size, lengths in SIZES.items():
        for name, hiding in hidings(*lengths).items():
            sees_itself = (
                not hiding.masks.keys() & {"mask", "key_padding_lengths", "segment_ids"}
                and lengths[0] == 1
            )
            is_empty = is_hidden(hiding, *lengths).all(axis=-1).any()
            assert is_empty or name == "nothing" or (sees_itself and hiding.fields), (size, name)


# ---- Kernels -------------------------------------------------------------------------------------


def on_arrays(hiding, from_numpy):
    """Return the keywords of a call that hide keys, as arrays of a framework."""
    arrays = {}
    for name, x in hiding.masks.items():
        arrays[name] = (
            tuple(map(from_numpy, x)) if isinstance(x, tuple) else x if x is True else from_numpy(x)
        )
    return arrays


def results_in_jax(attend, size, dtype, names):
    """Return the results of these hidings, in one program."""
    lengths = SIZES[size]
    every = {name: hiding for name, hiding in hidings(*lengths).items() if name in names}
    arrays = {name: drawn(hiding, *lengths, DTYPES[dtype]) for name, hiding in every.items()}
    masks = {name: on_arrays(hiding, jnp.asarray) for name, hiding in every.items()}
    are_static = {
        name: {key for key, x in hidden.items() if x is True} for name, hidden in masks.items()
    }
    constants = {
        name: {key: x for key, x in hidden.items() if x is not True}
        for name, hidden in masks.items()
    }

    def one(hiding, static, arrays, masks):
        leaves = {key: x for key, x in arrays.items() if key != "cotangent"}
        masks = masks | dict.fromkeys(static, True)
        function = functools.partial(attend, spec=spec_of(hiding), **masks)
        context, pull_back, attn_weights = jax.vjp(
            lambda leaves: function(**leaves), leaves, has_aux=True
        )
        gradients = {f"grad.{key}": x for key, x in pull_back(arrays["cotangent"])[0].items()}
        return {"context": context, **gradients} | (
            {} if attn_weights is None else {"attn_weights": attn_weights}
        )

    def run(arrays, constants):
        return {
            name: one(every[name], are_static[name], arrays[name], constants[name])
            for name in every
        }

    results = jax.jit(run)(jax.tree.map(jnp.asarray, arrays), constants)
    return jax.tree.map(np.asarray, results)


def results_in_torch(attend, size, dtype):
    """Return the results of every hiding."""
    lengths, results = SIZES[size], {}
    for name, hiding in hidings(*lengths).items():
        arrays = {
            key: torch_backend.from_numpy(x)
            for key, x in drawn(hiding, *lengths, DTYPES[dtype]).items()
        }
        masks = on_arrays(hiding, torch_backend.from_numpy)
        results[name] = with_gradients_in_torch(
            functools.partial(attend, spec=spec_of(hiding), **masks), arrays
        )
    return results


SMALL = FusedAttention(few_scores=0, queries=2, keys=2, last_keys=1)
PATHS_OF_JAX = {
    "plain": functools.partial(plain_attention(mha_jax), need_weights=True),
    "fused": fused_attention(mha_jax),
    "blocks": functools.partial(fused_attention(mha_jax), kernel=SMALL),
    "library": fused_attention(mha_jax),
    "blocks-at-once": functools.partial(
        fused_attention(mha_jax), kernel=FusedAttention(most_scores=0, queries=2, keys=2)
    ),
}
"""Functions of heads by path. `library` and `blocks-at-once` are the paths of accelerators."""

ALL = tuple(hidings(1, 1))
FEW = (
    "mask",
    "causal lengths",
    "segments",
    "bias",
    "window and mask",
    "chunks",
    "sinks",
    "relative bias",
)
"""Each way to hide keys once, as JAX compiles each in a second or two."""

IN_MAKE_TEST = [
    ("fused", "one-key", "float32", FEW),
    ("fused", "one-query", "float16", ("causal lengths", "sinks")),
    ("fused", "one-of-each", "bfloat16", ("mask", "window and mask")),
    ("plain", "one-of-each", "float32", ("segments", "bias", "sinks")),
    ("blocks", "one-key", "float32", ("mask", "causal lengths", "chunks", "relative bias")),
    ("library", "one-key", "float32", ("mask", "segments", "bias")),
]
"""Each way on the usual path and on one or two others. In `make test-thorough`, each is tested on
all.
"""
IN_JAX = [
    (path, size, "float32", ALL) for path in PATHS_OF_JAX for size in ("one-key", "one-of-each")
]
IN_JAX += [
    (path, size, "float32", ALL)
    for path in ("fused", "blocks")
    for size in ("one-query", "one-key-of-many-queries")
]


def id_of(value):
    """Return the name of a parameter, or the number of hidings."""
    return f"{len(value)}-hidings" if isinstance(value, tuple) else value


@sample(where=lambda path, size, dtype, names: (path, size, dtype, names) in IN_MAKE_TEST)
@pytest.mark.parametrize(("path", "size", "dtype", "names"), [*IN_MAKE_TEST, *IN_JAX], ids=id_of)
def test_jax_paths_match_formulas(monkeypatch, path, size, dtype, names):
    """On each path of JAX, contexts, attention weights and gradients match the formulas in
    float64 for one key, one query, or one of each; rows without a key are 0, as are the
    gradients of their queries.
    """
    if path in ("library", "blocks-at-once"):
        monkeypatch.setattr(
            mha_jax.fused, "platform_of", lambda *arrays: "metal"
        )  # has no kernel of its own
    with jax.numpy_dtype_promotion(
        "standard" if path == "library" else "strict"
    ):  # JAX's own gradient requires it
        assert wrong_in(results_in_jax(PATHS_OF_JAX[path], size, dtype, names), size, dtype) == []


PATHS_OF_TORCH = {
    "plain": functools.partial(plain_attention(mha_torch), need_weights=True),
    "fused": fused_attention(mha_torch),
    "flex": fused_attention(mha_torch),
}


IN_TORCH = [
    (path, size, dtype) for path in ("plain", "fused") for size in SIZES for dtype in DTYPES
]
IN_TORCH += [("flex", size, "float32") for size in SIZES]


@sample(where=lambda path, size: path != "flex" or size == "one-key")
@pytest.mark.parametrize(
    ("path", "size", "dtype"),
    IN_TORCH,
)
def test_torch_paths_match_formulas(monkeypatch, path, size, dtype):
    """On each path of PyTorch, contexts, attention weights and gradients match the formulas in
    float64 for one key, one query, or one of each; rows without a key are 0, as are the
    gradients of their queries.
    """
    if path == "flex":  # for CUDA, computed on a CPU without the compiler that it needs
        monkeypatch.setattr(flex, "is_on_device", lambda x: x.is_cpu)
        monkeypatch.setattr(flex, "_runs_here", lambda query, value: True)
        monkeypatch.setattr(flex, "MANY_SCORES", 0)
        monkeypatch.setattr(flex, "_kernel", lambda: flex_attention.flex_attention)
        monkeypatch.setattr(
            flex_attention, "_validate_device", lambda *heads: None
        )  # it rejects gradients on a CPU
    assert wrong_in(results_in_torch(PATHS_OF_TORCH[path], size, dtype), size, dtype) == []


@pytest.mark.parametrize("platform", ["cpu", "metal"])
def test_single_slot_cache_returns_its_value(platform):
    """In JAX, the context of a step over a cache of one slot is its value, bit for bit."""
    spec = AttentionSpec(NUM_HEADS * HEAD_DIM, NUM_HEADS, num_kv_heads=NUM_KV_HEADS, window_size=1)
    arrays = drawn(Hiding({}, {}, {}), 1, 1, np.float32)
    mask = Mask(is_causal=True, span=spec.span, q_offset=jnp.zeros(BATCH, jnp.int32))
    context = blockwise.attend_to_cache(
        *(jnp.asarray(arrays[name]) for name in ("query", "key", "value")),
        mask,
        Scores(spec),
        sizes=FusedAttention(keys=1, last_keys=1),
        platform=platform,
    )
    np.testing.assert_array_equal(
        context, arrays["value"].repeat(NUM_HEADS // NUM_KV_HEADS, axis=1)
    )


# ---- Layers and caches ---------------------------------------------------------------------------

# Over one key, attention returns the projected value for a row that may attend to it, and otherwise
# 0.

PLAIN = AttentionSpec(16, 4, num_kv_heads=2)
LATENT = AttentionSpec(
    16,
    4,
    head_dim=8,
    value_head_dim=4,
    latent=Latent(6, 4),
    rope=Rope(rotary_dim=4, rotated="last"),
)
SECOND_IS_HIDDEN = np.array([False, True]).reshape(2, 1, 1, 1)


class Call(NamedTuple):
    """A call of a layer with one key of each sequence, hidden from the second one.

    Attributes:
        kind: name of the class.
        num_queries: number of queries.
        options: keywords of the call.
        spec: layer.
        is_padding: the second sequence has no token at all, so that its output is 0.
    """

    kind: str
    num_queries: int
    options: dict[str, Any]
    spec: AttentionSpec = PLAIN
    is_padding: bool = False


LENGTHS = {"key_padding_lengths": np.array([1, 0], np.int32)}
HIDDEN_BIAS = np.where(SECOND_IS_HIDDEN, -np.inf, 0.5).astype(np.float32)
LAYER_CALLS = {
    "memory": Call("MultiHeadAttention", 3, LENGTHS),
    "memory, weights": Call("MultiHeadAttention", 3, LENGTHS | {"need_weights": True}),
    "memory, functional": Call("multi_head_attention", 3, LENGTHS),
    "memory, bias": Call("MultiHeadAttention", 3, {"bias": HIDDEN_BIAS}),
    "tokens": Call("MultiHeadSelfAttention", 1, LENGTHS),
    "tokens, latent": Call("MultiHeadSelfAttention", 1, LENGTHS, LATENT),
    "cached": Call("MultiHeadAttentionWithCache", 1, {"mask": SECOND_IS_HIDDEN}),
    "cached, functional": Call("multi_head_attention_with_cache", 1, {"mask": SECOND_IS_HIDDEN}),
    "cached, bias": Call("MultiHeadAttentionWithCache", 1, {"bias": HIDDEN_BIAS}),
    "cached, ragged": Call(
        "MultiHeadAttentionWithCache",
        1,
        {"new_lengths": LENGTHS["key_padding_lengths"]},
        PLAIN,
        True,
    ),
    "latent": Call("MultiHeadLatentAttention", 1, {"mask": SECOND_IS_HIDDEN}, LATENT),
    "latent, expanded": Call(
        "multi_head_latent_attention", 1, {"mask": SECOND_IS_HIDDEN, "absorb": False}, LATENT
    ),
    "latent, ragged": Call(
        "MultiHeadLatentAttention", 1, {"new_lengths": LENGTHS["key_padding_lengths"]}, LATENT, True
    ),
}


CLASSES = {
    "multi_head_attention": "MultiHeadAttention",
    "multi_head_attention_with_cache": "MultiHeadAttentionWithCache",
    "multi_head_latent_attention": "MultiHeadLatentAttention",
}
"""Classes with the weights of functions."""


def inputs_of(call):
    """Return the queries, and a memory of one token for classes and functions with keys of their
    own.
    """
    rng = np.random.default_rng(3)
    query, memory = (
        rng.standard_normal((2, length, 16)).astype(np.float32) for length in (call.num_queries, 1)
    )
    has_memory = call.kind in ("MultiHeadAttention", "multi_head_attention")
    return (query, memory) if has_memory else (query,)


def expected_of_call(call, weights, cotangent):
    """Return the output in float64, and the gradients of values and outputs; gradients of the
    scores are 0.
    """
    leaves = {
        name: torch.from_numpy(x.astype(np.float64)).requires_grad_() for name, x in weights.items()
    }
    memory = torch.from_numpy(inputs_of(call)[-1].astype(np.float64))

    def projected(name, x):
        product = x @ leaves[f"{name}.weight"].mT
        return product + leaves[f"{name}.bias"] if f"{name}.bias" in leaves else product

    if call.spec.latent is None:
        value = (
            projected("v_proj", memory).unflatten(2, (2, 4)).repeat_interleave(2, dim=2)
        )  # of each query head
    else:
        rank = call.spec.latent.kv_rank
        latent = projected("kv_a_proj", memory)[..., :rank]
        scale = (latent.square().mean(dim=-1, keepdim=True) + call.spec.latent.eps).rsqrt()
        value = projected("kv_b_proj", latent * scale * leaves["kv_a_norm.weight"]).unflatten(
            2, (4, -1)
        )
        value = value[..., -call.spec.value_head_dim :]
    context = value.flatten(2) * torch.tensor([1.0, 0.0]).reshape(2, 1, 1)
    output = projected("out_proj", context.expand(-1, call.num_queries, -1))
    if call.is_padding:
        output = output * torch.tensor([1.0, 0.0]).reshape(2, 1, 1)
    gradients = torch.autograd.grad(
        output,
        list(leaves.values()),
        torch.from_numpy(cotangent),
        materialize_grads=True,
        allow_unused=True,
    )
    return output.detach().numpy(), {
        name: x.numpy() for name, x in zip(leaves, gradients, strict=True)
    }


def called(sibling, call, module, params, arrays, options):
    """Return the output of a call."""
    cache = (module.init_cache(2, 1),) if hasattr(module, "init_cache") else ()
    if call.kind.islower():  # a function
        query, *memory = arrays
        return getattr(sibling.package, call.kind)(
            query, params, call.spec, *memory, *cache, **options
        )[0]
    output = module(*arrays, *cache, **options)
    return output[0] if isinstance(output, tuple) else output


def results_of_call(sibling, call, weights, cotangent):
    """Return the output and the gradients of the weights."""
    kind = CLASSES.get(call.kind, call.kind)
    module = parity.load_into(sibling.module(kind, call.spec), weights, call.spec)
    arrays = tuple(map(sibling.array, inputs_of(call)))
    options = {
        name: x if isinstance(x, bool) else sibling.array(x) for name, x in call.options.items()
    }
    if sibling.name == "torch":
        parameters = dict(module.named_parameters())
        output = called(sibling, call, module, parameters, arrays, options)
        gradients = torch.autograd.grad(
            output, list(parameters.values()), torch.from_numpy(cotangent).float()
        )
        by_name = dict(zip(parameters, gradients, strict=True))
        return output.detach().numpy(), sibling.backend.from_state_dict(by_name, call.spec)
    graph, state = nnx.split(module)

    def output_of(state):
        merged = nnx.merge(graph, state)
        return called(
            sibling, call, merged, nnx.to_pure_dict(nnx.state(merged, nnx.Param)), arrays, options
        )

    @jax.jit
    def with_gradients(state, cotangent):
        output, pull_back = jax.vjp(output_of, state)
        return output, pull_back(cotangent)[0]

    output, gradients = with_gradients(state, jnp.asarray(cotangent, np.float32))
    return np.asarray(output), sibling.backend.from_params(nnx.to_pure_dict(gradients), call.spec)


IN_BOTH = [(name, sibling) for name in LAYER_CALLS for sibling in ("torch", "jax")]
OFTEN = ("memory", "tokens", "cached", "latent")
"""Calls of JAX in `make test`; torch makes all."""


@sample(where=lambda name, framework: framework == "torch" or name in OFTEN)
@pytest.mark.parametrize(("name", "framework"), IN_BOTH)
def test_layers_and_caches_with_one_key(name, framework):
    """With one key, hidden from the second sequence, outputs and weight gradients of layers,
    functions and caches match the formulas in float64.
    """
    call, sibling = LAYER_CALLS[name], SIBLINGS[framework]
    weights = {key: x.astype(np.float32) for key, x in parity.random_weights(call.spec).items()}
    cotangent = np.random.default_rng(4).standard_normal((2, call.num_queries, 16))
    output, gradients = results_of_call(sibling, call, weights, cotangent)
    expected, expected_gradients = expected_of_call(call, weights, cotangent)
    parity.assert_parity(output, expected)
    assert gradients.keys() == expected_gradients.keys()
    for key, gradient in gradients.items():
        size = max(
            1.0, np.abs(expected_gradients[key]).max()
        )  # terms of the gradients of scores cancel
        allowed = UNITS["float32"] * unit_of_rounding("float32") * size
        assert np.abs(gradient - expected_gradients[key]).max() <= allowed, key
