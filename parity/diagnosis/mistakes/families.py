"""Families of mistakes: a page of parity/bugs and a fix, for the known mistakes of it and for what a law fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mha_spec import AttentionSpec


@dataclass(frozen=True)
class MistakeFamily:
    """Mistakes that differ in a number, an order or a weight only.

    Attributes:
        page: of parity/bugs that says more. It is also the name of a mistake that a law fits.
        fix: what to do, with places for `spec`, which is right, and for `root`, sqrt(head_dim), and `scaling`, of RoPE.
        about: what is the case, with places for `found` and `right`, where known mistakes and laws share the words.
    """

    page: str
    fix: str
    about: str = ""

    def fix_for(self, spec: AttentionSpec) -> str:
        """Return the fix of a layer."""
        scaling = "none" if spec.rope is None or spec.rope.scaling is None else spec.rope.scaling
        return self.fix.format(spec=spec, root=math.sqrt(spec.head_dim), scaling=scaling)


# ---- Weights and inputs ----------------------------------------------------------------------------------------------

TRANSPOSED = MistakeFamily(
    "transposed-kernel", "canonical kernels are (out, in), Flax's and GPT-2's Conv1D are (in, out)"
)
SWAPPED = MistakeFamily(
    "swapped-projections", "give each projection its own weight, in the order of a packed projection"
)
INPUTS = MistakeFamily("swapped-projections", "make q of the query, and k and v of the key")
BIAS = MistakeFamily("missing-bias", "add the bias of each projection once, its own")
QK_NORM = MistakeFamily(
    "qk-norm", "normalize by the layer's own norms, with their own weight and eps, where the spec has them"
)
SEQUENCES = MistakeFamily("batch-axis", "let each sequence have its own queries, keys and values")
LATENTS = MistakeFamily("latents", "use the latents' own norms and projections")
GATE = MistakeFamily("gate", "multiply the context by the sigmoid of the gate, before out_proj")

# ---- Heads -----------------------------------------------------------------------------------------------------------

HEAD_ORDER = MistakeFamily(
    "head-order", "split into (B, T, N, H), move N before T, and keep the heads in the weights' order"
)
GROUPED = MistakeFamily("grouped-heads", "let query head n use key/value head n // (N // K): repeat, not tile")

# ---- RoPE ------------------------------------------------------------------------------------------------------------

THETA = MistakeFamily(
    "rope-theta",
    "set the theta of its Rope to {spec.rope.theta:g}",
    "RoPE's theta is {found} and not {right}",
)
EXPONENTS = MistakeFamily(
    "rope-theta", "let pair i of R features have the exponent 2 i / R, of theta = {spec.rope.theta:g}"
)
SCALING = MistakeFamily("rope-scaling", "let RoPE's frequencies have the scaling that the spec says: {scaling}")
ROTARY_DIM = MistakeFamily(
    "rope-partial", "rotate as many features of a head as the spec says, by frequencies of these alone"
)
AMPLITUDE = MistakeFamily("rope-attention-factor", "multiply cosines and sines by {spec.rope.attention_factor:g}, once")
PAIRS = MistakeFamily("rope-pairs", "let the rows of q_proj and k_proj have the order of the pairs that are rotated")
POSITIONS = MistakeFamily("rope-positions", "the first token is at position 0, a new one at the number of those cached")
MISSING_ROPE = MistakeFamily("rope-positions", "rotate both queries and keys by their positions")
REVERSED_ROPE = MistakeFamily("rope-positions", "rotate (x, y) to (x cos - y sin, y cos + x sin)")
CACHE_POSITIONS = MistakeFamily("cache-positions", "a new token's position is the number of tokens cached before it")
CACHE_SLOTS = MistakeFamily("cache-slots", "write each token of each sequence in the slot of its position, once")

# ---- Masks -----------------------------------------------------------------------------------------------------------

CAUSAL = MistakeFamily("causal-alignment", "hide the keys after the query's own position")
POLARITY = MistakeFamily("mask-polarity", "let True hide, and hide a key that any of the masks hides")
PADDING = MistakeFamily("padding", "let each sequence hide its own padding")
WINDOW = MistakeFamily(
    "sliding-window", "hide the keys at t - window_size and before: a query sees window_size keys, its own included"
)
NO_WINDOW = MistakeFamily("sliding-window", "hide no keys for their distance")
CHUNK = MistakeFamily("sliding-window", "hide the keys of other chunks: a query sees those of its own")
LEAKING = MistakeFamily("mask-as-number", "fill hidden scores with -infinity, before the softmax")

# ---- Scores and what comes of them -----------------------------------------------------------------------------------

DIVIDED = MistakeFamily(
    "scale", "divide the scores by sqrt(head_dim) = {root:g}, once", "the scale of the scores {found}, and not {right}"
)
MULTIPLIED = MistakeFamily("scale", "multiply the scores by {spec.scale:g}, once", DIVIDED.about)
SOFT_CAP = MistakeFamily(
    "soft-cap",
    "scale the scores, then take {spec.soft_cap:g} * tanh(scores / {spec.soft_cap:g}), then add the bias and mask",
)
NO_CAP = MistakeFamily("soft-cap", "do not cap the scores")
SCORE_BIAS = MistakeFamily("score-bias", "add the bias of its own sequence and head to the scaled scores, once")
ALIBI = MistakeFamily("alibi", "subtract each head's own slope times the distance from the scaled scores")
RELATIVE_BIAS = MistakeFamily(
    "relative-bias", "add the bias of the bucket that the distance of key and query falls into"
)
SINKS = MistakeFamily("sinks", "let exp(sink) of each head be part of the softmax's sum, as it is held")
TEMPERATURE = MistakeFamily("temperature", "multiply each query by what its position says")
DROPOUT = MistakeFamily("dropout", "leave out dropout in evaluation: model.eval(), dropout_p=0, deterministic=True")
EMPTY_ROWS = MistakeFamily("empty-rows", "let rows that see no key be 0")
PRECISION = MistakeFamily("low-precision", "keep these values in the problem's dtype, and compute them in float32")


def scale_family(spec: AttentionSpec) -> MistakeFamily:
    """Return the family of scales, by whether a layer has one of its own."""
    return DIVIDED if spec.scale is None else MULTIPLIED
