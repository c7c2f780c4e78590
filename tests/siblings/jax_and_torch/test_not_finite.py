"""NaN and infinity: rows that attend to one are not finite, and all other rows are unchanged, bit for bit.

Masks, causality and lengths alone decide which rows attend to a key, never scores.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.samples import sample

import mha_jax
import mha_torch
from mha_jax.kernels.fused import FusedAttention
from mha_spec import AttentionSpec, Gate, Rope
from parity import random_weights

NUM_QUERIES, NUM_KEYS = 29, 41  # with blocks of 16, the last of each are smaller
NAN_KEY, NAN_VALUE = 13, 20
EMPTY_ROWS = [5, 17]
UNFILLED = 60

PATHS = {"jax": ["plain", "weights", "fused", "blocks"], "torch": ["plain", "weights", "fused"]}


def random_mask():
    mask = np.random.default_rng(1).random((3, 4, NUM_QUERIES, NUM_KEYS)) < 0.5
    mask[:, :, EMPTY_ROWS] = True
    return mask


def whole_keys():
    mask = np.zeros((3, 1, 1, NUM_KEYS), bool)
    mask[0, ..., NAN_KEY:] = mask[1, ..., :30] = True
    return mask


def causal():
    return np.arange(NUM_KEYS) > np.arange(NUM_QUERIES)[:, None]


# Options of the functions that hide keys.
KINDS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "causal-mask": {"mask": causal()},
    "padding": {"key_padding_lengths": np.array([NAN_VALUE, 0, NUM_KEYS], np.int32)},
    "padding-causal": {"key_padding_lengths": np.array([NAN_VALUE, 5, NUM_KEYS], np.int32), "is_causal": True},
    "whole-keys": {"mask": whole_keys()},
    "any-mask": {"mask": random_mask()},
    "bias": {"bias": np.where(random_mask()[:1], -np.inf, 0.5).astype(np.float32)},
}


def hidden_by(mask=False, bias=0.0, is_causal=False, key_padding_lengths=None):
    """Return which keys are hidden, (B, N, T, S), by the definitions."""
    hidden = np.zeros((3, 4, NUM_QUERIES, NUM_KEYS), bool) | mask | np.isneginf(bias)
    if key_padding_lengths is not None:
        hidden |= np.arange(NUM_KEYS) >= key_padding_lengths[:, None, None, None]
    return hidden | causal() if is_causal else hidden


@functools.cache
def heads(dtype="float32"):
    """Return split heads, with query heads in groups of two."""
    rng = np.random.default_rng(0)
    shapes = {"query": (3, 4, NUM_QUERIES, 8), "key": (3, 2, NUM_KEYS, 8), "value": (3, 2, NUM_KEYS, 8)}
    return {name: rng.standard_normal(shape).astype(jnp.dtype(dtype)) for name, shape in shapes.items()}


def spoilt_heads(bad, dtype="float32"):
    """Return the same heads with a bad feature in a key of one head, a value of another and two queries of a third."""
    arrays = {name: x.copy() for name, x in heads(dtype).items()}
    arrays["key"][0, 1, NAN_KEY, 3] = np.nan  # an infinite key may have a score of -inf, and thus a weight of 0
    arrays["value"][1, 0, NAN_VALUE, 5] = bad
    arrays["query"][2, 3, [2, EMPTY_ROWS[0]], 1] = bad
    return arrays


def sees_bad(hidden):
    """Return the rows (B, N, T) that have a bad query or attend to a bad key or value, by the definitions."""
    bad_keys = np.zeros((3, 4, 1, NUM_KEYS), bool)
    bad_keys[0, 2:, :, NAN_KEY] = bad_keys[1, :2, :, NAN_VALUE] = True
    found = (~hidden & bad_keys).any(axis=-1)
    found[2, 3, [2, EMPTY_ROWS[0]]] = ~hidden[2, 3, [2, EMPTY_ROWS[0]]].all(axis=-1)
    return found


IN_BLOCKS = {"kernel": FusedAttention(few_scores=0, queries=16, keys=16, last_keys=4)}  # as with many scores

every_path = pytest.mark.parametrize(
    ("sibling", "path"), [(name, path) for name, paths in PATHS.items() for path in paths], indirect=["sibling"]
)


@pytest.fixture
def attend(sibling, path):
    """Return a path as a function from NumPy arrays to the context and the attention weights, if it has them."""
    package = sibling.package.fused if path in ("fused", "blocks") else sibling.package
    options = {"weights": {"need_weights": True}, "blocks": IN_BLOCKS}.get(path, {})

    def run(query, key, value, **hidden):
        arrays = {name: sibling.array(x) if isinstance(x, np.ndarray) else x for name, x in hidden.items()}
        if "bias" in arrays:
            arrays["bias"] = sibling.array(hidden["bias"].astype(query.dtype))
        inputs = map(sibling.array, (query, key, value))
        context, attn_weights = package.scaled_dot_product_attention(*inputs, **arrays, **options)
        return sibling.numpy(context), None if attn_weights is None else sibling.numpy(attn_weights)

    return run


def assert_rows(found, expected, bad_rows):
    assert bad_rows.any()
    assert not bad_rows.all()
    assert not np.isfinite(found[bad_rows].astype(np.float32)).all(axis=-1).any(), "swallowed"
    np.testing.assert_array_equal(found[~bad_rows], expected[~bad_rows], "leaked")


@sample(12, jax=1)
@every_path
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_values_stay_in_rows(attend, kind, bad):
    """Rows that attend to a NaN or infinity are not finite, all others are unchanged bit for bit,
    as are their attention weights, and rows without a key are 0.
    """
    hidden, keywords = hidden_by(**KINDS[kind]), KINDS[kind]
    expected, expected_weights = attend(**heads(), **keywords)
    found, weights = attend(**spoilt_heads(bad), **keywords)
    assert np.isfinite(expected).all()
    assert_rows(found, expected, sees_bad(hidden))
    assert not found[hidden.all(axis=-1)].any()
    if weights is not None:
        np.testing.assert_array_equal(weights[~sees_bad(hidden)], expected_weights[~sees_bad(hidden)])


@sample(jax=1)
@every_path
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["padding-causal", "any-mask"])
def test_half_precision_nan_stays_in_rows(attend, kind, dtype):
    """In half precision, rows that attend to a NaN are not finite, and all others
    are unchanged bit for bit.
    """
    expected, _ = attend(**heads(dtype), **KINDS[kind])
    found, _ = attend(**spoilt_heads(np.nan, dtype), **KINDS[kind])
    assert_rows(found, expected, sees_bad(hidden_by(**KINDS[kind])))


@sample(jax=1)
@every_path
@pytest.mark.parametrize("kind", ["causal", "padding-causal", "any-mask"])
def test_row_of_infinite_scores_is_nan(attend, kind):
    """A row with visible keys whose scores all overflow to -inf is NaN, not
    0 like a row without keys.
    """
    arrays = {name: x.copy() for name, x in heads().items()}
    arrays["query"][0, 1, 4], arrays["key"][0, 0] = 1e30, -1e30
    hidden = hidden_by(**KINDS[kind])
    found, _ = attend(**arrays, **KINDS[kind])
    assert not hidden[0, 1, 4].all()
    assert np.isnan(found[0, 1, 4]).all()


@pytest.mark.parametrize("span", [{}, {"window_size": 6}], ids=["lengths", "window"])
def test_library_path_keeps_nan_in_its_rows(monkeypatch, span):
    """In JAX's own function, used off the CPU with lengths and windows, a NaN reaches
    only rows that attend to it, and changes no gradient of a sequence without such rows;
    rows without a key are 0.
    """
    monkeypatch.setattr(mha_jax.fused, "platform_of", lambda *arrays: "metal")  # has no kernel of its own
    hides = {**KINDS["padding"], "is_causal": True}
    hidden, spec = hidden_by(**hides), AttentionSpec(32, 4, num_kv_heads=2, **span)
    if span:
        hidden |= abs(np.arange(NUM_QUERIES)[:, None] - np.arange(NUM_KEYS)) >= 6

    @jax.jit
    def attend(arrays):
        context, pull_back = jax.vjp(
            lambda arrays: mha_jax.fused.scaled_dot_product_attention(**arrays, spec=spec, **hides)[0], arrays
        )
        return context, pull_back(jnp.ones_like(context))[0]

    expected, expected_gradients = jax.tree.map(np.asarray, attend(heads()))
    found, gradients = jax.tree.map(np.asarray, attend(spoilt_heads(np.nan)))
    assert np.isfinite(expected).all()
    bad_rows = sees_bad(hidden)
    assert_rows(found, expected, bad_rows)
    empty = hidden.all(axis=-1)
    assert empty.any()
    assert not found[empty].any()
    assert not gradients["query"][empty].any()
    is_clean = ~bad_rows.any(axis=(1, 2))  # sequences in which no row attends to it
    assert is_clean.tolist() == [False, True, False]
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient[is_clean], expected_gradients[name][is_clean])


# ---- Modules ---------------------------------------------------------------------------------------------------------

LONG = 1200  # more scores than one kernel computes at once
HIDES = {
    "nothing": lambda sibling, seq_len: {},
    "causal": lambda sibling, seq_len: {"is_causal": True},
    "causal-mask": lambda sibling, seq_len: {"mask": sibling.package.create_causal_mask(seq_len)},
    "padding": lambda sibling, seq_len: {"key_padding_lengths": [seq_len]},
    "bias": lambda sibling, seq_len: {"bias": sibling.array(np.zeros((1, seq_len), np.float32))},
}


def tokens(seq_len, width=16):
    return np.random.default_rng(2).standard_normal((1, seq_len, width)).astype(np.float32)


def with_nan_weights(module, name="q_proj"):
    projection = getattr(module, name)
    if isinstance(projection, torch.nn.Module):
        torch.nn.init.constant_(projection.weight, np.nan)
    else:
        projection.kernel[...] = jnp.full_like(projection.kernel[...], jnp.nan)
    return module


@sample(jax=1)
@pytest.mark.parametrize("seq_len", [64, LONG])
@pytest.mark.parametrize("hides", HIDES)
def test_nan_weights_make_output_nan(sibling, hides, seq_len):
    """A module whose query projection is NaN has an output of NaN, with
    any mask, lengths or bias.
    """
    module = with_nan_weights(sibling.module("MultiHeadSelfAttention", AttentionSpec(16, 4, out_bias=False)))
    output = module(sibling.array(tokens(seq_len)), **HIDES[hides](sibling, seq_len))
    assert np.isnan(sibling.numpy(output)).all()


@sample(jax=0)
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_nan_weights_with_cache_give_nan(sibling, name):
    """With a cache, a NaN query, key or value projection makes the outputs of a
    prompt and of a step NaN.
    """
    module = with_nan_weights(sibling.module("MultiHeadAttentionWithCache", AttentionSpec(16, 4, out_bias=False)), name)
    output, cache = module(sibling.array(tokens(LONG)), module.init_cache(1, LONG + 8))
    assert np.isnan(sibling.numpy(output)).all()
    output, _ = module(sibling.array(tokens(1)), cache)
    assert np.isnan(sibling.numpy(output)).all()


@sample(jax=1)
@pytest.mark.parametrize("seq_len", [64, LONG])
def test_nan_token_affects_only_later_tokens(sibling, seq_len):
    """In causal self-attention, a NaN in token 40 makes the outputs from there on NaN and changes
    no earlier one, bit for bit.
    """
    module, x = sibling.module("MultiHeadSelfAttention", AttentionSpec(16, 4)), tokens(seq_len)
    expected = sibling.numpy(module(sibling.array(x), is_causal=True))
    x[:, 40, 2] = np.nan
    found = sibling.numpy(module(sibling.array(x), is_causal=True))
    np.testing.assert_array_equal(found[:, :40], expected[:, :40])
    assert np.isnan(found[:, 40:]).all()


@sample(jax=0)
@pytest.mark.parametrize("capacity", [UNFILLED, 700], ids=["small", "large"])
def test_nan_padding_leaves_cache_unchanged(sibling, capacity):
    """NaN in the padding of a prompt changes no bit of its output, of the
    next step, or of the cache.
    """
    module, x = sibling.module("MultiHeadAttentionWithCache", AttentionSpec(16, 4, rope=Rope(100.0))), tokens(9)
    x = np.concatenate([x, x])
    spoilt = x.copy()
    spoilt[0, 3:] = np.nan
    lengths, found = [3, 9], []
    for prompt in (x, spoilt):
        output, cache = module(
            sibling.array(prompt), module.init_cache(2, capacity), new_lengths=sibling.array(lengths)
        )
        step, cache = module(sibling.array(x[:, :1]), cache)
        found.append([sibling.numpy(part) for part in (output, step, cache.keys, cache.values)])
    assert np.isfinite(found[0][0]).all()
    for ours, expected in zip(found[1], found[0], strict=True):
        np.testing.assert_array_equal(ours, expected)


@sample(jax=1)
@pytest.mark.parametrize("new", [1, 3], ids=["step", "chunk"])
@pytest.mark.parametrize("capacity", [UNFILLED, 700], ids=["small", "large"])
def test_nan_in_unfilled_slots_has_no_effect(sibling, capacity, new):
    """NaN in the slots after the tokens of a sequence changes no bit of the
    output of a step or chunk.
    """
    module, x = sibling.module("MultiHeadAttentionWithCache", AttentionSpec(16, 4)), np.concatenate([tokens(9)] * 2)
    found = []
    for bad in (0.0, np.nan):
        _, cache = module(sibling.array(x), module.init_cache(2, capacity), new_lengths=sibling.array([4, 9]))
        keys, values = (sibling.numpy(part).copy() for part in (cache.keys, cache.values))
        for part in (keys, values):
            part[0, :, 4 + new :] = part[1, :, 9 + new :] = bad
        cache = type(cache)(sibling.array(keys), sibling.array(values), cache.lengths)
        found.append(sibling.numpy(module(sibling.array(x[:, :new]), cache)[0]))
    assert np.isfinite(found[0]).all()
    np.testing.assert_array_equal(found[1], found[0])


@sample(jax=1)
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("capacity", [UNFILLED, 700], ids=["small", "large"])
def test_nan_in_cache_stays_in_its_sequence(sibling, capacity, part):
    """NaN in a cached key or value makes the next output of its sequence NaN, and
    changes no bit of another.
    """
    module, x = sibling.module("MultiHeadAttentionWithCache", AttentionSpec(16, 4)), np.concatenate([tokens(9)] * 2)
    found = []
    for bad in (False, True):
        _, cache = module(sibling.array(x), module.init_cache(2, capacity))
        parts = {name: sibling.numpy(getattr(cache, name)).copy() for name in ("keys", "values")}
        if bad:
            parts[part][0, :, 4] = np.nan
        cache = type(cache)(*map(sibling.array, parts.values()), cache.lengths)
        found.append(sibling.numpy(module(sibling.array(x[:, :1]), cache)[0]))
    assert np.isnan(found[1][0]).all()
    np.testing.assert_array_equal(found[1][1], found[0][1])


def test_nan_token_in_growing_cache(sibling):
    """With a growing cache, a NaN in token 5 makes the outputs from there on NaN and changes no
    earlier one, bit for bit.
    """
    layer = sibling.module("MultiHeadSelfAttention", AttentionSpec(16, 4))
    weights = layer.state_dict() if sibling.name == "torch" else nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    x = tokens(8)
    spoilt = x.copy()
    spoilt[:, 5, 1] = np.nan
    found = []
    for prompt in (x, spoilt):
        parts, grown = [], (None, None)
        for begin, end in ((0, 6), (6, 8)):
            output, *grown = sibling.package.multi_head_attention_with_cache(
                sibling.array(prompt[:, begin:end]), weights, layer.spec, *grown
            )
            parts.append(sibling.numpy(output.detach() if sibling.name == "torch" else output))
        found.append(np.concatenate(parts, axis=1))
    np.testing.assert_array_equal(found[1][:, :5], found[0][:, :5])
    assert np.isnan(found[1][:, 5:]).all()


# ---- Gradients -------------------------------------------------------------------------------------------------------


def gradients_of(sibling, function, arrays, cotangent):
    """Return the gradient of sum(context * cotangent) with respect to each array."""
    if sibling.name == "jax":
        _, pull_back = jax.vjp(lambda arrays: function(**arrays), {name: jnp.asarray(x) for name, x in arrays.items()})
        return {name: np.asarray(x) for name, x in pull_back(jnp.asarray(cotangent))[0].items()}
    leaves = {name: torch.from_numpy(x.copy()).requires_grad_() for name, x in arrays.items()}
    found = torch.autograd.grad(function(**leaves), list(leaves.values()), torch.from_numpy(cotangent))
    return {name: x.numpy() for name, x in zip(leaves, found, strict=True)}


@sample(jax=1)
@every_path
@pytest.mark.parametrize("kind", ["padding", "whole-keys"])
def test_hidden_nan_keys_keep_gradients(sibling, path, kind):
    """NaN in keys and values hidden from all queries changes no bit of the gradients compared with
    zeros; their own gradients are 0.
    """
    package = sibling.package.fused if path in ("fused", "blocks") else sibling.package
    unseen = np.broadcast_to(hidden_by(**KINDS[kind]).all(axis=(1, 2))[:, None], (3, 2, NUM_KEYS))
    spoilt = {name: x.copy() for name, x in heads().items()}
    emptied = {name: x.copy() for name, x in heads().items()}
    for side in ("key", "value"):
        spoilt[side][unseen], emptied[side][unseen] = np.nan, 0.0
    hides = {name: sibling.array(x) for name, x in KINDS[kind].items()}

    hides |= IN_BLOCKS if path == "blocks" else {}

    def function(**arrays):
        return package.scaled_dot_product_attention(**arrays, **hides)[0]

    cotangent = np.random.default_rng(3).standard_normal(heads()["query"].shape).astype(np.float32)
    expected, found = (gradients_of(sibling, function, each, cotangent) for each in (emptied, spoilt))
    for name, gradient in found.items():
        np.testing.assert_array_equal(gradient, expected[name])
        assert np.isfinite(gradient).all()
    assert not found["key"][unseen].any()
    assert not found["value"][unseen].any()


@sample(jax=0)
@pytest.mark.parametrize("gate", [None, Gate(), Gate(per_head=True, bias=True)], ids=["no-gate", "gate", "per-head"])
def test_nan_padding_leaves_layer_gradients(sibling, gate):
    """NaN in the padding of a layer's input leaves all gradients as they are with zeros, and those
    of the padding are 0, if no gradient flows into the outputs at the padding, as in training.
    """
    spec, lengths = AttentionSpec(16, 4, num_kv_heads=2, gate=gate, rope=Rope(100.0)), [3, 9]
    weights = {name: x.astype(np.float32) for name, x in random_weights(spec).items()}
    x, is_real = np.concatenate([tokens(9)] * 2), np.arange(9) < np.array(lengths)[:, None]

    def function(x, **weights):
        package = sibling.package
        if sibling.name == "jax":
            parts = {name.partition(".")[0] for name in weights}
            weights = {
                part: {"kernel": weights[f"{part}.weight"].T}
                | ({"bias": weights[f"{part}.bias"]} if f"{part}.bias" in weights else {})
                for part in parts
            }
        return package.multi_head_attention(x, weights, spec, key_padding_lengths=sibling.array(lengths))[0]

    cotangent = np.random.default_rng(3).standard_normal((2, 9, 16)).astype(np.float32) * is_real[..., None]
    expected, found = (
        gradients_of(
            sibling, function, {"x": np.where(is_real[..., None], x, bad).astype(np.float32)} | weights, cotangent
        )
        for bad in (0.0, np.nan)
    )
    assert set(found) == {"x", *weights}
    for name, gradient in found.items():
        assert np.isfinite(gradient).all(), name
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-6)
    assert not found["x"][~is_real].any()


def test_sinks_and_non_finite_inputs(sibling):
    """With sinks, rows without a key are 0, and exactly the rows that attend to a NaN, or
    have a NaN query, are NaN.
    """
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, 9, 8)).astype(np.float32) for _ in range(3))
    q[:, :, 3] = k[1, 0, 5] = np.nan
    hidden = {
        "is_causal": True,
        "key_padding_lengths": [0, 9],
        "sinks": sibling.array(np.array([0.5, -1.0], np.float32)),
    }
    small = {"kernel": FusedAttention(few_scores=0, queries=8, keys=8)} if sibling.name == "jax" else {}
    heads = [sibling.array(x) for x in (q, k, v)]
    plain, _ = sibling.package.stages.scaled_dot_product_attention(*heads, **hidden)
    fused, _ = sibling.package.fused.scaled_dot_product_attention(*heads, **hidden, **small)
    for context in map(sibling.numpy, (plain, fused)):
        assert not context[0].any()
        is_nan = np.isnan(context[1]).all(axis=-1)
        assert is_nan[0].tolist() == [False, False, False, True, False, True, True, True, True]
        assert np.flatnonzero(is_nan[1]).tolist() == [3]


def test_torch_overflowing_scores_give_nan():
    """In PyTorch, visible keys whose scores of -2^128 overflow to -inf make the context NaN,
    with and without gradients.
    """
    # In PyTorch's kernel on a CPU, a row whose scores are all -inf is 0.
    query, key = torch.full((1, 1, 1, 16), 2.0**62), torch.full((1, 1, 3, 16), -(2.0**62))
    value = torch.ones(1, 1, 3, 16)
    for needs_gradient in (False, True):
        context, _ = mha_torch.fused.scaled_dot_product_attention(
            query.clone().requires_grad_(needs_gradient), key, value, AttentionSpec(16, 1, scale=1.0)
        )
        assert context.isnan().all()


def test_torch_nan_token_finite_gradients():
    """In PyTorch with a growing cache, a NaN in the last token leaves the weights' gradients finite
    if the loss excludes its output.
    """
    spec = AttentionSpec(8, 2)
    layer = mha_torch.MultiHeadAttention(spec)
    weights, x = dict(layer.named_parameters()), torch.randn(1, 4, 8)
    x[:, 3] = torch.nan
    output, *_ = mha_torch.multi_head_attention_with_cache(x, weights, spec)
    output[:, :3].sum().backward()
    assert all(weight.grad.isfinite().all() for weight in weights.values())


def test_torch_infinite_key_makes_rows_nan():
    """In PyTorch, an infinite key with a score of -inf makes the rows that attend to it NaN,
    with and without gradients.
    """
    query, key, value = torch.full((1, 1, 4, 8), -1.0), torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8)
    key[0, 0, 1, 3] = torch.inf  # a score of -inf
    for x in (query, query.clone().requires_grad_()):
        context, _ = mha_torch.fused.scaled_dot_product_attention(x, key, value, is_causal=True)
        assert context.isnan().any(dim=-1)[0, 0].tolist() == [False, True, True, True]


def test_torch_nan_token_with_dropout(monkeypatch):
    """In PyTorch with dropout, the kernel is called only once for a token of
    NaN, so dropout draws once.
    """
    calls, kernel = [], mha_torch.kernels.sdpa.attend
    monkeypatch.setattr(mha_torch.kernels.sdpa, "attend", lambda *args: calls.append(1) or kernel(*args))
    x = torch.randn(1, 2, 4, 8)
    x[0, 0, 2] = torch.nan
    with torch.no_grad():
        mha_torch.fused.scaled_dot_product_attention(x, x, x, dropout=0.5)
    assert len(calls) == 1


GATED = AttentionSpec(16, 2, window_size=2, gate=Gate())


@pytest.fixture
def looks(monkeypatch):
    """Record each read of a tensor's value, which on a GPU waits for its result."""
    found = []

    def noted(look):
        return lambda x: (found.append(x), look(x))[1]

    for name in ("tolist", "item", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, noted(getattr(torch.Tensor, name)))
    return found


