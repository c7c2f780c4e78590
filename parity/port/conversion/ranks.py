"""Checkpoints whose heads are divided over ranks, one file per rank: read them as one, and write
them.

The layout decides how a tensor with heads is divided; for other tensors, it lists the division by
name.
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

from mha_spec import AttentionSpec, InputError
from mha_spec.rules import as_count
from mha_spec.shares import OF_QUERIES, axis_of_heads
from parity.measure.files import FileTensor, TensorFile, TensorInfo, open_tensors, write_tensors
from parity.measure.files.reading import SUFFIXES
from parity.measure.files.target import (
    Batch,
    check_place,
    errors_name,
    locked,
    move,
    scratch_beside,
)
from parity.measure.files.tensor_file import parse_json
from parity.measure.sharding.shard import ShardPlan, shard_spec
from parity.port.conversion.layouts import LAYOUTS, Layout
from parity.port.conversion.layouts.layout import Ranks
from parity.port.conversion.prefixes import ENTRY, join

Shapes = Mapping[str, tuple[int, ...]]

NUM_RANKS = "ranks"
"""Metadata key of the number of ranks in files that mha-parity wrote."""

NORMS = "ranks.norms"
"""Metadata key of the names of divided norms, because a copied norm may have the same shape."""


class Division(NamedTuple):
    """The division of a tensor over ranks: along an axis, separately in each block; an axis of None
    means a copy.
    """

    axis: int | None
    blocks: int = 1

    def part(self, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Return the shape of a rank's part of a tensor."""
        return self._with_size(shape, lambda size: size // count)

    def whole(self, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Return the shape of a tensor with such parts."""
        return self._with_size(shape, lambda size: size * count)

    def _with_size(self, shape: tuple[int, ...], change: Callable[[int], int]) -> tuple[int, ...]:
        axis = self.axis
        return shape if axis is None else (*shape[:axis], change(shape[axis]), *shape[axis + 1 :])

    def parts(self, array: np.ndarray, count: int) -> list[np.ndarray]:
        """Return views of the ranks' parts of a tensor; for a copied one, the whole for each
        rank.
        """
        axis = self.axis
        if axis is None:
            return [array] * count
        split = array.reshape(*array.shape[:axis], self.blocks, count, -1, *array.shape[axis + 1 :])
        return list(np.moveaxis(split, axis + 1, 0))


def open_checkpoint(path: str | os.PathLike[str]) -> TensorFile:
    """Open a checkpoint; a folder of rank files is opened as the joined whole.

    Args:
        path: as in `open_tensors`.

    Raises:
        As `open_tensors`.
        ValueError: if it is a single rank's file out of several, a rank is missing, or the files do
            not match.
    """
    path = Path(path)
    for layout in LAYOUTS.values():
        if (ranks := layout.ranks) is None:
            continue
        if path.is_dir():
            files = _files_in(path, ranks)
            own = [*files.values()]
            if any(
                Path(name).suffix in SUFFIXES and path / name not in own
                for name in os.listdir(path)
            ):
                continue  # an ordinary folder, which may have the same weights in two forms
            if strays := sorted({*path.glob(ranks.file.format(rank="*"))} - {*own}):
                raise InputError(path, f"have a file for each rank, {ranks.file}", str(strays[0]))
            if files:
                return _joined(path, layout, ranks, files)
        elif path.is_file() and (rank := _rank_of(path, ranks)) is not None:
            files = _files_in(path.absolute().parents[ranks.file.count("/")], ranks)
            if rank > 0 or len(files) > 1:
                hint = f"pass the folder, which has {len(files)} files"
                raise InputError(
                    path, "be read with the files of all ranks", f"rank {rank} alone", hint=hint
                )
    file = open_tensors(path)
    if (count := file.metadata.get(NUM_RANKS, "1")) != "1":
        file.close()
        raise InputError(path, f"be read with the files of all {count} ranks", "that of one")
    return file


# ---- Reading -------------------------------------------------------------------------------------


def _rank_of(path: Path, ranks: Ranks) -> int | None:
    """Return the rank of a file by its path; None if it is not a rank's file."""
    expression = rf"(?:.*/)?{re.escape(ranks.file)}".replace(r"\{rank\}", r"(\d{2,})")
    match = re.fullmatch(expression, path.absolute().as_posix())
    return int(match[1]) if match else None


def _files_in(folder: Path, ranks: Ranks) -> dict[int, Path]:
    """Return the rank files in a folder, in order."""
    files = ((_rank_of(path, ranks), path) for path in folder.glob(ranks.file.format(rank="*")))
    return dict(sorted((rank, path) for rank, path in files if rank is not None))


def _joined(folder: Path, layout: Layout, ranks: Ranks, paths: Mapping[int, Path]) -> TensorFile:
    """Open the files of all ranks as one; reading a tensor joins it, with that tensor and one part
    in memory.
    """
    if missing := sorted({*range(max(paths))} - {*paths}):
        raise InputError(
            folder, f"have the files of all ranks, missing rank {missing[0]} of {max(paths) + 1}"
        )
    count = len(paths)
    with ExitStack() as stack:
        files = [stack.enter_context(open_tensors(path)) for path in paths.values()]
        first = files[0]
        if (expected := first.metadata.get(NUM_RANKS, str(count))) != str(count):
            raise InputError(folder, f"have the files of all {expected} ranks", str(count))
        for path, file in zip(paths.values(), files, strict=True):
            names = {**first.infos, **file.infos}
            if differing := [
                name for name in names if first.infos.get(name) != file.infos.get(name)
            ]:
                raise InputError(
                    path, "hold the tensors of rank 0, with equal shapes", f"others: {differing[0]}"
                )
        shapes = {name: info.shape for name, info in first.infos.items()}
        norms = _divided_norms(first, layout)
        divisions = {name: _division(name, shapes, layout, ranks, norms, count) for name in shapes}
        infos = {  # a tensor with unknown division has the shape of its part
            name: info
            if (known := divisions[name]) is None
            else TensorInfo.of(known.whole(info.shape, count), info.dtype)
            for name, info in first.infos.items()
        }
        metadata = {
            key: text
            for key, text in first.metadata.items()
            if key not in (NUM_RANKS, NORMS)
            and all(file.metadata.get(key) == text for file in files)
        }

        def fetch(name: str) -> np.ndarray:
            return _join(folder, name, files, infos[name], divisions[name])

        release = stack.pop_all().close
        return TensorFile(
            folder, first.format, infos, metadata, {}, fetch, release, list(first.ignored)
        )


def _join(
    folder: Path,
    name: str,
    files: Collection[TensorFile],
    info: TensorInfo,
    division: Division | None,
) -> np.ndarray:
    """Join the parts of a tensor."""
    if division is None:
        hint = f"leaves out {name}, whose division over ranks is unknown"
        raise InputError(
            folder, "be read without its other tensors", remedy={"keep_rest": False}, hint=hint
        )
    whole = np.empty(info.shape, info.dtype)
    before = b""
    for rank, (file, place) in enumerate(
        zip(files, division.parts(whole, len(files)), strict=True)
    ):
        part = file.read(name)
        if division.axis is None and rank and part.tobytes() != before:
            raise InputError(folder, "have the same values on all ranks", tensor=name, rank=rank)
        if division.axis is not None and part.tobytes() == before and (part != part.flat[0]).any():
            hint = "key/value heads that ranks share are not joined"
            raise InputError(
                folder, "have each head on one rank", tensor=name, ranks=[rank - 1, rank], hint=hint
            )
        place[...] = part.reshape(place.shape)
        before = part.tobytes()
    return whole


# ---- Writing -------------------------------------------------------------------------------------


def write_ranks(
    folder: str | os.PathLike[str],
    layout: Layout,
    count: int,
    specs: Mapping[str, AttentionSpec],
    infos: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    read: Callable[[str], np.ndarray | FileTensor],
    metadata: Mapping[str, str],
    *,
    dry_run: bool = False,
) -> Path:
    """Write the files of all ranks into a new folder, all or none; memory holds one whole tensor at
    a time.

    Args:
        folder: folder to write; it must be missing or empty.
        layout: of the attention layers.
        count: number of ranks.
        specs: specifications of the layers, by label.
        infos: shape and dtype of each whole tensor, by name.
        read: returns a whole tensor by name; called once per rank.
        metadata: text by name, stored in each file.
        dry_run: run all checks, and write nothing.

    Raises:
        OSError: if a file cannot be written.
        FileExistsError: if the folder is not empty.
        TypeError: if the number of ranks is not an integer.
        ValueError: if the layout does not support ranks, a layer cannot be divided, or the division
            of another tensor is unknown.
    """
    given, folder, ranks = os.fspath(folder), Path(folder), _check_ranks(layout, count, specs)
    shapes = {name: shape for name, (shape, _) in infos.items()}
    norms = [name for name in _norms_by_heads(layout, specs) if name in infos]
    divisions: dict[str, Division] = {}
    for name, shape in shapes.items():
        division = _division(name, shapes, layout, ranks, norms)
        if division is None:
            hint = "leaves it out, because its division over ranks is unknown"
            raise InputError(
                name, "be left out of the files of ranks", remedy={"keep_rest": False}, hint=hint
            )
        if division.axis is not None and shape[division.axis] % (division.blocks * count):
            raise InputError(
                name, "divide over the ranks", {f"{name}.shape": shape, "ranks": count}
            )
        divisions[name] = division
    own = {
        name: (divisions[name].part(shape, count), dtype) for name, (shape, dtype) in infos.items()
    }
    metadata = {**metadata, NUM_RANKS: str(count), **({NORMS: json.dumps(norms)} if norms else {})}

    def read_part(name: str, rank: int) -> np.ndarray:
        return divisions[name].parts(np.asarray(read(name)), count)[rank].reshape(own[name][0])

    _refuse_used(folder)
    if not folder.exists():
        check_place(given.rstrip(os.sep))
    place = Path(os.path.realpath(folder))  # `.` has no name, and its parent is `.`
    with errors_name(folder), scratch_beside(place) as scratch:
        written = scratch / place.name
        for rank in range(count):
            path = written / ranks.file.format(rank=f"{rank:02}")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, own, partial(read_part, rank=rank), metadata, dry_run=dry_run)
        if not dry_run:
            with locked(place.parent):
                _refuse_used(folder)
                if place.is_dir():  # it is filled, not replaced: it may be the current folder
                    move(Batch(sorted(os.listdir(written)), written, place))
                else:
                    move(Batch([place.name], scratch, place.parent))
    return folder


def _check_ranks(layout: Layout, count: int, specs: Mapping[str, AttentionSpec]) -> Ranks:
    """Return how a layout stores ranks; reject layers that this number of ranks cannot divide."""
    as_count("ranks", count)
    if layout.ranks is None:
        known = [each.name for each in LAYOUTS.values() if each.ranks is not None]
        raise InputError(
            "ranks",
            f"be left out except for {', '.join(known)}",
            {"ranks": count, "layout.name": layout.name},
        )
    for label, spec in specs.items():
        if ENTRY.fullmatch(label):
            raise InputError("ranks", "be left out of stacked layers", ranks=count, label=label)
        if spec.num_kv_heads % count:
            raise InputError(
                "ranks",
                f"divide num_kv_heads in {layout.name}",
                ranks=count,
                num_kv_heads=spec.num_kv_heads,
            )
        shard_spec(spec, ShardPlan(count), 0, alone=False)
    return layout.ranks


def _refuse_used(folder: Path) -> None:
    if os.path.lexists(folder) and not (folder.is_dir() and not os.listdir(folder)):
        raise FileExistsError(
            f"{folder} exists; the files of ranks are written into a new folder, or an empty one"
        )


# ---- How tensors are divided ---------------------------------------------------------------------


def _division(
    name: str, shapes: Shapes, layout: Layout, ranks: Ranks, norms: Collection[str], count: int = 1
) -> Division | None:
    """Return the division of a tensor; None if it is unknown.

    The shapes are those of one of `count` ranks, or of whole tensors if `count` is 1; `norms` are
    the divided norms.
    """
    for tensor in (*layout.tensors, *layout.others):
        if name == tensor.name or name.endswith(f".{tensor.name}"):
            axes = [axis for axis, group in enumerate(tensor.groups) if "n" in group]
            axis = OF_QUERIES.get(tensor.holds) if tensor.is_whole else next(iter(axes), None)
            return Division(0 if name in norms else axis)
    if name == ranks.embeddings:  # if whole, its last axis equals the rows of the output
        out = next(
            tensor.name
            for tensor in layout.tensors
            if (tensor.holds, tensor.kind) == ("out", "weight")
        )
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
    """Return the weights of width norms whose mean squares must be joined over ranks, by label and
    name.
    """
    wide = {label: spec for label, spec in specs.items() if spec.wide_norms}
    return (
        [name for name in _norms_by_heads(layout, wide) if name.endswith(".weight")]
        if count > 1
        else []
    )


def _norms_by_heads(layout: Layout, specs: Mapping[str, AttentionSpec]) -> list[str]:
    """Return the names of norms with weights per head, in layers by label."""
    return [
        join(label, tensor.name)
        for label, spec in specs.items()
        for tensor in layout.others
        if tensor.holds.partition(".")[0] in spec.norms
        and axis_of_heads(tensor.holds, spec) is not None
    ]


def _divided_norms(file: TensorFile, layout: Layout) -> list[str]:
    """Return the names of divided norms in a rank's file, from its metadata if mha-parity wrote it.

    Otherwise they are norms with an axis of heads, and norms of queries and keys that differ in
    width: norms over a
        head,
    which are copied, have equal widths.
    """
    if NUM_RANKS in file.metadata:
        return parse_json(file.metadata.get(NORMS, "[]").encode())
    named = {tensor.holds: tensor.name for tensor in layout.others}
    of_queries = named.get("q_norm.weight", "no such name")
    found: list[str] = []
    for name, info in file.infos.items():
        prefix = name.removesuffix(of_queries)
        if prefix == name or not (prefix == "" or prefix.endswith(".")):
            continue
        of_layer = [
            f"{prefix}{named[f'{norm}.{leaf}']}"
            for norm in ("q_norm", "k_norm")
            for leaf in ("weight", "bias")
        ]
        widths = {file.infos[each].shape for each in of_layer if each in file.infos}
        if len(info.shape) == 2 or len(widths) == 2:
            found += of_layer
    return found
