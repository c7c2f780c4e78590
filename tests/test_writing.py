"""Layers written out as plain code: every case of the run, in JAX and torch, and the loaders, tests and command."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import mha_jax
import mha_torch
import parity
from mha_spec import AttentionSpec, Latent, Llama3Scaling, Norm, Refusal, Rope
from parity.conversion.layers import open_layers
from parity.conversion.layouts import LAYOUTS, from_canonical
from parity.core.arrays import to_torch
from parity.core.cases import CASES
from parity.core.problem import Problem
from parity.writing import source_of, source_of_layer
from parity.writing.specialize import specialize
from tests.written import NOT_FINITE, WRITTEN, Writing, call_of, module_of, problem_of

LLAMA = AttentionSpec(
    4096,
    32,
    num_kv_heads=8,
    qkv_bias=False,
    out_bias=False,
    rope=Rope(500000.0, scaling=Llama3Scaling(8.0, 8192)),
)


def nested(weights: dict[str, np.ndarray], spec: AttentionSpec) -> dict[str, Any]:
    """Return canonical weights as the parameters of what is written in JAX."""
    params: dict[str, Any] = {}
    for name, array in from_canonical(weights, spec.replace(fused_qkv=False), LAYOUTS["mha_jax"]).items():
        part, _, leaf = name.partition(".")
        if leaf:
            params.setdefault(part, {})[leaf] = jnp.asarray(array)
        else:
            params[part] = jnp.asarray(array)
    return params


def torch_layer(module: Any, problem: Problem) -> Any:
    layer = module.Attention().to(getattr(torch, problem.dtype)).eval()
    layer.load_state_dict({name: to_torch(weight) for name, weight in problem.weights.items()})
    return torch.no_grad()(layer)


def jax_layer(module: Any, problem: Problem) -> Any:
    params, attention = nested(problem.weights, problem.spec), jax.jit(module.attention)
    return lambda **given: attention(params, **given)


TORCH = Writing(
    mha_torch,
    torch_layer,
    lambda module, _, case: module.empty_cache(case.batch, case.capacity),
    lambda _, x: to_torch(np.ascontiguousarray(x)),
    lambda x: to_torch(np.ascontiguousarray(x)),
)
JAX = Writing(
    mha_jax,
    jax_layer,
    lambda module, _, case: module.empty_cache(case.batch, case.capacity),
    lambda _, x: jnp.asarray(x),
    jnp.asarray,
)


# ---- Every case ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("framework", [pytest.param("jax", marks=pytest.mark.sibling), "torch"])
def test_every_case_is_written_and_agrees_with_the_reference(framework, name):
    problem = problem_of(name)
    module = module_of(source_of(problem.spec, framework, **call_of(problem.case)))
    outputs = {"jax": JAX, "torch": TORCH}[framework].outputs(module, problem)
    parity.assert_parity(outputs, problem=problem, diagnose=False)


def test_only_cases_of_nan_are_not_written():
    assert {name for name, case in CASES.items() if case.not_finite} == NOT_FINITE
    assert len(NOT_FINITE) < len(CASES) / 10
