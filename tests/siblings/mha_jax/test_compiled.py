"""mha_jax compiles once per shape without `jit`, and no check requires the value of a traced
array.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample

import mha_jax
from mha_jax.kernels.fused import FusedAttention
from mha_spec import AttentionSpec, Rope, Temperature

LONG = 600  # more scores than fit in one kernel


@pytest.fixture
def compilations():
    """Compilation events so far, including those served from the disk cache."""
    events = []

    def note(event, _, **__):
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield events
    jax.monitoring.unregister_event_duration_listener(note)


def tokens(seq_len, batch_size=1):
    return jnp.asarray(
        np.random.default_rng(0).standard_normal((batch_size, seq_len, 32)), jnp.float32
    )


@pytest.fixture(scope="module")
def layer():
    return mha_jax.MultiHeadSelfAttention(AttentionSpec(32, 4), rngs=nnx.Rngs(0))


def test_length_may_be_symbolic_in_export(layer):
    """An exported program with a symbolic number of tokens serves short and long sequences."""
    shape = jax.export.symbolic_shape("b, t, 32")
    program = jax.export.export(jax.jit(lambda x: layer(x, is_causal=True)))(
        jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    for seq_len in (5, LONG):
        x = tokens(seq_len)
        np.testing.assert_allclose(program.call(x), layer(x, is_causal=True), atol=1e-5)


@pytest.mark.parametrize("capacity", [mha_jax.fused.attend.keys + 1, 2 * mha_jax.fused.attend.keys])
def test_decoding_compiles_only_once(compilations, capacity):
    """After the first step, 32 steps of decoding compile nothing."""
    decoder, x = (
        mha_jax.MultiHeadAttentionWithCache(
            AttentionSpec(32, 4, rope=Rope(100.0)), rngs=nnx.Rngs(0)
        ),
        tokens(1),
    )
    cache = decoder.init_cache(1, capacity)
    _, cache = decoder(x, cache)
    assert compilations
    compilations.clear()
    for _ in range(32):
        _, cache = decoder(x, cache)
    assert cache.lengths.tolist() == [33]
    assert compilations == []


CALLS = {
    "full": lambda layer, x: layer(x),
    "causal": lambda layer, x: layer(x, is_causal=True),
    "padding": lambda layer, x: layer(x, key_padding_lengths=[LONG - 1]),
    "mask": lambda layer, x: layer(x, mask=mha_jax.create_sliding_window_mask(LONG, window_size=9)),
    "bias": lambda layer, x: layer(x, bias=jnp.zeros((1, LONG))),
    "gradient": lambda layer, x: jax.grad(lambda x: layer(x, is_causal=True).sum())(x),
    "gradient-of-weights": lambda layer, x: nnx.grad(lambda layer: layer(x, is_causal=True).sum())(
        layer
    ),
    "map": lambda layer, x: jax.vmap(lambda x: layer(x[None], is_causal=True))(x),
}


@sample(call=[CALLS["mask"], CALLS["gradient"]])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_second_call_compiles_nothing(compilations, layer, call):
    """A second call in blocks, of any kind, compiles nothing."""
    x = tokens(LONG)
    call(layer, x)
    compilations.clear()
    call(layer, x)
    assert compilations == []


def test_other_block_size_recompiles(
    compilations, layer
):  # shows that the tests above detect compilations
    """Control: a different block size is compiled again, and matches within 1e-5."""
    x = tokens(LONG)
    expected = layer(x, is_causal=True)
    other = nnx.clone(layer)
    other.kernel = FusedAttention(keys=64)
    compilations.clear()
    np.testing.assert_allclose(
        other(x, is_causal=True), expected, atol=1e-5
    )  # different summation order
    assert compilations


def test_traced_call_is_one_program(layer):
    """A traced call contains no separately compiled function."""
    jaxpr = str(jax.make_jaxpr(lambda x: layer(x, is_causal=True))(tokens(9)))
    assert "_attend" not in jaxpr


# ---- Concrete weights with traced inputs ---------------------------------------------------------

TRANSFORMED = {
    "jit": lambda function, x: jax.jit(function)(x),
    "eval_shape": lambda function, x: jax.eval_shape(function, x),
    "vmap": lambda function, x: jax.vmap(lambda x: function(x[None])[0])(x),
    "scan": lambda function, x: jax.lax.scan(lambda carry, x: (carry, function(x[None])[0]), 0, x)[
        1
    ],
    "grad": lambda function, x: jax.grad(lambda x: function(x).sum())(x),
    "jit-grad": lambda function, x: jax.jit(jax.grad(lambda x: function(x).sum()))(x),
}
every_transformation = pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
every_kind_of_weights = pytest.mark.parametrize(
    "kind", [jnp.asarray, np.asarray], ids=["jax", "numpy"]
)


def weights_of(layer, kind):
    return jax.tree.map(kind, nnx.to_pure_dict(nnx.state(layer, nnx.Param)))


@every_kind_of_weights
@every_transformation
def test_weights_can_be_closed_over(layer, transform, kind):
    """A transformed function with weights as constants gives the output of the layer."""
    weights, x = weights_of(layer, kind), tokens(5, batch_size=3)
    actual = transform(lambda x: mha_jax.multi_head_attention(x, weights, layer.spec)[0], x)
    assert actual.shape == x.shape
    if isinstance(actual, jax.Array):
        expected = transform(layer, x)
        np.testing.assert_allclose(actual, expected, atol=1e-6)  # different summation order


@every_kind_of_weights
@pytest.mark.parametrize(
    "transform", [TRANSFORMED["jit"], TRANSFORMED["eval_shape"]], ids=["jit", "eval_shape"]
)
def test_cached_call_can_close_over_weights(layer, transform, kind):
    """Compiled functions with a cache accept weights as constants."""
    weights, x = weights_of(layer, kind), tokens(5, batch_size=3)
    cache = mha_jax.init_cache(3, 4, 8, 8)

    def function(x):
        return mha_jax.multi_head_attention_with_cache(x, weights, layer.spec, cache)[0]

    assert transform(function, x).shape == x.shape


@pytest.mark.parametrize("kind", [list, np.array], ids=["list", "array"])
def test_concrete_lengths_are_checked_in_jit(layer, kind):
    """Lengths beyond the tokens raise an error under jit if they are constants."""
    with rejects("key_padding_lengths", key_padding_lengths=[6]):
        jax.jit(lambda x: layer(x, key_padding_lengths=kind([6])))(tokens(5))


def test_concrete_new_lengths_checked_in_jit():
    """Constant new_lengths beyond the capacity raise an error under jit."""
    decoder = mha_jax.MultiHeadAttentionWithCache(AttentionSpec(32, 4), rngs=nnx.Rngs(0))
    step = jax.jit(lambda x, cache: decoder(x, cache, new_lengths=[5]))
    with rejects("lengths + new tokens", lengths=[0], new_lengths=[5]):
        step(tokens(5), decoder.init_cache(1, 4))


# ---- NumPy and memory ----------------------------------------------------------------------------


def test_arguments_can_be_numpy_arrays(layer):
    """Inputs and masks of NumPy have the same results as JAX's, bit for bit."""
    x, mask = tokens(5), np.triu(np.ones((5, 5), np.bool_), 1)
    expected = layer(x, mask=jnp.asarray(mask))
    np.testing.assert_array_equal(layer(np.asarray(x), mask=mask), expected)


