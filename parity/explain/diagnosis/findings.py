"""The report of a diagnosis: one finding for each cause, and facts about all stages.

A finding has the same parts whether it is a known bug, a fitted pattern or an unexplained stage,
and whether it is of a layer, of a rank or of two files of weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parity.explain.diagnosis.bugs.record import Edit, WrongField
from parity.explain.diagnosis.fits import EVERYWHERE, Description
from parity.measure.core.records import JsonRecord
from parity.measure.core.stages import STAGES, stage_named
from parity.measure.text import and_listed, counted

LOST = "low-precision"
"""The page of bugs that only lose precision."""

FINDING = (
    "likely_bug",
    "first_wrong_stage",
    "where",
    "evidence",
    "fix",
    "wrong_fields",
    "more",
)
"""The parts of every finding, in JSON and in this order as text; text has no `wrong_fields`."""

LIKELY_BUG = "Likely bug"
PATTERN = "Pattern"
UNEXPLAINED = "Unexplained"
TITLES = (LIKELY_BUG, PATTERN, UNEXPLAINED)
"""The labels of the first line of a finding."""

FOLLOWS = "Follows"

MOST_PAGES = 2
"""The largest number of pages of a pattern that is reported as a known bug."""

MOST_LISTED = 3
"""Stages, dtypes or bugs that a line of the report lists; it counts the others."""

Line = tuple[str, str]
"""A label and its text, such as `Fix` and `transpose out_proj.weight`."""


def text_of(lines: Iterable[Line]) -> str:
    """Return lines as text: `Fix: transpose out_proj.weight`."""
    texts: list[str] = []
    for label, text in lines:
        if label:
            texts.append(f"{label}: {text}")
        else:
            texts.append(text)
    return "\n".join(texts)


# ---- One finding ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding(JsonRecord):
    """One cause of a difference: known bugs, a pattern that was fitted to the stage, or neither.

    Attributes:
        stage: the first stage that is wrong because of it.
        error_before: error of that stage (root mean square, or in the norm that decided), computed
            from the observed stages before it.
        ratio_before: that error / budget; NaN if it is unknown.
        edits: the known bugs that together explain it, ordered by the step that they change; empty
            if none do. JSON has their names as `bugs`.
        error: the error with them in the reference; None if a pattern leaves rounding.
        ratio: that error / budget; at most 1.
        stages: all stages that the finding explains, in order.
        others: descriptions of other explanations that the observed stages cannot distinguish.
        description: where the stage differs, by which patterns, and what is unexpected; None if
            known bugs explain it, or if the stage cannot be compared.
        nearest: for an unexplained stage, the edits that reduce its error most: descriptions, and
            the remaining error.
        num_tried: for an unexplained stage, the number of known bugs that were tried on it.
        follows: stages that are wrong because of the same cause, in order; the last may be stages
            of a module's own paths, which are not searched after an unknown cause.
        part: the part of a module that it is in, with a colon; empty for the stage functions.
    """

    stage: str
    error_before: float = math.nan
    ratio_before: float = math.nan
    edits: tuple[Edit, ...] = ()
    error: float | None = None
    ratio: float = 1.0
    stages: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    description: Description | None = None
    nearest: tuple[tuple[str, float], ...] = ()
    num_tried: int = 0
    follows: tuple[str, ...] = ()
    part: str = ""

    IN_JSON = (
        *FINDING,
        "bugs",
        "about",
        "fixes",
        "pages",
        "stages",
        "follows",
        "error_before",
        "ratio_before",
        "error",
        "ratio",
        "others",
        "description",
        "nearest",
        "num_tried",
    )

    # ---- Its kind --------------------------------------------------------------------------------

    @property
    def pattern(self) -> Edit | None:
        """The simplest pattern that explains the stage; NaN or infinite values explain nothing."""
        if self.description is None:
            return None
        for pattern in self.description.patterns:
            if pattern.name not in ("nan", "infinite"):
                return pattern
        return None

    @property
    def is_explained(self) -> bool:
        """True if known bugs or a pattern explain the stage."""
        return bool(self.edits) or self.pattern is not None

    @property
    def is_fitted(self) -> bool:
        """True if a pattern explains the stage, and no known bug."""
        return not self.edits and self.pattern is not None

    @property
    def bugs(self) -> tuple[str, ...]:
        """The names of the known bugs; for a pattern of a family of bugs, the page of the
        family.
        """
        if self.edits:
            return tuple(edit.name for edit in self.edits)
        of_families = self._of_families()
        if of_families:
            return of_families[0].pages[:1]
        return ()

    @property
    def is_loss(self) -> bool:
        """True if only precision is lost."""
        return bool(self.bugs) and all(page == LOST for page in self.pages)

    def _of_families(self) -> list[Edit]:
        """Return the equally simple patterns that each belong to a family of bugs, the simplest
        first; none if one of them does not, or if they have too many pages.
        """
        pattern = self.pattern
        if pattern is None or self.description is None:
            return []
        simplest = [pattern]
        # A pattern that also explains later stages is right, whatever else explains this one.
        if len(self.stages) < 2:
            simplest += [
                other
                for other in self.description.patterns
                if other.about != pattern.about and other.parameters <= pattern.parameters
            ]
        pages = {page for edit in simplest for page in edit.pages}
        if len(pages) > MOST_PAGES or not all(edit.pages for edit in simplest):
            return []
        return simplest

    # ---- Its parts -------------------------------------------------------------------------------

    @property
    def likely_bug(self) -> str:
        """The names of the bugs; empty if no known bug explains the stage."""
        return ", ".join(self.bugs)

    @property
    def first_wrong_stage(self) -> str:
        """The first stage that is wrong because of it."""
        return self.stage

    @property
    def about(self) -> str:
        """The error in a line; empty if nothing explains the stage."""
        if self.edits:
            return self.part + ", and ".join(edit.sentence for edit in self.edits)
        if self.pattern is None:
            return ""
        return self._without_there(self.pattern.about)

    @property
    def where(self) -> str:
        """The heads, sequences, positions, features or cells that differ; empty if it is the whole
        stage, or if known bugs explain it.
        """
        if self.description is None:
            return ""
        if self.bugs and self.description.where == EVERYWHERE:
            return ""
        return self.description.where

    @property
    def evidence(self) -> str:
        """How the error changes with the bugs or the pattern; without them, other signs."""
        stages = and_listed(self.explained_stages, MOST_LISTED)
        if not self.is_explained:
            return "; ".join(self.signs)
        if not self.bugs:
            return (
                f"with this pattern, the error of {stages} falls from {self.error_before:.2g} to "
                f"rounding"
            )
        bugs = "this bug"
        if len(self.bugs) > 1:
            bugs = "these bugs"
        with_bugs = f"with {bugs} in the reference, the error of {stages}"
        if self.error is None:
            return f"{with_bugs} falls from {self.error_before:.2g} to rounding"
        if self.error >= self.error_before:
            return f"the error of {stages}, {self.error:.2g}, is as large as this loss of precision"
        if not math.isfinite(self.error_before):
            return f"{with_bugs} is {self.error:.2g}"
        return f"{with_bugs} falls from {self.error_before:.2g} to {self.error:.2g}"

    @property
    def fixes(self) -> tuple[str, ...]:
        """An instruction for each bug, or for each family of the pattern."""
        fixes: dict[str, None] = {}
        for edit in self._reported():
            fixes |= dict.fromkeys(edit.fixes)
        return tuple(fixes)

    @property
    def fix(self) -> str:
        """The fixes in a line; empty if none is known."""
        return "; ".join(self.fixes)

    @property
    def wrong_fields(self) -> tuple[WrongField, ...]:
        """The fix as data: the fields of the specification that the implementation has wrong, with
        both values; empty if the bug is not the value of a field, or if several patterns fit.
        """
        edits = self._reported()
        if not self.edits and len(edits) > 1:
            return ()
        wrong_fields: list[WrongField] = []
        for edit in edits:
            wrong_fields += edit.wrong_fields
        return tuple(wrong_fields)

    @property
    def pages(self) -> tuple[str, ...]:
        """The pages in parity/bugs."""
        pages: dict[str, None] = {}
        for edit in self._reported():
            pages |= dict.fromkeys(edit.pages)
        return tuple(pages)

    @property
    def more(self) -> str:
        """The command that prints the pages; empty if there are none."""
        if not self.pages:
            return ""
        return f"mha-parity bugs {' '.join(self.pages)}"

    def _reported(self) -> Sequence[Edit]:
        """Return the edits whose fixes and pages are reported."""
        if self.edits:
            return self.edits
        simplest = self._of_families()
        if not simplest and self.pattern is not None:
            simplest = [self.pattern]
        return simplest

    @property
    def explained_stages(self) -> tuple[str, ...]:
        """The stages that it explains; its own if nothing else is known."""
        return self.stages or (self.stage,)

    @property
    def signs(self) -> tuple[str, ...]:
        """Unexpected properties of the values, which explain nothing by themselves."""
        if self.description is None:
            return ()
        return self.description.signs

    @property
    def alternatives(self) -> tuple[str, ...]:
        """Descriptions of other bugs or patterns that explain the stage as well."""
        if self.edits or self.description is None:
            return self.others
        abouts = [self._without_there(about) for about in self.description.abouts]
        return tuple(about for about in dict.fromkeys(abouts) if about != self.about)

    def _without_there(self, about: str) -> str:
        """Return the description of a pattern; without `there` if the
        location is the whole stage.
        """
        if self.description is None or self.description.where == EVERYWHERE:
            return about.replace(" there", "", 1)
        return about

    # ---- Text ------------------------------------------------------------------------------------

    @property
    def headline(self) -> str:
        """The finding in a line."""
        if self.bugs:
            return f"{self.likely_bug}: {self.about}"
        if self.is_explained:
            stages = and_listed(self.explained_stages, MOST_LISTED)
            return f"in {stages}, {self.about}"
        return f"no known bug explains {self.stage}"

    @property
    def title(self) -> Line:
        """The first line: the name of the bug, else the pattern, else that neither is known."""
        if self.bugs:
            return LIKELY_BUG, self.likely_bug
        if self.is_explained:
            return PATTERN, self.about
        return UNEXPLAINED, f"no known bug explains {self.stage}"

    def lines(self, wrong_stage: Line, *, verbose: bool = False) -> Iterator[Line]:
        """Yield labels and texts for the lines below the title; the first have no label.

        Args:
            wrong_stage: the line of the first wrong stage.
            verbose: also include every alternative, nearest bugs and signs.
        """
        if self.bugs and self.about:
            yield "", self.about
        yield from self._alternatives(verbose=verbose)
        yield wrong_stage
        if self.where:
            yield "Where", self.where
        if self.evidence:
            yield "Evidence", self.evidence
        if self.follows:
            verb = "differ"
            if len(self.follows) == 1:
                verb = "differs"
            stages = and_listed(self.follows, MOST_LISTED)
            yield FOLLOWS, f"{stages} {verb} as well: compare again after the fix"
        for fix in self.fixes:
            yield "Fix", fix
        if self.more:
            yield "More", self.more
        if not self.is_explained:
            nearest = self.nearest[:1]
            if verbose:
                nearest = self.nearest
            for about, error in nearest:
                yield "Nearest", f"the error falls to {error:.2g} if {about}"
            if verbose and self.num_tried:
                verdict = "none halves the error" if not nearest else "the nearest are above"
                yield "Tried", f"{counted(self.num_tried, 'known bug')}; {verdict}"
        if verbose and self.is_explained:
            if self.bugs:
                yield "Explained", ", ".join(self.explained_stages)
            for sign in self.signs:
                yield "Also", sign

    def _alternatives(self, *, verbose: bool) -> Iterator[Line]:
        """Yield the line of the first alternative, or of each."""
        alternatives = self.alternatives
        shown = alternatives[:1]
        if verbose:
            shown = alternatives
        for about in shown:
            if self.bugs:
                yield "", f"or {about}: the observed stages cannot distinguish them"
            elif self.is_explained:
                yield "", f"or {about}"
            else:
                yield "", about
        if self.bugs and len(shown) < len(alternatives):
            yield "", f"or {len(alternatives) - len(shown)} more"


# ---- All findings --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diagnosis(JsonRecord):
    """The causes of all differences that a search found.

    `str(diagnosis)` is short; `diagnosis.text` contains everything.

    Attributes:
        stage: the first stage that differs; empty if none does.
        error: its error (root mean square).
        ratio: its error / budget.
        findings: one for each cause: first known bugs, and patterns with a page; then other
            patterns; then unexplained stages; each in the order of the stages.
        has_stages: True if more than the output was observed.
        malformed: stages that cannot be compared, and why; the others are compared without them.
        conventions: by stage, a description of its convention if that is not ours.
        choice: a description of how the implementation computes differently; it is not a bug.
        untried: the parts of the search that exceeded the time limit.
        output_agrees: whether the output agrees, also if an earlier stage is wrong; None if it was
            not compared.
        dtypes: dtypes of the stages whose dtype is not the problem's.
        dtype: the problem's dtype.
        taken: the stages of a different convention, converted to the reference's if that is
            possible. JSON omits them.
        sample: the part of a large layer that was searched.
        hidden: if nothing is wrong in 16 bits, the known bugs that these stages would only show in
            float32.
        not_exercised: if nothing is wrong, the features of the layer that the case cannot show.

    Example:
        >>> from dataclasses import replace
        >>> import mha_torch
        >>> problem = parity.make_problem("causal", "float32")
        >>> wrong = replace(problem.spec, scale=1.0)
        >>> layer = parity.load_into(mha_torch.MultiHeadAttention(wrong), problem.weights, wrong)
        >>> query = parity.to_torch(problem.inputs["query"])
        >>> diagnosis = parity.diagnose({"output": layer(query, is_causal=True)[0]}, problem)
        >>> print(diagnosis)
        Likely bug: scale-missing
        ...
    """

    stage: str = ""
    error: float = 0.0
    ratio: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    has_stages: bool = True
    malformed: Mapping[str, str] = field(default_factory=dict)
    conventions: Mapping[str, str] = field(default_factory=dict)
    choice: str = ""
    untried: str = ""
    output_agrees: bool | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    dtype: str = ""
    taken: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    sample: str = ""
    hidden: tuple[str, ...] = ()
    not_exercised: tuple[str, ...] = ()

    IN_JSON = ("kind", *FINDING, "*", "headline", "text")

    def __post_init__(self) -> None:
        in_order = sorted(self.findings, key=_rank_of)
        object.__setattr__(self, "findings", in_order)

    # ---- Its kind --------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """`none`, nothing differs; `convention`, stages are recorded in a known convention, and
        agree in it; `precision`, known bugs that only lose precision explain everything;
        `structure`, known bugs do; `pattern`, verified patterns do, alone or in addition to bugs;
        `unknown`, something remains.
        """
        if not self.findings:
            if self.malformed:
                return "unknown"
            if self.conventions:
                return "convention"
            return "none"
        if self.unexplained:
            return "unknown"
        if not all(finding.bugs for finding in self.findings):
            return "pattern"
        if all(finding.is_loss for finding in self.findings):
            return "precision"
        return "structure"

    @property
    def is_wrong(self) -> bool:
        """True if something is wrong: rounding within the budget is not, and a known convention is
        not.
        """
        return bool(self.findings or self.malformed)

    @property
    def named(self) -> list[Finding]:
        """The findings that have the name of a known bug, or the page of a family."""
        return [finding for finding in self.findings if finding.bugs]

    @property
    def unnamed(self) -> list[Finding]:
        """The other findings: patterns outside of all families, and unexplained stages."""
        return [finding for finding in self.findings if not finding.bugs]

    @property
    def known(self) -> list[Finding]:
        """The findings that known bugs explain: `named` without patterns."""
        return [finding for finding in self.findings if finding.edits]

    @property
    def leftover(self) -> list[Finding]:
        """The other findings: patterns, also of families, and unexplained stages."""
        return [finding for finding in self.findings if not finding.edits]

    @property
    def unexplained(self) -> list[Finding]:
        """The stages that neither a known bug nor a pattern explains."""
        return [finding for finding in self.findings if not finding.is_explained]

    @property
    def is_known(self) -> bool:
        """True if known bugs explain every difference, without a fitted pattern."""
        if not self.findings:
            return not self.malformed
        return all(finding.edits for finding in self.findings)

    # ---- The first finding -----------------------------------------------------------------------

    @property
    def _first(self) -> Finding:
        """The first finding; an empty one if there is none."""
        return self.findings[0] if self.findings else Finding("")

    @property
    def likely_bug(self) -> str:
        """The name of the first bug, or names if two explain the stage together; empty if there is
        none.
        """
        return self._first.likely_bug

    @property
    def first_wrong_stage(self) -> str:
        """The first stage that is wrong; empty if none is."""
        return self.stage if self.is_wrong else ""

    @property
    def where(self) -> str:
        """The part of the stage that differs, `Finding.where` of the first finding."""
        return self._first.where

    @property
    def evidence(self) -> str:
        """The evidence for the first finding, `Finding.evidence`."""
        return self._first.evidence

    @property
    def fix(self) -> str:
        """The fix of the first finding; empty if none is known."""
        return self._first.fix

    @property
    def wrong_fields(self) -> tuple[WrongField, ...]:
        """The fix of the first finding as data, `Finding.wrong_fields`."""
        return self._first.wrong_fields

    @property
    def more(self) -> str:
        """The command that prints more about the first finding; empty if there is no page."""
        return self._first.more

    @property
    def cause(self) -> str:
        """The first bug, else the first verified pattern, in a line; empty if there is neither."""
        return self._first.headline if self._first.is_explained else ""

    @property
    def headline(self) -> str:
        """The diagnosis in a line: the cause, or a statement that there is none."""
        if self.kind == "none":
            return "nothing differs by more than rounding"
        if self.kind == "convention":
            return (
                "nothing is wrong: stages are recorded in a different convention, and everything "
                "computed from them agrees"
            )
        if self.findings:
            return self._first.headline
        for stage, reason in self.malformed.items():
            return f"{stage} {reason}"
        return f"{self.stage} differs"

    # ---- Text ------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The whole diagnosis as text."""
        return self.as_text(verbose=True)

    def __str__(self) -> str:
        return self.as_text()

    def as_text(self, *, verbose: bool = False) -> str:
        """Return the diagnosis as text: `Likely bug`, `Pattern` or `Unexplained`, then `First wrong
        stage`, `Where`, `Evidence`, `Fix` and `More`, a line each.

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
            yield LIKELY_BUG, "unexpected shape or dtype"
            yield self.first_line
        yield from self._notes(verbose=verbose)

    def _findings(self, *, verbose: bool) -> Iterator[Line]:
        """Yield the lines of each finding, its title first."""
        findings = self.findings
        first = next((finding for finding in findings if finding.stage == self.stage), findings[0])
        for number, finding in enumerate(findings, 1):
            label, title = finding.title
            if len(findings) > 1:
                label += f" {number} of {len(findings)}"
            if number > 1:
                yield "", ""
            yield label, title
            stage = self.first_line
            if finding is not first:
                text = excess(finding.stage, finding.error_before, finding.ratio_before)
                stage = ("Wrong stage", text)
            for line_label, text in finding.lines(stage, verbose=verbose):
                if line_label == FOLLOWS and self.output_agrees and finding.follows == ("output",):
                    continue
                if line_label:
                    yield line_label, text
                else:
                    yield "", f"  {text}"
        if self.unexplained and not self.has_stages:
            yield (
                "Next",
                'pass or return the stages by name, {"q": q, "k": k, "v": v, "output": output}, to '
                "find the first wrong one",
            )

    def _notes(self, *, verbose: bool) -> Iterator[Line]:
        """Yield what applies to the whole diagnosis."""
        if self.output_agrees and self.is_wrong:
            yield "Note", "the output agrees with the reference all the same"
        for stage, reason in self.malformed.items():
            if stage != self.stage:
                yield "Not comparable", f"{stage} {reason}"
        if verbose or not self.is_wrong:
            for words in _by_quantity(self.conventions):
                yield "Convention", words
            if self.choice:
                yield "Choice", f"{self.choice}, which is not a bug"
        yield from self._dtypes()
        if self.sample:
            yield "Searched", f"a sample, {self.sample}"
        if self.untried:
            yield "Not tried", f"{self.untried} (limit of the search)"
        if self.hidden:
            hidden = and_listed(self.hidden, MOST_LISTED)
            if verbose:
                hidden = and_listed(self.hidden)
            yield "Hidden", f"{hidden} may not show in {self.dtype}: compare in float32 as well"
        if self.not_exercised:
            yield "Not exercised", "; ".join(self.not_exercised)

    def _dtypes(self) -> Iterator[Line]:
        """Yield the stages whose dtype is not the problem's, a line for each dtype."""
        stages: dict[str, list[str]] = {}
        for stage, dtype in self.dtypes.items():
            stages.setdefault(dtype, []).append(stage)
        for dtype, names in stages.items():
            verb = "are"
            if len(names) == 1:
                verb = "is"
            yield (
                "Dtype",
                f"{and_listed(names, MOST_LISTED)} {verb} {dtype} in a {self.dtype} problem",
            )

    @property
    def first_line(self) -> Line:
        """The line of the first wrong stage."""
        if self.stage in self.malformed:
            return "First wrong stage", f"{self.stage}, which {self.malformed[self.stage]}"
        return "First wrong stage", excess(self.stage, self.error, self.ratio)


