"""Installed packages, devices of the backends, and missing packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.measure.core.packages import OPTIONAL
from parity.use.reporting.console import print_table


def print_environment(
    found: Mapping[str, Any],
    backends: Mapping[str, str | None],
    optional: Mapping[str, str | None],
    out: Console,
) -> None:
    """Print an environment: the machine, the backends, and optional packages.

    Args:
        found: the environment, see `parity.measure.backends.numerics.environment`.
        backends: by name, the reason why it cannot run here, or None.
        optional: by name, the version of each optional package, or None.
        out: the console.
    """
    machine = [(name, str(found[name])) for name in ("python", "platform", "cpus")]
    print_table(out, "Environment", (), [*machine, *found["packages"].items()])
    rows: list[Sequence[str | Text]] = []
    for name, missing in backends.items():
        if missing is not None:
            rows.append((name, Text("no", style="yellow"), "", f"skipped: {missing}"))
            continue
        facts = found["backends"][name]
        device, devices = facts["device"], facts.get("cuda_devices") or facts.get("devices") or []
        others = ", ".join(each for each in devices if each != device)
        numerics = ", ".join(f"{key}={value}" for key, value in facts["numerics"].items())
        rows.append(
            (
                name,
                Text("yes", style="green"),
                f"{device} ({others})" if others else device,
                numerics,
            )
        )
    print_table(
        out, "Backends", ("backend", "runs here", "device", "numerics while a case runs"), rows
    )
    rows = []
    for name, version in optional.items():
        _, purpose = OPTIONAL[name]
        lack = (
            Text("missing", style="yellow"),
            f"skipped or refused: {purpose}; pip install {name}",
        )
        rows.append((name, *(lack if version is None else (version, purpose))))
    columns = [Column(name, no_wrap=True) for name in ("package", "version")]
    print_table(out, "Optional packages", [*columns, "needed for"], rows)
