"""What a program did on a device that computes, kept; and given back on a mock board that runs the same program.

A mock board validates a program and computes nothing, and golden functions are not the kernels. So a recording holds,
in order, each upload, each operation with all that it was given, and each array that was read back. A mock board of the
same architecture and grid, which runs that program again operation for operation, reads back what the device gave.
Nothing here knows attention; it serves any TTNN code:

    with mha_tt.recording.recorded() as recording:  # on a card or a simulator
        run()
    with mha_tt.recording.replayed(recording) as replay:  # on a mock board
        run()
    print(replay.differs)  # "" or where the program is another one
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ttnn

from mha_tt.device import describe_config, read_back, target
from mha_tt.mock.shadows import observed, shadow

SAME_SUM = 1e-6
"""How far the sum of an upload may be from the recorded one, of the sum of magnitudes: tables differ by a rounding from
one processor's cosine to another's."""


@dataclass
class Recording:
    """A program, and what it gave.

    Attributes:
        lines: each upload, operation and read-back, in order, in words, tensors by their numbers.
        sums: of each upload the weighed sum of its numbers and that of their magnitudes, (uploads, 2).
        arrays: what was read back, in order, in float32.
        made_on: the device, in words.
    """

    lines: list[str] = field(default_factory=list)
    sums: list[tuple[float, float]] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)
    made_on: str = ""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, .npz."""
        arrays: dict[str, Any] = {f"array{index}": array for index, array in enumerate(self.arrays)}
        words = np.frombuffer("\n".join([self.made_on, *self.lines]).encode(), np.uint8)
        np.savez_compressed(path, words=words, sums=np.array(self.sums).reshape(-1, 2), **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Read it from a file.

        Raises:
            OSError: if there is none.
        """
        with np.load(path) as held:
            made_on, *lines = held["words"].tobytes().decode().split("\n")
            arrays = [held[f"array{index}"] for index in range(len(held.files) - 2)]
            return cls(lines, [(total, size) for total, size in held["sums"].tolist()], arrays, made_on)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record what runs on a device that computes, for the time of a `with` block.

    Yields:
        The recording, which grows.

    Raises:
        RuntimeError: if the device is a mock one.
    """
    if target() == "mock":
        raise RuntimeError("a recording must be made on a device that computes, got a mock one")
    recorder = _Recorder()
    with observed(recorder):
        yield recorder.recording


@contextmanager
def replayed(recording: Recording) -> Iterator[Replay]:
    """Give what was recorded where arrays are read back from a mock board, for the time of a `with` block.

    From the first difference on they are golden functions' values, as without a recording.

    Yields:
        What tells, at the end of the block, whether there was a difference.
    """
    with shadow() as values:
        replay = Replay(recording, values.download)
        with observed(replay):
            yield replay
        replay.end()


class _Program:
    """What is told of uploads and operations, and asked for arrays."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # of tensors, in the order in which they are first seen

    def uploaded(self, tensor: ttnn.Tensor, array: np.ndarray, pad_value: float) -> None:
        """Take note of an array that went to the device."""
        numbers = np.nan_to_num(np.asarray(array, np.float64).ravel(), nan=1.0, posinf=2.0, neginf=-2.0)
        weights = 1.0 + np.arange(numbers.size) % 97  # so that another order is another sum
        self.add_sum(float(numbers @ weights), float(np.abs(numbers) @ weights))
        self.add(f"upload {self.words(tensor)} filled with {pad_value}")

    def __call__(self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        """What ttnn calls after every operation."""
        given = [*map(self.words, arguments), *(f"{name}={self.words(value)}" for name, value in keywords.items())]
        made = result if isinstance(result, list | tuple) else [result]
        numbers = " ".join(f"#{self._number(x)}" for x in made if isinstance(x, ttnn.Tensor))
        self.add(" ".join([operation.python_fully_qualified_name, *given, "->", numbers]))

    def words(self, value: Any) -> str:
        """What an operation was given, but for the numbers in a tensor: of that which one it is, and its form."""
        if isinstance(value, ttnn.Tensor):
            where = value.memory_config() if ttnn.is_tensor_storage_on_device(value) else "on the host"
            return f"#{self._number(value)} {tuple(value.shape)} {value.dtype} {value.layout} {where}"
        if isinstance(value, ttnn.MeshDevice):
            return "device"
        if isinstance(value, list | tuple):
            return f"({', '.join(map(self.words, value))})"
        if isinstance(value, ttnn.WormholeComputeKernelConfig):
            return describe_config(value)
        words = repr(value)
        if " object at 0x" in words:
            raise NotImplementedError(f"{type(value).__name__} must have words of its own to be recorded, got {words}")
        return words

    def _number(self, tensor: ttnn.Tensor) -> int:
        return self._numbers.setdefault(tensor.tensor_id, len(self._numbers))

    def add(self, line: str) -> None:
        """Take note of what is done next."""
        raise NotImplementedError

    def add_sum(self, total: float, size: float) -> None:
        """Take note of the numbers of the next upload."""
        raise NotImplementedError

    def download(self, tensor: ttnn.Tensor) -> np.ndarray:
        """What is in a tensor, in float32."""
        raise NotImplementedError


class _Recorder(_Program):
    def __init__(self) -> None:
        super().__init__()
        self.recording, self._is_reading = Recording(), False

    def __call__(self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        if not self._is_reading:  # for which ttnn has operations on a device, and none on a mock one
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
    """A program beside the recorded one.

    Attributes:
        made_on: the device of the recorded one, in words.
        differs: where it is another one, in words; empty as long as it is the same.
    """

    def __init__(self, recording: Recording, otherwise: Callable[[ttnn.Tensor], np.ndarray]) -> None:
        super().__init__()
        self.made_on, self.differs, self._recording, self._otherwise = recording.made_on, "", recording, otherwise
        self._num_lines = self._num_sums = self._num_arrays = 0

    def add(self, line: str) -> None:
        """Compare what is done next."""
        index, self._num_lines = self._num_lines, self._num_lines + 1
        was = self._recording.lines[index] if index < len(self._recording.lines) else "the end"
        if line != was and not self.differs:
            self.differs = f"step {index + 1} is {line!r} and was {was!r}"

    def add_sum(self, total: float, size: float) -> None:
        """Compare the numbers of the next upload."""
        index, self._num_sums = self._num_sums, self._num_sums + 1
        if self.differs or index >= len(self._recording.sums):
            return
        was, its_size = self._recording.sums[index]
        if not abs(total - was) <= SAME_SUM * max(size, its_size):
            self.differs = f"step {self._num_lines + 1} uploads other numbers"

    def download(self, tensor: ttnn.Tensor) -> np.ndarray:
        """What the device gave here, or golden functions give."""
        self.add(f"read {self.words(tensor)}")
        index, self._num_arrays = self._num_arrays, self._num_arrays + 1
        return self._otherwise(tensor) if self.differs else self._recording.arrays[index].copy()

    def end(self) -> None:
        """Take note that nothing follows."""
        if not self.differs and self._num_lines < len(self._recording.lines):
            self.differs = f"step {self._num_lines + 1} is the end and was {self._recording.lines[self._num_lines]!r}"
