"""What is installed, where the backends run, and what would be skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from parity.core.packages import OPTIONAL
from parity.reporting.console import begin_table


def print_environment(
    found: Mapping[str, Any],
    backends: Mapping[str, str | None],
    optional: Mapping[str, str | None],
    out: Console,
) -> None:
    """Print an environment: the machine, the backends, and packages that one may do without.

    Args:
        found: the environment, see `parity.backends.numerics.environment`.
        backends: by name, why each cannot run here, or nothing.
        optional: by name, the version of each optional package, or nothing.
        out: where to.
    """
    table = begin_table(out, "Environment", show_header=False)
    table.add_row("python", found["python"])
    table.add_row("platform", found["platform"])
    table.add_row("cpus", str(found["cpus"]))
    for package, version in found["packages"].items():
        table.add_row(package, version)
    out.print(table)
    _print_backends(found["backends"], backends, out)
    table = begin_table(out, "Optional packages")
    table.add_column("package", no_wrap=True)
    table.add_column("version", no_wrap=True)
    table.add_column("needed for", overflow="fold")
    for name, version in optional.items():
        _, purpose = OPTIONAL[name]
        table.add_row(
            name,
            Text("missing", style="yellow") if version is None else version,
            purpose if version is not None else f"skipped or refused: {purpose}; pip install {name}",
        )
    out.print(table)


def _print_backends(found: Mapping[str, Any], backends: Mapping[str, str | None], out: Console) -> None:
    table = begin_table(out, "Backends")
    for column in ("backend", "runs here", "device", "numerics while a case runs"):
        table.add_column(column, overflow="fold")
    for name, missing in backends.items():
        if missing is not None:
            table.add_row(name, Text("no", style="yellow"), "", f"skipped: {missing}")
            continue
        facts = found[name]
        device, devices = facts["device"], facts.get("cuda_devices") or facts.get("devices") or []
        others = ", ".join(each for each in devices if each != device)
        numerics = ", ".join(f"{key}={value}" for key, value in facts["numerics"].items())
        table.add_row(name, Text("yes", style="green"), f"{device} ({others})" if others else device, numerics)
    out.print(table)
