"""Stages of a layer without stored scores: a block of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from parity.measure.core.problem import Problem
from parity.measure.core.reference.layer import Layer

BLOCK = 2**21
"""Number of scores that are computed at once if none are stored: 16 MiB in float64."""


def without_scores(layer: Layer) -> dict[str, np.ndarray]:
    """Return all stages except scores and attention weights.

    These are computed for a block of rows and discarded.
    """
    values: dict[str, np.ndarray] = layer.mask({})
    values |= layer.qkv(values)
    contexts: list[np.ndarray] = []
    for rows in _blocks(layer.problem):
        layer_of_rows = Layer(_with_bias_of(rows, layer.problem), layer.arithmetic)
        block = {**values, "mask": values["mask"][:, :, rows], "q": values["q"][:, :, rows]}
        # The rows are also the positions of their queries, with an axis of sequences.
        block |= layer_of_rows.scores(block, rows[None])
        block |= layer_of_rows.attn_weights(block)
        contexts.append(layer_of_rows.context(block)["context"])
    values["context"] = np.concatenate(contexts, axis=2)
    return values | layer.output(values)


def _with_bias_of(rows: np.ndarray, problem: Problem) -> Problem:
    """Return a problem whose bias covers some rows of the scores."""
    if problem.bias is None:
        return problem
    return replace(problem, inputs={**problem.inputs, "bias": problem.bias[:, :, rows]})


def _blocks(problem: Problem) -> Iterator[np.ndarray]:
    """Yield the query tokens in blocks of similar size."""
    case = problem.case
    num_scores = case.batch * case.spec.num_heads * case.seq_len * case.key_len
    num_blocks = math.ceil(num_scores / BLOCK)
    # A block has at least one token.
    yield from np.array_split(np.arange(case.seq_len), min(num_blocks, case.seq_len))
