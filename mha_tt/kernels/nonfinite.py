"""Containment of NaN and infinity: rows that mask a non-finite token stay finite, rows that attend to it become NaN.

0 * NaN is NaN, so values with weight 0 must be finite, which the host cannot check without a read-back. Values that may
be non-finite are therefore set to 0 before, and rows that attend to them to NaN afterwards. Finite values are
unaffected.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import ttnn
from jaxtyping import Float
from ttnn import Tensor

from mha_tt.arrays import as_dtype
from mha_tt.device import zeros
from mha_tt.kernels import Kernel
from mha_tt.masks import DeviceMask, Mask
from mha_tt.scores import Scores


def hide_nonfinite(
    mask: DeviceMask, seq_len_q: int, *held: Float[Tensor, "B K S H"]
) -> tuple[list[Float[Tensor, "B K S H"]], Float[Tensor, "B heads T 1"] | None]:
    """Return keys or values with 0 for non-finite ones, and the rows that become NaN, marked by > 0.

    If all rows attend to the same keys, hidden keys are 0, and NaN in the others spreads by itself.
    """
    if mask.real_keys is not None:
        return [ttnn.where(as_dtype(mask.real_keys, x.dtype), x, 0.0) for x in held], None
    finite = [ttnn.isfinite(x) for x in held]
    finite_keys = [ttnn.min(x, dim=3, keepdim=True) for x in finite]
    marked = ttnn.logical_not(finite_keys[0] if len(held) == 1 else ttnn.multiply(*finite_keys))
    cleaned = [ttnn.where(is_finite, x, 0.0) for is_finite, x in zip(finite, held, strict=True)]
    return cleaned, _rows_that_see(marked, mask, seq_len_q)


def _rows_that_see(marked: Float[Tensor, "B K S 1"], mask: DeviceMask, seq_len_q: int) -> Float[Tensor, "B heads T 1"]:
    """Count the marked keys that each row attends to, per key/value head, or per head of the mask if it has more."""
    batch_size, num_heads, seq_len_k, _ = marked.shape
    if mask.is_causal and mask.shape[2] == seq_len_q == seq_len_k:  # needs no mask in memory
        return ttnn.cumsum(_entering_less_leaving(marked, mask.window_size), dim=2)
    shown = mask.shown(seq_len_q, seq_len_k)
    if shown.shape[1] > 1:
        marked = ttnn.repeat_interleave(marked, shown.shape[1] // num_heads, dim=1)
        num_heads = shown.shape[1]
        if shown.shape[0] < batch_size:
            shown = ttnn.repeat(shown, (batch_size, 1, 1, 1))
    # Heads that share a mask are rows of one product: (b, n, rows, S) (b, n, T, S)^T.
    rows = batch_size * num_heads // (shown.shape[0] * shown.shape[1])
    marked = ttnn.reshape(marked, (shown.shape[0], shown.shape[1], rows, seq_len_k))
    seen = ttnn.matmul(as_dtype(marked, ttnn.bfloat16), shown, transpose_b=True)
    return ttnn.reshape(seen, (batch_size, num_heads, seq_len_q, 1))


def _entering_less_leaving(marked: Float[Tensor, "B K S 1"], window_size: int | None) -> Float[Tensor, "B K S 1"]:
    """Count, per row, the marked keys that enter its window minus those that leave it."""
    if window_size is None:
        return marked
    marked = as_dtype(marked, ttnn.float32)  # in bfloat16 a sum may not return to exactly 0
    batch_size, num_heads, seq_len, _ = marked.shape
    none = zeros((batch_size, num_heads, window_size, 1), marked.dtype, marked.device())
    return ttnn.subtract(marked, ttnn.concat([none, marked[:, :, : seq_len - window_size]], dim=2))


def nan_where(context: Float[Tensor, "B N T H"], rows: Float[Tensor, "B heads T 1"] | None) -> Float[Tensor, "B N T H"]:
    """Return the context with NaN in the marked rows."""
    if rows is None:
        return context
    repeats = context.shape[1] // rows.shape[1]
    rows = rows if repeats == 1 else ttnn.repeat_interleave(rows, repeats, dim=1)
    return ttnn.where(as_dtype(rows, context.dtype), float("nan"), context)


def zero_masked_rows(x: Float[Tensor, "B N T ..."], mask: DeviceMask | None) -> Float[Tensor, "B N T ..."]:
    """Return x with 0 in fully masked rows."""
    if mask is None or mask.keep is None:
        return x
    return ttnn.where(as_dtype(mask.keep, x.dtype), x, 0.0)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def contained(kernel: Kernel) -> Kernel:
    """Wrap a kernel for finite keys and values so that it follows the rules for non-finite ones.

    The kernel gets masked keys and values as finite ones. Rows that attend to a non-finite one become NaN afterwards,
    and fully masked rows 0.
    """

    @wraps(kernel)
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> Tensor:
        hidden = mask.with_bias(scores.bias).to_bool(query.shape[2], key.shape[2], query.device())
        mask, nonfinite_rows = Mask(hidden, q_offset=mask.q_offset), None
        if hidden is not None:
            (key, value), nonfinite_rows = hide_nonfinite(hidden, query.shape[2], key, value)
        return zero_masked_rows(nan_where(kernel(query, key, value, mask, scores), nonfinite_rows), hidden)

    return attend


def contained_with_weights(attend: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wrap `stages.attend` as `contained` wraps a kernel.

    Attention weights need no change: a masked key always has weight 0. Empty tensors do not reach `attend`.
    """

    @wraps(attend)
    def contained(
        query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores, *arithmetic: Any
    ) -> tuple[Tensor, Tensor]:
        (batch_size, num_heads, seq_len_q, _), seq_len_k, device = query.shape, key.shape[2], query.device()
        if 0 in (batch_size, seq_len_q, seq_len_k):
            shape = (batch_size, num_heads, seq_len_q)
            attn_weights = zeros((*shape, seq_len_k), query.dtype, device)
            return zeros((*shape, value.shape[3]), query.dtype, device), attn_weights
        hidden = mask.with_bias(scores.bias).to_bool(seq_len_q, seq_len_k, device)
        mask, nonfinite_rows = Mask(hidden, q_offset=mask.q_offset), None
        if hidden is not None:
            (value,), nonfinite_rows = hide_nonfinite(hidden, seq_len_q, value)
        context, attn_weights = attend(query, key, value, mask, scores, *arithmetic)
        return nan_where(context, nonfinite_rows), attn_weights

    return contained
