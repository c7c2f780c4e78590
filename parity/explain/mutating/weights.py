"""The projections of a call in canonical form, whatever their names, axes and packing.

The names, axes and orders of heads come from the layouts that `parity convert` knows, and the
usual names of parameters. If more than one order fits the names and shapes, `trials` calls the
attention to find out which one it computes with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.conformance.signatures import (
    BIASES,
    HEAD_DIMS,
    HEADS,
    KV_HEADS,
    LEAVES,
    PACKED,
    PROJECTIONS,
    library_of,
)
from parity.explain.mutating.calls import Call, Function
from parity.explain.mutating.carriers import Carrier, LeafPath, carrier_of
from parity.explain.mutating.compare import Unfit
from parity.measure.core.orders import reordered
from parity.measure.text import some_of
from parity.port.conversion.layouts import LAYOUTS, Layout
from parity.port.conversion.layouts.layout import Tensor
from parity.port.conversion.layouts.placement import Placement

Arrays = dict[str, Any]
"""Arrays by canonical name, such as `q_proj.weight`."""

# ---- Names ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArrayRole:
    """The projections in an array, as in `Tensor.holds`, and its kind, by its name."""

    holds: str
    kind: str

    def __str__(self) -> str:
        return f"{self.holds}_proj.{self.kind}"


OUT_WEIGHT = ArrayRole("out", "weight")


def roles_by_name() -> dict[str, ArrayRole]:
    """Return the roles of names in lower case, such as `q_proj.weight`, `wq` or
    `self.query.kernel`: the names of layouts, and usual ones.
    """
    roles: dict[str, ArrayRole] = {}
    for layout in LAYOUTS.values():
        for tensor in layout.tensors:
            if not tensor.is_whole and not tensor.is_per_head:
                roles.setdefault(tensor.name.lower(), ArrayRole(tensor.holds, tensor.kind))
    for projection, names in {**PROJECTIONS, "qkv_proj": PACKED}.items():
        holds = projection.removesuffix("_proj")
        for name in names:
            roles.setdefault(name, ArrayRole(holds, "weight"))
            for leaf, kind in LEAVES.items():
                # A usual name says more than a layout whose keys also stand for values.
                roles[f"{name}.{leaf}"] = ArrayRole(holds, kind)
    for projection, names in BIASES.items():
        bias = ArrayRole(projection.removesuffix("_proj"), "bias")
        for name in names:
            roles.setdefault(name, bias)
    return roles


MOST_WORDS = 3
"""The most words of a name that has a role, as in `qkv_linear.wq.weight`."""


def _role_of(words: list[str], roles: Mapping[str, ArrayRole]) -> tuple[ArrayRole, int] | None:
    """Return the role of a path of names, and how many of them the role needs; None for others."""
    for count in range(min(MOST_WORDS, len(words)), 0, -1):
        role = roles.get(".".join(words[-count:]).lower())
        if role is not None:
            return role, count
    return None


@dataclass(frozen=True)
class Named:
    """The arrays of one attention layer.

    Attributes:
        paths: where the carrier has them.
        names: the last words of their paths, in lower case, as layouts have them.
    """

    paths: dict[ArrayRole, LeafPath]
    names: dict[ArrayRole, str]

    @property
    def has_packed(self) -> bool:
        """Return whether an array has several projections."""
        return any(role.holds != "out" and len(role.holds) > 1 for role in self.paths)


def named_in(carrier: Carrier) -> Named:
    """Return the arrays of the only attention layer in a carrier.

    Raises:
        Unfit: if there is none, or more than one.
    """
    layers = _layers_in(carrier)
    attentions = [prefix for prefix, layer in layers.items() if _is_attention(layer)]
    if not attentions:
        names = [".".join(map(str, path)) for path in carrier.leaves]
        listed = some_of(names, 6) or "it has none"
        raise Unfit(f"no projections of q and k are known among its weights: {listed}")
    if len(attentions) > 1:
        listed = ", ".join(".".join(prefix) or "itself" for prefix in attentions[:4])
        count = len(attentions)
        raise Unfit(f"it holds {count} attention layers, {listed}: select the class of one")
    return _with_output(attentions[0], layers)


def _layers_in(carrier: Carrier) -> dict[tuple[str, ...], Named]:
    """Return the arrays that have roles, by the names before the names of their roles.

    Raises:
        Unfit: if two arrays of a layer have the same role.
    """
    layers: dict[tuple[str, ...], Named] = {}
    # Not cached, because layouts may be registered at any time.
    roles = roles_by_name()
    for path in carrier.leaves:
        # Keys of a mapping may be dotted names.
        words = ".".join(map(str, path)).split(".")
        matched = _role_of(words, roles)
        if matched is None:
            continue
        role, count = matched
        layer = layers.setdefault(tuple(words[:-count]), Named({}, {}))
        if role in layer.paths:
            first_name = ".".join(map(str, layer.paths[role]))
            second_name = ".".join(map(str, path))
            raise Unfit(f"two of its weights may be {role}: {first_name} and {second_name}")
        layer.paths[role] = path
        layer.names[role] = ".".join(words[-count:]).lower()
    return layers


def _is_attention(layer: Named) -> bool:
    """Return whether arrays project queries and keys."""
    letters: set[str] = set()
    for role in layer.paths:
        if role.kind == "weight":
            letters.update(role.holds)
    return {"q", "k"} <= letters


def _with_output(prefix: tuple[str, ...], layers: Mapping[tuple[str, ...], Named]) -> Named:
    """Return a layer with its output projection, which BERT has next to it: `attention.self.query`
    and `attention.output.dense`.
    """
    layer = layers[prefix]
    if OUT_WEIGHT in layer.paths or not prefix:
        return layer
    parent = prefix[:-1]
    outputs = []
    for other_prefix, other_layer in layers.items():
        is_below_parent = other_prefix[: len(parent)] == parent
        if other_prefix != prefix and is_below_parent and OUT_WEIGHT in other_layer.paths:
            outputs.append(other_layer)
    if len(outputs) != 1:
        return layer
    (output,) = outputs
    paths = dict(layer.paths)
    names = dict(layer.names)
    for role, path in output.paths.items():
        if role.holds == "out":
            paths[role] = path
            names[role] = output.names[role]
    return Named(paths, names)


# ---- Heads ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """Sizes that a module, its configuration or the call states; None if nothing states them."""

    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None


def heads_of(call: Call, named: Named) -> Heads:
    """Return the heads as the module that has the projections states them, else a module around it,
    else the call.
    """
    sources = []
    for module in reversed(_modules_around(call, _path_of_queries(named))):
        sources += [module, getattr(module, "config", None)]
    return Heads(
        num_heads=_number(call, sources, HEADS),
        num_kv_heads=_number(call, sources, KV_HEADS),
        head_dim=_number(call, sources, HEAD_DIMS),
    )


def _path_of_queries(named: Named) -> LeafPath:
    """Return the path of the weight that projects queries."""
    for role, path in named.paths.items():
        if role.kind == "weight" and "q" in role.holds:
            return path
    raise KeyError("q_proj.weight")


def _modules_around(call: Call, path: LeafPath) -> list[Any]:
    """Return the modules that lead to an array, from the outermost one."""
    if call.owner is None:
        return []
    modules = [call.owner]
    for word in path[:-1]:
        if isinstance(word, str) and hasattr(modules[-1], word):
            modules.append(getattr(modules[-1], word))
    return modules


def _number(call: Call, sources: Iterable[Any], names: Iterable[str]) -> int | None:
    """Return the first positive number under one of some names: in the sources, or in the call."""
    for source in sources:
        for name in names:
            number = getattr(source, name, None)
            if isinstance(number, int) and number > 0:
                return number
    for name in names:
        number = call.named(name)
        if isinstance(number, int) and number > 0:
            return number
    return None


# ---- Orders --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrangement:
    """The axes of each array, and the order of heads in a packed one.

    Attributes:
        tensors: the axes of each array, by its role.
        grouped, blocks: as in `Layout`; False and 1 if no array is packed.
    """

    tensors: tuple[tuple[ArrayRole, Tensor], ...]
    grouped: bool
    blocks: int


@dataclass(frozen=True)
class Order:
    """Where the elements of canonical weights lie in the arrays of a call.

    Attributes:
        spec: heads and sizes.
        heads_are_known: whether anything states the heads; otherwise `spec` has the fewest that
            fit.
        arrays: by canonical name, the role of the array and the elements in it, flat, in the shape
            of the canonical weight.
        parts: by role, the canonical names in the array, and the position of each of its elements
            in these weights, flat and joined.
    """

    spec: AttentionSpec
    heads_are_known: bool
    arrays: dict[str, tuple[ArrayRole, np.ndarray]]
    parts: dict[ArrayRole, tuple[list[str], np.ndarray]]

    def is_same(self, other: Order) -> bool:
        """Return whether both read the same weights."""
        if self.arrays.keys() != other.arrays.keys():
            return False
        for name, (role, indices) in self.arrays.items():
            other_role, other_indices = other.arrays[name]
            if role != other_role or not np.array_equal(indices, other_indices):
                return False
        return True


Shapes = dict[ArrayRole, tuple[int, ...]]


def orders_of(call: Call, carrier: Carrier, named: Named) -> list[Order]:
    """Return the orders that fit the names and shapes, the orders of layouts first.

    Raises:
        Unfit: if none does.
    """
    heads = heads_of(call, named)
    shapes = {role: tuple(carrier.leaves[path].shape) for role, path in named.paths.items()}
    arrangements = [*_of_layouts(named, shapes), *_of_usual_axes(call, named, shapes)]
    orders: list[Order] = []
    # Many layouts arrange their arrays alike.
    for arrangement in dict.fromkeys(arrangements):
        order = _order(arrangement, tuple(shapes.values()), heads)
        if order is not None and not any(map(order.is_same, orders)):
            orders.append(order)
    if orders:
        return orders
    listed = ", ".join(f"{role} {shape}" for role, shape in shapes.items())
    stated = ", ".join(f"{name}={number}" for name, number in vars(heads).items() if number)
    raise Unfit(f"its projections have shapes that no known order explains: {listed}; {stated}")


def _arrangement(
    named: Named, tensors: Mapping[ArrayRole, Tensor], *, grouped: bool, blocks: int
) -> Arrangement:
    """Return an arrangement without what only its layout has: names, and an order of packed heads
    if none are packed.
    """
    if not named.has_packed:
        grouped = False
        blocks = 1
    by_role = [(role, replace(tensor, name=str(role))) for role, tensor in tensors.items()]
    return Arrangement(tuple(by_role), grouped, blocks)


def _of_layouts(named: Named, shapes: Shapes) -> Iterator[Arrangement]:
    """Yield the arrangements of the layouts that have all these names, with as many axes."""
    for layout in LAYOUTS.values():
        if layout.padded:
            continue
        for form in layout.forms:
            tensors = _tensors_of(form, named, shapes)
            if tensors is not None:
                yield _arrangement(named, tensors, grouped=layout.grouped, blocks=layout.blocks)


def _tensors_of(
    form: Iterable[Tensor], named: Named, shapes: Shapes
) -> dict[ArrayRole, Tensor] | None:
    """Return a layout's tensors by the roles of the arrays that have their names; None if an array
    has no such tensor, or one of other projections or a different number of axes.
    """
    by_name = {tensor.name.lower(): tensor for tensor in form}
    tensors = {}
    for role, name in named.names.items():
        tensor = by_name.get(name)
        if tensor is None or tensor.is_shared:
            return None
        if {*tensor.holds} != {*role.holds} or len(tensor.groups) != len(shapes[role]):
            return None
        tensors[role] = tensor
    return tensors


def _of_usual_axes(call: Call, named: Named, shapes: Shapes) -> Iterator[Arrangement]:
    """Yield arrangements by usual axes: kernels are (out, in), or (in, out), also with an axis of
    heads; packed heads lie q after q, or head by head.
    """
    for out_first in _possible_axes(call, named, shapes):
        tensors = {}
        for role, shape in shapes.items():
            axes = _usual_axes(role, len(shape), out_first=out_first)
            tensors[role] = Tensor(named.names[role], role.holds, role.kind, axes)
        if any(len(tensor.groups) != len(shapes[role]) for role, tensor in tensors.items()):
            continue
        for grouped in (False, True):
            yield _arrangement(named, tensors, grouped=grouped, blocks=1)


def _possible_axes(call: Call, named: Named, shapes: Shapes) -> tuple[bool, ...]:
    """Return the values that `out_first` of `_usual_axes` may have, likely ones first."""
    library = library_of(call.owner)
    names = {named.names[role] for role in shapes if role.kind == "weight"}
    # Linear layers of Equinox and torch, and torch's packed kernel, are (out, in).
    if library == "equinox" or "in_proj_weight" in names:
        return (True,)
    if library == "torch" and _are_linear(call, named):
        return (True,)
    # Kernels of Flax are (in, out).
    if call.view.framework == "jax" and all(name.endswith(".kernel") for name in names):
        return (False,)
    return True, False


def _are_linear(call: Call, named: Named) -> bool:
    """Return whether all projections of a torch module are of `nn.Linear`."""
    from torch import nn

    for role, path in named.paths.items():
        if role.kind != "weight":
            continue
        if not isinstance(call.owner.get_submodule(".".join(path[:-1])), nn.Linear):
            return False
    return True


def _usual_axes(role: ArrayRole, ndim: int, *, out_first: bool) -> str:
    """Return axes in the notation of `Tensor.axes`.

    Args:
        role: the projections in the array, and its kind.
        ndim: its number of axes.
        out_first: whether kernels of two axes are (out, in), not (in, out).
    """
    is_output = role.holds == "out"
    if role.kind == "bias":
        if is_output:
            return "e"
        if ndim == 2:
            return "n h"
        return "(n h)"
    if ndim == 3:
        if is_output:
            return "n h e"
        return "d n h"
    if is_output:
        if out_first:
            return "e (n h)"
        return "(n h) e"
    if out_first:
        return "(n h) d"
    return "d (n h)"


# Each call of a user's attention needs the few orders of its only layer, whose indices are as
# large as the weights.
@lru_cache(maxsize=8)
def _order(
    arrangement: Arrangement, all_shapes: tuple[tuple[int, ...], ...], heads: Heads
) -> Order | None:
    """Return where an arrangement has the canonical weights; None if the shapes do not fit it."""
    roles = [role for role, _ in arrangement.tensors]
    shapes = dict(zip(roles, all_shapes, strict=True))
    heads = _with_axis_of_heads(heads, arrangement, shapes)
    spec = _spec_of(arrangement, shapes, heads)
    if spec is None:
        return None
    placement = _placement(arrangement, shapes, spec)
    if placement is None:
        return None
    indices = {}
    for role, shape in shapes.items():
        indices[str(role)] = np.arange(math.prod(shape)).reshape(shape)
    arrays = {}
    parts = {}
    for role, tensor in arrangement.tensors:
        for name in tensor.parts:
            arrays[name] = role, placement.read_out(name, indices.__getitem__)
        # The parts of an array together have each of its elements once.
        joined = np.concatenate([arrays[name][1].reshape(-1) for name in tensor.parts])
        inverse = np.empty_like(joined)
        inverse[joined] = np.arange(len(joined))
        parts[role] = tensor.parts, inverse
    heads_are_known = heads.num_heads is not None or heads.head_dim is not None
    return Order(spec, heads_are_known, arrays, parts)


def _placement(arrangement: Arrangement, shapes: Shapes, spec: AttentionSpec) -> Placement | None:
    """Return the placement of canonical weights in arrays; None if they have other shapes."""
    # Each block has its share of the heads.
    if spec.num_kv_heads % arrangement.blocks:
        return None
    tensors = tuple(tensor for _, tensor in arrangement.tensors)
    layout = Layout(
        "stored", "", "", (tensors,), grouped=arrangement.grouped, blocks=arrangement.blocks
    )
    try:
        placement = Placement(layout, spec, tensors)
        has_shapes = placement.shapes == {str(role): shape for role, shape in shapes.items()}
    except ValueError:
        return None
    if not has_shapes:
        return None
    return placement


def _with_axis_of_heads(heads: Heads, arrangement: Arrangement, shapes: Shapes) -> Heads:
    """Return the heads with the size of the axis of heads in the queries' kernel, if it has one."""
    for role, tensor in arrangement.tensors:
        if role.kind == "weight" and role.holds == "q" and ["n"] in tensor.groups:
            axis = tensor.groups.index(["n"])
            return replace(heads, num_heads=shapes[role][axis])
    return heads


