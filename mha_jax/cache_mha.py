"""Multi-head attention with a key/value cache: an argument and a result, growing or of fixed capacity.

Axes: B batch, T new tokens, S keys or cache slots, N query heads, K key/value heads, H head_dim, E d_model.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mha_jax import fused
from mha_jax.blockwise import BLOCK_SIZES, BlockSizes
from mha_jax.cache import (
    KVCache,
    _added,
    _append,
    _cache_mask,
    _fits,
    _token_positions,
    check_cache,
    check_cached_input,
    check_room,
    init_cache,
)
from mha_jax.checks import check_bias, check_floating, check_mask, check_rope_positions, check_weights
from mha_jax.compiled import compiled
from mha_jax.masks import create_causal_mask_with_cache, to_scores_rank
from mha_jax.mha import AttentionLayer, project_with
from mha_jax.not_finite import by_finite_tokens, emptied
from mha_jax.stages import Project, combine_heads, project_qkv


def multi_head_attention_with_cache(
    x: Float[Array, "B T d_in"],
    weights: Mapping[str, Mapping[str, Array]],
    cache_k: Float[Array, "B K P H"] | None = None,
    cache_v: Float[Array, "B K P H"] | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    rope_theta: float | None = None,
    mask: Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    positions: Int[Array, "#B T"] | None = None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Causal self-attention of new tokens over all tokens so far, with keys and values that grow by concatenation.

    The plain definition of a cache; `multi_head_attention_with_static_cache` is the one of fixed capacity.

    Args:
        x: the new tokens, (B, T, d_in).
        weights: as `multi_head_attention` takes them.
        cache_k, cache_v: keys (after RoPE) and values of the P tokens so far, (B, K, P, H); None at first.
        num_heads: number of query heads, N.
        num_kv_heads: number of key/value heads, K, a divisor of N; N when absent.
        rope_theta: base of the RoPE frequencies, or None for no RoPE.
        mask: boolean, True = masked, beside causality; broadcasts to (B, N, T, S), S = P + T.
        bias: added to the scores, in the dtype of x; broadcasts to (B, N, T, S). -inf masks a key.
        positions: place of each new token for RoPE, (B or 1, T); P, P + 1, … when absent.

    Returns:
        The output (B, T, E), and the keys and values of all S = P + T tokens.

    Raises:
        TypeError: if x is not floating point or dtypes differ.
        ValueError: if the weights or the shapes do not fit, or only one of cache_k and cache_v is given.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_weights(weights, num_heads, num_kv_heads)
    check_floating("x", x, rank=3)
    check_rope_positions(positions, x.shape[0], x.shape[1], rope_theta)
    if (cache_k is None) != (cache_v is None):
        raise ValueError("cache_k and cache_v must be given together, got only one of them")
    if cache_k is not None:
        check_floating("cache_k", cache_k, rank=4)
    cache_len = 0 if cache_k is None else cache_k.shape[2]
    seq_len = x.shape[1]
    check_mask(mask, (x.shape[0], num_heads, seq_len, cache_len + seq_len))
    check_bias(bias, (x.shape[0], num_heads, seq_len, cache_len + seq_len), x.dtype)
    if positions is None:
        positions = cache_len + jnp.arange(seq_len, dtype=jnp.int32)[None]
    project = by_finite_tokens(project_with(weights))
    q, k, v = project_qkv(
        project,
        x,
        x,
        x,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fused_qkv="qkv_proj" in weights,
        positions=positions,
        rope_theta=rope_theta,
    )
    if cache_k is not None and cache_v is not None:
        check_cache(cache_k, cache_v, k)
        k, v = jnp.concatenate([cache_k, k], axis=2), jnp.concatenate([cache_v, v], axis=2)
    if seq_len:
        causal = create_causal_mask_with_cache(seq_len, cache_len + seq_len, cache_len)
        mask = causal if mask is None else to_scores_rank(causal) | to_scores_rank(mask)
    context, _ = fused.scaled_dot_product_attention(q, k, v, mask=mask, bias=bias)
    output = combine_heads(context)
    return project("out_proj", output) if "out_proj" in weights else output, k, v


def multi_head_attention_with_static_cache(
    x: Float[Array, "B T d_in"],
    weights: Mapping[str, Mapping[str, Array]],
    cache: KVCache,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    rope_theta: float | None = None,
    new_lengths: Int[Array, " B"] | Sequence[int] | None = None,
    mask: Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    positions: Int[Array, "#B T"] | None = None,
) -> tuple[Float[Array, "B T E"], KVCache]:
    """Causal self-attention of new tokens over all tokens so far, with a cache of fixed capacity.

    Args:
        x: the new tokens, (B, T, d_in).
        weights: as `multi_head_attention` takes them.
        cache: the tokens so far. Do not use it afterwards; its storage may be reused.
        num_heads: number of query heads, N.
        num_kv_heads: number of key/value heads, K, a divisor of N; N when absent.
        rope_theta: base of the RoPE frequencies, or None for no RoPE.
        new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding: not
            cached, output 0. All of them when absent.
        mask: boolean, True = masked, beside causality; broadcasts to (B, N, T, capacity).
        bias: added to the scores, in the dtype of x; broadcasts to (B, N, T, capacity). -inf masks a slot.
        positions: place of each new token for RoPE, (B or 1, T); `cache.lengths`, and so on, when absent.

    Returns:
        The output (B, T, E) and the cache with the new tokens.

    Raises:
        TypeError: if x is not floating point, dtypes differ or the lengths are not integers.
        ValueError: if the weights or the shapes do not fit, or the new tokens do not fit into the capacity. (Under jit
            lengths are not known; there a sequence that does not fit gives NaN and keeps the tokens it had.)
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_weights(weights, num_heads, num_kv_heads)
    return _cached_layer(
        project_with(weights),
        x,
        cache,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fused_qkv="qkv_proj" in weights,
        out_proj="out_proj" in weights,
        rope_theta=rope_theta,
        new_lengths=new_lengths,
        mask=mask,
        bias=bias,
        positions=positions,
    )


