"""Encoders of text, images and speech."""

from __future__ import annotations

from typing import Any

from mha_spec import GridBias, InputError, RelativeBias, Rope, SinusoidProducts
from parity.port.models.config import Config, Value
from parity.port.models.families.usual import MOST_BIAS, PLAIN, SOME_BIAS, family, stack
from parity.port.models.rules import (
    NOTHING,
    ConfigLayer,
    Family,
    Stack,
    first_of,
    key,
    optional,
    positioned,
    rope,
)

# ---- Text ----------------------------------------------------------------------------------------

DROPPED: dict[str, Any] = {
    "dropout": key("attention_probs_dropout_prob", default=0.1),
    "output_dropout": key("hidden_dropout_prob", default=0.1),
}
"""Dropout by default."""

UNDROPPED: dict[str, Any] = {
    "dropout": key("attention_probs_dropout_prob", default=0.0),
    "output_dropout": key("hidden_dropout_prob", default=0.0),
}
"""No dropout by default."""

UNDROPPED_SCORES: dict[str, Any] = {"dropout": UNDROPPED["dropout"]}
"""No dropout of attention weights by default."""


def is_decoder(config: Config) -> bool:
    """Return whether a model that may be either is a decoder."""
    value: bool = config.read("is_decoder", default=False).value
    return value


BERT: dict[str, Any] = {
    **PLAIN,
    **DROPPED,
    "path": "encoder.layer.{i}.attention",
    "layout": "transformers.BERT",
    "is_causal": is_decoder,
}
ABSOLUTE = {"position_embedding_type": "absolute"}
"""Models with any other value have scores that depend on distance."""


def _window_of_modernbert(layer: ConfigLayer) -> Value:
    """Return the window: half before and half after a token, plus its own position."""
    whole = layer.config.read("local_attention", default=128)
    if layer.kind != "sliding_attention":
        return NOTHING
    return Value(whole.value // 2 + 1, f"{whole.origin} // 2 + 1")


OF_BERT = {"ln_before_adapter", "pooler_num_attention_heads", "pooler_size_per_head"}
LIKE_BERT = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "electra",
    "ernie",
    "data2vec-text",
    "xlm-roberta-xl",
    "xmod",
    "bert-generation",
    "roc_bert",
    "megatron-bert",
    "roberta-prelayernorm",
)

OF_TABLES = {"aggregation_temperature", "reset_position_index_per_cell"}
PARTS_LIKE_BERT = (
    "align_text_model",
    "bridgetower_text_model",
    "chinese_clip_text_model",
    "clap_text_model",
    "dpr",
    "markuplm",
    "tapas",
    "visual_bert",
)

OF_MODERNBERT: dict[str, Any] = {
    **PLAIN,
    "path": "layers.{i}.attn",
    "kind": first_of(3, "global_attn_every_n_layers"),
    "qkv_bias": SOME_BIAS,
    "out_bias": SOME_BIAS,
    "rope": rope(
        theta=160_000.0, local_theta=10_000.0, names=("global_rope_theta", "local_rope_theta")
    ),
    "output_dropout": key("attention_dropout", default=0.0),
}
"""Fields shared by encoder and decoder."""

