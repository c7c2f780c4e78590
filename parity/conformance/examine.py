"""What an attention does, asked and not read: its conventions, and whether it keeps its promises on every path.

Each question perturbs something that must not matter (a future token, a masked key, another sequence) or that must, and
looks at what comes out. So it needs no reference, no weights and no documentation, and works on a function of split
heads as on a layer. Libraries take other code for the same call when weights are asked for, in training, with
gradients, in another dtype; so every such path is asked, and paths that answer differently are a finding themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import groupby
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.text import Text

from mha_spec import AttentionSpec
from parity.conformance.subjects import (
    BATCH,
    DTYPES,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    Failed,
    Inputs,
    Path,
    Refused,
    Result,
    Subject,
    load_callable,
    run,
    subject_of,
)
from parity.core.weights import Weights, dtype_named
from parity.reporting.console import begin_table

STATUSES = ("ok", "note", "absent", "differs", "broken")
"""`ok`; `note`: kept, by a convention that others do not share; `absent`: not offered or refused; `differs`: by path;
`broken`: a promise that it makes, or that everybody expects, is not kept. The last two are broken promises."""

SEED = 0
TOKENS, FEW_TOKENS = 5, 3
MANY_TOKENS = 600
"""Enough for code that goes block by block: several blocks of keys, and more than 2^20 scores in all."""
LARGE = {"float32": 1e5, "bfloat16": 1e5, "float16": 30.0}
"""Size of a perturbation: large enough that a key hidden by a finite penalty shows, small enough for the dtype."""


@dataclass(frozen=True)
class Answer:
    """What one question found.

    Attributes:
        question: which.
        status: one of `STATUSES`.
        words: for the cell of the matrix.
        example: of a broken promise: shapes, seed, path and the numbers seen.
        by_path: what each path answered, where several were asked.
        refusal: the first reason given, with its path, where something was refused.
    """

    question: str
    status: str
    words: str
    example: str = ""
    by_path: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""

    @property
    def is_broken(self) -> bool:
        """Whether it is a broken promise."""
        return self.status in ("differs", "broken")

    @property
    def was_asked(self) -> bool:
        """Whether there was anything to ask: a refusal is an answer, too."""
        return self.status != "absent" or bool(self.refusal)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        return {
            "question": self.question,
            "status": self.status,
            "words": self.words,
            "example": self.example,
            "by_path": dict(self.by_path),
            "refusal": self.refusal,
        }


@dataclass(frozen=True)
class Conformance:
    """All answers of one subject; of one that could not be examined, the reason and no answers."""

    name: str
    framework: str
    version: str
    answers: tuple[Answer, ...] = ()
    missing: str = ""

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

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        return {
            "name": self.name,
            "framework": self.framework,
            "version": self.version,
            "missing": self.missing,
            "answers": [answer.to_dict() for answer in self.answers],
        }


def examine(
    target: Any, questions: Iterable[str] | None = None, dtypes: Sequence[str] = DTYPES, **declared: Any
) -> Conformance:
    """Ask an attention function or layer every question.

    Args:
        target: a `Subject`, or a function, module, class or factory in torch or JAX, see `subjects.subject_of`.
        questions: some of `QUESTIONS`; all when absent.
        dtypes: to ask in, the first of them also with dropout.
        declared: what is claimed or cannot be seen, the keywords of `subject_of`.

    Raises:
        ValueError: if a question or dtype is unknown, something must be declared, or no plain call is taken.
        TypeError: if the target needs arguments to be made.
    """
    questions = list(QUESTIONS if questions is None else questions)
    for question in questions:
        if question not in QUESTIONS:
            meant = get_close_matches(question, QUESTIONS, 1)
            hint = f"; did you mean {meant[0]!r}?" if meant else ""
            raise ValueError(f"a question must be one of {', '.join(QUESTIONS)}, got {question!r}{hint}")
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise ValueError(f"a dtype must be one of {', '.join(DTYPES)}, got {', '.join(unknown)}")
    subject = target if isinstance(target, Subject) else subject_of(target, **declared)
    with _one_thread(subject.framework):
        return _answers(subject, questions, dtypes)


@contextmanager
def _one_thread(framework: str) -> Iterator[None]:
    """Without torch's threads, which on arrays as small as these only wait for each other."""
    if framework != "torch":
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _answers(subject: Subject, questions: Iterable[str], dtypes: Sequence[str]) -> Conformance:
    examination = Examination(subject, dtypes)
    answers = []
    for question in questions:
        try:
            answer = QUESTIONS[question].ask(examination)
        except Refused as refused:
            answer = _refused(question, examination.base, str(refused))
        except Failed as failed:
            answer = broken(subject, question, failed.words, examination.base, str(failed))
        if answer.status == "note" and question in subject.promises:
            answer = replace(answer, status="broken")
        if answer.is_broken and question in subject.documented:
            answer = Answer(question, "note", subject.documented[question], by_path=answer.by_path)
        answers.append(answer)
    return Conformance(subject.name, subject.framework, subject.version, tuple(answers))


def _refused(question: str, path: Path, reason: str) -> Answer:
    return Answer(question, "absent", "refused", by_path={str(path): reason}, refusal=f"{path}: {reason}")


def examine_target(
    target: str, questions: Iterable[str] | None = None, dtypes: Sequence[str] = DTYPES, **declared: Any
) -> Conformance:
    """`examine` what `pkg.module:callable` names.

    Raises:
        ImportError: if the module cannot be imported.
        ValueError, TypeError: as `examine`, and if there is nothing callable by that name.
    """
    return examine(load_callable(target), questions, dtypes, name=target, **declared)


def examine_peers(
    names: Iterable[str] | None = None,
    questions: Iterable[str] | None = None,
    dtypes: Sequence[str] = DTYPES,
    on_subject: Callable[[str], None] = lambda name: None,
) -> list[Conformance]:
    """Ask the attention of torch, JAX, Flax, Keras, Equinox and ourselves, as far as installed.

    Args:
        names: some of `parity.conformance.peers.PEERS`; all when absent.
        questions, dtypes: as in `examine`.
        on_subject: called before each, with its name.

    Raises:
        ImportError: if none of them is installed.
        ValueError: as `examine`.
    """
    from parity.conformance.peers import PEERS, peer

    found = []
    for name in PEERS if names is None else names:
        on_subject(name)
        try:
            subject = peer(name)
        except ImportError as error:
            found.append(Conformance(name, "", "", missing=str(error)))
            continue
        found.append(examine(subject, questions, dtypes))
    if found and all(subject.missing for subject in found):
        missing = dict.fromkeys(subject.missing for subject in found)
        raise ImportError(f"at least one peer must be installed, got {'; '.join(missing)}")
    return found


def exit_status(found: Sequence[Conformance]) -> int:
    """1 where a promise is broken, 2 where nothing could be asked, else 0."""
    if any(subject.broken for subject in found):
        return 1
    return 0 if any(answer.was_asked for subject in found for answer in subject.answers) else 2


# ---- What the questions share ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What one path answered: in words, how bad it is, and the numbers seen."""

    words: str
    status: str = "ok"
    seen: str = ""


