"""Make fresh inputs for calls that verify a layer: other tokens and values of the same shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

Method = Literal["drawn", "permuted", "tokens permuted"]
"""How other inputs are made. Integers are drawn from the integers of the input, or permuted:
placeholders of images may need their number. Or the tokens of each input are permuted: their
features may hold positions.
"""

METHODS: tuple[Method, ...] = ("drawn", "permuted", "tokens permuted")

SEED = 0

UNCHANGED = {
    "cos",
    "freqs",
    "grid",
    "len",
    "length",
    "lengths",
    "lens",
    "mask",
    "pos",
    "position",
    "positions",
    "segment",
    "segments",
    "seqlen",
    "seqlens",
    "sin",
    "size",
    "sizes",
}
"""Words in the names of inputs that stay as they are: positions of tokens, angles for them,
segments and lengths.
"""


def fresh_arrays(
    inputs: Mapping[str, np.ndarray], method: Method = "drawn"
) -> dict[str, np.ndarray]:
    """Return arrays of the same shapes with other tokens or values. Equal arrays stay equal.

    Args:
        inputs: arrays by name. Booleans, complex numbers and arrays with infinite numbers stay as
            they are.
        method: how they are made.
    """
    generator = np.random.default_rng(SEED)
    fresh = dict(inputs)
    for name, x in inputs.items():
        is_described = not UNCHANGED.isdisjoint(name.split("_"))
        if is_described or x.dtype.kind not in "iuf" or not x.size:
            continue
        first = _first_equal(inputs, x)
        if first == name:
            fresh[name] = _fresh_array(x, generator, method)
        else:
            fresh[name] = fresh[first]
    return fresh


def _first_equal(inputs: Mapping[str, np.ndarray], x: np.ndarray) -> str:
    """Return the name of the first input that is equal to one of them."""
    for name, other in inputs.items():
        if x.dtype == other.dtype and np.array_equal(x, other):
            return name
    # NaN is equal to nothing. Such an array stays as it is.
    return next(name for name, other in inputs.items() if other is x)


def _fresh_array(x: np.ndarray, generator: np.random.Generator, method: Method) -> np.ndarray:
    if method == "tokens permuted" and x.ndim > 1:
        # A new generator, so that the order is the same in all inputs.
        order = np.random.default_rng(SEED).permutation(x.shape[1])
        return x[:, order]
    if x.dtype.kind != "f":
        if method == "drawn":
            return generator.choice(x.ravel(), x.shape)
        return generator.permuted(x.ravel()).reshape(x.shape)
    if not np.isfinite(x).all():
        return x
    spread = max(float(x.std()), abs(float(x.mean())))
    return (generator.standard_normal(x.shape) * spread + x.mean()).astype(x.dtype)
