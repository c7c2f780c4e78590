"""Weights from outside, in the container that the functions take: the projections made of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import ttnn
from ttnn import Tensor

from mha_spec import AttentionSpec
from mha_spec.attention import check_spec
from mha_tt.arrays import check_dtype, check_floating
from mha_tt.device import accurate_config, download, head_slots, padded_head_dim, upload

Project = Callable[[str, Tensor], Tensor]
"""Applies the projection of that name (`q_proj`, `k_proj`, `v_proj` or `qkv_proj`, `out_proj`) to an input."""


def upload_weights(
    weights: Mapping[str, np.ndarray],
    spec: AttentionSpec,
    *,
    device: ttnn.MeshDevice,
    dtype: ttnn.DataType = ttnn.bfloat16,
) -> dict[str, Tensor]:
    """Put the weights of a layer on a device, once, in the form that its products take.

    Every head is padded with zeros to whole tiles, which changes no result and lets every operation take any head_dim.
    Tiles are computed whole anyway; only with RoPE, where each half is padded, may a head become larger.

    Args:
        weights: canonical arrays by name: `q_proj.weight` (N * H, d_in), `q_proj.bias` (N * H,), `k_proj.weight`
            (K * H, d_kv), …, `out_proj.weight` (E, N * H) where there is one.
        spec: the layer.
        device: where to.
        dtype: of the weights; biases are kept in bfloat16 where that is `ttnn.bfloat8_b`.

    Returns:
        Tensors by the names of the projections that the layer holds. P being the padded head_dim: `q_proj.weight`
        (d_in, N * P), `q_proj.bias` (1, N * P), …, `out_proj.weight` (N * P, E), `out_proj.bias` (1, E).

    Raises:
        ValueError: if names or shapes are not those of the layer, or a value is not finite.
    """
    check_spec(spec)
    check_dtype("dtype", dtype)
    shapes = {name: np.shape(weight) for name, weight in weights.items()}
    if shapes != spec.weight_shapes:
        raise ValueError(f"weights must have the names and shapes {spec.weight_shapes}, got {shapes}")
    check_finite(weights)
    arrays = {name: np.asarray(weight, dtype=np.float32) for name, weight in weights.items()}
    for kind in ("weight", "bias"):
        if spec.fused_qkv and f"q_proj.{kind}" in arrays:
            arrays[f"qkv_proj.{kind}"] = np.concatenate([arrays.pop(f"{part}_proj.{kind}") for part in "qkv"])
    held = {}
    for name, array in arrays.items():
        projection, _, kind = name.partition(".")
        if projection != "out_proj":
            array = _pad_heads(array, spec)
        elif kind == "weight":
            array = _pad_heads(array.T, spec).T
        narrow = dtype == ttnn.bfloat8_b and kind == "bias"  # one row of a block format is as coarse as its largest
        held[name] = upload(
            array.T if kind == "weight" else array[None], device=device, dtype=ttnn.bfloat16 if narrow else dtype
        )
    return held


def download_weights(weights: Mapping[str, Tensor], spec: AttentionSpec) -> dict[str, np.ndarray]:
    """The canonical arrays that `upload_weights` was given, as the device holds them, in float32.

    Args:
        weights: tensors by name.
        spec: the layer.

    Raises:
        ValueError: if names or shapes are not those of the layer.
    """
    check_weights(weights, spec)
    slots = head_slots(spec.head_dim, rope=spec.rope)
    padded = _padded(spec)
    canonical = {}
    for name, tensor in weights.items():
        projection, _, kind = name.partition(".")
        array = download(tensor)
        array = array.T if kind == "weight" else array[0]
        if projection != "out_proj":
            array = array.reshape(-1, padded, *array.shape[1:])[:, slots]
            array = array.reshape(-1, *array.shape[2:])
        elif kind == "weight":
            array = array.reshape(len(array), -1, padded)[:, :, slots].reshape(len(array), -1)
        if projection == "qkv_proj":
            parts = np.split(array, [spec.q_width, spec.q_width + spec.kv_width])
            canonical |= {
                f"{part}_proj.{kind}": np.ascontiguousarray(each) for part, each in zip("qkv", parts, strict=True)
            }
        else:
            canonical[name] = np.ascontiguousarray(array)
    return {name: canonical[name] for name in spec.weight_shapes}


def _padded(spec: AttentionSpec) -> int:
    return padded_head_dim(spec.head_dim, rope=spec.rope is not None)


def _pad_heads(rows: np.ndarray, spec: AttentionSpec) -> np.ndarray:
    """(heads * H, …) -> (heads * P, …), zeros where a head has no feature."""
    heads = rows.reshape(-1, spec.head_dim, *rows.shape[1:])
    padded = np.zeros((len(heads), _padded(spec), *rows.shape[1:]), rows.dtype)
    padded[:, head_slots(spec.head_dim, rope=spec.rope)] = heads
    return padded.reshape(-1, *rows.shape[1:])


def project_with(
    weights: Mapping[str, Tensor], *, compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None
) -> Project:
    """Projections whose weights lie in the container that `multi_head_attention` takes."""

    def project(name: str, x: Tensor) -> Tensor:
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
        raise TypeError(f"weights must be a mapping of names to tensors, got {type(weights).__name__}")
    padded = _padded(spec)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, projection in spec.projections.items():
        d_in, d_out = projection.d_in, projection.d_out // spec.head_dim * padded
        if name == "out_proj":
            d_in, d_out = spec.num_heads * padded, projection.d_out
        shapes[f"{name}.weight"] = (d_in, d_out)
        if projection.has_bias:
            shapes[f"{name}.bias"] = (1, d_out)
    missing, unexpected = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    if missing or unexpected:
        raise ValueError(f"weights must have exactly the names of the spec, missing {missing}, unexpected {unexpected}")
    for name, shape in shapes.items():
        check_floating(name, weights[name], rank=2)
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {name}.shape={tuple(weights[name].shape)}")


def check_finite(weights: Mapping[str, np.ndarray]) -> None:
    """Refuse weights with a NaN or an infinity, wherever their values are known."""
    with np.errstate(over="ignore"):  # what is too large for float32 becomes an infinity there
        wrong = [name for name, weight in weights.items() if not np.isfinite(np.asarray(weight, np.float32)).all()]
    if wrong:
        raise ValueError(f"weights must be finite, got NaN or infinities in {wrong}")


def check_projected(name: str, x: Tensor, weight: Tensor) -> None:
    """Refuse an input whose width or dtype is not that of the projection it goes into."""
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"the input of {name} must have {weight.shape[0]} features, got shape={tuple(x.shape)}")
