"""Probes of `tools/mutants map`: a call before each drawn statement, which records that it runs.

Every Python process with the folder of the map on its path imports this first, by sitecustomize.
A process of pytest collects what each test reaches; other processes are started by a test, and
write it to a file at once, because they may end in any way.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

FOLDER = os.environ["MUTANTS_FOLDER"]
ROOT = os.environ["MUTANTS_MAP"]
TEST = os.environ.get("MUTANTS_TEST")
"""The test that started this process; None in a process of pytest."""

reached: set[str] = set()
"""Mutants whose statements this process has reached, of pytest during the present test."""


def reach(mutant: str) -> None:
    """Record that the statement of a mutant is about to run."""
    if mutant in reached:
        return
    reached.add(mutant)
    if TEST is not None:
        # A test may limit the size of files.
        with suppress(OSError), open(os.path.join(FOLDER, f"child-{os.getpid()}"), "a") as file:
            file.write(json.dumps([TEST, mutant]) + "\n")


class Probes(ast.NodeTransformer):
    """Insert a probe before the innermost statement of each mutant.

    A mutant outside of functions runs at import, before any test. Its probe is at the beginning of
    every function of its module.
    """

    def __init__(self, tree: ast.Module, lines: Mapping[str, int]) -> None:
        self.before: dict[int, list[str]] = defaultdict(list)
        self.at_import: list[str] = []
        for mutant, line in lines.items():
            statement = innermost_statement(tree, line)
            if statement is None:
                self.at_import.append(mutant)
            else:
                self.before[id(statement)].append(mutant)

    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST]:
        """Return a node, after the probes of its mutants."""
        mutants = self.before[id(node)]
        self.generic_visit(node)
        if isinstance(node, ast.FunctionDef):
            has_docstring = ast.get_docstring(node, clean=False) is not None
            probes = [probe_at(mutant, node) for mutant in self.at_import]
            node.body[has_docstring:has_docstring] = probes
        if not mutants:
            return node
        return [*(probe_at(mutant, node) for mutant in mutants), node]


def innermost_statement(tree: ast.Module, line: int) -> ast.stmt | None:
    """Return the innermost statement of a function that has a line; None if it runs at import."""
    innermost = None
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                # ast.walk yields outer statements first.
                if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno:
                    innermost = node
    return innermost


def probe_at(mutant: str, node: ast.AST) -> ast.Expr:
    """Return the probe of a mutant, with the position of a node."""
    name = ast.Name("mutants_reach", ast.Load())
    probe = ast.Expr(ast.Call(name, [ast.Constant(mutant)], []))
    return ast.fix_missing_locations(ast.copy_location(probe, node))


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with probes."""

    def get_code(self, fullname: str):
        tree = ast.parse(self.get_data(self.path), self.path)
        tree = Probes(tree, LINES[self.path]).visit(tree)
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Finder(importlib.machinery.PathFinder):
    """Finds the modules that have probes."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        spec = super().find_spec(fullname, path, target)
        if spec is None or spec.origin not in LINES:
            return None
        spec.loader = _Loader(fullname, spec.origin)
        return spec


def _lines_of_files() -> dict[str, dict[str, int]]:
    """Return the line of each mutant, by file."""
    lines: dict[str, dict[str, int]] = {}
    with open(os.path.join(FOLDER, "lines.json")) as file:
        for mutant, (path, line) in json.load(file).items():
            lines.setdefault(os.path.join(ROOT, path), {})[mutant] = line
    return lines


LINES = _lines_of_files()
builtins.mutants_reach = reach
sys.meta_path.insert(0, _Finder)
if TEST is not None:
    reach("")  # so that the test is known to be measured, even if it reaches no mutant
