"""The layouts of transformers' models, each a table: see `parity.conversion.layouts.layout` for what its words mean."""

from __future__ import annotations

from dataclasses import replace

from parity.conversion.layouts.layout import CARRIED, Layout, Tensor
from parity.conversion.layouts.tensors import COLUMNS, ROWS, beside, packed, separate

_TABLE = [
    Layout(
        "transformers.BERT",
        "self.query, self.key, self.value, output.dense",
        "transformers/models/bert/modeling_bert.py",
        (separate("self.query", "self.key", "self.value", "output.dense"),),
        rules=("no groups", "out_proj", "one width", "square", "biases"),
        ignored=("output.LayerNorm.*", "self_attn_layer_norm.*", "LayerNorm.*", "ln.*"),
        prefixes=("bert.encoder.layer.{i}.attention", "encoder.layer.{i}.attention"),
    ),
    Layout(
        "transformers.ViT",
        "attention.query, attention.key, attention.value, output.dense: files of any version",
        "transformers/models/vit/modeling_vit.py before 5.0",
        (separate("attention.query", "attention.key", "attention.value", "output.dense"),),
        rules=("no groups", "out_proj", "one width", "square", "out bias"),
        prefixes=("vit.encoder.layer.{i}.attention", "encoder.layer.{i}.attention"),
    ),
    Layout(
        "transformers.ViT-5",
        "q_proj, k_proj, v_proj, o_proj: modules of transformers 5, whose files are those of transformers.ViT",
        "transformers/models/vit/modeling_vit.py",
        (separate("q_proj", "k_proj", "v_proj", "o_proj"),),
        rules=("no groups", "out_proj", "one width", "square", "out bias"),
        prefixes=("vit.layers.{i}.attention", "layers.{i}.attention"),
    ),
    Layout(
        "transformers.GPT2",
        "Conv1D c_attn and c_proj, which keep (in, out)",
        "transformers/models/gpt2/modeling_gpt2.py",
        (packed("c_attn", "c_proj", rows=COLUMNS, columns="(n h) e"),),
        rules=("no groups", "out_proj", "one width", "square", "biases"),
        ignored=("bias", "masked_bias"),
        prefixes=("transformer.h.{i}.attn", "h.{i}.attn"),
    ),
    Layout(
        "transformers.GPT-NeoX",
        "query_key_value holds q, k, v of one head, then of the next; also BLOOM, Persimmon",
        "transformers/models/gpt_neox/modeling_gpt_neox.py",
        (packed("query_key_value", "dense"),),
        others=beside(q_norm="q_layernorm", k_norm="k_layernorm"),
        grouped=True,
        rules=("no groups", "out_proj", "one width", "square", "biases or none"),
        ignored=("bias", "masked_bias", "rotary_emb.inv_freq"),
        prefixes=("gpt_neox.layers.{i}.attention", "layers.{i}.attention"),
    ),
    Layout(
        "transformers.GPT-NeoX-Japanese",
        "query_key_value as in GPT-NeoX, dense without a bias, and the bias of its output, dense_bias, by itself",
        "transformers/models/gpt_neox_japanese/modeling_gpt_neox_japanese.py",
        (
            (
                *(tensor for tensor in packed("query_key_value", "dense") if tensor.name != "dense.bias"),
                Tensor("dense_bias", "out", "bias", "e"),
            ),
        ),
        grouped=True,
        rules=("no groups", "out_proj", "one width", "square"),
        prefixes=("gpt_neox_japanese.layers.{i}.attention", "layers.{i}.attention"),
        needs_spec=True,
    ),
    Layout(
        "transformers.Falcon",
        "query_key_value holds the queries of a group, then its key and value head",
        "transformers/models/falcon/modeling_falcon.py",
        (packed("query_key_value", "dense"),),
        grouped=True,
        rules=("out_proj", "one width", "square", "biases or none"),
        prefixes=("transformer.h.{i}.self_attention", "h.{i}.self_attention"),
    ),
    *(
        Layout(
            name,
            f"{words[0]}, {words[1]}, {words[2]}, {words[3]}, and what models have beside them; {whose}",
            f"transformers/models/{file}/modeling_{file}.py",
            (separate(*words),),
            others=others,
            rules=("out_proj",),
            ignored=("rotary_emb.inv_freq",),
            prefixes=("model.layers.{i}.self_attn", "layers.{i}.self_attn"),
            needs_spec=needs_spec,
        )
        for name, words, others, whose, file, needs_spec in (
            (
                "transformers.LLaMA",
                ("q_proj", "k_proj", "v_proj", "o_proj"),
                beside(("q_norm", "k_norm", "gate_proj", "sinks")),
                "also Mistral, Qwen2, Qwen3, Gemma, OLMo",
                "llama",
                False,
            ),
            (
                "transformers.Phi",
                ("q_proj", "k_proj", "v_proj", "dense"),
                beside(q_norm="q_layernorm", k_norm="k_layernorm"),
                "of Phi 1 and 2",
                "phi",
                False,
            ),
            (
                "transformers.HunYuan",
                ("q_proj", "k_proj", "v_proj", "o_proj"),
                beside(q_norm="query_layernorm", k_norm="key_layernorm"),
                "of HunYuan",
                "hunyuan_v1_dense",
                True,
            ),
            (
                "transformers.StableLM",
                ("q_proj", "k_proj", "v_proj", "o_proj"),
                beside(q_norm="q_layernorm.norms.{n}", k_norm="k_layernorm.norms.{n}"),
                "norms with weights for each head",
                "stablelm",
                True,
            ),
            (
                "transformers.Gemma4",
                ("q_proj", "k_proj", "v_proj", "o_proj"),
                beside(("q_norm", "k_norm")),
                "of Gemma 4, where keys and values have projections of their own",
                "gemma4",
                True,
            ),
            (
                "transformers.LFM2",
                ("q_proj", "k_proj", "v_proj", "out_proj"),
                beside(q_norm="q_layernorm", k_norm="k_layernorm"),
                "of LFM2",
                "lfm2",
                True,
            ),
            (
                "transformers.Flint",
                ("q_proj", "k_proj", "v_proj", "o_proj"),
                beside(("q_norm", "k_norm"), sinks="softmax_offset"),
                "of Flint",
                "flint",
                True,
            ),
            (
                "transformers.ModernBERT-decoder",
                ("q_proj", "k_proj", "v_proj", "Wo"),
                (),
                "of ModernBERT's decoder",
                "modernbert_decoder",
                False,
            ),
        )
    ),
    *(
        Layout(
            name,
            f"{', '.join(words)}",
            f"transformers/models/{file}/modeling_{file}.py",
            (separate(*words),),
            others=others,
            rules=("out_proj", *rules),
            ignored=ignored,
            prefixes=prefixes,
        )
        for name, words, others, rules, ignored, file, prefixes in (
            (
                "transformers.DistilBERT",
                ("q_lin", "k_lin", "v_lin", "out_lin"),
                (),
                ("no groups", "biases"),
                (),
                "distilbert",
                ("distilbert.transformer.layer.{i}.attention", "transformer.layer.{i}.attention"),
            ),
            (
                "transformers.ALBERT",
                ("query", "key", "value", "dense"),
                (),
                ("no groups", "biases"),
                ("LayerNorm.*",),
                "albert",
                ("albert.encoder.albert_layer_groups.0.albert_layers.0.attention",),
            ),
            (
                "transformers.MPNet",
                ("attn.q", "attn.k", "attn.v", "attn.o"),
                beside(relative_bias="relative_attention_bias.weight"),
                ("no groups", "biases"),
                ("LayerNorm.*",),
                "mpnet",
                ("mpnet.encoder.layer.{i}.attention", "encoder.layer.{i}.attention"),
            ),
            (
                "transformers.T5",
                ("q", "k", "v", "o"),
                beside(relative_bias="relative_attention_bias.weight"),
                ("no groups",),
                (),
                "t5",
                (
                    "encoder.block.{i}.layer.0.SelfAttention",
                    "decoder.block.{i}.layer.0.SelfAttention",
                    "decoder.block.{i}.layer.1.EncDecAttention",
                ),
            ),
        )
    ),
    *(
        Layout(
            name,
            about,
            f"transformers/models/{file}/modeling_{file}.py",
            (packed(*words),),
            grouped=grouped,
            rules=("out_proj", "one width", *rules),
            ignored=ignored,
            prefixes=prefixes,
        )
        for name, about, words, grouped, rules, ignored, file, prefixes in (
            (
                "transformers.ModernBERT",
                "Wqkv and Wo",
                ("Wqkv", "Wo"),
                False,
                ("no groups",),
                ("rotary_emb.inv_freq",),
                "modernbert",
                ("model.layers.{i}.attn", "layers.{i}.attn"),
            ),
            (
                "transformers.MPT",
                "Wqkv and out_proj",
                ("Wqkv", "out_proj"),
                False,
                ("no groups",),
                (),
                "mpt",
                ("transformer.blocks.{i}.attn", "blocks.{i}.attn"),
            ),
            (
                "transformers.GPTBigCode",
                "c_attn and c_proj, (out, in): all queries, then the one key and value, or q, k, v of each head",
                ("c_attn", "c_proj"),
                True,
                ("square", "biases"),
                ("bias", "masked_bias"),
                "gpt_bigcode",
                ("transformer.h.{i}.attn", "h.{i}.attn"),
            ),
        )
    ),
    Layout(
        "transformers.CodeGen",
        "qkv_proj is four blocks, each with its share of the queries, then of the values, then of the keys; out_proj",
        "transformers/models/codegen/modeling_codegen.py",
        (
            (
                Tensor("qkv_proj.weight", "qvk", "weight", ROWS),
                Tensor("qkv_proj.bias", "qvk", "bias", "(n h)"),
                Tensor("out_proj.weight", "out", "weight", "e (n h)"),
                Tensor("out_proj.bias", "out", "bias", "e"),
            ),
        ),
        blocks=4,
        rules=("no groups", "out_proj", "one width", "four blocks"),
        ignored=("causal_mask", "bias", "masked_bias"),
        prefixes=("transformer.h.{i}.attn", "h.{i}.attn"),
    ),
    Layout(
        "transformers.Phi3",
        "qkv_proj and o_proj",
        "transformers/models/phi3/modeling_phi3.py",
        (packed("qkv_proj", "o_proj"),),
        rules=("out_proj", "one width"),
        prefixes=("model.layers.{i}.self_attn", "layers.{i}.self_attn"),
    ),
    Layout(
        "transformers.Qwen3-Next",
        "q_proj holds the queries of a head, then its gate; k_proj, v_proj, o_proj",
        "transformers/models/qwen3_next/modeling_qwen3_next.py",
        (
            (
                Tensor("q_proj.weight", "qg", "weight", ROWS),
                Tensor("q_proj.bias", "qg", "bias", "(n h)"),
                *(tensor for tensor in separate("q_proj", "k_proj", "v_proj", "o_proj") if tensor.holds != "q"),
            ),
        ),
        others=beside(("q_norm", "k_norm")),
        grouped=True,
        needs_spec=True,
        rules=("out_proj",),
        prefixes=("model.layers.{i}.self_attn", "layers.{i}.self_attn"),
    ),
    Layout(
        "transformers.DeepSeek",
        "the projections of latents: kv_a_proj_with_mqa, kv_b_proj, o_proj, and q_a_proj, q_b_proj or q_proj",
        "transformers/models/deepseek_v3/modeling_deepseek_v3.py",
        tuple(
            tuple(tensor for tensor in separate("q_proj", "", "", "o_proj") if tensor.holds in held)
            for held in (("q", "out"), ("out",))
        ),
        others=beside(
            ("q_a_proj", "q_b_proj", "kv_b_proj"),
            kv_a_proj="kv_a_proj_with_mqa",
            q_a_norm="q_a_layernorm",
            kv_a_norm="kv_a_layernorm",
        ),
        needs_spec=True,
        rules=("out_proj",),
        prefixes=("model.layers.{i}.self_attn", "layers.{i}.self_attn"),
    ),
]

CARRYING: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("BERT", "ViT", "ViT-5", "DistilBERT", "ALBERT"), ()),
    **dict.fromkeys(("GPT2", "GPTBigCode", "MPNet", "T5"), ("scale",)),
    "MPT": ("scale", "alibi", "clip_qkv"),
    "CodeGen": ("rope",),
    "GPT-NeoX": ("rope", "rope.scaling", "alibi"),
    "GPT-NeoX-Japanese": ("rope", "rope.scaling"),
    "Falcon": ("rope", "rope.scaling", "alibi"),
    "ModernBERT": ("rope", "rope.scaling", "window_size"),
    "ModernBERT-decoder": ("rope", "rope.scaling", "window_size"),
}
"""What the modules of some layouts compute or are told; the others are those of many families, which have all of it."""

OF_TRANSFORMERS = [
    replace(layout, carries=CARRYING.get(layout.name.removeprefix("transformers."), CARRIED)) for layout in _TABLE
]
