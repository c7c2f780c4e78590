"""Compare two sets of weights by running both through the reference, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, InputError, Rope
from parity.measure.core import reference
from parity.measure.core.arrays import to_numpy_by_name
from parity.measure.core.case import Case
from parity.measure.core.compare import Comparison, Label, compare, dtype_of_stage
from parity.measure.core.problem import Problem, make_problem
from parity.measure.core.stages import run_steps
from parity.measure.core.weights import Weights, is_floating, unheld, weight_shapes

NARROW_FIRST = ("bfloat16", "float16", "float32", "float64")
"""Dtypes of weights, those with fewer bits of mantissa first."""

STAGES_TO_COMPARE = ("q", "k", "v", "scores", "attn_weights", "context", "output")
"""Stages that every layer has, in the order of the computation."""


# Infinities from weights are compared as differences.
@np.errstate(over="ignore", invalid="ignore")
def verify(
    weights: Mapping[str, Any],
    spec: AttentionSpec,
    other: Mapping[str, Any],
    other_spec: AttentionSpec,
) -> list[Comparison]:
    """Compare two layers on probe inputs, stage by stage, in the narrower of their dtypes.

    Stages show where two layers diverge, not whether every weight is equal: see `compare_weights`.

    Args:
        weights, spec: canonical weights, as arrays of any framework, and the layer.
        other, other_spec: weights and layer to compare.

    Returns:
        A comparison for each stage, with `weights` as the reference.

    Raises:
        ValueError: if the layers differ in more than their weights; biases that only one has count
            as weights.
    """
    problem, other_problem = probe(weights, spec, other, other_spec)
    dtype = problem.dtype
    same_dtype = dtype
    if dtype == "float64":
        same_dtype = "float32"
    actual = run_steps(reference.steps(other_problem, "float64"))
    expected = run_steps(reference.steps(problem, "float64"))
    same_precision = run_steps(reference.steps(problem, same_dtype))
    comparisons: list[Comparison] = []
    for stage in STAGES_TO_COMPARE:
        stage_dtype = dtype_of_stage(stage, dtype)
        # Both are rounded, so that equal weights differ by 0.
        rounded = expected[stage].astype(stage_dtype).astype(np.float64)
        label = Label("verify", "the other", dtype, stage)
        comparisons.append(
            compare(actual[stage].astype(stage_dtype), rounded, same_precision[stage], label)
        )
    return comparisons


def probe(
    weights: Mapping[str, Any],
    spec: AttentionSpec,
    other: Mapping[str, Any],
    other_spec: AttentionSpec,
) -> tuple[Problem, Problem]:
    """Make probe inputs for two supposedly equal layers, with the weights of each."""
    weights, with_all = with_biases(to_numpy_by_name(weights), spec, other_spec)
    other, other_with_all = with_biases(to_numpy_by_name(other), other_spec, spec)
    spec = check_alike(with_all, other_with_all)
    dtypes: list[str] = []
    for array in (*weights.values(), *other.values()):
        if is_floating(array.dtype):
            dtypes.append(array.dtype.name)
    dtype = min(dtypes, key=NARROW_FIRST.index)
    case = _probe_case(spec)
    return make_problem(case, dtype, weights), make_problem(case, dtype, other)


def with_biases(
    weights: Weights, spec: AttentionSpec, other_spec: AttentionSpec
) -> tuple[Weights, AttentionSpec]:
    """Add zero biases to a layer if only the other one has biases; the function stays the same."""
    pairs = zip(spec.qkv_biases, other_spec.qkv_biases, strict=True)
    qkv_bias = tuple(own or of_other for own, of_other in pairs)
    out_bias = spec.out_bias or other_spec.out_bias
    with_all = replace(unheld(spec), qkv_bias=qkv_bias, out_bias=out_bias)
    dtype = np.dtype(np.float32)
    if weights:
        first = next(iter(weights))
        dtype = weights[first].dtype
    own_names = weight_shapes(spec)
    with_zeros = dict(weights)
    for name, shape in weight_shapes(with_all).items():
        if name not in own_names:
            with_zeros[name] = np.zeros(shape, dtype)
    return with_zeros, with_all


def check_alike(spec: AttentionSpec, other_spec: AttentionSpec) -> AttentionSpec:
    """Return the specification that two layers share, without fields that weights do not show, or
    reject them.
    """
    spec, other_spec = unheld(spec), unheld(other_spec)
    if spec == other_spec:
        return spec
    fields, other_fields = spec.values(), other_spec.values()
    different = [name for name in fields if fields[name] != other_fields[name]]
    words = ", ".join(f"{name}={fields[name]} and {other_fields[name]}" for name in different)
    if different == ["rope"] and None in (spec.rope, other_spec.rope):
        words += _advice_on_rope(spec.rope or other_spec.rope)
    raise InputError("the layers", "have the same specification to be compared", words)


def _advice_on_rope(rope: Rope | None) -> str:
    """Return how a caller passes the RoPE of one layer for the other, which has none."""
    option = "rope=Rope(…), from Python,"
    if rope is not None and rope == Rope(rope.theta):  # the command line has only its base
        option = f"--rope-theta {rope.theta:g}, or rope=Rope({rope.theta:g}),"
    return f"; {option} sets it for the other"


def _probe_case(spec: AttentionSpec) -> Case:
    """Return a case of a few tokens: causal self-attention, or cross-attention if keys have a
    different width.
    """
    is_cross = spec.d_kv != spec.d_in
    # Few tokens are fast. Their numbers are arbitrary; they differ, so that swapped axes show.
    seq_len_k = None
    if is_cross:
        seq_len_k = 23
    return Case(
        "verify", spec, "probe inputs", seq_len=19, seq_len_k=seq_len_k, is_causal=not is_cross
    )
