"""JAX's attention function with a boolean mask: a kernel to read, and to start another from."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from mha_jax import stages
from mha_jax.arrays import Array
from mha_jax.masks import Mask, to_scores_rank
from mha_jax.scores import Scores


def plain_sdpa(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    mask: Mask,
    scores: Scores,
) -> Float[Array, "B N T Hv"]:
    """Return the context from one call of JAX's function; the formula for other calls.

    For a layer: `layer.kernel = plain_sdpa`.

    Source: jax.nn.dot_product_attention.
    """
    spec = scores.spec
    changes_scores = spec.has_distance_bias or spec.soft_cap is not None or scores.bias is not None
    is_wide = value.shape[3] != query.shape[3]
    if changes_scores or scores.has_dropout or is_wide or "sinks" in scores.learned:
        context, _ = stages.attend(query, key, value, mask, scores)
        return context
    # JAX has tokens before heads.
    by_tokens = [x.swapaxes(1, 2) for x in (query, key, value)]
    hidden = mask.to_bool(query.shape[2], key.shape[2])
    if hidden is None:
        context = jax.nn.dot_product_attention(*by_tokens, scale=spec.score_scale)
        return context.swapaxes(1, 2)
    # JAX has the opposite polarity, and returns the mean of the values for a fully masked row.
    hidden = to_scores_rank(hidden)
    context = jax.nn.dot_product_attention(*by_tokens, mask=~hidden, scale=spec.score_scale)
    return jnp.where(hidden.all(axis=-1, keepdims=True), 0.0, context.swapaxes(1, 2))
