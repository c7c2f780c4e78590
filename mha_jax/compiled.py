"""Functions compiled once for each shape, for callers who do not compile.

Outside `jax.jit`, JAX compiles a loop or a branch again at every call, and keeps what it compiled.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.core import Tracer

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(*static: str) -> Callable[[Function], Function]:
    """Decorate a function of arrays and, by the names given, of hashable values.

    What a caller compiles is left alone: there the function is a part of the caller's own program.
    """

    def decorate(function: Function) -> Function:
        jitted = jax.jit(function, static_argnames=static)

        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            return (function if _is_compiling() else jitted)(*args, **keywords)

        return call  # pyright: ignore[reportReturnType]

    return decorate


def _is_compiling() -> bool:
    # Under a gradient or a map that nobody compiles, a constant gives an array.
    return isinstance(lax.neg(np.float32(0.0)), Tracer)
