"""Argument checks in the order of the data flow. Messages: `<what> must <rule>, got <name>=<value>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mha_spec import AttentionSpec, GridBias, Latent, Norm, Refusal, RelativeBias, RelativeProducts, Rope, WrongType
from mha_spec.attention import check_spec
from mha_spec.features.norm import check_norm
from mha_spec.features.rope import position_shapes
from mha_spec.hints import NEW_CACHE, OF_NUMBERS, WRITTEN_OVER, missing_axes
from mha_spec.rules import as_count, check_head_groups
from mha_torch.arrays import is_autocast_on, is_distributed, values_of


def check_count(name: str, value: object, minimum: int = 1) -> None:
    """Refuse anything but an integer of at least `minimum`."""
    as_count(name, value, minimum)


def check_array(name: str, x: object) -> None:
    """Refuse anything but an array of the framework."""
    if not isinstance(x, Tensor):
        raise WrongType(name, "be a torch.Tensor", type(x).__name__)


def check_floating(name: str, x: Tensor, rank: int) -> None:
    """Refuse an array of another rank, or one that is not floating point."""
    if isinstance(x, Tensor) and x.ndim == rank and x.is_floating_point():
        return
    check_array(name, x)
    if x.ndim != rank:
        raise Refusal(name, f"have {rank} axes", {f"{name}.shape": tuple(x.shape)})
    raise WrongType(name, "be floating point", {f"{name}.dtype": x.dtype})


def check_tokens(name: str, x: Tensor) -> None:
    """Refuse anything but floating-point tokens (…, T, d_in)."""
    check_array(name, x)
    if x.ndim < 2:
        raise Refusal(name, "have at least 2 axes", {f"{name}.shape": tuple(x.shape)})
    check_floating(name, x, rank=x.ndim)


def check_device(name: str, x: Tensor, expected: torch.device, of: str) -> None:
    """Refuse an array on another device."""
    if x.device != expected:
        raise Refusal(name, f"lie on the device of {of}", {f"{name}.device": x.device, "expected": expected})


def check_broadcasts(name: str, shape: tuple[int, ...], scores_shape: tuple[int, ...]) -> None:
    """Refuse a shape that does not broadcast to the scores, or that would enlarge them."""
    sizes = zip(reversed(shape), reversed(scores_shape), strict=False)
    if len(shape) > 4 or not all(a == 1 or a == b for a, b in sizes):
        rule = f"broadcast to the scores (B, N, T, S) = {scores_shape}"
        raise Refusal(name, rule, {f"{name}.shape": shape}, hint=missing_axes(name, shape, scores_shape))


def check_integers(name: str, x: Tensor, shapes: Sequence[tuple[int, ...]], in_words: str) -> None:
    """Refuse an array that is not of integers, or has none of these shapes."""
    check_array(name, x)
    if x.is_floating_point() or x.dtype == torch.bool:
        raise WrongType(name, "be integers", {f"{name}.dtype": x.dtype})
    # Size by size: torch.compile cannot compare tuples of symbolic sizes.
    if not any(len(shape) == x.ndim and all(a == b for a, b in zip(shape, x.shape, strict=True)) for shape in shapes):
        raise Refusal(name, f"have shape {in_words}", {f"{name}.shape": tuple(x.shape)})


def check_lengths(name: str, lengths: Tensor | Sequence[int], batch_size: int | None, maximum: int) -> list[int] | None:
    """Refuse lengths that are not one integer in 0..maximum per sequence.

    Returns:
        Lengths if known; those of a list are, even in a compiled graph.
    """
    if isinstance(lengths, (list, tuple)) and all(type(length) is int for length in lengths):
        shape, values = (len(lengths),), list(lengths)
    else:
        array = torch.as_tensor(lengths)
        if array.is_floating_point() or array.is_complex() or array.dtype == torch.bool:
            raise WrongType(name, "be integers", {f"{name}.dtype": array.dtype})
        shape, values = tuple(array.shape), values_of(array)
    if len(shape) != 1 or (batch_size is not None and shape[0] != batch_size):
        expected = "(B,)" if batch_size is None else f"(B,) = ({batch_size},)"
        raise Refusal(name, f"have shape {expected}", {f"{name}.shape": shape})
    if values is not None and any(not 0 <= value <= maximum for value in values):
        raise Refusal(name, f"lie in 0..{maximum}", {name: values})
    return values


def check_weights(weights: Mapping[str, Tensor], spec: AttentionSpec) -> None:
    """Refuse weights whose names or shapes are not exactly those of the layer."""
    check_spec(spec)
    if not isinstance(weights, Mapping):
        raise WrongType("weights", "be a mapping of names to tensors", type(weights).__name__)
    shapes = spec.held_shapes
    missing, unexpected = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    if missing or unexpected:
        raise Refusal("weights", "have exactly the names of the spec", missing=missing, unexpected=unexpected)
    first = next(iter(shapes))
    for name, shape in shapes.items():
        weight = weights[name]
        check_array(name, weight)
        if is_distributed(weight):
            raise WrongType(
                name,
                "be a local tensor, with the local specification (parity.shard)",
                type(weight).__name__,
                hint="the modules take distributed weights",
            )
        if not weight.is_floating_point():
            raise WrongType(name, "be floating point", {f"{name}.dtype": weight.dtype})
        if weight.dtype != weights[first].dtype:
            raise WrongType(name, f"have the dtype of {first}", f"{weight.dtype} and {weights[first].dtype}")
        check_device(name, weight, weights[first].device, first)
        if tuple(weight.shape) != shape:
            raise Refusal(name, f"have shape {shape}", {f"{name}.shape": tuple(weight.shape)})
    check_finite(weights)


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Refuse weights with NaN or infinity, if their values are known."""
    if torch.compiler.is_compiling():  # the check itself would become part of the graph
        return
    are_finite = values_of(torch.stack([torch.isfinite(weight).all() for weight in weights.values()]))
    if are_finite is None:
        return
    wrong = [name for name, is_finite in zip(weights, are_finite, strict=True) if not is_finite]
    if wrong:
        raise Refusal("weights", "be finite", f"NaN or infinities in {wrong}")


