"""Examples in docstrings of public names, which run as they stand there."""

import ast
import doctest
import importlib
import inspect
import io
from itertools import pairwise
from typing import Any

import parity

TABLES = {"CASES": "parity.measure.core.cases"}
"""Modules of public tables: their docstrings are below them."""


def docstring_of(name: str) -> str:
    """Return the docstring of a public name of parity; of a table, the text below it."""
    value = getattr(parity, name)
    if inspect.isclass(value) or callable(value):
        return inspect.getdoc(value) or ""
    module = importlib.import_module(TABLES[name])
    statements = ast.parse(inspect.getsource(module)).body
    for statement, below in pairwise(statements):
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == name:
            assert isinstance(below, ast.Expr)
            return str(ast.literal_eval(below.value))
    raise AssertionError(f"no docstring is below {name}")


def failure_of_example(name: str, names: dict[str, Any]) -> str:
    """Run the example in the docstring of a public name, and return the differences from its text.

    Args:
        name: the public name.
        names: what the example uses without an import, such as `parity` and `np`.

    Returns:
        The failures; empty if it runs and prints what it shows.
    """
    example = doctest.DocTestParser().get_doctest(docstring_of(name), dict(names), name, None, 0)
    if not example.examples:
        return f"{name} has no example"
    failures = io.StringIO()
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=failures.write)
    return failures.getvalue()
