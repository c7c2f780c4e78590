"""Multi-head attention in JAX and PyTorch: gradients, half precision, and features that only they
have.

A layer is reached by four paths: the function or the module, with attention weights (the plain
path) or without them (the fused one). Properties that must hold on every path are tested on all
four.
"""

import copy
import math
from dataclasses import asdict, replace
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import jax.test_util
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.heads import attention_in
from helpers.input_errors import rejects
from helpers.samples import sample

import mha_jax
import mha_torch
import parity
from mha_spec import AttentionSpec, Norm, Rope

PATHS = ("function-plain", "function-fused", "module-plain", "module-fused")
HALVES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
DTYPES = {"float32": np.float32, **HALVES}
EPSILON = float(np.finfo(np.float32).eps)

SPEC = parity.AttentionSpec(8, 2)
BARE = parity.AttentionSpec(8, 2, out_proj=False)  # the context is the output
SPECS = {
    "plain": SPEC,
    "bare": BARE,
    "gqa": parity.AttentionSpec(24, 6, num_kv_heads=2),
    "mqa": parity.AttentionSpec(8, 4, num_kv_heads=1),
    "head-dim": parity.AttentionSpec(8, 2, head_dim=6),
    "cross": parity.AttentionSpec(8, 2, d_in=5, d_kv=7),
    "no-biases": parity.AttentionSpec(8, 2, qkv_bias=False, out_bias=False),
    "qkv-bias-only": parity.AttentionSpec(8, 2, out_bias=False),
    "out-bias-only": parity.AttentionSpec(8, 2, qkv_bias=False),
}
every_path = pytest.mark.parametrize("path", PATHS)
# in half precision, modules take the same steps as functions
every_path_and_dtype = pytest.mark.parametrize(
    ("path", "dtype"),
    [(path, np.float32) for path in PATHS]
    + [(path, dtype) for path in PATHS[:2] for dtype in HALVES.values()],
    ids=[f"{path}-float32" for path in PATHS]
    + [f"{path}-{name}" for path in PATHS[:2] for name in HALVES],
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
only_jax = pytest.mark.parametrize("sibling", ["jax"], indirect=True)
only_torch = pytest.mark.parametrize("sibling", ["torch"], indirect=True)
both_forms = pytest.mark.parametrize("form", ["plain", "fused"])

# Query 1 of the first sequence attends to no key, and no query attends to key 3.
MASK = np.array(
    [
        [[[0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1]]],
        [[[0, 0, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1]]],
    ],
    bool,
)


def problem(spec, dtype: Any = np.float32):
    """Return weights by canonical name, and two sequences of three queries and four keys each."""
    rng = np.random.default_rng(1)
    inputs = {
        "query": rng.standard_normal((2, 3, spec.d_in)),
        "key": rng.standard_normal((2, 4, spec.d_kv)),
    }
    return {name: x.astype(dtype) for name, x in {**parity.random_weights(spec), **inputs}.items()}


def parameter_tree(weights):
    """Return arrays by canonical name as the parameters of a Flax layer."""
    tree = {}
    for name, array in weights.items():
        projection, leaf = name.split(".")
        tree.setdefault(projection, {})["kernel" if leaf == "weight" else "bias"] = array.T
    return tree


def attend(sibling, path, spec, arrays, **options):
    """Return output and attention weights of a layer on one of the paths, from the framework's
    arrays.
    """
    weights = {name: x for name, x in arrays.items() if "." in name}
    weights = parameter_tree(weights) if sibling.name == "jax" else weights
    inputs = {name: x for name, x in arrays.items() if "." not in name}
    query = inputs.pop("query")
    options |= {**inputs, "need_weights": path.endswith("plain")}
    if path.startswith("function"):
        return sibling.package.multi_head_attention(query, weights, spec, **options)
    module = sibling.module("MultiHeadAttention", spec)
    if sibling.name == "torch":
        return torch.func.functional_call(module, weights, query, options)
    nnx.update(module, weights)
    return module(query, **options)


def attended(sibling, path, spec, arrays, **options):
    """Call `attend` on NumPy arrays, and return only the output, as a NumPy array."""
    arrays, options = (
        {name: sibling.array(x) for name, x in named.items()} for named in (arrays, options)
    )
    return sibling.numpy(attend(sibling, path, spec, arrays, **options)[0])


def gradients(sibling, function, arrays):
    """Return the gradients, by name, of the sum of the function's output with respect to NumPy
    arrays.
    """
    arrays = {name: sibling.array(x) for name, x in arrays.items()}
    if sibling.name == "jax":
        # One program, because an eager gradient compiles dozens of small ones that no other test
        # needs.
        computed = jax.jit(jax.grad(lambda arrays: function(arrays).astype(jnp.float32).sum()))(
            arrays
        )
    else:
        leaves = {name: x.requires_grad_() for name, x in arrays.items()}
        function(leaves).float().sum().backward()
        computed = {name: x.grad for name, x in leaves.items()}
    return {name: sibling.numpy(x) for name, x in computed.items()}


def dot_product_attention(sibling, form, query, key, value, **options):
    """Return only the context of `scaled_dot_product_attention`, plain or fused, from NumPy to
    NumPy.
    """
    arrays = (sibling.array(np.asarray(x)) for x in (query, key, value))
    options = {
        name: sibling.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
    }
    return sibling.numpy(attention_in(form, sibling.package)(*arrays, **options)[0])


def filled(sibling, kind, spec, seed=0):
    """Return a module with the random weights of its spec. The seed is for its dropout."""
    module = sibling.module(kind, spec, seed=seed)
    return parity.load_into(module, parity.random_weights(spec), spec)


def num_parameters(sibling, module):
    if sibling.name == "torch":
        return sum(parameter.numel() for parameter in module.parameters())
    return sum(parameter.size for parameter in jax.tree.leaves(nnx.state(module, nnx.Param)))


# ---- Queries without a key -----------------------------------------------------------------------


@sample(jax=1)
@every_path_and_dtype
def test_empty_row_gradients_are_finite(sibling, path, dtype):
    """All gradients of weights and inputs are finite if one query may attend to no key."""
    mask = sibling.array(MASK)
    actual = gradients(
        sibling,
        lambda arrays: attend(sibling, path, SPEC, arrays, mask=mask)[0],
        problem(SPEC, dtype),
    )
    assert [
        name
        for name, gradient in actual.items()
        if not np.isfinite(gradient.astype(np.float32)).all()
    ] == []


@sample(jax=1)
@every_path
def test_fully_masked_gradients_are_finite(sibling, path):
    """All gradients of weights and inputs are finite if the mask hides
    every key from every query.
    """
    mask = sibling.array(np.ones((3, 4), bool))
    actual = gradients(
        sibling, lambda arrays: attend(sibling, path, SPEC, arrays, mask=mask)[0], problem(SPEC)
    )
    assert [name for name, gradient in actual.items() if not np.isfinite(gradient).all()] == []


@sample(jax=1)
@every_path
def test_empty_row_query_gradient_is_zero(sibling, path):
    """The gradient of a query that may attend to no key is 0."""
    mask = sibling.array(MASK)
    actual = gradients(
        sibling, lambda arrays: attend(sibling, path, SPEC, arrays, mask=mask)[0], problem(SPEC)
    )
    assert not actual["query"][0, 1].any()


@sample(jax=1)
@every_path_and_dtype
def test_infinite_bias_gradients_are_finite(sibling, path, dtype):
    """All gradients, including the bias's, are finite if the biases of one query are all -inf."""
    arrays = {**problem(SPEC, dtype), "bias": np.where(MASK, -np.inf, 0.5).astype(dtype)}
    actual = gradients(sibling, lambda arrays: attend(sibling, path, SPEC, arrays)[0], arrays)
    assert [
        name
        for name, gradient in actual.items()
        if not np.isfinite(gradient.astype(np.float32)).all()
    ] == []


@sample(jax=1)
@both_forms
def test_context_without_keys_is_zero(sibling, form):
    """The context is 0 if there are no keys."""
    query, nothing = np.ones((2, 2, 3, 4), np.float32), np.zeros((2, 2, 0, 4), np.float32)
    assert not dot_product_attention(sibling, form, query, nothing, nothing).any()


@sample(jax=1)
@every_path
def test_empty_batch_output_shape(sibling, path):
    """A batch of 0 sequences has an output of shape (0, 3, 8)."""
    arrays = {name: x if "." in name else x[:0] for name, x in problem(SPEC).items()}
    assert attended(sibling, path, SPEC, arrays).shape == (0, 3, 8)


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@only_torch
def test_empty_row_is_zero_in_every_mode(sibling, need_weights, training, mode):
    """The output of a query that may attend to no key is 0 without an output projection: in
    training and evaluation, with and without gradients, and in inference mode.
    """
    arrays = problem(BARE)
    module = filled(sibling, "MultiHeadAttention", BARE).train(training)
    query, key = torch.from_numpy(arrays["query"]), torch.from_numpy(arrays["key"])

    with mode():
        output, _ = module(query, key, mask=torch.from_numpy(MASK), need_weights=need_weights)

    assert not output[0, 1].any()


# ---- Masked tokens change nothing ----------------------------------------------------------------


@sample(jax=1)
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("side", [1, 2], ids=["key", "value"])
@every_dtype
def test_huge_masked_token_changes_nothing(sibling, rng, dtype, side, sign):
    """A masked key or value of plus or minus the largest number of its dtype
    changes no bit of the context.
    """
    arrays = [rng.standard_normal((2, 2, length, 4)).astype(dtype) for length in (3, 4, 4)]
    changed = [x.copy() for x in arrays]
    changed[side][:, :, 3] = sign * ml_dtypes.finfo(dtype).max

    before = dot_product_attention(sibling, "plain", *arrays, mask=MASK)
    after = dot_product_attention(sibling, "plain", *changed, mask=MASK)

    assert np.array_equal(before, after)


@sample(jax=1)
@pytest.mark.parametrize("side", [1, 2], ids=["key", "value"])
@both_forms
def test_masked_float16_token_has_no_effect(sibling, rng, form, side):
    """A masked key or value of 65504 in float16 changes no bit of the context, plain or fused."""
    arrays = [rng.standard_normal((2, 2, length, 4)).astype(np.float16) for length in (3, 4, 4)]
    changed = [x.copy() for x in arrays]
    changed[side][:, :, 3] = 65504.0

    before = dot_product_attention(sibling, form, *arrays, mask=MASK)
    after = dot_product_attention(sibling, form, *changed, mask=MASK)

    assert np.array_equal(before, after)


@sample(jax=1)
@pytest.mark.parametrize("side", ["key", "value"])
@every_path
def test_masked_token_gradients_are_finite(sibling, path, side):
    """All gradients are finite if a masked key or value is 1e30."""
    arrays = problem(SPEC)
    arrays["value"] = arrays["key"].copy()
    arrays[side][:, 3] = 1e30
    mask = sibling.array(MASK)

    actual = gradients(
        sibling, lambda arrays: attend(sibling, path, SPEC, arrays, mask=mask)[0], arrays
    )

    assert [name for name, gradient in actual.items() if not np.isfinite(gradient).all()] == []


@sample(jax=1)
@every_path
def test_constant_bias_changes_only_rounding(sibling, path):
    """A bias of 7 for all keys changes the output by at most 28 epsilons."""
    bias = np.full((3, 1), 7.0, np.float32)
    shifted = attended(sibling, path, SPEC, problem(SPEC), bias=bias)
    # Scores near 7 are rounded to 7 epsilons, which the softmax passes on.
    assert np.abs(shifted - attended(sibling, path, SPEC, problem(SPEC))).max() <= 4 * 7 * EPSILON


def test_causal_self_attention_with_dropout(sibling, rng):
    """In training with dropout, changes to tokens from the fourth on leave the outputs of the first
    three of causal self-attention as they are, bit for bit.
    """
    spec = parity.AttentionSpec(8, 2, dropout=0.5, output_dropout=0.25)
    x = rng.standard_normal((2, 6, 8)).astype(np.float32)
    changed = x.copy()
    changed[:, 3:] += 1.0

    def output(x):  # a fresh module each time, so that the same weights are dropped
        module = filled(sibling, "MultiHeadSelfAttention", spec)
        module.train()
        return sibling.numpy(module(sibling.array(x), is_causal=True))

    assert np.array_equal(output(x)[:, :3], output(changed)[:, :3])


@sample(jax=1)
@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])
def test_mask_holds_in_training_with_dropout(sibling, rng, need_weights):
    """In training with dropout, changes to tokens that a causal mask hides
    change no bit of the outputs.
    """
    spec = parity.AttentionSpec(8, 2, dropout=0.5)
    x = rng.standard_normal((2, 6, 8)).astype(np.float32)
    changed = x.copy()
    changed[:, 3:] += 1.0
    mask = sibling.package.create_causal_mask(6)

    def output(x):
        module = filled(sibling, "MultiHeadAttention", spec)
        module.train()
        return sibling.numpy(module(sibling.array(x), mask=mask, need_weights=need_weights)[0])

    assert np.array_equal(output(x)[:, :3], output(changed)[:, :3])


