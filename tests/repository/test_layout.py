"""Tests that the test suite has the folders of parity, shared helpers, and short names."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest
from helpers import ROOT

TESTS = ROOT / "tests"
PAGES_ONLY = {"bugs"}
"""Folders of parity without code."""


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules() -> list[Path]:
    """Return the modules of the tests; ports in tests/wild are data."""
    return [path for path in TESTS.rglob("*.py") if TESTS / "wild" not in path.parents]


def folders_in(path: Path) -> set[str]:
    return {
        folder.name
        for folder in path.iterdir()
        if folder.is_dir() and not folder.name.startswith("__")
    }


def test_folders_mirror_parity():
    """Each folder of parity with code has a folder in tests/parity, and no other folder
    exists there.
    """
    assert folders_in(TESTS / "parity") == folders_in(ROOT / "parity") - PAGES_ONLY


def test_every_test_is_in_a_folder():
    """conftest.py is the only module directly in tests/."""
    assert [path.name for path in TESTS.glob("*.py")] == ["conftest.py"]


@functools.cache
def names_of_test_modules() -> set[str]:
    """Return the names of the test modules of this repository."""
    return {path.stem for path in modules() if path.name.startswith("test_")}


def imported_tests(module: ast.Module) -> list[str]:
    """Return the test modules of this repository that a module imports."""
    imported = []
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            imported.append(node.module or "")
        elif isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
    return [name for name in imported if name.rpartition(".")[2] in names_of_test_modules()]


def test_no_test_imports_another_test():
    """No test module imports another one: shared helpers are in tests/helpers."""
    importing = {str(path.relative_to(TESTS)): imported_tests(parse(path)) for path in modules()}
    assert {path: names for path, names in importing.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [("from test_mha import f", 1), ("import a.test_mha", 1), ("from helpers.tests import f", 0)],
)
def test_imports_of_tests_are_found(source, count):
    """The control of the test above: `imported_tests` finds imports of test modules, but not
    of helpers.
    """
    assert len(imported_tests(ast.parse(source))) == count


def functions_in(module: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in module.body if isinstance(node, ast.FunctionDef)]


def without_docstring(function: ast.FunctionDef) -> str:
    """Return the parameters and statements of a function."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return ast.dump(function.args) + "".join(map(ast.dump, body))


def repeated_helpers(sources: dict[str, ast.Module]) -> list[list[str]]:
    """Return the helpers with equal code, a list for each code."""
    by_code = defaultdict(list)
    for path, module in sources.items():
        for function in functions_in(module):
            if not function.name.startswith("test_") and len(function.body) > 1:
                by_code[without_docstring(function)].append(f"{path}: {function.name}")
    return [files for files in by_code.values() if len(files) > 1]


def test_helpers_are_defined_once():
    """No two test modules define a helper with the same code of two statements or more."""
    assert repeated_helpers({str(path.relative_to(TESTS)): parse(path) for path in modules()}) == []


def test_repeated_helpers_are_found():
    """The search of the test above ignores names and docstrings, and finds equal code."""
    one = ast.parse('def f(x):\n    """One."""\n    y = x + 1\n    return y')
    other = ast.parse('def g(x):\n    """Other."""\n    y = x + 1\n    return y')
    different = ast.parse("def f(x):\n    y = x + 2\n    return y")
    assert len(repeated_helpers({"a": one, "b": other, "c": different})) == 1


def test_names_of_tests_are_short():
    """The names of test functions have 20 to 40 characters; their docstrings have the claim."""
    paths = [path for path in modules() if path.name.startswith("test_")]
    names = [
        function.name for path in paths for function in ast.walk(parse(path)) if is_test(function)
    ]
    assert len(names) > 2000
    assert [name for name in names if not 20 <= len(name) <= 40] == []


def is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
