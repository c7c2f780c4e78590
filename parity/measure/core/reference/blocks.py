"""Stages of a layer without stored scores: a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from parity.measure.core.problem import Problem
from parity.measure.core.reference.layer import Layer
from parity.measure.core.sample import Sample

BLOCK = 2**21
"""Number of scores that are computed at once if none are stored."""


def without_scores(layer: Layer) -> dict[str, np.ndarray]:
    """Return all stages except scores and attention weights, which are computed for a block of rows
    and discarded.
    """
    values: dict[str, np.ndarray] = layer.mask({})
    values |= layer.qkv(values)
    found: list[np.ndarray] = []
    for rows in _blocks(layer.problem):
        sample = Sample(rows, np.arange(layer.problem.spec.output_width))
        part = Layer(replace(layer.problem, sample=sample), layer.arithmetic)
        some = {**values, "mask": values["mask"][:, :, rows], "q": values["q"][:, :, rows]}
        some |= part.scores(some, rows[None])
        some |= part.attn_weights(some)
        found.append(part.context(some)["context"])
    values["context"] = np.concatenate(found, axis=2)
    return values | layer.output(values)


def _blocks(problem: Problem) -> Iterator[np.ndarray]:
    """Return the query tokens in blocks of similar size."""
    case = problem.case
    count = -(-case.batch * case.spec.num_heads * case.seq_len * case.key_len // BLOCK)
    yield from np.array_split(np.arange(case.seq_len), min(count, case.seq_len))
