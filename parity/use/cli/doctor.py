"""`mha-parity doctor`."""

from __future__ import annotations

import argparse

from parity.use.cli.help import Page, Result
from parity.use.cli.messages import say_error
from parity.use.cli.options import check_names, name_list

PAGE = Page(
    "report what is installed and what would be skipped",
    "Report which packages are installed, on which devices and with which numerics settings the "
    "backends run, "
    "what would be skipped, and how to get it.",
    "mha-parity doctor --require torch,jax",
    "reported",
    "something of --require is missing",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--require",
        type=name_list,
        metavar="A,B",
        help="backends and packages that must not be missing",
    )


def run(options: argparse.Namespace) -> Result:
    """Print what is installed."""
    from parity.measure.backends import BACKENDS, why_missing
    from parity.measure.backends.numerics import environment
    from parity.measure.core.packages import OPTIONAL, is_installed, version_of
    from parity.use.reporting.console import console
    from parity.use.reporting.environment import print_environment

    check_names("--require", options.require, list(dict.fromkeys((*BACKENDS, *OPTIONAL))))
    missing = {name: reason for name in BACKENDS if (reason := why_missing(name))}
    for name in BACKENDS.keys() - missing.keys():
        try:
            environment([name])
        except Exception as error:  # reported like a backend that is not installed
            missing[name] = f"{name} does not start: {type(error).__name__}: {error}"
    found = environment(name for name in BACKENDS if name not in missing)
    optional = {name: version_of(name) if is_installed(name) else None for name in OPTIONAL}
    print_environment(found, {name: missing.get(name) for name in BACKENDS}, optional, console())
    lacking = {name: missing[name] for name in options.require or () if name in missing}
    lacking |= {
        name: f"{name} is not installed: pip install {name}"
        for name in options.require or ()
        if name not in BACKENDS and optional[name] is None
    }
    if lacking:
        say_error(f"--require: {'; '.join(lacking.values())}", 1)
    return int(bool(lacking)), {"environment": found, "missing": missing, "optional": optional}
