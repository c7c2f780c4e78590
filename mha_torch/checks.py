"""Argument checks in the order of the data flow. Messages: `<what> must <rule>, got <x>=<y>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mha_spec import AttentionSpec, InputError, InputTypeError, Latent, Norm, Rope
from mha_spec.annotations import BOOLEAN, FLOATING, INTEGERS, checking
from mha_spec.attention import check_spec
from mha_spec.features.norm import check_norm
from mha_spec.features.relative_bias import check_grid
from mha_spec.features.rope import position_shapes
from mha_spec.heads import BareHeads
from mha_spec.hints import NEW_CACHE
from mha_spec.rules import (
    as_count,
    as_rate,
    check_broadcasts,
    check_head_groups,
    check_mapping,
    check_names,
    check_not_written_over,
)
from mha_spec.score_weights import without_sinks
from mha_torch.arrays import is_autocast_on, is_distributed, values_at_hand

_ALL_DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
_FLOATING = [dtype for dtype in _ALL_DTYPES if dtype.is_floating_point]
_INTEGERS = [
    dtype
    for dtype in _ALL_DTYPES
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
]

checked = checking({FLOATING: _FLOATING, INTEGERS: _INTEGERS, BOOLEAN: [torch.bool]})
"""Decorator of public functions: their annotations are checks of their arguments."""


def check_count(name: str, value: object, minimum: int = 1) -> None:
    """Reject anything but an integer of at least `minimum`."""
    as_count(name, value, minimum)


def check_array(name: str, x: object) -> None:
    """Reject anything but an array of the framework."""
    if not isinstance(x, Tensor):
        raise InputTypeError(name, "be a torch.Tensor", type(x).__name__)


def check_floating(name: str, x: Tensor, rank: int) -> None:
    """Reject an array of the wrong rank, or one that is not floating point."""
    # The usual case needs one comparison: checks must not slow a decoding step.
    if isinstance(x, Tensor) and x.ndim == rank and x.is_floating_point():
        return
    check_array(name, x)
    if x.ndim != rank:
        raise InputError(name, f"have {rank} axes", {f"{name}.shape": tuple(x.shape)})
    raise InputTypeError(name, "be floating point", {f"{name}.dtype": x.dtype})


def check_device(name: str, x: Tensor, expected: torch.device, of: str) -> None:
    """Reject an array on the wrong device."""
    if x.device != expected:
        raise InputError(
            name, f"lie on the device of {of}", {f"{name}.device": x.device, "expected": expected}
        )


def check_integers(name: str, x: Tensor, shapes: Sequence[tuple[int, ...]], in_words: str) -> None:
    """Reject an array that is not of integers, or has none of these shapes."""
    check_array(name, x)
    if x.is_floating_point() or x.dtype == torch.bool:
        raise InputTypeError(name, "be integers", {f"{name}.dtype": x.dtype})
    # Size by size: torch.compile cannot compare tuples of symbolic sizes.
    if not any(
        len(shape) == x.ndim and all(a == b for a, b in zip(shape, x.shape, strict=True))
        for shape in shapes
    ):
        raise InputError(name, f"have shape {in_words}", {f"{name}.shape": tuple(x.shape)})


def check_lengths(
    name: str, lengths: Tensor | Sequence[int], batch_size: int | None, maximum: int
) -> list[int] | None:
    """Reject lengths that are not one integer in 0..maximum per sequence.

    Returns:
        Lengths if known; the lengths of a list are, even in a compiled graph.
    """
    if isinstance(lengths, (list, tuple)) and all(type(length) is int for length in lengths):
        shape = (len(lengths),)
        values = list(lengths)
    else:
        array = lengths if isinstance(lengths, Tensor) else _as_tensor(name, lengths)
        if array.dtype not in _INTEGERS:
            raise InputTypeError(name, "be integers", {f"{name}.dtype": array.dtype})
        shape = tuple(array.shape)
        values = values_at_hand(array)
    if len(shape) != 1 or (batch_size is not None and shape[0] != batch_size):
        if batch_size is None:
            expected = "(B,)"
        else:
            expected = f"(B,) = ({batch_size},)"
        raise InputError(name, f"have shape {expected}", {f"{name}.shape": shape})
    if values and not 0 <= min(values) <= max(values) <= maximum:
        raise InputError(name, f"lie in 0..{maximum}", {name: values})
    return values


def _as_tensor(name: str, lengths: Sequence[int]) -> Tensor:
    """Return a sequence of lengths as a tensor."""
    try:
        return torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(name, "be integers", type(lengths).__name__) from None


def check_weights(weights: Mapping[str, Tensor], spec: AttentionSpec) -> None:
    """Reject weights whose names or shapes do not match the layer exactly."""
    check_spec(spec)
    check_names("weights", weights, spec.stored_shapes)
    first = next(iter(spec.stored_shapes))
    for name, shape in spec.stored_shapes.items():
        weight = weights[name]
        check_weight(name, weight, shape)
        if weight.dtype != weights[first].dtype:
            raise InputTypeError(
                name, f"have the dtype of {first}", f"{weight.dtype} and {weights[first].dtype}"
            )
        check_device(name, weight, weights[first].device, first)


def check_score_weights(
    weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], query: Tensor
) -> None:
    """Reject weights that change scores if their names or shapes do not match the layer exactly."""
    check_names("learned", weights, shapes)
    for name, shape in shapes.items():
        check_weight(name, weights[name], shape)
        check_device(name, weights[name], query.device, "query")


def check_weight(name: str, weight: Tensor, shape: tuple[int, ...]) -> None:
    """Reject a weight that is not floating point, or has the wrong shape.

    Distributed weights are for modules, and rejected as well.
    """
    check_array(name, weight)
    if is_distributed(weight):
        raise InputTypeError(
            name,
            "be a local tensor, with the local specification (parity.shard)",
            type(weight).__name__,
            hint="the modules take distributed weights",
        )
    if not weight.is_floating_point():
        raise InputTypeError(name, "be floating point", {f"{name}.dtype": weight.dtype})
    if tuple(weight.shape) != shape:
        raise InputError(name, f"have shape {shape}", {f"{name}.shape": tuple(weight.shape)})


def check_kernel(kernel: object) -> None:
    """Reject a kernel that cannot be called."""
    if not callable(kernel):
        rule = "be a function of q, k, v, a Mask and Scores"
        raise InputTypeError("kernel", rule, type(kernel).__name__)


def check_layer_inputs(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    positions: Tensor | None,
    spec: AttentionSpec,
) -> None:
    """Reject layer inputs (B, T, d_in) and (B, S, d_kv) that do not fit each other or the layer."""
    check_width("query", query, spec.d_in)
    if key is None and value is not None:
        raise InputError("value", "come with a key", "key=None and a value")
    if key is None and spec.d_kv != spec.d_in and not spec.shared_kv:
        raise InputError("key", f"be passed, with {spec.d_kv} features", key=None)
    if key is not None and spec.rope is not None and not spec.shared_kv:
        raise InputError("key", "be None (self-attention) with RoPE", f"a key and rope={spec.rope}")
    if key is not None and spec.latent is not None:
        raise InputError(
            "key", "be None (self-attention) with latents", f"a key and latent={spec.latent}"
        )
    if positions is not None:
        check_positions(positions, query.shape[0], query.shape[1], spec.rope)
    if spec.shared_kv:
        check_shared_kv(query, key, value, spec)
        return
    for name, x in (("key", key), ("value", value)):
        if x is None:
            continue
        if x.ndim != 3:
            raise InputError(name, "have axes (…, S, d_kv)", {f"{name}.shape": tuple(x.shape)})
        check_width(name, x, spec.d_kv)
        check_same_dtype(name, x, query)
        check_device(name, x, query.device, "query")


def check_same_dtype(name: str, x: Tensor, query: Tensor) -> None:
    """Reject an input whose dtype is not the query's."""
    if x.dtype != query.dtype:
        raise InputTypeError(
            name,
            "have the dtype of query",
            {f"{name}.dtype": x.dtype, "query.dtype": query.dtype},
        )


