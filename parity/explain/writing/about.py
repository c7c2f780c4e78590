"""Docstring of a written layer: the specification, its axes and its sources."""

from __future__ import annotations

import textwrap

from mha_spec import AttentionSpec, GridBias, RelativeBias, RelativeProducts
from parity.explain.writing.specialize import WIDTH
from parity.explain.writing.subject import CallForm

NAMES = {"jax": "JAX", "torch": "PyTorch", "ttnn": "TTNN"}

SCALINGS = {
    "linear": "position interpolation, arXiv:2306.15595",
    "dynamic": "NTK-aware scaling, arXiv:2309.00071",
    "yarn": "YaRN, arXiv:2309.00071",
    "llama3": "The Llama 3 Herd of Models, arXiv:2407.21783",
    "longrope": "LongRoPE, arXiv:2402.13753",
}


def title_of(spec: AttentionSpec, call: CallForm) -> str:
    """Return a sentence that names the kind of layer."""
    kind = "cross-attention" if call.is_cross else "self-attention"
    words = ["Causal " + kind if call.is_causal else kind.capitalize()]
    if spec.latent is not None:
        words.append("with latents")
    if spec.shared_kv:
        words.append(
            f"over the {'keys and values' if call.cache is None else f'{call.cache} cache'} of "
            f"another layer"
        )
    if spec.window_size is not None:
        words.append(f"within a window of {spec.window_size}")
    if spec.chunk_size is not None:
        words.append(f"within chunks of {spec.chunk_size}")
    if call.cache is not None and not spec.shared_kv:
        words.append(f"over a {call.cache} cache")
    return f"{' '.join(words)}."


def docstring_of(spec: AttentionSpec, framework: str, call: CallForm) -> str:
    """Return the docstring of a written module."""
    axes = ["B batch", "T query tokens", "S key tokens", "N query heads"]
    axes += ["K key/value heads"] * (spec.num_kv_heads != spec.num_heads) + ["H features of a head"]
    axes += ["R rotated features"] * (spec.rope is not None) + ["E width of the output"]
    left_out = [name for name in ("dropout", "output_dropout") if getattr(spec, name)]
    if framework == "torch":
        left_out = [name for name in left_out if name != "dropout"]
    heads = f"{spec.num_heads} heads of {spec.head_dim} features"
    if spec.num_kv_heads != spec.num_heads:
        heads = (
            f"{spec.num_heads} query heads and {spec.num_kv_heads} key/value heads of "
            f"{spec.head_dim} features"
        )
    paragraphs = [
        f"{title_of(spec, call)[:-1]}: {heads}, in {NAMES[framework]}.",
        f"Written by mha-parity from {spec!r}.",
        f"Axes: {', '.join(axes)}. Inputs are finite.",
        *(
            [f"Left out, because it acts in training only: {', '.join(left_out)}."]
            if left_out
            else []
        ),
        f"Sources: {'; '.join(sources_of(spec))}.",
    ]
    filled = (
        textwrap.wrap(each, WIDTH - 3, break_long_words=False, break_on_hyphens=False)
        for each in paragraphs
    )
    return "\n\n".join("\n".join(lines) for lines in filled) + "\n"


def sources_of(spec: AttentionSpec) -> list[str]:
    """Return the sources of the features of a layer."""
    norms = [norm for norm in (spec.qk_norm, spec.v_norm, spec.context_norm) if norm is not None]
    scaling = None if spec.rope is None else spec.rope.scaling
    products = None
    if isinstance(spec.relative_products, RelativeProducts):
        products = spec.relative_products
    found = {
        "Attention Is All You Need, arXiv:1706.03762": True,
        "grouped-query attention, arXiv:2305.13245": spec.num_kv_heads != spec.num_heads,
        "cross-layer attention, arXiv:2405.12981": spec.shared_kv,
        "DeepSeek-V2, arXiv:2405.04434": spec.latent is not None,
        "RMSNorm, arXiv:1910.07467": spec.latent is not None
        or any(norm.kind == "rms" for norm in norms),
        "LayerNorm, arXiv:1607.06450": any(norm.kind == "layer" for norm in norms),
        "RoFormer, arXiv:2104.09864": spec.rope is not None,
        SCALINGS.get(scaling.kind if scaling else "", ""): scaling is not None
        and scaling.kind in SCALINGS,
        "Qwen2-VL, arXiv:2409.12191": spec.rope is not None and spec.rope.sections is not None,
        "Scalable-Softmax, arXiv:2501.19399": spec.temperature is not None,
        "Gemma 2, arXiv:2408.00118": spec.soft_cap is not None,
        "gpt-oss model card, arXiv:2508.10925": spec.sinks,
        "ALiBi, arXiv:2108.12409": spec.alibi is not None,
        "T5, arXiv:1910.10683": isinstance(spec.relative_bias, RelativeBias),
        "Swin Transformer, arXiv:2103.14030": isinstance(spec.relative_bias, GridBias),
        "Relative Position Representations, arXiv:1803.02155": products is not None,
        "DeBERTa, arXiv:2006.03654": products is not None and products.of_keys,
        "Longformer, arXiv:2004.05150": spec.window_size is not None,
        "Gated Attention, arXiv:2505.06708": spec.gate is not None,
    }
    return [source for source, is_used in found.items() if is_used]
