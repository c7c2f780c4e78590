"""Representative values for samples: the first of the values that would detect the same bugs."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from inspect import isfunction
from typing import Any

from parity.port.models.families import FAMILIES
from parity.port.models.rules import Stack


def one_a_code(
    values: Iterable[Any], functions_of: Callable[[Any], Mapping[str, Callable[..., Any]]]
) -> list[Any]:
    """Return the first of all values whose functions, by name, share their code and differ in sizes
    or projections.
    """
    first: dict[Hashable, Any] = {}
    for value in values:
        functions = functions_of(value)
        first.setdefault(
            (frozenset(functions), frozenset().union(*map(_codes_of, functions.values()))), value
        )
    return [*first.values()]


def _codes_of(function: Callable[..., Any]) -> set[Hashable]:
    """Return the code of a function and of the functions that it binds.

    A function that is not written in Python stands for its code.
    """
    if isinstance(function, partial):
        codes: set[Hashable] = _codes_of(function.func)
        bound = [*function.args, *function.keywords.values()]
    elif isfunction(function):
        codes = {function.__code__}
        bound = [cell.cell_contents for cell in function.__closure__ or ()]
    else:
        return {function}
    for value in bound:
        if callable(value):
            codes |= _codes_of(value)
    return codes


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
