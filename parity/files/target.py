"""Targets of writes: what may be replaced, a scratch folder beside it, and the move into place.

A file is replaced if that is asked for. A folder is, too, but only an orbax checkpoint with nothing else in it.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mha_spec import Refusal
from parity.files.reading import INDEX, shards_in

SCRATCH = ".mha-parity"
"""End of the names of scratch folders."""

BEFORE = ".before"
"""The part of a scratch folder that keeps what is being replaced, until it is."""

_ORBAX = re.compile(r"_\w+(\.json)?|d|manifest\.ocdbt|ocdbt\.process_\d+|array_metadatas|commit_success\.txt")
"""Names in the folder of an orbax checkpoint."""


# ---- What is refused -------------------------------------------------------------------------------------------------


def check_target(
    path: Path,
    kind: str,
    names: Sequence[str],
    folder: Path,
    *,
    overwrite: bool = True,
    source: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Refuse a target that must not be written.

    Args:
        path: the target, as the user named it.
        kind: its format.
        names: the files or the folder to be written; of shards, the index last.
        folder: where they will lie.
        overwrite: replace what is there.
        source: what is read meanwhile.

    Returns:
        Names to be removed with what is replaced: the shards of an old index that will not be written.

    Raises:
        FileExistsError: if something is there and `overwrite` is False.
        OSError: if what is there cannot be looked at, such as a loop of links.
        ValueError: if the target is the source, or neither a file nor a checkpoint that may be replaced.
    """
    places = [folder / name for name in names]
    if source is not None:
        _refuse_source(path, places, Path(source))
    there = [place for place in places if os.path.lexists(place)]
    if there and not overwrite:
        raise FileExistsError(f"{path if len(names) == 1 else there[-1]} exists; pass --force to replace it")
    for place in there:
        _refuse_irreplaceable(path, place, kind)
    index = places[-1]
    if len(names) == 1 or index not in there:
        return []
    own = re.compile(re.escape(path.stem) + r"-\d{5}-of-\d{5}" + re.escape(path.suffix))
    stale = set(shards_in(index)) - set(names)
    return sorted(name for name in stale if own.fullmatch(name) and os.path.lexists(folder / name))


def _refuse_source(path: Path, targets: Iterable[Path], source: Path) -> None:
    """Refuse to write onto what is read, under whatever name, into the folder that is read, or what that lies in."""
    read = [source, *(source.parent / name for name in (shards_in(source) if source.name.endswith(INDEX) else ()))]
    around = Path(os.path.realpath(source)).parents
    for target in targets:
        pairs = [*itertools.product((target, *target.absolute().parents), read), *((target, place) for place in around)]
        if any(place.exists() and other.exists() and place.samefile(other) for place, other in pairs):
            raise Refusal("the target", "be neither what is read nor in it or around it", path=path, source=source)


def _refuse_irreplaceable(path: Path, place: Path, kind: str) -> None:
    """Refuse to replace a device, a pipe, or a folder that holds more than an orbax checkpoint."""
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:  # a link to where nothing is yet
        return
    if kind != "orbax":
        if not stat.S_ISREG(mode):
            raise Refusal(path, "be a file or not exist yet, but it is something else")
        return
    if not stat.S_ISDIR(mode):
        raise Refusal(path, "be a folder or not exist yet, but it is something else")
    names = sorted(os.listdir(place))
    if others := [name for name in names if "_METADATA" not in names or not _ORBAX.fullmatch(name)]:
        raise Refusal(path, "be an orbax checkpoint and nothing else to be replaced", f"{others[:5]} there")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a file that cannot be written, before the work whose result it shall hold. Nothing is left behind.

    Raises:
        OSError: if it, or its folder, cannot be written.
    """
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        is_file = True
    if is_file:
        with scratch_beside(Path(os.path.realpath(path))):
            pass
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


# ---- Scratch ---------------------------------------------------------------------------------------------------------


@contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """A folder beside the target, on the same disk, which is gone afterwards."""
    scratch = target.parent / f".{target.name[:40]}.{secrets.token_hex(4)}{SCRATCH}"
    try:
        try:
            scratch.mkdir()
        except OSError as error:  # which would name the scratch folder
            raise OSError(error.errno, error.strerror, str(target)) from None
        yield scratch
    finally:
        if not (scratch / BEFORE).exists():  # else something could not be put back, and stays there
            _remove_tree(scratch)


def _remove_tree(folder: Path) -> None:
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)  # a thread of a library's may still be writing
    shutil.rmtree(folder)


# ---- Into place ------------------------------------------------------------------------------------------------------


def move(names: Sequence[str], scratch: Path, folder: Path, stale: Sequence[str] = ()) -> None:
    """Move what was written into place: a file at once; several, and folders, so that what was there can come back.

    Args:
        names: files or folders in `scratch`, an index last.
        scratch: where they are.
        folder: where they shall be.
        stale: names in `folder` that go when those come.
    """
    if len(names) == 1 and not (scratch / names[0]).is_dir():
        (scratch / names[0]).replace(folder / names[0])
        return
    before = scratch / BEFORE
    before.mkdir()
    try:
        for name in (*reversed(names), *stale):  # the index first, so that it never names files that are others now
            if os.path.lexists(folder / name):
                (folder / name).replace(before / name)
        for name in names:
            (scratch / name).replace(folder / name)
        before.replace(scratch / ".replaced")  # from here on, nothing comes back
    except BaseException:  # an interrupt, too, after any of these lines: the disk knows how far it came
        if before.is_dir():
            for name in reversed(names):
                if not os.path.lexists(scratch / name):
                    (folder / name).replace(scratch / name)
            for name in (*stale, *names):
                if os.path.lexists(before / name):
                    (before / name).replace(folder / name)
            before.rmdir()
        raise


def flush(folder: Path) -> None:
    """Wait until all that is in a folder is on the disk."""
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(
    path: str | os.PathLike[str], data: bytes, verify: Callable[[Path], None] = lambda written: None
) -> None:
    """Write a file whole or not at all: under another name beside it, and moved into place once it is on the disk.

    Args:
        path: file to write; one that was there before stays until the last moment.
        data: its content.
        verify: called with the written file before it is moved; an error it raises leaves all as it was.

    Raises:
        OSError: if the file cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe, which nothing can be moved onto
        Path(path).write_bytes(data)
        return
    path = Path(os.path.realpath(path))  # the file that a link leads to, not the link
    with scratch_beside(path) as scratch:
        written = scratch / path.name
        written.write_bytes(data)
        flush(scratch)
        verify(written)
        written.replace(path)
