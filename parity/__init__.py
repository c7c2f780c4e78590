"""Copies attention weights between JAX, PyTorch and TTNN, and proves that they agree or says where they do not."""

from parity.backends import load_into, weights_of
from parity.compare import Comparison, first_difference
from parity.convert import convert, convert_file, load, save
from parity.layouts import LAYOUTS, Layout
from parity.numerics import numerics_lock
from parity.problem import Problem, make_problem
from parity.run import Report, run_cases
from parity.spec import CASES, STAGES, AttentionSpec, Case, random_case
from parity.verify import verify
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
    "LAYOUTS",
    "STAGES",
    "AttentionSpec",
    "Case",
    "Comparison",
    "Layout",
    "Problem",
    "Report",
    "check_weights",
    "convert",
    "convert_file",
    "first_difference",
    "load",
    "load_into",
    "load_tensors",
    "load_weights",
    "make_problem",
    "numerics_lock",
    "random_case",
    "random_weights",
    "run_cases",
    "save",
    "save_tensors",
    "save_weights",
    "verify",
    "weight_shapes",
    "weights_of",
]
