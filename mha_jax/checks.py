"""Checks of what a caller passes in, made before any work: `<what> must <rule>, got <name>=<value>`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array


def check_count(name: str, value: object, minimum: int = 1) -> None:
    """Refuse what is not an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {name}={value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {name}={value}")


def check_number(name: str, value: object) -> None:
    """Refuse what is not a real number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {name}={value!r}")


def check_boolean(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a boolean, got {name}={value!r}")


def check_rate(name: str, value: float) -> None:
    """Refuse a dropout rate outside [0, 1)."""
    check_number(name, value)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, got {name}={value}")


def check_head_groups(num_heads: int, num_kv_heads: int) -> None:
    """Refuse query heads that do not divide into groups of equal size, one for each key/value head."""
    check_count("num_heads", num_heads)
    check_count("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got num_heads={num_heads} and num_kv_heads={num_kv_heads}"
        )


def check_rope(head_dim: int, theta: float) -> None:
    """Refuse heads that cannot be rotated in pairs."""
    check_count("head_dim", head_dim)
    check_number("rope_theta", theta)
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for RoPE, got head_dim={head_dim}")
    if not 0 < theta < math.inf:
        raise ValueError(f"rope_theta must be positive and finite, got rope_theta={theta}")


def check_array(name: str, x: object) -> None:
    """Refuse what is not an array of the framework."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")


def check_floating(name: str, x: Array, rank: int) -> None:
    """Refuse an array of another rank, or one that does not hold floating-point numbers."""
    check_array(name, x)
    if x.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes, got {name}.shape={x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {name}.dtype={x.dtype}")


def check_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    bias: Array | None,
    key_padding_lengths: Array | Sequence[int] | None,
) -> None:
    """Refuse split heads, query (B, N, T, H), key and value (B, K, S, H), a mask, bias or lengths that do not fit."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_floating(name, x, rank=4)
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, got {name}.dtype={x.dtype} and {query.dtype}")
    if key.shape != value.shape:
        raise ValueError(f"value must have the shape of key, got {value.shape} and {key.shape}")
    check_scored(query, key, bias)
    check_mask(mask, (*query.shape[:3], key.shape[2]))
    if key_padding_lengths is not None:
        check_lengths("key_padding_lengths", key_padding_lengths, key.shape[0], key.shape[2])


def check_scored(query: Array, key: Array, bias: Array | None) -> None:
    """Refuse queries (B, N, T, H) and keys (B, K, S, H) that have no dot products, or a bias that does not fit them."""
    check_floating("query", query, rank=4)
    check_floating("key", key, rank=4)
    if (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]):
        raise ValueError(
            f"key must have the batch size and head_dim of query, got key.shape={key.shape} "
            f"and query.shape={query.shape}"
        )
    check_head_groups(query.shape[1], key.shape[1])
    check_bias(bias, (*query.shape[:3], key.shape[2]), query.dtype)


def check_weighed(attn_weights: Array, value: Array) -> None:
    """Refuse attention weights (B, N, T, S) and values (B, K, S, H) that do not fit each other."""
    check_floating("attn_weights", attn_weights, rank=4)
    check_floating("value", value, rank=4)
    if (attn_weights.shape[0], attn_weights.shape[3]) != (value.shape[0], value.shape[2]):
        raise ValueError(
            f"value must have the batch size and the keys of attn_weights, got value.shape={value.shape} "
            f"and attn_weights.shape={attn_weights.shape}"
        )
    check_head_groups(attn_weights.shape[1], value.shape[1])


def check_keep(keep: Array | None, scores_shape: tuple[int, ...]) -> None:
    """Refuse a given dropout that is not boolean or does not broadcast to the scores (B, N, T, S)."""
    if keep is None:
        return
    check_array("keep", keep)
    if keep.dtype != jnp.bool_:
        raise TypeError(f"keep must be boolean (True = kept), got keep.dtype={keep.dtype}")
    check_broadcasts("keep", keep.shape, scores_shape)


def check_mask(mask: Array | None, scores_shape: tuple[int, ...]) -> None:
    """Refuse a mask that is not boolean or does not broadcast to the scores (B, N, T, S)."""
    if mask is None:
        return
    check_array("mask", mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"mask must be boolean (True = masked), got mask.dtype={mask.dtype}; an additive term is passed as bias"
        )
    check_broadcasts("mask", mask.shape, scores_shape)


def check_bias(bias: Array | None, scores_shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    """Refuse a bias of another dtype than the query's, or one that does not broadcast to the scores (B, N, T, S)."""
    if bias is None:
        return
    check_array("bias", bias)
    if bias.dtype != dtype:
        raise TypeError(f"bias must have the dtype of query, got bias.dtype={bias.dtype} and {dtype}")
    check_broadcasts("bias", bias.shape, scores_shape)


