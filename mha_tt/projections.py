"""What leads into attention and out of it: projections, heads, norms, RoPE; the gate and the output.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv value_head_dim, E d_model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, Latent, Refusal, Temperature
from mha_spec.attention import check_latent, check_spec
from mha_spec.temperature import check_temperature
from mha_tt.arrays import as_dtype, at_least_float32
from mha_tt.checks import check_count, check_floating, check_gated, check_heads, check_latents, check_positions
from mha_tt.device import accurate_config, upload, zeros
from mha_tt.layout import TILE, TILE_NBYTES, padded_features, padded_width, round_up
from mha_tt.rope import Rotation, rotation_of
from mha_tt.weights import Project


def split_heads(x: Float[Tensor, "B T NH"], num_heads: int) -> Float[Tensor, "B N T H"]:
    """Split the last axis into heads, outermost first, and move them before the tokens.

    Raises:
        ValueError: if the width is not a multiple of num_heads.
    """
    check_floating("x", x, rank=3)
    check_count("num_heads", num_heads)
    batch_size, seq_len, width = x.shape
    if width % num_heads:
        raise Refusal("the width", "be a multiple of num_heads", width=width, num_heads=num_heads)
    if 0 in (batch_size, seq_len):  # most operations do not take tensors of nothing
        return zeros((batch_size, num_heads, seq_len, width // num_heads), x.dtype, x.device())
    if width // num_heads % TILE:  # the operation below would take this, and give heads of another width
        return ttnn.transpose(ttnn.reshape(x, (batch_size, seq_len, num_heads, width // num_heads)), 1, 2)
    x = ttnn.reshape(x, (batch_size, 1, seq_len, width))
    heads, _, _ = ttnn.experimental.nlp_create_qkv_heads(
        x, num_heads=num_heads, num_kv_heads=0, transpose_k_heads=False
    )
    return heads


def combine_heads(x: Float[Tensor, "B N T H"]) -> Float[Tensor, "B T NH"]:
    """Put the heads side by side again: the inverse of `split_heads`."""
    check_floating("x", x, rank=4)
    batch_size, num_heads, seq_len, head_dim = x.shape
    if 0 in (batch_size, seq_len):
        return zeros((batch_size, seq_len, num_heads * head_dim), x.dtype, x.device())
    # The operation takes whole tiles, and keeps a row of them twice on a core: 64 heads of 128 in float32 do not fit.
    row_nbytes = num_heads * round_up(head_dim) // TILE * TILE_NBYTES[x.dtype]
    if head_dim % TILE or row_nbytes > 2**19:
        return ttnn.reshape(ttnn.transpose(x, 1, 2), (batch_size, seq_len, num_heads * head_dim))
    return ttnn.transformer.concatenate_heads(x)


def project_qkv(
    project: Project,
    query: Float[Tensor, "B T d_in"],
    key: Float[Tensor, "B S d_kv"],
    value: Float[Tensor, "B S d_kv"],
    spec: AttentionSpec,
    positions: Int[np.ndarray, "... #B T"] | Rotation | None = None,
) -> tuple[Float[Tensor, "B N T H"], Float[Tensor, "B K S H"], Float[Tensor, "B K S Hv"]]:
    """Project the inputs, clip, split the heads, normalise, rotate queries and keys, and temper queries.

    Args:
        project: applies a projection or a norm by its name.
        query, key, value: inputs of the layer; the same array three times for self-attention.
        spec: the layer: heads, norms, RoPE, temperature, and whether it holds one `qkv_proj` in place of three
            projections.
        positions: place of each token, (B or 1, T), or with sections (axes, B or 1, T); 0, 1, … when absent. Used with
            RoPE and a temperature only. A `Rotation` made of them is uploaded once for many calls.

    Returns:
        q (B, N, T, H), k (B, K, S, H) and v (B, K, S, Hv).
    """
    check_spec(spec)
    if spec.latent is not None:
        q, latents = project_latents(project, query, spec, positions)
        return q, *expand_latents(project, latents, spec)
    positions, rotation = _placed(query, positions, spec)
    if not spec.fused_qkv:
        q, k, v = project("q_proj", query), project("k_proj", key), project("v_proj", value)
    elif key is query and value is query:
        q, k, v = _unpack_qkv(project("qkv_proj", query), spec)
    else:
        q, k, v = (_unpack_qkv(project("qkv_proj", x), spec)[i] for i, x in enumerate((query, key, value)))

    def enter(name: str, x: Tensor, num_heads: int, rotation: Rotation | None) -> Tensor:
        norm = spec.norms.get(name)
        x = x if spec.clip_qkv is None else ttnn.clamp(x, -spec.clip_qkv, spec.clip_qkv)
        if norm is not None and norm.over == "width":
            x = project(name, x)
        x = x if len(x.shape) == 4 else split_heads(x, num_heads)
        if norm is not None and norm.over == "head" and not norm.after_rope:
            x = project(name, x)
        x = x if rotation is None else rotation.rotate(x)
        return project(name, x) if norm is not None and norm.after_rope else x

    q, k = enter("q_norm", q, spec.num_heads, rotation), enter("k_norm", k, spec.num_kv_heads, rotation)
    if spec.temperature is not None and positions is not None:
        q = apply_temperature(q, positions, spec.temperature)
    return q, k, enter("v_norm", v, spec.num_kv_heads, None)


def project_latents(
    project: Project,
    x: Float[Tensor, "B T d_in"],
    spec: AttentionSpec,
    positions: Int[np.ndarray, "... #B T"] | Rotation | None = None,
) -> tuple[Float[Tensor, "B N T H"], Float[Tensor, "B 1 T W"]]:
    """Project the input of a layer with latents: to queries, and to what a cache keeps of keys and values.

    Args:
        project: applies a projection or a norm by its name.
        x: input of the layer.
        spec: the layer, which has latents.
        positions: place of each token, (B or 1, T), or with sections (axes, B or 1, T); 0, 1, … when absent. A
            `Rotation` made of them for heads of rope_dim features is uploaded once for many calls.

    Returns:
        q (B, N, T, H), and the latents (B, 1, T, W), W = kv_rank + rope_dim: of each token the latent, normalised
        and times its factor, and then what the heads share of their keys, rotated. Both parts of H and of W are padded
        by themselves.

    Raises:
        ValueError: if the layer has no latents.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    (batch_size, seq_len, _), own_features = x.shape, _own_features(spec)
    positions, rotation = _placed(x, positions, spec)
    q, normed, shared = _latent_parts(project, x, spec)
    if 0 in (batch_size, seq_len):
        return q, zeros((batch_size, 1, seq_len, padded_features("kv_a_proj", spec)), x.dtype, x.device())
    if rotation is not None:
        q = _side_by_side(q[:, :, :, :own_features], rotation.rotate(q[:, :, :, own_features:]))
        shared = rotation.rotate(shared)
    if spec.temperature is not None and positions is not None:
        q = apply_temperature(q, positions, spec.temperature)
    return q, _side_by_side(normed, shared)