def test_self_attention_default_is_unmasked(sibling, rng):
    """Self-attention without a mask equals attention of the same tokens
    without a mask, bit for bit.
    """
    x = sibling.array(rng.standard_normal((2, 6, 8)).astype(np.float32))
    output = filled(sibling, "MultiHeadSelfAttention", SPEC)(x)
    assert np.array_equal(
        sibling.numpy(output), sibling.numpy(filled(sibling, "MultiHeadAttention", SPEC)(x)[0])
    )


# ---- Empty inputs --------------------------------------------------------------------------------

NOTHING = {
    "no-queries": (2, 0, 4),
    "no-keys": (2, 3, 0),
    "neither": (2, 0, 0),
    "no-sequences": (0, 3, 4),
}


@sample(12, jax=1)
@pytest.mark.parametrize("sizes", NOTHING.values(), ids=NOTHING)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("masked", [False, True], ids=["seen", "masked"])
@both_forms
def test_empty_heads_give_zero_context(sibling, form, sizes, is_causal, padding, masked):
    """Without queries, keys or sequences the context has the shape of the queries and is 0, with
    any combination of causality, lengths and a mask.
    """
    batch_size, num_queries, num_keys = sizes
    query = np.ones((batch_size, 4, num_queries, 6), np.float32)
    key = np.ones((batch_size, 2, num_keys, 6), np.float32)
    mask = np.zeros((num_queries, num_keys), bool) if masked else None
    lengths = [num_keys] * batch_size if padding else None
    options = {"mask": mask, "is_causal": is_causal, "key_padding_lengths": lengths}
    context = dot_product_attention(sibling, form, query, key, key, **options)
    np.testing.assert_array_equal(context, np.zeros_like(query), strict=True)


