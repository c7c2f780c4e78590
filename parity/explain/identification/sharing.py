"""Find the layer whose keys and values another layer shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parity.explain.identification.observe import ObservedLayer


def kv_source_of(layer: ObservedLayer, others: Sequence[ObservedLayer]) -> ObservedLayer | None:
    """Return the first layer with the keys and values of a layer, bit for bit, if it ran before;
    else None.

    Args:
        layer: the observed layer.
        others: the layers of its model in the same call, in the order in which they ran.
    """
    for other in others:
        if other is layer:
            return None
        if _are_equal(layer, other, "k") and _are_equal(layer, other, "v"):
            return other
    return None


def describe_source(layer: ObservedLayer, others: Sequence[ObservedLayer]) -> dict[str, str]:
    """Return where the keys and values of a layer come from, in words; nothing if no other layer
    has them.
    """
    source = kv_source_of(layer, others)
    if source is None:
        return {}
    name = source.tapped.name
    return {"key": f"the keys of {name}", "value": f"the values of {name}"}


def _are_equal(layer: ObservedLayer, other: ObservedLayer, name: str) -> bool:
    one, another = layer.values.get(name), other.values.get(name)
    return one is not None and another is not None and np.array_equal(one, another)
