"""A layout: how a checkpoint names, shapes and packs the weights of an attention layer, declared tensor by tensor.

Conversion is derived from the declaration, once, in both directions: `from_canonical` and `to_canonical` are inverses,
bit for bit. Nothing is guessed: what a layout does not fix must be said (the number of heads, for one), and what could
be read in two ways is an error that tells both.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import einops
import numpy as np

from mha_spec import AttentionSpec, Rope
from parity.core.arrays import to_numpy_by_name
from parity.core.weights import Weights, check_weights, is_floating, weight_shapes

TILE = 32  # rows and columns in which TTNN keeps tensors
USUAL = (64, 128, 32, 80, 96, 256)  # sizes of heads, told first where more than one could be

OTHERS = ("inputs.*", "dropout_rngs.*")
"""What lies beside weights in any layout: inputs in our own files, and the state of mha_jax's dropout."""

LOGICAL = {"weight": "n h d", "bias": "n h", "out.weight": "e n h", "out.bias": "e"}
"""What a projection is before it is laid out, by axis: n heads, h features of a head, d input width, e output width."""


class DoesNotFit(ValueError):
    """Tensors are not those of a layout, or of no layer with these heads."""


class HeadsUnknown(ValueError):
    """Shapes fit more than one number of heads."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a layout.

    Attributes:
        name: its name, after the prefix of the layer; `{n}` stands for a head where each has a tensor of its own.
        holds: the projections in it: `out`, or letters of `q`, `k` and `v` in their order there, such as `qkv` or `kv`.
        kind: `weight` or `bias`.
        axes: its axes, outermost first, in einops' words: n heads (of all projections in it), h features of a head, d
            input width, e output width. In `(n h) d` the rows are the features of all heads, head by head.
    """

    name: str
    holds: str
    kind: str
    axes: str

    def __post_init__(self) -> None:
        if self.holds != "out" and (not self.holds or {*self.holds} - {*"qkv"} or len({*self.holds}) < len(self.holds)):
            raise ValueError(f"holds must be 'out' or different letters of 'qkv', got holds={self.holds!r}")
        if self.is_per_head and len(self.parts) > 1:
            raise ValueError(f"a tensor of one head must hold one projection, got holds={self.holds!r}")

    @property
    def parts(self) -> list[str]:
        """The canonical names of what is in it."""
        return [f"{projection}_proj.{self.kind}" for projection in (["out"] if self.holds == "out" else self.holds)]

    @property
    def logical(self) -> str:
        """The axes of what is in it, before it is laid out."""
        return LOGICAL[f"out.{self.kind}" if self.holds == "out" else self.kind]

    @property
    def is_per_head(self) -> bool:
        """Whether each head has a tensor of its own."""
        return "{n}" in self.name

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape, given the sizes of the axes."""
        return tuple(math.prod(sizes[axis] for axis in group) for group in self.groups())

    def groups(self) -> list[list[str]]:
        """Its axes, each as the letters it is made of; none for an axis of 1."""
        words = re.findall(r"\(([^)]*)\)|(\S+)", self.axes)
        return [[letter for letter in (inside or outside).split() if letter != "1"] for inside, outside in words]


@dataclass(frozen=True)
class Layout:
    """How a checkpoint holds an attention layer.

    Attributes:
        name: what the command line calls it.
        about: whose it is, in a line.
        source: where that is written down.
        forms: the sets of tensors that it may consist of; the first that can hold a layer is written.
        grouped: in a packed tensor each key/value head follows the query heads that it serves: q q k v, q q k v; else
            all query heads come first, then all key heads, then all value heads.
        rope: how features are paired where queries and keys are turned by position: `half`, (i, i + H/2), as in
            canonical weights, or `interleaved`, (2 i, 2 i + 1).
        padded: heads are padded to whole tiles, with RoPE each half of its own.
        rules: what a layer must be for this layout to hold it; keys of `RULES`.
        ignored: names (with wildcards) under the prefix of a layer that are no weights, or none of attention's.
        prefixes: where whole checkpoints have such layers; `{i}` stands for a layer.
    """

    name: str
    about: str
    source: str
    forms: tuple[tuple[Tensor, ...], ...]
    grouped: bool = False
    rope: str = "half"
    padded: bool = False
    rules: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all forms."""
        return list(dict.fromkeys(tensor for form in self.forms for tensor in form))

    def ignores(self, name: str) -> bool:
        """Whether a name under the prefix of a layer is no weight."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in (*OTHERS, *self.ignored))

    def to_dict(self) -> dict[str, Any]:
        """The layout as JSON takes it."""
        return asdict(self)


@dataclass(frozen=True)
class Rule:
    """What a layout may ask of a layer: in words, of which fields, and whether it holds."""

    words: str
    fields: tuple[str, ...]
    holds: Callable[[AttentionSpec], bool]


RULES: dict[str, Rule] = {
    "no groups": Rule(
        "num_kv_heads must equal num_heads",
        ("num_heads", "num_kv_heads"),
        lambda spec: spec.num_kv_heads == spec.num_heads,
    ),
    "one width": Rule("d_kv must equal d_in", ("d_in", "d_kv"), lambda spec: spec.d_kv == spec.d_in),
    "square": Rule(
        "d_in, d_model and num_heads * head_dim must be equal",
        ("d_in", "d_model", "num_heads", "head_dim"),
        lambda spec: spec.d_in == spec.d_model == spec.q_width,
    ),
    "out_proj": Rule("there must be an out_proj", ("out_proj",), lambda spec: spec.out_proj),
    "no out_proj": Rule("there must be no out_proj", ("out_proj",), lambda spec: not spec.out_proj),
    "biases or none": Rule(
        "all projections must have a bias, or none",
        ("qkv_bias", "out_bias"),
        lambda spec: not spec.out_proj or spec.qkv_bias == spec.out_bias,
    ),
    "biases": Rule(
        "all projections must have a bias", ("qkv_bias", "out_bias"), lambda spec: spec.qkv_bias and spec.out_bias
    ),
    "out bias": Rule("out_proj must have a bias", ("out_bias",), lambda spec: spec.out_bias),
    "even": Rule("head_dim must be even", ("head_dim",), lambda spec: spec.head_dim % 2 == 0),
}
"""What layouts may ask of a layer."""


def _broken(spec: AttentionSpec, layout: Layout) -> str:
    """Which rules of a layout a layer breaks, or nothing."""
    broken = [rule for rule in map(RULES.__getitem__, layout.rules) if not rule.holds(spec)]
    fields = dict.fromkeys(field for rule in broken for field in rule.fields)
    got = ", ".join(f"{field}={getattr(spec, field)}" for field in fields)
    return f"{'; '.join(rule.words for rule in broken)}, got {got}" if broken else ""


# ---- Canonical -> layout ---------------------------------------------------------------------------------------------


def from_canonical(weights: Mapping[str, Any], spec: AttentionSpec, layout: Layout) -> Weights:
    """The tensors of a layout that hold canonical weights.

    Raises:
        TypeError, ValueError: if the weights are not those of the spec, or the layout cannot hold such a layer.
    """
    held = check_weights(weights, spec)
    return {name: lay_out(name, held.__getitem__, spec, layout) for name in shapes_in(layout, spec)}


def shapes_in(layout: Layout, spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors in which a layout holds a layer.

    Raises:
        ValueError: if it cannot hold such a layer.
    """
    return _shapes_of([tensor for tensor in _form_for(spec, layout) if _is_in(tensor, spec)], spec, layout)


