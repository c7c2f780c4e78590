"""The key/value cache: in any chunks, the results are equal to one full causal pass."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample
from helpers.siblings import contents_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mha_jax
import parity
from mha_spec import Norm, Rope

NUM_TOKENS = (
    6  # and slots; few and always the same shapes, because JAX compiles each operation per shape
)
CHUNKS = [4, 1, 1]

SPECS = {
    "mha": parity.AttentionSpec(24, 4),
    "gqa-rope": parity.AttentionSpec(24, 4, num_kv_heads=2, rope=Rope(10000.0)),
    "mqa-no-out-proj": parity.AttentionSpec(24, 4, num_kv_heads=1, qkv_bias=False, out_proj=False),
    "fused-qkv-head-dim": parity.AttentionSpec(
        24, 4, num_kv_heads=2, head_dim=10, fused_qkv=True, rope=Rope(500.0)
    ),
}
GQA_ROPE = SPECS["gqa-rope"]

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
only_jax = pytest.mark.parametrize("sibling", ["jax"], indirect=True)
only_torch = pytest.mark.parametrize("sibling", ["torch"], indirect=True)
# The same examples in each run: JAX compiles a program for each shape, and tests/budget.json limits
# their number.
drawn = settings(
    deadline=None,
    max_examples=20,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def _without_gradients():
    """Disable gradients, as users do when decoding in torch, which then updates the cache in
    place.
    """
    with torch.no_grad():
        yield


@functools.cache
def layer(sibling, kind, spec, dtype=np.float32):
    """Return a module of that class and dtype; equal specs have equal weights. Tests share it
    unchanged.
    """
    keyword = {"jax": "param_dtype", "torch": "dtype"}[sibling.name]
    module = sibling.module(kind, spec, **{keyword: sibling.array(np.zeros(1, dtype)).dtype})
    weights = {name: weight.astype(dtype) for name, weight in parity.random_weights(spec).items()}
    parity.load_into(module, weights, spec)
    return module


def cached_layer(sibling, spec, dtype=np.float32):
    return layer(sibling, "MultiHeadAttentionWithCache", spec, dtype)


def framework_weights(sibling, module):
    """Return the weights in the container that functions accept."""
    return (
        module.state_dict()
        if sibling.name == "torch"
        else nnx.to_pure_dict(nnx.state(module, nnx.Param))
    )


def random_tokens(spec, num_tokens=NUM_TOKENS, dtype=np.float32, seed=1):
    """Return the first `num_tokens` tokens of three sequences."""
    return (
        np.random.default_rng(seed)
        .standard_normal((3, NUM_TOKENS + 1, spec.d_in))[:, :num_tokens]
        .astype(dtype)
    )


def call(module, *inputs, **options):
    return module(*inputs, **options)


jitted_call = jax.jit(call, static_argnames="is_causal")


def called(sibling):
    """Return a function that calls a module: in JAX under jit, as users decode, and faster to
    compile.
    """
    return jitted_call if sibling.name == "jax" else call


def full_pass(sibling, spec, x):
    """Return the output of one causal pass over all tokens, without a cache."""
    module = layer(sibling, "MultiHeadSelfAttention", spec, x.dtype)
    return sibling.numpy(called(sibling)(module, sibling.array(x), is_causal=True))


def feed(sibling, module, x, chunks, capacity=NUM_TOKENS):
    """Feed tokens in chunks of these sizes, and return the outputs of all tokens and the cache."""
    cache = module.init_cache(len(x), capacity)
    outputs = []
    for chunk in np.split(x, np.cumsum(chunks)[:-1], axis=1):
        output, cache = called(sibling)(module, sibling.array(chunk), cache)
        outputs.append(sibling.numpy(output))
    return np.concatenate(outputs, axis=1), cache


def feed_ragged(sibling, module, x, steps):
    """Feed at most 2 tokens a step, and return their outputs, at their positions in x, and numbers
    of tokens fed.
    """
    cache = module.init_cache(len(x), x.shape[1])
    outputs, num_fed = np.zeros_like(x), np.zeros(len(x), int)
    for new_lengths in steps:
        is_new = np.arange(2) < np.array(new_lengths)[:, None]
        rows, columns = np.nonzero(is_new)
        rows_and_columns = rows, num_fed[rows] + columns
        new_tokens = np.full_like(
            x[:, :2], 1e3
        )  # padding that would change the output if it were read
        new_tokens[is_new] = x[rows_and_columns]
        output, cache = module(sibling.array(new_tokens), cache, new_lengths=list(new_lengths))
        outputs[rows_and_columns] = sibling.numpy(output)[is_new]
        num_fed += new_lengths
    return outputs, num_fed


def filled_cache(sibling, module, lengths, capacity=NUM_TOKENS):
    """Return a cache with the first few random tokens of each sequence."""
    x = random_tokens(module.spec, num_tokens=max(*lengths, 1), seed=2)
    cache = module.init_cache(len(lengths), capacity)
    return called(sibling)(module, sibling.array(x), cache, new_lengths=sibling.array(lengths))[1]


SHARED = parity.AttentionSpec(
    24, 4, num_kv_heads=2, qk_norm=Norm(), rope=Rope(500.0), window_size=3
)


def sharing(sibling, source):
    """Return a cached layer with the same weights that shares the keys and values of a source."""
    weights = {
        name: array
        for name, array in parity.weights_of(source).items()
        if name[:2] not in ("k_", "v_")
    }
    shared = sibling.module("MultiHeadAttentionWithCache", source.spec.replace(shared_kv=True))
    return parity.load_into(shared, weights, shared.spec)


@sample(jax=1)
@pytest.mark.parametrize(
    "steps", [[None] * 3, [[4, 2, 0], [1, 1, 1], [0, 1, 1]]], ids=["even", "ragged"]
)
def test_shared_layer_reads_source_cache(sibling, steps):
    """A layer that shares keys and values, with the weights of the source and its cache after
    appending, returns the output of the source and leaves the cache as it is, bit for bit.
    """
    source = cached_layer(sibling, SHARED)
    shared, cache = sharing(sibling, source), source.init_cache(3, NUM_TOKENS)
    for x, new_lengths in zip(
        np.split(random_tokens(SHARED), np.cumsum(CHUNKS)[:-1], axis=1), steps, strict=True
    ):
        tokens, options = (
            sibling.array(x),
            {} if new_lengths is None else {"new_lengths": sibling.array(new_lengths)},
        )
        expected, cache = called(sibling)(source, tokens, cache, **options)
        before = contents_of(sibling, cache)
        actual, after = called(sibling)(shared, tokens, cache, **options)
        assert np.array_equal(sibling.numpy(actual), sibling.numpy(expected))
        assert all(map(np.array_equal, contents_of(sibling, after), before))


def test_shared_layer_rejects_stale_cache(sibling):
    """A layer that shares keys and values raises an error for a cache without the new tokens, and
    for one with the wrong number of heads.
    """
    source = cached_layer(sibling, SHARED)
    shared, x = sharing(sibling, source), sibling.array(random_tokens(SHARED, 2))
    with rejects("cache", lengths=[0, 0, 0], new_lengths=[2, 2, 2]):
        shared(x, source.init_cache(3, NUM_TOKENS))
    with rejects("cache", lengths=[2, 1, 3], new_lengths=[2, 2, 2]):
        shared(x, filled_cache(sibling, source, [2, 1, 3]))
    other = SHARED.replace(num_kv_heads=4)
    with rejects("cache.keys", {"cache.keys.shape": (3, 4, NUM_TOKENS, 6)}):
        shared(x, filled_cache(sibling, cached_layer(sibling, other), [2, 2, 3]))


@only_jax
def test_shared_layer_stale_cache_under_jit(sibling):
    """Under `jax.jit`, the output is NaN exactly for sequences whose cache holds
    fewer tokens than are new.
    """
    source = cached_layer(sibling, SHARED)
    shared, x = sharing(sibling, source), sibling.array(random_tokens(SHARED, 2))
    output, _ = jitted_call(shared, x, filled_cache(sibling, source, [2, 1, 3]))
    assert np.isnan(sibling.numpy(output)).all(axis=(1, 2)).tolist() == [False, True, False]


def projected(x, weights, name, spec, theta=None):
    """Return keys or values (B, K, T, H) by the formulas in float64, with RoPE as a rotation of
    complex numbers.
    """
    y = x @ weights[f"{name}.weight"].T.astype(np.float64) + weights.get(f"{name}.bias", 0.0)
    y = y.reshape(*x.shape[:2], spec.num_kv_heads, spec.head_dim).swapaxes(1, 2)
    if theta is None:
        return y
    first, second = np.split(y, 2, axis=-1)
    frequencies = theta ** (-2 * np.arange(spec.head_dim // 2) / spec.head_dim)
    turned = (first + 1j * second) * np.exp(1j * np.arange(x.shape[1])[:, None] * frequencies)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def assert_same_up_to_rounding(actual, expected):
    """Compare up to the order of sums.

    Matrix products differ in shape, so kernels add in different orders. Over every test here and
    all dtypes, the measured difference is at most 2.0 units of rounding (`eps` times the largest
    element); 4 are allowed.
    """
    __tracebackhide__ = True
    assert actual.shape == expected.shape
    actual, expected, eps = (
        actual.astype(np.float64),
        expected.astype(np.float64),
        ml_dtypes.finfo(actual.dtype).eps,
    )
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=4 * float(eps) * np.abs(expected).max()
    )


# ---- Chunks and ragged batches -------------------------------------------------------------------


@sample(jax=0)
@drawn
@given(cuts=st.sets(st.integers(1, NUM_TOKENS - 1)))
def test_any_chunking_matches_full_pass(sibling, cuts):
    """Tokens fed in chunks of any sizes give the output of one causal pass."""
    x = random_tokens(GQA_ROPE)
    chunks = np.diff([0, *sorted(cuts), NUM_TOKENS])
    output, _ = feed(sibling, cached_layer(sibling, GQA_ROPE), x, chunks)
    assert_same_up_to_rounding(output, full_pass(sibling, GQA_ROPE, x))


@sample(jax=0)
@drawn
@given(steps=st.lists(st.tuples(*3 * [st.integers(0, 2)]), min_size=1, max_size=3))
def test_ragged_batch_matches_sequences(sibling, steps):
    """Each sequence of a batch, fed 0 to 2 tokens a step, has the output of one
    causal pass over it alone.
    """
    x = random_tokens(GQA_ROPE)
    output, num_fed = feed_ragged(sibling, cached_layer(sibling, GQA_ROPE), x, steps)
    alone = np.concatenate([full_pass(sibling, GQA_ROPE, sequence[None]) for sequence in x])
    is_fed = np.arange(NUM_TOKENS) < num_fed[:, None]
    assert_same_up_to_rounding(output, np.where(is_fed[..., None], alone, 0))


@sample(jax=1)
@pytest.mark.parametrize("capacity", [7, 64])
def test_capacity_changes_only_rounding(sibling, capacity):
    """A cache of 7 or 64 slots gives the outputs of one of 6 slots, up to rounding."""
    x = random_tokens(GQA_ROPE)
    module = cached_layer(sibling, GQA_ROPE)
    output, _ = feed(sibling, module, x, CHUNKS, capacity)
    expected, _ = feed(sibling, module, x, CHUNKS, NUM_TOKENS)
    assert_same_up_to_rounding(output, expected)


@sample(jax=0)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_half_precision_decoding(sibling, dtype):
    """In half precision, tokens fed in chunks give the output of one
    causal pass, up to rounding.
    """
    x = random_tokens(GQA_ROPE, dtype=dtype)
    output, _ = feed(sibling, cached_layer(sibling, GQA_ROPE, dtype), x, CHUNKS)
    assert_same_up_to_rounding(output, full_pass(sibling, GQA_ROPE, x))


@sample(jax=1)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_half_precision_cache_dtype(sibling, dtype):
    """In half precision, outputs, keys and values have the dtype of the weights and tokens."""
    x = random_tokens(GQA_ROPE, dtype=dtype)
    output, cache = feed(sibling, cached_layer(sibling, GQA_ROPE, dtype), x, CHUNKS)
    assert {output.dtype, sibling.numpy(cache.keys).dtype, sibling.numpy(cache.values).dtype} == {
        np.dtype(dtype)
    }


# ---- The function --------------------------------------------------------------------------------


@sample(jax=0)
@every_spec
def test_function_matches_module(sibling, spec):
    """For a ragged prompt, the function and the module have the same output."""
    x = sibling.array(random_tokens(spec, num_tokens=4))
    module = cached_layer(sibling, spec)
    output, _ = sibling.package.multi_head_attention_with_cache(
        x,
        framework_weights(sibling, module),
        spec,
        module.init_cache(3, NUM_TOKENS),
        new_lengths=[4, 0, 3],
    )
    new_lengths = sibling.array([4, 0, 3])
    expected, _ = called(sibling)(
        module, x, module.init_cache(3, NUM_TOKENS), new_lengths=new_lengths
    )
    assert_same_up_to_rounding(sibling.numpy(output), sibling.numpy(expected))


# ---- Contents of the cache -----------------------------------------------------------------------


@sample(jax=1)
@every_spec
def test_cache_holds_the_projected_keys(sibling, spec):
    """The keys of a cache are the projected keys, rotated if the layer has RoPE."""
    x = random_tokens(spec)
    _, cache = feed(sibling, cached_layer(sibling, spec), x, CHUNKS)
    expected = projected(
        x, parity.random_weights(spec), "k_proj", spec, spec.rope and spec.rope.theta
    )
    assert_same_up_to_rounding(sibling.numpy(cache.keys), expected)


@sample(jax=1)
@every_spec
def test_cache_holds_the_projected_values(sibling, spec):
    """The values of a cache are the projected values."""
    x = random_tokens(spec)
    _, cache = feed(sibling, cached_layer(sibling, spec), x, CHUNKS)
    assert_same_up_to_rounding(
        sibling.numpy(cache.values), projected(x, parity.random_weights(spec), "v_proj", spec)
    )


@sample(jax=1)
@pytest.mark.parametrize("part", ["keys", "values"])
def test_no_cached_token_is_zero(sibling, part):
    """In a full cache no key and no value is 0."""
    _, cache = feed(sibling, cached_layer(sibling, GQA_ROPE), random_tokens(GQA_ROPE), CHUNKS)
    assert np.abs(sibling.numpy(getattr(cache, part))).max(axis=-1).min() > 0


# ---- Unfilled slots ------------------------------------------------------------------------------

# With the largest of these, a dot product of a query and a key is still finite in float32.
junk = pytest.mark.parametrize("value", [1.0, -65504.0, 1e30])


@sample(jax=1)
@junk
@pytest.mark.parametrize("num_new", [1, 2])
def test_stale_slots_change_nothing(sibling, value, num_new):
    """Finite values in the slots after the tokens of a sequence, up to 1e30,
    change no bit of the output.
    """
    module = cached_layer(sibling, GQA_ROPE)
    x = sibling.array(random_tokens(GQA_ROPE, num_tokens=num_new))
    cache = filled_cache(sibling, module, [2, 4, 0])
    keys, values, lengths = contents_of(sibling, cache)
    expected, _ = module(x, cache)
    is_stale = np.arange(NUM_TOKENS)[:, None] >= lengths[:, None, None, None]
    keys, values = (np.where(is_stale, np.float32(value), slots) for slots in (keys, values))
    output, _ = module(x, sibling.package.KVCache(*map(sibling.array, (keys, values, lengths))))
    np.testing.assert_array_equal(sibling.numpy(output), sibling.numpy(expected))


# ---- Masks, biases and positions in addition to the causality of the cache
# -------------------------------------------


def window_mask(num_tokens, capacity, window_size):
    """Return a mask (T, S) that hides slots before the window of a token; the cache itself hides
    later ones.
    """
    return np.arange(num_tokens)[:, None] - np.arange(capacity) >= window_size


def feed_with(sibling, module, x, chunks, capacity=NUM_TOKENS, **options):
    """Do the same as `feed`, with arrays that have a row per token, divided like the tokens."""
    cache = module.init_cache(len(x), capacity)
    outputs, begin = [], 0
    for chunk in chunks:
        end = begin + chunk
        cut = {
            name: sibling.array(
                array[:, begin:end] if name == "positions" else array[..., begin:end, :]
            )
            for name, array in options.items()
        }
        output, cache = module(sibling.array(x[:, begin:end]), cache, **cut)
        outputs.append(sibling.numpy(output))
        begin = end
    return np.concatenate(outputs, axis=1), cache


def one_pass(sibling, spec, x, **options):
    """Return the output of one causal pass with a mask, a bias or positions, without a cache."""
    module = layer(sibling, "MultiHeadSelfAttention", spec, x.dtype)
    arrays = {name: sibling.array(array) for name, array in options.items()}
    return sibling.numpy(module(sibling.array(x), is_causal=True, **arrays))


MORE_CHUNKS = pytest.mark.parametrize("chunks", [[6], CHUNKS, [1, 3, 2]], ids=str)


@sample(jax=0)
@MORE_CHUNKS
def test_window_mask_with_cache(sibling, chunks):
    """A mask for a window of 3 tokens over a cache gives the output of one pass with it, which
    differs from that without it.
    """
    x = random_tokens(GQA_ROPE)
    mask = window_mask(NUM_TOKENS, NUM_TOKENS, window_size=3)
    output, _ = feed_with(sibling, cached_layer(sibling, GQA_ROPE), x, chunks, mask=mask)
    assert_same_up_to_rounding(output, one_pass(sibling, GQA_ROPE, x, mask=mask))
    assert (
        np.abs(output - full_pass(sibling, GQA_ROPE, x)).max() > 1e-3
    )  # the window hides something


@sample(jax=1)
@MORE_CHUNKS
def test_alibi_bias_with_cache(sibling, chunks):  # ALiBi
    """A bias by distance (ALiBi) over a cache gives the output of one pass with it, which differs
    from that without it.
    """
    x, spec = random_tokens(SPECS["mha"]), SPECS["mha"]
    slopes = 2.0 ** -np.arange(1, 1 + spec.num_heads, dtype=np.float32)[:, None, None]
    bias = slopes * (np.arange(NUM_TOKENS) - np.arange(NUM_TOKENS)[:, None]).astype(np.float32)
    output, _ = feed_with(sibling, cached_layer(sibling, spec), x, chunks, bias=bias)
    assert_same_up_to_rounding(output, one_pass(sibling, spec, x, bias=bias))
    assert np.abs(output - full_pass(sibling, spec, x)).max() > 1e-3


@sample(jax=1)
@MORE_CHUNKS
def test_left_padding_changes_only_rounding(sibling, chunks):
    """With a mask and positions, sequences with padding on the left give
    their outputs without padding.
    """
    num_padding = np.array([0, 3, 1])
    tokens = random_tokens(GQA_ROPE)
    x = np.full_like(tokens, 1e3)  # padding that would change the output if it were visible
    for row, count in enumerate(num_padding):
        x[row, count:] = tokens[row, : NUM_TOKENS - count]
    mask = np.broadcast_to(
        np.arange(NUM_TOKENS) < num_padding[:, None, None, None], (3, 1, NUM_TOKENS, NUM_TOKENS)
    ).copy()
    positions = np.maximum(np.arange(NUM_TOKENS) - num_padding[:, None], 0).astype(np.int32)
    output, _ = feed_with(
        sibling, cached_layer(sibling, GQA_ROPE), x, chunks, mask=mask, positions=positions
    )
    alone = full_pass(sibling, GQA_ROPE, tokens)
    for row, count in enumerate(num_padding):
        assert_same_up_to_rounding(output[row, count:], alone[row, : NUM_TOKENS - count])


def test_mask_may_cover_unfilled_slots(sibling):
    """A mask of 9 slots, of which 2 are filled, gives the output of one pass
    with its first 2 columns.
    """
    x, mask = random_tokens(GQA_ROPE, num_tokens=2), np.zeros((3, 1, 1, 9), bool)
    mask[1, ..., 0] = True
    module = cached_layer(sibling, GQA_ROPE)
    output, _ = module(sibling.array(x), module.init_cache(3, 9), mask=sibling.array(mask))
    assert_same_up_to_rounding(
        sibling.numpy(output), one_pass(sibling, GQA_ROPE, x, mask=mask[..., :2])
    )


REJECTED_OPTIONS = {
    "mask-keys": ({"mask": np.zeros((2, 5), bool)}, rejects("mask", {"mask.shape": (2, 5)})),
    "float-mask": (
        {"mask": np.zeros((2, 6), np.float32)},
        rejects_type("mask", {"mask.dtype": ...}),
    ),
    "bias-keys": ({"bias": np.zeros((2, 5), np.float32)}, rejects("bias", {"bias.shape": (2, 5)})),
    "bias-dtype": (
        {"bias": np.zeros((2, 6), np.float16)},
        rejects_type("bias", {"bias.dtype": ..., "query.dtype": ...}),
    ),
    "positions": (
        {"positions": np.zeros((3, 3), np.int32)},
        rejects("positions", {"positions.shape": (3, 3)}),
    ),
}


@pytest.mark.parametrize("name", REJECTED_OPTIONS)
def test_invalid_options_leave_cache_as_is(sibling, name):
    """A mask, bias or positions of the wrong shape or dtype raise an
    error, and no key is written.
    """
    options, input_error = REJECTED_OPTIONS[name]
    module = cached_layer(sibling, GQA_ROPE)
    cache = module.init_cache(3, NUM_TOKENS)
    with input_error:
        module(
            sibling.array(random_tokens(GQA_ROPE, num_tokens=2)),
            cache,
            **{key: sibling.array(array) for key, array in options.items()},
        )
    assert not sibling.numpy(cache.keys).any()


def test_positions_without_rope_are_ignored(sibling):
    """A layer without RoPE ignores positions bit for bit, but positions of the wrong shape raise an
    error.
    """
    module = cached_layer(sibling, SPECS["mha"])
    x, positions = (
        random_tokens(SPECS["mha"], num_tokens=2),
        sibling.array(np.full((1, 2), 7, np.int32)),
    )
    caches = [module.init_cache(3, NUM_TOKENS) for _ in range(3)]
    outputs = [
        sibling.numpy(module(sibling.array(x), cache, positions=rotations)[0])
        for cache, rotations in zip(caches, (None, positions), strict=False)
    ]
    np.testing.assert_array_equal(*outputs)
    with rejects("positions", {"positions.shape": (1, 2)}):
        module(sibling.array(x[:, :1]), caches[2], positions=positions)


# ---- Empty inputs --------------------------------------------------------------------------------


@sample(jax=1)
@pytest.mark.parametrize("lengths", [[0, 0, 0], [2, 2, 2], [1, 4, 0]], ids=str)
@pytest.mark.parametrize("new_lengths", [None, [0, 0, 0]], ids=["all", "ragged"])
def test_no_new_tokens_leave_cache_unchanged(sibling, lengths, new_lengths):
    """A step of 0 tokens has an empty output and leaves the contents of the
    cache unchanged, bit for bit.
    """
    module = cached_layer(sibling, GQA_ROPE)
    cache = filled_cache(sibling, module, lengths)
    before = contents_of(sibling, cache)
    output, cache = module(
        sibling.array(random_tokens(GQA_ROPE, num_tokens=0)), cache, new_lengths=new_lengths
    )
    assert output.shape == (3, 0, 24)
    for now, then in zip(contents_of(sibling, cache), before, strict=True):
        np.testing.assert_array_equal(now, then, strict=True)


@sample(jax=0)
@pytest.mark.parametrize("new_lengths", [None, []], ids=["all", "ragged"])
def test_cache_accepts_an_empty_batch(sibling, new_lengths):
    """A cache of 0 sequences accepts tokens of 0 sequences."""
    module = cached_layer(sibling, GQA_ROPE)
    x = sibling.array(random_tokens(GQA_ROPE)[:0])
    output, cache = module(x, module.init_cache(0, NUM_TOKENS), new_lengths=new_lengths)
    assert (output.shape, cache.lengths.shape) == ((0, NUM_TOKENS, 24), (0,))


# ---- Caches made from caches ---------------------------------------------------------------------


def slots_of(sibling, cache):
    """Return keys and values of the tokens in a cache, by sequence."""
    keys, values, lengths = contents_of(sibling, cache)
    return [(keys[row, :, :length], values[row, :, :length]) for row, length in enumerate(lengths)]


def assert_holds(sibling, cache, expected):
    """Check that a cache holds the expected tokens, and 0 in the other slots."""
    slots, (keys, values, lengths) = slots_of(sibling, cache), contents_of(sibling, cache)
    assert len(slots) == len(expected)
    for now, then in zip(slots, expected, strict=True):
        np.testing.assert_array_equal(now, then)
    is_free = np.arange(keys.shape[2]) >= lengths[:, None]
    assert not np.moveaxis(keys, 1, 2)[is_free].any()
    assert not np.moveaxis(values, 1, 2)[is_free].any()


def assert_goes_on_as_its_sequences(sibling, cache, sequences):
    """Check that another token of each sequence has the output of one causal pass over the sequence
    alone.
    """
    module = cached_layer(sibling, GQA_ROPE)
    x = random_tokens(GQA_ROPE, num_tokens=1)[:1].repeat(len(sequences), axis=0)
    output, _ = module(sibling.array(x), cache)
    whole = [
        full_pass(sibling, GQA_ROPE, np.concatenate([tokens[None], x[:1]], axis=1))[0, -1]
        for tokens in sequences
    ]
    assert_same_up_to_rounding(sibling.numpy(output)[:, 0], np.stack(whole))


HELD = [2, 4, 0]


def cache_and_tokens(sibling):
    """Return a cache of three sequences, and the tokens of each."""
    cache = filled_cache(sibling, cached_layer(sibling, GQA_ROPE), HELD)
    x = random_tokens(GQA_ROPE, num_tokens=max(HELD), seed=2)
    return cache, [tokens[:length] for tokens, length in zip(x, HELD, strict=True)]


MADE = {
    "reorder": (lambda cache: cache.reorder([2, 0, 0, 1]), [2, 0, 0, 1]),
    "reorder-one": (lambda cache: cache.reorder([1]), [1]),
    "repeat": (lambda cache: cache.repeat(2), [0, 0, 1, 1, 2, 2]),
    "repeat-once": (lambda cache: cache.repeat(1), [0, 1, 2]),
    "grow": (lambda cache: cache.grow(9), [0, 1, 2]),
    "grow-by-nothing": (lambda cache: cache.grow(NUM_TOKENS), [0, 1, 2]),
}


@sample(jax=0)
@pytest.mark.parametrize("name", MADE)
def test_derived_cache_continues_sequences(sibling, name):
    """A reordered, repeated or grown cache holds the tokens of its sequences and continues them,
    and the original cache is unchanged.
    """
    make, order = MADE[name]
    cache, tokens = cache_and_tokens(sibling)
    expected, before = slots_of(sibling, cache), contents_of(sibling, cache)
    made = make(cache)
    assert made.capacity == (9 if name == "grow" else NUM_TOKENS)
    assert_holds(sibling, made, [expected[index] for index in order])
    assert_goes_on_as_its_sequences(sibling, made, [tokens[index] for index in order])
    for now, then in zip(
        contents_of(sibling, cache), before, strict=True
    ):  # the new cache has its own storage
        np.testing.assert_array_equal(now, then, strict=True)


@sample(jax=1)
@pytest.mark.parametrize("lengths", [np.int64(0), [1, 3, 0], [2, 4, 0]], ids=str)
@pytest.mark.parametrize("kind", ["list", "array"])
def test_cropped_cache_continues_sequences(sibling, lengths, kind):
    """A cropped cache holds the first tokens of its sequences and continues from them; its capacity
    and the original cache are unchanged.
    """
    cache, tokens = cache_and_tokens(sibling)
    expected, before = slots_of(sibling, cache), contents_of(sibling, cache)
    is_for_all = isinstance(lengths, np.integer)
    lengths_of_sequences = [lengths] * 3 if is_for_all else lengths
    if kind == "array" and not is_for_all:
        made = cache.crop(sibling.array(lengths))
    else:
        made = cache.crop(int(lengths) if kind == "list" and is_for_all else lengths)
    assert made.capacity == NUM_TOKENS
    assert sibling.numpy(made.lengths).dtype == np.int32
    first = [
        tuple(x[:, :length] for x in tokens)
        for tokens, length in zip(expected, lengths_of_sequences, strict=True)
    ]
    assert_holds(sibling, made, first)
    assert_goes_on_as_its_sequences(
        sibling,
        made,
        [
            tokens_of_sequence[:length]
            for tokens_of_sequence, length in zip(tokens, lengths_of_sequences, strict=True)
        ],
    )
    for now, then in zip(contents_of(sibling, cache), before, strict=True):
        np.testing.assert_array_equal(now, then, strict=True)


REJECTED_MAKING = {
    "index": (lambda cache: cache.reorder([0, 3]), rejects("indices", indices=[0, 3])),
    "negative-index": (lambda cache: cache.reorder([-1]), rejects("indices", indices=[-1])),
    "float-index": (
        lambda cache: cache.reorder([0.0]),
        rejects_type("indices", {"indices.dtype": ...}),
    ),
    "index-of-2-axes": (
        lambda cache: cache.reorder([[0]]),
        rejects("indices", {"indices.shape": (1, 1)}),
    ),
    "no-repeats": (lambda cache: cache.repeat(0), rejects("repeats", repeats=0)),
    "half-a-repeat": (lambda cache: cache.repeat(1.5), rejects_type("repeats", repeats=1.5)),
    "fewer-slots": (lambda cache: cache.grow(5), rejects("capacity", capacity=5)),
    "float-slots": (lambda cache: cache.grow(7.0), rejects_type("capacity", capacity=7.0)),
    "longer": (
        lambda cache: cache.crop([2, 4, 1]),
        rejects("lengths", "lengths=[2, 4, 1] and [2, 4, 0]"),
    ),
    "longer-than-one": (
        lambda cache: cache.crop(1),
        rejects("lengths", "lengths=[1, 1, 1] and [2, 4, 0]"),
    ),
    "negative-length": (lambda cache: cache.crop(-1), rejects("lengths", lengths=[-1, -1, -1])),
    "too-few-lengths": (lambda cache: cache.crop([1]), rejects("lengths", {"lengths.shape": (1,)})),
    "float-lengths": (
        lambda cache: cache.crop([1.0, 1.0, 0.0]),
        rejects_type("lengths", {"lengths.dtype": ...}),
    ),
}


@pytest.mark.parametrize("name", REJECTED_MAKING)
def test_invalid_cache_operations_raise(sibling, name):
    """Invalid indices, repeats, capacities and lengths raise an error when a
    cache is made from another.
    """
    make, input_error = REJECTED_MAKING[name]
    with input_error:
        make(cache_and_tokens(sibling)[0])


# ---- Capacity ------------------------------------------------------------------------------------


def test_padding_may_exceed_capacity(sibling):
    """A ragged step whose padding, but no new token, reaches past the last slot has the output of a
    step with a larger cache.
    """
    module = cached_layer(sibling, GQA_ROPE)
    x = sibling.array(random_tokens(GQA_ROPE, num_tokens=4))
    output, cache = module(
        x, filled_cache(sibling, module, [5, 2, 6], capacity=6), new_lengths=[1, 4, 0]
    )
    expected, _ = module(
        x, filled_cache(sibling, module, [5, 2, 6], capacity=10), new_lengths=[1, 4, 0]
    )
    assert sibling.numpy(cache.lengths).tolist() == [6, 6, 6]
    assert_same_up_to_rounding(sibling.numpy(output), sibling.numpy(expected))


@pytest.mark.parametrize(
    ("new_lengths", "error"),
    [
        ([-1, 2, 2], ValueError),
        ([5, 0, 0], ValueError),
        ([1, 2], ValueError),
        ([[1, 2, 0]], ValueError),
        ([1.0, 2.0, 0.0], TypeError),
    ],
    ids=["negative", "too-long", "too-few", "rank", "float"],
)
def test_invalid_new_lengths_raise(sibling, new_lengths, error):
    """New lengths below 0, above the number of new tokens, of the wrong shape or
    of floats raise an error.
    """
    module = cached_layer(sibling, GQA_ROPE)
    x = sibling.array(random_tokens(GQA_ROPE, num_tokens=4))
    with rejects("new_lengths").of(error):
        module(x, module.init_cache(3, NUM_TOKENS), new_lengths=new_lengths)


@pytest.mark.parametrize("part", ["key", "value"])
def test_append_of_wrong_dtype_raises(sibling, part):
    """Appending a float16 key or value to a float32 cache raises an
    error, and no key is written.
    """
    cache = sibling.package.init_cache(1, 1, 4, 2)
    x = np.ones((1, 1, 3, 2), np.float32)
    arrays = {
        "key": sibling.array(x),
        "value": sibling.array(x),
        part: sibling.array(x.astype(np.float16)),
    }
    with rejects_type("cache.keys" if part == "key" else "value"):
        sibling.package.append_to_cache(cache, **arrays)
    np.testing.assert_array_equal(sibling.numpy(cache.keys), 0)


# ---- jit -----------------------------------------------------------------------------------------


def decode_step(params, x, cache, new_lengths=None):
    """Call the function for one step of `GQA_ROPE`."""
    return mha_jax.multi_head_attention_with_cache(
        x, params, GQA_ROPE, cache, new_lengths=new_lengths
    )


jitted_step = jax.jit(decode_step)


@only_jax
@pytest.mark.parametrize("form", ["function", "module"])
def test_step_is_traced_once_for_64_steps(sibling, form):
    """Under `jax.jit`, 64 steps of one token trace the function or module once."""
    module = cached_layer(sibling, GQA_ROPE)
    params = framework_weights(sibling, module)
    traces = []

    @jax.jit
    def step(weights, x, cache):
        traces.append(form)
        return weights(x, cache) if form == "module" else decode_step(weights, x, cache)

    x, cache = jnp.asarray(random_tokens(GQA_ROPE, num_tokens=1)), module.init_cache(3, 64)
    for _ in range(64):
        _, cache = step(module if form == "module" else params, x, cache)
    assert len(traces) == 1
    assert cache.lengths.tolist() == [64, 64, 64]


@only_jax
def test_jitted_ragged_step_matches_eager(sibling):
    """A ragged step under `jax.jit` matches the eager one in output and keys."""
    module = cached_layer(sibling, GQA_ROPE)
    x = jnp.asarray(random_tokens(GQA_ROPE, num_tokens=2))
    cache, new_lengths = filled_cache(sibling, module, [4, 1, 0]), jnp.array([2, 0, 1], jnp.int32)
    output, appended = jitted_step(framework_weights(sibling, module), x, cache, new_lengths)
    expected, expected_cache = module(x, cache, new_lengths=new_lengths)
    assert appended.lengths.tolist() == [6, 1, 1]
    assert_same_up_to_rounding(np.asarray(output), np.asarray(expected))
    assert_same_up_to_rounding(np.asarray(appended.keys), np.asarray(expected_cache.keys))


@only_jax
@pytest.mark.parametrize("new_lengths", [None, [1, 2, 2]], ids=["all", "ragged"])
def test_jitted_overflow_returns_nan(sibling, new_lengths):
    """Under `jax.jit`, the output is NaN exactly for sequences whose new
    tokens exceed the capacity.
    """
    module = cached_layer(sibling, GQA_ROPE)
    x = jnp.asarray(random_tokens(GQA_ROPE, num_tokens=2))
    cache = filled_cache(sibling, module, [6, 1, 5])
    new_lengths = None if new_lengths is None else jnp.array(new_lengths, jnp.int32)
    output, _ = jitted_step(framework_weights(sibling, module), x, cache, new_lengths)
    assert np.isnan(output).all(axis=(1, 2)).tolist() == [True, False, True]


@only_jax
def test_jitted_overflow_keeps_old_tokens(sibling):
    """Under `jax.jit`, a sequence whose new tokens exceed the capacity keeps
    its length, keys and values.
    """
    module = cached_layer(sibling, GQA_ROPE)
    x = jnp.asarray(random_tokens(GQA_ROPE, num_tokens=2))
    cache = filled_cache(sibling, module, [6, 1, 5])
    _, appended = jitted_step(framework_weights(sibling, module), x, cache)
    assert appended.lengths.tolist() == [6, 3, 5]
    np.testing.assert_array_equal(appended.keys[jnp.array([0, 2])], cache.keys[jnp.array([0, 2])])
    np.testing.assert_array_equal(
        appended.values[jnp.array([0, 2])], cache.values[jnp.array([0, 2])]
    )


@only_jax
def test_jitted_overflow_is_per_sequence(sibling):
    """Under `jax.jit`, an overflow of two sequences changes neither
    output nor keys of the third.
    """
    module = cached_layer(sibling, GQA_ROPE)
    x = jnp.asarray(random_tokens(GQA_ROPE, num_tokens=2))
    params = framework_weights(sibling, module)
    output, appended = jitted_step(params, x, filled_cache(sibling, module, [6, 1, 5]))
    expected, expected_cache = jitted_step(params, x, filled_cache(sibling, module, [0, 1, 0]))
    assert_same_up_to_rounding(np.asarray(output[1]), np.asarray(expected[1]))
    assert_same_up_to_rounding(np.asarray(appended.keys[1]), np.asarray(expected_cache.keys[1]))


@only_jax
@pytest.mark.parametrize("new_lengths", [[3, 1, 0], [-1, 1, 0]], ids=["too-long", "negative"])
def test_jitted_invalid_new_lengths(sibling, new_lengths):
    """Under `jax.jit`, a new length out of range makes the output of its sequence
    NaN and keeps its length.
    """
    module = cached_layer(sibling, GQA_ROPE)
    x = jnp.asarray(random_tokens(GQA_ROPE, num_tokens=2))
    cache = filled_cache(sibling, module, [2, 2, 2])
    output, appended = jitted_step(
        framework_weights(sibling, module), x, cache, jnp.array(new_lengths, jnp.int32)
    )
    assert np.isnan(output).all(axis=(1, 2)).tolist() == [True, False, False]
    assert appended.lengths.tolist() == [2, 3, 2]


@only_jax
def test_cache_is_a_pytree_of_three_arrays(sibling):
    """`jax.tree.map` over a cache returns a `KVCache` with keys, values
    and lengths as its leaves.
    """
    cache = jax.tree.map(lambda leaf: leaf + 1, mha_jax.init_cache(2, 1, 3, 4))
    assert [leaf.shape for leaf in jax.tree.leaves(cache)] == [(2, 1, 3, 4), (2, 1, 3, 4), (2,)]
    assert isinstance(cache, mha_jax.KVCache)


@only_jax
def test_cache_can_be_donated(sibling):
    """After a step with a donated cache, the arrays of the old cache are deleted,
    but not the arrays of the new.
    """
    module = cached_layer(sibling, GQA_ROPE)
    x, cache = jnp.asarray(random_tokens(GQA_ROPE, num_tokens=2)), module.init_cache(3, NUM_TOKENS)
    _, appended = jax.jit(decode_step, donate_argnums=2)(
        framework_weights(sibling, module), x, cache
    )
    assert [leaf.is_deleted() for leaf in jax.tree.leaves((cache, appended))] == [True] * 3 + [
        False
    ] * 3


@only_jax
def test_decoding_in_scan_matches_full_pass(sibling):
    """Decoding token by token in `jax.lax.scan` gives the output of one causal pass."""
    module = cached_layer(sibling, GQA_ROPE)
    x = random_tokens(GQA_ROPE)

    def step(cache, token):
        output, cache = module(token[:, None], cache)
        return cache, output[:, 0]

    _, output = jax.lax.scan(step, module.init_cache(3, NUM_TOKENS), jnp.asarray(x.swapaxes(0, 1)))
    assert_same_up_to_rounding(np.asarray(output).swapaxes(0, 1), full_pass(sibling, GQA_ROPE, x))


@only_jax
def test_vmapped_step_matches_batched_step(sibling):
    """`jax.vmap` of a step over sequences gives the output of one step of the batch."""
    module = cached_layer(sibling, GQA_ROPE)
    params = framework_weights(sibling, module)
    inputs = (
        jnp.asarray(random_tokens(GQA_ROPE, num_tokens=2)),
        filled_cache(sibling, module, [4, 1, 0]),
    )
    each_a_batch = jax.tree.map(lambda array: array[:, None], inputs)
    output, _ = jax.jit(jax.vmap(decode_step, in_axes=(None, 0, 0)))(params, *each_a_batch)
    assert_same_up_to_rounding(
        np.asarray(output)[:, 0], np.asarray(jitted_step(params, *inputs)[0])
    )


# ---- Gradients and storage -----------------------------------------------------------------------


def assert_same_gradients(actual, expected):
    """Compare all gradients together, because the gradient of `k_proj.bias` is 0 by the formula:
    nothing but rounding.
    """
    __tracebackhide__ = True
    assert actual.keys() == expected.keys()
    flat = [
        np.concatenate([gradients[name].ravel() for name in expected])
        for gradients in (actual, expected)
    ]
    assert_same_up_to_rounding(*flat)


def torch_gradients(sibling, module, loss, x):
    """Gradients of the loss of a module and its input, of the input and of every weight."""
    with torch.enable_grad():
        x = sibling.array(x).requires_grad_()
        inputs = {"x": x, **dict(module.named_parameters())}
        gradients = torch.autograd.grad(loss(module, x), list(inputs.values()))
    return dict(zip(inputs, map(sibling.numpy, gradients), strict=True))


@only_torch
@every_spec
def test_torch_gradients_through_cache(sibling, spec):
    """In PyTorch, gradients of input and weights through two cached chunks equal the gradients of
    one pass.
    """

    def cached_loss(module, x):
        first, cache = module(x[:, :4], module.init_cache(3, NUM_TOKENS))
        return torch.cat([first, module(x[:, 4:], cache)[0]], dim=1).square().sum()

    x = random_tokens(spec)
    expected = torch_gradients(
        sibling,
        layer(sibling, "MultiHeadSelfAttention", spec),
        lambda module, x: module(x, is_causal=True).square().sum(),
        x,
    )
    assert_same_gradients(
        torch_gradients(sibling, cached_layer(sibling, spec), cached_loss, x), expected
    )


def jax_gradients(module, loss, x):
    """Gradients of the loss of a module and its input, of the input and of every weight."""
    gradients = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(module, jnp.asarray(x))
    return {str(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(gradients)}


@only_jax
@pytest.mark.parametrize(
    "name", ["mha", "fused-qkv-head-dim"]
)  # all specs would take 4 s more to compile
def test_jax_gradients_through_cache(sibling, name):
    """In JAX, gradients of input and weights through two cached chunks equal the gradients of one
    pass.
    """

    def cached_loss(module, x):
        first, cache = module(x[:, :4], module.init_cache(3, NUM_TOKENS))
        return jnp.square(jnp.concatenate([first, module(x[:, 4:], cache)[0]], axis=1)).sum()

    spec = SPECS[name]
    x = random_tokens(spec)
    expected = jax_gradients(
        layer(sibling, "MultiHeadSelfAttention", spec),
        lambda module, x: jnp.square(module(x, is_causal=True)).sum(),
        x,
    )
    assert_same_gradients(jax_gradients(cached_layer(sibling, spec), cached_loss, x), expected)


@only_torch
def test_torch_decoding_updates_in_place(sibling):
    """Without gradients, the new cache has the storage of the old one."""
    module = cached_layer(sibling, GQA_ROPE)
    cache = module.init_cache(3, NUM_TOKENS)
    _, appended = module(sibling.array(random_tokens(GQA_ROPE)), cache)
    assert (appended.keys.data_ptr(), appended.values.data_ptr()) == (
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
    )


@only_torch
def test_torch_training_keeps_the_old_cache(sibling):
    """With gradients enabled, the keys of the old cache stay 0."""
    module = cached_layer(sibling, GQA_ROPE)
    cache = module.init_cache(3, NUM_TOKENS)
    with torch.enable_grad():
        module(sibling.array(random_tokens(GQA_ROPE)), cache)
    assert not cache.keys.any()


@only_torch
def test_torch_decoding_in_inference_mode(sibling):
    """In `torch.inference_mode`, tokens fed in chunks give the output of one causal pass."""
    x = random_tokens(GQA_ROPE)
    with torch.inference_mode():
        output, _ = feed(sibling, cached_layer(sibling, GQA_ROPE), x, CHUNKS)
    assert_same_up_to_rounding(output, full_pass(sibling, GQA_ROPE, x))


# ---- Creating and measuring caches ---------------------------------------------------------------

every_dtype = pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["float32", "bfloat16", "float16"]
)


def framework_dtype(sibling, dtype):
    return sibling.array(np.zeros(1, dtype)).dtype


@sample(jax=1)
@every_dtype
def test_init_cache_creates_zeros(sibling, dtype):
    """Keys and values of a new cache are zeros of the requested dtype; lengths are int32 zeros."""
    keys, values, lengths = contents_of(
        sibling, sibling.package.init_cache(2, 3, 5, 4, framework_dtype(sibling, dtype))
    )
    np.testing.assert_array_equal(keys, np.zeros((2, 3, 5, 4), dtype), strict=True)
    np.testing.assert_array_equal(values, np.zeros((2, 3, 5, 4), dtype), strict=True)
    np.testing.assert_array_equal(lengths, np.zeros(2, np.int32), strict=True)


@sample(jax=1)
@every_dtype
def test_module_cache_uses_weight_dtype(sibling, dtype):
    """A cache of a module has the requested capacity and zeros in the
    dtype of the weights as keys.
    """
    cache = cached_layer(sibling, GQA_ROPE, dtype).init_cache(3, 5)
    assert cache.capacity == 5
    np.testing.assert_array_equal(
        sibling.numpy(cache.keys), np.zeros((3, 2, 5, 6), dtype), strict=True
    )


@sample(jax=1)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
def test_module_cache_accepts_dtype(sibling, dtype):
    """`init_cache` of a float32 module returns keys and values of the requested dtype."""
    cache = cached_layer(sibling, GQA_ROPE).init_cache(3, 5, framework_dtype(sibling, dtype))
    assert {sibling.numpy(cache.keys).dtype, sibling.numpy(cache.values).dtype} == {np.dtype(dtype)}


NAMES_OF_SIZES = ("batch_size", "num_kv_heads", "capacity", "head_dim")


@pytest.mark.parametrize(
    "sizes", [(-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)], ids=str
)
def test_invalid_cache_sizes_raise(sibling, sizes):
    """A negative batch size or number of heads, or a capacity or head
    width of 0, raises an error.
    """
    argument, size = next(item for item in zip(NAMES_OF_SIZES, sizes, strict=True) if item[1] != 1)
    with rejects(argument, {argument: size}):
        sibling.package.init_cache(*sizes)


def test_integer_cache_dtype_raises(sibling):
    """A cache of int32 raises an error."""
    with rejects_type("dtype", dtype=...):
        sibling.package.init_cache(1, 1, 1, 1, framework_dtype(sibling, np.int32))


def test_cache_with_wider_values(sibling, rng):
    """A cache with wider values than keys keeps both when it is appended to, grown, reordered or
    cropped; its size in bytes is as computed, and values of the wrong width raise an error.
    """
    cache = sibling.package.init_cache(2, 3, 5, 4, value_head_dim=6)
    keys, values, _ = contents_of(sibling, cache)
    assert (keys.shape, values.shape) == ((2, 3, 5, 4), (2, 3, 5, 6))
    nbytes = sibling.package.kv_cache_nbytes(2, 3, 5, 4, value_head_dim=6, dtype=cache.keys.dtype)
    assert nbytes == keys.nbytes + values.nbytes
    k, v = (rng.standard_normal((2, 3, 2, n)).astype(np.float32) for n in (4, 6))
    grown = sibling.package.append_to_cache(cache, sibling.array(k), sibling.array(v))
    for changed in (grown, grown.grow(7), grown.reorder([0, 1]), grown.crop(2)):
        keys, values, _ = contents_of(sibling, changed)
        assert np.array_equal(keys[:, :, :2], k)
        assert np.array_equal(values[:, :, :2], v)
        assert not values[:, :, 2:].any()
    with rejects("cache.values", {"cache.values.shape": (2, 3, 5, 6)}):
        sibling.package.append_to_cache(grown, sibling.array(k), sibling.array(k))


@sample(jax=1)
@every_dtype
def test_kv_cache_nbytes_matches_cache(sibling, dtype):
    """`kv_cache_nbytes` is the number of bytes of the keys and values of a cache."""
    dtype = framework_dtype(sibling, dtype)
    keys, values, _ = contents_of(sibling, sibling.package.init_cache(2, 3, 5, 4, dtype))
    assert sibling.package.kv_cache_nbytes(2, 3, 5, 4, dtype=dtype) == keys.nbytes + values.nbytes


@sample(jax=1)
@pytest.mark.parametrize(
    ("lengths", "seq_len_q", "capacity", "expected"),
    [
        ([1, 0], 1, 3, [["..#"], [".##"]]),
        ([0], 3, 4, [[".###", "..##", "...#"]]),
        ([2, 0], 2, 4, [["...#", "...."], [".###", "..##"]]),
        ([3], 1, 4, [["...."]]),
        ([3], 2, 4, [["....", "...."]]),
    ],
    ids=["one-token", "prefill", "ragged", "last-slot", "past-the-end"],
)
def test_cache_mask_hides_later_slots(sibling, lengths, seq_len_q, capacity, expected):
    """For each new token, the mask hides the slots after its own, as in literal tables."""
    mask = sibling.package.create_cache_mask(sibling.array(lengths), seq_len_q, capacity)
    table = np.array([[[[slot == "#" for slot in row] for row in rows]] for rows in expected])
    np.testing.assert_array_equal(sibling.numpy(mask), table, strict=True)


def test_cache_mask_accepts_list_of_lengths(sibling):
    """`create_cache_mask` accepts lengths as a list, as in the example of its docstring."""
    mask = sibling.package.create_cache_mask([1, 0], 1, 3)
    assert sibling.numpy(mask).tolist() == [[[[False, False, True]]], [[[False, True, True]]]]
