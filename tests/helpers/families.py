"""Families of transformers, with the options of a small model of each."""

import torch

from helpers.released_models import LEFT_OUT, Model

BERT = {"output": "output.dense"}
VIT = {"image_size": 6, "patch_size": 2}
CONV = {
    "conv_dim": (8, 8),
    "conv_stride": (5, 40),
    "conv_kernel": (10, 40),
    "num_conv_pos_embeddings": 4,
}
CONV |= {"num_conv_pos_embedding_groups": 2}
TEXT = {
    **{
        name: Model(name, **BERT)
        for name in ("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie")
    },
    **{
        name: Model(name, **BERT) for name in ("layoutlm", "rembert", "roc_bert", "bert-generation")
    },
    **{
        name: Model(name, input="self", **BERT)
        for name in ("megatron-bert", "roberta-prelayernorm", "esm")
    },
    "splinter": Model("splinter", {"question_token_id": 3}, **BERT),
    "esm, RoPE": Model("esm", {"position_embedding_type": "rotary"}, input="self", **BERT),
    "roformer": Model("roformer", **BERT),
    "nomic_bert": Model("nomic_bert", {"head_dim": 12}, module={"": "layers.{i}.self_attn"}),
    "gte": Model("gte", module={"": "layers.{i}.self_attn"}),
    "bert, decoder": Model("bert", {"is_decoder": True}, **BERT),
    "data2vec-text": Model("data2vec-text", **BERT),
    "xlm-roberta-xl": Model("xlm-roberta-xl", input="self", **BERT),
    "xmod": Model("xmod", {"default_language": "en_XX"}, **BERT),
    "distilbert": Model("distilbert", {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 24}),
    "albert": Model("albert", {"embedding_size": 8}, output="dense"),
    "mpnet": Model("mpnet", {"relative_attention_num_buckets": 32}, output="attn"),
    "modernbert": Model(
        "modernbert", {"num_hidden_layers": 4, "local_attention": 6, "attention_bias": True}
    ),
}
OF_CLIP = {  # the text parts of models like CLIP
    "align_text_model": "AlignTextModel",
    "altclip_text_model": "altclip.AltRobertaModel",
    "bridgetower_text_model": "bridgetower.BridgeTowerTextModel",
    "chinese_clip_text_model": "ChineseCLIPTextModel",
    "clap_text_model": "ClapTextModel",
}
TEXT |= {name: Model(name, class_name=kind, **BERT) for name, kind in OF_CLIP.items()}
TEXT |= {name: Model(name, **BERT) for name in ("dpr", "markuplm", "tapas", "visual_bert")}
TEXT["jina_embeddings_v3"] = Model("jina_embeddings_v3", module={"": "layers.{i}.self_attn"})
IMAGES = {
    **{
        name: Model(name, {**VIT, "qkv_bias": False}, "pixels", module={"": "layers.{i}.attention"})
        for name in ("vit", "deit", "vit_msn", "ijepa")
    },
    **{
        name: Model(name, {**VIT, "qkv_bias": False}, "pixels", module={"": "layer.{i}.attention"})
        for name in ("dinov2", "dinov2_with_registers")
    },
    **{name: Model(name, VIT, "pixels") for name in ("clip_vision_model", "siglip_vision_model")},
    **{
        name: Model(name, VIT, "pixels")
        for name in ("chinese_clip_vision_model", "aimv2_vision_model")
    },
    "beit": Model("beit", VIT, "pixels", module={"": "layers.{i}.attention"}),
    "beit, a grid for each": Model(
        "beit",
        {**VIT, "use_relative_position_bias": True},
        "pixels",
        module={"": "layers.{i}.attention"},
    ),
    "beit, one grid": Model(
        "beit",
        {**VIT, "use_shared_relative_position_bias": True},
        "pixels",
        module={"": "layers.{i}.attention"},
    ),
    "data2vec-vision": Model(
        "data2vec-vision", {**VIT, "use_relative_position_bias": True}, "pixels", **BERT
    ),
    "yolos": Model(
        "yolos",
        {"image_size": [6, 6], "patch_size": 2, "qkv_bias": False},
        "pixels",
        output="output.dense",
    ),
    "audio-spectrogram-transformer": Model(
        "audio-spectrogram-transformer",
        {
            "num_mel_bins": 16,
            "max_length": 32,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
        },
        "bins",
        module={"": "layers.{i}.attention"},
    ),
    "clip_text_model": Model("clip_text_model"),
    "siglip_text_model": Model("siglip_text_model", class_name="SiglipTextModel"),
}
IMAGES |= {
    name: Model(name, class_name=kind)
    for name, kind in {
        "clipseg_text_model": "CLIPSegTextModel",
        "groupvit_text_model": "GroupViTTextModel",
        "metaclip_2_text_model": "MetaClip2TextModel",
        "owlvit_text_model": "OwlViTTextModel",
        "owlv2_text_model": "Owlv2TextModel",
        "siglip2_text_model": "Siglip2TextModel",
        "xclip_text_model": "XCLIPTextModel",
    }.items()
}
IMAGES |= {
    name: Model(name, VIT, "pixels", class_name=kind)
    for name, kind in {
        "altclip_vision_model": "AltCLIPVisionModel",
        "clipseg_vision_model": "CLIPSegVisionModel",
        "git_vision_model": "GitVisionModel",
        "idefics2_vision": "idefics2.Idefics2VisionTransformer",
        "idefics3_vision": "AutoModel",
        "kosmos_2_vision_model": "kosmos2.Kosmos2VisionModel",
        "metaclip_2_vision_model": "MetaClip2VisionModel",
        "ovis2_vision": "ovis2.Ovis2VisionModel",
        "owlvit_vision_model": "OwlViTVisionModel",
        "owlv2_vision_model": "Owlv2VisionModel",
        "phi4_multimodal_vision": "Phi4MultimodalVisionModel",
        "smolvlm_vision": "AutoModel",
    }.items()
}
IMAGES |= {
    "aimv2_text_model": Model(
        "aimv2_text_model", {"qkv_bias": True}, "masked", class_name="Aimv2TextModel"
    ),
    "siglip2_vision_model": Model(
        "siglip2_vision_model", {"patch_size": 2, "num_patches": 16}, "patches"
    ),
    "pixio": Model(
        "pixio", {**VIT, "qkv_bias": False}, "pixels", module={"": "layers.{i}.attention"}
    ),
    "flava_image_model": Model(
        "flava_image_model", {**VIT, "qkv_bias": False}, "pixels", class_name="FlavaImageModel"
    ),
    "flava_text_model": Model("flava_text_model", {"qkv_bias": False}, class_name="FlavaTextModel"),
    "flava_multimodal_model": Model(
        "flava_multimodal_model", {"qkv_bias": False}, "states", class_name="FlavaMultimodalModel"
    ),
}
SPEECH = {
    name: Model(name, CONV, "wave")
    for name in ("wav2vec2", "hubert", "unispeech", "unispeech-sat", "data2vec-audio")
}
SPEECH["wav2vec2-conformer"] = Model("wav2vec2-conformer", CONV, "wave")
SUBSAMPLED = {"num_mel_bins": 16, "subsampling_conv_channels": 8, "attention_bias": False}
SPEECH["parakeet_encoder"] = Model("parakeet_encoder", SUBSAMPLED, "frames alone")
SPEECH["sew"] = Model("sew", {**CONV, "squeeze_factor": 1}, "wave")
NAMED_OTHERWISE = dict.fromkeys(
    ("hidden_size", "num_attention_heads", "num_hidden_layers"), LEFT_OUT
)
CONFORMERS = {
    **NAMED_OTHERWISE,
    "hidden_size": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "num_mel_bins": 8,
}
CONFORMERS |= {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 2}
CONFORMERS["speaking_speed"] = 1e-9  # one frame of each token
SPEECH["fastspeech2_conformer"] = Model(
    "fastspeech2_conformer",
    CONFORMERS,
    class_name="FastSpeech2ConformerModel",
    dtype=torch.float32,
)
AUDIO = {
    **NAMED_OTHERWISE,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "d_model": 32,
    "encoder_ffn_dim": 24,
}
AUDIO |= {"num_mel_bins": 8, "max_source_positions": 10}
SPEECH |= {
    name: Model(name, AUDIO, inputs)
    for name, inputs in {
        "audioflamingo3_encoder": "masked mel alone",
        "moss_transcribe_diarize_audio": "mel alone",
        "qwen2_audio_encoder": "mel alone",
        "voxtral_encoder": "mel alone",
    }.items()
}
BART = {
    "hidden_size": LEFT_OUT,
    "num_attention_heads": LEFT_OUT,
    "num_hidden_layers": LEFT_OUT,
    "d_model": 32,
}
BART |= {
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
}
BART |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 1}
T5 = {
    "hidden_size": LEFT_OUT,
    "num_attention_heads": LEFT_OUT,
    "num_hidden_layers": LEFT_OUT,
    "d_model": 32,
    "d_ff": 24,
}
T5 |= {"d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 12}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}
ENCODER_DECODERS = {
    **{
        name: Model(name, BART, "pairs")
        for name in (
            "bart",
            "mbart",
            "pegasus",
            "marian",
            "blenderbot",
            "blenderbot-small",
            "m2m_100",
            "plbart",
            "mvp",
        )
    },
    "speech_to_text": Model(
        "speech_to_text", {**BART, "conv_channels": 8, "input_feat_per_channel": 8}, "frames"
    ),
    "whisper": Model("whisper", {**BART, "num_mel_bins": 8, "max_source_positions": 10}, "mel"),
    "moonshine": Model(
        "moonshine",
        {
            **NAMED_OTHERWISE,
            "hidden_size": 80,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 1,
        }
        | {
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "attention_bias": True,
        },
        "waves",
    ),
    **{name: Model(name, T5, "pairs") for name in ("t5", "mt5", "umt5")},
    "switch_transformers": Model(
        "switch_transformers", {**T5, "num_experts": 2, "num_sparse_encoder_layers": 1}, "pairs"
    ),
    "nllb-moe": Model(
        "nllb-moe",
        {**BART, "num_experts": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 1},
        "pairs",
    ),
}
GPT = dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers"), LEFT_OUT)
GPT |= {"n_embd": 32, "n_head": 4, "n_layer": 2}
LIKE_GPT = {
    "gpt2": Model("gpt2", {**GPT, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2, unscaled": Model("gpt2", {**GPT, "scale_attn_weights": False}),
    "gpt-sw3": Model("gpt-sw3", GPT),
    "imagegpt": Model("imagegpt", {**GPT, "scale_attn_by_inverse_layer_idx": True}),
    "openai-gpt": Model("openai-gpt", GPT),
    "gpt_neo": Model(
        "gpt_neo",
        {
            "num_attention_heads": LEFT_OUT,
            "num_hidden_layers": LEFT_OUT,
            "num_heads": 4,
            "num_layers": 3,
        }
        | {"attention_types": [[["global"], 1], [["local"], 2]], "window_size": 3},
    ),
    "gpt_neox": Model("gpt_neox", {"rotary_pct": 0.5, "attention_bias": False}),
    "gpt_neox_japanese": Model("gpt_neox_japanese", {"intermediate_multiple_size": 1}),
    "gptj": Model("gptj", {**GPT, "rotary_dim": 4}),
    "codegen": Model("codegen", {**GPT, "rotary_dim": 4}),
    "gpt_bigcode": Model("gpt_bigcode", GPT),
    "gpt_bigcode, heads": Model(
        "gpt_bigcode", {**GPT, "multi_query": False, "scale_attn_weights": False}
    ),
    "bloom": Model("bloom", {"num_attention_heads": LEFT_OUT, "n_head": 4}, output="dense"),
    "persimmon": Model("persimmon", {"qk_layernorm": True}),
    "falcon, one head": Model("falcon", {"multi_query": True, "bias": True}),
    "falcon, groups": Model("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    # Its eager attention adds the slopes again, after the model has added them to the mask.
    "falcon, ALiBi": Model("falcon", {"alibi": True, "multi_query": False}, attention="sdpa"),
    "mpt": Model(
        "mpt",
        dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers"), LEFT_OUT)
        | {
            "d_model": 48,
            "n_heads": 6,
            "n_layers": 2,
            "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.3},
        },
    ),
    "dbrx": Model(
        "dbrx",
        {**NAMED_OTHERWISE, "d_model": 32, "n_heads": 4, "n_layers": 2}
        | {"attn_config": {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 1e4}}
        | {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 2, "moe_top_k": 1}},
    ),
    "opt": Model("opt", {"enable_bias": False, "ffn_dim": 24}),
    "biogpt": Model("biogpt"),
    "xglm": Model(
        "xglm",
        dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers"), LEFT_OUT)
        | {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 24},
        dtype=torch.float32,
    ),
}
KV = {"num_key_value_heads": 2}
WIDE = {**KV, "head_dim": 16}
NORMED = {**WIDE, "rms_norm_eps": 0.01}
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
}
MOE |= {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
}
TWO = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
LATER = {"rope_type": "default", "rope_theta": 5e3}
HALF = {**LATER, "partial_rotary_factor": 0.5}
HALF_SECTIONS, SHORT_SECTIONS = ({**rope, "mrope_section": [2, 1, 1]} for rope in (HALF, LATER))
SECTIONS = {**LATER, "mrope_section": [4, 2, 2]}
OF_EACH = {
    "rope_parameters": {"sliding_attention": LATER, "full_attention": {**LATER, "rope_theta": 7e3}}
}
LIKE_LLAMA = {
    "bitnet": Model("bitnet", KV),
    "kosmos_2_text_model": Model(
        "kosmos_2_text_model",
        dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers"), LEFT_OUT)
        | {"embed_dim": 32, "layers": 2, "attention_heads": 4, "ffn_dim": 24},
        class_name="kosmos2.Kosmos2TextModel",
        dtype=torch.float32,
    ),
    "aria_text": Model("aria_text", {**WIDE, "attention_bias": True, "moe_num_experts": 4}),
    "eurobert": Model("eurobert", {**WIDE, "attention_bias": True}),
    "qwen2_5_vl_text": Model(
        "qwen2_5_vl_text", {**KV, "rope_parameters": SHORT_SECTIONS}, "positions"
    ),
    "qwen3_vl_moe_text": Model(
        "qwen3_vl_moe_text", {**NORMED, **MOE, "rope_parameters": SECTIONS}, "positions"
    ),
    "mellum": Model("mellum", {**NORMED, **MOE, **TWO, **OF_EACH}),
    "flint": Model("flint", {**NORMED, **MOE, **TWO}),
    "cwm": Model("cwm", {**WIDE, **TWO}),
    "vaultgemma": Model(
        "vaultgemma", {**WIDE, **TWO, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 3.0}
    ),
    "gemma4_text": Model("gemma4_text", {**NORMED, **TWO, "hidden_size_per_layer_input": 0}),
    "gemma4_text, one projection": Model(
        "gemma4_text",
        {**NORMED, **TWO, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
        | {"global_head_dim": 24, "num_global_key_value_heads": 1},
    ),
    "jais2": Model("jais2", {**WIDE, "attention_bias": False}),
    "solar_open": Model("solar_open", {**WIDE, **MOE, "attention_bias": True}),
    "phimoe": Model("phimoe", {**KV, **MOE, "attention_bias": True, "sliding_window": 3}),
    "minimax_m2": Model("minimax_m2", {**NORMED, **MOE, "rotary_dim": 8}),
    "hy_v3": Model("hy_v3", {**NORMED, **MOE, "attention_bias": True}),
    "exaone_moe": Model("exaone_moe", {**KV, **MOE, **TWO, "rms_norm_eps": 0.01}),
    "kolibri1": Model("kolibri1", {**NORMED, **MOE, **TWO}),
    "granitemoeshared": Model("granitemoeshared", {**KV, **MOE, "attention_multiplier": 0.2}),
    "granite_docling_text": Model("granite_docling_text", {**KV, "attention_multiplier": 0.2}),
    "flex_olmo": Model("flex_olmo", {**KV, **MOE, "attention_bias": True, "rms_norm_eps": 0.01}),
    "granite_swa": Model(
        "granite_swa", {**KV, **TWO, "layer_rope_theta": [7e3, 0], "attention_multiplier": 0.2}
    ),
    "granitemoe_swa": Model(
        "granitemoe_swa", {**KV, **MOE, **TWO, "layer_rope_theta": [0, 7e3], "attention_bias": True}
    ),
    "hyperclovax": Model(
        "hyperclovax", {**WIDE, "attention_multiplier": 0.2, "attention_bias": True}
    ),
    "ernie4_5_moe": Model(
        "ernie4_5_moe", {**KV, **MOE, "use_bias": True, "moe_num_experts": 4, "moe_k": 2}
    ),
    "glm4v_text": Model("glm4v_text", {**KV, "rope_parameters": SHORT_SECTIONS}, "positions"),
    "glm_ocr_text": Model("glm_ocr_text", {**WIDE, "rope_parameters": SECTIONS}, "positions"),
    "glm4v_moe_text": Model(
        "glm4v_moe_text",
        {**WIDE, **MOE, "attention_bias": False, "rope_parameters": HALF_SECTIONS},
        "positions",
    ),
    "glm_image_text": Model(
        "glm_image_text", {**WIDE, "rope_parameters": HALF_SECTIONS}, "positions"
    ),
    "modernbert-decoder": Model(
        "modernbert-decoder", {"num_hidden_layers": 4, "local_attention": 6, "attention_bias": True}
    ),
    "hunyuan_v1_moe": Model(
        "hunyuan_v1_moe", {**NORMED, **MOE, "attention_bias": True, "moe_topk": [2, 2]}
    ),
}
LIKE_LLAMA |= {
    "internlm3": Model("internlm3", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": Model("iquestcoder", {**WIDE, "attention_bias": True}),
    "csm_depth_decoder_model": Model(
        "csm_depth_decoder_model",
        {**WIDE, "attention_bias": True},
        class_name="CsmDepthDecoderModel",
    ),
    "higgs_audio_v2": Model("higgs_audio_v2", {**WIDE, "attention_bias": True}),
    "qwen2_5_omni_text": Model(
        "qwen2_5_omni_text",
        {**KV, "rope_parameters": SHORT_SECTIONS},
        "positions",
        class_name="Qwen2_5OmniThinkerTextModel",
    ),
    "paddleocr_vl_text": Model(
        "paddleocr_vl_text",
        {**WIDE, "use_bias": True, "rope_parameters": SECTIONS},
        "positions",
        class_name="PaddleOCRTextModel",
    ),
    "emu3_text_model": Model(
        "emu3_text_model", {**KV, "attention_bias": True}, class_name="Emu3TextModel"
    ),
    "qwen3_omni_moe_text": Model(
        "qwen3_omni_moe_text",
        {
            **KV,
            **MOE,
            "rms_norm_eps": 0.01,
            "attention_bias": True,
            "rope_parameters": SHORT_SECTIONS,
        },
        "positions",
        class_name="Qwen3OmniMoeThinkerTextModel",
    ),
    "granite4_vision_text": Model(
        "granite4_vision_text",
        {**KV, "attention_multiplier": 0.2},
        class_name="Granite4VisionTextModel",
    ),
    "gemma3n_text": Model(
        "gemma3n_text",
        {
            **NORMED,
            **TWO,
            **OF_EACH,
            "attention_bias": True,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
        }
        | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40},
    ),
    "gemma3n_text, shared": Model(
        "gemma3n_text",
        {**NORMED, **OF_EACH, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "laurel_rank": 4}
        | {
            "layer_types": [
                "full_attention",
                *["sliding_attention"] * 2,
                "full_attention",
                "sliding_attention",
            ]
        }
        | {
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": 40,
            "intermediate_size": [24] * 5,
        },
    ),
    "gemma4_text, shared": Model(
        "gemma4_text",
        {**NORMED, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "attention_k_eq_v": True}
        | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40}
        | {"layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"]},
    ),
    "mimo_v2_flash": Model(
        "mimo_v2_flash",
        {
            **WIDE,
            **MOE,
            **TWO,
            "v_head_dim": 12,
            "attention_bias": True,
            "attention_value_scale": 1.0,
        }
        | {
            "rope_parameters": {
                "sliding_attention": HALF,
                "full_attention": {**HALF, "rope_theta": 7e3},
            }
        },
    ),
    "cohere2_moe": Model(  # without a window, only layers of the dense prefix rotate
        "cohere2_moe",
        {**WIDE, **MOE, "attention_bias": True, "num_hidden_layers": 3, "sliding_window": 3}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
}
RANKS = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
WITH_LATENTS = {
    "axk1": Model(
        "axk1",
        {
            **RANKS,
            **MOE,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 4,
            "attention_bias": True,
        },
    ),
    "kimi_linear": Model(
        "kimi_linear",
        {**RANKS, **MOE, "num_key_value_heads": 4, "q_lora_rank": None}
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 2,
        },
    ),
    "longcat_flash": Model(
        "longcat_flash",
        {
            **RANKS,
            **MOE,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "num_hidden_layers": LEFT_OUT,
            "num_layers": 2,
        }
        | {"ffn_hidden_size": 24, "zero_expert_num": 2},
    ),
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
LINEAR |= {f"linear_{part}_{size}": 4 for part in ("num_key", "num_value") for size in ("heads",)}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
HYBRIDS = {
    "qwen3_5_text": Model(
        "qwen3_5_text",
        {**NORMED, **LINEAR, "rope_parameters": HALF_SECTIONS},
        "positions",
    ),
    "qwen3_5_moe_text": Model(
        "qwen3_5_moe_text",
        {**NORMED, **LINEAR, **MOE, "attention_bias": True, "rope_parameters": HALF_SECTIONS},
        "positions",
    ),
    "qwen3_next": Model("qwen3_next", {**NORMED, **LINEAR, **MOE, "attention_bias": True}),
    "minimax": Model("minimax", {**WIDE, **MOE, "layer_types": LINEAR["layer_types"]}),
    "lfm2": Model("lfm2", {**KV, "full_attn_idxs": [1], "norm_eps": 0.01}),
    "lfm2_moe": Model(
        "lfm2_moe", {**KV, **MOE, "layer_types": ["conv", "full_attention"], "norm_eps": 0.01}
    ),
    "jamba": Model(
        "jamba", {**KV, **MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}
    ),
    "bamba": Model("bamba", {**KV, **MAMBA, "attn_layer_indices": [1], "attention_bias": True}),
    "granitemoehybrid": Model(
        "granitemoehybrid",
        {**KV, **MAMBA, **MOE, "layer_types": LINEAR["layer_types"], "attention_multiplier": 0.2},
    ),
    "granitemoehybrid, RoPE": Model(
        "granitemoehybrid",
        {
            **KV,
            **MAMBA,
            **MOE,
            "layer_types": LINEAR["layer_types"],
            "position_embedding_type": "rope",
        },
    ),
    "nemotron_h": Model(
        "nemotron_h",
        {**WIDE, **MOE, "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
        | {"moe_shared_expert_intermediate_size": 16},
    ),
    "falcon_h1": Model("falcon_h1", {**WIDE, **MAMBA, "key_multiplier": 0.4, "mamba_d_ssm": 64}),
    "recurrent_gemma": Model(
        "recurrent_gemma", {**KV, "attention_window_size": 3, "num_hidden_layers": 3}
    ),
    "olmo_hybrid": Model(
        "olmo_hybrid", {**KV, **LINEAR, "attention_bias": True, "rms_norm_eps": 0.01}
    ),
}
GROUPS = {"n_group": 1, "topk_group": 1}
SMALL_HEADS = {**KV, **MOE, **GROUPS, "head_dim": 8, "n_shared_experts": 1}
OF_LATENTS = {**RANKS, **MOE, **GROUPS, "num_key_value_heads": 4}
# other tests compare these layers with ours; here their paths and masks are checked
BY_THEMSELVES = {
    **{
        name: Model(name, SMALL_HEADS)
        for name in (
            *(
                "apertus",
                "arcee",
                "cohere",
                "ernie4_5",
                "gemma",
                "glm",
                "glm4",
                "glm4_moe",
                "granite",
                "granitemoe",
            ),
            *(
                "helium",
                "hunyuan_v1_dense",
                "llama",
                "llama4_text",
                "ministral3",
                "mistral",
                "mixtral",
                "nemotron",
            ),
            *(
                "olmo",
                "olmo2",
                "olmoe",
                "phi",
                "phi3",
                "qwen2",
                "qwen2_moe",
                "qwen3",
                "qwen3_moe",
                "seed_oss",
            ),
            *("stablelm", "starcoder2"),
        )
    },
    **{
        name: Model(name, {**SMALL_HEADS, **TWO})
        for name in (
            *(
                "afmoe",
                "cohere2",
                "dots1",
                "exaone4",
                "gemma2",
                "gemma3_text",
                "gpt_oss",
                "ministral",
                "olmo3",
            ),
            "smollm3",
        )
    },
    **{
        name: Model(name, OF_LATENTS)
        for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "mistral4", "youtu")
    },
    "qwen2_vl_text": Model("qwen2_vl_text", {**KV, "rope_parameters": SHORT_SECTIONS}, "positions"),
    "qwen3_vl_text": Model("qwen3_vl_text", {**WIDE, "rope_parameters": SECTIONS}, "positions"),
}
MODELS = {
    **TEXT,
    **IMAGES,
    **SPEECH,
    **ENCODER_DECODERS,
    **LIKE_GPT,
    **LIKE_LLAMA,
    **WITH_LATENTS,
    **HYBRIDS,
}
ALL = MODELS | BY_THEMSELVES
