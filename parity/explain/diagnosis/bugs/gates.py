"""Bugs in the gate of the context."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.explain.diagnosis.bugs.families import GATE
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.bugs.sites import after, packed
from parity.measure.core.case import Case


def gates(case: Case) -> Iterator[Edit]:
    spec = case.spec
    if spec.gate is None:
        return
    bug = GATE.shown_in("output")
    yield bug("gate-missing", "the context is not gated", {"openness": after(np.ones_like)})
    yield bug(
        "gate-without-sigmoid",
        "the context is multiplied by the output of gate_proj instead of its sigmoid",
        {"openness": after(_before_sigmoid)},
    )
    if not spec.gate.per_head and spec.num_heads > 1 and spec.gate.bias == spec.qkv_biases[0]:
        yield bug(
            "gate-read-as-halves",
            "a weight with queries and gate per head is read as all queries, then all gates",
            packed(("q_proj", "gate_proj"), spec.num_heads, ("weight", "bias"), by_head=True),
            fix="split the packed weight into heads first, and each head into queries and gate",
            stages=("q",),
        )


def _before_sigmoid(openness: np.ndarray) -> np.ndarray:
    """Return the values whose sigmoids are some factors between 0 and 1."""
    return np.log(openness) - np.log1p(-openness)
