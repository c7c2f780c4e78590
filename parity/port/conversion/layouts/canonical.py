"""Convert canonical weights to the tensors of a layout and back, by two inverse functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np

from mha_spec import AttentionSpec, InputTypeError
from parity.measure.core.arrays import to_numpy_by_name
from parity.measure.core.weights import Weights, check_weights, is_floating
from parity.port.conversion.hints import CALLER, LayerHints, LayerKeywords
from parity.port.conversion.layouts.detection import (
    find_placement,
    find_spec,
    placement_for,
    placements,
)
from parity.port.conversion.layouts.layout import Layout, unused_in
from parity.port.conversion.layouts.losses import Written, check_losses


def from_canonical(weights: Mapping[str, Any], spec: AttentionSpec, layout: Layout) -> Weights:
    """Convert canonical weights to the tensors of a layout.

    Raises:
        TypeError, ValueError: if the weights do not match the spec, or the layout cannot represent
            the layer.
    """
    check_losses([Written(spec)], layout)
    read = check_weights(weights, spec).__getitem__
    placement = placement_for([read], spec, layout)
    return {name: placement.lay_out(name, read) for name in placement.shapes}


def shapes_in(layout: Layout, spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a layer's tensors in a layout.

    Raises:
        ValueError: if the layout cannot represent the layer.
    """
    # The first form that can represent a layer is the one that is written.
    return placements(spec, layout)[0].shapes


def to_canonical(
    tensors: Mapping[str, Any], layout: Layout, **keywords: Unpack[LayerKeywords]
) -> tuple[Weights, AttentionSpec]:
    """Convert the tensors of a layout to canonical weights, and infer the specification.

    Args:
        tensors: arrays by name, of any framework, without the prefix of the layer; nested mappings
            are accepted, as in Flax.
        layout: their layout.
        keywords: the layer, if the shapes are ambiguous. Tensors never show RoPE.

    Raises:
        ValueError: if names are missing or unknown, shapes do not fit, or the heads are ambiguous.
    """
    arrays = {}
    for name, array in to_numpy_by_name(tensors).items():
        if not layout.ignores(name):
            arrays[name] = array
    _check_dtypes(arrays)
    shapes = {name: array.shape for name, array in arrays.items()}
    hints = LayerHints.by(CALLER, **keywords)
    spec = hints.spec
    if spec is None:
        spec = find_spec(shapes, layout, hints)
    for name in unused_in(layout, spec):
        shapes.pop(name, None)
    placement = find_placement(shapes, spec, layout)
    weights = {}
    for name in placement.weights:
        # A copy, because a read weight may share memory with the caller's tensors.
        weights[name] = np.array(placement.read_out(name, arrays.__getitem__), order="C")
    return check_weights(weights, spec), spec


def _check_dtypes(arrays: Mapping[str, np.ndarray]) -> None:
    """Reject arrays that are not of one floating-point dtype."""
    for name, array in arrays.items():
        if not is_floating(array.dtype):
            raise InputTypeError(name, "be a floating-point array", {f"{name}.dtype": array.dtype})
    dtypes = sorted({array.dtype.name for array in arrays.values()})
    if len(dtypes) > 1:
        raise InputTypeError("weights", "have one dtype", str(dtypes))
