"""Targets of writes: checks before replacing, scratch folders, and atomic moves.

A write removes only what it could have written itself. It replaces a file of the same format, a
folder that contains only a checkpoint of the same format, or an index together with its shards.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mha_spec import InputError
from parity.measure.files.reading import INDEX, shards_in

if TYPE_CHECKING:
    from filelock import BaseFileLock

SCRATCH = ".mha-parity"
"""Suffix of scratch folders."""

BEFORE = ".before"
"""Subfolder of a scratch folder that keeps files until they are replaced."""

REPLACED = ".replaced"
"""Its name once all files are in place, so that none is restored."""

IN_USE = ".in-use"
"""Lock file in a scratch folder, locked as long as the folder's writer is alive."""

FOLDER_LOCK = f"{SCRATCH}.lock"
"""Lock file in a folder, there only while a writer lists or moves its files."""

_ORBAX = re.compile(
    r"_METADATA|_CHECKPOINT_METADATA|_sharding|_strings\.json|commit_success\.txt|d|"
    r"array_metadatas(/process_\d+)?|"
    r"ocdbt\.process_\d+|(ocdbt\.process_\d+/)?(manifest\.ocdbt|d|d/[0-9a-f]{32})"
)
"""Paths of files in an orbax checkpoint."""


# ---- Validation ----------------------------------------------------------------------------------


