"""Argument checks in the order of the data flow. Messages: `<what> must <rule>, got <x>=<y>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mha_jax.arrays import Array, array_of, is_on_accelerator
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
)
from mha_spec.score_weights import without_sinks

_SCALARS = [scalar for scalar in vars(jnp).values() if isinstance(scalar, type(jnp.float32))]
_ALL_DTYPES = [np.dtype(scalar) for scalar in _SCALARS]
_FLOATING = [dtype for dtype in _ALL_DTYPES if jnp.issubdtype(dtype, jnp.floating)]
_INTEGERS = [dtype for dtype in _ALL_DTYPES if jnp.issubdtype(dtype, jnp.integer)]

checked = checking({FLOATING: _FLOATING, INTEGERS: _INTEGERS, BOOLEAN: [np.dtype(np.bool_)]})
"""Decorator of public functions: their annotations are checks of their arguments."""


def check_count(name: str, value: object, minimum: int = 1) -> None:
    """Reject anything but an integer of at least `minimum`."""
    as_count(name, value, minimum)


def check_array(name: str, x: object) -> None:
    """Reject anything but an array of the framework."""
    if not isinstance(x, Array):
        raise InputTypeError(name, "be an array", type(x).__name__)


def check_floating(name: str, x: Array, rank: int) -> None:
    """Reject an array of the wrong rank, or one that is not floating point."""
    check_array(name, x)
    if x.ndim != rank:
        raise InputError(name, f"have {rank} axes", {f"{name}.shape": x.shape})
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise InputTypeError(name, "be floating point", {f"{name}.dtype": x.dtype})


def check_integers(name: str, x: Array, shapes: Sequence[tuple[int, ...]], in_words: str) -> None:
    """Reject an array that is not of integers, or has none of these shapes."""
    check_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise InputTypeError(name, "be integers", {f"{name}.dtype": x.dtype})
    if x.shape not in shapes:
        raise InputError(name, f"have shape {in_words}", {f"{name}.shape": x.shape})


def check_lengths(
    name: str, lengths: Array | Sequence[int], batch_size: int | None, maximum: int
) -> list[int] | None:
    """Reject lengths that are not one integer in 0..maximum per sequence.

    Returns:
        Lengths if known: under jit the lengths of an array are not, and on an accelerator they are
        not read.
    """
    if isinstance(lengths, jax.Array):
        array = lengths
    else:
        try:
            array = np.asarray(lengths)
        except ValueError:  # rows of different lengths
            raise InputTypeError(name, "be integers", type(lengths).__name__) from None
    if isinstance(array, np.ndarray) and not array.size:  # NumPy reads [] as floats
        array = array.astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise InputTypeError(name, "be integers", {f"{name}.dtype": array.dtype})
    if array.ndim != 1 or (batch_size is not None and len(array) != batch_size):
        if batch_size is None:
            expected = "(B,)"
        else:
            expected = f"(B,) = ({batch_size},)"
        raise InputError(name, f"have shape {expected}", {f"{name}.shape": array.shape})
    if isinstance(array, Tracer) or is_on_accelerator(array):
        return None
    values = np.asarray(array).tolist()
    if any(not 0 <= value <= maximum for value in values):
        raise InputError(name, f"lie in 0..{maximum}", {name: values})
    return values


def check_weights(weights: Mapping[str, Any], spec: AttentionSpec) -> None:
    """Reject weights whose names or shapes do not match the layer exactly."""
    check_spec(spec)
    if not isinstance(weights, Mapping):
        raise InputTypeError(
            "weights", "be a mapping of projections to their arrays", type(weights).__name__
        )
    arrays = {}
    projections = {}
    for name, leaves in weights.items():
        if name in spec.score_shapes:
            arrays[name] = leaves
        else:
            projections[name] = leaves
    bare_arrays = sorted(
        name for name, leaves in projections.items() if not isinstance(leaves, Mapping)
    )
    if bare_arrays:
        raise InputTypeError(
            "weights", "map each projection to its kernel and bias", f"arrays for {bare_arrays}"
        )
    for projection, leaves in projections.items():
        for leaf, array in leaves.items():
            arrays[f"{projection}.{leaf}"] = array
    shapes = {}
    for name, shape in spec.stored_shapes.items():
        if name in spec.parameters:
            shapes[name] = shape
        else:  # a kernel of Flax is the transpose of a weight
            shapes[name.replace("proj.weight", "proj.kernel")] = shape[::-1]
    check_names("weights", arrays, shapes)
    first = next(iter(shapes))
    first_array = array_of(arrays[first])
    for name, shape in shapes.items():
        array = array_of(arrays[name])
        check_weight(name, array, shape)
        if array.dtype != first_array.dtype:
            raise InputTypeError(
                name, f"have the dtype of {first}", f"{array.dtype} and {first_array.dtype}"
            )


def check_score_weights(
    weights: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Reject weights that change scores if their names or shapes do not match the layer exactly."""
    check_names("learned", weights, shapes)
    for name, shape in shapes.items():
        check_weight(name, weights[name], shape)


