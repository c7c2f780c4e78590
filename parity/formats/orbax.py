"""Orbax checkpoints: folders, which the library reads and writes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.formats.tensor_file import DTYPES, TensorFile, TensorInfo, flatten, nest, parse_json, text_by_name
from parity.formats.zipped import check_inflation

if TYPE_CHECKING:
    from parity.formats.writing import Tensors

MARKS = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
"""Files of which a folder with a checkpoint has one."""


def write_orbax(path: Path, tensors: Tensors) -> None:
    """Write a folder. The library wants all tensors at once: this is no way for what does not fit into memory twice."""
    ocp = _library(path)
    empty = [name for name, info in tensors.infos.items() if not info.nbytes]
    if empty:
        raise ValueError(f"tensors must not be empty in an orbax checkpoint, got {empty[0]}")
    tree = _filled(nest(tensors.infos), tensors)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree), custom_metadata=dict(tensors.metadata))


def _filled(tree: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {key: _filled(node, tensors) if isinstance(node, dict) else tensors.read(node) for key, node in tree.items()}


def open_orbax(path: Path) -> TensorFile:
    """Open a folder, or the one in it that holds the arrays, as a checkpoint manager's step does."""
    ocp = _library(path)
    import jax

    folder = _arrays_in(path)
    handler = ocp.PyTreeCheckpointHandler()
    checkpointer = ocp.Checkpointer(handler)
    tree = handler.metadata(folder).tree
    leaves = flatten(tree)
    infos = {}
    for name, leaf in leaves.items():
        if type(leaf) is not ocp.metadata.ArrayMetadata:
            continue  # text, or a Python number
        if ".." in name.split("/"):  # some checkpoints have a folder for each array
            raise ValueError(f"names must not lead out of the folder, got {name}")
        if np.dtype(leaf.dtype).name not in DTYPES:
            raise ValueError(f"{name} must hold one of {sorted(DTYPES)}, got {leaf.dtype}")
        infos[name] = TensorInfo.of(leaf.shape, DTYPES[np.dtype(leaf.dtype).name])
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    check_inflation(sum(info.nbytes for info in infos.values()), size)

    def fetch(name: str) -> np.ndarray:
        wanted = jax.tree.map(lambda leaf: leaf if leaf is leaves[name] else ocp.PLACEHOLDER, tree)
        as_numpy = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), tree)  # JAX would narrow float64
        found = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(wanted, as_numpy))
        return flatten(found)[name]

    ignored = [name for name in leaves if name not in infos]
    release = checkpointer.close
    return TensorFile(path, "orbax", infos, _metadata(folder), fetch=fetch, release=release, ignored=ignored)


def _arrays_in(path: Path) -> Path:
    path = path.absolute()  # which the library insists on
    if (path / "_METADATA").exists():
        return path
    inside = sorted(folder for folder in path.iterdir() if (folder / "_METADATA").exists())
    if len(inside) != 1:
        names = [folder.name for folder in inside]
        raise ValueError(f"{path} must hold one orbax checkpoint of arrays, got {names}; name one of its folders")
    return inside[0]


def _metadata(folder: Path) -> dict[str, str]:
    with suppress(FileNotFoundError):
        return text_by_name(parse_json((folder / "_CHECKPOINT_METADATA").read_bytes()).get("custom_metadata"))
    return {}


def _library(path: Path) -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(f"{path} needs orbax-checkpoint: {error}") from None
    return ocp
