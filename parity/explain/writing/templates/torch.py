"""TITLE"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.explain.writing.subject import ABSENT, own_norms
from parity.explain.writing.templates.names import *

qk_affine = ABSENT
if qk_norm is not None and qk_norm.weight is None:
    qk_affine = False
v_affine = ABSENT
if v_norm is not None and v_norm.weight is None:
    v_affine = False
context_affine = ABSENT
if context_norm is not None and context_norm.weight is None:
    context_affine = False
is_causal = ABSENT
enable_gqa = ABSENT
hides = call.has_mask or spec.span is not None or call.cache is not None
if call.is_causal and is_explicit:
    hides = True
if call.is_causal and not hides:
    is_causal = True
if groups > 1:
    enable_gqa = True

if qk_norm_of == "width":
    Q_NORM_WIDTH = NUM_HEADS * HEAD_DIM
    K_NORM_WIDTH = NUM_KV_HEADS * HEAD_DIM
else:
    Q_NORM_WIDTH = HEAD_DIM
    K_NORM_WIDTH = HEAD_DIM
if v_norm_of == "width":
    V_NORM_WIDTH = NUM_KV_HEADS * VALUE_HEAD_DIM
else:
    V_NORM_WIDTH = VALUE_HEAD_DIM

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
        batch_size: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Cache:
        """Return a cache with `capacity` slots for each sequence."""
        if latent is None:
            first_shape = (batch_size, NUM_KV_HEADS, capacity, HEAD_DIM)
            second_shape = (batch_size, NUM_KV_HEADS, capacity, VALUE_HEAD_DIM)
        else:
            first_shape = (batch_size, capacity, KV_RANK)
            second_shape = (batch_size, 1, capacity, ROPE_DIM)
        first = torch.zeros(first_shape, dtype=dtype, device=device)
        second = torch.zeros(second_shape, dtype=dtype, device=device)
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
        elif latent.q_rank is None:
            self.q_proj = nn.Linear(D_IN, NUM_HEADS * HEAD_DIM, bias=spec.qkv_biases[0])
        else:
            self.q_a_proj = nn.Linear(D_IN, Q_RANK, bias=spec.qkv_biases[0])
            self.q_a_norm = nn.RMSNorm(Q_RANK, eps=LATENT_EPS)
            self.q_b_proj = nn.Linear(Q_RANK, NUM_HEADS * HEAD_DIM, bias=False)
        if latent is not None:
            self.kv_a_proj = nn.Linear(D_IN, KV_RANK + ROPE_DIM, bias=spec.qkv_biases[1])
            self.kv_a_norm = nn.RMSNorm(KV_RANK, eps=LATENT_EPS)
            self.kv_b_proj = nn.Linear(KV_RANK, NUM_HEADS * (OWN_DIM + VALUE_HEAD_DIM), bias=False)
        elif not spec.shared_kv:
            self.k_proj = nn.Linear(D_KV, NUM_KV_HEADS * HEAD_DIM, bias=spec.qkv_biases[1])
            self.v_proj = nn.Linear(D_KV, NUM_KV_HEADS * VALUE_HEAD_DIM, bias=spec.qkv_biases[2])
        if qk_norm is not None:
            if "qk" in own_norms and qk_norm.per_head:
                self.q_norm = QKNorm(NUM_HEADS, HEAD_DIM)
                if not spec.shared_kv:
                    self.k_norm = QKNorm(NUM_KV_HEADS, HEAD_DIM)
            elif "qk" in own_norms:
                self.q_norm = QKNorm(Q_NORM_WIDTH)
                if not spec.shared_kv:
                    self.k_norm = QKNorm(K_NORM_WIDTH)
            elif qk_norm.kind == "rms":
                self.q_norm = nn.RMSNorm(Q_NORM_WIDTH, eps=QK_EPS, elementwise_affine=qk_affine)
                if not spec.shared_kv:
                    self.k_norm = nn.RMSNorm(K_NORM_WIDTH, eps=QK_EPS, elementwise_affine=qk_affine)
            else:
                self.q_norm = nn.LayerNorm(Q_NORM_WIDTH, eps=QK_EPS, elementwise_affine=qk_affine, bias=qk_norm.bias)
                if not spec.shared_kv:
                    self.k_norm = nn.LayerNorm(
                        K_NORM_WIDTH, eps=QK_EPS, elementwise_affine=qk_affine, bias=qk_norm.bias
                    )
        if v_norm is not None:
            if "v" in own_norms and v_norm.per_head:
                self.v_norm = VNorm(NUM_KV_HEADS, VALUE_HEAD_DIM)
            elif "v" in own_norms:
                self.v_norm = VNorm(V_NORM_WIDTH)
            elif v_norm.kind == "rms":
                self.v_norm = nn.RMSNorm(V_NORM_WIDTH, eps=V_EPS, elementwise_affine=v_affine)
            else:
                self.v_norm = nn.LayerNorm(V_NORM_WIDTH, eps=V_EPS, elementwise_affine=v_affine, bias=v_norm.bias)
        if context_norm is not None:
            if "context" in own_norms:
                self.context_norm = ContextNorm(NUM_HEADS * VALUE_HEAD_DIM)
            elif context_norm.kind == "rms":
                self.context_norm = nn.RMSNorm(
                    NUM_HEADS * VALUE_HEAD_DIM, eps=CONTEXT_EPS, elementwise_affine=context_affine
                )
            else:
                self.context_norm = nn.LayerNorm(
                    NUM_HEADS * VALUE_HEAD_DIM,
                    eps=CONTEXT_EPS,
                    elementwise_affine=context_affine,
                    bias=context_norm.bias,
                )
        if spec.sinks:
            self.sinks = nn.Parameter(torch.zeros(NUM_HEADS))
        if relative is not None:
            self.relative_bias = nn.Parameter(torch.zeros(NUM_BUCKETS, NUM_HEADS))
        if products is not None:
            num_rows = NUM_BEFORE + 1 + NUM_AFTER
            if products.per_head:
                shape = (num_rows, NUM_HEADS, HEAD_DIM)
            else:
                shape = (num_rows, HEAD_DIM)
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
            if gate.per_head:
                self.gate_proj = nn.Linear(D_IN, NUM_HEADS, bias=gate.bias)
            else:
                self.gate_proj = nn.Linear(D_IN, NUM_HEADS * VALUE_HEAD_DIM, bias=gate.bias)

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
            cache: earlier tokens, from `empty_cache` or an earlier call. It is updated in place,
                and also returned.
            other_cache: cache of another layer, which has already appended these tokens.
            new_lengths: number of real tokens of each sequence in x, (B,); the rest is padding, at
                any position.
            mask: boolean, True = masked, (B or 1, N or 1, T or 1, S). A fully masked row returns 0.
            bias: added to the scores; broadcasts to (B, N, T, S).
            positions: position of each token, (B or 1, T); for RoPE with several axes also
                (axes, B or 1, T).
        """
        device = query.device
        num_tokens = query.shape[1]
        if call.cache == "static":
            new_tokens = torch.arange(num_tokens, device=device)[None]  # (1, T)
            if spec.shared_kv:
                token_positions = other_cache.length - num_tokens + new_tokens
            else:
                token_positions = cache.length + new_tokens
        elif call.cache == "ragged":
            new_tokens = torch.arange(num_tokens, device=device)
            is_real = new_tokens < new_lengths[:, None]  # (B, T)
            new_tokens = torch.where(is_real, new_tokens, 0)  # (B, T)
            if spec.shared_kv:
                token_positions = (other_cache.lengths - new_lengths)[:, None] + new_tokens
            else:
                token_positions = cache.lengths[:, None] + new_tokens
            if call.has_positions:
                positions = torch.where(is_real, positions, 0)  # padding adds no length
        elif needs_positions or spec.has_positions:
            token_positions = torch.arange(num_tokens, device=device)[None]  # (1, T)
        if rope is not None:
            cos, sin = rotation(positions)  # (B or 1, 1, T, R/2)
        if latent is not None:
            if latent.q_rank is None:
                q = self.q_proj(query)  # (B, T, N * H)
            else:
                q_latents = self.q_a_norm(self.q_a_proj(query))  # (B, T, Q_RANK)
                if latent.q_factor != 1.0:
                    q_latents = q_latents * Q_FACTOR
                q = self.q_b_proj(q_latents)  # (B, T, N * H)
            q = split_heads(q, NUM_HEADS)  # (B, N, T, H)
            latents, shared_k = self.kv_a_proj(query).split([KV_RANK, ROPE_DIM], dim=-1)
            latents = self.kv_a_norm(latents)  # (B, T, KV_RANK)
            if latent.kv_factor != 1.0:
                latents = latents * KV_FACTOR
            shared_k = shared_k[:, None]  # (B, 1, T, ROPE_DIM)
            if rope is not None:
                own_q, shared_q = q.split([OWN_DIM, ROPE_DIM], dim=-1)
                q = torch.cat([own_q, rotate(shared_q, cos, sin)], dim=-1)
                shared_k = rotate(shared_k, cos, sin)
        else:
            q = self.q_proj(query)  # (B, T, N * H)
            if spec.clip_qkv is not None:
                q = q.clamp(-CLIP, CLIP)
            if qk_norm_of == "width":
                q = self.q_norm(q)
            q = split_heads(q, NUM_HEADS)  # (B, N, T, H)
            if qk_norm_of == "head":
                q = self.q_norm(q)
            if rope is not None:
                q = rotate(q, cos, sin)
            if qk_norm_of == "rotated head":
                q = self.q_norm(q)
            if not spec.shared_kv:
                k = self.k_proj(key)  # (B, S, K * H)
                if spec.clip_qkv is not None:
                    k = k.clamp(-CLIP, CLIP)
                if qk_norm_of == "width":
                    k = self.k_norm(k)
                k = split_heads(k, NUM_KV_HEADS)  # (B, K, S, H)
                if qk_norm_of == "head":
                    k = self.k_norm(k)
                if rope is not None:
                    k = rotate(k, cos, sin)
                if qk_norm_of == "rotated head":
                    k = self.k_norm(k)
                v = self.v_proj(key)  # (B, S, K * H)
                if spec.clip_qkv is not None:
                    v = v.clamp(-CLIP, CLIP)
                if v_norm_of == "width":
                    v = self.v_norm(v)
                v = split_heads(v, NUM_KV_HEADS)  # (B, K, S, H)
                if v_norm_of == "head":
                    v = self.v_norm(v)
        if temperature is not None:
            lengths = (positions + FIRST_POSITION) // TEMPERATURE_LENGTH
            factors = 1.0 + TEMPERATURE_SCALE * torch.log1p(lengths.float())
            q = (q.float() * factors[:, None, :, None]).to(q.dtype)
        if call.cache == "static" and appends:
            if latent is None:
                cache.keys.narrow(2, cache.length, num_tokens).copy_(k)
                cache.values.narrow(2, cache.length, num_tokens).copy_(v)
            else:
                cache.latents.narrow(1, cache.length, num_tokens).copy_(latents)
                cache.shared_keys.narrow(2, cache.length, num_tokens).copy_(shared_k)
            cache = cache._replace(length=cache.length + num_tokens)
        elif appends:
            rows, tokens = torch.nonzero(is_real, as_tuple=True)
            slots = token_positions[rows, tokens]
            if latent is None:
                cache.keys[rows, :, slots] = k[rows, :, tokens]
                cache.values[rows, :, slots] = v[rows, :, tokens]
            else:
                cache.latents[rows, slots] = latents[rows, tokens]
                cache.shared_keys[rows, :, slots] = shared_k[rows, :, tokens]
            cache = cache._replace(lengths=cache.lengths + new_lengths)
        if takes_other_kv:
            k, v = other_k, other_v
        elif spec.shared_kv:
            k, v = other_cache.keys, other_cache.values
        elif appends and latent is None:
            k, v = cache.keys, cache.values
        elif appends:
            latents, shared_k = cache.latents, cache.shared_keys
        if latent is not None:
            expanded = split_heads(self.kv_b_proj(latents), NUM_HEADS)  # (B, N, S, OWN_DIM + H)
            own_k, v = expanded.split([OWN_DIM, VALUE_HEAD_DIM], dim=-1)
            k = torch.cat([own_k, shared_k.expand(-1, NUM_HEADS, -1, -1)], dim=-1)  # (B, N, S, H)
        if needs_positions or (hides and call.is_causal):
            key_positions = torch.arange(k.shape[2], device=device)
        if needs_positions:
            query_positions = token_positions[:, None, :, None]  # (B or 1, 1, T, 1)
        elif hides and call.is_causal:
            query_positions = torch.arange(num_tokens, device=device)[:, None]  # (T, 1)
        if hides and call.is_causal:
            hidden = key_positions > query_positions  # (…, T, S)
            if spec.window_size is not None:
                hidden = hidden | (key_positions <= query_positions - WINDOW)
            if spec.chunk_size is not None:
                hidden = hidden | (key_positions // CHUNK != query_positions // CHUNK)
            if call.has_mask:
                hidden = hidden | mask
        elif spec.span is not None:
            if spec.window_size is not None:
                hidden = (key_positions - query_positions).abs() >= WINDOW
            else:
                hidden = key_positions // CHUNK != query_positions // CHUNK
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
                    table = self.relative_keys.float()  # (rows, H) or (rows, N, H)
                    by_row = torch.einsum(query_products, q.float(), table)  # (B, N, T, rows)
                    scores = scores + SCALE * by_row.gather(3, rows)
                if products.of_keys:
                    table = self.relative_queries.float()  # (rows, H) or (rows, N, H)
                    by_row = torch.einsum(key_products, k.float(), table)  # (B, N, S, rows)
                    scores = scores + SCALE * by_row.gather(3, rows.mT).mT
            if sinusoids is not None:
                farthest = q.shape[2] + k.shape[2]
                waves = sinusoids_of(torch.arange(farthest, -farthest - 1, -1, device=device))
                table = self.relative_sinusoids.float()  # (D_IN, N, H)
                vectors = torch.einsum("ce,enh->nch", waves, table)
                biased_q = q.float() + self.position_bias.float()[:, None]
                by_row = torch.matmul(biased_q, vectors.mT)  # (B, N, T, rows)
                rows = (key_positions - query_positions + farthest).expand_as(scores)
                scores = scores + SCALE * by_row.gather(3, rows)
                content_bias = self.content_bias.float()[:, None]  # (N, 1, H)
                scores = scores + SCALE * torch.matmul(content_bias, k.float().mT)
            if call.has_bias:
                scores = scores + bias.float()
            if hides:
                scores = scores.masked_fill(hidden, -torch.inf)
            if spec.sinks:
                sinks = self.sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
                with_sinks = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)
                attn_weights = with_sinks[..., :-1]
            else:
                attn_weights = torch.softmax(scores, dim=-1)
            if spec.dropout:
                attn_weights = F.dropout(attn_weights, DROPOUT, self.training)
            context = torch.matmul(attn_weights.to(v.dtype), v)  # (B, N, T, H)
        else:
            if spec.dropout:
                dropout = DROPOUT if self.training else 0.0
            context = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=~hidden if hides else ABSENT,
                is_causal=is_causal,
                dropout_p=dropout if spec.dropout else ABSENT,
                scale=SCALE if has_own_scale else ABSENT,
                enable_gqa=enable_gqa,
            )  # (B, N, T, H)
        if may_hide_all:
            context = context.masked_fill(empty, 0.0)
        if gate is not None:
            gates = split_heads(self.gate_proj(query), NUM_HEADS)  # (B, N, T, H or 1)
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
        """Return cosines and sines at token positions (B or 1, T), each (B or 1, 1, T, R/2)."""
        per_token = frequencies(token_positions.device, longest(token_positions))
        if rope.sections is not None and call.has_positions:
            by_pair = token_positions[list(AXES)].movedim(0, -1)  # (B or 1, T, R/2)
            angles = by_pair[:, None].float() * per_token
        else:
            angles = token_positions[:, None, :, None].float() * per_token
        if rope.attention_factor != 1.0:
            return ATTENTION_FACTOR * angles.cos(), ATTENTION_FACTOR * angles.sin()
        else:
            return angles.cos(), angles.sin()

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
            num_rotated = int(scaling.fraction * spec.head_dim // 2)
            is_rotated = torch.arange(ROTARY_DIM // 2, device=device) < num_rotated
            return is_rotated / divisors / scaling.factor
        elif isinstance(scaling, Llama3Scaling):
            turns = scaling.original_length / (2 * math.pi * divisors)  # in the original context
            unscaled_share = ((turns - low_turns) / (high_turns - low_turns)).clamp(0.0, 1.0)
            return (unscaled_share + (1.0 - unscaled_share) / scaling.factor) / divisors
        elif isinstance(scaling, YarnScaling):
            pairs = torch.arange(ROTARY_DIM // 2, device=device)
            scaled_share = ((pairs - RAMP_BEGIN) / (RAMP_END - RAMP_BEGIN)).clamp(0.0, 1.0)
            return (1.0 - scaled_share + scaled_share / scaling.factor) / divisors
        elif isinstance(scaling, DynamicScaling):
            added = length - scaling.original_length
            growth = scaling.factor * added / scaling.original_length + 1.0
            base = THETA * growth ** (ROTARY_DIM / (ROTARY_DIM - 2))
            return torch.where(added > 0, 1.0 / base**exponents, 1.0 / divisors)
        elif isinstance(scaling, LongRopeScaling):
            short = torch.tensor(SHORT_FACTORS, device=device)
            long = torch.tensor(LONG_FACTORS, device=device)
            is_long = length > scaling.original_length
            return 1.0 / (torch.where(is_long, long, short) * divisors)
        else:
            return 1.0 / divisors

    def longest(token_positions: Tensor) -> Tensor:
        """Return the tokens up to the last position of each sequence, (B or 1, 1, 1, 1)."""
        if rope.sections is not None and call.has_positions:
            token_positions = token_positions.amax(dim=0)
        return token_positions.amax(dim=-1)[:, None, None, None] + 1

    def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each pair of features of heads (B, heads, T, H) by its angle."""
        wide = heads.float()
        if is_partial and rope.rotated == "first":
            wide, rest = wide[..., :ROTARY_DIM], wide[..., ROTARY_DIM:]
        elif is_partial:
            rest, wide = wide[..., :-ROTARY_DIM], wide[..., -ROTARY_DIM:]
        if rope.pairs == "interleaved":
            first, second = wide[..., 0::2], wide[..., 1::2]  # pairs (2 i, 2 i + 1)
            pairs = [first * cos - second * sin, second * cos + first * sin]
            rotated = torch.stack(pairs, dim=-1).flatten(-2)
        else:
            first, second = wide.chunk(2, dim=-1)  # pairs (i, i + R/2)
            rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        if is_partial and rope.rotated == "first":
            rotated = torch.cat([rotated, rest], dim=-1)
        elif is_partial:
            rotated = torch.cat([rest, rotated], dim=-1)
        return rotated.to(heads.dtype)


if relative is not None and grid is None:

    def bucket_of(distances: Tensor) -> Tensor:
        """Return the bucket of each distance, key - query."""
        if relative.bidirectional:
            first = (distances > 0) * (NUM_BUCKETS // 2)
            away = distances.abs()
            last = NUM_BUCKETS // 2 - 1
            exact = NUM_BUCKETS // 4  # half of the buckets hold a single distance
        else:
            first = 0
            away = (-distances).clamp(min=0)
            last = NUM_BUCKETS - 1
            exact = NUM_BUCKETS // 2  # half of the buckets hold a single distance
        ratios = away.clamp(min=exact) / exact
        steps = torch.log(ratios) / math.log(MAX_DISTANCE / exact) * (last + 1 - exact)
        shared = (exact + steps.long()).clamp(max=last)
        return first + torch.where(away < exact, away, shared)


if products is not None:

    def row_of(distances: Tensor) -> Tensor:
        """Return the row of the vectors of each distance, key - query."""
        if products.num_exact is not None:
            away = distances.abs()
            steps = torch.tensor(STEPS, device=away.device)
            farther = NUM_EXACT + torch.bucketize(away, steps, right=True)
            distances = distances.sign() * torch.where(away <= NUM_EXACT, away, farther)
        return distances.clamp(-NUM_BEFORE, NUM_AFTER) + NUM_BEFORE


if sinusoids is not None:

    def sinusoids_of(distances: Tensor) -> Tensor:
        """Return sines and cosines, in turn, of each distance, query - key."""
        exponents = torch.arange(0, D_IN, 2, device=distances.device) / D_IN
        angles = distances[:, None] / SINUSOID_THETA**exponents
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


from parity.explain.writing.templates.grid import *