def lay_out(name: str, read: Callable[[str], np.ndarray], spec: AttentionSpec, layout: Layout) -> np.ndarray:
    """One tensor of a layout. Memory holds it and one canonical weight at a time.

    Args:
        name: of the tensor; one of `shapes_in(layout, spec)`.
        read: gives a canonical weight by its name.
        spec: the layer.
        layout: the layout.
    """
    tensor = next(tensor for tensor in _form_for(spec, layout) if _matches(tensor.name, [name]))
    laid_out = np.empty(0)
    for part in tensor.parts:
        weight = read(part)
        if laid_out.size == 0:
            laid_out = np.zeros(shapes_in(layout, spec)[name], weight.dtype)
        view = _features(_heads(_bits(laid_out), part, tensor, spec, layout), part, spec, layout)
        source = _bits(weight)
        if tensor.is_per_head:
            source = source.reshape(-1, spec.head_dim, *weight.shape[1:])[_head_of(tensor.name, name)]
        view[...] = source.reshape(view.shape)
    return laid_out


def _is_in(tensor: Tensor, spec: AttentionSpec) -> bool:
    """Whether a layer has what the tensor holds."""
    return tensor.kind == "weight" or (spec.out_bias if tensor.holds == "out" else spec.qkv_bias)


def _form_for(spec: AttentionSpec, layout: Layout) -> tuple[Tensor, ...]:
    if broken := _broken(spec, layout):
        raise ValueError(f"{layout.name} cannot hold this layer: {broken}")
    held = {f"{name}_proj.weight" for name in ("q", "k", "v", *(["out"] if spec.out_proj else []))}
    for form in layout.forms:
        packs_two_widths = any({"q"} < {*tensor.holds} and tensor.kind == "weight" for tensor in form)
        if packs_two_widths and spec.d_kv != spec.d_in:
            continue
        if held == {part for tensor in form if tensor.kind == "weight" for part in tensor.parts}:
            return form
    raise ValueError(f"{layout.name} cannot hold this layer: it has no form for {sorted(held)}")


