"""Cases of a run as plain code, and calls of what is written."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import parity
from parity.core.arrays import to_numpy
from parity.core.cases import CASES
from parity.core.problem import Problem, make_problem

NOT_FINITE = frozenset(name for name, case in CASES.items() if case.not_finite is not None)
"""Cases with NaN in the inputs, which plain code does not contain."""

WRITTEN = [name for name in CASES if name not in NOT_FINITE]
"""The cases that are written."""


def call_of(case: parity.Case) -> dict[str, Any]:
    """Return the keywords that say how the layer of a case is called."""
    is_masked = case.random_mask or case.segment_ids is not None or case.window_size is not None
    return {
        "is_causal": case.is_causal or case.is_cached,
        "is_cross": case.seq_len_k is not None and not case.spec.shared_kv,
        "has_mask": is_masked or case.key_padding_lengths is not None,
        "has_bias": case.bias,
        "has_positions": case.has_positions,
        "cache": None if not case.is_cached else "ragged" if case.new_lengths else "static",
    }


def module_of(source: str) -> Any:
    """Return a module that was written."""
    module = types.ModuleType("written")
    exec(compile(source, "written.py", "exec"), module.__dict__)
    return module


def mask_of(sibling: Any, problem: Problem) -> np.ndarray:
    """Return what a case hides beside causality, True = masked."""
    case = problem.case
    lengths = (case.seq_len, case.key_len)
    hides = {**case.hides, "is_causal": False}
    if sibling.__name__ == "mha_torch" and hides["segment_ids"] is not None:
        hides["segment_ids"] = parity.to_torch(hides["segment_ids"])
    mask = to_numpy(sibling.create_attention_mask(*lengths, **hides))
    if case.window_size is not None:
        mask = mask | to_numpy(sibling.create_sliding_window_mask(*lengths, window_size=case.window_size))
    return mask | problem.inputs["mask"] if "mask" in problem.inputs else mask


@dataclass(frozen=True)
class Writing:
    """Run what is written for a framework.

    Attributes:
        sibling: makes the masks of cases.
        layer: returns a function of a written module and the weights of a problem.
        empty_cache: returns a cache of a written module, or of its layer.
        array: returns an input as an array of the framework.
        beside: returns masks, lengths and positions as the written code accepts them.
    """

    sibling: Any
    layer: Callable[[Any, Problem], Any]
    empty_cache: Callable[[Any, Any, Problem], Any]
    array: Callable[[Any, np.ndarray], Any]
    beside: Callable[[np.ndarray], Any]

    def outputs(self, module: Any, problem: Problem) -> Mapping[str, Any]:
        """Return the outputs of a written module by stage."""
        case, layer = problem.case, self.layer(module, problem)
        if not case.is_cached:
            return {"module.output": layer(**self._arguments(layer, problem))}
        found, shares = {}, case.spec.shared_kv
        cache = None if shares else self.empty_cache(module, layer, problem)
        for step in range(len(case.chunks)):
            given = {"x": self.array(layer, problem.step_input(step))}
            given |= {"other_cache": self._other_cache(module, layer, problem, step)} if shares else {"cache": cache}
            if case.new_lengths:
                given["new_lengths"] = self.beside(np.array(case.added(step)))
            if case.has_positions:
                given["positions"] = self.beside(case.positions(step))
            output = layer(**given)
            found[f"step{step}.module.output"], cache = (output, None) if shares else output
        return found

    def _other_cache(self, module: Any, layer: Any, problem: Problem, last: int) -> Any:
        """Return the cache of another layer, which has appended the tokens of all steps up to the last."""
        case, lengths, slots = problem.case, np.zeros(problem.case.batch, int), {}
        for step in range(last + 1):
            for name in ("k", "v"):
                heads = problem.step_input(step, name)
                batch_size, num_heads, _, width = heads.shape
                empty = np.zeros((batch_size, num_heads, case.capacity, width), heads.dtype)
                for row, (length, added) in enumerate(zip(lengths, case.added(step), strict=True)):
                    slots.setdefault(name, empty)[row, :, length : length + added] = heads[row, :, :added]
            lengths += case.added(step)
        is_static = module.Cache._fields[-1] == "length"
        last_field = int(lengths[0]) if is_static else self.beside(lengths)
        return module.Cache(*(self.array(layer, slots[name]) for name in ("k", "v")), last_field)

    def _arguments(self, layer: Any, problem: Problem) -> dict[str, Any]:
        case, call = problem.case, call_of(problem.case)
        names = {"query": "query" if call["is_cross"] else "x", "key": "key", "k": "other_k", "v": "other_v"}
        inputs = {name: x for name, x in problem.inputs.items() if name in names}
        given = {names[name]: self.array(layer, x) for name, x in inputs.items()}
        if call["has_mask"]:
            given["mask"] = self.beside(mask_of(self.sibling, problem))
        if call["has_bias"]:
            given["bias"] = self.beside(problem.inputs["bias"])
        if call["has_positions"]:
            given["positions"] = self.beside(case.positions())
        return given


def problem_of(name: str, dtype: str = "float32") -> Problem:
    """Return the problem of a case, in its own dtype if it has one."""
    return make_problem(CASES[name], CASES[name].dtype or dtype)
