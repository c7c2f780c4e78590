"""Pages of known bugs, `parity/bugs`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import resources

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Column
from rich.text import Text

from mha_spec import InputError
from parity.measure.text import did_you_mean
from parity.use.reporting.console import print_line, print_table

TITLE = "Known bugs: `mha-parity bugs NAME` describes one"

LINK = re.compile(r"\[([^\]]*)\]\(([^)#]*)(?:#[^)]*)?\)")

ROW = re.compile(r"^\| \[([\w-]+)\]\(\1\.md\) \| (.*?) \|", re.MULTILINE)
"""A row of the list of pages in their README: a page, and its bug in one line."""


def bug_lines() -> dict[str, str]:
    """Return the bug of each page in one line, by the name of the page."""
    # Imported here, because it takes longer than to print a page.
    from parity.explain.diagnosis.bugs.registry import OWN_BUGS, load_entry_points

    load_entry_points()
    lines = dict(ROW.findall(_texts()["README"]))
    return lines | {name: bug.about for name, bug in OWN_BUGS.items()}


def bug_pages() -> dict[str, str]:
    """Return the name of the page of each bug, by the name of the bug."""
    # Imported here, because it takes longer than to print a page.
    from parity.explain.diagnosis.bugs import page_by_bug

    return page_by_bug()


def bug_page(name: str) -> str:
    """Return the page of that name, or the page of the bug of that name.

    A link to another page becomes the command that prints it, because an installed package has no
    such file nearby.

    Raises:
        ValueError: if there is none.
    """
    from parity.explain.diagnosis.bugs.registry import OWN_BUGS

    page_by_bug = bug_pages()
    pages = _texts() | {bug.name: bug.page for bug in OWN_BUGS.values()}
    page = pages.get(name) or pages.get(page_by_bug.get(name, ""))
    if page is None:
        similar = did_you_mean(name, [*bug_lines(), *page_by_bug])
        hint = f"{similar} `mha-parity bugs` lists all pages, --all all bugs".lstrip()
        raise InputError("NAME", "be a known bug or page", NAME=name, hint=hint)
    return LINK.sub(_without_link, page)


def print_list(lines: Mapping[str, str], out: Console) -> None:
    """Print the pages, one in each row."""
    rows = [(name, Text(line.replace("`", ""))) for name, line in lines.items()]
    print_table(out, TITLE, (Column("name", no_wrap=True), "bug"), rows)


def print_bugs(pages: Mapping[str, str], out: Console) -> None:
    """Print all bugs with their pages, one in each row."""
    columns = (Column("bug", no_wrap=True), Column("page", no_wrap=True))
    print_table(out, TITLE, columns, sorted(pages.items()))


def print_pages(pages: Iterable[str], out: Console) -> None:
    """Print pages of Markdown: laid out on a terminal, unchanged in a pipe."""
    for page in pages:
        if out.is_terminal:
            out.print(Markdown(page))
        else:
            print_line(out, page.rstrip())


def _texts() -> dict[str, str]:
    """Return the Markdown of each page, and of README, by name."""
    folder = resources.files("parity") / "bugs"
    return {page.name.removesuffix(".md"): page.read_text("utf-8") for page in folder.iterdir()}


def _without_link(link: re.Match[str]) -> str:
    """Return the text of a link, with the command that prints its target if that is a page."""
    text, target = link.groups()
    if "/" in target:
        return f"{text} ({target.removeprefix('../../')} in the repository)"
    name = target.removesuffix(".md")
    command = f"`mha-parity bugs {name}`"
    if text.strip("`") == name:
        return command
    return f"{text} ({command})"
