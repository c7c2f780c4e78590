"""Text that came with a file, in the source of a written module: as keys of `tensors`, and nowhere
else.

The names of tensors are the only such text. Everything else in a written module comes from a
template or is a number.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from mha_spec import InputError

TENSORS = "tensors"
"""The argument of a loader whose keys are names of tensors."""

RULE = f"be Python that has the names of tensors as keys of {TENSORS} alone"


def string_literal(text: str) -> str:
    r"""Return Python's literal of a text, within printable ASCII.

    No character can end the string, start a line or an escape, or look like a different one:
    quotes and backslashes are escaped, and all others, such as line ends of Unicode, are written
    by their number.
    """
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in ('"', "\\"):
        return f"\\{character}"
    if " " <= character <= "~":
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()


def check_keys(source: str, numbered: str, names: Sequence[str]) -> None:
    """Check that names occur in a source as keys of `tensors` alone.

    Args:
        source: source with names.
        numbered: the same source, made without the names: each key is the name's number.
        names: the names.

    Raises:
        ValueError: if the sources differ in anything but these keys. It would be a bug of this
            package.
    """
    try:
        tree = _Numbering(names).visit(ast.parse(source))
    except (SyntaxError, ValueError) as error:
        raise InputError("a written module", RULE, str(error)) from None
    if ast.dump(tree) != ast.dump(ast.parse(numbered)):
        raise InputError("a written module", RULE, "them elsewhere")


class _Numbering(ast.NodeTransformer):
    """Replaces each name in a key of `tensors` by its number."""

    def __init__(self, names: Sequence[str]) -> None:
        self.numbers = {name: number for number, name in enumerate(names)}

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Replace the key, if the subscript is of `tensors`."""
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == TENSORS:
            if not isinstance(node.slice, ast.Constant) or node.slice.value not in self.numbers:
                raise ValueError(f"line {node.lineno} has a key that does not name a tensor")
            node.slice = ast.Constant(self.numbers[node.slice.value])
        return node
