"""Decoders with their own names or packed weights: GPT-2 and its successors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mha_spec import Alibi, InputError, Rope
from parity.port.models.config import Config, Value
from parity.port.models.families.usual import IN_PART, MOST_BIAS, PLAIN, family
from parity.port.models.rope import read_rope
from parity.port.models.rules import (
    NOTHING,
    ConfigLayer,
    Family,
    FieldRule,
    entry_of,
    key,
    norm,
    only,
    optional,
    read_if_possible,
    rope,
    where,
)


def _scale_of_gpt2(layer: ConfigLayer) -> Value:
    """Return 1 / sqrt(H), optionally divided by the layer number, or 1."""
    by_root = layer.config.read("scale_attn_weights", default=True)
    by_layer = layer.config.read("scale_attn_by_inverse_layer_idx", default=False)
    if by_root.value and not by_layer.value:
        return NOTHING
    scale = 1.0
    if by_root.value:
        scale = (layer.config.read("n_embd").value / layer.config.read("n_head").value) ** -0.5
    if by_layer.value:
        scale /= layer.index + 1
    return Value.derived(scale, by_root, by_layer)


def _scale_of_bigcode(layer: ConfigLayer) -> Value:
    """Return 1 / sqrt(H), or 1."""
    by_root = layer.config.read("scale_attn_weights", default=True)
    if by_root.value:
        return NOTHING
    return Value(1.0, by_root.origin)


def _one_head(layer: ConfigLayer) -> Value:
    """Return one key/value head in models with multi-query attention."""
    is_multi_query = layer.config.read("multi_query", default=True)
    if not is_multi_query.value:
        return NOTHING
    return Value(1, is_multi_query.origin)


def _heads_of_falcon(layer: ConfigLayer) -> Value:
    """Return the key/value heads: groups in the newer architecture; otherwise one for all, or one
    for each.
    """
    is_newer = layer.config.read("new_decoder_architecture", default=False)
    groups = layer.config.find("num_kv_heads")
    of_older = _one_head(layer)  # its key counts as read
    if not is_newer.value:
        return of_older
    if groups is None:
        return NOTHING
    return Value.derived(groups.value, is_newer, groups)


def _scaled_alibi(layer: ConfigLayer) -> Value:
    return Value(Alibi(scaled=True), "every layer of this family")


def _with_alibi(rule: FieldRule, *, when: bool = True) -> FieldRule:
    """Return a rule for models with ALiBi, or those with RoPE; its keys also count as read in the
    others.
    """

    def if_alibi_is(layer: ConfigLayer) -> Value:
        has_alibi = layer.config.read("alibi", default=False)
        if has_alibi.value != when:
            read_if_possible(rule, layer)
            return NOTHING
        value = rule(layer)
        return Value.derived(value.value, has_alibi, value)

    return if_alibi_is


def _rope_of_gptj(layer: ConfigLayer) -> Value:
    """Return GPT-J's RoPE: interleaved, in the first features of a head."""
    count = layer.config.read("rotary_dim", default=64)
    rotation = Rope(rotary_dim=count.value, pairs="interleaved")
    return Value(rotation, f"{count.origin}; else as every layer of this family")


def _in_the_last_layer(layer: ConfigLayer) -> Value:
    """Return True for the last layer."""
    is_last = layer.index + 1 == layer.config.read("num_hidden_layers").value
    return Value(is_last, "num_hidden_layers: the last layer alone has one")


def _kind_of_gpt_neo(config: Config, index: int) -> str:
    """Return the kind of a layer, `global` or `local`, from a list of layers or a repeated
    pattern.
    """
    layers = config.find("attention_layers")
    pattern = config.read("attention_types", default=[[["global", "local"], 12]])
    if layers is None:
        repeated = []
        for kinds, count in pattern.value:
            repeated += list(kinds) * count
        # An error names the list, even if it follows from the pattern.
        layers = Value(repeated, "attention_layers")
        key_of_kinds = "attention_types"
    else:
        key_of_kinds = "attention_layers"
    kind = entry_of(layers, index)
    if kind not in KINDS_OF_GPT_NEO:
        rule = f"be one of {', '.join(KINDS_OF_GPT_NEO)}"
        raise InputError(f"layer {index}", rule, repr(kind), hint=f"by {key_of_kinds}")
    return KINDS_OF_GPT_NEO[kind]