def check_target(
    path: Path,
    kind: str,
    names: Sequence[str],
    folder: Path,
    *,
    overwrite: bool = True,
    source: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Reject a target that must not be written.

    Args:
        path: target, as given by the user.
        kind: format.
        names: files or folder to write; an index of shards comes last.
        folder: destination folder.
        overwrite: allow replacing existing files of the same format.
        source: path that is read meanwhile.

    Returns:
        Names to remove as well: shards of the old index that will not be written.

    Raises:
        FileExistsError: if the target exists and `overwrite` is False.
        OSError: if the target cannot be inspected, such as a loop of links.
        ValueError: if the target is the source, or exists in a different format.
    """
    if source is not None:
        _reject_source(path, [folder / name for name in names], folder, Path(source))
    existing = [folder / name for name in names if _exists(folder / name)]
    if existing and not overwrite:
        # The error names the index if there are several files and it exists.
        shown = path if len(names) == 1 else existing[-1]
        raise FileExistsError(f"{shown} exists; pass --force to replace it")
    if len(names) == 1:
        for existing_path in existing:
            _reject_others(path, existing_path, kind)
        return []
    index = folder / names[-1]
    old_shards = shards_in(index) if index in existing else []
    replaced = {name for name in old_shards if is_shard_of(path, name) and _exists(folder / name)}
    for existing_path in existing:
        if existing_path != index and existing_path.name not in replaced:
            raise InputError(existing_path, f"be listed in {index} to be replaced, but it is not")
    for name in sorted(replaced):
        _reject_others(folder / name, folder / name, kind)
    return sorted(replaced - set(names))


def is_shard_of(path: Path, name: str) -> bool:
    """Return whether a file has the name of a shard of a target that is split."""
    pattern = re.escape(path.stem) + r"-\d{5}-of-\d{5}" + re.escape(path.suffix)
    return re.fullmatch(pattern, name) is not None


def check_folder_of(path: str | os.PathLike[str]) -> None:
    """Reject a file whose name is a folder's, such as `a.py/`, or whose folder does not exist.

    `Path` and `os.path.realpath` would drop the last `/` and a missing `folder/..`, and write a
    different file.

    Raises:
        OSError: for such a name.
    """
    name = os.fspath(path)
    folder, last = os.path.split(name)
    if last in ("", os.curdir, os.pardir):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    try:
        os.stat(folder or os.curdir)
    except OSError as error:  # its message would contain the folder alone
        raise OSError(error.errno, error.strerror, name) from None


def _exists(path: Path) -> bool:
    """Return whether a path exists, including dangling links."""
    try:
        path.stat()
    except FileNotFoundError:
        return path.is_symlink()
    return True


def _reject_source(path: Path, targets: Iterable[Path], folder: Path, source: Path) -> None:
    """Raise an error if the target is the source, under any name, or lies in it.

    Args:
        path: target, as given by the user.
        targets: files or folder to write.
        folder: their folder.
        source: file or folder that is read.
    """
    if source.is_dir():
        if _is_any(source, [*targets, folder, *folder.absolute().parents]):
            raise InputError(
                "the target", "be outside the folder that is read", path=path, source=source
            )
        return
    read_files = [source]
    if source.name.endswith(INDEX):
        read_files += [source.parent / name for name in shards_in(source)]
    # A target that is a folder may contain the source.
    folders = Path(os.path.realpath(source)).parents
    for target in targets:
        if target.exists() and _is_any(target, [*read_files, *folders]):
            raise InputError(
                "the target", "be a file other than the source", path=path, source=source
            )


def _is_any(path: Path, candidates: Iterable[Path]) -> bool:
    """Return whether an existing path and one of the others lead to the same file."""
    return any(other.exists() and path.samefile(other) for other in candidates)


def _reject_others(path: Path, existing_path: Path, kind: str) -> None:
    """Raise an error if something but a file or folder of the format, or an empty one, exists."""
    try:
        mode = existing_path.stat().st_mode
    except FileNotFoundError:  # a link to a missing file
        return
    if kind == "orbax":
        if not stat.S_ISDIR(mode):
            raise InputError(path, "be a folder or not exist yet, but it is something else")
        other_files = _others_in(existing_path)
        if other_files:
            rule = "be an orbax checkpoint and nothing else to be replaced"
            raise InputError(path, rule, f"{other_files} there")
        return
    if not stat.S_ISREG(mode):
        raise InputError(path, "be a file or not exist yet, but it is something else")
    with existing_path.open("rb") as file:
        begin = file.read(16)
    if begin and not _begins(kind, begin):
        raise InputError(
            path, f"be a {kind} file to be replaced", f"one that begins with {begin[:8]!r}"
        )


def reject_other_file(path: str | os.PathLike[str], kind: str) -> None:
    """Raise an error if a file of a different format exists.

    Raises:
        ValueError: if the existing file does not start like one of the format.
    """
    if os.path.isfile(path):
        _reject_others(Path(path), Path(path), kind)


def _begins(kind: str, begin: bytes) -> bool:
    """Return whether a file of the format may start with these bytes, of which there is one."""
    is_zip = begin[:2] == b"PK"
    if kind == "safetensors":
        return begin[8:9] == b"{"  # after its length
    if kind == "npz":
        return is_zip
    if kind == "torch":
        return is_zip or begin[:1] == b"\x80"  # a pickle, before torch 1.6
    return 0x80 <= begin[0] <= 0x8F or begin[0] in (0xDE, 0xDF)  # msgpack: a dict


def _others_in(folder: Path, most: int = 5) -> list[str]:
    """Return the contents of a folder that are no part of an orbax checkpoint.

    Without a checkpoint, these are all.
    """
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*"))]
    if "_METADATA" not in names:
        return names[:most]
    foreign_names = []
    for name in names:
        if not _ORBAX.fullmatch(name) or (folder / name).is_symlink():
            foreign_names.append(name)
    return foreign_names[:most]


def check_writable(path: str | os.PathLike[str], name: str, shown: str = "") -> None:
    """Reject an unwritable file before the work whose result it will contain.

    Nothing is left behind.

    Args:
        path: path of the file.
        name: name of the argument, such as a flag.
        shown: path as given by the user, if different.

    Raises:
        ValueError: if it is a folder, or its folder is missing or not writable.
    """
    try:
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG
            check_folder_of(path)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if stat.S_ISREG(mode):
            with tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))):
                pass
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InputError(
            name, "be a path that can be written to", f"{shown or path}: {error.strerror}"
        ) from None


# ---- Scratch -------------------------------------------------------------------------------------


@contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """Create a temporary folder next to the target, on the same disk.

    If a process was killed before it could clean up, the next write of the same target does. A
    lock, which ends with its process, shows whether the folder is still in use.
    """
    # The name is cut, because file systems allow 255 bytes, of which a character may need 4.
    begin = f".{target.name[:40]}."
    scratch = target.parent / f"{begin}{secrets.token_hex(4)}{SCRATCH}"
    in_use = _new_lock(scratch / IN_USE)
    try:
        # No other writer may list the scratch folders between the creation of this one and its
        # lock: an unlocked one is taken for the lock of a killed process.
        with locked(target.parent):
            for leftover in target.parent.glob(f"{glob.escape(begin)}*{SCRATCH}"):
                _clean_up_after_kill(leftover)
            try:
                scratch.mkdir()
            except OSError as error:  # its message would contain the scratch folder
                raise OSError(error.errno, error.strerror, str(target)) from None
            _acquire(in_use, wait=False)
        yield scratch
    finally:
        if _put_back(scratch):
            _remove_tree(scratch)
        in_use.release()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other writers from a folder, if its file system supports locks."""
    lock = _new_lock(folder / FOLDER_LOCK)
    try:
        try:
            _acquire(lock, wait=True)
            yield
        finally:
            _remove_lock(lock)
    finally:
        _remove_lock(lock)  # again, since a signal may have interrupted it


WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
"""Errors of a file system without locks, on which the lock file was created nevertheless."""


def _new_lock(path: Path) -> BaseFileLock:
    import filelock  # takes 20 ms, which only writers need to spend

    # The fallback, whose lock is that the file exists, would outlast a process that is killed.
    return filelock.FileLock(path, fallback_to_soft=False)


def _acquire(lock: BaseFileLock, *, wait: bool) -> bool:
    """Lock a file, which is created, until the lock is released or the process ends.

    Returns:
        False if another writer has the lock, unless `wait` is set, or if locks are unavailable: in
        a read-only folder, on a file system without them, or if the file belongs to another user.
    """
    try:
        _create(lock.lock_file)
        lock.acquire(blocking=wait)
    except (TimeoutError, PermissionError):  # another writer's, or none may be created here
        return False
    except OSError as error:
        # Other errors come from opening the file, which may be another writer's.
        if error.errno in WITHOUT_LOCKS:
            with suppress(OSError):
                os.unlink(lock.lock_file)
        return False
    return True


def _create(path: str) -> None:
    """Create the file of a lock, unless it exists.

    filelock waits without end for a file that cannot be created, for example in /proc.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    os.close(os.open(path, flags, 0o644))


def _remove_lock(lock: BaseFileLock) -> None:
    """Release a lock and remove its file, also if a signal interrupted its acquisition."""
    if not lock.is_locked and not os.path.lexists(lock.lock_file):
        return
    if not lock.is_locked and not _acquire(lock, wait=False):
        return
    # The file is removed while it is locked. A writer that waits for it notices that it is gone,
    # and tries again with a new one. Later, it may be the lock of another writer.
    with suppress(OSError):  # Windows removes no open file; there, release() removes it
        os.unlink(lock.lock_file)
    lock.release()


def _clean_up_after_kill(scratch: Path) -> None:
    """Remove a scratch folder out of use, and restore files that it was about to replace."""
    if scratch.is_symlink():
        return
    in_use = _new_lock(scratch / IN_USE)
    if not _acquire(in_use, wait=False):
        return
    try:
        if _put_back(scratch):
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        in_use.release()


def _put_back(scratch: Path) -> bool:
    """Restore files that were moved aside but not replaced.

    Returns:
        False if other files exist there by now.
    """
    before = scratch / BEFORE
    if not before.is_dir():
        return True
    # The index last, so that it never refers to missing files.
    for old in sorted(before.iterdir(), key=lambda path: path.name.endswith(INDEX)):
        if os.path.lexists(scratch.parent / old.name):
            return False
        old.replace(scratch.parent / old.name)
    return True


def _remove_tree(folder: Path) -> None:
    """Remove a folder, in which a library's thread may still be writing.

    It waits for at most a quarter of a second, which is arbitrary.
    """
    for _ in range(5):
        if not folder.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.05)
    shutil.rmtree(folder)


# ---- Into place ----------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Written files that go into one folder.

    Attributes:
        names: files or folders in `scratch`, an index last.
        scratch: their current folder.
        folder: destination folder.
        stale: names in `folder` to remove at the same time.
    """

    names: Sequence[str]
    scratch: Path
    folder: Path
    stale: Sequence[str] = ()


def move(*batches: Batch) -> None:
    """Move written files into place: one atomically; several, or folders, all or none."""
    if len(batches) == 1 and len(batches[0].names) == 1:
        (name,), scratch, folder, _ = batches[0]
        if not (scratch / name).is_dir():  # no existing folder can be replaced atomically
            (scratch / name).replace(folder / name)
            return
    try:
        for batch in batches:
            _set_aside(batch)
        for names, scratch, folder, _ in batches:
            for name in names:
                (scratch / name).replace(folder / name)
        for batch in batches:
            (batch.scratch / BEFORE).replace(batch.scratch / REPLACED)
    except BaseException:
        # Also an interrupt after any of these lines; the disk shows the progress.
        is_complete = all((batch.scratch / REPLACED).is_dir() for batch in batches)
        if not is_complete:
            for batch in reversed(batches):
                _move_back(batch)
        raise


def _set_aside(batch: Batch) -> None:
    """Move the files to replace into the scratch folder."""
    names, scratch, folder, stale = batch
    before = scratch / BEFORE
    before.mkdir()
    # The index first, so that it never refers to wrong files.
    for name in (*reversed(names), *stale):
        if os.path.lexists(folder / name):
            (folder / name).replace(before / name)


def _move_back(batch: Batch) -> None:
    """Undo what was moved of a batch."""
    before, replaced = batch.scratch / BEFORE, batch.scratch / REPLACED
    if replaced.is_dir():
        replaced.replace(before)
    if not before.is_dir():
        return
    for name in reversed(batch.names):
        if not os.path.lexists(batch.scratch / name):
            (batch.folder / name).replace(batch.scratch / name)
    _put_back(batch.scratch)


def flush(folder: Path) -> None:
    """Wait until the contents of a folder are on disk."""
    for path in (folder, *folder.rglob("*")):
        _flush_file(path)


def _flush_file(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def flushing(folder: Path) -> Iterator[None]:
    """Write a folder to disk in the background while it is filled.

    At the end everything is on disk.
    """
    is_full = threading.Event()

    def repeat() -> None:
        # The pause is a choice: short enough that little is left to write at the end.
        while not is_full.wait(timeout=0.05):
            with suppress(FileNotFoundError):  # libraries rename and remove files
                flush(folder)

    with ThreadPoolExecutor(1) as pool:
        repeated = pool.submit(repeat)
        try:
            yield
        finally:
            is_full.set()
        # An error of the disk is reported only once, perhaps to the thread.
        repeated.result()
        flush(folder)


def write_whole(
    path: str | os.PathLike[str], data: bytes, verify: Callable[[Path], None] = lambda written: None
) -> None:
    """Write a file atomically: in a folder next to it, and moved into place once it is on disk.

    Args:
        path: file to write; an existing one is kept until the move.
        data: contents.
        verify: called with the written file before the move; an error leaves everything unchanged.

    Raises:
        OSError: if the file cannot be written.
    """
    with errors_name(path):
        # A device or a pipe cannot be replaced.
        if os.path.exists(path) and not os.path.isfile(path):
            Path(path).write_bytes(data)
            return
        check_folder_of(path)
        target = Path(os.path.realpath(path))  # the target of a link, not the link
        with scratch_beside(target) as scratch:
            written = scratch / target.name
            written.write_bytes(data)
            flush(scratch)
            verify(written)
            written.replace(target)


def write_files(files: Mapping[Path, bytes], *, overwrite: bool = True) -> None:
    """Write several files, all or none: if one cannot be written, the others are unchanged.

    Args:
        files: contents by path.
        overwrite: replace files that exist; False raises an error instead.

    Raises:
        OSError: if a file cannot be written; its message names the file.
        FileExistsError: if one exists and `overwrite` is False.
        ValueError: if a path is not the path of a file, or two paths are of one file.
    """
    targets: dict[Path, Path] = {}
    for path in files:
        target = Path(os.path.realpath(path))  # the target of a link, not the link
        check_folder_of(path)
        if target in targets:
            raise InputError(path, "differ from the other files to write", str(targets[target]))
        targets[target] = path
    _check_free(files, overwrite=overwrite)
    with ExitStack() as stack:
        scratch_of: dict[Path, Path] = {}
        for target, path in targets.items():
            with errors_name(path):
                if target.parent not in scratch_of:
                    scratch_of[target.parent] = stack.enter_context(scratch_beside(target))
                written = scratch_of[target.parent] / target.name
                written.write_bytes(files[path])
                _flush_file(written)
        batches = []
        for folder, scratch in scratch_of.items():
            names = [target.name for target in targets if target.parent == folder]
            with errors_name(folder / names[0]):
                _flush_file(scratch)
            batches.append(Batch(names, scratch, folder))
        # In one order, so that two writers do not wait for each other.
        for folder in sorted(scratch_of):
            stack.enter_context(locked(folder))
        # Again, because others may have written there meanwhile.
        _check_free(files, overwrite=overwrite)
        with errors_name(next(iter(files))):
            move(*batches)


def _check_free(paths: Iterable[Path], *, overwrite: bool) -> None:
    """Reject files to write that exist, unless they are files that may be replaced."""
    for path in paths:
        if not _exists(path):
            continue
        if not overwrite:
            raise FileExistsError(f"{path} exists; pass --force to replace it")
        # A link to nothing is not rejected: the write creates the file that it names.
        if path.exists() and not path.is_file():
            raise InputError(path, "be a file or not exist yet, but it is something else")


@contextmanager
def errors_name(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file that is being written in errors that name none, or a scratch file.

    The error of a full disk names none.
    """
    try:
        yield
    except OSError as error:
        name = error.filename
        is_scratch = isinstance(name, (str, os.PathLike)) and SCRATCH in os.fspath(name)
        if error.errno is None or (name is not None and not is_scratch):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
