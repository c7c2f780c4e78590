"""Latents (MLA): projection, expansion into keys and values, absorption into queries, and cache.

Axes: B batch, T new tokens, S cache slots, N query heads, H head_dim, Hv value_head_dim, W kv_rank
+ rope_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mha_spec import AttentionSpec, InputTypeError, Latent
from mha_spec.attention import check_latent
from mha_torch.arrays import at_least_float32
from mha_torch.cache import Cache, append_unchecked, check_cache, check_room, mark_written_over
from mha_torch.checks import (
    check_count,
    check_features,
    check_is_cache,
    check_latents,
    check_positions,
)
from mha_torch.features.rope import apply_rope, rotation_of
from mha_torch.features.temperature import apply_temperature
from mha_torch.heads import split_heads
from mha_torch.weights import Project


@dataclass(frozen=True, eq=False)
class LatentCache(Cache):
    """Latents of all tokens so far, from which keys and values are expanded.

    Attributes:
        latents: (B, 1, capacity, kv_rank + rope_dim): the normalized latent of each token, then the
            rotated features that all keys share. Slots at or beyond the length of their sequence
            are empty.
        lengths: number of cached tokens of each sequence, (B,), int32.
    """

    latents: Float[Tensor, "B 1 S W"]
    lengths: Int[Tensor, " B"]

    @property
    def slots(self) -> dict[str, Float[Tensor, "B K S W"]]:
        """Cached arrays by name, without the lengths."""
        return {"latents": self.latents}


def project_latents(
    project: Project,
    x: Float[Tensor, "B T d_in"],
    spec: AttentionSpec,
    positions: Int[Tensor, "*axes #B T"] | None = None,
) -> tuple[Float[Tensor, "B N T H"], Float[Tensor, "B 1 T W"]]:
    """Project the input of a layer with latents to queries and latents.

    Args:
        project: applies a projection or a norm by its name.
        x: input of the layer.
        spec: layer with latents.
        positions: position of each token, (B or 1, T), or with sections (axes, B or 1, T); default:
            0, 1, ….

    Returns:
        q (B, N, T, H), and the latents (B, 1, T, W), W = kv_rank + rope_dim: the latent of each
        token, normalized and times its factor, then the rotated features that all keys share.

    Raises:
        ValueError: if the layer has no latents.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    latent = check_latent(spec)
    if spec.has_positions and positions is None:
        positions = torch.arange(x.shape[1], device=x.device)[None]
    if latent.q_rank is None:
        q = project("q_proj", x)
        check_features("q_proj", q, spec.q_width)
    else:
        q = project("q_a_proj", x)
        check_features("q_a_proj", q, latent.q_rank)
        q = project("q_b_proj", _normed(project, "q_a_norm", q, latent))
        check_features("q_b_proj", q, spec.q_width)
    q = split_heads(q, spec.num_heads)
    compressed = project("kv_a_proj", x)
    check_features("kv_a_proj", compressed, latent.width)
    normed = _normed(project, "kv_a_norm", compressed[..., : latent.kv_rank], latent)
    shared = compressed[..., latent.kv_rank :]
    latents = torch.cat([normed, shared], dim=-1)[:, None]
    if spec.rope is not None and positions is not None:
        check_positions(positions, x.shape[0], x.shape[1], spec.rope)
        rotation = rotation_of(positions, spec.rope, spec.head_dim, q.dtype)
        q = apply_rope(q, rotation, spec.rope)
        latents = apply_rope(latents, rotation, spec.rope)
    if spec.temperature is not None and positions is not None:
        q = apply_temperature(q, positions, spec.temperature)
    return q, latents


def expand_latents(
    project: Project, latents: Float[Tensor, "B 1 S W"], spec: AttentionSpec
) -> tuple[Float[Tensor, "B N S H"], Float[Tensor, "B N S Hv"]]:
    """Expand latents to the keys and values of all heads.

    Args:
        project: applies a projection by its name.
        latents: (B, 1, S, kv_rank + rope_dim), from `project_latents`.
        spec: layer with latents.

    Returns:
        k (B, N, S, H) and v (B, N, S, Hv).

    Raises:
        ValueError: if the layer has no latents, or their width does not fit.
    """
    latent = check_latent(spec)
    check_latents("latents", latents, latent)
    shared = latents[..., latent.kv_rank :]
    unshared_features = spec.head_dim - latent.rope_dim
    kv = project("kv_b_proj", latents[:, 0, :, : latent.kv_rank])
    check_features("kv_b_proj", kv, spec.num_heads * (unshared_features + spec.value_head_dim))
    kv = split_heads(kv, spec.num_heads)
    shared = shared.expand(-1, spec.num_heads, -1, -1)
    return torch.cat([kv[..., :unshared_features], shared], dim=-1), kv[..., unshared_features:]


