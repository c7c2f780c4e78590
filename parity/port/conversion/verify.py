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
from parity.measure.core.compare import Comparison, Label, compare, kept_dtype
from parity.measure.core.problem import Problem, make_problem
from parity.measure.core.stages import run_steps
from parity.measure.core.weights import Weights, is_floating, unheld, weight_shapes


@np.errstate(over="ignore", invalid="ignore")  # infinities from weights are compared as differences
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
    mine, theirs = probe(weights, spec, other, other_spec)
    dtype = mine.dtype
    actual = run_steps(reference.steps(theirs, "float64"))
    expected = run_steps(reference.steps(mine, "float64"))
    same_precision = run_steps(reference.steps(mine, dtype if dtype != "float64" else "float32"))
    return [
        compare(
            actual[stage].astype(kept_dtype(stage, dtype)),
            expected[stage]
            .astype(kept_dtype(stage, dtype))
            .astype(np.float64),  # so that equal weights differ by 0
            same_precision[stage],
            Label("verify", "the other", dtype, stage),
        )
        for stage in ("q", "k", "v", "scores", "attn_weights", "context", "output")
    ]


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
    order = ("bfloat16", "float16", "float32", "float64")
    arrays = (array for held in (weights, other) for array in held.values())
    dtype = min({array.dtype.name for array in arrays if is_floating(array.dtype)}, key=order.index)
    case = probe_case("verify", spec)
    return make_problem(case, dtype, weights), make_problem(case, dtype, other)


def with_biases(
    weights: Weights, spec: AttentionSpec, other_spec: AttentionSpec
) -> tuple[Weights, AttentionSpec]:
    """Add zero biases to a layer if only the other one has biases; the function stays the same."""
    biases = tuple(map(any, zip(spec.qkv_biases, other_spec.qkv_biases, strict=True)))
    with_all = replace(unheld(spec), qkv_bias=biases, out_bias=spec.out_bias or other_spec.out_bias)
    dtype = next(iter(weights.values())).dtype if weights else np.dtype(np.float32)
    added = {
        name: shape
        for name, shape in weight_shapes(with_all).items()
        if name not in weight_shapes(spec)
    }
    return {**weights, **{name: np.zeros(shape, dtype) for name, shape in added.items()}}, with_all


def check_alike(spec: AttentionSpec, other_spec: AttentionSpec) -> AttentionSpec:
    """Return the specification that two layers share, without fields that weights do not show, or
    reject them.
    """
    spec, other_spec = unheld(spec), unheld(other_spec)
    if spec != other_spec:
        fields, other_fields = spec.values(), other_spec.values()
        differ = [name for name in fields if fields[name] != other_fields[name]]
        words = ", ".join(f"{name}={fields[name]} and {other_fields[name]}" for name in differ)
        rope = spec.rope or other_spec.rope
        if differ == ["rope"] and rope is not None and None in (spec.rope, other_spec.rope):
            theta = f"--rope-theta {rope.theta:g}, or rope=Rope({rope.theta:g}),"
            words += (
                f"; {theta if rope == Rope(rope.theta) else 'rope=Rope(…), from Python,'} sets "
                f"it for the other"
            )
        raise InputError("the layers", "have the same specification to be compared", words)
    return spec


def probe_case(name: str, spec: AttentionSpec, *, is_causal: bool | None = None) -> Case:
    """Return a case of a few tokens: causal self-attention, or cross-attention if keys have another
    width.
    """
    is_cross = spec.d_kv != spec.d_in
    causal = not is_cross if is_causal is None else is_causal
    return Case(
        name, spec, "probe inputs", seq_len=19, seq_len_k=23 if is_cross else None, is_causal=causal
    )


def same_array(array: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays have equal shapes, dtypes and bits."""
    return (array.dtype, array.shape) == (
        other.dtype,
        other.shape,
    ) and array.tobytes() == other.tobytes()


def same_bits(weights: Weights, other: Weights) -> bool:
    """Return whether two sets of weights have equal names, dtypes and bits."""
    return weights.keys() == other.keys() and all(
        same_array(array, other[name]) for name, array in weights.items()
    )
