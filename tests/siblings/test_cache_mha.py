"""The key/value cache in every implementation: tokens in any chunks give the results of one causal
pass.
"""

import ml_dtypes
import numpy as np
import pytest
from helpers.input_errors import rejects
from helpers.samples import sample
from helpers.siblings import DTYPES, contents_of

from mha_spec import AttentionSpec, Latent, Rope

NUM_TOKENS = (
    6  # and slots: few and always the same shapes, because JAX compiles each operation per shape
)
CHUNKS = [4, 1, 1]
SPECS = {
    "mha": AttentionSpec(24, 4),
    "gqa-rope": AttentionSpec(24, 4, num_kv_heads=2, rope=Rope(10000.0)),
    "mqa-no-out-proj": AttentionSpec(24, 4, num_kv_heads=1, qkv_bias=False, out_proj=False),
    "fused-qkv-head-dim": AttentionSpec(
        24, 4, num_kv_heads=2, head_dim=10, fused_qkv=True, rope=Rope(500.0)
    ),
}
GQA_ROPE = SPECS["gqa-rope"]
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
wide = {name: dtype for name, dtype in DTYPES.items() if name != "float16"}
every_dtype = pytest.mark.parametrize("dtype", wide.values(), ids=wide)
junk = pytest.mark.parametrize("value", [1.0, -65504.0, None], ids=["one", "half", "huge"])


@pytest.fixture(autouse=True)
def _decoding(sibling):
    with sibling.without_gradients():
        yield


def random_tokens(num_tokens=NUM_TOKENS, dtype=np.float32, seed=1):
    """The first tokens of three sequences."""
    return (
        np.random.default_rng(seed)
        .standard_normal((3, NUM_TOKENS + 1, 24))[:, :num_tokens]
        .astype(dtype)
    )


def cached_layer(sibling, spec=GQA_ROPE, dtype=np.float32):
    return evaluated(sibling.filled("MultiHeadAttentionWithCache", spec, dtype=dtype))


def evaluated(module):
    module.eval()
    return module


def one_pass(sibling, spec, x):
    """The output of one causal pass over all tokens, without a cache."""
    module = evaluated(sibling.filled("MultiHeadSelfAttention", spec, dtype=x.dtype))
    return sibling.without_padding(
        sibling.numpy(sibling.call(module, sibling.array(x), is_causal=True)), spec
    )


def feed(sibling, module, x, chunks, capacity=NUM_TOKENS):
    """The outputs of all tokens, and the cache, after feeding them in chunks of these sizes."""
    cache, outputs = module.init_cache(len(x), capacity), []
    for chunk in np.split(x, np.cumsum(chunks)[:-1], axis=1):
        output, cache = sibling.call(module, sibling.array(chunk), cache)
        outputs.append(sibling.without_padding(sibling.numpy(output), module.spec))
    return np.concatenate(outputs, axis=1), cache


def filled_cache(sibling, module, lengths, dtype=np.float32, capacity=NUM_TOKENS):
    """A cache that holds the first few random tokens of each sequence."""
    x = sibling.array(random_tokens(max(*lengths, 1), dtype, seed=2))
    cache = module.init_cache(len(lengths), capacity)
    return module(x, cache, new_lengths=lengths)[1]


def units(dtype, number=4):
    """As many units of rounding of values of order 1: with their shapes, products add in a
    different order.
    """
    return number * float(ml_dtypes.finfo(dtype).eps)


# ---- One pass ------------------------------------------------------------------------------------


@sample(12, jax=1)
@pytest.mark.parametrize("chunks", [CHUNKS, [1] * NUM_TOKENS, [NUM_TOKENS], [3, 3]], ids=str)
@every_dtype
@every_spec
def test_chunks_equal_one_pass(sibling, spec, dtype, chunks):
    """Tokens in chunks of any size, until the cache is full, give the output of one causal pass."""
    x = random_tokens(dtype=dtype)
    output, cache = feed(sibling, cached_layer(sibling, spec, dtype), x, chunks)
    assert sibling.numpy(cache.lengths).tolist() == [NUM_TOKENS] * 3
    expected = one_pass(sibling, spec, x)
    sibling.assert_close(output, expected, within=units(dtype) * float(np.abs(expected).max()))


@sample(jax=1)
@every_dtype
def test_batch_is_its_sequences(sibling, dtype):
    """A batch has the outputs of each of its sequences alone."""
    x, module = random_tokens(dtype=dtype), cached_layer(sibling, dtype=dtype)
    together, _ = feed(sibling, module, x, CHUNKS)
    alone = np.concatenate([feed(sibling, module, sequence[None], CHUNKS)[0] for sequence in x])
    sibling.assert_close(together, alone, within=units(dtype) * float(np.abs(alone).max()))


# ---- Contents of the cache -----------------------------------------------------------------------


