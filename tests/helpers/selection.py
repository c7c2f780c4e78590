"""Representative values for samples: the first of the values that would detect the same bugs."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from inspect import isfunction
from types import CodeType
from typing import Any

from parity.port.models.families import FAMILIES
from parity.port.models.rules import Stack


def one_a_code(
    values: Iterable[Any], functions_of: Callable[[Any], Mapping[str, Callable[..., Any]]]
) -> list[Any]:
    """Return the first of all values whose functions, by name, share their code and differ in
    numbers or projections.
    """
    first: dict[Hashable, Any] = {}
    for value in values:
        functions = functions_of(value)
        first.setdefault(
            (frozenset(functions), frozenset().union(*map(_codes_of, functions.values()))), value
        )
    return [*first.values()]


def _codes_of(function: Callable[..., Any]) -> set[CodeType]:
    """Return the code of a function and of the functions in its closure."""
    held = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    return {function.__code__}.union(*(_codes_of(each) for each in held if isfunction(each)))


def rules_signature(stack: Stack) -> Hashable:
    """Return the layout of a stack of layers, and its fields with the kinds of their rules."""
    return stack_signature(stack), frozenset(
        (name, _kind(rule)) for name, rule in stack.fields.items()
    )


def stack_signature(stack: Stack) -> Hashable:
    """Return the layout of a stack of layers, for tests that read specifications without deriving
    them.
    """
    return stack.layout, bool(stack.shared), stack.keys_are_values, stack.part


def first_families(
    families: Iterable[str], by: Callable[[Stack], Hashable] = rules_signature
) -> set[str]:
    """Return the first family for each signature of its stacks."""
    first: dict[Hashable, str] = {}
    for family in families:
        known = FAMILIES.get(family)
        first.setdefault(tuple(map(by, known.stacks)) if known else family, family)
    return set(first.values())


def _kind(rule: object) -> str:
    return getattr(rule, "__qualname__", repr(rule))
