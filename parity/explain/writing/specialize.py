"""Specialize a template: keep the code that one layer needs, with its constants filled in.

A template is a Python module whose branches depend on names that are known when it is specialized:
`spec`, `call`, and lower-case module names that are computed from them. The result has none of
these names:

- if the condition of an `if` or a conditional expression is known, the branch taken replaces it;
- parameters and arguments with unused names, and arguments whose value is `ABSENT`, are removed,
  with their entries in docstrings;
- a known expression is replaced by its value;
- an UPPERCASE name of the module stays a constant; one that only renames another is replaced by it;
- unreferenced imports, functions, classes, constants and variables are removed.

Comments and line breaks stay, unless the rest of a call or a signature fits in a line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from parity.explain.writing.evaluate import FUNCTIONS, value_of

LITERALS = (bool, int, float, str, tuple, type(None))
"""Types of known values that can be written as Python literals."""

WIDTH = 120  # columns of a line


class Decision(NamedTuple):
    """A condition of a template, and whether it holds for a layer."""

    condition: str
    holds: bool


class Edit(NamedTuple):
    """A replacement for a part of a source."""

    begin: int
    end: int
    text: str = ""


def specialize(
    template: str,
    known: Mapping[str, Any],
    unused: Collection[str] = (),
    keep: Collection[str] = (),
    decided: set[Decision] | None = None,
) -> str:
    """Return the module that a template specializes to.

    Args:
        template: source of a module.
        known: values by name, including that of `ABSENT`.
        unused: names of parameters and arguments to remove.
        keep: module names that stay although nothing refers to them, imported ones too.
        decided: set to which the conditions that choose code are added, with their outcomes.

    Raises:
        ValueError: if a known name remains, for example because a condition is only partly known.
    """
    values = {**FUNCTIONS, **known}
    decided = set() if decided is None else decided
    text = _Branches(template, values, decided).chosen()
    steps = (
        lambda source: _conditional_expressions(source, values, decided),
        lambda source: _arguments(source, unused),
        lambda source: _docstring_entries(source, unused),
        lambda source: _known_expressions(source, values),
        _aliases,
        lambda source: _unreferenced(source, keep),
        _broken_lines,
    )
    for step in steps:
        while edits := list(step(_Source(text))):
            text = _edited(text, edits)
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    if left := sorted(names & {name for name in values if name not in FUNCTIONS}):
        raise ValueError(f"a template must leave no known name, got {left}")
    return _with_blank_lines(text)


def _edited(text: str, edits: list[Edit]) -> str:
    """Apply edits to a text; of overlapping edits, the widest counts."""
    parts, end = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.begin, -edit.end)):
        if edit.begin >= end:
            parts += [text[end : edit.begin], edit.text]
            end = edit.end
    return "".join([*parts, text[end:]])


# ---- Sources -------------------------------------------------------------------------------------


class _Source:
    """A source with its syntax tree and the positions of its nodes."""

    def __init__(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self.lines = text.splitlines(keepends=True)
        self.offsets = [0]
        for line in self.lines:
            self.offsets.append(self.offsets[-1] + len(line))

    def begin(self, node: Any) -> int:
        return self.offsets[node.lineno - 1] + self._column(node.lineno, node.col_offset)

    def end(self, node: Any) -> int:
        return self.offsets[node.end_lineno - 1] + self._column(
            node.end_lineno, node.end_col_offset
        )

    def _column(self, line: int, num_bytes: int) -> int:
        return len(self.lines[line - 1].encode()[:num_bytes].decode())

    def segment(self, node: ast.AST) -> str:
        return self.text[self.begin(node) : self.end(node)]

    def without(self, statement: ast.stmt) -> Edit:
        """Return the edit that removes a statement with its comments."""
        first = _first_line(statement)
        while self.lines[first - 2].lstrip().startswith("#"):
            first -= 1
        return Edit(self.offsets[first - 1], self.offsets[statement.end_lineno or 0])


def _first_line(statement: ast.stmt) -> int:
    return min(
        [statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))]
    )


def _is_known(node: ast.AST, known: Mapping[str, Any]) -> bool:
    names = {
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }
    own = {
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    return names - own <= known.keys()


def _decide(condition: ast.expr, known: Mapping[str, Any], decided: set[Decision]) -> bool:
    """Return whether a condition holds, and record it."""
    holds = bool(value_of(condition, known))
    decided.add(Decision(ast.unparse(condition), holds))
    return holds


# ---- Branches ------------------------------------------------------------------------------------


class _Branches(_Source):
    """A template whose known branches are resolved."""

    def __init__(self, text: str, known: dict[str, Any], decided: set[Decision]) -> None:
        super().__init__(text)
        self.known, self.decided = known, decided

    def chosen(self) -> str:
        """Return the source with the branches taken; names that they define become known."""
        return "".join(self._lines(self.tree.body, 1, 0))

    def _lines(self, statements: list[ast.stmt], first: int, indent: int) -> Iterator[str]:
        """Yield the lines of statements, starting at a line, at an indentation."""
        for statement in statements:
            begin, shift = _first_line(statement), statement.col_offset - indent
            lead = self._shifted(first, begin, shift)
            first = (statement.end_lineno or 0) + 1
            if isinstance(statement, ast.If) and _is_known(statement.test, self.known):
                branch, after = self._branch(statement)
                if branch:
                    yield from lead
                    yield from self._lines(branch, after + 1, indent)
            elif indent == 0 and self._makes_known(statement):
                continue
            elif body := getattr(statement, "body", None):
                after = self._end_of_header(statement)
                yield from lead
                yield from self._shifted(begin, after + 1, shift)
                yield from self._lines(body, after + 1, indent + 4)
                if others := getattr(statement, "orelse", None):
                    place = f"an else in line {others[0].lineno}"
                    raise ValueError(
                        f"a template must not have an else of an unknown condition, got {place}"
                    )
            else:
                yield from lead
                yield from self._shifted(begin, first, shift)

    def _branch(self, statement: ast.If) -> tuple[list[ast.stmt], int]:
        """Return the branch taken, and the last line before it."""
        if _decide(statement.test, self.known, self.decided):
            return statement.body, self._end_of_header(statement)
        if not statement.orelse:
            return [], 0
        line = (statement.body[-1].end_lineno or 0) + 1
        while not re.match(r"\s*(else:|elif )", self.lines[line - 1]):
            line += 1
        return statement.orelse, line - ("elif " in self.lines[line - 1])

    def _end_of_header(self, statement: Any) -> int:
        """Return the last line before the body of a compound statement."""
        line = statement.lineno
        while not self.lines[line - 1].rstrip().endswith(":"):
            line += 1
        return line

    def _shifted(self, first: int, stop: int, shift: int) -> list[str]:
        return [line[shift:] if line.strip() else line for line in self.lines[first - 1 : stop - 1]]

    def _makes_known(self, statement: ast.stmt) -> bool:
        """Return whether a module-level statement defines known lower-case names, and record their
        values.
        """
        if not (isinstance(statement, ast.Assign) and _is_known(statement.value, self.known)):
            return False
        target = statement.targets[0]
        names = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
        if not all(name.islower() for name in names):
            return False
        value = value_of(statement.value, self.known)
        self.known |= (
            {names[0]: value}
            if isinstance(target, ast.Name)
            else dict(zip(names, value, strict=True))
        )
        return True


# ---- Edits ---------------------------------------------------------------------------------------


def _conditional_expressions(
    source: _Source, known: Mapping[str, Any], decided: set[Decision]
) -> Iterator[Edit]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.IfExp) and _is_known(node.test, known):
            chosen = node.body if _decide(node.test, known, decided) else node.orelse
            yield Edit(source.begin(node), source.end(node), source.segment(chosen))


def _arguments(source: _Source, unused: Collection[str]) -> Iterator[Edit]:
    """Yield edits that remove parameters and arguments of unused names, and absent arguments."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef):
            given: list[Any] = [*node.args.args, *node.args.kwonlyargs]
            dropped = [each for each in given if each.arg in unused]
        elif isinstance(node, ast.Call):
            given = [*node.args, *node.keywords]
            dropped = [each for each in given if _name_of(each) in {*unused, "ABSENT"}]
        else:
            continue
        for each in dropped:
            index = given.index(each)
            if index + 1 < len(given):
                yield Edit(source.begin(each), source.begin(given[index + 1]))
            else:
                yield Edit(
                    source.end(given[index - 1]) if index else source.begin(each), source.end(each)
                )


