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
from parity.use.reporting.plot import downsample
from parity.use.reporting.summary import (
    not_exercised_line,
    reproduction,
    sent_by_program,
    skipped_reasons,
    summary_line,
    worst_of,
)
from parity.use.running.report import Report, flattened

Key = tuple[str, str, str]
"""Case, dtype and backend."""

MOST_HEADS = 8
MOST_CELLS = 32  # of an attention map, along queries and along keys
MOST_OPEN = 5  # failed cases that are unfolded when the page opens

# An attention map has levels: steps of 1/14, finer than the eye distinguishes, and one for
# non-finite weights.
STEPS = 14
NOT_FINITE = STEPS + 1
INKS = {
    "expected": (37, 99, 235),
    "actual": (37, 99, 235),
    "difference": (217, 72, 15),
    "not finite": (220, 38, 38),
}

BUDGET_MARK = (
    70  # where on a bar, in percent, the budget ends: linear up to there, logarithmic beyond
)
FARTHEST = 6  # powers of ten beyond the budget at which a bar is full

HEAT = (0.03, 0.1, 0.3, 1.0)
"""Shares of the budget at which the next color begins; the last is the budget itself."""


def check_installed(*, pictures: bool = False) -> None:
    """Raise an error if a library for the page, with attention maps or without, is not
    installed.
    """
    packages.check_installed("an HTML report", "jinja2", *(["pillow"] if pictures else []))


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
    `on_judged`.

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
        stages = [
            comparison
            for comparison in comparisons
            if stage_named(comparison.stage).kind == "attn_weights"
        ]
        if not stages:
            return
        failed = first_difference(comparisons)
        shown = first_difference(stages) or stages[-1]
        expected, actual = reference.accumulated[shown.stage], trace.accumulated.get(shown.stage)
        if actual is None or actual.shape != expected.shape or actual.size == 0:
            return
        sequence, heads = (
            shown.worst_index.get("B", 0) if failed else 0,
            list(range(expected.shape[1]))[:MOST_HEADS],
        )
        if failed and (worst := shown.worst_index.get("N", 0)) not in heads:
            heads[-1] = worst
        expected, actual = (np.asarray(x[sequence, heads], np.float64) for x in (expected, actual))
        difference = errors_of(whole_rows(actual, shown.stage), expected)
        finite = difference[np.isfinite(difference)]
        largest = float(finite.max()) if finite.size == difference.size else math.inf
        pictures = {"expected": _picture(expected), "actual": _picture(actual)}
        if failed:
            pictures["difference"] = _picture(difference, finite.max(initial=0.0) or 1.0)
        key = (trace.problem.case.name, trace.problem.dtype, trace.title)
        shape = (expected.shape[1], expected.shape[2])
        self[key] = AttentionMap(shown.stage, sequence, tuple(heads), shape, pictures, largest)


def levels(maps: np.ndarray) -> np.ndarray:
    """Return values from 0 to 1 as levels (heads, queries, keys); a cell is the largest of the
    values that share it.
    """
    rounded = np.clip(np.nan_to_num(maps, nan=0.0) * STEPS, 0, STEPS).round()
    found = np.where(np.isfinite(maps), rounded, NOT_FINITE).astype(np.uint8)
    return downsample(found, MOST_CELLS)


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
    """Return the levels of each head, and its largest value and place in words."""

    def in_words(values: np.ndarray) -> str:
        if lost := np.count_nonzero(~np.isfinite(values)):
            return f"NaN or infinite at {lost} of {values.size} places"
        query, key = np.unravel_index(int(values.argmax()), values.shape)
        return f"largest {values[query, key]:.3g} at t={query}, s={key}"

    return list(zip(levels(maps / scale), map(in_words, maps), strict=True))


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
        first_difference=first_difference, reproduction=reproduction, worst_of=worst_of
    )
    style = (resources.files("parity.use.reporting") / "html_report" / "style.css").read_text(
        "utf-8"
    )
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    page = templates.get_template("page.html").render(
        style=style,
        policy=(
            f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; "
            f"form-action 'none'"
        ),
        report=report,
        verdict=summary_line(report).plain,
        not_exercised=not_exercised_line(report),
        layers=_layers(report),
        cases=_cases(report, maps or {}),
        sent=sent_by_program(report),
        skipped=skipped_reasons(report),
        environments=list(_environments(report.environment)),
        mark=BUDGET_MARK,
    )
    return page.encode("utf-8", "replace")  # a folder's name need not be Unicode


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
    for backend, of_layers in worst.items():
        cells = []
        for place, layer in enumerate(report.layers):
            shown = of_layers.get(layer)
            if shown is None:
                cells.append({"path": "", "level": 0, "words": f"{layer}: not compared"})
                continue
            level = _level(shown.worse_ratio)
            path = f"M{place} {8 - 2 * level}h1v{2 * level + 2}h-1z"
            cells.append(
                {
                    "path": path,
                    "level": level,
                    "words": f"{layer}, {shown.stage} {_ratio(shown.worse_ratio)}",
                }
            )
        wrong = [cell["words"] for cell in cells if cell["level"] == len(HEAT)]
        words = f"{len(cells)} layers, beyond the budget: {'; '.join(wrong) or 'none'}"
        strips.append({"backend": backend, "cells": cells, "words": words})
    return strips


def _level(share: float) -> int:
    """Return the color of a share of the budget, from 0."""
    return sum(not share <= limit for limit in HEAT)


