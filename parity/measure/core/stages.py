"""Stages of the data flow: names, axes, order, and the loop over the calls of a cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, Protocol, cast

import numpy as np

from parity.measure.core.case import Case

STAGES: dict[str, tuple[str, ...]] = {
    "mask": ("B", "N", "T", "S"),
    "q": ("B", "N", "T", "H"),
    "latents": ("B", "K", "S", "W"),
    "k": ("B", "K", "S", "H"),
    "v": ("B", "K", "S", "H"),
    "gate": ("B", "T", "G"),
    "cache.latents": ("B", "K", "S", "W"),
    "cache.keys": ("B", "K", "S", "H"),
    "cache.values": ("B", "K", "S", "H"),
    "cache.lengths": ("B",),
    "scores": ("B", "N", "T", "S"),
    "attn_weights": ("B", "N", "T", "S"),
    "context": ("B", "N", "T", "H"),
    "output": ("B", "T", "E"),
    "module.attn_weights": ("B", "N", "T", "S"),
    "module.output": ("B", "T", "E"),
    "module.cache.latents": ("B", "K", "S", "W"),
    "module.cache.keys": ("B", "K", "S", "H"),
    "module.cache.values": ("B", "K", "S", "H"),
    "module.cache.lengths": ("B",),
    "fused.output": ("B", "T", "E"),
    "blocks.output": ("B", "T", "E"),
    "plain.output": ("B", "T", "E"),
    "grad.query": ("B", "T", "d_in"),
    "grad.key": ("B", "S", "d_kv"),
    "grad.k": ("B", "K", "S", "H"),
    "grad.v": ("B", "K", "S", "H"),
    "grad.bias": ("B", "N", "T", "S"),
}
"""Stages in the order of the data flow, with their axes.

`mask` … `output` are computed by the stage functions, each from earlier ones. (`gate`, if any, is
the output of gate_proj; `latents`, if any, are the cached vectors, and `cache.keys` and
`cache.values` their expansions.) `module.*` is computed by the module, with attention weights;
`fused.output` by the module without them; `blocks.output` likewise, with even small cases block by
block; `plain.output` by the tutorial, `plain.py`. `grad.*` are gradients for a fixed cotangent of
the output, of the inputs and of each weight by name; `fused.grad.*` and `blocks.grad.*` are those
of these paths. With a cache, names start with the step: `step3.scores`.
"""

FUSED_PATHS = ("fused", "blocks")
"""Paths of a module without attention weights."""

TUTORIAL = "plain"
"""Path of the tutorial, `plain.py` of each implementation: modules of its own."""

PATHS = ("module", *FUSED_PATHS, TUTORIAL)
"""Paths of modules. Stages of the stage functions have none."""

EXACT = ("mask", "cache.lengths")
"""Stages that are not floating point."""

_NAME = re.compile(rf"(?:step(\d+)\.)?(?:({'|'.join(PATHS)})\.)?(grad\.)?(.*)", re.DOTALL)


@dataclass(frozen=True)
class Stage:
    """Parts of a stage's name; for an unknown name, all of it is the quantity.

    Attributes:
        quantity: quantity on any path: `scores`, `cache.keys`; for a gradient its variable,
            `q_proj.weight`.
        path: one of `PATHS`; empty for the stage functions.
        is_gradient: True for the gradient of the quantity.
        step: call of a cache, or None.
    """

    quantity: str
    path: str = ""
    is_gradient: bool = False
    step: int | None = None

    @cached_property
    def kind(self) -> str:
        """Name without the step: `module.cache.keys`."""
        return ".".join(
            filter(None, [self.path, "grad" if self.is_gradient else "", self.quantity])
        )

    def __str__(self) -> str:
        return self.kind if self.step is None else f"step{self.step}.{self.kind}"

    @cached_property
    def is_known(self) -> bool:
        """Return whether it is one of ours, a gradient or a weight, whose axes have letters."""
        return self.kind in STAGES or self.is_gradient or self.quantity.endswith(("weight", "bias"))

    @cached_property
    def is_exact(self) -> bool:
        """Return whether it contains booleans or integers, which are never rounded."""
        return self.kind in STAGES and self.quantity in EXACT

    @cached_property
    def is_end(self) -> bool:
        """Return whether no other stage depends on it: an output, or another result of a module."""
        return self.quantity == "output" or (
            self.path != "" and not self.quantity.startswith("cache.")
        )

    @cached_property
    def has_local_value(self) -> bool:
        """Return whether it is also computed from the reference's earlier stages, not only from the
        inputs.
        """
        return not self.is_gradient and self.path != TUTORIAL

    @cached_property
    def is_attn_weights(self) -> bool:
        """Return whether it contains attention weights, of any layer."""
        return self.quantity.endswith("attn_weights")

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Letters of its axes."""
        anywhere = f"grad.{self.quantity}" if self.is_gradient else self.kind
        return STAGES.get(anywhere) or (
            ("out", "in") if self.quantity.endswith("weight") else ("out",)
        )


