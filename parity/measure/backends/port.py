"""Interface of a backend's module: plain functions, and what the modules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from mha_spec import AttentionSpec
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.weights import Weights


class FilledModule(Protocol):
    """Module of an implementation with the weights of a problem.

    Attributes:
        module: module in evaluation mode.
        weights: weights for the functional API.
    """

    module: Any
    weights: Any

    def outputs(self, query: Any, **inputs: Any) -> tuple[Any, dict[str, Any]]:
        """Return the attention weights, and the output of each path: `module` with weights, `fused`
        without.
        """
        output, attn_weights = self.module(query, **inputs, need_weights=True)
        fused, _ = self.module(query, **inputs)
        return attn_weights, {"module": output, "fused": fused}

    def contain(self, contained: Callable[[Any], Any]) -> None:
        """Wrap kernels by `contained` of the implementation: NaN then reaches exactly the rows that
        attend to it.
        """
        self.module.kernel = contained(self.module.kernel)

    def step(
        self, x: Any, cache: Any, new_lengths: Any, positions: Any
    ) -> tuple[dict[str, Any], Any]:
        """Return the output of new tokens on each path, and the cache that contains them."""
        output, grown = self.module(x, cache, new_lengths=new_lengths, positions=positions)
        return {"module": output}, grown


class Replayed(Protocol):
    """Recording of a problem on a device that computes; invalid if the program differs."""

    made_on: str
    differs: str


class StagePort(Protocol):
    """Part of a port that the driver of a case uses.

    Attributes:
        SIBLING: package of the implementation.
        SHAPES: shapes of heads, outputs and caches in its arrays.
        GRADIENT_PATHS: paths with gradients, "" for the stage functions; empty without automatic
            differentiation.
    """

    SIBLING: ModuleType
    SHAPES: type[Shapes]
    GRADIENT_PATHS: tuple[str, ...]

    def lock(self, dtype: str) -> AbstractContextManager[dict[str, Any]]:
        """Fix and report the settings that affect results, and restore them afterwards."""
        ...

    def from_numpy(self, x: np.ndarray) -> Any: ...
    def to_numpy(self, x: Any) -> np.ndarray: ...
    def argument(self, x: np.ndarray) -> Any:
        """Return an argument other than inputs: a mask, a bias, positions or lengths."""
        ...

    def whole_argument(self, x: np.ndarray) -> Any:
        """Return the whole argument, if `argument` returns the part of a process."""
        ...

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with the implementation and arguments; compiled, if the framework
        compiles.
        """
        ...

    def filled(self, problem: Problem) -> FilledModule: ...
    def pull_back(
        self,
        path: str,
        filled: FilledModule,
        spec: AttentionSpec,
        inputs: dict[str, Any],
        hidden: dict[str, Any],
    ) -> tuple[dict[str, np.ndarray], Weights]:
        """Return gradients of the inputs and canonical weights, for the cotangent in `hidden`.

        Not called if `GRADIENT_PATHS` is empty.
        """
        ...


class Port(StagePort, Protocol):
    """Port to an implementation: a module of plain functions and constants."""

    def load_into(self, module: Any, weights: Mapping[str, np.ndarray]) -> Any: ...
    def weights_of(self, module: Any) -> Weights: ...
    def spec_of(self, module: Any) -> AttentionSpec: ...
    def why_skipped(self, case: Case, dtype: str) -> str | None:
        """Return why a case cannot run in a dtype, or None."""
        ...

    def replayed(self, problem: Problem) -> AbstractContextManager[Replayed | None]:
        """Replay the recorded results of a problem that cannot be computed here; None without a
        recording.
        """
        ...

    def environment(self) -> dict[str, Any]:
        """Return versions and devices."""
        ...

    def tutorial(self, problem: Problem) -> Any:
        """Return the tutorial's module for a case that it can express, with its weights, in
        evaluation mode.
        """
        ...


def never_skipped(case: Case, dtype: str) -> None:
    """Return None: the backend runs all cases in all dtypes."""


def nothing_replayed(_: Problem) -> AbstractContextManager[None]:
    """Replay nothing: the backend always computes."""
    return nullcontext()


OF_KEYS = ("k", "v", "keys", "values")
"""Stages, and parts of caches, with key/value heads."""


class Shapes:
    """Conversion of stages and parts of caches, by name; this class has the standard shapes."""

    def __init__(self, port: StagePort, spec: AttentionSpec) -> None:
        self.port, self.spec = port, spec
        self.cache_parts: tuple[str, ...] = ("keys", "values", "lengths")
        if spec.latent is not None:
            self.cache_parts = ("latents", "lengths")

    def from_numpy(self, name: str, x: np.ndarray) -> Any:
        """Return a stage in the implementation's format."""
        return self.port.from_numpy(x)

    def from_input(self, name: str, x: np.ndarray) -> Any:
        """Return an input as functions accept it; k and v are stages of another layer."""
        if name in ("k", "v"):
            return self.from_numpy(name, x)
        return self.port.from_numpy(x)

    def to_numpy(self, name: str, x: Any) -> np.ndarray:
        """Return a stage from the implementation's format."""
        return self.port.to_numpy(x)

    @property
    def cache_kind(self) -> Any:
        """Cache class of the implementation."""
        sibling = self.port.SIBLING
        return sibling.KVCache if self.spec.latent is None else sibling.LatentCache

    def cache_from_numpy(self, parts: Sequence[np.ndarray]) -> Any:
        """Return the cache with these parts, in the order of `cache_parts`."""
        return self.cache_kind(*map(self.from_numpy, self.cache_parts, parts))

    def cache_to_numpy(self, cache: Any) -> dict[str, np.ndarray]:
        """Return the parts of a cache."""
        return {name: self.to_numpy(name, getattr(cache, name)) for name in self.cache_parts}


def kind_of_tutorial(sibling: Any, case: Case) -> Any:
    """Return the module class of the tutorial, `plain.py`, for a case."""
    if case.is_cached:
        return sibling.plain.MultiHeadAttentionWithCache
    if case.seq_len_k is None:
        return sibling.plain.MultiHeadSelfAttention
    return sibling.plain.MultiHeadAttention


def kind_of(sibling: Any, case: Case) -> Any:
    """Return the module class of an implementation for a case."""
    if not case.is_cached:
        return sibling.MultiHeadAttention
    if case.spec.latent is None:
        return sibling.MultiHeadAttentionWithCache
    return sibling.MultiHeadLatentAttention
