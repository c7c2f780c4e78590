"""Cache of input projections and RoPE tables: most candidate bugs do not change them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np

from parity.explain.diagnosis.absorbed import BEGINNING
from parity.explain.diagnosis.changed_layer import ChangedLayer
from parity.explain.diagnosis.sample import has_rows_of_query
from parity.explain.diagnosis.work import (
    PER_FACTOR,
    PER_MULTIPLICATION,
    PER_NUMBER,
    ask,
    begin,
    spend,
    uncounted,
)
from parity.measure.core.reference import Arithmetic, Layer
from parity.measure.core.reference.arithmetic import LARGE, multiplications
from parity.measure.core.trace import Reference

MADE_OF = frozenset({"angles", "lengths"})
"""Other methods that a table depends on."""


MOST_WIDE = 2**22
"""The largest size of a weight that is also remembered in the dtype of sums."""


class Remembered:
    """Results of layers with one set of weights and inputs, computed once per arithmetic.

    Args:
        longer: results for longer inputs.
        tokens: indices of the tokens of the longer inputs that are these inputs.
        of_reference: whether the reference has already computed the projections of these inputs,
            but without this cache. No limit of work then delays to compute them once more.
    """

    def __init__(
        self,
        longer: Remembered | None = None,
        tokens: np.ndarray | slice = slice(0),
        *,
        of_reference: bool = False,
    ) -> None:
        self._longer, self._tokens, self._of_reference = longer, tokens, of_reference
        self._products: dict[Hashable, np.ndarray] = {}
        self._projected: dict[Hashable, np.ndarray] = {}
        self._tables: dict[Hashable, tuple[np.ndarray, np.ndarray]] = {}
        self._wide_weights: dict[Hashable, np.ndarray] = {}
        self._rows: dict[bytes, tuple[str, int]] = {}

    def serve(self, layer: ChangedLayer) -> ChangedLayer:
        """Return a layer that reads its projections and tables from this cache."""
        layer.override(
            linear=partial(self.linear, layer, layer.linear),
            tables=partial(self.tables, layer, layer.tables),
            wide_weight=partial(self.wide_weight, layer, layer.wide_weight),
        )
        return layer

    # ---- Projections -----------------------------------------------------------------------------

    def linear(self, layer: ChangedLayer, original: Any, name: str, x: np.ndarray) -> np.ndarray:
        """Return a projection, read-only if it is of an input of the problem.

        Products with the problem's weights, or with rows of them, are remembered.
        """
        problem, a = layer.problem, layer.arithmetic
        side = _name_in(problem.inputs, x)
        if side is None:
            return original(name, x)
        weight, bias, bias_name = layer.parameter(f"{name}.weight"), None, None
        if layer.has_bias(name):
            bias = layer.parameter(f"{name}.bias")
            bias_name = _name_in(problem.weights, bias)
        weight_name = _name_in(problem.weights, weight)
        # Small float32 products start with the bias and are summed term by term, so products of
        # other weights do not help.
        is_sum_of_product_and_bias = a.wide == np.float64 or multiplications(x, weight.T) > LARGE
        if weight_name is None and not is_sum_of_product_and_bias:
            return original(name, x)
        has_known_bias = bias is None or bias_name is not None
        is_known = weight_name is not None and has_known_bias
        key = (weight_name, bias_name, side, _key_of(a))
        if is_known and key in self._projected:
            return self._projected[key]
        product = None
        if is_sum_of_product_and_bias:
            if weight_name is not None:
                product = self._product(weight_name, side, layer, x)
            else:
                product = self._product_of_rows(side, layer, x, weight)
        if product is None:
            projected = original(name, x)
        elif bias is None:
            projected = a.keep(product)
        else:
            projected = a.keep(product + a.widen(bias))
        if is_known:
            self._projected[key] = projected
        projected.flags.writeable = False
        return projected

    def wide_weight(self, layer: ChangedLayer, original: Any, weight: np.ndarray) -> np.ndarray:
        """Return a weight in the dtype of sums, read-only. Conversion would take longer than its
        product with one token.
        """
        name = _name_in(layer.problem.weights, weight)
        if name is None or weight.size > MOST_WIDE:
            return original(weight)
        key = (name, _key_of(layer.arithmetic))
        if key not in self._wide_weights:
            wide = original(weight).view()
            wide.flags.writeable = False
            self._wide_weights[key] = wide
        return self._wide_weights[key]

    def _product(
        self, weight_name: str, side: str, layer: ChangedLayer, x: np.ndarray
    ) -> np.ndarray:
        """Return an input times a weight, without bias.

        Correct layers also need it, so its work is not counted. A sample with the query rows that
        it needs defers the product of all queries.
        """
        a = layer.arithmetic
        exact_key = (weight_name, side, None)  # independent of the hardware
        key = exact_key
        if a.wide != np.float64:
            key = (weight_name, side, _key_of(a))
        if key in self._products:
            return self._products[key]
        if self._longer is not None and key in self._longer._products:
            self._products[key] = self._longer._products[key][: len(x), self._tokens]
            return self._products[key]
        weight = layer.problem.weights[weight_name]
        is_of_all_queries = (weight_name, side) == ("q_proj.weight", "query")
        if is_of_all_queries and has_rows_of_query(layer.problem) and not self._of_reference:
            ask(PER_MULTIPLICATION * multiplications(x, weight.T), of_part=True)
        exact = None
        if layer.problem.dtype != "float64":
            exact = self._products.get(exact_key)
        with uncounted():
            self._products[key] = product_of(a, x, weight, exact)
        return self._products[key]

    def _product_of_rows(
        self, side: str, layer: ChangedLayer, x: np.ndarray, weight: np.ndarray
    ) -> np.ndarray | None:
        """Return an input times a weight whose rows come from the problem's weights.

        Known products have them already. None if the weight has other rows.
        """
        sources = self._sources_of(layer, weight)
        if sources is None:
            return None
        begin(PER_NUMBER / 2 * multiplications(x, weight.T) / weight.shape[1])
        product = np.empty((*x.shape[:-1], len(weight)), layer.arithmetic.wide)
        for weight_name, (rows, rows_of_weight) in sources.items():
            product_of_source = self._product(weight_name, side, layer, x)
            product[..., rows_of_weight] = product_of_source[..., rows]
        return product

    def _sources_of(
        self, layer: ChangedLayer, weight: np.ndarray
    ) -> dict[str, tuple[np.ndarray, np.ndarray]] | None:
        """Return the projections that a weight's rows come from, None if one is unknown.

        Each has its rows and their positions in the weight. Packed weights that were read in a
        different order consist of such rows.
        """
        own_weights = layer.problem.weights
        if not self._rows:
            self._index_rows(own_weights)
        rows_of: dict[str, list[int]] = {}
        indices_of: dict[str, list[int]] = {}
        for index_in_weight, row in enumerate(weight):
            source = self._rows.get(row[:BEGINNING].tobytes())
            if source is None:
                return None
            name, index = source
            rows_of.setdefault(name, []).append(index)
            indices_of.setdefault(name, []).append(index_in_weight)
        spend(PER_FACTOR * weight.size)
        sources = {}
        for name, indices in rows_of.items():
            rows, rows_of_weight = np.array(indices), np.array(indices_of[name])
            # The beginnings of rows only suggest where they come from.
            if not np.array_equal(own_weights[name][rows], weight[rows_of_weight]):
                return None
            sources[name] = rows, rows_of_weight
        return sources

    def _index_rows(self, weights: Mapping[str, np.ndarray]) -> None:
        """Index the rows of all projections by the bytes of their beginnings."""
        for name, weight in weights.items():
            if name.endswith("_proj.weight"):
                for index, row in enumerate(weight):
                    self._rows[row[:BEGINNING].tobytes()] = name, index

    # ---- Tables ----------------------------------------------------------------------------------

    def tables(
        self, layer: ChangedLayer, original: Any, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosines and sines of some positions."""
        if not layer.overrides.keys().isdisjoint(MADE_OF):
            return original(positions)
        of_layer = (layer.rope(), layer.problem.spec.head_dim, layer.attention_factor())
        of_positions = (positions.shape, positions.dtype, positions.tobytes())
        key = (of_layer, of_positions, _key_of(layer.arithmetic))
        if key not in self._tables:
            self._tables[key] = original(positions)
        cos, sin = self._tables[key]
        return cos.copy(), sin.copy()


