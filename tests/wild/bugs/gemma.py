"""Bugs in the port in the style of Gemma."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("gemma", "gemma")

PLUS = "output = output * (1.0 + self.weight.float())"
VARIANCE = "variance = output.pow(2).mean(-1, keepdim=True)"
RSQRT = "output = output * torch.rsqrt(variance + self.eps)"
FLOAT = "output = x.float()"
QNORM = 'q = RMSNorm(w["q_norm.weight"], cfg.eps)(q)'
KNORM = 'k = RMSNorm(w["k_norm.weight"], cfg.eps)(k)'
ROPEQ, ROPEK = "q = rope(q, position_ids, cfg.theta)", "k = rope(k, position_ids, cfg.theta)"
INV = "inv_freq = 1.0 / (theta ** (torch.arange(0, x.shape[-1], 2).float() / x.shape[-1]))"
ROTATED = "return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).type_as(x)"
WINDOW = "keep = keep & torch.triu(ones, diagonal=1 - window)"
TRIL = "keep = torch.tril(ones)"
KEY, VALUE = "key = k.repeat_interleave(cfg.groups, dim=1)", "value = v.repeat_interleave(cfg.groups, dim=1)"
SCALE = "attn = attn * cfg.scaling"
CAP = "attn = attn / cfg.softcap\n        attn = torch.tanh(attn)\n        attn = attn * cfg.softcap"
FILL = "attn = attn.masked_fill(~keep, cfg.hidden)"
SOFTMAX = "attn = F.softmax(attn, dim=-1, dtype=torch.float32).to(x.dtype)"
SCALING = "scaling=spec.score_scale"
Y = "y = torch.matmul(attn, value)"
MERGE = "y = y.transpose(1, 2).reshape(bsz, q_len, -1)"
LATER = (1, 2, 3, 4, 5, 6, 7)

m("norm-w", "norm", (PLUS, "output = output * self.weight.float()"), "The norm multiplies by w instead of 1 + w.",
  "q", pattern="weight w")
m("norm-weight-lost", "norm", (PLUS, "pass"), "The norm has no weight.", "q", pattern="weight 1")
m("norm-w-twice", "norm", (PLUS, "output = output * (2.0 + self.weight.float())"),
  "1 is in the weight already, and is added again.", "q", pattern="weight 2 + w")
m("norm-no-root", "norm", (RSQRT, "output = output / (variance + self.eps)"),
  "The norm divides by the variance and not by its root.", "q")
m("norm-layer", "norm", (FLOAT, "output = x.float() - x.float().mean(-1, keepdim=True)"),
  "The mean is subtracted, as a LayerNorm does.", "q")
m("norm-eps-outside", "norm", (RSQRT, "output = output / (variance.sqrt() + 0.05)"),
  "eps is added outside of the root, and large.", "q", pattern="eps 0.05 outside")
m("norm-eps-large", "norm", (RSQRT, RSQRT.replace("self.eps", "0.001")), "eps is 0.001.", "q", pattern="eps 0.001")
m("norm-width", "norm", (VARIANCE, "variance = output.pow(2).mean((1, 3), keepdim=True)"),
  "The norm is taken over all heads.", "q")
m("norm-tokens", "norm", (VARIANCE, "variance = output.pow(2).mean(2, keepdim=True)"),
  "The norm is taken over the tokens.", "q")
m("norm-bf16", "precision", (VARIANCE, "variance = output.bfloat16().pow(2).mean(-1, keepdim=True).float()"),
  "The variance is computed in bfloat16.", "q", pattern="bfloat16")
m("norm-q-lost", "norm", (QNORM, "pass"), "Queries are not normalised.", "q")
m("norm-k-lost", "norm", (KNORM, "pass"), "Keys are not normalised.", "k")
m("norm-k-by-q", "norm", (KNORM, KNORM.replace("k_norm", "q_norm")), "Keys have the queries' norm.", "k",
  pattern="weight of q_norm")
m("norm-after-rope", "norm", (f'    if cfg.has_norm:\n        {QNORM}\n',
    "    position_ids = torch.arange(q_len)\n    if cfg.has_norm:\n        q = rope(RMSNorm(w['q_norm.weight'], "
      "cfg.eps)(rope(q, position_ids, cfg.theta)), -position_ids, cfg.theta)\n"),
  "Queries are normalised after their rotation.", "q", limited={"T": LATER}, pattern="norm and rotation exchanged")
m("norm-values", "norm", (VALUE,
    "value = v.repeat_interleave(cfg.groups, dim=1) * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + "
      "cfg.eps).repeat_interleave(cfg.groups, dim=1)"), "Values are normalised, too, after they were recorded.",
  "context")
m("rope-theta", "rope", (INV, INV.replace("theta **", "1000000.0 **")),
  "The theta of global layers is used in a local one.", "q", limited={"T": LATER}, pattern="theta 1000000")
m("rope-head-offset", "rope", (ROPEK,
    "k = torch.cat([rope(k[:, :1], position_ids, cfg.theta), rope(k[:, 1:], position_ids + 1, cfg.theta)], dim=1)"),
  "Key head 1 is turned by one position more.", "k", limited={"K": (1,)}, pattern="positions + 1 in head 1")
m("rope-half", "rope", (ROTATED, "return torch.cat([x1 * cos - x2 * sin, x2], dim=-1).type_as(x)"),
  "Only the first half of the features is rotated.", "q", limited={"T": LATER, "H": (4, 5, 6, 7)})
m("window-inclusive", "window", (WINDOW, "keep = keep & torch.triu(ones, diagonal=-window)"),
  "The window is one token too wide.", "mask", case="gemma-window", pattern="window 4")
m("window-narrow", "window", (WINDOW, "keep = keep & torch.triu(ones, diagonal=2 - window)"),
  "The window is one token too narrow.", "mask", case="gemma-window", pattern="window 2")
m("window-lost", "window", ("window=p.case.window_size or spec.window_size", "window=None"),
  "A local layer attends globally.", "mask", case="gemma-window", pattern="no window")
m("window-outside", "window",
  (WINDOW, "keep = keep & ~torch.triu(ones, diagonal=1 - window) | torch.eye(q_len, dtype=torch.bool)"),
  "What is in the window is hidden, what is outside is seen.", "mask", case="gemma-window", pattern="window inverted")
m("window-two-sided", "window", (TRIL, "keep = torch.tril(ones, diagonal=(window or 1) - 1)"),
  "The window reaches as far ahead.", "mask", case="gemma-window", pattern="window on both sides")
m("chunked", "window",
  (WINDOW, "keep = keep & (torch.arange(q_len)[:, None] // window == torch.arange(q_len)[None, :] // window)"),
  "The window is taken for chunks.", "mask", case="gemma-window", pattern="chunks of 3")
m("scale-head-dim", "scale", (SCALING, "scaling=spec.head_dim**-0.5"),
  "The scale is that of head_dim, not query_pre_attn_scalar.", "scores")
m("scale-lost", "scale", (SCALING, "scaling=1.0"), "Scores are not scaled.", "scores")
m("cap-lost", "cap", ("softcap=spec.soft_cap", "softcap=None"), "Scores are not capped, as with SDPA.", "scores",
  pattern="no soft cap", case="gemma-loud")
m("cap-wrong", "cap", ("softcap=spec.soft_cap", "softcap=30.0"), "The cap is that of the final logits.", "scores",
  pattern="cap 30")
m("cap-after-mask", "cap", (f"{FILL}", "attn = attn.masked_fill(~keep, -cfg.softcap)"),
  "The cap is applied after the mask: hidden scores are -cap.", "attn_weights", pattern="penalty -5")
m("cap-twice", "cap", (CAP, f"{CAP}\n        attn = torch.tanh(attn / cfg.softcap) * cfg.softcap"),
  "Scores are capped twice.", "scores")
m("cap-before-scale", "cap", (SCALE, "attn = cfg.softcap * torch.tanh(attn / cfg.softcap) * cfg.scaling"),
  "Scores are capped before their scale, and again after.", "scores")
m("tile-keys", "heads", (KEY, "key = k.repeat(1, cfg.groups, 1, 1)"), "Keys are tiled, values repeated.", "scores",
  limited={"N": (1, 2)}, pattern="permutation of key heads")
m("tile-values", "heads", (VALUE, "value = v.repeat(1, cfg.groups, 1, 1)"), "Values are tiled, keys repeated.",
  "context", limited={"N": (1, 2)}, pattern="permutation of value heads")
m("softmax-bf16", "precision", (SOFTMAX, "attn = F.softmax(attn.bfloat16(), dim=-1).to(x.dtype)"),
  "The softmax is in bfloat16.", "attn_weights", pattern="bfloat16")
m("value-head-1-late", "exotic",
  (VALUE, f"{VALUE}\n    value = torch.cat([value[:, :3], value[:, 3:].roll(1, 2)], dim=1)"),
  "Head 3 has the values of the token before.", "context", limited={"N": (3,)}, pattern="values shifted by one token")
m("merge-swap", "exotic", (MERGE, f"{MERGE}\n    y = torch.cat([y[..., 8:16], y[..., :8], y[..., 16:]], dim=-1)"),
  "The first two heads are exchanged before the output projection.", "output", pattern="permutation of heads (1 0 2 3)")