def check_width(name: str, x: Tensor, width: int) -> None:
    """Reject an input of a layer with the wrong number of features."""
    if x.shape[-1] != width:
        raise InputError(name, f"have {width} features", {f"{name}.shape": tuple(x.shape)})


def check_shared_kv(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    spec: AttentionSpec,
    names: tuple[str, str] = ("key", "value"),
) -> None:
    """Reject anything but keys (B, K, S, H) and values (B, K, S, Hv) of another layer for these
    queries.
    """
    if key is None or value is None:
        rule = "come from another layer with shared_kv"
        raise InputError(" and ".join(names), rule, "None")
    for name, x, width in zip(
        names, (key, value), (spec.head_dim, spec.value_head_dim), strict=True
    ):
        check_floating(name, x, rank=4)
        expected = (query.shape[0], spec.num_kv_heads, key.shape[2], width)
        if tuple(x.shape) != expected:
            rule = f"have shape {expected} with shared_kv"
            raise InputError(name, rule, {f"{name}.shape": tuple(x.shape)})
        if x.dtype != query.dtype and not is_autocast_on(x.device):
            raise InputTypeError(
                name,
                "have the dtype of the new tokens with shared_kv",
                {f"{name}.dtype": x.dtype, "query.dtype": query.dtype},
            )
        check_device(name, x, query.device, "the new tokens")


