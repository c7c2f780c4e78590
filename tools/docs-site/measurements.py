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
    """Return all files with a date in their name, the earliest first."""
    files = []
    for path in sorted((FOLDER / "results").glob("*.json")):
        match = re.fullmatch(r"(.+?)-(\d{4}-\d\d-\d\d).*", path.stem)
        if match is not None:
            content = json.loads(path.read_text("utf-8"))
            files.append(Measured(match[1], match[2], content))
    return sorted(files, key=lambda file: file.date)


def machines() -> list[str]:
    """Return the machines that were measured."""
    return list(dict.fromkeys(file.machine for file in measured()))


def rows_of(machine: str) -> list[Row]:
    """Return the latest measurement of each row on a machine."""
    latest: dict[tuple[Any, ...], Row] = {}
    for file in measured():
        if file.machine != machine:
            continue
        for row in file.content["rows"]:
            latest[row["framework"], row["what"], *row["shape"], row["dtype"]] = row
    return list(latest.values())


def suite_of(row: Row) -> str:
    """Return the suite of a row; prompts and steps are two."""
    if row["group"] == "decode":
        return row["what"].split()[-1]
    return row["group"]


def grown(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of suites that measure growth, whose names begin with that word."""
    return [row for row in rows if row["group"].startswith("growth")]


def ratios_of(rows: Iterable[Row]) -> dict[tuple[str, str], list[float]]:
    """Return the ratios of each framework and suite."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if not row["framework"] or row["ratio"] is None or row["group"].startswith("growth"):
            continue
        ratios.setdefault((row["framework"], suite_of(row)), []).append(row["ratio"])
    return dict(sorted(ratios.items()))


def divided() -> dict[str, Any]:
    """Return the output of benchmarks/devices.py."""
    return json.loads((FOLDER / "results" / "devices.json").read_text("utf-8"))


# ---- Targets -------------------------------------------------------------------------------------


def targets() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield each target: description, bound, measured range, met or not, and the reason if it is
    not.
    """
    for target in json.loads((FOLDER / "targets.json").read_text("utf-8")):
        values = sorted(values_of(target))
        if not values:
            raise ValueError(f"benchmarks/targets.json must have rows for {target['about']!r}")
        smallest, largest = values[0], values[-1]
        # The worst row decides.
        if "at_least" in target:
            bound, sign = target["at_least"], "≥"
            is_met = smallest >= bound
        else:
            bound, sign = target["at_most"], "≤"
            is_met = largest <= bound
        missed = None if is_met else bound
        ends = [digits_of(smallest, missed), digits_of(largest, missed)]
        measured_range = " to ".join(dict.fromkeys(ends))
        verdict, reason = "yes", ""
        if not is_met:
            verdict, reason = "**no**", target.get("cause", "not examined")
        yield target["about"], f"{sign} {bound:g}", measured_range, verdict, reason


def digits_of(value: float, missed: float | None) -> str:
    """Return a value with two decimals, or as many as distinguish it from the bound that it
    misses.
    """
    for decimals in (2, 3, 4):
        text = f"{value:.{decimals}f}"
        if missed is None or value == missed or float(text) != missed:
            return text
    return f"{value:.5f}"


def values_of(target: dict[str, Any]) -> Iterator[float]:
    """Yield the values that a target compares: a field of its rows, a time of another library or of
    another row by ours.
    """
    rows = rows_of(target["machine"])
    for row in rows:
        if not matches(row, target["rows"]):
            continue
        if "value" in target:
            yield row[target["value"]]
        elif "peer" in target:
            yield row["peers"][target["peer"]] / row["ours_ms"]
        else:
            other = row_like(row, rows, target["other"])
            yield other["ours_ms"] / row["ours_ms"]


def matches(row: Row, patterns: dict[str, str]) -> bool:
    """Return whether fields of a row match patterns; a shape is written `1x8x128`."""
    texts = {**row, "shape": "x".join(str(size) for size in row["shape"])}
    return all(fnmatch(texts[key], pattern) for key, pattern in patterns.items())


def row_like(row: Row, rows: list[Row], what: str) -> Row:
    """Return the only row of other work with the same framework, shape and dtype."""
    keys = ("framework", "shape", "dtype")
    same = [other for other in rows if all(other[key] == row[key] for key in keys)]
    (other,) = [other for other in same if other["what"] == what]
    return other


def targets_table() -> str:
    """Return the table of targets, in Markdown."""
    return table(("target", "bound", "measured", "met", "reason"), targets()) + "\n"


# ---- Tables --------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """Return the text of the page, and of the table that another page includes, by their names in
    the site.
    """
    return {"evidence/benchmarks": page(), "evidence/targets.inc": targets_table()}


def page() -> str:
    """Return all figures, in collapsed tables."""
    parts = [
        "# Benchmarks",
        "All measurements. [Performance](performance.md) has plots, and explains the columns. "
        "Times are in ms. Memory is beyond inputs and results, in MB.",
    ]
    for machine in machines():
        parts += machine_parts(machine)
    devices = divided()
    parts += [
        "## Divided layers",
        f"{devices['about'].capitalize()}, on virtual devices of a CPU, in MB per device.",
        dropdown("Memory and traffic on 1, 2, 4 and 8 devices", devices_table(devices["rows"])),
        "## Cost model",
        COST_ABOUT,
        dropdown("Traffic by plan", costs_table()),
    ]
    return "\n\n".join(parts) + "\n"


def machine_parts(machine: str) -> list[str]:
    """Return the section of a machine: its pictures, and its files, the latest first."""
    rows = rows_of(machine)
    parts = [f"## {MACHINES.get(machine, machine)}"]
    if ratios_of(rows):
        parts.append(picture("ratios", machine))
    if grown(rows):
        parts.append(picture("growth", machine))
    for file in reversed(measured()):
        if file.machine == machine:
            parts += file_parts(file)
    return parts


def picture(name: str, machine: str) -> str:
    """Return a picture of `plots`."""
    return f"```{{image}} ../pictures/{name}-{machine}.svg\n:alt: {name}\n```"


def file_parts(file: Measured) -> list[str]:
    """Return the section of a file."""
    environment = file.content["environment"]
    versions = {name: version for name, version in environment["packages"].items() if version}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts = [f"### {file.date}", f"{environment['platform']}; {packages}."]
    note = file.content.get("note")
    if note:
        parts.append(note)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in file.content["rows"]:
        groups.setdefault((suite_of(row), row["framework"]), []).append(row)
    for (suite, framework), rows in groups.items():
        title = f"{FRAMEWORKS[framework]} {suite}".strip()
        parts.append(dropdown(f"{title}: {counted(len(rows), 'row')}", rows_table(rows)))
    growth = file.content.get("growth")
    if growth:
        parts.append(dropdown("Exponents of growth", growth_table(growth)))
    return parts


def dropdown(title: str, content: str) -> str:
    """Return a table that a click shows."""
    return f":::{{dropdown}} {title}\n{content}\n:::"


def number(value: float | None) -> str:
    """Return a number with three digits."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def megabytes(nbytes: float | None) -> str:
    """Return bytes in MB."""
    if nbytes is None:
        return ""
    return number(nbytes / 1e6)


def rows_table(rows: list[Row]) -> str:
    """Return a table of measurements, with every library, without empty columns."""
    head = ("work", "shape", "ours", "others", "ratio", "limit", "MB", "MB of others")
    lines = [cells_of(row) for row in rows]
    columns = [0]
    for column in range(1, len(head)):
        if any(line[column] for line in lines):
            columns.append(column)
    heads_in_use = tuple(head[column] for column in columns)
    lines_in_use = [tuple(line[column] for column in columns) for line in lines]
    return table(heads_in_use, lines_in_use)


def cells_of(row: Row) -> tuple[str, ...]:
    """Return the cells of a row of `rows_table`."""
    work = row["what"]
    if row["dtype"] not in ("float32", ""):
        work = f"{work}, {row['dtype']}"
    peers = sorted(row["peers"].items(), key=lambda item: item[1])
    peaks = sorted(row.get("peers_peak_bytes", {}).items(), key=lambda item: item[1])
    return (
        work,
        " × ".join(str(size) for size in row["shape"]),
        number(row["ours_ms"] or row.get("extra_ms")),
        ", ".join(f"{number(ms)} {name}" for name, ms in peers),
        number(row["ratio"]),
        number(row["limit_ratio"]),
        megabytes(row["peak_bytes"]),
        ", ".join(f"{megabytes(nbytes)} {name}" for name, nbytes in peaks),
    )


def growth_table(growth: list[dict[str, Any]]) -> str:
    """Return a table of the exponents of time and memory, for each contender."""
    columns = list(dict.fromkeys((line["of"], line["over"]) for line in growth))
    heads = ["work", "framework", "implementation"]
    heads += [f"{of} over {over}" for of, over in columns]
    exponents: dict[tuple[str, str, str], dict[tuple[str, str], str]] = {}
    for line in growth:
        contender = (line["what"], FRAMEWORKS[line["framework"]], line["name"])
        text = ""
        if line["exponent"] is not None:
            text = f"{line['exponent']:.2f}"
        exponents.setdefault(contender, {})[line["of"], line["over"]] = text
    rows = []
    for contender, texts in exponents.items():
        rows.append((*contender, *[texts.get(column, "") for column in columns]))
    return table(tuple(heads), rows)


def devices_table(rows: list[dict[str, Any]]) -> str:
    """Return a table of memory, traffic and collectives of divided layers."""
    lines = []
    for row in rows:
        line = [row["plan"], row["program"]]
        for key in ("temporary_bytes", "input_bytes", "received_bytes"):
            line.append(" / ".join(megabytes(nbytes) for nbytes in row[key]))
        collectives = row["collectives"][-1]
        line.append(", ".join(f"{count} {kind}" for kind, count in collectives.items()))
        lines.append(tuple(line))
    return table(
        ("plan", "program", "temporary", "inputs", "received", "collectives on 8 devices"), lines
    )


# ---- Cost model ----------------------------------------------------------------------------------

LARGE = AttentionSpec(8192, 64, num_kv_heads=8, qkv_bias=False, out_bias=False)
"""A layer of a model of 70 billion parameters."""

WORK = {"512 sequences of 8192 tokens": (512, 8192), "1 sequence of 131,072 tokens": (1, 131072)}
COST_ABOUT = (
    "A layer of a model of 70 billion parameters (E 8192, N 64, K 8, H 128) in bfloat16, forward "
    "and backward, per device, as `parity_lab.costs` computes it."
)


def costs(batch: int, tokens: int, counts: Iterable[int]) -> Iterator[tuple[str, int, Cost]]:
    """Yield each plan, number of devices and cost, if the plan divides this work over that many."""
    for plan in PLANS:
        for devices in counts:
            if not why_not(LARGE, plan, devices, batch=batch, tokens=tokens):
                yield plan, devices, cost_of(LARGE, plan, devices, batch=batch, tokens=tokens)


def costs_table() -> str:
    """Return a table of the traffic of each plan."""
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
    """Yield a row for each plan and number of devices."""
    for work, (batch, tokens) in WORK.items():
        for plan, devices, cost in costs(batch, tokens, (8, 64, 512)):
            yield (
                work,
                plan,
                devices,
                megabytes(cost.weights),
                f"{cost.moved_forward / 1e9:.3g}",
                f"{cost.moved_backward / 1e9:.3g}",
                f"{cost.operations_per_byte:,.0f}",
            )
