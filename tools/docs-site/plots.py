"""Plots of measurements: ratios to other libraries, growth with the tokens, divided layers and the
cost model.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from measurements import (
    FRAMEWORKS,
    MACHINES,
    WORK,
    Row,
    costs,
    divided,
    grown,
    measured,
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
Line = tuple[str, str, Sequence[float], Sequence[float], bool]
"""Label, color, x, y, and whether the line is one of ours."""


def plots() -> dict[str, NotebookFigure]:
    """Each plot, by its name: `ratios` and `growth` of each machine that has such rows."""
    drawn = {"devices": devices(), "cost-model": cost_model()}
    for machine in dict.fromkeys(each.machine for each in measured()):
        rows = rows_of(machine)
        if ratios_of(rows):
            drawn[f"ratios-{machine}"] = ratios(rows, MACHINES.get(machine, machine))
        if found := grown(rows):
            drawn[f"growth-{machine}"] = growth(found)
    return drawn


# ---- Ratios --------------------------------------------------------------------------------------


def ratios(rows: Sequence[Row], title: str) -> NotebookFigure:
    """A dot for each row: the time of the fastest other library in the same framework / ours."""
    found = ratios_of(rows)
    figure = NotebookFigure(figsize=(7.5, 0.9 + 0.42 * len(found)), layout="constrained")
    axes = figure.add_subplot()
    for place, ((framework, _), values) in enumerate(found.items()):
        axes.scatter(
            values, [place] * len(values), s=36, color=COLORS[framework], alpha=0.6, linewidths=0
        )
        axes.plot(
            [median(values)] * 2, [place - 0.28, place + 0.28], color=COLORS[framework], linewidth=2
        )
        for value, align in {max(values): "left", min(values): "right"}.items():
            x, color = value * (0.95 if align == "right" else 1.05), COLORS[framework]
            axes.text(x, place, f"{value:.2f}", ha=align, va="center", fontsize=8, color=color)
    axes.axvline(1, color=GRAY, linestyle="--", linewidth=1)
    every = [value for values in found.values() for value in values]
    ticks = [
        tick
        for tick in (0.125, 0.25, 0.5, 1, 2, 4, 8, 16)
        if min(every) / 2 < tick < max(every) * 1.6
    ]
    axes.set(xscale="log", xlim=(min(every) / 1.3, max(every) * 1.3), ylim=(len(found) - 0.4, -0.6))
    axes.set_xticks(ticks, labels=[f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(
        range(len(found)), labels=[f"{FRAMEWORKS[framework]} {suite}" for framework, suite in found]
    )
    axes.set(
        xlabel="time of the fastest other library / ours (right of 1: ours is faster)", title=title
    )
    return figure


# ---- Growth --------------------------------------------------------------------------------------


def growth(rows: Sequence[Row]) -> NotebookFigure:
    """Time and memory over the tokens, with a row of panels for each kind of work and its smallest
    batch.
    """
    works = list(dict.fromkeys(row["what"] for row in rows))
    figure = NotebookFigure(figsize=(9, 3.6 * len(works)), layout="constrained")
    for panels, work in zip(figure.subplots(len(works), 2, squeeze=False), works, strict=True):
        of_work = [row for row in rows if row["what"] == work]
        least = min(size(row, "B") for row in of_work)
        of_work = sorted(
            (row for row in of_work if size(row, "B") == least), key=lambda row: size(row, "S")
        )
        for panel, of, unit in zip(
            panels, ("time", "memory"), ("ms", "MB beyond inputs and results"), strict=True
        ):
            draw_lines(panel, lines_of(of_work, of), "tokens", f"{of}, {unit}")
            panel.set_title(work.removeprefix("growth ").removeprefix("growth-long "), fontsize=10)
    return figure


def size(row: Row, axis: str) -> int:
    """The size of an axis of a row's shape, by its letter."""
    return row["shape"][row["axes"].split().index(axis)]


def lines_of(rows: Sequence[Row], of: str) -> list[Line]:
    """The line of each implementation, in ms or in MB."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        own, others = (row["ours_ms"], row["peers"]) if of == "time" else memory_of(row)
        limit = {LIMIT: row.get("limit_ms")} if of == "time" else {}
        for name, value in {OURS: own, **others, **limit}.items():
            if value and not (row["framework"] == "jax" and name.startswith("torch ")):
                found.setdefault((row["framework"], name), {})[size(row, "S")] = value
    return [
        (
            f"mha_{framework}" if name == OURS else f"{name} ({FRAMEWORKS[framework]})",
            *(
                GRAY if name == LIMIT else COLORS[framework],
                [*points],
                [*points.values()],
                name == OURS,
            ),
        )
        for (framework, name), points in found.items()
    ]


def memory_of(row: Row) -> tuple[float | None, dict[str, float]]:
    """The memory in MB, ours and others'."""
    own = row["peak_bytes"]
    others = {name: nbytes / 1e6 for name, nbytes in row.get("peers_peak_bytes", {}).items()}
    return None if own is None else own / 1e6, others


