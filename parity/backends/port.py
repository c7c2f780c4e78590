"""What a backend's module offers: plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from mha_spec import AttentionSpec
from parity.core.case import Case
from parity.core.problem import Problem
from parity.core.trace import Reference, Trace
from parity.core.weights import Weights
from parity.sharding.mesh import MeshPlan


class FilledModule(Protocol):
    """A module of a sibling with the weights of a problem.

    Attributes:
        module: as users get it, in evaluation.
        weights: in the container that the sibling's functions take.
    """

    module: Any
    weights: Any

    def outputs(self, query: Any, **inputs: Any) -> tuple[Any, dict[str, Any]]:
        """Return the attention weights, and the output by each path: `module` with weights, `fused` without."""
        output, attn_weights = self.module(query, **inputs, need_weights=True)
        fused, _ = self.module(query, **inputs)
        return attn_weights, {"module": output, "fused": fused}

    def step(self, x: Any, cache: Any, new_lengths: Any, positions: Any) -> tuple[dict[str, Any], Any]:
        """Return the output of new tokens by each path, and the cache that holds them."""
        output, grown = self.module(x, cache, new_lengths=new_lengths, positions=positions)
        return {"module": output}, grown


class Replayed(Protocol):
    """A recording of a problem on a device that computes, which does not count where the program differs."""

    made_on: str
    differs: str


class Port(Protocol):
    """How a sibling is reached: plain functions, and what they are of.

    Attributes:
        SIBLING: the package.
        SHAPES: the shapes in which its arrays hold heads, outputs and caches.
        GRADIENT_PATHS: the paths that have gradients, "" for that of the stage functions; none without automatic
            differentiation.
    """

    SIBLING: ModuleType
    SHAPES: type[Shapes]
    GRADIENT_PATHS: tuple[str, ...]

    def load_into(self, module: Any, weights: Mapping[str, np.ndarray]) -> Any: ...
    def weights_of(self, module: Any) -> Weights: ...
    def spec_of(self, module: Any) -> AttentionSpec: ...
    def why_skipped(self, case: Case, dtype: str) -> str | None:
        """Why a case cannot run in a dtype, or None."""
        ...

    def lock(self, dtype: str) -> AbstractContextManager[dict[str, Any]]:
        """Hold still what changes numbers, tell what is set, and put everything back afterwards."""
        ...

    def replayed(self, problem: Problem) -> AbstractContextManager[Replayed | None]:
        """Hold what a device gave for a problem in place of what cannot be computed here; None where nothing is."""
        ...

    def environment(self) -> dict[str, Any]:
        """Versions and devices."""
        ...

    def from_numpy(self, x: np.ndarray) -> Any: ...
    def to_numpy(self, x: Any) -> np.ndarray: ...
    def beside(self, x: np.ndarray) -> Any:
        """What goes beside the inputs, as the sibling takes it: masks, biases, positions, lengths."""
        ...

    def whole(self, x: np.ndarray) -> Any:
        """The same, where `beside` gives a part of it to each of several processes."""
        ...

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A function of the sibling and of arguments, called with them; compiled, where a framework compiles."""
        ...

    def filled(self, problem: Problem) -> FilledModule: ...
    def pull_back(
        self, path: str, filled: FilledModule, spec: AttentionSpec, inputs: dict[str, Any], hidden: dict[str, Any]
    ) -> tuple[dict[str, np.ndarray], Weights]:
        """Gradients of the inputs and of the canonical weights, for the cotangent among what is `hidden`.

        Nobody asks for them where there are no `GRADIENT_PATHS`.
        """
        ...


class Divided(Protocol):
    """How cases of a sibling run on a mesh of several devices: plain functions."""

    def make_devices(self, count: int) -> None:
        """Make so many virtual devices, before there are any."""
        ...

    def check_devices(self, plan: MeshPlan) -> None:
        """Refuse a mesh of more devices than there are."""
        ...

    def why_skipped(self, case: Case, dtype: str, plan: MeshPlan) -> str | None:
        """Why a case cannot run there in a dtype, or None."""
        ...

    def record(self, reference: Reference, plan: MeshPlan) -> Trace:
        """A problem run there, each stage gathered; with the mesh among its numerics, and with what devices sent."""
        ...


def never_skipped(case: Case, dtype: str) -> None:
    """Of a backend that runs every case in every dtype."""


def nothing_replayed(_: Problem) -> AbstractContextManager[None]:
    """Of a backend that computes wherever it runs."""
    return nullcontext()


OF_KEYS = ("k", "v", "keys", "values")
"""The stages, and parts of caches, that have key/value heads."""


class Shapes:
    """How a sibling's arrays hold stages, and the parts of caches, by name: here in the shapes of the contract."""

    def __init__(self, port: Port, spec: AttentionSpec) -> None:
        self.port, self.spec = port, spec
        self.cache_parts = ("keys", "values", "lengths") if spec.latent is None else ("latents", "lengths")

    def from_numpy(self, name: str, x: np.ndarray) -> Any:
        """Return a stage as the sibling's functions take it."""
        return self.port.from_numpy(x)

    def from_input(self, name: str, x: np.ndarray) -> Any:
        """Return an input as functions accept it; k and v are stages of another layer."""
        return self.from_numpy(name, x) if name in ("k", "v") else self.port.from_numpy(x)

    def to_numpy(self, name: str, x: Any) -> np.ndarray:
        """Return a stage as the sibling's functions give it."""
        return self.port.to_numpy(x)

    @property
    def cache_kind(self) -> Any:
        """The sibling's class of caches."""
        return self.port.SIBLING.KVCache if self.spec.latent is None else self.port.SIBLING.LatentCache

    def cache_from_numpy(self, parts: Sequence[np.ndarray]) -> Any:
        """Return the cache that holds these parts."""
        return self.cache_kind(*map(self.from_numpy, self.cache_parts, parts))

    def cache_to_numpy(self, cache: Any) -> dict[str, np.ndarray]:
        """Return the parts of a cache."""
        return {name: self.to_numpy(name, getattr(cache, name)) for name in self.cache_parts}


def kind_of(sibling: Any, case: Case) -> Any:
    """The module of a sibling that runs a case."""
    if not case.is_cached:
        return sibling.MultiHeadAttention
    return sibling.MultiHeadAttentionWithCache if case.spec.latent is None else sibling.MultiHeadLatentAttention
