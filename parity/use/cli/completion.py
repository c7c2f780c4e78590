"""Completion of command lines in a shell: commands, options, choices, names of layouts, cases and
bugs, and files.
"""

from __future__ import annotations

import argparse

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

    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    commands.help = "command"  # shtab leaves out hidden arguments
    names = _names()
    for command in commands.choices.values():
        for action in command._actions:
            metavar = str(action.metavar)
            if metavar in (*FOLDERS, *FILES):
                action.complete = shtab.DIRECTORY if metavar in FOLDERS else shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
            elif (
                known := names.get((command.prog.split()[-1], metavar)) or names.get(("", metavar))
            ) is not None:
                action.choices = known
    return shtab.complete(parser, shell)


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
