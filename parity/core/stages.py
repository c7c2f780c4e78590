"""The stages of the data flow: their names and axes, their order, and the loop over the calls of a cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, Protocol, cast

import numpy as np

from parity.core.case import Case

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
    "grad.query": ("B", "T", "d_in"),
    "grad.key": ("B", "S", "d_kv"),
    "grad.k": ("B", "K", "S", "H"),
    "grad.v": ("B", "K", "S", "H"),
    "grad.bias": ("B", "N", "T", "S"),
}
"""The stages in the order of the data flow, with the axes of each.

`mask` … `output` are computed by the stage functions, one from the other (`gate`, where there is one, is what gate_proj
gives; `latents`, where there are some, is what a cache keeps of tokens, and `cache.keys` and `cache.values` what it
stands for); `module.*` by the module as users call it, with its attention weights; `fused.output` by the module without
them, as users get it; `blocks.output` by the same where even small cases go block by block. `grad.*` are gradients for
a fixed cotangent of the output: of the inputs, and of each weight by its name; `fused.grad.*` and `blocks.grad.*` the
same on those paths. With a cache a stage's name begins with its step, `step3.scores`.
"""

FUSED_PATHS = ("fused", "blocks")
"""The paths of a module that give no attention weights."""

PATHS = ("module", *FUSED_PATHS)
"""The paths of a module. What the stage functions compute is on none."""

EXACT = ("mask", "cache.lengths")
"""What is no floating-point number."""

_NAME = re.compile(rf"(?:step(\d+)\.)?(?:({'|'.join(PATHS)})\.)?(grad\.)?(.*)", re.DOTALL)


@dataclass(frozen=True)
class Stage:
    """A stage by the parts of its name; of a name that is not known here all of it is the quantity.

    Attributes:
        quantity: what it is, on whatever path: `scores`, `cache.keys`; of a gradient what it is of, `q_proj.weight`.
        path: one of `PATHS`; empty where the stage functions compute it.
        is_gradient: whether it is the gradient of that quantity.
        step: the call that it is of, with a cache.
    """

    quantity: str
    path: str = ""
    is_gradient: bool = False
    step: int | None = None

    @cached_property
    def kind(self) -> str:
        """Its name without the step: `module.cache.keys`."""
        return ".".join(filter(None, [self.path, "grad" if self.is_gradient else "", self.quantity]))

    def __str__(self) -> str:
        return self.kind if self.step is None else f"step{self.step}.{self.kind}"

    @cached_property
    def is_known(self) -> bool:
        """Whether it is one of ours, a gradient or a weight, whose axes have letters."""
        return self.kind in STAGES or self.is_gradient or self.quantity.endswith(("weight", "bias"))

    @cached_property
    def is_exact(self) -> bool:
        """Whether it holds booleans or integers, which rounding does not touch."""
        return self.kind in STAGES and self.quantity in EXACT

    @cached_property
    def is_end(self) -> bool:
        """Whether no other stage is made of it: an output, or what a module gives beside it."""
        return self.quantity == "output" or (self.path != "" and not self.quantity.startswith("cache."))

    @cached_property
    def is_attn_weights(self) -> bool:
        """Whether it holds attention weights, of any layer."""
        return self.quantity.endswith("attn_weights")

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The letters of its axes."""
        anywhere = f"grad.{self.quantity}" if self.is_gradient else self.kind
        return STAGES.get(anywhere) or (("out", "in") if self.quantity.endswith("weight") else ("out",))


@lru_cache(maxsize=4096)
def stage_named(name: str) -> Stage:
    """The stage of that name."""
    step, path, gradient, quantity = cast(re.Match[str], _NAME.fullmatch(name)).groups()  # it matches any text
    return Stage(quantity, path or "", bool(gradient), None if step is None else int(step))


# ---- Their order -----------------------------------------------------------------------------------------------------

Values = Mapping[str, np.ndarray]
Step = Callable[[Values], dict[str, np.ndarray]]
"""Computes one or more stages from the stages before them, all by name."""


class LayerStages(Protocol):
    """A layer that computes the stages, each from the values of those before it, in NumPy's arrays.

    `whole` is the module as users call it. A call with a cache has a mask, qkv, cache, scores and whole of its own.
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
"""The methods of a layer, or of a call with a cache, that are its steps, in their order."""


def steps_of(layer: LayerStages, case: Case) -> Sequence[Step]:
    """The stages of a case as functions, in the order of the data flow, with a cache call by call.

    Each takes the values of the stages before it by name, so that it can run on its own implementation's values
    (accumulated) or on somebody else's (local).
    """
    if not case.is_cached:
        return [getattr(layer, name) for name in STEPS]
    call = cache(layer.call)
    return [_step_of_call(layer, call, index, name) for index in range(len(case.chunks)) for name in STEPS_OF_A_CALL]


CACHED = {"k": "cache.keys", "v": "cache.values"}
"""What a step that takes all keys and values that are cached takes for those of its tokens."""


def _step_of_call(layer: LayerStages, call: Callable[[int], Any], index: int, name: str) -> Step:
    """A step of one call with a cache, among the values of all calls: new tokens in, all up to each attended to.

    The call is made when the first of its steps runs: a mistake that is tried runs few.
    """
    taken = CACHED if name in ("scores", "context") else {}

    def run(values: Values) -> dict[str, np.ndarray]:
        step = getattr(call(index), name, None) or getattr(layer, name)
        return {f"step{index}.{stage}": x for stage, x in step(_ValuesOfCall(values, index, taken)).items()}

    return run


class _ValuesOfCall(Values):
    """The values of all calls, as a step of one of them takes them.

    Its own call's values go by their plain names, `scores`, and those of the call before by `previous.scores`; outside
    by `step3.scores` and `step2.scores`.
    """

    def __init__(self, values: Values, index: int, taken: Mapping[str, str]) -> None:
        self._values, self._taken = values, taken
        self._prefixes = {"": f"step{index}.", "previous.": f"step{index - 1}."}

    def __getitem__(self, name: str) -> np.ndarray:
        kind = "previous." if name.startswith("previous.") else ""
        return self._values[self._prefixes[kind] + self._taken.get(name, name).removeprefix(kind)]

    def __iter__(self) -> Iterator[str]:
        for kind, prefix in self._prefixes.items():
            yield from (kind + name.removeprefix(prefix) for name in self._values if name.startswith(prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def run_steps(steps: Iterable[Step], given: Values | None = None) -> dict[str, np.ndarray]:
    """The values of all stages: each step from the values before it, or all from the values given."""
    values: dict[str, np.ndarray] = {}
    for step in steps:
        values |= step(values if given is None else given)
    return values
