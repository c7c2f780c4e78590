"""Latent attention over expanded keys and values, or over the latents themselves, matches the
formulas.
"""

import numpy as np
import pytest
import ttnn
from helpers.tt.formulas import (
    assert_close,
    both_dtypes,
    every_dtype,
    full_pass,
    layer,
    module_of,
    rounded,
    rounded_weights,
)

import mha_tt
import parity
from mha_spec import Latent
from mha_tt.layout import feature_indices_of, padded_features

KERNEL = "ttnn.transformer.scaled_dot_product_attention"

SPECS = {  # no width fills whole tiles, and the blocks of a head need different numbers of tiles
    "interleaved": parity.AttentionSpec(
        24,
        3,
        head_dim=10,
        value_head_dim=7,
        qkv_bias=False,
        latent=Latent(9, 4),
        rope=parity.Rope(500.0, rotary_dim=4, rotated="last", pairs="interleaved"),
    ),
    "half-of-two-latents": parity.AttentionSpec(
        24,
        4,
        head_dim=44,
        value_head_dim=40,
        latent=Latent(70, 6, q_rank=13, eps=0.1, q_factor=1.6, kv_factor=0.75),
        rope=parity.Rope(500.0, rotary_dim=6, rotated="last"),
    ),
    "no-rope": parity.AttentionSpec(24, 2, head_dim=12, latent=Latent(33, 5), out_bias=False),
}
TWO_LATENTS = SPECS["half-of-two-latents"]
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
either_way = pytest.mark.parametrize("absorb", [False, True], ids=["expanded", "absorbed"])


def random_tokens(num_tokens, dtype, batch=3):
    return rounded(np.random.default_rng(1).standard_normal((batch, num_tokens, 24)), dtype)


def latent_layer(spec, device, dtype, **options):
    return module_of("MultiHeadLatentAttention", spec, device, dtype, **options)


def feed(step, x, chunks, cache, dtype):
    """Return the outputs of all tokens, fed in chunks of these sizes to `step(x, cache)`, and the
    cache.
    """
    outputs = []
    for chunk in np.split(x, np.cumsum(chunks)[:-1], axis=1):
        output, cache = step(
            mha_tt.upload(chunk, device=cache.latents.device(), dtype=dtype), cache
        )
        outputs.append(mha_tt.download(output))
    return np.concatenate(outputs, axis=1), cache


def by_function(module, absorb):
    """Return a step that calls the function with the weights of a module."""

    def step(x, cache):
        return mha_tt.multi_head_latent_attention(
            x, module.weights, module.spec, cache, absorb=absorb
        )

    return step


# ---- Weights -------------------------------------------------------------------------------------


@pytest.mark.board
@every_dtype
@every_spec
def test_latent_weights_round_trip(device, spec, dtype):
    """Latent weights are downloaded and uploaded again bit for bit; in bfloat8_b, the tensors on
    the device are the same.
    """
    weights = rounded_weights(spec, ttnn.bfloat16 if dtype == ttnn.bfloat8_b else dtype)
    uploaded = mha_tt.upload_weights(weights, spec, device=device, dtype=dtype)
    again = mha_tt.upload_weights(
        mha_tt.download_weights(uploaded, spec), spec, device=device, dtype=dtype
    )
    for name, weight in weights.items():
        assert np.array_equal(mha_tt.download(again[name]), mha_tt.download(uploaded[name]))
        if dtype != ttnn.bfloat8_b:  # which rounds
            assert np.array_equal(mha_tt.download_weights(uploaded, spec)[name], weight)


def test_blocks_of_a_head_begin_at_tiles():
    """Each block of a head begins at a tile, and its rotated pairs are a tile apart."""
    # A head's own 38 features take 64 slots; 3 shared pairs begin there, their second features one
    # tile later.
    expected = {
        "q_b_proj": [*range(38), 64, 65, 66, 96, 97, 98],
        "kv_a_proj": [*range(70), 96, 97, 98, 128, 129, 130],
        "kv_b_proj": [*range(38), *range(64, 104)],
    }
    actual = {name: feature_indices_of(name, TWO_LATENTS).tolist() for name in expected}
    assert actual == expected
    features = {
        name: padded_features(name, TWO_LATENTS) for name in ("q_b_proj", "kv_a_proj", "v_proj")
    }
    assert features == {"q_b_proj": 128, "kv_a_proj": 160, "v_proj": 64}


