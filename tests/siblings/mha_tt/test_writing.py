"""Layers written as TTNN code, for every case, on a mock board."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ttnn
from helpers.samples import sample
from helpers.written import WRITTEN, Writing, call_of, module_of, problem_of

import mha_tt
import parity
import ttnn_mock
from mha_spec import AttentionSpec
from parity.explain.writing import source_of
from parity.measure.backends import tt
from parity.measure.core.cases import CASES
from parity.measure.core.problem import Problem

FLOAT16 = {name for name, case in CASES.items() if case.dtype == "float16"}
"""Cases in a dtype that ttnn does not have."""


def tt_layer(module: Any, problem: Problem) -> Any:
    return module.Attention(problem.weights, tt.open_device(), ttnn.float32)


TT = Writing(
    mha_tt,
    tt_layer,
    lambda _, layer, problem: layer.empty_cache(problem.case.batch, problem.case.capacity),
    lambda layer, x: layer.upload(np.ascontiguousarray(x)),
    np.asarray,
)


@sample(64)
@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in FLOAT16])
def test_written_layers_match_reference(name):
    """The layer written for each case runs in ttnn and matches the reference."""
    problem = problem_of(name)
    module = module_of(source_of(problem.spec, "ttnn", **call_of(problem.case)))
    with ttnn_mock.shadow():
        outputs = TT.outputs(module, problem)
        parity.assert_parity(outputs, problem=problem, diagnose=False)


def test_written_layer_computes_in_bfloat16():
    """A written layer computes in bfloat16 by default, within its tolerance."""
    spec = AttentionSpec(64, 4, num_kv_heads=2)
    problem = parity.make_problem(
        parity.Case("bf16", spec, "narrow", seq_len=9, is_causal=True), "bfloat16"
    )
    module = module_of(source_of(spec, "ttnn"))
    with ttnn_mock.shadow():
        layer = module.Attention(problem.weights, tt.open_device())
        output = layer(layer.upload(problem.inputs["query"]))
        assert output.dtype == ttnn.bfloat16
        parity.assert_parity({"module.output": output}, problem=problem)
