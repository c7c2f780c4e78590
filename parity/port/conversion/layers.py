"""Read the attention layers of a file one at a time."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Unpack

import numpy as np

from mha_spec import AttentionSpec, InputError
from parity.measure.core.weights import Weights, is_finite, is_floating
from parity.measure.files import FileTensor, TensorFile
from parity.measure.text import some_of
from parity.port.conversion.hints import CALLER, LayerHints, LayerKeywords, is_of_rope
from parity.port.conversion.layouts import Layout
from parity.port.conversion.layouts.detection import (
    LayoutMismatchError,
    find_placement,
    find_spec,
    shorten,
    stack_size,
)
from parity.port.conversion.layouts.layout import unused_in
from parity.port.conversion.layouts.placement import Placement
from parity.port.conversion.metadata import FileHints, file_hints, sources
from parity.port.conversion.not_carried import IgnoredSettingsWarning
from parity.port.conversion.prefixes import (
    ENTRY,
    Names,
    concrete_prefix,
    fitting_prefixes,
    numbered,
)
from parity.port.conversion.ranks import open_checkpoint
from parity.port.conversion.sharing import name_in_file
from parity.port.models.specs import ModelLayer, sections_named


@contextmanager
def open_layers(
    path: str | os.PathLike[str],
    layout: str | None = None,
    *,
    prefix: str | None = None,
    **keywords: Unpack[LayerKeywords],
) -> Iterator[list[FileLayer]]:
    """Open the attention layers of a file, in numerical order, to read them one at a time.

    Args:
        path, layout, keywords: as in `load`.
        prefix: as in `load`, but `{i}` may stand for numbers, and the prefix of a stack means all
            its layers.

    Raises:
        As in `load`.

    Warns:
        IgnoredSettingsWarning: as in `load`, or if the configuration's layers differ from those of
            the file.
    """
    with open_model(path, layout, prefix=prefix, **keywords) as found:
        if found.missing:
            words = (
                f"not in {path}, although its config.json describes them: {some_of(found.missing)}"
            )
            warnings.warn(words, IgnoredSettingsWarning, stacklevel=3)
        if found.others:
            words = (
                f"not read, because the config.json of {path} does not describe them: "
                f"{some_of(found.others)}"
            )
            warnings.warn(words, IgnoredSettingsWarning, stacklevel=3)
        yield found.layers


class OpenLayers(NamedTuple):
    """The attention layers of an open file.

    Attributes:
        layers: the layers, in numerical order.
        missing: paths of layers that the configuration or the file's metadata requires.
        others: prefixes of layers that the configuration does not describe.
        rest: names of the tensors that belong to no layer; None if only some layers were requested.
    """

    layers: list[FileLayer]
    missing: list[str]
    others: list[str]
    rest: list[str] | None


@contextmanager
def open_model(
    path: str | os.PathLike[str],
    layout: str | None = None,
    *,
    prefix: str | None = None,
    **keywords: Unpack[LayerKeywords],
) -> Iterator[OpenLayers]:
    """Open the attention layers of a file as `open_layers` does, and list missing and undescribed
    layers.
    """
    with open_checkpoint(path) as file:
        known, cache = file_hints(file, LayerHints.by(CALLER, **keywords)), TensorCache(file)
        layers = [
            layer
            for each, of_layout in sources(file, known, prefix, layout, "layout")
            for layer in sorted(
                layers_under(cache, each, of_layout, known), key=lambda layer: layer.place
            )
        ]
        missing = known.missing([layer.label for layer in layers], file)
        if prefix is None:
            of_layers = {name for layer in layers for name in layer.sources.values()}
            rest = [name for name in file.infos if name not in of_layers]
            yield OpenLayers(layers, missing, _others(file, known, layers), rest)
            return
        # Without {i} one layer is requested, so others are not missing.
        of_prefix = [
            path
            for path in missing
            if f".{prefix}".endswith(f".{numbered(path)}") and "{i}" in prefix
        ]
        yield OpenLayers(layers, of_prefix, [], None)


def _others(file: TensorFile, known: FileHints, layers: list[FileLayer]) -> list[str]:
    """Return the prefixes of layers that the configuration of a model does not describe."""
    if not any(layer.model is not None for layer in layers):
        return []
    own = {name for layer in layers for name in layer.sources.values()}
    rest = {name: info.shape for name, info in file.infos.items() if name not in own}
    unread = set(known.model.sections) - set(known.model.parts)  # parts of unknown families
    return [
        each
        for each in fitting_prefixes(rest, layers[0].layout)
        if not sections_named(each, unread)
    ]


@dataclass(frozen=True)
class FileLayer:
    """One attention layer in an open file.

    Attributes:
        file: the file.
        prefix: prefix of its tensor names.
        numbers: numbers in the prefix that `{i}` stands for.
        index: its index in a stack; None if it is not stacked.
        axis: axis of the stack.
        placement: its place in the tensors of its layout.
        spec: its specification.
        hints: merged hints about it.
        sources: full names of its tensors, by name after the prefix.
        known: hints about the layers of its file.
        shared: weights that it shares with other layers, by canonical name, each with its holder
            (see `sharing`).
        written: its specification in another layout, if that differs.
    """

    file: TensorCache
    prefix: str
    numbers: tuple[str, ...]
    index: int | None
    axis: int
    placement: Placement
    spec: AttentionSpec
    hints: LayerHints
    sources: dict[str, str]
    known: FileHints
    shared: Mapping[str, str] = field(default_factory=dict)
    written: AttentionSpec | None = None

    @property
    def layout(self) -> Layout:
        """Return its layout."""
        return self.placement.layout

    @cached_property
    def model(self) -> ModelLayer | None:
        """Return its layer in the model, by the configuration next to the file."""
        return self.known.model.layer_at(self.label)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Return the features that its file lost: see
        `parity.port.conversion.layouts.layout.DROPPABLE`.
        """
        return self.known.dropped

    @property
    def to_spec(self) -> AttentionSpec:
        """Return its specification in the other layout."""
        return self.written or self.spec

    @property
    def is_cross(self) -> bool:
        """Return whether its keys and values come from another sequence."""
        return self.spec.d_kv != self.spec.d_in or (
            self.model is not None and self.model.kind == "cross_attention"
        )

    @property
    def label(self) -> str:
        """Return its prefix, with its index if it is in a stack, as `load` accepts it."""
        return self.prefix if self.index is None else f"{self.prefix}[{self.index}]"

    @property
    def place(self) -> list[int]:
        """Return its numbers and index, which identify the same layer in two files."""
        return [int(number) for number in self.numbers] + (
            [] if self.index is None else [self.index]
        )

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of its tensors."""
        return self.file.infos[next(iter(self.sources.values()))].dtype

    @property
    def quantised(self) -> list[str]:
        """Return the quantization types of its tensors in the file."""
        return sorted(
            {
                self.file.quantised[name]
                for name in self.sources.values()
                if name in self.file.quantised
            }
        )

    def load(self) -> tuple[Weights, AttentionSpec]:
        """Read its canonical weights, and return them with its specification."""
        return {
            name: np.array(self.read(name), order="C") for name in self.placement.weights
        }, self.spec

    def tensors(self) -> dict[str, np.ndarray]:
        """Read its tensors, by name after the prefix."""
        return {name: self._tensor(name) for name in self.sources}

    def read(self, name: str) -> np.ndarray:
        """Read a canonical weight."""
        return self.placement.read_out(name, self._tensor)

    def read_written(self, name: str) -> np.ndarray:
        """Read a canonical weight of the layer in the other layout; missing biases are 0."""
        if name in self.placement.weights:
            return self.read(name)
        return np.zeros(self.to_spec.weight_shapes[name], self.dtype)

    def _tensor(self, name: str) -> np.ndarray:
        return self.file.read_finite(self.sources[name], self.index, self.axis)


class TensorCache:
    """Tensors of a file; the last ones are cached, because q, k and v may be read in turn from a
    packed tensor.
    """

    def __init__(self, file: TensorFile) -> None:
        self.path = file.path
        self.infos = file.infos
        self.quantised = file.quantised
        self._file = file
        self._cached: dict[tuple[str, int | None], np.ndarray] = {}

    @cached_property
    def names(self) -> Names:
        """Return the names of its tensors."""
        return Names(self.infos)

    def tensor(self, name: str) -> FileTensor:
        """Return a tensor that is read later, without caching it."""
        self._cached.clear()  # so that memory holds one of them
        return self._file.tensor(name)

    def read_finite(self, name: str, index: int | None = None, axis: int = 0) -> np.ndarray:
        """Read a tensor, or one entry of a stacked one; reject NaN and infinities."""
        if index is None or (name in self._file.places and axis == 0):
            return self._hold((name, index), 1)
        # A stack can only be read whole. It is cached, so that q, k and v of all its layers need
        # one read.
        return np.ascontiguousarray(np.moveaxis(self._hold((name, None), 3), axis, 0)[index])

    def _hold(self, key: tuple[str, int | None], most: int) -> np.ndarray:
        if key not in self._cached:
            while len(self._cached) >= most:
                del self._cached[next(iter(self._cached))]
            name, index = key
            tensor = self._file.read(name) if index is None else self._file.read_entry(name, index)
            if not is_finite(tensor):
                raise InputError(name, "be finite", "NaN or infinities")
            self._cached[key] = tensor
        return self._cached[key]


QUANTISED = re.compile(
    r"\.(qweight|qzeros|scales|SCB|weight_scale(_inv)?|weight_packed|weight\.(absmax|quant_state.*))$"
)
"""Names of additional tensors next to weights quantized by GPTQ, AWQ, bitsandbytes, FP8 or
compressed-tensors.
"""


def layers_under(
    file: TensorCache, prefix: str, layout: Layout, known: FileHints
) -> list[FileLayer]:
    """Find the attention layers under a prefix.

    Raises:
        ValueError: if there is none, or its tensors do not fit the layout.

    Warns:
        IgnoredSettingsWarning: as in `load`.
    """
    entry = ENTRY.fullmatch(prefix)
    begin = entry[1] if entry else prefix
    found: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {}
    for name in file.names.beginning(begin.partition("{i}")[0]):
        match = concrete_prefix(begin, name)
        if match and not layout.ignores(match[2], known.ignored):
            found.setdefault(match[0], (match[1], {}))[1][match[2]] = name
    if "{i}" in begin:
        found = {
            concrete: held for concrete, held in found.items() if not known.is_other(concrete)
        } or found
    if not found:
        raise _no_layer(InputError, file, prefix, layout)
    layers = []
    for concrete, (numbers, own) in found.items():
        held = _with_shared(file, concrete, own, layout, known)
        try:
            if (told := known.at(concrete).spec) is not None:
                held = {
                    short: name
                    for short, name in held.items()
                    if short not in unused_in(layout, told)
                }
            infos = {short: file.infos[name] for short, name in held.items()}
            entries, axis = _identify(
                {short: info.shape for short, info in infos.items()}, concrete, layout, known
            )
        except InputError as error:
            if isinstance(error, LayoutMismatchError):
                if not concrete and any(
                    fitting_prefixes({name: x.shape for name, x in file.infos.items()}, layout)
                ):
                    raise _no_layer(LayoutMismatchError, file, prefix, layout) from None
                if any(map(QUANTISED.search, held)):
                    error.hint = "; ".join(
                        filter(None, [error.hint, "quantized weights are read only from GGUF"])
                    )
            raise error.within(concrete or str(file.path)) from None
        dtypes = sorted({info.dtype.name for info in infos.values()})
        if len(dtypes) > 1 or not is_floating(next(iter(infos.values())).dtype):
            raise InputError(concrete or file.path, "have one floating-point dtype", str(dtypes))
        if entry:
            size = "no stack" if entries[0][0] is None else f"a stack of {len(entries)}"
            entries = [each for each in entries if each[0] == int(entry[2])]
            if not entries:
                raise InputError(
                    "prefix", f"be that of a layer in {file.path}", f"prefix={prefix!r} of {size}"
                )
        for index, hints, placement in entries:
            if hints.spec is not None:
                label = concrete if index is None else f"{concrete}[{index}]"
                layer = FileLayer(
                    file, concrete, numbers, index, axis, placement, hints.spec, hints, held, known
                )
                layers.append(replace(layer, shared=known.holders_at(label, layout, file.infos)))
    for layer in layers:
        _check_values(layer)
    if unread := {name: value for layer in layers for name, value in layer.hints.unread.items()}:
        warnings.warn(_not_carried(unread, known), IgnoredSettingsWarning, stacklevel=3)
    return layers


def _not_carried(unread: Mapping[str, Any], known: FileHints) -> str:
    """Describe the attention keys that no specification contains, and how the caller can replace
    them.
    """
    origin = known.model.origin or "the metadata"
    words = f"{origin} sets {', '.join(key_in_words(*each) for each in unread.items())}"
    words += ", which no specification expresses"
    if any(map(is_of_rope, unread)):
        words += (
            ": RoPE is left out; pass rope=Rope(…) to parity.load, or --rope-theta for plain RoPE"
        )
    if not all(map(is_of_rope, unread)):
        words += "; parity.load accepts a complete spec=…"
    return words


def key_in_words(name: str, value: Any) -> str:
    """Return a key of a configuration with its value, truncated if long."""
    text = str(value) if isinstance(value, str | int | float) else repr(value)
    return name if value is None else f"{name}={text if len(text) <= 80 else f'{text[:80]}…'}"


def _check_values(layer: FileLayer) -> None:
    """Reject a layer whose value projection is missing or superfluous according to the model's
    configuration.
    """
    if layer.model is None or layer.layout.name != layer.model.layout:
        return
    is_shared = any(tensor.is_shared for tensor in layer.placement.tensors)
    if is_shared != layer.model.keys_are_values:
        rule = (
            "be made as keys are"
            if layer.model.keys_are_values
            else "have a projection of their own"
        )
        raise LayoutMismatchError(
            "values", f"{rule}, by config.json", shorten(layer.sources), where=layer.label
        )


def _with_shared(
    file: TensorCache, prefix: str, own: dict[str, str], layout: Layout, known: FileHints
) -> dict[str, str]:
    """Return the tensors of a layer, with those that it shares with other modules and without
    irrelevant ones.
    """
    layer = known.model.layer_at(prefix)
    irrelevant = () if layer is None else layer.ignored
    held = {short: name for short, name in own.items() if short not in irrelevant}
    for weight, holder in known.holders_at(prefix, layout, file.infos).items():
        short = layout.name_of(weight)
        name = name_in_file(holder, weight, layout, file.infos)
        if short is not None and name is not None and short not in held:
            held[short] = name
    return held


Entry = tuple[int | None, LayerHints, Placement]
"""The index of a layer in its stack or None, its hints including the specification, and its
placement.
"""


def _identify(
    shapes: Mapping[str, tuple[int, ...]], prefix: str, layout: Layout, known: FileHints
) -> tuple[list[Entry], int]:
    """Find the layers under a prefix, and the axis of their stack, if any."""
    hints, wrong = known.at(prefix), None
    if hints.spec is not None:
        try:
            return [(None, hints, find_placement(shapes, hints.spec, layout))], 0
        except LayoutMismatchError as error:
            wrong = error
    stacks: list[tuple[list[Entry], int]] = []
    for axis in range(layout.stack_axis + 1):
        sizes = {shape[axis : axis + 1] for shape in shapes.values()}
        if len(sizes) == 1 and sizes != {()} and known.at(f"{prefix}[0]").spec is not None:
            try:
                stacks.append(
                    (_entries(_without(axis, shapes), sizes.pop()[0], prefix, layout, known), axis)
                )
            except LayoutMismatchError as error:
                wrong = wrong or error
    if len(stacks) > 1:
        raise LayoutMismatchError(
            "the axis of a stack", "be plain", f"shapes that fit on {[axis for _, axis in stacks]}"
        )
    if stacks:
        return stacks[0]
    if wrong is not None:
        raise wrong
    size = stack_size(shapes, layout)
    if size is not None:
        shapes = _without(0, shapes)
    try:
        spec = find_spec(shapes, layout, hints)
    except ValueError:
        hints = known.without_heads_of_model(prefix)
        spec = find_spec(shapes, layout, hints)
    hints, placement = replace(hints, spec=spec), find_placement(shapes, spec, layout)
    return [(index, hints, placement) for index in ([None] if size is None else range(size))], 0


def _without(axis: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one layer of a stack."""
    return {name: (*shape[:axis], *shape[axis + 1 :]) for name, shape in shapes.items()}


