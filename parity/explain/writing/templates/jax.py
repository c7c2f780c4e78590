"""TITLE"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from parity.explain.writing.templates.names import *

hides = call.has_mask or spec.span is not None or call.cache is not None or call.is_causal

Params = Mapping[str, Any]
"""Weights by name: `params["q_proj"]["kernel"]`."""

if call.cache is not None:

    class Cache(NamedTuple):
        """Slots of the tokens so far; slots from the length of a sequence on are unused."""

        if latent is None:
            keys: Array  # (B, K, S, H)
            values: Array  # (B, K, S, H)
        else:
            latents: Array  # (B, S, KV_RANK)
            shared_keys: Array  # (B, 1, S, ROPE_DIM)
        if call.cache == "static":
            length: Array  # (), the same for all sequences
        else:
            lengths: Array  # (B,)

    def empty_cache(batch_size: int, capacity: int, dtype: Any = jnp.float32) -> Cache:
        """Return a cache with `capacity` slots for each sequence."""
        if latent is None:
            first = jnp.zeros((batch_size, NUM_KV_HEADS, capacity, HEAD_DIM), dtype)
            second = jnp.zeros((batch_size, NUM_KV_HEADS, capacity, VALUE_HEAD_DIM), dtype)
        else:
            first = jnp.zeros((batch_size, capacity, KV_RANK), dtype)
            second = jnp.zeros((batch_size, 1, capacity, ROPE_DIM), dtype)
        if call.cache == "static":
            return Cache(first, second, jnp.zeros((), jnp.int32))
        else:
            return Cache(first, second, jnp.zeros(batch_size, jnp.int32))


def attention(
    params: Params,
    x: Array,
    query: Array,
    key: Array,
    other_k: Array,
    other_v: Array,
    cache: Cache,
    other_cache: Cache,
    new_lengths: Array,
    mask: Array,
    bias: Array,
    positions: Array,
) -> tuple[Array, Cache] if appends else Array:
    """Attend from each query to its visible keys; return the output (B, T, E).

    Args:
        params: weights by name, kernels (in, out).
        x: (B, T, d_in).
        query: (B, T, d_in).
        key: (B, S, d_kv), the source of keys and values.
        other_k: (B, K, S, H), keys of another layer, after its norms and RoPE.
        other_v: (B, K, S, H), values of that layer.
        cache: earlier tokens, from `empty_cache` or an earlier call; also returned, updated.
        other_cache: cache of another layer, which has already appended these tokens.
        new_lengths: number of real tokens of each sequence in x, (B,); the rest is padding, at
            any position.
        mask: boolean, True = masked, (B or 1, N or 1, T or 1, S). A fully masked row returns 0.
        bias: added to the scores; broadcasts to (B, N, T, S).
        positions: position of each token, (B or 1, T); for RoPE with several axes also
            (axes, B or 1, T).
    """
    num_tokens = query.shape[1]
    if call.cache == "static":
        new_tokens = jnp.arange(num_tokens)[None]  # (1, T)
        if spec.shared_kv:
            token_positions = other_cache.length - num_tokens + new_tokens
        else:
            token_positions = cache.length + new_tokens
    elif call.cache == "ragged":
        new_tokens = jnp.arange(num_tokens)
        is_real = new_tokens < new_lengths[:, None]  # (B, T)
        new_tokens = jnp.where(is_real, new_tokens, 0)  # (B, T)
        if spec.shared_kv:
            token_positions = (other_cache.lengths - new_lengths)[:, None] + new_tokens
        else:
            token_positions = cache.lengths[:, None] + new_tokens
        if call.has_positions:
            positions = jnp.where(is_real, positions, 0)  # padding adds no length
    elif needs_positions or spec.has_positions:
        token_positions = jnp.arange(num_tokens)[None]  # (1, T)
    if rope is not None:
        cos, sin = rotation(positions)  # (B or 1, 1, T, R/2)
    if latent is not None:
        if latent.q_rank is None:
            q = linear(params["q_proj"], query)  # (B, T, N * H)
        else:
            q_latents = linear(params["q_a_proj"], query)  # (B, T, Q_RANK)
            q_latents = normalize_latents(params["q_a_norm"], q_latents)
            if latent.q_factor != 1.0:
                q_latents = q_latents * Q_FACTOR
            q = linear(params["q_b_proj"], q_latents)  # (B, T, N * H)
        q = split_heads(q, NUM_HEADS)  # (B, N, T, H)
        latents, shared_k = jnp.split(linear(params["kv_a_proj"], query), [KV_RANK], axis=-1)
        latents = normalize_latents(params["kv_a_norm"], latents)  # (B, T, KV_RANK)
        if latent.kv_factor != 1.0:
            latents = latents * KV_FACTOR
        shared_k = shared_k[:, None]  # (B, 1, T, ROPE_DIM)
        if rope is not None:
            own_q, shared_q = jnp.split(q, [OWN_DIM], axis=-1)
            q = jnp.concatenate([own_q, rotate(shared_q, cos, sin)], axis=-1)
            shared_k = rotate(shared_k, cos, sin)
    else:
        q = linear(params["q_proj"], query)  # (B, T, N * H)
        if spec.clip_qkv is not None:
            q = jnp.clip(q, -CLIP, CLIP)
        if qk_norm_of == "width":
            q = normalize_qk(params["q_norm"], q)
        q = split_heads(q, NUM_HEADS)  # (B, N, T, H)
        if qk_norm_of == "head":
            q = normalize_qk(params["q_norm"], q)
        if rope is not None:
            q = rotate(q, cos, sin)
        if qk_norm_of == "rotated head":
            q = normalize_qk(params["q_norm"], q)
        if not spec.shared_kv:
            k = linear(params["k_proj"], key)  # (B, S, K * H)
            if spec.clip_qkv is not None:
                k = jnp.clip(k, -CLIP, CLIP)
            if qk_norm_of == "width":
                k = normalize_qk(params["k_norm"], k)
            k = split_heads(k, NUM_KV_HEADS)  # (B, K, S, H)
            if qk_norm_of == "head":
                k = normalize_qk(params["k_norm"], k)
            if rope is not None:
                k = rotate(k, cos, sin)
            if qk_norm_of == "rotated head":
                k = normalize_qk(params["k_norm"], k)
            v = linear(params["v_proj"], key)  # (B, S, K * H)
            if spec.clip_qkv is not None:
                v = jnp.clip(v, -CLIP, CLIP)
            if v_norm_of == "width":
                v = normalize_v(params["v_norm"], v)
            v = split_heads(v, NUM_KV_HEADS)  # (B, K, S, H)
            if v_norm_of == "head":
                v = normalize_v(params["v_norm"], v)
    if temperature is not None:
        lengths = (positions + FIRST_POSITION) // TEMPERATURE_LENGTH
        factors = 1.0 + TEMPERATURE_SCALE * jnp.log1p(lengths.astype(jnp.float32))
        q = (q * factors[:, None, :, None]).astype(q.dtype)
    if takes_other_kv:
        k, v = other_k, other_v
    elif spec.shared_kv:
        k, v = other_cache.keys, other_cache.values
    elif call.cache == "static":
        write = jax.lax.dynamic_update_slice_in_dim
        if latent is None:
            k = write(cache.keys, k, cache.length, axis=2)
            v = write(cache.values, v, cache.length, axis=2)
            cache = Cache(k, v, cache.length + num_tokens)
        else:
            latents = write(cache.latents, latents, cache.length, axis=1)
            shared_k = write(cache.shared_keys, shared_k, cache.length, axis=2)
            cache = Cache(latents, shared_k, cache.length + num_tokens)
    elif call.cache == "ragged":
        if latent is None:
            capacity = cache.keys.shape[2]
        else:
            capacity = cache.latents.shape[1]
        slots = jnp.where(is_real, token_positions, capacity)  # (B, T); out of bounds for padding
        rows = jnp.arange(slots.shape[0])[:, None]  # (B, 1)
        if latent is None:
            k = cache.keys.at[rows, :, slots].set(k.swapaxes(1, 2), mode="drop")
            v = cache.values.at[rows, :, slots].set(v.swapaxes(1, 2), mode="drop")
            cache = Cache(k, v, cache.lengths + new_lengths)
        else:
            latents = cache.latents.at[rows, slots].set(latents, mode="drop")
            shared_slots = cache.shared_keys.at[rows, :, slots]
            shared_k = shared_slots.set(shared_k.swapaxes(1, 2), mode="drop")
            cache = Cache(latents, shared_k, cache.lengths + new_lengths)
    if latent is not None:
        expanded = split_heads(linear(params["kv_b_proj"], latents), NUM_HEADS)
        own_k, v = jnp.split(expanded, [OWN_DIM], axis=-1)
        shared_k = jnp.broadcast_to(shared_k, (*own_k.shape[:3], ROPE_DIM))
        k = jnp.concatenate([own_k, shared_k], axis=-1)  # (B, N, S, H)
    if needs_positions or call.is_causal:
        key_positions = jnp.arange(k.shape[2])[None, None, None]  # (1, 1, 1, S)
    if needs_positions:
        query_positions = token_positions[:, None, :, None]  # (B or 1, 1, T, 1)
    elif call.is_causal:
        query_positions = jnp.arange(num_tokens)[None, None, :, None]  # (1, 1, T, 1)
    if call.is_causal:
        hidden = key_positions > query_positions  # (B or 1, 1, T, S)
        if spec.window_size is not None:
            hidden = hidden | (key_positions <= query_positions - WINDOW)
        if spec.chunk_size is not None:
            hidden = hidden | (key_positions // CHUNK != query_positions // CHUNK)
        if call.has_mask:
            hidden = hidden | mask
    elif spec.span is not None:
        if spec.window_size is not None:
            hidden = jnp.abs(key_positions - query_positions) >= WINDOW
        else:
            hidden = key_positions // CHUNK != query_positions // CHUNK
        if call.has_mask:
            hidden = hidden | mask
    elif call.has_mask:
        hidden = mask
    if may_hide_all:
        empty = jnp.all(hidden, axis=-1, keepdims=True)  # fully masked rows return 0
        hidden = hidden & ~empty
    if groups > 1:
        k = jnp.repeat(k, NUM_HEADS // NUM_KV_HEADS, axis=1)  # (B, N, S, H)
        v = jnp.repeat(v, NUM_HEADS // NUM_KV_HEADS, axis=1)  # (B, N, S, H)
    scores = SCALE * jnp.einsum("bnth,bnsh->bnts", q, k, preferred_element_type=jnp.float32)
    if spec.soft_cap is not None:
        scores = SOFT_CAP * jnp.tanh(scores / SOFT_CAP)
    if alibi is not None:
        slopes = jnp.array(SLOPES)[:, None, None]  # (N, 1, 1)
        scores = scores - slopes * jnp.abs(key_positions - query_positions)
    if relative is not None:
        if grid is None:
            buckets = bucket_of(key_positions - query_positions)[:, 0]  # (B or 1, T, S)
        else:
            buckets = bucket_of(query_positions, key_positions)[:, 0]  # (B or 1, T, S)
        table = params["relative_bias"].astype(jnp.float32)  # (buckets, N)
        scores = scores + jnp.moveaxis(table[buckets], -1, 1)
    if products is not None:
        distances = key_positions - query_positions
        rows = jnp.broadcast_to(row_of(distances), scores.shape)  # (B, N, T, S)
        if products.of_queries:
            table = params["relative_keys"]  # (rows, H) or (rows, N, H)
            by_row = jnp.einsum(query_products, q, table, preferred_element_type=jnp.float32)
            scores = scores + SCALE * jnp.take_along_axis(by_row, rows, axis=3)
        if products.of_keys:
            table = params["relative_queries"]  # (rows, H) or (rows, N, H)
            by_row = jnp.einsum(key_products, k, table, preferred_element_type=jnp.float32)
            scores = scores + SCALE * jnp.take_along_axis(by_row, rows.mT, axis=3).mT
    if sinusoids is not None:
        farthest = q.shape[2] + k.shape[2]
        waves = sinusoids_of(jnp.arange(farthest, -farthest - 1, -1))  # (rows, D_IN)
        table = params["relative_sinusoids"].astype(jnp.float32)  # (D_IN, N, H)
        vectors = jnp.einsum("ce,enh->nch", waves, table)
        position_bias = params["position_bias"].astype(jnp.float32)[:, None]  # (N, 1, H)
        by_row = jnp.einsum("bnth,nch->bntc", q.astype(jnp.float32) + position_bias, vectors)
        distances = key_positions - query_positions
        rows = jnp.broadcast_to(distances + farthest, scores.shape)  # (B, N, T, S)
        scores = scores + SCALE * jnp.take_along_axis(by_row, rows, axis=3)
        content_bias = params["content_bias"]  # (N, H)
        by_key = jnp.einsum("nh,bnsh->bns", content_bias, k, preferred_element_type=jnp.float32)
        scores = scores + SCALE * by_key[:, :, None]
    if call.has_bias:
        scores = scores + bias
    if hides:
        scores = jnp.where(hidden, -jnp.inf, scores)
    if spec.sinks:
        sinks = jnp.broadcast_to(params["sinks"][:, None, None], (*scores.shape[:3], 1))
        with_sinks = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1))
        attn_weights = with_sinks[..., :-1]
    else:
        attn_weights = jax.nn.softmax(scores)
    context = jnp.einsum("bnts,bnsh->bnth", attn_weights.astype(v.dtype), v)  # (B, N, T, H)
    if may_hide_all:
        context = jnp.where(empty, 0.0, context)
    if gate is not None:
        gates = split_heads(linear(params["gate_proj"], query), NUM_HEADS)
        context = (context * jax.nn.sigmoid(gates.astype(jnp.float32))).astype(context.dtype)
    output = context.swapaxes(1, 2)
    output = output.reshape(*output.shape[:2], NUM_HEADS * VALUE_HEAD_DIM)  # (B, T, N * H)
    if context_norm is not None:
        output = normalize_context(params["context_norm"], output)
    if spec.out_proj:
        output = linear(params["out_proj"], output)  # (B, T, E)
    if call.cache == "ragged":
        output = jnp.where(is_real[:, :, None], output, 0.0)
    if appends:
        return output, cache
    else:
        return output


def linear(weights: Mapping[str, Array], features: Array) -> Array:
    """Multiply features (B, T, in) by a kernel (in, out), and add the bias if there is one."""
    if len(biases) > 1:
        return features @ weights["kernel"] + weights.get("bias", 0.0)
    elif True in biases:
        return features @ weights["kernel"] + weights["bias"]
    else:
        return features @ weights["kernel"]


def split_heads(features: Array, num_heads: int) -> Array:
    """Split the features of all heads: (B, T, heads * H) to (B, heads, T, H)."""
    return features.reshape(*features.shape[:2], num_heads, -1).swapaxes(1, 2)


if rope is not None:

    def rotation(token_positions: Array) -> tuple[Array, Array]:
        """Return cosines and sines at token positions (B or 1, T), each (B or 1, 1, T, R/2)."""
        if rope.sections is not None and call.has_positions:
            by_pair = jnp.moveaxis(token_positions[jnp.array(AXES)], 0, -1)  # (B or 1, T, R/2)
            angles = by_pair[:, None] * frequencies(longest(token_positions))
        else:
            angles = token_positions[:, None, :, None] * frequencies(longest(token_positions))
        if rope.attention_factor != 1.0:
            return ATTENTION_FACTOR * jnp.cos(angles), ATTENTION_FACTOR * jnp.sin(angles)
        else:
            return jnp.cos(angles), jnp.sin(angles)

    def rotate(heads: Array, cos: Array, sin: Array) -> Array:
        """Rotate each pair of features of heads (B, heads, T, H) by its angle."""
        wide = heads.astype(jnp.float32)
        if is_partial and rope.rotated == "first":
            wide, rest = wide[..., :ROTARY_DIM], wide[..., ROTARY_DIM:]
        elif is_partial:
            rest, wide = wide[..., :-ROTARY_DIM], wide[..., -ROTARY_DIM:]
        if rope.pairs == "interleaved":
            first, second = wide[..., 0::2], wide[..., 1::2]  # pairs (2 i, 2 i + 1)
            pairs = [first * cos - second * sin, second * cos + first * sin]
            rotated = jnp.stack(pairs, axis=-1).reshape(wide.shape)
        else:
            first, second = jnp.split(wide, 2, axis=-1)  # pairs (i, i + R/2)
            pairs = [first * cos - second * sin, second * cos + first * sin]
            rotated = jnp.concatenate(pairs, axis=-1)
        if is_partial and rope.rotated == "first":
            rotated = jnp.concatenate([rotated, rest], axis=-1)
        elif is_partial:
            rotated = jnp.concatenate([rest, rotated], axis=-1)
        return rotated.astype(heads.dtype)


from parity.explain.writing.templates.grid import *
from parity.explain.writing.templates.positions import *
