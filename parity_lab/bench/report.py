"""Output of the benchmark: tables, growth of time and memory, and a plot."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.text import Text

from mha_spec import InputError
from parity.measure.files.target import write_whole
from parity.measure.text import counted
from parity.use.reporting.console import print_table
from parity.use.reporting.plot import check_destination
from parity_lab.bench import Bench, Row
from parity_lab.bench.measure import OURS

TITLES = {"jax": "JAX", "torch": "torch", "": "Command line and files"}


def print_bench(found: Bench, out: Console) -> None:
    """Print a table for each framework, growth, and contenders that were left out."""
    for framework in dict.fromkeys(row.framework for row in found.rows):
        _print_rows([row for row in found.rows if row.framework == framework], framework, out)
        _print_operations(
            [row for row in found.rows if row.framework == framework and row.operations],
            framework,
            out,
        )
    if found.growth:
        _print_growth(found.growth, out)
    for (framework, name, reason), count in found.left_out.items():
        rows = counted(count, "row")
        out.print(
            Text(f"left out: {name} ({framework}, {rows}): {reason}", style="yellow"),
            soft_wrap=True,
        )


def _print_rows(rows: Sequence[Row], framework: str, out: Console) -> None:
    several = len({row.dtype for row in rows if row.dtype}) > 1
    columns = [Column("what", overflow="fold", max_width=30)]
    columns += [Column(name, no_wrap=True) for name in ("shape", *(["dtype"] if several else []))]
    columns += [
        Column(name, justify="right", no_wrap=True) for name in ("ours", "ratio", "limit", "MB")
    ]
    columns += [Column("libraries, best first (others)", overflow="fold")]
    cells = []
    for row in rows:
        shape = "x".join(map(str, row.shape)) or "—"
        numbers = (
            _number(row.ours_ms),
            _number(row.ratio),
            _number(row.limit_ratio),
            _megabytes(row.peak_bytes),
        )
        cells.append([row.what, shape, *([row.dtype] if several else []), *numbers, _peers(row)])
    styles = ["" if row.ratio is None or row.ratio >= 1 else "yellow" for row in rows]
    title = f"{TITLES[framework]}: times in ms; ratio: best library / ours; limit: ours / limit"
    print_table(out, title, columns, cells, styles)


def _peers(row: Row) -> str:
    """Return the times of libraries, best first, others in parentheses; or their memory."""
    if row.ours_ms is None:
        peaks = sorted(row.peers_peak_bytes.items(), key=lambda item: item[1])
        return ", ".join(f"{name} {_megabytes(peak)} MB" for name, peak in peaks)
    times = sorted(row.peers.items(), key=lambda item: (item[0] in row.not_counted, item[1]))
    shown = (
        f"({name} {_number(ms)})" if name in row.not_counted else f"{name} {_number(ms)}"
        for name, ms in times
    )
    extra = [] if row.extra_ms is None else [f"ours takes {_number(row.extra_ms)} more"]
    return ", ".join([*shown, *extra])


def _number(value: float | None) -> str:
    """Return a number with three digits."""
    if value is None:
        return "—"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _megabytes(nbytes: float | None) -> str:
    return (
        "—" if nbytes is None else f"{nbytes / 1e6:.1f}" if nbytes < 1e8 else f"{nbytes / 1e6:.0f}"
    )


def _print_operations(rows: Sequence[Row], framework: str, out: Console) -> None:
    """Print the counts of kernels, copies and waits of each contender, and its most frequent
    kernels.
    """
    if not rows:
        return
    several = len({row.dtype for row in rows}) > 1
    columns = [Column("what", overflow="fold", max_width=26)]
    columns += [
        Column(name, no_wrap=True) for name in ("shape", *(["dtype"] if several else []), "whose")
    ]
    columns += [
        Column(name, justify="right", no_wrap=True) for name in ("kernels", "copies", "waits")
    ]
    columns += [Column("most frequent kernels", overflow="fold")]
    cells = []
    for row in rows:
        of_row = [row.what, "x".join(map(str, row.shape)), *([row.dtype] if several else [])]
        for name, counts in row.operations.items():
            kernels = sorted(counts.kernels.items(), key=lambda item: -item[1])
            shown = ", ".join(f"{count} {_short(kernel)}" for kernel, count in kernels[:3])
            numbers = (sum(counts.kernels.values()), counts.copies, counts.syncs)
            cells.append(
                [*(of_row if name == OURS else [""] * len(of_row)), name, *map(str, numbers), shown]
            )
    print_table(
        out,
        f"{TITLES[framework]}: kernels, copies of tensors, waits for the device in one run",
        columns,
        cells,
    )


def _short(kernel: str) -> str:
    """Return the name of a kernel without its namespace, template arguments and parameters."""
    return re.split(r"[<(]", kernel.removeprefix("void "))[0].rsplit("::", 1)[-1]


def _print_growth(growth: Sequence[dict[str, Any]], out: Console) -> None:
    series = list(dict.fromkeys((line["of"], line["over"]) for line in growth))
    columns = [Column(name, no_wrap=True) for name in ("work", "framework", "dtype", "whose")]
    columns += [Column(f"{of} over {over}", justify="right", no_wrap=True) for of, over in series]
    lines: dict[tuple[str, str, str, str], dict[tuple[str, str], float | None]] = {}
    for line in growth:
        work = (
            line["what"]
            .removeprefix("growth-long ")
            .removeprefix("growth ")
            .removesuffix(" forward")
        )
        of_name = lines.setdefault((work, line["framework"], line["dtype"], line["name"]), {})
        of_name[line["of"], line["over"]] = line["exponent"]
    rows = []
    for key, exponents in lines.items():
        found = (exponents.get(each) for each in series)
        rows.append([*key, *("—" if value is None else f"{value:.2f}" for value in found)])
    title = "Growth: the exponent of time and of memory, over the larger half"
    print_table(out, title, columns, rows)


# ---- A picture -----------------------------------------------------------------------------------


def plot_growth(found: Bench, path: str | os.PathLike[str]) -> None:
    """Draw time and memory of the causal core over the sequence length, for all libraries; whole or
    not at all.

    Args:
        found: measurements with rows of the group `growth`.
        path: file to write; `.png` or `.svg` selects the format.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        OSError: if the file cannot be written.
        ValueError: if there are no rows to draw, or the path does not fit.
    """
    check_destination(path)
    rows = [row for row in found.rows if row.group == "growth"]
    if not rows:
        raise InputError("a plot", "have rows of the group growth", "none")
    write_whole(path, _draw(rows, Path(path).suffix.lower()[1:]))


def lines_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the milliseconds and megabytes by sequence length of each framework, dtype and
    contender.
    """
    batch = min(row.shape[0] for row in rows)
    others = {
        f"{row.framework} {name}" for row in rows for name in row.peers
    }  # each has a line of its own
    lines: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row.shape[2]):
        if row.shape[0] != batch:
            continue
        for name in (OURS, *row.peers):
            if name in others:
                continue
            key = (row.framework, row.dtype, name)
            line = lines.setdefault(
                key,
                {
                    "framework": row.framework,
                    "dtype": row.dtype,
                    "name": name,
                    "time": {},
                    "memory": {},
                },
            )
            ours = name == OURS
            ms = row.ours_ms if ours else row.peers[name]
            peak = row.peak_bytes if ours else row.peers_peak_bytes.get(name)
            line["time"] |= {row.shape[2]: ms} if ms else {}
            line["memory"] |= {row.shape[2]: peak / 1e6} if peak else {}
    return list(lines.values())


