"""Families of bugs: a page of parity/bugs and a fix, for known bugs and for fitted patterns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from mha_spec import AttentionSpec
from parity.explain.diagnosis.bugs.record import Edit, known_bug
from parity.explain.diagnosis.bugs.specs import without_default_scale
from parity.measure.core.problem import Problem


@dataclass(frozen=True)
class BugFamily:
    """Bugs that differ only in a number, an order or a weight.

    Attributes:
        page: their page in parity/bugs. It is also the name of a fitted pattern.
        fix: an instruction, with placeholders for `spec`, which is right, `root`, sqrt(head_dim),
            and RoPE's `scaling`; empty if the values of a pattern do not tell what to change.
        about: a description, with placeholders for `found` and `right`, if known bugs and patterns
            share it.
    """

    page: str
    fix: str
    about: str = ""

    def fix_for(self, spec: AttentionSpec) -> str:
        """Return the fix for a layer."""
        scaling = "none" if spec.rope is None or spec.rope.scaling is None else spec.rope.scaling
        return self.fix.format(spec=spec, root=math.sqrt(spec.head_dim), scaling=scaling)

    def shown_in(self, *stages: str) -> partial[Edit]:
        """Return a `Edit` of this family that lacks its name, description and overrides."""
        return partial(known_bug, fix=self.fix, page=self.page, stages=stages)


Families = tuple[BugFamily, ...]
"""The families to which a pattern may belong: several if it does not tell which, none if it tells
none.
"""


def in_families(edit: Edit, spec: AttentionSpec, families: Families) -> Edit:
    """Return an edit with the pages and fixes of its families, for a layer."""
    pages = [family.page for family in families]
    fixes = [family.fix_for(spec) for family in families if family.fix]
    return replace(edit, pages=tuple(dict.fromkeys(pages)), fixes=tuple(dict.fromkeys(fixes)))


# ---- Weights and inputs --------------------------------------------------------------------------

TRANSPOSED = BugFamily(
    "transposed-kernel",
    "canonical kernels are (out, in); Flax and GPT-2's Conv1D store (in, out)",
)
SWAPPED = BugFamily(
    "swapped-projections",
    "use each projection's own weight; check the order of a packed projection",
)
FUSED_QKV = BugFamily(
    "fused-qkv", "split the packed weight in the order in which it was packed, then into heads"
)
INPUTS = BugFamily("swapped-projections", "project q from the query, and k and v from the key")
ROUNDED_WEIGHTS = BugFamily(
    "low-precision",
    "keep the weights in the dtype of training, or compare with the rounded weights",
)
BIAS = BugFamily("missing-bias", "add the bias of each projection once, its own")
QK_NORM = BugFamily(
    "qk-norm", "normalize with the layer's own norms, weights and eps, at the specified point"
)
SEQUENCES = BugFamily(
    "batch-axis", "attend within each sequence: heads are (B, N, T, H), batch first"
)
LATENTS = BugFamily("latents", "use the latents' own norms and projections")
GATE = BugFamily("gate", "multiply the context by sigmoid(gate_proj(query)), before out_proj")

SHARED_KV = BugFamily(
    "shared-kv", "use the keys and values of the other layer as they enter its attention"
)

TOKENS = BugFamily(
    "token-order", "use each token's own values: do not shift, roll or repeat tokens between stages"
)
LOST = BugFamily(
    "lost-values", "write every token and head: check grids, loops and masked stores at their ends"
)
FACTOR = BugFamily("stray-factor", "remove the factor, or apply it once")

# ---- Heads ---------------------------------------------------------------------------------------

HEAD_ORDER = BugFamily(
    "head-order",
    "split into (B, T, N, H), move N before T, and keep the heads in the weights' order",
)
GROUPED = BugFamily(
    "grouped-heads", "use key/value head n // (N // K) for query head n: repeat, not tile"
)

# ---- RoPE ----------------------------------------------------------------------------------------

THETA = BugFamily(
    "rope-theta",
    "set RoPE's theta to {spec.rope.theta:g}",
    "RoPE's theta is {found} instead of {right}",
)
EXPONENTS = BugFamily(
    "rope-theta",
    "use the exponent 2 i / R for pair i of R features, with theta = {spec.rope.theta:g}",
)
FREQUENCIES = BugFamily("rope-theta", "")
SCALING = BugFamily("rope-scaling", "scale RoPE's frequencies as specified: {scaling}")
ROTARY_DIM = BugFamily(
    "rope-partial",
    "rotate rotary_dim features of each head, with frequencies for these features alone",
)
AMPLITUDE = BugFamily(
    "rope-attention-factor", "multiply cosines and sines by {spec.rope.attention_factor:g}, once"
)
PAIRS = BugFamily("rope-pairs", "order the rows of q_proj and k_proj as the rotated pairs")
POSITIONS = BugFamily(
    "rope-positions",
    "start at position 0; the position of a new token is the number of cached tokens",
)
MISSING_ROPE = BugFamily("rope-positions", "rotate both queries and keys by their positions")
REVERSED_ROPE = BugFamily("rope-positions", "rotate (x, y) to (x cos - y sin, y cos + x sin)")
CACHE_POSITIONS = BugFamily(
    "cache-positions", "a new token's position is the number of tokens cached before it"
)
CACHE_LENGTHS = BugFamily(
    "cache-positions", "count the real tokens of each call, and nothing else, in its own sequence"
)
CACHE_SLOTS = BugFamily("cache-slots", "write new token i into slot length + i")
CACHE_QUANTIZATION = BugFamily(
    "cache-quantization",
    "divide by the layer's own scales, round, and multiply what is read by the same scales",
)

# ---- Masks ---------------------------------------------------------------------------------------

CAUSAL = BugFamily(
    "causal-alignment", "hide every key whose position is greater than the query's: s > t"
)
POLARITY = BugFamily("mask-polarity", "let True hide, and hide a key that any of the masks hides")
MASK_HEADS = BugFamily(
    "mask-polarity", "use the mask of each sequence and head: (B, N, T, S), in this order"
)
PADDING = BugFamily("padding", "hide the keys from each sequence's own length: s >= length")
SHOWN_PADDING = BugFamily(
    "padding",
    "hide padding last: combine all masks, and let no later step show a key that one of them hides",
)
WINDOW = BugFamily(
    "sliding-window",
    "hide the keys s <= t - window_size: a query attends to window_size keys, including its own",
)
NO_WINDOW = BugFamily("sliding-window", "hide no keys because of their distance")
CHUNK = BugFamily(
    "sliding-window", "hide the keys of other chunks, where s // chunk_size is not t // chunk_size"
)
LEAKING = BugFamily(
    "mask-as-number",
    "hide keys with -inf before the softmax: do not add a boolean mask to the scores",
)

# ---- Scores and what comes of them ---------------------------------------------------------------

DIVIDED = BugFamily(
    "scale",
    "divide the scores by sqrt(head_dim) = {root:g}, once",
    "the scale of the scores {found} instead of {right}",
)
MULTIPLIED = BugFamily("scale", "multiply the scores by {spec.score_scale:g}, once", DIVIDED.about)
SOFT_CAP = BugFamily(
    "soft-cap",
    "scale the scores, cap them with {spec.soft_cap:g} * tanh(scores / {spec.soft_cap:g}), then "
    "add the bias and mask",
)
NO_CAP = BugFamily("soft-cap", "do not cap the scores")
SCORE_BIAS = BugFamily(
    "score-bias",
    "add the bias of its own sequence and head to the scaled scores, once, before the softmax",
)
ALIBI = BugFamily(
    "alibi",
    "subtract slope * distance from the scaled scores; count the distance from the query's "
    "position among all keys",
)
RELATIVE_BIAS = BugFamily(
    "relative-bias",
    "add the table's bias for the bucket of (key - query) to the scaled scores; count positions "
    "from the first key",
)
RELATIVE_PRODUCTS = BugFamily(
    "relative-products",
    "add scaled products with the vectors of the bucket of key - query, counted from the first "
    "of all keys",
)
SINKS = BugFamily(
    "sinks",
    "append each head's sink to its scaled and masked scores, apply the softmax, drop the sink's "
    "weight",
)
TEMPERATURE = BugFamily(
    "temperature",
    "multiply queries by 1 + scale * ln(1 + floor((position + first_position) / length)), after "
    "RoPE",
)
SOFTMAX = BugFamily("softmax-function", "use softmax(scores) over the keys, once, with powers of e")
DROPOUT = BugFamily(
    "dropout", "leave out dropout in evaluation: model.eval(), dropout_p=0, deterministic=True"
)
EMPTY_ROWS = BugFamily(
    "empty-rows", "return 0 for a row if the mask hides all its keys; do not decide by its scores"
)
BLOCKS = BugFamily(
    "kernel-blocks",
    "compare one block with several: rescale sum and values alike, visit every key once, and mask "
    "by indices in the whole sequence",
)
PRODUCTS = BugFamily(
    "product-axes",
    "sum q @ k.transpose(-2, -1) over features, and attn_weights @ v over keys: name the axes",
)

# ---- The backward pass ---------------------------------------------------------------------------

STOPPED = BugFamily(
    "stopped-gradient",
    "let gradients pass: remove detach(), no_grad or stop_gradient between the output and this "
    "value",
)
GROUP_SUMS = BugFamily(
    "group-gradients",
    "sum the gradients of a key/value head over all query heads of its group: reshape to "
    "(B, K, N // K, S, H), sum over axis 2",
)
BATCH_SUMS = BugFamily(
    "backward-kernel",
    "sum the gradient of a parameter over all sequences, and add that of each micro-batch to it: "
    "neither keep one nor overwrite the sum",
)
LOSS_FACTOR = BugFamily(
    "stray-factor",
    "compare gradients of sum(output * cotangent): a sum, not a mean, and no loss scale",
)
BACKWARD = BugFamily(
    "backward-kernel",
    "compare the kernel's backward pass with automatic differentiation of the formula: the same "
    "mask, scale, blocks and sums as in the forward pass",
)
DROPOUT_MASK = BugFamily(
    "backward-kernel",
    "apply the forward pass's own dropout in the backward pass: keep its mask or seed, and "
    "multiply by mask / (1 - p) where the forward pass does",
)

PRECISION = BugFamily(
    "low-precision", "keep these values in the problem's dtype and compute them in float32"
)


def scale_family(spec: AttentionSpec) -> BugFamily:
    """Return the family of scales: the usual one, or the scale of a layer with its own, as with
    latents and YaRN.
    """
    spec = without_default_scale(spec)
    is_usual = spec.scale is None and math.isclose(spec.score_scale * math.sqrt(spec.head_dim), 1.0)
    return DIVIDED if is_usual else MULTIPLIED


def span_family(problem: Problem) -> BugFamily:
    """Return the family of the window or chunk of a layer, or of a case."""
    if problem.case.window_size is not None:
        return WINDOW
    if problem.spec.chunk_size is not None:
        return CHUNK
    if problem.spec.window_size is not None:
        return WINDOW
    return NO_WINDOW
