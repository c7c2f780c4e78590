"""Decoders with latents of keys and values (MLA)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mha_spec import InputError, Latent, YarnScaling
from parity.port.models.config import Config, Value
from parity.port.models.families.usual import SOME_BIAS, family, stack
from parity.port.models.rope import rope_section
from parity.port.models.rules import (
    NOTHING,
    ConfigLayer,
    Family,
    FieldRule,
    Stack,
    heads,
    key,
    rope,
    tempered_by_rope,
)


def _latent(layer: ConfigLayer) -> Value:
    """Return the ranks of the latents; queries need not have any."""
    kv_rank = layer.config.read("kv_lora_rank")
    rope_dim = layer.config.read("qk_rope_head_dim")
    q_rank = layer.config.required_or_none("q_lora_rank")
    if q_rank is None:
        # Queries have one projection, without latents.
        return Value.derived(Latent(kv_rank.value, rope_dim.value, None), kv_rank, rope_dim)
    latent = Latent(kv_rank.value, rope_dim.value, q_rank.value)
    return Value.derived(latent, kv_rank, rope_dim, q_rank)


def _scaled_latent(layer: ConfigLayer) -> Value:
    """Return latents with the factors sqrt(d_model / rank)."""
    latent, origin = _latent(layer)
    width = layer.config.read("hidden_size").value
    if latent.q_rank is None:
        raise InputError(
            "the configuration", "have q_lora_rank: there is no layer without it", q_lora_rank=None
        )
    scaled = replace(
        latent,
        q_factor=math.sqrt(width / latent.q_rank),
        kv_factor=math.sqrt(width / latent.kv_rank),
    )
    return Value(scaled, f"{origin}, factors of hidden_size over both ranks")


def _sum(*names: str) -> FieldRule:
    """Return a rule for the sum of keys."""

    def rule(layer: ConfigLayer) -> Value:
        total = sum(layer.config.read(name).value for name in names)
        return Value(total, " + ".join(names))

    return rule


def _pairs_of_latents(layer: ConfigLayer) -> Value:
    """Return the RoPE of the rotated features, whose pairs a key selects."""
    is_interleaved = layer.config.read("rope_interleave", default=True)
    pairs = "interleaved" if is_interleaved.value else "half"
    rotation = rope(of="qk_rope_head_dim", pairs=pairs)(layer)
    return Value.derived(rotation.value, rotation, is_interleaved)


def _biases(layer: ConfigLayer) -> Value:
    """Return the biases of projections to latents; q_proj has none."""
    bias: Value = SOME_BIAS(layer)
    has_latent_queries = layer.config.required_or_none("q_lora_rank") is not None
    if has_latent_queries or not bias.value:
        return bias
    return bias._replace(value=(False, True, True))


def _scale(layer: ConfigLayer) -> Value:
    """Return the scale, with the square of YaRN's factor if there is a mscale_all_dim, even if RoPE
    ignores it.

    RoPE reads it only together with mscale and without attention_factor; the scale then follows
    from RoPE.
    """
    parameters = rope_section(layer.config)
    mscale = None if parameters is None else parameters.find("mscale_all_dim")
    # The base is of no importance here, but a configuration need not have one.
    scaling = rope(of="qk_rope_head_dim", theta=1e4)(layer).value.scaling
    if mscale is None or not mscale.value:
        return NOTHING
    if not isinstance(scaling, YarnScaling) or scaling.mscale_all_dim is not None:
        return NOTHING
    applied = replace(
        scaling, attention_factor=None, mscale=mscale.value, mscale_all_dim=mscale.value
    )
    width = WIDTH(layer)
    scale = applied.score_factor * width.value**-0.5
    return Value(scale, f"({width.origin}) ** -0.5, {mscale.origin} of RoPE's factor")


def _width_of_values(layer: ConfigLayer) -> Value:
    """Return the value width of MiniCPM3, whose released configurations omit it."""
    configured = layer.config.find("v_head_dim")
    width = layer.config.read("hidden_size").value
    if configured is not None:
        return configured
    origin = "hidden_size // num_attention_heads: v_head_dim is not set"
    return Value(width // heads(layer), origin)


def _kind_of_kimi_linear(config: Config, index: int) -> str:
    """Return the kind of a layer from the numbers of both kinds, from 1; default: every fourth."""
    if "linear_attn_config" not in config:
        # The default of transformers counts from 0, so that these are the fifth, the ninth, …
        if index and index % 4 == 0:
            return "full_attention"
        return "linear_attention"
    section = config.section("linear_attn_config")
    full = section.find("full_attn_layers")
    linear = section.find("kda_layers")
    is_full = full is not None and index + 1 in full.value
    is_linear = linear is not None and index + 1 in linear.value
    if full is None or linear is None or is_full == is_linear:
        numbers = {
            "full_attn_layers": None if full is None else full.value,
            "kda_layers": None if linear is None else linear.value,
        }
        raise InputError("linear_attn_config", "say one kind of each layer", numbers)
    if is_full:
        return "full_attention"
    return "linear_attention"


WIDTH = _sum("qk_nope_head_dim", "qk_rope_head_dim")

LATENTS: dict[str, Any] = {
    "layout": "transformers.DeepSeek",
    "num_kv_heads": None,
    "head_dim": WIDTH,
    "value_head_dim": key("v_head_dim"),
    "latent": _latent,
    "rope": _pairs_of_latents,
    "scale": _scale,
    "qkv_bias": _biases,
    "out_bias": SOME_BIAS,
}
OF_LATENTS = {"head_dim", "qk_head_dim", "num_key_value_heads"}
"""Keys of configurations with latents that layers do not read."""


def _half_of_longcat(part: str, number: int) -> Stack:
    """Return one of the two attention layers that each layer has."""
    return stack(
        LATENTS,
        part=part,
        path=f"layers.{{i}}.self_attn.{number}",
        layout="transformers.LongCat",
        count=("num_layers",),
        rope=rope(of="qk_rope_head_dim", pairs="interleaved"),
        latent=_scaled_latent,
    )


WITH_LATENTS: dict[str, Family] = {
    "deepseek_v2": family(
        LATENTS, rope=rope(of="qk_rope_head_dim", pairs="interleaved"), says_nothing=OF_LATENTS
    ),
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe_lite", "youtu", "axk1"), family(LATENTS, says_nothing=OF_LATENTS)
    ),
    "minicpm3": family(
        LATENTS,
        rope=rope(of="qk_rope_head_dim", theta=1e4),
        value_head_dim=_width_of_values,
        says_nothing=OF_LATENTS,
    ),
    "kimi_linear": family(
        LATENTS,
        rope=None,
        scale=None,
        kind=_kind_of_kimi_linear,
        fixed={"mla_use_nope": True},
        says_nothing=OF_LATENTS | {"short_conv_kernel_size", "num_heads", "rope_theta"},
    ),
    "longcat_flash": Family(
        (_half_of_longcat("first", 0), _half_of_longcat("second", 1)),
        frozenset(OF_LATENTS),
        fixed={"attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    ),
    "mistral4": family(LATENTS, temperature=tempered_by_rope, says_nothing=OF_LATENTS),
}
