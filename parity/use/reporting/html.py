"""Results as one page: a single HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from itertools import groupby
from typing import Any

import numpy as np

from parity.measure.core import packages
from parity.measure.core.cases import find_case
from parity.measure.core.compare import (
    Comparison,
    axis_names,
    errors_of,
    first_difference,
    whole_rows,
)
from parity.measure.core.stages import stage_named
from parity.measure.core.trace import Reference, Trace
from parity.measure.files.target import write_whole
from parity.measure.text import printable
from parity.use.reporting.console import short_ratio
from parity.use.reporting.grouping import grouped
from parity.use.reporting.plot import downsample
from parity.use.reporting.summary import (
    case_grid,
    not_exercised_line,
    skipped_reasons,
    summary_line,
    verdict_of,
    worst_of,
)
from parity.use.running.report import Report, flattened

Key = tuple[str, str, str]
"""Case, dtype and backend."""

MOST_HEADS = 8
"""Most heads of a case in a page, an arbitrary number: a layer may have more than a hundred."""

MOST_CELLS = 32
"""Most cells of an attention map along queries and along keys, an arbitrary number: the page
contains its pictures.
"""

MOST_OPEN = 5
"""Failed cases that are unfolded when the page opens, as many as a terminal shows in full."""

STEPS = 14
"""Steps of the levels of an attention map, finer than the eye distinguishes: with level 0, and one
for non-finite weights, they are the 16 colors of a PNG with 4 bits.
"""

NOT_FINITE = STEPS + 1
"""Level of non-finite weights."""

INKS = {
    "expected": (37, 99, 235),
    "actual": (37, 99, 235),
    "difference": (217, 72, 15),
    "not finite": (220, 38, 38),
}
"""Color of each kind of map, and of non-finite weights in all."""

BUDGET_MARK = 70
"""Position of the budget on a bar, in percent: linear up to there, logarithmic beyond."""

EXCESS = 4
"""Percent by which a bar at least exceeds the mark if an error exceeds its budget, so that a slight
excess is visible.
"""

FARTHEST = 6
"""Powers of ten beyond the budget at which a bar is full: an arbitrary number."""

HEAT = (0.03, 0.1, 0.3, 1.0)
"""Shares of the budget at which the next color begins; the last is the budget itself. Half a power
of ten apart, an arbitrary number.
"""


def check_installed(*, pictures: bool = False) -> None:
    """Raise an error if a library that makes the page, or its attention maps, is not installed."""
    libraries = ["jinja2", "pillow"] if pictures else ["jinja2"]
    packages.check_installed("an HTML report", *libraries)


# ---- Attention maps ------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionMap:
    """Attention weights of some heads in one sequence.

    Attributes:
        stage, sequence, heads: origin of the weights.
        shape: number of queries and of keys; adjacent ones may share a cell.
        pictures: by kind, the levels and the largest value in words for each head. Kinds are
            `expected`, `actual` and, for a case that failed, `difference`, whose levels are shares
            of its largest value.
        largest_difference: largest difference between actual and expected weights.
    """

    stage: str
    sequence: int
    heads: tuple[int, ...]
    shape: tuple[int, int]
    pictures: dict[str, list[tuple[np.ndarray, str]]] = field(repr=False)
    largest_difference: float


class AttentionMaps(dict[Key, AttentionMap]):
    """Attention maps by case, dtype and backend, collected during a run: pass it to `run_cases` as
    `on_compared`.

    A case that passed has the first heads of the first sequence, at the last step of a cache. A
    case that failed has the sequence, head and step of the worst weight.

    Raises:
        ModuleNotFoundError: if a library that makes the page is not installed.
    """

    def __init__(self) -> None:
        check_installed(pictures=True)
        super().__init__()

    def __call__(self, trace: Trace, reference: Reference, comparisons: list[Comparison]) -> None:
        """Keep the maps of a trace, if it has any."""
        of_weights = [
            comparison
            for comparison in comparisons
            if stage_named(comparison.stage).kind == "attn_weights"
        ]
        if not of_weights:
            return
        # The last step of a cache attends to all tokens.
        drawn = first_difference(of_weights) or of_weights[-1]
        has_failed = first_difference(comparisons) is not None
        all_expected = reference.accumulated[drawn.stage]
        all_actual = trace.accumulated.get(drawn.stage)
        if all_actual is None or all_actual.shape != all_expected.shape or all_actual.size == 0:
            return
        sequence = 0
        heads = list(range(all_expected.shape[1]))[:MOST_HEADS]
        if has_failed:
            sequence = drawn.worst_index.get("B", 0)
            worst_head = drawn.worst_index.get("N", 0)
            if worst_head not in heads:
                heads[-1] = worst_head
        expected = np.asarray(all_expected[sequence, heads], np.float64)
        actual = np.asarray(all_actual[sequence, heads], np.float64)
        difference = errors_of(whole_rows(actual, drawn.stage), expected)
        largest_finite = difference[np.isfinite(difference)].max(initial=0.0)
        largest = float(largest_finite) if np.isfinite(difference).all() else math.inf
        pictures = {"expected": _picture(expected), "actual": _picture(actual)}
        if has_failed:
            pictures["difference"] = _picture(difference, largest_finite or 1.0)
        key = (trace.problem.case.name, trace.problem.dtype, trace.title)
        _, num_queries, num_keys = expected.shape
        shape = (num_queries, num_keys)
        self[key] = AttentionMap(drawn.stage, sequence, tuple(heads), shape, pictures, largest)


def levels(maps: np.ndarray) -> np.ndarray:
    """Return values from 0 to 1 as levels (heads, queries, keys); a cell is the largest of the
    values that share it.
    """
    finite_levels = np.clip(np.nan_to_num(maps, nan=0.0) * STEPS, 0, STEPS).round()
    all_levels = np.where(np.isfinite(maps), finite_levels, NOT_FINITE).astype(np.uint8)
    return downsample(all_levels, MOST_CELLS)


def png(picture: np.ndarray, ink: tuple[int, int, int]) -> str:
    """Return levels as a picture whose opacity grows with the level, so that it suits light and
    dark pages.
    """
    from PIL import Image

    image = Image.frombytes("P", (picture.shape[1], picture.shape[0]), picture.tobytes())
    image.putpalette([*(ink * NOT_FINITE), *INKS["not finite"]])
    opacity = bytes(255 * level // STEPS for level in range(NOT_FINITE)) + b"\xff"
    file = io.BytesIO()
    image.save(file, "PNG", bits=4, transparency=opacity, optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _picture(maps: np.ndarray, scale: float = 1.0) -> list[tuple[np.ndarray, str]]:
    """Return the levels of each head, and its largest value and position in words."""
    words = map(_largest_in_words, maps)
    return list(zip(levels(maps / scale), words, strict=True))


def _largest_in_words(values: np.ndarray) -> str:
    """Return the largest value of a head and its position, or how many are not finite."""
    num_not_finite = np.count_nonzero(~np.isfinite(values))
    if num_not_finite:
        return f"NaN or infinite at {num_not_finite} of {values.size} positions"
    query, key = np.unravel_index(int(values.argmax()), values.shape)
    return f"largest {values[query, key]:.3g} at t={query}, s={key}"


# ---- The page ------------------------------------------------------------------------------------


def write_html(
    path: str | os.PathLike[str], report: Report, maps: Mapping[Key, AttentionMap] | None = None
) -> None:
    """Write a report as one HTML page, whole or not at all, with attention maps if they were kept.

    The page loads nothing and runs no script, and its Content-Security-Policy forbids both. All
    text is escaped.

    Raises:
        ModuleNotFoundError: if a library that makes the page is not installed.
        OSError: if the file cannot be written.
    """
    write_whole(path, html_page(report, maps))


def html_page(report: Report, maps: Mapping[Key, AttentionMap] | None = None) -> bytes:
    """Return the page that `write_html` writes."""
    check_installed(pictures=bool(maps))
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # Everything is escaped, and an unknown name is an error.
    templates = Environment(
        loader=PackageLoader("parity.use.reporting", "html_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(
        ratio=_ratio,
        number=_number,
        bar=_bar,
        heat=_heat,
        printable=printable,
        breakable=_breakable,
        anchor=_anchor,
    )
    templates.globals.update(
        first_difference=first_difference, worst_of=worst_of, has_own_step=_has_own_step
    )
    folder = resources.files("parity.use.reporting") / "html_report"
    style = (folder / "style.css").read_text("utf-8")
    # The policy permits this style alone, by its hash.
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    page = templates.get_template("page.html").render(
        style=style,
        policy=(
            f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; "
            f"form-action 'none'"
        ),
        report=report,
        title=verdict_of(report) if report.comparisons else "nothing was compared",
        verdict=summary_line(report).plain,
        bug_pages=_bug_pages(report),
        not_exercised=not_exercised_line(report),
        layers=_layers(report),
        cases=_cases(report, maps or {}),
        skipped=skipped_reasons(report),
        environments=list(_environments(report.environment)),
        mark=BUDGET_MARK,
    )
    # The name of a folder in the report need not be Unicode.
    return page.encode("utf-8", "replace")


def _bug_pages(report: Report) -> dict[str, str]:
    """Return the text of the page of each known bug that a diagnosis names."""
    from parity.use.reporting.bugs import bug_page

    pages: dict[str, str] = {}
    for diagnosis in report.diagnoses.values():
        for finding in diagnosis.findings:
            for name in finding.pages:
                pages[name] = bug_page(name)
    return pages


def _has_own_step(comparisons: Iterable[Comparison]) -> bool:
    """Return whether a stage was also computed by itself, from the reference's earlier stages."""
    return any(comparison.local_ratio is not None for comparison in comparisons)