def project_absorbed(
    project: Project,
    x: Float[Tensor, "B T d_in"],
    spec: AttentionSpec,
    positions: Rotation | None,
    kv_b: HeadWeights,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> tuple[Float[Tensor, "B N T W"], Float[Tensor, "B 1 T W"]]:
    """The same as `project_latents`, and `absorb_keys` of its queries, whose parts are put together only then.

    Args:
        project: applies a projection or a norm by its name.
        x: input of the layer, of one token or more.
        spec: the layer, which has latents and no temperature.
        positions: the rotations of the tokens; None without RoPE.
        kv_b: the weight of kv_b_proj head by head.
        compute_kernel_config: arithmetic of the sums; `accurate_config` when absent.

    Returns:
        Queries (B, N, T, W), and the latents (B, 1, T, W), W = kv_rank + rope_dim.
    """
    own_features = _own_features(spec)
    q, normed, shared = _latent_parts(project, x, spec)
    own, shared_q = q[:, :, :, :own_features], q[:, :, :, own_features:]
    if positions is not None:
        shared_q, shared = positions.rotate(shared_q), positions.rotate(shared)
    absorbed = _head_by_head(own, kv_b.of_keys, True, compute_kernel_config)
    return _side_by_side(absorbed, shared_q), _side_by_side(normed, shared)


def expand_latents(
    project: Project, latents: Float[Tensor, "B 1 S W"], spec: AttentionSpec
) -> tuple[Float[Tensor, "B N S H"], Float[Tensor, "B N S Hv"]]:
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
    check_latents("latents", latents, spec)
    kv_rank, own_features = padded_features("kv_a_norm", spec), _own_features(spec)
    batch_size, _, seq_len, _ = latents.shape
    if 0 in (batch_size, seq_len):
        widths = (padded_features(f"{part}_proj", spec) for part in "kv")
        keys, values = (
            zeros((batch_size, spec.num_heads, seq_len, width), latents.dtype, latents.device()) for width in widths
        )
        return keys, values
    compressed = ttnn.reshape(latents[:, :, :, :kv_rank], (batch_size, seq_len, kv_rank))
    kv = split_heads(project("kv_b_proj", compressed), spec.num_heads)
    shared = ttnn.repeat(latents[:, :, :, kv_rank:], (1, spec.num_heads, 1, 1))
    return _side_by_side(kv[:, :, :, :own_features], shared), kv[:, :, :, own_features:]


class HeadWeights(NamedTuple):
    """The weight of kv_b_proj head by head, made once for many calls: what makes the keys of a head, and its values."""

    of_keys: Float[Tensor, "1 N kv_rank H"]
    of_values: Float[Tensor, "1 N kv_rank Hv"]


def weights_of_heads(kv_b: Float[Tensor, "kv_rank N*(H+Hv)"], spec: AttentionSpec) -> HeadWeights:
    """Take the weight of kv_b_proj apart, as `absorb_keys` and `absorb_values` need it.

    Raises:
        ValueError: if the layer has no latents, or the weight is of another shape.
    """
    own_features = _own_features(spec)
    check_floating("kv_b", kv_b, rank=2)
    expected = (padded_width("kv_a_norm", spec), padded_width("kv_b_proj", spec))
    if tuple(kv_b.shape) != expected:
        raise Refusal("kv_b", f"have shape {expected}", {"kv_b.shape": tuple(kv_b.shape)})
    heads = split_heads(ttnn.reshape(kv_b, (1, *tuple(kv_b.shape))), spec.num_heads)
    return HeadWeights(heads[:, :, :, :own_features], heads[:, :, :, own_features:])


def absorb_keys(
    q: Float[Tensor, "B N T H"],
    kv_b: Float[Tensor, "kv_rank N*(H+Hv)"] | HeadWeights,
    spec: AttentionSpec,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T W"]:
    """Queries whose products with latents are those of q with the keys that kv_b_proj would make of them.

    Args:
        q: queries (B, N, T, H).
        kv_b: the weight of kv_b_proj, (kv_rank, N * (H - rope_dim + Hv)), or the `HeadWeights` made of it.
        spec: the layer, which has latents.
        compute_kernel_config: arithmetic of the sums; `accurate_config` when absent.

    Returns:
        Queries (B, N, T, kv_rank + rope_dim), in the dtype of q.

    Raises:
        ValueError: if the layer has no latents, or the shapes do not fit.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2.
    """
    of_keys, _ = kv_b if isinstance(kv_b, HeadWeights) else weights_of_heads(kv_b, spec)
    check_heads("q", q, spec, padded_features("q_proj", spec))
    if 0 in tuple(q.shape):
        return zeros((*tuple(q.shape)[:3], padded_features("kv_a_proj", spec)), q.dtype, q.device())
    own_features = of_keys.shape[3]
    absorbed = _head_by_head(q[:, :, :, :own_features], of_keys, True, compute_kernel_config)
    return _side_by_side(absorbed, q[:, :, :, own_features:])


def absorb_values(
    context: Float[Tensor, "B N T kv_rank"],
    kv_b: Float[Tensor, "kv_rank N*(H+Hv)"] | HeadWeights,
    spec: AttentionSpec,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T Hv"]:
    """The context that kv_b_proj makes of weighed latents.

    Args:
        context: weighed latents (B, N, T, kv_rank).
        kv_b: the weight of kv_b_proj, (kv_rank, N * (H - rope_dim + Hv)), or the `HeadWeights` made of it.
        spec: the layer, which has latents.
        compute_kernel_config: arithmetic of the sums; `accurate_config` when absent.

    Returns:
        The context (B, N, T, Hv), in the dtype of what it is made of.

    Raises:
        ValueError: if the layer has no latents, or the shapes do not fit.
    """
    _, of_values = kv_b if isinstance(kv_b, HeadWeights) else weights_of_heads(kv_b, spec)
    check_heads("context", context, spec, of_values.shape[2])
    if 0 in tuple(context.shape):
        return zeros((*tuple(context.shape)[:3], of_values.shape[3]), context.dtype, context.device())
    return _head_by_head(context, of_values, False, compute_kernel_config)


def apply_temperature(
    x: Float[Tensor, "B N T H"], positions: Int[np.ndarray, "#B T"], temperature: Temperature
) -> Float[Tensor, "B N T H"]:
    """Queries times 1 + scale * ln(1 + floor((position + first_position) / length)); in the dtype of x.

    Args:
        x: queries, split into heads, and rotated where there is RoPE; multiplied in at least float32.
        positions: place of each token in its sequence, from 0, (B or 1, T), on the host.
        temperature: length, scale and first position.

    Raises:
        TypeError: if x is not floating point, positions are not integers, or temperature is not a `Temperature`.
        ValueError: if the positions do not fit.

    Source: Scalable-Softmax, arXiv:2501.19399, as Llama 4 has it.
    """
    check_floating("x", x, rank=4)
    check_temperature(temperature)
    check_positions(positions, x.shape[0], x.shape[2], None)
    lengths = (positions + temperature.first_position) // temperature.length
    if 0 in (x.shape[0], x.shape[2]) or not lengths.any():  # every factor is 1
        return x
    factors = 1.0 + temperature.scale * np.log1p(lengths)
    factors = upload(factors[:, None, :, None], device=x.device(), dtype=ttnn.float32)
    return as_dtype(ttnn.multiply(at_least_float32(x), factors), x.dtype)


def apply_gate(context: Float[Tensor, "B N T Hv"], gate: Float[Tensor, "B T G"]) -> Float[Tensor, "B N T Hv"]:
    """The context times the sigmoid of what gate_proj gives, (B, T, N * Hv), or (B, T, N) for one number a head.

    Source: Gated Attention for Large Language Models, arXiv:2505.06708.
    """
    check_gated(context, gate)
    if 0 in tuple(context.shape):
        return context
    gate = ttnn.sigmoid_accurate(at_least_float32(split_heads(gate, context.shape[1])))
    return as_dtype(ttnn.multiply(at_least_float32(context), gate), context.dtype)


def project_output(
    project: Project, context: Float[Tensor, "B N T Hv"], query: Float[Tensor, "B T d_in"], spec: AttentionSpec
) -> Float[Tensor, "B T E"]:
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
        context = apply_gate(context, project("gate_proj", query))
    output = combine_heads(context)
    return project("out_proj", output) if spec.out_proj else output


def _placed(
    x: Tensor, positions: np.ndarray | Rotation | None, spec: AttentionSpec
) -> tuple[np.ndarray | None, Rotation | None]:
    """The positions of tokens (B, T, d_in), where anything depends on them, and with RoPE their rotations."""
    if not spec.has_positions:
        return None, None
    positions = np.arange(x.shape[1])[None] if positions is None else positions
    check_positions(positions, x.shape[0], x.shape[1], spec.rope)
    if isinstance(positions, Rotation):
        return positions.positions, positions
    return positions, None if 0 in (x.shape[0], x.shape[1]) else rotation_of(positions, spec, device=x.device())


def _own_features(spec: AttentionSpec) -> int:
    """Features of queries and keys that heads do not share, as many as are padded."""
    return round_up(spec.head_dim - check_latent(spec).rope_dim)


def _latent_parts(project: Project, x: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, N, T, H), latents (B, 1, T, kv_rank) and what heads share (B, 1, T, rope_dim), not yet rotated."""
    latent, (batch_size, seq_len, _) = check_latent(spec), x.shape
    if latent.q_rank is None:
        q = project("q_proj", x)
    else:
        q = project("q_b_proj", _normed(project, "q_a_norm", project("q_a_proj", x), latent))
    q, compressed = split_heads(q, spec.num_heads), project("kv_a_proj", x)
    if 0 in (batch_size, seq_len):
        return q, compressed, compressed
    kv_rank = padded_features("kv_a_norm", spec)
    normed = _normed(project, "kv_a_norm", compressed[:, :, :kv_rank], latent)
    shared = compressed[:, :, kv_rank:]
    normed, shared = (ttnn.reshape(part, (batch_size, 1, seq_len, part.shape[2])) for part in (normed, shared))
    return q, normed, shared


def _normed(project: Project, name: str, x: Tensor, latent: Latent) -> Tensor:
    """A latent after its norm, times its factor, in the dtype of what the norm gives."""
    normed, factor = project(name, x), latent.factors[name]
    return normed if factor == 1.0 else as_dtype(ttnn.multiply(at_least_float32(normed), factor), normed.dtype)


def _side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """The features of both, in the dtype of the first, which concatenation may widen."""
    return as_dtype(ttnn.concat([first, second], dim=-1), first.dtype)


def _head_by_head(
    x: Tensor, weights: Tensor, transposed: bool, compute_kernel_config: ttnn.DeviceComputeKernelConfig | None
) -> Tensor:
    """The products of heads (B, N, T, in) with matrices of their own, (1, N, in, out) or transposed, in the dtype of x.

    A product of matrices broadcasts no batch axis: the tokens of all sequences become those of one.
    """
    batch_size, num_heads, seq_len, width = x.shape
    if batch_size > 1:
        x = ttnn.reshape(ttnn.transpose(x, 0, 1), (1, num_heads, batch_size * seq_len, width))
    config = compute_kernel_config or accurate_config(x.device())
    x = ttnn.matmul(x, weights, transpose_b=transposed, dtype=x.dtype, compute_kernel_config=config)
    if batch_size > 1:
        x = ttnn.transpose(ttnn.reshape(x, (num_heads, batch_size, seq_len, x.shape[3])), 0, 1)
    return x


def _unpack_qkv(packed: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a packed projection: split into heads at once, where they are alike and no norm is over a width."""
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    head_dim = padded_features("q_proj", spec)
    is_even = padded_features("v_proj", spec) == head_dim
    if not is_even or any(norm.over == "width" for norm in spec.norms.values()):
        keys_begin, values_begin = num_heads * head_dim, (num_heads + num_kv_heads) * head_dim
        return packed[:, :, :keys_begin], packed[:, :, keys_begin:values_begin], packed[:, :, values_begin:]
    if 0 in (packed.shape[0], packed.shape[1]):
        shapes = [(packed.shape[0], heads, packed.shape[1], head_dim) for heads in (num_heads, num_kv_heads)]
        q, kv = (zeros(shape, packed.dtype, packed.device()) for shape in shapes)
        return q, kv, kv
    if head_dim % TILE == 0:
        return ttnn.transformer.split_query_key_value_and_split_heads(
            packed, num_heads=num_heads, num_kv_heads=num_kv_heads, transpose_key=False
        )
    heads = split_heads(packed, num_heads + 2 * num_kv_heads)
    values_begin = num_heads + num_kv_heads
    return heads[:, :num_heads], heads[:, num_heads:values_begin], heads[:, values_begin:]
