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
from parity.conversion.layouts import LAYOUTS, Layout
from parity.conversion.layouts.layout import Ranks
from parity.conversion.prefixes import ENTRY, join
from parity.files import TensorFile, TensorInfo, open_tensors, write_tensors
from parity.files.reading import SUFFIXES
from parity.files.target import locked, move, scratch_beside
from parity.sharding.shard import ShardPlan, shard_spec

Shapes = Mapping[str, tuple[int, ...]]

SAID = "ranks"
"""The number of ranks in the metadata of files that were written here."""

NORMS = "ranks.norms"
"""The names of the norms that they divide, there, too: one that they copy may have the same shape."""


class Division(NamedTuple):
    """The division of a tensor over ranks: on an axis, in each of so many blocks by itself; None where it is copied."""

    axis: int | None
    blocks: int = 1

    def part(self, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Return the shape of a part of a tensor."""
        return self._with_size(shape, lambda size: size // count)

    def whole(self, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Return the shape of a tensor with such parts."""
        return self._with_size(shape, lambda size: size * count)

    def _with_size(self, shape: tuple[int, ...], change: Callable[[int], int]) -> tuple[int, ...]:
        axis = self.axis
        return shape if axis is None else (*shape[:axis], change(shape[axis]), *shape[axis + 1 :])

    def parts(self, array: np.ndarray, count: int) -> list[np.ndarray]:
        """Return views of the parts of a tensor; of one that is copied, all of it for each rank."""
        axis = self.axis
        if axis is None:
            return [array] * count
        split = array.reshape(*array.shape[:axis], self.blocks, count, -1, *array.shape[axis + 1 :])
        return list(np.moveaxis(split, axis + 1, 0))


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
        if (ranks := layout.ranks) is None:
            continue
        if path.is_dir():
            files = _files_in(path, ranks)
            own = [*files.values()]
            if any(Path(name).suffix in SUFFIXES and path / name not in own for name in os.listdir(path)):
                continue  # a folder as any other, which may have the same weights in two forms
            if strays := sorted({*path.glob(ranks.file.format(rank="*"))} - {*own}):
                raise Refusal(path, f"have a file for each rank, {ranks.file}", str(strays[0]))
            if files:
                return _joined(path, layout, ranks, files)
        elif path.is_file() and (rank := _rank_of(path, ranks)) is not None:
            files = _files_in(path.absolute().parents[ranks.file.count("/")], ranks)
            if rank > 0 or len(files) > 1:
                hint = f"name the folder, which has those of {len(files)}"
                raise Refusal(path, "be read with the files of all ranks", f"rank {rank} alone", hint=hint)
    file = open_tensors(path)
    if (count := file.metadata.get(SAID, "1")) != "1":
        file.close()
        raise Refusal(path, f"be read with the files of all {count} ranks", "that of one")
    return file


# ---- Reading ---------------------------------------------------------------------------------------------------------


def _rank_of(path: Path, ranks: Ranks) -> int | None:
    """The rank whose file a path is."""
    expression = rf"(?:.*/)?{re.escape(ranks.file)}".replace(r"\{rank\}", r"(\d{2,})")
    match = re.fullmatch(expression, path.absolute().as_posix())
    return int(match[1]) if match else None


def _files_in(folder: Path, ranks: Ranks) -> dict[int, Path]:
    """The files of ranks in a folder, in their order."""
    files = ((_rank_of(path, ranks), path) for path in folder.glob(ranks.file.format(rank="*")))
    return dict(sorted((rank, path) for rank, path in files if rank is not None))


def _joined(folder: Path, layout: Layout, ranks: Ranks, paths: Mapping[int, Path]) -> TensorFile:
    """The files of all ranks as one, whose tensors are joined as they are read: memory holds one, and a rank's part."""
    if missing := sorted({*range(max(paths))} - {*paths}):
        raise Refusal(folder, f"have the files of all ranks, missing rank {missing[0]} of {max(paths) + 1}")
    count = len(paths)
    with ExitStack() as stack:
        files = [stack.enter_context(open_tensors(path)) for path in paths.values()]
        first = files[0]
        if (said := first.metadata.get(SAID, str(count))) != str(count):
            raise Refusal(folder, f"have the files of all {said} ranks", str(count))
        for path, file in zip(paths.values(), files, strict=True):
            names = {**first.infos, **file.infos}
            if differing := [name for name in names if first.infos.get(name) != file.infos.get(name)]:
                raise Refusal(path, "hold the tensors of rank 0, in parts as large", f"others: {differing[0]}")
        shapes = {name: info.shape for name, info in first.infos.items()}
        norms = _divided_norms(first, layout)
        divisions = {name: _division(name, shapes, layout, ranks, norms, count) for name in shapes}
        infos = {  # of a tensor whose division is not known, those of a part
            name: info
            if (known := divisions[name]) is None
            else TensorInfo.of(known.whole(info.shape, count), info.dtype)
            for name, info in first.infos.items()
        }
        metadata = {
            key: text
            for key, text in first.metadata.items()
            if key not in (SAID, NORMS) and all(file.metadata.get(key) == text for file in files)
        }

        def fetch(name: str) -> np.ndarray:
            return _join(folder, name, files, infos[name], divisions[name])

        release = stack.pop_all().close
        return TensorFile(folder, first.format, infos, metadata, {}, fetch, release, list(first.ignored))


def _join(
    folder: Path, name: str, files: Collection[TensorFile], info: TensorInfo, division: Division | None
) -> np.ndarray:
    """A tensor of the parts that ranks have."""
    if division is None:
        hint = f"leaves out {name}, whose division over ranks is unknown"
        raise Refusal(folder, "be read without its other tensors", remedy={"keep_rest": False}, hint=hint)
    whole = np.empty(info.shape, info.dtype)
    before = b""
    for rank, (file, place) in enumerate(zip(files, division.parts(whole, len(files)), strict=True)):
        part = file.read(name)
        if division.axis is None and rank and part.tobytes() != before:
            raise Refusal(folder, "have the same values on all ranks", tensor=name, rank=rank)
        if division.axis is not None and part.tobytes() == before and (part != part.flat[0]).any():
            hint = "key/value heads that ranks share are not joined"
            raise Refusal(folder, "have each head on one rank", tensor=name, ranks=[rank - 1, rank], hint=hint)
        place[...] = part.reshape(place.shape)
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
    divisions: dict[str, Division] = {}
    for name, shape in shapes.items():
        division = _division(name, shapes, layout, ranks, norms)
        if division is None:
            hint = "leaves it out, because its division over ranks is unknown"
            raise Refusal(name, "be left out of the files of ranks", remedy={"keep_rest": False}, hint=hint)
        if division.axis is not None and shape[division.axis] % (division.blocks * count):
            raise Refusal(name, "divide over the ranks", {f"{name}.shape": shape, "ranks": count})
        divisions[name] = division
    own = {name: (divisions[name].part(shape, count), dtype) for name, (shape, dtype) in infos.items()}
    metadata = {**metadata, SAID: str(count), **({NORMS: json.dumps(norms)} if norms else {})}

    def read_part(name: str, rank: int) -> np.ndarray:
        return divisions[name].parts(read(name), count)[rank].reshape(own[name][0])

    _refuse_used(folder)
    with scratch_beside(folder) as scratch:
        for rank in range(count):
            path = scratch / folder.name / ranks.file.format(rank=f"{rank:02}")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, own, partial(read_part, rank=rank), metadata, dry_run=dry_run)
        if not dry_run:
            with locked(folder.parent):
                _refuse_used(folder)
                move([folder.name], scratch, folder.parent)
    return folder


