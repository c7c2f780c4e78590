"""Values of the expressions in templates, computed from the syntax tree without Python's `eval`.

An expression can read the names that it was given, public attributes and entries, compute with
them, and call a few functions and public methods. It cannot import, define or assign anything, or
reach a private name, so that even a template from someone else could not run code here.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mha_spec import InputError

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "tuple": tuple,
    "isinstance": isinstance,
    "min": min,
    "max": max,
    "len": len,
    "any": any,
}
"""Functions that templates call by name."""


def _is_in(element: Any, container: Any) -> bool:
    return element in container


def _is_not_in(element: Any, container: Any) -> bool:
    return element not in container


COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: _is_in,
    ast.NotIn: _is_not_in,
}

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}

SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def value_of(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the value of an expression.

    Args:
        node: the expression.
        known: values by name, including functions such as `FUNCTIONS`.

    Raises:
        ValueError: if it contains anything that templates do not need.
        Exception: as Python raises it for the same expression, for example for an attribute that
            does not exist.
    """
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return known[node.id]
        case ast.Attribute():
            return _attribute(node, known)
        case ast.Subscript():
            return value_of(node.value, known)[value_of(node.slice, known)]
        case ast.Tuple():
            return tuple(value_of(element, known) for element in node.elts)
        case ast.BoolOp():
            return _any_or_all(node, known)
        case ast.UnaryOp() if type(node.op) in SIGNS:
            return SIGNS[type(node.op)](value_of(node.operand, known))
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            return ARITHMETIC[type(node.op)](
                value_of(node.left, known), value_of(node.right, known)
            )
        case ast.Compare():
            return _comparison(node, known)
        case ast.IfExp():
            if value_of(node.test, known):
                return value_of(node.body, known)
            return value_of(node.orelse, known)
        case ast.Call(func=ast.Name() | ast.Attribute()) if not node.keywords:
            function = value_of(node.func, known)
            return function(*(value_of(argument, known) for argument in node.args))
        case ast.ListComp():
            return list(_elements(node, known))
        case ast.SetComp():
            return set(_elements(node, known))
        case ast.GeneratorExp():
            return _elements(node, known)
    raise InputError("a template", "have expressions that can be computed", ast.unparse(node))


def _attribute(node: ast.Attribute, known: Mapping[str, Any]) -> Any:
    owner = value_of(node.value, known)
    # A format string reads private attributes of its arguments: "{0.__class__}".format(spec).
    if node.attr.startswith("_") or isinstance(owner, str):
        raise InputError("a template", "read public attributes of a layer only", ast.unparse(node))
    return getattr(owner, node.attr)


def _any_or_all(node: ast.BoolOp, known: Mapping[str, Any]) -> Any:
    """Return the first operand that decides, as Python does; later ones may not be computable."""
    is_or = isinstance(node.op, ast.Or)
    value: Any = None
    for operand in node.values:
        value = value_of(operand, known)
        if bool(value) == is_or:
            break
    return value


def _comparison(node: ast.Compare, known: Mapping[str, Any]) -> bool:
    left = value_of(node.left, known)
    for operation, operand in zip(node.ops, node.comparators, strict=True):
        right = value_of(operand, known)
        if not COMPARISONS[type(operation)](left, right):
            return False
        left = right
    return True


def _elements(
    node: ast.ListComp | ast.SetComp | ast.GeneratorExp, known: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield the elements of a comprehension over one sequence."""
    loop, *more_loops = node.generators
    if more_loops or not isinstance(loop.target, ast.Name):
        raise InputError("a template", "have comprehensions over one sequence", ast.unparse(node))
    for element in value_of(loop.iter, known):
        inner = {**known, loop.target.id: element}
        if all(value_of(condition, inner) for condition in loop.ifs):
            yield value_of(node.elt, inner)
