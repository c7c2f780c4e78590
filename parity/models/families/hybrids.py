"""Decoders of which some layers are not attention over keys."""

from __future__ import annotations

from mha_spec import Gate
from parity.models.config import Config, Value
from parity.models.families.usual import BIASES, HEADS, SOME_BIAS, WIDTH, family
from parity.models.rules import Family, Place, is_last, norm, rope


def _qwen3_next(config: Config, index: int) -> str:
    last = is_last(index, config.find("full_attention_interval"), 4)
    return "full_attention" if last else "linear_attention"


def _gate_with_bias(place: Place) -> Value:
    """A gate that is packed with the queries, and has a bias where they have."""
    bias = SOME_BIAS(place)
    return Value(Gate(bias=bias.value), f"every layer of this family; {bias.origin}")


HYBRIDS: dict[str, Family] = {
    "qwen3_next": family(
        HEADS,
        WIDTH,
        BIASES,
        layout="transformers.Qwen3-Next",
        rope=rope(fraction=0.25),
        qk_norm=norm(weight="1+w"),
        gate=_gate_with_bias,
        kind=_qwen3_next,
    ),
}
