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
from parity.measure.core.reference import Arithmetic, Layer
from parity.measure.core.stages import STEPS, STEPS_OF_A_CALL

TOKENS = 2
"""Tokens of the layer that is traced: dependencies do not depend on their number."""


NOTHING_HIDDEN = np.zeros((1, 1, 1, 1), bool)
"""Mask of the layer that is traced, if it has one."""


@dataclass(frozen=True)
class Flow:
    """The dependencies of a step.

    Attributes:
        methods: the methods of the layer that it calls.
        reads: the earlier stages that it reads.
    """

    methods: frozenset[str]
    reads: frozenset[str]


class _RecordedValues(dict[str, np.ndarray]):
    """Stages by name that record which of them were read."""

    def __init__(self) -> None:
        super().__init__()
        self.names_read: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.names_read.add(name)
        return super().__getitem__(name)

    def keys(self) -> Any:
        """Return all stages: copying reads them."""
        self.names_read.update(self)
        return super().keys()

    def __iter__(self) -> Iterator[str]:
        self.names_read.update(self)
        return super().__iter__()


def _names_of_methods() -> frozenset[str]:
    """Return the names of the public methods of a layer."""
    names = set()
    for name in dir(Layer):
        if not name.startswith("_") and callable(getattr(Layer, name)):
            names.add(name)
    return frozenset(names)


METHODS = _names_of_methods()


class _WatchedLayer(ChangedLayer):
    """Layer that records which of its methods are called."""

    def __init__(self, problem: Problem, arithmetic: Arithmetic) -> None:
        super().__init__(problem, arithmetic)
        self.names_called: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in METHODS:
            super().__getattribute__("names_called").add(name)
        return super().__getattribute__(name)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return zeros: the product is expensive, and nothing depends on its values."""
        self.has_bias(name)
        return np.zeros((*x.shape[:-1], len(self.parameter(f"{name}.weight"))))

    def by_group(self, of_queries: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
        """Return the products of heads, which a different map of heads would change."""
        self.names_called.add("per_query_head")
        return super().by_group(of_queries, of_keys)


def flow_of(problem: Problem) -> list[Flow]:
    """Return the dependencies of each step of a problem in the reference."""
    layer = _WatchedLayer(_small(problem), CountedArithmetic(np.dtype(np.float64)))
    steps = layer.steps()
    names = STEPS
    if problem.case.is_cached:
        names = STEPS_OF_A_CALL
    flows = []
    values = _RecordedValues()
    # The steps of a layer with a cache come one call after the other.
    for name, step in zip(itertools.cycle(names), steps):
        layer.names_called.clear()
        values.names_read.clear()
        with np.errstate(all="ignore"):
            stages = step(values)
        methods = layer.names_called | {name, "call"}
        flows.append(Flow(frozenset(methods), frozenset(values.names_read)))
        values.update(stages)
    return flows


def _small(problem: Problem) -> Problem:
    """Return a problem of the same layer with few tokens, one in each call with a cache."""
    if isinstance(problem, SampledProblem):
        problem = problem.whole
    if problem.case.chunks:
        return _small_with_cache(problem)
    case = problem.case
    if case.mask is not None:
        case = replace(case, mask=NOTHING_HIDDEN)
    small = case.first_tokens(TOKENS)
    if case.seq_len_k is not None:
        small = replace(small, seq_len_k=TOKENS)
    if case.key_padding_lengths is not None:
        small = replace(small, key_padding_lengths=(TOKENS,) * case.batch)
    of_scores = (case.batch, case.spec.num_heads, TOKENS, TOKENS)
    inputs = {}
    for name, x in problem.inputs.items():
        if name in ("k", "v"):
            inputs[name] = x[:, :, :1].repeat(TOKENS, 2)
        elif name in ("bias", "mask"):
            inputs[name] = np.zeros(of_scores, x.dtype)
        else:
            inputs[name] = np.zeros((x.shape[0], TOKENS, *x.shape[2:]), x.dtype)
    return replace(problem, case=small, inputs=inputs)


def _small_with_cache(problem: Problem) -> Problem:
    case = problem.case
    num_calls = len(case.chunks)
    # All at once: a case checks its arrays against its number of tokens.
    arrays: dict[str, np.ndarray] = {}
    inputs: dict[str, np.ndarray] = {"query": np.zeros((case.batch, num_calls, case.spec.d_in))}
    if case.mask is not None:
        arrays["mask"] = NOTHING_HIDDEN
        of_scores = (case.batch, case.spec.num_heads, num_calls, num_calls)
        inputs["mask"] = np.zeros(of_scores, bool)
    if case.cache_slots is not None:
        arrays["cache_slots"] = np.arange(num_calls)[None]
    if case.position_ids is not None:
        arrays["position_ids"] = case.position_ids[..., :num_calls]
    small = replace(
        case,
        seq_len=num_calls,
        chunks=(1,) * num_calls,
        new_lengths=(),
        capacity=num_calls,
        **arrays,
    )
    for name in ("k", "v"):
        if name in problem.inputs:
            inputs[name] = problem.inputs[name][:, :, :num_calls]
    return replace(problem, case=small, inputs=inputs)
