"""Measurements of benchmarks/results: their page, and the table of targets."""

import json
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from reference import table

from mha_spec import AttentionSpec
from parity.measure.text import counted
from parity_lab.costs import PLANS, Cost, cost_of, why_not

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
MACHINES = {"epyc": "2 cores of an AMD EPYC with AVX-512", "h200": "NVIDIA H200"}
FRAMEWORKS = {"jax": "JAX", "torch": "torch", "": ""}

Row = dict[str, Any]
"""A row of `mha-parity bench --json`."""


class Measured(NamedTuple):
    """A file of `mha-parity bench --json`.

    Attributes:
        machine: what its name begins with, such as `epyc` in `epyc-2026-11-27.json`.
        date: the date in its name. The name may have more after it.
        content: its content.
    """

    machine: str
    date: str
    content: dict[str, Any]


def measured() -> list[Measured]:
    """All files with a date in their name, the earliest first."""
    found = []
    for path in sorted((FOLDER / "results").glob("*.json")):
        if match := re.fullmatch(r"(.+?)-(\d{4}-\d\d-\d\d).*", path.stem):
            found.append(Measured(match[1], match[2], json.loads(path.read_text("utf-8"))))
    return sorted(found, key=lambda each: each.date)


def rows_of(machine: str) -> list[Row]:
    """The latest measurement of each row on a machine."""
    rows = [row for each in measured() if each.machine == machine for row in each.content["rows"]]
    return list(
        {(row["framework"], row["what"], *row["shape"], row["dtype"]): row for row in rows}.values()
    )


def suite_of(row: Row) -> str:
    """The suite of a row; prompts and steps are two."""
    return row["what"].split()[-1] if row["group"] == "decode" else row["group"]


def grown(rows: Iterable[Row]) -> list[Row]:
    """The rows of suites that measure growth, whose names begin with that word."""
    return [row for row in rows if row["group"].startswith("growth")]


