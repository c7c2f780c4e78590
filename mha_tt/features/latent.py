"""Latents (MLA): projection, expansion into keys and values, absorption into queries, and cache.

Axes: B batch, T new tokens, S cache slots, N query heads, H head_dim, Hv value_head_dim, W kv_rank
+ rope_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, InputError, Latent
from mha_spec.attention import check_latent
from mha_tt.arrays import as_dtype, at_least_float32
from mha_tt.cache import (
    Cache,
    append_unchecked,
    check_cache,
    check_room,
    mark_written_over,
    num_added,
)
from mha_tt.checks import (
    check_count,
    check_dtype,
    check_features,
    check_is_cache,
    check_latent_heads,
    check_latents,
    check_tiles,
)
from mha_tt.device import accurate_config, zeros
from mha_tt.features.rope import Rotation, positions_and_rotation
from mha_tt.features.temperature import apply_temperature
from mha_tt.heads import split_heads
from mha_tt.layout import padded_features, padded_head_dim, padded_width, round_up
from mha_tt.weights import Project


@dataclass(frozen=True, eq=False)
class LatentCache(Cache):
    """Latents of all tokens so far, from which keys and values are expanded.

    Attributes:
        latents: (B, 1, S, W) with capacity S and W = kv_rank + rope_dim, each of the three in whole
            tiles: the normalized latent of each token, then the rotated features that all keys
            share. Slots at or beyond the length of their sequence are empty.
        lengths: number of cached tokens of each sequence, (B,), int32, on the host.
        capacity: number of slots per sequence.
    """

    latents: Float[Tensor, "B 1 S W"]
    lengths: Int[np.ndarray, " B"]
    capacity: int

    @property
    def slots(self) -> dict[str, Float[Tensor, "B K S W"]]:
        """Cached arrays by name, without the lengths."""
        return {"latents": self.latents}


def project_latents(
    project: Project,
    x: Float[Tensor, "B T d_in"],
    spec: AttentionSpec,
    positions: Int[np.ndarray, "*axes #B T"] | Rotation | None = None,
) -> tuple[Float[Tensor, "B N T H"], Float[Tensor, "B 1 T W"]]:
    """Project the input of a layer with latents to queries and latents.

    Args:
        project: applies a projection or a norm by its name.
        x: input of the layer.
        spec: layer with latents.
        positions: position of each token, (B or 1, T), or with sections (axes, B or 1, T); default:
            0, 1, …. A `Rotation` of them for heads of rope_dim features is uploaded once for many
            calls.

    Returns:
        q (B, N, T, H), and the latents (B, 1, T, W), W = kv_rank + rope_dim: the latent of each
        token, normalized and times its factor, then the rotated features that all keys share. Both
        parts of H and of W are padded separately.

    Raises:
        ValueError: if the layer has no latents.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    batch_size, seq_len, _ = x.shape
    unshared_features = _unshared_features(spec)
    positions, rotation = positions_and_rotation(x, positions, spec)
    q, normed, shared = _latent_parts(project, x, spec)
    if 0 in (batch_size, seq_len):
        return q, zeros(
            (batch_size, 1, seq_len, padded_features("kv_a_proj", spec)), x.dtype, x.device()
        )
    if rotation is not None:
        unshared_q = q[:, :, :, :unshared_features]
        shared_q = rotation.rotate(q[:, :, :, unshared_features:])
        q = _concat_features(unshared_q, shared_q)
        shared = rotation.rotate(shared)
    if spec.temperature is not None and positions is not None:
        q = apply_temperature(q, positions, spec.temperature)
    return q, _concat_features(normed, shared)


class HeadWeights(NamedTuple):
    """Weight of kv_b_proj by head, split once for many calls: the parts for keys and for values."""

    of_keys: Float[Tensor, "1 N kv_rank H"]
    of_values: Float[Tensor, "1 N kv_rank Hv"]


