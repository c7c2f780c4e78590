"""Find the attention layers of a file, and read them one at a time."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mha_spec import AttentionSpec, InputError
from parity.measure.core.weights import Weights, is_finite, is_floating
from parity.measure.files import FileTensor, TensorFile
from parity.port.conversion.file_hints import FileHints
from parity.port.conversion.hints import LayerHints, is_of_rope
from parity.port.conversion.ignored_settings import IgnoredSettingsWarning
from parity.port.conversion.layouts import Layout
from parity.port.conversion.layouts.detection import (
    LayoutMismatchError,
    find_placement,
    find_spec,
    shorten,
    stack_sizes,
    without_axis,
)
from parity.port.conversion.layouts.layout import unused_in
from parity.port.conversion.layouts.placement import Placement
from parity.port.conversion.prefixes import (
    ENTRY,
    Names,
    concrete_prefix,
    fitting_prefixes,
    numbered,
)
from parity.port.conversion.sharing import name_in_file
from parity.port.models.specs import ModelLayer

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class FileLayer:
    """One attention layer in an open file.

    Attributes:
        file: the tensors of its file.
        label: its prefix, with its index if it is in a stack, as `load` accepts it.
        prefix: prefix of its tensors.
        numbers: numbers in the prefix, for `{i}`.
        index: its index in the stack under the prefix, or None.
        axis: axis of the stack.
        placement: location of its weights in tensors.
        spec: its specification.
        hints: what was known of it before its tensors were examined.
        sources: full names of its tensors, by name after the prefix.
        file_hints: what is known of the layers of its file.
        shared: weights that it shares with other layers, by canonical name, each with its holder
            (see `sharing`).
        written: its specification in another layout, if that differs.
    """

    file: TensorCache
    label: str
    prefix: str
    numbers: tuple[str, ...]
    index: int | None
    axis: int
    placement: Placement
    spec: AttentionSpec
    hints: LayerHints
    sources: dict[str, str]
    file_hints: FileHints
    shared: Mapping[str, str] = field(default_factory=dict)
    written: AttentionSpec | None = None

    @property
    def layout(self) -> Layout:
        """Return its layout."""
        return self.placement.layout

    @cached_property
    def model(self) -> ModelLayer | None:
        """Return its layer in the model, by the configuration next to the file."""
        return self.file_hints.model.layer_at(self.label)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Return the features that its file lost: see
        `parity.port.conversion.layouts.layout.DROPPABLE`.
        """
        return self.file_hints.dropped

    @property
    def to_spec(self) -> AttentionSpec:
        """Return its specification in the other layout."""
        return self.written or self.spec

    @property
    def is_cross(self) -> bool:
        """Return whether its keys and values come from another sequence."""
        if self.model is not None and self.model.kind == "cross_attention":
            return True
        return self.spec.d_kv != self.spec.d_in

    @property
    def indices(self) -> list[int]:
        """Return its numbers and index, which identify the same layer in two files."""
        indices = [int(number) for number in self.numbers]
        if self.index is not None:
            indices.append(self.index)
        return indices

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of its tensors."""
        return self.file.infos[next(iter(self.sources.values()))].dtype

    @property
    def quantized(self) -> list[str]:
        """Return the quantization types of its tensors in the file."""
        kinds: set[str] = set()
        for name in self.sources.values():
            if name in self.file.quantized:
                kinds.add(self.file.quantized[name])
        return sorted(kinds)

    def load(self) -> tuple[Weights, AttentionSpec]:
        """Read its canonical weights, and return them with its specification."""
        weights: Weights = {}
        for name in self.placement.weights:
            weights[name] = np.array(self.read(name), order="C")
        return weights, self.spec

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


class LayerGroup(NamedTuple):
    """Layers that were found under one prefix.

    Attributes:
        prefix: their prefix, with `{i}` for numbers, or the label of one layer of a stack.
        layers: the layers, in the order of the file.
    """

    prefix: str
    layers: list[FileLayer]


class TensorCache:
    """Tensors of a file; the last ones are cached, because q, k and v may be read in turn from a
    packed tensor.

    Attributes:
        file: the open file.
        path, infos, quantized: attributes of the file.
    """

    def __init__(self, file: TensorFile) -> None:
        self.file = file
        self.path = file.path
        self.infos = file.infos
        self.quantized = file.quantized
        self._cached: dict[tuple[str, int | None], np.ndarray] = {}

    @cached_property
    def names(self) -> Names:
        """Return the names of its tensors."""
        return Names(self.infos)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its tensors, by name."""
        return {name: info.shape for name, info in self.infos.items()}

    def tensor(self, name: str) -> FileTensor:
        """Return a tensor that is read later, without caching it."""
        self._cached.clear()  # so that memory holds one of them
        return self.file.tensor(name)

    def read_finite(self, name: str, index: int | None = None, axis: int = 0) -> np.ndarray:
        """Read a tensor, or one entry of a stacked one; reject NaN and infinities."""
        if index is None or (name in self.file.offsets and axis == 0):
            return self._read_cached(name, index, most=1)
        # A stack can only be read whole. Three are cached, so that separate q, k and v of all
        # layers need one read each.
        stack = self._read_cached(name, None, most=3)
        return np.ascontiguousarray(np.moveaxis(stack, axis, 0)[index])

    def _read_cached(self, name: str, index: int | None, *, most: int) -> np.ndarray:
        """Read a tensor or an entry of it, and keep the last `most` ones."""
        key = (name, index)
        if key not in self._cached:
            # Before the read, so that memory holds no more than `most` at any time.
            while len(self._cached) >= most:
                del self._cached[next(iter(self._cached))]
            tensor = self.file.read(name) if index is None else self.file.read_entry(name, index)
            if not is_finite(tensor):
                where = str(self.file.path)
                raise InputError(name, "be finite", "NaN or infinities", where=where)
            self._cached[key] = tensor
        return self._cached[key]


