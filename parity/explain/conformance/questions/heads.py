"""Which tokens and sequences are attended to, the returned attention weights, and grouped heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from parity.explain.conformance.answers import Answer, Finding, Kind, Question, asks
from parity.explain.conformance.calls import Result, run
from parity.explain.conformance.examination import (
    Examination,
    change,
    mapped,
    numbers,
    perturbed,
    plain_layer,
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
)
from parity.measure.core.compare import unit_of_rounding


@asks("attends", "do the outputs change with other tokens, and with each of the inputs?")
def attends(exam: Examination, question: Question) -> Answer:
    felt = exam.felt
    others = felt & ~np.eye(TOKENS, dtype=bool)
    rows = "; ".join(
        f"output {t} changes with tokens {np.flatnonzero(felt[t]).tolist()}" for t in range(TOKENS)
    )
    if not others.any():
        return exam.only(question, Finding("to no other token", Kind.BROKEN, rows))
    inputs = exam.separate_inputs()
    seen_by = Finding(
        "to all tokens" if felt.all() else "causally" if exam.is_causal_itself else "to some tokens"
    )

    def ask(path: Path) -> Finding:
        for letters, what in (("q", "query"), *exam.separate_keys):
            others = inputs
            for token in range(TOKENS):
                others = perturbed(others, token, path, letters, scale=3.0)
            if not exam.moved(path, inputs, others, range(TOKENS))[0]:
                return Finding(
                    f"{what} ignored",
                    Kind.BROKEN,
                    f"every {what} is changed, and the output is unchanged",
                )
        return seen_by

    if "key" not in exam.subject.takes:
        return Answer(question.name, seen_by.kind, seen_by.words)
    return exam.answer(question, ask, exam.plain_paths)


@asks("other sequence", "does one sequence of the batch change the output of another?")
def other_sequence(exam: Examination, question: Question) -> Answer:
    inputs = exam.inputs()

    def ask(path: Path) -> Finding:
        def other(x: np.ndarray) -> np.ndarray:
            x = x.copy()
            x[1] = np.random.default_rng(SEED + 1).standard_normal(x[1].shape) * 10.0
            return x

        before, after = (
            exam.run(path, given).output[:1] for given in (inputs, mapped(inputs, other))
        )
        mixes, seen = change(before, after, path, range(TOKENS))
        return (
            Finding("leaks", Kind.BROKEN, f"sequence 1 is changed: {seen}")
            if mixes
            else Finding("apart")
        )

    return exam.answer(question, ask)


@asks(
    "weights",
    "are the returned attention weights those that were used?",
    lambda exam: "need_weights" in exam.subject.takes,
)
def weights(exam: Examination, question: Question) -> Answer:
    subject = exam.subject
    if error := exam.weights_refusal:
        return merge(subject, question, {replace(exam.base, need_weights=True): of_error(error)})
    use_values = "value" in subject.takes
    inputs = exam.inputs(TOKENS, TOKENS) if "key" in subject.takes else exam.inputs()
    if use_values and subject.is_layer:
        inputs = (*inputs[:2], np.random.default_rng(SEED + 4).standard_normal(inputs[1].shape))
    hidden = ~np.tri(TOKENS, dtype=bool) if exam.takes_mask else None

    def ask(path: Path) -> Finding:
        result = exam.run(path, inputs, hidden)
        attn_weights = result.attn_weights
        if attn_weights is None:
            return Finding("asked for, not given", Kind.BROKEN, "the attention weights are None")
        shape = attn_weights.shape
        if shape[-2:] != (TOKENS, TOKENS) or attn_weights.ndim not in (3, 4):
            return Finding(
                "of another shape", Kind.BROKEN, f"the attention weights have the shape {shape}"
            )
        kind = "per head" if attn_weights.ndim == 4 else "averaged"
        if np.isnan(attn_weights).any():
            return Finding(
                "NaN",
                Kind.BROKEN,
                f"attn_weights[0, 0] = {numbers(attn_weights.reshape(-1, TOKENS)[0])}",
            )
        if path.drops:
            return Finding(kind)
        eps = unit_of_rounding(path.dtype)
        sums = attn_weights.sum(axis=-1)
        if np.abs(sums - 1.0).max() > 8 * eps:
            seen = f"a row sums to {sums.flat[np.abs(sums - 1).argmax()]:.6g}"
            return Finding("rows do not sum to 1", Kind.BROKEN, seen)
        if hidden is not None and np.abs(attn_weights[..., hidden]).max() > 0.0:
            seen = f"a hidden key weighs {attn_weights[..., hidden].max():.6g}"
            return Finding("hidden keys weigh", Kind.BROKEN, seen)
        if not use_values or attn_weights.ndim != 4 or path.dtype != exam.base.dtype:
            return Finding(kind)
        error = _unexplained(exam, path, inputs, hidden, result)
        if error > max(1e-3, 2 * eps):  # outputs and weights were both rounded
            seen = f"weights @ values explains the output up to {error:.1%} of it only"
            return Finding("not those used", Kind.BROKEN, seen)
        return Finding(kind)

    return exam.answer(question, ask, [path for path in exam.paths if path.need_weights])


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


@asks("grouped heads", "which key/value head does each query head use?")
def grouped(exam: Examination, question: Question) -> Answer:
    subject, head_dim = exam.subject, exam.subject.head_dim
    groups = NUM_HEADS // NUM_KV_HEADS
    known = {
        "repeat": ([n // groups for n in range(NUM_HEADS)], Kind.KEPT),
        "tile": ([n % NUM_KV_HEADS for n in range(NUM_HEADS)], Kind.NOTE),
    }
    if subject.is_layer and not subject.has_groups:
        if subject.num_kv_heads is None:
            return question.not_offered
        return Answer(question.name, Kind.ABSENT, "not observable in a layer")
    # The values of key/value head g are g, for any input.
    inputs, layer = exam.inputs(), {}
    if subject.is_layer:
        layer = plain_layer(subject, NUM_KV_HEADS)
        layer["weights"]["v_proj.weight"][:] = 0.0
        layer["weights"]["v_proj.bias"][:] = np.repeat(np.arange(NUM_KV_HEADS), head_dim)
    else:
        query, key, value = inputs
        key, value = key[:, :NUM_KV_HEADS], np.zeros_like(value[:, :NUM_KV_HEADS])
        inputs = (query, key, value + np.arange(NUM_KV_HEADS)[:, None, None])

    def ask(path: Path) -> Finding:
        output = run(subject, path, inputs, **layer).output
        heads = (
            output[0, 0].reshape(NUM_HEADS, head_dim)[:, 0]
            if subject.is_layer
            else output[0, :, 0, 0]
        )
        seen = f"query heads 0 to {NUM_HEADS - 1} use key/value heads {np.round(heads, 2).tolist()}"
        for words, (order, kind) in known.items():
            if np.abs(heads - order).max() < 0.02:
                return Finding(words, kind, seen)
        return Finding("mixed", Kind.BROKEN, seen)

    about = f"{NUM_HEADS} query heads, {NUM_KV_HEADS} key/value heads"
    answer = exam.answer(question, ask, exam.plain_paths, about)
    if answer.kind is Kind.REFUSED and subject.num_kv_heads is not None:
        words, refusal = f"declared: {subject.num_kv_heads}, refused", answer.findings[exam.base]
        finding = Finding(words, Kind.BROKEN, refusal.with_reason, refusal.exception)
        return exam.only(question, finding, about)
    return answer
