"""Functions that stand in for methods of one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast


@dataclass(frozen=True)
class WithOverrides:
    """A layer of which functions stand in for some methods; those that stay cost nothing more.

    Attributes:
        overrides: these functions, by the names of the methods.
    """

    overrides: dict[str, Callable[..., Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def override(self, **methods: Callable[..., Any]) -> None:
        """Let functions stand in for methods of this one layer."""
        self.overrides.update(methods)
        self.__dict__.update(methods)  # attributes hide the methods of the class

    @contextmanager
    def overriding(self, **methods: Callable[..., Any]) -> Iterator[None]:
        """Let functions stand in for methods of this one layer inside."""
        before = {name: self.overrides[name] for name in methods if name in self.overrides}
        self.override(**methods)
        try:
            yield
        finally:
            for name in methods:
                del self.overrides[name], self.__dict__[name]
            self.override(**before)

    def asking(self, names: str) -> Self:
        """Return the same layer, of which only some of q, k and v are made."""
        other = replace(cast(Any, self), asked=names)
        other.override(**self.overrides)
        return other
