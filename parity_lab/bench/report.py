"""Output of the benchmark: tables, growth of time and memory, and a plot."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

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
MOST_KERNELS = 3
"""Kernels of a contender that the table of operations names."""


def print_bench(measurements: Bench, out: Console) -> None:
    """Print a table for each framework, growth, and contenders that were left out."""
    for framework in dict.fromkeys(row.framework for row in measurements.rows):
        rows = [row for row in measurements.rows if row.framework == framework]
        _print_times(rows, framework, out)
        counted_rows = [row for row in rows if row.operations]
        if counted_rows:
            _print_operations(counted_rows, framework, out)
    if measurements.growth:
        _print_growth(measurements.growth, out)
    for (framework, name, reason), count in measurements.left_out.items():
        rows_of_it = counted(count, "row")
        line = Text(f"left out: {name} ({framework}, {rows_of_it}): {reason}", style="yellow")
        out.print(line, soft_wrap=True)


# ---- Times ---------------------------------------------------------------------------------------


def _print_times(rows: Sequence[Row], framework: str, out: Console) -> None:
    """Print the times, ratios and memory of the rows of a framework."""
    has_dtypes = _has_several_dtypes(rows)
    columns = [Column("what", overflow="fold", max_width=30), Column("shape", no_wrap=True)]
    if has_dtypes:
        columns.append(Column("dtype", no_wrap=True))
    for name in ("ours", "ratio", "limit", "MB"):
        columns.append(Column(name, justify="right", no_wrap=True))
    columns.append(Column("libraries, best first (others)", overflow="fold"))

    lines = []
    styles = []
    for row in rows:
        line = _cells_of_work(row, has_dtypes)
        line += [_number(row.ours_ms), _number(row.ratio), _number(row.limit_ratio)]
        line += [_megabytes(row.peak_bytes), _peers(row)]
        lines.append(line)
        is_slower = row.ratio is not None and row.ratio < 1
        styles.append("yellow" if is_slower else "")
    title = f"{TITLES[framework]}: times in ms; ratio: best library / ours; limit: ours / limit"
    print_table(out, title, columns, lines, styles)


def _has_several_dtypes(rows: Sequence[Row]) -> bool:
    """Return whether rows differ in their dtype; a row of an import has none."""
    return len({row.dtype for row in rows if row.dtype}) > 1


def _cells_of_work(row: Row, has_dtypes: bool) -> list[str]:
    """Return the cells that name the work of a row: what, its shape, perhaps its dtype."""
    cells = [row.what, "x".join(map(str, row.shape)) or "—"]
    if has_dtypes:
        cells.append(row.dtype)
    return cells


def _peers(row: Row) -> str:
    """Return the times of libraries in ms, best first, others in parentheses; or their memory."""
    if row.ours_ms is None:
        return _memory_of_peers(row)
    counted_peers = {}
    other_peers = {}
    for name, ms in row.peers.items():
        if name in row.not_counted:
            other_peers[name] = ms
        else:
            counted_peers[name] = ms
    words = [f"{name} {_number(ms)}" for name, ms in _smallest_first(counted_peers)]
    words += [f"({name} {_number(ms)})" for name, ms in _smallest_first(other_peers)]
    if row.extra_ms is not None:
        words.append(f"ours takes {_number(row.extra_ms)} more")
    return ", ".join(words)


def _memory_of_peers(row: Row) -> str:
    """Return the memory of libraries in MB, the smallest first."""
    peaks = _smallest_first(row.peers_peak_bytes)
    return ", ".join(f"{name} {_megabytes(peak)} MB" for name, peak in peaks)


def _smallest_first(values: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(values.items(), key=lambda item: item[1])


def _number(value: float | None) -> str:
    """Return a number with three digits."""
    if value is None:
        return "—"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _megabytes(nbytes: float | None) -> str:
    """Return bytes in MB, with a decimal below 100."""
    if nbytes is None:
        return "—"
    if nbytes >= 1e8:
        return f"{nbytes / 1e6:.0f}"
    return f"{nbytes / 1e6:.1f}"


# ---- Operations ----------------------------------------------------------------------------------


def _print_operations(rows: Sequence[Row], framework: str, out: Console) -> None:
    """Print the counts of kernels, copies and waits of each contender, and its most frequent
    kernels.
    """
    has_dtypes = _has_several_dtypes(rows)
    columns = [Column("what", overflow="fold", max_width=26), Column("shape", no_wrap=True)]
    if has_dtypes:
        columns.append(Column("dtype", no_wrap=True))
    columns.append(Column("whose", no_wrap=True))
    for name in ("kernels", "copies", "waits"):
        columns.append(Column(name, justify="right", no_wrap=True))
    columns.append(Column("most frequent kernels", overflow="fold"))

    lines = []
    for row in rows:
        work = _cells_of_work(row, has_dtypes)
        for name, operations in row.operations.items():
            # The work is named once, in the line of ours.
            line = list(work) if name == OURS else [""] * len(work)
            num_kernels = sum(operations.kernels.values())
            line += [name, str(num_kernels), str(operations.copies), str(operations.syncs)]
            line.append(_most_frequent(operations.kernels))
            lines.append(line)
    title = f"{TITLES[framework]}: kernels, copies of tensors, waits for the device in one run"
    print_table(out, title, columns, lines)


def _most_frequent(kernels: Any) -> str:
    """Return the most frequent kernels with their numbers of calls."""
    by_count = sorted(kernels.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {_short(kernel)}" for kernel, count in by_count[:MOST_KERNELS])


def _short(kernel: str) -> str:
    """Return the name of a kernel without its namespace, template arguments and parameters."""
    name = re.split(r"[<(]", kernel.removeprefix("void "))[0]
    return name.rsplit("::", 1)[-1]


# ---- Growth --------------------------------------------------------------------------------------


def _print_growth(growth: Sequence[dict[str, Any]], out: Console) -> None:
    """Print the exponents of growth: a line for each contender, a column for each of time and
    memory over each axis.
    """
    series = list(dict.fromkeys((line["of"], line["over"]) for line in growth))
    columns = [Column(name, no_wrap=True) for name in ("work", "framework", "dtype", "whose")]
    for of, over in series:
        columns.append(Column(f"{of} over {over}", justify="right", no_wrap=True))

    exponents: dict[tuple[str, str, str, str], dict[tuple[str, str], float | None]] = {}
    for line in growth:
        contender = (_growing_work(line["what"]), line["framework"], line["dtype"], line["name"])
        exponents.setdefault(contender, {})[line["of"], line["over"]] = line["exponent"]

    lines = []
    for contender, of_series in exponents.items():
        cells = list(contender)
        for name in series:
            exponent = of_series.get(name)
            cells.append("—" if exponent is None else f"{exponent:.2f}")
        lines.append(cells)
    title = "Growth: the exponent of time and of memory, over the larger half"
    print_table(out, title, columns, lines)


def _growing_work(what: str) -> str:
    """Return the description of a piece of work without its group and `forward`."""
    without_group = what.removeprefix("growth-long ").removeprefix("growth ")
    return without_group.removesuffix(" forward")


# ---- A picture -----------------------------------------------------------------------------------


def plot_growth(measurements: Bench, path: str | os.PathLike[str]) -> None:
    """Draw time and memory of the causal core over the sequence length, for all libraries; whole or
    not at all.

    Args:
        measurements: with rows of the group `growth`.
        path: file to write; `.png` or `.svg` selects the format.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        OSError: if the file cannot be written.
        ValueError: if there are no rows to draw, or the path does not fit.
    """
    check_destination(path)
    rows = [row for row in measurements.rows if row.group == "growth"]
    if not rows:
        raise InputError("a plot", "have rows of the group growth", "none")
    write_whole(path, _draw(rows, Path(path).suffix.lower()[1:]))


def lines_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the milliseconds and megabytes by sequence length of each framework, dtype and
    contender, at the smallest batch.
    """
    batch = min(row.shape[0] for row in rows)
    rows_of_batch = [row for row in rows if row.shape[0] == batch]
    # `torch SDPA` in a row of JAX has a line of its own, as SDPA of torch.
    own_lines = _contenders_of_frameworks(rows)

    lines: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in sorted(rows_of_batch, key=lambda row: row.shape[2]):
        seq_len = row.shape[2]
        for name in (OURS, *row.peers):
            if name in own_lines:
                continue
            key = (row.framework, row.dtype, name)
            if key not in lines:
                facts = {"framework": row.framework, "dtype": row.dtype, "name": name}
                lines[key] = {**facts, "time": {}, "memory": {}}
            ms = row.ms_of(name)
            if ms:
                lines[key]["time"][seq_len] = ms
            peak_bytes = row.peak_bytes_of(name)
            if peak_bytes:
                lines[key]["memory"][seq_len] = peak_bytes / 1e6
    return list(lines.values())


