"""Decoding in PyTorch with a cache of 8 or 4 bits: stored values, and next to them the scales that make them keys and values."""

import torch
from torch.nn.functional import linear

import parity

SHARED = {"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "channel": (0, 2), "token": (1, 3), "token_head": (3,)}
OF_ALL_TOKENS = ("tensor", "head", "channel")


def rotate(x, positions, theta):
    """x (B, N, T, H), positions (T,); halves."""
    half = x.shape[-1] // 2
    freq = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None].float() * freq
    a, b = x.float().chunk(2, dim=-1)
    turned = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    return turned.to(x.dtype)


class Store:
    """Keys or values of all tokens so far, (B, K, S, H)."""

    def __init__(self, q, group, scales):
        self.q, self.group, self.fixed = q, group, None
        if scales is not None:
            self.fixed = torch.tensor(scales).view(1, -1, 1, 1), torch.zeros(1, 1, 1, 1)
        self.numbers, self.scales, self.zeros = [], [], []

    def measure(self, x):
        """The scales of new tokens, and what is stored as 0."""
        if self.fixed is not None:
            return self.fixed
        shared = SHARED[self.group]
        low, high = x.amin(shared, keepdim=True), x.amax(shared, keepdim=True)
        if self.q.zero_point == "none":
            scale, zero = torch.maximum(-low, high) / self.q.limits[1], torch.zeros_like(low)
        elif self.q.zero_point == "minimum":
            scale, zero = (high - low) / self.q.limits[1], low
        else:
            low, high = low.clamp(max=0), high.clamp(min=0)
            scale = (high - low) / self.q.limits[1]
            zero = (low / scale).round() * scale
        if self.group in OF_ALL_TOKENS:
            self.fixed = scale, zero
        return scale, zero

    def narrow(self, x):
        if self.q.dtype.startswith("float8"):
            return x.clamp(*self.q.limits).to(getattr(torch, self.q.dtype))
        return x.round().clamp(*self.q.limits).to(torch.int16)

    def write(self, x):
        x = x.float()
        scale, zero = self.measure(x)
        self.numbers.append(self.narrow((x - zero) / scale))
        self.scales.append(scale.expand_as(x))
        self.zeros.append(zero.expand_as(x))

    def read(self, dtype):
        numbers = torch.cat([each.float() for each in self.numbers], 2)
        x = numbers * torch.cat(self.scales, 2) + torch.cat(self.zeros, 2)
        return x.to(dtype)


def step(spec, how, w, key_store, value_store, x, start):
    b, t, _ = x.shape
    rec = {}

    def heads(name, count):
        y = linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias"))
        return y.view(b, t, count, -1).transpose(1, 2)

    q, k, v = heads("q", spec.num_heads), heads("k", spec.num_kv_heads), heads("v", spec.num_kv_heads)
    positions = start + torch.arange(t)
    q, plain_k = rotate(q, positions, spec.rope.theta), k
    k = rotate(k, positions, spec.rope.theta)
    rec["q"], rec["k"], rec["v"] = q, k, v
    before_rope = key_store.q.before_rope
    key_store.write(plain_k if before_rope else k)
    value_store.write(v)
    keys, values = key_store.read(x.dtype), value_store.read(x.dtype)
    slots = torch.arange(keys.shape[2])
    if before_rope:
        keys = rotate(keys, slots, spec.rope.theta)
    rec["cache.keys"], rec["cache.values"] = keys, values
    hidden = slots > positions[:, None]
    rec["mask"] = hidden
    group = spec.num_heads // spec.num_kv_heads
    work = torch.float32 if how.wide else x.dtype
    scores = q.to(work) @ keys.to(work).repeat_interleave(group, 1).mT / spec.head_dim**0.5
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    context = (weights @ values.to(work).repeat_interleave(group, 1)).to(x.dtype)
    rec["context"] = context
    out = context.transpose(1, 2).reshape(b, t, -1)
    rec["output"] = linear(out, w["out_proj.weight"], w.get("out_proj.bias"))
    return rec


def port(p, how):
    spec, case = p.spec, p.case
    w = {name: parity.to_torch(array) for name, array in p.weights.items()}
    x = parity.to_torch(p.inputs["query"])
    q = case.cache_quantization
    key_store = Store(q, q.scale_per_of("keys"), q.key_scales)
    value_store = Store(q, q.scale_per_of("values"), q.value_scales)
    rec, start = {}, 0
    for number, chunk in enumerate(case.chunks):
        noted = step(spec, how, w, key_store, value_store, x[:, start : start + chunk], start)
        start += chunk
        rec |= {f"step{number}.{name}": value for name, value in noted.items()}
    return rec
