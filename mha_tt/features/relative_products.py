"""Relative products: products of queries and keys with learned vectors of the distance between
them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import RelativeProducts
from mha_tt.device import accurate_config, upload_integers
from mha_tt.heads import repeat_kv_heads


def relative_position_products(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    relative_products: RelativeProducts,
    learned: Mapping[str, Float[Tensor, "..."]],
    q_offset: Int[np.ndarray, " B"] | None = None,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T S"]:
    """Return the unscaled products of queries and keys with vectors of their distance, in at least
    float32.

    Args:
        query, key: (B, N, T, H) and (B, K, S, H).
        relative_products: distances that share vectors.
        learned: weights of the layer: `relative_keys`, vectors for queries, and `relative_queries`,
            vectors for keys, (1, 1, num_buckets, H), or (1, N, num_buckets, H) for each head.
        q_offset: position of the first query among the keys, for all sequences or each, (1,) or
            (B,); default: 0.
        compute_kernel_config: arithmetic of the device; default: `accurate_config`.

    Returns:
        Products, (B, N, T, S).

    Source: Self-Attention with Relative Position Representations, arXiv:1803.02155, equation 4;
    DeBERTa, arXiv:2006.03654, equation 4.
    """
    (batch_size, num_heads, seq_len_q, _), seq_len_k = query.shape, key.shape[2]
    positions = np.arange(seq_len_q)[None]
    if q_offset is not None:
        positions = np.asarray(q_offset)[:, None] + positions
    farthest = relative_products.farthest
    distances = np.clip(np.arange(seq_len_k) - positions[:, :, None], -farthest, farthest)
    buckets = relative_products.buckets()[distances + farthest][:, None]
    buckets = np.broadcast_to(buckets, (batch_size, num_heads, seq_len_q, seq_len_k))
    config = compute_kernel_config or accurate_config(query.device())

    def gather(x: Tensor, table: Tensor, buckets: np.ndarray) -> Tensor:
        # Matrix products do not broadcast the batch axis.
        vectors = ttnn.repeat(table, (batch_size, num_heads // table.shape[1], 1, 1))
        products = ttnn.matmul(
            x, vectors, transpose_b=True, dtype=ttnn.float32, compute_kernel_config=config
        )
        return ttnn.gather(
            products, 3, upload_integers(buckets, device=query.device(), is_index=True)
        )

    relative_keys = learned.get("relative_keys")
    relative_queries = learned.get("relative_queries")
    products = []
    if relative_keys is not None:
        products.append(gather(query, relative_keys, buckets))
    if relative_queries is not None:
        keys = repeat_kv_heads(key, num_heads)
        products.append(
            ttnn.transpose(gather(keys, relative_queries, buckets.swapaxes(2, 3)), 2, 3)
        )
    if len(products) == 1:
        return products[0]
    return ttnn.add(*products)
