"""The attention layers of a file, read one at a time."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.conversion.layouts import Layout, Tensor
from parity.conversion.layouts.detection import DoesNotFit, find_form, stack_size
from parity.conversion.layouts.views import lay_out, read_out
from parity.conversion.metadata import KnownHeads, known_heads, source_layout, source_prefix
from parity.conversion.not_carried import NotCarriedWarning
from parity.conversion.prefixes import either, fitting_prefixes, join
from parity.core.weights import Weights, is_finite, is_floating, weight_shapes
from parity.files import TensorFile, open_tensors

ENTRY = re.compile(r"(.*)\[(\d+)\]", re.DOTALL)
"""The prefix of one layer of a stack, such as `layers.self_attn[3]`."""


@contextmanager
def open_layers(
    path: str | os.PathLike[str], layout: str | None = None, *, prefix: str | None = None, **heads: Any
) -> Iterator[list[Layer]]:
    """The attention layers of a file, in the order of their numbers, to be read one at a time while it is open.

    Args:
        path, layout, heads: as `load` takes them.
        prefix: likewise, but `{i}` may stand for numbers, and a stack is all its layers.

    Raises:
        As `load`.
    """
    with open_tensors(path) as file:
        prefix = source_prefix(file, prefix)
        layers = layers_under(
            TensorCache(file), prefix, source_layout(file, layout, path), known_heads(file, heads), path
        )
        yield sorted(layers, key=lambda layer: layer.place)


@dataclass(frozen=True)
class Layer:
    """One attention layer in an open file.

    Attributes:
        file: the file.
        prefix: what the names of its tensors begin with.
        numbers: those in the prefix that `{i}` stood for.
        index: of the layer in a stack, if it is in one.
        layout: that it is in.
        spec: the layer.
        heads_from: the file that its heads come from, if it was neither the caller nor the file itself.
        sources: the full names of its tensors, and those after the prefix.
    """

    file: TensorCache
    prefix: str
    numbers: tuple[str, ...]
    index: int | None
    layout: Layout
    spec: AttentionSpec
    heads_from: str
    sources: dict[str, str]

    @property
    def label(self) -> str:
        """Its prefix, and its index if it is in a stack: what `load` takes."""
        return self.prefix if self.index is None else f"{self.prefix}[{self.index}]"

    @property
    def place(self) -> list[int]:
        """Its numbers, and its index if it is in a stack: what layers of two files have in common."""
        return [int(number) for number in self.numbers] + ([] if self.index is None else [self.index])

    @property
    def dtype(self) -> np.dtype:
        """That of its tensors."""
        return self.file.infos[next(iter(self.sources))].dtype

    def load(self) -> tuple[Weights, AttentionSpec]:
        """Its canonical weights, and its specification."""
        return {name: np.array(self.read(name), order="C") for name in weight_shapes(self.spec)}, self.spec

    @cached_property
    def form(self) -> tuple[Tensor, ...]:
        """The form of the layout that it is in."""
        return find_form(self.sources.values(), self.layout)

    def read(self, name: str) -> np.ndarray:
        """A canonical weight."""
        return read_out(name, self._tensor, self.form, self.spec, self.layout)

    def write(self, name: str, target: Layout) -> np.ndarray:
        """A tensor of another layout."""
        return lay_out(name, self.read, self.spec, target)

    def _tensor(self, name: str) -> np.ndarray:
        return self.file.read_finite(join(self.prefix, name), self.index)


class TensorCache:
    """Tensors of a file, the last one of which is at hand: q, k and v are read from a packed one in turn."""

    def __init__(self, file: TensorFile) -> None:
        self.infos = file.infos
        self._file = file
        self._held: dict[tuple[str, int | None], np.ndarray] = {}

    def read(self, name: str) -> np.ndarray:
        """A tensor, which is not kept."""
        self._held.clear()  # memory shall not hold two of them
        return self._file.read(name)

    def read_finite(self, name: str, index: int | None = None) -> np.ndarray:
        """A tensor, or one entry of a stacked one, without NaN and infinities."""
        if index is None or name in self._file.places:
            return self._hold((name, index), 1)
        # It can only be read whole: then q, k and v are, once, for all layers that they are packed for.
        return self._hold((name, None), 3)[index]

    def _hold(self, key: tuple[str, int | None], most: int) -> np.ndarray:
        if key not in self._held:
            while len(self._held) >= most:
                del self._held[next(iter(self._held))]
            name, index = key
            tensor = self._file.read(name) if index is None else self._file.read_entry(name, index)
            if not is_finite(tensor):
                raise ValueError(f"{name} must be finite, got NaN or infinities")
            self._held[key] = tensor
        return self._held[key]


def layers_under(
    file: TensorCache, prefix: str, layout: Layout, heads: KnownHeads, path: str | os.PathLike[str]
) -> list[Layer]:
    """The attention layers whose names begin with a prefix.

    Raises:
        ValueError: if there is none, or tensors there do not fit the layout.

    Warns:
        NotCarriedWarning: as `load`.
    """
    entry = ENTRY.fullmatch(prefix)
    begin = entry[1] if entry else prefix
    pattern = "".join(r"(\d+)" if part == "{i}" else re.escape(part) for part in re.split(r"(\{i\})", begin))
    expression = re.compile(rf"({pattern})\.(.+)" if begin else r"()(.+)")
    found: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {}
    for name in file.infos:
        match = expression.fullmatch(name)
        if match and not layout.ignores(match[match.lastindex or 0]):
            numbers = match.groups()[1:-1]
            found.setdefault(match[1], (numbers, {}))[1][name] = match.groups()[-1]
    if not found:
        raise ValueError(_no_layer(file, prefix, layout, path))
    layers = []
    for concrete, (numbers, sources) in found.items():
        infos = {short: file.infos[name] for name, short in sources.items()}
        shapes = {short: info.shape for short, info in infos.items()}
        try:
            size = stack_size(shapes, layout)
            if size is not None:
                shapes = {name: shape[1:] for name, shape in shapes.items()}
            spec, heads_from = heads.find_spec(shapes, layout)
        except DoesNotFit as error:
            if not concrete and any(fitting_prefixes({name: info.shape for name, info in file.infos.items()}, layout)):
                raise DoesNotFit(_no_layer(file, prefix, layout, path)) from None
            raise DoesNotFit(f"{concrete or path}: {error}") from None
        except ValueError as error:
            raise type(error)(f"{concrete or path}: {error}") from None
        dtypes = sorted({info.dtype.name for info in infos.values()})
        if len(dtypes) > 1 or not is_floating(next(iter(infos.values())).dtype):
            raise ValueError(f"{concrete or path} must have one floating-point dtype, got {dtypes}")
        indices = [None] if size is None else range(size)
        if entry:
            if size is None or int(entry[2]) >= size:
                words = "no stack" if size is None else f"a stack of {size}"
                raise ValueError(f"prefix must be that of a layer in {path}, got prefix={prefix!r} of {words}")
            indices = [int(entry[2])]
        layers += [Layer(file, concrete, numbers, i, layout, spec, heads_from, sources) for i in indices]
    if heads.not_carried:
        warnings.warn(
            f"{heads.told_by} says {', '.join(heads.not_carried)}, which is not read into a specification: "
            "RoPE is left out; pass rope=Rope(…) to parity.load, or --rope-theta for plain RoPE",
            NotCarriedWarning,
            stacklevel=3,
        )
    return layers


def _no_layer(file: TensorCache, prefix: str, layout: Layout, path: str | os.PathLike[str]) -> str:
    """That there is no layer of a prefix, and the prefixes that there are layers of."""
    fitting = fitting_prefixes({name: info.shape for name, info in file.infos.items()}, layout)
    if fitting:
        hint = f"for {layout.name} {either([f'prefix={each!r}' for each in fitting])} fits"
    else:
        hint = f"none in it fits {layout.name}; `mha-parity inspect` lists what fits"
    return f"prefix must be that of a layer in {path}, got prefix={prefix!r}; {hint}"
