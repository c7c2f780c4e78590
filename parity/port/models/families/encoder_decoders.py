"""Encoder-decoders: layers of encoder and decoder, and cross-attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mha_spec import RelativeBias
from parity.port.models.config import Value
from parity.port.models.families.usual import PLAIN, SOME_BIAS, stack
from parity.port.models.rope import read_rope
from parity.port.models.rules import ConfigLayer, Family, FieldRule, Stack, key, of_kind, optional

SAYS_NOTHING = {
    "scale_embedding",
    "scale_decoder_outputs",
    "max_source_positions",
    "max_target_positions",
    "static_position_embeddings",
    "add_bias_logits",
    "n_positions",
}
"""Keys of these families that are irrelevant for attention layers."""


def family_of(*stacks: Stack, fixed: Mapping[str, Any] | None = None) -> Family:
    """Return a family of several stacks, all of which a configuration must have: it is not an
    encoder alone.
    """
    whole = {"is_encoder_decoder": True, "is_decoder": False, "add_cross_attention": False}
    return Family(stacks, frozenset(SAYS_NOTHING), fixed={**whole, **(fixed or {})})


# ---- BART ----------------------------------------------------------------------------------------


def _stacks_of_bart(
    dropout: float = 0.0, cross: str = "encoder_attn", **fields: Any
) -> tuple[Stack, Stack, Stack]:
    """Return the stacks of BART: encoder, decoder and cross-attention, as wide as the model."""

    def stack_of(name: str, **overrides: Any) -> Stack:
        own: dict[str, Any] = {
            "part": name,
            "count": (f"{name}_layers",),
            "path": f"{name}.layers.{{i}}.self_attn",
            "d_model": key("d_model"),
            "num_heads": key(f"{name}_attention_heads"),
            "dropout": key("attention_dropout", default=dropout),
        }
        return stack(PLAIN, own, fields, overrides)

    return (
        stack_of("encoder"),
        stack_of("decoder", is_causal=True),
        stack_of("decoder", kind=of_kind("cross_attention"), path=f"decoder.layers.{{i}}.{cross}"),
    )


# ---- T5 ------------------------------------------------------------------------------------------


def _relative_bias(bidirectional: bool) -> FieldRule:
    """Return the relative bias, used in all layers of a stack, even if only the first layer has its
    weights.
    """

    def rule(layer: ConfigLayer) -> Value:
        buckets = layer.config.read("relative_attention_num_buckets", default=32)
        farthest = layer.config.read("relative_attention_max_distance", default=128)
        bias = RelativeBias(buckets.value, farthest.value, bidirectional=bidirectional)
        return Value.derived(bias, buckets, farthest)

    return rule


def _of_first(part: str) -> dict[str, str]:
    """Return the weights that all layers of a stack share, with their path in its first layer."""
    name = "relative_attention_bias.weight"
    return {name: f"{part}.block.0.layer.0.SelfAttention.{name}"}


def _stacks_of_t5(
    count: tuple[str, ...] = ("num_decoder_layers", "num_layers"),
) -> tuple[Stack, Stack, Stack]:
    fields: dict[str, Any] = {
        "layout": "transformers.T5",
        "d_model": key("d_model", "hidden_size"),
        "num_heads": key("num_heads", "num_attention_heads"),
        "head_dim": key("d_kv"),
        "qkv_bias": False,
        "out_bias": False,
        "scale": 1.0,
        "dropout": key("dropout_rate", default=0.1),
    }
    of_decoder: dict[str, Any] = {"part": "decoder", "count": count}
    return (
        stack(
            PLAIN,
            fields,
            part="encoder",
            count=("num_layers",),
            path="encoder.block.{i}.layer.0.SelfAttention",
            shared=_of_first("encoder"),
            relative_bias=_relative_bias(bidirectional=True),
        ),
        stack(
            PLAIN,
            fields,
            of_decoder,
            path="decoder.block.{i}.layer.0.SelfAttention",
            shared=_of_first("decoder"),
            is_causal=True,
            relative_bias=_relative_bias(bidirectional=False),
        ),
        stack(
            PLAIN,
            fields,
            of_decoder,
            kind=of_kind("cross_attention"),
            path="decoder.block.{i}.layer.1.EncDecAttention",
            ignored=("relative_attention_bias.weight",),
        ),
    )


# ---- Moonshine -----------------------------------------------------------------------------------


def _stacks_of_moonshine() -> tuple[Stack, Stack, Stack]:
    """Return the stacks of Moonshine: encoder and decoder have RoPE, cross-attention has none."""

    def stack_of(name: str, **overrides: Any) -> Stack:
        own: dict[str, Any] = {
            "part": name,
            "count": (f"{name}_num_hidden_layers",),
            "path": f"{name}.layers.{{i}}.self_attn",
            "layout": "transformers.LLaMA",
            "d_model": key("hidden_size"),
            "num_heads": key(f"{name}_num_attention_heads"),
            "num_kv_heads": optional(f"{name}_num_key_value_heads"),
            "qkv_bias": SOME_BIAS,
            "out_bias": False,
            "dropout": key("attention_dropout", default=0.0),
            "rope": _rope_of_moonshine(name),
        }
        return stack(PLAIN, own, overrides)

    return (
        stack_of("encoder"),
        stack_of("decoder", is_causal=True),
        stack_of(
            "decoder",
            kind=of_kind("cross_attention"),
            path="decoder.layers.{i}.encoder_attn",
            rope=None,
        ),
    )


def _rope_of_moonshine(part: str) -> FieldRule:
    """Return interleaved RoPE in nine tenths of a head."""

    def rule(layer: ConfigLayer) -> Value:
        config = layer.config
        width = config.read("hidden_size").value
        size = width // config.read(f"{part}_num_attention_heads").value
        return read_rope(
            config, size, layer_type=layer.kind, theta=None, fraction=0.9, pairs="interleaved"
        )

    return rule


ENCODER_DECODERS: dict[str, Family] = {
    **dict.fromkeys(
        ("bart", "mbart", "pegasus", "marian", "blenderbot", "blenderbot-small"),
        family_of(*_stacks_of_bart()),
    ),
    **dict.fromkeys(("m2m_100", "plbart"), family_of(*_stacks_of_bart(0.1))),
    "nllb-moe": family_of(*_stacks_of_bart(0.1, cross="cross_attention")),
    "mvp": family_of(*_stacks_of_bart(), fixed={"use_prompt": False}),
    "speech_to_text": family_of(*_stacks_of_bart()),
    "whisper": family_of(*_stacks_of_bart(qkv_bias=(True, False, True))),
    "moonshine": replace(
        family_of(*_stacks_of_moonshine()), says_nothing=frozenset({"pad_head_dim_to_multiple_of"})
    ),
    **dict.fromkeys(("t5", "mt5"), family_of(*_stacks_of_t5())),
    # Each layer of UMT5 has its own bias.
    "umt5": family_of(*(replace(stack_of_t5, shared={}) for stack_of_t5 in _stacks_of_t5())),
    "switch_transformers": family_of(*_stacks_of_t5(("num_decoder_layers",))),
}