def ratios_of(rows: Iterable[Row]) -> dict[tuple[str, str], list[float]]:
    """The ratios of each framework and suite."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["framework"] and row["ratio"] is not None and not row["group"].startswith("growth"):
            found.setdefault((row["framework"], suite_of(row)), []).append(row["ratio"])
    return dict(sorted(found.items()))


def divided() -> dict[str, Any]:
    """The output of benchmarks/devices.py."""
    return json.loads((FOLDER / "results" / "devices.json").read_text("utf-8"))


# ---- Targets -------------------------------------------------------------------------------------


def targets() -> Iterator[tuple[str, str, str, str, str]]:
    """Each target: description, bound, measured range, met or not, and the reason if it is not."""
    for target in json.loads((FOLDER / "targets.json").read_text("utf-8")):
        values = sorted(values_of(target))
        if not values:
            raise ValueError(f"benchmarks/targets.json must have rows for {target['about']!r}")
        least = target.get("at_least")
        if least is not None:
            is_met, bound, sign = values[0] >= least, least, "≥"
        else:
            is_met, bound, sign = values[-1] <= target["at_most"], target["at_most"], "≤"
        ends = [digits_of(value, None if is_met else bound) for value in (values[0], values[-1])]
        shown = " to ".join(dict.fromkeys(ends))
        reason = "" if is_met else target.get("cause", "not examined")
        yield target["about"], f"{sign} {bound:g}", shown, "yes" if is_met else "**no**", reason


def digits_of(value: float, missed: float | None) -> str:
    """A value with two decimals, or as many as distinguish it from the bound that it misses."""
    for decimals in (2, 3, 4):
        text = f"{value:.{decimals}f}"
        if missed is None or value == missed or float(text) != missed:
            return text
    return f"{value:.5f}"


def values_of(target: dict[str, Any]) -> Iterator[float]:
    """The values that a target compares: a field of its rows, a time of another library or of
    another row by ours.
    """
    rows = rows_of(target["machine"])
    for row in rows:
        named = {**row, "shape": "x".join(map(str, row["shape"]))}
        if all(fnmatch(named[key], pattern) for key, pattern in target["rows"].items()):
            if "value" in target:
                yield row[target["value"]]
            elif "peer" in target:
                yield row["peers"][target["peer"]] / row["ours_ms"]
            else:
                (other,) = (
                    each
                    for each in rows
                    if each["what"] == target["other"]
                    and all(each[key] == row[key] for key in ("framework", "shape", "dtype"))
                )
                yield other["ours_ms"] / row["ours_ms"]


def targets_table() -> str:
    """The table of targets, in Markdown."""
    return table(("target", "bound", "measured", "met", "reason"), targets()) + "\n"


# ---- Tables --------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """The text of the page, and of the table that another page includes, by their names in the
    site.
    """
    return {"evidence/benchmarks": page(), "evidence/targets.inc": targets_table()}


def page() -> str:
    """All figures, in collapsed tables."""
    parts = [
        "# Benchmarks",
        "All measurements. [Performance](performance.md) has plots, and explains the columns. "
        "Times are in ms. "
        "Memory is beyond inputs and results, in MB.",
    ]
    for machine in dict.fromkeys(each.machine for each in measured()):
        rows = rows_of(machine)
        names = [
            name for name, found in (("ratios", ratios_of(rows)), ("growth", grown(rows))) if found
        ]
        parts += [f"## {MACHINES.get(machine, machine)}"]
        parts += [
            f"```{{image}} ../pictures/{name}-{machine}.svg\n:alt: {name}\n```" for name in names
        ]
        for each in reversed(measured()):
            parts += file_parts(each) if each.machine == machine else []
    parts += [
        "## Divided layers",
        f"{divided()['about'].capitalize()}, on virtual devices of a CPU, in MB per device.",
    ]
    parts.append(
        dropdown("Memory and traffic on 1, 2, 4 and 8 devices", devices_table(divided()["rows"]))
    )
    parts += ["## Cost model", COST_ABOUT, dropdown("Traffic by plan", costs_table())]
    return "\n\n".join(parts) + "\n"


def file_parts(measured: Measured) -> list[str]:
    """The section of a file."""
    content, environment = measured.content, measured.content["environment"]
    packages = ", ".join(
        f"{name} {version}" for name, version in environment["packages"].items() if version
    )
    parts = [
        f"### {measured.date}",
        f"{environment['platform']}; {packages}.",
        *filter(None, [content.get("note")]),
    ]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in content["rows"]:
        groups.setdefault((suite_of(row), row["framework"]), []).append(row)
    for (suite, framework), rows in groups.items():
        title = " ".join(filter(None, (FRAMEWORKS[framework], suite)))
        parts.append(dropdown(f"{title}: {counted(len(rows), 'row')}", rows_table(rows)))
    if content.get("growth"):
        parts.append(dropdown("Exponents of growth", growth_table(content["growth"])))
    return parts


def dropdown(title: str, content: str) -> str:
    """A table that a click shows."""
    return f":::{{dropdown}} {title}\n{content}\n:::"


def number(value: float | None) -> str:
    """A number with three digits."""
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def megabytes(nbytes: float | None) -> str:
    """Bytes in MB."""
    return number(None if nbytes is None else nbytes / 1e6)


def rows_table(rows: list[Row]) -> str:
    """Measurements, with every library."""
    head = ("work", "shape", "ours", "others", "ratio", "limit", "MB", "MB of others")
    cells = []
    for row in rows:
        peers = sorted(row["peers"].items(), key=lambda item: item[1])
        peaks = sorted(row.get("peers_peak_bytes", {}).items(), key=lambda item: item[1])
        work = row["what"] if row["dtype"] in ("float32", "") else f"{row['what']}, {row['dtype']}"
        cells.append(
            (
                *(
                    work,
                    " × ".join(map(str, row["shape"])),
                    number(row["ours_ms"] or row.get("extra_ms")),
                ),
                ", ".join(f"{number(ms)} {name}" for name, ms in peers),
                *(number(row["ratio"]), number(row["limit_ratio"]), megabytes(row["peak_bytes"])),
                ", ".join(f"{megabytes(nbytes)} {name}" for name, nbytes in peaks),
            )
        )
    used = [i for i in range(len(head)) if i == 0 or any(row[i] for row in cells)]
    return table(tuple(head[i] for i in used), [tuple(row[i] for i in used) for row in cells])


def growth_table(growth: list[dict[str, Any]]) -> str:
    """The exponents of time and memory, for each contender."""
    columns = list(dict.fromkeys((line["of"], line["over"]) for line in growth))
    lines: dict[tuple[str, str, str], dict[tuple[str, str], str]] = {}
    for line in growth:
        exponents = lines.setdefault(
            (line["what"], FRAMEWORKS[line["framework"]], line["name"]), {}
        )
        exponents[line["of"], line["over"]] = (
            "" if line["exponent"] is None else f"{line['exponent']:.2f}"
        )
    rows = [
        (*key, *(exponents.get(each, "") for each in columns)) for key, exponents in lines.items()
    ]
    return table(
        ("work", "framework", "implementation", *(f"{of} over {over}" for of, over in columns)),
        rows,
    )


def devices_table(rows: list[dict[str, Any]]) -> str:
    """Memory, traffic and collectives of divided layers."""
    keys = ("temporary_bytes", "input_bytes", "received_bytes")
    cells = [
        (
            *(row["plan"], row["program"]),
            *(" / ".join(map(megabytes, row[key])) for key in keys),
            ", ".join(f"{count} {kind}" for kind, count in row["collectives"][-1].items()),
        )
        for row in rows
    ]
    return table(
        ("plan", "program", "temporary", "inputs", "received", "collectives on 8 devices"), cells
    )


# ---- Cost model ----------------------------------------------------------------------------------

LARGE = AttentionSpec(8192, 64, num_kv_heads=8, qkv_bias=False, out_bias=False)
"""A layer of a model of 70 billion parameters."""

WORK = {"512 sequences of 8192 tokens": (512, 8192), "1 sequence of 131,072 tokens": (1, 131072)}
COST_ABOUT = (
    "A layer of a model of 70 billion parameters (E 8192, N 64, K 8, H 128) in bfloat16, forward "
    "and backward, per "
    "device, as `parity_lab.costs` computes it."
)


def costs(batch: int, tokens: int, counts: Iterable[int]) -> Iterator[tuple[str, int, Cost]]:
    """Each plan, number of devices and cost, if the plan divides this work over that many."""
    for plan in PLANS:
        for devices in counts:
            if not why_not(LARGE, plan, devices, batch=batch, tokens=tokens):
                yield plan, devices, cost_of(LARGE, plan, devices, batch=batch, tokens=tokens)


def costs_table() -> str:
    """Traffic of each plan."""
    head = (
        "work",
        "plan",
        "devices",
        "weights, MB",
        "sent forward, GB",
        "sent backward, GB",
        "operations per byte",
    )
    return table(head, cost_rows())


def cost_rows() -> Iterable[tuple[object, ...]]:
    """A row for each plan and number of devices."""
    for work, (batch, tokens) in WORK.items():
        for plan, devices, cost in costs(batch, tokens, (8, 64, 512)):
            moved = (f"{nbytes / 1e9:.3g}" for nbytes in (cost.moved_forward, cost.moved_backward))
            yield (
                work,
                plan,
                devices,
                megabytes(cost.weights),
                *moved,
                f"{cost.operations_per_byte:,.0f}",
            )
