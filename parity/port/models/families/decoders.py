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
from parity.port.models.rules import (
    NOTHING,
    SLIDING,
    ConfigLayer,
    Family,
    Rule,
    asked,
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
    rope,
    shares_keys,
    tempered_by_rope,
    told_kind,
    where,
)


def _qwen(config: Config, index: int) -> str:
    uses = config.read("use_sliding_window", default=False).value
    return (
        "sliding_attention"
        if uses and index >= config.read("max_window_layers").value
        else "full_attention"
    )


def _rotates(config: Config, index: int) -> Value:
    """Return whether a layer has RoPE: the last of each period has none."""
    told, period = config.find("no_rope_layers"), config.find("no_rope_layer_interval")
    if told is None or not told.value:
        return Value(
            not is_last(index, period, 4),
            period.origin if period else "every fourth: this family's default",
        )
    if index >= len(told.value):
        raise InputError("no_rope_layers", "be one for each layer", str(len(told.value)))
    return Value(bool(told.value[index]), f"no_rope_layers[{index}]")


def _where_rotated(rule: Rule, *, rotated: bool = True) -> Rule:
    """Return a rule for layers with RoPE, or those without; its keys also count as read in the
    others.
    """

    def in_some(place: ConfigLayer) -> Value:
        rotates, found = _rotates(place.config, place.layer), rule(place)
        return (
            Value(found.value, f"{found.origin}, {rotates.origin}")
            if rotates.value == rotated
            else NOTHING
        )

    return in_some


def _kind_of_smollm3(config: Config, index: int) -> str:
    has_window = (
        config.read("use_sliding_window", default=False).value and "sliding_window" in config
    )
    return (
        "sliding_attention"
        if has_window and not _rotates(config, index).value
        else "full_attention"
    )


def _exaone4(place: ConfigLayer) -> Value:
    """If some layers have windows, only these have RoPE."""
    window, turned = place.config.find("sliding_window"), rope()(place)
    rotates = window is None or place.kind == "sliding_attention"
    return Value(
        turned.value if rotates else None, turned.origin + (f", {window.origin}" if window else "")
    )


def _kind_of_exaone4(config: Config, index: int) -> str:
    """Return the kind of a layer like `every`, in models with windows."""
    if config.asked("sliding_window") is None:
        return "full_attention"
    return every(4, "sliding_window_pattern")(config, index)


def _kind_of_ministral(config: Config, index: int) -> str:
    return "full_attention" if config.asked("sliding_window") is None else "sliding_attention"


def _temperature_of_llama4(place: ConfigLayer) -> Value:
    length, scale = (place.config.read(name) for name in ("floor_scale", "attn_scale"))
    return Value(
        Temperature(length.value, scale.value, first_position=1), f"{length.origin}, {scale.origin}"
    )


def _kind_of_minimax_m2(config: Config, index: int) -> str:
    """Return the kind of a layer from numbers: 1 is full attention."""
    told = config.find("attn_type_list")
    if told is None:
        return "full_attention"
    if index >= len(told.value):
        raise InputError("attn_type_list", "be one for each layer", str(len(told.value)))
    return "full_attention" if told.value[index] == 1 else f"attn_type_list {told.value[index]}"


def _of_gemma4(name: str, of_full: str) -> Rule:
    """Return a size specific to layers without a window, from one value for all or one per
    layer.
    """

    def rule(place: ConfigLayer) -> Value:
        usual, shared = place.config.read(name), place.config.find("attention_k_eq_v")
        each, own = place.config.find("per_layer_config"), place.config.find(of_full)
        if place.kind != "full_attention":
            return usual
        if each is not None:
            of_layer = each.value.get(place.layer, each.value.get(str(place.layer), {}))
            where = f"{each.origin}.{place.layer}"
            if not isinstance(of_layer, Mapping):
                raise InputError(where, "hold values by name", {where: of_layer})
            if name not in of_layer:
                return usual
            check_kind(name, of_layer[name], f"{where}.")
            return Value(of_layer[name], f"{where}.{name}")
        if name == "num_key_value_heads":
            return own if own is not None and shared is not None and shared.value else usual
        return place.config.read(of_full)

    return rule


