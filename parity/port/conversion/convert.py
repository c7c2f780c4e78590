"""Convert between layouts: weights in memory, layers in files, whole checkpoints in bounded
memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Unpack

from mha_spec import AttentionSpec, InputError, InputTypeError
from parity.measure.core.weights import Weights
from parity.measure.files import write_tensors
from parity.port.conversion.checkpoint import Checkpoint
from parity.port.conversion.hints import CALLER, LayerHints, LayerKeywords
from parity.port.conversion.layouts import find_layout, from_canonical, to_canonical
from parity.port.conversion.metadata import metadata_of
from parity.port.conversion.plan import Converted, target_file
from parity.port.conversion.prefixes import join


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
        source, target: names of layouts: `mha-parity inspect --layouts` lists them.
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

    Example:
        >>> module = torch.nn.MultiheadAttention(64, 8)
        >>> kernels = parity.convert(
        ...     module.state_dict(),
        ...     source="torch.nn.MultiheadAttention",
        ...     target="flax.nnx",
        ...     num_heads=8,
        ... )
        >>> kernels["query.kernel"].shape
        (64, 8, 8)
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
        layout: layout of the layer; default: from the file's metadata or the model's family.
        prefix: prefix of the layer's tensor names, without the last dot; default: from the
            metadata. A layer of a stack, whose tensors have a leading axis of layers, has an index:
            `layers.self_attn[3]`.
        keywords: num_heads, num_kv_heads, head_dim, rope, spec, as in `convert`; default: from the
            file's metadata, of the GGUF file, or of the `config.json` next to the file.

    Returns:
        Canonical weights, and the specification of the layer.

    Raises:
        OSError: if the file cannot be read.
        ValueError: as in `convert`, or if the file contains no such layer.

    Warns:
        IgnoredSettingsWarning: if the configuration specifies attention features that are not read,
            such as scaled or partial RoPE, or soft caps, windows and scales in a GGUF file.

    Example:
        >>> parity.save("layer.safetensors", torch.nn.MultiheadAttention(64, 8))
        >>> weights, spec = parity.load("layer.safetensors")
        >>> weights["q_proj.weight"].shape
        (64, 64)
    """
    with Checkpoint.open(path) as checkpoint:
        layers = checkpoint.layers(LayerHints.by(CALLER, **keywords), layout, prefix)
        layers.warn_if_incomplete()
        labels = [layer.label for layer in layers.in_order]
        if len(labels) != 1:
            got = f"one of {len(labels)} in {path}: {labels[0]} to {labels[-1]}"
            raise InputError("prefix", "belong to one layer", got)
        return layers.in_order[0].load()


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
            hint="`parity.spec_of` returns the specification of a module",
        )
    tensors = from_canonical(weights, spec, target)
    laid_out = {join(prefix, name): array for name, array in tensors.items()}
    infos = {name: (array.shape, array.dtype) for name, array in laid_out.items()}
    write_tensors(path, infos, laid_out.__getitem__, metadata_of(target, {prefix: spec}, prefix))


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
        source: layout of the layers; default: from the file's metadata or the model's family.
        target: layout to write.
        prefix: prefix of a layer's tensor names, without the last dot; `{i}` stands for its number.
            Default: from the metadata, otherwise the prefixes of all attention layers of the
            model, otherwise empty.
        to_prefix: prefix in the target; default: the prefix of the target layout, if it has one, or
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
            name, layers cannot be stacked, the target is the source, the existing target has a
            different format, or the target cannot represent the layers.

    Example:
        >>> parity.save("layer.safetensors", torch.nn.MultiheadAttention(64, 8))
        >>> target = "flax.nnx"
        >>> converted = parity.convert_file("layer.safetensors", "flax.safetensors", target=target)
        >>> converted.source
        'canonical'
    """
    target_layout = find_layout(target, "target")
    if not ranks:
        target_path = target_file(target_path)
    with Checkpoint.open(source_path) as checkpoint:
        caller = LayerHints.by(CALLER, **keywords)
        layers = checkpoint.layers(caller, source, prefix, argument="source", drop=drop)
        plan = layers.plan(
            target_layout,
            to_prefix=to_prefix,
            keep_rest=keep_rest,
            drop=drop,
            fill_bias=fill_bias,
        )
        return plan.write(
            target_path,
            max_shard_bytes=max_shard_bytes,
            ranks=ranks,
            force=force,
            dry_run=dry_run,
            on_tensor=on_tensor,
        )
