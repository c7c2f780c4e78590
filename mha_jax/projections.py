"""Input and output side of attention: projections, heads, norms, RoPE; gate and output.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv value_head_dim, E d_model.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mha_jax.arrays import at_least_float32
from mha_jax.checks import check_gated
from mha_jax.features.latent import expand_latents, project_latents
from mha_jax.features.rope import apply_rope
from mha_jax.features.temperature import apply_temperature
from mha_jax.heads import combine_heads, split_heads
from mha_jax.weights import Project
from mha_spec import AttentionSpec, Rope
from mha_spec.attention import check_spec


def project_qkv(
    project: Project,
    query: Float[Array, "B T d_in"],
    key: Float[Array, "B S d_kv"],
    value: Float[Array, "B S d_kv"],
    spec: AttentionSpec,
    positions: Int[Array, "... #B T"] | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B K S H"], Float[Array, "B K S Hv"]]:
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
    if spec.has_positions and positions is None:
        positions = jnp.arange(q.shape[1], dtype=jnp.int32)[None]

    def enter(name: str, x: Array, num_heads: int, rope: Rope | None) -> Array:
        norm = spec.norms.get(name)
        x = x if spec.clip_qkv is None else _clip(x, spec.clip_qkv)
        if norm is not None and norm.over == "width":
            x = project(name, x)
        x = split_heads(x, num_heads)
        if norm is not None and norm.over == "head" and not norm.after_rope:
            x = project(name, x)
        x = x if rope is None or positions is None else apply_rope(x, positions, rope)
        return project(name, x) if norm is not None and norm.after_rope else x

    q = enter("q_norm", q, spec.num_heads, spec.rope)
    k = k if spec.shared_kv else enter("k_norm", k, spec.num_kv_heads, spec.rope)
    if spec.temperature is not None and positions is not None:
        q = apply_temperature(q, positions, spec.temperature)
    return q, k, v if spec.shared_kv else enter("v_norm", v, spec.num_kv_heads, None)


def apply_gate(context: Float[Array, "B N T Hv"], gate: Float[Array, "B T G"]) -> Float[Array, "B N T Hv"]:
    """Return context * sigmoid(gate), gate (B, T, N * Hv), or (B, T, N) for one number per head.

    Source: Gated Attention for Large Language Models, arXiv:2505.06708.
    """
    check_gated(context, gate)
    gate = jax.nn.sigmoid(at_least_float32(split_heads(gate, context.shape[1])))
    return (at_least_float32(context) * gate).astype(context.dtype)


def project_output(
    project: Project, context: Float[Array, "B N T Hv"], query: Float[Array, "B T d_in"], spec: AttentionSpec
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
        context = apply_gate(context, project("gate_proj", query))
    output = combine_heads(context)
    output = output if spec.context_norm is None else project("context_norm", output)
    return project("out_proj", output) if spec.out_proj else output


def _clip(x: Array, limit: float) -> Array:
    """Clip x to [-limit, limit]; the gradient passes at the limits."""
    return jnp.where(x > limit, limit, jnp.where(x < -limit, -limit, x))


def _unpack_qkv(packed: Array, spec: AttentionSpec) -> list[Array]:
    return jnp.split(packed, [spec.q_width, spec.q_width + spec.k_width], axis=-1)