def _has_one_projection(place: ConfigLayer) -> bool:
    """Return whether a layer of Gemma 4 has one projection for keys and values."""
    told = place.config.find("attention_k_eq_v")
    return (
        kv_source(place) is None
        and place.kind == "full_attention"
        and told is not None
        and bool(told.value)
    )


def _kind_of_gemma4(config: Config, index: int) -> str:
    """Return the kind of a layer like `every`, except that the very last layer has no window."""
    is_end = index + 1 == config.read("num_hidden_layers").value
    return "full_attention" if is_end else every(6)(config, index)


def _rope_of_each_layer(place: ConfigLayer) -> Value:
    """Return the RoPE of a layer from a base for each, 0 for no RoPE; by default one base for
    all.
    """
    bases, turned = place.config.find("layer_rope_theta"), rope()(place)
    if bases is None:
        return turned
    if place.layer >= len(bases.value):
        raise InputError("layer_rope_theta", "be one for each layer", str(len(bases.value)))
    base = bases.value[place.layer]
    origin = f"{bases.origin}[{place.layer}], {turned.origin}"
    return Value(dataclasses.replace(turned.value, theta=base) if base else None, origin)


def _width_of_hunyuan(place: ConfigLayer) -> Value:
    older = place.config.find("attention_head_dim")
    if older is not None and older.value != head_dim(place):  # transformers reads the other key
        raise InputError(
            "attention_head_dim", f"be head_dim={head_dim(place)}", {older.origin: older.value}
        )
    return place.config.find("head_dim") or NOTHING


def _rope_of_hunyuan(place: ConfigLayer) -> Value:
    """Return the RoPE of HunYuan: with an `alpha`, "dynamic" is plain RoPE with another base, for
    any length.
    """
    own = [name for name in ("rope_parameters", "rope_scaling") if name in place.config]
    alpha = place.config.section(own[0]).find("alpha") if own else None
    if alpha is None:
        return rope()(place)
    values, size = place.config.section(own[0]), head_dim(place)
    kind = values.find("rope_type", "type")
    if kind is None or kind.value != "dynamic":
        raise InputError("alpha", "be that of rope_type dynamic", repr(kind and kind.value))
    values.find(
        "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"
    )  # which transformers then ignores
    base = values.find("rope_theta") or place.config.read("rope_theta")
    theta = base.value * alpha.value ** (size / (size - 2))
    return Value(Rope(theta), f"{base.origin} * {alpha.origin} ** (H / (H - 2))")


def _scale_of_hyperclovax(place: ConfigLayer) -> Value:
    told = place.config.find("attention_multiplier")
    return told or Value(head_dim(place) ** -0.5, "1 / sqrt(H): attention_multiplier is not set")


