"""Each ttnn operation of a program, compared with its golden function: the first wrong one, and its
place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parity.measure.core.arrays import arithmetic_of, to_numpy, to_torch
from parity.use.testing.assertion import compare_arrays, message

MOVES = (
    "from_torch",
    "as_tensor",
    "to_torch",
    "to_device",
    "from_device",
    "deallocate",
    "synchronize_device",
)
"""Operations that compute nothing."""


@dataclass
class Operations:
    """The operations of a block.

    Attributes:
        judged: number of operations that were compared with their golden functions.
        not_compared: the reasons why others were not, by name.
    """

    judged: int = 0
    not_compared: dict[str, str] = field(default_factory=dict)


@contextmanager
def assert_operations(*, arithmetic: str | None = None) -> Iterator[Operations]:
    """Raise an AssertionError at the first ttnn operation, in a `with` block, that differs from its
    golden function.

    Each operation is compared by itself: its golden function receives the inputs on the device, so
    errors do not add up. The tolerance is a few units of rounding of the result's dtype, as in
    `assert_parity`. Every tensor is read back, so it is slow. A mock board returns the values of
    golden functions, so nothing ever differs there.

    Args:
        arithmetic: of the device, as in `assert_parity`.

    Yields:
        The compared operations, which grow as the block runs.

    Raises:
        AssertionError: at the first wrong operation, with its number, name, call site and error.
        ModuleNotFoundError: if ttnn is not installed.
    """
    import ttnn  # pyright: ignore[reportMissingImports]  (it lies in the other environment)

    judge, fast = _Judge(arithmetic), ttnn.CONFIG.enable_fast_runtime_mode
    with ExitStack() as stack:
        stack.callback(setattr, ttnn.CONFIG, "enable_fast_runtime_mode", fast)
        ttnn.CONFIG.enable_fast_runtime_mode = (
            False  # ttnn calls hooks outside of the fast mode only
        )
        stack.enter_context(ttnn.register_pre_operation_hook(judge.before))
        stack.enter_context(ttnn.register_post_operation_hook(judge.after))
        yield judge.found


class _Judge:
    """The current operation: its golden function, and its inputs."""

    def __init__(self, arithmetic: str | None) -> None:
        self.found, self._arithmetic, self._count, self._is_reading = (
            Operations(),
            arithmetic,
            0,
            False,
        )
        self._given: tuple[Any, Any] | None = None

    def before(self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Read the inputs, which the operation may overwrite."""
        if self._is_reading:
            return
        self._count, self._given = self._count + 1, None
        name = operation.python_fully_qualified_name
        if name.rpartition(".")[2] in MOVES:
            return
        if _golden(operation) is None:
            self.found.not_compared[name] = "it has no golden function; ttnn_mock.golden takes one"
            return
        with self._reading():
            self._given = (
                tuple(map(_read, arguments)),
                {key: _read(x) for key, x in keywords.items()},
            )

    def after(
        self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        """Compare the results."""
        if self._is_reading or self._given is None:
            return
        name, (given, named) = operation.python_fully_qualified_name, self._given
        with self._reading():
            values = _golden(operation)(*given, **named)
            results, values = (
                [x] if not isinstance(x, list | tuple) else x for x in (result, values)
            )
            for tensor, value in zip(results, values, strict=True):
                self._judge(name, tensor, value, arguments)
        self.found.judged += name not in self.found.not_compared

    def _judge(self, name: str, tensor: Any, value: Any, arguments: tuple[Any, ...]) -> None:
        if "BFLOAT8" in str(tensor.dtype) or "BFLOAT4" in str(tensor.dtype):
            self.found.not_compared[name] = "blocks that share an exponent have no budget"
            return
        actual, expected = to_numpy(tensor), to_numpy(value)
        if actual.shape == expected.shape and "int" not in actual.dtype.name:
            is_known = np.isfinite(expected)  # unwritten values are NaN, and a mask may be infinite
            actual, expected = (
                np.where(is_known, x, np.zeros_like(x))
                for x in (actual, expected.astype(np.float32))
            )
        if not actual.size:
            return
        arithmetic = self._arithmetic or arithmetic_of(tensor)
        stage = name.rpartition(".")[2]
        if text := message(
            compare_arrays(actual, expected, name=name, stage=stage, arithmetic=arithmetic)
        ):
            shapes = ", ".join(str(tuple(x.shape)) for x in arguments if hasattr(x, "tensor_id"))
            raise AssertionError(
                f"operation {self._count}, {name} of {shapes}, {_place()}:\n{text}"
            )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """True while tensors are read, which also runs operations."""
        self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False


def _golden(operation: Any) -> Any:
    from parity.measure.backends.tt import golden_function

    return golden_function(operation)


def _read(x: Any) -> Any:
    """Return an argument for golden functions: tensors as torch's, floating-point ones in
    float32.
    """
    if isinstance(x, list | tuple):
        return type(x)(map(_read, x))
    if not hasattr(x, "tensor_id"):
        return x
    value = to_torch(to_numpy(x))
    return value.float() if value.is_floating_point() else value


def _place() -> str:
    """Return the call site of the operation: the first line outside of ttnn and of this module."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "ttnn",
        "parity",
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
