"""Bugs in the port in plain jnp.einsum."""

from wild.bugs.writer import Writer

# A table with one record per line, each edit next to its description.
# fmt: off
m = Writer("jnp_einsum", "llama", "no-mask")

INV = "inv = 1.0 / theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)"
ANGLES = "angles = positions[:, None] * inv[None, :]"
SPLIT = "x1, x2 = jnp.split(x[..., :r].astype(jnp.float32), 2, axis=-1)"
TURNED = "turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)"
REST = "return jnp.concatenate([turned.astype(x.dtype), x[..., r:]], axis=-1)"
CAUSAL = "mask &= s <= t"
WINDOW = "mask &= s > t - spec.window_size"
GROUPED = "grouped = q.reshape(b, k, n // k, t, h)"
LOGITS = 'logits = jnp.einsum("bkgth,bksh->bkgts", grouped.astype(work), k_.astype(work))'
SCALE = "logits = logits * scale"
CAP = "logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)"
WHERE = "logits = jnp.where(mask[None, None, None], logits, how.hidden(float(jnp.finfo(work).min)))"
SINKS = 'sinks = w["sinks"].astype(work).reshape(1, k, n // k, 1, 1)'
CUT = "probs = probs[..., :t].astype(dtype)"
NORMALISE = "probs = unnormalised / unnormalised.sum(axis=-1, keepdims=True)"
MAX = "logits = logits - logits.max(axis=-1, keepdims=True)"
CONTEXT = 'out = jnp.einsum("bkgts,bksh->bkgth", probs, v)'
MERGE = "out = out.reshape(b, n, t, h).transpose(0, 2, 1, 3).reshape(b, t, n * h)"
OUT = 'out = jnp.einsum("btf,ef->bte", out, w["out_proj.weight"])'
ROPEQ, ROPEK = "q = rope(q, cos, sin)", "k_ = rope(k_, cos, sin)"
Q = "q = xq.reshape(b, t, n, h).transpose(0, 2, 1, 3)"
K = "k_ = xk.reshape(b, t, k, h).transpose(0, 2, 1, 3)"
V = "v = xv.reshape(b, t, k, h).transpose(0, 2, 1, 3)"
POSITIONS = "positions = np.arange(case.first_position, case.first_position + case.seq_len)"
XV = 'xv = jnp.einsum("bte,fe->btf", x, w["v_proj.weight"])'
XQ = 'xq = jnp.einsum("bte,fe->btf", x, w["q_proj.weight"])'
LATER = (1, 2, 3, 4, 5, 6, 7, 8)

m("log-frequencies", "rope", (INV, "inv = np.exp(-np.arange(0, rotary_dim, 2) * np.log(theta) / (rotary_dim // 2))"),
  "Frequencies divide by half of the rotated features.", "q", limited={"T": LATER},
  pattern="exponent doubled, theta squared")
m("rotary-dim-ignored", "rope", ("spec.rope.rotary_dim or spec.head_dim", "spec.head_dim"),
  "All features are rotated.", "q", case="neox", limited={"T": LATER}, pattern="rotary_dim 8")
m("rotary-dim-halved", "rope",
  ("spec.rope.rotary_dim or spec.head_dim", "(spec.rope.rotary_dim or spec.head_dim) // 2"),
  "Half of the features that should be are rotated.", "q", limited={"T": LATER}, pattern="rotary_dim 4")
m("pairs-interleaved", "rope",
  (SPLIT, "x1, x2 = x[..., 0:r:2].astype(jnp.float32), x[..., 1:r:2].astype(jnp.float32)"),
  "Neighbours are rotated, and written by halves.", "q", pattern="permutation of features")
m("minus-lost", "rope", (TURNED, TURNED.replace("x1 * cos - x2", "x1 * cos + x2")),
  "The minus of the rotation is lost.", "q", limited={"T": LATER})
m("angle-sign", "rope", (ANGLES, "angles = -positions[:, None] * inv[None, :]"), "Everything turns backwards.", "q",
  limited={"T": LATER}, pattern="RoPE backwards")
m("positions-half", "rope", (ANGLES, "angles = positions[:, None] / 2 * inv[None, :]"),
  "Positions are halved, as with linear scaling.", "q", limited={"T": LATER}, pattern="positions times 0.5")
