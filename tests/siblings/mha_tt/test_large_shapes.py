"""Tests that programs with the shapes of large models fit into the memory of a core and of the
board.

A mock board validates them without computing, so only shapes are compared here; a card runs them.
"""

from dataclasses import replace

import numpy as np
import pytest
import ttnn
from helpers.heads import fused_attention

import mha_tt
import parity
from mha_spec import Latent

pytestmark = [pytest.mark.board, pytest.mark.thorough]

LLAMA = parity.AttentionSpec(
    4096, 32, num_kv_heads=8, rope=parity.Rope(500000.0), qkv_bias=False, out_bias=False
)

cache_dtypes = pytest.mark.parametrize(
    "dtype", [ttnn.bfloat16, ttnn.bfloat8_b], ids=["bfloat16", "bfloat8_b"]
)


def zeros(device, *shape, dtype=ttnn.bfloat16):
    """Create zeros on the device, because the host takes seconds for this many."""
    made_as = ttnn.bfloat16 if dtype == ttnn.bfloat8_b else dtype
    tensor = ttnn.zeros(shape, dtype=made_as, layout=ttnn.TILE_LAYOUT, device=device)
    return tensor if made_as == dtype else ttnn.typecast(tensor, dtype)


@pytest.fixture(scope="module")
def llama(opened_device):
    """A layer of a large model; its weights take a while to upload."""
    return mha_tt.MultiHeadAttentionWithCache(LLAMA, device=opened_device)


@cache_dtypes
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fused_attention_fits_8192_tokens(opened_device, head_dim, dtype):
    """Fused attention of 32 heads over 8192 tokens fits for head widths of 64 to 256."""
    query, key, value = (
        zeros(opened_device, 1, heads, 8192, head_dim, dtype=dtype) for heads in (32, 8, 8)
    )
    context, _ = fused_attention(mha_tt)(query, key, value, is_causal=True)
    assert tuple(context.shape) == (1, 32, 8192, head_dim)


def test_fused_attention_fits_large_mask(opened_device):
    """Fused attention of 32 heads with a window mask of 4095 x 4095 fits."""
    query, key, value = (zeros(opened_device, 1, heads, 4095, 128) for heads in (32, 8, 8))
    mask = mha_tt.create_sliding_window_mask(4095, window_size=1024)
    context, _ = fused_attention(mha_tt)(query, key, value, mask=mask)
    assert tuple(context.shape) == (1, 32, 4095, 128)


@cache_dtypes
def test_layer_fills_cache_of_8192_tokens(opened_device, llama, dtype):
    """A Llama layer fills a cache of 8192 slots in chunks of 8160, 31 and 1 tokens."""
    cache = llama.init_cache(1, 8192, dtype)
    shapes = []
    for seq_len in (8160, 31, 1):
        output, cache = llama(zeros(opened_device, 1, seq_len, 4096), cache)
        shapes.append(tuple(output.shape))
    assert shapes == [(1, 8160, 4096), (1, 31, 4096), (1, 1, 4096)]
    assert cache.lengths.tolist() == [8192]


@cache_dtypes
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_layer_decodes_with_8192_slots(opened_device, llama, batch, dtype):
    """A Llama layer decodes one token for each of 1 to 32 sequences with caches of 8192 slots."""
    cache = llama.init_cache(batch, 8192, dtype)
    lengths = np.linspace(0, 8191, batch).astype(np.int32)
    cache = mha_tt.KVCache(cache.keys, cache.values, lengths, 8192)
    output, cache = llama(zeros(opened_device, batch, 1, 4096), cache)
    assert tuple(output.shape) == (batch, 1, 4096)
    assert cache.lengths.tolist() == (lengths + 1).tolist()


def test_layer_decodes_64_steps(opened_device, llama):
    """A Llama layer decodes 64 steps without running out of memory."""
    # Leftovers of a step in core memory would collide with the next one.
    x, cache = zeros(opened_device, 8, 1, 4096), llama.init_cache(8, 128)
    for _ in range(64):
        _, cache = llama(x, cache)
    assert cache.lengths.tolist() == [64] * 8