def _spec_of(arrangement: Arrangement, shapes: Shapes, heads: Heads) -> AttentionSpec | None:
    """Return the specification that shapes and heads show; None if they contradict each other."""
    features: dict[str, int] = {}
    widths: dict[str, int] = {}
    d_model = None
    for role, tensor in arrangement.tensors:
        if role.kind == "bias":
            continue
        features[role.holds] = 1
        for size, letters in zip(shapes[role], tensor.groups, strict=True):
            if letters == ["d"]:
                widths |= dict.fromkeys(role.holds, size)
            elif letters == ["e"]:
                d_model = size
            else:
                features[role.holds] *= size
    sizes = _head_sizes(features, heads)
    if sizes is None or not {"q", "k"} <= widths.keys():
        return None
    has_out_proj = d_model is not None
    if d_model is None:
        d_model = sizes.num_heads * sizes.value_head_dim
    biases = "".join(role.holds for role, _ in arrangement.tensors if role.kind == "bias")
    try:
        return AttentionSpec(
            d_model=d_model,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            value_head_dim=sizes.value_head_dim,
            d_in=widths["q"],
            d_kv=widths["k"],
            qkv_bias=("q" in biases, "k" in biases, "v" in biases),
            out_bias="out" in biases,
            out_proj=has_out_proj,
        )
    except ValueError:
        return None


