"""Mistakes in the gate of the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from parity.core.case import Case
from parity.core.reference import Layer
from parity.diagnosis.mistakes.record import Mistake


def gates(case: Case) -> Iterator[Mistake]:
    spec = case.spec
    if spec.gate is None:
        return
    yield _opened_otherwise(
        "gate-missing",
        "the context is not gated",
        lambda openness: np.ones_like(openness),
    )
    yield _opened_otherwise(
        "gate-without-sigmoid",
        "the context is multiplied by what gate_proj gives, and not by its sigmoid",
        lambda openness: np.log(openness) - np.log1p(-openness),
    )
    if not spec.gate.per_head and spec.num_heads > 1 and spec.gate.bias == spec.qkv_biases[0]:
        yield _read_as_halves(spec.head_dim)


def _opened_otherwise(name: str, about: str, openness: Any) -> Mistake:
    return Mistake(
        name,
        about,
        "multiply the context by sigmoid(gate_proj(query)), before out_proj",
        "gate",
        ("output",),
        {"openness": lambda layer, original, values: openness(original(values))},
    )


def _read_as_halves(size: int) -> Mistake:
    """Packed with the queries head by head, [q g] [q g], and read as all q, then all g."""

    def halves(read: Any, name: str) -> np.ndarray:
        leaf = name.partition(".")[2]
        q, gate = read(f"q_proj.{leaf}"), read(f"gate_proj.{leaf}")
        heads = [part.reshape(-1, 1, size, *part.shape[1:]) for part in (q, gate)]
        packed = np.concatenate(heads, axis=1).reshape(-1, *q.shape[1:])
        return np.split(packed, 2)[name.startswith("gate")]

    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        return halves(original, name) if name.startswith(("q_proj.", "gate_proj.")) else original(name)

    return Mistake(
        "gate-read-as-halves",
        "a weight that holds queries and gate head by head is read as all queries, then all gates",
        "split the packed weight into heads first, and each head into queries and gate",
        "gate",
        ("q",),
        {"parameter": parameter},
    )
