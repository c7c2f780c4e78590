"""As in nanoGPT: torch, one c_attn for queries, keys and values, a lower triangle that hides, softmax by hand."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import parity


def load(p):
    w = {name: parity.to_torch(array) for name, array in p.weights.items()}
    state = {}
    for leaf in ("weight", "bias"):
        if f"q_proj.{leaf}" in w:
            state[f"c_attn.{leaf}"] = torch.cat([w[f"q_proj.{leaf}"], w[f"k_proj.{leaf}"], w[f"v_proj.{leaf}"]])
        if f"out_proj.{leaf}" in w:
            state[f"c_proj.{leaf}"] = w[f"out_proj.{leaf}"]
    return state


def forward(cfg, state, x):
    rec = {}
    B, T, C = x.size()
    hs = C // cfg.n_head
    qkv = F.linear(x, state["c_attn.weight"], state.get("c_attn.bias"))
    q, k, v = qkv.split(cfg.n_embd, dim=2)
    k = k.view(B, T, cfg.n_head, hs).transpose(1, 2)  # (B, nh, T, hs)
    q = q.view(B, T, cfg.n_head, hs).transpose(1, 2)
    v = v.view(B, T, cfg.n_head, hs).transpose(1, 2)
    rec["q"], rec["k"], rec["v"] = q, k, v
    dtype = q.dtype
    if cfg.wide:
        q, k = q.float(), k.float()
    att = q @ k.transpose(-2, -1)
    rec["scores.unscaled"] = att
    att = att * (1.0 / math.sqrt(hs))
    rec["scores"] = att
    bias = torch.tril(torch.ones(T, T)).view(1, 1, T, T)
    rec["mask"] = bias == 0
    att = att.masked_fill(bias == 0, cfg.hidden)
    rec["scores.masked"] = att
    att = F.softmax(att, dim=-1).to(dtype)
    rec["attn_weights"] = att
    y = att @ v
    rec["context"] = y
    y = y.transpose(1, 2).contiguous().view(B, T, C)
    y = F.linear(y, state["c_proj.weight"], state.get("c_proj.bias"))
    rec["output"] = y
    return rec


def port(p, how):
    x = parity.to_torch(p.inputs["query"])
    lowest = torch.finfo(torch.float32 if how.wide else x.dtype).min
    cfg = SimpleNamespace(n_head=p.spec.num_heads, n_embd=p.spec.d_model, wide=how.wide, hidden=how.hidden(lowest))
    run = how.wrap(lambda state, x: forward(cfg, state, x))
    with torch.no_grad():
        return run(load(p), x)
