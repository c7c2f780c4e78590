"""Bugs in the port in the style of nanoGPT."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("nanogpt", "gpt", "no-mask")

SPLIT = "q, k, v = qkv.split(cfg.n_embd, dim=2)"
K = "k = k.view(B, T, cfg.n_head, hs).transpose(1, 2)  # (B, nh, T, hs)"
Q = "q = q.view(B, T, cfg.n_head, hs).transpose(1, 2)"
V = "v = v.view(B, T, cfg.n_head, hs).transpose(1, 2)"
SCALE = "att = att * (1.0 / math.sqrt(hs))"
FILL = "att = att.masked_fill(bias == 0, cfg.hidden)"
TRIL = "torch.tril(torch.ones(T, T))"
SOFTMAX = "att = F.softmax(att, dim=-1).to(dtype)"
CONTEXT = "y = att @ v"
COMBINE = "y = y.transpose(1, 2).contiguous().view(B, T, C)"
PROJ = 'y = F.linear(y, state["c_proj.weight"], state.get("c_proj.bias"))'
ATTN = 'qkv = F.linear(x, state["c_attn.weight"], state.get("c_attn.bias"))'

m("kqv", "weights", (SPLIT, "k, q, v = qkv.split(cfg.n_embd, dim=2)"), "c_attn is split as keys, queries, values.",
  "q", pattern="q and k exchanged")
m("vkq", "weights", (SPLIT, "v, k, q = qkv.split(cfg.n_embd, dim=2)"), "c_attn is split as values, keys, queries.",
  "q", pattern="q and v exchanged")
m("load-qvk", "weights", ('w[f"k_proj.{leaf}"], w[f"v_proj.{leaf}"]])', 'w[f"v_proj.{leaf}"], w[f"k_proj.{leaf}"]])'),
  "The loader stacks queries, values, keys.", "k", pattern="k and v exchanged")
m("per-head-packed", "heads",
  (SPLIT, "q, k, v = qkv.view(B, T, cfg.n_head, 3, hs).permute(3, 0, 1, 2, 4).reshape(3, B, T, C)"),
  "c_attn is read head by head, as GPT-NeoX packs it.", "q", pattern="rows of the three projections are permuted")
m("k-features-first", "heads", (K, "k = k.view(B, T, hs, cfg.n_head).permute(0, 3, 1, 2)"),
  "Keys are split with the features outside and the heads inside.", "k", pattern="features permuted across heads")
m("q-features-first", "heads", (Q, "q = q.view(B, T, hs, cfg.n_head).permute(0, 3, 1, 2)"),
  "Queries are split with the features outside and the heads inside.", "q", pattern="features permuted across heads")
m("v-no-transpose", "axes", (V, "v = v.reshape(B, cfg.n_head, T, hs)"),
  "Values are reshaped to (B, N, T, H) without a transpose.", "v", pattern="tokens and heads mixed")
m("q-no-transpose", "axes", (Q, "q = q.reshape(B, cfg.n_head, T, hs)"),
  "Queries are reshaped to (B, N, T, H) without a transpose.", "q", pattern="tokens and heads mixed")
m("square-axes", "axes", (K, "k = k.view(B, T, cfg.n_head, hs).transpose(1, 3)"),
  "Keys have tokens and features exchanged, where both are 4.", "k", pattern="axes T and H exchanged, heads in place",
  case="gpt-square")
m("square-scores", "axes", ("att = q @ k.transpose(-2, -1)", "att = q @ k"),
  "Keys are not transposed in the product, which T = H lets pass.", "scores", case="gpt-square")
m("no-scale", "scale", (SCALE, "att = att * 1.0"), "Scores are not scaled.", "scores",
  pattern="factor 2.8284, the root of head_dim")
m("scale-width", "scale", (SCALE, "att = att * (1.0 / math.sqrt(C))"), "Scores are divided by the root of the width.",
  "scores", pattern="factor 0.5")
m("scale-no-root", "scale", (SCALE, "att = att * (1.0 / hs)"), "Scores are divided by head_dim and not by its root.",
  "scores", pattern="factor 0.35355")
m("scale-twice", "scale", ("att = q @ k.transpose(-2, -1)", "att = (q / math.sqrt(hs)) @ k.transpose(-2, -1)"),
  "Queries are scaled, and the scores again.", "scores", pattern="factor 0.35355")
m("scale-times", "scale", (SCALE, "att = att * math.sqrt(hs)"), "Scores are multiplied by the root of head_dim.",
  "scores", pattern="factor 8")
m("strict-causal", "mask", (TRIL, "torch.tril(torch.ones(T, T), diagonal=-1)"),
  "No token sees itself; the first sees nothing, and is NaN.", "attn_weights", pattern="mask shifted by one")
m("sees-next", "mask", (TRIL, "torch.tril(torch.ones(T, T), diagonal=1)"), "Every token sees the next one, too.",
  "attn_weights", pattern="mask shifted by one")
m("mask-inverted", "mask", (FILL, "att = att.masked_fill(bias == 1, cfg.hidden)"), "What may be seen is hidden.",
  "attn_weights", pattern="mask inverted")
m("triu", "mask", (TRIL, "torch.triu(torch.ones(T, T))"), "Each token sees itself and later ones.", "attn_weights",
  pattern="mask transposed")
m("fill-zero", "mask", (FILL, "att = att.masked_fill(bias == 0, 0.0)"), "Hidden scores are set to 0 and take part.",
  "attn_weights")
m("multiplied-mask", "mask", (FILL, "att = att * bias"), "Scores are multiplied by the mask.", "attn_weights")
m("no-mask", "mask", (FILL, "att = att"), "Nothing is hidden.", "attn_weights", pattern="mask ignored")
m("mask-after", "mask", (f'{FILL}\n    rec["scores.masked"] = att\n    {SOFTMAX}',
    "att = F.softmax(att, dim=-1).to(dtype).masked_fill(bias == 0, 0.0)"),
  "The mask is applied after the softmax, and rows no longer sum to 1.", "attn_weights")
m("small-penalty", "mask", (FILL, "att = att.masked_fill(bias == 0, -4.0)"), "Hidden scores are -4, and leak.",
  "attn_weights", pattern="penalty -4")
m("softmax-queries", "softmax", (SOFTMAX, "att = F.softmax(att, dim=-2).to(dtype)"),
  "The softmax runs over the queries.", "attn_weights")
m("softmax-heads", "softmax", (SOFTMAX, "att = F.softmax(att, dim=1).to(dtype).nan_to_num()"),
  "The softmax runs over the heads.", "attn_weights")
m("softmax-half", "precision", (SOFTMAX, "att = F.softmax(att.half(), dim=-1).to(dtype)"),
  "The softmax is computed in float16.", "attn_weights", pattern="float16")
m("products-bf16", "precision",
  ("att = q @ k.transpose(-2, -1)", "att = (q.bfloat16() @ k.bfloat16().transpose(-2, -1)).float()"),
  "Scores are multiplied in bfloat16.", "scores", pattern="bfloat16")
m("dropout-on", "softmax", (CONTEXT, "torch.manual_seed(0)\n    y = F.dropout(att, 0.2) @ v"),
  "Dropout of the weights is left on.", "context", pattern="some weights 0, the others times 1.25")
m("dropout-factor", "softmax", (CONTEXT, "y = (att / 0.9) @ v"),
  "Weights are divided by the keep rate though nothing is dropped.", "context", pattern="factor 1.1111")
m("combine-no-transpose", "axes", (COMBINE, "y = y.contiguous().view(B, T, C)"),
  "Heads are put side by side without the transpose.", "output", pattern="tokens and heads mixed")
m("combine-features-first", "heads", (COMBINE, "y = y.permute(0, 2, 3, 1).reshape(B, T, C)"),
  "Heads are combined with the features outside.", "output", pattern="features permuted")
m("proj-transposed", "weights", (PROJ, PROJ.replace('"c_proj.weight"]', '"c_proj.weight"].t()')),
  "c_proj is transposed: a Conv1D weight read as a Linear's.", "output", pattern="square kernel transposed")
m("proj-no-bias", "bias", (PROJ, 'y = F.linear(y, state["c_proj.weight"])'), "c_proj's bias is lost.", "output",
  pattern="a constant vector is missing")
m("attn-no-bias", "bias", (ATTN, 'qkv = F.linear(x, state["c_attn.weight"])'), "c_attn's bias is lost.", "q",
  pattern="a constant vector is missing")
m("proj-bias-twice", "bias", (PROJ, PROJ + ' + state["c_proj.bias"]'), "c_proj's bias is added twice.", "output",
  pattern="a constant vector too much")
m("residual", "exotic", (PROJ, PROJ + " + x"), "The residual is added inside the layer.", "output", pattern="x is added")
m("head-3-louder", "exotic", (SCALE, f"{SCALE}\n    att[:, 3] = att[:, 3] * 1.05"),
  "The scores of head 3 are 5 % too large.", "scores", pattern="factor 1.05", limited={"N": (3,)})
m("sequence-1-values", "exotic", (V, f"{V}\n    v = v[:1].expand_as(v)"), "Values are those of the first sequence.",
  "v", pattern="sequence 1 has the values of sequence 0", limited={"B": (1,)})
m("context-gain", "gain", (CONTEXT, "y = att @ v * 1.01"), "The context is 1 % too large.", "context",
  pattern="factor 1.01")
m("last-feature", "exotic", (PROJ, f"{PROJ}\n    y = torch.cat([y[..., :-1], 0 * y[..., -1:]], dim=-1)"),
  "The last feature of the output is 0.", "output", limited={"E": (31,)}, pattern="factor 0")
m("late-keys", "exotic", (K, f"{K}\n    k = torch.cat([k[:, :, :4], 0.9 * k[:, :, 4:]], dim=2)"),
  "Keys from token 4 on are too small.", "k", limited={"S": (4, 5, 6)}, pattern="factor 0.9")
