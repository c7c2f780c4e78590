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
        cache: earlier tokens, from `empty_cache` or an earlier call; the updated cache is also returned.
        other_cache: cache of another layer, which has already appended these tokens.
        new_lengths: number of real tokens of each sequence in x, (B,); the rest is padding, at any position.
        mask: boolean, True = masked, (B or 1, N or 1, T or 1, S). A fully masked row returns 0.
        bias: added to the scores; broadcasts to (B, N, T, S).
        positions: position of each token, (B or 1, T); for RoPE with several axes also (axes, B or 1, T).
    """
    num_tokens = query.shape[1] if call.is_cross else x.shape[1]
    if call.cache == "static" and spec.shared_kv:
        token_positions = other_cache.length - num_tokens + jnp.arange(num_tokens)[None]  # (1, T)
    elif call.cache == "static":
        token_positions = cache.length + jnp.arange(num_tokens)[None]  # (1, T)
    elif call.cache == "ragged":
        new_tokens = jnp.arange(num_tokens)
        is_real = new_tokens < new_lengths[:, None]  # (B, T)
        if spec.shared_kv:
            token_positions = (other_cache.lengths - new_lengths)[:, None] + jnp.where(is_real, new_tokens, 0)  # (B, T)
        else:
            token_positions = cache.lengths[:, None] + jnp.where(is_real, new_tokens, 0)  # (B, T)
        if call.has_positions:
            positions = jnp.where(is_real, positions, 0)  # padding adds no length
    elif needs_positions or spec.has_positions:
        token_positions = jnp.arange(num_tokens)[None]  # (1, T)
    if latent is None and not has_wide:
        q = split_heads(linear(params["q_proj"], query if call.is_cross else x), NUM_HEADS)  # (B, N, T, H)
        if not spec.shared_kv:
            k = split_heads(linear(params["k_proj"], key if call.is_cross else x), NUM_KV_HEADS)  # (B, K, S, H)
            v = split_heads(linear(params["v_proj"], key if call.is_cross else x), NUM_KV_HEADS)  # (B, K, S, H)
    elif latent is None:
        q = linear(params["q_proj"], query if call.is_cross else x)  # (B, T, N * H)
        if not spec.shared_kv:
            k = linear(params["k_proj"], key if call.is_cross else x)  # (B, S, K * H)
            v = linear(params["v_proj"], key if call.is_cross else x)  # (B, S, K * H)
        if spec.clip_qkv is not None:
            if spec.shared_kv:
                q = jnp.clip(q, -CLIP, CLIP)
            else:
                q, k, v = jnp.clip(q, -CLIP, CLIP), jnp.clip(k, -CLIP, CLIP), jnp.clip(v, -CLIP, CLIP)
        if qk_norm is not None and qk_norm.over == "width":
            q = normalize_qk(ABSENT if qk_norm.weight is None else params["q_norm"], q)
            if not spec.shared_kv:
                k = normalize_qk(ABSENT if qk_norm.weight is None else params["k_norm"], k)
        if v_norm is not None and v_norm.over == "width":
            v = normalize_v(ABSENT if v_norm.weight is None else params["v_norm"], v)
        q = split_heads(q, NUM_HEADS)  # (B, N, T, H)
        if not spec.shared_kv:
            k = split_heads(k, NUM_KV_HEADS)  # (B, K, S, H)
            v = split_heads(v, NUM_KV_HEADS)  # (B, K, S, H)
    if latent is None:
        if qk_norm is not None and qk_norm.over == "head" and not qk_norm.after_rope:
            q = normalize_qk(ABSENT if qk_norm.weight is None else params["q_norm"], q)
            if not spec.shared_kv:
                k = normalize_qk(ABSENT if qk_norm.weight is None else params["k_norm"], k)
        if v_norm is not None and v_norm.over == "head":
            v = normalize_v(ABSENT if v_norm.weight is None else params["v_norm"], v)
        if rope is not None:
            cos, sin = rotation(positions if call.has_positions else token_positions)  # (B or 1, 1, T, R/2)
            if spec.shared_kv:
                q = rotate(q, cos, sin)
            else:
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if qk_norm is not None and qk_norm.after_rope:
            q = normalize_qk(ABSENT if qk_norm.weight is None else params["q_norm"], q)
            if not spec.shared_kv:
                k = normalize_qk(ABSENT if qk_norm.weight is None else params["k_norm"], k)
    else:
        if latent.q_rank is None:
            q = linear(params["q_proj"], x)
        else:
            q_latents = normalize_latents(params["q_a_norm"], linear(params["q_a_proj"], x))
            if latent.q_factor != 1.0:
                q_latents = q_latents * Q_FACTOR
            q = linear(params["q_b_proj"], q_latents)
        q = split_heads(q, NUM_HEADS)  # (B, N, T, H)
        latents, shared_k = jnp.split(linear(params["kv_a_proj"], x), [KV_RANK], axis=-1)
        latents = normalize_latents(params["kv_a_norm"], latents)  # (B, T, KV_RANK)
        if latent.kv_factor != 1.0:
            latents = latents * KV_FACTOR
        shared_k = shared_k[:, None]  # (B, 1, T, ROPE_DIM)
        if rope is not None:
            cos, sin = rotation(positions if call.has_positions else token_positions)  # (B or 1, 1, T, ROPE_DIM/2)
            own_q, shared_q = jnp.split(q, [OWN_DIM], axis=-1)
            q, shared_k = jnp.concatenate([own_q, rotate(shared_q, cos, sin)], axis=-1), rotate(shared_k, cos, sin)
    if spec.shared_kv and call.cache is None:
        k, v = other_k, other_v
    elif spec.shared_kv:
        k, v = other_cache.keys, other_cache.values
    if temperature is not None:
        lengths = ((positions if call.has_positions else token_positions) + FIRST_POSITION) // TEMPERATURE_LENGTH
        factors = 1.0 + TEMPERATURE_SCALE * jnp.log1p(lengths.astype(jnp.float32))
        q = (q * factors[:, None, :, None]).astype(q.dtype)
    if call.cache == "static" and not spec.shared_kv:
        if latent is None:
            k = jax.lax.dynamic_update_slice_in_dim(cache.keys, k, cache.length, axis=2)
            v = jax.lax.dynamic_update_slice_in_dim(cache.values, v, cache.length, axis=2)
            cache = Cache(k, v, cache.length + num_tokens)
        else:
            latents = jax.lax.dynamic_update_slice_in_dim(cache.latents, latents, cache.length, axis=1)
            shared_k = jax.lax.dynamic_update_slice_in_dim(cache.shared_keys, shared_k, cache.length, axis=2)
            cache = Cache(latents, shared_k, cache.length + num_tokens)
    elif call.cache == "ragged" and not spec.shared_kv:
        rows = jnp.arange(token_positions.shape[0])[:, None]  # (B, 1)
        if latent is None:
            slots = jnp.where(is_real, token_positions, cache.keys.shape[2])  # (B, T); out of bounds for padding
            k = cache.keys.at[rows, :, slots].set(k.swapaxes(1, 2), mode="drop")
            v = cache.values.at[rows, :, slots].set(v.swapaxes(1, 2), mode="drop")
            cache = Cache(k, v, cache.lengths + new_lengths)
        else:
            slots = jnp.where(is_real, token_positions, cache.latents.shape[1])  # (B, T); out of bounds for padding
            latents = cache.latents.at[rows, slots].set(latents, mode="drop")
            shared_k = cache.shared_keys.at[rows, :, slots].set(shared_k.swapaxes(1, 2), mode="drop")
            cache = Cache(latents, shared_k, cache.lengths + new_lengths)
    if latent is not None:
        own_k, v = jnp.split(split_heads(linear(params["kv_b_proj"], latents), NUM_HEADS), [OWN_DIM], axis=-1)
        shared_k = jnp.broadcast_to(shared_k, (*own_k.shape[:3], ROPE_DIM))
        k = jnp.concatenate([own_k, shared_k], axis=-1)  # (B, N, S, H)
    if needs_positions or call.is_causal:
        key_positions = jnp.arange(k.shape[2])[None, None, None]  # (1, 1, 1, S)
    if needs_positions:
        query_positions = token_positions[:, None, :, None]  # (B or 1, 1, T, 1)
    elif call.is_causal:
        query_positions = jnp.arange(num_tokens)[None, None, :, None]  # (1, 1, T, 1)
    if call.is_causal or spec.span is not None or call.cache is not None:
        if call.is_causal or call.cache is not None:
            hidden = key_positions > query_positions  # (B or 1, 1, T, S)
            if spec.window_size is not None:
                hidden = hidden | (key_positions <= query_positions - WINDOW)
        elif spec.window_size is not None:
            hidden = jnp.abs(key_positions - query_positions) >= WINDOW
        else:
            hidden = key_positions // CHUNK != query_positions // CHUNK
        if spec.chunk_size is not None and (call.is_causal or call.cache is not None):
            hidden = hidden | (key_positions // CHUNK != query_positions // CHUNK)
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
        scores = scores + jnp.moveaxis(params["relative_bias"].astype(jnp.float32)[buckets], -1, 1)
    if products is not None:
        rows = jnp.broadcast_to(row_of(key_positions - query_positions), scores.shape)  # (B, N, T, S)
        if products.of_queries:
            by_row = jnp.einsum(
                "bnth,cnh->bntc" if products.per_head else "bnth,ch->bntc",
                q,
                params["relative_keys"],
                preferred_element_type=jnp.float32,
            )
            scores = scores + SCALE * jnp.take_along_axis(by_row, rows, axis=3)
        if products.of_keys:
            by_row = jnp.einsum(
                "bnsh,cnh->bnsc" if products.per_head else "bnsh,ch->bnsc",
                k,
                params["relative_queries"],
                preferred_element_type=jnp.float32,
            )
            scores = scores + SCALE * jnp.take_along_axis(by_row, rows.mT, axis=3).mT
    if sinusoids is not None:
        farthest = q.shape[2] + k.shape[2]
        waves = sinusoids_of(jnp.arange(farthest, -farthest - 1, -1))  # (rows, D_IN)
        vectors = jnp.einsum("ce,enh->nch", waves, params["relative_sinusoids"].astype(jnp.float32))
        biased_q = q.astype(jnp.float32) + params["position_bias"].astype(jnp.float32)[:, None]
        by_row = jnp.einsum("bnth,nch->bntc", biased_q, vectors)  # (B, N, T, rows)
        rows = jnp.broadcast_to(key_positions - query_positions + farthest, scores.shape)  # (B, N, T, S)
        content_products = jnp.einsum("nh,bnsh->bns", params["content_bias"], k, preferred_element_type=jnp.float32)
        distance_products = jnp.take_along_axis(by_row, rows, axis=3) + content_products[:, :, None]
        scores = scores + SCALE * distance_products
    if call.has_bias:
        scores = scores + bias
    if hides:
        scores = jnp.where(hidden, -jnp.inf, scores)
    if spec.sinks:
        sinks = jnp.broadcast_to(params["sinks"][:, None, None], (*scores.shape[:3], 1))
        attn_weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1))[..., :-1]
    else:
        attn_weights = jax.nn.softmax(scores)
    context = jnp.einsum("bnts,bnsh->bnth", attn_weights.astype(v.dtype), v)  # (B, N, T, H)
    if may_hide_all:
        context = jnp.where(empty, 0.0, context)
    if gate is not None:
        gates = split_heads(linear(params["gate_proj"], query if call.is_cross else x), NUM_HEADS)
        context = (context * jax.nn.sigmoid(gates.astype(jnp.float32))).astype(context.dtype)
    output = context.swapaxes(1, 2).reshape(context.shape[0], num_tokens, NUM_HEADS * VALUE_HEAD_DIM)
    if context_norm is not None:
        output = normalize_context(ABSENT if context_norm.weight is None else params["context_norm"], output)
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
    if has_biases == "all":
        return features @ weights["kernel"] + weights["bias"]
    elif has_biases == "none":
        return features @ weights["kernel"]
    else:
        return features @ weights["kernel"] + weights.get("bias", 0.0)


def split_heads(features: Array, num_heads: int) -> Array:
    """Split the features of all heads: (B, T, heads * H) to (B, heads, T, H)."""
    return features.reshape(*features.shape[:2], num_heads, -1).swapaxes(1, 2)


if rope is not None:

    def rotation(token_positions: Array) -> tuple[Array, Array]:
        """Return the cosines and sines of the angles at token positions (B or 1, T), each (B or 1, 1, T, R/2)."""
        if rope.sections is not None and call.has_positions:
            pair_positions = jnp.moveaxis(token_positions[jnp.array(AXES)], 0, -1)  # (B or 1, T, R/2)
            angles = pair_positions[:, None] * frequencies(
                longest(token_positions) if rope.depends_on_length else ABSENT
            )
        else:
            angles = token_positions[:, None, :, None] * frequencies(
                longest(token_positions) if rope.depends_on_length else ABSENT
            )
        if rope.attention_factor != 1.0:
            return ATTENTION_FACTOR * jnp.cos(angles), ATTENTION_FACTOR * jnp.sin(angles)
        else:
            return jnp.cos(angles), jnp.sin(angles)


if rope is not None:

    def frequencies(length: Array) -> Array:
        if rope.depends_on_length:
            """Return the angle of each pair of features per token, (B or 1, 1, 1, R/2)."""
        else:
            """Return the angle of each pair of features per token, (R/2,)."""
        if rope.section_frequencies != "shared":
            exponents = np.array(EXPONENTS, np.float32)
        else:
            exponents = np.arange(0, ROTARY_DIM, 2, dtype=np.float32) / np.float32(ROTARY_DIM)
        divisors = jnp.array(THETA ** exponents.astype(np.float64), jnp.float32)
        if isinstance(scaling, LinearScaling):
            return 1.0 / divisors / scaling.factor
        elif isinstance(scaling, ProportionalScaling):
            is_rotated = jnp.arange(ROTARY_DIM // 2) < int(scaling.fraction * spec.head_dim // 2)
            return is_rotated / divisors / scaling.factor
        elif isinstance(scaling, Llama3Scaling):
            turns = scaling.original_length / (2 * math.pi * divisors)  # within the original context length
            share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            share = jnp.clip(share, 0.0, 1.0)  # weight of the unscaled frequency
            return (share + (1.0 - share) / scaling.factor) / divisors
        elif isinstance(scaling, YarnScaling):
            pairs = jnp.arange(ROTARY_DIM // 2)
            share = 1.0 - jnp.clip(
                (pairs - RAMP_BEGIN) / (RAMP_END - RAMP_BEGIN), 0.0, 1.0
            )  # weight of the unscaled frequency
            return (share + (1.0 - share) / scaling.factor) / divisors
        elif isinstance(scaling, DynamicScaling):
            growth = scaling.factor * (length - scaling.original_length) / scaling.original_length + 1.0
            base = THETA * growth ** (ROTARY_DIM / (ROTARY_DIM - 2))
            return jnp.where(length > scaling.original_length, 1.0 / base**exponents, 1.0 / divisors)
        elif isinstance(scaling, LongRopeScaling):
            short, long = jnp.array(SHORT_FACTORS), jnp.array(LONG_FACTORS)
            return 1.0 / (jnp.where(length > scaling.original_length, long, short) * divisors)
        else:
            return 1.0 / divisors


if rope is not None and rope.depends_on_length:

    def longest(token_positions: Array) -> Array:
        """Return the number of tokens up to the last position of each sequence, (B or 1, 1, 1, 1)."""
        if rope.sections is not None and call.has_positions:
            token_positions = token_positions.max(axis=0)
        return token_positions.max(axis=-1)[:, None, None, None] + 1


if rope is not None:

    def rotate(heads: Array, cos: Array, sin: Array) -> Array:
        """Rotate each pair of features of heads (B, heads, T, H) by its angle."""
        wide = heads.astype(jnp.float32)
        if is_partial and rope.rotated == "first":
            wide, rest = wide[..., :ROTARY_DIM], wide[..., ROTARY_DIM:]
        elif is_partial:
            rest, wide = wide[..., :-ROTARY_DIM], wide[..., -ROTARY_DIM:]
        if rope.pairs == "interleaved":
            first, second = wide[..., 0::2], wide[..., 1::2]  # pairs (2 i, 2 i + 1)
            rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(wide.shape)
        else:
            first, second = jnp.split(wide, 2, axis=-1)  # pairs (i, i + R/2)
            rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        if is_partial and rope.rotated == "first":
            rotated = jnp.concatenate([rotated, rest], axis=-1)
        elif is_partial:
            rotated = jnp.concatenate([rest, rotated], axis=-1)
        return rotated.astype(heads.dtype)


if grid is not None:

    def bucket_of(query_positions: Array, key_positions: Array) -> Array:
        """Return the bucket of each query and key, by their positions on a grid in row-major order."""
        if grid.class_token:
            query_positions, key_positions = query_positions - 1, key_positions - 1  # the class token is at -1
        rows = query_positions // GRID_WIDTH - key_positions // GRID_WIDTH + GRID_HEIGHT - 1
        columns = query_positions % GRID_WIDTH - key_positions % GRID_WIDTH + GRID_WIDTH - 1
        buckets = rows * (2 * GRID_WIDTH - 1) + columns
        if grid.class_token:
            class_buckets = jnp.where(key_positions < 0, NUM_BUCKETS - 1, NUM_BUCKETS - 3)
            buckets = jnp.where(key_positions < 0, NUM_BUCKETS - 2, buckets)
            buckets = jnp.where(query_positions < 0, class_buckets, buckets)
        if call.cache is not None:
            buckets = jnp.minimum(buckets, NUM_BUCKETS - 1)  # for padding
        return buckets


if relative is not None and grid is None:

    def bucket_of(distances: Array) -> Array:
        """Return the bucket of each distance, key - query."""
        if relative.bidirectional:
            first, away = (distances > 0) * (NUM_BUCKETS // 2), jnp.abs(distances)
            last, exact = NUM_BUCKETS // 2 - 1, NUM_BUCKETS // 4  # half of the buckets hold a single distance
        else:
            first, away = 0, jnp.maximum(-distances, 0)
            last, exact = NUM_BUCKETS - 1, NUM_BUCKETS // 2
        steps = jnp.log(jnp.maximum(away, exact) / exact) / math.log(MAX_DISTANCE / exact) * (last + 1 - exact)
        return first + jnp.where(away < exact, away, jnp.minimum(exact + steps.astype(jnp.int32), last))


if products is not None:

    def row_of(distances: Array) -> Array:
        """Return the row of the vectors of each distance, key - query."""
        if products.num_exact is not None:
            away = jnp.abs(distances)
            farther = NUM_EXACT + jnp.searchsorted(jnp.array(STEPS), away, side="right")
            distances = jnp.sign(distances) * jnp.where(away <= NUM_EXACT, away, farther)
        return jnp.clip(distances, -NUM_BEFORE, NUM_AFTER) + NUM_BEFORE


if sinusoids is not None:

    def sinusoids_of(distances: Array) -> Array:
        """Return sines and cosines, in turn, of each distance, query - key."""
        angles = distances[:, None] * SINUSOID_THETA ** (-jnp.arange(0, D_IN, 2) / D_IN)
        return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=2).reshape(len(distances), D_IN)


if latent is not None:

    def normalize_latents(weights: Mapping[str, Array], features: Array) -> Array:
        """Divide by the root mean square of the last axis, and multiply by the weight."""
        wide = features.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + LATENT_EPS)
        return (wide * weights["weight"]).astype(features.dtype)


if qk_norm is not None and qk_norm.weight is None:

    def normalize_qk(features: Array) -> Array:
        """Normalize the last axis of queries and keys."""
        wide = features.astype(jnp.float32)
        if qk_norm.kind == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + QK_EPS)
        return wide.astype(features.dtype)

elif qk_norm is not None:

    def normalize_qk(weights: Mapping[str, Array], features: Array) -> Array:
        """Normalize the last axis of queries and keys."""
        wide = features.astype(jnp.float32)
        if qk_norm.kind == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + QK_EPS)
        weight = weights["weight"][:, None] if qk_norm.per_head else weights["weight"]
        if qk_norm.weight == "1+w":
            wide = wide * (1.0 + weight)
        else:
            wide = wide * weight
        if qk_norm.bias and qk_norm.per_head:
            wide = wide + weights["bias"][:, None]
        elif qk_norm.bias:
            wide = wide + weights["bias"]
        return wide.astype(features.dtype)


if v_norm is not None and v_norm.weight is None:

    def normalize_v(features: Array) -> Array:
        """Normalize the last axis of values."""
        wide = features.astype(jnp.float32)
        if v_norm.kind == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + V_EPS)
        return wide.astype(features.dtype)

elif v_norm is not None:

    def normalize_v(weights: Mapping[str, Array], features: Array) -> Array:
        """Normalize the last axis of values."""
        wide = features.astype(jnp.float32)
        if v_norm.kind == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + V_EPS)
        weight = weights["weight"][:, None] if v_norm.per_head else weights["weight"]
        if v_norm.weight == "1+w":
            wide = wide * (1.0 + weight)
        else:
            wide = wide * weight
        if v_norm.bias and v_norm.per_head:
            wide = wide + weights["bias"][:, None]
        elif v_norm.bias:
            wide = wide + weights["bias"]
        return wide.astype(features.dtype)


if context_norm is not None and context_norm.weight is None:

    def normalize_context(features: Array) -> Array:
        """Normalize the context of all heads."""
        wide = features.astype(jnp.float32)
        if context_norm.kind == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + CONTEXT_EPS)
        return wide.astype(features.dtype)

elif context_norm is not None:

    def normalize_context(weights: Mapping[str, Array], features: Array) -> Array:
        """Normalize the context of all heads."""
        wide = features.astype(jnp.float32)
        if context_norm.kind == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + CONTEXT_EPS)
        if context_norm.weight == "1+w":
            wide = wide * (1.0 + weights["weight"])
        else:
            wide = wide * weights["weight"]
        if context_norm.bias:
            wide = wide + weights["bias"]
        return wide.astype(features.dtype)
