"""Orbax checkpoints: folders that the library reads and writes."""

from __future__ import annotations

from contextlib import ExitStack
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
    as_texts,
    flatten,
    library,
    nest,
)
from parity.measure.files.zipped import check_inflation
from parity.measure.text import in_line

MARKS = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
"""Files that identify a folder as a checkpoint; one is enough."""


def write_orbax(path: Path, tensors: Tensors) -> None:
    """Write a folder. The library needs all tensors at once, in twice their memory."""
    ocp = library(path, "orbax.checkpoint")
    for name, info in tensors.infos.items():
        if not info.nbytes:
            raise InputError("tensors", "not be empty in an orbax checkpoint", tensors=name)
    tree = _filled(nest(tensors.infos), tensors)
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(
                path, args=ocp.args.PyTreeSave(tree), custom_metadata=dict(tensors.metadata)
            )
    except Exception as error:
        raise OSError(f"{path.name} must be written by orbax, got {in_line(str(error))}") from None


def _filled(tree: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return a tree with tensors instead of their names."""
    filled = {}
    for key, node in tree.items():
        filled[key] = _filled(node, tensors) if isinstance(node, dict) else tensors.read(node)
    return filled


def open_orbax(path: Path) -> TensorFile:
    """Open a folder, or its subfolder of arrays, as in a step of a checkpoint manager."""
    ocp = library(path, "orbax.checkpoint")
    import jax

    folder = _arrays_in(path)
    handler = ocp.PyTreeCheckpointHandler()
    with ExitStack() as stack:
        checkpointer = stack.enter_context(ocp.Checkpointer(handler))
        tree = handler.metadata(folder).tree
        leaves = flatten(tree)
        infos = {}
        for name, leaf in leaves.items():
            if type(leaf) is not ocp.metadata.ArrayMetadata:
                continue  # text or a Python number, whose class is a subclass
            infos[name] = _info(name, leaf)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        check_inflation(sum(info.nbytes for info in infos.values()), size)

        def fetch(name: str) -> np.ndarray:
            # The library reads no placeholders. It returns JAX's arrays by default, which would
            # narrow float64.
            requested = jax.tree.map(
                lambda leaf: leaf if leaf is leaves[name] else ocp.PLACEHOLDER, tree
            )
            as_numpy = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            args = ocp.args.PyTreeRestore(requested, as_numpy)
            return flatten(checkpointer.restore(folder, args=args))[name]

        ignored = [name for name in leaves if name not in infos]
        metadata = _metadata(folder)
        release = stack.pop_all().close
        return TensorFile(
            path, "orbax", infos, metadata, fetch=fetch, release=release, ignored=ignored
        )


def _info(name: str, leaf: Any) -> TensorInfo:
    """Return the shape and the dtype of an array in a checkpoint."""
    # Some checkpoints have one folder per array; an absolute name would replace the folder.
    if name.startswith("/") or ".." in name.split("/"):
        raise InputError("names", "not lead out of the folder", names=name)
    dtype = np.dtype(leaf.dtype).name
    if dtype not in DTYPES:
        raise InputError(name, f"hold one of {sorted(DTYPES)}", {name: leaf.dtype})
    return TensorInfo.of(leaf.shape, DTYPES[dtype])


def _arrays_in(path: Path) -> Path:
    path = path.absolute()  # required by the library
    if (path / "_METADATA").exists():
        return path
    checkpoints = sorted(folder for folder in path.iterdir() if (folder / "_METADATA").exists())
    if len(checkpoints) != 1:
        names = [folder.name for folder in checkpoints]
        raise InputError(
            path, "hold one orbax checkpoint of arrays", str(names), hint="name one of its folders"
        )
    return checkpoints[0]


def _metadata(folder: Path) -> dict[str, str]:
    """Return the custom metadata of a checkpoint as text."""
    try:
        values = read_json(folder / "_CHECKPOINT_METADATA").get("custom_metadata")
    except FileNotFoundError:
        return {}
    if not isinstance(values, dict):
        return {}
    return as_texts(values)