# ---- Layout -> canonical ---------------------------------------------------------------------------------------------


def to_canonical(
    tensors: Mapping[str, Any],
    layout: Layout,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rope_theta: float | None = None,
) -> tuple[Weights, AttentionSpec]:
    """Canonical weights, and the specification of the layer, from the tensors of a layout.

    Args:
        tensors: arrays by name, of any framework, without the prefix of the layer; in nested mappings, too, as Flax
            has them.
        layout: theirs.
        num_heads, num_kv_heads, head_dim: of the layer, where the shapes do not tell.
        rope_theta: base of the RoPE frequencies, or None for no RoPE; no checkpoint's tensors tell.

    Raises:
        ValueError: if names are missing or unknown, shapes do not fit, or the heads can be read in more than one way.
    """
    tensors = to_numpy_by_name(tensors)
    form = find_form(tensors, layout)
    held = _names_of(list(form), tensors)
    for name in held:
        if not is_floating(tensors[name].dtype):
            raise TypeError(f"{name} must be a floating-point array, got {name}.dtype={tensors[name].dtype}")
    dtypes = sorted({tensors[name].dtype.name for name in held})
    if len(dtypes) > 1:
        raise TypeError(f"weights must have one dtype, got {dtypes}")
    shapes = {name: tensors[name].shape for name in held}
    spec = find_spec(
        shapes, layout, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope_theta=rope_theta
    )
    read = tensors.__getitem__
    weights = {name: np.array(read_out(name, read, form, spec, layout), order="C") for name in weight_shapes(spec)}
    check_weights(weights, spec)
    return weights, spec


def read_out(
    name: str, read: Callable[[str], np.ndarray], form: tuple[Tensor, ...], spec: AttentionSpec, layout: Layout
) -> np.ndarray:
    """One canonical weight; it may share the memory of the tensor that holds it.

    Args:
        name: its canonical name.
        read: gives a tensor of the layout by its name.
        form: the form of the layout that the tensors are in.
        spec: the layer.
        layout: the layout.
    """
    tensor = next(tensor for tensor in form if name in tensor.parts)
    names = [tensor.name]
    if tensor.is_per_head:
        names = [tensor.name.format(n=n) for n in range(_sizes(tensor, spec, layout)["n"])]
    arrays = [read(each) for each in names]
    heads = [_heads(_bits(array), name, tensor, spec, layout) for array in arrays]
    views = [_features(each, name, spec, layout) for each in heads]
    if layout.padded and any(np.count_nonzero(a) != np.count_nonzero(b) for a, b in zip(heads, views, strict=True)):
        raise ValueError(f"features that pad the heads of {name} must be 0, got others")
    weight = np.stack(views) if tensor.is_per_head else views[0]
    return weight.reshape(weight_shapes(spec)[name]).view(arrays[0].dtype)


def shorten(names: Iterable[str], most: int = 8) -> str:
    """Names as a list, of which no more than some are shown."""
    names = list(names)
    shown = ", ".join(map(repr, names[:most]))
    return f"[{shown}]" if len(names) <= most else f"[{shown}, … {len(names) - most} more]"