# ---- Layers under a prefix -----------------------------------------------------------------------


QUANTISED = re.compile(
    r"\.(qweight|qzeros|scales|SCB|weight_scale(_inv)?|weight_packed|"
    r"weight\.(absmax|quant_state.*))$"
)
"""Names of additional tensors next to weights quantized by GPTQ, AWQ, bitsandbytes, FP8 or
compressed-tensors.
"""


@dataclass(frozen=True)
class _IdentifiedLayer:
    """A layer under a prefix: its index in a stack or None, its hints, its specification and its
    placement.
    """

    index: int | None
    hints: LayerHints
    spec: AttentionSpec
    placement: Placement


class _TensorsOfPrefix(NamedTuple):
    """The tensors under a concrete prefix.

    Attributes:
        numbers: numbers in the prefix, for `{i}`.
        sources: their full names, by name after the prefix.
    """

    numbers: tuple[str, ...]
    sources: dict[str, str]


def layers_under(
    file: TensorCache, prefix: str, layout: Layout, hints: FileHints
) -> list[FileLayer]:
    """Find the attention layers under a prefix.

    Raises:
        ValueError: if there is none, its tensors do not fit the layout, or a different table of
            this name wrote the file.

    Warns:
        IgnoredSettingsWarning: as in `load`.
    """
    hints.own.check_layout(layout, file.path)
    entry_of_stack = ENTRY.fullmatch(prefix)
    pattern = prefix if entry_of_stack is None else entry_of_stack[1]
    by_prefix = _tensors_by_prefix(file, pattern, layout, hints)
    if not by_prefix:
        raise _no_layer(InputError, file, prefix, layout)
    layers: list[FileLayer] = []
    for concrete, (numbers, own) in by_prefix.items():
        sources = _with_shared(file, concrete, own, layout, hints)
        try:
            layer_hints = hints.at(concrete)
            sources = _without_unused(sources, layout, layer_hints.spec)
            shapes = {short: file.infos[name].shape for short, name in sources.items()}
            entries, axis = _identify(shapes, concrete, layout, hints, layer_hints)
        except LayoutMismatchError as error:
            # A prefix other than the empty one may be meant.
            if not concrete and any(fitting_prefixes(file.shapes, layout)):
                raise _no_layer(LayoutMismatchError, file, prefix, layout) from None
            if any(QUANTISED.search(name) for name in sources):
                advice = "quantized weights are read only from GGUF"
                error.hint = f"{error.hint}; {advice}" if error.hint else advice
            raise error.within(concrete or str(file.path)) from None
        except InputError as error:
            raise error.within(concrete or str(file.path)) from None
        _check_dtypes(file, concrete, sources)
        if entry_of_stack is not None:
            entries = [_entry_at(int(entry_of_stack[2]), entries, file, prefix)]
        for entry in entries:
            label = concrete
            if entry.index is not None:
                label = f"{concrete}[{entry.index}]"
            layers.append(
                FileLayer(
                    file=file,
                    label=label,
                    prefix=concrete,
                    numbers=numbers,
                    index=entry.index,
                    axis=axis,
                    placement=entry.placement,
                    spec=entry.spec,
                    hints=entry.hints,
                    sources=sources,
                    file_hints=hints,
                    shared=hints.holders_at(label, layout, file.infos),
                )
            )
    for layer in layers:
        _check_values(layer)
    unread = unread_of(layers)
    if unread:
        # The level is the level of the caller of `load` or `convert_file`, above
        # `Checkpoint.layers`.
        warnings.warn(_ignored_settings(unread, hints), IgnoredSettingsWarning, stacklevel=4)
    return layers


