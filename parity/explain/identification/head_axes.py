"""Name the axes of an attention in a program: sequences, heads, tokens and features.

The names are `b` for sequences, `t` for query tokens, `s` for key tokens, `h` for features, and for
each axis of heads its index among the axes of queries.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mha_spec import InputError
from parity.explain.identification.attention_finder import Attention, Linear
from parity.explain.identification.evaluated import AxisProbe, EvaluatedProgram
from parity.explain.identification.fit import LEAST_TOKENS

TOKENS = {"q": "t", "k": "s", "v": "s"}
"""Names of the token axes of queries, keys and values."""

HEADS_OF_ALL_GROUPS = "heads"
"""Name of the axis of heads of scores whose order no axis of queries shows."""

Axes = dict[str, int]
"""Axes of a value, by name."""


def input_of(evaluated: EvaluatedProgram, projection: Linear) -> int:
    """Return the number of the input of a projection, (B, T, features).

    Raises:
        ValueError: if it has a wrong shape, or too few tokens.
    """
    number = projection.input
    while len(evaluated.shape(number)) != 3:
        operation = evaluated.program.producer.get(number)
        if operation is None or operation.name != "reshape":
            rule = "be tokens of sequences, (B, T, features)"
            raise InputError("inputs", rule, f"{evaluated.shape(number)}")
        number = operation.inputs[0]
    batch_size, num_tokens, _ = evaluated.shape(number)
    if batch_size < 2 or num_tokens < LEAST_TOKENS:
        rule = f"be at least {LEAST_TOKENS} tokens of 2 sequences"
        raise InputError("inputs", rule, f"{num_tokens} of {batch_size}")
    return number


def is_exchanged(probe: AxisProbe, attention: Attention, inputs: Mapping[str, int]) -> bool:
    """Return whether the softmax is over the tokens of the first operand, which then is the keys.

    Raises:
        ValueError: if the softmax is not over one axis.
    """
    evaluated = probe.evaluated
    weights = evaluated.array(attention.weights)
    sums_to_1 = []
    for axis, size in enumerate(weights.shape):
        if size > 1 and np.allclose(weights.sum(axis), 1.0, atol=1e-4):
            sums_to_1.append(axis)
    operand = attention.operands["q"]
    token_axis = probe.follow(inputs["q"], 1, operand)
    has_shape_of_logits = weights.shape == evaluated.shape(attention.logits)
    if len(sums_to_1) != 1 or token_axis is None or not has_shape_of_logits:
        raise InputError("attn_weights", "be a softmax over keys", f"numbers of {weights.shape}")
    return probe.follow(operand, token_axis, attention.logits) == sums_to_1[0]


def name_axes(probe: AxisProbe, attention: Attention, inputs: Mapping[str, int]) -> dict[str, Axes]:
    """Return the axes of each stage by name.

    Raises:
        ValueError: if a value is not arranged as in attention; the message names it.
    """
    evaluated, numbers = probe.evaluated, attention.numbers
    contracted, shared = _axes_of_product(evaluated, attention)
    q_axes = _axes_of_tokens(probe, inputs["q"], numbers["q"], TOKENS["q"])
    k_axes = _axes_of_tokens(probe, inputs["k"], numbers["k"], TOKENS["k"])
    v_axes = _axes_of_tokens(probe, inputs["v"], numbers["v"], TOKENS["v"])
    if len(contracted) != 1 or q_axes is None or k_axes is None or v_axes is None:
        rule = "have axes for sequences and tokens"
        raise InputError("heads", rule, f"queries of {evaluated.shape(numbers['q'])}")
    ((q_axes["h"], k_axes["h"]),) = contracted.items()
    _name_axes_of_heads(q_axes, k_axes, shared, len(evaluated.shape(numbers["q"])))

    axes = {"q": q_axes, "k": k_axes, "v": v_axes}
    for part in ("scores", "logits", "context"):
        axes[part] = _axes_from_queries(probe, q_axes, numbers["q"], numbers[part])
    for part in ("scores", "logits"):
        axis = probe.follow_if_wide(numbers["k"], k_axes["s"], numbers[part])
        if axis is not None:
            axes[part]["s"] = axis
    _name_axes_of_values(probe, attention, v_axes, axes["context"])
    axes["attn_weights"] = dict(axes["logits"])

    for part, axes_of_part in axes.items():
        _complete(part, axes_of_part, evaluated.shape(numbers[part]))
    return axes


def _axes_of_product(
    evaluated: EvaluatedProgram, attention: Attention
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the contracted axes of queries and keys, and the batch axes that they share: the axes
    of keys by the axes of queries.
    """
    product = evaluated.program.producer[attention.scores]
    (left_sums, right_sums), (left_batch, right_batch) = product.params["dimension_numbers"]
    if product.inputs[0] == attention.operands["q"]:
        sums = zip(left_sums, right_sums, strict=True)
        batch = zip(left_batch, right_batch, strict=True)
    else:
        sums = zip(right_sums, left_sums, strict=True)
        batch = zip(right_batch, left_batch, strict=True)
    return dict(sums), dict(batch)


