"""Canonical weights to the tensors of a layout and back: `from_canonical` and `to_canonical` are inverses, bit for bit.

Both are derived from what the layout declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

import einops
import numpy as np

from mha_spec import AttentionSpec, Refusal, WrongType
from parity.conversion.hints import CALLER, LayerHints, LayerKeywords
from parity.conversion.layouts.detection import find_spec, find_tensors, tensors_for
from parity.conversion.layouts.layout import Layout, Tensor, check_carried, head_counts, matches, shapes_of, sizes_of
from parity.core.arrays import to_numpy_by_name
from parity.core.weights import Weights, check_weights, is_floating, weight_shapes

OF_HEADS = tuple(f"{name}_proj.{leaf}" for name in ("q", "k", "v", "out") for leaf in ("weight", "bias"))[:-1]
"""The canonical weights that have features of heads, which a layout may order in its own way, or pad."""

# ---- Canonical -> layout ---------------------------------------------------------------------------------------------


def from_canonical(weights: Mapping[str, Any], spec: AttentionSpec, layout: Layout) -> Weights:
    """The tensors of a layout that hold canonical weights.

    Raises:
        TypeError, ValueError: if the weights are not those of the spec, or the layout cannot hold such a layer.
    """
    tensors_for(spec, layout)
    check_carried(spec, layout)
    held = check_weights(weights, spec)
    form = form_for([held.__getitem__], spec, layout)
    return {name: lay_out(name, held.__getitem__, form, spec, layout) for name in shapes_of(form, spec, layout)}


def shapes_in(layout: Layout, spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors in which a layout holds a layer.

    Raises:
        ValueError: if it cannot hold such a layer.
    """
    return shapes_of(tensors_for(spec, layout)[0], spec, layout)


def form_for(layers: Iterable[Callable[[str], np.ndarray]], spec: AttentionSpec, layout: Layout) -> tuple[Tensor, ...]:
    """The tensors in which a layout holds layers: keys and values in one, where it has such, if all of them are alike.

    Args:
        layers: each gives canonical weights by their names.
        spec: theirs.
        layout: the layout.

    Raises:
        ValueError: if it cannot hold such layers.
    """
    forms = tensors_for(spec, layout)
    shared = [form for form in forms if any(tensor.is_shared for tensor in form)]
    parts = [tensor.parts for form in shared for tensor in form if tensor.is_shared]
    if shared and all(_are_one([read(part) for part in each]) for each in parts for read in layers):
        return shared[0]
    return next((form for form in forms if form not in shared), forms[0])


def _are_one(weights: list[np.ndarray]) -> bool:
    first, *others = (_bits(weight) for weight in weights)
    return all(np.array_equal(first, other) for other in others)


def lay_out(
    name: str, read: Callable[[str], np.ndarray], form: tuple[Tensor, ...], spec: AttentionSpec, layout: Layout
) -> np.ndarray:
    """One tensor of a layout. Memory holds it and one canonical weight at a time.

    Args:
        name: of the tensor; one of those of the form.
        read: gives a canonical weight by its name.
        form: the tensors of the layout, as `form_for` gives them for this layer.
        spec: the layer.
        layout: the layout.
    """
    tensor = next(tensor for tensor in form if matches(tensor.name, [name]))
    laid_out = np.empty(0)
    for part in tensor.parts:
        weight = read(part)
        if laid_out.size == 0:
            laid_out = np.zeros(shapes_of([tensor], spec, layout)[name], weight.dtype)
        view = _features(_heads(_bits(laid_out), part, tensor, spec, layout), part, spec, layout)
        source = _bits(weight)
        if tensor.is_per_head:
            heads = source if tensor.is_whole else source.reshape(-1, view.shape[0], *weight.shape[1:])
            source = heads[_head_of(tensor.name, name)]
        view[...] = source.reshape(view.shape)
    return laid_out


# ---- Layout -> canonical ---------------------------------------------------------------------------------------------