@sample(jax=1)
@pytest.mark.parametrize(
    ("batch_size", "num_tokens"), [(2, 0), (0, 3), (0, 0)], ids=["tokens", "sequences", "both"]
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
def test_modules_accept_empty_inputs(sibling, batch_size, num_tokens, is_causal, padding):
    """Modules accept 0 tokens or 0 sequences; output and attention weights
    have the expected shapes.
    """
    spec = parity.AttentionSpec(8, 2, rope=Rope(100.0))
    x = sibling.array(np.zeros((batch_size, num_tokens, 8), np.float32))
    hiding = {
        "is_causal": is_causal,
        "key_padding_lengths": [num_tokens] * batch_size if padding else None,
    }
    assert filled(sibling, "MultiHeadSelfAttention", spec)(x, **hiding).shape == x.shape
    output, attn_weights = filled(sibling, "MultiHeadAttention", spec)(
        x, **hiding, need_weights=True
    )
    assert (output.shape, attn_weights.shape) == (x.shape, (batch_size, 2, num_tokens, num_tokens))


# ---- Heads ---------------------------------------------------------------------------------------


def with_heads_permuted(weights, order, head_dim):
    """Return the weights of the same layer with its heads in a different order."""
    features = np.concatenate([np.arange(head_dim) + head * head_dim for head in order])
    permuted = {name: x[features] for name, x in weights.items() if name[:2] in ("q_", "k_", "v_")}
    return {**weights, **permuted, "out_proj.weight": weights["out_proj.weight"][:, features]}


@sample(jax=1)
@every_path
def test_head_permutation_changes_rounding(sibling, path):
    """Permuting the heads of all projections changes the output by at most 12 epsilons."""
    spec = parity.AttentionSpec(12, 3)
    arrays = problem(spec)

    permuted = attended(sibling, path, spec, with_heads_permuted(arrays, [2, 0, 1], 4), mask=MASK)

    # The output projection sums 12 products of order 1 in a different order.
    assert np.abs(permuted - attended(sibling, path, spec, arrays, mask=MASK)).max() <= 12 * EPSILON


@sample(jax=1)
@pytest.mark.parametrize("path", ["function-plain", "module-plain"])
def test_head_order_of_attention_weights(sibling, path):
    """Permuting the heads of a layer permutes the heads of its attention weights."""
    spec = parity.AttentionSpec(12, 3)
    arrays = problem(spec)
    permuted = with_heads_permuted(arrays, [2, 0, 1], 4)

    _, before = attend(sibling, path, spec, {name: sibling.array(x) for name, x in arrays.items()})
    _, after = attend(sibling, path, spec, {name: sibling.array(x) for name, x in permuted.items()})

    # A projection sums 12 products of order 1, in an order that depends on the head; the softmax
    # passes that on.
    difference = sibling.numpy(after) - sibling.numpy(before)[:, [2, 0, 1]]
    assert np.abs(difference).max() <= 12 * EPSILON


def test_key_permutation_changes_rounding(sibling, rng):
    """Permuting keys, values and mask together changes the context by at most 8 epsilons."""
    query, key, value = (
        rng.standard_normal((2, 2, length, 4)).astype(np.float32) for length in (3, 4, 4)
    )
    order = [3, 1, 0, 2]

    before = dot_product_attention(sibling, "fused", query, key, value, mask=MASK)
    after = dot_product_attention(
        sibling, "fused", query, key[:, :, order], value[:, :, order], mask=MASK[..., order]
    )

    assert (
        np.abs(before - after).max() <= 8 * EPSILON
    )  # sums of 4 values of order 1 in a different order


@sample(jax=1)
@pytest.mark.parametrize(
    ("num_kv_heads", "expected"),
    [
        (6, [0, 1, 2, 3, 4, 5]),
        (3, [0, 0, 1, 1, 2, 2]),
        (2, [0, 0, 0, 1, 1, 1]),
        (1, [0, 0, 0, 0, 0, 0]),
    ],
)
@both_forms
def test_grouped_heads_use_their_value_head(sibling, rng, form, num_kv_heads, expected):
    """With 6 query heads and 6, 3, 2 or 1 key/value heads, each query head uses
    the value head of its group.
    """
    query, key = (
        rng.standard_normal((1, heads, 3, 4)).astype(np.float32) for heads in (6, num_kv_heads)
    )
    value = np.broadcast_to(
        np.arange(num_kv_heads, dtype=np.float32)[None, :, None, None], key.shape
    )

    context = dot_product_attention(sibling, form, query, key, value)

    assert context[0, :, 0, 0] == pytest.approx(
        expected, abs=5 * 4 * EPSILON
    )  # weights that sum to 1, times at most 5


@sample(jax=1)
@both_forms
def test_grouped_heads_use_their_key_head(sibling, form):
    """With 6 query heads and 2 key heads, the first three query heads use key head
    0, the others key head 1.
    """
    # Key head 0 selects token 0, key head 1 token 1; the value is the index of the token.
    query = np.ones((1, 6, 1, 1), np.float32)
    key = np.array([[[[99.0], [-99.0]], [[-99.0], [99.0]]]], np.float32)
    value = np.array([[[[0.0], [1.0]], [[0.0], [1.0]]]], np.float32)

    context = dot_product_attention(sibling, form, query, key, value)

    assert context.ravel().tolist() == [0, 0, 0, 1, 1, 1]  # exp(-198) is 0 in float32


@sample(jax=1)
@pytest.mark.parametrize("spec", [SPECS["gqa"], SPECS["mqa"]], ids=["gqa", "mqa"])
@every_path
def test_grouped_layer_repeats_key_heads(sibling, path, spec):
    """A layer with grouped heads matches a layer with key and value
    heads repeated in its weights.
    """
    arrays = problem(spec)
    group = spec.num_heads // spec.num_kv_heads
    full = dict(arrays)
    full |= {
        name: x.reshape(spec.num_kv_heads, spec.head_dim, -1)
        .repeat(group, axis=0)
        .reshape(-1, *x.shape[1:])
        for name, x in arrays.items()
        if name[:2] in ("k_", "v_")
    }

    grouped = attended(sibling, path, spec, arrays, mask=MASK)

    ungrouped = attended(
        sibling, path, parity.AttentionSpec(spec.d_model, spec.num_heads), full, mask=MASK
    )
    # Projections of a different width may sum their d_model products of order 1 in a different
    # order.
    assert np.abs(grouped - ungrouped).max() <= spec.d_model * EPSILON


@sample(jax=1)
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SPEC, 4 * 8 * 8 + 4 * 8),
        (parity.AttentionSpec(64, 8), 4 * 64 * 64 + 4 * 64),
        (parity.AttentionSpec(64, 8, fused_qkv=True), 4 * 64 * 64 + 4 * 64),
        (SPECS["no-biases"], 4 * 8 * 8),
        (BARE, 3 * 8 * 8 + 3 * 8),
        (SPECS["mqa"], 2 * (8 * 8 + 8) + 2 * (8 * 2 + 2)),
        (SPECS["head-dim"], 3 * (8 * 12 + 12) + 12 * 8 + 8),
        (SPECS["cross"], (5 * 8 + 8) + 2 * (7 * 8 + 8) + (8 * 8 + 8)),
    ],
    ids=["8", "64", "fused-qkv", "no-biases", "no-out-proj", "mqa", "head-dim", "cross"],
)
def test_parameter_count_matches_formula(sibling, spec, expected):
    """The number of parameters of a module is the sum over its projections."""
    assert num_parameters(sibling, sibling.module("MultiHeadAttention", spec)) == expected


