"""The diagnosis of a divided layer: which ranks are wrong, and which bug explains them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mha_spec import InputError
from parity.explain.diagnosis.bugs import edited_layer
from parity.explain.diagnosis.bugs.ranks import RankBug, SharedProblem, rank_bugs, without_widths
from parity.explain.diagnosis.bugs.record import Edit, WrongField
from parity.explain.diagnosis.findings import (
    FINDING,
    LIKELY_BUG,
    UNEXPLAINED,
    Finding,
    Line,
    text_of,
)
from parity.measure.core.arrays import stages_of
from parity.measure.core.compare import SAME_PRECISION, Comparison, Label, compare
from parity.measure.core.problem import Problem
from parity.measure.core.records import JsonRecord
from parity.measure.core.stages import Values, run_steps
from parity.measure.core.trace import Reference
from parity.measure.sharding.shard import ShardPlan, shard_spec
from parity.measure.sharding.stages import part_of
from parity.measure.text import and_listed

OF_HEADS = ("mask", "latents", "q", "k", "v", "gate", "scores", "attn_weights", "context")
"""The stages of which a rank with some of the heads has a part."""

COMPARED = (*OF_HEADS, "output")
"""The compared stages of a rank; with divided tokens also `grad.query`."""


@dataclass(frozen=True)
class RankDiagnosis(JsonRecord):
    """The wrong ranks of a divided layer, and the bug that explains them.

    Attributes:
        wrong: the first wrong stage of each wrong rank, compared.
        findings: one, with the bug that explains the stages of all ranks, or with the first wrong
            stage if no known bug does; empty if nothing is wrong.
    """

    wrong: dict[int, Comparison]
    findings: list[Finding] = field(default_factory=list)

    IN_JSON = ("is_wrong", *FINDING, "findings", "wrong")

    @property
    def is_wrong(self) -> bool:
        """True if a rank differs by more than rounding."""
        return bool(self.wrong)

    @property
    def _finding(self) -> Finding:
        """The finding; an empty one if nothing is wrong."""
        return self.findings[0] if self.findings else Finding("")

    @property
    def likely_bug(self) -> str:
        """The name of the bug; empty if none is known."""
        return self._finding.likely_bug

    @property
    def first_wrong_stage(self) -> str:
        """The first wrong stage of the first wrong rank; empty if nothing is wrong."""
        return self._finding.stage

    @property
    def where(self) -> str:
        """The wrong ranks."""
        if not self.wrong:
            return ""
        if len(self.wrong) == 1:
            return f"rank {and_listed(self.wrong)}"
        return f"ranks {and_listed(self.wrong)}"

    @property
    def evidence(self) -> str:
        """A statement that the bug explains all ranks; empty without one."""
        if not self.likely_bug:
            return ""
        return "with this bug, all ranks match the reference"

    @property
    def fix(self) -> str:
        """The fix of the bug; empty if none is known."""
        return self._finding.fix

    @property
    def wrong_fields(self) -> tuple[WrongField, ...]:
        """The fix as data, `Finding.wrong_fields`."""
        return self._finding.wrong_fields

    @property
    def more(self) -> str:
        """The command that prints more; empty if there is no page."""
        return self._finding.more

    def __str__(self) -> str:
        return text_of(self.lines())

    def lines(self, *, verbose: bool = False) -> Iterator[Line]:
        """Yield labels and texts, as `Diagnosis.lines` does."""
        if not self.findings:
            yield "", "nothing differs by more than rounding on any rank"
            return
        finding = self.findings[0]
        if not finding.is_explained:
            yield UNEXPLAINED, "no known bug of divided layers explains all ranks"
        else:
            yield LIKELY_BUG, self.likely_bug
            yield "", f"  {finding.about}"
        for about in finding.others if verbose else finding.others[:1]:
            yield "", f"  or {about}: the observed stages cannot distinguish them"
        for rank, comparison in self.wrong.items():
            yield (
                f"First wrong stage of rank {rank}",
                f"{comparison.stage}, {comparison.ratio:.2g} times its budget",
            )
        if finding.is_explained:
            yield "Evidence", self.evidence
            yield "Fix", self.fix
            yield "More", self.more

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as values of JSON."""
        wrong = [{"rank": rank, **each.to_dict()} for rank, each in self.wrong.items()]
        return {**super().to_dict(), "wrong": wrong}


