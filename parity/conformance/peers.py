"""The attention that the frameworks come with, and our own, as subjects of `conformance`: those that are installed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.conformance.subjects import HEAD_DIM, NUM_HEADS, Call, Path, Subject, fresh_copies
from parity.conversion.layouts import LAYOUTS, from_canonical
from parity.core.weights import Weights, dtype_named, random_weights

SPEC = AttentionSpec(NUM_HEADS * HEAD_DIM, NUM_HEADS)
"""The layer that every peer is, with the same weights."""

CORE = frozenset({"mask", "is_causal", "key", "value"})


def _filled(path: Path, spec: AttentionSpec | None, weights: Weights | None) -> tuple[AttentionSpec, Weights]:
    spec = SPEC if spec is None else spec
    if weights is None:
        weights = random_weights(spec, 0)
        weights["out_proj.bias"][:] = 0.0  # so that zeros come out as zeros
    return spec, {name: weight.astype(dtype_named(path.dtype)) for name, weight in weights.items()}


def _in_layout(layout: str, spec: AttentionSpec, weights: Weights) -> Weights:
    return from_canonical(weights, spec, LAYOUTS[layout])


# ---- torch -----------------------------------------------------------------------------------------------------------


def _torch_mha() -> Subject:
    import torch

    from parity.foreign.adapters import ADAPTERS

    def make(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Call:
        spec, weights = _filled(path, spec, weights)
        module = torch.nn.MultiheadAttention(
            spec.d_model, spec.num_heads, dropout=path.dropout, batch_first=True, dtype=getattr(torch, path.dtype)
        )
        ADAPTERS["torch.MultiheadAttention"].load_into(module.train(path.train), weights)

        def call(
            query: Any,
            key: Any,
            value: Any,
            *,
            mask: Any = None,
            padding: Any = None,
            need_weights: bool = False,
            **causal: bool,
        ) -> tuple[Any, Any]:
            if mask is not None:
                mask = mask[0].expand(query.shape[0] * spec.num_heads, *mask.shape[-2:])
            return module(
                query,
                key,
                value,
                attn_mask=mask,
                key_padding_mask=padding,
                need_weights=need_weights,
                average_attn_weights=False,
                **causal,
            )

        return call

    return Subject(
        "torch.nn.MultiheadAttention",
        "torch",
        "BTE",
        make,
        takes=CORE | {"need_weights", "train", "dropout"},
        padding="mask",
        has_settable_weights=True,
        mask_true="hides",
        documented={"causal and mask": "the flag is only a hint, as documented"},
    )


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


def _nnx() -> Subject:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from parity.foreign.adapters import ADAPTERS

    @cache
    def made(dtype: str, dropout: float, spec: AttentionSpec) -> Any:
        return nnx.MultiHeadAttention(
            spec.num_heads,
            spec.d_in,
            spec.q_width,
            spec.d_model,
            num_kv_heads=None if spec.num_kv_heads == spec.num_heads else spec.num_kv_heads,
            dropout_rate=dropout,
            param_dtype=jnp.dtype(dtype),
            dtype=jnp.dtype(dtype),
            decode=False,
            rngs=nnx.Rngs(0),
        )

    def filled(path: Path, spec: AttentionSpec | None, weights: Weights | None) -> Any:
        spec, weights = _filled(path, spec, weights)
        module = nnx.clone(made(path.dtype, path.dropout, spec))
        adapter = ADAPTERS["flax.MultiHeadAttention"]
        adapter.write(module, _in_layout(adapter.layout, spec, weights))
        return module

    def make(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Call:
        fresh = fresh_copies(filled(path, spec, weights))

        def call(
            query: Any, key: Any, value: Any, *, mask: Any = None, is_causal: bool = False, need_weights: bool = False
        ) -> tuple[Any, Any]:
            module = fresh()
            output = module(
                query,
                key,
                value,
                mask=None
                if mask is None
                else jnp.broadcast_to(mask, (query.shape[0], SPEC.num_heads, *mask.shape[-2:])),
                is_causal=is_causal,
                sow_weights=need_weights,
                deterministic=not path.train,
                rngs=nnx.Rngs(dropout=0),
            )
            if not need_weights:
                return output, None
            return output, jax.tree.leaves(nnx.pop(module, nnx.Intermediate))[0]

        return call

    def decode(x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
        module = nnx.clone(filled(Path(), None, None))
        module.init_cache((x.shape[0], capacity, x.shape[2]))
        tokens = [jnp.asarray(x[:, t : t + 1].astype(np.float32)) for t in range(x.shape[1])]
        return np.concatenate([module(token, decode=True, is_causal=is_causal) for token in tokens], axis=1)

    return Subject(
        "flax.nnx.MultiHeadAttention",
        "jax",
        "BTE",
        make,
        takes=CORE | {"need_weights", "dropout"},
        has_settable_weights=True,
        has_groups=True,
        decode=decode,
        mask_true="shows",
    )


def _linen() -> Subject:
    import flax.linen
    import flax.traverse_util
    import jax
    import jax.numpy as jnp

    def made(path: Path, spec: AttentionSpec, **options: Any) -> Any:
        return flax.linen.MultiHeadDotProductAttention(
            spec.num_heads,
            qkv_features=spec.q_width,
            out_features=spec.d_model,
            dropout_rate=path.dropout,
            deterministic=not path.train,
            dtype=jnp.dtype(path.dtype),
            **options,
        )

    def variables(path: Path, spec: AttentionSpec | None, weights: Weights | None) -> tuple[AttentionSpec, Any]:
        spec, weights = _filled(path, spec, weights)
        arrays = {name: jnp.asarray(x) for name, x in _in_layout("flax.linen", spec, weights).items()}
        return spec, flax.traverse_util.unflatten_dict(arrays, sep=".")

    def make(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Call:
        spec, params = variables(path, spec, weights)
        module = made(path, spec)

        def call(query: Any, key: Any, value: Any, *, mask: Any = None, need_weights: bool = False) -> tuple[Any, Any]:
            output, changed = module.apply(
                {"params": params},
                query,
                key,
                value,
                mask=None if mask is None else jnp.broadcast_to(mask, (query.shape[0], 1, *mask.shape[-2:])),
                sow_weights=need_weights,
                rngs={"dropout": jax.random.key(0)},
                mutable=["intermediates"],
            )
            return output, jax.tree.leaves(changed)[0] if need_weights else None

        return call

    def decode(x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
        spec, params = variables(Path(), None, None)
        module = made(Path(), spec, decode=True)
        slots = jnp.zeros((x.shape[0], capacity, x.shape[2]))
        held = module.init(jax.random.key(0), slots)["cache"]
        outputs = []
        for t in range(x.shape[1]):
            token = jnp.asarray(x[:, t : t + 1].astype(np.float32))
            output, changed = module.apply({"params": params, "cache": held}, token, mutable=["cache"])
            held = changed["cache"]
            outputs.append(output)
        return np.concatenate(outputs, axis=1)

    return Subject(
        "flax.linen.MultiHeadDotProductAttention",
        "jax",
        "BTE",
        make,
        takes=frozenset({"mask", "key", "value", "need_weights", "dropout"}),
        has_settable_weights=True,
        decode=decode,
        mask_true="shows",
    )


def _equinox() -> Subject:
    import equinox
    import jax
    import jax.numpy as jnp

    @cache
    def made(dtype: str, dropout: float, train: bool, spec: AttentionSpec) -> Any:
        return equinox.nn.MultiheadAttention(
            spec.num_heads,
            spec.d_in,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            dropout_p=dropout,
            inference=not train,
            dtype=jnp.dtype(dtype),
            key=jax.random.key(0),
        )

    def make(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Call:
        spec, weights = _filled(path, spec, weights)
        tensors = _in_layout("equinox.nn.MultiheadAttention", spec, weights)

        def leaf(where: Any, own: Any) -> Any:
            name = jax.tree_util.keystr(where, simple=True, separator=".")
            return jnp.asarray(tensors[name]) if name in tensors else own

        module = jax.tree_util.tree_map_with_path(leaf, made(path.dtype, path.dropout, path.train, spec))

        def call(query: Any, key: Any, value: Any, *, mask: Any = None) -> tuple[Any, Any]:
            rngs = jax.random.split(jax.random.key(0), query.shape[0])
            mask = None if mask is None else mask[0, 0]

            def one(query: Any, key: Any, value: Any, rng: Any) -> Any:
                return module(query, key, value, mask, key=rng)

            return jax.vmap(one)(query, key, value, rngs), None

        return call

    return Subject(
        "equinox.nn.MultiheadAttention",
        "jax",
        "BTE",
        make,
        takes=frozenset({"mask", "key", "value", "dropout"}),
        has_settable_weights=True,
        mask_true="shows",
    )


# ---- Keras, on torch or on JAX ---------------------------------------------------------------------------------------


@contextmanager
def _keras_backend() -> Iterator[None]:
    """While Keras is imported it finds a backend that is installed: the user's own if it can be, else torch or JAX."""
    chosen = os.environ.get("KERAS_BACKEND")
    settings = FilePath(os.environ.get("KERAS_HOME", FilePath.home() / ".keras")) / "keras.json"
    if chosen is None and settings.exists():
        # Keras writes this file itself, with a default that need not be installed.
        chosen = json.loads(settings.read_text()).get("backend")
    if "keras" in sys.modules or "KERAS_BACKEND" in os.environ or (chosen is not None and find_spec(chosen)):
        yield
        return
    os.environ["KERAS_BACKEND"] = "torch" if find_spec("torch") else "jax"
    try:
        yield
    finally:
        del os.environ["KERAS_BACKEND"]


