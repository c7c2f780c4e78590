"""From one layout to another: weights in memory, layers in files, whole checkpoints in bounded memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from parity.formats import TensorFile, open_tensors, write_tensors
from parity.layouts import LAYOUTS, Layout, Tensor, find_layout, find_spec, from_canonical, to_canonical
from parity.layouts.layout import find_form, lay_out, read_out, shapes_in
from parity.spec import AttentionSpec
from parity.weights import FORMAT, Weights, is_finite, is_floating, read_spec, weight_shapes

Heads = dict[str, Any]
"""What a checkpoint's shapes may not tell: num_heads, num_kv_heads, head_dim, rope_theta."""


def convert(
    weights: Mapping[str, np.ndarray],
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
        weights: arrays by name, in the source's layout, without any prefix.
        source, target: names of layouts: see `parity.LAYOUTS`.
        num_heads, num_kv_heads, head_dim: of the layer, where the shapes do not tell.
        rope_theta: base of the RoPE frequencies; which layouts pad heads for it, and how, depends on it.

    Raises:
        ValueError: if a layout is unknown, names or shapes do not fit, the heads could be read in more than one way, a
            value is not finite, or the target cannot hold such a layer.
    """
    heads: Heads = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rope_theta": rope_theta,
    }
    canonical, spec = to_canonical(weights, find_layout(source), **heads)
    return from_canonical(canonical, spec, find_layout(target))


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
        prefix: what its names begin with, without the last dot; what the metadata tell when absent.
        num_heads, num_kv_heads, head_dim, rope_theta: as `convert` takes them; else what the metadata tell.

    Raises:
        OSError: if the file cannot be read.
        ValueError: as `convert`, or if the file holds no such layer.
    """
    said: Heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "rope_theta": rope_theta}
    with open_tensors(path) as file:
        found, prefix = _source_of(file, layout, path), _prefix_of(file, prefix)
        layers = _layers(_Latest(file), prefix, found, _heads_of(file, said), path)
        if len(layers) != 1:
            raise ValueError(
                f"prefix must be that of one layer, got {prefix!r}, which is that of {len(layers)} in {path}"
            )
        (layer,) = layers
        return {name: np.array(layer.read(name), order="C") for name in layer.names}, layer.spec


def save(
    path: str | os.PathLike[str],
    weights: Mapping[str, np.ndarray],
    spec: AttentionSpec,
    layout: str = "canonical",
    *,
    prefix: str = "",
) -> None:
    """Write canonical weights to a file, in a layout, whole or not at all.

    Args:
        path: of the file; its suffix tells the format.
        weights: canonical weights.
        spec: the layer.
        layout: to write them in.
        prefix: what the names shall begin with, without the last dot.

    Raises:
        OSError: if the file cannot be written.
        TypeError, ValueError: if the weights are not those of the spec, or the layout cannot hold such a layer.
    """
    target = find_layout(layout)
    laid_out = {_join(prefix, name): array for name, array in from_canonical(weights, spec, target).items()}
    infos = {name: (array.shape, array.dtype) for name, array in laid_out.items()}
    write_tensors(path, infos, laid_out.__getitem__, _metadata(target, [spec], prefix))