def _check_ranks(layout: Layout, count: int, specs: Mapping[str, AttentionSpec]) -> Ranks:
    """Return how a layout keeps ranks, of layers that so many can divide."""
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


def _refuse_used(folder: Path) -> None:
    if os.path.lexists(folder) and not (folder.is_dir() and not os.listdir(folder)):
        raise FileExistsError(f"{folder} exists; the files of ranks are written into a new folder, or an empty one")


# ---- How tensors are divided -----------------------------------------------------------------------------------------


def _division(
    name: str, shapes: Shapes, layout: Layout, ranks: Ranks, norms: Collection[str], count: int = 1
) -> Division | None:
    """Return the division of a tensor, None where it is not known.

    The shapes are those of the tensors of one of `count` ranks, or of the whole; of the norms those named are divided.
    """
    for tensor in (*layout.tensors, *layout.others):
        if name == tensor.name or name.endswith(f".{tensor.name}"):
            axes = [axis for axis, group in enumerate(tensor.groups) if "n" in group]
            axis = OF_QUERIES.get(tensor.holds) if tensor.is_whole else next(iter(axes), None)
            return Division(0 if name in norms else axis)
    if name == ranks.embeddings:  # whose last axis is as wide as the model, and so are the rows of the output
        out = next(tensor.name for tensor in layout.tensors if (tensor.holds, tensor.kind) == ("out", "weight"))
        widths = {shape[0] for each, shape in shapes.items() if each.endswith(out)}
        return Division(1 if count > 1 and {shapes[name][-1] * count} == widths else 0)
    for patterns, division in ((ranks.rows, Division(0)), (ranks.columns, Division(1))):
        if _is_of(name, patterns):
            return division
    for pattern, other in ranks.gated:
        if fnmatch.fnmatchcase(name, pattern):
            taken = shapes.get(f"{name.rpartition('.')[0].rpartition('.')[0]}.{other}")
            times = 0 if taken is None else shapes[name][0] / taken[-1]
            return Division(0, int(times)) if times in (1, 2) else None
    return Division(None) if _is_of(name, ranks.copied) else None


def _is_of(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


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
    """The names of such norms in the file of a rank, which says them itself if it was written here.

    Else they are those with an axis of heads, and norms of queries and keys that differ in width: those over a head,
    which are copied, are alike.
    """
    if SAID in file.metadata:
        return json.loads(file.metadata.get(NORMS, "[]"))
    named = {tensor.holds: tensor.name for tensor in layout.others}
    of_queries = named.get("q_norm.weight", "no such name")
    found: list[str] = []
    for name, info in file.infos.items():
        prefix = name.removesuffix(of_queries)
        if prefix == name or not (prefix == "" or prefix.endswith(".")):
            continue
        of_layer = [
            f"{prefix}{named[f'{norm}.{leaf}']}" for norm in ("q_norm", "k_norm") for leaf in ("weight", "bias")
        ]
        widths = {file.infos[each].shape for each in of_layer if each in file.infos}
        if len(info.shape) == 2 or len(widths) == 2:
            found += of_layer
    return found