class Examination:
    """A subject under examination: its inputs, its paths, and how its mask is to be given.

    Raises:
        ValueError: if it does not even take a plain call.
    """

    def __init__(self, subject: Subject, dtypes: Sequence[str] = DTYPES) -> None:
        self.subject = subject
        self.paths = list(subject.paths(dtypes))
        self.base = self.paths[0]
        try:
            run(subject, self.base, self.inputs())
        except (Refused, Failed) as error:
            shapes = describe_shapes(self.inputs())
            raise ValueError(f"{subject.name} must attend over inputs of shapes {shapes}, got {error}") from error
        self.weights_refusal = self._find_weights_refusal()
        if self.weights_refusal:
            self.paths = [path for path in self.paths if not path.need_weights]
        self._polarity: tuple[str, str] | None = None
        self.poisoned: dict[Any, Poisoned] = {}  # what is known, see `_poisoned`

    @property
    def steady_paths(self) -> list[Path]:
        """The paths whose outputs are not random."""
        return [path for path in self.paths if not path.drops]

    @property
    def plain_paths(self) -> list[Path]:
        """The steady paths in the first dtype, without gradients: for what a dtype has no part in."""
        return [path for path in self.steady_paths if path.dtype == self.base.dtype and not path.grad]

    def _find_weights_refusal(self) -> str:
        if "need_weights" not in self.subject.takes:
            return ""
        try:
            run(self.subject, replace(self.base, need_weights=True), self.inputs())
        except Refused as refused:
            return str(refused)
        except Failed:  # the questions will find it
            pass
        return ""

    @cached_property
    def felt(self) -> np.ndarray:
        """(T, S): which outputs of a plain call change with which token."""
        inputs = self.inputs()
        tokens = range(TOKENS)
        before = run(self.subject, self.base, inputs).output
        felt = np.zeros((TOKENS, TOKENS), bool)
        for s in tokens:
            after = run(self.subject, self.base, perturbed(inputs, s, self.base, scale=3.0)).output
            felt[:, s] = [change(before[..., [t], :], after[..., [t], :], self.base, [t])[0] for t in tokens]
        return felt

    @property
    def is_causal_itself(self) -> bool:
        """Whether it is causal without being asked."""
        return not np.triu(self.felt, 1).any()

    @property
    def takes_mask(self) -> bool:
        """Whether its mask means something."""
        return "mask" in self.subject.takes and self.polarity()[0] in ("hides", "shows")

    @cached_property
    def padding_true_hides(self) -> bool:
        """Whether True in a padding mask hides: the last key, from all."""
        inputs = self.inputs()
        padding = np.zeros((BATCH, TOKENS), bool)
        padding[:, -1] = True
        others = perturbed(inputs, TOKENS - 1, self.base)
        return not self.moved(self.base, inputs, others, [0, 1], padding=padding)[0]

    def inputs(self, num_keys: int | None = None, num_queries: int = TOKENS, seed: int = SEED) -> Inputs:
        """Random inputs: of a layer the same array three times, or two where the number of keys is given."""
        rng = np.random.default_rng(seed)
        if self.subject.is_layer:
            query = rng.standard_normal((BATCH, num_queries, self.subject.width))
            key = query if num_keys is None else rng.standard_normal((BATCH, num_keys, self.subject.width))
            return query, key, key
        num_keys = num_queries if num_keys is None else num_keys
        shapes = [(BATCH, NUM_HEADS, num_tokens, HEAD_DIM) for num_tokens in (num_queries, num_keys, num_keys)]
        return tuple(rng.standard_normal(shape) for shape in shapes)  # type: ignore[return-value]

    @property
    def separate_keys(self) -> tuple[tuple[str, str], ...]:
        """What may be changed apart from the query, in letters and in words."""
        if "key" not in self.subject.takes:
            return ()
        return (("k", "key"), ("v", "value")) if "value" in self.subject.takes else (("kv", "key"),)

    def separate_inputs(self, num_tokens: int = TOKENS) -> Inputs:
        """Random inputs in which no array is another, as far as it takes them apart."""
        if "key" not in self.subject.takes:
            return self.inputs(num_queries=num_tokens)
        query, key, value = self.inputs(num_tokens, num_tokens)
        return query, key, value if "value" not in self.subject.takes else value.copy()

    def run(self, path: Path, inputs: Inputs, hidden: np.ndarray | None = None, **options: Any) -> Result:
        """Call the subject, with a mask that hides (T, S) where it is true."""
        if hidden is None:
            return run(self.subject, path, inputs, **options)
        return run(self.subject, path, inputs, mask=self.mask(hidden), **options)

    def mask(self, hidden: np.ndarray) -> np.ndarray:
        """The mask that hides, in the values of the subject."""
        return (hidden if self.true_hides else ~hidden)[None, None]

    @property
    def true_hides(self) -> bool:
        """Whether True in a mask hides, as found out; as claimed where that fails."""
        found, _ = self.polarity()
        return found == "hides" or (found != "shows" and self.subject.mask_true != "shows")

    def polarity(self) -> tuple[str, str]:
        """What True does in a mask, `hides`, `shows`, or else what is seen instead; and the numbers."""
        if self._polarity is None:
            self._polarity = self._find_polarity()
        return self._polarity

    def _find_polarity(self) -> tuple[str, str]:
        one_true = np.zeros((1, 1, TOKENS, TOKENS), bool)
        one_true[..., 2] = True  # only key 2
        inputs = self.inputs()
        row = TOKENS - 1  # the last sees every key, also of what is causal by itself
        before = run(self.subject, self.base, inputs, mask=one_true).output
        felt = []
        for token in (2, 3):
            after = run(self.subject, self.base, perturbed(inputs, token, self.base, scale=3.0), mask=one_true).output
            felt.append(float(np.abs(before - after)[..., row, :].max()) > tolerance(before, self.base))
        seen = f"mask True at key 2 only; row {row} feels key 2: {felt[0]}, key 3: {felt[1]}"
        if felt == [False, True]:
            return "hides", seen
        return {(True, False): "shows", (True, True): "ignored"}.get((felt[0], felt[1]), "hides all"), seen

    def moved(
        self, path: Path, inputs: Inputs, others: Inputs, rows: Sequence[int], **options: Any
    ) -> tuple[bool, str, np.ndarray]:
        """Whether the outputs of some queries change from one set of inputs to another, and the numbers."""
        before = self.run(path, inputs, **options).output[..., list(rows), :]
        after = self.run(path, others, **options).output[..., list(rows), :]
        return *change(before, after, path, rows), before

    def answer(
        self, question: str, ask: Callable[[Path], Finding], paths: Iterable[Path] | None = None, about: str = ""
    ) -> Answer:
        """Ask on every path, and put together what they answer."""
        findings: dict[Path, Finding] = {}
        for path in self.paths if paths is None else paths:
            try:
                findings[path] = ask(path)
            except Refused as refused:
                findings[path] = Finding("refused", "absent", str(refused))
            except Failed as failed:
                findings[path] = Finding(failed.words, "broken", str(failed))
        return merge(self.subject, question, findings, about)


def perturbed(inputs: Inputs, token: int, path: Path, arrays: str = "qkv", scale: float | None = None) -> Inputs:
    """The inputs with one token changed, in each array that is the query, key or value: a large change."""
    rng = np.random.default_rng(SEED + 1)
    scale = LARGE[path.dtype] if scale is None else scale
    changed: dict[int, np.ndarray] = {}
    for letter, x in zip("qkv", inputs, strict=True):
        if letter in arrays and id(x) not in changed and token < x.shape[-2]:
            changed[id(x)] = x.copy()
            changed[id(x)][..., token, :] = scale * rng.standard_normal(x[..., token, :].shape)
    return tuple(changed.get(id(x), x) for x in inputs)  # type: ignore[return-value]


def mapped(inputs: Inputs, function: Callable[[np.ndarray], np.ndarray], arrays: str = "qkv") -> Inputs:
    """The inputs with a function applied to each array, once."""
    done = {id(x): function(x) for letter, x in zip("qkv", inputs, strict=True) if letter in arrays}
    return tuple(done.get(id(x), x) for x in inputs)  # type: ignore[return-value]


def tolerance(x: np.ndarray, path: Path) -> float:
    """What rounding may change between two calls of the same shapes: some units of the output's scale."""
    finite = np.abs(x[np.isfinite(x)])
    return 16 * float(ml_dtypes.finfo(dtype_named(path.dtype)).eps) * (float(finite.max()) if finite.size else 1.0)


