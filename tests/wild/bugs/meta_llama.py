"""Bugs in the port in the style of Meta's LLaMA."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("meta_llama", "meta")

FREQS = "freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].double() / dim))"
OUTER = "freqs = torch.outer(t, freqs)"
XQ = "xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))"
XK = "xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))"
XQOUT = "xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)"
XKOUT = "xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)"
VIEW = "freqs_cis = freqs_cis.view(1, xq_.shape[1], 1, xq_.shape[-1])"
ROTARY = "xq, xk = apply_rotary_emb(xq, xk, freqs_cis)"
CACHE_K = "self.cache_k[:bsz, start_pos : start_pos + seqlen] = xk"
CACHE_V = "self.cache_v[:bsz, start_pos : start_pos + seqlen] = xv"
KEYS = "keys = self.cache_k[:bsz, : start_pos + seqlen]"
VALUES = "values = self.cache_v[:bsz, : start_pos + seqlen]"
EXPAND = "return x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim).reshape(bs, slen, -1, head_dim)"
SCALE = "scores = scores / math.sqrt(self.head_dim)"
SOFTMAX = "scores = F.softmax(scores.float(), dim=-1).type_as(xq)"
MASK = "mask = torch.triu(mask, diagonal=1)"
HSTACK = "return torch.hstack([torch.zeros((seqlen, start_pos)), mask])"
OUTPUT = "output = output.transpose(1, 2).contiguous().view(bsz, seqlen, -1)"
WO = 'rec["output"] = F.linear(output, self.wo, self.bo)'
FIRST = "first = start_pos + case.first_position"
QVIEW = "xq = xq.view(bsz, seqlen, self.n_heads, self.head_dim)"
KVIEW = "xk = xk.view(bsz, seqlen, self.n_kv_heads, self.head_dim)"
VVIEW = "xv = xv.view(bsz, seqlen, self.n_kv_heads, self.head_dim)"
LATER = (1, 2, 3, 4, 5, 6, 7, 8)

m("halves", "rope", (XQ, "xq_ = torch.complex(*xq.float().chunk(2, dim=-1))"),
  "Queries are rotated by halves, and come out interleaved.", "q", pattern="permutation of features")
m("halves-keys", "rope", (XK, "xk_ = torch.complex(*xk.float().chunk(2, dim=-1))"), "Keys are taken by halves.", "k",
  pattern="permutation of features")
m("halves-out", "rope", (XQOUT, "xq_out = torch.cat([(xq_ * freqs_cis).real, (xq_ * freqs_cis).imag], dim=-1)"),
  "Rotated queries are written by halves, keys are not.", "q", pattern="permutation of features")
m("conjugate", "rope", (XKOUT, "xk_out = torch.view_as_real(xk_ * freqs_cis.conj()).flatten(3)"),
  "Keys are turned backwards.", "k", limited={"S": LATER}, pattern="RoPE backwards")
m("both-conjugate", "rope", (VIEW, f"{VIEW}.conj()"), "Everything turns backwards.", "q", limited={"T": LATER},
  pattern="RoPE backwards")
m("theta-500k", "rope", (FREQS, FREQS.replace("theta **", "500000.0 **")), "theta is 500000.", "q", pattern="theta 500000",
  limited={"T": LATER})
m("theta-10k", "rope", (FREQS, FREQS.replace("theta **", "10000.0 **")), "theta is 10000.", "q", case="meta-500k",
  pattern="theta 10000", limited={"T": LATER})
m("no-step-2", "rope", (FREQS, "freqs = 1.0 / (theta ** (torch.arange(0, dim // 2).double() / dim))"),
  "The exponents go up by 1 and not by 2.", "q", limited={"T": LATER}, pattern="theta 100")
m("double-frequency", "rope", (OUTER, "freqs = torch.outer(t, freqs) * 2"), "Angles are doubled.", "q",
  limited={"T": LATER}, pattern="positions times 2")
m("degrees", "rope", (OUTER, "freqs = torch.outer(t, freqs) / 180 * torch.pi"), "Angles are taken for degrees.", "q",
  limited={"T": LATER}, pattern="frequencies times 0.01745")
m("frequency-order", "rope", (OUTER, "freqs = torch.outer(t, freqs.flip(0))"), "Frequencies are in reverse.", "q",
  limited={"T": LATER}, pattern="frequencies reversed")
m("linear-frequencies", "rope", (FREQS, "freqs = torch.linspace(1.0, 1.0 / theta, dim // 2).double()"),
  "Frequencies are spaced evenly, not by their logarithms.", "q", limited={"T": LATER})
m("rope-before-split", "rope", (VIEW, "freqs_cis = freqs_cis[-1:].view(1, 1, 1, -1)"),
  "All tokens are turned by the last position, so that no score depends on any.", "q")
m("by-head", "rope", (VIEW, "freqs_cis = freqs_cis[: xq_.shape[2]].view(1, 1, xq_.shape[2], -1)"),
  "Heads are turned instead of tokens.", "q", case="meta-mha", pattern="head n is turned as token n should be")
m("key-one-late", "rope", (ROTARY,
    "xq, xk = apply_rotary_emb(xq, apply_rotary_emb(xk, xk, freqs_cis[1:2].expand_as(freqs_cis))[0], freqs_cis)"),
  "Keys are turned by one position more than queries.", "k", pattern="positions of k + 1")
m("rope-on-values", "rope", (ROTARY, f"{ROTARY}\n        xv = apply_rotary_emb(xv, xv, freqs_cis)[0]"),
  "Values are rotated, too.", "v", limited={"S": LATER})
m("no-rope", "rope", (ROTARY, "pass"), "Nothing is rotated.", "q", limited={"T": LATER})
m("rope-bf16", "precision",
  ("return xq_out.type_as(xq), xk_out.type_as(xk)", "return xq_out.bfloat16().type_as(xq), xk_out.type_as(xk)"),
  "Rotated queries are rounded to bfloat16.", "q", pattern="bfloat16")
m("tile", "heads", (EXPAND,
    "return x[:, :, None, :, :].expand(bs, slen, n_rep, n_kv_heads, head_dim).reshape(bs, slen, -1, head_dim)"),
  "Key/value heads are tiled.", "scores", limited={"N": (1, 2)}, pattern="permutation of key/value heads")
m("scale-n-heads", "scale", (SCALE, "scores = scores / math.sqrt(self.n_heads)"),
  "Scores are divided by the root of the heads.", "scores", pattern="factor 1.4142")
m("mask-diagonal-0", "mask", (MASK, "mask = torch.triu(mask, diagonal=0)"), "No token sees itself.", "mask",
  pattern="mask shifted by one")
m("mask-diagonal-2", "mask", (MASK, "mask = torch.triu(mask, diagonal=2)"), "Each token sees the next.", "mask",
  pattern="mask shifted by one")
m("mask-tril", "mask", (MASK, "mask = torch.tril(mask, diagonal=-1)"), "Earlier tokens are hidden.", "mask",
  pattern="mask transposed")
m("mask-right", "mask", (HSTACK, "return torch.hstack([mask, torch.full((seqlen, start_pos), 0.0)])"),
  "The mask of a call is put on the left of the cache.", "step1.mask", case="meta-two", pattern="mask aligned left")
m("softmax-fp16", "precision", (SOFTMAX, "scores = F.softmax(scores.half(), dim=-1).type_as(xq)"),
  "The softmax is in float16.", "attn_weights", pattern="float16")
m("output-heads", "axes", (OUTPUT, "output = output.contiguous().view(bsz, seqlen, -1)"),
  "Heads and tokens are mixed.", "output")
m("wo-transposed", "weights", (WO, 'rec["output"] = F.linear(output, self.wo.t(), self.bo)'), "wo is transposed.",
  "output", pattern="square kernel transposed")
m("cache-slot-late", "cache", (CACHE_K, "self.cache_k[:bsz, start_pos + 1 : start_pos + seqlen + 1] = xk"),
  "Keys are written one slot late.", "step0.cache.keys", case="meta-steps", pattern="slots + 1")
m("cache-values-early", "cache",
  (CACHE_V, "at = max(start_pos - 1, 0)\n        self.cache_v[:bsz, at : at + seqlen] = xv"),
  "Values of steps are written one slot early.", "step1.cache.values", case="meta-steps", limited={"S": (3, 4)},
  pattern="slots - 1")
m("cache-one-row", "cache", (CACHE_K, "self.cache_k[:1, start_pos : start_pos + seqlen] = xk[:1]"),
  "Only the first sequence is cached.", "step0.cache.keys", case="meta-steps", limited={"B": (1,)},
  pattern="sequence 1 is not cached")
m("cache-row-0", "cache", (KEYS, "keys = self.cache_k[:1, : start_pos + seqlen].expand(bsz, -1, -1, -1)"),
  "All sequences look at the keys of the first.", "step0.scores", case="meta-steps", limited={"B": (1,)})
m("cache-unrotated", "cache",
  (CACHE_K, "self.cache_k[:bsz, start_pos : start_pos + seqlen] = rec['k.before_rope'].transpose(1, 2)"),
  "Keys are cached before their rotation.", "step0.cache.keys", case="meta-steps")
m("cache-stale", "cache",
  (VALUES, "values = torch.cat([self.cache_v[:bsz, : start_pos + seqlen - 1], 0 * xv[:, -1:]], dim=1)"),
  "The last value is not there yet when it is looked at.", "step0.context", case="meta-steps")
m("start-pos-lost", "cache", (FIRST, "first = case.first_position"), "Every call is rotated from position 0 on.",
  "step1.q", case="meta-steps", pattern="positions 0 in each call")
m("start-pos-late", "cache", (FIRST, "first = start_pos + case.first_position + (start_pos > 0)"),
  "Steps are rotated by one too much.", "step1.q", case="meta-steps", pattern="positions + 1")
m("zero-head", "exotic", (QVIEW, f"{QVIEW}\n        xq[:, :, 2] = 0"), "Head 2 has no queries.", "q",
  limited={"N": (2,)}, pattern="factor 0")
m("k-pair-swap", "exotic", (KVIEW, f"{KVIEW}[..., [0, 1, 4, 5, 2, 3, 6, 7]]"),
  "The second and third pair of keys are exchanged.", "k", limited={"H": (2, 3, 4, 5)}, pattern="permutation of features")
m("v-gain", "gain", (VVIEW, f"{VVIEW} * 1.01"), "Values are 1 % too large.", "v", pattern="factor 1.01")
