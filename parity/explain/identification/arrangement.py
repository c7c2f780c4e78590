"""Arrange attention of a program as heads, (B, heads, T, features or keys)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mha_spec import InputError
from parity.explain.identification.attention_finder import Attention, AttentionFinder
from parity.explain.identification.biases import scored
from parity.explain.identification.evaluated import (
    AxisProbe,
    EvaluatedProgram,
    rounded_to_float32,
)
from parity.explain.identification.head_axes import (
    Axes,
    as_heads,
    input_of,
    is_exchanged,
    name_axes,
)
from parity.explain.identification.program import Values
from parity.explain.identification.program_norms import NormOfProgram, find_norm
from parity.explain.identification.program_positions import movable_positions, with_positions_from
from parity.explain.identification.program_scores import (
    HIDES,
    ScoreFactors,
    fit_score_factors,
    scaled_operand,
)


@dataclass(frozen=True)
class HeadOrder:
    """The order of heads in which consecutive query heads use one key/value head.

    Attributes:
        query_heads: index of each query head among the heads of the module.
        kv_heads: indices of the distinct key/value heads among repeated ones.
    """

    query_heads: np.ndarray
    kv_heads: np.ndarray


@dataclass(frozen=True)
class ArrangedAttention:
    """Attention of a program, and how its values are arranged.

    Attributes:
        evaluated: the program with the values of the call that showed the arrangement.
        attention: the attention, with queries and keys distinguished.
        inputs: numbers of the inputs of the projections, (B, T, features).
        axes: axes of each stage by name.
        order: the order of heads.
        unscaled: queries and keys before a scalar multiplies them, by the number of the product.
        factors: factors that turn products of queries and keys into scores.
        scale: total factor of the products of queries and keys.
        norms: positions of the norms for queries, keys and values.
        positions: numbers of the positions of queries and keys that can be moved.
    """

    evaluated: EvaluatedProgram = field(repr=False)
    attention: Attention
    inputs: Mapping[str, int]
    axes: Mapping[str, Axes]
    order: HeadOrder
    unscaled: Mapping[int, int]
    factors: ScoreFactors
    scale: float
    norms: Mapping[str, NormOfProgram]
    positions: set[int]

    def heads(self, values: Values) -> dict[str, np.ndarray]:
        """Return the values of a call by stage, (B, heads, T, features or keys); queries and keys
        are unscaled.
        """
        unscaled = self._unscaled_values(values)
        heads = {}
        for part, number in self.attention.numbers.items():
            x = values[number]
            if part in ("q", "k"):
                x = unscaled[number]
            heads_of_part = as_heads(np.asarray(x), self.axes[part])
            if part in ("k", "v"):
                heads[part] = heads_of_part[:, self.order.kv_heads]
            else:
                heads[part] = heads_of_part[:, self.order.query_heads]
        return heads

    def _unscaled_values(self, values: Values) -> Values:
        """Return a call without the scalar factors of queries and keys."""
        program = self.evaluated.program
        before_scores = program.ancestors(self.attention.operands.values())
        unscaled = dict(values)
        for product, source in sorted(self.unscaled.items()):
            affected = program.descendants([product]) & before_scores
            unscaled |= program.recompute(unscaled, {product: unscaled[source]}, affected)
        return unscaled

    def is_hidden(self, heads: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the keys that the scores of a call hide, (B, heads, T, S)."""
        expected = scored(heads["scores"], self.factors.factor, self.factors.soft_cap)
        return heads["logits"] < expected - HIDES

    def with_positions_from(self, values: Values, first: int) -> Values:
        """Return a call with its tokens at positions from `first` on, or as far as its RoPE tables
        reach.
        """
        program = self.evaluated.program
        return with_positions_from(program, values, self.positions, self.inputs, first)

    def constants_of_queries(self) -> list[float]:
        """Return the constant scalars above 1 that queries are computed from, after the input."""
        queries = self.attention.operands["q"]
        return self.evaluated.scalars_between(self.inputs["q"], queries, 1.0, np.inf)

    @property
    def order_description(self) -> str:
        """Return how query heads are put in the order of their key heads; empty if they already
        are.
        """
        order, num_kv_heads = self.order.query_heads.tolist(), len(self.order.kv_heads)
        if order == sorted(order):
            return ""
        listed = " ".join(map(str, order))
        description = f"the module's query heads are in the order {listed}"
        tiled = []
        for kv_head in range(num_kv_heads):
            tiled += range(kv_head, len(order), num_kv_heads)
        if order == tiled:
            description += f", whose head n uses key head n mod {num_kv_heads}: tiled"
        return f"{description}; so are columns of out_proj"


def arrange(finder: AttentionFinder, attention: Attention, values: Values) -> ArrangedAttention:
    """Return how the values of an attention are arranged, by experiments with a call.

    Args:
        finder: the finder of attention in the program.
        attention: the attention.
        values: values of a call.

    Raises:
        ValueError: if a value is not arranged as in attention; the message names it.
    """
    evaluated = EvaluatedProgram(finder, values)
    _check_dtypes(evaluated, attention)
    inputs = {}
    for part, projection in attention.projections.items():
        inputs[part] = input_of(evaluated, projection)
    probe = AxisProbe(evaluated, frozenset(inputs.values()))
    if is_exchanged(probe, attention, inputs):
        attention = attention.exchanged()
        inputs = {"q": inputs["k"], "k": inputs["q"], "v": inputs["v"]}
    axes = name_axes(probe, attention, inputs)

    heads = {}
    for part, number in attention.numbers.items():
        heads[part] = as_heads(evaluated.array(number), axes[part])
    order = _head_order(heads)
    queries = scaled_operand(evaluated, attention.operands["q"])
    keys = scaled_operand(evaluated, attention.operands["k"])
    factors = fit_score_factors(
        evaluated,
        attention,
        heads["scores"].astype(np.float64),
        heads["logits"].astype(np.float64),
        heads["attn_weights"].astype(np.float64),
    )

    norms = {}
    for part, operand in attention.operands.items():
        projected = attention.projections[part].output
        norm = find_norm(probe, inputs[part], projected, operand)
        if norm is not None:
            norms[part] = norm
    return ArrangedAttention(
        evaluated=evaluated,
        attention=attention,
        inputs=inputs,
        axes=axes,
        order=order,
        unscaled={**queries.unscaled, **keys.unscaled},
        factors=factors,
        scale=rounded_to_float32(queries.scale * keys.scale * factors.factor),
        norms=norms,
        positions=movable_positions(probe, attention, inputs, axes),
    )


def _check_dtypes(evaluated: EvaluatedProgram, attention: Attention) -> None:
    dtypes = {str(evaluated.array(number).dtype) for number in attention.numbers.values()}
    if dtypes != {"float32"}:
        raise InputError("attention", "compute in float32", " and ".join(sorted(dtypes)))


def _head_order(heads: Mapping[str, np.ndarray]) -> HeadOrder:
    """Return the order of query heads by the first equal key/value head, bit for bit."""
    k, v = heads["k"], heads["v"]
    first_with_bits: dict[bytes, int] = {}
    first_equal = []
    for head in range(k.shape[1]):
        bits = k[:, head].tobytes() + v[:, head].tobytes()
        first_equal.append(first_with_bits.setdefault(bits, head))
    group_size = heads["q"].shape[1] // len(first_equal)
    kv_head_of_query = np.repeat(first_equal, group_size)
    query_heads = np.argsort(kv_head_of_query, kind="stable")
    return HeadOrder(query_heads, np.unique(first_equal))
