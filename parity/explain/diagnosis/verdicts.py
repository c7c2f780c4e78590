"""Verdicts of a diagnosis: the bugs that explain a difference, unexplained stages, and
conventions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parity.explain.diagnosis.laws import EVERYWHERE, Findings, Law
from parity.measure.core.records import JsonRecord
from parity.measure.core.stages import STAGES, stage_named
from parity.measure.text import and_listed

UNNAMED = ("pattern", "unknown")
"""Kinds of a diagnosis in which some difference has no name: a pattern explains it, or nothing
does.
"""

LOST = "low-precision"
"""The page of bugs that only lose precision."""

FINDING = ("likely_bug", "first_wrong_stage", "evidence", "fix", "more")
"""The keys of every finding, in JSON and in this order as text."""

Line = tuple[str, str]
"""A label and its text, such as `Fix` and `transpose out_proj.weight`."""


def text_of(lines: Iterable[Line]) -> str:
    """Return lines as text: `Fix: transpose out_proj.weight`."""
    return "\n".join(f"{label}: {text}" if label else text for label, text in lines)


@dataclass(frozen=True)
class Explanation(JsonRecord):
    """One bug, or two at once, that explain a stage; or a pattern that has a page.

    Attributes:
        stage: the first stage that they explain.
        stages: all stages that they explain, in order.
        bugs: names of the bugs, ordered by the step that they change; for a pattern, its page.
        about: a description, such as `the scores are not scaled`.
        fixes: a fix for each.
        docs: their pages in parity/bugs.
        error_before: error of the stage without them, from the observed stages before it, in the
            norm that decided.
        error: error with them; None for a pattern, which leaves rounding.
        ratio: error with them / budget; at most 1.
        ratio_before: error without them / budget; NaN if it is unknown.
        others: descriptions of other explanations that the observed stages cannot distinguish.
        findings: for a pattern, where the stage differs, and the fitted numbers.
    """

    stage: str
    stages: tuple[str, ...]
    bugs: tuple[str, ...]
    about: str
    fixes: tuple[str, ...]
    docs: tuple[str, ...]
    error_before: float
    error: float | None
    ratio: float
    ratio_before: float = math.nan
    others: tuple[str, ...] = ()
    findings: Findings | None = None

    IN_JSON = ("*", *FINDING)

    @property
    def likely_bug(self) -> str:
        """The names of the bugs."""
        return ", ".join(self.bugs)

    @property
    def first_wrong_stage(self) -> str:
        """The first stage that they explain."""
        return self.stage

    @property
    def where(self) -> str:
        """The part of the stage that differs, for a pattern; empty if it is the whole stage."""
        where = "" if self.findings is None else self.findings.where
        return "" if where == EVERYWHERE else where

    @property
    def evidence(self) -> str:
        """How the error changes with the bugs in the reference."""
        with_it = f"with {'this bug' if len(self.bugs) == 1 else 'these bugs'} in the reference"
        error = f"the error of {_some(self.stages)}"
        if self.error is None:
            return f"{with_it}, {error} falls from {self.error_before:.2g} to rounding"
        if self.error >= self.error_before:
            return f"{error}, {self.error:.2g}, is as large as this loss of precision"
        falls = f"falls from {self.error_before:.2g} to {self.error:.2g}"
        return (
            f"{with_it}, {error} "
            f"{falls if math.isfinite(self.error_before) else f'is {self.error:.2g}'}"
        )

    @property
    def fix(self) -> str:
        """The fixes in a line."""
        return "; ".join(self.fixes)

    @property
    def more(self) -> str:
        """The command that prints their pages."""
        return _command(self.docs)

    def lines(self, wrong_stage: Line, *, verbose: bool = False) -> Iterator[Line]:
        """Yield the labels and texts of the explanation; the first label is empty, for the lines
        below the heading.
        """
        yield "", self.about
        shown = self.others if verbose else self.others[:1]
        for other in shown:
            yield "", f"or {other}: the observed stages cannot distinguish them"
        if len(shown) < len(self.others):
            yield "", f"or {len(self.others) - len(shown)} more"
        yield wrong_stage
        yield from [("Where", self.where)] if self.where else []
        yield "Evidence", self.evidence
        yield from (("Fix", fix) for fix in self.fixes)
        yield "More", self.more
        if verbose:
            yield "Explained", ", ".join(self.stages)
            yield from (("Also", sign) for sign in (self.findings.signs if self.findings else ()))


@dataclass(frozen=True)
class Unknown(JsonRecord):
    """A stage that differs by itself and that no known bug explains; a pattern may.

    Attributes:
        stage: its name.
        error: its error (root mean square), from the observed stages before it.
        ratio: error / budget.
        findings: where it differs, and by which pattern; None for a stage that cannot be compared.
        nearest: the changes that reduce the error most, without explaining it: descriptions, and
            the remaining error.
        stages: all stages that the same pattern explains, in order.
    """

    stage: str
    error: float
    ratio: float
    findings: Findings | None = None
    nearest: tuple[tuple[str, float], ...] = ()
    stages: tuple[str, ...] = ()

    IN_JSON = ("*", *FINDING)

    def explaining(self, stages: Sequence[str], words: Sequence[str]) -> Unknown:
        """Return it as plain data, with the stages that a pattern explains.

        If the stages are several, the pattern that explains all of them comes first.
        """
        if self.findings is None:
            return self
        laws = self.findings.plain().found
        laws = sorted(laws, key=lambda law: law.words not in words) if len(stages) > 1 else laws
        return replace(
            self,
            findings=replace(self.findings, found=tuple(laws)),
            stages=tuple(stages) or (self.stage,),
        )

    @property
    def likely_bug(self) -> str:
        """Empty, because no known bug explains the stage."""
        return ""

    @property
    def first_wrong_stage(self) -> str:
        """The stage."""
        return self.stage

    @property
    def where(self) -> str:
        """The heads, sequences, positions, features or cells in which it differs."""
        return "" if self.findings is None else self.findings.where

    @property
    def laws(self) -> tuple[str, ...]:
        """Descriptions of the verified patterns, the simplest first."""
        return () if self.findings is None else self.findings.laws

    @property
    def law(self) -> Law | None:
        """The simplest pattern that explains it; NaN or infinite values alone explain nothing."""
        found = () if self.findings is None else self.findings.found
        return next((law for law in found if law.name not in ("nan", "infinite")), None)

    @property
    def evidence(self) -> str:
        """How the error changes with the pattern; without one, other signs of the error."""
        if self.law is None:
            return "; ".join(self.findings.signs if self.findings else ())
        stages = self.stages or (self.stage,)
        return (
            f"with this pattern, the error of {_some(stages)} falls from {self.error:.2g} to "
            f"rounding"
        )

    @property
    def fix(self) -> str:
        """The fixes of the pattern in a line; empty without one."""
        return "" if self.law is None else "; ".join(self.law.fixes)

    @property
    def more(self) -> str:
        """The command that prints the pages of the pattern; empty without one."""
        return "" if self.law is None else _command(self.law.pages)

    @property
    def explanation(self) -> Explanation | None:
        """The simplest pattern as an explanation, if it and all equally simple ones have pages, two
        at most.
        """
        law = self.law
        if law is None or not law.pages or self.findings is None:
            return None
        others = [
            each for each in self.findings.found if each is not law and each.words != law.words
        ]
        alike = [
            law,
            *(
                each
                for each in others
                if each.parameters <= law.parameters and len(self.stages) < 2
            ),
        ]
        pages = dict.fromkeys(page for each in alike for page in each.pages)
        if not all(each.pages for each in alike) or len(pages) > 2:
            return None
        return Explanation(
            self.stage,
            self.stages or (self.stage,),
            law.pages[:1],
            self._in_place(law.words),
            tuple(dict.fromkeys(fix for each in alike for fix in each.fixes)),
            tuple(pages),
            self.error,
            None,
            1.0,
            self.ratio,
            tuple(self._in_place(each.words) for each in others),
            self.findings,
        )

    @property
    def headline(self) -> str:
        """The simplest pattern, or a statement that nothing explains the stage."""
        if self.law is not None:
            return (
                f"not a known bug: in {_some(self.stages or (self.stage,))}, "
                f"{self._in_place(self.law.words)}"
            )
        return f"unknown: no known bug explains {self.stage}"

    def _in_place(self, words: str) -> str:
        """Return the description of a pattern; `there` refers to a place, unless it is the whole
        stage.
        """
        return words.replace(" there", "", 1) if self.where == EVERYWHERE else words

    def lines(self, wrong_stage: Line, *, verbose: bool = False) -> Iterator[Line]:
        """Yield the labels and texts of the stage, as `Explanation.lines` does."""
        laws = list(dict.fromkeys(self._in_place(law) for law in self.laws))
        if laws:
            yield "", laws[0]
            yield from (("", f"or {law}") for law in laws[1 : None if verbose else 2])
        yield wrong_stage
        yield from [("Where", self.where)] if self.where else []
        yield from [("Evidence", self.evidence)] if self.evidence else []
        yield from (("Fix", fix) for fix in (self.law.fixes if self.law else ()))
        yield from [("More", self.more)] if self.more else []
        for words, error in self.nearest if verbose else self.nearest[:1]:
            yield "Nearest", f"the error falls to {error:.2g} if {words}"
        if verbose and self.law is not None:
            yield from (("Also", sign) for sign in (self.findings.signs if self.findings else ()))


Finding = Explanation | Unknown


@dataclass(frozen=True)
class Diagnosis(JsonRecord):
    """The bugs and differences that a search found.

    `str(diagnosis)` is short; `diagnosis.text` contains everything.

    Attributes:
        kind: `none`, nothing differs; `convention`, stages are recorded in a known convention, and
            agree in it; `precision`, all errors are small, and lost precision reproduces them;
            `structure`, bugs explain them; `law`, verified patterns do, alone or in addition to
            bugs; `unknown`, something remains.
        stage: the first stage that differs; empty if none does.
        error: its error (root mean square).
        ratio: its error / budget.
        explanations: the bugs, in the order of the stages that they explain.
        unknowns: the stages that still differ by themselves, in order.
        has_stages: True if more than the output was observed.
        malformed: stages that cannot be compared, and why; the others are compared without them.
        conventions: descriptions of how stages are recorded in another convention, by stage.
        choice: a description of how the implementation computes differently; it is not a bug.
        untried: the parts of the search that exceeded the time limit.
        agrees: True if the output agrees all the same.
        dtypes: of the stages whose dtype is not the problem's.
        dtype: the problem's.
        taken: the stages of another convention, converted to the reference's if that is possible.
            JSON omits them.
        sample: the part of a large layer that was searched.
        hidden: if nothing is wrong in 16 bits, the known bugs that these stages would only show in
            float32.
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
    hidden: tuple[str, ...] = ()

    IN_JSON = ("*", *FINDING, "unexplained", "nearest", "headline", "text")

    def with_named_laws(self) -> Diagnosis:
        """Return the diagnosis with the patterns that have a page as explanations."""
        if self.kind not in UNNAMED:
            return self
        named = [(unknown, unknown.explanation) for unknown in self.unknowns]
        found = [explanation for _, explanation in named if explanation is not None]
        if not found:
            return self
        unknowns = [unknown for unknown, explanation in named if explanation is None]
        lost = all({*each.docs} == {LOST} for each in (*self.explanations, *found))
        kind = self.kind if unknowns else "precision" if lost else "structure"
        return replace(
            self, kind=kind, explanations=_in_order([*self.explanations, *found]), unknowns=unknowns
        )

    @property
    def is_known(self) -> bool:
        """True if known bugs explain every difference, without a fitted pattern."""
        return self.kind not in UNNAMED and all(each.findings is None for each in self.explanations)

    @property
    def is_wrong(self) -> bool:
        """True if something is wrong: rounding within the budget is not, and a known convention is
        not.
        """
        return self.kind not in ("none", "convention")

    @property
    def findings(self) -> list[Finding]:
        """The explanations, then the stages that they leave: those of a pattern, then those
        without.
        """
        unknowns = (
            sorted(self.unknowns, key=lambda unknown: unknown.law is None)
            if self.kind in UNNAMED
            else []
        )
        return [*self.explanations, *unknowns] if self.is_wrong else []

    @property
    def likely_bug(self) -> str:
        """The name of the first bug, or names if two explain the stage together; empty if there is
        none.
        """
        return next((each.likely_bug for each in self.findings), "")

    @property
    def first_wrong_stage(self) -> str:
        """The first stage that is wrong; empty if none is."""
        return self.stage if self.is_wrong else ""

    @property
    def evidence(self) -> str:
        """The evidence for the first finding, `Explanation.evidence`."""
        return next((each.evidence for each in self.findings), "")

    @property
    def fix(self) -> str:
        """The fix of the first finding; empty if none is known."""
        return next((each.fix for each in self.findings), "")

    @property
    def more(self) -> str:
        """The command that prints more about the first finding; empty if there is no page."""
        return next((each.more for each in self.findings), "")

    @property
    def cause(self) -> str:
        """The first bug, else the first verified pattern, in a line; empty if there is neither."""
        if not self.is_wrong:
            return ""
        if self.explanations:
            return f"{self.likely_bug}: {self.explanations[0].about}"
        return next((each.headline for each in self.unknowns if each.law is not None), "")

    @property
    def headline(self) -> str:
        """The diagnosis in a line: the cause, or a statement that there is none."""
        if self.kind == "none":
            return "nothing differs by more than rounding"
        if self.kind == "convention":
            return (
                "nothing is wrong: stages are recorded in another convention, and everything "
                "computed from them agrees"
            )
        if self.cause:
            return self.cause
        if self.unknowns:
            return self.unknowns[0].headline
        return " ".join(next(iter(self.malformed.items()), (self.stage, "differs")))

    @property
    def unexplained(self) -> str:
        """The first stage that still differs; empty if none does."""
        return self.unknowns[0].stage if self.unknowns else ""

    @property
    def nearest(self) -> list[tuple[str, float]]:
        """The changes that reduce the error of that stage most."""
        return list(self.unknowns[0].nearest) if self.unknowns else []

    @property
    def text(self) -> str:
        """The whole diagnosis as text."""
        return self.as_text(verbose=True)

    def __str__(self) -> str:
        return self.as_text()

    def as_text(self, *, verbose: bool = False) -> str:
        """Return the diagnosis as text: `Likely bug`, `First wrong stage`, `Evidence`, `Fix` and
        `More`, a line each.

        Args:
            verbose: also include every alternative, all patterns and nearest bugs, and conventions.
        """
        return text_of(self.lines(verbose=verbose))

    def lines(self, *, verbose: bool = False) -> Iterator[Line]:
        """Yield the labels and texts of `as_text`; lines without a label are indented, or empty
        between findings.
        """
        if not self.is_wrong:
            yield "", self.headline
        elif self.findings:
            yield from self._findings(verbose=verbose)
        else:
            yield "Likely bug", "unexpected shape or dtype" if self.malformed else "unknown"
            yield self.first_line
        yield from self._notes(verbose=verbose)

    def _findings(self, *, verbose: bool) -> Iterator[Line]:
        """Yield the lines of each finding below its heading."""
        findings = self.findings
        first = next((each for each in findings if each.stage == self.stage), findings[0])
        for number, finding in enumerate(findings, 1):
            of_several = f" {number} of {len(findings)}" if len(findings) > 1 else ""
            if number > 1:
                yield "", ""
            pattern = (
                "not in the list of known bugs"
                if isinstance(finding, Unknown) and finding.law
                else "unknown"
            )
            yield f"Likely bug{of_several}", finding.likely_bug or pattern
            stage = (
                self.first_line
                if finding is first
                else ("Wrong stage", excess(finding.stage, *_size(finding)))
            )
            yield from (
                (label, text if label else f"  {text}")
                for label, text in finding.lines(stage, verbose=verbose)
            )
        if self.kind == "unknown" and self.unknowns and not self.has_stages:
            yield (
                "Next",
                "pass the stages by name as well (q, k, v, scores, …), because they show more",
            )

    def _notes(self, *, verbose: bool) -> Iterator[Line]:
        """Yield what applies to the whole diagnosis."""
        if self.agrees and self.is_wrong:
            yield "Note", "the output agrees with the reference all the same"
        malformed = (each for each in self.malformed.items() if each[0] != self.stage)
        yield from (("Not comparable", f"{stage} {reason}") for stage, reason in malformed)
        if verbose or not self.is_wrong:
            yield from (("Convention", words) for words in _by_quantity(self.conventions))
            yield from [("Choice", f"{self.choice}, which is not a bug")] if self.choice else []
        stages: dict[str, list[str]] = {}
        for stage, dtype in self.dtypes.items():
            stages.setdefault(dtype, []).append(stage)
        for dtype, of_dtype in stages.items():
            yield (
                "Dtype",
                f"{_some(of_dtype)} {'is' if len(of_dtype) == 1 else 'are'} {dtype} in a "
                f"{self.dtype} problem",
            )
        yield from [("Searched", f"a sample, {self.sample}")] if self.sample else []
        yield from [("Not tried", f"{self.untried} (limit of the search)")] if self.untried else []
        if self.hidden:
            shown = _some(self.hidden, most=len(self.hidden) if verbose else 3)
            yield "Hidden", f"{shown} may not show in {self.dtype}: compare in float32 as well"

    @property
    def first_line(self) -> Line:
        """The line of the first wrong stage."""
        if self.stage in self.malformed:
            return "First wrong stage", f"{self.stage}, which {self.malformed[self.stage]}"
        return "First wrong stage", excess(self.stage, self.error, self.ratio)


