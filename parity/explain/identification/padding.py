"""Remove padding from an observed layer."""

from __future__ import annotations

import numpy as np

from parity.explain.identification.observe import ObservedLayer

TOKENS = {"input": (1,), "q": (2,), "k": (2,), "v": (2,), "mask": (2, 3), "scores": (2, 3)}
"""Token axes of the values that a mask affects, by name."""

KEYS = {"input": (), "q": (), "key_input": (1,), "k": (2,), "v": (2,), "mask": (3,), "scores": (3,)}
"""Token axes if keys come from another sequence; the remaining values keep all queries."""


def without_padding(layer: ObservedLayer) -> ObservedLayer:
    """Return a layer with only the real tokens of its longest sequences."""
    name, axes = ("key_is_real", KEYS) if layer.is_cross else ("is_real", TOKENS)
    is_real = layer.values.get(name)
    if is_real is None:
        return layer
    longest = is_real[is_real.sum(axis=1).argmax()]
    rows, tokens = np.flatnonzero((is_real == longest).all(axis=1)), np.flatnonzero(longest)
    values = {each: x for each, x in layer.values.items() if each != name}
    for each in axes.keys() & values.keys():
        x = values[each]
        values[each] = x[rows] if len(x) == len(is_real) else x
        for axis in axes[each]:
            values[each] = (
                values[each].take(tokens, axis) if x.shape[axis] == len(longest) else values[each]
            )
    return layer.with_values(values)
