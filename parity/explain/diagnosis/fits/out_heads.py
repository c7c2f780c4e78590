"""Patterns of out_proj: its columns, or its rows, have the heads in a different order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.bugs.sites import for_names
from parity.explain.diagnosis.fits.changes import MOST_HEADS
from parity.explain.diagnosis.fits.numbers import StageTrial
from parity.explain.diagnosis.fits.record import Difference
from parity.measure.core.problem import Problem
from parity.measure.core.stages import Stage

MOST_EQUATIONS = 4096
"""The number of values of an output from which an order is fitted; all values verify it."""


def out_heads(trial: StageTrial, problem: Problem) -> Iterator[Edit]:
    """Yield the order of heads in the columns, or in the rows, of out_proj that would explain the
    output.
    """
    difference, spec = trial.difference, problem.spec
    is_output = difference.stage.quantity == "output" and not difference.stage.path
    if not (is_output and spec.out_proj and 1 < spec.num_heads <= MOST_HEADS):
        return
    if not np.isfinite(difference.actual).all():
        return
    orders = (
        ("columns", "weight", _order_of_columns(difference, problem)),
        ("rows", "weight", _order_of_rows(difference, problem, with_bias=False)),
        ("rows", "weight bias", _order_of_rows(difference, problem, with_bias=True)),
    )
    for axis_name, leaves, order in orders:
        if order is None:
            continue
        names = [f"out_proj.{leaf}" for leaf in leaves.split()]
        axis = 1 if axis_name == "columns" else 0
        change = Edit(
            overrides={"parameter": for_names(names, partial(_with_blocks_in_order, order, axis))}
        )
        if not trial.explains(change):
            continue
        words = " ".join(map(str, order))
        yield difference.pattern(
            "heads",
            f"the {axis_name} of out_proj are permuted by heads: they are in the order {words}",
            {"axis": axis_name, "order": order.tolist()},
            len(order),
            families=(of.HEAD_ORDER,),
            injected=change,
        )
        return


def _with_blocks_in_order(
    order: np.ndarray, axis: int, _: Any, original: Any, name: str
) -> np.ndarray:
    """Return a weight whose axis consists of blocks, one for each head, in an order."""
    weight = original(name)
    blocks = np.split(weight, len(order), axis=axis)
    return np.concatenate([blocks[index] for index in order], axis=axis)


# ---- Columns -------------------------------------------------------------------------------------


def _order_of_columns(difference: Difference, problem: Problem) -> np.ndarray | None:
    """Return, for each head of the context, the head whose columns multiply it; None if each has
    its own, or these are no order.

    The output is the sum of one product for each head. The products of every head with the columns
    of every other are fitted to it by least squares: the factors of an order are 0 and 1.
    """
    spec = problem.spec
    context = difference.other_stages.get(str(Stage("context", step=difference.stage.step)))
    if context is None or spec.gate is not None or spec.context_norm is not None:
        return None
    num_heads = spec.num_heads
    num_rows = difference.actual.shape[0] * difference.actual.shape[1]
    num_features = difference.actual.shape[2]
    if num_rows * num_features < 2 * num_heads**2:
        return None
    heads = context.astype(np.float64).swapaxes(0, 1).reshape(num_heads, num_rows, -1)
    columns = np.split(problem.weights["out_proj.weight"].astype(np.float64), num_heads, axis=1)
    # An odd step takes other features of every row.
    step = max(1, num_rows * num_features // MOST_EQUATIONS) | 1
    products = []
    for head in heads:
        products += [(head @ of_head.T).reshape(-1)[::step] for of_head in columns]
    target = _without_bias(difference.actual, problem).reshape(-1)[::step]
    factors = np.linalg.lstsq(np.stack(products, axis=1), target)[0]
    return _as_order(factors.reshape(num_heads, num_heads).argmax(axis=1))


def _without_bias(output: np.ndarray, problem: Problem) -> np.ndarray:
    bias = problem.weights.get("out_proj.bias")
    if bias is None:
        return output
    return output - bias.astype(np.float64)


# ---- Rows ----------------------------------------------------------------------------------------


def _order_of_rows(
    difference: Difference, problem: Problem, *, with_bias: bool
) -> np.ndarray | None:
    """Return, for each block of features of an output, the nearest block of the expected ones,
    without the bias or with it; None if each is nearest to its own, or these are no order.
    """
    num_heads = problem.spec.num_heads
    num_features = difference.actual.shape[2]
    has_bias = "out_proj.bias" in problem.weights
    if num_features % num_heads or (with_bias and not has_bias):
        return None
    actual, expected = difference.actual, difference.expected
    if not with_bias:
        actual, expected = _without_bias(actual, problem), _without_bias(expected, problem)
    actual_blocks = np.split(actual, num_heads, axis=2)
    expected_blocks = np.array(np.split(expected, num_heads, axis=2))
    nearest = []
    for block in actual_blocks:
        distances = ((expected_blocks - block) ** 2).sum(axis=(1, 2, 3))
        nearest.append(int(distances.argmin()))
    return _as_order(np.array(nearest))


def _as_order(nearest: np.ndarray) -> np.ndarray | None:
    """Return the nearest heads if they are an order other than the right one; else None."""
    right_order = np.arange(len(nearest))
    is_order = np.array_equal(np.sort(nearest), right_order)
    if not is_order or np.array_equal(nearest, right_order):
        return None
    return nearest
