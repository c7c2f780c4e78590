"""Bugs in the port that decodes token by token."""

from wild.bugs.writer import Writer

# A table with one record per line, each edit next to its description.
# fmt: off
m = Writer("decode", "decode")

FREQ = "freq = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)"
TURN = "return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)"
WRITE = "return jax.lax.dynamic_update_slice(cache, new, (start, 0, 0))"
POSITIONS = "positions = lengths[:, None] + jnp.arange(t)[None, :]"
ROPEQ = "q = rope(q, positions + first_position, spec.rope.theta)"
ROPEK = "k = rope(k, positions + first_position, spec.rope.theta)"
KEYS = "keys = jax.vmap(write)(keys, k, lengths)"
VALUES = "values = jax.vmap(write)(values, v, lengths)"
LENGTHS = "lengths = lengths + new_lengths"
REPEAT = "k_all, v_all = jnp.repeat(keys, group, axis=2), jnp.repeat(values, group, axis=2)"
SCORES = 'scores = jnp.einsum("btnh,bsnh->bnts", q.astype(work), k_all.astype(work)) * spec.head_dim**-0.5'
MASK = "mask = jnp.arange(slots)[None, None, :] > positions[:, :, None]"
WHERE = "scores = jnp.where(mask[:, None], -jnp.inf, scores)"
PROBS = "probs = jax.nn.softmax(scores, axis=-1).astype(x.dtype)"
CONTEXT = 'context = jnp.einsum("bnts,bsnh->btnh", probs, v_all)'
OUT = 'out = context.reshape(b, t, -1) @ w["out_proj.weight"].T'
RETURN = "return (keys, values, lengths), rec"
TOKENS = "tokens = x[:, start : start + chunk]"
INIT = "return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((batch,), jnp.int32)"
REC = 'rec["cache.keys"], rec["cache.values"] = keys.swapaxes(1, 2), values.swapaxes(1, 2)'
RAGGED = "decode-ragged"

m("slot-late", "cache", (WRITE, "return jax.lax.dynamic_update_slice(cache, new, (start + 1, 0, 0))"),
  "Keys and values are written one slot late.", "step0.cache.keys", pattern="slots + 1")
m("slot-zero", "cache", (WRITE, "return jax.lax.dynamic_update_slice(cache, new, (0, 0, 0))"),
  "Every call writes from slot 0 on.", "step1.cache.keys", pattern="slot 0 in each call", limited={"S": (0, 4)})
m("slot-one-early", "cache", (KEYS, "keys = jax.vmap(write)(keys, k, jnp.maximum(lengths - 1, 0))"),
  "Keys of steps overwrite the last one.", "step1.cache.keys", limited={"S": (3, 4)}, pattern="slots - 1")
m("clamped-at-end", "cache", ("cache = init_cache(spec, case.batch, case.capacity, x.dtype)",
    "cache = init_cache(spec, case.batch, case.capacity, x.dtype)\n    cache = (cache[0], cache[1], cache[2] + 8)"),
  "Lengths were not reset, and the writes are clamped at the end of the cache.", "step0.mask", pattern="slots at the end")
m("values-not-written", "cache", (VALUES, "values = jnp.where(t > 1, jax.vmap(write)(values, v, lengths), values)"),
  "Values of steps are not written.", "step1.cache.values", limited={"S": (4,)}, pattern="slot stays 0")
m("values-get-keys", "cache", (VALUES, "values = jax.vmap(write)(values, k, lengths)"),
  "Keys are written into both caches.", "step0.cache.values", pattern="cached v is k")
m("row-of-first", "cache",
  (KEYS, "keys = jax.vmap(write)(keys, k, lengths)\n    keys = jnp.broadcast_to(keys[:1], keys.shape)"),
  "All sequences get the keys of the first.", "step0.cache.keys", limited={"B": (1,)},
  pattern="sequence 1 has the keys of sequence 0")
m("length-of-first", "cache", (KEYS, "keys = jax.vmap(write, (0, 0, None))(keys, k, lengths[0])"),
  "All sequences write where the first does.", "step1.cache.keys", case=RAGGED, limited={"B": (1,)},
  pattern="slots of sequence 0")
m("length-of-longest", "cache",
  (POSITIONS, "positions = lengths.max() + jnp.arange(t)[None, :] + 0 * lengths[:, None]"),
  "Positions are those of the longest sequence.", "step1.mask", case=RAGGED, limited={"B": (1,)},
  pattern="positions of the longest")
m("padding-counted", "cache", (LENGTHS, "lengths = lengths + t"), "Padding counts as cached.", "step0.cache.lengths",
  case=RAGGED, limited={"B": (1,)}, pattern="lengths of the chunk")
m("lengths-late", "cache", (LENGTHS, "lengths = lengths + jnp.maximum(new_lengths - 1, 1)"),
  "A prompt counts one token less than it has.", "step0.cache.lengths", pattern="lengths - 1")
m("stale-values", "cache",
  (REPEAT, "k_all, v_all = jnp.repeat(keys, group, axis=2), jnp.repeat(cache[1], group, axis=2)"),
  "The values that are looked at are those before the write.", "step0.context", pattern="stale values")
