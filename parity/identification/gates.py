"""Fit the gate that multiplies a context before the output projection."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mha_spec import Gate
from parity.identification.observe import ObservedLayer, Submodule
from parity.identification.trace import features_of, flat, is_close


def gates_of(layer: ObservedLayer, entered: np.ndarray) -> Iterator[tuple[Gate, Submodule, np.ndarray]]:
    """Yield each gate that turns the context into the input of an output projection.

    Args:
        layer: the layer.
        entered: input of the projection, (B * T, N * Hv).

    Yields:
        The gate without its bias, the submodule whose features pass through the sigmoid, and their places.
    """
    values = layer.values["context"]
    num_heads, head_dim = values.shape[1], values.shape[3]
    context = features_of(values).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(context == 0.0, 0.0, entered / context)
    for each in layer.linears():
        features = flat(each.result)
        if len(features) != len(context):
            continue
        opened = 1.0 / (1.0 + np.exp(-features.astype(np.float64)))
        errors = (factors**2).sum(0)[:, None] - 2.0 * factors.T @ opened + (opened**2).sum(0)
        places = errors.argmin(axis=1)
        if not is_close(context * opened[:, places], entered):
            continue
        by_head = places.reshape(num_heads, head_dim)
        per_head = head_dim > 1 and bool((by_head == by_head[:, :1]).all())
        yield Gate(per_head=per_head), each, by_head[:, 0] if per_head else places
