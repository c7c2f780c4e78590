"""Annotations of arrays, as checks of the arguments of public functions.

    @checked
    def attention_context(
        attn_weights: Float[Array, "B N T S"], value: Float[Array, "B K S Hv"]
    ) -> Float[Array, "B N T Hv"]: ...

raises an error for anything but two floating-point arrays of four axes whose B and S are equal. A name stands for one
size in all arguments of a call. "#B" may also be 1, "*B" are any number of axes, "..." are any axes, and a product or
sum of sizes is any size. Functions check by hand what is beyond annotations: sizes against the specification, lengths,
and dtypes that must agree.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar, get_args

from mha_spec.aliases import unknown_argument
from mha_spec.hints import OF_NUMBERS
from mha_spec.refusal import Refusal, WrongType

FLOATING, INTEGERS, BOOLEAN = "floating point", "integers", "boolean"
"""Kinds of dtypes, in words."""

Function = TypeVar("Function", bound=Callable[..., Any])

Dtypes = Mapping[str, Collection[Any]]
"""Dtypes of a framework by kind."""


@dataclass(frozen=True)
class Axes:
    """Axes of an array, as an annotation writes them.

    Attributes:
        names: name of each axis after the batch axes; "" for any size.
        may_be_one: names of axes that may be 1 instead.
        batch: name of any number of axes before them; "" if these may differ between arguments, None if there are none.
        compared: index from the end and name of each axis that other arguments also have.
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
        return tuple(shape[: len(shape) - len(self.names)])

    def in_words(self) -> str:
        """Return the axes in the words of an error."""
        names = [name or "·" for name in self.names]
        if self.batch is not None:
            names = ["…", *names]
        if len(names) == 1:
            return f"({names[0]},)"
        return f"({', '.join(names)})"


@dataclass(frozen=True)
class ArrayRule:
    """Rule of one argument, from its annotation.

    Attributes:
        array_type: type of the array.
        kind: kind of its dtype.
        dtypes: dtypes of this kind.
        alternatives: axes, one of which it must have.
        accepts_others: whether it may also be something that is not an array, which is checked by hand.
    """

    array_type: type
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
        if not isinstance(x, self.array_type):
            if self.accepts_others:
                return
            raise WrongType(name, f"be a {self.array_type.__name__}", type(x).__name__)
        shape = x.shape
        axes = self._axes_of(shape, first_with_axis)
        if axes is None:
            in_words = " or ".join(axes.in_words() for axes in self.alternatives)
            raise Refusal(name, f"have axes {in_words}", {f"{name}.shape": tuple(shape)})
        if x.dtype not in self.dtypes:
            raise WrongType(
                name, f"be {self.kind}", {f"{name}.dtype": x.dtype}, hint=OF_NUMBERS if name == "mask" else ""
            )
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


def checking(dtypes: Dtypes) -> Callable[[Function], Function]:
    """Return the decorator `checked` for the arrays of a framework.

    Args:
        dtypes: dtypes of the framework by kind.
    """

    def checked(function: Function) -> Function:
        """Check the arguments of a public function as its annotations say."""
        parameters = inspect.signature(function, eval_str=True).parameters
        rules = _rules_of(parameters, dtypes)
        order = tuple(parameters)

        @wraps(function)
        def check_and_call(*arguments: Any, **keywords: Any) -> Any:
            first_with_axis: dict[str, tuple[Any, str, Any]] = {}
            for name, x in zip(order, arguments, strict=False):
                if x is not None and name in rules:
                    rules[name].check(name, x, first_with_axis)
            for name, x in keywords.items():
                if name not in parameters:
                    raise unknown_argument(name, [known for known in parameters if known != "self"])
                if x is not None and name in rules:
                    rules[name].check(name, x, first_with_axis)
            return function(*arguments, **keywords)

        check_and_call.is_checked = True  # pyright: ignore[reportFunctionMemberAccess]
        return check_and_call  # pyright: ignore[reportReturnType]

    return checked


def _rules_of(parameters: Mapping[str, inspect.Parameter], dtypes: Dtypes) -> dict[str, ArrayRule]:
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
        array = arrays_of[name][0]
        kind = _kind_of(array.dtypes)
        options = get_args(parameters[name].annotation)
        accepts_others = any(option not in arrays_of[name] and option is not type(None) for option in options)
        compared = tuple(axes.comparing(shared_names) for axes in alternatives)
        rules[name] = ArrayRule(array.array_type, kind, frozenset(dtypes[kind]), compared, accepts_others)
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
