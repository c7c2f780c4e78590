"""The JAX backend: canonical weights into `mha_jax` modules, and cases through them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

import mha_jax
from mha_jax.blockwise import BlockSizes
from parity.backends import values_to_weigh
from parity.core.problem import Problem
from parity.core.reference import Step, Values, in_step
from parity.core.spec import AttentionSpec, Case
from parity.core.weights import Weights, check_held, check_weights, pack_qkv, unpack_qkv, weight_shapes
from parity.files.tensor_file import flatten

Params = dict[str, dict[str, Array]]

SMALL_BLOCKS = BlockSizes(few_scores=0, queries=8, keys=8, last_keys=4, most_blocks=2)
"""The sizes of blocks at which most cases have several; at those that users get they leave it to the plain path."""


def from_numpy(x: np.ndarray) -> Array:
    """The JAX array of the same values and dtype (64-bit ones only where x64 is enabled)."""
    return jnp.asarray(x)


def to_numpy(x: Array) -> np.ndarray:
    """The NumPy array of the same values and dtype."""
    return np.asarray(x)


# ---- Weights ---------------------------------------------------------------------------------------------------------


def load_into(module: Any, weights: Mapping[str, np.ndarray]) -> Any:
    """Fill a module of `mha_jax` from canonical weights, bit for bit, or leave it as it was."""
    spec = spec_of(module)
    weights = check_weights(weights, spec)
    _check_held(nnx.to_pure_dict(nnx.state(module, nnx.Param)), spec)
    (dtype,) = {weight.dtype for weight in weights.values()}  # one, as checked; before JAX can narrow it
    held = (module.qkv_proj if spec.fused_qkv else module.q_proj).kernel.dtype
    if dtype != held:
        raise TypeError(f"weights must have the dtype of the module, got {dtype} and {held}")
    nnx.update(module, to_params(weights, spec))
    return module


def spec_of(module: Any) -> AttentionSpec:
    """The specification of a module of `mha_jax`."""
    return AttentionSpec(**module.config)


def weights_of(module: Any) -> Weights:
    """The canonical weights of a module of `mha_jax`, bit for bit."""
    spec, params = spec_of(module), nnx.to_pure_dict(nnx.state(module, nnx.Param))
    _check_held(params, spec)
    return from_params(params, spec)


def _check_held(params: Mapping[str, Any], spec: AttentionSpec) -> None:
    names = (re.sub(r"kernel$", "weight", name) for name in flatten(params))
    check_held(names, spec)


def to_params(weights: Mapping[str, np.ndarray], spec: AttentionSpec) -> Params:
    """Canonical weights as the parameter tree that a layer of that specification holds."""
    params: Params = {}
    for name, weight in (pack_qkv(weights) if spec.fused_qkv else weights).items():
        projection, leaf = name.split(".")
        if leaf == "weight":
            leaf, weight = "kernel", weight.T  # (out, in) to (in, out)
        params.setdefault(projection, {})[leaf] = from_numpy(weight)
    return params


def from_params(params: Mapping[str, Mapping[str, Array]], spec: AttentionSpec) -> Weights:
    """Canonical weights from the parameter tree that a layer of that specification holds."""
    held: Weights = {}
    for projection, leaves in params.items():
        for leaf, array in leaves.items():
            weight = to_numpy(array)
            name, weight = ("weight", weight.T) if leaf == "kernel" else (leaf, weight)
            held[f"{projection}.{name}"] = np.array(weight, order="C")
    return unpack_qkv(held, spec) if spec.fused_qkv else {name: held[name] for name in weight_shapes(spec)}


# ---- Cases -----------------------------------------------------------------------------------------------------------

HAS_GRADIENTS = True


def why_skipped(case: Case, dtype: str) -> str | None:
    """Why a case cannot run in a dtype, or None: here all can."""
    return None


def steps(problem: Problem) -> list[Step]:
    """The stages of a problem as functions, in the order of the data flow: see `parity.core.reference.steps`."""
    layer = _Layer(problem)
    if not problem.case.is_cached:
        return [layer.mask, layer.qkv, layer.scores, layer.attn_weights, layer.context, layer.output, layer.whole]
    return [in_step(index, step) for index in range(len(problem.case.chunks)) for step in layer.cached_steps(index)]


def gradients(problem: Problem) -> dict[str, np.ndarray]:
    """Gradients of sum(output * cotangent) on the plain path, `grad.…`, on the fused one, `fused.grad.…`, and on that
    one in small blocks, `blocks.grad.…`."""
    layer = _Layer(problem)
    return {
        **layer.backward("", partial(layer.attend_with, need_weights=True)),
        **layer.backward("fused.", partial(layer.attend_with, need_weights=False)),
        **layer.backward("blocks.", layer.attend_in_blocks),
    }


class _Layer:
    """A problem's arrays, and each stage compiled on its own: a compilation costs more here than the computation."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.spec = problem.spec
        self.inputs = {name: from_numpy(x) for name, x in problem.inputs.items()}
        self.weights = to_params(problem.weights, problem.spec)
        kind = mha_jax.MultiHeadAttentionWithCache if problem.case.is_cached else mha_jax.MultiHeadAttention
        # The weights are loaded anyway: those of a new module need not be drawn.
        module = nnx.eval_shape(
            lambda: kind(**problem.spec.keywords, param_dtype=jnp.dtype(problem.dtype), rngs=nnx.Rngs(0))
        )
        module.eval()
        self.module = load_into(module, problem.weights)
        self.in_blocks = nnx.clone(self.module)
        self.in_blocks.block_sizes = SMALL_BLOCKS
        self.jit_mask = jax.jit(self.build_mask)
        self.jit_project = jax.jit(self.project)
        self.jit_scores = jax.jit(lambda q, k: mha_jax.attention_scores(q, k, self.inputs.get("bias")))
        self.jit_softmax = jax.jit(lambda scores, mask: mha_jax.masked_softmax(scores, mask).astype(self.dtype))
        self.jit_context = jax.jit(lambda attn_weights, v: mha_jax.attention_context(attn_weights, v))
        self.jit_output = jax.jit(self.project_output)
        self.jit_cache_mask = jax.jit(self.build_cache_mask, static_argnums=1)
        self.jit_append = jax.jit(lambda cache, k, v, n: mha_jax.append_to_cache(cache, k, v, new_lengths=n))
        self.jit_all = nnx.jit(self.all_paths)
        self.jit_step = nnx.jit(lambda module, x, cache, n: module(x, cache, new_lengths=n))

    @property
    def dtype(self) -> Any:
        return self.inputs["query"].dtype

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        case = self.problem.case
        shape = (case.batch, self.spec.num_heads, case.seq_len, case.key_len)
        return {"mask": np.broadcast_to(self.jit_mask(), shape)}

    def build_mask(self) -> Array:
        case = self.problem.case
        lengths = case.key_padding_lengths
        mask = mha_jax.create_attention_mask(
            case.seq_len, case.key_len, is_causal=case.is_causal, key_padding_lengths=lengths
        )
        if case.window_size is not None:
            window = mha_jax.create_sliding_window_mask(case.seq_len, case.key_len, window_size=case.window_size)
            mask = mask | window[None, None]
        return mask | self.inputs["mask"] if "mask" in self.inputs else mask

    def build_cache_mask(self, lengths: Array, seq_len: int) -> Array:
        return mha_jax.create_cache_mask(lengths, seq_len, self.problem.case.capacity)

    def project(self, query: Array, key: Array | None, positions: Array | None) -> dict[str, Array]:
        key = query if key is None else key
        qkv = mha_jax.project_qkv(
            mha_jax.project_with(self.weights),
            query,
            key,
            key,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            fused_qkv=self.spec.fused_qkv,
            positions=positions,
            rope_theta=self.spec.rope_theta,
        )
        return dict(zip("qkv", qkv, strict=True))

    def project_output(self, context: Array) -> Array:
        output = mha_jax.combine_heads(context)
        return mha_jax.project_with(self.weights)("out_proj", output) if self.spec.out_proj else output

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        return _to_numpy(self.jit_project(self.inputs["query"], self.inputs.get("key"), None))

    def scores(self, values: Values) -> dict[str, np.ndarray]:
        return _to_numpy({"scores": self.jit_scores(values["q"], values["k"])})

    def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
        return _to_numpy({"attn_weights": self.jit_softmax(values["scores"], values["mask"])})

    def context(self, values: Values) -> dict[str, np.ndarray]:
        return _to_numpy({"context": self.jit_context(values["attn_weights"], values_to_weigh(self.problem, values))})

    def output(self, values: Values) -> dict[str, np.ndarray]:
        return _to_numpy({"output": self.jit_output(values["context"])})

    def all_paths(
        self, module: mha_jax.MultiHeadAttention, in_blocks: mha_jax.MultiHeadAttention, query: Array
    ) -> dict[str, Array | None]:
        key, bias = self.inputs.get("key"), self.inputs.get("bias")
        mask = self.build_mask() if self.problem.case.has_mask else None
        output, attn_weights = module(query, key, mask=mask, bias=bias, need_weights=True)
        values = {"module.attn_weights": attn_weights, "module.output": output}
        for path, layer in {"fused": module, "blocks": in_blocks}.items():
            values[f"{path}.output"], _ = layer(query, key, mask=mask, bias=bias)
        return values

    def whole(self, _: Values) -> dict[str, np.ndarray]:
        return _to_numpy(self.jit_all(self.module, self.in_blocks, self.inputs["query"]))

    def cached_steps(self, index: int) -> list[Step]:
        case = self.problem.case
        x = from_numpy(self.problem.step_input(index))
        lengths = np.array(case.lengths_before(index), np.int32)
        new_lengths = np.array(case.added(index), np.int32) if case.new_lengths else None

        def cache_of(values: Values, name: str) -> mha_jax.KVCache:
            if index == 0:
                return self.module.init_cache(case.batch, case.capacity)
            arrays = (values[f"previous.{name}.{part}"] for part in ("keys", "values", "lengths"))
            return mha_jax.KVCache(*map(from_numpy, arrays))

        def stages_of(cache: mha_jax.KVCache, name: str) -> dict[str, np.ndarray]:
            parts = {"keys": cache.keys, "values": cache.values, "lengths": cache.lengths}
            return _to_numpy({f"{name}.{part}": array for part, array in parts.items()})

        def mask(_: Values) -> dict[str, np.ndarray]:
            mask = self.jit_cache_mask(lengths, case.chunks[index])
            shape = (case.batch, case.spec.num_heads, case.chunks[index], case.capacity)
            return {"mask": np.broadcast_to(mask, shape)}

        def qkv(_: Values) -> dict[str, np.ndarray]:
            positions = lengths[:, None] + np.arange(case.chunks[index], dtype=np.int32)
            return _to_numpy(self.jit_project(x, None, positions if case.spec.rope_theta else None))

        def cache(values: Values) -> dict[str, np.ndarray]:
            grown = self.jit_append(cache_of(values, "cache"), values["k"], values["v"], new_lengths)
            return stages_of(grown, "cache")

        def whole(values: Values) -> dict[str, np.ndarray]:
            cache = cache_of(values, "module.cache")
            output, grown = self.jit_step(self.module, x, cache, new_lengths)
            in_blocks, _ = self.jit_step(self.in_blocks, x, cache, new_lengths)
            outputs = {"module.output": output, "blocks.output": in_blocks}
            return {**_to_numpy(outputs), **stages_of(grown, "module.cache")}

        def scores(values: Values) -> dict[str, np.ndarray]:
            return self.scores({**values, "k": values["cache.keys"]})

        def context(values: Values) -> dict[str, np.ndarray]:
            return self.context({**values, "v": values["cache.values"]})

        return [mask, qkv, cache, scores, self.attn_weights, context, self.output, whole]

    def attend_with(
        self, weights: Params, query: Array, key: Array | None, *, need_weights: bool, **hides: Any
    ) -> Array:
        output, _ = mha_jax.multi_head_attention(
            query,
            weights,
            key,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            need_weights=need_weights,
            rope_theta=self.spec.rope_theta,
            **hides,
        )
        return output

    def attend_in_blocks(self, weights: Params, query: Array, key: Array | None, **hides: Any) -> Array:
        module = nnx.clone(self.in_blocks)
        nnx.update(module, weights)
        return module(query, key, **hides)[0]

    def backward(self, prefix: str, attend: Callable[..., Array]) -> dict[str, np.ndarray]:
        names = [name for name in ("query", "key", "bias") if name in self.inputs]
        mask = self.build_mask() if self.problem.case.has_mask else None

        def output_of(inputs: dict[str, Array], weights: Params) -> Array:
            return attend(weights, inputs["query"], inputs.get("key"), mask=mask, bias=inputs.get("bias"))

        @jax.jit
        def pull_back(inputs: dict[str, Array], weights: Params, cotangent: Array) -> tuple[dict[str, Array], Params]:
            return jax.vjp(output_of, inputs, weights)[1](cotangent)

        grads, params = pull_back({name: self.inputs[name] for name in names}, self.weights, self.inputs["cotangent"])
        of_weights = from_params(params, self.spec)
        return {f"{prefix}grad.{name}": grad for name, grad in {**_to_numpy(grads), **of_weights}.items()}


def _to_numpy(arrays: Mapping[str, Array | None]) -> dict[str, np.ndarray]:
    return {name: to_numpy(array) for name, array in arrays.items() if array is not None}


# ---- Surroundings ----------------------------------------------------------------------------------------------------


@contextmanager
def lock(dtype: str) -> Iterator[dict[str, Any]]:
    """Hold still what changes JAX's numbers, tell what is set, and put everything back afterwards."""
    with jax.default_matmul_precision("highest"), _enable_x64(dtype == "float64"):
        yield {"matmul_precision": "highest", "x64": dtype == "float64", "platform": jax.default_backend()}


def _enable_x64(enabled: bool) -> AbstractContextManager[Any]:
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    from jax.experimental import enable_x64  # pyright: ignore[reportAttributeAccessIssue]  (before JAX 0.8)

    return enable_x64(enabled)


def environment() -> dict[str, Any]:
    """Versions and devices."""
    devices = [device.device_kind for device in jax.devices()]
    return {"jax": jax.__version__, "flax": flax.__version__, "device": jax.default_backend(), "devices": devices}
