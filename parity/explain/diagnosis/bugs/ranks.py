"""Bugs of divided layers: each changes the computation of a rank, for its heads or its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from mha_spec.attention import NORMS
from mha_spec.shares import OUT_BIAS, LocalHeads
from parity.explain.diagnosis.bugs.record import Edit
from parity.measure.core.problem import Problem
from parity.measure.core.reference import Arithmetic, Layer
from parity.measure.core.reference.backward import Backward
from parity.measure.core.stages import Values
from parity.measure.core.trace import Reference
from parity.measure.core.weights import QKV, Weights
from parity.measure.sharding.shard import ShardPlan, local_heads, shard

PAGE = "ranks"

NAMES = (
    *(
        "rank-kv-heads-tiled",
        "rank-first-heads",
        "rank-first-sinks",
        "rank-first-gate",
        "rank-norm-over-own-width",
    ),
    *("rank-out-bias-on-each", "rank-local-positions", "rank-zigzag-left", "rank-local-sums"),
)
"""The names of all; no single problem could have all."""

Computed = Callable[["SharedProblem", int], Values]
"""Computes the stages of a rank with a bug, in float64: those that the bug concerns."""


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

    def held(self, rank: int) -> LocalHeads:
        """The heads of a rank."""
        return local_heads(self.problem.spec, self.plan, rank)

    def of_tokens(self, values: Values, rows: Any) -> dict[str, np.ndarray]:
        """Return stages of axes (B, …, T, ·) for some tokens."""
        kinds = (
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
        return {
            name: np.take(values[name], rows, axis=values[name].ndim - 2)
            for name in kinds
            if name in values
        }

    def own(
        self, rank: int, weights: Weights | None = None, spec: AttentionSpec | None = None
    ) -> Values:
        """Compute the reference with a rank's weights and specification, or with others."""
        held, own = self.divided(rank)
        case = replace(self.problem.case, spec=own if spec is None else spec)
        queries = list(self.held(rank).queries)
        inputs = {
            name: x[:, queries] if name in ("bias", "mask") else x
            for name, x in self.problem.inputs.items()
        }
        problem = Problem(case, self.problem.dtype, held if weights is None else weights, inputs)
        return Reference(problem).accumulated

    def divided(self, rank: int) -> tuple[Weights, AttentionSpec]:
        """Return the weights and the specification of a rank, with a norm over the width of its own
        heads.
        """
        return shard(self.problem.weights, self.problem.spec, self.plan, rank, alone=False)


def without_widths(spec: AttentionSpec) -> AttentionSpec:
    """Return the layer without norms over the width, which the specification of a rank does not
    describe here.
    """
    kept = {name: getattr(spec, name) for name in NORMS}
    return replace(
        spec,
        **{
            name: norm if norm is None or norm.over == "head" else None
            for name, norm in kept.items()
        },
    )


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
    yield from _of_heads(problem, plan) if plan.tensor > 1 else _of_tokens(problem)


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
            _with("k_proj", "v_proj", "k_norm", "v_norm", of=_in_turn),
        )
    yield RankBug(
        "rank-first-heads",
        "every rank computes the first heads of an undivided projection",
        "divide the rows of q_proj, k_proj and v_proj, or select the rows of the rank's own heads",
        ("q", "k", "v", *FROM_SCORES),
        _with(*QKV),
    )
    if spec.sinks:
        yield RankBug(
            "rank-first-sinks",
            "every rank uses the sinks of the first heads",
            "divide the sinks like the query heads",
            FROM_WEIGHTS,
            _with("sinks"),
        )
    if spec.gate is not None:
        yield RankBug(
            "rank-first-gate",
            "every rank uses the rows of gate_proj for the first heads",
            "divide the rows of gate_proj like the query heads",
            ("gate", "output"),
            _with("gate_proj"),
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


def _with(*parts: str, of: Callable[[SharedProblem, int], int] = lambda ranks, rank: 0) -> Computed:
    """Compute with some weights of another rank, by default the first one."""

    def computed(ranks: SharedProblem, rank: int) -> Values:
        own, others = ranks.divided(rank)[0], ranks.divided(of(ranks, rank))[0]
        return ranks.own(
            rank, {name: (others if name.partition(".")[0] in parts else own)[name] for name in own}
        )

    return computed


def _with_bias(ranks: SharedProblem, rank: int) -> Values:
    own, spec = ranks.divided(rank)
    bias: Mapping[str, np.ndarray] = {OUT_BIAS: ranks.problem.weights[OUT_BIAS]}
    return {"output": ranks.own(rank, {**own, **bias}, replace(spec, out_bias=True))["output"]}


def _with_local_positions(ranks: SharedProblem, rank: int) -> Values:
    part = ranks.problem.case.seq_len // ranks.size
    turned = Edit(
        overrides={
            "rotate": lambda _, original, x, places, **more: original(x, places % part, **more)
        }
    )
    return ranks.of_tokens(ranks.changed(turned), np.arange(rank * part, (rank + 1) * part))


def _left_in_zigzag(ranks: SharedProblem, rank: int) -> Values:
    half, last = ranks.problem.case.seq_len // (2 * ranks.size), 2 * ranks.size - 1
    rows = np.concatenate(
        [np.arange(place * half, (place + 1) * half) for place in (rank, last - rank)]
    )
    of_rows = ranks.of_tokens(ranks.changed(Edit(overrides={})), rows)
    return {name: of_rows[name] for name in ("context", "output")}


def _by_local_sums(ranks: SharedProblem, rank: int) -> Values:
    part = ranks.problem.case.seq_len // ranks.size
    layer = Layer(ranks.problem, Arithmetic(np.dtype(np.float64)))
    grads = _LocalSums(layer, fused=True, part=part).gradients()
    return ranks.of_tokens(grads, np.arange(rank * part, (rank + 1) * part))


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
