"""Checkpoints whose heads are divided over ranks, a file for each: read as one, and written.

How a tensor is divided follows from its layout, where it holds heads; of the others the layout says it by their names.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mha_spec import AttentionSpec, Refusal
from mha_spec.rules import as_count
from mha_spec.shares import OF_QUERIES, axis_of_heads
from parity.conversion.layouts import LAYOUTS, Layout, Tensor
from parity.conversion.layouts.layout import Ranks
from parity.conversion.prefixes import join
from parity.files import TensorFile, TensorInfo, open_tensors, write_tensors
from parity.files.reading import SUFFIXES
from parity.files.target import locked, move, scratch_beside
from parity.sharding.shard import ShardPlan, shard_spec

Shapes = Mapping[str, tuple[int, ...]]

ENTRY = re.compile(r".*\[\d+\]", re.DOTALL)  # the label of a layer of a stack

SAID = "ranks"
"""The number of ranks in the metadata of files that were written here."""

NORMS = "ranks.norms"
"""The names of the norms that they divide, there, too: one that they copy may have the same shape."""


class Division(NamedTuple):
    """How a tensor is divided over ranks: on an axis, in each of so many blocks by itself; None where it is copied."""

    axis: int | None
    blocks: int = 1


def open_checkpoint(path: str | os.PathLike[str]) -> TensorFile:
    """Open a checkpoint: a folder of the files of ranks as the whole that they are parts of, all else as it is.

    Args:
        path: as `open_tensors` takes it.

    Raises:
        As `open_tensors`.
        ValueError: if it is the file of one rank of several, one is missing, or they do not belong together.
    """
    path = Path(path)
    for layout in LAYOUTS.values():
        if layout.ranks is None:
            continue
        if path.is_dir():
            files = _files_in(path, layout.ranks)
            others = [name for name in os.listdir(path) if Path(name).suffix in SUFFIXES and path / name not in files]
            if others:  # a folder as any other, which may have the same weights in two forms
                continue
            if strays := sorted({*path.glob(layout.ranks.file.format(rank="*"))} - {*files}):
                raise Refusal(path, f"have a file for each rank, {layout.ranks.file}", str(strays[0]))
            if files:
                return _joined(path, layout, layout.ranks, files)
        elif path.is_file() and _is_of_rank(path, layout.ranks):
            _refuse_alone(path, layout.ranks)
    file = open_tensors(path)
    if (count := file.metadata.get(SAID, "1")) != "1":
        file.close()
        raise Refusal(path, f"be read with the files of all {count} ranks", "that of one")
    return file


# ---- Which files -----------------------------------------------------------------------------------------------------


def _expression(ranks: Ranks) -> str:
    return rf"(?:.*/)?{re.escape(ranks.file)}".replace(r"\{rank\}", r"(\d{2,})")


def _is_of_rank(path: Path, ranks: Ranks) -> bool:
    return re.fullmatch(_expression(ranks), path.absolute().as_posix()) is not None


def _rank_of(path: Path, ranks: Ranks) -> int:
    match = re.fullmatch(_expression(ranks), path.absolute().as_posix())
    return int(match[1]) if match else -1


def _files_in(folder: Path, ranks: Ranks) -> list[Path]:
    """The files of ranks in a folder, in their order."""
    files = [path for path in folder.glob(ranks.file.format(rank="*")) if _is_of_rank(path, ranks)]
    return sorted(files, key=lambda path: _rank_of(path, ranks))


def _refuse_alone(path: Path, ranks: Ranks) -> None:
    """Refuse the file of one rank of several."""
    folder = path.absolute().parents[ranks.file.count("/")]
    files, rank = _files_in(folder, ranks), _rank_of(path, ranks)
    if rank > 0 or len(files) > 1:
        raise Refusal(
            path,
            "be read with the files of all ranks",
            f"rank {rank} alone",
            hint=f"name the folder, which has those of {len(files)}",
        )


# ---- Reading ---------------------------------------------------------------------------------------------------------


def _joined(folder: Path, layout: Layout, ranks: Ranks, paths: list[Path]) -> TensorFile:
    """The files of all ranks as one, whose tensors are joined as they are read: memory holds one, and a rank's part."""
    numbers = [_rank_of(path, ranks) for path in paths]
    if missing := sorted({*range(numbers[-1])} - {*numbers}):
        raise Refusal(folder, f"have the files of all ranks, missing rank {missing[0]} of {numbers[-1] + 1}")
    with ExitStack() as stack:
        files = [stack.enter_context(open_tensors(path)) for path in paths]
        first = files[0]
        if (said := first.metadata.get(SAID, str(len(files)))) != str(len(files)):
            raise Refusal(folder, f"have the files of all {said} ranks", str(len(files)))
        for path, file in zip(paths, files, strict=True):
            differing = [
                name for name in {**first.infos, **file.infos} if first.infos.get(name) != file.infos.get(name)
            ]
            if differing:
                raise Refusal(path, "hold the tensors of rank 0, in parts as large", f"others: {differing[0]}")
        shapes = {name: info.shape for name, info in first.infos.items()}
        norms = _divided_norms(first, layout)
        divisions = {name: _division(name, shapes, layout, ranks, norms, len(files)) for name in shapes}
        infos = {name: _whole(info, divisions[name], len(files)) for name, info in first.infos.items()}
        metadata = {
            key: text
            for key, text in first.metadata.items()
            if key not in (SAID, NORMS) and all(file.metadata.get(key) == text for file in files)
        }

        def fetch(name: str) -> np.ndarray:
            return _join(folder, name, [partial(file.read, name) for file in files], infos[name], divisions[name])

        release = stack.pop_all().close
        return TensorFile(folder, first.format, infos, metadata, {}, fetch, release, list(first.ignored))


