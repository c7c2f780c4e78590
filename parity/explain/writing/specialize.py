"""Specialize a template: keep the code that one layer needs, with its constants filled in.

A template is a Python module whose branches depend on names that are known when it is specialized:
`spec`, `call`, and lower-case module names that are computed from them. The result has none of
these names:

- if the condition of an `if` or a conditional expression is known, the branch taken replaces it;
- a known expression is replaced by its value;
- a parameter that its function no longer uses is removed, with its arguments and its entry in the
  docstring; so are arguments whose value is `ABSENT`;
- an UPPERCASE name of the module stays a constant; one that only renames another is replaced by it;
- unreferenced imports, functions, classes, constants and variables are removed.

Comments and line breaks stay, unless the rest of a call or a signature fits in a line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from parity.explain.writing.evaluate import FUNCTIONS, value_of
from parity.explain.writing.quoting import string_literal

LITERALS = (bool, int, float, str, tuple, type(None))
"""Types of known values that can be written as Python literals."""

WIDTH = 120  # columns of a line


class Decision(NamedTuple):
    """A condition of a template, and whether it holds for a layer."""

    condition: str
    holds: bool


class SourceEdit(NamedTuple):
    """A replacement for a part of a source."""

    begin: int
    end: int
    text: str = ""


def specialize(
    template: str,
    known: Mapping[str, Any],
    keep: Collection[str] = (),
    renamed: Mapping[str, str] | None = None,
    decided: set[Decision] | None = None,
) -> str:
    """Return the module that a template specializes to.

    Args:
        template: source of a module.
        known: values by name, including the value of `ABSENT`.
        keep: module names that stay although nothing refers to them, imported ones too.
        renamed: variables that are called otherwise for this layer, and their names.
        decided: set to which the conditions that choose code are added, with their outcomes.

    Raises:
        ValueError: if a known name remains, for example because a condition is only partly known.
    """
    values = {**FUNCTIONS, **known}
    if decided is None:
        decided = set()
    text = _Branches(template, values, decided).chosen()
    text = _repeated(text, _conditional_expressions, values, decided)
    if renamed is not None:
        text = _repeated(text, _renamed_variables, renamed)
    text = _repeated(text, _absent_arguments, values)
    text = _repeated(text, _unused_parameters)
    text = _repeated(text, _known_expressions, values)
    text = _repeated(text, _aliases)
    text = _repeated(text, _unreferenced, keep)
    text = _repeated(text, _broken_lines)
    remaining = _names_in(ast.parse(text)) & values.keys() - FUNCTIONS.keys()
    if remaining:
        raise ValueError(f"a template must leave no known name, got {sorted(remaining)}")
    return _with_blank_lines(text)


def resolved(part: str, known: Mapping[str, Any], decided: set[Decision]) -> str:
    """Return a part of a template with its known branches chosen and known values filled in.

    Args:
        part: source of functions or classes.
        known: values by name.
        decided: as in `specialize`.
    """
    values = {**FUNCTIONS, **known}
    text = _Branches(part, values, decided).chosen()
    return _repeated(text, _known_expressions, values)


def _repeated(text: str, find_edits: Callable[..., Iterator[SourceEdit]], *arguments: Any) -> str:
    """Return a text with the edits of a step, repeated until the step finds no more."""
    while True:
        edits = list(find_edits(_parsed(text), *arguments))
        if not edits:
            return text
        text = _edited(text, edits)


def _edited(text: str, edits: list[SourceEdit]) -> str:
    """Apply edits to a text; of overlapping edits, the widest counts."""
    parts = []
    end = 0
    for edit in sorted(edits, key=_widest_first):
        if edit.begin >= end:
            parts += [text[end : edit.begin], edit.text]
            end = edit.end
    parts.append(text[end:])
    return "".join(parts)


def _widest_first(edit: SourceEdit) -> tuple[int, int]:
    return edit.begin, -edit.end


# ---- Sources -------------------------------------------------------------------------------------


class _Source:
    """A source with its syntax tree and the positions of its nodes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self.lines = text.splitlines(keepends=True)
        self.offsets = [0]
        for line in self.lines:
            self.offsets.append(self.offsets[-1] + len(line))

    def begin(self, node: Any) -> int:
        return self.offsets[node.lineno - 1] + self._column(node.lineno, node.col_offset)

    def end(self, node: Any) -> int:
        column = self._column(node.end_lineno, node.end_col_offset)
        return self.offsets[node.end_lineno - 1] + column

    def _column(self, line: int, num_bytes: int) -> int:
        # `ast` counts bytes of UTF-8, and a string has characters.
        return len(self.lines[line - 1].encode()[:num_bytes].decode())

    def segment(self, node: ast.AST) -> str:
        return self.text[self.begin(node) : self.end(node)]

    def end_of_header(self, statement: Any) -> int:
        """Return the last line before the body of a compound statement."""
        line = statement.lineno
        while not self.lines[line - 1].rstrip().endswith(":"):
            line += 1
        return line

    def without(self, statement: ast.stmt) -> SourceEdit:
        """Return the edit that removes a statement with its comments."""
        first = _first_line(statement)
        while self.lines[first - 2].lstrip().startswith("#"):
            first -= 1
        return SourceEdit(self.offsets[first - 1], self.offsets[statement.end_lineno or 0])

    def without_element(self, element: Any, elements: list[Any]) -> SourceEdit:
        """Return the edit that removes one of the elements of a list, with its comma."""
        index = elements.index(element)
        if index + 1 < len(elements):
            return SourceEdit(self.begin(element), self.begin(elements[index + 1]))
        if index > 0:
            return SourceEdit(self.end(elements[index - 1]), self.end(element))
        return SourceEdit(self.begin(element), self.end(element))


