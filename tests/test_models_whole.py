"""Whole models of released families, each attention layer beside ours: encoders, those with decoders, and decoders."""

import pytest
import torch
from released_models import LEFT_OUT, Model, check_model

BERT = {"output": "output.dense"}
VIT = {"image_size": 6, "patch_size": 2}
CONV = {"conv_dim": (8, 8), "conv_stride": (5, 40), "conv_kernel": (10, 40), "num_conv_pos_embeddings": 4}
CONV |= {"num_conv_pos_embedding_groups": 2}
TEXT = {
    **{name: Model(name, **BERT) for name in ("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie")},
    "bert, decoder": Model("bert", {"is_decoder": True}, **BERT),
    "data2vec-text": Model("data2vec-text", **BERT),
    "xlm-roberta-xl": Model("xlm-roberta-xl", input="self", **BERT),
    "xmod": Model("xmod", {"default_language": "en_XX"}, **BERT),
    "distilbert": Model("distilbert", {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 24}),
    "albert": Model("albert", {"embedding_size": 8}, output="dense"),
    "mpnet": Model("mpnet", {"relative_attention_num_buckets": 32}, output="attn"),
    "modernbert": Model("modernbert", {"num_hidden_layers": 4, "local_attention": 6, "attention_bias": True}),
}
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
    "clip_text_model": Model("clip_text_model"),
    "siglip_text_model": Model("siglip_text_model", class_name="SiglipTextModel"),
}
SPEECH = {
    name: Model(name, CONV, "wave") for name in ("wav2vec2", "hubert", "unispeech", "unispeech-sat", "data2vec-audio")
}
BART = {"hidden_size": LEFT_OUT, "num_attention_heads": LEFT_OUT, "num_hidden_layers": LEFT_OUT, "d_model": 32}
BART |= {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 8}
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
        for name in ("bart", "mbart", "pegasus", "marian", "blenderbot", "blenderbot-small", "m2m_100", "plbart", "mvp")
    },
    "speech_to_text": Model("speech_to_text", {**BART, "conv_channels": 8, "input_feat_per_channel": 8}, "frames"),
    "whisper": Model("whisper", {**BART, "num_mel_bins": 8, "max_source_positions": 10}, "mel"),
    **{name: Model(name, T5, "pairs") for name in ("t5", "mt5", "umt5")},
}
GPT = dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers"), LEFT_OUT)
GPT |= {"n_embd": 32, "n_head": 4, "n_layer": 2}
LIKE_GPT = {
    "gpt2": Model("gpt2", {**GPT, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2, unscaled": Model("gpt2", {**GPT, "scale_attn_weights": False}),
    "openai-gpt": Model("openai-gpt", GPT),
    "gpt_neo": Model(
        "gpt_neo",
        {"num_attention_heads": LEFT_OUT, "num_hidden_layers": LEFT_OUT, "num_heads": 4, "num_layers": 3}
        | {"attention_types": [[["global"], 1], [["local"], 2]], "window_size": 3},
    ),
    "gpt_neox": Model("gpt_neox", {"rotary_pct": 0.5, "attention_bias": False}),
    "gptj": Model("gptj", {**GPT, "rotary_dim": 4}),
    "codegen": Model("codegen", {**GPT, "rotary_dim": 4}),
    "gpt_bigcode": Model("gpt_bigcode", GPT),
    "gpt_bigcode, heads": Model("gpt_bigcode", {**GPT, "multi_query": False, "scale_attn_weights": False}),
    "bloom": Model("bloom", {"num_attention_heads": LEFT_OUT, "n_head": 4}, output="dense"),
    "persimmon": Model("persimmon", {"qk_layernorm": True}),
    "falcon, one head": Model("falcon", {"multi_query": True, "bias": True}),
    "falcon, groups": Model("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    # Its eager attention adds the slopes a second time, after the model has added them to the mask.
    "falcon, ALiBi": Model("falcon", {"alibi": True, "multi_query": False}, attention="sdpa"),
    "mpt": Model(
        "mpt",
        dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers"), LEFT_OUT)
        | {"d_model": 48, "n_heads": 6, "n_layers": 2, "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.3}},
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
MODELS = {**TEXT, **IMAGES, **SPEECH, **ENCODER_DECODERS, **LIKE_GPT}


@pytest.mark.parametrize("name", MODELS)
def test_each_layer_of_a_model_is_what_its_configuration_says(name, tmp_path):
    check_model(MODELS[name], tmp_path)
