"""TITLE"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.explain.writing.templates.names import *

hides = call.has_mask or spec.span is not None or call.cache is not None or (call.is_causal and is_explicit)

if call.cache == "static":

    class Cache(NamedTuple):
        """Slots of the tokens so far; slots from `length` on are unused."""

        if latent is None:
            keys: Tensor  # (B, K, S, H)
            values: Tensor  # (B, K, S, H)
        else:
            latents: Tensor  # (B, S, KV_RANK)
            shared_keys: Tensor  # (B, 1, S, ROPE_DIM)
        length: int


if call.cache == "ragged":

    class Cache(NamedTuple):
        """Slots of the tokens so far; slots from the length of a sequence on are unused."""

        if latent is None:
            keys: Tensor  # (B, K, S, H)
            values: Tensor  # (B, K, S, H)
        else:
            latents: Tensor  # (B, S, KV_RANK)
            shared_keys: Tensor  # (B, 1, S, ROPE_DIM)
        lengths: Tensor  # (B,)


if call.cache is not None:

    def empty_cache(
        batch_size: int, capacity: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> Cache:
        """Return a cache with `capacity` slots for each sequence."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        if latent is None:
            first = zeros(batch_size, NUM_KV_HEADS, capacity, HEAD_DIM)
            second = zeros(batch_size, NUM_KV_HEADS, capacity, VALUE_HEAD_DIM)
        else:
            first = zeros(batch_size, capacity, KV_RANK)
            second = zeros(batch_size, 1, capacity, ROPE_DIM)
        if call.cache == "static":
            return Cache(first, second, 0)
        else:
            return Cache(first, second, torch.zeros(batch_size, dtype=torch.int64, device=device))