# ---- One projection for query, key and value -----------------------------------------------------


@sample(jax=1)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize(
    "spec", [SPECS["plain"], SPECS["gqa"], SPECS["no-biases"]], ids=["plain", "gqa", "no-biases"]
)
def test_fused_qkv_matches_three_projections(sibling, spec, cross):
    """One fused projection with the same weights matches three projections, in
    self- and cross-attention.
    """
    arrays = problem(spec)
    inputs = [sibling.array(arrays[name]) for name in (["query", "key"] if cross else ["query"])]
    packed = parity.AttentionSpec(**{**asdict(spec), "fused_qkv": True})

    separate, _ = filled(sibling, "MultiHeadAttention", spec)(*inputs)
    together, _ = filled(sibling, "MultiHeadAttention", packed)(*inputs)

    # A wider product may sum its d_model terms in a different order.
    assert np.abs(sibling.numpy(separate) - sibling.numpy(together)).max() <= spec.d_model * EPSILON


@sample(jax=1)
@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])
def test_scale_replaces_the_default_scale(sibling, need_weights):
    """A layer with twice the default scale equals one with doubled query weights and biases, bit
    for bit, and differs from one with the default scale.
    """
    arrays = problem(SPEC)
    query, key = sibling.array(arrays["query"]), sibling.array(arrays["key"])
    weights = {
        name: 2.0 * x if name.startswith("q_proj") else x
        for name, x in parity.random_weights(SPEC).items()
    }
    doubled = sibling.module("MultiHeadAttention", replace(SPEC, scale=2.0 * SPEC.score_scale))
    parity.load_into(doubled, parity.random_weights(SPEC), doubled.spec)
    usual = parity.load_into(sibling.module("MultiHeadAttention", SPEC), weights, SPEC)

    actual, expected = (
        module(query, key, need_weights=need_weights)[0] for module in (doubled, usual)
    )

    assert np.array_equal(sibling.numpy(actual), sibling.numpy(expected))
    plain = parity.load_into(
        sibling.module("MultiHeadAttention", SPEC), parity.random_weights(SPEC), SPEC
    )
    assert not np.array_equal(sibling.numpy(actual), sibling.numpy(plain(query, key)[0]))


@sample(jax=1)
@pytest.mark.parametrize("fused_qkv", [False, True], ids=["three", "fused-qkv"])
def test_projections_are_clipped(sibling, fused_qkv):
    """`clip_qkv=0.25` clips projected queries, keys and values to [-0.25, 0.25];
    some entries reach the bound.
    """
    spec = replace(SPEC, clip_qkv=0.25, fused_qkv=fused_qkv)
    x = sibling.array(problem(SPEC)["query"])
    drawn_weights = parity.random_weights(spec)
    weights = (
        sibling.backend.to_params(drawn_weights, spec)
        if sibling.name == "jax"
        else sibling.backend.to_state_dict(drawn_weights, spec)
    )
    project = sibling.package.project_with(weights, spec)
    clipped = [
        sibling.numpy(heads) for heads in sibling.package.project_qkv(project, x, x, x, spec)
    ]
    plain = sibling.package.project_qkv(project, x, x, x, replace(spec, clip_qkv=None))
    for projected, heads in zip(clipped, plain, strict=True):
        assert np.array_equal(projected, np.clip(sibling.numpy(heads), -0.25, 0.25))
        assert (np.abs(projected) == 0.25).any()
        assert (np.abs(projected) < 0.25).any()


@sample(jax=1)
@pytest.mark.parametrize(
    "hidden", [{}, {"is_causal": True}, {"key_padding_lengths": [2, 5]}], ids=str
)
@both_forms
def test_value_features_are_independent(sibling, form, hidden, rng):
    """The context of concatenated value features matches the concatenated contexts of values that
    are as wide as keys and narrower.
    """
    attend = attention_in(form, sibling.package)
    q, k, v = (
        sibling.array(rng.standard_normal((2, n, 5, 4)).astype(np.float32)) for n in (4, 2, 2)
    )
    wide = sibling.array(rng.standard_normal((2, 2, 5, 3)).astype(np.float32))
    both = sibling.array(np.concatenate([sibling.numpy(v), sibling.numpy(wide)], axis=3))

    def context(values):
        return sibling.numpy(attend(q, k, values, **hidden)[0])

    parts = [context(v), context(wide)]
    assert [part.shape for part in parts] == [(2, 4, 5, 4), (2, 4, 5, 3)]
    assert np.abs(context(both) - np.concatenate(parts, axis=3)).max() <= 8 * EPSILON


