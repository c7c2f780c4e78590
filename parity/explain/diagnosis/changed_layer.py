"""The reference with some of its methods replaced: a layer with bugs, or one that reads a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from parity.measure.core.problem import Problem
from parity.measure.core.reference import Arithmetic, Layer


class ChangedLayer(Layer):
    """Layer of the reference whose methods may be replaced by functions.

    Attributes:
        overrides: the functions, by the name of the method that each replaces.
    """

    def __init__(self, problem: Problem, arithmetic: Arithmetic, requested: str = "qkv") -> None:
        super().__init__(problem, arithmetic, requested)
        self.overrides: dict[str, Callable[..., Any]] = {}

    def override(self, **methods: Callable[..., Any]) -> None:
        """Replace methods of this layer by functions."""
        for name, function in methods.items():
            self.overrides[name] = function
            # An attribute of the instance hides the method of the class, so that methods which are
            # not replaced have no overhead.
            setattr(self, name, function)

    @contextmanager
    def overriding(self, **methods: Callable[..., Any]) -> Iterator[None]:
        """Replace methods of this layer by functions within the block."""
        before = {}
        for name in methods:
            if name in self.overrides:
                before[name] = self.overrides[name]
        self.override(**methods)
        try:
            yield
        finally:
            for name in methods:
                del self.overrides[name]
                delattr(self, name)
            self.override(**before)

    def requesting(self, names: str) -> ChangedLayer:
        """Return a layer that computes only some of q, k and v."""
        other = replace(self, requested=names)
        other.override(**self.overrides)
        return other

    def by_group(self, of_queries: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
        """Return the products of query heads and their key/value heads.

        A change may assign other key/value heads to query heads.
        """
        if "per_query_head" not in self.overrides:
            return super().by_group(of_queries, of_keys)
        return self.arithmetic.matmul(of_queries, self.per_query_head(of_keys))