TEXT: dict[str, Family] = {
    **dict.fromkeys(
        LIKE_BERT,
        family(BERT, fixed=ABSOLUTE, says_nothing=OF_BERT),
    ),
    **dict.fromkeys(
        ("layoutlm", "splinter"),
        family(BERT, is_causal=False, fixed=ABSOLUTE, says_nothing={"max_2d_position_embeddings"}),
    ),
    **dict.fromkeys(
        PARTS_LIKE_BERT,
        family(
            BERT, is_causal=False, fixed={**ABSOLUTE, "is_decoder": False}, says_nothing=OF_TABLES
        ),
    ),
    "altclip_text_model": family(
        BERT, UNDROPPED_SCORES, is_causal=False, path="encoder.layers.{i}.attention"
    ),
    "rembert": family(BERT, UNDROPPED),
    "esm": family(BERT, rope=positioned("rotary", rope(theta=1e4), without=("absolute",))),
    "roformer": family(
        BERT,
        rope=Rope(pairs="interleaved"),
        fixed={"rotary_value": False},
        says_nothing={"embedding_size"},
    ),
    "nomic_bert": family(
        PLAIN,
        path="encoder.layers.{i}.attn",
        layout="transformers.MPT",
        head_dim=optional("head_dim"),
        qkv_bias=False,
        out_bias=False,
        rope=rope(),
        dropout=key("attention_probs_dropout_prob", default=0.0),
    ),
    "gte": family(
        PLAIN,
        path="encoder.layer.{i}.attention",
        layout="transformers.Phi3",
        head_dim=optional("head_dim"),
        rope=rope(),
        dropout=key("attention_probs_dropout_prob", default=0.0),
    ),
    "jina_embeddings_v3": family(
        PLAIN,
        path="encoder.layers.{i}.mixer",
        layout="transformers.MPT",
        head_dim=optional("head_dim"),
        rope=rope(),
        dropout=key("attention_probs_dropout_prob", default=0.1),
    ),
    "distilbert": family(
        PLAIN,
        path="transformer.layer.{i}.attention",
        layout="transformers.DistilBERT",
        count=("n_layers", "num_hidden_layers"),
        d_model=key("dim", "hidden_size"),
        num_heads=key("n_heads", "num_attention_heads"),
        dropout=key("attention_dropout", default=0.1),
    ),
    "albert": family(
        BERT,
        UNDROPPED,
        path="encoder.albert_layer_groups.0.albert_layers.0.attention",
        layout="transformers.ALBERT",
        is_causal=False,
        fixed={**ABSOLUTE, "num_hidden_groups": 1, "inner_group_num": 1},
        says_nothing={"down_scale_factor"},
    ),
    "mpnet": family(
        BERT,
        layout="transformers.MPNet",
        shared={"relative_attention_bias.weight": "encoder.relative_attention_bias.weight"},
        is_causal=False,
        relative_bias=RelativeBias(),
        fixed={"relative_attention_num_buckets": 32},  # its module supports no other
    ),
    "modernbert": family(
        OF_MODERNBERT,
        layout="transformers.ModernBERT",
        window_size=_window_of_modernbert,
        fixed=ABSOLUTE,
        says_nothing={"norm_bias", "decoder_bias", "classifier_bias", "deterministic_flash_attn"},
    ),
}

# ---- Images --------------------------------------------------------------------------------------

VIT: dict[str, Any] = {
    **PLAIN,
    "path": "encoder.layer.{i}.attention",
    "layout": "transformers.ViT",
    "head_dim": optional("head_dim"),
    "qkv_bias": key("qkv_bias", default=True),
    "dropout": key("attention_probs_dropout_prob", default=0.0),
}
CLIP: dict[str, Any] = {**PLAIN, "dropout": key("attention_dropout", default=0.0)}

OF_GRID = "attention.relative_position_bias.relative_position_bias_table"


def _grid_of_beit(layer: ConfigLayer) -> Value:
    """Return the grid bias of each layer, or of all; with both, two tables would be added."""
    own, common = "use_relative_position_bias", "use_shared_relative_position_bias"
    has_own = layer.config.read(own, default=False)
    has_common = layer.config.read(common, default=False)
    if not has_own.value and not has_common.value:
        return NOTHING
    if has_own.value and has_common.value:
        raise InputError(common, f"be False with {own}", {common: True})
    image = layer.config.read("image_size", default=224)
    patch = layer.config.read("patch_size", default=16)
    height = width = image.value
    if isinstance(image.value, tuple | list):
        height, width = image.value
    grid = GridBias(height // patch.value, width // patch.value, class_token=True)
    reason = has_own if has_own.value else has_common
    return Value.derived(grid, reason, image, patch)


AIMV2: dict[str, Any] = {
    **CLIP,
    "path": "encoder.layers.{i}.attention",
    "qkv_bias": key("qkv_bias", default=False),
    "out_bias": key("qkv_bias", default=False),
}

LIKE_VIT = (
    "vit",
    "deit",
    "dinov2",
    "dinov2_with_registers",
    "vit_msn",
    "ijepa",
    "yolos",
    "audio-spectrogram-transformer",
    "flava_image_model",
    "flava_text_model",
    "flava_multimodal_model",
    "pixio",
)
SIZES_OF_VIT = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}
"""Defaults of configurations that are parts of a model."""
LIKE_CLIP = (
    "chinese_clip_vision_model",
    "siglip2_text_model",
    "siglip2_vision_model",
    "altclip_vision_model",
    "clipseg_vision_model",
    "git_vision_model",
    "idefics2_vision",
    "idefics3_vision",
    "smolvlm_vision",
    "kosmos_2_vision_model",
    "metaclip_2_vision_model",
    "owlvit_vision_model",
    "owlv2_vision_model",
    "phi4_multimodal_vision",
)
TEXT_OF_CLIP = (
    "clipseg_text_model",
    "groupvit_text_model",
    "metaclip_2_text_model",
    "owlvit_text_model",
    "owlv2_text_model",
    "xclip_text_model",
)

