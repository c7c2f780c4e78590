"""Small real trained attention layers with real inputs, one safetensors file each.

Random weights are kind to attention: their logits stay small and their softmax stays smooth. Trained weights are not,
so a parity check needs some. PROVENANCE.md says where each file comes from, and `tools/cut-pretrained` makes them
again, byte for byte.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

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


PACKED = ".q4_1"
"""Ends the names of weights that their publisher quantized to 4 bits. Kept so, they take a sixth of the room."""


def unpacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Give the tensors of a file in float32, bit for bit as `gguf.dequantize` gives those in Q4_1.

    Args:
        tensors: by name; of those in Q4_1 a row (bytes,) has blocks of 32 weights in 20 bytes.
    """
    return {name.removesuffix(PACKED): _dequantized(x) if name.endswith(PACKED) else x for name, x in tensors.items()}


def _dequantized(rows: np.ndarray) -> np.ndarray:
    """Multiply out blocks: a scale and a least value in float16, then 32 levels of 4 bits, the low halves first."""
    blocks = rows.reshape(len(rows), -1, 20)
    scale, least = np.split(blocks[..., :4].copy().view("<f2").astype(np.float32), 2, axis=-1)
    levels = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    return (scale * levels + least).reshape(len(rows), -1)
