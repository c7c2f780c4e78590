"""The list of cases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mha_spec import GridBias, RelativeBias
from parity.use.reporting.console import print_line

if TYPE_CHECKING:
    from rich.console import Console

    from mha_spec import AttentionSpec
    from parity.measure.core.case import Case

Settings = list[tuple[str, bool]]
"""Settings of a case in words, each with whether the case has it."""


def print_cases(cases: list[Case], out: Console) -> None:
    """Print cases, one per line: the name, the feature that fails with it, and its settings."""
    name_width = max(len(case.name) for case in cases)
    about_width = max(len(case.about) for case in cases)
    for case in cases:
        print_line(out, f"{case.name:<{name_width}}  {case.about:<{about_width}}  {covers(case)}")


def covers(case: Case) -> str:
    """Return the settings of a case in words: heads and tokens, then all that differ from the
    defaults.
    """
    spec = case.spec
    settings = [
        *_masks(case),
        (f"clip {spec.clip_qkv}", spec.clip_qkv is not None),
        *_latents(spec),
        *_modules(spec),
        *_rope(spec),
        (f"positions from {case.first_position}", bool(case.first_position)),
        ("own positions", case.position_ids is not None),
        *_scores(spec),
        (f"cache of {case.capacity} slots", case.is_cached),
        ("ragged", bool(case.new_lengths)),
        ("own slots", case.cache_slots is not None),
        *_quantization(case),
        *_parameters(spec),
        *_arrays(case),
    ]
    words = [name for name, applies in settings if applies]
    return ", ".join([_sizes(case), *words])


def _sizes(case: Case) -> str:
    """Return the numbers of heads and tokens."""
    spec = case.spec
    heads = f"{spec.num_heads}"
    if spec.num_kv_heads != spec.num_heads:
        heads += f"/{spec.num_kv_heads}"
    tokens = "+".join(map(str, case.chunks)) or f"{case.seq_len}"
    if case.seq_len_k is not None:
        tokens += f" over {case.seq_len_k}"
    return f"heads {heads} x {spec.head_dim}, tokens {case.batch} x {tokens}"


def _masks(case: Case) -> Settings:
    return [
        ("causal", case.is_causal),
        ("padding", case.key_padding_lengths is not None),
        ("segments", case.segment_ids is not None),
        (f"window {case.window_size}", case.window_size is not None),
        ("random mask", case.random_mask),
        ("own mask", case.mask is not None),
        ("bias", case.bias),
    ]


def _latents(spec: AttentionSpec) -> Settings:
    latent = spec.latent
    if latent is None:
        return []
    return [
        (f"latents of {latent.kv_rank} + {latent.rope_dim}", True),
        ("latent queries", latent.q_rank is not None),
        ("factors of latents", set(latent.factors.values()) != {1.0}),
    ]


def _modules(spec: AttentionSpec) -> Settings:
    return [
        ("shared k and v", spec.shared_kv),
        ("norm of q and k", spec.qk_norm is not None),
        ("norm of v", spec.v_norm is not None),
        ("norm of the context", spec.context_norm is not None),
        (f"values of {spec.value_head_dim}", spec.value_head_dim != spec.head_dim),
        ("gate", spec.gate is not None),
    ]


def _rope(spec: AttentionSpec) -> Settings:
    rope = spec.rope
    if rope is None:
        return []
    settings = [("RoPE", True)]
    if rope.scaling is not None:
        settings.append((f"{rope.scaling.kind} scaling", True))
    return [
        *settings,
        (f"{rope.rotated} {rope.rotary_dim} features", rope.rotary_dim is not None),
        ("interleaved pairs", rope.pairs == "interleaved"),
        (f"{rope.section_order} sections", rope.sections is not None),
        (f"{rope.section_frequencies} frequencies", rope.section_frequencies != "shared"),
    ]


def _scores(spec: AttentionSpec) -> Settings:
    return [
        (f"scale {spec.scale}", spec.scale is not None),
        ("temperature", spec.temperature is not None),
        ("ALiBi", spec.alibi is not None),
        ("relative bias", isinstance(spec.relative_bias, RelativeBias)),
        ("grid bias", isinstance(spec.relative_bias, GridBias)),
        ("relative products", spec.relative_products is not None),
        ("sinks", spec.sinks),
        (f"soft cap {spec.soft_cap}", spec.soft_cap is not None),
        (f"window {spec.window_size} of the layer", spec.window_size is not None),
        (f"chunks of {spec.chunk_size}", spec.chunk_size is not None),
    ]


def _quantization(case: Case) -> Settings:
    quantization = case.cache_quantization
    if quantization is None:
        return []
    group = quantization.scale_per.replace("_", " and ")
    other = (quantization.value_scale_per or quantization.scale_per).replace("_", " and ")
    return [
        (f"{quantization.dtype} cache, a scale per {group}", True),
        (f"for values per {other}", other != group),
        (f"a zero point: {quantization.zero_point}", quantization.has_zero_point),
        (
            f"exact in attention: {quantization.exact.replace('_', ' ')}",
            quantization.exact != "none",
        ),
        ("keys cached before RoPE", quantization.before_rope),
    ]


def _parameters(spec: AttentionSpec) -> Settings:
    has_bias = any(spec.qkv_biases) or spec.out_bias
    return [
        ("fused qkv", spec.fused_qkv),
        ("no biases", not has_bias),
        ("a bias of some", isinstance(spec.qkv_bias, tuple)),
        ("no out_proj", not spec.out_proj),
    ]


def _arrays(case: Case) -> Settings:
    return [
        ("strided", case.strided),
        ("large logits", case.gain > 1.0),
        (f"NaN {case.not_finite}", case.not_finite is not None),
        ("trained", case.trained is not None),
        (f"{case.dtype} only", case.dtype is not None),
    ]
