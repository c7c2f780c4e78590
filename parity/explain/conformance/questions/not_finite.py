"""Do NaN and infinity reach exactly the outputs that attend to them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from parity.explain.conformance.answers import Answer, Kind, PathAnswer, Question, asks
from parity.explain.conformance.calls import Failed, RejectedCall
from parity.explain.conformance.examination import Examination, change, mapped, numbers
from parity.explain.conformance.subjects import BATCH, TOKENS, Path, by_letters

MANY_TOKENS = 600
"""Enough tokens for blockwise code: several blocks of keys, and more than 2^20 scores in total."""


@asks("visible NaN", "does a NaN or infinity reach every output that attends to it?")
def visible_nan(exam: Examination, question: Question) -> Answer:
    return _answer(exam, question, PROPAGATES)


@asks("hidden NaN", "does a NaN or infinity in a hidden key or value stay hidden?")
def hidden_nan(exam: Examination, question: Question) -> Answer:
    return _answer(exam, question, IS_HIDDEN)


class Claim(NamedTuple):
    """One of the two claims about non-finite values.

    Attributes:
        if_true, if_false: words of the answer.
        kind: kind of the answer if it is false.
    """

    if_true: str
    if_false: str
    kind: Kind


PROPAGATES = Claim("propagates", "swallowed", Kind.BROKEN)
IS_HIDDEN = Claim("hidden", "leaks", Kind.NOTE)


def _answer(exam: Examination, question: Question, claim: Claim) -> Answer:
    """Check a claim on every path, and once more with many tokens."""
    also = None
    if exam.felt.all() or exam.is_causal_itself:  # otherwise the pattern of many tokens is unknown
        few = _find(exam, exam.base, TOKENS, claim)
        many = _find(exam, exam.base, MANY_TOKENS, claim)
        if few != many:
            also = replace(many, words=f"{many.words} with {MANY_TOKENS} tokens")
    # Paths that differ only in rounding are tested once, without gradients.
    paths = []
    for path in exam.steady_paths:
        if path.dtype == exam.base.dtype or not path.grad:
            paths.append(path)

    def ask(path: Path) -> PathAnswer:
        return _find(exam, path, TOKENS, claim)

    answer = exam.answer(question, ask, paths, also=also)
    if also is not None and also.kind is Kind.BROKEN:
        return exam.only(question, replace(also, words=answer.words))
    return answer


def _find(exam: Examination, path: Path, num_tokens: int, claim: Claim) -> PathAnswer:
    """Check on a path whether a claim holds for every way to hide keys."""
    way_names: set[str] = set()
    faults: dict[str, str] = {}
    for way, spread in _spreads(exam, path, num_tokens):
        fault = spread.swallowed
        if claim is IS_HIDDEN:
            fault = spread.leaked
            if way.visible.all():  # nothing is hidden
                continue
        way_names.add(way.name)
        if fault and way.name not in faults:
            faults[way.name] = fault
    if not way_names:
        return PathAnswer("—", Kind.ABSENT)
    if not faults:
        return PathAnswer(claim.if_true)
    words = claim.if_false
    if len(faults) < len(way_names):
        words += f" ({', '.join(faults)})"
    return PathAnswer(words, claim.kind, next(iter(faults.values())))


# ---- Ways to hide keys ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to hide keys: the arguments for it, and the keys that each query then attends to, (T,
    S).
    """

    name: str
    options: Mapping[str, Any]
    visible: np.ndarray

    @property
    def rows(self) -> range:
        """Return the rows of real tokens: the last token may be padding."""
        num_tokens = len(self.visible)
        if self.name == "padding":
            return range(num_tokens - 1)
        return range(num_tokens)


def _ways(exam: Examination, num_tokens: int) -> list[Way]:
    """Return every way of the subject to hide keys: the last key from all queries, or causally, or
    both by a mask.
    """
    everything = np.ones((num_tokens, num_tokens), bool)
    all_but_last = everything.copy()
    all_but_last[:, -1] = False
    causal = np.tri(num_tokens, dtype=bool)
    ways = [Way("no mask", {}, everything)]
    try:
        takes_mask = exam.takes_mask
    except (RejectedCall, Failed):  # reported by the questions about masks
        takes_mask = False
    if takes_mask:
        ways.append(Way("mask", {"hidden": ~(causal & all_but_last)}, causal & all_but_last))
    if "is_causal" in exam.subject.takes:
        ways.append(Way("flag", {"is_causal": True}, causal))
    if exam.subject.padding is not None:
        ways.append(Way("padding", {}, all_but_last))
    if exam.felt.all():
        return ways
    return [replace(way, visible=way.visible & causal) for way in ways]


def _options_of(exam: Examination, way: Way) -> dict[str, Any]:
    """Return the arguments of a way; the arguments of padding depend on how the subject reads
    them.
    """
    options = dict(way.options)
    if way.name != "padding":
        return options
    num_tokens = len(way.visible)
    if exam.subject.padding == "lengths":
        options["padding"] = np.full(BATCH, num_tokens - 1, np.int32)
        return options
    is_last = np.broadcast_to(np.arange(num_tokens) == num_tokens - 1, (BATCH, num_tokens))
    options["padding"] = is_last == exam.padding_true_hides
    return options


# ---- Non-finite values ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Poison:
    """A non-finite value in one token of the arrays `letters`: query, key, value."""

    letters: str
    token: int
    value: float

    def __str__(self) -> str:
        arrays = {"q": "query", "k": "key", "v": "value", "kv": "key and value", "qkv": "token"}
        return f"{self.value} in {arrays[self.letters]} {self.token}"


