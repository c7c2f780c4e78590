"""`mha-parity doctor`."""

from __future__ import annotations

from parity.use.cli.command import Options, Result, command, option
from parity.use.cli.messages import say_error
from parity.use.cli.options import backend_list, check_names


@command(
    "report what is installed and what would be skipped",
    about=(
        "Report which packages are installed, on which devices and with which numerics settings "
        "the backends run, what would be skipped, and how to install it."
    ),
    example="mha-parity doctor --require torch,jax",
    well="reported",
    wrong="something of --require is missing",
)
@option(
    "--require",
    type=backend_list,
    metavar="A,B",
    help="backends and packages that must not be missing",
)
def run(options: Options) -> Result:
    """Print what is installed."""
    from parity.measure.backends import BACKENDS, why_missing
    from parity.measure.backends.numerics import environment
    from parity.measure.core.packages import OPTIONAL, is_installed, version_of
    from parity.use.reporting.console import console, working
    from parity.use.reporting.environment import print_environment

    check_names("--require", options.require, list(dict.fromkeys((*BACKENDS, *OPTIONAL))))
    missing = {}
    for name in BACKENDS:
        reason = why_missing(name)
        if reason:
            missing[name] = reason
    with working("starting the backends"):
        for name in BACKENDS:
            if name in missing:
                continue
            try:
                environment([name])
            except Exception as error:  # reported like a backend that is not installed
                missing[name] = f"{name} does not start: {type(error).__name__}: {error}"
        report = environment(name for name in BACKENDS if name not in missing)
    optional = {name: version_of(name) if is_installed(name) else None for name in OPTIONAL}
    reasons = {name: missing.get(name) for name in BACKENDS}
    print_environment(report, reasons, optional, console())
    unmet = []
    for name in options.require or ():
        if name in missing:
            unmet.append(missing[name])
        elif name not in BACKENDS and optional[name] is None:
            unmet.append(f"{name} is not installed: pip install {name}")
    if unmet:
        say_error(f"--require: {'; '.join(unmet)}", 1)
    return int(bool(unmet)), {"environment": report, "missing": missing, "optional": optional}
