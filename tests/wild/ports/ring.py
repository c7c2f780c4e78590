"""Decoding in PyTorch with a ring for a sliding window: token s is in slot s % window, and overwrites the oldest."""

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

import parity


def rotate(x, positions, theta):
    """x (B, N, T, H), positions (T,) or (S,); halves."""
    half = x.shape[-1] // 2
    freq = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None].float() * freq
    a, b = x.float().chunk(2, dim=-1)
    turned = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    return turned.to(x.dtype)


class Ring:
    """One slot for each key of a window."""

    def __init__(self, spec, slots, batch, dtype):
        self.keys = torch.zeros(batch, spec.num_kv_heads, slots, spec.head_dim, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.tokens = torch.full((slots,), -1)

    def store(self, k, v, positions):
        count = self.tokens.numel()
        slots = positions[-count:] % count
        self.keys[:, :, slots], self.values[:, :, slots] = k[:, :, -count:], v[:, :, -count:]
        self.tokens[slots] = positions[-count:]

    def read(self):
        """The stored tokens, the oldest first."""
        order = self.tokens.argsort()
        order = order[self.tokens[order] >= 0]
        return self.keys[:, :, order], self.values[:, :, order], self.tokens[order]


def update(ring, k, v, positions):
    """Store new tokens, and return those to attend to."""
    if k.shape[2] == 1:
        ring.store(k, v, positions)
        return ring.read()
    # The first of several tokens needs keys that the last ones overwrite.
    keys, values, tokens = ring.read()
    ring.store(k, v, positions)
    return torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2), torch.cat([tokens, positions])


def step(spec, how, w, ring, x, start):
    b, t, _ = x.shape
    rec = {}

    def heads(name, count):
        y = linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias"))
        return y.view(b, t, count, -1).transpose(1, 2)

    q, k, v = heads("q", spec.num_heads), heads("k", spec.num_kv_heads), heads("v", spec.num_kv_heads)
    positions = start + torch.arange(t)
    q = rotate(q, positions, spec.rope.theta)
    k = rotate(k, positions, spec.rope.theta)
    rec["q"], rec["k"], rec["v"] = q, k, v
    keys, values, tokens = update(ring, k, v, positions)
    queries = positions[:, None]
    hidden = (tokens > queries) | (tokens <= queries - spec.window_size)
    work = torch.float32 if how.wide else x.dtype
    context = scaled_dot_product_attention(q.to(work), keys.to(work), values.to(work), ~hidden, enable_gqa=True)
    rec["context"] = context.to(x.dtype)
    out = rec["context"].transpose(1, 2).reshape(b, t, -1)
    rec["output"] = linear(out, w["out_proj.weight"], w.get("out_proj.bias"))
    return rec


def port(p, how):
    spec, case = p.spec, p.case
    w = {name: parity.to_torch(array) for name, array in p.weights.items()}
    x = parity.to_torch(p.inputs["query"])
    ring = Ring(spec, spec.window_size, case.batch, x.dtype)
    rec, start = {}, 0
    for number, chunk in enumerate(case.chunks):
        noted = step(spec, how, w, ring, x[:, start : start + chunk], start)
        start += chunk
        rec |= {f"step{number}.{name}": value for name, value in noted.items()}
    return rec
