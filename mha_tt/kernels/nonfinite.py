"""NaN and infinity: kept from the rows that may not see them, and never lost to those that do.

0 * NaN is NaN, so that what weighs nothing has to be finite. The device does not tell whether it is: what may not be is
made 0 before, and the rows that see it are made NaN afterwards. Where everything is finite, nothing changes.
"""

from __future__ import annotations

import ttnn
from jaxtyping import Float
from ttnn import Tensor

from mha_tt.device import as_dtype, zeros
from mha_tt.masks import DeviceMask


def hide_not_finite(
    mask: DeviceMask, seq_len_q: int, *held: Float[Tensor, "B K S H"]
) -> tuple[list[Float[Tensor, "B K S H"]], Float[Tensor, "B heads T 1"] | None]:
    """Keys or values with 0 in the place of what may not spread, and the rows to spoil in exchange, marked by > 0.

    Where all rows see the same keys, the others are 0, and the rest spreads by itself.
    """
    if mask.real_keys is not None:
        return [ttnn.where(as_dtype(mask.real_keys, x.dtype), x, 0.0) for x in held], None
    finite = [ttnn.isfinite(x) for x in held]
    finite_keys = [ttnn.min(x, dim=3, keepdim=True) for x in finite]
    marked = ttnn.logical_not(finite_keys[0] if len(held) == 1 else ttnn.multiply(*finite_keys))
    cleaned = [ttnn.where(is_finite, x, 0.0) for is_finite, x in zip(finite, held, strict=True)]
    return cleaned, _rows_that_see(marked, mask, seq_len_q)


def _rows_that_see(marked: Float[Tensor, "B K S 1"], mask: DeviceMask, seq_len_q: int) -> Float[Tensor, "B heads T 1"]:
    """How many of the marked keys a row sees: for each key/value head, or each head of the mask where it has more."""
    batch_size, num_heads, seq_len_k, _ = marked.shape
    if mask.is_causal and mask.shape[2] == seq_len_q == seq_len_k:  # needs no mask in memory
        return ttnn.cumsum(_entering_less_leaving(marked, mask.window_size), dim=2)
    shown = mask.shown(seq_len_q, seq_len_k)
    if shown.shape[1] > 1:
        marked = ttnn.repeat_interleave(marked, shown.shape[1] // num_heads, dim=1)
        num_heads = shown.shape[1]
        if shown.shape[0] < batch_size:
            shown = ttnn.repeat(shown, (batch_size, 1, 1, 1))
    # What shares a mask is a row of one product: (b, n, rows, S) (b, n, T, S)^T.
    rows = batch_size * num_heads // (shown.shape[0] * shown.shape[1])
    marked = ttnn.reshape(marked, (shown.shape[0], shown.shape[1], rows, seq_len_k))
    seen = ttnn.matmul(as_dtype(marked, ttnn.bfloat16), shown, transpose_b=True)
    return ttnn.reshape(seen, (batch_size, num_heads, seq_len_q, 1))


def _entering_less_leaving(marked: Float[Tensor, "B K S 1"], window_size: int | None) -> Float[Tensor, "B K S 1"]:
    """What each row sees of the marked keys that the row before did not, less what it has lost sight of."""
    if window_size is None:
        return marked
    marked = as_dtype(marked, ttnn.float32)  # a sum that went back to 0 in bfloat16 might not be 0
    batch_size, num_heads, seq_len, _ = marked.shape
    none = zeros((batch_size, num_heads, window_size, 1), marked.dtype, marked.device())
    return ttnn.subtract(marked, ttnn.concat([none, marked[:, :, : seq_len - window_size]], dim=2))


def spoilt(context: Float[Tensor, "B N T H"], rows: Float[Tensor, "B heads T 1"] | None) -> Float[Tensor, "B N T H"]:
    """The context, NaN in the rows that are marked."""
    if rows is None:
        return context
    repeats = context.shape[1] // rows.shape[1]
    rows = rows if repeats == 1 else ttnn.repeat_interleave(rows, repeats, dim=1)
    return ttnn.where(as_dtype(rows, context.dtype), float("nan"), context)


def emptied(x: Float[Tensor, "B N T ..."], mask: DeviceMask | None) -> Float[Tensor, "B N T ..."]:
    """x, and 0 in the rows in which every key is masked, whatever stood there."""
    if mask is None or mask.keep is None:
        return x
    return ttnn.where(as_dtype(mask.keep, x.dtype), x, 0.0)
