"""JAX backend: loading of canonical weights into `mha_jax` modules, and running cases."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

import mha_jax
import mha_jax.plain
from mha_jax.kernels.fused import FusedAttention
from mha_spec import AttentionSpec, InputTypeError
from parity.measure.backends.port import (
    Shapes,
    kind_of,
    kind_of_tutorial,
    never_skipped,
    nothing_replayed,
)
from parity.measure.core.problem import Problem
from parity.measure.core.weights import (
    Weights,
    check_held,
    check_weights,
    pack_qkv,
    unpack_qkv,
    weight_shapes,
)
from parity.measure.files.tensor_file import flatten

Params = dict[str, Any]  # nested dicts of arrays

SMALL_BLOCKS = FusedAttention(few_scores=0, most_scores=0, queries=8, keys=8, last_keys=4)
"""Fused kernel with blocks so small that most cases have several; with default sizes they use the
plain path.
"""


def from_numpy(x: np.ndarray) -> Array:
    """Return a JAX array of the same values and dtype (64-bit dtypes only with x64 enabled)."""
    return jax.device_put(x, may_alias=False)  # jnp.asarray compiles a program per shape


def to_numpy(x: Array) -> np.ndarray:
    """Return a NumPy array of the same values and dtype."""
    return np.asarray(x)


# ---- Weights -------------------------------------------------------------------------------------


def load_into(module: Any, weights: Mapping[str, np.ndarray]) -> Any:
    """Fill a module of `mha_jax` from canonical weights, bit for bit; unchanged on errors."""
    spec = spec_of(module)
    weights = check_weights(weights, spec)
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    _check_names(params, spec)
    # The dtype before JAX can narrow it; the weights were checked to have one.
    dtype = next(iter(weights.values())).dtype
    first_projection = getattr(module, next(iter(spec.projections)))
    module_dtype = first_projection.kernel.dtype
    if dtype != module_dtype:
        raise InputTypeError(
            "weights", "have the dtype of the module", f"{dtype} and {module_dtype}"
        )
    nnx.update(module, jax.tree.map(_with_sharding_of, to_params(weights, spec), params))
    return module


def _with_sharding_of(x: Array, param: Any) -> Array:
    """Return x with the sharding of a parameter, if that is on a mesh."""
    sharding = getattr(param, "sharding", None)
    # Parameters under a transformation have an abstract mesh, which has no devices.
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return jax.device_put(x, sharding)
    return x


def spec_of(module: Any) -> AttentionSpec:
    """Return the specification of a module of `mha_jax`."""
    return module.spec


def weights_of(module: Any) -> Weights:
    """Return the canonical weights of a module of `mha_jax`, bit for bit."""
    spec, params = spec_of(module), nnx.to_pure_dict(nnx.state(module, nnx.Param))
    _check_names(params, spec)
    return from_params(params, spec)


def _check_names(params: Mapping[str, Any], spec: AttentionSpec) -> None:
    """Reject parameters that do not fit a layer with this specification."""
    check_held([re.sub(r"kernel$", "weight", name) for name in flatten(params)], spec)


def to_params(weights: Mapping[str, np.ndarray], spec: AttentionSpec) -> Params:
    """Return canonical weights as the parameter tree of a layer with this specification."""
    if spec.fused_qkv:
        weights = pack_qkv(weights)
    params: Params = {}
    for name, weight in weights.items():
        projection, _, leaf = name.partition(".")
        if not leaf:  # a parameter of the layer itself, such as sinks
            params[name] = from_numpy(weight)
            continue
        if leaf == "weight" and projection.endswith("_proj"):  # norms keep `weight`
            leaf, weight = "kernel", weight.T  # (out, in) to (in, out)
        params.setdefault(projection, {})[leaf] = from_numpy(weight)
    return params


def from_params(params: Mapping[str, Any], spec: AttentionSpec) -> Weights:
    """Return canonical weights from the parameter tree of a layer with this specification."""
    weights: Weights = {}
    for name, array in flatten(params).items():
        weight = to_numpy(array)
        if name.endswith(".kernel"):
            # Kernels are (input width, output width), canonical weights the transpose.
            name, weight = name.removesuffix("kernel") + "weight", weight.T
        weights[name] = np.array(weight, order="C")
    if spec.fused_qkv:
        return unpack_qkv(weights, spec)
    return {name: weights[name] for name in weight_shapes(spec)}


# ---- Cases ---------------------------------------------------------------------------------------


SIBLING = mha_jax
SHAPES = Shapes
GRADIENT_PATHS = ("", "fused", "blocks")
argument = whole_argument = from_numpy
why_skipped, replayed = never_skipped, nothing_replayed


QUICKLY: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Compiler options for small layers on a CPU: compilation is five times faster, and sums run in
order.
"""

