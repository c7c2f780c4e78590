"""Relative products: products of queries and keys with learned vectors of the distance between
them, or with projected sinusoids of it.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mha_spec import RelativeProducts, SinusoidProducts
from mha_spec.features.relative_products import SINUSOID_WEIGHTS
from mha_torch.arrays import at_least_float32, constant, without_autocast
from mha_torch.heads import repeat_kv_heads


def relative_position_products(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    relative_products: RelativeProducts | SinusoidProducts,
    learned: Mapping[str, Float[Tensor, "..."]],
    q_offset: Int[Tensor, " #B"] | None = None,
) -> Float[Tensor, "B N T S"]:
    """Return the unscaled products of queries and keys with vectors of their distance, in at least
    float32.

    Args:
        query, key: (B, N, T, H) and (B, K, S, H).
        relative_products: distances that share vectors.
        learned: weights of the layer: `relative_keys`, vectors for queries, and `relative_queries`,
            vectors for keys, (num_buckets, H), or (num_buckets, N, H) for each head; or the weights
            of `SinusoidProducts`.
        q_offset: position of the first query among the keys, for all sequences or each, (1,) or
            (B,); default: 0.

    Returns:
        Products, (B, N, T, S).

    Source: Self-Attention with Relative Position Representations, arXiv:1803.02155, equation 4;
    DeBERTa, arXiv:2006.03654, equation 4; Transformer-XL, arXiv:1901.02860, section 3.3.
    """
    if isinstance(relative_products, SinusoidProducts):
        return _sinusoid_products(query, key, relative_products, learned, q_offset)
    positions = torch.arange(query.shape[2], device=query.device)[None]
    if q_offset is not None:
        positions = positions + q_offset.to(positions)[:, None]
    distances = torch.arange(key.shape[2], device=query.device) - positions[:, :, None]
    farthest = relative_products.farthest
    buckets = constant(relative_products.buckets(), query)[
        distances.clamp(-farthest, farthest) + farthest
    ]
    buckets = buckets[:, None].expand(*query.shape[:3], key.shape[2])  # (B, N, T, S)
    if relative_products.per_head:
        axes = "bnth,cnh->bntc"
    else:
        axes = "bnth,ch->bntc"
    relative_keys = learned.get("relative_keys")
    relative_queries = learned.get("relative_queries")
    products = []
    with without_autocast(query.device.type):
        if relative_keys is not None:
            by_bucket = torch.einsum(axes, at_least_float32(query), at_least_float32(relative_keys))
            products.append(by_bucket.gather(3, buckets))
        if relative_queries is not None:
            keys = at_least_float32(repeat_kv_heads(key, query.shape[1]))
            by_bucket = torch.einsum(axes, keys, at_least_float32(relative_queries))
            products.append(by_bucket.gather(3, buckets.mT).mT)
    if len(products) == 1:
        return products[0]
    return products[0] + products[1]


def _sinusoid_products(
    query: Tensor,
    key: Tensor,
    record: SinusoidProducts,
    learned: Mapping[str, Tensor],
    q_offset: Tensor | None,
) -> Tensor:
    """Return the products of a content bias with keys, and of queries and a position bias with the
    vector of their distance to keys.
    """
    seq_len_q, seq_len_k = query.shape[2], key.shape[2]
    positions = torch.arange(seq_len_q, device=query.device)[None]
    farthest = max(seq_len_q, seq_len_k)
    if q_offset is not None:
        positions = positions + q_offset.to(positions)[:, None]
        farthest = seq_len_q + seq_len_k  # the first query is among the keys
    distances = torch.arange(seq_len_k, device=query.device) - positions[:, :, None]
    buckets = distances.clamp(-farthest, farthest) + farthest
    buckets = buckets[:, None].expand(*query.shape[:3], seq_len_k)  # (B, N, T, S)
    weights = {name: at_least_float32(learned[name]) for name in SINUSOID_WEIGHTS}
    table = weights["relative_sinusoids"]  # (d_in, N, H)
    sinusoids = constant(record.sinusoids(farthest, len(table)), table, table.dtype)
    with without_autocast(query.device.type):
        vectors = torch.einsum("ce,enh->nch", sinusoids, table)
        biased_query = at_least_float32(query) + weights["position_bias"][:, None]
        by_distance = biased_query @ vectors.mT
        keys = at_least_float32(repeat_kv_heads(key, query.shape[1]))
        of_content = weights["content_bias"][:, None] @ keys.mT  # (B, N, 1, S)
    return by_distance.gather(3, buckets) + of_content
