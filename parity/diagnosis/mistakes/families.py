"""Families of mistakes: a page of parity/bugs and a fix, for the known mistakes of it and for what a law fits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from mha_spec import AttentionSpec
from parity.diagnosis.mistakes.record import Mistake


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

    def seen_in(self, *stages: str) -> partial[Mistake]:
        """Return a `Mistake` of this family that lacks its name, words and overrides."""
        return partial(Mistake, fix=self.fix, page=self.page, stages=stages)


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
SEQUENCES = MistakeFamily(
    "batch-axis", "let every query attend to the keys of its own sequence: heads are (B, N, T, H), batch first"
)
LATENTS = MistakeFamily("latents", "use the latents' own norms and projections")
GATE = MistakeFamily("gate", "multiply the context by sigmoid(gate_proj(query)), before out_proj")

SHARED_KV = MistakeFamily("shared-kv", "use the keys and values of the other layer as they enter its attention")

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
CACHE_SLOTS = MistakeFamily("cache-slots", "write new token i into slot length + i")

# ---- Masks -----------------------------------------------------------------------------------------------------------

CAUSAL = MistakeFamily("causal-alignment", "hide every key whose position is greater than the query's: s > t")
POLARITY = MistakeFamily("mask-polarity", "let True hide, and hide a key that any of the masks hides")
PADDING = MistakeFamily("padding", "hide the keys from each sequence's own length on: s >= length")
WINDOW = MistakeFamily(
    "sliding-window", "hide the keys at t - window_size and before: a query sees window_size keys, its own included"
)
NO_WINDOW = MistakeFamily("sliding-window", "hide no keys for their distance")
CHUNK = MistakeFamily(
    "sliding-window", "hide the keys of other chunks: those for which s // chunk_size is not t // chunk_size"
)
LEAKING = MistakeFamily(
    "mask-as-number", "hide keys with -inf before the softmax: a boolean mask is not a number to be added"
)

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
SCORE_BIAS = MistakeFamily(
    "score-bias", "add the bias of its own sequence and head to the scaled scores, once, before the softmax"
)
ALIBI = MistakeFamily(
    "alibi",
    "take slope * distance from the scaled scores, the distance counted from the place of the query among all keys",
)
RELATIVE_BIAS = MistakeFamily(
    "relative-bias",
    "add to the scaled scores what the table has for the bucket of key - query, counted from the first of all keys",
)
SINKS = MistakeFamily(
    "sinks",
    "put each head's sink beside its scaled and masked scores, take the softmax, leave out the sink's weight",
)
TEMPERATURE = MistakeFamily(
    "temperature",
    "multiply queries by 1 + scale * ln(1 + floor((position + first_position) / length)), after RoPE",
)
DROPOUT = MistakeFamily("dropout", "leave out dropout in evaluation: model.eval(), dropout_p=0, deterministic=True")
EMPTY_ROWS = MistakeFamily(
    "empty-rows", "give 0 for a row whose every key is hidden, by the mask and not by its scores"
)
PRECISION = MistakeFamily("low-precision", "keep these values in the problem's dtype, and compute them in float32")


def scale_family(spec: AttentionSpec) -> MistakeFamily:
    """Return the family of scales, by whether a layer has one of its own."""
    return DIVIDED if spec.scale is None else MULTIPLIED
