"""The families of models: what each of their layers is, and which keys of the configuration say the rest.

A family has a rule for each field of `AttentionSpec`: a value, which every layer has, or what reads it.

Source: the modules of transformers 5.23, with which layers of these specifications agree in the tests.
"""

from __future__ import annotations

from parity.models.families.decoders import DECODERS
from parity.models.families.encoder_decoders import ENCODER_DECODERS
from parity.models.families.encoders import ENCODERS
from parity.models.families.gpt import GPT_LIKE
from parity.models.families.hybrids import HYBRIDS
from parity.models.families.latents import WITH_LATENTS
from parity.models.rules import Family

FAMILIES: dict[str, Family] = {**DECODERS, **GPT_LIKE, **HYBRIDS, **WITH_LATENTS, **ENCODERS, **ENCODER_DECODERS}
"""Every family by its `model_type`."""
