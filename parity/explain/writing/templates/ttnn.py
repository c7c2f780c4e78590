"""TITLE"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import ttnn

from parity.explain.writing.subject import ABSENT
from parity.explain.writing.templates.names import *

hides = call.has_mask or spec.span is not None or call.cache is not None or call.is_causal

if hides:
    MASKED = -1e9  # finite, because kernels return NaN for a block of only -inf

if call.cache is not None:

    class Cache(NamedTuple):
        """Slots of the tokens so far; slots from the length of a sequence on are unused."""

        if latent is None:
            keys: ttnn.Tensor  # (B, K, S, H)
            values: ttnn.Tensor  # (B, K, S, H)
        else:
            latents: ttnn.Tensor  # (B, 1, S, KV_RANK)
            shared_keys: ttnn.Tensor  # (B, 1, S, ROPE_DIM)
        lengths: np.ndarray  # (B,), on the host


class Attention:
    """ABOUT"""

    def __init__(
        self, weights: Mapping[str, np.ndarray], device: ttnn.Device, dtype: ttnn.DataType = ttnn.bfloat16
    ) -> None:
        """Upload weights by name, projections as (out, in). The layer has their dtype."""
        self.device, self.dtype = device, dtype
        # HiFi4 with float32 sums gives occasional wrong results on Wormhole (tt-metal#38306).
        is_wormhole = device.arch() == ttnn.Arch.WORMHOLE_B0
        fidelity = ttnn.MathFidelity.HiFi3 if is_wormhole else ttnn.MathFidelity.HiFi4
        self.config = ttnn.init_device_compute_kernel_config(
            device.arch(), math_fidelity=fidelity, math_approx_mode=False, fp32_dest_acc_en=True, packer_l1_acc=True
        )
        self.weights = {
            name: self.upload(weight.T if "_proj.weight" in name else weight[None]) for name, weight in weights.items()
        }
        if spec.sinks:
            self.sinks = self.upload(weights["sinks"].reshape(1, NUM_HEADS, 1, 1), ttnn.float32)
        if relative is not None:
            # On the host, (buckets, N).
            self.relative_bias = weights["relative_bias"].astype(np.float32)
        if products is not None and products.of_queries:
            self.relative_keys = self.upload(by_heads(weights["relative_keys"]))  # (1, N, rows, H)
        if products is not None and products.of_keys:
            # (1, N, rows, H)
            self.relative_queries = self.upload(by_heads(weights["relative_queries"]))
        if sinusoids is not None:
            by_head = weights["relative_sinusoids"].swapaxes(0, 1)[None]
            self.relative_sinusoids = self.upload(by_head)  # (1, N, D_IN, H)
            self.content_bias = self.upload(weights["content_bias"][None, :, None])  # (1, N, 1, H)
            self.position_bias = self.upload(weights["position_bias"][None, :, None], ttnn.float32)

    def upload(self, array: np.ndarray, dtype: ttnn.DataType | None = None) -> ttnn.Tensor:
        """Put an array on the device, in tiles."""
        host = torch.tensor(np.asarray(array, np.float32))
        return ttnn.from_torch(host, dtype or self.dtype, layout=ttnn.TILE_LAYOUT, device=self.device)

    if appends:

        def empty_cache(self, batch_size: int, capacity: int) -> Cache:
            """Return a cache with `capacity` slots for each sequence."""
            if latent is None:
                first = self.upload(np.zeros((batch_size, NUM_KV_HEADS, capacity, HEAD_DIM)))
                second = self.upload(np.zeros((batch_size, NUM_KV_HEADS, capacity, VALUE_HEAD_DIM)))
            else:
                first = self.upload(np.zeros((batch_size, 1, capacity, KV_RANK)))
                second = self.upload(np.zeros((batch_size, 1, capacity, ROPE_DIM)))
            return Cache(first, second, np.zeros(batch_size, np.int64))

    def __call__(
        self,
        x: ttnn.Tensor,
        query: ttnn.Tensor,
        key: ttnn.Tensor,
        other_k: ttnn.Tensor,
        other_v: ttnn.Tensor,
        cache: Cache,
        other_cache: Cache,
        new_lengths: np.ndarray,
        mask: np.ndarray,
        bias: np.ndarray,
        positions: np.ndarray,
    ) -> tuple[ttnn.Tensor, Cache] if appends else ttnn.Tensor:
        """Attend from each query to its visible keys; return the output (B, T, E).

        Args:
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
            if spec.shared_kv:
                token_positions = other_cache.lengths[:, None] - num_tokens + np.arange(num_tokens)
            else:
                token_positions = cache.lengths[:, None] + np.arange(num_tokens)  # (B, T)
        elif call.cache == "ragged":
            new_tokens = np.arange(num_tokens)
            is_real = new_tokens < new_lengths[:, None]  # (B, T)
            new_tokens = np.where(is_real, new_tokens, 0)  # (B, T)
            if spec.shared_kv:
                token_positions = (other_cache.lengths - new_lengths)[:, None] + new_tokens
            else:
                token_positions = cache.lengths[:, None] + new_tokens
            if call.has_positions:
                positions = np.where(is_real, positions, 0)  # padding adds no length
            shown = self.upload(np.broadcast_to(is_real[:, :, None], tuple(x.shape)))
            x = ttnn.where(shown, x, 0.0)
        elif needs_positions or spec.has_positions:
            token_positions = np.arange(num_tokens)[None]  # (1, T)
        if rope is not None:
            cos, sin = self.rotation(positions)  # (B or 1, 1, T, R)
        if latent is not None:
            if latent.q_rank is None:
                q = self.linear("q_proj", query)  # (B, T, N * H)
            else:
                q_latents = self.linear("q_a_proj", query)  # (B, T, Q_RANK)
                q_latents = normalize_latents(self.weights, "q_a_norm", q_latents, self.config)
                if latent.q_factor != 1.0:
                    q_latents = ttnn.multiply(q_latents, Q_FACTOR)
                q = self.linear("q_b_proj", q_latents)  # (B, T, N * H)
            q = split_heads(q, NUM_HEADS)  # (B, N, T, H)
            compressed = self.linear("kv_a_proj", query)
            compressed = split_heads(compressed, 1)  # (B, 1, T, KV_RANK + ROPE_DIM)
            latents, shared_k = compressed[:, :, :, :KV_RANK], compressed[:, :, :, KV_RANK:]
            latents = normalize_latents(self.weights, "kv_a_norm", latents, self.config)
            if latent.kv_factor != 1.0:
                latents = ttnn.multiply(latents, KV_FACTOR)
            if rope is not None:
                own_q, shared_q = q[:, :, :, :OWN_DIM], q[:, :, :, OWN_DIM:]
                q = ttnn.concat([own_q, self.rotate(shared_q, cos, sin)], dim=-1)
                shared_k = self.rotate(shared_k, cos, sin)
        else:
            q = self.linear("q_proj", query)  # (B, T, N * H)
            if spec.clip_qkv is not None:
                q = ttnn.clamp(q, -CLIP, CLIP)
            if qk_norm_of == "width":
                q = normalize_qk(self.weights, "q_norm", q, self.config)
            q = split_heads(q, NUM_HEADS)  # (B, N, T, H)
            if qk_norm_of == "head":
                q = normalize_qk(self.weights, "q_norm", q, self.config)
            if rope is not None:
                q = self.rotate(q, cos, sin)
            if qk_norm_of == "rotated head":
                q = normalize_qk(self.weights, "q_norm", q, self.config)
            if not spec.shared_kv:
                k = self.linear("k_proj", key)  # (B, S, K * H)
                if spec.clip_qkv is not None:
                    k = ttnn.clamp(k, -CLIP, CLIP)
                if qk_norm_of == "width":
                    k = normalize_qk(self.weights, "k_norm", k, self.config)
                k = split_heads(k, NUM_KV_HEADS)  # (B, K, S, H)
                if qk_norm_of == "head":
                    k = normalize_qk(self.weights, "k_norm", k, self.config)
                if rope is not None:
                    k = self.rotate(k, cos, sin)
                if qk_norm_of == "rotated head":
                    k = normalize_qk(self.weights, "k_norm", k, self.config)
                v = self.linear("v_proj", key)  # (B, S, K * H)
                if spec.clip_qkv is not None:
                    v = ttnn.clamp(v, -CLIP, CLIP)
                if v_norm_of == "width":
                    v = normalize_v(self.weights, "v_norm", v, self.config)
                v = split_heads(v, NUM_KV_HEADS)  # (B, K, S, H)
                if v_norm_of == "head":
                    v = normalize_v(self.weights, "v_norm", v, self.config)
        if temperature is not None:
            lengths = (positions + FIRST_POSITION) // TEMPERATURE_LENGTH
            factors = (1.0 + TEMPERATURE_SCALE * np.log1p(lengths))[:, None, :, None]
            wide = ttnn.typecast(q, ttnn.float32)
            q = ttnn.multiply(wide, self.upload(factors, ttnn.float32))
            q = ttnn.typecast(q, self.dtype)
        if appends:
            capacity = cache[0].shape[2]
            is_slot = np.arange(capacity)[:, None] == token_positions[:, None, None, :]  # (B, 1, S, T)
            if call.cache == "ragged":
                is_slot = is_slot & is_real[:, None, None, :]
                assert token_positions[is_real].max(initial=0) < capacity, "the cache is full"
                lengths = cache.lengths + new_lengths
            else:
                assert token_positions.max() < capacity, "the cache is full"
                lengths = cache.lengths + num_tokens
            if latent is None:
                k = self.write(cache.keys, k, is_slot)
                v = self.write(cache.values, v, is_slot)
                cache = Cache(k, v, lengths)
            else:
                latents = self.write(cache.latents, latents, is_slot)
                shared_k = self.write(cache.shared_keys, shared_k, is_slot)
                cache = Cache(latents, shared_k, lengths)
        elif takes_other_kv:
            k, v = other_k, other_v
        elif spec.shared_kv:
            k, v = other_cache.keys, other_cache.values
        if latent is not None:
            batch_size, _, num_keys, _ = latents.shape
            kv = self.linear("kv_b_proj", ttnn.reshape(latents, (batch_size, num_keys, KV_RANK)))
            kv = split_heads(kv, NUM_HEADS)  # (B, N, S, OWN_DIM + H)
            shared_k = ttnn.repeat(shared_k, (1, NUM_HEADS, 1, 1))
            k = ttnn.concat([kv[:, :, :, :OWN_DIM], shared_k], dim=-1)  # (B, N, S, H)
            v = kv[:, :, :, OWN_DIM:]
        if needs_positions or call.is_causal:
            key_positions = np.arange(k.shape[2])
        if needs_positions:
            query_positions = token_positions[:, None, :, None]  # (B or 1, 1, T, 1)
        elif call.is_causal:
            query_positions = np.arange(num_tokens)[None, None, :, None]  # (1, 1, T, 1)
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
                hidden = np.abs(key_positions - query_positions) >= WINDOW
            else:
                hidden = key_positions // CHUNK != query_positions // CHUNK
            if call.has_mask:
                hidden = hidden | mask
        elif call.has_mask:
            hidden = mask
        if groups > 1:
            k = ttnn.repeat_interleave(k, NUM_HEADS // NUM_KV_HEADS, dim=1)  # (B, N, S, H)
            v = ttnn.repeat_interleave(v, NUM_HEADS // NUM_KV_HEADS, dim=1)  # (B, N, S, H)
        scores = ttnn.matmul(q, k, transpose_b=True, dtype=ttnn.float32, compute_kernel_config=self.config)
        scores = ttnn.multiply(scores, SCALE)  # (B, N, T, S)
        if spec.soft_cap is not None:
            capped = ttnn.tanh(ttnn.multiply(scores, 1.0 / SOFT_CAP))
            scores = ttnn.multiply(capped, SOFT_CAP)
        if alibi is not None:
            slopes = np.array(SLOPES)[:, None, None]  # (N, 1, 1)
            decrease = slopes * np.abs(key_positions - query_positions)
            scores = ttnn.subtract(scores, self.upload(decrease, ttnn.float32))
        if relative is not None:
            if grid is None:
                buckets = bucket_of(key_positions - query_positions)[:, 0]  # (B or 1, T, S)
            else:
                buckets = bucket_of(query_positions, key_positions)[:, 0]  # (B or 1, T, S)
            distance_bias = np.moveaxis(self.relative_bias[buckets], -1, 1)  # (B or 1, N, T, S)
            scores = ttnn.add(scores, self.upload(distance_bias, ttnn.float32))
        if products is not None:
            shape = (scores.shape[0], NUM_HEADS, num_tokens, k.shape[2])
            rows = np.broadcast_to(row_of(key_positions - query_positions), shape)  # (B, N, T, S)
            if products.of_queries:
                distance_products = self.products_of(q, self.relative_keys, rows)
                scores = ttnn.add(scores, ttnn.multiply(distance_products, SCALE))
            if products.of_keys:
                distance_products = self.products_of(k, self.relative_queries, rows.swapaxes(2, 3))
                distance_products = ttnn.transpose(distance_products, 2, 3)
                scores = ttnn.add(scores, ttnn.multiply(distance_products, SCALE))
        if sinusoids is not None:
            batch_size, num_keys = scores.shape[0], k.shape[2]
            farthest = num_tokens + num_keys
            waves = sinusoids_of(np.arange(farthest, -farthest - 1, -1))[None, None]
            waves = ttnn.repeat(self.upload(waves, ttnn.float32), (1, NUM_HEADS, 1, 1))
            vectors = ttnn.matmul(
                waves, self.relative_sinusoids, dtype=ttnn.float32, compute_kernel_config=self.config
            )  # (1, N, rows, H)
            biased_q = ttnn.add(ttnn.typecast(q, ttnn.float32), self.position_bias)
            shape = (batch_size, NUM_HEADS, num_tokens, num_keys)
            rows = np.broadcast_to(key_positions - query_positions + farthest, shape)
            distance_products = self.products_of(biased_q, vectors, rows)
            scores = ttnn.add(scores, ttnn.multiply(distance_products, SCALE))
            content_bias = ttnn.repeat(self.content_bias, (batch_size, 1, 1, 1))
            content_products = ttnn.matmul(
                content_bias, k, transpose_b=True, dtype=ttnn.float32, compute_kernel_config=self.config
            )  # (B, N, 1, S)
            scores = ttnn.add(scores, ttnn.multiply(content_products, SCALE))
        if call.has_bias:
            scores = ttnn.add(scores, self.upload(bias, ttnn.float32))
        if hides:
            hidden = np.broadcast_to(hidden, (*hidden.shape[:2], num_tokens, k.shape[2]))
            scores = ttnn.where(self.upload(hidden, ttnn.float32), MASKED, scores)
        if spec.sinks:
            sinks = ttnn.repeat(self.sinks, (scores.shape[0], 1, num_tokens, 1))
            scores = ttnn.concat([scores, sinks], dim=-1)
        attn_weights = ttnn.softmax(scores, dim=-1, numeric_stable=True, compute_kernel_config=self.config)
        if spec.sinks:
            attn_weights = attn_weights[:, :, :, : k.shape[2]]
        attn_weights = ttnn.typecast(attn_weights, self.dtype)
        context = ttnn.matmul(attn_weights, v, dtype=self.dtype, compute_kernel_config=self.config)  # (B, N, T, H)
        if may_hide_all:
            # Fully masked rows return 0.
            has_keys = self.upload(~hidden.all(axis=-1, keepdims=True))
            context = ttnn.multiply(context, has_keys)
        if gate is not None:
            gates = split_heads(self.linear("gate_proj", query), NUM_HEADS)
            gates = ttnn.sigmoid_accurate(ttnn.typecast(gates, ttnn.float32))
            context = ttnn.multiply(ttnn.typecast(context, ttnn.float32), gates)
            context = ttnn.typecast(context, self.dtype)
        output = ttnn.transpose(context, 1, 2)
        output = ttnn.reshape(output, (output.shape[0], num_tokens, NUM_HEADS * VALUE_HEAD_DIM))
        if context_norm is not None:
            output = normalize_context(self.weights, "context_norm", output, self.config)
        if spec.out_proj:
            output = self.linear("out_proj", output)  # (B, T, E)
        if call.cache == "ragged":
            output = ttnn.multiply(output, self.upload(is_real[:, :, None]))
        if appends:
            return output, cache
        else:
            return output

    def linear(self, name: str, features: ttnn.Tensor) -> ttnn.Tensor:
        """Multiply features (B, T, in) by a matrix (in, out), and add the bias if there is one."""
        weight = self.weights[f"{name}.weight"]
        bias = self.weights.get(f"{name}.bias")
        return ttnn.linear(
            features,
            weight,
            bias=bias if True in biases else ABSENT,
            dtype=self.dtype,
            compute_kernel_config=self.config,
        )

    if products is not None or sinusoids is not None:

        def products_of(self, heads: ttnn.Tensor, vectors: ttnn.Tensor, rows: np.ndarray) -> ttnn.Tensor:
            """Return the products of heads (B, N, T, H) with the vectors of rows (B, N, T, S)."""
            vectors = ttnn.repeat(vectors, (heads.shape[0], 1, 1, 1))
            by_row = ttnn.matmul(
                heads,
                vectors,
                transpose_b=True,
                dtype=ttnn.float32,
                compute_kernel_config=self.config,
            )
            host = torch.tensor(rows.astype(np.int32))
            index = ttnn.from_torch(host, dtype=ttnn.uint32, layout=ttnn.TILE_LAYOUT, device=self.device)
            return ttnn.gather(by_row, 3, index)

    if appends:

        def write(self, slots: ttnn.Tensor, new: ttnn.Tensor, is_slot: np.ndarray) -> ttnn.Tensor:
            """Return slots (B, heads, S, H) with new tokens (B, heads, T, H), by `is_slot`."""
            batch_size, num_heads, capacity, _ = slots.shape
            chosen = np.broadcast_to(is_slot, (batch_size, num_heads, capacity, new.shape[2]))
            moved = ttnn.matmul(self.upload(chosen), new, dtype=self.dtype, compute_kernel_config=self.config)
            is_new = np.broadcast_to(chosen.any(axis=-1, keepdims=True), tuple(slots.shape))
            return ttnn.where(self.upload(is_new), moved, slots)

    if rope is not None:

        def rotation(self, token_positions: np.ndarray) -> tuple[ttnn.Tensor, ttnn.Tensor]:
            """Return cosines and sines, (B or 1, 1, T, R), from the host, exact at large angles."""
            if rope.sections is not None and call.has_positions:
                by_pair = np.moveaxis(token_positions[list(AXES)], 0, -1)  # (B or 1, T, R/2)
                angles = by_pair[:, None] * frequencies(longest(token_positions))
            else:
                angles = token_positions[:, None, :, None] * frequencies(longest(token_positions))
            if rope.pairs == "interleaved":
                angles = np.repeat(angles, 2, axis=-1)
            else:
                angles = np.concatenate([angles, angles], axis=-1)
            if rope.attention_factor != 1.0:
                cos, sin = ATTENTION_FACTOR * np.cos(angles), ATTENTION_FACTOR * np.sin(angles)
            else:
                cos, sin = np.cos(angles), np.sin(angles)
            return self.upload(cos, ttnn.float32), self.upload(sin, ttnn.float32)

        def rotate(self, heads: ttnn.Tensor, cos: ttnn.Tensor, sin: ttnn.Tensor) -> ttnn.Tensor:
            """Rotate each pair of features of heads (B, heads, T, H) by its angle."""
            wide = ttnn.typecast(heads, ttnn.float32)
            if is_partial and rope.rotated == "first":
                wide, rest = wide[:, :, :, :ROTARY_DIM], wide[:, :, :, ROTARY_DIM:]
            elif is_partial:
                num_rest = HEAD_DIM - ROTARY_DIM
                rest, wide = wide[:, :, :, :num_rest], wide[:, :, :, num_rest:]
            if rope.pairs == "interleaved":
                swap = np.zeros((ROTARY_DIM, ROTARY_DIM))  # pairs (2 i, 2 i + 1)
                swap[1::2, 0::2] = -np.eye(ROTARY_DIM // 2)
                swap[0::2, 1::2] = np.eye(ROTARY_DIM // 2)
                swapped = ttnn.linear(wide, self.upload(swap, ttnn.float32), compute_kernel_config=self.config)
            else:
                first, second = wide[:, :, :, : ROTARY_DIM // 2], wide[:, :, :, ROTARY_DIM // 2 :]  # pairs (i, i + R/2)
                swapped = ttnn.concat([ttnn.neg(second), first], dim=-1)
            rotated = ttnn.add(ttnn.multiply(wide, cos), ttnn.multiply(swapped, sin))
            if is_partial and rope.rotated == "first":
                rotated = ttnn.concat([rotated, rest], dim=-1)
            elif is_partial:
                rotated = ttnn.concat([rest, rotated], dim=-1)
            return ttnn.typecast(rotated, self.dtype)


def split_heads(features: ttnn.Tensor, num_heads: int) -> ttnn.Tensor:
    """Split the features of all heads: (B, T, heads * H) to (B, heads, T, H)."""
    batch_size, num_tokens, _ = features.shape
    return ttnn.transpose(ttnn.reshape(features, (batch_size, num_tokens, num_heads, -1)), 1, 2)


if products is not None:

    def by_heads(table: np.ndarray) -> np.ndarray:
        """Return the vectors of each head, (1, N, rows, H)."""
        if products.per_head:
            return table.swapaxes(0, 1)[None]
        else:
            return np.broadcast_to(table, (1, NUM_HEADS, *table.shape))


from parity.explain.writing.templates.grid import *
from parity.explain.writing.templates.positions import *
