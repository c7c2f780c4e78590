"""Blockwise attention like FlashAttention, in NumPy: running maximum and sum, then weights from the log-sum-exp."""

import numpy as np

import parity

BLOCK_Q, BLOCK_K = 3, 4


def linear(w, name, x):
    y = x.astype(np.float32) @ w[f"{name}.weight"].astype(np.float32).T
    if f"{name}.bias" in w:
        y = y + w[f"{name}.bias"].astype(np.float32)
    return y.astype(x.dtype)


def heads(x, n):
    b, t, f = x.shape
    return x.reshape(b, t, n, f // n).transpose(0, 2, 1, 3)


def flash(q, k, v, scale, is_causal, lengths):
    """Return output and log-sum-exp of one head, (T, H) and (T,)."""
    T, H = q.shape
    S = k.shape[0]
    out, lse = np.zeros((T, H), np.float32), np.zeros(T, np.float32)
    for i in range(0, T, BLOCK_Q):
        rows = np.arange(i, min(i + BLOCK_Q, T))
        m = np.full(len(rows), -np.inf, np.float32)
        total = np.zeros(len(rows), np.float32)
        acc = np.zeros((len(rows), H), np.float32)
        for j in range(0, S, BLOCK_K):
            cols = np.arange(j, min(j + BLOCK_K, S))
            if is_causal and cols[0] > rows[-1]:
                break
            s = (q[rows] @ k[cols].T) * scale
            hide = np.zeros(s.shape, bool)
            if is_causal:
                hide |= cols[None, :] > rows[:, None]
            if lengths is not None:
                hide |= cols[None, :] >= lengths
            s = np.where(hide, -np.inf, s)
            m_new = np.maximum(m, s.max(axis=1))
            safe = np.where(np.isfinite(m_new), m_new, 0.0)
            p = np.exp(s - safe[:, None])
            alpha = np.exp(m - safe)
            total = alpha * total + p.sum(axis=1)
            acc = alpha[:, None] * acc + p @ v[cols]
            m = m_new
        out[rows] = acc / np.where(total == 0.0, 1.0, total)[:, None]
        with np.errstate(divide="ignore"):
            lse[rows] = m + np.log(total)
    return out, lse


def forward(p, query, key):
    rec, spec, case, w = {}, p.spec, p.case, p.weights
    dtype = query.dtype
    q = heads(linear(w, "q_proj", query), spec.num_heads)
    k = heads(linear(w, "k_proj", key), spec.num_kv_heads)
    v = heads(linear(w, "v_proj", key), spec.num_kv_heads)
    rec.update(q=q, k=k, v=v)
    B, N, T, H = q.shape
    scale = np.float32(1.0 / np.sqrt(H))
    context = np.zeros(q.shape, np.float32)
    lse = np.zeros((B, N, T), np.float32)
    for b in range(B):
        lengths = None if case.key_padding_lengths is None else case.key_padding_lengths[b]
        for n in range(N):
            g = n // (N // spec.num_kv_heads)
            qf, kf, vf = (x.astype(np.float32) for x in (q[b, n], k[b, g], v[b, g]))
            context[b, n], lse[b, n] = flash(qf, kf, vf, scale, case.is_causal, lengths)
    each = np.arange(N) // (N // spec.num_kv_heads)
    scores = np.einsum("bnth,bnsh->bnts", q.astype(np.float32), k.astype(np.float32)[:, each]) * scale
    rec["scores"] = scores
    hide = np.zeros((B, 1, T, k.shape[2]), bool)
    if case.is_causal:
        hide = hide | (np.arange(k.shape[2])[None, :] > np.arange(T)[:, None])
    if case.key_padding_lengths is not None:
        hide = hide | (np.arange(k.shape[2]) >= np.array(case.key_padding_lengths)[:, None, None, None])
    rec["mask"] = hide
    rec["scores.masked"] = np.where(hide, np.float32(-np.inf), scores)
    safe = np.where(np.isfinite(lse), lse, 0.0)[..., None]
    rec["attn_weights"] = np.exp(np.where(hide, np.float32(-np.inf), scores) - safe).astype(dtype)
    rec["context"] = context.astype(dtype)
    combined = context.astype(dtype).transpose(0, 2, 1, 3).reshape(B, T, N * H)
    rec["output"] = linear(w, "out_proj", combined)
    return rec


def port(p, how):
    query = p.inputs["query"]
    rec = forward(p, query, p.inputs.get("key", query))
    return {name: parity.to_numpy(x) for name, x in rec.items()}