def _contenders_of_frameworks(rows: Iterable[Row]) -> set[str]:
    """Return the names that the libraries of each framework have in rows of another one."""
    names = set()
    for row in rows:
        names |= {f"{row.framework} {name}" for name in row.peers}
    return names


COLORS = {"jax": "tab:blue", "torch": "tab:red"}
DASHES = ("--", ":", "-.")
"""Line styles of libraries; ours is solid."""


def _draw(rows: Sequence[Row], kind: str) -> bytes:
    """Return the picture of time and memory, as a file of this kind, `png` or `svg`."""
    import matplotlib as mpl

    # Without pyplot nothing global changes, and no window system is needed.
    from matplotlib.figure import Figure

    lines = lines_of(rows)
    has_dtypes = _has_several_dtypes(rows)
    # A file has no date and no version, so that equal measurements give equal files.
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mha-parity"}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        time_panel, memory_panel = figure.subplots(1, 2)
        _draw_panel(time_panel, lines, "time", "ms", has_dtypes)
        _draw_panel(memory_panel, lines, "memory", "MB beyond inputs and results", has_dtypes)
        time_panel.legend(fontsize=8)
        batch, num_heads, _, head_dim = rows[0].shape
        title = f"Causal attention, forward: batch {batch}, {num_heads} heads of {head_dim}"
        figure.suptitle(title, fontsize=10)
        file = io.BytesIO()
        figure.savefig(file, format=kind, dpi=120, metadata=metadata)
    return file.getvalue()


