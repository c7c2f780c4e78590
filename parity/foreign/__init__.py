"""Live modules: canonical weights into them and out of them, be they a sibling's or another library's layers.

There is one adapter for each kind of layer, beside the others of its library. Neither an adapter nor its library is
imported before one is asked for, or a module of the library is given.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mha_spec import AttentionSpec, Refusal, WrongType
from parity.backends import backend_of, load_backend
from parity.backends.port import Port
from parity.conversion import convert
from parity.core.weights import Weights, unheld
from parity.foreign.adapter import Adapter


@dataclass(frozen=True)
class LayerClass:
    """A kind of layer of another library.

    Attributes:
        module: where its class is defined, or what that begins with.
        qualname: of the class.
        adapter: the module here that has its adapter.
    """

    module: str
    qualname: str
    adapter: str


LAYERS = {
    "torch.nn.MultiheadAttention": LayerClass("torch.nn", "MultiheadAttention", "torch_nn"),
    "flax.nnx.MultiHeadAttention": LayerClass("flax.nnx", "MultiHeadAttention", "nnx"),
    "flax.linen.MultiHeadDotProductAttention": LayerClass("flax.linen", "MultiHeadDotProductAttention", "linen"),
    "keras.layers.MultiHeadAttention": LayerClass("keras", "MultiHeadAttention", "keras"),
    "keras.layers.GroupQueryAttention": LayerClass("keras", "GroupedQueryAttention", "keras"),
    "equinox.nn.MultiheadAttention": LayerClass("equinox.nn", "MultiheadAttention", "equinox"),
}
"""Every layer of another library that is known here, by the name that its users write."""


def load_adapter(name: str) -> Adapter:
    """Import an adapter, and its library.

    Raises:
        ValueError: if there is none of that name.
        ImportError: if the library is not installed.
    """
    if name not in LAYERS:
        raise Refusal("a layer", f"be one of {', '.join(LAYERS)}", repr(name))
    adapters: list[Adapter] = importlib.import_module(f"parity.foreign.{LAYERS[name].adapter}").ADAPTERS
    return next(adapter for adapter in adapters if adapter.name == name)


def load_into(module: Any, weights: Any, spec: AttentionSpec | None = None) -> Any:
    """Fill a module from canonical weights, bit for bit, or leave it as it was.

    Args:
        module: a module of mha_jax, mha_torch or mha_tt, or a layer of another library:
            `torch.nn.MultiheadAttention`, `flax.nnx.MultiHeadAttention`,
            `flax.linen.MultiHeadDotProductAttention`, bound to its variables, `keras.layers.MultiHeadAttention` or
            `GroupQueryAttention`, built, or `equinox.nn.MultiheadAttention`.
        weights: canonical weights, as arrays of any framework, in the dtype of the module; or another such module.
        spec: the layer that the weights are of, as `load` and `spec_of` give it. Then the module must compute the same:
            weights alone show neither the number of heads nor RoPE. That of another module is known.

    Returns:
        The module. Those of linen and Equinox do not change: of these it is a new one, and of linen's bound to the new
        weights, which `.variables["params"]` has.

    Raises:
        TypeError: if the module is none of these, or dtypes differ.
        ValueError: if names or shapes do not fit, a value is not finite, or the specifications differ.
    """
    adapter = _adapter_of(module)
    if not isinstance(weights, Mapping):
        spec = spec_of(weights) if spec is None else spec
        weights = weights_of(weights)
    if spec is not None:
        check_same_layer(adapter.spec_of(module), spec, "the module", "the weights")
    return adapter.load_into(module, weights)


def weights_of(module: Any) -> Weights:
    """The canonical weights of a module, bit for bit.

    Args:
        module: one that `load_into` takes.

    Raises:
        TypeError: if it is none of these.
        ValueError: if it does not hold just the weights of its specification, as where a projection is wrapped.
    """
    return _adapter_of(module).weights_of(module)


def spec_of(module: Any) -> AttentionSpec:
    """The specification of a module: what `save`, `verify` and `load_into` want beside its weights.

    Args:
        module: one that `load_into` takes. Of another library's it is what the module computes itself, which is no
            RoPE.

    Raises:
        TypeError: if it is none of these.
        ValueError: if it is another library's and computes what no specification says.
    """
    return _adapter_of(module).spec_of(module)


def from_module(module: Any) -> tuple[AttentionSpec, Weights]:
    """The specification and canonical weights of a module: `spec_of` and `weights_of`.

    `parity.from_transformers` has those of transformers' modules, whose configuration says what they compute.

    Args:
        module: one that `load_into` takes.

    Raises:
        TypeError: if it is none of these.
        ValueError: as both.
    """
    return spec_of(module), weights_of(module)


def save(
    path: str | os.PathLike[str],
    weights: Any,
    spec: AttentionSpec | None = None,
    layout: str = "canonical",
    *,
    prefix: str = "",
) -> None:
    """Write canonical weights to a file, in a layout, whole or not at all.

    What is there already is replaced if it is of the same format, and refused if it is anything else.

    Args:
        path: of the file; its suffix decides the format.
        weights: canonical weights, as arrays of any framework; or a module that `load_into` takes.
        spec: the layer. That of a module is known; where it is given, too, both must compute the same.
        layout: to write them in.
        prefix: what the names shall begin with, without the last dot.

    Raises:
        OSError: if the file cannot be written.
        TypeError, ValueError: if the weights are not those of the spec, or the layout cannot hold such a layer.
    """
    if not isinstance(weights, Mapping):
        known = spec_of(weights)
        if spec is not None:
            check_same_layer(known, spec, "the module", "spec")
        weights, spec = weights_of(weights), spec or known
    convert.save(path, weights, spec, layout, prefix=prefix)


def check_same_layer(spec: AttentionSpec, other: AttentionSpec, what: str, whose: str) -> None:
    """Refuse specifications of layers that compute different things from the same weights.

    Raises:
        ValueError: if they differ in more than dropout and in whether q, k and v are held as one.
    """
    fields, others = vars(unheld(spec)), vars(unheld(other))
    differ = [name for name in fields if fields[name] != others[name]]
    if differ:
        one, two = (", ".join(f"{name}={each[name]}" for name in differ) for each in (fields, others))
        raise Refusal(what, f"be of one specification with {whose}", f"{one} and {two}")


def _adapter_of(module: Any) -> Adapter | Port:
    """What reaches the weights of a module: its sibling's backend, or the adapter of another library's layer."""
    if backend := backend_of(module):
        return load_backend(backend)
    for each in type(module).__mro__:
        for name, kind in LAYERS.items():
            if each.__qualname__ == kind.qualname and f"{each.__module__}.".startswith(f"{kind.module}."):
                return load_adapter(name)
    if isinstance(module, type):
        raise WrongType("module", "be a module and not its class", module=module.__name__)
    others, got = ", ".join(LAYERS), type(module).__name__
    if type(module).__module__.startswith("transformers."):
        got += "; parity.from_transformers takes it, with the configuration of its model"
    raise WrongType("module", f"be one of mha_jax, mha_torch or mha_tt, or of {others}", str(got))
