"""The cases of trained layers."""

from __future__ import annotations

from mha_spec import AttentionSpec, Rope
from parity.core.case import Case

_ANARCII = AttentionSpec(128, 4)
_SMOLLM2 = AttentionSpec(576, 9, num_kv_heads=3, qkv_bias=False, out_bias=False, rope=Rope(100000.0))

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
        "the same layer, prompt in two pieces, then token by token",
        batch=1,
        seq_len=19,
        chunks=(8, 7, 1, 1, 1, 1),
        capacity=24,
        trained="smollm2-causal",
    ),
]
"""Layers that were trained, with inputs that they met."""