# ---- Without a cache -----------------------------------------------------------------------------


@pytest.mark.board
@both_dtypes
@every_spec
@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
def test_layer_matches_formulas(device, need_weights, spec, dtype):
    """Output and attention weights of a causal layer over latents match the formulas."""
    x, weights = random_tokens(35, dtype), rounded_weights(spec, dtype)
    uploaded = mha_tt.upload_weights(weights, spec, device=device, dtype=dtype)
    output, attn_weights = mha_tt.multi_head_attention(
        mha_tt.upload(x, device=device, dtype=dtype),
        uploaded,
        spec,
        is_causal=True,
        need_weights=need_weights,
    )
    expected, expected_weights = layer(spec, weights, x, mask=mha_tt.create_causal_mask(35))
    assert_close(mha_tt.download(output), expected, dtype)
    if need_weights:
        assert_close(mha_tt.download(attn_weights), expected_weights, dtype)


@both_dtypes
def test_module_uploads_its_rotations_once(device, uploads, dtype):
    """A second call of a module uploads nothing, and matches the formulas."""
    module, x = (
        module_of("MultiHeadSelfAttention", TWO_LATENTS, device, dtype),
        random_tokens(9, dtype),
    )
    on_device = mha_tt.upload(x, device=device, dtype=dtype)
    module(on_device, is_causal=True)
    uploads.clear()
    assert_close(
        mha_tt.download(module(on_device, is_causal=True)), full_pass(TWO_LATENTS, dtype, x), dtype
    )
    assert uploads == []


@pytest.mark.board
@both_dtypes
def test_layer_accepts_empty_input(device, dtype):
    """A layer without sequences or tokens returns an empty output, with and without a cache."""
    module = latent_layer(TWO_LATENTS, device, dtype)
    for shape in ((0, 4, 24), (3, 0, 24)):
        x = mha_tt.upload(np.zeros(shape), device=device, dtype=dtype)
        assert tuple(mha_tt.multi_head_attention(x, module.weights, TWO_LATENTS)[0].shape) == shape
        assert tuple(module(x, module.init_cache(shape[0], 8))[0].shape) == shape


# ---- With a cache --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "dtype"),
    [([5, 28, 1, 1, 5], ttnn.float32), ([33, 1, 6], ttnn.bfloat16), ([1] * 3, ttnn.bfloat16)],
    ids=str,
)
def test_latent_chunks_equal_one_pass(device, chunks, dtype):
    module, x = latent_layer(TWO_LATENTS, device, dtype), random_tokens(sum(chunks), dtype)
    output, cache = feed(module, x, chunks, module.init_cache(3, 45), dtype)
    assert_close(output, full_pass(TWO_LATENTS, dtype, x), dtype)
    assert cache.lengths.tolist() == [sum(chunks)] * 3


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [*((spec, ttnn.bfloat16) for spec in SPECS.values()), (TWO_LATENTS, ttnn.float32)],
)
@either_way
def test_both_latent_forms_match_full_pass(device, absorb, spec, dtype):
    """Steps with absorbed or expanded latents match one full pass."""
    module, x = latent_layer(spec, device, dtype), random_tokens(8, dtype)
    output, _ = feed(by_function(module, absorb), x, [4, 3, 1], module.init_cache(3, 8), dtype)
    assert_close(output, full_pass(spec, dtype, x), dtype)


@both_dtypes
def test_kv_cache_matches_full_pass(device, dtype):
    """A layer over latents with a cache of keys and values matches one full pass."""
    module, x = (
        module_of("MultiHeadAttentionWithCache", TWO_LATENTS, device, dtype),
        random_tokens(9, dtype),
    )
    cache, outputs = module.init_cache(3, 12), []
    for chunk in np.split(x, [6, 7], axis=1):
        output, cache = module(mha_tt.upload(chunk, device=device, dtype=dtype), cache)
        outputs.append(mha_tt.download(output))
    assert_close(np.concatenate(outputs, axis=1), full_pass(TWO_LATENTS, dtype, x), dtype)


