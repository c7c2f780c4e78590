"""Attention of other libraries, and our own, as subjects of `conformance`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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


def _spec_and_weights(
    path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None
) -> tuple[AttentionSpec, Weights]:
    """Return the spec with the path's dropout and the weights in its dtype; default: as in
    `SPEC`.
    """
    if spec is None:
        spec = SPEC
    if weights is None:
        weights = random_weights(spec, 0)
        weights["out_proj.bias"][:] = 0.0  # so that zeros stay zeros
    dtype = dtype_named(path.dtype)
    weights = {name: weight.astype(dtype) for name, weight in weights.items()}
    return replace(spec, dropout=path.dropout), weights


def _tokens_of(x: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the tokens of a batch, (B, 1, E), one after another."""
    for t in range(x.shape[1]):
        yield np.ascontiguousarray(x[:, [t]].astype(np.float32))


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
        has_groups = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, enable_gqa=has_groups
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
    parameters = inspect.signature(adapter.call).parameters
    options = {"mask", "is_causal", "need_weights"} & parameters.keys()

    def make(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Call:
        spec, weights = _spec_and_weights(path, spec, weights)
        module = adapter.load_into(adapter.make(spec, path.dtype), weights)
        return partial(adapter.call, module, train=path.train)

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


NNX = "flax.nnx.MultiHeadAttention"


def _nnx() -> Subject:
    return _layer(load_adapter(NNX), "jax", has_groups=True, decode=_decode_with_nnx)


def _decode_with_nnx(x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
    adapter = load_adapter(NNX)
    spec, weights = _spec_and_weights(Path())
    module = adapter.load_into(adapter.make(spec), weights)
    module.init_cache((x.shape[0], capacity, x.shape[2]))
    outputs = []
    for token in _tokens_of(x):
        outputs.append(to_numpy(module(token, decode=True, is_causal=is_causal)))
    return np.concatenate(outputs, axis=1)


LINEN = "flax.linen.MultiHeadDotProductAttention"


def _linen() -> Subject:
    return _layer(load_adapter(LINEN), "jax", decode=_decode_with_linen)


def _decode_with_linen(x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
    import jax
    import jax.numpy as jnp

    adapter = load_adapter(LINEN)
    spec, weights = _spec_and_weights(Path())
    module, variables = adapter.load_into(adapter.make(spec, decode=True), weights).unbind()
    slots = jnp.zeros((x.shape[0], capacity, x.shape[2]))
    cache = module.init(jax.random.key(0), slots)["cache"]
    outputs = []
    for token in _tokens_of(x):
        output, changed = module.apply({**variables, "cache": cache}, token, mutable=["cache"])
        cache = changed["cache"]
        outputs.append(to_numpy(output))
    return np.concatenate(outputs, axis=1)


def _equinox() -> Subject:
    return _layer(load_adapter("equinox.nn.MultiheadAttention"), "jax")


def _keras_mha() -> Subject:
    return _keras("keras.layers.MultiHeadAttention", has_groups=False)


def _keras_gqa() -> Subject:
    return _keras("keras.layers.GroupQueryAttention", has_groups=True)


def _keras(name: str, has_groups: bool) -> Subject:
    framework = import_keras().backend.backend()
    if framework not in ("torch", "jax"):
        raise ImportError(
            f"Keras runs on {framework} here, which is neither torch nor JAX (see KERAS_BACKEND)"
        )
    return _layer(load_adapter(name), framework, frozenset({"train"}), has_groups=has_groups)


# ---- Our own -------------------------------------------------------------------------------------


AS_IN_THE_FRAMEWORK = {"visible NaN": "as in the framework, as documented"}
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


CACHED = "MultiHeadAttentionWithCache"
"""Name of our layer with a cache: it is always causal, and `new_lengths` is its padding."""


@dataclass(frozen=True)
class _OurLayer:
    """One of our layers in a framework.

    Attributes:
        framework: `torch` or `jax`.
        kind: name of its class, a key of `OUR_LAYERS`.
        is_contained: whether its kernel contains NaN.
    """

    framework: str
    kind: str
    is_contained: bool = False

    def subject(self) -> Subject:
        """Return the layer as a subject.

        Raises:
            ImportError: if the implementation cannot be imported.
        """
        load_backend(self.framework)
        takes = {"mask", "dropout", *OUR_LAYERS[self.kind]}
        if self.framework == "torch":
            takes.add("train")
        causal, decode = "top-left", None
        if self.kind == CACHED:
            causal, decode = None, self.decode
        name, documented, promises = self.kind, AS_IN_THE_FRAMEWORK, frozenset()
        if self.is_contained:
            name, documented, promises = CONTAINED, {}, frozenset({"hidden NaN"})
        return Subject(
            f"{BACKENDS[self.framework].sibling}.{name}",
            self.framework,
            "BTE",
            self.make,
            takes=frozenset(takes),
            padding="lengths",
            has_settable_weights=True,
            has_groups=True,
            decode=decode,
            mask_true="hides",
            causal=causal,
            documented=documented,
            promises=promises,
        )

    def make(
        self, path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None
    ) -> Call:
        """Return the call of the layer on a path; each starts from the same random state."""
        module = self._module(path, spec, weights)
        if self.framework == "jax":
            return partial(self._call_fresh, fresh_copies(module))
        return partial(self._call, module)

    def _module(
        self, path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None
    ) -> Any:
        """Return the layer with its weights, in the dtype and mode of a path."""
        backend = load_backend(self.framework)
        spec, weights = _spec_and_weights(path, spec, weights)
        options: dict[str, Any]
        if self.framework == "torch":
            import torch

            options = {"dtype": getattr(torch, path.dtype)}
        else:
            from flax import nnx

            options = {"param_dtype": dtype_named(path.dtype), "rngs": nnx.Rngs(0)}
        module = getattr(backend.SIBLING, self.kind)(spec, **options)
        if self.is_contained:
            module.kernel = backend.SIBLING.contained(module.kernel)
        if path.train:
            module.train()
        else:
            module.eval()
        return backend.load_into(module, weights)

    def _call_fresh(
        self, fresh_copy: Callable[[], Any], *inputs: Any, **options: Any
    ) -> tuple[Any, Any]:
        return self._call(fresh_copy(), *inputs, **options)

    def _call(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        *,
        padding: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Return output and attention weights, with the padding as this kind of layer expects
        it.
        """
        if self.kind == CACHED:
            cache = module.init_cache(*query.shape[:2])
            output, _ = module(query, cache, new_lengths=padding, **options)
            return output, None
        if padding is not None:
            options["key_padding_lengths"] = padding
        if self.kind == "MultiHeadAttention":
            return module(query, key, value, **options)
        return module(query, **options), None

    def decode(self, x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
        """Return the outputs of a layer with a cache, one token at a time."""
        backend = load_backend(self.framework)
        module = self._module(Path())
        cache = module.init_cache(x.shape[0], capacity)
        outputs = []
        for token in _tokens_of(x):
            output, cache = module(backend.from_numpy(token), cache)
            outputs.append(to_numpy(output))
        return np.concatenate(outputs, axis=1)


def _our_function(framework: str) -> Subject:
    package = BACKENDS[framework].sibling
    sibling = importlib.import_module(package)
    function = partial(sibling.scaled_dot_product_attention, kernel=sibling.fused.attend)
    subject = subject_of(
        function,
        f"{package}.fused",
        framework=framework,
        axes="BNTH",
        mask_true="hides",
        causal="top-left",
    )
    return replace(subject, documented=AS_IN_THE_FRAMEWORK)


def _ours(framework: str, package: str) -> dict[str, tuple[str, Callable[[], Subject]]]:
    """Return entries of `PEERS` for our layers and our function in a framework, which require a
    package.
    """
    prefix = BACKENDS[framework].sibling
    entries: dict[str, tuple[str, Callable[[], Subject]]] = {}
    for kind in OUR_LAYERS:
        entries[f"{prefix}.{kind}"] = (package, _OurLayer(framework, kind).subject)
    entries[f"{prefix}.fused"] = (package, partial(_our_function, framework))
    contained = _OurLayer(framework, "MultiHeadSelfAttention", is_contained=True)
    entries[f"{prefix}.{CONTAINED}"] = (package, contained.subject)
    return entries


# ---- The list ------------------------------------------------------------------------------------

PEERS: dict[str, tuple[str, Callable[[], Subject]]] = {
    "torch.nn.MultiheadAttention": ("torch", _torch_mha),
    "F.scaled_dot_product_attention": ("torch", _torch_sdpa),
    "jax.nn.dot_product_attention": ("jax", _jax_nn),
    NNX: ("flax", _nnx),
    LINEN: ("flax", _linen),
    "keras.layers.MultiHeadAttention": ("keras", _keras_mha),
    "keras.layers.GroupQueryAttention": ("keras", _keras_gqa),
    "equinox.nn.MultiheadAttention": ("equinox", _equinox),
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
    library = package
    if name.startswith("mha_"):
        library = "mha-parity"
    version = f"{library} {metadata.version(library)}"
    if package == "keras":
        version += f" on {subject.framework} {metadata.version(subject.framework)}"
    # Keras layers keep a random state; others draw from a key or from torch's seed at each call.
    reused = _ReusedCalls(subject.make, keeps_state=package == "keras")
    return replace(subject, version=version, make=reused.make)


class _ReusedCalls:
    """The calls of a subject, each made once for a dtype and mode, unless it gets weights or draws
    from a state.

    Attributes:
        make_call: makes the call of a path, see `Subject.make`.
        keeps_state: whether the layers keep a random state between calls.
    """

    def __init__(self, make_call: Callable[..., Call], keeps_state: bool) -> None:
        self.make_call = make_call
        self.keeps_state = keeps_state
        self._calls: dict[Path, Call] = {}

    def make(self, path: Path, **layer: Any) -> Call:
        """Return the call of a path, for a layer with settable weights of a spec and weights."""
        if layer or (path.drops and self.keeps_state):
            return self.make_call(path, **layer)
        mode = replace(path, need_weights=False, grad=False)
        if mode not in self._calls:
            self._calls[mode] = self.make_call(mode)
        return self._calls[mode]
