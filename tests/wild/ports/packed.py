"""Training on packed samples in PyTorch: several short texts in one row, each with its own positions and its own mask."""

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


def positions_of(ids):
    """The number of each token in its own text; ids (B, T) tell the texts of a row."""
    tokens = torch.arange(ids.shape[1])
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    begin = torch.where(is_first, tokens, 0).cummax(dim=1).values
    return tokens - begin


def hidden_keys(ids):
    """(B, 1, T, T): later tokens, and those of other texts."""
    count = ids.shape[1]
    later = torch.arange(count)[None, :] > torch.arange(count)[:, None]
    of_another = ids[:, :, None] != ids[:, None, :]
    return (later | of_another)[:, None]


def port(p, how):
    spec, case = p.spec, p.case
    w = {name: parity.to_torch(array) for name, array in p.weights.items()}
    x = parity.to_torch(p.inputs["query"])
    ids = torch.tensor(case.segment_ids)
    b, t, _ = x.shape
    rec = {}

    def heads(name, count):
        y = linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias"))
        return y.view(b, t, count, -1).transpose(1, 2)

    q, k, v = heads("q", spec.num_heads), heads("k", spec.num_kv_heads), heads("v", spec.num_kv_heads)
    positions = positions_of(ids)
    q = rotate(q, positions, spec.rope.theta)
    k = rotate(k, positions, spec.rope.theta)
    rec["q"], rec["k"], rec["v"] = q, k, v
    hidden = hidden_keys(ids)
    rec["mask"] = hidden
    work = torch.float32 if how.wide else x.dtype
    context = scaled_dot_product_attention(q.to(work), k.to(work), v.to(work), ~hidden, enable_gqa=True).to(x.dtype)
    rec["context"] = context
    out = context.transpose(1, 2).reshape(b, t, -1)
    rec["output"] = linear(out, w["out_proj.weight"], w.get("out_proj.bias"))
    return rec
