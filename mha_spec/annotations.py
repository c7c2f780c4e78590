"""Annotations of arrays, as checks of the arguments of public functions.

    @checked
    def attention_context(
        attn_weights: Float[Array, "B N T S"], value: Float[Array, "B K S Hv"]
    ) -> Float[Array, "B N T Hv"]: ...

raises an error for anything but two floating-point arrays of four axes whose B and S are equal. A
name stands for one size in all arguments of a call. "#B" may also be 1, "*B" are any number of
axes, "..." and "*#scores" are any axes, and a number, product or sum of sizes is any size.
Functions check by hand what is beyond annotations: sizes against the specification, lengths, and
dtypes that must agree.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, Protocol, TypeVar, get_args

from mha_spec.aliases import unknown_argument
from mha_spec.errors import InputError, InputTypeError
from mha_spec.hints import OF_NUMBERS
from mha_spec.rules import as_boolean

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
        batch: name of any number of axes before them, with its "*"; "" if these may differ between
            arguments, None if there are none.
        compared: index from the end and name of each axis that other arguments also have.
        compares_batch: whether other arguments also have the batch axes.
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
            batch = ""
            if words[0].removeprefix("*").isidentifier():
                batch = words[0]
            words = words[1:]
        names = []
        for word in words:
            name = word.removeprefix("#")
            names.append(name if name.isidentifier() else "")
        may_be_one = frozenset(word.removeprefix("#") for word in words if word.startswith("#"))
        return cls(tuple(names), may_be_one, batch)

    def comparing(self, shared_names: Collection[str]) -> Axes:
        """Return these axes, of which some are compared with the axes of other arguments."""
        compared = []
        for index, name in enumerate(self.names):
            if name in shared_names:
                compared.append((index - len(self.names), name))
        return replace(self, compared=tuple(compared), compares_batch=self.batch in shared_names)

    def in_words(self) -> str:
        """Return the axes in the words of an error."""
        names = [name or "·" for name in self.names]
        if self.batch is not None:
            names = ["…", *names]
        if len(names) == 1:
            return f"({names[0]},)"
        return f"({', '.join(names)})"


class Compared(NamedTuple):
    """The first argument of a call with an axis, or with batch axes.

    Attributes:
        name: name of the argument.
        shape: its shape.
        size: size of the axis; or number of batch axes.
    """

    name: str
    shape: Any
    size: Any


@dataclass(frozen=True)
class ArrayRule:
    """Rule of one argument, from its annotation.

    Attributes:
        array_types: types of the array.
        other_types: types of other accepted arguments, which are checked by hand.
        kind: kind of its dtype.
        dtypes: dtypes of this kind, or their names.
        alternatives: axes, one of which it must have.
        accepts_others: whether it may also be something of no such type, which is checked by hand.
        accepts_none: whether it may also be None.
    """

    array_types: tuple[type, ...]
    other_types: tuple[type, ...]
    kind: str
    dtypes: frozenset[Any]
    alternatives: tuple[Axes, ...]
    accepts_others: bool
    accepts_none: bool

    def check(self, name: str, x: Any, first: dict[str, Compared]) -> None:
        """Reject an argument that breaks the rule, or whose axes differ from the axes of earlier
        arguments.

        Args:
            name: name of the argument.
            x: the argument.
            first: the first argument with each compared axis; gains this argument.
        """
        if not isinstance(x, self.array_types):
            is_accepted = self.accepts_none if x is None else self.accepts_others
            if is_accepted or isinstance(x, self.other_types):
                return
            names = [_type_name(accepted) for accepted in self.array_types + self.other_types]
            raise InputTypeError(name, f"have the type {' or '.join(names)}", _type_name(type(x)))
        shape = x.shape
        axes = self._axes_of(len(shape), first)
        if axes is None:
            in_words = " or ".join(axes.in_words() for axes in self.alternatives)
            raise InputError(name, f"have axes {in_words}", {f"{name}.shape": tuple(shape)})
        # A dtype of another framework's arrays is known by its name.
        if x.dtype not in self.dtypes and getattr(x.dtype, "name", None) not in self.dtypes:
            hint = OF_NUMBERS if name == "mask" else ""
            raise InputTypeError(name, f"be {self.kind}", {f"{name}.dtype": x.dtype}, hint=hint)
        if axes.batch is not None and axes.compares_batch:
            num_batch_axes = len(shape) - len(axes.names)
            if axes.batch in first:
                _check_batch(name, shape, num_batch_axes, first[axes.batch])
            else:
                first[axes.batch] = Compared(name, shape, num_batch_axes)
        for index, axis in axes.compared:
            size = shape[index]
            if size == 1 and axis in axes.may_be_one:
                continue
            if axis not in first:
                first[axis] = Compared(name, shape, size)
            elif size != first[axis].size:
                raise _size_error(name, shape, axis, first[axis])

    def _axes_of(self, rank: int, first: Mapping[str, Compared]) -> Axes | None:
        """Return the alternative of this rank, if possible with as many batch axes as compared
        arguments.
        """
        alternative = None
        for axes in self.alternatives:
            num_batch_axes = rank - len(axes.names)
            if num_batch_axes < 0 or (num_batch_axes > 0 and axes.batch is None):
                continue
            compared = None if axes.batch is None else first.get(axes.batch)
            if compared is None or compared.size == num_batch_axes:
                return axes
            alternative = axes
        return alternative


@dataclass(frozen=True)
class FlagRule:
    """Rule of an argument that is True or False."""

    accepts_none: bool

    def check(self, name: str, x: Any, _: dict[str, Compared]) -> None:
        """Reject anything else."""
        if x is not True and x is not False and not (x is None and self.accepts_none):
            as_boolean(name, x)


def _type_name(kind: type) -> str:
    """Return the name of a type with that of its package: several have a `Tensor`."""
    package = kind.__module__.partition(".")[0]
    if package == "builtins":
        return kind.__name__
    return f"{package}.{kind.__name__}"


def _check_batch(name: str, shape: Any, num_batch_axes: int, other: Compared) -> None:
    """Reject an array with other batch axes than an earlier argument."""
    if num_batch_axes != other.size:
        raise _size_error(name, shape, "batch axes", other)
    # One by one: torch.compile cannot compare tuples of symbolic sizes.
    for index in range(num_batch_axes):
        if shape[index] != other.shape[index]:
            raise _size_error(name, shape, "batch axes", other)


def _size_error(name: str, shape: Any, axis: str, other: Compared) -> InputError:
    """Return the error of an argument whose axis differs in size from the axis of an earlier
    one.
    """
    shapes = {f"{name}.shape": tuple(shape), f"{other.name}.shape": tuple(other.shape)}
    return InputError(name, f"have the {axis} of {other.name}", shapes)


class Checked(Protocol):
    """Decorator of public functions: their annotations are checks of their arguments."""

    def __call__(self, function: Function, by_hand: Callable[..., None] | None = None) -> Function:
        """Return the function, checked.

        Args:
            function: a public function.
            by_hand: checks that annotations cannot express, with the same parameters. The package
                calls the function itself, whose arguments are then checked already.
        """
        ...


def checking(dtypes: Dtypes, array_types: Mapping[str, type] | None = None) -> Checked:
    """Return the decorator `checked` for the arrays of a framework.

    Args:
        dtypes: dtypes of the framework by kind.
        array_types: types of arrays by name, if jaxtyping must not see them: its caches keep types
            until the interpreter ends, which some frameworks report as a leak. Annotations with
            these names must be strings.
    """
    array_types = {} if array_types is None else array_types
    stand_ins = {name: type(name, (), {}) for name in array_types}

    def checked(function: Function, by_hand: Callable[..., None] | None = None) -> Function:
        """Check the arguments of a public function as its annotations say, then by hand."""
        parameters = inspect.signature(function, locals=stand_ins, eval_str=True).parameters
        rules = _rules_of(parameters, dtypes, array_types)
        order = tuple(parameters)

        @wraps(function)
        def check_and_call(*arguments: Any, **keywords: Any) -> Any:
            for name in keywords:
                if name not in parameters:
                    raise unknown_argument(name, [known for known in parameters if known != "self"])
            first: dict[str, Compared] = {}
            # A call with too many arguments raises its own error.
            for name, x in zip(order, arguments, strict=False):
                if name in rules:
                    rules[name].check(name, x, first)
            if keywords:
                # In the order of the parameters, not of the call: later arrays are compared with
                # the first one.
                for name in rules:
                    if name in keywords:
                        rules[name].check(name, keywords[name], first)
            if by_hand is not None:
                by_hand(*arguments, **keywords)
            return function(*arguments, **keywords)

        # Pickle looks for a function in its module, and the package has the checked one.
        check_and_call.__module__ = function.__module__.partition(".")[0]
        vars(check_and_call)["is_checked"] = True  # for tests
        return check_and_call  # pyright: ignore[reportReturnType]

    return checked


def _rules_of(
    parameters: Mapping[str, inspect.Parameter], dtypes: Dtypes, array_types: Mapping[str, type]
) -> dict[str, ArrayRule | FlagRule]:
    """Return the rule of each parameter whose annotation is of arrays or of a flag, in order."""
    arrays_of = {name: _arrays_in(parameter.annotation) for name, parameter in parameters.items()}
    axes_of = {
        name: [Axes.of(array.dim_str) for array in arrays]
        for name, arrays in arrays_of.items()
        if arrays
    }
    num_arguments = Counter[str]()
    for alternatives in axes_of.values():
        num_arguments.update({name for axes in alternatives for name in axes.names if name})
        num_arguments.update({axes.batch for axes in alternatives if axes.batch})
    shared_names = [name for name, number in num_arguments.items() if number > 1]
    rules: dict[str, ArrayRule | FlagRule] = {}
    for name, parameter in parameters.items():
        options = get_args(parameter.annotation) or (parameter.annotation,)
        accepts_none = type(None) in options
        if bool in options:
            rules[name] = FlagRule(accepts_none)
        if name not in axes_of:
            continue
        alternatives = axes_of[name]
        arrays = arrays_of[name]
        # All arrays of an annotation have dtypes of one kind.
        kind = _kind_of(arrays[0].dtypes)
        # The types of arrays, instead of their stand-ins: see `checking`.
        types = dict.fromkeys(
            array_types.get(array.array_type.__name__, array.array_type) for array in arrays
        )
        other_options = [
            option for option in options if option not in arrays and option is not type(None)
        ]
        other_types = tuple(option for option in other_options if isinstance(option, type))
        accepts_others = len(other_types) < len(other_options)
        compared = tuple(dict.fromkeys(axes.comparing(shared_names) for axes in alternatives))
        rules[name] = ArrayRule(
            array_types=tuple(types),
            other_types=other_types,
            kind=kind,
            dtypes=frozenset(dtypes[kind]),
            alternatives=compared,
            accepts_others=accepts_others,
            accepts_none=accepts_none,
        )
    return rules


def _arrays_in(annotation: Any) -> list[Any]:
    """Return the annotations of arrays in one that may be a union."""
    options = get_args(annotation) or (annotation,)
    return [option for option in options if isinstance(getattr(option, "dim_str", None), str)]


def _kind_of(dtypes: Sequence[str]) -> str:
    """Return the kind of the dtypes that an annotation such as `Float[…]` lists."""
    if "float32" in dtypes:
        return FLOATING
    if "bool" in dtypes:
        return BOOLEAN
    return INTEGERS
