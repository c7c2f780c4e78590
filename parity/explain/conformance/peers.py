"""Attention of other libraries, and our own, as subjects of `conformance`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from mha_spec.rules import as_one_of
from parity.explain.conformance.calls import fresh_copies
from parity.explain.conformance.discover import subject_of
from parity.explain.conformance.subjects import HEAD_DIM, NUM_HEADS, Call, Path, Subject
from parity.measure.backends import BACKENDS, load_backend
from parity.measure.core.arrays import to_numpy
from parity.measure.core.weights import Weights, dtype_named, random_weights
from parity.port.foreign import load_adapter
from parity.port.foreign.adapter import Adapter
from parity.port.foreign.keras import import_keras

SPEC = AttentionSpec(NUM_HEADS * HEAD_DIM, NUM_HEADS)
"""The layer that every library computes, with the same weights."""


def _filled(
    path: Path, spec: AttentionSpec | None, weights: Weights | None
) -> tuple[AttentionSpec, Weights]:
    spec = SPEC if spec is None else spec
    if weights is None:
        weights = random_weights(spec, 0)
        weights["out_proj.bias"][:] = 0.0  # so that zeros stay zeros
    return spec, {name: weight.astype(dtype_named(path.dtype)) for name, weight in weights.items()}


def _decoded(step: Callable[[np.ndarray], Any], x: np.ndarray) -> np.ndarray:
    """Return the outputs of a layer that is called one token at a time."""
    tokens = (np.ascontiguousarray(x[:, [t]].astype(np.float32)) for t in range(x.shape[1]))
    return np.concatenate([to_numpy(step(token)) for token in tokens], axis=1)


# ---- Functions -----------------------------------------------------------------------------------


def _torch_sdpa() -> Subject:
    from torch.nn.functional import scaled_dot_product_attention

    def attention(
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> Any:
        groups = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, enable_gqa=groups
        )

    name = "F.scaled_dot_product_attention"
    return subject_of(attention, name, framework="torch", axes="BNTH", mask_true="shows")


def _jax_nn() -> Subject:
    from jax.nn import dot_product_attention

    name = "jax.nn.dot_product_attention"
    return subject_of(dot_product_attention, name, framework="jax", axes="BTNH", mask_true="shows")


# ---- Layers of other libraries -------------------------------------------------------------------


def _layer(
    adapter: Adapter, framework: str, takes: frozenset[str] = frozenset(), **known: Any
) -> Subject:
    """Return a layer of another library, made, filled and called by its adapter, which shows what
    it supports.
    """
    options = inspect.signature(adapter.call).parameters.keys() & {
        "mask",
        "is_causal",
        "need_weights",
    }

    def make(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Call:
        spec, weights = _filled(path, spec, weights)
        module = adapter.make(replace(spec, dropout=path.dropout), path.dtype)
        return partial(adapter.call, adapter.load_into(module, weights), train=path.train)

    return Subject(
        adapter.name,
        framework,
        "BTE",
        make,
        takes=takes | options | {"key", "value", "dropout"},
        has_settable_weights=True,
        mask_true=adapter.mask_true,
        **known,
    )


def _torch_mha() -> Subject:
    return _layer(
        load_adapter("torch.nn.MultiheadAttention"),
        "torch",
        frozenset({"train"}),
        padding="mask",
        documented={"causal and mask": "the flag is only a hint, as documented"},
    )


def _nnx() -> Subject:
    adapter = load_adapter("flax.nnx.MultiHeadAttention")

    def decode(x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
        spec, weights = _filled(Path(), None, None)
        module = adapter.load_into(adapter.make(spec), weights)
        module.init_cache((x.shape[0], capacity, x.shape[2]))
        return _decoded(lambda token: module(token, decode=True, is_causal=is_causal), x)

    return _layer(adapter, "jax", has_groups=True, decode=decode)


def _linen() -> Subject:
    import jax
    import jax.numpy as jnp

    adapter = load_adapter("flax.linen.MultiHeadDotProductAttention")

    def decode(x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
        spec, weights = _filled(Path(), None, None)
        module, variables = adapter.load_into(adapter.make(spec, decode=True), weights).unbind()
        slots = jnp.zeros((x.shape[0], capacity, x.shape[2]))
        held = {"cache": module.init(jax.random.key(0), slots)["cache"]}

        def step(token: np.ndarray) -> Any:
            output, changed = module.apply({**variables, **held}, token, mutable=["cache"])
            held.update(changed)
            return output

        return _decoded(step, x)

    return _layer(adapter, "jax", decode=decode)


def _keras(name: str) -> Subject:
    framework = import_keras().backend.backend()
    if framework not in ("torch", "jax"):
        raise ImportError(
            f"Keras runs on {framework} here, which is neither torch nor JAX (see KERAS_BACKEND)"
        )
    return _layer(
        load_adapter(name),
        framework,
        frozenset({"train"}),
        has_groups=name == "keras.layers.GroupQueryAttention",
    )


# ---- Our own -------------------------------------------------------------------------------------


AS_IN_THE_FRAMEWORK = {"NaN seen": "as in the framework, as documented"}
"""Our documentation: a NaN outside of padding does what the kernel of the framework does with
it.
"""

CONTAINED = "contained"
"""Name of our layer with a kernel that contains NaN."""

OUR_LAYERS = {
    "MultiHeadAttention": {"is_causal", "key", "value", "need_weights"},
    "MultiHeadSelfAttention": {"is_causal"},
    "MultiHeadAttentionWithCache": set(),
}
"""Each kind of layer, with the arguments that it supports in addition to masks and dropout."""


def _our_layer(framework: str, kind: str, *, is_contained: bool = False) -> Subject:
    """Return one of our layers; one with a cache is always causal, and `new_lengths` is its
    padding.
    """
    backend, is_cached = load_backend(framework), kind == "MultiHeadAttentionWithCache"

    def made(
        path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None
    ) -> Callable[[], Any]:
        """Return a factory of the layer for a path; each call starts from the same random state."""
        spec, weights = _filled(path, spec, weights)
        spec = replace(spec, dropout=path.dropout)
        if framework == "torch":
            import torch

            options: dict[str, Any] = {"dtype": getattr(torch, path.dtype)}
        else:
            from flax import nnx

            options = {"param_dtype": dtype_named(path.dtype), "rngs": nnx.Rngs(0)}
        module = getattr(backend.SIBLING, kind)(spec, **options)
        if is_contained:
            module.kernel = backend.SIBLING.contained(module.kernel)
        module.train() if path.train else module.eval()
        module = backend.load_into(module, weights)
        return fresh_copies(module) if framework == "jax" else lambda: module

    def make(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Call:
        fresh = made(path, spec, weights)

        def call(
            query: Any, key: Any, value: Any, *, padding: Any = None, **options: Any
        ) -> tuple[Any, Any]:
            module = fresh()
            if is_cached:
                output, _ = module(
                    query, module.init_cache(*query.shape[:2]), new_lengths=padding, **options
                )
                return output, None
            if padding is not None:
                options["key_padding_lengths"] = padding
            if kind == "MultiHeadAttention":
                return module(query, key, value, **options)
            return module(query, **options), None

        return call

    def decode(x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
        module = made(Path())()
        held = module.init_cache(x.shape[0], capacity)

        def step(token: np.ndarray) -> Any:
            nonlocal held
            output, held = module(backend.from_numpy(token), held)
            return output

        return _decoded(step, x)

    train = {"train"} if framework == "torch" else set()
    return Subject(
        f"{BACKENDS[framework].sibling}.{CONTAINED if is_contained else kind}",
        framework,
        "BTE",
        make,
        takes=frozenset({"mask", "dropout"} | OUR_LAYERS[kind] | train),
        padding="lengths",
        has_settable_weights=True,
        has_groups=True,
        decode=decode if is_cached else None,
        mask_true="hides",
        causal=None if is_cached else "top-left",
        documented={} if is_contained else AS_IN_THE_FRAMEWORK,
        promises=frozenset({"NaN hidden"}) if is_contained else frozenset(),
    )


def _our_function(framework: str) -> Subject:
    package = BACKENDS[framework].sibling
    sibling = importlib.import_module(package)
    function = partial(sibling.scaled_dot_product_attention, kernel=sibling.fused.attend)
    found = subject_of(
        function,
        f"{package}.fused",
        framework=framework,
        axes="BNTH",
        mask_true="hides",
        causal="top-left",
    )
    return replace(found, documented=AS_IN_THE_FRAMEWORK)


def _ours(framework: str, package: str) -> dict[str, tuple[str, Callable[[], Subject]]]:
    """Return entries of `PEERS` for our layers and our function in a framework, which require a
    package.
    """
    makers = {kind: partial(_our_layer, framework, kind) for kind in OUR_LAYERS}
    makers["fused"] = partial(_our_function, framework)
    makers[CONTAINED] = partial(_our_layer, framework, "MultiHeadSelfAttention", is_contained=True)
    return {
        f"{BACKENDS[framework].sibling}.{kind}": (package, make) for kind, make in makers.items()
    }


# ---- The list ------------------------------------------------------------------------------------

PEERS: dict[str, tuple[str, Callable[[], Subject]]] = {
    "torch.nn.MultiheadAttention": ("torch", _torch_mha),
    "F.scaled_dot_product_attention": ("torch", _torch_sdpa),
    "jax.nn.dot_product_attention": ("jax", _jax_nn),
    "flax.nnx.MultiHeadAttention": ("flax", _nnx),
    "flax.linen.MultiHeadDotProductAttention": ("flax", _linen),
    "keras.layers.MultiHeadAttention": ("keras", lambda: _keras("keras.layers.MultiHeadAttention")),
    "keras.layers.GroupQueryAttention": (
        "keras",
        lambda: _keras("keras.layers.GroupQueryAttention"),
    ),
    "equinox.nn.MultiheadAttention": (
        "equinox",
        lambda: _layer(load_adapter("equinox.nn.MultiheadAttention"), "jax"),
    ),
    **_ours("torch", "torch"),
    **_ours("jax", "flax"),
}
"""The package that each library requires, and a function that returns its subject."""


def peer(name: str) -> Subject:
    """Return the subject with that name, and the version of its library.

    Raises:
        ValueError: if the name is unknown.
        ImportError: if its library is not installed.
    """
    package, make = PEERS[as_one_of("a peer", name, [*PEERS])]
    if find_spec(package) is None:
        raise ImportError(f"{package} is not installed")
    subject = make()
    library = "mha-parity" if name.startswith("mha_") else package
    version = f"{library} {metadata.version(library)}"
    if package == "keras":
        version += f" on {subject.framework} {metadata.version(subject.framework)}"
    # Keras layers keep a random state; others draw from a key or from torch's seed at each call.
    return replace(
        subject, version=version, make=_cached(subject.make, keeps_state=package == "keras")
    )


def _cached(make: Callable[..., Call], keeps_state: bool) -> Callable[..., Call]:
    """Return a factory that caches the layer for each dtype and mode, unless it gets weights or
    draws from a state.
    """
    held: dict[Path, Call] = {}

    def kept(path: Path, **given: Any) -> Call:
        if given or (path.drops and keeps_state):
            return make(path, **given)
        mode = replace(path, need_weights=False, grad=False)
        if mode not in held:
            held[mode] = make(mode)
        return held[mode]

    return kept
