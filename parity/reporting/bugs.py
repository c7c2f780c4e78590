"""The pages about known mistakes, `parity/bugs`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources

from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from mha_spec import Refusal


def bug_page(name: str) -> str:
    """The page of a class of mistakes, by its name or that of one of its mistakes.

    Raises:
        ValueError: if there is none.
    """
    from parity.diagnosis.mistakes import page_by_mistake  # which takes longer than to print a page

    folder = resources.files("parity") / "bugs"
    pages = {page.name.removesuffix(".md"): page for page in folder.iterdir()}
    page = pages.get(name) or pages.get(page_by_mistake().get(name, ""))
    if page is None:
        known = ", ".join(sorted(pages.keys() - {"README"}))
        raise Refusal("NAME", "be that of a page or of a mistake", NAME=name, hint=f"the pages are {known}")
    return page.read_text("utf-8")


def print_pages(pages: Iterable[str], out: Console) -> None:
    """Print pages of Markdown: laid out on a terminal, as they are elsewhere."""
    for page in pages:
        out.print(Markdown(page) if out.is_terminal else Text(page.rstrip()), soft_wrap=not out.is_terminal)
