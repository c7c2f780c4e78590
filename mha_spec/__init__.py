"""Framework-independent specification of attention layers, in pure Python and NumPy."""

from mha_spec.attention import AttentionSpec
from mha_spec.errors import InputError, InputTypeError
from mha_spec.features.alibi import Alibi
from mha_spec.features.gate import Gate
from mha_spec.features.latent import Latent
from mha_spec.features.norm import Norm
from mha_spec.features.relative_bias import GridBias, RelativeBias
from mha_spec.features.relative_products import RelativeProducts, SinusoidProducts
from mha_spec.features.rope import Rope
from mha_spec.features.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)
from mha_spec.features.temperature import Temperature
from mha_spec.projection import Projection

__all__ = [
    "Alibi",
    "AttentionSpec",
    "DynamicScaling",
    "Gate",
    "GridBias",
    "InputError",
    "InputTypeError",
    "Latent",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Norm",
    "Projection",
    "ProportionalScaling",
    "RelativeBias",
    "RelativeProducts",
    "Rope",
    "SinusoidProducts",
    "Temperature",
    "YarnScaling",
]
