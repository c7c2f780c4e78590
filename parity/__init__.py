"""Copies attention weights between JAX, PyTorch and TTNN, and proves that they agree or says where they do not."""

from parity.backends import load_into, weights_of
from parity.compare import Comparison, first_difference
from parity.numerics import numerics_lock
from parity.problem import Problem, make_problem
from parity.run import Report, run_cases
from parity.spec import CASES, STAGES, AttentionSpec, Case, random_case
from parity.weights import (
    check_weights,
    load_tensors,
    load_weights,
    random_weights,
    save_tensors,
    save_weights,
    weight_shapes,
)

__all__ = [
    "CASES",
    "STAGES",
    "AttentionSpec",
    "Case",
    "Comparison",
    "Problem",
    "Report",
    "check_weights",
    "first_difference",
    "load_into",
    "load_tensors",
    "load_weights",
    "make_problem",
    "numerics_lock",
    "random_case",
    "random_weights",
    "run_cases",
    "save_tensors",
    "save_weights",
    "weight_shapes",
    "weights_of",
]
