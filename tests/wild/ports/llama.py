"""As in transformers' LLaMA and its kin: torch, grouped heads, RoPE by halves, a cache that grows by torch.cat."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import parity


def inverse_frequencies(rope, head_dim):
    dim = rope.rotary_dim or head_dim
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))
    scaling = rope.scaling
    if type(scaling).__name__ == "LinearScaling":
        inv_freq = inv_freq / scaling.factor
    if type(scaling).__name__ == "Llama3Scaling":
        old_context_len = scaling.original_length
        low_freq_wavelen = old_context_len / scaling.low_freq_factor
        high_freq_wavelen = old_context_len / scaling.high_freq_factor
        wavelen = 2 * math.pi / inv_freq
        scaled = torch.where(wavelen > low_freq_wavelen, inv_freq / scaling.factor, inv_freq)
        smooth = (old_context_len / wavelen - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        smoothed = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
        is_medium = ~(wavelen < high_freq_wavelen) & ~(wavelen > low_freq_wavelen)
        inv_freq = torch.where(is_medium, smoothed, scaled)
    return inv_freq.float()


def rotary_tables(cfg, position_ids, dtype):
    freqs = position_ids[:, :, None].float() * cfg.inv_freq[None, None, :]
    emb = torch.cat((freqs, freqs), dim=-1)
    return emb.cos().to(dtype), emb.sin().to(dtype)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    dim = cos.shape[-1]
    q_rot, q_pass = q[..., :dim], q[..., dim:]
    k_rot, k_pass = k[..., :dim], k[..., dim:]
    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
    return torch.cat([q_embed, q_pass], dim=-1), torch.cat([k_embed, k_pass], dim=-1)


def repeat_kv(hidden_states, n_rep):
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


def attention(cfg, w, hidden_states, position_ids, past=None):
    rec = {}
    bsz, q_len, _ = hidden_states.shape
    q = F.linear(hidden_states, w["q_proj.weight"], w.get("q_proj.bias"))
    k = F.linear(hidden_states, w["k_proj.weight"], w.get("k_proj.bias"))
    v = F.linear(hidden_states, w["v_proj.weight"], w.get("v_proj.bias"))
    q = q.view(bsz, q_len, cfg.num_heads, cfg.head_dim).transpose(1, 2)
    k = k.view(bsz, q_len, cfg.num_key_value_heads, cfg.head_dim).transpose(1, 2)
    v = v.view(bsz, q_len, cfg.num_key_value_heads, cfg.head_dim).transpose(1, 2)
    if "q_norm.weight" in w:
        q, k = rms_norm(q, w["q_norm.weight"], cfg.eps), rms_norm(k, w["k_norm.weight"], cfg.eps)
    rec["q.before_rope"], rec["k.before_rope"] = q, k
    cos, sin = rotary_tables(cfg, position_ids, q.dtype if cfg.narrow_tables else torch.float32)
    q_out, k_out = apply_rotary_pos_emb(q, k, cos, sin)
    q, k = q_out.to(q.dtype), k_out.to(k.dtype)
    rec.update(q=q, k=k, v=v)
    if past is not None:
        k = torch.cat([past[0], k], dim=2)
        v = torch.cat([past[1], v], dim=2)
    rec["cache.keys"], rec["cache.values"] = k, v
    key_states, value_states = repeat_kv(k, cfg.num_key_value_groups), repeat_kv(v, cfg.num_key_value_groups)
    rec["k.repeated"], rec["v.repeated"] = key_states, value_states
    kv_len = key_states.shape[2]
    causal_mask = torch.arange(kv_len)[None, :] > torch.arange(kv_len - q_len, kv_len)[:, None]
    work = torch.float32 if cfg.wide else q.dtype
    products = torch.matmul(q.to(work), key_states.to(work).transpose(2, 3))
    rec["scores.unscaled"] = products
    attn_weights = products * cfg.scaling
    rec["scores"] = attn_weights
    rec["mask"] = causal_mask[None, None]
    additive = torch.zeros(q_len, kv_len, dtype=work).masked_fill(causal_mask, cfg.hidden)[None, None]
    rec["mask.additive"] = additive
    attn_weights = attn_weights + additive
    rec["scores.masked"] = attn_weights
    attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(q.dtype)
    rec["attn_weights"] = attn_weights
    attn_output = torch.matmul(attn_weights, value_states)
    rec["context"] = attn_output
    attn_output = attn_output.transpose(1, 2).contiguous()
    attn_output = attn_output.reshape(bsz, q_len, -1)
    rec["output"] = F.linear(attn_output, w["out_proj.weight"], w.get("out_proj.bias"))
    return rec


def rms_norm(x, weight, eps):
    dtype = x.dtype
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * x).to(dtype)


def config(p, how):
    spec, dtype = p.spec, parity.to_torch(p.inputs["query"]).dtype
    work = torch.float32 if how.wide else dtype
    return SimpleNamespace(
        num_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        num_key_value_groups=spec.num_heads // spec.num_kv_heads,
        head_dim=spec.head_dim,
        scaling=spec.head_dim**-0.5,
        inv_freq=inverse_frequencies(spec.rope, spec.head_dim),
        wide=how.wide,
        narrow_tables=not how.wide,
        hidden=how.hidden(torch.finfo(work).min),
        eps=spec.qk_norm.eps if spec.qk_norm else 0.0,
    )


def port(p, how):
    cfg = config(p, how)
    w = {name: parity.to_torch(array) for name, array in p.weights.items()}
    x = parity.to_torch(p.inputs["query"])
    layer = how.wrap(lambda *given: attention(cfg, w, *given))
    with torch.no_grad():
        if not p.case.is_cached:
            start = p.case.first_position
            position_ids = torch.arange(start, start + x.shape[1])[None]
            return layer(x, position_ids)
        rec, past, seen = {}, None, 0
        for step, chunk in enumerate(p.case.chunks):
            position_ids = torch.arange(seen, seen + chunk)[None] + p.case.first_position
            out = layer(x[:, seen : seen + chunk], position_ids, past)
            past = (out["cache.keys"], out["cache.values"])
            seen += chunk
            out["cache.lengths"] = torch.full((x.shape[0],), seen, dtype=torch.int32)
            rec |= {f"step{step}.{name}": value for name, value in out.items()}
        return rec
