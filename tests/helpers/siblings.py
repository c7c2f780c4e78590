"""The implementations behind one interface in NumPy arrays, so that a test of their contract is
written once.

JAX and PyTorch are tested in `.venv`, ttnn in `.venv-tt`. This module imports none of them:
`helpers/frameworks.py` has the adapters of the first two and `helpers/tt/sibling.py` the adapter of
the third. The plugin of each environment defines the fixture `sibling`, one implementation after
the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import parity
from helpers import HAS_TTNN
from helpers.heads import attention_in
from mha_spec import AttentionSpec

PATHS = ("function-plain", "function-fused", "module-plain", "module-fused")
"""The ways into a layer: with attention weights, or without them in the framework's kernel."""

EPSILON = float(np.finfo(np.float32).eps)
"""The distance from 1 to the next float32."""

DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
"""The dtypes in which every implementation of this environment computes, by name."""
if not HAS_TTNN:  # which has no float16: see `UNSUPPORTED` in helpers/tt
    DTYPES["float16"] = np.float16


class Sibling(ABC):
    """An implementation, called with NumPy arrays.

    Attributes:
        name: `jax`, `torch` or `tt`.
        package: `mha_jax`, `mha_torch` or `mha_tt`.
        backend: its module of `parity.measure.backends`.
        kernel_dtype: the widest NumPy dtype of the fused kernel; all other functions take float32.
        other_dtype: a floating dtype that does not go with `kernel_dtype`.
        rounding: the error of a device in values of order 1, beyond the error of float32
            arithmetic.
        unsupported: why a feature that others have is missing here, by feature.
    """

    name: str
    package: ModuleType
    backend: ModuleType
    kernel_dtype: Any = np.float32
    other_dtype: Any = np.float16
    rounding: float = 0.0
    unsupported: Mapping[str, str] = {}

    def running(self) -> AbstractContextManager[Any]:
        """Return a context in which the implementation can be called."""
        return nullcontext()

    def dtype_of(self, path: str) -> Any:
        """Return the widest NumPy dtype of a path, which ends in `plain` or `fused`."""
        return self.kernel_dtype if path.endswith("fused") else np.float32

    def huge(self, path: str) -> float:
        """Return the largest number that a masked key or value may be on a path."""
        return 1e30

    # ---- Arrays ----------------------------------------------------------------------------------

    def array(self, x: Any) -> Any:
        """Return tokens, heads or scores as the framework holds them, with the same values and
        dtype.

        Lists become int32 or boolean arrays.
        """
        if not isinstance(x, np.ndarray):
            x = np.asarray(x)
            x = x.astype(np.int32) if np.issubdtype(x.dtype, np.integer) else x
        return self.backend.from_numpy(x)

    def option(self, x: Any) -> Any:
        """Return a mask, a bias, positions or lengths as the framework takes them. Other values
        stay as they are.
        """
        return self.array(x) if isinstance(x, np.ndarray) else x

    def numpy(self, x: Any) -> np.ndarray:
        """Return a NumPy array with the same values and dtype."""
        return self.backend.to_numpy(x)

    def dtype(self, dtype: Any) -> Any:
        """Return the framework's dtype for a NumPy dtype."""
        return self.array(np.zeros(1, dtype)).dtype

    def assert_close(self, actual: np.ndarray, expected: Any, within: float) -> None:
        """Compare with an absolute tolerance, derived from the rounding of float32 arithmetic."""
        __tracebackhide__ = True
        expected = np.asarray(expected)
        assert actual.shape == expected.shape
        error = np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max()
        assert error <= within, f"the largest error is {error:.1e}, of {within:.1e}"

    def assert_same(self, actual: np.ndarray, expected: np.ndarray, path: str) -> None:
        """Compare results of one path bit for bit, where the shape of an option differs."""
        __tracebackhide__ = True
        assert np.array_equal(actual, expected)

    # ---- Modules and weights ---------------------------------------------------------------------

    @abstractmethod
    def module(self, kind: str, spec: AttentionSpec, seed: int = 0, **options: Any) -> Any:
        """Return a module of the class named `kind` in float32, with weights drawn from the
        seed.
        """

    def in_dtype(self, dtype: Any) -> dict[str, Any]:
        """Return the keyword with which a module has weights of a NumPy dtype."""
        return {"dtype": self.dtype(dtype)}

    def made(self, kind: str, *arguments: Any, **keywords: Any) -> Any:
        """Return a module made as a user makes it."""
        return getattr(self.package, kind)(*arguments, **self.required, **keywords)

    @property
    def required(self) -> dict[str, Any]:
        """Keywords that every module requires."""
        return {}

    @property
    def on_device(self) -> dict[str, Any]:
        """Keywords of a function that makes tensors."""
        return {}

    def init_cache(self, *sizes: int, **options: int) -> Any:
        """Return an empty cache in the usual dtype of its package."""
        return self.package.init_cache(*sizes, **options, **self.on_device)

    def filled(
        self,
        kind: str,
        spec: AttentionSpec,
        weights: Mapping[str, np.ndarray] | None = None,
        seed: int = 0,
        dtype: Any = np.float32,
    ) -> Any:
        """Return a module with weights by canonical name, in training; default: the random weights
        of its spec.
        """
        if weights is None:
            weights = {name: x.astype(dtype) for name, x in parity.random_weights(spec).items()}
        (dtype,) = {x.dtype for x in weights.values()}
        options = {} if dtype == np.float32 else self.in_dtype(dtype)
        return parity.load_into(self.module(kind, spec, seed, **options), weights, spec)

    @abstractmethod
    def weights(self, weights: Mapping[str, np.ndarray], spec: AttentionSpec) -> Any:
        """Return weights by canonical name in the container that the functions accept."""

    @abstractmethod
    def weights_of(self, module: Any) -> Any:
        """Return the weights of a module in the container that the functions accept."""

    def weight_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in which the functions hold a canonical weight of heads 32 wide."""
        return shape

    def container(self, tensors: Mapping[str, Any]) -> Any:
        """Return tensors of those shapes, by canonical name, in the container that the functions
        accept; unchecked.
        """
        return dict(tensors)

    def stage_weight(self, name: str, x: np.ndarray) -> Any:
        """Return sinks, a table of positions or a parameter of a norm as the functions of split
        heads take them.
        """
        return self.array(x)

    def seeded(self, function: str, seed: int = 0) -> dict[str, Any]:
        """Return keywords with which a function drops what that seed drops."""
        return {}

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Return a context in which tokens are decoded."""
        return nullcontext()

    # ---- Calls -----------------------------------------------------------------------------------

    def call(self, module: Any, *inputs: Any, **options: Any) -> Any:
        """Call a module as one program, where the framework compiles programs."""
        return module(*inputs, **options)

    def attend(
        self, path: str, spec: AttentionSpec, arrays: Mapping[str, np.ndarray], **options: Any
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return output and attention weights of a layer on one of the `PATHS`.

        Args:
            path: way into the layer.
            spec: specification of the layer.
            arrays: weights by canonical name, and query, key and value, all of one dtype.
            options: keywords of the layer.
        """
        weights = {name: x for name, x in arrays.items() if "." in name}
        inputs = {name: self.array(x) for name, x in arrays.items() if "." not in name}
        options = {name: self.option(x) for name, x in options.items()}
        options["need_weights"] = path.endswith("plain")
        if path.startswith("function"):
            query = inputs.pop("query")
            container = self.weights(weights, spec)
            results = self.package.multi_head_attention(query, container, spec, **inputs, **options)
        else:
            results = self.filled("MultiHeadAttention", spec, weights)(**inputs, **options)
        output, attn_weights = results
        output = self.without_padding(self.numpy(output), spec)
        return output, None if attn_weights is None else self.numpy(attn_weights)

    def attended(
        self, path: str, spec: AttentionSpec, arrays: Mapping[str, np.ndarray], **options: Any
    ) -> np.ndarray:
        """Return the output of `attend` only."""
        return self.attend(path, spec, arrays, **options)[0]

    def attend_heads(
        self, form: str, query: np.ndarray, key: np.ndarray, value: np.ndarray, **options: Any
    ) -> np.ndarray:
        """Return the context of split heads, in the plain or the fused form."""
        attention = attention_in(form, self.package)
        heads = (self.array(x) for x in (query, key, value))
        options = {name: self.option(x) for name, x in options.items()}
        return self.numpy(attention(*heads, **options)[0])

    def without_padding(self, output: np.ndarray, spec: AttentionSpec) -> np.ndarray:
        """Return the output of a layer without features that only the framework needs."""
        return output


def contents_of(sibling: Sibling, cache: Any) -> list[np.ndarray]:
    """Return copies of keys, values and lengths of a cache: some implementations update their own
    in place.
    """
    return [np.array(sibling.numpy(x)) for x in (cache.keys, cache.values, cache.lengths)]


def fixture_of(siblings: Mapping[str, Sibling]) -> Callable[..., Any]:
    """Return the fixture `sibling` of an environment that has these."""

    @pytest.fixture(name="sibling", params=list(siblings))
    def sibling(request: pytest.FixtureRequest) -> Iterator[Sibling]:
        """Return each implementation in turn."""
        one = siblings[request.param]
        with one.running():
            yield one

    return sibling
