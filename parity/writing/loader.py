"""Write code that builds the weights of a layer from the tensors of its checkpoint, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mha_spec import Refusal
from parity.conversion.layers import FileLayer
from parity.writing.specialize import WIDTH

ARRAYS = {"torch": "Tensor", "jax": "np.ndarray", "ttnn": "np.ndarray"}
"""Arrays that the loader of each framework accepts."""


def loader_of(layer: FileLayer, framework: str) -> str:
    """Return the source of a function that builds the weights of a layer from the tensors of its checkpoint.

    Raises:
        ValueError: if the tensors are quantized.
    """
    if layer.quantised:
        raise Refusal("the layer", "hold floating-point tensors to be loaded by plain code", str(layer.quantised))

    def tensor(name: str) -> _Traced:
        source = layer.sources[name]
        whole = _traced(f"tensors[{_quoted(source)}]", layer.file.infos[source].shape, framework)
        return whole if layer.index is None else whole[(slice(None),) * layer.axis + (layer.index,)]

    read = {name: layer.placement.read_out(name, tensor) for name in layer.placement.weights}
    entries = {name: each.text for name, each in read.items() if isinstance(each, _Traced)}
    return _function(entries, layer.label, framework)


def _function(entries: Mapping[str, str], label: str, framework: str) -> str:
    """Return the source of the function, given an expression for each canonical weight."""
    array = ARRAYS[framework]
    if framework == "jax":
        lines = [
            f"def params_from(tensors: Mapping[str, {array}]) -> Params:",
            f'    """Return the parameters of `attention` from the tensors of a checkpoint, those of {label}."""',
            "    return {",
            *_nested(entries),
            "    }",
        ]
    else:
        what = "state dict" if framework == "torch" else "weights"
        lines = [
            f"def weights_from(tensors: Mapping[str, {array}]) -> dict[str, {array}]:",
            f'    """Return the {what} of `Attention` from the tensors of a checkpoint, those of {label}."""',
            "    return {",
            *_entries({_quoted(name): text for name, text in entries.items()}, 8),
            "    }",
        ]
    return "\n".join(lines) + "\n"


def _nested(entries: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a nested mapping, whose kernels are (in, out)."""
    parts: dict[str, dict[str, str]] = {}
    for name, text in entries.items():
        part, _, leaf = name.partition(".")
        if part.endswith("_proj") and leaf == "weight":
            leaf, text = "kernel", text.removesuffix(".T") if text.endswith(".T") else f"{text}.T"
        parts.setdefault(part, {})[leaf] = text
    for part, held in parts.items():
        if "" in held:
            yield from _entries({_quoted(part): held[""]}, 8)
            continue
        yield f"        {_quoted(part)}: {{"
        yield from _entries({_quoted(leaf): text for leaf, text in held.items()}, 12)
        yield "        },"


def _entries(entries: Mapping[str, str], indent: int) -> Iterator[str]:
    for name, text in entries.items():
        line = f"{' ' * indent}{name}: {text},"
        if len(line) <= WIDTH:
            yield line
        else:
            yield f"{' ' * indent}{name}: ("
            yield f"{' ' * (indent + 4)}{text}"
            yield f"{' ' * indent}),"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# ---- Expressions -----------------------------------------------------------------------------------------------------


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
        made = self._plain.reshape(*shape)
        base = self if self.base_array is None else self.base_array
        if made.shape == base.shape:
            return base
        reshaped = self._made(made, f"{base.text}.reshape({', '.join(map(str, made.shape))})")
        reshaped.base_array = base
        return reshaped

    def transpose(self, *axes: Any) -> _Traced:
        order = axes[0] if len(axes) == 1 else axes
        if tuple(order) == tuple(range(self.ndim)):
            return self
        call = "permute" if self.framework == "torch" else "transpose"
        text = ".T" if self.ndim == 2 else f".{call}({', '.join(map(str, order))})"
        return self._made(self._plain.transpose(order), self.text + text)

    def swapaxes(self, first: Any, second: Any, /) -> Any:
        return self._made(self._plain.swapaxes(first, second), f"{self.text}.swapaxes({first}, {second})")

    def __getitem__(self, key: Any) -> _Traced:
        keys = key if isinstance(key, tuple) else (key,)
        return self._made(self._plain[key], f"{self.text}[{', '.join(map(_index, keys))}]")

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.count_nonzero:  # the padding of heads is not checked
            return 0
        if function is not np.stack:
            return NotImplemented
        module = "torch" if self.framework == "torch" else "np"
        texts = ", ".join(each.text for each in args[0])
        return self._made(np.stack([each._plain for each in args[0]]), f"{module}.stack([{texts}])")


def _traced(text: str, shape: tuple[int, ...], framework: str) -> _Traced:
    array = np.broadcast_to(np.uint8(0), shape).view(_Traced)
    array.text, array.framework = text, framework
    return array


def _index(key: Any) -> str:
    if not isinstance(key, slice):
        return str(key)
    return f"{'' if key.start in (None, 0) else key.start}:{'' if key.stop is None else key.stop}"