def check_projected(name: str, x: Tensor, weight: Tensor) -> None:
    """Reject an input that does not fit its projection.

    For a distributed weight, its engine decides the part, dtype and device when it is used.
    """
    # The usual case needs one comparison: checks must not slow a decoding step.
    has_width = x.shape[-1] == weight.shape[1]
    fits = has_width and x.dtype == weight.dtype and x.device == weight.device
    if fits or is_distributed(weight):
        return
    if x.shape[-1] != weight.shape[1]:
        raise InputError(
            f"the input of {name}", f"have {weight.shape[1]} features", shape=tuple(x.shape)
        )
    mixed = x.dtype != weight.dtype and weight.is_floating_point()
    if mixed and not is_autocast_on(x.device):
        raise InputTypeError(
            f"the input of {name}",
            "have the dtype of its weight",
            {"x.dtype": x.dtype, "weight.dtype": weight.dtype},
            hint="torch.autocast casts inputs and weights; layer.to(dtype) converts the weights",
        )
    check_device(f"the input of {name}", x, weight.device, "its weight")


def check_features(name: str, x: Tensor, width: int) -> None:
    """Reject the output of a projection that is distributed or has the wrong width, as if it had
    only some heads.
    """
    # The type first: a tensor of PyTorch itself is on this process.
    if x.shape[-1] == width and (type(x) is Tensor or not is_distributed(x)):
        return
    shown = f"{x.shape[-1]} features"
    if is_distributed(x):
        shown += " in a DTensor"
    raise InputError(
        name,
        f"return {width} features in a tensor of this process",
        shown,
        hint="shard with mha_torch.parallel.plan",
    )


def check_positions(positions: Tensor, batch_size: int, seq_len: int, rope: Rope | None) -> None:
    """Reject positions that are not integers of shape (B, T) or (1, T), or with sections (axes, B
    or 1, T).
    """
    check_array("positions", positions)
    if rope is None or rope.sections is None or positions.ndim == 2:
        axes = ()
    else:
        axes = (len(rope.sections),)
    shapes = [(*axes, batch_size, seq_len), (*axes, 1, seq_len)]
    check_integers("positions", positions, shapes, position_shapes(batch_size, seq_len, rope))


