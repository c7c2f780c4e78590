"""Identify the layer that tensors represent: its form, whether it is stacked, its specification."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache

import numpy as np

from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.attention import NORMS
from parity.measure.text import some_of
from parity.port.conversion.hints import COUNTS, LayerHints
from parity.port.conversion.layouts.layout import (
    GRID_BIAS,
    TILE,
    Layout,
    Tensor,
    broken_rules,
    matches,
    names_of,
    parts_of,
    weights_of_norm,
)
from parity.port.conversion.layouts.placement import Placement, head_counts, padded_width
from parity.port.models.keys import MOST_LAYERS

MAX_SIZE = 1 << 24
"""Size of the longest axis. The widest models have about 1 << 16; the bound limits how many
divisors a hostile file has tried.
"""

USUAL = (64, 128, 32, 80, 96, 256)
"""Usual head sizes, the most frequent first, which are listed first if several fit."""

SPEC_SOURCES = "a config.json next to the file, or spec=… from Python"


class LayoutMismatchError(InputError):
    """Tensors do not fit a layout, or no layer with these heads."""


class HeadsMismatchError(LayoutMismatchError):
    """Tensors fit a layout, but not with the given heads."""


class UnknownHeadsError(InputError):
    """Shapes fit more than one number of heads."""


class UnknownSpecError(UnknownHeadsError):
    """Tensors fit a layout, but shapes do not show the purpose of some of them."""


def shorten(names: Iterable[str]) -> str:
    """Return a list of names as text, truncated if long."""
    return f"[{some_of(map(repr, names))}]"


def _not_of(layout: Layout, got: str) -> LayoutMismatchError:
    return LayoutMismatchError("tensors", f"fit {layout.name}", got)


def find_form(names: Iterable[str], layout: Layout) -> tuple[Tensor, ...]:
    """Find the form of a layout that has these names.

    Raises:
        ValueError: if no form fits, or more than one.
    """
    names = set(names)
    fitting = _largest([form for form in layout.forms if not _missing_weights(form, names)])
    if len(fitting) > 1:
        raise _not_of(layout, f"more than one of its forms in {shorten(sorted(names))}")
    if not fitting:
        likeliest = max(layout.forms, key=lambda form: _num_present_weights(form, names))
        missing = _missing_weights(likeliest, names)
        raise _not_of(layout, f"missing {missing} in {shorten(sorted(names))}")
    (form,) = fitting
    missing = _missing_heads(form, names)
    if missing:
        raise _not_of(layout, f"missing {shorten(missing)} in {shorten(sorted(names))}")
    own_names = {*names_of((*form, *layout.others), names)}
    unknown = sorted(name for name in names - own_names if not layout.ignores(name))
    if unknown:
        raise _not_of(layout, f"unknown names {shorten(unknown)}")
    return form


def _missing_weights(form: Iterable[Tensor], names: Collection[str]) -> list[str]:
    """Return the weights of a form that no name stands for; biases may be missing."""
    weights = [tensor.name for tensor in form if tensor.kind == "weight"]
    return [name for name in weights if not matches(name, names)]


def _num_present_weights(form: Iterable[Tensor], names: Collection[str]) -> int:
    num_weights = sum(tensor.kind == "weight" for tensor in form)
    return num_weights - len(_missing_weights(form, names))


def _largest(forms: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Return forms without those that are part of another, such as the one without out_proj."""
    return [form for form in forms if not _is_part_of_another(form, forms)]


def _is_part_of_another(form: Iterable[Tensor], forms: Iterable[Iterable[Tensor]]) -> bool:
    # A tensor is known by its name here: forms may hold one name with other axes.
    names = {*_names(form)}
    return any(names < {*_names(other)} for other in forms)


def _names(form: Iterable[Tensor]) -> list[str]:
    return [tensor.name for tensor in form]


