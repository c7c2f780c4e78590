"""Input and output side of attention: projections, heads, norms, RoPE; gate and output.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv
value_head_dim, E d_model.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from mha_jax.arrays import Array, at_least_float32
from mha_jax.checks import check_features, check_gate
from mha_jax.features.latent import expand_latents, project_latents
from mha_jax.features.rope import apply_rope
from mha_jax.features.temperature import apply_temperature
from mha_jax.heads import split_unchecked
from mha_jax.weights import Project
from mha_spec import AttentionSpec, InputError


def project_qkv(
    project: Project,
    query: Float[Array, "B T d_in"],
    key: Float[Array, "B S d_kv"] | Float[Array, "B K S H"],
    value: Float[Array, "B S d_kv"] | Float[Array, "B K S Hv"],
    spec: AttentionSpec,
    positions: Int[Array, "*axes #B T"] | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B K S H"], Float[Array, "B K S Hv"]]:
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
        positions = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    q = _to_heads(project, "q_norm", q, spec.num_heads, spec, positions)
    if spec.temperature is not None and positions is not None:
        q = apply_temperature(q, positions, spec.temperature)
    if spec.shared_kv:
        return q, k, v
    k = _to_heads(project, "k_norm", k, spec.num_kv_heads, spec, positions)
    v = _to_heads(project, "v_norm", v, spec.num_kv_heads, spec, None)
    return q, k, v


def _project_inputs(
    project: Project, query: Array, key: Array, value: Array, spec: AttentionSpec
) -> tuple[Array, Array, Array]:
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
    x: Array,
    num_heads: int,
    spec: AttentionSpec,
    positions: Array | None,
) -> Array:
    """Clip projected features, split them into heads, and apply their norm and, with positions,
    RoPE.
    """
    norm = spec.norms.get(norm_name)
    if spec.clip_qkv is not None:
        x = _clip(x, spec.clip_qkv)
    if norm is not None and norm.over == "width":
        x = project(norm_name, x)
    x = split_unchecked(x, num_heads)
    if norm is not None and norm.over == "head" and not norm.after_rope:
        x = project(norm_name, x)
    if spec.rope is not None and positions is not None:
        x = apply_rope(x, positions, spec.rope)
    if norm is not None and norm.after_rope:
        x = project(norm_name, x)
    return x


def apply_gate(
    context: Float[Array, "B N T Hv"], gate: Float[Array, "B T gate_width"]
) -> Float[Array, "B N T Hv"]:
    """Return context * sigmoid(gate), gate (B, T, N * Hv), or (B, T, N) for one number per head.

    Source: Gated Attention for Large Language Models, arXiv:2505.06708.
    """
    check_gate(gate, context)
    gate = jax.nn.sigmoid(at_least_float32(split_unchecked(gate, context.shape[1])))
    return (at_least_float32(context) * gate).astype(context.dtype)


def project_output(
    project: Project,
    context: Float[Array, "B N T Hv"],
    query: Float[Array, "B T d_in"],
    spec: AttentionSpec,
) -> Float[Array, "B T E"]:
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
    # As `combine_heads`, without the cost of its call outside of jit.
    output = context.swapaxes(1, 2)
    output = output.reshape(*output.shape[:2], output.shape[2] * output.shape[3])
    if spec.context_norm is not None:
        output = project("context_norm", output)
    if spec.out_proj:
        output = project("out_proj", output)
    return output


def _clip(x: Array, limit: float) -> Array:
    """Clip x to [-limit, limit]; the gradient passes at the limits."""
    return jnp.where(x > limit, limit, jnp.where(x < -limit, -limit, x))


def _unpack_qkv(packed: Array, spec: AttentionSpec) -> tuple[Array, Array, Array]:
    """Return the features of q, k and v from the features of their common projection."""
    width = spec.q_width + spec.k_width + spec.v_width
    if packed.shape[-1] != width:
        raise InputError(
            "qkv_proj",
            f"return the {width} features of all q, k and v",
            f"{packed.shape[-1]} features",
        )
    q, k, v = jnp.split(packed, [spec.q_width, spec.q_width + spec.k_width], axis=-1)
    return q, k, v
