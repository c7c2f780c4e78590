"""Scale and range of scores, and agreement across memory layouts and paths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from parity.explain.conformance.answers import Answer, Finding, Kind, Question, asks
from parity.explain.conformance.calls import run
from parity.explain.conformance.examination import Examination, change, plain_layer
from parity.explain.conformance.subjects import BATCH, NUM_HEADS, TOKENS, Path
from parity.measure.core.compare import unit_of_rounding


@asks("scale", "which scale do the scores have?")
def scale(exam: Examination, question: Question) -> Answer:
    subject, head_dim = exam.subject, exam.subject.head_dim
    if subject.is_layer and not subject.has_settable_weights:
        return question.not_offered
    layer = plain_layer(subject) if subject.is_layer else {}
    # One key has q . k = -sqrt(H) and value 1, the others have 0 and 0: the output is its weight,
    # small and thus exact.
    shape = (
        (BATCH, TOKENS, NUM_HEADS * head_dim)
        if subject.is_layer
        else (BATCH, NUM_HEADS, TOKENS, head_dim)
    )
    value = np.zeros(shape)
    value[..., -1, :] = 1.0
    inputs = (np.ones(shape), -value / np.sqrt(head_dim), value)
    if layer:  # from a single array, for self-attention
        weights = layer["weights"]
        weights["q_proj.weight"][:], weights["q_proj.bias"][:] = 0.0, 1.0
        weights["k_proj.weight"] /= -np.float32(np.sqrt(head_dim))
        inputs = (value, value, value)

    def ask(path: Path) -> Finding:
        share = (
            run(subject, path, inputs, **layer).output[0, ..., -1, 0].flat[0]
        )  # attends to every key
        with np.errstate(all="ignore"):
            factor = -float(np.log((TOKENS - 1) * share / (1.0 - share)))  # times 1/sqrt(H)
        seen = f"that key weighs {share:.4g}: scale = {factor:.3f} / sqrt(H)"
        if abs(factor - 1.0) < 0.02:
            return Finding("1/sqrt(H)")
        known = {
            "1 (none)": np.sqrt(head_dim),
            "1/H": 1.0 / np.sqrt(head_dim),
            "1/sqrt(E)": 1.0 / np.sqrt(NUM_HEADS),
        }
        for words, value in known.items():
            if abs(factor / value - 1.0) < 0.02:
                return Finding(words, Kind.BROKEN, seen)
        return Finding(f"{factor:.3g}/sqrt(H)", Kind.BROKEN, seen)

    about = f"{TOKENS} keys, H = {head_dim}; q . k is -sqrt(H) for one and 0 for the others"
    return exam.answer(question, ask, exam.plain_paths, about)


@asks("float16 overflow", "are float16 outputs finite when logits are not?")
def overflow(exam: Examination, question: Question) -> Answer:
    subject = exam.subject
    paths = [replace(path, dtype="float16") for path in exam.paths if path.dtype == exam.base.dtype]
    if not any(path.dtype == "float16" for path in exam.paths):
        return Answer(
            question.name, Kind.ABSENT, "no float16" if subject.framework == "ttnn" else "not asked"
        )
    query, _, value = (
        exam.inputs(TOKENS) if "value" in subject.takes or not subject.is_layer else exam.inputs()
    )
    large = np.full_like(query, 200.0)
    inputs, about = (large, large, value), "query = key = 200, H = 8"
    layer = plain_layer(subject) if subject.is_layer and subject.has_settable_weights else {}
    if (
        subject.is_layer and not layer
    ):  # its projections are unknown, so only the size of the logits is known
        large, about = 1000.0 * query, "inputs of size 1000"
        inputs = (large, large, value if "value" in subject.takes else large)

    def ask(path: Path) -> Finding:
        output = run(subject, path, inputs, **layer).output
        bad = np.count_nonzero(~np.isfinite(output))
        seen = f"{bad} of {output.size} outputs are not finite"
        return Finding("NaN", Kind.BROKEN, seen) if bad else Finding("finite")

    return exam.answer(question, ask, paths, f"{about}: logits beyond 65504, the largest float16")


@asks("strided inputs", "do non-contiguous inputs lead to the same output?")
def strided(exam: Examination, question: Question) -> Answer:
    if exam.subject.framework != "torch":
        return Answer(question.name, Kind.ABSENT, "no strides")
    inputs = exam.inputs()

    def ask(path: Path) -> Finding:
        before, after = (
            exam.run(path, inputs, strided=strided).output for strided in (False, True)
        )
        moved, seen = change(before, after, path, range(TOKENS))
        if moved:
            return Finding("another result", Kind.BROKEN, f"from contiguous to strided {seen}")
        return Finding("the same")

    return exam.answer(question, ask)


@asks("paths", "do all paths return the same output, up to rounding?")
def agreement(exam: Examination, question: Question) -> Answer:
    """Check that all paths compute one function, under causal attention if supported, so that masks
    take part.

    Outputs that a layer's own dropout makes random differ in training without a fault, and in
    evaluation by one.
    """
    hidden = ~np.tri(TOKENS, dtype=bool) if exam.takes_mask else None
    inputs = exam.inputs()
    expected = exam.run(exam.base, inputs, hidden).output

    def ask(path: Path) -> Finding:
        if not path.train and (randomness := exam.hidden_randomness(path)):
            return Finding("random", Kind.BROKEN, f"from one call to the next {randomness}")
        output = exam.run(path, inputs, hidden).output
        error = np.abs(output - expected).max() / np.abs(expected).max()
        # Inputs and projections are rounded too: this detects another function, and does not
        # measure accuracy.
        if not error <= 64 * unit_of_rounding(path.dtype):
            return Finding(
                "another result",
                Kind.BROKEN,
                f"{error:.2e} of the output's size away from {exam.base}",
            )
        return Finding("agree")

    paths = [
        path for path in exam.steady_paths if not (path.train and exam.hidden_randomness(path))
    ]
    return exam.answer(question, ask, paths)
