"""Decoders whose keys and values are made of latents (MLA)."""

from __future__ import annotations

from typing import Any

from mha_spec import Latent
from parity.models.config import Value
from parity.models.families.usual import SOME_BIAS, family
from parity.models.rules import NOTHING, Family, Place, Rule, key, rope, tempered_by_rope


def _latent(place: Place) -> Value:
    kv_rank, rope_dim = (place.config.read(name) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    q_rank = place.config.asked("q_lora_rank") or NOTHING  # without one queries are projected at once
    origins = [each.origin for each in (kv_rank, rope_dim, q_rank) if each.value is not None]
    return Value(Latent(kv_rank.value, rope_dim.value, q_rank.value), ", ".join(origins))


def _sum(*names: str) -> Rule:
    return lambda place: Value(sum(place.config.read(name).value for name in names), " + ".join(names))


def _pairs_of_latents(place: Place) -> Value:
    paired = place.config.read("rope_interleave", default=True)
    found = rope(of="qk_rope_head_dim", pairs="interleaved" if paired.value else "half")(place)
    return Value(found.value, f"{found.origin}, {paired.origin}")


LATENTS: dict[str, Any] = {
    "layout": "transformers.DeepSeek",
    "num_kv_heads": None,
    "head_dim": _sum("qk_nope_head_dim", "qk_rope_head_dim"),
    "value_head_dim": key("v_head_dim"),
    "latent": _latent,
    "rope": _pairs_of_latents,
    "qkv_bias": SOME_BIAS,
    "out_bias": SOME_BIAS,
}
OF_LATENTS = {"head_dim", "qk_head_dim", "num_key_value_heads"}
"""Keys that configurations of latents have and their layers do not read."""


WITH_LATENTS: dict[str, Family] = {
    "deepseek_v2": family(LATENTS, rope=rope(of="qk_rope_head_dim", pairs="interleaved"), says_nothing=OF_LATENTS),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "youtu"), family(LATENTS, says_nothing=OF_LATENTS)),
    "minicpm3": family(LATENTS, rope=rope(of="qk_rope_head_dim"), says_nothing=OF_LATENTS),
    "mistral4": family(LATENTS, temperature=tempered_by_rope, says_nothing=OF_LATENTS),
}