IMAGES: dict[str, Family] = {
    **dict.fromkeys(
        LIKE_VIT,
        family(VIT, says_nothing={"use_mid_position_embeddings"}),
    ),
    **dict.fromkeys(
        LIKE_CLIP,
        family(CLIP, says_nothing={"vision_use_head"}),
    ),
    **dict.fromkeys(
        ("clip_vision_model", "siglip_vision_model", "siglip_text_model"),
        family(CLIP, says_nothing={"vision_use_head"}, defaults=SIZES_OF_VIT),
    ),
    **dict.fromkeys(
        ("beit", "data2vec-vision"),
        family(
            VIT,
            qkv_bias=(True, False, True),
            shared={OF_GRID: "encoder.relative_position_bias.relative_position_bias_table"},
            relative_bias=_grid_of_beit,
            says_nothing={
                "use_absolute_position_embeddings",
                "layer_scale_init_value",
                "use_auxiliary_head",
            },
        ),
    ),
    **dict.fromkeys(
        ("aimv2_vision_model", "ovis2_vision"), family(AIMV2, says_nothing={"use_head"})
    ),
    "aimv2_text_model": family(AIMV2, is_causal=True),
    **dict.fromkeys(TEXT_OF_CLIP, family(CLIP, is_causal=True)),
    "clip_text_model": family(
        CLIP,
        is_causal=True,
        defaults={**SIZES_OF_VIT, "hidden_size": 512, "num_attention_heads": 8},
    ),
}

# ---- Speech --------------------------------------------------------------------------------------

PARAKEET: dict[str, Any] = {
    **PLAIN,
    "path": "layers.{i}.self_attn",
    "layout": "transformers.Parakeet",
    "num_kv_heads": optional("num_key_value_heads"),
    "qkv_bias": MOST_BIAS,
    "out_bias": MOST_BIAS,
    "relative_products": SinusoidProducts(),
    "dropout": key("attention_dropout", default=0.1),
}
OF_CONFORMER = {
    "conv_bias",
    "convolution_bias",
    "contrastive_logits_temperature",
    "dropout_positions",
    "encoder_positional_dropout_rate",
    "decoder_positional_dropout_rate",
    "max_source_positions",
    "positionwise_conv_kernel_size",
    "rotary_embedding_base",
    "scale_input",
}
"""Keys of these families that are irrelevant for attention layers."""
CONFORMER: dict[str, Any] = {
    **PLAIN,
    "layout": "transformers.Conformer",
    "relative_products": SinusoidProducts(),
}


def _stack_of_fastspeech(part: str) -> Stack:
    return stack(
        CONFORMER,
        part=part,
        count=(f"{part}_layers",),
        path=f"{part}.conformer_layers.{{i}}.self_attn",
        num_heads=key(f"{part}_num_attention_heads"),
        dropout=key(f"{part}_attention_dropout_rate", default=0.2),
    )


SPEECH: dict[str, Family] = {
    "parakeet_encoder": family(PARAKEET, says_nothing=OF_CONFORMER),
    "wav2vec2-conformer": family(
        CONFORMER,
        dropout=key("attention_dropout", default=0.1),
        fixed={"position_embeddings_type": "relative"},
        says_nothing=OF_CONFORMER,
    ),
    "fastspeech2_conformer": Family(
        (_stack_of_fastspeech("encoder"), _stack_of_fastspeech("decoder")),
        frozenset(OF_CONFORMER),
    ),
    **dict.fromkeys(
        ("wav2vec2", "hubert", "unispeech", "unispeech-sat", "data2vec-audio", "sew"),
        family(
            PLAIN,
            path="encoder.layers.{i}.attention",
            dropout=key("attention_dropout", default=0.1),
            says_nothing={"conv_bias", "contrastive_logits_temperature"},
        ),
    ),
    **dict.fromkeys(
        (
            "qwen2_audio_encoder",
            "voxtral_encoder",
            "audioflamingo3_encoder",
            "moss_transcribe_diarize_audio",
        ),
        family(
            PLAIN,
            path="layers.{i}.self_attn",
            count=("encoder_layers", "num_hidden_layers"),
            d_model=key("d_model", "hidden_size"),
            num_heads=key("encoder_attention_heads", "num_attention_heads"),
            qkv_bias=(True, False, True),
            dropout=key("attention_dropout", default=0.0),
            says_nothing={"scale_embedding", "max_source_positions"},
        ),
    ),
}
"""Speech: Wav2Vec2 and its successors, and Whisper's encoder alone."""

ENCODERS: dict[str, Family] = {**TEXT, **IMAGES, **SPEECH}
