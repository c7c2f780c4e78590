"""Code of users, which may try to end the program.

That is an error of the code, never the end of its examination.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parity.measure.text import in_line

PARITY = f"{Path(__file__).parents[2]}{os.sep}"
"""The folder of this package, whose lines call the user's."""


class EndedProgramError(RuntimeError):
    """A user's code raised an exception that ends programs or their parts, such as SystemExit."""


@contextmanager
def user_code(target: Any) -> Iterator[None]:
    """Run code of a user: turn exceptions that `except Exception` does not catch into an error.

    `sys.exit(0)` in the code would otherwise end the program as if it had found nothing wrong. The
    same holds for asyncio.CancelledError, outcomes of pytest, and other subclasses of
    BaseException. Only `os._exit` still ends the process: nothing in the same process can catch it.

    Args:
        target: the function or module, or its name, for the message.

    Raises:
        EndedProgramError: if the code raises such an exception. KeyboardInterrupt and each
            Exception are unchanged.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raised = f"{name_of(target)} raised {in_line(repr(error))}"
        raise EndedProgramError(f"{raised}, {line_of(error)}") from error


def name_of(target: Any) -> str:
    """Return the name of a user's function or module, which may be the name itself."""
    if isinstance(target, str):
        return target
    return str(getattr(target, "__qualname__", type(target).__name__))


def line_of(error: BaseException) -> str:
    """Return the line of the user's code that raised an exception, or of a library without one."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = frames[-1]
    for each in frames:
        is_of_library = "site-packages" in each.filename or each.filename.startswith(PARITY)
        if not is_of_library:
            frame = each
    return f"in {frame.name} ({Path(frame.filename).name}, line {frame.lineno})"
