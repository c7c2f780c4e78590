"""The placement of an attention layer in a layout: shapes of tensors, and conversion both ways.

Both directions follow from the layout's declaration. A canonical weight in a tensor is a view of
it, whose elements, in C order, are the weight's. Writing through the view is one direction,
reading from it the other. So no step may copy: axes are split, moved and cut, but never joined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import einops
import numpy as np

from mha_spec import AttentionSpec, InputError
from parity.port.conversion.layouts.layout import TILE, Layout, Tensor

AXIS_OF_FEATURES = {
    "q_proj.weight": -2,
    "k_proj.weight": -2,
    "v_proj.weight": -2,
    "out_proj.weight": -1,
    "q_proj.bias": -1,
    "k_proj.bias": -1,
    "v_proj.bias": -1,
}
"""Axis of the features of a head, which a layout may reorder or pad, in canonical weights."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """A layer in the tensors of a layout: the tensors of one form, and its optional ones."""

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
        shapes: dict[str, Shape] = {}
        for shapes_of_tensor in self._shapes.values():
            shapes.update(shapes_of_tensor)
        return shapes

    @cached_property
    def holders(self) -> dict[str, Tensor]:
        """Return the tensor of each name in the layout."""
        holders: dict[str, Tensor] = {}
        for tensor, shapes_of_tensor in self._shapes.items():
            holders.update(dict.fromkeys(shapes_of_tensor, tensor))
        return holders

    @cached_property
    def _shapes(self) -> dict[Tensor, dict[str, Shape]]:
        """Return the names and shapes of each tensor: one, or one per head."""
        return {tensor: self._shapes_of(tensor) for tensor in self.tensors}

    def _shapes_of(self, tensor: Tensor) -> dict[str, Shape]:
        if tensor.is_whole:
            shape = self._shape_of_whole(tensor)
        else:
            shape = tensor.shape(self._sizes[tensor])
        if not tensor.is_per_head:
            return {tensor.name: shape}
        if tensor.is_whole:
            num_heads, *rest = shape
            shape = tuple(rest)
        else:
            num_heads = self._sizes[tensor]["n"]
        return {tensor.name.format(n=head): shape for head in range(num_heads)}

    def _shape_of_whole(self, tensor: Tensor) -> Shape:
        shape = self.weights[tensor.holds]
        if tensor.axes == "...":
            return shape
        if tensor.axes == "d e":
            return shape[::-1]
        if tensor.axes == "(n h) d":
            depth, num_heads, num_features = shape
            return num_heads * num_features, depth
        rows, columns = shape
        num_heads = self.spec.num_heads
        return columns, num_heads, rows // num_heads

    @cached_property
    def _sizes(self) -> dict[Tensor, dict[str, int]]:
        """Return the axis sizes of tensors with heads, by letter."""
        sizes: dict[Tensor, dict[str, int]] = {}
        for tensor in self.tensors:
            if not tensor.is_whole:
                sizes[tensor] = self._sizes_in(tensor)
        return sizes

    def _sizes_in(self, tensor: Tensor) -> dict[str, int]:
        spec = self.spec
        letters = {*tensor.holds}
        sizes = {"n": sum(head_counts(tensor, spec)), "e": spec.d_model}
        if tensor.has_projection_axis:
            sizes["p"] = len(tensor.holds)
            sizes["n"] //= sizes["p"]
        if letters & {"q", "k"}:
            num_features = spec.head_dim
        else:
            num_features = spec.value_head_dim
        if self.layout.padded:
            num_features = padded_width(num_features, spec.rope is not None)
        sizes["h"] = num_features
        # A gate has the input of the queries.
        if letters & {"q", "g"}:
            sizes["d"] = spec.d_in
        else:
            sizes["d"] = spec.d_kv
        return sizes

    # ---- Both directions -------------------------------------------------------------------------

    def lay_out(self, name: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Make a tensor of the layout.

        Memory holds it and one canonical weight, returned by `read`, at a time.
        """
        tensor = self.holders[name]
        laid_out = None
        for part in tensor.parts:
            weight = read(part)
            if laid_out is None:
                # Zeros, because nothing else is written where heads are padded.
                laid_out = np.zeros(self.shapes[name], weight.dtype)
            heads = self._heads(_bits(laid_out), part, tensor)
            view = self._features(heads, part)
            bits = _bits(weight)
            if tensor.is_per_head:
                names_of_heads = [*self._shapes[tensor]]
                if not tensor.is_whole:
                    # The view may have the features in two axes, so it does not show their number.
                    bits = bits.reshape(len(names_of_heads), -1, *weight.shape[1:])
                bits = bits[names_of_heads.index(name)]
            view[...] = bits.reshape(view.shape)
        if laid_out is None:
            raise ValueError(f"{name} holds no weight")
        return laid_out

    def read_out(self, name: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Return a canonical weight, which may share memory with the tensor that `read` returns."""
        tensor = self._holder_of(name)
        arrays = [read(own_name) for own_name in self._shapes[tensor]]
        views = []
        for array in arrays:
            heads = self._heads(array, name, tensor)
            view = self._features(heads, name)
            if self.layout.padded and np.count_nonzero(heads) != np.count_nonzero(view):
                raise InputError(f"features that pad the heads of {name}", "be 0", "others")
            views.append(view)
        weight = views[0]
        if tensor.is_per_head:
            weight = np.stack(views)
        return weight.reshape(self.weights[name])

    def _holder_of(self, name: str) -> Tensor:
        """Return the tensor that holds a canonical weight."""
        for tensor in self.tensors:
            if name in tensor.parts:
                return tensor
        raise KeyError(name)

    def _heads(self, array: np.ndarray, name: str, tensor: Tensor) -> np.ndarray:
        """Return a view of the heads of one canonical weight in a tensor, padding included.

        Weights without heads are returned whole. With packed groups or blocks, these are the first
        axis, and their share of the heads is the second.
        """
        sizes: dict[str, int] = {}
        if tensor.is_whole:
            if "n" in tensor.axes:
                sizes["n"] = self.spec.num_heads
            return einops.rearrange(array, f"{tensor.axes} -> {tensor.logical}", **sizes)
        axes = tensor.logical
        if tensor.is_per_head:
            axes = axes.replace("n ", "")
        # The number of heads or their features, as far as they are axes, determine the other sizes.
        for axis in ("n", "h"):
            if axis in axes.split():
                sizes[axis] = self._sizes[tensor][axis]
        if tensor.has_projection_axis:
            # Projections are selected: joining their axis with the axis of heads might copy.
            projections = einops.rearrange(array, f"{tensor.axes} -> p {axes}", **sizes)
            return projections[tensor.parts.index(name)]
        heads = einops.rearrange(array, f"{tensor.axes} -> {axes}", **sizes)
        if len(tensor.parts) == 1 or tensor.is_shared:
            return heads
        index = tensor.parts.index(name)
        counts = head_counts(tensor, self.spec)
        num_groups = self.layout.blocks
        if self.layout.grouped:
            # A group is a key/value head with its query heads: as many groups as key/value heads.
            num_groups = min(counts)
        shares = [count // num_groups for count in counts]
        begin = sum(shares[:index])
        end = begin + shares[index]
        if num_groups == 1:
            return heads[begin:end]
        in_groups = _split(heads, 0, num_groups, -1)
        return in_groups[:, begin:end]

    def _features(self, heads: np.ndarray, name: str) -> np.ndarray:
        """Return a view of the features of heads in canonical order, without padding."""
        layout, spec = self.layout, self.spec
        if name not in AXIS_OF_FEATURES:
            return heads
        axis = heads.ndim + AXIS_OF_FEATURES[name]
        if layout.padded and spec.rope is not None:
            return _first(_split(heads, axis, 2, -1), axis + 1, spec.head_dim // 2)
        if layout.padded:
            return _first(heads, axis, spec.head_dim)
        if layout.rope == "interleaved" and name[0] in "qk":
            return _split(heads, axis, -1, 2).swapaxes(axis, axis + 1)
        return heads


def head_counts(tensor: Tensor, spec: AttentionSpec) -> list[int]:
    """Count the heads of each projection in a tensor."""
    if tensor.holds == "out":
        return [spec.num_heads]
    letters = tensor.holds
    if tensor.is_shared:
        letters = letters[0]
    counts: list[int] = []
    for letter in letters:
        if letter in "kv":
            counts.append(spec.num_kv_heads)
        else:
            counts.append(spec.num_heads)
    return counts


def padded_width(head_dim: int, rope: bool) -> int:
    """Return the padded size of a head in whole tiles; with RoPE each half is padded separately."""
    if rope:
        half = -(-head_dim // 2)
        return 2 * padded_width(half, rope=False)
    return -(-head_dim // TILE) * TILE


def _split(x: np.ndarray, axis: int, outer: int, inner: int) -> np.ndarray:
    """Return a view with one axis split in two; -1 stands for the remaining size."""
    return x.reshape(*x.shape[:axis], outer, inner, *x.shape[axis + 1 :])


def _first(x: np.ndarray, axis: int, count: int) -> np.ndarray:
    """Return a view of the first entries of an axis."""
    return x[(slice(None),) * axis + (slice(count),)]


def _bits(x: np.ndarray) -> np.ndarray:
    """View memory as unsigned integers, because NumPy is slow with dtypes that are not its own."""
    return x.view(f"u{x.dtype.itemsize}")
