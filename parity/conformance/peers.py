"""The attention that the frameworks come with, and our own, as subjects of `conformance`: those that are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, Refusal
from parity.backends import BACKENDS, load_backend
from parity.conformance.calls import fresh_copies
from parity.conformance.subjects import HEAD_DIM, NUM_HEADS, Call, Path, Subject
from parity.core.weights import Weights, dtype_named, random_weights
from parity.foreign import load_adapter
from parity.foreign.adapter import Adapter
from parity.foreign.keras import import_keras

SPEC = AttentionSpec(NUM_HEADS * HEAD_DIM, NUM_HEADS)
"""The layer that every peer is, with the same weights."""

CORE = frozenset({"mask", "is_causal", "key", "value"})


def _filled(path: Path, spec: AttentionSpec | None, weights: Weights | None) -> tuple[AttentionSpec, Weights]:
    spec = SPEC if spec is None else spec
    if weights is None:
        weights = random_weights(spec, 0)
        weights["out_proj.bias"][:] = 0.0  # so that zeros come out as zeros
    return spec, {name: weight.astype(dtype_named(path.dtype)) for name, weight in weights.items()}


# ---- torch -----------------------------------------------------------------------------------------------------------


def _torch_sdpa() -> Subject:
    from torch.nn.functional import scaled_dot_product_attention

    def make(path: Path) -> Call:
        dropout = path.dropout if path.train else 0.0

        def call(query: Any, key: Any, value: Any, *, mask: Any = None, is_causal: bool = False) -> tuple[Any, Any]:
            groups = query.shape[1] != key.shape[1]
            context = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=groups
            )
            return context, None

        return call

    takes = CORE | {"dropout"}
    return Subject("F.scaled_dot_product_attention", "torch", "BNTH", make, takes=takes, mask_true="shows")


# ---- JAX -------------------------------------------------------------------------------------------------------------


def _jax_nn() -> Subject:
    import jax

    def make(path: Path) -> Call:
        def call(
            query: Any, key: Any, value: Any, *, mask: Any = None, is_causal: bool = False, padding: Any = None
        ) -> tuple[Any, Any]:
            context = jax.nn.dot_product_attention(
                query, key, value, mask=mask, is_causal=is_causal, key_value_seq_lengths=padding
            )
            return context, None

        return call

    return Subject(
        "jax.nn.dot_product_attention", "jax", "BTNH", make, takes=CORE, padding="lengths", mask_true="shows"
    )


# ---- Layers of other libraries ---------------------------------------------------------------------------------------


def _layer(adapter: Adapter, framework: str, takes: frozenset[str], **known: Any) -> Subject:
    """A layer of another library, made, filled and called by its adapter."""

    def make(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Call:
        spec, weights = _filled(path, spec, weights)
        module = adapter.make(replace(spec, dropout=path.dropout), path.dtype)
        return partial(adapter.call, adapter.load_into(module, weights), train=path.train)

    return Subject(
        adapter.name,
        framework,
        "BTE",
        make,
        takes=frozenset({"mask", "key", "value", "dropout"}) | takes,
        has_settable_weights=True,
        mask_true=adapter.mask_true,
        **known,
    )


def _torch_mha() -> Subject:
    return _layer(
        load_adapter("torch.nn.MultiheadAttention"),
        "torch",
        frozenset({"is_causal", "need_weights", "train"}),
        padding="mask",
        documented={"causal and mask": "the flag is only a hint, as documented"},
    )


def _nnx() -> Subject:
    import jax.numpy as jnp

    adapter = load_adapter("flax.nnx.MultiHeadAttention")

    def decode(x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
        spec, weights = _filled(Path(), None, None)
        module = adapter.load_into(adapter.make(spec), weights)
        module.init_cache((x.shape[0], capacity, x.shape[2]))
        tokens = [jnp.asarray(x[:, t : t + 1].astype(np.float32)) for t in range(x.shape[1])]
        return np.concatenate([module(token, decode=True, is_causal=is_causal) for token in tokens], axis=1)

    return _layer(adapter, "jax", frozenset({"is_causal", "need_weights"}), has_groups=True, decode=decode)


def _linen() -> Subject:
    import jax
    import jax.numpy as jnp

    adapter = load_adapter("flax.linen.MultiHeadDotProductAttention")

    def decode(x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
        spec, weights = _filled(Path(), None, None)
        module, variables = adapter.load_into(adapter.make(spec, decode=True), weights).unbind()
        slots = jnp.zeros((x.shape[0], capacity, x.shape[2]))
        held = module.init(jax.random.key(0), slots)["cache"]
        outputs = []
        for t in range(x.shape[1]):
            token = jnp.asarray(x[:, t : t + 1].astype(np.float32))
            output, changed = module.apply({**variables, "cache": held}, token, mutable=["cache"])
            held = changed["cache"]
            outputs.append(output)
        return np.concatenate(outputs, axis=1)

    return _layer(adapter, "jax", frozenset({"need_weights"}), decode=decode)


def _equinox() -> Subject:
    return _layer(load_adapter("equinox.nn.MultiheadAttention"), "jax", frozenset())


def _keras(name: str) -> Subject:
    framework = import_keras().backend.backend()
    if framework not in ("torch", "jax"):
        raise ImportError(f"Keras runs on {framework} here, which is neither torch nor JAX (see KERAS_BACKEND)")
    takes = frozenset({"is_causal", "need_weights", "train"})
    return _layer(load_adapter(name), framework, takes, has_groups=name == "keras.layers.GroupQueryAttention")


# ---- Our own ---------------------------------------------------------------------------------------------------------


PROMISES = frozenset({"NaN hidden"})


def _our_module(framework: str, kind: str) -> Callable[..., Any]:
    """What makes a module of ours for a path: one to call, with random numbers of its own."""
    backend = load_backend(framework)

    def made(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Any:
        spec, weights = _filled(path, spec, weights)
        spec = replace(spec, dropout=path.dropout)
        if framework == "torch":
            import torch

            module = getattr(backend.SIBLING, kind)(spec, dtype=getattr(torch, path.dtype)).train(path.train)
        else:
            import jax.numpy as jnp
            from flax import nnx

            module = getattr(backend.SIBLING, kind)(spec, param_dtype=jnp.dtype(path.dtype), rngs=nnx.Rngs(0))
            module.train() if path.train else module.eval()
        module = backend.load_into(module, weights)
        return fresh_copies(module) if framework == "jax" else lambda: module

    return made


def _named(padding: Any, **options: Any) -> dict[str, Any]:
    """Options by the names of our parameters; what was not asked for is left out."""
    return options if padding is None else {**options, "key_padding_lengths": padding}


def _our_subject(framework: str, kind: str, make: Callable[..., Call], takes: set[str], **known: Any) -> Subject:
    return Subject(
        f"{BACKENDS[framework].sibling}.{kind}",
        framework,
        make=make,
        takes=frozenset({"mask", "dropout"} | takes),
        padding="lengths",
        mask_true="hides",
        promises=PROMISES,
        **{"axes": "BTE", "has_settable_weights": True, "has_groups": True, "causal": "top-left"} | known,
    )


def _our_layer(framework: str) -> Subject:
    made = _our_module(framework, "MultiHeadAttention")

    def make(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Call:
        fresh = made(path, spec, weights)

        def call(query: Any, key: Any, value: Any, *, padding: Any = None, **options: Any) -> tuple[Any, Any]:
            return fresh()(query, key, value, **_named(padding, **options))

        return call

    train = {"train"} if framework == "torch" else set()
    return _our_subject(framework, "MultiHeadAttention", make, {"is_causal", "key", "value", "need_weights"} | train)


def _our_self_attention(framework: str) -> Subject:
    made = _our_module(framework, "MultiHeadSelfAttention")

    def make(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Call:
        fresh = made(path, spec, weights)

        def call(x: Any, key: Any, value: Any, *, padding: Any = None, **options: Any) -> tuple[Any, Any]:
            return fresh()(x, **_named(padding, **options)), None

        return call

    train = {"train"} if framework == "torch" else set()
    return _our_subject(framework, "MultiHeadSelfAttention", make, {"is_causal"} | train)


def _our_cached(framework: str) -> Subject:
    """The layer with a cache: called once with all tokens, it is causal by itself; its padding is `new_lengths`."""
    backend = load_backend(framework)
    made = _our_module(framework, "MultiHeadAttentionWithCache")

    def make(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Call:
        fresh = made(path, spec, weights)

        def call(x: Any, key: Any, value: Any, *, padding: Any = None, **options: Any) -> tuple[Any, Any]:
            module = fresh()
            output, _ = module(x, module.init_cache(*x.shape[:2]), new_lengths=padding, **options)
            return output, None

        return call

    def decode(x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
        module = made(Path())()
        held = module.init_cache(x.shape[0], capacity)
        outputs = []
        for t in range(x.shape[1]):
            token = backend.from_numpy(np.ascontiguousarray(x[:, t : t + 1].astype(np.float32)))
            output, held = module(token, held)
            outputs.append(backend.to_numpy(output))
        return np.concatenate(outputs, axis=1)

    train = {"train"} if framework == "torch" else set()
    return _our_subject(framework, "MultiHeadAttentionWithCache", make, train, decode=decode, causal=None)


def _our_core(framework: str) -> Subject:
    fused = importlib.import_module(BACKENDS[framework].sibling).fused

    def make(path: Path) -> Call:
        given: dict[str, Any] = {"dropout": path.dropout if path.train else 0.0}
        if framework == "jax" and path.drops:
            import jax

            given["dropout_rng"] = jax.random.key(0)

        def call(query: Any, key: Any, value: Any, *, padding: Any = None, **options: Any) -> tuple[Any, Any]:
            return fused.scaled_dot_product_attention(query, key, value, **given, **_named(padding, **options))

        return call

    takes = {"is_causal", "key", "value", "need_weights"}
    of_heads = {"axes": "BNTH", "has_settable_weights": False, "has_groups": False}
    return _our_subject(framework, "fused", make, takes, **of_heads)


# ---- The list --------------------------------------------------------------------------------------------------------

PEERS: Mapping[str, tuple[str, Callable[[], Subject]]] = {
    "torch.nn.MultiheadAttention": ("torch", _torch_mha),
    "F.scaled_dot_product_attention": ("torch", _torch_sdpa),
    "jax.nn.dot_product_attention": ("jax", _jax_nn),
    "flax.nnx.MultiHeadAttention": ("flax", _nnx),
    "flax.linen.MultiHeadDotProductAttention": ("flax", _linen),
    "keras.layers.MultiHeadAttention": ("keras", lambda: _keras("keras.layers.MultiHeadAttention")),
    "keras.layers.GroupQueryAttention": ("keras", lambda: _keras("keras.layers.GroupQueryAttention")),
    "equinox.nn.MultiheadAttention": ("equinox", _equinox),
    "mha_torch.MultiHeadAttention": ("torch", lambda: _our_layer("torch")),
    "mha_torch.MultiHeadSelfAttention": ("torch", lambda: _our_self_attention("torch")),
    "mha_torch.MultiHeadAttentionWithCache": ("torch", lambda: _our_cached("torch")),
    "mha_torch.fused": ("torch", lambda: _our_core("torch")),
    "mha_jax.MultiHeadAttention": ("flax", lambda: _our_layer("jax")),
    "mha_jax.MultiHeadSelfAttention": ("flax", lambda: _our_self_attention("jax")),
    "mha_jax.MultiHeadAttentionWithCache": ("flax", lambda: _our_cached("jax")),
    "mha_jax.fused": ("flax", lambda: _our_core("jax")),
}
"""What each peer needs to be installed, and how its subject is made."""


def peer(name: str) -> Subject:
    """The subject of that name, with the version of its library.

    Raises:
        ValueError: if there is none of that name.
        ImportError: if it is not installed.
    """
    if name not in PEERS:
        raise Refusal("a peer", f"be one of {', '.join(PEERS)}", repr(name))
    package, make = PEERS[name]
    if find_spec(package) is None:
        raise ImportError(f"{package} is not installed")
    subject = make()
    library = "mha-parity" if name.startswith("mha_") else package
    version = f"{library} {metadata.version(library)}"
    if package == "keras":
        version += f" on {subject.framework} {metadata.version(subject.framework)}"
    # A layer of Keras keeps the state of its random numbers; others draw from a key or from torch's seed at each call.
    return replace(subject, version=version, make=_kept(subject.make, keeps_state=package == "keras"))


def _kept(make: Callable[..., Call], keeps_state: bool) -> Callable[..., Call]:
    """The same, but a layer is made once for a dtype and mode, unless it is given weights or draws from a state."""
    held: dict[Path, Call] = {}

    def kept(path: Path, **given: Any) -> Call:
        if given or (path.drops and keeps_state):
            return make(path, **given)
        mode = replace(path, need_weights=False, grad=False)
        if mode not in held:
            held[mode] = make(mode)
        return held[mode]

    return kept
