"""Layouts of frameworks and other programs as tables, and `LAYOUTS`, which has all; `layout`
explains the fields.
"""

from __future__ import annotations

from typing import Any

from parity.port.conversion.layouts.layout import CARRIED, Layout, Ranks, Tensor
from parity.port.conversion.layouts.of_others import OF_OTHERS
from parity.port.conversion.layouts.of_transformers import OF_TRANSFORMERS
from parity.port.conversion.layouts.tensors import (
    COLUMNS,
    EINSUM,
    EVERYTHING,
    ROWS,
    optional,
    packed,
    separate,
    with_and_without_out,
)

_TORCH_OUT = (
    Tensor("out_proj.weight", "out", "weight", "e (n h)"),
    Tensor("out_proj.bias", "out", "bias", "e"),
)
_TORCH_BIAS = Tensor("in_proj_bias", "qkv", "bias", "(n h)")

_OF_JAX = optional(EVERYTHING, leaf="kernel", axes="d e")


def _of_einsum(name: str, about: str, source: str, out: str, *rules: str) -> Layout:
    """Return a layout of four kernels with an axis of heads; `out` names the last one."""
    form = separate("query", "key", "value", out, **EINSUM)
    return Layout(name, about, source, (form,), rules=("out_proj", "one head_dim", *rules))


def _gguf(name: str, words: str, **options: Any) -> Layout:
    """Return a layout of llama.cpp, whose kinds of models differ in the pairs of RoPE."""
    return Layout(
        name,
        f"attn_q, attn_k, attn_v, attn_output, with {words}",
        "ggml-org/llama.cpp, convert_hf_to_gguf.py",
        (separate("attn_q", "attn_k", "attn_v", "attn_output"),),
        ignored=("attn_norm.*", "ffn_*"),
        prefixes=("blk.{i}",),
        carries=("rope",),
        **options,
    )


