"""Find the positions of tokens in a program, and move them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from parity.explain.identification.attention_finder import Attention
from parity.explain.identification.evaluated import AxisProbe
from parity.explain.identification.head_axes import TOKENS, Axes
from parity.explain.identification.program import Program, Values


def movable_positions(
    probe: AxisProbe,
    attention: Attention,
    inputs: Mapping[str, int],
    axes: Mapping[str, Axes],
) -> set[int]:
    """Return the numbers of the positions 0, 1, … that queries and keys depend on, token by
    token.
    """
    evaluated, program = probe.evaluated, probe.evaluated.program
    num_tokens = evaluated.shape(inputs["q"])[1]
    positions: set[int] = set()
    for part in ("q", "k"):
        operand = attention.operands[part]
        token_axis = axes[part][TOKENS[part]]
        for number in sorted(program.ancestors([operand], inputs.values())):
            for axis in _axes_of_positions(evaluated.array(number), num_tokens):
                if number in program.descendants(positions):
                    continue  # they move with the ones before
                if probe.follow(number, axis, operand) == token_axis:
                    positions.add(number)
    return positions


def _axes_of_positions(x: np.ndarray, num_tokens: int) -> Iterator[int]:
    """Yield the axes along which an array holds 0, 1, …"""
    for axis, size in enumerate(x.shape):
        if size != num_tokens:
            continue
        in_order = np.arange(num_tokens).reshape(-1, *(1,) * (x.ndim - axis - 1))
        if (x == in_order).all():
            yield axis


def with_positions_from(
    program: Program,
    values: Values,
    positions: set[int],
    inputs: Mapping[str, int],
    first: int,
) -> Values:
    """Return a call with its tokens at positions from `first` on, or as far as its RoPE tables
    reach.

    Args:
        program: the program.
        values: values of the call.
        positions: numbers of the movable positions.
        inputs: numbers of the inputs of projections, which stay as they are.
        first: the new position of the first token.
    """
    dependent = program.descendants(positions)
    num_tokens = np.shape(values[inputs["q"]])[1]
    for table in _tables_read(program, dependent):
        first = min(first, np.shape(values[table])[0] - num_tokens)
    first = max(first, 0)
    replaced = {number: values[number] for number in inputs.values()}
    for number in positions:
        near = np.asarray(values[number])
        replaced[number] = near + np.asarray(first, near.dtype)
    return {**values, **program.recompute(values, replaced, dependent)}


def _tables_read(program: Program, dependent: set[int]) -> Iterator[int]:
    """Yield the values that are read at indices that depend on positions."""
    for operation in program.operations:
        if operation.name not in ("gather", "dynamic_slice"):
            continue
        table, *indices = operation.inputs
        if table not in dependent and not dependent.isdisjoint(indices):
            yield table
