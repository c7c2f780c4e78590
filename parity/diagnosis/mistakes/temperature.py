"""Mistakes in the temperature of queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from mha_spec import Temperature
from parity.core.cases import Case
from parity.core.reference import Layer
from parity.diagnosis.mistakes.record import Mistake, Override, Plan, breaking


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


def _tempered_otherwise(name: str, about: str, in_reference: dict[str, Override], in_sibling: Override) -> Mistake:
    return Mistake(
        name,
        about,
        "multiply queries by 1 + scale * ln(1 + floor((position + first_position) / length)), after RoPE",
        "temperature",
        ("q", "k"),
        in_reference,
        breaking(apply_temperature=in_sibling),
    )


def _ignored() -> Mistake:
    return _tempered_otherwise(
        "temperature-ignored",
        "queries are not multiplied by a temperature",
        {"tempered": lambda layer, original, name, x, positions: x},
        lambda plan, original, x, positions, temperature: x,
    )


def _off_by_one(right: Temperature) -> Mistake:
    counted = 0 if right.first_position else 1

    def in_sibling(_: Plan, original: Any, x: Any, positions: Any, temperature: Temperature) -> Any:
        return original(x, positions, replace(temperature, first_position=counted))

    return _tempered_otherwise(
        "temperature-off-by-one",
        f"the temperature counts positions from {counted}, and not from {right.first_position}",
        {"factors": lambda _, original, positions: original(positions + (counted - right.first_position))},
        in_sibling,
    )


def _not_floored() -> Mistake:
    def in_sibling(plan: Plan, _: Any, x: Any, positions: Any, temperature: Temperature) -> Any:
        lengths = (positions + temperature.first_position) / temperature.length
        return x * (1.0 + temperature.scale * plan.xp.log1p(lengths))[:, None, :, None]

    return _tempered_otherwise(
        "temperature-not-floored",
        "the temperature grows with every token, and not with every length",
        {"lengths_passed": lambda _, original, positions, length: positions / length},
        in_sibling,
    )


def _restarted() -> Mistake:
    def in_sibling(_: Plan, original: Any, x: Any, positions: Any, temperature: Temperature) -> Any:
        return original(x, positions - positions[:, :1], temperature)

    return _tempered_otherwise(
        "temperature-restarted",
        "the temperature counts positions from the first token of each call",
        {"factors": lambda _, original, positions: original(positions - positions[:, :1])},
        in_sibling,
    )


def _of_keys_too() -> Mistake:
    def tempered(layer: Layer, original: Any, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return original("q" if name == "k" else name, x, positions)

    def project_qkv(plan: Plan, original: Any, project: Any, *inputs: Any) -> tuple[Any, Any, Any]:
        q, k, v = original(project, *inputs)
        spec, positions = inputs[3], inputs[4] if len(inputs) > 4 else None
        positions = plan.xp.arange(k.shape[2])[None] if positions is None else positions
        return q, plan.sibling.apply_temperature(k, positions, spec.temperature), v

    return Mistake(
        "temperature-of-keys-too",
        "keys are multiplied by the temperature, too",
        "multiply queries only, before keys are cached",
        "temperature",
        ("k",),
        {"tempered": tempered},
        breaking(project_qkv=project_qkv),
    )
