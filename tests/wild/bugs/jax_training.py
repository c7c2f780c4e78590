"""Bugs of a training step in JAX."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("jax_training", "train-gqa-causal", "gradients", in_output=False)

STOP = "jax.lax.stop_gradient"
WEIGHTS = "weights = softmax(scores, mask).astype(q.dtype)"
CONTEXT = 'return jnp.einsum("bkgts,bksh->bkgth", weights, v), weights'
SCORES = 'scores = jnp.einsum("bkgth,bksh->bkgts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5\n    weights'
QKV = "return q, k, v\n"
BIAS = 'y = y + w[f"{name}.bias"]'
KEYS = "keys, values = k[:, :, block].astype(jnp.float32), v[:, :, block].astype(jnp.float32)"
AGAIN = "weights = jnp.exp(scores - lse[:, :, :, own])"

m("weights-stopped", "gradient", (WEIGHTS, f"weights = {STOP}(softmax(scores, mask)).astype(q.dtype)"),
  "No gradient flows through the weights.", "grad.q")
m("k-stopped", "gradient", (SCORES, SCORES.replace("q, k)", f"q, {STOP}(k))")), "No gradient flows to the keys.", "grad.k")
m("k-stopped-bf16", "gradient", (SCORES, SCORES.replace("q, k)", f"q, {STOP}(k))")),
  "The same in bfloat16, with gradients alone.", "grad.k_proj.weight", dtype="bfloat16", recording="gradients-alone")
m("v-stopped", "gradient", (CONTEXT, CONTEXT.replace("weights, v)", f"weights, {STOP}(v))")),
  "No gradient flows to the values.", "grad.v")
m("qkv-stopped", "gradient", (QKV, f"return q, {STOP}(k), v\n"), "k_proj is frozen.", "grad.k_proj.weight")
m("biases-stopped", "gradient", (BIAS, f'y = y + {STOP}(w[f"{{name}}.bias"])'), "q, k and v have frozen biases.",
  "grad.q_proj.bias")
m("ring-stale", "gradient", (KEYS, KEYS.replace("block", "own")),
  "Each rank computes every step with the keys and values that it saved.", "grad.v", case="train-ring")
m("lse-not-merged", "gradient", (AGAIN, "weights = jax.nn.softmax(scores, axis=-1)"),
  "The log-sum-exp of the backward pass is that of a block.", "grad.v", case="train-ring")