@lru_cache(maxsize=4096)
def stage_named(name: str) -> Stage:
    """Return the stage of a name."""
    step, path, gradient, quantity = cast(
        re.Match[str], _NAME.fullmatch(name)
    ).groups()  # matches any text
    return Stage(quantity, path or "", bool(gradient), None if step is None else int(step))


# ---- Order ---------------------------------------------------------------------------------------

Values = Mapping[str, np.ndarray]
Step = Callable[[Values], dict[str, np.ndarray]]
"""Computes one or more stages from earlier stages, all by name."""


class LayerStages(Protocol):
    """Layer that computes the stages, each from the values of earlier ones, as NumPy arrays.

    `whole` is the module itself. Each call with a cache has its own mask, qkv, cache, scores and
    whole.
    """

    def mask(self, values: Values, /) -> dict[str, np.ndarray]: ...
    def qkv(self, values: Values, /) -> dict[str, np.ndarray]: ...
    def scores(self, values: Values, /) -> dict[str, np.ndarray]: ...
    def attn_weights(self, values: Values, /) -> dict[str, np.ndarray]: ...
    def context(self, values: Values, /) -> dict[str, np.ndarray]: ...
    def output(self, values: Values, /) -> dict[str, np.ndarray]: ...
    def whole(self, values: Values, /) -> dict[str, np.ndarray]: ...
    def call(self, index: int) -> Any: ...


STEPS = ("mask", "qkv", "scores", "attn_weights", "context", "output", "whole")
STEPS_OF_A_CALL = ("mask", "qkv", "cache", "scores", "attn_weights", "context", "output", "whole")
"""Methods of a layer, or of a call with a cache, that are its steps, in order."""


def steps_of(layer: LayerStages, case: Case) -> Sequence[Step]:
    """Return the stages of a case as functions, in the order of the data flow, with a cache call by
    call.

    Each accepts the values of earlier stages by name, so that it can run on its own
    implementation's values (accumulated) or on those of another (local).
    """
    if not case.is_cached:
        return [getattr(layer, name) for name in STEPS]
    call = cache(layer.call)
    return [
        _step_of_call(layer, call, index, name)
        for index in range(len(case.chunks))
        for name in STEPS_OF_A_CALL
    ]


CACHED = {"k": "cache.keys", "v": "cache.values"}
"""Stage that replaces the keys or values of the tokens in steps over all cached ones."""


def _step_of_call(layer: LayerStages, call: Callable[[int], Any], index: int, name: str) -> Step:
    """Return a step of one call with a cache, among the values of all calls.

    The call is created when its first step runs, because a candidate bug runs only a few.
    """
    taken = CACHED if name in ("scores", "context") else {}

    def run(values: Values) -> dict[str, np.ndarray]:
        step = getattr(call(index), name, None) or getattr(layer, name)
        return {
            f"step{index}.{stage}": x
            for stage, x in step(_ValuesOfCall(values, index, taken)).items()
        }

    return run


class _ValuesOfCall(Values):
    """Values of all calls, as seen from one of them.

    Values of its own call have plain names, `scores`, and those of the previous call
    `previous.scores`; outside they are `step3.scores` and `step2.scores`.
    """

    def __init__(self, values: Values, index: int, taken: Mapping[str, str]) -> None:
        self._values, self._taken = values, taken
        self._prefixes = {"": f"step{index}.", "previous.": f"step{index - 1}."}

    def __getitem__(self, name: str) -> np.ndarray:
        kind = "previous." if name.startswith("previous.") else ""
        return self._values[self._prefixes[kind] + self._taken.get(name, name).removeprefix(kind)]

    def __iter__(self) -> Iterator[str]:
        for kind, prefix in self._prefixes.items():
            yield from (
                kind + name.removeprefix(prefix) for name in self._values if name.startswith(prefix)
            )

    def __len__(self) -> int:
        return sum(1 for _ in self)


def run_steps(steps: Iterable[Step], given: Values | None = None) -> dict[str, np.ndarray]:
    """Return the values of all stages, each step from earlier values, or all from the given
    values.
    """
    values: dict[str, np.ndarray] = {}
    for step in steps:
        values |= step(values if given is None else given)
    return values