def test_random_keys_are_no_lengths():
    """Random keys, which are arrays of a dtype of their own, raise an error as lengths."""
    with rejects_type("lengths", {"lengths.dtype": ...}):
        mha_jax.create_padding_mask(jax.random.split(jax.random.key(0), 2), 3)


def test_cache_can_be_numpy_arrays():
    """A step over a cache of NumPy arrays gives the same bits, and a cache of JAX arrays."""
    decoder, x = (
        mha_jax.MultiHeadAttentionWithCache(
            AttentionSpec(32, 4, rope=Rope(100.0)), rngs=nnx.Rngs(0)
        ),
        tokens(3),
    )
    _, cache = decoder(x, decoder.init_cache(1, 8))
    expected, after = decoder(x[:, :1], cache)
    actual, after_numpy = decoder(x[:, :1], jax.tree.map(np.asarray, cache))
    np.testing.assert_array_equal(actual, expected)
    jax.tree.map(np.testing.assert_array_equal, after_numpy, after)
    assert all(isinstance(part, jax.Array) for part in jax.tree.leaves(after_numpy))


MASKS = {
    "causal": mha_jax.create_causal_mask,
    "window": lambda size: mha_jax.create_sliding_window_mask(size, window_size=7),
    "attention": lambda size: mha_jax.create_attention_mask(
        size, is_causal=True, key_padding_lengths=[size - 1]
    ),
    "cached": lambda size: mha_jax.create_causal_mask_with_cache(size, size, 0),
}


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_mask_needs_no_large_temporaries(make):
    """The compiled functions of masks need temporary memory below half the size of the mask."""
    analysis = jax.jit(make, static_argnums=0).lower(1024).compile().memory_analysis()
    assert analysis.output_size_in_bytes == 1024**2
    assert analysis.temp_size_in_bytes < 1024**2 / 2


def test_finite_values_pass_debug_nans(layer):
    """With jax.debug_nans, finite inputs raise no error and give finite outputs."""
    with jax.debug_nans(True):
        output = layer(tokens(LONG), is_causal=True, key_padding_lengths=[LONG - 9])
        layer(tokens(9), mask=jnp.ones((1, 1), bool))
    assert np.isfinite(output).all()


def test_temperature_can_be_jit_argument():
    """apply_temperature under jit, with the temperature as an argument, gives the same values."""
    inputs = jnp.ones((1, 2, 6, 4)), jnp.arange(6)[None], Temperature(2)
    expected = mha_jax.apply_temperature(*inputs)
    assert jnp.allclose(jax.jit(mha_jax.apply_temperature)(*inputs), expected, rtol=1e-6)
