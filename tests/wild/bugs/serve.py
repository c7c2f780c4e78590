"""Bugs in the server's loop: slots, positions and masks of a batch with prompts of several lengths."""

from wild.bugs.writer import Writer

# A table with one record per line, each edit next to its description.
# fmt: off
m = Writer("serve", "serve")

WHERE = "        where = self.lengths\n"
POSITIONS = "positions = cache.lengths[:, None] + torch.arange(t)"
QUERIES = "queries = cache.lengths[:, None] + torch.arange(t)"
HIDDEN = "hidden = is_hidden(queries, "
WRITE = "    cache.write(k, v)\n    keys, values = cache.keys.clone(), cache.values.clone()\n"
ROWS = "            self.values[b, :, begin : begin + t] = v[b]\n"
READ = "    keys, values = cache.keys.clone(), cache.values.clone()\n"
LENGTHS = "cache.lengths = cache.lengths + new_lengths"
CACHE = "cache = Cache(spec, case.batch, case.capacity, x.dtype)\n"
TOKENS = "        tokens = x[:, start : start + chunk]\n"
STEP = f'{WRITE}    rec["cache.keys"], rec["cache.values"] = keys, values\n    {QUERIES}\n'
PADDED = f"    own = cache.lengths\n    cache.lengths = own.max().expand(b)\n{STEP}    cache.lengths = own\n"
ALL = "positions = cache.lengths.{}() + torch.arange(t).expand(b, t)"

LAYERS = (("", "serve", "float32"), ("-window", "serve-window", "bfloat16"))
"""A layer without a window and one with it, each in its dtype."""

RECORDED = '    rec["cache.keys"], rec["cache.values"] = keys, values\n'
ROTATED = "rotate(cache.keys, torch.arange(cache.keys.shape[2])[None], spec.rope.theta)"
EARLIER = "(torch.arange(cache.keys.shape[2]) < cache.lengths[:, None])[:, None, :, None]"
LATER_KEYS = "hidden = key > last"
CUT = "repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=2).reshape(b, spec.num_heads, -1, spec.head_dim)"
OUT = 'rec["output"] = linear(out, w["out_proj.weight"], w.get("out_proj.bias"))'
NARROW = ("        context = scaled_dot_product_attention(q.float(), keys.float(), values.float(), ~hidden, enable_gqa=True)\n"
          "        context = context.to(x.dtype)\n")
IN_FLOAT16 = ("        half = q.half() @ keys.half().repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1).transpose(2, 3)\n"
              "        half = (half * spec.head_dim**-0.5).float().masked_fill(hidden, -float('inf'))\n"
              "        weights = torch.softmax(half, dim=-1)\n"
              "        rec['attn_weights'] = weights\n"
              "        context = weights @ values.float().repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)\n"
              "        context = context.to(x.dtype)\n")

