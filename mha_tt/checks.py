"""Argument checks in the order of the data flow. Messages: `<what> must <rule>, got <x>=<y>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ttnn
from ttnn import Tensor

from mha_spec import AttentionSpec, InputError, InputTypeError, Norm, Rope
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
from mha_tt.layout import (
    PADDED_INPUTS,
    has_heads,
    norm_parameter_shape,
    padded_features,
    padded_head_dim,
    padded_width,
    parameter_shape,
    score_weight_shape,
    weight_dtype,
)

# NumPy's dtypes by name: another package adds its bfloat16.
_FLOATING = [ttnn.bfloat16, ttnn.bfloat8_b, ttnn.bfloat4_b, ttnn.float32, "bfloat16"]
_FLOATING += [np.dtype(code).name for code in np.typecodes["Float"]]
_INTEGERS = [ttnn.int32, ttnn.uint32, ttnn.uint16, ttnn.uint8]
_INTEGERS += [np.dtype(code).name for code in np.typecodes["AllInteger"]]

checked = checking(
    {FLOATING: _FLOATING, INTEGERS: _INTEGERS, BOOLEAN: ["bool"]}, {"Tensor": Tensor}
)
"""Decorator of public functions: their annotations are checks of their arguments."""


def check_count(name: str, value: object, minimum: int = 1) -> None:
    """Reject anything but an integer of at least `minimum`."""
    as_count(name, value, minimum)


def check_array(name: str, x: object) -> None:
    """Reject anything but an array of the framework."""
    if not isinstance(x, Tensor):
        raise InputTypeError(name, "be a ttnn.Tensor", type(x).__name__)


def check_on_device(name: str, x: Tensor) -> None:
    """Reject a tensor on the host, with which several operations crash."""
    check_array(name, x)
    if x.storage_type() != ttnn.StorageType.DEVICE:
        raise InputTypeError(
            name, "lie on a device (mha_tt.upload)", {f"{name}.storage_type()": x.storage_type()}
        )


def check_is_device(device: object) -> None:
    """Reject anything but a device."""
    if not isinstance(device, ttnn.MeshDevice):
        raise InputTypeError(
            "device", "be a ttnn.MeshDevice", type(device).__name__, hint="mha_tt.open_device()"
        )


def check_dtype(name: str, dtype: object) -> None:
    """Reject an unsupported dtype."""
    if dtype not in (ttnn.bfloat16, ttnn.bfloat8_b, ttnn.float32):
        raise InputTypeError(
            name, "be ttnn.bfloat16, ttnn.bfloat8_b or ttnn.float32", {name: dtype}
        )


def check_tiles(name: str, x: Tensor) -> None:
    """Reject a tensor on the host, in a dtype that operations do not support, or in rows."""
    check_on_device(name, x)
    check_dtype(f"{name}.dtype", x.dtype)
    if x.layout != ttnn.TILE_LAYOUT:
        raise InputTypeError(name, "be in tiles (mha_tt.upload)", {f"{name}.layout": x.layout})


def check_floating(name: str, x: Tensor, rank: int) -> None:
    """Reject an array of the wrong rank, or one that is not floating point."""
    check_array(name, x)
    if len(x.shape) != rank:
        raise InputError(name, f"have {rank} axes", {f"{name}.shape": tuple(x.shape)})
    check_tiles(name, x)


def check_integers(name: str, x: object, shapes: Sequence[tuple[int, ...]], in_words: str) -> None:
    """Reject an array that is not of integers, or has none of these shapes."""
    if not isinstance(x, np.ndarray):
        raise InputTypeError(name, "be a NumPy array", type(x).__name__)
    if x.dtype.kind not in "iu":
        raise InputTypeError(name, "be integers", {f"{name}.dtype": x.dtype})
    if x.shape not in shapes:
        raise InputError(name, f"have shape {in_words}", {f"{name}.shape": x.shape})


def check_lengths(
    name: str, lengths: np.ndarray | Sequence[int], batch_size: int | None, maximum: int
) -> None:
    """Reject lengths that are not one integer in 0..maximum per sequence."""
    try:
        lengths = np.asarray(lengths)
    except ValueError:  # rows of different lengths
        raise InputTypeError(name, "be integers", type(lengths).__name__) from None
    # NumPy reads an empty list as float64.
    if lengths.dtype.kind not in "iu" and lengths.shape != (0,):
        raise InputTypeError(name, "be integers", {f"{name}.dtype": lengths.dtype})
    if lengths.ndim != 1 or (batch_size is not None and len(lengths) != batch_size):
        if batch_size is None:
            expected = "(B,)"
        else:
            expected = f"(B,) = ({batch_size},)"
        raise InputError(name, f"have shape {expected}", {f"{name}.shape": lengths.shape})
    if ((lengths < 0) | (lengths > maximum)).any():
        raise InputError(name, f"lie in 0..{maximum}", {name: lengths.tolist()})


def check_head_dim(head_dim: int | None, padded: int) -> None:
    """Reject a head_dim that exceeds the features of a head on the device."""
    if head_dim is None:
        return
    check_count("head_dim", head_dim)
    if head_dim > padded:
        raise InputError(
            "head_dim", f"be at most the {padded} features of a head", head_dim=head_dim
        )


def check_input_dtype(name: str, x: Tensor, dtype: ttnn.DataType) -> None:
    """Reject an input whose dtype is not the module's."""
    if x.dtype != dtype:
        hint = "ttnn.typecast converts it, dtype= of a new module makes one for it"
        raise InputTypeError(
            name,
            "have the dtype of the module",
            {f"{name}.dtype": x.dtype, "dtype": dtype},
            hint=hint,
        )