def _keras(name: str) -> Subject:
    with _keras_backend():
        import keras
    framework = keras.backend.backend()
    if framework not in ("torch", "jax"):
        raise ImportError(f"Keras runs on {framework} here, which is neither torch nor JAX (see KERAS_BACKEND)")
    is_grouped = name == "GroupQueryAttention"

    def made(path: Path, spec: AttentionSpec, weights: Weights) -> Any:
        options = {"dropout": path.dropout, "dtype": path.dtype, "seed": 0}
        if is_grouped:
            layer = keras.layers.GroupQueryAttention(spec.head_dim, spec.num_heads, spec.num_kv_heads, **options)
        else:
            layer = keras.layers.MultiHeadAttention(spec.num_heads, spec.head_dim, **options)
        layer.build((None, None, spec.d_in), (None, None, spec.d_kv))
        tensors = _in_layout(f"keras.{name}", spec, weights)
        for variable in layer.variables:
            tensor = tensors.get(variable.path.split("/", 1)[1].replace("/", "."))
            if tensor is not None:
                variable.assign(keras.ops.convert_to_tensor(tensor.astype(np.float32)))
        return layer

    def make(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Call:
        layer = made(path, *_filled(path, spec, weights))

        def call(
            query: Any, key: Any, value: Any, *, mask: Any = None, is_causal: bool = False, need_weights: bool = False
        ) -> tuple[Any, Any]:
            result = layer(
                query,
                value,
                key,
                attention_mask=None if mask is None else mask[:, 0],
                use_causal_mask=is_causal,
                return_attention_scores=need_weights,
                training=path.train,
            )
            return result if need_weights else (result, None)

        return call

    return Subject(
        f"keras.layers.{name}",
        framework,
        "BTE",
        make,
        takes=CORE | {"need_weights", "train", "dropout"},
        has_settable_weights=True,
        has_groups=is_grouped,
        mask_true="shows",
    )


def _keras_mha() -> Subject:
    return _keras("MultiHeadAttention")


def _keras_gqa() -> Subject:
    return _keras("GroupQueryAttention")


# ---- Our own ---------------------------------------------------------------------------------------------------------


PROMISES = frozenset({"NaN hidden"})


def _our_module(framework: str, kind: str) -> Callable[..., Any]:
    """What makes a module of ours for a path: one to call, with random numbers of its own."""
    from parity.backends import load_backend

    backend = load_backend(framework)
    package = __import__(f"mha_{framework}")

    def made(path: Path, spec: AttentionSpec | None = None, weights: Weights | None = None) -> Any:
        spec, weights = _filled(path, spec, weights)
        spec = replace(spec, dropout=path.dropout)
        if framework == "torch":
            import torch

            module = getattr(package, kind)(spec, dtype=getattr(torch, path.dtype)).train(path.train)
        else:
            import jax.numpy as jnp
            from flax import nnx

            module = getattr(package, kind)(spec, param_dtype=jnp.dtype(path.dtype), rngs=nnx.Rngs(0))
            module.train() if path.train else module.eval()
        module = backend.load_into(module, weights)
        return fresh_copies(module) if framework == "jax" else lambda: module

    return made


def _named(padding: Any, **options: Any) -> dict[str, Any]:
    """Options by the names of our parameters; what was not asked for is left out."""
    return options if padding is None else {**options, "key_padding_lengths": padding}


def _our_subject(framework: str, kind: str, make: Callable[..., Call], takes: set[str], **known: Any) -> Subject:
    return Subject(
        f"mha_{framework}.{kind}",
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
    from parity.backends import load_backend

    backend: Any = load_backend(framework)
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
    fused = __import__(f"mha_{framework}.fused", fromlist=["fused"])

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
    "keras.layers.MultiHeadAttention": ("keras", _keras_mha),
    "keras.layers.GroupQueryAttention": ("keras", _keras_gqa),
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
        raise ValueError(f"a peer must be one of {', '.join(PEERS)}, got {name!r}")
    package, make = PEERS[name]
    if find_spec(package) is None:
        raise ImportError(f"{package} is not installed")
    subject = make()
    library = "mha-parity" if name.startswith("mha_") else package
    version = f"{library} {metadata.version(library)}"
    if package == "keras":
        version += f" on {subject.framework} {metadata.version(subject.framework)}"
    return replace(subject, version=version, make=_kept(subject.make))


def _kept(make: Callable[..., Call]) -> Callable[..., Call]:
    """The same, but a layer is made once for a dtype and mode, unless it draws random numbers or is given weights."""
    held: dict[Path, Call] = {}

    def kept(path: Path, **given: Any) -> Call:
        if given or path.drops:
            return make(path, **given)
        mode = replace(path, need_weights=False, grad=False)
        if mode not in held:
            held[mode] = make(mode)
        return held[mode]

    return kept
