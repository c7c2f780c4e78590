"""Fit the gate that multiplies a context before the output projection."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from mha_spec import Gate
from parity.explain.identification.endpoints import endpoint_of
from parity.explain.identification.evidence import FittedLayer
from parity.explain.identification.observe import ObservedLayer, Submodule
from parity.explain.identification.trace import as_tokens, features_of, is_close
from parity.measure.core.arrays import to_numpy


class GateBias(NamedTuple):
    """A parameter of a layer that may be added to the output of the projection of its gate.

    Attributes:
        name: name of the parameter; empty for no bias.
        added: the number for each feature of the projection.
    """

    name: str
    added: np.ndarray


NO_BIAS = GateBias("", np.zeros(1))


class ObservedGate(NamedTuple):
    """A gate of a context.

    Attributes:
        gate: without the bias of its projection.
        projection: the submodule whose features it is the sigmoid of.
        indices: indices of these features in its output.
        bias: added to them.
    """

    gate: Gate
    projection: Submodule
    indices: np.ndarray
    bias: GateBias


def fit_gate(layer: ObservedLayer, projected: np.ndarray, fitted: FittedLayer) -> bool:
    """Fit the gate before an output projection; return whether there is one.

    Args:
        layer: the layer.
        projected: input of the output projection, (B * T, N * Hv).
        fitted: collects the fields.
    """
    query = layer.submodule(*fitted.endpoints["query"])
    for observed in _gates_of(layer, projected):
        projection, indices, bias = observed.projection, observed.indices, observed.bias
        if not np.array_equal(as_tokens(projection.input), as_tokens(query.input)):
            continue
        has_bias = fitted.project("gate_proj", projection, indices)
        how = f"the context is multiplied by the sigmoid of the output of {projection.name}"
        if bias.name:
            own_bias = fitted.weights.get("gate_proj.bias", 0.0)
            fitted.weights["gate_proj.bias"] = bias.added[indices] + own_bias
            fitted.names["gate_proj.bias"] = bias.name
            has_bias = True
            how += f" plus {bias.name}"
        fitted.add("gate", observed.gate.replace(bias=has_bias), how)
        fitted.endpoints["gate"] = endpoint_of(projection)
        return True
    return False


def _gates_of(layer: ObservedLayer, projected: np.ndarray) -> Iterator[ObservedGate]:
    """Yield each gate that turns the context into the input of an output projection."""
    heads = layer.values["context"]
    num_heads, head_dim = heads.shape[1], heads.shape[3]
    context = features_of(heads).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(context == 0.0, 0.0, projected / context)
    projections = []
    for linear in layer.linears():
        if len(as_tokens(linear.output)) == len(context):
            projections.append(linear)
    for projection, bias in product(projections, [NO_BIAS, *_biases(layer)]):
        if bias.added.size not in (1, projection.output.shape[-1]):
            continue
        features = as_tokens(projection.output).astype(np.float64) + bias.added
        opened = 1.0 / (1.0 + np.exp(-features))
        indices = _nearest_columns(factors, opened)
        if not is_close(context * opened[:, indices], projected):
            continue
        by_head = indices.reshape(num_heads, head_dim)
        per_head = head_dim > 1 and bool((by_head == by_head[:, :1]).all())
        if per_head:
            indices = by_head[:, 0]
        yield ObservedGate(Gate(per_head=per_head), projection, indices, bias)


def _nearest_columns(wanted: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the index of the nearest column for each wanted one, by the sum of squared errors."""
    squares = (wanted**2).sum(0)[:, None] + (columns**2).sum(0)
    return (squares - 2.0 * wanted.T @ columns).argmin(axis=1)


def _biases(layer: ObservedLayer) -> Iterator[GateBias]:
    """Yield parameters of a layer that may be biases of gates: one for each head, or for each
    feature.
    """
    _, num_heads, _, head_dim = layer.values["context"].shape
    for name, parameter in layer.module.named_parameters(recurse=False):
        if parameter.shape == (num_heads,):
            yield GateBias(name, to_numpy(parameter))
            yield GateBias(name, to_numpy(parameter).repeat(head_dim))
        elif parameter.shape == (num_heads * head_dim,):
            yield GateBias(name, to_numpy(parameter))