def check_weights(weights: Mapping[str, Tensor], spec: AttentionSpec) -> None:
    """Reject weights whose names or shapes do not match the layer exactly."""
    check_spec(spec)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, projection in spec.projections.items():
        d_in = projection.d_in
        d_out = projection.d_out
        if name == "qkv_proj":
            d_out = sum(padded_width(f"{part}_proj", spec) for part in "qkv")
        elif has_heads(name, spec):
            d_out = padded_width(name, spec)
        if name in PADDED_INPUTS:
            d_in = padded_width(PADDED_INPUTS[name], spec)
        shapes[f"{name}.weight"] = (d_in, d_out)
        if projection.has_bias:
            shapes[f"{name}.bias"] = (1, d_out)
    shapes |= {name: parameter_shape(name, spec) for name in spec.parameters}
    check_names("weights", weights, shapes)
    first = next(iter(shapes))
    for name, shape in shapes.items():
        weight = weights[name]
        check_weight(name, weight, shape)
        if weight.dtype not in (
            weights[first].dtype,
            weight_dtype(name, weights[first].dtype, spec),
        ):
            raise InputTypeError(
                name, f"have the dtype of {first}", f"{weight.dtype} and {weights[first].dtype}"
            )


def check_score_weights(
    weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], query: Tensor
) -> None:
    """Reject weights that change scores if their names or shapes do not match the layer exactly."""
    check_names("learned", weights, shapes)
    for name, shape in shapes.items():
        check_weight(name, weights[name], score_weight_shape(name, shape, query.shape[3]))


def check_weight(name: str, weight: Tensor, shape: tuple[int, ...]) -> None:
    """Reject a weight that is not floating point, or has the wrong shape."""
    check_floating(name, weight, rank=len(shape))
    if tuple(weight.shape) != shape:
        raise InputError(name, f"have shape {shape}", {f"{name}.shape": tuple(weight.shape)})


def check_finite(weights: Mapping[str, np.ndarray]) -> None:
    """Reject weights with NaN or infinity."""
    with np.errstate(over="ignore"):  # values beyond float32 become infinite
        wrong = [
            name
            for name, weight in weights.items()
            if not np.isfinite(np.asarray(weight, np.float32)).all()
        ]
    if wrong:
        raise InputError("weights", "be finite", f"NaN or infinities in {wrong}")


def check_kernel(kernel: object) -> None:
    """Reject a kernel that cannot be called."""
    if not callable(kernel):
        rule = "be a function of q, k, v, a Mask and Scores"
        raise InputTypeError("kernel", rule, type(kernel).__name__)


