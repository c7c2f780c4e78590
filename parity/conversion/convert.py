"""From one layout to another: weights in memory, layers in files, whole checkpoints in bounded memory."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from parity.conversion.layouts import LAYOUTS, Layout, Tensor, find_layout, find_spec, from_canonical, to_canonical
from parity.conversion.layouts.layout import (
    DoesNotFit,
    HeadsUnknown,
    find_form,
    lay_out,
    read_out,
    shapes_in,
    stack_size,
)
from parity.conversion.model_config import HEADS, Beside, heads_beside
from parity.conversion.not_carried import NotCarriedWarning
from parity.core.spec import AttentionSpec, unheld
from parity.core.weights import FORMAT, Weights, is_finite, is_floating, read_spec, weight_shapes
from parity.files import TensorFile, open_tensors, write_tensors

Heads = dict[str, Any]
"""What a checkpoint's shapes may not tell: num_heads, num_kv_heads, head_dim, rope_theta."""


def convert(
    weights: Mapping[str, Any],
    *,
    source: str,
    target: str,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rope_theta: float | None = None,
) -> Weights:
    """The weights of an attention layer in another layout, bit for bit.

    Args:
        weights: arrays of any framework by name, in the source's layout, without any prefix: a torch state dict, a
            Flax state or nested dict, NumPy arrays.
        source, target: names of layouts: see `parity.LAYOUTS`.
        num_heads, num_kv_heads, head_dim: of the layer, where the shapes do not tell.
        rope_theta: base of the RoPE frequencies; which layouts pad heads for it, and how, depends on it.

    Returns:
        NumPy arrays by name. `parity.to_torch` and `parity.to_jax` make those of a framework of them.

    Raises:
        TypeError: if something is not a floating-point array, or the dtypes differ.
        ValueError: if a layout is unknown, names or shapes do not fit, the heads could be read in more than one way, a
            value is not finite, or the target cannot hold such a layer.
    """
    heads: Heads = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rope_theta": rope_theta,
    }
    target_layout = find_layout(target, "target")
    canonical, spec = to_canonical(weights, find_layout(source, "source"), **heads)
    return from_canonical(canonical, spec, target_layout)


def load(
    path: str | os.PathLike[str],
    layout: str | None = None,
    *,
    prefix: str | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rope_theta: float | None = None,
) -> tuple[Weights, AttentionSpec]:
    """Canonical weights, and the specification, of one attention layer in a file.

    Args:
        path: of the file, or of a folder of shards.
        layout: of the layer; what the file's metadata tell when absent.
        prefix: what its names begin with, without the last dot; what the metadata tell when absent. One layer of a
            stack, which has a leading axis for its layers, is that of an index: `layers.self_attn[3]`.
        num_heads, num_kv_heads, head_dim, rope_theta: as `convert` takes them; else what the metadata tell, or those of
            a GGUF file, or a `config.json` beside the file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: as `convert`, or if the file holds no such layer.

    Warns:
        NotCarriedWarning: if what lies beside the tensors says of RoPE what a specification cannot hold.
    """
    heads: Heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    with open_layers(path, layout, prefix=prefix, **heads, rope_theta=rope_theta) as layers:
        if len(layers) != 1:
            some = ", ".join(layers[index].label for index in (0, -1))
            raise ValueError(f"prefix must be that of one layer, got one of {len(layers)} in {path}: {some}")
        return layers[0].load()


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
        prefix = _prefix_of(file, prefix)
        layers = _layers(_Latest(file), prefix, _source_of(file, layout, path), _heads_of(file, heads), path)
        yield sorted(layers, key=lambda layer: layer.place)


def save(
    path: str | os.PathLike[str],
    weights: Mapping[str, Any],
    spec: AttentionSpec | None = None,
    layout: str = "canonical",
    *,
    prefix: str = "",
) -> None:
    """Write canonical weights to a file, in a layout: `parity.foreign.save`, which takes modules, too."""
    target = find_layout(layout)
    if spec is None:
        raise TypeError("spec must be given with weights by name, got spec=None; `parity.spec_of` has that of a module")
    laid_out = {_join(prefix, name): array for name, array in from_canonical(weights, spec, target).items()}
    infos = {name: (array.shape, array.dtype) for name, array in laid_out.items()}
    write_tensors(path, infos, laid_out.__getitem__, _metadata(target, [spec], prefix))


