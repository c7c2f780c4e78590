"""Layouts of transformers models, as tables; `parity.port.conversion.layouts.layout` explains the
fields.
"""

from __future__ import annotations

from typing import Any

from parity.port.conversion.layouts.layout import CARRIED, Layout, Tensor
from parity.port.conversion.layouts.tensors import COLUMNS, ROWS, optional, packed, separate

Form = tuple[Tensor, ...]


def _layout(
    name: str, about: str, file: str, *forms: Form, version: str = "", **options: Any
) -> Layout:
    """Return a layout of models whose config.json specifies all features, unless `carries`
    restricts them.
    """
    defaults = {
        "prefixes": ("model.layers.{i}.self_attn", "layers.{i}.self_attn"),
        "rules": ("out_proj",),
    }
    source = f"transformers/models/{file}/modeling_{file}.py{version}"
    return Layout(
        f"transformers.{name}", about, source, forms, **{**defaults, "carries": CARRIED, **options}
    )


def _separate(
    name: str, words: tuple[str, str, str, str], file: str, about: str = "", **options: Any
) -> Layout:
    """Return a layout of four projections, by layer name. Older files also contain the frequencies
    of RoPE.
    """
    listed = ", ".join(words)
    if about:
        about = f"{listed}, and the models' other weights; {about}"
    options = {"ignored": ("rotary_emb.inv_freq",), **options}
    return _layout(name, about or listed, file, separate(*words), **options)


def _of_latents(
    name: str, words: str, file: str, *forms: tuple[str, ...], **options: Any
) -> Layout:
    """Return a layout of latents, by its remaining projections, in each of its forms."""
    remaining = separate("q_proj", "", "", "o_proj")
    tensors_of_forms: list[tuple[Tensor, ...]] = []
    for form in forms:
        tensors = [tensor for tensor in remaining if tensor.holds in form]
        tensors_of_forms.append(tuple(tensors))
    return _layout(
        name,
        f"the projections of latents: kv_a_proj_with_mqa, kv_b_proj, o_proj, and q_a_proj, {words}",
        file,
        *tensors_of_forms,
        others=optional(
            ("q_a_proj", "q_b_proj", "kv_b_proj"),
            kv_a_proj="kv_a_proj_with_mqa",
            q_a_norm="q_a_layernorm",
            kv_a_norm="kv_a_layernorm",
        ),
        needs_spec=True,
        **options,
    )


OF_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj")
ALIKE = ("no groups", "out_proj", "one width", "square")
"""Requirements of older modules on a layer."""

ROTATED = ("rope", "rope.scaling")
IN_WINDOWS = (*ROTATED, "window_size")
OF_GRID = ("*.relative_position_bias_table",)

_KEYS_AS_VALUES = (
    *(tensor for tensor in separate(*OF_LLAMA) if tensor.holds in ("q", "out")),
    Tensor("k_proj.weight", "kv", "weight", ROWS, is_shared=True),
    Tensor("k_proj.bias", "kv", "bias", "(n h)", is_shared=True),
)


def _sinusoids(projection: str, content_bias: str, position_bias: str) -> Form:
    """Return the tensors of products with projected sinusoids, by name."""
    return (
        Tensor(f"{projection}.weight", "relative_sinusoids", "whole", ROWS),
        Tensor(content_bias, "content_bias", "whole", "..."),
        Tensor(position_bias, "position_bias", "whole", "..."),
    )