m("stale-keys", "cache",
  (REPEAT, "k_all, v_all = jnp.repeat(cache[0], group, axis=2), jnp.repeat(values, group, axis=2)"),
  "The keys that are looked at are those before the write.", "step0.scores", pattern="stale keys")
m("unrotated-keys", "cache", (ROPEK, "pass"), "Keys are cached without their rotation.", "step0.k",
  pattern="k not rotated")
m("rotated-again", "cache", (REPEAT,
    "k_all, v_all = jnp.repeat(rope(keys, jnp.arange(slots)[None], spec.rope.theta), group, axis=2), "
      "jnp.repeat(values, group, axis=2)"), "Cached keys are rotated again when they are looked at.", "step0.scores",
  pattern="positions of k times 2")
m("positions-from-0", "cache", (POSITIONS, f"{POSITIONS}\n    first_position = first_position - lengths[:, None]"),
  "Positions of RoPE begin at 0 in every call.", "step1.q", pattern="positions 0 in each call")
m("query-position-next", "cache", (ROPEQ, "q = rope(q, positions + first_position + 1, spec.rope.theta)"),
  "Queries are turned by one position more.", "step0.q", pattern="positions of q + 1")
m("mask-fresh-slot", "mask", (MASK, MASK.replace(" > ", " >= ")), "The newest key is hidden.", "step0.mask",
  pattern="mask shifted by one")
m("mask-sees-slot", "mask", (MASK, MASK.replace("positions[:, :, None]", "positions[:, :, None] + 1")),
  "One empty slot is seen.", "step0.mask", pattern="mask shifted by one")
m("mask-lengths-only", "mask",
  (MASK, "mask = jnp.arange(slots)[None, None, :] >= lengths[:, None, None] + jnp.zeros((1, t, 1), int)"),
  "A prompt is not causal in itself.", "step0.mask", limited={"T": (0, 1, 2)}, pattern="causality ignored within a call")
m("mask-lost", "mask", (WHERE, "pass"), "Empty slots, whose scores are 0, take part.", "step0.attn_weights",
  pattern="mask ignored")
m("mask-row-of-first", "mask",
  (MASK, MASK.replace("positions[:, :, None]", "positions[:1, :, None] + 0 * positions[:, :, None]")),
  "All sequences have the mask of the first.", "step1.mask", case=RAGGED, limited={"B": (1,)},
  pattern="mask of sequence 0")
m("group-tile", "heads",
  (REPEAT, "k_all, v_all = jnp.tile(keys, (1, 1, group, 1)), jnp.tile(values, (1, 1, group, 1))"),
  "Key/value heads are tiled.", "step0.scores", limited={"N": (1, 2)}, pattern="permutation of key/value heads")
m("scale-slots", "scale", (SCORES, SCORES.replace("spec.head_dim**-0.5", "slots**-0.5")),
  "The scale is that of the slots.", "step0.scores", pattern="factor 0.89443")
m("theta", "rope", ("    half = x.shape[-1] // 2\n", "    half, theta = x.shape[-1] // 2, 1e6\n"),
  "theta is a million.", "step0.q", pattern="theta 1000000", limited={"T": (1, 2, 3)})
m("halves-swapped", "rope",
  (TURN, TURN.replace("[a * cos - b * sin, b * cos + a * sin]", "[b * cos + a * sin, a * cos - b * sin]")),
  "The rotated halves are exchanged in q and k, which no score shows.", "step0.q", in_output=False,
  pattern="permutation of features")
m("cache-fp16", "cache", (RETURN, "return (keys.astype(jnp.float16).astype(keys.dtype), values, lengths), rec"),
  "Keys are kept in float16 between calls.", "step1.cache.keys", limited={"S": (0, 1, 2, 3)}, pattern="float16 keys")
m("cache-int8", "cache", (RETURN, "return (keys, jnp.round(values * 64) / 64, lengths), rec"),
  "Values are quantised between calls.", "step1.cache.values", limited={"S": (0, 1, 2, 3)},
  pattern="values in steps of 1/64")
m("tokens-again", "exotic", (TOKENS, "tokens = x[:, start : start + chunk] if chunk > 1 else x[:, start - 1 : start]"),
  "Each step is given the token before.", "step1.q", pattern="tokens - 1")
m("key-head-1", "exotic", (KEYS, f"{KEYS}\n    keys = keys.at[:, 0, 1].set(0.0)"), "Slot 0 of key head 1 is lost.",
  "step0.cache.keys", limited={"K": (1,), "S": (0,)}, pattern="factor 0")
m("second-sequence", "exotic", (OUT, f"{OUT}\n    out = out.at[1].multiply(1.02)"),
  "The output of sequence 1 is 2 % too large.", "step0.output", limited={"B": (1,)}, pattern="factor 1.02")
m("from-third-step", "exotic",
  (ROPEQ, f"{ROPEQ}\n        q = jnp.where(positions[:, :, None, None] >= 5, q * 1.1, q)"),
  "Queries from position 5 on are 10 % too large.", "step2.q", pattern="factor 1.1 from token 5 on")
m("softmax-bf16", "precision", (PROBS, "probs = jax.nn.softmax(scores.astype(jnp.bfloat16), axis=-1).astype(x.dtype)"),
  "The softmax is in bfloat16.", "step0.attn_weights", pattern="bfloat16")