def check_layer_inputs(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    positions: object,
    spec: AttentionSpec,
) -> None:
    """Reject layer inputs (B, T, d_in) and (B, S, d_kv) that do not fit each other or the layer."""
    check_tiles("query", query)
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
        if len(x.shape) != 3:
            raise InputError(name, "have axes (…, S, d_kv)", {f"{name}.shape": tuple(x.shape)})
        check_tiles(name, x)
        check_width(name, x, spec.d_kv)
        check_same_dtype(name, x, query)


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
        names,
        (key, value),
        (padded_features("k_proj", spec), padded_features("v_proj", spec)),
        strict=True,
    ):
        check_floating(name, x, rank=4)
        expected = (query.shape[0], spec.num_kv_heads, key.shape[2], width)
        if tuple(x.shape) != expected:
            rule = f"have shape {expected} with shared_kv"
            raise InputError(name, rule, {f"{name}.shape": tuple(x.shape)})
        if (x.dtype == ttnn.float32) != (query.dtype == ttnn.float32):  # a cache may be narrower
            raise InputTypeError(
                name,
                "be float32 if query is",
                {f"{name}.dtype": x.dtype, "query.dtype": query.dtype},
            )


def check_projected(name: str, x: Tensor, weight: Tensor) -> None:
    """Reject an input that does not fit its projection."""
    if x.shape[-1] != weight.shape[0]:
        raise InputError(
            f"the input of {name}", f"have {weight.shape[0]} features", shape=tuple(x.shape)
        )


def check_features(name: str, x: Tensor, width: int) -> None:
    """Reject the output of a projection that has the wrong width."""
    if x.shape[-1] != width:
        raise InputError(name, f"return {width} features", f"{x.shape[-1]} features")


def check_pair_order(rope: Rope, head_dim: int | None, padded: int) -> None:
    """Reject unpadded heads whose pairs are not half a head apart, and heads with the wrong padding
    for RoPE.
    """
    if head_dim is None and (rope.pairs != "half" or rope.rotary_dim not in (None, padded)):
        raise InputError(
            "head_dim",
            "be passed for pairs other than (i, i + H/2), with heads as `feature_indices` orders "
            "them",
            head_dim=None,
            rope=rope,
        )
    if head_dim is not None and padded != padded_head_dim(head_dim, rope=True):
        raise InputError(
            f"heads of head_dim={head_dim}",
            f"be padded to {padded_head_dim(head_dim, rope=True)} features for RoPE "
            "(upload_weights with a spec that has rope)",
            str(padded),
        )


def check_positions(positions: object, batch_size: int, seq_len: int, rope: Rope | None) -> None:
    """Reject positions that are not integers of shape (B, T) or (1, T), or with sections (axes, B
    or 1, T).
    """
    if (counts := getattr(positions, "counts", None)) is not None:  # a Rotation
        if counts not in ((batch_size, seq_len), (1, seq_len)):
            raise InputError(
                "positions",
                f"be (B or 1, T) = ({batch_size} or 1, {seq_len})",
                f"a Rotation for {counts}",
            )
        return
    is_flat = getattr(positions, "ndim", 2) == 2
    if is_flat or rope is None or rope.sections is None:
        axes = ()
    else:
        axes = (len(rope.sections),)
    shapes = [(*axes, batch_size, seq_len), (*axes, 1, seq_len)]
    check_integers("positions", positions, shapes, position_shapes(batch_size, seq_len, rope))