def check_layer_inputs(
    query: Tensor, key: Tensor | None, value: Tensor | None, positions: Tensor | None, spec: AttentionSpec
) -> None:
    """Refuse layer inputs (B, T, d_in) and (B, S, d_kv) that do not fit each other or the layer."""
    check_floating("query", query, rank=3)
    check_width("query", query, spec.d_in)
    if key is None and value is not None:
        raise Refusal("value", "come with a key", "key=None and a value")
    if key is None and spec.d_kv != spec.d_in and not spec.shared_kv:
        raise Refusal("key", f"be given, with {spec.d_kv} features", key=None)
    if key is not None and spec.rope is not None and not spec.shared_kv:
        raise Refusal("key", "be None (self-attention) with RoPE", f"a key and rope={spec.rope}")
    if key is not None and spec.latent is not None:
        raise Refusal("key", "be None (self-attention) with latents", f"a key and latent={spec.latent}")
    check_layer_positions(positions, query.shape[0], query.shape[1], spec)
    if spec.shared_kv:
        check_shared_kv(query, key, value, spec)
        return
    for name, x in (("key", key), ("value", value)):
        if x is None:
            continue
        check_floating(name, x, rank=3)
        check_width(name, x, spec.d_kv)
        if x.dtype != query.dtype:
            raise WrongType(name, "have the dtype of query", {f"{name}.dtype": x.dtype, "query.dtype": query.dtype})
        check_device(name, x, query.device, "query")
        if x.shape[0] != query.shape[0]:
            raise Refusal(
                name, "have the batch size of query", {f"{name}.shape[0]": x.shape[0], "query.shape[0]": query.shape[0]}
            )
    if key is not None and value is not None and key.shape[1] != value.shape[1]:
        raise Refusal(
            "value", "have as many tokens as key", {"value.shape[1]": value.shape[1], "key.shape[1]": key.shape[1]}
        )