def unread_of(layers: list[FileLayer]) -> dict[str, Any]:
    """Return the attention keys that the specification of some layer does not contain, with their
    values.
    """
    unread: dict[str, Any] = {}
    for layer in layers:
        unread |= layer.hints.unread
    return unread


def _tensors_by_prefix(
    file: TensorCache, pattern: str, layout: Layout, hints: FileHints
) -> dict[str, _TensorsOfPrefix]:
    """Return the tensors under each concrete prefix of a pattern, without those that the layout or
    the file ignores.
    """
    by_prefix: dict[str, _TensorsOfPrefix] = {}
    for name in file.names.beginning(pattern.partition("{i}")[0]):
        match = concrete_prefix(pattern, name)
        if match is None:
            continue
        concrete, numbers, short = match
        if not layout.ignores(short, hints.ignored):
            tensors = by_prefix.setdefault(concrete, _TensorsOfPrefix(numbers, {}))
            tensors.sources[short] = name
    if "{i}" not in pattern:
        return by_prefix
    # A pattern also matches other modules, such as the layers that predict further tokens. If
    # nothing else is there, the caller means them.
    of_layers: dict[str, _TensorsOfPrefix] = {}
    for concrete, tensors in by_prefix.items():
        if not hints.is_other(concrete):
            of_layers[concrete] = tensors
    return of_layers or by_prefix


def _with_shared(
    file: TensorCache, prefix: str, own: dict[str, str], layout: Layout, hints: FileHints
) -> dict[str, str]:
    """Return the tensors of a layer, with those that it shares with other modules and without
    irrelevant ones.
    """
    layer = hints.model.layer_at(prefix)
    irrelevant = () if layer is None else layer.ignored
    sources = {short: name for short, name in own.items() if short not in irrelevant}
    for weight, holder in hints.holders_at(prefix, layout, file.infos).items():
        short = layout.name_of(weight)
        name = name_in_file(holder, weight, layout, file.infos)
        if short is not None and name is not None and short not in sources:
            sources[short] = name
    return sources


def _without_unused(
    sources: dict[str, str], layout: Layout, spec: AttentionSpec | None
) -> dict[str, str]:
    """Return the tensors of a layer without those that its specification does not compute with."""
    if spec is None:
        return sources
    unused = unused_in(layout, spec)
    return {short: name for short, name in sources.items() if short not in unused}


