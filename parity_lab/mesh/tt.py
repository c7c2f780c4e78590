"""tt backend on a mesh: the same modules, divided by `mha_tt.parallel`, and counts of their
collectives.

Each row of the mesh has the whole layer, with heads divided over its chips. ttnn runs one program
on all chips, so masks and sequences are equal on all of them.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from mha_spec import InputError

os.environ.setdefault("LOGURU_LEVEL", "WARNING")  # ttnn logs its whole configuration on import
import ttnn  # pyright: ignore[reportMissingImports]  (it lies in the other environment)

import mha_tt
from mha_spec.shares import local_heads
from mha_tt import parallel
from mha_tt.device import upload_parts
from mha_tt.parallel.local import all_reduce, check_divides, lines_of
from parity.measure.backends import tt as one_device
from parity.measure.backends.driver import combine
from parity.measure.backends.port import OF_KEYS
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.trace import Reference
from parity_lab.mesh.backend import MeshPort, MeshTrace, name_of_call, record_with
from parity_lab.mesh.plan import MeshPlan, why_not_divided, why_rejected
from ttnn_mock.boards import MESHES
from ttnn_mock.goldens import is_collective

HEADS = 1
"""Mesh dimension that heads are divided over: columns."""

KINDS = {
    "ttnn.all_reduce": "all-reduce",
    "ttnn.all_gather": "all-gather",
    "ttnn.reduce_scatter": "reduce-scatter",
}
"""Names of ttnn's collectives in reports."""


def make_devices(count: int) -> None:
    """Do nothing: the number of chips follows from the board, `MHA_TT_MOCK`."""


