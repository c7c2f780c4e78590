"""NaN and infinity, contained: `contained` makes them reach exactly the rows that attend to them.

By default a NaN does what it does in TTNN. The weight of a masked key is 0, and 0 * NaN is NaN, so
it may reach rows that mask it. In a contained kernel keys and values that are not finite are set to
0 before the products, without reading them on the host, and the rows that attend to them become NaN
afterwards. Finite inputs give the same values, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import ttnn
from jaxtyping import Float
from ttnn import Tensor

from mha_tt.arrays import as_dtype, nan_where
from mha_tt.checks import check_kernel
from mha_tt.device import zeros
from mha_tt.kernels import Kernel
from mha_tt.masks import DeviceMask, Mask
from mha_tt.scores import Scores


def contained(kernel: Kernel) -> Kernel:
    """Return a kernel in which NaN and infinity reach exactly the rows that attend to them.

    For a layer: `layer.kernel = contained(layer.kernel)`. It covers calls without attention
    weights, of prompts and of steps with a cache. A step without a mask, a bias or a window calls
    the kernel itself: its token attends to all filled slots, so every NaN in them reaches it.
    Other steps call the kernel of prompts, over the filled slots.

    - A row is NaN if its query is not finite, or a key or value that it attends to, or if all its
      scores overflow to -inf. A bias must be finite; one on the host may hide keys by -inf.
    - All other rows have the values that they would have without the NaN, bit for bit.

    These are the rules in IEEE arithmetic. To the matrix unit of a card a NaN is a number, also one
    in a query (docs/reference/ttnn.md).

    Args:
        kernel: computes the context, (B, N, T, Hv), of finite keys and values.

    Raises:
        TypeError: if the kernel cannot be called.
    """
    check_kernel(kernel)
    return Contained(kernel)


@dataclass(frozen=True)
class Contained:
    """A kernel as `contained` returns it. Unlike a closure it can be pickled.

    Attributes:
        kernel: computes the context of finite keys and values.
    """

    kernel: Kernel

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores
    ) -> Tensor:
        """Return the context, (B, N, T, Hv)."""
        seq_len_q = query.shape[2]
        seq_len_k = key.shape[2]
        if 0 in (query.shape[0], seq_len_q, seq_len_k):
            return self.kernel(query, key, value, mask, scores)
        hidden = mask.with_bias(scores.bias).to_bool(seq_len_q, seq_len_k, query.device())
        if hidden is None:  # every row attends to every NaN
            return self.kernel(query, key, value, mask, scores)
        (key, value), nonfinite_rows = _hide_nonfinite(hidden, seq_len_q, key, value)
        context = self.kernel(query, key, value, Mask(hidden, q_offset=mask.q_offset), scores)
        if nonfinite_rows is None:
            return context
        repeats = context.shape[1] // nonfinite_rows.shape[1]
        if repeats > 1:
            nonfinite_rows = ttnn.repeat_interleave(nonfinite_rows, repeats, dim=1)
        return nan_where(context, nonfinite_rows)


def _hide_nonfinite(
    mask: DeviceMask,
    seq_len_q: int,
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
) -> tuple[list[Float[Tensor, "B K S H"]], Float[Tensor, "B heads T 1"] | None]:
    """Return key and value with 0 for non-finite ones, and the rows that become NaN, marked by > 0.

    If all rows attend to the same keys, hidden keys are 0, and NaN in the others spreads by itself.
    """
    if mask.real_keys is not None:
        return [ttnn.where(as_dtype(mask.real_keys, x.dtype), x, 0.0) for x in (key, value)], None
    finite = [ttnn.isfinite(x) for x in (key, value)]
    finite_keys = [ttnn.min(x, dim=3, keepdim=True) for x in finite]
    marked = ttnn.logical_not(ttnn.multiply(*finite_keys))
    cleaned = [
        ttnn.where(is_finite, x, 0.0) for is_finite, x in zip(finite, (key, value), strict=True)
    ]
    return cleaned, _rows_that_see(marked, mask, seq_len_q)


def _rows_that_see(
    marked: Float[Tensor, "B K S 1"], mask: DeviceMask, seq_len_q: int
) -> Float[Tensor, "B heads T 1"]:
    """Count the marked keys that each row attends to, per key/value head, or per head of the mask
    if it has more.
    """
    batch_size, num_heads, seq_len_k, _ = marked.shape
    if mask.is_causal and mask.shape[2] == seq_len_q == seq_len_k:  # needs no mask in memory
        return ttnn.cumsum(_entering_less_leaving(marked, mask.window_size), dim=2)
    shown = mask.shown(seq_len_q, seq_len_k)
    if shown.shape[1] > 1:
        marked = ttnn.repeat_interleave(marked, shown.shape[1] // num_heads, dim=1)
        num_heads = shown.shape[1]
        # Sequences that share a mask could be rows of one product only if its heads were equal.
        if shown.shape[0] < batch_size:
            shown = ttnn.repeat(shown, (batch_size, 1, 1, 1))
    # Heads that share a mask are rows of one product: (b, n, rows, S) (b, n, T, S)^T.
    rows = batch_size * num_heads // (shown.shape[0] * shown.shape[1])
    marked = ttnn.reshape(marked, (shown.shape[0], shown.shape[1], rows, seq_len_k))
    counts = ttnn.matmul(as_dtype(marked, ttnn.bfloat16), shown, transpose_b=True)
    return ttnn.reshape(counts, (batch_size, num_heads, seq_len_q, 1))


def _entering_less_leaving(
    marked: Float[Tensor, "B K S 1"], window_size: int | None
) -> Float[Tensor, "B K S 1"]:
    """Count, per row, the marked keys that enter its window minus those that leave it."""
    if window_size is None:
        return marked
    marked = as_dtype(marked, ttnn.float32)  # in bfloat16 a sum may not return to exactly 0
    batch_size, num_heads, seq_len, _ = marked.shape
    none = zeros((batch_size, num_heads, window_size, 1), marked.dtype, marked.device())
    return ttnn.subtract(marked, ttnn.concat([none, marked[:, :, : seq_len - window_size]], dim=2))
