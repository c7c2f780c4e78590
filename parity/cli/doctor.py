"""`mha-parity doctor`."""

from __future__ import annotations

import argparse

from parity.cli.help import Page, Result

PAGE = Page(
    "report what is installed and what would be skipped",
    "Report which packages are installed, on which devices and with which numerics settings the backends run, "
    "what would be skipped, and how to get it.",
    "mha-parity doctor",
    "always, even if something is missing",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: there are no options but those of every command."""


def run(options: argparse.Namespace) -> Result:
    """Print what is installed."""
    from parity.backends import BACKENDS, why_missing
    from parity.backends.numerics import environment
    from parity.core.packages import OPTIONAL, is_installed, version_of
    from parity.reporting.console import console
    from parity.reporting.environment import print_environment

    missing = {name: reason for name in BACKENDS if (reason := why_missing(name))}
    for name in BACKENDS.keys() - missing.keys():
        try:
            environment([name])
        except Exception as error:  # a doctor that dies of the illness is of no use
            missing[name] = f"{name} does not start: {type(error).__name__}: {error}"
    found = environment(name for name in BACKENDS if name not in missing)
    optional = {name: version_of(name) if is_installed(name) else None for name in OPTIONAL}
    print_environment(found, {name: missing.get(name) for name in BACKENDS}, optional, console())
    return 0, {"environment": found, "missing": missing, "optional": optional}
