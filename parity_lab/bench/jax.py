"""Contenders that run on JAX: compiled once, with their weights as arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

import mha_jax
from parity.port.foreign import load_adapter, load_into
from parity_lab.bench.keras import keras_layer
from parity_lab.bench.measure import OURS, Contender, Probe, large_enough
from parity_lab.bench.operations import operations_of_program
from parity_lab.bench.work import Inputs, Work

NAMES = {
    "plain path": "mha_jax.scaled_dot_product_attention, ours, with every stage",
    "jax.nn": "jax.nn.dot_product_attention",
    "jax.nn (cuDNN)": "jax.nn.dot_product_attention, implementation='cudnn'",
    "jax.nn by hand": "matrix products around jax.nn.dot_product_attention",
    "softmax by hand": "matrix products around einsum and softmax",
    "flax.nnx": "flax.nnx.MultiHeadAttention",
    "scores by hand": "two matrix products, and what comes between them, a mask made beforehand",
    "flax.linen": "flax.linen.MultiHeadDotProductAttention",
    "keras": "keras.layers.MultiHeadAttention on JAX",
    "equinox": "equinox.nn.MultiheadAttention under vmap",
    "concatenation": (
        "jax.nn by hand, keys and values concatenated to those so far, compiled for this length"
    ),
    "static cache": (
        "jax.nn by hand, keys and values written into donated arrays, read with "
        "key_value_seq_lengths"
    ),
}
"""Descriptions of the contenders, by name."""


class Side:
    """The benchmark of JAX, on its default device."""

    def __init__(self) -> None:
        self._probes: dict[str, Probe] = {}

    def settings(self) -> dict[str, Any]:
        """Return the settings that change the speed."""
        config: Any = jax.config
        return {
            "default_matmul_precision": config.jax_default_matmul_precision,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "device": jax.devices()[0].device_kind,
        }

    def matmul(self, dtype: str) -> Probe:
        """Return a probe: the product of two large square matrices."""

        def make(size: int) -> Probe:
            matrix = jnp.full((size, size), 0.5, dtype)
            compiled = jax.jit(jnp.matmul).lower(matrix, matrix).compile()
            return Probe(partial(_done, compiled, matrix, matrix), 2.0 * size**3)

        if dtype not in self._probes:
            largest = 1024 if jax.default_backend() == "cpu" else 8192
            self._probes[dtype] = large_enough(make, largest)
        return self._probes[dtype]

    def reading(self) -> Probe | None:
        """Return a probe: the largest value of a buffer that exceeds every cache; None on a CPU."""
        if jax.default_backend() == "cpu":
            return None
        if "reading" not in self._probes:
            values = jnp.ones(2**28, jnp.float32)
            compiled = jax.jit(jnp.max).lower(values).compile()
            self._probes["reading"] = Probe(partial(_done, compiled, values), float(values.nbytes))
        return self._probes["reading"]

    def contenders(self, work: Work, inputs: Inputs) -> dict[str, Callable[[], Contender]]:
        """Return functions that prepare each contender, including ours, for a piece of work; they
        may raise errors.
        """
        makers = {"core": _Core, "layer": _Layer, "prefill": _Prefill, "decode": _Decode}
        return makers[work.kind](work, inputs).contenders()


def _done(compiled: Callable[..., Any], *args: Any) -> Any:
    """Return the results of a compiled program after the device has computed them."""
    return jax.block_until_ready(compiled(*args))


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _swap_heads(x: np.ndarray) -> np.ndarray:
    """Return (B, S, N, H) as (B, N, S, H), and the inverse."""
    return x.swapaxes(1, 2)


def _contender(
    work: Work,
    function: Callable[..., Any],
    params: Any,
    inputs: Sequence[Array],
    *others: Any,
    cotangent: Array | None = None,
    restore: Callable[[np.ndarray], np.ndarray] = _same,
    **options: bool,
) -> Contender:
    """Return `function(params, *inputs, *others)` compiled, with its backward pass if the work
    includes it.

    Args:
        work: the work.
        function: gives the output, or the output and the attention weights.
        params: weights, any tree of arrays.
        inputs: the arrays whose gradients are compared.
        others: what else it takes, not differentiated.
        cotangent: cotangent of the output.
        restore: brings an output, or the gradient of an input, into the order of ours.
        options: options of `Contender`.
    """
    # The leaves of a tree are passed: to take a module apart can take longer than a small piece of
    # work.
    leaves, tree = jax.tree.flatten((params, tuple(inputs), others, cotangent))

    def forward(*leaves: Array) -> Any:
        params, inputs, others, _ = jax.tree.unflatten(tree, leaves)
        return function(params, *inputs, *others)

    def backward(*leaves: Array) -> Any:
        params, inputs, others, cotangent = jax.tree.unflatten(tree, leaves)

        def differentiated(params: Any, inputs: tuple[Array, ...]) -> Any:
            return function(params, *inputs, *others)

        output, pull_back = jax.vjp(differentiated, params, inputs)
        weight_gradients, input_gradients = pull_back(cotangent)
        return output, jax.tree.leaves(weight_gradients), input_gradients

    def arrays(results: Any) -> list[np.ndarray]:
        if work.backward:
            output, _, input_gradients = results
            results = (output, *input_gradients)
        elif not isinstance(results, tuple):
            results = (results,)
        return [restore(np.asarray(x)) for x in results]

    compiled = jax.jit(backward if work.backward else forward).lower(*leaves).compile()
    return replace(_compiled(compiled, partial(_done, compiled, *leaves), arrays), **options)


def _compiled(
    compiled: Any, run: Callable[[], Any], arrays: Callable[[Any], list[np.ndarray]]
) -> Contender:
    """Return a contender that runs a compiled program."""
    analysis = compiled.memory_analysis()
    return Contender(
        run,
        arrays,
        peak_bytes=lambda: None if analysis is None else int(analysis.temp_size_in_bytes),
        operations=lambda: operations_of_program(compiled.as_text()),
    )


class _Core:
    """Attention of split heads."""

    def __init__(self, work: Work, inputs: Inputs) -> None:
        self.work = work
        self.arrays = inputs.arrays

    def contenders(self) -> dict[str, Callable[[], Contender]]:
        makers = {OURS: self.ours}
        if self.work.soft_cap is not None or self.work.has_sinks:  # jax.nn has neither
            return {**makers, "plain path": self.plain, "scores by hand": self.scores_by_hand}
        makers["jax.nn"] = self.jax_nn
        makers["plain path"] = self.plain
        if jax.default_backend() == "gpu" and self.work.dtype != "float32":
            makers["jax.nn (cuDNN)"] = partial(self.jax_nn, "cudnn")
        return makers

    def mask_keywords(self) -> dict[str, Any]:
        """Return the lengths and the segments, as keywords of attention and of masks."""
        work = self.work
        keywords = {}
        if work.is_padded:
            keywords["key_padding_lengths"] = jnp.asarray(work.lengths, jnp.int32)
        if work.num_segments > 1:
            ids = np.repeat(np.arange(work.num_segments, dtype=np.int32), work.segment_lengths)
            shape = (work.batch, work.seq_len)
            keywords["segment_ids"] = jnp.broadcast_to(jnp.asarray(ids), shape)
        return keywords

    def contender(
        self,
        function: Callable[..., Any],
        order: Callable[[np.ndarray], np.ndarray] = _same,
        **options: bool,
    ) -> Contender:
        """Return a contender of a function of arrays (B, N, S, H), or of arrays whose axes have a
        different order that is its own inverse.
        """
        names = ("query", "key", "value")
        inputs = [jnp.asarray(order(self.arrays[name])) for name in names]
        if self.work.has_sinks:
            inputs.append(jnp.asarray(self.arrays["sinks"]))
        cotangent = jnp.asarray(order(self.arrays["cotangent"]))

        def attend(_: Any, query: Array, key: Array, value: Array, *sinks: Array) -> Array:
            keywords = {"sinks": sinks[0]} if sinks else {}
            return function(query, key, value, is_causal=self.work.is_causal, **keywords)

        return _contender(
            self.work, attend, (), inputs, cotangent=cotangent, restore=order, **options
        )

    def ours(self) -> Contender:
        keywords = self.mask_keywords()
        attend = _core_attention(spec=self.work.spec, kernel=mha_jax.fused.attend, **keywords)
        return self.contender(attend)

    def plain(self) -> Contender:
        self.work.check_scores()
        attend = _core_attention(spec=self.work.spec, **self.mask_keywords())
        return self.contender(attend, counts=False)

    def jax_nn(self, implementation: str | None = None) -> Contender:
        work = self.work
        keywords: dict[str, Any] = {}
        if work.window_size is not None:
            if implementation is None:
                work.check_scores()
            keywords["local_window_size"] = (work.window_size - 1, 0)
        if work.is_padded:
            keywords["key_value_seq_lengths"] = jnp.asarray(work.lengths, jnp.int32)
        if work.num_segments > 1:
            ids = self.mask_keywords()["segment_ids"]
            keywords["mask"] = ~mha_jax.create_attention_mask(work.seq_len, segment_ids=ids)
        if work.spec.alibi_slopes is not None:
            positions = jnp.arange(work.seq_len, dtype=jnp.float32)
            slopes = jnp.asarray(work.spec.alibi_slopes)[:, None, None]
            bias = (slopes * (positions - positions[:, None])).astype(work.dtype)
            keywords["bias"] = bias[None]
        attend: Any = jax.nn.dot_product_attention
        attend = partial(attend, implementation=implementation, **keywords)
        # It takes (B, S, N, H).
        return self.contender(attend, _swap_heads)

    def scores_by_hand(self) -> Contender:
        hidden = mha_jax.create_attention_mask(
            self.work.seq_len, is_causal=True, window_size=self.work.window_size
        )
        cap = self.work.spec.soft_cap
        scale = self.work.spec.score_scale

        def attend(
            query: Array, key: Array, value: Array, *, is_causal: bool, sinks: Array | None = None
        ) -> Array:
            scores = jnp.einsum("bnth,bnsh->bnts", query * scale, key)
            if cap is not None:
                scores = cap * jnp.tanh(scores / cap)
            scores = jnp.where(hidden, -jnp.inf, scores)
            if sinks is not None:
                column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
                scores = jnp.concatenate([scores, column], axis=-1)
            attn_weights = jax.nn.softmax(scores, axis=-1)[..., : key.shape[2]]
            return jnp.einsum("bnts,bnsh->bnth", attn_weights, value)

        return self.contender(attend)


class _Layer:
    """A whole layer."""

    def __init__(self, work: Work, inputs: Inputs) -> None:
        self.work = work
        self.canonical = inputs.weights
        # As every JAX library holds them, (in, out): so no transposition is timed.
        self.weights = {
            name: jnp.asarray(np.ascontiguousarray(x.T)) for name, x in inputs.weights.items()
        }
        self.arrays = {name: jnp.asarray(x) for name, x in inputs.arrays.items()}
        self.x = self.arrays["x"]
        self.lengths = jnp.asarray(work.lengths, jnp.int32) if work.is_padded else None
        self.dtype = jnp.dtype(work.dtype)

    def contenders(self) -> dict[str, Callable[[], Contender]]:
        makers = {OURS: self.ours}
        if self.work.layer is not None:
            return makers  # the others lack what layers of models have
        if self.work.need_weights:
            makers["softmax by hand"] = self.softmax_by_hand
        else:
            makers["jax.nn by hand"] = self.by_hand
        makers["flax.nnx"] = self.nnx
        makers["flax.linen"] = self.linen
        makers["keras"] = self.keras
        makers["equinox"] = self.equinox
        return makers

    def contender(self, function: Callable[..., Any], params: Any, *others: Any) -> Contender:
        return _contender(
            self.work, function, params, (self.x,), *others, cotangent=self.arrays.get("cotangent")
        )

    def our_module(self, kind: Any) -> tuple[Any, Any]:
        """Return our module with the weights of the work: its definition, and its weights."""
        module = kind(self.work.spec, param_dtype=self.dtype, rngs=nnx.Rngs(0))
        module.eval()
        graph, params = nnx.split(load_into(module, self.canonical, self.work.spec))
        return graph, params

    def foreign_module(self, name: str, **options: Any) -> Any:
        """Return another library's layer with the weights of the work."""
        adapter = load_adapter(name)
        module = adapter.make(self.work.spec, self.work.dtype, **options)
        return adapter.load_into(module, self.canonical)

    def visible_keys(self) -> Array | None:
        """Return the mask (B, 1, T, S), True = attend, made beforehand; None if nothing is
        hidden.
        """
        work = self.work
        if not (work.is_causal or work.is_padded):
            return None
        hidden = mha_jax.create_attention_mask(
            work.seq_len, key_padding_lengths=self.lengths, is_causal=work.is_causal
        )
        return ~jnp.broadcast_to(hidden, (work.batch, 1, work.seq_len, work.seq_len))

    def visible_keys_of_all_heads(self) -> Array | None:
        """Return the same mask as (B, T, S)."""
        visible = self.visible_keys()
        if visible is None:
            return None
        return visible[:, 0]

    def ours(self) -> Contender:
        if self.work.need_weights:
            return self.ours_with_weights()
        graph, params = self.our_module(mha_jax.MultiHeadSelfAttention)

        def call(params: Any, x: Array, lengths: Array | None) -> Array:
            module = nnx.merge(graph, params)
            return module(x, is_causal=self.work.is_causal, key_padding_lengths=lengths)

        return self.contender(call, params, self.lengths)

    def ours_with_weights(self) -> Contender:
        graph, params = self.our_module(mha_jax.MultiHeadAttention)
        causal = None
        if self.work.is_causal:
            causal = mha_jax.create_causal_mask(self.work.seq_len)

        def call(params: Any, x: Array, mask: Array | None) -> Any:
            return nnx.merge(graph, params)(x, mask=mask, need_weights=True)

        return self.contender(call, params, causal)

    def heads(self, weights: Mapping[str, Array], x: Array) -> list[Array]:
        """Queries, keys and values, (B, S, N, H), which is the order of jax.nn."""
        shape = (*x.shape[:2], self.work.num_heads, self.work.head_dim)
        return [_project(weights, name, x).reshape(shape) for name in "qkv"]

    def out(self, weights: Mapping[str, Array], context: Array) -> Array:
        return _project(weights, "out", context.reshape(*context.shape[:2], -1))

    def by_hand(self) -> Contender:
        def call(weights: Any, x: Array, lengths: Array | None) -> Array:
            context = jax.nn.dot_product_attention(
                *self.heads(weights, x),
                is_causal=self.work.is_causal,
                key_value_seq_lengths=lengths,
            )
            return self.out(weights, context)

        return self.contender(call, self.weights, self.lengths)

    def softmax_by_hand(self) -> Contender:
        def call(weights: Any, x: Array, visible: Array | None) -> tuple[Array, Array]:
            query, key, value = self.heads(weights, x)
            scale = query.dtype.type(self.work.head_dim**-0.5)
            scores = jnp.einsum("btnh,bsnh->bnts", query * scale, key)
            if visible is not None:
                scores = jnp.where(visible, scores, -jnp.inf)
            attn_weights = jax.nn.softmax(scores)
            context = jnp.einsum("bnts,bsnh->btnh", attn_weights, value)
            return self.out(weights, context), attn_weights

        return self.contender(call, self.weights, self.visible_keys())

    def nnx(self) -> Contender:
        module = self.foreign_module("flax.nnx.MultiHeadAttention", deterministic=True)
        graph, params, rest = nnx.split(module, nnx.Param, ...)

        def call(params: Any, x: Array, visible: Array | None, rest: Any) -> Any:
            module = nnx.merge(graph, params, rest)
            if not self.work.need_weights:
                return module(x, mask=visible)
            capture = nnx.capture(module, nnx.Intermediate)
            output, captured = capture(x, mask=visible, sow_weights=True)
            return output, jax.tree.leaves(captured)[0]

        return self.contender(call, params, self.visible_keys(), rest)

    def linen(self) -> Contender:
        bound = self.foreign_module("flax.linen.MultiHeadDotProductAttention", deterministic=True)
        module, variables = bound.unbind()

        def call(params: Any, x: Array, visible: Array | None) -> Any:
            if not self.work.need_weights:
                return module.apply({"params": params}, x, mask=visible)
            output, changed = module.apply(
                {"params": params}, x, mask=visible, sow_weights=True, mutable=["intermediates"]
            )
            return output, jax.tree.leaves(changed)[0]

        return self.contender(call, variables["params"], self.visible_keys())

    def keras(self) -> Contender:
        layer = keras_layer("jax", self.work.spec, self.work.dtype, self.canonical)
        params = [variable.value for variable in layer.trainable_variables]
        others = [variable.value for variable in layer.non_trainable_variables]

        def call(params: Any, x: Array, visible: Array | None, others: Any) -> Any:
            results, _ = layer.stateless_call(
                params,
                others,
                x,
                x,
                attention_mask=visible,
                return_attention_scores=self.work.need_weights,
            )
            return tuple(results) if self.work.need_weights else results

        return self.contender(call, params, self.visible_keys_of_all_heads(), others)

    def equinox(self) -> Contender:
        import equinox

        if self.work.need_weights:
            raise NotImplementedError("it does not give its attention weights")
        module = self.foreign_module("equinox.nn.MultiheadAttention", inference=True)
        params, definition = equinox.partition(module, equinox.is_array)

        def call(params: Any, x: Array, visible: Array | None) -> Array:
            module = equinox.combine(params, definition)
            if visible is None:
                return jax.vmap(lambda x: module(x, x, x))(x)
            return jax.vmap(lambda x, visible: module(x, x, x, visible))(x, visible)

        return self.contender(call, params, self.visible_keys_of_all_heads())


