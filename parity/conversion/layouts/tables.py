"""The layouts, each a table: see `parity.conversion.layouts.layout` for what its words mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from parity.conversion.layouts.layout import CARRIED, Layout, Tensor

ROWS, COLUMNS = "(n h) d", "d (n h)"  # (out, in) as torch keeps it, and (in, out)


def separate(
    q: str,
    k: str,
    v: str,
    out: str,
    *,
    leaf: str = "weight",
    heads: str = ROWS,
    biases: str = "(n h)",
    back: str = "e (n h)",
) -> tuple[Tensor, ...]:
    """Four weights and their biases, by the names of their layers; `heads`, `biases` and `back` are the axes."""
    names = {"q": q, "k": k, "v": v}
    return (
        *(Tensor(f"{name}.{leaf}", projection, "weight", heads) for projection, name in names.items()),
        *(Tensor(f"{name}.bias", projection, "bias", biases) for projection, name in names.items()),
        Tensor(f"{out}.{leaf}", "out", "weight", back),
        Tensor(f"{out}.bias", "out", "bias", "e"),
    )


def packed(
    qkv: str, out: str, *, leaf: str = "weight", rows: str = ROWS, columns: str = "e (n h)"
) -> tuple[Tensor, ...]:
    """One tensor for q, k and v, and one for the output."""
    return (
        Tensor(f"{qkv}.{leaf}", "qkv", "weight", rows),
        Tensor(f"{qkv}.bias", "qkv", "bias", "(n h)"),
        Tensor(f"{out}.{leaf}", "out", "weight", columns),
        Tensor(f"{out}.bias", "out", "bias", "e"),
    )


SCORES = ("sinks", "relative_bias")
NORMS = ("q_norm", "k_norm", "v_norm", "q_a_norm", "kv_a_norm")
NARROW = ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")  # of latents
EVERYTHING = ("gate_proj", *NARROW, *NORMS, *SCORES)
"""What only some layers have beside q, k, v and out, by its canonical name."""


def beside(same: Iterable[str] = (), *, leaf: str = "weight", axes: str = "...", **renamed: str) -> tuple[Tensor, ...]:
    """The tensors of what only some layers have, each by its canonical name or one of its own."""
    found: list[Tensor] = []
    for ours, theirs in (dict.fromkeys(same) | renamed).items():
        theirs = theirs or ours
        if ours in SCORES:
            found.append(Tensor(theirs, ours, "whole", "..."))
            continue
        of_weight = ("weight", "...") if ours in NORMS else (leaf, axes)
        found.append(Tensor(f"{theirs}.{of_weight[0]}", f"{ours}.weight", "whole", of_weight[1]))
        found.append(Tensor(f"{theirs}.bias", f"{ours}.bias", "whole", "..."))
    return tuple(found)


def with_and_without_out(tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], ...]:
    """The form that has an output projection, and the one that has none."""
    return tensors, tuple(tensor for tensor in tensors if tensor.holds != "out")


_EINSUM = {"leaf": "kernel", "heads": "d n h", "biases": "n h", "back": "n h e"}  # flax and keras keep heads as an axis

_TORCH_OUT = (Tensor("out_proj.weight", "out", "weight", "e (n h)"), Tensor("out_proj.bias", "out", "bias", "e"))
_TORCH_BIAS = Tensor("in_proj_bias", "qkv", "bias", "(n h)")

_OF_JAX = beside(EVERYTHING, leaf="kernel", axes="d e")

_TABLE = [
    Layout(
        "canonical",
        "the form in which weights meet here; that of mha_torch's modules",
        "parity/core/weights.py",
        with_and_without_out(separate("q_proj", "k_proj", "v_proj", "out_proj")),
        others=beside(EVERYTHING),
        carries=CARRIED,
    ),
    Layout(
        "mha_jax",
        "the modules of mha_jax: kernels (in, out)",
        "mha_jax/mha.py",
        with_and_without_out(
            separate("q_proj", "k_proj", "v_proj", "out_proj", leaf="kernel", heads=COLUMNS, back="(n h) e")
        ),
        others=_OF_JAX,
        carries=CARRIED,
    ),
    Layout(
        "mha_jax.qkv_proj",
        "the same with one projection for q, k and v",
        "mha_jax.MultiHeadAttention, fused_qkv=True",
        with_and_without_out(packed("qkv_proj", "out_proj", leaf="kernel", rows=COLUMNS, columns="(n h) e")),
        others=_OF_JAX,
        rules=("one width",),
        carries=CARRIED,
    ),
    Layout(
        "torch.nn.MultiheadAttention",
        "PyTorch's module: in_proj_weight, or three weights where key and value have another width",
        "torch/nn/modules/activation.py",
        (
            (Tensor("in_proj_weight", "qkv", "weight", ROWS), _TORCH_BIAS, *_TORCH_OUT),
            (*(Tensor(f"{p}_proj_weight", p, "weight", ROWS) for p in "qkv"), _TORCH_BIAS, *_TORCH_OUT),
        ),
        rules=("no groups", "out_proj", "square", "biases or none", "one head_dim"),
        prefixes=tuple(
            f"{stack}layers.{{i}}.{attention}"
            for stack in ("", "encoder.", "decoder.")
            for attention in ("self_attn", "multihead_attn")
        ),
    ),
    Layout(
        "qkv_proj",
        "one Linear for q, k and v",
        "mha_torch.MultiHeadAttention, fused_qkv=True",
        with_and_without_out(packed("qkv_proj", "out_proj")),
        others=beside(EVERYTHING),
        rules=("one width",),
        carries=CARRIED,
    ),
    Layout(
        "W_q",
        "four Linears W_q, W_k, W_v, W_o",
        "d2l.ai, section 11.5",
        with_and_without_out(separate("W_q", "W_k", "W_v", "W_o")),
    ),
    Layout(
        "W_Q",
        "four Linears W_Q, W_K, W_V, W_O",
        "a common habit",
        with_and_without_out(separate("W_Q", "W_K", "W_V", "W_O")),
    ),
    Layout(
        "w_q",
        "four Linears w_q, w_k, w_v, w_o",
        "a common habit",
        with_and_without_out(separate("w_q", "w_k", "w_v", "w_o")),
    ),
    Layout(
        "W_query",
        "Linears W_query, W_key, W_value, and perhaps out_proj",
        "Build a Large Language Model (From Scratch), chapter 3",
        with_and_without_out(separate("W_query", "W_key", "W_value", "out_proj")),
        ignored=("mask",),
    ),
    Layout(
        "heads.W_query",
        "a stack of single heads, each with W_query, W_key, W_value",
        "Build a Large Language Model (From Scratch), chapter 3",
        (
            tuple(
                Tensor(f"heads.{{n}}.W_{name}.{kind}", name[0], kind, axes)
                for kind, axes in (("weight", "h d"), ("bias", "h"))
                for name in ("query", "key", "value")
            ),
        ),
        rules=("no out_proj", "no groups"),
        ignored=("heads.*.mask",),
    ),
    *(
        Layout(
            name,
            about,
            source,
            (separate("query", "key", "value", "out", **_EINSUM),),
            rules=("out_proj", "one head_dim", *rules),
        )
        for name, about, source, rules in (
            (
                "flax.nnx",
                "nnx.MultiHeadAttention: kernels (in, N, H) and (N, H, out)",
                "flax/nnx/nn/attention.py",
                ("biases or none",),
            ),
            (
                "flax.linen",
                "linen.MultiHeadDotProductAttention, the same without groups",
                "flax/linen/attention.py",
                ("no groups", "biases or none"),
            ),
        )
    ),
    *(
        Layout(
            name,
            about,
            source,
            (separate("query", "key", "value", "attention_output", **_EINSUM),),
            rules=("out_proj", "one head_dim", *rules),
        )
        for name, about, source, rules in (
            (
                "keras.MultiHeadAttention",
                "kernels (in, N, H) and (N, H, out)",
                "keras/src/layers/attention/multi_head_attention.py",
                ("no groups", "biases or none"),
            ),
            (
                "keras.GroupQueryAttention",
                "the same, key and value with fewer heads",
                "keras/src/layers/attention/grouped_query_attention.py",
                ("biases or none",),
            ),
        )
    ),
    Layout(
        "equinox.nn.MultiheadAttention",
        "four Linears query_proj, key_proj, value_proj, output_proj",
        "equinox/nn/_attention.py",
        (separate("query_proj", "key_proj", "value_proj", "output_proj"),),
        rules=("no groups", "out_proj", "one head_dim"),
    ),
    Layout(
        "transformers.BERT",
        "self.query, self.key, self.value, output.dense",
        "transformers/models/bert/modeling_bert.py",
        (separate("self.query", "self.key", "self.value", "output.dense"),),
        rules=("no groups", "out_proj", "one width", "square", "biases"),
        ignored=("output.LayerNorm.*",),
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
            needs_spec=words[3] == "o_proj" and file != "llama",  # without norms they are transformers.LLaMA
        )
        for name, words, others, whose, file in (
            (
                "transformers.LLaMA",
                ("q_proj", "k_proj", "v_proj", "o_proj"),
                beside(("q_norm", "k_norm", "gate_proj", "sinks")),
                "also Mistral, Qwen, Gemma",
                "llama",
            ),
            (
                "transformers.Phi",
                ("q_proj", "k_proj", "v_proj", "dense"),
                beside(q_norm="q_layernorm", k_norm="k_layernorm"),
                "of Phi 1 and 2",
                "phi",
            ),
            (
                "transformers.HunYuan",
                ("q_proj", "k_proj", "v_proj", "o_proj"),
                beside(q_norm="query_layernorm", k_norm="key_layernorm"),
                "of HunYuan",
                "hunyuan_v1_dense",
            ),
            (
                "transformers.StableLM",
                ("q_proj", "k_proj", "v_proj", "o_proj"),
                beside(q_norm="q_layernorm.norms.{n}", k_norm="k_layernorm.norms.{n}"),
                "norms with weights for each head",
                "stablelm",
            ),
        )
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
    Layout(
        "meta.LLaMA",
        "wq, wk, wv, wo, with interleaved RoPE pairs",
        "meta-llama/llama, llama/model.py",
        (separate("wq", "wk", "wv", "wo"),),
        rope="interleaved",
        rules=("out_proj", "even", "whole halves"),
        carries=("rope",),
        ignored=("inner_attention.rope.freqs",),
        prefixes=("layers.{i}.attention",),
    ),
    *(
        Layout(
            name,
            f"attn_q, attn_k, attn_v, attn_output, with {words}",
            "ggml-org/llama.cpp, convert_hf_to_gguf.py",
            (separate("attn_q", "attn_k", "attn_v", "attn_output"),),
            rope=rope,
            rules=("out_proj", *rules),
            ignored=("attn_norm.*", "ffn_*"),
            prefixes=("blk.{i}",),
            carries=("rope",),
        )
        for name, words, rope, rules in (
            ("gguf.LLaMA", "interleaved RoPE pairs; also Mistral", "interleaved", ("even", "whole halves")),
            ("gguf.Qwen2", "RoPE pairs (i, i + H/2), which llama.cpp leaves as they are; also Gemma", "half", ()),
        )
    ),
    Layout(
        "ttnn",
        "one tensor for q, k and v, (in, out), heads padded to whole tiles",
        "mha_tt/weights.py",
        with_and_without_out(
            (
                Tensor("qkv_proj.weight", "qkv", "weight", COLUMNS),
                Tensor("qkv_proj.bias", "qkv", "bias", "1 (n h)"),
                Tensor("out_proj.weight", "out", "weight", "(n h) e"),
                Tensor("out_proj.bias", "out", "bias", "1 e"),
            )
        ),
        padded=True,
        rules=("one width", "whole halves", "one head_dim"),
        carries=CARRIED,
    ),
]

LAYOUTS: dict[str, Layout] = {
    layout.name: replace(layout, carries=CARRIED) if layout.name.startswith("transformers.") else layout
    for layout in _TABLE  # what no weight shows is in the config.json of models of transformers
}
"""Every layout by its name."""

ALIASES = {"mha_torch": "canonical"}
"""Other names of layouts."""
