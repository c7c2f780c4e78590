"""Facts about a record by plain arithmetic, without the diagnosis: where a bug shows, and that a
port is right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parity.measure.core.compare import unit_of_rounding
from parity.measure.core.problem import Problem
from parity.measure.core.stages import STAGES, stage_named
from parity.measure.core.trace import Reference
from wild.recordings import RECORDINGS
from wild.records import Bug, Recorded, Right

TOLERANCES = {"float32": (1e-4, 1e-5), "bfloat16": (3e-2, 3e-2), "float16": (5e-3, 5e-3)}
"""Relative and absolute tolerances, as in the tests of libraries."""

FLIPS = 5.0
"""Factor of the tolerances of 16 bits with a cache of 8 or 4 bits, in which a right key may be
rounded to the next number.
"""

ORDER = list(STAGES)

BACKWARD = (
    *("out_proj.weight", "out_proj.bias", "gate", "gate_proj.weight", "gate_proj.bias"),
    *("context", "attn_weights", "v", "scores", "bias", "q", "k"),
    *("q_norm.weight", "q_proj.weight", "q_proj.bias", "k_norm.weight", "k_proj.weight", "k_proj.bias"),
    *("v_proj.weight", "v_proj.bias", "query"),
)
"""Gradients in the order of the backward pass."""


@dataclass(frozen=True)
class Measured:
    """Where a bug shows, compared with the right port.

    Attributes:
        stage: the first stage that differs by more than ten times rounding.
        limited: the indices of that stage at which it does, by axis, unless they are all of its indices.
        in_output: whether any output does.
    """

    stage: str
    limited: dict[str, tuple[int, ...]]
    in_output: bool


def differs(actual: np.ndarray, expected: np.ndarray, dtype: str) -> np.ndarray:
    """Return which elements differ by more than ten units of rounding of the stage's size."""
    if actual.dtype == bool or actual.dtype.kind in "iu":
        return actual != expected
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    size = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    return ~same & ~(np.abs(actual - expected) <= 10 * unit_of_rounding(dtype) * size)


def in_order(names: Recorded) -> list[str]:
    """Return the stages in the order of the data flow, call by call; gradients in the order of the
    backward pass.
    """

    def position(name: str) -> tuple[int, int]:
        stage = stage_named(name)
        if stage.is_gradient:
            return 0, len(ORDER) + BACKWARD.index(stage.quantity)
        return stage.step or 0, ORDER.index(stage.kind)

    return sorted(names, key=position)


def measured(bug: Bug) -> Measured:
    """Measure where a bug shows in its recorded stages.

    Raises:
        AssertionError: if it shows nowhere.
    """
    record = RECORDINGS[bug.recording]
    wrong, right = (record(noted, bug.problem) for noted in (bug.recorded(), bug.right()))
    differences = {}
    for name in in_order(right):
        if wrong[name].shape != right[name].shape:
            return Measured(name, {}, in_output=True)
        if (bad := differs(wrong[name], right[name], bug.dtype)).any():
            differences[name] = bad
    if not differences:
        raise AssertionError(f"{bug.id} changes no stage")
    stage = next(iter(differences))
    letters, bad, limited = stage_named(stage).axes, differences[stage], {}
    for axis, letter in enumerate(letters):
        at = bad.any(axis=tuple(i for i in range(bad.ndim) if i != axis))
        if not at.all():
            limited[letter] = tuple(map(int, np.flatnonzero(at)))
    return Measured(stage, limited, any(name.endswith("output") for name in differences))


def real_rows(problem: Problem, step: int | None) -> np.ndarray:
    """Return which rows of an output belong to real tokens, (B, T)."""
    case = problem.case
    if step is not None and case.mask is not None:
        # A token of padding on the left attends to no key.
        rows = np.arange(case.seq_len) >= case.mask.all(axis=(1, 2)).sum(axis=1)[:, None]
        first = sum(case.chunks[:step])
        return rows[:, first : first + case.chunks[step]]
    if step is not None:
        return np.arange(case.chunks[step]) < np.array(case.added(step))[:, None]
    if case.key_padding_lengths is None or case.seq_len_k is not None:
        return np.ones((case.batch, case.seq_len), bool)
    return np.arange(case.seq_len) < np.array(case.key_padding_lengths)[:, None]


def is_right(right: Right) -> bool:
    """Return whether every output is close to the float64 reference, by `allclose` at the dtype's
    usual tolerance.
    """
    problem, noted = right.problem, right.recorded()
    expected = Reference(problem).accumulated
    relative, absolute = TOLERANCES[right.dtype]
    if problem.case.cache_quantization is not None and right.dtype != "float32":
        relative, absolute = FLIPS * relative, FLIPS * absolute
    outputs = [name for name in noted if stage_named(name).kind == "output"]
    return bool(outputs) and all(
        np.allclose(
            noted[name][rows].astype(np.float64), expected[name][rows].astype(np.float64), rtol=relative, atol=absolute
        )
        for name in outputs
        for rows in [real_rows(problem, stage_named(name).step)]
    )
