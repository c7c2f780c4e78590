"""Input and output side of attention: projections, heads, norms, RoPE; gate and output.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv
value_head_dim, E d_model.
"""

from __future__ import annotations

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, InputError
from mha_tt.arrays import as_dtype, at_least_float32
from mha_tt.checks import check_features, check_gate
from mha_tt.device import zeros
from mha_tt.features.latent import expand_latents, project_latents
from mha_tt.features.rope import Rotation, positions_and_rotation
from mha_tt.features.temperature import apply_temperature
from mha_tt.heads import combine_unchecked, split_heads, split_unchecked
from mha_tt.layout import TILE, padded_features, padded_width
from mha_tt.weights import Project


def project_qkv(
    project: Project,
    query: Float[Tensor, "B T d_in"],
    key: Float[Tensor, "B S d_kv"] | Float[Tensor, "B K S H"],
    value: Float[Tensor, "B S d_kv"] | Float[Tensor, "B K S Hv"],
    spec: AttentionSpec,
    positions: Int[np.ndarray, "*axes #B T"] | Rotation | None = None,
) -> tuple[Float[Tensor, "B N T H"], Float[Tensor, "B K S H"], Float[Tensor, "B K S Hv"]]:
    """Project and clip the inputs, split heads, apply norms and RoPE, and scale queries by the
    temperature.

    Args:
        project: applies a projection or a norm by its name.
        query, key, value: inputs of the layer; the same array three times for self-attention. With
            `shared_kv` key and value are another layer's k and v, and are returned as they are.
        spec: the layer.
        positions: position of each token, (B or 1, T), or with sections (axes, B or 1, T); default:
            0, 1, …. A `Rotation` of them is uploaded once for many calls.

    Returns:
        q (B, N, T, H), k (B, K, S, H) and v (B, K, S, Hv).
    """
    if spec.latent is not None:
        q, latents = project_latents(project, query, spec, positions)
        k, v = expand_latents(project, latents, spec)
        return q, k, v
    positions, rotation = positions_and_rotation(query, positions, spec)
    q, k, v = _project_inputs(project, query, key, value, spec)
    # Operations follow the order of recorded programs, which a different order cannot replay.
    q = _to_heads(project, "q_norm", q, spec.num_heads, spec, rotation)
    if not spec.shared_kv:
        k = _to_heads(project, "k_norm", k, spec.num_kv_heads, spec, rotation)
    if spec.temperature is not None and positions is not None:
        q = apply_temperature(q, positions, spec.temperature)
    if not spec.shared_kv:
        v = _to_heads(project, "v_norm", v, spec.num_kv_heads, spec, None)
    return q, k, v