def _draw_panel(
    panel: Any,
    lines: Sequence[dict[str, Any]],
    of: Literal["time", "memory"],
    unit: str,
    has_dtypes: bool,
) -> None:
    """Draw the lines of time or of memory over the sequence length, both on logarithmic axes."""
    num_peers = dict.fromkeys(COLORS, 0)
    for line in lines:
        framework = line["framework"]
        if line["name"] == OURS:
            label = f"mha_{framework}"
            linestyle, linewidth = "-", 2.2
        else:
            label = f"{framework}: {line['name']}"
            linestyle, linewidth = DASHES[num_peers[framework] % len(DASHES)], 1.2
            num_peers[framework] += 1
        if has_dtypes:
            label = f"{label} ({line['dtype']})"
        panel.plot(
            list(line[of]),
            list(line[of].values()),
            linestyle=linestyle,
            linewidth=linewidth,
            marker="o",
            markersize=3,
            color=COLORS[framework],
            label=label,
        )
    # Both panels have the ticks of all measured lengths.
    lengths: set[int] = set()
    for line in lines:
        lengths.update(line["time"])
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sorted(lengths), labels=[str(length) for length in sorted(lengths)])
    panel.minorticks_off()
    panel.set_xlabel("sequence length")
    panel.set_ylabel(f"{of}, {unit}")
    panel.grid(visible=True, alpha=0.3)
