"""The families of models: what each of their layers is, and which keys of the configuration say the rest.

A family has a rule for each field of `AttentionSpec`: a value, which every layer has, or what reads it.

Source: the modules of transformers 5.23, with which layers of these specifications agree in the tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mha_spec import Alibi, Gate, Latent, Temperature
from parity.models.config import Config, Value
from parity.models.rules import (
    NOTHING,
    SLIDING,
    Family,
    Place,
    Rule,
    Stack,
    asked,
    every,
    is_last,
    key,
    norm,
    only,
    optional,
    rope,
    where,
)

# ---- What layers are in most families --------------------------------------------------------------------------------

USUAL: dict[str, Any] = {
    "d_model": key("hidden_size"),
    "num_heads": key("num_attention_heads"),
    "num_kv_heads": optional("num_key_value_heads"),
    "head_dim": optional("head_dim"),
    "dropout": key("attention_dropout", default=0.0),
    "qkv_bias": False,
    "out_bias": False,
    "rope": rope(),
}

SOME_BIAS, MOST_BIAS = (key("attention_bias", default=default) for default in (False, True))
BIASES = {"qkv_bias": SOME_BIAS, "out_bias": SOME_BIAS}
HEADS = {"num_kv_heads": asked("num_key_value_heads")}
WIDTH = {"head_dim": asked("head_dim")}
PAIRED = {"rope": rope(pairs="interleaved")}
IN_PART = {"rope": rope(fraction=0.5)}


def family(
    *others: Mapping[str, Any],
    says_nothing: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Family:
    """A family of one stack, as `stack` has it."""
    return Family((stack(*others, **fields),), frozenset(says_nothing), defaults or {})


def stack(*others: Mapping[str, Any], **fields: Any) -> Stack:
    """Layers whose fields are the usual ones but for these; fields of `Stack` are its own."""
    held = dict(USUAL)
    for each in (*others, fields):
        held |= each
    own = {name: held.pop(name) for name in OF_STACK & held.keys()}
    return Stack(held, **own)


OF_STACK = {each.name for each in dataclasses.fields(Stack)} - {"fields"}


# ---- Rules of some families ------------------------------------------------------------------------------------------


def _qwen(config: Config, index: int) -> str:
    uses = config.read("use_sliding_window", default=False).value
    return "sliding_attention" if uses and index >= config.read("max_window_layers").value else "full_attention"


def _qwen3_next(config: Config, index: int) -> str:
    last = is_last(index, config.find("full_attention_interval"), 4)
    return "full_attention" if last else "linear_attention"


def _gate_with_bias(place: Place) -> Value:
    """A gate that is packed with the queries, and has a bias where they have."""
    bias = SOME_BIAS(place)
    return Value(Gate(bias=bias.value), f"every layer of this family; {bias.origin}")


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


def _tempered_by_rope(place: Place) -> Value:
    """The temperature that Mistral keeps among the parameters of RoPE."""
    values = place.config.section("rope_parameters")
    values.find("max_position_embeddings")  # said of the model, too
    scale = values.find("llama_4_scaling_beta")
    if scale is None:
        return NOTHING
    length = values.read("original_max_position_embeddings")
    return Value(Temperature(length.value, scale.value), f"{scale.origin}, {length.origin}")


def _rotates(config: Config, index: int) -> Value:
    """Whether a layer rotates anything: the last of each period does not."""
    told, period = config.find("no_rope_layers"), config.find("no_rope_layer_interval")
    if told is None or not told.value:
        return Value(not is_last(index, period, 4), period.origin if period else "every fourth: this family's default")
    if index >= len(told.value):
        raise ValueError(f"no_rope_layers must be one for each layer, got {len(told.value)}")
    return Value(bool(told.value[index]), f"no_rope_layers[{index}]")


def _where_rotated(rule: Rule, *, rotated: bool = True) -> Rule:
    """What layers have that rotate, or those that do not; its keys count as read in the others, too."""

    def in_some(place: Place) -> Value:
        rotates, found = _rotates(place.config, place.layer), rule(place)
        return Value(found.value, f"{found.origin}, {rotates.origin}") if rotates.value == rotated else NOTHING

    return in_some


def _kind_of_smollm3(config: Config, index: int) -> str:
    has_window = config.read("use_sliding_window", default=False).value and "sliding_window" in config
    return "sliding_attention" if has_window and not _rotates(config, index).value else "full_attention"


def _exaone4(place: Place) -> Value:
    """With windows in some layers, only these rotate anything."""
    window, turned = place.config.find("sliding_window"), rope()(place)
    rotates = window is None or place.kind == "sliding_attention"
    return Value(turned.value if rotates else None, turned.origin + (f", {window.origin}" if window else ""))


def _kind_of_exaone4(config: Config, index: int) -> str:
    """As `every`, in models with windows."""
    if config.asked("sliding_window") is None:
        return "full_attention"
    return every(4, "sliding_window_pattern")(config, index)


def _kind_of_ministral(config: Config, index: int) -> str:
    return "full_attention" if config.asked("sliding_window") is None else "sliding_attention"


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


def _temperature_of_llama4(place: Place) -> Value:
    length, scale = (place.config.read(name) for name in ("floor_scale", "attn_scale"))
    return Value(Temperature(length.value, scale.value, first_position=1), f"{length.origin}, {scale.origin}")


# ---- Families --------------------------------------------------------------------------------------------------------

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

OF_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
OF_GEMMA3 |= {"rms_norm_eps": 1e-6, "sliding_window": 4096, "hidden_size": 2304, "num_hidden_layers": 26}
"""What its configurations leave out, those of the larger models nearly everything."""

FAMILIES: dict[str, Family] = {
    "llama": family(BIASES, rope=rope(theta=1e4)),
    "mistral": family(HEADS, window_size=asked("sliding_window"), rope=rope(theta=1e4)),
    "mixtral": family(HEADS, window_size=optional("sliding_window")),
    "ministral3": family(HEADS, WIDTH, window_size=optional("sliding_window"), temperature=_tempered_by_rope),
    "qwen2": family(HEADS, qkv_bias=True, window_size=SLIDING, kind=_qwen),
    "qwen2_moe": family(HEADS, qkv_bias=key("qkv_bias", default=True), window_size=SLIDING, kind=_qwen),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_vl_text"),
        family(HEADS, rope=rope(sections=(16, 24, 24)), qkv_bias=True, window_size=SLIDING, kind=_qwen),
    ),
    "qwen3": family(HEADS, WIDTH, BIASES, qk_norm=norm(), window_size=SLIDING, kind=_qwen),
    "qwen3_moe": family(
        HEADS,
        BIASES,
        qk_norm=norm(),
        window_size=where("use_sliding_window", asked("sliding_window"), default=False),
    ),
    "qwen3_vl_text": family(
        HEADS, WIDTH, BIASES, qk_norm=norm(), rope=rope(sections=(24, 20, 20), section_order="interleaved")
    ),
    "gemma": family(HEADS, WIDTH, BIASES, rope=rope(theta=1e4)),
    "gemma2": family(
        HEADS,
        WIDTH,
        BIASES,
        scale=key("query_pre_attn_scalar", power=-0.5),
        soft_cap=asked("attn_logit_softcapping"),
        window_size=only("sliding_attention", asked("sliding_window", "sliding_window_size")),
        kind=every(2),
    ),
    "gemma3_text": family(
        HEADS,
        WIDTH,
        BIASES,
        scale=key("query_pre_attn_scalar", power=-0.5),
        soft_cap=optional("attn_logit_softcapping"),
        qk_norm=norm(weight="1+w"),
        window_size=SLIDING,
        rope=rope(theta=1e6, local_theta=1e4),
        kind=every(6, "sliding_window_pattern", "_sliding_window_pattern"),
        defaults=OF_GEMMA3,
    ),
    "gpt_neox": family(
        path="layers.{i}.attention",
        layout="transformers.GPT-NeoX",
        rope=rope(fraction=0.25),
        qkv_bias=MOST_BIAS,
        out_bias=MOST_BIAS,
    ),
    "gpt_oss": family(
        HEADS, WIDTH, qkv_bias=MOST_BIAS, out_bias=MOST_BIAS, sinks=True, window_size=SLIDING, kind=every(2)
    ),
    **dict.fromkeys(
        ("glm", "glm4"), family(HEADS, WIDTH, rope=rope(pairs="interleaved", fraction=0.5), qkv_bias=MOST_BIAS)
    ),
    "cohere": family(
        BIASES, PAIRED, qk_norm=where("use_qk_norm", norm("layer", per_head=True, eps="layer_norm_eps"), default=False)
    ),
    "cohere2": family(
        BIASES,
        window_size=SLIDING,
        rope=only("sliding_attention", rope(pairs="interleaved")),
        kind=every(4, "sliding_window_pattern", "_sliding_window_pattern"),
        says_nothing={"position_embedding_type"},
    ),
    "phi": family(
        IN_PART,
        layout="transformers.Phi",
        qkv_bias=True,
        out_bias=True,
        qk_norm=where("qk_layernorm", norm("layer", bias=True, eps="layer_norm_eps"), default=False),
    ),
    "phi3": family(layout="transformers.Phi3", window_size=optional("sliding_window"), says_nothing={"attention_bias"}),
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
    "smollm3": family(HEADS, BIASES, rope=_where_rotated(rope()), window_size=SLIDING, kind=_kind_of_smollm3),
    "qwen3_next": family(
        HEADS,
        WIDTH,
        BIASES,
        layout="transformers.Qwen3-Next",
        rope=rope(fraction=0.25),
        qk_norm=norm(weight="1+w"),
        gate=_gate_with_bias,
        kind=_qwen3_next,
    ),
    "afmoe": family(
        WIDTH,
        BIASES,
        qk_norm=norm(),
        gate=Gate(),
        window_size=SLIDING,
        rope=only("sliding_attention", rope()),
        kind=every(4, "global_attn_every_n_layers"),
    ),
    "arcee": family(BIASES),
    "apertus": family(BIASES, qk_norm=norm()),
    "seed_oss": family(
        HEADS,
        WIDTH,
        qkv_bias=key("attention_bias"),
        out_bias=key("attention_out_bias"),
        dropout=key("attention_dropout"),
        output_dropout=key("residual_dropout"),
    ),
    "helium": family(HEADS, WIDTH, PAIRED, qkv_bias=SOME_BIAS),
    "nemotron": family(BIASES, IN_PART),
    "ernie4_5": family(HEADS, WIDTH, PAIRED, qkv_bias=key("use_bias"), out_bias=key("use_bias")),
    "exaone4": family(
        HEADS,
        qk_norm=norm(),
        window_size=SLIDING,
        rope=_exaone4,
        kind=_kind_of_exaone4,
        says_nothing={"sliding_window_pattern"},
    ),
    "glm4_moe": family(HEADS, IN_PART, qkv_bias=SOME_BIAS, qk_norm=where("use_qk_norm", norm(), default=False)),
    "dots1": family(HEADS, BIASES, qk_norm=norm(), window_size=SLIDING),
    "ministral": family(HEADS, window_size=SLIDING, kind=_kind_of_ministral),
    **dict.fromkeys(("granite", "granitemoe"), family(BIASES, scale=key("attention_multiplier"))),
    "starcoder2": family(
        HEADS, qkv_bias=key("use_bias"), out_bias=key("use_bias"), window_size=optional("sliding_window")
    ),
    "olmo": family(BIASES, clip_qkv=optional("clip_qkv")),
    **dict.fromkeys(("olmo2", "olmoe"), family(BIASES, qk_norm=norm(over="width"))),
    "olmo3": family(BIASES, qk_norm=norm(over="width"), window_size=SLIDING, kind=every(4)),
    "stablelm": family(
        HEADS,
        layout="transformers.StableLM",
        rope=rope(fraction=0.25),
        qkv_bias=key("use_qkv_bias", default=False),
        qk_norm=where("qk_layernorm", norm("layer", per_head=True, eps="layer_norm_eps"), default=False),
    ),
    "llama4_text": family(
        HEADS,
        WIDTH,
        BIASES,
        chunk_size=only("chunked_attention", asked("attention_chunk_size")),
        kind=lambda config, index: "chunked_attention" if _rotates(config, index).value else "full_attention",
        rope=_where_rotated(rope(pairs="interleaved")),
        qk_norm=_where_rotated(where("use_qk_norm", norm(weight=None, after_rope=True))),
        temperature=_where_rotated(where("attn_temperature_tuning", _temperature_of_llama4), rotated=False),
    ),
    "hunyuan_v1_dense": family(BIASES, layout="transformers.HunYuan", qk_norm=norm(after_rope=True)),
    "deepseek_v2": family(LATENTS, rope=rope(of="qk_rope_head_dim", pairs="interleaved"), says_nothing=OF_LATENTS),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "youtu"), family(LATENTS, says_nothing=OF_LATENTS)),
    "minicpm3": family(LATENTS, rope=rope(of="qk_rope_head_dim"), says_nothing=OF_LATENTS),
    "mistral4": family(LATENTS, temperature=_tempered_by_rope, says_nothing=OF_LATENTS),
}
