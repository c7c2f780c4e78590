"""Attention stage by stage, and as one function: the definition that all else is tested against.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv value_head_dim, E d_model.
A mask is boolean and True where a query may not see a key; an additive term is a bias.

On the device H is the padded head_dim: see `mha_tt.upload_weights`. Wherever the true one matters, the spec has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, Temperature
from mha_spec.attention import check_spec
from mha_spec.rules import as_rate, check_head_groups
from mha_spec.temperature import check_temperature
from mha_tt.alibi import alibi_bias
from mha_tt.arrays import check_broadcasts, check_count, check_floating, check_head_dim
from mha_tt.device import TILE, TILE_NBYTES, accurate_config, as_dtype, padded_head_dim, round_up, upload, zeros
from mha_tt.masks import MASKED, DeviceMask, Masking, bias_on_device, check_bias, check_mask, check_sinks, on_device
from mha_tt.not_finite import emptied, hide_not_finite, spoilt
from mha_tt.rope import Rotation, at_least_float32, check_positions
from mha_tt.weights import Project, padded_features


def split_heads(x: Float[Tensor, "B T NH"], num_heads: int) -> Float[Tensor, "B N T H"]:
    """Split the last axis into heads, outermost first, and move them before the tokens.

    Raises:
        ValueError: if the width is not a multiple of num_heads.
    """
    check_floating("x", x, rank=3)
    check_count("num_heads", num_heads)
    batch_size, seq_len, width = x.shape
    if width % num_heads:
        raise ValueError(f"the width must be a multiple of num_heads, got width={width} and num_heads={num_heads}")
    if 0 in (batch_size, seq_len):  # most operations do not take tensors of nothing
        return zeros((batch_size, num_heads, seq_len, width // num_heads), x.dtype, x.device())
    if width // num_heads % TILE:  # the operation below would take this, and give heads of another width
        return ttnn.transpose(ttnn.reshape(x, (batch_size, seq_len, num_heads, width // num_heads)), 1, 2)
    x = ttnn.reshape(x, (batch_size, 1, seq_len, width))
    heads, _, _ = ttnn.experimental.nlp_create_qkv_heads(
        x, num_heads=num_heads, num_kv_heads=0, transpose_k_heads=False
    )
    return heads


def combine_heads(x: Float[Tensor, "B N T H"]) -> Float[Tensor, "B T NH"]:
    """Put the heads side by side again: the inverse of `split_heads`."""
    check_floating("x", x, rank=4)
    batch_size, num_heads, seq_len, head_dim = x.shape
    if 0 in (batch_size, seq_len):
        return zeros((batch_size, seq_len, num_heads * head_dim), x.dtype, x.device())
    # The operation takes whole tiles, and keeps a row of them twice on a core: 64 heads of 128 in float32 do not fit.
    row_nbytes = num_heads * round_up(head_dim) // TILE * TILE_NBYTES[x.dtype]
    if head_dim % TILE or row_nbytes > 2**19:
        return ttnn.reshape(ttnn.transpose(x, 1, 2), (batch_size, seq_len, num_heads * head_dim))
    return ttnn.transformer.concatenate_heads(x)


def repeat_kv_heads(x: Float[Tensor, "B K S H"], num_heads: int) -> Float[Tensor, "B N S H"]:
    """Repeat each key/value head for its group of query heads: query head n uses head n // (N // K).

    Raises:
        ValueError: if num_heads is not a multiple of the key/value heads.

    Source: grouped-query attention, arXiv:2305.13245, section 2.2.
    """
    check_floating("x", x, rank=4)
    check_head_groups(num_heads, x.shape[1])
    repeats = num_heads // x.shape[1]
    return x if repeats == 1 else ttnn.repeat_interleave(x, repeats, dim=1)  # repeat, not tile


def project_qkv(
    project: Project,
    query: Float[Tensor, "B T d_in"],
    key: Float[Tensor, "B S d_kv"],
    value: Float[Tensor, "B S d_kv"],
    spec: AttentionSpec,
    positions: Int[np.ndarray, "... #B T"] | Rotation | None = None,
) -> tuple[Float[Tensor, "B N T H"], Float[Tensor, "B K S H"], Float[Tensor, "B K S Hv"]]:
    """Project the inputs, clip, split the heads, normalise, rotate queries and keys, and temper queries.

    Args:
        project: applies a projection or a norm by its name.
        query, key, value: inputs of the layer; the same array three times for self-attention.
        spec: the layer: heads, norms, RoPE, temperature, and whether it holds one `qkv_proj` in place of three
            projections.
        positions: place of each token, (B or 1, T), or with sections (axes, B or 1, T); 0, 1, … when absent. Used with
            RoPE and a temperature only. A `Rotation` made of them is uploaded once for many calls.

    Returns:
        q (B, N, T, H), k (B, K, S, H) and v (B, K, S, Hv).
    """
    check_spec(spec)
    if spec.has_positions:
        positions = np.arange(query.shape[1])[None] if positions is None else positions
        check_positions(positions, query.shape[0], query.shape[1], spec.rope)
    if not spec.fused_qkv:
        q, k, v = project("q_proj", query), project("k_proj", key), project("v_proj", value)
    elif key is query and value is query:
        q, k, v = _unpack_qkv(project("qkv_proj", query), spec)
    else:
        q, k, v = (_unpack_qkv(project("qkv_proj", x), spec)[i] for i, x in enumerate((query, key, value)))
    rotation = None
    if isinstance(positions, Rotation):
        rotation, positions = positions, positions.positions
    elif spec.rope is not None and positions is not None and 0 not in (query.shape[0], query.shape[1]):
        padded = padded_head_dim(spec.head_dim, rope=True)
        rotation = Rotation(positions, spec.rope, head_dim=spec.head_dim, padded=padded, device=query.device())

    def enter(name: str, x: Tensor, num_heads: int, rotation: Rotation | None) -> Tensor:
        norm = spec.norms.get(name)
        x = x if spec.clip_qkv is None else ttnn.clamp(x, -spec.clip_qkv, spec.clip_qkv)
        if norm is not None and norm.over == "width":
            x = project(name, x)
        x = x if len(x.shape) == 4 else split_heads(x, num_heads)
        if norm is not None and norm.over == "head" and not norm.after_rope:
            x = project(name, x)
        x = x if rotation is None else rotation.rotate(x)
        return project(name, x) if norm is not None and norm.after_rope else x

    q, k = enter("q_norm", q, spec.num_heads, rotation), enter("k_norm", k, spec.num_kv_heads, rotation)
    if spec.temperature is not None and positions is not None:
        q = apply_temperature(q, positions, spec.temperature)
    return q, k, enter("v_norm", v, spec.num_kv_heads, None)


def apply_temperature(
    x: Float[Tensor, "B N T H"], positions: Int[np.ndarray, "#B T"], temperature: Temperature
) -> Float[Tensor, "B N T H"]:
    """Queries times 1 + scale * ln(1 + floor((position + first_position) / length)); in the dtype of x.

    Args:
        x: queries, split into heads, and rotated where there is RoPE; multiplied in at least float32.
        positions: place of each token in its sequence, from 0, (B or 1, T), on the host.
        temperature: length, scale and first position.

    Raises:
        TypeError: if x is not floating point, positions are not integers, or temperature is not a `Temperature`.
        ValueError: if the positions do not fit.

    Source: Scalable-Softmax, arXiv:2501.19399, as Llama 4 has it.
    """
    check_floating("x", x, rank=4)
    check_temperature(temperature)
    check_positions(positions, x.shape[0], x.shape[2], None)
    lengths = (positions + temperature.first_position) // temperature.length
    if 0 in (x.shape[0], x.shape[2]) or not lengths.any():  # every factor is 1
        return x
    factors = 1.0 + temperature.scale * np.log1p(lengths)
    factors = upload(factors[:, None, :, None], device=x.device(), dtype=ttnn.float32)
    return as_dtype(ttnn.multiply(at_least_float32(x), factors), x.dtype)


def attention_scores(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    bias: Float[np.ndarray, "..."] | Tensor | None = None,
    spec: AttentionSpec | None = None,
    offsets: Int[np.ndarray, " B"] | None = None,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T S"]:
    """Dot products of queries and keys, scaled, capped softly if the spec says so, plus the bias; at least float32.

    The scale is 1 / sqrt(H) where there is no spec, or none in it. With ALiBi scores lose by the distance of query and
    key: `offsets` are the places of the first query among the keys, of every sequence or of each, (1,) or (B,); 0 when
    absent.

    Source: Attention Is All You Need, arXiv:1706.03762, equation 1; the soft cap: Gemma 2, arXiv:2408.00118, section 2.
    """
    check_scored(query, key, bias)
    scale = score_scale(query, spec)
    scores = ttnn.matmul(
        query,
        repeat_kv_heads(key, query.shape[1]),  # a product of matrices broadcasts no batch axis
        transpose_b=True,
        dtype=ttnn.float32,
        compute_kernel_config=compute_kernel_config or accurate_config(query.device()),
    )
    scores = soft_capped(ttnn.multiply(scores, scale), spec)
    if spec is not None and spec.alibi_slopes is not None:
        lost = alibi_bias(spec.alibi_slopes, scores.shape[2], scores.shape[3], offsets, scores_dtype=np.float32)
        scores = ttnn.add(scores, upload(lost, device=query.device(), dtype=ttnn.float32))
    return scores if bias is None else ttnn.add(scores, bias_on_device(bias, query.device(), ttnn.float32))


def masked_softmax(
    scores: Float[Tensor, "B N T S"],
    mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
    sinks: Float[Tensor, "..."] | None = None,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T S"]:
    """Softmax over the keys, in at least float32; a masked key weighs exactly 0, so a row without a key is all 0.

    A sink takes part like the score of one more key, which nothing hides, and whose weight is left out.

    Source: the sinks: gpt-oss model card, arXiv:2508.10925, section 2.
    """
    check_floating("scores", scores, rank=4)
    check_mask(mask, tuple(scores.shape))
    check_sinks(sinks, scores.shape[1])
    scores, mask = at_least_float32(scores), on_device(mask, scores.device())
    if mask is not None:
        scores = ttnn.where(mask.hidden, MASKED, scores)
    config = compute_kernel_config or accurate_config(scores.device())
    if sinks is not None:
        batch_size, _, seq_len_q, seq_len_k = scores.shape
        column = ttnn.repeat(at_least_float32(sinks), (batch_size, 1, seq_len_q, 1))
        scores = ttnn.concat([scores, column], dim=3)
        attn_weights = ttnn.softmax(scores, dim=-1, numeric_stable=True, compute_kernel_config=config)
        return emptied(attn_weights[:, :, :, :seq_len_k], mask)
    attn_weights = ttnn.softmax(scores, dim=-1, numeric_stable=True, compute_kernel_config=config)
    if mask is None:
        return attn_weights
    # Where every score that is seen is -inf, or as low as `MASKED`, the masked keys would weigh something.
    lowest = ttnn.le(ttnn.max(scores, dim=-1, keepdim=True), MASKED)
    return emptied(spoilt(attn_weights, lowest), mask)


def attention_context(
    attn_weights: Float[Tensor, "B N T S"],
    value: Float[Tensor, "B K S Hv"],
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T Hv"]:
    """Sum of the values, each weighed by its attention weight; summed in at least float32, in the dtype of value."""
    check_weighed(attn_weights, value)
    return ttnn.matmul(
        attn_weights,
        repeat_kv_heads(value, attn_weights.shape[1]),
        dtype=attn_weights.dtype if value.dtype == ttnn.bfloat8_b else value.dtype,  # a cache may be narrower
        compute_kernel_config=compute_kernel_config or accurate_config(value.device()),
    )


def apply_gate(context: Float[Tensor, "B N T Hv"], gate: Float[Tensor, "B T G"]) -> Float[Tensor, "B N T Hv"]:
    """The context times the sigmoid of what gate_proj gives, (B, T, N * Hv), or (B, T, N) for one number a head.

    Source: Gated Attention for Large Language Models, arXiv:2505.06708.
    """
    check_gated(context, gate)
    if 0 in tuple(context.shape):
        return context
    gate = ttnn.sigmoid_accurate(at_least_float32(split_heads(gate, context.shape[1])))
    return as_dtype(ttnn.multiply(at_least_float32(context), gate), context.dtype)


def project_output(
    project: Project, context: Float[Tensor, "B N T Hv"], query: Float[Tensor, "B T d_in"], spec: AttentionSpec
) -> Float[Tensor, "B T E"]:
    """Gate the context if the layer has a gate, put its heads side by side, and project them where it has `out_proj`.

    Args:
        project: applies a projection by its name.
        context: sums of values, (B, N, T, Hv).
        query: input of the layer, of which the gate is made.
        spec: the layer.

    Returns:
        The output (B, T, E), or (B, T, N * Hv) without `out_proj`.
    """
    if spec.gate is not None:
        context = apply_gate(context, project("gate_proj", query))
    output = combine_heads(context)
    return project("out_proj", output) if spec.out_proj else output


def apply_dropout(
    attn_weights: Float[Tensor, "B N T S"],
    rate: float,
    keep: Bool[np.ndarray, "B N T S"] | None = None,
    *,
    seed: int = 0,
) -> Float[Tensor, "B N T S"]:
    """Drop each attention weight with probability `rate` and divide the others by 1 - rate.

    Args:
        attn_weights: weights after the softmax.
        rate: probability of being dropped, 0 <= rate < 1.
        keep: True where a weight is kept; drawn at random when absent, which the device does in bfloat16 only.
        seed: of the draw.

    Raises:
        TypeError: if there is something to draw and the weights are not bfloat16.
    """
    rate = as_rate("dropout", rate)
    check_keep(keep, tuple(attn_weights.shape))
    if keep is not None:
        kept = keep.reshape((1,) * (4 - keep.ndim) + keep.shape) / (1.0 - rate)
        return ttnn.multiply(attn_weights, upload(kept, device=attn_weights.device(), dtype=ttnn.float32))
    return drop("attn_weights", attn_weights, rate, seed)


def drop(name: str, x: Tensor, rate: float, seed: int) -> Tensor:
    """x with each element dropped at random, at a rate, and the others divided by 1 - rate."""
    if not rate:
        return x
    if x.dtype != ttnn.bfloat16:
        raise TypeError(f"{name} must be bfloat16 to be dropped at random (ttnn has no other), got dtype={x.dtype}")
    return ttnn.experimental.dropout(x, probability=rate, scale=1.0 / (1.0 - rate), seed=seed)


def score_scale(query: Tensor, spec: AttentionSpec | None) -> float:
    """What the dot products of queries (B, N, T, H) are multiplied by.

    Raises:
        ValueError: if the specification is of wider heads.
    """
    if spec is None:
        return query.shape[-1] ** -0.5
    check_spec(spec)
    check_head_dim(spec.head_dim, query.shape[-1])
    return spec.score_scale


def soft_capped(scores: Tensor, spec: AttentionSpec | None) -> Tensor:
    """Scores before anything is added or hidden, capped if the spec says so."""
    if spec is None or spec.soft_cap is None:
        return scores
    return ttnn.multiply(ttnn.tanh(ttnn.multiply(scores, 1.0 / spec.soft_cap)), spec.soft_cap)


def _unpack_qkv(packed: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a packed projection: split into heads at once, where they are alike and no norm is over a width."""
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    head_dim = padded_features("q_proj", spec)
    is_even = padded_features("v_proj", spec) == head_dim
    if not is_even or any(norm.over == "width" for norm in spec.norms.values()):
        keys_begin, values_begin = num_heads * head_dim, (num_heads + num_kv_heads) * head_dim
        return packed[:, :, :keys_begin], packed[:, :, keys_begin:values_begin], packed[:, :, values_begin:]
    if 0 in (packed.shape[0], packed.shape[1]):
        shapes = [(packed.shape[0], heads, packed.shape[1], head_dim) for heads in (num_heads, num_kv_heads)]
        q, kv = (zeros(shape, packed.dtype, packed.device()) for shape in shapes)
        return q, kv, kv
    if head_dim % TILE == 0:
        return ttnn.transformer.split_query_key_value_and_split_heads(
            packed, num_heads=num_heads, num_kv_heads=num_kv_heads, transpose_key=False
        )
    heads = split_heads(packed, num_heads + 2 * num_kv_heads)
    values_begin = num_heads + num_kv_heads
    return heads[:, :num_heads], heads[:, num_heads:values_begin], heads[:, values_begin:]