class Attention(nn.Module):
    """ABOUT"""

    def __init__(self) -> None:
        super().__init__()
        if latent is None:
            self.q_proj = nn.Linear(D_IN, NUM_HEADS * HEAD_DIM, bias=spec.qkv_biases[0])
            if not spec.shared_kv:
                self.k_proj = nn.Linear(D_KV, NUM_KV_HEADS * HEAD_DIM, bias=spec.qkv_biases[1])
                self.v_proj = nn.Linear(D_KV, NUM_KV_HEADS * VALUE_HEAD_DIM, bias=spec.qkv_biases[2])
        else:
            if latent.q_rank is None:
                self.q_proj = nn.Linear(D_IN, NUM_HEADS * HEAD_DIM, bias=spec.qkv_biases[0])
            else:
                self.q_a_proj = nn.Linear(D_IN, Q_RANK, bias=spec.qkv_biases[0])
                self.q_a_norm = nn.RMSNorm(Q_RANK, eps=LATENT_EPS)
                self.q_b_proj = nn.Linear(Q_RANK, NUM_HEADS * HEAD_DIM, bias=False)
            self.kv_a_proj = nn.Linear(D_IN, KV_RANK + ROPE_DIM, bias=spec.qkv_biases[1])
            self.kv_a_norm = nn.RMSNorm(KV_RANK, eps=LATENT_EPS)
            self.kv_b_proj = nn.Linear(KV_RANK, NUM_HEADS * (OWN_DIM + VALUE_HEAD_DIM), bias=False)
        if qk_norm is not None:
            if has_own_qk_norm and qk_norm.per_head:
                self.q_norm = QKNorm(NUM_HEADS, HEAD_DIM)
                if not spec.shared_kv:
                    self.k_norm = QKNorm(NUM_KV_HEADS, HEAD_DIM)
            elif has_own_qk_norm:
                self.q_norm = QKNorm(NUM_HEADS * HEAD_DIM if qk_norm.over == "width" else HEAD_DIM)
                if not spec.shared_kv:
                    self.k_norm = QKNorm(NUM_KV_HEADS * HEAD_DIM if qk_norm.over == "width" else HEAD_DIM)
            elif qk_norm.kind == "rms" and qk_norm.weight is None:
                self.q_norm = nn.RMSNorm(
                    NUM_HEADS * HEAD_DIM if qk_norm.over == "width" else HEAD_DIM, eps=QK_EPS, elementwise_affine=False
                )
                if not spec.shared_kv:
                    self.k_norm = nn.RMSNorm(
                        NUM_KV_HEADS * HEAD_DIM if qk_norm.over == "width" else HEAD_DIM,
                        eps=QK_EPS,
                        elementwise_affine=False,
                    )
            elif qk_norm.kind == "rms":
                self.q_norm = nn.RMSNorm(NUM_HEADS * HEAD_DIM if qk_norm.over == "width" else HEAD_DIM, eps=QK_EPS)
                if not spec.shared_kv:
                    self.k_norm = nn.RMSNorm(
                        NUM_KV_HEADS * HEAD_DIM if qk_norm.over == "width" else HEAD_DIM, eps=QK_EPS
                    )
            elif qk_norm.weight is None:
                self.q_norm = nn.LayerNorm(
                    NUM_HEADS * HEAD_DIM if qk_norm.over == "width" else HEAD_DIM, eps=QK_EPS, elementwise_affine=False
                )
                if not spec.shared_kv:
                    self.k_norm = nn.LayerNorm(
                        NUM_KV_HEADS * HEAD_DIM if qk_norm.over == "width" else HEAD_DIM,
                        eps=QK_EPS,
                        elementwise_affine=False,
                    )
            else:
                self.q_norm = nn.LayerNorm(
                    NUM_HEADS * HEAD_DIM if qk_norm.over == "width" else HEAD_DIM, eps=QK_EPS, bias=qk_norm.bias
                )
                if not spec.shared_kv:
                    self.k_norm = nn.LayerNorm(
                        NUM_KV_HEADS * HEAD_DIM if qk_norm.over == "width" else HEAD_DIM, eps=QK_EPS, bias=qk_norm.bias
                    )
        if v_norm is not None:
            if has_own_v_norm and v_norm.per_head:
                self.v_norm = VNorm(NUM_KV_HEADS, VALUE_HEAD_DIM)
            elif has_own_v_norm:
                self.v_norm = VNorm(NUM_KV_HEADS * VALUE_HEAD_DIM if v_norm.over == "width" else VALUE_HEAD_DIM)
            elif v_norm.kind == "rms" and v_norm.weight is None:
                self.v_norm = nn.RMSNorm(
                    NUM_KV_HEADS * VALUE_HEAD_DIM if v_norm.over == "width" else VALUE_HEAD_DIM,
                    eps=V_EPS,
                    elementwise_affine=False,
                )
            elif v_norm.kind == "rms":
                self.v_norm = nn.RMSNorm(
                    NUM_KV_HEADS * VALUE_HEAD_DIM if v_norm.over == "width" else VALUE_HEAD_DIM, eps=V_EPS
                )
            elif v_norm.weight is None:
                self.v_norm = nn.LayerNorm(
                    NUM_KV_HEADS * VALUE_HEAD_DIM if v_norm.over == "width" else VALUE_HEAD_DIM,
                    eps=V_EPS,
                    elementwise_affine=False,
                )
            else:
                self.v_norm = nn.LayerNorm(
                    NUM_KV_HEADS * VALUE_HEAD_DIM if v_norm.over == "width" else VALUE_HEAD_DIM,
                    eps=V_EPS,
                    bias=v_norm.bias,
                )
        if context_norm is not None:
            if has_own_context_norm:
                self.context_norm = ContextNorm()
            elif context_norm.kind == "rms" and context_norm.weight is None:
                self.context_norm = nn.RMSNorm(NUM_HEADS * VALUE_HEAD_DIM, eps=CONTEXT_EPS, elementwise_affine=False)
            elif context_norm.kind == "rms":
                self.context_norm = nn.RMSNorm(NUM_HEADS * VALUE_HEAD_DIM, eps=CONTEXT_EPS)
            elif context_norm.weight is None:
                self.context_norm = nn.LayerNorm(NUM_HEADS * VALUE_HEAD_DIM, eps=CONTEXT_EPS, elementwise_affine=False)
            else:
                self.context_norm = nn.LayerNorm(NUM_HEADS * VALUE_HEAD_DIM, eps=CONTEXT_EPS, bias=context_norm.bias)
        if spec.sinks:
            self.sinks = nn.Parameter(torch.zeros(NUM_HEADS))
        if relative is not None:
            self.relative_bias = nn.Parameter(torch.zeros(NUM_BUCKETS, NUM_HEADS))
        if products is not None:
            num_rows = NUM_BEFORE + 1 + NUM_AFTER
            shape = (num_rows, NUM_HEADS, HEAD_DIM) if products.per_head else (num_rows, HEAD_DIM)
            if products.of_queries:
                self.relative_keys = nn.Parameter(torch.zeros(shape))
            if products.of_keys:
                self.relative_queries = nn.Parameter(torch.zeros(shape))
        if sinusoids is not None:
            self.relative_sinusoids = nn.Parameter(torch.zeros(D_IN, NUM_HEADS, HEAD_DIM))
            self.content_bias = nn.Parameter(torch.zeros(NUM_HEADS, HEAD_DIM))
            self.position_bias = nn.Parameter(torch.zeros(NUM_HEADS, HEAD_DIM))
        if spec.out_proj:
            self.out_proj = nn.Linear(NUM_HEADS * VALUE_HEAD_DIM, D_MODEL, bias=spec.out_bias)
        if gate is not None:
            self.gate_proj = nn.Linear(D_IN, NUM_HEADS if gate.per_head else NUM_HEADS * VALUE_HEAD_DIM, bias=gate.bias)

    def forward(
        self,
        x: Tensor,
        query: Tensor,
        key: Tensor,
        other_k: Tensor,
        other_v: Tensor,
        cache: Cache,
        other_cache: Cache,
        new_lengths: Tensor,
        mask: Tensor,
        bias: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Cache] if appends else Tensor:
        """Attend from each query to its visible keys; return the output (B, T, E).

        Args:
            x: (B, T, d_in).
            query: (B, T, d_in).
            key: (B, S, d_kv), the source of keys and values.
            other_k: (B, K, S, H), keys of another layer, after its norms and RoPE.
            other_v: (B, K, S, H), values of that layer.
            cache: earlier tokens, from `empty_cache` or an earlier call. It is updated in place, and also returned.
            other_cache: cache of another layer, which has already appended these tokens.
            new_lengths: number of real tokens of each sequence in x, (B,); the rest is padding, at any position.
            mask: boolean, True = masked, (B or 1, N or 1, T or 1, S). A fully masked row returns 0.
            bias: added to the scores; broadcasts to (B, N, T, S).
            positions: position of each token, (B or 1, T); for RoPE with several axes also (axes, B or 1, T).
        """
        device = query.device if call.is_cross else x.device
        num_tokens = query.shape[1] if call.is_cross else x.shape[1]
        if call.cache == "static" and spec.shared_kv:
            token_positions = other_cache.length - num_tokens + torch.arange(num_tokens, device=device)[None]  # (1, T)
        elif call.cache == "static":
            token_positions = cache.length + torch.arange(num_tokens, device=device)[None]  # (1, T)
        elif call.cache == "ragged":
            new_tokens = torch.arange(num_tokens, device=device)
            is_real = new_tokens < new_lengths[:, None]  # (B, T)
            if spec.shared_kv:
                token_positions = (other_cache.lengths - new_lengths)[:, None] + torch.where(
                    is_real, new_tokens, 0
                )  # (B, T)
            else:
                token_positions = cache.lengths[:, None] + torch.where(is_real, new_tokens, 0)  # (B, T)
            if call.has_positions:
                positions = torch.where(is_real, positions, 0)  # padding adds no length
        elif needs_positions or spec.has_positions:
            token_positions = torch.arange(num_tokens, device=device)[None]  # (1, T)
        if latent is None and not has_wide:
            q = split_heads(self.q_proj(query if call.is_cross else x), NUM_HEADS)  # (B, N, T, H)
            if not spec.shared_kv:
                k = split_heads(self.k_proj(key if call.is_cross else x), NUM_KV_HEADS)  # (B, K, S, H)
                v = split_heads(self.v_proj(key if call.is_cross else x), NUM_KV_HEADS)  # (B, K, S, H)
        elif latent is None:
            q = self.q_proj(query if call.is_cross else x)  # (B, T, N * H)
            if not spec.shared_kv:
                k = self.k_proj(key if call.is_cross else x)  # (B, S, K * H)
                v = self.v_proj(key if call.is_cross else x)  # (B, S, K * H)
            if spec.clip_qkv is not None:
                if spec.shared_kv:
                    q = q.clamp(-CLIP, CLIP)
                else:
                    q, k, v = q.clamp(-CLIP, CLIP), k.clamp(-CLIP, CLIP), v.clamp(-CLIP, CLIP)
            if qk_norm is not None and qk_norm.over == "width":
                if spec.shared_kv:
                    q = self.q_norm(q)
                else:
                    q, k = self.q_norm(q), self.k_norm(k)
            if v_norm is not None and v_norm.over == "width":
                v = self.v_norm(v)
            q = split_heads(q, NUM_HEADS)  # (B, N, T, H)
            if not spec.shared_kv:
                k = split_heads(k, NUM_KV_HEADS)  # (B, K, S, H)
                v = split_heads(v, NUM_KV_HEADS)  # (B, K, S, H)
        if latent is None:
            if qk_norm is not None and qk_norm.over == "head" and not qk_norm.after_rope:
                if spec.shared_kv:
                    q = self.q_norm(q)
                else:
                    q, k = self.q_norm(q), self.k_norm(k)
            if v_norm is not None and v_norm.over == "head":
                v = self.v_norm(v)
            if rope is not None:
                cos, sin = rotation(positions if call.has_positions else token_positions)  # (B or 1, 1, T, R/2)
                if spec.shared_kv:
                    q = rotate(q, cos, sin)
                else:
                    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            if qk_norm is not None and qk_norm.after_rope:
                if spec.shared_kv:
                    q = self.q_norm(q)
                else:
                    q, k = self.q_norm(q), self.k_norm(k)
        else:
            if latent.q_rank is None:
                q = self.q_proj(x)
            elif latent.q_factor == 1.0:
                q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
            else:
                q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)) * Q_FACTOR)
            q = split_heads(q, NUM_HEADS)  # (B, N, T, H)
            latents, shared_k = self.kv_a_proj(x).split([KV_RANK, ROPE_DIM], dim=-1)
            if latent.kv_factor == 1.0:
                latents = self.kv_a_norm(latents)  # (B, T, KV_RANK)
            else:
                latents = self.kv_a_norm(latents) * KV_FACTOR  # (B, T, KV_RANK)
            shared_k = shared_k[:, None]  # (B, 1, T, ROPE_DIM)
            if rope is not None:
                cos, sin = rotation(positions if call.has_positions else token_positions)  # (B or 1, 1, T, ROPE_DIM/2)
                own_q, shared_q = q.split([OWN_DIM, ROPE_DIM], dim=-1)
                q, shared_k = torch.cat([own_q, rotate(shared_q, cos, sin)], dim=-1), rotate(shared_k, cos, sin)
        if spec.shared_kv and call.cache is None:
            k, v = other_k, other_v
        elif spec.shared_kv:
            k, v = other_cache.keys, other_cache.values
        if temperature is not None:
            lengths = ((positions if call.has_positions else token_positions) + FIRST_POSITION) // TEMPERATURE_LENGTH
            factors = 1.0 + TEMPERATURE_SCALE * torch.log1p(lengths.float())
            q = (q.float() * factors[:, None, :, None]).to(q.dtype)
        if call.cache == "static" and not spec.shared_kv:
            if latent is None:
                cache.keys.narrow(2, cache.length, num_tokens).copy_(k)
                cache.values.narrow(2, cache.length, num_tokens).copy_(v)
                k, v = cache.keys, cache.values
            else:
                cache.latents.narrow(1, cache.length, num_tokens).copy_(latents)
                cache.shared_keys.narrow(2, cache.length, num_tokens).copy_(shared_k)
                latents, shared_k = cache.latents, cache.shared_keys
            cache = cache._replace(length=cache.length + num_tokens)
        elif call.cache == "ragged" and not spec.shared_kv:
            rows, tokens = torch.nonzero(is_real, as_tuple=True)
            slots = token_positions[rows, tokens]
            if latent is None:
                cache.keys[rows, :, slots], cache.values[rows, :, slots] = k[rows, :, tokens], v[rows, :, tokens]
                k, v = cache.keys, cache.values
            else:
                cache.latents[rows, slots] = latents[rows, tokens]
                cache.shared_keys[rows, :, slots] = shared_k[rows, :, tokens]
                latents, shared_k = cache.latents, cache.shared_keys
            cache = cache._replace(lengths=cache.lengths + new_lengths)
        if latent is not None:
            own_k, v = split_heads(self.kv_b_proj(latents), NUM_HEADS).split([OWN_DIM, VALUE_HEAD_DIM], dim=-1)
            k = torch.cat([own_k, shared_k.expand(-1, NUM_HEADS, -1, -1)], dim=-1)  # (B, N, S, H)
        if needs_positions or (hides and call.is_causal):
            key_positions = torch.arange(k.shape[2], device=device)
        if needs_positions:
            query_positions = token_positions[:, None, :, None]  # (B or 1, 1, T, 1)
        elif hides and call.is_causal:
            query_positions = torch.arange(num_tokens, device=device)[:, None]  # (T, 1)
        if hides and (call.is_causal or spec.span is not None or call.cache is not None):
            if call.is_causal or call.cache is not None:
                hidden = key_positions > query_positions  # (…, T, S)
                if spec.window_size is not None:
                    hidden = hidden | (key_positions <= query_positions - WINDOW)
            elif spec.window_size is not None:
                hidden = (key_positions - query_positions).abs() >= WINDOW
            else:
                hidden = key_positions // CHUNK != query_positions // CHUNK
            if spec.chunk_size is not None and (call.is_causal or call.cache is not None):
                hidden = hidden | (key_positions // CHUNK != query_positions // CHUNK)
            if call.has_mask:
                hidden = hidden | mask
        elif call.has_mask:
            hidden = mask
        if may_hide_all:
            empty = hidden.all(dim=-1, keepdim=True)  # fully masked rows return 0
            hidden = hidden & ~empty
        if is_explicit:
            if groups > 1:
                k = k.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1)  # (B, N, S, H)
                v = v.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1)  # (B, N, S, H)
            scores = torch.matmul(q.float(), k.float().mT) * SCALE  # (B, N, T, S)
            if spec.soft_cap is not None:
                scores = SOFT_CAP * torch.tanh(scores / SOFT_CAP)
            if alibi is not None:
                slopes = torch.tensor(SLOPES, device=device)[:, None, None]  # (N, 1, 1)
                scores = scores - slopes * (key_positions - query_positions).abs()
            if relative is not None:
                if grid is None:
                    buckets = bucket_of(key_positions - query_positions)  # (B or 1, 1, T, S)
                else:
                    buckets = bucket_of(query_positions, key_positions)  # (B or 1, 1, T, S)
                scores = scores + self.relative_bias.float()[buckets[:, 0]].permute(0, 3, 1, 2)
            if products is not None:
                rows = row_of(key_positions - query_positions).expand_as(scores)  # (B, N, T, S)
                if products.of_queries:
                    by_row = torch.einsum(
                        "bnth,cnh->bntc" if products.per_head else "bnth,ch->bntc",
                        q.float(),
                        self.relative_keys.float(),
                    )
                    scores = scores + SCALE * by_row.gather(3, rows)
                if products.of_keys:
                    by_row = torch.einsum(
                        "bnsh,cnh->bnsc" if products.per_head else "bnsh,ch->bnsc",
                        k.float(),
                        self.relative_queries.float(),
                    )
                    scores = scores + SCALE * by_row.gather(3, rows.mT).mT
            if sinusoids is not None:
                farthest = q.shape[2] + k.shape[2]
                waves = sinusoids_of(torch.arange(farthest, -farthest - 1, -1, device=device))  # (rows, D_IN)
                vectors = torch.einsum("ce,enh->nch", waves, self.relative_sinusoids.float())
                by_row = (q.float() + self.position_bias.float()[:, None]) @ vectors.mT  # (B, N, T, rows)
                rows = (key_positions - query_positions + farthest).expand_as(scores)  # (B, N, T, S)
                content_products = self.content_bias.float()[:, None] @ k.float().mT  # (B, N, 1, S)
                scores = scores + SCALE * (by_row.gather(3, rows) + content_products)
            if call.has_bias:
                scores = scores + bias.float()
            if hides:
                scores = scores.masked_fill(hidden, -torch.inf)
            if spec.sinks:
                sinks = self.sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
                attn_weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
            else:
                attn_weights = torch.softmax(scores, dim=-1)
            if spec.dropout:
                attn_weights = F.dropout(attn_weights, DROPOUT, self.training)
            context = torch.matmul(attn_weights.to(v.dtype), v)  # (B, N, T, H)
        else:
            context = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=~hidden if hides else ABSENT,
                is_causal=True if call.is_causal and not hides else ABSENT,
                dropout_p=(DROPOUT if self.training else 0.0) if spec.dropout else ABSENT,
                scale=ABSENT if is_plain_scale else SCALE,
                enable_gqa=True if groups > 1 else ABSENT,
            )  # (B, N, T, H)
        if may_hide_all:
            context = context.masked_fill(empty, 0.0)
        if gate is not None:
            gates = split_heads(self.gate_proj(query if call.is_cross else x), NUM_HEADS)  # (B, N, T, H or 1)
            context = (context.float() * torch.sigmoid(gates.float())).to(context.dtype)
        output = context.transpose(1, 2).flatten(-2)  # (B, T, N * H)
        if context_norm is not None:
            output = self.context_norm(output)
        if spec.out_proj:
            output = self.out_proj(output)  # (B, T, E)
        if call.cache == "ragged":
            output = output.masked_fill(~is_real[:, :, None], 0.0)
        if appends:
            return output, cache
        else:
            return output


