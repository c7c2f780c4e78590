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
    name, token_axes = "is_real", TOKENS
    if layer.is_cross:
        name, token_axes = "key_is_real", KEYS
    is_real = layer.values.get(name)
    if is_real is None:
        return layer
    longest = is_real[is_real.sum(axis=1).argmax()]
    sequences = np.flatnonzero((is_real == longest).all(axis=1))
    tokens = np.flatnonzero(longest)
    values = dict(layer.values)
    del values[name]
    for value in token_axes.keys() & values.keys():
        x = values[value]
        if len(x) == len(is_real):
            x = x[sequences]
        for axis in token_axes[value]:
            # Other axes may be broadcast: they have a single index.
            if x.shape[axis] == len(longest):
                x = x.take(tokens, axis)
        values[value] = x
    return layer.with_values(values)
