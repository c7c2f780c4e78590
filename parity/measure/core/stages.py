"""Stages of the data flow: names, axes, order, and the loop over the calls of a cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Protocol, cast, overload

import numpy as np

from parity.measure.core.case import Case
from parity.measure.text import did_you_mean

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
    "grad.gate": ("B", "T", "G"),
    "grad.context": ("B", "N", "T", "H"),
    "grad.attn_weights": ("B", "N", "T", "S"),
    "grad.v": ("B", "K", "S", "H"),
    "grad.scores": ("B", "N", "T", "S"),
    "grad.bias": ("B", "N", "T", "S"),
    "grad.q": ("B", "N", "T", "H"),
    "grad.k": ("B", "K", "S", "H"),
    "grad.query": ("B", "T", "d_in"),
    "grad.key": ("B", "S", "d_kv"),
}
"""Stages in the order of the data flow, with their axes.

`mask` … `output` are computed by the stage functions, each from earlier ones. (`gate`, if any, is
the output of gate_proj; `latents`, if any, are the cached vectors, and `cache.keys` and
`cache.values` their expansions.) `module.*` is computed by the module, with attention weights;
`fused.output` by the module without them; `blocks.output` likewise, with even small cases block by
block; `plain.output` by the tutorial, `plain.py`. `grad.*` are gradients for a fixed cotangent of
the output, of the inputs and of each weight by name, and of stages if these are recorded, in the
order of the backward data flow; `fused.grad.*` and `blocks.grad.*` are the gradients on these
paths. With a cache, names start with the step: `step3.scores`.
"""

ALIASES = {
    "queries": "q",
    "query": "q",
    "keys": "k",
    "key": "k",
    "values": "v",
    "value": "v",
    "logits": "scores",
    "attn": "attn_weights",
    "attention": "attn_weights",
    "attention_weights": "attn_weights",
    "probs": "attn_weights",
    "weights": "attn_weights",
    "out": "output",
    "o": "output",
    "attn_output": "output",
}
"""Names that other libraries use for stages."""

FUSED_PATHS = ("fused", "blocks")
"""Paths of a module without attention weights."""

TUTORIAL = "plain"
"""Path of the tutorial, `plain.py` of each implementation: modules of its own."""

PATHS = ("module", *FUSED_PATHS, TUTORIAL)
"""Paths of modules. Stages of the stage functions have none."""

EXACT = ("mask", "cache.lengths")
"""Stages that are not floating point."""

# More digits than any number of calls has would be slow to read as a number.
_NAME = re.compile(rf"(?:step(\d{{1,9}})\.)?(?:({'|'.join(PATHS)})\.)?(grad\.)?(.*)", re.DOTALL)


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
        parts = [self.quantity]
        if self.is_gradient:
            parts.insert(0, "grad")
        if self.path:
            parts.insert(0, self.path)
        return ".".join(parts)

    def __str__(self) -> str:
        if self.step is None:
            return self.kind
        return f"step{self.step}.{self.kind}"

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
        if self.quantity == "output":
            return True
        # The next call reads the cache of a module.
        return self.path != "" and not self.quantity.startswith("cache.")

    @cached_property
    def has_local_value(self) -> bool:
        """Return whether it is also computed from the reference's earlier stages."""
        return not self.is_gradient and self.path != TUTORIAL

    @cached_property
    def is_attn_weights(self) -> bool:
        """Return whether it contains attention weights, of any layer."""
        return self.quantity.endswith("attn_weights")

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Letters of its axes."""
        kind = f"grad.{self.quantity}" if self.is_gradient else self.kind
        if kind in STAGES:
            return STAGES[kind]
        if self.quantity.endswith("weight"):
            return ("out", "in")
        return ("out",)


# As `axis_names` of `compare`: names may come from files, and most runs have fewer.
@lru_cache(maxsize=4096)
def stage_named(name: str) -> Stage:
    """Return the stage of a name."""
    match = cast(re.Match[str], _NAME.fullmatch(name))  # which matches any text
    digits, path, gradient, quantity = match.groups()
    step = None if digits is None else int(digits)
    return Stage(quantity, path or "", bool(gradient), step)


def did_you_mean_stage(name: str, known_names: Collection[str]) -> str:
    """Return a question about the stage that an unknown name may mean; empty if none is near."""
    stage = stage_named(name)
    quantity = ALIASES.get(stage.quantity.lower(), stage.quantity)
    meant = str(replace(stage, quantity=quantity))
    if meant in known_names:
        return f"did you mean {meant}?"
    return did_you_mean(name, known_names)


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
    """Return the stages of a case as functions, in the order of the data flow.

    With a cache, the stages of one call follow the call before. Each accepts the values of
    earlier stages by name, so that it can run on its own implementation's values (accumulated) or
    on another's (local).
    """
    if not case.is_cached:
        return [getattr(layer, name) for name in STEPS]
    return _StepsOfCalls(layer, len(case.chunks))


class _StepsOfCalls(Sequence[Step]):
    """Steps of a layer with a cache, one call after the other.

    A step is made when it is requested: a search makes thousands of layers, and runs few steps of
    each.
    """

    def __init__(self, layer: LayerStages, num_calls: int) -> None:
        self._layer = layer
        self._call = cache(layer.call)
        self._num_calls = num_calls

    def __len__(self) -> int:
        return self._num_calls * len(STEPS_OF_A_CALL)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | Sequence[Step]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        call, step = divmod(range(len(self))[index], len(STEPS_OF_A_CALL))
        return _step_of_call(self._layer, self._call, call, STEPS_OF_A_CALL[step])


CACHED = {"k": "cache.keys", "v": "cache.values"}
"""Stage that replaces the keys or values of the tokens in steps over all cached ones."""


def _step_of_call(layer: LayerStages, call: Callable[[int], Any], index: int, name: str) -> Step:
    """Return a step of one call with a cache, among the values of all calls.

    The call is created when its first step runs, because a candidate bug runs only a few.
    """
    replaced = CACHED if name in ("scores", "context") else {}

    def run(values: Values) -> dict[str, np.ndarray]:
        step = getattr(call(index), name, None) or getattr(layer, name)
        stages = step(_ValuesOfCall(values, index, replaced))
        return {f"step{index}.{stage}": x for stage, x in stages.items()}

    return run


class _ValuesOfCall(Values):
    """Values of all calls, as seen from one of them.

    Values of its own call have plain names, `scores`; values of the previous call are
    `previous.scores`, and of the first `first.scores`. Outside they are `step3.scores`,
    `step2.scores` and `step0.scores`.
    """

    def __init__(self, values: Values, index: int, replaced: Mapping[str, str]) -> None:
        self._values, self._replaced = values, replaced
        self._prefixes = {
            "": f"step{index}.",
            "previous.": f"step{index - 1}.",
            "first.": "step0.",
        }

    def __getitem__(self, name: str) -> np.ndarray:
        for call in ("previous.", "first."):
            if name.startswith(call):
                return self._values[self._prefixes[call] + name.removeprefix(call)]
        return self._values[self._prefixes[""] + self._replaced.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        for kind, prefix in self._prefixes.items():
            for name in self._values:
                if name.startswith(prefix):
                    yield kind + name.removeprefix(prefix)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def run_steps(steps: Iterable[Step], inputs: Values | None = None) -> dict[str, np.ndarray]:
    """Return the values of all stages, each step from earlier values, or all from some inputs."""
    values: dict[str, np.ndarray] = {}
    for step in steps:
        values |= step(values if inputs is None else inputs)
    return values


def of_paths(values: Values) -> dict[str, np.ndarray]:
    """Return the stages of each path of a module, which equal the stages of the stage functions."""
    stages = {}
    if "attn_weights" in values:
        stages["module.attn_weights"] = values["attn_weights"]
    for path in PATHS:
        stages[f"{path}.output"] = values["output"]
    return stages