def change(before: np.ndarray, after: np.ndarray, path: Path, rows: Sequence[int]) -> tuple[bool, str]:
    """Whether two outputs (…, rows, width) differ, NaN being equal to NaN; and where most."""
    same_nan = np.isnan(before) & np.isnan(after)
    with np.errstate(invalid="ignore"):
        difference = np.where(same_nan | (before == after), 0.0, np.abs(after - before))
    difference = np.where(np.isnan(difference), np.inf, difference)
    where = np.unravel_index(int(difference.argmax()), difference.shape)
    place = [int(i) for i in where]
    place[-2] = rows[place[-2]]
    seen = f"output[{', '.join(map(str, place))}] changes from {before[where]:.6g} to {after[where]:.6g}"
    return bool(difference.max() > tolerance(before, path)), seen


def numbers(x: np.ndarray) -> str:
    """The first few of a row."""
    return f"[{', '.join(f'{value:.4g}' for value in x[:3])}, …]"


def describe_shapes(inputs: Inputs) -> str:
    """The shapes of query, key and value."""
    if inputs[0] is inputs[1] and inputs[1] is inputs[2]:
        return f"x {inputs[0].shape}"
    return ", ".join(f"{name} {x.shape}" for name, x in zip(("query", "key", "value"), inputs, strict=True))


def merge(subject: Subject, question: str, findings: Mapping[Path, Finding], about: str = "") -> Answer:
    """One answer from those of the paths: the common one, or a rule that says which path gives which."""
    by_path = {
        str(path): finding.words + (f": {finding.seen}" if finding.words == "refused" else "")
        for path, finding in findings.items()
    }
    words = {path: finding.words for path, finding in findings.items()}
    if not words:
        return Answer(question, "absent", "—")
    given = {word for word in words.values() if word != "refused"}
    statuses = [finding.status for finding in findings.values()]
    status = max(statuses, key=("absent", "ok", "note", "broken").index)
    if len(given) > 1 and status != "broken":
        status = "differs"
    told = by_rule(words)
    refused = next((path for path, word in words.items() if word == "refused"), None)
    refusal = "" if refused is None else f"{refused}: {findings[refused].seen}"
    answer = Answer(question, status, told, by_path=by_path, refusal=refusal)
    if not answer.is_broken:
        return answer
    path = next((path for path, finding in findings.items() if finding.status == "broken"), next(iter(findings)))
    kept = next((p for p, finding in findings.items() if finding.words not in (words[path], "refused")), None)
    lines = [("asked", QUESTIONS[question].asks), ("path", str(path)), ("seen", findings[path].seen or words[path])]
    if kept is not None:
        lines.append(
            ("but", f"{findings[kept].words} ({kept}){': ' if findings[kept].seen else ''}{findings[kept].seen}")
        )
    return replace(answer, example=example(subject, question, told, lines, about))


def broken(subject: Subject, question: str, words: str, path: Path, seen: str, about: str = "") -> Answer:
    """A broken promise seen on one path."""
    lines = [("asked", QUESTIONS[question].asks), ("path", str(path)), ("seen", seen)]
    return Answer(question, "broken", words, example(subject, question, words, lines, about))


def example(subject: Subject, question: str, words: str, lines: list[tuple[str, str]], about: str) -> str:
    """A failing example: what was asked of what, on which path, and the numbers."""
    if subject.is_layer:
        given = f"x = numpy.random.default_rng({SEED}).standard_normal(({BATCH}, {TOKENS}, {subject.width}))"
    else:
        shape = f"({BATCH}, {NUM_HEADS}, {TOKENS}, {HEAD_DIM})"
        given = f"query, key, value, each {shape} (B N T H), from numpy.random.default_rng({SEED}).standard_normal"
    lines = [lines[0], ("inputs", about or given), *lines[1:]]
    return "\n".join([f"{subject.name}, {question}: {words}", *(f"  {name:<7} {text}" for name, text in lines)])


ATTRIBUTES: dict[str, Callable[[Any], str]] = {
    "need_weights": lambda value: "with weights" if value else "without weights",
    "drops": lambda value: "while dropping" if value else "while not dropping",
    "dropout": lambda value: "with dropout" if value else "without dropout",
    "train": lambda value: "in train" if value else "in eval",
    "grad": lambda value: "with grad" if value else "without grad",
    "dtype": lambda value: f"in {value}",
}
"""What tells paths apart, in the order in which it is looked at, and in words."""


def by_rule(words: Mapping[Path, str]) -> str:
    """Which path gives which answer, as a list of rules: 'NaN with weights, zeros in train or with grad, NaN else'."""
    for depth in range(5):
        if found := list(_rules(dict(words), depth)):
            return _told(min(found, key=lambda rules: len(list(groupby(word for word, _ in rules)))))
    counts = {word: list(words.values()).count(word) for word in dict.fromkeys(words.values())}
    return " or ".join(f"{word} ({count} paths)" for word, count in counts.items())


Rules = list[tuple[str, str]]
"""Answers and the conditions for them, the first that holds counts; that of the last is empty."""


def _rules(words: dict[Path, str], depth: int) -> Iterator[Rules]:
    """All lists of `depth` conditions that tell which path gives which answer."""
    if len(set(words.values())) == 1:
        yield [(next(iter(words.values())), "")]
    elif depth:
        for attribute, tell in ATTRIBUTES.items():
            for value in dict.fromkeys(getattr(path, attribute) for path in words):
                rest = {path: word for path, word in words.items() if getattr(path, attribute) != value}
                chosen = sorted({word for path, word in words.items() if path not in rest})
                if rest and len(chosen) == 1:
                    for rules in _rules(rest, depth - 1):
                        yield [(chosen[0], tell(value)), *rules]


def _told(rules: Rules) -> str:
    parts = []
    for word, group in groupby(rules, key=lambda rule: rule[0]):
        conditions = [condition for _, condition in group]
        parts.append(f"{word} {' or '.join(conditions) if conditions[-1] else 'else'}")
    return ", ".join(parts) if len(rules) > 1 else rules[0][0]


# ---- Questions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A column of the matrix: what is asked, and how."""

    asks: str
    ask: Callable[[Examination], Answer]


def _attends(exam: Examination) -> Answer:
    """Whether it is attention at all: its outputs change with other tokens, and with each of its inputs."""
    felt = exam.felt
    others = felt & ~np.eye(TOKENS, dtype=bool)
    rows = "; ".join(f"output {t} changes with tokens {np.flatnonzero(felt[t]).tolist()}" for t in range(TOKENS))
    if not others.any():
        return broken(exam.subject, "attends", "to no other token", exam.base, rows)
    inputs = exam.separate_inputs()

    def ask(path: Path) -> Finding:
        for letters, what in (("q", "query"), *exam.separate_keys):
            others = inputs
            for token in range(TOKENS):
                others = perturbed(others, token, path, letters, scale=3.0)
            if not exam.moved(path, inputs, others, range(TOKENS))[0]:
                return Finding(f"{what} ignored", "broken", f"every {what} is changed, and the output stays")
        return Finding("to all tokens" if felt.all() else "causally" if exam.is_causal_itself else "to some tokens")

    if "key" not in exam.subject.takes:
        told = "to all tokens" if felt.all() else "causally" if exam.is_causal_itself else "to some tokens"
        return Answer("attends", "ok", told)
    return exam.answer("attends", ask, exam.plain_paths)


def _mask(exam: Examination) -> Answer:
    if "mask" not in exam.subject.takes:
        return Answer("mask", "absent", "—")
    polarity, seen = exam.polarity()
    words = f"True {polarity}" if polarity in ("hides", "shows") else f"mask {polarity}"
    claimed = exam.subject.mask_true
    if polarity not in ("hides", "shows"):
        return broken(exam.subject, "mask", words, exam.base, seen)
    if claimed is not None and claimed != polarity:
        return broken(exam.subject, "mask", f"{words}, declared: {claimed}", exam.base, seen)
    floats = _floats(exam)
    status = "note" if floats in ("floats added", "floats taken for something else") else "ok"
    return Answer("mask", status, f"{words}; {floats}")