# ---- Whole checkpoints -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Converted:
    """What `convert_file` did.

    Attributes:
        source: name of the layout that the layers were in.
        layers: prefixes of the layers that were converted.
        spec: theirs, if they have the same.
        kept, dropped: names of the other tensors.
    """

    source: str
    layers: list[str]
    spec: AttentionSpec | None
    kept: list[str]
    dropped: list[str]

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
    on_tensor: Callable[[str], None] = lambda name: None,
    **heads: Any,
) -> Converted:
    """Convert every attention layer of a file, tensor by tensor, so that memory holds a few of them at a time.

    Args:
        source_path, target_path: files, or folders of shards; a suffix tells the format of the target.
        source: layout of the layers; what the file's metadata tell when absent.
        target: layout to write.
        prefix: what the names of a layer begin with, without the last dot; `{i}` stands for its number. What the file's
            metadata tell when absent, or else nothing.
        to_prefix: what they shall begin with; the same when absent.
        keep_rest: write all other tensors, too, as they are; else leave them out.
        max_shard_bytes: divide the target into files of about that size.
        on_tensor: called with the name of each tensor before it is written.
        heads: num_heads, num_kv_heads, head_dim, rope_theta: as `convert` takes them.

    Raises:
        OSError: if a file cannot be read or written.
        ValueError: as `convert`, or if there is no such layer, or two tensors would have one name.
    """
    target_layout = find_layout(target)
    with open_tensors(source_path) as file:
        prefix = _prefix_of(file, prefix)
        to_prefix = prefix if to_prefix is None else to_prefix
        if to_prefix.count("{i}") != prefix.count("{i}"):
            raise ValueError(f"to_prefix must have as many {{i}} as prefix, got {to_prefix!r} and {prefix!r}")
        latest = _Latest(file)
        layers = _layers(latest, prefix, _source_of(file, source, source_path), _heads_of(file, heads), source_path)
        of_name = {name: layer for layer in layers for name in layer.sources}
        infos: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        makers: dict[str, Callable[[], np.ndarray]] = {}
        kept, dropped, begun = [], [], set()

        def add(name: str, shape: tuple[int, ...], dtype: np.dtype, make: Callable[[], np.ndarray]) -> None:
            if name in infos:
                raise ValueError(f"names must differ in {target_path}, got {name} twice")
            infos[name], makers[name] = (shape, dtype), make

        for name, info in file.infos.items():
            layer = of_name.get(name)
            if layer is None and keep_rest:
                kept.append(name)
                add(name, info.shape, info.dtype, lambda name=name: latest.read(name))
            elif layer is None:
                dropped.append(name)
            elif layer.prefix not in begun:
                begun.add(layer.prefix)
                to = layer.renamed(to_prefix)
                for short, shape in shapes_in(target_layout, layer.spec).items():
                    add(
                        _join(to, short),
                        shape,
                        layer.dtype,
                        lambda layer=layer, short=short: layer.write(short, target_layout),
                    )

        def read(name: str) -> np.ndarray:
            on_tensor(name)
            return makers[name]()

        specs = list(dict.fromkeys(layer.spec for layer in layers))
        metadata = _metadata(target_layout, specs, to_prefix)
        write_tensors(target_path, infos, read, metadata, max_shard_bytes=max_shard_bytes)
        told = layers[0].layout.name
    return Converted(told, [layer.prefix for layer in layers], specs[0] if len(specs) == 1 else None, kept, dropped)


@dataclass(frozen=True)
class _Layer:
    """One attention layer in a file."""

    file: _Latest
    prefix: str
    numbers: tuple[str, ...]
    layout: Layout
    spec: AttentionSpec
    sources: dict[str, str]  # full names to those after the prefix

    @property
    def names(self) -> list[str]:
        """The canonical names of its weights."""
        return list(weight_shapes(self.spec))

    @property
    def dtype(self) -> np.dtype:
        return self.file.infos[next(iter(self.sources))].dtype

    def renamed(self, prefix: str) -> str:
        for number in self.numbers:
            prefix = prefix.replace("{i}", number, 1)
        return prefix

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
        return self.file.read_finite(_join(self.prefix, name))


class _Latest:
    """Tensors of a file, the last one of which is at hand: q, k and v are read from a packed one in turn."""

    def __init__(self, file: TensorFile) -> None:
        self.infos = file.infos
        self._file = file
        self._name = ""
        self._tensor: np.ndarray | None = None

    def read(self, name: str) -> np.ndarray:
        """A tensor, which is not kept."""
        self._name, self._tensor = "", None  # memory shall not hold two of them
        return self._file.read(name)

    def read_finite(self, name: str) -> np.ndarray:
        """A tensor without NaN and infinities."""
        if name != self._name or self._tensor is None:
            tensor = self.read(name)
            if not is_finite(tensor):
                raise ValueError(f"{name} must be finite, got NaN or infinities")
            self._name, self._tensor = name, tensor
        return self._tensor


