"""Report of a run on a mesh, on a terminal: what devices send each other, and the stages."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from parity.measure.text import counted
from parity.use.reporting.run import print_report
from parity_lab.mesh.collectives import words_of_counts
from parity_lab.mesh.run import MeshReport


class Traffic(NamedTuple):
    """Collectives of one kind of program, and the cases that have it.

    `has_failed` comes first: in sorted order, what failed is last. `counted` and `needed` are
    words, and `excuse` is the reason for sending more than needed.
    """

    has_failed: bool
    backend: str
    program: str
    counted: str
    needed: str
    excuse: str


def print_mesh_report(report: MeshReport, out: Console, *, verbose: bool, quiet: bool) -> None:
    """Print the traffic between devices, then the report of the stages; with `quiet`, the traffic
    only if some of it is needless.
    """
    if report.needless or not quiet:
        out.print(
            Text("Traffic between devices: program, operations, number of cases", style="bold")
        )
        for traffic, cases in cases_by_traffic(report).items():
            out.print(_line_of(traffic, cases))
    print_report(report, out, verbose=verbose, quiet=quiet)
    if report.needless:
        programs = counted(len(report.needless), "program")
        out.print(Text(f"{programs} sent more than needed", style="bold red"))


def cases_by_traffic(report: MeshReport) -> dict[Traffic, list[str]]:
    """Return each kind of program with its traffic, and the names of the cases that have it; more
    than needed comes last.
    """
    cases: dict[Traffic, list[str]] = {}
    for collectives in report.collectives:
        traffic = Traffic(
            not collectives.passed,
            collectives.backend,
            collectives.program,
            words_of_counts(collectives.counted),
            words_of_counts(collectives.ideal),
            "" if collectives.is_ideal else collectives.excuse,
        )
        names = cases.setdefault(traffic, [])
        if collectives.case not in names:  # a case occurs once for each dtype
            names.append(collectives.case)
    return dict(sorted(cases.items()))


def _line_of(traffic: Traffic, cases: list[str]) -> Text:
    line = f"{traffic.backend} {traffic.program}: {traffic.counted}"
    if traffic.counted != traffic.needed:
        line += f", needed {traffic.needed}"
    if traffic.excuse:
        line += f": {traffic.excuse}"
    line += f": {len(cases)}"
    if traffic.has_failed or traffic.excuse:
        line += f" ({', '.join(cases)})"
    return Text(line, style="red" if traffic.has_failed else "", overflow="fold")
