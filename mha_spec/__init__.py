"""Framework-independent specification of attention layers, in pure Python and NumPy."""

from mha_spec.alibi import Alibi
from mha_spec.attention import AttentionSpec
from mha_spec.gate import Gate
from mha_spec.latent import Latent
from mha_spec.norm import Norm
from mha_spec.projection import Projection
from mha_spec.refusal import Refusal, WrongType
from mha_spec.relative_bias import GridBias, RelativeBias
from mha_spec.relative_products import RelativeProducts
from mha_spec.rope import Rope
from mha_spec.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)
from mha_spec.temperature import Temperature

__all__ = [
    "Alibi",
    "AttentionSpec",
    "DynamicScaling",
    "Gate",
    "GridBias",
    "Latent",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Norm",
    "Projection",
    "ProportionalScaling",
    "Refusal",
    "RelativeBias",
    "RelativeProducts",
    "Rope",
    "Temperature",
    "WrongType",
    "YarnScaling",
]
