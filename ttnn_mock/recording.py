"""Recording of a program on a device that computes, and replay on a mock board that runs the same
program.

A mock board validates a program without computing, and golden functions are not the kernels. A
recording therefore contains, in order, each upload, each operation with its arguments, and each
array that was read back. A mock board of the same architecture and grid that runs the same
operations reads back the arrays of the device. It serves any program whose uploads and reads pass
through `ttnn_mock.hooks`:

    with ttnn_mock.recorded() as recording:  # on a card or a simulator
        run()
    with ttnn_mock.replayed(recording) as replay:  # on a mock board
        run()
    print(replay.differs)  # "" or the first difference
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ttnn

from ttnn_mock.boards import is_in_use
from ttnn_mock.shadows import PARTS_HINT, observed, shadow

SAME_SUM = 1e-6
"""Tolerance of the sum of an upload, relative to the sum of magnitudes: tables may differ by a
rounding between processors' cosines.
"""


@dataclass
class Recording:
    """Program and its results.

    Attributes:
        lines: each upload, operation and read-back, in order, as text, with numbered tensors.
        sums: weighted sum of each upload's elements and of their magnitudes, (uploads, 2).
        arrays: arrays that were read back, in order, in float32.
        made_on: description of the device.
    """

    lines: list[str] = field(default_factory=list)
    sums: list[tuple[float, float]] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)
    made_on: str = ""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recording to an .npz file."""
        arrays: dict[str, Any] = {f"array{index}": array for index, array in enumerate(self.arrays)}
        words = np.frombuffer("\n".join([self.made_on, *self.lines]).encode(), np.uint8)
        np.savez_compressed(path, words=words, sums=np.array(self.sums).reshape(-1, 2), **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Read a recording from a file.

        Raises:
            OSError: if the file does not exist.
        """
        with np.load(path) as file:
            made_on, *lines = file["words"].tobytes().decode().split("\n")
            sums = [(total, size) for total, size in file["sums"].tolist()]
            num_arrays = len(file.files) - 2  # without words and sums
            arrays = [file[f"array{index}"] for index in range(num_arrays)]
        return cls(lines, sums, arrays, made_on)


def read_back(tensor: ttnn.Tensor) -> np.ndarray:
    """Read back a tensor from a device that computes, exactly, as float32."""
    on_host = ttnn.from_device(tensor)
    parts = [
        ttnn.to_dtype(part, ttnn.float32).to_numpy() for part in ttnn.get_device_tensors(on_host)
    ]
    for chip, part in enumerate(parts):
        if not np.array_equal(part, parts[0], equal_nan=True):
            raise ValueError(
                f"tensor must be the same on all chips to be read as one, got a different value on "
                f"chip {chip} and shape={tuple(tensor.shape)}; {PARTS_HINT}"
            )
    return parts[0]


def _describe_config(config: ttnn.WormholeComputeKernelConfig) -> str:
    """Describe a compute-kernel configuration, such as `HiFi3, float32 sums, no approximations`."""
    fidelity = str(config.math_fidelity).rpartition(".")[2]
    sums = "float32" if config.fp32_dest_acc_en else "bfloat16"
    approximations = "approximations" if config.math_approx_mode else "no approximations"
    return f"{fidelity}, {sums} sums, {approximations}"


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record a program on a device that computes, for a `with` block.

    Yields:
        Recording, which grows.

    Raises:
        RuntimeError: if the device is a mock board.
    """
    if is_in_use():
        raise RuntimeError("a recording must be made on a device that computes, got a mock one")
    recorder = _Recorder()
    with observed(recorder):
        yield recorder.recording


@contextmanager
def replayed(recording: Recording) -> Iterator[Replay]:
    """Return recorded arrays when a mock board is read back, for a `with` block.

    From the first difference on, arrays are the values of golden functions, as without a recording.

    Yields:
        Replay, which reports any difference at the end of the block.
    """
    with shadow() as values:
        replay = Replay(recording, values.download)
        with observed(replay):
            yield replay
        replay.end()


class _Program:
    """Observer of uploads and operations, and source of arrays."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # of tensors by their id, in order of first use

    def uploaded(self, tensor: ttnn.Tensor, array: np.ndarray, pad_value: float) -> None:
        """Record an uploaded array."""
        numbers = np.asarray(array, np.float64).ravel()
        numbers = np.nan_to_num(numbers, nan=1.0, posinf=2.0, neginf=-2.0)
        weights = 1.0 + np.arange(numbers.size) % 97  # so that the sum depends on the order
        self.add_sum(float(numbers @ weights), float(np.abs(numbers) @ weights))
        self.add(f"upload {self.words(tensor)} filled with {pad_value}")

    def __call__(
        self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        """Add an operation to the program; ttnn calls this hook after each."""
        words = [operation.python_fully_qualified_name]
        for value in arguments:
            words.append(self.words(value))
        for name, value in keywords.items():
            words.append(f"{name}={self.words(value)}")
        words.append("->")
        results = result if isinstance(result, list | tuple) else [result]
        numbers = [f"#{self._number(x)}" for x in results if isinstance(x, ttnn.Tensor)]
        words.append(" ".join(numbers))
        self.add(" ".join(words))

    def words(self, value: Any) -> str:
        """Describe the arguments of an operation; tensors by number, shape and format, without
        their values.
        """
        if isinstance(value, ttnn.Tensor):
            where = "on the host"
            if ttnn.is_tensor_storage_on_device(value):
                where = value.memory_config()
            number = self._number(value)
            return f"#{number} {tuple(value.shape)} {value.dtype} {value.layout} {where}"
        if isinstance(value, ttnn.MeshDevice):
            return "device"
        if isinstance(value, list | tuple):
            return f"({', '.join(map(self.words, value))})"
        if isinstance(value, ttnn.WormholeComputeKernelConfig):
            return _describe_config(value)
        words = repr(value)
        if " object at 0x" in words:
            raise NotImplementedError(
                f"{type(value).__name__} must have words of its own to be recorded, got {words}"
            )
        return words

    def _number(self, tensor: ttnn.Tensor) -> int:
        return self._numbers.setdefault(tensor.tensor_id, len(self._numbers))

    def add(self, line: str) -> None:
        """Record the next action."""
        raise NotImplementedError

    def add_sum(self, total: float, size: float) -> None:
        """Record the sums of the next upload."""
        raise NotImplementedError

    def download(self, tensor: ttnn.Tensor) -> np.ndarray:
        """Return the value of a tensor, in float32."""
        raise NotImplementedError


class _Recorder(_Program):
    """Program that is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self._is_reading = False

    def __call__(
        self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        # Reading runs operations on a device, but none on a mock board.
        if not self._is_reading:
            super().__call__(operation, arguments, keywords, result)

    def add(self, line: str) -> None:
        self.recording.lines.append(line)

    def add_sum(self, total: float, size: float) -> None:
        self.recording.sums.append((total, size))

    def download(self, tensor: ttnn.Tensor) -> np.ndarray:
        self.add(f"read {self.words(tensor)}")
        self._is_reading = True
        self.recording.arrays.append(read_back(tensor))
        self._is_reading = False
        return self.recording.arrays[-1].copy()


class Replay(_Program):
    """Program compared with the recorded one.

    Attributes:
        made_on: description of the recording device.
        differs: description of the first difference; empty if there is none.
    """

    def __init__(
        self, recording: Recording, otherwise: Callable[[ttnn.Tensor], np.ndarray]
    ) -> None:
        super().__init__()
        self.made_on = recording.made_on
        self.differs = ""
        self._recording = recording
        self._otherwise = otherwise
        # How much of the recording has been compared.
        self._num_lines = 0
        self._num_sums = 0
        self._num_arrays = 0

    def add(self, line: str) -> None:
        """Compare the next action."""
        recorded_lines = self._recording.lines
        recorded_line = "the end"
        if self._num_lines < len(recorded_lines):
            recorded_line = recorded_lines[self._num_lines]
        self._num_lines += 1
        if line != recorded_line and not self.differs:
            self.differs = f"step {self._num_lines} is {line!r} and was {recorded_line!r}"

    def add_sum(self, total: float, size: float) -> None:
        """Compare the sums of the next upload."""
        index = self._num_sums
        self._num_sums += 1
        if self.differs or index >= len(self._recording.sums):
            return
        recorded_total, recorded_size = self._recording.sums[index]
        # Written so that a NaN differs.
        is_same = abs(total - recorded_total) <= SAME_SUM * max(size, recorded_size)
        if not is_same:
            self.differs = f"step {self._num_lines + 1} uploads other values"

    def download(self, tensor: ttnn.Tensor) -> np.ndarray:
        """Return the recorded array, or the value of golden functions."""
        self.add(f"read {self.words(tensor)}")
        index = self._num_arrays
        self._num_arrays += 1
        if self.differs:
            return self._otherwise(tensor)
        return self._recording.arrays[index].copy()

    def end(self) -> None:
        """Check that the recording ends here."""
        if self.differs or self._num_lines >= len(self._recording.lines):
            return
        recorded_line = self._recording.lines[self._num_lines]
        self.differs = f"step {self._num_lines + 1} is the end and was {recorded_line!r}"