LONGEST_AXIS = 1024
"""Longest axis of a small layer. Larger ones run longer than they compile, and sums in order would
round more.
"""


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the compiled function: compilation takes longer than the computation."""
    return compiled(function, *arguments)(*arguments)


def compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function compiled for such arguments."""
    # If XLA's flags are set, even to nothing, they apply to everything.
    quickly = (
        _longest_axis(arguments) <= LONGEST_AXIS
        and jax.default_backend() == "cpu"
        and "XLA_FLAGS" not in os.environ
    )
    return _compiled(function, quickly, _replaceable())


def _longest_axis(arguments: tuple[Any, ...]) -> int:
    sizes = [0]
    for leaf in jax.tree.leaves(arguments):
        sizes += np.shape(leaf)
    return max(sizes)


# Few, because each holds compiled programs; 16 is a choice.
@lru_cache(maxsize=16)
def _compiled(
    function: Callable[..., Any], quickly: bool, _: tuple[Any, ...]
) -> Callable[..., Any]:
    """Return a function compiled for all layers, until part of the implementation is replaced, such
    as by a bug.
    """
    return jax.jit(partial(function, SIBLING), compiler_options=QUICKLY if quickly else None)


def _replaceable() -> tuple[Any, ...]:
    """Return the current functions, classes and methods of the implementation, on which compiled
    functions depend.
    """
    parts: list[Any] = []
    for module in (SIBLING, *vars(SIBLING).values()):
        if isinstance(module, ModuleType):
            parts += [x for x in vars(module).values() if callable(x)]
    for part in tuple(parts):
        if isinstance(part, type) and part.__module__.split(".")[0] == SIBLING.__name__:
            parts += [x for x in vars(part).values() if callable(x)]
    return tuple(parts)


class JaxModule:
    """Module with the weights of a problem, in evaluation mode: the default one, and one with small
    blocks.
    """

    call = staticmethod(call)  # a method, which a module on a mesh replaces

    def __init__(self, problem: Problem) -> None:
        kind = kind_of(mha_jax, problem.case)
        self.weights = to_params(problem.weights, problem.spec)
        unfilled = nnx.merge(*_unfilled(kind, problem.spec, problem.dtype))
        self.module = load_into(unfilled, problem.weights)
        self.in_blocks = nnx.clone(self.module)
        self.in_blocks.kernel = SMALL_BLOCKS

    def contain(self, contained: Callable[[Any], Any]) -> None:
        for module in (self.module, self.in_blocks):
            module.kernel = contained(module.kernel)

    def outputs(self, query: Array, **inputs: Array | None) -> tuple[Array, dict[str, Array]]:
        return self.call(_all_paths, self.module, self.in_blocks, query, inputs)

    def step(
        self, x: Array, cache: Any, new_lengths: Array | None, positions: Array | None
    ) -> tuple[dict[str, Array], Any]:
        output, grown = self.call(call_cached, self.module, x, cache, new_lengths, positions)
        in_blocks, _ = self.call(call_cached, self.in_blocks, x, cache, new_lengths, positions)
        return {"module": output, "blocks": in_blocks}, grown


