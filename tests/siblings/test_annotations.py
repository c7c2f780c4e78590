"""Annotations are checks: each public function rejects arrays of the wrong type, rank, kind or size
than it says.

The errors are generated from the annotations. Arguments are checked before a call, so that one
bad argument, or two that do not fit each other, suffice to make one.
"""

import inspect
import pickle
import sys
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest

from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.annotations import Axes

KERNELS = {"plain_sdpa"}
"""Functions whose callers check the arguments."""

SIZES = {"heads": 2, "T": 3, "S": 5, "N": 4, "K": 2, "H": 8, "Hv": 16, "B": 2}
"""Sizes of some axes; others are 7."""


@dataclass(frozen=True)
class ArrayArgument:
    """An argument of a public function that is an array.

    Attributes:
        call: the function.
        function: its name.
        name: name of the argument.
        array: annotation of the array.
        accepts_others: whether it may also be no array, such as a list of lengths.
        is_required: whether it has no default and cannot be None.
    """

    call: Any
    function: str
    name: str
    array: Any
    accepts_others: bool
    is_required: bool

    def __str__(self) -> str:
        return f"{self.function}({self.name})"

    @property
    def words(self) -> list[str]:
        """Axes of the annotation."""
        return self.array.dim_str.split()

    @property
    def has_batch_axes(self) -> bool:
        return bool(self.words) and self.words[0].startswith(("*", "..."))

    @property
    def axes(self) -> list[str]:
        """Names of the axes after the batch axes."""
        return [word.removeprefix("#") for word in self.words[self.has_batch_axes :]]

    @property
    def kind(self) -> type:
        if "float32" in self.array.dtypes:
            return np.float32
        return np.bool_ if "bool" in self.array.dtypes else np.int32

    def of_shape(self, sibling: Any, shape: tuple[int, ...], kind: Any = None) -> Any:
        x = np.ones(shape, self.kind if kind is None else kind)
        return x if self.array.array_type is np.ndarray else sibling.array(x)

    def shape(self, **changed: int) -> tuple[int, ...]:
        sizes = {**SIZES, **changed}
        return tuple(sizes.get(axis, 7) for axis in self.axes)


def public_calls(package):
    """Return public functions, and the calls of public modules, by name."""
    calls = {}
    for name in package.__all__:
        public = getattr(package, name)
        if inspect.isclass(public):
            method = vars(public).get("forward") or vars(public).get("__call__")
            if method is not None:
                calls[name] = method
        elif inspect.isfunction(public) and name not in KERNELS:
            calls[name] = public
    return calls


def array_arguments(package):
    """Return the arguments of public calls whose annotation has one form of an array, for each type
    of one.
    """
    arguments = []
    for function, call in public_calls(package).items():
        for name, parameter in inspect.signature(call, eval_str=True).parameters.items():
            options = get_args(parameter.annotation) or (parameter.annotation,)
            arrays = [option for option in options if hasattr(option, "dim_str")]
            others = [
                option for option in options if option not in arrays and option is not type(None)
            ]
            is_required = parameter.default is parameter.empty and type(None) not in options
            if len({array.dim_str for array in arrays}) == 1:
                for array in arrays:
                    arguments.append(
                        ArrayArgument(call, function, name, array, bool(others), is_required)
                    )
    return arguments


def input_error_of(argument, **values):
    """Return the error of a call with only these arguments."""
    with pytest.raises(InputError) as raised:
        argument.call(**({"self": None} if "." in argument.call.__qualname__ else {}), **values)
    return raised.value


def test_public_calls_are_checked(sibling):
    """Each public function that has arrays among its arguments checks them."""
    calls = {str(argument.function): argument.call for argument in array_arguments(sibling.package)}
    assert len(calls) > 25
    assert [name for name, call in calls.items() if not getattr(call, "is_checked", False)] == []


def test_other_types_raise(sibling):
    """An argument that is not an array of the framework raises an error, unless it may be something
    else. So does None for an argument without a default.
    """
    for argument in array_arguments(sibling.package):
        others = [] if argument.accepts_others else ["text"]
        if argument.is_required:
            others.append(None)
        for other in others:
            error = input_error_of(argument, **{argument.name: other})
            assert (str(argument), error.argument) == (str(argument), argument.name)
            assert isinstance(error, InputTypeError)


def test_wrong_types_have_package_names(sibling):
    """The error of a wrong type names packages: several frameworks have a type `Tensor`."""

    class Tensor:
        pass

    with pytest.raises(InputTypeError) as raised:
        sibling.package.split_heads(Tensor(), 2)
    types = {"mha_torch": "torch.Tensor", "mha_jax": "jax.Array", "mha_tt": "ttnn.Tensor"}
    assert types[sibling.package.__name__] in raised.value.rule
    assert raised.value.got == f"{__name__.partition('.')[0]}.Tensor"


def test_other_ranks_raise(sibling):
    """An array with an axis too few, or too many unless any number of batch axes may be there,
    raises an error.
    """
    for argument in array_arguments(sibling.package):
        ranks = [argument.shape()[1:]] if argument.axes else []
        if not argument.has_batch_axes:
            ranks.append((1, *argument.shape()))
        for shape in ranks:
            error = input_error_of(argument, **{argument.name: argument.of_shape(sibling, shape)})
            assert (str(argument), error.argument) == (str(argument), argument.name)
            assert error.got == {f"{argument.name}.shape": shape}