def _poisons(exam: Examination, num_tokens: int) -> list[list[Poison]]:
    """Return the non-finite values to test: those in separate inputs, and those in equal ones."""
    last = num_tokens - 1
    poisons_by_inputs = []
    if "key" in exam.subject.takes:
        poisons = [Poison("q", 1, np.nan)]
        for letters, _ in exam.separate_keys:
            poisons += [Poison(letters, 2, np.nan), Poison(letters, last, np.nan)]
        letters, _ = exam.separate_keys[-1]
        poisons += [Poison(letters, 2, np.inf), Poison(letters, last, np.inf)]
        poisons_by_inputs.append(poisons)
    # Layers of torch have a path for equal inputs.
    has_self_attention = exam.subject.is_layer and exam.subject.framework == "torch"
    if has_self_attention or "key" not in exam.subject.takes:
        poisons_by_inputs.append(
            [Poison("qkv", 2, np.nan), Poison("qkv", last, np.nan), Poison("qkv", 2, np.inf)]
        )
    return poisons_by_inputs


class Spread(NamedTuple):
    """How far non-finite values spread, each in a separate sequence.

    Attributes:
        swallowed: description of the first output that should be non-finite but is not, or "".
        leaked: description of the first output that should be unaffected but changed, or "".
    """

    swallowed: str
    leaked: str


def _spreads(exam: Examination, path: Path, num_tokens: int) -> list[tuple[Way, Spread]]:
    """Return how far non-finite values spread, for each way to hide keys that is not rejected.

    Raises:
        RejectedCall: if every way is rejected.
    """
    spreads: list[tuple[Way, Spread]] = []
    rejections: list[RejectedCall] = []
    for way in _ways(exam, num_tokens):
        for poisons in _poisons(exam, num_tokens):
            key = ("spread", path, way.name, num_tokens, poisons[0].letters)
            try:
                if key not in exam.shared:
                    exam.shared[key] = _spread(exam, path, way, poisons)
                spreads.append((way, exam.shared[key]))
            except RejectedCall as rejected:
                rejections.append(rejected)
    if not spreads:
        raise rejections[0]
    return spreads


def _spread(exam: Examination, path: Path, way: Way, poisons: Sequence[Poison]) -> Spread:
    """Compare sequences that each contain one non-finite value with the same sequence without
    any.
    """
    clean, *outputs = _outputs(exam, path, way, [None, *poisons])
    swallowed = leaked = ""
    for poison, output in zip(poisons, outputs, strict=True):
        if not swallowed:
            swallowed = _swallowed(way, poison, output)
        if not leaked:
            leaked = _leaked(way, poison, output, clean, path)
    return Spread(swallowed, leaked)


def _outputs(
    exam: Examination, path: Path, way: Way, sequences: Sequence[Poison | None]
) -> list[np.ndarray]:
    """Return the output of each sequence with a non-finite value, or with None.

    Calls have the same batch size as the calls of other questions, because JAX recompiles for every
    other shape.
    """
    num_tokens = len(way.visible)
    poisons = [poison for poison in sequences if poison is not None]
    if poisons[0].letters == "qkv":
        inputs = exam.inputs(num_queries=num_tokens)
    else:
        inputs = exam.separate_inputs(num_tokens)
    options = _options_of(exam, way)
    outputs: list[np.ndarray] = []
    for start in range(0, len(sequences), BATCH):
        batch = mapped(inputs, _repeated)
        for i, poison in enumerate(sequences[start : start + BATCH]):
            if poison is None:
                continue
            for letters, x in by_letters(batch).items():
                if set(letters) & set(poison.letters):
                    x[i, ..., poison.token, :] = poison.value
        outputs += list(exam.run(path, batch, **options).output)
    return outputs[: len(sequences)]


def _repeated(x: np.ndarray) -> np.ndarray:
    """Return a batch of copies of the first sequence."""
    return np.repeat(x[:1], BATCH, axis=0)


def _attends_to(way: Way, poison: Poison) -> np.ndarray:
    """Return which rows attend to a non-finite value, (T,)."""
    attends = np.zeros(len(way.visible), bool)
    if poison.letters != "q":
        attends |= way.visible[:, poison.token]
    if "q" in poison.letters:
        attends[poison.token] = True
    return attends


def _swallowed(way: Way, poison: Poison, output: np.ndarray) -> str:
    """Describe the first row that attends to a non-finite value and does not show it."""
    # A NaN reaches every feature; an infinity may be a NaN in one and an infinity in another.
    if np.isnan(poison.value):
        shows = np.asarray(np.isnan(output).all(axis=-1))
    else:
        shows = ~np.asarray(np.isfinite(output).all(axis=-1))
    attends = _attends_to(way, poison)
    for t in way.rows:
        if attends[t] and not shows[..., t].all():
            row = numbers(output[..., t, :][~shows[..., t]][0])
            where = f"{way.name}: {poison}{_of_many(way)}"
            return f"{where}, and output {t}, which attends to it, is {row}"
    return ""


def _leaked(way: Way, poison: Poison, output: np.ndarray, clean: np.ndarray, path: Path) -> str:
    """Describe the largest change of the rows that do not attend to a non-finite value."""
    attends = _attends_to(way, poison)
    blind = [t for t in way.rows if not attends[t]]
    if not blind:
        return ""
    before, after = clean[None][..., blind, :], output[None][..., blind, :]
    moves, difference = change(before, after, path, blind)
    if not moves:
        return ""
    return f"{way.name}: {poison}{_of_many(way)}, which is hidden: {difference}"


def _of_many(way: Way) -> str:
    """Return the number of tokens in words, unless it is the usual one."""
    num_tokens = len(way.visible)
    if num_tokens == TOKENS:
        return ""
    return f" of {num_tokens}"
