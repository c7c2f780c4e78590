"""The pages about known mistakes, `parity/bugs`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources

from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from mha_spec import Refusal
from parity.text import did_you_mean


def bug_page(name: str) -> str:
    """Return the page of that name, or the page of the bug of that name.

    Raises:
        ValueError: if there is none.
    """
    from parity.diagnosis.mistakes import page_by_mistake  # which takes longer than to print a page

    folder = resources.files("parity") / "bugs"
    pages = {page.name.removesuffix(".md"): page for page in folder.iterdir()}
    page_by_bug = page_by_mistake()
    page = pages.get(name) or pages.get(page_by_bug.get(name, ""))
    if page is None:
        advice = filter(None, (did_you_mean(name, {**pages, **page_by_bug}), "`mha-parity bugs` lists them"))
        raise Refusal("NAME", "be a known bug or a page of bugs", NAME=name, hint=" ".join(advice))
    return page.read_text("utf-8")


def print_pages(pages: Iterable[str], out: Console) -> None:
    """Print pages of Markdown: laid out on a terminal, as they are elsewhere."""
    for page in pages:
        out.print(Markdown(page) if out.is_terminal else Text(page.rstrip()), soft_wrap=not out.is_terminal)
