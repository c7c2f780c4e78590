"""Plots of measurements: ratios to other libraries, growth with the tokens, divided layers and the
cost model.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from measurements import (
    FRAMEWORKS,
    MACHINES,
    WORK,
    Row,
    costs,
    divided,
    grown,
    machines,
    ratios_of,
    rows_of,
)

from parity.use.reporting.figure import NotebookFigure
from parity_lab.costs import PLANS

COLORS = {"jax": "#1f6feb", "torch": "#bf5b04"}
OF_PLANS = ("#1f6feb", "#bf5b04", "#8250df", "#1a7f37", "#c62828")
"""Colors of ways to divide a layer."""

GRAY = "#6e7781"
OURS, LIMIT = "ours", "limit"


class Line(NamedTuple):
    """A line of a plot.

    Attributes:
        label: text at its end.
        color: color of the line and of its label.
        points: values by their position on the horizontal axis, in order.
        is_ours: whether the line is one of ours, which are thicker.
    """

    label: str
    color: str
    points: dict[int, float]
    is_ours: bool = True


def plots() -> dict[str, NotebookFigure]:
    """Return each plot, by its name: `ratios` and `growth` of each machine that has such rows."""
    figures = {"devices": devices(), "cost-model": cost_model()}
    for machine in machines():
        rows = rows_of(machine)
        if ratios_of(rows):
            figures[f"ratios-{machine}"] = ratios(rows, MACHINES.get(machine, machine))
        if grown(rows):
            figures[f"growth-{machine}"] = growth(grown(rows))
    return figures


# ---- Ratios --------------------------------------------------------------------------------------


def ratios(rows: Sequence[Row], title: str) -> NotebookFigure:
    """Draw a dot for each row: the time of the fastest other library in the same framework / ours.

    A line marks the median of each suite, and labels its ends.
    """
    ratios_by_suite = ratios_of(rows)
    figure = NotebookFigure(figsize=(7.5, 0.9 + 0.42 * len(ratios_by_suite)), layout="constrained")
    axes = figure.add_subplot()
    for height, ((framework, _), values) in enumerate(ratios_by_suite.items()):
        draw_suite(axes, height, values, COLORS[framework])
    axes.axvline(1, color=GRAY, linestyle="--", linewidth=1)

    smallest = min(min(values) for values in ratios_by_suite.values())
    largest = max(max(values) for values in ratios_by_suite.values())
    axes.set(
        xscale="log",
        xlim=(smallest / 1.3, largest * 1.3),
        ylim=(len(ratios_by_suite) - 0.4, -0.6),
    )
    ticks = [2.0**power for power in range(-3, 5)]
    ticks = [tick for tick in ticks if smallest / 2 < tick < largest * 1.6]
    axes.set_xticks(ticks, labels=[f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    labels = [f"{FRAMEWORKS[framework]} {suite}" for framework, suite in ratios_by_suite]
    axes.set_yticks(range(len(labels)), labels=labels)
    axes.set(
        xlabel="time of the fastest other library / ours (right of 1: ours is faster)", title=title
    )
    return figure


def draw_suite(axes: Any, height: int, values: Sequence[float], color: str) -> None:
    """Draw the ratios of a suite at a height."""
    axes.scatter(values, [height] * len(values), s=36, color=color, alpha=0.6, linewidths=0)
    middle = median(values)
    axes.plot([middle, middle], [height - 0.28, height + 0.28], color=color, linewidth=2)
    # A suite with one value has one label.
    ends = {max(values): ("left", 1.05), min(values): ("right", 0.95)}
    for value, (align, shift) in ends.items():
        text = f"{value:.2f}"
        axes.text(value * shift, height, text, ha=align, va="center", fontsize=8, color=color)


# ---- Growth --------------------------------------------------------------------------------------


def growth(rows: Sequence[Row]) -> NotebookFigure:
    """Draw time and memory over the tokens, with a row of panels for each kind of work, at its
    smallest batch.
    """
    works = list(dict.fromkeys(row["what"] for row in rows))
    figure = NotebookFigure(figsize=(9, 3.6 * len(works)), layout="constrained")
    for panels, work in zip(figure.subplots(len(works), 2, squeeze=False), works, strict=True):
        rows_of_work = [row for row in rows if row["what"] == work]
        batch = min(size(row, "B") for row in rows_of_work)
        rows_of_work = [row for row in rows_of_work if size(row, "B") == batch]
        rows_of_work.sort(key=lambda row: size(row, "S"))
        title = work.removeprefix("growth ").removeprefix("growth-long ")
        time_panel, memory_panel = panels
        draw_lines(time_panel, lines_of(rows_of_work, ms_of), "tokens", "time, ms")
        label = "memory, MB beyond inputs and results"
        draw_lines(memory_panel, lines_of(rows_of_work, megabytes_of), "tokens", label)
        for panel in panels:
            panel.set_title(title, fontsize=10)
    return figure


def size(row: Row, axis: str) -> int:
    """Return the size of an axis of a row's shape, by its letter."""
    return row["shape"][row["axes"].split().index(axis)]


