"""Output: tables with lines and color on a terminal, plain lines in a pipe, and a progress bar on
standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import repeat
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from parity.measure.text import printable

PIPE_WIDTH = 100
"""Least width of the output in a pipe, which has no width of its own."""

MOST_ROWS = 200
"""Most rows of a table that Rich lays out: about 0.3 ms for each, a hundred times as long as a line
of plain text. The number is arbitrary; more rows are not read on a terminal.

A terminal shows the first rows of a longer table, and a pipe has a line of plain text for each.
"""

NARROWEST = 9
"""Least width of a column whose text is folded: the width of the verdict `FAIL 1.03`."""

Row = Sequence[str | Text]


_color_of_output: ContextVar[str] = ContextVar("_color_of_output", default="auto")


@contextmanager
def colored(when: str) -> Iterator[None]:
    """Print in color always, never, or on a terminal (auto)."""
    token = _color_of_output.set(when)
    try:
        yield
    finally:
        _color_of_output.reset(token)


class _Console(Console):
    """A console that ignores Rich's markup and control characters in the text that it prints."""

    def __init__(self, **options: Any) -> None:
        when = _color_of_output.get()
        if when == "never":
            options["no_color"] = True
        elif when == "always":
            options["color_system"] = "standard"
            options["no_color"] = False
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        # Escaped here, because Rich computes the widths of columns from this text.
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """Continue without output if the reader of a pipe has stopped: the exit status is the
        status of the work.
        """
        self.quiet = True
        # Otherwise Python reports another broken pipe when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    """Return the console for standard output: color and tables on a terminal, plain lines in a
    pipe.
    """
    terminal = _Console()
    if terminal.is_terminal:
        return terminal
    columns = os.environ.get("COLUMNS", "")
    requested_width = int(columns) if columns.isdigit() else 0
    return _Console(width=max(PIPE_WIDTH, requested_width))


def print_line(out: Console, text: str, style: str = "") -> None:
    """Print text without folding it: a terminal breaks it at its width, a pipe has it whole."""
    out.print(Text(text, style=style), soft_wrap=True)


# ---- Tables --------------------------------------------------------------------------------------


def print_table(
    out: Console,
    title: str,
    columns: Sequence[str | Column],
    rows: Iterable[Row],
    styles: Iterable[str] = repeat(""),
) -> None:
    """Print a title and a table: with lines on a terminal, columns of plain text elsewhere.

    If the columns do not fit, each row is a line, `cell: header cell, header cell`. On a terminal,
    the first rows of a long table are shown, and how many there are; elsewhere all are, in lines
    that are not folded.

    Args:
        out: the console.
        title: line above the table.
        columns: headers, or columns with their style; text is folded. Empty for a table without
            headers.
        rows: cells of each row.
        styles: style of each row.
    """
    out.print(Text(title, style="bold"))
    folded_columns = _folded(columns)
    styled_rows = list(zip(rows, styles, strict=False))
    all_rows = [row for row, _ in styled_rows]
    num_hidden = max(0, len(all_rows) - MOST_ROWS)
    if num_hidden and not out.is_terminal:
        _print_unlimited(out, folded_columns, all_rows)
        return

    shown_rows = all_rows[:MOST_ROWS]
    if _fits(out, folded_columns, shown_rows):
        _print_grid(out, folded_columns, styled_rows[:MOST_ROWS])
    else:
        _print_sentences(out, folded_columns, styled_rows[:MOST_ROWS])
    if num_hidden:
        out.print(
            f"… and {num_hidden} more rows: a pipe shows all, such as one to `less`, and so does "
            f"--json"
        )


def _folded(columns: Sequence[str | Column]) -> list[Column]:
    """Return columns whose text is folded, unless they are columns already."""
    folded_columns = []
    for column in columns:
        if isinstance(column, str):
            column = Column(column, overflow="fold")
        folded_columns.append(column)
    return folded_columns


def width_between_columns(out: Console) -> int:
    """Return the characters between two columns: spaces, on a terminal with a line."""
    if out.is_terminal:
        return 3
    return 2


def _fits(out: Console, columns: Sequence[Column], rows: Sequence[Row]) -> bool:
    """Return whether a table is not wider than the output; one without headers always fits."""
    if not columns:
        return True
    # On a terminal there is also a line before the first column.
    least_width = 1 + width_between_columns(out) * len(columns)
    for index, column in enumerate(columns):
        longest = cell_len(str(column.header))
        for row in rows:
            longest = max(longest, cell_len(str(row[index])))
        least_width += longest if column.no_wrap else min(longest, NARROWEST)
    return least_width <= out.width


def _print_grid(
    out: Console, columns: Sequence[Column], styled_rows: Sequence[tuple[Row, str]]
) -> None:
    """Print a table of Rich."""
    lines = box.ROUNDED if out.is_terminal else None
    table = Table(*columns, box=lines, padding=(0, 1), show_header=bool(columns))
    for row, style in styled_rows:
        table.add_row(*row, style=style)
    out.print(table)


def _print_sentences(
    out: Console, columns: Sequence[Column], styled_rows: Sequence[tuple[Row, str]]
) -> None:
    """Print a table that is too wide: a line for each row, `cell: header cell, header cell`."""
    for row, style in styled_rows:
        cells = []
        for column, cell in zip(columns[1:], row[1:], strict=True):
            cells.append(Text(f"{column.header} ").append(cell))
        begin = Text(f"{row[0]}: ", style=style, overflow="fold")
        out.print(begin + Text(", ").join(cells))


class _Lines:
    """Lines that are printed as they are, without layout."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for line in self.lines:
            yield Segment(line)
            yield Segment.line()


