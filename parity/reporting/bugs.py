"""The pages about known mistakes, `parity/bugs`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources

from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text


def bug_page(name: str) -> str:
    """The page of a class of mistakes, by its name or that of one of its mistakes.

    Raises:
        ValueError: if there is none.
    """
    folder = resources.files("parity") / "bugs"
    pages = {page.name.removesuffix(".md"): page.read_text("utf-8") for page in folder.iterdir()}
    if name in pages:
        return pages[name]
    for text in pages.values():
        if f"`{name}`" in text.partition("The hypotheses of this class:")[2]:
            return text
    known = ", ".join(sorted(pages.keys() - {"README"}))
    raise ValueError(f"NAME must be that of a page or of a mistake, got {name!r}; the pages are {known}")


def print_pages(pages: Iterable[str], out: Console) -> None:
    """Print pages of Markdown: laid out on a terminal, as they are elsewhere."""
    for page in pages:
        out.print(Markdown(page) if out.is_terminal else Text(page.rstrip()), soft_wrap=not out.is_terminal)
