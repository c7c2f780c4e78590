"""TITLE"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import ttnn

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
        """Upload weights by name; those of projections are (out, in). The layer computes in their dtype."""
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
            self.relative_bias = weights["relative_bias"].astype(np.float32)  # (buckets, N), on the host
        if products is not None and products.of_queries:
            self.relative_keys = self.upload(by_heads(weights["relative_keys"]))  # (1, N, rows, H)
        if products is not None and products.of_keys:
            self.relative_queries = self.upload(by_heads(weights["relative_queries"]))  # (1, N, rows, H)
        if sinusoids is not None:
            self.relative_sinusoids = self.upload(weights["relative_sinusoids"].swapaxes(0, 1)[None])  # (1, N, D_IN, H)
            self.content_bias = self.upload(weights["content_bias"][None, :, None])  # (1, N, 1, H)
            self.position_bias = self.upload(weights["position_bias"][None, :, None], ttnn.float32)

    def upload(self, array: np.ndarray, dtype: ttnn.DataType | None = None) -> ttnn.Tensor:
        """Put an array on the device, in tiles."""
        host = torch.tensor(np.asarray(array, np.float32))
        return ttnn.from_torch(host, dtype=dtype or self.dtype, layout=ttnn.TILE_LAYOUT, device=self.device)

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
            cache: earlier tokens, from `empty_cache` or an earlier call; the updated cache is also returned.
            other_cache: cache of another layer, which has already appended these tokens.
            new_lengths: number of real tokens of each sequence in x, (B,); the rest is padding, at any position.
            mask: boolean, True = masked, (B or 1, N or 1, T or 1, S). A fully masked row returns 0.
            bias: added to the scores; broadcasts to (B, N, T, S).
            positions: position of each token, (B or 1, T); for RoPE with several axes also (axes, B or 1, T).
        """
        num_tokens = query.shape[1] if call.is_cross else x.shape[1]
        if call.cache == "static" and spec.shared_kv:
            token_positions = other_cache.lengths[:, None] - num_tokens + np.arange(num_tokens)  # (B, T)
        elif call.cache == "static":
            token_positions = cache.lengths[:, None] + np.arange(num_tokens)  # (B, T)
        elif call.cache == "ragged":
            is_real = np.arange(num_tokens) < new_lengths[:, None]  # (B, T)
            if spec.shared_kv:
                lengths = other_cache.lengths - new_lengths  # before these tokens
                token_positions = lengths[:, None] + np.where(is_real, np.arange(num_tokens), 0)  # (B, T)
            else:
                token_positions = cache.lengths[:, None] + np.where(is_real, np.arange(num_tokens), 0)  # (B, T)
            if call.has_positions:
                positions = np.where(is_real, positions, 0)  # padding adds no length
            shown = self.upload(np.broadcast_to(is_real[:, :, None], tuple(x.shape)))
            x = ttnn.where(shown, x, 0.0)
        elif needs_positions or spec.has_positions:
            token_positions = np.arange(num_tokens)[None]  # (1, T)
        if latent is None and not has_wide:
            q = split_heads(self.linear("q_proj", query if call.is_cross else x), NUM_HEADS)  # (B, N, T, H)
            if not spec.shared_kv:
                k = split_heads(self.linear("k_proj", key if call.is_cross else x), NUM_KV_HEADS)  # (B, K, S, H)
                v = split_heads(self.linear("v_proj", key if call.is_cross else x), NUM_KV_HEADS)  # (B, K, S, H)
        elif latent is None:
            q = self.linear("q_proj", query if call.is_cross else x)  # (B, T, N * H)
            if not spec.shared_kv:
                k = self.linear("k_proj", key if call.is_cross else x)  # (B, S, K * H)
                v = self.linear("v_proj", key if call.is_cross else x)  # (B, S, K * H)
            if spec.clip_qkv is not None:
                if spec.shared_kv:
                    q = ttnn.clamp(q, -CLIP, CLIP)
                else:
                    q, k, v = ttnn.clamp(q, -CLIP, CLIP), ttnn.clamp(k, -CLIP, CLIP), ttnn.clamp(v, -CLIP, CLIP)
            if qk_norm is not None and qk_norm.over == "width":
                if spec.shared_kv:
                    q = self.normalize_qk("q_norm", q)
                else:
                    q, k = self.normalize_qk("q_norm", q), self.normalize_qk("k_norm", k)
            if v_norm is not None and v_norm.over == "width":
                v = self.normalize_v("v_norm", v)
            q = split_heads(q, NUM_HEADS)  # (B, N, T, H)
            if not spec.shared_kv:
                k = split_heads(k, NUM_KV_HEADS)  # (B, K, S, H)
                v = split_heads(v, NUM_KV_HEADS)  # (B, K, S, H)
        if latent is None:
            if qk_norm is not None and qk_norm.over == "head" and not qk_norm.after_rope:
                if spec.shared_kv:
                    q = self.normalize_qk("q_norm", q)
                else:
                    q, k = self.normalize_qk("q_norm", q), self.normalize_qk("k_norm", k)
            if v_norm is not None and v_norm.over == "head":
                v = self.normalize_v("v_norm", v)
            if rope is not None:
                cos, sin = self.rotation(positions if call.has_positions else token_positions)  # (B or 1, 1, T, R)
                if spec.shared_kv:
                    q = self.rotate(q, cos, sin)
                else:
                    q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
            if qk_norm is not None and qk_norm.after_rope:
                if spec.shared_kv:
                    q = self.normalize_qk("q_norm", q)
                else:
                    q, k = self.normalize_qk("q_norm", q), self.normalize_qk("k_norm", k)
        else:
            if latent.q_rank is None:
                q = self.linear("q_proj", x)
            else:
                q_latents = self.normalize_latents("q_a_norm", self.linear("q_a_proj", x))
                if latent.q_factor != 1.0:
                    q_latents = ttnn.multiply(q_latents, Q_FACTOR)
                q = self.linear("q_b_proj", q_latents)
            q = split_heads(q, NUM_HEADS)  # (B, N, T, H)
            compressed = split_heads(self.linear("kv_a_proj", x), 1)  # (B, 1, T, KV_RANK + ROPE_DIM)
            latents, shared_k = compressed[:, :, :, :KV_RANK], compressed[:, :, :, KV_RANK:]
            latents = self.normalize_latents("kv_a_norm", latents)
            if latent.kv_factor != 1.0:
                latents = ttnn.multiply(latents, KV_FACTOR)
            if rope is not None:
                # (B or 1, 1, T, ROPE_DIM)
                cos, sin = self.rotation(positions if call.has_positions else token_positions)
                rotated_q = self.rotate(q[:, :, :, OWN_DIM:], cos, sin)
                q, shared_k = ttnn.concat([q[:, :, :, :OWN_DIM], rotated_q], dim=-1), self.rotate(shared_k, cos, sin)
        if spec.shared_kv and call.cache is None:
            k, v = other_k, other_v
        elif spec.shared_kv:
            k, v = other_cache.keys, other_cache.values
        if temperature is not None:
            lengths = ((positions if call.has_positions else token_positions) + FIRST_POSITION) // TEMPERATURE_LENGTH
            factors = self.upload((1.0 + TEMPERATURE_SCALE * np.log1p(lengths))[:, None, :, None], ttnn.float32)
            q = ttnn.typecast(ttnn.multiply(ttnn.typecast(q, ttnn.float32), factors), self.dtype)
        if call.cache == "static" and not spec.shared_kv:
            assert token_positions.max() < cache[0].shape[2], "the cache is full"
            is_slot = np.arange(cache[0].shape[2])[:, None] == token_positions[:, None, None, :]  # (B, 1, S, T)
            cache = Cache(
                self.write(cache[0], k if latent is None else latents, is_slot),
                self.write(cache[1], v if latent is None else shared_k, is_slot),
                cache.lengths + num_tokens,
            )
        elif call.cache == "ragged" and not spec.shared_kv:
            assert token_positions[is_real].max(initial=0) < cache[0].shape[2], "the cache is full"
            is_slot = np.arange(cache[0].shape[2])[:, None] == token_positions[:, None, None, :]  # (B, 1, S, T)
            is_slot = is_slot & is_real[:, None, None, :]
            cache = Cache(
                self.write(cache[0], k if latent is None else latents, is_slot),
                self.write(cache[1], v if latent is None else shared_k, is_slot),
                cache.lengths + new_lengths,
            )
        if appends and latent is None:
            k, v = cache.keys, cache.values
        elif appends:
            latents, shared_k = cache.latents, cache.shared_keys
        if latent is not None:
            batch_size, num_keys = latents.shape[0], latents.shape[2]
            kv = self.linear("kv_b_proj", ttnn.reshape(latents, (batch_size, num_keys, KV_RANK)))
            kv = split_heads(kv, NUM_HEADS)  # (B, N, S, OWN_DIM + H)
            shared_k = ttnn.repeat(shared_k, (1, NUM_HEADS, 1, 1))
            k, v = ttnn.concat([kv[:, :, :, :OWN_DIM], shared_k], dim=-1), kv[:, :, :, OWN_DIM:]
        if needs_positions or call.is_causal:
            key_positions = np.arange(k.shape[2])
        if needs_positions:
            query_positions = token_positions[:, None, :, None]  # (B or 1, 1, T, 1)
        elif call.is_causal:
            query_positions = np.arange(num_tokens)[None, None, :, None]  # (1, 1, T, 1)
        if call.is_causal or spec.span is not None or call.cache is not None:
            if call.is_causal or call.cache is not None:
                hidden = key_positions > query_positions  # (B or 1, 1, T, S)
                if spec.window_size is not None:
                    hidden = hidden | (key_positions <= query_positions - WINDOW)
            elif spec.window_size is not None:
                hidden = np.abs(key_positions - query_positions) >= WINDOW
            else:
                hidden = key_positions // CHUNK != query_positions // CHUNK
            if spec.chunk_size is not None and (call.is_causal or call.cache is not None):
                hidden = hidden | (key_positions // CHUNK != query_positions // CHUNK)
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
            scores = ttnn.multiply(ttnn.tanh(ttnn.multiply(scores, 1.0 / SOFT_CAP)), SOFT_CAP)
        if alibi is not None:
            slopes = np.array(SLOPES)[:, None, None]  # (N, 1, 1)
            scores = ttnn.subtract(scores, self.upload(slopes * np.abs(key_positions - query_positions), ttnn.float32))
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
                distance_products = ttnn.transpose(
                    self.products_of(k, self.relative_queries, rows.swapaxes(2, 3)), 2, 3
                )
                scores = ttnn.add(scores, ttnn.multiply(distance_products, SCALE))
        if sinusoids is not None:
            batch_size, farthest = scores.shape[0], num_tokens + k.shape[2]
            waves = sinusoids_of(np.arange(farthest, -farthest - 1, -1))  # (rows, D_IN)
            waves = ttnn.repeat(self.upload(waves[None, None], ttnn.float32), (1, NUM_HEADS, 1, 1))
            vectors = ttnn.matmul(waves, self.relative_sinusoids, dtype=ttnn.float32, compute_kernel_config=self.config)
            shape = (batch_size, NUM_HEADS, num_tokens, k.shape[2])
            rows = np.broadcast_to(key_positions - query_positions + farthest, shape)  # (B, N, T, S)
            biased_q = ttnn.add(ttnn.typecast(q, ttnn.float32), self.position_bias)
            content_bias = ttnn.repeat(self.content_bias, (batch_size, 1, 1, 1))
            content_products = ttnn.matmul(
                content_bias, k, transpose_b=True, dtype=ttnn.float32, compute_kernel_config=self.config
            )
            distance_products = ttnn.add(self.products_of(biased_q, vectors, rows), content_products)
            scores = ttnn.add(scores, ttnn.multiply(distance_products, SCALE))
        if call.has_bias:
            scores = ttnn.add(scores, self.upload(bias, ttnn.float32))
        if hides:
            masked = self.upload(
                np.broadcast_to(hidden, (hidden.shape[0], hidden.shape[1], num_tokens, k.shape[2])), ttnn.float32
            )
            scores = ttnn.where(masked, MASKED, scores)
        if spec.sinks:
            sinks = ttnn.repeat(self.sinks, (scores.shape[0], 1, num_tokens, 1))
            scores = ttnn.concat([scores, sinks], dim=-1)
        attn_weights = ttnn.softmax(scores, dim=-1, numeric_stable=True, compute_kernel_config=self.config)
        if spec.sinks:
            attn_weights = attn_weights[:, :, :, : k.shape[2]]
        attn_weights = ttnn.typecast(attn_weights, self.dtype)
        context = ttnn.matmul(attn_weights, v, dtype=self.dtype, compute_kernel_config=self.config)  # (B, N, T, H)
        if may_hide_all:
            has_keys = self.upload(~hidden.all(axis=-1, keepdims=True))  # fully masked rows return 0
            context = ttnn.multiply(context, has_keys)
        if gate is not None:
            gates = split_heads(self.linear("gate_proj", query if call.is_cross else x), NUM_HEADS)
            gates = ttnn.sigmoid_accurate(ttnn.typecast(gates, ttnn.float32))
            context = ttnn.typecast(ttnn.multiply(ttnn.typecast(context, ttnn.float32), gates), self.dtype)
        output = ttnn.transpose(context, 1, 2)
        output = ttnn.reshape(output, (output.shape[0], num_tokens, NUM_HEADS * VALUE_HEAD_DIM))
        if context_norm is not None:
            output = self.normalize_context(output)
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
        return ttnn.linear(
            features,
            self.weights[f"{name}.weight"],
            bias=ABSENT if has_biases == "none" else self.weights.get(f"{name}.bias"),
            dtype=self.dtype,
            compute_kernel_config=self.config,
        )

    if products is not None or sinusoids is not None:

        def products_of(self, heads: ttnn.Tensor, vectors: ttnn.Tensor, rows: np.ndarray) -> ttnn.Tensor:
            """Return the products of heads (B, N, T, H) with the vectors of rows (B, N, T, S)."""
            vectors = ttnn.repeat(vectors, (heads.shape[0], 1, 1, 1))
            by_row = ttnn.matmul(
                heads, vectors, transpose_b=True, dtype=ttnn.float32, compute_kernel_config=self.config
            )
            host = torch.tensor(rows.astype(np.int32))
            index = ttnn.from_torch(host, dtype=ttnn.uint32, layout=ttnn.TILE_LAYOUT, device=self.device)
            return ttnn.gather(by_row, 3, index)

    if call.cache is not None:

        def write(self, slots: ttnn.Tensor, new: ttnn.Tensor, is_slot: np.ndarray) -> ttnn.Tensor:
            """Return slots (B, heads, S, H) with new tokens (B, heads, T, H); `is_slot` maps slots to tokens."""
            batch_size, num_heads, capacity, _ = slots.shape
            chosen = np.broadcast_to(is_slot, (batch_size, num_heads, capacity, new.shape[2]))
            moved = ttnn.matmul(self.upload(chosen), new, dtype=self.dtype, compute_kernel_config=self.config)
            is_new = self.upload(np.broadcast_to(chosen.any(axis=-1, keepdims=True), tuple(slots.shape)))
            return ttnn.where(is_new, moved, slots)

    if rope is not None:

        def rotation(self, token_positions: np.ndarray) -> tuple[ttnn.Tensor, ttnn.Tensor]:
            """Return cosines and sines, (B or 1, 1, T, R), from the host: the device is inexact for large angles."""
            if rope.sections is not None and call.has_positions:
                angles = np.moveaxis(token_positions[list(AXES)], 0, -1) * frequencies(
                    longest(token_positions) if rope.depends_on_length else ABSENT
                )  # (B or 1, T, R/2)
            else:
                angles = token_positions[:, :, None] * frequencies(
                    longest(token_positions) if rope.depends_on_length else ABSENT
                )  # (B or 1, T, R/2)
            if rope.pairs == "interleaved":
                angles = np.repeat(angles, 2, axis=-1)[:, None]
            else:
                angles = np.concatenate([angles, angles], axis=-1)[:, None]
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
                rest, wide = wide[:, :, :, : HEAD_DIM - ROTARY_DIM], wide[:, :, :, HEAD_DIM - ROTARY_DIM :]
            if rope.pairs == "interleaved":
                swap = np.zeros((ROTARY_DIM, ROTARY_DIM))  # pairs (2 i, 2 i + 1)
                swap[1::2, 0::2], swap[0::2, 1::2] = -np.eye(ROTARY_DIM // 2), np.eye(ROTARY_DIM // 2)
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

    if qk_norm is not None:

        def normalize_qk(self, name: str, features: ttnn.Tensor) -> ttnn.Tensor:
            """Normalize the last axis of queries or keys."""
            wide = ttnn.typecast(features, ttnn.float32)
            if qk_norm.kind == "layer":
                wide = ttnn.subtract(wide, ttnn.mean(wide, dim=-1, keepdim=True, compute_kernel_config=self.config))
            square = ttnn.mean(ttnn.square(wide), dim=-1, keepdim=True, compute_kernel_config=self.config)
            wide = ttnn.multiply(wide, ttnn.rsqrt(ttnn.add(square, QK_EPS)))
            if qk_norm.weight is not None:
                weight = ttnn.typecast(self.weights[f"{name}.weight"], ttnn.float32)
                if qk_norm.weight == "1+w":
                    weight = ttnn.add(weight, 1.0)
                if qk_norm.per_head:
                    weight = ttnn.reshape(weight, (1, features.shape[1], 1, features.shape[3]))
                wide = ttnn.multiply(wide, weight)
            if qk_norm.bias:
                bias_row = ttnn.typecast(self.weights[f"{name}.bias"], ttnn.float32)
                if qk_norm.per_head:
                    bias_row = ttnn.reshape(bias_row, (1, features.shape[1], 1, features.shape[3]))
                wide = ttnn.add(wide, bias_row)
            return ttnn.typecast(wide, self.dtype)

    if v_norm is not None:

        def normalize_v(self, name: str, features: ttnn.Tensor) -> ttnn.Tensor:
            """Normalize the last axis of values."""
            wide = ttnn.typecast(features, ttnn.float32)
            if v_norm.kind == "layer":
                wide = ttnn.subtract(wide, ttnn.mean(wide, dim=-1, keepdim=True, compute_kernel_config=self.config))
            square = ttnn.mean(ttnn.square(wide), dim=-1, keepdim=True, compute_kernel_config=self.config)
            wide = ttnn.multiply(wide, ttnn.rsqrt(ttnn.add(square, V_EPS)))
            if v_norm.weight is not None:
                weight = ttnn.typecast(self.weights[f"{name}.weight"], ttnn.float32)
                if v_norm.weight == "1+w":
                    weight = ttnn.add(weight, 1.0)
                if v_norm.per_head:
                    weight = ttnn.reshape(weight, (1, features.shape[1], 1, features.shape[3]))
                wide = ttnn.multiply(wide, weight)
            if v_norm.bias:
                bias_row = ttnn.typecast(self.weights[f"{name}.bias"], ttnn.float32)
                if v_norm.per_head:
                    bias_row = ttnn.reshape(bias_row, (1, features.shape[1], 1, features.shape[3]))
                wide = ttnn.add(wide, bias_row)
            return ttnn.typecast(wide, self.dtype)

    if context_norm is not None:

        def normalize_context(self, features: ttnn.Tensor) -> ttnn.Tensor:
            """Normalize the context of all heads."""
            wide = ttnn.typecast(features, ttnn.float32)
            if context_norm.kind == "layer":
                wide = ttnn.subtract(wide, ttnn.mean(wide, dim=-1, keepdim=True, compute_kernel_config=self.config))
            square = ttnn.mean(ttnn.square(wide), dim=-1, keepdim=True, compute_kernel_config=self.config)
            wide = ttnn.multiply(wide, ttnn.rsqrt(ttnn.add(square, CONTEXT_EPS)))
            if context_norm.weight is not None:
                weight = ttnn.typecast(self.weights["context_norm.weight"], ttnn.float32)
                if context_norm.weight == "1+w":
                    weight = ttnn.add(weight, 1.0)
                wide = ttnn.multiply(wide, weight)
            if context_norm.bias:
                wide = ttnn.add(wide, ttnn.typecast(self.weights["context_norm.bias"], ttnn.float32))
            return ttnn.typecast(wide, self.dtype)

    if latent is not None:

        def normalize_latents(self, name: str, features: ttnn.Tensor) -> ttnn.Tensor:
            """Divide by the root mean square of the last axis, and multiply by the weight."""
            wide = ttnn.typecast(features, ttnn.float32)
            square = ttnn.mean(ttnn.square(wide), dim=-1, keepdim=True, compute_kernel_config=self.config)
            wide = ttnn.multiply(wide, ttnn.rsqrt(ttnn.add(square, LATENT_EPS)))
            weight = ttnn.typecast(self.weights[f"{name}.weight"], ttnn.float32)
            return ttnn.typecast(ttnn.multiply(wide, weight), self.dtype)


def split_heads(features: ttnn.Tensor, num_heads: int) -> ttnn.Tensor:
    """Split the features of all heads: (B, T, heads * H) to (B, heads, T, H)."""
    batch_size, num_tokens, width = features.shape
    return ttnn.transpose(ttnn.reshape(features, (batch_size, num_tokens, num_heads, width // num_heads)), 1, 2)


if rope is not None:

    def frequencies(length: np.ndarray) -> np.ndarray:
        if rope.depends_on_length:
            """Return the angle of each pair of features per token, (B or 1, 1, R/2)."""
        else:
            """Return the angle of each pair of features per token, (R/2,)."""
        if rope.section_frequencies != "shared":
            exponents = np.array(EXPONENTS, np.float32)
        else:
            exponents = np.arange(0, ROTARY_DIM, 2, dtype=np.float32) / np.float32(ROTARY_DIM)
        divisors = (THETA ** exponents.astype(np.float64)).astype(np.float32)
        if isinstance(scaling, LinearScaling):
            return 1.0 / divisors / scaling.factor
        elif isinstance(scaling, ProportionalScaling):
            is_rotated = np.arange(ROTARY_DIM // 2) < int(scaling.fraction * spec.head_dim // 2)
            return is_rotated / divisors / scaling.factor
        elif isinstance(scaling, Llama3Scaling):
            turns = scaling.original_length / (2 * math.pi * divisors)  # within the original context length
            share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            share = np.clip(share, 0.0, 1.0)  # weight of the unscaled frequency
            return (share + (1.0 - share) / scaling.factor) / divisors
        elif isinstance(scaling, YarnScaling):
            pairs = np.arange(ROTARY_DIM // 2)
            share = 1.0 - np.clip(
                (pairs - RAMP_BEGIN) / (RAMP_END - RAMP_BEGIN), 0.0, 1.0
            )  # weight of the unscaled frequency
            return (share + (1.0 - share) / scaling.factor) / divisors
        elif isinstance(scaling, DynamicScaling):
            growth = scaling.factor * (length - scaling.original_length) / scaling.original_length + 1.0
            base = THETA * np.maximum(growth, 1.0) ** (ROTARY_DIM / (ROTARY_DIM - 2))
            return np.where(length > scaling.original_length, 1.0 / base**exponents, 1.0 / divisors)
        elif isinstance(scaling, LongRopeScaling):
            short, long = np.array(SHORT_FACTORS, np.float32), np.array(LONG_FACTORS, np.float32)
            return 1.0 / (np.where(length > scaling.original_length, long, short) * divisors)
        else:
            return 1.0 / divisors


if rope is not None and rope.depends_on_length:

    def longest(token_positions: np.ndarray) -> np.ndarray:
        """Return the number of tokens up to the last position of each sequence, (B or 1, 1, 1)."""
        if rope.sections is not None and call.has_positions:
            token_positions = token_positions.max(axis=0)
        return token_positions.max(axis=-1)[:, None, None] + 1


if grid is not None:

    def bucket_of(query_positions: np.ndarray, key_positions: np.ndarray) -> np.ndarray:
        """Return the bucket of each query and key, by their positions on a grid in row-major order."""
        if grid.class_token:
            query_positions, key_positions = query_positions - 1, key_positions - 1  # the class token is at -1
        rows = query_positions // GRID_WIDTH - key_positions // GRID_WIDTH + GRID_HEIGHT - 1
        columns = query_positions % GRID_WIDTH - key_positions % GRID_WIDTH + GRID_WIDTH - 1
        buckets = rows * (2 * GRID_WIDTH - 1) + columns
        if grid.class_token:
            class_buckets = np.where(key_positions < 0, NUM_BUCKETS - 1, NUM_BUCKETS - 3)
            buckets = np.where(key_positions < 0, NUM_BUCKETS - 2, buckets)
            buckets = np.where(query_positions < 0, class_buckets, buckets)
        if call.cache is not None:
            buckets = np.minimum(buckets, NUM_BUCKETS - 1)  # for padding
        return buckets


if products is not None:

    def by_heads(table: np.ndarray) -> np.ndarray:
        """Return the vectors of each head, (1, N, rows, H)."""
        if products.per_head:
            return table.swapaxes(0, 1)[None]
        else:
            return np.broadcast_to(table, (1, NUM_HEADS, *table.shape))

    def row_of(distances: np.ndarray) -> np.ndarray:
        """Return the row of the vectors of each distance, key - query."""
        if products.num_exact is not None:
            away = np.abs(distances)
            farther = NUM_EXACT + np.searchsorted(STEPS, away, side="right")
            distances = np.sign(distances) * np.where(away <= NUM_EXACT, away, farther)
        return np.clip(distances, -NUM_BEFORE, NUM_AFTER) + NUM_BEFORE


if sinusoids is not None:

    def sinusoids_of(distances: np.ndarray) -> np.ndarray:
        """Return sines and cosines, in turn, of each distance, query - key."""
        angles = distances[:, None] * SINUSOID_THETA ** (-np.arange(0, D_IN, 2) / D_IN)
        return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(len(distances), D_IN)


if relative is not None and grid is None:

    def bucket_of(distances: np.ndarray) -> np.ndarray:
        """Return the bucket of each distance, key - query."""
        if relative.bidirectional:
            first, away = (distances > 0) * (NUM_BUCKETS // 2), np.abs(distances)
            last, exact = NUM_BUCKETS // 2 - 1, NUM_BUCKETS // 4  # half of the buckets hold a single distance
        else:
            first, away = 0, np.maximum(-distances, 0)
            last, exact = NUM_BUCKETS - 1, NUM_BUCKETS // 2
        ratios = (np.maximum(away, exact) / exact).astype(np.float32)
        steps = np.log(ratios) / np.float32(math.log(MAX_DISTANCE / exact)) * np.float32(last + 1 - exact)
        return first + np.where(away < exact, away, np.minimum(exact + steps.astype(np.int64), last))
