"""Tests of the documentation: code, shown output, pages of bugs and links.

If the printed text of a page changed, `PYTHONPATH=.:tests python tests/repository/test_docs.py`
updates the pages of bugs, and the same command with `README.md` the sessions of that page.
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

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.docstrings import failure_of_example
from helpers.samples import sample
from helpers.shell import environment, run
from helpers.shown import commands_of, shows, updated

import parity
from parity.explain.diagnosis.bugs import (
    FIDELITIES,
    PRECISIONS,
    bug_by_name,
    bugs_for,
    page_by_bug,
    ranks,
)
from parity.measure.core.stages import STAGES
from parity_lab.selftest import SELFTEST_CASES

BUGS = ROOT / "parity" / "bugs"
PAGES = sorted(path.stem for path in BUGS.glob("*.md") if path.stem != "README")
LINKED = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(BUGS.glob("*.md"))]
SECTIONS = ["What it looks like", "Reproduction", "How the tool shows it", "The fix"]


@functools.cache
def bugs_by_page():
    """Return the names of all known bugs by their page."""
    bugs_of_page = {}
    # The self-test has no batch as servers have it, and no ring.
    of_caches = [bug for name, bug in bug_by_name().items() if name.startswith("cache-")]
    in_selftest = map(bugs_for, SELFTEST_CASES)
    for bugs in (PRECISIONS.values(), FIDELITIES.values(), of_caches, *in_selftest):
        for bug in bugs:
            bugs_of_page.setdefault(bug.page, set()).add(bug.name)
    return bugs_of_page | {ranks.PAGE: {*ranks.NAMES}}


def sections_of(page):
    """Return the sections of a page by title, in order; the title of the beginning is ""."""
    parts = re.split(
        r"^## (.+)$", (BUGS / f"{page}.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def block_of(text, language):
    """Return the first fenced block of a language in a text."""
    match = re.search(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert match, f"no block of {language}"
    return match[1]


def without_errors(text):
    """Return the text with # instead of errors, which depend on the machine."""
    number = r"\d+(\.\d+)?(e[+-]?\d+)?"
    ratios = r"the error (of|falls|is) .*$|, \S+ times its budget$"
    return re.sub(ratios, lambda match: re.sub(number, "#", match[0]), text, flags=re.MULTILINE)


# ---- Pages of bugs -------------------------------------------------------------------------------


def test_bugs_and_pages_correspond():
    """Every known bug has a page, and every page has a known bug."""
    assert set(PAGES) == bugs_by_page().keys()


def test_bug_page_has_all_sections():
    """A page of bugs has a title, the four sections in order, and the names of its bugs in
    'The fix'.
    """
    for page in PAGES:
        sections = sections_of(page)
        assert list(sections) == ["", *SECTIONS], page
        assert sections[""].startswith("# "), page
        assert all(len(text.strip()) > 40 for text in sections.values()), page
        named = sections["The fix"].partition("The known bugs of this class:")[2]
        assert bugs_by_page()[page] <= set(re.findall(r"`([\w-]+)`", named)), page


def reproduce(page):
    """Run the reproduction of a page and return its output."""
    code = block_of(sections_of(page)["Reproduction"], "python")
    assert "parity.explain.diagnosis.bugs" not in code  # the tool would otherwise get its own bugs
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, f"{page}.md", "exec"), {"__name__": page})
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES)
def test_reproduction_prints_shown_output(page):
    """The reproduction of a page prints the shown diagnosis, errors aside, which leads to
    this page.
    """
    printed = reproduce(page)
    shown = block_of(sections_of(page)["How the tool shows it"], "text")
    assert without_errors(printed) == without_errors(shown), (
        "run `PYTHONPATH=.:tests python tests/repository/test_docs.py` to update the pages"
    )
    assert re.search(rf"^More: mha-parity bugs .*\b{page}\b", printed, flags=re.MULTILINE)


def test_page_by_bug_has_every_bug():
    """`page_by_bug` leads from every known bug to its page."""
    by_page = bugs_by_page()
    assert {
        name: page for page, names in by_page.items() for name in names
    }.items() <= page_by_bug().items()


def test_list_of_bugs_has_every_page():
    """The list of bugs has one row per page."""
    index = (BUGS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([\w-]+)\]\(([\w-]+)\.md\) \|", index, flags=re.MULTILINE)
    assert all(title == target for title, target in rows)
    assert sorted(title for title, _ in rows) == sorted(PAGES)


