"""Write code that builds the weights of a layer from the tensors of its checkpoint, by name."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mha_spec import InputError
from parity.explain.writing.quoting import TENSORS, string_literal
from parity.explain.writing.specialize import WIDTH
from parity.port.conversion.layers import FileLayer

ARRAYS = {"torch": "Tensor", "jax": "np.ndarray", "ttnn": "np.ndarray"}
"""Arrays that the loader of each framework accepts."""


class Loader(NamedTuple):
    """The source of a function that builds the weights of a layer from the tensors of its
    checkpoint.

    Attributes:
        source: the source.
        numbered: the same source without text of the checkpoint: numbers stand for the names of
            tensors.
        names: the names of tensors, by number.
    """

    source: str
    numbered: str
    names: Sequence[str]

    @property
    def used(self) -> set[str]:
        """Names of Python that the function refers to, such as modules to import."""
        return {
            node.id for node in ast.walk(ast.parse(self.numbered)) if isinstance(node, ast.Name)
        }


def loader_of(layer: FileLayer, framework: str) -> Loader:
    """Return the function that builds the weights of a layer from the tensors of its checkpoint.

    Raises:
        ValueError: if the tensors are quantized.
    """
    if layer.quantized:
        raise InputError(
            "the layer",
            "hold floating-point tensors to be loaded by plain code",
            str(layer.quantized),
        )
    names = list(dict.fromkeys(layer.sources.values()))
    numbers = {name: str(number) for number, name in enumerate(names)}
    source = _function(_expressions(layer, framework, string_literal), framework)
    numbered = _function(_expressions(layer, framework, numbers.__getitem__), framework)
    return Loader(source, numbered, names)


def _expressions(layer: FileLayer, framework: str, key_of: Callable[[str], str]) -> dict[str, str]:
    """Return an expression for each canonical weight; `key_of` writes the key of a tensor."""

    def traced_tensor(name: str) -> _Traced:
        source = layer.sources[name]
        text = f"{TENSORS}[{key_of(source)}]"
        tensor = _traced(text, layer.file.infos[source].shape, framework)
        if layer.index is None:
            return tensor
        return tensor[(slice(None),) * layer.axis + (layer.index,)]

    expressions = {}
    for name in layer.placement.weights:
        weight = layer.placement.read_out(name, traced_tensor)
        if isinstance(weight, _Traced):
            expressions[name] = weight.text
    return expressions


def _function(entries: Mapping[str, str], framework: str) -> str:
    """Return the source of the function, given an expression for each canonical weight."""
    array = ARRAYS[framework]
    if framework == "jax":
        lines = [
            f"def params_from({TENSORS}: Mapping[str, {array}]) -> Params:",
            '    """Return the parameters of `attention` from the tensors of a checkpoint."""',
            "    return {",
            *_nested(entries),
            "    }",
        ]
    else:
        result = "weights"
        if framework == "torch":
            result = "state dict"
        lines = [
            f"def weights_from({TENSORS}: Mapping[str, {array}]) -> dict[str, {array}]:",
            f'    """Return the {result} of `Attention` from the tensors of a checkpoint."""',
            "    return {",
            *_entries(entries, 8),
            "    }",
        ]
    return "\n".join(lines) + "\n"


def _nested(entries: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a nested mapping, whose kernels are (in, out)."""
    parts: dict[str, dict[str, str]] = {}
    for name, text in entries.items():
        part, _, leaf = name.partition(".")
        if part.endswith("_proj") and leaf == "weight":
            leaf = "kernel"
            text = _transposed(text)
        parts.setdefault(part, {})[leaf] = text
    for part, leaves in parts.items():
        if "" in leaves:
            # A weight of its own, such as the sinks.
            yield from _entries({part: leaves[""]}, 8)
            continue
        yield f"        {string_literal(part)}: {{"
        yield from _entries(leaves, 12)
        yield "        },"


def _transposed(text: str) -> str:
    """Return the expression of the transpose of a matrix."""
    if text.endswith(".T"):
        return text.removesuffix(".T")
    return f"{text}.T"


def _entries(entries: Mapping[str, str], indent: int) -> Iterator[str]:
    """Yield the lines of a mapping's entries, which need a second line if they are long."""
    spaces = " " * indent
    for name, text in entries.items():
        key = string_literal(name)
        line = f"{spaces}{key}: {text},"
        if len(line) <= WIDTH:
            yield line
        else:
            yield f"{spaces}{key}: ("
            yield f"{spaces}    {text}"
            yield f"{spaces}),"


# ---- Expressions ---------------------------------------------------------------------------------


class _Traced(np.ndarray):
    """An array that records the expression that makes it; its elements are meaningless."""

    text: str
    framework: str
    base_array: _Traced | None = None  # the array that this one reshapes

    def _made(self, array: Any, text: str) -> _Traced:
        return _traced(text, np.shape(array), self.framework)

    @property
    def _plain(self) -> np.ndarray:
        return np.asarray(super().view(np.ndarray))

    def view(self, *_: Any, **__: Any) -> Any:
        """Return the array unchanged: a view's dtype does not affect the expression."""
        return self

    def reshape(self, *shape: Any, **_: Any) -> _Traced:
        result = self._plain.reshape(*shape)
        # The second one of two reshapes in a row suffices.
        base = self
        if self.base_array is not None:
            base = self.base_array
        if result.shape == base.shape:
            return base
        reshaped = self._made(result, f"{base.text}.reshape({_numbers(result.shape)})")
        reshaped.base_array = base
        return reshaped

    def transpose(self, *axes: Any) -> _Traced:
        order = axes
        if len(axes) == 1:
            order = axes[0]
        if tuple(order) == tuple(range(self.ndim)):
            return self
        if self.ndim == 2:
            text = f"{self.text}.T"
        elif self.framework == "torch":
            text = f"{self.text}.permute({_numbers(order)})"
        else:
            text = f"{self.text}.transpose({_numbers(order)})"
        return self._made(self._plain.transpose(order), text)

    def swapaxes(self, first: Any, second: Any, /) -> Any:
        return self._made(
            self._plain.swapaxes(first, second), f"{self.text}.swapaxes({first}, {second})"
        )

    def __getitem__(self, key: Any) -> _Traced:
        keys = key
        if not isinstance(key, tuple):
            keys = (key,)
        return self._made(self._plain[key], f"{self.text}[{', '.join(map(_index, keys))}]")

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        if function is np.count_nonzero:  # the padding of heads is not checked
            return 0
        if function is not np.stack:
            return NotImplemented
        module = "np"
        if self.framework == "torch":
            module = "torch"
        arrays = args[0]
        texts = ", ".join(array.text for array in arrays)
        stacked = np.stack([array._plain for array in arrays])
        return self._made(stacked, f"{module}.stack([{texts}])")


def _traced(text: str, shape: tuple[int, ...], framework: str) -> _Traced:
    array = np.broadcast_to(np.uint8(0), shape).view(_Traced)
    array.text, array.framework = text, framework
    return array


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _index(key: Any) -> str:
    """Return how Python writes an index, or a slice of step 1."""
    if not isinstance(key, slice):
        return str(key)
    start = ""
    if key.start not in (None, 0):
        start = str(key.start)
    stop = ""
    if key.stop is not None:
        stop = str(key.stop)
    return f"{start}:{stop}"
