"""Tests of counts of kernels, copies and waits in profiles of torch and programs of JAX."""

import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from helpers.command_line import parsed
from helpers.heads import fused_attention

import mha_torch
from parity_lab.bench.operations import (
    MARK,
    Event,
    Operations,
    operations_of_events,
    operations_of_program,
    operations_of_torch,
)

X, WEIGHT, MASK = torch.ones(4, 5), torch.ones(3, 5), torch.ones(4, 5, dtype=torch.bool)

# Calls of torch on a CPU, with their kernels, copies and waits.
ON_A_CPU = {
    "sum": (X.sum, {"aten::sum": 1}, 0, 0),
    "views": (lambda: X.mT[None].unflatten(1, (-1, 1))[:, 1:], {}, 0, 0),
    "contiguous-as-it-is": (X.contiguous, {}, 0, 0),
    "contiguous": (lambda: X.mT.contiguous(), {"aten::clone": 1}, 1, 0),
    "reshape-with-a-copy": (lambda: X.mT.reshape(-1), {"aten::clone": 1}, 1, 0),
    "another-dtype": (X.double, {"aten::_to_copy": 1}, 1, 0),
    "the-same-dtype": (X.float, {}, 0, 0),
    "linear": (lambda: F.linear(X, WEIGHT), {"aten::mm": 1}, 0, 0),
    "item": (lambda: X.sum().item(), {"aten::sum": 1, "aten::_local_scalar_dense": 1}, 0, 1),
    "two-items": (lambda: (X[0, 0].item(), float(X[1, 1])), {"aten::_local_scalar_dense": 2}, 0, 2),
    "branch": (lambda: 1 if X[0, 0] else 2, {"aten::_local_scalar_dense": 1}, 0, 1),
    "nonzero": (X.nonzero, {"aten::nonzero": 1}, 0, 1),
    "select": (lambda: X.masked_select(MASK), {"aten::masked_select": 1}, 1, 1),
    "equal": (
        lambda: torch.equal(X, WEIGHT.sum(0).expand(4, 5)),
        {"aten::sum": 1, "aten::equal": 1},
        0,
        1,
    ),
}


@pytest.mark.parametrize(("run", "kernels", "copies", "syncs"), ON_A_CPU.values(), ids=ON_A_CPU)
def test_operations_of_torch_are_counted(run, kernels, copies, syncs):
    """Kernels, copies and waits of a torch call on a CPU are those in ON_A_CPU."""
    run()
    assert operations_of_torch(run) == Operations(kernels, copies, syncs)


def test_operations_of_gradients_are_counted():
    """The profile of a gradient has both matrix products, forward and backward."""
    x = X.clone().requires_grad_()
    assert (
        operations_of_torch(lambda: torch.autograd.grad((x @ WEIGHT.mT).sum(), x)).kernels[
            "aten::mm"
        ]
        == 2
    )


def test_fused_attention_is_one_kernel():
    """Fused attention of torch on a CPU runs one flash kernel, and no copy or wait."""
    heads = torch.randn(3, 1, 2, 40, 16)
    with torch.inference_mode():
        operations = operations_of_torch(lambda: fused_attention(mha_torch)(*heads, is_causal=True))
    assert operations.kernels["aten::_scaled_dot_product_flash_attention_for_cpu"] == 1
    assert (operations.copies, operations.syncs) == (0, 0)


def of_gpu(*children, kernels=()):
    """Return events of operations, and of kernels that they launched."""
    return [*children, *(Event(name, is_on_device=True) for name in kernels)]


FLASH = "void pytorch_flash::flash_fwd_kernel<Traits<64>>(Params)"
ON_A_GPU = {
    "attention": (
        of_gpu(
            Event("aten::scaled_dot_product_attention", children=(Event("cudaLaunchKernel"),)),
            kernels=[FLASH, FLASH],
        ),
        ({FLASH: 2}, 0, 0),
    ),
    "item": (
        of_gpu(
            Event(
                "aten::item",
                children=(
                    Event(
                        "aten::_local_scalar_dense",
                        children=(Event("cudaMemcpyAsync"), Event("cudaStreamSynchronize")),
                    ),
                ),
            ),
            kernels=["Memcpy DtoH (Device -> Pageable)"],
        ),
        ({}, 0, 1),
    ),
    "contiguous": (
        of_gpu(
            Event(
                "aten::clone",
                children=(Event("aten::copy_", children=(Event("cudaLaunchKernel"),)),),
            ),
            kernels=["elementwise_kernel", "Memset (Device)"],
        ),
        ({"elementwise_kernel": 1}, 1, 0),
    ),
    "wait": (of_gpu(Event("hipDeviceSynchronize"), kernels=["k"]), ({"k": 1}, 0, 1)),
}


@pytest.mark.parametrize(("events", "expected"), ON_A_GPU.values(), ids=ON_A_GPU)
def test_events_of_gpu_are_counted(events, expected):
    """Kernels, copies and waits in events of a GPU are those in ON_A_GPU, without its own
    copies to the host.
    """
    assert operations_of_events(events) == Operations(*expected)


def test_profile_has_only_events_of_run():
    """A profile has neither its mark nor operations between two runs."""

    def run():
        return X.sum()

    assert MARK not in operations_of_torch(run).kernels
    X.mul(2.0)
    assert operations_of_torch(run).kernels == {"aten::sum": 1}


# ---- JAX -----------------------------------------------------------------------------------------


def program(function, *arrays):
    return operations_of_program(jax.jit(function).lower(*arrays).compile().as_text())


def test_callbacks_of_a_program_are_waits():
    """A callback in a program of JAX counts as one wait; a program without one has none."""
    x = jnp.ones((4, 5), jnp.float32)

    def read(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    assert program(jnp.sin, x).syncs == 0
    assert program(read, x).syncs == 1


def test_custom_calls_are_named_by_target():
    """A program's custom calls are counted by target, with fusions and copies, but not those
    inside a fusion.
    """
    text = """HloModule jit_f

%fused_computation (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %copy.9 = f32[4]{0} copy(%p)
}

ENTRY %main (a: bf16[1,2,8,64]) -> bf16[1,2,8,64] {
  %a = bf16[1,2,8,64]{3,2,1,0} parameter(0)
  %copy.1 = bf16[1,2,8,64]{3,1,2,0} copy(%a)
  %call = (bf16[1,2,8,64]{3,1,2,0}, u8[0]{0}) custom-call(%copy.1), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %f = bf16[1,2,8,64]{3,2,1,0} fusion(%call), kind=kLoop, calls=%fused_computation
}
"""
    expected = Operations({"copy": 1, "__cudnn$fmhaSoftmax": 1, "fusion": 1}, copies=1, syncs=0)
    assert operations_of_program(text) == expected


# ---- The command ---------------------------------------------------------------------------------


@pytest.mark.costly("make prints the recipe")
def test_gpu_benchmark_runs_its_cases_first():
    """`make bench-gpu` runs `run` before `bench`, both with --device cuda. Without a GPU,
    `run` fails (test_run tests its error), and `set -e` ends the rest.
    """
    shown = subprocess.run(
        ["make", "--dry-run", "bench-gpu"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    recipe = shown.stdout.replace("\\\n", " ")
    assert "set -e;" in recipe
    commands = [line.split() for line in re.findall(r"-m parity ([^;\n]+)", recipe)]
    options = [
        parsed(["torch" if word == "$backends" else word for word in command])
        for command in commands
    ]
    assert [command[0] for command in commands] == ["run", "bench"]
    assert [option["device"] for option in options] == ["cuda", "cuda"]
