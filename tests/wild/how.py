"""How a right port is run: what people choose without being wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class How:
    """Choices that leave the function as it is.

    Attributes:
        mode: `eager`, `jit` or `compile`.
        wide: scores and softmax in float32, whatever the dtype; else in the dtype of the inputs.
        penalty: what hides a key: `inf`, or a finite number, `min` (the lowest of the dtype) or
            `1e4`.
        cache: of ports that decode: `growing`, or `static`.
    """

    mode: str = "eager"
    wide: bool = True
    penalty: str = "inf"
    cache: str = "static"

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, compiled if `mode` requires it."""
        if self.mode == "jit":
            import jax

            return jax.jit(function)
        if self.mode == "compile":
            import torch

            return torch.compile(function)
        return function

    def hidden(self, lowest: float) -> float:
        """Return the number that replaces a hidden score or is added to it; `lowest` is the lowest
        of the dtype.
        """
        return {"inf": float("-inf"), "min": lowest, "1e4": -1e4, "1e9": -1e9}[self.penalty]
