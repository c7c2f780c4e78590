"""Output: tables with lines and color on a terminal, plain lines in a pipe, a progress bar on
standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from parity.measure.text import printable

PIPE_WIDTH = 100

MOST_ROWS = 200
"""Rows of a table: of more, a terminal shows the first, and plain output has a line of plain text
for each.
"""

NARROWEST = 9
"""Least width of a column whose text is folded: a verdict is `FAIL 1.03`."""


class _Console(Console):
    """A console that ignores Rich's markup and control characters in the text that it prints."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(
            printable(text), **options
        )  # before the widths of columns are known

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            is_plain = segment.control or segment.text == "\n" or segment.text.isprintable()
            yield segment if is_plain else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """Continue without output if the reader of a pipe has stopped: the exit status is that of
        the work.
        """
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    """Return the console for standard output: color and tables on a terminal, plain lines in a
    pipe.
    """
    terminal = _Console()
    if terminal.is_terminal:
        return terminal
    told = os.environ.get("COLUMNS", "")
    return _Console(width=max(PIPE_WIDTH, int(told) if told.isdigit() else 0))


def print_table(
    out: Console,
    title: str,
    columns: Sequence[str | Column],
    rows: Iterable[Sequence[str | Text]],
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
    drawn = [Column(each, overflow="fold") if isinstance(each, str) else each for each in columns]
    table = Table(
        *drawn,
        box=box.ROUNDED if out.is_terminal else None,
        padding=(0, 1),
        show_header=bool(columns),
    )
    styled = list(zip(rows, styles, strict=False))
    num_hidden = max(0, len(styled) - MOST_ROWS)
    if num_hidden and not out.is_terminal:
        _print_plain(out, drawn, [row for row, _ in styled])
        return
    styled = styled[:MOST_ROWS]
    for row, style in styled:
        table.add_row(*row, style=style)
    between = 3 if out.is_terminal else 2
    if (
        not drawn
        or _least_width(drawn, [row for row, _ in styled]) + between * len(drawn) + 1 <= out.width
    ):
        out.print(table)
    else:
        for row, style in styled:
            cells = (
                Text(f"{column.header} ").append(cell)
                for column, cell in zip(drawn[1:], row[1:], strict=True)
            )
            out.print(Text(f"{row[0]}: ", style=style, overflow="fold") + Text(", ").join(cells))
    if num_hidden:
        out.print(
            f"… and {num_hidden} more rows: a pipe shows all, such as one to `less`, and so does "
            f"--json"
        )


class _Lines:
    """Lines that are printed as they are, without layout."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for line in self.lines:
            yield Segment(line)
            yield Segment.line()


def _print_plain(
    out: Console, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]
) -> None:
    """Print a long table as lines of plain text, which takes a hundredth of the time of a table
    that is laid out.
    """
    texts = [[printable(str(cell), keep="") for cell in row] for row in rows]
    if any(column.header for column in columns):
        texts.insert(0, [str(column.header) for column in columns])
    widths = [max(map(cell_len, cells)) for cells in zip(*texts, strict=True)]
    lines: list[str] = []
    for row in texts:
        padded = [
            cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)
        ]
        lines.append(f" {'  '.join(padded)}".rstrip())
    out.print(_Lines(lines), crop=False)


def _least_width(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> int:
    """Return the least width of the columns in characters; folded text needs only a few."""
    least = 0
    for place, column in enumerate(columns):
        longest = max(
            cell_len(str(cell)) for cell in (column.header, *(row[place] for row in rows))
        )
        least += longest if column.no_wrap else min(longest, NARROWEST)
    return least


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
        started = False

        def begin(*what: str) -> None:
            nonlocal started
            progress.update(task, description=" ".join(what), advance=1 if started else 0)
            started = True

        yield begin


def short_ratio(ratio: float | None) -> str:
    """Return an error over its budget in few characters; a dash for None."""
    if ratio is None:
        return "—"
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0e}"