def test_gate_multiplies_by_its_sigmoid(sibling):
    """A gate per feature or per head multiplies the context by its sigmoid: sigmoid(0) is 1/2
    and sigmoid(log 3) is 3/4.
    """
    context = sibling.array(np.arange(8, dtype=np.float32).reshape(1, 2, 2, 2) + 1)
    logits = np.log(np.array([1.0, 3.0], np.float32))
    of_features = np.tile(logits, (1, 2, 2))  # (B, T, N * H)
    of_heads = np.tile(logits, (1, 2, 1))  # (B, T, N)

    features, heads = (
        sibling.numpy(sibling.package.apply_gate(context, sibling.array(gate)))
        for gate in (of_features, of_heads)
    )

    expected = np.arange(8).reshape(1, 2, 2, 2) + 1
    assert np.abs(features - expected * np.array([0.5, 0.75])).max() <= 8 * EPSILON
    assert np.abs(heads - expected * np.array([0.5, 0.75])[:, None, None]).max() <= 8 * EPSILON


def test_context_norm_divides_by_its_rms(sibling):
    """A context norm without weights divides the context by its root mean square over the width."""
    plain = parity.AttentionSpec(8, 2, out_proj=False)
    normed = plain.replace(context_norm=Norm(over="width", weight=None, eps=1e-12))
    x = sibling.array(problem(plain)["query"])
    before, actual = (
        sibling.numpy(filled(sibling, "MultiHeadAttention", spec)(x, x)[0]).astype(np.float64)
        for spec in (plain, normed)
    )
    expected = before / np.sqrt((before**2).mean(axis=-1, keepdims=True))
    assert np.abs(actual - expected).max() <= 8 * EPSILON * np.abs(expected).max()


SOURCE = parity.AttentionSpec(
    24, 6, num_kv_heads=2, qk_norm=Norm(), rope=Rope(500.0), window_size=3
)


def sharing(sibling, source, x):
    """Return a layer with the same weights that shares keys and values, and the keys and values of
    the source.
    """
    weights = {
        name: array
        for name, array in parity.weights_of(source).items()
        if name[:2] not in ("k_", "v_")
    }
    spec = source.spec.replace(shared_kv=True)
    shared = parity.load_into(sibling.module("MultiHeadAttention", spec), weights, spec)
    return shared, sibling.package.project_qkv(source.project, x, x, x, source.spec)[1:]


def test_shared_keys_accept_batch_axes(sibling):
    """A layer of shared keys and values accepts them with no, one or two batch axes, like its
    queries, with the same results up to 8 epsilons.
    """
    source = filled(sibling, "MultiHeadAttention", SOURCE)
    x = sibling.array(problem(SOURCE)["query"])
    shared, (k, v) = sharing(sibling, source, x)
    one, _ = shared(x[0], k[0], v[0])
    two, _ = shared(x[None], k[None], v[None])
    together, _ = shared(x, k, v)
    assert np.abs(sibling.numpy(one) - sibling.numpy(together)[0]).max() <= 8 * EPSILON
    assert np.abs(sibling.numpy(two)[0] - sibling.numpy(together)).max() <= 8 * EPSILON


def test_gate_of_wrong_shape_raises(sibling):
    """A gate of three heads for a context of two heads raises an error."""
    context, gate = (
        sibling.array(np.ones(shape, np.float32)) for shape in ((1, 2, 3, 4), (1, 3, 4))
    )
    with rejects("gate", {"gate.shape": (1, 3, 4)}):
        sibling.package.apply_gate(context, gate)


def test_fused_qkv_accepts_separate_value(sibling, rng):
    """A layer with a fused projection accepts a value that differs from the key, and
    matches three projections.
    """
    arrays = problem(SPEC)
    inputs = [
        sibling.array(x) for x in (arrays["query"], arrays["key"], arrays["key"] + np.float32(0.5))
    ]
    packed = parity.AttentionSpec(8, 2, fused_qkv=True)

    separate, _ = filled(sibling, "MultiHeadAttention", SPEC)(*inputs)
    together, _ = filled(sibling, "MultiHeadAttention", packed)(*inputs)

    assert (
        np.abs(sibling.numpy(separate) - sibling.numpy(together)).max() <= 8 * EPSILON
    )  # as above


def test_function_accepts_fused_qkv_weights(sibling):
    """The function accepts the weights of a module with a fused
    projection, and matches the module.
    """
    packed = parity.AttentionSpec(24, 6, num_kv_heads=2, fused_qkv=True)
    module = filled(sibling, "MultiHeadAttention", packed)
    weights = (
        module.state_dict()
        if sibling.name == "torch"
        else nnx.to_pure_dict(nnx.state(module, nnx.Param))
    )
    query = sibling.array(problem(packed)["query"])

    output, _ = sibling.package.multi_head_attention(query, weights, packed)

    assert (
        np.abs(sibling.numpy(output) - sibling.numpy(module(query)[0])).max() <= 24 * EPSILON
    )  # as above


def test_value_defaults_to_the_key(sibling):
    """Without a value, the key is the value, bit for bit."""
    arrays = problem(SPEC)
    assert np.array_equal(
        attended(sibling, "module-fused", SPEC, arrays),
        attended(sibling, "module-fused", SPEC, {**arrays, "value": arrays["key"]}),
    )


def test_key_defaults_to_the_query(sibling):
    """Without a key, the query is the key, bit for bit."""
    arrays = problem(SPEC)
    del arrays["key"]
    assert np.array_equal(
        attended(sibling, "module-fused", SPEC, arrays),
        attended(sibling, "module-fused", SPEC, {**arrays, "key": arrays["query"]}),
    )


# ---- Large values and long sequences in half precision ------------------------------------------


@sample(jax=1)
@pytest.mark.parametrize("dtype", HALVES.values(), ids=list(HALVES))
@both_forms
def test_large_half_precision_logits(sibling, form, dtype):
    """Scores of 113137 and half of it, beyond float16, select the key
    with the larger one exactly.
    """
    # Scores 8 * 200 * 200 / sqrt(8) = 113137 and half of it, where float16 ends at 65504.
    query = np.full((1, 1, 1, 8), 200.0, dtype)
    key = np.array([200.0, 100.0], dtype).repeat(8).reshape(1, 1, 2, 8)
    value = np.array([1.0, 2.0], dtype).repeat(8).reshape(1, 1, 2, 8)
    assert (dot_product_attention(sibling, form, query, key, value) == 1.0).all()