def _name_of(argument: ast.expr | ast.keyword) -> str | None:
    value = argument.value if isinstance(argument, ast.keyword) else argument
    return value.id if isinstance(value, ast.Name) else None


def _docstring_entries(source: _Source, unused: Collection[str]) -> Iterator[Edit]:
    for node in ast.walk(source.tree):
        if not (isinstance(node, ast.FunctionDef) and ast.get_docstring(node)):
            continue
        docstring = node.body[0]
        for name in unused:
            entry = re.compile(rf"^( +){name}: .*\n(?:\1 +.*\n)*", re.MULTILINE)
            if found := entry.search(source.text, source.begin(docstring), source.end(docstring)):
                yield Edit(*found.span())


def _known_expressions(source: _Source, known: Mapping[str, Any]) -> Iterator[Edit]:
    """Yield edits that replace known expressions by their values, the largest first."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.expr) or not _is_known(node, known):
            continue
        has_names = any(isinstance(each, ast.Name) for each in ast.walk(node))
        if has_names and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            try:
                value = value_of(node, known)
            except Exception as error:
                raise ValueError(
                    f"a template must be able to compute {source.segment(node)}: {error}"
                ) from error
            if isinstance(value, LITERALS):
                text = repr(value)
                if isinstance(value, tuple) and node.col_offset + len(text) > WIDTH:
                    indent = " " * (
                        len(source.lines[node.lineno - 1])
                        - len(source.lines[node.lineno - 1].lstrip())
                    )
                    text = "".join(
                        ["(\n", *(f"{indent}    {each!r},\n" for each in value), f"{indent})"]
                    )
                yield Edit(
                    *_with_parentheses(source.text, source.begin(node), source.end(node)), text
                )


def _with_parentheses(text: str, begin: int, end: int) -> tuple[int, int]:
    """Return the range of an expression, including its parentheses unless they belong to a call."""
    if (
        text[begin - 1] == "("
        and text[end : end + 1] == ")"
        and not re.match(r"[\w)\]]", text[begin - 2])
    ):
        return begin - 1, end + 1
    return begin, end


def _aliases(source: _Source) -> Iterator[Edit]:
    """Yield edits that replace constants that rename other constants."""
    for statement in source.tree.body:
        if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name)):
            continue
        target = statement.targets[0]
        if not (
            isinstance(target, ast.Name) and target.id.isupper() and statement.value.id.isupper()
        ):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Name) and node.id == target.id and node is not target:
                yield Edit(source.begin(node), source.end(node), statement.value.id)
        yield source.without(statement)
        return  # the next one may rename this one


def _unreferenced(source: _Source, keep: Collection[str]) -> Iterator[Edit]:
    """Yield edits that remove unreferenced imports, functions, classes, constants and variables."""
    used = {
        each.id
        for each in ast.walk(source.tree)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }
    used |= set(keep)
    for statement in source.tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            held = [
                each for each in statement.names if (each.asname or each.name).split(".")[0] in used
            ]
            if not held:
                yield source.without(statement)
            elif len(held) < len(statement.names):
                names = ", ".join(map(source.segment, held))
                before = (
                    f"from {statement.module} " if isinstance(statement, ast.ImportFrom) else ""
                )
                yield Edit(
                    source.begin(statement), source.end(statement), f"{before}import {names}"
                )
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            if statement.name not in used:
                yield source.without(statement)
        elif (
            isinstance(statement, ast.Assign)
            and not {each.id for each in _targets(statement)} & used
        ):
            yield source.without(statement)
    for function in ast.walk(source.tree):
        if isinstance(function, ast.FunctionDef):
            yield from _unused_variables(source, function)


def _unused_variables(source: _Source, function: ast.FunctionDef) -> Iterator[Edit]:
    loaded = {
        each.id
        for each in ast.walk(function)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }
    for statement in ast.walk(function):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if (
            isinstance(statement, ast.Assign)
            and isinstance(target, ast.Name)
            and target.id not in loaded
        ):
            yield source.without(statement)


def _targets(statement: ast.Assign) -> list[ast.Name]:
    return [each for each in ast.walk(statement.targets[0]) if isinstance(each, ast.Name)]


def _broken_lines(source: _Source) -> Iterator[Edit]:
    """Yield edits that join signatures and calls that fit in a line."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef):
            begin, last = source.begin(node), node.lineno
            while not source.lines[last - 1].rstrip().endswith(":"):
                last += 1
            end = source.offsets[last] - 1
        elif isinstance(node, ast.Call):
            begin, end, last = source.begin(node), source.end(node), node.end_lineno or 0
        else:
            continue
        if last == node.lineno or "#" in source.text[begin:end]:
            continue
        text = re.sub(r",?\s*\n\s*(?=\))", "", source.text[begin:end])
        text = re.sub(r"\(\s*\n\s*", "(", text)
        text = re.sub(r"\s*\n\s*", " ", text)
        before = source.offsets[node.lineno - 1]
        rest = source.text[end : source.offsets[last]].rstrip("\n")
        if begin - before + len(text) + len(rest) <= WIDTH:
            yield Edit(begin, end, text)


def _with_blank_lines(text: str) -> str:
    """Return a source with two blank lines between top-level functions and classes, and at most one
    elsewhere.
    """
    text = re.sub(r"\n{3,}", "\n\n", text.strip()) + "\n"
    text = re.sub(r"(:\n)\n+(?= )", r"\1", text)
    text = re.sub(r"\n+(?=\n(?:@\w|def |class ))", "\n\n", text)
    lines, tree = text.splitlines(keepends=True), ast.parse(text)
    ends = {
        each.end_lineno for each in tree.body if isinstance(each, (ast.FunctionDef, ast.ClassDef))
    }
    for index, line in enumerate(lines, start=1):
        if index in ends and index < len(lines):
            lines[index - 1] = line + "\n" * (
                2 - (lines[index] == "\n") - (lines[index + 1 : index + 2] == ["\n"])
            )
    return "".join(lines)