def lines_of(rows: Sequence[Row], values_of: Callable[[Row], dict[str, Any]]) -> list[Line]:
    """Return the line of each implementation over the tokens.

    Args:
        rows: rows of one kind of work, by the number of tokens.
        values_of: function that returns the values of a row by implementation, `ms_of` or
            `megabytes_of`.
    """
    points: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        for name, value in values_of(row).items():
            # Torch's library in a row of JAX has a line of its own.
            if row["framework"] == "jax" and name.startswith("torch "):
                continue
            if value:
                points.setdefault((row["framework"], name), {})[size(row, "S")] = value
    lines = []
    for (framework, name), line_points in points.items():
        color = GRAY if name == LIMIT else COLORS[framework]
        if name == OURS:
            lines.append(Line(f"mha_{framework}", color, line_points))
        else:
            label = f"{name} ({FRAMEWORKS[framework]})"
            lines.append(Line(label, color, line_points, is_ours=False))
    return lines


def ms_of(row: Row) -> dict[str, float | None]:
    """Return the time of each implementation in ms, and the limit."""
    return {OURS: row["ours_ms"], **row["peers"], LIMIT: row.get("limit_ms")}


def megabytes_of(row: Row) -> dict[str, float | None]:
    """Return the memory of each implementation in MB."""
    nbytes = {OURS: row["peak_bytes"], **row.get("peers_peak_bytes", {})}
    return {name: value / 1e6 for name, value in nbytes.items() if value is not None}


# ---- Several devices -----------------------------------------------------------------------------


def devices() -> NotebookFigure:
    """Draw temporary memory and received bytes of a device, by plan: gradients of a layer, and
    calls with a cache.
    """
    rows = divided()["rows"]
    gradients = [row for row in rows if row["program"] == "gradient"]
    caches = [row for row in rows if "cache" in row["plan"]]
    figure = NotebookFigure(figsize=(9, 6.4), layout="constrained")
    upper, lower = figure.subplots(2, 2)
    draw_plans(upper, gradients, "forward and backward")
    draw_plans(lower, caches, "with a cache of 8 sequences, 4096 slots")
    return figure


def draw_plans(panels: Any, rows: Sequence[Row], title: str) -> None:
    """Draw the bytes of several plans over the number of devices."""
    for panel, what in zip(panels, ("temporary", "received"), strict=True):
        lines = []
        for row, color in zip(rows, OF_PLANS, strict=True):
            points = {}
            for count, nbytes in zip(row["devices"], row[f"{what}_bytes"], strict=True):
                # One device divides nothing.
                if count > 1 and nbytes:
                    points[count] = nbytes / 1e6
            if points:
                lines.append(Line(row["plan"], color, points))
        draw_lines(panel, lines, "devices", f"{what}, MB per device")
        panel.set_title(title, fontsize=10)


