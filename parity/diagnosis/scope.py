"""What a search is limited to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scope:
    """What a search is limited to.

    Attributes:
        judged: the names of the stages to judge; all that were observed when absent.
        only: names of mistakes, or what they are about; all that are known when absent.
        is_quick: whether single mistakes are tried, and nothing is said of stages that none explains.
    """

    judged: frozenset[str] | None = None
    only: frozenset[str] | None = None
    is_quick: bool = False


EVERYTHING = Scope()
