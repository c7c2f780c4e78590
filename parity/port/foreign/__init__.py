"""Read and write canonical weights of live modules, of mha_* or of other libraries.

Each kind of layer has one adapter. Neither an adapter nor its library is imported before it is
requested by name, or a module of the library is passed.

- `Adapter` (`adapter`): reads, fills and calls one kind of layer.
- `live`: layers of transformers models, by `from_transformers`.

Start at `load_into` and `weights_of`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mha_spec import AttentionSpec, InputError, InputTypeError
from parity.measure.backends import backend_of, load_backend
from parity.measure.backends.port import Port
from parity.measure.core.weights import Weights, unheld
from parity.port.conversion import convert
from parity.port.foreign.adapter import Adapter


@dataclass(frozen=True)
class LayerClass:
    """A kind of layer of another library.

    Attributes:
        module: module that defines its class, or a package that contains it.
        qualname: qualified name of the class.
        adapter: name of the module here with its adapter.
    """

    module: str
    qualname: str
    adapter: str


LAYERS = {
    "torch.nn.MultiheadAttention": LayerClass("torch.nn", "MultiheadAttention", "torch_nn"),
    "flax.nnx.MultiHeadAttention": LayerClass("flax.nnx", "MultiHeadAttention", "nnx"),
    "flax.linen.MultiHeadDotProductAttention": LayerClass(
        "flax.linen", "MultiHeadDotProductAttention", "linen"
    ),
    "keras.layers.MultiHeadAttention": LayerClass("keras", "MultiHeadAttention", "keras"),
    # Its exported name lacks "ed".
    "keras.layers.GroupQueryAttention": LayerClass("keras", "GroupedQueryAttention", "keras"),
    "equinox.nn.MultiheadAttention": LayerClass("equinox.nn", "MultiheadAttention", "equinox"),
}
"""Every supported layer of another library, by its usual name."""


def load_adapter(name: str) -> Adapter:
    """Import an adapter, and its library.

    Raises:
        ValueError: if there is no adapter with that name.
        ImportError: if the library is not installed.
    """
    if name not in LAYERS:
        raise InputError("a layer", f"be one of {', '.join(LAYERS)}", repr(name))
    adapters: list[Adapter] = importlib.import_module(
        f"parity.port.foreign.{LAYERS[name].adapter}"
    ).ADAPTERS
    (adapter,) = (adapter for adapter in adapters if adapter.name == name)
    return adapter


def load_into(module: Any, weights: Any, spec: AttentionSpec | None = None) -> Any:
    """Load canonical weights into a module, bit for bit; on error the module stays unchanged.

    Args:
        module: a module of mha_jax, mha_torch or mha_tt, or a layer of another library:
            `torch.nn.MultiheadAttention`, `flax.nnx.MultiHeadAttention`,
            `flax.linen.MultiHeadDotProductAttention`, bound to its variables,
            `keras.layers.MultiHeadAttention` or `GroupQueryAttention`, built, or
            `equinox.nn.MultiheadAttention`.
        weights: canonical weights, as arrays of any framework, in the dtype of the module; or
            a second such module.
        spec: specification of the weights, as `load` and `spec_of` return it, and `problem.spec`:
            the module must compute that function. Required with weights by name, because they show
            neither the number of heads nor RoPE; optional if `weights` is a module.

    Returns:
        The module. Linen and Equinox modules are immutable, so a new one is returned; a linen
        module is bound to the new weights, `.variables["params"]`.

    Raises:
        TypeError: if the module is not supported, dtypes differ, or weights by name have no `spec`.
        ValueError: if names or shapes do not fit, a value is not finite, or the specifications
            differ.

    Example:
        >>> import mha_torch
        >>> module = torch.nn.MultiheadAttention(64, 8)
        >>> layer = parity.load_into(mha_torch.MultiHeadAttention(64, 8), module)
        >>> torch.equal(layer.out_proj.weight, module.out_proj.weight)
        True
    """
    adapter = _adapter_of(module)
    if not isinstance(weights, Mapping):
        if spec is None:
            spec = spec_of(weights)
        weights = weights_of(weights)
    if spec is None:
        # Weights of 4 heads also fit a module with 8 heads of half the size.
        hint = (
            "`parity.load` and `parity.spec_of` return it, and a problem has it as `problem.spec`"
        )
        raise InputTypeError("spec", "be passed with weights by name", spec=None, hint=hint)
    check_same_layer(adapter.spec_of(module), spec, "the module", "the weights")
    return adapter.load_into(module, weights)


def weights_of(module: Any) -> Weights:
    """Return the canonical weights of a module, bit for bit.

    Args:
        module: a module that `load_into` accepts.

    Raises:
        TypeError: if the module is not supported.
        ValueError: if it does not hold exactly the weights of its specification, for example if a
            projection is wrapped.

    Example:
        >>> sorted(parity.weights_of(torch.nn.MultiheadAttention(64, 8, bias=False)))
        ['k_proj.weight', 'out_proj.weight', 'q_proj.weight', 'v_proj.weight']
    """
    return _adapter_of(module).weights_of(module)


def spec_of(module: Any) -> AttentionSpec:
    """Return the specification of a module.

    `save` and `load_into` need it with the module's weights.

    Args:
        module: a module that `load_into` accepts. For another library's layer, the specification
            has no RoPE, because the layer does not apply it.

    Raises:
        TypeError: if the module is not supported.
        ValueError: if another library's module computes something that no specification expresses.

    Example:
        >>> parity.spec_of(torch.nn.MultiheadAttention(64, 8)).num_heads
        8
    """
    return _adapter_of(module).spec_of(module)


def from_module(module: Any) -> tuple[AttentionSpec, Weights]:
    """Return the specification and canonical weights of a module: `spec_of` and `weights_of`.

    For transformers modules, whose configuration defines what they compute, see
    `parity.from_transformers`.

    Args:
        module: a module that `load_into` accepts.

    Raises:
        TypeError: if the module is not supported.
        ValueError: as in `spec_of` and `weights_of`.

    Example:
        >>> spec, weights = parity.from_module(torch.nn.MultiheadAttention(64, 8))
        >>> spec.num_heads, weights["q_proj.weight"].shape
        (8, (64, 64))
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
    """Write canonical weights to a file in a layout, completely or not at all.

    An existing file is replaced if it has the same format; anything else raises an error.

    Args:
        path: path of the file; its suffix selects the format.
        weights: canonical weights, as arrays of any framework; or a module that `load_into`
            accepts.
        spec: the layer. Optional for a module, which must then compute the same function.
        layout: layout to write.
        prefix: prefix for the names, without the last dot.

    Raises:
        OSError: if the file cannot be written.
        TypeError, ValueError: if the weights do not match the spec, or the layout cannot represent
            the layer.

    Example:
        >>> parity.save("layer.safetensors", torch.nn.MultiheadAttention(64, 8))
        >>> weights, spec = parity.load("layer.safetensors")
        >>> spec.num_heads
        8
    """
    if not isinstance(weights, Mapping):
        module = weights
        module_spec = spec_of(module)
        if spec is None:
            spec = module_spec
        else:
            check_same_layer(module_spec, spec, "the module", "spec")
        weights = weights_of(module)
    convert.save(path, weights, spec, layout, prefix=prefix)