def _cached_layer(
    project: Project,
    x: Array,
    cache: KVCache,
    *,
    num_heads: int,
    num_kv_heads: int,
    fused_qkv: bool,
    out_proj: bool,
    rope_theta: float | None,
    new_lengths: Array | Sequence[int] | None,
    mask: Array | None,
    bias: Array | None,
    positions: Array | None,
    dropout: float = 0.0,
    dropout_rng: jax.Array | None = None,
    block_sizes: BlockSizes = BLOCK_SIZES,
) -> tuple[Array, KVCache]:
    check_cached_input(x, cache)
    seq_len = x.shape[1]
    check_rope_positions(positions, x.shape[0], seq_len, rope_theta)
    check_room(cache, seq_len, new_lengths)
    scores_shape = (x.shape[0], num_heads, seq_len, cache.capacity)
    check_mask(mask, scores_shape)
    check_bias(bias, scores_shape, x.dtype)
    lengths, added = jnp.asarray(cache.lengths), _added(cache, seq_len, new_lengths)
    project = by_finite_tokens(project)
    q, k, v = project_qkv(
        project,
        *[x if new_lengths is None else _empty_padding(x, added)] * 3,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fused_qkv=fused_qkv,
        positions=_token_positions(lengths, seq_len) if positions is None else positions,
        rope_theta=rope_theta,
    )
    check_cache(cache.keys, cache.values, k, ("cache.keys", "cache.values"))
    appended = _append(cache, k, v, added)
    if seq_len == 1 and mask is None and bias is None and not dropout:
        # A sequence that has no room sees a slot that is there, so that its output is finite before it is made NaN.
        last_positions = jnp.minimum(lengths, cache.capacity - 1)
        context = fused.attend_to_cache(q, appended.keys, appended.values, last_positions, block_sizes=block_sizes)
    else:
        causal = _cache_mask(lengths, seq_len, cache.capacity)
        context, _ = fused.scaled_dot_product_attention(
            q,
            appended.keys,
            appended.values,
            mask=causal if mask is None else causal | to_scores_rank(mask),
            bias=bias,
            dropout=dropout,
            dropout_rng=dropout_rng,
            block_sizes=block_sizes,
        )
    output = combine_heads(context)
    output = project("out_proj", output) if out_proj else output
    return _tell_what_fits(output, cache, added), appended


