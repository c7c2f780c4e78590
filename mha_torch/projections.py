"""Input and output side of attention: projections, heads, norms, RoPE; gate and output.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv
value_head_dim, E d_model.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mha_spec import AttentionSpec, InputError
from mha_torch.arrays import at_least_float32
from mha_torch.checks import check_features, check_gate
from mha_torch.features.latent import expand_latents, project_latents
from mha_torch.features.rope import Rotation, apply_rope, rotation_of
from mha_torch.features.temperature import apply_temperature
from mha_torch.heads import split_unchecked
from mha_torch.weights import Project


def project_qkv(
    project: Project,
    query: Float[Tensor, "B T d_in"],
    key: Float[Tensor, "B S d_kv"] | Float[Tensor, "B K S H"],
    value: Float[Tensor, "B S d_kv"] | Float[Tensor, "B K S Hv"],
    spec: AttentionSpec,
    positions: Int[Tensor, "*axes #B T"] | None = None,
) -> tuple[Float[Tensor, "B N T H"], Float[Tensor, "B K S H"], Float[Tensor, "B K S Hv"]]:
    """Project and clip the inputs, split heads, apply norms and RoPE, and scale queries by the
    temperature.

    Args:
        project: applies a projection or a norm by its name.
        query, key, value: inputs of the layer; the same array three times for self-attention. With
            `shared_kv` key and value are another layer's k and v, and are returned as they are.
        spec: the layer.
        positions: position of each token, (B or 1, T), or with sections (axes, B or 1, T); default:
            0, 1, ….

    Returns:
        q (B, N, T, H), k (B, K, S, H) and v (B, K, S, Hv).
    """
    if spec.latent is not None:
        q, latents = project_latents(project, query, spec, positions)
        k, v = expand_latents(project, latents, spec)
        return q, k, v
    q, k, v = _project_inputs(project, query, key, value, spec)
    if positions is None and spec.has_positions:
        positions = torch.arange(q.shape[1], device=q.device)[None]
    rotation = None
    if spec.rope is not None and positions is not None:
        rotation = rotation_of(positions, spec.rope, spec.head_dim, q.dtype)
    q = _to_heads(project, "q_norm", q, spec.num_heads, spec, rotation)
    if spec.temperature is not None and positions is not None:
        q = apply_temperature(q, positions, spec.temperature)
    if spec.shared_kv:
        return q, k, v
    k = _to_heads(project, "k_norm", k, spec.num_kv_heads, spec, rotation)
    v = _to_heads(project, "v_norm", v, spec.num_kv_heads, spec, None)
    return q, k, v


def _project_inputs(
    project: Project, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the features of q, k and v, (B, T or S, width); with `shared_kv` k and v are heads
    already.
    """
    if spec.fused_qkv:
        if key is query and value is query:
            return _unpack_qkv(project("qkv_proj", query), spec)
        q, _, _ = _unpack_qkv(project("qkv_proj", query), spec)
        _, k, _ = _unpack_qkv(project("qkv_proj", key), spec)
        _, _, v = _unpack_qkv(project("qkv_proj", value), spec)
        return q, k, v
    q = project("q_proj", query)
    check_features("q_proj", q, spec.q_width)
    if spec.shared_kv:
        return q, key, value
    k = project("k_proj", key)
    check_features("k_proj", k, spec.k_width)
    v = project("v_proj", value)
    check_features("v_proj", v, spec.v_width)
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
        x = x.clamp(-spec.clip_qkv, spec.clip_qkv)
    if norm is not None and norm.over == "width":
        x = project(norm_name, x)
    x = split_unchecked(x, num_heads)
    if norm is not None and norm.over == "head" and not norm.after_rope:
        x = project(norm_name, x)
    if spec.rope is not None and rotation is not None:
        x = apply_rope(x, rotation, spec.rope)
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
    gate = torch.sigmoid(at_least_float32(split_unchecked(gate, context.shape[1])))
    return (at_least_float32(context) * gate).to(context.dtype)


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
            gate_width = spec.context_width
        check_features("gate_proj", gate, gate_width)
        context = apply_gate(context, gate)
    # As `combine_heads`, without the cost of its call in each decoding step.
    output = context.transpose(1, 2).flatten(-2)
    if spec.context_norm is not None:
        output = project("context_norm", output)
    if spec.out_proj:
        output = project("out_proj", output)
    return output


def _unpack_qkv(packed: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return the features of q, k and v from the features of their common projection."""
    width = spec.q_width + spec.k_width + spec.v_width
    if packed.shape[-1] != width:
        raise InputError(
            "qkv_proj",
            f"return the {width} features of all q, k and v",
            f"{packed.shape[-1]} features",
        )
    q, k, v = packed.split([spec.q_width, spec.k_width, spec.v_width], dim=-1)
    return q, k, v
