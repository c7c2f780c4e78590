"""Families of bugs: a page of parity/bugs and a fix, for known bugs and for fitted patterns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from mha_spec import AttentionSpec
from parity.diagnosis.mistakes.record import Mistake


@dataclass(frozen=True)
class MistakeFamily:
    """Bugs that differ only in a number, an order or a weight.

    Attributes:
        page: their page in parity/bugs. It is also the name of a fitted pattern.
        fix: an instruction, with places for `spec`, which is right, `root`, sqrt(head_dim), and RoPE's `scaling`.
        about: a description, with places for `found` and `right`, if known bugs and patterns share it.
    """

    page: str
    fix: str
    about: str = ""

    def fix_for(self, spec: AttentionSpec) -> str:
        """Return the fix for a layer."""
        scaling = "none" if spec.rope is None or spec.rope.scaling is None else spec.rope.scaling
        return self.fix.format(spec=spec, root=math.sqrt(spec.head_dim), scaling=scaling)

    def seen_in(self, *stages: str) -> partial[Mistake]:
        """Return a `Mistake` of this family that lacks its name, description and overrides."""
        return partial(Mistake, fix=self.fix, page=self.page, stages=stages)


# ---- Weights and inputs ----------------------------------------------------------------------------------------------

TRANSPOSED = MistakeFamily(
    "transposed-kernel", "canonical kernels are (out, in), those of Flax and GPT-2's Conv1D (in, out)"
)
SWAPPED = MistakeFamily(
    "swapped-projections", "use each projection's own weight; check the order of a packed projection"
)
INPUTS = MistakeFamily("swapped-projections", "project q from the query, and k and v from the key")
BIAS = MistakeFamily("missing-bias", "add the bias of each projection once, its own")
QK_NORM = MistakeFamily("qk-norm", "normalize with the layer's own norms, weights and eps, at the specified place")
SEQUENCES = MistakeFamily("batch-axis", "attend within each sequence: heads are (B, N, T, H), batch first")
LATENTS = MistakeFamily("latents", "use the latents' own norms and projections")
GATE = MistakeFamily("gate", "multiply the context by sigmoid(gate_proj(query)), before out_proj")

SHARED_KV = MistakeFamily("shared-kv", "use the keys and values of the other layer as they enter its attention")

# ---- Heads -----------------------------------------------------------------------------------------------------------

HEAD_ORDER = MistakeFamily(
    "head-order", "split into (B, T, N, H), move N before T, and keep the heads in the weights' order"
)
GROUPED = MistakeFamily("grouped-heads", "use key/value head n // (N // K) for query head n: repeat, not tile")

# ---- RoPE ------------------------------------------------------------------------------------------------------------

THETA = MistakeFamily(
    "rope-theta",
    "set RoPE's theta to {spec.rope.theta:g}",
    "RoPE's theta is {found} instead of {right}",
)
EXPONENTS = MistakeFamily(
    "rope-theta", "use the exponent 2 i / R for pair i of R features, with theta = {spec.rope.theta:g}"
)
SCALING = MistakeFamily("rope-scaling", "scale RoPE's frequencies as specified: {scaling}")
ROTARY_DIM = MistakeFamily(
    "rope-partial", "rotate rotary_dim features of each head, with frequencies for these features alone"
)
AMPLITUDE = MistakeFamily("rope-attention-factor", "multiply cosines and sines by {spec.rope.attention_factor:g}, once")
PAIRS = MistakeFamily("rope-pairs", "order the rows of q_proj and k_proj as the rotated pairs")
POSITIONS = MistakeFamily(
    "rope-positions", "start at position 0; the position of a new token is the number of cached tokens"
)
MISSING_ROPE = MistakeFamily("rope-positions", "rotate both queries and keys by their positions")
REVERSED_ROPE = MistakeFamily("rope-positions", "rotate (x, y) to (x cos - y sin, y cos + x sin)")
CACHE_POSITIONS = MistakeFamily("cache-positions", "a new token's position is the number of tokens cached before it")
CACHE_SLOTS = MistakeFamily("cache-slots", "write new token i into slot length + i")

# ---- Masks -----------------------------------------------------------------------------------------------------------

CAUSAL = MistakeFamily("causal-alignment", "hide every key whose position is greater than the query's: s > t")
POLARITY = MistakeFamily("mask-polarity", "let True hide, and hide a key that any of the masks hides")
PADDING = MistakeFamily("padding", "hide the keys from each sequence's own length: s >= length")
WINDOW = MistakeFamily(
    "sliding-window", "hide the keys s <= t - window_size: a query attends to window_size keys, including its own"
)
NO_WINDOW = MistakeFamily("sliding-window", "hide no keys because of their distance")
CHUNK = MistakeFamily("sliding-window", "hide the keys of other chunks, where s // chunk_size is not t // chunk_size")
LEAKING = MistakeFamily(
    "mask-as-number", "hide keys with -inf before the softmax: do not add a boolean mask to the scores"
)

# ---- Scores and what comes of them -----------------------------------------------------------------------------------

DIVIDED = MistakeFamily(
    "scale",
    "divide the scores by sqrt(head_dim) = {root:g}, once",
    "the scale of the scores {found} instead of {right}",
)
MULTIPLIED = MistakeFamily("scale", "multiply the scores by {spec.scale:g}, once", DIVIDED.about)
SOFT_CAP = MistakeFamily(
    "soft-cap",
    "scale the scores, cap them with {spec.soft_cap:g} * tanh(scores / {spec.soft_cap:g}), then add the bias and mask",
)
NO_CAP = MistakeFamily("soft-cap", "do not cap the scores")
SCORE_BIAS = MistakeFamily(
    "score-bias", "add the bias of its own sequence and head to the scaled scores, once, before the softmax"
)
ALIBI = MistakeFamily(
    "alibi",
    "subtract slope * distance from the scaled scores; count the distance from the query's position among all keys",
)
RELATIVE_BIAS = MistakeFamily(
    "relative-bias",
    "add the table's bias for the bucket of (key - query) to the scaled scores; count positions from the first key",
)
RELATIVE_PRODUCTS = MistakeFamily(
    "relative-products",
    "add scaled products with the vectors of the bucket of key - query, counted from the first of all keys",
)
SINKS = MistakeFamily(
    "sinks",
    "append each head's sink to its scaled and masked scores, apply the softmax, drop the sink's weight",
)
TEMPERATURE = MistakeFamily(
    "temperature",
    "multiply queries by 1 + scale * ln(1 + floor((position + first_position) / length)), after RoPE",
)
DROPOUT = MistakeFamily("dropout", "leave out dropout in evaluation: model.eval(), dropout_p=0, deterministic=True")
EMPTY_ROWS = MistakeFamily(
    "empty-rows", "return 0 for a row if the mask hides all its keys; do not decide by its scores"
)
PRECISION = MistakeFamily("low-precision", "keep these values in the problem's dtype and compute them in float32")


def scale_family(spec: AttentionSpec) -> MistakeFamily:
    """Return the family of scales, with or without a scale of the layer's own."""
    return DIVIDED if spec.scale is None else MULTIPLIED