@sample(jax=1)
@both_forms
def test_gradients_of_large_float16_logits(sibling, form):
    """All gradients are finite for float16 scores of 113137, beyond the largest float16."""
    attend = attention_in(form, sibling.package)
    arrays = {name: np.full((1, 1, 3, 8), 200.0, np.float16) for name in ("query", "key", "value")}
    actual = gradients(sibling, lambda arrays: attend(**arrays)[0], arrays)
    assert [
        name
        for name, gradient in actual.items()
        if not np.isfinite(gradient.astype(np.float32)).all()
    ] == []


@sample(jax=0)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "causal"])
@both_forms
def test_long_float16_sequence(sibling, form, masked):
    """Over 4096 equal float16 tokens with scores of 113137, the context is the mean of the values,
    within 3 epsilons of float16.
    """
    # Equal logits of 113137: the context is the mean of the values, which are all 3.
    tokens = np.full((1, 1, 4096, 8), 200.0, np.float16)
    values = np.full((1, 1, 4096, 8), 3.0, np.float16)
    options = {"mask": sibling.numpy(sibling.package.create_causal_mask(4096))} if masked else {}

    context = dot_product_attention(sibling, form, tokens, tokens, values, **options)

    # 4096 weights, each rounded to float16 by half an epsilon of itself, and the result once more.
    assert np.abs(context - np.float16(3.0)).max() <= 3.0 * np.finfo(np.float16).eps


# ---- Dropout -------------------------------------------------------------------------------------

DROPPING = parity.AttentionSpec(8, 2, dropout=0.5)


def test_dropout_mask_applies_at_rate_zero(sibling):
    """At a dropout rate of 0, `dropout_keep` still drops weights, and
    kept weights are not scaled.
    """
    zeros, value = np.zeros((1, 1, 1, 1), np.float32), np.array([[[[3.0], [7.0]]]], np.float32)
    keep = np.array([[[[False, True]]]])

    context = dot_product_attention(
        sibling, "plain", zeros, np.zeros_like(value), value, dropout_keep=keep
    )

    assert context.item() == 3.5


def test_layer_accepts_dropout_mask(sibling):
    """With `dropout_keep`, the context of a head is 0 exactly where a query keeps no key."""
    arrays = {name: sibling.array(x) for name, x in problem(BARE).items()}
    keep = np.ones((2, 2, 3, 4), bool)
    keep[0, 1, 2] = False  # all keys of one query, in the second head

    output, _ = attend(
        sibling,
        "function-plain",
        replace(BARE, dropout=0.5),
        arrays,
        training=True,
        dropout_keep=sibling.array(keep),
    )

    dropped = sibling.numpy(output).reshape(2, 3, 2, 4) == 0.0
    assert np.array_equal(dropped.all(axis=-1).swapaxes(1, 2), ~keep.any(axis=-1))


def apply_dropout(sibling, x, rate):
    seeded = {"rng": jax.random.key(0)} if sibling.name == "jax" else {}
    torch.manual_seed(0)
    return sibling.numpy(sibling.package.apply_dropout(sibling.array(x), rate, **seeded))


@sample(jax=1)
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate(sibling, rate):
    """Dropout drops a share of 10,000 elements within five standard deviations of its rate."""
    dropped = apply_dropout(sibling, np.ones((1, 1, 100, 100), np.float32), rate) == 0.0
    # Five standard deviations of a mean of 10000 draws; the seed is fixed.
    assert dropped.mean() == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / 10000))


def test_dropout_rescales_kept_elements(sibling):
    """At a rate of 0.75, dropout turns ones into 0 or 4."""
    values = apply_dropout(sibling, np.ones((1, 1, 100, 100), np.float32), 0.75)
    assert np.unique(values).tolist() == [0.0, 4.0]


@sample(jax=1)
@both_forms
def test_dropout_preserves_expected_context(sibling, form):
    """With a dropout of 0.5, the mean context of values of 1 is 1 within
    five standard deviations.
    """
    shape = (1, 4, 64, 16)
    query, key, value = (
        np.zeros(shape, np.float32),
        np.zeros(shape, np.float32),
        np.ones(shape, np.float32),
    )
    seeded = {"dropout_rng": jax.random.key(0)} if sibling.name == "jax" else {}
    torch.manual_seed(0)

    context = dot_product_attention(sibling, form, query, key, value, dropout=0.5, **seeded)

    # 4 * 64 rows of 64 draws, each 0 or 2 with a standard deviation of 1; five of the mean's.
    assert context.mean() == pytest.approx(1.0, abs=5 / math.sqrt(4 * 64 * 64))


def test_output_dropout_doubles_kept_outputs(sibling):
    """An output dropout of 0.5 replaces each output by 0 or doubles it."""
    spec = parity.AttentionSpec(8, 2, output_dropout=0.5)
    query = sibling.array(problem(SPEC)["query"])
    dropped = sibling.numpy(filled(sibling, "MultiHeadAttention", spec)(query)[0])
    whole = sibling.numpy(filled(sibling, "MultiHeadAttention", SPEC)(query)[0])
    assert dropped.shape == whole.shape
    assert np.array_equal(dropped, np.where(dropped == 0.0, 0.0, 2 * whole))


def test_output_dropout_drops_some_outputs(sibling):
    """In training, an output dropout of 0.5 drops some outputs, but not all."""
    spec = parity.AttentionSpec(8, 2, output_dropout=0.5)
    query = sibling.array(problem(SPEC)["query"])
    dropped = sibling.numpy(filled(sibling, "MultiHeadAttention", spec)(query)[0]) == 0.0
    assert 0 < dropped.sum() < dropped.size


# ---- Memory layouts ------------------------------------------------------------------------------


def reversed_in_memory(x):
    """Return the same array with its axes in reverse order in memory."""
    return np.asarray(x, order="F")


@sample(jax=1)
@every_path
def test_memory_order_changes_only_rounding(sibling, path):
    """Weights, inputs and a mask in Fortran order change the output by at most 8 epsilons."""
    arrays = problem(SPEC)
    strided = {name: reversed_in_memory(x) for name, x in arrays.items()}

    output = attended(sibling, path, SPEC, strided, mask=reversed_in_memory(MASK))

    # Products with different strides may sum their 8 terms in a different order.
    assert np.abs(output - attended(sibling, path, SPEC, arrays, mask=MASK)).max() <= 8 * EPSILON


@both_forms
def test_torch_accepts_strided_tensors(form):
    """Expanded and sliced tensors give the context of contiguous copies, within 4 epsilons."""
    attend = attention_in(form, mha_torch)
    one = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    sliced = torch.zeros(5, 2, 3, 8)[::2, :, :, ::2].copy_(one)

    context, _ = attend(one.expand(3, 2, 3, 4), sliced, sliced)

    expected, _ = attend(*3 * [one.repeat(3, 1, 1, 1)])
    assert (context - expected).abs().max() <= 4 * EPSILON  # 4 terms in a different order


