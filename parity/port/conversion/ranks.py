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
    check_folder_of,
    errors_name,
    locked,
    move,
    scratch_beside,
)
from parity.measure.files.tensor_file import parse_json
from parity.measure.sharding.shard import ShardPlan, shard_spec
from parity.port.conversion.layouts import LAYOUTS, Layout
from parity.port.conversion.layouts.layout import Ranks, Tensor
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
        if self.axis is None:
            return shape
        sizes = list(shape)
        sizes[self.axis] = change(sizes[self.axis])
        return tuple(sizes)

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
        ranks = layout.ranks
        if ranks is None:
            continue
        if path.is_dir():
            rank_files = _rank_files_in(path, ranks)
            if rank_files:
                return _joined(path, layout, ranks, rank_files)
        elif path.is_file():
            _reject_one_rank(path, ranks)
    file = open_tensors(path)
    count = file.metadata.get(NUM_RANKS, "1")
    if count != "1":
        file.close()
        raise InputError(path, f"be read with the files of all {count} ranks", "the file of one")
    return file


# ---- Reading -------------------------------------------------------------------------------------


def _rank_of(path: Path, ranks: Ranks) -> int | None:
    """Return the rank of a file by its path; None if it is not a rank's file."""
    expression = rf"(?:.*/)?{re.escape(ranks.file)}".replace(r"\{rank\}", r"(\d{2,})")
    match = re.fullmatch(expression, path.absolute().as_posix())
    return int(match[1]) if match else None


def _files_by_rank(folder: Path, ranks: Ranks) -> dict[int, Path]:
    """Return the rank files in a folder, in order."""
    by_rank: dict[int, Path] = {}
    for path in folder.glob(ranks.file.format(rank="*")):
        rank = _rank_of(path, ranks)
        if rank is not None:
            by_rank[rank] = path
    return dict(sorted(by_rank.items()))


def _rank_files_in(folder: Path, ranks: Ranks) -> dict[int, Path]:
    """Return the rank files of a folder that is a checkpoint of several ranks, in order; none if it
    is an ordinary one.

    Raises:
        ValueError: if a file has almost the name of a rank's.
    """
    by_rank = _files_by_rank(folder, ranks)
    rank_paths = {*by_rank.values()}
    for name in os.listdir(folder):
        if Path(name).suffix in SUFFIXES and folder / name not in rank_paths:
            return {}  # an ordinary folder, which may have the same weights in two forms
    strays = {*folder.glob(ranks.file.format(rank="*"))} - rank_paths
    if strays:
        rule = f"have a file for each rank, {ranks.file}"
        raise InputError(folder, rule, str(min(strays)))
    return by_rank


def _reject_one_rank(path: Path, ranks: Ranks) -> None:
    """Reject the file of one rank out of several."""
    rank = _rank_of(path, ranks)
    if rank is None:
        return
    # The name of a rank's file may begin with folders.
    folder = path.absolute().parents[ranks.file.count("/")]
    count = len(_files_by_rank(folder, ranks))
    if rank > 0 or count > 1:
        hint = f"pass the folder, which has {count} files"
        raise InputError(
            path, "be read with the files of all ranks", f"rank {rank} alone", hint=hint
        )


def _joined(folder: Path, layout: Layout, ranks: Ranks, paths: Mapping[int, Path]) -> TensorFile:
    """Open the files of all ranks as one; reading a tensor joins it, with that tensor and one part
    in memory.
    """
    count = len(paths)
    missing = {*range(max(paths))} - {*paths}
    if missing:
        total = max(paths) + 1
        rule = f"have the files of all ranks, missing rank {min(missing)} of {total}"
        raise InputError(folder, rule)
    with ExitStack() as stack:
        files = [stack.enter_context(open_tensors(path)) for path in paths.values()]
        _check_same_tensors(folder, files, list(paths.values()))
        first = files[0]
        shapes = {name: info.shape for name, info in first.infos.items()}
        norms = _divided_norms(first, layout)
        divisions: dict[str, Division | None] = {}
        infos: dict[str, TensorInfo] = {}
        for name, info in first.infos.items():
            division = _division(name, shapes, layout, ranks, norms, count)
            divisions[name] = division
            infos[name] = info  # a tensor with unknown division has the shape of its part
            if division is not None:
                infos[name] = TensorInfo.of(division.whole(info.shape, count), info.dtype)
        metadata: dict[str, str] = {}
        for key, text in first.metadata.items():
            is_of_all = all(file.metadata.get(key) == text for file in files)
            if is_of_all and key not in (NUM_RANKS, NORMS):
                metadata[key] = text

        def fetch(name: str) -> np.ndarray:
            return _join(folder, name, files, infos[name], divisions[name])

        release = stack.pop_all().close
        return TensorFile(
            folder, first.format, infos, metadata, {}, fetch, release, list(first.ignored)
        )


