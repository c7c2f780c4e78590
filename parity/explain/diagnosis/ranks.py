"""The diagnosis of a divided layer: which ranks are wrong, and which bug explains them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mha_spec import InputError
from parity.explain.diagnosis.bugs import edited_layer
from parity.explain.diagnosis.bugs.ranks import RankBug, SharedProblem, rank_bugs, without_widths
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.findings import FINDING, Finding, Line, text_of
from parity.measure.core.arrays import stages_of
from parity.measure.core.compare import SAME_PRECISION, Comparison, Label, compare
from parity.measure.core.problem import Problem
from parity.measure.core.records import JsonRecord
from parity.measure.core.stages import Values, run_steps
from parity.measure.core.trace import Reference
from parity.measure.sharding.shard import ShardPlan, shard_spec
from parity.measure.sharding.stages import part_of
from parity.measure.text import and_listed

JUDGED = ("mask", "latents", "q", "k", "v", "gate", "scores", "attn_weights", "context", "output")
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
    def likely_bug(self) -> str:
        """The name of the bug; empty if none is known."""
        return self.findings[0].likely_bug if self.findings else ""

    @property
    def first_wrong_stage(self) -> str:
        """The first wrong stage of the first wrong rank; empty if nothing is wrong."""
        return self.findings[0].stage if self.findings else ""

    @property
    def where(self) -> str:
        """The wrong ranks."""
        if not self.wrong:
            return ""
        return f"{'rank' if len(self.wrong) == 1 else 'ranks'} {and_listed(self.wrong)}"

    @property
    def evidence(self) -> str:
        """A statement that the bug explains all ranks; empty without one."""
        return "with this bug, all ranks match the reference" if self.likely_bug else ""

    @property
    def fix(self) -> str:
        """The fix of the bug; empty if none is known."""
        return self.findings[0].fix if self.findings else ""

    @property
    def more(self) -> str:
        """The command that prints more; empty if there is no page."""
        return self.findings[0].more if self.findings else ""

    def __str__(self) -> str:
        return text_of(self.lines())

    def lines(self, *, verbose: bool = False) -> Iterator[Line]:
        """Yield labels and texts, as `Diagnosis.lines` does."""
        if not self.findings:
            yield "", "nothing differs by more than rounding on any rank"
            return
        finding = self.findings[0]
        if not finding.is_explained:
            yield "Likely bug", "unknown: no known bug of divided layers explains all ranks"
        else:
            yield "Likely bug", self.likely_bug
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
            framework. Ranks that share heads have the stages of their own heads, and as `output`
            their summand. Ranks that share tokens have the stages of their own tokens, in order and
            equally many, and optionally `grad.query`.
        problem: of the whole layer, without a cache.
        tensor: number of ranks that share the heads.
        tokens: number of ranks that share the tokens. One of both is 1.

    Raises:
        ValueError: if a rank is missing or has none of these stages, both or neither are divided,
            or the problem cannot be divided in this way.
    """
    if (tensor > 1) == (tokens > 1):
        raise InputError("either tensor or tokens", "be above 1", tensor=tensor, tokens=tokens)
    if len(observed) != max(tensor, tokens):
        raise InputError("observed", "be of each rank", f"{len(observed)} of {max(tensor, tokens)}")
    if problem.case.is_cached or (tokens > 1 and problem.case.seq_len % tokens):
        got = (
            f"case {problem.case.name} with "
            f"{'a cache' if problem.case.is_cached else f'{problem.case.seq_len} tokens'}"
        )
        raise InputError(
            "problem", f"have no cache, and tokens that {tokens} ranks divide", str(got)
        )
    given = [stages_of("observed", stages, "output") for stages in observed]
    with_gradients = tokens > 1 and any("grad.query" in stages for stages in given)
    for rank, stages in enumerate(given):
        if not stages.keys() & {*JUDGED, "grad.query"}:
            raise InputError(
                "observed", "have stages of every rank", f"{sorted(stages)} of rank {rank}"
            )
    right = _RankStages(problem, ShardPlan(tensor), tokens, with_gradients=with_gradients)
    wrong = {
        rank: found
        for rank, stages in enumerate(given)
        if (found := right.first_wrong(stages, rank)) is not None
    }
    if not wrong:
        return RankDiagnosis({})
    first = next(iter(wrong.values()))
    finding = Finding(first.stage, first.error, first.ratio)
    explaining = [
        bug for bug in rank_bugs(problem, right.plan, tokens) if right.is_explained(given, bug)
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
        self.problem, self.plan, self.tokens = problem, plan, tokens
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
        right, noisy = self._own(rank, self.reference.accumulated, np.float64), self._noisy(rank)
        exact = right
        if bug is not None:
            computed = bug.computed(self.ranks, rank)
            exact = right | {name: computed[name] for name in bug.stages if name in computed}
        judged = (
            self._judged(name, observed[name], exact, noisy, rank, right)
            for name in exact
            if name in observed
        )
        return next((each for each in judged if not each.passed), None)

    def is_explained(self, given: Sequence[Values], bug: RankBug) -> bool:
        """Return True if the stages of every rank match a bug, as far as the bug predicts them."""
        return all(
            self.first_wrong(observed, rank, bug) is None for rank, observed in enumerate(given)
        )

    def _judged(
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
        kinds = ("mask", "latents", "q", "k", "v", "gate", "scores", "attn_weights", "context")
        held = self.ranks.held(rank)
        found = {
            name: part_of(name, whole[name], self.spec, held) for name in kinds if name in whole
        }
        weights, own = self.ranks.divided(rank)
        context = found["context"].astype(dtype)
        if "gate" in found:
            gate = 1.0 / (1.0 + np.exp(-found["gate"].astype(dtype)))
            batch, seq_len, _ = gate.shape
            context = context * gate.reshape(batch, seq_len, own.num_heads, -1).swapaxes(1, 2)
        output = context.swapaxes(1, 2).reshape(context.shape[0], context.shape[2], -1)
        if own.out_proj:
            output = output @ weights["out_proj.weight"].astype(dtype).T
            output = output + weights["out_proj.bias"].astype(dtype) if own.out_bias else output
        return found | {"output": output}