def diagnose_ranks(
    observed: Sequence[Mapping[str, Any]], problem: Problem, *, tensor: int = 1, tokens: int = 1
) -> RankDiagnosis:
    """Find the wrong ranks of a divided layer, and the bug that explains all of them.

    Args:
        observed: the stages of each rank, in order, by the names of `STAGES`, in arrays of any
            framework. Ranks that share heads have the stages of their own heads, and their part of
            the sum as `output`. Ranks that share tokens have the stages of their own tokens, in
            order and the same number each, and optionally `grad.query`.
        problem: problem of the whole layer, without a cache.
        tensor: number of ranks that share the heads.
        tokens: number of ranks that share the tokens. One of the two is 1.

    Raises:
        ValueError: if a rank is missing or has none of these stages, both or neither are divided,
            or the problem cannot be divided in this way.

    Example:
        >>> import mha_torch
        >>> problem = parity.make_problem("causal", "float32")
        >>> query = parity.to_torch(problem.inputs["query"])
        >>> plan = parity.ShardPlan(tensor=2)
        >>> ranks = []
        >>> for rank in range(2):
        ...     weights, spec = parity.shard(problem.weights, problem.spec, plan, rank)
        ...     layer = parity.load_into(mha_torch.MultiHeadAttention(spec), weights, spec)
        ...     output, _ = layer(query, is_causal=True)
        ...     ranks.append({"output": output})
        >>> print(parity.diagnose_ranks(ranks, problem, tensor=2))
        nothing differs by more than rounding on any rank
    """
    if (tensor > 1) == (tokens > 1):
        raise InputError("either tensor or tokens", "be above 1", tensor=tensor, tokens=tokens)
    if len(observed) != max(tensor, tokens):
        raise InputError("observed", "be of each rank", f"{len(observed)} of {max(tensor, tokens)}")
    has_own_tokens = tokens <= 1 or problem.case.seq_len % tokens == 0
    if problem.case.is_cached or not has_own_tokens:
        case = f"case {problem.case.name} with {problem.case.seq_len} tokens"
        if problem.case.is_cached:
            case = f"case {problem.case.name} with a cache"
        raise InputError("problem", f"have no cache, and tokens that {tokens} ranks divide", case)
    of_ranks = [stages_of("observed", stages, "output") for stages in observed]
    with_gradients = False
    for rank, stages in enumerate(of_ranks):
        if not stages.keys() & {*COMPARED, "grad.query"}:
            names = f"{sorted(stages)} of rank {rank}"
            raise InputError("observed", "have stages of every rank", names)
        if tokens > 1 and "grad.query" in stages:
            with_gradients = True
    right = _RankStages(problem, ShardPlan(tensor), tokens, with_gradients=with_gradients)
    wrong: dict[int, Comparison] = {}
    for rank, stages in enumerate(of_ranks):
        comparison = right.first_wrong(stages, rank)
        if comparison is not None:
            wrong[rank] = comparison
    if not wrong:
        return RankDiagnosis({})
    first = next(iter(wrong.values()))
    finding = Finding(first.stage, first.error, first.ratio)
    explaining = [
        bug for bug in rank_bugs(problem, right.plan, tokens) if right.is_explained(of_ranks, bug)
    ]
    if explaining:
        bug, *others = explaining
        edit = Edit(bug.name, bug.about, pages=(bug.page,), fixes=(bug.fix,))
        finding = replace(finding, edits=(edit,), others=tuple(other.about for other in others))
    return RankDiagnosis(wrong, [finding])