def _floats(exam: Examination) -> str:
    """What becomes of a mask of floating-point numbers: 1 where the boolean one is True, or a large negative one."""
    hidden = np.zeros((TOKENS, TOKENS), bool)
    hidden[:, 2] = True
    inputs = exam.inputs()
    wanted = exam.run(exam.base, inputs, hidden).output
    additive = np.where(hidden, np.float32(-1e30), np.float32(0.0))[None, None]
    kinds = {"floats as booleans": exam.mask(hidden).astype(np.float32), "floats added": additive}
    for words, mask in kinds.items():
        try:
            output = run(exam.subject, exam.base, inputs, mask=mask).output
        except Refused:
            return "floats refused"
        if np.abs(output - wanted).max() <= tolerance(wanted, exam.base):
            return words
    return "floats taken for something else"


def _causal(exam: Examination) -> Answer:
    subject = exam.subject
    if "is_causal" not in subject.takes:
        return Answer("causal", "absent", "—")
    if "key" not in subject.takes:
        return Answer("causal", "ok", "T = S only")
    inputs = exam.inputs(TOKENS, FEW_TOKENS)

    def ask(path: Path) -> Finding:
        before = exam.run(path, inputs, is_causal=True).output
        sees = np.zeros((FEW_TOKENS, TOKENS), bool)
        for s in range(TOKENS):
            after = exam.run(path, perturbed(inputs, s, path, "kv"), is_causal=True).output
            sees[:, s] = [change(before[..., [t], :], after[..., [t], :], path, [t])[0] for t in range(FEW_TOKENS)]
        offset = TOKENS - FEW_TOKENS
        known = {"top-left": np.tri(FEW_TOKENS, TOKENS), "bottom-right": np.tri(FEW_TOKENS, TOKENS, offset)}
        found = next((words for words, triangle in known.items() if (sees == triangle.astype(bool)).all()), None)
        rows = "; ".join(f"query {t} sees {np.flatnonzero(sees[t]).tolist()}" for t in range(FEW_TOKENS))
        if found is None:
            return Finding("all keys seen" if sees.all() else "neither triangle", "broken", rows)
        if subject.causal is not None and subject.causal != found:
            return Finding(f"{found}, declared: {subject.causal}", "broken", rows)
        return Finding(found, "ok", rows)

    answer = exam.answer("causal", ask, exam.plain_paths, f"{describe_shapes(inputs)}, is_causal=True")
    return replace(answer, words="refused without a mask") if answer.words == "refused" else answer


def _causal_and_mask(exam: Examination) -> Answer:
    takes_flag = "is_causal" in exam.subject.takes
    if "mask" not in exam.subject.takes or not (takes_flag or exam.is_causal_itself):
        return Answer("causal and mask", "absent", "—")
    inputs = exam.inputs()
    hidden = np.zeros((TOKENS, TOKENS), bool)
    hidden[2:, 1] = True
    options: dict[str, Any] = {"hidden": hidden, "is_causal": takes_flag}

    def ask(path: Path) -> Finding:
        masked, seen_masked, _ = exam.moved(path, inputs, perturbed(inputs, 1, path), [2, 3, 4], **options)
        future, seen_future, _ = exam.moved(path, inputs, perturbed(inputs, 4, path), [0, 1, 2, 3], **options)
        if masked:
            return Finding("mask dropped", "broken", f"token 1, hidden by the mask, is changed: {seen_masked}")
        if future:
            return Finding("causal dropped", "broken", f"token 4 is changed: {seen_future}")
        return Finding("both")

    return exam.answer("causal and mask", ask)


def _future_token(exam: Examination) -> Answer:
    takes = exam.subject.takes
    ways: dict[str, dict[str, Any]] = {}
    if exam.is_causal_itself:
        ways["nothing but itself"] = {}
    if "is_causal" in takes:
        ways["is_causal=True"] = {"is_causal": True}
    if exam.takes_mask:
        ways["a causal mask"] = {"hidden": ~np.tri(TOKENS, dtype=bool)}
    if not ways:
        return Answer("future token", "absent", "—")
    inputs = exam.inputs()

    def ask(path: Path) -> Finding:
        refusals = []
        for way, options in ways.items():
            try:
                leaks, seen, before = exam.moved(
                    path, inputs, perturbed(inputs, TOKENS - 1, path), range(TOKENS - 1), **options
                )
            except Refused as refused:
                refusals.append(refused)
                continue
            if leaks:
                return Finding("leaks", "broken", f"token {TOKENS - 1} is changed, with {way}: {seen}")
            if np.isnan(before).any():
                return Finding("NaN", "broken", f"the output is NaN, with {way}")
        if len(refusals) == len(ways):
            raise refusals[0]
        return Finding("hidden")

    return exam.answer("future token", ask)


def _masked_key(exam: Examination) -> Answer:
    if not exam.takes_mask:
        return Answer("masked key", "absent", "—")
    hidden = np.zeros((TOKENS, TOKENS), bool)
    hidden[:, 2] = True
    inputs = exam.inputs()

    def ask(path: Path) -> Finding:
        leaks, seen, _ = exam.moved(path, inputs, perturbed(inputs, 2, path), [0, 1, 3, 4], hidden=hidden)
        if leaks:
            return Finding("leaks", "broken", f"token 2, hidden from all, is changed: {seen}")
        return Finding("hidden")

    return exam.answer("masked key", ask)


def _other_sequence(exam: Examination) -> Answer:
    inputs = exam.inputs()

    def ask(path: Path) -> Finding:
        def other(x: np.ndarray) -> np.ndarray:
            x = x.copy()
            x[1] = np.random.default_rng(SEED + 1).standard_normal(x[1].shape) * 10.0
            return x

        before, after = (exam.run(path, given).output[:1] for given in (inputs, mapped(inputs, other)))
        mixes, seen = change(before, after, path, range(TOKENS))
        return Finding("leaks", "broken", f"sequence 1 is changed: {seen}") if mixes else Finding("apart")

    return exam.answer("other sequence", ask)


@dataclass(frozen=True)
class Way:
    """A way to hide keys: what is passed for it, and (T, S), which keys each query sees by it."""

    name: str
    options: Mapping[str, Any]
    visible: np.ndarray


@dataclass(frozen=True)
class Poison:
    """A value that is not finite, in one token of the arrays that `letters` name: query, key, value."""

    letters: str
    token: int
    value: float

    def __str__(self) -> str:
        arrays = {"q": "query", "k": "key", "v": "value", "kv": "key and value", "qkv": "token"}
        return f"{self.value} in {arrays[self.letters]} {self.token}"


@dataclass(frozen=True)
class Poisoned:
    """What became of poisons, each in a call of its own.

    Attributes:
        swallowed: of the first output that should not be finite and is, or "".
        leaked: of the first output that should be as without the poison and is not, or "".
        hides: whether anything was hidden.
    """

    swallowed: str
    leaked: str
    hides: bool


def _ways(exam: Examination, num_tokens: int) -> list[Way]:
    """Every way to hide that the subject has: the last key from all queries, causally, or both by a mask."""
    everything = np.ones((num_tokens, num_tokens), bool)
    all_but_last = everything.copy()
    all_but_last[:, -1] = False
    causal = np.tri(num_tokens, dtype=bool)
    ways = [Way("no mask", {}, everything)]
    try:
        takes_mask = exam.takes_mask
    except (Refused, Failed):  # which is for the questions about the mask to tell
        takes_mask = False
    if takes_mask:
        ways.append(Way("mask", {"hidden": ~(causal & all_but_last)}, causal & all_but_last))
    if "is_causal" in exam.subject.takes:
        ways.append(Way("flag", {"is_causal": True}, causal))
    if exam.subject.padding is not None:
        ways.append(Way("padding", {}, all_but_last))
    itself = everything if exam.felt.all() else causal
    return [replace(way, visible=way.visible & itself) for way in ways]


