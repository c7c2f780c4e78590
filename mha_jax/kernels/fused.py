"""The fast path: the same function without attention weights.

On a CPU it goes block by block, as FlashAttention does, and skips blocks in which every key is masked; elsewhere it is
JAX's own dot_product_attention behind the masks and the empty rows of this package, or the plain path where that cannot
do with scores what a layer does.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mha_jax import stages
from mha_jax.compiled import compiled
from mha_jax.kernels import blockwise
from mha_jax.kernels.blockwise import BLOCK_SIZES, BlockSizes, Scoring
from mha_jax.kernels.nonfinite import emptied, not_finite, sees_any, spoilt
from mha_jax.masks import Masking, to_scores_rank
from mha_jax.parallel.sharding import automatically, is_automatic, of_heads
from mha_jax.parallel.tokens import attend_to_tokens, passes_keys, token_axis
from mha_jax.relative_bias import relative_position_bias
from mha_jax.rope import at_least_float32
from mha_jax.stages import Dropout, check_attention, score_scale
from mha_spec import AttentionSpec, Refusal
from mha_spec.reach import Reach
from mha_spec.rules import as_rate


def scaled_dot_product_attention(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    spec: AttentionSpec | None = None,
    *,
    mask: Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[Array, " B"] | Sequence[int] | None = None,
    need_weights: bool = False,
    dropout: float = 0.0,
    dropout_keep: Bool[Array, "B N T S"] | None = None,
    dropout_rng: jax.Array | None = None,
    sinks: Float[Array, "..."] | None = None,
    relative_bias: Float[Array, "..."] | None = None,
    block_sizes: BlockSizes = BLOCK_SIZES,
) -> tuple[Float[Array, "B N T Hv"], None]:
    """Attention of split heads without the attention weights: the function of `stages`, in the fastest form there is.

    Args:
        query: (B, N, T, H).
        key, value: (B, K, S, H) and (B, K, S, Hv); query head n uses key/value head n // (N // K).
        spec: the layer that these are the heads of, of which the scale of the scores is taken; 1 / sqrt(H) when absent.
        mask: boolean, True = masked; broadcasts to (B, N, T, S). A row in which every key is masked gives 0.
        bias: added to the scores, in the dtype of query; broadcasts to (B, N, T, S). -inf masks a key.
        is_causal: hide every key after the query's own position, as `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), as `create_padding_mask`.
        need_weights: must be False, the weights are never stored here.
        dropout: rate at which attention weights are dropped; 0 outside training.
        dropout_keep: must be absent, a fused kernel draws its own.
        dropout_rng: random key to draw what is dropped from.
        sinks: the logit of each head that takes part in the softmax and has no value, (N,), where the layer has them.
        relative_bias: what scores gain for the distance of their keys, (num_buckets, N), where the layer has that.
        block_sizes: how the work is divided on a CPU.

    Returns:
        The context (B, N, T, Hv), in the dtype of query, and None.

    Raises:
        TypeError: if an input is not floating point, the dtypes differ, or the mask is not boolean.
        ValueError: if the shapes do not fit, or the weights or a given dropout are asked for.
    """
    if need_weights or dropout_keep is not None:
        raise Refusal("need_weights and dropout_keep", "be left out on the fused path, which stores no weights")
    masking = Masking(mask, bias, is_causal, key_padding_lengths, sinks=sinks, relative_bias=relative_bias)
    masking = masking.of_layer(spec)
    return attend(
        query, key, value, masking, Dropout(dropout, rng=dropout_rng), spec=spec, block_sizes=block_sizes
    ), None


def attend(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    masking: Masking,
    dropout: Dropout,
    *,
    spec: AttentionSpec | None,
    block_sizes: BlockSizes = BLOCK_SIZES,
) -> Float[Array, "B N T Hv"]:
    """`scaled_dot_product_attention` as the layers call it: the context."""
    check_attention(query, key, value, masking, spec)
    as_rate("dropout", dropout.rate)
    if (axis := token_axis(query, key, masking, block_sizes)) != block_sizes.token_axis:
        block_sizes = replace(block_sizes, token_axis=axis, passes_keys=passes_keys(key, axis, block_sizes))
    return _attend(query, key, value, masking.as_arrays(), dropout, spec=spec, block_sizes=block_sizes)


@automatically(of_heads)
def _attend(
    query: Array,
    key: Array,
    value: Array,
    masking: Masking,
    dropout: Dropout,
    *,
    spec: AttentionSpec | None,
    block_sizes: BlockSizes,
) -> Array:
    if block_sizes.token_axis is not None and query.size and not dropout.rate:
        masking = _with_relative_bias(masking, query, key, spec)
        spec = None if spec is None else replace(spec, relative_bias=None)  # the bias contains it now
        told = {"spec": spec, "scoring": _scoring(query, spec), "block_sizes": block_sizes}
        return attend_to_tokens(query, key, value, masking, **told, attend_whole=_attend_whole)
    num_scores = math.prod(query.shape[:3]) * key.shape[2]
    if dropout.rate or not num_scores or (num_scores <= block_sizes.few_scores and _is_on_cpu()):
        return stages.attend(query, key, value, masking, dropout, spec=spec, need_weights=False)[0]
    if _is_on_cpu():
        return _attend_on_cpu(query, key, value, masking, spec=spec, block_sizes=block_sizes)
    is_wide_bias = masking.bias is not None and masking.bias.dtype != query.dtype  # which had a relative bias added
    if not kernel_takes(spec) or masking.sinks is not None or is_wide_bias:
        return stages.attend(query, key, value, masking, dropout, spec=spec, need_weights=False)[0]
    scale = score_scale(query, spec)
    return _attend_by_library(query, key, value, masking, scale=scale, platform=jax.default_backend())


def _attend_whole(
    query: Array, key: Array, value: Array, masking: Masking, spec: AttentionSpec | None, block_sizes: BlockSizes
) -> Array:
    return _attend(query, key, value, masking, Dropout(), spec=spec, block_sizes=block_sizes)


def kernel_takes(spec: AttentionSpec | None) -> bool:
    """Whether the framework's kernel can do with scores what a layer does."""
    return spec is None or (spec.soft_cap is None and not spec.has_distance_bias)


