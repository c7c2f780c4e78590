"""Where the next token of each sequence goes, kept on the device beside the table of RoPE: then a step uploads nothing.

Axes: B batch, S cache slots, P features that a head has on the device.
"""

from __future__ import annotations

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec
from mha_tt.device import TILE, accurate_config, as_dtype, upload, upload_rows
from mha_tt.rope import Rotation, at_least_float32, cos_and_sin, rotated_head
from mha_tt.slots import one_core_each

KERNEL_FEATURES = 128
"""Features of a head up to which the framework's kernel of RoPE is taken: it works on the tiles of a head at once."""


class Places:
    """Where the next token of each sequence goes. The device counts on by itself, and so does the host.

    Attributes:
        slots: the slot of each sequence's next token, and so the last that it sees, (B,), int32.
        table: cos and sin of all positions; None without RoPE.
    """

    slots: Int[Tensor, " B"]
    table: RotaryTable | None

    def __init__(
        self, lengths: Int[np.ndarray, " B"], table: RotaryTable | None, *, is_row_each: bool, device: ttnn.MeshDevice
    ) -> None:
        """Upload the places behind sequences of these lengths.

        With `is_row_each` the rotations of each sequence lie in tiles of their own, else side by side.
        """
        self._lengths, self._is_row_each = lengths.copy(), is_row_each
        self.slots, self.table = upload_rows(lengths, device=device, dtype=ttnn.int32), table
        rows = lengths[:, None] if is_row_each else lengths[None]
        self._rows = None if table is None else upload_rows(rows, device=device, dtype=ttnn.uint32)

    def are_behind(self, lengths: Int[np.ndarray, " B"], table: RotaryTable | None, *, is_row_each: bool) -> bool:
        """Whether they are those that would be made of this."""
        is_alike = self.table is table and self._is_row_each == is_row_each
        return is_alike and np.array_equal(self._lengths, lengths)

    def advance(self) -> None:
        """Go on by one token of each sequence, in place."""
        for x in (self.slots, self._rows):
            if x is not None:
                ttnn.plus_one(x)
        self._lengths += 1

    def rotation(self) -> Rotation | None:
        """The rotations of the next tokens; None without RoPE."""
        return None if self.table is None or self._rows is None else self.table.rotation(self._rows)


class RotaryTable:
    """cos and sin of every position of a cache, in rows, of which the device picks by itself.

    The operation that picks takes bfloat16 only. So each number is there as the sum of two, which together have 16
    bits; or, for the framework's kernel of RoPE, which takes no other either, as one.
    """

    def __init__(self, spec: AttentionSpec, capacity: int, *, for_kernel: bool, device: ttnn.MeshDevice) -> None:
        """Upload the table of a layer with RoPE for caches of this capacity."""
        if spec.rope is None:
            raise ValueError(f"rope must be given for a table of rotations, got rope=None in {spec}")
        self._made_for = (spec.rope, rotated_head(spec), capacity, for_kernel)
        head_dim, self._width = rotated_head(spec)
        cos, sin = cos_and_sin(np.arange(capacity)[None], spec.rope, head_dim, self._width, side_by_side=True)
        if for_kernel:  # which changes this sign itself
            sin[..., : self._width // 2] *= -1.0
        table = np.concatenate([cos[0], sin[0]], axis=-1).astype(np.float32)
        # The upper half of a float32 is a bfloat16; what is left is rounded to one.
        upper = (table.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        terms = [table] if for_kernel else [upper, table - upper]
        self._terms = [upload_rows(term, device=device, dtype=ttnn.bfloat16) for term in terms]
        half = np.roll(np.eye(self._width), self._width // 2, axis=0)
        self._swap = None if for_kernel else upload(half, device=device)

    def is_for(self, spec: AttentionSpec, capacity: int, *, for_kernel: bool) -> bool:
        """Whether it is the table of such a layer and cache."""
        return spec.rope is not None and self._made_for == (spec.rope, rotated_head(spec), capacity, for_kernel)

    def rotation(self, rows: Int[Tensor, "..."]) -> Rotation:
        """The rotations in these rows, (1, B) for tokens side by side, (B, 1) for tokens in tiles of their own."""
        dtype, width = ttnn.bfloat16 if self._swap is None else ttnn.float32, self._width
        terms = [ttnn.embedding(rows, term, layout=ttnn.TILE_LAYOUT, dtype=dtype) for term in self._terms]
        if self._swap is not None:
            both = ttnn.add(*terms)
            return _TableRotation(both[:, :, :width], both[:, :, width:], self._swap)
        batch_size = rows.shape[0]
        both = ttnn.reshape(terms[0], (1, batch_size, 1, 2 * width))
        sharded = one_core_each(batch_size, TILE, width, rows.device())
        ends = [(0, width), (width, 2 * width)]
        parts = (ttnn.slice(both, (0, 0, 0, a), (1, batch_size, 1, b), memory_config=sharded) for a, b in ends)
        return _KernelRotation(*parts)


class _TableRotation(Rotation):
    """Rotations of positions that the host need not know."""

    swap: Float[Tensor, "P P"]

    def __init__(self, cos: Float[Tensor, "..."], sin: Float[Tensor, "..."], swap: Float[Tensor, "P P"]) -> None:
        for name, value in (("positions", None), ("cos", cos), ("sin", sin), ("swap", swap)):
            object.__setattr__(self, name, value)

    @property
    def counts(self) -> tuple[int, int]:
        """Of how many sequences and tokens they are."""
        return self.cos.shape[0], self.cos.shape[1]

    def rotate(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """x with each of its pairs rotated, where x lies; computed in float32, in the dtype of x, bfloat16."""
        config = accurate_config(x.device())  # a product with ones is exact
        swapped = ttnn.matmul(x, self.swap, dtype=ttnn.float32, compute_kernel_config=config)
        rotated = ttnn.addcmul(ttnn.multiply(at_least_float32(x), self.cos), swapped, self.sin)
        return as_dtype(rotated, x.dtype)


class _KernelRotation(Rotation):
    """The same by the framework's kernel, in bfloat16 throughout, for heads on one core for each sequence."""

    def __init__(self, cos: Float[Tensor, "1 B 1 P"], sin: Float[Tensor, "1 B 1 P"]) -> None:
        for name, value in (("positions", None), ("cos", cos), ("sin", sin)):
            object.__setattr__(self, name, value)

    def rotate(self, x: Float[Tensor, "1 B heads P"]) -> Float[Tensor, "1 B heads P"]:
        """x with each of its pairs rotated."""
        return ttnn.experimental.rotary_embedding_hf(x, self.cos, self.sin, is_decode_mode=True)
