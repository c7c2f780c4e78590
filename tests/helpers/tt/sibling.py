"""`mha_tt` behind the interface `Sibling` of all implementations."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import ttnn

import mha_tt
import ttnn_mock
from helpers.siblings import Sibling
from mha_spec import AttentionSpec
from mha_spec.score_weights import score_axes
from parity.measure.backends import tt as backend

from .formulas import IS_MOCK, TOLERANCES, without_padding

UNSUPPORTED = {
    "float16": "ttnn has no such dtype; `upload` rounds arrays of it to a dtype of ttnn",
    "float32 in the kernel": (
        "ttnn's attention takes bfloat16 and bfloat8_b; layers in float32 take the plain path"
    ),
    "dropout in float32": "ttnn draws random numbers in bfloat16",
    "gradients": "ttnn has no automatic differentiation",
}
"""Features that the others have; mha_tt/test_unsupported.py has a test of each row."""


class TtSibling(Sibling):
    """`mha_tt`, on the device that is open or on a mock board with the values of golden
    functions.
    """

    name = "tt"
    package = mha_tt
    backend = backend
    kernel_dtype = ml_dtypes.bfloat16
    other_dtype = np.float32
    rounding = TOLERANCES[ttnn.float32]
    unsupported = UNSUPPORTED

    @property
    def device(self) -> ttnn.MeshDevice:
        return backend.open_device()

    @property
    def required(self) -> dict[str, Any]:
        return {"device": self.device}

    def running(self) -> AbstractContextManager[Any]:
        self.device  # noqa: B018 (opened before values are computed)
        return ttnn_mock.shadow() if IS_MOCK else nullcontext()

    def huge(self, path: str) -> float:
        """In the kernel a mask is -1e9 added to a score, which must be far below that in size."""
        return 1e4 if path.endswith("fused") else 1e18

    # ---- Arrays ----------------------------------------------------------------------------------

    def array(self, x: Any) -> Any:
        x = np.asarray(x)
        if x.dtype.kind == "i" or not x.ndim:  # bad input everywhere
            wide, dtype = (
                (np.int32, ttnn.int32) if x.dtype.kind == "i" else (np.float32, ttnn.float32)
            )
            return ttnn.to_device(
                ttnn.Tensor(x.astype(wide), dtype, None, ttnn.TILE_LAYOUT), self.device
            )
        return backend.from_numpy(x)

    def option(self, x: Any) -> Any:
        """Masks, positions and lengths stay on the host, where they decide over programs; a bias
        may.
        """
        return x

    def numpy(self, x: Any) -> np.ndarray:
        return x if isinstance(x, np.ndarray) else backend.to_numpy(x)

    def dtype(self, dtype: Any) -> Any:
        return backend.DTYPES[np.dtype(dtype).name]

    def assert_close(self, actual: np.ndarray, expected: Any, within: float) -> None:
        """Compare with the tolerance of the dtype relative to the largest element: see
        `TOLERANCES`.
        """
        __tracebackhide__ = True
        expected = np.asarray(expected).astype(np.float64)
        assert actual.shape == expected.shape
        error, largest = np.abs(actual.astype(np.float64) - expected).max(), np.abs(expected).max()
        allowed = TOLERANCES[backend.DTYPES[actual.dtype.name]] * largest
        assert error <= allowed, f"the largest error is {error:.1e}, of {allowed:.1e}"

    # ---- Modules and weights ---------------------------------------------------------------------

    def module(self, kind: str, spec: AttentionSpec, seed: int = 0, **options: Any) -> Any:
        options = {"dtype": ttnn.float32, "rng": np.random.default_rng(seed), **options}
        return getattr(mha_tt, kind)(spec, device=self.device, **options)

    def weights(self, weights: Mapping[str, np.ndarray], spec: AttentionSpec) -> Any:
        (dtype,) = {self.dtype(x.dtype) for x in weights.values()}
        return mha_tt.upload_weights(weights, spec, device=self.device, dtype=dtype)

    def weights_of(self, module: Any) -> Any:
        return module.weights

    @property
    def on_device(self) -> dict[str, Any]:
        return self.required

    def weight_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A weight is transposed, and a bias is a row."""
        return (1, *shape) if name.endswith("bias") else shape[::-1]

    def stage_weight(self, name: str, x: np.ndarray) -> Any:
        """With the axes of split heads, (1, N, 1, ·) or (1, N, ·, H) for vectors; vectors of a norm
        are a row.
        """
        if name == "norm":
            return self.array(x[None])
        axes = score_axes(name, x.shape)
        if "H" not in axes:
            rows = np.ascontiguousarray(x.T)  # one of each head
            return self.array(rows.reshape(1, len(rows), 1, -1))
        num_heads = x.shape[axes.index("N")] if "N" in axes else 1
        vectors = x.reshape(-1, num_heads, x.shape[-1]).swapaxes(0, 1)
        return self.array(np.ascontiguousarray(vectors)[None])

    def seeded(self, function: str, seed: int = 0) -> dict[str, Any]:
        return {"seed": seed}

    # ---- Calls -----------------------------------------------------------------------------------

    def attend_heads(
        self, form: str, query: np.ndarray, key: np.ndarray, value: np.ndarray, **options: Any
    ) -> np.ndarray:
        """Heads are padded to whole tiles of features, as the kernel takes them."""
        head_dim, num_heads = query.shape[3], query.shape[1]
        spec = AttentionSpec(num_heads * head_dim, num_heads, num_kv_heads=key.shape[1])
        padded = mha_tt.padded_head_dim(head_dim)
        heads = (np.pad(x, [(0, 0)] * 3 + [(0, padded - head_dim)]) for x in (query, key, value))
        context = super().attend_heads(form, *heads, **{"spec": spec, **options})
        return context[..., :head_dim]

    def without_padding(self, output: np.ndarray, spec: AttentionSpec) -> np.ndarray:
        return without_padding(output, spec)