KINDS_OF_GPT_NEO = {"global": "full_attention", "local": "sliding_attention"}


def _in_section(name: str, rule: FieldRule) -> FieldRule:
    """Return a rule for a section of the configuration."""

    def in_section(layer: ConfigLayer) -> Value:
        return rule(replace(layer, config=layer.config.section(name)))

    return in_section


def _rope_of_dbrx(layer: ConfigLayer) -> Value:
    """Return the RoPE of DBRX: released files have the base among the attention keys, transformers
    in the model.
    """
    config = layer.config
    of_section = config.section("attn_config").find("rope_theta")
    model_has_base = "rope_theta" in config or "rope_parameters" in config
    if of_section is not None and not model_has_base:
        return Value(Rope(of_section.value), of_section.origin)
    size = config.read("d_model", "hidden_size").value // config.read("n_heads").value
    rotation = read_rope(config, size, layer_type=layer.kind, theta=None)
    if of_section is not None and of_section.value != rotation.value.theta:
        rule = f"be {rotation.origin}={rotation.value.theta}"
        raise InputError("attn_config.rope_theta", rule, str(of_section.value))
    return rotation


OF_MPT = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "prefix_lm": False,
    "qk_ln": False,
    "attn_uses_sequence_id": False,
}
"""The released code reads these keys, transformers none of them."""

OF_SECTIONS = {
    "architectures",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "label2id",
    "is_encoder_decoder",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "_name_or_path",
    "attn_impl",
    "transformers_version",
}
"""Keys of all sections of a configuration."""

NAMES: dict[str, Any] = {
    "d_model": key("n_embd", "hidden_size"),
    "num_heads": key("n_head", "num_attention_heads"),
    "num_kv_heads": None,
    "head_dim": None,
}
"""GPT-2's names."""