def plain(edit: Edit) -> Edit:
    """Return an edit as plain data, without what it overrides in the reference."""
    return replace(edit, overrides={}, spec=None, backward={})


def excess(stage: str, error: float, ratio: float) -> str:
    """Return a stage, and how far it exceeds its budget."""
    if stage_named(stage).is_exact:
        return f"{stage}, which should be exact"
    if not math.isfinite(error):
        return f"{stage}, which is not finite"
    if not math.isfinite(ratio):
        return stage
    return f"{stage}, {ratio:.2g} times its budget"


def order_of(stage: str) -> tuple[int, int]:
    """Return the position of a stage in the data flow, for sorting: its call, then its kind."""
    kinds = list(STAGES)
    known = stage_named(stage)
    if known.kind in kinds:
        return known.step or 0, kinds.index(known.kind)
    return known.step or 0, len(kinds)


def _rank_of(finding: Finding) -> int:
    """Return the rank of a finding among others: named, explained, unexplained."""
    if finding.bugs:
        return 0
    if finding.is_explained:
        return 1
    return 2


def _by_quantity(conventions: Mapping[str, str]) -> list[str]:
    """Return descriptions of stages, one for all steps with the same words."""
    steps: dict[tuple[str, str], list[str]] = {}
    for name, words in conventions.items():
        quantity = str(replace(stage_named(name), step=None))
        steps.setdefault((quantity, words), []).append(name)
    lines: list[str] = []
    for (quantity, words), names in steps.items():
        if len(names) == 1:
            lines.append(f"{names[0]} {words}")
        else:
            lines.append(f"{quantity} {words}, in {len(names)} steps from {names[0]} on")
    return lines
