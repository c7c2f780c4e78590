"""Identify the layer that tensors represent: the layout's form, whether it is stacked, and the
specification.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache

import numpy as np

from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.attention import NORMS
from parity.measure.text import some_of
from parity.port.conversion.hints import LayerHints
from parity.port.conversion.layouts.layout import (
    TILE,
    UNSAID,
    Layout,
    Tensor,
    broken_rules,
    matches,
    names_of,
    weights_of_norm,
)
from parity.port.conversion.layouts.placement import Placement, head_counts, padded_width

MAX_SIZE = 1 << 24  # of an axis; the widest models have about 1 << 16
MAX_LAYERS = 10_000  # of a stack

USUAL = (64, 128, 32, 80, 96, 256)  # usual head sizes, listed first if several fit


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
    return LayoutMismatchError("tensors", f"be those of {layout.name}", got)


def find_form(names: Iterable[str], layout: Layout) -> tuple[Tensor, ...]:
    """Find the form of a layout that has these names.

    Raises:
        ValueError: if no form fits, or more than one.
    """
    names = set(names)
    required = [
        [tensor.name for tensor in form if tensor.kind == "weight"] for form in layout.forms
    ]
    missing = [[name for name in wanted if not matches(name, names)] for wanted in required]
    found = [form for form, absent in zip(layout.forms, missing, strict=True) if not absent]
    if len(found) > 1:
        # A form that is part of another, such as the one without out_proj, does not count.
        names_in = [{tensor.name for tensor in form} for form in found]
        found = [
            form
            for form, own in zip(found, names_in, strict=True)
            if not any(own < other for other in names_in)
        ]
    if len(found) != 1:
        likeliest = max(range(len(missing)), key=lambda i: len(required[i]) - len(missing[i]))
        what = "more than one of its forms" if found else f"missing {missing[likeliest]}"
        raise _not_of(layout, f"{what} in {shorten(sorted(names))}")
    (form,) = found
    stacks = {tensor.name: matches(tensor.name, names) for tensor in form if tensor.is_per_head}
    heads = range(max(map(len, stacks.values()), default=0))
    if gaps := [
        name
        for each, held in stacks.items()
        if held
        for n in heads
        if (name := each.format(n=n)) not in held
    ]:
        raise _not_of(layout, f"missing {shorten(gaps)} in {shorten(sorted(names))}")
    known = {*names_of((*form, *layout.others), names)}
    if unknown := sorted(name for name in names - known if not layout.ignores(name)):
        raise _not_of(layout, f"unknown names {shorten(unknown)}")
    return form


def _check_score_biases(names: Iterable[str], layout: Layout) -> None:
    """Reject a bias of scores that the specification does not contain."""
    if unsaid := sorted(name for name in names if layout.leaves_unsaid(name)):
        raise UnknownSpecError(
            f"a layer in {layout.name}",
            "not add biases to scores that its specification lacks",
            shorten(unsaid),
            remedy={"drop": UNSAID},
            hint="leaves it out",
        )


@lru_cache(maxsize=1024)
def placements(spec: AttentionSpec, layout: Layout) -> tuple[Placement, ...]:
    """Place a layer in each form of a layout that can represent it.

    Raises:
        LayoutMismatchError: if no form can.
    """
    broken, got = broken_rules(spec, layout)
    if broken:
        raise LayoutMismatchError("the layer", f"be one that {layout.name} can hold: {broken}", got)
    wanted = spec.weight_shapes.keys()
    found, nameless = [], set(wanted)
    for form in layout.forms:
        tensors = tuple(tensor for tensor in (*form, *layout.others) if wanted & {*tensor.parts})
        held = {part for tensor in tensors for part in tensor.parts}
        nameless &= wanted - held
        if held == wanted and not any(_packs_two_sizes(tensor, spec) for tensor in tensors):
            found.append(Placement(layout, spec, tensors))
    if not found:
        raise _has_no_form(layout, wanted, nameless)
    return tuple(found)


def placement_for(
    readers: Iterable[Callable[[str], np.ndarray]], spec: AttentionSpec, layout: Layout
) -> Placement:
    """Place layers of one specification, whose weights are read by name, or reject them.

    If the layout has a tensor for shared keys and values, it is used when both are equal in all
    layers.
    """
    found = placements(spec, layout)
    shared = [each for each in found if any(tensor.is_shared for tensor in each.tensors)]
    parts = [tensor.parts for each in shared for tensor in each.tensors if tensor.is_shared]
    if shared and all(
        _are_one([read(part) for part in each]) for each in parts for read in readers
    ):
        return shared[0]
    return next((each for each in found if each not in shared), found[0])


def _are_one(weights: list[np.ndarray]) -> bool:
    first, *others = (weight.view(f"u{weight.dtype.itemsize}") for weight in weights)
    return all(np.array_equal(first, other) for other in others)


def _has_no_form(
    layout: Layout, wanted: Collection[str], nameless: Collection[str]
) -> LayoutMismatchError:
    """Make the error for a layer whose weights fit no form; the layout has no names for the
    `nameless` ones.
    """
    if nameless:
        norms = [name for name in NORMS if weights_of_norm(name) & {*nameless}]
        remedy, hint = ({"drop": ",".join(norms)}, "leaves it out") if norms else ((), "")
        rule = f"have only weights for which {layout.name} has names"
        return LayoutMismatchError(
            "the layer", rule, shorten(sorted(nameless)), remedy=remedy, hint=hint
        )
    for tensor in layout.tensors:
        without = [part for part in tensor.parts if part not in wanted]
        if 0 < len(without) < len(tensor.parts):
            of_each = "a bias in all projections" if tensor.kind == "bias" else "all projections"
            rule = f"have {of_each} that {tensor.name} of {layout.name} packs"
            return LayoutMismatchError("the layer", rule, f"none of {', '.join(without)}")
    return LayoutMismatchError(
        "the layer", f"have equal sizes where {layout.name} packs projections"
    )


def _packs_two_sizes(tensor: Tensor, spec: AttentionSpec) -> bool:
    """Return whether projections in a tensor differ in input size, head size, or number on an
    axis.
    """
    if tensor.has_projection_axis and len({*head_counts(tensor, spec)}) > 1:
        return True
    if tensor.kind == "bias" or len(tensor.parts) == 1:
        return False
    words = {*tensor.holds}
    inputs = {spec.d_in if word in ("q", "g") else spec.d_kv for word in words}
    sizes = {spec.head_dim if word in ("q", "k") else spec.value_head_dim for word in words - {"g"}}
    if "g" in words and spec.gate is not None:
        sizes.add(1 if spec.gate.per_head else spec.value_head_dim)
    return len(inputs) > 1 or len(sizes) > 1


def find_placement(
    shapes: Mapping[str, tuple[int, ...]], spec: AttentionSpec, layout: Layout
) -> Placement:
    """Find the placement of a layer from the names and shapes of its tensors.

    Raises:
        LayoutMismatchError: if they do not match the layer, or the layout cannot represent it.
    """
    given = {name: tuple(shape) for name, shape in shapes.items() if not layout.ignores(name)}
    possible = placements(spec, layout)
    _check_score_biases(given.keys() - {name for each in possible for name in each.shapes}, layout)
    for each in possible:
        if each.shapes == given:
            return each
    nearest = min(possible, key=lambda each: len(each.shapes.keys() ^ given.keys()))
    raise _not_of(layout, _difference(given, nearest.shapes))


def _difference(given: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> str:
    """Describe the difference of names and shapes from the expected ones."""
    missing, unknown = (
        sorted(one.keys() - other.keys()) for one, other in ((wanted, given), (given, wanted))
    )
    words = [
        f"{what} {shorten(names)}"
        for what, names in (("missing", missing), ("unknown names", unknown))
        if names
    ]
    if not words:
        others = [name for name in wanted if given[name] != wanted[name]]
        words = [f"{name}.shape={given[name]} instead of {wanted[name]}" for name in others[:3]]
    return " and ".join(words)


def stack_size(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> int | None:
    """Count the layers stacked on a leading axis, as `scan` and `vmap` store them; None for a
    single layer.

    The number of axes decides: a stacked tensor has one more than the layout declares.

    Raises:
        ValueError: if the tensors are not of the layout, or not all of one stack.
    """
    form = find_form(shapes, layout)
    axes = {name: len(tensor.groups) for tensor in form for name in matches(tensor.name, shapes)}
    if any(len(shapes[name]) != count + 1 for name, count in axes.items()):
        return None
    sizes = sorted({shapes[name][0] for name in (*axes, *names_of(layout.others, shapes))})
    if len(sizes) > 1 or not 1 <= sizes[0] <= MAX_LAYERS:
        raise InputError(
            "stacked tensors", f"have the same number of layers, from 1 to {MAX_LAYERS}", str(sizes)
        )
    return sizes[0]


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
    if others := sorted(names_of(layout.others, shapes)):
        remedy = {"drop": UNSAID} if all(map(layout.leaves_unsaid, others)) else ()
        rule, hint = (
            f"be defined by a specification: {SPEC_SOURCES}",
            "leaves it out" if remedy else "",
        )
        raise UnknownSpecError(
            f"the purpose of {shorten(others)} in {layout.name}", rule, remedy=remedy, hint=hint
        )
    present = [tensor for tensor in form if matches(tensor.name, shapes)]
    of_qkv = sorted(
        {part for each in present if each.kind == "bias" for part in each.parts} - {"out_proj.bias"}
    )
    if len(of_qkv) not in (0, 3):
        raise InputError("q_proj, k_proj and v_proj", "all have a bias, or none", str(of_qkv))
    used = {name: shapes[name] for name in names_of(present, shapes)}
    _check_shapes(used, present, layout)
    fitting, reasons = _fitting(present, used, layout, hints)
    if not fitting:
        if (
            hints.counts
            and not reasons
            and (others := _fitting(present, used, layout, LayerHints(rope=hints.rope))[0])
        ):
            raise HeadsMismatchError(
                "the heads", f"be those of {layout.name}: {_options(others)}", hints.counts
            )
        why = f" ({reasons[0]})" if reasons else ""
        raise LayoutMismatchError("shapes", f"be those of a layer in {layout.name}{why}", str(used))
    first = fitting[0]
    if (
        layout.ranks is not None
        and hints.head_dim is None
        and all(spec.q_width != spec.d_model for spec in fitting)
    ):
        rule = (
            f"be given for {layout.name} if num_heads * head_dim is not d_model, as in a rank's "
            f"file"
        )
        raise LayoutMismatchError(
            "head_dim",
            rule,
            num_heads=first.num_heads,
            head_dim=first.head_dim,
            d_model=first.d_model,
        )
    if len(fitting) > 1:
        rule = f"be given for {layout.name}, whose shapes fit {_options(fitting)}"
        raise UnknownHeadsError("the heads", rule, hint=f"{_deciding(fitting)} decides")
    return first


def _fitting(
    present: list[Tensor], shapes: Mapping[str, tuple[int, ...]], layout: Layout, hints: LayerHints
) -> tuple[list[AttentionSpec], list[str]]:
    """Return the layers with these tensors, and the reasons why other candidates do not fit."""
    widths = _widths(present, shapes)
    biases = {part for tensor in present if tensor.kind == "bias" for part in tensor.parts}
    fitting, reasons = [], []
    for heads, kv_heads, features in _head_counts(present, shapes, layout, hints):
        try:
            spec = AttentionSpec(
                d_model=widths.get("out", heads * features),
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=features,
                d_in=widths["q"],
                d_kv=widths["k"],
                qkv_bias="q_proj.bias" in biases,
                out_bias="out_proj.bias" in biases,
                out_proj="out" in widths,
                rope=hints.rope,
            )
        except ValueError as error:
            if isinstance(error, TypeError):  # independent of the heads
                raise
            reasons.append(str(error))
            continue
        if Placement(layout, spec, tuple(present)).shapes != shapes:
            continue
        broken, got = broken_rules(spec, layout)
        if broken:
            reasons.append(
                f"{broken}, got {', '.join(f'{name}={value}' for name, value in got.items())}"
            )
        else:
            fitting.append(spec)
    return fitting, reasons


def _options(fitting: list[AttentionSpec]) -> str:
    """List the heads of layers as text, usual ones first."""
    usual = sorted(
        fitting,
        key=lambda s: (USUAL.index(s.head_dim) if s.head_dim in USUAL else len(USUAL), -s.head_dim),
    )
    return some_of((f"{s.num_heads} x {s.head_dim} (key/value {s.num_kv_heads})" for s in usual), 4)


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
    groups = zip(shapes[min(names)], tensor.groups, strict=False)
    return len(names) * math.prod(size for size, group in groups if {"p", "n", "h"} & {*group})


def _deciding(specs: list[AttentionSpec]) -> str:
    """Return the fewest command-line flags that distinguish specifications."""
    names = [
        name
        for name in ("num_heads", "num_kv_heads", "head_dim")
        if len({getattr(s, name) for s in specs}) > 1
    ]
    subsets = (
        some for count in range(1, len(names) + 1) for some in itertools.combinations(names, count)
    )
    enough = [
        some
        for some in subsets
        if len({tuple(getattr(s, name) for name in some) for s in specs}) == len(specs)
    ]
    flags = {name: f"--{name.replace('_', '-')}" for name in names}
    return " or ".join(
        " with ".join(map(flags.__getitem__, some))
        for some in enough
        if len(some) == len(enough[0])
    )


def _head_counts(
    present: list[Tensor], shapes: Mapping[str, tuple[int, ...]], layout: Layout, hints: LayerHints
) -> Iterator[tuple[int, int, int]]:
    """Yield every (num_heads, num_kv_heads, head_dim) that agrees with hints and with these
    queries.
    """
    queries = next(tensor for tensor in present if tensor.kind == "weight" and "q" in tensor.holds)
    rows, beside = (
        _rows_of(queries, shapes),
        len(queries.holds) - 1,
    )  # keys, values or both are packed with the queries
    num_heads, num_kv_heads, head_dim = hints.num_heads, hints.num_kv_heads, hints.head_dim
    most_padding = 2 * TILE - 1 if layout.padded else 0
    dims = {
        width - padding
        for width in divisors(rows)
        for padding in range(min(width, most_padding + 1))
    }
    for features in sorted(dims) if head_dim is None else [head_dim] * (head_dim > 0):
        padded = (
            {padded_width(features, rope) for rope in (False, True)}
            if layout.padded
            else {features}
        )
        for heads in {rows // width for width in padded if rows % width == 0}:
            for k in divisors(heads):
                n = heads - beside * k
                if n > 0 and num_heads in (None, n) and num_kv_heads in (None, k):
                    yield n, k, features


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in ascending order."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def _check_shapes(
    shapes: Mapping[str, tuple[int, ...]], present: Collection[Tensor], layout: Layout
) -> None:
    """Reject impossible shapes before any head counts are tried."""
    axes = {name: len(tensor.groups) for tensor in present for name in matches(tensor.name, shapes)}
    if any(len(shape) != axes[name] for name, shape in shapes.items()):
        raise LayoutMismatchError(
            "shapes", f"be those of a layer in {layout.name}", str(dict(shapes))
        )
    rule = f"be those of a layer in {layout.name}, of sizes from 1 to {MAX_SIZE}"
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
        letter = "e" if tensor.holds == "out" else "d"
        for size, group in zip(shape, tensor.groups, strict=False):
            if group == [letter]:
                widths |= dict.fromkeys(["out"] if letter == "e" else tensor.holds, size)
    return widths
