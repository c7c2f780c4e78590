"""Bugs of keys and values that a layer shares with another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from parity.explain.diagnosis.bugs.families import SHARED_KV
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.bugs.sites import before
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer


def shared(case: Case) -> Iterator[Edit]:
    spec = case.spec
    if not spec.shared_kv:
        return
    bug = SHARED_KV.shown_in("k")
    if spec.rope is not None and case.seq_len_k is None:
        yield bug(
            "shared-kv-rotated-again",
            "RoPE rotates the keys of the other layer again",
            {"received": _rotated},
        )
    if spec.value_head_dim == spec.head_dim:
        yield bug(
            "shared-kv-exchanged",
            "keys and values of the other layer are exchanged",
            {"project": before(_exchanged)},
            fix="pass keys as key and values as value",
        )


def _rotated(
    layer: Layer, original: Override, name: str, heads: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    received = original(name, heads, positions)
    if name == "k":
        return layer.rotate(received, positions)
    return received


def _exchanged(
    inputs: Mapping[str, np.ndarray], positions: np.ndarray
) -> tuple[Mapping[str, np.ndarray], np.ndarray]:
    return {**inputs, "k": inputs["v"], "v": inputs["k"]}, positions