_TABLE = [
    Layout(
        "canonical",
        "the form that conversions go through; the form of mha_torch's modules",
        "parity/measure/core/weights.py",
        with_and_without_out(separate("q_proj", "k_proj", "v_proj", "out_proj")),
        others=optional(EVERYTHING),
        carries=CARRIED,
    ),
    Layout(
        "mha_jax",
        "modules of mha_jax: kernels (in, out)",
        "mha_jax/mha.py",
        with_and_without_out(
            separate(
                "q_proj",
                "k_proj",
                "v_proj",
                "out_proj",
                leaf="kernel",
                heads=COLUMNS,
                back="(n h) e",
            )
        ),
        others=_OF_JAX,
        carries=CARRIED,
    ),
    Layout(
        "mha_jax.qkv_proj",
        "as mha_jax, with one projection for q, k and v",
        "mha_jax.MultiHeadAttention, fused_qkv=True",
        with_and_without_out(
            packed("qkv_proj", "out_proj", leaf="kernel", heads=COLUMNS, back="(n h) e")
        ),
        others=_OF_JAX,
        rules=("one width",),
        carries=CARRIED,
    ),
    Layout(
        "torch.nn.MultiheadAttention",
        "PyTorch's module: in_proj_weight, or three weights if key and value differ in width",
        "torch/nn/modules/activation.py",
        (
            (Tensor("in_proj_weight", "qkv", "weight", ROWS), _TORCH_BIAS, *_TORCH_OUT),
            (
                *(Tensor(f"{p}_proj_weight", p, "weight", ROWS) for p in "qkv"),
                _TORCH_BIAS,
                *_TORCH_OUT,
            ),
        ),
        rules=("no groups", "out_proj", "square", "biases or none", "one head_dim"),
        prefixes=(
            "layers.{i}.self_attn",
            "layers.{i}.multihead_attn",
            "encoder.layers.{i}.self_attn",
            "encoder.layers.{i}.multihead_attn",
            "decoder.layers.{i}.self_attn",
            "decoder.layers.{i}.multihead_attn",
        ),
    ),
    Layout(
        "qkv_proj",
        "one Linear for q, k and v",
        "mha_torch.MultiHeadAttention, fused_qkv=True",
        with_and_without_out(packed("qkv_proj", "out_proj")),
        others=optional(EVERYTHING),
        rules=("one width",),
        carries=CARRIED,
    ),
    Layout(
        "qkv_proj.heads",
        "one Linear for q, k and v: q, k, v of one head, then of the next; out_proj or o_proj",
        "UvA Deep Learning Tutorials, tutorial 6",
        (packed("qkv_proj", "o_proj"), packed("qkv_proj", "out_proj")),
        grouped=True,
        rules=("no groups", "out_proj", "one width"),
    ),
    Layout(
        "query_key_value",
        "query_key_value and dense, all q, then all k, then all v; ChatGLM from version 2 on, if "
        "heads are grouped",
        "zai-org/chatglm3-6b, modeling_chatglm.py, SelfAttention",
        (packed("query_key_value", "dense"),),
        rules=("out_proj", "one width"),
        prefixes=("transformer.encoder.layers.{i}.self_attention",),
    ),
    Layout(
        "nanoGPT",
        "Linears c_attn and c_proj, (out, in): all q, then all k, then all v",
        "karpathy/nanoGPT, model.py, CausalSelfAttention",
        (packed("c_attn", "c_proj"),),
        rules=("no groups", "out_proj", "one width", "square", "biases or none"),
        ignored=("bias",),
        prefixes=("transformer.h.{i}.attn", "model._orig_mod.transformer.h.{i}.attn"),
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
        "a common convention",
        with_and_without_out(separate("W_Q", "W_K", "W_V", "W_O")),
    ),
    Layout(
        "w_q",
        "four Linears w_q, w_k, w_v, w_o",
        "a common convention",
        with_and_without_out(separate("w_q", "w_k", "w_v", "w_o")),
    ),
    Layout(
        "W_query",
        "Linears W_query, W_key, W_value, and optionally out_proj",
        "Build a Large Language Model (From Scratch), chapter 3",
        with_and_without_out(separate("W_query", "W_key", "W_value", "out_proj")),
        ignored=("mask",),
    ),
    Layout(
        "heads.W_query",
        "a stack of single heads, each with W_query, W_key, W_value",
        "Build a Large Language Model (From Scratch), chapter 3",
        (
            (
                Tensor("heads.{n}.W_query.weight", "q", "weight", "h d"),
                Tensor("heads.{n}.W_key.weight", "k", "weight", "h d"),
                Tensor("heads.{n}.W_value.weight", "v", "weight", "h d"),
                Tensor("heads.{n}.W_query.bias", "q", "bias", "h"),
                Tensor("heads.{n}.W_key.bias", "k", "bias", "h"),
                Tensor("heads.{n}.W_value.bias", "v", "bias", "h"),
            ),
        ),
        rules=("no out_proj", "no groups"),
        ignored=("heads.*.mask",),
    ),
    _of_einsum(
        "flax.nnx",
        "nnx.MultiHeadAttention: kernels (in, N, H) and (N, H, out)",
        "flax/nnx/nn/attention.py",
        "out",
        "biases or none",
    ),
    _of_einsum(
        "flax.linen",
        "linen.MultiHeadDotProductAttention, as flax.nnx, without groups",
        "flax/linen/attention.py",
        "out",
        "no groups",
        "biases or none",
    ),
    _of_einsum(
        "keras.MultiHeadAttention",
        "kernels (in, N, H) and (N, H, out)",
        "keras/src/layers/attention/multi_head_attention.py",
        "attention_output",
        "no groups",
        "biases or none",
    ),
    _of_einsum(
        "keras.GroupQueryAttention",
        "as keras, key and value with fewer heads",
        "keras/src/layers/attention/grouped_query_attention.py",
        "attention_output",
        "biases or none",
    ),
    Layout(
        "equinox.nn.MultiheadAttention",
        "four Linears query_proj, key_proj, value_proj, output_proj",
        "equinox/nn/_attention.py",
        (separate("query_proj", "key_proj", "value_proj", "output_proj"),),
        rules=("no groups", "out_proj", "one head_dim"),
    ),
    *OF_TRANSFORMERS,
    *OF_OTHERS,
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
        ranks=Ranks(
            "consolidated.{rank}.pth",
            rows=("output.weight", "*.feed_forward.w1.weight", "*.feed_forward.w3.weight"),
            columns=("*.feed_forward.w2.weight",),
            embeddings="tok_embeddings.weight",
            copied=(
                "norm.weight",
                "*.attention_norm.weight",
                "*.ffn_norm.weight",
                "rope.freqs",
                "*.rope.freqs",
            ),
        ),
    ),
    _gguf(
        "gguf.LLaMA",
        "interleaved RoPE pairs; also Mistral",
        rope="interleaved",
        rules=("out_proj", "even", "whole halves"),
    ),
    _gguf(
        "gguf.Qwen2",
        "RoPE pairs (i, i + H/2), which llama.cpp leaves unchanged; also Qwen3, Gemma",
        rules=("out_proj", "rms norms, w"),  # for Gemma it adds 1 to the weights
        others=optional(q_norm="attn_q_norm", k_norm="attn_k_norm"),
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

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _TABLE}
"""Every layout by name."""

ALIASES = {"mha_torch": "canonical"}
"""Aliases of layouts."""
