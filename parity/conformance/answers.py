"""What was found: records, whose words are for people only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from parity.conformance.subjects import Path
from parity.core.records import JsonRecord
from parity.text import counted


class Kind(Enum):
    """What an answer amounts to; of several, the last in this order counts.

    `REFUSED`: an error that is meant; `ABSENT`: not offered; `KEPT`; `NOTE`: kept, by a convention that others do not
    share; `DIFFERS`: by path; `BROKEN`: a promise that it makes, or that everybody expects, is not kept. The last two
    are broken promises.
    """

    REFUSED = "refused"
    ABSENT = "absent"
    KEPT = "ok"
    NOTE = "note"
    DIFFERS = "differs"
    BROKEN = "broken"


def worst(kinds: Iterable[Kind]) -> Kind:
    """The one that counts."""
    return max(kinds, key=list(Kind).index)


@dataclass(frozen=True)
class Finding:
    """What one path answered. Two are equal if they say the same, whatever the numbers are.

    Attributes:
        words: for people.
        kind: what it amounts to.
        seen: the numbers, or the reason of an error.
        exception: what the subject raised, where it raised anything.
    """

    words: str
    kind: Kind = Kind.KEPT
    seen: str = field(default="", compare=False)
    exception: BaseException | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.words

    @property
    def with_reason(self) -> str:
        """Words, and the reason of a refusal."""
        return f"{self.words}: {self.seen}" if self.kind is Kind.REFUSED else self.words


@dataclass(frozen=True)
class Answer(JsonRecord):
    """What one question found.

    Attributes:
        question: which.
        kind: what it amounts to.
        words: for the cell of the matrix.
        example: of a broken promise: shapes, seed, path and the numbers seen.
        findings: what each path answered.
        refusal: the first path on which something was refused, and the reason.
        exception: what the subject raised where it broke the promise, or else where it refused.
    """

    question: str
    kind: Kind
    words: str
    example: str = ""
    findings: Mapping[Path, Finding] = field(default_factory=dict)
    refusal: str = ""
    exception: BaseException | None = field(default=None, compare=False)

    IN_JSON = ("question", "status", "words", "example", "by_path", "refusal")

    @property
    def status(self) -> str:
        """The kind as JSON has it, where what is refused is absent, too."""
        return Kind.ABSENT.value if self.kind is Kind.REFUSED else self.kind.value

    @property
    def by_path(self) -> dict[str, str]:
        """What each path answered, in words."""
        return {str(path): finding.with_reason for path, finding in self.findings.items()}

    @property
    def is_broken(self) -> bool:
        """Whether it is a broken promise."""
        return self.kind in (Kind.DIFFERS, Kind.BROKEN)

    @property
    def was_asked(self) -> bool:
        """Whether there was anything to ask: a refusal is an answer, too."""
        return self.kind is not Kind.ABSENT or bool(self.refusal)


@dataclass(frozen=True)
class Question:
    """A column of the matrix.

    Attributes:
        name: of the column.
        asks: what is asked, in words.
        function: asks it: `(examination, question) -> answer`.
        is_offered: tells of an examination whether its subject offers anything to ask this of.
    """

    name: str
    asks: str
    function: Callable[[Any, Question], Answer]
    is_offered: Callable[[Any], bool]

    def ask(self, examination: Any) -> Answer:
        """Ask the subject that is under examination."""
        return self.function(examination, self) if self.is_offered(examination) else self.not_offered

    @property
    def not_offered(self) -> Answer:
        """Answer of a subject that offers nothing to ask this of."""
        return Answer(self.name, Kind.ABSENT, "—")


def asks(
    name: str, words: str, where: Callable[[Any], bool] = lambda examination: True
) -> Callable[[Callable[[Any, Question], Answer]], Question]:
    """Makes a question of the function that asks it, where a subject offers what it is about."""
    return lambda function: Question(name, words, function, where)


@dataclass(frozen=True)
class Conformance(JsonRecord):
    """All answers of one subject; of one that could not be examined, the reason and no answers."""

    name: str
    framework: str
    version: str
    answers: tuple[Answer, ...] = ()
    missing: str = ""

    IN_JSON = ("name", "framework", "version", "missing", "answers")

    def __str__(self) -> str:
        counts = f"{len(self.answers)} questions, {counted(len(self.broken), 'broken promise')}"
        broken = (f"{answer.question}: {answer.words}; {answer.example}" for answer in self.broken)
        return "\n".join((f"{self.name}: {self.missing or counts}", *broken))

    def __getitem__(self, question: str) -> Answer:
        """The answer to a question.

        Raises:
            KeyError: if it was not asked.
        """
        answers = {answer.question: answer for answer in self.answers}
        if question not in answers:
            raise KeyError(f"{question!r}, of {self.name} asked: {', '.join(answers) or 'nothing'}")
        return answers[question]

    @property
    def broken(self) -> list[Answer]:
        """The broken promises."""
        return [answer for answer in self.answers if answer.is_broken]


def exit_status(found: Sequence[Conformance]) -> int:
    """1 where a promise is broken, 2 where nothing could be asked, else 0."""
    if any(subject.broken for subject in found):
        return 1
    return 0 if any(answer.was_asked for subject in found for answer in subject.answers) else 2
