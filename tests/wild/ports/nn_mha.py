"""Users of torch.nn.MultiheadAttention: packed weights put in by hand, masks True where hidden, weights asked for."""

import torch
from torch import nn

import parity


def build(p):
    spec = p.spec
    dtype = parity.to_torch(p.inputs["query"]).dtype
    same = spec.d_kv == spec.d_model
    mha = nn.MultiheadAttention(
        spec.d_model,
        spec.num_heads,
        bias=spec.qkv_biases[0],
        kdim=spec.d_kv,
        vdim=spec.d_kv,
        batch_first=True,
        dropout=0.0,
        dtype=dtype,
    )
    w = {name: parity.to_torch(array) for name, array in p.weights.items()}
    with torch.no_grad():
        if same:
            mha.in_proj_weight.copy_(torch.cat([w["q_proj.weight"], w["k_proj.weight"], w["v_proj.weight"]]))
        else:
            mha.q_proj_weight.copy_(w["q_proj.weight"])
            mha.k_proj_weight.copy_(w["k_proj.weight"])
            mha.v_proj_weight.copy_(w["v_proj.weight"])
        if spec.qkv_biases[0]:
            mha.in_proj_bias.copy_(torch.cat([w["q_proj.bias"], w["k_proj.bias"], w["v_proj.bias"]]))
            mha.out_proj.bias.copy_(w["out_proj.bias"])
        mha.out_proj.weight.copy_(w["out_proj.weight"])
    return mha.eval()


def port(p, how):
    case = p.case
    query = parity.to_torch(p.inputs["query"])
    key = parity.to_torch(p.inputs["key"]) if "key" in p.inputs else query
    attn_mask = key_padding_mask = None
    if case.is_causal:
        attn_mask = torch.triu(torch.ones(case.seq_len, case.key_len, dtype=torch.bool), diagonal=1)
    if case.key_padding_lengths is not None:
        lengths = torch.tensor(case.key_padding_lengths)
        key_padding_mask = torch.arange(case.key_len)[None, :] >= lengths[:, None]
    if "bias" in p.inputs:
        bias = parity.to_torch(p.inputs["bias"])
        attn_mask = bias.flatten(0, 1)
        if key_padding_mask is not None:  # of the type of the other one
            key_padding_mask = torch.zeros(key_padding_mask.shape, dtype=bias.dtype).masked_fill(
                key_padding_mask, float("-inf")
            )
    with torch.no_grad():
        output, attn_weights = build(p)(
            query,
            key,
            key,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            need_weights=True,
            average_attn_weights=False,
        )
    return {"attn_weights": attn_weights, "output": output}