# ---- Whole checkpoints -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Converted:
    """What `convert_file` did.

    Attributes:
        source: name of the layout that the layers were in.
        layers: prefixes of the layers that were converted, those of a stack with an index in brackets.
        spec: theirs, if they have the same.
        kept, dropped: names of the other tensors.
        heads_from: the file that told the heads, if it was neither the caller nor the source itself.
        left_out: names of what is not a tensor, such as numbers and text, and is not in the target.
        unconverted: prefixes of other layers in the source's layout, which are in the target as they were.
        optimizer_state: names of an optimizer's tensors for the layers, which are in the target in the old layout.
        not_carried: what the source says of RoPE that its specification cannot hold, so that it is said to have none.
    """

    source: str
    layers: list[str]
    spec: AttentionSpec | None
    kept: list[str]
    dropped: list[str]
    heads_from: str = ""
    left_out: list[str] = field(default_factory=list)
    unconverted: list[str] = field(default_factory=list)
    optimizer_state: list[str] = field(default_factory=list)
    not_carried: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        return asdict(self)


def convert_file(
    source_path: str | os.PathLike[str],
    target_path: str | os.PathLike[str],
    *,
    source: str | None = None,
    target: str,
    prefix: str | None = None,
    to_prefix: str | None = None,
    keep_rest: bool = True,
    max_shard_bytes: int | None = None,
    force: bool = False,
    on_tensor: Callable[[str], None] = lambda name: None,
    **heads: Any,
) -> Converted:
    """Convert every attention layer of a file, tensor by tensor, so that memory holds a few of them at a time.

    Layers may be stacked on a leading axis, as `scan` and `vmap` keep them: their tensors have one axis more. A stack
    becomes numbered layers where `to_prefix` has an `{i}` more than `prefix`; numbered layers become a stack where it
    has none.

    Args:
        source_path, target_path: files, or folders of shards; a suffix tells the format of the target.
        source: layout of the layers; what the file's metadata tell when absent.
        target: layout to write.
        prefix: what the names of a layer begin with, without the last dot; `{i}` stands for its number. What the file's
            metadata tell when absent, or else nothing.
        to_prefix: what they shall begin with; the same when absent.
        keep_rest: write all other tensors, too, as they are; else leave them out.
        max_shard_bytes: divide the target into files of about that size.
        force: replace a target that is there, if it is of the same format; never the source.
        on_tensor: called with the name of each tensor before it is written.
        heads: num_heads, num_kv_heads, head_dim, rope_theta: as `load` takes them.

    Raises:
        OSError: if a file cannot be read or written.
        FileExistsError: if the target exists, without `force`.
        ValueError: as `convert`, or if there is no such layer, two tensors would have one name, layers cannot be
            stacked, the target is the source, or what is there is not of the target's format.
    """
    target_layout = find_layout(target, "target")
    with open_tensors(source_path) as file:
        prefix = _prefix_of(file, prefix)
        entry = ENTRY.fullmatch(prefix)
        if entry and keep_rest:
            raise ValueError(f"prefix must be that of a whole stack where the rest is kept, got prefix={prefix!r}")
        if to_prefix is None:
            to_prefix = str(entry[1]) if entry else prefix
        latest = _Latest(file)
        layout = _source_of(file, source, source_path, "source")
        known = _heads_of(file, heads)
        layers = _layers(latest, prefix, layout, known, source_path)
        targets, stacks = _targets(layers, prefix, to_prefix)
        of_name: dict[str, dict[str, None]] = {}
        for to, group in targets.items():
            for name in (name for layer in group for name in layer.sources):
                of_name.setdefault(name, {})[to] = None
        infos: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        makers: dict[str, Callable[[], np.ndarray]] = {}
        kept, dropped, begun = [], [], set()

        def add(name: str, shape: tuple[int, ...], dtype: np.dtype, make: Callable[[], np.ndarray]) -> None:
            if name in infos:
                raise ValueError(f"names must differ in {target_path}, got {name} twice")
            infos[name], makers[name] = (shape, dtype), make

        def add_layers(targets_of_name: Iterable[str]) -> None:
            """Those that a tensor of the source goes into: one, or all of a stack, which then is read once."""
            new = [to for to in targets_of_name if to not in begun]
            begun.update(new)
            spec, dtype = targets[new[0]][0].spec, targets[new[0]][0].dtype
            for short, shape in shapes_in(target_layout, spec).items():
                for to in new:
                    group = targets[to]
                    whole = (len(group), *shape) if stacks else shape
                    add(_join(to, short), whole, dtype, partial(_laid_out, group, short, target_layout, stacks))

        for name, info in file.infos.items():
            if name in of_name:
                if not begun.issuperset(of_name[name]):
                    add_layers(of_name[name])
            elif keep_rest:
                kept.append(name)
                add(name, info.shape, info.dtype, lambda name=name: latest.read(name))
            else:
                dropped.append(name)

        def read(name: str) -> np.ndarray:
            on_tensor(name)
            return makers[name]()

        specs = list(dict.fromkeys(layer.spec for layer in layers))
        metadata = _metadata(target_layout, specs, to_prefix)
        write_tensors(
            target_path,
            infos,
            read,
            metadata,
            max_shard_bytes=max_shard_bytes,
            overwrite=force,
            source=source_path,
        )
        shapes = {file.infos[name].shape for name in of_name}
        return Converted(
            source=layers[0].layout.name,
            layers=[layer.label for layer in layers],
            spec=specs[0] if len(specs) == 1 else None,
            kept=kept,
            dropped=dropped,
            heads_from=layers[0].heads_from,
            left_out=list(file.ignored),
            unconverted=_fitting({name: file.infos[name].shape for name in kept}, layers[0].layout),
            optimizer_state=[
                name for name in kept if name.rpartition(".")[2] in OPTIMIZER_STATE and file.infos[name].shape in shapes
            ],
            not_carried=list(known.not_carried),
        )


