"""Hooks for a library that transfers arrays to and from a device itself.

ttnn reports its operations, `ttnn.from_torch` and `ttnn.to_torch` among them. It reports neither
the array from which a `ttnn.Tensor` is built, nor a read by `Tensor.to_numpy`. So a library
notifies `observers` of an upload, and first asks `readers` for the value of a tensor. Both are
empty unless a shadow or a recording is active:

    def upload(array, device):
        tensor = ttnn.to_device(ttnn.Tensor(array, ttnn.bfloat16, None, ttnn.TILE_LAYOUT), device)
        for observe in hooks.observers:
            observe(tensor, array, 0.0)
        return tensor

    def download(tensor):
        if hooks.readers:
            return hooks.readers[-1](tensor)
        return ttnn.to_dtype(ttnn.from_device(tensor), ttnn.float32).to_numpy()
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import ttnn

Observer = Callable[[ttnn.Tensor, np.ndarray | list[np.ndarray], float], None]
"""Accepts an uploaded tensor, its array or one for each chip, and the padding of its last tiles."""

Reader = Callable[[ttnn.Tensor], np.ndarray]
"""Returns the value of a tensor, in float32."""

observers: list[Observer] = []
readers: list[Reader] = []
