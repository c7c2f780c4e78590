"""Entry points of installed packages, by which they offer layouts and bugs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from parity.measure.text import in_line


def load_plugins(group: str, what: str, use: Callable[[Any], None]) -> None:
    """Use the value of each entry point of a group.

    One that fails, or tries to end the program, is left out with a warning: a broken package must
    not prevent what does not need it.

    Args:
        group: group of entry points, such as `mha_parity.layouts`.
        what: the package offers, such as `layouts`.
        use: takes the value of an entry point. If it raises an error, it must leave nothing behind.
    """
    # It imports about 40 modules, which callers that load no plugins do not need.
    from importlib import metadata

    for entry_point in metadata.entry_points(group=group):
        try:
            use(entry_point.load())
        except KeyboardInterrupt:  # of the user
            raise
        except BaseException as error:  # code of another package may raise anything
            words = in_line(f"{entry_point.name} = {entry_point.value}: {text_of_error(error)}")
            warnings.warn(f"{what} of a package are left out: {words}", stacklevel=3)


def text_of_error(error: BaseException) -> str:
    """Return the text of an error of another package, whose `__str__` may fail as well."""
    kind = type(error).__name__
    try:
        text = str(error)
    except KeyboardInterrupt:  # of the user
        raise
    except BaseException:
        return kind
    if text and isinstance(error, Exception):
        return text
    # The text of SystemExit is a number.
    return f"{kind} {text}".rstrip()