def _print_unlimited(out: Console, columns: Sequence[Column], rows: Sequence[Row]) -> None:
    """Print a long table as lines of plain text, which takes a hundredth of the time of a table
    that Rich lays out.
    """
    texts: list[list[str]] = []
    headers = [str(column.header) for column in columns]
    if any(headers):
        texts.append(headers)
    for row in rows:
        texts.append([printable(str(cell), keep="") for cell in row])
    widths = [max(map(cell_len, cells)) for cells in zip(*texts, strict=True)]
    lines: list[str] = []
    for row in texts:
        line = ""
        for cell, width in zip(row, widths, strict=True):
            # Spaces by the width on a terminal: str.ljust counts a wide character as one.
            padding = " " * (width - cell_len(cell))
            line += f" {cell}{padding} "
        lines.append(line.rstrip())
    out.print(_Lines(lines), crop=False)


# ---- Progress and values -------------------------------------------------------------------------


@contextmanager
def progress_bar(total: int | None) -> Iterator[Any]:
    """Show a bar on standard error with the current item, on a terminal only. Without a total it
    shows a count.

    Yields:
        A function to call before each item, with its name.
    """
    errors = _Console(stderr=True)
    columns = (
        TextColumn("{task.description:<46}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=errors, transient=True, disable=not errors.is_terminal
    ) as progress:
        task = progress.add_task("", total=total)
        num_begun = 0

        def begin(*words: str) -> None:
            nonlocal num_begun
            # The items that began before this one are complete.
            progress.update(task, description=" ".join(words), completed=num_begun)
            num_begun += 1

        yield begin


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on standard error, on a terminal only, what takes its time, and for how long."""
    errors = _Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    is_shown = errors.is_terminal
    with Progress(*columns, console=errors, transient=True, disable=not is_shown) as progress:
        progress.add_task(what, total=None)
        yield


def short_ratio(ratio: float | None) -> str:
    """Return an error over its budget in few characters; a dash for None."""
    if ratio is None:
        return "—"
    # Above 100 times the budget only the size matters.
    if ratio < 100:
        return f"{ratio:.2f}"
    return f"{ratio:.0e}"
