"""Cases drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mha_spec import (
    Alibi,
    AttentionSpec,
    DynamicScaling,
    Gate,
    GridBias,
    Latent,
    LinearScaling,
    Llama3Scaling,
    Norm,
    ProportionalScaling,
    RelativeBias,
    RelativeProducts,
    Rope,
    Temperature,
    YarnScaling,
)
from parity.measure.core.case import Case

NUM_PLAIN = 6
"""Number of the first random cases (those in `CASES`) without features of recent models."""


def random_case(seed: int) -> Case:
    """Return a case with a random layer, sizes and mask: `random-0`, `random-1`, …

    From random-6 on, layers also have features of recent models, which are drawn last.
    """
    rng = np.random.default_rng([0x9A817, seed])

    def choose(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    # Each draw depends on those before it, so their number and order must stay.
    num_kv_heads = choose(1, 2, 3)
    head_dim = choose(2, 4, 8, 16, 32, 64)
    is_cross = bool(choose(False, False, True))
    batch, seq_len, seq_len_k = choose(1, 2, 3), int(rng.integers(1, 65)), int(rng.integers(1, 65))
    if not is_cross:
        seq_len_k = None
    d_model, num_heads = int(rng.integers(3, 65)), num_kv_heads * choose(1, 2, 4)
    d_in, d_kv, rope = int(rng.integers(3, 65)), None, None
    if is_cross:
        d_kv = int(rng.integers(3, 65))
    qkv_bias, out_bias = bool(choose(True, False)), bool(choose(True, False))
    out_proj = bool(choose(True, True, False))
    fused_qkv = bool(choose(True, False)) and not is_cross
    if not is_cross:
        rope = choose(None, Rope(10000.0), Rope(500000.0))
    spec = AttentionSpec(
        d_model,
        num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_in=d_in,
        d_kv=d_kv,  # pyright: ignore[reportArgumentType]
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        out_proj=out_proj,
        fused_qkv=fused_qkv,
        rope=rope,
    )
    key_len = seq_len if seq_len_k is None else seq_len_k
    case = Case(
        f"random-{seed}",
        spec,
        "a layer, sizes and a mask drawn at random",
        batch=batch,
        seq_len=seq_len,
        seq_len_k=seq_len_k,
        is_causal=bool(choose(True, False)),
        key_padding_lengths=choose(
            None, tuple(int(n) for n in rng.integers(0, key_len + 1, batch))
        ),
        random_mask=bool(choose(True, False, False)),
        bias=bool(choose(True, False, False)),
        gain=choose(1.0, 3.0, 12.0),
    )
    if seed < NUM_PLAIN:
        return case
    features = _features(case, choose)
    position = 0
    # Together with a temperature, logits would be larger than in any untrained layer.
    if features.rope is not None and features.temperature is None:
        position = choose(0, 0, 4090)
    relative_bias = choose(None, None, RelativeBias(8, 8), RelativeBias(7, 12, bidirectional=False))
    if features.alibi is None:
        features = replace(features, relative_bias=relative_bias)
    spec = _perhaps_latent(features, choose)
    grid = choose(*[None] * 7, GridBias(8, 8), GridBias(7, 9, class_token=True))
    if not spec.has_distance_bias and spec.span is None:
        spec = replace(spec, relative_bias=grid)
    context_norm = choose(
        *[None] * 7, Norm(over="width", eps=0.01), Norm("layer", over="width", bias=True, eps=0.01)
    )
    if spec.gate is None and spec.latent is None and spec.value_head_dim >= 8:
        spec = replace(spec, context_norm=context_norm)
    products = choose(
        *[None] * 7,
        RelativeProducts(5, 3),
        RelativeProducts(7, 8, 4, 12, of_keys=True, per_head=True),
    )
    if spec.latent is None and spec.soft_cap is None:
        spec = replace(spec, relative_products=products)
    if choose(*[False] * 7, True) and not is_cross and spec.latent is None:
        without = {"fused_qkv": False, "v_norm": None, "qkv_bias": any(spec.qkv_biases)}
        spec = replace(spec, shared_kv=True, **without)
    return replace(case, spec=spec, first_position=position)


def _features(case: Case, choose: Callable[..., Any]) -> AttentionSpec:
    """Return the layer of a case with a few optional features."""
    spec = case.spec
    window, chunk = choose((None, None), (None, None), (None, None), (4, None), (None, 4))
    rope = spec.rope
    if rope is not None:
        rope = choose(rope, *_ropes(rope, spec.head_dim))
    temperature = choose(
        None, None, None, Temperature(4, 0.5), Temperature(3, 0.5, first_position=1)
    )
    if rope is not None and rope.sections:
        temperature = None
    value_head_dim = choose(spec.head_dim, spec.head_dim, 12, 20)
    qkv_bias = spec.qkv_bias
    if not spec.fused_qkv:
        qkv_bias = choose(qkv_bias, qkv_bias, (True, False, True))
    qk_norm = v_norm = None
    # With two or four features, a norm enlarges too few elements to measure their noise.
    if spec.head_dim >= 8:
        qk_norm = choose(*[None] * 4, *_qk_norms(has_rope=rope is not None))
        v_norm = choose(None, None, None, Norm(eps=0.01), Norm(weight=None, eps=0.01))
    return replace(
        spec,
        value_head_dim=value_head_dim,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        v_norm=v_norm,
        clip_qkv=choose(None, None, None, 0.75),
        gate=choose(None, None, Gate(), Gate(per_head=True, bias=True)),
        rope=rope,
        scale=choose(None, None, 0.25),
        temperature=temperature,
        soft_cap=choose(None, None, None, 20.0 * case.gain),
        window_size=window,
        chunk_size=chunk,
        sinks=choose(False, False, True),
        alibi=choose(None, None, Alibi(), Alibi(max_bias=4.0, scaled=True)),
    )


def _qk_norms(*, has_rope: bool) -> list[Norm]:
    """Return kinds of norms of queries and keys."""
    # An eps of 0.01 is far larger than the eps of models, so that a different one shows.
    norms = [
        Norm(eps=0.01),
        Norm("layer", weight="1+w", bias=True, eps=0.01),
        Norm(over="width", eps=0.01),
        Norm(per_head=True, eps=0.01),
    ]
    if has_rope:
        norms.append(Norm(weight=None, eps=0.01, after_rope=True))
    return norms


def _perhaps_latent(spec: AttentionSpec, choose: Callable[..., Any]) -> AttentionSpec:
    """Return one layer in six with latents instead of the fields that exclude them."""
    # The ranks 20 and 12 are a choice: sizes that heads do not have.
    latent = choose(*[None] * 5, Latent(20, spec.head_dim // 2, choose(None, 12), eps=0.01))
    # Half of the features of a head are rotated: below 8 these would be fewer than two pairs.
    if latent is None or spec.head_dim < 8 or spec.d_kv != spec.d_in:
        return spec
    rope = spec.rope
    if rope is not None:
        rope = Rope(rope.theta, rotary_dim=latent.rope_dim, rotated="last", pairs=rope.pairs)
    without = {"fused_qkv": False, "qk_norm": None, "v_norm": None, "clip_qkv": None}
    # One projection makes the latents of keys and values.
    q_bias, kv_bias, _ = spec.qkv_biases
    biases = (q_bias, kv_bias, kv_bias)
    return replace(
        spec, latent=latent, num_kv_heads=spec.num_heads, rope=rope, qkv_bias=biases, **without
    )


def _ropes(rope: Rope, head_dim: int) -> list[Rope]:
    """Return other kinds of RoPE for heads of this width."""
    # Dynamic scaling is undefined for a single pair.
    by_length = DynamicScaling(4.0, 6) if head_dim >= 4 else LinearScaling(4.0)
    ropes = [
        replace(rope, pairs="interleaved"),
        replace(rope, scaling=LinearScaling(8.0)),
        replace(rope, scaling=by_length),
        replace(rope, scaling=Llama3Scaling(8.0, 64)),
        replace(rope, scaling=YarnScaling(4.0, 64)),
        replace(rope, scaling=ProportionalScaling(0.5)),
    ]
    if head_dim >= 8:
        ropes.append(replace(rope, rotary_dim=head_dim // 2, rotated="first"))
        ropes.append(replace(rope, rotary_dim=head_dim // 2, rotated="last"))
        ropes.append(replace(rope, sections=(head_dim // 2 - 2, 1, 1)))
    return ropes
