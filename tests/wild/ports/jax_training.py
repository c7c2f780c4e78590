"""A training step in JAX: vjp of plain functions, grouped heads without a repeat, a kernel with its own backward pass."""

import jax
import jax.numpy as jnp
import numpy as np

import parity

RANKS = 4


def mask_of(case):
    t, s = np.arange(case.seq_len)[:, None], np.arange(case.seq_len)
    visible = (s <= t) if case.is_causal else np.ones((case.seq_len, case.seq_len), bool)
    return jnp.asarray(np.broadcast_to(visible, (case.batch, 1, 1, case.seq_len, case.seq_len)))


def softmax(scores, mask):
    scores = jnp.where(mask, scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1)


def attend(q, k, v, mask):
    """q is (B, K, G, T, H); k and v are (B, K, S, H)."""
    scores = jnp.einsum("bkgth,bksh->bkgts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    weights = softmax(scores, mask).astype(q.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", weights, v), weights


def ring_forward(q, k, v):
    scores = jnp.einsum("bkgth,bksh->bkgts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - lse)
    out = jnp.einsum("bkgts,bksh->bkgth", weights, v.astype(jnp.float32))
    return out.astype(q.dtype), (out, lse)


@jax.custom_vjp
def ring_attention(q, k, v):
    return ring_forward(q, k, v)[0]


def ring_save(q, k, v):
    context, (out, lse) = ring_forward(q, k, v)
    return context, (q, k, v, out, lse)


def ring_backward(saved, d_out):
    q, k, v, out, lse = saved
    size, scale = k.shape[2] // RANKS, q.shape[-1] ** -0.5
    d_out = d_out.astype(jnp.float32)
    delta = (d_out * out).sum(-1, keepdims=True)
    dq, dk, dv = jnp.zeros(q.shape, jnp.float32), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for rank in range(RANKS):
        own = slice(rank * size, (rank + 1) * size)
        queries, d_block = q[:, :, :, own].astype(jnp.float32), d_out[:, :, :, own]
        for step in range(RANKS):
            sender = (rank - step) % RANKS
            block = slice(sender * size, (sender + 1) * size)
            keys, values = k[:, :, block].astype(jnp.float32), v[:, :, block].astype(jnp.float32)
            scores = jnp.einsum("bkgth,bksh->bkgts", queries, keys) * scale
            weights = jnp.exp(scores - lse[:, :, :, own])
            d_weights = jnp.einsum("bkgth,bksh->bkgts", d_block, values)
            d_scores = weights * (d_weights - delta[:, :, :, own])
            dq = dq.at[:, :, :, own].add(jnp.einsum("bkgts,bksh->bkgth", d_scores, keys) * scale)
            dk = dk.at[:, :, block].add(jnp.einsum("bkgts,bkgth->bksh", d_scores, queries) * scale)
            dv = dv.at[:, :, block].add(jnp.einsum("bkgts,bkgth->bksh", weights, d_block))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


ring_attention.defvjp(ring_save, ring_backward)


def port(p, how):
    spec, case = p.spec, p.case
    b, t, n, k_heads = case.batch, case.seq_len, spec.num_heads, spec.num_kv_heads
    w = {name: parity.to_jax(array) for name, array in p.weights.items()}
    x = parity.to_jax(p.inputs["query"])
    mask = mask_of(case)

    def project(w, x, name, count):
        y = jnp.einsum("bte,fe->btf", x, w[f"{name}.weight"])
        if f"{name}.bias" in w:
            y = y + w[f"{name}.bias"]
        return y.reshape(b, t, count, -1).swapaxes(1, 2)

    def qkv(w, x):
        q, k, v = project(w, x, "q_proj", n), project(w, x, "k_proj", k_heads), project(w, x, "v_proj", k_heads)
        return q, k, v

    def attention(q, k, v):
        grouped = q.reshape(b, k_heads, n // k_heads, t, -1)
        if case.is_causal:
            context, _ = attend(grouped, k, v, mask)
        else:
            context = ring_attention(grouped, k, v)
        return context.reshape(q.shape)

    def output(w, context):
        y = jnp.einsum("btf,ef->bte", context.swapaxes(1, 2).reshape(b, t, -1), w["out_proj.weight"])
        if "out_proj.bias" in w:
            y = y + w["out_proj.bias"]
        return y

    (q, k, v), back_qkv = jax.vjp(qkv, w, x)
    context, back_attention = jax.vjp(attention, q, k, v)
    out, back_output = jax.vjp(output, w, context)
    d_w, d_context = back_output(parity.to_jax(p.inputs["cotangent"]))
    d_q, d_k, d_v = back_attention(d_context)
    d_w_qkv, d_x = back_qkv((d_q, d_k, d_v))
    d_w = jax.tree.map(jnp.add, d_w, d_w_qkv)
    rec = {"q": q, "k": k, "v": v, "context": context, "output": out}
    grads = {"grad.context": d_context, "grad.v": d_v, "grad.q": d_q, "grad.k": d_k}
    return rec | grads | {f"grad.{name}": x for name, x in d_w.items()} | {"grad.query": d_x}
