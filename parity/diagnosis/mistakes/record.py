"""Records of mistakes: their words, and how they are made in the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Override = Callable[..., Any]
"""Stands in for a method of the reference: `override(layer, original, *inputs)`.

The original is what stood there before: where two mistakes are made, perhaps the other's override."""


class Change(Protocol):
    """A change of the reference."""

    @property
    def in_reference(self) -> Mapping[str, Override]: ...


@dataclass(frozen=True, eq=False)
class Changed:
    """Overrides by the methods of `reference.Layer`, and no more."""

    in_reference: Mapping[str, Override]


@dataclass(frozen=True, eq=False)
class Mistake:
    """A mistake that could be in a case.

    Attributes:
        name: what reports and the command line call it; two forms of a mistake may share one.
        about: what would be the case, so that "it matches the reference if" may stand before it.
        in_reference: makes it in the reference: overrides by the methods of `reference.Layer`.
        fix: what to do about it.
        page: the page of parity/bugs that says more.
        stages: one of them must be the first that shows it.
        is_loss: whether only precision is lost. Such a one is searched for last and alone, where little is wrong.
        shows_in_narrow: whether a loss of precision is seen in bfloat16 and float16, too, which may be rounded to
            themselves.
        shows_alone: whether it can be seen in a layer that is right otherwise; else it is searched for beside others.
    """

    name: str
    about: str
    in_reference: Mapping[str, Override]
    fix: str
    page: str
    stages: tuple[str, ...]
    is_loss: bool = False
    shows_in_narrow: bool = False
    shows_alone: bool = True


def instead(function: Callable[..., Any]) -> Override:
    """An override that needs only the inputs."""
    return lambda _, original, *inputs: function(*inputs)
