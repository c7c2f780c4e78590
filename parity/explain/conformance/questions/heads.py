"""Which tokens and sequences are attended to, the returned attention weights, and grouped heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from parity.explain.conformance.answers import Answer, Kind, PathAnswer, Question, asks
from parity.explain.conformance.calls import Result, run
from parity.explain.conformance.examination import (
    FUTURE_KEYS,
    Examination,
    change,
    mapped,
    numbers,
    perturbed,
    plain_layer,
    relative_error,
)
from parity.explain.conformance.rules import merge, of_error
from parity.explain.conformance.subjects import (
    BATCH,
    NUM_HEADS,
    NUM_KV_HEADS,
    SEED,
    TOKENS,
    Inputs,
    Path,
    Subject,
)
from parity.measure.core.compare import unit_of_rounding


@asks("attends", "do the outputs change with other tokens, and with each of the inputs?")
def attends(exam: Examination, question: Question) -> Answer:
    felt = exam.felt
    felt_others = felt & ~np.eye(TOKENS, dtype=bool)
    if not felt_others.any():
        rows = []
        for t in range(TOKENS):
            rows.append(f"output {t} changes with tokens {np.flatnonzero(felt[t]).tolist()}")
        return exam.only(question, PathAnswer("to no other token", Kind.BROKEN, "; ".join(rows)))
    if felt.all():
        attended = PathAnswer("to all tokens")
    elif exam.is_causal_itself:
        attended = PathAnswer("causally")
    else:
        attended = PathAnswer("to some tokens")
    if "key" not in exam.subject.takes:
        return Answer(question.name, attended.kind, attended.words)
    inputs = exam.separate_inputs()

    def ask(path: Path) -> PathAnswer:
        for letters, name in (("q", "query"), *exam.separate_keys):
            others = inputs
            for token in range(TOKENS):
                others = perturbed(others, token, path, letters, scale=3.0)
            is_felt, _ = exam.moved(path, inputs, others, range(TOKENS))
            if not is_felt:
                evidence = f"every {name} is changed, and the output is unchanged"
                return PathAnswer(f"{name} ignored", Kind.BROKEN, evidence)
        return attended

    return exam.answer(question, ask, exam.plain_paths)


@asks("other sequence", "does one sequence of the batch change the output of another?")
def other_sequence(exam: Examination, question: Question) -> Answer:
    inputs = exam.inputs()
    others = mapped(inputs, _with_other_sequence)

    def ask(path: Path) -> PathAnswer:
        before = exam.run(path, inputs).output[:1]
        after = exam.run(path, others).output[:1]
        leaks, difference = change(before, after, path, range(TOKENS))
        if leaks:
            return PathAnswer("leaks", Kind.BROKEN, f"sequence 1 is changed: {difference}")
        return PathAnswer("independent")

    return exam.answer(question, ask)


def _with_other_sequence(x: np.ndarray) -> np.ndarray:
    """Return an input with other, large values in sequence 1."""
    other = x.copy()
    other[1] = np.random.default_rng(SEED + 1).standard_normal(x[1].shape) * 10.0
    return other


# ---- Attention weights ---------------------------------------------------------------------------


@asks("weights", "are the returned attention weights those that were used?")
def weights(exam: Examination, question: Question) -> Answer:
    subject = exam.subject
    if "need_weights" not in subject.takes:
        return question.not_offered
    if exam.weights_rejection is not None:
        path = replace(exam.base, need_weights=True)
        return merge(subject, question, {path: of_error(exam.weights_rejection)})
    inputs = _inputs_with_values(exam)
    hidden = None
    if exam.takes_mask:
        hidden = FUTURE_KEYS

    def ask(path: Path) -> PathAnswer:
        result = exam.run(path, inputs, hidden)
        finding = _of_weights(result.attn_weights, hidden, path)
        if finding.kind is Kind.BROKEN or path.drops or path.dtype != exam.base.dtype:
            return finding
        if "value" not in subject.takes or finding.words != PER_HEAD:
            return finding
        error = _unexplained(exam, path, inputs, hidden, result)
        if error > max(1e-3, 2 * unit_of_rounding(path.dtype)):  # both were rounded
            evidence = f"weights @ values explains the output up to {error:.1%} of it only"
            return PathAnswer("not those used", Kind.BROKEN, evidence)
        return finding

    return exam.answer(question, ask, [path for path in exam.paths if path.need_weights])


PER_HEAD = "per head"
"""Words for attention weights (B, N, T, S), in contrast to their average over the heads."""


def _inputs_with_values(exam: Examination) -> Inputs:
    """Return inputs whose values differ from the keys, as far as the subject allows it."""
    if "key" not in exam.subject.takes:
        return exam.inputs()
    query, key, value = exam.inputs(TOKENS, TOKENS)
    if "value" in exam.subject.takes and exam.subject.is_layer:
        value = np.random.default_rng(SEED + 4).standard_normal(key.shape)
    return query, key, value


def _of_weights(
    attn_weights: np.ndarray | None, hidden: np.ndarray | None, path: Path
) -> PathAnswer:
    """Check returned attention weights by themselves: their shape, their sums, and hidden keys."""
    if attn_weights is None:
        return PathAnswer("requested, not returned", Kind.BROKEN, "the attention weights are None")
    shape = attn_weights.shape
    if shape[-2:] != (TOKENS, TOKENS) or attn_weights.ndim not in (3, 4):
        evidence = f"the attention weights have the shape {shape}"
        return PathAnswer("of the wrong shape", Kind.BROKEN, evidence)
    if np.isnan(attn_weights).any():
        first_row = attn_weights.reshape(-1, TOKENS)[0]
        return PathAnswer("NaN", Kind.BROKEN, f"attn_weights[0, 0] = {numbers(first_row)}")
    finding = PathAnswer("averaged")
    if attn_weights.ndim == 4:
        finding = PathAnswer(PER_HEAD)
    if path.drops:  # the weights that are left are larger
        return finding
    sums = attn_weights.sum(axis=-1)
    excess = np.abs(sums - 1.0)
    if excess.max() > 8 * unit_of_rounding(path.dtype):
        evidence = f"a row sums to {sums.flat[excess.argmax()]:.6g}"
        return PathAnswer("rows do not sum to 1", Kind.BROKEN, evidence)
    if hidden is not None and np.abs(attn_weights[..., hidden]).max() > 0.0:
        evidence = f"a hidden key weighs {attn_weights[..., hidden].max():.6g}"
        return PathAnswer("hidden keys weigh", Kind.BROKEN, evidence)
    return finding


def _unexplained(
    exam: Examination, path: Path, inputs: Inputs, hidden: np.ndarray | None, result: Result
) -> float:
    """Return the part of the output that the returned weights do not explain.

    For split heads, this is the residual of weights @ values. A layer's output is linear in its
    values: if the value of token s changes by u, the output of query t changes by the sum over
    heads of attn_weights[n, t, s] a_n. Here a_n, the contribution of head n for u, is unknown but
    the same for all t and s. There are more equations than unknowns, so the residual is
    informative.
    """
    attn_weights = result.attn_weights
    if attn_weights is None:
        return np.inf
    query, key, value = inputs
    if not exam.subject.is_layer:
        groups = attn_weights.shape[1] // value.shape[1]
        expected = attn_weights @ np.repeat(value, groups, axis=1)
        return relative_error(expected, result.output)
    u = np.random.default_rng(SEED + 5).standard_normal(value.shape[-1])
    moves = []
    for s in range(TOKENS):
        moved = value.copy()
        moved[:, s] += u
        moves.append(exam.run(path, (query, key, moved), hidden).output - result.output)
    move = np.stack(moves, axis=2)  # (B, T, S, E)
    error = 0.0
    for b in range(BATCH):
        coefficients = attn_weights[b].reshape(attn_weights.shape[1], -1).T  # (T * S, N)
        observed = move[b].reshape(TOKENS * TOKENS, -1)
        contributions, *_ = np.linalg.lstsq(coefficients, observed, rcond=None)
        error = max(error, relative_error(coefficients @ contributions, observed))
    return error


# ---- Grouped heads -------------------------------------------------------------------------------

GROUP = NUM_HEADS // NUM_KV_HEADS

HEAD_ORDERS = {
    "repeat": (np.arange(NUM_HEADS) // GROUP, Kind.OK),
    "tile": (np.arange(NUM_HEADS) % NUM_KV_HEADS, Kind.NOTE),
}
"""Known key/value heads of each query head, each with the kind of that answer."""


@asks("grouped heads", "which key/value head does each query head use?")
def grouped(exam: Examination, question: Question) -> Answer:
    subject = exam.subject
    if subject.is_layer and not subject.has_groups:
        if subject.num_kv_heads is None:
            return question.not_offered
        return Answer(question.name, Kind.ABSENT, "not observable in a layer")
    inputs, layer = _inputs_with_numbered_heads(exam)

    def ask(path: Path) -> PathAnswer:
        output = run(subject, path, inputs, **layer).output
        heads = _heads_in(output, subject)
        shown = np.round(heads, 2).tolist()
        evidence = f"query heads 0 to {NUM_HEADS - 1} use key/value heads {shown}"
        for words, (order, kind) in HEAD_ORDERS.items():
            if np.abs(heads - order).max() < 0.02:
                return PathAnswer(words, kind, evidence)
        return PathAnswer("mixed", Kind.BROKEN, evidence)

    about = f"{NUM_HEADS} query heads, {NUM_KV_HEADS} key/value heads"
    answer = exam.answer(question, ask, exam.plain_paths, about)
    if answer.kind is Kind.REJECTED and subject.num_kv_heads is not None:
        rejection = answer.findings[exam.base]
        words = f"declared: {subject.num_kv_heads}, rejected"
        finding = PathAnswer(words, Kind.BROKEN, rejection.with_reason, rejection.exception)
        return exam.only(question, finding, about)
    return answer


def _inputs_with_numbered_heads(exam: Examination) -> tuple[Inputs, dict[str, Any]]:
    """Return inputs, and a layer's spec and weights, with which the values of key/value head g are
    g.
    """
    query, key, value = exam.inputs()
    if exam.subject.is_layer:
        layer = plain_layer(exam.subject, NUM_KV_HEADS)
        layer["weights"]["v_proj.weight"][:] = 0.0
        layer["weights"]["v_proj.bias"][:] = np.repeat(
            np.arange(NUM_KV_HEADS), exam.subject.head_dim
        )
        return (query, key, value), layer
    numbered = np.zeros_like(value[:, :NUM_KV_HEADS])
    numbered += np.arange(NUM_KV_HEADS)[:, None, None]
    return (query, key[:, :NUM_KV_HEADS], numbered), {}


def _heads_in(output: np.ndarray, subject: Subject) -> np.ndarray:
    """Return the first feature of each query head in the output of the first token, (N,)."""
    if subject.is_layer:
        return output[0, 0].reshape(NUM_HEADS, subject.head_dim)[:, 0]
    return output[0, :, 0, 0]
