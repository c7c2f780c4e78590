"""The documentation: its code runs, it shows what is printed, every bug has its page, and links lead somewhere.

If the printed text of a page changed, `PYTHONPATH=tests python tests/repository/test_docs.py` updates the pages of
bugs, and the same command with `README.md` the sessions of that page.
"""

import ast
import functools
import importlib
import io
import os
import re
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.samples import sample
from helpers.shell import environment, run
from helpers.shown import commands_of, shows, updated

import parity
from parity.core.stages import STAGES
from parity.diagnosis.bugs import FIDELITIES, PRECISIONS, bugs_for, page_by_bug, ranks
from parity_lab.selftest import SELFTEST_CASES

BUGS = ROOT / "parity" / "bugs"
PAGES = sorted(path.stem for path in BUGS.glob("*.md") if path.stem != "README")
LINKED = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(BUGS.glob("*.md"))]
SECTIONS = ["What it looks like", "Reproduction", "How the tool shows it", "The fix"]


@functools.cache
def bugs_by_page():
    """The names of all bugs that are known, by the page that tells of them."""
    found = {}
    for bugs in (PRECISIONS.values(), FIDELITIES.values(), *map(bugs_for, SELFTEST_CASES)):
        for bug in bugs:
            found.setdefault(bug.page, set()).add(bug.name)
    return found | {ranks.PAGE: {*ranks.NAMES}}


def sections_of(page):
    """The sections of a page, by their titles in order; what stands before the first has the title ""."""
    parts = re.split(r"^## (.+)$", (BUGS / f"{page}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def block_of(text, language):
    """The first fenced block of a language in a text."""
    found = re.search(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert found, f"no block of {language}"
    return found[1]


def without_errors(text):
    """The text with the errors in it, which depend on the machine, replaced by #."""
    number = r"\d+(\.\d+)?(e[+-]?\d+)?"
    places = r"the error (of|falls|is) .*$|, \S+ times its budget$"
    return re.sub(places, lambda found: re.sub(number, "#", found[0]), text, flags=re.MULTILINE)


# ---- Pages of bugs ---------------------------------------------------------------------------------------------------


def test_every_bug_has_a_page_and_every_page_a_bug():
    assert set(PAGES) == bugs_by_page().keys()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_its_sections_and_names_its_bugs(page):
    sections = sections_of(page)
    assert list(sections) == ["", *SECTIONS]
    assert sections[""].startswith("# ")
    assert all(len(text.strip()) > 40 for text in sections.values())
    named = sections["The fix"].partition("The known bugs of this class:")[2]
    assert bugs_by_page()[page] <= set(re.findall(r"`([\w-]+)`", named))


def reproduce(page):
    """Run the reproduction of a page, and return what it prints."""
    code = block_of(sections_of(page)["Reproduction"], "python")
    assert "parity.diagnosis.bugs" not in code  # or the tool would be shown its own bugs
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, f"{page}.md", "exec"), {"__name__": page})
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES)
def test_a_reproduction_prints_what_its_page_shows(page):
    printed = reproduce(page)
    shown = block_of(sections_of(page)["How the tool shows it"], "text")
    assert without_errors(printed) == without_errors(shown), (
        "run `PYTHONPATH=tests python tests/repository/test_docs.py` to update the pages"
    )
    assert re.search(rf"^More: mha-parity bugs .*\b{page}\b", printed, flags=re.MULTILINE)


def test_every_bug_leads_to_its_page():
    by_page = bugs_by_page()
    assert {name: page for page, names in by_page.items() for name in names}.items() <= page_by_bug().items()


def test_the_list_of_bugs_has_every_page_and_every_bug():
    index = (BUGS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([\w-]+)\]\(([\w-]+)\.md\) \|.*\| (.+?) \|$", index, flags=re.MULTILINE)
    assert all(title == target for title, target, _ in rows)
    assert {title: set(re.findall(r"`([\w-]+)`", names)) for title, _, names in rows} == bugs_by_page()
    assert len(rows) == len(PAGES)