def test_axes_in_words_are_tuples():
    """Errors show axes as Python shows a shape: one axis has a comma."""
    words = {text: Axes.of(text).in_words() for text in ("N", "B T d_in", "*B T")}
    assert words == {"N": "(N,)", "B T d_in": "(B, T, d_in)", "*B T": "(…, T)"}


def test_other_kinds_raise(sibling):
    """An array of the wrong kind of dtype raises an error: integers for floating point, floats for
    integers and masks.
    """
    for argument in array_arguments(sibling.package):
        wrong_kind = np.int32 if argument.kind is np.float32 else np.float32
        x = argument.of_shape(sibling, argument.shape() or (3, 5), wrong_kind)
        error = input_error_of(argument, **{argument.name: x})
        assert (str(argument), error.argument) == (str(argument), argument.name)
        assert isinstance(error, InputTypeError)
        assert list(error.got) == [f"{argument.name}.dtype"]


def test_different_sizes_of_an_axis_raise(sibling):
    """Two arrays whose sizes of a common axis differ raise an error that shows both shapes."""
    arguments = array_arguments(sibling.package)
    pairs = [
        (first, second, axis)
        for index, first in enumerate(arguments)
        for second in arguments[index + 1 :]
        if first.call is second.call
        for axis in {*first.axes} & {*second.axes}
        if axis.isidentifier()
    ]
    assert len(pairs) > 20
    for first, second, axis in pairs:
        values = {
            first.name: first.of_shape(sibling, first.shape()),
            second.name: second.of_shape(sibling, second.shape(**{axis: 9})),
        }
        error = input_error_of(first, **values)
        assert (str(second), error.argument) == (str(second), second.name)
        assert error.got == {
            f"{second.name}.shape": second.shape(**{axis: 9}),
            f"{first.name}.shape": first.shape(),
        }


def test_flags_must_be_booleans(sibling):
    """An argument that is True or False raises an error for anything else, whatever its truth
    value.
    """
    flags = []
    checked_calls = {
        name: call
        for name, call in public_calls(sibling.package).items()
        if hasattr(call, "is_checked")
    }
    for function, call in checked_calls.items():
        for name, parameter in inspect.signature(call, eval_str=True).parameters.items():
            if bool in (get_args(parameter.annotation) or (parameter.annotation,)):
                argument = ArrayArgument(call, function, name, None, False, False)
                flags.append(str(argument))
                for wrong in (1, "no", np.ones(3)):
                    assert (str(argument), input_error_of(argument, **{name: wrong}).argument) == (
                        str(argument),
                        name,
                    )
    assert {"MultiHeadAttention(is_causal)", "multi_head_attention(training)"} <= {*flags}


def test_keywords_are_checked_in_any_order(sibling):
    """Keywords may come in any order, although the first array decides over the axes of others."""
    layer = sibling.module("MultiHeadAttention", AttentionSpec(64, 2, shared_kv=True))
    x = sibling.array(np.ones((2, 3, 64), np.float32))
    shared = sibling.array(np.ones((2, 2, 5, 32), np.float32))
    expected, _ = layer(x, shared, shared)
    output, _ = layer(value=shared, key=shared, query=x)
    assert np.array_equal(sibling.numpy(output), sibling.numpy(expected))


def test_attention_weights_are_checked_once(sibling, monkeypatch):
    """A call with attention weights checks its bias once: the stages in it are called unchecked."""
    calls, package = [], sibling.package
    check_bias = package.checks.check_bias

    def recorded(*arguments):
        calls.append(arguments)
        check_bias(*arguments)

    for module in (package.checks, package.scores):
        monkeypatch.setattr(module, "check_bias", recorded)
    layer = sibling.module("MultiHeadAttention", AttentionSpec(64, 2))
    x = sibling.array(np.ones((2, 3, 64), np.float32))
    bias = sibling.option(np.ones((3, 3), np.float32))
    layer(x, need_weights=True, bias=bias)
    assert len(calls) == 1
    heads = sibling.array(np.ones((2, 2, 3, 32), np.float32))
    package.attention_scores(heads, heads, bias)
    assert len(calls) == 2  # and by themselves checked


def test_causal_layer_passes_few_modules(sibling):
    """A second causal call of a layer passes few modules and functions: kernels and features that
    cannot apply are not asked.
    """
    # In float32 mha_tt has the plain path, whose stages are functions too.
    most_modules, most_functions = {
        "mha_torch": (11, 34),
        "mha_jax": (12, 41),
        "mha_tt": (16, 64),
    }[sibling.package.__name__]
    layer = sibling.module("MultiHeadSelfAttention", AttentionSpec(64, 2))
    x = sibling.array(np.ones((1, 32, 64), np.float32))
    names = ("mha_spec", sibling.package.__name__)
    functions = set()

    def note(frame, event, _):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.partition(".")[0] in names:
            functions.add((module, frame.f_code.co_qualname))

    for profile in (None, note):
        sys.setprofile(profile)
        layer(x, is_causal=True)
        sys.setprofile(None)
    assert functions
    assert len({module for module, _ in functions}) <= most_modules
    assert len(functions) <= most_functions


def test_public_functions_are_pickled(sibling):
    """Public functions and layers with contained kernels can be pickled, as for processes that are
    started.
    """
    for name, call in public_calls(sibling.package).items():
        if inspect.isfunction(getattr(sibling.package, name)):
            assert pickle.loads(pickle.dumps(call)) is call
    kernel = sibling.package.contained(sibling.package.fused.attend)
    assert type(pickle.loads(pickle.dumps(kernel))) is type(kernel)
