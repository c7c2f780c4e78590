"""The house stands: no circles of imports, no name for two classes, private names at home, and tests pin no prose.

Who may import whom is in pyproject.toml, for `lint-imports`; how large functions and signatures may grow, for ruff.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest
from helpers import ROOT

PACKAGES = ("mha_spec", "mha_jax", "mha_torch", "mha_tt", "parity", "parity_lab")


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def test_no_modules_import_each_other_however_far_around(graph):
    assert len(graph.modules) > 300
    try:
        TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_mock_of_ttnn_knows_nothing_of_attention(graph):
    """The mock serves any TTNN code: of the rest of the house it takes a class of errors."""
    room = {name for name in graph.modules if f"{name}.".startswith("mha_tt.mock.")}
    imported = set().union(*(graph.find_modules_directly_imported_by(name) for name in room))
    assert imported - room == {"mha_spec"}


def test_no_two_classes_of_parity_have_one_name():
    homes: dict[str, set[str]] = {}
    for path in (ROOT / "parity").rglob("*.py"):
        if path.parent.name == "templates":  # of one layer in three frameworks
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    assert len(homes) > 200
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert shared == {}


# ---- Private names stay at home --------------------------------------------------------------------------------------


def private_names(source: str) -> Iterator[str]:
    """Private names that a module imports from another of the house, or reaches through what it imports."""
    nodes, bound = [*ast.walk(ast.parse(source))], {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            bound |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name.startswith(PACKAGES)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) in bound:
            yield f"{bound[ast.unparse(node.value)]}.{node.attr}"
    yield from (name for name in bound.values() if is_private(name.rpartition(".")[2]))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_private_names_stay_at_home():
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(paths) > 300
    found = {str(path.relative_to(ROOT)): [*private_names(path.read_text(encoding="utf-8"))] for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "found"),
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
def test_private_names_are_seen_where_they_do_not_belong(source, found):
    assert list(private_names(source)) == found


# ---- Tests pin no prose ----------------------------------------------------------------------------------------------

EXCEPT = {"refusals.py", "test_refusal.py", "test_refusals.py", "test_house.py", "test_words.py"}
"""They print refusals, or rules."""


def sentences(source: str) -> list[str]:
    """Strings of a test with the word that begins a rule. Docstrings do not count."""
    if "must" not in source:
        return []
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings)
    strings = (node.value for node in constants if isinstance(node.value, str))
    return [text for text in strings if re.search(r"\bmust\b", text)]


def test_no_test_pins_the_words_of_a_refusal():
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in EXCEPT]
    assert len(paths) > 100
    found = [(str(path.relative_to(ROOT)), sentences(path.read_text(encoding="utf-8"))) for path in paths]
    assert [(path, strings) for path, strings in found if strings] == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('match = "--heads must be odd"', 1),
        ('words = f"{name} must be {rule}"', 1),
        ('"""A docstring must not count."""', 0),
        ('name = "mustard"  # must', 0),
    ],
)
def test_strings_with_rules_are_counted(source, count):
    assert len(sentences(source)) == count
