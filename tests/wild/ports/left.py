"""Generation in PyTorch with padding on the left: every prompt ends at the same slot, and padding has slots as well."""

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

import parity


def rotate(x, positions, theta):
    """x (B, N, T, H), positions (B, T); halves."""
    half = x.shape[-1] // 2
    freq = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * freq
    a, b = x.float().chunk(2, dim=-1)
    turned = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    return turned.to(x.dtype)


class StaticCache:
    """Keys and values (B, K, slots, H); a call writes the slots from `start` on."""

    def __init__(self, spec, batch, slots, dtype):
        self.keys = torch.zeros(batch, spec.num_kv_heads, slots, spec.head_dim, dtype=dtype)
        self.values = torch.zeros_like(self.keys)

    def write(self, k, v, start):
        for b, begin in enumerate(start.tolist()):
            self.keys[b, :, begin : begin + k.shape[2]] = k[b]
            self.values[b, :, begin : begin + k.shape[2]] = v[b]


def hidden_keys(real, start, count):
    """real (B, slots) is 0 for padding; the queries are in the slots from `start` on: (B, 1, T, slots)."""
    queries = start + torch.arange(count)
    later = torch.arange(real.shape[1]) > queries[:, None]
    return later | (real[:, None, None] == 0)


def step(spec, how, w, cache, x, start, real):
    b, t, _ = x.shape
    rec = {}

    def heads(name, count):
        y = linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias"))
        return y.view(b, t, count, -1).transpose(1, 2)

    q, k, v = heads("q", spec.num_heads), heads("k", spec.num_kv_heads), heads("v", spec.num_kv_heads)
    positions = (real.cumsum(dim=-1) - 1).clamp(min=0)[:, start : start + t]
    q = rotate(q, positions, spec.rope.theta)
    k = rotate(k, positions, spec.rope.theta)
    rec["q"], rec["k"], rec["v"] = q, k, v
    where = torch.full((b,), start)
    cache.write(k, v, where)
    keys, values = cache.keys.clone(), cache.values.clone()
    rec["cache.keys"], rec["cache.values"] = keys, values
    hidden = hidden_keys(real, start, t)
    rec["mask"] = hidden
    work = torch.float32 if how.wide else x.dtype
    # A row of padding has no key: its softmax is over equal values, and nothing reads it.
    bias = torch.zeros(hidden.shape, dtype=work).masked_fill(hidden, torch.finfo(work).min)
    context = scaled_dot_product_attention(q.to(work), keys.to(work), values.to(work), bias, enable_gqa=True).to(
        x.dtype
    )
    rec["context"] = context
    out = context.transpose(1, 2).reshape(b, t, -1)
    rec["output"] = linear(out, w["out_proj.weight"], w.get("out_proj.bias"))
    return rec


def port(p, how):
    spec, case = p.spec, p.case
    w = {name: parity.to_torch(array) for name, array in p.weights.items()}
    x = parity.to_torch(p.inputs["query"])
    real = 1 - torch.from_numpy(p.inputs["mask"][:, 0, -1].astype(int))
    cache = StaticCache(spec, case.batch, case.capacity, x.dtype)
    rec, start = {}, 0
    for number, chunk in enumerate(case.chunks):
        noted = step(spec, how, w, cache, x[:, start : start + chunk], start, real)
        start += chunk
        rec |= {f"step{number}.{name}": value for name, value in noted.items()}
    return rec
