"""Projections of the inputs and tables of RoPE, computed once: most mistakes and numbers tried leave them alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from parity.core.reference.arithmetic import LARGE, multiplications
from parity.core.reference.layer import Layer

MADE_OF = frozenset({"angles", "lengths"})
"""The methods, beside its own, that a table depends on."""


class Remembered:
    """Results of layers of one set of weights and inputs, each computed once for each arithmetic.

    Args:
        longer: results for longer inputs.
        tokens: how many of the first tokens of those are the inputs of this.
    """

    def __init__(self, longer: Remembered | None = None, tokens: int = 0) -> None:
        self._longer, self._tokens = longer, tokens
        self._products: dict[tuple[Any, ...], np.ndarray] = {}
        self._tables: dict[tuple[Any, ...], tuple[np.ndarray, np.ndarray]] = {}

    def serve(self, layer: Layer) -> Layer:
        """A layer that takes its projections and tables from here."""
        for method in ("linear", "tables"):
            vars(layer)[method] = partial(getattr(self, method), layer, getattr(layer, method))
        return layer

    def linear(self, layer: Layer, original: Any, name: str, x: np.ndarray) -> np.ndarray:
        """A projection of an input of the problem by one of its weights, or by rows of them."""
        given = next((key for key, array in layer.problem.inputs.items() if array is x), None)
        weight = layer.parameter(f"{name}.weight")
        source = _name_of(layer, weight)
        if given is None or source is None:
            return original(name, x)
        a, has_bias = layer.arithmetic, layer.has_bias(name)
        bias = layer.parameter(f"{name}.bias") if has_bias else None
        if a.wide == np.float64 or multiplications(x, weight.T) > LARGE:
            product = self._product((source, given, a), layer, weight, x)
            return a.keep(product.copy() if bias is None else product + a.widen(bias))  # a mistake may be made in place
        key = (source, None if bias is None else _name_of(layer, bias), given, a)  # the sum begins with the bias
        if bias is not None and key[1] is None:
            return original(name, x)
        if key not in self._products:
            self._products[key] = original(name, x)
        return self._products[key].copy()

    def _product(self, key: tuple[Any, ...], layer: Layer, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
        """An input times a weight, without a bias."""
        if key not in self._products:
            longer = None if self._longer is None else self._longer._products.get(key)
            if longer is not None:
                self._products[key] = longer[: len(x), : self._tokens]
            else:
                a = layer.arithmetic
                self._products[key] = a.matmul(a.widen(x), a.weight(a.widen(weight)).T)
        return self._products[key]

    def tables(self, layer: Layer, original: Any, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The cosines and sines of some positions."""
        if not vars(layer).keys().isdisjoint(MADE_OF):
            return original(positions)
        key = (layer.rope(), layer.problem.spec.head_dim, layer.arithmetic, layer.attention_factor())
        key = (*key, positions.shape, positions.dtype, positions.tobytes())
        if key not in self._tables:
            self._tables[key] = original(positions)
        cos, sin = self._tables[key]
        return cos.copy(), sin.copy()


def _name_of(layer: Layer, array: np.ndarray) -> str | None:
    """The name of a weight of the problem; None of what is none."""
    return next((name for name, weight in layer.problem.weights.items() if weight is array), None)
