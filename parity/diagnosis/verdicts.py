"""Verdicts of a diagnosis: mistakes that explain a difference, stages that nothing explains, and conventions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parity.core.records import JsonRecord
from parity.core.stages import STAGES, stage_named
from parity.diagnosis.laws import Findings, Law
from parity.text import some_of


@dataclass(frozen=True)
class Explanation:
    """A mistake, or two at once, that explain a stage; or a law that has a page.

    Attributes:
        stage: the first that they explain.
        stages: all that they explain, in order.
        hypotheses: their names, in the order of the stages that they are made in; of a law its page.
        about: what they are, in words.
        fixes: what to do about each.
        docs: the pages of parity/bugs that say more.
        error_before: error of the stage without them (root mean square), from the observed stages before it.
        error: with them; None of a law, which leaves rounding.
        ratio: what is left, over what is allowed; at most 1.
        others: what explains it as well and cannot be told from it here, in words.
        findings: of a law, where the stage differs, and the numbers that were fitted.
    """

    stage: str
    stages: tuple[str, ...]
    hypotheses: tuple[str, ...]
    about: str
    fixes: tuple[str, ...]
    docs: tuple[str, ...]
    error_before: float
    error: float | None
    ratio: float
    others: tuple[str, ...] = ()
    findings: Findings | None = None

    @property
    def where(self) -> str:
        """Return the part of the stage that differs, of a law; nothing if that is all of it."""
        where = "" if self.findings is None else self.findings.where
        return "" if where == EVERYWHERE else where

    def __str__(self) -> str:
        error = "rounding" if self.error is None else f"{self.error:.2g}"
        is_less = self.error is None or self.error < self.error_before
        falls = f"error falls from {self.error_before:.2g} to {error}"
        lines = [
            f"{_listed(self.stages)} the reference if {self.about} "
            f"({falls if is_less else f'error {error}, as much as that loses'})",
            *([f"  where     {self.where}"] if self.where else []),
            *(f"  or if     {other}: they cannot be told apart here" for other in self.others),
            f"  mistake   {', '.join(self.hypotheses)}",
            *(f"  fix       {fix}" for fix in self.fixes),
            f"  see       mha-parity bugs {' '.join(self.docs)}",
        ]
        return "\n".join(lines)


EVERYWHERE = "everywhere"
"""The words of a place that is all of a stage."""

UNNAMED = ("law", "unknown")
"""The kinds of a diagnosis in which some difference has no name: a law explains it, or nothing does."""


@dataclass(frozen=True)
class Unknown:
    """A stage that differs by itself, which no mistake known here explains; a law may.

    Attributes:
        stage: which.
        error: of it (root mean square), from the observed stages before it.
        ratio: error / budget.
        findings: where it differs, and by what law; None of a stage that cannot be compared.
        nearest: what lessens its error most, without explaining it: in words, with the error that is left.
        stages: all stages that the same law explains, in order.
    """

    stage: str
    error: float
    ratio: float
    findings: Findings | None = None
    nearest: tuple[tuple[str, float], ...] = ()
    stages: tuple[str, ...] = ()

    def explaining(self, stages: Sequence[str], words: Sequence[str]) -> Unknown:
        """Return it as plain data, with the stages that a law explains, and that law first if they are several."""
        if self.findings is None:
            return self
        laws = self.findings.plain().found
        laws = sorted(laws, key=lambda law: law.words not in words) if len(stages) > 1 else laws
        return replace(self, findings=replace(self.findings, found=tuple(laws)), stages=tuple(stages) or (self.stage,))

    @property
    def where(self) -> str:
        """In which heads, sequences, positions, features or cells it differs, in words."""
        return "" if self.findings is None else self.findings.where

    @property
    def laws(self) -> tuple[str, ...]:
        """How it differs, each verified, in words; the simplest first."""
        return () if self.findings is None else self.findings.laws

    @property
    def law(self) -> Law | None:
        """The simplest law that explains it; that values are NaN or infinite explains nothing."""
        found = () if self.findings is None else self.findings.found
        return next((law for law in found if law.name not in ("nan", "infinite")), None)

    @property
    def explanation(self) -> Explanation | None:
        """The simplest law as an explanation, if it and all that are as simple have pages, two at most."""
        law = self.law
        if law is None or not law.pages or self.findings is None:
            return None
        others = [each for each in self.findings.found if each is not law and each.words != law.words]
        alike = [law, *(each for each in others if each.parameters <= law.parameters and len(self.stages) < 2)]
        pages = dict.fromkeys(page for each in alike for page in each.pages)
        if not all(each.pages for each in alike) or len(pages) > 2:
            return None
        return Explanation(
            self.stage,
            self.stages or (self.stage,),
            law.pages[:1],
            law.words,
            tuple(dict.fromkeys(fix for each in alike for fix in each.fixes)),
            tuple(pages),
            self.error,
            None,
            1.0,
            tuple(each.words for each in others),
            self.findings,
        )

    @property
    def headline(self) -> str:
        """The simplest law, or that nothing explains the stage."""
        if self.law is not None:
            return f"{_listed(self.stages or (self.stage,), 'differs', 'differ')} by a law: {self.law.words}"
        return f"{self.stage} differs, and no mistake known here explains it"

    @property
    def _other_laws(self) -> tuple[str, ...]:
        """Those that the headline does not have."""
        return tuple(law for law in self.laws if self.law is None or law != self.law.words)

    def lines(self, *, still: bool) -> list[str]:
        """The headline, and all else that was found."""
        return [
            self.headline.replace(" differ", " still differ", 1) if still else self.headline,
            *([f"  where     {self.where}"] if self.where else []),
            *(f"  {'law' if self.law is None else 'or law':9} {law}" for law in self._other_laws),
            *(f"  sign      {sign}" for sign in (self.findings.signs if self.findings else ())),
            *(f"  nearest   {words} (error {error:.2g})" for words, error in self.nearest),
        ]


LOST = "low-precision"
"""The page of what loses precision only."""


@dataclass(frozen=True)
class Diagnosis(JsonRecord):
    """Mistakes and differences, as far as they were found.

    Attributes:
        kind: `none`, nothing differs; `convention`, what differs is recorded otherwise, and what follows agrees;
            `rounding`, some errors are just beyond the budget; `precision`, all are small, and what matrix products
            lose explains them; `structure`, mistakes do; `law`, verified laws do, beside mistakes or alone; `unknown`,
            something is left.
        stage: the first that differs, or nothing.
        error: of that stage (root mean square).
        ratio: of that stage: error / budget.
        explanations: the mistakes, in the order of the stages that they explain.
        unknowns: the stages that still differ by themselves, in their order.
        has_stages: whether more was observed than the output.
        malformed: stages that cannot be compared, and why; the others are judged without them.
        conventions: how stages are recorded, where not as ours, by stage and in words.
        choice: how it computes, where not as the reference, in words; it is no mistake.
        untried: what there was no time for, in words.
        agrees: whether the output agrees all the same.
        dtypes: of stages whose dtype is not the problem's.
        dtype: the problem's.
        taken: the stages that are recorded otherwise and can be brought into the reference's form, in that form. JSON
            leaves them out.
        sample: the part of a large layer that was searched, in words.
    """

    kind: str
    stage: str = ""
    error: float = 0.0
    ratio: float = 0.0
    explanations: list[Explanation] = field(default_factory=list)
    unknowns: list[Unknown] = field(default_factory=list)
    has_stages: bool = True
    malformed: Mapping[str, str] = field(default_factory=dict)
    conventions: Mapping[str, str] = field(default_factory=dict)
    choice: str = ""
    untried: str = ""
    agrees: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)
    dtype: str = ""
    taken: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    sample: str = ""

    IN_JSON = ("*", "unexplained", "nearest", "headline", "text")

    def with_named_laws(self) -> Diagnosis:
        """Return the diagnosis with the laws that have a page as explanations."""
        if self.kind not in UNNAMED:
            return self
        named = [(unknown, unknown.explanation) for unknown in self.unknowns]
        found = [explanation for _, explanation in named if explanation is not None]
        if not found:
            return self
        unknowns = [unknown for unknown, explanation in named if explanation is None]
        lost = all({*each.docs} == {LOST} for each in (*self.explanations, *found))
        kind = self.kind if unknowns else "precision" if lost else "structure"
        return replace(self, kind=kind, explanations=_in_order([*self.explanations, *found]), unknowns=unknowns)

    @property
    def is_known(self) -> bool:
        """True if known mistakes explain all that differs, and no law stands for one."""
        return self.kind not in UNNAMED and all(each.findings is None for each in self.explanations)

    @property
    def is_wrong(self) -> bool:
        """True if anything is wrong: neither rounding within the budget nor another way to record is."""
        return self.kind not in ("none", "convention")

    @property
    def cause(self) -> str:
        """The first named mistake, else the first verified law, in a line; empty if there is neither."""
        if not self.is_wrong:
            return ""
        if self.explanations:
            first = self.explanations[0]
            return f"{', '.join(first.hypotheses)}: {first.stage} matches the reference if {first.about}"
        return next((each.headline for each in self.unknowns if each.law is not None), "")

    @property
    def headline(self) -> str:
        """The cause, or that there is none, in a line."""
        if self.kind == "none":
            return "nothing differs by more than rounding"
        if self.kind == "convention":
            return "convention: what follows agrees, nothing is wrong"
        if self.cause:
            return self.cause
        if self.unknowns:
            return self.unknowns[0].headline
        if self.kind == "rounding":
            return f"{self.stage} differs by rounding, most likely"
        return " ".join(next(iter(self.malformed.items()), (self.stage, "differs")))

    @property
    def unexplained(self) -> str:
        """The first stage that still differs, or nothing."""
        return self.unknowns[0].stage if self.unknowns else ""

    @property
    def nearest(self) -> list[tuple[str, float]]:
        """Changes that lessen the error of that stage most."""
        return list(self.unknowns[0].nearest) if self.unknowns else []

    @property
    def text(self) -> str:
        """All of it in words."""
        return str(self)

    def __str__(self) -> str:
        return "\n".join([*self._told_dtypes(), self._told()])

    def _told_dtypes(self) -> list[str]:
        """The stages of each other dtype, in a line."""
        by_dtype: dict[str, list[str]] = {}
        for stage, dtype in self.dtypes.items():
            by_dtype.setdefault(dtype, []).append(stage)
        return [
            f"{_listed(stages, 'has', 'have')} dtype {dtype}, of a {self.dtype} problem"
            for dtype, stages in by_dtype.items()
        ]

    def _told(self) -> str:
        lines = _by_quantity(self.conventions)
        lines += [f"{self.choice}, which is no mistake"] if self.choice else []
        if not self.is_wrong:
            return "\n".join([self.headline, *lines])
        lines = self._head() + [f"{stage} {reason}" for stage, reason in self.malformed.items()] + lines
        if self.kind == "rounding":
            lines.append("no mistake explains it: rounding, most likely")
        lines += map(str, self.explanations)
        if self.kind in UNNAMED:
            for unknown in sorted(self.unknowns, key=lambda unknown: unknown.law is None):
                lines += unknown.lines(still=bool(self.explanations))
            if self.kind == "unknown" and self.unknowns and not self.has_stages:
                lines.append("  next      pass its stages, too (q, k, v, scores, …): they show more")
        if self.agrees:
            lines.append("the output agrees all the same: this cancels in it")
        if self.sample:
            lines.append(f"searched in a sample: {self.sample}")
        if self.untried:
            lines.append(f"not tried for want of time: {self.untried}")
        return "\n".join(lines)

    def _head(self) -> list[str]:
        """The kind, and how wrong the first stage is; "unknown" never stands above an explanation."""
        if not math.isfinite(self.ratio):
            return []
        is_partly = self.kind == "unknown" and (
            self.explanations or any(unknown.law is not None for unknown in self.unknowns)
        )
        return [f"{'explained in part' if is_partly else self.kind}: {self.stage} is {self.ratio:.2g} times its budget"]


def _in_order(explanations: list[Explanation]) -> list[Explanation]:
    """Explanations in the order of the stages that they explain."""
    kinds = list(STAGES)

    def place(explanation: Explanation) -> tuple[int, int]:
        stage = stage_named(explanation.stage)
        return stage.step or 0, kinds.index(stage.kind) if stage.kind in kinds else len(kinds)

    return sorted(explanations, key=place)


def _by_quantity(conventions: Mapping[str, str]) -> list[str]:
    """Return lines about stages, one for all steps with the same words."""
    steps: dict[tuple[str, str], list[str]] = {}
    for name, words in conventions.items():
        steps.setdefault((str(replace(stage_named(name), step=None)), words), []).append(name)
    return [
        f"{names[0]} {words}" if len(names) == 1 else f"{quantity} {words}, in {len(names)} steps from {names[0]} on"
        for (quantity, words), names in steps.items()
    ]


def _listed(stages: Sequence[str], of_one: str = "matches", of_more: str = "match") -> str:
    """Some stages and how many more, with a verb."""
    return f"{some_of(stages, 3)} {of_one if len(stages) == 1 else of_more}"
