"""Scale and range of scores, and agreement across memory layouts and paths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from parity.explain.conformance.answers import Answer, Kind, PathAnswer, Question, asks
from parity.explain.conformance.calls import run
from parity.explain.conformance.examination import (
    FUTURE_KEYS,
    Examination,
    change,
    plain_layer,
    relative_error,
)
from parity.explain.conformance.subjects import BATCH, NUM_HEADS, TOKENS, Inputs, Path, Subject
from parity.measure.core.compare import unit_of_rounding

# ---- Scale ---------------------------------------------------------------------------------------


@asks("scale", "which scale do the scores have?")
def scale(exam: Examination, question: Question) -> Answer:
    subject = exam.subject
    if not subject.is_layer:
        inputs, layer = _inputs_with_one_score(subject), {}
    elif subject.has_settable_weights:
        inputs, layer = _layer_with_one_score(subject)
    else:
        return question.not_offered

    def ask(path: Path) -> PathAnswer:
        output = run(subject, path, inputs, **layer).output
        share = output[0, ..., -1, 0].flat[0]  # of the last query, which attends to every key
        with np.errstate(all="ignore"):
            score = float(np.log((TOKENS - 1) * share / (1.0 - share)))
        return _of_scale(-score, f"that key weighs {share:.4g}", subject.head_dim)

    about = f"{TOKENS} keys, H = {subject.head_dim}; q . k is -sqrt(H) for one and 0 for the others"
    return exam.answer(question, ask, exam.plain_paths, about)


def _inputs_with_one_score(subject: Subject) -> Inputs:
    """Return split heads for which the output is the weight of the last key.

    That key has q . k = -sqrt(H) and value 1, the others have 0 and 0. Its weight is small and thus
    exact.
    """
    value = np.zeros((BATCH, NUM_HEADS, TOKENS, subject.head_dim))
    value[..., -1, :] = 1.0
    return np.ones_like(value), -value / np.sqrt(subject.head_dim), value


def _layer_with_one_score(subject: Subject) -> tuple[Inputs, dict[str, Any]]:
    """Return inputs, and a layer's spec and weights, with the scores of `_inputs_with_one_score`.

    The inputs are a single array, so that self-attention can also be examined.
    """
    x = np.zeros((BATCH, TOKENS, NUM_HEADS * subject.head_dim))
    x[..., -1, :] = 1.0
    layer = plain_layer(subject)
    weights = layer["weights"]
    weights["q_proj.weight"][:] = 0.0
    weights["q_proj.bias"][:] = 1.0
    weights["k_proj.weight"] /= -np.float32(np.sqrt(subject.head_dim))
    return (x, x, x), layer


def _of_scale(factor: float, evidence: str, head_dim: int) -> PathAnswer:
    """Return the finding for scores with a scale of `factor` / sqrt(H)."""
    if abs(factor - 1.0) < 0.02:
        return PathAnswer("1/sqrt(H)")
    evidence = f"{evidence}: scale = {factor:.3f} / sqrt(H)"
    wrong_factors = {
        "1 (none)": np.sqrt(head_dim),
        "1/H": 1.0 / np.sqrt(head_dim),
        "1/sqrt(E)": 1.0 / np.sqrt(NUM_HEADS),  # E = N * H
    }
    for words, wrong_factor in wrong_factors.items():
        if abs(factor / wrong_factor - 1.0) < 0.02:
            return PathAnswer(words, Kind.BROKEN, evidence)
    return PathAnswer(f"{factor:.3g}/sqrt(H)", Kind.BROKEN, evidence)


# ---- Range ---------------------------------------------------------------------------------------


@asks("float16 overflow", "are float16 outputs finite when logits are not?")
def overflow(exam: Examination, question: Question) -> Answer:
    subject = exam.subject
    if not any(path.dtype == "float16" for path in exam.paths):
        words = "not requested"
        if subject.framework == "ttnn":
            words = "no float16"
        return Answer(question.name, Kind.ABSENT, words)
    inputs, about = _large_inputs(exam)
    layer: dict[str, Any] = {}
    if subject.is_layer and subject.has_settable_weights:
        layer = plain_layer(subject)

    def ask(path: Path) -> PathAnswer:
        output = run(subject, path, inputs, **layer).output
        num_non_finite = np.count_nonzero(~np.isfinite(output))
        if num_non_finite:
            evidence = f"{num_non_finite} of {output.size} outputs are not finite"
            return PathAnswer("NaN", Kind.BROKEN, evidence)
        return PathAnswer("finite")

    about = f"{about}: logits beyond 65504, the largest float16"
    # Also with dropout, which is tested in the first dtype only.
    paths = [replace(path, dtype="float16") for path in exam.paths_of_base_dtype]
    return exam.answer(question, ask, paths, about)


def _large_inputs(exam: Examination) -> tuple[Inputs, str]:
    """Return inputs whose logits exceed the range of float16, and their description."""
    subject = exam.subject
    query, _, value = exam.inputs(TOKENS)
    if not subject.is_layer or subject.has_settable_weights:
        large = np.full_like(query, 200.0)
        return (large, large, value), "query = key = 200, H = 8"
    # Its projections are unknown, so only the size of the logits is known.
    large = 1000.0 * query
    if "value" not in subject.takes:
        value = large
    return (large, large, value), "inputs of size 1000"


# ---- Agreement -----------------------------------------------------------------------------------


@asks("strided inputs", "do non-contiguous inputs lead to the same output?")
def strided(exam: Examination, question: Question) -> Answer:
    if exam.subject.framework != "torch":
        return Answer(question.name, Kind.ABSENT, "no strides")
    inputs = exam.inputs()

    def ask(path: Path) -> PathAnswer:
        before = exam.run(path, inputs).output
        after = exam.run(path, inputs, strided=True).output
        moves, difference = change(before, after, path, range(TOKENS))
        if moves:
            evidence = f"from contiguous to strided {difference}"
            return PathAnswer("a different result", Kind.BROKEN, evidence)
        return PathAnswer("the same")

    return exam.answer(question, ask)


@asks("paths", "do all paths return the same output, up to rounding?")
def agreement(exam: Examination, question: Question) -> Answer:
    """Check that all paths compute one function, under causal attention if supported, so that masks
    take part.

    Outputs that a layer's own dropout makes random differ in training without a fault, and in
    evaluation by one.
    """
    hidden = None
    if exam.takes_mask:
        hidden = FUTURE_KEYS
    inputs = exam.inputs()
    expected = exam.run(exam.base, inputs, hidden).output

    def ask(path: Path) -> PathAnswer:
        randomness = exam.hidden_randomness(path)
        if randomness:
            return PathAnswer("random", Kind.BROKEN, f"from one call to the next {randomness}")
        error = relative_error(exam.run(path, inputs, hidden).output, expected)
        # Inputs and projections are rounded too: this detects a different function, and does not
        # measure accuracy. A NaN is an error.
        if not error <= 64 * unit_of_rounding(path.dtype):
            evidence = f"{error:.2e} of the output's size away from {exam.base}"
            return PathAnswer("a different result", Kind.BROKEN, evidence)
        return PathAnswer("agree")

    paths = []
    for path in exam.steady_paths:
        # Random outputs in training are dropout.
        if not (path.train and exam.hidden_randomness(path)):
            paths.append(path)
    return exam.answer(question, ask, paths)
