"""NaN and infinity: in padding they reach no real token, and in contained kernels exactly the rows
that attend to them; all other rows are unchanged, bit for bit.

Masks, causality and lengths alone decide which rows attend to a key, never scores.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.heads import attention_in, fused_attention
from helpers.kernels import attend_with, contained
from helpers.samples import sample

import mha_jax
import mha_torch
from mha_jax.kernels.fused import FusedAttention
from mha_spec import AttentionSpec, Gate, Latent, Norm, Rope
from mha_spec.heads import BareHeads
from mha_spec.span import span_of
from parity import random_weights

NUM_QUERIES, NUM_KEYS = 29, 41  # with blocks of 16, the last of each are smaller
NAN_KEY, NAN_VALUE = 13, 20
EMPTY_ROWS = [5, 17]
UNFILLED = 60

IN_BLOCKS = FusedAttention(few_scores=0, queries=16, keys=16, last_keys=4)  # as with many scores


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
    "padding-causal": {
        "key_padding_lengths": np.array([NAN_VALUE, 5, NUM_KEYS], np.int32),
        "is_causal": True,
    },
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
    shapes = {
        "query": (3, 4, NUM_QUERIES, 8),
        "key": (3, 2, NUM_KEYS, 8),
        "value": (3, 2, NUM_KEYS, 8),
    }
    return {
        name: rng.standard_normal(shape).astype(jnp.dtype(dtype)) for name, shape in shapes.items()
    }


def spoilt_heads(bad, dtype="float32"):
    """Return the same heads with a bad feature in a key of one head, a value of another and two
    queries of a third.
    """
    arrays = {name: x.copy() for name, x in heads(dtype).items()}
    arrays["key"][0, 1, NAN_KEY, 3] = (
        np.nan
    )  # an infinite key may have a score of -inf, and thus a weight of 0
    arrays["value"][1, 0, NAN_VALUE, 5] = bad
    arrays["query"][2, 3, [2, EMPTY_ROWS[0]], 1] = bad
    return arrays


def sees_bad(hidden):
    """Return the rows (B, N, T) that have a bad query or attend to a bad key or value, by the
    definitions.
    """
    bad_keys = np.zeros((3, 4, 1, NUM_KEYS), bool)
    bad_keys[0, 2:, :, NAN_KEY] = bad_keys[1, :2, :, NAN_VALUE] = True
    sees = (~hidden & bad_keys).any(axis=-1)
    sees[2, 3, [2, EMPTY_ROWS[0]]] = ~hidden[2, 3, [2, EMPTY_ROWS[0]]].all(axis=-1)
    return sees


both_bad = pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])


def results_of(sibling, function, arrays, cotangent):
    """Return the result of a function of arrays, and the gradient of sum(result * cotangent) by
    array.
    """
    if sibling.name == "jax":

        @jax.jit
        def both(arrays):
            result, pull_back = jax.vjp(lambda arrays: function(**arrays), arrays)
            return result, pull_back(jnp.asarray(cotangent))[0]

        result, gradients = both({name: jnp.asarray(x) for name, x in arrays.items()})
        return np.asarray(result), {name: np.asarray(x) for name, x in gradients.items()}
    leaves = {name: torch.from_numpy(x.copy()).requires_grad_() for name, x in arrays.items()}
    result = function(**leaves)
    gradients = torch.autograd.grad(result, list(leaves.values()), torch.from_numpy(cotangent))
    return result.detach().numpy(), {
        name: x.numpy() for name, x in zip(leaves, gradients, strict=True)
    }


# ---- Padding -------------------------------------------------------------------------------------

PATHS = {"jax": ["plain", "weights", "fused", "blocks"], "torch": ["plain", "weights", "fused"]}


@sample(jax=3)
@pytest.mark.parametrize(
    ("sibling", "path"),
    [(name, path) for name, paths in PATHS.items() for path in paths],
    indirect=["sibling"],
)
@both_bad
@pytest.mark.parametrize("kind", ["padding", "padding-causal"])
def test_bad_padding_of_heads_reaches_no_row(sibling, path, kind, bad):
    """NaN or infinity in padded keys and values changes no bit of the context, or of the attention
    weights, and of the gradients, compared with zeros; their own gradients are 0.
    """
    attend = attention_in("fused" if path in ("fused", "blocks") else "plain", sibling.package)
    options = {"weights": {"need_weights": True}, "blocks": {"kernel": IN_BLOCKS}}.get(path, {})
    hides = {name: sibling.option(x) for name, x in KINDS[kind].items()}
    is_padding = np.arange(NUM_KEYS) >= KINDS[kind]["key_padding_lengths"][:, None]

    def function(**arrays):
        context, attn_weights = attend(**arrays, **hides, **options)
        return context if attn_weights is None else attn_weights

    shape = (3, 4, NUM_QUERIES, NUM_KEYS if path == "weights" else 8)
    cotangent = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    results = []
    for padding in (0.0, bad):
        arrays = {
            name: x.copy() for name, x in heads().items() if name != "value" or path != "weights"
        }
        for side in arrays.keys() - {"query"}:
            arrays[side].swapaxes(1, 2)[is_padding] = padding
        arrays_given = {} if path != "weights" else {"value": sibling.array(heads()["value"])}
        results.append(
            results_of(sibling, functools.partial(function, **arrays_given), arrays, cotangent)
        )
    (expected, expected_gradients), (actual, gradients) = results
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(actual, expected)
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all(), name
        np.testing.assert_array_equal(gradient, expected_gradients[name])
    for side in gradients.keys() - {"query"}:
        assert not gradients[side].swapaxes(1, 2)[is_padding].any()


LAYERS = {
    "plain": AttentionSpec(16, 4, num_kv_heads=2, rope=Rope(100.0)),
    "gate": AttentionSpec(16, 4, gate=Gate()),
    "gate-per-head": AttentionSpec(16, 4, gate=Gate(per_head=True, bias=True)),
    "window": AttentionSpec(16, 4, window_size=4),
    "norms": AttentionSpec(16, 4, qk_norm=Norm(), soft_cap=5.0),
    "latents": AttentionSpec(
        16, 4, rope=Rope(100.0, rotary_dim=2, rotated="last"), latent=Latent(kv_rank=6, rope_dim=2)
    ),
}


def parameters(sibling, weights):
    """Return weights by canonical name in the container of a function, so that their gradients can
    be taken.
    """
    if sibling.name == "torch":
        return weights
    tree = {}
    for name, x in weights.items():
        projection, leaf = name.split(".")
        is_kernel = projection.endswith("_proj") and leaf == "weight"
        tree.setdefault(projection, {})["kernel" if is_kernel else leaf] = x.T if is_kernel else x
    return tree


@sample(12, jax=3)
@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
@both_bad
@pytest.mark.parametrize("layer", LAYERS)
def test_bad_padding_reaches_no_real_token(sibling, layer, bad, need_weights):
    """NaN or infinity in the padding of a layer's input changes no bit of its output compared with
    zeros, nor of its gradients, if none flows into the outputs at the padding, as in training;
    gradients of the padding are 0.
    """
    spec, lengths = LAYERS[layer], [3, 9, 0]
    weights = {name: x.astype(np.float32) for name, x in random_weights(spec).items()}
    x, is_real = np.concatenate([tokens(9)] * 3), np.arange(9) < np.array(lengths)[:, None]

    def function(x, **weights):
        options = {"key_padding_lengths": sibling.array(lengths), "need_weights": need_weights}
        return sibling.package.multi_head_attention(
            x, parameters(sibling, weights), spec, **options
        )[0]

    cotangent = (
        np.random.default_rng(3).standard_normal((3, 9, 16)).astype(np.float32) * is_real[..., None]
    )
    (expected, expected_gradients), (actual, gradients) = (
        results_of(
            sibling,
            function,
            {"x": np.where(is_real[..., None], x, padding).astype(np.float32)} | weights,
            cotangent,
        )
        for padding in (0.0, bad)
    )
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(actual, expected)
    assert set(gradients) == {"x", *weights}
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all(), name
        np.testing.assert_array_equal(gradient, expected_gradients[name])
    assert not gradients["x"][~is_real].any()


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
def test_finite_padding_keeps_its_outputs(sibling, need_weights):
    """Outputs at finite padding are the outputs of its own queries over the real keys, as with a
    mask.
    """
    spec, lengths = AttentionSpec(16, 4), [3, 9]
    module, x = (
        sibling.module("MultiHeadAttention", spec),
        sibling.array(np.concatenate([tokens(9)] * 2)),
    )
    hidden = sibling.package.create_padding_mask(sibling.array(lengths), 9)
    output, _ = module(x, key_padding_lengths=lengths, need_weights=need_weights)
    expected, _ = module(x, mask=hidden, need_weights=need_weights)
    output, expected = (sibling.numpy(output) for output in (output, expected))
    sibling.assert_close(output, expected, within=4e-6)
    assert len({row.tobytes() for row in output[0].round(3)}) == 9  # each by its own query


def test_nan_of_a_separate_query_stays(sibling):
    """Lengths are lengths of keys: a NaN in a separate query makes its row NaN, as without lengths,
    and its keys and values have their own padding.
    """
    module = sibling.module("MultiHeadAttention", AttentionSpec(16, 4))
    query, key, value = np.concatenate([tokens(9)] * 3).reshape(3, 1, 9, 16)
    query[0, 7, 2], key[0, 3:], value[0, 3:] = np.nan, np.nan, np.inf
    output, _ = module(
        *map(sibling.array, (query, key, value)), key_padding_lengths=[3], need_weights=True
    )
    assert np.flatnonzero(np.isnan(sibling.numpy(output)[0]).any(axis=1)).tolist() == [7]


def test_padding_keeps_one_projection(sibling):
    """With padding, self-attention applies its joint projection once: query, key and value are
    still one array.
    """
    layer = sibling.module("MultiHeadSelfAttention", AttentionSpec(16, 4, fused_qkv=True))
    names, project = [], layer.project

    def noted(name, x):
        names.append(name)
        return project(name, x)

    layer.project = noted
    layer(sibling.array(tokens(9)), key_padding_lengths=[3])
    assert names == ["qkv_proj", "out_proj"]


def test_bad_padding_of_shared_keys(sibling):
    """With the keys and values of another layer, NaN in their padding reaches neither an output nor
    the gradient of the input.
    """
    spec = AttentionSpec(16, 4, shared_kv=True)
    module, rng = sibling.module("MultiHeadAttention", spec), np.random.default_rng(0)
    key, value = rng.standard_normal((2, 2, 4, 9, 4)).astype(np.float32)
    x, results = {"x": np.concatenate([tokens(9)] * 2)}, []
    for padding in (0.0, np.nan):
        key[0, :, 3:] = value[0, :, 3:] = padding
        keys, values = sibling.array(key), sibling.array(value)

        def function(x, keys=keys, values=values):
            return module(x, keys, values, key_padding_lengths=[3, 9])[0]

        results.append(results_of(sibling, function, x, np.ones((2, 9, 16), np.float32)))
    (expected, expected_gradients), (actual, gradients) = results
    assert np.isfinite(gradients["x"]).all()
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(gradients["x"], expected_gradients["x"])


@sample(jax=0)
@both_bad
@pytest.mark.parametrize("capacity", [UNFILLED, 700], ids=["small", "large"])
def test_bad_padding_leaves_cache_unchanged(sibling, capacity, bad):
    """NaN or infinity in the padding of a prompt changes no bit of its output, of the
    next step, or of the cache, which is finite.
    """
    module, x = (
        sibling.module("MultiHeadAttentionWithCache", AttentionSpec(16, 4, rope=Rope(100.0))),
        tokens(9),
    )
    x = np.concatenate([x, x])
    spoilt = x.copy()
    spoilt[0, 3:] = bad
    lengths, actual = [3, 9], []
    for prompt in (x, spoilt):
        output, cache = module(
            sibling.array(prompt),
            module.init_cache(2, capacity),
            new_lengths=sibling.array(lengths),
        )
        step, cache = module(sibling.array(x[:, :1]), cache)
        actual.append([sibling.numpy(part) for part in (output, step, cache.keys, cache.values)])
    assert all(np.isfinite(part).all() for part in actual[0])
    for ours, expected in zip(actual[1], actual[0], strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_bad_prompt_padding_keeps_gradients(sibling):
    """NaN in the padding of a prompt changes no bit of the gradients of weights through the prompt
    and a step.
    """
    spec = AttentionSpec(16, 4, num_kv_heads=2)
    weights = {name: x.astype(np.float32) for name, x in random_weights(spec).items()}
    x = np.concatenate([tokens(9)] * 2)

    def function(x, **weights):
        weights, cache = parameters(sibling, weights), sibling.package.init_cache(2, 2, 12, 4)
        call = sibling.package.multi_head_attention_with_cache
        prompt, cache = call(x, weights, spec, cache, new_lengths=sibling.array([3, 9]))
        step, _ = call(x[:, :1], weights, spec, cache)
        return prompt + step

    spoilt = x.copy()
    x[0, 3:], spoilt[0, 3:] = 0.0, np.nan
    cotangent = np.random.default_rng(3).standard_normal((2, 9, 16)).astype(np.float32)
    _, expected = results_of(sibling, function, {"x": x} | weights, cotangent)
    _, actual = results_of(sibling, function, {"x": spoilt} | weights, cotangent)
    for name, gradient in actual.items():
        assert np.isfinite(gradient).all(), name
        np.testing.assert_array_equal(gradient, expected[name])


def test_full_lengths_are_no_padding(sibling):
    """Lengths that are known to be full leave nothing to fill; unknown ones may."""
    find = {"jax": mha_jax.padding.find_padding, "torch": mha_torch.padding.find_padding}[
        sibling.name
    ]
    device = () if sibling.name == "jax" else (torch.device("cpu"),)
    for lengths in ([5, 5], np.array([5, 5]), sibling.array([5, 5])):
        mask, is_padding = find(
            sibling.package.masks.Mask(key_padding_lengths=lengths), 2, 5, *device
        )
        assert is_padding is None
        assert mask.key_padding_lengths == [5, 5]  # as floats
    _, is_padding = find(sibling.package.masks.Mask(key_padding_lengths=[5, 3]), 2, 5, *device)
    assert sibling.numpy(is_padding).tolist() == [[False] * 5, [False] * 3 + [True] * 2]
    assert find(sibling.package.masks.Mask(), 2, 5, *device)[1] is None


# ---- Contained kernels ---------------------------------------------------------------------------

KERNELS = {"jax": ["fused", "blocks"], "torch": ["fused"]}
every_kernel = pytest.mark.parametrize(
    ("sibling", "kernel"),
    [(name, kernel) for name, kernels in KERNELS.items() for kernel in kernels],
    indirect=["sibling"],
)


def kernel_of(sibling, kernel="fused"):
    return IN_BLOCKS if kernel == "blocks" else sibling.package.fused.attend


def contained_kernel(sibling, kernel="fused"):
    return contained[sibling.name](kernel_of(sibling, kernel))


@pytest.fixture
def attend_contained(sibling, kernel):
    """Return a contained kernel as a function from NumPy arrays to the context."""

    def run(query, key, value, **hides):
        hides = {name: sibling.option(x) for name, x in hides.items()}
        if "bias" in hides:
            hides["bias"] = sibling.array(sibling.numpy(hides["bias"]).astype(query.dtype))
        inputs = map(sibling.array, (query, key, value))
        return sibling.numpy(attend_with(contained_kernel(sibling, kernel), *inputs, **hides))

    return run


def assert_rows(actual, expected, bad_rows):
    assert bad_rows.any()
    assert not bad_rows.all()
    assert not np.isfinite(actual[bad_rows].astype(np.float32)).all(axis=-1).any(), "swallowed"
    np.testing.assert_array_equal(actual[~bad_rows], expected[~bad_rows], "leaked")


@sample(12, jax=1)
@every_kernel
@both_bad
@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_values_stay_in_rows(attend_contained, kind, bad):
    """Rows that attend to a NaN or infinity are not finite, all others are unchanged bit for bit,
    and rows without a key are 0.
    """
    hidden, keywords = hidden_by(**KINDS[kind]), KINDS[kind]
    expected, actual = (
        attend_contained(**heads(), **keywords),
        attend_contained(**spoilt_heads(bad), **keywords),
    )
    assert np.isfinite(expected).all()
    assert_rows(actual, expected, sees_bad(hidden))
    assert not actual[hidden.all(axis=-1)].any()


@sample(jax=2)
@every_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_contained_kernel_of_finite_inputs(sibling, kernel, kind):
    """A contained kernel of finite inputs has the context and the gradients of the kernel, bit for
    bit.
    """
    hides = {name: sibling.option(x) for name, x in KINDS[kind].items()}
    cotangent = np.random.default_rng(3).standard_normal(heads()["query"].shape).astype(np.float32)
    (expected, expected_gradients), (actual, gradients) = (
        results_of(sibling, functools.partial(attend_with, attend, **hides), heads(), cotangent)
        for attend in (kernel_of(sibling, kernel), contained_kernel(sibling, kernel))
    )
    np.testing.assert_array_equal(actual, expected)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, expected_gradients[name])


@sample(jax=1)
@every_kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["padding-causal", "any-mask"])
def test_half_precision_nan_stays_in_rows(attend_contained, kind, dtype):
    """In half precision, rows that attend to a NaN are not finite, and all others
    are unchanged bit for bit.
    """
    expected = attend_contained(**heads(dtype), **KINDS[kind])
    actual = attend_contained(**spoilt_heads(np.nan, dtype), **KINDS[kind])
    assert_rows(actual, expected, sees_bad(hidden_by(**KINDS[kind])))


@sample(jax=2)
@every_kernel
@pytest.mark.parametrize("kind", ["causal", "padding-causal", "any-mask"])
def test_row_of_infinite_scores_is_nan(attend_contained, kind):
    """A row with visible keys whose scores all overflow to -inf is NaN, not
    0 like a row without keys.
    """
    arrays = {name: x.copy() for name, x in heads().items()}
    arrays["query"][0, 1, 4], arrays["key"][0, 0] = 1e30, -1e30
    hidden = hidden_by(**KINDS[kind])
    actual = attend_contained(**arrays, **KINDS[kind])
    assert not hidden[0, 1, 4].all()
    assert np.isnan(actual[0, 1, 4]).all()


@sample(jax=2)
@every_kernel
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
def test_bias_that_is_not_finite(sibling, attend_contained, bad):
    """NaN or infinity in a bias makes its row NaN, and has no effect if its key is hidden."""
    bias = np.zeros((NUM_QUERIES, NUM_KEYS), np.float32)
    expected = attend_contained(**heads(), is_causal=True, bias=bias)
    bias[7, 3] = bias[4, 9] = bad  # the second is after its query
    actual = attend_contained(**heads(), is_causal=True, bias=bias)
    assert np.isnan(actual[:, :, 7]).all()
    np.testing.assert_array_equal(np.delete(actual, 7, axis=2), np.delete(expected, 7, axis=2))


@sample(jax=1)
@every_kernel
@pytest.mark.parametrize("kind", ["padding", "whole-keys"])
def test_hidden_nan_keys_keep_gradients(sibling, kernel, kind):
    """NaN in keys and values hidden from all queries changes no bit of the gradients compared with
    zeros; their own gradients are 0.
    """
    unseen = np.broadcast_to(hidden_by(**KINDS[kind]).all(axis=(1, 2))[:, None], (3, 2, NUM_KEYS))
    spoilt = {name: x.copy() for name, x in heads().items()}
    emptied = {name: x.copy() for name, x in heads().items()}
    for side in ("key", "value"):
        spoilt[side][unseen], emptied[side][unseen] = np.nan, 0.0
    hides = {name: sibling.option(x) for name, x in KINDS[kind].items()}
    function = functools.partial(attend_with, contained_kernel(sibling, kernel), **hides)
    cotangent = np.random.default_rng(3).standard_normal(heads()["query"].shape).astype(np.float32)
    (_, expected), (_, actual) = (
        results_of(sibling, function, inputs, cotangent) for inputs in (emptied, spoilt)
    )
    for name, gradient in actual.items():
        np.testing.assert_array_equal(gradient, expected[name])
        assert np.isfinite(gradient).all()
    assert not actual["key"][unseen].any()
    assert not actual["value"][unseen].any()


@pytest.mark.parametrize("span", [{}, {"window_size": 6}], ids=["lengths", "window"])
def test_library_path_keeps_nan_in_its_rows(monkeypatch, span):
    """In JAX's own function, contained, used off the CPU with lengths and windows, a NaN reaches
    only rows that attend to it, and changes no gradient of a sequence without such rows;
    rows without a key are 0.
    """
    monkeypatch.setattr(
        mha_jax.fused, "platform_of", lambda *arrays: "metal"
    )  # has no kernel of its own
    hides = {**KINDS["padding"], "is_causal": True}
    hidden, spec = hidden_by(**hides), AttentionSpec(32, 4, num_kv_heads=2, **span)
    if span:
        hidden |= abs(np.arange(NUM_QUERIES)[:, None] - np.arange(NUM_KEYS)) >= 6
    kernel = contained["jax"](mha_jax.fused.attend)

    @jax.jit
    def attend(arrays):
        function = fused_attention(mha_jax)
        context, pull_back = jax.vjp(
            lambda arrays: function(**arrays, spec=spec, kernel=kernel, **hides)[0], arrays
        )
        return context, pull_back(jnp.ones_like(context))[0]

    expected, expected_gradients = jax.tree.map(np.asarray, attend(heads()))
    actual, gradients = jax.tree.map(np.asarray, attend(spoilt_heads(np.nan)))
    assert np.isfinite(expected).all()
    bad_rows = sees_bad(hidden)
    assert_rows(actual, expected, bad_rows)
    empty = hidden.all(axis=-1)
    assert empty.any()
    assert not actual[empty].any()
    assert not gradients["query"][empty].any()
    is_clean = ~bad_rows.any(axis=(1, 2))  # sequences in which no row attends to it
    assert is_clean.tolist() == [False, True, False]
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient[is_clean], expected_gradients[name][is_clean])


def test_sinks_and_non_finite_inputs(sibling):
    """With sinks, rows without a key are 0, and exactly the rows that attend to a NaN, or
    have a NaN query, are NaN.
    """
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, 9, 8)).astype(np.float32) for _ in range(3))
    q[:, :, 3] = k[1, 0, 5] = np.nan
    hides = {
        "is_causal": True,
        "key_padding_lengths": [0, 9],
        "sinks": sibling.array(np.array([0.5, -1.0], np.float32)),
    }
    for name in KERNELS[sibling.name]:
        inputs = map(sibling.array, (q, k, v))
        context = sibling.numpy(attend_with(contained_kernel(sibling, name), *inputs, **hides))
        assert not context[0].any()
        is_nan = np.isnan(context[1]).all(axis=-1)
        assert is_nan[0].tolist() == [False, False, False, True, False, True, True, True, True]
        assert np.flatnonzero(is_nan[1]).tolist() == [3]


# ---- Layers with a contained kernel --------------------------------------------------------------

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


def contained_module(sibling, kind, spec):
    module = sibling.module(kind, spec)
    module.kernel = contained_kernel(sibling)
    return module


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
    """A contained module whose query projection is NaN has an output of NaN, with
    any mask, lengths or bias.
    """
    module = contained_module(
        sibling, "MultiHeadSelfAttention", AttentionSpec(16, 4, out_bias=False)
    )
    output = with_nan_weights(module)(
        sibling.array(tokens(seq_len)), **HIDES[hides](sibling, seq_len)
    )
    assert np.isnan(sibling.numpy(output)).all()


@sample(jax=0)
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_nan_weights_with_cache_give_nan(sibling, name):
    """With a cache, a NaN query, key or value projection makes the outputs of a
    prompt and of a step NaN.
    """
    module = contained_module(
        sibling, "MultiHeadAttentionWithCache", AttentionSpec(16, 4, out_bias=False)
    )
    module = with_nan_weights(module, name)
    output, cache = module(sibling.array(tokens(LONG)), module.init_cache(1, LONG + 8))
    assert np.isnan(sibling.numpy(output)).all()
    output, _ = module(sibling.array(tokens(1)), cache)
    assert np.isnan(sibling.numpy(output)).all()


@sample(jax=1)
@pytest.mark.parametrize("seq_len", [64, LONG])
def test_nan_token_affects_only_later_tokens(sibling, seq_len):
    """In contained causal self-attention, a NaN in token 40 makes the outputs from there on NaN and
    changes no earlier one, bit for bit.
    """
    module, x = (
        contained_module(sibling, "MultiHeadSelfAttention", AttentionSpec(16, 4)),
        tokens(seq_len),
    )
    expected = sibling.numpy(module(sibling.array(x), is_causal=True))
    x[:, 40, 2] = np.nan
    actual = sibling.numpy(module(sibling.array(x), is_causal=True))
    np.testing.assert_array_equal(actual[:, :40], expected[:, :40])
    assert np.isnan(actual[:, 40:]).all()


@sample(jax=1)
@pytest.mark.parametrize("new", [1, 3], ids=["step", "chunk"])
@pytest.mark.parametrize("capacity", [UNFILLED, 700], ids=["small", "large"])
def test_nan_in_unfilled_slots_has_no_effect(sibling, capacity, new):
    """In a contained module, NaN in the slots after the tokens of a sequence changes no bit of the
    output of a step or chunk.
    """
    module = contained_module(sibling, "MultiHeadAttentionWithCache", AttentionSpec(16, 4))
    x, outputs = np.concatenate([tokens(9)] * 2), []
    for bad in (0.0, np.nan):
        _, cache = module(
            sibling.array(x), module.init_cache(2, capacity), new_lengths=sibling.array([4, 9])
        )
        keys, values = (sibling.numpy(part).copy() for part in (cache.keys, cache.values))
        for part in (keys, values):
            part[0, :, 4 + new :] = part[1, :, 9 + new :] = bad
        cache = type(cache)(sibling.array(keys), sibling.array(values), cache.lengths)
        outputs.append(sibling.numpy(module(sibling.array(x[:, :new]), cache)[0]))
    assert np.isfinite(outputs[0]).all()
    np.testing.assert_array_equal(outputs[1], outputs[0])


@sample(jax=1)
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("capacity", [UNFILLED, 700], ids=["small", "large"])
def test_nan_in_cache_stays_in_its_sequence(sibling, capacity, part):
    """In a contained module, NaN in a cached key or value makes the next output of its sequence
    NaN, and changes no bit of another.
    """
    module = contained_module(sibling, "MultiHeadAttentionWithCache", AttentionSpec(16, 4))
    x, outputs = np.concatenate([tokens(9)] * 2), []
    for bad in (False, True):
        _, cache = module(sibling.array(x), module.init_cache(2, capacity))
        parts = {name: sibling.numpy(getattr(cache, name)).copy() for name in ("keys", "values")}
        if bad:
            parts[part][0, :, 4] = np.nan
        cache = type(cache)(*map(sibling.array, parts.values()), cache.lengths)
        outputs.append(sibling.numpy(module(sibling.array(x[:, :1]), cache)[0]))
    assert np.isnan(outputs[1][0]).all()
    np.testing.assert_array_equal(outputs[1][1], outputs[0][1])


def test_nan_token_in_cache(sibling):
    """With a cache and a contained kernel, a NaN in token 5 makes the outputs from there on
    NaN and changes no earlier one, bit for bit.
    """
    layer = sibling.module("MultiHeadSelfAttention", AttentionSpec(16, 4))
    weights = (
        layer.state_dict()
        if sibling.name == "torch"
        else nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    )
    x = tokens(8)
    spoilt = x.copy()
    spoilt[:, 5, 1] = np.nan
    outputs = []
    for prompt in (x, spoilt):
        parts, cache = [], sibling.package.init_cache(len(prompt), 4, 8, 4)
        for begin, end in ((0, 6), (6, 8)):
            output, cache = sibling.package.multi_head_attention_with_cache(
                sibling.array(prompt[:, begin:end]),
                weights,
                layer.spec,
                cache,
                kernel=contained_kernel(sibling),
            )
            parts.append(sibling.numpy(output.detach() if sibling.name == "torch" else output))
        outputs.append(np.concatenate(parts, axis=1))
    np.testing.assert_array_equal(outputs[1][:, :5], outputs[0][:, :5])
    assert np.isnan(outputs[1][:, 5:]).all()


# ---- PyTorch -------------------------------------------------------------------------------------


def test_torch_overflowing_scores_give_nan():
    """In a contained kernel of PyTorch, visible keys whose scores of -2^128 overflow to -inf make
    the context NaN, with and without gradients.
    """
    # In PyTorch's kernel on a CPU, a row whose scores are all -inf is 0.
    query, key = torch.full((1, 1, 1, 16), 2.0**62), torch.full((1, 1, 3, 16), -(2.0**62))
    value = torch.ones(1, 1, 3, 16)
    kernel, spec = contained["torch"](mha_torch.fused.attend), AttentionSpec(16, 1, scale=1.0)
    for needs_gradient in (False, True):
        context = attend_with(
            kernel, query.clone().requires_grad_(needs_gradient), key, value, spec
        )
        assert context.isnan().all()


def test_torch_infinite_key_makes_rows_nan():
    """In a contained kernel of PyTorch, an infinite key with a score of -inf makes the rows that
    attend to it NaN, with and without gradients.
    """
    query, key, value = (
        torch.full((1, 1, 4, 8), -1.0),
        torch.ones(1, 1, 4, 8),
        torch.ones(1, 1, 4, 8),
    )
    key[0, 0, 1, 3] = torch.inf  # a score of -inf
    kernel = contained["torch"](mha_torch.fused.attend)
    for x in (query, query.clone().requires_grad_()):
        context = attend_with(kernel, x, key, value, is_causal=True)
        assert context.isnan().any(dim=-1)[0, 0].tolist() == [False, True, True, True]


def test_torch_nan_token_with_dropout():
    """In PyTorch with dropout, a contained kernel is called only once for a token of
    NaN, so dropout draws once.
    """
    calls = []

    def kernel(*args):
        calls.append(1)
        return mha_torch.fused.attend(*args)

    x = torch.randn(1, 2, 4, 8)
    x[0, 0, 2] = torch.nan
    with torch.no_grad():
        contained["torch"](kernel)(
            x, x, x, mha_torch.masks.Mask(), mha_torch.scores.Scores(BareHeads(8), dropout=0.5)
        )
    assert len(calls) == 1


GATED = AttentionSpec(16, 2, window_size=2, gate=Gate())


@pytest.fixture
def looks(monkeypatch):
    """Record each read of a tensor's value, which on a GPU waits for its result."""
    marks = []

    def noted(look):
        return lambda x: (marks.append(x), look(x))[1]

    for name in ("tolist", "item", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, noted(getattr(torch.Tensor, name)))
    return marks