def test_readme_counts_known_bugs():
    """README.md has the number of known bugs, once, rounded so that one more changes nothing."""
    readme = (ROOT / "README.md").read_text("utf-8")
    rounded_down = (len(page_by_bug()) - 1) // 50 * 50
    assert re.findall(r"for more than (\d+) known bugs", readme) == [str(rounded_down)]


def test_readme_is_short():
    """README.md has at most 150 lines."""
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


def test_symptoms_lead_to_every_page():
    """Every symptom leads to a page of bugs, every page is linked, and the commands exist."""
    symptoms = (ROOT / "docs" / "reference" / "symptoms.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (?!-|symptom )(.+?) \| (.+?) \| (.+?) \|$", symptoms, flags=re.MULTILINE
    )
    linked = [
        re.findall(r"\]\(\.\./\.\./parity/bugs/([\w-]+)\.md\)", pages) for _, pages, _ in rows
    ]
    assert len(rows) > 20
    assert all(linked)
    assert {page for pages in linked for page in pages} == {*PAGES}
    commands = {name for *_, shown in rows for name in re.findall(r"`([a-z]+)\b", shown)} - {
        "q",
        "k",
        "v",
        *STAGES,
    }
    assert commands - {"generate", "parity"} <= {
        page.stem for page in (ROOT / "parity" / "use" / "cli").glob("*.py")
    }


# ---- Code and commands ---------------------------------------------------------------------------

STATUS = {"pytest -q --tb=short test_wrong.py": 1, "mha-parity diagnose": 1}
"""Exit statuses of commands on the pages that show a failure; the others have 0."""


