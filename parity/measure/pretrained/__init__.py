"""Small trained attention layers with real inputs, one safetensors file each.

With random weights, logits are small and the softmax is smooth. Trained weights are harder, so
parity checks need some. PROVENANCE.md has the source of each file, and `tools/cut-pretrained`
regenerates them byte for byte.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mha_spec import InputError

NAMES: tuple[str, ...] = (
    "anarcii-self",
    "anarcii-causal",
    "anarcii-cross",
    "rxnmapper-self",
    "smollm2-causal",
)


def path(name: str) -> Path:
    """Return the path of a trained attention layer's safetensors file.

    Args:
        name: one of `NAMES`.

    Raises:
        ValueError: if the layer does not exist.
    """
    if name not in NAMES:
        raise InputError("name", f"be one of {list(NAMES)}", name=name)
    return Path(__file__).with_name(f"{name}.safetensors")


PACKED = ".q4_1"
"""Suffix of weights that their publisher quantized to 4 bits.

They are stored as such, at a sixth of the size.
"""


def unpacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of a file in float32; Q4_1 bit for bit like `gguf.dequantize`.

    Args:
        tensors: tensors by name; rows of Q4_1 (bytes,) are blocks of 32 weights in 20 bytes.
    """
    arrays = {}
    for name, x in tensors.items():
        if name.endswith(PACKED):
            x = _dequantized(x)
        arrays[name.removesuffix(PACKED)] = x
    return arrays


def _dequantized(rows: np.ndarray) -> np.ndarray:
    """Dequantize blocks: scale and minimum in float16, then 32 levels of 4 bits, low ones first."""
    blocks = rows.reshape(len(rows), -1, 20)
    scale, least = np.split(blocks[..., :4].copy().view("<f2").astype(np.float32), 2, axis=-1)
    levels = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    return (scale * levels + least).reshape(len(rows), -1)
