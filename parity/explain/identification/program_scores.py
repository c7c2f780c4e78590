"""Fit the constants of a program between queries and keys and the softmax: scale and soft cap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mha_spec import InputError
from parity.explain.identification.attention_finder import Attention
from parity.explain.identification.biases import scored
from parity.explain.identification.evaluated import EvaluatedProgram, shortest_decimal
from parity.explain.identification.program import Operation
from parity.explain.identification.trace import CLOSE

HIDES = 5000.0
"""Smallest decrease of a score that the mask hides."""


class ScaledOperand(NamedTuple):
    """Queries or keys with scalar factors.

    Attributes:
        scale: product of the factors.
        unscaled: number of the value before each multiplication, by the number of the product.
    """

    scale: float
    unscaled: dict[int, int]


class ScoreFactors(NamedTuple):
    """Factors that turn products of queries and keys into scores.

    Attributes:
        factor: scalar factor of the products.
        soft_cap: bound of the scores, or None.
    """

    factor: float
    soft_cap: float | None


def scaled_operand(evaluated: EvaluatedProgram, operand: int) -> ScaledOperand:
    """Return the last scalar factors of queries or keys."""
    program = evaluated.program
    number, scale = operand, 1.0
    unscaled: dict[int, int] = {}
    while number in program.producer:
        operation = program.producer[number]
        moved = program.moved_from(operation)
        if moved is not None:
            number = moved
            continue
        product = evaluated.scalar_product(operation)
        if product is None:
            break
        number = product.source
        unscaled[operation.outputs[0]] = product.source
        scale *= product.factor
    return ScaledOperand(scale, unscaled)


def fit_score_factors(
    evaluated: EvaluatedProgram,
    attention: Attention,
    scores: np.ndarray,
    logits: np.ndarray,
    weights: np.ndarray,
) -> ScoreFactors:
    """Return the scalar factor of products, and the soft cap; biases are fitted later.

    Args:
        evaluated: the program with the values of a call.
        attention: the attention.
        scores: products of queries and keys, (B, heads, T, S), in float64.
        logits: input of the softmax.
        weights: output of the softmax.

    Raises:
        ValueError: if the weights are not a softmax of scores.
    """
    if scores.shape != logits.shape:
        rule = "be a softmax over keys alone, without sinks"
        raise InputError("attn_weights", rule, f"scores of {logits.shape}")
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    softmax = exponentials / exponentials.sum(-1, keepdims=True)
    if np.abs(softmax - weights).max() > CLOSE:
        raise InputError("attn_weights", "be the softmax of scores", "a different function of them")
    caps: list[float | None] = list(_tanh_factors(evaluated, attention))
    for cap in caps or [None]:
        factor = _factor_between(scores, logits, cap)
        if factor is not None:
            return ScoreFactors(factor, cap)
    # Scores are processed further, for example by adding a bias.
    return ScoreFactors(_first_factor(evaluated, attention), None)


def _factor_between(scores: np.ndarray, logits: np.ndarray, cap: float | None) -> float | None:
    """Return the factor that turns all products into logits, unless these are hidden; else None."""
    is_large = np.abs(scores) > 0.1 * np.abs(scores).max()
    shown = (logits > -HIDES) & is_large
    with np.errstate(all="ignore"):
        uncapped = logits
        if cap is not None:
            uncapped = cap * np.arctanh(logits / cap)
        ratios = (uncapped / scores)[shown]
    ratios = ratios[np.isfinite(ratios)]
    if not ratios.size:
        return None
    factor = float(np.median(ratios))
    if factor <= 0:
        return None
    expected = scored(scores, factor, cap)
    is_equal = np.abs(expected - logits) <= CLOSE * np.abs(logits[shown]).max(initial=0.0)
    is_hidden = logits < expected - HIDES
    if (is_equal | is_hidden).all():
        return factor
    return None


def _first_factor(evaluated: EvaluatedProgram, attention: Attention) -> float:
    """Return the first scalar factor of products."""
    program = evaluated.program
    before_softmax = program.ancestors([attention.logits])
    number, factor = attention.scores, 1.0
    while True:
        consumers: list[Operation] = []
        for operation in program.consumers.get(number, ()):
            if not before_softmax.isdisjoint(operation.outputs):
                consumers.append(operation)
        if len(consumers) != 1:
            return factor
        (operation,) = consumers
        if program.moved_from(operation) != number:
            product = evaluated.scalar_product(operation)
            if product is None:
                return factor
            factor *= product.factor
        number = operation.outputs[0]


def _tanh_factors(evaluated: EvaluatedProgram, attention: Attention) -> Iterator[float]:
    """Yield the scalar factors of a tanh of scores."""
    program = evaluated.program
    for number in program.ancestors([attention.logits], [attention.scores]):
        producer = program.producer.get(number)
        if producer is None or producer.name != "tanh":
            continue
        for operation in program.consumers.get(number, ()):
            product = evaluated.scalar_product(operation)
            if operation.name == "mul" and product is not None:
                yield shortest_decimal(product.factor)