def _layers(report: Report) -> list[dict[str, Any]]:
    """Return a strip of the layers for each backend: cells are higher and warmer if they use more
    of their budget.
    """
    if not report.layers:
        return []
    worst: dict[str, dict[str, Comparison]] = {}
    for (case, _, backend), comparisons in report.groups().items():
        worst.setdefault(backend, {})[case] = worst_of(comparisons)
    strips = []
    for backend, by_layer in worst.items():
        cells = []
        beyond_budget = []
        for index, layer in enumerate(report.layers):
            cell = _layer_cell(index, layer, by_layer.get(layer))
            cells.append(cell)
            # The last limit of HEAT is the budget itself.
            if cell["level"] == len(HEAT):
                beyond_budget.append(cell["words"])
        wrong = "; ".join(beyond_budget) or "none"
        words = f"{len(cells)} layers, beyond the budget: {wrong}"
        strips.append({"backend": backend, "cells": cells, "words": words})
    return strips


def _layer_cell(index: int, layer: str, worst: Comparison | None) -> dict[str, Any]:
    """Return the cell of a layer in its strip; it is empty if the layer was not compared."""
    if worst is None:
        return {"path": "", "level": 0, "words": f"{layer}: not compared"}
    level = _level(worst.worse_ratio)
    words = f"{layer}, {worst.stage} {_ratio(worst.worse_ratio)}"
    return {"path": _bar_path(index, 1, level), "level": level, "words": words}