@lru_cache(maxsize=128)
def _parsed(text: str) -> _Source:
    """Return a text with its syntax tree. The last text of a step is the first of the next, and
    most parts of a template are the same in every layer.
    """
    return _Source(text)


def _first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    if decorators:
        return decorators[0].lineno
    return statement.lineno


def _names_in(
    node: ast.AST, contexts: tuple[type[ast.expr_context], ...] = (ast.Load, ast.Store)
) -> set[str]:
    """Return the variables that a node reads, binds, or both."""
    return {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, contexts)
    }


def _names_read(node: ast.AST) -> set[str]:
    return _names_in(node, (ast.Load,))


def _is_known(node: ast.AST, known: Mapping[str, Any]) -> bool:
    names_of_comprehensions = _names_in(node, (ast.Store,))
    return _names_read(node) - names_of_comprehensions <= known.keys()


def _decide(condition: ast.expr, known: Mapping[str, Any], decided: set[Decision]) -> bool:
    """Return whether a condition holds, and record it."""
    holds = bool(value_of(condition, known))
    decided.add(Decision(ast.unparse(condition), holds))
    return holds


# ---- Branches ------------------------------------------------------------------------------------


class _Branches:
    """A template whose known branches are resolved."""

    def __init__(self, text: str, known: dict[str, Any], decided: set[Decision]) -> None:
        self.source = _parsed(text)
        self.known = known
        self.decided = decided

    def chosen(self) -> str:
        """Return the source with the branches taken; names that they define become known."""
        return "".join(self._lines(self.source.tree.body, 1, 0))

    def _lines(self, statements: list[ast.stmt], first: int, indent: int) -> Iterator[str]:
        """Yield the lines of statements, starting at a line, at an indentation."""
        for statement in statements:
            begin = _first_line(statement)
            after = (statement.end_lineno or 0) + 1
            shift = statement.col_offset - indent
            comments_before = self._shifted(first, begin, shift)
            first = after
            if isinstance(statement, ast.If) and _is_known(statement.test, self.known):
                branch, first_of_branch = self._branch(statement)
                if branch:
                    yield from comments_before
                    yield from self._lines(branch, first_of_branch, indent)
            elif indent == 0 and self._makes_known(statement):
                continue
            elif hasattr(statement, "body"):
                yield from comments_before
                yield from self._compound(statement, indent)
            else:
                yield from comments_before
                yield from self._shifted(begin, after, shift)

    def _compound(self, statement: Any, indent: int) -> Iterator[str]:
        """Yield the lines of a function, a class, or another statement with a body."""
        first_of_body = self.source.end_of_header(statement) + 1
        shift = statement.col_offset - indent
        yield from self._shifted(_first_line(statement), first_of_body, shift)
        yield from self._lines(statement.body, first_of_body, indent + 4)
        alternative = getattr(statement, "orelse", [])
        if alternative:
            raise ValueError(
                "a template must not have an else of an unknown condition, got an else in line "
                f"{alternative[0].lineno}"
            )

    def _branch(self, statement: ast.If) -> tuple[list[ast.stmt], int]:
        """Return the statements of the branch taken, and its first line."""
        if _decide(statement.test, self.known, self.decided):
            return statement.body, self.source.end_of_header(statement) + 1
        if not statement.orelse:
            return [], 0
        line = (statement.body[-1].end_lineno or 0) + 1
        while not re.match(r"\s*(else:|elif )", self.source.lines[line - 1]):
            line += 1
        # An `elif` is itself the statement of the branch; an `else` precedes its statements.
        if "elif " in self.source.lines[line - 1]:
            return statement.orelse, line
        return statement.orelse, line + 1

    def _shifted(self, first: int, stop: int, shift: int) -> Iterator[str]:
        for line in self.source.lines[first - 1 : stop - 1]:
            if line.strip():
                yield line[shift:]
            else:
                yield line

    def _makes_known(self, statement: ast.stmt) -> bool:
        """Return whether a module-level statement defines a known lower-case name, and record its
        value.
        """
        if not isinstance(statement, ast.Assign) or not _is_known(statement.value, self.known):
            return False
        target = statement.targets[0]
        if not isinstance(target, ast.Name) or not target.id.islower():
            return False
        self.known[target.id] = value_of(statement.value, self.known)
        return True