# ---- Together --------------------------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    spec: AttentionSpec | None = None,
    *,
    mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
    bias: Float[np.ndarray, "..."] | Tensor | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
    need_weights: bool = False,
    dropout: float = 0.0,
    dropout_keep: Bool[np.ndarray, "B N T S"] | None = None,
    seed: int = 0,
    sinks: Float[Tensor, "..."] | None = None,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> tuple[Float[Tensor, "B N T Hv"], Float[Tensor, "B N T S"] | None]:
    """Attention of split heads, written as its definition; `fused` holds the fast form of the same function.

    A masked key or value may hold anything, NaN too. What is seen is never swallowed in IEEE arithmetic; a card's
    matrix unit has another, in which NaN is a number (docs/ttnn.md).

    Args:
        query: (B, N, T, H).
        key, value: (B, K, S, H) and (B, K, S, Hv); query head n uses key/value head n // (N // K).
        spec: the layer that these are the heads of, of which the scale of the scores is taken; 1 / sqrt(H) when absent.
        mask: boolean, True = masked; broadcasts to (B, N, T, S). A row in which every key is masked gives 0.
        bias: added to the scores; broadcasts to (B, N, T, S). -inf masks a key. On the device it is not read: there a
            row of nothing but -inf gives the mean of the values.
        is_causal: hide every key after the query's own position, as `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), on the host, as `create_padding_mask`.
        need_weights: also return the attention weights.
        dropout: rate at which attention weights are dropped; 0 outside training.
        dropout_keep: True where a weight is kept, in place of a random draw.
        seed: of that draw.
        sinks: the logit of each head that takes part in the softmax and has no value, (1, N, 1, 1), where the layer has
            them.
        compute_kernel_config: arithmetic of the device; `accurate_config` when absent.

    Returns:
        The context (B, N, T, Hv), and the attention weights before dropout (B, N, T, S) or None; in the dtype of query.

    Raises:
        TypeError: if an input is not floating point, the dtypes differ, or the mask is not boolean.
        ValueError: if the shapes do not fit.

    Source: Attention Is All You Need, arXiv:1706.03762, equation 1.
    """
    return attend(
        query,
        key,
        value,
        Masking(mask, bias, is_causal, key_padding_lengths, sinks=sinks).of_layer(spec),
        Dropout(dropout, dropout_keep, seed),
        spec=spec,
        need_weights=need_weights,
        compute_kernel_config=compute_kernel_config,
    )


