"""torch backend on a mesh: the same modules, divided by `mha_torch.parallel`, and counts of their
collectives.

Each process runs each stage with its sequences and heads and gathers it, so that all continue with
the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import mha_torch
from mha_spec import AttentionSpec, GridBias, InputError
from mha_torch import parallel
from mha_torch.arrays import is_distributed
from mha_torch.parallel.heads import check_divides
from mha_torch.parallel.ring import RingAttention
from parity.measure.backends import torch as port
from parity.measure.backends.port import OF_KEYS, Shapes
from parity.measure.backends.processes import Given, Processes
from parity.measure.backends.record import OnMesh, trace_on_mesh
from parity.measure.core.arrays import to_numpy
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.trace import Reference, Trace
from parity.measure.core.weights import Weights
from parity.measure.sharding.mesh import MeshPlan, why_not_divided
from parity.measure.sharding.shard import ShardPlan, local_heads, shard

WORDS = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
}
"""Names of torch's collectives in reports."""

_started: list[Processes] = []
_allowed = 1


def make_devices(count: int) -> None:
    """Allow that many processes, which are started on demand."""
    global _allowed
    _allowed = count


def check_devices(plan: MeshPlan) -> None:
    """Refuse a mesh of more devices than allowed processes."""
    if plan.size > _allowed:
        raise InputError(
            "mesh",
            "have no more devices than torch has processes",
            f"{plan} and {_allowed}",
            hint=f"--virtual-devices {plan.size} starts them",
        )


def why_skipped(case: Case, dtype: str, plan: MeshPlan) -> str | None:
    """Return why a case cannot run on a mesh, or None."""
    if reason := why_not_divided(case, plan):
        return reason
    try:
        check_divides(case.spec, plan.tensor)
    except InputError as refusal:
        return f"{refusal.argument} must {refusal.rule}"
    if plan.sequence == 1:
        return None
    known = {**case.hides, "is_causal": None, "key_padding_lengths": None}
    if (
        case.random_mask
        or case.window_size is not None
        or case.bias
        or any(x is not None for x in known.values())
    ):
        return "masks and biases would have to circulate with the keys"
    if isinstance(case.spec.relative_bias, GridBias):
        return "a ring supports only biases by distance"
    rope = case.spec.rope
    if rope is not None and rope.depends_on_length:
        return "length-dependent frequencies of a part differ from those of the whole"
    return None


def record(reference: Reference, plan: MeshPlan) -> Trace:
    """Run a problem on a mesh, with all stages gathered."""
    if not _started or _started[-1].size != plan.size or not _started[-1].is_running:
        end()
        _started.append(Processes(plan.size, record_own))
    given = Given(reference.problem, reference.with_gradients, reference.given)
    return _started[-1].record(given, plan)


def end() -> None:
    """Stop the processes that were started."""
    while _started:
        _started.pop().stop()


def record_own(given: Given, plan: MeshPlan) -> Trace:
    """Run a problem in one of the processes."""
    return trace_on_mesh("torch", _TorchOnMesh(plan), cast(Reference, given))


# ---- Mesh position -------------------------------------------------------------------------------


@cache
def _mesh_of(shape: tuple[tuple[str, int], ...]) -> Any:
    names, sizes = zip(*shape, strict=True)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


