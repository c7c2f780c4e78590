"""Checks of what a caller passes in, made before any work: `<what> must <rule>, got <name>=<value>`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def check_count(name: str, value: object, minimum: int = 1) -> None:
    """Refuse what is not an integer of at least `minimum`."""
    if isinstance(value, Tensor) and torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        value = int(value)  # a size, of which the tracer makes a tensor
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


def values_of(x: Tensor) -> Any:
    """The values of x as Python's, or None where none are known: in a traced graph, on meta, of a fake, under vmap."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return None
    try:
        values = x.tolist()
    except RuntimeError:
        return None
    first = values
    while isinstance(first, list) and first:
        first = first[0]
    return values if isinstance(first, (bool, int, float, list)) else None  # a fake tensor may give symbols


def is_autocast_on(device: torch.device) -> bool:
    """Whether autocast narrows what is computed on a device; some, such as meta, have none."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def check_array(name: str, x: object) -> None:
    """Refuse what is not an array of the framework."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def check_floating(name: str, x: Tensor, rank: int) -> None:
    """Refuse an array of another rank, or one that does not hold floating-point numbers."""
    check_array(name, x)
    if x.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes, got {name}.shape={tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {name}.dtype={x.dtype}")


def check_device(name: str, x: Tensor, expected: torch.device, of: str) -> None:
    """Refuse an array that lies on another device than the one that it meets."""
    if x.device != expected:
        raise ValueError(f"{name} must lie on the device of {of}, got {x.device} and {expected}")


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_padding_lengths: Tensor | Sequence[int] | None,
) -> None:
    """Refuse split heads, query (B, N, T, H), key and value (B, K, S, H), a mask, bias or lengths that do not fit."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_floating(name, x, rank=4)
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, got {name}.dtype={x.dtype} and {query.dtype}")
        check_device(name, x, query.device, "query")
    if key.shape != value.shape:
        raise ValueError(f"value must have the shape of key, got {tuple(value.shape)} and {tuple(key.shape)}")
    check_scored(query, key, bias)
    check_mask(mask, (*query.shape[:3], key.shape[2]))
    if mask is not None:
        check_device("mask", mask, query.device, "query")
    if key_padding_lengths is not None:
        check_lengths("key_padding_lengths", key_padding_lengths, key.shape[0], key.shape[2])


def check_scored(query: Tensor, key: Tensor, bias: Tensor | None) -> None:
    """Refuse queries (B, N, T, H) and keys (B, K, S, H) that have no dot products, or a bias that does not fit them."""
    check_floating("query", query, rank=4)
    check_floating("key", key, rank=4)
    if (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]):
        raise ValueError(
            f"key must have the batch size and head_dim of query, got key.shape={tuple(key.shape)} "
            f"and query.shape={tuple(query.shape)}"
        )
    check_head_groups(query.shape[1], key.shape[1])
    check_bias(bias, (*query.shape[:3], key.shape[2]), query.dtype)
    if bias is not None:
        check_device("bias", bias, query.device, "query")


def check_weighed(attn_weights: Tensor, value: Tensor) -> None:
    """Refuse attention weights (B, N, T, S) and values (B, K, S, H) that do not fit each other."""
    check_floating("attn_weights", attn_weights, rank=4)
    check_floating("value", value, rank=4)
    if (attn_weights.shape[0], attn_weights.shape[3]) != (value.shape[0], value.shape[2]):
        raise ValueError(
            f"value must have the batch size and the keys of attn_weights, got value.shape={tuple(value.shape)} "
            f"and attn_weights.shape={tuple(attn_weights.shape)}"
        )
    check_head_groups(attn_weights.shape[1], value.shape[1])


def check_keep(keep: Tensor | None, scores_shape: tuple[int, ...]) -> None:
    """Refuse a given dropout that is not boolean or does not broadcast to the scores (B, N, T, S)."""
    if keep is None:
        return
    check_array("keep", keep)
    if keep.dtype != torch.bool:
        raise TypeError(f"keep must be boolean (True = kept), got keep.dtype={keep.dtype}")
    check_broadcasts("keep", tuple(keep.shape), scores_shape)


def check_mask(mask: Tensor | None, scores_shape: tuple[int, ...]) -> None:
    """Refuse a mask that is not boolean or does not broadcast to the scores (B, N, T, S)."""
    if mask is None:
        return
    check_array("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be boolean (True = masked), got mask.dtype={mask.dtype}; an additive term is passed as bias"
        )
    check_broadcasts("mask", tuple(mask.shape), scores_shape)


def check_bias(bias: Tensor | None, scores_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a bias of another dtype than the query's, or one that does not broadcast to the scores (B, N, T, S)."""
    if bias is None:
        return
    check_array("bias", bias)
    if bias.dtype != dtype and not (bias.is_floating_point() and is_autocast_on(bias.device)):
        raise TypeError(f"bias must have the dtype of query, got bias.dtype={bias.dtype} and {dtype}")
    check_broadcasts("bias", tuple(bias.shape), scores_shape)


