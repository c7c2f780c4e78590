"""Bugs in the port in the style of BERT."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("bert", "bert")

SPLIT = "return x.permute(0, 2, 1, 3)"
KEY = 'key_layer = self.transpose_for_scores(self.linear("key", source))'
VALUE = 'value_layer = self.transpose_for_scores(self.linear("value", source))'
QUERY = 'query_layer = self.transpose_for_scores(self.linear("query", hidden_states))'
SCALE = "attention_scores = attention_scores / math.sqrt(self.attention_head_size)"
ADD = "attention_scores = attention_scores + extended"
SHAPE = "attention_mask[:, None, None, :]"
SOFTMAX = "attention_probs = nn.functional.softmax(attention_scores, dim=-1).to(hidden_states.dtype)"
CONTEXT = "context_layer = torch.matmul(attention_probs, value_layer)"
PERMUTE = "context_layer = context_layer.permute(0, 2, 1, 3).contiguous()"
DENSE = 'rec["output"] = self.linear("dense", context_layer)'
LENGTHS = "torch.arange(p.case.key_len)[None, :] < lengths[:, None]"
NAMES = 'NAMES = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "dense"}'
FILL = 'torch.zeros_like(extended).masked_fill(extended == 0, float("-inf"))'
EXPAND = "key_layer.to(work).transpose(-1, -2)"

m("padding-inverted", "mask", (LENGTHS, "torch.arange(p.case.key_len)[None, :] >= lengths[:, None]"),
  "The mask of a tokenizer is 1 at padding; a sequence without padding sees nothing.", "mask", pattern="mask inverted")
m("padding-ignored", "mask", (ADD, "pass"), "The mask is made and not added.", "attn_weights", pattern="mask ignored",
  limited={"B": (1,)})
m("mask-added-as-01", "mask", (ADD, "attention_scores = attention_scores + attention_mask[:, None, None, :].to(work)"),
  "The mask of 1 and 0 is added as it is.", "attn_weights", pattern="hidden scores lose 1", limited={"B": (1,)})
m("mask-subtracted", "mask",
  (ADD, "attention_scores = attention_scores + (1 - attention_mask[:, None, None, :].to(work))"),
  "1 is added where a key should be hidden.", "attn_weights", pattern="hidden scores gain 1", limited={"B": (1,)})
m("small-penalty", "mask", (FILL, "(1.0 - extended) * -3.0"), "The penalty is -3, and padding leaks.", "attn_weights",
  pattern="penalty -3", limited={"B": (1,)})
m("masks-queries", "mask", (SHAPE, "attention_mask[:, None, :, None]"),
  "Queries that are padding are hidden instead of keys.", "mask", pattern="mask transposed", limited={"B": (1,)})
m("mask-other-sequence", "mask", (SHAPE, "attention_mask.flip(0)[:, None, None, :]"),
  "Each sequence has the mask of the other one.", "mask", pattern="sequences exchanged")
m("mask-first-sequence", "mask", (SHAPE, "attention_mask[:1, None, None, :]"),
  "The mask of the first sequence is that of all.", "mask", pattern="sequence 1 has the mask of sequence 0",
  limited={"B": (1,)})
m("mask-by-heads", "mask", (SHAPE, "attention_mask[:, None, None, :].roll(1, 0)"),
  "Masks are repeated per head by tile instead of repeat: sequence b gets another sequence's mask.", "mask",
  case="bert-three", pattern="sequences permuted")
m("lengths-inclusive", "mask", (LENGTHS, "torch.arange(p.case.key_len)[None, :] <= lengths[:, None]"),
  "One token of padding is seen.", "mask", pattern="lengths one too large", limited={"B": (1,), "S": (4,)})
m("lengths-short", "mask", (LENGTHS, "torch.arange(p.case.key_len)[None, :] < lengths[:, None] - 1"),
  "The last real token is hidden.", "mask", pattern="lengths one too small", limited={"S": (3, 5)})
m("left-padded", "mask", (LENGTHS, "torch.arange(p.case.key_len)[None, :] >= p.case.key_len - lengths[:, None]"),
  "Padding is taken to be on the left.", "mask", pattern="mask reversed", limited={"B": (1,)})
m("zero-times-infinity", "mask", (FILL, '(1.0 - extended) * float("-inf")'),
  "The penalty is 0 times infinity where a key is seen: all is NaN.", "attn_weights", pattern="NaN")
m("scores-times-mask", "mask", (f"{ADD}\n",
    "kept = attention_mask[:, None, None, :].to(work)\n            attention_scores = attention_scores * kept\n"),
  "Scores are multiplied by the mask.", "attn_weights", limited={"B": (1,)}, pattern="hidden scores are 0")
m("scale-width", "scale", (SCALE, "attention_scores = attention_scores / math.sqrt(self.all_head_size)"),
  "Scores are divided by the root of the width.", "scores", pattern="factor 0.57735")
m("no-scale", "scale", (SCALE, "pass"), "Scores are not scaled.", "scores", pattern="factor 2.8284")
m("scale-after-bias", "scale", ("attention_scores = attention_scores + position_bias.to(work)",
    "attention_scores = attention_scores + position_bias.to(work) / math.sqrt(self.attention_head_size)"),
  "The bias of the scores is scaled, too.", "scores", case="bert-biased", pattern="bias times 0.35355")
m("bias-lost", "bias", ("attention_scores = attention_scores + position_bias.to(work)", "pass"),
  "The bias of the scores is not added.", "scores", case="bert-biased", pattern="bias missing")
m("bias-transposed", "bias", ("+ position_bias.to(work)", "+ position_bias.to(work).transpose(-1, -2)"),
  "The bias of the scores is transposed.", "scores", case="bert-biased", pattern="bias transposed")
m("bias-first-head", "bias", ("+ position_bias.to(work)", "+ position_bias.to(work)[:, :1]"),
  "All heads have the bias of the first.", "scores", case="bert-biased", limited={"N": (1, 2)})
m("names-swapped", "weights",
  (NAMES, NAMES.replace('"query"', '"_"').replace('"key"', '"query"').replace('"_"', '"key"')),
  "The loader exchanges query and key.", "q", pattern="q and k exchanged")
m("value-is-key", "weights", (VALUE, VALUE.replace('"value"', '"key"')), "Values are projected by the key's weights.",
  "v", pattern="v is k")
m("dense-transposed", "weights",
  (DENSE, 'rec["output"] = context_layer @ self.state["dense.weight"] + self.state["dense.bias"]'),
  "The output projection is transposed.", "output", pattern="square kernel transposed")
m("all-transposed", "weights", ('y = x @ self.state[f"{name}.weight"].t()', 'y = x @ self.state[f"{name}.weight"]'),
  "Every kernel is transposed.", "q", pattern="square kernels transposed")
m("key-no-bias", "bias", (KEY, 'key_layer = self.transpose_for_scores(source @ self.state["key.weight"].t())'),
  "The bias of the keys is lost, which softmax hides.", "k", in_output=False, pattern="a constant vector is missing")
m("value-no-bias", "bias", (VALUE, 'value_layer = self.transpose_for_scores(source @ self.state["value.weight"].t())'),
  "The bias of the values is lost.", "v", pattern="a constant vector is missing")
m("key-bias-for-query", "bias", (QUERY,
    'query_layer = self.transpose_for_scores(hidden_states @ self.state["query.weight"].t() + '
      'self.state["key.bias"])'), "Queries have the keys' bias.", "q", pattern="a different constant vector")
m("cross-query-source", "axes", ('self.linear("value", source)', 'self.linear("value", source.flip(1))'),
  "Values are made of the tokens in reverse.", "v", case="cross", pattern="tokens reversed")
m("cross-keys-of-self", "axes", (KEY, KEY.replace("source", "hidden_states")),
  "Cross-attention makes its keys of the decoder's tokens.", "k", case="cross-square", pattern="k of the query input")
m("square-split", "axes", (SPLIT, SPLIT.replace("permute(0, 2, 1, 3)", "permute(0, 1, 2, 3)")),
  "Heads are not brought forward, which T = N lets pass.", "q", case="bert-square", pattern="axes T and N exchanged")
m("softmax-axis", "softmax", (SOFTMAX, SOFTMAX.replace("dim=-1", "dim=-2")), "The softmax runs over the queries.",
  "attn_weights", case="bert-full")
m("softmax-bf16", "precision", (SOFTMAX, SOFTMAX.replace("attention_scores, dim", "attention_scores.bfloat16(), dim")),
  "The softmax is computed in bfloat16.", "attn_weights", pattern="bfloat16")
m("weights-fp16", "precision", ('self.state[f"{name}.weight"].t()', 'self.state[f"{name}.weight"].half().float().t()'),
  "Weights were saved in float16.", "q", pattern="float16 weights")
m("context-permute", "axes", (PERMUTE, "context_layer = context_layer.permute(0, 2, 3, 1).contiguous()"),
  "Heads are combined with the features outside.", "output", case="bert-square", pattern="features permuted")
m("heads-reversed", "heads", (CONTEXT, "context_layer = torch.matmul(attention_probs, value_layer.flip(1))"),
  "Heads take each other's values, in reverse.", "context", pattern="permutation of heads of v", limited={"N": (0, 2)})
m("dropout-on", "softmax", (CONTEXT,
    "torch.manual_seed(1)\n        context_layer = torch.matmul(nn.functional.dropout(attention_probs, 0.1), "
      "value_layer)"), "Dropout of the weights is left on.", "context", pattern="some weights 0, the others times 1.1111")
m("odd-positions", "exotic", (KEY, f"{KEY}\n        key_layer[:, :, 1::2] = key_layer[:, :, 1::2].roll(1, -1)"),
  "Keys at odd positions have their features rolled by one.", "k", limited={"S": (1, 3, 5)},
  pattern="permutation of features")
m("value-rows", "exotic", (VALUE, f"{VALUE}\n        value_layer = value_layer[..., [1, 0, 2, 3, 4, 5, 6, 7]]"),
  "Two rows of the value projection are exchanged in each head.", "v", limited={"H": (0, 1)},
  pattern="permutation of features")
m("output-gain", "gain", (DENSE, f"{DENSE} * 0.99"), "The output is 1 % too small.", "output", pattern="factor 0.99")
