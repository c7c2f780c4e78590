"""Decode state on the device between steps: next positions, RoPE table, prepared weights.

Axes: B batch, S cache slots, N query heads, K key/value heads, P features of a head on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, InputError
from mha_tt.arrays import as_dtype
from mha_tt.device import accurate_config, upload, upload_rows, zeros
from mha_tt.features.rope import Rotation, cos_and_sin, rotated_head
from mha_tt.layout import TILE, largest_divisor

SUBBLOCK = 4
"""Maximum number of float32 result tiles that a core computes at a time."""

MATRIX_FEATURES = 256
"""Maximum features of a head that is rotated by one matrix per sequence: wider ones do not fit a
core.
"""


class DecodePositions:
    """Next position of each sequence, counted on the device and, separately, on the host.

    Attributes:
        slots: slot of each sequence's next token, and thus the last it attends to, (B,), int32.
        table: cos and sin of all positions; None without RoPE.
        prepared: other tensors that steps of the layer need.
    """

    slots: Int[Tensor, " B"]
    table: RotaryTable | None
    prepared: PreparedWeights

    def __init__(
        self,
        lengths: Int[np.ndarray, " B"],
        table: RotaryTable | None,
        prepared: PreparedWeights,
        *,
        is_row_each: bool,
        device: ttnn.MeshDevice,
    ) -> None:
        """Upload the next positions of sequences of these lengths.

        With `is_row_each` the rotations of each sequence have their own tiles; otherwise sequences
        share tiles.
        """
        self._lengths = lengths.copy()
        self._is_row_each = is_row_each
        self.prepared = prepared
        self.slots = upload_rows(lengths, device=device, dtype=ttnn.int32)
        self.table = table
        if is_row_each:
            rows = lengths[:, None]
        else:
            rows = lengths[None]
        if table is None:
            self._rows = None
        else:
            self._rows = upload_rows(rows, device=device, dtype=ttnn.uint32)

    def matches(
        self, lengths: Int[np.ndarray, " B"], table: RotaryTable | None, *, is_row_each: bool
    ) -> bool:
        """Return whether the state is that for these arguments."""
        is_alike = self.table is table and self._is_row_each == is_row_each
        return is_alike and np.array_equal(self._lengths, lengths)

    def advance(self) -> None:
        """Advance by one token per sequence, in place."""
        for x in (self.slots, self._rows):
            if x is not None:
                ttnn.plus_one(x)
        self._lengths += 1

    def rotation(self) -> Rotation | None:
        """Return the rotation of the next tokens; None without RoPE."""
        if self.table is None or self._rows is None:
            return None
        return self.table.rotation(self._rows, is_row_each=self._is_row_each)


# ---- Rotary position embedding -------------------------------------------------------------------


class RotaryTable:
    """cos and sin of all positions of a cache, in rows that the device looks up by itself.

    The lookup supports only bfloat16. Each number is therefore stored as the sum of two, which
    together have 16 bits. They are added in the float32 sums of products.
    """

    def __init__(self, spec: AttentionSpec, capacity: int, *, device: ttnn.MeshDevice) -> None:
        """Upload the table of a layer with RoPE for caches of this capacity."""
        if spec.rope is None:
            raise InputError("rope", "be set for a table of rotations", f"rope=None in {spec}")
        self._made_for = (spec.rope, rotated_head(spec), capacity)
        head_dim, width = rotated_head(spec)
        cos, sin = cos_and_sin(
            np.arange(capacity)[None], spec.rope, head_dim, width, side_by_side=True
        )
        table = np.concatenate([cos[0], sin[0]], axis=-1).astype(np.float32)
        # The upper half of a float32 is a bfloat16; the rest is rounded to one.
        upper = (table.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        rows = np.concatenate([upper, table - upper], axis=-1)
        self._rows = upload_rows(rows, device=device, dtype=ttnn.bfloat16)
        # The product with `spread` is a head, its swapped halves, and both again.
        itself = np.eye(width)
        swapped = np.roll(itself, width // 2, axis=0)
        spread = np.concatenate([itself, swapped, itself, swapped], axis=1)
        self._spread = upload(spread[None, None], device=device)
        self._gathered = upload(np.concatenate([itself] * 4), device=device)  # sum of the four

    def is_for(self, spec: AttentionSpec, capacity: int) -> bool:
        """Return whether the table is for such a layer and cache."""
        return spec.rope is not None and self._made_for == (spec.rope, rotated_head(spec), capacity)

    def rotation(self, rows: Int[Tensor, "..."], *, is_row_each: bool) -> Rotation:
        """Return the rotation of these rows: (1, B) for tokens in shared tiles, (B, 1) for tokens
        in their own.
        """
        factors = ttnn.embedding(rows, self._rows, layout=ttnn.TILE_LAYOUT)
        if is_row_each and self._gathered.shape[1] <= MATRIX_FEATURES:
            return _MatrixRotation(
                _summed(ttnn.multiply(self._spread, factors), self._gathered, ttnn.float32)
            )
        return _TableRotation(factors, self._spread, self._gathered)


class _MatrixRotation(Rotation):
    """Rotation by one matrix per sequence, in float32, for heads in tiles of their sequence."""

    matrices: Float[Tensor, "1 B P P"]

    def __init__(self, matrices: Float[Tensor, "1 B P P"]) -> None:
        object.__setattr__(self, "matrices", matrices)

    def rotate(self, x: Float[Tensor, "1 B heads P"]) -> Float[Tensor, "1 B heads P"]:
        """Return x with all pairs rotated, accumulated in float32, on one core per sequence like
        x.
        """
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
    """Rotation without matrices, for heads in other layouts or too wide."""

    factors: Float[Tensor, "... 4P"]
    spread: Float[Tensor, "1 1 P 4P"]
    gathered: Float[Tensor, "4P P"]

    def __init__(
        self, factors: Tensor, spread: Float[Tensor, "1 1 P 4P"], gathered: Float[Tensor, "4P P"]
    ) -> None:
        for name, value in (("factors", factors), ("spread", spread), ("gathered", gathered)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "positions", None)

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of sequences and tokens."""
        return self.factors.shape[0], self.factors.shape[1]

    def rotate(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return x with all pairs rotated; products and sums are float32, rounded to 11 bits in
        between.
        """
        products = ttnn.multiply(_summed(x, self.spread, ttnn.float32), self.factors)
        return _summed(products, self.gathered, x.dtype)


def _summed(x: Tensor, weight: Tensor, dtype: ttnn.DataType) -> Tensor:
    """Return the product with a matrix of ones and zeros, accumulated in float32: exact for
    bfloat16 tensors.
    """
    return ttnn.matmul(x, weight, dtype=dtype, compute_kernel_config=accurate_config(x.device()))


# ---- Weights -------------------------------------------------------------------------------------


class PreparedWeights:
    """Constant tensors for the steps of a layer: computed by the first step and cached for later
    ones.

    Modules store it; functions store it with the cache. Entries for other weights are recomputed.

    Attributes:
        table: cos and sin of all positions; None without RoPE and before the first step.
    """

    table: RotaryTable | None = None

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[tuple[Tensor, ...], Any]] = {}

    def rotary_table(
        self, spec: AttentionSpec, capacity: int, device: ttnn.MeshDevice
    ) -> RotaryTable:
        """Return the table of a layer with RoPE for caches of this capacity."""
        if self.table is None or not self.table.is_for(spec, capacity):
            self.table = RotaryTable(spec, capacity, device=device)
        return self.table

    def qkv(
        self, weights: Mapping[str, Tensor], spec: AttentionSpec
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias of `qkv_proj`, concatenated if the layer has three
        projections.
        """
        if spec.fused_qkv:
            return weights["qkv_proj.weight"], weights.get("qkv_proj.bias")
        matrices = tuple(weights[f"{part}_proj.weight"] for part in "qkv")
        biases = {
            part: weights[f"{part}_proj.bias"] for part in "qkv" if f"{part}_proj.bias" in weights
        }

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

    def get_or_make(
        self, name: Hashable, made_of: tuple[Tensor, ...], make: Callable[[], Any]
    ) -> Any:
        """Return the entry of this name if it was computed from these tensors; otherwise compute
        it.
        """
        known = self._made.get(name)
        # `==` is an operation of ttnn.
        if known is None or [id(x) for x in known[0]] != [id(x) for x in made_of]:
            known = self._made[name] = made_of, make()
        return known[1]


def _concat_features(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of whole tiles, in their dtype, which concatenation may widen."""
    return as_dtype(ttnn.concat(list(tensors), dim=-1), tensors[0].dtype)