def check_normed(x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> None:
    """Reject parameters that do not fit the norm."""
    check_tiles("x", x)
    check_norm(norm)
    width = x.shape[-1]
    shapes = norm.shapes(x.shape[1] if norm.per_head else 1, width)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if name in shapes:
            expected = norm_parameter_shape(shapes[name])
        else:
            expected = None
        if parameter is None:
            shape = None
        else:
            shape = tuple(parameter.shape)
        if shape != expected:
            raise InputError(name, f"have shape {expected} for {norm}", {f"{name}.shape": shape})


def check_latents(name: str, latents: Tensor, spec: AttentionSpec) -> None:
    """Reject anything but latents (B, 1, S, kv_rank + rope_dim)."""
    check_tiles(name, latents)
    width = padded_features("kv_a_proj", spec)
    if (latents.shape[1], latents.shape[3]) != (1, width):
        shape = tuple(latents.shape)
        raise InputError(name, f"have shape (B, 1, S, {width})", {f"{name}.shape": shape})


def check_latent_heads(name: str, x: Tensor, spec: AttentionSpec, features: int) -> None:
    """Reject anything but heads (B, N, T, features)."""
    check_tiles(name, x)
    if (x.shape[1], x.shape[3]) != (spec.num_heads, features):
        shape = tuple(x.shape)
        raise InputError(
            name, f"have shape (B, {spec.num_heads}, T, {features})", {f"{name}.shape": shape}
        )


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Reject split heads whose dtypes do not fit each other."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tiles(name, x)
        if (x.dtype == ttnn.float32) != (query.dtype == ttnn.float32):  # a cache may be narrower
            raise InputTypeError(
                name,
                "be float32 if query is",
                {f"{name}.dtype": x.dtype, "query.dtype": query.dtype},
            )


def check_scored(query: Tensor, key: Tensor, spec: AttentionSpec | BareHeads) -> None:
    """Reject queries (B, N, T, H) and keys (B, K, S, H) whose heads do not fit each other or the
    layer.
    """
    check_head_groups(query.shape[1], key.shape[1])
    check_heads_of_spec(query, query.shape[1], spec)


def check_heads_of_spec(query: Tensor, num_heads: int, spec: AttentionSpec | BareHeads) -> None:
    """Reject queries that do not have the heads of the layer; their features may be padded."""
    if isinstance(spec, BareHeads):
        return
    check_spec(spec)
    widths = (spec.head_dim, padded_head_dim(spec.head_dim), padded_features("q_proj", spec))
    # Queries that absorb kv_b_proj have two parts, each padded.
    is_absorbed = spec.num_kv_heads == 1 and spec.value_head_dim < spec.head_dim <= query.shape[3]
    if num_heads != spec.num_heads or not (query.shape[3] in widths or is_absorbed):
        shape = f"({spec.num_heads}, {spec.head_dim} or padded)"
        rule = f"have the heads of the spec, (N, H) = {shape}"
        raise InputError("query", rule, {"query.shape": tuple(query.shape)})


def check_project_qkv(
    project: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    positions: object = None,
) -> None:
    """Reject arguments of `project_qkv` that do not fit each other."""
    check_spec(spec)
    if positions is not None:
        check_positions(positions, query.shape[0], query.shape[1], spec.rope)


def check_attention_scores(
    query: Tensor,
    key: Tensor,
    bias: np.ndarray | Tensor | None = None,
    spec: AttentionSpec | BareHeads | None = None,
    q_offset: np.ndarray | None = None,
    learned: Mapping[str, Tensor] | None = None,
    **_: object,
) -> None:
    """Reject arguments of `attention_scores` that do not fit each other."""
    check_tiles("query", query)
    check_tiles("key", key)
    rules = BareHeads(query.shape[3]) if spec is None else spec
    learned = {} if learned is None else learned
    check_scored(query, key, rules)
    scores_shape = (*tuple(query.shape)[:3], key.shape[2])
    if bias is not None:
        check_bias(bias, scores_shape, query)
    check_mapping("learned", learned)
    check_score_weights(without_sinks(learned), without_sinks(rules.score_shapes), query)
    check_grid(rules.relative_bias, scores_shape)


def check_masked_softmax(
    scores: Tensor, mask: Any = None, sinks: Tensor | None = None, **_: object
) -> None:
    """Reject arguments of `masked_softmax` that do not fit each other."""
    check_tiles("scores", scores)
    if mask is not None:
        check_broadcasts("mask", tuple(mask.shape), tuple(scores.shape))
    if sinks is not None:
        check_weight("sinks", sinks, (1, scores.shape[1], 1, 1))


def check_apply_dropout(
    attn_weights: Tensor, rate: float, keep: np.ndarray | None = None, **_: object
) -> None:
    """Reject a rate outside [0, 1), and weights to keep that do not fit the others."""
    as_rate("dropout", rate)
    if keep is not None:
        check_broadcasts("keep", keep.shape, tuple(attn_weights.shape))


def check_bias(bias: np.ndarray | Tensor, scores_shape: tuple[int, ...], query: Tensor) -> None:
    """Reject a bias that does not fit the queries, or does not broadcast to the scores."""
    # An array is rounded to the dtype of the device when it is uploaded.
    if isinstance(bias, Tensor):
        check_tiles("bias", bias)
        # A block format rounds a row by its largest element: queries in blocks may have a bias in
        # bfloat16.
        is_finer = (bias.dtype, query.dtype) == (ttnn.bfloat16, ttnn.bfloat8_b)
        if not is_finer:
            check_same_dtype("bias", bias, query)
    check_broadcasts("bias", tuple(bias.shape), scores_shape)


def check_gate(gate: Tensor, context: Tensor) -> None:
    """Reject a gate that has neither a number for each feature of the context (B, N, T, Hv) nor one
    for each head.
    """
    check_tiles("context", context)
    check_tiles("gate", gate)
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
