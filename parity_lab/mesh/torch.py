"""torch backend on a mesh: the same modules, divided by `mha_torch.parallel`, and counts of their
collectives.

Each process runs each stage with its sequences and heads and gathers it, so that all continue with
the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
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
from parity.measure.backends import torch as one_device
from parity.measure.backends.driver import combine
from parity.measure.backends.port import OF_KEYS, Shapes
from parity.measure.core.arrays import to_numpy
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.trace import Reference
from parity.measure.core.weights import Weights
from parity.measure.sharding.shard import ShardPlan, local_heads, shard
from parity_lab.mesh.backend import MeshPort, MeshTrace, name_of_call, name_of_gradient, record_with
from parity_lab.mesh.plan import MeshPlan, advice_on_devices, why_not_divided, why_rejected
from parity_lab.mesh.processes import ProblemPart, Processes

KINDS = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
}
"""Names of torch's collectives in reports."""

_started: list[Processes] = []
_most_processes = 1


def make_devices(count: int) -> None:
    """Allow that many processes, which are started on demand."""
    global _most_processes
    _most_processes = count


def check_devices(plan: MeshPlan) -> None:
    """Reject a mesh of more devices than allowed processes."""
    if plan.size > _most_processes:
        raise InputError(
            "mesh",
            "have no more devices than torch has processes",
            f"{plan} and {_most_processes}",
            hint=advice_on_devices(plan, "starts"),
        )


def why_skipped(case: Case, dtype: str, plan: MeshPlan) -> str | None:
    """Return why a case cannot run on a mesh, or None."""
    reason = why_not_divided(case, plan)
    if reason is None:
        reason = why_rejected(check_divides, case.spec, plan.tensor)
    if reason is not None:
        return reason
    if plan.sequence == 1:
        return None
    if _has_masks_or_biases(case):
        return "masks and biases would have to circulate with the keys"
    if isinstance(case.spec.relative_bias, GridBias):
        return "a ring supports only biases by distance"
    rope = case.spec.rope
    if rope is not None and rope.depends_on_length:
        return "length-dependent frequencies of a part differ from the frequencies of the whole"
    return None


def _has_masks_or_biases(case: Case) -> bool:
    """Return whether a case has arrays for pairs of tokens; a ring supports causality, lengths, and
    a window or chunks of the layer without them.
    """
    if case.random_mask or case.bias or case.window_size is not None:
        return True
    supported = ("is_causal", "key_padding_lengths")
    return any(x is not None for name, x in case.hides.items() if name not in supported)


def record(reference: Reference, plan: MeshPlan) -> MeshTrace:
    """Run a problem on a mesh, with all stages gathered."""
    if not _started or _started[-1].size != plan.size or not _started[-1].is_running:
        end()
        _started.append(Processes(plan.size, record_part))
    part = ProblemPart(reference.problem, reference.with_gradients, reference.rounded)
    return _started[-1].record(part, plan)


def end() -> None:
    """Stop the processes that were started."""
    while _started:
        _started.pop().stop()


def record_part(part: ProblemPart, plan: MeshPlan) -> MeshTrace:
    """Run a problem in one of the processes."""
    return record_with("torch", _TorchOnMesh(plan), cast(Reference, part))


# ---- Mesh position -------------------------------------------------------------------------------


@cache
def _device_mesh(sizes: tuple[tuple[str, int], ...]) -> Any:
    """Return the mesh of these dimensions, once, because each one makes process groups."""
    names, counts = zip(*sizes, strict=True)
    return init_device_mesh("cpu", counts, mesh_dim_names=names)