def absorb_keys(
    q: Float[Tensor, "B N T H"],
    kv_b: Float[Tensor, "N*(H-rope_dim+Hv) kv_rank"],
    spec: AttentionSpec,
) -> Float[Tensor, "B N T W"]:
    """Absorb kv_b_proj into queries: their dot products with latents equal the products of q with
    the expanded keys.

    Args:
        q: queries (B, N, T, H).
        kv_b: weight of kv_b_proj, (N * (H - rope_dim + Hv), kv_rank).
        spec: layer with latents.

    Returns:
        Queries (B, N, T, kv_rank + rope_dim), in the dtype of q.

    Raises:
        ValueError: if the layer has no latents.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2.
    """
    of_keys, _ = _weights_of_heads(kv_b, spec)
    unshared_features = of_keys.shape[1]
    return torch.cat(
        [torch.matmul(q[..., :unshared_features], of_keys), q[..., unshared_features:]], dim=-1
    )


def absorb_values(
    context: Float[Tensor, "B N T kv_rank"],
    kv_b: Float[Tensor, "N*(H-rope_dim+Hv) kv_rank"],
    spec: AttentionSpec,
) -> Float[Tensor, "B N T Hv"]:
    """Apply the value part of kv_b_proj to weighted sums of latents.

    Args:
        context: weighted sums of latents, (B, N, T, kv_rank).
        kv_b: weight of kv_b_proj, (N * (H - rope_dim + Hv), kv_rank).
        spec: layer with latents.

    Returns:
        Context (B, N, T, Hv), in the dtype of the argument.

    Raises:
        ValueError: if the layer has no latents.
    """
    _, of_values = _weights_of_heads(kv_b, spec)
    return torch.matmul(context, of_values.mT)


def _normed(project: Project, name: str, x: Tensor, latent: Latent) -> Tensor:
    """Normalize a latent and multiply it by its factor, in the dtype of the norm's output."""
    normed = project(name, x)
    factor = latent.factors[name]
    if factor == 1.0:
        return normed
    return (at_least_float32(normed) * factor).to(normed.dtype)


def _weights_of_heads(kv_b: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return the parts of kv_b for keys and for values, (N, features, kv_rank) each."""
    unshared_features = spec.head_dim - check_latent(spec).rope_dim
    weights = kv_b.view(spec.num_heads, unshared_features + spec.value_head_dim, kv_b.shape[1])
    return weights[:, :unshared_features], weights[:, unshared_features:]


def init_latent_cache(
    batch_size: int,
    capacity: int,
    kv_rank: int,
    rope_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str | None = None,
) -> LatentCache:
    """Return an empty cache of latents: all slots and lengths are 0.

    Args:
        batch_size: number of sequences, B.
        capacity: number of slots per sequence.
        kv_rank: width of the key/value latent.
        rope_dim: features of a key that all heads share.
        dtype: floating-point dtype of the latents.
        device: device of the cache.

    Raises:
        TypeError: if a size is not an integer or the dtype not floating point.
        ValueError: if a size is below 1, or the batch size below 0.
    """
    check_count("batch_size", batch_size, minimum=0)
    for name, size in {"capacity": capacity, "kv_rank": kv_rank, "rope_dim": rope_dim}.items():
        check_count(name, size)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputTypeError("dtype", "be floating point", dtype=dtype)
    return LatentCache(
        latents=torch.zeros(
            (batch_size, 1, capacity, kv_rank + rope_dim), dtype=dtype, device=device
        ),
        lengths=torch.zeros(batch_size, dtype=torch.int32, device=device),
    )


def append_to_latent_cache(
    cache: LatentCache,
    latents: Float[Tensor, "B 1 T W"],
    *,
    new_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
) -> LatentCache:
    """Append the latents of new tokens to the cache.

    Args:
        cache: contains `cache.lengths` tokens. Do not use it afterwards: see `append_to_cache`.
        latents: (B, 1, T, kv_rank + rope_dim), in the cache's dtype.
        new_lengths: see `append_to_cache`.

    Returns:
        Cache with `cache.lengths + new_lengths` tokens.

    Raises:
        TypeError: if the dtypes differ or the lengths are not integers.
        ValueError: if shapes do not fit, or the tokens exceed the capacity; the cache is then
            unchanged. (If lengths are unknown, as in a compiled graph, a sequence whose tokens do
            not fit is left unchanged instead.)
    """
    check_is_cache(cache, LatentCache)
    check_latent_cache(cache, latents)
    lengths = check_room(cache, latents.shape[2], new_lengths)
    after = append_unchecked(cache, (latents,), new_lengths, lengths)
    mark_written_over(cache, after)
    return after


def check_latent_cache(cache: LatentCache, latents: Tensor) -> None:
    """Reject cached latents (B, 1, S, W) to which new ones (B, 1, T, W) cannot be appended."""
    check_cache(cache.latents, cache.latents, latents, latents, ("cache.latents", "cache.latents"))
