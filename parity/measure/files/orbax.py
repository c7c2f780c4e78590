"""Orbax checkpoints: folders that the library reads and writes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mha_spec import InputError
from parity.measure.files.small import read_json
from parity.measure.files.tensor_file import (
    DTYPES,
    TensorFile,
    TensorInfo,
    Tensors,
    flatten,
    library,
    nest,
    text_by_name,
)
from parity.measure.files.zipped import check_inflation
from parity.measure.text import in_line

MARKS = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
"""Files that identify a folder as a checkpoint; one is enough."""


def write_orbax(path: Path, tensors: Tensors) -> None:
    """Write a folder. The library needs all tensors at once, in twice their memory."""
    ocp = library(path, "orbax.checkpoint")
    empty = [name for name, info in tensors.infos.items() if not info.nbytes]
    if empty:
        raise InputError("tensors", "not be empty in an orbax checkpoint", tensors=empty[0])
    tree = _filled(nest(tensors.infos), tensors)
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(
                path, args=ocp.args.PyTreeSave(tree), custom_metadata=dict(tensors.metadata)
            )
    except Exception as error:
        raise OSError(f"{path.name} must be written by orbax, got {in_line(str(error))}") from None


def _filled(tree: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {
        key: _filled(node, tensors) if isinstance(node, dict) else tensors.read(node)
        for key, node in tree.items()
    }


def open_orbax(path: Path) -> TensorFile:
    """Open a folder, or its subfolder of arrays, as in a step of a checkpoint manager."""
    ocp = library(path, "orbax.checkpoint")
    import jax

    folder = _arrays_in(path)
    handler = ocp.PyTreeCheckpointHandler()
    checkpointer = ocp.Checkpointer(handler)
    tree = handler.metadata(folder).tree
    leaves = flatten(tree)
    infos = {}
    for name, leaf in leaves.items():
        if type(leaf) is not ocp.metadata.ArrayMetadata:
            continue  # text or a Python number
        if ".." in name.split("/"):  # some checkpoints have one folder per array
            raise InputError("names", "not lead out of the folder", names=name)
        if np.dtype(leaf.dtype).name not in DTYPES:
            raise InputError(name, f"hold one of {sorted(DTYPES)}", {name: leaf.dtype})
        infos[name] = TensorInfo.of(leaf.shape, DTYPES[np.dtype(leaf.dtype).name])
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    check_inflation(sum(info.nbytes for info in infos.values()), size)

    def fetch(name: str) -> np.ndarray:
        wanted = jax.tree.map(lambda leaf: leaf if leaf is leaves[name] else ocp.PLACEHOLDER, tree)
        as_numpy = jax.tree.map(
            lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), tree
        )  # JAX would narrow float64
        found = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(wanted, as_numpy))
        return flatten(found)[name]

    ignored = [name for name in leaves if name not in infos]
    release = checkpointer.close
    return TensorFile(
        path, "orbax", infos, _metadata(folder), fetch=fetch, release=release, ignored=ignored
    )


def _arrays_in(path: Path) -> Path:
    path = path.absolute()  # required by the library
    if (path / "_METADATA").exists():
        return path
    inside = sorted(folder for folder in path.iterdir() if (folder / "_METADATA").exists())
    if len(inside) != 1:
        names = [folder.name for folder in inside]
        raise InputError(
            path, "hold one orbax checkpoint of arrays", str(names), hint="name one of its folders"
        )
    return inside[0]


def _metadata(folder: Path) -> dict[str, str]:
    with suppress(FileNotFoundError):
        held = read_json(folder / "_CHECKPOINT_METADATA").get("custom_metadata")
        values = held if isinstance(held, dict) else {}
        return text_by_name(
            {name: x if isinstance(x, str) else json.dumps(x) for name, x in values.items()}
        )
    return {}
