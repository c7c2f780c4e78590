"""The layers of the ports, by name: small ones and a few wide ones; a seed draws the arrays."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from mha_spec import Alibi, AttentionSpec, Gate, Latent, LinearScaling, Llama3Scaling, Norm, Rope, YarnScaling
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem, make_problem
from parity.measure.core.quantization import CacheQuantization

LLAMA = AttentionSpec(32, 4, num_kv_heads=2, qkv_bias=False, out_bias=False, rope=Rope())
META = replace(LLAMA, rope=Rope(pairs="interleaved"))
GEMMA = replace(LLAMA, qk_norm=Norm(weight="1+w"), scale=0.25, soft_cap=5.0)
GPT_OSS = replace(LLAMA, window_size=3, sinks=True)
MPT = AttentionSpec(48, 6, qkv_bias=False, out_bias=False, alibi=Alibi())
TRAIN = AttentionSpec(32, 8, num_kv_heads=2, head_dim=8, rope=Rope(), qk_norm=Norm(), gate=Gate())
MLA = AttentionSpec(
    32,
    4,
    head_dim=16,
    value_head_dim=12,
    latent=Latent(20, 8, q_rank=24),
    qkv_bias=False,
    out_bias=False,
    rope=Rope(
        rotary_dim=8, rotated="last", pairs="interleaved", scaling=YarnScaling(40.0, 64, mscale=1.0, mscale_all_dim=1.0)
    ),
)
MLA_OTHER = replace(MLA, rope=replace(MLA.rope, scaling=YarnScaling(40.0, 64, mscale=1.0, mscale_all_dim=0.5)))
CAUSAL = {"is_causal": True}
SERVED = {"batch": 3, "seq_len": 10, "chunks": (6, 1, 1, 1, 1), "capacity": 12,
          "new_lengths": ((4, 6, 2), *((1, 1, 1),) * 4)}  # fmt: skip
CHUNKED = {"seq_len": 14, "chunks": (5, 5, 1, 3), "capacity": 14}
LEFT_PADDING = np.array([2, 0, 4])
LEFT = {"batch": 3, "seq_len": 10, "chunks": (6, 1, 1, 1, 1), "capacity": 10,
        "mask": np.broadcast_to((np.arange(10) < LEFT_PADDING[:, None])[:, None, None], (3, 1, 10, 10)).copy(),
        "position_ids": np.maximum(np.arange(10) - LEFT_PADDING[:, None], 0)}  # fmt: skip
PACKED = {"seq_len": 11, "segment_ids": ((0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1), (0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2)),
          **CAUSAL}  # fmt: skip
SHORT = {"seq_len": 9, "chunks": (5, 1, 1, 2), "capacity": 9}
STEPS = {"seq_len": 7, "chunks": (4, 1, 1, 1), "capacity": 10}

LAYERS = {
    "gpt": (AttentionSpec(32, 4), {"seq_len": 7, **CAUSAL}),
    "mla": (MLA, {"seq_len": 9, **CAUSAL}),
    "mla-other": (MLA_OTHER, {"seq_len": 9, **CAUSAL}),
    "gpt-square": (AttentionSpec(16, 4), {"batch": 4, "seq_len": 4, **CAUSAL}),
    "gpt-one": (AttentionSpec(32, 4), {"batch": 1, "seq_len": 9, **CAUSAL}),
    "gpt-token": (AttentionSpec(32, 4), {"seq_len": 1, **CAUSAL}),
    "gpt-h1": (AttentionSpec(8, 8), {"seq_len": 6, **CAUSAL}),
    "gpt-no-bias": (AttentionSpec(24, 3, qkv_bias=False, out_bias=False), {"seq_len": 5, **CAUSAL}),
    "gpt-loud": (AttentionSpec(32, 4), {"seq_len": 7, "gain": 12.0, **CAUSAL}),
    "gpt-wide": (AttentionSpec(256, 8), {"seq_len": 12, **CAUSAL}),
    "bert": (AttentionSpec(24, 3), {"seq_len": 6, "key_padding_lengths": (6, 4)}),
    "bert-three": (AttentionSpec(24, 3), {"batch": 3, "seq_len": 8, "key_padding_lengths": (5, 8, 2)}),
    "bert-full": (AttentionSpec(32, 4), {"seq_len": 5}),
    "bert-square": (AttentionSpec(16, 4), {"batch": 4, "seq_len": 4, "key_padding_lengths": (4, 3, 2, 1)}),
    "bert-one": (AttentionSpec(24, 3), {"batch": 1, "seq_len": 10}),
    "bert-wide": (AttentionSpec(256, 8), {"seq_len": 12, "key_padding_lengths": (12, 7)}),
    "bert-biased": (AttentionSpec(24, 3), {"seq_len": 6, "bias": True, "key_padding_lengths": (6, 4)}),
    "cross": (AttentionSpec(24, 3), {"seq_len": 5, "seq_len_k": 8, "key_padding_lengths": (8, 5)}),
    "cross-narrow": (AttentionSpec(24, 3, d_kv=16), {"seq_len": 5, "seq_len_k": 7}),
    "cross-square": (AttentionSpec(24, 3), {"seq_len": 6, "seq_len_k": 6}),
    "causal-padded": (AttentionSpec(24, 3), {"seq_len": 6, "key_padding_lengths": (6, 4), **CAUSAL}),
    "causal-cross": (AttentionSpec(24, 3), {"seq_len": 6, "seq_len_k": 6, "key_padding_lengths": (6, 3), **CAUSAL}),
    "empty-rows": (AttentionSpec(24, 3), {"batch": 3, "seq_len": 5, "key_padding_lengths": (5, 0, 3)}),
    "random-mask": (AttentionSpec(24, 3), {"seq_len": 7, "random_mask": True}),
    "gqa": (AttentionSpec(32, 4, num_kv_heads=2), {"seq_len": 6, **CAUSAL}),
    "gqa-cross": (AttentionSpec(32, 4, num_kv_heads=2), {"seq_len": 5, "seq_len_k": 7}),
    "llama": (LLAMA, {"seq_len": 9, **CAUSAL}),
    "llama-six": (AttentionSpec(48, 6, num_kv_heads=2, qkv_bias=False, out_bias=False, rope=Rope()),
                  {"seq_len": 6, **CAUSAL}),
    "llama-mha": (replace(LLAMA, num_kv_heads=4), {"seq_len": 8, **CAUSAL}),
    "llama-mqa": (replace(LLAMA, num_kv_heads=1), {"seq_len": 8, **CAUSAL}),
    "llama-square": (AttentionSpec(32, 8, head_dim=8, qkv_bias=False, out_bias=False, rope=Rope()),
                     {"seq_len": 8, **CAUSAL}),
    "llama-one": (LLAMA, {"batch": 1, "seq_len": 1, **CAUSAL}),
    "llama-500k": (replace(LLAMA, rope=Rope(500000.0)), {"seq_len": 9, **CAUSAL}),
    "llama-far": (LLAMA, {"seq_len": 6, "first_position": 2000, **CAUSAL}),
    "llama-offset": (LLAMA, {"seq_len": 6, "first_position": 7, **CAUSAL}),
    "llama-linear": (replace(LLAMA, rope=Rope(scaling=LinearScaling(4.0))), {"seq_len": 9, **CAUSAL}),
    "llama31": (replace(LLAMA, rope=Rope(500000.0, scaling=Llama3Scaling(8.0, 256))), {"seq_len": 9, **CAUSAL}),
    "llama-wide": (AttentionSpec(256, 8, num_kv_heads=2, qkv_bias=False, out_bias=False, rope=Rope()),
                   {"seq_len": 12, **CAUSAL}),
    "neox": (AttentionSpec(32, 4, rope=Rope(rotary_dim=4)), {"seq_len": 9, **CAUSAL}),
    "qwen2": (replace(LLAMA, qkv_bias=True), {"seq_len": 7, **CAUSAL}),
    "qwen3": (replace(LLAMA, head_dim=12, value_head_dim=12, qk_norm=Norm()), {"seq_len": 7, **CAUSAL}),
    "llama-steps": (LLAMA, STEPS),
    "llama-exact-steps": (LLAMA, {**STEPS, "capacity": 7}),
    "qwen2-steps": (replace(LLAMA, qkv_bias=True), {**STEPS, "seq_len": 6, "chunks": (3, 2, 1)}),
    "meta": (META, {"seq_len": 9, **CAUSAL}),
    "meta-mqa": (replace(META, num_kv_heads=1), {"seq_len": 6, **CAUSAL}),
    "meta-mha": (replace(META, num_kv_heads=4), {"seq_len": 8, **CAUSAL}),
    "meta-500k": (replace(META, rope=Rope(500000.0, pairs="interleaved")), {"seq_len": 9, **CAUSAL}),
    "meta-steps": (META, STEPS),
    "meta-two": (META, {**STEPS, "seq_len": 6, "chunks": (3, 3)}),
    "meta-token": (META, {"seq_len": 1, **CAUSAL}),
    "decode": (LLAMA, STEPS),
    "decode-ragged": (LLAMA, {"seq_len": 6, "chunks": (4, 1, 1), "new_lengths": ((4, 2), (1, 1), (1, 1)),
                              "capacity": 10}),
    "decode-gpt": (AttentionSpec(32, 4), STEPS),
    "decode-one": (LLAMA, {**STEPS, "batch": 1}),
    "decode-mqa": (replace(LLAMA, num_kv_heads=1, qkv_bias=True), {**STEPS, "seq_len": 5, "chunks": (2, 2, 1)}),
    "serve": (LLAMA, SERVED),
    "serve-window": (replace(LLAMA, window_size=4), SERVED),
    "serve-loud": (LLAMA, {**SERVED, "gain": 8000.0}),
    "serve-chunks": (LLAMA, CHUNKED),
    "serve-chunks-window": (replace(LLAMA, window_size=6), CHUNKED),
    "left": (LLAMA, LEFT),
    "packed": (LLAMA, PACKED),
    "packed-mha": (replace(LLAMA, num_kv_heads=4, qkv_bias=True), PACKED),
    "ring": (replace(LLAMA, window_size=4),
             {"seq_len": 16, "chunks": (3, 1, 1, 1, 1, 3, 1, 1, 1, 3), "capacity": 16}),
    "ring-six": (replace(LLAMA, window_size=6),
                 {"seq_len": 14, "chunks": (4, 1, 1, 1, 1, 1, 3, 2), "capacity": 14}),
    "cache-fp8": (LLAMA, {**SHORT, "cache_quantization": CacheQuantization(
        "float8_e4m3fn", key_scales=[0.02], value_scales=[0.008])}),
    "cache-fp8-heads": (LLAMA, {**SHORT, "cache_quantization": CacheQuantization(
        "float8_e4m3fn", "head", key_scales=[0.02, 0.013], value_scales=[0.008, 0.017])}),
    "cache-int8-token": (LLAMA, {**SHORT, "cache_quantization": CacheQuantization("int8", "token_head")}),
    "cache-int8-head": (LLAMA, {**SHORT, "cache_quantization": CacheQuantization("int8", "head")}),
    "cache-before-rope": (LLAMA, {**SHORT, "cache_quantization": CacheQuantization(
        "int8", "channel", before_rope=True)}),
    "cache-int8-zero": (LLAMA, {**SHORT, "cache_quantization": CacheQuantization(
        "int8", "token_head", zero_point="integer")}),
    "cache-kivi": (LLAMA, {**SHORT, "cache_quantization": CacheQuantization(
        "int4", "channel", value_scale_per="token", zero_point="minimum")}),
    "gemma": (GEMMA, {"seq_len": 8, **CAUSAL}),
    "gemma-window": (replace(GEMMA, window_size=3), {"seq_len": 9, **CAUSAL}),
    "gemma-loud": (replace(GEMMA, qk_norm=None), {"seq_len": 8, "gain": 6.0, **CAUSAL}),
    "gemma-plain": (replace(GEMMA, soft_cap=None), {"seq_len": 6, **CAUSAL}),
    "mistral": (replace(LLAMA, window_size=4), {"seq_len": 10, **CAUSAL}),
    "gpt-oss": (GPT_OSS, {"seq_len": 9, **CAUSAL}),
    "gpt-oss-full": (replace(GPT_OSS, window_size=None, qkv_bias=True, out_bias=True),
                     {"seq_len": 7, **CAUSAL}),
    "capped": (replace(LLAMA, soft_cap=2.0), {"seq_len": 8, "gain": 4.0, **CAUSAL}),
    "train": (TRAIN, {"seq_len": 8, "key_padding_lengths": (8, 6), **CAUSAL}),
    "train-biased": (replace(TRAIN, qk_norm=None, num_kv_heads=8), {"seq_len": 6, "bias": True}),
    "train-gqa": (AttentionSpec(32, 8, num_kv_heads=2), {"seq_len": 8, "key_padding_lengths": (8, 5), **CAUSAL}),
    "train-gqa-causal": (AttentionSpec(32, 8, num_kv_heads=2), {"seq_len": 7, **CAUSAL}),
    "train-full": (AttentionSpec(48, 4), {"seq_len": 8}),
    "train-ring": (AttentionSpec(32, 4, num_kv_heads=2), {"seq_len": 16}),
    "mpt": (MPT, {"seq_len": 8, **CAUSAL}),
    "mpt-four": (replace(MPT, d_model=32, num_heads=4, num_kv_heads=4), {"seq_len": 7, **CAUSAL}),
    "mpt-clipped": (replace(MPT, clip_qkv=0.75), {"seq_len": 8, **CAUSAL}),
    "mpt-normed": (replace(MPT, qk_norm=Norm("layer", over="width", eps=1e-5), qkv_bias=True),
                   {"seq_len": 8, **CAUSAL}),
}  # fmt: skip


def case_of(name: str, seed: int = 0) -> Case:
    """The case of a layer, with arrays of its own for each seed."""
    spec, applied = LAYERS[name]
    return Case(f"wild-{name}-{seed}", spec, "a port as people write it", **applied)


@cache
def problem_of(name: str, seed: int = 0, dtype: str = "float32") -> Problem:
    """The case, with its arrays in a dtype."""
    return make_problem(case_of(name, seed), dtype)