OF_TRANSFORMERS = [
    _layout(
        "BERT",
        "self.query, self.key, self.value, output.dense; also files of Swin and Donut",
        "bert",
        separate("self.query", "self.key", "self.value", "output.dense"),
        others=optional(relative_bias="self.relative_position_bias_table"),
        rules=(*ALIKE, "biases"),
        ignored=(
            "output.LayerNorm.*",
            "self_attn_layer_norm.*",
            "LayerNorm.*",
            "ln.*",
            "self.relative_position_index",
        ),
        grid_biases=OF_GRID,
        prefixes=(
            "bert.encoder.layer.{i}.attention",
            "encoder.layer.{i}.attention",
            "encoder.layers.{i}.blocks.{i}.attention",
        ),
        carries=(),
    ),
    _layout(
        "ViT",
        "attention.query, attention.key, attention.value, output.dense: files of any version",
        "vit",
        separate("attention.query", "attention.key", "attention.value", "output.dense"),
        version=" before 5.0",
        others=optional(
            relative_bias="attention.relative_position_bias.relative_position_bias_table"
        ),
        shares=("relative_bias",),
        rules=(*ALIKE, "out bias"),
        ignored=("attention.relative_position_bias.relative_position_index",),
        grid_biases=OF_GRID,
        prefixes=("vit.encoder.layer.{i}.attention", "encoder.layer.{i}.attention"),
        carries=(),
    ),
    _layout(
        "ViT-5",
        "q_proj, k_proj, v_proj, o_proj: modules of transformers 5, whose files are as in "
        "transformers.ViT",
        "vit",
        separate(*OF_LLAMA),
        others=optional(relative_bias="relative_position_bias.relative_position_bias_table"),
        shares=("relative_bias",),
        rules=(*ALIKE, "out bias"),
        ignored=("relative_position_bias.relative_position_index",),
        grid_biases=OF_GRID,
        prefixes=("vit.layers.{i}.attention", "layers.{i}.attention"),
        carries=(),
    ),
    _layout(
        "GPT2",
        "Conv1D c_attn and c_proj, which keep (in, out)",
        "gpt2",
        packed("c_attn", "c_proj", heads=COLUMNS, back="(n h) e"),
        rules=(*ALIKE, "biases"),
        ignored=("bias", "masked_bias"),
        prefixes=("transformer.h.{i}.attn", "h.{i}.attn"),
        carries=("scale",),
    ),
    _layout(
        "GPT-NeoX",
        "query_key_value holds q, k, v of one head, then of the next; also BLOOM, Persimmon",
        "gpt_neox",
        packed("query_key_value", "dense"),
        others=optional(q_norm="q_layernorm", k_norm="k_layernorm"),
        grouped=True,
        rules=(*ALIKE, "biases or none"),
        ignored=("bias", "masked_bias", "rotary_emb.inv_freq"),
        prefixes=("gpt_neox.layers.{i}.attention", "layers.{i}.attention"),
        carries=(*ROTATED, "alibi"),
    ),
    _layout(
        "GPT-NeoX-Japanese",
        "query_key_value as in GPT-NeoX, dense without a bias, and its output bias separately, "
        "as dense_bias",
        "gpt_neox_japanese",
        (
            *(
                tensor
                for tensor in packed("query_key_value", "dense")
                if tensor.name != "dense.bias"
            ),
            Tensor("dense_bias", "out", "bias", "e"),
        ),
        grouped=True,
        rules=ALIKE,
        prefixes=("gpt_neox_japanese.layers.{i}.attention", "layers.{i}.attention"),
        needs_spec=True,
        carries=ROTATED,
    ),
    _layout(
        "Falcon",
        "query_key_value holds the queries of a group, then its key and value head",
        "falcon",
        packed("query_key_value", "dense"),
        grouped=True,
        rules=("out_proj", "one width", "square", "biases or none"),
        prefixes=("transformer.h.{i}.self_attention", "h.{i}.self_attention"),
        carries=(*ROTATED, "alibi"),
    ),
    _separate(
        "LLaMA",
        OF_LLAMA,
        "llama",
        "also Mistral, Qwen2, Qwen3, Gemma, OLMo",
        others=optional(("q_norm", "k_norm", "gate_proj", "sinks")),
    ),
    _separate(
        "Phi",
        ("q_proj", "k_proj", "v_proj", "dense"),
        "phi",
        "for Phi 1 and 2",
        others=optional(q_norm="q_layernorm", k_norm="k_layernorm"),
    ),
    _separate(
        "HunYuan",
        OF_LLAMA,
        "hunyuan_v1_dense",
        "of HunYuan",
        others=optional(q_norm="query_layernorm", k_norm="key_layernorm"),
        needs_spec=True,
    ),
    _separate(
        "StableLM",
        OF_LLAMA,
        "stablelm",
        "norms with weights for each head",
        others=optional(q_norm="q_layernorm.norms.{n}", k_norm="k_layernorm.norms.{n}"),
        needs_spec=True,
    ),
    _separate(
        "BitNet", OF_LLAMA, "bitnet", others=optional(context_norm="attn_sub_norm"), needs_spec=True
    ),
    _separate(
        "Kosmos-2",
        ("q_proj", "k_proj", "v_proj", "out_proj"),
        "kosmos2",
        others=optional(context_norm="inner_attn_ln"),
        needs_spec=True,
    ),
    _layout(
        "Gemma4",
        "q_proj, k_proj, v_proj, o_proj, and norms; Gemma 4, whose k_proj also makes the values "
        "if v_proj is missing",
        "gemma4",
        separate(*OF_LLAMA),
        _KEYS_AS_VALUES,
        others=optional(("q_norm", "k_norm")),
        ignored=("rotary_emb.inv_freq",),
        needs_spec=True,
    ),
    _separate(
        "LFM2",
        ("q_proj", "k_proj", "v_proj", "out_proj"),
        "lfm2",
        "of LFM2",
        others=optional(q_norm="q_layernorm", k_norm="k_layernorm"),
        needs_spec=True,
    ),
    _separate(
        "Flint",
        OF_LLAMA,
        "flint",
        "of Flint",
        others=optional(("q_norm", "k_norm"), sinks="softmax_offset"),
        needs_spec=True,
    ),
    _separate(
        "Parakeet",
        OF_LLAMA,
        "parakeet",
        "of Parakeet and Nemotron ASR",
        others=_sinusoids("relative_k_proj", "bias_u", "bias_v"),
        prefixes=("encoder.layers.{i}.self_attn", "layers.{i}.self_attn"),
        needs_spec=True,
    ),
    _separate(
        "Conformer",
        ("linear_q", "linear_k", "linear_v", "linear_out"),
        "wav2vec2_conformer",
        "of Wav2Vec2-Conformer, FastSpeech2-Conformer and SeamlessM4T",
        others=_sinusoids("linear_pos", "pos_bias_u", "pos_bias_v"),
        rules=(*ALIKE, "biases"),
        prefixes=(
            "wav2vec2_conformer.encoder.layers.{i}.self_attn",
            "encoder.layers.{i}.self_attn",
            "speech_encoder.encoder.layers.{i}.self_attn",
            "encoder.conformer_layers.{i}.self_attn",
            "decoder.conformer_layers.{i}.self_attn",
        ),
        needs_spec=True,
    ),
    _separate(
        "MiMo-V2",
        OF_LLAMA,
        "mimo_v2_flash",
        "of MiMo-V2",
        others=optional((), sinks="attention_sink_bias"),
        needs_spec=True,
    ),
    _separate(
        "ModernBERT-decoder",
        ("q_proj", "k_proj", "v_proj", "Wo"),
        "modernbert_decoder",
        "for ModernBERT's decoder",
        carries=IN_WINDOWS,
    ),
    _separate(
        "DistilBERT",
        ("q_lin", "k_lin", "v_lin", "out_lin"),
        "distilbert",
        ignored=(),
        rules=("out_proj", "no groups", "biases"),
        prefixes=("distilbert.transformer.layer.{i}.attention", "transformer.layer.{i}.attention"),
        carries=(),
    ),
    _separate(
        "ALBERT",
        ("query", "key", "value", "dense"),
        "albert",
        rules=("out_proj", "no groups", "biases"),
        ignored=("LayerNorm.*",),
        prefixes=("albert.encoder.albert_layer_groups.0.albert_layers.0.attention",),
        carries=(),
    ),
    _separate(
        "MPNet",
        ("attn.q", "attn.k", "attn.v", "attn.o"),
        "mpnet",
        others=optional(relative_bias="relative_attention_bias.weight"),
        shares=("relative_bias",),
        rules=("out_proj", "no groups", "biases"),
        ignored=("LayerNorm.*",),
        prefixes=("mpnet.encoder.layer.{i}.attention", "encoder.layer.{i}.attention"),
        carries=("scale",),
    ),
    _separate(
        "T5",
        ("q", "k", "v", "o"),
        "t5",
        ignored=(),
        others=optional(relative_bias="relative_attention_bias.weight"),
        shares=("relative_bias",),
        rules=("out_proj", "no groups"),
        prefixes=(
            "encoder.block.{i}.layer.0.SelfAttention",
            "decoder.block.{i}.layer.0.SelfAttention",
            "decoder.block.{i}.layer.1.EncDecAttention",
        ),
        carries=("scale",),
    ),
    _layout(
        "ModernBERT",
        "Wqkv and Wo",
        "modernbert",
        packed("Wqkv", "Wo"),
        rules=("out_proj", "one width", "no groups"),
        ignored=("rotary_emb.inv_freq",),
        prefixes=("model.layers.{i}.attn", "layers.{i}.attn"),
        carries=IN_WINDOWS,
    ),
    _layout(
        "MPT",
        "Wqkv and out_proj",
        "mpt",
        packed("Wqkv", "out_proj"),
        rules=("out_proj", "one width", "no groups"),
        prefixes=("transformer.blocks.{i}.attn", "blocks.{i}.attn"),
        carries=("scale", "alibi", "clip_qkv"),
    ),
    _layout(
        "DBRX",
        "Wqkv and out_proj, with fewer heads of keys and values",
        "dbrx",
        packed("Wqkv", "out_proj"),
        rules=("out_proj", "one width"),
        prefixes=("transformer.blocks.{i}.norm_attn_norm.attn", "blocks.{i}.norm_attn_norm.attn"),
        carries=("rope", "clip_qkv"),
        needs_spec=True,
    ),
    _layout(
        "GPTBigCode",
        "c_attn and c_proj, (out, in): all queries, then the one key and value; or q, k, v of "
        "each head",
        "gpt_bigcode",
        packed("c_attn", "c_proj"),
        grouped=True,
        rules=("out_proj", "one width", "square", "biases"),
        ignored=("bias", "masked_bias"),
        prefixes=("transformer.h.{i}.attn", "h.{i}.attn"),
        carries=("scale",),
    ),
    _layout(
        "CodeGen",
        "qkv_proj is four blocks, each with its share of the queries, then of the values, then "
        "of the keys; out_proj",
        "codegen",
        (
            Tensor("qkv_proj.weight", "qvk", "weight", ROWS),
            Tensor("qkv_proj.bias", "qvk", "bias", "(n h)"),
            Tensor("out_proj.weight", "out", "weight", "e (n h)"),
            Tensor("out_proj.bias", "out", "bias", "e"),
        ),
        blocks=4,
        rules=("no groups", "out_proj", "one width", "four blocks"),
        ignored=("causal_mask", "bias", "masked_bias"),
        prefixes=("transformer.h.{i}.attn", "h.{i}.attn"),
        carries=("rope",),
    ),
    _layout(
        "Phi3",
        "qkv_proj and o_proj",
        "phi3",
        packed("qkv_proj", "o_proj"),
        rules=("out_proj", "one width"),
    ),
    _layout(
        "Qwen3-Next",
        "q_proj holds the queries of a head, then its gate; k_proj, v_proj, o_proj",
        "qwen3_next",
        (
            Tensor("q_proj.weight", "qg", "weight", ROWS),
            Tensor("q_proj.bias", "qg", "bias", "(n h)"),
            *(tensor for tensor in separate(*OF_LLAMA) if tensor.holds != "q"),
        ),
        others=optional(("q_norm", "k_norm")),
        grouped=True,
        needs_spec=True,
    ),
    _of_latents(
        "DeepSeek",
        "q_b_proj or q_proj",
        "deepseek_v3",
        *(("q", "out"), ("out",)),
        carries=tuple(name for name in CARRIED if name != "latent.factors"),
    ),
    _of_latents(
        "LongCat",
        "q_b_proj; its modules multiply the latents by factors of their widths",
        "longcat_flash",
        ("out",),
        rules=("out_proj", "factors of widths"),
        prefixes=(
            "model.layers.{i}.self_attn.0",
            "model.layers.{i}.self_attn.1",
            "layers.{i}.self_attn.0",
            "layers.{i}.self_attn.1",
        ),
    ),
]
"""Layouts without `carries` serve many families, which together cover every feature."""