class Dropout(NamedTuple):
    """What is dropped of the attention weights.

    Attributes:
        rate: probability of being dropped.
        keep: True where a weight is kept, in place of a random draw.
        seed: of that draw.
    """

    rate: float = 0.0
    keep: Bool[np.ndarray, "B N T S"] | None = None
    seed: int = 0


def attend(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    masking: Masking,
    dropout: Dropout,
    *,
    spec: AttentionSpec | None,
    need_weights: bool,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None,
) -> tuple[Float[Tensor, "B N T Hv"], Float[Tensor, "B N T S"] | None]:
    """`scaled_dot_product_attention` as the layers call it."""
    check_attention(query, key, value, masking)
    as_rate("dropout", dropout.rate)
    device, seq_len_q, seq_len_k = query.device(), query.shape[2], key.shape[2]
    if 0 in (query.shape[0], seq_len_q, seq_len_k):
        attn_weights = zeros((*tuple(query.shape)[:3], seq_len_k), query.dtype, device)
        context = zeros((*tuple(query.shape)[:3], value.shape[3]), query.dtype, device)
        return context, attn_weights if need_weights else None
    mask = masking.with_infinite_bias().joined(seq_len_q, seq_len_k, device)
    spoilt_rows = None
    if mask is not None:  # a masked key reaches no weight
        (value,), spoilt_rows = hide_not_finite(mask, seq_len_q, value)
    config = compute_kernel_config or accurate_config(device)
    scores = attention_scores(query, key, masking.bias, spec, masking.offsets, compute_kernel_config=config)
    attn_weights = masked_softmax(scores, mask, masking.sinks, compute_kernel_config=config)
    attn_weights = as_dtype(attn_weights, query.dtype)
    dropped = apply_dropout(attn_weights, dropout.rate, dropout.keep, seed=dropout.seed)
    context = as_dtype(attention_context(dropped, value, compute_kernel_config=config), query.dtype)
    return spoilt(context, spoilt_rows), attn_weights if need_weights else None