def test_lengths_count_real_tokens(sibling):
    """The lengths of a cache count the real tokens of each sequence, step by step, in int32."""
    module, x = cached_layer(sibling), sibling.array(random_tokens(2))
    cache, lengths = module.init_cache(3, NUM_TOKENS), []
    for new_lengths in ([2, 0, 1], None, [0, 1, 2]):
        _, cache = module(x, cache, new_lengths=new_lengths)
        assert sibling.numpy(cache.lengths).dtype == np.int32
        lengths.append(np.array(sibling.numpy(cache.lengths)).tolist())
    assert lengths == [[2, 0, 1], [4, 2, 3], [4, 3, 5]]


@sample(jax=1)
@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_new_lengths_may_be_an_array(sibling, dtype):
    """The numbers of new tokens may be an array of any integers."""
    module, x = cached_layer(sibling), sibling.array(random_tokens(2))
    new_lengths = sibling.option(np.array([1, 2, 0], dtype))
    _, cache = module(x, module.init_cache(3, NUM_TOKENS), new_lengths=new_lengths)
    assert sibling.numpy(cache.lengths).dtype == np.int32
    assert sibling.numpy(cache.lengths).tolist() == [1, 2, 0]


@sample(jax=1)
@pytest.mark.parametrize("part", ["keys", "values"])
def test_slots_beyond_the_length_are_zero(sibling, part):
    """Slots that hold no real token are zero, also after padding was passed."""
    module = cached_layer(sibling)
    _, cache = module(
        sibling.array(random_tokens(2)),
        filled_cache(sibling, module, [2, 4, 0]),
        new_lengths=[2, 0, 1],
    )
    slots = np.moveaxis(sibling.numpy(getattr(cache, part)), 1, 2)  # (B, S, K, H)
    is_beyond = np.arange(slots.shape[1]) >= np.array([4, 4, 1])[:, None]
    assert not slots[is_beyond].any()
    assert slots[~is_beyond].any(axis=(1, 2)).all()


@sample(jax=1)
@pytest.mark.parametrize("new_lengths", [[1, 4, 0], [0, 0, 0], [4, 4, 3]], ids=str)
@every_dtype
def test_padding_gives_zero(sibling, dtype, new_lengths):
    """The output of a padding token is zero, and the output of a real token is not."""
    module, x = cached_layer(sibling, dtype=dtype), sibling.array(random_tokens(4, dtype))
    output, _ = module(
        x, filled_cache(sibling, module, [2, 0, 4], dtype, capacity=8), new_lengths=new_lengths
    )
    is_padding = np.arange(4) >= np.array(new_lengths)[:, None]
    assert not sibling.numpy(output)[is_padding].any()
    assert (sibling.numpy(output)[~is_padding] != 0.0).all()


@sample(jax=1)
@pytest.mark.parametrize("num_new", [1, 4])
@every_dtype
def test_idle_sequence_keeps_its_cache(sibling, dtype, num_new):
    """A sequence without new tokens keeps the bits of its cache."""
    module = cached_layer(sibling, dtype=dtype)
    cache = filled_cache(sibling, module, [2, 0, 6], dtype)
    keys, values, _ = contents_of(sibling, cache)
    x = sibling.array(random_tokens(num_new, dtype))
    _, cache = module(x, cache, new_lengths=[0, num_new, 0])
    contents = contents_of(sibling, cache)
    assert np.array_equal(contents[0][[0, 2]], keys[[0, 2]])
    assert np.array_equal(contents[1][[0, 2]], values[[0, 2]])


@pytest.mark.parametrize(("num_kv_heads", "gib"), [(64, 20), (8, 2.5)])
def test_cache_nbytes_of_a_large_model(sibling, num_kv_heads, gib):
    """The cache of 80 layers and 8192 tokens takes 20 GiB with 64 heads of keys, 2.5 GiB with 8."""
    options = {"num_layers": 80, "dtype": sibling.dtype(DTYPES["bfloat16"])}
    assert sibling.package.kv_cache_nbytes(1, num_kv_heads, 8192, 128, **options) == gib * 2**30


# ---- Values without effect -----------------------------------------------------------------------


@sample(jax=1)
@junk
def test_later_token_changes_nothing_before(sibling, value):
    """Changing a token changes no bit of earlier outputs, and every output from there on."""
    module, x = cached_layer(sibling), random_tokens()
    before, _ = feed(sibling, module, x, [NUM_TOKENS])
    x[:, 4] = sibling.huge("plain") if value is None else value
    after, _ = feed(sibling, module, x, [NUM_TOKENS])
    assert np.array_equal(after[:, :4], before[:, :4])
    assert (after[:, 4:] != before[:, 4:]).any(axis=2).all()


@sample(jax=1)
@junk
@every_dtype
def test_padding_tokens_change_nothing(sibling, dtype, value):
    """The values of padding tokens change no bit of the output and the cache."""
    module, x, results = cached_layer(sibling, dtype=dtype), random_tokens(4, dtype), []
    value = sibling.huge("plain") if value is None else value
    is_padding = np.arange(4)[:, None] >= np.array([1, 4, 0])[:, None, None]
    for padding in (x, np.full_like(x, value)):
        tokens = sibling.array(np.where(is_padding, padding, x))
        output, cache = module(tokens, module.init_cache(3, NUM_TOKENS), new_lengths=[1, 4, 0])
        results.append([sibling.numpy(output), *contents_of(sibling, cache)])
    assert [np.array_equal(*pair) for pair in zip(*results, strict=True)] == [True] * 4


