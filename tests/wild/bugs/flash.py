"""Bugs in the port block by block."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("flash", "gpt", "hooks")

ALPHA = "alpha = np.exp(m - safe)"
TOTAL = "total = alpha * total + p.sum(axis=1)"
ACC = "acc = alpha[:, None] * acc + p @ v[cols]"
OUT = "out[rows] = acc / np.where(total == 0.0, 1.0, total)[:, None]"
LSE = "lse[rows] = m + np.log(total)"
S = "s = (q[rows] @ k[cols].T) * scale"
BREAK = "if is_causal and cols[0] > rows[-1]:"
HIDE = "hide |= cols[None, :] > rows[:, None]"
LENGTHS = "hide |= cols[None, :] >= lengths"
FILL = "s = np.where(hide, -np.inf, s)"
KBLOCKS = "for j in range(0, S, BLOCK_K):"
QBLOCKS = "for i in range(0, T, BLOCK_Q):"
COLS = "cols = np.arange(j, min(j + BLOCK_K, S))"
GROUP = "g = n // (N // spec.num_kv_heads)"
EACH = "each = np.arange(N) // (N // spec.num_kv_heads)"
SCALE = "scale = np.float32(1.0 / np.sqrt(H))"
OFLENGTH = "lengths = None if case.key_padding_lengths is None else case.key_padding_lengths[b]"
COMBINED = "combined = context.astype(dtype).transpose(0, 2, 1, 3).reshape(B, T, N * H)"
WEIGHTS = 'rec["attn_weights"] = np.exp(np.where(hide, np.float32(-np.inf), scores) - safe).astype(dtype)'
HEADS = "return x.reshape(b, t, n, f // n).transpose(0, 2, 1, 3)"

m("acc-not-rescaled", "softmax", (ACC, "acc = acc + p @ v[cols]"),
  "The accumulator is not rescaled when the maximum grows.", "context")
m("sum-not-rescaled", "softmax", (TOTAL, "total = total + p.sum(axis=1)"),
  "The sum is not rescaled when the maximum grows.", "context")
m("alpha-inverted", "softmax", (ALPHA, "alpha = np.exp(np.where(np.isfinite(m), safe - m, -np.inf))"),
  "The correction is upside down.", "context")
m("max-forgotten", "softmax", ("            m = m_new\n", ""), "The running maximum is never kept.", "context")
m("last-block-lost", "axes", (KBLOCKS, "for j in range(0, S - BLOCK_K + 1, BLOCK_K):"),
  "The last, shorter block of keys is left out.", "context", case="bert-full", pattern="keys 4 and later hidden")
m("last-rows-lost", "axes", (QBLOCKS, "for i in range(0, T - BLOCK_Q + 1, BLOCK_Q):"),
  "The last, shorter block of queries is left out.", "context", limited={"T": (6,)}, pattern="factor 0")
m("overlapping-blocks", "axes", (COLS, "cols = np.arange(max(j - 1, 0), min(j + BLOCK_K, S))"),
  "Blocks of keys overlap by one.", "context", pattern="key 3 counts twice", limited={"T": (3, 4, 5, 6)})
m("break-early", "mask", (BREAK, "if is_causal and cols[-1] > rows[-1]:"),
  "A block that reaches beyond the diagonal is left out whole.", "context")
m("diagonal-unmasked", "mask", (HIDE, "hide |= np.zeros(s.shape, bool)"), "Blocks on the diagonal are not masked.",
  "context")
m("diagonal-strict", "mask", (HIDE, "hide |= cols[None, :] >= rows[:, None]"), "No token sees itself; the first is 0.",
  "context")
m("local-indices", "mask", (HIDE, "hide |= (cols - j)[None, :] > (rows - i)[:, None]"),
  "Every block is masked as if it lay on the diagonal.", "context", limited={"T": (3, 4, 5, 6)})
m("padding-inclusive", "mask", (LENGTHS, LENGTHS.replace(">=", ">")), "One token of padding is seen.", "context",
  case="bert", limited={"B": (1,)}, pattern="lengths one too large")
m("padding-of-first", "mask", (OFLENGTH, OFLENGTH.replace("[b]", "[0]")),
  "All sequences have the length of the first.", "context", case="bert-three", limited={"B": (1, 2)},
  pattern="length of sequence 0")
m("padding-local", "mask", (LENGTHS, "hide |= (cols - j)[None, :] >= lengths"),
  "Lengths are counted within each block.", "context", case="bert-three", limited={"B": (0, 2)})
m("fill-finite", "mask", (FILL, "s = np.where(hide, np.float32(-5.0), s)"), "Hidden scores are -5.", "context",
  pattern="penalty -5")
m("empty-mean", "mask", (FILL, "s = np.where(hide, np.float32(-1e9), s)"),
  "A sequence without a key gets the mean of its padding.", "context", case="empty-rows", limited={"B": (1,)},
  pattern="mean instead of 0")
m("empty-nan", "mask", (OUT, "out[rows] = acc / total[:, None]"), "A sequence without a key is NaN.", "context",
  case="empty-rows", limited={"B": (1,)}, pattern="NaN instead of 0")
m("empty-eps", "softmax", (OUT, "out[rows] = acc / (total + 0.01)[:, None]"),
  "0.01 is added to the sum, against rows without a key.", "context")
m("scale-base-2", "scale", (S, "s = (q[rows] @ k[cols].T) * scale * np.float32(1.4427)"),
  "The scale has log2(e) in it, the exponential is of base e.", "context", pattern="scores times 1.4427")
m("exp2", "scale", ("p = np.exp(s - safe[:, None])", "p = np.exp2(s - safe[:, None])"),
  "The exponential is of base 2, the scale without log2(e), the correction of base e.", "context")
m("scale-late", "scale", (SCALE, "scale = np.float32(1.0 / np.sqrt(H * N))"), "The scale is that of the width.",
  "context", pattern="scores times 0.5")
m("group-modulo", "heads", (GROUP, "g = n % spec.num_kv_heads"), "Key/value heads are tiled.", "context", case="gqa",
  limited={"N": (1, 2)}, pattern="permutation of key/value heads")
m("group-first", "heads", (GROUP, "g = 0"), "All heads use the first key/value head.", "context", case="gqa",
  limited={"N": (2, 3)}, pattern="key/value head 0 for all")
m("heads-inside", "heads", (HEADS, "return x.reshape(b, t, f // n, n).transpose(0, 3, 1, 2)"),
  "Heads are split with the features outside.", "q", pattern="features permuted across heads")
m("p-half", "precision", (ACC, "acc = alpha[:, None] * acc + p.astype(np.float16).astype(np.float32) @ v[cols]"),
  "Weights are rounded to float16 before the values.", "context", pattern="float16")
m("qk-half", "precision", (S, "s = (q[rows].astype(np.float16).astype(np.float32) @ k[cols].T) * scale"),
  "Queries are rounded to float16.", "context", pattern="float16 queries")
m("acc-half", "precision", (ACC, "acc = (alpha[:, None] * acc + p @ v[cols]).astype(np.float16).astype(np.float32)"),
  "The accumulator is float16.", "context", pattern="float16")
m("lse-max-lost", "softmax", (LSE, "lse[rows] = np.log(total)"),
  "The maximum is missing from the log-sum-exp; the output is right.", "attn_weights", in_output=False,
  recording="plain")
m("lse-base-2", "softmax", (LSE, "lse[rows] = m + np.log2(total)"),
  "The log-sum-exp is of base 2; the output is right.", "attn_weights", in_output=False, recording="plain")
m("weights-unmasked", "mask", (WEIGHTS, 'rec["attn_weights"] = np.exp(scores - safe).astype(dtype)'),
  "The weights that are returned are not masked; the output is right.", "attn_weights", in_output=False,
  recording="plain")
m("scores-tile", "heads", (EACH, "each = np.arange(N) % spec.num_kv_heads"),
  "The weights that are returned are of tiled heads; the output is right.", "scores", in_output=False,
  recording="plain", case="gqa", limited={"N": (1, 2)}, pattern="permutation of key heads")
m("combine-reversed", "exotic", (COMBINED, COMBINED.replace("context.astype", "context[:, ::-1].astype")),
  "Heads are combined in reverse.", "output", pattern="permutation of heads")
m("second-block-gain", "exotic", (S, f"{S} * np.float32(1.0 + 0.05 * (j > 0))"),
  "Scores of all but the first block are 5 % too large.", "context", limited={"T": (4, 5, 6)})