def check_width(name: str, x: Tensor, width: int) -> None:
    """Refuse an input of a layer with another number of features."""
    if x.shape[-1] != width:
        raise Refusal(name, f"have {width} features", {f"{name}.shape": tuple(x.shape)})


def check_shared_kv(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    spec: AttentionSpec,
    names: tuple[str, str] = ("key", "value"),
) -> None:
    """Refuse anything but keys (B, K, S, H) and values (B, K, S, Hv) of another layer for these queries."""
    if key is None or value is None:
        raise Refusal(" and ".join(names), "be those of another layer with shared_kv", "None")
    check_floating(names[0], key, rank=4)
    for name, x, width in zip(names, (key, value), (spec.head_dim, spec.value_head_dim), strict=True):
        check_floating(name, x, rank=4)
        expected = (query.shape[0], spec.num_kv_heads, key.shape[2], width)
        if tuple(x.shape) != expected:
            rule = f"have shape {expected} with shared_kv"
            raise Refusal(name, rule, {f"{name}.shape": tuple(x.shape)})


def check_projected(name: str, x: Tensor, weight: Tensor) -> None:
    """Refuse an input that does not fit its projection.

    For a distributed weight, its engine decides the part, dtype and device when it is used.
    """
    if (x.shape[-1], x.dtype, x.device) == (weight.shape[1], weight.dtype, weight.device) or is_distributed(weight):
        return
    if x.shape[-1] != weight.shape[1]:
        raise Refusal(f"the input of {name}", f"have {weight.shape[1]} features", shape=tuple(x.shape))
    mixed = x.dtype != weight.dtype and weight.is_floating_point()
    if mixed and not is_autocast_on(x.device):
        raise WrongType(
            f"the input of {name}",
            "have the dtype of its weight",
            {"x.dtype": x.dtype, "weight.dtype": weight.dtype},
            hint="torch.autocast casts inputs and weights; layer.to(dtype) converts the weights",
        )
    check_device(f"the input of {name}", x, weight.device, "its weight")


def check_features(name: str, x: Tensor, width: int) -> None:
    """Refuse the output of a projection that is distributed or has another width, as if it had only some heads."""
    if x.shape[-1] != width or is_distributed(x):
        kind = "in a DTensor" if is_distributed(x) else ""
        raise Refusal(
            name,
            f"return {width} features in a tensor of this process",
            f"{x.shape[-1]} features {kind}".rstrip(),
            hint="mha_torch.parallel.plan divides heads with all that belongs to them",
        )


def check_positions(positions: Tensor, batch_size: int, seq_len: int, rope: Rope | None) -> None:
    """Refuse positions that are not integers of shape (B, T) or (1, T), or with sections (axes, B or 1, T)."""
    check_array("positions", positions)
    axes = () if rope is None or rope.sections is None or positions.ndim == 2 else (len(rope.sections),)
    shapes = [(*axes, batch_size, seq_len), (*axes, 1, seq_len)]
    check_integers("positions", positions, shapes, position_shapes(batch_size, seq_len, rope))


def check_layer_positions(positions: Tensor | None, batch_size: int, seq_len: int, spec: AttentionSpec) -> None:
    """Refuse positions that do not fit; a layer without RoPE and temperature ignores those that do."""
    if positions is not None:
        check_positions(positions, batch_size, seq_len, spec.rope)