def check_normed(x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> None:
    """Reject parameters that do not fit the norm."""
    check_norm(norm)
    shapes = norm.shapes(x.shape[1] if norm.per_head else 1, x.shape[-1])
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            parameter_shape = None
        else:
            parameter_shape = tuple(parameter.shape)
        if parameter_shape != shapes.get(name):
            rule = f"have shape {shapes.get(name)} for {norm}"
            raise InputError(name, rule, {f"{name}.shape": parameter_shape})


def check_latents(name: str, latents: Tensor, latent: Latent) -> None:
    """Reject anything but latents (B, 1, S, kv_rank + rope_dim)."""
    if (latents.shape[1], latents.shape[3]) != (1, latent.width):
        shape = tuple(latents.shape)
        raise InputError(name, f"have shape (B, 1, S, {latent.width})", {f"{name}.shape": shape})


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Reject split heads whose dtypes or devices do not fit each other."""
    for name, x in (("key", key), ("value", value)):
        # The usual case needs one comparison: checks must not slow a decoding step.
        if x.dtype != query.dtype or x.device != query.device:
            check_same_dtype(name, x, query)
            check_device(name, x, query.device, "query")


def check_scored(query: Tensor, key: Tensor, spec: AttentionSpec | BareHeads) -> None:
    """Reject queries (B, N, T, H) and keys (B, K, S, H) whose heads do not fit each other or the
    layer.
    """
    check_head_groups(query.shape[1], key.shape[1])
    if isinstance(spec, BareHeads):
        return
    check_spec(spec)
    if (query.shape[1], query.shape[3]) != (spec.num_heads, spec.head_dim):
        rule = f"have the heads of the spec, (N, H) = ({spec.num_heads}, {spec.head_dim})"
        raise InputError("query", rule, {"query.shape": tuple(query.shape)})


def check_project_qkv(
    project: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    positions: Tensor | None = None,
) -> None:
    """Reject arguments of `project_qkv` that do not fit each other."""
    check_spec(spec)
    if positions is not None:
        check_positions(positions, query.shape[0], query.shape[1], spec.rope)


def check_attention_scores(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None = None,
    spec: AttentionSpec | BareHeads | None = None,
    q_offset: Tensor | None = None,
    learned: Mapping[str, Tensor] | None = None,
    **_: object,
) -> None:
    """Reject arguments of `attention_scores` that do not fit each other."""
    rules = BareHeads(query.shape[3]) if spec is None else spec
    learned = {} if learned is None else learned
    check_scored(query, key, rules)
    scores_shape = (*query.shape[:3], key.shape[2])
    if bias is not None:
        check_bias(bias, scores_shape, query)
    check_mapping("learned", learned)
    check_score_weights(without_sinks(learned), without_sinks(rules.score_shapes), query)
    check_grid(rules.relative_bias, scores_shape)


def check_masked_softmax(
    scores: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None, **_: object
) -> None:
    """Reject arguments of `masked_softmax` that do not fit each other."""
    if mask is not None:
        check_broadcasts("mask", tuple(mask.shape), tuple(scores.shape))


def check_apply_dropout(
    attn_weights: Tensor, rate: float, keep: Tensor | None = None, **_: object
) -> None:
    """Reject a rate outside [0, 1), and weights to keep that do not fit the others."""
    as_rate("dropout", rate)
    if keep is not None:
        check_broadcasts("keep", tuple(keep.shape), tuple(attn_weights.shape))


def check_bias(bias: Tensor, scores_shape: tuple[int, ...], query: Tensor) -> None:
    """Reject a bias that does not fit the queries, or does not broadcast to the scores."""
    differs = bias.dtype != query.dtype
    is_cast = differs and bias.is_floating_point() and is_autocast_on(bias.device)
    if not is_cast:
        check_same_dtype("bias", bias, query)
    check_broadcasts("bias", tuple(bias.shape), scores_shape)
    check_device("bias", bias, query.device, "query")


def check_gate(gate: Tensor, context: Tensor) -> None:
    """Reject a gate that has neither a number for each feature of the context (B, N, T, Hv) nor one
    for each head.
    """
    num_heads = context.shape[1]
    num_features = context.shape[1] * context.shape[3]
    if gate.shape[-1] not in (num_heads, num_features):
        raise InputError(
            "gate",
            f"have {num_features} or {num_heads} features",
            {"gate.shape": tuple(gate.shape)},
        )


def check_is_cache(cache: object, kind: type) -> None:
    """Reject anything but a cache of that type."""
    if not isinstance(cache, kind):
        raise InputTypeError("cache", f"be a {kind.__name__}", type(cache).__name__, hint=NEW_CACHE)
    check_not_written_over(cache)
