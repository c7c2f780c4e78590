"""Relative products: products of queries and keys with learned vectors of the distance between
them, or with projected sinusoids of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import RelativeProducts, SinusoidProducts
from mha_spec.features.relative_products import SINUSOID_WEIGHTS
from mha_tt.arrays import at_least_float32
from mha_tt.device import accurate_config, upload, upload_integers
from mha_tt.heads import repeat_kv_heads


def relative_position_products(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    relative_products: RelativeProducts | SinusoidProducts,
    learned: Mapping[str, Float[Tensor, "..."]],
    q_offset: Int[np.ndarray, " #B"] | None = None,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T S"]:
    """Return the unscaled products of queries and keys with vectors of their distance, in at least
    float32.

    Args:
        query, key: (B, N, T, H) and (B, K, S, H).
        relative_products: distances that share vectors.
        learned: weights of the layer: `relative_keys`, vectors for queries, and `relative_queries`,
            vectors for keys, (1, 1, num_buckets, H), or (1, N, num_buckets, H) for each head; or
            the weights of `SinusoidProducts`.
        q_offset: position of the first query among the keys, for all sequences or each, (1,) or
            (B,); default: 0.
        compute_kernel_config: arithmetic of the device; default: `accurate_config`.

    Returns:
        Products, (B, N, T, S).

    Source: Self-Attention with Relative Position Representations, arXiv:1803.02155, equation 4;
    DeBERTa, arXiv:2006.03654, equation 4; Transformer-XL, arXiv:1901.02860, section 3.3.
    """
    if isinstance(relative_products, SinusoidProducts):
        config = compute_kernel_config or accurate_config(query.device())
        return _sinusoid_products(query, key, relative_products, learned, q_offset, config)
    batch_size, num_heads, seq_len_q, _ = query.shape
    seq_len_k = key.shape[2]
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


def _sinusoid_products(
    query: Tensor,
    key: Tensor,
    record: SinusoidProducts,
    learned: Mapping[str, Tensor],
    q_offset: np.ndarray | None,
    config: ttnn.DeviceComputeKernelConfig,
) -> Tensor:
    """Return the products of a content bias with keys, and of queries and a position bias with the
    vector of their distance to keys.
    """
    batch_size, num_heads, seq_len_q, _ = query.shape
    seq_len_k = key.shape[2]
    positions = np.arange(seq_len_q)[None]
    if q_offset is not None:
        positions = np.asarray(q_offset)[:, None] + positions
    distances = np.arange(seq_len_k) - positions[:, :, None]
    farthest = int(np.abs(distances).max())
    shape = (batch_size, num_heads, seq_len_q, seq_len_k)
    buckets = np.broadcast_to((distances + farthest)[:, None], shape)
    device = query.device()
    options = {"dtype": ttnn.float32, "compute_kernel_config": config}
    weights = {name: at_least_float32(learned[name]) for name in SINUSOID_WEIGHTS}
    table = weights["relative_sinusoids"]  # (1, N, d_in, H)
    sinusoids = record.sinusoids(farthest, table.shape[2])[None, None]
    # Matrix products broadcast neither the batch axis nor the axis of heads.
    sinusoids = ttnn.repeat(
        upload(sinusoids, device=device, dtype=ttnn.float32), (1, num_heads, 1, 1)
    )
    vectors = ttnn.repeat(ttnn.matmul(sinusoids, table, **options), (batch_size, 1, 1, 1))
    biased_query = ttnn.add(at_least_float32(query), weights["position_bias"])
    by_distance = ttnn.matmul(biased_query, vectors, transpose_b=True, **options)
    products = ttnn.gather(by_distance, 3, upload_integers(buckets, device=device, is_index=True))
    keys = at_least_float32(repeat_kv_heads(key, num_heads))
    content_bias = ttnn.repeat(weights["content_bias"], (batch_size, 1, 1, 1))
    of_content = ttnn.matmul(content_bias, keys, transpose_b=True, **options)
    return ttnn.add(products, of_content)
