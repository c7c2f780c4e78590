"""Read the mask that a layer receives, if it hides keys of some sequences alone, as of shifted
windows.
"""

from __future__ import annotations

import numpy as np

from mha_spec import InputError
from parity.explain.identification.evidence import Evidence, FittedLayer
from parity.explain.identification.observe import ObservedLayer

HIDES = -50.0
"""The largest number that hides a key: -100 leaves e**-100 of its weight, unless scores differ by
as much.
"""


def without_call_mask(layer: ObservedLayer, fitted: FittedLayer) -> ObservedLayer:
    """Return a layer with only the sequences whose keys its mask does not hide.

    Args:
        layer: the observed layer.
        fitted: collects the name of the argument that is a mask, if one is.
    """
    for name in layer.arguments:
        hidden = _hidden_by(layer, name)
        if hidden is None or (hidden == hidden[:1]).all():
            continue
        sequences = _sequences_without(hidden)
        if sequences.any():
            fitted.mask = name
            how = (
                f"argument of the module, whose values below {HIDES:.0f} hide keys of some "
                f"sequences"
            )
            fitted.evidence.append(Evidence("mask", name, how))
            return _with_sequences(layer, sequences)
    return layer


def with_call_mask(layer: ObservedLayer, name: str, *, is_large: bool) -> ObservedLayer:
    """Return a layer with the mask that it receives.

    Args:
        layer: the observed layer.
        name: name of the argument that is its mask; empty if there is none.
        is_large: whether scores are so large that finite values may not hide keys. Only sequences
            without hidden keys remain.

    Raises:
        ValueError: if the argument is not such a mask.
    """
    if not name:
        return layer
    hidden = _hidden_by(layer, name)
    if hidden is None or (is_large and not _sequences_without(hidden).any()):
        rule = "be a mask of floats in each call, for some sequences alone"
        raise InputError(name, rule, "a different one")
    if is_large:
        return _with_sequences(layer, _sequences_without(hidden))
    return layer.with_values({**layer.values, "mask": hidden, "call_mask": hidden})


def _hidden_by(layer: ObservedLayer, name: str) -> np.ndarray | None:
    """Return the keys that an argument hides by its values, (B, 1, T, S); None for any other
    array.
    """
    x = layer.arguments.get(name)
    batch_size, _, num_queries, _ = layer.values["q"].shape
    num_keys = layer.values["k"].shape[2]
    if x is None or x.ndim < 3 or x.shape[-2:] != (num_queries, num_keys):
        return None
    numbers = x.reshape(-1, 1, num_queries, num_keys)
    hidden = numbers < HIDES
    # Values other than 0 would be a bias.
    if batch_size % len(numbers) or numbers[~hidden].any():
        return None
    return np.tile(hidden, (batch_size // len(numbers), 1, 1, 1))


def _sequences_without(hidden: np.ndarray) -> np.ndarray:
    """Return which sequences have no hidden keys, (B,)."""
    return np.logical_not(hidden.any(axis=(1, 2, 3)))


def _with_sequences(layer: ObservedLayer, sequences: np.ndarray) -> ObservedLayer:
    """Return a layer with some of its sequences alone."""
    values = dict(layer.values)
    for name, x in layer.values.items():
        if len(x) == len(sequences):
            values[name] = x[sequences]
    return layer.with_values(values)
