"""Relative products: products of queries and keys with learned vectors of the distance between
them, or with projected sinusoids of it.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Float, Int

from mha_jax.arrays import Array, at_least_float32
from mha_jax.compiled import compiled
from mha_jax.heads import repeat_kv_heads
from mha_spec import RelativeProducts, SinusoidProducts
from mha_spec.features.relative_products import SINUSOID_WEIGHTS


@compiled("relative_products")
def relative_position_products(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    relative_products: RelativeProducts | SinusoidProducts,
    learned: Mapping[str, Float[Array, "..."]],
    q_offset: Int[Array, " #B"] | None = None,
) -> Float[Array, "B N T S"]:
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
    positions = jnp.arange(query.shape[2], dtype=jnp.int32)[None]
    if q_offset is not None:
        positions = positions + q_offset[:, None]
    distances = jnp.arange(key.shape[2], dtype=jnp.int32)[None, None] - positions[:, :, None]
    farthest = relative_products.farthest
    buckets = jnp.asarray(relative_products.buckets(), jnp.int32)[
        jnp.clip(distances, -farthest, farthest) + farthest
    ]
    buckets = jnp.broadcast_to(buckets[:, None], (*query.shape[:3], key.shape[2]))
    if relative_products.per_head:
        axes = "bnth,cnh->bntc"
    else:
        axes = "bnth,ch->bntc"
    relative_keys = learned.get("relative_keys")
    relative_queries = learned.get("relative_queries")
    products = []
    if relative_keys is not None:
        by_bucket = jnp.einsum(axes, at_least_float32(query), at_least_float32(relative_keys))
        products.append(jnp.take_along_axis(by_bucket, buckets, axis=3))
    if relative_queries is not None:
        keys = at_least_float32(repeat_kv_heads(key, query.shape[1]))
        by_bucket = jnp.einsum(axes, keys, at_least_float32(relative_queries))
        products.append(jnp.take_along_axis(by_bucket, buckets.mT, axis=3).mT)
    if len(products) == 1:
        return products[0]
    return products[0] + products[1]


def _sinusoid_products(
    query: Array,
    key: Array,
    record: SinusoidProducts,
    learned: Mapping[str, Array],
    q_offset: Array | None,
) -> Array:
    """Return the products of a content bias with keys, and of queries and a position bias with the
    vector of their distance to keys.
    """
    seq_len_q, seq_len_k = query.shape[2], key.shape[2]
    positions = jnp.arange(seq_len_q, dtype=jnp.int32)[None]
    farthest = max(seq_len_q, seq_len_k)
    if q_offset is not None:
        positions = positions + q_offset[:, None]
        farthest = seq_len_q + seq_len_k  # the first query is among the keys
    distances = jnp.arange(seq_len_k, dtype=jnp.int32)[None, None] - positions[:, :, None]
    buckets = jnp.clip(distances, -farthest, farthest) + farthest
    buckets = jnp.broadcast_to(buckets[:, None], (*query.shape[:3], seq_len_k))
    weights = {name: at_least_float32(learned[name]) for name in SINUSOID_WEIGHTS}
    table = weights["relative_sinusoids"]  # (d_in, N, H)
    sinusoids = jnp.asarray(record.sinusoids(farthest, len(table)), table.dtype)
    vectors = jnp.einsum("ce,enh->nch", sinusoids, table)
    biased_query = at_least_float32(query) + weights["position_bias"][None, :, None]
    by_distance = jnp.einsum("bnth,nch->bntc", biased_query, vectors)
    keys = at_least_float32(repeat_kv_heads(key, query.shape[1]))
    of_content = jnp.einsum("nh,bnsh->bns", weights["content_bias"], keys)[:, :, None]
    return jnp.take_along_axis(by_distance, buckets, axis=3) + of_content