# ---- Capacity ------------------------------------------------------------------------------------

OVERFLOWS = {
    "prefill": ([0, 0, 0], 7, None),
    "by-one": ([5, 5, 5], 2, None),
    "full": ([6, 6, 6], 1, None),
    "one-full": ([6, 0, 0], 1, None),
    "one-by-one": ([2, 5, 4], 2, None),
    "ragged": ([2, 5, 4], 2, [1, 2, 0]),
    "ragged-full": ([0, 1, 6], 2, [0, 0, 1]),
    "ragged-step": ([0, 1, 6], 1, [0, 1, 1]),
}


@pytest.mark.parametrize("name", OVERFLOWS)
@every_dtype
def test_overflow_leaves_the_cache(sibling, dtype, name):
    """More tokens than slots raise an error, and the cache is unchanged."""
    filled, num_new, new_lengths = OVERFLOWS[name]
    module = cached_layer(sibling, dtype=dtype)
    cache = filled_cache(sibling, module, filled, dtype)
    before = contents_of(sibling, cache)
    x = sibling.array(random_tokens(num_new, dtype))
    with rejects("lengths + new tokens", lengths=filled, new_lengths=...):
        module(x, cache, new_lengths=new_lengths)
    assert [
        np.array_equal(*pair) for pair in zip(contents_of(sibling, cache), before, strict=True)
    ] == [True] * 3


# ---- Copies, and caches that a step has written over ---------------------------------------------

LATENT = AttentionSpec(
    24, 2, head_dim=12, latent=Latent(32, 4), rope=Rope(rotary_dim=4, rotated="last")
)
KINDS = {"MultiHeadAttentionWithCache": GQA_ROPE, "MultiHeadLatentAttention": LATENT}


def begun(sibling, kind):
    """Return a module, a cache of four tokens, and the next token."""
    module = evaluated(sibling.filled(kind, KINDS[kind]))
    _, cache = sibling.call(
        module, sibling.array(random_tokens(4)), module.init_cache(3, NUM_TOKENS)
    )
    return module, cache, sibling.array(random_tokens(1, seed=2))


def test_copied_cache_goes_back(sibling):
    """A copy of a cache is not changed by steps from the cache, and continues as the cache would
    have.
    """
    for kind in KINDS:
        module, cache, token = begun(sibling, kind)
        copied, again = cache.copy(), cache.copy()
        before = [np.array(sibling.numpy(x)) for x in copied.slots.values()]
        sibling.call(module, sibling.array(random_tokens(1, seed=3)), cache)
        assert all(map(np.array_equal, before, map(sibling.numpy, copied.slots.values()))), kind
        assert np.asarray(copied.lengths).tolist() == [4, 4, 4]
        results = [sibling.call(module, token, cache_of_call) for cache_of_call in (copied, again)]
        assert np.array_equal(*(sibling.numpy(output) for output, _ in results)), kind
        assert type(copied) is type(cache)


def test_written_cache_is_not_used_again(sibling):
    """A cache whose storage a step has written into raises an error at its next use. Arrays of JAX
    never change.
    """
    for kind in KINDS:
        module, cache, token = begun(sibling, kind)
        _, after = sibling.call(module, token, cache)
        uses = {
            "step": lambda module=module, token=token, cache=cache: sibling.call(
                module, token, cache
            ),
            "copy": cache.copy,
            "reorder": lambda cache=cache: cache.reorder([2, 1, 0]),
            "repeat": lambda cache=cache: cache.repeat(2),
            "grow": lambda cache=cache: cache.grow(NUM_TOKENS + 2),
            "crop": lambda cache=cache: cache.crop(3),
        }
        if sibling.name == "jax":
            assert uses["step"]()[1].lengths.tolist() == [5, 5, 5]
            continue
        for use in uses.values():
            with rejects("cache", hint="cache.copy()"):
                use()
        assert np.asarray(module(token, after)[1].lengths).tolist() == [6, 6, 6]


def test_appending_writes_over_a_cache(sibling):
    """Appending also writes over a cache; a step that ends with an error in the kernel can be
    repeated.
    """
    if sibling.name == "jax":
        return
    cache = sibling.init_cache(1, 2, NUM_TOKENS, 32)
    new = sibling.array(np.ones((1, 2, 1, 32), sibling.kernel_dtype))
    sibling.package.append_to_cache(cache, new, new)
    with rejects("cache", hint="cache.copy()"):
        sibling.package.append_to_cache(cache, new, new)

    module, cache, token = begun(sibling, "MultiHeadAttentionWithCache")
    usual = module.kernel

    def fails(*args):
        raise KeyError

    module.kernel = fails
    with pytest.raises(KeyError):
        module(token, cache)
    module.kernel = usual
    assert np.asarray(module(token, cache)[1].lengths).tolist() == [5, 5, 5]
