"""Mistakes in the temperature of queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mha_spec import Temperature
from parity.core.case import Case
from parity.core.reference import Layer
from parity.diagnosis.mistakes.record import Mistake, Override


def temperature(case: Case) -> Iterator[Mistake]:
    right = case.spec.temperature
    if right is None:
        return
    yield _ignored()
    yield _off_by_one(right)
    yield _not_floored()
    if case.spec.latent is None:
        yield _of_keys_too()
    if case.is_cached:
        yield _restarted()


def _tempered_otherwise(name: str, about: str, in_reference: dict[str, Override]) -> Mistake:
    return Mistake(
        name,
        about,
        "multiply queries by 1 + scale * ln(1 + floor((position + first_position) / length)), after RoPE",
        "temperature",
        ("q", "k"),
        in_reference,
    )


def _ignored() -> Mistake:
    return _tempered_otherwise(
        "temperature-ignored",
        "queries are not multiplied by a temperature",
        {"tempered": lambda layer, original, name, x, positions: x},
    )


def _off_by_one(right: Temperature) -> Mistake:
    counted = 0 if right.first_position else 1

    return _tempered_otherwise(
        "temperature-off-by-one",
        f"the temperature counts positions from {counted}, and not from {right.first_position}",
        {"factors": lambda _, original, positions: original(positions + (counted - right.first_position))},
    )


def _not_floored() -> Mistake:
    return _tempered_otherwise(
        "temperature-not-floored",
        "the temperature grows with every token, and not with every length",
        {"lengths_passed": lambda _, original, positions, length: positions / length},
    )


def _restarted() -> Mistake:
    return _tempered_otherwise(
        "temperature-restarted",
        "the temperature counts positions from the first token of each call",
        {"factors": lambda _, original, positions: original(positions - positions[:, :1])},
    )


def _of_keys_too() -> Mistake:
    def tempered(layer: Layer, original: Any, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return original("q" if name == "k" else name, x, positions)

    return Mistake(
        "temperature-of-keys-too",
        "keys are multiplied by the temperature, too",
        "multiply queries only, before keys are cached",
        "temperature",
        ("k",),
        {"tempered": tempered},
    )
