"""What leads into attention and out of it: projections, heads, norms, RoPE; the gate and the output.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv value_head_dim, E d_model.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mha_jax.arrays import at_least_float32
from mha_jax.checks import check_count, check_floating, check_gated, check_latents, check_positions
from mha_jax.kernels.nonfinite import nan_where, nonfinite_tokens, zero_where
from mha_jax.parallel.sharding import broadcast_beside
from mha_jax.rope import apply_rope
from mha_jax.weights import Project
from mha_spec import AttentionSpec, Latent, Refusal, Rope, Temperature
from mha_spec.attention import check_latent, check_spec
from mha_spec.temperature import check_temperature


def split_heads(x: Float[Array, "B T NH"], num_heads: int) -> Float[Array, "B N T H"]:
    """Split the last axis into heads, outermost first, and move them before the tokens.

    Raises:
        ValueError: if the width is not a multiple of num_heads.
    """
    check_floating("x", x, rank=3)
    check_count("num_heads", num_heads)
    if x.shape[-1] % num_heads:
        raise Refusal("the width", "be a multiple of num_heads", width=x.shape[-1], num_heads=num_heads)
    return x.reshape(*x.shape[:2], num_heads, x.shape[-1] // num_heads).swapaxes(1, 2)


def combine_heads(x: Float[Array, "B N T H"]) -> Float[Array, "B T NH"]:
    """Put the heads side by side again: the inverse of `split_heads`."""
    check_floating("x", x, rank=4)
    batch_size, num_heads, seq_len, head_dim = x.shape
    return x.swapaxes(1, 2).reshape(batch_size, seq_len, num_heads * head_dim)


def project_qkv(
    project: Project,
    query: Float[Array, "B T d_in"],
    key: Float[Array, "B S d_kv"],
    value: Float[Array, "B S d_kv"],
    spec: AttentionSpec,
    positions: Int[Array, "... #B T"] | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B K S H"], Float[Array, "B K S Hv"]]:
    """Project the inputs, clip, split the heads, normalise, rotate queries and keys, and temper queries.

    Args:
        project: applies a projection or a norm by its name.
        query, key, value: inputs of the layer; the same array three times for self-attention.
        spec: the layer: heads, norms, RoPE, temperature, and whether it holds one `qkv_proj` in place of three
            projections.
        positions: place of each token, (B or 1, T), or with sections (axes, B or 1, T); 0, 1, … when absent. Used with
            RoPE and a temperature only.

    Returns:
        q (B, N, T, H), k (B, K, S, H) and v (B, K, S, Hv).
    """
    check_spec(spec)
    if spec.latent is not None:
        q, latents = project_latents(project, query, spec, positions)
        return q, *expand_latents(project, latents, spec)
    if not spec.fused_qkv:
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

    q, k = enter("q_norm", q, spec.num_heads, spec.rope), enter("k_norm", k, spec.num_kv_heads, spec.rope)
    if spec.temperature is not None and positions is not None:
        q = apply_temperature(q, positions, spec.temperature)
    return q, k, enter("v_norm", v, spec.num_kv_heads, None)


def project_latents(
    project: Project,
    x: Float[Array, "B T d_in"],
    spec: AttentionSpec,
    positions: Int[Array, "... #B T"] | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B 1 T W"]]:
    """Project the input of a layer with latents: to queries, and to what a cache keeps of keys and values.

    Args:
        project: applies a projection or a norm by its name.
        x: input of the layer.
        spec: the layer, which has latents.
        positions: place of each token, (B or 1, T), or with sections (axes, B or 1, T); 0, 1, … when absent.

    Returns:
        q (B, N, T, H), and the latents (B, 1, T, W), W = kv_rank + rope_dim: of each token the latent, normalised
        and times its factor, and then what the heads share of their keys, rotated.

    Raises:
        ValueError: if the layer has no latents.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    latent = check_latent(spec)
    if spec.has_positions and positions is None:
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    if latent.q_rank is None:
        q = project("q_proj", x)
    else:
        q = project("q_b_proj", _normed(project, "q_a_norm", project("q_a_proj", x), latent))
    q, compressed = split_heads(q, spec.num_heads), project("kv_a_proj", x)
    normed = _normed(project, "kv_a_norm", compressed[..., : latent.kv_rank], latent)
    shared = compressed[..., latent.kv_rank :]
    latents = jnp.concatenate([normed, shared], axis=-1)[:, None]
    if spec.rope is not None and positions is not None:
        q, latents = apply_rope(q, positions, spec.rope), apply_rope(latents, positions, spec.rope)
    if spec.temperature is not None and positions is not None:
        q = apply_temperature(q, positions, spec.temperature)
    return q, latents


def expand_latents(
    project: Project, latents: Float[Array, "B 1 S W"], spec: AttentionSpec
) -> tuple[Float[Array, "B N S H"], Float[Array, "B N S Hv"]]:
    """The keys and values of all heads that latents stand for.

    Args:
        project: applies a projection by its name.
        latents: (B, 1, S, kv_rank + rope_dim), as `project_latents` gives them.
        spec: the layer, which has latents.

    Returns:
        k (B, N, S, H) and v (B, N, S, Hv).

    Raises:
        ValueError: if the layer has no latents, or they are of another width.
    """
    latent = check_latent(spec)
    check_latents("latents", latents, latent)
    shared, own_features = latents[..., latent.kv_rank :], spec.head_dim - latent.rope_dim
    kv = split_heads(project("kv_b_proj", latents[:, 0, :, : latent.kv_rank]), spec.num_heads)
    shared = broadcast_beside(shared, kv)
    return jnp.concatenate([kv[..., :own_features], shared], axis=-1), kv[..., own_features:]


