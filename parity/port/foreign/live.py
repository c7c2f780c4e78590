"""Live transformers attention modules: their specification and canonical weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from mha_spec import AttentionSpec, InputError, InputTypeError
from parity.measure.core.weights import Weights
from parity.port.conversion.layouts import LAYOUTS, to_canonical
from parity.port.conversion.layouts.canonical import shapes_in
from parity.port.conversion.layouts.detection import LayoutMismatchError, UnknownSpecError
from parity.port.models.config import values_of
from parity.port.models.families import FAMILIES
from parity.port.models.specs import (
    ModelLayer,
    known_parts,
    sections_named,
    sections_of,
    specs_of,
    why_unknown,
)

LIVE = ["canonical", *(name for name in LAYOUTS if name.startswith("transformers."))]
"""Layouts whose names transformers modules may use for their weights."""

USUAL = re.compile(r"(?:.*\.)?(?:layers?|blocks?|h)\.(\d+)\.(?:self_?)?(?:attn|attention)")
"""Usual paths of self-attention in memory."""

OBSERVE = "parity.layers_of(model, inputs) finds what it computes by observation"


def from_transformers(
    module: Any, config: Any = None, layer_idx: int | None = None, *, path: str | None = None
) -> tuple[AttentionSpec, Weights]:
    """Return the specification and canonical weights of a transformers module, bit for bit.

    Args:
        module: module of one layer, `model.model.layers[3].self_attn`; or the whole model, with
            `path`. The model knows the names of its layers in files, which distinguish its parts.
        config: configuration of the model: its `config`, a dict, or the path of its folder;
            default: `module.config`.
        layer_idx: number of the layer, from 0; default: `module.layer_idx`. With a whole model, the
            path determines it.
        path: path of the layer, for models with several modules of one number:
            `decoder.layers.3.encoder_attn`.

    Returns:
        The specification, from the configuration alone; and canonical weights, (out, in). The last
        layer of GPT-NeoX-Japanese includes the output bias, which its module returns for the caller
        to add.

    Raises:
        OSError: if the folder does not exist.
        TypeError: if the number of the layer is unknown, or there is no configuration.
        ValueError: if the configuration is not understood or has no such layer, if the module has
            other weights or heads than that layer, or if it uses a weight that another module
            holds.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 16}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        >>> model = LlamaModel(LlamaConfig(**sizes, **heads)).eval()
        >>> spec, weights = parity.from_transformers(model.layers[0].self_attn)
        >>> spec.num_kv_heads
        2
    """
    layer, weights = find_layer(module, config, layer_idx, path=path)
    return cast(AttentionSpec, layer.spec), weights


def find_layer(
    module: Any, config: Any = None, layer_idx: int | None = None, *, path: str | None = None
) -> tuple[ModelLayer, Weights]:
    """Return the model layer of a live module, and its canonical weights; see `from_transformers`.

    Raises:
        OSError, TypeError, ValueError: as in `from_transformers`.
    """
    if config is None:
        config = getattr(module, "config", None)
    values = values_of(config)
    path = path or None
    model = None
    if path is not None and path in dict(module.named_modules()):
        model, module = module, module.get_submodule(path)
    index = layer_idx if layer_idx is not None else getattr(module, "layer_idx", None)
    if model is None and (isinstance(index, bool) or not isinstance(index, int)):
        raise InputTypeError("layer_idx", "be the number of a layer", layer_idx=index)
    modules = list(module.modules())
    if model is not None and path is not None:
        modules += ancestors(model, path)
    layers = _layers_of(values, _family_of(modules), path)
    candidates = []
    number = index
    if model is not None and path is not None:
        candidates = list(_in_files(model, path, layers))
        # The path determines the layer; modules may be numbered otherwise.
        number = None
    if not candidates:
        candidates = list(_in_memory(module, layers, number, path))
    matches, reasons_against = _matches(candidates, _num_heads(module), path)
    if len(matches) == 1:
        return next(iter(matches.values()))
    hint = OBSERVE
    if path and model is None:
        hint = "parity.from_transformers(model, path=…) finds it by its name in the files"
    if matches:
        reason = f"{' or '.join(map(str, matches))}; path=… selects one"
    elif reasons_against:
        reason = " or ".join(reasons_against)
    else:
        reason = "the model has no layer"
        if index is not None:
            reason += f" {index}"
        if path is not None:
            reason += f" at {path}"
    raise InputError("module", "be one layer of the model", reason, hint=hint)


def _matches(
    candidates: Iterable[tuple[ModelLayer, Mapping[str, Any]]],
    num_heads: int | None,
    path: str | None,
) -> tuple[dict[AttentionSpec, tuple[ModelLayer, Weights]], list[str]]:
    """Return the layers that a module may be, with their weights, and why it cannot be others.

    Layers of one specification count as one, with any number.

    Args:
        candidates: layers, and the module's tensors by the names of each.
        num_heads: number of the module's query heads; None if unknown.
        path: path of the module in its model.
    """
    matches: dict[AttentionSpec, tuple[ModelLayer, Weights]] = {}
    reasons_against: list[str] = []
    for layer, tensors in candidates:
        spec = layer.spec
        if spec is None:
            reasons_against.append(
                f"layer {layer.index} is {layer.kind}, which is not attention over keys"
            )
            continue
        if num_heads is not None and num_heads != spec.num_heads:
            reasons_against.append(
                f"{num_heads} heads where layer {layer.index} has {spec.num_heads}"
            )
            continue
        try:
            matches[spec] = layer, _canonical(tensors, layer)
        except LayoutMismatchError as error:
            _check_borrowed(tensors, layer, path)
            reasons_against.append(str(error))
    return matches, reasons_against


def ancestors(model: Any, path: str) -> list[Any]:
    """Return the modules of a model that contain that at a path, the innermost first."""
    words = path.split(".")
    paths = [".".join(words[:count]) for count in range(len(words))]
    return [model.get_submodule(ancestor) for ancestor in reversed(paths)]


def _layers_of(values: Mapping[str, Any], family: str | None, path: str | None) -> list[ModelLayer]:
    """Return the layers that a module may be.

    Args:
        values: configuration of its model.
        family: family of the module, by its own configuration.
        path: its path in the model; it may begin with the name of a part.
    """
    sections_in_path = sections_named(path or "", sections_of(values))
    layers: list[ModelLayer] = []
    for name, part in _parts_of(family, values).items():
        if not sections_in_path or not name or name.partition(".")[0] in sections_in_path:
            layers.extend(specs_of(part))
    return layers


def _in_files(
    model: Any, path: str, layers: Iterable[ModelLayer]
) -> Iterator[tuple[ModelLayer, Mapping[str, Any]]]:
    """Yield the layers that a model's module is, with its tensors, by the names in files."""
    state = model.get_submodule(path).state_dict()
    tensors = {f"{path}.{name}": tensor for name, tensor in state.items()}
    if hasattr(model, "config"):
        tensors = names_in_files(model, tensors)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for layer in layers:
        split = names_at(layer.path, tensors) if layer.path else None
        if split is None:
            continue
        prefix, short_names = split
        layer_tensors = {short: tensors[name] for name, short in short_names.items()}
        for short, owner_path in layer.shared.items():
            owner = f"{prefix}.{owner_path}".removeprefix(".")
            if short not in layer_tensors and owner in parameters:
                layer_tensors[short] = parameters[owner]
        yield layer, layer_tensors