def _scoring(query: Array, spec: AttentionSpec | None) -> Scoring:
    """What a layer does with the products of its queries (B, N, T, H) and keys."""
    scale = score_scale(query, spec)
    return Scoring(scale) if spec is None else Scoring(scale, spec.soft_cap, spec.alibi_slopes)


def _attend_on_cpu(
    query: Array,
    key: Array,
    value: Array,
    masking: Masking,
    *,
    spec: AttentionSpec | None,
    block_sizes: BlockSizes,
) -> Array:
    """Block by block; where a window or a chunk hides most keys, a few queries at a time over those in their reach."""
    reach, scoring = masking.reach, _scoring(query, spec)
    if reach is not None and masking.offsets is None and query.shape[2] > _num_together(reach):
        return _attend_in_reach(query, key, value, masking, spec=spec, block_sizes=block_sizes)
    masking = _with_relative_bias(masking, query, key, spec)
    if reach is not None or masking.offsets is not None:
        mask = masking.joined(query.shape[2], key.shape[2])
        masking = Masking(mask, masking.bias, offsets=masking.offsets, sinks=masking.sinks)
    return blockwise.attend_by_block(query, key, value, masking, scoring=scoring, block_sizes=block_sizes)


def _with_relative_bias(masking: Masking, query: Array, key: Array, spec: AttentionSpec | None) -> Masking:
    """The same with the relative bias of a layer, if it has one, in the bias of its scores."""
    if masking.relative_bias is None or spec is None or spec.relative_bias is None:
        return masking
    lengths, dtype = (query.shape[2], key.shape[2]), at_least_float32(query).dtype
    gained = relative_position_bias(
        masking.relative_bias, spec.relative_bias, *lengths, masking.offsets, scores_dtype=dtype
    )
    bias = gained if masking.bias is None else gained + to_scores_rank(at_least_float32(masking.bias))
    return replace(masking, bias=bias, relative_bias=None)