for suffix, case, dtype in LAYERS:
    of = {"case": case, "dtype": dtype}
    m(f"mask-from-0{suffix}", "cache", (QUERIES, "queries = torch.arange(t).expand(b, t)"),
      "The mask of a step begins at the first slot.", "step1.mask", pattern="query offset 0", **of)
    m(f"mask-of-longest{suffix}", "cache", (QUERIES, ALL.format("max").replace("positions", "queries")),
      "All sequences have the mask of the longest one.", "step1.mask", pattern="mask of the longest",
      limited={"B": (0, 2)}, **of)
    m(f"slot-of-longest{suffix}", "cache", (WHERE, "        where = self.lengths.max().expand(len(k))\n"),
      "The whole batch has one slot to write into.", "step1.cache.keys", pattern="slots of the longest",
      limited={"B": (0, 2)}, **of)
    m(f"slot-of-first{suffix}", "cache", (WHERE, "        where = self.lengths[:1].expand(len(k))\n"),
      "All sequences write where the first does.", "step1.cache.keys", pattern="slots of the first",
      limited={"B": (1, 2)}, **of)
    m(f"positions-of-longest{suffix}", "rope", (POSITIONS, ALL.format("max")),
      "All sequences have the positions of the longest one.", "step1.q", pattern="positions of the longest",
      limited={"B": (0, 2)}, **of)
    m(f"positions-of-shortest{suffix}", "rope", (POSITIONS, ALL.format("min")),
      "All sequences have the positions of the shortest one.", "step1.q", pattern="positions of the shortest",
      limited={"B": (0, 1)}, **of)
    m(f"length-with-padding{suffix}", "cache", (LENGTHS, "cache.lengths = cache.lengths + t"),
      "Padding counts as cached.", "step0.cache.lengths", pattern="lengths of the chunk", limited={"B": (0, 2)}, **of)
    m(f"padding-visible{suffix}", "cache", (STEP, PADDED),
      "Steps are cached after the padding of the prompt, and attend to it.", "step1.mask",
      pattern="padding visible in steps", limited={"B": (0, 2)}, **of)
    m(f"slot-late{suffix}", "cache", (WHERE, "        where = self.lengths + (t == 1)\n"),
      "Tokens of steps are written one slot late.", "step1.cache.keys", pattern="slots + 1", **of)
    m(f"slot-early{suffix}", "cache", (WHERE, "        where = self.lengths - int(t == 1)\n"),
      "Tokens of steps are written one slot early.", "step1.cache.keys", pattern="slots - 1", **of)
    m(f"write-after-attending{suffix}", "cache", (WRITE, f"{READ}    cache.write(k, v)\n"),
      "Tokens are written after their call attended.", "step0.cache.keys", pattern="writes one call late", **of)
    m(f"write-lost-once{suffix}", "cache",
      (WRITE, f"    if cache.lengths[0] != 4:\n        cache.write(k, v)\n{READ}"),
      "The first step does not write its tokens.", "step1.cache.keys", pattern="slots of one step stay stale", **of)
    m(f"length-twice{suffix}", "cache", (LENGTHS, f"{LENGTHS} * (2 if t == 1 else 1)"),
      "Steps raise the length by two.", "step1.cache.lengths", pattern="lengths of steps twice", **of)
    m(f"rows-reordered{suffix}", "cache",
      (WRITE, "    if cache.lengths[0] == 5:\n        cache.keys, cache.values = cache.keys[[1, 2, 0]], "
              f"cache.values[[1, 2, 0]]\n{WRITE}"),
      "The cache is reordered as after a step of beam search, and the sequences are not.", "step2.cache.keys",
      pattern="sequences 1 2 0", **of)
    m(f"blocks-exchanged{suffix}", "cache",
      (READ, f"{READ}    if t == 1:\n        order = torch.arange(keys.shape[2])\n        order[:4] = order[[2, 3, 0, 1]]\n"
             "        keys[1], values[1] = keys[1][:, order], values[1][:, order]\n"),
      "The block table of sequence 1 has its first two blocks of two tokens exchanged.", "step1.cache.keys",
      pattern="blocks 1 0", limited={"B": (1,)}, in_output=bool(suffix), **of)
    m(f"block-of-another{suffix}", "cache",
      (READ, f"{READ}    if t == 1:\n        keys[:2, :, :2], values[:2, :, :2] = keys[[1, 0], :, :2], values[[1, 0], :, :2]\n"),
      "Two sequences have the first block of each other.", "step1.cache.keys", pattern="block 0 of sequences 1 0",
      limited={"B": (0, 1)}, in_output=True, **of)
    m(f"block-stale{suffix}", "cache",
      (READ, f"{READ}    if t == 1:\n        keys[:, :, 2:4], values[:, :, 2:4] = 0, 0\n"),
      "The second block of two tokens is empty.", "step1.cache.keys", pattern="slots 2 and 3 stay 0",
      limited={"S": (2, 3)}, **of)
    m(f"slots-exchanged{suffix}", "cache",
      (WRITE, f"{WRITE.replace(READ, '')}    if cache.lengths[0] == 5:\n"
              "        for stored in (cache.keys, cache.values):\n"
              "            stored[0, :, 3:5], stored[1, :, 3:5] = stored[1, :, 3:5].clone(), stored[0, :, 3:5].clone()\n"
              f"{READ}"),
      "Sequences 0 and 1 have exchanged the tokens in slots 3 and 4, from a step on.", "step2.cache.keys",
      pattern="slots 3 and 4 of sequences 1 0", limited={"B": (0, 1), "S": (3, 4)}, **of)
    m(f"cache-empty{suffix}", "cache",
      (READ, f"{READ}    if t == 1:\n        keys, values = torch.zeros_like(keys), torch.zeros_like(values)\n"),
      "Steps read a cache of zeros.", "step1.cache.keys", pattern="cache is 0", **of)
    m(f"block-shared{suffix}", "cache",
      (READ, f"{READ}    if t == 1:\n        keys[2, :, :2], values[2, :, :2] = keys[1, :, :2], values[1, :, :2]\n"),
      "Sequence 2 has the first block of sequence 1, as after a wrong hit in the cache of prefixes.", "step1.cache.keys",
      pattern="block 0 of sequence 1", limited={"B": (2,), "S": (0, 1)}, **of)
    m(f"block-of-another-request{suffix}", "cache",
      (READ, f"{READ}    if t == 1:\n        seed = torch.Generator().manual_seed(1)\n"
             "        keys[1, :, 2:4] = torch.randn(keys[1, :, 2:4].shape, generator=seed).to(x.dtype)\n"
             "        values[1, :, 2:4] = torch.randn(keys[1, :, 2:4].shape, generator=seed).to(x.dtype)\n"),
      "The second block of sequence 1 is that of a request outside of the batch.", "step1.cache.keys",
      pattern="", limited={"B": (1,), "S": (2, 3)}, **of)
    m(f"cache-of-another-layer{suffix}", "cache",
      (READ, f"{READ}    if t == 1:\n        seed = torch.Generator().manual_seed(2)\n"
             "        earlier = (torch.arange(keys.shape[2]) < cache.lengths[:, None])[:, None, :, None]\n"
             "        keys = torch.where(earlier, torch.randn(keys.shape, generator=seed).to(x.dtype), keys)\n"
             "        values = torch.where(earlier, torch.randn(keys.shape, generator=seed).to(x.dtype), values)\n"),
      "Steps read the cache of another layer, and add their own token.", "step1.cache.keys", pattern="", **of)
    m(f"keys-rotated-again{suffix}", "rope",
      (WRITE, f"    if t == 1:\n        cache.keys = torch.where({EARLIER}, {ROTATED}, cache.keys)\n{WRITE}"),
      "Every step rotates the whole cache again.", "step1.cache.keys", pattern="keys rotated once more in each step", **of)
    m(f"keys-rotated-when-read{suffix}", "rope",
      (READ, f"{READ}    if t == 1:\n        keys = torch.where({EARLIER}, {ROTATED}, keys)\n"),
      "Steps rotate the earlier keys again when they read them.", "step1.cache.keys",
      pattern="positions of earlier keys times 2", **of)
    m(f"causal-transposed-in-steps{suffix}", "mask",
      (LATER_KEYS, "hidden = key > last if queries.shape[1] > 1 else key < last"),
      "The causal mask of a step is transposed: it shows empty slots, and no earlier key.", "step1.mask",
      pattern="transposed causal mask in steps", **of)
    m(f"copies-after-tokens{suffix}", "heads",
      (RECORDED, f"{RECORDED}    keys, values = keys.{CUT}, values.{CUT}\n"),
      "Key/value heads are repeated on the axis after the tokens.", "step0.context",
      pattern="token (g S + s) // 2 instead of s", **of)
    m(f"columns-of-out-proj{suffix}", "weights",
      (OUT, OUT.replace('w["out_proj.weight"]',
                        'w["out_proj.weight"].view(x.shape[-1], 4, -1)[:, [2, 0, 3, 1]].flatten(1)')),
      "The columns of out_proj have the heads in a different order.", "step0.output", pattern="heads 2 0 3 1", **of)
    m(f"rows-of-out-proj{suffix}", "weights",
      (OUT, OUT.replace('w["out_proj.weight"]',
                        'w["out_proj.weight"].view(4, -1, out.shape[-1])[[2, 0, 3, 1]].flatten(0, 1)')),
      "The rows of out_proj are permuted by heads instead of its columns.", "step0.output",
      pattern="blocks of features 2 0 3 1", **of)
m("scores-overflow", "precision", (NARROW, IN_FLOAT16), "Products of queries and keys are infinite in float16.",
  "step0.context", pattern="infinite beyond 65504", case="serve-loud", dtype="float16")
for suffix, case, dtype in (("", "serve-chunks", "float32"), ("-window", "serve-chunks-window", "bfloat16")):
    m(f"chunks-top-left{suffix}", "mask",
      (HIDDEN, "hidden = is_hidden(queries if t == 1 else torch.arange(t).expand(b, t), "),
      "Calls of several tokens have a causal mask of their own tokens alone.", "step1.mask", pattern="query offset 0",
      case=case, dtype=dtype)