# Not a tight bound: shapes only, without weights or compiled code.
@lru_cache(maxsize=64)
def _unfilled(kind: Callable[..., Any], spec: AttentionSpec, dtype: str) -> tuple[Any, Any]:
    """Return a split module in evaluation mode without weights, to avoid their initialization.

    Modules merged from these same parts share what is compiled; new modules do not, because
    each has its own initializers.
    """
    module = nnx.eval_shape(lambda: kind(spec, param_dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
    module.eval()
    return nnx.split(module)


def _all_paths(
    _: Any, module: Any, in_blocks: Any, query: Array, inputs: dict[str, Array | None]
) -> tuple[Array, dict[str, Array]]:
    output, attn_weights = module(query, **inputs, need_weights=True)
    fused, _ = module(query, **inputs)
    blocks, _ = in_blocks(query, **inputs)
    return attn_weights, {"module": output, "fused": fused, "blocks": blocks}


filled = JaxModule


def tutorial(problem: Problem) -> Any:
    """Return the tutorial's module with the weights of a problem, in evaluation mode."""
    spec, kind = problem.spec, kind_of_tutorial(mha_jax, problem.case)
    module = nnx.merge(*_unfilled_tutorial(kind, spec.d_model, spec.num_heads, spec.out_bias))
    nnx.update(module, to_params(problem.weights, spec.replace(fused_qkv=False)))
    return module


@lru_cache(maxsize=64)  # as above
def _unfilled_tutorial(
    kind: Callable[..., Any], d_model: int, num_heads: int, bias: bool
) -> tuple[Any, Any]:
    """Return a split module of the tutorial in evaluation mode without weights, see `_unfilled`."""
    module = nnx.eval_shape(lambda: kind(d_model, num_heads, bias=bias, rngs=nnx.Rngs(0)))
    # The module's own has random keys, which would have to be computed.
    module.dropout = nnx.Dropout(0.0)
    module.eval()
    return nnx.split(module)


def call_cached(
    _: Any, module: Any, x: Array, cache: Any, new_lengths: Array | None, positions: Array | None
) -> tuple[Array, Any]:
    """Call a cached module: return the output and the cache."""
    return module(x, cache, new_lengths=new_lengths, positions=positions)


def pull_back(
    path: str,
    filled: JaxModule,
    spec: AttentionSpec,
    inputs: dict[str, Array],
    hidden: dict[str, Any],
) -> tuple[dict[str, np.ndarray], Weights]:
    """Return gradients of the inputs and canonical weights on a path."""
    module = filled.in_blocks if path == "blocks" else filled.module
    hidden = hidden | {"kernel": module.kernel}
    of_inputs, of_weights = filled.call(_GRADIENTS[path], spec, inputs, filled.weights, hidden)
    return {name: to_numpy(grad) for name, grad in of_inputs.items()}, from_params(of_weights, spec)


def _gradients(
    path: str,
    sibling: Any,
    spec: AttentionSpec,
    inputs: dict[str, Array],
    weights: Params,
    hidden: dict[str, Any],
) -> tuple[dict[str, Array], Params]:
    def output_of(inputs: dict[str, Array], weights: Params) -> Array:
        output, _ = sibling.multi_head_attention(
            inputs["query"],
            weights,
            spec,
            inputs.get("key", inputs.get("k")),
            inputs.get("v"),
            mask=hidden["mask"],
            key_padding_lengths=hidden.get("key_padding_lengths"),
            bias=inputs.get("bias"),
            need_weights=not path,
            positions=hidden["positions"],
            kernel=hidden["kernel"],
        )
        return output

    _, pull_back_cotangent = jax.vjp(output_of, inputs, weights)
    return pull_back_cotangent(hidden["cotangent"])


_GRADIENTS = {path: partial(_gradients, path) for path in GRADIENT_PATHS}


# ---- Environment ---------------------------------------------------------------------------------


MOST_MAPS = 20_000
"""Memory mappings of a process, a third of the Linux default limit, vm.max_map_count."""


def free_programs() -> None:
    """Free all compiled programs if the process has many memory mappings.

    Each program takes several. A run of all cases in four dtypes would exceed the limit, and then
    LLVM ends the process.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") <= MOST_MAPS:
        return
    _compiled.cache_clear()
    jax.clear_caches()


@contextmanager
def lock(dtype: str) -> Iterator[dict[str, Any]]:
    """Fix and report the settings that affect JAX's results, and restore them afterwards."""
    free_programs()
    # By default, accelerators multiply float32 in fewer bits.
    with jax.default_matmul_precision("highest"), _enable_x64(dtype == "float64"):
        yield {
            "matmul_precision": "highest",
            "x64": dtype == "float64",
            "platform": jax.default_backend(),
        }


def _enable_x64(enabled: bool) -> AbstractContextManager[Any]:
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    # Before JAX 0.8:
    from jax.experimental import enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    return enable_x64(enabled)


def environment() -> dict[str, Any]:
    """Return versions and devices."""
    devices = [device.device_kind for device in jax.devices()]
    return {
        "jax": jax.__version__,
        "flax": flax.__version__,
        "device": jax.default_backend(),
        "devices": devices,
    }
