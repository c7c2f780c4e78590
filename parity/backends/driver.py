"""The stages of a case in a sibling: each is the sibling's own function, on NumPy's arrays.

How these get in and out is its port's. The order of the stages is that of `parity.core.stages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.backends.port import Port
from parity.core.problem import Problem
from parity.core.stages import Stage, Step, Values, steps_of
from parity.core.weights import dtype_named


def steps(port: Port, problem: Problem) -> list[Step]:
    """The stages of a problem as functions, in the order of the data flow: see `parity.core.stages`."""
    return steps_of(_Layer(port, problem), problem.case)


def gradients(port: Port, problem: Problem) -> dict[str, np.ndarray]:
    """Gradients of sum(output * cotangent) on the plain path, `grad.…`, and on the others, `fused.grad.…`, …"""
    layer = _Layer(port, problem)
    inputs = {name: layer.inputs[name] for name in ("query", "key", "bias") if name in layer.inputs}
    hidden = {"mask": layer.own_mask(), "cotangent": layer.inputs["cotangent"]}
    found = {}
    for path in port.GRADIENT_PATHS:
        of_inputs, of_weights = port.pull_back(path, layer.filled, problem.spec, inputs, hidden)
        grads = {**of_inputs, **of_weights}
        found |= {str(Stage(name, path, is_gradient=True)): grad for name, grad in grads.items()}
    return found


def values_to_weigh(problem: Problem, values: Values) -> np.ndarray:
    """The values of a problem for its stage `context`, (B, K, S, H), without NaN.

    A sibling's `attention_context` knows no mask: it is the formula, for which 0 * NaN is NaN. What hides such values
    are the functions made of the stages, and `module.output` and `fused.output` ask it of them. A row that sees a NaN
    is NaN here, too: its attention weights are.
    """
    v = values["v"]
    return v if problem.case.not_finite is None else np.where(np.isfinite(v), v, np.zeros_like(v))


class _Layer:
    """A problem's arrays in a sibling, and each stage of it: from NumPy's arrays, to NumPy's arrays, by name."""

    def __init__(self, port: Port, problem: Problem) -> None:
        self.port, self.problem, self.case, self.spec = port, problem, problem.case, problem.spec
        self.filled = port.Filled(problem)
        self.shapes = port.SHAPES(port, problem.spec)
        self.inputs = {
            name: port.beside(x) if name in ("mask", "bias") else port.from_numpy(x)
            for name, x in problem.inputs.items()
        }
        self.sibling = sibling = port.SIBLING
        spec = problem.spec
        # The sibling's functions are looked up when a stage runs, since one may have been replaced.
        self.project = port.jit(self._project)
        self.score = port.jit(lambda q, k, bias: sibling.attention_scores(q, k, bias, spec))
        self.soften = port.jit(lambda scores, mask: sibling.masked_softmax(scores, mask))
        self.weigh = port.jit(lambda attn_weights, v: sibling.attention_context(attn_weights, v))
        self.combine = port.jit(self._combine)
        self.open = port.jit(lambda query: sibling.project_with(self.filled.weights, spec)("gate_proj", query))
        self.append = port.jit(lambda cache, k, v, n: sibling.append_to_cache(cache, k, v, new_lengths=n))

    def _project(self, query: Any, key: Any, positions: Any) -> tuple[Any, Any, Any]:
        key = query if key is None else key  # the same array, of which one product gives all three
        project = self.sibling.project_with(self.filled.weights, self.spec)
        return self.sibling.project_qkv(project, query, key, key, self.spec, positions)

    def _combine(self, context: Any, gate: Any) -> Any:
        context = context if gate is None else self.sibling.apply_gate(context, gate)
        output = self.sibling.combine_heads(context)
        if not self.spec.out_proj:
            return output
        return self.sibling.project_with(self.filled.weights, self.spec)("out_proj", output)

    # ---- One stage each ----------------------------------------------------------------------------------------------

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        shape = (self.case.batch, self.spec.num_heads, self.case.seq_len, self.case.key_len)
        return {"mask": np.broadcast_to(self.hidden(), shape)}

    def hidden(self) -> np.ndarray:
        """What the sibling's functions hide, joined."""
        case = self.case
        mask = np.asarray(
            self.sibling.create_attention_mask(
                case.seq_len, case.key_len, is_causal=case.is_causal, key_padding_lengths=case.key_padding_lengths
            )
        )
        if case.window_size is not None:
            window = self.sibling.create_sliding_window_mask(case.seq_len, case.key_len, window_size=case.window_size)
            mask = mask | np.asarray(window)
        return mask | self.problem.inputs["mask"] if "mask" in self.problem.inputs else mask

    def own_mask(self) -> Any:
        """The mask as the module is given it, or None."""
        return self.port.beside(self.hidden()) if self.case.has_mask else None

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        return self.entering(self.inputs["query"], self.inputs.get("key"), None)

    def entering(self, query: Any, key: Any, positions: Any) -> dict[str, np.ndarray]:
        """The heads that enter attention, and the gate of what comes out."""
        qkv = self.project(query, key, positions)
        found = {name: self.shapes.heads_to_numpy(x) for name, x in zip("qkv", qkv, strict=True)}
        if self.spec.gate is None:
            return found
        return {**found, "gate": self.shapes.gate_to_numpy(self.open(query))}

    def scores(self, values: Values) -> dict[str, np.ndarray]:
        q, k = (self.shapes.heads_from_numpy(values[name]) for name in "qk")
        return {"scores": self.port.to_numpy(self.score(q, k, self.inputs.get("bias")))}

    def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
        attn_weights = self.soften(self.port.from_numpy(values["scores"]), self.port.beside(values["mask"]))
        return {"attn_weights": self.port.to_numpy(attn_weights).astype(dtype_named(self.problem.dtype))}

    def context(self, values: Values) -> dict[str, np.ndarray]:
        v = self.shapes.heads_from_numpy(values_to_weigh(self.problem, values))
        context = self.weigh(self.port.from_numpy(values["attn_weights"]), v)
        return {"context": self.shapes.heads_to_numpy(context)}

    def output(self, values: Values) -> dict[str, np.ndarray]:
        gate = None if self.spec.gate is None else self.shapes.gate_from_numpy(values["gate"])
        output = self.combine(self.shapes.heads_from_numpy(values["context"]), gate)
        return {"output": self.shapes.output_to_numpy(output)}

    def whole(self, _: Values) -> dict[str, np.ndarray]:
        """The module as users call it, by each of its paths."""
        inputs = (self.inputs["query"], self.inputs.get("key"), self.own_mask(), self.inputs.get("bias"))
        attn_weights, outputs = self.filled.outputs(*inputs)
        return {"module.attn_weights": self.port.to_numpy(attn_weights), **self.outputs(outputs)}

    def outputs(self, outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {f"{path}.output": self.shapes.output_to_numpy(output) for path, output in outputs.items()}

    def call(self, index: int) -> _Call:
        """One call with a cache."""
        return _Call(self, index)


class _Call:
    """One call with a cache."""

    def __init__(self, layer: _Layer, index: int) -> None:
        self.layer, self.port, self.shapes = layer, layer.port, layer.shapes
        self.case, self.index = layer.case, index
        self.x = self.port.from_numpy(layer.problem.step_input(index))
        self.before = np.array(self.case.lengths_before(index), np.int32)
        is_ragged = bool(self.case.new_lengths)
        self.new_lengths = self.port.beside(np.array(self.case.added(index), np.int32)) if is_ragged else None

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        seq_len, capacity = self.case.chunks[self.index], self.case.capacity
        mask = self.layer.sibling.create_cache_mask(self.port.beside(self.before), seq_len, capacity)
        shape = (self.case.batch, self.case.spec.num_heads, seq_len, capacity)
        return {"mask": np.broadcast_to(np.asarray(mask), shape)}

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        positions = self.before[:, None] + np.arange(self.case.chunks[self.index], dtype=np.int32)
        positions = self.port.beside(positions) if self.case.spec.rope is not None else None
        return self.layer.entering(self.x, None, positions)

    def cache(self, values: Values) -> dict[str, np.ndarray]:
        k, v = (self.shapes.heads_from_numpy(values[name]) for name in "kv")
        return self._stages("cache", self.layer.append(self._previous("cache", values), k, v, self.new_lengths))

    def whole(self, values: Values) -> dict[str, np.ndarray]:
        cache = self._previous("module.cache", values)
        outputs, grown = self.layer.filled.step(self.x, cache, self.new_lengths)
        return {**self.layer.outputs(outputs), **self._stages("module.cache", grown)}

    def _previous(self, name: str, values: Values) -> Any:
        if self.index == 0:
            return self.layer.filled.module.init_cache(self.case.batch, self.case.capacity)
        arrays = [values[f"previous.{name}.{part}"] for part in ("keys", "values", "lengths")]
        return self.shapes.cache_from_numpy(*arrays)

    def _stages(self, name: str, cache: Any) -> dict[str, np.ndarray]:
        return {f"{name}.{part}": array for part, array in self.shapes.cache_to_numpy(cache).items()}
