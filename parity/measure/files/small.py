"""Small files that are read whole: configurations, indexes of shards, lists of labels."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from mha_spec import InputError
from parity.measure.files.tensor_file import parse_json

LARGEST = 1 << 24
"""Bytes of the largest small file: configurations with values for 10,000 layers are smaller."""

MAX_INDEX = 100_000_000
"""Bytes of the largest index of shards: the limit of headers of safetensors."""

WITHOUT_WAITING = (
    getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
)
"""Flags that open a pipe without waiting for its writer.

One may replace the file after it was checked.
"""

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_is_file(path: str | os.PathLike[str], mode: int) -> None:
    """Reject what is not a file.

    Reading a pipe waits, a device has no end, and a folder has no content.

    Args:
        path: the path, for the message.
        mode: its `st_mode`.
    """
    if not stat.S_ISREG(mode):
        raise InputError(path, "be a file", KINDS.get(stat.S_IFMT(mode), "something else"))


def read_small(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """Return the content of a small file.

    Args:
        path: path of the file.
        most: bytes of the largest file to read.

    Raises:
        OSError: if it does not exist or cannot be read.
        ValueError: if it is not a file, or is larger.
    """
    # Opening a device may already have an effect, so its kind is checked first.
    check_is_file(path, os.stat(path).st_mode)
    with open(os.open(path, os.O_RDONLY | WITHOUT_WAITING), "rb") as file:
        check_is_file(path, os.fstat(file.fileno()).st_mode)
        # Files of /proc have a size of 0 and any content.
        content = file.read(most + 1)
    if len(content) > most:
        raise InputError(path, f"be a file of at most {most} bytes")
    return content


def read_text(path: str | os.PathLike[str], most: int = LARGEST) -> str:
    """Return the text of a small file of at most `most` bytes, in UTF-8.

    Raises:
        OSError, ValueError: as `read_small`, or if it is not text.
    """
    try:
        return read_small(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(path, "be text in UTF-8", f"byte {error.start}") from None


def read_json(path: str | os.PathLike[str], most: int = LARGEST) -> Any:
    """Return the values of a small JSON file.

    Raises:
        OSError, ValueError: as `read_small`, or if it is not JSON.
    """
    content = read_small(path, most)
    try:
        return parse_json(content)
    except UnicodeDecodeError:
        raise InputError(path, "be JSON", "bytes that are not text") from None
    except InputError as error:
        raise error.within(os.fspath(path)) from None
    except ValueError as error:
        raise InputError(path, "be JSON", str(error)) from None


def check_small_files(folder: str | os.PathLike[str]) -> None:
    """Check the JSON files of a folder before another library reads some of them.

    Raises:
        ValueError: if one is not a file.
    """
    for path in sorted(Path(folder).glob("*.json")):
        # For the library, a link to nothing is a missing file.
        if path.exists():
            check_is_file(path, path.stat().st_mode)
