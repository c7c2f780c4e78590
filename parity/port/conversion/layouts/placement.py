"""The placement of an attention layer in the tensors of a layout: their shapes, and conversion in
both directions.

Both directions follow from the layout's declaration. A canonical weight in a tensor is a view of
it, whose elements, in C order, are those of the weight. Writing through the view is one direction,
reading from it the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import einops
import numpy as np

from mha_spec import AttentionSpec, InputError
from parity.port.conversion.layouts.layout import TILE, Layout, Tensor

OF_HEADS = tuple(
    f"{name}_proj.{leaf}" for name in ("q", "k", "v", "out") for leaf in ("weight", "bias")
)[:-1]
"""Canonical weights with features of heads, which a layout may reorder or pad."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """A layer in the tensors of a layout: those of one form, and the optional tensors that the
    layer has.
    """

    layout: Layout
    spec: AttentionSpec
    tensors: tuple[Tensor, ...]

    @cached_property
    def weights(self) -> dict[str, Shape]:
        """Return canonical names and shapes."""
        return self.spec.weight_shapes

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Return names and shapes in the layout."""
        return {name: shape for held in self._shapes.values() for name, shape in held.items()}

    @cached_property
    def holders(self) -> dict[str, Tensor]:
        """Return the tensor of each name in the layout."""
        return {name: tensor for tensor, held in self._shapes.items() for name in held}

    @cached_property
    def _shapes(self) -> dict[Tensor, dict[str, Shape]]:
        found = {}
        for tensor in self.tensors:
            if tensor.is_whole:
                shape = self._shape_of_whole(tensor)
                count, shape = (shape[0], shape[1:]) if tensor.is_per_head else (1, shape)
            else:
                count, shape = self._sizes[tensor]["n"], tensor.shape(self._sizes[tensor])
            names = (
                [tensor.name.format(n=n) for n in range(count)]
                if tensor.is_per_head
                else [tensor.name]
            )
            found[tensor] = dict.fromkeys(names, shape)
        return found

    def _shape_of_whole(self, tensor: Tensor) -> Shape:
        shape = self.weights[tensor.holds]
        if tensor.axes == "...":
            return shape
        num_heads = self.spec.num_heads
        return (
            (shape[1], num_heads, shape[0] // num_heads) if tensor.axes == "d n h" else shape[::-1]
        )

    @cached_property
    def _sizes(self) -> dict[Tensor, dict[str, int]]:
        """Return the axis sizes of tensors with heads, by letter."""
        return {tensor: self._sizes_in(tensor) for tensor in self.tensors if not tensor.is_whole}

    def _sizes_in(self, tensor: Tensor) -> dict[str, int]:
        spec, holds = self.spec, {*tensor.holds}
        is_out = tensor.holds == "out"
        heads = sum(head_counts(tensor, spec))
        counts = {"n": heads}
        if tensor.has_projection_axis:
            counts = {"p": len(tensor.holds), "n": heads // len(tensor.holds)}
        features = spec.head_dim if holds & {*"qk"} else spec.value_head_dim
        if self.layout.padded:
            features = padded_width(features, spec.rope is not None)
        width = spec.d_in if holds & {*"qg"} and not is_out else spec.d_kv
        return {**counts, "h": features, "d": width, "e": spec.d_model}

    # ---- Both directions -------------------------------------------------------------------------

    def lay_out(self, name: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Make a tensor of the layout. Memory holds it and one canonical weight, returned by
        `read`, at a time.
        """
        tensor, laid_out = self.holders[name], np.empty(0)
        for part in tensor.parts:
            weight = read(part)
            if laid_out.size == 0:
                laid_out = np.zeros(self.shapes[name], weight.dtype)
            view = self._features(self._heads(_bits(laid_out), part, tensor), part)
            source = _bits(weight)
            if tensor.is_per_head:
                heads = (
                    source
                    if tensor.is_whole
                    else source.reshape(-1, view.shape[0], *weight.shape[1:])
                )
                source = heads[[*self._shapes[tensor]].index(name)]
            view[...] = source.reshape(view.shape)
        return laid_out

    def read_out(self, name: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Return a canonical weight, which may share memory with the tensor that `read` returns."""
        tensor = next(tensor for tensor in self.tensors if name in tensor.parts)
        arrays = [read(each) for each in self._shapes[tensor]]
        heads = [self._heads(_bits(array), name, tensor) for array in arrays]
        views = [self._features(each, name) for each in heads]
        if self.layout.padded and any(
            np.count_nonzero(a) != np.count_nonzero(b) for a, b in zip(heads, views, strict=True)
        ):
            raise InputError(f"features that pad the heads of {name}", "be 0", "others")
        weight = np.stack(views) if tensor.is_per_head else views[0]
        return weight.reshape(self.weights[name]).view(arrays[0].dtype)

    def _heads(self, array: np.ndarray, name: str, tensor: Tensor) -> np.ndarray:
        """Return the heads of one canonical weight in a tensor, padding included; the whole if it
        has no heads.
        """
        if tensor.is_whole:
            return einops.rearrange(array, f"{tensor.axes} -> {tensor.logical}")
        axes = tensor.logical.replace("n ", "") if tensor.is_per_head else tensor.logical
        known = {axis: self._sizes[tensor][axis] for axis in axes.split() if axis in "nh"}
        axes = axes.replace("n", "(p n)") if tensor.has_projection_axis else axes
        heads = einops.rearrange(array, f"{tensor.axes} -> {axes}", **known)
        if len(tensor.parts) == 1 or tensor.is_shared:
            return heads
        which, counts = tensor.parts.index(name), head_counts(tensor, self.spec)
        groups = min(counts) if self.layout.grouped else self.layout.blocks
        if groups > 1:  # divide each group in the same way
            heads, counts = _split(heads, 0, groups, -1), [count // groups for count in counts]
        begin, end = sum(counts[:which]), sum(counts[: which + 1])
        return heads[:, begin:end] if groups > 1 else heads[begin:end]

    def _features(self, heads: np.ndarray, name: str) -> np.ndarray:
        """Return the features of heads in canonical order, without padding."""
        layout, spec = self.layout, self.spec
        if name not in OF_HEADS:
            return heads
        axis = heads.ndim - (
            2 if name in ("q_proj.weight", "k_proj.weight", "v_proj.weight") else 1
        )
        if layout.padded and spec.rope is not None:
            return _first(_split(heads, axis, 2, -1), axis + 1, spec.head_dim // 2)
        if layout.padded:
            return _first(heads, axis, spec.head_dim)
        if layout.rope == "interleaved" and name[0] in "qk":
            return _split(heads, axis, -1, 2).swapaxes(axis, axis + 1)
        return heads


def head_counts(tensor: Tensor, spec: AttentionSpec) -> list[int]:
    """Count the heads of each projection in a tensor."""
    words = (
        ["out"] if tensor.holds == "out" else tensor.holds[:1] if tensor.is_shared else tensor.holds
    )
    return [spec.num_kv_heads if word in ("k", "v") else spec.num_heads for word in words]


def padded_width(head_dim: int, rope: bool) -> int:
    """Return the padded size of a head in whole tiles; with RoPE each half is padded separately."""
    return 2 * padded_width(-(-head_dim // 2), False) if rope else -(-head_dim // TILE) * TILE


def _split(x: np.ndarray, axis: int, outer: int, inner: int) -> np.ndarray:
    """Return a view with one axis split in two; -1 stands for the remaining size."""
    return x.reshape(*x.shape[:axis], outer, inner, *x.shape[axis + 1 :])


def _first(x: np.ndarray, axis: int, count: int) -> np.ndarray:
    return x[(slice(None),) * axis + (slice(count),)]


def _bits(x: np.ndarray) -> np.ndarray:
    """View memory as unsigned integers, because NumPy is slow with dtypes that are not its own."""
    return x.view(f"u{x.dtype.itemsize}")
