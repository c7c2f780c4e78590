"""Dependencies of each step of the reference.

Steps that a bug does not affect are not computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parity.explain.diagnosis.changed_layer import ChangedLayer
from parity.explain.diagnosis.sample import SampledProblem
from parity.explain.diagnosis.work import CountedArithmetic
from parity.measure.core.problem import Problem
from parity.measure.core.reference import Layer
from parity.measure.core.stages import STEPS, STEPS_OF_A_CALL

TOKENS = 2
"""Tokens of the layer that is traced: dependencies do not depend on their number."""


@dataclass(frozen=True)
class Flow:
    """The dependencies of a step.

    Attributes:
        methods: the methods of the layer that it calls.
        reads: the earlier stages that it reads.
    """

    methods: frozenset[str]
    reads: frozenset[str]


class _Values(dict[str, np.ndarray]):
    """Stages by name that record which of them were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.read.add(name)
        return super().__getitem__(name)

    def keys(self) -> Any:
        """Return all stages: copying reads them."""
        self.read.update(self)
        return super().keys()

    def __iter__(self) -> Iterator[str]:
        self.read.update(self)
        return super().__iter__()


def flow_of(problem: Problem) -> list[Flow]:
    """Return the dependencies of each step of a problem in the reference."""
    called: set[str] = set()
    methods = {
        name for name in dir(Layer) if not name.startswith("_") and callable(getattr(Layer, name))
    }

    class Watched(ChangedLayer):
        def __getattribute__(self, name: str) -> Any:
            if name in methods:
                called.add(name)
            return super().__getattribute__(name)

        def linear(self, name: str, x: np.ndarray) -> np.ndarray:
            """Return zeros: the product is expensive, and nothing depends on its values."""
            self.has_bias(name)
            return np.zeros((*x.shape[:-1], len(self.parameter(f"{name}.weight"))))

        def by_group(self, of_queries: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
            """Return the products of heads, which another map of heads would change."""
            called.add("per_query_head")
            return super().by_group(of_queries, of_keys)

    found, values = [], _Values()
    steps = Watched(_small(problem), CountedArithmetic(np.dtype(np.float64))).steps()
    for name, step in zip(
        itertools.cycle(STEPS_OF_A_CALL if problem.case.is_cached else STEPS), steps
    ):
        called.clear()
        called.update((name, "call"))
        values.read.clear()
        with np.errstate(all="ignore"):
            given = step(values)
        found.append(Flow(frozenset(called), frozenset(values.read)))
        values.update(given)
    return found


def _small(problem: Problem) -> Problem:
    """Return a problem of the same layer with few tokens, one in each call with a cache."""
    case = problem.case
    if calls := len(case.chunks):
        few = replace(case, seq_len=calls, chunks=(1,) * calls, new_lengths=(), capacity=calls)
        of_heads = {
            name: problem.inputs[name][:, :, :calls]
            for name in ("k", "v")
            if name in problem.inputs
        }
        return replace(
            problem,
            case=few,
            inputs={"query": np.zeros((case.batch, calls, case.spec.d_in)), **of_heads},
        )
    lengths = None if case.key_padding_lengths is None else (TOKENS,) * case.batch
    keys = None if case.seq_len_k is None else TOKENS
    small = replace(case.first_tokens(TOKENS), seq_len_k=keys, key_padding_lengths=lengths)
    inputs = {
        name: np.zeros((*x.shape[:1], TOKENS, *x.shape[2:]), x.dtype)
        for name, x in problem.inputs.items()
    }
    inputs |= {
        name: x[:, :, :1].repeat(TOKENS, 2)
        for name, x in problem.inputs.items()
        if name in ("k", "v")
    }
    of_scores = (case.batch, case.spec.num_heads, TOKENS, TOKENS)
    inputs |= {
        name: np.zeros(of_scores, x.dtype)
        for name, x in problem.inputs.items()
        if name in ("bias", "mask")
    }
    whole = problem.whole if isinstance(problem, SampledProblem) else problem
    return replace(whole, case=small, inputs=inputs)