def _check_same_tensors(folder: Path, files: list[TensorFile], paths: list[Path]) -> None:
    """Reject files of ranks that are not all there, or whose tensors differ in more than values."""
    first = files[0]
    count = str(len(files))
    expected = first.metadata.get(NUM_RANKS, count)
    if expected != count:
        raise InputError(folder, f"have the files of all {expected} ranks", count)
    for path, file in zip(paths, files, strict=True):
        for name in {**first.infos, **file.infos}:
            if first.infos.get(name) != file.infos.get(name):
                raise InputError(
                    path,
                    "hold the tensors of rank 0, with equal shapes and dtypes",
                    f"others: {name}",
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
    parts_of_ranks = division.parts(whole, len(files))
    previous = b""
    for rank, (file, part_of_whole) in enumerate(zip(files, parts_of_ranks, strict=True)):
        part = file.read(name)
        content = part.tobytes()
        if division.axis is None and rank > 0 and content != previous:
            raise InputError(folder, "have the same values on all ranks", tensor=name, rank=rank)
        # Constant parts, such as initial norms and biases, may well be equal.
        is_repeated = content == previous and bool((part != part.flat[0]).any())
        if division.axis is not None and is_repeated:
            hint = "key/value heads that ranks share are not joined"
            raise InputError(
                folder, "have each head on one rank", tensor=name, ranks=[rank - 1, rank], hint=hint
            )
        part_of_whole[...] = part.reshape(part_of_whole.shape)
        previous = content
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
        layout: layout of the attention layers.
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
    folder_as_passed = os.fspath(folder)
    folder = Path(folder)
    ranks = _check_ranks(layout, count, specs)
    norms = [name for name in _norms_by_heads(layout, specs) if name in infos]
    divisions = _divisions_to_write(layout, ranks, norms, infos, count)
    own_infos: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    for name, (shape, dtype) in infos.items():
        own_infos[name] = divisions[name].part(shape, count), dtype
    metadata = {**metadata, NUM_RANKS: str(count)}
    if norms:
        metadata[NORMS] = json.dumps(norms)

    def read_part(name: str, rank: int) -> np.ndarray:
        part = divisions[name].parts(np.asarray(read(name)), count)[rank]
        return part.reshape(own_infos[name][0])

    _reject_used(folder)
    if not folder.exists():
        check_folder_of(folder_as_passed.rstrip(os.sep))
    target = Path(os.path.realpath(folder))  # `.` has no name, and its parent is `.`
    with errors_name(folder), scratch_beside(target) as scratch:
        written = scratch / target.name
        for rank in range(count):
            path = written / ranks.file.format(rank=f"{rank:02}")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, own_infos, partial(read_part, rank=rank), metadata, dry_run=dry_run)
        if not dry_run:
            with locked(target.parent):
                _reject_used(folder)
                if target.is_dir():  # it is filled, not replaced: it may be the current folder
                    move(Batch(sorted(os.listdir(written)), written, target))
                else:
                    move(Batch([target.name], scratch, target.parent))
    return folder


def _divisions_to_write(
    layout: Layout,
    ranks: Ranks,
    norms: Collection[str],
    infos: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    count: int,
) -> dict[str, Division]:
    """Return the division of each whole tensor; reject one that ranks cannot divide, or whose
    division is unknown.
    """
    shapes = {name: shape for name, (shape, _) in infos.items()}
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
    return divisions


