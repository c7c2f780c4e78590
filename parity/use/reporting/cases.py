"""The list of cases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from mha_spec import GridBias, RelativeBias

if TYPE_CHECKING:
    from rich.console import Console

    from mha_spec import Rope
    from parity.measure.core.case import Case


def print_cases(cases: list[Case], out: Console) -> None:
    """Print cases, one per line: the name, the feature that fails with it, and its settings."""
    name_width = max(len(case.name) for case in cases)
    about_width = max(len(case.about) for case in cases)
    for case in cases:
        line = f"{case.name:<{name_width}}  {case.about:<{about_width}}  {covers(case)}"
        out.print(Text(line), soft_wrap=True)


def covers(case: Case) -> str:
    """Return the settings of a case in words: heads and tokens, then all that differ from the
    defaults.
    """
    spec = case.spec
    heads = (
        f"{spec.num_heads}"
        if spec.num_kv_heads == spec.num_heads
        else f"{spec.num_heads}/{spec.num_kv_heads}"
    )
    tokens = "+".join(map(str, case.chunks)) or str(case.seq_len)
    across = f" over {case.seq_len_k}" if case.seq_len_k is not None else ""
    said = {
        "causal": case.is_causal,
        "padding": case.key_padding_lengths is not None,
        "segments": case.segment_ids is not None,
        f"window {case.window_size}": case.window_size is not None,
        "random mask": case.random_mask,
        "bias": case.bias,
        f"clip {spec.clip_qkv}": spec.clip_qkv is not None,
        f"latents of {spec.latent.kv_rank} + {spec.latent.rope_dim}"
        if spec.latent
        else "": spec.latent is not None,
        "latent queries": spec.latent is not None and spec.latent.q_rank is not None,
        "factors of latents": spec.latent is not None
        and set(spec.latent.factors.values()) != {1.0},
        "shared k and v": spec.shared_kv,
        "norm of q and k": spec.qk_norm is not None,
        "norm of v": spec.v_norm is not None,
        "norm of the context": spec.context_norm is not None,
        f"values of {spec.value_head_dim}": spec.value_head_dim != spec.head_dim,
        "gate": spec.gate is not None,
        "RoPE": spec.rope is not None,
        **_kind_of_rope(spec.rope),
        f"positions from {case.first_position}": bool(case.first_position),
        f"scale {spec.scale}": spec.scale is not None,
        "temperature": spec.temperature is not None,
        "ALiBi": spec.alibi is not None,
        "relative bias": isinstance(spec.relative_bias, RelativeBias),
        "grid bias": isinstance(spec.relative_bias, GridBias),
        "relative products": spec.relative_products is not None,
        "sinks": spec.sinks,
        f"soft cap {spec.soft_cap}": spec.soft_cap is not None,
        f"window {spec.window_size} of the layer": spec.window_size is not None,
        f"chunks of {spec.chunk_size}": spec.chunk_size is not None,
        f"cache of {case.capacity} slots": case.is_cached,
        "ragged": bool(case.new_lengths),
        "fused qkv": spec.fused_qkv,
        "no biases": not (any(spec.qkv_biases) or spec.out_bias),
        "a bias of some": isinstance(spec.qkv_bias, tuple),
        "no out_proj": not spec.out_proj,
        "strided": case.strided,
        "large logits": case.gain > 1.0,
        f"NaN {case.not_finite}": case.not_finite is not None,
        "trained": case.trained is not None,
        f"{case.dtype} only": case.dtype is not None,
    }
    sizes = f"heads {heads} x {spec.head_dim}, tokens {case.batch} x {tokens}{across}"
    return ", ".join([sizes, *(words for words, holds in said.items() if holds)])


def _kind_of_rope(rope: Rope | None) -> dict[str, bool]:
    if rope is None:
        return {}
    return {
        f"{rope.scaling.kind} scaling" if rope.scaling else "": rope.scaling is not None,
        f"{rope.rotated} {rope.rotary_dim} features": rope.rotary_dim is not None,
        "interleaved pairs": rope.pairs == "interleaved",
        f"{rope.section_order} sections": rope.sections is not None,
        f"{rope.section_frequencies} frequencies": rope.section_frequencies != "shared",
    }
