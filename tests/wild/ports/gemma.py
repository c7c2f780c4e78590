"""As in Gemma and its kin: torch, norms of queries and keys with 1 + w, a different scale, soft cap, sliding window."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

import parity


class RMSNorm:
    def __init__(self, weight, eps):
        self.weight, self.eps = weight, eps

    def __call__(self, x):
        output = x.float()
        variance = output.pow(2).mean(-1, keepdim=True)
        output = output * torch.rsqrt(variance + self.eps)
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


def rope(x, position_ids, theta):
    half = x.shape[-1] // 2
    inv_freq = 1.0 / (theta ** (torch.arange(0, x.shape[-1], 2).float() / x.shape[-1]))
    angle = position_ids[:, None].float() * inv_freq[None, :]
    cos, sin = angle.cos(), angle.sin()
    x1, x2 = x[..., :half].float(), x[..., half:].float()
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).type_as(x)


def sliding_mask(q_len, window):
    ones = torch.ones(q_len, q_len, dtype=torch.bool)
    keep = torch.tril(ones)
    if window is not None:
        keep = keep & torch.triu(ones, diagonal=1 - window)
    return keep


def forward(cfg, w, x):
    rec = {}
    bsz, q_len, _ = x.shape
    q = F.linear(x, w["q_proj.weight"]).view(bsz, q_len, cfg.num_heads, cfg.head_dim).transpose(1, 2)
    k = F.linear(x, w["k_proj.weight"]).view(bsz, q_len, cfg.num_kv_heads, cfg.head_dim).transpose(1, 2)
    v = F.linear(x, w["v_proj.weight"]).view(bsz, q_len, cfg.num_kv_heads, cfg.head_dim).transpose(1, 2)
    rec["q.before_norm"], rec["k.before_norm"] = q, k
    if cfg.has_norm:
        q = RMSNorm(w["q_norm.weight"], cfg.eps)(q)
        k = RMSNorm(w["k_norm.weight"], cfg.eps)(k)
    rec["q.before_rope"], rec["k.before_rope"] = q, k
    position_ids = torch.arange(q_len)
    q = rope(q, position_ids, cfg.theta)
    k = rope(k, position_ids, cfg.theta)
    rec.update(q=q, k=k, v=v)
    key = k.repeat_interleave(cfg.groups, dim=1)
    value = v.repeat_interleave(cfg.groups, dim=1)
    rec["k.repeated"], rec["v.repeated"] = key, value
    work = torch.float32 if cfg.wide else x.dtype
    attn = torch.matmul(q.to(work), key.to(work).transpose(2, 3))
    rec["scores.unscaled"] = attn
    attn = attn * cfg.scaling
    if cfg.softcap is not None:
        attn = attn / cfg.softcap
        attn = torch.tanh(attn)
        attn = attn * cfg.softcap
    rec["scores"] = attn
    keep = sliding_mask(q_len, cfg.window)
    rec["mask"] = ~keep[None, None]
    attn = attn.masked_fill(~keep, cfg.hidden)
    rec["scores.masked"] = attn
    attn = F.softmax(attn, dim=-1, dtype=torch.float32).to(x.dtype)
    rec["attn_weights"] = attn
    y = torch.matmul(attn, value)
    rec["context"] = y
    y = y.transpose(1, 2).reshape(bsz, q_len, -1)
    rec["output"] = F.linear(y, w["out_proj.weight"])
    return rec


def port(p, how):
    spec = p.spec
    w = {name: parity.to_torch(array) for name, array in p.weights.items()}
    x = parity.to_torch(p.inputs["query"])
    cfg = SimpleNamespace(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        groups=spec.num_heads // spec.num_kv_heads,
        head_dim=spec.head_dim,
        has_norm=spec.qk_norm is not None,
        eps=spec.qk_norm.eps if spec.qk_norm else 0.0,
        theta=spec.rope.theta,
        scaling=spec.score_scale,
        softcap=spec.soft_cap,
        window=p.case.window_size or spec.window_size,
        wide=how.wide,
        hidden=how.hidden(torch.finfo(torch.float32 if how.wide else x.dtype).min),
    )
    run = how.wrap(lambda x: forward(cfg, w, x))
    with torch.no_grad():
        return run(x)