def absorb_keys(
    q: Float[Array, "B N T H"], kv_b: Float[Array, "kv_rank N*(H+Hv)"], spec: AttentionSpec
) -> Float[Array, "B N T W"]:
    """Queries whose products with latents are those of q with the keys that kv_b_proj would make of them.

    Args:
        q: queries (B, N, T, H).
        kv_b: the kernel of kv_b_proj, (kv_rank, N * (H - rope_dim + Hv)).
        spec: the layer, which has latents.

    Returns:
        Queries (B, N, T, kv_rank + rope_dim), in the dtype of q.

    Raises:
        ValueError: if the layer has no latents.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2.
    """
    of_keys, _ = _kernels_of_heads(kv_b, spec)
    own_features = of_keys.shape[2]
    absorbed = jnp.einsum("bnth,rnh->bntr", at_least_float32(q[..., :own_features]), at_least_float32(of_keys))
    return jnp.concatenate([absorbed.astype(q.dtype), q[..., own_features:]], axis=-1)


def absorb_values(
    context: Float[Array, "B N T kv_rank"], kv_b: Float[Array, "kv_rank N*(H+Hv)"], spec: AttentionSpec
) -> Float[Array, "B N T Hv"]:
    """The context that kv_b_proj makes of weighed latents.

    Args:
        context: weighed latents (B, N, T, kv_rank).
        kv_b: the kernel of kv_b_proj, (kv_rank, N * (H - rope_dim + Hv)).
        spec: the layer, which has latents.

    Returns:
        The context (B, N, T, Hv), in the dtype of what it is made of.

    Raises:
        ValueError: if the layer has no latents.
    """
    _, of_values = _kernels_of_heads(kv_b, spec)
    wide = jnp.einsum("bntr,rnh->bnth", at_least_float32(context), at_least_float32(of_values))
    return wide.astype(context.dtype)


def apply_temperature(
    x: Float[Array, "B N T H"], positions: Int[Array, "#B T"], temperature: Temperature
) -> Float[Array, "B N T H"]:
    """Queries times 1 + scale * ln(1 + floor((position + first_position) / length)); in the dtype of x.

    Args:
        x: queries, split into heads, and rotated where there is RoPE; multiplied in at least float32.
        positions: place of each token in its sequence, from 0, (B or 1, T).
        temperature: length, scale and first position.

    Raises:
        TypeError: if x is not floating point, positions are not integers, or temperature is not a `Temperature`.
        ValueError: if the positions do not fit.

    Source: Scalable-Softmax, arXiv:2501.19399, as Llama 4 has it.
    """
    check_floating("x", x, rank=4)
    check_temperature(temperature)
    check_positions(positions, x.shape[0], x.shape[2], None)
    wide = at_least_float32(x)
    lengths = (positions + temperature.first_position) // temperature.length
    factors = 1.0 + temperature.scale * jnp.log1p(lengths.astype(wide.dtype))
    return (wide * factors[:, None, :, None]).astype(x.dtype)


def apply_gate(context: Float[Array, "B N T Hv"], gate: Float[Array, "B T G"]) -> Float[Array, "B N T Hv"]:
    """The context times the sigmoid of what gate_proj gives, (B, T, N * Hv), or (B, T, N) for one number a head.

    Source: Gated Attention for Large Language Models, arXiv:2505.06708.
    """
    check_gated(context, gate)
    gate = jax.nn.sigmoid(at_least_float32(split_heads(gate, context.shape[1])))
    return (at_least_float32(context) * gate).astype(context.dtype)


def project_output(
    project: Project, context: Float[Array, "B N T Hv"], query: Float[Array, "B T d_in"], spec: AttentionSpec
) -> Float[Array, "B T E"]:
    """Gate the context if the layer has a gate, put its heads side by side, and project them where it has `out_proj`.

    Args:
        project: applies a projection by its name.
        context: sums of values, (B, N, T, Hv).
        query: input of the layer, of which the gate is made.
        spec: the layer.

    Returns:
        The output (B, T, E), or (B, T, N * Hv) without `out_proj`.
    """
    if spec.gate is not None:
        context = _gated(context, project("gate_proj", query), query)
    output = combine_heads(context)
    return project("out_proj", output) if spec.out_proj else output


def _gated(context: Array, gate: Array, query: Array) -> Array:
    """`apply_gate`, through which a row or a token that is not finite spoils no gradient if nobody sees it."""
    wrong, of_token = ~jnp.isfinite(context), nonfinite_tokens(query)
    return nan_where(apply_gate(zero_where(context, wrong), zero_where(gate, of_token)), wrong | of_token[:, None])


def _normed(project: Project, name: str, x: Array, latent: Latent) -> Array:
    """A latent after its norm, times its factor, in the dtype of what the norm gives."""
    normed, factor = project(name, x), latent.factors[name]
    return normed if factor == 1.0 else (at_least_float32(normed) * factor).astype(normed.dtype)


def _kernels_of_heads(kv_b: Array, spec: AttentionSpec) -> tuple[Array, Array]:
    """What makes the keys of a head, and what its values, (kv_rank, N, features) each."""
    own_features = spec.head_dim - check_latent(spec).rope_dim
    kernels = kv_b.reshape(kv_b.shape[0], spec.num_heads, own_features + spec.value_head_dim)
    return kernels[..., :own_features], kernels[..., own_features:]


def _clip(x: Array, limit: float) -> Array:
    """x within [-limit, limit]; what lies on an end passes its gradient on."""
    return jnp.where(x > limit, limit, jnp.where(x < -limit, -limit, x))


def _unpack_qkv(packed: Array, spec: AttentionSpec) -> list[Array]:
    return jnp.split(packed, [spec.q_width, spec.q_width + spec.k_width], axis=-1)
