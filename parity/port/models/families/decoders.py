"""Decoders like LLaMA."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mha_spec import Gate, InputError, Rope, Temperature
from parity.port.models.config import Config, Value
from parity.port.models.families.encoders import OF_MODERNBERT
from parity.port.models.families.usual import (
    BIASES,
    HEADS,
    IN_PART,
    MOST_BIAS,
    PAIRED,
    SOME_BIAS,
    WIDTH,
    family,
)
from parity.port.models.keys import check_kind
from parity.port.models.rope import rope_section
from parity.port.models.rules import (
    NOTHING,
    SLIDING,
    ConfigLayer,
    Family,
    FieldRule,
    entry_of,
    every,
    first_of,
    head_dim,
    is_last,
    key,
    kv_source,
    norm,
    only,
    optional,
    own_keys,
    require_layer_types,
    required_or_none,
    rope,
    shares_keys,
    tempered_by_rope,
    where,
)


def _kind_of_qwen(config: Config, index: int) -> str:
    """Return the kind of a layer: windows, if they are used, from a layer on."""
    uses_windows = config.read("use_sliding_window", default=False).value
    if uses_windows and index >= config.read("max_window_layers").value:
        return "sliding_attention"
    return "full_attention"


def _rotates(config: Config, index: int) -> Value:
    """Return whether a layer has RoPE: the last of each period has none."""
    # Despite its name, an entry of the list is 1 for layers with RoPE.
    layers = config.find("no_rope_layers")
    period = config.find("no_rope_layer_interval")
    if layers is not None and layers.value:
        return Value(bool(entry_of(layers, index)), f"no_rope_layers[{index}]")
    origin = "every fourth: this family's default" if period is None else period.origin
    return Value(not is_last(index, period, 4), origin)


def _where_rotated(rule: FieldRule, *, rotated: bool = True) -> FieldRule:
    """Return a rule for layers with RoPE, or those without; its keys also count as read in the
    others.
    """

    def in_some(layer: ConfigLayer) -> Value:
        rotates = _rotates(layer.config, layer.index)
        value = rule(layer)
        if rotates.value != rotated:
            return NOTHING
        return Value.derived(value.value, value, rotates)

    return in_some


def _kind_of_smollm3(config: Config, index: int) -> str:
    """Return the kind of a layer: windows, if they are used, in layers without RoPE."""
    uses_windows = config.read("use_sliding_window", default=False).value
    if uses_windows and "sliding_window" in config and not _rotates(config, index).value:
        return "sliding_attention"
    return "full_attention"


def _rope_of_exaone4(layer: ConfigLayer) -> Value:
    """Return the RoPE of a layer: if some layers have windows, only these rotate."""
    window = layer.config.find("sliding_window")
    rotation = rope()(layer)
    if window is None:
        return rotation
    if layer.kind != "sliding_attention":
        return Value.derived(None, rotation, window)
    return Value.derived(rotation.value, rotation, window)


def _kind_of_exaone4(config: Config, index: int) -> str:
    """Return the kind of a layer like `every`, in models with windows."""
    if config.required_or_none("sliding_window") is None:
        return "full_attention"
    return every(4, "sliding_window_pattern")(config, index)


def _kind_of_ministral(config: Config, index: int) -> str:
    """Return the kind of all layers: windows, if the configuration has their size."""
    if config.required_or_none("sliding_window") is None:
        return "full_attention"
    return "sliding_attention"


def _temperature_of_llama4(layer: ConfigLayer) -> Value:
    length = layer.config.read("floor_scale")
    scale = layer.config.read("attn_scale")
    temperature = Temperature(length.value, scale.value, first_position=1)
    return Value.derived(temperature, length, scale)


def _kind_of_llama4(config: Config, index: int) -> str:
    """Return the kind of a layer: chunks in layers with RoPE."""
    if _rotates(config, index).value:
        return "chunked_attention"
    return "full_attention"


def _kind_of_minimax_m2(config: Config, index: int) -> str:
    """Return the kind of a layer from numbers: 1 is full attention."""
    numbers = config.find("attn_type_list")
    if numbers is None:
        return "full_attention"
    number = entry_of(numbers, index)
    if number == 1:
        return "full_attention"
    return f"attn_type_list {number}"  # an unknown kind, which is an error


def _of_gemma4(name: str, of_full: str) -> FieldRule:
    """Return a size specific to layers without a window, from one value for all or one per
    layer.
    """

    def rule(layer: ConfigLayer) -> Value:
        # All of these keys count as read, also those that this layer does not use.
        usual = layer.config.read(name)
        keys_are_values = layer.config.find("attention_k_eq_v")
        by_layer = layer.config.find("per_layer_config")
        full = layer.config.find(of_full)
        if layer.kind != "full_attention":
            return usual
        if by_layer is not None:
            return _of_layer(by_layer, layer.index, name) or usual
        if name == "num_key_value_heads":
            # transformers reads the other number only if keys are values.
            if full is None or keys_are_values is None or not keys_are_values.value:
                return usual
            return full
        return layer.config.read(of_full)

    return rule


def _of_layer(by_layer: Value, index: int, name: str) -> Value | None:
    """Return a value of one layer from sections by the number of a layer, or None."""
    # The keys are integers in Python, and text in JSON.
    section = by_layer.value.get(index, by_layer.value.get(str(index), {}))
    where = f"{by_layer.origin}.{index}"
    if not isinstance(section, Mapping):
        raise InputError(where, "hold values by name", {where: section})
    if name not in section:
        return None
    check_kind(name, section[name], f"{where}.")
    return Value(section[name], f"{where}.{name}")


def _has_one_projection(layer: ConfigLayer) -> bool:
    """Return whether a layer of Gemma 4 has one projection for keys and values."""
    keys_are_values = layer.config.find("attention_k_eq_v")
    if keys_are_values is None or not keys_are_values.value:
        return False
    return kv_source(layer) is None and layer.kind == "full_attention"


def _kind_of_gemma4(config: Config, index: int) -> str:
    """Return the kind of a layer like `every`, except that the very last layer has no window."""
    if index + 1 == config.read("num_hidden_layers").value:
        return "full_attention"
    return every(6)(config, index)


def _rope_of_each_layer(layer: ConfigLayer) -> Value:
    """Return the RoPE of a layer from a base for each, 0 for no RoPE; by default one base for
    all.
    """
    bases = layer.config.find("layer_rope_theta")
    rotation = rope()(layer)
    if bases is None:
        return rotation
    base = entry_of(bases, layer.index)
    origin = f"{bases.origin}[{layer.index}], {rotation.origin}"
    if not base:
        return Value(None, origin)
    return Value(dataclasses.replace(rotation.value, theta=base), origin)


def _width_of_hunyuan(layer: ConfigLayer) -> Value:
    """Return the features of a head, which an older key may repeat."""
    # transformers ignores the older key.
    older = layer.config.find("attention_head_dim")
    if older is not None and older.value != head_dim(layer):
        raise InputError(
            "attention_head_dim", f"be head_dim={head_dim(layer)}", {older.origin: older.value}
        )
    return layer.config.find("head_dim") or NOTHING


def _rope_of_hunyuan(layer: ConfigLayer) -> Value:
    """Return the RoPE of HunYuan: with an `alpha`, "dynamic" is plain RoPE with a different base,
    for any length.
    """
    values = rope_section(layer.config)
    alpha = None if values is None else values.find("alpha")
    if values is None or alpha is None:
        return rope()(layer)
    size = head_dim(layer)
    kind = values.find("rope_type", "type")
    if kind is None or kind.value != "dynamic":
        other_kind = None if kind is None else kind.value
        raise InputError("alpha", "be the scaling of rope_type dynamic", repr(other_kind))
    # transformers ignores these keys if there is an alpha, so they count as read.
    values.find("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    base = values.find("rope_theta") or layer.config.read("rope_theta")
    # "NTK-aware": the lowest frequency, theta ** -((H - 2) / H), is divided by alpha, and the
    # highest one, 1, stays.
    theta = base.value * alpha.value ** (size / (size - 2))
    return Value(Rope(theta), f"{base.origin} * {alpha.origin} ** (H / (H - 2))")


def _scale_of_hyperclovax(layer: ConfigLayer) -> Value:
    scale = layer.config.find("attention_multiplier")
    if scale is not None:
        return scale
    return Value(head_dim(layer) ** -0.5, "1 / sqrt(H): attention_multiplier is not set")


def _window_of_modernbert_decoder(layer: ConfigLayer) -> Value:
    whole = layer.config.read("local_attention", default=128)
    half = layer.config.find("sliding_window")
    # transformers derives one from the other unless both are present.
    if half is not None and half.value != whole.value // 2:
        raise InputError(
            "sliding_window",
            "be local_attention // 2",
            f"sliding_window={half.value} and local_attention={whole.value} ({whole.origin})",
        )
    if layer.kind != "sliding_attention":
        return NOTHING
    return Value(whole.value // 2, f"{whole.origin} // 2")


def _rope_of_cohere2_moe(layer: ConfigLayer) -> Value:
    """Return RoPE for layers with a window, and for layers of the dense prefix if all of it has
    full attention.
    """
    # Keys of all layers are read, so that they count as read whatever the kind of this one.
    rotation = rope(pairs="interleaved")(layer)
    period = layer.config.read("prefix_dense_sliding_window_pattern", default=1)
    types = layer.config.find("mlp_layer_types")
    num_dense = layer.config.read("first_k_dense_replace", default=0)
    if types is None:
        is_dense = layer.index < num_dense.value
    else:
        is_dense = entry_of(types, layer.index) == "dense"
    if layer.kind == "sliding_attention":
        return rotation
    # With a period of 1 each layer of the prefix is the last of its period: full attention.
    if not is_dense or period.value != 1:
        return NOTHING
    return Value.derived(rotation.value, rotation, period)


def _kind_of_cohere2_moe(config: Config, index: int) -> str:
    """Return the kind of a layer like `every`, separately for the dense prefix and the other
    layers.
    """
    prefix = config.read("first_k_dense_replace", default=0).value
    if index < prefix:
        return every(1, "prefix_dense_sliding_window_pattern")(config, index)
    return every(4, "sliding_window_pattern")(config, index - prefix)


def _heads_of_mimo(layer: ConfigLayer) -> Value:
    """Return the key/value heads: twice as many in layers with a window."""
    num_heads = layer.config.read("num_key_value_heads")
    if layer.kind != "sliding_attention":
        return num_heads
    return Value(2 * num_heads.value, f"2 * {num_heads.origin}, with a window")


def _sinks_of_mimo(layer: ConfigLayer) -> Value:
    return Value(layer.kind == "sliding_attention", "with a window: this family's rule")


def _kind_of_mimo(config: Config, index: int) -> str:
    """Return the kind of a layer like `every`, except that the very first layer has no window."""
    if index == 0:
        return "full_attention"
    return every(6)(config, index)


OF_LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
OF_MISTRAL = {**OF_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096}
OF_GEMMA = {
    "hidden_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "head_dim": 256,
}
OF_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
}
"""Defaults of the text part of multimodal models, whose configurations contain only deviations."""

OF_IMAGES = {"rope": rope(pairs="interleaved", sections=(8, 12, 12), fraction=1.0)}
"""RoPE of GLM's multimodal models; by default of whole heads."""