class _Dimension:
    """Dimension of the mesh, and the rank of this process in it.

    A dimension that the mesh lacks has one process.
    """

    def __init__(self, mesh: Any, name: str) -> None:
        self.group: Any = None
        self.size, self.rank = 1, 0
        if name in mesh.mesh_dim_names:
            self.group = mesh[name].get_group()
            self.size = mesh[name].size()
            self.rank = mesh[name].get_local_rank()

    def part(self, x: Tensor, axis: int) -> Tensor:
        """Return the local part of an axis."""
        return x.chunk(self.size, axis)[self.rank]

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return the parts of all processes."""
        if self.size == 1:
            return [x]
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return parts

    def whole(self, x: Tensor, axis: int) -> Tensor:
        """Return the concatenated parts of all processes."""
        return torch.cat(self.parts(x), axis)

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.size == 1:
            return x
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x


class _LocalShapes(Shapes):
    """Local stages and caches, of some sequences and heads."""

    port: Any

    def from_numpy(self, name: str, x: np.ndarray) -> Tensor:
        if name == "gate":
            return self.port.tensor.part(self.port.from_numpy(x), 2)
        if name == "latents":
            return self.port.data.part(one_device.from_numpy(x), 0)
        if name in OF_KEYS and self.spec.latent is None:
            own_heads = self._keys_by_process[self.port.tensor.rank]
            return self.port.data.part(one_device.from_numpy(x), 0)[:, own_heads]
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
        parts = self.port.tensor.parts(x)
        for heads, part in zip(self._keys_by_process, parts, strict=True):
            whole[:, heads] = part
        # Only now: a head that processes share has the values of the last of them.
        for rank, (heads, part) in enumerate(zip(self._keys_by_process, parts, strict=True)):
            if not torch.equal(whole[:, heads].nan_to_num(), part.nan_to_num()):
                raise InputError(
                    "key/value heads that processes share", "be alike", f"others on process {rank}"
                )
        return whole

    @property
    def _keys_by_process(self) -> Sequence[list[int]]:
        """Key/value heads of each process."""
        size = self.port.tensor.size
        return [local_heads(self.spec, ShardPlan(size), rank).keys for rank in range(size)]


class _TorchOnMesh(MeshPort):
    """Port of torch with local tensors.

    Attributes:
        mesh: torch's mesh of processes.
        data, tensor, sequence: its dimensions.
        case: case of the problem.
        own_spec: specification of the local heads.
        module: module divided by heads alone.
    """

    def __init__(self, plan: MeshPlan) -> None:
        super().__init__(one_device, plan, shapes=_LocalShapes)
        self.mesh = _device_mesh(tuple(plan.shape.items()))
        self.data = _Dimension(self.mesh, "data")
        self.tensor = _Dimension(self.mesh, "tensor")
        self.sequence = _Dimension(self.mesh, "sequence")
        # The driver calls `filled` before all else, which sets these.
        self.case: Any = None
        self.own_spec: Any = None
        self.module: Any = None

    @contextmanager
    def lock(self, dtype: str) -> Iterator[dict[str, Any]]:
        with super().lock(dtype) as numerics:
            yield numerics | {"processes": "gloo"}

    def filled(self, problem: Problem) -> _TorchModuleOnMesh:
        self.case = problem.case
        filled = _TorchModuleOnMesh(problem, self)
        self.own_spec, self.module = filled.own_spec, filled.module_of_heads
        return filled

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a stage for local heads; outputs are summed over processes."""
        spec = self.case.spec
        own_arguments = [self.own_spec if x is spec else x for x in arguments]
        # `mha_torch`, except for projections that need other processes.
        project_with = partial(_LocalProjections, self.module)
        sibling = SimpleNamespace(**{**vars(mha_torch), "project_with": project_with})
        with torch.no_grad():
            result = function(sibling, *own_arguments)
        if function is combine and spec.out_proj:
            result = self.tensor.summed(result)
        return result

    def from_numpy(self, x: np.ndarray) -> Tensor:
        """Return local parts: tokens (B, T, ·) by sequences, scores (B, N, T, S) also by heads."""
        part = self.data.part(one_device.from_numpy(x), 0)
        if x.ndim == 4:
            part = self.tensor.part(part, 1)
        return part

    def to_numpy(self, x: Tensor) -> np.ndarray:
        """Gather scores and weights."""
        return to_numpy(self.data.whole(self.tensor.whole(x, 1), 0))

    def argument(self, x: np.ndarray) -> Tensor:
        """Return local masks and biases (…, T, S), positions (…, B or 1, T) and lengths (B,)."""
        part = one_device.argument(x)
        batch, heads = self.case.batch, self.case.spec.num_heads
        axis = 1 if x.ndim == 3 else 0  # positions with sections
        is_mask = x.ndim == 2 and x.dtype == bool  # (T, S), even if T is the number of sequences
        if part.shape[axis] == batch and not is_mask:
            part = self.data.part(part, axis)
        if x.ndim == 4 and x.shape[1] == heads:
            part = self.tensor.part(part, 1)
        return part

    def pull_back(
        self,
        path: str,
        filled: Any,
        spec: AttentionSpec,
        inputs: dict[str, Tensor],
        hidden: dict[str, Any],
    ) -> tuple[dict[str, np.ndarray], Weights]:
        """Return gathered gradients of inputs, and gradients of weights summed over sequences and
        tokens.
        """
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        # The plain path, "", computes whole sequences.
        module = filled.module if path else filled.module_of_heads
        tokens = self.sequence if path else _Dimension(self.mesh, "")
        arguments = {"mask": hidden["mask"], "positions": hidden["positions"]}
        if "key_padding_lengths" in hidden:
            arguments["key_padding_lengths"] = hidden["key_padding_lengths"]
        for name, leaf in leaves.items():
            arguments[name] = leaf if name == "bias" else tokens.part(leaf, 1)
        cotangent = tokens.part(hidden["cotangent"], 1)
        if not spec.out_proj:
            cotangent = self.tensor.part(cotangent, 2)
        output, _ = filled.attend(module, arguments, need_weights=not path)
        with self.counting(name_of_gradient(path)):
            output.backward(cotangent)
        of_inputs = {}
        for name, leaf in leaves.items():
            # Each process has the gradient of its tokens, and 0 elsewhere.
            grad = tokens.summed(cast(Tensor, leaf.grad))
            if name == "bias":
                grad = self.tensor.whole(grad, 1)
            of_inputs[name] = to_numpy(self.data.whole(grad, 0))
        of_weights = {}
        for name, parameter in module.named_parameters():
            grad = parameter.grad
            if is_distributed(grad):
                grad = grad.full_tensor()
            of_weights[name] = self.data.summed(tokens.summed(grad))
        module.zero_grad()
        return of_inputs, one_device.from_state_dict(of_weights, spec)

    @contextmanager
    def counting(self, program: str) -> Iterator[None]:
        """Count collectives, and messages between two processes."""
        received: list[Any] = []

        # torch's mode counts no messages, so this stands for the function that sends them.
        def exchange(operations: list[Any], original: Any = dist.batch_isend_irecv) -> Any:
            received.extend(operation for operation in operations if operation.op is dist.irecv)
            return original(operations)

        with CommDebugMode() as mode, patch.object(dist, "batch_isend_irecv", exchange):
            yield
        counts = {}
        for operation, count in mode.get_comm_counts().items():
            name = str(operation).rpartition(".")[2]
            counts[KINDS.get(name, name)] = count
        if received:
            counts["collective-permute"] = len(received)
        self.counts[program] = counts