class _RankStages:
    """The right stages of each rank, and those with a bug."""

    def __init__(
        self, problem: Problem, plan: ShardPlan, tokens: int, *, with_gradients: bool
    ) -> None:
        self.problem = problem
        self.plan = plan
        self.tokens = tokens
        self.spec = problem.spec
        shard_spec(without_widths(self.spec), plan, 0)  # or it raises an error
        self.reference = Reference(problem, with_gradients)
        self.ranks = SharedProblem(problem, plan, tokens, self._changed)

    def _changed(self, changed: Edit) -> Values:
        return run_steps(edited_layer(self.problem, "float64", [changed]).steps())

    def first_wrong(
        self, observed: Values, rank: int, bug: RankBug | None = None
    ) -> Comparison | None:
        """Return the first stage of a rank that differs from its right values, or from those with a
        bug.
        """
        right = self._own(rank, self.reference.accumulated, np.float64)
        noisy = self._noisy(rank)
        exact = dict(right)
        if bug is not None:
            computed = bug.computed(self.ranks, rank)
            for name in bug.stages:
                if name in computed:
                    exact[name] = computed[name]
        for name in exact:
            if name not in observed:
                continue
            comparison = self._compare_stage(name, observed[name], exact, noisy, rank, right)
            if not comparison.passed:
                return comparison
        return None

    def is_explained(self, of_ranks: Sequence[Values], bug: RankBug) -> bool:
        """Return True if the stages of every rank match a bug, as far as the bug predicts them."""
        return all(
            self.first_wrong(observed, rank, bug) is None for rank, observed in enumerate(of_ranks)
        )

    def _compare_stage(
        self, name: str, actual: np.ndarray, exact: Values, noisy: Values, rank: int, right: Values
    ) -> Comparison:
        """Compare a stage with its expected values, with the noise of the right ones."""
        noise = noisy[name]
        if exact[name] is not right[name]:
            noise = exact[name] + (noise.astype(np.float64) - right[name])
        terms = None
        if name == "grad.query":
            terms = self._own(rank, {name: self.reference.magnitudes[name]}, np.float64)[name]
        label = Label(self.problem.case.name, f"rank {rank}", self.problem.dtype, name)
        return compare(actual, exact[name], noise.astype(noisy[name].dtype), label, terms=terms)

    def _noisy(self, rank: int) -> Values:
        same = SAME_PRECISION[self.problem.dtype]
        return self._own(rank, self.reference.same_precision(local=False), np.dtype(same).type)

    def _own(self, rank: int, whole: Values, dtype: Any) -> dict[str, np.ndarray]:
        """Return a rank's part of the stages of the whole layer; for outputs, its summand."""
        if self.tokens > 1:
            part = self.problem.case.seq_len // self.tokens
            return self.ranks.of_tokens(whole, np.arange(rank * part, (rank + 1) * part))
        local_heads = self.ranks.local_heads(rank)
        stages: dict[str, np.ndarray] = {}
        for name in OF_HEADS:
            if name in whole:
                stages[name] = part_of(name, whole[name], self.spec, local_heads)
        stages["output"] = self._summand(rank, stages, dtype)
        return stages

    def _summand(self, rank: int, stages: Values, dtype: Any) -> np.ndarray:
        """Return what a rank adds to the output, from its own heads."""
        weights, own = self.ranks.divided(rank)
        context = stages["context"].astype(dtype)
        if "gate" in stages:
            gate = 1.0 / (1.0 + np.exp(-stages["gate"].astype(dtype)))
            batch, seq_len, _ = gate.shape
            context = context * gate.reshape(batch, seq_len, own.num_heads, -1).swapaxes(1, 2)
        output = context.swapaxes(1, 2).reshape(context.shape[0], context.shape[2], -1)
        if own.out_proj:
            output = output @ weights["out_proj.weight"].astype(dtype).T
            if own.out_bias:
                output = output + weights["out_proj.bias"].astype(dtype)
        return output
