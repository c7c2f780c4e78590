"""Bugs injected into the port modeled on transformers' LLaMA."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("llama", "llama")

HALF = "return torch.cat((-x2, x1), dim=-1)"
EMB = "emb = torch.cat((freqs, freqs), dim=-1)"
QEMB = "q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)"
KEMB = "k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)"
INV = "inv_freq = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))"
TABLES = "freqs = position_ids[:, :, None].float() * cfg.inv_freq[None, None, :]"
APPLY = "q_out, k_out = apply_rotary_pos_emb(q, k, cos, sin)"
OUT = "q, k = q_out.to(q.dtype), k_out.to(k.dtype)"
EXPAND = "hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)"
REPEAT = "key_states, value_states = repeat_kv(k, cfg.num_key_value_groups), repeat_kv(v, cfg.num_key_value_groups)"
CAUSAL = "causal_mask = torch.arange(kv_len)[None, :] > torch.arange(kv_len - q_len, kv_len)[:, None]"
SCALE = "attn_weights = products * cfg.scaling"
SOFTMAX = "attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(q.dtype)"
CATK = "k = torch.cat([past[0], k], dim=2)"
CATV = "v = torch.cat([past[1], v], dim=2)"
KVIEW = "k = k.view(bsz, q_len, cfg.num_key_value_heads, cfg.head_dim).transpose(1, 2)"
VVIEW = "v = v.view(bsz, q_len, cfg.num_key_value_heads, cfg.head_dim).transpose(1, 2)"
QVIEW = "q = q.view(bsz, q_len, cfg.num_heads, cfg.head_dim).transpose(1, 2)"
POSITIONS = "position_ids = torch.arange(start, start + x.shape[1])[None]"
STEP = "position_ids = torch.arange(seen, seen + chunk)[None] + p.case.first_position"
NORM = "return (weight.float() * x).to(dtype)"
NORMS = 'q, k = rms_norm(q, w["q_norm.weight"], cfg.eps), rms_norm(k, w["k_norm.weight"], cfg.eps)'
OPROJ = 'rec["output"] = F.linear(attn_output, w["out_proj.weight"], w.get("out_proj.bias"))'
CONTEXT = "attn_output = torch.matmul(attn_weights, value_states)"

m("rotate-sign", "rope", (HALF, "return torch.cat((x2, -x1), dim=-1)"),
  "rotate_half has the other sign: everything turns backwards.", "q",
  pattern="RoPE backwards")
m("rotate-both-plus", "rope", (HALF, "return torch.cat((x2, x1), dim=-1)"), "rotate_half lost its minus.", "q",
  pattern="no rotation any more")
m("interleaved-tables", "rope", (EMB, "emb = torch.repeat_interleave(freqs, 2, dim=-1)"),
  "The tables are those of interleaved pairs, the halves are rotated.", "q")
m("interleaved", "rope", (HALF, "return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)"),
  "Neighbours are rotated with the tables of halves.", "q")
m("unpermuted-weights", "rope",
  (QVIEW, QVIEW.replace("cfg.head_dim)", "cfg.head_dim // 2, 2).transpose(3, 4).flatten(3)")),
  "The rows of q_proj were permuted for interleaved RoPE at loading, those of k_proj not.", "q",
  pattern="permutation of features")
m("gguf-permute", "heads", (KVIEW,
    "k = k.view(bsz, q_len, cfg.num_heads, -1, 2).transpose(3, 4).reshape(bsz, q_len, -1, "
      "cfg.head_dim).transpose(1, 2)"), "The rows of k_proj are permuted by the number of query heads.", "k",
  pattern="permutation of features")
m("theta", "rope", (INV, INV.replace("rope.theta", "500000.0")), "theta is 500000.", "q", pattern="theta 500000",
  limited={"T": (1, 2, 3, 4, 5, 6, 7, 8)})
m("theta-default", "rope", (INV, INV.replace("rope.theta", "10000.0")), "theta is the default of 10000.", "q",
  pattern="theta 10000", case="llama-500k")
m("scaling-ignored", "rope", ("scaling = rope.scaling", "scaling = None"), "Llama 3.1's scaling of RoPE is ignored.",
  "q", case="llama31", pattern="no scaling", limited={"T": (1, 2, 3, 4, 5, 6, 7, 8)})
m("linear-inverted", "rope",
  ("inv_freq = inv_freq / scaling.factor\n    if", "inv_freq = inv_freq * scaling.factor\n    if"),
  "Frequencies are multiplied by the factor of linear scaling.", "q", case="llama-linear",
  pattern="factor 16 on the frequencies")
m("llama3-smooth", "rope", ("smoothed = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq",
    "smoothed = smooth * inv_freq / scaling.factor + (1 - smooth) * inv_freq"),
  "Llama 3.1's interpolation runs the wrong way.", "q", case="llama31")
m("llama3-factors", "rope", ("low_freq_wavelen = old_context_len / scaling.low_freq_factor",
    "low_freq_wavelen = old_context_len / scaling.high_freq_factor"), "Llama 3.1's band of interpolation is empty.",
  "q", case="llama31")
m("frequency-exponent", "rope", (INV, INV.replace("/ dim))", "/ (dim + 2)))")), "The exponent divides by dim + 2.",
  "q", limited={"T": (1, 2, 3, 4, 5, 6, 7, 8)})
m("full-dim", "rope", ("dim = rope.rotary_dim or head_dim", "dim = head_dim"),
  "All features are rotated, not the first.", "q", case="neox", pattern="rotary_dim 8")
m("frequencies-of-head", "rope", (INV, INV.replace("/ dim))", "/ head_dim))")),
  "The frequencies of a partial RoPE are those of the whole head.", "q", case="neox", pattern="exponent over head_dim")
m("pass-first", "rope", ("q_rot, q_pass = q[..., :dim], q[..., dim:]", "q_pass, q_rot = q[..., :-dim], q[..., -dim:]"),
  "The last features of queries are rotated, and put first.", "q", case="neox", pattern="permutation of features")
m("positions-from-1", "rope", (POSITIONS, POSITIONS.replace("arange(start, start", "arange(start + 1, start + 1")),
  "Positions begin at 1, which no score shows.", "q", in_output=False, pattern="positions + 1")
m("first-position-lost", "rope", (POSITIONS, "position_ids = torch.arange(x.shape[1])[None]"),
  "Positions begin at 0 instead of 7, which no score shows.", "q", case="llama-offset", in_output=False,
  pattern="positions - 7")
m("query-not-rotated", "rope", (QEMB, "q_embed = q_rot"), "Queries are not rotated.", "q",
  limited={"T": (1, 2, 3, 4, 5, 6, 7, 8)})
m("key-not-rotated", "rope", (KEMB, "k_embed = k_rot"), "Keys are not rotated.", "k",
  limited={"S": (1, 2, 3, 4, 5, 6, 7, 8)})
m("rotated-twice", "rope", (APPLY, f"{APPLY}\n    q_out, k_out = apply_rotary_pos_emb(q_out, k_out, cos, sin)"),
  "Queries and keys are rotated twice.", "q", pattern="positions times 2")
m("values-rotated", "rope", (OUT, f"{OUT}\n    v = apply_rotary_pos_emb(v, v, cos, sin)[0]"),
  "Values are rotated, too.", "v", limited={"S": (1, 2, 3, 4, 5, 6, 7, 8)})
m("sin-cos-swapped", "rope",
  ("return emb.cos().to(dtype), emb.sin().to(dtype)", "return emb.sin().to(dtype), emb.cos().to(dtype)"),
  "Sine and cosine are exchanged.", "q", pattern="a quarter turn, backwards")
m("tables-bf16", "precision", ("return emb.cos().to(dtype), emb.sin().to(dtype)",
    "return emb.cos().bfloat16().to(dtype), emb.sin().bfloat16().to(dtype)"),
  "The tables of RoPE are rounded to bfloat16.", "q", pattern="bfloat16 tables")
m("positions-bf16", "precision", (TABLES, TABLES.replace(".float()", ".bfloat16().float()")),
  "Positions are rounded to bfloat16, in which 2001 is 2000.", "q", case="llama-far", pattern="positions rounded")
m("angles-bf16", "precision", ("freqs = position_ids[:, :, None].float() * cfg.inv_freq[None, None, :]",
    "freqs = (position_ids[:, :, None].bfloat16() * cfg.inv_freq.bfloat16()[None, None, :]).float()"),
  "Positions, frequencies and angles are in bfloat16.", "q", case="llama-offset",
  limited={"H": (1, 2, 3, 5, 6, 7)}, pattern="angles in bfloat16")
m("angles-half", "precision", ("emb = torch.cat((freqs, freqs), dim=-1)", "emb = torch.cat((freqs, freqs), dim=-1).half()"),
  "Angles are in float16.", "q", case="llama-offset", pattern="angles in float16")
m("powers-bf16", "precision", (INV, INV.replace(" / dim))", " / dim)).bfloat16().double()")),
  "Powers of theta are in bfloat16.", "q", case="llama-500k",
  limited={"T": (1, 2, 3, 4, 5, 6, 7, 8), "H": (1, 2, 5, 6)}, pattern="frequencies in bfloat16")
m("frequencies-bf16", "precision", ("return inv_freq.float()", "return inv_freq.bfloat16().float()"),
  "inv_freq was cast to bfloat16 with the model.", "q", pattern="bfloat16 frequencies", case="llama-far")
m("cos-per-head", "rope",
  ("cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)", "cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)"),
  "The tables broadcast over heads instead of tokens.", "q", case="llama-square",
  pattern="head n is turned as token n should be")
m("tiled", "heads",
  (EXPAND, "hidden_states = hidden_states[:, None].expand(batch, n_rep, num_key_value_heads, slen, head_dim)"),
  "Key/value heads are tiled and not repeated.", "scores", limited={"N": (1, 2)}, pattern="permutation of key/value heads")
m("tiled-six", "heads", (REPEAT,
    "key_states, value_states = k.repeat(1, cfg.num_key_value_groups, 1, 1), repeat_kv(v, cfg.num_key_value_groups)"),
  "Keys are tiled, values repeated.", "scores", case="llama-six", limited={"N": (1, 4)},
  pattern="permutation of key heads")
m("first-group", "heads",
  (REPEAT, "key_states, value_states = k[:, :1].expand_as(q), repeat_kv(v, cfg.num_key_value_groups)"),
  "All query heads use the first key head.", "scores", limited={"N": (2, 3)}, pattern="key head 0 for all")
m("values-other-group", "heads", (REPEAT,
    "key_states, value_states = repeat_kv(k, cfg.num_key_value_groups), repeat_kv(v.flip(1), "
      "cfg.num_key_value_groups)"), "The values are those of the other group.", "context",
  pattern="permutation of value heads")
m("scale-full-width", "scale", ("scaling=spec.head_dim**-0.5", "scaling=spec.d_model**-0.5"),
  "The scale is that of the whole width.", "scores", pattern="factor 0.5")
m("scale-other-dim", "scale", ("scaling=spec.head_dim**-0.5", "scaling=(spec.d_model // spec.num_heads)**-0.5"),
  "The scale is taken from hidden_size / heads, which is not head_dim.", "scores", case="qwen3", pattern="factor 1.2247")
m("causal-off", "mask", (CAUSAL, CAUSAL.replace("kv_len - q_len, kv_len", "kv_len - q_len + 1, kv_len + 1")),
  "Each token sees one that comes after it.", "mask", pattern="mask shifted by one")
m("causal-strict", "mask", (CAUSAL, CAUSAL.replace(" > ", " >= ")), "No token sees itself.", "mask",
  pattern="mask shifted by one")
m("causal-in-cache", "mask", (CAUSAL, "causal_mask = torch.arange(kv_len)[None, :] > torch.arange(q_len)[:, None]"),
  "The causal mask begins at the first key with a cache, too.", "step1.mask", case="qwen2-steps",
  pattern="mask aligned left")
m("norm-lost", "norm", (NORMS, "pass"), "Queries and keys are not normalised.", "q", case="qwen3")
m("norm-width", "norm", ("x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)",
    "x = x * torch.rsqrt(x.pow(2).mean((1, 3), keepdim=True) + eps)"), "The norm is taken over all heads together.",
  "q", case="qwen3")
m("norm-sum", "norm", ("x.pow(2).mean(-1", "x.pow(2).sum(-1"), "The norm divides by the sum of squares.", "q",
  case="qwen3", pattern="factor 0.28868")
m("norm-1-plus", "norm", (NORM, "return ((1 + weight.float()) * x).to(dtype)"), "The norm's weight is taken as 1 + w.",
  "q", case="qwen3")
m("norm-k-weight", "norm", (NORMS, NORMS.replace('w["q_norm.weight"]', 'w["k_norm.weight"]')),
  "Queries are normalised with the keys' weight.", "q", case="qwen3")
m("norm-eps", "norm", ("eps=spec.qk_norm.eps if", "eps=1e-2 if"), "The norm's eps is 0.01.", "q", case="qwen3",
  pattern="eps 0.01")
m("cache-keys-twice", "cache", (CATK, "k = torch.cat([past[0][:, :, :-1], past[0][:, :, :1], k], dim=2)"),
  "The last key of the cache is replaced by its first one.", "step1.cache.keys", case="llama-steps",
  limited={"S": (3,)}, pattern="slot 3 holds slot 0")
m("cache-prepends", "cache", (CATK, "k = torch.cat([k, past[0]], dim=2)"), "New keys are put in front.",
  "step1.cache.keys", case="llama-steps", pattern="slots rotated")
m("cache-values-stale", "cache", (CATV, "v = torch.cat([past[1], past[1][:, :, -v.shape[2]:]], dim=2)"),
  "The last value is cached again instead of the new one.", "step1.cache.values", case="llama-steps",
  limited={"S": (4,)}, pattern="stale slot")
m("cache-unrotated", "cache", (CATK, "k = torch.cat([past[0], rec['k.before_rope']], dim=2)"),
  "Keys of steps are cached without their rotation.", "step1.cache.keys", case="llama-steps", limited={"S": (4,)})
m("cache-positions", "cache", (STEP, STEP.replace("torch.arange(seen, seen + chunk)", "torch.arange(chunk)")),
  "Positions begin at 0 in every call.", "step1.q", case="llama-steps", pattern="positions 0 in each call")
m("cache-position-late", "cache",
  (STEP, STEP.replace("arange(seen, seen + chunk)", "arange(max(seen - 1, 0), max(seen - 1, 0) + chunk)")),
  "Positions of steps are one too low.", "step1.q", case="llama-steps", pattern="positions - 1")
m("cache-fp16", "cache", ('past = (out["cache.keys"], out["cache.values"])',
    'past = (out["cache.keys"].half().float(), out["cache.values"])'), "Cached keys are kept in float16.",
  "step1.cache.keys", case="llama-steps", limited={"S": (0, 1, 2, 3)}, pattern="float16 keys")
m("q-head-swap", "exotic", (QVIEW, f"{QVIEW}\n    q = q[:, [0, 2, 1, 3]]"), "Query heads 1 and 2 are exchanged.", "q",
  limited={"N": (1, 2)}, pattern="permutation of heads (0 2 1 3)")
m("softmax-temperature", "gain", (SOFTMAX, SOFTMAX.replace("attn_weights, dim", "attn_weights * 1.01, dim")),
  "The softmax is 1 % too sharp.", "attn_weights", pattern="temperature 1/1.01")
m("tf32-projection", "precision", ('v = F.linear(hidden_states, w["v_proj.weight"]',
    'v = F.linear(hidden_states.bfloat16().float(), w["v_proj.weight"].bfloat16().float()'),
  "The value projection alone is computed of bfloat16.", "v", pattern="bfloat16 inputs and weights")
m("o-proj-heads", "weights", (OPROJ,
    'rec["output"] = F.linear(attn_output, w["out_proj.weight"].unflatten(1, (cfg.num_heads, '
      '-1)).flip(1).flatten(1))'), "The columns of o_proj stand head by head in reverse.", "output",
  pattern="permutation of heads")
m("k-shared-last", "exotic", (KVIEW, f"{KVIEW}\n    k[:, :, -1] = k[:, :, -2]"),
  "The last key is that of the token before.", "k", limited={"S": (8,)},
  pattern="token 8 has the key of token 7, unrotated")
m("context-v-bias", "exotic", (CONTEXT, f"{CONTEXT} + 0.01"), "0.01 is added to the context.", "context",
  pattern="a constant is added")