class _LocalProjections:
    """Projections to local heads, as functions of their name and input.

    The divided module computes those that need other processes: norms over the width, and keys and
    values if heads of them lie on two processes.
    """

    def __init__(self, module: Any, weights: Any, spec: AttentionSpec) -> None:
        self._module = module
        self._project = mha_torch.project_with(weights, spec)
        self._joined = {*spec.wide_norms}
        whole = module.full_spec
        num_processes = whole.num_heads // spec.num_heads
        if whole.num_kv_heads % num_processes:
            self._joined |= {"k_proj", "v_proj"}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name in self._joined:
            return self._module.project(name, x)
        return self._project(name, x)


class _TorchModuleOnMesh(one_device.TorchModule):
    """Module with the weights of a problem, divided over a mesh; collectives are counted.

    Attributes:
        module: module divided by heads and tokens, as far as the mesh has these dimensions.
        module_of_heads: module divided by heads alone; the same one without divided tokens.
        own_spec: specification of the local heads.
    """

    def __init__(self, problem: Problem, port: _TorchOnMesh) -> None:
        super().__init__(problem)
        self.port, self.case = port, problem.case
        dimensions = port.mesh.mesh_dim_names
        heads = "tensor" if "tensor" in dimensions else None
        if heads is not None:
            parallel.shard(self.module, port.mesh, heads=heads)
        self.module_of_heads = self.module
        if "sequence" in dimensions:
            self.module = one_device.TorchModule(problem).module
            parallel.shard(self.module, port.mesh, heads=heads, tokens="sequence")
        own_weights, own_spec = shard(
            problem.weights,
            problem.spec,
            ShardPlan(port.tensor.size),
            port.tensor.rank,
            alone=False,
        )
        self.weights = one_device.to_state_dict(own_weights, own_spec)
        # Only the first rank adds the bias of out_proj, because stages of local heads are summed.
        self.own_spec = replace(self.module.spec, out_bias=own_spec.out_bias)
        if problem.case.is_cached:
            # The driver requests a cache of all sequences.
            self._init_whole_cache = self.module.init_cache
            self.module.init_cache = self._init_own_cache

    def _init_own_cache(self, batch: int, capacity: int) -> Any:
        return self._init_whole_cache(batch // self.port.data.size, capacity)

    def contain(self, contained: Callable[[Any], Any]) -> None:
        if not isinstance(self.module.kernel, RingAttention):  # which contains NaN itself
            super().contain(contained)

    def attend(
        self, module: Any, inputs: dict[str, Any], **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Call the module with its local inputs."""
        if not isinstance(module.kernel, RingAttention):
            return module(**inputs, **options)
        # A ring has causality and lengths instead of a mask, and no weights.
        lengths, positions = self.case.key_padding_lengths, inputs["positions"]
        if lengths is not None:
            lengths = self.port.data.part(torch.as_tensor(lengths), 0)
        if positions is not None:
            positions = self.port.sequence.part(positions, -1)
        return module(
            inputs["query"],
            inputs.get("key"),
            is_causal=self.case.is_causal,
            key_padding_lengths=lengths,
            positions=positions,
        )

    @torch.no_grad()
    def outputs(self, query: Tensor, **inputs: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = self.port.sequence
        with self.port.counting("forward"):
            output, attn_weights = self.attend(
                self.module_of_heads, {"query": query, **inputs}, need_weights=True
            )
        key = inputs["key"]
        if key is not None:
            inputs["key"] = tokens.part(key, 1)
        with self.port.counting("fused.forward"):
            fused, _ = self.attend(self.module, {"query": tokens.part(query, 1), **inputs})
        return cast(Tensor, attn_weights), {"module": output, "fused": tokens.whole(fused, 1)}

    @torch.no_grad()
    def step(
        self, x: Tensor, cache: Any, new_lengths: Tensor | None, positions: Tensor | None
    ) -> tuple[dict[str, Tensor], Any]:
        with self.port.counting(name_of_call(x.shape[1])):
            return super().step(x, cache, new_lengths, positions)
