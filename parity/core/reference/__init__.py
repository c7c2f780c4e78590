"""The specification itself: attention in NumPy, written straight from the formulas, in float64.

It shares no code with the siblings. The same lines run in float32, bfloat16 and float16, with sums in float32, and in
the arithmetic of the hardware: that is the same-precision reference, whose error against float64 says how much rounding
a correct implementation may show.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parity.core.problem import Problem
from parity.core.reference.arithmetic import ARITHMETICS, MANTISSA, UNFUSED, Arithmetic
from parity.core.reference.backward import Backward
from parity.core.reference.blocks import BLOCK, without_scores
from parity.core.reference.layer import Layer
from parity.core.reference.remembered import Remembered
from parity.core.stages import Step
from parity.core.weights import dtype_named

__all__ = [
    "ARITHMETICS",
    "BLOCK",
    "MANTISSA",
    "UNFUSED",
    "Arithmetic",
    "Layer",
    "Remembered",
    "gradient_magnitudes",
    "gradients",
    "steps",
    "without_scores",
]


def steps(problem: Problem, dtype: str, arithmetic: str = "ieee") -> Sequence[Step]:
    """The stages of a problem as functions, in the order of the data flow, computed in a dtype and an arithmetic."""
    return Layer(problem, Arithmetic(dtype_named(dtype), arithmetic)).steps()


def gradients(problem: Problem, dtype: str, *, fused: bool = False) -> dict[str, np.ndarray]:
    """Gradients of sum(output * cotangent) by the chain rule: `grad.query`, `grad.q_proj.weight`, …

    Args:
        problem: what to differentiate.
        dtype: what to compute in.
        fused: recompute the scores, summed in another order, and from them the attention weights as exp(score - log sum
            exp), as fused kernels do because they never store them. In float64 that is the same. In float32 the two
            roundings of a score no longer cancel: where logits reach 70 000 a weight of 1 becomes 1 +- 0.02.
    """
    return Backward(Layer(problem, Arithmetic(dtype_named(dtype))), fused=fused).gradients()


def gradient_magnitudes(problem: Problem) -> dict[str, np.ndarray]:
    """The gradients with every term of every sum and difference taken as positive.

    Rounding is relative to these, not to the gradients: the gradient of a key's bias, for one, is 0 whatever the input,
    because its terms cancel, and what an implementation gives in its place is the rounding of those terms.
    """
    return Backward(Layer(problem, Arithmetic(np.dtype(np.float64))), magnitude=True).gradients()
