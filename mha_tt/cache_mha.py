"""Multi-head attention with a key/value cache of fixed capacity. Caches are arguments and results.

Axes: B batch, T new tokens, S cache slots, N query heads, K key/value heads, H head_dim,
Hv value_head_dim, E d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec
from mha_spec.attention import check_spec
from mha_spec.rules import check_broadcasts
from mha_tt.arrays import as_dtype
from mha_tt.cache import (
    Cache,
    CacheT,
    KVCache,
    append_unchecked,
    check_cache_holds,
    check_cached_input,
    check_room,
    init_cache,
    mark_written_over,
    num_added,
    without_new,
    write_rows,
)
from mha_tt.checks import check_is_cache, check_kernel, check_positions, check_weights, checked
from mha_tt.decode.pages import init_paged_cache
from mha_tt.decode.slots import first_slots
from mha_tt.decode.step import decode_step, project_new_tokens
from mha_tt.device import upload, zeros
from mha_tt.features.latent import (
    HeadWeights,
    LatentCache,
    absorb_keys,
    absorb_values,
    expand_latents,
)
from mha_tt.features.rope import rotation_of
from mha_tt.kernels import Kernel, fused
from mha_tt.kernels.nonfinite import Contained
from mha_tt.layout import padded_features, padded_width, round_up
from mha_tt.masks import DeviceMask, Mask, block_of
from mha_tt.mha import AttentionLayer, FunctionalLayer
from mha_tt.padding import padding_after
from mha_tt.projections import project_output
from mha_tt.scores import Scores


def multi_head_attention_with_cache(
    x: Float[Tensor, "B T d_in"],
    weights: Mapping[str, Tensor],
    spec: AttentionSpec,
    cache: KVCache,
    *,
    new_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
    mask: Bool[np.ndarray, "*#scores"] | DeviceMask | None = None,
    bias: Float[np.ndarray | Tensor, "*#scores"] | None = None,
    positions: Int[np.ndarray, "*axes #B T"] | None = None,
    kernel: Kernel = fused.attend,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> tuple[Float[Tensor, "B T E"], KVCache]:
    """Causal self-attention of new tokens over all tokens so far, with a cache of fixed capacity.

    Results, errors and other arguments are as in `MultiHeadAttentionWithCache`.

    Args:
        weights: see `multi_head_attention`.
        spec: the layer; dropout is not applied.
        kernel: computes the context.
        compute_kernel_config: arithmetic of the device, including the default kernel; default:
            `accurate_config`.
    """
    check_spec(spec, is_self_attention=True)
    check_weights(weights, spec)
    check_is_cache(cache, KVCache)
    layer = FunctionalLayer(weights, spec, kernel, compute_kernel_config=compute_kernel_config)
    return cached_layer(layer, x, cache, mask, bias, new_lengths=new_lengths, positions=positions)


def cached_layer(
    layer: AttentionLayer | FunctionalLayer,
    x: Tensor,
    cache: CacheT,
    mask: np.ndarray | DeviceMask | None,
    bias: np.ndarray | Tensor | None,
    *,
    new_lengths: np.ndarray | Sequence[int] | None,
    positions: np.ndarray | None,
    get_kv_b: Callable[[], HeadWeights] | None = None,
) -> tuple[Tensor, CacheT]:
    """Append new tokens to a cache of either type and attend.

    With `get_kv_b`, in the absorbed form: it returns the weight of kv_b_proj by head, and is called
    after all checks.
    """
    spec = layer.spec
    scores = layer.scores(bias)
    before = _check_call(layer, x, cache, mask, scores, new_lengths, positions)
    batch_size, seq_len, _ = x.shape
    if 0 in (batch_size, seq_len):
        return _output_without_tokens(layer, x), cache
    if get_kv_b is not None:
        scores = replace(scores, spec=spec.absorbed)
    # Positions that the layer ignores must not rule out the step kernel.
    if not spec.has_positions:
        positions = None
    full_mask = Mask(mask, is_causal=True, span=spec.span)
    is_step = seq_len == 1
    are_all_real = new_lengths is None or (np.asarray(new_lengths) == seq_len).all()
    is_plain_step = is_step and are_all_real and positions is None and spec.temperature is None
    if is_plain_step and not spec.shared_kv:  # the kernel of a step appends
        kernel = _kernel_of_step(layer, x, cache, full_mask, scores)
        if kernel is not None:
            return decode_step(layer, kernel, x, cache, scores, get_kv_b)
    if positions is None:
        positions = before.lengths[:, None] + np.arange(seq_len)
    is_real = None
    if not are_all_real:
        x, positions, is_real = _without_padding(x, positions, np.asarray(new_lengths))
    if is_step:  # one token per sequence: tokens of all sequences share tiles
        x = ttnn.reshape(x, (1, batch_size, x.shape[2]))
        positions = np.broadcast_to(positions, (*positions.shape[:-2], batch_size, 1)).swapaxes(
            -1, -2
        )
    rotation = rotation_of(positions, spec, device=x.device(), side_by_side=is_step)
    if rotation is None:
        q, new = project_new_tokens(layer.project, x, before, spec, positions)
    else:
        q, new = project_new_tokens(layer.project, x, before, spec, rotation)
    config = layer.compute_kernel_config
    head_weights = None
    if get_kv_b is not None:
        head_weights = get_kv_b()
        q = absorb_keys(q, head_weights, spec, compute_kernel_config=config)
    if is_step:
        attend = _attend_in_step
    else:
        attend = _attend_in_prefill
    context, after = attend(layer, q, new, before, new_lengths, full_mask, scores)
    if head_weights is not None:
        context = context[:, :, :, : padded_features("kv_a_norm", spec)]
        context = absorb_values(context, head_weights, spec, compute_kernel_config=config)
    output = project_output(layer.project, context, x, spec)
    if is_step:
        output = ttnn.reshape(output, (batch_size, 1, output.shape[2]))
    if is_real is not None:
        output = ttnn.where(is_real, output, 0.0)
    # At the end: a step that raised an error can be repeated.
    mark_written_over(before, after)
    # With `shared_kv` the other layer keeps its cache.
    if spec.shared_kv:
        return output, cache
    return output, after


def _output_without_tokens(layer: AttentionLayer | FunctionalLayer, x: Tensor) -> Tensor:
    """Return the output for x, (B, T, d_in), if B or T is 0."""
    batch_size, seq_len, _ = x.shape
    shape = (batch_size, seq_len, padded_width("out_proj", layer.spec))
    output = zeros(shape, x.dtype, x.device())
    if layer.spec.out_proj:
        return layer.project("out_proj", output)
    return output


def _check_call(
    layer: AttentionLayer | FunctionalLayer,
    x: Tensor,
    cache: CacheT,
    mask: np.ndarray | DeviceMask | None,
    scores: Scores,
    new_lengths: np.ndarray | Sequence[int] | None,
    positions: np.ndarray | None,
) -> CacheT:
    """Reject arguments that do not fit the layer or each other, and return the cache without the
    new tokens.
    """
    spec = layer.spec
    check_kernel(layer.kernel)
    check_cached_input(x, cache, spec)
    batch_size, seq_len, _ = x.shape
    scores_shape = (batch_size, spec.num_heads, seq_len, cache.capacity)
    if mask is not None:
        check_broadcasts("mask", tuple(mask.shape), scores_shape)
    scores.check_arguments(scores_shape, x)
    if positions is not None:
        check_positions(positions, batch_size, seq_len, spec.rope)
    _check_heads_fit(cache, spec)
    before = cache
    # With `shared_kv` the other layer has appended the new tokens.
    if spec.shared_kv:
        before = without_new(cache, seq_len, new_lengths)
    check_room(before, seq_len, new_lengths)
    return before


def _without_padding(
    x: Tensor, positions: np.ndarray, new_lengths: np.ndarray
) -> tuple[Tensor, np.ndarray, Tensor]:
    """Return tokens with 0, and positions with the first position, in padding; and 1 for each real
    token, (B, T, 1).
    """
    is_padding = padding_after(new_lengths, x.shape[1])
    # Frequencies may depend on the last position: padding must not move it.
    positions = np.where(is_padding, positions[..., :1], positions)
    is_real = upload(~is_padding[:, :, None], device=x.device(), dtype=x.dtype)
    x = ttnn.where(is_real, x, 0.0)  # NaN in padding would reach real tokens as 0 * NaN
    return x, positions, is_real


def _attend_in_step(
    layer: AttentionLayer | FunctionalLayer,
    q: Tensor,
    new: tuple[Tensor, ...],
    cache: CacheT,
    new_lengths: np.ndarray | Sequence[int] | None,
    mask: Mask,
    scores: Scores,
) -> tuple[Tensor, CacheT]:
    """Append one token per sequence, q (1, N, B, H), new (1, K, B, H) each; each attends to all
    tokens up to itself.
    """
    added = num_added(cache, 1, new_lengths)
    if new:
        write_rows(
            cache, [ttnn.transpose(x, 1, 2) for x in new], np.where(added > 0, cache.lengths, -1)
        )
    before = cache.lengths
    cache = cache.with_slots(cache.slots.values(), cache.lengths + added)
    kernel = _kernel_of_step(layer, q, cache, mask, scores)
    if kernel is None:
        q = ttnn.permute(q, (2, 1, 0, 3))
        context = _attend_to_slots(layer, q, cache, before, mask, scores)
        return ttnn.permute(context, (2, 1, 0, 3)), cache
    # Sequences without a new token attend to an existing slot, so that their output is finite
    # before it is set to 0.
    last_positions = np.minimum(before, cache.capacity - 1)
    slots = tuple(cache.slots.values())
    context = fused.attend_to_cache_unchecked(
        ttnn.transpose(q, 1, 2),
        slots[0],
        slots[-1],
        last_positions,
        scores.spec,
        page_table=cache.page_table,
        learned=scores.learned,
        compute_kernel_config=kernel.compute_kernel_config,
    )
    return ttnn.transpose(context, 1, 2), cache


def _kernel_of_step(
    layer: AttentionLayer | FunctionalLayer,
    x: Tensor,
    cache: Cache,
    mask: Mask,
    scores: Scores,
) -> fused.FusedAttention | None:
    """Return the kernel of the layer, or the one that it contains, if its step form supports the
    call, else None.

    The step form multiplies a mask by the scale (tt-metal#55337). Its windows are correct, but leak
    non-finite values of keys before the window (docs/reference/ttnn.md).
    """
    first, *values = cache.slots.values()
    if values:
        have_one_width = values[0].shape[3] == first.shape[3]
    else:
        have_one_width = not _are_expanded(scores)
    has_mask = mask.mask is not None or mask.span is not None or scores.bias is not None
    is_supported = (
        have_one_width
        and not has_mask
        and fused.step_supports(layer.spec.num_heads, first, is_paged=cache.page_table is not None)
        and fused.supports(x, scores)
    )
    if not is_supported:
        return None
    kernel = layer.kernel
    # Without a mask a token attends to all filled slots, and the step form reads no other: there is
    # no NaN to contain.
    if isinstance(kernel, Contained):
        kernel = kernel.kernel
    if isinstance(kernel, fused.FusedAttention):
        return kernel
    return None


def _attend_in_prefill(
    layer: AttentionLayer | FunctionalLayer,
    q: Tensor,
    new: tuple[Tensor, ...],
    cache: CacheT,
    new_lengths: np.ndarray | Sequence[int] | None,
    mask: Mask,
    scores: Scores,
) -> tuple[Tensor, CacheT]:
    """Append tokens, q (B, N, T, H), new (B, K, T, H) each; each attends to all tokens up to
    itself.
    """
    before = cache.lengths
    seq_len = q.shape[2]
    if new:
        cache = append_unchecked(cache, new, num_added(cache, seq_len, new_lengths))
    # Padding beyond the capacity has no column in the mask.
    if not new or before.any() or seq_len > cache.capacity:
        return _attend_to_slots(layer, q, cache, before, mask, scores), cache
    # Right padding needs no mask: causality hides it from real tokens.
    return _attend(layer, q, new, mask, scores), cache


def _attend_to_slots(
    layer: AttentionLayer | FunctionalLayer,
    q: Tensor,
    cache: Cache,
    before: np.ndarray,
    mask: Mask,
    scores: Scores,
) -> Tensor:
    """Attend from new tokens, q (B, N, T, H), that are already cached, each to all tokens up to
    itself.
    """
    filled = min(round_up(int(before.max(initial=0)) + q.shape[2]), cache.capacity)
    slots = tuple(first_slots(x, filled, cache.pages) for x in cache.slots.values())
    return _attend(layer, q, slots, replace(mask, q_offset=before), scores)


def _attend(
    layer: AttentionLayer | FunctionalLayer,
    q: Tensor,
    slots: tuple[Tensor, ...],
    mask: Mask,
    scores: Scores,
) -> Tensor:
    """Attend to keys and values, to latents, or to keys and values expanded from latents.

    Values of the absorbed form are whole latents, because kernels need values as wide as keys; the
    context is cut later.
    """
    keys = slots[0]
    values = slots[-1]
    if len(slots) == 1 and _are_expanded(scores):
        keys, values = expand_latents(layer.project, as_dtype(keys, q.dtype), layer.spec)
    rows = slice(0, q.shape[2])
    slots_with_keys = slice(0, keys.shape[2])
    mask = replace(mask, mask=block_of(mask.mask, rows, slots_with_keys))
    scores = scores.block(rows, slots_with_keys)
    return layer.kernel(q, keys, values, mask, scores)


def _are_expanded(scores: Scores) -> bool:
    """Return whether latents are expanded to keys and values; `AttentionSpec.absorbed` has none."""
    return scores.spec.latent is not None


class MultiHeadAttentionWithCache(AttentionLayer):
    """Causal multi-head self-attention with a cache of fixed capacity. Constructor arguments: see
    `AttentionLayer`.

    The first call takes an empty cache, `layer.init_cache(batch_size, capacity)`, and each later
    call takes the cache that the previous one returned.
    """

    _is_self_attention = True

    def init_cache(
        self,
        batch_size: int,
        capacity: int,
        dtype: ttnn.DataType | None = None,
        *,
        page_size: int | None = None,
    ) -> KVCache:
        """Return an empty cache for this module, on the device of its weights.

        Args:
            batch_size: number of sequences, B.
            capacity: number of slots per sequence.
            dtype: dtype of keys and values; default: the dtype of the module's inputs. bfloat8_b
                halves the memory of a bfloat16 module.
            page_size: slots per page, whole tiles; the cache is then a `PagedKVCache`, for bfloat16
                and bfloat8_b.

        Raises:
            TypeError: if a size is not an integer, or the dtype not floating point, or float32 with
                pages.
            ValueError: if the capacity is below 1, the batch size below 0, or 0 with pages, or a
                page is not whole tiles.
        """
        dtype = self.dtype if dtype is None else dtype
        spec = self.spec
        device = self.device
        sizes = (batch_size, spec.num_kv_heads, capacity, padded_features("k_proj", spec))
        value_width = padded_features("v_proj", spec)
        if page_size is None:
            return init_cache(*sizes, dtype, value_head_dim=value_width, device=device)
        return init_paged_cache(
            *sizes, dtype, value_head_dim=value_width, page_size=page_size, device=device
        )

    @checked
    def __call__(
        self,
        x: Float[Tensor, "B T d_in"],
        cache: KVCache,
        *,
        new_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
        mask: Bool[np.ndarray, "*#scores"] | DeviceMask | None = None,
        bias: Float[np.ndarray | Tensor, "*#scores"] | None = None,
        positions: Int[np.ndarray, "*axes #B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], KVCache]:
        """Append new tokens to the cache; each attends to all tokens up to itself.

        Args:
            x: new tokens, (B, T, d_in): a prompt, a part of one, or one token per sequence. On the
                device, in the dtype of the module.
            cache: tokens so far. Do not use it afterwards: its storage is reused. To keep it, pass
                `cache.copy()`. With `shared_kv` the cache of another layer, which has already
                appended the new tokens; it is returned unchanged.
            new_lengths: number of real tokens of each sequence, 0..T, (B,). The rest is right
                padding with arbitrary contents: it is not cached, not attended to, and its output
                is 0. Default: all.
            mask: boolean, True = masked, in addition to causality; broadcasts to (B, N, T,
                capacity). The output of a fully masked row is 0. A mask or a bias rules out the
                step kernel; all heads of the filled slots are then read.
            bias: added to the scores; broadcasts to (B, N, T, capacity). In a NumPy array -inf
                masks a key; a tensor on the device is not read: its -inf counts as -5e8.
            positions: position of each new token, (B or 1, T), or with sections (axes, B or 1, T),
                on the host; default: `cache.lengths` and up.

        Returns:
            Output (B, T, E), and the cache with the new tokens.

        Raises:
            TypeError: if x is not on the device, dtypes differ, the mask is not boolean or the
                lengths are not integers.
            ValueError: if the shapes do not fit, or the new tokens exceed the capacity.
        """
        check_is_cache(cache, KVCache)
        self.check_input("x", x)
        output, cache = cached_layer(
            self, x, cache, mask, bias, new_lengths=new_lengths, positions=positions
        )
        return self.drop_output(output), cache


def _check_heads_fit(cache: Cache, spec: AttentionSpec) -> None:
    """Reject a cache whose heads or widths are not the layer's."""
    if isinstance(cache, LatentCache):
        # All heads share the latents.
        check_cache_holds(cache, 1, padded_features("kv_a_proj", spec))
    else:
        key_width = padded_features("k_proj", spec)
        value_width = padded_features("v_proj", spec)
        check_cache_holds(cache, spec.num_kv_heads, key_width, value_width)