def _whole(info: TensorInfo, division: Division | None, count: int) -> TensorInfo:
    """What is known of a tensor whose parts are such; of one whose division is not known, what is of a part."""
    if division is None or division.axis is None:
        return info
    axis, shape = division.axis, info.shape
    return TensorInfo.of((*shape[:axis], shape[axis] * count, *shape[axis + 1 :]), info.dtype)


def _join(
    folder: Path, name: str, reads: list[Callable[[], np.ndarray]], info: TensorInfo, division: Division | None
) -> np.ndarray:
    """A tensor of the parts that ranks have."""
    if division is None:
        hint = f"leaves out {name}, whose division over ranks is unknown"
        raise Refusal(folder, "be read without its other tensors", remedy={"keep_rest": False}, hint=hint)
    whole = np.empty(info.shape, info.dtype)
    places = _parts(whole, division, len(reads))
    before = b""
    for rank, read in enumerate(reads):
        part = read()
        if division.axis is None and rank and part.tobytes() != before:
            raise Refusal(folder, "have the same values on all ranks", tensor=name, rank=rank)
        if division.axis is not None and part.tobytes() == before and (part != part.flat[0]).any():
            raise Refusal(
                folder,
                "have each head on one rank",
                tensor=name,
                ranks=[rank - 1, rank],
                hint="key/value heads that ranks share are not joined",
            )
        places[rank][...] = part.reshape(places[rank].shape)
        before = part.tobytes()
    return whole


# ---- Writing ---------------------------------------------------------------------------------------------------------


