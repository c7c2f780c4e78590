"""Decoders with latents of keys and values (MLA)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mha_spec import InputError, Latent, YarnScaling
from parity.port.models.config import Config, Value
from parity.port.models.families.usual import SOME_BIAS, family, stack
from parity.port.models.rules import (
    NOTHING,
    ConfigLayer,
    Family,
    Rule,
    heads,
    key,
    rope,
    tempered_by_rope,
)


def _latent(place: ConfigLayer) -> Value:
    kv_rank, rope_dim = (place.config.read(name) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    q_rank = (
        place.config.asked("q_lora_rank") or NOTHING
    )  # without it there is one query projection
    origins = [each.origin for each in (kv_rank, rope_dim, q_rank) if each.value is not None]
    return Value(Latent(kv_rank.value, rope_dim.value, q_rank.value), ", ".join(origins))


def _scaled_latent(place: ConfigLayer) -> Value:
    """Return latents with the factors sqrt(d_model / rank)."""
    found, width = _latent(place), place.config.read("hidden_size").value
    if found.value.q_rank is None:
        raise InputError(
            "the configuration", "have q_lora_rank: there is no layer without it", q_lora_rank=None
        )
    q_factor, kv_factor = (
        math.sqrt(width / rank) for rank in (found.value.q_rank, found.value.kv_rank)
    )
    factors = replace(found.value, q_factor=q_factor, kv_factor=kv_factor)
    return Value(factors, f"{found.origin}, factors of hidden_size over both ranks")


def _sum(*names: str) -> Rule:
    return lambda place: Value(
        sum(place.config.read(name).value for name in names), " + ".join(names)
    )


def _pairs_of_latents(place: ConfigLayer) -> Value:
    paired = place.config.read("rope_interleave", default=True)
    found = rope(of="qk_rope_head_dim", pairs="interleaved" if paired.value else "half")(place)
    return Value(found.value, f"{found.origin}, {paired.origin}")


def _biases(place: ConfigLayer) -> Value:
    """Return the biases of projections to latents; q_proj has none."""
    found: Value = SOME_BIAS(place)
    at_once = place.config.asked("q_lora_rank") is None
    return found._replace(value=(False, True, True)) if at_once and found.value else found


def _scale(place: ConfigLayer) -> Value:
    """Return the scale, with the square of YaRN's factor if there is a mscale_all_dim, even if RoPE
    ignores it.

    RoPE reads it only together with mscale and without attention_factor; the scale then follows
    from RoPE.
    """
    own = [name for name in ("rope_parameters", "rope_scaling") if name in place.config]
    told = place.config.section(own[0]).find("mscale_all_dim") if own else None
    scaling = rope(of="qk_rope_head_dim", theta=1e4)(place).value.scaling
    if (
        not told
        or not told.value
        or not isinstance(scaling, YarnScaling)
        or scaling.mscale_all_dim is not None
    ):
        return NOTHING
    squared = replace(
        scaling, attention_factor=None, mscale=told.value, mscale_all_dim=told.value
    ).score_factor
    width = WIDTH(place)
    return Value(
        squared * width.value**-0.5, f"({width.origin}) ** -0.5, {told.origin} of RoPE's factor"
    )


def _width_of_values(place: ConfigLayer) -> Value:
    """Return the value width of MiniCPM3, whose released configurations omit it."""
    told, width = place.config.find("v_head_dim"), place.config.read("hidden_size")
    return told or Value(
        width.value // heads(place), "hidden_size // num_attention_heads: v_head_dim is not set"
    )


def _kind_of_kimi_linear(config: Config, index: int) -> str:
    """Return the kind of a layer from the numbers of both kinds, from 1; default: every fourth."""
    if "linear_attn_config" not in config:
        return "full_attention" if index and index % 4 == 0 else "linear_attention"
    full, linear = (
        config.section("linear_attn_config").find(f"{name}_layers") for name in ("full_attn", "kda")
    )
    if full is None or linear is None or (index + 1 in full.value) == (index + 1 in linear.value):
        got = {
            f"{name}_layers": each and each.value
            for name, each in (("full_attn", full), ("kda", linear))
        }
        raise InputError("linear_attn_config", "say one kind of each layer", got)
    return "full_attention" if index + 1 in full.value else "linear_attention"


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


PARTS_OF_LONGCAT = {
    part: {
        "path": f"layers.{{i}}.self_attn.{number}",
        "rope": rope(of="qk_rope_head_dim", pairs="interleaved"),
    }
    for number, part in enumerate(("first", "second"))
}
"""Each layer has two attention layers."""

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
        tuple(
            stack(
                *(LATENTS, more),
                part=part,
                layout="transformers.LongCat",
                count=("num_layers",),
                latent=_scaled_latent,
            )
            for part, more in PARTS_OF_LONGCAT.items()
        ),
        frozenset(OF_LATENTS),
        fixed={"attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    ),
    "mistral4": family(LATENTS, temperature=tempered_by_rope, says_nothing=OF_LATENTS),
}
