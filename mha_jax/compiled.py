"""Functions compiled once per shape, for callers who do not use jit.

Outside `jax.jit`, JAX compiles loops and branches again in every call and keeps the results in
memory.
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
    """Decorate a function of arrays; the named arguments are hashable values.

    A no-op under an enclosing `jit`: there the function becomes part of the caller's program.
    """

    def decorate(function: Function) -> Function:
        jitted = jax.jit(function, static_argnames=static)

        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            if _is_compiling():
                return function(*args, **keywords)
            return jitted(*args, **keywords)

        return call  # pyright: ignore[reportReturnType]

    return decorate


def _is_compiling() -> bool:
    # Under `jit` even an operation on a constant returns a tracer; under `grad` or `vmap` alone it
    # returns an array.
    return isinstance(lax.neg(np.float32(0.0)), Tracer)
