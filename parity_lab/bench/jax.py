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
            return Probe(lambda: jax.block_until_ready(compiled(matrix, matrix)), 2.0 * size**3)

        if dtype not in self._probes:
            self._probes[dtype] = large_enough(
                make, 1024 if jax.default_backend() == "cpu" else 8192
            )
        return self._probes[dtype]

    def reading(self) -> Probe | None:
        """Return a probe: the largest value of a buffer that exceeds every cache; None on a CPU."""
        if jax.default_backend() == "cpu":
            return None
        if "reading" not in self._probes:
            values = jnp.ones(2**28)
            compiled = jax.jit(jnp.max).lower(values).compile()
            self._probes["reading"] = Probe(
                lambda: jax.block_until_ready(compiled(values)), 4.0 * 2**28
            )
        return self._probes["reading"]

    def contenders(self, work: Work, inputs: Inputs) -> dict[str, Callable[[], Contender]]:
        """Return functions that prepare each contender, including ours, for a piece of work; they
        may raise errors.
        """
        makers = {"core": _Core, "layer": _Layer, "prefill": _Prefill, "decode": _Decode}
        return makers[work.kind](work, inputs).contenders()


def _contender(
    work: Work,
    function: Callable[..., Any],
    params: Any,
    inputs: Sequence[Array],
    *others: Any,
    cotangent: Array | None = None,
    restore: Callable[[np.ndarray], np.ndarray] = lambda x: x,
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
        cotangent: of the output.
        restore: brings an output, or the gradient of an input, into the order of ours.
        options: of `Contender`.
    """

    # The leaves of a tree are passed: to take a module apart can take longer than a small piece of
    # work.
    leaves, tree = jax.tree.flatten((params, tuple(inputs), others, cotangent))

    def forward(*leaves: Array) -> Any:
        params, inputs, others, _ = jax.tree.unflatten(tree, leaves)
        return function(params, *inputs, *others)

    def backward(*leaves: Array) -> Any:
        params, inputs, others, cotangent = jax.tree.unflatten(tree, leaves)
        output, pull_back = jax.vjp(
            lambda params, inputs: function(params, *inputs, *others), params, inputs
        )
        weights, gradients = pull_back(cotangent)
        return output, jax.tree.leaves(weights), gradients

    compiled = jax.jit(backward if work.backward else forward).lower(*leaves).compile()

    def arrays(found: Any) -> list[np.ndarray]:
        if work.backward:
            output, _, gradients = found
            found = (output, *gradients)
        return [restore(np.asarray(x)) for x in (found if isinstance(found, tuple) else (found,))]

    return replace(
        _compiled(compiled, lambda: jax.block_until_ready(compiled(*leaves)), arrays), **options
    )


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
    def __init__(self, work: Work, inputs: Inputs) -> None:
        self.work = work
        self.arrays = inputs.arrays

    def contenders(self) -> dict[str, Callable[[], Contender]]:
        options: dict[str, Any] = {
            "spec": self.work.spec,
            "kernel": mha_jax.fused.attend,
            **self.told(),
        }
        found = {
            OURS: lambda: self.contender(_core_attention(**options)),
            "jax.nn": lambda: self.of_jax_nn(),
            "plain path": self.plain,
        }
        if self.work.soft_cap is not None or self.work.has_sinks:  # which jax.nn has not
            del found["jax.nn"]
            return {**found, "scores by hand": lambda: self.contender(self.scores_by_hand())}
        if jax.default_backend() == "gpu" and self.work.dtype != "float32":
            found["jax.nn (cuDNN)"] = lambda: self.of_jax_nn("cudnn")
        return found

    def told(self) -> dict[str, Array]:
        """Return the lengths and the segments, as keywords of attention and of masks."""
        found = {}
        if self.work.is_padded:
            found["key_padding_lengths"] = jnp.asarray(self.work.lengths, jnp.int32)
        if self.work.num_segments > 1:
            ids = np.repeat(
                np.arange(self.work.num_segments, dtype=np.int32), self.work.segment_lengths
            )
            found["segment_ids"] = jnp.broadcast_to(
                jnp.asarray(ids), (self.work.batch, self.work.seq_len)
            )
        return found

    def contender(
        self,
        function: Callable[..., Any],
        order: Callable[[np.ndarray], np.ndarray] = lambda x: x,
        **options: bool,
    ) -> Contender:
        """A function of arrays (B, N, S, H), or of those in a different order that is its own
        inverse.
        """
        query, key, value, cotangent = (
            jnp.asarray(order(self.arrays[name])) for name in ("query", "key", "value", "cotangent")
        )

        sinks = [jnp.asarray(self.arrays["sinks"])] if self.work.has_sinks else []

        def attend(_: Any, query: Array, key: Array, value: Array, *sinks: Array) -> Array:
            given = {"sinks": sinks[0]} if sinks else {}
            return function(query, key, value, is_causal=self.work.is_causal, **given)

        inputs = (query, key, value, *sinks)
        return _contender(
            self.work, attend, (), inputs, cotangent=cotangent, restore=order, **options
        )

    def plain(self) -> Contender:
        self.work.check_scores()
        return self.contender(_core_attention(spec=self.work.spec, **self.told()), counts=False)

    def of_jax_nn(self, implementation: str | None = None) -> Contender:
        attend: Any = jax.nn.dot_product_attention
        if self.work.window_size is not None:
            if implementation is None:
                self.work.check_scores()
            attend = partial(attend, local_window_size=(self.work.window_size - 1, 0))
        if self.work.is_padded:
            attend = partial(
                attend, key_value_seq_lengths=jnp.asarray(self.work.lengths, jnp.int32)
            )
        if self.work.num_segments > 1:
            hidden = mha_jax.create_attention_mask(
                self.work.seq_len, segment_ids=self.told()["segment_ids"]
            )
            attend = partial(attend, mask=~hidden)
        if self.work.spec.alibi_slopes is not None:
            places = jnp.arange(self.work.seq_len, dtype=jnp.float32)
            slopes = jnp.asarray(self.work.spec.alibi_slopes)[:, None, None]
            bias = (slopes * (places - places[:, None])).astype(self.work.dtype)
            attend = partial(attend, bias=bias[None])
        # It takes (B, S, N, H).
        return self.contender(
            partial(attend, implementation=implementation), lambda x: x.swapaxes(1, 2)
        )

    def scores_by_hand(self) -> Callable[..., Array]:
        hidden = mha_jax.create_attention_mask(
            self.work.seq_len, is_causal=True, window_size=self.work.window_size
        )
        cap, scale = self.work.spec.soft_cap, self.work.spec.score_scale

        def attend(
            query: Array, key: Array, value: Array, *, is_causal: bool, sinks: Array | None = None
        ) -> Array:
            scores = jnp.einsum("bnth,bnsh->bnts", query * scale, key)
            scores = scores if cap is None else cap * jnp.tanh(scores / cap)
            scores = jnp.where(hidden, -jnp.inf, scores)
            if sinks is not None:
                column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
                scores = jnp.concatenate([scores, column], axis=-1)
            attn_weights = jax.nn.softmax(scores, axis=-1)[..., : key.shape[2]]
            return jnp.einsum("bnts,bnsh->bnth", attn_weights, value)

        return attend


class _Layer:
    def __init__(self, work: Work, inputs: Inputs) -> None:
        self.work, self.canonical = work, inputs.weights
        # As every JAX library holds them, (in, out): so no transposition is timed.
        self.weights = {
            name: jnp.asarray(np.ascontiguousarray(x.T)) for name, x in inputs.weights.items()
        }
        self.arrays = {name: jnp.asarray(x) for name, x in inputs.arrays.items()}
        self.x = self.arrays["x"]
        self.lengths = jnp.asarray(work.lengths, jnp.int32) if work.is_padded else None
        self.dtype = jnp.dtype(work.dtype)

    def contenders(self) -> dict[str, Callable[[], Contender]]:
        by_hand = (
            {"softmax by hand": self.softmax_by_hand}
            if self.work.need_weights
            else {"jax.nn by hand": self.by_hand}
        )
        libraries = {
            "flax.nnx": self.nnx,
            "flax.linen": self.linen,
            "keras": self.keras,
            "equinox": self.equinox,
        }
        return {OURS: self.ours, **({**by_hand, **libraries} if self.work.layer is None else {})}

    def contender(self, function: Callable[..., Any], params: Any, *others: Any) -> Contender:
        return _contender(
            self.work, function, params, (self.x,), *others, cotangent=self.arrays.get("cotangent")
        )

    def made(self, kind: Any) -> tuple[Any, Any]:
        """Return our module with the weights of the work: its definition, and its weights."""
        module = kind(self.work.spec, param_dtype=self.dtype, rngs=nnx.Rngs(0))
        module.eval()
        graph, params = nnx.split(load_into(module, self.canonical, self.work.spec))
        return graph, params

    def shown(self) -> Array | None:
        """(B, 1, T, S), True = attend, of everything that is hidden; made beforehand."""
        work = self.work
        if not (work.is_causal or work.is_padded):
            return None
        hidden = mha_jax.create_attention_mask(
            work.seq_len, key_padding_lengths=self.lengths, is_causal=work.is_causal
        )
        return ~jnp.broadcast_to(hidden, (work.batch, 1, work.seq_len, work.seq_len))

    def ours(self) -> Contender:
        work = self.work
        if work.need_weights:
            graph, params = self.made(mha_jax.MultiHeadAttention)
            mask = mha_jax.create_causal_mask(work.seq_len) if work.is_causal else None
            return self.contender(
                lambda p, x, m: nnx.merge(graph, p)(x, mask=m, need_weights=True), params, mask
            )
        graph, params = self.made(mha_jax.MultiHeadSelfAttention)

        def call(params: Any, x: Array, lengths: Array | None) -> Array:
            return nnx.merge(graph, params)(
                x, is_causal=work.is_causal, key_padding_lengths=lengths
            )

        return self.contender(call, params, self.lengths)

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
        def call(weights: Any, x: Array, shown: Array | None) -> tuple[Array, Array]:
            query, key, value = self.heads(weights, x)
            scores = jnp.einsum(
                "btnh,bsnh->bnts", query * query.dtype.type(self.work.head_dim**-0.5), key
            )
            if shown is not None:
                scores = jnp.where(shown, scores, -jnp.inf)
            attn_weights = jax.nn.softmax(scores)
            return self.out(
                weights, jnp.einsum("bnts,bsnh->btnh", attn_weights, value)
            ), attn_weights

        return self.contender(call, self.weights, self.shown())

    def nnx(self) -> Contender:
        module = self.foreign("flax.nnx.MultiHeadAttention", deterministic=True)
        graph, params, rest = nnx.split(module, nnx.Param, ...)

        def call(params: Any, x: Array, shown: Array | None, rest: Any) -> Any:
            module = nnx.merge(graph, params, rest)
            if not self.work.need_weights:
                return module(x, mask=shown)
            output, kept = nnx.capture(module, nnx.Intermediate)(x, mask=shown, sow_weights=True)
            return output, jax.tree.leaves(kept)[0]

        return self.contender(call, params, self.shown(), rest)

    def linen(self) -> Contender:
        module, variables = self.foreign(
            "flax.linen.MultiHeadDotProductAttention", deterministic=True
        ).unbind()

        def call(params: Any, x: Array, shown: Array | None) -> Any:
            if not self.work.need_weights:
                return module.apply({"params": params}, x, mask=shown)
            keywords = {"mask": shown, "sow_weights": True, "mutable": ["intermediates"]}
            output, changed = module.apply({"params": params}, x, **keywords)
            return output, jax.tree.leaves(changed)[0]

        return self.contender(call, variables["params"], self.shown())

    def keras(self) -> Contender:
        layer = keras_layer("jax", self.work.spec, self.work.dtype, self.canonical)
        others = [variable.value for variable in layer.non_trainable_variables]
        shown = self.shown()

        def call(params: Any, x: Array, shown: Array | None, others: Any) -> Any:
            found, _ = layer.stateless_call(
                params,
                others,
                x,
                x,
                attention_mask=shown,
                return_attention_scores=self.work.need_weights,
            )
            return tuple(found) if self.work.need_weights else found

        params = [variable.value for variable in layer.trainable_variables]
        return self.contender(call, params, None if shown is None else shown[:, 0], others)

    def equinox(self) -> Contender:
        import equinox

        if self.work.need_weights:
            raise NotImplementedError("it does not give its attention weights")
        module = self.foreign("equinox.nn.MultiheadAttention", inference=True)
        params, definition = equinox.partition(module, equinox.is_array)

        def call(params: Any, x: Array, shown: Array | None) -> Array:
            module = equinox.combine(params, definition)
            if shown is None:
                return jax.vmap(lambda x: module(x, x, x))(x)
            return jax.vmap(lambda x, shown: module(x, x, x, shown))(x, shown)

        shown = self.shown()
        return self.contender(call, params, None if shown is None else shown[:, 0])

    def foreign(self, name: str, **options: Any) -> Any:
        """Return another library's layer with the weights of the work."""
        adapter = load_adapter(name)
        return adapter.load_into(
            adapter.make(self.work.spec, self.work.dtype, **options), self.canonical
        )


class _Prefill(_Layer):
    """A prompt into an empty cache, which every run creates."""

    def contenders(self) -> dict[str, Callable[[], Contender]]:
        return {OURS: self.ours, "static cache": self.static_cache}

    def ours(self) -> Contender:
        graph, params = self.made(mha_jax.MultiHeadAttentionWithCache)

        def call(params: Any, x: Array) -> Any:
            layer = nnx.merge(graph, params)
            output, cache = layer(x, layer.init_cache(self.work.batch, self.work.capacity))
            return output, cache.keys, cache.values

        return self.contender(call, params)

    def static_cache(self) -> Contender:
        work = self.work

        def call(weights: Any, x: Array) -> Any:
            query, key, value = self.heads(weights, x)
            room = ((0, 0), (0, work.capacity - work.seq_len), (0, 0), (0, 0))
            caches = [jnp.pad(each, room).swapaxes(1, 2) for each in (key, value)]
            output = self.out(
                weights, jax.nn.dot_product_attention(query, key, value, is_causal=True)
            )
            return output, *caches

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
        leaves, tree = jax.tree.flatten(params)
        held, kind = jax.tree.flatten(state)

        def call(leaves: list[Array], held: list[Array], x: Array) -> tuple[Array, list[Array]]:
            output, state = step(
                jax.tree.unflatten(tree, leaves), jax.tree.unflatten(kind, held), x
            )
            return output, jax.tree.leaves(state)

        compiled = jax.jit(call, donate_argnums=1).lower(leaves, held, self.x).compile()

        def run() -> Array:
            nonlocal held
            output, held = jax.block_until_ready(compiled(leaves, held, self.x))
            return output

        return replace(_compiled(compiled, run, lambda x: [np.asarray(x)]), carries=True)

    def with_room(self) -> list[Array]:
        """The cached keys and values, (B, N, capacity, H)."""
        room = ((0, 0), (0, 0), (0, self.work.capacity - self.work.seq_len), (0, 0))
        return [jnp.pad(self.arrays[name], room) for name in ("keys", "values")]

    def ours(self) -> Contender:
        graph, params = self.made(mha_jax.MultiHeadAttentionWithCache)

        def step(params: Any, cache: Any, x: Array) -> tuple[Array, Any]:
            return nnx.merge(graph, params)(x, cache)

        return self.carried(step, params, self.state(nnx.merge(graph, params)))

    def state(self, module: Any) -> Any:
        """Return our cache with the cached keys and values."""
        if "prompt" in self.arrays:
            return module(
                self.arrays["prompt"], module.init_cache(self.work.batch, self.work.capacity)
            )[1]
        lengths = jnp.full((self.work.batch,), self.work.seq_len, jnp.int32)
        keys, values = self.with_room()
        return mha_jax.KVCache(keys, values, lengths)

    def concatenation(self) -> Contender:
        def call(weights: Any, x: Array, keys: Array, values: Array) -> Any:
            query, key, value = self.heads(weights, x)
            keys, values = (
                jnp.concatenate([keys, key], axis=1),
                jnp.concatenate([values, value], axis=1),
            )
            return (
                self.out(weights, jax.nn.dot_product_attention(query, keys, values)),
                keys,
                values,
            )

        cached = [self.arrays[name].swapaxes(1, 2) for name in ("keys", "values")]
        made = self.contender(call, self.weights, *cached)
        return replace(made, arrays=lambda found: made.arrays(found)[:1])

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
        return self.carried(
            step, self.weights, (keys, values, jnp.asarray(self.work.seq_len, jnp.int32))
        )

    def nnx(self) -> Contender:
        work = self.work
        module = self.foreign("flax.nnx.MultiHeadAttention", decode=True, deterministic=True)
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


def _first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its first result only."""
    return lambda *args, **keywords: function(*args, **keywords)[0]