class RememberingReference(Reference):
    """Reference whose projections and tables a search uses again."""

    @cached_property
    def remembered(self) -> Remembered:
        """Projections of the inputs, also for other layers of the problem."""
        return Remembered()

    def layer(self, arithmetic: Arithmetic) -> Layer:
        """Return the layer of the problem in an arithmetic, which fills the cache."""
        return self.remembered.serve(ChangedLayer(self.problem, arithmetic))


def remembered_of(reference: Reference) -> Remembered:
    """Return the projections of a reference, or a cache to compute them once more."""
    if isinstance(reference, RememberingReference):
        return reference.remembered
    return Remembered(of_reference=True)


def _key_of(arithmetic: Arithmetic) -> Hashable:
    """Return what the results of an arithmetic depend on, whether or not it counts its work."""
    return arithmetic.dtype, arithmetic.kind


def product_of(
    a: Arithmetic, x: np.ndarray, weight: np.ndarray, exact: np.ndarray | None
) -> np.ndarray:
    """Return an input times a weight (out, in), from the float64 product if that saves work."""
    x, weight = a.widen(x), a.weight(a.widen(weight)).T
    # Truncated operands do not have the sums of the float64 product.
    if exact is None or not a.takes_whole_operands or not a.is_only_sampled(x, weight):
        return a.matmul(x, weight)
    product = exact.astype(np.float32)
    product += a.excess_noise(x, weight, product)
    return product


def _name_in(arrays: dict[str, np.ndarray], array: np.ndarray) -> str | None:
    """Return the name of an array among others, by identity; None if it is not among them."""
    for name, other in arrays.items():
        if other is array:
            return name
    return None
