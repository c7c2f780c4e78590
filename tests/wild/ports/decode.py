"""Token by token in JAX: a cache made beforehand, (B, slots, K, H), filled by dynamic_update_slice; ragged prompts."""

from functools import partial

import jax
import jax.numpy as jnp

import parity


def rope(x, positions, theta):
    """x (B, T, N, H), positions (B, T); halves."""
    half = x.shape[-1] // 2
    freq = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) * freq
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def write(cache, new, start):
    """Write new (T, K, H) of one sequence to its cache (slots, K, H) from slot `start` on."""
    return jax.lax.dynamic_update_slice(cache, new, (start, 0, 0))


def step(spec, wide, first_position, w, cache, x, new_lengths):
    """One call: x (B, T, E), of which the first new_lengths (B,) tokens are real."""
    rec = {}
    keys, values, lengths = cache
    b, t, _ = x.shape
    q = x @ w["q_proj.weight"].T
    k = x @ w["k_proj.weight"].T
    v = x @ w["v_proj.weight"].T
    if "q_proj.bias" in w:
        q, k, v = q + w["q_proj.bias"], k + w["k_proj.bias"], v + w["v_proj.bias"]
    q = q.reshape(b, t, spec.num_heads, spec.head_dim)
    k = k.reshape(b, t, spec.num_kv_heads, spec.head_dim)
    v = v.reshape(b, t, spec.num_kv_heads, spec.head_dim)
    positions = lengths[:, None] + jnp.arange(t)[None, :]
    if spec.rope is not None:
        q = rope(q, positions + first_position, spec.rope.theta)
        k = rope(k, positions + first_position, spec.rope.theta)
    rec["q"], rec["k"], rec["v"] = (a.swapaxes(1, 2) for a in (q, k, v))
    keys = jax.vmap(write)(keys, k, lengths)
    values = jax.vmap(write)(values, v, lengths)
    lengths = lengths + new_lengths
    slots = keys.shape[1]
    rec["cache.keys"], rec["cache.values"] = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    rec["cache.lengths"] = lengths
    group = spec.num_heads // spec.num_kv_heads
    k_all, v_all = jnp.repeat(keys, group, axis=2), jnp.repeat(values, group, axis=2)
    work = jnp.float32 if wide else x.dtype
    scores = jnp.einsum("btnh,bsnh->bnts", q.astype(work), k_all.astype(work)) * spec.head_dim**-0.5
    rec["scores"] = scores
    mask = jnp.arange(slots)[None, None, :] > positions[:, :, None]
    rec["mask"] = mask[:, None]
    scores = jnp.where(mask[:, None], -jnp.inf, scores)
    rec["scores.masked"] = scores
    probs = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    rec["attn_weights"] = probs
    context = jnp.einsum("bnts,bsnh->btnh", probs, v_all)
    rec["context"] = context.swapaxes(1, 2)
    out = context.reshape(b, t, -1) @ w["out_proj.weight"].T
    if "out_proj.bias" in w:
        out = out + w["out_proj.bias"]
    rec["output"] = out
    return (keys, values, lengths), rec


def init_cache(spec, batch, slots, dtype):
    shape = (batch, slots, spec.num_kv_heads, spec.head_dim)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((batch,), jnp.int32)


def port(p, how):
    spec, case = p.spec, p.case
    w = {name: parity.to_jax(array) for name, array in p.weights.items()}
    x = parity.to_jax(p.inputs["query"])
    # Padding is also written, and then overwritten by the next tokens: the cache has room for it.
    cache = init_cache(spec, case.batch, case.capacity, x.dtype)
    run = how.wrap(partial(step, spec, how.wide, case.first_position))
    rec, start = {}, 0
    for number, chunk in enumerate(case.chunks):
        new_lengths = jnp.array(case.new_lengths[number] if case.new_lengths else (chunk,) * case.batch, jnp.int32)
        tokens = x[:, start : start + chunk]
        cache, out = run(w, cache, tokens, new_lengths)
        start += chunk
        rec |= {f"step{number}.{name}": value for name, value in out.items()}
    return rec
