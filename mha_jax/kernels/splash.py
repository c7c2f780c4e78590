"""JAX's splash attention, a fused kernel for TPUs that skips blocks hidden by causality, a window
or chunks.

The kernel has a derivative in reverse mode.
"""

from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.arrays import Array, at_least_float32
from mha_jax.compiled import compiled
from mha_jax.masks import Mask
from mha_jax.scores import Scores
from mha_jax.sharding import is_on_one_device

LANES = 128  # lanes of a TPU vector: the smallest block of tokens
NO_SINK = -1e38  # between the scores of hidden keys in the kernel, -2.4e38, and real ones


def supports(query: Array, key: Array, mask: Mask, scores: Scores) -> bool:
    """Return whether the kernel can compute the call, and has enough tokens for its blocks."""
    if query.dtype not in (jnp.float32, jnp.bfloat16) or min(query.shape[2], key.shape[2]) < LANES:
        return False
    sinks = scores.learned.get("sinks")
    if sinks is not None and sinks.dtype != query.dtype:  # its gradient of them has that dtype
        return False
    if scores.spec.has_distance_bias or scores.has_dropout or scores.bias is not None:
        return False
    if not mask.has_only("is_causal", "key_padding_lengths", "span", "segment_ids"):
        return False
    # The kernel has chunks only with causality.
    if mask.span is not None and mask.span.chunk_size is not None and not mask.is_causal:
        return False
    # The kernel has 32-bit indices, and XLA cannot partition it.
    return not jax.config.jax_enable_x64 and is_on_one_device(query)  # pyright: ignore[reportAttributeAccessIssue]


@compiled("interpret")
def attend(
    query: Array, key: Array, value: Array, mask: Mask, scores: Scores, *, interpret: bool = False
) -> Array:
    """Return the context. Scaled queries are rounded to the dtype of query; `interpret` runs the
    kernel without a TPU.
    """
    # Imported lazily: it is slow to import, and for TPUs only.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as splash_masks,
    )

    (block_q, padded_q), (block_k, padded_k) = _block_of(query.shape[2]), _block_of(key.shape[2])
    query = (at_least_float32(query) * scores.spec.score_scale).astype(query.dtype)
    lengths: Any = mask.key_padding_lengths
    if lengths is None and padded_k > key.shape[2]:
        lengths = jnp.full(query.shape[0], key.shape[2], jnp.int32)
    segments, axes = None, None
    if lengths is not None or mask.segments is not None:
        ids = mask.segments or tuple(
            jnp.zeros((x.shape[0], x.shape[2]), jnp.int32) for x in (query, key)
        )
        of_queries, of_keys = (
            jnp.pad(x.astype(jnp.int32), [(0, 0), (0, length - x.shape[1])])
            for x, length in zip(ids, (padded_q, padded_k), strict=True)
        )
        if lengths is not None:  # the segment of padding differs from the segments of all queries
            is_padding = jnp.arange(padded_k, dtype=jnp.int32)[None] >= lengths[:, None]
            of_keys = jnp.where(is_padding, of_queries.min() - 1, of_keys)
        segments, axes = splash.SegmentIds(of_queries, of_keys), splash.SegmentIds(0, 0)  # pyright: ignore[reportArgumentType]
    # Softmax over no key is 0 / 0. A sink with negligible weight makes fully masked rows 0, without
    # a gradient.
    sinks = jnp.full(query.shape[1], NO_SINK, query.dtype)
    if "sinks" in scores.learned:
        sinks = jnp.maximum(scores.learned["sinks"], sinks)
    hides = _mask_of(splash_masks, mask, (padded_q, padded_k))
    sizes = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_k,
        block_kv_compute=block_k,
        block_q_dkv=block_q,
        block_kv_dkv=block_k,
        block_kv_dkv_compute=block_k,
        block_q_dq=block_q,
        block_kv_dq=block_k,
    )
    with jax.numpy_dtype_promotion("standard"):
        kernel: Any = splash.make_splash_mha(
            splash_masks.MultiHeadMask([hides] * query.shape[1]),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=scores.spec.soft_cap,
            interpret=interpret,
        )
        tokens = (
            _padded(x, length)
            for x, length in ((query, padded_q), (key, padded_k), (value, padded_k))
        )
        context = jax.vmap(kernel, in_axes=(0, 0, 0, axes, None))(*tokens, segments, sinks)
    return context[:, :, : query.shape[2]]


def _mask_of(splash_masks: Any, mask: Mask, shape: tuple[int, int]) -> Any:
    """Return the kernel's mask for causality and span."""
    if mask.span is not None and mask.span.window_size is not None:
        before = mask.span.window_size - 1
        after = 0 if mask.is_causal else before
        return splash_masks.LocalMask(shape, (before, after), offset=0)
    if mask.span is not None and mask.span.chunk_size is not None:
        return splash_masks.ChunkedCausalMask(shape, mask.span.chunk_size)
    if mask.is_causal:
        return splash_masks.CausalMask(shape)
    return splash_masks.FullMask(shape)


def _block_of(length: int) -> tuple[int, int]:
    """Return the tokens per block and in total: the largest blocks with the least padding."""
    padded = -(-length // LANES) * LANES
    return next(size for size in (4 * LANES, 2 * LANES, LANES) if padded % size == 0), padded


def _padded(x: Array, length: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)])
