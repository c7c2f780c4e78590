"""As with flax.linen: JAX, DenseGeneral kernels (E, N, H), everything (B, T, N, H), True in a mask where seen."""

import jax
import jax.numpy as jnp

import parity


def load(p):
    spec, params = p.spec, {}
    heads = {"query": spec.num_heads, "key": spec.num_kv_heads, "value": spec.num_kv_heads}
    for name, short in (("query", "q"), ("key", "k"), ("value", "v")):
        kernel = parity.to_jax(p.weights[f"{short}_proj.weight"]).T
        params[name] = {"kernel": kernel.reshape(kernel.shape[0], heads[name], spec.head_dim)}
        if f"{short}_proj.bias" in p.weights:
            bias = parity.to_jax(p.weights[f"{short}_proj.bias"])
            params[name]["bias"] = bias.reshape(heads[name], spec.head_dim)
    kernel = parity.to_jax(p.weights["out_proj.weight"]).T
    params["out"] = {"kernel": kernel.reshape(spec.num_heads, spec.head_dim, spec.d_model)}
    if "out_proj.bias" in p.weights:
        params["out"]["bias"] = parity.to_jax(p.weights["out_proj.bias"])
    return params


def dense_general(params, x):
    y = jnp.einsum("bte,enh->btnh", x, params["kernel"])
    if "bias" in params:
        y = y + params["bias"]
    return y


def combine_masks(*masks):
    present = [mask for mask in masks if mask is not None]
    if not present:
        return None
    combined = present[0]
    for mask in present[1:]:
        combined = jnp.logical_and(combined, mask)
    return combined


def make_causal_mask(q_len, kv_len):
    return (jnp.arange(q_len)[:, None] >= jnp.arange(kv_len)[None, :])[None, None]


def make_padding_mask(lengths, kv_len):
    return (jnp.arange(kv_len)[None, :] < lengths[:, None])[:, None, None, :]


def attention_weights(query, key, bias, mask, how, rec):
    depth = query.shape[-1]
    dtype = query.dtype
    if how.wide:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    rec["scores.unscaled"] = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    query = query / jnp.sqrt(depth).astype(query.dtype)
    attn_weights = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    if bias is not None:
        attn_weights = attn_weights + bias.astype(attn_weights.dtype)
    rec["scores"] = attn_weights
    if mask is not None:
        big_neg = how.hidden(float(jnp.finfo(attn_weights.dtype).min))
        rec["mask"] = jnp.logical_not(mask)
        attn_weights = jnp.where(mask, attn_weights, big_neg)
    rec["scores.masked"] = attn_weights
    attn_weights = jax.nn.softmax(attn_weights)
    return attn_weights.astype(dtype)


def forward(how, params, inputs_q, inputs_kv, bias, mask):
    rec = {}
    query = dense_general(params["query"], inputs_q)
    key = dense_general(params["key"], inputs_kv)
    value = dense_general(params["value"], inputs_kv)
    rec["q"], rec["k"], rec["v"] = (x.swapaxes(1, 2) for x in (query, key, value))
    if key.shape[2] != query.shape[2]:
        key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
        value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    rec["k.repeated"], rec["v.repeated"] = key.swapaxes(1, 2), value.swapaxes(1, 2)
    attn_weights = attention_weights(query, key, bias, mask, how, rec)
    rec["attn_weights"] = attn_weights
    x = jnp.einsum("bhqk,bkhd->bqhd", attn_weights, value)
    rec["context"] = x.swapaxes(1, 2)
    out = jnp.einsum("bthd,hde->bte", x, params["out"]["kernel"])
    if "bias" in params["out"]:
        out = out + params["out"]["bias"]
    rec["output"] = out
    return rec


def port(p, how):
    case = p.case
    inputs_q = parity.to_jax(p.inputs["query"])
    inputs_kv = parity.to_jax(p.inputs["key"]) if "key" in p.inputs else inputs_q
    bias = parity.to_jax(p.inputs["bias"]) if "bias" in p.inputs else None
    padding = None
    if case.key_padding_lengths is not None:
        padding = make_padding_mask(jnp.array(case.key_padding_lengths), case.key_len)
    mask = combine_masks(make_causal_mask(case.seq_len, case.key_len) if case.is_causal else None, padding)
    run = how.wrap(lambda params, *given: forward(how, params, *given))
    return run(load(p), inputs_q, inputs_kv, bias, mask)
