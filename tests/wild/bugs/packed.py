"""Bugs of training on packed samples."""

from wild.bugs.writer import Writer

# A table with one record per line, each edit next to its description.
# fmt: off
m = Writer("packed", "packed")

POSITIONS = "    positions = positions_of(ids)\n"
RUN_ON = "torch.arange(t).expand(b, t)"
KEYS = "k = rotate(k, positions, spec.rope.theta)"
HIDDEN = "return (later | of_another)[:, None]"

for suffix, dtype in (("", "float32"), ("-bf16", "bfloat16")):
    of = {"dtype": dtype}
    m(f"positions-run-on{suffix}", "rope", (POSITIONS, f"    positions = {RUN_ON}\n"),
      "Positions run on over the texts of a row, which no score shows.", "q", pattern="positions of the row",
      in_output=False, **of)
    m(f"positions-of-keys-run-on{suffix}", "rope", (KEYS, f"k = rotate(k, {RUN_ON}, spec.rope.theta)"),
      "Positions of keys run on over the texts of a row, and those of queries begin again.", "k",
      pattern="positions of the row in keys", **of)
    m(f"texts-see-each-other{suffix}", "mask", (HIDDEN, "return later.expand(len(ids), 1, count, count)"),
      "A text attends to those before it in its row.", "mask", pattern="segments ignored", **of)
    m(f"positions-of-first{suffix}", "rope", (POSITIONS, "    positions = positions_of(ids[:1]).expand(b, t)\n"),
      "All rows have the positions of the first one.", "q", pattern="positions of row 0", limited={"B": (1,)}, **of)
