"""Bugs in the port in the style of flax.linen."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("flax_linen", "bert")

KERNEL = 'params[name] = {"kernel": kernel.reshape(kernel.shape[0], heads[name], spec.head_dim)}'
LOAD = 'kernel = parity.to_jax(p.weights[f"{short}_proj.weight"]).T\n        params'
OUTLOAD = 'params["out"] = {"kernel": kernel.reshape(spec.num_heads, spec.head_dim, spec.d_model)}'
OUTT = 'kernel = parity.to_jax(p.weights["out_proj.weight"]).T'
BIAS = 'params[name]["bias"] = bias.reshape(heads[name], spec.head_dim)'
DENSE = 'y = jnp.einsum("bte,enh->btnh", x, params["kernel"])'
CAUSAL = "jnp.arange(q_len)[:, None] >= jnp.arange(kv_len)[None, :]"
PADDING = "(jnp.arange(kv_len)[None, :] < lengths[:, None])[:, None, None, :]"
SCALE = "query = query / jnp.sqrt(depth).astype(query.dtype)"
SCORES = 'attn_weights = jnp.einsum("bqhd,bkhd->bhqk", query, key)\n    if'
WHERE = "attn_weights = jnp.where(mask, attn_weights, big_neg)"
SOFTMAX = "attn_weights = jax.nn.softmax(attn_weights)"
REPEATK = "key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)"
CONTEXT = 'x = jnp.einsum("bhqk,bkhd->bqhd", attn_weights, value)'
OUT = 'out = jnp.einsum("bthd,hde->bte", x, params["out"]["kernel"])'
AND = "combined = jnp.logical_and(combined, mask)"
VALUE = 'value = dense_general(params["value"], inputs_kv)'
KEY = 'key = dense_general(params["key"], inputs_kv)'
QUERY = 'query = dense_general(params["query"], inputs_q)'
LENGTHS = "make_padding_mask(jnp.array(case.key_padding_lengths), case.key_len)"
OUTBIAS = 'out = out + params["out"]["bias"]'

m("kernel-not-transposed", "weights", (LOAD, LOAD.replace(".T\n", "\n")),
  "q, k and v kernels are copied without a transpose.", "q", pattern="square kernels transposed")
m("out-not-transposed", "weights", (OUTT, OUTT.replace(".T", "")), "The output kernel is copied without a transpose.",
  "output", pattern="square kernel transposed")
m("kernel-head-last", "heads",
  (KERNEL, 'params[name] = {"kernel": kernel.reshape(kernel.shape[0], spec.head_dim, heads[name]).swapaxes(1, 2)}'),
  "Kernels are split with the features outside.", "q", pattern="features permuted across heads")
m("out-head-last", "heads",
  (OUTLOAD, 'params["out"] = {"kernel": kernel.reshape(spec.head_dim, spec.num_heads, -1).swapaxes(0, 1)}'),
  "The output kernel is split with the features outside.", "output", pattern="features permuted")
m("kernel-wrong-reshape", "weights",
  (KERNEL, 'params[name] = {"kernel": kernel.reshape(heads[name], kernel.shape[0], spec.head_dim).swapaxes(0, 1)}'),
  "Kernels are reshaped (N, E, H), without a transpose of their own.", "q", pattern="kernel elements permuted")
m("bias-transposed", "bias", (BIAS, 'params[name]["bias"] = bias.reshape(spec.head_dim, heads[name]).T'),
  "Biases are split with the features outside.", "q", pattern="bias elements permuted")
m("bias-first-head", "bias", (BIAS, 'params[name]["bias"] = bias.reshape(heads[name], spec.head_dim)[:1]'),
  "The bias of the first head is that of all.", "q", limited={"N": (1, 2)})
m("no-biases", "bias", ('    if "bias" in params:\n        y = y + params["bias"]\n', ""), "q, k and v have no bias.",
  "q", pattern="a constant vector is missing")
m("out-no-bias", "bias", (OUTBIAS, "pass"), "The output has no bias.", "output", pattern="a constant vector is missing")
m("out-bias-each-head", "bias", (OUTBIAS, 'out = out + 3 * params["out"]["bias"]'),
  "The output's bias is added once for each head.", "output", pattern="bias times 3")
m("causal-strict", "mask", (CAUSAL, CAUSAL.replace(">=", ">")), "No token sees itself.", "mask", case="causal-padded",
  pattern="mask shifted by one")
m("causal-flipped", "mask", (CAUSAL, CAUSAL.replace(">=", "<=")), "Tokens see later ones only.", "mask",
  case="causal-padded", pattern="mask transposed")
m("causal-lost", "mask", ("make_causal_mask(case.seq_len, case.key_len) if case.is_causal else None", "None"),
  "The causal mask is not passed.", "mask", case="causal-padded", pattern="causality ignored")
m("padding-lost", "mask", (LENGTHS, "None"), "The padding mask is not passed.", "mask", case="causal-cross",
  pattern="padding ignored", limited={"B": (1,)})
m("padding-inverted", "mask", (PADDING, PADDING.replace("<", ">=")), "True hides in this padding mask.", "mask",
  pattern="mask inverted")
m("masks-or", "mask", (AND, AND.replace("and", "or")), "Masks are combined by or.", "mask", case="causal-padded")
m("torch-polarity", "mask", (WHERE, "attn_weights = jnp.where(mask, big_neg, attn_weights)"),
  "True hides, as in torch's layers.", "attn_weights", pattern="mask inverted")
m("mask-as-bias", "mask", (WHERE, "attn_weights = attn_weights + mask"), "The boolean mask is added.", "attn_weights",
  limited={"B": (1,)}, pattern="seen scores gain 1")
m("big-neg-small", "mask", (WHERE, "attn_weights = jnp.where(mask, attn_weights, -2.0)"), "Hidden scores are -2.",
  "attn_weights", limited={"B": (1,)}, pattern="penalty -2")
m("mask-next-sequence", "mask", (PADDING, PADDING.replace("lengths[:, None]", "jnp.roll(lengths, 1)[:, None]")),
  "Each sequence has the length of the one before.", "mask", pattern="sequences exchanged")
m("query-padding", "mask", (PADDING, "(jnp.arange(kv_len)[None, :] < lengths[:, None])[:, None, :, None]"),
  "Queries are hidden instead of keys.", "mask", pattern="mask transposed", limited={"B": (1,)})
m("scale-heads", "scale", ("depth = query.shape[-1]", "depth = query.shape[-2]"), "The depth is the number of heads.",
  "scores", pattern="factor 1.633")
m("scale-integer", "scale", (SCALE, "query = query / depth"), "Queries are divided by the depth and not by its root.",
  "scores", pattern="factor 0.35355")
m("scale-both", "scale", (SCALE, "query, key = query / jnp.sqrt(depth), key / jnp.sqrt(depth)"),
  "Queries and keys are both scaled.", "scores", pattern="factor 0.35355")
m("bias-not-added", "bias", ("attn_weights = attn_weights + bias.astype(attn_weights.dtype)", "pass"),
  "The bias of the scores is ignored.", "scores", case="bert-biased", pattern="bias missing")
m("bias-subtracted", "bias",
  ("attn_weights + bias.astype(attn_weights.dtype)", "attn_weights - bias.astype(attn_weights.dtype)"),
  "The bias of the scores is subtracted.", "scores", case="bert-biased", pattern="bias times -1")
m("scores-transposed", "axes", (SCORES, SCORES.replace("->bhqk", "->bhkq")),
  "Scores come out with keys before queries.", "scores", pattern="scores transposed")
m("softmax-heads", "softmax", (SOFTMAX, "attn_weights = jax.nn.softmax(attn_weights, axis=1)"),
  "The softmax runs over the heads.", "attn_weights")
m("softmax-first", "softmax", (SOFTMAX, "attn_weights = jax.nn.softmax(attn_weights, axis=-2)"),
  "The softmax runs over the queries.", "attn_weights", case="gpt")
m("softmax-bf16", "precision", (SOFTMAX, "attn_weights = jax.nn.softmax(attn_weights.astype(jnp.bfloat16))"),
  "The softmax is computed in bfloat16.", "attn_weights", pattern="bfloat16")
m("scores-bf16", "precision",
  (SCALE, "query, key = (query / jnp.sqrt(depth)).astype(jnp.bfloat16), key.astype(jnp.bfloat16)"),
  "Scores are computed in bfloat16, the usual dtype argument.", "scores", pattern="bfloat16")
m("inputs-bf16", "precision",
  (DENSE, DENSE.replace("x, params", "x.astype(jnp.bfloat16).astype(jnp.float32), params")),
  "Inputs are cast to bfloat16.", "q", pattern="bfloat16 inputs")
m("value-weights-fp16", "precision", (VALUE,
    'value = dense_general({k: w.astype(jnp.float16).astype(w.dtype) for k, w in params["value"].items()}, '
      'inputs_kv)'), "The value projection was saved in float16.", "v", pattern="float16 weights")
m("repeat-tile", "heads", (REPEATK, "key = jnp.tile(key, (1, 1, query.shape[2] // key.shape[2], 1))"),
  "Keys are tiled, values repeated.", "scores", case="gqa", limited={"N": (1, 2)}, pattern="permutation of key heads")
m("values-of-query", "weights", (VALUE, VALUE.replace("inputs_kv", "inputs_q")),
  "Values are made of the query's tokens.", "v", case="cross-square", pattern="v of the query input")
m("keys-by-value", "weights", (KEY, KEY.replace('"key"', '"value"')), "Keys are projected by the value's kernel.", "k",
  pattern="k is v")
m("context-einsum", "axes", (CONTEXT, 'x = jnp.einsum("bhkq,bkhd->bqhd", attn_weights, value)'),
  "The weights are taken transposed.", "context", pattern="weights transposed")
m("out-einsum", "axes", (OUT, 'out = jnp.einsum("bthd,dhe->bte", x, params["out"]["kernel"].reshape(8, 3, -1))'),
  "The output kernel is taken as (H, N, E).", "output", pattern="features permuted")
m("batch-mixed", "exotic", (QUERY, f"{QUERY}\n    query = query.at[1, 2].set(query[0, 2])"),
  "Token 2 of sequence 1 has the query of sequence 0.", "q", limited={"B": (1,), "T": (2,)},
  pattern="a query of the other sequence")
m("head-2-mean", "exotic", (CONTEXT, f"{CONTEXT}\n    x = x.at[:, :, 2].set(x.mean(axis=2))"),
  "The context of head 2 is the mean of all heads.", "context", limited={"N": (2,)}, pattern="mean of heads")
m("weights-gain", "gain", (SOFTMAX, "attn_weights = 1.01 * jax.nn.softmax(attn_weights)"),
  "Weights are 1 % too large.", "attn_weights", pattern="factor 1.01")
