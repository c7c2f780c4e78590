"""BERT-style port in torch: separate projections, a 0/1 mask per sequence made additive, and cross-attention."""

import math
from types import SimpleNamespace

import torch
from torch import nn

import parity


class BertSelfAttention:
    def __init__(self, spec, state, how):
        self.num_attention_heads = spec.num_heads
        self.attention_head_size = spec.head_dim
        self.all_head_size = spec.num_heads * spec.head_dim
        self.state, self.how = state, how

    def linear(self, name, x):
        y = x @ self.state[f"{name}.weight"].t()
        bias = self.state.get(f"{name}.bias")
        if bias is not None:
            y = y + bias
        return y

    def transpose_for_scores(self, x):
        x = x.view(*x.size()[:-1], self.num_attention_heads, self.attention_head_size)
        return x.permute(0, 2, 1, 3)

    def __call__(self, hidden_states, attention_mask, encoder_hidden_states=None, position_bias=None):
        rec = {}
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query_layer = self.transpose_for_scores(self.linear("query", hidden_states))
        key_layer = self.transpose_for_scores(self.linear("key", source))
        value_layer = self.transpose_for_scores(self.linear("value", source))
        rec.update(q=query_layer, k=key_layer, v=value_layer)
        work = torch.float32 if self.how.wide else hidden_states.dtype
        attention_scores = torch.matmul(query_layer.to(work), key_layer.to(work).transpose(-1, -2))
        rec["scores.unscaled"] = attention_scores
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        if position_bias is not None:
            attention_scores = attention_scores + position_bias.to(work)
        rec["scores"] = attention_scores
        if attention_mask is not None:
            extended = attention_mask[:, None, None, :].to(work)
            if self.how.penalty == "inf":
                extended = torch.zeros_like(extended).masked_fill(extended == 0, float("-inf"))
            else:
                extended = (1.0 - extended) * self.how.hidden(torch.finfo(work).min)
            rec["mask.additive"] = extended
            rec["mask"] = extended < 0
            attention_scores = attention_scores + extended
        rec["scores.masked"] = attention_scores
        attention_probs = nn.functional.softmax(attention_scores, dim=-1).to(hidden_states.dtype)
        rec["attn_weights"] = attention_probs
        context_layer = torch.matmul(attention_probs, value_layer)
        rec["context"] = context_layer
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(*context_layer.size()[:-2], self.all_head_size)
        rec["output"] = self.linear("dense", context_layer)
        return rec


NAMES = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "dense"}


def load(p):
    state = {}
    for name, array in p.weights.items():
        part, leaf = name.split(".")
        state[f"{NAMES[part]}.{leaf}"] = parity.to_torch(array)
    return state


def port(p, how):
    inputs = SimpleNamespace(**{name: parity.to_torch(x) for name, x in p.inputs.items()})
    key = getattr(inputs, "key", None)
    attention_mask = None
    if p.case.key_padding_lengths is not None:
        lengths = torch.tensor(p.case.key_padding_lengths)
        attention_mask = (torch.arange(p.case.key_len)[None, :] < lengths[:, None]).long()
    layer = BertSelfAttention(p.spec, load(p), how)
    with torch.no_grad():
        return how.wrap(layer.__call__)(inputs.query, attention_mask, key, getattr(inputs, "bias", None))
