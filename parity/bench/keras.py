"""Keras' layer, on whichever framework Keras runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mha_spec import AttentionSpec
from parity.conversion.layouts import LAYOUTS, from_canonical
from parity.core.weights import Weights


@contextmanager
def _backend(framework: str) -> Iterator[None]:
    """Meanwhile Keras, if it is not imported yet and the user has chosen no backend, would be imported on this one."""
    if "KERAS_BACKEND" in os.environ:
        yield
        return
    os.environ["KERAS_BACKEND"] = framework
    try:
        yield
    finally:
        del os.environ["KERAS_BACKEND"]


def keras_layer(framework: str, spec: AttentionSpec, dtype: str, weights: Weights) -> Any:
    """A `keras.layers.MultiHeadAttention` with these weights; the framework that asks first is the one it runs on.

    Raises:
        ImportError: if Keras is not installed, or runs on another framework.
    """
    with _backend(framework):
        import keras

    if (backend := keras.backend.backend()) != framework:
        raise ImportError(f"Keras runs on one framework in a process, which is {backend} here (see KERAS_BACKEND)")
    layer = keras.layers.MultiHeadAttention(spec.num_heads, spec.head_dim, dtype=dtype)
    layer.build((None, None, spec.d_in), (None, None, spec.d_kv))
    tensors = from_canonical(weights, spec, LAYOUTS["keras.MultiHeadAttention"])
    for variable in layer.trainable_variables:
        tensor = tensors[variable.path.split("/", 1)[1].replace("/", ".")]
        variable.assign(keras.ops.convert_to_tensor(tensor.astype("float32")))
    return layer