# ---- What is refused -------------------------------------------------------------------------------------------------


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masking: Masking,
) -> None:
    """Refuse split heads, query (B, N, T, H), key and value (B, K, S, H), or a masking that do not fit each other."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_floating(name, x, rank=4)
        if (x.dtype == ttnn.float32) != (query.dtype == ttnn.float32):  # a cache may be narrower than its queries
            raise TypeError(f"{name} must be float32 if query is, got {name}.dtype={x.dtype} and {query.dtype}")
    if tuple(key.shape)[:3] != tuple(value.shape)[:3]:
        raise ValueError(
            f"value must have the shape of key but for its features, got {tuple(value.shape)} and {tuple(key.shape)}"
        )
    check_scored(query, key, None)  # the masking checks its bias
    masking.check((*tuple(query.shape)[:3], key.shape[2]))


def check_scored(query: Tensor, key: Tensor, bias: np.ndarray | Tensor | None) -> None:
    """Refuse queries (B, N, T, H) and keys (B, K, S, H) that have no dot products, or a bias that does not fit them."""
    check_floating("query", query, rank=4)
    check_floating("key", key, rank=4)
    if (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]):
        raise ValueError(
            f"key must have the batch size and head_dim of query, got key.shape={tuple(key.shape)} "
            f"and query.shape={tuple(query.shape)}"
        )
    check_head_groups(query.shape[1], key.shape[1])
    check_bias(bias, (*tuple(query.shape)[:3], key.shape[2]))


def check_weighed(attn_weights: Tensor, value: Tensor) -> None:
    """Refuse attention weights (B, N, T, S) and values (B, K, S, Hv) that do not fit each other."""
    check_floating("attn_weights", attn_weights, rank=4)
    check_floating("value", value, rank=4)
    if (attn_weights.shape[0], attn_weights.shape[3]) != (value.shape[0], value.shape[2]):
        raise ValueError(
            f"value must have the batch size and the keys of attn_weights, got value.shape={tuple(value.shape)} "
            f"and attn_weights.shape={tuple(attn_weights.shape)}"
        )
    check_head_groups(attn_weights.shape[1], value.shape[1])


def check_gated(context: Tensor, gate: Tensor) -> None:
    """Refuse a context (B, N, T, Hv) and a gate that is not (B, T, N * Hv) or (B, T, N)."""
    check_floating("context", context, rank=4)
    check_floating("gate", gate, rank=3)
    batch_size, num_heads, seq_len, head_dim = context.shape
    widths = (num_heads * head_dim, num_heads)
    if tuple(gate.shape) not in [(batch_size, seq_len, width) for width in widths]:
        raise ValueError(
            f"gate must have shape (B, T, N * H or N) = ({batch_size}, {seq_len}, {widths[0]} or {widths[1]}), "
            f"got gate.shape={tuple(gate.shape)}"
        )


def check_keep(keep: np.ndarray | None, scores_shape: tuple[int, ...]) -> None:
    """Refuse a given dropout that is not boolean or does not broadcast to the scores (B, N, T, S)."""
    if keep is None:
        return
    if not isinstance(keep, np.ndarray):
        raise TypeError(f"keep must be a NumPy array, got {type(keep).__name__}")
    if keep.dtype != np.bool_:
        raise TypeError(f"keep must be boolean (True = kept), got keep.dtype={keep.dtype}")
    check_broadcasts("keep", keep.shape, scores_shape)
