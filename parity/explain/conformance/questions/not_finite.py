"""Do NaN and infinity reach exactly the outputs that attend to them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from parity.explain.conformance.answers import Answer, Finding, Kind, Question, asks
from parity.explain.conformance.calls import Failed, Refused
from parity.explain.conformance.examination import Examination, change, numbers
from parity.explain.conformance.subjects import BATCH, TOKENS, Path

MANY_TOKENS = 600
"""Enough tokens for blockwise code: several blocks of keys, and more than 2^20 scores in total."""


@dataclass(frozen=True)
class Way:
    """A way to hide keys: the arguments for it, and the keys that each query then attends to, (T,
    S).
    """

    name: str
    options: Mapping[str, Any]
    visible: np.ndarray


@dataclass(frozen=True)
class Poison:
    """A non-finite value in one token of the arrays `letters`: query, key, value."""

    letters: str
    token: int
    value: float

    def __str__(self) -> str:
        arrays = {"q": "query", "k": "key", "v": "value", "kv": "key and value", "qkv": "token"}
        return f"{self.value} in {arrays[self.letters]} {self.token}"


class Poisoned(NamedTuple):
    """Results of non-finite values, each in a separate sequence.

    Attributes:
        swallowed: description of the first output that should be non-finite but is not, or "".
        leaked: description of the first output that should be unaffected but changed, or "".
    """

    swallowed: str
    leaked: str


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
    except (Refused, Failed):  # reported by the questions about masks
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
    """Compare sequences that each contain one non-finite value with the same sequences without any.

    Calls have the same batch size as those of other questions, because JAX recompiles for every
    other shape.
    """
    num_tokens = len(way.visible)
    is_separate = len(poisons[0].letters) < 3
    inputs = (
        exam.separate_inputs(num_tokens) if is_separate else exam.inputs(num_queries=num_tokens)
    )
    options = dict(way.options)
    if way.name == "padding":
        is_last = np.broadcast_to(np.arange(num_tokens) == num_tokens - 1, (BATCH, num_tokens))
        options["padding"] = (
            np.full(BATCH, num_tokens - 1, np.int32)
            if exam.subject.padding == "lengths"
            else is_last == exam.padding_true_hides
        )
    rows = (
        range(num_tokens - 1) if way.name == "padding" else range(num_tokens)
    )  # rows of real tokens
    size = f" of {num_tokens}" if num_tokens != TOKENS else ""
    swallowed = leaked = ""
    sequences: list[Poison | None] = [None, *poisons]
    outputs: list[Any] = []
    for first in range(0, len(sequences), BATCH):
        arrays = {id(x): np.repeat(x[:1], BATCH, axis=0) for x in inputs}
        for i, poison in enumerate(sequences[first : first + BATCH]):
            for letter, x in zip("qkv", inputs, strict=True):
                if poison is not None and letter in poison.letters:
                    arrays[id(x)][i, ..., poison.token, :] = poison.value
        outputs += list(exam.run(path, tuple(arrays[id(x)] for x in inputs), **options).output)  # type: ignore[arg-type]
    clean = outputs[0]
    for poison, poisoned in zip(poisons, outputs[1 : len(sequences)], strict=True):
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
            swallowed = (
                f"{way.name}: {poison}{size}, and output {kept}, which attends to it, is {row}"
            )
        blind = [t for t in rows if not sees[t]]
        if blind and not leaked:
            moves, seen = change(
                clean[None][..., blind, :], poisoned[None][..., blind, :], path, blind
            )
            if moves:
                leaked = f"{way.name}: {poison}{size}, which is hidden: {seen}"
    return Poisoned(swallowed, leaked)


def _poisoned(
    exam: Examination, path: Path, num_tokens: int, hides: bool
) -> dict[str, list[Poisoned]]:
    """Test non-finite values in separate and in equal inputs, by the name of the way to hide keys.

    Args:
        exam: the examination.
        path: the path.
        num_tokens: number of tokens in a sequence.
        hides: leave out the ways by which every query attends to every key.

    Raises:
        Refused: if every way is rejected.
    """
    last = num_tokens - 1
    kinds: list[list[Poison]] = []
    if "key" in exam.subject.takes:
        poisons = [Poison("q", 1, np.nan)]
        for letters, _ in exam.separate_keys:
            poisons += [Poison(letters, 2, np.nan), Poison(letters, last, np.nan)]
        letters = exam.separate_keys[-1][0]
        kinds.append([*poisons, Poison(letters, 2, np.inf), Poison(letters, last, np.inf)])
    if not kinds or (
        exam.subject.is_layer and exam.subject.framework == "torch"
    ):  # with a path for equal inputs
        kinds.append(
            [Poison("qkv", 2, np.nan), Poison("qkv", last, np.nan), Poison("qkv", 2, np.inf)]
        )
    found: dict[str, list[Poisoned]] = {}
    refusals: list[Refused] = []
    ways = _ways(exam, num_tokens)
    for way in ways:
        for poisons in kinds:
            asked = (path, way.name, num_tokens, poisons[0].letters)
            try:
                if asked not in exam.known:
                    exam.known[asked] = _poison(exam, path, way, poisons)
                found.setdefault(way.name, []).append(exam.known[asked])
            except Refused as refused:
                refusals.append(refused)
    if not found:
        raise refusals[0]
    return {
        way.name: found[way.name]
        for way in ways
        if way.name in found and not (hides and way.visible.all())
    }


def _find(exam: Examination, path: Path, num_tokens: int, hidden: bool) -> Finding:
    """Check on a path whether non-finite values reach every output that attends to them, or only
    these outputs.
    """
    poisoned = _poisoned(exam, path, num_tokens, hides=hidden)
    if not poisoned:
        return Finding("—", Kind.ABSENT)
    faults: dict[str, str] = {}
    for name, results in poisoned.items():
        if seen := next(
            filter(None, (each.leaked if hidden else each.swallowed for each in results)), ""
        ):
            faults[name] = seen
    if not faults:
        return Finding("hidden" if hidden else "seen")
    words = "leaks" if hidden else "swallowed"
    words += f" ({', '.join(faults)})" if len(faults) < len(poisoned) else ""
    return Finding(words, Kind.NOTE if hidden else Kind.BROKEN, next(iter(faults.values())))


def _ask(exam: Examination, question: Question, hidden: bool) -> Answer:
    """Ask on every path, and once more with many tokens."""
    also = None
    if exam.felt.all() or exam.is_causal_itself:  # otherwise the pattern of many tokens is unknown
        few, many = (
            _find(exam, exam.base, num_tokens, hidden) for num_tokens in (TOKENS, MANY_TOKENS)
        )
        also = None if few == many else replace(many, words=f"{many.words} of {MANY_TOKENS} tokens")
    # Paths that differ only in rounding are tested once, without gradients.
    paths = [path for path in exam.steady_paths if path.dtype == exam.base.dtype or not path.grad]
    answer = exam.answer(question, lambda path: _find(exam, path, TOKENS, hidden), paths, also=also)
    if also is not None and also.kind is Kind.BROKEN:
        return exam.only(question, replace(also, words=answer.words))
    return answer


@asks("NaN seen", "does a NaN or infinity reach every output that attends to it?")
def nan_seen(exam: Examination, question: Question) -> Answer:
    return _ask(exam, question, hidden=False)


@asks("NaN hidden", "does a NaN or infinity in a hidden key or value stay hidden?")
def nan_hidden(exam: Examination, question: Question) -> Answer:
    return _ask(exam, question, hidden=True)