def check_weight(name: str, weight: Array, shape: tuple[int, ...]) -> None:
    """Reject a weight that is not floating point, or has the wrong shape."""
    check_array(name, weight)
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise InputTypeError(name, "be floating point", {f"{name}.dtype": weight.dtype})
    if weight.shape != shape:
        raise InputError(name, f"have shape {shape}", {f"{name}.shape": weight.shape})


def check_kernel(kernel: object) -> None:
    """Reject a kernel that cannot be called."""
    if not callable(kernel):
        rule = "be a function of q, k, v, a Mask and Scores"
        raise InputTypeError("kernel", rule, type(kernel).__name__)


def check_layer_inputs(
    query: Array,
    key: Array | None,
    value: Array | None,
    positions: Array | None,
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


def check_same_dtype(name: str, x: Array, query: Array) -> None:
    """Reject an input whose dtype is not the query's."""
    if x.dtype != query.dtype:
        raise InputTypeError(
            name,
            "have the dtype of query",
            {f"{name}.dtype": x.dtype, "query.dtype": query.dtype},
        )


def check_width(name: str, x: Array, width: int) -> None:
    """Reject an input of a layer with the wrong number of features."""
    if x.shape[-1] != width:
        raise InputError(name, f"have {width} features", {f"{name}.shape": x.shape})


def check_shared_kv(
    query: Array,
    key: Array | None,
    value: Array | None,
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
        if x.shape != expected:
            rule = f"have shape {expected} with shared_kv"
            raise InputError(name, rule, {f"{name}.shape": x.shape})
        if x.dtype != query.dtype:
            raise InputTypeError(
                name,
                "have the dtype of the new tokens with shared_kv",
                {f"{name}.dtype": x.dtype, "query.dtype": query.dtype},
            )


def check_projected(name: str, x: Array, kernel: Array) -> None:
    """Reject an input that does not fit its projection."""
    if x.shape[-1] != kernel.shape[0]:
        raise InputError(f"the input of {name}", f"have {kernel.shape[0]} features", shape=x.shape)
    if x.dtype != kernel.dtype:
        raise InputTypeError(
            f"the input of {name}",
            "have the dtype of its kernel",
            {"x.dtype": x.dtype, "kernel.dtype": kernel.dtype},
            hint="dtype= of the layer casts inputs and weights",
        )


def check_features(name: str, x: Array, width: int) -> None:
    """Reject the output of a projection that has the wrong width."""
    if x.shape[-1] != width:
        raise InputError(name, f"return {width} features", f"{x.shape[-1]} features")


def check_positions(positions: Array, batch_size: int, seq_len: int, rope: Rope | None) -> None:
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


def check_normed(x: Array, norm: Norm, weight: Array | None, bias: Array | None) -> None:
    """Reject parameters that do not fit the norm."""
    check_norm(norm)
    shapes = norm.shapes(x.shape[1] if norm.per_head else 1, x.shape[-1])
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            shape = None
        else:
            shape = tuple(parameter.shape)
        if shape != shapes.get(name):
            raise InputError(
                name, f"have shape {shapes.get(name)} for {norm}", {f"{name}.shape": shape}
            )


def check_latents(name: str, latents: Array, latent: Latent) -> None:
    """Reject anything but latents (B, 1, S, kv_rank + rope_dim)."""
    if (latents.shape[1], latents.shape[3]) != (1, latent.width):
        shape = latents.shape
        raise InputError(name, f"have shape (B, 1, S, {latent.width})", {f"{name}.shape": shape})


def check_heads(query: Array, key: Array, value: Array) -> None:
    """Reject split heads whose dtypes do not fit each other."""
    for name, x in (("key", key), ("value", value)):
        check_same_dtype(name, x, query)


def check_scored(query: Array, key: Array, spec: AttentionSpec | BareHeads) -> None:
    """Reject queries (B, N, T, H) and keys (B, K, S, H) whose heads do not fit each other or the
    layer.
    """
    check_head_groups(query.shape[1], key.shape[1])
    if isinstance(spec, BareHeads):
        return
    check_spec(spec)
    if (query.shape[1], query.shape[3]) != (spec.num_heads, spec.head_dim):
        rule = f"have the heads of the spec, (N, H) = ({spec.num_heads}, {spec.head_dim})"
        raise InputError("query", rule, {"query.shape": query.shape})


def check_project_qkv(
    project: object,
    query: Array,
    key: Array,
    value: Array,
    spec: AttentionSpec,
    positions: Array | None = None,
) -> None:
    """Reject arguments of `project_qkv` that do not fit each other."""
    check_spec(spec)
    if positions is not None:
        check_positions(positions, query.shape[0], query.shape[1], spec.rope)


def check_attention_scores(
    query: Array,
    key: Array,
    bias: Array | None = None,
    spec: AttentionSpec | BareHeads | None = None,
    q_offset: Array | None = None,
    learned: Mapping[str, Array] | None = None,
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
    check_score_weights(without_sinks(learned), without_sinks(rules.score_shapes))
    check_grid(rules.relative_bias, scores_shape)


def check_masked_softmax(
    scores: Array, mask: Array | None = None, sinks: Array | None = None, **_: object
) -> None:
    """Reject arguments of `masked_softmax` that do not fit each other."""
    if mask is not None:
        check_broadcasts("mask", mask.shape, scores.shape)


def check_apply_dropout(
    attn_weights: Array, rate: float, keep: Array | None = None, **_: object
) -> None:
    """Reject a rate outside [0, 1), and weights to keep that do not fit the others."""
    as_rate("dropout", rate)
    if keep is not None:
        check_broadcasts("keep", keep.shape, attn_weights.shape)


def check_bias(bias: Array, scores_shape: tuple[int, ...], query: Array) -> None:
    """Reject a bias that does not fit the queries, or does not broadcast to the scores."""
    check_same_dtype("bias", bias, query)
    check_broadcasts("bias", bias.shape, scores_shape)


def check_gate(gate: Array, context: Array) -> None:
    """Reject a gate that has neither a number for each feature of the context (B, N, T, Hv) nor one
    for each head.
    """
    num_heads = context.shape[1]
    num_features = context.shape[1] * context.shape[3]
    if gate.shape[-1] not in (num_heads, num_features):
        rule = f"have {num_features} or {num_heads} features"
        raise InputError("gate", rule, {"gate.shape": gate.shape})


def check_is_cache(cache: object, kind: type) -> None:
    """Reject anything but a cache of that type."""
    if not isinstance(cache, kind):
        raise InputTypeError("cache", f"be a {kind.__name__}", type(cache).__name__, hint=NEW_CACHE)