@pytest.mark.parametrize("needs_gradient", [False, True], ids=["", "gradient"])
def test_torch_call_reads_no_values(looks, needs_gradient):
    """A call of a causal layer in PyTorch, with or without attention weights, reads no value, and
    its gradient none; lengths are read once.
    """
    layer = mha_torch.MultiHeadAttention(GATED)
    x = torch.randn(2, 5, 16, requires_grad=needs_gradient)
    with torch.set_grad_enabled(needs_gradient):
        for need_weights in (False, True):
            output, _ = layer(x, is_causal=True, need_weights=need_weights)
            if needs_gradient:
                output.sum().backward()
            assert not looks
            layer(x, key_padding_lengths=torch.tensor([2, 5]), need_weights=need_weights)
            assert [read.tolist() for read in looks[:1]] == [[2, 5]]
            assert len(looks) == 2  # the second belongs to this test
            looks.clear()


def test_torch_contained_kernel_reads_once(looks):
    """A contained kernel in PyTorch reads values once, without gradients and with them."""
    layer, x = mha_torch.MultiHeadSelfAttention(GATED), torch.randn(2, 5, 16)
    layer.kernel = contained["torch"](mha_torch.fused.attend)
    with torch.no_grad():
        layer(x, is_causal=True)
    assert len(looks) == 1
    layer(x, is_causal=True).sum().backward()
    assert len(looks) == 2


