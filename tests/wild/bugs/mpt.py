"""Bugs injected into the port modeled on MPT."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("mpt", "mpt")

CLOSEST = "closest = 2 ** math.floor(math.log2(n_heads))"
BASE = "base = 2.0 ** (-alibi_bias_max / closest)"
SLOPES = "slopes = [base ** (i + 1) for i in range(closest)]"
EXTRA = "slopes += [extra_base ** (2 * i + 1) for i in range(n_heads - closest)]"
EXTRA_BASE = "extra_base = 2.0 ** (-alibi_bias_max / (2 * closest))"
DISTANCE = "distance = torch.arange(k_len)[None, :] - torch.arange(q_len)[:, None]"
ALIBI = "alibi = -distance.abs()[None, None].float()"
TIMES = "return alibi * build_slopes(n_heads, alibi_bias_max).view(1, n_heads, 1, 1)"
CLAMP = "qkv = qkv.clamp(min=-cfg.clip_qkv, max=cfg.clip_qkv)"
SPLIT = "query, key, value = qkv.split([cfg.width, cfg.width, cfg.width], dim=-1)"
QLN = 'query = F.layer_norm(query, (cfg.width,), w["q_ln.weight"], w.get("q_ln.bias"), cfg.eps)'
KLN = 'key = F.layer_norm(key, (cfg.width,), w["k_ln.weight"], w.get("k_ln.bias"), cfg.eps)'
SCORES = "attn_weight = query.to(work).matmul(key.to(work)) * cfg.softmax_scale"
ADD = "attn_weight = attn_weight + cfg.attn_bias.to(work)"
CAUSAL = "causal_mask = torch.ones(s, s, dtype=torch.bool).tril().logical_not()"
KEY = "key = key.reshape(b, s, cfg.n_heads, cfg.head_dim).permute(0, 2, 3, 1)"
VALUE = "value = value.reshape(b, s, cfg.n_heads, cfg.head_dim).permute(0, 2, 1, 3)"
SOFTMAX = "attn_weight = torch.softmax(attn_weight.float(), dim=-1).to(x.dtype)"
OUT = "out = attn_weight.matmul(value)"
MERGE = "out = out.permute(0, 2, 1, 3).reshape(b, s, cfg.width)"
MAX = "alibi_bias_max = spec.alibi.max_bias"

m("slopes-ceil", "alibi", ("return torch.tensor(slopes)",
    "return torch.tensor([2.0 ** (-alibi_bias_max * (i + 1) / 8) for i in range(n_heads)])"),
  "Slopes are those of the next larger power of two.", "scores", pattern="slopes of 8 heads")
m("slopes-plain", "alibi", (CLOSEST, "closest = n_heads"),
  "Slopes are a geometric row though the heads are no power of two.", "scores", pattern="slopes 2 ** (-8 n / 6)")
m("slopes-from-0", "alibi", (SLOPES, SLOPES.replace("(i + 1)", "i")), "The first slope is 1.", "scores",
  limited={"N": (0, 1, 2, 3)}, pattern="exponents - 1")
m("slopes-extra-even", "alibi", (EXTRA, EXTRA.replace("2 * i + 1", "2 * i + 2")),
  "The additional heads have the slopes of the first ones.", "scores", limited={"N": (4, 5)}, pattern="even exponents")
m("slopes-extra-first", "alibi",
  ("return torch.tensor(slopes)", "return torch.tensor(slopes[closest:] + slopes[:closest])"),
  "The additional slopes come first.", "scores", pattern="permutation of heads")
m("slopes-reversed", "alibi", ("return torch.tensor(slopes)", "return torch.tensor(slopes).flip(0)"),
  "Slopes are in reverse.", "scores", pattern="permutation of heads")
m("bias-max", "alibi", (MAX, "alibi_bias_max = 16"), "alibi_bias_max is 16.", "scores", pattern="slopes squared")
m("slopes-of-rank", "alibi", ("return torch.tensor(slopes)", "return torch.tensor(slopes[: n_heads // 2] * 2)"),
  "Each of two ranks has the slopes of the first heads.", "scores", limited={"N": (3, 4, 5)},
  pattern="slopes of heads 0 to 2, twice")
m("slopes-inverse", "alibi", (SLOPES, "slopes = [1 / (i + 1) for i in range(closest)]"),
  "The first slopes are 1 / n.", "scores", limited={"N": (0, 1, 2, 3)}, pattern="slopes 1, 1/2, 1/3, 1/4")
m("distances-cut", "alibi", (ALIBI, "alibi = -distance.abs().clamp(max=3)[None, None].float()"),
  "Distances above 3 count as 3.", "scores", pattern="distances at most 3")
m("split-kv-per-head", "heads",
  (SPLIT, "query, key, value = (qkv[..., : cfg.width], *(t.flatten(2) for t in "
          "qkv[..., cfg.width :].view(b, s, cfg.n_heads, 2, cfg.head_dim).unbind(3)))"),
  "Keys and values are split head by head, though all keys come first.", "k",
  limited={"K": (1, 2, 3, 4, 5)}, pattern="rows permuted")
m("split-vqk", "heads", (SPLIT, SPLIT.replace("query, key, value", "value, query, key")),
  "The thirds are taken as v, q, k.", "q", pattern="projections permuted")
m("alibi-sign", "alibi", (ALIBI, "alibi = distance.abs()[None, None].float()"), "Far keys gain.", "scores",
  pattern="slopes times -1")
m("alibi-lost", "alibi", (ADD, "pass"), "ALiBi is not added.", "scores", pattern="no ALiBi")
m("alibi-scaled", "alibi", (TIMES, TIMES + " * 8**-0.5"), "ALiBi is scaled like the products, as Falcon does.",
  "scores", pattern="slopes times 0.35355")
m("alibi-squared", "alibi", (ALIBI, "alibi = -distance.pow(2)[None, None].float()"), "Distances are squared.",
  "scores")
m("alibi-positions", "alibi",
  (DISTANCE, "distance = torch.arange(1 - k_len, 1)[None, :] + 0 * torch.arange(q_len)[:, None]"),
  "ALiBi is that of the last query in every row; the weights are the same.", "scores", in_output=False,
  pattern="a constant for each row")
m("alibi-queries", "alibi", (DISTANCE, "distance = 0 * torch.arange(k_len)[None, :] - torch.arange(q_len)[:, None]"),
  "ALiBi counts the query's position and not the distance; the softmax takes that out, and nothing is left of it.",
  "scores")
m("alibi-bf16", "precision", (ADD, "attn_weight = (attn_weight.bfloat16() + cfg.attn_bias.bfloat16()).to(work)"),
  "ALiBi is added in bfloat16.", "scores", pattern="bfloat16")
m("clip-lost", "weights", (CLAMP, "pass"), "Nothing is clipped.", "q", case="mpt-clipped", pattern="no clip")
m("clip-one-sided", "weights", (CLAMP, "qkv = qkv.clamp(max=cfg.clip_qkv)"), "Only what is too large is clipped.", "q",
  case="mpt-clipped")
m("clip-tanh", "weights", (CLAMP, "qkv = cfg.clip_qkv * torch.tanh(qkv / cfg.clip_qkv)"),
  "Projections are capped softly.", "q", case="mpt-clipped")
m("clip-q-only", "weights",
  (CLAMP, "qkv = torch.cat([qkv[..., : cfg.width].clamp(-cfg.clip_qkv, cfg.clip_qkv), qkv[..., cfg.width :]], -1)"),
  "Only queries are clipped.", "k", case="mpt-clipped")
m("split-per-head", "heads",
  (SPLIT, "query, key, value = (t.flatten(2) for t in qkv.view(b, s, cfg.n_heads, 3, cfg.head_dim).unbind(3))"),
  "Wqkv is packed head by head, as BLOOM has it.", "q", pattern="rows permuted")
m("ln-per-head", "norm", (QLN,
    'query = F.layer_norm(query.view(b, s, cfg.n_heads, -1), (cfg.head_dim,), eps=cfg.eps).flatten(2) * '
      'w["q_ln.weight"] + (w.get("q_ln.bias", 0))'), "The LayerNorm is taken over each head.", "q", case="mpt-normed")
m("ln-eps", "norm", (KLN, KLN.replace("cfg.eps", "0.01")), "The keys' eps is 0.01.", "k", case="mpt-normed",
  pattern="eps 0.01")
m("ln-weight-lost", "norm", (QLN, "query = F.layer_norm(query, (cfg.width,), None, None, cfg.eps)"),
  "The LayerNorm has no weight.", "q", case="mpt-normed")
m("ln-rms", "norm", (QLN, 'query = F.rms_norm(query, (cfg.width,), w["q_ln.weight"], cfg.eps)'),
  "The LayerNorm is an RMS norm.", "q", case="mpt-normed")
m("ln-values", "norm", (KLN, f"{KLN}\n        value = F.layer_norm(value, (cfg.width,), None, None, cfg.eps)"),
  "Values are normalised, too.", "v", case="mpt-normed")
m("scale-missing", "scale", (SCORES, SCORES.replace(" * cfg.softmax_scale", "")), "Products are not scaled.", "scores")
m("scale-all", "scale", (ADD, "attn_weight = attn_weight + cfg.attn_bias.to(work) / cfg.softmax_scale"),
  "ALiBi is divided by the scale.", "scores", pattern="slopes times 2.8284")
m("key-permute", "axes", (KEY,
    "key = key.reshape(b, s, cfg.n_heads, cfg.head_dim).permute(0, 2, 1, 3).reshape(b, cfg.n_heads, "
      "cfg.head_dim, s)"), "Keys are reshaped and not transposed.", "k", pattern="tokens and features mixed")
m("causal-strict", "mask", (CAUSAL, CAUSAL.replace("tril()", "tril(-1)")), "No token sees itself.", "mask",
  pattern="mask shifted by one")
m("causal-lost", "mask", (CAUSAL, "causal_mask = torch.zeros(s, s, dtype=torch.bool)"), "Nothing is hidden.", "mask",
  pattern="mask ignored")
m("softmax-half", "precision", (SOFTMAX, SOFTMAX.replace(".float()", ".half()")), "The softmax is in float16.",
  "attn_weights", pattern="float16")
m("value-token-2", "exotic",
  (VALUE, f"{VALUE}\n    value = torch.cat([value[:, :, :2], value[:, :, 1:2], value[:, :, 3:]], dim=2)"),
  "Token 2 has the values of token 1.", "v", limited={"S": (2,)}, pattern="values of the token before")
m("context-sign", "exotic", (OUT, f"{OUT}\n    out = torch.cat([-out[..., :1], out[..., 1:]], dim=-1)"),
  "The first feature of every head has the other sign.", "context", limited={"H": (0,)}, pattern="factor -1")
m("merge-features", "heads", (MERGE, "out = out.permute(0, 2, 3, 1).reshape(b, s, cfg.width)"),
  "Heads are combined with the features outside.", "output", pattern="features permuted")
