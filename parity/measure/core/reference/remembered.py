"""Cache of input projections and RoPE tables: most candidate bugs do not change them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from parity.measure.core.absorbed import BEGINNING, has_rows_of_query
from parity.measure.core.reference.arithmetic import LARGE, multiplications
from parity.measure.core.reference.layer import Layer
from parity.measure.core.work import (
    PER_FACTOR,
    PER_MULTIPLICATION,
    PER_NUMBER,
    ask,
    begin,
    spend,
    uncounted,
)

MADE_OF = frozenset({"angles", "lengths"})
"""Other methods that a table depends on."""


class Remembered:
    """Results of layers with one set of weights and inputs, computed once per arithmetic.

    Args:
        longer: results for longer inputs.
        tokens: indices of the tokens of the longer inputs that are these inputs.
    """

    def __init__(
        self, longer: Remembered | None = None, tokens: np.ndarray | slice = slice(0)
    ) -> None:
        self._longer, self._tokens = longer, tokens
        self._products: dict[tuple[Any, ...], np.ndarray] = {}
        self._projected: dict[tuple[Any, ...], np.ndarray] = {}
        self._tables: dict[tuple[Any, ...], tuple[np.ndarray, np.ndarray]] = {}
        self._rows: dict[bytes, tuple[str, int]] = {}

    def serve(self, layer: Layer) -> Layer:
        """Return a layer that reads its projections and tables from this cache."""
        layer.override(
            linear=partial(self.linear, layer, layer.linear),
            tables=partial(self.tables, layer, layer.tables),
        )
        return layer

    def linear(self, layer: Layer, original: Any, name: str, x: np.ndarray) -> np.ndarray:
        """Return a read-only projection of an input of the problem by one of its weights, or by
        rows of them.
        """
        given = next((key for key, array in layer.problem.inputs.items() if array is x), None)
        if given is None:
            return original(name, x)
        a, weight = layer.arithmetic, layer.parameter(f"{name}.weight")
        bias = layer.parameter(f"{name}.bias") if layer.has_bias(name) else None
        source, added = _name_of(layer, weight), None if bias is None else _name_of(layer, bias)
        is_fast = a.wide == np.float64 or multiplications(x, weight.T) > LARGE
        if not is_fast and source is None:
            return original(name, x)
        key, is_known = (
            (source, added, given, a),
            source is not None and (bias is None or added is not None),
        )
        if is_known and key in self._projected:
            return self._projected[key]
        product = self._made(source, given, layer, x, weight) if is_fast else None
        if product is not None and bias is not None:
            product = product + a.widen(bias)
        found = original(name, x) if product is None else a.keep(product)
        if is_known:
            self._projected[key] = found
        found.flags.writeable = False
        return found

    def _made(
        self, source: str | None, given: str, layer: Layer, x: np.ndarray, weight: np.ndarray
    ) -> np.ndarray | None:
        """Return an input times a weight, from known products; None if the rows are not of the
        problem's weights.
        """
        if source is not None:
            return self._product(source, given, layer, x)
        if (made_of := self._made_of(layer, weight)) is None:
            return None
        begin(PER_NUMBER / 2 * multiplications(x, weight.T) / weight.shape[1])
        product = np.empty((*x.shape[:-1], len(weight)), layer.arithmetic.wide)
        for each, (rows, places) in made_of.items():
            known = self._product(each, given, layer, x)
            for some, where in _in_a_row(rows, places):
                product[..., where] = known[..., some]
        return product

    def _product(self, source: str, given: str, layer: Layer, x: np.ndarray) -> np.ndarray:
        """Return an input times a weight, without bias. Correct layers also need it, so its work is
        not counted.

        A sample with the query rows that it needs defers the product of all queries.
        """
        a = layer.arithmetic
        of_float64 = (source, given, None)  # independent of the hardware
        key = of_float64 if a.wide == np.float64 else (source, given, a)
        if key not in self._products:
            longer = None if self._longer is None else self._longer._products.get(key)
            if longer is not None:
                self._products[key] = longer[: len(x), self._tokens]
            else:
                weight = layer.problem.weights[source]
                if (source, given) == ("q_proj.weight", "query") and has_rows_of_query(
                    layer.problem
                ):
                    ask(PER_MULTIPLICATION * multiplications(x, weight.T), of_part=True)
                exact = None if layer.problem.dtype == "float64" else self._products.get(of_float64)
                with uncounted():
                    self._products[key] = a.matmul(
                        a.widen(x), a.weight(a.widen(weight)).T, exact=exact
                    )
        return self._products[key]

    def _made_of(
        self, layer: Layer, weight: np.ndarray
    ) -> dict[str, tuple[np.ndarray, np.ndarray]] | None:
        """Return the projections that a weight's rows come from, each with its rows and places;
        None if one is unknown.

        Packed weights that were read in another order consist of such rows.
        """
        if not self._rows:
            known = [
                (name, x)
                for name, x in layer.problem.weights.items()
                if name.endswith("_proj.weight")
            ]
            self._rows = {
                row[:BEGINNING].tobytes(): (name, i) for name, x in known for i, row in enumerate(x)
            }
        found: dict[str, tuple[list[int], list[int]]] = {}
        for place, row in enumerate(weight):
            if (source := self._rows.get(row[:BEGINNING].tobytes())) is None:
                return None
            rows, places = found.setdefault(source[0], ([], []))
            rows.append(source[1])
            places.append(place)
        made_of = {
            name: (np.array(rows), np.array(places)) for name, (rows, places) in found.items()
        }
        spend(PER_FACTOR * weight.size)
        is_made = (
            np.array_equal(layer.problem.weights[name][some], weight[where])
            for name, (rows, places) in made_of.items()
            for some, where in _in_a_row(rows, places)
        )
        return made_of if all(is_made) else None

    def tables(
        self, layer: Layer, original: Any, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosines and sines of some positions."""
        if not layer.overrides.keys().isdisjoint(MADE_OF):
            return original(positions)
        key = (
            layer.rope(),
            layer.problem.spec.head_dim,
            layer.arithmetic,
            layer.attention_factor(),
        )
        key = (*key, positions.shape, positions.dtype, positions.tobytes())
        if key not in self._tables:
            self._tables[key] = original(positions)
        cos, sin = self._tables[key]
        return cos.copy(), sin.copy()


def _in_a_row(rows: np.ndarray, places: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Return runs of consecutive rows and places, usually heads, so that slices need no copy."""
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(places) != 1)) + 1
    for some, where in zip(np.split(rows, breaks), np.split(places, breaks), strict=True):
        yield slice(some[0], some[-1] + 1), slice(where[0], where[-1] + 1)


def _name_of(layer: Layer, array: np.ndarray) -> str | None:
    """Return the name of a weight of the problem, or None."""
    return next((name for name, weight in layer.problem.weights.items() if weight is array), None)
