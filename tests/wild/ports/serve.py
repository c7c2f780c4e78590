"""A server's loop in PyTorch: one cache for the whole batch, (B, K, slots, H), and prompts of several lengths."""

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


class Cache:
    """Slot i of a row holds token i of its sequence; padding is written as well, and overwritten later."""

    def __init__(self, spec, batch, slots, dtype):
        self.keys = torch.zeros(batch, spec.num_kv_heads, slots, spec.head_dim, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(batch, dtype=torch.long)

    def write(self, k, v):
        t = k.shape[2]
        where = self.lengths
        for b, begin in enumerate(where.tolist()):
            self.keys[b, :, begin : begin + t] = k[b]
            self.values[b, :, begin : begin + t] = v[b]


def is_hidden(queries, slots, window):
    """queries (B, T): the slots of the tokens that attend."""
    last = queries[:, None, :, None]
    key = torch.arange(slots)
    hidden = key > last
    if window is not None:
        hidden = hidden | (key <= last - window)
    return hidden


def step(spec, how, w, cache, x, new_lengths):
    b, t, _ = x.shape
    rec = {}

    def heads(name, count):
        y = linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias"))
        return y.view(b, t, count, -1).transpose(1, 2)

    q, k, v = heads("q", spec.num_heads), heads("k", spec.num_kv_heads), heads("v", spec.num_kv_heads)
    positions = cache.lengths[:, None] + torch.arange(t)
    if spec.rope is not None:
        q = rotate(q, positions, spec.rope.theta)
        k = rotate(k, positions, spec.rope.theta)
    rec["q"], rec["k"], rec["v"] = q, k, v
    cache.write(k, v)
    keys, values = cache.keys.clone(), cache.values.clone()
    rec["cache.keys"], rec["cache.values"] = keys, values
    queries = cache.lengths[:, None] + torch.arange(t)
    hidden = is_hidden(queries, keys.shape[2], spec.window_size)
    rec["mask"] = hidden
    cache.lengths = cache.lengths + new_lengths
    rec["cache.lengths"] = cache.lengths
    if how.wide:
        context = scaled_dot_product_attention(q.float(), keys.float(), values.float(), ~hidden, enable_gqa=True)
        context = context.to(x.dtype)
    else:
        context = scaled_dot_product_attention(q, keys, values, ~hidden, enable_gqa=True)
    rec["context"] = context
    out = context.transpose(1, 2).reshape(b, t, -1)
    rec["output"] = linear(out, w["out_proj.weight"], w.get("out_proj.bias"))
    return rec


def port(p, how):
    spec, case = p.spec, p.case
    w = {name: parity.to_torch(array) for name, array in p.weights.items()}
    x = parity.to_torch(p.inputs["query"])
    cache = Cache(spec, case.batch, case.capacity, x.dtype)
    rec, start = {}, 0
    for number, chunk in enumerate(case.chunks):
        tokens = x[:, start : start + chunk]
        start += chunk
        noted = step(spec, how, w, cache, tokens, torch.tensor(case.added(number)))
        rec |= {f"step{number}.{name}": value for name, value in noted.items()}
    return rec