def _window_of_modernbert_decoder(place: ConfigLayer) -> Value:
    whole, half = (
        place.config.read("local_attention", default=128),
        place.config.find("sliding_window"),
    )
    if (
        half is not None and half.value != whole.value // 2
    ):  # transformers derives one from the other unless both are present
        raise InputError(
            "sliding_window",
            "be local_attention // 2",
            f"sliding_window={half.value} and local_attention={whole.value} ({whole.origin})",
        )
    return (
        Value(whole.value // 2, f"{whole.origin} // 2")
        if place.kind == "sliding_attention"
        else NOTHING
    )


def _rotated_of_cohere2_moe(place: ConfigLayer) -> Value:
    """Return RoPE for layers with a window, and for those of the dense prefix if all of it has full
    attention.
    """
    found, period = (
        rope(pairs="interleaved")(place),
        place.config.read("prefix_dense_sliding_window_pattern", default=1),
    )
    dense, prefix = (
        place.config.find("mlp_layer_types"),
        place.config.read("first_k_dense_replace", default=0),
    )
    if dense is not None and place.layer >= len(dense.value):
        raise InputError("mlp_layer_types", "be one for each layer", str(len(dense.value)))
    is_dense = dense.value[place.layer] == "dense" if dense else place.layer < prefix.value
    if place.kind == "sliding_attention":
        return found
    return (
        Value(found.value, f"{found.origin}, {period.origin}")
        if is_dense and period.value == 1
        else NOTHING
    )


def _kind_of_cohere2_moe(config: Config, index: int) -> str:
    """Return the kind of a layer like `every`, separately for the dense prefix and the other
    layers.
    """
    prefix = config.read("first_k_dense_replace", default=0).value
    if index < prefix:
        return every(1, "prefix_dense_sliding_window_pattern")(config, index)
    return every(4, "sliding_window_pattern")(config, index - prefix)


def _heads_of_mimo(place: ConfigLayer) -> Value:
    """Return the key/value heads: twice as many in layers with a window."""
    found = place.config.read("num_key_value_heads")
    is_local = place.kind == "sliding_attention"
    return Value(2 * found.value, f"2 * {found.origin}, with a window") if is_local else found


def _kind_of_mimo(config: Config, index: int) -> str:
    """Return the kind of a layer like `every`, except that the very first layer has no window."""
    return every(6)(config, index) if index else "full_attention"


OF_LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
OF_MISTRAL = {**OF_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096}
OF_GEMMA = {
    "hidden_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
}
OF_GEMMA |= {"head_dim": 256}
OF_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
}
OF_GEMMA3 |= {
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
        HEADS, window_size=asked("sliding_window"), rope=rope(theta=1e4), defaults=OF_MISTRAL
    ),
    "mixtral": family(HEADS, window_size=optional("sliding_window")),
    "ministral3": family(
        HEADS, WIDTH, window_size=optional("sliding_window"), temperature=tempered_by_rope
    ),
    "qwen2": family(HEADS, qkv_bias=True, window_size=SLIDING, kind=_qwen),
    "qwen2_moe": family(
        HEADS, qkv_bias=key("qkv_bias", default=True), window_size=SLIDING, kind=_qwen
    ),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"),
        family(
            HEADS, rope=rope(sections=(16, 24, 24)), qkv_bias=True, window_size=SLIDING, kind=_qwen
        ),
    ),
    "qwen3": family(HEADS, WIDTH, BIASES, qk_norm=norm(), window_size=SLIDING, kind=_qwen),
    "qwen3_moe": family(
        HEADS,
        BIASES,
        qk_norm=norm(),
        window_size=where("use_sliding_window", asked("sliding_window"), default=False),
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
        kind=told_kind,
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
            soft_cap=asked("attn_logit_softcapping"),
            window_size=only("sliding_attention", asked("sliding_window", "sliding_window_size")),
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
        value_head_dim=asked("v_head_dim"),
        qkv_bias=SOME_BIAS,
        window_size=SLIDING,
        sinks=lambda place: Value(
            place.kind == "sliding_attention", "with a window: this family's rule"
        ),
        kind=_kind_of_mimo,
        defaults={"attention_value_scale": 0.707},
        fixed={"attention_value_scale": 1.0},
    ),
    "cohere2_moe": family(
        HEADS,
        WIDTH,
        BIASES,
        window_size=SLIDING,
        rope=_rotated_of_cohere2_moe,
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
        HEADS, WIDTH, qk_norm=norm(), window_size=SLIDING, rope=_exaone4, kind=every(5)
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
            rope=_exaone4,
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
        chunk_size=only("chunked_attention", asked("attention_chunk_size")),
        kind=lambda config, index: (
            "chunked_attention" if _rotates(config, index).value else "full_attention"
        ),
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
