"""Tensor parallelism of a layer over the chips of a mesh.

Each chip computes some of the query heads, and an all-reduce sums the outputs.
"""

from __future__ import annotations

import numpy as np
import ttnn

from mha_spec import InputError, InputTypeError
from mha_tt.device import has_values
from mha_tt.mha import AttentionLayer
from mha_tt.parallel.local import check_divides, local_spec
from mha_tt.weights import download_weights, upload_weights

__all__ = ["shard"]


def shard(layer: AttentionLayer, mesh: ttnn.MeshDevice, *, heads: int) -> AttentionLayer:
    """Divide the heads of a layer over a mesh dimension: tensor parallelism.

    Each chip then needs the whole input, which `mha_tt.upload` replicates, and has the whole
    output. Attention weights, masks and biases with an axis of heads, and the cache of `init_cache`
    are local: for a chip's heads. Without `out_proj` the output is also local:
    `mha_tt.download_parts` reads the part of each chip.

    Args:
        layer: any attention module of this package; it is changed.
        mesh: mesh of the layer: see `mha_tt.open_mesh`.
        heads: mesh dimension that heads are divided over, 0 (rows) or 1 (columns).

    Returns:
        The layer.

    Raises:
        TypeError: if the layer is not one of this package, or heads is not an integer.
        ValueError: if the mesh has no such dimension, the layer is not on it, the query heads do
            not divide evenly, or the layer has a norm over the width of all heads or ALiBi. The
            layer is then unchanged.

    Source: Megatron-LM, arXiv:1909.08053, section 3.
    """
    if not isinstance(layer, AttentionLayer):
        raise InputTypeError("layer", "be an attention module of mha_tt", type(layer).__name__)
    if not isinstance(heads, int) or isinstance(heads, bool):
        raise InputTypeError("heads", "be the number of a dimension of the mesh", heads=heads)
    shape = tuple(mesh.shape)
    if not 0 <= heads < len(shape):
        raise InputError(
            "heads", "be the number of a dimension of the mesh", heads=heads, shape=shape
        )
    if layer.device != mesh:
        raise InputError("mesh", "be the device of the layer", "a different one")
    if layer.heads_axis is not None:
        raise InputError(
            "layer", "be divided by heads once", f"one that is, along dimension {layer.heads_axis}"
        )
    check_divides(layer.full_spec, shape[heads])
    if has_values():
        weights = download_weights(layer.weights, layer.full_spec)
    else:  # a mock board has none to divide
        weights = {
            name: np.zeros(size, np.float32) for name, size in layer.full_spec.weight_shapes.items()
        }
    layer.weights = upload_weights(
        weights, layer.full_spec, device=mesh, dtype=layer.weight_dtype, heads_axis=heads
    )
    layer.spec = local_spec(layer.full_spec, shape[heads])
    layer.heads_axis = heads
    return layer
