"""Attention in float64, from the formulas, and the tolerances of devices."""

from typing import Any

import numpy as np
import pytest
import ttnn

import mha_tt
import parity

IS_MOCK = mha_tt.target() in (None, "mock")
"""True if the tests run on a mock board, as without a device."""

TOLERANCES = {
    # Golden functions compute in float32, and their results are rounded. The largest errors
    # measured in all tests are 4.2e-7, 8.2e-3 and 1.6e-2.
    "mock": {ttnn.float32: 1e-6, ttnn.bfloat16: 2e-2, ttnn.bfloat8_b: 4e-2},
    # The matrix engine truncates float32 to 11 bits, exponentials and reciprocals are
    # approximations, and thresholds of ttnn's own tests of attention are between 1e-2 and 5e-2. To
    # be measured on a card.
    "device": {ttnn.float32: 1e-2, ttnn.bfloat16: 5e-2, ttnn.bfloat8_b: 1e-1},
}["mock" if IS_MOCK else "device"]
"""Largest allowed error by dtype, relative to the largest element."""

both_dtypes = pytest.mark.parametrize(
    "dtype", [ttnn.float32, ttnn.bfloat16], ids=["float32", "bfloat16"]
)
every_dtype = pytest.mark.parametrize(
    "dtype", [ttnn.float32, ttnn.bfloat16, ttnn.bfloat8_b], ids=["float32", "bfloat16", "bfloat8_b"]
)


# ---- Attention -----------------------------------------------------------------------------------


def attend(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    mask: Any = False,
    bias: Any = 0.0,
    multiplier: Any = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return context and attention weights of split heads; `multiplier` multiplies the weights
    before the values are summed.
    """
    groups = query.shape[1] // key.shape[1]
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    key, value = np.repeat(key, groups, axis=1), np.repeat(value, groups, axis=1)
    scores = query @ key.swapaxes(2, 3) / np.sqrt(query.shape[3]) + bias
    scores = np.where(mask, -np.inf, scores)
    highest = scores.max(axis=3, keepdims=True)
    exponentials = np.exp(scores - np.where(np.isfinite(highest), highest, 0.0))
    total = exponentials.sum(axis=3, keepdims=True)
    attn_weights = exponentials / np.where(total == 0.0, 1.0, total)
    return multiplier * attn_weights @ value, attn_weights


def rotate(x: np.ndarray, positions: Any, theta: float) -> np.ndarray:
    """Each pair (a, b) of features, half a head apart, as (a cos - b sin, b cos + a sin).

    The table of frequencies is float32, as released models have it; angles are not.
    """
    half = x.shape[3] // 2
    exponents = np.arange(half, dtype=np.float32) / np.float32(half)
    frequencies = 1 / (theta ** exponents.astype(np.float64)).astype(np.float32)
    angles = np.asarray(positions)[:, None, :, None] * frequencies.astype(np.float64)
    rotated = (x[..., :half] + 1j * x[..., half:].astype(np.float64)) * np.exp(1j * angles)
    return np.concatenate([rotated.real, rotated.imag], axis=-1)


def project(weights: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """Return x W^T + b."""
    return x @ weights[f"{name}.weight"].astype(np.float64).T + weights.get(f"{name}.bias", 0.0)


def project_heads(
    spec: parity.AttentionSpec,
    weights: dict[str, np.ndarray],
    name: str,
    x: np.ndarray,
    positions: Any = None,
) -> np.ndarray:
    """Return queries, keys or values (B, heads, T, H), after RoPE."""
    heads = project(weights, f"{name}_proj", x)
    heads = heads.reshape(*x.shape[:2], -1, spec.head_dim).swapaxes(1, 2)
    if spec.rope is None or name == "v":
        return heads
    return rotate(
        heads, np.arange(x.shape[1])[None] if positions is None else positions, spec.rope.theta
    )


def latent_heads(
    spec: parity.AttentionSpec, weights: dict[str, np.ndarray], x: np.ndarray, positions: Any = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return queries, keys and values (B, N, T, ·) of a layer with latents, with half-split pairs,
    which changes no score.
    """
    latent, num_heads = spec.latent, spec.num_heads
    assert latent is not None

    def normed(name: str, x: np.ndarray) -> np.ndarray:
        return (
            x
            / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + latent.eps)
            * weights[f"{name}.weight"]
        )

    def split(x: np.ndarray, num_heads: int) -> np.ndarray:
        return x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2)

    def turned(x: np.ndarray) -> np.ndarray:
        if spec.rope is None:
            return x
        pairs = (
            np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
            if spec.rope.pairs == "interleaved"
            else x
        )
        return rotate(
            pairs, np.arange(x.shape[2])[None] if positions is None else positions, spec.rope.theta
        )

    if latent.q_rank is None:
        q = project(weights, "q_proj", x)
    else:
        q = project(
            weights,
            "q_b_proj",
            latent.q_factor * normed("q_a_norm", project(weights, "q_a_proj", x)),
        )
    q, own_features = split(q, num_heads), spec.head_dim - latent.rope_dim
    compressed, shared = np.split(project(weights, "kv_a_proj", x), [latent.kv_rank], axis=2)
    kv = split(
        project(weights, "kv_b_proj", latent.kv_factor * normed("kv_a_norm", compressed)), num_heads
    )
    shared = np.repeat(turned(split(shared, 1)), num_heads, axis=1)
    q = np.concatenate([q[..., :own_features], turned(q[..., own_features:])], axis=-1)
    return q, np.concatenate([kv[..., :own_features], shared], axis=-1), kv[..., own_features:]


