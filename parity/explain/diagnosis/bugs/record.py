"""Records of bugs: their descriptions, and their overrides of the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Override = Callable[..., Any]
"""Replaces a method of the reference: `override(layer, original, *inputs)`.

The original is the replaced method, or the override of another bug.
"""


class Change(Protocol):
    """A change of the reference."""

    @property
    def in_reference(self) -> Mapping[str, Override]: ...


@dataclass(frozen=True, eq=False)
class Changed:
    """Overrides by the methods of `reference.Layer` alone."""

    in_reference: Mapping[str, Override]


@dataclass(frozen=True, eq=False)
class Bug:
    """A bug that a case could have.

    Attributes:
        name: its name in reports and on the command line; two forms of a bug may share one.
        about: a description, such as `the scores are not scaled`.
        in_reference: overrides that inject it, by the methods of `reference.Layer`.
        fix: an instruction in one line.
        page: its page in parity/bugs.
        stages: the stages of which one must show it first.
        is_loss: True if it only loses precision. Such bugs are tried last and alone, if the error
            is small.
        shows_in_narrow: True if lost precision also shows in bfloat16 and float16.
        shows_alone: True if it shows in a layer that is otherwise right; otherwise it is tried with
            others.
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
    """Return an override that needs only the inputs."""
    return lambda _, original, *inputs: function(*inputs)