def _check_dtypes(file: TensorCache, prefix: str, sources: Mapping[str, str]) -> None:
    """Reject a layer whose tensors have different dtypes, or none of floating point."""
    dtypes = [file.infos[name].dtype for name in sources.values()]
    names = sorted({dtype.name for dtype in dtypes})
    if len(names) > 1 or not is_floating(dtypes[0]):
        raise InputError(prefix or file.path, "have one floating-point dtype", str(names))


def _entry_at(
    index: int, entries: list[_IdentifiedLayer], file: TensorCache, prefix: str
) -> _IdentifiedLayer:
    """Return the layer of a stack with an index; reject a prefix of none."""
    for entry in entries:
        if entry.index == index:
            return entry
    size = f"a stack of {len(entries)}"
    if entries[0].index is None:
        size = "no stack"
    raise InputError(
        "prefix", f"be the prefix of a layer in {file.path}", f"prefix={prefix!r} of {size}"
    )


def _check_values(layer: FileLayer) -> None:
    """Reject a layer whose value projection is missing or superfluous according to the model's
    configuration.
    """
    model = layer.model
    if model is None or layer.layout.name != model.layout:
        return
    is_shared = any(tensor.is_shared for tensor in layer.placement.tensors)
    if is_shared == model.keys_are_values:
        return
    rule = "be made as keys are" if model.keys_are_values else "have a projection of their own"
    raise LayoutMismatchError(
        "values", f"{rule}, by config.json", shorten(layer.sources), where=layer.label
    )


def _no_layer(kind: type[InputError], file: TensorCache, prefix: str, layout: Layout) -> InputError:
    """Make the error for a prefix without a layer; it lists the prefixes of layers."""
    fitting = fitting_prefixes(file.shapes, layout)
    hint = f"fits {layout.name}"
    if not fitting:
        hint = (
            f"none fits {layout.name}; `mha-parity inspect` lists the layouts that fit, and what "
            f"to do if none does"
        )
    remedy = [{"prefix": pattern} for pattern in fitting]
    return kind(
        "prefix",
        f"be the prefix of a layer in {file.path}",
        prefix=prefix,
        remedy=remedy,
        hint=hint,
    )


# ---- Keys that are not understood ----------------------------------------------------------------


def _ignored_settings(unread: Mapping[str, Any], hints: FileHints) -> str:
    """Describe the attention keys that no specification contains, and how the caller can replace
    them.
    """
    origin = hints.model.origin or "the metadata"
    keys = ", ".join(key_in_words(name, value) for name, value in unread.items())
    words = f"{origin} sets {keys}, which no specification expresses"
    of_rope = [name for name in unread if is_of_rope(name)]
    if of_rope:
        words += (
            ": RoPE is left out; pass rope=Rope(…) to parity.load, or --rope-theta for plain RoPE"
        )
    if len(of_rope) < len(unread):
        words += "; parity.load accepts a complete spec=…"
    return words


def key_in_words(name: str, value: Any) -> str:
    """Return a key of a configuration with its value, truncated if long."""
    if value is None:
        return name
    text = str(value) if isinstance(value, str | int | float) else repr(value)
    # About a line. Text comes from files, and may be of any length.
    if len(text) > 80:
        text = f"{text[:80]}…"
    return f"{name}={text}"


# ---- Identification by shapes --------------------------------------------------------------------


