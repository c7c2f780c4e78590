"""Small real trained attention layers with real inputs, one safetensors file each.

Random weights are kind to attention: their logits stay small and their softmax stays smooth. Trained weights are not,
so a parity check needs some. PROVENANCE.md says where each file comes from, and `tools/cut-pretrained` makes them
again, byte for byte.
"""

from pathlib import Path

from mha_spec import Refusal

NAMES: tuple[str, ...] = ("anarcii-self", "anarcii-causal", "anarcii-cross", "rxnmapper-self", "smollm2-causal")


def path(name: str) -> Path:
    """The safetensors file of a trained attention layer.

    Args:
        name: one of `NAMES`.

    Raises:
        ValueError: if there is no such layer.
    """
    if name not in NAMES:
        raise Refusal("name", f"be one of {list(NAMES)}", name=name)
    return Path(__file__).with_name(f"{name}.safetensors")
