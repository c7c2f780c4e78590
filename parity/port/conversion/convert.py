"""Convert between layouts: weights in memory, layers in files, whole checkpoints in bounded
memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from mha_spec import AttentionSpec, InputError, InputTypeError
from parity.measure.core.weights import Weights
from parity.measure.files import FileTensor, write_tensors
from parity.measure.files.reading import SUFFIXES
from parity.port.conversion.hints import CALLER, LayerHints, LayerKeywords
from parity.port.conversion.layers import (
    FileLayer,
    TensorCache,
    key_in_words,
    layers_under,
    open_layers,
)
from parity.port.conversion.layouts import Layout, find_layout, from_canonical, to_canonical
from parity.port.conversion.layouts.detection import LayoutMismatchError, placements
from parity.port.conversion.layouts.layout import DROPPABLE, GRID_BIAS, lost_in, unused_in, without
from parity.port.conversion.layouts.losses import Written, check_losses, with_all_biases
from parity.port.conversion.metadata import file_hints, metadata_of, sources, with_source
from parity.port.conversion.plan import Converted, Plan
from parity.port.conversion.prefixes import ENTRY, fitting_prefixes, join
from parity.port.conversion.ranks import norms_to_join, open_checkpoint, write_ranks


def convert(
    weights: Mapping[str, Any],
    *,
    source: str,
    target: str,
    **keywords: Unpack[LayerKeywords],
) -> Weights:
    """Convert the weights of an attention layer to another layout, bit for bit.

    Args:
        weights: arrays of any framework by name, in the source's layout, without any prefix: a
            torch state dict, a Flax state or nested dict, NumPy arrays.
        source, target: names of layouts: `mha-parity layouts` lists them.
        keywords: num_heads, num_kv_heads and head_dim, if the shapes are ambiguous; rope, the RoPE
            of queries and keys, which decides how some layouts pad heads. Or spec, the whole layer,
            instead of these; it is required for layers with norms, sinks, a gate or latents, which
            shapes do not show.

    Returns:
        NumPy arrays by name. `parity.to_torch` and `parity.to_jax` convert them to a framework.

    Raises:
        TypeError: if an entry is not a floating-point array, or the dtypes differ.
        ValueError: if a layout is unknown, names or shapes do not fit, the heads are ambiguous, a
            value is not finite, or the target layout cannot represent the layer.
    """
    target_layout = find_layout(target, "target")
    canonical, spec = to_canonical(weights, find_layout(source, "source"), **keywords)
    return from_canonical(canonical, spec, target_layout)


def load(
    path: str | os.PathLike[str],
    layout: str | None = None,
    *,
    prefix: str | None = None,
    **keywords: Unpack[LayerKeywords],
) -> tuple[Weights, AttentionSpec]:
    """Load one attention layer from a file.

    Args:
        path: a file, or a folder of shards.
        layout: layout of the layer; default: that of the file's metadata or the model's family.
        prefix: prefix of the layer's tensor names, without the last dot; default: that of the
            metadata. A layer of a stack, whose tensors have a leading axis of layers, has an index:
            `layers.self_attn[3]`.
        keywords: num_heads, num_kv_heads, head_dim, rope, spec, as in `convert`; default: those of
            the file's metadata, of the GGUF file, or of the `config.json` next to the file.

    Returns:
        Canonical weights, and the specification of the layer.

    Raises:
        OSError: if the file cannot be read.
        ValueError: as in `convert`, or if the file contains no such layer.

    Warns:
        IgnoredSettingsWarning: if the configuration specifies attention features that are not read,
            such as scaled or partial RoPE, or soft caps, windows and scales in a GGUF file.
    """
    with open_layers(path, layout, prefix=prefix, **keywords) as layers:
        if len(layers) != 1:
            some = " to ".join(layers[index].label for index in (0, -1))
            raise InputError(
                "prefix", "be that of one layer", f"one of {len(layers)} in {path}: {some}"
            )
        return layers[0].load()


def save(
    path: str | os.PathLike[str],
    weights: Mapping[str, Any],
    spec: AttentionSpec | None = None,
    layout: str = "canonical",
    *,
    prefix: str = "",
) -> None:
    """Write canonical weights to a file, in a layout. `parity.port.foreign.save` also accepts
    modules.
    """
    target = find_layout(layout)
    if spec is None:
        raise InputTypeError(
            "spec",
            "be passed with weights by name",
            spec=None,
            hint="`parity.spec_of` returns that of a module",
        )
    laid_out = {
        join(prefix, name): array for name, array in from_canonical(weights, spec, target).items()
    }
    infos = {name: (array.shape, array.dtype) for name, array in laid_out.items()}
    write_tensors(path, infos, laid_out.__getitem__, metadata_of(target, {prefix: spec}, prefix))


# ---- Whole checkpoints ---------------------------------------------------------------------------


OPTIMIZER_STATE = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
)
"""Names under which torch's optimizers store one tensor per weight, in its shape; optax uses the
weights' names.
"""


def convert_file(
    source_path: str | os.PathLike[str],
    target_path: str | os.PathLike[str],
    *,
    source: str | None = None,
    target: str,
    prefix: str | None = None,
    to_prefix: str | None = None,
    keep_rest: bool = True,
    max_shard_bytes: int | None = None,
    ranks: int | None = None,
    drop: Collection[str] = (),
    fill_bias: bool = False,
    force: bool = False,
    dry_run: bool = False,
    on_tensor: Callable[[str], None] = lambda name: None,
    **keywords: Unpack[LayerKeywords],
) -> Converted:
    """Convert every attention layer of a file, tensor by tensor, so that only a few tensors are in
    memory at a time.

    Layers may be stacked on a leading axis, as `scan` and `vmap` store them. If `to_prefix` has one
    more `{i}` than `prefix`, a stack becomes numbered layers. If it has none, numbered layers
    become a stack.

    Args:
        source_path: a file, a folder of shards, or a folder of rank files.
        target_path: a file, whose suffix selects the format; an existing folder, which gets a
            `model.safetensors`; or with `ranks` a new folder.
        source: layout of the layers; default: that of the file's metadata or the model's family.
        target: layout to write.
        prefix: prefix of a layer's tensor names, without the last dot; `{i}` stands for its number.
            Default: that of the metadata, otherwise the prefixes of all attention layers of the
            model, otherwise empty.
        to_prefix: prefix in the target; default: that of the target layout, if it has one, or
            else `prefix`.
        keep_rest: copy all other tensors unchanged; otherwise leave them out.
        max_shard_bytes: split the target into files of about this size.
        ranks: divide the heads of the target over this number of ranks, one file per rank, as the
            programs that use the layout do.
        drop: features to leave out if the target cannot represent them, such as `rope.scaling`:
            names of `parity.port.conversion.layouts.layout.DROPPABLE`.
        fill_bias: add zero biases if the target requires biases.
        force: replace an existing target if it has the same format; never the source.
        dry_run: read and check every tensor, but write nothing; the record then has a `plan`.
        on_tensor: called with the name of each tensor before it is written.
        keywords: num_heads, num_kv_heads, head_dim, rope, spec, as in `load`.

    Raises:
        OSError: if a file cannot be read or written.
        FileExistsError: if the target exists, without `force`.
        ValueError: as in `convert`, or if there is no such layer, two tensors would have the same
            name, layers cannot be stacked, the target is the source, the existing target has
            another format, or the target cannot represent the layers.
    """
    target_layout, target_path = (
        find_layout(target, "target"),
        target_path if ranks else _file_in(target_path),
    )
    with open_checkpoint(source_path) as file:
        known, cache = file_hints(file, LayerHints.by(CALLER, **keywords)), TensorCache(file)
        if unknown := sorted(set(drop) - {*DROPPABLE} - known.attention_keys):
            raise InputError(
                "drop", f"consist of names from {', '.join(DROPPABLE)}", drop=", ".join(unknown)
            )
        found = sources(file, known, prefix, source, "source")
        known = (
            known.without_unsaid(file.infos, [layout for _, layout in found])
            if GRID_BIAS in drop
            else known
        )
        if to_prefix is None and target_layout.prefix and len(found) == 1:
            to_prefix = target_layout.prefix
        if to_prefix is not None and len(found) > 1:
            raise InputError(
                "prefix", f"be one of {', '.join((of for of, _ in found))} with to_prefix", "none"
            )
        if keep_rest and any(ENTRY.fullmatch(of) for of, _ in found):
            raise InputError(
                "prefix", "be that of a whole stack if the rest is kept", prefix=prefix
            )
        groups = [layers_under(cache, of, layout, known) for of, layout in found]
        to_write = [_to_write(layer) for group in groups for layer in group]
        check_losses(to_write, target_layout, drop, fill_bias=fill_bias)
        plan, layers, to = Plan(target_path, target_layout), [], ""
        for (of, _), source_layers in zip(found, groups, strict=True):
            entry = ENTRY.fullmatch(of)
            own_prefix = str(entry[1]) if entry else of
            to = own_prefix if to_prefix is None else to_prefix
            group = [
                replace(layer, written=_written(layer, target_layout, drop))
                for layer in source_layers
            ]
            plan.take(*_targets(group, of, to))
            layers += group
        rest = plan.fill(cache, keep_rest=keep_rest)
        kept, dropped = (rest, []) if keep_rest else ([], rest)
        unread = {name: value for layer in layers for name, value in layer.hints.unread.items()}
        ignored = _ignored(layers, known.ignored, target_layout)
        metadata = plan.metadata(
            None if len(found) > 1 else to, kept, ignored, {**known.unread, **unread}, drop
        )
        suffix = Path(
            target_path if target_layout.ranks is None or not ranks else target_layout.ranks.file
        ).suffix
        metadata, lost = with_source(metadata, file, suffix)

        def read(name: str) -> np.ndarray | FileTensor:
            on_tensor(name)
            return plan.tensors[name].make()

        infos = {name: (tensor.shape, tensor.dtype) for name, tensor in plan.tensors.items()}
        if ranks is None:
            options = {
                "max_shard_bytes": max_shard_bytes,
                "overwrite": force,
                "source": source_path,
            }
            written_to = write_tensors(
                target_path, infos, read, metadata, **options, dry_run=dry_run
            )
        elif max_shard_bytes is not None:
            raise InputError("max_shard_bytes", "be left out with ranks", ranks=ranks)
        else:
            planned = target_path, target_layout, ranks, plan.specs, infos
            written_to = write_ranks(*planned, read, metadata, dry_run=dry_run)
        for name in (
            infos if dry_run else ()
        ):  # reading rejects non-finite values, and ranks that differ
            np.asarray(read(name))
        specs = {layer.spec for layer in layers}
        of_layers = {file.infos[name].shape for layer in layers for name in layer.sources.values()}
        return Converted(
            source=layers[0].layout.name,
            layers=[layer.label for layer in layers],
            spec=layers[0].spec if len(specs) == 1 else None,
            kept=kept,
            dropped=dropped,
            heads_from=layers[0].hints.from_model,
            left_out=list(file.ignored),
            unconverted=fitting_prefixes(
                {name: file.infos[name].shape for name in kept}, layers[0].layout
            ),
            optimizer_state=[
                name
                for name in kept
                if name.rpartition(".")[2] in OPTIMIZER_STATE
                and file.infos[name].shape in of_layers
            ],
            not_carried=[key_in_words(*each) for each in unread.items()],
            path=str(written_to),
            missing=known.missing([layer.label for layer in layers], file),
            dequantised=[name for name in file.quantised if name not in dropped],
            joined=norms_to_join(target_layout, plan.specs, ranks or 1),
            metadata_left_out=lost,
            plan=plan.record(CALLER if source is not None else "", metadata) if dry_run else None,
        )


def _file_in(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the file to write: in an existing folder, its weights file, unless it has other
    weights already.
    """
    if not Path(path).suffix and not os.path.exists(path):
        raise InputError(path, "have a suffix such as .safetensors, or be an existing folder")
    if not os.path.isdir(path) or Path(path).suffix in SUFFIXES:
        return path
    name = "model.safetensors"
    if others := sorted(
        each for each in os.listdir(path) if Path(each).suffix in SUFFIXES and each != name
    ):
        raise InputError(
            "a folder to write into", "hold no other weights", f"{others[0]} in {os.fspath(path)}"
        )
    return Path(path) / name


