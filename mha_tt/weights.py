"""Functional weights, and projections that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import ttnn
from ttnn import Tensor

from mha_spec import AttentionSpec, InputError
from mha_spec.attention import check_spec
from mha_spec.score_weights import SCORE_WEIGHTS, score_axes
from mha_tt.checks import check_dtype, check_finite, check_projected, check_weights
from mha_tt.device import accurate_config, download, download_parts, upload, upload_parts
from mha_tt.features.norms import apply_norm
from mha_tt.layout import (
    PADDED_INPUTS,
    feature_indices_in,
    has_heads,
    pad_heads,
    padded_width,
    parameter_shape,
    real_heads,
    weight_dtype,
)

Project = Callable[[str, Tensor], Tensor]
"""Applies a projection or a norm by its name in `AttentionSpec.projections` or
`AttentionSpec.norms`, such as `q_proj` or `k_norm`, to its input.
"""


def upload_weights(
    weights: Mapping[str, np.ndarray],
    spec: AttentionSpec,
    *,
    device: ttnn.MeshDevice,
    dtype: ttnn.DataType = ttnn.bfloat16,
    heads_axis: int | None = None,
) -> dict[str, Tensor]:
    """Upload the weights of a layer to a device, in the layout of its matrix products.

    Each head is padded with zeros to whole tiles, which changes no result and allows any head_dim
    in all operations. Tiles are always computed whole; only RoPE, which pads each half, may need
    more of them. With latents the shared features (the last ones of queries and keys) and the
    latent are padded separately.

    Args:
        weights: canonical arrays by name: `q_proj.weight` (N * H, d_in), `q_proj.bias` (N * H,),
            `k_proj.weight` (K * H, d_kv), …, `out_proj.weight` (E, N * Hv) if any; `q_norm.weight`
            (H,), (N, H) or (N * H,) and the other parameters of norms; `sinks` (N,);
            `relative_bias` (num_buckets, N); `relative_keys` and `relative_queries` (num_buckets,
            H) or (num_buckets, N, H).
        spec: the layer.
        device: destination.
        dtype: dtype of the weights; with `ttnn.bfloat8_b` biases and parameters of norms are
            bfloat16.
        heads_axis: mesh dimension that heads are divided over, see `mha_tt.parallel.shard`;
            default: replicated.

    Returns:
        Tensors by name. With P the padded head_dim: `q_proj.weight` (d_in, N * P), `q_proj.bias`
        (1, N * P), …, `out_proj.weight` (N * P, E), `out_proj.bias` (1, E); norms (1, P), (1, N, 1,
        P) or (1, N * P); `sinks` (1, N, 1, 1); `relative_bias` (1, N, 1, num_buckets);
        `relative_keys` and `relative_queries` (1, 1 or N, num_buckets, P). If values have a
        different width, P is theirs for v_proj and all later weights. With latents
        `kv_b_proj.weight` has the padded kv_rank as d_in.

    Raises:
        ValueError: if names or shapes do not fit the layer, or a value is not finite.
    """
    check_spec(spec)
    check_dtype("dtype", dtype)
    shapes = {name: np.shape(weight) for name, weight in weights.items()}
    if shapes != spec.weight_shapes:
        raise InputError("weights", f"have the names and shapes {spec.weight_shapes}", str(shapes))
    check_finite(weights)
    if heads_axis is None:
        return {
            name: upload(array, device=device, dtype=weight_dtype(name, dtype, spec))
            for name, array in _arranged(weights, spec).items()
        }
    # Imported only if heads are divided.
    from mha_tt.parallel.local import local_spec, local_weights

    size = device.shape[heads_axis]
    chip_spec = local_spec(spec, size)
    parts = [_arranged(local_weights(weights, spec, size, chip), chip_spec) for chip in range(size)]
    return {
        name: upload_parts(
            [part[name] for part in parts],
            axis=heads_axis,
            device=device,
            dtype=weight_dtype(name, dtype, spec),
        )
        for name in parts[0]
    }


def _arranged(weights: Mapping[str, np.ndarray], spec: AttentionSpec) -> dict[str, np.ndarray]:
    """Return canonical weights in the layout of the device."""
    arrays = {}
    for name, weight in weights.items():
        part, _, kind = name.partition(".")
        array = np.asarray(weight, dtype=np.float32)
        if name in SCORE_WEIGHTS:
            array = _arranged_of_scores(name, array, spec)
        elif name in spec.parameters:
            array = pad_heads(array.reshape(-1), part, spec).reshape(parameter_shape(name, spec))
        elif has_heads(part, spec):
            array = pad_heads(array, part, spec)
        if part in PADDED_INPUTS and kind == "weight":
            array = pad_heads(array.T, PADDED_INPUTS[part], spec).T
        arrays[name] = array
    for kind in ("weight", "bias"):
        if spec.fused_qkv and f"q_proj.{kind}" in arrays:
            arrays[f"qkv_proj.{kind}"] = np.concatenate(
                [arrays.pop(f"{part}_proj.{kind}") for part in "qkv"]
            )
    for name, array in arrays.items():
        if name not in spec.parameters:
            if name.endswith(".weight"):
                arrays[name] = array.T
            else:
                arrays[name] = array[None]
    return arrays


def download_weights(
    weights: Mapping[str, Tensor], spec: AttentionSpec, *, heads_axis: int | None = None
) -> dict[str, np.ndarray]:
    """Return canonical arrays in float32 from the tensors of `upload_weights`.

    Args:
        weights: tensors by name.
        spec: the layer.
        heads_axis: as in `upload_weights`.

    Raises:
        ValueError: if names or shapes do not fit the layer.
    """
    if heads_axis is None:
        check_weights(weights, spec)
        return _canonical({name: download(tensor) for name, tensor in weights.items()}, spec)
    # Imported only if heads are divided.
    from mha_tt.parallel.local import lines_of, local_spec, whole_weights

    mesh = next(iter(weights.values())).device().shape
    chip_spec = local_spec(spec, mesh[heads_axis])
    check_weights(weights, chip_spec)
    arrays = {name: download_parts(tensor) for name, tensor in weights.items()}
    line = lines_of(tuple(mesh), heads_axis)[0]
    parts = [
        _canonical({name: chips[chip] for name, chips in arrays.items()}, chip_spec)
        for chip in line
    ]
    return whole_weights(parts, spec)


def _canonical(arranged: Mapping[str, np.ndarray], spec: AttentionSpec) -> dict[str, np.ndarray]:
    """Return canonical weights from the layout of the device: the inverse of `_arranged`."""
    arrays = {}
    for name, array in arranged.items():
        if name not in spec.parameters:
            if name.endswith(".weight"):
                array = array.T
            else:
                array = array[0]
        if name.startswith("qkv_proj."):
            ends = np.cumsum([padded_width(f"{part}_proj", spec) for part in "qk"])
            parts = zip("qkv", np.split(array, ends), strict=True)
            arrays |= {name.replace("qkv", part): rows for part, rows in parts}
        else:
            arrays[name] = array
    canonical = {}
    for name, shape in spec.weight_shapes.items():
        part, _, kind = name.partition(".")
        array = arrays[name]
        if name in SCORE_WEIGHTS:
            array = _canonical_of_scores(name, array, spec)
        elif part in spec.norms:
            array = real_heads(array.reshape(-1), part, spec)
        elif has_heads(part, spec):
            array = real_heads(array, part, spec)
        if part in PADDED_INPUTS and kind == "weight":
            array = real_heads(array.T, PADDED_INPUTS[part], spec).T
        canonical[name] = np.ascontiguousarray(array.reshape(shape))
    return canonical


def _arranged_of_scores(name: str, array: np.ndarray, spec: AttentionSpec) -> np.ndarray:
    """Return a canonical weight that changes scores in the layout of the device."""
    axes = score_axes(name, array.shape)
    if "H" not in axes:
        return array.T.reshape(parameter_shape(name, spec))
    num_heads = spec.num_heads if "N" in axes else 1
    features = array.reshape(-1, num_heads, spec.head_dim).T  # (H, heads, others)
    return pad_heads(features, "q_proj", spec).transpose(1, 2, 0)[None]


def _canonical_of_scores(name: str, array: np.ndarray, spec: AttentionSpec) -> np.ndarray:
    """Return a weight that changes scores from the layout of the device."""
    shape = spec.score_shapes[name]
    if "H" not in score_axes(name, shape):
        return array.reshape(shape[::-1]).T
    return real_heads(array[0].transpose(2, 0, 1), "q_proj", spec).T


def project_with(
    weights: Mapping[str, Tensor],
    spec: AttentionSpec | None = None,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Project:
    """Return a function that applies projections and norms, with weights as in
    `multi_head_attention`.
    """

    def project(name: str, x: Tensor) -> Tensor:
        if spec is not None and name in spec.norms:
            return apply_norm(
                x,
                spec.norms[name],
                weights.get(f"{name}.weight"),
                weights.get(f"{name}.bias"),
                feature_indices=feature_indices_in(name, x.shape[-1], spec),
                compute_kernel_config=compute_kernel_config,
            )
        weight = weights[f"{name}.weight"]
        try:
            return ttnn.linear(
                x,
                weight,
                bias=weights.get(f"{name}.bias"),
                dtype=x.dtype,
                compute_kernel_config=compute_kernel_config or accurate_config(x.device()),
            )
        except RuntimeError:
            check_projected(name, x, weight)  # say it in terms of the layer
            raise

    return project
