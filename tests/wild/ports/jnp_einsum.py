"""Plain jnp.einsum under jit: grouped heads without a repeat, partial RoPE, window, soft cap and sinks if there are."""

import jax.numpy as jnp
import numpy as np

import parity


def rope_table(theta, rotary_dim, positions):
    inv = 1.0 / theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = positions[:, None] * inv[None, :]
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def rope(x, cos, sin):
    r = 2 * cos.shape[-1]
    x1, x2 = jnp.split(x[..., :r].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., r:]], axis=-1)


def visible(spec, case):
    t, s = np.arange(case.seq_len)[:, None], np.arange(case.key_len)[None, :]
    mask = np.ones((case.seq_len, case.key_len), bool)
    if case.is_causal:
        mask &= s <= t
    if spec.window_size is not None:
        mask &= s > t - spec.window_size
    return jnp.asarray(mask)


def attend(spec, how, w, x, tables, mask):
    rec = {}
    n, k, h = spec.num_heads, spec.num_kv_heads, spec.head_dim
    b, t, _ = x.shape
    xq = jnp.einsum("bte,fe->btf", x, w["q_proj.weight"])
    xk = jnp.einsum("bte,fe->btf", x, w["k_proj.weight"])
    xv = jnp.einsum("bte,fe->btf", x, w["v_proj.weight"])
    if "q_proj.bias" in w:
        xq, xk, xv = xq + w["q_proj.bias"], xk + w["k_proj.bias"], xv + w["v_proj.bias"]
    q = xq.reshape(b, t, n, h).transpose(0, 2, 1, 3)
    k_ = xk.reshape(b, t, k, h).transpose(0, 2, 1, 3)
    v = xv.reshape(b, t, k, h).transpose(0, 2, 1, 3)
    rec["q.before_rope"], rec["k.before_rope"] = q, k_
    if tables is not None:
        cos, sin = tables
        q = rope(q, cos, sin)
        k_ = rope(k_, cos, sin)
    rec.update(q=q, k=k_, v=v)
    dtype = x.dtype
    work = jnp.float32 if how.wide else dtype
    grouped = q.reshape(b, k, n // k, t, h)
    logits = jnp.einsum("bkgth,bksh->bkgts", grouped.astype(work), k_.astype(work))
    rec["scores.unscaled"] = logits.reshape(b, n, t, t)
    scale = h**-0.5 if spec.scale is None else spec.scale
    logits = logits * scale
    if spec.soft_cap is not None:
        logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
    rec["scores"] = logits.reshape(b, n, t, t)
    logits = jnp.where(mask[None, None, None], logits, how.hidden(float(jnp.finfo(work).min)))
    rec["mask"] = jnp.logical_not(mask)[None, None]
    rec["scores.masked"] = logits.reshape(b, n, t, t)
    if "sinks" in w:
        sinks = w["sinks"].astype(work).reshape(1, k, n // k, 1, 1)
        sinks = jnp.broadcast_to(sinks, (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, sinks], axis=-1)
    logits = logits - logits.max(axis=-1, keepdims=True)
    unnormalised = jnp.exp(logits)
    probs = unnormalised / unnormalised.sum(axis=-1, keepdims=True)
    probs = probs[..., :t].astype(dtype)
    rec["attn_weights"] = probs.reshape(b, n, t, t)
    out = jnp.einsum("bkgts,bksh->bkgth", probs, v)
    rec["context"] = out.reshape(b, n, t, h)
    out = out.reshape(b, n, t, h).transpose(0, 2, 1, 3).reshape(b, t, n * h)
    out = jnp.einsum("btf,ef->bte", out, w["out_proj.weight"])
    if "out_proj.bias" in w:
        out = out + w["out_proj.bias"]
    rec["output"] = out
    return rec


def port(p, how):
    spec, case = p.spec, p.case
    w = {name: parity.to_jax(array) for name, array in p.weights.items()}
    x = parity.to_jax(p.inputs["query"])
    tables = None
    if spec.rope is not None:
        positions = np.arange(case.first_position, case.first_position + case.seq_len)
        tables = rope_table(spec.rope.theta, spec.rope.rotary_dim or spec.head_dim, positions)
    mask = visible(spec, case)
    run = how.wrap(lambda w, x: attend(spec, how, w, x, tables, mask))
    return run(w, x)