def write_ranks(
    folder: str | os.PathLike[str],
    layout: Layout,
    count: int,
    specs: Mapping[str, AttentionSpec],
    infos: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str],
    *,
    dry_run: bool = False,
) -> Path:
    """Write the files of all ranks into a new folder, all of them or none; memory holds one whole tensor at a time.

    Args:
        folder: to write; it must not be there, or be empty.
        layout: of the attention layers.
        count: number of ranks.
        specs: of the layers, by their labels.
        infos: shape and dtype of each whole tensor by name.
        read: gives a whole tensor; called once for each rank.
        metadata: text by name, kept in each file.
        dry_run: refuse what would be refused, and write nothing.

    Raises:
        OSError: if a file cannot be written.
        FileExistsError: if something is in the folder.
        TypeError: if the number of ranks is none.
        ValueError: if no program is known to divide the layout so, a layer cannot be divided, or it is not known how
            another tensor is.
    """
    folder, ranks = Path(folder), _check_ranks(layout, count, specs)
    shapes = {name: shape for name, (shape, _) in infos.items()}
    norms = [name for name in _norms_by_heads(layout, specs) if name in infos]
    divisions = {name: _known_division(name, shapes, layout, ranks, norms, count) for name in shapes}
    own = {name: (_shape_of_part(shapes[name], divisions[name], count), dtype) for name, (_, dtype) in infos.items()}

    def read_part(name: str, rank: int) -> np.ndarray:
        return _parts(read(name), divisions[name], count)[rank].reshape(own[name][0])

    said = {SAID: str(count), **({NORMS: json.dumps(norms)} if norms else {})}
    _refuse_used(folder)
    if dry_run:
        check_place(folder)
        return folder
    with scratch_beside(folder) as scratch:
        for rank in range(count):
            path = scratch / folder.name / ranks.file.format(rank=f"{rank:02}")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, own, partial(read_part, rank=rank), {**metadata, **said})
        _refuse_used(folder)
        move([folder.name], scratch, folder.parent)
    return folder


def _check_ranks(layout: Layout, count: int, specs: Mapping[str, AttentionSpec]) -> Ranks:
    """How a layout keeps ranks, of layers that so many can divide."""
    as_count("ranks", count)
    if layout.ranks is None:
        known = [each.name for each in LAYOUTS.values() if each.ranks is not None]
        raise Refusal(
            "ranks", f"be left out except for {', '.join(known)}", {"ranks": count, "layout.name": layout.name}
        )
    for label, spec in specs.items():
        if ENTRY.fullmatch(label):
            raise Refusal("ranks", "be left out of stacked layers", ranks=count, label=label)
        if spec.num_kv_heads % count:
            raise Refusal("ranks", f"divide num_kv_heads in {layout.name}", ranks=count, num_kv_heads=spec.num_kv_heads)
        shard_spec(spec, ShardPlan(count), 0, alone=False)
    return layout.ranks


def _known_division(
    name: str, shapes: Shapes, layout: Layout, ranks: Ranks, norms: Collection[str], count: int
) -> Division:
    """How a whole tensor is divided over so many ranks."""
    division = _division(name, shapes, layout, ranks, norms)
    if division is None:
        hint = "leaves it out, because its division over ranks is unknown"
        raise Refusal(name, "be left out of the files of ranks", remedy={"keep_rest": False}, hint=hint)
    if division.axis is not None and shapes[name][division.axis] % (division.blocks * count):
        raise Refusal(name, "divide over the ranks", {f"{name}.shape": shapes[name], "ranks": count})
    return division


