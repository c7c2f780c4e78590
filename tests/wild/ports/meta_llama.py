"""As in Meta's LLaMA: torch, RoPE as complex numbers on neighbors, (B, T, N, H), a cache made beforehand."""

import math

import torch
import torch.nn.functional as F

import parity


def precompute_freqs_cis(dim, end, theta):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].double() / dim))
    t = torch.arange(end).double()
    freqs = torch.outer(t, freqs)
    return torch.polar(torch.ones_like(freqs), freqs).to(torch.complex64)


def apply_rotary_emb(xq, xk, freqs_cis):
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, xq_.shape[1], 1, xq_.shape[-1])
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def repeat_kv(x, n_rep):
    bs, slen, n_kv_heads, head_dim = x.shape
    if n_rep == 1:
        return x
    return x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim).reshape(bs, slen, -1, head_dim)


class Attention:
    def __init__(self, spec, w, how, max_batch_size, max_seq_len):
        self.n_heads, self.n_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.n_rep = self.n_heads // self.n_kv_heads
        self.how = how
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.wq, self.wk, self.wv, self.wo = (w[f"{name}.weight"] for name in names)
        self.bq, self.bk, self.bv, self.bo = (w.get(f"{name}.bias") for name in names)
        shape = (max_batch_size, max_seq_len, self.n_kv_heads, self.head_dim)
        self.cache_k = torch.zeros(shape, dtype=self.wk.dtype)
        self.cache_v = torch.zeros(shape, dtype=self.wk.dtype)

    def forward(self, x, start_pos, freqs_cis, mask):
        rec = {}
        bsz, seqlen, _ = x.shape
        xq, xk, xv = F.linear(x, self.wq, self.bq), F.linear(x, self.wk, self.bk), F.linear(x, self.wv, self.bv)
        xq = xq.view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = xk.view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xv = xv.view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        rec["q.before_rope"], rec["k.before_rope"] = xq.transpose(1, 2), xk.transpose(1, 2)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis)
        rec.update(q=xq.transpose(1, 2), k=xk.transpose(1, 2), v=xv.transpose(1, 2))
        self.cache_k[:bsz, start_pos : start_pos + seqlen] = xk
        self.cache_v[:bsz, start_pos : start_pos + seqlen] = xv
        keys = self.cache_k[:bsz, : start_pos + seqlen]
        values = self.cache_v[:bsz, : start_pos + seqlen]
        rec["cache.keys"] = self.cache_k.transpose(1, 2).clone()
        rec["cache.values"] = self.cache_v.transpose(1, 2).clone()
        keys = repeat_kv(keys, self.n_rep)  # (bs, cache_len + seqlen, n_heads, head_dim)
        values = repeat_kv(values, self.n_rep)
        xq = xq.transpose(1, 2)
        keys = keys.transpose(1, 2)
        values = values.transpose(1, 2)
        rec["k.repeated"], rec["v.repeated"] = keys, values
        work = torch.float32 if self.how.wide else xq.dtype
        scores = torch.matmul(xq.to(work), keys.to(work).transpose(2, 3))
        rec["scores.unscaled"] = scores
        scores = scores / math.sqrt(self.head_dim)
        rec["scores"] = scores
        if mask is not None:
            scores = scores + mask.to(work)
            rec["mask"] = (mask < 0)[None, None]
        rec["scores.masked"] = scores
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        rec["attn_weights"] = scores
        output = torch.matmul(scores, values)
        rec["context"] = output
        output = output.transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        rec["output"] = F.linear(output, self.wo, self.bo)
        return rec


def causal(seqlen, start_pos, hidden):
    mask = torch.full((seqlen, seqlen), hidden)
    mask = torch.triu(mask, diagonal=1)
    return torch.hstack([torch.zeros((seqlen, start_pos)), mask])


def port(p, how):
    spec, case = p.spec, p.case
    w = {name: parity.to_torch(array) for name, array in p.weights.items()}
    x = parity.to_torch(p.inputs["query"])
    max_seq_len = case.capacity or x.shape[1]
    layer = Attention(spec, w, how, x.shape[0], max_seq_len)
    freqs_cis = precompute_freqs_cis(spec.head_dim, max_seq_len + case.first_position, spec.rope.theta)
    hidden = how.hidden(torch.finfo(torch.float32 if how.wide else x.dtype).min)
    rec, start_pos = {}, 0
    with torch.no_grad():
        for step, seqlen in enumerate(case.chunks or (x.shape[1],)):
            mask = causal(seqlen, start_pos, hidden)
            first = start_pos + case.first_position
            tokens = x[:, start_pos : start_pos + seqlen]
            out = layer.forward(tokens, start_pos, freqs_cis[first : first + seqlen], mask)
            start_pos += seqlen
            if case.is_cached:
                out["cache.lengths"] = torch.full((x.shape[0],), start_pos, dtype=torch.int32)
                rec |= {f"step{step}.{name}": value for name, value in out.items()}
            else:
                rec = out
    return rec
