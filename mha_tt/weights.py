"""Weights from outside, in the container that the functions take: the projections made of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import ttnn
from ttnn import Tensor

from mha_spec import AttentionSpec, Refusal, Rope, WrongType
from mha_spec.attention import check_spec
from mha_tt.arrays import check_dtype, check_floating
from mha_tt.device import (
    accurate_config,
    download,
    download_parts,
    head_slots,
    padded_head_dim,
    upload,
    upload_parts,
)
from mha_tt.mock.goldens import lines_of
from mha_tt.norms import apply_norm, parameter_shape
from mha_tt.parallel.local import own_spec, own_weights, whole_weights

Project = Callable[[str, Tensor], Tensor]
"""Applies the projection of that name (`q_proj`, `k_proj`, `v_proj` or `qkv_proj`, `out_proj`, `gate_proj`) to an
input, or the norm (`q_norm`, `k_norm`, `v_norm`) to what was projected."""

_OF_SCORES = ("sinks", "relative_bias")
"""What a layer learns of its scores, of which each head has a row on the device: (1, N, 1, 1 or num_buckets)."""

_TAKEN = {"out_proj": "out_proj", "kv_b_proj": "kv_a_norm"}
"""Projections whose input is padded, by the name whose features it has."""


def upload_weights(
    weights: Mapping[str, np.ndarray],
    spec: AttentionSpec,
    *,
    device: ttnn.MeshDevice,
    dtype: ttnn.DataType = ttnn.bfloat16,
    heads: int | None = None,
) -> dict[str, Tensor]:
    """Put the weights of a layer on a device, once, in the form that its products take.

    Every head is padded with zeros to whole tiles, which changes no result and lets every operation take any head_dim.
    Tiles are computed whole anyway; only with RoPE, where each half is padded, may a head become larger. With latents
    the features that heads share, the last ones of queries and keys, are padded by themselves, and so is the latent.

    Args:
        weights: canonical arrays by name: `q_proj.weight` (N * H, d_in), `q_proj.bias` (N * H,), `k_proj.weight`
            (K * H, d_kv), …, `out_proj.weight` (E, N * Hv) where there is one; `q_norm.weight` (H,), (N, H) or (N * H,)
            and the other parameters of norms; `sinks` (N,); `relative_bias` (num_buckets, N).
        spec: the layer.
        device: where to.
        dtype: of the weights; biases and the parameters of norms are kept in bfloat16 where that is `ttnn.bfloat8_b`.
        heads: the dimension of a mesh over whose chips heads are divided, as `mha_tt.parallel.shard` does; on each chip
            all of them when absent.

    Returns:
        Tensors by the names of the projections that the layer holds. P being the padded head_dim: `q_proj.weight`
        (d_in, N * P), `q_proj.bias` (1, N * P), …, `out_proj.weight` (N * P, E), `out_proj.bias` (1, E); of norms
        (1, P), (1, N, 1, P) or (1, N * P); `sinks` (1, N, 1, 1); `relative_bias` (1, N, 1, num_buckets). Where values
        have features of their own number, P is theirs for v_proj and what comes after it. With latents
        `kv_b_proj.weight` has the padded kv_rank for d_in.

    Raises:
        ValueError: if names or shapes are not those of the layer, or a value is not finite.
    """
    check_spec(spec)
    check_dtype("dtype", dtype)
    shapes = {name: np.shape(weight) for name, weight in weights.items()}
    if shapes != spec.weight_shapes:
        raise Refusal("weights", f"have the names and shapes {spec.weight_shapes}", str(shapes))
    check_finite(weights)
    size = 1 if heads is None else device.shape[heads]
    own = own_spec(spec, size)
    parts = [_arranged(own_weights(weights, spec, size, chip), own) for chip in range(size)]
    held = {}
    for name, array in parts[0].items():
        is_matrix = name.endswith(".weight") and name not in spec.parameters
        narrow = dtype == ttnn.bfloat8_b and not is_matrix  # one row of a block format is as coarse as its largest
        kept = ttnn.bfloat16 if narrow else dtype
        if heads is None:
            held[name] = upload(array, device=device, dtype=kept)
        else:
            held[name] = upload_parts([part[name] for part in parts], axis=heads, device=device, dtype=kept)
    return held


def _arranged(weights: Mapping[str, np.ndarray], spec: AttentionSpec) -> dict[str, np.ndarray]:
    """Canonical weights in the form that they have on the device."""
    arrays = {}
    for name, weight in weights.items():
        part, _, kind = name.partition(".")
        array = np.asarray(weight, dtype=np.float32)
        if name in _OF_SCORES:
            array = array.T.reshape(_parameter_shape(name, spec))
        elif name in spec.parameters:
            array = _pad_heads(array.reshape(-1), part, spec).reshape(_parameter_shape(name, spec))
        elif _has_heads(part, spec):
            array = _pad_heads(array, part, spec)
        if part in _TAKEN and kind == "weight":
            array = _pad_heads(array.T, _TAKEN[part], spec).T
        arrays[name] = array
    for kind in ("weight", "bias"):
        if spec.fused_qkv and f"q_proj.{kind}" in arrays:
            arrays[f"qkv_proj.{kind}"] = np.concatenate([arrays.pop(f"{part}_proj.{kind}") for part in "qkv"])
    for name, array in arrays.items():
        if name not in spec.parameters:
            arrays[name] = array.T if name.endswith(".weight") else array[None]
    return arrays


def download_weights(
    weights: Mapping[str, Tensor], spec: AttentionSpec, *, heads: int | None = None
) -> dict[str, np.ndarray]:
    """The canonical arrays that `upload_weights` was given, as the device holds them, in float32.

    Args:
        weights: tensors by name.
        spec: the layer.
        heads: as `upload_weights` was given it.

    Raises:
        ValueError: if names or shapes are not those of the layer.
    """
    if heads is None:
        check_weights(weights, spec)
        return _canonical({name: download(tensor) for name, tensor in weights.items()}, spec)
    mesh = next(iter(weights.values())).device().shape
    own = own_spec(spec, mesh[heads])
    check_weights(weights, own)
    held = {name: download_parts(tensor) for name, tensor in weights.items()}
    line = lines_of(tuple(mesh), heads)[0]
    parts = [_canonical({name: arrays[chip] for name, arrays in held.items()}, own) for chip in line]
    return whole_weights(parts, spec)


def _canonical(held: Mapping[str, np.ndarray], spec: AttentionSpec) -> dict[str, np.ndarray]:
    """Weights in the form that they have on the device, as canonical ones: the inverse of `_arranged`."""
    arrays = {}
    for name, array in held.items():
        if name not in spec.parameters:
            array = array.T if name.endswith(".weight") else array[0]
        if name.startswith("qkv_proj."):
            ends = np.cumsum([padded_width(f"{part}_proj", spec) for part in "qk"])
            parts = zip("qkv", np.split(array, ends), strict=True)
            arrays |= {name.replace("qkv", part): each for part, each in parts}
        else:
            arrays[name] = array
    canonical = {}
    for name, shape in spec.weight_shapes.items():
        part, _, kind = name.partition(".")
        array = arrays[name]
        if name in _OF_SCORES:
            array = array.reshape(shape[::-1]).T
        elif part in spec.norms:
            array = _real_heads(array.reshape(-1), part, spec)
        elif _has_heads(part, spec):
            array = _real_heads(array, part, spec)
        if part in _TAKEN and kind == "weight":
            array = _real_heads(array.T, _TAKEN[part], spec).T
        canonical[name] = np.ascontiguousarray(array.reshape(shape))
    return canonical


def slots_of(part: str, spec: AttentionSpec) -> np.ndarray:
    """Where the features of a head lie in a projection or norm of that name: see `head_slots`.

    Values, and what is made of them, are as queries and keys where they have as many features, and by themselves else.
    With latents a head consists of blocks, each of whole tiles, and a latent is a head by itself.
    """
    blocks = _blocks(part, spec)
    begins = np.cumsum([0, *(block.padded for block in blocks[:-1])])
    return np.concatenate([begin + block.slots for begin, block in zip(begins, blocks, strict=True)])


def padded_features(part: str, spec: AttentionSpec) -> int:
    """Features that a head has on the device in a projection or norm of that name."""
    return sum(block.padded for block in _blocks(part, spec))


def padded_width(part: str, spec: AttentionSpec) -> int:
    """Width of all heads side by side in what a projection of that name gives, or takes where its input is padded."""
    num_heads = spec.num_kv_heads if part.startswith(("k_", "v_")) else spec.num_heads
    return (1 if part.startswith(("q_a_", "kv_a_")) else num_heads) * padded_features(part, spec)


class _Block(NamedTuple):
    """Features of a head that are padded together: where they lie in the block, and how wide it is."""

    slots: np.ndarray
    padded: int


def _blocks(part: str, spec: AttentionSpec) -> list[_Block]:
    """What a head consists of in a projection or norm of that name."""
    latent, values = spec.latent, _block(spec.value_head_dim)
    is_of_keys = part.startswith(("q_", "k_"))
    if latent is None:
        return [_block(spec.head_dim, spec.rope) if is_of_keys or spec.value_head_dim == spec.head_dim else values]
    if part.startswith("q_a_") and latent.q_rank is not None:  # it has no features of heads: ttnn takes any width
        return [_Block(np.arange(latent.q_rank), latent.q_rank)]
    own, compressed = _block(spec.head_dim - latent.rope_dim), _block(latent.kv_rank)
    # As wide without RoPE, so that the width of what a cache keeps depends on kv_rank and rope_dim alone.
    shared = _Block(head_slots(latent.rope_dim, rope=spec.rope), padded_head_dim(latent.rope_dim, rope=True))
    found = {"kv_a_proj": [compressed, shared], "kv_a_norm": [compressed], "kv_b_proj": [own, values]}
    return [own, shared] if is_of_keys else found.get(part, [values])


def _block(features: int, rope: Rope | None = None) -> _Block:
    return _Block(head_slots(features, rope=rope), padded_head_dim(features, rope=rope is not None))


def _slots(part: str, width: int, spec: AttentionSpec) -> np.ndarray:
    """Where the features lie in one padded head, or in several side by side."""
    padded = padded_features(part, spec)
    return (padded * np.arange(width // padded)[:, None] + slots_of(part, spec)).reshape(-1)


def _has_heads(projection: str, spec: AttentionSpec) -> bool:
    """Whether what a projection gives are the features of heads."""
    is_one_a_head = projection == "gate_proj" and spec.gate is not None and spec.gate.per_head
    return projection != "out_proj" and not is_one_a_head


def _parameter_shape(name: str, spec: AttentionSpec) -> tuple[int, ...]:
    """The shape on the device of a parameter of a norm, or of what scores are given beside their products."""
    part, shape = name.partition(".")[0], spec.parameters[name]
    if name in _OF_SCORES:
        return (1, shape[-1], 1, *(shape[:-1] or (1,)))
    return parameter_shape((*shape[:-1], shape[-1] // len(slots_of(part, spec)) * padded_features(part, spec)))


def _pad_heads(rows: np.ndarray, part: str, spec: AttentionSpec) -> np.ndarray:
    """(heads * H, …) -> (heads * P, …), zeros where a head has no feature."""
    slots = slots_of(part, spec)
    heads = rows.reshape(-1, len(slots), *rows.shape[1:])
    padded = np.zeros((len(heads), padded_features(part, spec), *rows.shape[1:]), rows.dtype)
    padded[:, slots] = heads
    return padded.reshape(-1, *rows.shape[1:])


def _real_heads(rows: np.ndarray, part: str, spec: AttentionSpec) -> np.ndarray:
    """(heads * P, …) -> (heads * H, …): the inverse of `_pad_heads`."""
    heads = rows.reshape(-1, padded_features(part, spec), *rows.shape[1:])[:, slots_of(part, spec)]
    return heads.reshape(-1, *rows.shape[1:])


def project_with(
    weights: Mapping[str, Tensor],
    spec: AttentionSpec | None = None,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Project:
    """Projections whose weights lie in the container that `multi_head_attention` takes, and the norms of a spec."""

    def project(name: str, x: Tensor) -> Tensor:
        if spec is not None and name in spec.norms:
            return apply_norm(
                x,
                spec.norms[name],
                weights.get(f"{name}.weight"),
                weights.get(f"{name}.bias"),
                slots=_slots(name, x.shape[-1], spec),
                compute_kernel_config=compute_kernel_config,
            )
        weight = weights[f"{name}.weight"]
        check_projected(name, x, weight)
        return ttnn.linear(
            x,
            weight,
            bias=weights.get(f"{name}.bias"),
            dtype=x.dtype,
            compute_kernel_config=compute_kernel_config or accurate_config(x.device()),
        )

    return project


# ---- What is refused -------------------------------------------------------------------------------------------------


def check_weights(weights: Mapping[str, Tensor], spec: AttentionSpec) -> None:
    """Refuse weights that are not exactly those of the layer, by name and shape."""
    check_spec(spec)
    if not isinstance(weights, Mapping):
        raise WrongType("weights", "be a mapping of names to tensors", type(weights).__name__)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, projection in spec.projections.items():
        d_in, d_out = projection.d_in, projection.d_out
        if name == "qkv_proj":
            d_out = sum(padded_width(f"{part}_proj", spec) for part in "qkv")
        elif _has_heads(name, spec):
            d_out = padded_width(name, spec)
        if name in _TAKEN:
            d_in = padded_width(_TAKEN[name], spec)
        shapes[f"{name}.weight"] = (d_in, d_out)
        if projection.has_bias:
            shapes[f"{name}.bias"] = (1, d_out)
    shapes |= {name: _parameter_shape(name, spec) for name in spec.parameters}
    missing, unexpected = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    if missing or unexpected:
        raise Refusal("weights", "have exactly the names of the spec", missing=missing, unexpected=unexpected)
    for name, shape in shapes.items():
        check_floating(name, weights[name], rank=len(shape))
        if tuple(weights[name].shape) != shape:
            raise Refusal(name, f"have shape {shape}", {f"{name}.shape": tuple(weights[name].shape)})


def check_finite(weights: Mapping[str, np.ndarray]) -> None:
    """Refuse weights with a NaN or an infinity, wherever their values are known."""
    with np.errstate(over="ignore"):  # what is too large for float32 becomes an infinity there
        wrong = [name for name, weight in weights.items() if not np.isfinite(np.asarray(weight, np.float32)).all()]
    if wrong:
        raise Refusal("weights", "be finite", f"NaN or infinities in {wrong}")


def check_projected(name: str, x: Tensor, weight: Tensor) -> None:
    """Refuse an input whose width or dtype is not that of the projection it goes into."""
    if x.shape[-1] != weight.shape[0]:
        raise Refusal(f"the input of {name}", f"have {weight.shape[0]} features", shape=tuple(x.shape))
