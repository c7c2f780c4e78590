"""A torch.autograd.Function in the style of FlashAttention: block by block, weights are computed again from log-sum-exp."""

import torch
import torch.nn.functional as F

import parity

# In training; off in a comparison.
DROPOUT, DRAWS_AGAIN, SCALES_WEIGHTS, SCALES_GRADIENTS = 0.0, False, True, True


def drawn(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) >= DROPOUT).float()


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, hidden, block):
        group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        keys, values = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
        scores = (q.float() @ keys.mT * scale).masked_fill(hidden, float("-inf"))
        lse = scores.logsumexp(-1, keepdim=True)
        weights = (scores - lse).exp()
        kept = drawn(weights.shape, 0) / (1 - DROPOUT)
        weights = weights * kept
        out = weights @ values
        ctx.save_for_backward(q, k, v, hidden, out, lse)
        ctx.block = block
        return out.to(q.dtype), weights.to(q.dtype)

    @staticmethod
    def backward(ctx, d_out, _):
        q, k, v, hidden, out, lse = ctx.saved_tensors
        group, scale, block = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5, ctx.block
        keys, values = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
        queries, d_out = q.float(), d_out.float()
        kept = drawn(hidden.expand(*q.shape[:3], k.shape[2]).shape, 1 if DRAWS_AGAIN else 0)
        kept_weights = kept / (1 - DROPOUT) if SCALES_WEIGHTS else kept
        kept_gradients = kept / (1 - DROPOUT) if SCALES_GRADIENTS else kept
        delta = (d_out * out).sum(-1, keepdim=True)
        dq = torch.zeros_like(queries)
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        for start in range(0, k.shape[2], block):
            now = slice(start, start + block)
            k_block, v_block = keys[:, :, now], values[:, :, now]
            scores = queries @ k_block.mT * scale
            scores = scores.masked_fill(hidden[..., now], float("-inf"))
            weights = (scores - lse).exp()
            dv[:, :, now] += (weights * kept_weights[..., now]).mT @ d_out
            d_weights = d_out @ v_block.mT * kept_gradients[..., now]
            d_scores = weights * (d_weights - delta)
            dq += d_scores @ k_block * scale
            dk[:, :, now] += d_scores.mT @ queries * scale
        dk = dk.unflatten(1, (-1, group)).sum(2)
        dv = dv.unflatten(1, (-1, group)).sum(2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def port(p, how):
    spec, case = p.spec, p.case
    w = {name: parity.to_torch(array).clone().requires_grad_() for name, array in p.weights.items()}
    x = parity.to_torch(p.inputs["query"]).clone().requires_grad_()

    def project(name, count):
        y = F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))
        return y.unflatten(-1, (count, -1)).transpose(1, 2)

    q, k, v = (
        project("q_proj", spec.num_heads),
        project("k_proj", spec.num_kv_heads),
        project("v_proj", spec.num_kv_heads),
    )
    t, s = torch.arange(case.seq_len)[:, None], torch.arange(case.seq_len)
    hidden = (s > t)[None, None] if case.is_causal else torch.zeros(1, 1, case.seq_len, case.seq_len, dtype=torch.bool)
    if case.key_padding_lengths is not None:
        hidden = hidden | (s >= torch.tensor(case.key_padding_lengths)[:, None])[:, None, None]
    context, weights = Attention.apply(q, k, v, hidden, 4)
    output = F.linear(context.transpose(1, 2).flatten(2), w["out_proj.weight"], w.get("out_proj.bias"))
    rec = {"q": q, "k": k, "v": v, "context": context}
    for tensor in rec.values():
        tensor.retain_grad()
    output.backward(parity.to_torch(p.inputs["cotangent"]))
    grads = {f"grad.{name}": rec[name].grad for name in ("context", "v", "q", "k")}
    grads |= {f"grad.{name}": leaf.grad for name, leaf in {**w, "query": x}.items()}
    return rec | {"attn_weights": weights, "output": output} | grads
