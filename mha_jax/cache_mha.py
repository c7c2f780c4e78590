"""Multi-head attention with a key/value cache: an argument and a result, growing or of fixed capacity.

Axes: B batch, T new tokens, S keys or cache slots, N query heads, K key/value heads, H head_dim, E d_model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from mha_jax import fused
from mha_jax.blockwise import BLOCK_SIZES, BlockSizes
from mha_jax.checks import (
    check_appended,
    check_bias,
    check_cache,
    check_cached_input,
    check_count,
    check_floating,
    check_lengths,
    check_mask,
    check_room,
    check_rope_positions,
    check_weights,
)
from mha_jax.compiled import compiled
from mha_jax.masks import create_causal_mask_with_cache, to_scores_rank
from mha_jax.mha import AttentionLayer, Project, combine_heads, project_qkv, project_with
from mha_jax.not_finite import by_finite_tokens, emptied


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

    def reorder(self, indices: Int[Array, " C"] | Sequence[int]) -> "KVCache":
        """A cache of the sequences with these indices, in this order; one may be taken more than once, or not at all.

        Args:
            indices: which sequences, each 0..B - 1, (B',).

        Returns:
            A cache of B' sequences, with storage of its own.

        Raises:
            TypeError: if the indices are not integers.
            ValueError: if an index lies outside 0..B - 1, where it is known.
        """
        check_lengths("indices", indices, None, self.lengths.shape[0] - 1)
        indices = jnp.asarray(indices, jnp.int32)
        return KVCache(*(jnp.asarray(x)[indices] for x in (self.keys, self.values, self.lengths)))

    def repeat(self, repeats: int) -> "KVCache":
        """A cache that holds each sequence `repeats` times, side by side, as the beams of a search.

        Args:
            repeats: how many times, at least once.

        Returns:
            A cache of B * repeats sequences, with storage of its own.

        Raises:
            TypeError: if `repeats` is not an integer.
            ValueError: if `repeats` is below 1.
        """
        check_count("repeats", repeats)
        return self.reorder([index for index in range(self.lengths.shape[0]) for _ in range(repeats)])

    def grow(self, capacity: int) -> "KVCache":
        """A cache of the same tokens with more slots.

        Args:
            capacity: number of slots of each sequence, at least as many as there are.

        Returns:
            A cache of that capacity, with storage of its own.

        Raises:
            TypeError: if the capacity is not an integer.
            ValueError: if the capacity is below that of this cache.
        """
        check_count("capacity", capacity, minimum=self.capacity)
        added = [(0, 0), (0, 0), (0, capacity - self.capacity), (0, 0)]
        keys, values = (jnp.pad(x, added) for x in (self.keys, self.values))
        return KVCache(*(jnp.array(x, copy=True) for x in (keys, values, self.lengths)))

    def crop(self, lengths: Int[Array, " B"] | Sequence[int] | int) -> "KVCache":
        """A cache of the first tokens of each sequence only; the slots of the others hold nothing again.

        Args:
            lengths: number of tokens to keep, of every sequence or of each, (B,); as many as there are at most.

        Returns:
            A cache of the same capacity, with storage of its own.

        Raises:
            TypeError: if the lengths are not integers.
            ValueError: if a length is negative or above that of its sequence, where they are known.
        """
        if isinstance(lengths, int):
            lengths = [lengths] * self.lengths.shape[0]
        check_lengths("lengths", lengths, self.lengths.shape[0], self.capacity)
        if not isinstance(lengths, Tracer) and not isinstance(self.lengths, Tracer):
            kept, held = np.asarray(lengths), np.asarray(self.lengths)
            if bool((kept > held).any()):
                raise ValueError(
                    f"lengths must not exceed those of the cache, got lengths={kept.tolist()} and {held.tolist()}"
                )
        lengths = jnp.minimum(jnp.asarray(lengths, jnp.int32), self.lengths)
        is_free = jnp.arange(self.capacity, dtype=jnp.int32)[None] >= lengths[:, None]  # (B, S)
        keys, values = (emptied(x, is_free[:, None, :, None]) for x in (self.keys, self.values))
        return KVCache(keys, values, lengths)


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
        ValueError: if a size is below 1, or the batch size below 0.
    """
    check_count("batch_size", batch_size, minimum=0)
    for name, size in {"num_kv_heads": num_kv_heads, "capacity": capacity, "head_dim": head_dim}.items():
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
    return _append(cache, key, value, _added(cache, key.shape[2], new_lengths))


@compiled()
def _append(cache: KVCache, key: Array, value: Array, added: Array) -> KVCache:
    """The same without its checks."""
    batch_size, _, seq_len, _ = key.shape
    cache = KVCache(*map(jnp.asarray, (cache.keys, cache.values, cache.lengths)))  # which NumPy may have read
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


@compiled("seq_len_q", "seq_len_k")
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


def _token_positions(lengths: Array, seq_len: int) -> Array:
    return lengths[:, None] + jnp.arange(seq_len, dtype=jnp.int32)[None]  # (B, T)


def _added(cache: KVCache, seq_len: int, new_lengths: Array | Sequence[int] | None) -> Array:
    added = np.full(cache.lengths.shape, seq_len, np.int32) if new_lengths is None else new_lengths
    return jnp.asarray(added, jnp.int32)  # (B,)


def _fits(cache: KVCache, added: Array, seq_len: int) -> Array:
    return (added >= 0) & (added <= seq_len) & (cache.lengths + added <= cache.capacity)  # (B,)


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


def kv_cache_nbytes(
    batch_size: int, num_kv_heads: int, capacity: int, head_dim: int, *, num_layers: int = 1, dtype: jnp.dtype
) -> int:
    """Bytes that the keys and values of all layers take: 2 * batch * heads * slots * head_dim * bytes per layer.

    Args:
        batch_size: number of sequences, B.
        num_kv_heads: number of key/value heads, K.
        capacity: number of slots, or tokens, of each sequence.
        head_dim: features of a head, H.
        num_layers: number of layers.
        dtype: dtype of the cache.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is below 1.

    Example: kv_cache_nbytes(1, 8, 8192, 128, num_layers=80, dtype=jnp.float16) == 2684354560 (2.5 GiB)
    """
    sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "capacity": capacity, "head_dim": head_dim}
    for name, size in {**sizes, "num_layers": num_layers}.items():
        check_count(name, size)
    return 2 * batch_size * num_kv_heads * capacity * head_dim * num_layers * jnp.dtype(dtype).itemsize