class _Dimension:
    """Dimension of the mesh, and the rank of this process in it."""

    def __init__(self, mesh: Any, name: str) -> None:
        is_there = name in mesh.mesh_dim_names
        self.group = mesh[name].get_group() if is_there else None
        self.size, self.rank = (
            (mesh[name].size(), mesh[name].get_local_rank()) if is_there else (1, 0)
        )

    def part(self, x: Tensor, axis: int) -> Tensor:
        """Return the local part of an axis."""
        return x.chunk(self.size, axis)[self.rank]

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return the parts of all processes."""
        if self.size == 1:
            return [x]
        found = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        dist.all_gather(found, x.contiguous(), group=self.group)
        return found

    def whole(self, x: Tensor, axis: int) -> Tensor:
        """Return the concatenated parts of all processes."""
        return torch.cat(self.parts(x), axis)

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x, group=self.group)
        return x


class _TorchParts(Shapes):
    """Local stages and caches, of some sequences and heads."""

    port: Any

    def from_numpy(self, name: str, x: np.ndarray) -> Tensor:
        if name == "gate":
            return self.port.tensor.part(self.port.from_numpy(x), 2)
        if name == "latents":
            return self.port.data.part(port.from_numpy(x), 0)
        if name in OF_KEYS and self.spec.latent is None:
            return self.port.data.part(port.from_numpy(x), 0)[:, self._keys[self.port.tensor.rank]]
        return self.port.from_numpy(x)

    def to_numpy(self, name: str, x: Tensor) -> np.ndarray:
        if name in OF_KEYS and self.spec.latent is None:
            x = self._all_keys(x)
        elif name == "gate" or (name == "output" and not self.spec.out_proj):
            x = self.port.tensor.whole(x, 2)
        elif name not in ("output", "latents", "lengths"):
            x = self.port.tensor.whole(x, 1)
        return to_numpy(self.port.data.whole(x, 0))

    def _all_keys(self, x: Tensor) -> Tensor:
        """Gather the key/value heads of all processes; replicated ones must be equal."""
        whole = torch.empty((x.shape[0], self.spec.num_kv_heads, *x.shape[2:]), dtype=x.dtype)
        held = list(zip(self._keys, self.port.tensor.parts(x), strict=True))
        for heads, part in held:
            whole[:, heads] = part
        for rank, (heads, part) in enumerate(held):
            if not torch.equal(whole[:, heads].nan_to_num(), part.nan_to_num()):
                raise InputError(
                    "key/value heads that processes share", "be alike", f"others on process {rank}"
                )
        return whole

    @property
    def _keys(self) -> Sequence[list[int]]:
        """Return the key/value heads of each process."""
        size = self.port.tensor.size
        return [local_heads(self.spec, ShardPlan(size), rank).keys for rank in range(size)]


class _TorchOnMesh(OnMesh):
    """Port of torch with local tensors."""

    SHAPES = _TorchParts

    def __init__(self, plan: MeshPlan) -> None:
        super().__init__(port, plan)
        self.mesh = _mesh_of(tuple(plan.shape.items()))
        self.data, self.tensor, self.sequence = (
            _Dimension(self.mesh, n) for n in ("data", "tensor", "sequence")
        )
        self.case: Any = None
        self.own: Any = None
        self.module: Any = None

    @contextmanager
    def lock(self, dtype: str) -> Iterator[dict[str, Any]]:
        with super().lock(dtype) as numerics:
            yield numerics | {"processes": "gloo"}

    def filled(self, problem: Problem) -> _TorchModuleOnMesh:
        self.case = problem.case
        filled = _TorchModuleOnMesh(problem, self)
        self.own, self.module = filled.own, filled.module_of_heads
        return filled

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a stage for local heads; outputs are summed over processes."""
        spec = self.case.spec
        own = (self.own if argument is spec else argument for argument in arguments)
        with torch.no_grad():
            found = function(_Joining(self.module), *own)
        is_part = spec.out_proj and function.__name__ == "_combine"
        return self.tensor.summed(found) if is_part else found

    def from_numpy(self, x: np.ndarray) -> Tensor:
        """Return local parts: tokens (B, T, ·) by sequences, scores (B, N, T, S) also by heads."""
        found = self.data.part(port.from_numpy(x), 0)
        return self.tensor.part(found, 1) if x.ndim == 4 else found

    def to_numpy(self, x: Tensor) -> np.ndarray:
        """Gather scores and weights."""
        return to_numpy(self.data.whole(self.tensor.whole(x, 1), 0))

    def beside(self, x: np.ndarray) -> Tensor:
        """Return local masks and biases (…, T, S), positions (…, B or 1, T) and lengths (B,)."""
        found = port.beside(x)
        batch, heads = self.case.batch, self.case.spec.num_heads
        axis = 1 if x.ndim == 3 else 0  # positions with sections
        is_mask = x.ndim == 2 and x.dtype == bool
        if found.shape[axis] == batch and not is_mask:
            found = self.data.part(found, axis)
        return self.tensor.part(found, 1) if x.ndim == 4 and x.shape[1] == heads else found

    def pull_back(
        self,
        path: str,
        filled: _TorchModuleOnMesh,
        spec: AttentionSpec,
        inputs: dict[str, Tensor],
        hidden: dict[str, Any],
    ) -> tuple[dict[str, np.ndarray], Weights]:
        """Return gathered gradients of inputs, and gradients of weights summed over sequences and
        tokens.
        """
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        module = filled.module if path else filled.module_of_heads
        divided = self.sequence if path else _Dimension(self.mesh, "")
        tokens = {name: divided.part(x, 1) if name != "bias" else x for name, x in leaves.items()}
        cotangent = divided.part(hidden["cotangent"], 1)
        if not spec.out_proj:
            cotangent = self.tensor.part(cotangent, 2)
        hiding = {name: hidden[name] for name in ("mask", "key_padding_lengths") if name in hidden}
        arguments = {**tokens, **hiding, "positions": hidden["positions"]}
        output, _ = filled.attend(module, arguments, need_weights=not path)
        with self.counting(f"{path}.gradient".removeprefix(".")):
            output.backward(cotangent)
        of_inputs = {}
        for name, leaf in leaves.items():
            grad = cast(Tensor, leaf.grad)
            # Each process has the gradient of its tokens, and 0 elsewhere.
            grad = self.tensor.whole(grad, 1) if name == "bias" else divided.summed(grad)
            of_inputs[name] = to_numpy(self.data.whole(grad, 0))
        of_weights = {}
        for name, held in module.named_parameters():
            grad = held.grad.full_tensor() if is_distributed(held.grad) else held.grad
            of_weights[name] = self.data.summed(divided.summed(grad))
        module.zero_grad()
        return of_inputs, port.from_state_dict(of_weights, spec)

    @contextmanager
    def counting(self, program: str) -> Iterator[None]:
        """Count collectives, and messages between two processes."""
        passed: list[Any] = []

        def send(operations: list[Any], original: Any = dist.batch_isend_irecv) -> Any:
            passed.extend(each for each in operations if each.op is dist.irecv)
            return original(operations)

        with CommDebugMode() as mode, patch.object(dist, "batch_isend_irecv", send):
            yield
        counts = {
            str(operation).rpartition(".")[2]: count
            for operation, count in mode.get_comm_counts().items()
        }
        self.sent[program] = {WORDS.get(name, name): count for name, count in counts.items()}
        if passed:
            self.sent[program]["collective-permute"] = len(passed)


