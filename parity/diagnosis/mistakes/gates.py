"""Bugs in the gate of the context."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.core.case import Case
from parity.diagnosis.mistakes.families import GATE
from parity.diagnosis.mistakes.record import Mistake
from parity.diagnosis.mistakes.sites import after, packed


def gates(case: Case) -> Iterator[Mistake]:
    spec = case.spec
    if spec.gate is None:
        return
    mistake = GATE.seen_in("output")
    yield mistake("gate-missing", "the context is not gated", {"openness": after(np.ones_like)})
    yield mistake(
        "gate-without-sigmoid",
        "the context is multiplied by the output of gate_proj instead of its sigmoid",
        {"openness": after(lambda openness: np.log(openness) - np.log1p(-openness))},
    )
    if not spec.gate.per_head and spec.num_heads > 1 and spec.gate.bias == spec.qkv_biases[0]:
        yield mistake(
            "gate-read-as-halves",
            "a weight with queries and gate per head is read as all queries, then all gates",
            packed(("q_proj", "gate_proj"), spec.num_heads, ("weight", "bias"), by_head=True),
            fix="split the packed weight into heads first, and each head into queries and gate",
            stages=("q",),
        )
