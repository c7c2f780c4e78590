"""As in MPT and BLOOM: torch, one Wqkv, ALiBi instead of positions, values clipped, LayerNorm over the whole width."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import parity


def build_slopes(n_heads, alibi_bias_max):
    closest = 2 ** math.floor(math.log2(n_heads))
    base = 2.0 ** (-alibi_bias_max / closest)
    slopes = [base ** (i + 1) for i in range(closest)]
    extra_base = 2.0 ** (-alibi_bias_max / (2 * closest))
    slopes += [extra_base ** (2 * i + 1) for i in range(n_heads - closest)]
    return torch.tensor(slopes)


def build_alibi(n_heads, q_len, k_len, alibi_bias_max):
    distance = torch.arange(k_len)[None, :] - torch.arange(q_len)[:, None]
    alibi = -distance.abs()[None, None].float()
    return alibi * build_slopes(n_heads, alibi_bias_max).view(1, n_heads, 1, 1)


def forward(cfg, w, x):
    rec = {}
    b, s, _ = x.shape
    qkv = F.linear(x, w["Wqkv.weight"], w.get("Wqkv.bias"))
    if cfg.clip_qkv is not None:
        qkv = qkv.clamp(min=-cfg.clip_qkv, max=cfg.clip_qkv)
    query, key, value = qkv.split([cfg.width, cfg.width, cfg.width], dim=-1)
    if "q_ln.weight" in w:
        query = F.layer_norm(query, (cfg.width,), w["q_ln.weight"], w.get("q_ln.bias"), cfg.eps)
        key = F.layer_norm(key, (cfg.width,), w["k_ln.weight"], w.get("k_ln.bias"), cfg.eps)
    query = query.reshape(b, s, cfg.n_heads, cfg.head_dim).permute(0, 2, 1, 3)
    key = key.reshape(b, s, cfg.n_heads, cfg.head_dim).permute(0, 2, 3, 1)
    value = value.reshape(b, s, cfg.n_heads, cfg.head_dim).permute(0, 2, 1, 3)
    rec.update(q=query, k=key.transpose(2, 3), v=value)
    work = torch.float32 if cfg.wide else x.dtype
    attn_weight = query.to(work).matmul(key.to(work)) * cfg.softmax_scale
    attn_weight = attn_weight + cfg.attn_bias.to(work)
    rec["scores"] = attn_weight
    causal_mask = torch.ones(s, s, dtype=torch.bool).tril().logical_not()
    rec["mask"] = causal_mask[None, None]
    attn_weight = attn_weight.masked_fill(causal_mask, cfg.hidden)
    rec["scores.masked"] = attn_weight
    attn_weight = torch.softmax(attn_weight.float(), dim=-1).to(x.dtype)
    rec["attn_weights"] = attn_weight
    out = attn_weight.matmul(value)
    rec["context"] = out
    out = out.permute(0, 2, 1, 3).reshape(b, s, cfg.width)
    rec["output"] = F.linear(out, w["out_proj.weight"], w.get("out_proj.bias"))
    return rec


def load(p):
    w = {name: parity.to_torch(array) for name, array in p.weights.items()}
    state = {}
    for leaf in ("weight", "bias"):
        if f"q_proj.{leaf}" in w:
            state[f"Wqkv.{leaf}"] = torch.cat([w[f"q_proj.{leaf}"], w[f"k_proj.{leaf}"], w[f"v_proj.{leaf}"]])
        for short in ("q", "k"):
            if f"{short}_norm.{leaf}" in w:
                state[f"{short}_ln.{leaf}"] = w[f"{short}_norm.{leaf}"]
        if f"out_proj.{leaf}" in w:
            state[f"out_proj.{leaf}"] = w[f"out_proj.{leaf}"]
    return state


def port(p, how):
    spec, case = p.spec, p.case
    x = parity.to_torch(p.inputs["query"])
    alibi_bias_max = spec.alibi.max_bias
    cfg = SimpleNamespace(
        n_heads=spec.num_heads,
        head_dim=spec.head_dim,
        width=spec.q_width,
        clip_qkv=spec.clip_qkv,
        eps=spec.qk_norm.eps if spec.qk_norm else 0.0,
        softmax_scale=1 / math.sqrt(spec.head_dim),
        attn_bias=build_alibi(spec.num_heads, case.seq_len, case.key_len, alibi_bias_max),
        wide=how.wide,
        hidden=how.hidden(torch.finfo(torch.float32 if how.wide else x.dtype).min),
    )
    run = how.wrap(lambda w, x: forward(cfg, w, x))
    with torch.no_grad():
        return run(load(p), x)
