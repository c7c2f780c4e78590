"""Input and output side of attention: projections, heads, norms, RoPE; gate and output.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv value_head_dim, E d_model.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mha_spec import AttentionSpec, Refusal, Rope
from mha_spec.attention import check_spec
from mha_torch.arrays import at_least_float32
from mha_torch.checks import check_features, check_gated, check_positions
from mha_torch.features.latent import expand_latents, project_latents
from mha_torch.features.rope import apply_rope, rotation_of
from mha_torch.features.temperature import apply_temperature
from mha_torch.heads import combine_heads, split_heads
from mha_torch.weights import Project


def project_qkv(
    project: Project,
    query: Float[Tensor, "B T d_in"],
    key: Float[Tensor, "B S d_kv"],
    value: Float[Tensor, "B S d_kv"],
    spec: AttentionSpec,
    positions: Int[Tensor, "... #B T"] | None = None,
) -> tuple[Float[Tensor, "B N T H"], Float[Tensor, "B K S H"], Float[Tensor, "B K S Hv"]]:
    """Project and clip the inputs, split heads, apply norms and RoPE, and scale queries by the temperature.

    Args:
        project: applies a projection or a norm by its name.
        query, key, value: inputs of the layer; the same array three times for self-attention. With `shared_kv` key and
            value are another layer's k and v, and are returned as they are.
        spec: the layer.
        positions: position of each token, (B or 1, T), or with sections (axes, B or 1, T); default: 0, 1, ….

    Returns:
        q (B, N, T, H), k (B, K, S, H) and v (B, K, S, Hv).
    """
    check_spec(spec)
    if spec.latent is not None:
        q, latents = project_latents(project, query, spec, positions)
        return q, *expand_latents(project, latents, spec)
    if spec.shared_kv:
        q, k, v = project("q_proj", query), key, value
    elif not spec.fused_qkv:
        q, k, v = project("q_proj", query), project("k_proj", key), project("v_proj", value)
    elif key is query and value is query:
        q, k, v = _unpack_qkv(project("qkv_proj", query), spec)
    else:
        q, k, v = (_unpack_qkv(project("qkv_proj", x), spec)[i] for i, x in enumerate((query, key, value)))
    of_keys = () if spec.shared_kv else (("k_proj", k, spec.k_width), ("v_proj", v, spec.v_width))
    for name, x, width in (("q_proj", q, spec.q_width), *of_keys):
        check_features(name, x, width)
    norms, rope, rotation = spec.norms, spec.rope, None
    if positions is not None:
        check_positions(positions, q.shape[0], q.shape[1], rope)
    elif spec.has_positions:
        positions = torch.arange(q.shape[1], device=q.device)[None]
    if rope is not None and positions is not None:
        rotation = rotation_of(positions, rope, spec.head_dim, q.dtype)

    def enter(name: str, x: Tensor, num_heads: int, rope: Rope | None) -> Tensor:
        norm = norms.get(name)
        x = x if spec.clip_qkv is None else x.clamp(-spec.clip_qkv, spec.clip_qkv)
        if norm is not None and norm.over == "width":
            x = project(name, x)
        x = split_heads(x, num_heads)
        if norm is not None and norm.over == "head" and not norm.after_rope:
            x = project(name, x)
        x = x if rope is None or rotation is None else apply_rope(x, rotation, rope)
        return project(name, x) if norm is not None and norm.after_rope else x

    q = enter("q_norm", q, spec.num_heads, rope)
    k = k if spec.shared_kv else enter("k_norm", k, spec.num_kv_heads, rope)
    if spec.temperature is not None and positions is not None:
        q = apply_temperature(q, positions, spec.temperature)
    return q, k, v if spec.shared_kv else enter("v_norm", v, spec.num_kv_heads, None)


def apply_gate(context: Float[Tensor, "B N T Hv"], gate: Float[Tensor, "B T G"]) -> Float[Tensor, "B N T Hv"]:
    """Return context * sigmoid(gate), gate (B, T, N * Hv), or (B, T, N) for one number per head.

    Source: Gated Attention for Large Language Models, arXiv:2505.06708.
    """
    check_gated(context, gate)
    gate = torch.sigmoid(at_least_float32(split_heads(gate, context.shape[1])))
    return (at_least_float32(context) * gate).to(context.dtype)


def project_output(
    project: Project, context: Float[Tensor, "B N T Hv"], query: Float[Tensor, "B T d_in"], spec: AttentionSpec
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
        check_features("gate_proj", gate, spec.num_heads * (1 if spec.gate.per_head else spec.value_head_dim))
        context = apply_gate(context, gate)
    output = combine_heads(context)
    output = output if spec.context_norm is None else project("context_norm", output)
    return project("out_proj", output) if spec.out_proj else output


def _unpack_qkv(packed: Tensor, spec: AttentionSpec) -> list[Tensor]:
    width = spec.q_width + spec.k_width + spec.v_width
    if packed.shape[-1] != width:
        raise Refusal("qkv_proj", f"return the {width} features of all q, k and v", f"{packed.shape[-1]} features")
    return list(packed.split([spec.q_width, spec.k_width, spec.v_width], dim=-1))
