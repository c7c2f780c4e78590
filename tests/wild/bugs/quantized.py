"""Bugs in a cache of 8 or 4 bits: its scales, its zero points, and what is rounded when."""

from wild.bugs.writer import Writer

# A table with one record per line, each edit next to its description.
# fmt: off
m = Writer("quantized", "cache-fp8")

FIXED = "torch.tensor(scales).view(1, -1, 1, 1)"
KEYS = 'Store(q, q.scale_per_of("keys"), q.key_scales)'
VALUES = 'Store(q, q.scale_per_of("values"), q.value_scales)'
NUMBERS = "self.narrow((x - zero) / scale)"
SCALES = "self.scales.append(scale.expand_as(x))"
READ = "x = numbers * torch.cat(self.scales, 2) + torch.cat(self.zeros, 2)"
BOTH = "keys, values = key_store.read(x.dtype), value_store.read(x.dtype)"
HEAD = '"head": (0, 2, 3)'
TOKEN_HEAD = '"token_head": (3,)'
KEPT = "if self.group in OF_ALL_TOKENS:"
ROUND = "return x.round().clamp(*self.q.limits).to(torch.int16)"
FLOAT8 = "getattr(torch, self.q.dtype)"
ORDER = "before_rope = key_store.q.before_rope"
TURN = "    if before_rope:\n        keys ="

FIRST = "step0.cache.keys"
KINDS = (("", "cache-fp8", "float32"), ("-heads", "cache-fp8-heads", "float32"))
"""Calibrated scales of all keys, and of each head. In 16 bits float8 hides most of their bugs."""

for suffix, case, dtype in KINDS:
    of = {"case": case, "dtype": dtype}
    m(f"scales-not-loaded{suffix}", "cache", (FIXED, f"torch.ones_like({FIXED})"),
      "The scales of the checkpoint are not loaded, and are 1.", FIRST, pattern="scales 1", **of)
    m(f"scales-exchanged{suffix}", "cache", (KEYS, KEYS.replace("q.key", "q.value")),
      "Keys have the scales of values.", FIRST, pattern="scales of values", **of)
    m(f"read-twice{suffix}", "cache", (READ, READ.replace("numbers *", "numbers * torch.cat(self.scales, 2) *")),
      "The kernel applies the scales that were applied before it.", FIRST, pattern="scales squared", **of)
    m(f"read-unscaled{suffix}", "cache", (READ, "x = numbers"), "What is read is not multiplied by its scales.", FIRST,
      pattern="scales missing", **of)
    m(f"not-rounded{suffix}", "cache", (NUMBERS, "(x - zero) / scale"), "Nothing is rounded.", FIRST,
      pattern="not rounded", **of)
    m(f"other-layer{suffix}", "cache", (FIXED, f"{FIXED} * 1.7"), "The scales are those of another layer.", FIRST,
      pattern="scales times 1.7", **of)
    m(f"read-as-keys{suffix}", "cache", (BOTH, f"value_store.scales = [*key_store.scales]\n    {BOTH}"),
      "Values are read with the scales of keys.", "step0.cache.values", pattern="scales of keys", **of)
    m(f"e5m2{suffix}", "cache", (FLOAT8, "torch.float8_e5m2"), "The cache has the other float8.", FIRST,
      pattern="rounded to e5m2", **of)
m("first-head", "cache", (FIXED, "torch.tensor(scales[:1]).view(1, -1, 1, 1)"),
  "All heads have the scales of the first.", FIRST, case="cache-fp8-heads", pattern="scales of head 0", limited={"K": (1,)})

for suffix, case, dtype in (("", "cache-int8-token", "float32"), ("-bf16", "cache-int8-token", "bfloat16")):
    of = {"case": case, "dtype": dtype}
    m(f"stored-unscaled{suffix}", "cache", (NUMBERS, "self.narrow(x)"), "Keys and values are stored without their scales.",
      FIRST, pattern="stored undivided", **of)
    m(f"scales-unwritten{suffix}", "cache", (SCALES, "self.scales.append(torch.zeros_like(x))"),
      "The memory of the scales is never written.", FIRST, pattern="scales 0", **of)
m("token-without-head", "cache", (TOKEN_HEAD, '"token_head": (1, 3)'), "All heads of a token share a scale.", FIRST,
  case="cache-int8-token", pattern="a scale per token")
m("truncated", "cache", (ROUND, ROUND.replace("round", "trunc")), "Values are cut off.", FIRST,
  case="cache-int8-token", pattern="toward zero")
m("scales-of-each-call", "cache", (KEPT, "if False:"), "Each call computes new scales.", "step1.cache.keys",
  case="cache-int8-head", pattern="scales of the call")
m("head-as-channel", "cache", (HEAD, '"head": (0, 2)'), "Each feature of a head has a scale.", FIRST,
  case="cache-int8-head", pattern="a scale per channel")
m("head-as-tensor", "cache", (HEAD, '"head": (0, 1, 2, 3)'), "All heads share a scale.", FIRST, case="cache-int8-head",
  pattern="a scale per tensor")
m("after-rope", "cache", (ORDER, "before_rope = False"), "Keys are rotated before they are stored.", FIRST,
  case="cache-before-rope", pattern="rounded after RoPE")
m("not-rotated", "cache", (TURN, "    if False:\n        keys ="), "What is read is not rotated.", FIRST,
  case="cache-before-rope", pattern="not rotated")

for suffix, case in (("", "cache-int8-zero"), ("-kivi", "cache-kivi")):
    m(f"zero-lost{suffix}", "cache", (READ, "x = numbers * torch.cat(self.scales, 2)"), "The zero points are not added.",
      FIRST, case=case, pattern="zero points missing")
    m(f"zero-sign{suffix}", "cache", (READ, READ.replace("+", "-")), "The zero points are subtracted.", FIRST, case=case,
      pattern="zero points negative")
    m(f"zero-not-stored{suffix}", "cache", (NUMBERS, "self.narrow(x / scale)"),
      "The zero points are not subtracted from what is stored.", FIRST, case=case, pattern="stored unshifted")
    m(f"zero-scale-lost{suffix}", "cache", (READ, READ.replace("numbers * torch.cat(self.scales, 2)", "numbers")),
      "The stored values are not multiplied by their scales.", FIRST, case=case, pattern="scales missing")
m("zero-unscaled", "cache", (READ, READ.replace("torch.cat(self.zeros, 2)", "(torch.cat(self.zeros, 2) / torch.cat(self.scales, 2)).round()")),
  "The zero points are subtracted after the scale.", FIRST, case="cache-int8-zero", pattern="zero points unscaled")
m("kivi-groups", "cache", (KEYS, KEYS.replace("keys", "values", 1)), "Keys have a scale for each token, as values have.",
  FIRST, case="cache-kivi", pattern="groups of values")
