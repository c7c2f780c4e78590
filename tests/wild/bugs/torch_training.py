"""Gradients that are stopped in a training step in torch."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("torch_training", "train", "gradients", in_output=False)

REPEAT = "keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)"
ROPE = "q, k = rotate(q, spec.rope.theta), rotate(k, spec.rope.theta)"
WEIGHTS = "context = weights @ values"
VARIANCE = "variance = x.float().pow(2).mean(-1, keepdim=True)"
GATE = "y = y * torch.sigmoid(gate)"
INPUTS = "x_q, x_k, x_v = x, x, x"
LINEAR = 'return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))'
BIAS = 'scores = scores + w["bias"]'
Y = "y = context.transpose(1, 2).flatten(2)"
FIRST = "torch.arange(keys.shape[1])[:, None, None] % group == 0"


def only_first(name):
    return f"{REPEAT}\n    {name} = torch.where({FIRST}, {name}, {name}.detach())"


m("k-detached", "gradient", (ROPE, f"{ROPE}\n        k = k.detach()"), "The keys are detached.", "grad.k")
m("v-detached", "gradient", (REPEAT, REPEAT.replace("v.repeat", "v.detach().repeat")),
  "The values are detached before they are repeated.", "grad.v")
m("weights-detached", "gradient", (WEIGHTS, "context = weights.detach() @ values"),
  "The attention weights are detached.", "grad.attn_weights")
m("weights-detached-alone", "gradient", (WEIGHTS, "context = weights.detach() @ values"),
  "The attention weights are detached, and only gradients are compared.", "grad.q_norm.weight",
  recording="gradients-alone", dtype="bfloat16")
m("norm-statistics", "gradient", (VARIANCE, VARIANCE.replace("x.float()", "x.float().detach()")),
  "The mean square of the norms is detached.", "grad.q_proj.weight")
m("norm-input", "gradient", ("x = (x.float() * torch.rsqrt", "x = (x.float().detach() * torch.rsqrt"),
  "The features that a norm divides are detached, not their mean square.", "grad.q_proj.weight")
m("three-of-four-keys", "gradient", (REPEAT, only_first("keys")),
  "Keys get gradients of the first query head of a group alone.", "grad.k")
m("three-of-four-values", "gradient", (REPEAT, only_first("values")),
  "Values get gradients of the first query head of a group alone.", "grad.v")
m("three-of-four-heads", "gradient",
  (REPEAT, only_first("keys") + f"\n    values = torch.where({FIRST}, values, values.detach())"),
  "Keys and values get gradients of the first query head of a group alone.", "grad.v")
m("gate-detached", "gradient", (GATE, "y = y * torch.sigmoid(gate.detach())"), "The gate is detached.",
  "grad.gate_proj.weight")
m("kv-input-detached", "gradient", (INPUTS, "x_q, x_k, x_v = x, x.detach(), x.detach()"),
  "The input of keys and values is detached.", "grad.query")
m("v-input-detached", "gradient", (INPUTS, "x_q, x_k, x_v = x, x, x.detach()"), "The input of values is detached.",
  "grad.query")
m("biases-detached", "gradient", (LINEAR,
    'bias = w.get(f"{name}.bias")\n        return F.linear(x, w[f"{name}.weight"], None if bias is None else bias.detach())'),
  "No bias of a projection is trained.", "grad.out_proj.bias")
m("score-bias-detached", "gradient", (BIAS, 'scores = scores + w["bias"].detach()'),
  "The bias of the scores is not trained.", "grad.bias", case="train-biased")
m("context-detached", "gradient", (Y, "y = context.detach().transpose(1, 2).flatten(2)"), "The context is detached.",
  "grad.q_norm.weight", recording="gradients-alone")