def check_broadcasts(name: str, shape: tuple[int, ...], scores_shape: tuple[int, ...]) -> None:
    """Refuse a shape that does not broadcast to the scores, or that would stretch them."""
    fits = len(shape) <= 4 and all(a in (1, b) for a, b in zip(reversed(shape), reversed(scores_shape), strict=False))
    if not fits:
        raise ValueError(f"{name} must broadcast to the scores (B, N, T, S) = {scores_shape}, got {name}.shape={shape}")


def check_lengths(name: str, lengths: Tensor | Sequence[int], batch_size: int | None, maximum: int) -> list[int] | None:
    """Refuse lengths that are not one integer in 0..maximum for each sequence.

    Returns:
        The lengths where they are known: a list is, in a compiled graph, too.
    """
    if isinstance(lengths, (list, tuple)) and all(type(length) is int for length in lengths):
        shape, values = (len(lengths),), list(lengths)
    else:
        array = torch.as_tensor(lengths)
        if array.is_floating_point() or array.is_complex() or array.dtype == torch.bool:
            raise TypeError(f"{name} must be integers, got {name}.dtype={array.dtype}")
        shape, values = tuple(array.shape), values_of(array)
    if len(shape) != 1 or (batch_size is not None and shape[0] != batch_size):
        expected = "(B,)" if batch_size is None else f"(B,) = ({batch_size},)"
        raise ValueError(f"{name} must have shape {expected}, got {name}.shape={shape}")
    if values is not None and any(not 0 <= value <= maximum for value in values):
        raise ValueError(f"{name} must lie in 0..{maximum}, got {name}={values}")
    return values


def check_positions(positions: Tensor, batch_size: int, seq_len: int) -> None:
    """Refuse positions that are not integers of shape (B, T) or (1, T)."""
    check_array("positions", positions)
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise TypeError(f"positions must be integers, got positions.dtype={positions.dtype}")
    if tuple(positions.shape) not in ((batch_size, seq_len), (1, seq_len)):
        raise ValueError(
            f"positions must have shape (B or 1, T) = ({batch_size} or 1, {seq_len}), "
            f"got positions.shape={tuple(positions.shape)}"
        )


def check_rope_positions(positions: Tensor | None, batch_size: int, seq_len: int, rope_theta: float | None) -> None:
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
    dtype: torch.dtype | None,
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
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be floating point, got dtype={dtype}")


def check_layer_inputs(
    query: Tensor, key: Tensor | None, value: Tensor | None, positions: Tensor | None, rope_theta: float | None
) -> None:
    """Refuse layer inputs (B, T, d_in) and (B, S, d_kv) that do not fit each other."""
    check_floating("query", query, rank=3)
    if key is None and value is not None:
        raise ValueError("value must come with a key, got key=None and a value")
    if key is not None and rope_theta is not None:
        raise ValueError(f"key must be None (self-attention) with RoPE, got a key and rope_theta={rope_theta}")
    check_rope_positions(positions, query.shape[0], query.shape[1], rope_theta)
    for name, x in (("key", key), ("value", value)):
        if x is None:
            continue
        check_floating(name, x, rank=3)
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, got {name}.dtype={x.dtype} and {query.dtype}")
        check_device(name, x, query.device, "query")
        if x.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have the batch size of query, got {x.shape[0]} and {query.shape[0]}")
    if key is not None and value is not None and key.shape[1] != value.shape[1]:
        raise ValueError(f"value must have as many tokens as key, got {value.shape[1]} and {key.shape[1]}")