def split_heads(features: Tensor, num_heads: int) -> Tensor:
    """Split the features of all heads: (B, T, heads * H) to (B, heads, T, H)."""
    return features.unflatten(-1, (num_heads, -1)).transpose(1, 2)


if rope is not None:

    def rotation(token_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the angles at token positions (B or 1, T), each (B or 1, 1, T, R/2)."""
        if rope.sections is not None and call.has_positions:
            pair_positions = token_positions[list(AXES)].movedim(0, -1)  # (B or 1, T, R/2)
            angles = pair_positions[:, None].float() * frequencies(
                token_positions.device, longest(token_positions) if rope.depends_on_length else ABSENT
            )
        else:
            angles = token_positions[:, None, :, None].float() * frequencies(
                token_positions.device, longest(token_positions) if rope.depends_on_length else ABSENT
            )
        if rope.attention_factor != 1.0:
            return ATTENTION_FACTOR * angles.cos(), ATTENTION_FACTOR * angles.sin()
        else:
            return angles.cos(), angles.sin()


if rope is not None:

    def frequencies(device: torch.device, length: Tensor) -> Tensor:
        if rope.depends_on_length:
            """Return the angle of each pair of features per token, (B or 1, 1, 1, R/2)."""
        else:
            """Return the angle of each pair of features per token, (R/2,)."""
        if rope.section_frequencies != "shared":
            exponents = torch.tensor(EXPONENTS, device=device)
        else:
            exponents = torch.arange(0, ROTARY_DIM, 2, device=device) / ROTARY_DIM
        divisors = (THETA ** exponents.double()).float()
        if isinstance(scaling, LinearScaling):
            return 1.0 / divisors / scaling.factor
        elif isinstance(scaling, ProportionalScaling):
            is_rotated = torch.arange(ROTARY_DIM // 2, device=device) < int(scaling.fraction * spec.head_dim // 2)
            return is_rotated / divisors / scaling.factor
        elif isinstance(scaling, Llama3Scaling):
            turns = scaling.original_length / (2 * math.pi * divisors)  # within the original context length
            share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            share = share.clamp(0.0, 1.0)  # weight of the unscaled frequency
            return (share + (1.0 - share) / scaling.factor) / divisors
        elif isinstance(scaling, YarnScaling):
            pairs = torch.arange(ROTARY_DIM // 2, device=device)
            share = 1.0 - ((pairs - RAMP_BEGIN) / (RAMP_END - RAMP_BEGIN)).clamp(
                0.0, 1.0
            )  # weight of the unscaled frequency
            return (share + (1.0 - share) / scaling.factor) / divisors
        elif isinstance(scaling, DynamicScaling):
            growth = scaling.factor * (length - scaling.original_length) / scaling.original_length + 1.0
            base = THETA * growth ** (ROTARY_DIM / (ROTARY_DIM - 2))
            return torch.where(length > scaling.original_length, 1.0 / base**exponents, 1.0 / divisors)
        elif isinstance(scaling, LongRopeScaling):
            short = torch.tensor(SHORT_FACTORS, device=device)
            long = torch.tensor(LONG_FACTORS, device=device)
            return 1.0 / (torch.where(length > scaling.original_length, long, short) * divisors)
        else:
            return 1.0 / divisors


if rope is not None and rope.depends_on_length:

    def longest(token_positions: Tensor) -> Tensor:
        """Return the number of tokens up to the last position of each sequence, (B or 1, 1, 1, 1)."""
        if rope.sections is not None and call.has_positions:
            token_positions = token_positions.amax(dim=0)
        return token_positions.amax(dim=-1)[:, None, None, None] + 1


if rope is not None:

    def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each pair of features of heads (B, heads, T, H) by its angle."""
        wide = heads.float()
        if is_partial and rope.rotated == "first":
            wide, rest = wide[..., :ROTARY_DIM], wide[..., ROTARY_DIM:]
        elif is_partial:
            rest, wide = wide[..., :-ROTARY_DIM], wide[..., -ROTARY_DIM:]
        if rope.pairs == "interleaved":
            first, second = wide[..., 0::2], wide[..., 1::2]  # pairs (2 i, 2 i + 1)
            rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        else:
            first, second = wide.chunk(2, dim=-1)  # pairs (i, i + R/2)
            rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        if is_partial and rope.rotated == "first":
            rotated = torch.cat([rotated, rest], dim=-1)
        elif is_partial:
            rotated = torch.cat([rest, rotated], dim=-1)
        return rotated.to(heads.dtype)


if grid is not None:

    def bucket_of(query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return the bucket of each query and key, by their positions on a grid in row-major order."""
        if grid.class_token:
            query_positions, key_positions = query_positions - 1, key_positions - 1  # the class token is at -1
        rows = query_positions // GRID_WIDTH - key_positions // GRID_WIDTH + GRID_HEIGHT - 1
        columns = query_positions % GRID_WIDTH - key_positions % GRID_WIDTH + GRID_WIDTH - 1
        buckets = rows * (2 * GRID_WIDTH - 1) + columns
        if grid.class_token:
            class_buckets = torch.where(key_positions < 0, NUM_BUCKETS - 1, NUM_BUCKETS - 3)
            buckets = torch.where(key_positions < 0, NUM_BUCKETS - 2, buckets)
            buckets = torch.where(query_positions < 0, class_buckets, buckets)
        if call.cache is not None:
            buckets = buckets.clamp(max=NUM_BUCKETS - 1)  # for padding
        return buckets


if relative is not None and grid is None:

    def bucket_of(distances: Tensor) -> Tensor:
        """Return the bucket of each distance, key - query."""
        if relative.bidirectional:
            first, away = (distances > 0) * (NUM_BUCKETS // 2), distances.abs()
            last, exact = NUM_BUCKETS // 2 - 1, NUM_BUCKETS // 4  # half of the buckets hold a single distance
        else:
            first, away = 0, (-distances).clamp(min=0)
            last, exact = NUM_BUCKETS - 1, NUM_BUCKETS // 2
        steps = torch.log(away.clamp(min=exact) / exact) / math.log(MAX_DISTANCE / exact) * (last + 1 - exact)
        return first + torch.where(away < exact, away, (exact + steps.long()).clamp(max=last))


if products is not None:

    def row_of(distances: Tensor) -> Tensor:
        """Return the row of the vectors of each distance, key - query."""
        if products.num_exact is not None:
            away = distances.abs()
            farther = NUM_EXACT + torch.bucketize(away, torch.tensor(STEPS, device=away.device), right=True)
            distances = distances.sign() * torch.where(away <= NUM_EXACT, away, farther)
        return distances.clamp(-NUM_BEFORE, NUM_AFTER) + NUM_BEFORE


if sinusoids is not None:

    def sinusoids_of(distances: Tensor) -> Tensor:
        """Return sines and cosines, in turn, of each distance, query - key."""
        pairs = torch.arange(0, D_IN, 2, device=distances.device)
        angles = distances[:, None] * SINUSOID_THETA ** (-pairs / D_IN)
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


if has_own_qk_norm:

    class QKNorm(nn.Module):
        """Norm of the features of each query and key."""

        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(shape) if qk_norm.weight == "1+w" else torch.ones(shape))
            if qk_norm.bias:
                self.bias = nn.Parameter(torch.zeros(shape))

        def forward(self, features: Tensor) -> Tensor:
            """Normalize the last axis."""
            wide = features.float()
            if qk_norm.kind == "layer":
                wide = wide - wide.mean(dim=-1, keepdim=True)
            wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + QK_EPS)
            weight = self.weight.float()
            if qk_norm.per_head:
                weight = weight[:, None]  # (heads, 1, H)
            if qk_norm.weight == "1+w":
                weight = 1.0 + weight
            if qk_norm.bias and qk_norm.per_head:
                return (wide * weight + self.bias.float()[:, None]).to(features.dtype)
            elif qk_norm.bias:
                return (wide * weight + self.bias.float()).to(features.dtype)
            else:
                return (wide * weight).to(features.dtype)


if has_own_v_norm:

    class VNorm(nn.Module):
        """Norm of the features of each value."""

        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(shape) if v_norm.weight == "1+w" else torch.ones(shape))
            if v_norm.bias:
                self.bias = nn.Parameter(torch.zeros(shape))

        def forward(self, features: Tensor) -> Tensor:
            """Normalize the last axis."""
            wide = features.float()
            if v_norm.kind == "layer":
                wide = wide - wide.mean(dim=-1, keepdim=True)
            wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + V_EPS)
            weight = self.weight.float()
            if v_norm.per_head:
                weight = weight[:, None]  # (heads, 1, H)
            if v_norm.weight == "1+w":
                weight = 1.0 + weight
            if v_norm.bias and v_norm.per_head:
                return (wide * weight + self.bias.float()[:, None]).to(features.dtype)
            elif v_norm.bias:
                return (wide * weight + self.bias.float()).to(features.dtype)
            else:
                return (wide * weight).to(features.dtype)


if has_own_context_norm:

    class ContextNorm(nn.Module):
        """Norm of the context of all heads."""

        def __init__(self) -> None:
            super().__init__()
            shape = NUM_HEADS * VALUE_HEAD_DIM
            self.weight = nn.Parameter(torch.zeros(shape) if context_norm.weight == "1+w" else torch.ones(shape))
            if context_norm.bias:
                self.bias = nn.Parameter(torch.zeros(shape))

        def forward(self, features: Tensor) -> Tensor:
            """Normalize the last axis."""
            wide = features.float()
            if context_norm.kind == "layer":
                wide = wide - wide.mean(dim=-1, keepdim=True)
            wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + CONTEXT_EPS)
            if context_norm.weight == "1+w":
                wide = wide * (1.0 + self.weight.float())
            else:
                wide = wide * self.weight.float()
            if context_norm.bias:
                wide = wide + self.bias.float()
            return wide.to(features.dtype)
