"""Docstring of a written layer: the specification, its axes and its sources."""

from __future__ import annotations

import textwrap

from mha_spec import AttentionSpec, GridBias, RelativeBias, RelativeProducts, SinusoidProducts
from parity.explain.writing.parts import norms_of
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
    kind = "self-attention"
    if call.is_cross:
        kind = "cross-attention"
    if call.is_causal:
        words = [f"Causal {kind}"]
    else:
        words = [kind.capitalize()]
    if spec.latent is not None:
        words.append("with latents")
    if spec.shared_kv and call.cache is None:
        words.append("over the keys and values of another layer")
    elif spec.shared_kv:
        words.append(f"over the {call.cache} cache of another layer")
    if spec.window_size is not None:
        words.append(f"within a window of {spec.window_size}")
    if spec.chunk_size is not None:
        words.append(f"within chunks of {spec.chunk_size}")
    if call.cache is not None and not spec.shared_kv:
        words.append(f"over a {call.cache} cache")
    return f"{' '.join(words)}."


def docstring_of(spec: AttentionSpec, framework: str, call: CallForm) -> str:
    """Return the docstring of a written module."""
    title = title_of(spec, call).removesuffix(".")
    paragraphs = [
        f"{title}: {_heads_of(spec)}, in {NAMES[framework]}.",
        f"Written by mha-parity from {spec!r}.",
        f"Axes: {', '.join(_axes_of(spec))}. Inputs are finite.",
    ]
    left_out = _left_out(spec, framework)
    if left_out:
        paragraphs.append(f"Left out, because it acts in training only: {', '.join(left_out)}.")
    paragraphs.append(f"Sources: {'; '.join(sources_of(spec))}.")
    return "\n\n".join(_filled(paragraph) for paragraph in paragraphs) + "\n"


def _heads_of(spec: AttentionSpec) -> str:
    features = f"{spec.head_dim} features"
    if spec.num_kv_heads == spec.num_heads:
        return f"{spec.num_heads} heads of {features}"
    return f"{spec.num_heads} query heads and {spec.num_kv_heads} key/value heads of {features}"


def _axes_of(spec: AttentionSpec) -> list[str]:
    axes = ["B batch", "T query tokens", "S key tokens", "N query heads"]
    if spec.num_kv_heads != spec.num_heads:
        axes.append("K key/value heads")
    axes.append("H features of a head")
    if spec.rope is not None:
        axes.append("R rotated features")
    axes.append("E width of the output")
    return axes


def _left_out(spec: AttentionSpec, framework: str) -> list[str]:
    """Return the fields of a layer that a written module lacks."""
    fields = []
    if spec.dropout and framework != "torch":
        fields.append("dropout")
    if spec.output_dropout:
        fields.append("output_dropout")
    return fields


def _filled(paragraph: str) -> str:
    # Three columns less, for the quotes that begin a docstring.
    return textwrap.fill(paragraph, WIDTH - 3, break_long_words=False, break_on_hyphens=False)


def sources_of(spec: AttentionSpec) -> list[str]:
    """Return the sources of the features of a layer."""
    kinds_of_norms = {norm.kind for norm in norms_of(spec).values()}
    sources = {
        "Attention Is All You Need, arXiv:1706.03762": True,
        "grouped-query attention, arXiv:2305.13245": spec.num_kv_heads != spec.num_heads,
        "cross-layer attention, arXiv:2405.12981": spec.shared_kv,
        "DeepSeek-V2, arXiv:2405.04434": spec.latent is not None,
        "RMSNorm, arXiv:1910.07467": "rms" in kinds_of_norms,
        "LayerNorm, arXiv:1607.06450": "layer" in kinds_of_norms,
        "RoFormer, arXiv:2104.09864": spec.rope is not None,
    }
    if spec.rope is not None and spec.rope.scaling is not None:
        kind = spec.rope.scaling.kind
        if kind in SCALINGS:
            sources[SCALINGS[kind]] = True
    products = None
    if isinstance(spec.relative_products, RelativeProducts):
        products = spec.relative_products
    sources |= {
        "Qwen2-VL, arXiv:2409.12191": spec.rope is not None and spec.rope.sections is not None,
        "Scalable-Softmax, arXiv:2501.19399": spec.temperature is not None,
        "Gemma 2, arXiv:2408.00118": spec.soft_cap is not None,
        "gpt-oss model card, arXiv:2508.10925": spec.sinks,
        "ALiBi, arXiv:2108.12409": spec.alibi is not None,
        "T5, arXiv:1910.10683": isinstance(spec.relative_bias, RelativeBias),
        "Swin Transformer, arXiv:2103.14030": isinstance(spec.relative_bias, GridBias),
        "Relative Position Representations, arXiv:1803.02155": products is not None,
        "DeBERTa, arXiv:2006.03654": products is not None and products.of_keys,
        "Transformer-XL, arXiv:1901.02860": isinstance(spec.relative_products, SinusoidProducts),
        "Longformer, arXiv:2004.05150": spec.window_size is not None,
        "Gated Attention, arXiv:2505.06708": spec.gate is not None,
    }
    return [source for source, is_used in sources.items() if is_used]
