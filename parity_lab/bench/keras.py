"""Keras' layer, on whichever framework Keras runs."""

from __future__ import annotations

from typing import Any

from mha_spec import AttentionSpec
from parity.measure.core.weights import Weights
from parity.port.foreign import load_adapter
from parity.port.foreign.keras import import_keras


def keras_layer(framework: str, spec: AttentionSpec, dtype: str, weights: Weights) -> Any:
    """Return a `keras.layers.MultiHeadAttention` with these weights; Keras runs on the framework
    that asks first.

    Raises:
        ImportError: if Keras is not installed, or runs on another framework.
    """
    backend = import_keras(framework).backend.backend()
    if backend != framework:
        raise ImportError(
            f"Keras runs on one framework in a process, which is {backend} here (see KERAS_BACKEND)"
        )
    adapter = load_adapter("keras.layers.MultiHeadAttention")
    return adapter.load_into(adapter.make(spec, dtype), weights)
