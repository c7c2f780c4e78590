"""Sample of a problem that represents all of it: some query rows and some features.

The rows attend to all keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parity.measure.core.problem import Problem

AFTER_SOFTMAX = frozenset({"attn_weights", "context", "output", "gate"})
"""Stages that have only the rows of a sample that continue after the softmax."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Part of a problem to compute, if all of it takes too long.

    Attributes:
        rows: query tokens, in order.
        features: features of the output, in order.
        keys: number of leading keys they attend to; default: all.
        num_continuing: number of leading rows that continue after the softmax; default: all. The
            others are only for a softmax that includes them.
        rows_out: rows of the output, if the context has a row for every token, which wrongly
            combined heads need; default: the context has only the rows.
        other_rows: all other query tokens as one more row of scores, (B, N, 1, S): their
            log-sum-exp, so that a softmax over queries has its sums. It does not continue after the
            softmax.
        absorbs: keys and values of a wrong weight are not computed, see
            `parity.explain.diagnosis.absorbed`.
        tokens: the tokens that the inputs of the problem consist of, if these are some of its
            tokens only. Then only stages of single tokens are computed: q, k, v, the gate and
            latents.
    """

    rows: np.ndarray
    features: np.ndarray
    keys: int | None = None
    num_continuing: int | None = None
    rows_out: np.ndarray | None = None
    other_rows: np.ndarray | None = None
    absorbs: bool = False
    tokens: np.ndarray | None = None

    def rows_of(self, quantity: str) -> np.ndarray:
        """Return the query tokens of a stage."""
        if quantity == "output" and self.rows_out is not None:
            return self.rows_out
        if quantity in AFTER_SOFTMAX:
            return self.rows[: self.num_continuing]
        return self.rows

    def tokens_of(self, quantity: str) -> dict[str, np.ndarray]:
        """Return the indices of a stage's query tokens "T".

        If its keys are not the first ones, their indices "S" are included.
        """
        if self.tokens is not None:
            return {"T": self.tokens, "S": self.tokens}
        return {"T": self.rows_of(quantity)}


@dataclass(frozen=True)
class SampledProblem(Problem):
    """A problem of which only a sample is computed."""

    sample: Sample

    @classmethod
    def of(cls, problem: Problem, sample: Sample) -> SampledProblem:
        """Return a problem with a sample, instead of the one that it may have."""
        return cls(problem.case, problem.dtype, problem.weights, problem.inputs, sample)

    @cached_property
    def whole(self) -> Problem:
        """The problem without the sample."""
        return Problem(self.case, self.dtype, self.weights, self.inputs)

    @property
    def bias(self) -> np.ndarray | None:
        """Bias of the scores of the computed rows, or None."""
        bias = super().bias
        if bias is None:
            return None
        return bias[:, :, self.sample.rows, : self.sample.keys]


def sample_of(problem: Problem) -> Sample | None:
    """Return the sample of a problem; None if all of it is computed."""
    if isinstance(problem, SampledProblem):
        return problem.sample
    return None


def residual_of(problem: Problem) -> np.ndarray:
    """Return the query (B, T, d_in), restricted to computed rows and features of the output."""
    query, sample = problem.inputs["query"], sample_of(problem)
    if sample is None:
        return query
    if sample.rows_out is None:
        query = query[:, sample.rows_of("output")]
    return query[..., sample.features]


def rows_of_query(rows: np.ndarray) -> str:
    """Return the name of a sample's input that has some rows of the query, (B, rows, d_in)."""
    return f"query.{','.join(map(str, rows))}"


def has_rows_of_query(problem: Problem) -> bool:
    """Return whether a problem is a sample with the query rows that it needs."""
    sample = sample_of(problem)
    return sample is not None and rows_of_query(sample.rows) in problem.inputs