def check_same_layer(spec: AttentionSpec, other: AttentionSpec, what: str, whose: str) -> None:
    """Reject specifications of layers that compute different functions of the same weights.

    Raises:
        ValueError: if they differ in more than dropout and fused q, k and v.
    """
    fields, other_fields = unheld(spec).values(), unheld(other).values()
    differ = [name for name in fields if fields[name] != other_fields[name]]
    if differ:
        values = ", ".join(f"{name}={fields[name]}" for name in differ)
        other_values = ", ".join(f"{name}={other_fields[name]}" for name in differ)
        rule = f"have the same specification as {whose}"
        raise InputError(what, rule, f"{values} and {other_values}")


def _adapter_of(module: Any) -> Adapter | Port:
    """Return the adapter of a module of ours, or of another library's layer."""
    backend = backend_of(module)
    if backend:
        return load_backend(backend)
    # A subclass of a layer is one.
    for base in type(module).__mro__:
        for name, layer in LAYERS.items():
            is_in_library = f"{base.__module__}.".startswith(f"{layer.module}.")
            if is_in_library and base.__qualname__ == layer.qualname:
                return load_adapter(name)
    if isinstance(module, type):
        raise InputTypeError("module", "be a module, not its class", module=module.__name__)
    got = type(module).__name__
    if type(module).__module__.startswith("transformers."):
        got += "; parity.from_transformers accepts it with its model's configuration"
    supported = f"be one of mha_jax, mha_torch or mha_tt, or of {', '.join(LAYERS)}"
    raise InputTypeError("module", supported, got)