IN_HALVES = {"rope_interleaved": False}
"""A key of SmolLM2's configurations that no layer reads."""


DECODERS: dict[str, Family] = {
    **dict.fromkeys(
        ("llama", "aria_text"),
        family(BIASES, rope=rope(theta=1e4), defaults=OF_LLAMA, fixed=IN_HALVES),
    ),
    **dict.fromkeys(("iquestcoder", "higgs_audio_v2"), family(HEADS, WIDTH, BIASES)),
    "internlm3": family(HEADS, WIDTH, BIASES, fixed={"bias": False, "qkv_bias": False}),
    "csm_depth_decoder_model": family(HEADS, BIASES),
    "paddleocr_vl_text": family(
        HEADS,
        WIDTH,
        rope=rope(sections=(16, 24, 24)),
        qkv_bias=key("use_bias", default=False),
        out_bias=key("use_bias", default=False),
        dropout=0.0,
    ),
    "emu3_text_model": family(HEADS, BIASES, dropout=key("attention_dropout", default=0.1)),
    "qwen3_omni_moe_text": family(
        HEADS,
        BIASES,
        qk_norm=norm(),
        rope=rope(sections=(24, 20, 20), section_order="interleaved"),
        fixed={"sliding_window": None},  # transformers never reads it
    ),
    "eurobert": family(BIASES, is_causal=False),
    "mistral": family(
        HEADS,
        window_size=required_or_none("sliding_window"),
        rope=rope(theta=1e4),
        defaults=OF_MISTRAL,
    ),
    "mixtral": family(HEADS, window_size=optional("sliding_window")),
    "ministral3": family(
        HEADS, WIDTH, window_size=optional("sliding_window"), temperature=tempered_by_rope
    ),
    "qwen2": family(HEADS, qkv_bias=True, window_size=SLIDING, kind=_kind_of_qwen),
    "qwen2_moe": family(
        HEADS, qkv_bias=key("qkv_bias", default=True), window_size=SLIDING, kind=_kind_of_qwen
    ),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"),
        family(
            HEADS,
            rope=rope(sections=(16, 24, 24)),
            qkv_bias=True,
            window_size=SLIDING,
            kind=_kind_of_qwen,
        ),
    ),
    "qwen3": family(HEADS, WIDTH, BIASES, qk_norm=norm(), window_size=SLIDING, kind=_kind_of_qwen),
    "qwen3_moe": family(
        HEADS,
        BIASES,
        qk_norm=norm(),
        window_size=where("use_sliding_window", required_or_none("sliding_window"), default=False),
    ),
    **dict.fromkeys(
        ("qwen3_vl_text", "qwen3_vl_moe_text"),
        family(
            HEADS,
            WIDTH,
            BIASES,
            qk_norm=norm(),
            rope=rope(sections=(24, 20, 20), section_order="interleaved"),
        ),
    ),
    "mellum": family(HEADS, WIDTH, BIASES, qk_norm=norm(), window_size=SLIDING),
    "flint": family(
        HEADS,
        WIDTH,
        BIASES,
        qk_norm=norm(),
        layout="transformers.Flint",
        sinks=True,
        window_size=SLIDING,
        rope=only("sliding_attention", rope()),
        kind=require_layer_types,
    ),
    "cwm": family(HEADS, WIDTH, window_size=SLIDING, kind=first_of(4)),
    "gemma": family(HEADS, WIDTH, BIASES, rope=rope(theta=1e4), defaults=OF_GEMMA),
    **dict.fromkeys(
        ("gemma2", "vaultgemma"),
        family(
            HEADS,
            WIDTH,
            BIASES,
            scale=key("query_pre_attn_scalar", power=-0.5),
            soft_cap=required_or_none("attn_logit_softcapping"),
            window_size=only(
                "sliding_attention", required_or_none("sliding_window", "sliding_window_size")
            ),
            kind=every(2),
        ),
    ),
    "gemma3_text": family(
        HEADS,
        WIDTH,
        BIASES,
        scale=key("query_pre_attn_scalar", power=-0.5),
        qk_norm=norm(weight="1+w"),
        window_size=SLIDING,
        rope=rope(theta=1e6, local_theta=1e4),
        kind=every(6, "sliding_window_pattern", "_sliding_window_pattern"),
        defaults=OF_GEMMA3,
        fixed={"attn_logit_softcapping": None},  # transformers never reads it
    ),
    "gpt_oss": family(
        HEADS,
        WIDTH,
        qkv_bias=MOST_BIAS,
        out_bias=MOST_BIAS,
        sinks=True,
        window_size=SLIDING,
        kind=every(2),
    ),
    **dict.fromkeys(
        ("glm", "glm4"),
        family(HEADS, WIDTH, rope=rope(pairs="interleaved", fraction=0.5), qkv_bias=MOST_BIAS),
    ),
    "cohere": family(
        BIASES,
        PAIRED,
        qk_norm=where(
            "use_qk_norm", norm("layer", per_head=True, eps="layer_norm_eps"), default=False
        ),
    ),
    "cohere2": family(
        BIASES,
        window_size=SLIDING,
        rope=only("sliding_attention", rope(pairs="interleaved")),
        kind=every(4, "sliding_window_pattern", "_sliding_window_pattern"),
        fixed={"use_qk_norm": False},
        says_nothing={"position_embedding_type"},
    ),
    "phi3": family(
        layout="transformers.Phi3",
        rope=rope(fraction=1.0),
        window_size=optional("sliding_window"),
        fixed={"full_attn_mod": 1},
        says_nothing={"attention_bias"},
    ),
    "smollm3": family(
        HEADS, BIASES, rope=_where_rotated(rope()), window_size=SLIDING, kind=_kind_of_smollm3
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
    "gemma4_text": family(
        BIASES,
        head_dim=_of_gemma4("head_dim", "global_head_dim"),
        num_kv_heads=_of_gemma4("num_key_value_heads", "num_global_key_value_heads"),
        layout="transformers.Gemma4",
        keys_are_values=_has_one_projection,
        scale=1.0,
        qk_norm=norm(),
        v_norm=own_keys(norm(weight=None)),
        window_size=SLIDING,
        kind=_kind_of_gemma4,
        shared_kv=shares_keys,
        kv_source=kv_source,
        says_nothing={"top_k_experts"},
    ),
    "gemma3n_text": family(
        HEADS,
        WIDTH,
        BIASES,
        scale=1.0,
        qk_norm=norm(),
        v_norm=own_keys(norm(weight=None)),
        window_size=SLIDING,
        rope=rope(theta=1e6, local_theta=1e4),
        kind=every(5),
        shared_kv=shares_keys,
        kv_source=kv_source,
        defaults={"num_kv_shared_layers": 15},
        says_nothing={"altup_correct_scale"},
    ),
    "mimo_v2_flash": family(
        WIDTH,
        layout="transformers.MiMo-V2",
        rope=rope(fraction=1.0),
        num_kv_heads=_heads_of_mimo,
        value_head_dim=required_or_none("v_head_dim"),
        qkv_bias=SOME_BIAS,
        window_size=SLIDING,
        sinks=_sinks_of_mimo,
        kind=_kind_of_mimo,
        defaults={"attention_value_scale": 0.707},
        fixed={"attention_value_scale": 1.0},
    ),
    "cohere2_moe": family(
        HEADS,
        WIDTH,
        BIASES,
        window_size=SLIDING,
        rope=_rope_of_cohere2_moe,
        kind=_kind_of_cohere2_moe,
    ),
    "arcee": family(BIASES),
    "jais2": family(qkv_bias=MOST_BIAS, out_bias=MOST_BIAS),
    "solar_open": family(HEADS, WIDTH, qkv_bias=SOME_BIAS),
    "phimoe": family(HEADS, BIASES, window_size=optional("sliding_window")),
    "minimax_m2": family(
        HEADS,
        WIDTH,
        qk_norm=norm(over="width"),
        rope=rope(count="rotary_dim", fraction=1.0),
        kind=_kind_of_minimax_m2,
        fixed={"use_qk_norm": True, "qk_norm_type": "per_layer"},
        says_nothing={
            "layernorm_full_attention_beta",
            "layernorm_linear_attention_beta",
            "use_routing_bias",
        },
    ),
    "bitnet": family(HEADS, BIASES, layout="transformers.BitNet", context_norm=norm(over="width")),
    "hy_v3": family(HEADS, WIDTH, BIASES, qk_norm=norm()),
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
    **dict.fromkeys(
        ("granite_docling_text", "granite4_vision_text"),
        family(HEADS, BIASES, scale=key("attention_multiplier")),
    ),
    **dict.fromkeys(
        ("granite_swa", "granitemoe_swa"),
        family(
            HEADS,
            BIASES,
            scale=key("attention_multiplier"),
            sinks=True,
            window_size=SLIDING,
            rope=_rope_of_each_layer,
            kind=first_of(4),
        ),
    ),
    "hyperclovax": family(BIASES, scale=_scale_of_hyperclovax),
    "kolibri1": family(
        HEADS, WIDTH, qk_norm=norm(), window_size=SLIDING, rope=_rope_of_exaone4, kind=every(5)
    ),
    "ernie4_5_moe": family(
        HEADS,
        PAIRED,
        qkv_bias=key("use_bias", default=False),
        out_bias=key("use_bias", default=False),
    ),
    "glm4v_text": family(HEADS, OF_IMAGES, qkv_bias=True, fixed={"attention_bias": True}),
    "glm_ocr_text": family(HEADS, OF_IMAGES, fixed={"attention_bias": False}),
    **dict.fromkeys(
        ("glm4v_moe_text", "glm_image_text"),
        family(HEADS, rope=rope(sections=(8, 12, 12), fraction=0.5), qkv_bias=MOST_BIAS),
    ),
    "modernbert-decoder": family(
        OF_MODERNBERT,
        is_causal=True,
        layout="transformers.ModernBERT-decoder",
        window_size=_window_of_modernbert_decoder,
        dropout=key("attention_dropout", default=0.0),
        says_nothing={"norm_bias", "decoder_bias", "classifier_bias"},
    ),
    "ernie4_5": family(HEADS, WIDTH, PAIRED, qkv_bias=key("use_bias"), out_bias=key("use_bias")),
    **dict.fromkeys(
        ("exaone4", "exaone_moe"),
        family(
            HEADS,
            qk_norm=norm(),
            window_size=SLIDING,
            rope=_rope_of_exaone4,
            kind=_kind_of_exaone4,
            says_nothing={"sliding_window_pattern"},
        ),
    ),
    "glm4_moe": family(
        HEADS, IN_PART, qkv_bias=SOME_BIAS, qk_norm=where("use_qk_norm", norm(), default=False)
    ),
    "dots1": family(HEADS, BIASES, qk_norm=norm(), window_size=SLIDING),
    "ministral": family(HEADS, window_size=SLIDING, kind=_kind_of_ministral),
    **dict.fromkeys(
        ("granite", "granitemoe", "granitemoeshared"),
        family(BIASES, scale=key("attention_multiplier")),
    ),
    "starcoder2": family(
        HEADS,
        qkv_bias=key("use_bias"),
        out_bias=key("use_bias"),
        window_size=optional("sliding_window"),
    ),
    "olmo": family(BIASES, clip_qkv=optional("clip_qkv")),
    **dict.fromkeys(("olmo2", "olmoe", "flex_olmo"), family(BIASES, qk_norm=norm(over="width"))),
    "olmo3": family(BIASES, qk_norm=norm(over="width"), window_size=SLIDING, kind=every(4)),
    "stablelm": family(
        HEADS,
        layout="transformers.StableLM",
        rope=rope(fraction=0.25),
        qkv_bias=key("use_qkv_bias", default=False),
        qk_norm=where(
            "qk_layernorm", norm("layer", per_head=True, eps="layer_norm_eps"), default=False
        ),
    ),
    "llama4_text": family(
        HEADS,
        WIDTH,
        BIASES,
        chunk_size=only("chunked_attention", required_or_none("attention_chunk_size")),
        kind=_kind_of_llama4,
        rope=_where_rotated(rope(pairs="interleaved")),
        qk_norm=_where_rotated(where("use_qk_norm", norm(weight=None, after_rope=True))),
        temperature=_where_rotated(
            where("attn_temperature_tuning", _temperature_of_llama4), rotated=False
        ),
    ),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"),
        family(
            BIASES,
            layout="transformers.HunYuan",
            qk_norm=norm(after_rope=True),
            head_dim=_width_of_hunyuan,
            rope=_rope_of_hunyuan,
            fixed={"use_qk_norm": True, "use_rotary_pos_emb": True, "use_cla": False},
            says_nothing={"add_classification_head"},
        ),
    ),
}