def _poison(exam: Examination, path: Path, way: Way, poisons: Sequence[Poison]) -> Poisoned:
    """Call once for each poison, with it in the first sequence; the second is the same without it."""
    num_tokens = len(way.visible)
    is_separate = len(poisons[0].letters) < 3
    inputs = exam.separate_inputs(num_tokens) if is_separate else exam.inputs(num_queries=num_tokens)
    options = dict(way.options)
    if way.name == "padding":
        is_last = np.broadcast_to(np.arange(num_tokens) == num_tokens - 1, (BATCH, num_tokens))
        options["padding"] = (
            np.full(BATCH, num_tokens - 1, np.int32)
            if exam.subject.padding == "lengths"
            else is_last == exam.padding_true_hides
        )
    rows = range(num_tokens - 1) if way.name == "padding" else range(num_tokens)  # of what is no padding
    size = f" of {num_tokens}" if num_tokens != TOKENS else ""
    swallowed = leaked = ""
    for poison in poisons:
        # As many sequences as the other questions have: in JAX every other shape is compiled once more.
        arrays = {id(x): np.repeat(x[:1], BATCH, axis=0) for x in inputs}
        for letter, x in zip("qkv", inputs, strict=True):
            if letter in poison.letters:
                arrays[id(x)][0, ..., poison.token, :] = poison.value
        poisoned, clean = exam.run(path, tuple(arrays[id(x)] for x in inputs), **options).output  # type: ignore[arg-type]
        sees = np.zeros(num_tokens, bool)
        if poison.letters != "q":
            sees |= way.visible[:, poison.token]
        if "q" in poison.letters:
            sees[poison.token] = True
        shown = np.isnan(poisoned) if np.isnan(poison.value) else ~np.isfinite(poisoned)
        shown = shown.all(axis=-1) if np.isnan(poison.value) else shown.any(axis=-1)  # (…, T)
        kept = next((t for t in rows if sees[t] and not shown[..., t].all()), None)
        if kept is not None and not swallowed:
            row = numbers(poisoned[..., kept, :][~shown[..., kept]][0])
            swallowed = f"{way.name}: {poison}{size}, and output {kept}, which sees it, is {row}"
        blind = [t for t in rows if not sees[t]]
        if blind and not leaked:
            moves, seen = change(clean[None][..., blind, :], poisoned[None][..., blind, :], path, blind)
            if moves:
                leaked = f"{way.name}: {poison}{size}, which must not be seen: {seen}"
    return Poisoned(swallowed, leaked, not way.visible.all())


def _poisoned(exam: Examination, path: Path, num_tokens: int = TOKENS) -> dict[str, Poisoned]:
    """What became of the poisons, by the name of the way to hide, on separate inputs and on equal ones.

    Raises:
        Refused: if every way is.
    """
    last = num_tokens - 1
    kinds: list[list[Poison]] = []
    if "key" in exam.subject.takes:
        poisons = [Poison("q", 1, np.nan)]
        for letters, _ in exam.separate_keys:
            poisons += [Poison(letters, 2, np.nan), Poison(letters, last, np.nan)]
        letters = exam.separate_keys[-1][0]
        kinds.append([*poisons, Poison(letters, 2, np.inf), Poison(letters, last, np.inf)])
    if not kinds or (exam.subject.is_layer and exam.subject.framework == "torch"):  # which can tell equal inputs
        kinds.append([Poison("qkv", 2, np.nan), Poison("qkv", last, np.nan), Poison("qkv", 2, np.inf)])
    found: dict[str, Poisoned] = {}
    refusals: list[Refused] = []
    for way in _ways(exam, num_tokens):
        for poisons in kinds:
            asked = (path, way.name, num_tokens, poisons[0].letters)
            try:
                if asked not in exam.poisoned:
                    exam.poisoned[asked] = _poison(exam, path, way, poisons)
            except Refused as refused:
                refusals.append(refused)
                continue
            before, after = found.get(way.name, Poisoned("", "", False)), exam.poisoned[asked]
            found[way.name] = Poisoned(
                before.swallowed or after.swallowed, before.leaked or after.leaked, before.hides or after.hides
            )
    if not found:
        raise refusals[0]
    return found


def _about_poisons(exam: Examination, question: str, good: str, bad: str, status: str) -> Answer:
    """Ask on every path, and once more with many tokens."""

    def find(path: Path, num_tokens: int = TOKENS) -> Finding:
        found = _poisoned(exam, path, num_tokens)
        if bad == "leaks":
            found = {name: poisoned for name, poisoned in found.items() if poisoned.hides}
        if not found:
            return Finding("—", "absent")
        seen = {name: poisoned.swallowed if bad == "swallowed" else poisoned.leaked for name, poisoned in found.items()}
        names = [name for name, text in seen.items() if text]
        if not names:
            return Finding(good)
        return Finding(bad if len(names) == len(seen) else f"{bad} ({', '.join(names)})", status, seen[names[0]])

    # A path that only rounds otherwise is asked once, without gradients.
    paths = [path for path in exam.steady_paths if path.dtype == exam.base.dtype or not path.grad]
    answer = exam.answer(question, find, paths)
    if not (exam.felt.all() or exam.is_causal_itself):
        return answer  # what is seen by what, among many tokens, is not known
    few, many = find(exam.base), find(exam.base, MANY_TOKENS)
    if few.words == many.words:
        return answer
    words = f"{answer.words}; {many.words} of {MANY_TOKENS} tokens"
    if many.status == "broken":
        return broken(exam.subject, question, words, exam.base, many.seen)
    example = answer.example.replace(answer.words, words, 1)
    return replace(answer, words=words, status=max(answer.status, many.status, key=STATUSES.index), example=example)


def _nan_seen(exam: Examination) -> Answer:
    return _about_poisons(exam, "NaN seen", "seen", "swallowed", "broken")


def _nan_hidden(exam: Examination) -> Answer:
    return _about_poisons(exam, "NaN hidden", "hidden", "leaks", "note")


EMPTY_ROW = 1


def _hidden_row() -> np.ndarray:
    hidden = np.zeros((TOKENS, TOKENS), bool)
    hidden[EMPTY_ROW] = True
    return hidden


def _empty_row(exam: Examination) -> Answer:
    if not exam.takes_mask:
        return Answer("empty row", "absent", "—")
    inputs = exam.inputs()

    def ask(path: Path) -> Finding:
        hidden = _hidden_row()
        output = exam.run(path, inputs, hidden).output
        row = output[..., EMPTY_ROW, :]
        seen = f"query {EMPTY_ROW} sees no key; its output is {numbers(row.reshape(-1, row.shape[-1])[0])}"
        if np.isnan(row).any():
            everywhere = np.isnan(np.delete(output, EMPTY_ROW, axis=-2)).any()
            return Finding("NaN in all rows" if everywhere else "NaN", "broken", seen)

        others = exam.run(path, exam.inputs(seed=SEED + 2), hidden).output[..., [EMPTY_ROW], :]
        if not change(row[..., None, :], others, path, [EMPTY_ROW])[0]:
            if exam.subject.is_layer or not row.any():
                return Finding("zeros", "ok", seen)
            return Finding("a constant", "note", seen)
        # The mean of the values is linear in the inputs, and no other softmax is.
        step = 2.0 * np.random.default_rng(SEED + 6).standard_normal(inputs[0].shape)
        up, down = (
            exam.run(path, mapped(inputs, lambda x, sign=sign: x + sign * step), hidden).output[..., EMPTY_ROW, :]
            for sign in (1.0, -1.0)
        )
        if np.abs(up + down - 2.0 * row).max() <= 4 * tolerance(up, path):
            return Finding("mean(V)", "note", seen)
        unmasked = exam.run(path, inputs).output[..., EMPTY_ROW, :]
        if np.abs(unmasked - row).max() <= 0.01 * np.abs(row).max():  # the penalty costs the scores their last digits
            return Finding("as if unmasked", "broken", seen)
        return Finding("something else", "broken", seen)

    return exam.answer("empty row", ask, exam.steady_paths)


