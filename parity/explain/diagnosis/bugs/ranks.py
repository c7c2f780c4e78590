"""Bugs of divided layers: each changes the computation of a rank, for its heads or its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from mha_spec.attention import NORMS
from mha_spec.shares import OUT_BIAS, LocalHeads
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.measure.core.problem import Problem
from parity.measure.core.reference import Arithmetic, Layer
from parity.measure.core.reference.backward import Backward
from parity.measure.core.stages import Values
from parity.measure.core.trace import Reference
from parity.measure.core.weights import QKV, Weights
from parity.measure.sharding.shard import ShardPlan, local_heads, shard

PAGE = "ranks"

NAMES = (
    "rank-kv-heads-tiled",
    "rank-first-heads",
    "rank-first-sinks",
    "rank-first-gate",
    "rank-norm-over-own-width",
    "rank-out-bias-on-each",
    "rank-local-positions",
    "rank-zigzag-left",
    "rank-local-sums",
)
"""The names of all; no single problem could have all."""

Computed = Callable[["SharedProblem", int], Values]
"""Computes the stages of a rank with a bug, in float64: those that the bug concerns."""

OF_TOKENS = (
    "q",
    "k",
    "v",
    "gate",
    "latents",
    "scores",
    "attn_weights",
    "context",
    "mask",
    "output",
    "grad.query",
)
"""Stages of axes (B, …, T, ·)."""


@dataclass(frozen=True)
class SharedProblem:
    """A problem that ranks share, each with some of the heads, or with some of the tokens.

    Attributes:
        problem: the whole problem.
        plan: the division of the heads.
        tokens: number of ranks that share the tokens.
        changed: computes the whole problem with a change of the reference.
    """

    problem: Problem
    plan: ShardPlan
    tokens: int
    changed: Callable[[Edit], Values]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return max(self.plan.tensor, self.tokens)

    def local_heads(self, rank: int) -> LocalHeads:
        """The heads of a rank."""
        return local_heads(self.problem.spec, self.plan, rank)

    def of_tokens(self, values: Values, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return stages of axes (B, …, T, ·) for some tokens."""
        stages = {}
        for name in OF_TOKENS:
            if name in values:
                x = values[name]
                stages[name] = np.take(x, rows, axis=x.ndim - 2)
        return stages

    def own(
        self, rank: int, weights: Weights | None = None, spec: AttentionSpec | None = None
    ) -> Values:
        """Compute the reference with a rank's weights and specification, or with others."""
        own_weights, own_spec = self.divided(rank)
        if weights is None:
            weights = own_weights
        if spec is None:
            spec = own_spec
        inputs = dict(self.problem.inputs)
        for name in ("bias", "mask"):
            if name in inputs:
                inputs[name] = inputs[name][:, list(self.local_heads(rank).queries)]
        case = replace(self.problem.case, spec=spec)
        return Reference(Problem(case, self.problem.dtype, weights, inputs)).accumulated

    def divided(self, rank: int) -> tuple[Weights, AttentionSpec]:
        """Return the weights and the specification of a rank, with a norm over the width of its own
        heads.
        """
        return shard(self.problem.weights, self.problem.spec, self.plan, rank, alone=False)


def without_widths(spec: AttentionSpec) -> AttentionSpec:
    """Return the layer without norms over the width, which the specification of a rank does not
    describe here.
    """
    removed = {}
    for name in NORMS:
        norm = getattr(spec, name)
        if norm is not None and norm.over == "width":
            removed[name] = None
    return replace(spec, **removed)


@dataclass(frozen=True, eq=False)
class RankBug:
    """A bug that ranks could have.

    Attributes:
        name: its name in reports and on the command line.
        about: a description.
        fix: an instruction.
        stages: the first stages that show it.
        computed: computes the stages of a rank with it; others are not predicted.
        page: its page in parity/bugs.
    """

    name: str
    about: str
    fix: str
    stages: tuple[str, ...]
    computed: Computed
    page: str = PAGE


def rank_bugs(problem: Problem, plan: ShardPlan, tokens: int = 1) -> Iterator[RankBug]:
    """Yield every bug that ranks could have in a problem."""
    if plan.tensor > 1:
        yield from _of_heads(problem, plan)
    else:
        yield from _of_tokens(problem)


FROM_WEIGHTS = ("attn_weights", "context", "output")
FROM_SCORES = ("scores", *FROM_WEIGHTS)