class _Joining:
    """Functions of `mha_torch`, or of a divided module for norms over the width and for shared
    key/value heads.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(mha_torch, name)

    def project_with(self, weights: Any, spec: AttentionSpec) -> Callable[[str, Tensor], Tensor]:
        project, whole = mha_torch.project_with(weights, spec), self.module.full_spec
        joined = {*spec.wide_norms}
        if whole.num_kv_heads % (whole.num_heads // spec.num_heads):
            joined |= {"k_proj", "v_proj"}

        def projected(name: str, x: Tensor) -> Tensor:
            return self.module.project(name, x) if name in joined else project(name, x)

        return projected


class _TorchModuleOnMesh(port.TorchModule):
    """Module with the weights of a problem, divided by heads, and one also by tokens; collectives
    are counted.
    """

    def __init__(self, problem: Problem, on_mesh: _TorchOnMesh) -> None:
        super().__init__(problem)
        self.on_mesh, self.case, spec = on_mesh, problem.case, problem.spec
        names = on_mesh.mesh.mesh_dim_names
        if "tensor" in names:
            parallel.shard(self.module, on_mesh.mesh, heads="tensor")
        self.module_of_heads = self.module
        if "sequence" in names:
            self.module = port.TorchModule(problem).module
            heads = "tensor" if "tensor" in names else None
            parallel.shard(self.module, on_mesh.mesh, heads=heads, tokens="sequence")
        size, rank = on_mesh.tensor.size, on_mesh.tensor.rank
        held, own = shard(problem.weights, spec, ShardPlan(size), rank, alone=False)
        self.weights = port.to_state_dict(held, own)
        self.own = replace(self.module.spec, out_bias=own.out_bias)
        if problem.case.is_cached:
            init_cache = self.module.init_cache
            self.module.init_cache = lambda batch, capacity: init_cache(
                batch // on_mesh.data.size, capacity
            )

    def contain(self, contained: Callable[[Any], Any]) -> None:
        if not isinstance(self.module.kernel, RingAttention):  # which contains NaN itself
            super().contain(contained)

    def attend(
        self, module: Any, inputs: dict[str, Any], **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Call the module with its local inputs."""
        if not isinstance(module.kernel, RingAttention):
            return module(**inputs, **options)
        lengths, positions = self.case.key_padding_lengths, inputs["positions"]
        if lengths is not None:
            lengths = self.on_mesh.data.part(torch.as_tensor(lengths), 0)
        if positions is not None:
            positions = self.on_mesh.sequence.part(positions, -1)
        tokens = (inputs["query"], inputs.get("key"))
        return module(
            *tokens, is_causal=self.case.is_causal, key_padding_lengths=lengths, positions=positions
        )

    @torch.no_grad()
    def outputs(self, query: Tensor, **inputs: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        key, sequence = inputs.pop("key"), self.on_mesh.sequence
        with self.on_mesh.counting("forward"):
            output, attn_weights = self.attend(
                self.module_of_heads, {"query": query, "key": key, **inputs}, need_weights=True
            )
        own = {
            "query": sequence.part(query, 1),
            "key": None if key is None else sequence.part(key, 1),
            **inputs,
        }
        with self.on_mesh.counting("fused.forward"):
            fused, _ = self.attend(self.module, own)
        return cast(Tensor, attn_weights), {"module": output, "fused": sequence.whole(fused, 1)}

    @torch.no_grad()
    def step(
        self, x: Tensor, cache: Any, new_lengths: Tensor | None, positions: Tensor | None
    ) -> tuple[dict[str, Tensor], Any]:
        with self.on_mesh.counting("step" if x.shape[1] == 1 else "prompt"):
            return super().step(x, cache, new_lengths, positions)