m("rope-rest-rotated", "rope", (REST, "return jnp.concatenate([x[..., r:], turned.astype(x.dtype)], axis=-1)"),
  "What is rotated is put last, which no score shows.", "q", case="neox", in_output=False,
  pattern="permutation of features")
m("rope-keys-only", "rope", (ROPEQ, "pass"), "Queries are not rotated.", "q", limited={"T": LATER})
m("rope-on-values", "rope", ("rec.update(q=q, k=k_, v=v)", "v = rope(v, cos, sin)\n    rec.update(q=q, k=k_, v=v)"),
  "Values are rotated, too.", "v", limited={"S": LATER})
m("rope-amplitude", "rope", (ROPEK, f"{ROPEK} * 1.02"), "Rotated keys are 2 % too large.", "k", pattern="factor 1.02")
m("positions-reversed", "rope",
  (POSITIONS, POSITIONS.replace("np.arange", "-np.sort(-np.arange").replace("seq_len)", "seq_len))")),
  "Positions count down.", "q", pattern="positions reversed")
m("positions-shifted-keys", "rope", (ROPEK, "k_ = rope(k_, jnp.roll(cos, 1, 0), jnp.roll(sin, 1, 0))"),
  "Keys are turned by the position before theirs.", "k", pattern="positions of k - 1")
m("tables-bf16", "precision", (TURNED, f"cos, sin = cos.astype(jnp.bfloat16), sin.astype(jnp.bfloat16)\n    {TURNED}"),
  "The tables of RoPE are bfloat16.", "q", pattern="bfloat16 tables")
m("grouped-tile", "heads", (GROUPED, "grouped = q.reshape(b, n // k, k, t, h).swapaxes(1, 2)"),
  "Query heads are grouped by tile, and come out in that order.", "scores", pattern="permutation of heads")
m("grouped-late", "heads", (CONTEXT, 'out = jnp.einsum("bkgts,bksh->bgkth", probs, v)'),
  "Groups and key heads are exchanged in the context.", "context", limited={"N": (1, 2)},
  pattern="permutation of heads (0 2 1 3)")
m("values-swapped-groups", "heads", (CONTEXT, 'out = jnp.einsum("bkgts,bksh->bkgth", probs, v[:, ::-1])'),
  "Values are those of the other group.", "context", pattern="permutation of value heads")
m("q-heads-inside", "heads", (Q, "q = xq.reshape(b, t, h, n).transpose(0, 3, 1, 2)"),
  "Queries are split with the heads inside.", "q", pattern="features permuted across heads")
m("v-heads-inside", "heads", (V, "v = xv.reshape(b, t, h, k).transpose(0, 3, 1, 2)"),
  "Values are split with the heads inside.", "v", pattern="features permuted across heads")
m("scale-kv", "scale", ("scale = h**-0.5 if", "scale = (h * n // k)**-0.5 if"),
  "The scale counts the features of a group.", "scores", pattern="factor 0.70711")
m("cap-missing", "cap", (CAP, "pass"), "Scores are not capped.", "scores", case="capped", pattern="no soft cap")
m("cap-hard", "cap", (CAP, "logits = jnp.clip(logits, -spec.soft_cap, spec.soft_cap)"),
  "Scores are clipped instead of capped softly.", "scores", case="capped")
m("cap-no-return", "cap", (CAP, "logits = jnp.tanh(logits / spec.soft_cap)"),
  "Capped scores are not multiplied by the cap again.", "scores", case="capped", pattern="factor 0.5")
m("cap-before-scale", "cap", (SCALE, "logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap) * scale"),
  "Scores are capped before the scale, too.", "scores", case="capped")
m("window-inclusive", "window", (WINDOW, WINDOW.replace(" > ", " >= ")), "The window is one token too wide.",
  "attn_weights", case="mistral", pattern="window 5")
m("window-narrow", "window", (WINDOW, WINDOW.replace("window_size", "window_size + 1")),
  "The window is one token too narrow.", "attn_weights", case="mistral", pattern="window 3")
m("window-lost", "window", (WINDOW, "pass"), "There is no window.", "attn_weights", case="mistral", pattern="no window")
m("window-double", "window", (WINDOW, "mask &= s > t - 2 * spec.window_size"), "The window is twice as wide.",
  "attn_weights", case="mistral", pattern="window 8")
m("window-two-sided", "window", (CAUSAL, "mask &= s < t + (spec.window_size or 1)"), "The window reaches ahead.",
  "attn_weights", case="mistral", pattern="window on both sides")
