"""Multi-head attention with a key/value cache: an argument and a result, growing or of fixed capacity.

Axes: B batch, T new tokens, S keys or cache slots, N query heads, K key/value heads, H head_dim, E d_model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mha_jax import fused
from mha_jax.checks import (
    check_appended,
    check_cache,
    check_cached_input,
    check_count,
    check_floating,
    check_lengths,
    check_room,
    check_weights,
)
from mha_jax.masks import create_causal_mask_with_cache
from mha_jax.mha import AttentionLayer, Project, combine_heads, project_qkv, project_with


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # arrays have no single truth value to compare by
class KVCache:
    """Keys and values of the tokens seen so far, in slots of which each sequence has filled the first few.

    Attributes:
        keys, values: (B, K, capacity, H); keys after RoPE. A slot at or beyond its sequence's length holds nothing.
        lengths: number of tokens each sequence has cached, (B,), int32.
    """

    keys: Float[Array, "B K S H"]
    values: Float[Array, "B K S H"]
    lengths: Int[Array, " B"]

    @property
    def capacity(self) -> int:
        """Number of slots of each sequence."""
        return self.keys.shape[2]


def init_cache(
    batch_size: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: jnp.dtype = jnp.float32,
) -> KVCache:
    """An empty cache: zeros in every slot, every length 0.

    Args:
        batch_size: number of sequences, B.
        num_kv_heads: number of key/value heads, K.
        capacity: number of slots of each sequence.
        head_dim: features of a head, H.
        dtype: floating-point dtype of keys and values.

    Raises:
        TypeError: if a size is not an integer or the dtype not floating point.
        ValueError: if a size is below 1.
    """
    sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "capacity": capacity, "head_dim": head_dim}
    for name, size in sizes.items():
        check_count(name, size)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be floating point, got dtype={dtype}")
    shape = (batch_size, num_kv_heads, capacity, head_dim)
    return KVCache(
        keys=jnp.zeros(shape, dtype),
        values=jnp.zeros(shape, dtype),
        lengths=jnp.zeros(batch_size, jnp.int32),
    )


def append_to_cache(
    cache: KVCache,
    key: Float[Array, "B K T H"],
    value: Float[Array, "B K T H"],
    *,
    new_lengths: Int[Array, " B"] | Sequence[int] | None = None,
) -> KVCache:
    """Append the keys and values of new tokens to those in the cache.

    Args:
        cache: holds `cache.lengths` tokens. Do not use it afterwards; its storage may be reused.
        key, value: (B, K, T, H), in the cache's dtype.
        new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding and is
            not cached. All of them when absent.

    Returns:
        The cache, holding `cache.lengths + new_lengths` tokens.

    Raises:
        TypeError: if the dtypes differ or the lengths are not integers.
        ValueError: if shapes do not fit, or the tokens do not fit into the capacity: then the cache is as it was.
            (Under jit lengths are not known; there a sequence that does not fit keeps the tokens it had.)
    """
    check_appended(cache, key, value, new_lengths)
    return _append(cache, key, value, new_lengths)


def _append(cache: KVCache, key: Array, value: Array, new_lengths: Array | Sequence[int] | None) -> KVCache:
    """The same without its checks."""
    batch_size, _, seq_len, _ = key.shape
    added = _added(cache, seq_len, new_lengths)
    added = jnp.where(_fits(cache, added, seq_len), added, 0)
    is_real = jnp.arange(seq_len, dtype=jnp.int32)[None] < added[:, None]
    rows = jnp.arange(batch_size, dtype=jnp.int32)[:, None]
    slots = jnp.where(is_real, _token_positions(cache.lengths, seq_len), cache.capacity)  # (B, T), beyond = dropped
    return KVCache(
        keys=cache.keys.at[rows, :, slots].set(key.swapaxes(1, 2), mode="drop"),
        values=cache.values.at[rows, :, slots].set(value.swapaxes(1, 2), mode="drop"),
        lengths=cache.lengths + added,
    )


def create_cache_mask(
    lengths: Int[Array, " B"] | Sequence[int], seq_len_q: int, capacity: int
) -> Bool[Array, "B 1 T S"]:
    """True where a new token may not see a cache slot: every slot after its own.

    Args:
        lengths: number of tokens each sequence had cached before the new ones, (B,).
        seq_len_q: number of new tokens, T.
        capacity: number of slots, S.

    Returns:
        Mask that broadcasts against the scores (B, N, T, S).

    Example: create_cache_mask([1, 0], 1, 3)
        [[[[False, False, True ]]],
         [[[False, True,  True ]]]]
    """
    check_count("seq_len_q", seq_len_q)
    check_count("capacity", capacity)
    check_lengths("lengths", lengths, None, capacity)
    return _cache_mask(jnp.asarray(lengths, jnp.int32), seq_len_q, capacity)


def _cache_mask(lengths: Array, seq_len_q: int, seq_len_k: int) -> Array:
    query_positions = _token_positions(lengths, seq_len_q)
    return jnp.arange(seq_len_k, dtype=jnp.int32)[None, None, None] > query_positions[:, None, :, None]


def multi_head_attention_with_cache(
    x: Float[Array, "B T d_in"],
    weights: Mapping[str, Mapping[str, Array]],
    cache_k: Float[Array, "B K P H"] | None = None,
    cache_v: Float[Array, "B K P H"] | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    rope_theta: float | None = None,
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

    Returns:
        The output (B, T, E), and the keys and values of all S = P + T tokens.

    Raises:
        TypeError: if x is not floating point or dtypes differ.
        ValueError: if the weights or the shapes do not fit, or only one of cache_k and cache_v is given.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_weights(weights, num_heads, num_kv_heads)
    check_floating("x", x, rank=3)
    if (cache_k is None) != (cache_v is None):
        raise ValueError("cache_k and cache_v must be given together, got only one of them")
    if cache_k is not None:
        check_floating("cache_k", cache_k, rank=4)
    cache_len = 0 if cache_k is None else cache_k.shape[2]
    seq_len = x.shape[1]
    project = project_with(weights)
    q, k, v = project_qkv(
        project,
        x,
        x,
        x,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fused_qkv="qkv_proj" in weights,
        positions=cache_len + jnp.arange(seq_len, dtype=jnp.int32)[None],
        rope_theta=rope_theta,
    )
    if cache_k is not None and cache_v is not None:
        check_cache(cache_k, cache_v, k)
        k, v = jnp.concatenate([cache_k, k], axis=2), jnp.concatenate([cache_v, v], axis=2)
    mask = create_causal_mask_with_cache(seq_len, cache_len + seq_len, cache_len)
    context, _ = fused.scaled_dot_product_attention(q, k, v, mask=mask)
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
    dropout: float = 0.0,
    dropout_rng: jax.Array | None = None,
) -> tuple[Array, KVCache]:
    check_cached_input(x, cache)
    seq_len = x.shape[1]
    check_room(cache, seq_len, new_lengths)
    q, k, v = project_qkv(
        project,
        x,
        x,
        x,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fused_qkv=fused_qkv,
        positions=_token_positions(cache.lengths, seq_len),
        rope_theta=rope_theta,
    )
    check_cache(cache.keys, cache.values, k)
    appended = _append(cache, k, v, new_lengths)
    if seq_len == 1 and not dropout:
        # A sequence that has no room sees a slot that is there, so that its output is finite before it is made NaN.
        last_positions = jnp.minimum(cache.lengths, cache.capacity - 1)
        context = fused.attend_to_cache(q, appended.keys, appended.values, last_positions)
    else:
        mask = _cache_mask(cache.lengths, seq_len, cache.capacity)
        context, _ = fused.scaled_dot_product_attention(
            q, appended.keys, appended.values, mask=mask, dropout=dropout, dropout_rng=dropout_rng
        )
    output = combine_heads(context)
    output = project("out_proj", output) if out_proj else output
    added = _added(cache, seq_len, new_lengths)
    is_real = jnp.arange(seq_len, dtype=jnp.int32)[None] < added[:, None]
    output = jnp.where(is_real[:, :, None], output, 0.0)
    # Outside jit a sequence that does not fit was refused above; under jit NaN is the only way to say so.
    return jnp.where(_fits(cache, added, seq_len)[:, None, None], output, jnp.nan), appended


def _token_positions(lengths: Array, seq_len: int) -> Array:
    return lengths[:, None] + jnp.arange(seq_len, dtype=jnp.int32)[None]  # (B, T)


def _added(cache: KVCache, seq_len: int, new_lengths: Array | Sequence[int] | None) -> Array:
    return jnp.full_like(cache.lengths, seq_len) if new_lengths is None else jnp.asarray(new_lengths, jnp.int32)  # (B,)


def _fits(cache: KVCache, added: Array, seq_len: int) -> Array:
    return (added >= 0) & (added <= seq_len) & (cache.lengths + added <= cache.capacity)  # (B,)


class MultiHeadAttentionWithCache(AttentionLayer):
    """Causal multi-head self-attention over everything cached; keywords as in `AttentionLayer`."""

    def init_cache(self, batch_size: int, capacity: int) -> KVCache:
        """An empty cache for this module, in the dtype of its weights and beside them."""
        kernel = (self.qkv_proj if self.fused_qkv else self.k_proj).kernel
        return init_cache(batch_size, self.num_kv_heads, capacity, self.head_dim, kernel.dtype)

    def __call__(
        self,
        x: Float[Array, "B T d_in"],
        cache: KVCache,
        *,
        new_lengths: Int[Array, " B"] | Sequence[int] | None = None,
    ) -> tuple[Float[Array, "B T E"], KVCache]:
        """Append the new tokens to the cache and attend from each to everything up to it.

        Args:
            x: the new tokens, (B, T, d_in): a prompt, a part of one, or one token each.
            cache: the tokens so far. Do not use it afterwards; its storage may be reused.
            new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding:
                not cached, output 0. All of them when absent.

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
            dropout=0.0 if self.deterministic else self.dropout,
            dropout_rng=self.dropout_rng(self.dropout),
        )
        return self.drop_output(output), cache


def kv_cache_nbytes(
    batch: int, num_kv_heads: int, seq_len: int, head_dim: int, *, num_layers: int = 1, dtype: jnp.dtype
) -> int:
    """Bytes that the keys and values of all layers take: 2 * batch * heads * tokens * head_dim * bytes per layer.

    Args:
        batch: number of sequences, B.
        num_kv_heads: number of key/value heads, K.
        seq_len: number of tokens, or slots, of each sequence.
        head_dim: features of a head, H.
        num_layers: number of layers.
        dtype: dtype of the cache.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is below 1.

    Example: kv_cache_nbytes(1, 8, 8192, 128, num_layers=80, dtype=jnp.float16) == 2684354560 (2.5 GiB)
    """
    sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "seq_len": seq_len, "head_dim": head_dim}
    for name, size in {**sizes, "num_layers": num_layers}.items():
        check_count(name, size)
    return 2 * batch * num_kv_heads * seq_len * head_dim * num_layers * jnp.dtype(dtype).itemsize
