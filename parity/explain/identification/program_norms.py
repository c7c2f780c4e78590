"""Find norms of queries, keys and values in a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parity.explain.identification.evaluated import AxisProbe, EvaluatedProgram
from parity.explain.identification.norms import norm_between
from parity.explain.identification.program import Values

MOST_EPS = 0.1
"""Largest constant that may be the eps of a norm."""

AxesOfTokens = Mapping[int, tuple[int, int]]
"""The axes of sequences and of tokens of some values, by number."""


@dataclass(frozen=True)
class NormOfProgram:
    """A norm in a program.

    Attributes:
        input: number of its input.
        output: number of its output.
        parameters: numbers of its weight and its bias, by name.
        eps: its eps.
        axes: axes of sequences and of tokens of its input and its output.
    """

    input: int
    output: int
    parameters: Mapping[str, int]
    eps: float
    axes: AxesOfTokens

    def input_of(self, values: Values) -> np.ndarray:
        """Return its input in a call as (B, T, …)."""
        return _by_token(values, self.input, self.axes)

    def output_of(self, values: Values) -> np.ndarray:
        """Return its output in a call as (B, T, …)."""
        return _by_token(values, self.output, self.axes)


def find_norm(probe: AxisProbe, source: int, projected: int, operand: int) -> NormOfProgram | None:
    """Return the norm between a projection and an operand of attention; None if there is none.

    Args:
        probe: the call.
        source: number of the input of the projection, (B, T, features).
        projected: number of the output of the projection.
        operand: number of the queries, keys or values.
    """
    evaluated = probe.evaluated
    program = evaluated.program
    path = sorted(program.descendants([projected]) & program.ancestors([operand]))
    axes = _axes_of_tokens(probe, source, path)
    by_token = {number: _by_token(evaluated.values, number, axes) for number in axes}
    for norm_input in path:
        # The last value that a norm explains is its output: the ones before are parts of the norm.
        for norm_output in reversed(path):
            if norm_output <= norm_input:
                break
            if norm_input not in by_token or norm_output not in by_token:
                continue
            if by_token[norm_input].shape != by_token[norm_output].shape:
                continue
            norm = _norm_between(evaluated, norm_input, norm_output, axes, by_token)
            if norm is not None:
                return norm
    return None


def _axes_of_tokens(probe: AxisProbe, source: int, numbers: Sequence[int]) -> AxesOfTokens:
    """Return the axes of the values whose last axis has features, neither sequences nor tokens."""
    batch_axes = probe.follow_to_each(source, 0, numbers)
    token_axes = probe.follow_to_each(source, 1, numbers)
    axes = {}
    for number, batch_axis, token_axis in zip(numbers, batch_axes, token_axes, strict=True):
        if batch_axis is None or token_axis is None:
            continue
        last_axis = len(probe.evaluated.shape(number)) - 1
        if last_axis not in (batch_axis, token_axis):
            axes[number] = (batch_axis, token_axis)
    return axes


def _by_token(values: Values, number: int, axes: AxesOfTokens) -> np.ndarray:
    """Return a value as (B, T, …)."""
    return np.moveaxis(np.asarray(values[number]), axes[number], (0, 1))


def _norm_between(
    evaluated: EvaluatedProgram,
    norm_input: int,
    norm_output: int,
    axes: AxesOfTokens,
    by_token: Mapping[int, np.ndarray],
) -> NormOfProgram | None:
    """Return the norm that makes one value of another; None if no norm does."""
    before, after = by_token[norm_input], by_token[norm_output]
    every_eps = evaluated.scalars_between(norm_input, norm_output, 0.0, MOST_EPS)
    width = before.shape[-1]
    leaves = []
    for number in evaluated.program.ancestors([norm_output], [norm_input]):
        if number in evaluated.finder.names and np.size(evaluated.values[number]) == width:
            leaves.append(number)
    candidates = list(_candidate_parameters(leaves))
    arrays = []
    for numbers in candidates:
        arrays.append({name: np.ravel(evaluated.array(n)) for name, n in numbers.items()})
    fitted = norm_between(before, after, every_eps, arrays)
    if fitted is None:
        return None
    norm, index = fitted
    axes_of_norm = {norm_input: axes[norm_input], norm_output: axes[norm_output]}
    return NormOfProgram(norm_input, norm_output, candidates[index], norm.eps, axes_of_norm)


def _candidate_parameters(leaves: Sequence[int]) -> Iterator[dict[str, int]]:
    """Yield candidates for the weight and the bias of a norm."""
    for weight in leaves:
        for bias in leaves:
            if bias != weight:
                yield {"weight": weight, "bias": bias}
        yield {"weight": weight}
    yield {}
