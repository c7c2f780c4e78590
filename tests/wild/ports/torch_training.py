"""A training step in torch: automatic differentiation, a norm per head, RoPE, a gate, shared key/value heads."""

import torch
import torch.nn.functional as F

import parity


def rms_norm(x, weight, eps):
    variance = x.float().pow(2).mean(-1, keepdim=True)
    x = (x.float() * torch.rsqrt(variance + eps)).to(x.dtype)
    return x * weight


def rotate(x, theta):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def hidden_keys(case):
    t, s = torch.arange(case.seq_len)[:, None], torch.arange(case.seq_len)
    hidden = (s > t) if case.is_causal else torch.zeros(case.seq_len, case.seq_len, dtype=torch.bool)
    hidden = hidden[None, None]
    if case.key_padding_lengths is not None:
        hidden = hidden | (s >= torch.tensor(case.key_padding_lengths)[:, None])[:, None, None]
    return hidden


def layer(p, w, x):
    spec, rec = p.spec, {}

    def linear(name, x):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def heads(x, count):
        return x.unflatten(-1, (count, -1)).transpose(1, 2)

    x_q, x_k, x_v = x, x, x
    q = heads(linear("q_proj", x_q), spec.num_heads)
    k = heads(linear("k_proj", x_k), spec.num_kv_heads)
    v = heads(linear("v_proj", x_v), spec.num_kv_heads)
    if spec.qk_norm is not None:
        q = rms_norm(q, w["q_norm.weight"], spec.qk_norm.eps)
        k = rms_norm(k, w["k_norm.weight"], spec.qk_norm.eps)
    if spec.rope is not None:
        q, k = rotate(q, spec.rope.theta), rotate(k, spec.rope.theta)
    rec |= {"q": q, "k": k, "v": v}
    group = spec.num_heads // spec.num_kv_heads
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ keys.mT * spec.head_dim**-0.5
    if "bias" in p.inputs:
        scores = scores + w["bias"]
    rec["scores"] = scores
    weights = scores.float().masked_fill(hidden_keys(p.case), float("-inf")).softmax(-1).to(x.dtype)
    rec["attn_weights"] = weights
    context = weights @ values
    rec["context"] = context
    y = context.transpose(1, 2).flatten(2)
    if spec.gate is not None:
        gate = linear("gate_proj", x)
        rec["gate"] = gate
        y = y * torch.sigmoid(gate)
    rec["output"] = linear("out_proj", y)
    return rec


def port(p, how):
    w = {name: parity.to_torch(array).clone().requires_grad_() for name, array in p.weights.items()}
    x = parity.to_torch(p.inputs["query"]).clone().requires_grad_()
    given = {**w}
    if "bias" in p.inputs:
        given["bias"] = parity.to_torch(p.inputs["bias"]).clone().requires_grad_()
    rec = layer(p, given, x)
    between = [name for name in ("context", "attn_weights", "v", "q", "k") if rec[name].requires_grad]
    for name in between:
        rec[name].retain_grad()
    rec["output"].backward(parity.to_torch(p.inputs["cotangent"]))
    grads = {}
    for name in ("context", "attn_weights", "v", "q", "k"):
        grads[f"grad.{name}"] = torch.zeros_like(rec[name]) if rec[name].grad is None else rec[name].grad
    for name, leaf in {**given, "query": x}.items():
        grads[f"grad.{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return rec | grads
