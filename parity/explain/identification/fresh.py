"""Make fresh inputs for calls that verify a layer: other tokens and numbers of the same shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

Way = Literal["drawn", "permuted", "tokens permuted"]
"""How other inputs are made. Integers are drawn from those of the input, or permuted: placeholders
of images may need their number. Or the tokens of each input are permuted: their features may hold
places.
"""

WAYS: tuple[Way, ...] = ("drawn", "permuted", "tokens permuted")

SEED = 0

KEPT = {
    "mask",
    "position",
    "positions",
    "pos",
    "grid",
    "size",
    "sizes",
    "cos",
    "sin",
    "freqs",
    "segment",
    "segments",
}
KEPT |= {"len", "lens", "length", "lengths", "seqlen", "seqlens"}
"""Words in the names of inputs that stay as they are: places of tokens, angles for them, segments
and lengths.
"""


def fresh_arrays(inputs: Mapping[str, np.ndarray], way: Way = "drawn") -> dict[str, np.ndarray]:
    """Return arrays of the same shapes with other tokens or numbers. Equal arrays stay equal.

    Args:
        inputs: arrays by name. Booleans, complex numbers and arrays with infinite numbers stay as
            they are.
        way: how they are made.
    """
    generator, fresh = np.random.default_rng(SEED), dict(inputs)
    for name, x in inputs.items():
        if KEPT & {*name.split("_")} or x.dtype.kind not in "iuf" or not x.size:
            continue
        same = next(
            each for each, y in inputs.items() if x.dtype == y.dtype and np.array_equal(x, y)
        )
        fresh[name] = fresh[same] if same != name else _fresh(x, generator, way)
    return fresh


def _fresh(x: np.ndarray, generator: np.random.Generator, way: Way) -> np.ndarray:
    if way == "tokens permuted" and x.ndim > 1:
        return x[:, np.random.default_rng(SEED).permutation(x.shape[1])]  # alike in all inputs
    if x.dtype.kind != "f":
        return (
            generator.choice(x.ravel(), x.shape)
            if way == "drawn"
            else generator.permuted(x.ravel()).reshape(x.shape)
        )
    if not np.isfinite(x).all():
        return x
    spread = max(float(x.std()), abs(float(x.mean())))
    return (generator.standard_normal(x.shape) * spread + x.mean()).astype(x.dtype)