def _empty_row_gradient(exam: Examination) -> Answer:
    if not exam.takes_mask:
        return Answer("its gradient", "absent", "—")
    inputs = exam.inputs()

    def ask(path: Path) -> Finding:
        shape = exam.run(path, inputs, _hidden_row()).output.shape
        cotangent = np.random.default_rng(SEED + 3).standard_normal(shape)
        ignoring = cotangent.copy()
        ignoring[..., EMPTY_ROW, :] = 0.0
        for words, chosen in (("NaN even if the loss ignores it", ignoring), ("NaN", cotangent)):
            grads = exam.run(path, inputs, _hidden_row(), cotangent=chosen).grads
            counts = [int(np.count_nonzero(~np.isfinite(grad))) for grad in grads]
            if any(counts):
                total = sum(grad.size for grad in grads)
                return Finding(words, "broken", f"{sum(counts)} of {total} gradients of the inputs are not finite")
        return Finding("finite")

    return exam.answer("its gradient", ask, [path for path in exam.steady_paths if path.grad])


def _weights(exam: Examination) -> Answer:
    subject = exam.subject
    if "need_weights" not in subject.takes:
        return Answer("weights", "absent", "—")
    if exam.weights_refusal:
        return _refused("weights", replace(exam.base, need_weights=True), exam.weights_refusal)
    use_values = "value" in subject.takes
    inputs = exam.inputs(TOKENS, TOKENS) if "key" in subject.takes else exam.inputs()
    if use_values and subject.is_layer:
        inputs = (*inputs[:2], np.random.default_rng(SEED + 4).standard_normal(inputs[1].shape))
    hidden = None
    if exam.takes_mask:
        hidden = ~np.tri(TOKENS, dtype=bool)

    def ask(path: Path) -> Finding:
        result = exam.run(path, inputs, hidden)
        attn_weights = result.attn_weights
        if attn_weights is None:
            return Finding("asked for, not given", "broken", "the attention weights are None")
        shape = attn_weights.shape
        if shape[-2:] != (TOKENS, TOKENS) or attn_weights.ndim not in (3, 4):
            return Finding("of another shape", "broken", f"the attention weights have the shape {shape}")
        kind = "per head" if attn_weights.ndim == 4 else "averaged"
        if np.isnan(attn_weights).any():
            return Finding("NaN", "broken", f"attn_weights[0, 0] = {numbers(attn_weights.reshape(-1, TOKENS)[0])}")
        if path.drops:
            return Finding(kind)
        eps = float(ml_dtypes.finfo(dtype_named(path.dtype)).eps)
        sums = attn_weights.sum(axis=-1)
        if np.abs(sums - 1.0).max() > 8 * eps:
            return Finding(
                "rows do not sum to 1", "broken", f"a row sums to {sums.flat[np.abs(sums - 1).argmax()]:.6g}"
            )
        if hidden is not None and np.abs(attn_weights[..., hidden]).max() > 0.0:
            return Finding("hidden keys weigh", "broken", f"a hidden key weighs {attn_weights[..., hidden].max():.6g}")
        if not use_values or attn_weights.ndim != 4 or path.dtype != exam.base.dtype:
            return Finding(kind)
        error = _unexplained(exam, path, inputs, hidden, result)
        if error > 1e-3:
            seen = f"weights @ values explains the output up to {error:.1%} of it only"
            return Finding("not those used", "broken", seen)
        return Finding(kind)

    return exam.answer("weights", ask, [path for path in exam.paths if path.need_weights])


def _unexplained(exam: Examination, path: Path, inputs: Inputs, hidden: np.ndarray | None, result: Result) -> float:
    """The part of the output that the returned weights do not explain.

    Of split heads: weights @ values. A layer's output is linear in its values: when that of token s moves by u, the
    output of query t moves by the sum over heads of attn_weights[n, t, s] a_n, where a_n, what head n makes of u, is
    unknown but the same for all t and s. There are more equations than unknowns, and the residual tells.
    """
    attn_weights = result.attn_weights
    if attn_weights is None:
        return np.inf
    query, key, value = inputs
    if not exam.subject.is_layer:
        groups = attn_weights.shape[1] // value.shape[1]
        expected = attn_weights @ np.repeat(value, groups, axis=1)
        return float(np.abs(expected - result.output).max() / np.abs(result.output).max())
    u = np.random.default_rng(SEED + 5).standard_normal(value.shape[-1])
    moves = []
    for s in range(TOKENS):
        moved = value.copy()
        moved[:, s] += u
        moves.append(exam.run(path, (query, key, moved), hidden).output - result.output)
    move = np.stack(moves, axis=2)  # (B, T, S, E)
    worst = 0.0
    for b in range(BATCH):
        known = attn_weights[b].reshape(attn_weights.shape[1], -1).T  # (T * S, N)
        found = move[b].reshape(TOKENS * TOKENS, -1)
        solution, *_ = np.linalg.lstsq(known, found, rcond=None)
        worst = max(worst, float(np.abs(known @ solution - found).max() / np.abs(found).max()))
    return worst


def _padding(exam: Examination) -> Answer:
    kind = exam.subject.padding
    if kind is None:
        return Answer("padding", "absent", "—")
    inputs = exam.inputs()
    lengths = np.full(BATCH, TOKENS, np.int32)
    lengths[0] = 3  # of the first sequence only
    hidden = np.arange(TOKENS) >= lengths[:, None]
    ways = {"by lengths": lengths} if kind == "lengths" else {"True hides": hidden, "True shows": ~hidden}
    real, last = range(3), TOKENS - 1

    def ask(path: Path) -> Finding:
        def with_other_keys(x: np.ndarray) -> np.ndarray:
            others = perturbed(perturbed((x, x, x), 3, path), last, path)[0]
            others[1:, ..., last, :] = x[1:, ..., last, :]  # whose output tells whether key 3 is felt
            return others

        others = mapped(inputs, with_other_keys)
        seen = ""
        for words, padding in ways.items():
            before, after = (exam.run(path, given, padding=padding).output for given in (inputs, others))
            leaks, seen = change(before[:1, ..., :3, :], after[:1, ..., :3, :], path, real)
            feels, _ = change(before[1:, ..., [last], :], after[1:, ..., [last], :], path, [last])
            if feels and not leaks and np.isfinite(before[:, ..., :3, :]).all():
                return Finding(words)
        return Finding("leaks", "broken", f"tokens 3 and 4, the padding of sequence 0, are changed: {seen}")

    return exam.answer("padding", ask)