def check_normed(x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> None:
    """Refuse features that cannot be normalized, or parameters that do not fit the norm."""
    check_array("x", x)
    if not x.is_floating_point():
        raise WrongType("x", "be floating point", {"x.dtype": x.dtype})
    check_norm(norm)
    shapes = norm.shapes(x.shape[1] if norm.per_head else 1, x.shape[-1])
    for name, parameter in (("weight", weight), ("bias", bias)):
        found = None if parameter is None else tuple(parameter.shape)
        if found != shapes.get(name):
            raise Refusal(name, f"have shape {shapes.get(name)} for {norm}", {f"{name}.shape": found})


def check_latents(name: str, latents: Tensor, latent: Latent) -> None:
    """Refuse anything but latents (B, 1, S, kv_rank + rope_dim)."""
    check_floating(name, latents, rank=4)
    if (latents.shape[1], latents.shape[3]) != (1, latent.width):
        shape = tuple(latents.shape)
        raise Refusal(name, f"have shape (B, 1, S, {latent.width})", {f"{name}.shape": shape})


def check_scored(query: Tensor, key: Tensor, spec: AttentionSpec | None) -> None:
    """Refuse queries (B, N, T, H) and keys (B, K, S, H) that do not fit each other or the layer."""
    if (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]):
        raise Refusal(
            "key",
            "have the batch size and head_dim of query",
            {"key.shape": tuple(key.shape), "query.shape": tuple(query.shape)},
        )
    check_head_groups(query.shape[1], key.shape[1])
    if spec is None:
        return
    check_spec(spec)
    if spec.alibi is not None and spec.num_heads != query.shape[1]:
        raise Refusal(
            "query",
            "have the heads of a spec with alibi, whose slopes are theirs",
            f"{query.shape[1]} heads and num_heads={spec.num_heads}",
        )


def check_mask(mask: Tensor | None, scores_shape: tuple[int, ...]) -> None:
    """Refuse a mask that is not boolean or does not broadcast to the scores (B, N, T, S)."""
    if mask is None:
        return
    check_array("mask", mask)
    if mask.dtype != torch.bool:
        raise WrongType("mask", "be boolean (True = masked)", {"mask.dtype": mask.dtype}, hint=OF_NUMBERS)
    check_broadcasts("mask", tuple(mask.shape), scores_shape)


def check_bias(bias: Tensor | None, scores_shape: tuple[int, ...], query: Tensor) -> None:
    """Refuse a bias that does not fit the queries, or does not broadcast to the scores (B, N, T, S)."""
    if bias is None:
        return
    check_array("bias", bias)
    if bias.dtype != query.dtype and not (bias.is_floating_point() and is_autocast_on(bias.device)):
        raise WrongType("bias", "have the dtype of query", {"bias.dtype": bias.dtype, "query.dtype": query.dtype})
    check_broadcasts("bias", tuple(bias.shape), scores_shape)
    check_device("bias", bias, query.device, "query")


def check_relative_bias(
    table: Tensor | None, relative_bias: RelativeBias | GridBias | None, scores_shape: tuple[int, ...]
) -> None:
    """Refuse a table if the layer has none, one of another shape, or more tokens than its grid has."""
    if (table is None) != (relative_bias is None):
        raise Refusal("relative_bias", "be given where the spec has one", {"spec.relative_bias": relative_bias})
    if table is None or relative_bias is None:
        return
    check_array("relative_bias", table)
    if not table.is_floating_point():
        raise WrongType("relative_bias", "be floating point", {"relative_bias.dtype": table.dtype})
    shape = (relative_bias.num_buckets, scores_shape[1])
    if tuple(table.shape) != shape:
        raise Refusal(
            "relative_bias", f"have shape (num_buckets, N) = {shape}", {"relative_bias.shape": tuple(table.shape)}
        )
    if isinstance(relative_bias, GridBias):
        check_grid(relative_bias, scores_shape)


def check_grid(relative_bias: GridBias, scores_shape: tuple[int, ...]) -> None:
    """Refuse scores (B, N, T, S) of more tokens than the grid of the relative bias has."""
    if max(scores_shape[2:]) > relative_bias.num_tokens:
        raise Refusal("tokens", f"be at most the {relative_bias.num_tokens} of the grid", {"(T, S)": scores_shape[2:]})


