"""Model families: their layers, and the configuration keys that determine them.

`decoders` has LLaMA, Gemma and others like them; `gpt`, `encoders`, `encoder_decoders`, `hybrids`
and `latents` the rest. To find a family, search for its `model_type`. `usual` has the defaults, and
`not_covered` says which families are missing and why.

A family has a rule for each field of `AttentionSpec`: a constant, or a function that reads it.

Source: the modules of transformers 5.23; tests compare layers of these specifications with them.
Numbers, such as in `every(4)` and `fraction=0.25`, are the defaults of their configurations.
"""

from __future__ import annotations

from parity.port.models.families.decoders import DECODERS
from parity.port.models.families.encoder_decoders import ENCODER_DECODERS
from parity.port.models.families.encoders import ENCODERS
from parity.port.models.families.gpt import GPT_LIKE
from parity.port.models.families.hybrids import HYBRIDS
from parity.port.models.families.latents import WITH_LATENTS
from parity.port.models.rules import Family

FAMILIES: dict[str, Family] = {
    **DECODERS,
    **GPT_LIKE,
    **HYBRIDS,
    **WITH_LATENTS,
    **ENCODERS,
    **ENCODER_DECODERS,
}
"""All families by `model_type`."""