def _draw(rows: Sequence[Row], kind: str) -> bytes:
    import matplotlib as mpl
    from matplotlib.figure import (
        Figure,
    )  # without pyplot nothing global changes, and no window system is needed

    several = len({row.dtype for row in rows}) > 1
    lines = lines_of(rows)
    colors = {"jax": "tab:blue", "torch": "tab:red"}
    styles = ["--", ":", "-."]
    lengths = sorted({length for line in lines for length in line["time"]})
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mha-parity"}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        panels = figure.subplots(1, 2)
        for panel, of, unit in zip(
            panels, ("time", "memory"), ("ms", "MB beyond inputs and results"), strict=True
        ):
            theirs: dict[str, int] = {}
            for line in lines:
                framework, ours = line["framework"], line["name"] == OURS
                number = theirs.get(framework, 0)
                theirs[framework] = number if ours else number + 1
                label = f"mha_{framework}" if ours else f"{framework}: {line['name']}"
                panel.plot(
                    list(line[of]),
                    list(line[of].values()),
                    linestyle="-" if ours else styles[number % len(styles)],
                    linewidth=2.2 if ours else 1.2,
                    marker="o",
                    markersize=3,
                    color=colors[framework],
                    label=f"{label} ({line['dtype']})" if several else label,
                )
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(lengths, labels=list(map(str, lengths)))
            panel.minorticks_off()
            panel.set_xlabel("sequence length")
            panel.set_ylabel(f"{of}, {unit}")
            panel.grid(visible=True, alpha=0.3)
        panels[0].legend(fontsize=8)
        batch, num_heads, _, head_dim = rows[0].shape
        figure.suptitle(
            f"Causal attention, forward: batch {batch}, {num_heads} heads of {head_dim}",
            fontsize=10,
        )
        file = io.BytesIO()
        figure.savefig(
            file,
            format=kind,
            dpi=120,
            metadata={"Date": None} if kind == "svg" else {"Software": None},
        )
    return file.getvalue()