def find_form(names: Iterable[str], layout: Layout) -> tuple[Tensor, ...]:
    """The form of a layout that these names are.

    Raises:
        ValueError: if they are none, or more than one.
    """
    names = set(names)
    required = [[tensor.name for tensor in form if tensor.kind == "weight"] for form in layout.forms]
    missing = [[name for name in wanted if not _matches(name, names)] for wanted in required]
    found = [form for form, absent in zip(layout.forms, missing, strict=True) if not absent]
    if len(found) > 1:
        found = [form for form in found if not any(set(form) < set(other) for other in found)]  # without an out_proj
    if len(found) != 1:
        likeliest = max(range(len(missing)), key=lambda i: len(required[i]) - len(missing[i]))
        what = "more than one of its forms" if found else f"missing {missing[likeliest]}"
        raise DoesNotFit(f"tensors must be those of {layout.name}, got {what} in {shorten(sorted(names))}")
    stacks = [(tensor.name, _matches(tensor.name, names)) for tensor in found[0] if tensor.is_per_head]
    count = max((len(heads) for _, heads in stacks), default=0)
    gaps = [
        name for pattern, heads in stacks if heads for n in range(count) if (name := pattern.format(n=n)) not in heads
    ]
    if gaps:
        raise DoesNotFit(
            f"tensors must be those of {layout.name}, got missing {shorten(gaps)} in {shorten(sorted(names))}"
        )
    known = set().union(*(_matches(tensor.name, names) for tensor in found[0]))
    unknown = sorted(name for name in names - known if not layout.ignores(name))
    if unknown:
        raise DoesNotFit(f"tensors must be those of {layout.name}, got unknown names {shorten(unknown)}")
    return found[0]