# ---- Several devices -----------------------------------------------------------------------------


def devices() -> NotebookFigure:
    """Temporary memory and received bytes of a device, by plan: gradients of a layer, and calls
    with a cache.
    """
    groups = {
        "forward and backward": [row for row in divided()["rows"] if row["program"] == "gradient"],
        "with a cache of 8 sequences, 4096 slots": [
            row for row in divided()["rows"] if "cache" in row["plan"]
        ],
    }
    figure = NotebookFigure(figsize=(9, 6.4), layout="constrained")
    for panels, (title, rows) in zip(figure.subplots(2, 2), groups.items(), strict=True):
        for panel, what in zip(panels, ("temporary", "received"), strict=True):
            lines = []
            for row, color in zip(rows, OF_PLANS, strict=True):
                pairs = zip(row["devices"], row[f"{what}_bytes"], strict=True)
                points = {count: nbytes / 1e6 for count, nbytes in pairs if nbytes and count > 1}
                lines.append((row["plan"], color, [*points], [*points.values()], True))
            draw_lines(
                panel, [line for line in lines if line[2]], "devices", f"{what}, MB per device"
            )
            panel.set_title(title, fontsize=10)
    return figure


def cost_model() -> NotebookFigure:
    """Operations per byte sent, by plan and number of devices, with the requirements of fast links
    and of a network.
    """
    figure = NotebookFigure(figsize=(9, 3.8), layout="constrained")
    for panel, (title, (batch, tokens)) in zip(
        figure.subplots(1, 2, sharey=True), WORK.items(), strict=True
    ):
        plans: dict[str, dict[int, float]] = {plan: {} for plan in PLANS}
        for plan, count, cost in costs(batch, tokens, [2**power for power in range(1, 10)]):
            plans[plan][count] = cost.operations_per_byte
        lines = [
            (plan, color, [*points], [*points.values()], True)
            for (plan, points), color in zip(plans.items(), OF_PLANS, strict=True)
            if points
        ]
        draw_lines(panel, lines, "devices", "operations per byte sent")
        for needed, what in ((2e3, "fast links"), (2e4, "network")):
            panel.axhline(needed, color=GRAY, linestyle="--", linewidth=1)
            at = (0.99, needed)
            panel.annotate(
                what,
                at,
                xycoords=("axes fraction", "data"),
                fontsize=8,
                color=GRAY,
                ha="right",
                va="bottom",
            )
        panel.set_title(title, fontsize=10)
    return figure


# ---- Lines ---------------------------------------------------------------------------------------


def draw_lines(panel: Any, lines: Sequence[Line], x_label: str, y_label: str) -> None:
    """Draw lines on logarithmic axes, each with its label at its end; leave the panel empty without
    lines.
    """
    if not lines:
        panel.set_axis_off()
        return
    panel.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
    for _, color, x, y, is_ours in lines:
        style = {"linewidth": 2.2} if is_ours else {"linewidth": 1.2, "linestyle": "--"}
        panel.plot(x, y, color=color, marker="o", markersize=3, **style)
    ticks = sorted({value for line in lines for value in line[2]})
    panel.set_xticks(
        ticks, labels=[f"{tick:g}" if tick < 1024 else f"{tick / 1024:g}k" for tick in ticks]
    )
    panel.xaxis.minorticks_off()
    panel.grid(visible=True, alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlim(
        ticks[0] / 1.1, ticks[-1] * (ticks[-1] / ticks[0]) ** 0.55
    )  # with room for the labels
    panel.margins(y=0.12)
    low, high = np.log(panel.get_ylim())
    for end in {line[2][-1] for line in lines}:
        ending = [line for line in lines if line[2][-1] == end]
        places = apart([np.log(line[3][-1]) for line in ending], (high - low) * 0.065)
        for (label, color, *_), place in zip(ending, places, strict=True):
            panel.text(end * 1.08, np.exp(place), label, va="center", fontsize=8, color=color)


def apart(values: Sequence[float], gap: float) -> list[float]:
    """Move values apart, in their order, so that no two are closer than the gap."""
    order = np.argsort(values, kind="stable")
    placed = np.array(values, float)
    for _ in range(100):
        for low, high in pairwise(order):
            if (missing := gap - (placed[high] - placed[low])) > 1e-9:
                placed[low] -= missing / 2
                placed[high] += missing / 2
    return placed.tolist()