def names_at(path: str, names: Iterable[str]) -> tuple[str, dict[str, str]] | None:
    """Split the names of a layer's tensors at its path.

    Args:
        path: path of the layer, perhaps without the parts of the model that contain it.
        names: names of tensors.

    Returns:
        The prefix before the path, and the rest of each name after it. None unless all names
        contain the path, after the same prefix.
    """
    prefixes = set()
    short_names = {}
    for name in names:
        before, separator, short_names[name] = f".{name}".rpartition(f".{path}.")
        if not separator:
            return None
        prefixes.add(before.removeprefix("."))
    if len(prefixes) != 1:
        return None
    return prefixes.pop(), short_names


def names_in_files(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors of a transformers model by the names, and in the form, of its files.

    Args:
        model: the model.
        tensors: its tensors, named as in memory.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


def _in_memory(
    module: Any, layers: Sequence[ModelLayer], index: int | None, path: str | None
) -> Iterator[tuple[ModelLayer, Mapping[str, Any]]]:
    """Yield the layers that a module may be, by its number and path in memory, with its tensors.

    Paths may differ from those in files. If no layer has this one, it must be the usual path of
    self-attention.
    """
    tensors = module.state_dict()
    is_path_in_files = index is None or any(layer.is_at(path) for layer in layers if path)
    usual = USUAL.fullmatch(path or "")
    is_usual_path = usual is not None and usual[1] == str(index)
    for layer in layers:
        if path is None:
            is_here = True
        elif is_path_in_files:
            is_here = layer.is_at(path)
        else:
            is_here = is_usual_path
        if is_here and (index is None or layer.index == index):
            yield layer, tensors


def _canonical(tensors: Mapping[str, Any], layer: ModelLayer) -> Weights:
    """Return the canonical weights of a layer, named as in its files or as in another layout.

    Modules of transformers 5 use few sets of names, but load files with many; each set is also a
    layout.

    Raises:
        LayoutMismatchError: if they fit no layout, or several with different weights.
    """
    try:
        return to_canonical(tensors, LAYOUTS[layer.layout], spec=layer.spec)[0]
    except LayoutMismatchError:
        readings: list[Weights] = []
        for layout in LIVE:
            with suppress(LayoutMismatchError, UnknownSpecError):
                readings.append(to_canonical(tensors, LAYOUTS[layout], spec=layer.spec)[0])
        if not readings:
            raise
        first, *other_readings = readings
        for other in other_readings:
            if any((other[name] != first[name]).any() for name in other):
                raise
        return first


def _parts_of(own: str | None, values: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the configurations of the parts that a module may belong to, by their keys.

    Args:
        own: family of the module, by its own configuration.
        values: configuration of its model.

    Raises:
        ValueError: if that part has an unknown family, or several parts are possible.
    """
    parts = known_parts(values) or {"": values}
    if not values.get("model_type") or (own is None and "" in parts):
        return parts
    if own is None:
        several = f"one of {', '.join(sections_of(values))}"
        raise InputError(
            "module",
            "be of a part that is known",
            several,
            hint="parity.from_transformers(model, path=…)",
        )
    # A known part replaces the section that it was read from.
    sections = {**_all_sections(values), **parts}
    own_parts = {name: part for name, part in sections.items() if part.get("model_type") == own}
    if own_parts and own in FAMILIES:
        return own_parts
    if own_parts:
        name, part = next(iter(own_parts.items()))
        reason = f"one of {name or 'the model itself'}: {why_unknown(part)}"
    else:
        reason = f"one of {own!r}, which no part of {values['model_type']!r} is"
    raise InputError("module", "be of a part of a known family", reason, hint=OBSERVE)


def _all_sections(values: Mapping[str, Any], prefix: str = "") -> dict[str, Mapping[str, Any]]:
    """Return the configurations of a model and of all its nested parts, by the path of keys."""
    sections = {prefix.removesuffix("."): values}
    for name in sections_of(values):
        sections |= _all_sections(values[name], f"{prefix}{name}.")
    return sections


def _family_of(modules: Iterable[Any]) -> str | None:
    """Return the family of the first module with a configuration: each has the configuration of its
    own part.
    """
    for module in modules:
        family = getattr(getattr(module, "config", None), "model_type", None)
        if family:
            return family
    return None


def _check_borrowed(tensors: Mapping[str, Any], layer: ModelLayer, path: str | None) -> None:
    """Reject a module that uses a weight of another module, such as T5's blocks after the first.

    Raises:
        ValueError: if only such a weight is missing from the tensors.
    """
    borrowed = layer.shared.keys() - tensors.keys()
    if not borrowed or layer.spec is None:
        return
    expected = shapes_in(LAYOUTS[layer.layout], layer.spec)
    expected = {name: shape for name, shape in expected.items() if name not in borrowed}
    if expected == {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        which = "" if path else ", unless path=… names another layer"
        raise InputError(
            "module",
            "hold all weights that it uses",
            f"none of {layer.shared[min(borrowed)]}, which {layer.path} uses{which}",
            hint="parity.load reads such a layer from the files of the model",
        )


HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
"""Attributes with the number of query heads in transformers modules."""


def _num_heads(module: Any) -> int | None:
    """Return the number of query heads that a module specifies, or None."""
    for submodule in module.modules():
        for name in HEAD_COUNTS:
            count = getattr(submodule, name, None)
            if type(count) is int:
                return count
    return None
