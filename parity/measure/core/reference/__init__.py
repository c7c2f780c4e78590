"""Reference: attention in NumPy, directly from the formulas, in float64.

It shares no code with the implementations. The same code runs in float32, bfloat16 and float16,
with sums in float32, and in the arithmetic of the hardware. This is the same-precision reference,
whose error against float64 measures the rounding of a correct implementation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parity.measure.core.problem import Problem
from parity.measure.core.reference.arithmetic import ARITHMETICS, MANTISSA, UNFUSED, Arithmetic
from parity.measure.core.reference.backward import STAGES_BETWEEN, Backward
from parity.measure.core.reference.blocks import BLOCK, without_scores
from parity.measure.core.reference.layer import Layer
from parity.measure.core.stages import Step
from parity.measure.core.weights import dtype_named

__all__ = [
    "ARITHMETICS",
    "BLOCK",
    "MANTISSA",
    "STAGES_BETWEEN",
    "UNFUSED",
    "Arithmetic",
    "Backward",
    "Layer",
    "gradient_magnitudes",
    "gradients",
    "steps",
    "without_scores",
]


def steps(problem: Problem, dtype: str, arithmetic: str = "ieee") -> Sequence[Step]:
    """Return the stages of a problem as functions, in the order of the data flow."""
    return Layer(problem, Arithmetic(dtype_named(dtype), arithmetic)).steps()


def gradients(
    problem: Problem, dtype: str, *, fused: bool = False, with_stages: bool = False
) -> dict[str, np.ndarray]:
    """Return gradients of sum(output * cotangent) by the chain rule.

    Their names are `grad.query`, `grad.q_proj.weight`, …, in the order of the backward data flow.

    Args:
        problem: problem to differentiate.
        dtype: dtype of the computation.
        fused: recompute scores in a different order of summation, and attention weights as
            exp(score - log sum exp), like fused kernels, which do not store them. In float64 this
            makes no difference. In float32 the two roundings of a score no longer cancel: with
            logits of 70,000 a weight of 1 becomes 1 +- 0.02.
        with_stages: also return gradients of stages, such as `grad.scores`.
    """
    layer = Layer(problem, Arithmetic(dtype_named(dtype)))
    return Backward(layer, fused=fused).gradients(with_stages=with_stages)


def gradient_magnitudes(problem: Problem, *, with_stages: bool = False) -> dict[str, np.ndarray]:
    """Return the gradients with all terms of all sums and differences made positive.

    Rounding is relative to these instead of the gradients: the gradient of a key's bias, for
    example, is always 0 because its terms cancel, and an implementation returns the rounding errors
    of these terms.
    """
    layer = Layer(problem, Arithmetic(np.dtype(np.float64)))
    return Backward(layer, magnitude=True).gradients(with_stages=with_stages)