@pytest.mark.board
@both_dtypes
@pytest.mark.parametrize(
    "steps", [[(3, 6, 1), (1, 0, 1), (0, 2, 3)], [(31, 32, 33), (1, 1, 0)]], ids=str
)
def test_ragged_latents_equal_each_alone(device, steps, dtype):
    x, module = random_tokens(40, dtype), latent_layer(TWO_LATENTS, device, dtype)
    cache, output, num_fed = module.init_cache(3, 40), np.zeros(x.shape), np.zeros(3, int)
    for new_lengths in np.array(steps):
        new_tokens = np.full((3, new_lengths.max(), 24), np.nan)  # in the padding
        is_new = np.arange(new_lengths.max()) < new_lengths[:, None]
        rows, columns = np.nonzero(is_new)
        rows_and_columns = rows, num_fed[rows] + columns
        new_tokens[is_new] = x[rows_and_columns]
        stepped, cache = module(
            mha_tt.upload(new_tokens, device=device, dtype=dtype), cache, new_lengths=new_lengths
        )
        stepped = mha_tt.download(stepped)
        output[rows_and_columns] = stepped[is_new]
        assert not stepped[~is_new].any()
        num_fed += new_lengths
    is_fed = np.arange(40) < num_fed[:, None]
    assert cache.lengths.tolist() == num_fed.tolist()
    assert_close(output, np.where(is_fed[..., None], full_pass(TWO_LATENTS, dtype, x), 0.0), dtype)


@pytest.mark.board
@either_way
def test_bfloat8_b_latents_match_full_pass(device, absorb):
    """Steps over latents in bfloat8_b match one full pass within the tolerance of that dtype."""
    module, x = latent_layer(TWO_LATENTS, device, ttnn.bfloat16), random_tokens(8, ttnn.bfloat16)
    cache = module.init_cache(3, 8, ttnn.bfloat8_b)
    output, cache = feed(by_function(module, absorb), x, [5, 2, 1], cache, ttnn.bfloat16)
    assert cache.latents.dtype == ttnn.bfloat8_b
    assert_close(output, full_pass(TWO_LATENTS, ttnn.bfloat16, x), ttnn.bfloat8_b)


@both_dtypes
def test_cached_latents_expand_to_keys(device, dtype):
    """Appended latents expand to the keys and values of the layer, and to 0 in free slots."""
    weights, x = rounded_weights(TWO_LATENTS, dtype), random_tokens(6, dtype)
    uploaded = mha_tt.upload_weights(weights, TWO_LATENTS, device=device, dtype=dtype)
    project = mha_tt.project_with(uploaded, TWO_LATENTS)
    on_device = mha_tt.upload(x, device=device, dtype=dtype)
    q, latents = mha_tt.project_latents(project, on_device, TWO_LATENTS)
    cache = mha_tt.init_latent_cache(3, 6, 70, 6, dtype, device=device)
    cache = mha_tt.append_to_latent_cache(cache, latents, new_lengths=[6, 0, 4])
    actual = mha_tt.expand_latents(project, cache.latents[:, :, :6], TWO_LATENTS)
    expected = mha_tt.project_qkv(project, on_device, on_device, on_device, TWO_LATENTS)
    assert np.array_equal(mha_tt.download(q), mha_tt.download(expected[0]))
    is_cached = (np.arange(6) < np.array([6, 0, 4])[:, None])[:, None, :, None]
    for cached, new in zip(actual, expected[1:], strict=True):
        assert_close(mha_tt.download(cached), np.where(is_cached, mha_tt.download(new), 0.0), dtype)


@pytest.mark.board
@both_dtypes
def test_changed_cache_decodes_correctly(device, dtype):
    """After cropping, reordering, repeating and growing a cache, a step equals a full pass of each
    new sequence.
    """
    module, x = latent_layer(TWO_LATENTS, device, dtype), random_tokens(7, dtype)
    _, cache = feed(module, x[:, :6], [6], module.init_cache(3, 7), dtype)
    changed = cache.crop([4, 5, 5]).reorder([2, 0]).repeat(2).grow(40)
    assert (changed.capacity, changed.lengths.tolist()) == (40, [5, 5, 4, 4])
    output, _ = module(mha_tt.upload(x[[2, 2, 0, 0], 6:], device=device, dtype=dtype), changed)
    for row, (sequence, length) in enumerate([(2, 5), (2, 5), (0, 4), (0, 4)]):
        fed = np.concatenate([x[sequence, :length], x[sequence, 6:]])[None]
        assert_close(
            mha_tt.download(output)[row, -1], full_pass(TWO_LATENTS, dtype, fed)[0, -1], dtype
        )


