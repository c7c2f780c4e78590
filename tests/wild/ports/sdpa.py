"""Users of F.scaled_dot_product_attention: torch, no scores and no weights, an attn_mask that is boolean or added."""

import torch
import torch.nn.functional as F

import parity


def project(w, name, x, heads):
    y = F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))
    return y.unflatten(-1, (heads, -1)).transpose(1, 2)


def make_mask(case, inputs, dtype):
    """True where a query may look; or, with a bias, what is added."""
    keep = None
    if case.key_padding_lengths is not None:
        lengths = torch.tensor(case.key_padding_lengths)
        keep = (torch.arange(case.key_len)[None, :] < lengths[:, None])[:, None, None, :]
    if case.is_causal:
        lower = torch.ones(case.seq_len, case.key_len, dtype=torch.bool).tril()
        keep = lower[None, None] if keep is None else keep & lower
    if "mask" in inputs:
        allowed = ~torch.from_numpy(inputs["mask"])
        keep = allowed if keep is None else keep & allowed
    if "bias" in inputs:
        bias = parity.to_torch(inputs["bias"])
        return bias if keep is None else bias.masked_fill(~keep, float("-inf"))
    return keep


def forward(case, w, query, key, attn_mask):
    rec, spec = {}, case.spec
    q = project(w, "q_proj", query, spec.num_heads)
    k = project(w, "k_proj", key, spec.num_kv_heads)
    v = project(w, "v_proj", key, spec.num_kv_heads)
    rec.update(q=q, k=k, v=v)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        rec["mask"] = ~attn_mask
    context = F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=0.0, is_causal=False, enable_gqa=spec.num_heads != spec.num_kv_heads
    )
    rec["context"] = context
    y = context.transpose(1, 2).flatten(2)
    rec["output"] = F.linear(y, w["out_proj.weight"], w.get("out_proj.bias"))
    return rec


def port(p, how):
    w = {name: parity.to_torch(array) for name, array in p.weights.items()}
    query = parity.to_torch(p.inputs["query"])
    key = parity.to_torch(p.inputs["key"]) if "key" in p.inputs else query
    attn_mask = make_mask(p.case, p.inputs, query.dtype)
    run = how.wrap(lambda *given: forward(p.case, w, *given))
    with torch.no_grad():
        return run(query, key, attn_mask)
