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
from parity.measure.backends import tt as port
from parity.measure.backends.port import OF_KEYS
from parity.measure.backends.record import OnMesh, trace_on_mesh
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.trace import Reference, Trace
from parity.measure.sharding.mesh import MeshPlan, why_not_divided
from ttnn_mock.boards import MESHES
from ttnn_mock.goldens import is_collective

HEADS = 1
"""Mesh dimension that heads are divided over: columns."""

WORDS = {
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
    if (count := port.num_chips()) % plan.tensor:
        others = ", ".join(f"{board} has {math.prod(shape)}" for board, shape in MESHES.items())
        hint = f"MHA_TT_MOCK selects another: {others}" if mha_tt.target() == "mock" else ""
        raise InputError(
            "mesh", "divide the chips of the board", f"{plan} and {count} chips", hint=hint
        )
    port.open_device((count // plan.tensor, plan.tensor))


def why_skipped(case: Case, dtype: str, plan: MeshPlan) -> str | None:
    """Return why a case cannot run on a mesh, or None."""
    unfused = replace(
        case, spec=replace(case.spec, fused_qkv=False)
    )  # q, k and v are packed on each chip
    if reason := why_not_divided(unfused, plan):
        return reason
    try:
        check_divides(case.spec, plan.tensor)
    except InputError as refusal:
        return f"{refusal.argument} must {refusal.rule}"
    if case.random_mask and plan.tensor > 1:
        return "a mask per head would differ between chips, which run one program"
    return None


def record(reference: Reference, plan: MeshPlan) -> Trace:
    """Run a problem on a mesh, with all stages gathered."""
    return trace_on_mesh("tt", _TtOnMesh(plan), reference)


class _TtParts(port.Padded):
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


class _TtOnMesh(OnMesh):
    """Port of ttnn with heads divided over chips."""

    SHAPES = _TtParts

    def __init__(self, plan: MeshPlan) -> None:
        super().__init__(port, plan)
        self.mesh = port.open_device()
        self.rows = lines_of(tuple(self.mesh.shape), HEADS)
        self.case: Any = None
        self.dtype = ttnn.float32
        self.own: Any = None
        self.queries: Sequence[list[int]] = ()
        self.keys: Sequence[list[int]] = ()

    def filled(self, problem: Problem) -> _TtModuleOnMesh:
        self.case, size = problem.case, self.plan.tensor
        self.dtype = port.DTYPES[problem.dtype]
        self.queries, self.keys = zip(
            *(map(list, local_heads(problem.spec, size, chip)) for chip in range(size)), strict=True
        )
        filled = _TtModuleOnMesh(problem, self)
        self.own = filled.module.spec
        return filled

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a stage for the heads of each chip; outputs are summed over chips."""
        spec = self.case.spec
        found = port.call(
            function, *(self.own if argument is spec else argument for argument in arguments)
        )
        is_part = spec.out_proj and function.__name__ == "_combine"
        return all_reduce(found, HEADS) if is_part else found

    def from_numpy(self, x: np.ndarray) -> ttnn.Tensor:
        """Replicate tokens (B, T, ·), and divide (B, N, T, ·) by heads."""
        return self.divided(x, self.queries, 1) if x.ndim == 4 else port.from_numpy(x)

    def to_numpy(self, x: ttnn.Tensor) -> np.ndarray:
        """Return (B, N, T, ·) of all heads."""
        return self.joined(x, self.queries, 1)

    def beside(self, x: np.ndarray) -> Any:
        """Return masks (…, T, S), equal for all heads, biases (B, N, T, S) divided by heads, and
        others whole.
        """
        if x.ndim != 4:
            return x
        return x[:, :1] if x.dtype == bool else self.divided(x, self.queries, 1, self.dtype)

    def divided(
        self,
        x: np.ndarray,
        heads: Sequence[list[int]],
        axis: int,
        dtype: ttnn.DataType | None = None,
    ) -> ttnn.Tensor:
        """Upload an array with its heads divided over chips, in a dtype or its own."""
        parts = [x.take(own, axis) for own in heads]
        return upload_parts(
            parts, axis=HEADS, device=self.mesh, dtype=dtype or port.DTYPES[x.dtype.name]
        )

    def joined(self, x: ttnn.Tensor, heads: Sequence[list[int]], axis: int) -> np.ndarray:
        """Concatenate the heads of all chips on an axis; replicated ones must be equal."""
        parts = [port.to_numpy(part) for part in ttnn.get_device_tensors(x)]
        held = [(own, chip) for row in self.rows for own, chip in zip(heads, row, strict=True)]
        shape, before = list(parts[0].shape), (slice(None),) * axis
        shape[axis] = 1 + max(map(max, heads))
        whole = np.empty(shape, parts[0].dtype)
        for own, chip in held:
            whole[(*before, own)] = parts[chip]
        for own, chip in held:
            if not np.array_equal(whole[(*before, own)], parts[chip], equal_nan=True):
                raise InputError("heads that chips share", "be alike", f"others on chip {chip}")
        return whole

    @contextmanager
    def counting(self, program: str) -> Iterator[None]:
        """Count collectives."""
        counts: Counter[str] = Counter()

        def note(operation: Any, *_: Any) -> None:
            name: str = operation.python_fully_qualified_name
            if name in WORDS or is_collective(name, operation.golden_function):
                counts[WORDS.get(name, name)] += 1

        fast = ttnn.CONFIG.enable_fast_runtime_mode
        ttnn.CONFIG.enable_fast_runtime_mode = False  # ttnn calls hooks only outside the fast mode
        try:
            with ttnn.register_pre_operation_hook(note):
                yield
        finally:
            ttnn.CONFIG.enable_fast_runtime_mode = fast
        self.sent[program] = dict(counts)


class _TtModuleOnMesh(port.TtModule):
    """Module with the weights of a problem, divided by heads; collectives of calls are counted."""

    def __init__(self, problem: Problem, on_mesh: _TtOnMesh) -> None:
        super().__init__(problem)
        self.on_mesh = on_mesh
        parallel.shard(self.module, on_mesh.mesh, heads=HEADS)
        self.weights = self.module.weights

    def outputs(
        self, query: ttnn.Tensor, **inputs: Any
    ) -> tuple[ttnn.Tensor, dict[str, ttnn.Tensor]]:
        with self.on_mesh.counting("forward"):
            output, attn_weights = self.module(query, **inputs, need_weights=True)
        with self.on_mesh.counting("fused.forward"):
            fused, _ = self.module(query, **inputs)
        return attn_weights, {"module": output, "fused": fused}

    def step(
        self,
        x: ttnn.Tensor,
        cache: Any,
        new_lengths: np.ndarray | None,
        positions: np.ndarray | None,
    ) -> tuple[dict[str, ttnn.Tensor], Any]:
        with self.on_mesh.counting("step" if x.shape[1] == 1 else "prompt"):
            return super().step(x, cache, new_lengths, positions)
