"""`mha-parity selftest`."""

from __future__ import annotations

from parity.use.cli.command import Options, Result, command, option
from parity.use.cli.messages import no_framework
from parity.use.cli.options import backend_list, check_names, matching, name_list


@command(
    "inject known bugs into the layers, and check that they are found",
    about=(
        "Inject a known bug of each page into the layers. Check that its stage differs and that "
        "the diagnosis names it."
    ),
    example="mha-parity selftest --backends torch",
    well="every bug was found",
    wrong="a bug was missed",
)
@option(
    "--backends",
    type=backend_list,
    metavar="A,B",
    help="jax, torch; default: all that are installed",
)
@option("--cases", type=name_list, metavar="CASES", help="names and patterns; default: all of them")
@option("--seed", type=int, default=0, metavar="N", help="seed of the random weights")
def run(options: Options) -> Result:
    """Inject the bugs, and print the outcomes."""
    from parity.measure.backends import why_missing
    from parity.use.reporting.console import console, progress_bar
    from parity_lab.selftest import SELFTEST_CASES, SELFTESTED, bugs_in, print_selftest, selftest

    backends = options.backends or [name for name in SELFTESTED if not why_missing(name)]
    check_names("--backends", backends, SELFTESTED)
    for name in backends:
        reason = why_missing(name)
        if reason:
            raise ModuleNotFoundError(reason)
    if not backends:
        raise ModuleNotFoundError(no_framework())
    by_name = {case.name: case for case in SELFTEST_CASES}
    names = matching("--cases", options.cases or ["*"], by_name)
    cases = [by_name[name] for name in names]
    # Each case also runs without a bug.
    num_runs = len(backends) * sum(1 + len(bugs_in(case)) for case in cases)
    with progress_bar(num_runs) as on_bug:
        outcomes = list(selftest(backends, cases, seeds=[options.seed], on_bug=on_bug))
    print_selftest(outcomes, console())
    is_well = all(outcome.is_caught for outcome in outcomes)
    return 0 if is_well else 1, {"outcomes": outcomes}