@pytest.fixture(scope="module")
def deepseek(opened_device):
    """A layer with the heads of DeepSeek-V3: its queries over latents, 576 wide, do not all fit on
    a core at once.
    """
    latent = Latent(512, 64, q_rank=64)
    rope = parity.Rope(rotary_dim=64, rotated="last", pairs="interleaved")
    spec = parity.AttentionSpec(
        64, 128, head_dim=192, value_head_dim=128, qkv_bias=False, latent=latent, rope=rope
    )
    return mha_tt.MultiHeadLatentAttention(spec, device=opened_device)


@cache_dtypes
@pytest.mark.parametrize(("batch", "seq_len"), [(4, 1), (1, 128)])
def test_128_heads_attend_to_4096_latents(opened_device, deepseek, batch, seq_len, dtype):
    """A DeepSeek-V3 layer attends to 3900 cached latents in a step of 4 sequences or a chunk of 128
    tokens.
    """
    cache = replace(deepseek.init_cache(batch, 4096, dtype), lengths=np.full(batch, 3900, np.int32))
    output, cache = deepseek(zeros(opened_device, batch, seq_len, 64), cache)
    assert tuple(output.shape) == (batch, seq_len, 64)
    assert cache.lengths.tolist() == [3900 + seq_len] * batch


@pytest.mark.parametrize(("capacity", "page_size"), [(1120, None), (32768, None), (4096, 64)])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [
        (8, 4, 256),
        (96, 8, 128),  # three tiles of heads
        (96, 8, 256),
        (160, 8, 128),
        (71, 1, 64),
        (128, 1, 128),
        (128, 1, 256),
        (64, 8, 384),
        (8, 4, 512),
        (32, 4, 512),
        (8, 4, 640),
        (32, 1, 640),
        (8, 4, 768),
        (4, 1, 1024),
        (4, 2, 1152),
    ],
)
def test_step_of_each_layer_fits(
    opened_device, num_heads, num_kv_heads, head_dim, capacity, page_size
):
    """One sequence takes a prompt and a step with many heads, with wide heads, and with heads that
    share one key.
    """
    spec = parity.AttentionSpec(64, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    layer = mha_tt.MultiHeadAttentionWithCache(spec, device=opened_device)
    cache = layer.init_cache(1, capacity, page_size=page_size)
    for seq_len in (64, 1):
        output, cache = layer(zeros(opened_device, 1, seq_len, 64), cache)
        assert tuple(output.shape) == (1, seq_len, 64)
    assert cache.lengths.tolist() == [65]


@pytest.mark.parametrize("dtype", [ttnn.float32, ttnn.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(64, 128), (128, 128), (64, 256)])
def test_many_wide_heads_split_and_combine(opened_device, num_heads, head_dim, dtype):
    """64 or 128 heads of up to 256 features are split and combined."""
    heads = mha_tt.split_heads(
        zeros(opened_device, 1, 40, num_heads * head_dim, dtype=dtype), num_heads
    )
    assert tuple(heads.shape) == (1, num_heads, 40, head_dim)
    assert tuple(mha_tt.combine_heads(heads).shape) == (1, 40, num_heads * head_dim)


@pytest.mark.parametrize("dtype", [ttnn.float32, ttnn.bfloat16], ids=["float32", "bfloat16"])
def test_plain_attention_fits_4096_tokens(opened_device, dtype):
    """Plain attention of 32 heads over 4096 tokens fits, and returns its weights."""
    query, key, value = (
        zeros(opened_device, 1, heads, 4096, 128, dtype=dtype) for heads in (32, 8, 8)
    )
    context, attn_weights = mha_tt.scaled_dot_product_attention(
        query, key, value, is_causal=True, need_weights=True
    )
    assert (tuple(context.shape), tuple(attn_weights.shape)) == (
        (1, 32, 4096, 128),
        (1, 32, 4096, 4096),
    )
