"""Decoders with names or packed weights of their own: GPT-2 and what followed it."""

from __future__ import annotations

from mha_spec import Alibi
from parity.models.config import Value
from parity.models.families.usual import IN_PART, MOST_BIAS, family
from parity.models.rules import NOTHING, Family, Place, key, norm, rope, where


def _scale_of_gpt2(place: Place) -> Value:
    """1 / sqrt(H), divided by the number of the layer or not, or nothing."""
    config, factor = place.config, 1.0
    by_root, by_layer = (
        config.read(name, default=default)
        for name, default in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False))
    )
    if by_root.value and not by_layer.value:
        return NOTHING
    if by_root.value:
        factor = (config.read("n_embd").value / config.read("n_head").value) ** -0.5
    return Value(factor / (place.layer + 1 if by_layer.value else 1), f"{by_root.origin}, {by_layer.origin}")


GPT_LIKE: dict[str, Family] = {
    "gpt_neox": family(
        path="layers.{i}.attention",
        layout="transformers.GPT-NeoX",
        rope=rope(fraction=0.25),
        qkv_bias=MOST_BIAS,
        out_bias=MOST_BIAS,
    ),
    "phi": family(
        IN_PART,
        layout="transformers.Phi",
        qkv_bias=True,
        out_bias=True,
        qk_norm=where("qk_layernorm", norm("layer", bias=True, eps="layer_norm_eps"), default=False),
    ),
    "persimmon": family(
        IN_PART,
        layout="transformers.GPT-NeoX",
        num_kv_heads=None,
        qkv_bias=True,
        out_bias=True,
        qk_norm=where("qk_layernorm", norm("layer", bias=True, eps="layer_norm_eps")),
    ),
    "gpt2": family(
        path="h.{i}.attn",
        layout="transformers.GPT2",
        d_model=key("n_embd"),
        num_heads=key("n_head"),
        num_kv_heads=None,
        head_dim=None,
        qkv_bias=True,
        out_bias=True,
        rope=None,
        scale=_scale_of_gpt2,
        dropout=key("attn_pdrop", default=0.1),
        output_dropout=key("resid_pdrop", default=0.1),
        says_nothing={"reorder_and_upcast_attn", "n_positions"},
    ),
    "bloom": family(
        path="h.{i}.self_attention",
        layout="transformers.GPT-NeoX",
        d_model=key("hidden_size", "n_embed"),
        num_heads=key("n_head", "num_attention_heads"),
        num_kv_heads=None,
        head_dim=None,
        qkv_bias=True,
        out_bias=True,
        rope=None,
        alibi=Alibi(),
        says_nothing={
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "offset_alibi",
            "skip_bias_add",
            "skip_bias_add_qkv",
        },
    ),
}