def _shape_of_part(shape: tuple[int, ...], division: Division, count: int) -> tuple[int, ...]:
    axis = division.axis
    return shape if axis is None else (*shape[:axis], shape[axis] // count, *shape[axis + 1 :])


def _refuse_used(folder: Path) -> None:
    if os.path.lexists(folder) and not (folder.is_dir() and not os.listdir(folder)):
        raise FileExistsError(f"{folder} exists; the files of ranks are written into a new folder, or an empty one")


# ---- How tensors are divided -----------------------------------------------------------------------------------------


def _division(
    name: str, shapes: Shapes, layout: Layout, ranks: Ranks, norms: Collection[str], count: int = 1
) -> Division | None:
    """How a tensor is divided, None where that is not known.

    Args:
        name: its full name.
        shapes: of all tensors: those of a rank of several, or of the whole.
        layout: of the attention layers.
        ranks: the layout's.
        norms: the names of those that are divided.
        count: of how many ranks they are one's.
    """
    for tensor in (*layout.tensors, *layout.others):
        if name == tensor.name or name.endswith(f".{tensor.name}"):
            return Division(0 if name in norms else _axis_of(tensor))

    def is_of(patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    if name == ranks.embeddings:
        widths = {shape[0] for each, shape in shapes.items() if each.endswith(_out_of(layout))}
        return Division(1 if count > 1 and {shapes[name][-1] * count} == widths else 0)
    if is_of(ranks.rows):
        return Division(0)
    if is_of(ranks.columns):
        return Division(1)
    for pattern, other in ranks.gated:
        if fnmatch.fnmatchcase(name, pattern):
            taken = shapes.get(f"{name.rpartition('.')[0].rpartition('.')[0]}.{other}")
            times = 0 if taken is None else shapes[name][0] / taken[-1]
            return Division(0, int(times)) if times in (1, 2) else None
    return Division(None) if is_of(ranks.copied) else None


def norms_to_join(layout: Layout, specs: Mapping[str, AttentionSpec], count: int) -> list[str]:
    """The weights of norms over the width, in layers by their labels, whose mean squares so many ranks join."""
    wide = {label: spec for label, spec in specs.items() if spec.wide_norms}
    return [name for name in _norms_by_heads(layout, wide) if name.endswith(".weight")] if count > 1 else []


def _norms_by_heads(layout: Layout, specs: Mapping[str, AttentionSpec]) -> list[str]:
    """The names of norms that have something for each head, in layers by their labels."""
    return [
        join(label, tensor.name)
        for label, spec in specs.items()
        for tensor in layout.others
        if tensor.holds.partition(".")[0] in spec.norms and axis_of_heads(tensor.holds, spec) is not None
    ]


def _divided_norms(file: TensorFile, layout: Layout) -> list[str]:
    """The same of the file of a rank: as it says, if it was written here. Of others, what has an axis of heads, and
    norms of queries and keys that differ in width: those over a head, which are copied, are alike."""
    if SAID in file.metadata:
        return json.loads(file.metadata.get(NORMS, "[]"))
    named, found = {tensor.holds: tensor.name for tensor in layout.others}, list[str]()
    shapes = {name: info.shape for name, info in file.infos.items()}
    of_queries = named.get("q_norm.weight", "")
    for name, shape in shapes.items():
        if not of_queries or not (name == of_queries or name.endswith(f".{of_queries}")):
            continue
        prefix = name.removesuffix(of_queries)
        of_layer = [
            f"{prefix}{named[f'{norm}.{leaf}']}" for norm in ("q_norm", "k_norm") for leaf in ("weight", "bias")
        ]
        if len(shape) == 2 or len({shapes[each] for each in of_layer if each in shapes}) == 2:
            found += of_layer
    return found


def _axis_of(tensor: Tensor) -> int | None:
    """The axis of a tensor of attention on which its heads lie."""
    if tensor.is_whole:
        return OF_QUERIES.get(tensor.holds)
    return next((axis for axis, group in enumerate(tensor.groups) if "n" in group), None)


def _out_of(layout: Layout) -> str:
    """The name of what gives the output, whose rows are as many as the model is wide."""
    return next(tensor.name for tensor in layout.tensors if tensor.holds == "out" and tensor.kind == "weight")


def _parts(array: np.ndarray, division: Division, count: int) -> list[np.ndarray]:
    """Views of the parts of a tensor; of one that is copied, all of it for each rank."""
    axis, blocks = division
    if axis is None:
        return [array] * count
    split = array.reshape(*array.shape[:axis], blocks, count, -1, *array.shape[axis + 1 :])
    return list(np.moveaxis(split, axis + 1, 0))
