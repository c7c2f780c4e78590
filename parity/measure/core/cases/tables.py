"""Cases by topic, simple ones first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mha_spec import (
    Alibi,
    AttentionSpec,
    DynamicScaling,
    Gate,
    GridBias,
    Latent,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Norm,
    ProportionalScaling,
    RelativeBias,
    RelativeProducts,
    Rope,
    SinusoidProducts,
    Temperature,
    YarnScaling,
)
from parity.measure.core.case import Case

_MHA = AttentionSpec(32, 4)
_GQA = AttentionSpec(32, 8, num_kv_heads=2)
_ROPE = AttentionSpec(32, 4, rope=Rope(10000.0))
_GQA_ROPE = AttentionSpec(
    48, 6, num_kv_heads=2, head_dim=16, rope=Rope(10000.0), qkv_bias=False, out_bias=False
)
_SOFT_CAP = AttentionSpec(32, 4, num_kv_heads=2, soft_cap=1.5)
_TEMPERATURE = AttentionSpec(
    32, 4, num_kv_heads=2, temperature=Temperature(3, scale=0.5, first_position=1)
)
_ROPE_TEMPERATURE = AttentionSpec(
    32, 4, num_kv_heads=2, rope=Rope(10000.0), temperature=Temperature(4, scale=0.5)
)
_SINKS = AttentionSpec(32, 4, num_kv_heads=2, sinks=True)
_ALIBI = AttentionSpec(32, 4, alibi=Alibi())
_RELATIVE = AttentionSpec(32, 4, relative_bias=RelativeBias(8, 8))
_SINUSOIDS = AttentionSpec(32, 4, relative_products=SinusoidProducts())
_PRODUCTS = AttentionSpec(32, 4, relative_products=RelativeProducts(4, 2))
_OF_KEYS = RelativeProducts(3, 5, of_queries=False, of_keys=True, per_head=True)
_WINDOW = AttentionSpec(32, 4, num_kv_heads=2, window_size=4)
_CHUNK = AttentionSpec(32, 4, num_kv_heads=2, chunk_size=4)
_SCALE = AttentionSpec(32, 4, num_kv_heads=2, scale=0.0625)
_QK_NORM = AttentionSpec(
    48,
    6,
    num_kv_heads=2,
    head_dim=16,
    rope=Rope(10000.0),
    qkv_bias=False,
    out_bias=False,
    qk_norm=Norm(),
)
_ONE_PLUS = AttentionSpec(
    32, 4, num_kv_heads=2, rope=Rope(10000.0), qk_norm=Norm(weight="1+w"), v_norm=Norm(weight=None)
)
_WIDTH = AttentionSpec(
    32, 4, num_kv_heads=2, fused_qkv=True, rope=Rope(10000.0), qk_norm=Norm(over="width")
)
_CONTEXT = AttentionSpec(
    48, 6, num_kv_heads=2, context_norm=Norm("layer", over="width", bias=True, eps=0.01)
)
_PER_HEAD = AttentionSpec(
    48,
    6,
    num_kv_heads=2,
    head_dim=12,
    qk_norm=Norm("layer", per_head=True, bias=True, eps=0.01),
    v_norm=Norm("layer"),
)
_SHARED_KV = AttentionSpec(
    48,
    6,
    num_kv_heads=2,
    head_dim=12,
    shared_kv=True,
    qkv_bias=False,
    out_bias=False,
    qk_norm=Norm(),
    rope=Rope(10000.0),
    scale=1.0,
)
_AFTER_ROPE = AttentionSpec(32, 4, rope=Rope(10000.0), qk_norm=Norm(after_rope=True))
_L2 = AttentionSpec(
    32, 4, num_kv_heads=2, rope=Rope(10000.0), qk_norm=Norm(weight=None, after_rope=True, eps=0.01)
)
_CLIP = AttentionSpec(32, 4, num_kv_heads=2, clip_qkv=0.75, rope=Rope(10000.0))
_VALUES = AttentionSpec(
    32,
    4,
    num_kv_heads=2,
    head_dim=12,
    value_head_dim=8,
    rope=Rope(10000.0),
    v_norm=Norm(),
    gate=Gate(),
)
_LATENT = AttentionSpec(
    48,
    4,
    head_dim=24,
    value_head_dim=12,
    qkv_bias=False,
    out_bias=False,
    latent=Latent(16, 8, q_rank=20),
    rope=Rope(10000.0, rotary_dim=8, rotated="last", pairs="interleaved"),
)
_LATENT_FACTORS = replace(_LATENT, latent=Latent(16, 8, q_rank=20, q_factor=1.6, kv_factor=1.75))
_LATENT_YARN = AttentionSpec(
    32,
    4,
    head_dim=16,
    value_head_dim=8,
    latent=Latent(40, 8, eps=0.01),
    rope=Rope(
        100.0,
        rotary_dim=8,
        rotated="last",
        scaling=YarnScaling(4.0, 64, mscale=1.0, mscale_all_dim=0.4),
    ),
    temperature=Temperature(4, scale=0.5),
)
_WHISPER = AttentionSpec(32, 4, qkv_bias=(True, False, True))
_GATE = AttentionSpec(
    48,
    4,
    num_kv_heads=2,
    head_dim=16,
    qkv_bias=False,
    out_bias=False,
    rope=Rope(10000.0),
    qk_norm=Norm(weight="1+w"),
    gate=Gate(),
)
_HEAD_GATE = AttentionSpec(32, 4, gate=Gate(per_head=True, bias=True))
_TINY = AttentionSpec(4, 2, d_in=3)
_TEXTBOOK = AttentionSpec(4, 2, d_in=3, qkv_bias=False, out_proj=False)
_CROSS = AttentionSpec(32, 4, d_in=24, d_kv=40)
_ANARCII = AttentionSpec(128, 4)
_SMOLLM2 = AttentionSpec(
    576, 9, num_kv_heads=3, qkv_bias=False, out_bias=False, rope=Rope(100000.0)
)
_LONGROPE = LongRopeScaling(4.0, 4096, (1.0, 1.1, 1.3, 1.6), (1.0, 2.0, 8.0, 30.0))
_DYNAMIC = DynamicScaling(4.0, 6)
_FRAMES = Rope(100.0, sections=(2, 1, 1))  # time, rows, columns
_PACKED = ((0, 0, 0, 1, 1, 1, 1, 2, 2), (0, 0, 0, 0, 0, 1, 1, 1, 1))
_RAGGED = ((4, 2, 0), (1, 1, 1), (0, 3, 2), (1, 1, 1))


def _rotating(rope: Rope, head_dim: int = 8) -> AttentionSpec:
    return AttentionSpec(32, 4, num_kv_heads=2, head_dim=head_dim, rope=rope)


def _calls(
    *chunks: int, capacity: int, new_lengths: tuple[tuple[int, ...], ...] = ()
) -> dict[str, Any]:
    """Return keywords of a case whose tokens arrive in calls of these sizes.

    `new_lengths` are the real tokens of each sequence.
    """
    return {
        "seq_len": sum(chunks),
        "chunks": chunks,
        "new_lengths": new_lengths,
        "capacity": capacity,
    }


_UNEVEN = _calls(5, 1, 2, 1, capacity=10, new_lengths=((5, 3), (1, 1), (2, 1), (1, 1)))

MASKS = [
    Case("textbook", _TEXTBOOK, "a published example with known values", seq_len=6, is_causal=True),
    Case("full", _MHA, "all tokens attend to all tokens"),
    Case("causal", _MHA, "no token attends to a later one", is_causal=True),
    Case(
        "causal-cross",
        _MHA,
        "causal, more keys than queries: aligned top-left",
        seq_len_k=8,
        is_causal=True,
    ),
    Case(
        "causal-tall",
        _MHA,
        "causal, fewer keys than queries",
        seq_len=8,
        seq_len_k=5,
        is_causal=True,
    ),
    Case("padding", _MHA, "right padding is hidden", key_padding_lengths=(3, 5)),
    Case(
        "causal-padding-empty",
        _MHA,
        "the output of an empty sequence is 0",
        is_causal=True,
        key_padding_lengths=(0, 4),
    ),
    Case("packed", _GQA_ROPE, "packed sequences", seq_len=9, is_causal=True, segment_ids=_PACKED),
    Case(
        "packed-padding",
        _MHA,
        "packed sequences with padding",
        seq_len=9,
        key_padding_lengths=(6, 9),
        segment_ids=_PACKED,
    ),
    Case("random-mask", _MHA, "a random mask with fully masked rows", seq_len=7, random_mask=True),
    Case("sliding-window", _MHA, "only the last three keys", seq_len=9, window_size=3),
    Case("window-cross", _MHA, "a window over more keys than queries", seq_len_k=9, window_size=3),
    Case("bias", _MHA, "a bias on the scores", bias=True),
    Case("bias-causal", _MHA, "a bias and a mask", bias=True, is_causal=True),
]
"""Masks and biases."""

LAYERS = [
    Case("cross", _CROSS, "keys of a different width and length", seq_len=4, seq_len_k=7),
    Case(
        "cross-padding",
        _CROSS,
        "keys of a different width, padded",
        seq_len_k=7,
        key_padding_lengths=(2, 7),
    ),
    Case("gqa", _GQA, "eight query heads share two key/value heads"),
    Case("gqa-causal", _GQA, "shared key/value heads and a mask", is_causal=True),
    Case("mqa", AttentionSpec(32, 4, num_kv_heads=1), "all query heads share one", is_causal=True),
    Case("head-dim", AttentionSpec(32, 4, head_dim=12), "heads wider than d_model / num_heads"),
    Case("value-head-dim", _VALUES, "values narrower than keys", seq_len=9, is_causal=True),
    Case(
        "value-head-dim-fused-qkv",
        AttentionSpec(32, 4, num_kv_heads=2, value_head_dim=20, fused_qkv=True),
        "values wider than keys, one projection of three widths",
        seq_len=9,
        key_padding_lengths=(3, 9),
    ),
    Case(
        "latent",
        _LATENT,
        "keys and values from a latent, queries from another",
        seq_len=9,
        is_causal=True,
    ),
    Case(
        "latent-factors",
        _LATENT_FACTORS,
        "latents multiplied by factors after their norms",
        seq_len=9,
        is_causal=True,
    ),
    Case(
        "latent-yarn",
        _LATENT_YARN,
        "latents with biases, mscale in the scale, a temperature",
        seq_len=9,
        key_padding_lengths=(6, 9),
    ),
    Case(
        "latent-window",
        AttentionSpec(
            32,
            4,
            head_dim=16,
            value_head_dim=8,
            latent=Latent(20, 8),
            sinks=True,
            window_size=4,
            gate=Gate(),
        ),
        "latents without RoPE, with sinks, a window and a gate",
        seq_len=9,
        is_causal=True,
    ),
    Case(
        "no-bias",
        AttentionSpec(32, 4, qkv_bias=False, out_bias=False),
        "projections without biases",
    ),
    Case("biases-of-some", _WHISPER, "biases of q and v, but not of k", seq_len_k=7),
    Case("no-out-proj", AttentionSpec(32, 4, out_proj=False), "concatenated heads as the output"),
    Case(
        "fused-qkv",
        AttentionSpec(32, 4, fused_qkv=True),
        "one projection for q, k and v",
        is_causal=True,
    ),
    Case(
        "fused-qkv-gqa",
        AttentionSpec(32, 8, num_kv_heads=2, fused_qkv=True, qkv_bias=False),
        "one projection whose parts differ in width",
    ),
    Case(
        "fused-qkv-cross",
        AttentionSpec(32, 4, fused_qkv=True),
        "one projection for q, k and v of different inputs",
        seq_len_k=7,
    ),
    Case("scale", _SCALE, "a different scale of the scores", seq_len=9, is_causal=True, gain=3.0),
    Case("temperature", _TEMPERATURE, "a temperature without RoPE", seq_len=9, is_causal=True),
    Case(
        "temperature-rope",
        _ROPE_TEMPERATURE,
        "a temperature after RoPE",
        seq_len=9,
        is_causal=True,
        first_position=2,
    ),
    Case("soft-cap", _SOFT_CAP, "a soft cap of the scores", seq_len=9, is_causal=True, gain=3.0),
    Case(
        "soft-cap-bias",
        _SOFT_CAP,
        "a soft cap before the bias",
        seq_len=9,
        bias=True,
        is_causal=True,
        gain=3.0,
    ),
    Case("sinks", _SINKS, "attention sinks", seq_len=9, is_causal=True),
    Case("sinks-masked", _SINKS, "sinks in fully masked rows", seq_len=10, random_mask=True),
    Case("alibi", _ALIBI, "ALiBi", seq_len=9, is_causal=True),
    Case(
        "alibi-both-ways",
        AttentionSpec(
            48, 6, num_kv_heads=2, alibi=Alibi(max_bias=4.0, scaled=True), sinks=True, window_size=6
        ),
        "scaled ALiBi in both directions, with 6 heads",
        seq_len=10,
        key_padding_lengths=(10, 7),
    ),
    Case("relative-bias", _RELATIVE, "a relative bias by buckets of distances", seq_len=9),
    Case(
        "relative-bias-padded",
        AttentionSpec(
            48,
            6,
            num_kv_heads=2,
            relative_bias=RelativeBias(7, 9, bidirectional=False),
            soft_cap=1.5,
        ),
        "a causal relative bias, capped scores, shared heads, padded",
        seq_len=10,
        key_padding_lengths=(10, 7),
        bias=True,
        gain=3.0,
    ),
    Case(
        "grid-bias",
        AttentionSpec(32, 4, relative_bias=GridBias(2, 4)),
        "a relative bias on a grid",
        seq_len=8,
    ),
    Case(
        "grid-bias-class-token",
        AttentionSpec(
            48, 6, num_kv_heads=2, relative_bias=GridBias(4, 3, class_token=True), scale=0.25
        ),
        "a class token and the first rows of a grid, shared heads, masked",
        seq_len=10,
        random_mask=True,
        bias=True,
    ),
    Case(
        "relative-products", _PRODUCTS, "products of queries with vectors of distances", seq_len=9
    ),
    Case(
        "relative-products-both-sides",
        AttentionSpec(
            48,
            6,
            num_kv_heads=2,
            scale=0.2,
            relative_products=RelativeProducts(
                7, 8, num_exact=4, max_distance=12, of_keys=True, per_head=True
            ),
        ),
        "products of queries and keys, grouped heads, logarithmic buckets, masked",
        seq_len=15,
        random_mask=True,
        bias=True,
    ),
    Case(
        "relative-products-of-keys",
        AttentionSpec(32, 4, num_kv_heads=2, rope=Rope(10000.0), relative_products=_OF_KEYS),
        "products of keys after RoPE, padded",
        seq_len=9,
        key_padding_lengths=(9, 6),
    ),
    Case(
        "sinusoid-products", _SINUSOIDS, "products with projected sinusoids of distances", seq_len=9
    ),
    Case(
        "sinusoid-products-grouped",
        AttentionSpec(
            48, 6, num_kv_heads=2, d_in=20, scale=0.2, relative_products=SinusoidProducts(100.0)
        ),
        "projected sinusoids, grouped heads, padded, masked",
        seq_len=11,
        random_mask=True,
        bias=True,
        key_padding_lengths=(11, 7),
    ),
    Case("window", _WINDOW, "a window of the last four tokens", seq_len=11, is_causal=True),
    Case(
        "window-both-ways",
        _WINDOW,
        "a window of three tokens before and after",
        seq_len=11,
        key_padding_lengths=(7, 11),
    ),
    Case(
        "window-far",
        AttentionSpec(16, 2, num_kv_heads=1, window_size=40),
        "a window processed in blocks",
        batch=1,
        seq_len=300,
        is_causal=True,
    ),
    Case("chunk", _CHUNK, "chunks of tokens", seq_len=11, is_causal=True),
    Case("chunk-both-ways", _CHUNK, "chunks without causality", seq_len=10, random_mask=True),
    Case("rope", _ROPE, "rotary positions", seq_len=11, is_causal=True),
    Case(
        "rope-gqa",
        _GQA_ROPE,
        "RoPE, shared heads, an independent head_dim",
        seq_len=9,
        is_causal=True,
    ),
    Case("clip-qkv", _CLIP, "clipped projections", seq_len=9, is_causal=True),
    Case("qk-norm", _QK_NORM, "norms of queries and keys per head", seq_len=9, is_causal=True),
    Case(
        "norm-one-plus",
        _ONE_PLUS,
        "norms with weights 1 + w, and of values without weights",
        seq_len=9,
        is_causal=True,
    ),
    Case("norm-width", _WIDTH, "norms over the width of all heads", seq_len=9, is_causal=True),
    Case("norm-per-head", _PER_HEAD, "layer norms with weights for each head", seq_len_k=7),
    Case(
        "norm-context",
        _CONTEXT,
        "a norm of the context before the projection",
        seq_len=9,
        random_mask=True,
    ),
    Case(
        "shared-kv",
        _SHARED_KV,
        "keys and values of another layer, after its RoPE",
        seq_len=9,
        is_causal=True,
    ),
    Case(
        "shared-kv-window",
        AttentionSpec(
            32,
            4,
            num_kv_heads=1,
            value_head_dim=12,
            shared_kv=True,
            clip_qkv=0.75,
            gate=Gate(per_head=True),
            window_size=4,
        ),
        "more keys of another layer than queries, in the layer's own window",
        seq_len=7,
        seq_len_k=9,
        key_padding_lengths=(5, 9),
    ),
    Case("norm-after-rope", _AFTER_ROPE, "norms after RoPE", seq_len=9, key_padding_lengths=(3, 9)),
    Case("gate", _GATE, "a gate per feature of the context", seq_len=9, is_causal=True),
    Case("gate-per-head", _HEAD_GATE, "a gate per head", seq_len_k=7),
    Case(
        "rope-far",
        _ROPE,
        "positions that are equal in bfloat16",
        batch=1,
        seq_len=300,
        is_causal=True,
    ),
]
"""Other widths, heads, projections; a different scale; rotary positions."""

ROPES = [
    Case(
        "rope-linear",
        _rotating(Rope(scaling=LinearScaling(8.0))),
        "positions divided by a factor",
        seq_len=9,
    ),
    Case(
        "rope-llama3",
        _rotating(Rope(500000.0, scaling=Llama3Scaling(8.0, 8192)), head_dim=16),
        "low frequencies scaled, beyond the original length",
        seq_len=9,
        first_position=8190,
    ),
    Case(
        "rope-yarn",
        _rotating(
            Rope(scaling=YarnScaling(4.0, 4096, mscale=1.0, mscale_all_dim=0.4)), head_dim=16
        ),
        "a ramp of frequencies, mscale, ten times the original length",
        seq_len=9,
        first_position=40960,
    ),
    Case(
        "rope-yarn-last",
        _rotating(
            Rope(
                150000.0,
                scaling=YarnScaling(32.0, 4096, truncate=False),
                rotary_dim=8,
                rotated="last",
            ),
            head_dim=12,
        ),
        "a ramp that is not truncated, the last features of a head",
        seq_len=9,
        first_position=4095,
    ),
    Case(
        "rope-dynamic",
        _rotating(Rope(scaling=_DYNAMIC)),
        "a base that grows with the length of the call",
        seq_len=9,
    ),
    Case(
        "rope-longrope",
        _rotating(Rope(scaling=_LONGROPE)),
        "a factor for each frequency, beyond the original length",
        seq_len=9,
        first_position=4092,
    ),
    Case(
        "rope-proportional",
        _rotating(Rope(1e6, scaling=ProportionalScaling(0.25)), head_dim=16),
        "two pairs of a whole head",
        seq_len=9,
    ),
    Case(
        "rope-partial",
        _rotating(Rope(rotary_dim=4), head_dim=12),
        "the first third of a head",
        seq_len=9,
    ),
    Case(
        "rope-partial-interleaved",
        _rotating(Rope(rotary_dim=8, pairs="interleaved"), head_dim=16),
        "interleaved pairs in the first half of a head",
        seq_len=9,
    ),
    Case("rope-sections", _rotating(_FRAMES), "positions on three axes", seq_len=9),
    Case(
        "rope-sections-interleaved",
        _rotating(Rope(100.0, sections=(3, 3, 2), section_order="interleaved"), head_dim=16),
        "positions on three axes, interleaved",
        seq_len=9,
    ),
    Case(
        "rope-sections-own",
        _rotating(
            Rope(100.0, pairs="interleaved", sections=(4, 4), section_frequencies="own"),
            head_dim=16,
        ),
        "rows and columns, each with a series of frequencies",
        seq_len=9,
    ),
    Case(
        "rope-sections-strided",
        _rotating(Rope(100.0, sections=(4, 4), section_frequencies="strided"), head_dim=16),
        "rows and columns that alternate in one series of frequencies",
        seq_len=9,
    ),
]
"""RoPE of recent models: scaled, partial, interleaved, on several axes."""

SIZES = [
    Case("one-query", _CROSS, "a single query", seq_len=1, seq_len_k=6),
    Case("one-key", _MHA, "a single key", seq_len=4, seq_len_k=1),
    Case("one-token", _MHA, "a single token", seq_len=1, batch=1),
    Case(
        "odd-sizes",
        _TINY,
        "sizes that are not multiples of each other",
        batch=3,
        seq_len=6,
        is_causal=True,
    ),
    Case("strided", _MHA, "inputs that are not contiguous in memory", strided=True, is_causal=True),
]
"""Few tokens, odd sizes, other strides."""

VALUES = [
    Case(
        "large-logits",
        _MHA,
        "logits beyond 65504, the maximum of float16",
        seq_len=6,
        gain=2.0**18,
        is_causal=True,
    ),
    Case(
        "large-logits-float16",
        _MHA,
        "logits beyond the maximum of float16, only in float16",
        seq_len=6,
        gain=2.0**18,
        is_causal=True,
        dtype="float16",
    ),
    Case(
        "nan-visible-causal",
        _GQA,
        "a NaN reaches exactly the rows that attend to it",
        is_causal=True,
        not_finite="visible",
    ),
    Case(
        "nan-hidden-padding",
        _ROPE,
        "NaN padding has no effect",
        key_padding_lengths=(3, 5),
        not_finite="hidden",
    ),
    Case(
        "nan-hidden-cross",
        _CROSS,
        "hidden NaN keys have no effect",
        seq_len_k=7,
        key_padding_lengths=(2, 6),
        not_finite="hidden",
    ),
    Case(
        "nan-hidden-norm",
        _PER_HEAD,
        "hidden NaN keys with norms",
        seq_len_k=7,
        key_padding_lengths=(2, 6),
        not_finite="hidden",
    ),
    Case(
        "wide", AttentionSpec(256, 4), "64 features per head, 48 tokens", seq_len=48, is_causal=True
    ),
]
"""Large logits, NaN, many features."""

CACHED = [
    Case("decode", _MHA, "a prompt, then token by token", **_calls(5, 1, 1, 1, capacity=10)),
    Case("chunked-prefill", _ROPE, "a prompt in parts", **_calls(4, 3, 2, capacity=9)),
    Case(
        "decode-fused-qkv",
        AttentionSpec(32, 4, fused_qkv=True, out_proj=False),
        "decode, one projection for q, k and v, no out_proj",
        **_calls(4, 1, 1, capacity=6),
    ),
    Case(
        "decode-scale",
        _SCALE,
        "decode, a different scale",
        gain=3.0,
        **_calls(4, 1, 1, 1, capacity=8),
    ),
    Case(
        "decode-temperature",
        _TEMPERATURE,
        "decode, a temperature past two lengths, ragged",
        **_UNEVEN,
    ),
    Case(
        "decode-soft-cap",
        _SOFT_CAP,
        "decode, capped scores",
        gain=3.0,
        **_calls(4, 1, 1, 1, capacity=8),
    ),
    Case(
        "decode-sinks",
        AttentionSpec(32, 4, num_kv_heads=2, window_size=4, rope=Rope(10000.0), sinks=True),
        "decode, sinks and a window",
        **_UNEVEN,
    ),
    Case(
        "decode-alibi",
        AttentionSpec(48, 6, num_kv_heads=2, alibi=Alibi()),
        "decode, ALiBi",
        **_UNEVEN,
    ),
    Case(
        "decode-relative-bias",
        AttentionSpec(48, 6, num_kv_heads=2, relative_bias=RelativeBias(6, 7, bidirectional=False)),
        "decode, a relative bias past the largest distance, ragged",
        **_UNEVEN,
    ),
    Case(
        "decode-grid-bias",
        AttentionSpec(48, 6, num_kv_heads=2, relative_bias=GridBias(4, 4)),
        "decode, a relative bias on a grid, ragged",
        **_UNEVEN,
    ),
    Case(
        "decode-relative-products",
        AttentionSpec(
            48, 6, num_kv_heads=2, relative_products=RelativeProducts(5, 0, of_keys=True)
        ),
        "decode, vectors of distances, ragged",
        **_UNEVEN,
    ),
    Case(
        "decode-sinusoid-products",
        AttentionSpec(32, 4, num_kv_heads=2, relative_products=SinusoidProducts()),
        "decode, projected sinusoids of distances, ragged",
        **_UNEVEN,
    ),
    Case(
        "decode-window",
        AttentionSpec(32, 4, num_kv_heads=2, window_size=4, rope=Rope(10000.0)),
        "decode, within a window",
        **_UNEVEN,
    ),
    Case("decode-chunk", _CHUNK, "decode, within a chunk", **_calls(3, 1, 1, 4, 1, capacity=10)),
    Case("decode-gqa-rope", _GQA_ROPE, "decode, rotary, shared", **_calls(4, 1, 1, 1, capacity=8)),
    Case("decode-latent", _LATENT, "decode over latents, ragged", **_UNEVEN),
    Case(
        "decode-latent-factors",
        _LATENT_FACTORS,
        "decode, latents times factors",
        **_calls(5, 2, capacity=8),
    ),
    Case(
        "decode-latent-yarn",
        _LATENT_YARN,
        "a prompt over keys expanded from latents, steps over latents",
        **_calls(12, 1, 1, capacity=14),
    ),
    Case(
        "decode-value-head-dim", _VALUES, "decode, narrow values", **_calls(4, 1, 1, 1, capacity=8)
    ),
    Case(
        "decode-biases-of-some",
        _WHISPER,
        "decode, keys without a bias",
        **_calls(4, 1, 1, capacity=6),
    ),
    Case(
        "decode-shared-kv",
        replace(_SHARED_KV, window_size=4),
        "decode over the cache of another layer, in a window",
        **_UNEVEN,
    ),
    Case("decode-clip-qkv", _CLIP, "decode, clipped projections", **_calls(4, 1, 1, 1, capacity=8)),
    Case("decode-gate", _GATE, "decode, gated", **_calls(4, 1, 1, 1, capacity=8)),
    Case(
        "decode-norm-context",
        _CONTEXT,
        "decode, a norm of the context",
        **_calls(4, 1, 1, 1, capacity=8),
    ),
    Case(
        "decode-norm-width",
        _WIDTH,
        "decode, norms over all heads",
        **_calls(4, 1, 1, 1, capacity=8),
    ),
    Case("decode-l2-norm", _L2, "decode, norms without weights", **_calls(4, 1, 1, 1, capacity=8)),
    Case(
        "ragged",
        AttentionSpec(32, 4, num_kv_heads=2, rope=Rope(10000.0)),
        "sequences of different lengths",
        batch=3,
        **_calls(*map(max, _RAGGED), capacity=9, new_lengths=_RAGGED),
    ),
    Case(
        "decode-yarn",
        _rotating(Rope(scaling=YarnScaling(4.0, 32), rotary_dim=4, pairs="interleaved")),
        "decode, partial and scaled RoPE",
        **_calls(4, 1, 1, 1, capacity=8),
    ),
    Case(
        "decode-dynamic",
        _rotating(Rope(scaling=_DYNAMIC)),
        "ragged, a base that grows with the length of each sequence",
        **_calls(4, 1, 3, 1, capacity=9, new_lengths=((4, 2), (1, 1), (2, 3), (1, 1))),
    ),
    Case(
        "decode-longrope",
        _rotating(Rope(scaling=_LONGROPE)),
        "decode past the original length: short factors, then long ones",
        first_position=4092,
        **_calls(3, 1, 1, 1, capacity=8),
    ),
    Case(
        "decode-sections",
        _rotating(_FRAMES),
        "decode on three axes",
        **_calls(4, 1, 1, 1, capacity=8),
    ),
    Case(
        "nan-visible-decode",
        _GQA,
        "a NaN in the prompt reaches every later token of its sequence",
        not_finite="visible",
        **_calls(4, 1, 1, capacity=8),
    ),
    Case(
        "nan-hidden-decode",
        _ROPE,
        "a prompt padded with NaN, then token by token",
        not_finite="hidden",
        **_calls(4, 1, 1, capacity=6, new_lengths=((2, 3), (1, 1), (1, 1))),
    ),
]
"""Tokens that arrive in steps."""

TRAINED = [
    Case(
        "trained-anarcii-self",
        _ANARCII,
        "trained encoder, padded",
        seq_len=122,
        key_padding_lengths=(109, 122),
        trained="anarcii-self",
    ),
    Case(
        "trained-anarcii-causal",
        _ANARCII,
        "trained decoder, logits in the thousands",
        seq_len=24,
        is_causal=True,
        trained="anarcii-causal",
    ),
    Case(
        "trained-anarcii-cross",
        _ANARCII,
        "trained decoder over encoder, logits up to 76174",
        seq_len=24,
        seq_len_k=122,
        key_padding_lengths=(109, 122),
        trained="anarcii-cross",
    ),
    Case(
        "trained-rxnmapper-self",
        AttentionSpec(256, 8),
        "trained ALBERT block",
        batch=1,
        seq_len=53,
        trained="rxnmapper-self",
    ),
    Case(
        "trained-smollm2-causal",
        _SMOLLM2,
        "trained LLaMA layer: GQA 9/3, RoPE",
        batch=1,
        seq_len=19,
        is_causal=True,
        trained="smollm2-causal",
    ),
    Case(
        "trained-smollm2-decode",
        _SMOLLM2,
        "trained LLaMA layer, a prompt in two parts, then token by token",
        batch=1,
        seq_len=19,
        chunks=(8, 7, 1, 1, 1, 1),
        capacity=24,
        trained="smollm2-causal",
    ),
]
"""Trained layers, with real inputs."""

MORE = frozenset(
    {
        "biases-of-some",
        "soft-cap-bias",
        "window-both-ways",
        "window-far",
        "chunk-both-ways",
        "norm-per-head",
        "value-head-dim-fused-qkv",
        "decode-value-head-dim",
        "temperature-rope",
        "decode-temperature",
        "norm-after-rope",
        "gate-per-head",
        "rope-linear",
        "rope-yarn-last",
        "rope-dynamic",
        "rope-proportional",
        "rope-partial",
        "rope-sections",
        "nan-hidden-norm",
        "decode-soft-cap",
        "decode-chunk",
        "decode-biases-of-some",
        "decode-clip-qkv",
        "decode-norm-width",
        "decode-l2-norm",
        "decode-dynamic",
        "decode-sections",
        "random-3",
        "random-4",
        "random-5",
        "decode-scale",
        "decode-gate",
        "decode-fused-qkv",
        "rope-longrope",
        "rope-partial-interleaved",
        "fused-qkv-gqa",
        "bias",
        "causal-tall",
        "no-bias",
        "one-key",
        "nan-hidden-cross",
        "random-1",
        "random-2",
        "latent-yarn",
        "latent-window",
        "decode-latent-yarn",
        "decode-latent-factors",
        "sinks-masked",
        "decode-sinks",
        "alibi-both-ways",
        "decode-alibi",
        "relative-bias-padded",
        "decode-relative-bias",
        "decode-grid-bias",
        "decode-norm-context",
    }
)
"""Variations of other cases, which run only if all cases, or they by name, are selected."""
