"""Completion of command lines in a shell: commands, options, choices, names of layouts, cases and
bugs, and files.
"""

from __future__ import annotations

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "tcsh", "fish")

FOLDERS = ("DIR", "FOLDER")

FILES = ("PATH", "FILE", "FILE.py", "FILE.toml", "SRC", "DST", "NPY", "INPUT", "MODEL")


def completion_for(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return a script that completes the command lines of a parser, which must not parse
    afterwards.

    Raises:
        ModuleNotFoundError: if shtab is not installed.
    """
    from parity.measure.core.packages import check_installed

    check_installed("--print-completion", "shtab")
    import shtab

    (commands,) = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    commands.help = "command"  # shtab leaves out hidden arguments
    names = _names()
    for command in commands.choices.values():
        command_name = command.prog.split()[-1]
        for action in command._actions:
            metavar = str(action.metavar)
            if metavar in FOLDERS:
                _complete(action, shtab.DIRECTORY)
            elif metavar in FILES:
                _complete(action, shtab.FILE)
            elif (command_name, metavar) in names:
                action.choices = names[command_name, metavar]
            elif ("", metavar) in names:
                action.choices = names["", metavar]
    return shtab.complete(parser, shell)


def _complete(action: Any, kind: Any) -> None:
    """Set what completes the value of an option, in the attribute that shtab reads."""
    action.complete = kind


def _names() -> dict[tuple[str, str], list[str]]:
    """Return known names by command, or "" for all commands, and metavar."""
    from parity.measure.core.cases import CASES
    from parity.port.conversion.layouts import LAYOUTS
    from parity.use.reporting.bugs import bug_lines

    return {
        ("", "LAYOUT"): list(LAYOUTS),
        ("bugs", "NAME"): list(bug_lines()),
        ("plot", "NAME"): list(CASES),
        ("diagnose", "NAME"): list(CASES),
        ("run", "GLOB"): ["all", *CASES],
        ("cases", "GLOB"): list(CASES),
    }