def _missing_heads(form: Iterable[Tensor], names: Collection[str]) -> list[str]:
    """Return the names of missing heads, if each head has its own tensor.

    All such tensors have as many heads as the one with the most.
    """
    present_names: dict[Tensor, set[str]] = {}
    num_heads = 0
    for tensor in form:
        if tensor.is_per_head:
            present_names[tensor] = matches(tensor.name, names)
            num_heads = max(num_heads, len(present_names[tensor]))
    missing: list[str] = []
    for tensor, present in present_names.items():
        if not present:  # an absent bias
            continue
        for head in range(num_heads):
            name = tensor.name.format(n=head)
            if name not in present:
                missing.append(name)
    return missing


def _check_score_biases(names: Iterable[str], layout: Layout) -> None:
    """Reject a bias of scores that the specification does not contain."""
    grid_biases = sorted(name for name in names if layout.is_grid_bias(name))
    if grid_biases:
        raise UnknownSpecError(
            f"a layer in {layout.name}",
            "not add biases to scores that its specification lacks",
            shorten(grid_biases),
            remedy={"drop": GRID_BIAS},
            hint="leaves it out",
        )


# More than the kinds of layers times the layouts of most files.
@lru_cache(maxsize=1024)
def placements(spec: AttentionSpec, layout: Layout) -> tuple[Placement, ...]:
    """Return the placement of a layer in each form of a layout that can represent it.

    Raises:
        LayoutMismatchError: if no form can.
    """
    broken, got = broken_rules(spec, layout)
    if broken:
        raise LayoutMismatchError("the layer", f"be one that {layout.name} can hold: {broken}", got)
    required = spec.weight_shapes.keys()
    fitting, nameless = [], set(required)
    for form in layout.forms:
        tensors = []
        for tensor in (*form, *layout.others):
            if required & {*tensor.parts}:
                tensors.append(tensor)
        parts = parts_of(tensors)
        nameless &= required - parts
        if parts == required and not any(_packs_two_sizes(tensor, spec) for tensor in tensors):
            fitting.append(Placement(layout, spec, tuple(tensors)))
    if not fitting:
        raise _has_no_form(layout, required, nameless)
    return tuple(fitting)


def placement_for(
    readers: Collection[Callable[[str], np.ndarray]], spec: AttentionSpec, layout: Layout
) -> Placement:
    """Return the placement of layers of one specification, whose weights are read by name, or
    reject them.

    If the layout has a tensor for shared keys and values, it is used when both are equal in all
    layers.

    Raises:
        LayoutMismatchError: if no form can represent the layers, or only one in which keys and
            values that differ are one tensor.
    """
    possible = placements(spec, layout)
    with_shared, separate = [], []
    for placement in possible:
        if any(tensor.is_shared for tensor in placement.tensors):
            with_shared.append(placement)
        else:
            separate.append(placement)
    if with_shared and _hold_shared_weights(with_shared, readers):
        return with_shared[0]
    if separate:
        return separate[0]
    names = [tensor.name for tensor in with_shared[0].tensors if tensor.is_shared]
    rule = f"have keys equal to values, which {layout.name} stores once, as {', '.join(names)}"
    raise LayoutMismatchError("the layer", rule, "keys and values that differ")


def _hold_shared_weights(
    possible: Iterable[Placement], readers: Collection[Callable[[str], np.ndarray]]
) -> bool:
    """Return whether the weights of each shared tensor are one in all layers."""
    for placement in possible:
        for tensor in placement.tensors:
            if not tensor.is_shared:
                continue
            for read in readers:
                if not _are_one([read(part) for part in tensor.parts]):
                    return False
    return True


def _are_one(weights: list[np.ndarray]) -> bool:
    """Return whether weights have equal bits, so that signs of zeros count."""
    first, *others = (weight.view(f"u{weight.dtype.itemsize}") for weight in weights)
    return all(np.array_equal(first, other) for other in others)