OPTIMIZER_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta")
"""What torch's optimizers keep for each weight, in its shape; optax keeps such things under the weights' names."""

ENTRY = re.compile(r"(.*)\[(\d+)\]", re.DOTALL)
"""The prefix of one layer of a stack, such as `layers.self_attn[3]`."""


def _targets(layers: list[Layer], prefix: str, to_prefix: str) -> tuple[dict[str, list[Layer]], bool]:
    """The layers that go under each prefix of the target, and whether they are stacked there."""
    places, to_places = prefix.count("{i}"), to_prefix.count("{i}")
    kinds = {layer.index is not None for layer in layers}
    is_stack = kinds == {True} and not ENTRY.fullmatch(prefix)
    takes_apart, stacks_up = is_stack and to_places == places + 1, kinds == {False} and (places, to_places) == (1, 0)
    if len(kinds) > 1 or not (to_places == places or takes_apart or stacks_up):
        raise ValueError(
            "to_prefix must have as many {i} as prefix, or one more to take a stack apart, or none to stack what is "
            f"numbered, got to_prefix={to_prefix!r} and prefix={prefix!r}"
        )
    targets: dict[str, list[Layer]] = {}
    for layer in layers:
        numbers = (*layer.numbers, str(layer.index)) if takes_apart else layer.numbers
        to = to_prefix
        for number in () if stacks_up else numbers:
            to = to.replace("{i}", number, 1)
        targets.setdefault(to, []).append(layer)
    if stacks_up:
        (group,) = targets.values()
        group.sort(key=lambda layer: int(layer.numbers[0]))
        numbers = [int(layer.numbers[0]) for layer in group]
        if numbers != list(range(len(group))):
            raise ValueError(f"layers must be numbered from 0 without gaps to be stacked, got {numbers}")
        if len({(layer.spec, layer.dtype) for layer in group}) > 1:
            raise ValueError(f"layers must be of one specification and dtype to be stacked, those of {prefix} are not")
    return targets, stacks_up or (is_stack and not takes_apart)