# ---- Values --------------------------------------------------------------------------------------


def _conditional_expressions(
    source: _Source, known: Mapping[str, Any], decided: set[Decision]
) -> Iterator[SourceEdit]:
    for node in source.nodes:
        if not isinstance(node, ast.IfExp) or not _is_known(node.test, known):
            continue
        chosen = node.orelse
        if _decide(node.test, known, decided):
            chosen = node.body
        yield SourceEdit(source.begin(node), source.end(node), source.segment(chosen))


def _known_expressions(source: _Source, known: Mapping[str, Any]) -> Iterator[SourceEdit]:
    """Yield edits that replace known expressions by their values."""
    for node in source.nodes:
        is_read = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if not isinstance(node, ast.expr) or not is_read:
            continue
        if not _names_in(node) or not _is_known(node, known):
            continue
        try:
            value = value_of(node, known)
        except Exception as error:
            raise ValueError(
                f"a template must be able to compute {source.segment(node)}: {error}"
            ) from error
        if isinstance(value, LITERALS):
            begin, end = _with_parentheses(source.text, source.begin(node), source.end(node))
            yield SourceEdit(begin, end, _literal(value, node, source))


def _literal(value: Any, node: ast.expr, source: _Source) -> str:
    """Return a value as Python writes it, to replace a node; long tuples have a line for each
    element.
    """
    if isinstance(value, str):
        return string_literal(value)
    text = repr(value)
    if not isinstance(value, tuple) or node.col_offset + len(text) <= WIDTH:
        return text
    line = source.lines[node.lineno - 1]
    indent = line[: len(line) - len(line.lstrip())]
    elements = "".join(f"{indent}    {element!r},\n" for element in value)
    return f"(\n{elements}{indent})"


def _with_parentheses(text: str, begin: int, end: int) -> tuple[int, int]:
    """Return the range of an expression, including its parentheses unless they belong to a call."""
    has_parentheses = text[begin - 1] == "(" and text[end : end + 1] == ")"
    if has_parentheses and not re.match(r"[\w)\]]", text[begin - 2]):
        return begin - 1, end + 1
    return begin, end


# ---- Names ---------------------------------------------------------------------------------------


def _renamed_variables(source: _Source, renamed: Mapping[str, str]) -> Iterator[SourceEdit]:
    for node in source.nodes:
        if isinstance(node, ast.Name) and node.id in renamed:
            yield SourceEdit(source.begin(node), source.end(node), renamed[node.id])


def _aliases(source: _Source) -> Iterator[SourceEdit]:
    """Yield edits that replace a constant that renames another one."""
    for statement in source.tree.body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Name):
            continue
        alias = statement.targets[0]
        constant = statement.value.id
        if not isinstance(alias, ast.Name) or not alias.id.isupper() or not constant.isupper():
            continue
        for node in source.nodes:
            if isinstance(node, ast.Name) and node.id == alias.id and node is not alias:
                yield SourceEdit(source.begin(node), source.end(node), constant)
        yield source.without(statement)
        return  # the next one may rename this one


# ---- Arguments -----------------------------------------------------------------------------------


def _absent_arguments(source: _Source, known: Mapping[str, Any]) -> Iterator[SourceEdit]:
    """Yield edits that remove arguments whose value is `ABSENT`."""
    if "ABSENT" not in known:
        return
    absent = known["ABSENT"]
    for call in source.nodes:
        if not isinstance(call, ast.Call):
            continue
        arguments: list[Any] = [*call.args, *call.keywords]
        for argument in arguments:
            value = getattr(argument, "value", argument)
            if isinstance(value, ast.Name) and value.id in known and known[value.id] is absent:
                yield source.without_element(argument, arguments)


def _unused_parameters(source: _Source) -> Iterator[SourceEdit]:
    """Yield edits that remove a parameter that its function does not use: from the signature, the
    docstring and each call. The other parameters of a function follow when this is repeated.
    """
    for function in source.nodes:
        if not isinstance(function, ast.FunctionDef):
            continue
        parameters = [parameter for parameter in function.args.args if parameter.arg != "self"]
        used = _names_read_in_body(function)
        for index, parameter in enumerate(parameters):
            if parameter.arg in used:
                continue
            yield source.without_element(parameter, function.args.args)
            yield from _docstring_entry(source, function, parameter.arg)
            yield from _arguments_of(source, function.name, parameter.arg, index)
            break