def to_canonical(
    tensors: Mapping[str, Any], layout: Layout, **said: Unpack[LayerKeywords]
) -> tuple[Weights, AttentionSpec]:
    """Canonical weights, and the specification of the layer, from the tensors of a layout.

    Args:
        tensors: arrays by name, of any framework, without the prefix of the layer; in nested mappings, too, as Flax
            has them.
        layout: theirs.
        said: the layer, where the shapes leave it open. No checkpoint's tensors show RoPE.

    Raises:
        ValueError: if names are missing or unknown, shapes do not fit, or the heads can be read in more than one way.
    """
    tensors = to_numpy_by_name(tensors)
    held = [name for name in tensors if not layout.ignores(name)]
    for name in held:
        if not is_floating(tensors[name].dtype):
            raise WrongType(name, "be a floating-point array", {f"{name}.dtype": tensors[name].dtype})
    dtypes = sorted({tensors[name].dtype.name for name in held})
    if len(dtypes) > 1:
        raise WrongType("weights", "have one dtype", str(dtypes))
    shapes = {name: tensors[name].shape for name in held}
    hints = LayerHints.by(CALLER, **said)
    spec = find_spec(shapes, layout, hints) if hints.spec is None else hints.spec
    form, read = find_tensors(shapes, spec, layout), tensors.__getitem__
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
        form: the tensors of the layout that there are, as `find_tensors` gives them.
        spec: the layer.
        layout: the layout.
    """
    tensor = next(tensor for tensor in form if name in tensor.parts)
    names = [tensor.name]
    if tensor.is_per_head:
        names = list(shapes_of([tensor], spec, layout))
    arrays = [read(each) for each in names]
    heads = [_heads(_bits(array), name, tensor, spec, layout) for array in arrays]
    views = [_features(each, name, spec, layout) for each in heads]
    if layout.padded and any(np.count_nonzero(a) != np.count_nonzero(b) for a, b in zip(heads, views, strict=True)):
        raise Refusal(f"features that pad the heads of {name}", "be 0", "others")
    weight = np.stack(views) if tensor.is_per_head else views[0]
    return weight.reshape(weight_shapes(spec)[name]).view(arrays[0].dtype)


# ---- Views -----------------------------------------------------------------------------------------------------------
# A canonical weight in a tensor is a view of it, whose elements, in C order, are those of the weight. To write through
# the view is one direction of a conversion, to read it the other.


def _heads(array: np.ndarray, name: str, tensor: Tensor, spec: AttentionSpec, layout: Layout) -> np.ndarray:
    """The heads of one canonical weight in a tensor, with what pads them; of one without heads all of it."""
    if tensor.is_whole:
        return einops.rearrange(array, f"{tensor.axes} -> {tensor.logical}")
    sizes = sizes_of(tensor, spec, layout)
    axes = tensor.logical.replace("n ", "") if tensor.is_per_head else tensor.logical
    known = {axis: sizes[axis] for axis in axes.split() if axis in "nh"}
    axes = axes.replace("n", "(p n)") if tensor.has_projection_axis else axes
    heads = einops.rearrange(array, f"{tensor.axes} -> {axes}", **known)
    if len(tensor.parts) == 1 or tensor.is_shared:
        return heads
    which, counts = tensor.parts.index(name), head_counts(tensor, spec)
    groups = min(counts) if layout.grouped else layout.blocks
    if groups > 1:  # the same division, of each group by itself
        heads, counts = _split(heads, 0, groups, -1), [count // groups for count in counts]
    begin, end = sum(counts[:which]), sum(counts[: which + 1])
    return heads[:, begin:end] if groups > 1 else heads[begin:end]


def _features(heads: np.ndarray, name: str, spec: AttentionSpec, layout: Layout) -> np.ndarray:
    """The features of heads in canonical order, without what pads them."""
    if name not in OF_HEADS:
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


def _head_of(pattern: str, name: str) -> int:
    """Which head a name stands for."""
    before, _, after = pattern.partition("{n}")
    return int(name.removeprefix(before).removesuffix(after))
