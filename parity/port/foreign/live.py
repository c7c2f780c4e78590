"""Live transformers attention modules: their specification and canonical weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
    """Return the specification and canonical weights of a transformers attention module, bit for
    bit.

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
    values = values_of(getattr(module, "config", None) if config is None else config)
    path = path or None
    model = module if path in dict(module.named_modules()) else None
    module = module if path is None or model is None else model.get_submodule(path)
    index = getattr(module, "layer_idx", None) if layer_idx is None else layer_idx
    if model is None and (isinstance(index, bool) or not isinstance(index, int)):
        raise InputTypeError("layer_idx", "be the number of a layer", layer_idx=index)
    words = (path or "").split(".")
    around = (
        []
        if model is None
        else [model.get_submodule(".".join(words[:end])) for end in range(len(words))][::-1]
    )
    parts = _parts_of(_family_of(*module.modules(), *around), values)
    named = sections_named(path or "", sections_of(values))
    chosen = [
        part
        for name, part in parts.items()
        if not named or not name or name.partition(".")[0] in named
    ]
    layers = [layer for part in chosen for layer in specs_of(part)]
    found: dict[AttentionSpec, tuple[ModelLayer, Weights]] = {}
    refusals: list[str] = []
    candidates = [] if model is None else [*_in_files(model, path or "", layers)]
    for layer, tensors in candidates or _in_memory(
        module, layers, index if model is None else None, path
    ):
        if layer.spec is None:
            refusals.append(
                f"layer {layer.index} is {layer.kind}, which is not attention over keys"
            )
        elif (count := _num_heads(module)) not in (None, layer.spec.num_heads):
            refusals.append(f"{count} heads where layer {layer.index} has {layer.spec.num_heads}")
        else:
            try:
                found[layer.spec] = layer, _canonical(tensors, layer)
            except LayoutMismatchError as error:
                _check_borrowed(tensors, layer, path)
                refusals.append(str(error))
    if len(found) != 1:
        which = "; path=… selects one" if found else ""
        none = (
            f"the model has no "
            f"layer{'' if index is None else f' {index}'}{'' if path is None else f' at {path}'}"
        )
        reasons = [str(spec) for spec in found] if found else refusals or [none]
        hint = (
            "parity.from_transformers(model, path=…) finds it by its name in the files"
            if path and model is None
            else OBSERVE
        )
        raise InputError(
            "module", "be one layer of the model", f"{' or '.join(reasons)}{which}", hint=hint
        )
    return next(iter(found.values()))


def _in_files(
    model: Any, path: str, layers: Iterable[ModelLayer]
) -> Iterator[tuple[ModelLayer, Mapping[str, Any]]]:
    """Yield the layers that a model's module is, by the names in the model's files, with its
    tensors in that form.
    """
    tensors = {
        f"{path}.{name}": tensor for name, tensor in model.get_submodule(path).state_dict().items()
    }
    if hasattr(model, "config"):
        tensors = names_in_files(model, tensors)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for layer in layers:
        cut = {name: f".{name}".rpartition(f".{layer.path}.") for name in tensors}
        begins = {before for before, *_ in cut.values()}
        if layer.path and len(begins) == 1 and all(between for _, between, _ in cut.values()):
            held = {short: tensors[name] for name, (*_, short) in cut.items()}
            lent = {
                short: f"{min(begins)}.{other}"[1:]
                for short, other in layer.shared.items()
                if short not in held
            }
            yield (
                layer,
                held
                | {short: parameters[name] for short, name in lent.items() if name in parameters},
            )


def names_in_files(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors of a transformers model, named as in memory, by the names and in the form of
    the model's files.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


def _in_memory(
    module: Any, layers: Iterable[ModelLayer], index: int | None, path: str | None
) -> Iterator[tuple[ModelLayer, Mapping[str, Any]]]:
    """Yield the layers that a module may be, by its number and its path in memory, with its
    tensors.

    Paths may differ from those in files. If no layer has this one, it must be the usual path of
    self-attention.
    """
    layers, tensors = [*layers], module.state_dict()
    is_known = path is None or index is None or any(layer.is_at(path) for layer in layers)
    usual = USUAL.fullmatch(path or "")
    for layer in layers:
        is_here = path is None or (
            layer.is_at(path) if is_known else bool(usual and usual[1] == str(index))
        )
        if is_here and (index is None or layer.index == index):
            yield layer, tensors


def _canonical(tensors: Mapping[str, Any], layer: ModelLayer) -> Weights:
    """Return the canonical weights of a layer whose tensors have the names of its files, or of
    another layout.

    Modules of transformers 5 use few sets of names, but load files with many; each set is also a
    layout.

    Raises:
        LayoutMismatchError: if they fit no layout, or several with different weights.
    """
    try:
        return to_canonical(tensors, LAYOUTS[layer.layout], spec=layer.spec)[0]
    except LayoutMismatchError:
        read: list[Weights] = []
        for layout in LIVE:
            with suppress(LayoutMismatchError, UnknownSpecError):
                read.append(to_canonical(tensors, LAYOUTS[layout], spec=layer.spec)[0])
        if not read or any((one[name] != read[0][name]).any() for one in read for name in one):
            raise
        return read[0]


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
    sections = _all_sections(values)
    if found := {
        name: part for name, part in (sections | parts).items() if part.get("model_type") == own
    }:
        if own in FAMILIES:
            return found
        name, part = next(iter(found.items()))
        reason = f"one of {name or 'the model itself'}: {why_unknown(part)}"
    else:
        reason = f"one of {own!r}, which no part of {values['model_type']!r} is"
    raise InputError("module", "be of a part of a known family", reason, hint=OBSERVE)


def _all_sections(values: Mapping[str, Any], where: str = "") -> dict[str, Mapping[str, Any]]:
    """Return the configurations of a model and of all its nested parts, by the path of keys."""
    found = {where.removesuffix("."): values}
    for name in sections_of(values):
        found |= _all_sections(values[name], f"{where}{name}.")
    return found


def _family_of(*modules: Any) -> str | None:
    """Return the family of the first module with a configuration: each has that of its own part."""
    families = (getattr(getattr(module, "config", None), "model_type", None) for module in modules)
    return next(filter(None, families), None)


def _check_borrowed(tensors: Mapping[str, Any], layer: ModelLayer, path: str | None) -> None:
    """Reject a module that uses a weight of another module, such as T5's blocks after the first.

    Raises:
        ValueError: if only such a weight is missing from the tensors.
    """
    borrowed = layer.shared.keys() - tensors.keys()
    wanted = (
        shapes_in(LAYOUTS[layer.layout], layer.spec) if borrowed and layer.spec is not None else {}
    )
    own = {name: shape for name, shape in wanted.items() if name not in borrowed}
    if borrowed and own == {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
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
    for each in module.modules():
        for name in HEAD_COUNTS:
            if type(count := getattr(each, name, None)) is int:
                return count
    return None