def _size(finding: Finding) -> tuple[float, float]:
    """Return the error of the stage of a finding, and how often it exceeds its budget."""
    is_unknown = isinstance(finding, Unknown)
    return (
        (finding.error, finding.ratio)
        if is_unknown
        else (finding.error_before, finding.ratio_before)
    )


def excess(stage: str, error: float, ratio: float) -> str:
    """Return a stage, and how far it exceeds its budget."""
    if stage_named(stage).is_exact:
        return f"{stage}, which should be exact"
    if not math.isfinite(error):
        return f"{stage}, which is not finite"
    return f"{stage}, {ratio:.2g} times its budget" if math.isfinite(ratio) else stage


def _command(pages: Sequence[str]) -> str:
    return f"mha-parity bugs {' '.join(pages)}" if pages else ""


def _in_order(explanations: list[Explanation]) -> list[Explanation]:
    """Return explanations in the order of the stages that they explain."""
    kinds = list(STAGES)

    def place(explanation: Explanation) -> tuple[int, int]:
        stage = stage_named(explanation.stage)
        return stage.step or 0, kinds.index(stage.kind) if stage.kind in kinds else len(kinds)

    return sorted(explanations, key=place)


def _by_quantity(conventions: Mapping[str, str]) -> list[str]:
    """Return descriptions of stages, one for all steps with the same words."""
    steps: dict[tuple[str, str], list[str]] = {}
    for name, words in conventions.items():
        steps.setdefault((str(replace(stage_named(name), step=None)), words), []).append(name)
    return [
        f"{names[0]} {words}"
        if len(names) == 1
        else f"{quantity} {words}, in {len(names)} steps from {names[0]} on"
        for (quantity, words), names in steps.items()
    ]


def _some(stages: Sequence[str], most: int = 3) -> str:
    """Return some stages and the number of others: `q, k and 2 more`."""
    return (
        and_listed(stages)
        if len(stages) <= most
        else and_listed([*stages[:most], f"{len(stages) - most} more"])
    )
