"""Bugs of users of torch.nn.MultiheadAttention."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("nn_mha", "bert")

PACK = 'torch.cat([w["q_proj.weight"], w["k_proj.weight"], w["v_proj.weight"]])'
PACKBIAS = 'torch.cat([w["q_proj.bias"], w["k_proj.bias"], w["v_proj.bias"]])'
PADDING = "key_padding_mask = torch.arange(case.key_len)[None, :] >= lengths[:, None]"
CAUSAL = "torch.triu(torch.ones(case.seq_len, case.key_len, dtype=torch.bool), diagonal=1)"
BIAS = "attn_mask = bias.flatten(0, 1)"
EVAL = "return mha.eval()"
OUT = 'mha.out_proj.weight.copy_(w["out_proj.weight"])'
CALL = "            query,\n            key,\n            key,\n"

m("batch-first-false", "axes", ("batch_first=True", "batch_first=False"),
  "batch_first is left at its default, so that sequences are taken for tokens.", "attn_weights", case="bert-square",
  pattern="axes B and T exchanged")
m("padding-polarity", "mask", (PADDING, PADDING.replace(">=", "<")),
  "key_padding_mask is True where a token is real; a sequence is all NaN.", "attn_weights", pattern="mask inverted")
m("causal-polarity", "mask", (CAUSAL, "torch.tril(torch.ones(case.seq_len, case.key_len, dtype=torch.bool))"),
  "attn_mask is True where one may look.", "attn_weights", case="gpt", pattern="mask inverted")
m("causal-diagonal", "mask", (CAUSAL, CAUSAL.replace("diagonal=1", "diagonal=2")), "Each token sees the next.",
  "attn_weights", case="gpt", pattern="mask shifted by one")
m("causal-float-01", "mask", (CAUSAL, "torch.triu(torch.ones(case.seq_len, case.key_len), diagonal=1)"),
  "attn_mask is 1 and 0 in floats, and added.", "attn_weights", case="gpt", pattern="hidden scores gain 1")
m("padding-lost", "mask", ("key_padding_mask=key_padding_mask", "key_padding_mask=None"),
  "key_padding_mask is not passed.", "attn_weights", limited={"B": (1,)}, pattern="padding ignored")
m("padding-other", "mask", (PADDING, PADDING.replace("lengths[:, None]", "lengths.flip(0)[:, None]")),
  "Each sequence has the padding of the other.", "attn_weights", pattern="sequences exchanged")
m("bias-tiled", "bias", (BIAS, "attn_mask = bias.transpose(0, 1).flatten(0, 1)"),
  "The masks of (B * N) are ordered head by head.", "attn_weights", case="bert-biased",
  pattern="biases of sequences and heads permuted")
m("bias-first-sequence", "bias", (BIAS, "attn_mask = bias[:1].repeat(bias.shape[0], 1, 1, 1).flatten(0, 1)"),
  "All sequences have the bias of the first.", "attn_weights", case="bert-biased", limited={"B": (1,)})
m("packed-kqv", "weights", (PACK, 'torch.cat([w["k_proj.weight"], w["q_proj.weight"], w["v_proj.weight"]])'),
  "in_proj_weight is packed as k, q, v.", "attn_weights", pattern="q and k weights exchanged")
m("packed-bias-order", "bias", (PACKBIAS, 'torch.cat([w["k_proj.bias"], w["q_proj.bias"], w["v_proj.bias"]])'),
  "in_proj_bias is packed as k, q, v.", "attn_weights", pattern="q and k biases exchanged")
m("packed-transposed", "weights",
  (PACK, 'torch.cat([w["q_proj.weight"].T, w["k_proj.weight"].T, w["v_proj.weight"].T])'),
  "Kernels of Flax are packed untransposed.", "attn_weights", pattern="square kernels transposed")
m("packed-by-head", "weights",
  (PACK, 'torch.stack([w[f"{n}_proj.weight"].unflatten(0, (spec.num_heads, -1)) for n in "qkv"], 1).flatten(0, 2)'),
  "in_proj_weight is packed head by head, as GPT-NeoX has it.", "attn_weights", pattern="rows permuted")
m("out-transposed", "weights", (OUT, 'mha.out_proj.weight.copy_(w["out_proj.weight"].T)'),
  "out_proj is copied transposed.", "output", pattern="square kernel transposed")
m("train-mode", "softmax", (EVAL, "torch.manual_seed(0)\n    mha.dropout = 0.2\n    return mha.train()"),
  "The layer is in training mode.", "attn_weights", pattern="some weights 0, the others times 1.25")
m("values-of-query", "weights", (CALL, "            query,\n            key,\n            query,\n"),
  "The query is passed as value.", "output", case="cross-square", pattern="v of the query input")
m("swapped-arguments", "weights", (CALL, "            key,\n            query,\n            query,\n"),
  "Query and key are passed in the wrong order.", "attn_weights", case="cross-square", pattern="inputs exchanged")
m("weights-bf16", "precision", (f"mha.in_proj_weight.copy_({PACK})", f"mha.in_proj_weight.copy_({PACK}.bfloat16())"),
  "in_proj_weight was saved in bfloat16.", "attn_weights", pattern="bfloat16 weights")
m("bias-not-copied", "bias", ("mha.in_proj_bias.copy_", "mha.in_proj_bias.clone().copy_"),
  "in_proj_bias keeps its initial zeros.", "attn_weights", pattern="constant vectors are missing")
m("out-bias-not-copied", "bias", ("mha.out_proj.bias.copy_", "mha.out_proj.bias.clone().copy_"),
  "out_proj.bias keeps its initial zeros.", "output", pattern="a constant vector is missing")