def _grouped(exam: Examination) -> Answer:
    subject = exam.subject
    groups = NUM_HEADS // NUM_KV_HEADS
    known = {
        "repeat": [n // groups for n in range(NUM_HEADS)],
        "tile": [n % NUM_KV_HEADS for n in range(NUM_HEADS)],
    }
    spec = weights = None
    if subject.is_layer:
        if not subject.has_groups:
            return Answer(
                "grouped heads", "absent", "—" if subject.num_kv_heads is None else "not to be seen in a layer"
            )
        spec = AttentionSpec(NUM_HEADS * HEAD_DIM, NUM_HEADS, num_kv_heads=NUM_KV_HEADS)
        weights = _plain_weights(spec)
        # The values of key/value head g are g, whatever comes in.
        weights["v_proj.weight"][:] = 0.0
        weights["v_proj.bias"][:] = np.repeat(np.arange(NUM_KV_HEADS), HEAD_DIM)
        inputs = exam.inputs()
    else:
        query, key, value = (x for x in exam.inputs())
        key, value = key[:, :NUM_KV_HEADS], np.zeros_like(value[:, :NUM_KV_HEADS])
        value += np.arange(NUM_KV_HEADS)[:, None, None]
        inputs = (query, key, value)

    def ask(path: Path) -> Finding:
        output = run(subject, path, inputs, spec=spec, weights=weights).output
        heads = output[0, 0].reshape(NUM_HEADS, HEAD_DIM)[:, 0] if subject.is_layer else output[0, :, 0, 0]
        seen = f"query heads 0 to {NUM_HEADS - 1} use key/value heads {np.round(heads, 2).tolist()}"
        for words, order in known.items():
            if np.abs(heads - order).max() < 0.02:
                return Finding(words, "ok" if words == "repeat" else "note", seen)
        return Finding("mixed", "broken", seen)

    about = f"{NUM_HEADS} query heads, {NUM_KV_HEADS} key/value heads"
    answer = exam.answer("grouped heads", ask, exam.plain_paths, about)
    if answer.words == "refused" and subject.num_kv_heads is not None:
        reason = answer.by_path[str(exam.base)]
        return broken(subject, "grouped heads", f"declared: {subject.num_kv_heads}, refused", exam.base, reason, about)
    return answer


def _plain_weights(spec: AttentionSpec) -> Weights:
    """Projections that change nothing, so that a layer is the attention in it."""
    identity = np.eye(spec.d_model, dtype=np.float32)
    weights: Weights = {}
    for name, rows in (
        ("q_proj", spec.q_width),
        ("k_proj", spec.kv_width),
        ("v_proj", spec.kv_width),
        ("out_proj", None),
    ):
        weights[f"{name}.weight"] = identity[:rows].copy()
        weights[f"{name}.bias"] = np.zeros(len(weights[f"{name}.weight"]), np.float32)
    return weights


def _dropout(exam: Examination) -> Answer:
    subject = exam.subject
    inputs = mapped(exam.inputs(), lambda x: np.concatenate([x[:1], x[:1]]))  # twice the same sequence
    takes = "dropout" in subject.takes

    def ask(path: Path) -> Finding:
        result = exam.run(path, inputs).output
        if not path.drops:
            again = exam.run(Path(path.dtype, path.need_weights, False, path.grad, 0.0), inputs).output
            random, seen = change(again, result, path, range(TOKENS))
            return Finding("dropped in eval", "broken", seen) if random else Finding("train only")
        plain = exam.run(Path(path.dtype, path.need_weights, False, path.grad, 0.0), inputs).output
        if not change(plain, result, path, range(TOKENS))[0]:
            return Finding("never", "broken", "the output in training is that without dropout")
        shared = not change(result[:1], result[1:], path, range(TOKENS))[0]
        return Finding("one mask for the batch", "note") if shared else Finding("train only")

    if not takes:  # a layer may drop without telling
        return _hidden_dropout(exam)
    paths = [path for path in exam.paths if path.dropout]
    answer = exam.answer("dropout", ask, paths)
    if not answer.is_broken or any(finding in answer.words for finding in ("eval", "never")):
        return answer
    if "one mask" in answer.words:
        return Answer("dropout", "note", "train only, one mask for the batch", by_path=answer.by_path)
    return answer


def _hidden_dropout(exam: Examination) -> Answer:
    """Of a subject that takes no rate: whether two calls in evaluation agree, with random numbers going on."""
    inputs = exam.inputs()

    def ask(path: Path) -> Finding:
        first = exam.run(path, inputs, seed=SEED).output
        random, seen = change(first, exam.run(path, inputs, seed=SEED + 1).output, path, range(TOKENS))
        if random and not path.train:
            return Finding("random in eval", "broken", f"from one call to the next {seen}")
        return Finding("train only" if random else "—", "ok" if random else "absent")

    answer = exam.answer("dropout", ask, [path for path in exam.paths if path.dtype == exam.base.dtype])
    if answer.status == "broken":
        return answer
    has = any(words == "train only" for words in answer.by_path.values())
    return Answer("dropout", "ok" if has else "absent", "train only" if has else "—", by_path=answer.by_path)


def _scale(exam: Examination) -> Answer:
    subject = exam.subject
    spec = weights = None
    if subject.is_layer:
        if not subject.has_settable_weights:
            return Answer("scale", "absent", "—")
        spec = AttentionSpec(NUM_HEADS * HEAD_DIM, NUM_HEADS)
        weights = _plain_weights(spec)
    # One key has q . k = sqrt(H) and value 1, the others 0 and 0: the output is its weight.
    shape = (BATCH, TOKENS, NUM_HEADS * HEAD_DIM) if subject.is_layer else (BATCH, NUM_HEADS, TOKENS, HEAD_DIM)
    value = np.zeros(shape)
    value[..., -1, :] = 1.0
    inputs = (np.ones(shape), value / np.sqrt(HEAD_DIM), value)
    if weights is not None:  # the same from one array, for self-attention
        weights["q_proj.weight"][:], weights["q_proj.bias"][:] = 0.0, 1.0
        weights["k_proj.weight"] /= np.float32(np.sqrt(HEAD_DIM))
        inputs = (value, value, value)

    def ask(path: Path) -> Finding:
        share = run(subject, path, inputs, spec=spec, weights=weights).output[0, ..., -1, 0].flat[0]  # sees every key
        with np.errstate(all="ignore"):
            factor = float(np.log((TOKENS - 1) * share / (1.0 - share)))  # times 1/sqrt(H)
        seen = f"that key weighs {share:.4f}: scale = {factor:.3f} / sqrt(H)"
        if abs(factor - 1.0) < 0.02:
            return Finding("1/sqrt(H)")
        known = {"1 (none)": np.sqrt(HEAD_DIM), "1/H": 1.0 / np.sqrt(HEAD_DIM), "1/sqrt(E)": 1.0 / np.sqrt(NUM_HEADS)}
        for words, value in known.items():
            if abs(factor / value - 1.0) < 0.02:
                return Finding(words, "broken", seen)
        return Finding(f"{factor:.3g}/sqrt(H)", "broken", seen)

    about = f"{TOKENS} keys, H = {HEAD_DIM}; q . k is sqrt(H) for one and 0 for the others"
    return exam.answer("scale", ask, exam.plain_paths, about)


def _overflow(exam: Examination) -> Answer:
    subject = exam.subject
    paths = [
        Path("float16", p.need_weights, p.train, p.grad, p.dropout) for p in exam.paths if p.dtype == exam.base.dtype
    ]
    if not any(path.dtype == "float16" for path in exam.paths):
        return Answer("float16 overflow", "absent", "not asked")
    spec = weights = None
    query, _, value = exam.inputs(TOKENS) if "value" in subject.takes or not subject.is_layer else exam.inputs()
    large = np.full_like(query, 200.0)
    inputs = (large, large, value)
    if subject.is_layer and subject.has_settable_weights:
        spec = AttentionSpec(NUM_HEADS * HEAD_DIM, NUM_HEADS)
        weights = _plain_weights(spec)
    elif subject.is_layer:  # its projections are not known, so that only the size of the logits is
        large = 1000.0 * query
        inputs = (large, large, value if "value" in subject.takes else large)

    def ask(path: Path) -> Finding:
        output = run(subject, path, inputs, spec=spec, weights=weights).output
        bad = np.count_nonzero(~np.isfinite(output))
        seen = f"{bad} of {output.size} outputs are not finite"
        return Finding("NaN", "broken", seen) if bad else Finding("finite")

    size = "query = key = 200, H = 8" if spec is not None or not subject.is_layer else "inputs of size 1000"
    return exam.answer("float16 overflow", ask, paths, f"{size}: logits beyond 65504, the largest float16")


def _strided(exam: Examination) -> Answer:
    if exam.subject.framework == "jax":
        return Answer("strided inputs", "absent", "no strides")
    inputs = exam.inputs()

    def ask(path: Path) -> Finding:
        before, after = (exam.run(path, inputs, strided=strided).output for strided in (False, True))
        moved, seen = change(before, after, path, range(TOKENS))
        return (
            Finding("another result", "broken", f"from contiguous to strided {seen}") if moved else Finding("the same")
        )

    return exam.answer("strided inputs", ask)


def _agreement(exam: Examination) -> Answer:
    """Whether the paths compute one function: causal where it can be, so that the masks take part."""
    hidden = None
    if exam.takes_mask:
        hidden = ~np.tri(TOKENS, dtype=bool)
    inputs = exam.inputs()
    expected = exam.run(exam.base, inputs, hidden).output
    paths = exam.steady_paths

    def ask(path: Path) -> Finding:
        output = exam.run(path, inputs, hidden).output
        scale = np.abs(expected).max()
        error = np.abs(output - expected).max() / scale
        # The inputs are rounded too, and what a layer projects; this is no measure of quality but of another function.
        allowed = 64 * float(ml_dtypes.finfo(dtype_named(path.dtype)).eps)
        if not error <= allowed:
            return Finding("another result", "broken", f"{error:.2e} of the output's size away from {exam.base}")
        return Finding("agree")

    return exam.answer("paths", ask, paths)


def _cache(exam: Examination) -> Answer:
    subject = exam.subject
    if subject.decode is None:
        return Answer("cache", "absent", "—")
    x, *_ = exam.inputs()
    options: dict[str, Any] = {} if exam.is_causal_itself else {"hidden": ~np.tri(TOKENS, dtype=bool)}
    whole = exam.run(exam.base, (x, x, x), **options).output
    words: list[str] = []
    seen: list[str] = []
    status = "ok"

    def decoded(x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.asarray(subject.decode(x, capacity, is_causal), np.float64)  # type: ignore[misc]

    def compare(is_causal: bool) -> str:
        output = decoded(x, TOKENS, is_causal)
        differs, at = change(whole, output, exam.base, range(TOKENS))
        if not differs:
            return ""
        seen.append(f"token by token{' with is_causal=True' if is_causal else ''}: {at}")
        others = x.copy()
        others[:, 1:-1] = np.random.default_rng(SEED + 1).standard_normal(others[:, 1:-1].shape)
        after = decoded(others, TOKENS, is_causal)[:, [-1]]
        first_only = not change(output[:, [-1]], after, exam.base, [TOKENS - 1])[0]
        return "sees only key 0" if first_only else "not one pass"

    found = compare(False)
    words.append(found or "equals one pass")
    status = "broken" if found else status
    if "is_causal" in subject.takes and (found := compare(True)):
        words.append(f"with is_causal {found}")
        status = "broken"
    try:
        output = decoded(x, TOKENS - 2, False)
        words.append("overflow silent")
        seen.append(f"{TOKENS} tokens into {TOKENS - 2} slots: no error, the last output is {numbers(output[0, -1])}")
        status = "broken"
    except Exception as error:  # whatever another library raises
        words.append("overflow refused")
        seen.append(f"overflow: {error}")
    told = "; ".join(words)
    return (
        broken(subject, "cache", told, exam.base, "; ".join(seen))
        if status == "broken"
        else Answer("cache", "ok", told)
    )


QUESTIONS: dict[str, Question] = {
    "attends": Question("do the outputs change with other tokens, and with each of the inputs?", _attends),
    "mask": Question("which keys does a boolean mask with one True hide?", _mask),
    "causal": Question(f"which of {TOKENS} keys does each of {FEW_TOKENS} queries see with the causal flag?", _causal),
    "causal and mask": Question("do the causal flag and a mask both hold?", _causal_and_mask),
    "future token": Question("does a later token change an earlier output, under causal attention?", _future_token),
    "masked key": Question("does a token that the mask hides from all change another's output?", _masked_key),
    "padding": Question("does a padded token change the output of a real one?", _padding),
    "other sequence": Question("does one sequence of the batch change the output of another?", _other_sequence),
    "NaN seen": Question("does a NaN or infinity reach every output whose query sees it?", _nan_seen),
    "NaN hidden": Question("does a NaN or infinity in a hidden key or value stay hidden?", _nan_hidden),
    "empty row": Question("what does a query give whose keys are all hidden?", _empty_row),
    "its gradient": Question("are the gradients finite where a query sees no key?", _empty_row_gradient),
    "weights": Question("are the returned attention weights those that were used?", _weights),
    "grouped heads": Question("which key/value head does each query head use?", _grouped),
    "dropout": Question("is anything dropped in training, and only there?", _dropout),
    "scale": Question("by what are the scores scaled?", _scale),
    "float16 overflow": Question("are float16 outputs finite when logits are not?", _overflow),
    "strided inputs": Question("do inputs that are not contiguous in memory give the same?", _strided),
    "paths": Question("do all paths give the same output, up to rounding?", _agreement),
    "cache": Question("does decoding token by token equal one pass, and is overflow refused?", _cache),
}
"""The columns of the matrix, by name."""


# ---- Printing --------------------------------------------------------------------------------------------------------

STYLES = {"ok": "green", "note": "yellow", "absent": "dim", "differs": "bold red", "broken": "bold red"}
LABEL, CELL = 16, 18  # columns


def print_conformance(found: Sequence[Conformance], out: Console, again: Callable[[str, str], str]) -> None:
    """Print the matrix, as many subjects side by side as there is room for, and below it each broken promise.

    Args:
        found: the subjects.
        out: a console, see `parity.reporting.console.console`.
        again: the command that asks a subject a question once more, from their names.
    """
    examined = [subject for subject in found if not subject.missing]
    between = 3 if out.is_terminal else 2
    side_by_side = max(1, (out.width - LABEL - between) // (CELL + between))
    for start in range(0, len(examined), side_by_side):
        block = examined[start : start + side_by_side]
        versions = dict.fromkeys(subject.version or subject.framework for subject in block)
        table = begin_table(out, f"Conformance: {', '.join(versions)}")
        table.add_column("", no_wrap=True, min_width=LABEL)
        width = min(40, (out.width - LABEL - between) // len(block) - between)
        for subject in block:
            name = subject.name if ":" in subject.name else ".\n".join(subject.name.rsplit(".", 1))
            table.add_column(name, overflow="fold", min_width=CELL, max_width=width)
        for answer in block[0].answers:
            cells = [subject[answer.question] for subject in block]
            marks = ("! " if cell.is_broken else "" for cell in cells)
            row = [Text(mark + cell.words, style=STYLES[cell.status]) for mark, cell in zip(marks, cells, strict=True)]
            table.add_row(answer.question, *row)
        out.print(table)
    for subject in found:
        if subject.missing:
            out.print(Text(f"{subject.name}: {subject.missing}", style="dim"), soft_wrap=True)
    refusals = [(subject, answer) for subject in examined for answer in subject.answers if answer.refusal]
    for i, (subject, answer) in enumerate(refusals):
        refused = f"{subject.name}, {answer.question}: refused ({answer.refusal})"
        out.print(Text(refused if i else f"\n{refused}", style="dim"), soft_wrap=True)
    for subject in examined:
        for answer in subject.broken:
            out.print()
            out.print(Text(answer.example, style="red"), soft_wrap=True)
            out.print(Text(f"  again   {again(subject.name, answer.question)}"), soft_wrap=True)
    out.print()
    answers = [answer for subject in examined for answer in subject.answers]
    asked, promises = sum(answer.was_asked for answer in answers), sum(answer.is_broken for answer in answers)
    how_many = f"{len(examined)} subject{'s' if len(examined) != 1 else ''}"
    verdict = f"{promises} broken promise{'s' if promises != 1 else ''}" if promises else "no broken promises"
    verdict = verdict if asked else "nothing to ask"
    out.print(
        Text(
            f"{how_many} examined, {asked} of {len(answers)} questions answered: {verdict}",
            style="bold red" if promises or not asked else "bold green",
        ),
        soft_wrap=True,
    )