def blocks_of(path):
    """Return the fenced blocks of a page, each with its language or directive of the site."""
    text = path.read_text(encoding="utf-8")
    return re.findall(r"^```(\S*)[^\n]*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run_code(path, code, names, folder):
    """Run a block of Python in a namespace; save one that begins with a file name."""
    if file := re.match(r"# (\w+\.(?:py|toml))\n", code):
        (folder / file[1]).write_text(code, "utf-8")
        return
    exec(compile(code, f"{path.name}: {code.splitlines()[0]}", "exec"), names)


def run_session(block, folder):
    """Run the commands of a block and return their output."""
    printed = ""
    for command in commands_of(block)[0]:
        status, output, errors = run(command, folder, environment())
        wanted = next((status for start, status in STATUS.items() if command.startswith(start)), 0)
        assert status == wanted, f"{command}: {output}{errors}"
        assert wanted or not errors, f"{command}: {errors}"
        printed += output + errors
    return printed


def imports_tt(code):
    return "mha_tt" in code or "ttnn_mock" in code


def is_run(language, block):
    """Return True for a session, a table, or Python without ttnn: `tests/siblings/mha_tt` runs the
    rest.
    """
    is_here = language == "toml" or (language == "python" and not imports_tt(block))
    return is_here or block.startswith("$ ")


def pages_with(is_wanted):
    """Return the pages with a block for which a function of its language and text returns True."""
    return [path for path in LINKED if any(is_wanted(*block) for block in blocks_of(path))]


RUN = [
    path for path in pages_with(is_run) if path.parent != BUGS
]  # `reproduce` runs the pages of bugs
LANGUAGES = {"python", "toml", "text", "yaml", ""}
"""Languages of blocks. The build of the site runs directives, such as {code-cell}."""


IN_TTNN = ["assert_operations"]
"""Public names whose example needs ttnn: a test of mha_tt runs it."""


@pytest.mark.costly("examples of all public names")
@pytest.mark.usefixtures("own_registrations")
def test_public_names_have_examples_that_run(tmp_path, monkeypatch):
    """The docstring of each public name has an example, which prints what it shows."""
    monkeypatch.chdir(tmp_path)
    names = {"parity": parity, "np": np, "torch": torch, "jnp": jnp}
    failures = [failure_of_example(name, names) for name in parity.__all__ if name not in IN_TTNN]
    assert not any(failures), "".join(failures)


def test_dir_lists_public_names_only():
    """`dir(parity)`, which completion offers, has the public names and nothing else."""
    assert dir(parity) == sorted(parity.__all__)


def test_code_blocks_are_all_recognized():
    """Every fence of a page belongs to a block with a known language, so that no code is
    skipped.
    """
    for path in LINKED:
        fences = re.findall(r"^[ >]*(?:```|~~~)", path.read_text("utf-8"), flags=re.MULTILINE)
        assert len(fences) == 2 * len(blocks_of(path)), path
        languages = {language for language, _ in blocks_of(path) if not language.startswith("{")}
        assert languages <= LANGUAGES, path


LONG = {
    "from-other-layers.md",
    "identify.md",
    "getting-started.md",
    "conformance.md",
    "fast.md",
    "sharding.md",
    "shard-torch.md",
    "shard-jax.md",
    "rank-checkpoints.md",
    "questions.md",
}
"""Pages whose code takes seconds."""


def test_long_pages_have_code_that_runs():
    """Every page in LONG is one whose code runs here."""
    assert LONG.issubset(path.name for path in RUN)


@pytest.mark.costly("runs the code of a page as it is")
@sample(where=lambda path: path.name not in LONG)
@pytest.mark.parametrize(
    "path",
    RUN,
    ids=lambda path: path.name,
)
def test_code_of_page_runs(path, importable_folder, monkeypatch, own_registrations):
    """The Python of a page runs, its commands print the shown output, and its test functions
    pass.
    """
    monkeypatch.chdir(importable_folder)
    names = {"__name__": "page"}
    for language, block in blocks_of(path):
        if not is_run(language, block):
            continue
        if language in ("python", "toml"):
            run_code(path, block, names, importable_folder)
        elif os.name == "posix":
            printed = run_session(block, importable_folder)
            assert shows(commands_of(block)[1], printed), (
                f"run `PYTHONPATH=.:tests python tests/repository/test_docs.py {path.name}` to "
                f"update it:\n{printed}"
            )
    for test in [value for name, value in names.items() if name.startswith("test_")]:
        test(parity.assert_parity)


# ---- Tutorials ----------------------------------------------------------------------------------

TUTORIALS = ROOT / "docs" / "tutorials"
NOTEBOOKS = sorted(
    path for path in TUTORIALS.glob("*.md") if "file_format: mystnb" in path.read_text("utf-8")
)


def section_of(path, anchor):
    """Return the text below a heading, up to the next heading of its level or above."""
    text = path.read_text("utf-8")
    inside_code = [match.span() for match in re.finditer(r"^```.*?^```$", text, re.M | re.DOTALL)]
    headings = [
        match
        for match in re.finditer(r"^(#+) (.+)$", text, flags=re.MULTILINE)
        if not any(begin < match.start() < end for begin, end in inside_code)
    ]
    for index, heading in enumerate(headings):
        if re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") == anchor:
            later = [other for other in headings[index + 1 :] if len(other[1]) <= len(heading[1])]
            return text[heading.end() : later[0].start() if later else None]
    raise AssertionError(f"{path.name} has no heading {anchor}")


def test_topics_lead_to_code_that_runs():
    """Each link in the table of topics leads to a section with code that is executed, and every
    notebook and the page of questions are in the table.
    """
    topics = (TUTORIALS / "index.md").read_text("utf-8").partition("## Topics")[2]
    rows = re.findall(r"^\| (?!-|topic )(.+?) \| (.+) \|$", topics, flags=re.MULTILINE)
    assert len(rows) > 25
    linked = set()
    for topic, cell in rows:
        links = re.findall(r"\]\(([\w-]+\.md)#([^)]+)\)", cell)
        assert links, topic
        for name, anchor in links:
            assert re.search(
                r"^```(\{code-cell\}|python)$", section_of(TUTORIALS / name, anchor), re.MULTILINE
            ), (topic, name, anchor)
            linked.add(TUTORIALS / name)
    assert linked == {*NOTEBOOKS, TUTORIALS / "questions.md"}


def test_notebooks_have_exercises():
    """Each of the ten notebooks says what it teaches, how long it takes and what it needs, and has
    three exercises with a folded solution that `assert_parity` checks.
    """
    assert len(NOTEBOOKS) == 10
    for path in NOTEBOOKS:
        head = path.read_text("utf-8").partition("\n## ")[0]
        for begin in ("**You will learn**", "**Time:**", "**Needs:**"):
            assert f"\n- {begin} " in head, path.name
        exercises = section_of(path, "exercises")
        parts = re.split(r"^### \d\. .+$", exercises, flags=re.MULTILINE)[1:]
        assert len(parts) == 3, path.name
        for part in parts:
            cells = re.findall(r"^```\{code-cell\}\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
            folded = [cell for cell in cells if "hide-cell" in cell]
            assert folded, path.name
            assert all("code_prompt_show: Show the " in cell for cell in folded), path.name
            assert re.search(r"assert_parity|check\w*\(", part), path.name


@pytest.fixture
def wrong_answers(monkeypatch):
    """The module that runs wrong answers through the checks of exercises."""
    monkeypatch.syspath_prepend(str(TUTORIALS))
    return importlib.import_module("wrong_answers")


def test_exercises_have_wrong_answers(wrong_answers):
    """Each exercise has three different wrong answers, which can be compiled, and a hidden cell
    that runs them through its check.
    """
    assert {*wrong_answers.WRONG_ANSWERS} == {path.stem for path in NOTEBOOKS}
    for path in NOTEBOOKS:
        exercises = wrong_answers.exercises_of(path.stem)
        assert [*exercises] == [1, 2, 3], path.name
        parts = re.split(r"^### \d\. .+$", section_of(path, "exercises"), flags=re.MULTILINE)[1:]
        for number, part in zip(exercises, parts, strict=True):
            exercise = exercises[number]
            codes = {wrong.code(exercise.solution) for wrong in exercise.wrong_answers}
            assert len(codes - {exercise.solution}) == 3, (path.name, number)
            for code in codes:
                compile(code, path.name, "exec")
            assert all(wrong.says for wrong in exercise.wrong_answers), (path.name, number)
            hidden = [cell for cell in re.split("^```", part, flags=re.M) if "remove-cell" in cell]
            call = f'notebooks.try_wrong_answers("{path.stem}", {number})\n'
            assert any(call in cell for cell in hidden), (path.name, number)


@pytest.mark.parametrize(
    ("by", "says", "error"),
    [
        ("2", "the sum is 3\nnot 2", ""),
        ("2", "the sum is 3", ""),
        ("2", "the sum is 4", "expected to wrong: the sum is 4\ngot: the sum is 3\nnot 2"),
        ("1 + 2", "the sum is 3", "the check accepts a wrong answer: wrong"),
    ],
)
def test_accepted_wrong_answer_is_found(wrong_answers, by, says, error):
    """A wrong answer that its check accepts, or to which it says something else than expected,
    raises an error; the names of the notebook stay as they are.
    """
    names = {"total": 0}
    solution = "total = 3\nif total != 3:\n    raise AssertionError(f'the sum is 3\\nnot {total}')"
    wrong = wrong_answers.WrongAnswer("wrong", "total = 3", f"total = {by}", says)
    exercise = wrong_answers.Exercise("title", solution, (wrong,))
    if error:
        with pytest.raises(AssertionError, match=re.escape(error)):
            exercise.try_wrong_answers(names)
    else:
        exercise.try_wrong_answers(names)
    assert names == {"total": 0}


def test_misplaced_wrong_answer_is_found(wrong_answers):
    """The part that a wrong answer replaces must be in the solution once."""
    wrong = wrong_answers.WrongAnswer("wrong", "x", "y", "")
    for solution in ("z = 1", "x = x + 1"):
        with pytest.raises(ValueError, match="once: x"):
            wrong.code(solution)


def test_questions_have_short_answers():
    """Each of the thirty questions has an answer of at most two lines, and at most six lines of
    code.
    """
    text = (TUTORIALS / "questions.md").read_text("utf-8")
    questions = re.findall(
        r"^### (\d+)\. ([^\n]+\?)\n\n([^`].*?)\n\n```python\n(.*?)^```$",
        text,
        re.MULTILINE | re.DOTALL,
    )
    assert [int(number) for number, *_ in questions] == [*range(1, 31)]
    for number, question, answer, code in questions:
        assert answer.count("\n") < 2, question
        assert len([line for line in code.splitlines() if line]) <= 6, question
        assert "assert" in code, number


# ---- Public names --------------------------------------------------------------------------------

PUBLIC = {
    name: set(importlib.import_module(name).__all__)
    for name in ("mha_spec", "mha_jax", "mha_torch", "parity")
}
PUBLIC["mha_torch"] |= {"parallel"}  # imported by itself, since it imports torch.distributed
PUBLIC["mha_jax"] |= {"parallel"}  # and this, since it is for several devices
PUBLIC["mha_torch"] |= {"plain"}  # the tutorial, whose names also belong to the large layers


def is_whole(language, block):
    """Return whether a block can be parsed; with … in its code, it is the sketch of a fix."""
    return language == "python" and "…" not in re.sub("#.*", "", block)


def private_imports(code):
    """Private names that code imports from our packages: modules in them, and names that they do
    not list.
    """
    private = []
    for node in ast.walk(ast.parse(code)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = [node.module]
            names = [alias.name for alias in node.names]
            private += [
                name for name in names if node.module in PUBLIC and name not in PUBLIC[node.module]
            ]
        ours = [
            module
            for module in modules
            if module.partition(".")[0] in (*PUBLIC, "mha_tt", "ttnn_mock")
        ]
        private += [module for module in ours if "." in module]
    return private


def test_pages_import_public_names_only():
    """Python on a page imports the packages of this project by public names, not from
    submodules.
    """
    pages = pages_with(is_whole)
    assert len(pages) > 50
    for path in pages:
        for language, block in blocks_of(path):
            if is_whole(language, block):
                assert private_imports(block) == [], path


@pytest.mark.parametrize(
    ("code", "private"),
    [
        ("import parity.measure.core", ["parity.measure.core"]),
        ("import ttnn_mock.boards", ["ttnn_mock.boards"]),
        ("from parity import diagnose, no_such", ["no_such"]),
        ("import parity, os.path", []),
    ],
)
def test_a_private_import_is_found(code, private):
    assert private_imports(code) == private


# ---- Recipes -------------------------------------------------------------------------------------


def test_recipes_name_existing_paths():
    """Files, folders and tables named in the recipes exist; `<…>` and xyz stand for additions."""
    recipes = (ROOT / "docs" / "contributing" / "extending.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", recipes, flags=re.MULTILINE)
    assert len(rows) > 20
    for cell, what in rows:
        paths = [ROOT / name for name in re.findall(r"`([\w./-]+)`", cell) if "xyz" not in name]
        assert [str(path) for path in paths if not path.exists()] == []
        files = [
            file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))
        ]
        source = "".join(file.read_text("utf-8") for file in files)
        tables = re.findall(r"`([A-Z_]{3,})`", what) if files else []
        assert [name for name in tables if name not in source] == [], cell


# ---- Links ---------------------------------------------------------------------------------------


def headings_of(path):
    """Return the anchors of a page, as GitHub makes them from its headings: repeated ones are
    numbered.
    """
    titles = re.findall(
        r"^#+ (.+)$", without_code(path.read_text(encoding="utf-8")), flags=re.MULTILINE
    )
    anchors = set()
    for title in titles:
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        repeated = sum(re.fullmatch(rf"{anchor}(-\d+)?", known) is not None for known in anchors)
        anchors.add(f"{anchor}-{repeated}" if repeated else anchor)
    return anchors


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def broken_links(path):
    """The links of a page to files or headings that are not there."""
    broken = []
    for link in re.findall(r"\]\(([^()\s]+)\)", without_code(path.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in headings_of(target)):
            broken.append(link)
    return broken


def test_links_lead_to_existing_targets():
    """Relative links of a page lead to existing files and headings."""
    broken = {str(path.relative_to(ROOT)): broken_links(path) for path in LINKED}
    assert {path: links for path, links in broken.items() if links} == {}


def test_a_broken_link_is_found(tmp_path):
    """Both to a missing file and to a missing heading; links to the web are not followed."""
    (tmp_path / "b.md").write_text("# Here it is\n", "utf-8")
    page = tmp_path / "a.md"
    page.write_text(
        "[1](b.md) [2](b.md#here-it-is) [3](https://x.y) [4](c.md) [5](b.md#there)\n", "utf-8"
    )
    assert broken_links(page) == ["c.md", "b.md#there"]


# ---- Update --------------------------------------------------------------------------------------


def update(names):
    """Write the output of reproductions and sessions into pages, by default the pages of bugs."""
    for page in PAGES if not names else [name for name in names if name in PAGES]:
        path, shown = (
            BUGS / f"{page}.md",
            block_of(sections_of(page)["How the tool shows it"], "text"),
        )
        printed = reproduce(page)
        if without_errors(printed) != without_errors(shown):
            path.write_text(
                path.read_text("utf-8").replace(f"```text\n{shown}```", f"```text\n{printed}```"),
                "utf-8",
            )
            print(path.name)
    for path in [path for path in LINKED if path.name in names]:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            sys.path.insert(0, folder)
            names_of_page = {"__name__": "page"}
            for language, block in blocks_of(path):
                if not is_run(language, block):
                    continue
                if language in ("python", "toml"):
                    run_code(path, block, names_of_page, Path(folder))
                else:
                    printed = run_session(block, Path(folder))
                    if not shows(commands_of(block)[1], printed):
                        text = path.read_text("utf-8")
                        path.write_text(text.replace(block, updated(block, printed)), "utf-8")
                        print(path.name)


if __name__ == "__main__":
    update(sys.argv[1:])
