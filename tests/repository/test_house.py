"""Tests of the code base: import cycles, class names, private names, and prose in tests.

Who may import whom is in pyproject.toml, for `lint-imports`; how large functions and signatures may
grow, for ruff.
"""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest
from helpers import ROOT

PACKAGES = ("mha_spec", "mha_jax", "mha_torch", "mha_tt", "ttnn_mock", "parity", "parity_lab")


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Return the nodes of a module, which several tests read."""
    return tuple(ast.walk(ast.parse(source)))


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def test_modules_have_no_import_cycle(graph):
    """The imports of the more than 300 modules have no cycle, however long."""
    assert len(graph.modules) > 300
    try:
        TopologicalSorter(
            {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
        ).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_ttnn_mock_imports_no_other_package():
    """ttnn_mock imports ttnn, torch and NumPy, and nothing of this project, so that it serves
    any TTNN code.
    """
    graph = grimp.build_graph("ttnn_mock", include_external_packages=True, cache_dir=None)
    imported = {name for name in graph.modules if graph.is_module_squashed(name)}
    assert imported - sys.stdlib_module_names == {"ttnn", "torch", "numpy"}


def is_python_script(path: Path) -> bool:
    """Return whether a file has no suffix and begins with the line of a program in Python."""
    if not path.is_file() or path.suffix:
        return False
    first_line, _, _ = path.read_bytes().partition(b"\n")
    return first_line.startswith(b"#!") and b"python" in first_line


def test_scripts_in_tools_are_linted():
    """Ruff also checks every Python script in tools/ whose name has no suffix."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    scripts = [path for path in (ROOT / "tools").iterdir() if is_python_script(path)]
    names = {path.relative_to(ROOT).as_posix() for path in scripts}
    assert {"tools/coverage", "tools/mutants"} <= names
    assert names == set(settings["tool"]["ruff"]["extend-include"])


def test_class_names_of_parity_are_unique():
    """No two classes of parity have the same name, except in templates."""
    homes: dict[str, set[str]] = {}
    for path in (ROOT / "parity").rglob("*.py"):
        if path.parent.name == "templates":  # one layer in three frameworks, with the same names
            continue
        for node in nodes_of(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    assert len(homes) > 200
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert shared == {}


# ---- Private names -------------------------------------------------------------------------------


def private_names(source: str) -> Iterator[str]:
    """Yield private names that a module imports from PACKAGES, or reaches through an import."""
    nodes, bound = nodes_of(source), {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            bound |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
        elif isinstance(node, ast.Import):
            bound |= {
                alias.asname or alias.name: alias.name
                for alias in node.names
                if alias.name.startswith(PACKAGES)
            }
    for node in nodes:
        if (
            isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and ast.unparse(node.value) in bound
        ):
            yield f"{bound[ast.unparse(node.value)]}.{node.attr}"
    yield from (name for name in bound.values() if is_private(name.rpartition(".")[2]))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


VAGUE = {
    *(
        "found",
        "held",
        "told",
        "said",
        "unsaid",
        "beside",
        "asked",
        "lent",
        "seen",
        "given",
        "kept",
    ),
    *("judge", "judged", "law", "laws", "place", "places", "refusal", "refused"),
}
"""Names that say where a value comes from, or nothing, but not what it is; and words of dialect."""


def vague_names(source):
    """Return the variables, parameters, functions and classes in a module with vague names, each
    with its line.
    """
    names = []
    for node in nodes_of(source):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append((node.id, node.lineno))
        elif isinstance(node, ast.arg):
            names.append((node.arg, node.lineno))
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append((node.name, node.lineno))
    return [(name, line) for name, line in names if name.strip("_").lower() in VAGUE]


@pytest.mark.parametrize("wing", ["measure", "port", "explain", "use"])
def test_names_say_what_they_hold(wing):
    """No variable, parameter, function or class of a wing has a vague name."""
    vague = {
        str(path.relative_to(ROOT)): vague_names(path.read_text(encoding="utf-8"))
        for path in (ROOT / "parity" / wing).rglob("*.py")
    }
    assert {path: names for path, names in vague.items() if names} == {}


def test_vague_names_are_found():
    """The check of names finds variables, targets of loops, parameters and functions."""
    source = "def found(given, x): seen = [held for held in x]; y = x; return seen"
    assert [name for name, _ in vague_names(source)] == ["found", "given", "seen", "held"]


def test_private_names_are_not_imported():
    """No module uses private names of another module of this project."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(paths) > 300
    imported = {
        str(path.relative_to(ROOT)): [*private_names(path.read_text(encoding="utf-8"))]
        for path in paths
    }
    assert {path: names for path, names in imported.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from mha_jax.b import _f", ["mha_jax.b._f"]),
        ("from mha_jax import b\nb._f()", ["mha_jax.b._f"]),
        ("import mha_jax.b\nmha_jax.b._f()", ["mha_jax.b._f"]),
        ("import mha_jax.b as other\nother._f()", ["mha_jax.b._f"]),
        ("def g():\n    from mha_jax.b import C\n    C._f()", ["mha_jax.b.C._f"]),
        ("from mha_jax.b import f\nf.__name__", []),
        ("import numpy as np\nnp._f()", []),
        ("self._f", []),
    ],
)
def test_foreign_private_names_are_found(source, names):
    """`private_names` finds private names that are imported, or reached through an import, of
    this project only.
    """
    assert list(private_names(source)) == names


# ---- Prose in tests ------------------------------------------------------------------------------

EXCEPT = {
    "input_errors.py",
    "test_input_error.py",
    "test_input_errors.py",
    "test_house.py",
    "test_words.py",
}
"""Files that print errors, or rules."""


def sentences(source: str) -> list[str]:
    """Return strings of a test with the word that begins a rule. Docstrings do not count."""
    if "must" not in source:
        return []
    nodes = nodes_of(source)
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = (
        node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings
    )
    strings = (node.value for node in constants if isinstance(node.value, str))
    return [text for text in strings if re.search(r"\bmust\b", text)]


def test_no_test_repeats_words_of_an_error():
    """No test has the words of a rule in a string, except the tests of errors and rules
    themselves.
    """
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in EXCEPT]
    assert len(paths) > 100
    repeated = [
        (str(path.relative_to(ROOT)), sentences(path.read_text(encoding="utf-8"))) for path in paths
    ]
    assert [(path, strings) for path, strings in repeated if strings] == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('match = "--heads must be odd"', 1),
        ('words = f"{name} must be {rule}"', 1),
        ('"""A docstring must not count."""', 0),
        ('name = "mustard"  # must', 0),
    ],
)
def test_strings_with_rules_are_found(source, count):
    """`sentences` finds strings with the word 'must', but not docstrings, comments or parts
    of words.
    """
    assert len(sentences(source)) == count