def _num_together(reach: Reach) -> int:
    """How many queries go together: those of a chunk, or so many that most keys of a window are those of them all."""
    return reach.chunk_size or max(128, (reach.window_size or 0) // 4)


class _Parts(NamedTuple):
    """A few queries at a time, and the keys in their reach.

    Attributes:
        size: queries of a part.
        before: keys of a part before its first query.
        num_keys: keys of a part.
        masking: what hides keys and is added to scores, padded to whole parts, so that the keys of part i begin where
            its queries do.
    """

    size: int
    before: int
    num_keys: int
    masking: Masking

    def rows_of(self, x: Array, begin: Array) -> Array:
        """The queries of a part, of (B, N, T, ·)."""
        return lax.dynamic_slice_in_dim(x, begin, self.size, 2)

    def keys_of(self, x: Array, begin: Array) -> Array:
        """The keys of a part, of (B, K, S, ·)."""
        return lax.dynamic_slice_in_dim(x, begin, self.num_keys, 2)

    def masking_of(self, begin: Array) -> Masking:
        """What hides keys from a part, and is added to its scores."""
        whole, first = self.masking, self.before - begin  # the first key that there is
        reach, lengths = whole.reach, jnp.asarray(whole.key_padding_lengths)
        mask, bias = (None if x is None else self._scores_of(x, begin) for x in (whole.mask, whole.bias))
        if self.before:
            is_before = jnp.arange(self.num_keys, dtype=jnp.int32)[None, None, None] < first
            mask = is_before if mask is None else mask | is_before
        part = replace(whole, mask=mask, bias=bias, key_padding_lengths=jnp.maximum(lengths + first, 0), reach=None)
        if reach is None or reach.chunk_size is not None:  # of its own chunk a query sees all, or all up to itself
            return part
        return replace(part, reach=reach, offsets=jnp.full((1,), self.before, jnp.int32))

    def hidden_in(self, part: Masking) -> Any:
        """What the masking of a part hides; there are lengths."""
        return part.with_infinite_bias().joined(self.size, self.num_keys)

    def _scores_of(self, x: Array, begin: Array) -> Array:
        x = x if x.shape[2] == 1 else self.rows_of(x, begin)
        return x if x.shape[3] == 1 else lax.dynamic_slice_in_dim(x, begin, self.num_keys, 3)


@compiled("spec", "block_sizes")
def _attend_in_reach(
    query: Array, key: Array, value: Array, masking: Masking, *, spec: AttentionSpec | None, block_sizes: BlockSizes
) -> Array:
    """A few queries at a time over the keys that they reach: the work grows with the length, not with its square."""
    (batch_size, num_heads, seq_len_q, _), seq_len_k = query.shape, key.shape[2]
    reach: Any = masking.reach
    size = _num_together(reach)
    num_parts = -(-seq_len_q // size)
    before = -reach.first(0)  # keys that a part sees before its first query, and after its last
    after = 0 if masking.is_causal else reach.stop(size - 1) - size
    more_rows = (0, num_parts * size - seq_len_q)
    more_keys = (before, max(num_parts * size + after - seq_len_k, 0))

    def padded(x: Array | None, *paddings: tuple[int, int]) -> Array | None:
        if x is None:
            return None
        x = to_scores_rank(x)
        paddings = tuple((0, 0) if of == 1 else pad for of, pad in zip(x.shape[2:], paddings, strict=True))
        return jnp.pad(x, [(0, 0), (0, 0), *paddings])

    # What is not finite is looked for once, for keys are in the reach of several parts.
    wrong_rows, wrong_keys = not_finite(query), not_finite(key) | not_finite(value)
    query, key, value = emptied(query, wrong_rows), emptied(key, wrong_keys), emptied(value, wrong_keys)
    query, wrong_rows = (jnp.pad(x, [(0, 0), (0, 0), more_rows, (0, 0)]) for x in (query, wrong_rows))
    key, value, wrong_keys = (jnp.pad(x, [(0, 0), (0, 0), more_keys, (0, 0)]) for x in (key, value, wrong_keys))
    mask, bias = (padded(x, more_rows, more_keys) for x in (masking.mask, masking.bias))
    lengths: Any = masking.key_padding_lengths
    lengths = jnp.full((batch_size,), seq_len_k, jnp.int32) if lengths is None else lengths
    masking = replace(masking, mask=mask, bias=bias, key_padding_lengths=lengths)
    parts = _Parts(size, before, before + size + after, masking)

    def attend_part(begin: Array) -> tuple[Array, Array]:
        part, rows = parts.masking_of(begin), parts.rows_of(query, begin)
        keys, values = (parts.keys_of(x, begin) for x in (key, value))
        if batch_size * num_heads * size * parts.num_keys > block_sizes.few_scores:
            context = _attend_on_cpu(rows, keys, values, part, spec=spec, block_sizes=block_sizes)
            return context, jnp.zeros((*rows.shape[:3], 1), bool)
        scores = stages.attention_scores(rows, keys, part.bias, spec, part.offsets, part.relative_bias)
        scores = jnp.where(parts.hidden_in(part), -jnp.inf, scores)
        context, log_sums = blockwise.weighed_sum(scores, values, part.sinks)
        return context.astype(query.dtype), jnp.isposinf(log_sums)

    # What a part stores for its gradient it computes again.
    begins = jnp.arange(num_parts, dtype=jnp.int32) * size
    contexts, gave_nothing = lax.map(jax.checkpoint(attend_part), begins)
    contexts = spoilt(contexts, _wrong_in_parts(parts, begins, wrong_rows, wrong_keys, gave_nothing))
    contexts = jnp.moveaxis(contexts, 0, 2)  # (B, N, parts, size, H)
    return contexts.reshape(batch_size, num_heads, num_parts * size, contexts.shape[4])[:, :, :seq_len_q]


def _wrong_in_parts(
    parts: _Parts, begins: Array, wrong_rows: Array, wrong_keys: Array, gave_nothing: Array
) -> Bool[Array, "parts B N T 1"]:
    """The rows of each part that see something, and are not finite, see what is not, or were given nothing by it."""
    marked = jnp.repeat(wrong_keys, wrong_rows.shape[1] // wrong_keys.shape[1], axis=1)

    def look_in(part: tuple[Array, Array]) -> Array:
        begin, gave_nothing = part
        hidden = parts.hidden_in(parts.masking_of(begin))
        is_wrong = (parts.rows_of(wrong_rows, begin) | gave_nothing) & ~hidden.all(axis=-1, keepdims=True)
        return is_wrong | sees_any(parts.keys_of(marked, begin)[..., 0], parts.size, Masking(hidden))

    def look() -> Array:
        return lax.map(look_in, (begins, gave_nothing))

    if is_automatic(wrong_rows):  # devices would have to agree on whether to look
        return look()
    is_any = wrong_rows.any() | wrong_keys.any() | gave_nothing.any()
    # All False, but made of the same arrays: in a `shard_map` both branches must vary over the same devices.
    return lax.cond(is_any, look, lambda: gave_nothing & is_any)


@compiled("scale", "platform")
def _attend_by_library(
    query: Array, key: Array, value: Array, masking: Masking, *, scale: float, platform: str
) -> Array:
    seq_len_q, seq_len_k = query.shape[2], key.shape[2]
    width, head_dim = value.shape[3], max(query.shape[3], value.shape[3])  # it takes heads of one width
    is_half = query.dtype in (jnp.float16, jnp.bfloat16)
    takes_cudnn = platform == "gpu" and is_half and head_dim % 8 == 0 and head_dim <= 128
    told = _told(masking, seq_len_q, seq_len_k, takes_cudnn=takes_cudnn)
    mask, bias, empty_rows = None, masking.bias, None
    # What is not finite is handled here: kernels disagree about it, as they do about a row without a key.
    wrong_rows, wrong_keys = not_finite(query), not_finite(key) | not_finite(value)
    marked = jnp.repeat(wrong_keys[..., 0], query.shape[1] // key.shape[1], axis=1)
    query = emptied(query, wrong_rows)
    if told is None:
        hidden: Any = masking.with_infinite_bias().joined(seq_len_q, seq_len_k)
        wrong_rows |= sees_any(marked, seq_len_q, Masking(hidden))
        # A row without a key is shown every key instead, and emptied afterwards.
        mask = to_scores_rank(hidden)
        empty_rows = mask.all(axis=-1, keepdims=True)
        mask = mask & ~empty_rows
    else:
        lengths: Any = masking.key_padding_lengths
        first, stop = _seen_keys(masking, seq_len_q, seq_len_k)
        wrong_rows |= _sees_any_between(marked, first, stop)
        if masking.reach is not None or lengths is not None:
            empty_rows = (first == stop)[:, None, :, None]
        if lengths is not None:  # what a kernel writes as the gradient of padding is not read
            places = jnp.arange(seq_len_k, dtype=jnp.int32)[None, None, :, None]
            wrong_keys |= places >= lengths[:, None, None, None]
    key, value = emptied(key, wrong_keys), emptied(value, wrong_keys)
    if bias is not None:
        bias = jnp.where(jnp.isneginf(bias), 0.0, bias)  # the mask hides these
    query, key, value = (jnp.pad(x, [(0, 0)] * 3 + [(0, head_dim - x.shape[3])]) for x in (query, key, value))
    with jax.numpy_dtype_promotion("standard"):  # which it needs, where the caller may be strict
        context = jax.nn.dot_product_attention(
            query.swapaxes(1, 2),
            key.swapaxes(1, 2),
            value.swapaxes(1, 2),
            None if bias is None else to_scores_rank(bias),
            None if mask is None else ~mask,  # the other polarity: True = attend
            scale=scale,
            implementation="cudnn" if takes_cudnn else "xla",
            **(told or {}),
        ).swapaxes(1, 2)
    context = spoilt(context[..., :width], wrong_rows)
    return context if empty_rows is None else emptied(context, empty_rows)


def _told(masking: Masking, seq_len_q: int, seq_len_k: int, *, takes_cudnn: bool) -> dict[str, Any] | None:
    """What is hidden in the library's own words, with which it needs no mask; None where it has none."""
    reach, lengths = masking.reach, masking.key_padding_lengths
    if any(x is not None for x in (masking.mask, masking.bias, masking.offsets)):
        return None
    told: dict[str, Any] = {"is_causal": masking.is_causal}
    if reach is not None:
        # cuDNN takes a window with causality alone, and not more queries than keys.
        is_refused = takes_cudnn and (not masking.is_causal or lengths is not None or seq_len_q > seq_len_k)
        if reach.window_size is None or is_refused:
            return None
        before = reach.window_size - 1
        told["local_window_size"] = (before, 0 if masking.is_causal else before)
    if lengths is not None:  # a kernel without a key may give anything
        told["key_value_seq_lengths"] = jnp.maximum(jnp.asarray(lengths), 1)
    return told


def _seen_keys(masking: Masking, seq_len_q: int, seq_len_k: int) -> tuple[Int[Array, "#B T"], Int[Array, "#B T"]]:
    """The first of the keys that each query sees and the one after the last; the same where it sees none."""
    first, stop = (x.clip(0, seq_len_k) for x in masking.seen_keys(seq_len_q, seq_len_k))
    return jnp.minimum(first, stop), stop


def _sees_any_between(
    marked: Bool[Array, "B N S"], first: Int[Array, "#B T"], stop: Int[Array, "#B T"]
) -> Bool[Array, "B N T 1"]:
    """Whether any of the keys is marked that a query sees, from its first one to before where it stops."""
    counts = jnp.pad(lax.cumsum(marked.astype(jnp.int32), axis=2), [(0, 0), (0, 0), (1, 0)])  # before each key
    before, within = (jnp.take_along_axis(counts, places[:, None], axis=2) for places in (first, stop))
    return (within > before)[..., None]


def _is_on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def attend_to_cache(
    query: Float[Array, "B N 1 H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S Hv"],
    last_positions: Int[Array, " B"],
    spec: AttentionSpec | None = None,
    *,
    sinks: Float[Array, "..."] | None = None,
    relative_bias: Float[Array, "..."] | None = None,
    block_sizes: BlockSizes = BLOCK_SIZES,
) -> Float[Array, "B N 1 Hv"]:
    """Attention of one new token of each sequence over its cached tokens; reads the filled part of the cache only.

    Args:
        query: (B, N, 1, H).
        keys, values: the cache, (B, K, S, H) and (B, K, S, Hv), in the dtype of query.
        last_positions: the last slot that each sequence sees, (B,).
        spec: the layer that these are the heads of, of which the scale of the scores is taken; 1 / sqrt(H) when absent.
        sinks: the logit of each head that takes part in the softmax and has no value, (N,), where the layer has them.
        relative_bias: what scores gain for the distance of their keys, (num_buckets, N), where the layer has that.
        block_sizes: how the work is divided on a CPU.

    Raises:
        TypeError: if an input is not floating point, or the dtypes differ.
        ValueError: if the shapes do not fit.
    """
    masking = Masking(is_causal=True, offsets=last_positions, sinks=sinks, relative_bias=relative_bias).of_layer(spec)
    check_attention(query, keys, values, masking, spec)
    if token_axis(query, keys, masking, block_sizes) is not None:  # slots are divided
        return attend(query, keys, values, masking, Dropout(), spec=spec, block_sizes=block_sizes)
    return _attend_to_cache(query, keys, values, masking, spec=spec, block_sizes=block_sizes)


@automatically(of_heads)
def _attend_to_cache(
    query: Array,
    keys: Array,
    values: Array,
    masking: Masking,
    *,
    spec: AttentionSpec | None,
    block_sizes: BlockSizes,
) -> Array:
    last_positions: Any = masking.offsets
    if keys.shape[2] > block_sizes.keys and query.size and _is_on_cpu():
        return blockwise.attend_to_cache(
            query,
            keys,
            values,
            last_positions,
            masking.sinks,
            _with_relative_bias(masking, query, keys, spec).bias,
            scoring=_scoring(query, spec),
            reach=None if spec is None else spec.reach,
            block_sizes=block_sizes,
        )
    if _is_on_cpu():
        return stages.attend(query, keys, values, masking, Dropout(), spec=spec, need_weights=False)[0]
    return attend(query, keys, values, masking, Dropout(), spec=spec)