def _laid_out(group: list[Layer], name: str, target: Layout, stacked: bool) -> np.ndarray:
    """A tensor of another layout, of one layer or of all in a stack."""
    first = group[0].write(name, target)
    if not stacked:
        return first
    tensor = np.empty((len(group), *first.shape), first.dtype)
    tensor[0] = first
    for index, layer in enumerate(group[1:], 1):
        tensor[index] = layer.write(name, target)
    return tensor


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
        heads_from: the file that told its heads, if it was neither the caller nor the file itself.
        sources: the full names of its tensors, and those after the prefix.
    """

    file: _Latest
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
        return self.file.read_finite(_join(self.prefix, name), self.index)


class _Latest:
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


def _layers(file: _Latest, prefix: str, layout: Layout, heads: _Heads, path: str | os.PathLike[str]) -> list[Layer]:
    """The attention layers whose names begin with a prefix."""
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
            if not concrete and any(_fitting({name: info.shape for name, info in file.infos.items()}, layout)):
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
            f"{heads.told_by} says {', '.join(heads.not_carried)}, which a specification cannot hold: "
            "RoPE is left out of it; rope_theta (--rope-theta) takes it for plain RoPE",
            NotCarriedWarning,
            stacklevel=3,
        )
    return layers


def _no_layer(file: _Latest, prefix: str, layout: Layout, path: str | os.PathLike[str]) -> str:
    """That there is no layer of a prefix, and the prefixes that there are layers of."""
    fitting = _fitting({name: info.shape for name, info in file.infos.items()}, layout)
    if fitting:
        hint = f"for {layout.name} {_either([f'prefix={each!r}' for each in fitting])} fits"
    else:
        hint = f"none in it fits {layout.name}; `mha-parity inspect` lists what fits"
    return f"prefix must be that of a layer in {path}, got prefix={prefix!r}; {hint}"


def _either(words: Sequence[str], most: int = 3) -> str:
    return " or ".join(words[:most]) + (f" (or {len(words) - most} more)" if len(words) > most else "")


def _source_of(file: TensorFile, layout: str | None, path: str | os.PathLike[str], what: str = "layout") -> Layout:
    told = layout or file.metadata.get("layout") or ("canonical" if "spec" in file.metadata else None)
    if told is not None:
        return find_layout(told, what)
    shapes = {name: info.shape for name, info in file.infos.items()}
    fitting = [f"{what}={each.name!r} with prefix={p!r}" for each in LAYOUTS.values() for p in _fitting(shapes, each)]
    raise ValueError(
        f"{what} must be given for {path}, whose metadata do not tell it; "
        f"{f'{_either(fitting)} fits' if fitting else '`mha-parity inspect` lists what is in it'}"
    )


def _prefix_of(file: TensorFile, said: str | None) -> str:
    told = file.metadata.get("prefix", "") if _is_ours(file.metadata) else ""
    return told if said is None else said


@dataclass(frozen=True)
class _Heads:
    """What is known of the heads.

    Attributes:
        said: what the caller says, or the file's own metadata.
        saved: the specification in the file's own metadata.
        told: what others tell of the model.
        told_by: who.
        not_carried: what they tell of RoPE, which the caller says nothing of, and no specification can hold.
    """

    said: Heads
    saved: AttentionSpec | None
    told: Heads
    told_by: str
    not_carried: tuple[str, ...]

    def find_spec(self, shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> tuple[AttentionSpec, str]:
        """The specification of a layer, and who told of its heads, if it was another file."""
        if self.told:
            with suppress(ValueError):  # that may be of other layers, or of another model
                return find_spec(shapes, layout, **self.said | self.told), self.told_by
        spec = find_spec(shapes, layout, **self.said)
        if self.saved is not None and unheld(self.saved) == spec:
            return self.saved, ""
        return spec, ""


def _heads_of(file: TensorFile, said: Heads) -> _Heads:
    known: Heads = {}
    saved = None
    if "spec" in file.metadata and _is_ours(file.metadata):
        saved = read_spec(file.path, {**file.metadata, "format": FORMAT})
        known = {name: getattr(saved, name) for name in HEADS}
    merged = {name: said.get(name) if said.get(name) is not None else known.get(name) for name in (*known, *said)}
    beside = Beside() if known else heads_beside(file)
    told = {name: value for name, value in beside.heads.items() if said.get(name) is None}
    if any(said.get(name) is not None for name in ("num_heads", "num_kv_heads", "head_dim")):
        told = {name: value for name, value in told.items() if name == "rope_theta"}  # counts of two origins do not mix
    not_carried = beside.not_carried if said.get("rope_theta") is None else ()
    return _Heads(merged, saved, told, beside.origin, not_carried)


def _metadata(layout: Layout, specs: Sequence[AttentionSpec], prefix: str) -> dict[str, str]:
    # transformers 4 refuses files of another format than "pt"; `load_weights` knows canonical ones by ours.
    form = FORMAT if layout.name == "canonical" and not prefix else "pt"
    metadata = {"format": form, "mha_parity": FORMAT, "layout": layout.name, "rope": layout.rope, "prefix": prefix}
    if len(specs) == 1:
        (spec,) = specs
        metadata |= {"spec": spec.to_json(), "num_heads": str(spec.num_heads), "num_kv_heads": str(spec.num_kv_heads)}
        metadata["head_dim"] = str(spec.head_dim)
    return metadata


def _is_ours(metadata: Mapping[str, str]) -> bool:
    """Whether metadata were written here; other programs use some of the same words."""
    return metadata.get("mha_parity", metadata.get("format")) == FORMAT


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def count_tensors(path: str | os.PathLike[str]) -> int:
    """How many tensors a file holds: about as many as its conversion writes."""
    with open_tensors(path) as file:
        return len(file.infos)


# ---- What is in a file -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Attention layers of one kind in a file.

    Attributes:
        prefix: what their names begin with, `{i}` standing for numbers.
        layers: how many there are.
        layout: name of a layout that fits.
        heads: the heads, if the shapes or another file tell them, or why not.
        dtype: of their tensors.
        is_stacked: they are one array on a leading axis.
    """

    prefix: str
    layers: int
    layout: str
    heads: str
    dtype: str
    is_stacked: bool = False