def check_broadcasts(name: str, shape: tuple[int, ...], scores_shape: tuple[int, ...]) -> None:
    """Refuse a shape that does not broadcast to the scores, or that would stretch them."""
    fits = len(shape) <= 4 and all(a in (1, b) for a, b in zip(reversed(shape), reversed(scores_shape), strict=False))
    if not fits:
        raise ValueError(f"{name} must broadcast to the scores (B, N, T, S) = {scores_shape}, got {name}.shape={shape}")


def check_lengths(name: str, lengths: Array | Sequence[int], batch_size: int | None, maximum: int) -> None:
    """Refuse lengths that are not one integer in 0..maximum for each sequence."""
    array = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
    if isinstance(array, np.ndarray) and not array.size:  # NumPy takes [] for floats
        array = array.astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {name}.dtype={array.dtype}")
    if array.ndim != 1 or (batch_size is not None and len(array) != batch_size):
        expected = "(B,)" if batch_size is None else f"(B,) = ({batch_size},)"
        raise ValueError(f"{name} must have shape {expected}, got {name}.shape={array.shape}")
    if isinstance(array, Tracer):  # values are not known under jit
        return
    array = np.asarray(array).astype(np.int64)  # a narrow dtype cannot hold every maximum
    if bool(((array < 0) | (array > maximum)).any()):
        raise ValueError(f"{name} must lie in 0..{maximum}, got {name}={array.tolist()}")


def check_positions(positions: Array, batch_size: int, seq_len: int) -> None:
    """Refuse positions that are not integers of shape (B, T) or (1, T)."""
    check_array("positions", positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"positions must be integers, got positions.dtype={positions.dtype}")
    if positions.shape not in ((batch_size, seq_len), (1, seq_len)):
        raise ValueError(
            f"positions must have shape (B or 1, T) = ({batch_size} or 1, {seq_len}), "
            f"got positions.shape={positions.shape}"
        )


def check_rope_positions(positions: Array | None, batch_size: int, seq_len: int, rope_theta: float | None) -> None:
    """Refuse positions without RoPE, or that do not fit."""
    if positions is None:
        return
    if rope_theta is None:
        raise ValueError("positions must come with RoPE, got positions and rope_theta=None")
    check_positions(positions, batch_size, seq_len)