# ---- Configuration -------------------------------------------------------------------------------


@sample(jax=1)
@pytest.mark.parametrize(
    "kind", ["MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache"]
)
def test_repr_shows_the_configuration(sibling, kind):
    """The `repr` of a module begins with its class and contains its
    specification without default fields.
    """
    spec = parity.AttentionSpec(
        16, 4, num_kv_heads=2, head_dim=6, d_in=5, qkv_bias=False, rope=Rope(500.0), dropout=0.1
    )
    text = repr(sibling.module(kind, spec))
    shown = (
        "num_kv_heads=2, head_dim=6, d_in=5, qkv_bias=False, rope=Rope(theta=500.0), dropout=0.1"
    )
    assert text.startswith(kind)
    assert f"AttentionSpec(16, 4, {shown})" in text


# ---- Gradients -----------------------------------------------------------------------------------


GROUPED_CROSS = parity.AttentionSpec(8, 4, num_kv_heads=2, head_dim=3, d_in=5, d_kv=7)


@pytest.fixture
def float64_in_jax():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("float64_in_jax")
def test_jax_gradients_match_differences():
    """In float64, gradients in JAX match central differences within
    1e-8, with a bias and a mask.
    """
    arrays = {
        name: jnp.asarray(x)
        for name, x in {**problem(GROUPED_CROSS, np.float64), "bias": np.ones((3, 4))}.items()
    }

    def output(arrays):
        weights = parameter_tree({name: x for name, x in arrays.items() if "." in name})
        options = {"bias": arrays["bias"], "mask": jnp.asarray(MASK)}
        return mha_jax.multi_head_attention(
            arrays["query"], weights, GROUPED_CROSS, arrays["key"], **options
        )[0]

    # Central differences of step 1e-5 are off by about step**2 and by epsilon / step: 1e-10 and
    # 2e-11.
    jax.test_util.check_grads(
        jax.jit(output), (arrays,), order=1, modes=["rev"], eps=1e-5, atol=1e-8, rtol=1e-8
    )


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])
def test_torch_gradients_match_differences(need_weights):
    """In float64, gradients in PyTorch match central differences within 1e-8, plain and
    fused, with a bias and a mask.
    """
    arrays = {
        name: torch.from_numpy(x)
        for name, x in {**problem(GROUPED_CROSS, np.float64), "bias": np.ones((3, 4))}.items()
    }

    def output(*leaves):
        named = dict(zip(arrays, leaves, strict=True))
        weights = {name: x for name, x in named.items() if "." in name}
        options = {"bias": named["bias"], "mask": torch.from_numpy(MASK)}
        options["need_weights"] = need_weights
        return mha_torch.multi_head_attention(
            named["query"], weights, GROUPED_CROSS, named["key"], **options
        )[0]

    # The step and the tolerance of JAX's test above.
    leaves = [x.requires_grad_() for x in arrays.values()]
    assert torch.autograd.gradcheck(output, leaves, eps=1e-5, atol=1e-8, rtol=1e-8, fast_mode=True)


# ---- JAX: functions first ------------------------------------------------------------------------


@pytest.fixture
def jax_layer():
    """Return a layer as a function of arrays, and its arrays."""

    def layer(arrays):
        weights = parameter_tree({name: x for name, x in arrays.items() if "." in name})
        return mha_jax.multi_head_attention(
            arrays["query"], weights, SPEC, arrays["key"], mask=jnp.asarray(MASK), need_weights=True
        )

    return layer, {name: jnp.asarray(x) for name, x in problem(SPEC).items()}


def test_jax_layer_under_jit(jax_layer):
    """Output and attention weights under `jax.jit` match the eager ones within 8 epsilons."""
    layer, arrays = jax_layer
    jitted, eager = jax.jit(layer)(arrays), layer(arrays)
    # Sums of up to 8 products of order 1, which the compiler may reorder.
    assert all(np.abs(a - b).max() <= 8 * EPSILON for a, b in zip(jitted, eager, strict=True))


def test_jax_layer_maps_over_inputs(jax_layer):
    """`jax.vmap` over queries matches separate calls within 8 epsilons."""
    layer, arrays = jax_layer
    queries = jnp.stack([arrays["query"], 2 * arrays["query"], -arrays["query"]])

    mapped = jax.vmap(lambda query: layer({**arrays, "query": query})[0])(queries)

    single = jnp.stack([layer({**arrays, "query": query})[0] for query in queries])
    assert np.abs(mapped - single).max() <= 8 * EPSILON  # as above


def test_jax_layer_maps_over_weights(jax_layer):
    """`jax.vmap` over the weight of the value projection matches
    separate calls within 8 epsilons.
    """
    layer, arrays = jax_layer
    kernels = jnp.stack([arrays["v_proj.weight"], -arrays["v_proj.weight"]])

    mapped = jax.vmap(lambda kernel: layer({**arrays, "v_proj.weight": kernel})[0])(kernels)

    single = jnp.stack([layer({**arrays, "v_proj.weight": kernel})[0] for kernel in kernels])
    assert np.abs(mapped - single).max() <= 8 * EPSILON  # as above


def test_jax_layer_is_traced_once(jax_layer):
    """A second call with a query of the same shape does not trace the layer again."""
    layer, arrays = jax_layer
    traces = []

    @jax.jit
    def counted(arrays):
        traces.append(1)
        return layer(arrays)[0]

    counted(arrays)
    counted({**arrays, "query": 2 * arrays["query"]})

    assert len(traces) == 1


@pytest.mark.parametrize("spec", [SPEC, DROPPING], ids=["plain", "dropout"])
@only_jax
def test_jax_module_under_nnx_jit(sibling, spec):
    """A module under `nnx.jit` matches the eager module within 16 epsilons, also with dropout."""
    query = jnp.asarray(problem(SPEC)["query"])
    eager, jitted = (filled(sibling, "MultiHeadAttention", spec) for _ in range(2))

    output = nnx.jit(lambda module, query: module(query)[0])(jitted, query)

    assert (
        np.abs(output - eager(query)[0]).max() <= 2 * 8 * EPSILON
    )  # as above, and doubled by the dropout


@only_jax
def test_jax_jitted_dropout_varies_by_call(sibling):
    """Two calls of a compiled module with dropout on the same query differ."""
    query = jnp.asarray(problem(SPEC)["query"])
    module = filled(sibling, "MultiHeadAttention", DROPPING)
    call = nnx.jit(lambda module, query: module(query)[0])
    assert not np.array_equal(call(module, query), call(module, query))