class _Prefill(_Layer):
    """A prompt into an empty cache, which every run creates."""

    def contenders(self) -> dict[str, Callable[[], Contender]]:
        return {OURS: self.ours, "static cache": self.static_cache}

    def ours(self) -> Contender:
        graph, params = self.our_module(mha_jax.MultiHeadAttentionWithCache)

        def call(params: Any, x: Array) -> Any:
            layer = nnx.merge(graph, params)
            output, cache = layer(x, layer.init_cache(self.work.batch, self.work.capacity))
            return output, cache.keys, cache.values

        return self.contender(call, params)

    def static_cache(self) -> Contender:
        room = ((0, 0), (0, self.work.capacity - self.work.seq_len), (0, 0), (0, 0))

        def call(weights: Any, x: Array) -> Any:
            query, key, value = self.heads(weights, x)
            keys = jnp.pad(key, room).swapaxes(1, 2)
            values = jnp.pad(value, room).swapaxes(1, 2)
            context = jax.nn.dot_product_attention(query, key, value, is_causal=True)
            return self.out(weights, context), keys, values

        return self.contender(call, self.weights)


class _Decode(_Layer):
    """One more token with a filled cache, which is donated."""

    def contenders(self) -> dict[str, Callable[[], Contender]]:
        if self.work.layer is not None:
            return {OURS: self.ours}
        return {
            OURS: self.ours,
            "concatenation": self.concatenation,
            "static cache": self.static_cache,
            "flax.nnx": self.nnx,
        }

    def carried(self, step: Callable[..., tuple[Array, Any]], params: Any, state: Any) -> Contender:
        """Return a compiled step from one state to the next."""
        param_leaves, param_tree = jax.tree.flatten(params)
        state_leaves, state_tree = jax.tree.flatten(state)

        def call(
            param_leaves: list[Array], state_leaves: list[Array], x: Array
        ) -> tuple[Array, list[Array]]:
            params = jax.tree.unflatten(param_tree, param_leaves)
            state = jax.tree.unflatten(state_tree, state_leaves)
            output, state = step(params, state, x)
            return output, jax.tree.leaves(state)

        donating = jax.jit(call, donate_argnums=1)
        compiled = donating.lower(param_leaves, state_leaves, self.x).compile()

        def run() -> Array:
            nonlocal state_leaves
            output, state_leaves = _done(compiled, param_leaves, state_leaves, self.x)
            return output

        def arrays(output: Array) -> list[np.ndarray]:
            return [np.asarray(output)]

        return replace(_compiled(compiled, run, arrays), carries=True)

    def with_room(self) -> list[Array]:
        """Return the cached keys and values, (B, N, capacity, H)."""
        room = ((0, 0), (0, 0), (0, self.work.capacity - self.work.seq_len), (0, 0))
        return [jnp.pad(self.arrays[name], room) for name in ("keys", "values")]

    def ours(self) -> Contender:
        graph, params = self.our_module(mha_jax.MultiHeadAttentionWithCache)

        def step(params: Any, cache: Any, x: Array) -> tuple[Array, Any]:
            return nnx.merge(graph, params)(x, cache)

        return self.carried(step, params, self.filled_cache(nnx.merge(graph, params)))

    def filled_cache(self, module: Any) -> Any:
        """Return our cache with the cached keys and values."""
        batch, seq_len = self.work.batch, self.work.seq_len
        if "prompt" in self.arrays:
            empty = module.init_cache(batch, self.work.capacity)
            _, cache = module(self.arrays["prompt"], empty)
            return cache
        lengths = jnp.full((batch,), seq_len, jnp.int32)
        keys, values = self.with_room()
        return mha_jax.KVCache(keys, values, lengths)

    def concatenation(self) -> Contender:
        def call(weights: Any, x: Array, keys: Array, values: Array) -> Any:
            query, key, value = self.heads(weights, x)
            keys = jnp.concatenate([keys, key], axis=1)
            values = jnp.concatenate([values, value], axis=1)
            context = jax.nn.dot_product_attention(query, keys, values)
            return self.out(weights, context), keys, values

        keys = self.arrays["keys"].swapaxes(1, 2)
        values = self.arrays["values"].swapaxes(1, 2)
        contender = self.contender(call, self.weights, keys, values)

        def output_alone(results: Any) -> list[np.ndarray]:
            output, _, _ = results
            return [np.asarray(output)]

        return replace(contender, arrays=output_alone)

    def static_cache(self) -> Contender:
        def step(weights: Any, state: tuple[Array, Array, Array], x: Array) -> tuple[Array, Any]:
            keys, values, filled = state
            query, key, value = self.heads(weights, x)
            keys = jax.lax.dynamic_update_slice_in_dim(keys, key, filled, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(values, value, filled, axis=1)
            lengths = jnp.full((self.work.batch,), filled + 1)
            context = jax.nn.dot_product_attention(
                query, keys, values, key_value_seq_lengths=lengths
            )
            return self.out(weights, context), (keys, values, filled + 1)

        keys, values = (x.swapaxes(1, 2) for x in self.with_room())
        filled = jnp.asarray(self.work.seq_len, jnp.int32)
        return self.carried(step, self.weights, (keys, values, filled))

    def nnx(self) -> Contender:
        work = self.work
        module = self.foreign_module("flax.nnx.MultiHeadAttention", decode=True, deterministic=True)
        module.init_cache((work.batch, work.capacity, work.d_model), dtype=self.dtype)
        graph, params, cache, rest = nnx.split(module, nnx.Param, nnx.Cache, ...)
        keys, values = (x.swapaxes(1, 2) for x in self.with_room())
        filled = jnp.asarray(work.seq_len, jnp.int32)
        nnx.replace_by_pure_dict(
            cache, {"cached_key": keys, "cached_value": values, "cache_index": filled}
        )

        def step(params: Any, cache: Any, x: Array) -> tuple[Array, Any]:
            module = nnx.merge(graph, params, cache, rest)
            output = module(x)
            return output, nnx.state(module, nnx.Cache)

        return self.carried(step, params, cache)


def _project(weights: Mapping[str, Array], name: str, x: Array) -> Array:
    return x @ weights[f"{name}_proj.weight"] + weights[f"{name}_proj.bias"]


def _core_attention(**options: Any) -> Callable[..., Array]:
    """Return our attention of split heads, with sinks as an argument, as other contenders take
    them.
    """

    def attend(
        query: Array, key: Array, value: Array, *, is_causal: bool, sinks: Array | None = None
    ) -> Array:
        learned = {} if sinks is None else {"sinks": sinks}
        context, _ = mha_jax.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, learned=learned, **options
        )
        return context

    return attend
