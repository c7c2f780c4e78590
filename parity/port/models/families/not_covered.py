"""Unsupported families of transformers 5.23, and the reasons."""

from __future__ import annotations

SENSES: dict[str, str] = {
    # ---- Beyond AttentionSpec --------------------------------------------------------------------
    "rotates in the opposite direction of RoPE, as if positions decreased": "nanochat",
    "subtracts one softmax from another (lambda_q1)": "diffllama",
    "hides keys by their values (dt_proj, keep_window_size)": "doge",
    "has queries and outputs of experts that a router picks": "jetmoe",
    "multiplies the context by a softplus, not a sigmoid (gating)": "laguna",
    "has a gate with a bias for each head (gate_bias)": "beam",
    "multiplies queries by a number after their norm (qk_scale_factor)": (
        "muse_glimmer_text muse_spark_text"
    ),
    "removes the direction of values from the context (exclusive_self_attention)": "neomme",
    "convolves keys and values, and computes distance biases from queries": (
        "inkling2_text inkling_text"
    ),
    "convolves queries and keys (conv_mask)": "zaya",
    "lets tokens of an image attend to each other in both directions "
    "(use_bidirectional_attention)": ("diffusion_gemma_text gemma4_unified_text"),
    "has shared layers that read two concatenated streams (hybrid_layer_ids)": "zamba zamba2",
    "runs the same layers in cycles (H_cycles, L_cycles)": "hrm_text",
    "has other weights for each codebook": "moshi_depth",
    "selects the keys of each query with an indexer": (
        "axk2 deepseek_v32 deepseek_v4 dots3_note_text glm5_next_text glm_moe_dsa hy_v4 "
        "minimax_m3_vl_text mistral_large4_text qwen4_exp_text"
    ),
    "attends to blocks or patterns of keys other than windows (block_size, attention_window, "
    "global tokens)": (
        "big_bird bigbird_pegasus canine hiera led longformer longt5 pegasus_x sam2_hiera_det_model"
    ),
    "hashes queries and keys, or stands in for the softmax": (
        "autoformer informer mobilevitv2 mra nystromformer reformer swiftformer yoso"
    ),
    "attends to neighborhoods or windows of an image, with learned biases on two axes": (
        "clap_audio_model dinat donut-swin levit maskformer-swin swin swin2sr swinv2"
    ),
    "is over windows of an image, and over channels": "florence_vision",
    "computes keys from a downsampled image (sr_ratio), or projects by convolutions": (
        "chameleon_vqgan convbert cvt glpn janus_vqgan pvt pvt_v2 segformer squeezebert"
    ),
    "adds biases on two axes of an image, made from queries (use_rel_pos)": (
        "deepseek_ocr2_sam_vision_model got_ocr2_vision pp_chart2table_vision pp_formulanet_vision "
        "sam_hq_vision_model sam_vision_model seggpt slanext_vision unlimited_ocr_sam_vision_model "
        "vitdet"
    ),
    "adds products with vectors for distances (relative positions, as in Transformer-XL, Shaw or "
    "DeBERTa)": (
        "deberta deberta-v2 funnel gemma3n_audio gemma4_audio "
        "granite_speech5_encoder granite_speech_encoder granite_speech_plus_encoder "
        "seamless_m4t seamless_m4t_v2 sew-d "
        "speecht5 vits wav2vec2-bert xlnet"
    ),
    "attends to chunks of tokens and to some before them (default_num_lookahead_tokens)": (
        "nemotron_asr_streaming_encoder"
    ),
    "gates its biases of distances by queries": "wavlm",
    "adds learned biases by distance, in buckets other than T5's": "cpmant phi4_multimodal_audio",
    "adds biases or scores for positions on a page": (
        "bros layoutlmv2 layoutlmv3 layoutxlm lilt udop"
    ),
    "orders the axes of its RoPE differently (mrope_section)": "ernie4_5_vl_moe_text",
    "rotates by positions on two or three axes, each with its own frequencies": (
        "cohere_compass_vision dinov3_vit dots3_note_vision_encoder edgetam_video efficientloftr "
        "eomt_dinov3 ernie4_5_vl_moe_vision exaone4_5_vision gemma4_vision glm4v_moe_vision "
        "glm4v_vision glm5_next_vision glm_ocr_vision inkling2_vision kimi_k25_vision "
        "lfm3_vl_vision llama4_vision_model minimax_m3_vl_vision mlcd mlcd_vision_model "
        "muse_glimmer_vision muse_spark_vision paddleocr_vl_vision pixtral "
        "qwen2_5_omni_vision_encoder qwen2_5_vl_vision qwen2_vl_vision qwen3_5_moe_vision "
        "qwen3_5_vision qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision qwen3_vl_vision "
        "qwen4_exp_vision sam2_video sam3_tracker_video sam3_vit_model sapiens2 step3p5_vision "
        "video_llama_3_vision vjepa2"
    ),
    "samples keys at computed positions in some layers (deformable attention)": (
        "d_fine deformable_detr deimv2 grounding-dino lw_detr mask2former mm-grounding-dino "
        "omdet-turbo oneformer pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 rf_detr rt_detr "
        "rt_detr_v2"
    ),
    "adds positions to queries and keys, but not to values": (
        "conditional_detr dab-detr detr sam3_detr_decoder sam3_detr_encoder sam3_geometry_encoder "
        "sam3_lite_text_detr_decoder sam3_lite_text_detr_encoder sam3_lite_text_geometry_encoder "
        "table-transformer"
    ),
    "rounds queries, keys and probabilities to integers (quant_mode)": "ibert",
    "computes queries and keys from a different input than values (use_bottleneck)": "mobilebert",
    "has other queries for words over entities (use_entity_aware_attention)": "luke",
    "predicts several tokens at once, in streams of n-grams": "prophetnet",
    "adds biases computed from pairs of residues (pair_bias_proj)": "esmfold2",
    # ---- Not yet defined as a family -------------------------------------------------------------
    "uses keys from another part of the model in some layers, and no family says which": (
        "EvollaModel blip_2_qformer blip_text_model bridgetower edgetam_mask_decoder "
        "edgetam_video_mask_decoder evolla groupvit_vision_model idefics idefics2_perceiver "
        "idefics_perciever instructblip_qformer instructblipvideo_qformer lightglue lxmert "
        "mllama_text_model molmo2_adapter perceiver sam2_mask_decoder sam2_video_mask_decoder "
        "sam3_lite_text_mask_decoder sam3_mask_decoder sam3_tracker_mask_decoder "
        "sam3_tracker_video_mask_decoder sam_hq_mask_decoder sam_mask_decoder superglue "
        "xclip_vision_model"
    ),
    "has weights in an unsupported layout (qkv and projection, in_proj)": (
        "blip_2_vision_model blip_vision_model instructblip_vision_model "
        "instructblipvideo_vision_model tipsv2_text_model tipsv2_vision_model"
    ),
    "is outside the parts of its model, which alone are read": (
        "chameleon clipseg cohere_asr csm git gradium_phonon_tts kyutai_speech_to_text "
        "moonshine_streaming moshi nemotron3_diarization neucodec pe_audio_encoder "
        "pe_audio_video_encoder pe_video_encoder phi4_multimodal pocket_tts pp_ocrv5_mobile_rec "
        "pp_ocrv5_server_rec pp_ocrv6_small_rec tvp xclip xcodec2 zoedepth"
    ),
    "is not known to need more than a specification has; no family has been written and compared": (
        "bailing_hybrid blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher "
        "bridgetower_vision_model canary_decoder clvp_decoder clvp_encoder cohere_compass_text "
        "cosmos3_edge_text cosmos3_edge_vision ctrl decision_transformer deepseek_ocr2_encoder "
        "deepseek_ocr2_text dia_decoder dia_encoder dots3_note_audio_encoder dpt "
        "embedding_gemma2_text emu3_vqgan eomt esmc flaubert fsmt fun_asr_nano_encoder "
        "glm_image_vision glmasr_encoder granite_docling_vision hunyuan_vl_text hunyuan_vl_vision "
        "idefics_vision inkling_audio inkling_vision internvl_vision janus_vision_model "
        "kosmos_2_5_text_model kosmos_2_5_vision_model lasr_encoder lfm3 lw_detr_vit mgp-str mimi "
        "mimi_decoder mimi_encoder minicpm_ocr_vision minicpmv4_6_vision minicpmv4_7_vision "
        "mllama_vision_model mobilevit molmo2_text molmo2_vision moonshine_streaming_encoder "
        "muse_glimmer_assistant muse_spark_audio musicgen_decoder musicgen_melody_decoder "
        "nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp "
        "nemotron3_diarization_audio openai_privacy_filter patchtsmixer patchtst "
        "pix2struct_text_model pix2struct_vision_model pocket_tts_audio_tokenizer "
        "pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder pop2piano "
        "pp_formulanet_text qianfan_ocr_vision qwen2_5_omni_audio_encoder qwen2_5_omni_dit "
        "qwen2_5_omni_talker qwen3_asr_encoder qwen3_omni_moe_audio_encoder "
        "qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text radio rf_detr_dinov2 "
        "sam3_lite_text_text_model sapiens2_head step3p5 t5_gemma_module t5gemma2_decoder "
        "t5gemma2_text time_series_transformer timesfm timesfm2_5 timesformer trocr ultrabert "
        "unlimited_ocr_text unlimited_ocr_vision_encoder videomae videomt videoprism_text_model "
        "videoprism_vision_model vilt vit_mae vitpose_backbone vivit voxtral_realtime_encoder "
        "voxtral_realtime_text xlm"
    ),
}
"""Properties of attention, phrased to follow "its attention", and the families that have them."""

NOT_COVERED: dict[str, str] = {}
"""Reason for each family that is known to be unsupported."""

for _sense, _names in SENSES.items():
    for _name in _names.split():
        NOT_COVERED[_name] = f"its attention {_sense}"

_NONE = (
    "align_vision_model edgetam_prompt_encoder edgetam_video_prompt_encoder "
    "fastspeech2_conformer_hifigan flava_image_codebook gemma3n_vision gemma4_unified_audio "
    "gemma4_unified_vision glm_image_vqmodel qwen2_5_omni_bigvgan rt_detr_resnet rwkv "
    "sam2_prompt_encoder sam2_video_prompt_encoder sam3_tracker_prompt_encoder "
    "sam3_tracker_video_prompt_encoder sam_hq_prompt_encoder sam_prompt_encoder speecht5_hifigan"
)

WITHOUT_ATTENTION = frozenset(_NONE.split())
"""Parts of models without attention."""