def _level(share: float) -> int:
    """Return the color of a share of the budget, from 0."""
    # NaN is beyond every limit.
    return sum(not share <= limit for limit in HEAT)


def _bar_path(start: int, length: int, level: int) -> str:
    """Return the SVG path of adjacent cells of one level, which stand on the lower edge of a strip
    of height 10.
    """
    height = 2 * level + 2
    return f"M{start} {10 - height}h{length}v{height}h-{length}z"


def _cases(report: Report, maps: Mapping[Key, AttentionMap]) -> list[dict[str, Any]]:
    """Return the results of every backend for each case and dtype."""
    skipped = {}
    for case in report.skipped_cases:
        # A case whose gradients alone were skipped has its other stages.
        if not case.stage:
            skipped[case.case, case.dtype, case.backend] = case.reason
    groups = report.groups()
    grid = case_grid([*groups, *skipped])
    cases = []
    num_failed = 0
    for name, dtype in grid.rows:
        cells = []
        has_failed = False
        for backend in grid.backends:
            key = (name, dtype, backend)
            rows = groups.get(key, [])
            cells.append({"backend": backend, "rows": rows, "skipped": skipped.get(key, "")})
            has_failed = has_failed or first_difference(rows) is not None
        num_failed += has_failed
        case = find_case(name)
        cases.append(
            {
                "name": name,
                "dtype": dtype,
                "shows_dtype": grid.shows_dtypes,
                "about": case.about if case is not None else "",
                "cells": cells,
                "failed": has_failed,
                "open": has_failed and num_failed <= MOST_OPEN,
                "galleries": list(_galleries(name, dtype, grid.backends, maps)),
            }
        )
    return cases


def _galleries(
    case: str, dtype: str, backends: Iterable[str], maps: Mapping[Key, AttentionMap]
) -> Iterator[dict[str, Any]]:
    """Yield attention maps of a case side by side; backends with the same heads share the map of
    the reference.
    """
    of_case = []
    for backend in backends:
        if (case, dtype, backend) in maps:
            of_case.append((backend, maps[case, dtype, backend]))
    of_same_heads = grouped(
        of_case, lambda entry: (entry[1].stage, entry[1].sequence, entry[1].heads)
    )
    for (stage, sequence, heads), entries in sorted(of_same_heads.items()):
        _, first = entries[0]
        rows = [("reference", "", _images(first, "expected"))]
        for backend, attention_map in entries:
            rows += _rows_of_backend(backend, attention_map)
        levels_of_first_head, _ = first.pictures["expected"][0]
        yield {
            "stage": stage,
            "sequence": sequence,
            "heads": heads,
            "rows": rows,
            "shape": first.shape,
            "cells": levels_of_first_head.shape,
        }


