"""Cases of a run written as plain code, and calls of this code."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import parity
from mha_spec import AttentionSpec, DynamicScaling, Latent, LongRopeScaling, Norm, Rope, Temperature
from parity.measure.core.arrays import to_numpy
from parity.measure.core.cases import CASES
from parity.measure.core.problem import Problem, make_problem
from parity.port.conversion.layouts import LAYOUTS, from_canonical


def cases_of_norms() -> Iterator[parity.Case]:
    """Yield a case for each kind of norm, with that norm at queries and keys, at values and at the
    context.
    """
    for kind in ("rms", "layer"):
        for weight, bias in (
            (None, False),
            ("w", False),
            ("w", True),
            ("1+w", False),
            ("1+w", True),
        ):
            for over in ("head", "width"):
                # Norms of heads with weights alternate between shared by all heads and per head.
                per_head = over == "head" and weight is not None and bias == (weight == "w")
                norm = Norm(kind, over, weight, per_head, bias, eps=0.01)
                of_context = norm.replace(over="width", per_head=False)
                spec = AttentionSpec(
                    32, 4, num_kv_heads=2, qk_norm=norm, v_norm=norm, context_norm=of_context
                )
                words = [kind, over, weight or "none", *["bias"] * bias]
                yield parity.Case(
                    "-".join(("norms", *words)), spec, "three norms", seq_len=5, is_causal=True
                )


def cases_of_parts() -> Iterator[parity.Case]:
    """Yield cases of other parts."""
    yield parity.Case(
        "dropout", AttentionSpec(32, 4, dropout=0.5), "dropout, in evaluation", seq_len=5
    )
    for name, spec in LENGTH_DEPENDENT.items():
        yield parity.Case(
            f"ragged-positions-{name}",
            spec,
            "ragged, positions of its own, and a call without new tokens for one sequence",
            first_position=3,
            chunks=(4, 1, 3, 1),
            new_lengths=((4, 2), (1, 1), (0, 3), (1, 1)),
            seq_len=9,
            capacity=9,
        )


LENGTH_DEPENDENT = {
    "dynamic": AttentionSpec(32, 4, rope=Rope(scaling=DynamicScaling(4.0, 6))),
    "longrope": AttentionSpec(
        32, 4, rope=Rope(scaling=LongRopeScaling(4.0, 6, (1.0, 1.1, 1.3, 1.6), (1, 2, 8, 30)))
    ),
    "sections": AttentionSpec(32, 4, rope=Rope(sections=(2, 1, 1), scaling=DynamicScaling(4.0, 6))),
    "latent": AttentionSpec(
        32,
        4,
        latent=Latent(16, 4),
        rope=Rope(rotary_dim=4, rotated="last", scaling=DynamicScaling(4.0, 6)),
    ),
    "temperature": AttentionSpec(32, 4, rope=Rope(), temperature=Temperature(4, 0.5)),
}
"""Layers in which the position of padding could change the outputs of real tokens."""


NOT_FINITE = frozenset(name for name, case in CASES.items() if case.not_finite is not None)
"""Cases with NaN in the inputs, which plain code does not contain."""

STATIC_OF_ANOTHER = replace(
    CASES["decode-shared-kv"], name="decode-shared-kv-static", new_lengths=()
)

MORE = {case.name: case for case in (*cases_of_norms(), *cases_of_parts(), STATIC_OF_ANOTHER)}
"""Cases for parts of the templates that no case of the run covers."""

WRITTEN = [name for name in (*CASES, *MORE) if name not in NOT_FINITE]
"""Cases written as plain code."""


def case_named(name: str) -> parity.Case:
    """Return a case of the run, or one of `MORE`."""
    return MORE[name] if name in MORE else CASES[name]


def call_of(case: parity.Case) -> dict[str, Any]:
    """Return the keywords that describe how the layer of a case is called."""
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
    """Return a written module."""
    module = types.ModuleType("written")
    exec(compile(source, "written.py", "exec"), module.__dict__)
    return module


def mask_of(sibling: Any, problem: Problem) -> np.ndarray:
    """Return the mask of a case without causality, True = masked."""
    case = problem.case
    lengths = (case.seq_len, case.key_len)
    hides = {**case.hides, "is_causal": False}
    if sibling.__name__ == "mha_torch" and hides["segment_ids"] is not None:
        hides["segment_ids"] = parity.to_torch(hides["segment_ids"])
    mask = to_numpy(sibling.create_attention_mask(*lengths, **hides))
    if case.window_size is not None:
        mask = mask | to_numpy(
            sibling.create_sliding_window_mask(*lengths, window_size=case.window_size)
        )
    return mask | problem.inputs["mask"] if "mask" in problem.inputs else mask


def garbage_at_padding(case: parity.Case, step: int) -> np.ndarray:
    """Return the positions of a call, with large and negative ones at padding."""
    positions = case.positions(step)
    is_real = np.arange(positions.shape[-1]) < np.array(case.added(step))[:, None]
    garbage = np.resize([-(2**30), 2**30], positions.shape[-1])
    return np.where(is_real, positions, garbage)


@dataclass(frozen=True)
class Writing:
    """Run the code written for a framework.

    Attributes:
        sibling: creates the masks of cases.
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
        outputs, shares = {}, case.spec.shared_kv
        cache = None if shares else self.empty_cache(module, layer, problem)
        for step in range(len(case.chunks)):
            arguments = {"x": self.array(layer, problem.step_input(step))}
            arguments |= (
                {"other_cache": self._other_cache(module, layer, problem, step)}
                if shares
                else {"cache": cache}
            )
            if case.new_lengths:
                arguments["new_lengths"] = self.beside(np.array(case.added(step)))
            if case.has_positions:
                arguments["positions"] = self.beside(garbage_at_padding(case, step))
            output = layer(**arguments)
            outputs[f"step{step}.module.output"], cache = (output, None) if shares else output
        return outputs

    def _other_cache(self, module: Any, layer: Any, problem: Problem, last: int) -> Any:
        """Return the cache of another layer, which has appended the tokens of all steps up to the
        last.
        """
        case, lengths, slots = problem.case, np.zeros(problem.case.batch, int), {}
        for step in range(last + 1):
            for name in ("k", "v"):
                heads = problem.step_input(step, name)
                batch_size, num_heads, _, width = heads.shape
                empty = np.zeros((batch_size, num_heads, case.capacity, width), heads.dtype)
                for row, (length, added) in enumerate(zip(lengths, case.added(step), strict=True)):
                    slots.setdefault(name, empty)[row, :, length : length + added] = heads[
                        row, :, :added
                    ]
            lengths += case.added(step)
        is_static = module.Cache._fields[-1] == "length"
        last_field = int(lengths[0]) if is_static else self.beside(lengths)
        return module.Cache(*(self.array(layer, slots[name]) for name in ("k", "v")), last_field)

    def _arguments(self, layer: Any, problem: Problem) -> dict[str, Any]:
        case, call = problem.case, call_of(problem.case)
        names = {
            "query": "query" if call["is_cross"] else "x",
            "key": "key",
            "k": "other_k",
            "v": "other_v",
        }
        inputs = {name: x for name, x in problem.inputs.items() if name in names}
        arguments = {names[name]: self.array(layer, x) for name, x in inputs.items()}
        if call["has_mask"]:
            arguments["mask"] = self.beside(mask_of(self.sibling, problem))
        if call["has_bias"]:
            arguments["bias"] = self.beside(problem.inputs["bias"])
        if call["has_positions"]:
            arguments["positions"] = self.beside(case.positions())
        return arguments


def problem_of(name: str, dtype: str = "float32") -> Problem:
    """Return the problem of a case, in its own dtype if it has one."""
    case = case_named(name)
    return make_problem(case, case.dtype or dtype)


def nested(weights: dict[str, np.ndarray], spec: AttentionSpec) -> dict[str, Any]:
    """Return canonical weights as parameters of code written in JAX."""
    import jax.numpy as jnp  # not in .venv-tt

    params: dict[str, Any] = {}
    for name, array in from_canonical(
        weights, spec.replace(fused_qkv=False), LAYOUTS["mha_jax"]
    ).items():
        part, _, leaf = name.partition(".")
        if leaf:
            params.setdefault(part, {})[leaf] = jnp.asarray(array)
        else:
            params[part] = jnp.asarray(array)
    return params
