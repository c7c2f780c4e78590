"""Orbax checkpoints: folders, which the library reads and writes."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from mha_spec import Refusal
from parity.files.tensor_file import (
    DTYPES,
    TensorFile,
    TensorInfo,
    Tensors,
    flatten,
    library,
    nest,
    parse_json,
    text_by_name,
)
from parity.files.zipped import check_inflation

MARKS = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
"""Files of which a folder with a checkpoint has one."""


def write_orbax(path: Path, tensors: Tensors) -> None:
    """Write a folder. The library wants all tensors at once: this is no way for what does not fit into memory twice."""
    ocp = library(path, "orbax.checkpoint")
    empty = [name for name, info in tensors.infos.items() if not info.nbytes]
    if empty:
        raise Refusal("tensors", "not be empty in an orbax checkpoint", tensors=empty[0])
    tree = _filled(nest(tensors.infos), tensors)
    failure = None
    try:
        with _quiet(), ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree), custom_metadata=dict(tensors.metadata))
    except Exception as error:
        failure = _in_short(error, path.name)
    if failure is not None:
        gc.collect()  # tasks that nobody waits for complain when they go: now, and not when all is over
        raise failure


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the library's threads say of an error that is raised, too; they go on for a while where it is."""

    def is_of_others(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname and "orbax" not in record.getMessage()

    def show(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":  # where a task failed when another one had
            hook(unraisable)

    hook, loggers = sys.unraisablehook, [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.addFilter(is_of_others)
    sys.unraisablehook = show
    yield
    sys.unraisablehook = hook
    for logger in loggers:
        logger.removeFilter(is_of_others)


def _in_short(error: Exception, name: str) -> OSError:
    """What the machine said, without the paths and codes that libraries put around it."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    number = getattr(error, "errno", None) or (int(code[1]) if code else None)
    if number is not None:
        return OSError(number, os.strerror(number))
    return OSError(f"{name} must be written by orbax, got {str(error).strip().partition(chr(10))[0][:300]}")


def _filled(tree: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {key: _filled(node, tensors) if isinstance(node, dict) else tensors.read(node) for key, node in tree.items()}


def open_orbax(path: Path) -> TensorFile:
    """Open a folder, or the one in it that holds the arrays, as a checkpoint manager's step does."""
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
            continue  # text, or a Python number
        if ".." in name.split("/"):  # some checkpoints have a folder for each array
            raise Refusal("names", "not lead out of the folder", names=name)
        if np.dtype(leaf.dtype).name not in DTYPES:
            raise Refusal(name, f"hold one of {sorted(DTYPES)}", {name: leaf.dtype})
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
        raise Refusal(path, "hold one orbax checkpoint of arrays", str(names), hint="name one of its folders")
    return inside[0]


def _metadata(folder: Path) -> dict[str, str]:
    with suppress(FileNotFoundError):
        held = parse_json((folder / "_CHECKPOINT_METADATA").read_bytes()).get("custom_metadata")
        values = held if isinstance(held, dict) else {}
        return text_by_name({name: x if isinstance(x, str) else json.dumps(x) for name, x in values.items()})
    return {}