def _names_read_in_body(function: ast.FunctionDef) -> set[str]:
    names = set()
    for statement in function.body:
        names |= _names_read(statement)
    return names


def _arguments_of(source: _Source, function: str, name: str, index: int) -> Iterator[SourceEdit]:
    """Yield edits that remove the argument of a parameter from the calls of its function."""
    for call in source.nodes:
        if not isinstance(call, ast.Call):
            continue
        if ast.unparse(call.func) not in (function, f"self.{function}"):
            continue
        arguments: list[Any] = [*call.args, *call.keywords]
        if index < len(call.args):
            yield source.without_element(call.args[index], arguments)
        for keyword in call.keywords:
            if keyword.arg == name:
                yield source.without_element(keyword, arguments)


def _docstring_entry(source: _Source, function: ast.FunctionDef, name: str) -> Iterator[SourceEdit]:
    if not ast.get_docstring(function):
        return
    docstring = function.body[0]
    pattern = re.compile(rf"^( +){name}: .*\n(?:\1 +.*\n)*", re.MULTILINE)
    entry = pattern.search(source.text, source.begin(docstring), source.end(docstring))
    if entry is not None:
        yield SourceEdit(entry.start(), entry.end())


# ---- Unreferenced code ---------------------------------------------------------------------------


def _unreferenced(source: _Source, keep: Collection[str]) -> Iterator[SourceEdit]:
    """Yield edits that remove unreferenced imports, functions, classes, constants and variables."""
    used = _names_read(source.tree).union(keep)
    for statement in source.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from _unused_imports(source, statement, used)
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            if statement.name not in used:
                yield source.without(statement)
        elif isinstance(statement, ast.Assign) and not _names_in(statement.targets[0]) & used:
            yield source.without(statement)
    for function in source.nodes:
        if isinstance(function, ast.FunctionDef):
            yield from _unused_variables(source, function)


def _unused_imports(
    source: _Source, statement: ast.Import | ast.ImportFrom, used: Collection[str]
) -> Iterator[SourceEdit]:
    used_names = []
    for alias in statement.names:
        name = alias.asname or alias.name
        if name.split(".")[0] in used:
            used_names.append(source.segment(alias))
    if not used_names:
        yield source.without(statement)
    elif len(used_names) < len(statement.names):
        text = f"import {', '.join(used_names)}"
        if isinstance(statement, ast.ImportFrom):
            text = f"from {statement.module} {text}"
        yield SourceEdit(source.begin(statement), source.end(statement), text)


def _unused_variables(source: _Source, function: ast.FunctionDef) -> Iterator[SourceEdit]:
    used = _names_read(function)
    for statement in ast.walk(function):
        if not isinstance(statement, ast.Assign):
            continue
        target = statement.targets[0]
        if isinstance(target, ast.Name) and target.id not in used:
            yield source.without(statement)


# ---- Lines ---------------------------------------------------------------------------------------


def _broken_lines(source: _Source) -> Iterator[SourceEdit]:
    """Yield edits that join signatures and calls that fit in a line."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef):
            last = source.end_of_header(node)
            end = source.offsets[last] - 1
        elif isinstance(node, ast.Call):
            last = node.end_lineno or 0
            end = source.end(node)
        else:
            continue
        begin = source.begin(node)
        if last == node.lineno or "#" in source.text[begin:end]:
            continue
        text = _joined(source.text[begin:end])
        before = source.text[source.offsets[node.lineno - 1] : begin]
        after = source.text[end : source.offsets[last]].rstrip("\n")
        if len(before) + len(text) + len(after) <= WIDTH:
            yield SourceEdit(begin, end, text)


def _joined(text: str) -> str:
    """Return a signature or a call in one line."""
    text = re.sub(r",?\s*\n\s*(?=\))", "", text)
    text = re.sub(r"\(\s*\n\s*", "(", text)
    return re.sub(r"\s*\n\s*", " ", text)


def _with_blank_lines(text: str) -> str:
    """Return a source with two blank lines between top-level functions and classes, and at most one
    elsewhere.
    """
    text = re.sub(r"\n{3,}", "\n\n", text.strip()) + "\n"
    text = re.sub(r"(:\n)\n+(?= )", r"\1", text)
    text = re.sub(r"\n+(?=\n(?:@\w|def |class ))", "\n\n", text)
    lines = text.splitlines()
    for statement in ast.parse(text).body:
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        last = statement.end_lineno or 0
        following = lines[last : last + 2]
        num_missing = 2 - following.count("")
        if last < len(lines):
            lines[last - 1] += "\n" * num_missing
    return "\n".join(lines) + "\n"
