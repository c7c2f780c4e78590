"""Bugs of generation with padding on the left."""

from wild.bugs.writer import Writer

# A table with one record per line, each edit next to its description.
# fmt: off
m = Writer("left", "left")

POSITIONS = "positions = (real.cumsum(dim=-1) - 1).clamp(min=0)[:, start : start + t]"
SLOTS = "(start + torch.arange(t)).expand(b, t)"
WHERE = "where = torch.full((b,), start)"
HIDDEN = "hidden = hidden_keys(real, start, t)"
REAL = "real = 1 - torch.from_numpy(p.inputs[\"mask\"][:, 0, -1].astype(int))"
PADS = "(1 - real).sum(dim=-1)"

for suffix, dtype in (("", "float32"), ("-bf16", "bfloat16")):
    of = {"dtype": dtype}
    m(f"visible-in-steps{suffix}", "mask", (HIDDEN, "hidden = hidden_keys(real if t > 1 else real * 0 + 1, start, t)"),
      "The mask of padding is used in the prompt alone.", "step1.mask", pattern="padding visible in steps",
      limited={"B": (0, 2)}, **of)
    m(f"visible{suffix}", "mask", (HIDDEN, "hidden = hidden_keys(real * 0 + 1, start, t)"),
      "Padding is visible in the prompt and in steps.", "step0.mask", pattern="padding visible", limited={"B": (0, 2)}, **of)
    m(f"mask-of-first{suffix}", "mask", (HIDDEN, "hidden = hidden_keys(real[:1].expand_as(real), start, t)"),
      "All sequences have the mask of the first one.", "step0.mask", pattern="mask of sequence 0", limited={"B": (1, 2)},
      **of)
    m(f"positions-of-slots{suffix}", "rope", (POSITIONS, f"positions = {SLOTS}"),
      "Tokens are rotated by their slots, which no score shows.", "step0.q", pattern="positions of slots",
      limited={"B": (0, 2)}, in_output=False, **of)
    m(f"positions-of-slots-in-steps{suffix}", "rope",
      (POSITIONS, f"{POSITIONS}\n    if t == 1:\n        positions = {SLOTS}"),
      "The prompt is rotated by its positions, steps by their slots.", "step1.q", pattern="positions of slots in steps",
      limited={"B": (0, 2)}, **of)
    m(f"positions-stuck{suffix}", "rope",
      (POSITIONS, f"{POSITIONS}\n    if start == 0:\n        cache.last = positions[:, -1:]\n    if t == 1:\n"
       "        positions = cache.last"),
      "Steps keep the position of the last token of the prompt.", "step1.q", pattern="positions stuck", **of)
    m(f"slots-of-positions{suffix}", "cache",
      (WHERE, f"{WHERE}\n    if t == 1:\n        where = where - {PADS}"),
      "Steps write into the slot of their position, and overwrite tokens.", "step1.cache.keys",
      pattern="slots without the padding", limited={"B": (0, 2)}, **of)
    m(f"hidden-on-the-right{suffix}", "mask", (HIDDEN, "hidden = hidden_keys(real.flip(-1), start, t)"),
      "Padding is hidden on the right, and visible on the left.", "step0.mask", pattern="padding on the other side",
      limited={"B": (0, 2)}, **of)