def check_relative_products(
    relative_keys: Tensor | None,
    relative_queries: Tensor | None,
    relative_products: RelativeProducts | None,
    query: Tensor,
) -> None:
    """Refuse tables that the layer does not have, or of other buckets, heads or features."""
    shapes = {} if relative_products is None else relative_products.tables(query.shape[1], query.shape[3])
    for name, table in (("relative_keys", relative_keys), ("relative_queries", relative_queries)):
        if (table is not None) != (name in shapes):
            raise Refusal(name, "be given where the spec has it", {"spec.relative_products": relative_products})
        if table is None:
            continue
        check_array(name, table)
        if not table.is_floating_point():
            raise WrongType(name, "be floating point", {f"{name}.dtype": table.dtype})
        if tuple(table.shape) != shapes[name]:
            raise Refusal(name, f"have shape {shapes[name]}", {f"{name}.shape": tuple(table.shape)})


def check_sinks(sinks: Tensor | None, num_heads: int) -> None:
    """Refuse sinks that are not one number per head."""
    if sinks is None:
        return
    check_array("sinks", sinks)
    if not sinks.is_floating_point():
        raise WrongType("sinks", "be floating point", {"sinks.dtype": sinks.dtype})
    if tuple(sinks.shape) != (num_heads,):
        raise Refusal("sinks", f"have shape (N,) = ({num_heads},)", {"sinks.shape": tuple(sinks.shape)})


def check_keep(keep: Tensor | None, scores_shape: tuple[int, ...]) -> None:
    """Refuse a dropout mask that is not boolean or does not broadcast to the scores (B, N, T, S)."""
    if keep is None:
        return
    check_array("keep", keep)
    if keep.dtype != torch.bool:
        raise WrongType("keep", "be boolean (True = kept)", {"keep.dtype": keep.dtype})
    check_broadcasts("keep", tuple(keep.shape), scores_shape)


def check_weighed(attn_weights: Tensor, value: Tensor) -> None:
    """Refuse attention weights (B, N, T, S) and values (B, K, S, Hv) that do not fit each other."""
    check_floating("attn_weights", attn_weights, rank=4)
    check_floating("value", value, rank=4)
    if (attn_weights.shape[0], attn_weights.shape[3]) != (value.shape[0], value.shape[2]):
        raise Refusal(
            "value",
            "have the batch size and the keys of attn_weights",
            {"value.shape": tuple(value.shape), "attn_weights.shape": tuple(attn_weights.shape)},
        )
    check_head_groups(attn_weights.shape[1], value.shape[1])


def check_gated(context: Tensor, gate: Tensor) -> None:
    """Refuse a context (B, N, T, Hv) and a gate that is not (B, T, N * Hv) or (B, T, N)."""
    check_floating("context", context, rank=4)
    check_floating("gate", gate, rank=3)
    batch_size, num_heads, seq_len, head_dim = context.shape
    widths = (num_heads * head_dim, num_heads)
    if tuple(gate.shape) not in [(batch_size, seq_len, width) for width in widths]:
        raise Refusal(
            "gate",
            f"have shape (B, T, N * H or N) = ({batch_size}, {seq_len}, {widths[0]} or {widths[1]})",
            {"gate.shape": tuple(gate.shape)},
        )


def check_is_cache(cache: object, kind: type) -> None:
    """Refuse anything but a cache of that type."""
    if not isinstance(cache, kind):
        raise WrongType("cache", f"be a {kind.__name__}", type(cache).__name__, hint=NEW_CACHE)
    check_not_written_over(cache)


def check_not_written_over(cache: Any) -> None:
    """Refuse a cache whose storage belongs to the one that a step returned."""
    # The mark is a change of a Python object, which a graph would not repeat.
    if torch.compiler.is_compiling() or not cache.is_written_over:
        return
    rule = "be the one that the last step returned: that step has written into its storage"
    raise Refusal("cache", rule, "the one before the step", hint=WRITTEN_OVER)