def _check_ranks(layout: Layout, count: int, specs: Mapping[str, AttentionSpec]) -> Ranks:
    """Return how a layout stores ranks; reject layers that this number of ranks cannot divide."""
    as_count("ranks", count)
    if layout.ranks is None:
        supported = [other.name for other in LAYOUTS.values() if other.ranks is not None]
        raise InputError(
            "ranks",
            f"be left out except for {', '.join(supported)}",
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


def _reject_used(folder: Path) -> None:
    if os.path.lexists(folder) and not (folder.is_dir() and not os.listdir(folder)):
        raise FileExistsError(
            f"{folder} exists; the files of ranks are written into a new folder, or an empty one"
        )


# ---- How tensors are divided ---------------------------------------------------------------------


def _division(
    name: str, shapes: Shapes, layout: Layout, ranks: Ranks, norms: Collection[str], count: int = 1
) -> Division | None:
    """Return the division of a tensor; None if it is unknown.

    The shapes are of one of `count` ranks, or of whole tensors if `count` is 1; `norms` are
    the divided norms.
    """
    for tensor in (*layout.tensors, *layout.others):
        if name == tensor.name or name.endswith(f".{tensor.name}"):
            return Division(0 if name in norms else _axis_of_heads(tensor))
    if name == ranks.embeddings:
        return _division_of_embeddings(name, shapes, layout, count)
    if _is_of(name, ranks.rows):
        return Division(0)
    if _is_of(name, ranks.columns):
        return Division(1)
    for pattern, other in ranks.gated:
        if fnmatch.fnmatchcase(name, pattern):
            return _division_of_gated(name, shapes, other)
    if _is_of(name, ranks.copied):
        return Division(None)
    return None


def _axis_of_heads(tensor: Tensor) -> int | None:
    """Return the axis of heads of a tensor of an attention layer; None if it has none."""
    if tensor.axes == "...":
        return OF_QUERIES.get(tensor.holds)
    for axis, group in enumerate(tensor.groups):
        if "n" in group:
            return axis
    return None


def _division_of_embeddings(name: str, shapes: Shapes, layout: Layout, count: int) -> Division:
    """Return the division of token embeddings: along their features, or their tokens.

    Older programs divide the features. All ranks together then have as many as the output
    projection has rows, which are the width of the model on each rank.
    """
    if count == 1:
        return Division(0)
    outputs = [tensor for tensor in layout.tensors if tensor.holds == "out"]
    output_name = next(tensor.name for tensor in outputs if tensor.kind == "weight")
    widths: set[int] = set()
    for other, shape in shapes.items():
        if other.endswith(output_name):
            widths.add(shape[0])
    return Division(1 if widths == {shapes[name][-1] * count} else 0)


def _division_of_gated(name: str, shapes: Shapes, other: str) -> Division | None:
    """Return the division of the first projection of a feed-forward network, whose gate may be
    packed in front of it; None if its second projection does not show that.
    """
    module = name.rpartition(".")[0].rpartition(".")[0]
    second_shape = shapes.get(f"{module}.{other}")
    if second_shape is None:
        return None
    # The second projection takes the features that the first one, without its gate, makes.
    blocks = shapes[name][0] / second_shape[-1]
    return Division(0, int(blocks)) if blocks in (1, 2) else None


def _is_of(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def norms_to_join(layout: Layout, specs: Mapping[str, AttentionSpec], count: int) -> list[str]:
    """Return the weights of width norms whose mean squares must be joined over ranks, by label and
    name.
    """
    if count == 1:
        return []
    wide = {label: spec for label, spec in specs.items() if spec.wide_norms}
    return [name for name in _norms_by_heads(layout, wide) if name.endswith(".weight")]


def _norms_by_heads(layout: Layout, specs: Mapping[str, AttentionSpec]) -> list[str]:
    """Return the names of norms with weights per head, in layers by label."""
    names: list[str] = []
    for label, spec in specs.items():
        for tensor in layout.others:
            is_norm = tensor.holds.partition(".")[0] in spec.norms
            if is_norm and axis_of_heads(tensor.holds, spec) is not None:
                names.append(join(label, tensor.name))
    return names


def _divided_norms(file: TensorFile, layout: Layout) -> list[str]:
    """Return the names of divided norms in a rank's file, from its metadata if mha-parity wrote it.

    Otherwise they are norms with an axis of heads, and norms of queries and keys that differ in
    width: norms over a head, which are copied, have equal widths.
    """
    if NUM_RANKS in file.metadata:
        return parse_json(file.metadata.get(NORMS, "[]").encode())
    by_weight = {tensor.holds: tensor.name for tensor in layout.others}
    q_norm = by_weight.get("q_norm.weight")
    if q_norm is None:
        return []
    weights = ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias")
    norm_names = [by_weight[weight] for weight in weights]
    divided: list[str] = []
    for name, info in file.infos.items():
        if name != q_norm and not name.endswith(f".{q_norm}"):
            continue
        prefix = name.removesuffix(q_norm)
        of_layer = [f"{prefix}{norm_name}" for norm_name in norm_names]
        widths = {file.infos[other].shape for other in of_layer if other in file.infos}
        if len(info.shape) == 2 or len(widths) == 2:
            divided += of_layer
    return divided
