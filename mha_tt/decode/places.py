"""What lies on the device between steps: where each sequence goes on, a table of RoPE, weights as a step takes them.

Axes: B batch, S cache slots, N query heads, K key/value heads, P features that a head has on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, Refusal
from mha_tt.arrays import as_dtype
from mha_tt.device import accurate_config, upload, upload_rows, zeros
from mha_tt.layout import TILE, largest_divisor
from mha_tt.rope import Rotation, cos_and_sin, rotated_head

SUBBLOCK = 4
"""Tiles of float32 sums that a core makes at a time, at most."""

MATRIX_FEATURES = 256
"""Features of a head up to which it is rotated by one matrix for each sequence: a wider one does not fit a core."""


class DecodePositions:
    """Where the next token of each sequence goes. The device counts on by itself, and so does the host.

    Attributes:
        slots: the slot of each sequence's next token, and so the last that it sees, (B,), int32.
        table: cos and sin of all positions; None without RoPE.
        kept: what else steps of the layer need.
    """

    slots: Int[Tensor, " B"]
    table: RotaryTable | None
    kept: PreparedWeights

    def __init__(
        self,
        lengths: Int[np.ndarray, " B"],
        table: RotaryTable | None,
        kept: PreparedWeights,
        *,
        is_row_each: bool,
        device: ttnn.MeshDevice,
    ) -> None:
        """Upload the places behind sequences of these lengths.

        With `is_row_each` the rotations of each sequence lie in tiles of their own, else side by side.
        """
        self._lengths, self._is_row_each, self.kept = lengths.copy(), is_row_each, kept
        self.slots, self.table = upload_rows(lengths, device=device, dtype=ttnn.int32), table
        rows = lengths[:, None] if is_row_each else lengths[None]
        self._rows = None if table is None else upload_rows(rows, device=device, dtype=ttnn.uint32)

    def matches(self, lengths: Int[np.ndarray, " B"], table: RotaryTable | None, *, is_row_each: bool) -> bool:
        """Whether they are those that would be made of this."""
        is_alike = self.table is table and self._is_row_each == is_row_each
        return is_alike and np.array_equal(self._lengths, lengths)

    def decode_step(self) -> None:
        """Go on by one token of each sequence, in place."""
        for x in (self.slots, self._rows):
            if x is not None:
                ttnn.plus_one(x)
        self._lengths += 1

    def rotation(self) -> Rotation | None:
        """The rotations of the next tokens; None without RoPE."""
        if self.table is None or self._rows is None:
            return None
        return self.table.rotation(self._rows, is_row_each=self._is_row_each)


# ---- Rotary position embedding ---------------------------------------------------------------------------------------


class RotaryTable:
    """cos and sin of every position of a cache, in rows, of which the device picks by itself.

    The operation that picks takes bfloat16 only. So each number is there as the sum of two, which together have 16
    bits. They are added where products with them are summed, in float32.
    """

    def __init__(self, spec: AttentionSpec, capacity: int, *, device: ttnn.MeshDevice) -> None:
        """Upload the table of a layer with RoPE for caches of this capacity."""
        if spec.rope is None:
            raise Refusal("rope", "be given for a table of rotations", f"rope=None in {spec}")
        self._made_for = (spec.rope, rotated_head(spec), capacity)
        head_dim, width = rotated_head(spec)
        cos, sin = cos_and_sin(np.arange(capacity)[None], spec.rope, head_dim, width, side_by_side=True)
        table = np.concatenate([cos[0], sin[0]], axis=-1).astype(np.float32)
        # The upper half of a float32 is a bfloat16; what is left is rounded to one.
        upper = (table.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        rows = np.concatenate([upper, table - upper], axis=-1)
        self._rows = upload_rows(rows, device=device, dtype=ttnn.bfloat16)
        itself = np.eye(width)
        swapped = np.roll(itself, width // 2, axis=0)
        spread = np.concatenate([itself, swapped, itself, swapped], axis=1)
        self._spread = upload(spread[None, None], device=device)  # a head, and its halves swapped; both once more
        self._gathered = upload(np.concatenate([itself] * 4), device=device)  # the sum of the four

    def is_for(self, spec: AttentionSpec, capacity: int) -> bool:
        """Whether it is the table of such a layer and cache."""
        return spec.rope is not None and self._made_for == (spec.rope, rotated_head(spec), capacity)

    def rotation(self, rows: Int[Tensor, "..."], *, is_row_each: bool) -> Rotation:
        """The rotations in these rows, (1, B) for tokens side by side, (B, 1) for tokens in tiles of their own."""
        factors = ttnn.embedding(rows, self._rows, layout=ttnn.TILE_LAYOUT)
        if is_row_each and self._gathered.shape[1] <= MATRIX_FEATURES:
            return _MatrixRotation(_summed(ttnn.multiply(self._spread, factors), self._gathered, ttnn.float32))
        return _TableRotation(factors, self._spread, self._gathered)


class _MatrixRotation(Rotation):
    """Rotations by a matrix for each sequence, in float32, for heads in tiles of their sequence's."""

    matrices: Float[Tensor, "1 B P P"]

    def __init__(self, matrices: Float[Tensor, "1 B P P"]) -> None:
        object.__setattr__(self, "matrices", matrices)

    def rotate(self, x: Float[Tensor, "1 B heads P"]) -> Float[Tensor, "1 B heads P"]:
        """x with each of its pairs rotated, summed in float32, where x lies, on a core for each sequence."""
        num_tiles = x.shape[3] // TILE
        return ttnn.matmul(
            x,
            self.matrices,
            dtype=x.dtype,
            memory_config=x.memory_config(),
            program_config=ttnn.MatmulMultiCoreReuseProgramConfig(
                compute_with_storage_grid_size=x.device().compute_with_storage_grid_size(),
                in0_block_w=num_tiles,
                out_subblock_h=1,
                out_subblock_w=largest_divisor(num_tiles, SUBBLOCK),
                per_core_M=1,
                per_core_N=num_tiles,
            ),
            compute_kernel_config=accurate_config(x.device()),
        )