def test_the_readme_counts_the_known_bugs():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert re.findall(r"for (\d+) known bugs", readme) == [str(len(page_by_bug()))]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


def test_every_page_is_reached_from_its_symptoms():
    symptoms = (ROOT / "docs" / "reference" / "symptoms.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!-|symptom )(.+?) \| (.+?) \| (.+?) \|$", symptoms, flags=re.MULTILINE)
    linked = [re.findall(r"\]\(\.\./\.\./parity/bugs/([\w-]+)\.md\)", pages) for _, pages, _ in rows]
    assert len(rows) > 20
    assert all(linked)
    assert {page for pages in linked for page in pages} == {*PAGES}
    commands = {name for *_, shown in rows for name in re.findall(r"`([a-z]+)\b", shown)} - {"q", "k", "v", *STAGES}
    assert commands - {"generate", "parity"} <= {page.stem for page in (ROOT / "parity" / "cli").glob("*.py")}


# ---- Code and commands -----------------------------------------------------------------------------------------------

STATUS = {"pytest -q --tb=short test_wrong.py": 1, "mha-parity diagnose": 1, "python demo.py": 1}
"""The commands of the pages that end with another status than 0: those that show a failure."""


def blocks_of(path):
    """The fenced blocks of a page in order, each with its language, or the directive of the site that it belongs to."""
    text = path.read_text(encoding="utf-8")
    return re.findall(r"^```(\S*)[^\n]*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run_code(path, code, names, folder):
    """Run a block of Python after those before it; save one that begins with a file name, for commands to run."""
    if file := re.match(r"# (\w+\.py)\n", code):
        (folder / file[1]).write_text(code, "utf-8")
        return
    exec(compile(code, f"{path.name}: {code.splitlines()[0]}", "exec"), names)


def run_session(block, folder):
    """Run the commands of a block, and return what they print."""
    printed = ""
    for command in commands_of(block)[0]:
        status, output, errors = run(command, folder, environment())
        wanted = next((status for start, status in STATUS.items() if command.startswith(start)), 0)
        assert status == wanted, f"{command}: {output}{errors}"
        assert wanted or not errors, f"{command}: {errors}"
        printed += output + errors
    return printed


def imports_tt(code):
    return "mha_tt" in code


def is_run(language, block):
    """Return whether a block runs here: a session, or Python without ttnn. tests/siblings/mha_tt runs the rest."""
    return (language == "python" and not imports_tt(block)) or block.startswith("$ ")


def pages_with(is_wanted):
    """The pages that have a block that is wanted, by its language and text."""
    return [path for path in LINKED if any(is_wanted(*block) for block in blocks_of(path))]


RUN = [path for path in pages_with(is_run) if path.parent != BUGS]  # those of bugs: `reproduce`
LANGUAGES = {"python", "text", "yaml", ""}
"""Of blocks. Those of directives, such as {code-cell}, are the site's, which runs them when it is built."""


def test_no_block_of_a_page_is_overlooked():
    """The list of pages whose code runs is made of blocks, which begin a line and have a language that is known."""
    for path in LINKED:
        fences = re.findall(r"^[ >]*(?:```|~~~)", path.read_text("utf-8"), flags=re.MULTILINE)
        assert len(fences) == 2 * len(blocks_of(path)), path
        languages = {language for language, _ in blocks_of(path) if not language.startswith("{")}
        assert languages <= LANGUAGES, path


LONG = {
    "getting-started.md",
    "conformance.md",
    "fast.md",
    "sharding.md",
    "shard-torch.md",
    "shard-jax.md",
    "rank-checkpoints.md",
}
"""Pages whose code takes seconds."""


def test_long_pages_have_code_that_runs():
    assert LONG.issubset(path.name for path in RUN)


@pytest.mark.costly("runs the code of a page as it is")
@sample(where=lambda path: path.name not in LONG)
@pytest.mark.parametrize(
    "path",
    RUN,
    ids=lambda path: path.name,
)
def test_the_code_of_a_page_runs(path, importable_folder, monkeypatch):
    monkeypatch.chdir(importable_folder)
    names = {"__name__": "page"}
    for language, block in blocks_of(path):
        if not is_run(language, block):
            continue
        if language == "python":
            run_code(path, block, names, importable_folder)
        elif os.name == "posix":
            printed = run_session(block, importable_folder)
            assert shows(commands_of(block)[1], printed), (
                f"run `PYTHONPATH=tests python tests/repository/test_docs.py {path.name}` to update it:\n{printed}"
            )
    for test in [value for name, value in names.items() if name.startswith("test_")]:
        test(parity.assert_parity)


# ---- Public names ----------------------------------------------------------------------------------------------------

PUBLIC = {name: set(importlib.import_module(name).__all__) for name in ("mha_spec", "mha_jax", "mha_torch", "parity")}
PUBLIC["mha_torch"] |= {"parallel"}  # imported by itself, since it imports torch.distributed
PUBLIC["mha_jax"] |= {"parallel"}  # and this, since it is of those who have several devices


def is_whole(language, block):
    """Whether a block can be parsed; with … in its code it is the sketch of a fix."""
    return language == "python" and "…" not in re.sub("#.*", "", block)


@pytest.mark.parametrize("path", pages_with(is_whole), ids=lambda path: path.name)
def test_a_page_imports_public_names_only(path):
    for code in [block for language, block in blocks_of(path) if is_whole(language, block)]:
        for node in ast.walk(ast.parse(code)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            ours = [module for module in modules if module.partition(".")[0] in (*PUBLIC, "mha_tt")]
            assert [module for module in ours if "." in module] == []
            if isinstance(node, ast.ImportFrom) and node.module in PUBLIC:
                assert {alias.name for alias in node.names} <= PUBLIC[node.module]


# ---- Recipes ---------------------------------------------------------------------------------------------------------


def test_the_recipes_name_places_that_are_there():
    """Files and folders, and the tables in them; `<…>` and xyz stand for what is to be added."""
    recipes = (ROOT / "docs" / "contributing" / "extending.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", recipes, flags=re.MULTILINE)
    assert len(rows) > 20
    for cell, what in rows:
        places = [ROOT / name for name in re.findall(r"`([\w./-]+)`", cell) if "xyz" not in name]
        assert [str(path) for path in places if not path.exists()] == []
        files = [file for path in places for file in ([path] if path.is_file() else path.rglob("*.py"))]
        source = "".join(file.read_text("utf-8") for file in files)
        tables = re.findall(r"`([A-Z_]{3,})`", what) if files else []
        assert [name for name in tables if name not in source] == [], cell


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


# ---- Update ----------------------------------------------------------------------------------------------------------


def update(names):
    """Write what reproductions and sessions print into pages: those of bugs by default, or those named."""
    for page in PAGES if not names else [name for name in names if name in PAGES]:
        path, shown = BUGS / f"{page}.md", block_of(sections_of(page)["How the tool shows it"], "text")
        printed = reproduce(page)
        if without_errors(printed) != without_errors(shown):
            path.write_text(path.read_text("utf-8").replace(f"```text\n{shown}```", f"```text\n{printed}```"), "utf-8")
            print(path.name)
    for path in [path for path in LINKED if path.name in names]:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            sys.path.insert(0, folder)
            names_of_page = {"__name__": "page"}
            for language, block in blocks_of(path):
                if not is_run(language, block):
                    continue
                if language == "python":
                    run_code(path, block, names_of_page, Path(folder))
                else:
                    printed = run_session(block, Path(folder))
                    if not shows(commands_of(block)[1], printed):
                        text = path.read_text("utf-8")
                        path.write_text(text.replace(block, updated(block, printed)), "utf-8")
                        print(path.name)


if __name__ == "__main__":
    update(sys.argv[1:])
