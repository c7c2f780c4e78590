"""Installed packages, devices of the backends, and missing packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.measure.core.packages import OPTIONAL
from parity.use.reporting.console import Row, print_table


def print_environment(
    environment: Mapping[str, Any],
    backends: Mapping[str, str | None],
    optional: Mapping[str, str | None],
    out: Console,
) -> None:
    """Print an environment: the machine, the backends, and optional packages.

    Args:
        environment: see `parity.measure.backends.numerics.environment`.
        backends: by name, the reason why it cannot run here, or None.
        optional: by name, the version of each optional package, or None.
        out: the console.
    """
    machine = [(name, str(environment[name])) for name in ("python", "platform", "cpus")]
    print_table(out, "Environment", (), [*machine, *environment["packages"].items()])
    rows: list[Row] = []
    for name, missing in backends.items():
        if missing is None:
            rows.append(_backend_row(name, environment["backends"][name]))
        else:
            rows.append((name, Text("no", style="yellow"), "", f"skipped: {missing}"))
    columns = ("backend", "runs here", "device", "numerics while a case runs")
    print_table(out, "Backends", columns, rows)
    rows = []
    for name, version in optional.items():
        _, purpose = OPTIONAL[name]
        if version is None:
            advice = f"not available: {purpose}; pip install {name}"
            rows.append((name, Text("missing", style="yellow"), advice))
        else:
            rows.append((name, version, purpose))
    package, version_column = (Column(name, no_wrap=True) for name in ("package", "version"))
    print_table(out, "Optional packages", [package, version_column, "needed for"], rows)


def _backend_row(name: str, facts: Mapping[str, Any]) -> Row:
    """Return the row of a backend that runs here: its device, the other ones, and its numerics."""
    device = facts["device"]
    devices = facts.get("cuda_devices") or facts.get("devices") or []
    other_devices = [other for other in devices if other != device]
    if other_devices:
        device = f"{device} ({', '.join(other_devices)})"
    numerics = ", ".join(f"{key}={value}" for key, value in facts["numerics"].items())
    return name, Text("yes", style="green"), device, numerics