def stack_size(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> int | None:
    """How many layers are stacked on a leading axis, as `scan` and `vmap` keep them; None where it is one layer.

    Nothing is guessed: every tensor of a layout has a number of axes, and those of a stack have one more.

    Raises:
        ValueError: if the tensors are none of the layout, or not all of one stack.
    """
    form = find_form(shapes, layout)
    axes = {name: len(tensor.groups()) for tensor in form for name in _matches(tensor.name, shapes)}
    if any(len(shapes[name]) != count + 1 for name, count in axes.items()):
        return None
    sizes = sorted({shapes[name][0] for name in axes})
    if len(sizes) > 1 or sizes == [0]:
        raise ValueError(f"stacked tensors must be of equally many layers, at least 1, got {sizes}")
    return sizes[0]


def find_spec(
    shapes: Mapping[str, tuple[int, ...]],
    layout: Layout,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rope_theta: float | None = None,
) -> AttentionSpec:
    """The specification of a layer, from the names and shapes of its tensors and what is said of it.

    Raises:
        ValueError: if there is none, or more than one.
    """
    said = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    said = {name: value for name, value in said.items() if value is not None}
    for name, value in said.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be an integer, got {name}={value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {name}={value}")
    form = find_form(shapes, layout)
    present = [tensor for tensor in form if _matches(tensor.name, shapes)]
    biases = {part for tensor in present if tensor.kind == "bias" for part in tensor.parts}
    of_qkv = sorted(biases - {"out_proj.bias"})
    if len(of_qkv) not in (0, 3):
        raise ValueError(f"q_proj, k_proj and v_proj must all have a bias, or none, got {of_qkv}")
    told = {name: shapes[name] for name in _names_of(present, shapes)}
    axes = {name: len(tensor.groups()) for tensor in present for name in _matches(tensor.name, shapes)}
    if any(len(shape) != axes[name] for name, shape in told.items()):
        raise DoesNotFit(f"shapes must be those of a layer in {layout.name}, got {told}")
    widths = _widths(present, shapes)
    fitting, reasons = [], []
    for heads, kv_heads, features in _head_counts(present, shapes, layout, num_heads, num_kv_heads, head_dim):
        try:
            spec = AttentionSpec(
                d_model=widths.get("out", heads * features),
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=features,
                d_in=widths["q"],
                d_kv=widths["k"],
                qkv_bias=bool(of_qkv),
                out_bias="out_proj.bias" in biases,
                out_proj="out" in widths,
                rope=None if rope_theta is None else Rope(rope_theta),
            )
        except ValueError as error:
            reasons.append(str(error))
            continue
        if _shapes_of(present, spec, layout) != told:
            continue
        if broken := _broken(spec, layout):
            reasons.append(broken)
        else:
            fitting.append(spec)
    if not fitting:
        if said and not reasons and (rule := _head_rule(present, shapes, layout)):
            got = " and ".join(f"{name}={value}" for name, value in said.items())
            raise DoesNotFit(f"{rule} in {layout.name}, got {got}")
        raise DoesNotFit(
            f"shapes must be those of a layer in {layout.name}{f' ({reasons[0]})' if reasons else ''}, got {told}"
        )
    if len(fitting) > 1:
        fitting.sort(key=lambda s: (USUAL.index(s.head_dim) if s.head_dim in USUAL else len(USUAL), -s.head_dim))
        options = ", ".join(f"{s.num_heads} x {s.head_dim} (key/value {s.num_kv_heads})" for s in fitting[:4])
        raise HeadsUnknown(
            f"the heads must be given for {layout.name}, whose shapes fit {options}"
            f"{', …' if len(fitting) > 4 else ''}; {_deciding(fitting)} decides"
        )
    return fitting[0]


def _head_rule(present: list[Tensor], shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> str:
    """What the heads must be for a layer of these shapes, or nothing if no heads would do."""
    size = "head_dim in whole tiles" if layout.padded else "head_dim"
    rows: dict[str, int] = {}
    for tensor in present:
        if tensor.kind == "weight" and tensor.holds != "out":
            rows.setdefault(_head_count(tensor), _rows_of(tensor, shapes))
    try:
        find_spec(shapes, layout)
    except HeadsUnknown:
        pass
    except ValueError:
        return ""
    (first, count), *others = rows.items()
    return f"{first} * {size} must be {count}" + "".join(f", and {heads} * {size} {n}" for heads, n in others)


def _head_count(tensor: Tensor) -> str:
    """How many heads a tensor holds, in terms of a layer's numbers of them."""
    kv = {0: "", 1: "num_kv_heads", 2: "2 * num_kv_heads"}[len({*tensor.holds} - {"q"})]
    if "q" not in tensor.holds:
        return kv
    return f"(num_heads + {kv})" if kv else "num_heads"


def _rows_of(tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Features of all heads that a tensor holds, padded ones too; of each head's own tensors together."""
    names = _matches(tensor.name, shapes)
    groups = zip(shapes[min(names)], tensor.groups(), strict=False)
    return len(names) * math.prod(size for size, group in groups if {"n", "h"} & {*group})


def _deciding(specs: list[AttentionSpec]) -> str:
    """The flags of the command line that tell specifications apart: as few as can."""
    names = [name for name in ("num_heads", "num_kv_heads", "head_dim") if len({getattr(s, name) for s in specs}) > 1]
    subsets = (some for count in range(1, len(names) + 1) for some in itertools.combinations(names, count))
    enough = [some for some in subsets if len({tuple(getattr(s, name) for name in some) for s in specs}) == len(specs)]
    flags = {name: f"--{name.replace('_', '-')}" for name in names}
    return " or ".join(" with ".join(map(flags.__getitem__, some)) for some in enough if len(some) == len(enough[0]))


def _head_counts(
    present: list[Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    layout: Layout,
    num_heads: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
) -> Iterator[tuple[int, int, int]]:
    """Every (num_heads, num_kv_heads, head_dim) that agrees with what was said and could have these queries."""
    queries = next(tensor for tensor in present if tensor.kind == "weight" and "q" in tensor.holds)
    rows, beside = _rows_of(queries, shapes), len(queries.holds) - 1  # keys, values or both are packed with the queries
    dims = range(1, rows + 1) if head_dim is None else [head_dim] * (head_dim > 0)
    for features in dims:
        padded = {_padded(features, rope) for rope in (False, True)} if layout.padded else {features}
        for heads in {rows // width for width in padded if rows % width == 0}:
            for k in range(1, (heads - 1) // beside + 1 if beside else heads + 1):
                n = heads - beside * k
                if n % k == 0 and num_heads in (None, n) and num_kv_heads in (None, k):
                    yield n, k, features


def _widths(present: list[Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Input widths of the projections, and under `out` the output width."""
    widths: dict[str, int] = {}
    for tensor in present:
        if tensor.kind != "weight":
            continue
        shape = shapes[min(_matches(tensor.name, shapes))]
        letter = "e" if tensor.holds == "out" else "d"
        for size, group in zip(shape, tensor.groups(), strict=False):
            if group == [letter]:
                widths |= dict.fromkeys(["out"] if letter == "e" else tensor.holds, size)
    return widths


def _shapes_of(present: list[Tensor], spec: AttentionSpec, layout: Layout) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for tensor in present:
        sizes = _sizes(tensor, spec, layout)
        names = [tensor.name.format(n=n) for n in range(sizes["n"])] if tensor.is_per_head else [tensor.name]
        shapes |= dict.fromkeys(names, tensor.shape(sizes))
    return shapes


def _names_of(present: list[Tensor], names: Iterable[str]) -> list[str]:
    return [name for tensor in present for name in _matches(tensor.name, names)]


def _sizes(tensor: Tensor, spec: AttentionSpec, layout: Layout) -> dict[str, int]:
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads, "out": spec.num_heads}
    total = heads["out"] if tensor.holds == "out" else sum(heads[projection] for projection in tensor.holds)
    features = _padded(spec.head_dim, spec.rope is not None) if layout.padded else spec.head_dim
    return {"n": total, "h": features, "d": spec.d_in if "q" in tensor.holds else spec.d_kv, "e": spec.d_model}


# ---- Views -----------------------------------------------------------------------------------------------------------
# A canonical weight in a tensor is a view of it, whose elements, in C order, are those of the weight. To write through
# the view is one direction of a conversion, to read it the other.


def _heads(array: np.ndarray, name: str, tensor: Tensor, spec: AttentionSpec, layout: Layout) -> np.ndarray:
    """The heads of one canonical weight in a tensor, with what pads them."""
    sizes = _sizes(tensor, spec, layout)
    axes = tensor.logical.replace("n ", "") if tensor.is_per_head else tensor.logical
    known = {axis: sizes[axis] for axis in axes.split() if axis in "nh"}
    heads = einops.rearrange(array, f"{tensor.axes} -> {axes}", **known)
    if len(tensor.parts) == 1:
        return heads
    which = tensor.parts.index(name)
    counts = [spec.num_heads if projection == "q" else spec.num_kv_heads for projection in tensor.holds]
    if layout.grouped:  # the same division, of each group by itself
        heads, counts = _split(heads, 0, spec.num_kv_heads, -1), [count // spec.num_kv_heads for count in counts]
    begin, end = sum(counts[:which]), sum(counts[: which + 1])
    return heads[:, begin:end] if layout.grouped else heads[begin:end]


def _features(heads: np.ndarray, name: str, spec: AttentionSpec, layout: Layout) -> np.ndarray:
    """The features of heads in canonical order, without what pads them."""
    if name == "out_proj.bias":
        return heads
    axis = heads.ndim - (2 if name in ("q_proj.weight", "k_proj.weight", "v_proj.weight") else 1)
    if layout.padded and spec.rope is not None:
        return _first(_split(heads, axis, 2, -1), axis + 1, spec.head_dim // 2)
    if layout.padded:
        return _first(heads, axis, spec.head_dim)
    if layout.rope == "interleaved" and name[0] in "qk":
        return _split(heads, axis, -1, 2).swapaxes(axis, axis + 1)
    return heads


def _split(x: np.ndarray, axis: int, outer: int, inner: int) -> np.ndarray:
    """A view in which an axis is two; -1 stands for what is left."""
    return x.reshape(*x.shape[:axis], outer, inner, *x.shape[axis + 1 :])


def _first(x: np.ndarray, axis: int, count: int) -> np.ndarray:
    return x[(slice(None),) * axis + (slice(count),)]


def _bits(x: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers: NumPy is slow with dtypes that are not its own."""
    return x.view(f"u{x.dtype.itemsize}")


def _padded(head_dim: int, rope: bool) -> int:
    """Features of a head in whole tiles; with RoPE each half has its own."""
    return 2 * _padded(-(-head_dim // 2), False) if rope else -(-head_dim // TILE) * TILE


def _head_of(pattern: str, name: str) -> int:
    """Which head a name stands for."""
    before, _, after = pattern.partition("{n}")
    return int(name.removeprefix(before).removesuffix(after))


def _matches(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that a tensor's name stands for: itself, or one for each head."""
    if "{n}" not in pattern:
        return {pattern} & set(names)
    expression = re.compile(re.escape(pattern).replace(r"\{n\}", r"(0|[1-9]\d*)"))
    return {name for name in names if expression.fullmatch(name)}