def cost_model() -> NotebookFigure:
    """Draw operations per byte sent, by plan and number of devices, with the requirements of fast
    links and of a network.
    """
    figure = NotebookFigure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    counts = [2**power for power in range(1, 10)]
    for panel, (title, (batch, tokens)) in zip(panels, WORK.items(), strict=True):
        points: dict[str, dict[int, float]] = {plan: {} for plan in PLANS}
        for plan, count, cost in costs(batch, tokens, counts):
            points[plan][count] = cost.operations_per_byte
        lines = []
        for plan, color in zip(PLANS, OF_PLANS, strict=True):
            if points[plan]:
                lines.append(Line(plan, color, points[plan]))
        draw_lines(panel, lines, "devices", "operations per byte sent")
        draw_requirement(panel, 2e3, "fast links")
        draw_requirement(panel, 2e4, "network")
        panel.set_title(title, fontsize=10)
    return figure


def draw_requirement(panel: Any, operations_per_byte: float, what: str) -> None:
    """Draw how many operations per byte a connection requires."""
    panel.axhline(operations_per_byte, color=GRAY, linestyle="--", linewidth=1)
    panel.annotate(
        what,
        (0.99, operations_per_byte),
        xycoords=("axes fraction", "data"),
        fontsize=8,
        color=GRAY,
        ha="right",
        va="bottom",
    )


# ---- Lines ---------------------------------------------------------------------------------------


def draw_lines(panel: Any, lines: Sequence[Line], x_label: str, y_label: str) -> None:
    """Draw lines on logarithmic axes, each with its label at its end; leave the panel empty without
    lines.
    """
    if not lines:
        panel.set_axis_off()
        return
    panel.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
    numbers: set[int] = set()
    for line in lines:
        style: dict[str, Any] = {"linewidth": 1.2, "linestyle": "--"}
        if line.is_ours:
            style = {"linewidth": 2.2}
        x, y = list(line.points), list(line.points.values())
        panel.plot(x, y, color=line.color, marker="o", markersize=3, **style)
        numbers.update(line.points)
    ticks = sorted(numbers)
    panel.set_xticks(ticks, labels=[tick_label(tick) for tick in ticks])
    panel.xaxis.minorticks_off()
    panel.grid(visible=True, alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    # With room for the labels.
    panel.set_xlim(ticks[0] / 1.1, ticks[-1] * (ticks[-1] / ticks[0]) ** 0.55)
    panel.margins(y=0.12)
    draw_labels(panel, lines)


def tick_label(number: int) -> str:
    """Return a number, in units of 1024 from there on."""
    if number < 1024:
        return f"{number:g}"
    return f"{number / 1024:g}k"


def draw_labels(panel: Any, lines: Sequence[Line]) -> None:
    """Draw the label of each line at its end, away from labels of lines that end at the
    same number.
    """
    low, high = np.log(panel.get_ylim())
    for end in {list(line.points)[-1] for line in lines}:
        ending = [line for line in lines if list(line.points)[-1] == end]
        logarithms = [np.log(line.points[end]) for line in ending]
        heights = apart(logarithms, (high - low) * 0.065)
        for line, height in zip(ending, heights, strict=True):
            panel.text(
                end * 1.08, np.exp(height), line.label, va="center", fontsize=8, color=line.color
            )


def apart(values: Sequence[float], gap: float) -> list[float]:
    """Move values apart, in their order, so that no two are closer than the gap."""
    order = np.argsort(values, kind="stable")
    spread = np.array(values, float)
    for _ in range(100):
        for low, high in pairwise(order):
            missing = gap - (spread[high] - spread[low])
            if missing > 1e-9:
                spread[low] -= missing / 2
                spread[high] += missing / 2
    return spread.tolist()