def _identify(
    shapes: Shapes, prefix: str, layout: Layout, hints: FileHints, layer_hints: LayerHints
) -> tuple[list[_IdentifiedLayer], int]:
    """Find the layers under a prefix, and the axis of their stack, if any.

    Args:
        shapes: shapes of their tensors, by name after the prefix.
        prefix: the prefix.
        layout: their layout.
        hints: what is known of the layers of the file.
        layer_hints: what is known of the layer with this prefix, if it is a single one.
    """
    spec = layer_hints.spec
    mismatch: LayoutMismatchError | None = None
    if spec is not None:
        try:
            placement = find_placement(shapes, spec, layout)
        except LayoutMismatchError as error:
            mismatch = error
        else:
            return [_IdentifiedLayer(None, layer_hints, spec, placement)], 0
    # Perhaps the tensors are stacked, and each entry of the stack has a specification.
    stacks: list[tuple[list[_IdentifiedLayer], int]] = []
    axes = sorted({0, layout.stack_axis})
    own = hints.own
    is_own_layer = own.prefix == numbered(prefix) or f"{prefix}[0]" in own.specs
    if own.names_layout and own.layout == layout.name and is_own_layer:
        axes = [layout.stack_axis]  # mha-parity wrote it, on no other
    for axis in axes:
        sizes = {shape[axis : axis + 1] for shape in shapes.values()}
        if len(sizes) != 1 or sizes == {()} or hints.at(f"{prefix}[0]").spec is None:
            continue
        ((size,),) = sizes
        try:
            entries = _entries(without_axis(axis, shapes), size, prefix, layout, hints)
        except LayoutMismatchError as error:
            mismatch = mismatch or error
        else:
            stacks.append((entries, axis))
    if len(stacks) > 1:
        raise _two_axes(axis for _, axis in stacks)
    if stacks:
        return stacks[0]
    if mismatch is not None:
        raise mismatch
    return _identify_by_shapes(shapes, prefix, layout, hints)


def _identify_by_shapes(
    shapes: Shapes, prefix: str, layout: Layout, hints: FileHints
) -> tuple[list[_IdentifiedLayer], int]:
    """Find the layers under a prefix that no source specifies, and the axis of their stack."""
    sizes = stack_sizes(shapes, layout)
    if sizes is None:
        return [_layer_by_shapes(shapes, prefix, layout, hints)], 0
    layers: dict[int, _IdentifiedLayer] = {}
    mismatch: LayoutMismatchError | None = None
    for axis in sizes:
        try:
            layers[axis] = _layer_by_shapes(without_axis(axis, shapes), prefix, layout, hints)
        except LayoutMismatchError as error:
            mismatch = mismatch or error
    if mismatch is not None and not layers:
        raise mismatch
    if len(layers) > 1:
        raise _two_axes(layers)
    ((axis, layer),) = layers.items()
    return [replace(layer, index=index) for index in range(sizes[axis])], axis


def _two_axes(axes: Iterable[int]) -> LayoutMismatchError:
    """Make the error for a stack whose shapes fit on two axes."""
    return LayoutMismatchError("the axis of a stack", "be plain", f"shapes that fit on {[*axes]}")


def _layer_by_shapes(
    shapes: Shapes, prefix: str, layout: Layout, hints: FileHints
) -> _IdentifiedLayer:
    """Find a single layer, or one of a stack with equal layers, by its shapes."""
    layer_hints = hints.at(prefix)
    try:
        spec = find_spec(shapes, layout, layer_hints)
    except ValueError:
        # The heads of the configuration may belong to other layers, or of another model.
        layer_hints = hints.without_heads_of_model(prefix)
        spec = find_spec(shapes, layout, layer_hints)
    layer_hints = replace(layer_hints, spec=spec)
    placement = find_placement(shapes, spec, layout)
    return _IdentifiedLayer(None, layer_hints, spec, placement)


def _entries(
    shapes: Shapes, size: int, prefix: str, layout: Layout, hints: FileHints
) -> list[_IdentifiedLayer]:
    """Find the layers of a stack; reject it if one is unknown or they are not all layers of the
    model.
    """
    if hints.model.layer_at(f"{prefix}[{size}]") is not None:
        raise LayoutMismatchError("a stack", "contain all layers of config.json", f"{size} of them")
    entries: list[_IdentifiedLayer] = []
    for index in range(size):
        label = f"{prefix}[{index}]"
        layer_hints = hints.at(label)
        spec = layer_hints.spec
        if spec is None:
            raise LayoutMismatchError(
                "the model", f"have a layer {label}, and its configuration has none"
            )
        entries.append(
            _IdentifiedLayer(index, layer_hints, spec, find_placement(shapes, spec, layout))
        )
    return entries
