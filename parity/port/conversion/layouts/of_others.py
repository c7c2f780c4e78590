"""Layouts of libraries that train and serve large models, as tables; `layout` explains the fields.

Derived from the named sources as of August 2026. None of these modules is run here:
`tests/parity/port/conversion/test_layouts_of_others.py` has the equations in which they use their
tensors.
"""

from __future__ import annotations

from typing import Any

from parity.port.conversion.layouts.layout import Layout, Ranks, Tensor
from parity.port.conversion.layouts.tensors import EINSUM, ROWS, optional, separate

_EACH_HEAD = {**EINSUM, "heads": "n d h"}


def _scales(leaf: str = "scale", **names: str) -> tuple[Tensor, ...]:
    """Return norms that have a weight of that name, and no bias."""
    norms: list[Tensor] = []
    for ours, theirs in names.items():
        norms.append(Tensor(f"{theirs}.{leaf}", f"{ours}.weight", "whole", "..."))
    return tuple(norms)


def _weights(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors that are not biases."""
    return tuple(tensor for tensor in tensors if tensor.kind != "bias")


_SINKS = Tensor("sinks", "sinks", "whole", "...")

_OUT = tuple(tensor for tensor in separate("", "", "", "out", **EINSUM) if tensor.holds == "out")
_MAXTEXT_NORMS = (*_scales(q_norm="query_norm", k_norm="key_norm", v_norm="value_norm"), _SINKS)
_MAXTEXT_CARRIES = ("rope", "rope.scaling", "scale")
_MAXTEXT_CARRIES_ALL = (
    *_MAXTEXT_CARRIES,
    *("soft_cap", "window_size", "chunk_size", "temperature", "qk_norm", "v_norm"),
)


def _maxtext(
    name: str, about: str, file: str, *forms: tuple[Tensor, ...], **options: Any
) -> Layout:
    """Return a layout of MaxText: needs a specification, and stacks on the second axis."""
    defaults = {
        "prefixes": ("params.decoder.layers_{i}.self_attention",),
        "needs_spec": True,
        "stack_axis": 1,
    }
    source = f"AI-Hypercomputer/maxtext, src/maxtext/{file}"
    return Layout(f"maxtext{name}", about, source, forms, **{**defaults, **options})


def _maxtext_separate(
    words: str, name: str = "", rules: tuple[str, ...] = (), **options: Any
) -> Layout:
    """Return a layout of four kernels of MaxText."""
    return _maxtext(
        name,
        f"kernels (in, N, H) and (N, H, out), with {words}; scanned on the second axis, the "
        "default. Scores are not scaled: the query kernel includes the scale, or "
        "query_pre_attn_scalar specifies it",
        "layers/attentions.py",
        separate("query", "key", "value", "out", **EINSUM),
        rules=("out_proj", "one head_dim", "rms norms, w", "scale set", *rules),
        **options,
    )


def _maxtext_fused(
    words: str, name: str = ".qkv_proj", rules: tuple[str, ...] = (), **options: Any
) -> Layout:
    """Return a layout of one kernel for q, k and v; shapes do not show how a mesh divided it, so
    each division has its own layout.
    """
    return _maxtext(
        name,
        f"fused_qkv: qkv_proj.kernel (in, N + 2 K, H), {words}. out.kernel, scan and scale as in "
        "maxtext",
        "layers/attentions.py, init_qkv_w and qkv_projection",
        (
            Tensor("qkv_proj.kernel", "qkv", "weight", "d n h"),
            Tensor("qkv_proj.bias", "qkv", "bias", "n h"),
            *_OUT,
        ),
        others=_MAXTEXT_NORMS,
        rules=("out_proj", "one width", "one head_dim", "rms norms, w", "scale set", *rules),
        carries=_MAXTEXT_CARRIES_ALL,
        **options,
    )


def _maxtext_of_parts(parts: int) -> Layout:
    words = f"for a mesh that divides heads into {parts} parts: q, then k, then v of each"
    return _maxtext_fused(words, f".qkv_proj.{parts}", rules=(f"{parts} parts",), blocks=parts)


_MAXTEXT = [
    _maxtext_separate(
        "RoPE pairs (i, i + H/2)", others=_MAXTEXT_NORMS, carries=_MAXTEXT_CARRIES_ALL
    ),
    _maxtext_separate(
        "interleaved RoPE pairs",
        ".LLaMA-3.1",
        rope="interleaved",
        rules=("even", "whole halves"),
        carries=_MAXTEXT_CARRIES,
    ),
    _maxtext_fused("all q, then all k, then all v, for a mesh that divides no heads"),
    _maxtext_of_parts(2),
    _maxtext_of_parts(4),
    _maxtext_of_parts(8),
    _maxtext(
        ".GPT-3",  # its scale differs from the scale of the same names in maxtext
        "fused_qkv of GPT-3: qkv_proj.kernel (in, 3, N, H), or query, key, value as in maxtext; "
        "out.kernel, scan",
        "models/gpt3.py, Gpt3MultiHeadAttention",
        (
            Tensor("qkv_proj.kernel", "qkv", "weight", "d p n h"),
            Tensor("qkv_proj.bias", "qkv", "bias", "p n h"),
            *_OUT,
        ),
        separate("query", "key", "value", "out", **EINSUM),
        rules=("no groups", "out_proj", "one width", "one head_dim", "biases"),
    ),
    _maxtext(
        ".MLA",
        "latents: wq_a, q_norm, wq_b (q_rank, N, H) or query (in, N, H); wkv_a, kv_norm, wkv_b "
        "(kv_rank, N, H - R + Hv); out (N, Hv, out); scanned as in maxtext. The module scales the "
        "scores by itself",
        "layers/attention_mla.py",
        (Tensor("query.kernel", "q", "weight", "d n h"), *_OUT),
        _OUT,
        others=(
            Tensor("wq_a.kernel", "q_a_proj.weight", "whole", "d e"),
            Tensor("wq_b.kernel", "q_b_proj.weight", "whole", "d n h"),
            Tensor("wkv_a.kernel", "kv_a_proj.weight", "whole", "d e"),
            Tensor("wkv_b.kernel", "kv_b_proj.weight", "whole", "d n h"),
            *_scales(q_a_norm="q_norm", kv_a_norm="kv_norm"),
        ),
        prefixes=(
            "params.decoder.dense_layers_{i}.self_attention",
            "params.decoder.moe_layers_{i}.self_attention",
        ),
        rules=("out_proj",),
        carries=("rope", "rope.scaling"),
    ),
]

_TUNIX = [
    Layout(
        "tunix.LLaMA",
        "q_proj.w, k_proj.w, v_proj.w (in, N, H), o_proj.w (N, H, out), q_bias, k_bias, v_bias; "
        "also Qwen2 and Qwen3",
        "google/tunix, tunix/models/llama3/model.py, qwen2/model.py, qwen3/model.py",
        (
            (
                *_weights(
                    separate("q_proj", "k_proj", "v_proj", "o_proj", **EINSUM | {"leaf": "w"})
                ),
                Tensor("q_bias", "q", "bias", "(n h)"),
                Tensor("k_bias", "k", "bias", "(n h)"),
                Tensor("v_bias", "v", "bias", "(n h)"),
            ),
        ),
        others=_scales("w", q_norm="q_norm", k_norm="k_norm"),
        rules=("out_proj", "one head_dim", "no out bias", "rms norms, w"),
        prefixes=("layers.{i}.attn",),
        carries=("rope",),
    ),
    Layout(
        "tunix.Gemma",
        "qkv_einsum.w (3, N, in, H), or with groups q_einsum.w and kv_einsum.w (2, K, in, H); "
        "attn_vec_einsum.w",
        "google/tunix, tunix/models/gemma/model.py, gemma3/model.py",
        (
            (
                Tensor("qkv_einsum.w", "qkv", "weight", "p n d h"),
                Tensor("attn_vec_einsum.w", "out", "weight", "n h e"),
            ),
            (
                Tensor("q_einsum.w", "q", "weight", "n d h"),
                Tensor("kv_einsum.w", "kv", "weight", "p n d h"),
                Tensor("attn_vec_einsum.w", "out", "weight", "n h e"),
            ),
        ),
        others=_scales(q_norm="_query_norm", k_norm="_key_norm"),
        rules=("out_proj", "one head_dim", "one width", "no biases", "rms norms, 1+w"),
        prefixes=("layers.{i}.attn",),
        carries=("rope", "rope.scaling", "scale", "soft_cap", "window_size"),
    ),
]

_KERAS_HUB = [
    Layout(
        "keras_hub.LLaMA",
        "the names of keras.GroupQueryAttention, and norms and sinks; also Mistral, Qwen, Qwen3, "
        "Phi-3, gpt-oss",
        "keras-team/keras-hub, keras_hub/src/models/llama/llama_attention.py, "
        "qwen3/qwen3_attention.py",
        (separate("query", "key", "value", "attention_output", **EINSUM),),
        others=(*_scales(q_norm="query_dense_layernorm", k_norm="key_dense_layernorm"), _SINKS),
        rules=("out_proj", "one head_dim", "rms norms, w"),
        carries=("rope", "rope.scaling", "window_size"),
    ),
    Layout(
        "keras_hub.Gemma",
        "query, key, value (N, in, H), attention_output (N, H, out), without biases; Gemma 1 to 3",
        "keras-team/keras-hub, keras_hub/src/models/gemma/gemma_attention.py, "
        "gemma3/gemma3_attention.py",
        (_weights(separate("query", "key", "value", "attention_output", **_EACH_HEAD)),),
        others=_scales(q_norm="query_norm", k_norm="key_norm"),
        rules=("out_proj", "one head_dim", "no biases", "rms norms, 1+w"),
        carries=("rope", "rope.scaling", "scale", "soft_cap", "window_size"),
    ),
    Layout(
        "keras_hub.BLOOM",
        "query_dense, key_dense, value_dense (in, N, H), output_dense (in, out); also Falcon",
        "keras-team/keras-hub, keras_hub/src/models/bloom/bloom_attention.py, "
        "falcon/falcon_attention.py",
        (
            separate(
                "query_dense",
                "key_dense",
                "value_dense",
                "output_dense",
                **EINSUM | {"back": "(n h) e"},
            ),
        ),
        rules=("no groups", "out_proj", "one head_dim", "biases"),
        carries=("alibi",),
    ),
]


def _torchtitan(
    name: str, words: str, rules: tuple[str, ...], carries: tuple[str, ...] = (), **options: Any
) -> Layout:
    """Return a layout of torchtitan."""
    return Layout(
        name,
        f"qkv_linear.wq, wk, wv and wo, with {words}",
        "pytorch/torchtitan, torchtitan/models/common/attention.py",
        (separate("qkv_linear.wq", "qkv_linear.wk", "qkv_linear.wv", "wo"),),
        rules=("out_proj", *rules),
        prefixes=("layers.{i}.attention",),
        carries=("rope", "rope.scaling", *carries),
        **options,
    )


_TORCHTITAN = [
    _torchtitan(
        "torchtitan.LLaMA",
        "interleaved RoPE pairs; files from before qkv_linear are meta.LLaMA",
        rope="interleaved",
        rules=("even", "whole halves"),
    ),
    _torchtitan(
        "torchtitan.Qwen3",
        "RoPE pairs (i, i + H/2); also gpt-oss; files from before qkv_linear are in no layout here",
        rules=("rms norms, w",),
        carries=("window_size",),
        others=(*_scales("weight", q_norm="q_norm", k_norm="k_norm"), _SINKS),
    ),
]


def _megatron(name: str, holds: str, words: str, **options: Any) -> Layout:
    """Return a layout of Megatron-LM, whose packed tensor holds some projections."""
    return Layout(
        name,
        f"linear_qkv holds the queries of a group, {words}its key and value head; linear_proj",
        "NVIDIA/Megatron-LM, megatron/core/transformer/attention.py",
        (
            (
                Tensor("linear_qkv.weight", holds, "weight", ROWS),
                Tensor("linear_qkv.bias", holds, "bias", "(n h)"),
                Tensor("linear_proj.weight", "out", "weight", "e (n h)"),
                Tensor("linear_proj.bias", "out", "bias", "e"),
            ),
        ),
        others=optional(
            q_norm="q_layernorm", k_norm="k_layernorm", sinks="core_attention.softmax_offset"
        ),
        grouped=True,
        rules=("out_proj", "one width", "one head_dim"),
        ignored=("linear_qkv.layer_norm_weight", "linear_qkv.layer_norm_bias", "*._extra_state"),
        prefixes=("decoder.layers.{i}.self_attention",),
        carries=("rope", "rope.scaling", "scale", "window_size", "qk_norm"),
        ranks=Ranks(
            "mp_rank_{rank}/model_optim_rng.pt",
            rows=("*embedding.word_embeddings.weight", "*output_layer.weight"),
            columns=("*.mlp.linear_fc2.weight",),
            gated=(
                ("*.mlp.linear_fc1.weight", "linear_fc2.weight"),
                ("*.mlp.linear_fc1.bias", "linear_fc2.weight"),
            ),
            copied=(
                "*layernorm.*",
                "*layer_norm_*",
                "*.linear_fc2.bias",
                "*position_embeddings.weight",
            ),
        ),
        **options,
    )


_MEGATRON = [
    _megatron("megatron", "qkv", ""),
    # Shapes would suggest more heads instead of gates.
    _megatron("megatron.gate", "qgkv", "their gates, ", needs_spec=True),
]

OF_OTHERS = [*_MAXTEXT, *_TUNIX, *_KERAS_HUB, *_TORCHTITAN, *_MEGATRON]
"""The layouts of these libraries."""
