"""Normalisation of queries, keys and values, and its gradients, from the formulas.

Of features x: x̂ = (x - m) / s, where s² = mean((x - m)²) + eps, and m is the mean of x in a layer norm and 0 in an RMS
norm; y = w x̂ + b, or (1 + w) x̂ + b.
"""

from __future__ import annotations

import numpy as np

from mha_spec import Norm


def standardised(x: np.ndarray, norm: Norm) -> tuple[np.ndarray, np.ndarray]:
    """x̂, and s, of wide features on the last axis."""
    if norm.kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    s = np.sqrt((x * x).mean(axis=-1, keepdims=True) + x.dtype.type(norm.eps))
    return x / s, s


def factor(weight: np.ndarray, norm: Norm) -> np.ndarray:
    """What x̂ is multiplied by, from the weight as it broadcasts."""
    return weight + weight.dtype.type(1.0) if norm.weight == "1+w" else weight


def broadcast(parameter: np.ndarray, norm: Norm) -> np.ndarray:
    """A parameter (H,) or (width,) as it is, (heads, H) as (heads, 1, H)."""
    return parameter[:, None, :] if norm.per_head else parameter


def summed(grad: np.ndarray, norm: Norm) -> np.ndarray:
    """The gradient of a parameter, (H,), (heads, H) or (width,), from that of each element that it entered."""
    kept = (1, grad.ndim - 1) if norm.per_head else (grad.ndim - 1,)
    return grad.sum(axis=tuple(axis for axis in range(grad.ndim) if axis not in kept))


def back_through(d_hat: np.ndarray, x_hat: np.ndarray, s: np.ndarray, norm: Norm, *, magnitude: bool) -> np.ndarray:
    """The gradient of x from that of x̂; `magnitude` takes every term of every sum and difference as positive."""
    x_hat, sign = (np.abs(x_hat), 1.0) if magnitude else (x_hat, -1.0)
    d_x = d_hat + d_hat.dtype.type(sign) * x_hat * (d_hat * x_hat).mean(axis=-1, keepdims=True)
    if norm.kind == "layer":
        d_x = d_x + d_hat.dtype.type(sign) * d_hat.mean(axis=-1, keepdims=True)
    return d_x / s
