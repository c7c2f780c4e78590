"""torch backend: loading of canonical weights into `mha_torch` modules, and running cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mha_torch
import mha_torch.plain
from mha_spec import AttentionSpec, InputTypeError
from mha_torch.arrays import is_distributed
from parity.measure.backends.port import (
    FilledModule,
    Shapes,
    kind_of,
    kind_of_tutorial,
    never_skipped,
    nothing_replayed,
)
from parity.measure.core.arrays import to_numpy, to_torch
from parity.measure.core.problem import Problem
from parity.measure.core.weights import (
    Weights,
    check_held,
    check_weights,
    pack_qkv,
    unpack_qkv,
    weight_shapes,
)

_device = torch.device("cpu")


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Create tensors and modules on a device within the context."""
    global _device
    before, _device = _device, torch.device(device)
    try:
        yield
    finally:
        _device = before


def from_numpy(x: Any) -> Tensor:
    """Return a tensor of the same values and dtype."""
    return to_torch(x).to(_device)


# ---- Weights -------------------------------------------------------------------------------------


def load_into(module: Any, weights: Mapping[str, np.ndarray]) -> Any:
    """Fill a module of `mha_torch` from canonical weights, bit for bit; unchanged on errors."""
    spec = spec_of(module)
    tensors = to_state_dict(check_weights(weights, spec), spec)
    parameters = dict(module.named_parameters())
    check_held(parameters, spec)
    for name, tensor in tensors.items():
        if tensor.dtype != parameters[name].dtype:
            raise InputTypeError(
                "weights",
                "have the dtype of the module",
                f"{tensor.dtype} and {parameters[name].dtype} for {name}",
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            if is_distributed(parameters[name]):
                # Here, because it imports torch.distributed.
                from mha_torch.parallel.local import copy_from_full

                copy_from_full(parameters[name], tensor.to(parameters[name].device))
            else:
                parameters[name].copy_(tensor)
    return module


def spec_of(module: Any) -> AttentionSpec:
    """Return the specification of a module of `mha_torch`."""
    return module.full_spec


def weights_of(module: Any) -> Weights:
    """Return the canonical weights of a module of `mha_torch`, bit for bit.

    Distributed ones are gathered.
    """
    spec, parameters = spec_of(module), dict(module.named_parameters())
    check_held(parameters, spec)
    tensors = {}
    for name, parameter in parameters.items():
        tensors[name] = parameter.full_tensor() if is_distributed(parameter) else parameter
    return from_state_dict(tensors, spec)


def to_state_dict(weights: Mapping[str, np.ndarray], spec: AttentionSpec) -> dict[str, Tensor]:
    """Return canonical weights as the state dict of a layer with this specification."""
    if spec.fused_qkv:
        weights = pack_qkv(weights)
    return {name: from_numpy(weight) for name, weight in weights.items()}


def from_state_dict(tensors: Mapping[str, Tensor], spec: AttentionSpec) -> Weights:
    """Return canonical weights from the state dict of a layer with this specification."""
    weights = {name: to_numpy(tensor).copy() for name, tensor in tensors.items()}
    if spec.fused_qkv:
        return unpack_qkv(weights, spec)
    return {name: weights[name] for name in weight_shapes(spec)}


# ---- Cases ---------------------------------------------------------------------------------------


SIBLING = mha_torch
SHAPES = Shapes
GRADIENT_PATHS = ("", "fused")
argument = whole_argument = from_numpy
why_skipped, replayed = never_skipped, nothing_replayed


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function without compilation."""
    return function(SIBLING, *arguments)


class TorchModule(FilledModule):
    """Module with the weights of a problem, in evaluation mode."""

    def __init__(self, problem: Problem) -> None:
        kind = kind_of(mha_torch, problem.case)
        module = kind(problem.spec, dtype=getattr(torch, problem.dtype), device=_device).eval()
        self.module: Any = load_into(module, problem.weights)
        self.weights = to_state_dict(problem.weights, problem.spec)

    outputs = torch.no_grad()(FilledModule.outputs)
    step = torch.no_grad()(FilledModule.step)


filled = TorchModule


def tutorial(problem: Problem) -> Any:
    """Return the tutorial's module with the weights of a problem, in evaluation mode."""
    spec, kind = problem.spec, kind_of_tutorial(mha_torch, problem.case)
    module = kind(spec.d_model, spec.num_heads, bias=spec.out_bias).to(
        _device, getattr(torch, problem.dtype)
    )
    module.load_state_dict({name: from_numpy(weight) for name, weight in problem.weights.items()})
    return module.eval()


def pull_back(
    path: str,
    filled: TorchModule,
    spec: AttentionSpec,
    inputs: dict[str, Tensor],
    hidden: dict[str, Any],
) -> tuple[dict[str, np.ndarray], Weights]:
    """Return gradients of the inputs and canonical weights on a path."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    weights = {name: weight.clone().requires_grad_() for name, weight in filled.weights.items()}
    # A layer without projections of its own for keys and values receives them as k and v.
    output, _ = mha_torch.multi_head_attention(
        leaves["query"],
        weights,
        spec,
        leaves.get("key", leaves.get("k")),
        leaves.get("v"),
        mask=hidden["mask"],
        key_padding_lengths=hidden.get("key_padding_lengths"),
        bias=leaves.get("bias"),
        need_weights=not path,  # the path without a name returns them; fused ones have none
        positions=hidden["positions"],
    )
    grads = torch.autograd.grad(output, [*leaves.values(), *weights.values()], hidden["cotangent"])
    of_inputs, of_weights = grads[: len(leaves)], grads[len(leaves) :]
    return (
        {name: to_numpy(grad) for name, grad in zip(leaves, of_inputs, strict=True)},
        from_state_dict(dict(zip(weights, of_weights, strict=True)), spec),
    )


# ---- Environment ---------------------------------------------------------------------------------


@contextmanager
def lock(dtype: str) -> Iterator[dict[str, Any]]:
    """Fix and report the settings that affect torch's results, and restore them afterwards."""
    cuda, cudnn, mha = torch.backends.cuda, torch.backends.cudnn, torch.backends.mha
    precision, fastpath = torch.get_float32_matmul_precision(), mha.get_fastpath_enabled()
    switches: list[tuple[Any, str]] = [
        (cudnn, "allow_tf32"),
        (cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        (cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    ]
    before = [getattr(holder, name) for holder, name in switches]
    sdp_backends = {
        "flash": cuda.flash_sdp_enabled(),
        "mem_efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }
    try:
        torch.set_float32_matmul_precision("highest")  # no TF32 or bfloat16 inside float32 products
        mha.set_fastpath_enabled(False)
        for holder, name in switches:
            setattr(holder, name, False)
        yield {
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "cudnn_allow_tf32": cudnn.allow_tf32,
            "fp16_reduced_precision_reduction": False,
            "bf16_reduced_precision_reduction": False,
            "mha_fastpath": mha.get_fastpath_enabled(),
            "sdp_backends": [name for name, is_enabled in sdp_backends.items() if is_enabled],
            "threads": torch.get_num_threads(),
        }
    finally:
        torch.set_float32_matmul_precision(precision)
        mha.set_fastpath_enabled(fastpath)
        for (holder, name), value in zip(switches, before, strict=True):
            setattr(holder, name, value)


def environment() -> dict[str, Any]:
    """Return versions and devices."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"torch": torch.__version__, "device": str(_device), "cuda_devices": devices}