def check_weights(weights: Mapping[str, Tensor], num_heads: int, num_kv_heads: int) -> None:
    """Refuse weights with missing or unexpected names, or whose dtypes or shapes do not fit each other or the heads."""
    check_head_groups(num_heads, num_kv_heads)
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a mapping of names to tensors, got {type(weights).__name__}")
    packed = "qkv_proj.weight" in weights
    required = {"qkv_proj.weight"} if packed else {"q_proj.weight", "k_proj.weight", "v_proj.weight"}
    optional = {name.replace("weight", "bias") for name in required} | {"out_proj.weight"}
    if "out_proj.weight" in weights:
        optional.add("out_proj.bias")
    missing, unexpected = sorted(required - weights.keys()), sorted(weights.keys() - required - optional)
    if missing or unexpected:
        raise ValueError(f"weights must have the names of the layer, missing {missing}, unexpected {unexpected}")
    first = next(iter(weights))
    for name, weight in weights.items():
        check_array(name, weight)
        if not weight.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {name}.dtype={weight.dtype}")
        if weight.dtype != weights[first].dtype:
            raise TypeError(f"{name} must have the dtype of {first}, got {weight.dtype} and {weights[first].dtype}")
        check_device(name, weight, weights[first].device, first)
    groups = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
    groups = {"qkv_proj": num_heads + 2 * num_kv_heads} if packed else groups
    head_dims = set()
    for name, heads in groups.items():
        weight = weights[f"{name}.weight"]
        if weight.ndim != 2 or weight.shape[0] % heads:
            raise ValueError(
                f"{name}.weight must have 2 axes and rows for {heads} heads, "
                f"got {name}.weight.shape={tuple(weight.shape)}"
            )
        head_dims.add(weight.shape[0] // heads)
    if len(head_dims) != 1:
        raise ValueError(f"q_proj, k_proj and v_proj must have one head_dim, got head_dim={sorted(head_dims)}")
    context_width = num_heads * head_dims.pop()
    if "out_proj.weight" in weights and weights["out_proj.weight"].shape[1:] != (context_width,):
        raise ValueError(
            f"out_proj.weight must have shape (E, N * H) = (E, {context_width}), "
            f"got out_proj.weight.shape={tuple(weights['out_proj.weight'].shape)}"
        )
    check_finite(weights)
    for name, weight in weights.items():
        rows = weights[name.replace("bias", "weight")].shape[0]
        if name.endswith("bias") and tuple(weight.shape) != (rows,):
            raise ValueError(f"{name} must have shape ({rows},), got {name}.shape={tuple(weight.shape)}")


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Refuse weights with a NaN or an infinity, wherever their values are known."""
    if torch.compiler.is_compiling():  # the question itself would be a part of the graph
        return
    are_finite = values_of(torch.stack([torch.isfinite(weight).all() for weight in weights.values()]))
    if are_finite is None:
        return
    wrong = [name for name, is_finite in zip(weights, are_finite, strict=True) if not is_finite]
    if wrong:
        raise ValueError(f"weights must be finite, got NaN or infinities in {wrong}")


def check_projected(name: str, x: Tensor, weight: Tensor) -> None:
    """Refuse an input whose width or dtype is not that of the projection it goes into."""
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"the input of {name} must have {weight.shape[1]} features, got shape={tuple(x.shape)}")
    mixed = x.dtype != weight.dtype and weight.is_floating_point()
    if mixed and not is_autocast_on(x.device):
        raise TypeError(f"the input of {name} must have the dtype of its weight, got {x.dtype} and {weight.dtype}")
    check_device(f"the input of {name}", x, weight.device, "its weight")
