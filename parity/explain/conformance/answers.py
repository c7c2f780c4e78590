"""Records of a conformance examination. Their words are for people, not for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from parity.explain.conformance.subjects import Path
from parity.measure.core.records import JsonRecord
from parity.measure.text import counted


class Kind(Enum):
    """Kind of an answer; the last in this order takes precedence.

    `REJECTED`: a deliberate error; `ABSENT`: not supported; `OK`: as promised; `NOTE`: as
    promised, by an uncommon convention; `DIFFERS`: depends on the path; `BROKEN`: breaks a promise
    of its own or a universal expectation. The last two are broken promises.
    """

    REJECTED = "rejected"
    ABSENT = "absent"
    OK = "ok"
    NOTE = "note"
    DIFFERS = "differs"
    BROKEN = "broken"


def worst(kinds: Iterable[Kind]) -> Kind:
    """Return the kind that takes precedence."""
    return max(kinds, key=list(Kind).index)


@dataclass(frozen=True)
class PathAnswer:
    """The answer of one path. Answers of paths with the same words are equal, whatever the values.

    Attributes:
        words: text for people.
        kind: kind of the answer.
        evidence: observed values, or the reason of an error.
        exception: the exception that the subject raised, if any.
    """

    words: str
    kind: Kind = Kind.OK
    evidence: str = field(default="", compare=False)
    exception: BaseException | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.words

    @property
    def with_reason(self) -> str:
        """Return the words, with the reason of a rejection."""
        if self.kind is Kind.REJECTED:
            return f"{self.words}: {self.evidence}"
        return self.words


@dataclass(frozen=True)
class Answer(JsonRecord):
    """The answer to one question.

    Attributes:
        question: name of the question.
        kind: kind of the answer.
        words: text for the cell of the matrix.
        example: for a broken promise: shapes, seed, path and observed values.
        findings: answer of each path.
        rejection: first path that rejected the call, and the reason.
        exception: the exception behind a broken promise, otherwise behind the first rejection.
        error: message of the exception behind a broken promise; empty if none is.
    """

    question: str
    kind: Kind
    words: str
    example: str = ""
    findings: Mapping[Path, PathAnswer] = field(default_factory=dict)
    rejection: str = ""
    exception: BaseException | None = field(default=None, compare=False)
    error: str = ""

    IN_JSON = ("question", "status", "words", "example", "by_path", "rejection")

    @property
    def status(self) -> str:
        """Return the kind for JSON, where a rejection counts as absent."""
        if self.kind is Kind.REJECTED:
            return Kind.ABSENT.value
        return self.kind.value

    @property
    def by_path(self) -> dict[str, str]:
        """Return the answer of each path, in words."""
        return {str(path): finding.with_reason for path, finding in self.findings.items()}

    @property
    def is_broken(self) -> bool:
        """Return whether it is a broken promise."""
        return self.kind in (Kind.DIFFERS, Kind.BROKEN)

    @property
    def applies(self) -> bool:
        """Return whether the question applied; a rejection is also an answer."""
        return self.kind is not Kind.ABSENT or bool(self.rejection)


@dataclass(frozen=True)
class Question:
    """A column of the matrix.

    Attributes:
        name: name of the column.
        asks: text of the question.
        function: function that answers it: `(examination, question) -> answer`.
    """

    name: str
    asks: str
    function: Callable[[Any, Question], Answer]

    def ask(self, examination: Any) -> Answer:
        """Answer the question for the subject under examination."""
        return self.function(examination, self)

    @property
    def not_offered(self) -> Answer:
        """Return the answer for a subject without the feature in question."""
        return Answer(self.name, Kind.ABSENT, "—")


def asks(name: str, words: str) -> Callable[[Callable[[Any, Question], Answer]], Question]:
    """Decorate the function that answers a question."""

    def question_of(function: Callable[[Any, Question], Answer]) -> Question:
        return Question(name, words, function)

    return question_of


@dataclass(frozen=True)
class Conformance(JsonRecord):
    """All answers of one subject; if it could not be examined, the reason and no answers.

    Attributes:
        name: name of the subject.
        framework: its framework.
        version: version of its library.
        answers: the answers, in the order of the questions.
        missing: why it could not be examined.
        requested: dtypes that the caller requested; empty for the default ones.
    """

    name: str
    framework: str
    version: str
    answers: tuple[Answer, ...] = ()
    missing: str = ""
    requested: tuple[str, ...] = ()

    IN_JSON = ("name", "framework", "version", "missing", "answers")

    def __str__(self) -> str:
        if self.missing:
            return f"{self.name}: {self.missing}"
        counts = f"{len(self.answers)} questions, {counted(len(self.broken), 'broken promise')}"
        lines = [f"{self.name}: {counts}"]
        for answer in self.broken:
            lines.append(f"{answer.question}: {answer.words}; {answer.example}")
        return "\n".join(lines)

    def __getitem__(self, question: str) -> Answer:
        """Return the answer to a question.

        Raises:
            KeyError: if the question was not asked.
        """
        answers = {answer.question: answer for answer in self.answers}
        if question not in answers:
            raise KeyError(
                f"{question!r}, of {self.name} chosen: {', '.join(answers) or 'nothing'}"
            )
        return answers[question]

    @property
    def broken(self) -> list[Answer]:
        """Return the broken promises."""
        return [answer for answer in self.answers if answer.is_broken]

    @property
    def applies(self) -> bool:
        """Return whether any question applied."""
        return any(answer.applies for answer in self.answers)

    @property
    def not_examined(self) -> list[str]:
        """Return the requested dtypes in which no question called the subject; the first is the
        dtype of plain calls.
        """
        if self.missing:
            return []
        examined: set[str] = set()
        for answer in self.answers:
            examined.update(path.dtype for path in answer.findings)
        return [dtype for dtype in self.requested[1:] if dtype not in examined]


def unexamined_dtypes(subjects: Sequence[Conformance]) -> dict[str, list[str]]:
    """Return the requested dtypes that no question examined, by the name of the subject; empty if
    there are none.
    """
    gaps: dict[str, list[str]] = {}
    for subject in subjects:
        if subject.not_examined:
            gaps[subject.name] = subject.not_examined
    return gaps


def exit_status(subjects: Sequence[Conformance]) -> int:
    """Return 1 if a promise is broken; 2 if no question applied, or none to a requested dtype;
    otherwise 0.
    """
    if any(subject.broken for subject in subjects):
        return 1
    if unexamined_dtypes(subjects):
        return 2
    if not any(subject.applies for subject in subjects):
        return 2
    return 0