def _rows_of_backend(
    backend: str, attention_map: AttentionMap
) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return the rows of a gallery for a backend, each with a label and words about it: its maps
    and, if it failed, their differences from the reference.
    """
    largest = _number(attention_map.largest_difference)
    rows = [(backend, f"differs by {largest}", _images(attention_map, "actual"))]
    if "difference" in attention_map.pictures:
        images = _images(attention_map, "difference")
        rows.append((f"|{backend} − reference|", f"largest difference: {largest}", images))
    return rows


def _images(attention_map: AttentionMap, kind: str) -> list[tuple[str, str]]:
    """Return the picture and words of each head."""
    return [(png(picture, INKS[kind]), words) for picture, words in attention_map.pictures[kind]]


def _environments(
    environment: Mapping[str, Any],
) -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """Yield each environment with its tables of settings: the machine's, and each backend's.

    A run has its own environment and the environments of joined traces. A comparison of traces has
    one for each folder.
    """
    environments = environment
    if "python" in environment:
        here = {name: value for name, value in environment.items() if name != "joined"}
        environments = {"this run": here, **environment.get("joined", {})}
    for name, settings in environments.items():
        tables = [(title, flattened(table)) for title, table in _tables(settings) if table]
        yield name or "this machine", tables


def _tables(settings: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tables of an environment by name; it may come from a file, and contain anything."""
    of_machine = dict(_as_table(settings))
    of_backends = of_machine.pop("backends", {})
    yield "machine and packages", of_machine
    if isinstance(of_backends, Mapping):
        for backend, facts in of_backends.items():
            yield f"{backend}: device and numerics lock", _as_table(facts)


def _as_table(settings: Any) -> Mapping[str, Any]:
    """Return settings by name; a value without a name has a row of its own."""
    if isinstance(settings, Mapping):
        return settings
    return {"value": settings}


def _anchor(key: tuple[str, ...]) -> str:
    """Return the name of an anchor in the page, from a case and a dtype."""
    return re.sub(r"[^\w.-]+", "-", f"case-{key[0]}-{key[1]}")


# ---- Numbers and shapes --------------------------------------------------------------------------


def _ratio(ratio: float | None) -> str:
    if ratio is not None and not math.isfinite(ratio):
        return "∞"
    return short_ratio(ratio)


def _number(number: float) -> str:
    if math.isinf(number):
        return "∞"
    if number == 0:
        return "0"
    return f"{number:.1e}"


def _bar(ratio: float) -> str:
    """Return the length of a bar in percent."""
    if ratio <= 1.0:
        return f"{BUDGET_MARK * ratio:.3g}"
    beyond = 1.0
    if math.isfinite(ratio):
        beyond = min(math.log10(ratio), FARTHEST) / FARTHEST
    return f"{BUDGET_MARK + EXCESS + (100 - EXCESS - BUDGET_MARK) * beyond:.3g}"


def _heat(comparison: Comparison) -> dict[str, Any]:
    """Return a strip of cells along the tokens: higher and warmer if a position uses more of the
    budget.
    """
    shares = comparison.by_position
    paths: dict[int, str] = {}
    start = 0
    for level, run in groupby(map(_level, shares)):
        length = len(list(run))
        paths[level] = paths.get(level, "") + _bar_path(start, length, level)
        start += length
    axes = axis_names(comparison.stage, len(comparison.shape))
    sizes = dict(zip(axes, comparison.shape, strict=True))
    # The positions are tokens of queries or, in stages of keys alone, of keys.
    axis = "T" if "T" in sizes else "S"
    size = sizes.get(axis, 0)
    positions = f"{axis.lower()} = 0 … {size - 1}"
    if size != len(shares):
        positions += f", {len(shares)} runs of adjacent positions"
    return {
        "size": len(shares),
        "paths": sorted(paths.items()),
        "words": f"{positions}: {' '.join(map(_ratio, shares))}",
    }


def _breakable(text: str) -> Any:
    """Return a dotted name with possible line breaks after dots and underscores."""
    from markupsafe import Markup, escape

    parts = re.findall(r"[^._]*[._]|[^._]+", printable(text))
    return Markup("<wbr>").join(map(escape, parts))
