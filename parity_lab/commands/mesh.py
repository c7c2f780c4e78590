"""`mha-parity mesh`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parity.measure.backends import BACKENDS
from parity.use.cli.cases import chosen_cases, num_runs
from parity.use.cli.command import OneOf, Options, Result, argument, command, option
from parity.use.cli.messages import input_error, no_framework
from parity.use.cli.options import backend_options, cases_option, check_names
from parity.use.cli.reports import skip_option


@command(
    "run test cases on a mesh of devices, and count their collectives",
    about=(
        "Divide test cases over devices, gather every stage and compare it with the float64 "
        "reference, within the tolerance of one device. Count the collective operations of each "
        "program, and compare them with the necessary ones."
    ),
    example="mha-parity mesh data=2,tensor=4 --backends jax --virtual-devices 8",
    well="everything agrees",
    wrong="a stage differs or too much is sent",
    has_quiet_form=True,
)
@argument(
    "mesh",
    metavar="data=2,tensor=4",
    help="devices that divide sequences (data), heads (tensor) and tokens (sequence)",
)
@option("--virtual-devices", type=int, metavar="N", help="make N devices of this CPU")
@option(
    "--axis-types",
    type=OneOf(("automatic", "explicit")),
    default="automatic",
    help="JAX's mesh axes: automatic (default), by XLA, or explicit, by the types of arrays",
)
@cases_option()
@backend_options()
@skip_option()
def run(options: Options) -> Result:
    """Run the cases on the mesh, and print the report."""
    from parity.measure.backends import why_missing
    from parity.measure.core.case import DTYPES
    from parity.use.reporting.console import console, progress_bar
    from parity_lab.mesh.plan import parse_mesh
    from parity_lab.mesh.printing import print_mesh_report
    from parity_lab.mesh.run import run_on_mesh

    check_names("--backends", options.backends, BACKENDS)
    check_names("--dtypes", options.dtypes, DTYPES)
    plan = parse_mesh(options.mesh, options.axis_types)
    backends = options.backends or [name for name in BACKENDS if not why_missing(name)]
    if not backends:
        raise ModuleNotFoundError(no_framework())
    cases = chosen_cases(options.cases)
    if options.virtual_devices is not None:
        _make_devices(options.virtual_devices, plan.size, str(plan), backends)
    with progress_bar(num_runs(cases, options.dtypes, backends)) as on_case:
        report = run_on_mesh(
            cases, backends, plan, options.dtypes, with_gradients=options.grad, on_case=on_case
        )
    report = replace(report, allow_skipped=options.allow_skipped)
    print_mesh_report(report, console(), verbose=options.verbose, quiet=options.quiet)
    return report.status, report.to_dict()


def _make_devices(count: int, needed: int, mesh: str, backends: Sequence[str]) -> None:
    """Make virtual devices for each backend on this CPU."""
    from parity_lab.mesh.backend import can_make_devices, load_mesh_backend
    from parity_lab.mesh.plan import MOST_VIRTUAL

    flag = "--virtual-devices"
    if count < needed:
        raise input_error(flag, f"be at least the {needed} of {mesh}", {flag: count})
    if count > MOST_VIRTUAL:
        raise input_error(flag, f"be at most {MOST_VIRTUAL}", {flag: count})
    on_cpu = [name for name in backends if can_make_devices(name)]
    if not on_cpu:
        raise input_error(
            flag, "be passed with a backend on this CPU", f"{', '.join(backends)} alone"
        )
    for name in on_cpu:
        load_mesh_backend(name).make_devices(count)
