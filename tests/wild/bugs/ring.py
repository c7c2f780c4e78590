"""Bugs in a ring cache."""

from wild.bugs.writer import Writer

# A table with one record per line, each edit next to its description.
# fmt: off
m = Writer("ring", "ring-six", "hooks")

READ = "    keys, values, tokens = ring.read()\n"
ONE = "        return ring.read()\n"
RING = "Ring(spec, spec.window_size,"
NOTED = '    rec["q"], rec["k"], rec["v"] = q, k, v\n'

for suffix, dtype in (("", "float32"), ("-bf16", "bfloat16")):
    of = {"dtype": dtype}
    m(f"lost-after-wrap{suffix}", "cache",
      (READ, f"{READ}    if positions[0] >= len(ring.tokens):\n        n = positions[0] % len(ring.tokens)\n"
             "        keys, values, tokens = ring.keys[:, :, :n].clone(), ring.values[:, :, :n].clone(), "
             "ring.tokens[:n].clone()\n"),
      "A call of several tokens keeps the slots before the next one alone.", "step6.context",
      pattern="older tokens of the window hidden", **of)
    m(f"fresh-for-chunks{suffix}", "cache",
      (READ, f"{READ}    keys, values, tokens = keys[:, :, :0], values[:, :, :0], tokens[:0]\n"),
      "A call of several tokens attends to its own alone.", "step6.context", pattern="earlier tokens hidden", **of)
    m(f"one-slot-short{suffix}", "cache", (RING, "Ring(spec, spec.window_size - 1,"),
      "The ring has one slot too few.", "step2.context", pattern="window - 1 in steps", **of)
    m(f"doubled{suffix}", "cache",
      (ONE, "        keys, values, tokens = ring.read()\n        if len(tokens) < len(ring.tokens):\n"
            "            return keys, values, tokens\n        return (torch.cat([keys, k], dim=2), "
            "torch.cat([values, v], dim=2), torch.cat([tokens, positions]))\n"),
      "A step appends its token to a full ring that has it already.", "step2.context", pattern="own key twice", **of)
    m(f"masked-by-slot{suffix}", "mask",
      (READ, f"{READ}    if len(tokens) == len(ring.tokens):\n        keys, values = ring.keys.clone(), ring.values.clone()\n"),
      "The ring is not brought into order, and the mask takes it as if it were.", "step6.context",
      pattern="keys rolled under the mask", **of)
    m(f"positions-of-slots{suffix}", "rope",
      (NOTED, "    q = rotate(q, positions % spec.window_size - positions, spec.rope.theta)\n"
              f"    k = rotate(k, positions % spec.window_size - positions, spec.rope.theta)\n{NOTED}"),
      "Queries and keys are turned by their slot.", "step3.q", pattern="positions modulo 6", **of)