def _axes_of_tokens(probe: AxisProbe, source: int, target: int, token: str) -> Axes | None:
    """Return the axes of sequences and tokens of an operand, whose input is (B, T, features)."""
    batch_axis = probe.follow(source, 0, target)
    token_axis = probe.follow(source, 1, target)
    if batch_axis is None or token_axis is None:
        return None
    return {"b": batch_axis, token: token_axis}


def _name_axes_of_heads(
    q_axes: Axes, k_axes: Axes, shared: Mapping[int, int], num_axes: int
) -> None:
    """Add the remaining axes of queries, and those that keys share."""
    named = set(q_axes.values())
    remaining = [axis for axis in range(num_axes) if axis not in named]
    for axis in remaining:
        if axis in shared:
            q_axes[str(axis)] = axis
            k_axes[str(axis)] = shared[axis]
    # The axes of groups, which keys lack, come last: heads of one group are neighbors.
    for axis in remaining:
        if axis not in shared:
            q_axes[str(axis)] = axis


def _axes_from_queries(probe: AxisProbe, q_axes: Axes, queries: int, target: int) -> Axes:
    """Return the axes of a stage that belong to axes of queries."""
    axes = {}
    for name, axis in q_axes.items():
        if name == "h":
            continue
        target_axis = probe.follow_if_wide(queries, axis, target)
        if target_axis is not None:
            axes[name] = target_axis
    return axes


def _name_axes_of_values(
    probe: AxisProbe, attention: Attention, v_axes: Axes, context_axes: Axes
) -> None:
    """Add the axes of values that the context has: its heads and the features."""
    name_of = {axis: name for name, axis in context_axes.items()}
    values = attention.operands["v"]
    for axis in range(len(probe.evaluated.shape(values))):
        if axis in v_axes.values():
            continue
        context_axis = probe.follow_if_wide(values, axis, attention.context)
        if context_axis is None:
            continue
        name = name_of.get(context_axis, "h")
        v_axes[name] = axis
        context_axes.setdefault(name, context_axis)


def _complete(part: str, axes: Axes, shape: tuple[int, ...]) -> None:
    """Name the axis of heads of a softmax if it is the only axis without a name, and check that
    all are named.

    Raises:
        ValueError: if an axis has no name, or two.
    """
    named = set(axes.values())
    unnamed = [axis for axis, size in enumerate(shape) if axis not in named and size > 1]
    has_heads = any(name.isdigit() for name in axes)  # axes of heads are named by numbers
    if part in ("logits", "attn_weights") and len(unnamed) == 1 and not has_heads:
        axes[HEADS_OF_ALL_GROUPS] = unnamed.pop()
    has_more_than_sequences = "b" in axes and len(axes) > 1
    if unnamed or len(set(axes.values())) < len(axes) or not has_more_than_sequences:
        rule = "have axes for sequences, heads and tokens"
        raise InputError(part, rule, f"axes of {shape}")


def as_heads(x: np.ndarray, axes: Axes) -> np.ndarray:
    """Return a value as (B, heads, T, features or keys), by the names of its axes."""
    last = [axes[name] for name in ("t", "s", "h") if name in axes]
    of_heads = [axis for name, axis in axes.items() if name not in ("b", "t", "s", "h")]
    ordered = [axes["b"], *of_heads, *last]
    single = [axis for axis in range(x.ndim) if axis not in ordered]  # a single index each
    x = x.transpose(*single, *ordered)
    batch_size = x.shape[len(single)]
    return x.reshape(batch_size, -1, *x.shape[-len(last) :])