def _layers(file: _Latest, prefix: str, layout: Layout, heads: Heads, path: str | os.PathLike[str]) -> list[_Layer]:
    """The attention layers whose names begin with a prefix."""
    pattern = "".join(r"(\d+)" if part == "{i}" else re.escape(part) for part in re.split(r"(\{i\})", prefix))
    expression = re.compile(rf"({pattern})\.(.+)" if prefix else r"()(.+)")
    found: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {}
    for name in file.infos:
        match = expression.fullmatch(name)
        if match and not layout.ignores(match[match.lastindex or 0]):
            numbers = match.groups()[1:-1]
            found.setdefault(match[1], (numbers, {}))[1][name] = match.groups()[-1]
    if not found:
        raise ValueError(
            f"prefix must be that of a layer in {path}, got {prefix!r}; names there are {_some(file.infos)}"
        )
    layers = []
    for concrete, (numbers, sources) in found.items():
        infos = {short: file.infos[name] for name, short in sources.items()}
        try:
            spec = find_spec({short: info.shape for short, info in infos.items()}, layout, **heads)
        except ValueError as error:
            raise ValueError(f"{concrete or path}: {error}") from None
        dtypes = sorted({info.dtype.name for info in infos.values()})
        if len(dtypes) > 1 or not is_floating(next(iter(infos.values())).dtype):
            raise ValueError(f"{concrete or path} must have one floating-point dtype, got {dtypes}")
        layers.append(_Layer(file, concrete, numbers, layout, spec, sources))
    return layers


def _source_of(file: TensorFile, layout: str | None, path: str | os.PathLike[str]) -> Layout:
    told = layout or file.metadata.get("layout") or ("canonical" if "spec" in file.metadata else None)
    if told is None:
        raise ValueError(
            f"the layout of {path} must be told (--from), its metadata do not; `mha-parity inspect` lists what fits"
        )
    return find_layout(told)


def _prefix_of(file: TensorFile, said: str | None) -> str:
    told = file.metadata.get("prefix", "") if _is_ours(file.metadata) else ""
    return told if said is None else said


def _heads_of(file: TensorFile, said: Heads) -> Heads:
    """What was said of the heads, and for the rest what the metadata tell."""
    told: Heads = {}
    if "spec" in file.metadata and _is_ours(file.metadata):
        spec = read_spec(file.path, {**file.metadata, "format": FORMAT})
        told = {name: getattr(spec, name) for name in ("num_heads", "num_kv_heads", "head_dim", "rope_theta")}
    return {name: said.get(name) if said.get(name) is not None else told.get(name) for name in (*told, *said)}


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


def _some(names: Iterable[str], most: int = 6) -> str:
    shown = list(names)
    return ", ".join(shown[:most]) + (", …" if len(shown) > most else "")


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
        heads: the heads, if the shapes tell them, or why not.
        dtype: of their tensors.
    """

    prefix: str
    layers: int
    layout: str
    heads: str
    dtype: str


def find_layers(file: TensorFile, **heads: Any) -> list[Found]:
    """Every attention layer in a file, in every layout that fits its names.

    Args:
        file: an open file.
        heads: num_heads, num_kv_heads, head_dim, rope_theta, as far as they are known.
    """
    found = []
    for layout in LAYOUTS.values():
        groups: dict[str, list[str]] = {}
        prefixes = _prefixes(file.infos, layout)
        for concrete in prefixes:
            groups.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "{i}", concrete), []).append(concrete)
        for prefix, members in groups.items():
            alike: dict[Any, list[str]] = {}  # layers of the same shapes, of which one is looked at
            for concrete in members:
                infos = {name.removeprefix(concrete): i for name, i in file.infos.items() if name.startswith(concrete)}
                alike.setdefault(tuple((name, info.shape, info.dtype) for name, info in infos.items()), []).append(
                    concrete
                )
            for first, *others in alike.values():
                try:
                    spec = _layers(_Latest(file), first, layout, _heads_of(file, heads), "")[0].spec
                    words = f"{spec.num_heads} x {spec.head_dim}, key/value {spec.num_kv_heads}"
                except ValueError as error:
                    words = str(error).removeprefix(f"{first}: ")
                    if "must be those of" in words:
                        continue
                found.append(Found(prefix, 1 + len(others), layout.name, words, file.infos[prefixes[first]].dtype.name))
    return found


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
