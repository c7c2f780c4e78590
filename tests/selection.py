"""Which tests are left to `make test-thorough`, because others of `make test` would see the same bug."""

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import pytest

from parity.models.families import FAMILIES


def rest_thorough(values: Iterable[Any], kept: Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """Parameters of a test; those that are not kept are marked as thorough. A tuple has one value for each name."""
    is_kept = kept if callable(kept) else kept.__contains__
    return [
        value
        if is_kept(value)
        else pytest.param(*value if isinstance(value, tuple) else [value], marks=pytest.mark.thorough)
        for value in values
    ]


def first_families(families: Iterable[str]) -> set[str]:
    """The first family of each signature: the same fields by the same kinds of rules, from the same layout.

    test_models_whole computes a layer of every family.
    """
    first: dict[Hashable, str] = {}
    for family in families:
        first.setdefault(_signature(family), family)
    return set(first.values())


def _signature(family: str) -> Hashable:
    if family not in FAMILIES:
        return family
    return tuple(
        (stack.layout, bool(stack.shared), frozenset((name, _kind(rule)) for name, rule in stack.fields.items()))
        for stack in FAMILIES[family].stacks
    )


def _kind(rule: object) -> str:
    return getattr(rule, "__qualname__", repr(rule))