@pytest.mark.board
def test_step_over_latents_uses_step_kernel(device, calls):
    """A step of 40 heads runs the kernel for one token over 32 heads and the last 8 tripled, and
    matches one full pass.
    """
    # More heads than fit on a core, each as wide as a latent: 40 run as 32, and the last 8 three
    # times each.
    spec = parity.AttentionSpec(
        24, 40, head_dim=12, value_head_dim=8, latent=Latent(310, 4), qkv_bias=False
    )
    module, x = latent_layer(spec, device, ttnn.bfloat16), random_tokens(7, ttnn.bfloat16, batch=2)
    _, cache = feed(module, x[:, :6], [6], module.init_cache(2, 40), ttnn.bfloat16)
    calls.clear()
    output, _ = feed(module, x[:, 6:], [1], cache, ttnn.bfloat16)
    taken = [
        call
        for call in calls
        if call.name == "ttnn.transformer.scaled_dot_product_attention_decode"
    ]
    assert [call.arguments[0].shape[2] for call in taken] == [32, 24]
    assert all(call.arguments[1] is call.arguments[2] is cache.latents for call in taken)
    assert_close(output, full_pass(spec, ttnn.bfloat16, x)[:, 6:], ttnn.bfloat16)


@pytest.mark.board
def test_bad_step_width_uses_prompt_kernel(device, calls):
    """For latents 576 wide, which the step kernel computes wrongly, steps use the prompt kernel and
    match one full pass.
    """
    rope = parity.Rope(500.0, rotary_dim=64, rotated="last")
    spec = parity.AttentionSpec(
        24, 20, head_dim=72, value_head_dim=8, latent=Latent(512, 64), rope=rope
    )
    x = random_tokens(6, ttnn.bfloat16)
    module = latent_layer(spec, device, ttnn.bfloat16)
    outputs, _ = feed(module, x, (4, 1, 1), module.init_cache(3, 8), ttnn.bfloat16)
    taken = [call for call in calls if "scaled_dot_product_attention" in call.name]
    assert [(call.name, call.arguments[1].shape[3]) for call in taken][2:] == [(KERNEL, 576)] * 4
    assert_close(outputs, full_pass(spec, ttnn.bfloat16, x), ttnn.bfloat16)


@both_dtypes
def test_kv_b_weights_are_made_once_per_load(device, dtype):
    """Weights of heads are kept between steps, and made again after load_weights."""
    module, x = latent_layer(TWO_LATENTS, device, dtype), random_tokens(4, dtype)
    _, cache = feed(module, x[:, :2], [1, 1], module.init_cache(3, 4), dtype)
    weights_of_heads = module._kv_b()
    _, cache = feed(module, x[:, 2:3], [1], cache, dtype)
    assert module._kv_b() is weights_of_heads
    others = {**rounded_weights(TWO_LATENTS, dtype)}
    others["kv_b_proj.weight"] = others["kv_b_proj.weight"][::-1]
    module.load_weights(others)
    output, _ = feed(module, x, [1] * 4, module.init_cache(3, 4), dtype)
    expected, _ = layer(TWO_LATENTS, others, x, mask=mha_tt.create_causal_mask(4))
    assert_close(output, expected, dtype)
    assert module._kv_b() is not weights_of_heads


@pytest.mark.board
def test_dropout_is_active_in_training(device):
    """In training mode, dropout of attention weights changes the output of every token."""
    spec, x = (
        parity.AttentionSpec(24, 2, head_dim=12, latent=Latent(33, 5), dropout=0.5),
        random_tokens(4, ttnn.bfloat16),
    )
    module = latent_layer(spec, device, ttnn.bfloat16, rng=np.random.default_rng(0))
    whole, _ = feed(module, x, [3, 1], module.init_cache(3, 4), ttnn.bfloat16)
    dropped, _ = feed(module.train(), x, [3, 1], module.init_cache(3, 4), ttnn.bfloat16)
    assert (dropped != whole).any(axis=2).all()
