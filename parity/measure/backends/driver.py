"""Stages of a case in an implementation: each calls the implementation's function on NumPy arrays.

The port converts arrays. The order of stages is the order of `parity.measure.core.stages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.measure.backends.port import Port, StagePort
from parity.measure.core.arrays import to_numpy
from parity.measure.core.problem import Problem
from parity.measure.core.stages import Stage, Step, Values, steps_of
from parity.measure.core.weights import dtype_named


def steps(port: StagePort, problem: Problem) -> Sequence[Step]:
    """Return the stages of a problem as functions, in the order of the data flow: see
    `parity.measure.core.stages`.
    """
    return steps_of(_Layer(port, problem), problem.case)


def gradients(port: StagePort, problem: Problem) -> dict[str, np.ndarray]:
    """Return gradients of sum(output * cotangent) on the plain path, `grad.…`, and the others,
    `fused.grad.…`, …
    """
    layer = _Layer(port, problem)
    differentiable = ("query", "key", "k", "v", "bias")
    inputs = {name: x for name, x in layer.inputs.items() if name in differentiable}
    hidden = layer.hiding_arguments()
    hidden["positions"] = layer.positions()
    hidden["cotangent"] = layer.inputs["cotangent"]
    grads = {}
    for path in port.GRADIENT_PATHS:
        of_inputs, of_weights = port.pull_back(path, layer.filled, problem.spec, inputs, hidden)
        for name, grad in {**of_inputs, **of_weights}.items():
            grads[str(Stage(name, path, is_gradient=True))] = grad
    return grads


def outputs_of_tutorial(port: Port, problem: Problem) -> dict[str, np.ndarray]:
    """Return the outputs of the tutorial for a case that it can express.

    They are `plain.output`, or `step0.plain.output`, … with a cache.
    """
    case = problem.case
    layer = port.tutorial(problem)
    if case.is_cached:
        chunks = [port.from_numpy(problem.step_input(index)) for index in range(len(case.chunks))]
        outputs = {}
        for index, output in enumerate(port.call(_decode_by_tutorial, layer, chunks)):
            outputs[f"step{index}.plain.output"] = port.to_numpy(output)
        return outputs
    query = port.from_numpy(problem.inputs["query"])
    key = None
    if case.seq_len_k is not None:
        key = port.from_numpy(problem.inputs["key"])
    mask = _mask_of_tutorial(port, problem) if case.has_mask else None
    output = port.call(_attend_by_tutorial, layer, query, key, mask)
    return {"plain.output": port.to_numpy(output)}


def _mask_of_tutorial(port: Port, problem: Problem) -> Any:
    """Return the mask that the tutorial creates for a case, combined with the mask of the
    inputs.
    """
    case = problem.case
    created = port.SIBLING.plain.create_attention_mask(
        case.seq_len,
        case.key_len,
        is_causal=case.is_causal,
        key_padding_lengths=case.key_padding_lengths,
    )
    mask = to_numpy(created)
    if "mask" in problem.inputs:
        mask = mask | problem.inputs["mask"]
    return port.argument(mask)


def values_to_weigh(problem: Problem, values: Values) -> np.ndarray:
    """Return the values for the stage `context`, (B, K, S, Hv), without NaN.

    `attention_context` has no mask: it is the formula, in which 0 * NaN is NaN. Layers stop a NaN
    in padding, and contained kernels stop others; `module.output` and `fused.output` test both.
    Rows that attend to a NaN are NaN here as well, because their attention weights are.
    """
    v = values["v"]
    if problem.case.not_finite is None:
        return v
    return np.where(np.isfinite(v), v, np.zeros_like(v))


# ---- Functions of an implementation --------------------------------------------------------------

# Differences between layers are arguments of these functions, so that layers share compiled code.


def _project(
    sibling: Any, spec: AttentionSpec, weights: Any, inputs: Sequence[Any], positions: Any
) -> Any:
    query, key, value = inputs
    # The same array, so that one product returns all three.
    if key is None:
        key = query
    if value is None:
        value = key
    project = sibling.project_with(weights, spec)
    return sibling.project_qkv(project, query, key, value, spec, positions)


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


def combine(sibling: Any, spec: AttentionSpec, weights: Any, context: Any, gate: Any) -> Any:
    """Return the output of a layer from its context.

    The part of some heads, if they are divided: ports to meshes sum the parts.
    """
    if gate is not None:
        context = sibling.apply_gate(context, gate)
    project = sibling.project_with(weights, spec)
    output = sibling.combine_heads(context)
    if spec.context_norm is not None:
        output = project("context_norm", output)
    if spec.out_proj:
        output = project("out_proj", output)
    return output


def _append(sibling: Any, cache: Any, k: Any, v: Any, new_lengths: Any) -> Any:
    return sibling.append_to_cache(cache, k, v, new_lengths=new_lengths)


def _attend_by_tutorial(_: Any, layer: Any, query: Any, key: Any, mask: Any) -> Any:
    if key is None:
        return layer(query, mask=mask)
    output, _ = layer(query, key, mask=mask)
    return output


def _decode_by_tutorial(_: Any, layer: Any, chunks: Sequence[Any]) -> list[Any]:
    """Return the output of each chunk by a layer of `plain.py`, whose cache begins as None."""
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

    def __init__(self, port: StagePort, problem: Problem) -> None:
        self.port, self.problem, self.case, self.spec = port, problem, problem.case, problem.spec
        self.sibling = port.SIBLING
        # First, because ports to meshes learn the problem from it.
        self.filled = port.filled(problem)
        if self.case.not_finite == "visible":
            self.filled.contain(self.sibling.contained)
        self.shapes = port.SHAPES(port, problem.spec)
        self.inputs = {name: self._input(name, x) for name, x in problem.inputs.items()}

    def _input(self, name: str, x: np.ndarray) -> Any:
        if name in ("mask", "bias"):
            return self.port.argument(x)
        return self.shapes.from_input(name, x)

    # ---- Stages ----------------------------------------------------------------------------------

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        own_span = {"window_size": self.spec.window_size, "chunk_size": self.spec.chunk_size}
        shape = (self.case.batch, self.spec.num_heads, self.case.seq_len, self.case.key_len)
        return {"mask": np.broadcast_to(self._combined_mask(**own_span), shape)}

    def _combined_mask(self, **own_span: int | None) -> np.ndarray:
        """Return all masks of the case, as the implementation creates them, in one.

        Args:
            own_span: window or chunks of the layer itself, which it hides without a mask.
        """
        case = self.case
        hides = dict(case.hides)
        for name, value in case.hides.items():
            if isinstance(value, np.ndarray):
                hides[name] = self.port.whole_argument(value)
        mask = to_numpy(
            self.sibling.create_attention_mask(case.seq_len, case.key_len, **hides, **own_span)
        )
        if case.window_size is not None:
            window = self.sibling.create_sliding_window_mask(
                case.seq_len, case.key_len, window_size=case.window_size
            )
            mask = mask | to_numpy(window)
        if "mask" in self.problem.inputs:
            mask = mask | self.problem.inputs["mask"]
        return mask

    def hiding_arguments(self) -> dict[str, Any]:
        """Return the arguments of the module that hide keys."""
        arguments: dict[str, Any] = {"mask": None}
        if self.case.has_mask:
            arguments["mask"] = self.port.argument(self._combined_mask())
        if self.case.not_finite == "hidden":
            # Only lengths say what is padding, of which the module must stop a NaN.
            lengths = np.array(self.case.key_padding_lengths, np.int32)
            arguments["key_padding_lengths"] = self.port.argument(lengths)
        return arguments

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        inputs = dict(self.inputs)
        for name in ("query", "key", "value", "k", "v"):
            if name not in inputs:
                continue
            # Layers replace a NaN in padding before they project; the function for this does not.
            finite = self.problem.finite_in_padding(name)
            if finite is not self.problem.inputs[name]:
                inputs[name] = self.shapes.from_input(name, finite)
        return self.projected(*self._query_key_value(inputs), self.positions())

    def _query_key_value(self, inputs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Return the query, key and value of the module; None for a key or value that is the input
        before it.
        """
        key = inputs.get("key", inputs.get("k"))
        value = inputs.get("value", inputs.get("v"))
        return inputs["query"], key, value

    def positions(self, step: int | None = None) -> Any:
        """Return the positions argument of the module, or None for the default."""
        return self.explicit_positions(step) if self.case.has_positions else None

    def explicit_positions(self, step: int | None) -> Any:
        """Return the positions, also if a module uses the default."""
        return self.port.argument(self.case.positions(step).astype(np.int32))

    def projected(self, query: Any, key: Any, value: Any, positions: Any) -> dict[str, np.ndarray]:
        """Return the heads that enter attention, and the gate of its output."""
        call, spec, weights = self.port.call, self.spec, self.filled.weights
        arrays = {}
        if spec.latent is None:
            q, k, v = call(_project, spec, weights, (query, key, value), positions)
        else:
            q, latents = call(_project_latents, spec, weights, query, positions)
            arrays["latents"] = latents
            k, v = call(_expand, spec, weights, latents)
        arrays |= {"q": q, "k": k, "v": v}
        stages = {name: self.shapes.to_numpy(name, x) for name, x in arrays.items()}
        if spec.gate is not None:
            # Last, because recordings of a device have this order, downloads included.
            stages["gate"] = self.shapes.to_numpy("gate", call(_open, spec, weights, query))
        return stages

    def scores(self, values: Values, offsets: Any = None) -> dict[str, np.ndarray]:
        q = self.shapes.from_numpy("q", values["q"])
        k = self.shapes.from_numpy("k", values["k"])
        learned = {name: self.filled.weights[name] for name in self.spec.score_shapes}
        scores = self.port.call(_score, self.spec, q, k, self.inputs.get("bias"), offsets, learned)
        return {"scores": self.port.to_numpy(scores)}

    def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
        scores, mask = self.port.from_numpy(values["scores"]), self.port.argument(values["mask"])
        attn_weights = self.port.call(_soften, scores, mask, self.filled.weights.get("sinks"))
        dtype = dtype_named(self.problem.dtype)
        return {"attn_weights": self.port.to_numpy(attn_weights).astype(dtype)}

    def context(self, values: Values) -> dict[str, np.ndarray]:
        v = self.shapes.from_numpy("v", values_to_weigh(self.problem, values))
        context = self.port.call(_weigh, self.port.from_numpy(values["attn_weights"]), v)
        return {"context": self.shapes.to_numpy("context", context)}

    def output(self, values: Values) -> dict[str, np.ndarray]:
        gate = None
        if self.spec.gate is not None:
            gate = self.shapes.from_numpy("gate", values["gate"])
        context = self.shapes.from_numpy("context", values["context"])
        output = self.port.call(combine, self.spec, self.filled.weights, context, gate)
        return {"output": self.shapes.to_numpy("output", output)}

    def whole(self, _: Values) -> dict[str, np.ndarray]:
        """Run the module on each of its paths."""
        query, key, value = self._query_key_value(self.inputs)
        hiding = self.hiding_arguments()
        bias = self.inputs.get("bias")
        attn_weights, outputs = self.filled.outputs(
            query, key=key, value=value, bias=bias, positions=self.positions(), **hiding
        )
        if self.case.not_finite == "visible":
            # The path of the attention weights does not contain a NaN: 0 * NaN is NaN.
            outputs = {**outputs, "module": outputs["fused"]}
        stages = {"module.attn_weights": self.port.to_numpy(attn_weights)}
        return stages | self.output_stages(outputs)

    def output_stages(self, outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the outputs of all paths as stages."""
        stages = {}
        for path, output in outputs.items():
            stages[f"{path}.output"] = self.shapes.to_numpy("output", output)
        return stages

    def call(self, index: int) -> _Call:
        """One call with a cache."""
        return _Call(self, index)


class _Call:
    """One call with a cache; its steps are the steps of a layer with other values or arguments."""

    def __init__(self, layer: _Layer, index: int) -> None:
        self.layer, self.port, self.shapes = layer, layer.port, layer.shapes
        self.case, self.index = layer.case, index
        self.x = self.port.from_numpy(layer.problem.step_input(index))
        self.received_k = self._received("k")
        self.received_v = self._received("v")
        self.lengths_before = np.array(self.case.lengths_before(index), np.int32)
        self.new_lengths: Any = None
        if self.case.new_lengths:
            self.new_lengths = self.port.argument(np.array(self.case.added(index), np.int32))

    def _received(self, name: str) -> Any:
        """Return the keys or values of another layer, or None if the layer has its own."""
        if name not in self.layer.inputs:
            return None
        return self.shapes.from_input(name, self.layer.problem.step_input(self.index, name))

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        seq_len, capacity, spec = self.case.chunks[self.index], self.case.capacity, self.case.spec
        mask = self.layer.sibling.create_cache_mask(
            self.port.whole_argument(self.lengths_before),
            seq_len,
            capacity,
            window_size=spec.window_size,
            chunk_size=spec.chunk_size,
        )
        shape = (self.case.batch, spec.num_heads, seq_len, capacity)
        return {"mask": np.broadcast_to(to_numpy(mask), shape)}

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        positions = None
        if self.case.spec.has_positions:
            # The default is 0 for the first token, whatever a cache contains.
            positions = self.layer.explicit_positions(self.index)
        return self.layer.projected(self.x, self.received_k, self.received_v, positions)

    def scores(self, values: Values) -> dict[str, np.ndarray]:
        return self.layer.scores(values, self.port.argument(self.lengths_before))

    def cache(self, values: Values) -> dict[str, np.ndarray]:
        previous = self._previous("cache", values)
        if self.layer.spec.latent is not None:
            return self._cache_of_latents(previous, values)
        k = self.shapes.from_numpy("k", values["k"])
        v = self.shapes.from_numpy("v", values["v"])
        return self._stages("cache", self.port.call(_append, previous, k, v, self.new_lengths))

    def _cache_of_latents(self, previous: Any, values: Values) -> dict[str, np.ndarray]:
        """Return the grown cache of latents, and the keys and values of all its slots."""
        latents = self.shapes.from_numpy("latents", values["latents"])
        grown = self.port.call(_append_latents, previous, latents, self.new_lengths)
        k, v = self.port.call(_expand, self.layer.spec, self.layer.filled.weights, grown.latents)
        capacity = self.case.capacity  # the device may have more slots
        keys = self.shapes.to_numpy("k", k)[:, :, :capacity]
        values_of_slots = self.shapes.to_numpy("v", v)[:, :, :capacity]
        # The stages come after the keys and values, because recordings of a device have this order.
        stages = self._stages("cache", grown)
        return {**stages, "cache.keys": keys, "cache.values": values_of_slots}

    def whole(self, values: Values) -> dict[str, np.ndarray]:
        """Run the module on each of its paths."""
        cache = self._previous("module.cache", values)
        if self.layer.spec.shared_kv:
            # The other layer appends.
            received = (self.received_k, self.received_v)
            cache = self.port.call(_append, cache, *received, self.new_lengths)
        outputs, grown = self.layer.filled.step(
            self.x, cache, self.new_lengths, self.layer.positions(self.index)
        )
        return {**self.layer.output_stages(outputs), **self._stages("module.cache", grown)}

    def _previous(self, name: str, values: Values) -> Any:
        """Return the cache before this call: empty, or a stage of the previous call."""
        if self.index == 0:
            return self.layer.filled.module.init_cache(self.case.batch, self.case.capacity)
        arrays = [values[f"previous.{name}.{part}"] for part in self.shapes.cache_parts]
        return self.shapes.cache_from_numpy(arrays)

    def _stages(self, name: str, cache: Any) -> dict[str, np.ndarray]:
        """Return the parts of a cache as stages."""
        parts = self.shapes.cache_to_numpy(cache)
        return {f"{name}.{part}": array for part, array in parts.items()}