def project_absorbed(
    project: Project,
    x: Float[Tensor, "B T d_in"],
    spec: AttentionSpec,
    rotation: Rotation | None,
    head_weights: HeadWeights,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> tuple[Float[Tensor, "B N T W"], Float[Tensor, "B 1 T W"]]:
    """Call `project_latents` and `absorb_keys` of its queries, whose parts are concatenated only
    once.

    Args:
        project: applies a projection or a norm by its name.
        x: input of the layer, at least one token.
        spec: layer with latents and without a temperature.
        rotation: rotation of the tokens; None without RoPE.
        head_weights: weight of kv_b_proj by head.
        compute_kernel_config: arithmetic of the sums; default: `accurate_config`.

    Returns:
        Queries (B, N, T, W), and the latents (B, 1, T, W), W = kv_rank + rope_dim.
    """
    unshared_features = _unshared_features(spec)
    q, normed, shared = _latent_parts(project, x, spec)
    unshared_q = q[:, :, :, :unshared_features]
    shared_q = q[:, :, :, unshared_features:]
    if rotation is not None:
        shared_q = rotation.rotate(shared_q)
        shared = rotation.rotate(shared)
    absorbed = _head_by_head(
        unshared_q, head_weights.of_keys, compute_kernel_config, transposed=True
    )
    return _concat_features(absorbed, shared_q), _concat_features(normed, shared)


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
    check_latents("latents", latents, spec)
    kv_rank = padded_features("kv_a_norm", spec)
    unshared_features = _unshared_features(spec)
    batch_size, _, seq_len, _ = latents.shape
    if 0 in (batch_size, seq_len):
        widths = (padded_features(f"{part}_proj", spec) for part in "kv")
        keys, values = (
            zeros((batch_size, spec.num_heads, seq_len, width), latents.dtype, latents.device())
            for width in widths
        )
        return keys, values
    compressed = ttnn.reshape(latents[:, :, :, :kv_rank], (batch_size, seq_len, kv_rank))
    kv = project("kv_b_proj", compressed)
    check_features("kv_b_proj", kv, padded_width("kv_b_proj", spec))
    kv = split_heads(kv, spec.num_heads)
    shared = ttnn.repeat(latents[:, :, :, kv_rank:], (1, spec.num_heads, 1, 1))
    keys = _concat_features(kv[:, :, :, :unshared_features], shared)
    return keys, kv[:, :, :, unshared_features:]


def weights_of_heads(
    kv_b: Float[Tensor, "kv_rank N*(H-rope_dim+Hv)"], spec: AttentionSpec
) -> HeadWeights:
    """Split the weight of kv_b_proj for `absorb_keys` and `absorb_values`.

    Raises:
        ValueError: if the layer has no latents, or the weight has the wrong shape.
    """
    unshared_features = _unshared_features(spec)
    check_tiles("kv_b", kv_b)
    expected = (padded_width("kv_a_norm", spec), padded_width("kv_b_proj", spec))
    if tuple(kv_b.shape) != expected:
        raise InputError("kv_b", f"have shape {expected}", {"kv_b.shape": tuple(kv_b.shape)})
    heads = split_heads(ttnn.reshape(kv_b, (1, *tuple(kv_b.shape))), spec.num_heads)
    return HeadWeights(heads[:, :, :, :unshared_features], heads[:, :, :, unshared_features:])


def absorb_keys(
    q: Float[Tensor, "B N T H"],
    kv_b: Float[Tensor, "kv_rank N*(H-rope_dim+Hv)"] | HeadWeights,
    spec: AttentionSpec,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T W"]:
    """Absorb kv_b_proj into queries: their dot products with latents equal the products of q with
    the expanded keys.

    Args:
        q: queries (B, N, T, H).
        kv_b: weight of kv_b_proj, (kv_rank, N * (H - rope_dim + Hv)), or its `HeadWeights`.
        spec: layer with latents.
        compute_kernel_config: arithmetic of the sums; default: `accurate_config`.

    Returns:
        Queries (B, N, T, kv_rank + rope_dim), in the dtype of q.

    Raises:
        ValueError: if the layer has no latents, or the shapes do not fit.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2.
    """
    if isinstance(kv_b, HeadWeights):
        of_keys, _ = kv_b
    else:
        of_keys, _ = weights_of_heads(kv_b, spec)
    check_latent_heads("q", q, spec, padded_features("q_proj", spec))
    if 0 in tuple(q.shape):
        return zeros((*tuple(q.shape)[:3], padded_features("kv_a_proj", spec)), q.dtype, q.device())
    unshared_features = of_keys.shape[3]
    absorbed = _head_by_head(
        q[:, :, :, :unshared_features], of_keys, compute_kernel_config, transposed=True
    )
    return _concat_features(absorbed, q[:, :, :, unshared_features:])


def absorb_values(
    context: Float[Tensor, "B N T kv_rank"],
    kv_b: Float[Tensor, "kv_rank N*(H-rope_dim+Hv)"] | HeadWeights,
    spec: AttentionSpec,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T Hv"]:
    """Apply the value part of kv_b_proj to weighted sums of latents.

    Args:
        context: weighted sums of latents, (B, N, T, kv_rank).
        kv_b: weight of kv_b_proj, (kv_rank, N * (H - rope_dim + Hv)), or its `HeadWeights`.
        spec: layer with latents.
        compute_kernel_config: arithmetic of the sums; default: `accurate_config`.

    Returns:
        Context (B, N, T, Hv), in the dtype of the argument.

    Raises:
        ValueError: if the layer has no latents, or the shapes do not fit.
    """
    if isinstance(kv_b, HeadWeights):
        _, of_values = kv_b
    else:
        _, of_values = weights_of_heads(kv_b, spec)
    check_latent_heads("context", context, spec, of_values.shape[2])
    if 0 in tuple(context.shape):
        return zeros(
            (*tuple(context.shape)[:3], of_values.shape[3]), context.dtype, context.device()
        )
    return _head_by_head(context, of_values, compute_kernel_config, transposed=False)


def _unshared_features(spec: AttentionSpec) -> int:
    """Return the padded number of features of queries and keys that heads do not share."""
    return round_up(spec.head_dim - check_latent(spec).rope_dim)


def _latent_parts(
    project: Project, x: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (B, N, T, H), latents (B, 1, T, kv_rank) and shared features (B, 1, T,
    rope_dim), before RoPE.
    """
    latent = check_latent(spec)
    batch_size, seq_len, _ = x.shape
    if latent.q_rank is None:
        q = project("q_proj", x)
        check_features("q_proj", q, padded_width("q_proj", spec))
    else:
        q = project("q_a_proj", x)
        check_features("q_a_proj", q, padded_width("q_a_proj", spec))
        q = project("q_b_proj", _normed(project, "q_a_norm", q, latent))
        check_features("q_b_proj", q, padded_width("q_b_proj", spec))
    q = split_heads(q, spec.num_heads)
    compressed = project("kv_a_proj", x)
    check_features("kv_a_proj", compressed, padded_width("kv_a_proj", spec))
    if 0 in (batch_size, seq_len):
        return q, compressed, compressed
    kv_rank = padded_features("kv_a_norm", spec)
    normed = _normed(project, "kv_a_norm", compressed[:, :, :kv_rank], latent)
    shared = compressed[:, :, kv_rank:]
    normed, shared = (
        ttnn.reshape(part, (batch_size, 1, seq_len, part.shape[2])) for part in (normed, shared)
    )
    return q, normed, shared


def _normed(project: Project, name: str, x: Tensor, latent: Latent) -> Tensor:
    """Normalize a latent and multiply it by its factor, in the dtype of the norm's output."""
    normed = project(name, x)
    factor = latent.factors[name]
    if factor == 1.0:
        return normed
    return as_dtype(ttnn.multiply(at_least_float32(normed), factor), normed.dtype)


def _concat_features(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate features in the dtype of the first, which concatenation may widen."""
    return as_dtype(ttnn.concat([first, second], dim=-1), first.dtype)


def _head_by_head(
    x: Tensor,
    weights: Tensor,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None,
    *,
    transposed: bool,
) -> Tensor:
    """Multiply heads (B, N, T, in) by one matrix each, (1, N, in, out) or transposed, in the dtype
    of x.

    Matrix products do not broadcast the batch axis: the tokens of all sequences are merged into
    one.
    """
    batch_size, num_heads, seq_len, width = x.shape
    if batch_size > 1:
        x = ttnn.reshape(ttnn.transpose(x, 0, 1), (1, num_heads, batch_size * seq_len, width))
    config = compute_kernel_config or accurate_config(x.device())
    x = ttnn.matmul(x, weights, transpose_b=transposed, dtype=x.dtype, compute_kernel_config=config)
    if batch_size > 1:
        x = ttnn.transpose(ttnn.reshape(x, (num_heads, batch_size, seq_len, x.shape[3])), 0, 1)
    return x


def init_latent_cache(
    batch_size: int,
    capacity: int,
    kv_rank: int,
    rope_dim: int,
    dtype: ttnn.DataType = ttnn.bfloat16,
    *,
    device: ttnn.MeshDevice,
) -> LatentCache:
    """Return an empty cache of latents: all slots and lengths are 0.

    Args:
        batch_size: number of sequences, B.
        capacity: number of slots per sequence.
        kv_rank: width of the key/value latent.
        rope_dim: features of a key that all heads share.
        dtype: dtype of the latents: `ttnn.bfloat16`, `ttnn.bfloat8_b` or `ttnn.float32`.
        device: device of the cache.

    Raises:
        TypeError: if a size is not an integer or the dtype not floating point.
        ValueError: if a size is below 1, or the batch size below 0.
    """
    check_count("batch_size", batch_size, minimum=0)
    for name, size in {"capacity": capacity, "kv_rank": kv_rank, "rope_dim": rope_dim}.items():
        check_count(name, size)
    check_dtype("dtype", dtype)
    width = round_up(kv_rank) + padded_head_dim(rope_dim, rope=True)
    latents = zeros((batch_size, 1, round_up(capacity), width), dtype, device)
    return LatentCache(latents, np.zeros(batch_size, np.int32), capacity)


def append_to_latent_cache(
    cache: LatentCache,
    latents: Float[Tensor, "B 1 T W"],
    *,
    new_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
) -> LatentCache:
    """Append the latents of new tokens to the cache.

    Args:
        cache: contains `cache.lengths` tokens. Do not use it afterwards: its storage is reused.
        latents: (B, 1, T, W), from `project_latents`, in the cache's dtype or, for a bfloat8_b
            cache, bfloat16.
        new_lengths: see `append_to_cache`.

    Returns:
        Cache with `cache.lengths + new_lengths` tokens.

    Raises:
        TypeError: if the dtypes differ or the lengths are not integers.
        ValueError: if shapes do not fit, the tokens exceed the capacity, or there are more
            sequences than cores; the cache is then unchanged.
    """
    check_is_cache(cache, LatentCache)
    check_latent_cache(cache, latents)
    check_room(cache, latents.shape[2], new_lengths)
    after = append_unchecked(cache, (latents,), num_added(cache, latents.shape[2], new_lengths))
    mark_written_over(cache, after)
    return after


def check_latent_cache(cache: LatentCache, latents: Tensor) -> None:
    """Reject cached latents (B, 1, S, W) to which new ones (B, 1, T, W) cannot be appended."""
    check_tiles("latents", latents)
    check_cache(cache.latents, cache.latents, latents, latents, ("cache.latents", "cache.latents"))
