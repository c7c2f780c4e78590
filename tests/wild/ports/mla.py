"""As in DeepSeek V3: torch, queries and keys from latents, YaRN on neighbors, whose mscale is part of the scale."""

import math

import torch
import torch.nn.functional as F

import parity


def yarn_get_mscale(scale, mscale):
    return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1.0 else 1.0


def inverse_frequencies(rope, dim):
    scaling = rope.scaling
    freq_extra = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))
    freq_inter = freq_extra / scaling.factor

    def correction_dim(num_rotations):
        turns = scaling.original_length / (num_rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(correction_dim(scaling.beta_fast)), 0)
    high = min(math.ceil(correction_dim(scaling.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return freq_inter * ramp + freq_extra * (1 - ramp)


def rms_norm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rotate(x, cos, sin):
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


def forward(spec, w, x, how):
    rec = {}
    scaling, latent = spec.rope.scaling, spec.latent
    nope, rope_dim = spec.head_dim - latent.rope_dim, latent.rope_dim
    bsz, seqlen, _ = x.shape
    mscale = yarn_get_mscale(scaling.factor, scaling.mscale)
    mscale_all_dim = yarn_get_mscale(scaling.factor, scaling.mscale_all_dim)
    softmax_scale = spec.head_dim**-0.5 * mscale_all_dim * mscale_all_dim
    angles = torch.arange(seqlen)[:, None] * inverse_frequencies(spec.rope, rope_dim)
    amplitude = mscale / mscale_all_dim
    cos, sin = (angles.cos() * amplitude).float(), (angles.sin() * amplitude).float()
    q_latent = rms_norm(F.linear(x, w["q_a_proj.weight"]), w["q_a_norm.weight"], latent.eps)
    q = F.linear(q_latent, w["q_b_proj.weight"]).view(bsz, seqlen, spec.num_heads, -1).transpose(1, 2)
    q_nope, q_pe = q.split([nope, rope_dim], dim=-1)
    kv_latent, k_pe = F.linear(x, w["kv_a_proj.weight"]).split([latent.kv_rank, rope_dim], dim=-1)
    kv_latent = rms_norm(kv_latent, w["kv_a_norm.weight"], latent.eps)
    q_pe, k_pe = rotate(q_pe, cos, sin), rotate(k_pe, cos, sin)
    rec["latents"] = torch.cat([kv_latent, k_pe], dim=-1)[:, None]
    kv = F.linear(kv_latent, w["kv_b_proj.weight"]).view(bsz, seqlen, spec.num_heads, -1).transpose(1, 2)
    k_nope, value = kv.split([nope, spec.value_head_dim], dim=-1)
    query = torch.cat([q_nope, q_pe], dim=-1)
    key = torch.cat([k_nope, k_pe[:, None].expand(-1, spec.num_heads, -1, -1)], dim=-1)
    rec.update(q=query, k=key, v=value)
    work = torch.float32 if how.wide else x.dtype
    scores = torch.matmul(query.to(work), key.to(work).transpose(2, 3)) * softmax_scale
    rec["scores"] = scores
    mask = torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1)
    rec["mask"] = mask[None, None]
    scores = scores.masked_fill(mask, how.hidden(torch.finfo(scores.dtype).min))
    weights = torch.softmax(scores.float(), dim=-1).to(x.dtype)
    rec["attn_weights"] = weights
    context = torch.matmul(weights, value)
    rec["context"] = context
    rec["output"] = F.linear(context.transpose(1, 2).flatten(2), w["out_proj.weight"])
    return rec


def port(p, how):
    w = {name: parity.to_torch(array) for name, array in p.weights.items()}
    run = how.wrap(lambda w, x: forward(p.spec, w, x, how))
    with torch.no_grad():
        return run(w, parity.to_torch(p.inputs["query"]))