@compiled()
def _empty_padding(x: Array, added: Array) -> Array:
    return emptied(x, jnp.arange(x.shape[1], dtype=jnp.int32)[None, :, None] >= added[:, None, None])


@compiled()
def _tell_what_fits(output: Array, cache: KVCache, added: Array) -> Array:
    """0 for padding. Outside jit a sequence that does not fit was refused; under jit NaN is the only way to say so."""
    fits = _fits(cache, added, output.shape[1])
    return jnp.where(fits[:, None, None], _empty_padding(output, added), jnp.nan)


class MultiHeadAttentionWithCache(AttentionLayer):
    """Causal multi-head self-attention over everything cached; keywords as in `AttentionLayer`."""

    _is_self_attention = True

    def init_cache(self, batch_size: int, capacity: int, dtype: jnp.dtype | None = None) -> KVCache:
        """An empty cache for this module, beside its weights.

        Args:
            batch_size: number of sequences, B.
            capacity: number of slots of each sequence.
            dtype: floating-point dtype of keys and values; that of the weights when absent.

        Raises:
            TypeError: if a size is not an integer or the dtype not floating point.
            ValueError: if the capacity is below 1 or the batch size below 0.
        """
        held = (self.qkv_proj if self.fused_qkv else self.k_proj).kernel[...].dtype
        return init_cache(batch_size, self.num_kv_heads, capacity, self.head_dim, held if dtype is None else dtype)

    def __call__(
        self,
        x: Float[Array, "B T d_in"],
        cache: KVCache,
        *,
        new_lengths: Int[Array, " B"] | Sequence[int] | None = None,
        mask: Bool[Array, "..."] | None = None,
        bias: Float[Array, "..."] | None = None,
        positions: Int[Array, "#B T"] | None = None,
    ) -> tuple[Float[Array, "B T E"], KVCache]:
        """Append the new tokens to the cache and attend from each to everything up to it.

        Args:
            x: the new tokens, (B, T, d_in): a prompt, a part of one, or one token each.
            cache: the tokens so far. Do not use it afterwards; its storage may be reused.
            new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding:
                not cached, output 0. All of them when absent.
            mask: boolean, True = masked, beside causality; broadcasts to (B, N, T, capacity).
            bias: added to the scores, in the dtype of x; broadcasts to (B, N, T, capacity). -inf masks a slot.
            positions: place of each new token for RoPE, (B or 1, T); `cache.lengths`, and so on, when absent.

        Returns:
            The output (B, T, E) and the cache with the new tokens.

        Raises:
            TypeError: if x is not floating point, dtypes differ or the lengths are not integers.
            ValueError: if the shapes do not fit, or the new tokens do not fit into the capacity. (Under jit lengths
                are not known; there a sequence that does not fit gives NaN and keeps the tokens it had.)
        """
        output, cache = _cached_layer(
            self.project,
            x,
            cache,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            fused_qkv=self.fused_qkv,
            out_proj=self.out_proj is not None,
            rope_theta=self.rope_theta,
            new_lengths=new_lengths,
            mask=mask,
            bias=bias,
            positions=positions,
            dropout=0.0 if self.deterministic else self.dropout,
            dropout_rng=self.dropout_rng(self.dropout),
            block_sizes=self.block_sizes,
        )
        return self.drop_output(output), cache