@pytest.mark.parametrize("is_contained", [False, True], ids=["default", "contained"])
def test_torch_cuda_graph_reads_no_values(monkeypatch, looks, is_contained):
    """While a CUDA graph is captured (simulated), neither a call nor its gradient reads a value;
    the output is unchanged and the gradient of the input is finite.
    """
    layer, x = (
        mha_torch.MultiHeadSelfAttention(AttentionSpec(16, 2, window_size=2)),
        torch.randn(2, 5, 16),
    )
    x[0, 3, 0] = torch.nan  # padding
    if is_contained:
        layer.kernel = contained["torch"](mha_torch.fused.attend)
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
    """In PyTorch, a contained kernel that assumes that inputs may not be finite, as in a graph,
    changes no bit of a gradient.
    """
    layer = mha_torch.MultiHeadSelfAttention(AttentionSpec(16, 2))
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))

    def gradients():
        return torch.autograd.grad(layer(x, is_causal=True).sum(), [*layer.parameters()])

    expected = gradients()
    monkeypatch.setattr(mha_torch.kernels.nonfinite, "_cannot_overflow", lambda *_: False)
    layer.kernel = contained["torch"](mha_torch.fused.attend)
    assert all(map(torch.equal, gradients(), expected))


def test_window_sees_a_mark_at_its_first_key():
    """A query attends to a marked first key if its window reaches that far."""
    marked = np.array([True, False, False, False]).reshape(1, 1, 4)
    near = span_of(2, None)
    in_torch = mha_torch.kernels.nonfinite.attends_to_any(
        torch.from_numpy(marked), 4, mha_torch.masks.Mask(span=near)
    )
    in_jax = jax.jit(
        lambda marked: mha_jax.kernels.nonfinite.attends_to_any(
            marked, 4, mha_jax.masks.Mask(span=near)
        )
    )(marked)
    for sees in (in_torch, in_jax):
        assert np.asarray(sees).ravel().tolist() == [True, True, False, False]
