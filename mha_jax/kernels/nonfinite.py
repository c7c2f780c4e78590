"""NaN and infinity: kept from the rows that may not see them, and never lost to those that do.

0 * NaN is NaN. So a token that holds one is emptied before it is multiplied, forward and backward, and what depends on
it is made NaN afterwards. Where everything is finite, nothing changes.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from mha_jax.compiled import compiled
from mha_jax.masks import Masking, to_scores_rank
from mha_jax.parallel.sharding import is_automatic


def not_finite(x: Float[Array, "*tokens H"]) -> Bool[Array, "*tokens 1"]:
    """True for each token that holds a NaN or an infinity."""
    return ~jnp.isfinite(x).all(axis=-1, keepdims=True)


def emptied(x: Float[Array, "..."], where: Bool[Array, "..."]) -> Float[Array, "..."]:
    """x, and 0 where asked; there it takes no gradient."""
    return jnp.where(where, 0.0, x)


def spoilt(x: Float[Array, "..."], where: Bool[Array, "..."]) -> Float[Array, "..."]:
    """x, and NaN where asked; its gradient passes, so that it is NaN if what comes back is, and 0 if that is 0."""
    return x + jnp.where(where, jnp.nan, 0.0)


def sees_any(marked: Bool[Array, "B N S"], seq_len_q: int, masking: Masking) -> Bool[Array, "B N T 1"]:
    """Whether a query sees any of the keys that are marked, by the mask or, where there is none, by causality alone."""
    shape = (*marked.shape[:2], seq_len_q, 1)

    def among(keys: slice) -> Array:
        seen = marked[:, :, None, keys]
        seen = seen if masking.mask is None else seen & ~to_scores_rank(masking.mask)[..., keys]
        return jnp.broadcast_to(seen.any(axis=-1, keepdims=True), shape)

    def look() -> Array:
        if masking.mask is None and masking.is_causal:
            last_seen = jnp.minimum(jnp.arange(seq_len_q, dtype=jnp.int32), marked.shape[2] - 1)
            return (lax.cumsum(marked.astype(jnp.int32), axis=2) > 0)[:, :, last_seen, None]
        return among(slice(None))

    if is_automatic(marked):  # devices would have to agree on whether to look
        return look()
    # Scores are looked through only if needed. No keys give False, of the type that a `shard_map` expects of it.
    return lax.cond(marked.any(), look, lambda: among(slice(0)))


def by_finite_tokens(project: Callable[[str, Array], Array]) -> Callable[[str, Array], Array]:
    """Projections through which a token that is not finite gives NaN, and spoils no gradient if nobody sees it."""

    def project_finite(name: str, x: Array) -> Array:
        x, wrong = _set_aside(x)
        return _spoilt(project(name, x), wrong)

    return project_finite


@compiled()
def _set_aside(x: Array) -> tuple[Array, Array]:
    wrong = not_finite(x)
    return emptied(x, wrong), wrong


_spoilt = compiled()(spoilt)
