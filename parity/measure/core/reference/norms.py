"""Norms of queries, keys and values, and their gradients, from the formulas.

For features x: x̂ = (x - m) / s with s² = mean((x - m)²) + eps, where m is the mean of x in a layer
norm and 0 in an RMS norm; y = w x̂ + b, or (1 + w) x̂ + b.
"""

from __future__ import annotations

import numpy as np

from mha_spec import Norm


def standardised(x: np.ndarray, norm: Norm) -> tuple[np.ndarray, np.ndarray]:
    """Return x̂ = x / s, with mean 0 for a layer norm, and s, its root mean square with eps.

    The features, in the arithmetic's wide dtype, are on the last axis.
    """
    if norm.kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    s = np.sqrt((x * x).mean(axis=-1, keepdims=True) + x.dtype.type(norm.eps))
    return x / s, s


def factor(weight: np.ndarray, norm: Norm) -> np.ndarray:
    """Return the factor of x̂ from the weight, ready to broadcast."""
    if norm.weight == "1+w":
        return weight + weight.dtype.type(1.0)
    return weight


def broadcast(parameter: np.ndarray, norm: Norm) -> np.ndarray:
    """Return a parameter (H,) or (width,) unchanged, (heads, H) as (heads, 1, H)."""
    if norm.per_head:
        return parameter[:, None, :]
    return parameter


def summed(grad: np.ndarray, norm: Norm) -> np.ndarray:
    """Return the gradient of a parameter, (H,), (heads, H) or (width,), by the gradient of each
    element.
    """
    all_axes = tuple(range(grad.ndim - 1))
    if norm.per_head:
        head_axis = 1
        return grad.sum(axis=tuple(axis for axis in all_axes if axis != head_axis))
    return grad.sum(axis=all_axes)


def back_through(
    d_hat: np.ndarray, x_hat: np.ndarray, s: np.ndarray, norm: Norm, *, magnitude: bool
) -> np.ndarray:
    """Return the gradient of x from the gradient of x̂.

    `magnitude` makes all terms of all sums and differences positive. The caller passes |d_hat|.
    """
    sign = d_hat.dtype.type(-1.0)
    if magnitude:
        x_hat, sign = np.abs(x_hat), d_hat.dtype.type(1.0)
    d_x = d_hat + sign * x_hat * (d_hat * x_hat).mean(axis=-1, keepdims=True)
    if norm.kind == "layer":
        d_x = d_x + sign * d_hat.mean(axis=-1, keepdims=True)
    return d_x / s