def _cases(report: Report, maps: Mapping[Key, AttentionMap]) -> list[dict[str, Any]]:
    """Return the results of every backend for each case and dtype."""
    skipped = {
        (each.case, each.dtype, each.backend): each.reason
        for each in report.skipped_cases
        if not each.stage
    }
    groups = report.groups()
    backends = list(dict.fromkeys(backend for _, _, backend in [*groups, *skipped]))
    pairs = list(dict.fromkeys((case, dtype) for case, dtype, _ in [*groups, *skipped]))
    # A case that has one dtype of its own has it in its name.
    dtypes = {
        dtype for case, dtype in pairs if (known := find_case(case)) is None or known.dtype is None
    }
    cases = []
    opened = 0
    for case, dtype in pairs:
        known = find_case(case)
        keys = [(case, dtype, backend) for backend in backends]
        cells = [
            {"backend": key[2], "rows": groups.get(key, []), "skipped": skipped.get(key, "")}
            for key in keys
        ]
        failed = any(first_difference(cell["rows"]) for cell in cells)
        opened += failed
        cases.append(
            {
                "name": case,
                "dtype": dtype,
                "shows_dtype": len(dtypes) > 1,
                "about": known.about if known else "",
                "cells": cells,
                "failed": failed,
                "open": failed and opened <= MOST_OPEN,
                "galleries": list(_galleries(case, dtype, backends, maps)),
            }
        )
    return cases


def _galleries(
    case: str, dtype: str, backends: Iterable[str], maps: Mapping[Key, AttentionMap]
) -> Iterator[dict[str, Any]]:
    """Yield attention maps of a case side by side; backends with the same heads share the map of
    the reference.
    """
    found = [
        (backend, maps[case, dtype, backend])
        for backend in backends
        if (case, dtype, backend) in maps
    ]

    def place(of_backend: tuple[str, AttentionMap]) -> tuple[str, int, tuple[int, ...]]:
        return of_backend[1].stage, of_backend[1].sequence, of_backend[1].heads

    for (stage, sequence, heads), group in groupby(sorted(found, key=place), place):
        group = list(group)
        first = group[0][1]
        rows = [("reference", "", _images(first, "expected"))]
        for backend, shown in group:
            largest = _number(shown.largest_difference)
            rows.append((backend, f"differs by {largest}", _images(shown, "actual")))
            if "difference" in shown.pictures:
                rows.append(
                    (
                        f"|{backend} − reference|",
                        f"most ink: {largest}",
                        _images(shown, "difference"),
                    )
                )
        yield {
            "stage": stage,
            "sequence": sequence,
            "heads": heads,
            "rows": rows,
            "shape": first.shape,
            "cells": first.pictures["expected"][0][0].shape,
        }


def _images(shown: AttentionMap, what: str) -> list[tuple[str, str]]:
    """Return the picture and words of each head."""
    return [(png(picture, INKS[what]), words) for picture, words in shown.pictures[what]]


def _environments(
    environment: Mapping[str, Any],
) -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """Yield each environment with its tables of settings: the machine's, and each backend's.

    A run has its own environment and those of joined traces. A comparison of traces has one for
    each folder.
    """
    here = {name: value for name, value in environment.items() if name != "joined"}
    places = (
        {"this run": here, **environment.get("joined", {})}
        if "python" in environment
        else environment
    )
    for place, settings in places.items():
        settings = dict(settings) if isinstance(settings, Mapping) else {"value": settings}
        of_backends = settings.pop("backends", {})
        tables: dict[str, Mapping[str, Any]] = {"machine and packages": settings}
        for backend, facts in of_backends.items() if isinstance(of_backends, Mapping) else ():
            tables[f"{backend}: device and numerics lock"] = (
                facts if isinstance(facts, Mapping) else {"value": facts}
            )
        yield (
            place or "this machine",
            [(name, flattened(table)) for name, table in tables.items() if table],
        )


def _anchor(key: tuple[str, ...]) -> str:
    return re.sub(r"[^\w.-]+", "-", f"case-{key[0]}-{key[1]}")


# ---- Numbers and shapes --------------------------------------------------------------------------


def _ratio(ratio: float | None) -> str:
    return short_ratio(ratio) if ratio is None or math.isfinite(ratio) else "∞"


def _number(number: float) -> str:
    return "∞" if math.isinf(number) else f"{number:.1e}" if number else "0"


def _bar(ratio: float) -> str:
    """Return the length of a bar in percent."""
    if ratio <= 1.0:
        return f"{BUDGET_MARK * ratio:.3g}"
    beyond = min(math.log10(ratio), FARTHEST) / FARTHEST if math.isfinite(ratio) else 1.0
    # the 4 makes a slight excess visible
    return f"{BUDGET_MARK + 4 + (96 - BUDGET_MARK) * beyond:.3g}"


def _heat(comparison: Comparison) -> dict[str, Any]:
    """Return a strip of cells along the tokens: higher and warmer if a place uses more of the
    budget.
    """
    shares = comparison.by_position
    level_of = list(map(_level, shares))
    paths: dict[int, str] = {}
    start = 0
    for level, run in groupby(level_of):
        length, height = len(list(run)), 2 * level + 2
        paths[level] = f"{paths.get(level, '')}M{start} {10 - height}h{length}v{height}h-{length}z"
        start += length
    sizes = dict(
        zip(axis_names(comparison.stage, len(comparison.shape)), comparison.shape, strict=True)
    )
    letter = "T" if "T" in sizes else "S"
    places = f"{letter.lower()} = 0 … {sizes.get(letter, 0) - 1}"
    if sizes.get(letter, 0) != len(shares):
        places += f", {len(shares)} runs of adjacent places"
    return {
        "size": len(shares),
        "paths": sorted(paths.items()),
        "words": f"{places}: {' '.join(map(_ratio, shares))}",
    }


def _breakable(text: str) -> Any:
    """Return a dotted name with possible line breaks after dots and underscores."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(
        escape(part) for part in re.findall(r"[^._]*[._]|[^._]+", printable(text))
    )
