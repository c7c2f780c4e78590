"""Fit the gate that multiplies a context before the output projection."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from mha_spec import Gate
from parity.explain.identification.observe import ObservedLayer, Submodule
from parity.explain.identification.trace import features_of, flat, is_close
from parity.measure.core.arrays import to_numpy


class SeenGate(NamedTuple):
    """A gate of a context.

    Attributes:
        gate: without the bias of its projection.
        projection: the submodule whose features it is the sigmoid of.
        places: of these features in its output.
        bias: name of a parameter of the layer that is added to them; empty if there is none.
        added: numbers that it adds to each feature.
    """

    gate: Gate
    projection: Submodule
    places: np.ndarray
    bias: str
    added: np.ndarray


def gates_of(layer: ObservedLayer, entered: np.ndarray) -> Iterator[SeenGate]:
    """Yield each gate that turns the context into the input of an output projection.

    Args:
        layer: the layer.
        entered: input of the projection, (B * T, N * Hv).

    Yields:
        The gate without its bias, the submodule whose features pass through the sigmoid, and their
        places.
    """
    values = layer.values["context"]
    num_heads, head_dim = values.shape[1], values.shape[3]
    context = features_of(values).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(context == 0.0, 0.0, entered / context)
    known = [each for each in layer.linears() if len(flat(each.result)) == len(context)]
    for each, (bias, added) in product(known, [("", np.zeros(1)), *_biases(layer)]):
        if added.size not in (1, each.result.shape[-1]):
            continue
        features = flat(each.result).astype(np.float64) + added
        opened = 1.0 / (1.0 + np.exp(-features))
        errors = (factors**2).sum(0)[:, None] - 2.0 * factors.T @ opened + (opened**2).sum(0)
        places = errors.argmin(axis=1)
        if not is_close(context * opened[:, places], entered):
            continue
        by_head = places.reshape(num_heads, head_dim)
        per_head = head_dim > 1 and bool((by_head == by_head[:, :1]).all())
        places = by_head[:, 0] if per_head else places
        yield SeenGate(Gate(per_head=per_head), each, places, bias, added)


def _biases(layer: ObservedLayer) -> Iterator[tuple[str, np.ndarray]]:
    """Yield parameters of a layer that may be biases of gates, by name: one for each head, or for
    each feature.
    """
    _, num_heads, _, head_dim = layer.values["context"].shape
    for name, x in layer.module.named_parameters(recurse=False):
        if x.shape == (num_heads,):
            yield name, to_numpy(x)
            yield name, to_numpy(x).repeat(head_dim)
        elif x.shape == (num_heads * head_dim,):
            yield name, to_numpy(x)
