"""Annotations of arrays, as checks of the arguments of public functions.

    @checked
    def attention_context(
        attn_weights: Float[Array, "B N T S"], value: Float[Array, "B K S Hv"]
    ) -> Float[Array, "B N T Hv"]: ...

refuses anything but two floating-point arrays of four axes whose B and S are equal. A name stands for one size in all
arguments of a call. "#B" may also be 1, "*B" are any number of axes, "..." are any axes, and a product or sum of sizes
is any size. What an annotation cannot say is checked by hand: sizes against the specification, lengths, and dtypes
that must agree.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar, get_args

from mha_spec.refusal import Refusal, WrongType

FLOATING, INTEGERS, BOOLEAN = "floating point", "integers", "boolean"
"""Kinds of dtypes, in words."""

Function = TypeVar("Function", bound=Callable[..., Any])

Dtypes = Mapping[str, Collection[Any]]
"""Dtypes of a framework by kind."""


HINTS = {
    "mask": "True = masked; if 1 means attend, pass mask == 0; if it is added to the scores, pass it as bias",
}
"""Advice on dtypes, by argument."""


@dataclass(frozen=True)
class Axes:
    """Axes of an array, as an annotation writes them.

    Attributes:
        names: name of each axis after the batch axes; "" for any size.
        may_be_one: names of axes that may be 1 instead.
        batch: name of any number of axes before them; "" if these may differ between arguments, None if there are none.
        compared: index from the end and name of each axis that another argument has, too.
        compares_batch: whether another argument has the same batch axes.
    """

    names: tuple[str, ...]
    may_be_one: frozenset[str]
    batch: str | None
    compared: tuple[tuple[int, str], ...] = ()
    compares_batch: bool = False

    @classmethod
    def of(cls, text: str) -> Axes:
        """Return the axes of an annotation such as "*B #T d_in"."""
        words = text.split()
        batch = None
        if words and words[0].startswith(("...", "*")):
            batch = words[0].removeprefix("*")
            if not batch.isidentifier():
                batch = ""
            words = words[1:]
        names = []
        for word in words:
            name = word.removeprefix("#")
            names.append(name if name.isidentifier() else "")
        may_be_one = frozenset(word.removeprefix("#") for word in words if word.startswith("#"))
        return cls(tuple(names), may_be_one, batch)

    def comparing(self, shared_names: Collection[str]) -> Axes:
        """Return these axes, of which some are compared with those of other arguments."""
        compared = []
        for index, name in enumerate(self.names):
            if name in shared_names:
                compared.append((index - len(self.names), name))
        return replace(self, compared=tuple(compared), compares_batch=f"*{self.batch}" in shared_names)

    def have_rank(self, rank: int) -> bool:
        """Return whether an array of this rank may have these axes."""
        return rank == len(self.names) or (self.batch is not None and rank > len(self.names))

    def batch_axes(self, shape: Any) -> tuple[int, ...]:
        """Return the sizes of the axes before the named ones."""
        return tuple(shape)[: len(shape) - len(self.names)]

    def in_words(self) -> str:
        """Return the axes as an error names them."""
        names = [name or "·" for name in self.names]
        if self.batch is not None:
            names = ["…", *names]
        if len(names) == 1:
            return f"({names[0]},)"
        return f"({', '.join(names)})"


@dataclass(frozen=True)
class ArrayRule:
    """What annotations demand of one argument.

    Attributes:
        array_types: types of the array.
        other_types: types of other accepted arguments, which are checked by hand.
        kind: kind of its dtype.
        dtypes: dtypes of this kind, or their names.
        alternatives: axes, one of which it must have.
        accepts_others: whether it may also be something of no such type, which is checked by hand.
    """

    array_types: tuple[type, ...]
    other_types: tuple[type, ...]
    kind: str
    dtypes: frozenset[Any]
    alternatives: tuple[Axes, ...]
    accepts_others: bool

    def check(self, name: str, x: Any, first_with_axis: dict[str, tuple[Any, str, Any]]) -> None:
        """Refuse an argument that breaks the rule, or whose axes differ from those of earlier arguments.

        Args:
            name: name of the argument.
            x: the argument.
            first_with_axis: size of each compared axis so far, and the name and shape of the argument that has it;
                gains those of this argument.
        """
        if not isinstance(x, self.array_types):
            if self.accepts_others or isinstance(x, self.other_types):
                return
            names = [accepted.__name__ for accepted in self.array_types + self.other_types]
            raise WrongType(name, f"be a {' or '.join(names)}", type(x).__name__)
        shape = x.shape
        axes = self._axes_of(shape, first_with_axis)
        if axes is None:
            in_words = " or ".join(axes.in_words() for axes in self.alternatives)
            raise Refusal(name, f"have axes {in_words}", {f"{name}.shape": tuple(shape)})
        if x.dtype not in self.dtypes and getattr(x.dtype, "name", None) not in self.dtypes:
            raise WrongType(name, f"be {self.kind}", {f"{name}.dtype": x.dtype}, hint=HINTS.get(name, ""))
        if axes.compares_batch:
            self._compare_batch(name, axes, shape, first_with_axis)
        for index, axis in axes.compared:
            size = shape[index]
            if axis not in first_with_axis:
                if size != 1 or axis not in axes.may_be_one:
                    first_with_axis[axis] = (size, name, shape)
                continue
            expected, other, other_shape = first_with_axis[axis]
            if size != expected and (size != 1 or axis not in axes.may_be_one):
                shapes = {f"{name}.shape": tuple(shape), f"{other}.shape": tuple(other_shape)}
                raise Refusal(name, f"have the {axis} of {other}", shapes)

    def _axes_of(self, shape: Any, first_with_axis: Mapping[str, tuple[Any, str, Any]]) -> Axes | None:
        """Return the alternative of this shape, if possible with as many batch axes as earlier arguments."""
        fitting = None
        for axes in self.alternatives:
            if not axes.have_rank(len(shape)):
                continue
            earlier = first_with_axis.get(f"*{axes.batch}")
            if earlier is None or len(earlier[0]) == len(shape) - len(axes.names):
                return axes
            fitting = axes if fitting is None else fitting
        return fitting

    def _compare_batch(
        self, name: str, axes: Axes, shape: Any, first_with_axis: dict[str, tuple[Any, str, Any]]
    ) -> None:
        batch_axes = axes.batch_axes(shape)
        expected, other, other_shape = first_with_axis.setdefault(f"*{axes.batch}", (batch_axes, name, shape))
        # One by one: torch.compile cannot compare tuples of symbolic sizes.
        is_equal = len(batch_axes) == len(expected) and all(a == b for a, b in zip(batch_axes, expected, strict=True))
        if not is_equal:
            shapes = {f"{name}.shape": tuple(shape), f"{other}.shape": tuple(other_shape)}
            raise Refusal(name, f"have the batch axes of {other}", shapes)


def checking(dtypes: Dtypes, array_types: Mapping[str, type] | None = None) -> Callable[[Function], Function]:
    """Return the decorator `checked` for the arrays of a framework.

    Args:
        dtypes: dtypes of the framework by kind.
        array_types: types of arrays by name, if jaxtyping must not see them: its caches keep types until the
            interpreter ends, which some frameworks report as a leak. Annotations with these names must be strings.
    """
    array_types = {} if array_types is None else array_types
    stand_ins = {name: type(name, (), {}) for name in array_types}

    def checked(function: Function) -> Function:
        """Check the arguments of a public function as its annotations say."""
        parameters = inspect.signature(function, locals=stand_ins, eval_str=True).parameters
        rules = _rules_of(parameters, dtypes, array_types)
        order = tuple(parameters)

        @wraps(function)
        def check_and_call(*arguments: Any, **keywords: Any) -> Any:
            first_with_axis: dict[str, tuple[Any, str, Any]] = {}
            for name, x in zip(order, arguments, strict=False):
                if x is not None and name in rules:
                    rules[name].check(name, x, first_with_axis)
            for name, x in keywords.items():
                if x is not None and name in rules:
                    rules[name].check(name, x, first_with_axis)
            return function(*arguments, **keywords)

        check_and_call.is_checked = True  # pyright: ignore[reportAttributeAccessIssue]
        return check_and_call  # pyright: ignore[reportReturnType]

    return checked


def _rules_of(
    parameters: Mapping[str, inspect.Parameter], dtypes: Dtypes, array_types: Mapping[str, type]
) -> dict[str, ArrayRule]:
    """Return the rule of each parameter whose annotation is of arrays."""
    arrays_of = {name: _arrays_in(parameter.annotation) for name, parameter in parameters.items()}
    axes_of = {name: [Axes.of(array.dim_str) for array in arrays] for name, arrays in arrays_of.items() if arrays}
    uses = Counter[str]()
    for alternatives in axes_of.values():
        uses.update({name for axes in alternatives for name in axes.names if name})
        uses.update({f"*{axes.batch}" for axes in alternatives if axes.batch})
    shared_names = [name for name, number in uses.items() if number > 1]
    rules = {}
    for name, alternatives in axes_of.items():
        arrays = arrays_of[name]
        kind = _kind_of(arrays[0].dtypes)
        types = dict.fromkeys(array_types.get(array.array_type.__name__, array.array_type) for array in arrays)
        options = get_args(parameters[name].annotation)
        others = [option for option in options if option not in arrays and option is not type(None)]
        other_types = tuple(option for option in others if isinstance(option, type))
        accepts_others = len(other_types) < len(others)
        compared = tuple(dict.fromkeys(axes.comparing(shared_names) for axes in alternatives))
        rules[name] = ArrayRule(tuple(types), other_types, kind, frozenset(dtypes[kind]), compared, accepts_others)
    return rules


def _arrays_in(annotation: Any) -> list[Any]:
    """Return the annotations of arrays in one that may be a union."""
    options = get_args(annotation) or (annotation,)
    return [option for option in options if hasattr(option, "dim_str")]


def _kind_of(dtypes: Sequence[str]) -> str:
    """Return the kind of the dtypes that an annotation such as `Float[…]` lists."""
    if "float32" in dtypes:
        return FLOATING
    return BOOLEAN if "bool" in dtypes else INTEGERS
