"""The documentation: what its pages print is what is printed, every mistake has its page, and links lead somewhere."""

import re
from pathlib import Path

import pytest

from parity.hypotheses import PRECISIONS, hypotheses_for
from parity.selftest import SELFTEST_CASES

ROOT = Path(__file__).parent.parent
BUGS = ROOT / "docs" / "bugs"
PAGES = sorted(path.stem for path in BUGS.glob("*.md") if path.stem != "README")
LINKED = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECTIONS = ["What it looks like", "Reproduction", "How the tool shows it", "The fix"]


def hypotheses_by_page():
    """The names of all mistakes that are known, by the page that tells of them."""
    found = {"low-precision": {f"precision-{kind}" for kind in PRECISIONS}}
    for case in SELFTEST_CASES:
        for hypothesis in hypotheses_for(case):
            found.setdefault(hypothesis.docs, set()).add(hypothesis.name)
    return found


def sections_of(page):
    """The sections of a page, by their titles in order; what stands before the first has the title ""."""
    parts = re.split(r"^## (.+)$", (BUGS / f"{page}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def block_of(text, language):
    """The first fenced block of a language in a text."""
    found = re.search(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert found, f"there must be a block of {language}"
    return found[1]


def without_errors(text):
    """The text with the errors in it, which depend on the machine, replaced by #."""
    number = r"\d+(\.\d+)?(e[+-]?\d+)?"
    places = r"\(error [^)]*\)|^\w+: \S+ is .* times its budget$"
    return re.sub(places, lambda found: re.sub(number, "#", found[0]), text, flags=re.MULTILINE)


# ---- Pages of bugs ---------------------------------------------------------------------------------------------------


def test_every_mistake_has_a_page_and_every_page_a_mistake():
    assert set(PAGES) == hypotheses_by_page().keys()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_its_sections_and_names_its_mistakes(page):
    sections = sections_of(page)
    assert list(sections) == ["", *SECTIONS]
    assert sections[""].startswith("# ")
    assert all(len(text.strip()) > 40 for text in sections.values())
    named = sections["The fix"].partition("The hypotheses of this class:")[2]
    assert hypotheses_by_page()[page] <= set(re.findall(r"`([\w-]+)`", named))


@pytest.mark.parametrize("page", PAGES)
def test_a_reproduction_prints_what_its_page_shows(page, capsys):
    sections = sections_of(page)
    code = block_of(sections["Reproduction"], "python")
    assert "parity.hypotheses" not in code  # or the tool would be shown its own mistakes
    exec(compile(code, f"{page}.md", "exec"), {"__name__": page})
    printed = capsys.readouterr().out
    assert without_errors(printed) == without_errors(block_of(sections["How the tool shows it"], "text"))
    assert f"docs/bugs/{page}.md" in printed


def test_the_index_has_every_page_and_every_mistake():
    index = (BUGS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([\w-]+)\]\(([\w-]+)\.md\) \|.*\| (.+?) \|$", index, flags=re.MULTILINE)
    assert all(title == target for title, target, _ in rows)
    assert {title: set(re.findall(r"`([\w-]+)`", names)) for title, _, names in rows} == hypotheses_by_page()
    assert len(rows) == len(PAGES)


# ---- Links -----------------------------------------------------------------------------------------------------------


def headings_of(path):
    """The anchors of a page, as GitHub makes them of its headings."""
    titles = re.findall(r"^#+ (.+)$", without_code(path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(path):
    broken = []
    for link in re.findall(r"\]\(([^()\s]+)\)", without_code(path.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in headings_of(target)):
            broken.append(link)
    assert broken == []