def test_torch_call_reads_values_once(looks):
    """A call of a causal layer in PyTorch without gradients reads tensor values once."""
    layer, x = mha_torch.MultiHeadSelfAttention(GATED), torch.randn(2, 5, 16)
    with torch.no_grad():
        layer(x, is_causal=True)
    assert len(looks) == 1


def test_torch_plain_path_reads_values_twice(looks):
    """The plain path in PyTorch reads values twice: to check for NaN or infinity
    and for rows without a key.
    """
    x = torch.randn(2, 2, 5, 8)
    mha_torch.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert len(looks) == 2  # the second checks for rows without a key


def test_torch_cuda_graph_reads_no_values(monkeypatch, looks):
    """While a CUDA graph is captured (simulated), neither a call nor its gradient reads a value;
    the output is unchanged and the gradient of the input is finite.
    """
    layer, x = mha_torch.MultiHeadSelfAttention(GATED), torch.randn(2, 5, 16)
    x[1, 3, 0] = torch.nan
    x.requires_grad_()
    options = {"is_causal": True, "key_padding_lengths": torch.tensor([2, 5])}
    for options["bias"] in (None, torch.zeros(5, 5)):
        expected = layer(x, **options)
        with monkeypatch.context() as captured:
            captured.setattr(torch.cuda, "is_initialized", lambda: True)
            captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            looks.clear()
            output = layer(x, **options)
            output[0].sum().backward()
            assert not looks
        torch.testing.assert_close(output, expected, equal_nan=True)
        assert x.grad.isfinite().all()


def test_torch_non_finite_path_gradients(monkeypatch):
    """In PyTorch, assuming that inputs may not be finite, as on accelerators,
    changes no bit of a gradient.
    """
    layer = mha_torch.MultiHeadSelfAttention(AttentionSpec(16, 2))
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))

    def gradients():
        return torch.autograd.grad(layer(x, is_causal=True).sum(), [*layer.parameters()])

    expected = gradients()
    monkeypatch.setattr(mha_torch.kernels.nonfinite, "maybe_any", lambda _: True)
    assert all(map(torch.equal, gradients(), expected))