def _has_no_form(
    layout: Layout, required: Collection[str], nameless: Collection[str]
) -> LayoutMismatchError:
    """Make the error for a layer whose weights fit no form.

    Args:
        layout: the layout.
        required: canonical names of the weights.
        nameless: those for which the layout has no names.
    """
    if nameless:
        rule = f"have only weights for which {layout.name} has names"
        error = LayoutMismatchError("the layer", rule, shorten(sorted(nameless)))
        norms = [name for name in NORMS if weights_of_norm(name) & {*nameless}]
        if norms:
            error.remedy, error.hint = {"drop": ",".join(norms)}, "leaves it out"
        return error
    for tensor in layout.tensors:
        missing = [part for part in tensor.parts if part not in required]
        if 0 < len(missing) < len(tensor.parts):
            projections = "all projections"
            if tensor.kind == "bias":
                projections = "a bias in all projections"
            rule = f"have {projections} that {tensor.name} of {layout.name} packs"
            return LayoutMismatchError("the layer", rule, f"none of {', '.join(missing)}")
    rule = f"have equal sizes where {layout.name} packs projections"
    return LayoutMismatchError("the layer", rule)


def _packs_two_sizes(tensor: Tensor, spec: AttentionSpec) -> bool:
    """Return whether projections in a tensor differ in inputs, head size, or number on an axis."""
    if tensor.has_projection_axis and len({*head_counts(tensor, spec)}) > 1:
        return True
    if tensor.kind == "bias" or len(tensor.parts) == 1:
        return False
    letters = {*tensor.holds}
    inputs = {spec.d_in if letter in ("q", "g") else spec.d_kv for letter in letters}
    sizes = set()
    if letters & {"q", "k"}:
        sizes.add(spec.head_dim)
    if "v" in letters:
        sizes.add(spec.value_head_dim)
    if "g" in letters and spec.gate is not None:
        sizes.add(1 if spec.gate.per_head else spec.value_head_dim)
    return len(inputs) > 1 or len(sizes) > 1


def find_placement(
    shapes: Mapping[str, tuple[int, ...]], spec: AttentionSpec, layout: Layout
) -> Placement:
    """Find the placement of a layer from the names and shapes of its tensors.

    Raises:
        LayoutMismatchError: if they do not match the layer, or the layout cannot represent it.
    """
    own_shapes = {}
    for name, shape in shapes.items():
        if not layout.ignores(name):
            own_shapes[name] = tuple(shape)
    possible = placements(spec, layout)
    unnamed = set(own_shapes)
    for placement in possible:
        unnamed -= placement.shapes.keys()
    # Before the other names, because its error says how to drop the biases.
    _check_score_biases(unnamed, layout)
    for placement in possible:
        if placement.shapes == own_shapes:
            return placement
    # The error compares with the form that has the most names in common.
    nearest = min(possible, key=lambda placement: len(placement.shapes.keys() ^ own_shapes.keys()))
    raise _not_of(layout, _difference(own_shapes, nearest.shapes))