@dataclass(frozen=True)
class HeadSizes:
    """Numbers of heads, and the widths of each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int


def _head_sizes(features: Mapping[str, int], heads: Heads) -> HeadSizes | None:
    """Return the heads from the features of each kernel; None if they cannot be divided so.

    Args:
        features: the features of each kernel except the features of its input, by the projections
            in it.
        heads: what is stated about the heads.
    """
    for holds in features:
        if len(holds) > 1 and "q" in holds:
            # Others also hold a gate, which no bug here changes.
            if {*holds} != {*"qkv"}:
                return None
            return _sizes_of_packed(features[holds], heads)
    num_queries = features["q"]
    if "kv" in features:
        num_keys = features["kv"] // 2
        num_values = num_keys
    else:
        num_keys = features.get("k", 0)
        num_values = features.get("v", num_keys)
    if heads.num_heads is not None:
        head_dim = num_queries // heads.num_heads
    elif heads.head_dim is not None:
        head_dim = heads.head_dim
    else:
        # The fewest heads that fit.
        head_dim = math.gcd(num_queries, num_keys)
    if not head_dim or num_queries % head_dim or num_keys % head_dim:
        return None
    num_kv_heads = num_keys // head_dim
    if not num_kv_heads or num_values % num_kv_heads:
        return None
    return HeadSizes(num_queries // head_dim, num_kv_heads, head_dim, num_values // num_kv_heads)


def _sizes_of_packed(num_features: int, heads: Heads) -> HeadSizes | None:
    """Return the heads of packed queries, keys and values; None if they are not of one width."""
    num_heads = heads.num_heads
    if num_heads is None:
        num_heads = 1
    num_kv_heads = heads.num_kv_heads
    if num_kv_heads is None:
        num_kv_heads = num_heads
    head_dim, remainder = divmod(num_features, num_heads + 2 * num_kv_heads)
    if remainder:
        return None
    return HeadSizes(num_heads, num_kv_heads, head_dim, head_dim)


# ---- Projections ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Projections:
    """The projections of a call in canonical form.

    Attributes:
        call: the call.
        carrier: what has the arrays.
        named: which of them are projections.
        order: where canonical weights lie in them.
    """

    call: Call
    carrier: Carrier
    named: Named
    order: Order

    def __contains__(self, name: str) -> bool:
        return name in self.order.arrays

    def __getitem__(self, name: str) -> Any:
        """Return a canonical weight, such as `q_proj.weight` (N * H, d_in)."""
        if name in self.order.arrays:
            role, indices = self.order.arrays[name]
            flat = reordered(self._stored(role).reshape(-1), indices.reshape(-1), 0)
            return flat.reshape(indices.shape)
        projection = name.partition(".")[0]
        if f"{projection}.weight" in self:
            raise Unfit(f"its {projection} has no bias")
        raise Unfit(f"no {projection} is known among its weights")

    def shapes(self) -> Shapes:
        """Return the shapes of the arrays as they are stored."""
        return {role: tuple(self._stored(role).shape) for role in self.named.paths}

    def _stored(self, role: ArrayRole) -> Any:
        return self.carrier.leaves[self.named.paths[role]]

    @property
    def spec(self) -> AttentionSpec:
        """Return the heads and sizes.

        Raises:
            Unfit: if nothing states the number of heads.
        """
        if not self.order.heads_are_known:
            raise Unfit(
                "the number of heads is unknown: neither it nor its module has one of "
                f"{', '.join(HEADS)}"
            )
        return self.order.spec

    def run(self, function: Function, changed: Arrays) -> Any:
        """Call a function with some canonical weights replaced."""
        stored: dict[LeafPath, Any] = {}
        for role, (names, positions) in self.order.parts.items():
            if not any(name in changed for name in names):
                continue
            arrays = []
            for name in names:
                weight = changed[name] if name in changed else self[name]
                arrays.append(weight.reshape(-1))
            joined = arrays[0]
            if len(arrays) > 1:
                joined = self.call.xp.concatenate(arrays)
            shape = tuple(self._stored(role).shape)
            stored[self.named.paths[role]] = reordered(joined, positions, 0).reshape(shape)
        return self.carrier.run(function, stored)


def projections_in(call: Call) -> list[Projections]:
    """Return the projections of a call, once for each order that fits them, likely ones first.

    Raises:
        Unfit: if it has none with known names, or the weights of several layers.
    """
    carrier = carrier_of(call)
    named = named_in(carrier)
    orders = orders_of(call, carrier, named)
    return [Projections(call, carrier, named, order) for order in orders]