def _project_inputs(
    project: Project, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the features of q, k and v, (B, T or S, width), or heads, if `_unpack_qkv` splits a
    fused projection; with `shared_kv` k and v are heads already.
    """
    if spec.fused_qkv:
        if key is query and value is query:
            return _unpack_qkv(project("qkv_proj", query), spec)
        q, _, _ = _unpack_qkv(project("qkv_proj", query), spec)
        _, k, _ = _unpack_qkv(project("qkv_proj", key), spec)
        _, _, v = _unpack_qkv(project("qkv_proj", value), spec)
        return q, k, v
    q = project("q_proj", query)
    check_features("q_proj", q, padded_width("q_proj", spec))
    if spec.shared_kv:
        return q, key, value
    k = project("k_proj", key)
    check_features("k_proj", k, padded_width("k_proj", spec))
    v = project("v_proj", value)
    check_features("v_proj", v, padded_width("v_proj", spec))
    return q, k, v


def _to_heads(
    project: Project,
    norm_name: str,
    x: Tensor,
    num_heads: int,
    spec: AttentionSpec,
    rotation: Rotation | None,
) -> Tensor:
    """Clip projected features, split them into heads, and apply their norm and RoPE."""
    norm = spec.norms.get(norm_name)
    if spec.clip_qkv is not None:
        x = ttnn.clamp(x, -spec.clip_qkv, spec.clip_qkv)
    if norm is not None and norm.over == "width":
        x = project(norm_name, x)
    if len(x.shape) == 3:
        x = split_unchecked(x, num_heads)
    if norm is not None and norm.over == "head" and not norm.after_rope:
        x = project(norm_name, x)
    if rotation is not None:
        x = rotation.rotate(x)
    if norm is not None and norm.after_rope:
        x = project(norm_name, x)
    return x


def apply_gate(
    context: Float[Tensor, "B N T Hv"], gate: Float[Tensor, "B T gate_width"]
) -> Float[Tensor, "B N T Hv"]:
    """Return context * sigmoid(gate), gate (B, T, N * Hv), or (B, T, N) for one number per head.

    Source: Gated Attention for Large Language Models, arXiv:2505.06708.
    """
    check_gate(gate, context)
    if 0 in tuple(context.shape):
        return context
    gate = ttnn.sigmoid_accurate(at_least_float32(split_unchecked(gate, context.shape[1])))
    return as_dtype(ttnn.multiply(at_least_float32(context), gate), context.dtype)


def project_output(
    project: Project,
    context: Float[Tensor, "B N T Hv"],
    query: Float[Tensor, "B T d_in"],
    spec: AttentionSpec,
) -> Float[Tensor, "B T E"]:
    """Gate the context, combine its heads, normalize and project them, as the layer requires.

    Args:
        project: applies a projection or a norm by its name.
        context: weighted sums of values, (B, N, T, Hv).
        query: input of the layer, for the gate.
        spec: the layer.

    Returns:
        Output (B, T, E), or (B, T, N * Hv) without `out_proj`.
    """
    if spec.gate is not None:
        gate = project("gate_proj", query)
        if spec.gate.per_head:
            gate_width = spec.num_heads
        else:
            gate_width = padded_width("gate_proj", spec)
        check_features("gate_proj", gate, gate_width)
        context = apply_gate(context, gate)
    output = combine_unchecked(context)
    if spec.context_norm is not None:
        output = project("context_norm", output)
    if spec.out_proj:
        output = project("out_proj", output)
    return output


def _unpack_qkv(packed: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of a packed projection, split at once if heads have equal widths and no
    norm is over them.
    """
    width = sum(padded_width(f"{part}_proj", spec) for part in "qkv")
    if packed.shape[-1] != width:
        raise InputError(
            "qkv_proj",
            f"return the {width} features of all q, k and v",
            f"{packed.shape[-1]} features",
        )
    num_heads = spec.num_heads
    num_kv_heads = spec.num_kv_heads
    head_dim = padded_features("q_proj", spec)
    is_even = padded_features("v_proj", spec) == head_dim
    if not is_even or any(norm.over == "width" for norm in spec.norms.values()):
        keys_begin = num_heads * head_dim
        values_begin = (num_heads + num_kv_heads) * head_dim
        return (
            packed[:, :, :keys_begin],
            packed[:, :, keys_begin:values_begin],
            packed[:, :, values_begin:],
        )
    if 0 in (packed.shape[0], packed.shape[1]):
        shapes = [
            (packed.shape[0], heads, packed.shape[1], head_dim)
            for heads in (num_heads, num_kv_heads)
        ]
        q, kv = (zeros(shape, packed.dtype, packed.device()) for shape in shapes)
        return q, kv, kv
    if head_dim % TILE == 0:
        return ttnn.transformer.split_query_key_value_and_split_heads(
            packed, num_heads=num_heads, num_kv_heads=num_kv_heads, transpose_key=False
        )
    heads = split_heads(packed, num_heads + 2 * num_kv_heads)
    values_begin = num_heads + num_kv_heads
    return heads[:, :num_heads], heads[:, num_heads:values_begin], heads[:, values_begin:]
