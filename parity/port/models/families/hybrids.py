"""Hybrid decoders, in which some layers are not attention over keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mha_spec import Gate, InputError
from mha_spec.rules import as_count
from parity.port.models.config import Config, Value
from parity.port.models.families.usual import BIASES, HEADS, SOME_BIAS, WIDTH, family
from parity.port.models.rules import (
    NOTHING,
    ConfigLayer,
    Family,
    entry_of,
    head_dim,
    is_last,
    key,
    norm,
    positioned,
    require_layer_types,
    required_or_none,
    rope,
)

FULL, LINEAR = "full_attention", "linear_attention"


def _kind_of_qwen3_next(config: Config, index: int) -> str:
    if is_last(index, config.find("full_attention_interval"), 4):
        return FULL
    return LINEAR


def _gate_with_bias(layer: ConfigLayer) -> Value:
    """Return a gate that is packed with the queries, and has a bias if they have one."""
    bias = SOME_BIAS(layer)
    return Value(Gate(bias=bias.value), f"every layer of this family; {bias.origin}")


def _kind_of_lfm2(config: Config, index: int) -> str:
    """Return the kind of a layer from the numbers of attention layers; default: all."""
    numbers = config.find("full_attn_idxs")
    if numbers is None or index in numbers.value:
        return FULL
    return "conv"


def _rope_of_lfm2(layer: ConfigLayer) -> Value:
    """Return the RoPE of LFM2: released models contain the base twice."""
    rotation = rope()(layer)
    again = layer.config.find("theta")
    if again is not None and again.value != rotation.value.theta:
        both = f"theta={again.value} and {rotation.origin} {rotation.value.theta}"
        raise InputError("theta", "be rope_theta", both)
    return rotation


def _kind_of_minimax(config: Config, index: int) -> str:
    """Return the kind of a layer: attention in the first of each pair."""
    if index % 2 == 0:
        return FULL
    return LINEAR


def _kind_of_jamba(config: Config, index: int) -> str:
    """Return the kind of a layer: attention at one position of each period."""
    period = config.read("attn_layer_period", default=8)
    offset = config.read("attn_layer_offset", default=4)
    if index % as_count(period.origin, period.value) == offset.value:
        return FULL
    return "mamba"


def _kind_of_bamba(config: Config, index: int) -> str:
    """Return the kind of a layer from the numbers of attention layers; default: none."""
    numbers = config.find("attn_layer_indices")
    if numbers is not None and index in numbers.value:
        return FULL
    return "mamba"


def _kind_of_nemotron_h(config: Config, index: int) -> str:
    """Return the kind of a layer from a word or letter for each."""
    words = config.find("layers_block_type")
    letters = config.find("hybrid_override_pattern")
    kinds = words or letters or config.read("layers_block_type")
    kind: str = entry_of(kinds, index, "have a word for each layer")
    return KINDS_OF_NEMOTRON_H.get(kind, kind)


KINDS_OF_NEMOTRON_H = {"M": "mamba", "E": "moe", "-": "mlp", "*": FULL, "attention": FULL}


def _kind_of_recurrent_gemma(config: Config, index: int) -> str:
    """Return the kind of a layer from a repeated pattern."""
    pattern = config.read("block_types", default=("recurrent", "recurrent", "attention")).value
    kind = pattern[index % as_count("block_types", len(pattern))]
    if kind == "attention":
        return "sliding_attention"
    return "recurrent"


def _multiplied_scale(layer: ConfigLayer) -> Value:
    """Return the scale, including the factor of keys before RoPE."""
    factor = layer.config.read("key_multiplier", default=1.0)
    if factor.value == 1:
        return NOTHING
    return Value(factor.value * head_dim(layer) ** -0.5, f"{factor.origin} / sqrt(H)")


def _mamba(*bases: Mapping[str, Any], **fields: Any) -> Family:
    """Return a family with state-space layers, whose keys are irrelevant for attention."""
    return family(*bases, says_nothing=OF_MAMBA, **fields)


OF_MAMBA = {
    "mamba_conv_bias",
    "mamba_proj_bias",
    "mamba_n_heads",
    "mamba_d_head",
    "mamba_num_heads",
    "mamba_head_dim",
    "mamba_chunk_size",
    "chunk_size",
    "use_conv_bias",
    "use_bias",
    "projectors_bias",
    "attention_in_multiplier",
    "attention_out_multiplier",
}

OF_QWEN3_NEXT: dict[str, Any] = {
    **HEADS,
    **WIDTH,
    **BIASES,
    "layout": "transformers.Qwen3-Next",
    "qk_norm": norm(weight="1+w"),
    "gate": _gate_with_bias,
    "kind": _kind_of_qwen3_next,
}

ALWAYS_GATED = {"attn_output_gate": True}
"""A key of released configurations. The modules of transformers do not read it, and always have a
gate.
"""

HYBRIDS: dict[str, Family] = {
    "qwen3_next": family(OF_QWEN3_NEXT, rope=rope(fraction=0.25), fixed=ALWAYS_GATED),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"),
        family(
            OF_QWEN3_NEXT,
            rope=rope(fraction=0.25, sections=(11, 11, 10), section_order="interleaved"),
            fixed=ALWAYS_GATED,
        ),
    ),
    "minimax": family(
        HEADS,
        kind=_kind_of_minimax,
        says_nothing={"full_attn_alpha_factor", "full_attn_beta_factor"},
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"),
        family(
            HEADS,
            layout="transformers.LFM2",
            qk_norm=norm(eps="norm_eps"),
            kind=_kind_of_lfm2,
            num_heads=key("num_attention_heads", "num_heads"),
            rope=_rope_of_lfm2,
            fixed={"use_pos_enc": True},
            says_nothing={
                "conv_bias",
                "use_expert_bias",
                "block_mlp_init_scale",
                "block_out_init_scale",
            },
        ),
    ),
    "jamba": _mamba(HEADS, kind=_kind_of_jamba, rope=None),
    "bamba": _mamba(
        HEADS, BIASES, kind=_kind_of_bamba, rope=rope(fraction=0.5, count="attn_rotary_emb")
    ),
    "granitemoehybrid": _mamba(
        BIASES,
        kind=require_layer_types,
        scale=key("attention_multiplier"),
        rope=positioned("rope", rope(), without=("nope",)),
    ),
    "nemotron_h": _mamba(
        HEADS,
        kind=_kind_of_nemotron_h,
        head_dim=required_or_none("head_dim", "attention_head_dim"),
        path="layers.{i}.mixer",
        count=("layers_block_type", "num_hidden_layers"),
        rope=None,
        fixed={"attention_bias": False},  # transformers never reads it
    ),
    "falcon_h1": _mamba(HEADS, BIASES, scale=_multiplied_scale),
    "recurrent_gemma": family(
        path="layers.{i}.temporal_block",
        qkv_bias=SOME_BIAS,
        out_bias=True,
        rope=rope(fraction=0.5),
        window_size=key("attention_window_size"),
        kind=_kind_of_recurrent_gemma,
        says_nothing={"w_init_variance_scale"},
    ),
    "olmo_hybrid": family(BIASES, qk_norm=norm(over="width"), kind=require_layer_types),
}
