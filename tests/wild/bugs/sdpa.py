"""Bugs of users of F.scaled_dot_product_attention."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("sdpa", "bert")

KEEP = "keep = (torch.arange(case.key_len)[None, :] < lengths[:, None])[:, None, None, :]"
LOWER = "lower = torch.ones(case.seq_len, case.key_len, dtype=torch.bool).tril()"
AND = "keep = lower[None, None] if keep is None else keep & lower"
CALL = ("q, k, v, attn_mask=attn_mask, dropout_p=0.0, is_causal=False, "
        "enable_gqa=spec.num_heads != spec.num_kv_heads")
MASK = "attn_mask = make_mask(p.case, p.inputs, query.dtype)"
RANDOM = 'allowed = ~torch.from_numpy(inputs["mask"])'
BIAS = 'return bias if keep is None else bias.masked_fill(~keep, float("-inf"))'
HEADS = "return y.unflatten(-1, (heads, -1)).transpose(1, 2)"
FLATTEN = "y = context.transpose(1, 2).flatten(2)"
V = 'v = project(w, "v_proj", key, spec.num_kv_heads)'
K = 'k = project(w, "k_proj", key, spec.num_kv_heads)'
OUT = 'rec["output"] = F.linear(y, w["out_proj.weight"], w.get("out_proj.bias"))'

m("mask-hides", "mask", (MASK, f"{MASK}\n    attn_mask = ~attn_mask"),
  "The mask is that of nn.MultiheadAttention, True where hidden.", "mask", pattern="mask inverted")
m("mask-float-01", "mask", (CALL, CALL.replace("attn_mask=attn_mask", "attn_mask=attn_mask.float()")),
  "The mask is passed as 1 and 0, and added.", "context", limited={"B": (1,)}, pattern="seen scores gain 1")
m("mask-not-passed", "mask", (CALL, CALL.replace("attn_mask=attn_mask", "attn_mask=None")), "The mask is not passed.",
  "context", limited={"B": (1,)}, pattern="mask ignored")
m("padding-on-queries", "mask",
  (KEEP, KEEP.replace("[:, None, None, :]", "[:, None, :, None].expand(-1, -1, -1, case.key_len)")),
  "Queries are hidden instead of keys.", "mask", limited={"B": (1,)}, pattern="mask transposed")
m("is-causal-too", "mask",
  (CALL, CALL.replace("attn_mask=attn_mask", "attn_mask=None").replace("is_causal=False", "is_causal=True")),
  "is_causal is set in an encoder.", "context", case="bert-full", pattern="causality added", limited={"T": (0, 1, 2, 3)})
m("causal-and-lost", "mask", (AND, "keep = lower[None, None]"), "The causal mask replaces that of padding.", "mask",
  case="causal-cross", limited={"B": (1,)}, pattern="padding ignored")
m("causal-or", "mask", (AND, "keep = lower[None, None] if keep is None else keep | lower"),
  "Masks are combined by or.", "mask", case="causal-padded")
m("tril-minus-1", "mask", (LOWER, LOWER.replace("tril()", "tril(-1)")), "No token sees itself; the first is 0.",
  "mask", case="gpt", pattern="mask shifted by one")
m("triu", "mask", (LOWER, LOWER.replace("tril()", "triu()")), "Tokens see later ones.", "mask", case="gpt",
  pattern="mask transposed")
m("lengths-inclusive", "mask", (KEEP, KEEP.replace(" < ", " <= ")), "One token of padding is seen.", "mask",
  limited={"B": (1,)}, pattern="lengths one too large")
m("random-polarity", "mask", (RANDOM, 'allowed = torch.from_numpy(inputs["mask"])'),
  "The mask is not inverted for SDPA.", "mask", case="random-mask", pattern="mask inverted")
m("random-first-head", "mask", (RANDOM, 'allowed = ~torch.from_numpy(inputs["mask"])[:, :1]'),
  "All heads have the mask of the first.", "mask", case="random-mask", limited={"N": (1, 2)})
m("random-transposed", "mask", (RANDOM, 'allowed = ~torch.from_numpy(inputs["mask"]).transpose(2, 3)'),
  "The mask is transposed.", "mask", case="random-mask", pattern="mask transposed")
m("empty-as-mean", "mask",
  (CALL, CALL.replace("attn_mask=attn_mask", "attn_mask=torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -1e9)")),
  "A sequence without a key gets the mean of its padding.", "context", case="empty-rows", limited={"B": (1,)},
  pattern="mean instead of 0")
m("empty-as-nan", "mask",
  (FLATTEN, f"context = context / (~rec['mask']).any(-1, keepdim=True)\n    rec['context'] = context\n    {FLATTEN}"),
  "A sequence without a key is NaN.", "context", case="empty-rows", limited={"B": (1,)}, pattern="NaN instead of 0")
m("bias-scaled", "bias", (BIAS, "bias = bias * case.spec.head_dim**-0.5\n        " + BIAS),
  "The bias of the scores is scaled.", "context", case="bert-biased", pattern="bias times 0.35355")
m("bias-lost", "bias", (BIAS, "return keep"), "The bias of the scores is lost.", "context", case="bert-biased",
  pattern="bias missing", recording="no-mask")
m("bias-mask-lost", "mask", (BIAS, "return bias"), "With a bias, padding is not hidden.", "context",
  case="bert-biased", limited={"B": (1,)}, pattern="padding ignored")
m("scale-twice", "scale", (V, f"{V}\n    q = q * spec.head_dim**-0.5"), "Queries are scaled, and SDPA scales again.",
  "q", pattern="factor 0.35355")
m("scale-given", "scale", (CALL, CALL + ", scale=1.0"), "scale=1.0 is passed.", "context", pattern="scores times 2.8284")
m("dropout-p", "softmax",
  (CALL, "q, k, v, attn_mask=attn_mask, dropout_p=torch.manual_seed(0) and 0.1, is_causal=False"),
  "dropout_p is passed in evaluation.", "context", pattern="some weights 0, the others times 1.1111")
m("bthd", "axes", (HEADS, "return y.unflatten(-1, (heads, -1))"), "SDPA is given (B, T, N, H), which T = N lets pass.",
  "q", case="gpt-square", pattern="axes T and N exchanged")
m("flatten-heads", "axes", (FLATTEN, "y = context.reshape(context.shape[0], context.shape[2], -1)"),
  "Heads are flattened without the transpose.", "output")
m("gqa-repeat", "heads", (CALL,
    CALL.replace("q, k, v", "q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)")
        .replace("spec.num_heads != spec.num_kv_heads", "False")),
  "Key/value heads are tiled by repeat.", "context", case="gqa", limited={"N": (1, 2)},
  pattern="permutation of key/value heads")
m("v-is-k", "weights", (V, "v = k"), "The values are the keys.", "v", pattern="v is k")
m("key-from-query", "weights", (K, K.replace("key, spec", "query, spec")),
  "Cross-attention makes its keys of the queries' tokens.", "k", case="cross-square", pattern="k of the query input")
m("half", "precision", (V, f"{V}\n    q, k, v = q.half().float(), k.half().float(), v.half().float()"),
  "Autocast rounds q, k and v to float16.", "q", pattern="float16")
m("out-bias-lost", "bias", (OUT, 'rec["output"] = F.linear(y, w["out_proj.weight"])'), "The output has no bias.",
  "output", pattern="a constant vector is missing")
m("out-gain", "gain", (OUT, f"{OUT} * 1.01"), "The output is 1 % too large.", "output", pattern="factor 1.01")