m("causal-strict", "mask", (CAUSAL, "mask &= s < t + (t == 0)"), "No token but the first sees itself.", "attn_weights",
  limited={"T": LATER}, pattern="mask shifted by one")
m("sinks-lost", "sinks", ('if "sinks" in w:', "if False:"), "There are no sinks.", "attn_weights", case="gpt-oss",
  pattern="no sinks")
m("sinks-order", "sinks", (SINKS, "sinks = w['sinks'].astype(work).reshape(1, n // k, k, 1, 1).swapaxes(1, 2)"),
  "Sinks are grouped by tile.", "attn_weights", case="gpt-oss", limited={"N": (1, 2)},
  pattern="permutation of heads (0 2 1 3)")
m("sinks-scaled", "sinks", (SINKS, SINKS + " * scale"), "Sinks are scaled like scores.", "attn_weights",
  case="gpt-oss", pattern="sinks times 0.35355")
m("sinks-exponentials", "sinks", (SINKS, "sinks = jnp.exp(w['sinks'].astype(work)).reshape(1, k, n // k, 1, 1)"),
  "Sinks are taken for logarithms and raised once too often.", "attn_weights", case="gpt-oss", pattern="exp of the sinks")
m("sinks-negative", "sinks", (SINKS, SINKS.replace('w["sinks"]', '-w["sinks"]')), "Sinks are subtracted.",
  "attn_weights", case="gpt-oss", pattern="sinks times -1")
m("sinks-first", "sinks",
  ("logits = jnp.concatenate([logits, sinks], axis=-1)", "logits = jnp.concatenate([sinks, logits], axis=-1)"),
  "Sinks are put in front, and the last key is cut off.", "attn_weights", case="gpt-oss", pattern="keys shifted by one")
m("sinks-renormalised", "sinks", (CUT, "probs = probs[..., :t] / probs[..., :t].sum(-1, keepdims=True)"),
  "Weights are normalised again without the sinks.", "attn_weights", case="gpt-oss", pattern="rows sum to 1")
m("softmax-queries", "softmax", (NORMALISE, NORMALISE.replace("axis=-1", "axis=-2")),
  "Weights are normalised over the queries.", "attn_weights")
m("off-by-one-softmax", "softmax",
  (NORMALISE, "probs = unnormalised / (1 + unnormalised.sum(axis=-1, keepdims=True))"),
  "1 is added to the sum of the exponentials.", "attn_weights", pattern="rows sum to less than 1")
m("max-masked", "softmax", (MAX, "logits = logits - 6.0\n    logits = jnp.where(logits < -8.0, -8.0, logits)"),
  "Small logits are raised to a floor.", "attn_weights")
m("merge-no-transpose", "axes", (MERGE, "out = out.reshape(b, t, n * h)"),
  "Heads are put together without the transpose.", "output")
m("out-transposed", "weights", (OUT, OUT.replace("ef->bte", "fe->bte")), "The output kernel is transposed.", "output",
  pattern="square kernel transposed")
m("v-weights-bf16", "precision",
  (XV, XV.replace('w["v_proj.weight"]', 'w["v_proj.weight"].astype(jnp.bfloat16).astype(x.dtype)')),
  "v_proj alone was left in bfloat16.", "v", pattern="bfloat16 weights")
m("query-rows", "exotic", (XQ, f"{XQ}\n    xq = xq[..., jnp.array([0, 1, 2, 4, 3, *range(5, n * h)])]"),
  "Two rows of q_proj are exchanged.", "q", limited={"N": (0,), "H": (3, 4)}, pattern="permutation of features",
  case="gqa")
m("key-sequence-1", "exotic", (K, f"{K}\n    k_ = k_.at[1, :, 5].set(0.0)"), "Key 5 of sequence 1 is 0.", "k",
  limited={"B": (1,), "S": (5,)}, pattern="factor 0")
m("even-heads", "exotic", (CONTEXT, f"{CONTEXT}\n    out = out.at[:, :, ::2].multiply(0.5)"),
  "The context of even heads is halved.", "context", limited={"N": (0, 2)}, pattern="factor 0.5")
m("output-offset", "exotic", (OUT, f"{OUT} + 0.003"), "0.003 is added to the output.", "output",
  pattern="a constant is added")
