"""Each ttnn operation of a program, compared with its golden function: the first wrong one, and
where the program calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.measure.core.arrays import arithmetic_of, to_numpy, to_torch
from parity.use.testing.assertion import compare_arrays, message

if TYPE_CHECKING:
    from types import FrameType

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
        num_compared: number of operations that were compared with their golden functions.
        not_compared: the reasons why others were not, by name.
    """

    num_compared: int = 0
    not_compared: dict[str, str] = field(default_factory=dict)


@contextmanager
def assert_operations(*, arithmetic: str | None = None) -> Iterator[Operations]:
    """Raise an AssertionError at the first ttnn operation, in a `with` block, that differs from its
    golden function.

    Each operation is compared by itself: its golden function receives the inputs on the device, so
    errors do not add up. The tolerance is a few units of rounding of the result's dtype, as in
    `assert_parity`. Every tensor is read back, so this is slow. A mock board returns the values of
    golden functions, so nothing ever differs there.

    Args:
        arithmetic: arithmetic of the device, as in `assert_parity`.

    Yields:
        The compared operations, which grow as the block runs.

    Raises:
        AssertionError: at the first wrong operation, with its number, name, call site and error.
        ModuleNotFoundError: if ttnn is not installed.

    Example:
        >>> x = ttnn.ones((1, 1, 32, 32), ttnn.bfloat16, ttnn.TILE_LAYOUT, device)
        >>> with parity.assert_operations():
        ...     y = ttnn.softmax(x, dim=-1)
    """
    import ttnn  # pyright: ignore[reportMissingImports]  (it lies in the other environment)

    observer = _OperationObserver(arithmetic)
    config = ttnn.CONFIG
    with ExitStack() as stack:
        stack.callback(setattr, config, "enable_fast_runtime_mode", config.enable_fast_runtime_mode)
        # ttnn calls hooks outside of the fast mode only.
        config.enable_fast_runtime_mode = False
        stack.enter_context(ttnn.register_pre_operation_hook(observer.before))
        stack.enter_context(ttnn.register_post_operation_hook(observer.after))
        yield observer.operations


class _OperationObserver:
    """Hooks that read the inputs of each operation, and compare its results.

    Attributes:
        operations: the compared operations.
    """

    def __init__(self, arithmetic: str | None) -> None:
        self.operations = Operations()
        self._arithmetic = arithmetic
        self._count = 0
        self._is_reading = False
        # Inputs of the current operation, by position and by name; None if it is not compared.
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def before(self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Read the inputs, which the operation may overwrite."""
        # Reading a tensor calls operations too, which are not the user's.
        if self._is_reading:
            return
        self._count += 1
        self._inputs = None
        name = operation.python_fully_qualified_name
        if name.rpartition(".")[2] in MOVES:
            return
        if _golden(operation) is None:
            reason = "it has no golden function; ttnn_mock.golden takes one"
            self.operations.not_compared[name] = reason
            return
        with self._reading():
            by_position = tuple(map(_as_golden_input, arguments))
            by_name = {key: _as_golden_input(value) for key, value in keywords.items()}
            self._inputs = by_position, by_name

    def after(
        self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        """Compare the results."""
        if self._is_reading or self._inputs is None:
            return
        name = operation.python_fully_qualified_name
        by_position, by_name = self._inputs
        with self._reading():
            expected = _golden(operation)(*by_position, **by_name)
            for tensor, value in zip(_listed(result), _listed(expected), strict=True):
                self._compare(name, tensor, value, arguments)
        if name not in self.operations.not_compared:
            self.operations.num_compared += 1

    def _compare(self, name: str, tensor: Any, value: Any, arguments: tuple[Any, ...]) -> None:
        if "BFLOAT8" in str(tensor.dtype) or "BFLOAT4" in str(tensor.dtype):
            reason = "blocks that share an exponent have no budget"
            self.operations.not_compared[name] = reason
            return
        actual = to_numpy(tensor)
        expected = to_numpy(value)
        if actual.shape == expected.shape and "int" not in actual.dtype.name:
            # Unwritten values are NaN, and a mask may be infinite: these elements have no budget.
            is_finite = np.isfinite(expected)
            actual = np.where(is_finite, actual, np.zeros_like(actual))
            expected = expected.astype(np.float32)
            expected = np.where(is_finite, expected, np.zeros_like(expected))
        if not actual.size:
            return
        arithmetic = self._arithmetic or arithmetic_of(tensor)
        stage = name.rpartition(".")[2]
        comparisons = compare_arrays(
            actual, expected, name=name, stage=stage, arithmetic=arithmetic
        )
        text = message(comparisons)
        if text:
            shapes = [str(tuple(x.shape)) for x in arguments if hasattr(x, "tensor_id")]
            raise AssertionError(
                f"operation {self._count}, {name} of {', '.join(shapes)}, {_call_site()}:\n{text}"
            )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Ignore the operations that reading a tensor runs."""
        self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False


def _golden(operation: Any) -> Any:
    from parity.measure.backends.tt import golden_function

    return golden_function(operation)


def _listed(result: Any) -> Any:
    """Return the results of an operation, which may return one or several."""
    return result if isinstance(result, list | tuple) else [result]


def _as_golden_input(x: Any) -> Any:
    """Return an argument for golden functions: tensors as torch's, floating-point ones in
    float32.
    """
    if isinstance(x, list | tuple):
        return type(x)(map(_as_golden_input, x))
    if not hasattr(x, "tensor_id"):
        return x
    value = to_torch(to_numpy(x))
    return value.float() if value.is_floating_point() else value


def _call_site() -> str:
    """Return the call site of the operation: the first line outside of ttnn and of this package."""
    frame = sys._getframe()
    while frame.f_back is not None and _package_of(frame) in ("ttnn", "parity"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _package_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