def layer(
    spec: parity.AttentionSpec,
    weights: dict[str, np.ndarray],
    query: np.ndarray,
    key: np.ndarray | None = None,
    value: np.ndarray | None = None,
    *,
    positions: Any = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return output and attention weights of a whole layer; options are passed to `attend`."""
    key = query if key is None else key
    value = key if value is None else value
    if spec.latent is not None:
        q, k, v = latent_heads(spec, weights, query, positions)
    else:
        inputs = zip("qkv", (query, key, value), strict=True)
        q, k, v = (project_heads(spec, weights, name, x, positions) for name, x in inputs)
    context, attn_weights = attend(q, k, v, **options)
    combined = context.swapaxes(1, 2).reshape(*query.shape[:2], -1)
    return project(weights, "out_proj", combined) if spec.out_proj else combined, attn_weights


# ---- Between NumPy and the device ----------------------------------------------------------------


def rounded(x: np.ndarray, dtype: ttnn.DataType) -> np.ndarray:
    """Return x in float32, rounded to a dtype."""
    host = ttnn.Tensor(np.array(x, np.float32, order="C"), dtype, None, ttnn.TILE_LAYOUT)
    return host.to_torch().float().numpy()


def rounded_weights(spec: parity.AttentionSpec, dtype: ttnn.DataType) -> dict[str, np.ndarray]:
    """Return random weights of the layer that the dtype represents exactly."""
    return {name: rounded(weight, dtype) for name, weight in parity.random_weights(spec).items()}


def full_pass(spec: parity.AttentionSpec, dtype: ttnn.DataType, x: np.ndarray) -> np.ndarray:
    """Return the output of one causal pass over all tokens, without a cache, in float64."""
    return layer(spec, rounded_weights(spec, dtype), x, mask=mha_tt.create_causal_mask(x.shape[1]))[
        0
    ]


def module_of(
    kind: str,
    spec: parity.AttentionSpec,
    device: ttnn.MeshDevice,
    dtype: ttnn.DataType = ttnn.bfloat16,
    weights: dict[str, np.ndarray] | None = None,
    **options: Any,
) -> Any:
    """Return a module without dropout, with the given weights or `rounded_weights`."""
    module = getattr(mha_tt, kind)(spec, device=device, dtype=dtype, **options).eval()
    module.load_weights(rounded_weights(spec, dtype) if weights is None else weights)
    return module


def without_padding(output: np.ndarray, spec: parity.AttentionSpec) -> np.ndarray:
    """Return the output of a layer, without the padding of heads if no projection follows."""
    if spec.out_proj:
        return output
    indices = mha_tt.feature_indices(spec.head_dim, rope=spec.rope)
    return output.reshape(*output.shape[:2], spec.num_heads, -1)[..., indices].reshape(
        *output.shape[:2], -1
    )


def assert_close(actual: np.ndarray, expected: np.ndarray, dtype: ttnn.DataType) -> None:
    """Check equality within the rounding of a dtype: see `TOLERANCES`."""
    __tracebackhide__ = True
    assert actual.shape == expected.shape
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCES[dtype], f"the largest error is {error:.1e} of the largest element"
