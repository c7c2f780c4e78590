"""Stages of a case in an implementation: each calls the implementation's function on NumPy arrays.

The port converts arrays. The order of stages is that of `parity.measure.core.stages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.measure.backends.port import Port
from parity.measure.core.arrays import to_numpy
from parity.measure.core.problem import Problem
from parity.measure.core.stages import Stage, Step, Values, steps_of
from parity.measure.core.weights import dtype_named


def steps(port: Port, problem: Problem) -> Sequence[Step]:
    """Return the stages of a problem as functions, in the order of the data flow: see
    `parity.measure.core.stages`.
    """
    return steps_of(_Layer(port, problem), problem.case)


def gradients(port: Port, problem: Problem) -> dict[str, np.ndarray]:
    """Return gradients of sum(output * cotangent) on the plain path, `grad.…`, and the others,
    `fused.grad.…`, …
    """
    layer = _Layer(port, problem)
    inputs = {
        name: layer.inputs[name]
        for name in ("query", "key", "k", "v", "bias")
        if name in layer.inputs
    }
    hidden = layer.hiding() | {
        "positions": layer.positions(),
        "cotangent": layer.inputs["cotangent"],
    }
    found = {}
    for path in port.GRADIENT_PATHS:
        of_inputs, of_weights = port.pull_back(path, layer.filled, problem.spec, inputs, hidden)
        grads = {**of_inputs, **of_weights}
        found |= {str(Stage(name, path, is_gradient=True)): grad for name, grad in grads.items()}
    return found


def outputs_of_tutorial(port: Port, problem: Problem) -> dict[str, np.ndarray]:
    """Return the outputs of the tutorial for a case that it can express.

    They are `plain.output`, or `step0.plain.output`, … with a cache.
    """
    case = problem.case
    layer = port.tutorial(problem)
    if case.is_cached:
        chunks = [port.from_numpy(problem.step_input(index)) for index in range(len(case.chunks))]
        outputs = port.call(_decode_by_tutorial, layer, chunks)
        return {
            f"step{index}.plain.output": port.to_numpy(output)
            for index, output in enumerate(outputs)
        }
    mask = None
    if case.has_mask:
        created = port.SIBLING.plain.create_attention_mask(
            case.seq_len,
            case.key_len,
            is_causal=case.is_causal,
            key_padding_lengths=case.key_padding_lengths,
        )
        hidden = to_numpy(created)
        if "mask" in problem.inputs:
            hidden = hidden | problem.inputs["mask"]
        mask = port.beside(hidden)
    query = port.from_numpy(problem.inputs["query"])
    if case.seq_len_k is None:
        output = port.call(_attend_by_tutorial, layer, query, None, mask)
    else:
        output = port.call(
            _attend_by_tutorial, layer, query, port.from_numpy(problem.inputs["key"]), mask
        )
    return {"plain.output": port.to_numpy(output)}


def values_to_weigh(problem: Problem, values: Values) -> np.ndarray:
    """Return the values for the stage `context`, (B, K, S, Hv), without NaN.

    `attention_context` has no mask: it is the formula, in which 0 * NaN is NaN. Layers stop a NaN
    in padding, and contained kernels stop others; `module.output` and `fused.output` test both.
    Rows that attend to a NaN are NaN here as well, because their attention weights are.
    """
    v = values["v"]
    return v if problem.case.not_finite is None else np.where(np.isfinite(v), v, np.zeros_like(v))


# ---- Functions of an implementation: differences between layers are arguments, so that compiled
# code is shared -------


def _project(
    sibling: Any, spec: AttentionSpec, weights: Any, inputs: Sequence[Any], positions: Any
) -> Any:
    query, key, value = inputs
    key = query if key is None else key  # the same array, so that one product returns all three
    value = key if value is None else value
    return sibling.project_qkv(
        sibling.project_with(weights, spec), query, key, value, spec, positions
    )


def _project_latents(
    sibling: Any, spec: AttentionSpec, weights: Any, query: Any, positions: Any
) -> Any:
    return sibling.project_latents(sibling.project_with(weights, spec), query, spec, positions)


def _expand(sibling: Any, spec: AttentionSpec, weights: Any, latents: Any) -> Any:
    return sibling.expand_latents(sibling.project_with(weights, spec), latents, spec)


def _open(sibling: Any, spec: AttentionSpec, weights: Any, query: Any) -> Any:
    return sibling.project_with(weights, spec)("gate_proj", query)


def _score(
    sibling: Any, spec: AttentionSpec, q: Any, k: Any, bias: Any, offsets: Any, learned: Any
) -> Any:
    return sibling.attention_scores(q, k, bias, spec, offsets, learned)


def _soften(sibling: Any, scores: Any, mask: Any, sinks: Any) -> Any:
    return sibling.masked_softmax(scores, mask, sinks)


def _weigh(sibling: Any, attn_weights: Any, v: Any) -> Any:
    return sibling.attention_context(attn_weights, v)


def _combine(sibling: Any, spec: AttentionSpec, weights: Any, context: Any, gate: Any) -> Any:
    context = context if gate is None else sibling.apply_gate(context, gate)
    output, project = sibling.combine_heads(context), sibling.project_with(weights, spec)
    output = output if spec.context_norm is None else project("context_norm", output)
    return project("out_proj", output) if spec.out_proj else output


def _append(sibling: Any, cache: Any, k: Any, v: Any, new_lengths: Any) -> Any:
    return sibling.append_to_cache(cache, k, v, new_lengths=new_lengths)


def _attend_by_tutorial(_: Any, layer: Any, query: Any, key: Any, mask: Any) -> Any:
    if key is None:
        return layer(query, mask=mask)
    output, _ = layer(query, key, mask=mask)
    return output


def _decode_by_tutorial(_: Any, layer: Any, chunks: Sequence[Any]) -> list[Any]:
    outputs = []
    cache_k, cache_v = None, None
    for x in chunks:
        output, cache_k, cache_v = layer(x, cache_k, cache_v)
        outputs.append(output)
    return outputs


def _append_latents(sibling: Any, cache: Any, latents: Any, new_lengths: Any) -> Any:
    return sibling.append_to_latent_cache(cache, latents, new_lengths=new_lengths)


# ---- The layer -----------------------------------------------------------------------------------


class _Layer:
    """Arrays of a problem in an implementation, and its stages: from NumPy arrays to NumPy arrays,
    by name.
    """

    def __init__(self, port: Port, problem: Problem) -> None:
        self.port, self.problem, self.case, self.spec = port, problem, problem.case, problem.spec
        self.filled = port.filled(problem)
        if self.case.not_finite == "visible":
            self.filled.contain(port.SIBLING.contained)
        self.shapes = port.SHAPES(port, problem.spec)
        self.inputs = {
            name: port.beside(x) if name in ("mask", "bias") else self.shapes.from_input(name, x)
            for name, x in problem.inputs.items()
        }
        self.sibling = port.SIBLING

    # ---- Stages ----------------------------------------------------------------------------------

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        shape = (self.case.batch, self.spec.num_heads, self.case.seq_len, self.case.key_len)
        return {"mask": np.broadcast_to(self.hidden(self.spec), shape)}

    def hidden(self, spec: AttentionSpec | None = None) -> np.ndarray:
        """Return the combined mask of the implementation; with a spec including the layer's own
        span.
        """
        case = self.case
        mask = to_numpy(
            self.sibling.create_attention_mask(
                case.seq_len,
                case.key_len,
                **{
                    name: self.port.whole(x) if isinstance(x, np.ndarray) else x
                    for name, x in case.hides.items()
                },
                window_size=None if spec is None else spec.window_size,
                chunk_size=None if spec is None else spec.chunk_size,
            )
        )
        if case.window_size is not None:
            window = self.sibling.create_sliding_window_mask(
                case.seq_len, case.key_len, window_size=case.window_size
            )
            mask = mask | to_numpy(window)
        return mask | self.problem.inputs["mask"] if "mask" in self.problem.inputs else mask

    def hiding(self) -> dict[str, Any]:
        """Return the arguments of the module that hide keys."""
        arguments: dict[str, Any] = {
            "mask": self.port.beside(self.hidden()) if self.case.has_mask else None
        }
        if self.case.not_finite == "hidden":
            # Only lengths say what is padding, of which the module must stop a NaN.
            arguments["key_padding_lengths"] = self.port.beside(
                np.array(self.case.key_padding_lengths, np.int32)
            )
        return arguments

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        inputs = dict(self.inputs)
        for name in ("query", "key", "value", "k", "v"):
            if name not in inputs:
                continue
            finite = self.problem.finite_in_padding(name)
            if finite is not self.problem.inputs[name]:
                inputs[name] = self.shapes.from_input(name, finite)
        return self.entering(*self.of_tokens(inputs), self.positions())

    def of_tokens(self, inputs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Return the query, key and value of the module; None for a key or value that is the input
        before it.
        """
        return (
            inputs["query"],
            inputs.get("key", inputs.get("k")),
            inputs.get("value", inputs.get("v")),
        )

    def positions(self, step: int | None = None) -> Any:
        """Return the positions argument of the module, or None for the default."""
        return self.told_positions(step) if self.case.has_positions else None

    def told_positions(self, step: int | None) -> Any:
        """Return the positions, also if a module uses the default."""
        return self.port.beside(self.case.positions(step).astype(np.int32))

    def entering(self, query: Any, key: Any, value: Any, positions: Any) -> dict[str, np.ndarray]:
        """Return the heads that enter attention, and the gate of its output."""
        of_layer, found = (self.spec, self.filled.weights), {}
        if self.spec.latent is None:
            q, k, v = self.port.call(_project, *of_layer, (query, key, value), positions)
        else:
            q, found["latents"] = self.port.call(_project_latents, *of_layer, query, positions)
            k, v = self.port.call(_expand, *of_layer, found["latents"])
        found |= {"q": q, "k": k, "v": v}
        read = {name: self.shapes.to_numpy(name, x) for name, x in found.items()}
        if self.spec.gate is None:
            return read
        # Last, because recordings have this order.
        return {
            **read,
            "gate": self.shapes.to_numpy("gate", self.port.call(_open, *of_layer, query)),
        }

    def scores(self, values: Values, offsets: Any = None) -> dict[str, np.ndarray]:
        q, k = (self.shapes.from_numpy(name, values[name]) for name in "qk")
        learned = {name: self.filled.weights[name] for name in self.spec.score_shapes}
        scores = self.port.call(_score, self.spec, q, k, self.inputs.get("bias"), offsets, learned)
        return {"scores": self.port.to_numpy(scores)}

    def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
        scores, mask = self.port.from_numpy(values["scores"]), self.port.beside(values["mask"])
        attn_weights = self.port.call(_soften, scores, mask, self.filled.weights.get("sinks"))
        return {
            "attn_weights": self.port.to_numpy(attn_weights).astype(dtype_named(self.problem.dtype))
        }

    def context(self, values: Values) -> dict[str, np.ndarray]:
        v = self.shapes.from_numpy("v", values_to_weigh(self.problem, values))
        context = self.port.call(_weigh, self.port.from_numpy(values["attn_weights"]), v)
        return {"context": self.shapes.to_numpy("context", context)}

    def output(self, values: Values) -> dict[str, np.ndarray]:
        gate = None if self.spec.gate is None else self.shapes.from_numpy("gate", values["gate"])
        context = self.shapes.from_numpy("context", values["context"])
        output = self.port.call(_combine, self.spec, self.filled.weights, context, gate)
        return {"output": self.shapes.to_numpy("output", output)}

    def whole(self, _: Values) -> dict[str, np.ndarray]:
        """Run the module on each of its paths."""
        query, key, value = self.of_tokens(self.inputs)
        hiding = self.hiding()
        bias = self.inputs.get("bias")
        attn_weights, outputs = self.filled.outputs(
            query, key=key, value=value, bias=bias, positions=self.positions(), **hiding
        )
        if self.case.not_finite == "visible":
            # The path of the attention weights does not contain a NaN: 0 * NaN is NaN.
            outputs = {**outputs, "module": outputs["fused"]}
        return {"module.attn_weights": self.port.to_numpy(attn_weights), **self.outputs(outputs)}

    def outputs(self, outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {
            f"{path}.output": self.shapes.to_numpy("output", output)
            for path, output in outputs.items()
        }

    def call(self, index: int) -> _Call:
        """One call with a cache."""
        return _Call(self, index)


class _Call:
    """One call with a cache."""

    def __init__(self, layer: _Layer, index: int) -> None:
        self.layer, self.port, self.shapes = layer, layer.port, layer.shapes
        self.case, self.index = layer.case, index
        self.x = self.port.from_numpy(layer.problem.step_input(index))
        self.received: list[Any] = [
            self.shapes.from_input(name, layer.problem.step_input(index, name))
            if name in layer.inputs
            else None
            for name in "kv"
        ]
        self.before = np.array(self.case.lengths_before(index), np.int32)
        is_ragged = bool(self.case.new_lengths)
        self.new_lengths = (
            self.port.beside(np.array(self.case.added(index), np.int32)) if is_ragged else None
        )

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        seq_len, capacity, spec = self.case.chunks[self.index], self.case.capacity, self.case.spec
        mask = self.layer.sibling.create_cache_mask(
            self.port.whole(self.before),
            seq_len,
            capacity,
            window_size=spec.window_size,
            chunk_size=spec.chunk_size,
        )
        shape = (self.case.batch, self.case.spec.num_heads, seq_len, capacity)
        return {"mask": np.broadcast_to(to_numpy(mask), shape)}

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        positions = self.layer.told_positions(self.index) if self.case.spec.has_positions else None
        key, value = self.received
        return self.layer.entering(self.x, key, value, positions)

    def scores(self, values: Values) -> dict[str, np.ndarray]:
        return self.layer.scores(values, self.port.beside(self.before))

    def cache(self, values: Values) -> dict[str, np.ndarray]:
        previous = self._previous("cache", values)
        if self.layer.spec.latent is not None:
            latents = self.shapes.from_numpy("latents", values["latents"])
            grown = self.port.call(_append_latents, previous, latents, self.new_lengths)
            kv = self.port.call(_expand, self.layer.spec, self.layer.filled.weights, grown.latents)
            kv = map(self.shapes.to_numpy, "kv", kv)
            own = {
                f"cache.{name}": x[:, :, : self.case.capacity]
                for name, x in zip(("keys", "values"), kv, strict=True)
            }
            return {**self._stages("cache", grown), **own}  # the device may have more slots
        k, v = (self.shapes.from_numpy(name, values[name]) for name in "kv")
        return self._stages("cache", self.port.call(_append, previous, k, v, self.new_lengths))

    def whole(self, values: Values) -> dict[str, np.ndarray]:
        cache = self._previous("module.cache", values)
        if self.layer.spec.shared_kv:  # the other layer appends
            cache = self.port.call(_append, cache, *self.received, self.new_lengths)
        outputs, grown = self.layer.filled.step(
            self.x, cache, self.new_lengths, self.layer.positions(self.index)
        )
        return {**self.layer.outputs(outputs), **self._stages("module.cache", grown)}

    def _previous(self, name: str, values: Values) -> Any:
        if self.index == 0:
            return self.layer.filled.module.init_cache(self.case.batch, self.case.capacity)
        arrays = [values[f"previous.{name}.{part}"] for part in self.shapes.cache_parts]
        return self.shapes.cache_from_numpy(arrays)

    def _stages(self, name: str, cache: Any) -> dict[str, np.ndarray]:
        return {
            f"{name}.{part}": array for part, array in self.shapes.cache_to_numpy(cache).items()
        }