class _TableRotation(Rotation):
    """The same without matrices, for heads that lie otherwise or are too wide."""

    factors: Float[Tensor, "... 4P"]
    spread: Float[Tensor, "1 1 P 4P"]
    gathered: Float[Tensor, "4P P"]

    def __init__(self, factors: Tensor, spread: Float[Tensor, "1 1 P 4P"], gathered: Float[Tensor, "4P P"]) -> None:
        for name, value in (("factors", factors), ("spread", spread), ("gathered", gathered)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "positions", None)

    @property
    def counts(self) -> tuple[int, int]:
        """Of how many sequences and tokens they are."""
        return self.factors.shape[0], self.factors.shape[1]

    def rotate(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """x with each of its pairs rotated; products are made and summed in float32, and rounded to 11 bits between."""
        products = ttnn.multiply(_summed(x, self.spread, ttnn.float32), self.factors)
        return _summed(products, self.gathered, x.dtype)


def _summed(x: Tensor, weight: Tensor, dtype: ttnn.DataType) -> Tensor:
    """A product with a matrix of ones and zeros, summed in float32: of a tensor in bfloat16 it is exact."""
    return ttnn.matmul(x, weight, dtype=dtype, compute_kernel_config=accurate_config(x.device()))


# ---- Weights ---------------------------------------------------------------------------------------------------------


class PreparedWeights:
    """What steps of a layer need and do not change: made by the first one, and kept for those that follow.

    A module keeps it, and beside a cache the functions do. What other weights are held for is made again.

    Attributes:
        table: cos and sin of all positions; None without RoPE, and before there was a step.
    """

    table: RotaryTable | None = None

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[tuple[Tensor, ...], Any]] = {}

    def rotary_table(self, spec: AttentionSpec, capacity: int, device: ttnn.MeshDevice) -> RotaryTable:
        """The table of a layer with RoPE for caches of this capacity."""
        if self.table is None or not self.table.is_for(spec, capacity):
            self.table = RotaryTable(spec, capacity, device=device)
        return self.table

    def qkv(self, weights: Mapping[str, Tensor], spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias of `qkv_proj`; put together where the layer holds three projections."""
        if spec.fused_qkv:
            return weights["qkv_proj.weight"], weights.get("qkv_proj.bias")
        matrices = tuple(weights[f"{part}_proj.weight"] for part in "qkv")
        biases = {part: weights[f"{part}_proj.bias"] for part in "qkv" if f"{part}_proj.bias" in weights}

        def make() -> tuple[Tensor, Tensor | None]:
            if not biases:
                return _concat_features(matrices), None
            like = next(iter(biases.values()))
            widths = zip("qkv", (matrix.shape[1] for matrix in matrices), strict=True)
            parts = [
                biases[part] if part in biases else zeros((1, width), like.dtype, like.device())
                for part, width in widths
            ]
            return _concat_features(matrices), _concat_features(parts)

        return self.get_or_make("qkv", (*matrices, *biases.values()), make)

    def get_or_make(self, name: Hashable, made_of: tuple[Tensor, ...], make: Callable[[], Any]) -> Any:
        """What was made under this name before, if of these very tensors, else what is made now."""
        known = self._made.get(name)
        if known is None or [id(x) for x in known[0]] != [id(x) for x in made_of]:  # `==` is an operation of ttnn
            known = self._made[name] = made_of, make()
        return known[1]


def _concat_features(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of whole tiles side by side, in their dtype, which concatenation may widen."""
    return as_dtype(ttnn.concat(list(tensors), dim=-1), tensors[0].dtype)