def _entries(
    shapes: Mapping[str, tuple[int, ...]], size: int, prefix: str, layout: Layout, known: FileHints
) -> list[Entry]:
    """Find the layers of a stack; reject it if one is unknown or they are not all layers of the
    model.
    """
    if known.model.layer_at(f"{prefix}[{size}]") is not None:
        raise LayoutMismatchError("a stack", "contain all layers of config.json", f"{size} of them")
    entries: list[Entry] = []
    for index in range(size):
        label = f"{prefix}[{index}]"
        hints = known.at(label)
        if hints.spec is None:
            raise LayoutMismatchError(
                "the model", f"have a layer {label}, and its configuration has none"
            )
        entries.append((index, hints, find_placement(shapes, hints.spec, layout)))
    return entries


def _no_layer(kind: type[InputError], file: TensorCache, prefix: str, layout: Layout) -> InputError:
    """Make the error for a prefix without a layer; it lists the prefixes of layers."""
    fitting = fitting_prefixes({name: info.shape for name, info in file.infos.items()}, layout)
    hint = f"fits {layout.name}"
    if not fitting:
        hint = (
            f"none fits {layout.name}; `mha-parity inspect` lists the layouts that fit, and what "
            f"to do if none does"
        )
    remedy = [{"prefix": each} for each in fitting]
    return kind(
        "prefix", f"be that of a layer in {file.path}", prefix=prefix, remedy=remedy, hint=hint
    )