def check_devices(plan: MeshPlan) -> None:
    """Open a mesh that divides only heads and fits the board."""
    if plan.size > plan.tensor:
        raise InputError(
            "mesh", "divide only tensor with tt, whose chips can only divide heads", str(plan)
        )
    count = one_device.num_chips()
    if count % plan.tensor:
        hint = ""
        if mha_tt.target() == "mock":
            boards = [f"{board} has {math.prod(shape)}" for board, shape in MESHES.items()]
            hint = f"MHA_TT_MOCK selects a different one: {', '.join(boards)}"
        raise InputError(
            "mesh", "divide the chips of the board", f"{plan} and {count} chips", hint=hint
        )
    one_device.open_device((count // plan.tensor, plan.tensor))


def why_skipped(case: Case, dtype: str, plan: MeshPlan) -> str | None:
    """Return why a case cannot run on a mesh, or None."""
    # Each chip packs its own q, k and v, so fused_qkv may be divided.
    unfused = replace(case, spec=replace(case.spec, fused_qkv=False))
    reason = why_not_divided(unfused, plan)
    if reason is None:
        reason = why_rejected(check_divides, case.spec, plan.tensor)
    if reason is not None:
        return reason
    if case.random_mask and plan.tensor > 1:
        return "a mask per head would differ between chips, which run one program"
    return None


def record(reference: Reference, plan: MeshPlan) -> MeshTrace:
    """Run a problem on a mesh, with all stages gathered."""
    return record_with("tt", _TtOnMesh(plan), reference)


class _ChipShapes(one_device.Padded):
    """Stages and caches of each chip's heads."""

    port: Any

    @property
    def own_heads(self) -> int:
        return len(self.port.queries[0])

    def from_numpy(self, name: str, x: np.ndarray) -> ttnn.Tensor:
        if name in OF_KEYS:
            return self.port.divided(self.padded(x, self.like(name)), self.port.keys, 1)
        if name == "gate" and x.shape[2] == self.spec.num_heads:
            return self.port.divided(x, self.port.queries, 2)
        return super().from_numpy(name, x)

    def to_numpy(self, name: str, x: ttnn.Tensor) -> np.ndarray:
        if name in OF_KEYS:
            return self.real(self.port.joined(x, self.port.keys, 1), self.like(name))
        if name == "gate" and x.shape[2] == self.own_heads:
            return self.port.joined(x, self.port.queries, 2)
        return super().to_numpy(name, x)


class _TtOnMesh(MeshPort):
    """Port of ttnn with heads divided over chips.

    Attributes:
        mesh: mesh of chips.
        case, dtype: case of the problem, and its dtype.
        own_spec: specification of a chip's heads.
        queries, keys: query and key/value heads of each chip of a row.
    """

    def __init__(self, plan: MeshPlan) -> None:
        super().__init__(one_device, plan, shapes=_ChipShapes)
        self.mesh = one_device.open_device()
        self._rows = lines_of(tuple(self.mesh.shape), HEADS)
        # The driver calls `filled` before all else, which sets these.
        self.case: Any = None
        self.dtype = ttnn.float32
        self.own_spec: Any = None
        self.queries: list[list[int]] = []
        self.keys: list[list[int]] = []

    def filled(self, problem: Problem) -> _TtModuleOnMesh:
        self.case = problem.case
        self.dtype = one_device.DTYPES[problem.dtype]
        self.queries, self.keys = [], []
        for chip in range(self.plan.tensor):
            queries, keys = local_heads(problem.spec, self.plan.tensor, chip)
            self.queries.append(list(queries))
            self.keys.append(list(keys))
        filled = _TtModuleOnMesh(problem, self)
        self.own_spec = filled.module.spec
        return filled

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a stage for the heads of each chip; outputs are summed over chips."""
        spec = self.case.spec
        own_arguments = [self.own_spec if x is spec else x for x in arguments]
        result = super().call(function, *own_arguments)
        if function is combine and spec.out_proj:
            result = all_reduce(result, HEADS)
        return result

    def from_numpy(self, x: np.ndarray) -> ttnn.Tensor:
        """Replicate tokens (B, T, ·), and divide (B, N, T, ·) by heads."""
        if x.ndim == 4:
            return self.divided(x, self.queries, 1)
        return super().from_numpy(x)

    def to_numpy(self, x: ttnn.Tensor) -> np.ndarray:
        """Return (B, N, T, ·) of all heads."""
        return self.joined(x, self.queries, 1)

    def argument(self, x: np.ndarray) -> Any:
        """Return masks (…, T, S), equal for all heads, biases (B, N, T, S) divided by heads, and
        others whole.
        """
        if x.ndim != 4:
            return x
        if x.dtype == bool:
            return x[:, :1]
        return self.divided(x, self.queries, 1, self.dtype)

    def divided(
        self,
        x: np.ndarray,
        heads_by_chip: Sequence[list[int]],
        axis: int,
        dtype: ttnn.DataType | None = None,
    ) -> ttnn.Tensor:
        """Upload an array with its heads divided over chips, in a dtype or its own."""
        parts = [x.take(heads, axis) for heads in heads_by_chip]
        if dtype is None:
            dtype = one_device.DTYPES[x.dtype.name]
        return upload_parts(parts, axis=HEADS, device=self.mesh, dtype=dtype)

    def joined(self, x: ttnn.Tensor, heads_by_chip: Sequence[list[int]], axis: int) -> np.ndarray:
        """Concatenate the heads of all chips on an axis; replicated ones must be equal."""
        parts = [one_device.to_numpy(part) for part in ttnn.get_device_tensors(x)]
        shape = list(parts[0].shape)
        shape[axis] = 1 + max(max(heads) for heads in heads_by_chip)
        whole = np.empty(shape, parts[0].dtype)
        before = (slice(None),) * axis
        # Each row has the whole layer, so that later rows write the same heads.
        indices_by_chip = []
        for row in self._rows:
            for heads, chip in zip(heads_by_chip, row, strict=True):
                indices_by_chip.append(((*before, heads), chip))
        for index, chip in indices_by_chip:
            whole[index] = parts[chip]
        for index, chip in indices_by_chip:
            if not np.array_equal(whole[index], parts[chip], equal_nan=True):
                raise InputError("heads that chips share", "be alike", f"others on chip {chip}")
        return whole

    @contextmanager
    def counting(self, program: str) -> Iterator[None]:
        """Count collectives."""
        counts: Counter[str] = Counter()

        def note(operation: Any, *_: Any) -> None:
            name: str = operation.python_fully_qualified_name
            if name in KINDS or is_collective(name, operation.golden_function):
                counts[KINDS.get(name, name)] += 1

        was_fast = ttnn.CONFIG.enable_fast_runtime_mode
        ttnn.CONFIG.enable_fast_runtime_mode = False  # ttnn calls hooks only outside the fast mode
        try:
            with ttnn.register_pre_operation_hook(note):
                yield
        finally:
            ttnn.CONFIG.enable_fast_runtime_mode = was_fast
        self.counts[program] = dict(counts)


class _TtModuleOnMesh(one_device.TtModule):
    """Module with the weights of a problem, divided by heads; collectives of calls are counted."""

    def __init__(self, problem: Problem, port: _TtOnMesh) -> None:
        super().__init__(problem)
        self.port = port
        parallel.shard(self.module, port.mesh, heads=HEADS)
        self.weights = self.module.weights

    def outputs(
        self, query: ttnn.Tensor, **inputs: Any
    ) -> tuple[ttnn.Tensor, dict[str, ttnn.Tensor]]:
        with self.port.counting("forward"):
            output, attn_weights = self.module(query, **inputs, need_weights=True)
        with self.port.counting("fused.forward"):
            fused, _ = self.module(query, **inputs)
        return attn_weights, {"module": output, "fused": fused}

    def step(
        self,
        x: ttnn.Tensor,
        cache: Any,
        new_lengths: np.ndarray | None,
        positions: np.ndarray | None,
    ) -> tuple[dict[str, ttnn.Tensor], Any]:
        with self.port.counting(name_of_call(x.shape[1])):
            return super().step(x, cache, new_lengths, positions)