def check_config(
    *,
    d_model: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    d_in: int | None,
    d_kv: int | None,
    qkv_bias: bool,
    out_bias: bool,
    out_proj: bool,
    fused_qkv: bool,
    rope_theta: float | None,
    dropout: float,
    output_dropout: float,
    param_dtype: jnp.dtype,
    is_self_attention: bool,
) -> None:
    """Refuse keywords of a module that do not fit each other."""
    check_count("d_model", d_model)
    check_count("num_heads", num_heads)
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "d_in": d_in, "d_kv": d_kv}
    for name, value in sizes.items():
        if value is not None:
            check_count(name, value)
    parts = {"qkv_bias": qkv_bias, "out_bias": out_bias, "out_proj": out_proj, "fused_qkv": fused_qkv}
    for name, value in parts.items():
        check_boolean(name, value)
    check_head_groups(num_heads, num_kv_heads or num_heads)
    if head_dim is None and d_model % num_heads:
        raise ValueError(
            f"d_model must be a multiple of num_heads, got d_model={d_model} and num_heads={num_heads} without head_dim"
        )
    if fused_qkv and d_kv not in (None, d_in or d_model):
        raise ValueError(f"d_kv must equal d_in with fused_qkv, got d_kv={d_kv} and d_in={d_in or d_model}")
    if rope_theta is not None and d_kv not in (None, d_in or d_model):
        raise ValueError(f"d_kv must equal d_in with RoPE, got d_kv={d_kv} and d_in={d_in or d_model}")
    if rope_theta is not None:
        check_rope(head_dim or d_model // num_heads, rope_theta)
    if is_self_attention and d_kv not in (None, d_in or d_model):
        raise ValueError(f"d_kv must equal d_in in self-attention, got d_kv={d_kv} and d_in={d_in or d_model}")
    check_rate("dropout", dropout)
    check_rate("output_dropout", output_dropout)
    if not jnp.issubdtype(jnp.dtype(param_dtype), jnp.floating):
        raise TypeError(f"param_dtype must be floating point, got param_dtype={jnp.dtype(param_dtype)}")


def check_layer_inputs(
    query: Array, key: Array | None, value: Array | None, positions: Array | None, rope_theta: float | None
) -> None:
    """Refuse layer inputs (B, T, d_in) and (B, S, d_kv) that do not fit each other."""
    check_floating("query", query, rank=3)
    if key is None and value is not None:
        raise ValueError("value must come with a key, got key=None and a value")
    if key is not None and rope_theta is not None:
        raise ValueError(f"key must be None (self-attention) with RoPE, got a key and rope_theta={rope_theta}")
    if positions is not None and rope_theta is None:
        raise ValueError("positions must come with RoPE, got positions and rope_theta=None")
    for name, x in (("key", key), ("value", value)):
        if x is None:
            continue
        check_floating(name, x, rank=3)
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, got {name}.dtype={x.dtype} and {query.dtype}")
        if x.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have the batch size of query, got {x.shape[0]} and {query.shape[0]}")
    if key is not None and value is not None and key.shape[1] != value.shape[1]:
        raise ValueError(f"value must have as many tokens as key, got {value.shape[1]} and {key.shape[1]}")


def check_weights(weights: Mapping[str, Mapping[str, Array]], num_heads: int, num_kv_heads: int) -> None:
    """Refuse weights with missing or unexpected names, or whose dtypes or shapes do not fit each other or the heads."""
    check_head_groups(num_heads, num_kv_heads)
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a mapping of projections to their arrays, got {type(weights).__name__}")
    flat = sorted(name for name, leaves in weights.items() if not isinstance(leaves, Mapping))
    if flat:
        raise TypeError(f"weights must map each projection to its kernel and bias, got arrays for {flat}")
    packed = "qkv_proj" in weights
    required = {"qkv_proj"} if packed else {"q_proj", "k_proj", "v_proj"}
    given = {f"{name}.{leaf}" for name, leaves in weights.items() for leaf in leaves}
    needed = {f"{name}.kernel" for name in required | ({"out_proj"} & weights.keys())}
    optional = {name.replace("kernel", "bias") for name in needed}
    missing, unexpected = sorted(needed - given), sorted(given - needed - optional)
    if missing or unexpected:
        raise ValueError(f"weights must have the names of the layer, missing {missing}, unexpected {unexpected}")
    first, dtype = next((f"{name}.kernel", leaves["kernel"].dtype) for name, leaves in weights.items())
    for name, leaves in weights.items():
        for leaf, array in leaves.items():
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise TypeError(f"{name}.{leaf} must be floating point, got {name}.{leaf}.dtype={array.dtype}")
            if array.dtype != dtype:
                raise TypeError(f"{name}.{leaf} must have the dtype of {first}, got {array.dtype} and {dtype}")
    groups = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
    groups = {"qkv_proj": num_heads + 2 * num_kv_heads} if packed else groups
    head_dims = set()
    for name, heads in groups.items():
        kernel = weights[name]["kernel"]
        if kernel.ndim != 2 or kernel.shape[1] % heads:
            raise ValueError(
                f"{name}.kernel must have 2 axes and columns for {heads} heads, got {name}.kernel.shape={kernel.shape}"
            )
        head_dims.add(kernel.shape[1] // heads)
    if len(head_dims) != 1:
        raise ValueError(f"q_proj, k_proj and v_proj must have one head_dim, got head_dim={sorted(head_dims)}")
    context_width = num_heads * head_dims.pop()
    if "out_proj" in weights and weights["out_proj"]["kernel"].shape[:-1] != (context_width,):
        raise ValueError(
            f"out_proj.kernel must have shape (N * H, E) = ({context_width}, E), "
            f"got out_proj.kernel.shape={weights['out_proj']['kernel'].shape}"
        )
    check_finite(weights)
    for name, leaves in weights.items():
        columns = leaves["kernel"].shape[1]
        if "bias" in leaves and leaves["bias"].shape != (columns,):
            raise ValueError(f"{name}.bias must have shape ({columns},), got {name}.bias.shape={leaves['bias'].shape}")


def check_finite(weights: Mapping[str, Mapping[str, Array]]) -> None:
    """Refuse weights with a NaN or an infinity, wherever their values are known."""
    arrays = {f"{name}.{leaf}": array for name, leaves in weights.items() for leaf, array in leaves.items()}
    known = {name: array for name, array in arrays.items() if not isinstance(array, Tracer)}
    with jax.ensure_compile_time_eval():  # weights may be known where inputs are not: closed over under jit
        wrong = [name for name, is_finite in _are_finite(known).items() if not is_finite]
    if wrong:
        raise ValueError(f"weights must be finite, got NaN or infinities in {wrong}")


@jax.jit
def _are_finite(arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: jnp.isfinite(array).all() for name, array in arrays.items()}


def check_projected(name: str, x: Array, kernel: Array) -> None:
    """Refuse an input whose width or dtype is not that of the projection it goes into."""
    if x.shape[-1] != kernel.shape[0]:
        raise ValueError(f"the input of {name} must have {kernel.shape[0]} features, got shape={x.shape}")
    if x.dtype != kernel.dtype:
        raise TypeError(f"the input of {name} must have the dtype of its kernel, got {x.dtype} and {kernel.dtype}")