OF_GPTJ: dict[str, Any] = {
    "path": "h.{i}.attn",
    "rope": _rope_of_gptj,
    "dropout": key("attn_pdrop", default=0.0),
    "output_dropout": key("resid_pdrop", default=0.0),
    "fixed": {"rotary": True, "scale_attn_weights": True},
    "says_nothing": {"n_positions"},
}
PLAIN_DECODER: dict[str, Any] = {**PLAIN, "is_causal": True, "path": "layers.{i}.self_attn"}


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
        qk_norm=where(
            "qk_layernorm", norm("layer", bias=True, eps="layer_norm_eps"), default=False
        ),
    ),
    "persimmon": family(
        IN_PART,
        layout="transformers.GPT-NeoX",
        num_kv_heads=None,
        qkv_bias=True,
        out_bias=True,
        qk_norm=where("qk_layernorm", norm("layer", bias=True, eps="layer_norm_eps")),
    ),
    **dict.fromkeys(
        ("gpt2", "gpt-sw3", "imagegpt"),
        family(
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
            "masked_softmax_fusion",
            "offset_alibi",
            "skip_bias_add",
            "skip_bias_add_qkv",
        },
    ),
    "gpt_neo": family(
        PLAIN,
        is_causal=True,
        path="h.{i}.attn.attention",
        count=("num_layers", "num_hidden_layers"),
        num_heads=key("num_heads", "num_attention_heads"),
        kind=_kind_of_gpt_neo,
        qkv_bias=False,
        scale=1.0,
        window_size=only("sliding_attention", key("window_size", default=256)),
        dropout=key("attention_dropout", default=0.0),
        output_dropout=key("resid_dropout", default=0.0),
    ),
    "gpt_neox_japanese": family(
        path="layers.{i}.attention",
        layout="transformers.GPT-NeoX-Japanese",
        out_bias=_in_the_last_layer,
        rope=rope(fraction=1.0),
        dropout=key("attention_dropout", default=0.1),
    ),
    "gptj": family(NAMES, layout="canonical", **OF_GPTJ),
    "codegen": family(NAMES, layout="transformers.CodeGen", **OF_GPTJ),
    "gpt_bigcode": family(
        NAMES,
        path="h.{i}.attn",
        layout="transformers.GPTBigCode",
        num_kv_heads=_one_head,
        qkv_bias=True,
        out_bias=True,
        rope=None,
        scale=_scale_of_bigcode,
        dropout=key("attn_pdrop", default=0.1),
        output_dropout=key("resid_pdrop", default=0.1),
        says_nothing={
            "n_positions",
            "num_key_value_heads",
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
            "pre_allocate_kv_cache",
        },
    ),
    "openai-gpt": family(
        NAMES,
        path="h.{i}.attn",
        layout="transformers.GPT2",
        qkv_bias=True,
        out_bias=True,
        rope=None,
        dropout=key("attn_pdrop", default=0.1),
        output_dropout=key("resid_pdrop", default=0.1),
        says_nothing={"n_positions"},
    ),
    "falcon": family(
        path="h.{i}.self_attention",
        layout="transformers.Falcon",
        num_kv_heads=_heads_of_falcon,
        qkv_bias=key("bias", default=False),
        out_bias=key("bias", default=False),
        rope=_with_alibi(rope(theta=1e4), when=False),
        alibi=_with_alibi(_scaled_alibi),
        dropout=_with_alibi(key("attention_dropout", default=0.0)),  # no dropout with RoPE
        says_nothing={"parallel_attn", "num_ln_in_parallel_attn"},
    ),
    "mpt": family(
        path="blocks.{i}.attn",
        layout="transformers.MPT",
        count=("n_layers", "num_hidden_layers"),
        d_model=key("d_model", "hidden_size"),
        num_heads=key("n_heads", "num_attention_heads"),
        num_kv_heads=None,
        rope=None,
        alibi=Alibi(),
        clip_qkv=_in_section("attn_config", optional("clip_qkv")),
        scale=_in_section("attn_config", optional("softmax_scale")),
        dropout=_in_section("attn_config", key("attn_pdrop", default=0.0)),
        fixed={"no_bias": True, **{f"attn_config.{name}": value for name, value in OF_MPT.items()}},
        says_nothing=OF_SECTIONS,
    ),
    "dbrx": family(
        path="blocks.{i}.norm_attn_norm.attn",
        layout="transformers.DBRX",
        count=("n_layers", "num_hidden_layers"),
        d_model=key("d_model", "hidden_size"),
        num_heads=key("n_heads", "num_attention_heads"),
        num_kv_heads=_in_section("attn_config", key("kv_n_heads", default=1)),
        head_dim=None,
        rope=_rope_of_dbrx,
        clip_qkv=_in_section("attn_config", optional("clip_qkv")),
        dropout=_in_section("attn_config", key("attn_pdrop", default=0.0)),
        says_nothing={*OF_SECTIONS, "num_key_value_heads"},
    ),
    "opt": family(
        PLAIN_DECODER,
        qkv_bias=key("enable_bias", default=True),
        out_bias=key("enable_bias", default=True),
        dropout=key("attention_dropout", default=0.0),
    ),
    "biogpt": family(
        PLAIN_DECODER,
        dropout=key("attention_probs_dropout_prob", default=0.1),
        says_nothing={"scale_embedding"},
    ),
    "xglm": family(
        PLAIN_DECODER,
        count=("num_layers", "num_hidden_layers"),
        d_model=key("d_model", "hidden_size"),
        num_heads=key("attention_heads", "num_attention_heads"),
        dropout=key("attention_dropout", default=0.1),
        says_nothing={"scale_embedding"},
    ),
    "kosmos_2_text_model": family(
        PLAIN_DECODER,
        layout="transformers.Kosmos-2",
        count=("layers", "num_hidden_layers"),
        d_model=key("embed_dim", "hidden_size"),
        num_heads=key("attention_heads", "num_attention_heads"),
        dropout=key("attention_dropout", default=0.1),
        context_norm=norm("layer", over="width", bias=True, eps="layer_norm_eps"),
        says_nothing={"scale_embedding"},
        fixed={"add_cross_attention": False},
    ),
}
