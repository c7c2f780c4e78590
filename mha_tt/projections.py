"""What leads into attention and out of it: projections, heads, norms, RoPE; the gate and the output.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv value_head_dim, E d_model.
"""

from __future__ import annotations

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, Temperature
from mha_spec.attention import check_spec
from mha_spec.temperature import check_temperature
from mha_tt.arrays import check_count, check_floating
from mha_tt.device import TILE, TILE_NBYTES, as_dtype, padded_head_dim, round_up, upload, zeros
from mha_tt.rope import Rotation, at_least_float32, check_positions
from mha_tt.weights import Project, padded_features


def split_heads(x: Float[Tensor, "B T NH"], num_heads: int) -> Float[Tensor, "B N T H"]:
    """Split the last axis into heads, outermost first, and move them before the tokens.

    Raises:
        ValueError: if the width is not a multiple of num_heads.
    """
    check_floating("x", x, rank=3)
    check_count("num_heads", num_heads)
    batch_size, seq_len, width = x.shape
    if width % num_heads:
        raise ValueError(f"the width must be a multiple of num_heads, got width={width} and num_heads={num_heads}")
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
    if spec.has_positions:
        positions = np.arange(query.shape[1])[None] if positions is None else positions
        check_positions(positions, query.shape[0], query.shape[1], spec.rope)
    if not spec.fused_qkv:
        q, k, v = project("q_proj", query), project("k_proj", key), project("v_proj", value)
    elif key is query and value is query:
        q, k, v = _unpack_qkv(project("qkv_proj", query), spec)
    else:
        q, k, v = (_unpack_qkv(project("qkv_proj", x), spec)[i] for i, x in enumerate((query, key, value)))
    rotation = None
    if isinstance(positions, Rotation):
        rotation, positions = positions, positions.positions
    elif spec.rope is not None and positions is not None and 0 not in (query.shape[0], query.shape[1]):
        padded = padded_head_dim(spec.head_dim, rope=True)
        rotation = Rotation(positions, spec.rope, head_dim=spec.head_dim, padded=padded, device=query.device())

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


# ---- What is refused -------------------------------------------------------------------------------------------------


def check_gated(context: Tensor, gate: Tensor) -> None:
    """Refuse a context (B, N, T, Hv) and a gate that is not (B, T, N * Hv) or (B, T, N)."""
    check_floating("context", context, rank=4)
    check_floating("gate", gate, rank=3)
    batch_size, num_heads, seq_len, head_dim = context.shape
    widths = (num_heads * head_dim, num_heads)
    if tuple(gate.shape) not in [(batch_size, seq_len, width) for width in widths]:
        raise ValueError(
            f"gate must have shape (B, T, N * H or N) = ({batch_size}, {seq_len}, {widths[0]} or {widths[1]}), "
            f"got gate.shape={tuple(gate.shape)}"
        )