def test_jax_dropout_needs_a_random_key():
    """Dropout without `dropout_rng` raises an error."""
    query = jnp.ones((1, 1, 2, 4))
    with rejects("dropout", dropout=0.5, dropout_rng=None):
        mha_jax.scaled_dot_product_attention(query, query, query, dropout=0.5)


@pytest.mark.parametrize("spec", [SPEC, DROPPING], ids=["plain", "dropout"])
@only_jax
def test_jax_module_parameter_tree(sibling, spec):
    """The parameters of a module, with and without dropout, are the kernels and
    biases of four projections.
    """
    module = sibling.module("MultiHeadAttention", spec)
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(module, nnx.Param))) == {
        "q_proj": {"kernel": (8, 8), "bias": (8,)},
        "k_proj": {"kernel": (8, 8), "bias": (8,)},
        "v_proj": {"kernel": (8, 8), "bias": (8,)},
        "out_proj": {"kernel": (8, 8), "bias": (8,)},
    }


@pytest.mark.parametrize(
    "as_function_takes_them", [nnx.to_pure_dict, lambda state: state], ids=["dict", "state"]
)
@only_jax
def test_jax_function_accepts_module_state(sibling, as_function_takes_them):
    """The function accepts the parameters of a module as a dict and as an nnx
    state, and matches the module.
    """
    module = filled(sibling, "MultiHeadAttention", SPEC)
    query = jnp.asarray(problem(SPEC)["query"])

    output, _ = mha_jax.multi_head_attention(
        query, as_function_takes_them(nnx.state(module, nnx.Param)), SPEC
    )

    assert (
        np.abs(output - module(query)[0]).max() <= 8 * EPSILON
    )  # sums of 8 products, maybe in a different order


def test_jax_function_accepts_linen_params():
    """The function accepts parameters of `flax.linen.Dense`, and matches these layers around
    attention.
    """
    query = jnp.asarray(problem(SPEC)["query"])
    dense = flax.linen.Dense(8)
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    params = {name: dense.init(jax.random.key(i), query)["params"] for i, name in enumerate(names)}

    output, _ = mha_jax.multi_head_attention(query, params, SPEC)

    def project(name: str, x: jax.Array) -> Any:
        return dense.apply({"params": params[name]}, x)

    q, k, v = (mha_jax.split_heads(project(name, query), 2) for name in names[:3])
    context, _ = mha_jax.scaled_dot_product_attention(q, k, v)
    assert (
        np.abs(output - project("out_proj", mha_jax.combine_heads(context))).max() <= 8 * EPSILON
    )  # as above


# ---- torch: a module like any other --------------------------------------------------------------


@only_torch
def test_torch_state_dict_canonical_names(sibling):
    """A state dict has the canonical names: weight and bias of the four projections."""
    assert sorted(sibling.module("MultiHeadAttention", AttentionSpec(8, 2)).state_dict()) == [
        "k_proj.bias",
        "k_proj.weight",
        "out_proj.bias",
        "out_proj.weight",
        "q_proj.bias",
        "q_proj.weight",
        "v_proj.bias",
        "v_proj.weight",
    ]


@only_torch
def test_torch_state_dict_holds_the_weights(sibling):
    """The arrays of a state dict equal the arrays of `parity.weights_of`, bit for bit."""
    module = filled(sibling, "MultiHeadAttention", SPEC)
    weights = parity.weights_of(module)
    assert [
        name
        for name, x in module.state_dict().items()
        if not np.array_equal(x.numpy(), weights[name])
    ] == []


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])
@only_torch
def test_torch_hooks_on_a_projection_fire(sibling, name, need_weights):
    """A forward hook on a projection is called once per call of the module, plain and fused."""
    module = sibling.module("MultiHeadAttention", AttentionSpec(8, 2))
    calls = []
    getattr(module, name).register_forward_hook(lambda *_: calls.append(name))

    module(torch.ones(1, 2, 8), need_weights=need_weights)

    assert calls == [name]


@only_torch
def test_torch_projection_can_be_replaced(sibling):
    """A module uses an output projection that replaced its own: the output has 3 features."""
    module = sibling.module("MultiHeadAttention", AttentionSpec(8, 2))
    module.out_proj = torch.nn.Linear(8, 3)
    assert module(torch.ones(1, 2, 8))[0].shape == (1, 2, 3)


@only_torch
def test_torch_module_can_be_copied(sibling):
    """The output of a deep copy equals the module's, bit for bit."""
    module = sibling.module("MultiHeadAttention", AttentionSpec(8, 2, rope=Rope(100.0)))
    x = torch.ones(1, 2, 8)
    assert torch.equal(copy.deepcopy(module)(x)[0], module(x)[0])


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])
@only_torch
def test_torch_module_compiles_to_one_graph(sibling, need_weights):
    """`torch.compile` with `fullgraph=True` accepts a module with a mask; the
    output is equal bit for bit.
    """
    module = filled(sibling, "MultiHeadAttention", SPEC)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    query, key, mask = (
        *(torch.from_numpy(problem(SPEC)[name]) for name in ("query", "key")),
        torch.from_numpy(MASK),
    )

    output, _ = compiled(query, key, mask=mask, need_weights=need_weights)

    assert torch.equal(output, module(query, key, mask=mask, need_weights=need_weights)[0])


@only_torch
def test_torch_self_attention_compiles(sibling):
    """`torch.compile` with `fullgraph=True` accepts causal self-attention with lengths as a tensor;
    the output is equal bit for bit.
    """
    module = sibling.module("MultiHeadSelfAttention", AttentionSpec(8, 2, rope=Rope(100.0)))
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    x, lengths = torch.from_numpy(problem(SPEC)["query"]), torch.tensor([2, 3])

    output = compiled(x, is_causal=True, key_padding_lengths=lengths)

    assert torch.equal(output, module(x, is_causal=True, key_padding_lengths=lengths))


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])
@pytest.mark.parametrize("option", ["mask", "bias"])
@only_torch
def test_torch_module_runs_under_autocast(sibling, option, need_weights):
    """Under autocast to bfloat16, a float32 module with a mask or bias of zeros is off by at
    most 5 epsilons of bfloat16.
    """
    module = filled(sibling, "MultiHeadAttention", SPEC)
    query = torch.from_numpy(problem(SPEC)["query"])
    options = {"mask": torch.zeros(3, 3, dtype=torch.bool), "bias": torch.zeros(3, 3)}

    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = module(query, **{option: options[option]}, need_weights=need_weights)

    # bfloat16 rounds input, weights, projections, context and output, each to half an epsilon of
    # values of order 1.
    assert (output - module(query)[0]).abs().max() <= 5 * torch.finfo(torch.bfloat16).eps
