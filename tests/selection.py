"""Which tests are left to `make test-thorough`, because others of `make test` would see the same bug."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from inspect import isfunction
from types import CodeType
from typing import Any

import pytest

from parity.models.families import FAMILIES
from parity.models.rules import Stack


def rest_thorough(values: Iterable[Any], kept: Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """Parameters of a test; those that are not kept are marked as thorough. A tuple has one value for each name.

    Raises:
        ValueError: if none is kept, or one that is to be kept is missing.
    """
    values, is_kept = list(values), kept if callable(kept) else kept.__contains__
    missing = [] if callable(kept) else [each for each in kept if each not in values]
    if missing or not any(map(is_kept, values)):
        raise ValueError(f"no parameters: {missing}" if missing else "no parameter is kept")
    return [
        value
        if is_kept(value)
        else pytest.param(*value if isinstance(value, tuple) else [value], marks=pytest.mark.thorough)
        for value in values
    ]


def one_a_code(values: Iterable[Any], functions_of: Callable[[Any], Mapping[str, Callable[..., Any]]]) -> list[Any]:
    """The first of those values whose functions, by name, have the same code, for other numbers or projections."""
    first: dict[Hashable, Any] = {}
    for value in values:
        functions = functions_of(value)
        first.setdefault((frozenset(functions), frozenset().union(*map(_codes_of, functions.values()))), value)
    return [*first.values()]


def _codes_of(function: Callable[..., Any]) -> set[CodeType]:
    """The code of a function, and of the functions that it holds."""
    held = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    return {function.__code__}.union(*(_codes_of(each) for each in held if isfunction(each)))


def rules_signature(stack: Stack) -> Hashable:
    """The layout of a stack of layers, and its fields with the kinds of their rules."""
    return stack_signature(stack), frozenset((name, _kind(rule)) for name, rule in stack.fields.items())


def stack_signature(stack: Stack) -> Hashable:
    """The layout of a stack of layers, for tests that read specifications without deriving them."""
    return stack.layout, bool(stack.shared), stack.keys_are_values, stack.part


def first_families(families: Iterable[str], by: Callable[[Stack], Hashable] = rules_signature) -> set[str]:
    """The first family of each signature of its stacks."""
    first: dict[Hashable, str] = {}
    for family in families:
        known = FAMILIES.get(family)
        first.setdefault(tuple(map(by, known.stacks)) if known else family, family)
    return set(first.values())


def _kind(rule: object) -> str:
    return getattr(rule, "__qualname__", repr(rule))