def _difference(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> str:
    """Describe the difference of names and shapes from the expected ones."""
    missing = sorted(expected.keys() - shapes.keys())
    unknown = sorted(shapes.keys() - expected.keys())
    words = []
    if missing:
        words.append(f"missing {shorten(missing)}")
    if unknown:
        words.append(f"unknown names {shorten(unknown)}")
    if not words:
        different = [name for name in expected if shapes[name] != expected[name]]
        for name in different[:3]:
            words.append(f"{name}.shape={shapes[name]} instead of {expected[name]}")
    return " and ".join(words)


def stack_sizes(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> dict[int, int] | None:
    """Count the layers of a stack by the axis that they may be stacked on; None for a single layer.

    The number of axes decides: a stacked tensor has one more than the layout declares. Layers are
    stacked on the first axis, as `scan` and `vmap` store them, or on the layout's axis.

    Raises:
        ValueError: if the tensors are not of the layout, or not all of one stack.
    """
    form = find_form(shapes, layout)
    num_axes = _num_axes(form, shapes)
    if any(len(shapes[name]) != count + 1 for name, count in num_axes.items()):
        return None
    stacked = (*num_axes, *names_of(layout.others, shapes))
    sizes_by_axis = {}
    for axis in sorted({0, layout.stack_axis}):
        sizes = _sizes_on(axis, stacked, shapes)
        if len(sizes) == len(stacked) and len({*sizes}) == 1 and 1 <= sizes[0] <= MOST_LAYERS:
            sizes_by_axis[axis] = sizes[0]
    if not sizes_by_axis:
        raise InputError(
            "stacked tensors",
            f"have the same number of layers, from 1 to {MOST_LAYERS}",
            str(sorted({*_sizes_on(layout.stack_axis, stacked, shapes)})),
        )
    return sizes_by_axis


def _sizes_on(axis: int, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """Return the size of each tensor on an axis, without those that do not have it."""
    sizes: list[int] = []
    for name in names:
        if axis < len(shapes[name]):
            sizes.append(shapes[name][axis])
    return sizes


def fits_layer(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> bool:
    """Return whether tensors are a single layer in a layout, for some number of heads."""
    try:
        find_spec(shapes, layout, LayerHints())
    except UnknownHeadsError:
        return True
    except ValueError:
        return False
    return True


def without_axis(axis: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one layer of a stack on an axis."""
    return {name: (*shape[:axis], *shape[axis + 1 :]) for name, shape in shapes.items()}


def _num_axes(tensors: Iterable[Tensor], names: Collection[str]) -> dict[str, int]:
    """Return the declared number of axes of each name that belongs to some tensors."""
    num_axes = {}
    for tensor in tensors:
        for name in matches(tensor.name, names):
            num_axes[name] = len(tensor.groups)
    return num_axes


def find_spec(
    shapes: Mapping[str, tuple[int, ...]], layout: Layout, hints: LayerHints
) -> AttentionSpec:
    """Return the specification of a layer, from the names and shapes of its tensors and hints about
    heads and RoPE.

    Raises:
        ValueError: if there is none, or more than one.
    """
    _check_counts(hints.counts)
    form = find_form(shapes, layout)
    if layout.needs_spec:
        raise LayoutMismatchError(
            f"a layer in {layout.name}", f"have a specification: {SPEC_SOURCES}"
        )
    _check_no_others(shapes, layout)
    present = [tensor for tensor in form if matches(tensor.name, shapes)]
    _check_biases(present)
    own_shapes = {name: shapes[name] for name in names_of(present, shapes)}
    _check_shapes(own_shapes, present, layout)
    fitting, reasons = _fitting(present, own_shapes, layout, hints)
    if not fitting:
        if hints.counts and not reasons:
            of_other_heads, _ = _fitting(present, own_shapes, layout, LayerHints(rope=hints.rope))
            if of_other_heads:
                rule = f"fit {layout.name}: {_options(of_other_heads)}"
                raise HeadsMismatchError("the heads", rule, hints.counts)
        rule = f"fit a layer in {layout.name}"
        if reasons:
            rule += f" ({reasons[0]})"
        raise LayoutMismatchError("shapes", rule, str(own_shapes))
    if layout.ranks is not None and hints.head_dim is None:
        _check_not_of_rank(fitting, layout)
    if len(fitting) > 1:
        rule = f"be given for {layout.name}, whose shapes fit {_options(fitting)}"
        raise UnknownHeadsError("the heads", rule, hint=f"{_deciding_flags(fitting)} decides")
    return fitting[0]


def _check_no_others(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> None:
    """Reject tensors such as norms, whose role in the computation shapes do not show."""
    others = sorted(names_of(layout.others, shapes))
    if not others:
        return
    error = UnknownSpecError(
        f"the purpose of {shorten(others)} in {layout.name}",
        f"be defined by a specification: {SPEC_SOURCES}",
    )
    if all(map(layout.is_grid_bias, others)):
        error.remedy, error.hint = {"drop": GRID_BIAS}, "leaves it out"
    raise error


def _check_biases(present: Iterable[Tensor]) -> None:
    """Reject a bias on only one or two of q, k and v: `qkv_bias` of hints has no such value."""
    biases = parts_of(tensor for tensor in present if tensor.kind == "bias")
    of_qkv = sorted(biases - {"out_proj.bias"})
    if len(of_qkv) not in (0, 3):
        raise InputError("q_proj, k_proj and v_proj", "all have a bias, or none", str(of_qkv))


def _check_not_of_rank(fitting: list[AttentionSpec], layout: Layout) -> None:
    """Reject heads narrower or wider than the model, which may be a rank's share of more heads."""
    if any(spec.q_width == spec.d_model for spec in fitting):
        return
    first = fitting[0]
    rule = f"be given for {layout.name} if num_heads * head_dim is not d_model, as in a rank's file"
    sizes = {
        "num_heads": first.num_heads,
        "head_dim": first.head_dim,
        "d_model": first.d_model,
    }
    raise LayoutMismatchError("head_dim", rule, sizes)


def _fitting(
    present: list[Tensor], shapes: Mapping[str, tuple[int, ...]], layout: Layout, hints: LayerHints
) -> tuple[list[AttentionSpec], list[str]]:
    """Return the specifications that these tensors fit, and the reasons why other candidates do
    not.
    """
    widths = _widths(present, shapes)
    biases = parts_of(tensor for tensor in present if tensor.kind == "bias")
    fitting, reasons = [], []
    for num_heads, num_kv_heads, head_dim in _head_counts(present, shapes, layout, hints):
        fields = {
            "d_model": widths.get("out", num_heads * head_dim),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "d_in": widths["q"],
            "d_kv": widths["k"],
            "qkv_bias": "q_proj.bias" in biases,
            "out_bias": "out_proj.bias" in biases,
            "out_proj": "out" in widths,
        }
        try:
            without_rope = AttentionSpec(**fields)
            # Shapes are tested first, so that no reason is about a layer with other shapes. Only
            # the padding of heads depends on RoPE.
            if not layout.padded and not _has_shapes(without_rope, present, shapes, layout):
                continue
            spec = AttentionSpec(**fields, rope=hints.rope)
        except ValueError as error:
            if isinstance(error, TypeError):  # independent of the heads
                raise
            reasons.append(str(error))
            continue
        if not _has_shapes(spec, present, shapes, layout):
            continue
        broken, broken_fields = broken_rules(spec, layout)
        if broken:
            values = [f"{name}={value}" for name, value in broken_fields.items()]
            reasons.append(f"{broken}, got {', '.join(values)}")
        else:
            fitting.append(spec)
    return fitting, reasons


def _has_shapes(
    spec: AttentionSpec,
    present: list[Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    layout: Layout,
) -> bool:
    """Return whether a layer in a layout has these shapes."""
    return Placement(layout, spec, tuple(present)).shapes == shapes


def _options(fitting: list[AttentionSpec]) -> str:
    """List the heads of layers as text, usual ones first, then larger ones."""

    def order(spec: AttentionSpec) -> tuple[int, int]:
        if spec.head_dim in USUAL:
            return USUAL.index(spec.head_dim), 0
        return len(USUAL), -spec.head_dim

    options = []
    for spec in sorted(fitting, key=order):
        options.append(f"{spec.num_heads} x {spec.head_dim} (key/value {spec.num_kv_heads})")
    return some_of(options, 4)


def _check_counts(counts: Mapping[str, int]) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise InputTypeError(name, "be an integer", {name: value})
        if value < 1:
            raise InputError(name, "be at least 1", {name: value})


def _rows_of(tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of head features in a tensor, padding included; for per-head tensors, in
    all together.
    """
    names = matches(tensor.name, shapes)
    size = len(names)
    for length, letters in zip(shapes[min(names)], tensor.groups, strict=True):
        if {"p", "n", "h"} & {*letters}:
            size *= length
    return size


def _deciding_flags(specs: list[AttentionSpec]) -> str:
    """Return the smallest sets of command-line flags that distinguish specifications, joined by
    "or"; empty if none does.
    """
    names = []
    for name in COUNTS:
        if len({getattr(spec, name) for spec in specs}) > 1:
            names.append(name)
    for count in range(1, len(names) + 1):
        alternatives = []
        for subset in itertools.combinations(names, count):
            values = set(map(operator.attrgetter(*subset), specs))
            if len(values) == len(specs):
                flags = [f"--{name.replace('_', '-')}" for name in subset]
                alternatives.append(" with ".join(flags))
        if alternatives:
            return " or ".join(alternatives)
    return ""


def _head_counts(
    present: list[Tensor], shapes: Mapping[str, tuple[int, ...]], layout: Layout, hints: LayerHints
) -> Iterator[tuple[int, int, int]]:
    """Yield every (num_heads, num_kv_heads, head_dim) that agrees with hints and these queries."""
    queries = _weight_of_queries(present)
    num_rows = _rows_of(queries, shapes)
    num_packed = len(queries.holds) - 1  # keys, values or both are packed with the queries
    for head_dim in _head_dims(num_rows, layout, hints):
        widths = {head_dim}
        if layout.padded:
            widths = {padded_width(head_dim, rope) for rope in (False, True)}
        all_heads = {num_rows // width for width in widths if num_rows % width == 0}
        for num_all in all_heads:
            for num_kv_heads in divisors(num_all):
                num_heads = num_all - num_packed * num_kv_heads
                agrees = hints.num_heads in (None, num_heads)
                agrees_kv = hints.num_kv_heads in (None, num_kv_heads)
                if num_heads > 0 and agrees and agrees_kv:
                    yield num_heads, num_kv_heads, head_dim


def _weight_of_queries(present: Iterable[Tensor]) -> Tensor:
    for tensor in present:
        if tensor.kind == "weight" and "q" in tensor.holds:
            return tensor
    raise ValueError("a form without queries needs a specification")


def _head_dims(num_rows: int, layout: Layout, hints: LayerHints) -> list[int]:
    """Return head sizes to try: from the hints, or all that divide the rows when padded."""
    if hints.head_dim is not None:
        return [hints.head_dim] if hints.head_dim > 0 else []
    # Each of two halves may be padded by up to TILE - 1 features, and a half has an odd one more.
    most_padding = 2 * TILE - 1 if layout.padded else 0
    sizes = set()
    for width in divisors(num_rows):
        for padding in range(min(width, most_padding + 1)):
            sizes.add(width - padding)
    return sorted(sizes)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in ascending order."""
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    large = [number // i for i in reversed(small) if i * i != number]
    return small + large


def _check_shapes(
    shapes: Mapping[str, tuple[int, ...]], present: Collection[Tensor], layout: Layout
) -> None:
    """Reject impossible shapes before any head counts are tried."""
    num_axes = _num_axes(present, shapes)
    if any(len(shape) != num_axes[name] for name, shape in shapes.items()):
        raise LayoutMismatchError("shapes", f"fit a layer in {layout.name}", str(dict(shapes)))
    rule = f"fit a layer in {layout.name}, of sizes from 1 to {MAX_SIZE}"
    for name, shape in shapes.items():
        if not all(1 <= size <= MAX_SIZE for size in shape):
            raise LayoutMismatchError("shapes", rule, {f"{name}.shape": shape})


def _widths(present: list[Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the input widths of the projections, and the output width as `out`."""
    widths: dict[str, int] = {}
    for tensor in present:
        if tensor.kind != "weight":
            continue
        shape = shapes[min(matches(tensor.name, shapes))]
        for size, letters in zip(shape, tensor.groups, strict=True):
            if tensor.holds == "out" and letters == ["e"]:
                widths["out"] = size
            elif tensor.holds != "out" and letters == ["d"]:
                widths |= dict.fromkeys(tensor.holds, size)
    return widths
