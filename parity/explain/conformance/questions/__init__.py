"""The questions, each a function, grouped by topic."""

from parity.explain.conformance.answers import Question
from parity.explain.conformance.questions import (
    cache,
    dropout,
    empty_rows,
    heads,
    masks,
    not_finite,
    numerics,
)

QUESTIONS: dict[str, Question] = {
    question.name: question
    for question in (
        heads.attends,
        masks.mask,
        masks.causal,
        masks.causal_and_mask,
        masks.future_token,
        masks.masked_key,
        masks.padding,
        heads.other_sequence,
        not_finite.visible_nan,
        not_finite.hidden_nan,
        empty_rows.empty_row,
        empty_rows.empty_row_gradient,
        heads.weights,
        heads.grouped,
        dropout.dropout,
        numerics.scale,
        numerics.overflow,
        numerics.strided,
        numerics.agreement,
        cache.cache,
    )
}
"""The columns of the matrix, by name."""