def _of_heads(problem: Problem, plan: ShardPlan) -> Iterator[RankBug]:
    spec = problem.spec
    if 1 < spec.num_kv_heads < plan.tensor:
        yield RankBug(
            "rank-kv-heads-tiled",
            "key/value heads are assigned to ranks in turn (0 1 0 1) instead of to neighbors (0 "
            "0 1 1)",
            "assign the key/value head r K // R to rank r of R",
            ("k", "v", *FROM_SCORES),
            partial(_with_weights_of, _in_turn, ("k_proj", "v_proj", "k_norm", "v_norm")),
        )
    yield RankBug(
        "rank-first-heads",
        "every rank computes the first heads of an undivided projection",
        "divide the rows of q_proj, k_proj and v_proj, or select the rows of the rank's own heads",
        ("q", "k", "v", *FROM_SCORES),
        partial(_with_weights_of, _first, QKV),
    )
    if spec.sinks:
        yield RankBug(
            "rank-first-sinks",
            "every rank uses the sinks of the first heads",
            "divide the sinks like the query heads",
            FROM_WEIGHTS,
            partial(_with_weights_of, _first, ("sinks",)),
        )
    if spec.gate is not None:
        yield RankBug(
            "rank-first-gate",
            "every rank uses the rows of gate_proj for the first heads",
            "divide the rows of gate_proj like the query heads",
            ("gate", "output"),
            partial(_with_weights_of, _first, ("gate_proj",)),
        )
    if spec.wide_norms:
        yield RankBug(
            "rank-norm-over-own-width",
            "a norm over all heads is computed over the heads of each rank",
            "add up the mean squares of all ranks, or gather the projections before the norm",
            ("q", "k", *FROM_SCORES),
            SharedProblem.own,
        )
    if spec.out_bias and spec.out_proj:
        yield RankBug(
            "rank-out-bias-on-each",
            "the bias of out_proj is added on every rank, so the sum contains it several times",
            "add it on one rank, or after the sum",
            ("output",),
            _with_bias,
        )


def _of_tokens(problem: Problem) -> Iterator[RankBug]:
    if problem.spec.rope is not None:
        yield RankBug(
            "rank-local-positions",
            "RoPE counts each rank's tokens from 0",
            "use each token's position in the whole sequence",
            ("q", "k", *FROM_SCORES),
            _with_local_positions,
        )
    yield RankBug(
        "rank-zigzag-left",
        "ranks keep the tokens of their zigzag halves",
        "return the halves of the context to the ranks of their queries",
        ("context", "output"),
        _left_in_zigzag,
    )
    if not problem.spec.sinks:
        yield RankBug(
            "rank-local-sums",
            "the gradient uses attention weights that sum to 1 over the keys of each rank",
            "save the log-sum-exp over all keys, and the whole context, for the backward pass",
            ("grad.query",),
            _by_local_sums,
        )


# ---- Wrong values of a rank ----------------------------------------------------------------------


def _in_turn(ranks: SharedProblem, rank: int) -> int:
    """Return a rank that has the key/value head of this rank's turn."""
    heads = ranks.problem.spec.num_kv_heads
    return rank % heads * (ranks.size // heads)


def _first(ranks: SharedProblem, rank: int) -> int:
    return 0


def _with_weights_of(
    rank_of: Callable[[SharedProblem, int], int],
    parts: tuple[str, ...],
    ranks: SharedProblem,
    rank: int,
) -> Values:
    """Compute with some weights of the wrong rank."""
    own_weights, _ = ranks.divided(rank)
    other_weights, _ = ranks.divided(rank_of(ranks, rank))
    weights = dict(own_weights)
    for name in own_weights:
        part, _, _ = name.partition(".")
        if part in parts:
            weights[name] = other_weights[name]
    return ranks.own(rank, weights)


def _with_bias(ranks: SharedProblem, rank: int) -> Values:
    own_weights, spec = ranks.divided(rank)
    weights = {**own_weights, OUT_BIAS: ranks.problem.weights[OUT_BIAS]}
    return {"output": ranks.own(rank, weights, replace(spec, out_bias=True))["output"]}


def _with_local_positions(ranks: SharedProblem, rank: int) -> Values:
    tokens_of_rank = ranks.problem.case.seq_len // ranks.size
    edit = Edit(overrides={"rotate": partial(_by_local_positions, tokens_of_rank)})
    return ranks.of_tokens(ranks.changed(edit), _block(rank, tokens_of_rank))


def _by_local_positions(
    tokens_of_rank: int,
    _: Layer,
    original: Override,
    x: np.ndarray,
    positions: np.ndarray,
    **more: Any,
) -> np.ndarray:
    return original(x, positions % tokens_of_rank, **more)


def _left_in_zigzag(ranks: SharedProblem, rank: int) -> Values:
    size = ranks.problem.case.seq_len // (2 * ranks.size)
    last = 2 * ranks.size - 1
    rows = np.concatenate([_block(rank, size), _block(last - rank, size)])
    of_rows = ranks.of_tokens(ranks.changed(Edit(overrides={})), rows)
    return {"context": of_rows["context"], "output": of_rows["output"]}


def _by_local_sums(ranks: SharedProblem, rank: int) -> Values:
    tokens_of_rank = ranks.problem.case.seq_len // ranks.size
    layer = Layer(ranks.problem, Arithmetic(np.dtype(np.float64)))
    grads = _LocalSums(layer, fused=True, part=tokens_of_rank).gradients()
    return ranks.of_tokens(grads, _block(rank, tokens_of_rank))


def _block(index: int, size: int) -> np.ndarray:
    """Return the indices of one of equally long blocks of tokens."""
    return np.arange(index * size, (index + 1) * size)


@dataclass(frozen=True)
class _LocalSums(Backward):
    """Gradients with attention weights that sum to 1 over the keys of each rank instead of all
    keys.

    Attributes:
        part: number of keys of a rank.
    """

    part: int = 1

    def recomputed_attn_weights(self, values: Values) -> np.ndarray:
        """Return the weights of the keys of each rank, normalized separately."""
        weights = super().recomputed_attn_weights(values)
        parts = weights.reshape(*weights.shape[:-1], -1, self.part)
        total = parts.sum(axis=-1, keepdims=True)
        return (parts / np.where(total == 0.0, 1.0, total)).reshape(weights.shape)