def _ignored(layers: Iterable[FileLayer], known: Iterable[str], target: Layout) -> set[str]:
    """Return names (with wildcards) under layer prefixes that are weights of neither the layers nor
    the target.
    """
    found = {*known} | {name for layer in layers for name in layer.layout.ignored}
    found |= {name for layer in layers if layer.model is not None for name in layer.model.ignored}
    found |= {name for layer in layers for name in unused_in(layer.layout, layer.spec)}
    return found - {tensor.name for tensor in (*target.tensors, *target.others)}


def _to_write(layer: FileLayer) -> Written:
    """Return a layer with the features that it may lose unasked: not RoPE, if a configuration says
    that it has it.
    """
    but_for = () if layer.hints.from_model == "config.json" else ("rope",)
    return Written(layer.spec, but_for, layer.hints.unread)


def _written(layer: FileLayer, target: Layout, drop: Collection[str]) -> AttentionSpec:
    """Return a layer's spec in the target, which can hold it: without dropped features, and with
    added biases.
    """
    spec = without(layer.spec, [name for name in lost_in(target, layer.spec) if name in drop])
    try:
        placements(spec, target)
    except LayoutMismatchError:
        return with_all_biases(spec)
    return spec


def _targets(
    layers: list[FileLayer], prefix: str, to_prefix: str
) -> tuple[dict[str, list[FileLayer]], bool]:
    """Return the layers under each prefix of the target, and whether they are stacked there."""
    places, to_places = prefix.count("{i}"), to_prefix.count("{i}")
    kinds = {layer.index is not None for layer in layers}
    is_stack = kinds == {True} and not ENTRY.fullmatch(prefix)
    takes_apart, stacks_up = (
        is_stack and to_places == places + 1,
        kinds == {False} and (places, to_places) == (1, 0),
    )
    if len(kinds) > 1 or not (to_places == places or takes_apart or stacks_up):
        raise InputError(
            "to_prefix",
            "have as many {i} as the source, one more to split a stack, or none to stack "
            "numbered layers",
            to_prefix=to_prefix,
            prefix=prefix,
        )
    targets: dict[str, list[FileLayer]] = {}
    for layer in layers:
        numbers = (*layer.numbers, str(layer.index)) if takes_apart else layer.numbers
        to = to_prefix
        for number in () if stacks_up else numbers:
            to = to.replace("{i}", number, 1)
        targets.setdefault(to, []).append(layer)
    if stacks_up:
        (group,) = targets.values()
        group.sort(key=lambda layer: int(layer.numbers[0]))
        numbers = [int(layer.numbers[0]) for layer in group]
        if numbers != list(range(len(group))):
            raise InputError(
                "layers", "be numbered from 0 without gaps to be stacked", layers=numbers
            )
        if len({(*layer.to_spec.weight_shapes.items(), layer.dtype) for layer in group}) > 1:
            raise InputError(
                "layers", f"have one shape and dtype to be stacked, but those of {prefix} differ"
            )
    return targets, stacks_up or (is_stack and not takes_apart)
