"""What an attention layer computes, written once: pure Python and NumPy, for every sibling and for `parity`."""

from mha_spec.attention import AttentionSpec, Projection
from mha_spec.rope import Rope
from mha_spec.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)

__all__ = [
    "AttentionSpec",
    "DynamicScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Projection",
    "ProportionalScaling",
    "Rope",
    "YarnScaling",
]