def find_layers(file: TensorFile, **heads: Any) -> list[Found]:
    """Every attention layer in a file, in every layout that fits its names.

    Args:
        file: an open file.
        heads: num_heads, num_kv_heads, head_dim, rope_theta, as far as they are known.
    """
    found, known = [], _heads_of(file, heads)
    for layout in LAYOUTS.values():
        groups: dict[str, list[str]] = {}
        prefixes = _prefixes(file.infos, layout)
        for concrete in prefixes:
            groups.setdefault(_numbered(concrete), []).append(concrete)
        for prefix, members in groups.items():
            alike: dict[Any, list[str]] = {}  # layers of the same shapes, of which one is looked at
            for concrete in members:
                infos = {name.removeprefix(concrete): i for name, i in file.infos.items() if name.startswith(concrete)}
                alike.setdefault(tuple((name, info.shape, info.dtype) for name, info in infos.items()), []).append(
                    concrete
                )
            for first, *others in alike.values():
                is_stacked, size = False, 1
                try:
                    layers = _layers(_Latest(file), first, layout, known, "")
                    is_stacked, size, spec = layers[0].index is not None, len(layers), layers[0].spec
                    words = f"{spec.num_heads} x {spec.head_dim}, key/value {spec.num_kv_heads}"
                    words += f" ({layers[0].heads_from})" if layers[0].heads_from else ""
                except DoesNotFit:
                    continue
                except ValueError as error:
                    words = str(error).removeprefix(f"{first}: ")
                dtype = file.infos[prefixes[first]].dtype.name
                found.append(Found(prefix, (1 + len(others)) * size, layout.name, words, dtype, is_stacked))
    return found


def _numbered(prefix: str) -> str:
    """A prefix with `{i}` in place of its numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "{i}", prefix)


def _fitting(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> list[str]:
    """The prefixes of all layers that a layout fits, `{i}` standing for numbers."""
    found: dict[str, None] = {}
    seen: dict[tuple[tuple[str, tuple[int, ...]], ...], bool] = {}  # most layers of a model are alike
    for concrete in _prefixes(shapes, layout):
        pattern, begin = _numbered(concrete), f"{concrete}." if concrete else ""
        if pattern in found:
            continue
        under = {name.removeprefix(begin): shape for name, shape in shapes.items() if name.startswith(begin)}
        under = {name: shape for name, shape in under.items() if not layout.ignores(name)}
        kind = tuple(under.items())
        if kind not in seen:
            seen[kind] = _fits(under, layout)
        if seen[kind]:
            found[pattern] = None
    return list(found)


def _fits(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> bool:
    """Whether tensors are a layer in a layout, or a stack of them, with some number of heads."""
    try:
        is_stacked = stack_size(shapes, layout) is not None
        find_spec({name: shape[is_stacked:] for name, shape in shapes.items()}, layout)
    except HeadsUnknown:
        return True
    except ValueError:
        return False
    return True


def _prefixes(names: Iterable[str], layout: Layout) -> dict[str, str]:
    """What the names of a layout's layers may begin with, each with a name that does and ends as one of its tensors."""
    endings = {tensor.name.replace("{n}", "0") for tensor in layout.tensors if tensor.kind == "weight"}
    found: dict[str, str] = {}
    for name in names:
        for ending in endings:
            if name == ending:
                found.setdefault("", name)
            elif name.endswith(f".{ending}"):
                found.setdefault(name.removesuffix(f".{ending}"), name)
    return found
